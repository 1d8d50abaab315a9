//! Machine properties that algorithms depend on: ranks per host, and the network between them.

use super::grid::{DimAlgorithm, Grid, GridDimension};
use super::method::Library;
use super::resolve::CollectiveError;
use super::ring_set::RingSet;
use super::{Algorithm, CollectiveTimes};
use crate::ids::Rank;
use crate::mesh::{GroupKind, Mesh};
use std::sync::Arc;

/// Location of ranks. Rank *r* is on device *r*, whose coordinates count through the dimensions,
/// the innermost first.
///
/// Plans know no cluster. Code that does calls [`Fabric::resolve`] to complete a requested algorithm,
/// and [`Fabric::decide`] chooses the method of every call of a plan.
#[derive(Clone, Debug)]
pub struct Fabric {
    /// Number of consecutive ranks that share a host.
    pub host: u64,
    /// The dimensions, innermost first.
    pub dimensions: Vec<FabricDimension>,
    /// Number of consecutive ranks that can map each other's memory; `None` if none can.
    pub shm_domain: Option<u64>,
    /// Communication library with a communicator for every group.
    pub library: Option<Library>,
    /// Orders in which rings can visit the devices of a host over links of their own, one for every
    /// two rings; empty if a switch joins the devices.
    pub host_rings: Vec<Vec<u32>>,
    /// Times of collectives, by which an algorithm is chosen if nobody has named one.
    pub times: Option<Arc<dyn CollectiveTimes>>,
}

/// One dimension of a machine's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricDimension {
    /// Its name.
    pub name: String,
    /// Number of its members.
    pub size: u32,
    /// Algorithm that suits its links. A switch without a power of two of members uses the ring.
    pub way: DimAlgorithm,
    /// Bandwidth of one link, in MB/s.
    pub rate: u32,
    /// True if its switch can reduce.
    pub reduces: bool,
}

impl Fabric {
    /// A fabric of which nothing is known.
    pub fn unknown() -> Self {
        Self {
            host: 1,
            dimensions: Vec::new(),
            shm_domain: None,
            library: None,
            host_rings: Vec::new(),
            times: None,
        }
    }

    /// Returns true if the members of every group of a kind can map each other's memory.
    pub fn share_memory(&self, mesh: &Mesh, group: GroupKind) -> bool {
        let Some(domain) = self.shm_domain.filter(|&ranks| ranks > 0) else { return false };
        let of = |rank: &Rank| u64::from(rank.0) / domain;
        let inside = |rank: u32| {
            let members = mesh.members(group, Rank(rank));
            members.windows(2).all(|pair| of(&pair[0]) == of(&pair[1]))
        };
        u64::from(mesh.world()) <= domain || (0..mesh.world()).all(inside)
    }

    /// A fabric whose ranks all share one host, all directly connected.
    pub fn one_host(ranks: u32) -> Self {
        let size = ranks.max(1);
        let (name, way) = ("memory".to_owned(), DimAlgorithm::Halving);
        let memory = FabricDimension { name, size, way, rate: 1, reduces: false };
        Self { host: size.into(), dimensions: vec![memory], ..Self::unknown() }
    }

    /// Resolves the open parameters of an algorithm for a group: the number of members per host,
    /// and the dimensions they span. Refuses an algorithm that the machine cannot run.
    pub fn resolve(
        &self,
        algorithm: Algorithm,
        members: &[Rank],
    ) -> Result<Algorithm, CollectiveError> {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let resolved = match algorithm {
            Algorithm::Hierarchical { host: None, .. } => {
                let host = ranks_per_unit(members, self.host).ok_or_else(|| uneven(ranks))?;
                algorithm.with_host(host)
            }
            Algorithm::PerDimension { chunks, order, grid: None } => {
                let grid = Some(self.grid(algorithm, members)?);
                Algorithm::PerDimension { chunks, order, grid }
            }
            Algorithm::MultiRing { rings } if rings.host().is_none() => {
                Algorithm::MultiRing { rings: self.rings(rings, members) }
            }
            resolved => resolved,
        };
        let on = match resolved {
            Algorithm::Hierarchical { host: Some(host), .. } => host.get() as usize,
            _ => members.len(),
        };
        let switches = |algorithm| algorithm == Algorithm::InNetwork;
        let [inner, outer] = resolved.levels().unwrap_or([resolved, Algorithm::Auto]);
        if switches(inner) {
            self.check_reduces(resolved, members.get(..on).unwrap_or(members))?;
        }
        if switches(outer) {
            let across: Vec<Rank> = members.iter().copied().step_by(on).collect();
            self.check_reduces(resolved, &across)?;
        }
        Ok(resolved)
    }

    /// Lays rings over the links of a group: in the orders that a host's graph has if the group has
    /// all of its devices, and out of several switches through as many members as there are rings.
    fn rings(&self, rings: RingSet, members: &[Rank]) -> RingSet {
        let Some(inner) = self.dimensions.first() else { return rings };
        let unit = u64::from(inner.size.max(1));
        let Some(host) = ranks_per_unit(members, unit) else { return rings };
        let at_home = |(at, rank): (usize, &Rank)| u64::from(rank.0) % unit == at as u64 % unit;
        let whole = u64::from(host) == unit && members.iter().enumerate().all(at_home);
        let wanted = self.host_rings.len().min(rings.count().div_ceil(2) as usize);
        let ordered = rings.with_orders(&self.host_rings[..wanted]).filter(|_| whole);
        let switched = self.host_rings.is_empty() && inner.way != DimAlgorithm::Ring;
        let several = switched && (host as usize) < members.len();
        ordered.unwrap_or_else(|| if several { rings.over_hosts(host) } else { rings })
    }

    fn coordinates(&self, rank: Rank) -> impl Iterator<Item = u32> {
        let mut rest = rank.0;
        self.dimensions.iter().map(move |d| {
            let here = rest % d.size.max(1);
            rest /= d.size.max(1);
            here
        })
    }

    /// The dimensions in which members differ, if the members fill a grid of them in order.
    fn grid(&self, algorithm: Algorithm, members: &[Rank]) -> Result<Grid, CollectiveError> {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let irregular = || {
            CollectiveError::Unfit(format!(
                "{algorithm} needs ranks that fill a grid of the cluster's dimensions in order; these \
                 {ranks} ranks do not"
            ))
        };
        let spans = self.spans(members);
        let spanned: Vec<usize> = (0..spans.len()).filter(|&d| spans[d].len() > 1).collect();
        let product = spanned.iter().fold(1usize, |n, &d| n.saturating_mul(spans[d].len()));
        if product != members.len() {
            return Err(irregular());
        }
        for (index, member) in members.iter().enumerate() {
            let coordinates: Vec<u32> = self.coordinates(*member).collect();
            let mut rest = index;
            for &d in &spanned {
                if coordinates[d] != spans[d][rest % spans[d].len()] {
                    return Err(irregular());
                }
                rest /= spans[d].len();
            }
        }
        let few = spanned.len() <= Grid::MAX_WITH_HALVING;
        let dimension = |&d: &usize| {
            let FabricDimension { way, rate, .. } = self.dimensions[d];
            let size = spans[d].len() as u32;
            let way = match way {
                DimAlgorithm::Halving if !few => DimAlgorithm::Direct,
                DimAlgorithm::Halving if !size.is_power_of_two() => DimAlgorithm::Ring,
                way => way,
            };
            GridDimension { size, way, rate: rate.max(1) }
        };
        let mut dimensions: Vec<_> = spanned.iter().map(dimension).collect();
        if dimensions.is_empty() {
            dimensions.push(GridDimension { size: 1, way: DimAlgorithm::Ring, rate: 1 });
        }
        Grid::new(&dimensions).ok_or_else(|| {
            CollectiveError::Unfit(format!(
                "{algorithm} supports at most {} dimensions, and the group spans {}",
                Grid::MAX_DIMENSIONS,
                dimensions.len()
            ))
        })
    }

    /// Number of dimensions in which members differ.
    pub(super) fn spanned(&self, members: &[Rank]) -> usize {
        self.spans(members).iter().filter(|span| span.len() > 1).count()
    }

    /// The members' coordinates in each dimension, in order of first appearance.
    fn spans(&self, members: &[Rank]) -> Vec<Vec<u32>> {
        let mut spans = vec![Vec::new(); self.dimensions.len()];
        let mut seen: Vec<Vec<bool>> =
            self.dimensions.iter().map(|d| vec![false; d.size.max(1) as usize]).collect();
        for &member in members {
            for (d, here) in self.coordinates(member).enumerate() {
                if !std::mem::replace(&mut seen[d][here as usize], true) {
                    spans[d].push(here);
                }
            }
        }
        spans
    }

    /// Checks that the outermost dimension in which members differ has a switch that can reduce.
    fn check_reduces(&self, algorithm: Algorithm, members: &[Rank]) -> Result<(), CollectiveError> {
        let spans = self.spans(members);
        let outermost = (0..spans.len()).rev().find(|&d| spans[d].len() > 1);
        match outermost.map(|d| &self.dimensions[d]) {
            Some(dimension) if !dimension.reduces => {
                let dimension = dimension.name.clone();
                Err(CollectiveError::NoReduction { algorithm, dimension })
            }
            _ => Ok(()),
        }
    }
}

/// Number of consecutive members in a unit of some devices, such as a host, if all have as many.
fn ranks_per_unit(members: &[Rank], devices: u64) -> Option<u32> {
    let unit = |rank: &Rank| u64::from(rank.0) / devices.max(1);
    let mut runs = members.chunk_by(|a, b| unit(a) == unit(b)).map(<[Rank]>::len);
    let first = runs.next()?;
    let even = runs.all(|run| run == first);
    u32::try_from(first).ok().filter(|_| even)
}

fn uneven(ranks: u32) -> CollectiveError {
    CollectiveError::Unfit(format!(
        "{ranks} ranks do not share hosts evenly; use as many of each host"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two racks of four hosts of eight devices; the middle dimension has switches that can reduce.
    fn fabric() -> Fabric {
        let dimension = |name: &str, size, way, rate, reduces| FabricDimension {
            name: name.into(),
            size,
            way,
            rate,
            reduces,
        };
        let dimensions = vec![
            dimension("nvlink", 8, DimAlgorithm::Halving, 300, false),
            dimension("rack", 4, DimAlgorithm::Halving, 25, true),
            dimension("core", 2, DimAlgorithm::Ring, 10, false),
        ];
        Fabric { host: 8, dimensions, ..Fabric::unknown() }
    }

    fn resolved(text: &str, members: impl IntoIterator<Item = u32>) -> Result<String, String> {
        let members: Vec<Rank> = members.into_iter().map(Rank).collect();
        let algorithm = fabric().resolve(text.parse().unwrap(), &members);
        algorithm.map(|a| a.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn hosts_are_counted_in_the_group_and_not_in_the_machine() {
        let resolved = |members: Vec<u32>| resolved("hierarchical:ring:tree", members);
        assert_eq!(resolved((0..64).collect()).unwrap(), "hierarchical:ring:tree/8");
        assert_eq!(resolved((0..64).step_by(2).collect()).unwrap(), "hierarchical:ring:tree/4");
        assert_eq!(resolved((0..64).step_by(8).collect()).unwrap(), "hierarchical:ring:tree/1");
        assert_eq!(resolved((0..4).collect()).unwrap(), "hierarchical:ring:tree/4");
        assert!(resolved((0..12).collect()).unwrap_err().contains("evenly"));
    }

    #[test]
    fn a_group_goes_through_the_dimensions_that_it_spans() {
        assert_eq!(resolved("themis:4", 0..64).unwrap(), "themis:4/8hx4hx2r@300x25x10");
        assert_eq!(resolved("per-dimension", 0..32).unwrap(), "per-dimension/8hx4h@300x25");
        assert_eq!(
            resolved("per-dimension", (0..64).step_by(8)).unwrap(),
            "per-dimension/4hx2r@25x10"
        );
        assert_eq!(resolved("per-dimension:2", 0..6).unwrap(), "per-dimension:2/6r@300");
        assert_eq!(resolved("per-dimension", 5..6).unwrap(), "per-dimension/1r");
        assert!(resolved("per-dimension", 0..12).unwrap_err().contains("12 ranks"));
        assert!(resolved("per-dimension", [0, 8, 1, 9]).is_err(), "not in the grid's order");
    }

    #[test]
    fn rings_take_the_links_of_hosts() {
        assert_eq!(resolved("multi-ring:4", 0..32).unwrap(), "multi-ring:4/8");
        assert_eq!(resolved("multi-ring:4", (0..32).step_by(2)).unwrap(), "multi-ring:4/4");
        assert_eq!(resolved("multi-ring:4", 0..8).unwrap(), "multi-ring:4", "one switch");
        assert_eq!(resolved("multi-ring:4", 4..16).unwrap(), "multi-ring:4", "uneven");
        let host_rings = vec![vec![0, 2, 1, 3], vec![1, 0, 3, 2]];
        let mut meshed = Fabric { host: 4, host_rings, ..fabric() };
        meshed.dimensions[0].size = 4;
        meshed.dimensions[0].way = DimAlgorithm::Ring;
        let resolved = |members: std::ops::Range<u32>, rings: &str| {
            let members: Vec<Rank> = members.map(Rank).collect();
            meshed.resolve(rings.parse().unwrap(), &members).unwrap().to_string()
        };
        assert_eq!(resolved(0..8, "multi-ring:4"), "multi-ring:4/4@0213,1032");
        assert_eq!(resolved(0..8, "multi-ring:2"), "multi-ring:2/4@0213");
        assert_eq!(resolved(4..8, "multi-ring:8"), "multi-ring:8/4@0213,1032");
        assert_eq!(resolved(1..5, "multi-ring:4"), "multi-ring:4", "not whole hosts");
    }

    #[test]
    fn only_switches_that_sum_reduce() {
        assert_eq!(resolved("in-network", (0..32).step_by(8)).unwrap(), "in-network");
        assert_eq!(resolved("in-network", 0..32).unwrap(), "in-network");
        let told = resolved("in-network", 0..8).unwrap_err();
        assert!(told.contains("nvlink") && told.contains("in_network_reduction"), "{told}");
        assert!(resolved("in-network", 0..64).unwrap_err().contains("core"));
        assert!(resolved("hierarchical:ring:in-network", 0..32).is_ok());
        assert!(resolved("hierarchical:in-network:ring", 0..32).is_err());
        assert!(resolved("in-network", 3..4).is_ok(), "a lone rank needs no switch");
    }
}
