//! Offloading of optimizer state and activations to the offload store, and its schedule.
//!
//! **Optimizer state.** Master weights and moments are kept in the store. A step works on one of
//! two buffer sets that buckets use alternately. While a bucket is updated, the next bucket's state
//! is prefetched and the previous one's is offloaded.
//!
//! **Activations.** The saved activations of a block are in one of [`SLOTS`] buffer sets that
//! blocks use in turn, and are offloaded after the forward pass. The backward pass prefetches them
//! as soon as a slot is free, so that [`SLOTS`] − 1 blocks are in flight while one computes. If a
//! microbatch's backward pass directly follows its forward pass, its last blocks stay.
//!
//! Embedding and head are not offloaded, nor is the input from another stage: receives are posted
//! early.

use super::role::RoleIr;
use super::shard::ValueId;
use super::slots::{Point, Turn};
use crate::dtype::DType;
use crate::ids::{BufferId, Microbatch, OpId};
use crate::program::{MemoryKind, Op, StepPhase, View};
use crate::schedule::Pass;
use std::collections::BTreeMap;

/// Number of blocks whose activations fit in the arena: one that computes and its two neighbours,
/// or two that are in flight.
const SLOTS: usize = 3;

/// Offloading state while the program is built.
#[derive(Default)]
pub(super) struct Offloading {
    /// Buffers of slots, by slot, layer kind and value.
    homes: BTreeMap<(usize, usize, ValueId), BufferId>,
    /// By layer: view of each value in its slot, and in the store.
    groups: BTreeMap<usize, Vec<(View, View)>>,
    slots: [Slot; SLOTS],
    /// By layer and microbatch: op after which all values are in the store.
    stashed: BTreeMap<(usize, Microbatch), OpId>,
    /// By buffer set for optimizer state: ops after which it is free.
    free_sets: [Vec<OpId>; 2],
}

#[derive(Default)]
struct Slot {
    holds: Option<(usize, Microbatch)>,
    /// Ops that must complete before the slot is reused.
    busy: Vec<OpId>,
    /// Op after which the contents are available, if they were prefetched.
    prefetched: Option<OpId>,
}

/// Moves activations out after their forward pass and back before their backward pass; a step moves
/// its own state.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        Point::Begin(turn) if turn.pass != Pass::Forward => ir.prefetch_last(turn),
        Point::Enter(turn, layer) if turn.pass != Pass::Forward => ir.await_prefetch(layer),
        Point::Reserve(turn, layer) if turn.pass == Pass::Forward => ir.reserve_slot(turn, layer),
        Point::Leave(turn, layer) if turn.pass == Pass::Forward => ir.offload_layer(turn, layer),
        Point::Leave(turn, layer) => ir.release_slot(turn, layer),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Returns true if a layer's activations are offloaded: those of blocks are.
    pub(super) fn offloads(&self, layer: usize) -> bool {
        let block = self.context.graph.layer(layer.into()).is_block();
        self.context.strategy.offload.activations() && block
    }

    /// Declares the buffer in a layer's slot for one of its values, with `copies` microbatches in
    /// the store.
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
        let rest = self.buffer(name, dtype, elements, copies, MemoryKind::Offloaded);
        let pair = (self.whole(id), self.whole(rest));
        self.offloading.groups.entry(layer).or_default().push(pair);
        id
    }

    /// Before a forward pass over a layer: waits until the slots it fills are free. The next slot
    /// receives the layer's output.
    fn reserve_slot(&mut self, turn: &Turn, layer: usize) {
        for filled in [layer, layer + 1] {
            if turn.layers().contains(&filled) && self.offloading.groups.contains_key(&filled) {
                let slot = &mut self.offloading.slots[filled % SLOTS];
                self.walk.after.append(&mut slot.busy);
                slot.holds = None;
            }
        }
    }

    /// After a forward pass over a layer: offloads its saved values, unless its backward pass comes
    /// before the slot is needed again.
    fn offload_layer(&mut self, turn: &Turn, layer: usize) {
        let microbatch = turn.microbatch;
        let Some(group) = self.offloading.groups.get(&layer).cloned() else { return };
        let mut busy = self.produced();
        let turns = turn.following.is_some_and(|next| {
            let own = self.context.stages[next.stage.index()] == turn.layers();
            own && next.pass == Pass::Backward && next.microbatch == microbatch
        });
        let mut later = (layer + SLOTS..turn.end).step_by(SLOTS);
        let needed = later.any(|later| self.offloading.groups.contains_key(&later));
        if !turns || needed {
            let lane = self.lane("offload-out");
            for (from, into) in group {
                busy = vec![self.body.push(lane, Op::Stash { from, into, microbatch }, &busy)];
            }
            self.offloading.stashed.extend(busy.first().map(|&op| ((layer, microbatch), op)));
        }
        let holds = Some((layer, microbatch));
        self.offloading.slots[layer % SLOTS] = Slot { holds, busy, prefetched: None };
    }

    /// Before the backward pass over `layers`: prefetches the last ones.
    fn prefetch_last(&mut self, turn: &Turn) {
        for layer in turn.layers().rev().take(SLOTS) {
            self.prefetch(layer, turn.microbatch);
        }
    }

    /// Before the backward pass over a layer: waits for its prefetched values.
    fn await_prefetch(&mut self, layer: usize) {
        if self.offloading.groups.contains_key(&layer) {
            self.walk.after.extend(self.offloading.slots[layer % SLOTS].prefetched);
        }
    }

    /// After the backward pass over a layer: frees its slot and prefetches the next layer that uses
    /// it.
    fn release_slot(&mut self, turn: &Turn, layer: usize) {
        if self.offloading.groups.contains_key(&layer) {
            let busy = self.produced();
            self.offloading.slots[layer % SLOTS] = Slot { busy, ..Slot::default() };
        }
        if let Some(next) = layer.checked_sub(SLOTS).filter(|next| turn.layers().contains(next)) {
            self.prefetch(next, turn.microbatch);
        }
    }

    fn prefetch(&mut self, layer: usize, microbatch: Microbatch) {
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
        self.offloading.slots[layer % SLOTS] = Slot { holds, busy: after, prefetched: brought };
    }

    /// Views of a bucket's optimizer state during its step and between steps, possibly in the
    /// store.
    pub(super) fn state_views(&mut self, bucket: &str, what: &str, elements: u64) -> [View; 2] {
        let offloads = self.context.strategy.offload.optimizer();
        let kind = match (offloads, self.shares_weights()) {
            (true, _) => MemoryKind::Offloaded,
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

    /// Adds a step of a bucket after `known`, with prefetch and offload of its state.
    pub(super) fn step(&mut self, bucket: usize, phase: StepPhase, known: &[OpId]) -> OpId {
        let op = Op::Step { bucket: bucket as u32, phase };
        let state = self.buckets[bucket].finish();
        if state.offloaded.is_empty() {
            return self.compute(op, known);
        }
        let microbatch = Microbatch(0);
        let mut after = std::mem::take(&mut self.offloading.free_sets[bucket % 2]);
        let worked: Vec<View> = state.master.into_iter().chain(state.moments).collect();
        let lane = self.lane("offload-in");
        for (&from, &into) in state.offloaded.iter().zip(&worked) {
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
            let (from, into) = (worked[at], state.offloaded[at]);
            done = vec![self.body.push(lane, Op::Stash { from, into, microbatch }, &done)];
        }
        self.offloading.free_sets[bucket % 2] = done;
        step
    }
}
