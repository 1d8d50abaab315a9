//! `paceline collective`: simulates one collective on a cluster.

mod compare;

use crate::failure::Failure;
use crate::flags::{ClusterFlags, CommonFlags, Origins, Problems, size, whole, word};
use crate::output::Place;
use crate::overview::count;
use crate::sweep::SweepFlags;
use clap::Args;
use paceline_plan::collective::{
    Algorithm, Ask, CollectiveKind, MAX_RANKS, Pattern, SummationOrder,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::NetworkKind;
use paceline_sim::network::{
    Analytic, CollectiveProfile, CostModel, DimensionLoad, Flow, PhaseLatency, Vector,
};
use serde::Serialize;
use serde_json::Value;

/// Simulate one collective
///
/// Reports the number of rounds, the bytes sent by the busiest rank, and the messages that reach
/// one rank at once. Also reports the total time on the cluster, the time of a message in each
/// phase, and the utilisation of each network dimension.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Collective: all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter,
    /// all_to_all, send_recv (every rank to the next) or barrier
    #[arg(long, value_name = "OP", help_heading = "Collective")]
    op: Option<String>,
    /// Algorithm
    #[arg(
        long,
        value_name = "ALGORITHM",
        help = algorithm_help(),
        help_heading = "Collective"
    )]
    algorithm: Option<String>,
    /// Size of the whole vector, in bytes or with a unit: 1048576, 64MiB, 64MB
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true, help_heading = "Collective")]
    size: Option<String>,
    /// Number of ranks, the first ones of the cluster [default: all]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Collective")]
    ranks: Option<String>,
    /// Root of broadcast, reduce, gather and scatter [default: 0]
    #[arg(long, value_name = "RANK", allow_negative_numbers = true, help_heading = "Collective")]
    root: Option<String>,
    /// Summation order: canonical (fixed) or free (the cheapest) [default: free]
    #[arg(long, value_name = "canonical|free", help_heading = "Collective")]
    order: Option<String>,
    /// Network model: analytic (latency and bandwidth alone) or flow (message by message, sharing
    /// links) [default: analytic]
    #[arg(long, value_name = "analytic|flow", help_heading = "Collective")]
    network: Option<String>,
    /// Compare all algorithms: rounds, bytes, fan-in and time of each [default: all_reduce of 64 MiB,
    /// on as many dgx-a100 as --ranks needs]
    #[arg(long, conflicts_with_all = ["algorithm", "vary"], help_heading = "Collective")]
    compare: bool,
    #[command(flatten)]
    cluster: ClusterFlags,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// Default columns of a study of collectives.
pub(super) const USUAL: [&str; 4] = ["time_s", "rounds", "bytes_sent_per_rank_max", "fan_in_max"];

const EXAMPLES: &str = "\
Examples:
  paceline collective --op all_reduce --algorithm ring --size 64MiB --cluster dgx-a100
  paceline collective --op all_reduce --algorithm themis:64 --size 1GiB --cluster tpu-v4
  paceline collective --compare --ranks 8
  paceline collective --op all_reduce --cluster dgx-a100:32 --algorithm ring \\
                      --vary size=1MiB,16MiB,256MiB --vary algorithm=ring,tree --plot sizes.svg";

fn algorithm_help() -> String {
    let known = Algorithm::known();
    format!(
        "Algorithm: {known}; in-network needs a switch that sums, hierarchical takes the ranks per host from the cluster unless they follow as /G, and per-dimension and themis pass C chunks through the cluster's dimensions [default: auto]"
    )
}

#[derive(Serialize)]
struct Record {
    #[serde(flatten)]
    place: Place,
    op: String,
    algorithm: String,
    ranks: u32,
    bytes: u64,
    time_s: f64,
    rounds: u32,
    bytes_sent_per_rank_max: u64,
    fan_in_max: u32,
    bytes_received_per_rank_max: u64,
    bytes_out_per_round_max: u64,
    bytes_in_per_round_max: u64,
    phases: Vec<PhaseLatency>,
    dimensions: Vec<DimensionLoad>,
}

/// Simulates and prints the collective.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    if flags.compare {
        return compare::run(flags, origins);
    }
    let (record, cluster) = carry_out(flags, origins)?;
    let output = flags.common.output();
    if output.is_json() {
        return Ok(output.print_json(&record)?);
    }
    let (bytes, time) = (Bytes(record.bytes), Seconds(record.time_s));
    let rate = if time.0 > 0.0 { bytes.as_f64() / time.0 / 1e9 } else { 0.0 };
    let text = format!(
        "{} of {bytes} among {} ranks of {cluster} by {}\n\
         time    {time}, {rate:.1} GB/s of the vector\n\
         rounds  {}\n\
         sent    {} by the busiest rank\n\
         fan-in  {} messages at one rank in one round\n",
        record.op,
        count(record.ranks.into()),
        record.algorithm,
        count(record.rounds.into()),
        Bytes(record.bytes_sent_per_rank_max),
        count(record.fan_in_max.into()),
    );
    Ok(output.print(&(text + &table(&record)))?)
}

/// Returns the result as one JSON object.
pub(super) fn result(flags: &Flags, origins: Origins) -> Result<Value, Failure> {
    let (record, _) = carry_out(flags, origins)?;
    serde_json::to_value(record).map_err(|error| Failure::Run(error.into()))
}

/// Simulates the collective; returns its record and the cluster's name.
fn carry_out(flags: &Flags, origins: Origins) -> Result<(Record, String), Failure> {
    let mut problems = Problems::new(origins);
    let op = word("--op", &flags.op, &mut problems);
    if flags.op.is_none() {
        problems.add("--op", "missing; for example --op all_reduce");
    }
    let algorithm = word("--algorithm", &flags.algorithm, &mut problems);
    let order = word("--order", &flags.order, &mut problems).unwrap_or(SummationOrder::Free);
    let barrier = op == Some(CollectiveKind::Barrier);
    let bytes = match &flags.size {
        None if barrier => Some(Bytes::ZERO),
        text => size("--size", text.as_deref(), &mut problems),
    };
    let bytes = bytes.map(|bytes| if barrier { Bytes::ZERO } else { bytes });
    if flags.size.is_none() && !barrier {
        problems.add("--size", "missing; for example --size 64MiB");
    }
    let cluster = flags.cluster.required(&mut problems);
    let devices = cluster.as_ref().map_or(u64::from(MAX_RANKS), |cluster| cluster.devices());
    let ranks = whole("--ranks", flags.ranks.as_deref(), 1..=devices, &mut problems);
    let ranks = u32::try_from(ranks.unwrap_or(devices)).unwrap_or(u32::MAX);
    let root = whole("--root", flags.root.as_deref(), 0..=u64::from(ranks) - 1, &mut problems);
    let root = u32::try_from(root.unwrap_or(0)).unwrap_or(0);
    let network = parsed_network(flags, &mut problems);
    let members: Vec<Rank> = (0..ranks.min(MAX_RANKS)).map(Rank).collect();
    let pattern = op.and_then(|op: CollectiveKind| {
        let algorithm = algorithm.unwrap_or(Algorithm::Auto);
        let fabric = cluster.as_ref().map(|cluster| cluster.fabric());
        let bytes = bytes.unwrap_or(Bytes::ZERO);
        let ask = Ask {
            kind: op,
            algorithm,
            order,
            elements: bytes.0,
            element: Bytes(1),
            dtype: None,
            block: 1,
        };
        let resolved = match fabric {
            Some(fabric) if algorithm == Algorithm::Auto => Ok(fabric.fastest(&members, &ask)),
            Some(fabric) => fabric.resolve(algorithm, &members),
            None => Ok(algorithm),
        };
        resolved
            .and_then(|algorithm| Pattern::new(op, algorithm, order, ranks, root))
            .map_err(|error| problems.add("--algorithm", error.to_string()))
            .ok()
    });
    let (Some(pattern), Some(bytes), Some(cluster), true) =
        (pattern, bytes, cluster, problems.is_empty())
    else {
        return Err(problems.into());
    };

    let vector = Vector::of_bytes(bytes);
    let CollectiveProfile { mut time, phases, mut dimensions } = Analytic::new(&cluster)
        .profile(&pattern, &members, &vector)
        .map_err(|error| Failure::flag("--cluster", error.to_string()))?;
    if network == NetworkKind::Flow {
        let alone = time;
        time = Flow::new(&cluster)
            .collective(&pattern, &members, &vector)
            .map_err(|error| Failure::flag("--cluster", error.to_string()))?;
        for dimension in dimensions.iter_mut().filter(|_| time.0 > 0.0) {
            dimension.utilisation *= alone.0 / time.0;
        }
    }
    let counts = pattern.counts(bytes);
    let record = Record {
        place: Place::from(&cluster),
        op: pattern.kind().to_string(),
        algorithm: pattern.algorithm().to_string(),
        ranks,
        bytes: bytes.0,
        time_s: time.0,
        rounds: counts.rounds,
        bytes_sent_per_rank_max: counts.bytes_sent_per_rank_max.0,
        fan_in_max: counts.fan_in_max,
        bytes_received_per_rank_max: counts.bytes_received_per_rank_max.0,
        bytes_out_per_round_max: counts.bytes_out_per_round_max.0,
        bytes_in_per_round_max: counts.bytes_in_per_round_max.0,
        phases,
        dimensions,
    };
    Ok((record, cluster.name))
}

fn parsed_network(flags: &Flags, problems: &mut Problems) -> NetworkKind {
    word("--network", &flags.network, problems).unwrap_or_default()
}

/// The phases and the dimensions, one line each.
fn table(record: &Record) -> String {
    let phases = record.phases.iter().map(|phase| {
        let latency = Seconds(phase.message_latency_s);
        let messages = phase.messages_per_rank;
        format!("phase   {}: {latency} a message, {messages:.1} from a rank\n", phase.name)
    });
    let dimensions = record.dimensions.iter().map(|load| {
        let sent = Bytes(load.bytes_per_rank as u64);
        let share = load.utilisation * 100.0;
        format!("links   {}: {share:.1} % busy, {sent} from a rank\n", load.dimension)
    });
    phases.chain(dimensions).collect()
}
