//! Sharding of a recommendation model's tables over replicas, which replicate the networks.
//!
//! ```text
//! replicate  forward: own samples                          backward: gradients of all samples gathered
//! row        forward: part of every sum, then              backward: gradients of all samples gathered
//!            reduce_scatter to the samples' replicas
//! table      forward: whole sums of own tables, then       backward: all_to_all back
//!            all_to_all to the samples' replicas
//! ```
//!
//! The update of rows depends on the optimizer ([`TableUpdate`]). Plain SGD with one microbatch
//! needs no gradient as large as a table. The looked-up rows take their step as soon as the
//! gradients of the sums are available, and nothing reads a row between its step and the next
//! iteration. Otherwise gradients are accumulated over microbatches and every row has optimizer
//! state, like other parameters. Both are either sharded with the rows, which then need no
//! reduction, or on every replica for its own samples; then they are reduced, served or
//! synchronised like the networks.
//!
//! Tables are always f32, regardless of the networks. Rows that were looked up once must not lose
//! small steps, and a 16-bit copy next to the exact rows would take more memory, not less.

use super::role::RoleIr;
use super::shard::{Item, Sharder};
use crate::dtype::DType;
use crate::graph::{OpKind, OpPass, Operator};
use crate::ids::{LayerId, ParamId, TensorId};
use crate::mesh::Axis;
use crate::program::{Bucket, MemoryKind, View};
use crate::spec::{Conversion, Layout, Placement, conversion};
use crate::strategy::{OptimizerKind, Strategy, Sync, TableSharding};
use std::ops::Range;

/// Update method of table rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableUpdate {
    /// Rows take their step during the lookup's backward pass.
    SparseStep,
    /// Rows have gradients and state only on the rank that holds them.
    Sharded,
    /// Rows are on every replica, with the gradients of its own samples, like other parameters.
    Replicated,
}

/// Update method of table rows under a strategy.
pub(super) fn table_update(s: &Strategy) -> TableUpdate {
    let plain = s.optimizer == OptimizerKind::Sgd && s.microbatches() == 1;
    match placement(s) {
        _ if plain && in_step(s) && s.schedule.flushes() => TableUpdate::SparseStep,
        TableSharding::Table | TableSharding::Row => TableUpdate::Sharded,
        TableSharding::Replicate | TableSharding::Auto => TableUpdate::Replicated,
    }
}

/// Placement of tables under a strategy.
pub(super) fn placement(s: &Strategy) -> TableSharding {
    match s.table_sharding {
        _ if s.dp == 1 => TableSharding::Replicate,
        // Rows cannot be requested from replicas that are not in step.
        TableSharding::Auto if !in_step(s) => TableSharding::Replicate,
        tables => tables.resolve(),
    }
}

/// Returns true if all replicas run the same microbatch at a time, on the same weights.
pub(super) fn in_step(s: &Strategy) -> bool {
    s.sync == Sync::AllReduce && s.local.is_none()
}

/// A role's tables with sparse steps.
#[derive(Clone, Debug)]
pub(super) struct TableState {
    pub(super) shape: super::bucket::BucketShape,
    pub(super) params: View,
}

impl TableState {
    /// Bucket as declared in the plan: without gradients and without a step of its own.
    pub(super) fn finish(&self) -> Bucket {
        Bucket {
            name: self.shape.name.clone(),
            elements: self.shape.elements,
            entries: self.shape.entries.clone(),
            params: self.params,
            grads: View { len: 0, ..self.params },
            master: None,
            moments: Vec::new(),
            offloaded: Vec::new(),
            tensor_norms: None,
            shard: None,
            updated: true,
        }
    }
}

impl RoleIr<'_> {
    /// Declares the tables of a virtual stage, if it has any with sparse steps.
    pub(super) fn declare_tables(&mut self, layers: Range<usize>) {
        if table_update(&self.context.strategy) != TableUpdate::SparseStep {
            return;
        }
        let Some(shape) = self.context.deal().tables(layers) else { return };
        let (dtype, kind) = (DType::F32, MemoryKind::Parameters);
        let buffer = self.buffer("tables.param".into(), dtype, shape.elements, 1, kind);
        self.tables = Some(TableState { params: self.whole(buffer), shape });
    }

    /// View of a parameter, if it is a table with sparse steps.
    pub(super) fn table_view(&self, layer: usize, param: ParamId) -> Option<View> {
        let tables = self.tables.as_ref()?;
        let owners = &tables.shape.owners;
        let at = owners.iter().position(|&owner| owner == (LayerId::from(layer), param))?;
        let entry = &tables.shape.entries[at];
        Some(View { offset: entry.offset, len: entry.elements(), ..tables.params })
    }
}

/// Distributes whole tables: largest first, each to the rank with the fewest rows so far that has a
/// free slot. All ranks have the same number of slots.
pub fn assign(tables: &[u64], ranks: u32) -> Vec<TableSlot> {
    let places = slots(tables.len() as u64, ranks);
    let mut held = vec![(0u64, 0u64); ranks.max(1) as usize];
    let mut order: Vec<usize> = (0..tables.len()).collect();
    order.sort_by_key(|&table| (std::cmp::Reverse(tables[table]), table));
    let mut seats = vec![TableSlot::default(); tables.len()];
    for table in order {
        let free = (0..held.len()).filter(|&rank| held[rank].1 < places);
        let rank = free.min_by_key(|&rank| (held[rank].0, rank)).unwrap_or(0);
        seats[table] = TableSlot { rank: rank as u32, slot: held[rank].1, first: held[rank].0 };
        held[rank].0 += tables[table];
        held[rank].1 += 1;
    }
    seats
}

/// Number of table slots per rank.
pub fn slots(tables: u64, ranks: u32) -> u64 {
    tables.div_ceil(u64::from(ranks.max(1)))
}

/// Location of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSlot {
    /// Rank that holds it.
    pub rank: u32,
    /// Index among that rank's tables.
    pub slot: u64,
    /// Number of that rank's rows before it.
    pub first: u64,
}

impl Sharder<'_> {
    fn tables(&self) -> TableSharding {
        placement(self.strategy)
    }

    /// Applies an operator on tables or their results; returns false for other operators.
    pub(super) fn on_tables(&mut self, op: &Operator) -> bool {
        match (op.kind, op.pass) {
            (OpKind::EmbeddingBag { tables, width, .. }, OpPass::Forward) => {
                self.look_up(op, tables, width);
            }
            (OpKind::EmbeddingBag { tables, lookups, width }, _) => {
                self.scatter_row_grads(op, tables, lookups, width);
            }
            (OpKind::Interact { tables, width, .. }, _) => self.interact(op, tables, width),
            _ => return false,
        }
        true
    }

    /// Number of a microbatch's samples on all replicas, and on one.
    fn samples(&self) -> (u64, u64) {
        (self.graph.batch, self.graph.batch / u64::from(self.strategy.dp))
    }

    /// Dimensions of the exchanged sums of rows: full rows of own samples, or one rank's tables.
    fn exchanged(&self, tables: u64, width: u64) -> [u64; 2] {
        let (all, own) = self.samples();
        match self.tables() {
            TableSharding::Table => [all, slots(tables, self.strategy.dp) * width],
            TableSharding::Replicate | TableSharding::Row | TableSharding::Auto => {
                [own, tables * width]
            }
        }
    }

    fn look_up(&mut self, op: &Operator, tables: u64, width: u64) {
        let (all, _) = self.samples();
        let (ids, pooled, table) = (op.inputs[0], op.outputs[0], op.params[0]);
        let placement = match self.tables() {
            TableSharding::Replicate | TableSharding::Auto => Placement::Replicate,
            TableSharding::Row => Placement::ROWS,
            TableSharding::Table => Placement::Shard { dim: 0, layout: Layout::Whole },
        };
        let ranks = self.strategy.dp;
        let rows = &self.layer.param(table).blocks;
        let local = match self.tables() {
            TableSharding::Replicate | TableSharding::Auto => rows.iter().sum(),
            TableSharding::Row => rows.iter().map(|rows| rows.div_ceil(u64::from(ranks))).sum(),
            TableSharding::Table => {
                let seats = assign(rows, ranks);
                let held = |(seat, rows): (&TableSlot, &u64)| seat.first + rows;
                seats.iter().zip(rows).map(held).max().unwrap_or(0)
            }
        };
        let held = &mut self.params[table.index()];
        (held.placement, held.local) = (placement, [local, width]);
        let ids = match table_update(self.strategy) {
            TableUpdate::Replicated => self.define(ids, Placement::Replicate),
            // Every replica knows the lookups of all samples.
            TableUpdate::SparseStep | TableUpdate::Sharded => {
                self.define_as(ids, Placement::Replicate, |dims| dims[0] = all)
            }
        };
        let (from, to) = match self.tables() {
            TableSharding::Replicate | TableSharding::Auto => {
                (Placement::Replicate, Placement::Replicate)
            }
            TableSharding::Row => (Placement::SUM, Placement::TOKENS),
            TableSharding::Table => (Placement::WIDTH, Placement::TOKENS),
        };
        let dims = match self.tables() {
            TableSharding::Row => [all, tables * width],
            _ => self.exchanged(tables, width),
        };
        let made = self.define_as(pooled, from, |d| *d = dims);
        let (inputs, outputs) = (vec![ids], vec![made]);
        let params = op.params.clone();
        self.items.push(Item::Op { kind: op.kind, part: op.pass, inputs, params, outputs });
        let dims = self.exchanged(tables, width);
        self.exchange_rows(pooled, made, (from, to), dims);
    }

    /// Exchanges the gradients of sums to the ranks of the summed rows, for their step or gradient.
    fn scatter_row_grads(&mut self, op: &Operator, tables: u64, lookups: u64, width: u64) {
        let (all, own) = self.samples();
        let (gradient, ids) = (op.inputs[0], op.inputs[1]);
        let from = self.versions[gradient.index()].last().copied().unwrap_or_default();
        let learn = table_update(self.strategy);
        let here = self.strategy.dp == 1 || learn == TableUpdate::Replicated;
        let (ways, dims) = match self.tables() {
            TableSharding::Replicate | TableSharding::Auto if here => {
                ((Placement::Replicate, Placement::Replicate), [own, tables * width])
            }
            TableSharding::Replicate | TableSharding::Auto | TableSharding::Row => {
                ((Placement::TOKENS, Placement::Replicate), [all, tables * width])
            }
            TableSharding::Table => {
                ((Placement::TOKENS, Placement::WIDTH), self.exchanged(tables, width))
            }
        };
        let whole = self.exchange_rows(gradient, from, ways, dims);
        let ids = self.versions[ids.index()].last().copied().unwrap_or_default();
        let (inputs, params) = (vec![whole, ids], op.params.clone());
        let kind = match learn {
            TableUpdate::SparseStep => OpKind::StepRows { tables, lookups, width },
            TableUpdate::Sharded | TableUpdate::Replicated => op.kind,
        };
        self.items.push(Item::Op { kind, part: op.pass, inputs, params, outputs: Vec::new() });
    }

    fn interact(&mut self, op: &Operator, tables: u64, width: u64) {
        let parts = if self.tables() == TableSharding::Table { self.strategy.dp } else { 1 };
        let kind = OpKind::Interact { tables, width, parts };
        let dims = self.exchanged(tables, width);
        let last = |sharder: &Self, t: TensorId| {
            sharder.versions[t.index()].last().copied().unwrap_or_default()
        };
        let inputs = op.inputs.iter().map(|&t| last(self, t)).collect();
        let outputs = match op.pass {
            OpPass::Forward => vec![self.define(op.outputs[0], Placement::Replicate)],
            OpPass::BackwardInput | OpPass::BackwardWeight => {
                let x = self.define(op.outputs[0], Placement::Replicate);
                vec![x, self.define_as(op.outputs[1], Placement::Replicate, |d| *d = dims)]
            }
        };
        let params = Vec::new();
        self.items.push(Item::Op { kind, part: op.pass, inputs, params, outputs });
    }

    /// Converts a value to another placement along the replicas, if they differ.
    fn exchange_rows(
        &mut self,
        tensor: TensorId,
        from: usize,
        (has, wants): (Placement, Placement),
        dims: [u64; 2],
    ) -> usize {
        let Ok(Conversion::Collective(kind, reduction)) = conversion(has, wants) else {
            return from;
        };
        let to = self.define_as(tensor, Placement::Replicate, |d| *d = dims);
        self.values[from].placement = has;
        self.items.push(Item::Convert { axis: Axis::Dp, kind, reduction, from, to });
        to
    }

    /// Defines a value whose dimensions differ from its tensor's.
    fn define_as(
        &mut self,
        tensor: TensorId,
        placement: Placement,
        change: impl FnOnce(&mut [u64; 2]),
    ) -> usize {
        let id = self.define(tensor, Placement::Replicate);
        self.values[id].placement = placement;
        change(&mut self.values[id].dims);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_table_has_a_seat_of_its_own(
            tables in prop::collection::vec(1u64..1000, 1..40), ranks in 1u32..9,
        ) {
            let seats = assign(&tables, ranks);
            let places = slots(tables.len() as u64, ranks);
            for (at, seat) in seats.iter().enumerate() {
                prop_assert!(seat.rank < ranks && seat.slot < places);
                for (other, rows) in seats.iter().zip(&tables).take(at) {
                    let same = other.rank == seat.rank;
                    prop_assert!(!same || other.slot != seat.slot);
                    let apart = seat.first >= other.first + rows
                        || other.first >= seat.first + tables[at];
                    prop_assert!(!same || apart);
                }
            }
        }
    }

    #[test]
    fn large_tables_go_apart() {
        let seats = assign(&[10, 1000, 20, 900], 2);
        assert_ne!(seats[1].rank, seats[3].rank);
        assert_eq!(seats[2].rank, seats[3].rank, "to the rank with fewer rows");
    }
}
