//! What rests in the store instead of the arena, and when it comes and goes.
//!
//! **Optimizer state.** Master weights and moments rest in the store. A step works on one of two sets of
//! buffers that buckets use in turn: the next bucket's state is on its way in, and the last one's on its
//! way out, while a bucket is updated.
//!
//! **Activations.** What a block keeps for its backward pass lies in one of [`SLOTS`] sets of buffers
//! that blocks use in turn, and goes to the store when the forward pass is over. The backward pass has
//! it brought back as soon as a slot is free, so that [`SLOTS`] − 1 blocks are on their way while one
//! computes. Where a microbatch's backward pass follows its forward pass at once, its last blocks stay.
//!
//! Embedding and head keep theirs, and so does what arrives from another stage: receives are posted early.

use super::role::Role;
use super::shard::ValueId;
use crate::dtype::DType;
use crate::ids::{BufferId, Microbatch, OpId};
use crate::program::{MemoryKind, Op, StepPhase, View};
use crate::schedule::{Action, Pass};
use std::collections::BTreeMap;
use std::ops::Range;

/// How many blocks' activations have a place in the arena: of one that computes and of its
/// neighbours on either side, or of two that are on their way.
const SLOTS: usize = 3;

/// What is where while the program is written.
#[derive(Default)]
pub(super) struct Offloading {
    /// The buffers of slots, by slot, kind of layer and value.
    homes: BTreeMap<(usize, usize, ValueId), BufferId>,
    /// By layer: where its values lie in a slot, and where they rest.
    groups: BTreeMap<usize, Vec<(View, View)>>,
    slots: [Slot; SLOTS],
    /// By layer and microbatch: when all of it is in the store.
    stashed: BTreeMap<(usize, Microbatch), OpId>,
    /// By turn: when its set of buffers for optimizer state is free.
    turns: [Vec<OpId>; 2],
    /// What comes next in the schedule's order.
    pub(super) following: Option<Action>,
}

#[derive(Default)]
struct Slot {
    holds: Option<(usize, Microbatch)>,
    /// What must be done before something else may be put there.
    busy: Vec<OpId>,
    /// When what it holds is there, where that had to be brought.
    brought: Option<OpId>,
}

impl Role<'_> {
    /// Whether a layer's activations go to the store: those of blocks do.
    pub(super) fn offloads(&self, layer: usize) -> bool {
        let block = self.context.graph.layer(layer.into()).is_block();
        self.context.strategy.offload.activations() && block
    }

    /// The buffer in a layer's slot for one of its values, of which the store has room for as many
    /// microbatches as are under way.
    pub(super) fn slot_buffer(
        &mut self,
        layer: usize,
        value: ValueId,
        (elements, dtype): (u64, DType),
        copies: u32,
    ) -> BufferId {
        let kind = self.context.graph.layers[layer].kind;
        let slot = layer % SLOTS;
        let what = self.context.sharded[kind].values[value].name.clone();
        let id = match self.offloading.homes.get(&(slot, kind, value)) {
            Some(&known) => known,
            None => {
                let name = format!("{}.slot{slot}.{what}", self.context.graph.kinds[kind].name);
                let id = self.buffer(name, dtype, elements, 1, MemoryKind::Activations);
                self.offloading.homes.insert((slot, kind, value), id);
                id
            }
        };
        let name = format!("{}.{what}.stored", self.context.graph.layers[layer].name);
        let rest = self.buffer(name, dtype, elements, copies, MemoryKind::Stored);
        let pair = (self.whole(id), self.whole(rest));
        self.offloading.groups.entry(layer).or_default().push(pair);
        id
    }

    /// Before a forward pass over a layer: the slots that it fills must have been emptied. The one
    /// behind gets what the layer puts out.
    pub(super) fn make_room(&mut self, layer: usize, layers: &Range<usize>, after: &mut Vec<OpId>) {
        for filled in [layer, layer + 1] {
            if layers.contains(&filled) && self.offloading.groups.contains_key(&filled) {
                let slot = &mut self.offloading.slots[filled % SLOTS];
                after.append(&mut slot.busy);
                slot.holds = None;
            }
        }
    }

    /// After a forward pass over a layer: sends what it keeps to the store, unless its backward pass
    /// comes before anything else needs the slot.
    pub(super) fn put_away(&mut self, layer: usize, layers: &Range<usize>, microbatch: Microbatch) {
        let Some(group) = self.offloading.groups.get(&layer).cloned() else { return };
        let mut busy = self.produced();
        let turns = self.offloading.following.is_some_and(|next| {
            let own = self.context.stages[next.stage.index()] == *layers;
            own && next.pass == Pass::Backward && next.microbatch == microbatch
        });
        let mut turn = (layer + SLOTS..layers.end).step_by(SLOTS);
        let needed = turn.any(|later| self.offloading.groups.contains_key(&later));
        if !turns || needed {
            let lane = self.lane("offload-out");
            for (from, into) in group {
                busy = vec![self.body.push(lane, Op::Stash { from, into, microbatch }, &busy)];
            }
            self.offloading.stashed.extend(busy.first().map(|&op| ((layer, microbatch), op)));
        }
        let holds = Some((layer, microbatch));
        self.offloading.slots[layer % SLOTS] = Slot { holds, busy, brought: None };
    }

    /// Before the backward pass over some layers: has the last ones brought back.
    pub(super) fn bring_last(&mut self, layers: &Range<usize>, microbatch: Microbatch) {
        for layer in layers.clone().rev().take(SLOTS) {
            self.bring(layer, microbatch);
        }
    }

    /// Before the backward pass over a layer: what it reads must be there.
    pub(super) fn brought(&mut self, layer: usize, after: &mut Vec<OpId>) {
        if self.offloading.groups.contains_key(&layer) {
            after.extend(self.offloading.slots[layer % SLOTS].brought);
        }
    }

    /// After the backward pass over a layer: its slot is for the next one that takes its turn there.
    pub(super) fn vacate(&mut self, layer: usize, layers: &Range<usize>, microbatch: Microbatch) {
        if self.offloading.groups.contains_key(&layer) {
            let busy = self.produced();
            self.offloading.slots[layer % SLOTS] = Slot { busy, ..Slot::default() };
        }
        if let Some(next) = layer.checked_sub(SLOTS).filter(|next| layers.contains(next)) {
            self.bring(next, microbatch);
        }
    }

    fn bring(&mut self, layer: usize, microbatch: Microbatch) {
        let Some(group) = self.offloading.groups.get(&layer).cloned() else { return };
        let holds = Some((layer, microbatch));
        if self.offloading.slots[layer % SLOTS].holds == holds {
            return;
        }
        let mut after = std::mem::take(&mut self.offloading.slots[layer % SLOTS].busy);
        after.extend(self.offloading.stashed.remove(&(layer, microbatch)));
        let lane = self.lane("offload-in");
        for (into, from) in group {
            after = vec![self.body.push(lane, Op::Restore { from, into, microbatch }, &after)];
        }
        let brought = after.first().copied();
        self.offloading.slots[layer % SLOTS] = Slot { holds, busy: after, brought };
    }

    /// Where a bucket's optimizer state lies during its step, and where it rests if that is the store.
    pub(super) fn state_views(&mut self, bucket: &str, what: &str, elements: u64) -> [View; 2] {
        let offloads = self.context.strategy.offload.optimizer();
        let kind = match (offloads, self.shares_weights()) {
            (true, _) => MemoryKind::Stored,
            (false, true) => MemoryKind::Shared,
            (false, false) => MemoryKind::Optimizer,
        };
        let rests = self.buffer(format!("{bucket}.{what}"), DType::F32, elements, 1, kind);
        let rests = self.whole(rests);
        if !offloads {
            return [rests; 2];
        }
        let name = format!("state{}.{what}", self.buckets.len() % 2);
        let id = match self.buffers.iter().position(|b| b.name == name) {
            Some(at) => {
                self.buffers[at].elements = self.buffers[at].elements.max(elements);
                BufferId::from(at)
            }
            None => self.buffer(name, DType::F32, elements, 1, MemoryKind::Communication),
        };
        [View { buffer: id, offset: 0, len: elements }, rests]
    }

    /// Runs a step of a bucket once `known` is, around which its state comes and goes.
    pub(super) fn step(&mut self, bucket: usize, phase: StepPhase, known: &[OpId]) -> OpId {
        let op = Op::Step { bucket: bucket as u32, phase };
        let state = self.buckets[bucket].finish();
        if state.stored.is_empty() {
            return self.compute(op, known);
        }
        let microbatch = Microbatch(0);
        let mut after = std::mem::take(&mut self.offloading.turns[bucket % 2]);
        let worked: Vec<View> = state.master.into_iter().chain(state.moments).collect();
        let lane = self.lane("offload-in");
        for (&from, &into) in state.stored.iter().zip(&worked) {
            after = vec![self.body.push(lane, Op::Restore { from, into, microbatch }, &after)];
        }
        let waits: Vec<OpId> = known.iter().copied().chain(after).collect();
        let step = self.compute(op, &waits);
        let masters = usize::from(state.master.is_some());
        let moments = self.context.strategy.optimizer.moves_moments_in() == phase;
        let from = if phase == StepPhase::Apply { 0 } else { masters };
        let changed = from..if moments { worked.len() } else { masters };
        let lane = self.lane("offload-out");
        let mut done = vec![step];
        for at in changed {
            let (from, into) = (worked[at], state.stored[at]);
            done = vec![self.body.push(lane, Op::Stash { from, into, microbatch }, &done)];
        }
        self.offloading.turns[bucket % 2] = done;
        step
    }
}
