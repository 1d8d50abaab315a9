//! Heterogeneity: overrides of devices, links, speeds and bandwidths of a cluster.
//!
//! A cluster description states defaults (the device, the dimensions) and lists overrides here. A
//! homogeneous cluster therefore stays short to describe and quick to simulate. Every entry names
//! its devices by a [`Selector`]. Times count from the start of the simulated iteration.

use super::{Cluster, Device, Selector};
use paceline_plan::ids::Rank;
use paceline_plan::units::{BytesPerSec, Seconds};
use serde::Serialize;

/// Overrides of a cluster; none by default.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Heterogeneity {
    /// Devices of other kinds. If several select a rank, the last applies.
    pub kinds: Vec<DeviceOverride>,
    /// Links that differ from their dimension's. If several select a rank, the last applies.
    pub links: Vec<LinkOverride>,
    /// Devices that are slower than their kind; if several select a rank, their factors multiply.
    pub stragglers: Vec<Straggler>,
    /// Links whose bandwidth changes; if several select a link, their factors multiply.
    pub schedules: Vec<BandwidthSchedule>,
    /// Time at which bandwidth schedules are evaluated.
    #[serde(skip)]
    pub(in crate::cluster) now: f64,
}

/// A kind of device that some ranks have instead of the cluster's default.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceOverride {
    /// Ranks that have it.
    pub at: Selector,
    /// The device.
    pub device: Device,
}

/// Links of some devices into a dimension that differ from the default.
///
/// A message has the bandwidth of its slower end and the larger latency of both ends.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkOverride {
    /// Index into [`Cluster::dimensions`].
    pub dimension: usize,
    /// Owners of the links.
    pub at: Selector,
    /// Bandwidth of one of them, if it differs from the dimension's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BytesPerSec>,
    /// Latency, if it differs from the dimension's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Seconds>,
}

/// Devices whose compute is slower than their kind's: throttled, shared, or broken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Straggler {
    /// The slow ranks.
    pub at: Selector,
    /// Factor by which compute takes longer.
    pub factor: f64,
    /// Start time.
    pub from: Seconds,
    /// End time; permanent if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until: Option<Seconds>,
}

/// Links of a dimension whose bandwidth changes over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BandwidthSchedule {
    /// Index into [`Cluster::dimensions`].
    pub dimension: usize,
    /// Owners of the links.
    pub at: Selector,
    /// Changes in order of time; before the first, links have their full bandwidth.
    pub changes: Vec<BandwidthChange>,
}

/// A change of link bandwidth, effective from its time on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BandwidthChange {
    /// Time of the change.
    pub at: Seconds,
    /// Fraction of the bandwidth: 1 for all of it, 0.1 while other traffic takes most.
    pub bandwidth: f64,
}

impl BandwidthSchedule {
    /// Fraction of the bandwidth at time `now`.
    fn share(&self, now: f64) -> f64 {
        let past = self.changes.iter().take_while(|change| change.at.0 <= now);
        past.last().map_or(1.0, |change| change.bandwidth)
    }
}

impl Heterogeneity {
    /// Returns true if there are no overrides.
    pub fn is_empty(&self) -> bool {
        let Self { kinds, links, stragglers, schedules, now: _ } = self;
        kinds.is_empty() && links.is_empty() && stragglers.is_empty() && schedules.is_empty()
    }
}

impl Cluster {
    /// Returns true if all devices, and all links of each dimension, are equal at all times.
    pub fn is_homogeneous(&self) -> bool {
        self.heterogeneity.is_empty()
    }

    /// Device of a rank.
    pub fn device_of(&self, rank: Rank) -> &Device {
        match self.kind_of(rank) {
            0 => &self.device,
            other => &self.heterogeneity.kinds[other - 1].device,
        }
    }

    /// Index of a rank's device kind: 0 for the cluster's default, from 1 for overrides.
    pub(crate) fn kind_of(&self, rank: Rank) -> usize {
        let kinds = &self.heterogeneity.kinds;
        kinds.iter().rposition(|kind| kind.at.holds(self, rank)).map_or(0, |index| index + 1)
    }

    /// All device kinds, by index.
    pub fn kinds(&self) -> impl Iterator<Item = &Device> {
        std::iter::once(&self.device)
            .chain(self.heterogeneity.kinds.iter().map(|kind| &kind.device))
    }

    /// Indices of the overrides that select a rank, in order; ranks with the same list are equal.
    pub(crate) fn overrides(&self, rank: Rank) -> Vec<u16> {
        let Heterogeneity { kinds, links, stragglers, schedules, now: _ } = &self.heterogeneity;
        let places = (kinds.iter().map(|entry| &entry.at))
            .chain(links.iter().map(|entry| &entry.at))
            .chain(stragglers.iter().map(|entry| &entry.at))
            .chain(schedules.iter().map(|entry| &entry.at));
        let naming = (0..).zip(places).filter(|(_, place)| place.holds(self, rank));
        naming.map(|(index, _)| index).collect()
    }

    /// Current bandwidth of a rank's links into a dimension, as a fraction of the dimension's.
    pub(crate) fn link_scale(&self, rank: Rank, dimension: usize) -> f64 {
        let Heterogeneity { links, schedules, now, .. } = &self.heterogeneity;
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
        let everywhere = |schedule: &&BandwidthSchedule| {
            schedule.dimension == dimension && schedule.at == Selector::Everywhere
        };
        let schedules = self.heterogeneity.schedules.iter().filter(everywhere);
        schedules.map(|schedule| schedule.share(self.heterogeneity.now)).product()
    }

    /// Difference of a rank's link latency to the dimension's; negative if it is lower.
    pub(crate) fn link_delay(&self, rank: Rank, dimension: usize) -> Seconds {
        let own = self.heterogeneity.links.iter().rev().find(|link| {
            link.dimension == dimension && link.latency.is_some() && link.at.holds(self, rank)
        });
        let own = own.and_then(|link| link.latency);
        own.map_or(Seconds::ZERO, |own| own - self.dimensions[dimension].latency)
    }

    /// Start times of the bandwidth epochs, in order, beginning with 0.
    pub(crate) fn moments(&self) -> Vec<f64> {
        let changes = self.heterogeneity.schedules.iter().flat_map(|schedule| &schedule.changes);
        let mut moments: Vec<f64> = changes.map(|change| change.at.0).chain([0.0]).collect();
        moments.sort_by(f64::total_cmp);
        moments.dedup();
        moments
    }

    /// The cluster with the link bandwidths that hold at `moment`.
    pub(crate) fn at(&self, moment: f64) -> Self {
        let mut then = self.clone();
        then.heterogeneity.now = moment;
        then
    }

    /// The same cluster without overrides.
    pub(crate) fn homogeneous(&self) -> Self {
        Self { heterogeneity: Heterogeneity::default(), ..self.clone() }
    }

    /// Slowdown of a rank's compute over time.
    pub(crate) fn speed_profile(&self, rank: Rank) -> SpeedProfile {
        let named = self.heterogeneity.stragglers.iter().filter(|slow| slow.at.holds(self, rank));
        SpeedProfile::new(
            named.map(|slow| (slow.from.0, slow.until.map(|until| until.0), slow.factor)),
        )
    }
}

/// Slowdown factor of compute as a step function of time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SpeedProfile {
    /// Start time and factor of each step, in order; the first starts at 0.
    pieces: Vec<(f64, f64)>,
}

impl SpeedProfile {
    /// Multiplies factors, each of which holds from a start to an optional end.
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

    /// End time of work that starts at `start` and takes `work` seconds at full speed.
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

/// End time of work that would take `duration(piece)` if that piece lasted for ever. In each piece,
/// the completed fraction is the time spent there divided by its duration there.
///
/// Pieces are sorted by start time, the first at or before `start`.
pub(crate) fn through<T>(start: f64, pieces: &[(f64, T)], duration: impl Fn(&T) -> f64) -> f64 {
    let mut at = start;
    let mut left = 1.0;
    let first = pieces.partition_point(|(moment, _)| *moment <= start).saturating_sub(1);
    for (index, (_, piece)) in pieces.iter().enumerate().skip(first) {
        let whole = duration(piece);
        let end = at + left * whole;
        match pieces.get(index + 1) {
            // The work outlasts this piece, which completes a part of it.
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
    use super::super::{IndexRange, preset};
    use super::*;
    use proptest::prelude::*;

    fn uneven() -> Cluster {
        let mut cluster = preset::get("dgx-a100:4").unwrap();
        let h100 = preset::get("dgx-h100").unwrap().device;
        let host = |host| Selector::Hosts(vec![IndexRange::one(host)]);
        cluster.heterogeneity.kinds.push(DeviceOverride { at: host(1), device: h100 });
        cluster.heterogeneity.links.push(LinkOverride {
            dimension: 1,
            at: host(2),
            bandwidth: Some(BytesPerSec(12.5e9)),
            latency: Some(Seconds(9e-6)),
        });
        let changes = vec![
            BandwidthChange { at: Seconds(1.0), bandwidth: 0.5 },
            BandwidthChange { at: Seconds(3.0), bandwidth: 1.0 },
        ];
        cluster.heterogeneity.schedules.push(BandwidthSchedule {
            dimension: 1,
            at: Selector::Everywhere,
            changes,
        });
        cluster
    }

    #[test]
    fn exceptions_hold_where_they_are_named() {
        let cluster = uneven();
        assert!(!cluster.is_homogeneous() && cluster.homogeneous().is_homogeneous());
        assert_eq!(cluster.device_of(Rank(7)).name, "A100-SXM4-80GB");
        assert_eq!(cluster.device_of(Rank(8)).name, "H100-SXM5-80GB");
        assert_eq!(cluster.link_scale(Rank(16), 1), 0.5);
        assert_eq!(cluster.link_scale(Rank(16), 0), 1.0);
        assert_eq!(cluster.link_delay(Rank(16), 1), Seconds(9e-6) - Seconds(4e-6));
        assert_eq!(cluster.overrides(Rank(0)), [2]);
        assert_eq!(cluster.overrides(Rank(8)), [0, 2]);
        assert_eq!(cluster.overrides(Rank(16)), [1, 2]);
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
            at: Selector::Ranks(vec![IndexRange::one(3)]),
            factor,
            from: Seconds(from),
            until: until.map(Seconds),
        };
        cluster.heterogeneity.stragglers = vec![slow(2.0, 10.0, Some(20.0)), slow(3.0, 15.0, None)];
        let pace = cluster.speed_profile(Rank(3));
        assert_eq!(pace.pieces, [(0.0, 1.0), (10.0, 2.0), (15.0, 6.0), (20.0, 3.0)]);
        assert_eq!(pace.end(0.0, 5.0), 5.0);
        assert_eq!(pace.end(9.0, 2.0), 12.0, "one before, one at half the pace");
        assert_eq!(pace.end(30.0, 1.0), 33.0);
        assert_eq!(pace.worst(), 6.0);
        assert_eq!(cluster.speed_profile(Rank(4)).pieces, [(0.0, 1.0)]);
    }

    proptest! {
        /// Work split in two takes as long as in one piece, and later starts never end earlier.
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
            let pace = SpeedProfile { pieces: pieces.collect() };
            let whole = pace.end(start, work);
            let halves = pace.end(pace.end(start, work * cut), work * (1.0 - cut));
            prop_assert!((whole - halves).abs() < 1e-9 * whole.max(1.0), "{whole} {halves}");
            prop_assert!(pace.end(start + 0.1, work) >= whole - 1e-12);
            prop_assert!(whole >= start);
        }
    }
}
