//! Where in a cluster something holds: everywhere, on some hosts, or on some devices.

use super::Cluster;
use paceline_plan::ids::Rank;
use serde::Serialize;
use std::fmt;

/// The devices that an entry of a cluster file is about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// All of them.
    #[default]
    Everywhere,
    /// Those on these hosts.
    Hosts(Vec<Run>),
    /// Those on which these ranks stand.
    Ranks(Vec<Run>),
}

/// Consecutive numbers, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// The first of them.
    pub first: u32,
    /// The last of them.
    pub last: u32,
}

impl Run {
    /// A single number.
    pub const fn one(number: u32) -> Self {
        Self { first: number, last: number }
    }

    fn contains(self, number: u32) -> bool {
        (self.first..=self.last).contains(&number)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first == self.last {
            true => write!(f, "{}", self.first),
            false => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

impl Place {
    /// Whether a rank of the cluster stands there.
    pub fn holds(&self, cluster: &Cluster, rank: Rank) -> bool {
        let within = |runs: &[Run], number: u32| runs.iter().any(|run| run.contains(number));
        match self {
            Self::Everywhere => true,
            Self::Hosts(hosts) => within(hosts, cluster.host(rank).0),
            Self::Ranks(ranks) => within(ranks, rank.0),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (noun, runs) = match self {
            Self::Everywhere => return f.write_str("everywhere"),
            Self::Hosts(runs) => ("host", runs),
            Self::Ranks(runs) => ("rank", runs),
        };
        let plural = if matches!(runs[..], [run] if run.first == run.last) { "" } else { "s" };
        let runs: Vec<_> = runs.iter().map(Run::to_string).collect();
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
        let at = |place: &Place| (0..32).filter(|&r| place.holds(&cluster, Rank(r))).count();
        assert_eq!(at(&Place::Everywhere), 32);
        let hosts = Place::Hosts(vec![Run::one(0), Run { first: 2, last: 3 }]);
        assert_eq!(at(&hosts), 24);
        assert!(!hosts.holds(&cluster, Rank(8)) && hosts.holds(&cluster, Rank(16)));
        let ranks = Place::Ranks(vec![Run { first: 7, last: 8 }]);
        assert_eq!(at(&ranks), 2);
        assert_eq!(hosts.to_string(), "hosts 0, 2-3");
        assert_eq!(Place::Hosts(vec![Run::one(5)]).to_string(), "host 5");
        assert_eq!(ranks.to_string(), "ranks 7-8");
    }
}
