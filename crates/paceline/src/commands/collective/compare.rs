//! `paceline collective --compare`: all algorithms of one collective in a table.

use super::{Flags, parsed_network};
use crate::failure::Failure;
use crate::flags::{ClusterFlags, Origins, Problems, size, whole, word};
use crate::output::Place;
use crate::overview::{count, table};
use paceline_plan::collective::{
    Algorithm, Ask, CollectiveKind, Fabric, Pattern, RingSet, SummationOrder,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::NetworkKind;
use paceline_sim::cluster::{Cluster, preset};
use paceline_sim::network::{Analytic, CostModel, Flow, Vector};
use serde::Serialize;

/// Maximum number of ranks: the steps of all of them are counted.
const MAX_COMPARED: u64 = 4096;
/// Vector that is compared if no size is given.
const USUAL_SIZE: Bytes = Bytes(64 << 20);
/// Cluster that is compared on if none is given, with as many hosts as the ranks need.
const USUAL_CLUSTER: &str = "dgx-a100";

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    place: Place,
    op: String,
    algorithm: String,
    /// True for the algorithm that `auto` chooses.
    auto: bool,
    ranks: u32,
    bytes: u64,
    time_s: f64,
    rounds: u32,
    bytes_out_per_round_max: u64,
    bytes_in_per_round_max: u64,
    bytes_sent_per_rank_max: u64,
    bytes_received_per_rank_max: u64,
    bytes_read_per_rank_max: u64,
    bytes_written_per_rank_max: u64,
    bytes_total: u64,
    fan_in_max: u32,
}

/// Prints the table.
pub(super) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let op = match &flags.op {
        Some(_) => word("--op", &flags.op, &mut problems),
        None => Some(CollectiveKind::AllReduce),
    };
    let order = word("--order", &flags.order, &mut problems).unwrap_or(SummationOrder::Free);
    let bytes = match &flags.size {
        _ if op == Some(CollectiveKind::Barrier) => Some(Bytes::ZERO),
        Some(text) => size("--size", Some(text), &mut problems),
        None => Some(USUAL_SIZE),
    };
    let network = parsed_network(flags, &mut problems);
    let ranks = whole("--ranks", flags.ranks.as_deref(), 1..=MAX_COMPARED, &mut problems);
    let cluster = cluster(&flags.cluster, ranks, &mut problems);
    let devices = cluster.as_ref().map_or(MAX_COMPARED, Cluster::devices);
    let ranks = ranks.unwrap_or(devices.min(MAX_COMPARED));
    if ranks > devices {
        problems.add("--ranks", format!("{ranks} ranks, but the cluster has {devices} devices"));
    }
    let root = whole("--root", flags.root.as_deref(), 0..=ranks.max(1) - 1, &mut problems);
    let (Some(kind), Some(bytes), Some(cluster), true) = (op, bytes, cluster, problems.is_empty())
    else {
        return Err(problems.into());
    };
    let comparison = Comparison {
        kind,
        order,
        bytes,
        network,
        cluster: &cluster,
        members: (0..ranks as u32).map(Rank).collect(),
        root: root.unwrap_or(0) as u32,
    };
    let rows = comparison.rows()?;
    let output = flags.common.output();
    if output.is_json() {
        for row in &rows {
            output.print_json(row)?;
        }
        return Ok(());
    }
    Ok(output.print(&comparison.text(&rows))?)
}

fn cluster(flags: &ClusterFlags, ranks: Option<u64>, problems: &mut Problems) -> Option<Cluster> {
    if flags.cluster.is_some() {
        return flags.check(problems);
    }
    let unit = preset::get(USUAL_CLUSTER).ok()?.devices();
    let hosts = ranks.unwrap_or(unit).div_ceil(unit);
    let named = ClusterFlags { cluster: Some(format!("{USUAL_CLUSTER}:{hosts}")), ..flags.clone() };
    named.check(problems)
}

/// One collective of a group on a cluster.
struct Comparison<'c> {
    kind: CollectiveKind,
    order: SummationOrder,
    bytes: Bytes,
    network: NetworkKind,
    cluster: &'c Cluster,
    members: Vec<Rank>,
    root: u32,
}

impl Comparison<'_> {
    fn rows(&self) -> Result<Vec<Row>, Failure> {
        let fabric = self.cluster.fabric();
        let ask = Ask {
            kind: self.kind,
            algorithm: Algorithm::Auto,
            order: self.order,
            elements: self.bytes.0,
            element: Bytes(1),
            dtype: None,
            block: 1,
        };
        let chosen = fabric.fastest(&self.members, &ask);
        let mut algorithms = self.algorithms(&fabric);
        if !algorithms.contains(&chosen) {
            algorithms.push(chosen);
        }
        let patterns = algorithms.into_iter().filter_map(|algorithm| {
            let ranks = self.members.len() as u32;
            Pattern::new(self.kind, algorithm, self.order, ranks, self.root).ok()
        });
        patterns.map(|pattern| self.row(&pattern, chosen)).collect()
    }

    /// The algorithms that the group can run, each with the usual parameters, as the fabric settles
    /// them.
    fn algorithms(&self, fabric: &Fabric) -> Vec<Algorithm> {
        let ranks = self.members.len() as u32;
        let in_one_host = u64::from(ranks) <= fabric.host;
        let flat = Algorithm::for_any_group()
            .filter(|&flat| in_one_host || flat != Algorithm::SharedMemory)
            .chain([Algorithm::ParameterServer { servers: ranks }])
            .chain([2, 4].map(|rings| Algorithm::MultiRing { rings: RingSet::new(rings) }))
            .chain([Algorithm::InNetwork]);
        let layered = [
            "hierarchical:ring:ring",
            "hierarchical:direct:ring",
            "hierarchical:halving-doubling:halving-doubling",
            "hierarchical:direct:in-network",
            "per-dimension",
            "per-dimension:16",
            "themis:16",
        ];
        let layered = layered.iter().filter_map(|name| name.parse().ok()).filter(|_| !in_one_host);
        let mut found: Vec<Algorithm> = Vec::new();
        for algorithm in flat.chain(layered) {
            match fabric.resolve(algorithm, &self.members) {
                Ok(settled) if !found.contains(&settled) => found.push(settled),
                _ => {}
            }
        }
        found
    }

    fn row(&self, pattern: &Pattern, chosen: Algorithm) -> Result<Row, Failure> {
        let vector = Vector::of_bytes(self.bytes);
        let time = match self.network {
            NetworkKind::Analytic => {
                Analytic::new(self.cluster).collective(pattern, &self.members, &vector)
            }
            NetworkKind::Flow => {
                Flow::new(self.cluster).collective(pattern, &self.members, &vector)
            }
        };
        let time = time.map_err(|error| Failure::flag("--cluster", error.to_string()))?;
        let counts = pattern.counts(self.bytes);
        Ok(Row {
            place: Place::from(self.cluster),
            op: pattern.kind().to_string(),
            algorithm: pattern.algorithm().to_string(),
            auto: pattern.algorithm() == chosen,
            ranks: pattern.ranks(),
            bytes: self.bytes.0,
            time_s: time.0,
            rounds: counts.rounds,
            bytes_out_per_round_max: counts.bytes_out_per_round_max.0,
            bytes_in_per_round_max: counts.bytes_in_per_round_max.0,
            bytes_sent_per_rank_max: counts.bytes_sent_per_rank_max.0,
            bytes_received_per_rank_max: counts.bytes_received_per_rank_max.0,
            bytes_read_per_rank_max: counts.bytes_read_per_rank_max.0,
            bytes_written_per_rank_max: counts.bytes_written_per_rank_max.0,
            bytes_total: pattern.total_bytes(self.bytes).0,
            fan_in_max: counts.fan_in_max,
        })
    }

    fn text(&self, rows: &[Row]) -> String {
        let head = [
            "",
            "algorithm",
            "rounds",
            "round, out",
            "round, in",
            "in all, out",
            "in all, in",
            "all ranks",
            "fan-in",
            "time",
        ];
        let bytes = |bytes: u64| Bytes(bytes).to_string();
        let lines = rows.iter().map(|row| {
            vec![
                if row.auto { "*" } else { "" }.to_owned(),
                row.algorithm.clone(),
                count(row.rounds.into()),
                bytes(row.bytes_out_per_round_max),
                bytes(row.bytes_in_per_round_max),
                bytes(row.bytes_sent_per_rank_max + row.bytes_written_per_rank_max),
                bytes(row.bytes_received_per_rank_max + row.bytes_read_per_rank_max),
                bytes(row.bytes_total),
                count(row.fan_in_max.into()),
                Seconds(row.time_s).to_string(),
            ]
        });
        format!(
            "{} of {} among {} ranks of {}; bytes of the busiest rank, in one round and in all; * is \
             what auto chooses\n{}",
            self.kind,
            self.bytes,
            count(self.members.len() as u64),
            self.cluster.name,
            table(&head, 2, lines)
        )
    }
}
