//! What breaks the rule that all devices of a cluster are alike, and all links of a dimension.
//!
//! A description states the rule once (the device, the dimensions) and the exceptions here, so that
//! a cluster without any is as small to describe and as quick to simulate as before. Every entry
//! names the devices it is about by a [`Place`]. Times count from the start of the iteration that is
//! simulated.

use super::{Cluster, Device, Place};
use paceline_plan::ids::Rank;
use paceline_plan::units::{BytesPerSec, Seconds};
use serde::Serialize;

/// The exceptions of a cluster; none by default.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Uneven {
    /// Devices of other kinds. Where several name a rank, the last holds.
    pub kinds: Vec<OtherDevice>,
    /// Links that differ from their dimension's. Where several name a rank, the last holds.
    pub links: Vec<OtherLink>,
    /// Devices that are slower than their kind; where several name a rank, their factors multiply.
    pub stragglers: Vec<Straggler>,
    /// Links whose rate changes; where several name a link, their factors multiply.
    pub schedules: Vec<Schedule>,
    /// The moment at which schedules are read.
    #[serde(skip)]
    pub(in crate::cluster) now: f64,
}

/// A kind of device that some ranks have in place of the cluster's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherDevice {
    /// Who has it.
    pub at: Place,
    /// What it is.
    pub device: Device,
}

/// Links of some devices into a dimension, where they differ from the others.
///
/// A message is as fast as the slower of its ends, and its first byte as late as the later of them
/// has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherLink {
    /// Position in [`Cluster::dimensions`].
    pub dimension: usize,
    /// Whose links they are.
    pub at: Place,
    /// What one of them carries, if not what the dimension's do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BytesPerSec>,
    /// Their latency, if not the dimension's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Seconds>,
}

/// Devices whose computations take longer than their kind's: throttled, shared, or broken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Straggler {
    /// Who is slow.
    pub at: Place,
    /// How many times longer computations take.
    pub factor: f64,
    /// Since when.
    pub from: Seconds,
    /// Until when; for good if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Seconds>,
}

/// A dimension's links whose rate changes over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Schedule {
    /// Position in [`Cluster::dimensions`].
    pub dimension: usize,
    /// Whose links they are.
    pub at: Place,
    /// The changes, in order of time; before the first, links have their whole rate.
    pub changes: Vec<Change>,
}

/// From this moment on, links have this share of their rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Change {
    /// When.
    pub at: Seconds,
    /// What is left of the rate: 1 for all of it, 0.1 while others take most.
    pub bandwidth: f64,
}

impl Schedule {
    /// What is left of the rate at a moment.
    fn share(&self, now: f64) -> f64 {
        let past = self.changes.iter().take_while(|change| change.at.0 <= now);
        past.last().map_or(1.0, |change| change.bandwidth)
    }
}

impl Uneven {
    /// Whether there are no exceptions.
    pub fn is_empty(&self) -> bool {
        let Self { kinds, links, stragglers, schedules, now: _ } = self;
        kinds.is_empty() && links.is_empty() && stragglers.is_empty() && schedules.is_empty()
    }
}

impl Cluster {
    /// Whether all devices are alike and all links of a dimension, at all times.
    pub fn is_even(&self) -> bool {
        self.uneven.is_empty()
    }

    /// The device that a rank stands on.
    pub fn device_of(&self, rank: Rank) -> &Device {
        match self.kind_of(rank) {
            0 => &self.device,
            other => &self.uneven.kinds[other - 1].device,
        }
    }

    /// The number of a rank's kind of device: 0 for the cluster's, from 1 on for the others.
    pub(crate) fn kind_of(&self, rank: Rank) -> usize {
        let kinds = &self.uneven.kinds;
        kinds.iter().rposition(|kind| kind.at.holds(self, rank)).map_or(0, |index| index + 1)
    }

    /// All kinds of devices, by number.
    pub fn kinds(&self) -> impl Iterator<Item = &Device> {
        std::iter::once(&self.device).chain(self.uneven.kinds.iter().map(|kind| &kind.device))
    }

    /// Which of the exceptions name a rank, in order: two ranks with the same are alike.
    pub(crate) fn exceptions(&self, rank: Rank) -> Vec<u16> {
        let Uneven { kinds, links, stragglers, schedules, now: _ } = &self.uneven;
        let places = (kinds.iter().map(|entry| &entry.at))
            .chain(links.iter().map(|entry| &entry.at))
            .chain(stragglers.iter().map(|entry| &entry.at))
            .chain(schedules.iter().map(|entry| &entry.at));
        let naming = (0..).zip(places).filter(|(_, place)| place.holds(self, rank));
        naming.map(|(index, _)| index).collect()
    }

    /// Of the dimension's rate, what a rank's links into it have now.
    pub(crate) fn link_scale(&self, rank: Rank, dimension: usize) -> f64 {
        let Uneven { links, schedules, now, .. } = &self.uneven;
        let own = links.iter().rev().find(|link| {
            link.dimension == dimension && link.bandwidth.is_some() && link.at.holds(self, rank)
        });
        let own = own.and_then(|link| link.bandwidth);
        let scale = own.map_or(1.0, |own| own.0 / self.dimensions[dimension].bandwidth.0);
        let named = schedules.iter().filter(|s| s.dimension == dimension && s.at.holds(self, rank));
        named.fold(scale, |scale, schedule| scale * schedule.share(*now))
    }

    /// The same for links that belong to no rank, such as those between switches.
    pub(crate) fn dimension_scale(&self, dimension: usize) -> f64 {
        let everywhere = |schedule: &&Schedule| {
            schedule.dimension == dimension && schedule.at == Place::Everywhere
        };
        let schedules = self.uneven.schedules.iter().filter(everywhere);
        schedules.map(|schedule| schedule.share(self.uneven.now)).product()
    }

    /// What a rank's links add to a dimension's latency; less than nothing if they are quicker.
    pub(crate) fn link_delay(&self, rank: Rank, dimension: usize) -> Seconds {
        let own = self.uneven.links.iter().rev().find(|link| {
            link.dimension == dimension && link.latency.is_some() && link.at.holds(self, rank)
        });
        let own = own.and_then(|link| link.latency);
        own.map_or(Seconds::ZERO, |own| own - self.dimensions[dimension].latency)
    }

    /// The moments at which any link's rate changes, in order, the start first.
    pub(crate) fn moments(&self) -> Vec<f64> {
        let changes = self.uneven.schedules.iter().flat_map(|schedule| &schedule.changes);
        let mut moments: Vec<f64> = changes.map(|change| change.at.0).chain([0.0]).collect();
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        moments
    }

    /// The cluster as it is at a moment: links have the rates that they have then.
    pub(crate) fn at(&self, moment: f64) -> Self {
        let mut then = self.clone();
        then.uneven.now = moment;
        then
    }

    /// The same cluster without its exceptions.
    pub(crate) fn evened(&self) -> Self {
        Self { uneven: Uneven::default(), ..self.clone() }
    }

    /// How long a rank's computations take over time, as a factor.
    pub(crate) fn pace(&self, rank: Rank) -> Pace {
        let named = self.uneven.stragglers.iter().filter(|slow| slow.at.holds(self, rank));
        Pace::new(named.map(|slow| (slow.from.0, slow.until.map(|until| until.0), slow.factor)))
    }
}

/// How many times longer work takes, from moment to moment.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pace {
    /// From each moment on, by which factor; in order, the first at 0.
    pieces: Vec<(f64, f64)>,
}

impl Pace {
    /// The product of factors that hold from a moment until another, if one is given.
    fn new(slow: impl Iterator<Item = (f64, Option<f64>, f64)> + Clone) -> Self {
        let ends = slow.clone().flat_map(|(from, until, _)| [Some(from), until]);
        let mut moments: Vec<f64> = ends.flatten().chain([0.0]).collect();
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        let factor = |at: f64| {
            let holding =
                slow.clone().filter(|(from, until, _)| *from <= at && until.is_none_or(|u| at < u));
            holding.map(|(_, _, factor)| factor).product()
        };
        let mut pieces: Vec<(f64, f64)> = moments.iter().map(|&at| (at, factor(at))).collect();
        pieces.dedup_by(|next, before| next.1 == before.1);
        Self { pieces }
    }

    /// When work ends that starts at a moment and would take so long at full pace.
    pub(crate) fn end(&self, start: f64, work: f64) -> f64 {
        if let [(_, factor)] = self.pieces[..] {
            return start + work * factor;
        }
        through(start, &self.pieces, |&factor| work * factor)
    }

    /// The largest factor.
    pub(crate) fn worst(&self) -> f64 {
        self.pieces.iter().map(|&(_, factor)| factor).fold(1.0, f64::max)
    }
}

/// When work ends whose whole duration would be `duration(piece)` if that piece lasted for ever:
/// in every piece, as much of it is done as the time spent there is of its duration there.
///
/// Pieces start at their moments, in order, the first at or before `start`.
pub(crate) fn through<T>(start: f64, pieces: &[(f64, T)], duration: impl Fn(&T) -> f64) -> f64 {
    let mut at = start;
    let mut left = 1.0;
    let first = pieces.partition_point(|(moment, _)| *moment <= start).saturating_sub(1);
    for (index, (_, piece)) in pieces.iter().enumerate().skip(first) {
        let whole = duration(piece);
        let end = at + left * whole;
        match pieces.get(index + 1) {
            // A piece that the work outlasts takes some of it, however little.
            Some((next, _)) if end > *next => {
                left = (left - (*next - at).max(0.0) / whole).max(0.0);
                at = at.max(*next);
            }
            Some(_) | None => return end,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::super::{Run, preset};
    use super::*;
    use proptest::prelude::*;

    fn uneven() -> Cluster {
        let mut cluster = preset::get("dgx-a100:4").unwrap();
        let h100 = preset::get("dgx-h100").unwrap().device;
        let host = |host| Place::Hosts(vec![Run::one(host)]);
        cluster.uneven.kinds.push(OtherDevice { at: host(1), device: h100 });
        cluster.uneven.links.push(OtherLink {
            dimension: 1,
            at: host(2),
            bandwidth: Some(BytesPerSec(12.5e9)),
            latency: Some(Seconds(9e-6)),
        });
        let changes = vec![
            Change { at: Seconds(1.0), bandwidth: 0.5 },
            Change { at: Seconds(3.0), bandwidth: 1.0 },
        ];
        cluster.uneven.schedules.push(Schedule { dimension: 1, at: Place::Everywhere, changes });
        cluster
    }

    #[test]
    fn exceptions_hold_where_they_are_named() {
        let cluster = uneven();
        assert!(!cluster.is_even() && cluster.evened().is_even());
        assert_eq!(cluster.device_of(Rank(7)).name, "A100-SXM4-80GB");
        assert_eq!(cluster.device_of(Rank(8)).name, "H100-SXM5-80GB");
        assert_eq!(cluster.link_scale(Rank(16), 1), 0.5);
        assert_eq!(cluster.link_scale(Rank(16), 0), 1.0);
        assert_eq!(cluster.link_delay(Rank(16), 1), Seconds(9e-6) - Seconds(4e-6));
        assert_eq!(cluster.exceptions(Rank(0)), [2]);
        assert_eq!(cluster.exceptions(Rank(8)), [0, 2]);
        assert_eq!(cluster.exceptions(Rank(16)), [1, 2]);
    }

    #[test]
    fn schedules_change_links_at_their_moments() {
        let cluster = uneven();
        assert_eq!(cluster.moments(), [0.0, 1.0, 3.0]);
        let scale = |at: f64, rank| cluster.at(at).link_scale(Rank(rank), 1);
        assert_eq!(
            (scale(0.0, 0), scale(1.0, 0), scale(2.9, 0), scale(3.0, 0)),
            (1.0, 0.5, 0.5, 1.0)
        );
        assert_eq!(scale(1.0, 16), 0.25);
        let path = |at: f64, to| cluster.at(at).link(Rank(0), Rank(to)).unwrap();
        assert_eq!(path(0.0, 8).bandwidth.0, path(1.0, 8).bandwidth.0 * 2.0);
        assert_eq!(path(0.0, 8).bandwidth.0, path(0.0, 16).bandwidth.0 * 2.0);
        assert_eq!(path(0.0, 16).latency, Seconds(9e-6));
    }

    #[test]
    fn a_straggler_slows_what_it_overlaps() {
        let mut cluster = preset::get("dgx-a100").unwrap();
        let slow = |factor, from, until: Option<f64>| Straggler {
            at: Place::Ranks(vec![Run::one(3)]),
            factor,
            from: Seconds(from),
            until: until.map(Seconds),
        };
        cluster.uneven.stragglers = vec![slow(2.0, 10.0, Some(20.0)), slow(3.0, 15.0, None)];
        let pace = cluster.pace(Rank(3));
        assert_eq!(pace.pieces, [(0.0, 1.0), (10.0, 2.0), (15.0, 6.0), (20.0, 3.0)]);
        assert_eq!(pace.end(0.0, 5.0), 5.0);
        assert_eq!(pace.end(9.0, 2.0), 12.0, "one before, one at half the pace");
        assert_eq!(pace.end(30.0, 1.0), 33.0);
        assert_eq!(pace.worst(), 6.0);
        assert_eq!(cluster.pace(Rank(4)).pieces, [(0.0, 1.0)]);
    }

    proptest! {
        /// Work cut in two takes as long as in one piece, and later starts never end earlier.
        #[test]
        fn work_is_the_same_however_it_is_cut(
            gaps in proptest::collection::vec((0.01f64..2.0, 0.1f64..10.0), 1..6),
            start in 0.0f64..8.0,
            work in 0.01f64..5.0,
            cut in 0.0f64..1.0,
        ) {
            let mut at = 0.0;
            let pieces = gaps.iter().map(|&(gap, factor)| {
                let piece = (at, factor);
                at += gap;
                piece
            });
            let pace = Pace { pieces: pieces.collect() };
            let whole = pace.end(start, work);
            let halves = pace.end(pace.end(start, work * cut), work * (1.0 - cut));
            prop_assert!((whole - halves).abs() < 1e-9 * whole.max(1.0), "{whole} {halves}");
            prop_assert!(pace.end(start + 0.1, work) >= whole - 1e-12);
            prop_assert!(whole >= start);
        }
    }
}
