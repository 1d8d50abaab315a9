//! Selectors of devices in a cluster: all, by host, or by rank.

use super::Cluster;
use paceline_plan::ids::Rank;
use serde::Serialize;
use std::fmt;

/// Devices that an entry of a cluster file applies to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Selector {
    /// All devices.
    #[default]
    Everywhere,
    /// Devices of these hosts.
    Hosts(Vec<IndexRange>),
    /// Devices of these ranks.
    Ranks(Vec<IndexRange>),
}

/// Consecutive numbers, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct IndexRange {
    /// First number.
    pub first: u32,
    /// Last number.
    pub last: u32,
}

impl IndexRange {
    /// A single number.
    pub const fn one(number: u32) -> Self {
        Self { first: number, last: number }
    }

    fn contains(self, number: u32) -> bool {
        (self.first..=self.last).contains(&number)
    }
}

impl fmt::Display for IndexRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

impl Selector {
    /// Returns true if it selects a rank of the cluster.
    pub fn holds(&self, cluster: &Cluster, rank: Rank) -> bool {
        let within = |runs: &[IndexRange], number: u32| runs.iter().any(|run| run.contains(number));
        match self {
            Self::Everywhere => true,
            Self::Hosts(hosts) => within(hosts, cluster.host(rank).0),
            Self::Ranks(ranks) => within(ranks, rank.0),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (noun, runs) = match self {
            Self::Everywhere => return f.write_str("everywhere"),
            Self::Hosts(runs) => ("host", runs),
            Self::Ranks(runs) => ("rank", runs),
        };
        let plural = if matches!(runs[..], [run] if run.first == run.last) { "" } else { "s" };
        let runs: Vec<_> = runs.iter().map(IndexRange::to_string).collect();
        write!(f, "{noun}{plural} {}", runs.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::super::preset;
    use super::*;

    #[test]
    fn hosts_mean_all_their_devices() {
        let cluster = preset::get("dgx-a100:4").unwrap();
        let at = |place: &Selector| (0..32).filter(|&r| place.holds(&cluster, Rank(r))).count();
        assert_eq!(at(&Selector::Everywhere), 32);
        let hosts = Selector::Hosts(vec![IndexRange::one(0), IndexRange { first: 2, last: 3 }]);
        assert_eq!(at(&hosts), 24);
        assert!(!hosts.holds(&cluster, Rank(8)) && hosts.holds(&cluster, Rank(16)));
        let ranks = Selector::Ranks(vec![IndexRange { first: 7, last: 8 }]);
        assert_eq!(at(&ranks), 2);
        assert_eq!(hosts.to_string(), "hosts 0, 2-3");
        assert_eq!(Selector::Hosts(vec![IndexRange::one(5)]).to_string(), "host 5");
        assert_eq!(ranks.to_string(), "ranks 7-8");
    }
}
