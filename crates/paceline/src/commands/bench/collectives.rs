//! `paceline bench collectives`: performance of collectives between ranks.
//!
//! For every rank count and every transport, this program starts itself once per rank and passes
//! the rank's identity in an environment variable. Rank 0 of such a world measures and prints, as
//! `nccl-tests` does. With `--launch env` the ranks are already running, on one host or on many,
//! and are measured as they are.

use crate::failure::Failure;
use crate::flags::{
    CommonFlags, Launch, LaunchFlags, LaunchMode, Origins, Problems, size, whole, word,
};
use crate::launch;
use anyhow::{Context, anyhow};
use clap::Args;
use paceline_comm::measure::{bus_factor, least_traffic, measure, measure_native};
use paceline_comm::native::NativeWorld;
use paceline_comm::native::mpi::MpiWorld;
use paceline_comm::process::{ProcessOptions, connect};
use paceline_comm::rendezvous::{RendezvousOptions, RendezvousServer};
use paceline_comm::{
    CollectiveSpec, CommError, Secret, Transport, TransportKind, Vector, affinity, thread,
};
use paceline_plan::collective::{
    Algorithm, CollectiveKind, Library, Reduction, SummationOrder, resolve,
};
use paceline_plan::ids::Rank;
use serde::Serialize;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Measure collectives between ranks of this machine, or of several
///
/// Prints a table as nccl-tests does: the median time of a collective, the vector's size divided by
/// it (algbw), and that scaled to the traffic of one link (busbw). Results are checked.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Collectives, separated by commas: all_reduce, reduce_scatter, all_gather, broadcast, reduce,
    /// gather, scatter, all_to_all, send_recv (every rank to the next) or barrier [default:
    /// all_reduce]
    #[arg(long, value_name = "OP,…", help_heading = "Collectives")]
    op: Option<String>,
    /// Numbers of ranks, separated by commas [default: 2]
    #[arg(long, value_name = "N,…", allow_negative_numbers = true, help_heading = "Collectives")]
    ranks: Option<String>,
    /// Vector sizes, in bytes or with a unit [default: 4KiB,64KiB,1MiB,16MiB,128MiB]
    #[arg(
        long,
        value_name = "BYTES,…",
        allow_negative_numbers = true,
        help_heading = "Collectives"
    )]
    sizes: Option<String>,
    /// Transports, separated by commas: thread, shm, tcp, mpi or auto (shared memory if
    /// available) [default: auto]
    #[arg(long, value_name = "NAME,…", help_heading = "Collectives")]
    transport: Option<String>,
    /// Algorithms, separated by commas: auto, ring, halving-doubling, direct, shared-memory, …, as
    /// for `paceline collective` [default: what suits the transport]
    #[arg(long, value_name = "ALGORITHM,…", help_heading = "Collectives")]
    algorithm: Option<String>,
    /// Summation order: canonical (fixed) or free (the cheapest) [default: free]
    #[arg(long, value_name = "canonical|free", help_heading = "Collectives")]
    order: Option<String>,
    /// Library that carries out the collectives: mpi, if mpirun has started the ranks, or none
    /// [default: none]
    #[arg(long, value_name = "LIBRARY", help_heading = "Collectives")]
    library: Option<String>,
    /// Milliseconds to spend on each line of the table [default: 300]
    #[arg(long, value_name = "MS", allow_negative_numbers = true, help_heading = "Collectives")]
    budget: Option<String>,
    /// Allocate vectors in private memory, not in memory shared with other ranks
    #[arg(long, help_heading = "Collectives")]
    private: bool,
    /// Launcher of the ranks: local (this command), env (mpirun, srun, torchrun or Kubernetes, on one
    /// host or on several), or auto: env if such a launcher has started this process [default: auto]
    #[arg(long, value_name = "HOW", help_heading = "Ranks")]
    launch: Option<String>,
    /// Address that ranks of another launcher listen on; 0.0.0.0 is any [default: that of the way to
    /// rank 0]
    #[arg(long, value_name = "ADDRESS", help_heading = "Ranks")]
    bind: Option<String>,
    /// Network interface that ranks of another launcher listen on, instead of an address
    #[arg(long, value_name = "NAME", help_heading = "Ranks")]
    interface: Option<String>,
    /// File with the job's secret, the same for all ranks of another launcher; PACELINE_SECRET
    /// works too
    #[arg(long, value_name = "FILE", help_heading = "Ranks")]
    secret_file: Option<PathBuf>,
    /// Encrypt and authenticate all that ranks send over TCP (AES-256-GCM)
    #[arg(long, help_heading = "Ranks")]
    encrypt: bool,
    /// Seconds without a heartbeat after which a rank is declared lost; a dead process is noticed
    /// at once [default: 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, help_heading = "Ranks")]
    heartbeat_timeout: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline bench collectives
  paceline bench collectives --op all_reduce,all_gather --ranks 2,4,8 --transport shm,tcp --json
  mpirun -np 4 --host a,b,c,d paceline bench collectives --algorithm ring,halving-doubling";

/// Variable in which a rank receives `transport rank world rendezvous` from its parent.
const ROLE: &str = "PACELINE_BENCH_RANK";
const SECRET: &str = "PACELINE_BENCH_SECRET";
const TIMEOUT: Duration = Duration::from_secs(60);
const MOST_RANKS: u64 = 256;

/// The validated flags.
struct Request {
    ops: Vec<CollectiveKind>,
    ranks: Vec<u32>,
    sizes: Vec<usize>,
    transports: Vec<TransportKind>,
    algorithms: Vec<Algorithm>,
    order: SummationOrder,
    budget: Duration,
    private: bool,
    launch: Launch,
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
    /// Minimum memory traffic between ranks that share memory, divided by the time.
    memory_gbps: f64,
    wrong: u64,
}

/// Measures and prints the collectives.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let request = check(flags, origins)?;
    let output = flags.common.output();
    if let Ok(role) = std::env::var(ROLE) {
        return take_part(&role, &request, flags).map_err(Failure::Run);
    }
    if request.launch.by == LaunchMode::Environment {
        return join_others(&request, flags);
    }
    request.launch.warnings.iter().for_each(|text| output.note(&format!("warning: {text}")));
    if !output.is_json() {
        output.print(&heading())?;
    }
    for &ranks in &request.ranks {
        for &kind in &request.transports {
            match kind {
                TransportKind::Thread => threads(ranks, &request, flags),
                kind => processes(kind, ranks, &request),
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
        problems.add("--sizes", format!("{bytes} bytes are not 4-byte elements of at most 64 GiB"));
    }
    let mut transports = Vec::new();
    for name in list(&flags.transport, "auto") {
        match name.parse() {
            Ok(transport) => transports.push(transport),
            Err(message) => problems.add("--transport", message),
        }
    }
    let algorithms = match &flags.algorithm {
        None => Vec::new(),
        Some(_) => list(&flags.algorithm, "")
            .into_iter()
            .filter_map(|algorithm| word("--algorithm", &Some(algorithm), &mut problems))
            .collect(),
    };
    let order = word("--order", &flags.order, &mut problems).unwrap_or(SummationOrder::Free);
    let budget = whole("--budget", flags.budget.as_deref(), 1..=600_000, &mut problems);
    let budget = Duration::from_millis(budget.unwrap_or(300));
    let (launch, bind) = (flags.launch.clone(), flags.bind.clone());
    let silence = flags.heartbeat_timeout.clone().or_else(|| Some(TIMEOUT.as_secs().to_string()));
    let (secret_file, interface) = (flags.secret_file.clone(), flags.interface.clone());
    let mpi = transports.contains(&TransportKind::Mpi).then(|| "mpi".to_owned());
    let launch = LaunchFlags {
        launch,
        transport: mpi,
        library: flags.library.clone(),
        bind,
        interface,
        secret_file,
        encrypt: flags.encrypt,
        heartbeat_timeout: silence,
        ..LaunchFlags::default()
    };
    let launch = launch.check(&mut problems);
    let by_memory = |kind| matches!(kind, TransportKind::Thread | TransportKind::Shm);
    if let Some(kind) = transports.iter().copied().find(|kind| launch.encrypt && by_memory(*kind)) {
        problems.add("--encrypt", format!("is about TCP, and ranks of {kind} share memory"));
    }
    if launch.by == LaunchMode::Environment {
        if flags.ranks.is_some() {
            problems.add("--ranks", "there are as many as the launcher has started");
        }
        if !matches!(transports[..], [kind] if kind != TransportKind::Thread) {
            let text = "a launcher starts one process per rank; use auto, shm, tcp or mpi";
            problems.add("--transport", text);
        }
    }
    if !problems.is_empty() {
        return Err(problems.into());
    }
    let private = flags.private;
    Ok(Request { ops, ranks, sizes, transports, algorithms, order, budget, private, launch })
}

/// Runs the ranks of one world as threads.
fn threads(ranks: u32, request: &Request, flags: &Flags) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let rank = |mut transport| {
            scope.spawn(move || go_through(&mut transport, TransportKind::Thread, request, flags))
        };
        let threads: Vec<_> = thread::world(ranks).into_iter().map(rank).collect();
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a rank panicked"))??;
        }
        Ok(())
    })
}

/// The processes of one world's ranks, killed on drop.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn processes(via: TransportKind, ranks: u32, request: &Request) -> anyhow::Result<()> {
    let secret = Secret::random()?;
    let rendezvous = RendezvousServer::start(RendezvousOptions {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        secret: secret.clone(),
        world: ranks,
        in_rank: None,
        join: TIMEOUT,
        heartbeat_timeout: request.launch.heartbeat_timeout,
    })?;
    let program = std::env::current_exe().context("this program cannot find itself")?;
    let mut children = Children(Vec::new());
    for rank in 0..ranks {
        let role = format!("{} {rank} {ranks} {}", via.name(), rendezvous.address());
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).env(ROLE, role).env(SECRET, secret.as_text());
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.stdin(Stdio::null()).spawn();
        children.0.push(child.with_context(|| format!("rank {rank} cannot be started"))?);
    }
    // The server ends at the first failure or when all have left; a failed rank reports why.
    let ended = rendezvous.join();
    for child in &mut children.0 {
        let status = child.wait()?;
        if ended.is_ok() && !status.success() {
            return Err(anyhow!("a rank ended with {status}"));
        }
    }
    Ok(ended?)
}

/// Runs a rank in a process that this command started.
fn take_part(role: &str, request: &Request, flags: &Flags) -> anyhow::Result<()> {
    let wrong = || anyhow!("{ROLE} is '{role}', which this program did not write: unset it");
    let words: Vec<&str> = role.split(' ').collect();
    let [name, rank, world, rendezvous] = words[..] else { return Err(wrong()) };
    let kind: TransportKind = name.parse().map_err(|_| wrong())?;
    let (rank, world): (u32, u32) = (rank.parse()?, world.parse()?);
    let secret = Secret::from_text(&std::env::var(SECRET).unwrap_or_default())?;
    let mut options = ProcessOptions::new(Rank(rank), world, rendezvous.parse()?, secret);
    options.rendezvous_in_rank_0 = false;
    options.transport = kind;
    options.heartbeat_timeout = request.launch.heartbeat_timeout;
    options.encrypt = request.launch.encrypt;
    affinity::pin_to_share(rank, world);
    go_through(&mut connect(&options)?, kind, request, flags)
}

/// Runs a rank in a process that another launcher started.
fn join_others(request: &Request, flags: &Flags) -> Result<(), Failure> {
    let world = request.ranks.first().copied().unwrap_or(1);
    let Some(place) = launch::rank_identity(&request.launch, world)? else { return Ok(()) };
    let mut options =
        ProcessOptions::new(Rank(place.rank), place.world, place.rendezvous, place.secret.clone());
    options.bind = place.bind;
    options.heartbeat_timeout = request.launch.heartbeat_timeout;
    options.encrypt = request.launch.encrypt;
    let [kind] = request.transports[..] else { return Ok(()) };
    options.transport = kind;
    let output = flags.common.output();
    if place.rank == 0 {
        request.launch.warnings.iter().for_each(|text| output.note(&format!("warning: {text}")));
        if !output.is_json() {
            output.print(&heading())?;
        }
    }
    let mut transport = launch::connect_by(&options).map_err(|error| Failure::Run(error.into()))?;
    go_through(transport.as_mut(), kind, request, flags).map_err(Failure::Run)
}

/// Measures everything requested of one world.
fn go_through(
    transport: &mut dyn Transport,
    via: TransportKind,
    request: &Request,
    flags: &Flags,
) -> anyhow::Result<()> {
    let (me, world) = (transport.rank(), transport.world());
    let largest = request.sizes.iter().copied().max().unwrap_or(0);
    let mut vector = Vector::new(transport, largest, !request.private)?;
    let mut by_mpi = match (request.launch.library, paceline_comm::mpi::joined()) {
        (Some(Library::Mpi), Some(mpi)) => {
            let all: Vec<Rank> = (0..world).map(Rank).collect();
            MpiWorld::new(mpi).group(&all)?
        }
        _ => None,
    };
    let mut sequence = 0;
    for &kind in &request.ops {
        let algorithms = match request.algorithms.as_slice() {
            [] => vec![usual(via, all_share_memory(transport))],
            chosen => chosen.to_vec(),
        };
        for asked in algorithms {
            let Ok(algorithm) = resolve(kind, asked, world, request.order) else {
                note(me, flags, &format!("{kind} by {asked} is impossible among {world} ranks"));
                continue;
            };
            // A barrier has no size.
            let sizes = if kind == CollectiveKind::Barrier { &[0][..] } else { &request.sizes };
            for &size in sizes {
                let equal = by_mpi.is_some() || kind == CollectiveKind::AllToAll;
                let size = match kind {
                    CollectiveKind::Barrier => 0,
                    _ if equal => size / 4 / world as usize * 4 * world as usize,
                    _ => size,
                };
                let (order, reduction) = (request.order, Reduction::Sum);
                let spec = CollectiveSpec { kind, algorithm, order, reduction, root: 0, block: 1 };
                let mut output = if kind.has_output() { vec![0; size] } else { Vec::new() };
                let output = kind.has_output().then_some(&mut output[..]);
                let settings = (sequence, request.budget, TIMEOUT);
                let measured = vector.with(|v| match &mut by_mpi {
                    Some(group) => {
                        measure_native(transport, group, &spec, &mut v[..size], output, settings)
                    }
                    None => measure(transport, &spec, &mut v[..size], output, settings),
                })?;
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
                    print_record(
                        flags,
                        &Record {
                            op: kind.name(),
                            transport: via.name(),
                            algorithm: match &by_mpi {
                                Some(_) => Library::Mpi.to_string(),
                                None => algorithm.to_string(),
                            },
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

/// Returns true if all ranks can map each other's memory; all ranks get the same answer.
fn all_share_memory(transport: &mut dyn Transport) -> bool {
    let (me, world) = (transport.rank(), transport.world());
    let mut others = (0..world).map(Rank).filter(|&rank| rank != me);
    others.all(|rank| transport.memory().is_some_and(|memory| memory.shares_memory_with(rank)))
}

/// The algorithm measured if none is requested.
fn usual(via: TransportKind, shares_memory: bool) -> Algorithm {
    match via {
        TransportKind::Shm | TransportKind::Auto if shares_memory => Algorithm::SharedMemory,
        _ => Algorithm::Auto,
    }
}

fn note(me: Rank, flags: &Flags, text: &str) {
    if me == Rank(0) {
        flags.common.output().note(text);
    }
}

fn print_record(flags: &Flags, record: &Record) -> anyhow::Result<()> {
    let output = flags.common.output();
    if output.is_json() {
        return Ok(output.print_json(record)?);
    }
    let Record { op, transport, algorithm, ranks, bytes, .. } = record;
    let mut line = String::new();
    write!(line, "{op:>14} {transport:>9} {algorithm:>16} {ranks:>5} {bytes:>11}")?;
    write!(line, " {:>12.2} {:>8.2}", record.median_us, record.algbw_gbps)?;
    writeln!(line, " {:>8.2} {:>8.2} {:>6}", record.busbw_gbps, record.memory_gbps, record.wrong)?;
    Ok(output.print(&line)?)
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
