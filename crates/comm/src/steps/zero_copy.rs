//! Zero-copy sends: the receiver may read the sender's bytes until it has taken the message.
//!
//! Within a collective this needs no acknowledgement. A rank overwrites sent data only with a
//! result that depends on it: the receiver contributed to that result after it had taken the
//! message. The algorithms with this property are listed here, and a test tracks the knowledge of
//! every rank for each.
//!
//! At the end a rank acknowledges the messages it has taken, and waits for the acks of its own
//! messages. Every rank sends its acks before it waits, so this ends for all.

use super::ActiveCollective;
use crate::error::CommError;
use crate::transport::{Transport, ZeroCopy};
use paceline_plan::collective::Algorithm;
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;

/// Returns true if an algorithm's messages may be sent zero-copy.
pub(super) fn suits(algorithm: Algorithm) -> bool {
    algorithm.def().hints.sends_in_place
}

/// Zero-copy sends that may not have been acked.
#[derive(Debug, Default)]
pub(super) struct ZeroCopySends {
    /// Destinations, each with the receipt of the last message.
    to: Vec<(Rank, u64)>,
    /// True if this rank has acked the messages it has taken.
    acks_sent: bool,
}

impl ZeroCopySends {
    /// Forgets the sends of a collective that has ended.
    pub(super) fn clear(&mut self) {
        self.to.clear();
        self.acks_sent = false;
    }

    /// Records a zero-copy send.
    pub(super) fn lent(&mut self, to: Rank, receipt: u64) {
        match self.to.iter_mut().find(|(rank, _)| *rank == to) {
            Some((_, last)) => *last = receipt,
            None => self.to.push((to, receipt)),
        }
    }
}

impl ActiveCollective {
    /// Returns the transport's zero-copy sends if messages are sent by them. All members have the same
    /// vector and decide alike.
    pub(super) fn zero_copy<'t>(
        &self,
        transport: &'t mut dyn Transport,
    ) -> Option<&'t mut dyn ZeroCopy> {
        let bytes = |(elements, dtype): (usize, DType)| elements as u64 * dtype.size();
        let zero_copy = transport.zero_copy().filter(|_| suits(self.spec.algorithm))?;
        self.vector.is_some_and(|vector| bytes(vector) >= zero_copy.least()).then_some(zero_copy)
    }

    /// Sends this rank's acks; returns a rank that has not acked everything, if any.
    pub(super) fn await_acks(
        &mut self,
        transport: &mut dyn Transport,
    ) -> Result<Option<Rank>, CommError> {
        let acks_sent = std::mem::replace(&mut self.in_place.acks_sent, true);
        let Some(zero_copy) = self.zero_copy(transport) else { return Ok(None) };
        if !acks_sent {
            zero_copy.send_acks()?;
        }
        while let Some((to, receipt)) = self.in_place.to.last().copied() {
            if !zero_copy.is_acked(to, self.tag, receipt)? {
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
    use paceline_plan::collective::RingSet;
    use paceline_plan::collective::{
        Action, Chunking, Chunks, CollectiveKind, Combine, Pattern, Step, SummationOrder,
    };
    use std::collections::VecDeque;

    /// A sent message: its chunks, its destination, and its number among all messages to it.
    type Sent = (Chunks, usize, usize);

    /// Progress of one rank and its knowledge of the others.
    #[derive(Clone, Default)]
    struct Knowledge {
        next: usize,
        /// Number of messages taken, by rank and by sender.
        taken: Vec<Vec<usize>>,
        sent: Vec<Sent>,
    }

    fn overlap(cut: &Chunking, a: Chunks, b: Chunks) -> bool {
        ranges(cut, a, 1).any(|a| ranges(cut, b, 1).any(|b| a.start < b.end && b.start < a.end))
    }

    /// Executes the steps of all ranks with messages that carry only their senders' knowledge.
    /// Counts writes to sent data, and asserts that the writer knows by then that the message was
    /// taken.
    fn writes_come_after(all: &[Vec<Step>], cut: &Chunking, what: &str) -> usize {
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
            for order in [SummationOrder::Free, SummationOrder::Canonical] {
                let Ok(pattern) = Pattern::new(kind, algorithm, order, ranks, ranks / 2) else {
                    continue;
                };
                let cut = Chunking { elements: 1000, chunks: pattern.chunks(), block: 1 };
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
            Algorithm::MultiRing { rings: RingSet::new(2) },
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
