//! Checks that this machine, its data and its disk can run the request.

use crate::failure::Failure;
use crate::flags::{CheckpointOptions, Launch, LaunchMode, Problems, StrategyFlags, read_text};
use crate::launch::RankIdentity;
use paceline_comm::TransportKind;
use paceline_exec::data::{Data, DataSource, SampleKind};
use paceline_exec::hugging_face::can_export;
use paceline_exec::{Device, gpus, probe, resident};
use paceline_plan::collective::{Algorithm, Library};
use paceline_plan::ids::Rank;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::strategy::Store;
use paceline_plan::units::Bytes;
use paceline_sim::cluster::{Cluster, preset};
use std::path::Path;

/// Maximum number of ranks on one machine.
const MOST_RANKS: u32 = 1024;

/// Number of consecutive ranks of the run that can map each other's memory: all of those that this
/// command starts, or as many as an outside launcher put on each host.
pub(super) fn shm_domain(launch: &Launch, strategy: &StrategyFlags) -> Option<u64> {
    let threads = strategy.sync.as_deref() == Some("hogwild");
    match (launch.transport, launch.by) {
        (TransportKind::Thread | TransportKind::Tcp | TransportKind::Mpi, _) => None,
        _ if threads => None,
        (TransportKind::Auto | TransportKind::Shm, LaunchMode::Local) => {
            // Ranks of one host still reach each other through shared memory, message by message.
            (!launch.spread || launch.env.is_some()).then_some(u64::MAX)
        }
        (TransportKind::Auto | TransportKind::Shm, LaunchMode::Environment) => {
            let found = launch.env.as_ref()?;
            let whole = |local: &u32| found.world.is_some_and(|all| all.is_multiple_of(*local));
            found.local_world.filter(whole).map(u64::from)
        }
    }
}

/// Reports data that the model cannot learn from, and a model that cannot be exported.
pub(super) fn can_learn(
    model: &Model,
    plan: &Plan,
    source: &DataSource,
    keeping: &CheckpointOptions,
    problems: &mut Problems,
) {
    if let Err(error) = Data::new(source, SampleKind::of(model, plan.strategy.seq), 0) {
        problems.add("--data", error.to_string());
    }
    if let (Some(_), Err(error)) = (&keeping.export_hf, can_export(model)) {
        problems.add("--export-hf", error.to_string());
    }
}

/// Reports a plan that does not fit this machine; trying it could bring the machine down.
pub(super) fn can_start(plan: &Plan, launch: &Launch, problems: &mut Problems) {
    if launch.spread {
        // Every rank checks what it needs on its own host.
        return;
    }
    let ranks = plan.mesh.world();
    if ranks > MOST_RANKS {
        problems
            .add("--ranks", format!("one machine runs at most {MOST_RANKS} ranks, not {ranks}"));
        return;
    }
    if let Device::Cuda(first) = launch.device {
        has_gpus(plan, launch, first, problems);
        return;
    }
    let extra = |rank: u32| match plan.strategy.store {
        Store::Host => plan.program(Rank(rank)).memory.stored().0,
        Store::Disk => 0,
    };
    let needed = planned(plan).into_iter().chain((0..ranks).map(extra));
    let needed = Bytes(needed.fold(0u64, u64::saturating_add));
    if let Some(available) = resident::available().filter(|available| needed.0 > *available) {
        problems.add(
            "--model",
            format!(
                "{} on {ranks} ranks needs {needed}, and this machine has {} to give; \
                 `paceline simulate` needs no such memory",
                plan.model,
                Bytes(available)
            ),
        );
    }
}

/// Reports GPUs that are missing, or too small for the plan. The host stages what they load and read
/// back.
fn has_gpus(plan: &Plan, launch: &Launch, first: usize, problems: &mut Problems) {
    let gpus = match gpus() {
        Ok(gpus) => gpus,
        Err(error) => return problems.add("--device", error.to_string()),
    };
    let planned = planned(plan);
    let ranks = planned.len();
    if launch.transport == TransportKind::Thread && ranks > 1 {
        let text = "ranks on GPUs are processes; use auto, shm or tcp";
        return problems.add("--transport", text);
    }
    let needed = if launch.share_device { 1 } else { ranks };
    if gpus.len() < first + needed {
        let (there, numbers) = (gpus.len(), first..first + needed);
        let share =
            if ranks > 1 { "; --share-device puts all ranks on one, as a test" } else { "" };
        let text = format!(
            "{ranks} ranks need the GPUs {} to {}, and this machine has {there}{share}",
            numbers.start,
            numbers.end - 1
        );
        return problems.add("--device", text);
    }
    let on = |gpu: usize| match launch.share_device {
        true => planned.iter().sum(),
        false => planned[gpu],
    };
    for (at, gpu) in gpus[first..first + needed].iter().enumerate() {
        if on(at) > gpu.memory {
            let (number, name) = (first + at, &gpu.name);
            let text = format!(
                "{} needs {} on GPU {number}, and that {name} has {}; --zero, --recompute, --tp, --pp or \
                 a smaller --micro-batch need less",
                plan.model,
                Bytes(on(at)),
                Bytes(gpu.memory)
            );
            return problems.add("--device", text);
        }
    }
}

/// GPU of a rank: the host's first, or the one with the rank's number on its host.
pub(super) fn device_of(launch: &Launch, place: Option<&RankIdentity>) -> Device {
    match (launch.device, place) {
        (Device::Cuda(first), Some(place)) if !launch.share_device => {
            Device::Cuda(first + place.local_rank as usize)
        }
        (device, _) => device,
    }
}

/// Environment in which NCCL does what the plan and the flags say.
pub(super) fn library_variables(plan: &Plan, launch: &Launch) -> Vec<(&'static str, String)> {
    let mut variables = Vec::new();
    let mut set = |name, value: &str| variables.push((name, value.to_owned()));
    if launch.library != Some(Library::Nccl) {
        return variables;
    }
    // Connections made later would block the thread that queues other exchanges.
    set("NCCL_RUNTIME_CONNECT", "0");
    // One queue for each stream, so that none waits behind another.
    set("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    if plan.strategy.collective == Algorithm::Ring {
        set("NCCL_ALGO", "Ring");
    }
    if launch.share_device {
        // Ranks on one GPU reach each other by sockets of this machine alone.
        for (name, value) in [
            ("NCCL_SOCKET_IFNAME", "lo"),
            ("NCCL_NET", "Socket"),
            ("NCCL_IB_DISABLE", "1"),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_MNNVL_ENABLE", "0"),
            ("NCCL_MAX_CTAS", "2"),
            ("NCCL_PROTO", "Simple"),
        ] {
            set(name, value);
        }
    }
    variables
}

/// Reports the rank that needs the most memory, if that exceeds the limit per rank.
pub(super) fn fits_limit(plan: &Plan, limit: Option<Bytes>, problems: &mut Problems) {
    let most = (0..).map(Rank).zip(planned(plan)).max_by_key(|(_, bytes)| *bytes);
    if let (Some(limit), Some((rank, bytes))) = (limit, most)
        && bytes > limit.0
    {
        problems.add(
            "--memory-limit",
            format!(
                "a rank may have {limit}, and {} needs {} on rank {rank}; `paceline plan` shows what \
                 for, and --offload, --zero, --recompute, --tp, --pp or a smaller --micro-batch need less",
                plan.model,
                Bytes(bytes)
            ),
        );
    }
}

/// Arena size of each rank; the first rank's includes the memory shared by all.
pub(super) fn planned(plan: &Plan) -> Vec<u64> {
    let memory = |rank| plan.program(Rank(rank)).memory;
    let shared = memory(0).shared().0;
    let extra = |rank| if rank == 0 { shared } else { 0 };
    (0..plan.mesh.world()).map(|rank| memory(rank).total().0 + extra(rank)).collect()
}

/// Makes ranks that share their weights threads, and reports flags that need processes.
pub(super) fn share_a_process(plan: &Plan, launch: &mut Launch, problems: &mut Problems) {
    let sync = plan.strategy.sync;
    if plan.programs.iter().all(|program| program.memory.shared().0 == 0) {
        return;
    }
    let mut refuse = |flag, works: &str| {
        let why = "ranks that share their weights are threads of one process";
        problems.add(flag, format!("{why}; with --sync {sync} {works}"));
    };
    match launch.transport {
        TransportKind::Auto | TransportKind::Thread => launch.transport = TransportKind::Thread,
        TransportKind::Shm | TransportKind::Tcp | TransportKind::Mpi => {
            refuse("--transport", "use auto or thread");
        }
    }
    if launch.by != LaunchMode::Local {
        refuse("--launch", "use local");
    }
    if launch.recovery.most > 0 {
        refuse("--max-restarts", "leave it out: ranks that are threads fail together");
    }
    if launch.device != Device::Cpu {
        refuse("--device", "use cpu");
    }
}

/// Returns a note if the host of a virtual machine has migrated its cores since the calibration:
/// exchanges inside a host then take another time than predicted.
pub(super) fn core_migration_note(cluster: &Cluster) -> Option<String> {
    let then = cluster.measured.as_ref()?.core_round_trip?;
    let now = probe::core_round_trip().filter(|now| probe::cores_migrated(*now, then))?;
    let (now, then) = (now.0 * 1e9, then.0 * 1e9);
    Some(format!(
        "note: the core round trip is {now:.0} ns now and was {then:.0} ns during calibration (`paceline bench core-to-core`): exchanges take {} than predicted",
        if now > then { "longer" } else { "less" }
    ))
}

/// File in the run's directory with the quick profile of its machine.
pub(super) const MACHINE: &str = "machine.toml";

/// The cluster that represents this machine: as written by the launcher of this rank, or else a
/// common machine with this one's number of cores, oversubscribed if there are more ranks than
/// cores.
pub(super) fn this_machine(ranks: u32, launched: Option<&Path>) -> Result<Cluster, Failure> {
    let seen = launched.and_then(|directory| read_text(&directory.join(MACHINE)).ok());
    if let Some(seen) = seen.and_then(|text| Cluster::parse(&text, MACHINE).ok()) {
        return Ok(seen);
    }
    let mut cluster =
        preset::get("laptop").map_err(|error| Failure::flag("--cluster", error.to_string()))?;
    if let Some(cores) = cluster.dimensions.first_mut() {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        cores.size = u32::try_from(available).unwrap_or(u32::MAX);
    }
    Ok(cluster.with_oversubscribed_cores(ranks))
}
