//! Communication time on links whose bandwidth changes during an exchange.
//!
//! Between two changes the network is constant, and a backend gives the duration. An exchange in
//! flight at a change has done a fraction of its work: the elapsed time over the duration at the
//! old bandwidth. The rest proceeds at the new bandwidth. For a message only the transfer changes;
//! its latency comes first. A collective alternates between both in every round, so its work counts
//! as spread evenly.

use crate::cluster::{Cluster, through};
use crate::network::{CostModel, NoPath, of_library};
use crate::profile::Library;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use std::rc::Rc;

/// Cluster per epoch, from one change of its links to the next.
pub(crate) struct ClusterEpochs {
    all: Vec<(f64, Cluster)>,
}

impl ClusterEpochs {
    /// Derives the cluster of each epoch.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        let moments = cluster.moments();
        Self { all: moments.into_iter().map(|at| (at, cluster.at(at))).collect() }
    }

    /// Returns the network of each epoch, as a communication library uses the links.
    pub(crate) fn networks(&self, library: Library) -> NetworkEpochs<'_> {
        let all = self.all.iter().map(|(at, cluster)| (*at, of_library(library, cluster)));
        NetworkEpochs { all: all.collect() }
    }
}

/// Network per epoch, from one change of its links to the next.
pub(crate) struct NetworkEpochs<'a> {
    /// Start time and network of each epoch; the first starts at 0.
    all: Vec<(f64, Box<dyn CostModel + 'a>)>,
}

impl<'a> NetworkEpochs<'a> {
    /// Creates a network that never changes.
    pub(crate) fn constant(network: impl CostModel + 'a) -> Self {
        Self { all: vec![(0.0, Box::new(network))] }
    }

    /// Network of the first epoch.
    pub(crate) fn first(&self) -> &dyn CostModel {
        self.all[0].1.as_ref()
    }

    /// Builds a duration from its time on each epoch's network.
    pub(super) fn duration<E>(
        &self,
        time: impl Fn(&dyn CostModel) -> Result<Seconds, E>,
    ) -> Result<SimDuration, E> {
        if let [(_, network)] = &self.all[..] {
            return Ok(SimDuration::Fixed(time(network.as_ref())?));
        }
        let pieces = self.all.iter().map(|(at, network)| Ok((*at, time(network.as_ref())?.0)));
        Ok(SimDuration::varying(0.0, pieces.collect::<Result<_, E>>()?))
    }

    /// Builds the duration of a message.
    pub(super) fn message(
        &self,
        from: Rank,
        to: Rank,
        time: impl Fn(&dyn CostModel) -> Result<Seconds, NoPath>,
    ) -> Result<SimDuration, NoPath> {
        let changing = match self.duration(time)? {
            always @ SimDuration::Fixed(_) => return Ok(always),
            SimDuration::Varying(changing) => changing,
        };
        let latency = self.first().message(from, to, Bytes::ZERO)?.0;
        let rest = |&(at, whole): &(f64, f64)| (at, (whole - latency).max(0.0));
        Ok(SimDuration::varying(latency, changing.pieces.iter().map(rest).collect()))
    }
}

/// Duration that may depend on its start time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SimDuration {
    /// Independent of the start time.
    Fixed(Seconds),
    /// Dependent on the start time.
    Varying(Rc<VaryingDuration>),
}

/// Duration that depends on its start time.
#[derive(Debug, PartialEq)]
pub(crate) struct VaryingDuration {
    /// Initial part that is the same in every epoch, such as latency.
    before: f64,
    /// Start of each epoch and duration of the rest in it.
    pieces: Vec<(f64, f64)>,
}

impl SimDuration {
    /// Duration of zero.
    pub(super) const ZERO: Self = Self::Fixed(Seconds::ZERO);

    fn varying(before: f64, mut pieces: Vec<(f64, f64)>) -> Self {
        pieces.dedup_by(|next, last| next.1 == last.1);
        match pieces[..] {
            [(_, only)] => Self::Fixed(Seconds(before + only)),
            _ => Self::Varying(Rc::new(VaryingDuration { before, pieces })),
        }
    }

    /// End time if started at `start`.
    pub(super) fn end(&self, start: f64) -> f64 {
        match self {
            Self::Fixed(time) => start + time.0,
            Self::Varying(changing) => {
                through(start + changing.before, &changing.pieces, |&whole| whole)
            }
        }
    }

    /// Applies `of` to the duration of every epoch.
    pub(super) fn map(&self, of: impl Fn(Seconds) -> Seconds) -> Self {
        match self {
            Self::Fixed(time) => Self::Fixed(of(*time)),
            Self::Varying(changing) => {
                let whole = |&(at, rest): &(f64, f64)| (at, of(Seconds(changing.before + rest)).0);
                Self::varying(0.0, changing.pieces.iter().map(whole).collect())
            }
        }
    }

    /// Returns the longer of two durations, epoch by epoch.
    pub(super) fn max(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Fixed(a), Self::Fixed(b)) => Self::Fixed(a.max(*b)),
            (Self::Varying(_), _) | (_, Self::Varying(_)) => {
                let mut moments: Vec<f64> =
                    [&self, &other].iter().flat_map(|one| one.moments()).collect();
                moments.sort_by(f64::total_cmp);
                moments.dedup();
                let longer = |at: f64| (at, self.whole(at).max(other.whole(at)));
                Self::varying(0.0, moments.into_iter().map(longer).collect())
            }
        }
    }

    fn moments(&self) -> Vec<f64> {
        match self {
            Self::Fixed(_) => vec![0.0],
            Self::Varying(changing) => changing.pieces.iter().map(|&(at, _)| at).collect(),
        }
    }

    /// Total duration if nothing changed after time `at`.
    fn whole(&self, at: f64) -> f64 {
        match self {
            Self::Fixed(time) => time.0,
            Self::Varying(changing) => {
                let piece = changing.pieces.partition_point(|&(from, _)| from <= at);
                changing.before + changing.pieces[piece.saturating_sub(1)].1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changing(before: f64, pieces: &[(f64, f64)]) -> SimDuration {
        SimDuration::varying(before, pieces.to_vec())
    }

    #[test]
    fn what_is_done_before_a_change_stays_done() {
        // Half as fast from t = 10 on.
        let transfer = changing(1.0, &[(0.0, 4.0), (10.0, 8.0)]);
        assert_eq!(transfer.end(0.0), 5.0);
        assert_eq!(transfer.end(20.0), 29.0);
        // Latency from 7 to 8, half of the transfer from 8 to 10, and the other half takes four.
        assert_eq!(transfer.end(7.0), 14.0);
        assert_eq!(transfer.end(5.0), 10.0, "done just as rates change");
    }

    #[test]
    fn the_longer_one_may_change_over_time() {
        let early = changing(0.0, &[(0.0, 4.0), (10.0, 2.0)]);
        let late = changing(0.0, &[(0.0, 1.0), (5.0, 3.0)]);
        let longer = early.clone().max(late);
        assert_eq!(longer, changing(0.0, &[(0.0, 4.0), (10.0, 3.0)]));
        assert_eq!(early.max(SimDuration::Fixed(Seconds(5.0))), SimDuration::Fixed(Seconds(5.0)));
        let half = longer.map(|time| time * 0.5);
        assert_eq!(half, changing(0.0, &[(0.0, 2.0), (10.0, 1.5)]));
    }
}
