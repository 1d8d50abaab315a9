//! An all_reduce of ranks that share memory, without messages but for "here it is" and "done".
//!
//! Every rank tells all others where its vector lies. Once it knows where all of them are, it reduces
//! its part of the vector straight from everyone's memory and writes the result straight to
//! everyone's: each byte of each vector crosses the memory bus once in and once out, which is the
//! least that an all_reduce can do (2 P N bytes for P vectors of N). When all have said that they are
//! done, all vectors hold the reduction.
//!
//! The sum of an element is taken in the order in which the steps of `direct` and `read-reduce` take
//! it, so the result has the bits that they give on any transport; in canonical order those are the
//! bits of every algorithm.
//!
//! **Vectors elsewhere.** A vector outside shared memory is brought there and back segment by
//! segment, through a stage of two segments that stays in the caches. If one rank has to do so, all
//! go along in segments; while the others still work on one, it brings the next.
//!
//! Between two ranks the messages are, in this order: the offer, then for each segment *k* "segment
//! k + 1 is there" (from ranks with a stage, while there is one) and "segment k is done".

use super::CollectiveSpec;
use crate::arithmetic::{Sequence, reduce_everywhere};
use crate::error::CommError;
use crate::shm::window::{Loan, SharedBuffer, Window};
use crate::transport::{Header, Piece, Progress, Purpose, Taken, Transport};
use paceline_plan::collective::{
    Algorithm, CollectiveKind, Cut, Order, Pattern, Reduction, chunk_range,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;

/// Bytes of a segment: two of them for every rank of a host stay within the caches that they share.
const SEGMENT: usize = 512 << 10;
/// The longest offer.
const OFFER: usize = 128;
/// The last byte of an offer says whether the vector itself is shown or a stage.
const IN_PLACE: u8 = 0;
const STAGED: u8 = 1;

/// One rank's side.
#[derive(Debug)]
pub(super) struct Together {
    me: usize,
    /// By index within the group; this rank's own stays as it is.
    peers: Vec<Peer>,
    /// Whether all members share memory, once that has been asked.
    possible: Option<bool>,
    state: State,
    segment: usize,
    /// Where this rank's own vector passes through, if it does.
    stage: Option<SharedBuffer>,
    segmented: bool,
    /// How many messages have been taken in.
    taken: u64,
}

#[derive(Debug)]
struct Peer {
    rank: Rank,
    window: Option<Window>,
    staged: bool,
    /// Which message of it is next.
    heard: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing has been said.
    Before,
    /// Offers come in.
    Offers,
    /// Segments are being finished.
    Done,
}

impl Together {
    /// Whether a collective may be done so: its bits must be those of its steps.
    pub(super) fn suits(asked: &CollectiveSpec, pattern: &Pattern) -> bool {
        let same_order = match asked.algorithm {
            Algorithm::Direct | Algorithm::ReadReduce => true,
            // The choice is ours, and the order is the one and only.
            Algorithm::Auto => asked.order == Order::Canonical,
            _ => false,
        };
        pattern.kind() == CollectiveKind::AllReduce && pattern.ranks() > 1 && same_order
    }

    pub(super) fn new(members: &[Rank], me: u32) -> Self {
        let peer = |rank: &Rank| Peer { rank: *rank, window: None, staged: false, heard: 0 };
        Self {
            me: me as usize,
            peers: members.iter().map(peer).collect(),
            possible: None,
            state: State::Before,
            segment: 0,
            stage: None,
            segmented: false,
            taken: 0,
        }
    }

    pub(super) fn restart(&mut self) {
        self.state = State::Before;
        self.segment = 0;
        self.taken = 0;
        for peer in &mut self.peers {
            (peer.window, peer.heard) = (None, 0);
        }
    }

    /// Whether all members share memory: what one member finds here all others find.
    pub(super) fn is_possible(&mut self, transport: &dyn Transport) -> bool {
        *self.possible.get_or_insert_with(|| {
            super::are_neighbours(self.peers.iter().map(|peer| &peer.rank), transport)
        })
    }

    /// Does whatever can be done now.
    pub(super) fn progress(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        cut: &Cut,
        data: &mut [u8],
    ) -> Result<Progress, CommError> {
        if self.state == State::Before {
            self.offer(transport, header, data)?;
            self.state = State::Offers;
        }
        if self.state == State::Offers {
            if let Some(on) = self.hear(transport, header, 1, |_, _| 1)? {
                return Ok(self.pending(on));
            }
            self.segmented = self.stage.is_some() || self.peers.iter().any(|peer| peer.staged);
            self.work(transport, header, cut, data)?;
            self.state = State::Done;
        }
        loop {
            let segments = self.segments(data.len());
            // From a rank with a stage, the next segment comes before the end of this one.
            let expected = |segment: usize, peer: &Peer| {
                let ahead = if peer.staged { (segment + 1).min(segments - 1) } else { 0 };
                (1 + ahead + segment + 1) as u32
            };
            if let Some(on) = self.hear(transport, header, segments, expected)? {
                return Ok(self.pending(on));
            }
            self.bring_back(data);
            self.segment += 1;
            if self.segment == segments {
                if let Some(stage) = self.stage.take() {
                    transport.give_stage_back(stage);
                }
                return Ok(Progress::Done);
            }
            self.work(transport, header, cut, data)?;
        }
    }

    fn pending(&self, on: Rank) -> Progress {
        Progress::Pending { on, step: self.segment, moved: self.taken }
    }

    fn segments(&self, bytes: usize) -> usize {
        if self.segmented { bytes.div_ceil(SEGMENT).max(1) } else { 1 }
    }

    /// Where a segment lies in a vector of so many bytes.
    fn segment(&self, segment: usize, bytes: usize) -> Range<usize> {
        match self.segmented {
            true => (segment * SEGMENT).min(bytes)..((segment + 1) * SEGMENT).min(bytes),
            false => 0..bytes,
        }
    }

    /// Tells everyone where the vector, or the stage for it, lies.
    fn offer(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        data: &[u8],
    ) -> Result<(), CommError> {
        let mut offer = Vec::with_capacity(OFFER);
        let (loan, kind) = match transport.locate(data) {
            Some(loan) => (Some(loan), IN_PLACE),
            None => {
                let mut stage = transport.take_stage(2 * SEGMENT)?;
                if let Some(stage) = &mut stage {
                    let first = data.len().min(SEGMENT);
                    stage[..first].copy_from_slice(&data[..first]);
                }
                self.stage = stage;
                let loan = self.stage.as_ref().and_then(|s| transport.locate(&s[..2 * SEGMENT]));
                (loan, STAGED)
            }
        };
        if let Some(loan) = loan {
            loan.encode(&mut offer);
        }
        offer.push(kind);
        self.tell(transport, header, 0, &offer)
    }

    fn tell(
        &self,
        transport: &mut dyn Transport,
        header: &Header,
        message: u32,
        data: &[u8],
    ) -> Result<(), CommError> {
        let header = Header { round: message, ..*header };
        for (_, peer) in self.peers.iter().enumerate().filter(|(i, _)| *i != self.me) {
            transport.send(peer.rank, &header, &[data])?;
        }
        Ok(())
    }

    /// Takes in as many messages as are expected of each peer in all; who still owes one.
    fn hear(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        segments: usize,
        expected: impl Fn(usize, &Peer) -> u32,
    ) -> Result<Option<Rank>, CommError> {
        let rank = transport.rank();
        let (mut owing, segment) = (None, self.segment);
        for (_, peer) in self.peers.iter_mut().enumerate().filter(|(i, _)| *i != self.me) {
            while peer.heard < expected(segment, peer) {
                let wanted = Header { round: peer.round(segments), ..*header };
                let (mut offer, mut bytes) = ([0; OFFER], 0);
                let taken = transport.try_take(peer.rank, header.tag, &mut |found: &Header,
                                                                             piece: Piece<
                    '_,
                >| {
                    wanted.check(rank, peer.rank, found)?;
                    let end = piece.at + piece.bytes.len();
                    if let Some(part) = offer.get_mut(piece.at..end) {
                        part.copy_from_slice(piece.bytes);
                    }
                    bytes = piece.total;
                    Ok(())
                })?;
                if taken != Taken::Whole {
                    owing = owing.or(Some(peer.rank));
                    break;
                }
                if peer.heard == 0 {
                    peer.accept(transport, offer.get(..bytes).unwrap_or_default(), header)?;
                }
                peer.heard += 1;
                self.taken += 1;
            }
        }
        Ok(owing)
    }

    /// Reduces this rank's part of the present segment, having brought the next one to the stage.
    fn work(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        cut: &Cut,
        data: &mut [u8],
    ) -> Result<(), CommError> {
        let next = self.segment(self.segment + 1, data.len());
        if self.stage.is_some() && self.segment + 1 < self.segments(data.len()) {
            let at = (self.segment + 1) % 2 * SEGMENT;
            if let Some(stage) = &mut self.stage {
                stage[at..at + next.len()].copy_from_slice(&data[next]);
            }
            self.tell(transport, header, 2 * self.segment as u32 + 1, &[])?;
        }
        self.reduce(header, cut, data)?;
        self.tell(transport, header, 2 * self.segment as u32 + 2, &[])
    }

    fn reduce(&mut self, header: &Header, cut: &Cut, data: &mut [u8]) -> Result<(), CommError> {
        let Purpose::Collective { spec, dtype, .. } = header.purpose else { return Ok(()) };
        let CollectiveSpec { order, reduction, .. } = spec;
        let size = dtype.size() as usize;
        let ranks = self.peers.len() as u32;
        let whole = self.segment(self.segment, data.len());
        let (from, to) = (whole.start / size, whole.end / size);
        let own = chunk_range((to - from) as u64, ranks, self.me as u32, cut.block);
        let own = from as u64 + own.start..from as u64 + own.end;
        for chunk in 0..ranks {
            let Range { start, end } = cut.range(chunk);
            let (start, end) = (start.max(own.start), end.min(own.end));
            if start >= end {
                continue;
            }
            let part = start as usize * size..end as usize * size;
            let sequence = match order {
                Order::Canonical => Sequence::Canonical,
                Order::Free => Sequence::Backwards(chunk as usize),
            };
            self.reduce_part(dtype, reduction, sequence, data, part)?;
        }
        Ok(())
    }

    /// Reduces bytes of the vector, wherever everyone has them.
    fn reduce_part(
        &mut self,
        dtype: DType,
        reduction: Reduction,
        sequence: Sequence,
        data: &mut [u8],
        part: Range<usize>,
    ) -> Result<(), CommError> {
        let staged = {
            let shift = |at: usize| at - self.segment * SEGMENT + self.segment % 2 * SEGMENT;
            if self.segmented { shift(part.start)..shift(part.end) } else { 0..0 }
        };
        let Self { me, peers, stage, .. } = self;
        let mut own = Some(match stage {
            Some(stage) => &mut stage[staged.clone()],
            None => &mut data[part.clone()],
        });
        let mut members = Vec::with_capacity(peers.len());
        for (index, peer) in peers.iter_mut().enumerate() {
            let at = if peer.staged { staged.clone() } else { part.clone() };
            let bytes = match &mut peer.window {
                _ if index == *me => own.take(),
                Some(window) => window.part_mut(at),
                None => None,
            };
            let problem =
                || CommError::Job { problem: "a rank's vector is out of reach".to_owned() };
            members.push(bytes.ok_or_else(problem)?);
        }
        reduce_everywhere(dtype, reduction, sequence, &mut members);
        Ok(())
    }

    /// Copies the finished segment from the stage to the vector.
    fn bring_back(&mut self, data: &mut [u8]) {
        let segment = self.segment(self.segment, data.len());
        if let Some(stage) = &self.stage {
            let at = self.segment % 2 * SEGMENT;
            data[segment.clone()].copy_from_slice(&stage[at..at + segment.len()]);
        }
    }
}

impl Peer {
    /// What stands in the header of its next message: the offer has 0, "segment k + 1 is there" 2k + 1
    /// and "segment k is done" 2k + 2. Ranks without a stage leave the odd ones out, and there is no
    /// segment after the last.
    fn round(&self, segments: usize) -> u32 {
        let last = 2 * segments as u32;
        if self.staged && self.heard + 1 < last { self.heard } else { (2 * self.heard).min(last) }
    }

    /// Looks where the vector lies.
    fn accept(
        &mut self,
        transport: &mut dyn Transport,
        offer: &[u8],
        header: &Header,
    ) -> Result<(), CommError> {
        let (rank, peer) = (transport.rank(), self.rank);
        let Purpose::Collective { elements, dtype, .. } = header.purpose else { return Ok(()) };
        let failed = |reason: &str| CommError::Failed { rank: peer, reason: reason.to_owned() };
        let window = match offer.split_last() {
            Some((kind, loan)) => {
                self.staged = *kind == STAGED;
                match Loan::decode(loan) {
                    Some(loan) => transport.open(&loan)?,
                    None => None,
                }
            }
            None => None,
        };
        let window = window.ok_or_else(|| failed("it does not say where its vector lies"))?;
        let whole = elements.saturating_mul(dtype.size());
        let expected = if self.staged { 2 * SEGMENT as u64 } else { whole };
        let found = window.bytes() as u64;
        if found != expected {
            return Err(CommError::Length { rank, peer, expected, found });
        }
        self.window = Some(window);
        Ok(())
    }
}
