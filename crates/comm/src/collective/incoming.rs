//! Messages as they come in: put in place, reduced, or held.
//!
//! Contributions that are held are summed in canonical order whenever they come. So while the one that
//! is next is missing, those of the same round that follow it are taken in as well: many ranks that
//! send to one share its link, instead of waiting for their turn.

use super::{Into, Running, ranges};
use crate::arithmetic::reduce_into;
use crate::error::CommError;
use crate::transport::{Header, Piece, Transport, Visitor};
use paceline_plan::collective::{Action, Chunks, Combine, Cut, Reduction, Step};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;

/// A message of a collective on its way to where it belongs.
pub(super) struct Incoming<'m> {
    pub(super) rank: Rank,
    pub(super) peer: Rank,
    /// What the message must be.
    pub(super) header: &'m Header,
    pub(super) reduction: Reduction,
    pub(super) into: Into<'m>,
    /// Where a contribution is gathered that is to be held.
    pub(super) arriving: &'m mut Vec<u8>,
    /// How many bytes have moved.
    pub(super) moved: &'m mut u64,
}

/// A contribution that arrives before its step has come.
#[derive(Debug)]
pub(super) struct Early {
    step: usize,
    bytes: Vec<u8>,
    whole: bool,
}

impl Running {
    /// Takes over what came early of the present step's message; whether that is all of it.
    pub(super) fn came_early(&mut self) -> bool {
        let Some(at) = self.early.iter().position(|early| early.step == self.next) else {
            return false;
        };
        let Early { bytes, whole, .. } = self.early.swap_remove(at);
        let empty = std::mem::replace(&mut self.arriving, bytes);
        self.spare.push(empty);
        whole
    }

    /// Takes in what there is of contributions to be held in the present round, if the present step
    /// waits for one.
    pub(super) fn receive_early(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Cut,
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
                self.early.push(Early { step, bytes, whole: false });
                self.early.len() - 1
            });
            if self.early[at].whole {
                continue;
            }
            let (header, peer) =
                (self.header(round, cut.elements, dtype), self.members[from as usize]);
            let into = Into { cut, chunks, how, dtype, data: &mut [], output: &mut [] };
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
        let Into { cut, chunks, dtype, .. } = &self.into;
        self.header.check(rank, peer, found)?;
        let (expected, found) = (cut.elements_in(*chunks) * dtype.size(), total as u64);
        if found != expected {
            return Err(CommError::Length { rank, peer, expected, found });
        }
        Ok(())
    }
}

impl Visitor for Incoming<'_> {
    fn show(&mut self, header: &Header, piece: Piece<'_>) -> Result<(), CommError> {
        self.check(header, piece.total)?;
        *self.moved += piece.bytes.len() as u64;
        let Into { cut, chunks, how, dtype, data, output } = &mut self.into;
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

    fn place(
        &mut self,
        header: &Header,
        total: usize,
        at: usize,
    ) -> Result<Option<&mut [u8]>, CommError> {
        self.check(header, total)?;
        let Into { cut, chunks, how, dtype, data, output } = &mut self.into;
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

    fn placed(&mut self, bytes: usize) {
        *self.moved += bytes as u64;
    }
}

/// Where part of a message belongs, whose first byte is so many from the message's beginning.
fn places<'m>(
    cut: &Cut,
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
