//! What an algorithm has to know of a machine: which ranks share a host, and how they are joined.

use super::algorithm::{Algorithm, Level};
use super::grid::{Grid, GridDimension, Way};
use super::resolve::CollectiveError;
use crate::ids::Rank;

/// Where ranks stand. Rank *r* stands on device *r*, whose coordinates count through the dimensions, the
/// innermost first.
///
/// Plans know no cluster; who does hands this to [`Fabric::settle`], after which an algorithm says all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// How many consecutive ranks share a host.
    pub host: u64,
    /// The dimensions, innermost first.
    pub dimensions: Vec<FabricDimension>,
}

/// One dimension of a machine's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricDimension {
    /// What people call it.
    pub name: String,
    /// How many members it has.
    pub size: u32,
    /// What its links are good for. A switch with other than a power of two of members goes by ring.
    pub way: Way,
    /// What one link carries, in MB/s.
    pub rate: u32,
    /// Whether its switch can sum.
    pub reduces: bool,
}

impl Fabric {
    /// Ranks that all share one host, in which everyone reaches everyone.
    pub fn one_host(ranks: u32) -> Self {
        let size = ranks.max(1);
        let (name, way) = ("memory".to_owned(), Way::Halving);
        let memory = FabricDimension { name, size, way, rate: 1, reduces: false };
        Self { host: size.into(), dimensions: vec![memory] }
    }

    /// Settles what an algorithm leaves open for a group: how many of its members share a host, and which
    /// dimensions they span. Refuses what the machine cannot do.
    pub fn settle(
        &self,
        algorithm: Algorithm,
        members: &[Rank],
    ) -> Result<Algorithm, CollectiveError> {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let settled = match algorithm {
            Algorithm::Hierarchical { host: None, .. } => {
                let host = self.together(members).ok_or(CollectiveError::UnevenHosts { ranks })?;
                algorithm.with_host(host)
            }
            Algorithm::PerDimension { chunks, order, grid: None } => {
                let grid = Some(self.grid(algorithm, members)?);
                Algorithm::PerDimension { chunks, order, grid }
            }
            settled => settled,
        };
        match settled {
            Algorithm::InNetwork => self.check_reduces(settled, members)?,
            Algorithm::Hierarchical { inner, outer, host: Some(host) } => {
                let host = host.get() as usize;
                if inner == Level::InNetwork {
                    self.check_reduces(settled, members.get(..host).unwrap_or(members))?;
                }
                if outer == Level::InNetwork {
                    let across: Vec<Rank> = members.iter().copied().step_by(host).collect();
                    self.check_reduces(settled, &across)?;
                }
            }
            _ => {}
        }
        Ok(settled)
    }

    /// How many consecutive members share a host, if it is as many on every host.
    fn together(&self, members: &[Rank]) -> Option<u32> {
        let host = |rank: &Rank| u64::from(rank.0) / self.host.max(1);
        let mut runs = members.chunk_by(|a, b| host(a) == host(b)).map(<[Rank]>::len);
        let first = runs.next()?;
        let even = runs.all(|run| run == first);
        u32::try_from(first).ok().filter(|_| even)
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
        let irregular = || CollectiveError::NoGrid { algorithm, ranks };
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
                Way::Halving if !few => Way::Direct,
                Way::Halving if !size.is_power_of_two() => Way::Ring,
                way => way,
            };
            GridDimension { size, way, rate: rate.max(1) }
        };
        let mut dimensions: Vec<_> = spanned.iter().map(dimension).collect();
        if dimensions.is_empty() {
            dimensions.push(GridDimension { size: 1, way: Way::Ring, rate: 1 });
        }
        Grid::new(&dimensions)
            .ok_or(CollectiveError::ManyDimensions { algorithm, dimensions: dimensions.len() })
    }

    /// By dimension, the coordinates that members have, in the order of their first appearance.
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

    /// The outermost dimension in which members differ must have a switch that sums.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Two racks of four hosts of eight devices; the middle one has switches that sum.
    fn fabric() -> Fabric {
        let dimension = |name: &str, size, way, rate, reduces| FabricDimension {
            name: name.into(),
            size,
            way,
            rate,
            reduces,
        };
        let dimensions = vec![
            dimension("nvlink", 8, Way::Halving, 300, false),
            dimension("rack", 4, Way::Halving, 25, true),
            dimension("core", 2, Way::Ring, 10, false),
        ];
        Fabric { host: 8, dimensions }
    }

    fn settled(text: &str, members: impl IntoIterator<Item = u32>) -> Result<String, String> {
        let members: Vec<Rank> = members.into_iter().map(Rank).collect();
        let algorithm = fabric().settle(text.parse().unwrap(), &members);
        algorithm.map(|a| a.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn hosts_are_counted_in_the_group_and_not_in_the_machine() {
        let settled = |members: Vec<u32>| settled("hierarchical:ring:tree", members);
        assert_eq!(settled((0..64).collect()).unwrap(), "hierarchical:ring:tree/8");
        assert_eq!(settled((0..64).step_by(2).collect()).unwrap(), "hierarchical:ring:tree/4");
        assert_eq!(settled((0..64).step_by(8).collect()).unwrap(), "hierarchical:ring:tree/1");
        assert_eq!(settled((0..4).collect()).unwrap(), "hierarchical:ring:tree/4");
        assert!(settled((0..12).collect()).unwrap_err().contains("evenly"));
    }

    #[test]
    fn a_group_goes_through_the_dimensions_that_it_spans() {
        assert_eq!(settled("themis:4", 0..64).unwrap(), "themis:4/8hx4hx2r@300x25x10");
        assert_eq!(settled("per-dimension", 0..32).unwrap(), "per-dimension/8hx4h@300x25");
        assert_eq!(
            settled("per-dimension", (0..64).step_by(8)).unwrap(),
            "per-dimension/4hx2r@25x10"
        );
        assert_eq!(settled("per-dimension:2", 0..6).unwrap(), "per-dimension:2/6r@300");
        assert_eq!(settled("per-dimension", 5..6).unwrap(), "per-dimension/1r");
        assert!(settled("per-dimension", 0..12).unwrap_err().contains("12 ranks"));
        assert!(settled("per-dimension", [0, 8, 1, 9]).is_err(), "not in the grid's order");
    }

    #[test]
    fn only_switches_that_sum_reduce() {
        assert_eq!(settled("in-network", (0..32).step_by(8)).unwrap(), "in-network");
        assert_eq!(settled("in-network", 0..32).unwrap(), "in-network");
        let told = settled("in-network", 0..8).unwrap_err();
        assert!(told.contains("nvlink") && told.contains("in_network_reduction"), "{told}");
        assert!(settled("in-network", 0..64).unwrap_err().contains("core"));
        assert!(settled("hierarchical:ring:in-network", 0..32).is_ok());
        assert!(settled("hierarchical:in-network:ring", 0..32).is_err());
        assert!(settled("in-network", 3..4).is_ok(), "a lone rank needs no switch");
    }
}
