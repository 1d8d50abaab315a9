//! Naive decentralised exchange: the ranks take turns, and each in its turn sends its whole vector to
//! all others, one after the other.
//!
//! There is no special rank and no splitting: every rank receives all vectors and sums them itself.
//! One message is under way at a time, which makes it the baseline for all other algorithms. With
//! messages moved to earlier rounds it is [`overlapped`](super::overlapped), with all of them in one
//! round [`one_shot`](super::one_shot). A rank keeps P−1 vectors until it has all, which makes the
//! canonical order free.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::definition::{AlgorithmDef, Counted, Hints, Inner, Symmetric};
use super::direct::ahead;
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveError, CollectiveKind, Pattern, has_steps};

/// Maximum number of ranks: the rounds grow with its square.
pub const MAX_TURNS: u32 = 4096;

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "naive",
    number: 5,
    kinds: &[CollectiveKind::AllReduce],
    check,
    chunks: |_| 1,
    rounds: |p| p.ranks * (p.ranks - 1),
    steps: |p, me| all_reduce(p.ranks, me),
    counted: Counted::All,
    inner: Inner { is_replicated: true, ..AlgorithmDef::BASE.inner },
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

fn check(pattern: &Pattern) -> Result<(), CollectiveError> {
    let ranks = pattern.ranks;
    if ranks > MAX_TURNS {
        let most = format!("naive: {ranks} ranks would take turns; there can be {MAX_TURNS}");
        return Err(CollectiveError::Unfit(format!("{most}, and overlapped has no limit")));
    }
    Ok(())
}

/// In its turn every rank sends its vector to the rank 1, 2, … places ahead, one per round; at the
/// end all sum.
///
/// Rounds P(P−1); bytes sent and received per rank N(P−1); fan-in 1. Chunks: 1. Held: N(P−1).
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if has_steps(ranks, me) && (2..=MAX_TURNS).contains(&ranks) {
        let whole = Chunks::one(0);
        let others = ranks - 1;
        for turn in 0..ranks {
            if turn == me {
                for (round, to) in (turn * others..).zip(ahead(ranks, me)) {
                    script.send(round, to, whole);
                }
            } else {
                let distance = (me + ranks - turn) % ranks;
                script.recv(turn * others + distance - 1, turn, whole, Combine::Hold);
            }
        }
        script.fold(ranks * others - 1, whole);
    }
    script.done()
}
