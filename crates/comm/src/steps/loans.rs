//! Vectors lent to members of the group and read in their memory.

use super::{ActiveCollective, Destination, lent::along, ranges};
use crate::arithmetic::reduce_into;
use crate::error::CommError;
use crate::shared_memory::{Few, Lent};
use crate::transport::{Header, MessageChunk, RecvStatus, Transport};
use paceline_plan::collective::Combine;
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;

/// State of a round between ranks that read each other's memory.
#[derive(Debug, Default)]
pub(super) struct Round {
    pub(super) number: u32,
    /// Ranks whose memory was read in place.
    pub(super) read: Vec<Rank>,
    /// Ranks that read this rank's memory and have not reported completion.
    pub(super) lent: Vec<Rank>,
}

impl Round {
    /// Prepares the first round of another collective.
    pub(super) fn clear(&mut self) {
        self.number = 0;
        self.read.clear();
        self.lent.clear();
    }
}

impl ActiveCollective {
    /// Copies a private vector that is lent to peers into shared memory, before the first step.
    pub(super) fn stage(
        &mut self,
        transport: &mut dyn Transport,
        data: &[u8],
    ) -> Result<(), CommError> {
        let begins = self.next == 0 && self.staging.is_none() && self.round.lent.is_empty();
        let vector = (data.as_ptr() as usize, data.len());
        if !begins || !self.has_loans || self.located == Some(vector) {
            return Ok(());
        }
        let refused = self.no_shared_memory(transport);
        let memory = transport.memory().ok_or(refused)?;
        if memory.holds(data) {
            self.located = Some(vector);
            return Ok(());
        }
        let mut staging = memory.take_staging(data.len())?;
        // SAFETY: a staging buffer is lent to nobody when it is taken.
        #[expect(unsafe_code, reason = "the steps of a collective keep the protocol of loans")]
        let bytes = unsafe { staging.bytes_mut() };
        bytes[..data.len()].copy_from_slice(data);
        self.staging = Some(staging);
        Ok(())
    }

    /// Lends `pieces` of the vector to a member.
    pub(super) fn lend<'d>(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        to: u32,
        mut pieces: impl Iterator<Item = &'d [u8]>,
    ) -> Result<(), CommError> {
        let peer = self.members[to as usize];
        let lent = match (transport.memory(), pieces.next(), pieces.next()) {
            (None, ..) => false,
            (Some(memory), Some(one), None) => memory.lend(peer, header, &[one])?,
            (Some(memory), one, two) => {
                let all: Few<&[u8]> = one.into_iter().chain(two).chain(pieces).collect();
                memory.lend(peer, header, &all)?
            }
        };
        if !lent {
            return Err(self.no_shared_memory(transport));
        }
        self.round.lent.push(peer);
        Ok(())
    }

    /// Reads data lent by a member; returns false if it has not been lent yet.
    pub(super) fn read(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        from: u32,
        into: Destination<'_>,
    ) -> Result<bool, CommError> {
        let Destination { cut, chunks, how, dtype, data, output } = into;
        let (rank, peer, size) = (transport.rank(), self.members[from as usize], dtype.size());
        let Some(memory) = transport.memory() else {
            return Err(self.no_shared_memory(transport));
        };
        let Some((found, lent)) = memory.try_borrow(peer, self.tag)? else { return Ok(false) };
        header.check(rank, peer, &found)?;
        let expected = cut.elements_in(chunks) * size;
        if lent.bytes() as u64 != expected {
            let found = lent.bytes() as u64;
            return Err(CommError::Length { rank, peer, expected, found });
        }
        if matches!(lent, Lent::InPlace(_)) {
            self.round.read.push(peer);
        }
        let reduction = self.spec.reduction;
        let at = ranges(cut, chunks, size as usize);
        match how {
            Combine::Replace => {
                along(at, &lent, |range, piece| data[range].copy_from_slice(piece));
            }
            Combine::Output => {
                along(at, &lent, |range, piece| output[range].copy_from_slice(piece));
            }
            Combine::Reduce => along(at, &lent, |range, piece| {
                reduce_into(dtype, reduction, &mut data[range], piece);
            }),
            Combine::Hold => self.held.push((from, chunks, lent)),
        }
        Ok(true)
    }

    /// Tells lenders that their data has been read, and waits for the same from all readers.
    /// Returns a reader that has not finished, if any.
    pub(super) fn end_round(
        &mut self,
        transport: &mut dyn Transport,
        elements: u64,
        dtype: DType,
    ) -> Result<Option<Rank>, CommError> {
        if self.round.read.is_empty() && self.round.lent.is_empty() {
            return Ok(None);
        }
        let header = self.header(self.round.number, elements, dtype);
        for peer in self.round.read.drain(..) {
            transport.send(peer, &header, &[])?;
        }
        while let Some(&peer) = self.round.lent.last() {
            let rank = transport.rank();
            let taken = transport.try_recv_into(
                peer,
                self.tag,
                &mut |found: &Header, _: MessageChunk<'_>| header.check(rank, peer, found),
            )?;
            if taken != RecvStatus::Complete {
                return Ok(Some(peer));
            }
            self.round.lent.pop();
        }
        Ok(None)
    }

    fn no_shared_memory(&self, transport: &dyn Transport) -> CommError {
        CommError::NoSharedMemory { rank: transport.rank(), algorithm: self.spec.algorithm }
    }
}
