//! Messages that the wire does not take at once.
//!
//! They go on while the steps behind them are carried out, straight from the work buffer. A step that
//! is about to overwrite what has not gone yet waits for it, or the rest is copied.

use super::{Running, ranges};
use crate::error::CommError;
use crate::transport::Transport;
use paceline_plan::collective::{Chunks, Cut};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;

/// A message that has not gone entirely.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outgoing {
    pub(super) to: Rank,
    pub(super) round: u32,
    pub(super) chunks: Chunks,
    pub(super) gone: Option<usize>,
}

impl Running {
    /// Sends more of what has not gone; whom the first of what is left is for.
    pub(super) fn send_on(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Cut,
        dtype: DType,
        data: &[u8],
    ) -> Result<Option<Rank>, CommError> {
        let mut at = 0;
        while let Some(message) = self.outgoing.get(at).copied() {
            let header = self.header(message.round, cut.elements, dtype);
            let total = (cut.elements_in(message.chunks) * dtype.size()) as usize;
            let gone = with_pieces(cut, message.chunks, dtype, data, |pieces| {
                transport.try_send(message.to, &header, pieces, message.gone)
            })?;
            self.moved += (gone.unwrap_or(0) - message.gone.unwrap_or(0)) as u64;
            if gone == Some(total) {
                self.outgoing.remove(at);
            } else {
                self.outgoing[at].gone = gone;
                at += 1;
            }
        }
        Ok(self.outgoing.first().map(|message| message.to))
    }

    /// Makes sure that these chunks may be overwritten in a round; whom is waited for, if they may not
    /// yet.
    ///
    /// What is left of an earlier round goes by itself: the peer that has it to take in does so before
    /// it comes to this round, and nothing of this round can keep it from that. What is left of this
    /// very round may be waited for in a circle, so it is copied.
    pub(super) fn let_go(
        &mut self,
        transport: &mut dyn Transport,
        cut: &Cut,
        dtype: DType,
        data: &[u8],
        (round, chunks): (u32, Chunks),
    ) -> Result<Option<Rank>, CommError> {
        let overlap = |message: &Outgoing| {
            let written = || ranges(cut, chunks, 1);
            ranges(cut, message.chunks, 1)
                .any(|a| written().any(|b| a.start < b.end && b.start < a.end))
        };
        if !self.outgoing.iter().any(overlap) {
            return Ok(None);
        }
        self.send_on(transport, cut, dtype, data)?;
        let in_the_way = || self.outgoing.iter().filter(|message| overlap(message));
        if let Some(earlier) = in_the_way().find(|message| message.round < round) {
            return Ok(Some(earlier.to));
        }
        // The order of messages to one rank stays, so those before such a one go with it.
        let peers: Vec<Rank> = in_the_way().map(|message| message.to).collect();
        for message in std::mem::take(&mut self.outgoing) {
            let Outgoing { to, round, chunks, gone } = message;
            if !peers.contains(&to) {
                self.outgoing.push(message);
                continue;
            }
            let header = self.header(round, cut.elements, dtype);
            with_pieces(cut, chunks, dtype, data, |pieces| {
                transport.finish_send(to, &header, pieces, gone)
            })?;
        }
        Ok(None)
    }
}

/// Calls with the pieces of a message, which are few.
fn with_pieces<R>(
    cut: &Cut,
    chunks: Chunks,
    dtype: DType,
    data: &[u8],
    call: impl FnOnce(&[&[u8]]) -> R,
) -> R {
    const FEW: usize = 16;
    let pieces = || ranges(cut, chunks, dtype.size() as usize).map(|range| &data[range]);
    let (mut few, mut number): ([&[u8]; FEW], usize) = ([&[]; FEW], 0);
    for piece in pieces() {
        let Some(place) = few.get_mut(number) else {
            return call(&pieces().collect::<Vec<_>>());
        };
        (*place, number) = (piece, number + 1);
    }
    call(&few[..number])
}
