//! Fabric description that a cluster gives to collective algorithms.

use crate::cluster::{Cluster, Dimension, DimensionKind};
use crate::error::SimError;
use crate::jobs::Placement;
use crate::network::{Analytic, CostModel, Nccl, Vector, nccl};
use crate::profile::{Library, Profile};
use paceline_plan::collective::{
    self as native, Algorithm, Ask, CollectiveTimes, DimAlgorithm, Fabric, FabricDimension, Method,
    Pattern, RingSet,
};
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::program::Plan;
use std::sync::Arc;

impl Cluster {
    /// Returns host size and dimensions for algorithms that depend on the topology. Each axis of a
    /// torus is a separate dimension.
    pub fn fabric(&self) -> Fabric {
        let dimensions = self.dimensions.iter().flat_map(|dimension| match &dimension.kind {
            DimensionKind::Ring | DimensionKind::Graph { .. } => {
                vec![described(
                    dimension,
                    dimension.name.clone(),
                    dimension.size,
                    DimAlgorithm::Ring,
                )]
            }
            DimensionKind::Switch => {
                vec![described(
                    dimension,
                    dimension.name.clone(),
                    dimension.size,
                    DimAlgorithm::Halving,
                )]
            }
            DimensionKind::FullyConnected => {
                vec![described(
                    dimension,
                    dimension.name.clone(),
                    dimension.size,
                    DimAlgorithm::Direct,
                )]
            }
            DimensionKind::Torus { shape, .. } => {
                let axis = |(axis, &size)| {
                    let name = format!("{}, axis {axis}", dimension.name);
                    described(dimension, name, size, DimAlgorithm::Ring)
                };
                shape.iter().enumerate().map(axis).collect()
            }
        });
        let wire = self.measured.as_ref().and_then(|measured| measured.transports.first());
        let shared = wire.is_some_and(|wire| wire.name == "shm");
        Fabric {
            host: self.devices_per_host(),
            dimensions: dimensions.collect(),
            shm_domain: shared.then(|| self.devices_per_host()),
            library: None,
            host_rings: self.host_rings(),
            // Ranks of a calibrated host find out about it as they start, and cannot choose by it.
            times: match self.measured {
                None => Some(Arc::new(Times { cluster: self.clone() })),
                Some(_) => None,
            },
        }
    }

    /// Orders in which rings visit the devices of a host over direct links, each link taken by one
    /// ring in each direction. Every order begins and ends where no other leaves the host, as far as
    /// there are ports.
    fn host_rings(&self) -> Vec<Vec<u32>> {
        let [inner, rest @ ..] = &self.dimensions[..] else { return Vec::new() };
        let DimensionKind::Graph { switches: 0, links } = &inner.kind else { return Vec::new() };
        if inner.size > RingSet::MAX_ORDERED || u64::from(inner.size) != self.devices_per_host() {
            return Vec::new();
        }
        let behind = rest.first().map_or(1, |dimension| dimension.devices_per_link.max(1));
        let mut taken: Vec<u32> = Vec::new();
        let mut walks = nccl::walks(inner.size, links, inner);
        walks.truncate(RingSet::MAX_ORDERS);
        for walk in &mut walks {
            let free = |turn: usize, taken: &[u32]| {
                let ends = [walk[turn], walk[(turn + walk.len() - 1) % walk.len()]];
                let mut ports = ends.map(|end| end / behind).to_vec();
                ports.dedup();
                ports.iter().filter(|port| !taken.contains(port)).count()
            };
            // The first of the turns with the most free ports.
            let best = (0..walk.len()).rev().max_by_key(|&turn| free(turn, &taken)).unwrap_or(0);
            walk.rotate_left(best);
            taken.extend([walk[0], walk[walk.len() - 1]].map(|end| end / behind));
        }
        walks
    }

    /// Like [`fabric`](Self::fabric), with the library that a software profile uses on the cluster.
    /// A calibrated host was measured by the plan's steps.
    pub fn fabric_with(&self, profile: &Profile) -> Fabric {
        let library = match profile.library {
            Library::Nccl if Nccl::new(self).is_some() => Some(native::Library::Nccl),
            Library::Nccl | Library::Steps => None,
        };
        let library = library.filter(|_| self.measured.is_none() || self.hosts > 1);
        Fabric { library, ..self.fabric() }
    }
}

/// Times of collectives on a cluster with nothing else on its links.
#[derive(Debug)]
struct Times {
    cluster: Cluster,
}

impl CollectiveTimes for Times {
    fn seconds(&self, pattern: &Pattern, members: &[Rank], ask: &Ask) -> Option<f64> {
        let Ask { elements, element, block, .. } = *ask;
        let vector = Vector { elements, element, block };
        Some(Analytic::new(&self.cluster).collective(pattern, members, &vector).ok()?.0)
    }

    fn least_round(&self, members: &[Rank]) -> f64 {
        let pairs = members.windows(2).filter_map(|pair| self.cluster.link(pair[0], pair[1]));
        pairs.map(|path| path.latency.0).reduce(f64::min).unwrap_or(0.0)
    }
}

fn described(dimension: &Dimension, name: String, size: u32, way: DimAlgorithm) -> FabricDimension {
    let rate = dimension.achievable().0 / f64::from(dimension.devices_per_link.max(1)) / 1e6;
    let rate = rate.clamp(1.0, f64::from(u32::MAX)) as u32;
    FabricDimension { name, size, way, rate, reduces: dimension.in_network_reduction }
}

/// Rejects a plan whose collectives need in-network reduction that the cluster's switches lack.
pub(crate) fn check_switches(
    plan: &Plan,
    cluster: &Cluster,
    placement: &Placement,
) -> Result<(), SimError> {
    let fabric = cluster.fabric();
    for (index, program) in plan.programs.iter().enumerate() {
        let rank = plan.representative(RoleId::from(index));
        for call in &program.calls {
            let Method::Steps(algorithm) = call.method else { continue };
            if !sums_in_switches(algorithm) {
                continue;
            }
            let mut members = plan.mesh.members(plan.group(call.group), rank);
            members.iter_mut().for_each(|member| *member = placement.device(*member));
            fabric.resolve(algorithm, &members).map_err(|source| SimError::Collective {
                rank,
                role: program.name.clone(),
                what: call.name.clone(),
                source,
            })?;
        }
    }
    Ok(())
}

fn sums_in_switches(algorithm: Algorithm) -> bool {
    let levels = algorithm.levels().unwrap_or([algorithm; 2]);
    levels.contains(&Algorithm::InNetwork)
}

#[cfg(test)]
mod tests {
    use crate::cluster::preset;
    use paceline_plan::ids::Rank;

    fn resolved(cluster: &str, algorithm: &str, ranks: u32) -> String {
        let members: Vec<Rank> = (0..ranks).map(Rank).collect();
        let fabric = preset::get(cluster).unwrap().fabric();
        fabric.resolve(algorithm.parse().unwrap(), &members).unwrap().to_string()
    }

    #[test]
    fn presets_say_what_algorithms_need() {
        let open = "hierarchical:ring:in-network";
        assert_eq!(resolved("dgx-a100:4", open, 32), format!("{open}/8"));
        assert_eq!(
            resolved("dgx-a100:4", "themis:16", 32),
            "themis:16/8hx4h@234000x23250",
            "what payload gets of 300 and 25 GB/s"
        );
        let axes = resolved("tpu-v4", "per-dimension:4", 4096);
        assert!(axes.starts_with("per-dimension:4/16rx16rx16r@"), "{axes}");
    }
}
