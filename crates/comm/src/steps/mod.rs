//! Collectives in flight: interprets the steps of `paceline-plan` on a transport.

mod fold;
mod incoming;
mod lent;
mod loans;
mod outgoing;
mod pipeline;
mod zero_copy;

use crate::arithmetic::{Sums, reducible};
use crate::error::CommError;
use crate::shared_memory::Lent;
use crate::shm::window::SharedBuffer;
use crate::transport::{Header, Progress, Purpose, RecvStatus, Tag, Transport, finish};
use incoming::{EarlyChunk, Incoming};
use loans::Round;
use outgoing::{Copied, Outgoing};
use paceline_plan::collective::{
    Action, Algorithm, Chunking, Chunks, CollectiveKind, Combine, Pattern, Reduction, Step,
    SummationOrder,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::time::Duration;
use zero_copy::ZeroCopySends;

/// Parameters of a collective that all members agree on, independent of vector size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveSpec {
    /// Kind of the collective.
    pub kind: CollectiveKind,
    /// Algorithm that performs it.
    pub algorithm: Algorithm,
    /// Order of summation.
    pub order: SummationOrder,
    /// Reduction that combines contributions, for kinds that reduce.
    pub reduction: Reduction,
    /// Index of the root among the members.
    pub root: u32,
    /// Chunks are split at multiples of this number of elements; 0 means 1. Ignored by all_to_all,
    /// whose parts are equal.
    pub block: u64,
}

/// One rank's side of a collective in flight.
///
/// [`paceline_plan::collective`] defines the buffer contents at the start and at the end. `data` is
/// the work buffer, and `output` is the output buffer of the kinds that have one. Between calls of
/// [`progress`](Self::progress) the buffers belong to the collective.
///
/// Messages are sent directly from the buffers and reduced as they arrive. A send that the
/// transport does not accept at once continues in parallel with the following steps. Large messages
/// are sent zero-copy if the transport can; the buffers are not released before the peer has
/// received them. Large vectors pass through the steps piece by piece.
///
/// The steps are exactly those of the spec's algorithm. Peers lend, read and write memory only with
/// an algorithm that says so; a vector outside shared memory then passes through a staging buffer.
#[derive(Debug)]
pub struct ActiveCollective {
    spec: CollectiveSpec,
    members: Vec<Rank>,
    me: u32,
    tag: Tag,
    pattern: Pattern,
    /// Maximum bytes of a piece of a chunk; then the pieces per chunk, and the steps of all.
    piece: u64,
    pieces: u32,
    steps: Vec<Step>,
    next: usize,
    /// Contributions held for a canonical sum, with their contributors.
    held: Vec<(u32, Chunks, Lent)>,
    /// Partial sums of contributions.
    sums: Sums,
    /// Contribution that is arriving and will be held.
    arriving: Vec<u8>,
    /// Contributions of later steps that have begun to arrive.
    early: Vec<EarlyChunk>,
    /// Used buffers, for such contributions and for copies.
    spare: Vec<Vec<u8>>,
    /// Messages not fully sent, oldest first.
    outgoing: Vec<Outgoing>,
    /// Copies of outgoing data whose original has been overwritten.
    copies: Vec<Copied>,
    /// Zero-copy sends whose data may still be read by the peer.
    in_place: ZeroCopySends,
    /// In-place reads and loans of the current round; the round ends when all are finished.
    round: Round,
    /// Number of elements and their dtype, set by the first call.
    vector: Option<(usize, DType)>,
    /// Number of bytes received or sent.
    moved: u64,
    /// Shared copy of a vector that is lent to peers and is in private memory.
    staging: Option<SharedBuffer>,
    /// True if this rank lends its vector to peers.
    has_loans: bool,
    /// Address and length of the last vector that was found in shared memory.
    located: Option<(usize, usize)>,
    is_barrier: bool,
}

impl ActiveCollective {
    /// Prepares the side of rank `me`, a member. All members use the same `tag`, and no other
    /// operation between any two of them uses it.
    pub fn start(
        spec: &CollectiveSpec,
        members: &[Rank],
        me: Rank,
        tag: Tag,
    ) -> Result<Self, CommError> {
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let pattern = Pattern::new(spec.kind, spec.algorithm, spec.order, ranks, spec.root)?;
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CommError::DuplicateRank { rank: pair[0] });
        }
        let Some(index) = (0..).zip(members).find_map(|(i, rank)| (*rank == me).then_some(i))
        else {
            return Err(CommError::NotAMember { rank: me, members: members.to_vec() });
        };
        Ok(Self {
            spec: CollectiveSpec { algorithm: pattern.algorithm(), ..*spec },
            members: members.to_vec(),
            me: index,
            tag,
            pattern,
            piece: pipeline::PIECE,
            pieces: 1,
            has_loans: pattern.steps(index).iter().any(is_loan),
            steps: pattern.steps(index),
            next: 0,
            held: Vec::new(),
            sums: Sums::default(),
            arriving: Vec::new(),
            early: Vec::new(),
            spare: Vec::new(),
            outgoing: Vec::new(),
            copies: Vec::new(),
            in_place: ZeroCopySends::default(),
            round: Round::default(),
            vector: None,
            moved: 0,
            staging: None,
            located: None,
            is_barrier: false,
        })
    }

    /// Like [`start`](Self::start), for steps without payload whose messages are marked as a
    /// barrier's.
    pub(crate) fn barrier(
        members: &[Rank],
        me: Rank,
        tag: Tag,
        steps: fn(u32, u32) -> Vec<Step>,
    ) -> Result<Self, CommError> {
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::Direct,
            order: SummationOrder::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        let start = Self::start(&spec, members, me, tag)?;
        let steps = steps(members.len() as u32, start.me);
        Ok(Self { is_barrier: true, steps, ..start })
    }

    /// Prepares the same collective to run again, on a vector of any size, without recomputing its
    /// steps.
    pub fn restart(&mut self, tag: Tag) {
        self.tag = tag;
        self.next = 0;
        self.held.clear();
        self.arriving.clear();
        self.early.clear();
        self.outgoing.clear();
        self.copies.clear();
        self.in_place.clear();
        self.round.clear();
        self.vector = None;
        self.moved = 0;
    }

    /// Sends, receives and reduces until a message is missing.
    ///
    /// Never blocks. The buffers must be the same in every call until the collective is done; after
    /// an error their contents are lost.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [f32],
        output: Option<&mut [f32]>,
    ) -> Result<Progress, CommError> {
        let output = output.map(bytemuck::cast_slice_mut);
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice_mut(data), output)
    }

    /// Like [`progress`](Self::progress), for elements of any dtype. Only floats can be reduced, in
    /// f32 with one rounding per combination; any dtype can be moved.
    pub fn progress_bytes(
        &mut self,
        transport: &mut dyn Transport,
        dtype: DType,
        data: &mut [u8],
        output: Option<&mut [u8]>,
    ) -> Result<Progress, CommError> {
        let output = self.check_buffers(transport.rank(), dtype, data, output)?;
        self.stage(transport, data)?;
        let Some(mut staging) = self.staging.take() else {
            return self.run_steps(transport, dtype, data, output);
        };
        // SAFETY: only these steps lend its bytes, and they access none that a peer may write.
        #[expect(unsafe_code, reason = "the steps of a collective keep the protocol of loans")]
        let bytes = &mut unsafe { staging.bytes_mut() }[..data.len()];
        let progress = self.run_steps(transport, dtype, bytes, output)?;
        if progress == Progress::Done {
            data.copy_from_slice(bytes);
            if let Some(memory) = transport.memory() {
                memory.return_staging(staging);
            }
        } else {
            self.staging = Some(staging);
        }
        Ok(progress)
    }

    fn run_steps(
        &mut self,
        transport: &mut dyn Transport,
        dtype: DType,
        data: &mut [u8],
        output: &mut [u8],
    ) -> Result<Progress, CommError> {
        let size = dtype.size() as usize;
        let cut = self.cut(data.len() / size);
        loop {
            let step = self.steps.get(self.next).copied();
            if step.is_none_or(|step| step.round != self.round.number && !is_write(&step))
                && let Some(on) = self.end_round(transport, cut.elements, dtype)?
            {
                self.send_on(transport, &cut, dtype, data)?;
                return Ok(self.pending(on));
            }
            let Some(Step { round, action }) = step else {
                let on = match self.send_on(transport, &cut, dtype, data)? {
                    Some(on) => Some(on),
                    None => self.await_acks(transport)?,
                };
                return Ok(on.map_or(Progress::Done, |on| self.pending(on)));
            };
            self.round.number = round;
            let header = self.header(round, cut.elements, dtype);
            match action {
                Action::Send { to, chunks } => {
                    let to = self.members[to as usize];
                    self.outgoing.push(Outgoing { to, round, chunks, gone: None, copied: false });
                    self.send_on(transport, &cut, dtype, data)?;
                }
                Action::Recv { from, chunks, how } => {
                    if (how == Combine::Replace || how == Combine::Reduce)
                        && let Some(on) =
                            self.let_go(transport, &cut, dtype, data, (round, chunks))?
                    {
                        return Ok(self.pending(on));
                    }
                    let peer = self.members[from as usize];
                    let into = Destination { cut: &cut, chunks, how, dtype, data, output };
                    if !self.came_early() && !self.receive(transport, &header, peer, into)? {
                        self.receive_early(transport, &cut, dtype)?;
                        self.send_on(transport, &cut, dtype, data)?;
                        return Ok(self.pending(peer));
                    }
                    if how == Combine::Hold {
                        let next = self.spare.pop().unwrap_or_default();
                        let message = std::mem::replace(&mut self.arriving, next);
                        self.held.push((from, chunks, Lent::Copied(message)));
                    }
                }
                Action::Offer { .. } | Action::Take { .. } => {
                    let (rank, algorithm) = (transport.rank(), self.spec.algorithm);
                    return Err(CommError::NoSummingSwitch { rank, algorithm });
                }
                Action::Fold { chunks } => {
                    if let Some(on) = self.let_go(transport, &cut, dtype, data, (round, chunks))? {
                        return Ok(self.pending(on));
                    }
                    let writes = self.writes_after(self.next, chunks);
                    if writes > 0 {
                        self.fold_and_write(&cut, chunks, dtype, data)?;
                    } else {
                        self.fold(&cut, chunks, dtype, data);
                    }
                    self.next += writes;
                }
                // Plans are checked: writes follow the fold of the same chunks, which does them.
                Action::Write { to, .. } => {
                    let problem = format!("a write to rank {to} of a group follows no fold");
                    return Err(CommError::Job { problem });
                }
                Action::Emit { chunks, into } => {
                    let into = ranges(&cut, into, size);
                    for (from, into) in ranges(&cut, chunks, size).zip(into) {
                        output[into].copy_from_slice(&data[from]);
                    }
                }
                Action::Lend { to, chunks } => {
                    let pieces = ranges(&cut, chunks, size).map(|range| &data[range]);
                    self.lend(transport, &header, to, pieces)?;
                }
                Action::Read { from, chunks, how } => {
                    let into = Destination { cut: &cut, chunks, how, dtype, data, output };
                    if !self.read(transport, &header, from, into)? {
                        return Ok(self.pending(self.members[from as usize]));
                    }
                }
            }
            self.next += 1;
        }
    }

    fn pending(&self, on: Rank) -> Progress {
        Progress::Pending { on, step: self.next, moved: self.moved }
    }

    /// Receives available data of a message; returns true if the message is complete.
    fn receive(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        peer: Rank,
        into: Destination<'_>,
    ) -> Result<bool, CommError> {
        let (rank, tag, reduction) = (transport.rank(), self.tag, self.spec.reduction);
        let Self { arriving, moved, .. } = self;
        let mut incoming = Incoming { rank, peer, header, reduction, into, arriving, moved };
        Ok(transport.try_recv_into(peer, tag, &mut incoming)? == RecvStatus::Complete)
    }

    /// Rejects unsuitable buffers and returns the output buffer, empty for kinds without one.
    fn check_buffers<'a>(
        &mut self,
        rank: Rank,
        dtype: DType,
        data: &[u8],
        output: Option<&'a mut [u8]>,
    ) -> Result<&'a mut [u8], CommError> {
        if self.members[self.me as usize] != rank {
            return Err(CommError::NotAMember { rank, members: self.members.clone() });
        }
        let (kind, size, ranks) = (self.spec.kind, dtype.size() as usize, self.members.len());
        let elements = data.len() / size;
        if self.vector.is_none() {
            self.cut_into_pieces(data.len() as u64);
        }
        let before = *self.vector.get_or_insert((elements, dtype));
        let problem = match (kind.has_output(), output) {
            _ if !data.len().is_multiple_of(size) => {
                format!("{} bytes are not a whole number of {dtype} elements", data.len())
            }
            _ if kind.reduces() && !self.is_barrier && !reducible(dtype) => {
                format!("{dtype} elements cannot be reduced; f32, bf16 and f16 can")
            }
            _ if before.0 != elements => {
                format!("the vector had {} elements and now has {elements}", before.0)
            }
            _ if before.1 != dtype => {
                format!("the elements were {} and now are {dtype}", before.1)
            }
            _ if kind == CollectiveKind::AllToAll && !elements.is_multiple_of(ranks) => {
                format!("{elements} elements are not {ranks} equal parts")
            }
            (true, None) => "an output buffer is needed".to_owned(),
            (true, Some(output)) if output.len() != data.len() => {
                let found = output.len() / size;
                format!("the output buffer has {found} elements instead of {elements}")
            }
            (false, Some(_)) => "works in place and takes no output buffer".to_owned(),
            (true, Some(output)) => return Ok(output),
            (false, None) => return Ok(&mut []),
        };
        Err(CommError::Buffers { rank, kind: kind.name(), problem })
    }

    /// Recomputes the steps for the number of pieces that suits a vector of `bytes` bytes.
    fn cut_into_pieces(&mut self, bytes: u64) {
        let pieces = pipeline::pieces(&self.pattern, bytes, self.piece);
        if pieces != self.pieces {
            let whole = self.pattern.steps(self.me);
            let rounds = self.pattern.rounds();
            self.steps = match pieces {
                1 => whole,
                _ => pipeline::pipelined(&whole, rounds, pieces),
            };
            self.pieces = pieces;
        }
    }

    fn cut(&self, elements: usize) -> Chunking {
        let block = match self.spec.kind {
            CollectiveKind::AllToAll => 1,
            _ => self.spec.block,
        };
        Chunking { elements: elements as u64, chunks: self.pattern.chunks(), block }
    }

    fn header(&self, round: u32, elements: u64, dtype: DType) -> Header {
        let ranks = self.members.len() as u32;
        let purpose = if self.is_barrier {
            Purpose::Barrier { ranks }
        } else {
            Purpose::Collective { spec: self.spec, ranks, elements, dtype }
        };
        Header { tag: self.tag, purpose, round }
    }
}

/// Runs a collective of f32 elements to completion; fails if a member is silent for `timeout`.
pub fn run(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    members: &[Rank],
    tag: Tag,
    data: &mut [f32],
    output: Option<&mut [f32]>,
    timeout: Duration,
) -> Result<(), CommError> {
    let data = bytemuck::cast_slice_mut(data);
    let output = output.map(bytemuck::cast_slice_mut);
    run_bytes(transport, spec, members, tag, (DType::F32, data), output, timeout)
}

/// Like [`run`], for elements of any dtype.
pub fn run_bytes(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    members: &[Rank],
    tag: Tag,
    (dtype, data): (DType, &mut [u8]),
    mut output: Option<&mut [u8]>,
    timeout: Duration,
) -> Result<(), CommError> {
    let mut running = ActiveCollective::start(spec, members, transport.rank(), tag)?;
    finish(transport, timeout, |transport| {
        running.progress_bytes(transport, dtype, data, output.as_deref_mut())
    })
}

fn is_loan(step: &Step) -> bool {
    matches!(step.action, Action::Lend { .. })
}

fn is_write(step: &Step) -> bool {
    matches!(step.action, Action::Write { .. })
}

/// Destination of a message and the way it is combined.
struct Destination<'a> {
    cut: &'a Chunking,
    chunks: Chunks,
    how: Combine,
    dtype: DType,
    data: &'a mut [u8],
    output: &'a mut [u8],
}

/// Byte ranges of `chunks` in a buffer whose elements have `size` bytes.
fn ranges(cut: &Chunking, chunks: Chunks, size: usize) -> impl Iterator<Item = Range<usize>> {
    cut.ranges(chunks).map(move |range| range.start as usize * size..range.end as usize * size)
}
