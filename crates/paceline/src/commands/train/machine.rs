//! Whether this machine, its data and its disk can do what is asked.

use crate::failure::Failure;
use crate::flags::{Carrier, Keeping, Launch, Problems, Starter};
use paceline_exec::data::{Data, DataSource, Reads};
use paceline_exec::hugging_face::can_export;
use paceline_exec::{Device, probe, resident};
use paceline_plan::ids::Rank;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::strategy::Store;
use paceline_plan::units::Bytes;
use paceline_sim::cluster::{Cluster, preset};
use std::path::Path;

/// The most ranks that one machine can be asked to be.
const MOST_RANKS: u32 = 1024;

/// Notes data that the model cannot learn from, and a model that cannot be exported.
pub(super) fn can_learn(
    model: &Model,
    plan: &Plan,
    source: &DataSource,
    keeping: &Keeping,
    problems: &mut Problems,
) {
    if let Err(error) = Data::new(source, Reads::of(model, plan.strategy.seq), 0) {
        problems.say("--data", error.to_string());
    }
    if let (Some(_), Err(error)) = (&keeping.export_hf, can_export(model)) {
        problems.say("--export-hf", error.to_string());
    }
}

/// Notes a plan that this machine cannot hold: to find out by trying could take it down.
pub(super) fn can_start(plan: &Plan, problems: &mut Problems) {
    let ranks = plan.mesh.world();
    if ranks > MOST_RANKS {
        problems.say(
            "--ranks",
            format!(
                "{ranks} ranks are more than the {MOST_RANKS} that one machine can be asked to be"
            ),
        );
        return;
    }
    let beside = |rank: u32| match plan.strategy.store {
        Store::Host => plan.program(Rank(rank)).memory.stored().0,
        Store::Disk => 0,
    };
    let needed = planned(plan).into_iter().chain((0..ranks).map(beside));
    let needed = Bytes(needed.fold(0u64, u64::saturating_add));
    if let Some(available) = resident::available().filter(|available| needed.0 > *available) {
        problems.say(
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

/// Notes the rank that needs the most memory, if that is more than a rank may have.
pub(super) fn fits_limit(plan: &Plan, limit: Option<Bytes>, problems: &mut Problems) {
    let most = (0..).map(Rank).zip(planned(plan)).max_by_key(|(_, bytes)| *bytes);
    if let (Some(limit), Some((rank, bytes))) = (limit, most)
        && bytes > limit.0
    {
        problems.say(
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

/// The arena of each rank; the first one's with what all of them share.
pub(super) fn planned(plan: &Plan) -> Vec<u64> {
    let memory = |rank| plan.program(Rank(rank)).memory;
    let shared = memory(0).shared().0;
    let beside = |rank| if rank == 0 { shared } else { 0 };
    (0..plan.mesh.world()).map(|rank| memory(rank).total().0 + beside(rank)).collect()
}

/// Has ranks that share their weights run as threads, and notes what asks for processes.
pub(super) fn share_a_process(plan: &Plan, launch: &mut Launch, problems: &mut Problems) {
    let sync = plan.strategy.sync;
    if plan.programs.iter().all(|program| program.memory.shared().0 == 0) {
        return;
    }
    let mut refuse = |flag, works: &str| {
        let why = "ranks that share their weights are threads of one process";
        problems.say(flag, format!("{why}; with --sync {sync} {works}"));
    };
    match launch.transport {
        Carrier::Auto | Carrier::Thread => launch.transport = Carrier::Thread,
        Carrier::SharedMemory | Carrier::Tcp => refuse("--transport", "use auto or thread"),
    }
    if launch.by != Starter::Local {
        refuse("--launch", "use local");
    }
    if launch.recovery.most > 0 {
        refuse("--max-restarts", "leave it out: they are lost together");
    }
    if launch.device != Device::Cpu {
        refuse("--device", "use cpu");
    }
}

/// What to say if the host of a virtual machine has moved its cores since it was calibrated: what ranks exchange
/// inside a host then takes another time than was predicted.
pub(super) fn moved(cluster: &Cluster) -> Option<String> {
    let then = cluster.measured.as_ref()?.apart?;
    let now = probe::apart().filter(|now| probe::were_moved(*now, then))?;
    let (now, then) = (now.0 * 1e9, then.0 * 1e9);
    Some(format!(
        "note: the cores are {now:.0} ns apart now and were {then:.0} when this machine was calibrated (`paceline bench \
         cores`): exchanges take {} than predicted",
        if now > then { "longer" } else { "less" }
    ))
}

/// Where a run leaves what was seen of its machine.
pub(super) const MACHINE: &str = "machine.toml";

/// The cluster that stands for this machine: as whoever launched this rank has left it, or as a common one
/// with a core for each rank, which takes turns with others where there are more ranks than cores.
pub(super) fn this_machine(ranks: u32, launched: Option<&Path>) -> Result<Cluster, Failure> {
    let seen = launched.and_then(|directory| std::fs::read_to_string(directory.join(MACHINE)).ok());
    if let Some(seen) = seen.and_then(|text| Cluster::parse(&text, MACHINE).ok()) {
        return Ok(seen);
    }
    let mut cluster =
        preset::get("laptop").map_err(|error| Failure::flag("--cluster", error.to_string()))?;
    if let Some(cores) = cluster.dimensions.first_mut() {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        cores.size = u32::try_from(available).unwrap_or(u32::MAX);
    }
    Ok(cluster.crowded(ranks))
}
