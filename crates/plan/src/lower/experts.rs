//! Routing of tokens to experts on other ranks, and back.
//!
//! Along `ep` each rank holds some of the experts, and along `etp` a shard of each. A rank sorts
//! its tokens by expert into regions, one for each rank along `ep`. The conversion table determines
//! the rest:
//!
//! ```text
//!  cut by token ──all_to_all ep──► cut by expert ──all_gather etp──► whole, before an expert's first matrix
//!  cut by token ◄─all_to_all ep─── cut by expert ◄─reduce_scatter── unsummed, behind its last one
//! ```
//!
//! The size of a region is planned: the full capacity of its experts, or a multiple of the equal
//! share ([`Strategy::expert_buffer_factor`]). The counts, which travel the same way, tell the
//! number of occupied rows.

use super::shard::{Item, Sharder, ValueId};
use crate::collective::{CollectiveKind, Reduction};
use crate::graph::{LinearRole, OpKind, OpPass, Operator, Routing, TensorClass};
use crate::ids::{ParamId, TensorId};
use crate::mesh::Axis;
use crate::spec::{Conversion, Placement, conversion};
use crate::strategy::Strategy;

/// Location of tokens in expert order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    /// On the rank that owns the tokens.
    Home,
    /// On the ranks that hold their experts, distributed over the ranks along `etp`.
    Arrived,
    /// On all ranks that hold a shard of their experts.
    Gathered,
    /// The same, as partial sums.
    Unsummed,
    /// Affinities of whole sequences, on all ranks that hold parts of them.
    Sequences,
}

/// Returns true if an operator works on tokens in expert order.
pub(super) fn is_expert(sharder: &Sharder<'_>, op: &Operator) -> bool {
    let dispatched = |t: &TensorId| sharder.layer.tensor(*t).class == TensorClass::Dispatched;
    op.inputs.iter().chain(&op.outputs).any(dispatched)
}

/// Number of rows of one region.
///
/// An expert takes no token twice, so at most min(topk, experts of the region) rows per token
/// arrive. With a capacity, whole sequences bound it; without one, `expert_buffer_factor` times the
/// equal share.
pub(super) fn region_rows(
    strategy: &Strategy,
    tokens: u64,
    capacity: Option<u64>,
    (experts, topk): (u64, u64),
) -> u64 {
    let ep = u64::from(strategy.ep);
    let own = experts / ep;
    let most = tokens * topk.min(own);
    match capacity {
        Some(capacity) => {
            most.min(own.saturating_mul(strategy.micro_batch).saturating_mul(capacity))
        }
        None if ep == 1 => most,
        None => {
            let equal = tokens as f64 * topk as f64 / ep as f64;
            most.min((equal * strategy.expert_buffer_factor).ceil() as u64)
        }
    }
}

impl Sharder<'_> {
    /// Adds an operator on tokens in expert order.
    pub(super) fn apply_expert(&mut self, op: &Operator) {
        let tokens = self.stream();
        let (home, there) = (At::Home, self.gathered());
        let unsummed = if self.strategy.etp > 1 { At::Unsummed } else { there };
        let inputs: Vec<ValueId>;
        let outputs: Vec<ValueId>;
        match (op.kind, op.pass) {
            (OpKind::Dispatch { .. }, OpPass::Forward) => {
                inputs = op.inputs.iter().map(|&t| self.need(t, tokens)).collect();
                let [rows, slots, counts] = op.outputs[..] else { unreachable!("three results") };
                outputs = vec![
                    self.define_rows(rows, home, false),
                    self.define(slots, tokens),
                    self.define_rows(counts, home, false),
                ];
            }
            (OpKind::Dispatch { .. }, _) => {
                let [rows, slots] = op.inputs[..] else { unreachable!("two operands") };
                inputs = vec![self.need_rows(rows, home), self.need(slots, tokens)];
                outputs = vec![self.define(op.outputs[0], tokens)];
            }
            (OpKind::Combine { .. }, OpPass::Forward) => {
                let [rows, slots, gates] = op.inputs[..] else { unreachable!("three operands") };
                inputs = vec![
                    self.need_rows(rows, home),
                    self.need(slots, tokens),
                    self.need(gates, tokens),
                ];
                outputs = vec![self.define(op.outputs[0], tokens)];
            }
            (OpKind::Combine { .. }, _) => {
                let [dy, rows, slots, gates] = op.inputs[..] else { unreachable!("four operands") };
                inputs = vec![
                    self.need(dy, tokens),
                    self.need_rows(rows, home),
                    self.need(slots, tokens),
                    self.need(gates, tokens),
                ];
                let [drows, dgates] = op.outputs[..] else { unreachable!("two results") };
                outputs = vec![self.define_rows(drows, home, false), self.define(dgates, tokens)];
            }
            (OpKind::Return { .. }, OpPass::Forward) => {
                let [rows, slots] = op.inputs[..] else { unreachable!("two operands") };
                inputs = vec![self.need_rows(rows, home), self.need(slots, tokens)];
                outputs = vec![self.define(op.outputs[0], tokens)];
            }
            (OpKind::Return { .. }, _) => {
                inputs = op.inputs.iter().map(|&t| self.need(t, tokens)).collect();
                outputs = vec![self.define_rows(op.outputs[0], home, false)];
            }
            (OpKind::ExpertLinear { role, .. }, part) => {
                inputs = op.inputs.iter().map(|&t| self.need_rows(t, there)).collect();
                // True if the result has the expert's inner width.
                let inward = (role == LinearRole::Up) == (part == OpPass::Forward);
                let at = if inward { there } else { unsummed };
                outputs = op.outputs.iter().map(|&t| self.define_rows(t, at, inward)).collect();
                op.params.iter().for_each(|&param| self.cut_expert(param, role));
            }
            (OpKind::ExpertBias { .. }, OpPass::Forward) => {
                // Behind the second matrix, each rank along etp adds its share to its partial sum.
                let inward = !self.is_at(op.inputs[0], At::Unsummed);
                let at = if inward { there } else { unsummed };
                inputs =
                    vec![self.need_rows(op.inputs[0], at), self.need_rows(op.inputs[1], there)];
                outputs = op.outputs.iter().map(|&t| self.define_rows(t, at, inward)).collect();
                op.params.iter().for_each(|&param| self.cut_expert_bias(param, inward));
            }
            (OpKind::ExpertBias { .. }, _) => {
                inputs = op.inputs.iter().map(|&t| self.need_rows(t, there)).collect();
                outputs = Vec::new();
            }
            // Operators between an expert's matrices.
            (_, _) => {
                inputs = op.inputs.iter().map(|&t| self.need_rows(t, there)).collect();
                outputs = op.outputs.iter().map(|&t| self.define_rows(t, there, true)).collect();
            }
        }
        let (mut kind, part, params) = (self.localize(op.kind), op.pass, op.params.clone());
        if let (OpKind::ExpertBias { parts, .. }, Some(&first)) = (&mut kind, inputs.first())
            && self.values[first].at == Some(At::Unsummed)
        {
            *parts = self.strategy.etp.into();
        }
        self.items.push(Item::Op { kind, part, inputs, params, outputs });
    }

    fn gathered(&self) -> At {
        match (self.strategy.etp > 1, self.strategy.ep > 1) {
            (true, _) => At::Gathered,
            (false, true) => At::Arrived,
            (false, false) => At::Home,
        }
    }

    /// Defines a value of a tensor in expert order. `inner` is true if it is sharded along `etp`.
    fn define_rows(&mut self, tensor: TensorId, at: At, inner: bool) -> ValueId {
        let (ep, etp) = (u64::from(self.strategy.ep), u64::from(self.strategy.etp));
        let regions = match at {
            At::Home | At::Arrived => ep,
            At::Gathered | At::Unsummed => ep * etp,
            At::Sequences => unreachable!("affinities are not in expert order"),
        };
        let [_, width] = self.layer.tensor(tensor).dims;
        let counts = self.layer.tensor(tensor).class == TensorClass::Counts;
        let dims = if counts {
            [regions, width / ep]
        } else {
            [regions * self.region, if inner { width / etp } else { width }]
        };
        let id = self.define(tensor, Placement::Replicate);
        let value = &mut self.values[id];
        (value.dims, value.at) = (dims, Some(at));
        id
    }

    /// Returns a tensor in expert order at the location `at`, converted if necessary.
    fn need_rows(&mut self, tensor: TensorId, at: At) -> ValueId {
        let versions = &self.versions[tensor.index()];
        if let Some(&v) = versions.iter().find(|&&v| self.values[v].at == Some(at)) {
            return v;
        }
        // Preceding location on the path; a partial sum is nearest if there is one.
        let (by_token, by_expert) = (Placement::TOKENS, Placement::ROWS);
        let (before, axis, from, to) = match at {
            At::Gathered => (self.arrived(), Axis::Etp, Placement::TOKENS, Placement::Replicate),
            At::Arrived if self.is_at(tensor, At::Unsummed) => {
                (At::Unsummed, Axis::Etp, Placement::SUM, Placement::TOKENS)
            }
            At::Arrived => (At::Home, Axis::Ep, by_token, by_expert),
            At::Home if self.strategy.ep > 1 => (At::Arrived, Axis::Ep, by_expert, by_token),
            At::Home => (At::Unsummed, Axis::Etp, Placement::SUM, Placement::TOKENS),
            At::Unsummed => unreachable!("sums are made, not asked for"),
            At::Sequences => unreachable!("affinities are not in expert order"),
        };
        let from_value = self.need_rows(tensor, before);
        let Ok(Conversion::Collective(kind, reduction)) = conversion(from, to) else {
            unreachable!("a change of cut is a collective")
        };
        let value = self.define_rows(tensor, at, false);
        self.values[value].gathered = kind == CollectiveKind::AllGather;
        self.convert(axis, (kind, reduction), from_value, value);
        value
    }

    /// Returns true if ranks need all affinities of a sequence to route their own tokens, because
    /// its experts' loads are counted.
    fn on_whole_sequences(&self, routing: &Routing) -> bool {
        let counted = routing.capacity.is_some() || routing.balance > 0.0;
        counted && self.strategy.cp > 1
    }

    /// Affinities that a routing reads, gathered from all ranks that hold parts of its sequences.
    pub(super) fn affinities(&mut self, kind: OpKind, tensor: TensorId, own: ValueId) -> ValueId {
        let OpKind::Route(routing) = kind else { return own };
        if !self.on_whole_sequences(&routing)
            || self.layer.tensor(tensor).class != TensorClass::Activation
        {
            return own;
        }
        let versions = &self.versions[tensor.index()];
        if let Some(&v) = versions.iter().find(|&&v| self.values[v].at == Some(At::Sequences)) {
            return v;
        }
        let Ok(Conversion::Collective(kind, reduction)) =
            conversion(Placement::TOKENS, Placement::Replicate)
        else {
            unreachable!("what is cut by token is gathered")
        };
        let all = self.define(tensor, Placement::Replicate);
        let value = &mut self.values[all];
        value.dims[0] *= u64::from(self.strategy.cp);
        (value.at, value.gathered) = (Some(At::Sequences), true);
        self.convert(Axis::Cp, (kind, reduction), own, all);
        all
    }

    /// Location of tokens before they are gathered along `etp`.
    fn arrived(&self) -> At {
        if self.strategy.ep > 1 { At::Arrived } else { At::Home }
    }

    fn is_at(&self, tensor: TensorId, at: At) -> bool {
        self.versions[tensor.index()].iter().any(|&v| self.values[v].at == Some(at))
    }

    fn convert(
        &mut self,
        axis: Axis,
        (kind, reduction): (CollectiveKind, Reduction),
        from: ValueId,
        to: ValueId,
    ) {
        self.items.push(Item::Convert { axis, kind, reduction, from, to });
    }

    /// Shards an expert's matrix: along its outputs for up-projections, along its inputs otherwise.
    fn cut_expert(&mut self, param: ParamId, role: LinearRole) {
        let (ep, etp) = (u64::from(self.strategy.ep), u64::from(self.strategy.etp));
        let [rows, columns] = self.layer.param(param).dims;
        let (placement, local) = match (etp > 1, role) {
            (false, _) => (Placement::Replicate, [rows / ep, columns]),
            (true, LinearRole::Up) => (Placement::ROWS, [rows / ep / etp, columns]),
            (true, _) => (Placement::WIDTH, [rows / ep, columns / etp]),
        };
        let held = &mut self.params[param.index()];
        (held.placement, held.local) = (placement, local);
    }

    /// Shards an expert's bias: with the columns to which it is added if these are `inward`.
    fn cut_expert_bias(&mut self, param: ParamId, inward: bool) {
        let (ep, etp) = (u64::from(self.strategy.ep), u64::from(self.strategy.etp));
        let [experts, width] = self.layer.param(param).dims;
        let (placement, width) = match inward && etp > 1 {
            true => (Placement::WIDTH, width / etp),
            false => (Placement::Replicate, width),
        };
        let held = &mut self.params[param.index()];
        (held.placement, held.local) = (placement, [experts / ep, width]);
    }

    /// Converts an expert's operator to one rank's shard.
    pub(super) fn localize_expert(&self, kind: OpKind) -> OpKind {
        let (ep, etp) = (u64::from(self.strategy.ep), u64::from(self.strategy.etp));
        match kind {
            OpKind::Dispatch { experts, topk, regions: _ } => {
                OpKind::Dispatch { experts, topk, regions: ep }
            }
            OpKind::ExpertLinear { role, experts, regions: _, rows } => {
                // With equal load a rank receives as many tokens as it sends, per rank along `etp`.
                let share = u64::from(self.strategy.mesh().size() / self.strategy.pp.max(1));
                let equal = (rows * etp).div_ceil(share);
                let rows = equal.min(ep * etp * self.region);
                OpKind::ExpertLinear { role, experts: experts / ep, regions: ep * etp, rows }
            }
            OpKind::ExpertBias { experts, regions: _, parts } => {
                OpKind::ExpertBias { experts: experts / ep, regions: ep * etp, parts }
            }
            OpKind::Route(routing) => OpKind::Route(match self.on_whole_sequences(&routing) {
                true => Routing { parts: self.strategy.cp.into(), ..routing },
                false => Routing { seq: routing.seq / u64::from(self.strategy.cp), ..routing },
            }),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph;
    use crate::lower::recompute::SavedActivations;
    use crate::lower::shard::shard;
    use crate::model::built_in;

    /// Exchanges of the forward and the backward pass of a layer of experts.
    fn exchanges(strategy: Strategy) -> [Vec<(Axis, CollectiveKind)>; 2] {
        let model = built_in::get("mini-moe").unwrap().unwrap();
        let strategy = Strategy { seq: model.seq, ..strategy };
        let graph = graph::build(&model, u64::from(strategy.dp), model.seq, model.seq);
        let kind = graph.kinds.iter().find(|kind| kind.name == "experts").unwrap();
        let layer = shard(&graph, kind, &strategy, SavedActivations::All);
        [&layer.forward, &layer.backward].map(|items| {
            let of = |item: &Item| match item {
                Item::Convert { axis, kind, .. } => Some((*axis, *kind)),
                Item::Op { .. } | Item::Shift { .. } => None,
            };
            items.iter().filter_map(of).collect()
        })
    }

    #[test]
    fn tokens_and_counts_go_and_tokens_and_gradients_come_back() {
        let exchange = (Axis::Ep, CollectiveKind::AllToAll);
        let alone = exchanges(Strategy { dp: 4, ..Strategy::default() });
        assert_eq!(alone, [vec![], vec![]], "experts that all ranks hold");
        let [forward, backward] = exchanges(Strategy { dp: 4, ep: 4, ..Strategy::default() });
        assert_eq!(forward, [exchange; 3], "tokens, counts, and what became of the tokens");
        assert_eq!(backward, [exchange; 2], "gradients there and back");
    }

    #[test]
    fn parts_of_experts_gather_and_scatter() {
        let along = |kind| (Axis::Etp, kind);
        let exchange = (Axis::Ep, CollectiveKind::AllToAll);
        let [gather, scatter] =
            [CollectiveKind::AllGather, CollectiveKind::ReduceScatter].map(along);
        let [forward, backward] =
            exchanges(Strategy { dp: 4, ep: 2, etp: 2, ..Strategy::default() });
        assert_eq!(forward, [exchange, gather, exchange, gather, scatter, exchange]);
        // Gathered values are gathered again for the weight gradients that read them.
        assert_eq!(backward.iter().filter(|&&found| found == exchange).count(), 2);
        assert_eq!(backward.iter().filter(|&&found| found == scatter).count(), 1);
        let [forward, _] = exchanges(Strategy { dp: 2, etp: 2, ..Strategy::default() });
        assert_eq!(forward, [gather, gather, scatter], "nothing goes along an axis of one");
    }

    #[test]
    fn a_region_holds_what_can_come_or_so_many_shares() {
        let of = |ep, room, capacity| {
            let strategy =
                Strategy { ep, expert_buffer_factor: room, micro_batch: 2, ..Strategy::default() };
            region_rows(&strategy, 128, capacity, (8, 2))
        };
        assert_eq!(of(1, 1.0, None), 256, "every choice of every token");
        assert_eq!(of(4, 1.0, None), 64, "an equal share");
        assert_eq!(of(4, 1.5, None), 96);
        assert_eq!(of(8, 100.0, None), 128, "an expert takes a token once");
        assert_eq!(of(4, 1.0, Some(20)), 80, "two experts, two sequences, twenty of each");
        assert_eq!(of(4, 1.0, Some(1 << 60)), 256, "no more than there are");
    }
}
