//! Table of ASTRA-sim completion times: one row per collective and network.

use super::csv::{self, Record};
use super::{Skipped, TableError};
use crate::astra::{
    Algorithm, Algorithms, Backend, Case, Collective, Dimension, Kind, Optimization,
};
use std::str::FromStr;

/// Columns that identify a table of this kind.
pub const COLUMNS: [&str; 13] = [
    "id",
    "backend",
    "collective",
    "bytes",
    "topology",
    "npus_per_dim",
    "bandwidth_GBps",
    "latency_ns",
    "algorithm",
    "splits",
    "active_chunks",
    "collective_opt",
    "sim_time_ns_max",
];

/// One run of ASTRA-sim.
#[derive(Clone, Debug, PartialEq)]
pub struct AstraRow {
    /// Row name.
    pub id: String,
    /// Line of the row in its file.
    pub line: usize,
    /// Simulated case, or the reason that it cannot be represented.
    pub case: Result<Case, Skipped>,
    /// Finish time of the last rank, in nanoseconds.
    pub measured_ns_max: Option<u64>,
    /// Finish time of the first rank, in nanoseconds.
    pub measured_ns_min: Option<u64>,
    /// Wall-clock time of ASTRA-sim, in seconds.
    pub wall_s: Option<f64>,
    /// Peak memory of ASTRA-sim, in units of 10⁶ bytes.
    pub peak_rss_mb: Option<f64>,
}

/// Reads the rows of a table of ASTRA-sim runs.
pub fn rows(text: &str, file: &str) -> Result<Vec<AstraRow>, TableError> {
    let records = csv::parse(text, file, &COLUMNS)?;
    Ok(records.iter().map(row).collect())
}

fn row(record: &Record) -> AstraRow {
    AstraRow {
        id: record.get("id").unwrap_or("").to_owned(),
        line: record.line,
        case: case(record),
        measured_ns_max: optional(record, "sim_time_ns_max"),
        measured_ns_min: optional(record, "sim_time_ns_min"),
        wall_s: optional(record, "wall_s"),
        peak_rss_mb: optional(record, "peak_rss_MB"),
    }
}

/// ASTRA-sim's default endpoint delay.
const DEFAULT_ENDPOINT_DELAY_NS: u64 = 10;

fn case(record: &Record) -> Result<Case, Skipped> {
    if let Some(status) = record.get("exit_status").filter(|&status| status != "0") {
        return Err(Skipped(format!("ASTRA-sim itself failed with status {status}")));
    }
    let dims = dims(record)?;
    let algorithms = algorithms(word(record, "algorithm")?)?;
    let endpoint_delay_ns = match record.get("endpoint_delay") {
        Some(_) => number(record, "endpoint_delay")?,
        None => DEFAULT_ENDPOINT_DELAY_NS,
    };
    Ok(Case {
        backend: one_of(record, "backend", &BACKENDS)?,
        collective: one_of(record, "collective", &COLLECTIVES)?,
        bytes: number(record, "bytes")?,
        dims,
        algorithms,
        splits: number(record, "splits")?,
        active_chunks: number(record, "active_chunks")?,
        optimization: one_of(record, "collective_opt", &OPTIMIZATIONS)?,
        endpoint_delay_ns,
        local_mem_gbps: number(record, "local_mem_bw")?,
    })
}

const BACKENDS: [(&str, Backend); 2] = [
    ("congestion_unaware", Backend::CongestionUnaware),
    ("congestion_aware", Backend::CongestionAware),
];

const COLLECTIVES: [(&str, Collective); 4] = [
    ("all_reduce", Collective::AllReduce),
    ("all_gather", Collective::AllGather),
    ("reduce_scatter", Collective::ReduceScatter),
    ("all_to_all", Collective::AllToAll),
];

const KINDS: [(&str, Kind); 3] =
    [("Ring", Kind::Ring), ("Switch", Kind::Switch), ("FullyConnected", Kind::FullyConnected)];

const OPTIMIZATIONS: [(&str, Optimization); 2] =
    [("baseline", Optimization::Baseline), ("localBWAware", Optimization::LocalBwAware)];

/// Reads the dimensions; each column lists one property per dimension, separated by `x`.
fn dims(record: &Record) -> Result<Vec<Dimension>, Skipped> {
    let split = |column| Ok(word(record, column)?.split('x').map(str::trim).collect::<Vec<_>>());
    let (kinds, sizes) = (split("topology")?, split("npus_per_dim")?);
    let (bandwidths, latencies) = (split("bandwidth_GBps")?, split("latency_ns")?);
    let counts = [kinds.len(), sizes.len(), bandwidths.len(), latencies.len()];
    if counts.iter().any(|&count| count != kinds.len()) {
        let [kinds, sizes, bandwidths, latencies] = counts;
        return Err(Skipped(format!(
            "{kinds} topologies, {sizes} sizes, {bandwidths} bandwidths and {latencies} latencies"
        )));
    }
    (0..kinds.len())
        .map(|dim| {
            Ok(Dimension {
                kind: chosen("topology", kinds[dim], &KINDS)?,
                size: parsed("npus_per_dim", sizes[dim])?,
                bandwidth_gibps: parsed("bandwidth_GBps", bandwidths[dim])?,
                latency_ns: parsed("latency_ns", latencies[dim])?,
            })
        })
        .collect()
}

fn algorithms(text: &str) -> Result<Algorithms, Skipped> {
    if let Some(over_all) = text.strip_prefix("one") {
        let (first, rest) = over_all.split_at_checked(1).unwrap_or((over_all, ""));
        let name = first.to_ascii_lowercase() + rest;
        return Ok(Algorithms::OverAll(algorithm(&name)?));
    }
    text.split('x')
        .map(|name| algorithm(name.trim()))
        .collect::<Result<_, _>>()
        .map(Algorithms::PerDimension)
}

fn algorithm(name: &str) -> Result<Algorithm, Skipped> {
    match name {
        "ring" => Ok(Algorithm::Ring),
        "direct" => Ok(Algorithm::Direct { window: None }),
        "halvingDoubling" => Ok(Algorithm::HalvingDoubling),
        "doubleBinaryTree" => Ok(Algorithm::DoubleBinaryTree),
        _ => match name.strip_prefix("direct").map(u32::from_str) {
            Some(Ok(window)) => Ok(Algorithm::Direct { window: Some(window) }),
            Some(Err(_)) | None => Err(Skipped(format!("there is no algorithm '{name}'"))),
        },
    }
}

fn word<'a>(record: &'a Record, column: &str) -> Result<&'a str, Skipped> {
    record.get(column).ok_or_else(|| Skipped(format!("{column} is empty")))
}

fn number<T: FromStr>(record: &Record, column: &str) -> Result<T, Skipped> {
    parsed(column, word(record, column)?)
}

fn one_of<T: Copy>(record: &Record, column: &str, names: &[(&str, T)]) -> Result<T, Skipped> {
    chosen(column, word(record, column)?, names)
}

fn parsed<T: FromStr>(column: &str, text: &str) -> Result<T, Skipped> {
    text.parse().map_err(|_| Skipped(format!("{column} is '{text}', which is not a number here")))
}

fn chosen<T: Copy>(column: &str, text: &str, names: &[(&str, T)]) -> Result<T, Skipped> {
    let found = names.iter().find(|(name, _)| *name == text);
    found.map(|&(_, value)| value).ok_or_else(|| {
        let known: Vec<&str> = names.iter().map(|&(name, _)| name).collect();
        Skipped(format!("{column} is '{text}', not one of {}", known.join(", ")))
    })
}

fn optional<T: FromStr>(record: &Record, column: &str) -> Option<T> {
    record.get(column)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::astra::{simulate, simulate_every_rank};

    const HEADER: &str = "id,backend,collective,bytes,topology,npus_per_dim,bandwidth_GBps,\
        latency_ns,algorithm,splits,active_chunks,collective_opt,endpoint_delay,local_mem_bw,\
        sim_time_ns_max,sim_time_ns_min";

    /// Times printed by ASTRA-sim 2.
    const PRINTED: &str = "
r01,congestion_aware,all_gather,1048576,Ring,16,50,500,ring,4,1,localBWAware,10,1600,323560,323560
r03,congestion_aware,all_reduce,1048576,Switch,8,400,936.25,ring,4,2,localBWAware,10,3350,57426,57426
r07,congestion_unaware,all_reduce,67108864,FullyConnected,8,50,500,direct,4,1,localBWAware,10,1600,332336,332336
r09,congestion_unaware,all_reduce,67108864,Switch,16,50,500,halvingDoubling,4,1,localBWAware,10,1600,2431136,2431136
r11,congestion_unaware,all_reduce,67108864,Switch,16,50,500,doubleBinaryTree,4,1,localBWAware,10,1600,9972570,8624165
r15,congestion_aware,all_to_all,16777216,Ring,8,50,500,ring,4,1,localBWAware,10,1600,1150840,1150840
r17,congestion_unaware,all_gather,67108864,RingxSwitch,8x4,300x25,500x2000,ringxhalvingDoubling,4,1,localBWAware,10,1600,8994031,8994031
r19,congestion_unaware,all_reduce,1073741824,RingxFullyConnectedxSwitch,2x8x8,250x200x50,500x500x1000,ringxdirectxhalvingDoubling,16,1,baseline,10,1600,36356839,36356839
r21,congestion_unaware,all_to_all,67108864,SwitchxSwitch,8x16,300x25,500x2000,directxdirect,1,1,localBWAware,10,1600,187331,187331
r23,congestion_unaware,all_reduce,268435456,RingxRing,8x8,100x50,500x1000,oneRing,4,1,localBWAware,10,1600,5673820,5673820
r25,congestion_unaware,all_reduce,65536,SwitchxSwitch,8x4,300x25,500x2000,ringxring,1,1,localBWAware,10,1600,39150,39150
s_ring_A_1024,congestion_aware,all_reduce,67108864,Ring,1024,50,500,ring,1,1,localBWAware,10,1600,3662350,3662350
s_2d_U_4096,congestion_unaware,all_reduce,1073741824,SwitchxSwitch,8x512,450x50,500x2000,ringxhalvingDoubling,4,1,localBWAware,10,1600,6831003,6831003
s_torus_U_4096,congestion_unaware,all_reduce,1073741824,RingxRingxRing,16x16x16,100x100x100,500x500x500,ringxringxring,4,1,localBWAware,10,1600,20698580,20698580
s_a2a_A_1024,congestion_aware,all_to_all,67108864,Switch,1024,50,500,direct,1,1,localBWAware,10,1600,1250300,1250300
";

    /// Small cases run through ASTRA-sim's system layer and analytical networks, in which messages
    /// compete for links, chunks are left over, or ranks finish at different times: the order of
    /// events within a tick decides the result.
    const ORDERED: &str = "
hd_ring,congestion_aware,reduce_scatter,16777216,Ring,8,400,936.25,halvingDoubling,16,8,localBWAware,500,1600,52756,51494
hd_gather,congestion_aware,all_gather,16777216,Ring,8,25,500,halvingDoubling,16,8,localBWAware,10,50,6329123,5627034
tree_links,congestion_aware,all_gather,8780506,FullyConnected,16,37.5,500,doubleBinaryTree,16,8,localBWAware,10,1600,373501,322382
tree_ring,congestion_aware,reduce_scatter,1048577,Ring,8,1,936.25,doubleBinaryTree,16,8,baseline,10,1600,3442004,3007937
tree_2d,congestion_unaware,all_reduce,4506324,FullyConnectedxRing,4x2,25x25,0x500,doubleBinaryTreexhalvingDoubling,16,8,localBWAware,500,3350,215128,192892
tree_a2a,congestion_unaware,all_to_all,1048577,RingxRing,4x3,400x37.5,2000x500,doubleBinaryTreexdirect,16,8,localBWAware,10,1600,35792,29348
window_3d,congestion_unaware,all_reduce,8737730,SwitchxSwitchxSwitch,2x4x2,100x50x400,0x500x0,oneDirect3,16,8,localBWAware,0,3350,27588,27588
";

    fn read(lines: &str) -> Vec<AstraRow> {
        rows(&format!("{HEADER}{lines}"), "astra.csv").unwrap()
    }

    #[test]
    fn simulated_is_printed_to_the_nanosecond() {
        for row in read(PRINTED).into_iter().chain(read(ORDERED)) {
            let outcome = simulate(&row.case.unwrap()).unwrap();
            let simulated = (Some(outcome.time_ns_max), Some(outcome.time_ns_min));
            assert_eq!(simulated, (row.measured_ns_max, row.measured_ns_min), "{}", row.id);
        }
    }

    #[test]
    fn so_is_every_rank_of_its_own() {
        for row in read(PRINTED).into_iter().chain(read(ORDERED)) {
            let case = row.case.unwrap();
            if case.ranks() <= 128 {
                assert_eq!(simulate(&case), simulate_every_rank(&case), "{}", row.id);
            }
        }
    }

    #[test]
    fn algorithms_are_read_as_astra_sim_writes_them() {
        assert_eq!(
            algorithms("ringxdirect4").unwrap(),
            Algorithms::PerDimension(vec![Algorithm::Ring, Algorithm::Direct { window: Some(4) }])
        );
        let over_all = |algorithm| Ok(Algorithms::OverAll(algorithm));
        assert_eq!(algorithms("oneRing"), over_all(Algorithm::Ring));
        assert_eq!(algorithms("oneHalvingDoubling"), over_all(Algorithm::HalvingDoubling));
        assert_eq!(algorithms("oneDirect12"), over_all(Algorithm::Direct { window: Some(12) }));
        for nonsense in ["", "one", "oné", "x", "directx", "direct-1", "Ring"] {
            assert!(algorithms(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn a_row_that_says_nothing_clear_is_skipped_with_its_reason() {
        let good = PRINTED.lines().nth(1).unwrap();
        let why = |from: &str, to: &str| {
            let row = read(&format!("\n{}\n", good.replace(from, to))).remove(0);
            row.case.unwrap_err().to_string()
        };
        assert_eq!(
            why("all_gather", "gather"),
            "collective is 'gather', not one of all_reduce, all_gather, reduce_scatter, all_to_all"
        );
        assert_eq!(why("1048576", "1e6"), "bytes is '1e6', which is not a number here");
        assert_eq!(
            why("Ring,16", "Ring,16x2"),
            "1 topologies, 2 sizes, 1 bandwidths and 1 latencies"
        );
        assert_eq!(why(",ring,", ",hypercube,"), "there is no algorithm 'hypercube'");
        assert_eq!(why(",4,1,", ",,1,"), "splits is empty");
    }

    #[test]
    fn a_text_without_the_columns_is_no_table() {
        let error = rows("id,bytes\n", "t.csv").unwrap_err();
        assert_eq!((error.file.as_str(), error.line), ("t.csv", 1));
        assert!(error.problem.starts_with("there is no column backend"), "{error}");
    }
}
