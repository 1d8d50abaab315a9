//! Checks of strategies for networks that are described operator by operator.

use super::check::divisors;
use crate::model::{Body, Model};
use crate::strategy::Strategy;

/// Rejects axes along which such networks cannot be sharded.
pub(super) fn check(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let Body::Network(net) = model.body() else { return };
    if s.cp > 1 {
        let why = format!("layers of {} see whole sequences", model.name());
        say("--cp", format!("{why}; use --dp, --tp and --pp"));
    }
    if s.sp {
        let why = format!("some operators of {} know no shards of tokens", model.name());
        say("--sp", format!("{why}; use --tp without it"));
    }
    if !net.reads_tokens() && s.seq != 1 {
        say("--seq", format!("{} reads images, not sequences; leave it out", model.name()));
    }
    if net.reads_tokens() && s.seq > model.seq {
        let most = model.seq;
        say(
            "--seq",
            format!("{} has positions for {most} tokens; use at most {most}", model.name()),
        );
    }
    if let Some((what, size)) = net.undivided(u64::from(s.tp.max(1))) {
        let legal = divisors(size);
        say("--tp", format!("{} does not divide the {what} {size}; these do: {legal}", s.tp));
    }
    let rows = s.micro_batch.saturating_mul(u64::from(s.dp.max(1))).saturating_mul(s.seq);
    if rows.checked_mul(net.largest_activation()).is_none_or(|e| e >= 1 << 56) {
        say("--micro-batch", format!("{rows} rows at a time are more than can be counted"));
    }
}
