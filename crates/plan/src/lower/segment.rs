//! Splits a pass over a layer into segments: sequences of operators between exchanges.
//!
//! A segment ends at the start of an exchange, and a new one starts at the first operator that
//! needs the exchange's result. Operators in between overlap with the exchange: a weight gradient
//! thus hides the reduction of an input gradient.

use super::arena::{Interval, pack};
use super::shard::{Item, ShardedLayer, ValueId};
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::ids::ParamId;
use crate::mesh::Axis;
use crate::program::{Access, ComputePass, LocalOp, Operand, Template};
use crate::strategy::Strategy;
use crate::units::Bytes;

/// Source of a template operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Value(ValueId),
    Param(ParamId),
    Gradient(ParamId),
}

/// A step of a pass.
#[derive(Clone, Debug)]
pub(super) enum Piece {
    /// A segment; `waits` are the indices of exchanges that must complete first.
    Run { template: u32, sources: Vec<Source>, waits: Vec<usize> },
    /// An exchange between ranks.
    Exchange { what: Exchange, from: ValueId, to: ValueId },
}

/// Kind of exchange.
#[derive(Clone, Copy, Debug)]
pub(super) enum Exchange {
    /// A collective along an axis.
    Collective(Axis, CollectiveKind, Reduction),
    /// Each rank sends its value to the next one along the context-parallel axis.
    Shift,
}

/// One pass over a layer.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerPass {
    pub(super) pieces: Vec<Piece>,
    /// Exchanges whose result the layer itself does not read; the next layer must wait for them.
    pub(super) open: Vec<usize>,
}

/// Values that live only within a pass, and their offsets in scratch memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// Offset by value, for scratch values.
    pub(super) offsets: Vec<Option<Bytes>>,
    pub(super) size: Bytes,
}

/// Splits items into pieces and adds their templates.
pub(super) fn cut(
    layer_name: &str,
    passes: &[(ComputePass, &[Item])],
    layer: &ShardedLayer,
    strategy: &Strategy,
    templates: &mut Vec<Template>,
) -> LayerPass {
    let mut cutter = Cutter {
        layer,
        strategy,
        pass: LayerPass::default(),
        run: Vec::new(),
        joined: Vec::new(),
        open: Vec::new(),
    };
    for (pass, items) in passes {
        let mut numbered = 0;
        let mut name = |p: ComputePass| {
            numbered += 1;
            format!("{}.{layer_name}.{}", p.letter(), numbered - 1)
        };
        for item in hoisted(items) {
            match item {
                Item::Op { ref inputs, .. } => {
                    let awaited = cutter.awaited(inputs);
                    if !awaited.is_empty() {
                        cutter.close(*pass, &mut name, templates);
                        cutter.joined.extend(awaited);
                    }
                    cutter.run.push(item);
                }
                Item::Convert { axis, kind, reduction, from, to } => {
                    cutter.close(*pass, &mut name, templates);
                    let what = Exchange::Collective(axis, kind, reduction);
                    cutter.exchange(what, from, to);
                }
                Item::Shift { from, to } => {
                    cutter.close(*pass, &mut name, templates);
                    cutter.exchange(Exchange::Shift, from, to);
                }
            }
        }
        cutter.close(*pass, &mut name, templates);
    }
    cutter.pass.open = std::mem::take(&mut cutter.open);
    cutter.pass
}

/// Moves collectives up: directly after the operator that produces their input. If the input was
/// produced before this pass, they move before the preceding operator, to overlap with it.
fn hoisted(items: &[Item]) -> Vec<Item> {
    let mut out: Vec<Item> = Vec::with_capacity(items.len());
    for item in items {
        let Item::Convert { from, .. } = item else {
            out.push(item.clone());
            continue;
        };
        let made = out.iter().rposition(|earlier| match earlier {
            Item::Op { outputs, .. } => outputs.contains(from),
            Item::Convert { to, .. } | Item::Shift { to, .. } => to == from,
        });
        let at = match made {
            Some(producer) => producer + 1,
            None => out.len().saturating_sub(1),
        };
        out.insert(at, item.clone());
    }
    out
}

struct Cutter<'a> {
    layer: &'a ShardedLayer,
    strategy: &'a Strategy,
    pass: LayerPass,
    /// Operators of the current segment.
    run: Vec<Item>,
    /// Exchanges that this segment waits for.
    joined: Vec<usize>,
    /// Exchanges that nothing waits for yet.
    open: Vec<usize>,
}

impl Cutter<'_> {
    /// Takes the exchanges that the next operator is the first to wait for.
    fn awaited(&mut self, inputs: &[ValueId]) -> Vec<usize> {
        let (pieces, overlap) = (&self.pass.pieces, self.strategy.overlap);
        let needed = |at: &usize| match &pieces[*at] {
            Piece::Exchange { to, .. } => !overlap || inputs.contains(to),
            Piece::Run { .. } => false,
        };
        let awaited: Vec<usize> = self.open.iter().copied().filter(needed).collect();
        self.open.retain(|at| !awaited.contains(at));
        awaited
    }

    fn exchange(&mut self, what: Exchange, from: ValueId, to: ValueId) {
        self.open.push(self.pass.pieces.len());
        self.pass.pieces.push(Piece::Exchange { what, from, to });
    }

    /// Ends the current segment, if it has any operators.
    fn close(
        &mut self,
        pass: ComputePass,
        name: &mut impl FnMut(ComputePass) -> String,
        templates: &mut Vec<Template>,
    ) {
        if self.run.is_empty() {
            return;
        }
        let mut sources = Vec::new();
        let mut operands = Vec::new();
        let mut ops = Vec::new();
        for item in self.run.drain(..) {
            let Item::Op { kind, part, inputs, params, outputs } = item else { continue };
            let gradient = part == crate::graph::OpPass::BackwardWeight;
            let mut slot = |source: Source, access: Access, layer: &ShardedLayer, s: &Strategy| {
                if let Some(at) = sources.iter().position(|&known| known == source) {
                    return at as u16;
                }
                sources.push(source);
                operands.push(operand(source, access, layer, s));
                (sources.len() - 1) as u16
            };
            let inputs = inputs
                .iter()
                .map(|&v| slot(Source::Value(v), Access::Read, self.layer, self.strategy))
                .collect();
            let rows = matches!(kind, crate::graph::OpKind::StepRows { .. });
            let (of, access): (fn(ParamId) -> Source, _) = if gradient && rows {
                // Sparse step: rows are updated as soon as their gradient is known.
                (Source::Param, Access::Accumulate)
            } else if gradient && params.iter().any(|p| self.layer.params[p.index()].adds) {
                (Source::Gradient, Access::Add)
            } else if gradient {
                (Source::Gradient, Access::Accumulate)
            } else {
                (Source::Param, Access::Read)
            };
            let params =
                params.iter().map(|&p| slot(of(p), access, self.layer, self.strategy)).collect();
            let outputs = outputs
                .iter()
                .map(|&v| slot(Source::Value(v), Access::Write, self.layer, self.strategy))
                .collect();
            ops.push(LocalOp { kind, pass: part, inputs, params, outputs });
        }
        let template = u32::try_from(templates.len()).expect("few templates");
        templates.push(Template { name: name(pass), pass, operands, ops });
        let waits = std::mem::take(&mut self.joined);
        self.pass.pieces.push(Piece::Run { template, sources, waits });
    }
}

fn operand(source: Source, access: Access, layer: &ShardedLayer, strategy: &Strategy) -> Operand {
    match source {
        Source::Value(v) => {
            let value = &layer.values[v];
            let access = if value.class.adds_up() { Access::Accumulate } else { access };
            Operand { dims: value.dims, dtype: value.dtype, access }
        }
        Source::Param(p) => {
            let param = &layer.params[p.index()];
            let dtype = if param.table { DType::F32 } else { strategy.activation_dtype() };
            Operand { dims: param.local, dtype, access }
        }
        Source::Gradient(p) => {
            Operand { dims: layer.params[p.index()].local, dtype: strategy.grad_dtype, access }
        }
    }
}

/// Lays out the values that live only within one pass, so that those with disjoint lifetimes share
/// memory. `kept` are the values stored elsewhere.
pub(super) fn scratch(passes: &[&[Item]], layer: &ShardedLayer, kept: &[ValueId]) -> Scratch {
    let items: Vec<Item> = passes.iter().flat_map(|items| hoisted(items)).collect();
    let root = aliases(&items, layer.values.len());
    let mut first: Vec<Option<usize>> = vec![None; layer.values.len()];
    let mut last = vec![0; layer.values.len()];
    for (at, item) in items.iter().enumerate() {
        let (reads, writes): (&[ValueId], &[ValueId]) = match item {
            Item::Op { inputs, outputs, .. } => (inputs, outputs),
            Item::Convert { from, to, .. } | Item::Shift { from, to } => {
                (std::slice::from_ref(from), std::slice::from_ref(to))
            }
        };
        for &value in reads.iter().chain(writes) {
            first[root[value]].get_or_insert(at);
            last[root[value]] = at;
        }
        // An exchange reads its input until the first operator that waits for it.
        if let Item::Convert { from, to, .. } | Item::Shift { from, to } = item {
            let reader = items[at..]
                .iter()
                .position(|later| matches!(later, Item::Op { inputs, .. } if inputs.contains(to)));
            let until = reader.map_or(items.len(), |n| at + n);
            last[root[*from]] = last[root[*from]].max(until);
        }
    }
    let kept: Vec<ValueId> = kept.iter().map(|&v| root[v]).collect();
    let mut intervals = Vec::new();
    let mut owners = Vec::new();
    for (value, start) in first.iter().enumerate() {
        let (Some(start), false) = (*start, kept.contains(&value)) else { continue };
        let v = &layer.values[value];
        let size = Bytes(v.dims[0] * v.dims[1] * v.dtype.size());
        intervals.push(Interval { start, end: last[value], size });
        owners.push(value);
    }
    let (places, size) = pack(&intervals);
    let mut offsets = vec![None; layer.values.len()];
    for (owner, place) in owners.iter().zip(places) {
        offsets[*owner] = Some(place);
    }
    for value in 0..offsets.len() {
        if root[value] != value {
            offsets[value] = offsets[root[value]];
        }
    }
    Scratch { offsets, size }
}

/// Aliases of in-place operations. The result of an all-reduce shares the memory of its input, and
/// so does the gradient of the logits: they are a language model's largest activation, and nothing
/// reads them later.
pub(super) fn aliases(items: &[Item], values: usize) -> Vec<ValueId> {
    let mut root: Vec<ValueId> = (0..values).collect();
    for item in items {
        match item {
            Item::Convert { kind: CollectiveKind::AllReduce, from, to, .. } => {
                root[*to] = root[*from];
            }
            Item::Op { kind, part, inputs, outputs, .. } => {
                for &(from, to) in kind.replaces(*part) {
                    root[outputs[to]] = root[inputs[from]];
                }
            }
            Item::Convert { .. } | Item::Shift { .. } => {}
        }
    }
    root
}
