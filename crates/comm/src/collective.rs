//! Collectives in flight: the steps of `paceline-plan`, interpreted on a transport.

use crate::arithmetic::{Contributions, reduce_into};
use crate::error::CommError;
use crate::transport::{Header, Payload, Progress, Purpose, Tag, Transport, finish};
use paceline_plan::collective::{
    Action, Algorithm, Chunks, CollectiveKind, Combine, Cut, Order, Pattern, Reduction, Step,
};
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::time::Duration;

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
#[derive(Debug)]
pub struct Running {
    spec: CollectiveSpec,
    members: Vec<Rank>,
    me: u32,
    tag: Tag,
    chunks: u32,
    steps: Vec<Step>,
    next: usize,
    /// Contributions set aside for a canonical sum, with their contributors.
    held: Vec<(u32, Chunks, Vec<f32>)>,
    /// Elements of the vector, once the first call has shown it.
    elements: Option<usize>,
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
            chunks: pattern.chunks(),
            steps: pattern.steps(index),
            next: 0,
            held: Vec::new(),
            elements: None,
            is_barrier: false,
        })
    }

    /// As [`start`](Self::start), for a collective of nothing whose messages say that it is a
    /// barrier. Halving-doubling makes every rank wait for word from every other.
    pub(crate) fn barrier(members: &[Rank], me: Rank, tag: Tag) -> Result<Self, CommError> {
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::HalvingDoubling,
            order: Order::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        Ok(Self { is_barrier: true, ..Self::start(&spec, members, me, tag)? })
    }

    /// Makes the same collective ready to run again, on a vector of any size, without working its
    /// steps out anew.
    pub fn restart(&mut self, tag: Tag) {
        self.tag = tag;
        self.next = 0;
        self.held.clear();
        self.elements = None;
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
        let output = self.check_buffers(transport.rank(), data, output)?;
        let cut = self.cut(data.len());
        while let Some(&Step { round, action }) = self.steps.get(self.next) {
            let header = self.header(round, data.len());
            match action {
                Action::Send { to, chunks } => {
                    let mut buffer = transport.take_buffer(cut.elements_in(chunks) as usize);
                    ranges(&cut, chunks).for_each(|range| buffer.extend_from_slice(&data[range]));
                    let payload = Payload { header, data: buffer };
                    transport.send(self.members[to as usize], self.tag, payload)?;
                }
                Action::Recv { from, chunks, how } => {
                    let elements = cut.elements_in(chunks);
                    let Some(message) = self.receive(transport, &header, from, elements)? else {
                        let on = self.members[from as usize];
                        return Ok(Progress::Pending { on, step: self.next });
                    };
                    match how {
                        Combine::Replace => unpack(&cut, chunks, &message, data),
                        Combine::Output => unpack(&cut, chunks, &message, output),
                        Combine::Reduce => {
                            for (at, piece) in pieces(&cut, chunks, &message) {
                                reduce_into(self.spec.reduction, &mut data[at], piece);
                            }
                        }
                        Combine::Hold => {
                            self.held.push((from, chunks, message));
                            self.next += 1;
                            continue;
                        }
                    }
                    transport.recycle(message);
                }
                Action::Fold { chunks } => self.fold(transport, &cut, chunks, data),
                Action::Emit { chunks } => ranges(&cut, chunks)
                    .for_each(|range| output[range.clone()].copy_from_slice(&data[range])),
            }
            self.next += 1;
        }
        Ok(Progress::Done)
    }

    /// The next message from a member, if it is there and what is expected.
    fn receive(
        &self,
        transport: &mut dyn Transport,
        header: &Header,
        from: u32,
        expected: u64,
    ) -> Result<Option<Vec<f32>>, CommError> {
        let (rank, peer) = (transport.rank(), self.members[from as usize]);
        let Some(payload) = transport.try_recv(peer, self.tag)? else { return Ok(None) };
        header.check(rank, peer, &payload.header)?;
        let found = payload.data.len() as u64;
        if found != expected {
            return Err(CommError::Length { rank, peer, expected, found });
        }
        Ok(Some(payload.data))
    }

    /// Reduces everything held for these chunks, and the rank's own, in the members' order.
    fn fold(&mut self, transport: &mut dyn Transport, cut: &Cut, chunks: Chunks, data: &mut [f32]) {
        let mut held: Vec<_> = self.held.extract_if(.., |(_, of, _)| *of == chunks).collect();
        held.sort_unstable_by_key(|(from, ..)| *from);
        let before = held.partition_point(|(from, ..)| *from < self.me);
        let mut others: Vec<_> = held.into_iter().map(|(_, _, message)| message).collect();
        let mut contributions = Contributions { others: &mut others, before };
        let mut at = 0;
        for range in ranges(cut, chunks) {
            let length = range.len();
            contributions.fold_into(self.spec.reduction, &mut data[range], at);
            at += length;
        }
        others.into_iter().for_each(|message| transport.recycle(message));
    }

    /// Refuses buffers that do not suit, and gives the output buffer, empty for kinds without one.
    fn check_buffers<'a>(
        &mut self,
        rank: Rank,
        data: &[f32],
        output: Option<&'a mut [f32]>,
    ) -> Result<&'a mut [f32], CommError> {
        if self.members[self.me as usize] != rank {
            return Err(CommError::NotAMember { rank, members: self.members.clone() });
        }
        let (kind, elements, ranks) = (self.spec.kind, data.len(), self.members.len());
        let problem = match (kind == CollectiveKind::AllToAll, output) {
            _ if *self.elements.get_or_insert(elements) != elements => {
                let before = self.elements.unwrap_or_default();
                format!("the vector had {before} elements and now has {elements}")
            }
            (true, _) if !elements.is_multiple_of(ranks) => {
                format!("{elements} elements are not {ranks} equal parts")
            }
            (true, None) => "an output buffer is needed".to_owned(),
            (true, Some(output)) if output.len() != elements => {
                let found = output.len();
                format!("the output buffer has {found} elements instead of {elements}")
            }
            (false, Some(_)) => "works in place and takes no output buffer".to_owned(),
            (true, Some(output)) => return Ok(output),
            (false, None) => return Ok(&mut []),
        };
        Err(CommError::Buffers { rank, kind: kind.name(), problem })
    }

    fn cut(&self, elements: usize) -> Cut {
        let block = match self.spec.kind {
            CollectiveKind::AllToAll => 1,
            _ => self.spec.block,
        };
        Cut { elements: elements as u64, chunks: self.chunks, block }
    }

    fn header(&self, round: u32, elements: usize) -> Header {
        let ranks = self.members.len() as u32;
        let purpose = if self.is_barrier {
            Purpose::Barrier { ranks }
        } else {
            Purpose::Collective { spec: self.spec, ranks, elements: elements as u64 }
        };
        Header { tag: self.tag, purpose, round }
    }
}

/// Runs a collective to its end, giving up on a member that is silent for as long as `patience`.
pub fn run(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    members: &[Rank],
    tag: Tag,
    data: &mut [f32],
    mut output: Option<&mut [f32]>,
    patience: Duration,
) -> Result<(), CommError> {
    let mut running = Running::start(spec, members, transport.rank(), tag)?;
    finish(transport, patience, |transport| {
        running.progress(transport, data, output.as_deref_mut())
    })
}

/// Where several chunks lie in a buffer.
fn ranges(cut: &Cut, chunks: Chunks) -> impl Iterator<Item = Range<usize>> {
    cut.ranges(chunks).map(|range| range.start as usize..range.end as usize)
}

/// Copies a message to where its chunks lie in a buffer.
fn unpack(cut: &Cut, chunks: Chunks, message: &[f32], into: &mut [f32]) {
    for (at, piece) in pieces(cut, chunks, message) {
        into[at].copy_from_slice(piece);
    }
}

/// Where several chunks lie in a buffer, each with its stretch of the message that carries them.
fn pieces<'m>(
    cut: &Cut,
    chunks: Chunks,
    mut message: &'m [f32],
) -> impl Iterator<Item = (Range<usize>, &'m [f32])> {
    ranges(cut, chunks).map(move |range| {
        let (piece, rest) = message.split_at(range.len());
        message = rest;
        (range, piece)
    })
}
