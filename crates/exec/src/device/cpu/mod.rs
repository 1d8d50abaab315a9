//! Execution of segments: the operators of a template on the buffers that a role binds to it.

pub(crate) mod compressed_adam;
pub(crate) mod fuse;
pub(crate) mod hogwild;
pub(crate) mod kernel;
mod operands;
mod ops;
pub(crate) mod step;

use crate::device::cpu::fuse::Step;
use crate::device::cpu::kernel::Kernel;
use crate::error::Fault;
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::run::check::Kernels;
use crate::types::{Float, Types, typed};
pub(crate) use operands::Operands;
use operands::linear_shape;
use ops::clicks::{self, TablesHeld};
use ops::experts::{self, Routed};
use ops::{compressed, images};
use paceline_kernels::arena::ArenaError;
use paceline_kernels::loss::Columns;
use paceline_kernels::pool::{Cut, Pool, strips};
use paceline_kernels::{
    Bf16, Element, F16, Rows, Write, activation, bias, embedding, loss, mixed_precision, norm,
    reduce, ring_attention, rope,
};
use paceline_plan::graph::{ActivationKind, NormKind, OpPass};
use paceline_plan::program::{LocalOp, Plan, Program, Segment, Template};
use std::ops::Range;

/// State shared by the computations of one rank.
#[derive(Debug)]
pub(crate) struct Compute<'p> {
    plan: &'p Plan,
    program: &'p Program,
    kernels: &'p Kernels,
    place: RankCoords,
    pool: Pool,
    /// Size of the vocabulary.
    vocab: u32,
    /// Number of tokens of each sequence that this rank has.
    own_seq: usize,
    /// Position of every row of a microbatch within its sequence.
    positions: Vec<u32>,
    /// Workspace of kernels besides their operands, sized for the largest.
    workspace: Vec<f32>,
    /// Buffer for the order of a microbatch's rows.
    order: Vec<u32>,
    /// Buffers for expert routing.
    routed: Routed,
    types: Types,
    /// Embedding table rows that this rank holds, if the model has tables.
    tables: Option<TablesHeld>,
    /// Learning rate of the row updates.
    pub(crate) rate: f32,
    /// True if every output of an operator is checked for non-finite values.
    pub(crate) watching: bool,
    /// Factor of the loss gradient, so that small gradients stay in range.
    pub(crate) loss_scale: f32,
}

impl<'p> Compute<'p> {
    /// Creates the state; `pool` holds the threads that compute for this rank.
    pub(crate) fn new(
        plan: &'p Plan,
        kernels: &'p Kernels,
        place: RankCoords,
        vocab: u32,
        pool: Pool,
    ) -> Self {
        let (program, types) = (plan.program(place.rank), kernels.types);
        let seq = plan.strategy.seq;
        let runs = place.runs(seq).into_iter().flatten();
        let sequence: Vec<u32> = runs.map(|position| position as u32).collect();
        let rows = plan.strategy.micro_batch * sequence.len() as u64;
        let templates = program.segments.iter().map(|segment| segment.template as usize);
        let needs = templates.map(|t| {
            let (template, kernels) = (&plan.templates[t], &kernels.of[t]);
            typed!(types, <T, G> workspace::<T, G>(template, kernels, pool.threads()))
        });
        let workspace = needs.max().unwrap_or(0);
        let templates = program.segments.iter().map(|segment| segment.template as usize);
        let of_experts = templates.flat_map(|t| &kernels.of[t]).filter_map(Kernel::of_experts);
        Self {
            plan,
            program,
            kernels,
            place,
            pool,
            vocab,
            own_seq: sequence.len(),
            positions: sequence.iter().copied().cycle().take(rows as usize).collect(),
            workspace: vec![0.0; workspace],
            order: vec![0; rows as usize],
            routed: Routed::for_all(of_experts),
            types,
            tables: TablesHeld::of(program, place),
            rate: 0.0,
            watching: false,
            loss_scale: 1.0,
        }
    }

    /// Threads that compute for this rank.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs a segment for microbatch number `running`; `fresh` overwrites gradients.
    pub(crate) fn segment(
        &mut self,
        memory: &Memory<'_>,
        segment: &Segment,
        running: u64,
        fresh: bool,
    ) -> Result<(), Fault> {
        let template = &self.plan.templates[segment.template as usize];
        let kernels = &self.kernels.of[segment.template as usize];
        if self.watching {
            for (op, &kernel) in template.ops.iter().zip(kernels) {
                let operands = Operands::of(memory, template, segment, op, running)?;
                typed!(self.types, <T, G> self.run::<T, G>(kernel, &operands, fresh))?;
                drop(operands);
                if kernel != Kernel::RowMax {
                    check_finite(memory, template, segment, op, running)?;
                }
            }
            return Ok(());
        }
        for step in &self.kernels.steps[segment.template as usize] {
            match step {
                Step::One(at) => {
                    let op = &template.ops[*at];
                    let operands = Operands::of(memory, template, segment, op, running)?;
                    typed!(self.types, <T, G> self.run::<T, G>(kernels[*at], &operands, fresh))?;
                }
                Step::Several(joined, op) => {
                    let operands = Operands::of(memory, template, segment, op, running)?;
                    self.run_fused(*joined, &operands);
                }
            }
        }
        Ok(())
    }

    fn run<T: Element, G: Element>(
        &mut self,
        kernel: Kernel,
        on: &Operands<'_>,
        fresh: bool,
    ) -> Result<(), Fault> {
        let fresh = fresh && !on.adds();
        let mode = if fresh { Write::Overwrite } else { Write::Accumulate };
        let pool = &self.pool;
        match kernel {
            Kernel::Expert(kernel) => return self.run_expert::<T, G>(kernel, on, mode),
            Kernel::Heads(kernel) => self.run_heads::<T, G>(kernel, on, mode),
            Kernel::Embedding => {
                let first = self.first(on.param_dims(0)[0]);
                let (shape, ids, table) = (on.output_rows(0), on.ids(0), on.param::<T>(0));
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                    embedding::forward(part, first, &ids[at], table, y);
                });
            }
            Kernel::EmbeddingWeight => {
                let first = self.first(on.param_dims(0)[0]);
                let (shape, ids, dtable) = (on.rows(0), on.ids(1), on.gradient::<G>(0));
                let (dy, order) = (on.input::<T>(0), &mut self.order[..shape.rows]);
                embedding::weight_gradient(shape, first, ids, dy, dtable, mode, order);
            }
            Kernel::Position => {
                let shape = on.rows(0);
                let positions = self.positions(shape.rows);
                let (x, table) = (on.input::<T>(0), on.param(0));
                embedding::position_forward(shape, positions, x, table, on.output(0));
            }
            Kernel::PositionWeight => {
                let shape = on.rows(0);
                let positions = self.positions(shape.rows);
                let (dy, dtable) = (on.input::<T>(0), on.gradient::<G>(0));
                embedding::position_weight_gradient(shape, positions, dy, dtable, mode);
            }
            Kernel::Norm { norm, eps } => {
                let (shape, x, gain) = (on.rows(0), on.input::<T>(0), on.param(0));
                let (y, stats) = (strips(on.output(0), shape.width), on.output(1));
                match norm {
                    NormKind::Layer => {
                        let (bias, outputs) = (on.param(1), (y, strips(stats, 2)));
                        over_rows(pool, shape, outputs, |part, at, (y, stats)| {
                            let x = &x[elements(shape, &at)];
                            norm::layer_norm_forward(part, eps, x, gain, bias, y, stats);
                        });
                    }
                    NormKind::Rms => {
                        let outputs = (y, strips(stats, 1));
                        over_rows(pool, shape, outputs, |part, at, (y, stats)| {
                            let x = &x[elements(shape, &at)];
                            norm::rms_norm_forward(part, eps, x, gain, y, stats);
                        });
                    }
                }
            }
            Kernel::NormInput { norm } => {
                let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
                let (gain, stats) = (on.param::<T>(0), on.input::<f32>(2));
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, at, dx| {
                    let (dy, x) = (&dy[elements(shape, &at)], &x[elements(shape, &at)]);
                    match norm {
                        NormKind::Layer => {
                            let stats = &stats[2 * at.start..2 * at.end];
                            norm::layer_norm_input_gradient(part, dy, x, gain, stats, dx);
                        }
                        NormKind::Rms => {
                            norm::rms_norm_input_gradient(part, dy, x, gain, &stats[at], dx);
                        }
                    }
                });
            }
            Kernel::NormWeight { norm } => {
                let (shape, dy, x, stats) =
                    (on.rows(0), on.input::<T>(0), on.input(1), on.input(2));
                let dgain = on.gradient::<G>(0);
                match norm {
                    NormKind::Layer => {
                        let dbias = on.gradient(1);
                        let outputs = (dgain, dbias);
                        norm::layer_norm_weight_gradient(pool, shape, dy, x, stats, outputs, mode);
                    }
                    NormKind::Rms => {
                        norm::rms_norm_weight_gradient(pool, shape, dy, x, stats, dgain, mode);
                    }
                }
            }
            Kernel::Linear => {
                let (shape, x, w) = (on.linear(), on.input::<T>(0), on.param(0));
                let workspace =
                    &mut self.workspace[..mixed_precision::linear_workspace::<T, G>(shape)];
                mixed_precision::linear_forward(pool, shape, x, w, on.output(0), workspace);
            }
            Kernel::LinearInput => {
                let (shape, dy, w) = (on.linear(), on.input::<T>(0), on.param(0));
                let workspace =
                    &mut self.workspace[..mixed_precision::linear_workspace::<T, G>(shape)];
                mixed_precision::linear_input_gradient(pool, shape, dy, w, on.output(0), workspace);
            }
            Kernel::LinearWeight => {
                let (shape, dy, x) = (on.linear(), on.input::<T>(0), on.input(1));
                let workspace =
                    &mut self.workspace[..mixed_precision::linear_workspace::<T, G>(shape)];
                let dw = on.gradient::<G>(0);
                mixed_precision::linear_weight_gradient(pool, shape, dy, x, dw, mode, workspace);
            }
            Kernel::Bias => {
                let (shape, x, b) = (on.rows(0), on.input::<T>(0), on.param::<T>(0));
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                    bias::forward(part, &x[elements(shape, &at)], b, y);
                });
            }
            Kernel::BiasWeight => {
                let (shape, dy, db) = (on.rows(0), on.input::<T>(0), on.gradient::<G>(0));
                bias::weight_gradient(pool, shape, dy, db, mode);
            }
            Kernel::Rope(rotation) => {
                let (positions, qkv) = (self.sequence(), on.input::<T>(0));
                over_sequences(pool, on.rows(0), positions, on.output(0), |at, out| {
                    rope::forward(rotation, positions, &qkv[at], out);
                });
            }
            Kernel::RopeInput(rotation) => {
                let (positions, dout) = (self.sequence(), on.input::<T>(0));
                over_sequences(pool, on.rows(0), positions, on.output(0), |at, dqkv| {
                    rope::input_gradient(rotation, positions, &dout[at], dqkv);
                });
            }
            Kernel::Attention(shape) => {
                let shape = shape.with_rows(on.rows(0).rows);
                let need = mixed_precision::attention_forward_workspace::<T>(pool.threads(), shape);
                let (qkv, out, lse) = (on.input::<T>(0), on.output(0), on.output(1));
                mixed_precision::attention_forward(
                    pool,
                    shape,
                    qkv,
                    out,
                    lse,
                    &mut self.workspace[..need],
                );
            }
            Kernel::AttentionInput(shape) => {
                let shape = shape.with_rows(on.rows(0).rows);
                let need =
                    mixed_precision::attention_backward_workspace::<T>(pool.threads(), shape);
                let workspace = &mut self.workspace[..need];
                let (dout, qkv) = (on.input::<T>(0), on.input(1));
                let (out, lse) = (on.input(2), on.input(3));
                mixed_precision::attention_backward(
                    pool,
                    shape,
                    dout,
                    qkv,
                    out,
                    lse,
                    on.output(0),
                    workspace,
                );
            }
            Kernel::KeysValues { width } => {
                ring_attention::keys_and_values(width, on.input::<T>(0), on.output(0));
            }
            Kernel::KeysValuesInput { width } => {
                ring_attention::add_keys_and_values(width, on.input::<T>(0), on.output(0));
            }
            Kernel::AttentionBlock { shape, step } => {
                let shape = shape.with_rows(on.rows(0).rows);
                let need = ring_attention::forward_room::<T>(pool.threads(), shape);
                let (other, workspace) = (self.other(step), &mut self.workspace[..need]);
                let (qkv, kv) = (on.input::<T>(0), on.input(1));
                let (out, lse) = (on.output(0), on.output(1));
                ring_attention::merge_step(pool, shape, other, qkv, kv, out, lse, workspace);
            }
            Kernel::AttentionBlockInput { shape, step } => {
                let shape = shape.with_rows(on.rows(0).rows);
                let need = ring_attention::backward_room::<T>(pool.threads(), shape);
                let (other, workspace) = (self.other(step), &mut self.workspace[..need]);
                let saved = ring_attention::Saved {
                    dout: on.input::<T>(0),
                    qkv: on.input(1),
                    out: on.input(2),
                    lse: on.input(3),
                    kv: on.input(4),
                };
                // The first step of a block initialises its gradients.
                let mode = if step == 1 { Write::Overwrite } else { Write::Accumulate };
                let gradients = (on.output(0), on.output(1));
                ring_attention::step_gradient(
                    pool, shape, other, saved, gradients, mode, workspace,
                );
            }
            Kernel::Activation(function) => {
                let forward = match function {
                    ActivationKind::Gelu => activation::gelu_tanh_forward::<T>,
                    ActivationKind::Relu => activation::relu_forward::<T>,
                    ActivationKind::SquaredRelu => activation::squared_relu_forward::<T>,
                };
                let x = on.input(0);
                over_elements(pool, on.output(0), |at, y| forward(&x[at], y));
            }
            Kernel::ActivationInput(function) => {
                let gradient = match function {
                    ActivationKind::Gelu => activation::gelu_tanh_input_gradient::<T>,
                    ActivationKind::Relu => activation::relu_input_gradient::<T>,
                    ActivationKind::SquaredRelu => activation::squared_relu_input_gradient::<T>,
                };
                let (dy, x) = (on.input(0), on.input(1));
                over_elements(pool, on.output(0), |at, dx| {
                    gradient(&dy[at.clone()], &x[at], dx);
                });
            }
            Kernel::SwiGlu => {
                let (shape, x) = (on.output_rows(0), on.input::<T>(0));
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, at, y| {
                    activation::swiglu_forward(part, &x[elements(twice(shape), &at)], y);
                });
            }
            Kernel::SwiGluInput => {
                let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
                let both = twice(shape);
                over_rows(pool, shape, strips(on.output(0), both.width), |part, at, dx| {
                    let (dy, x) = (&dy[elements(shape, &at)], &x[elements(both, &at)]);
                    activation::swiglu_input_gradient(part, dy, x, dx);
                });
            }
            Kernel::Add => {
                let (a, b) = (on.input::<T>(0), on.input(1));
                over_elements(pool, on.output(0), |at, y| {
                    reduce::add3(&a[at.clone()], &b[at], y);
                });
            }
            Kernel::RowMax => {
                let (shape, logits) = (on.rows(0), on.input::<T>(0));
                let columns = self.columns(shape);
                over_rows(pool, shape, strips(on.output(0), 1), |part, at, max| {
                    loss::row_max(part, columns, &logits[elements(shape, &at)], max);
                });
            }
            Kernel::SoftmaxStats => {
                let (shape, logits) = (on.rows(0), on.input::<T>(0));
                let (columns, max, targets) = (self.columns(shape), on.input(1), on.ids(2));
                over_rows(pool, shape, strips(on.output(0), 2), |part, at, stats| {
                    let (logits, max) = (&logits[elements(shape, &at)], &max[at.clone()]);
                    loss::softmax_stats(part, columns, logits, max, &targets[at], stats);
                });
            }
            Kernel::CrossEntropy => {
                let losses = &mut self.workspace[..on.rows(0).rows];
                loss::cross_entropy(on.input(0), losses);
                let (sum, total) = (loss::sum(losses), &mut on.output::<f32>(0)[0]);
                *total = if fresh { sum } else { *total + sum };
            }
            Kernel::CrossEntropyInput { scale } => {
                let (shape, stats) = (on.rows(1), on.input::<f32>(0));
                let (columns, max, targets) = (self.columns(shape), on.input(2), on.ids(3));
                let scale = scale * self.loss_scale;
                let logits = on.output::<T>(0);
                if !on.input::<T>(1).is_empty() {
                    logits.copy_from_slice(on.input(1));
                }
                over_rows(pool, shape, strips(logits, shape.width), |part, at, logits| {
                    let (max, targets) = (&max[at.clone()], &targets[at.clone()]);
                    let stats = &stats[2 * at.start..2 * at.end];
                    loss::input_gradient_in_place(
                        part, columns, scale, max, stats, targets, logits,
                    );
                });
            }
            Kernel::Clicks(kernel) => {
                if let Some(tables) = &self.tables {
                    clicks::run::<T, G>(kernel, pool, on, tables, (self.rate, mode));
                }
            }
            Kernel::BinaryCrossEntropy => {
                let losses = &mut self.workspace[..on.rows(0).rows];
                loss::binary_cross_entropy(on.input::<T>(0), on.ids(1), losses);
                let (sum, total) = (loss::sum(losses), &mut on.output::<f32>(0)[0]);
                *total = if fresh { sum } else { *total + sum };
            }
            Kernel::BinaryCrossEntropyInput { scale } => {
                let (scale, logits) = (scale * self.loss_scale, on.input::<T>(0));
                loss::binary_input_gradient(scale, logits, on.ids(1), on.output(0));
            }
            Kernel::Images(kernel) => {
                images::run::<T, G>(kernel, pool, on, mode, &mut self.workspace);
            }
            Kernel::BlockSquares { parts, experts } => {
                let part = self.place.part_of(parts, experts);
                step::block_squares::<G>(pool, part, on.input(0), on.output(0));
            }
            Kernel::TensorSquares => {
                step::tensor_squares(self.place, self.program, on.input(0), on.output(0));
            }
            Kernel::Norm2 => on.output::<f32>(0)[0] = step::norm(on.input(0)),
            Kernel::Total => {
                let numbers: &[f32] = if on.inputs() > 0 { on.input(0) } else { &[] };
                on.output::<f32>(0)[0] = numbers.iter().sum();
            }
            Kernel::Compress(op) => compressed::run::<G>(pool, self.program, op, on),
            Kernel::Outer(op) => step::outer(pool, op, on),
        }
        Ok(())
    }

    /// First logical row or column that this rank holds, with `local` of them on every rank.
    fn first(&self, local: u64) -> u32 {
        let first = u64::from(self.place.tensor.index) * local;
        // Beyond the largest token there is only padding, to which no token refers.
        u32::try_from(first).unwrap_or(u32::MAX)
    }

    /// Origin of the keys and values that have arrived by a step of ring attention.
    fn other(&self, step: u32) -> ring_attention::Other {
        // After `step` steps, those of the rank `step` places before this one.
        match step <= self.place.context.index {
            true => ring_attention::Other::Earlier,
            false => ring_attention::Other::Later,
        }
    }

    /// Vocabulary range of this rank's logit columns.
    fn columns(&self, logits: Rows) -> Columns {
        let first = self.first(logits.width as u64);
        let valid = logits.width.min(self.vocab.saturating_sub(first) as usize);
        Columns { first, valid }
    }

    /// Positions of this rank's rows: of one sequence if it has whole ones, or of its shard of a
    /// stream split along tokens.
    fn positions(&self, rows: usize) -> &[u32] {
        let first =
            if rows < self.positions.len() { self.place.tensor.index as usize * rows } else { 0 };
        let seq = self.sequence().len();
        if first.is_multiple_of(seq) && rows.is_multiple_of(seq) {
            return self.sequence();
        }
        &self.positions[first..first + rows]
    }

    /// Positions of one sequence.
    fn sequence(&self) -> &[u32] {
        &self.positions[..self.own_seq]
    }
}

/// Rejects non-finite numbers in the outputs of an operator. (The maximum of no logits, on a rank
/// with only padding, is legitimately infinite.)
fn check_finite(
    memory: &Memory<'_>,
    template: &Template,
    segment: &Segment,
    op: &LocalOp,
    running: u64,
) -> Result<(), Fault> {
    let first_bad = |operand: u16| -> Result<Option<f32>, ArenaError> {
        let view = segment.operands[usize::from(operand)];
        let span = memory.span(view, running);
        Ok(match Float::of(template.operands[usize::from(operand)].dtype) {
            Some(Float::F32) => memory.read(span, |x: &[f32]| reduce::first_not_finite(x))?,
            Some(Float::Bf16) => memory.read(span, |x: &[Bf16]| reduce::first_not_finite(x))?,
            Some(Float::F16) => memory.read(span, |x: &[F16]| reduce::first_not_finite(x))?,
            None => None,
        })
    };
    let is_gradient = op.pass == OpPass::BackwardWeight;
    let made = op.outputs.iter().chain(if is_gradient { &op.params[..] } else { &[] });
    for &operand in made {
        if let Some(value) = first_bad(operand)? {
            let mut from = "finite numbers";
            for &param in op.params.iter().filter(|_| !is_gradient) {
                if first_bad(param)?.is_some() {
                    from = "weights that are no finite numbers any more";
                }
            }
            let operator = format!("{} ({})", op.kind.name(), part_name(op.pass));
            return Err(Fault::NotFinite { operator, value, from });
        }
    }
    Ok(())
}

fn part_name(part: OpPass) -> &'static str {
    match part {
        OpPass::Forward => "forward",
        OpPass::BackwardInput => "gradient of its input",
        OpPass::BackwardWeight => "gradient of its weight",
    }
}

/// Number of elements a thread takes at a time: as many as fit the L1 cache.
const TILE: usize = 1 << 14;

/// Runs a kernel of rows on all threads, some rows at a time. `body` gets the shape of its part,
/// its rows, and its part of the outputs. Rows are independent, so the bits do not depend on the
/// number of threads.
fn over_rows<C: Cut>(
    pool: &Pool,
    shape: Rows,
    outputs: C,
    body: impl Fn(Rows, Range<usize>, C::Piece) + Sync,
) {
    let block = (TILE / shape.width.max(1)).max(1);
    pool.for_each_block(shape.rows, block, outputs, |rows, piece| {
        body(Rows { rows: rows.len(), ..shape }, rows, piece);
    });
}

/// Like [`over_rows`], for element-wise kernels.
fn over_elements<T: Element>(
    pool: &Pool,
    output: &mut [T],
    body: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    pool.for_each_block(output.len(), TILE, strips(output, 1), body);
}

/// `into += from` on all threads.
pub(crate) fn add<T: Element>(pool: &Pool, from: &[T], into: &mut [T]) {
    over_elements(pool, into, |at, into| reduce::add(&from[at], into));
}

/// Like [`over_rows`], one sequence at a time. `body` gets the elements of its sequence.
fn over_sequences<T: Element>(
    pool: &Pool,
    shape: Rows,
    positions: &[u32],
    output: &mut [T],
    body: impl Fn(Range<usize>, &mut [T]) + Sync,
) {
    let (sequences, width) = (shape.rows / positions.len(), positions.len() * shape.width);
    pool.for_each_block(sequences, 1, strips(output, width), |at, piece| {
        body(at.start * width..at.end * width, piece);
    });
}

/// Element range of a row range.
fn elements(shape: Rows, rows: &Range<usize>) -> Range<usize> {
    rows.start * shape.width..rows.end * shape.width
}

/// Shape of rows with two halves, each of the given width.
fn twice(shape: Rows) -> Rows {
    Rows { width: 2 * shape.width, ..shape }
}

/// Workspace, in elements, that a template's operators need with `threads` threads.
fn workspace<T: Element, G: Element>(
    template: &Template,
    kernels: &[Kernel],
    threads: usize,
) -> usize {
    let need = |(op, kernel): (&LocalOp, &Kernel)| {
        let rows = |i: usize| template.operands[usize::from(op.inputs[i])].dims[0] as usize;
        match *kernel {
            Kernel::Attention(shape) => {
                mixed_precision::attention_forward_workspace::<T>(threads, shape.with_rows(rows(0)))
            }
            Kernel::AttentionInput(shape) => mixed_precision::attention_backward_workspace::<T>(
                threads,
                shape.with_rows(rows(0)),
            ),
            Kernel::AttentionBlock { shape, .. } => {
                ring_attention::forward_room::<T>(threads, shape.with_rows(rows(0)))
            }
            Kernel::AttentionBlockInput { shape, .. } => {
                ring_attention::backward_room::<T>(threads, shape.with_rows(rows(0)))
            }
            Kernel::Linear | Kernel::LinearInput | Kernel::LinearWeight => {
                mixed_precision::linear_workspace::<T, G>(linear_shape(template, op))
            }
            Kernel::CrossEntropy | Kernel::BinaryCrossEntropy => rows(0),
            Kernel::Images(kernel) => images::workspace::<T, G>(kernel, template, op),
            Kernel::Embedding
            | Kernel::EmbeddingWeight
            | Kernel::Position
            | Kernel::PositionWeight
            | Kernel::Norm { .. }
            | Kernel::NormInput { .. }
            | Kernel::NormWeight { .. }
            | Kernel::Bias
            | Kernel::BiasWeight
            | Kernel::Rope(_)
            | Kernel::RopeInput(_)
            | Kernel::KeysValues { .. }
            | Kernel::KeysValuesInput { .. }
            | Kernel::Activation(_)
            | Kernel::ActivationInput(_)
            | Kernel::SwiGlu
            | Kernel::SwiGluInput
            | Kernel::Add
            | Kernel::RowMax
            | Kernel::SoftmaxStats
            | Kernel::CrossEntropyInput { .. }
            | Kernel::Clicks(_)
            | Kernel::BinaryCrossEntropyInput { .. }
            | Kernel::BlockSquares { .. }
            | Kernel::TensorSquares
            | Kernel::Norm2
            | Kernel::Total
            | Kernel::Compress(_)
            | Kernel::Outer(_)
            | Kernel::Heads(_) => 0,
            Kernel::Expert(kernel) => experts::workspace::<T, G>(template, op, kernel),
        }
    };
    template.ops.iter().zip(kernels).map(need).max().unwrap_or(0)
}
