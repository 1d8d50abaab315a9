//! Proves the steps of a whole group correct by executing them on symbols instead of numbers.
//!
//! A chunk's value is either one rank's contribution or the sum of two values. A wrong, missing or
//! repeated contribution therefore cannot be masked by coincidental numbers, and the exact tree of
//! a canonical sum can be compared. As in floating point, sums are commutative but not associative.

use super::{
    Action, Chunks, CollectiveKind, Combine, Pattern, Peers, Step, SummationOrder, canonical_fold,
    gcd,
};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

/// Checks that a pattern follows the module's rules of memory, execution and matching. Also checks
/// that every rank ends with the result of its kind, each contribution counted exactly once.
pub fn check(pattern: &Pattern) -> Result<(), Violation> {
    let steps: Vec<_> = (0..pattern.ranks()).map(|me| pattern.steps(me)).collect();
    check_steps(pattern, &steps)
}

/// Like [`check`], for steps from another source: `steps[i]` are those of rank *i*.
pub fn check_steps(pattern: &Pattern, steps: &[Vec<Step>]) -> Result<(), Violation> {
    check_lists(steps)?;
    let mut group = Group::new(pattern, steps);
    while group.run_round()? {}
    group.check_result()
}

/// A broken rule in the steps of a group, and its location.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("rank {rank}, round {round}: {problem}")]
pub struct Violation {
    /// Rank at which it occurs, as an index within the group.
    pub rank: u32,
    /// Round in which it occurs; for a wrong result, the last one.
    pub round: u32,
    /// The broken rule.
    pub problem: Problem,
}

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    /// A step of an earlier round follows one of a later round.
    #[error("a step of an earlier round comes after one of a later round")]
    RoundDecreases,
    /// Within one round a receive or read precedes a send or loan.
    #[error("a send stands after a receive of the same round")]
    SendAfterReceive,
    /// A step names a rank that is not in the group, or the rank itself.
    #[error("{0} is not another rank of the group")]
    NotAPeer(u32),
    /// A step names a chunk that does not exist.
    #[error("there is no chunk {0}")]
    NoSuchChunk(u64),
    /// Two messages or loans are sent from one rank to another in one round.
    #[error("a second message to rank {0}")]
    SecondMessage(u32),
    /// A message or loan is not received or read in the round in which it is sent or lent.
    #[error("the message to rank {0} is not received")]
    NotReceived(u32),
    /// No message is sent in the round in which it is expected.
    #[error("no message from rank {0}")]
    NotSent(u32),
    /// Nothing is lent in the round in which it is read.
    #[error("nothing to read is lent by rank {0}")]
    NotLent(u32),
    /// A rank writes to a peer's chunks that it has not folded in the round before.
    #[error("what is written to rank {0} was not folded in the round before")]
    NotFolded(u32),
    /// A rank writes to a peer's chunks that other ranks may be reading.
    #[error("what is written to rank {0} is lent to other ranks as well")]
    LentToOthers(u32),
    /// A round of writes holds another step.
    #[error("a step other than a write stands in a round of writes")]
    AmongWrites,
    /// A rank writes to a chunk that a peer may be reading.
    #[error("chunk {0} is written in the round in which it is lent")]
    WrittenWhileLent(u32),
    /// Sender and receiver name different chunks.
    #[error("the message from rank {0} carries other chunks than expected")]
    OtherChunks(u32),
    /// A chunk is used before it is valid.
    #[error("chunk {0} is used before anything was put there")]
    NotValid(u32),
    /// A contribution was held and never summed.
    #[error("the contribution of rank {0} is held and never summed")]
    StillHeld(u32),
    /// The final value of a chunk is not that of the kind.
    #[error("chunk {chunk} ends as {found}, which is not {wanted}")]
    Wrong {
        /// The chunk.
        chunk: u32,
        /// Its value, contributions written as `rank.chunk`.
        found: String,
        /// Expected value.
        wanted: String,
    },
}

/// Checks the rules that concern one rank's list alone.
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
                Action::Send { .. } | Action::Lend { .. } | Action::Offer { .. } if received => {
                    return broken(Problem::SendAfterReceive);
                }
                Action::Recv { .. } | Action::Read { .. } | Action::Take { .. } => received = true,
                Action::Send { .. }
                | Action::Lend { .. }
                | Action::Offer { .. }
                | Action::Fold { .. }
                | Action::Emit { .. }
                | Action::Write { .. } => {}
            }
        }
    }
    Ok(())
}

/// One contribution, or the sum of two values with the lower number first: sums commute.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    Leaf { rank: u32, cell: u32 },
    Sum(ValueId, ValueId),
}

/// Index of a value; equal values have equal indices.
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

    fn leaf(&mut self, rank: u32, cell: u32) -> ValueId {
        self.id(Value::Leaf { rank, cell })
    }

    fn sum(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.id(Value::Sum(a.min(b), a.max(b)))
    }

    /// Contributions to a value, in order, at most `limit`: a value with more contributions is
    /// wrong in any case.
    fn leaves(&self, id: ValueId, limit: usize) -> Vec<(u32, u32)> {
        let (mut leaves, mut open) = (Vec::new(), vec![id]);
        while let Some(id) = open.pop() {
            if leaves.len() == limit {
                break;
            }
            match self.values[id.0] {
                Value::Leaf { rank, cell } => leaves.push((rank, cell)),
                Value::Sum(a, b) => open.extend([a, b]),
            }
        }
        leaves.sort_unstable();
        leaves
    }

    /// The value as text, down to a readable `depth`.
    fn text(&self, id: ValueId, depth: u32, grain: u32) -> String {
        match self.values[id.0] {
            Value::Leaf { rank, cell } => format!("{rank}.{}", cell / grain),
            Value::Sum(..) if depth == 0 => "…".to_owned(),
            Value::Sum(a, b) => {
                let text = |id| self.text(id, depth - 1, grain);
                format!("({}+{})", text(a), text(b))
            }
        }
    }
}

/// Memory of one rank, by cell. `None` is an unspecified value.
struct Memory {
    work: Vec<Option<ValueId>>,
    output: Vec<Option<ValueId>>,
    held: Vec<(u32, Chunks, Vec<ValueId>)>,
    /// Cells that peers may be reading in the current round.
    lent: BTreeSet<u32>,
    /// Ranks whose contributions are held in lent memory, until the end of the round.
    held_where_lent: BTreeSet<u32>,
    /// Chunks lent to each rank in the current round.
    loans: BTreeMap<u32, Chunks>,
    /// Chunks that this rank has folded in the current round.
    folded: Vec<Chunks>,
}

/// Message or loan in flight between two ranks in the current round.
struct Message {
    lent: bool,
    chunks: Chunks,
    values: Vec<ValueId>,
}

/// State of a group during its collective.
struct Group<'a> {
    pattern: &'a Pattern,
    /// Number of cells per chunk, chosen so that every piece consists of whole cells.
    grain: u32,
    /// Remaining steps of every rank.
    rest: Vec<&'a [Step]>,
    memories: Vec<Memory>,
    /// Messages of the current round, by sender and receiver.
    messages: BTreeMap<(u32, u32), Message>,
    /// Offers to switches in the current round, by cell, with the offering rank.
    offers: BTreeMap<(Peers, u32), Vec<(u32, ValueId)>>,
    /// Switches from which a rank has taken a sum in the current round.
    taken: BTreeSet<Peers>,
    values: Values,
    round: u32,
    /// True in a round of writes.
    writing: bool,
}

impl<'a> Group<'a> {
    fn new(pattern: &'a Pattern, steps: &'a [Vec<Step>]) -> Self {
        let kind = pattern.kind();
        let all = steps.iter().flatten().map(|step| step.action.chunks().pieces.max(1));
        let grain = all.fold(1, |grain, pieces| grain / gcd(grain, pieces) * pieces);
        let cells = pattern.chunks() * grain;
        let mut values = Values::default();
        let memories = (0..pattern.ranks()).map(|rank| Memory {
            work: (0..cells)
                .map(|cell| {
                    let chunk = cell / grain;
                    let valid = match kind {
                        CollectiveKind::AllReduce
                        | CollectiveKind::ReduceScatter
                        | CollectiveKind::Reduce
                        | CollectiveKind::AllToAll
                        | CollectiveKind::SendRecv
                        | CollectiveKind::Barrier => true,
                        CollectiveKind::AllGather | CollectiveKind::Gather => rank == chunk,
                        CollectiveKind::Broadcast | CollectiveKind::Scatter => {
                            rank == pattern.root()
                        }
                    };
                    valid.then(|| values.leaf(rank, cell))
                })
                .collect(),
            output: vec![None; cells as usize],
            held: Vec::new(),
            lent: BTreeSet::new(),
            held_where_lent: BTreeSet::new(),
            loans: BTreeMap::new(),
            folded: Vec::new(),
        });
        let memories = memories.collect();
        let rest = steps.iter().map(Vec::as_slice).collect();
        Self {
            pattern,
            grain,
            rest,
            memories,
            messages: BTreeMap::new(),
            offers: BTreeMap::new(),
            taken: BTreeSet::new(),
            values,
            round: 0,
            writing: false,
        }
    }

    /// Runs the next round in which any rank has steps; false if no steps remain.
    fn run_round(&mut self) -> Result<bool, Violation> {
        let heads = self.rest.iter().filter_map(|steps| steps.first());
        let Some(round) = heads.map(|step| step.round).min() else { return Ok(false) };
        self.round = round;
        let ranks = self.rest.len() as u32;
        for rank in 0..ranks {
            let waits = |action: &Action| {
                matches!(action, Action::Recv { .. } | Action::Read { .. } | Action::Take { .. })
            };
            while let Some(step) = self.take(rank, |action| !waits(action)) {
                self.carry_out(rank, step)?;
            }
        }
        for rank in 0..ranks {
            while let Some(step) = self.take(rank, |_| true) {
                self.carry_out(rank, step)?;
            }
        }
        if let Some(&(from, to)) = self.messages.keys().next() {
            return Err(self.violation(from, Problem::NotReceived(to)));
        }
        self.end_offers()?;
        self.writing = self.is_round_of_writes()?;
        let prolonged = self.writing;
        for rank in 0..ranks {
            let memory = &mut self.memories[rank as usize];
            if !prolonged {
                memory.lent.clear();
                memory.loans.clear();
                memory.folded.clear();
            }
            if let Some(&from) = memory.held_where_lent.first() {
                return Err(self.violation(rank, Problem::StillHeld(from)));
            }
        }
        Ok(true)
    }

    /// Returns true if the next round consists of writes; it may then hold nothing else.
    fn is_round_of_writes(&self) -> Result<bool, Violation> {
        let heads =
            || (0..).zip(&self.rest).filter_map(|(rank, steps)| Some((rank, steps.first()?)));
        let next = heads().map(|(_, step)| step.round).min();
        let writes = |step: &Step| matches!(step.action, Action::Write { .. });
        let of_next = |(rank, steps): (u32, &&[Step])| {
            let steps = steps.iter().take_while(|step| Some(step.round) == next);
            steps.map(|step| (rank, writes(step))).collect::<Vec<_>>()
        };
        let all: Vec<(u32, bool)> = (0..).zip(&self.rest).flat_map(of_next).collect();
        let any = all.iter().any(|&(_, write)| write);
        match all.iter().find(|(_, write)| any && !write) {
            Some(&(rank, _)) => Err(self.violation(rank, Problem::AmongWrites)),
            None => Ok(any),
        }
    }

    /// Takes a rank's next step if it belongs to this round and `passes` accepts it.
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
            Action::Send { to, chunks } => self.put(me, to, chunks, false)?,
            Action::Lend { to, chunks } => {
                self.put(me, to, chunks, true)?;
                let cells = self.cells(chunks);
                let memory = &mut self.memories[me as usize];
                memory.lent.extend(cells);
                memory.loans.insert(to, chunks);
            }
            Action::Recv { from, chunks, how } => {
                let values = self.get(me, from, chunks, how, false)?;
                self.receive(me, from, chunks, how, values)?;
            }
            Action::Read { from, chunks, how } => {
                let values = self.get(me, from, chunks, how, true)?;
                if how == Combine::Hold {
                    self.memories[me as usize].held_where_lent.insert(from);
                }
                self.receive(me, from, chunks, how, values)?;
            }
            Action::Write { to, chunks } => self.write(me, to, chunks)?,
            Action::Offer { to, chunks } => self.offer(me, to, chunks)?,
            Action::Take { from, chunks } => {
                let values = self.take_sum(me, from, chunks)?;
                self.receive(me, me, chunks, Combine::Replace, values)?;
            }
            Action::Fold { chunks } => self.fold(me, chunks)?,
            Action::Emit { chunks, into } => {
                let values = self.read(me, chunks)?;
                self.check_chunks(me, into)?;
                self.receive(me, me, into, Combine::Output, values)?;
            }
        }
        Ok(())
    }

    /// Records a rank's offer to a switch.
    fn offer(&mut self, me: u32, to: Peers, chunks: Chunks) -> Result<(), Violation> {
        self.check_peers(me, to)?;
        let values = self.read(me, chunks)?;
        for (cell, value) in self.cells(chunks).zip(values) {
            let offers = self.offers.entry((to, cell)).or_default();
            if offers.iter().any(|&(rank, _)| rank == me) {
                return Err(self.violation(me, Problem::SecondMessage(to.first)));
            }
            offers.push((me, value));
        }
        Ok(())
    }

    /// Sums that a switch computes from the offers for `chunks`.
    fn take_sum(
        &mut self,
        me: u32,
        from: Peers,
        chunks: Chunks,
    ) -> Result<Vec<ValueId>, Violation> {
        self.check_peers(me, from)?;
        self.check_chunks(me, chunks)?;
        self.taken.insert(from);
        let mut sums = Vec::new();
        for cell in self.cells(chunks) {
            let offers = self.offers.get(&(from, cell)).cloned().unwrap_or_default();
            let mut values = offers.into_iter().map(|(_, value)| value);
            let Some(first) = values.next() else {
                return Err(self.violation(me, Problem::NotSent(from.first)));
            };
            sums.push(values.fold(first, |sum, value| self.values.sum(sum, value)));
        }
        Ok(sums)
    }

    /// Clears the offers of a round and checks that each switch's sum was taken.
    fn end_offers(&mut self) -> Result<(), Violation> {
        let offers = std::mem::take(&mut self.offers);
        let taken = std::mem::take(&mut self.taken);
        let lost = offers.into_iter().find(|((peers, _), _)| !taken.contains(peers));
        match lost.and_then(|((peers, _), by)| Some((peers, by.first()?.0))) {
            Some((peers, by)) => Err(self.violation(by, Problem::NotReceived(peers.first))),
            None => Ok(()),
        }
    }

    fn check_peers(&self, me: u32, peers: Peers) -> Result<(), Violation> {
        if peers.count < 2 || !peers.contains(me) || peers.last() >= self.pattern.ranks() {
            return Err(self.violation(me, Problem::NotAPeer(peers.last())));
        }
        Ok(())
    }

    /// Puts a message or loan in flight.
    fn put(&mut self, me: u32, to: u32, chunks: Chunks, lent: bool) -> Result<(), Violation> {
        self.check_peer(me, to)?;
        let message = Message { lent, chunks, values: self.read(me, chunks)? };
        if self.messages.insert((me, to), message).is_some() {
            return Err(self.violation(me, Problem::SecondMessage(to)));
        }
        Ok(())
    }

    /// Values that a rank receives or reads.
    fn get(
        &mut self,
        me: u32,
        from: u32,
        chunks: Chunks,
        how: Combine,
        lent: bool,
    ) -> Result<Vec<ValueId>, Violation> {
        self.check_peer(me, from)?;
        self.check_chunks(me, chunks)?;
        let message = self.messages.remove(&(from, me)).filter(|message| message.lent == lent);
        let Some(message) = message else {
            let problem = if lent { Problem::NotLent(from) } else { Problem::NotSent(from) };
            return Err(self.violation(me, problem));
        };
        // all_to_all moves parts to other positions; its parts all have the same size.
        let moves = how == Combine::Replace && self.pattern.kind() == CollectiveKind::AllToAll;
        let same = match how {
            _ if moves || how == Combine::Output => {
                (message.chunks.number(), message.chunks.pieces) == (chunks.number(), chunks.pieces)
            }
            Combine::Output | Combine::Replace | Combine::Reduce | Combine::Hold => {
                message.chunks == chunks
            }
        };
        if !same {
            return Err(self.violation(me, Problem::OtherChunks(from)));
        }
        Ok(message.values)
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
        let cells = self.cells(chunks);
        let memory = &mut self.memories[me as usize];
        let buffer = match how {
            Combine::Hold => {
                memory.held.push((from, chunks, values));
                return Ok(());
            }
            Combine::Output => &mut memory.output,
            Combine::Replace | Combine::Reduce => {
                self.check_not_lent(me, chunks)?;
                &mut self.memories[me as usize].work
            }
        };
        for (cell, value) in cells.zip(values) {
            buffer[cell as usize] = Some(value);
        }
        Ok(())
    }

    fn fold(&mut self, me: u32, chunks: Chunks) -> Result<(), Violation> {
        let own = self.read(me, chunks)?;
        self.check_not_lent(me, chunks)?;
        let memory = &mut self.memories[me as usize];
        let held = memory.held.extract_if(.., |(_, of, _)| *of == chunks);
        let mut parts: Vec<_> = held.map(|(from, _, values)| (from, values)).collect();
        for (from, _) in &parts {
            memory.held_where_lent.remove(from);
        }
        parts.push((me, own));
        parts.sort_by_key(|(from, _)| *from);
        for (i, cell) in self.cells(chunks).enumerate() {
            let column = parts.iter().map(|(_, values)| values[i]);
            let sum = canonical_fold(column, |a, b| self.values.sum(a, b));
            self.memories[me as usize].work[cell as usize] = sum;
        }
        self.memories[me as usize].folded.push(chunks);
        Ok(())
    }

    /// Overwrites a peer's chunks, which only this rank may access.
    fn write(&mut self, me: u32, to: u32, chunks: Chunks) -> Result<(), Violation> {
        self.check_peer(me, to)?;
        if !self.writing {
            return Err(self.violation(me, Problem::AmongWrites));
        }
        let values = self.read(me, chunks)?;
        if !self.memories[me as usize].folded.contains(&chunks) {
            return Err(self.violation(me, Problem::NotFolded(to)));
        }
        let loans = &self.memories[to as usize].loans;
        if loans.get(&me) != Some(&chunks) {
            return Err(self.violation(me, Problem::NotLent(to)));
        }
        let cells: BTreeSet<u32> = self.cells(chunks).collect();
        let others = loans.iter().filter(|(rank, _)| **rank != me);
        let shared = |(_, &lent): (&u32, &Chunks)| self.cells(lent).any(|c| cells.contains(&c));
        if others.into_iter().any(shared) {
            return Err(self.violation(me, Problem::LentToOthers(to)));
        }
        let work = &mut self.memories[to as usize].work;
        for (cell, value) in cells.into_iter().zip(values) {
            work[cell as usize] = Some(value);
        }
        Ok(())
    }

    /// Reads the values of chunks, all of which must be valid.
    fn read(&self, me: u32, chunks: Chunks) -> Result<Vec<ValueId>, Violation> {
        self.check_chunks(me, chunks)?;
        let work = &self.memories[me as usize].work;
        let missing = |cell| self.violation(me, Problem::NotValid(cell / self.grain));
        self.cells(chunks).map(|cell| work[cell as usize].ok_or_else(|| missing(cell))).collect()
    }

    /// The cells of chunks, or of a piece of each.
    fn cells(&self, chunks: Chunks) -> impl Iterator<Item = u32> + use<> {
        let grain = self.grain;
        let each = grain / chunks.pieces.max(1);
        chunks.iter().flat_map(move |chunk| {
            let first = chunk * grain + chunks.piece * each;
            first..first + each
        })
    }

    fn check_peer(&self, me: u32, peer: u32) -> Result<(), Violation> {
        if peer == me || peer >= self.pattern.ranks() {
            return Err(self.violation(me, Problem::NotAPeer(peer)));
        }
        Ok(())
    }

    fn check_chunks(&self, me: u32, chunks: Chunks) -> Result<(), Violation> {
        let Chunks { first, count, stride, width, step, piece, pieces, missing: _, modulus } =
            chunks;
        let reach = |count: u32, apart: u32| u64::from(count.saturating_sub(1)) * u64::from(apart);
        let last = match modulus {
            0 => u64::from(first) + reach(count, stride) + reach(width, step),
            modulus => u64::from(modulus - 1),
        };
        let beyond = last >= u64::from(self.pattern.chunks()) || piece >= pieces.max(1);
        if chunks.number() > 0 && beyond {
            return Err(self.violation(me, Problem::NoSuchChunk(last)));
        }
        Ok(())
    }

    fn check_not_lent(&self, me: u32, chunks: Chunks) -> Result<(), Violation> {
        let lent = &self.memories[me as usize].lent;
        match self.cells(chunks).find(|cell| lent.contains(cell)) {
            Some(cell) => Err(self.violation(me, Problem::WrittenWhileLent(cell / self.grain))),
            None => Ok(()),
        }
    }

    /// Checks every rank's final memory against the result of the kind.
    fn check_result(&mut self) -> Result<(), Violation> {
        let (kind, root) = (self.pattern.kind(), self.pattern.root());
        for me in 0..self.pattern.ranks() {
            if let Some((from, ..)) = self.memories[me as usize].held.first() {
                return Err(self.violation(me, Problem::StillHeld(*from)));
            }
            for cell in 0..self.pattern.chunks() * self.grain {
                let (chunk, place) = (cell / self.grain, cell % self.grain);
                match kind {
                    CollectiveKind::AllReduce => self.check_sum(me, cell)?,
                    CollectiveKind::ReduceScatter if me == chunk => self.check_sum(me, cell)?,
                    CollectiveKind::Reduce if me == root => self.check_sum(me, cell)?,
                    CollectiveKind::AllGather => self.check_leaf(me, cell, (chunk, cell))?,
                    CollectiveKind::Gather if me == root => {
                        self.check_leaf(me, cell, (chunk, cell))?;
                    }
                    CollectiveKind::Broadcast => self.check_leaf(me, cell, (root, cell))?,
                    CollectiveKind::AllToAll => {
                        self.check_leaf(me, cell, (chunk, me * self.grain + place))?;
                    }
                    CollectiveKind::Scatter if me == chunk => {
                        self.check_leaf(me, cell, (root, cell))?;
                    }
                    CollectiveKind::SendRecv => {
                        let before = (me + self.pattern.ranks() - 1) % self.pattern.ranks();
                        self.check_leaf(me, cell, (before, cell))?;
                    }
                    CollectiveKind::ReduceScatter
                    | CollectiveKind::Reduce
                    | CollectiveKind::Gather
                    | CollectiveKind::Scatter
                    | CollectiveKind::Barrier => {}
                }
            }
        }
        Ok(())
    }

    fn check_leaf(&mut self, me: u32, cell: u32, leaf: (u32, u32)) -> Result<(), Violation> {
        let wanted = self.values.leaf(leaf.0, leaf.1);
        let memory = &self.memories[me as usize];
        let memory = if self.pattern.kind().has_output() { &memory.output } else { &memory.work };
        let found = memory[cell as usize];
        if found == Some(wanted) {
            return Ok(());
        }
        Err(self.wrong(me, cell, found, self.values.text(wanted, 1, self.grain)))
    }

    fn check_sum(&mut self, me: u32, cell: u32) -> Result<(), Violation> {
        let ranks = self.pattern.ranks();
        let found = self.memories[me as usize].work[cell as usize];
        match self.pattern.order() {
            SummationOrder::Canonical => {
                let leaves: Vec<_> = (0..ranks).map(|rank| self.values.leaf(rank, cell)).collect();
                let wanted = canonical_fold(leaves, |a, b| self.values.sum(a, b));
                if found != wanted {
                    let wanted =
                        wanted.map(|id| self.values.text(id, 6, self.grain)).unwrap_or_default();
                    return Err(self.wrong(me, cell, found, wanted));
                }
            }
            SummationOrder::Free => {
                let leaves = found.map(|id| self.values.leaves(id, ranks as usize + 1));
                if !leaves
                    .is_some_and(|leaves| leaves.into_iter().eq((0..ranks).map(|r| (r, cell))))
                {
                    let wanted =
                        format!("the sum of chunk {} of all {ranks} ranks", cell / self.grain);
                    return Err(self.wrong(me, cell, found, wanted));
                }
                // Any order, but the same on all ranks: replicas that round differently diverge.
                let first = self.memories[0].work[cell as usize];
                if self.pattern.kind() == CollectiveKind::AllReduce && found != first {
                    let first =
                        first.map(|id| self.values.text(id, 6, self.grain)).unwrap_or_default();
                    return Err(self.wrong(me, cell, found, format!("{first}, as on rank 0")));
                }
            }
        }
        Ok(())
    }

    fn wrong(&self, me: u32, cell: u32, found: Option<ValueId>, wanted: String) -> Violation {
        let found =
            found.map_or_else(|| "nothing".to_owned(), |id| self.values.text(id, 6, self.grain));
        let chunk = cell / self.grain;
        self.violation(me, Problem::Wrong { chunk, found, wanted })
    }

    fn violation(&self, rank: u32, problem: Problem) -> Violation {
        Violation { rank, round: self.round, problem }
    }
}
