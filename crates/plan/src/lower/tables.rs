//! How tables of a recommendation model are dealt out to replicas, which keep networks whole.
//!
//! ```text
//! replicate  forward: own samples                          backward: gradients of all samples gathered
//! row        forward: part of every sum, then              backward: gradients of all samples gathered
//!            reduce_scatter to the samples' replicas
//! table      forward: whole sums of own tables, then       backward: all_to_all back
//!            all_to_all to the samples' replicas
//! ```
//!
//! How rows learn depends on what an update needs ([`Learn`]). Plain descent of one microbatch wants no
//! gradient as large as a table: where the gradients of the sums are, the rows that were looked up take
//! their step at once, and nothing reads a row between its step and the next iteration. Everything else
//! adds gradients up over microbatches and gives every row a state, as other parameters have it: dealt out with
//! the rows, which then have nobody to be reduced with; or on every replica, of its own samples, and reduced,
//! served or compared as the networks are.
//!
//! Tables stay f32 whatever the networks are. Rows that were looked up once must not lose small steps, and
//! a copy in 16 bits beside the exact rows would take more memory, not less.

use super::role::Role;
use super::shard::{Item, Sharder};
use crate::dtype::DType;
use crate::graph::{OpKind, Operator, Part};
use crate::ids::{LayerId, ParamId, TensorId};
use crate::mesh::Axis;
use crate::program::{Bucket, MemoryKind, View};
use crate::spec::{Conversion, Layout, Placement, conversion};
use crate::strategy::{OptimizerKind, Strategy, Sync, Tables};
use std::ops::Range;

/// How rows of tables learn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learn {
    /// They take their step where they are looked up.
    AtOnce,
    /// They have gradients and a state, where they are held and nowhere else.
    Apart,
    /// They are on every replica, with the gradients of that one's samples, as other parameters are.
    Together,
}

/// How rows learn under a strategy.
pub(super) fn learn(s: &Strategy) -> Learn {
    let plain = s.optimizer == OptimizerKind::Sgd && s.microbatches() == 1;
    match held(s) {
        _ if plain && in_step(s) && s.schedule.flushes() => Learn::AtOnce,
        Tables::Table | Tables::Row => Learn::Apart,
        Tables::Replicate | Tables::Auto => Learn::Together,
    }
}

/// How tables are held, where there is a choice.
pub(super) fn held(s: &Strategy) -> Tables {
    match s.tables {
        _ if s.dp == 1 => Tables::Replicate,
        // Whoever is not waited for cannot be asked for rows.
        Tables::Auto if !in_step(s) => Tables::Replicate,
        tables => tables.settled(),
    }
}

/// Whether all replicas run the same microbatch at a time, on the same weights.
pub(super) fn in_step(s: &Strategy) -> bool {
    s.sync == Sync::AllReduce && s.local.is_none()
}

/// Where a role's tables lie whose rows take their own steps.
#[derive(Clone, Debug)]
pub(super) struct TableState {
    pub(super) shape: super::bucket::BucketShape,
    pub(super) params: View,
}

impl TableState {
    /// The bucket as the plan declares it: one without gradients, which no step is taken for.
    pub(super) fn finish(&self) -> Bucket {
        Bucket {
            name: self.shape.name.clone(),
            elements: self.shape.elements,
            entries: self.shape.entries.clone(),
            params: self.params,
            grads: View { len: 0, ..self.params },
            master: None,
            moments: Vec::new(),
            stored: Vec::new(),
            gauge: None,
            shard: None,
            updated: true,
        }
    }
}

impl Role<'_> {
    /// Declares the tables of a virtual stage, if it has any whose rows take their own steps.
    pub(super) fn declare_tables(&mut self, layers: Range<usize>) {
        if learn(&self.context.strategy) != Learn::AtOnce {
            return;
        }
        let Some(shape) = self.context.deal().tables(layers) else { return };
        let (dtype, kind) = (DType::F32, MemoryKind::Parameters);
        let buffer = self.buffer("tables.param".into(), dtype, shape.elements, 1, kind);
        self.tables = Some(TableState { params: self.whole(buffer), shape });
    }

    /// Where a parameter lies, if it is a table whose rows take their own steps.
    pub(super) fn table_view(&self, layer: usize, param: ParamId) -> Option<View> {
        let tables = self.tables.as_ref()?;
        let owners = &tables.shape.owners;
        let at = owners.iter().position(|&owner| owner == (LayerId::from(layer), param))?;
        let entry = &tables.shape.entries[at];
        Some(View { offset: entry.offset, len: entry.elements(), ..tables.params })
    }
}

/// Whole tables, dealt out: the largest first, each to the rank with the fewest rows so far that has a
/// place left. All ranks have as many places.
pub fn assign(tables: &[u64], ranks: u32) -> Vec<Seat> {
    let places = slots(tables.len() as u64, ranks);
    let mut held = vec![(0u64, 0u64); ranks.max(1) as usize];
    let mut order: Vec<usize> = (0..tables.len()).collect();
    order.sort_by_key(|&table| (std::cmp::Reverse(tables[table]), table));
    let mut seats = vec![Seat::default(); tables.len()];
    for table in order {
        let free = (0..held.len()).filter(|&rank| held[rank].1 < places);
        let rank = free.min_by_key(|&rank| (held[rank].0, rank)).unwrap_or(0);
        seats[table] = Seat { rank: rank as u32, slot: held[rank].1, first: held[rank].0 };
        held[rank].0 += tables[table];
        held[rank].1 += 1;
    }
    seats
}

/// Tables that a rank has places for.
pub fn slots(tables: u64, ranks: u32) -> u64 {
    tables.div_ceil(u64::from(ranks.max(1)))
}

/// Where a table is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seat {
    /// Which of the ranks holds it.
    pub rank: u32,
    /// Its place among that rank's tables.
    pub slot: u64,
    /// Rows of that rank before it.
    pub first: u64,
}

impl Sharder<'_> {
    fn tables(&self) -> Tables {
        held(self.strategy)
    }

    /// Applies an operator on tables or on what comes out of them, if it is one.
    pub(super) fn on_tables(&mut self, op: &Operator) -> bool {
        match (op.kind, op.part) {
            (OpKind::EmbeddingBag { tables, width, .. }, Part::Forward) => {
                self.look_up(op, tables, width);
            }
            (OpKind::EmbeddingBag { tables, lookups, width }, _) => {
                self.teach_rows(op, tables, lookups, width);
            }
            (OpKind::Interact { tables, width, .. }, _) => self.meet(op, tables, width),
            _ => return false,
        }
        true
    }

    /// Samples of a microbatch on all replicas, and on one.
    fn samples(&self) -> (u64, u64) {
        (self.graph.batch, self.graph.batch / u64::from(self.strategy.dp))
    }

    /// The dimensions of what sums of rows are exchanged in: whole rows of samples, or one rank's tables.
    fn exchanged(&self, tables: u64, width: u64) -> [u64; 2] {
        let (all, own) = self.samples();
        match self.tables() {
            Tables::Table => [all, slots(tables, self.strategy.dp) * width],
            Tables::Replicate | Tables::Row | Tables::Auto => [own, tables * width],
        }
    }

    fn look_up(&mut self, op: &Operator, tables: u64, width: u64) {
        let (all, _) = self.samples();
        let (ids, pooled, table) = (op.inputs[0], op.outputs[0], op.params[0]);
        let placement = match self.tables() {
            Tables::Replicate | Tables::Auto => Placement::Replicate,
            Tables::Row => Placement::ROWS,
            Tables::Table => Placement::Shard { dim: 0, layout: Layout::Whole },
        };
        let ranks = self.strategy.dp;
        let rows = &self.layer.param(table).blocks;
        let local = match self.tables() {
            Tables::Replicate | Tables::Auto => rows.iter().sum(),
            Tables::Row => rows.iter().map(|rows| rows.div_ceil(u64::from(ranks))).sum(),
            Tables::Table => {
                let seats = assign(rows, ranks);
                let held = |(seat, rows): (&Seat, &u64)| seat.first + rows;
                seats.iter().zip(rows).map(held).max().unwrap_or(0)
            }
        };
        let held = &mut self.params[table.index()];
        (held.placement, held.local) = (placement, [local, width]);
        let ids = match learn(self.strategy) {
            Learn::Together => self.define(ids, Placement::Replicate),
            // Every replica knows what all samples look up.
            Learn::AtOnce | Learn::Apart => {
                self.define_as(ids, Placement::Replicate, |dims| dims[0] = all)
            }
        };
        let (from, to) = match self.tables() {
            Tables::Replicate | Tables::Auto => (Placement::Replicate, Placement::Replicate),
            Tables::Row => (Placement::SUM, Placement::TOKENS),
            Tables::Table => (Placement::WIDTH, Placement::TOKENS),
        };
        let dims = match self.tables() {
            Tables::Row => [all, tables * width],
            _ => self.exchanged(tables, width),
        };
        let made = self.define_as(pooled, from, |d| *d = dims);
        let (inputs, outputs) = (vec![ids], vec![made]);
        let params = op.params.clone();
        self.items.push(Item::Op { kind: op.kind, part: op.part, inputs, params, outputs });
        let dims = self.exchanged(tables, width);
        self.turn(pooled, made, (from, to), dims);
    }

    /// Brings the gradients of sums to the rows that were summed, for their step or for their gradient.
    fn teach_rows(&mut self, op: &Operator, tables: u64, lookups: u64, width: u64) {
        let (all, own) = self.samples();
        let (gradient, ids) = (op.inputs[0], op.inputs[1]);
        let from = self.versions[gradient.index()].last().copied().unwrap_or_default();
        let learn = learn(self.strategy);
        let here = self.strategy.dp == 1 || learn == Learn::Together;
        let (ways, dims) = match self.tables() {
            Tables::Replicate | Tables::Auto if here => {
                ((Placement::Replicate, Placement::Replicate), [own, tables * width])
            }
            Tables::Replicate | Tables::Auto | Tables::Row => {
                ((Placement::TOKENS, Placement::Replicate), [all, tables * width])
            }
            Tables::Table => ((Placement::TOKENS, Placement::WIDTH), self.exchanged(tables, width)),
        };
        let whole = self.turn(gradient, from, ways, dims);
        let ids = self.versions[ids.index()].last().copied().unwrap_or_default();
        let (inputs, params) = (vec![whole, ids], op.params.clone());
        let kind = match learn {
            Learn::AtOnce => OpKind::StepRows { tables, lookups, width },
            Learn::Apart | Learn::Together => op.kind,
        };
        self.items.push(Item::Op { kind, part: op.part, inputs, params, outputs: Vec::new() });
    }

    fn meet(&mut self, op: &Operator, tables: u64, width: u64) {
        let parts = if self.tables() == Tables::Table { self.strategy.dp } else { 1 };
        let kind = OpKind::Interact { tables, width, parts };
        let dims = self.exchanged(tables, width);
        let last = |sharder: &Self, t: TensorId| {
            sharder.versions[t.index()].last().copied().unwrap_or_default()
        };
        let inputs = op.inputs.iter().map(|&t| last(self, t)).collect();
        let outputs = match op.part {
            Part::Forward => vec![self.define(op.outputs[0], Placement::Replicate)],
            Part::InputGradient | Part::WeightGradient => {
                let x = self.define(op.outputs[0], Placement::Replicate);
                vec![x, self.define_as(op.outputs[1], Placement::Replicate, |d| *d = dims)]
            }
        };
        let params = Vec::new();
        self.items.push(Item::Op { kind, part: op.part, inputs, params, outputs });
    }

    /// Turns a value into another placement along the replicas, if that is another.
    fn turn(
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

    /// A value with other dimensions than its tensor's.
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
