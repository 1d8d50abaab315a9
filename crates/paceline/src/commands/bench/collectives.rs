//! `paceline bench collectives`: how fast ranks talk to each other.
//!
//! For every number of ranks and every transport, this program starts itself once per rank, with its
//! place in a variable; rank 0 of such a world measures and prints, as `nccl-tests` does. With
//! `--launch env` the ranks are there already, on one host or on many, and are measured as they are.

use crate::failure::Failure;
use crate::flags::{
    CommonFlags, Launch, LaunchFlags, Origins, Problems, Starter, size, whole, word,
};
use crate::launch;
use anyhow::{Context, anyhow};
use clap::Args;
use paceline_comm::measure::{bus_factor, least_traffic, measure};
use paceline_comm::process::{ProcessOptions, Wires, connect};
use paceline_comm::rendezvous::{Hub, HubOptions};
use paceline_comm::{CollectiveSpec, CommError, Secret, Transport, affinity, thread};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction, resolve};
use paceline_plan::ids::Rank;
use serde::Serialize;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Measure collectives between ranks of this machine, or of several
///
/// Prints a table as nccl-tests does: the median time of a collective, the vector's size over it
/// (algbw), and that scaled to what a link carries (busbw). Results are checked.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather or all_to_all; several with
    /// commas [default: all_reduce]
    #[arg(long, value_name = "OP,…", help_heading = "Collectives")]
    op: Option<String>,
    /// How many ranks; several with commas [default: 2]
    #[arg(long, value_name = "N,…", allow_negative_numbers = true, help_heading = "Collectives")]
    ranks: Option<String>,
    /// Sizes of the vector, in bytes or with a unit [default: 4KiB,64KiB,1MiB,16MiB,128MiB]
    #[arg(
        long,
        value_name = "BYTES,…",
        allow_negative_numbers = true,
        help_heading = "Collectives"
    )]
    sizes: Option<String>,
    /// thread, shm, tcp or auto (shared memory where there is any); several with commas
    /// [default: auto]
    #[arg(long, value_name = "NAME,…", help_heading = "Collectives")]
    transport: Option<String>,
    /// auto, ring, halving-doubling, direct, read-reduce, …: as for `paceline collective`; several with
    /// commas [default: what suits the transport]
    #[arg(long, value_name = "ALGORITHM,…", help_heading = "Collectives")]
    algorithm: Option<String>,
    /// Whether sums are taken in a fixed order (canonical) or in the cheapest [default: free]
    #[arg(long, value_name = "canonical|free", help_heading = "Collectives")]
    order: Option<String>,
    /// Milliseconds to spend on each line of the table [default: 300]
    #[arg(long, value_name = "MS", allow_negative_numbers = true, help_heading = "Collectives")]
    budget: Option<String>,
    /// Vectors in ordinary memory, not in memory that neighbours can reach
    #[arg(long, help_heading = "Collectives")]
    private: bool,
    /// Who starts the ranks: local (this command) or env (torchrun, mpirun or srun has, on one host or
    /// on several, and has put rank, world size and the address of rank 0 into the environment)
    /// [default: local]
    #[arg(long, value_name = "HOW", help_heading = "Ranks")]
    launch: Option<String>,
    /// Address on which ranks of another launcher may listen; 0.0.0.0 is any [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS", help_heading = "Ranks")]
    bind: Option<String>,
    /// File with the job's secret, which all ranks of another launcher must know; PACELINE_SECRET
    /// serves too
    #[arg(long, value_name = "FILE", help_heading = "Ranks")]
    secret_file: Option<PathBuf>,
    /// Seconds without a sign of life after which a rank is given up; death is noticed at once
    /// [default: 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "Ranks")]
    silence: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline bench collectives
  paceline bench collectives --op all_reduce,all_gather --ranks 2,4,8 --transport shm,tcp --json
  mpirun -np 4 --host a,b,c,d -x MASTER_ADDR=a -x MASTER_PORT=29500 -x PACELINE_SECRET \\
         paceline bench collectives --launch env --bind 0.0.0.0 --algorithm ring,halving-doubling";

/// What a rank is told by its parent: `wires rank world hub`.
const ROLE: &str = "PACELINE_BENCH_RANK";
const SECRET: &str = "PACELINE_BENCH_SECRET";
const PATIENCE: Duration = Duration::from_secs(60);
const MOST_RANKS: u64 = 256;

/// What is measured, checked.
struct Request {
    ops: Vec<CollectiveKind>,
    ranks: Vec<u32>,
    sizes: Vec<usize>,
    carriers: Vec<Carrier>,
    algorithms: Vec<Algorithm>,
    order: Order,
    budget: Duration,
    private: bool,
    launch: Launch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Thread,
    Process(Wires),
}

impl Carrier {
    const NAMES: [(&'static str, Self); 4] = [
        ("thread", Self::Thread),
        ("shm", Self::Process(Wires::SharedMemory)),
        ("tcp", Self::Process(Wires::Tcp)),
        ("auto", Self::Process(Wires::Auto)),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, carrier)| *carrier == self).map_or("auto", |(name, _)| name)
    }
}

#[derive(Serialize)]
struct Record {
    op: &'static str,
    transport: &'static str,
    algorithm: String,
    ranks: u32,
    bytes: u64,
    median_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    /// What memory must carry at least where ranks share it, over the time.
    memory_gbps: f64,
    wrong: u64,
}

/// Measures and prints.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let request = check(flags, origins)?;
    let output = flags.common.output();
    if let Ok(role) = std::env::var(ROLE) {
        return take_part(&role, &request, flags).map_err(Failure::Run);
    }
    if request.launch.by == Starter::Environment {
        return join_others(&request, flags);
    }
    if !output.is_json() {
        output.people(&heading())?;
    }
    for &ranks in &request.ranks {
        for &carrier in &request.carriers {
            match carrier {
                Carrier::Thread => threads(ranks, &request, flags),
                Carrier::Process(_) => processes(carrier, ranks, &request),
            }
            .map_err(Failure::Run)?;
        }
    }
    Ok(())
}

fn check(flags: &Flags, origins: Origins) -> Result<Request, Failure> {
    let mut problems = Problems::new(origins);
    let list = |text: &Option<String>, usual: &str| -> Vec<String> {
        let text = text.as_deref().unwrap_or(usual);
        text.split(',').map(|word| word.trim().to_owned()).collect()
    };
    let ops = list(&flags.op, "all_reduce")
        .into_iter()
        .filter_map(|op| word("--op", &Some(op), &mut problems))
        .collect();
    let ranks = list(&flags.ranks, "2")
        .iter()
        .filter_map(|ranks| whole("--ranks", Some(ranks), 1..=MOST_RANKS, &mut problems))
        .filter_map(|ranks| u32::try_from(ranks).ok())
        .collect();
    let sizes: Vec<usize> = list(&flags.sizes, "4KiB,64KiB,1MiB,16MiB,128MiB")
        .iter()
        .filter_map(|bytes| size("--sizes", Some(bytes), &mut problems))
        .filter_map(|bytes| usize::try_from(bytes.0).ok())
        .collect();
    if let Some(bytes) = sizes.iter().find(|bytes| !bytes.is_multiple_of(4) || **bytes > 1 << 36) {
        problems.say("--sizes", format!("{bytes} bytes are not 4-byte elements of at most 64 GiB"));
    }
    let mut carriers = Vec::new();
    for name in list(&flags.transport, "auto") {
        match Carrier::NAMES.iter().find(|(known, _)| *known == name) {
            Some((_, carrier)) => carriers.push(*carrier),
            None => {
                problems.say("--transport", format!("'{name}' is not thread, shm, tcp or auto"))
            }
        }
    }
    let algorithms = match &flags.algorithm {
        None => Vec::new(),
        Some(_) => list(&flags.algorithm, "")
            .into_iter()
            .filter_map(|algorithm| word("--algorithm", &Some(algorithm), &mut problems))
            .collect(),
    };
    let order = word("--order", &flags.order, &mut problems).unwrap_or(Order::Free);
    let budget = whole("--budget", flags.budget.as_deref(), 1..=600_000, &mut problems);
    let budget = Duration::from_millis(budget.unwrap_or(300));
    let (launch, bind) = (flags.launch.clone(), flags.bind.clone());
    let silence = flags.silence.clone().or_else(|| Some(PATIENCE.as_secs().to_string()));
    let secret_file = flags.secret_file.clone();
    let launch = LaunchFlags { launch, bind, secret_file, silence, ..LaunchFlags::default() };
    let launch = launch.check(&mut problems);
    if launch.by == Starter::Environment {
        if flags.ranks.is_some() {
            problems.say("--ranks", "with --launch env there are as many as were started");
        }
        if !matches!(carriers[..], [Carrier::Process(_)]) {
            let text = "with --launch env ranks are processes that meet once: auto, shm or tcp";
            problems.say("--transport", text);
        }
    }
    if !problems.is_empty() {
        return Err(problems.into());
    }
    let private = flags.private;
    Ok(Request { ops, ranks, sizes, carriers, algorithms, order, budget, private, launch })
}

/// The ranks of one world as threads.
fn threads(ranks: u32, request: &Request, flags: &Flags) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let rank = |mut transport| {
            scope.spawn(move || go_through(&mut transport, Carrier::Thread, request, flags))
        };
        let threads: Vec<_> = thread::world(ranks).into_iter().map(rank).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a rank panicked"))??;
        }
        Ok(())
    })
}

/// The ranks of one world as processes: whatever happens, none of them stays.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn processes(carrier: Carrier, ranks: u32, request: &Request) -> anyhow::Result<()> {
    let secret = Secret::random()?;
    let hub = Hub::start(HubOptions {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        secret: secret.clone(),
        world: ranks,
        in_rank: None,
        join: PATIENCE,
        detection: request.launch.silence,
    })?;
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let role = format!("{} {rank} {ranks} {}", carrier.name(), hub.address());
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(ROLE, role).env(SECRET, secret.as_text());
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.stdin(Stdio::null()).spawn();
        children.0.push(child.with_context(|| format!("rank {rank} cannot be started"))?);
    }
    // The hub ends with the first failure, or when all have left; who failed has said why.
    let ended = hub.join();
    for child in &mut children.0 {
        let status = child.wait()?;
        if ended.is_ok() && !status.success() {
            return Err(anyhow!("a rank ended with {status}"));
        }
    }
    Ok(ended?)
}

/// What a started process does.
fn take_part(role: &str, request: &Request, flags: &Flags) -> anyhow::Result<()> {
    let wrong = || anyhow!("{ROLE} is '{role}', which this program did not write: unset it");
    let words: Vec<&str> = role.split(' ').collect();
    let [name, rank, world, hub] = words[..] else { return Err(wrong()) };
    let carrier = Carrier::NAMES.iter().find(|(known, _)| *known == name);
    let Some((_, carrier @ Carrier::Process(wires))) = carrier else { return Err(wrong()) };
    let (rank, world): (u32, u32) = (rank.parse()?, world.parse()?);
    let secret = Secret::from_text(&std::env::var(SECRET).unwrap_or_default())?;
    let mut options = ProcessOptions::new(Rank(rank), world, hub.parse()?, secret);
    options.hub_in_rank_0 = false;
    options.wires = *wires;
    options.detection = request.launch.silence;
    affinity::keep_to_share(rank, world);
    go_through(&mut connect(&options)?, *carrier, request, flags)
}

/// What a process does that another launcher has started.
fn join_others(request: &Request, flags: &Flags) -> Result<(), Failure> {
    let Some(place) = launch::place(&request.launch)? else { return Ok(()) };
    let mut options =
        ProcessOptions::new(Rank(place.rank), place.world, place.hub, place.secret.clone());
    options.bind = request.launch.bind;
    options.detection = request.launch.silence;
    let [carrier @ Carrier::Process(wires)] = request.carriers[..] else { return Ok(()) };
    options.wires = wires;
    let output = flags.common.output();
    if place.rank == 0 && !output.is_json() {
        output.people(&heading())?;
    }
    let mut transport = connect(&options).map_err(|error| Failure::Run(error.into()))?;
    go_through(&mut transport, carrier, request, flags).map_err(Failure::Run)
}

/// Measures everything that one world is asked for.
fn go_through(
    transport: &mut dyn Transport,
    carrier: Carrier,
    request: &Request,
    flags: &Flags,
) -> anyhow::Result<()> {
    let (me, world) = (transport.rank(), transport.world());
    let largest = request.sizes.iter().copied().max().unwrap_or(0);
    let mut shared = match request.private {
        true => None,
        false => transport.neighbourly_memory(largest)?,
    };
    let mut private = if shared.is_some() { Vec::new() } else { vec![0; largest] };
    paceline_exec::prefer_large_pages(&mut private);
    let mut sequence = 0;
    for &kind in &request.ops {
        let algorithms = match request.algorithms.as_slice() {
            [] => vec![usual(kind, carrier, transport.shares_memory())],
            chosen => chosen.to_vec(),
        };
        for algorithm in algorithms {
            let Ok(resolved) = resolve(kind, algorithm, world, request.order) else {
                note(
                    me,
                    flags,
                    &format!("{kind} by {algorithm} is impossible among {world} ranks"),
                );
                continue;
            };
            for &size in &request.sizes {
                let size = if kind == CollectiveKind::AllToAll {
                    size / 4 / world as usize * 4 * world as usize
                } else {
                    size
                };
                let (order, reduction) = (request.order, Reduction::Sum);
                let spec = CollectiveSpec { kind, algorithm, order, reduction, root: 0, block: 1 };
                let data = match &mut shared {
                    Some(shared) => &mut shared[..size],
                    None => &mut private[..size],
                };
                let mut output =
                    if kind == CollectiveKind::AllToAll { vec![0; size] } else { Vec::new() };
                let output = (kind == CollectiveKind::AllToAll).then_some(&mut output[..]);
                let settings = (sequence, request.budget, PATIENCE);
                let measured = measure(transport, &spec, data, output, settings)?;
                sequence += 8;
                if measured.wrong > 0 {
                    let reason = format!("{} elements of {kind} are wrong", measured.wrong);
                    transport.abort(&reason);
                    return Err(CommError::Failed { rank: me, reason }.into());
                }
                if me == Rank(0) {
                    let seconds = measured.median.as_secs_f64().max(1e-12);
                    let algbw = size as f64 / seconds / 1e9;
                    let traffic = least_traffic(kind, world, size as u64) as f64;
                    say(
                        flags,
                        &Record {
                            op: kind.name(),
                            transport: carrier.name(),
                            algorithm: resolved.to_string(),
                            ranks: world,
                            bytes: size as u64,
                            median_us: seconds * 1e6,
                            algbw_gbps: algbw,
                            busbw_gbps: algbw * bus_factor(kind, world),
                            memory_gbps: traffic / seconds / 1e9,
                            wrong: measured.wrong,
                        },
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// The algorithm that is measured where none is asked for.
fn usual(kind: CollectiveKind, carrier: Carrier, shares_memory: bool) -> Algorithm {
    match carrier {
        Carrier::Process(Wires::SharedMemory | Wires::Auto) if shares_memory => match kind {
            CollectiveKind::AllReduce => Algorithm::Direct,
            _ => Algorithm::ReadReduce,
        },
        _ => Algorithm::Auto,
    }
}

fn note(me: Rank, flags: &Flags, text: &str) {
    if me == Rank(0) {
        flags.common.output().note(text);
    }
}

fn say(flags: &Flags, record: &Record) -> anyhow::Result<()> {
    let output = flags.common.output();
    if output.is_json() {
        return Ok(output.object(record)?);
    }
    let Record { op, transport, algorithm, ranks, bytes, .. } = record;
    let mut line = String::new();
    write!(line, "{op:>14} {transport:>9} {algorithm:>16} {ranks:>5} {bytes:>11}")?;
    write!(line, " {:>12.2} {:>8.2}", record.median_us, record.algbw_gbps)?;
    writeln!(line, " {:>8.2} {:>8.2} {:>6}", record.busbw_gbps, record.memory_gbps, record.wrong)?;
    Ok(output.people(&line)?)
}

fn heading() -> String {
    format!(
        "{:>14} {:>9} {:>16} {:>5} {:>11} {:>12} {:>8} {:>8} {:>8} {:>6}\n",
        "op",
        "transport",
        "algorithm",
        "ranks",
        "bytes",
        "median µs",
        "algbw",
        "busbw",
        "memory",
        "wrong"
    )
}
