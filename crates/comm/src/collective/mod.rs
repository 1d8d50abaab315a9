//! Collectives in flight: the steps of `paceline-plan`, interpreted on a transport.

mod in_place;
mod incoming;
mod lent;
mod outgoing;
mod pipeline;
mod together;

use crate::arithmetic::{Contributions, reduce_into, reducible};
use crate::error::CommError;
use crate::transport::{
    Header, Lending, Lent, Piece, Progress, Purpose, Tag, Taken, Transport, finish,
};
use in_place::InPlace;
use incoming::{Early, Incoming};
use lent::{Cursor, along};
use outgoing::{Copied, Outgoing};
use paceline_plan::collective::{
    Action, Algorithm, Chunks, CollectiveKind, Combine, Cut, Order, Pattern, Reduction, Step,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::time::Duration;
use together::Together;

/// What all members of a group agree on about a collective, whatever the size of the vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveSpec {
    /// What is done.
    pub kind: CollectiveKind,
    /// How it is done.
    pub algorithm: Algorithm,
    /// The order of summation.
    pub order: Order,
    /// How contributions are combined, where any are.
    pub reduction: Reduction,
    /// The root's index among the members.
    pub root: u32,
    /// Chunks are cut at multiples of this many elements; 0 means 1. all_to_all, whose parts are
    /// equal, takes no notice of it.
    pub block: u64,
}

/// One rank's side of a collective in flight.
///
/// What the buffers must hold at the start, and what they hold at the end, is laid down in
/// [`paceline_plan::collective`]: `data` is the work buffer, and `output` the output buffer that
/// all_to_all alone has. Between the calls of [`progress`](Self::progress) they belong to the
/// collective.
///
/// Messages go straight from the buffers and are reduced as they come in; a send that the wire does
/// not take at once goes on beside the steps that follow it. Where the wire can, the peer gets large ones
/// from the buffers themselves, which are not handed back before it has. Large vectors go through the steps piece
/// by piece. Where all members share memory, an
/// all_reduce whose order of summation allows it is done together instead of by steps, and what is
/// scattered, gathered or exchanged by an algorithm that nobody has chosen is read where it lies.
#[derive(Debug)]
pub struct Running {
    spec: CollectiveSpec,
    members: Vec<Rank>,
    me: u32,
    tag: Tag,
    pattern: Pattern,
    /// Bytes of a piece of a chunk, at most; into how many chunks are cut, and the steps of all.
    piece: u64,
    pieces: u32,
    steps: Vec<Step>,
    next: usize,
    /// Contributions set aside for a canonical sum, with their contributors.
    held: Vec<(u32, Chunks, Lent)>,
    /// The contribution that is arriving, to be held.
    arriving: Vec<u8>,
    /// Contributions of later steps that have begun to arrive.
    early: Vec<Early>,
    /// Buffers for such contributions and for copies, used before.
    spare: Vec<Vec<u8>>,
    /// Messages that have not gone entirely, oldest first.
    outgoing: Vec<Outgoing>,
    /// What some of them carry, where it has been overwritten.
    copies: Vec<Copied>,
    /// What has gone and may still be read where it lies.
    in_place: InPlace,
    /// What is read or lent in place in the present round, which ends when all of it is done with.
    round: Round,
    /// Elements of the vector and their type, once the first call has shown it.
    vector: Option<(usize, DType)>,
    /// How many bytes have come in or gone out.
    moved: u64,
    /// Whether steps can be done without, which depends on the transport too.
    together: Option<Together>,
    /// Whether the members may read each other's vectors instead, which depends on it as well.
    may_read: bool,
    is_barrier: bool,
}

impl Running {
    /// Prepares the side of rank `me`, a member; the tag is the same for all members, and no other
    /// operation between any two of them has it.
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
            return Err(CommError::Twice { rank: pair[0] });
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
            steps: pattern.steps(index),
            next: 0,
            held: Vec::new(),
            arriving: Vec::new(),
            early: Vec::new(),
            spare: Vec::new(),
            outgoing: Vec::new(),
            copies: Vec::new(),
            in_place: InPlace::default(),
            round: Round::default(),
            vector: None,
            moved: 0,
            together: Together::suits(spec, &pattern).then(|| Together::new(members, index)),
            may_read: may_read(spec) && ranks > 1,
            is_barrier: false,
        })
    }

    /// As [`start`](Self::start), for steps that carry nothing and whose messages say that they are
    /// a barrier's.
    pub(crate) fn barrier(
        members: &[Rank],
        me: Rank,
        tag: Tag,
        steps: fn(u32, u32) -> Vec<Step>,
    ) -> Result<Self, CommError> {
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::Direct,
            order: Order::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        let start = Self::start(&spec, members, me, tag)?;
        let steps = steps(members.len() as u32, start.me);
        Ok(Self { is_barrier: true, together: None, steps, ..start })
    }

    /// Makes the same collective ready to run again, on a vector of any size, without working its
    /// steps out anew.
    pub fn restart(&mut self, tag: Tag) {
        self.tag = tag;
        self.next = 0;
        self.held.clear();
        self.arriving.clear();
        self.early.clear();
        self.outgoing.clear();
        self.copies.clear();
        self.in_place = InPlace::default();
        self.round = Round::default();
        self.vector = None;
        self.moved = 0;
        if let Some(together) = &mut self.together {
            together.restart();
        }
    }

    /// Does whatever can be done now: sends, receives and reduces until a message is missing.
    ///
    /// Never blocks. The buffers must be the same in every call until it is done; after an error
    /// their contents are lost.
    pub fn progress(
        &mut self,
        transport: &mut dyn Transport,
        data: &mut [f32],
        output: Option<&mut [f32]>,
    ) -> Result<Progress, CommError> {
        let output = output.map(bytemuck::cast_slice_mut);
        self.progress_bytes(transport, DType::F32, bytemuck::cast_slice_mut(data), output)
    }

    /// As [`progress`](Self::progress), for elements of any type. Floats can be reduced, in f32
    /// with one rounding for every two that are combined; anything can be moved.
    pub fn progress_bytes(
        &mut self,
        transport: &mut dyn Transport,
        dtype: DType,
        data: &mut [u8],
        output: Option<&mut [u8]>,
    ) -> Result<Progress, CommError> {
        if std::mem::take(&mut self.may_read) {
            self.read_if_possible(transport)?;
        }
        let output = self.check_buffers(transport.rank(), dtype, data, output)?;
        let size = dtype.size() as usize;
        let cut = self.cut(data.len() / size);
        if let Some(mut together) = self.together.take() {
            if together.is_possible(transport) {
                let header = self.header(0, cut.elements, dtype);
                let progress = together.progress(transport, &header, &cut, data);
                self.together = Some(together);
                return progress;
            }
            self.together = Some(together);
        }
        loop {
            let step = self.steps.get(self.next).copied();
            if step.is_none_or(|step| step.round != self.round.number)
                && let Some(on) = self.end_round(transport, cut.elements, dtype)?
            {
                self.send_on(transport, &cut, dtype, data)?;
                return Ok(self.pending(on));
            }
            let Some(Step { round, action }) = step else {
                let on = match self.send_on(transport, &cut, dtype, data)? {
                    Some(on) => Some(on),
                    None => self.settle(transport)?,
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
                    let into = Into { cut: &cut, chunks, how, dtype, data, output };
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
                    self.fold(&cut, chunks, dtype, data);
                }
                Action::Emit { chunks } => ranges(&cut, chunks, size)
                    .for_each(|range| output[range.clone()].copy_from_slice(&data[range])),
                Action::Lend { to, chunks } => {
                    let bytes: Vec<&[u8]> =
                        ranges(&cut, chunks, size).map(|range| &data[range]).collect();
                    let peer = self.members[to as usize];
                    match transport.lend(peer, &header, &bytes)? {
                        Some(Lending::InPlace) => self.round.lent.push(peer),
                        Some(Lending::Copied) => {}
                        None => return Err(self.no_shared_memory(transport)),
                    }
                }
                Action::Read { from, chunks, how } => {
                    let peer = self.members[from as usize];
                    if !transport.shares_memory() {
                        return Err(self.no_shared_memory(transport));
                    }
                    let Some((found, lent)) = transport.try_borrow(peer, self.tag)? else {
                        return Ok(self.pending(peer));
                    };
                    let into = Into { cut: &cut, chunks, how, dtype, data, output };
                    self.read(transport.rank(), &header, (from, &found, lent), into)?;
                }
            }
            self.next += 1;
        }
    }

    /// Goes over to reading, before anything has been said, if all members share memory: what one
    /// member finds here all others find.
    fn read_if_possible(&mut self, transport: &dyn Transport) -> Result<(), CommError> {
        if transport.shares_memory() && are_neighbours(&self.members, transport) {
            let CollectiveSpec { kind, order, root, .. } = self.spec;
            let ranks = self.members.len() as u32;
            self.pattern = Pattern::new(kind, Algorithm::ReadReduce, order, ranks, root)?;
            self.spec.algorithm = Algorithm::ReadReduce;
            (self.steps, self.pieces) = (self.pattern.steps(self.me), 1);
        }
        Ok(())
    }

    fn pending(&self, on: Rank) -> Progress {
        Progress::Pending { on, step: self.next, moved: self.moved }
    }

    /// Takes in what a rank has lent.
    fn read(
        &mut self,
        rank: Rank,
        header: &Header,
        (from, found, lent): (u32, &Header, Lent),
        into: Into<'_>,
    ) -> Result<(), CommError> {
        let Into { cut, chunks, how, dtype, data, output } = into;
        let (peer, size) = (self.members[from as usize], dtype.size());
        header.check(rank, peer, found)?;
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
        Ok(())
    }

    fn no_shared_memory(&self, transport: &dyn Transport) -> CommError {
        CommError::NoSharedMemory { rank: transport.rank(), algorithm: self.spec.algorithm }
    }

    /// Says that what was read in place is done with, and waits for the same from all readers; the
    /// one that is missing, if one is.
    fn end_round(
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
            let taken =
                transport.try_take(peer, self.tag, &mut |found: &Header, _: Piece<'_>| {
                    header.check(rank, peer, found)
                })?;
            if taken != Taken::Whole {
                return Ok(Some(peer));
            }
            self.round.lent.pop();
        }
        Ok(None)
    }

    /// Takes in what there is of a message; whether that was the end of it.
    fn receive(
        &mut self,
        transport: &mut dyn Transport,
        header: &Header,
        peer: Rank,
        into: Into<'_>,
    ) -> Result<bool, CommError> {
        let (rank, tag, reduction) = (transport.rank(), self.tag, self.spec.reduction);
        let Self { arriving, moved, .. } = self;
        let mut incoming = Incoming { rank, peer, header, reduction, into, arriving, moved };
        Ok(transport.try_take(peer, tag, &mut incoming)? == Taken::Whole)
    }

    /// Reduces everything held for these chunks, and the rank's own, in the members' order.
    fn fold(&mut self, cut: &Cut, chunks: Chunks, dtype: DType, data: &mut [u8]) {
        let mut held: Vec<_> = self.held.extract_if(.., |(_, of, _)| *of == chunks).collect();
        held.sort_unstable_by_key(|(from, ..)| *from);
        let before = held.partition_point(|(from, ..)| *from < self.me);
        let pieces: Vec<_> = held.iter().map(|(_, _, lent)| lent.pieces()).collect();
        let mut cursors: Vec<_> = pieces.iter().map(|pieces| Cursor::new(pieces)).collect();
        for range in ranges(cut, chunks, dtype.size() as usize) {
            let mut own = &mut data[range];
            while !own.is_empty() {
                let ahead = cursors.iter().map(Cursor::ahead).min().unwrap_or(own.len());
                let (part, rest) = own.split_at_mut(ahead.min(own.len()));
                let others: Vec<_> = cursors.iter_mut().map(|c| c.take(part.len())).collect();
                let all = Contributions { others: &others, before };
                all.fold_into(dtype, self.spec.reduction, part);
                own = rest;
            }
        }
        drop(pieces);
        for (_, _, lent) in held {
            if let Lent::Copied(mut message) = lent {
                message.clear();
                self.spare.push(message);
            }
        }
    }

    /// Refuses buffers that do not suit, and gives the output buffer, empty for kinds without one.
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
        let problem = match (kind == CollectiveKind::AllToAll, output) {
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
            (true, _) if !elements.is_multiple_of(ranks) => {
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

    /// Makes the steps those of as many pieces as suit a vector of so many bytes.
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

    fn cut(&self, elements: usize) -> Cut {
        let block = match self.spec.kind {
            CollectiveKind::AllToAll => 1,
            _ => self.spec.block,
        };
        Cut { elements: elements as u64, chunks: self.pattern.chunks(), block }
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

/// Runs a collective of f32 elements to its end, giving up on a member that is silent for as long
/// as `patience`.
pub fn run(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    members: &[Rank],
    tag: Tag,
    data: &mut [f32],
    output: Option<&mut [f32]>,
    patience: Duration,
) -> Result<(), CommError> {
    let data = bytemuck::cast_slice_mut(data);
    let output = output.map(bytemuck::cast_slice_mut);
    run_bytes(transport, spec, members, tag, (DType::F32, data), output, patience)
}

/// As [`run`], for elements of any type.
pub fn run_bytes(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    members: &[Rank],
    tag: Tag,
    (dtype, data): (DType, &mut [u8]),
    mut output: Option<&mut [u8]>,
    patience: Duration,
) -> Result<(), CommError> {
    let mut running = Running::start(spec, members, transport.rank(), tag)?;
    finish(transport, patience, |transport| {
        running.progress_bytes(transport, dtype, data, output.as_deref_mut())
    })
}

/// Whether all of these ranks, of which this is one, share memory.
fn are_neighbours<'r>(
    members: impl IntoIterator<Item = &'r Rank>,
    transport: &dyn Transport,
) -> bool {
    let own = transport.rank();
    members.into_iter().all(|&rank| rank == own || transport.is_neighbour(rank))
}

/// Whether reading may take the place of the steps asked for: the choice is left open, and there is only
/// one order to sum in. Whoever broadcasts, gathers or reduces to one rank may go before the others are
/// done, which a lender may not.
fn may_read(asked: &CollectiveSpec) -> bool {
    let kind = matches!(
        asked.kind,
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather | CollectiveKind::AllToAll
    );
    let open = asked.algorithm == Algorithm::Auto;
    kind && open && (asked.order == Order::Canonical || !asked.kind.reduces())
}

/// What is under way between ranks that read each other's memory.
#[derive(Debug, Default)]
struct Round {
    number: u32,
    /// Whose memory was read in place.
    read: Vec<Rank>,
    /// Who reads ours and has not said that it is done.
    lent: Vec<Rank>,
}

/// What is to become of a message.
struct Into<'a> {
    cut: &'a Cut,
    chunks: Chunks,
    how: Combine,
    dtype: DType,
    data: &'a mut [u8],
    output: &'a mut [u8],
}

/// Where several chunks of elements of so many bytes lie in a buffer.
fn ranges(cut: &Cut, chunks: Chunks, size: usize) -> impl Iterator<Item = Range<usize>> {
    cut.ranges(chunks).map(move |range| range.start as usize * size..range.end as usize * size)
}
