//! Incoming messages of a collective: stored, reduced, or held.
//!
//! Held contributions are summed in canonical order, regardless of arrival order. While the next
//! contribution is missing, later ones of the same round are received as well. Many ranks that send
//! to one then share its link instead of taking turns.

use super::{ActiveCollective, Destination, ranges};
use crate::arithmetic::reduce_into;
use crate::error::CommError;
use crate::transport::{Header, MessageChunk, MessageSink, Transport};
use paceline_plan::collective::{Action, Chunking, Chunks, Combine, Reduction, Step};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;

/// Incoming message of a collective and its destination.
pub(super) struct Incoming<'m> {
    pub(super) rank: Rank,
    pub(super) peer: Rank,
    /// Expected header of the message.
    pub(super) header: &'m Header,
    pub(super) reduction: Reduction,
    pub(super) into: Destination<'m>,
    /// Buffer that collects a contribution to be held.
    pub(super) arriving: &'m mut Vec<u8>,
    /// Number of bytes moved.
    pub(super) moved: &'m mut u64,
}

/// A contribution that arrives before its step is reached.
#[derive(Debug)]
pub(super) struct EarlyChunk {
    step: usize,
    bytes: Vec<u8>,
    whole: bool,
}

impl ActiveCollective {
    /// Takes over the early bytes of the current step's message; returns true if it is complete.
    pub(super) fn came_early(&mut self) -> bool {
        let Some(at) = self.early.iter().position(|early| early.step == self.next) else {
            return false;
        };
        let EarlyChunk { bytes, whole, .. } = self.early.swap_remove(at);
        let empty = std::mem::replace(&mut self.arriving, bytes);
        self.spare.push(empty);
        whole
    }

    /// Receives available data of contributions to be held in the current round, if the current
    /// step waits for one.
    pub(super) fn receive_early(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Chunking,
        dtype: DType,
    ) -> Result<(), CommError> {
        for step in self.next..self.steps.len() {
            let Step { round, action } = self.steps[step];
            let Action::Recv { from, chunks, how: how @ Combine::Hold } = action else { break };
            if round != self.round.number {
                break;
            }
            if step == self.next {
                continue;
            }
            let at = self.early.iter().position(|early| early.step == step).unwrap_or_else(|| {
                let bytes = self.spare.pop().unwrap_or_default();
                self.early.push(EarlyChunk { step, bytes, whole: false });
                self.early.len() - 1
            });
            if self.early[at].whole {
                continue;
            }
            let (header, peer) =
                (self.header(round, cut.elements, dtype), self.members[from as usize]);
            let into = Destination { cut, chunks, how, dtype, data: &mut [], output: &mut [] };
            std::mem::swap(&mut self.arriving, &mut self.early[at].bytes);
            let whole = self.receive(transport, &header, peer, into);
            std::mem::swap(&mut self.arriving, &mut self.early[at].bytes);
            self.early[at].whole = whole?;
        }
        Ok(())
    }
}

impl Incoming<'_> {
    fn check(&self, found: &Header, total: usize) -> Result<(), CommError> {
        let Self { rank, peer, .. } = *self;
        let Destination { cut, chunks, dtype, .. } = &self.into;
        self.header.check(rank, peer, found)?;
        let (expected, found) = (cut.elements_in(*chunks) * dtype.size(), total as u64);
        if found != expected {
            return Err(CommError::Length { rank, peer, expected, found });
        }
        Ok(())
    }
}

impl MessageSink for Incoming<'_> {
    fn chunk(&mut self, header: &Header, piece: MessageChunk<'_>) -> Result<(), CommError> {
        self.check(header, piece.total)?;
        *self.moved += piece.bytes.len() as u64;
        let Destination { cut, chunks, how, dtype, data, output } = &mut self.into;
        let at = places(cut, *chunks, dtype.size() as usize, piece.at, piece.bytes);
        match how {
            Combine::Replace => at.for_each(|(at, part)| data[at].copy_from_slice(part)),
            Combine::Output => at.for_each(|(at, part)| output[at].copy_from_slice(part)),
            Combine::Reduce => at.for_each(|(at, part)| {
                reduce_into(*dtype, self.reduction, &mut data[at], part);
            }),
            Combine::Hold => self.arriving.extend_from_slice(piece.bytes),
        }
        Ok(())
    }

    fn destination(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.check(header, total)?;
        let Destination { cut, chunks, how, dtype, data, output } = &mut self.into;
        let mut skip = at;
        let place = ranges(cut, *chunks, dtype.size() as usize).find_map(|range| {
            let skipped = skip.min(range.len());
            skip -= skipped;
            Some(range.start + skipped..range.end).filter(|rest| !rest.is_empty())
        });
        Ok(match (how, place) {
            (Combine::Replace, Some(place)) => data.get_mut(place),
            (Combine::Output, Some(place)) => output.get_mut(place),
            (Combine::Replace | Combine::Output, None) | (Combine::Reduce | Combine::Hold, _) => {
                None
            }
        })
    }

    fn written(&mut self, bytes: usize) {
        *self.moved += bytes as u64;
    }
}

/// Maps `bytes`, starting at byte `at` of a message, to their ranges in the destination buffer.
fn places<'m>(
    cut: &Chunking,
    chunks: Chunks,
    size: usize,
    at: usize,
    mut bytes: &'m [u8],
) -> impl Iterator<Item = (Range<usize>, &'m [u8])> {
    let mut skip = at;
    ranges(cut, chunks, size).filter_map(move |range| {
        let skipped = skip.min(range.len());
        skip -= skipped;
        let start = range.start + skipped;
        let (part, rest) = bytes.split_at(bytes.len().min(range.end - start));
        bytes = rest;
        (!part.is_empty()).then_some((start..start + part.len(), part))
    })
}
