//! Proves the steps of a whole group right by running them on symbols instead of numbers.
//!
//! A chunk's value is either one rank's contribution or the sum of two values, so a wrong, missing
//! or repeated contribution cannot hide behind a lucky number, and the exact tree of a canonical sum
//! can be compared. Sums are commutative here as floating-point addition is, but not associative.

use super::{Action, Chunks, CollectiveKind, Combine, Order, Pattern, Step, canonical_fold};
use std::collections::BTreeMap;
use thiserror::Error;

/// Checks that a pattern follows the module's rules of memory, execution and matching, and that it
/// leaves every rank with what its kind promises, every contribution counted exactly once.
pub fn check(pattern: &Pattern) -> Result<(), Violation> {
    let steps: Vec<_> = (0..pattern.ranks()).map(|me| pattern.steps(me)).collect();
    check_steps(pattern, &steps)
}

/// As [`check`], for steps that come from elsewhere: `steps[i]` are those of rank *i*.
pub fn check_steps(pattern: &Pattern, steps: &[Vec<Step>]) -> Result<(), Violation> {
    check_lists(steps)?;
    let mut group = Group::new(pattern, steps);
    while group.run_round()? {}
    group.check_result()
}

/// What is wrong with the steps of a group, and where.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("rank {rank}, round {round}: {problem}")]
pub struct Violation {
    /// The rank at which it shows, counted within the group.
    pub rank: u32,
    /// The round in which it shows; for a wrong result, the last one.
    pub round: u32,
    /// What it is.
    pub problem: Problem,
}

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// A step of an earlier round follows one of a later round.
    #[error("a step of an earlier round comes after one of a later round")]
    RoundDecreases,
    /// Within one round a receive stands before a send.
    #[error("a send stands after a receive of the same round")]
    SendAfterReceive,
    /// A step names a rank that is not in the group, or the rank itself.
    #[error("{0} is not another rank of the group")]
    NotAPeer(u32),
    /// A step names a chunk that does not exist.
    #[error("there is no chunk {0}")]
    NoSuchChunk(u64),
    /// Two messages go from one rank to another in one round.
    #[error("a second message to rank {0}")]
    SecondMessage(u32),
    /// Nobody receives a message in the round in which it is sent.
    #[error("the message to rank {0} is not received")]
    NotReceived(u32),
    /// Nobody sends a message in the round in which it is expected.
    #[error("no message from rank {0}")]
    NotSent(u32),
    /// Sender and receiver mean different chunks.
    #[error("the message from rank {0} carries other chunks than expected")]
    OtherChunks(u32),
    /// A chunk is used that holds nothing yet.
    #[error("chunk {0} is used before anything was put there")]
    NotValid(u32),
    /// A contribution was held and never summed.
    #[error("the contribution of rank {0} is held and never summed")]
    StillHeld(u32),
    /// A chunk does not end as the kind promises.
    #[error("chunk {chunk} ends as {found}, which is not {wanted}")]
    Wrong {
        /// The chunk.
        chunk: u32,
        /// Its value, contributions written as `rank.chunk`.
        found: String,
        /// What it should have been.
        wanted: String,
    },
}

/// Checks the rules that one rank's list can break by itself.
fn check_lists(steps: &[Vec<Step>]) -> Result<(), Violation> {
    for (rank, steps) in (0..).zip(steps) {
        let (mut round, mut received) = (0, false);
        for step in steps {
            let broken = |problem| Err(Violation { rank, round: step.round, problem });
            if step.round < round {
                return broken(Problem::RoundDecreases);
            }
            received &= step.round == round;
            round = step.round;
            match step.action {
                Action::Send { .. } if received => return broken(Problem::SendAfterReceive),
                Action::Recv { .. } => received = true,
                Action::Send { .. } | Action::Fold { .. } | Action::Emit { .. } => {}
            }
        }
    }
    Ok(())
}

/// One contribution, or the sum of two values with the lower number first: sums commute.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    Leaf { rank: u32, chunk: u32 },
    Sum(ValueId, ValueId),
}

/// Equal values have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ValueId(usize);

#[derive(Default)]
struct Values {
    values: Vec<Value>,
    ids: BTreeMap<Value, ValueId>,
}

impl Values {
    fn id(&mut self, value: Value) -> ValueId {
        let next = ValueId(self.values.len());
        *self.ids.entry(value).or_insert_with(|| {
            self.values.push(value);
            next
        })
    }

    fn leaf(&mut self, rank: u32, chunk: u32) -> ValueId {
        self.id(Value::Leaf { rank, chunk })
    }

    fn sum(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.id(Value::Sum(a.min(b), a.max(b)))
    }

    /// The contributions to a value, in order, at most `limit`: a value that repeats them without
    /// end is wrong long before it is counted.
    fn leaves(&self, id: ValueId, limit: usize) -> Vec<(u32, u32)> {
        let (mut leaves, mut open) = (Vec::new(), vec![id]);
        while let Some(id) = open.pop() {
            if leaves.len() == limit {
                break;
            }
            match self.values[id.0] {
                Value::Leaf { rank, chunk } => leaves.push((rank, chunk)),
                Value::Sum(a, b) => open.extend([a, b]),
            }
        }
        leaves.sort_unstable();
        leaves
    }

    /// The value as text, as deep as a person would read.
    fn text(&self, id: ValueId, depth: u32) -> String {
        match self.values[id.0] {
            Value::Leaf { rank, chunk } => format!("{rank}.{chunk}"),
            Value::Sum(..) if depth == 0 => "…".to_owned(),
            Value::Sum(a, b) => {
                format!("({}+{})", self.text(a, depth - 1), self.text(b, depth - 1))
            }
        }
    }
}

/// What one rank holds. `None` stands for anything at all.
struct Memory {
    work: Vec<Option<ValueId>>,
    output: Vec<Option<ValueId>>,
    held: Vec<(u32, Chunks, Vec<ValueId>)>,
}

/// A group in the middle of its collective.
struct Group<'a> {
    pattern: &'a Pattern,
    /// What is left of every rank's steps.
    rest: Vec<&'a [Step]>,
    memories: Vec<Memory>,
    /// Messages of the round at hand, by sender and receiver.
    messages: BTreeMap<(u32, u32), (Chunks, Vec<ValueId>)>,
    values: Values,
    round: u32,
}

impl<'a> Group<'a> {
    fn new(pattern: &'a Pattern, steps: &'a [Vec<Step>]) -> Self {
        let (kind, chunks) = (pattern.kind(), pattern.chunks());
        let mut values = Values::default();
        let memories = (0..pattern.ranks()).map(|rank| Memory {
            work: (0..chunks)
                .map(|chunk| {
                    let valid = match kind {
                        CollectiveKind::AllReduce
                        | CollectiveKind::ReduceScatter
                        | CollectiveKind::Reduce
                        | CollectiveKind::AllToAll => true,
                        CollectiveKind::AllGather | CollectiveKind::Gather => rank == chunk,
                        CollectiveKind::Broadcast => rank == pattern.root(),
                    };
                    valid.then(|| values.leaf(rank, chunk))
                })
                .collect(),
            output: vec![None; chunks as usize],
            held: Vec::new(),
        });
        let memories = memories.collect();
        let rest = steps.iter().map(Vec::as_slice).collect();
        Self { pattern, rest, memories, messages: BTreeMap::new(), values, round: 0 }
    }

    /// Runs the next round that anyone has steps in; false if nobody has.
    fn run_round(&mut self) -> Result<bool, Violation> {
        let heads = self.rest.iter().filter_map(|steps| steps.first());
        let Some(round) = heads.map(|step| step.round).min() else { return Ok(false) };
        self.round = round;
        let ranks = self.rest.len() as u32;
        for rank in 0..ranks {
            while let Some(step) = self.take(rank, |action| !matches!(action, Action::Recv { .. }))
            {
                self.carry_out(rank, step)?;
            }
        }
        for rank in 0..ranks {
            while let Some(step) = self.take(rank, |_| true) {
                self.carry_out(rank, step)?;
            }
        }
        match self.messages.keys().next() {
            Some(&(from, to)) => Err(self.violation(from, Problem::NotReceived(to))),
            None => Ok(true),
        }
    }

    /// A rank's next step, if it belongs to this round and passes.
    fn take(&mut self, rank: u32, passes: impl Fn(&Action) -> bool) -> Option<Action> {
        let steps = &mut self.rest[rank as usize];
        let (first, rest) = steps.split_first()?;
        (first.round == self.round && passes(&first.action)).then(|| {
            *steps = rest;
            first.action
        })
    }

    fn carry_out(&mut self, me: u32, action: Action) -> Result<(), Violation> {
        match action {
            Action::Send { to, chunks } => {
                self.check_peer(me, to)?;
                let values = self.read(me, chunks)?;
                if self.messages.insert((me, to), (chunks, values)).is_some() {
                    return Err(self.violation(me, Problem::SecondMessage(to)));
                }
            }
            Action::Recv { from, chunks, how } => {
                self.check_peer(me, from)?;
                self.check_chunks(me, chunks)?;
                let Some((sent, values)) = self.messages.remove(&(from, me)) else {
                    return Err(self.violation(me, Problem::NotSent(from)));
                };
                // all_to_all moves a part to another place; its parts all have the same size.
                let same = match how {
                    Combine::Output => sent.count == chunks.count,
                    Combine::Replace | Combine::Reduce | Combine::Hold => sent == chunks,
                };
                if !same {
                    return Err(self.violation(me, Problem::OtherChunks(from)));
                }
                self.receive(me, from, chunks, how, values)?;
            }
            Action::Fold { chunks } => self.fold(me, chunks)?,
            Action::Emit { chunks } => {
                let values = self.read(me, chunks)?;
                self.receive(me, me, chunks, Combine::Output, values)?;
            }
        }
        Ok(())
    }

    fn receive(
        &mut self,
        me: u32,
        from: u32,
        chunks: Chunks,
        how: Combine,
        mut values: Vec<ValueId>,
    ) -> Result<(), Violation> {
        if how == Combine::Reduce {
            for (value, own) in values.iter_mut().zip(self.read(me, chunks)?) {
                *value = self.values.sum(*value, own);
            }
        }
        let memory = &mut self.memories[me as usize];
        let buffer = match how {
            Combine::Hold => {
                memory.held.push((from, chunks, values));
                return Ok(());
            }
            Combine::Output => &mut memory.output,
            Combine::Replace | Combine::Reduce => &mut memory.work,
        };
        for (chunk, value) in chunks.iter().zip(values) {
            buffer[chunk as usize] = Some(value);
        }
        Ok(())
    }

    fn fold(&mut self, me: u32, chunks: Chunks) -> Result<(), Violation> {
        let own = self.read(me, chunks)?;
        let held = &mut self.memories[me as usize].held;
        let mut parts: Vec<_> =
            held.extract_if(.., |(_, of, _)| *of == chunks).map(|(from, _, v)| (from, v)).collect();
        parts.push((me, own));
        parts.sort_by_key(|(from, _)| *from);
        for (i, chunk) in chunks.iter().enumerate() {
            let column = parts.iter().map(|(_, values)| values[i]);
            let sum = canonical_fold(column, |a, b| self.values.sum(a, b));
            self.memories[me as usize].work[chunk as usize] = sum;
        }
        Ok(())
    }

    /// The values of chunks that are all valid.
    fn read(&self, me: u32, chunks: Chunks) -> Result<Vec<ValueId>, Violation> {
        self.check_chunks(me, chunks)?;
        let work = &self.memories[me as usize].work;
        chunks
            .iter()
            .map(|c| work[c as usize].ok_or_else(|| self.violation(me, Problem::NotValid(c))))
            .collect()
    }

    fn check_peer(&self, me: u32, peer: u32) -> Result<(), Violation> {
        if peer == me || peer >= self.pattern.ranks() {
            return Err(self.violation(me, Problem::NotAPeer(peer)));
        }
        Ok(())
    }

    fn check_chunks(&self, me: u32, chunks: Chunks) -> Result<(), Violation> {
        let Chunks { first, count, stride } = chunks;
        let last = u64::from(first) + u64::from(count.saturating_sub(1)) * u64::from(stride);
        if count > 0 && last >= u64::from(self.pattern.chunks()) {
            return Err(self.violation(me, Problem::NoSuchChunk(last)));
        }
        Ok(())
    }

    /// Compares what every rank has in the end with what the kind promises.
    fn check_result(&mut self) -> Result<(), Violation> {
        let (kind, root) = (self.pattern.kind(), self.pattern.root());
        for me in 0..self.pattern.ranks() {
            if let Some((from, ..)) = self.memories[me as usize].held.first() {
                return Err(self.violation(me, Problem::StillHeld(*from)));
            }
            for chunk in 0..self.pattern.chunks() {
                match kind {
                    CollectiveKind::AllReduce => self.check_sum(me, chunk)?,
                    CollectiveKind::ReduceScatter if me == chunk => self.check_sum(me, chunk)?,
                    CollectiveKind::Reduce if me == root => self.check_sum(me, chunk)?,
                    CollectiveKind::AllGather => self.check_leaf(me, chunk, (chunk, chunk))?,
                    CollectiveKind::Gather if me == root => {
                        self.check_leaf(me, chunk, (chunk, chunk))?;
                    }
                    CollectiveKind::Broadcast => self.check_leaf(me, chunk, (root, chunk))?,
                    CollectiveKind::AllToAll => self.check_leaf(me, chunk, (chunk, me))?,
                    CollectiveKind::ReduceScatter
                    | CollectiveKind::Reduce
                    | CollectiveKind::Gather => {}
                }
            }
        }
        Ok(())
    }

    fn check_leaf(&mut self, me: u32, chunk: u32, leaf: (u32, u32)) -> Result<(), Violation> {
        let wanted = self.values.leaf(leaf.0, leaf.1);
        let memory = &self.memories[me as usize];
        let found = match self.pattern.kind() {
            CollectiveKind::AllToAll => memory.output[chunk as usize],
            _ => memory.work[chunk as usize],
        };
        if found == Some(wanted) {
            return Ok(());
        }
        Err(self.wrong(me, chunk, found, self.values.text(wanted, 1)))
    }

    fn check_sum(&mut self, me: u32, chunk: u32) -> Result<(), Violation> {
        let ranks = self.pattern.ranks();
        let found = self.memories[me as usize].work[chunk as usize];
        match self.pattern.order() {
            Order::Canonical => {
                let leaves: Vec<_> = (0..ranks).map(|rank| self.values.leaf(rank, chunk)).collect();
                let wanted = canonical_fold(leaves, |a, b| self.values.sum(a, b));
                if found != wanted {
                    let wanted = wanted.map(|id| self.values.text(id, 6)).unwrap_or_default();
                    return Err(self.wrong(me, chunk, found, wanted));
                }
            }
            Order::Free => {
                let leaves = found.map(|id| self.values.leaves(id, ranks as usize + 1));
                if !leaves
                    .is_some_and(|leaves| leaves.into_iter().eq((0..ranks).map(|r| (r, chunk))))
                {
                    let wanted = format!("the sum of chunk {chunk} of all {ranks} ranks");
                    return Err(self.wrong(me, chunk, found, wanted));
                }
            }
        }
        Ok(())
    }

    fn wrong(&self, me: u32, chunk: u32, found: Option<ValueId>, wanted: String) -> Violation {
        let found = found.map_or_else(|| "nothing".to_owned(), |id| self.values.text(id, 6));
        self.violation(me, Problem::Wrong { chunk, found, wanted })
    }

    fn violation(&self, rank: u32, problem: Problem) -> Violation {
        Violation { rank, round: self.round, problem }
    }
}
