//! Time of an exchange inside a measured host, by cache state and CPU load.
//!
//! Back-to-back exchanges find everything in the caches: vectors, transport state and code. In
//! training, ranks come from other work, and the memory they touched has evicted some of it. With
//! more active ranks than cores, a rank that blocks for a message must then also wait for a core:
//! the OS scheduler lets the running thread finish its time slice.
//!
//! Both effects are measured. Both grow with the number of messages more than with the bytes, so no
//! bandwidth describes them. A rank with a dedicated core shares that core fairly with its own
//! compute.

use crate::cluster::measured::ExchangeTimes;
use paceline_plan::units::Seconds;

/// Cost of an exchange, in multiples of its time when run back to back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExchangeCost {
    /// Cost on idle cores.
    pub(super) cold_factor: f64,
    /// Additional cost if every core also computes.
    pub(super) sched_delay: f64,
    /// Number of participating ranks.
    pub(super) ranks: f64,
}

/// Fraction (0–1) of an exchange's working set that the caches have lost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CacheLoss {
    /// Loss of the message path: transport state and code.
    pub(super) path: f64,
    /// Loss of the data exchanged.
    pub(super) data: f64,
}

impl ExchangeCost {
    /// Returns the cost of an exchange among `ranks` ranks after the cache loss `lost`; `apart` is
    /// true if each rank of the host has a dedicated core.
    pub(super) fn new(moved: &ExchangeTimes, (ranks, apart): (u32, bool), lost: CacheLoss) -> Self {
        let ExchangeTimes { warm, cold_path: unready, cold, sched_delay: turns } = *moved;
        let over = |time: f64| if warm.0 > 0.0 { time / warm.0 } else { 0.0 };
        let slower = 1.0 + over(unready.0 * lost.path) + over(cold.0 * lost.data);
        Self {
            cold_factor: slower,
            sched_delay: if apart { slower } else { over(turns.0) },
            ranks: ranks.into(),
        }
    }

    /// Adds local work that each rank does before or after the exchange.
    pub(super) fn with(self, other: Seconds, moved: &ExchangeTimes) -> Self {
        let more = if moved.warm.0 > 0.0 { other.0 / moved.warm.0 } else { 0.0 };
        Self { cold_factor: self.cold_factor + more, sched_delay: self.sched_delay + more, ..self }
    }

    /// CPU oversubscription (0–1) with `computing` of `cores` cores busy.
    ///
    /// Ranks that run on free cores delay no compute. The measured case, 1, is one computing thread
    /// per core.
    pub(super) fn oversubscription(&self, computing: f64, cores: f64) -> f64 {
        let beyond = (computing + self.ranks - cores).max(0.0);
        (beyond.min(computing) / cores).min(1.0)
    }

    /// Cost at a constant oversubscription.
    fn at(&self, crowding: f64) -> f64 {
        self.cold_factor + self.sched_delay * crowding
    }

    /// Cost if oversubscription changes during the exchange: `pieces` are interval lengths, in the
    /// same multiples, each with its oversubscription. After the last piece the mean applies.
    pub(super) fn through(&self, pieces: impl Iterator<Item = (f64, f64)>) -> f64 {
        let (mut passed, mut done, mut crowded) = (0.0, 0.0, 0.0);
        for (length, crowding) in pieces {
            let whole = self.at(crowding);
            if done + length / whole >= 1.0 {
                return passed + (1.0 - done) * whole;
            }
            done += length / whole;
            crowded += crowding * length;
            passed += length;
        }
        let mean = if passed > 0.0 { crowded / passed } else { 0.0 };
        passed + (1.0 - done) * self.at(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAIR: ExchangeCost = ExchangeCost { cold_factor: 2.0, sched_delay: 8.0, ranks: 2.0 };

    #[test]
    fn what_the_caches_have_lost_comes_on_top() {
        let [warm, unready, cold, turns] = [1.0, 3.0, 0.5, 8.0].map(Seconds);
        let moved = ExchangeTimes { warm, cold_path: unready, cold, sched_delay: turns };
        let moving = |wires, vectors| {
            ExchangeCost::new(&moved, (2, false), CacheLoss { path: wires, data: vectors })
        };
        assert_eq!(moving(0.0, 0.0).cold_factor, 1.0);
        assert_eq!(moving(1.0, 0.0).cold_factor, 4.0);
        assert_eq!(moving(0.5, 1.0), ExchangeCost { cold_factor: 3.0, ..PAIR });
        let apart = ExchangeCost::new(&moved, (2, true), CacheLoss::default());
        assert_eq!((apart.cold_factor, apart.sched_delay), (1.0, 1.0), "half of its core");
        assert_eq!(
            apart.with(Seconds(2.0), &moved),
            ExchangeCost { cold_factor: 3.0, sched_delay: 3.0, ..apart }
        );
    }

    #[test]
    fn ranks_on_free_cores_are_in_nobodys_way() {
        assert_eq!(PAIR.oversubscription(2.0, 2.0), 1.0);
        assert_eq!(PAIR.oversubscription(1.0, 2.0), 0.5);
        assert_eq!(PAIR.oversubscription(2.0, 4.0), 0.0);
        assert_eq!(
            PAIR.oversubscription(0.0, 1.0),
            0.0,
            "measured among as many ranks as take part"
        );
        assert_eq!(PAIR.oversubscription(9.0, 2.0), 1.0);
    }

    #[test]
    fn a_crowd_that_goes_lets_the_rest_pass() {
        assert_eq!(PAIR.through([].into_iter()), 2.0);
        assert_eq!(PAIR.through([(100.0, 1.0)].into_iter()), 10.0);
        // Half of it oversubscribed, the other half alone.
        assert_eq!(PAIR.through([(5.0, 1.0), (9.0, 0.0)].into_iter()), 6.0);
    }

    proptest! {
        /// Never shorter than alone, never longer than at full oversubscription.
        #[test]
        fn it_stays_between_alone_and_crowded(
            pieces in prop::collection::vec((0.0..20.0f64, 0.0..=1.0f64), 0..12),
        ) {
            let time = PAIR.through(pieces.into_iter());
            prop_assert!((2.0 - 1e-9..=10.0 + 1e-9).contains(&time), "{time}");
        }
    }
}
