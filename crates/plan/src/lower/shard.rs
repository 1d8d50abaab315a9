//! Sharding of a layer along the tensor-parallel axis; `experts` covers the sharding of experts.
//!
//! Each operator's row gives its input and output placements ([`Sharding`]). A conversion is inserted only if an input is
//! available in other placements only. Megatron's `f` and `g`, the gathers and scatters of sequence
//! parallelism and the vocabulary-parallel loss all result from it.

use super::experts::{self, At};
use super::recompute::{self, SavedActivations};
use super::split_backward::{self, Halves};
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{Graph, LayerGraph, OpKind, OpPass, Operator, Sharding, TensorClass};
use crate::ids::{ParamId, TensorId};
use crate::mesh::Axis;
use crate::spec::{Conversion, Placement, conversion};
use crate::strategy::Strategy;

/// A value of the sharded layer: a tensor in one placement.
#[derive(Clone, Debug)]
pub(super) struct Value {
    pub(super) placement: Placement,
    /// Dimensions of one rank's shard.
    pub(super) dims: [u64; 2],
    pub(super) dtype: DType,
    pub(super) name: String,
    pub(super) class: TensorClass,
    /// True if it is the result of an all_gather: gathering again is cheaper than saving it.
    pub(super) gathered: bool,
    /// Location of tokens in expert order; `None` for values in token order.
    pub(super) at: Option<At>,
}

pub(super) type ValueId = usize;

/// A step of a pass over a layer.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Op {
        kind: OpKind,
        part: OpPass,
        inputs: Vec<ValueId>,
        params: Vec<ParamId>,
        outputs: Vec<ValueId>,
    },
    Convert {
        axis: Axis,
        kind: CollectiveKind,
        reduction: Reduction,
        from: ValueId,
        to: ValueId,
    },
    /// Every rank sends a value to the next one along the context-parallel axis.
    Shift {
        from: ValueId,
        to: ValueId,
    },
}

/// One rank's shard of a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardedParam {
    pub(super) placement: Placement,
    pub(super) local: [u64; 2],
    /// True if its gradient must still be summed along the tensor-parallel axis.
    pub(super) partial: bool,
    /// True if its gradient is added to one that another layer's backward pass has started.
    pub(super) adds: bool,
    /// True if it is an embedding table, which is always f32.
    pub(super) table: bool,
}

/// One rank's shard of a layer.
#[derive(Clone, Debug)]
pub(super) struct ShardedLayer {
    pub(super) values: Vec<Value>,
    pub(super) params: Vec<ShardedParam>,
    pub(super) forward: Vec<Item>,
    /// Items that are recomputed before the gradients.
    pub(super) recompute: Vec<Item>,
    pub(super) backward: Vec<Item>,
    /// The two halves of the backward pass, if the schedule splits it.
    pub(super) halves: Option<Halves>,
    /// Values that the forward pass must save for the backward pass.
    pub(super) saved: Vec<ValueId>,
    pub(super) input: Option<ValueId>,
    pub(super) output: Option<ValueId>,
    pub(super) output_grad: Option<ValueId>,
    pub(super) input_grad: Option<ValueId>,
}

/// Shards a layer that saves the activations `keeps` for its backward pass.
pub(super) fn shard(
    graph: &Graph,
    layer: &LayerGraph,
    strategy: &Strategy,
    keeps: SavedActivations,
) -> ShardedLayer {
    let mut sharder = Sharder::new(graph, layer, strategy);
    let stream = sharder.stream();
    let input = layer.input.map(|t| sharder.define(t, stream));
    for op in &layer.forward {
        sharder.apply(op);
    }
    let output = layer.output.map(|t| sharder.need(t, stream));
    let forward = std::mem::take(&mut sharder.items);

    // The backward pass starts from the saved values: no partial sums, no gathered values.
    for versions in &mut sharder.versions {
        versions.retain(|&v| {
            let value = &sharder.values[v];
            let unsummed = matches!(value.placement, Placement::Partial(_));
            !value.gathered && !unsummed && value.at != Some(At::Unsummed)
        });
    }
    for op in &layer.forward {
        if keeps.is_recomputed(layer, op, strategy.tp > 1) {
            for output in &op.outputs {
                sharder.versions[output.index()].clear();
            }
            // Recomputation must not count accumulated values twice.
            let mut op = op.clone();
            op.outputs.retain(|&t| !layer.tensor(t).class.adds_up());
            sharder.apply(&op);
        }
    }
    let mut recompute = std::mem::take(&mut sharder.items);

    let output_grad = layer.output_grad.map(|t| sharder.define(t, stream));
    for op in &layer.backward {
        sharder.apply(op);
    }
    let input_grad = layer.input_grad.map(|t| sharder.need(t, stream));
    let backward = std::mem::take(&mut sharder.items);
    if keeps != SavedActivations::InputOfAll {
        recompute::prune(&mut recompute, &external(backward.iter(), output_grad));
    }
    let mut saved = external(recompute.iter().chain(&backward), output_grad);
    // What samples give is loaded into buffers that stay, also where only the forward pass reads it.
    let given = external(forward.iter(), input).into_iter();
    saved.extend(given.filter(|&v| !saved.contains(&v)).collect::<Vec<_>>());
    let (values, params) = (sharder.values, sharder.params);
    let split = strategy.schedule.splits_backward();
    let halves = split.then(|| split_backward::halves(&backward, input_grad, strategy));
    ShardedLayer {
        values,
        params,
        forward,
        recompute,
        backward,
        halves,
        saved,
        input,
        output,
        output_grad,
        input_grad,
    }
}

/// Values that the items read but do not produce.
pub(super) fn external<'a>(
    items: impl Iterator<Item = &'a Item>,
    given: Option<ValueId>,
) -> Vec<ValueId> {
    let mut made: Vec<ValueId> = given.into_iter().collect();
    let mut outside = Vec::new();
    for item in items {
        let (reads, writes): (&[ValueId], &[ValueId]) = match item {
            Item::Op { inputs, outputs, .. } => (inputs, outputs),
            Item::Convert { from, to, .. } | Item::Shift { from, to } => {
                (std::slice::from_ref(from), std::slice::from_ref(to))
            }
        };
        for read in reads {
            if !made.contains(read) && !outside.contains(read) {
                outside.push(*read);
            }
        }
        made.extend_from_slice(writes);
    }
    outside
}

pub(super) struct Sharder<'a> {
    pub(super) graph: &'a Graph,
    pub(super) layer: &'a LayerGraph,
    pub(super) strategy: &'a Strategy,
    pub(super) values: Vec<Value>,
    /// Available placements of each tensor.
    pub(super) versions: Vec<Vec<ValueId>>,
    pub(super) items: Vec<Item>,
    pub(super) params: Vec<ShardedParam>,
    /// Number of rows for the tokens that one rank sends to the experts of another.
    pub(super) region: u64,
}

impl<'a> Sharder<'a> {
    fn new(graph: &'a Graph, layer: &'a LayerGraph, strategy: &'a Strategy) -> Self {
        let whole = |p: &crate::graph::Param| ShardedParam {
            placement: Placement::Replicate,
            local: p.dims,
            partial: false,
            adds: p.adds,
            table: p.sparse,
        };
        let routing = layer.forward.iter().find_map(|op| match op.kind {
            OpKind::Route(routing) => Some(routing),
            _ => None,
        });
        let mut sharder = Self {
            graph,
            layer,
            strategy,
            values: Vec::new(),
            versions: vec![Vec::new(); layer.tensors.len()],
            items: Vec::new(),
            params: layer.params.iter().map(whole).collect(),
            region: 0,
        };
        if let Some(routing) = routing {
            let tokens = sharder.local_tokens(sharder.stream());
            let sizes = (routing.experts, routing.topk);
            sharder.region = experts::region_rows(strategy, tokens, routing.capacity, sizes);
        }
        sharder
    }

    /// Number of a microbatch's tokens on one rank.
    fn local_tokens(&self, placement: Placement) -> u64 {
        let replicas = u64::from(self.strategy.dp) * u64::from(self.strategy.cp);
        let tokens = self.graph.batch * self.graph.seq / replicas;
        if placement == Placement::TOKENS { tokens / self.tp() } else { tokens }
    }

    fn tp(&self) -> u64 {
        u64::from(self.strategy.tp)
    }

    /// Placement of the residual stream.
    pub(super) fn stream(&self) -> Placement {
        if self.strategy.sp && self.tp() > 1 { Placement::TOKENS } else { Placement::Replicate }
    }

    /// Defines a value of a tensor; its other versions stay available.
    pub(super) fn define(&mut self, tensor: TensorId, placement: Placement) -> ValueId {
        let logical = self.layer.tensor(tensor);
        let replicas = u64::from(self.strategy.dp) * u64::from(self.strategy.cp);
        let mut dims = logical.dims;
        if dims[0] == self.graph.batch * self.graph.seq {
            dims[0] /= replicas;
        }
        match placement {
            Placement::Shard { dim: 0, .. } => dims[0] /= self.tp(),
            Placement::Shard { .. } => dims[1] = dims[1].div_ceil(self.tp()),
            Placement::Replicate | Placement::Partial(_) | Placement::FlatShard => {}
        }
        let dtype = match logical.class {
            TensorClass::Tokens
            | TensorClass::Targets
            | TensorClass::Lookahead(_)
            | TensorClass::Index
            | TensorClass::Counts => DType::U32,
            TensorClass::Activation | TensorClass::Features | TensorClass::Dispatched => {
                self.strategy.activation_dtype()
            }
            TensorClass::Statistic | TensorClass::Loss | TensorClass::Dropped => DType::F32,
        };
        let value = Value {
            placement,
            dims,
            dtype,
            name: logical.name.clone(),
            class: logical.class,
            gathered: false,
            at: None,
        };
        self.values.push(value);
        let id = self.values.len() - 1;
        self.versions[tensor.index()].push(id);
        id
    }

    /// Returns the tensor in a placement, converted if it is not available in it.
    pub(super) fn need(&mut self, tensor: TensorId, placement: Placement) -> ValueId {
        let versions = &self.versions[tensor.index()];
        let held = |v: &&ValueId| {
            let value = &self.values[**v];
            value.placement == placement && value.at.is_none()
        };
        if let Some(&v) = versions.iter().find(held) {
            return v;
        }
        let Some(&from) = versions.last() else {
            // Tokens and targets are inputs of the model, replicated on every rank.
            return self.define(tensor, placement);
        };
        match conversion(self.values[from].placement, placement) {
            Ok(Conversion::Collective(kind, reduction)) => {
                let to = self.define(tensor, placement);
                self.values[to].gathered = kind == CollectiveKind::AllGather;
                self.items.push(Item::Convert { axis: Axis::Tp, kind, reduction, from, to });
                to
            }
            // The rules never need a slice or an impossible conversion; a new rule that does is a
            // bug that every test of this layer hits.
            Ok(Conversion::None | Conversion::Slice) | Err(_) => {
                unreachable!(
                    "{} of {}: no way to {placement}",
                    self.values[from].name, self.layer.name
                )
            }
        }
    }

    fn apply(&mut self, op: &Operator) {
        if self.on_tables(op) {
            return;
        }
        if experts::is_expert(self, op) {
            return self.apply_expert(op);
        }
        let rule = self.rule(op);
        let mut inputs: Vec<ValueId> =
            op.inputs.iter().zip(&rule.inputs).map(|(&t, &p)| self.need(t, p)).collect();
        for (&tensor, input) in op.inputs.iter().zip(&mut inputs) {
            *input = self.affinities(op.kind, tensor, *input);
        }
        let outputs: Vec<ValueId> =
            op.outputs.iter().zip(&rule.outputs).map(|(&t, &p)| self.define(t, p)).collect();
        if let Some(how) = rule.params {
            for param in &op.params {
                self.cut_param(*param, how);
            }
        }
        if rule.partial_gradient && op.pass == OpPass::BackwardWeight {
            for param in &op.params {
                self.params[param.index()].partial = true;
            }
        }
        let kind = self.localize(op.kind);
        let params = op.params.clone();
        self.items.push(Item::Op { kind, part: op.pass, inputs, params, outputs });
        if let (OpKind::BatchSums { .. }, true) = (kind, self.sums_over_replicas()) {
            self.sum_over_replicas(op.outputs[0]);
        }
        if let (OpKind::Attention { heads, seq, scores }, true) = (kind, self.strategy.cp > 1)
            && op.pass != OpPass::BackwardWeight
        {
            self.ring(heads, seq, scores, op.pass);
        }
    }

    /// Returns true if batch norms cover the microbatches of all replicas.
    fn sums_over_replicas(&self) -> bool {
        self.strategy.sync_batch_norm && self.strategy.dp > 1
    }

    /// Sums the value of a tensor that was just produced over all replicas.
    fn sum_over_replicas(&mut self, tensor: TensorId) {
        let Some(&from) = self.versions[tensor.index()].last() else { return };
        self.values[from].placement = Placement::SUM;
        let to = self.define(tensor, Placement::Replicate);
        let (kind, reduction) = (CollectiveKind::AllReduce, Reduction::Sum);
        self.items.push(Item::Convert { axis: Axis::Dp, kind, reduction, from, to });
    }

    fn cut_param(&mut self, param: ParamId, placement: Placement) {
        let tp = self.tp();
        let mut local = self.layer.param(param).dims;
        if let Placement::Shard { dim, .. } = placement {
            local[usize::from(dim)] = local[usize::from(dim)].div_ceil(tp);
        }
        self.params[param.index()] =
            ShardedParam { placement, local, ..self.params[param.index()] };
    }

    /// Converts an operator to the sizes of one rank's shard, e.g. its heads or pixels.
    pub(super) fn localize(&self, kind: OpKind) -> OpKind {
        match kind.cut(self.tp()) {
            OpKind::Attention { heads, seq, scores } => {
                OpKind::Attention { heads, seq: seq / u64::from(self.strategy.cp), scores }
            }
            OpKind::BatchNorm { channels, eps, pixels, over, share } => {
                let dp = self.strategy.dp;
                let (pixels, share) = (pixels / u64::from(dp), share / f64::from(dp));
                let over = if self.sums_over_replicas() { dp } else { over };
                OpKind::BatchNorm { channels, eps, pixels, over, share }
            }
            other => self.localize_expert(other),
        }
    }

    /// Input, output and parameter placements of an operator.
    fn rule(&self, op: &Operator) -> Rule {
        let same = |placement: Placement| Rule {
            inputs: vec![placement; op.inputs.len()],
            outputs: vec![placement; op.outputs.len()],
            params: None,
            partial_gradient: false,
        };
        if self.tp() == 1 {
            return same(Placement::Replicate);
        }
        let (stream, width) = (self.stream(), Placement::WIDTH);
        let on_stream = || Rule { partial_gradient: stream == Placement::TOKENS, ..same(stream) };
        match op.kind.row().sharding {
            Sharding::Replicated => same(Placement::Replicate),
            Sharding::Stream => on_stream(),
            Sharding::Width => same(width),
            Sharding::WidthWithParams => Rule { params: Some(width), ..same(width) },
            Sharding::WidthWithPartialGradients => Rule { partial_gradient: true, ..same(width) },
            Sharding::LikeInput => match op.inputs.iter().any(|&t| self.held(t) == Some(width)) {
                true => Rule { params: Some(width), ..same(width) },
                false => on_stream(),
            },
            Sharding::Routed => match op.pass {
                OpPass::Forward => Rule {
                    inputs: vec![Placement::Replicate],
                    outputs: op.outputs.iter().map(|&t| self.routed(t)).collect(),
                    ..same(stream)
                },
                OpPass::BackwardInput => {
                    Rule { inputs: vec![stream, Placement::Replicate], ..same(stream) }
                }
                OpPass::BackwardWeight => on_stream(),
            },
            Sharding::Forms(forms) => {
                let (inputs, outputs) = forms.of(op.pass);
                let (inputs, outputs) = (inputs.to_vec(), outputs.to_vec());
                Rule { inputs, outputs, params: forms.params, partial_gradient: false }
            }
        }
    }

    /// Placement of a routing's result: a row for each of a rank's tokens, or a count.
    fn routed(&self, tensor: TensorId) -> Placement {
        match self.layer.tensor(tensor).class.adds_up() {
            true => Placement::Replicate,
            false => self.stream(),
        }
    }

    /// Placement in which a tensor was last produced.
    fn held(&self, tensor: TensorId) -> Option<Placement> {
        self.versions[tensor.index()].last().map(|&v| self.values[v].placement)
    }
}

struct Rule {
    inputs: Vec<Placement>,
    outputs: Vec<Placement>,
    params: Option<Placement>,
    partial_gradient: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph;
    use crate::model::built_in;

    fn collectives(items: &[Item]) -> Vec<CollectiveKind> {
        let kinds = items.iter().filter_map(|item| match item {
            Item::Convert { kind, .. } => Some(*kind),
            Item::Op { .. } | Item::Shift { .. } => None,
        });
        kinds.collect()
    }

    fn sharded(layer: &str, sp: bool, keeps: SavedActivations) -> ShardedLayer {
        let model = built_in::get("mini").unwrap().unwrap();
        let strategy = Strategy { tp: 2, sp, seq: model.seq, ..Strategy::default() };
        let graph = graph::build(&model, 1, model.seq, model.seq);
        let kind = graph.kinds.iter().find(|k| k.name == layer).unwrap();
        shard(&graph, kind, &strategy, keeps)
    }

    #[test]
    fn megatron_has_two_all_reduces_each_way() {
        use CollectiveKind::AllReduce;
        let block = sharded("block", false, SavedActivations::All);
        assert_eq!(collectives(&block.forward), [AllReduce, AllReduce]);
        assert_eq!(collectives(&block.backward), [AllReduce, AllReduce]);
        assert!(block.params.iter().all(|p| !p.partial));
    }

    #[test]
    fn sequence_parallelism_gathers_and_scatters() {
        use CollectiveKind::{AllGather, ReduceScatter};
        let block = sharded("block", true, SavedActivations::All);
        assert_eq!(
            collectives(&block.forward),
            [AllGather, ReduceScatter, AllGather, ReduceScatter]
        );
        // Backward gathers the gradients, and the inputs of the column-parallel GEMMs again.
        assert_eq!(
            collectives(&block.backward),
            [AllGather, AllGather, ReduceScatter, AllGather, AllGather, ReduceScatter]
        );
        assert!(block.params.iter().any(|p| p.partial));
    }

    #[test]
    fn the_vocabulary_parallel_loss_is_a_max_and_a_sum_of_two() {
        let head = sharded("head", false, SavedActivations::All);
        let reductions: Vec<Reduction> = head
            .forward
            .iter()
            .filter_map(|item| match item {
                Item::Convert { reduction, .. } => Some(*reduction),
                Item::Op { .. } | Item::Shift { .. } => None,
            })
            .collect();
        assert_eq!(reductions, [Reduction::Max, Reduction::Sum]);
    }

    #[test]
    fn full_recomputation_keeps_the_input_only() {
        let block = sharded("block", false, SavedActivations::Input);
        assert_eq!(block.saved, [block.input.unwrap()]);
        let kept = sharded("block", false, SavedActivations::All).saved.len();
        let selective = sharded("block", false, SavedActivations::AllButAttention).saved.len();
        assert_eq!(kept, selective + 2, "attention's output and denominators are not kept");
    }

    #[test]
    fn what_nobody_reads_is_not_computed_or_exchanged_again() {
        use CollectiveKind::AllReduce;
        let block = sharded("block", false, SavedActivations::Input);
        assert_eq!(collectives(&block.recompute), [AllReduce]);
        let whole = sharded("block", false, SavedActivations::InputOfAll);
        assert_eq!(collectives(&whole.recompute), [AllReduce, AllReduce]);
        assert_eq!(whole.saved, [whole.input.unwrap()]);
        // Values summed over ranks are saved.
        let selective = sharded("block", false, SavedActivations::Attention);
        assert_eq!(collectives(&selective.recompute), []);
    }
}
