//! Messages as they come in: put in place, reduced, or held.

use super::{Into, ranges};
use crate::arithmetic::reduce_into;
use crate::error::CommError;
use crate::transport::{Header, Piece, Visitor};
use paceline_plan::collective::{Chunks, Combine, Cut, Reduction};
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
