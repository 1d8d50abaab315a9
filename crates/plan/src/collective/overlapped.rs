//! The overlapped decentralised exchange: whole vectors to everyone, all at once.
//!
//! The messages are those of [`naive`](super::naive), but no rank waits for one to be through before
//! it starts the next: one round instead of P−1, in which all P−1 messages share a rank's links. What
//! arrives is held until all is there: summed on the spot, it would be added up in another order on
//! every rank, and replicas would drift apart.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::direct::{ahead, behind, take_in};
use super::step::{Chunks, Script, Step};
use super::{Order, has_steps};

/// Every rank sends its vector to all others and sums all that it receives.
///
/// Rounds 1; bytes sent and received per rank N(P−1); fan-in P−1. Chunks: 1. Held: N(P−1).
pub fn all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let mut script = Script::default();
    if has_steps(ranks, me) && ranks > 1 {
        let whole = Chunks::one(0);
        for to in ahead(ranks, me) {
            script.send(0, to, whole);
        }
        take_in(&mut script, 0, behind(ranks, me), whole, Order::Canonical);
    }
    script.done()
}
