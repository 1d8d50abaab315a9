//! What moving bytes inside a measured host takes, by what its ranks come from and what runs beside
//! it.
//!
//! Exchanges that follow each other find everything in the caches: the vectors, the wires, the code.
//! In training, ranks come from other work, and what they have touched meanwhile has pushed some of it
//! out. And where more ranks than cores are at work, a rank that sleeps until a message comes has to wait
//! for its turn when it has come: schedulers let whoever runs finish its slice. Both are measured, and
//! both grow with the number of messages more than with the bytes, so that no rate tells of them. A rank
//! with a core of its own shares that fairly with its own computations.

use crate::cluster::measured::Moved;
use paceline_plan::units::Seconds;

/// An exchange, in multiples of what it takes one after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Moving {
    /// What it takes where nothing else wants the cores.
    pub(super) slower: f64,
    /// What comes on top where every core also computes.
    pub(super) turns: f64,
    /// Ranks that take part.
    pub(super) ranks: f64,
}

/// How much of what an exchange touches the caches have lost, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Lost {
    /// Of how it is done: the wires, the code.
    pub(super) wires: f64,
    /// Of its bytes.
    pub(super) vectors: f64,
}

impl Moving {
    /// An exchange among so many ranks, whose wires and whose vectors have left the caches to such a
    /// part, from 0 to 1; `apart` if each rank of the host has a core of its own.
    pub(super) fn new(moved: &Moved, (ranks, apart): (u32, bool), lost: Lost) -> Self {
        let Moved { warm, unready, cold, turns } = *moved;
        let over = |time: f64| if warm.0 > 0.0 { time / warm.0 } else { 0.0 };
        let slower = 1.0 + over(unready.0 * lost.wires) + over(cold.0 * lost.vectors);
        Self { slower, turns: if apart { slower } else { over(turns.0) }, ranks: ranks.into() }
    }

    /// The same with something that its ranks do before or after it, each by itself.
    pub(super) fn with(self, other: Seconds, moved: &Moved) -> Self {
        let more = if moved.warm.0 > 0.0 { other.0 / moved.warm.0 } else { 0.0 };
        Self { slower: self.slower + more, turns: self.turns + more, ..self }
    }

    /// How crowded it is for this exchange on so many cores of which so many compute, from 0 to 1.
    ///
    /// Ranks that come to lie on free cores are in nobody's way; what was measured is one computing
    /// thread for every core.
    pub(super) fn crowding(&self, computing: f64, cores: f64) -> f64 {
        let beyond = (computing + self.ranks - cores).max(0.0);
        (beyond.min(computing) / cores).min(1.0)
    }

    /// What it takes at such a crowding.
    fn at(&self, crowding: f64) -> f64 {
        self.slower + self.turns * crowding
    }

    /// What it takes if crowding changes while it is under way: pieces of time, in the same
    /// multiples, each with its crowding. After the last it is as it was on average.
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

    const PAIR: Moving = Moving { slower: 2.0, turns: 8.0, ranks: 2.0 };

    #[test]
    fn what_the_caches_have_lost_comes_on_top() {
        let [warm, unready, cold, turns] = [1.0, 3.0, 0.5, 8.0].map(Seconds);
        let moved = Moved { warm, unready, cold, turns };
        let moving = |wires, vectors| Moving::new(&moved, (2, false), Lost { wires, vectors });
        assert_eq!(moving(0.0, 0.0).slower, 1.0);
        assert_eq!(moving(1.0, 0.0).slower, 4.0);
        assert_eq!(moving(0.5, 1.0), Moving { slower: 3.0, ..PAIR });
        let apart = Moving::new(&moved, (2, true), Lost::default());
        assert_eq!((apart.slower, apart.turns), (1.0, 1.0), "half of its core");
        assert_eq!(apart.with(Seconds(2.0), &moved), Moving { slower: 3.0, turns: 3.0, ..apart });
    }

    #[test]
    fn ranks_on_free_cores_are_in_nobodys_way() {
        assert_eq!(PAIR.crowding(2.0, 2.0), 1.0);
        assert_eq!(PAIR.crowding(1.0, 2.0), 0.5);
        assert_eq!(PAIR.crowding(2.0, 4.0), 0.0);
        assert_eq!(PAIR.crowding(0.0, 1.0), 0.0, "measured among as many ranks as take part");
        assert_eq!(PAIR.crowding(9.0, 2.0), 1.0);
    }

    #[test]
    fn a_crowd_that_goes_lets_the_rest_pass() {
        assert_eq!(PAIR.through([].into_iter()), 2.0);
        assert_eq!(PAIR.through([(100.0, 1.0)].into_iter()), 10.0);
        // Half of it in the crowd, the other half alone.
        assert_eq!(PAIR.through([(5.0, 1.0), (9.0, 0.0)].into_iter()), 6.0);
    }

    proptest! {
        /// Never shorter than alone, never longer than in the densest crowd.
        #[test]
        fn it_stays_between_alone_and_crowded(
            pieces in prop::collection::vec((0.0..20.0f64, 0.0..=1.0f64), 0..12),
        ) {
            let time = PAIR.through(pieces.into_iter());
            prop_assert!((2.0 - 1e-9..=10.0 + 1e-9).contains(&time), "{time}");
        }
    }
}
