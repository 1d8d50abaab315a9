//! Messages that go in place: their bytes are the receiver's to read until it has taken them.
//!
//! In the middle of a collective nobody has to ask for that. Where a rank overwrites what it has sent, it
//! does so with what has come of it: with a result that the receiver, having taken the message, has had a
//! part in. The algorithms of which that is so are listed here, and a test follows who can know what in
//! each.
//!
//! At the end a rank tells all others what it has taken of theirs, and waits until it has been told the same
//! of its own messages. Everyone tells before it waits, so that this ends for all.

use super::Running;
use crate::error::CommError;
use crate::transport::Transport;
use paceline_plan::collective::Algorithm;
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;

/// Whether the messages of an algorithm may go in place.
pub(super) fn suits(algorithm: Algorithm) -> bool {
    match algorithm {
        Algorithm::Ring
        | Algorithm::MultiRing { .. }
        | Algorithm::HalvingDoubling
        | Algorithm::Direct
        | Algorithm::Partitioned
        | Algorithm::ParameterServer { .. } => true,
        // A rank sums where it sends from, before the others can have answered.
        Algorithm::Naive | Algorithm::Overlapped => false,
        // What a rank overwrites may have come by another branch or dimension than it left by.
        Algorithm::Tree
        | Algorithm::Torus { .. }
        | Algorithm::Hierarchical { .. }
        | Algorithm::PerDimension { .. } => false,
        // No messages, or none of ours.
        Algorithm::ReadReduce | Algorithm::InNetwork | Algorithm::Auto => false,
    }
}

/// Vectors of fewer bytes than this are copied: the receivers' word at the end costs more than the copies.
/// All members have the same vector, and come to the same conclusion.
const LARGE: u64 = 4 << 20;

/// What has gone in place and may not have been taken.
#[derive(Debug, Default)]
pub(super) struct InPlace {
    /// To whom, each with the receipt of the last message.
    to: Vec<(Rank, u64)>,
    /// Whether the others know what this rank has taken.
    told: bool,
}

impl InPlace {
    /// Notes a message.
    pub(super) fn lent(&mut self, to: Rank, receipt: u64) {
        match self.to.iter_mut().find(|(rank, _)| *rank == to) {
            Some((_, last)) => *last = receipt,
            None => self.to.push((to, receipt)),
        }
    }
}

impl Running {
    /// Whether messages go in place.
    pub(super) fn goes_in_place(&self) -> bool {
        let bytes = |(elements, dtype): (usize, DType)| elements as u64 * dtype.size();
        suits(self.spec.algorithm) && self.vector.is_some_and(|vector| bytes(vector) >= LARGE)
    }

    /// Comes to an end with everyone; who has not taken everything, if somebody has not.
    pub(super) fn settle(
        &mut self,
        transport: &mut dyn Transport,
    ) -> Result<Option<Rank>, CommError> {
        if !std::mem::replace(&mut self.in_place.told, true) && self.goes_in_place() {
            transport.tell_taken()?;
        }
        while let Some((to, receipt)) = self.in_place.to.last().copied() {
            if !transport.is_taken(to, self.tag, receipt)? {
                return Ok(Some(to));
            }
            self.in_place.to.pop();
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pipeline::pipelined;
    use super::super::ranges;
    use super::*;
    use paceline_plan::collective::{
        Action, Chunks, CollectiveKind, Combine, Cut, Order, Pattern, Step,
    };
    use std::collections::VecDeque;

    /// A message that was sent: its chunks, whom it went to, and as which of all messages to it.
    type Sent = (Chunks, usize, usize);

    /// What one rank has done and what it knows of the others.
    #[derive(Clone, Default)]
    struct Knowledge {
        next: usize,
        /// By rank and by sender: how many messages it has taken.
        taken: Vec<Vec<usize>>,
        sent: Vec<Sent>,
    }

    fn overlap(cut: &Cut, a: Chunks, b: Chunks) -> bool {
        ranges(cut, a, 1).any(|a| ranges(cut, b, 1).any(|b| a.start < b.end && b.start < a.end))
    }

    /// Carries out the steps of all ranks with messages that carry nothing but what their senders know,
    /// and counts writes to what was sent; none comes before the writer knows that it was taken.
    fn writes_come_after(all: &[Vec<Step>], cut: &Cut, what: &str) -> usize {
        let ranks = all.len();
        let mut known = vec![Knowledge::default(); ranks];
        known.iter_mut().for_each(|rank| rank.taken = vec![vec![0; ranks]; ranks]);
        let mut wires = vec![vec![VecDeque::new(); ranks]; ranks];
        let mut numbers = vec![vec![0; ranks]; ranks];
        let mut writes = 0;
        loop {
            let mut moved = false;
            for me in 0..ranks {
                while let Some(step) = all[me].get(known[me].next) {
                    let written = match step.action {
                        Action::Send { to, chunks } => {
                            let to = to as usize;
                            numbers[me][to] += 1;
                            known[me].sent.push((chunks, to, numbers[me][to]));
                            wires[me][to].push_back(known[me].taken.clone());
                            None
                        }
                        Action::Recv { from, chunks, how } => {
                            let from = from as usize;
                            let Some(news) = wires[from][me].pop_front() else { break };
                            for (mine, theirs) in known[me].taken.iter_mut().zip(news) {
                                mine.iter_mut().zip(theirs).for_each(|(a, b)| *a = b.max(*a));
                            }
                            known[me].taken[me][from] += 1;
                            matches!(how, Combine::Replace | Combine::Reduce).then_some(chunks)
                        }
                        Action::Fold { chunks } => Some(chunks),
                        _ => None,
                    };
                    let Knowledge { next, taken, sent } = &mut known[me];
                    for (chunks, to, number) in sent.iter() {
                        if written.is_some_and(|written| overlap(cut, written, *chunks)) {
                            assert!(taken[*to][me] >= *number, "{what}: rank {me}, {step:?}");
                            writes += 1;
                        }
                    }
                    *next += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        let ended = known.iter().zip(all).all(|(rank, steps)| rank.next == steps.len());
        assert!(ended, "{what} never ends");
        writes
    }

    fn follow(algorithm: Algorithm) -> usize {
        let mut writes = 0;
        for (kind, ranks) in
            CollectiveKind::ALL.into_iter().flat_map(|kind| (2..=9).map(move |n| (kind, n)))
        {
            for order in [Order::Free, Order::Canonical] {
                let Ok(pattern) = Pattern::new(kind, algorithm, order, ranks, ranks / 2) else {
                    continue;
                };
                let cut = Cut { elements: 1000, chunks: pattern.chunks(), block: 1 };
                let what = format!("{kind} by {algorithm}, {order} order, {ranks} ranks");
                let whole: Vec<_> = (0..ranks).map(|me| pattern.steps(me)).collect();
                writes += writes_come_after(&whole, &cut, &what);
                if matches!(algorithm, Algorithm::Ring | Algorithm::HalvingDoubling) {
                    let cut_up = |steps: &Vec<Step>| pipelined(steps, pattern.rounds(), 4);
                    let pieces: Vec<_> = whole.iter().map(cut_up).collect();
                    writes += writes_come_after(&pieces, &cut, &what);
                }
            }
        }
        writes
    }

    #[test]
    fn nothing_is_overwritten_before_it_is_known_to_be_taken() {
        for algorithm in [
            Algorithm::Ring,
            Algorithm::MultiRing { rings: 2 },
            Algorithm::HalvingDoubling,
            Algorithm::Direct,
            Algorithm::Partitioned,
            Algorithm::ParameterServer { servers: 1 },
            Algorithm::ParameterServer { servers: 2 },
        ] {
            assert!(suits(algorithm));
            let writes = follow(algorithm);
            assert!(writes > 50, "{algorithm}: only {writes} writes were looked at");
        }
    }

    #[test]
    #[should_panic(expected = "all_reduce by naive")]
    fn an_algorithm_that_sums_where_it_sends_from_is_found_out() {
        follow(Algorithm::Naive);
    }
}
