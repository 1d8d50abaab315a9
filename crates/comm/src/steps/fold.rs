//! Ordered reduction of the contributions that a rank holds.

use super::lent::Cursor;
use super::{ActiveCollective, ranges};
use crate::arithmetic::{Contributions, reduce_everywhere};
use crate::error::CommError;
use crate::shared_memory::{Few, Lent};
use paceline_plan::collective::{Action, Chunking, Chunks, Step};
use paceline_plan::dtype::DType;
use std::ops::Range;

impl ActiveCollective {
    /// Reduces all contributions held for these chunks, and the rank's own, in member order.
    pub(super) fn fold(&mut self, cut: &Chunking, chunks: Chunks, dtype: DType, data: &mut [u8]) {
        let mut held: Few<_> = self.held.extract_if(.., |(_, of, _)| *of == chunks).collect();
        held.sort_unstable_by_key(|(from, ..)| *from);
        let before = held.partition_point(|(from, ..)| *from < self.me);
        // SAFETY: contributions in place are held until this fold is done, and only then are their
        // lenders told.
        #[expect(unsafe_code, reason = "the steps of a collective keep the protocol of loans")]
        let pieces: Few<_> = held.iter().map(|(_, _, lent)| unsafe { lent.pieces() }).collect();
        let mut cursors: Few<_> = pieces.iter().map(|pieces| Cursor::new(pieces)).collect();
        for range in ranges(cut, chunks, dtype.size() as usize) {
            let mut own = &mut data[range];
            while !own.is_empty() {
                let ahead = cursors.iter().map(Cursor::ahead).min().unwrap_or(own.len());
                let (part, rest) = own.split_at_mut(ahead.min(own.len()));
                let others: Few<_> = cursors.iter_mut().map(|c| c.take(part.len())).collect();
                let all = Contributions { others: &others, before };
                all.fold_into(dtype, self.spec.reduction, part, &mut self.sums);
                own = rest;
            }
        }
        drop(cursors);
        drop(pieces);
        for (_, _, lent) in held {
            if let Lent::Copied(mut message) = lent {
                message.clear();
                self.spare.push(message);
            }
        }
    }

    /// Number of steps after step `at` that write these chunks to peers.
    pub(super) fn writes_after(&self, at: usize, chunks: Chunks) -> usize {
        let same =
            |step: &&Step| matches!(step.action, Action::Write { chunks: c, .. } if c == chunks);
        self.steps[at + 1..].iter().take_while(same).count()
    }

    /// Reduces the contributions held for these chunks, and the rank's own, in member order, and
    /// writes the result to all of them in the same pass over memory.
    pub(super) fn fold_and_write(
        &mut self,
        cut: &Chunking,
        chunks: Chunks,
        dtype: DType,
        data: &mut [u8],
    ) -> Result<(), CommError> {
        self.held.sort_unstable_by_key(|(from, ..)| *from);
        let Self { held, me, spec, sums, .. } = self;
        let mut at = 0;
        for range in ranges(cut, chunks, dtype.size() as usize) {
            let within = at..at + range.len();
            at = within.end;
            let own = &mut data[range];
            let before = held.partition_point(|(from, ..)| *from < *me);
            let others = held.iter_mut().map(|peer| lent_part(peer, chunks, within.clone()));
            let mut all = others.collect::<Result<Few<_>, _>>()?;
            all.insert(before, own);
            reduce_everywhere(dtype, spec.reduction, &mut all, sums);
        }
        held.clear();
        Ok(())
    }
}

/// Bytes of a peer's chunks that are read and written in place.
fn lent_part(
    (from, of, lent): &mut (u32, Chunks, Lent),
    chunks: Chunks,
    at: Range<usize>,
) -> Result<&mut [u8], CommError> {
    let part = match lent {
        // SAFETY: the steps that write to peers own these chunks: every member has lent them to this
        // rank alone, and is told by a message after the last write.
        #[expect(unsafe_code, reason = "the steps of a collective keep the protocol of loans")]
        Lent::InPlace(window) if *of == chunks => unsafe { window.part_mut(at) },
        Lent::InPlace(_) | Lent::Copied(_) => None,
    };
    let problem = || CommError::Job {
        problem: format!("the vector of member {from} of a group is not mapped by this rank"),
    };
    part.ok_or_else(problem)
}
