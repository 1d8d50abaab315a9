//! How long communication takes when links change while it is under way.
//!
//! Between two changes the network stands still, and a backend says what something takes on it. What
//! is under way when rates change has done a share of its work by then: the time so far over what it
//! would have taken. The rest is done at the new rates. Of a message only the transfer changes; it
//! has its latency behind it first. A collective alternates between both in every round, so that
//! its work counts as spread evenly.

use crate::cluster::{Cluster, through};
use crate::network::{Network, NoPath, of_library};
use crate::profile::Library;
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};
use std::rc::Rc;

/// A cluster from one change of its links to the next.
pub struct Moments {
    all: Vec<(f64, Cluster)>,
}

impl Moments {
    /// The cluster as it is between changes.
    pub fn new(cluster: &Cluster) -> Self {
        let moments = cluster.moments();
        Self { all: moments.into_iter().map(|at| (at, cluster.at(at))).collect() }
    }

    /// What moves bytes between changes, as a library uses the links.
    pub fn networks(&self, library: Library) -> Eras<'_> {
        let all = self.all.iter().map(|(at, cluster)| (*at, of_library(library, cluster)));
        Eras { all: all.collect() }
    }
}

/// A network from one change of its links to the next.
pub struct Eras<'a> {
    /// Since when, and what; the first since the start.
    all: Vec<(f64, Box<dyn Network + 'a>)>,
}

impl<'a> Eras<'a> {
    /// A network that never changes.
    pub fn still(network: impl Network + 'a) -> Self {
        Self { all: vec![(0.0, Box::new(network))] }
    }

    /// The network at the start.
    pub(crate) fn first(&self) -> &dyn Network {
        self.all[0].1.as_ref()
    }

    /// What takes so long on each of the networks.
    pub(super) fn lasting<E>(
        &self,
        time: impl Fn(&dyn Network) -> Result<Seconds, E>,
    ) -> Result<Lasting, E> {
        if let [(_, network)] = &self.all[..] {
            return Ok(Lasting::Always(time(network.as_ref())?));
        }
        let pieces = self.all.iter().map(|(at, network)| Ok((*at, time(network.as_ref())?.0)));
        Ok(Lasting::changing(0.0, pieces.collect::<Result<_, E>>()?))
    }

    /// A message.
    pub(super) fn message(
        &self,
        from: Rank,
        to: Rank,
        time: impl Fn(&dyn Network) -> Result<Seconds, NoPath>,
    ) -> Result<Lasting, NoPath> {
        let changing = match self.lasting(time)? {
            always @ Lasting::Always(_) => return Ok(always),
            Lasting::Changing(changing) => changing,
        };
        let latency = self.first().message(from, to, Bytes::ZERO)?.0;
        let rest = |&(at, whole): &(f64, f64)| (at, (whole - latency).max(0.0));
        Ok(Lasting::changing(latency, changing.pieces.iter().map(rest).collect()))
    }
}

/// A duration that may depend on when it starts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lasting {
    /// It does not.
    Always(Seconds),
    /// It does.
    Changing(Rc<Changing>),
}

/// A duration that changes.
#[derive(Debug, PartialEq)]
pub(crate) struct Changing {
    /// What comes first and takes equally long at all times.
    before: f64,
    /// From each moment on, how long the rest would take.
    pieces: Vec<(f64, f64)>,
}

impl Lasting {
    /// No time.
    pub(super) const ZERO: Self = Self::Always(Seconds::ZERO);

    fn changing(before: f64, mut pieces: Vec<(f64, f64)>) -> Self {
        pieces.dedup_by(|next, last| next.1 == last.1);
        match pieces[..] {
            [(_, only)] => Self::Always(Seconds(before + only)),
            _ => Self::Changing(Rc::new(Changing { before, pieces })),
        }
    }

    /// When what starts at a moment ends.
    pub(super) fn end(&self, start: f64) -> f64 {
        match self {
            Self::Always(time) => start + time.0,
            Self::Changing(changing) => {
                through(start + changing.before, &changing.pieces, |&whole| whole)
            }
        }
    }

    /// The same for a duration that is made of this one.
    pub(super) fn map(&self, of: impl Fn(Seconds) -> Seconds) -> Self {
        match self {
            Self::Always(time) => Self::Always(of(*time)),
            Self::Changing(changing) => {
                let whole = |&(at, rest): &(f64, f64)| (at, of(Seconds(changing.before + rest)).0);
                Self::changing(0.0, changing.pieces.iter().map(whole).collect())
            }
        }
    }

    /// The longer of two, from moment to moment.
    pub(super) fn max(self, other: Self) -> Self {
        match (&self, &other) {
            (Self::Always(a), Self::Always(b)) => Self::Always(a.max(*b)),
            (Self::Changing(_), _) | (_, Self::Changing(_)) => {
                let mut moments: Vec<f64> =
                    [&self, &other].iter().flat_map(|one| one.moments()).collect();
                moments.sort_by(f64::total_cmp);
                moments.dedup();
                let longer = |at: f64| (at, self.whole(at).max(other.whole(at)));
                Self::changing(0.0, moments.into_iter().map(longer).collect())
            }
        }
    }

    fn moments(&self) -> Vec<f64> {
        match self {
            Self::Always(_) => vec![0.0],
            Self::Changing(changing) => changing.pieces.iter().map(|&(at, _)| at).collect(),
        }
    }

    /// What all of it would take if nothing changed after a moment.
    fn whole(&self, at: f64) -> f64 {
        match self {
            Self::Always(time) => time.0,
            Self::Changing(changing) => {
                let piece = changing.pieces.partition_point(|&(from, _)| from <= at);
                changing.before + changing.pieces[piece.saturating_sub(1)].1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changing(before: f64, pieces: &[(f64, f64)]) -> Lasting {
        Lasting::changing(before, pieces.to_vec())
    }

    #[test]
    fn what_is_done_before_a_change_stays_done() {
        // Half as fast from 10 on.
        let transfer = changing(1.0, &[(0.0, 4.0), (10.0, 8.0)]);
        assert_eq!(transfer.end(0.0), 5.0);
        assert_eq!(transfer.end(20.0), 29.0);
        // From 7 on latency, from 8 to 10 half of it, and the other half takes four.
        assert_eq!(transfer.end(7.0), 14.0);
        assert_eq!(transfer.end(5.0), 10.0, "done just as rates change");
    }

    #[test]
    fn the_longer_one_may_change_over_time() {
        let early = changing(0.0, &[(0.0, 4.0), (10.0, 2.0)]);
        let late = changing(0.0, &[(0.0, 1.0), (5.0, 3.0)]);
        let longer = early.clone().max(late);
        assert_eq!(longer, changing(0.0, &[(0.0, 4.0), (10.0, 3.0)]));
        assert_eq!(early.max(Lasting::Always(Seconds(5.0))), Lasting::Always(Seconds(5.0)));
        let half = longer.map(|time| time * 0.5);
        assert_eq!(half, changing(0.0, &[(0.0, 2.0), (10.0, 1.5)]));
    }
}
