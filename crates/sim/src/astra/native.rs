//! Paceline's own prediction for an ASTRA-sim case.
//!
//! It uses the same links, ranks and algorithms, without the shortcuts. `docs/astra-sim.md`
//! explains every remaining difference.

use super::case::{Algorithm, Algorithms, Case, Collective, Kind};
use crate::cluster::{Cluster, Dimension, DimensionKind, preset};
use crate::network::{Analytic, CostModel, Vector};
use paceline_plan::collective::{
    self, ChunkOrder, CollectiveKind, DimAlgorithm, Grid, GridDimension, Pattern, SummationOrder,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};

/// Times a case with the analytic backend, or returns the reason why it cannot.
pub fn own_time(case: &Case) -> Result<Seconds, String> {
    let cluster = cluster(case)?;
    let ranks = u32::try_from(case.ranks()).map_err(|_| "there are too many ranks".to_owned())?;
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let (kind, bytes) = match case.collective {
        Collective::AllReduce => (CollectiveKind::AllReduce, case.bytes),
        // ASTRA-sim gives the size of one rank's shard.
        Collective::AllGather => {
            (CollectiveKind::AllGather, case.bytes.saturating_mul(u64::from(ranks)))
        }
        Collective::ReduceScatter => (CollectiveKind::ReduceScatter, case.bytes),
        Collective::AllToAll => (CollectiveKind::AllToAll, case.bytes),
    };
    let algorithm = algorithm(case, kind)?;
    let resolved = cluster.fabric().resolve(algorithm, &members).map_err(|e| e.to_string())?;
    let pattern = Pattern::new(kind, resolved, SummationOrder::Free, ranks, 0)
        .map_err(|error| error.to_string())?;
    let vector = Vector::of_bytes(Bytes(bytes));
    Analytic::new(&cluster)
        .collective(&pattern, &members, &vector)
        .map_err(|error| error.to_string())
}

/// The same links: GiB per second, and the latency of both links through a switch.
fn cluster(case: &Case) -> Result<Cluster, String> {
    let dimension = |(index, dim): (usize, &super::Dimension)| {
        let (kind, links) = match dim.kind {
            Kind::Ring => (DimensionKind::Ring, 1.0),
            Kind::Switch => (DimensionKind::Switch, 2.0),
            Kind::FullyConnected => (DimensionKind::FullyConnected, 1.0),
        };
        Dimension {
            name: format!("dimension {index}"),
            kind,
            size: dim.size.max(1),
            bandwidth: BytesPerSec(dim.bandwidth_gibps * f64::from(1 << 30)),
            latency: Seconds(dim.latency_ns * 1e-9 * links),
            efficiency: 1.0,
            devices_per_link: 1,
            tree: None,
            in_network_reduction: false,
        }
    };
    let dimensions: Vec<_> = case.dims.iter().enumerate().map(dimension).collect();
    if dimensions.is_empty() || case.ranks() > Cluster::MAX_DEVICES {
        return Err("there are no ranks, or too many".into());
    }
    let cluster = preset::get("laptop").map_err(|error| error.to_string())?;
    Ok(Cluster { name: "ASTRA-sim's".into(), hosts: 1, dimensions, ..cluster })
}

/// The algorithm over all ranks, or over several dimensions in the case's number of chunks.
fn algorithm(case: &Case, kind: CollectiveKind) -> Result<collective::Algorithm, String> {
    let single = |algorithm: &Algorithm| match algorithm {
        Algorithm::Ring => collective::Algorithm::Ring,
        Algorithm::Direct { .. } => collective::Algorithm::Direct,
        Algorithm::HalvingDoubling => collective::Algorithm::HalvingDoubling,
        Algorithm::DoubleBinaryTree => collective::Algorithm::Tree,
    };
    match &case.algorithms {
        Algorithms::OverAll(algorithm) => Ok(single(algorithm)),
        Algorithms::PerDimension(each) => match &each[..] {
            [only] => Ok(single(only)),
            _ if kind == CollectiveKind::AllToAll => Ok(collective::Algorithm::Direct),
            _ => {
                let chunks = case.splits.clamp(1, collective::MAX_CHUNKS);
                let order = ChunkOrder::Baseline;
                let grid = Some(grid(case, each).ok_or("no grid has such dimensions")?);
                Ok(collective::Algorithm::PerDimension { chunks, order, grid })
            }
        },
    }
}

/// Dimensions with the case's algorithms. Trees cannot reduce-scatter, so halving replaces them.
fn grid(case: &Case, each: &[Algorithm]) -> Option<Grid> {
    let dimension = |(dim, algorithm): (&super::Dimension, &Algorithm)| GridDimension {
        size: dim.size,
        way: match algorithm {
            Algorithm::Ring => DimAlgorithm::Ring,
            Algorithm::Direct { .. } => DimAlgorithm::Direct,
            Algorithm::HalvingDoubling | Algorithm::DoubleBinaryTree => DimAlgorithm::Halving,
        },
        rate: (dim.bandwidth_gibps * 1000.0).clamp(1.0, f64::from(u32::MAX)) as u32,
    };
    Grid::new(&case.dims.iter().zip(each).map(dimension).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::super::{Backend, Dimension, Optimization};
    use super::*;

    /// ASTRA-sim 2 sends 1,023 messages through one port at once; here they share its bandwidth.
    #[test]
    fn messages_share_a_port() {
        let dims = vec![Dimension {
            kind: Kind::Switch,
            size: 1024,
            bandwidth_gibps: 50.0,
            latency_ns: 500.0,
        }];
        let case = Case {
            backend: Backend::CongestionUnaware,
            collective: Collective::AllToAll,
            bytes: 64 << 20,
            dims,
            algorithms: Algorithms::PerDimension(vec![Algorithm::Direct { window: None }]),
            splits: 1,
            active_chunks: 1,
            optimization: Optimization::LocalBwAware,
            endpoint_delay_ns: 10,
            local_mem_gbps: 1600.0,
        };
        let time = own_time(&case).unwrap().0;
        let wanted = 1e-6 + f64::from(64 << 20) * 1023.0 / 1024.0 / (50.0 * f64::from(1 << 30));
        assert!((time / wanted - 1.0).abs() < 1e-9, "{time} {wanted}");
    }
}
