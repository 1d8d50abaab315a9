//! Runs segments: the operators of a template on the buffers that a role bound it to.

use crate::check::Kernels;
use crate::kernel::Kernel;
use crate::memory::Memory;
use crate::place::Place;
use crate::update;
use paceline_kernels::arena::{Access, ArenaError, Span, Views};
use paceline_kernels::loss::Columns;
use paceline_kernels::pool::Pool;
use paceline_kernels::{
    Rows, Write, activation, attention, embedding, linear, loss, norm, reduce, rope,
};
use paceline_plan::graph::{ActivationKind, NormKind, Part};
use paceline_plan::program::{LocalOp, Plan, Program, Segment, Template};

/// What the computations of one rank share.
#[derive(Debug)]
pub(crate) struct Compute<'p> {
    plan: &'p Plan,
    program: &'p Program,
    kernels: &'p Kernels,
    place: Place,
    pool: Pool,
    /// Words of the vocabulary.
    vocab: u32,
    /// The position of every row of a microbatch within its sequence.
    positions: Vec<u32>,
    /// Room for what kernels need beside their operands; as large as the largest wants it.
    workspace: Vec<f32>,
}

impl<'p> Compute<'p> {
    /// `pool` are the threads that compute for this rank.
    pub(crate) fn new(
        plan: &'p Plan,
        kernels: &'p Kernels,
        place: Place,
        vocab: u32,
        pool: Pool,
    ) -> Self {
        let program = plan.program(place.rank);
        let rows = plan.strategy.micro_batch * plan.strategy.seq;
        let templates = program.segments.iter().map(|segment| segment.template as usize);
        let workspace = templates
            .map(|t| workspace(&plan.templates[t], &kernels[t], pool.threads()))
            .max()
            .unwrap_or(0);
        Self {
            plan,
            program,
            kernels,
            place,
            pool,
            vocab,
            positions: (0..rows).map(|row| (row % plan.strategy.seq) as u32).collect(),
            workspace: vec![0.0; workspace],
        }
    }

    /// The threads that compute for this rank.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs a segment on the copies for a running microbatch number; `fresh` gradients start anew.
    pub(crate) fn segment(
        &mut self,
        memory: &Memory<'_>,
        segment: &Segment,
        running: u64,
        fresh: bool,
    ) -> Result<(), ArenaError> {
        let template = &self.plan.templates[segment.template as usize];
        let kernels = &self.kernels[segment.template as usize];
        for (op, &kernel) in template.ops.iter().zip(kernels) {
            let operands = Operands::of(memory, template, segment, op, running)?;
            self.run(kernel, &operands, fresh);
        }
        Ok(())
    }

    fn run(&mut self, kernel: Kernel, on: &Operands<'_>, fresh: bool) {
        let mode = if fresh { Write::Overwrite } else { Write::Accumulate };
        match kernel {
            Kernel::Embedding => {
                let first = self.first(on.param_dims(0)[0]);
                let shape = on.output_rows(0);
                embedding::forward(shape, first, on.ids(0), on.param(0), on.output(0));
            }
            Kernel::EmbeddingWeight => {
                let first = self.first(on.param_dims(0)[0]);
                let (shape, ids, dtable) = (on.rows(0), on.ids(1), on.gradient(0));
                embedding::weight_gradient(shape, first, ids, on.input(0), dtable, mode);
            }
            Kernel::Position => {
                let shape = on.rows(0);
                let positions = self.positions(shape.rows);
                embedding::position_forward(
                    shape,
                    positions,
                    on.input(0),
                    on.param(0),
                    on.output(0),
                );
            }
            Kernel::PositionWeight => {
                let shape = on.rows(0);
                let positions = self.positions(shape.rows);
                let dtable = on.gradient(0);
                embedding::position_weight_gradient(shape, positions, on.input(0), dtable, mode);
            }
            Kernel::Norm { norm, eps } => {
                let (shape, x, gain) = (on.rows(0), on.input(0), on.param(0));
                let (y, stats) = (on.output(0), on.output(1));
                match norm {
                    NormKind::Layer => {
                        norm::layer_norm_forward(shape, eps, x, gain, on.param(1), y, stats);
                    }
                    NormKind::Rms => norm::rms_norm_forward(shape, eps, x, gain, y, stats),
                }
            }
            Kernel::NormInput { norm } => {
                let (shape, dy, x, stats) = (on.rows(0), on.input(0), on.input(1), on.input(2));
                let (gain, dx) = (on.param(0), on.output(0));
                match norm {
                    NormKind::Layer => {
                        norm::layer_norm_input_gradient(shape, dy, x, gain, stats, dx);
                    }
                    NormKind::Rms => norm::rms_norm_input_gradient(shape, dy, x, gain, stats, dx),
                }
            }
            Kernel::NormWeight { norm } => {
                let (shape, dy, x, stats) = (on.rows(0), on.input(0), on.input(1), on.input(2));
                let dgain = on.gradient(0);
                match norm {
                    NormKind::Layer => {
                        let dbias = on.gradient(1);
                        norm::layer_norm_weight_gradient(shape, dy, x, stats, dgain, dbias, mode);
                    }
                    NormKind::Rms => {
                        norm::rms_norm_weight_gradient(shape, dy, x, stats, dgain, mode);
                    }
                }
            }
            Kernel::Linear => {
                linear::forward(&self.pool, on.linear(), on.input(0), on.param(0), on.output(0));
            }
            Kernel::LinearInput => {
                linear::input_gradient(
                    &self.pool,
                    on.linear(),
                    on.input(0),
                    on.param(0),
                    on.output(0),
                );
            }
            Kernel::LinearWeight => {
                let dw = on.gradient(0);
                linear::weight_gradient(
                    &self.pool,
                    on.linear(),
                    on.input(0),
                    on.input(1),
                    dw,
                    mode,
                );
            }
            Kernel::Bias => {
                linear::bias_forward(on.rows(0), on.input(0), on.param(0), on.output(0));
            }
            Kernel::BiasWeight => {
                linear::bias_gradient(on.rows(0), on.input(0), on.gradient(0), mode);
            }
            Kernel::Rope(rotation) => {
                rope::forward(rotation, self.sequence(), on.input(0), on.output(0));
            }
            Kernel::RopeInput(rotation) => {
                rope::input_gradient(rotation, self.sequence(), on.input(0), on.output(0));
            }
            Kernel::Attention(shape) => {
                let shape = shape.with_rows(on.rows(0).rows);
                let own = shape.forward_workspace();
                let workspace = &mut self.workspace[..self.pool.threads() * own];
                let (out, lse) = (on.output(0), on.output(1));
                attention::forward(&self.pool, shape, on.input(0), out, lse, workspace);
            }
            Kernel::AttentionInput(shape) => {
                let shape = shape.with_rows(on.rows(0).rows);
                let own = shape.backward_workspace();
                let workspace = &mut self.workspace[..self.pool.threads() * own];
                let (dout, qkv, out, lse) = (on.input(0), on.input(1), on.input(2), on.input(3));
                let dqkv = on.output(0);
                attention::backward(&self.pool, shape, dout, qkv, out, lse, dqkv, workspace);
            }
            Kernel::Activation(function) => {
                let forward = match function {
                    ActivationKind::Gelu => activation::gelu_tanh_forward,
                    ActivationKind::Relu => activation::relu_forward,
                    ActivationKind::SquaredRelu => activation::squared_relu_forward,
                };
                forward(on.input(0), on.output(0));
            }
            Kernel::ActivationInput(function) => {
                let gradient = match function {
                    ActivationKind::Gelu => activation::gelu_tanh_input_gradient,
                    ActivationKind::Relu => activation::relu_input_gradient,
                    ActivationKind::SquaredRelu => activation::squared_relu_input_gradient,
                };
                gradient(on.input(0), on.input(1), on.output(0));
            }
            Kernel::SwiGlu => {
                activation::swiglu_forward(on.output_rows(0), on.input(0), on.output(0));
            }
            Kernel::SwiGluInput => {
                let (shape, dx) = (on.rows(0), on.output(0));
                activation::swiglu_input_gradient(shape, on.input(0), on.input(1), dx);
            }
            Kernel::Add => reduce::add3(on.input(0), on.input(1), on.output(0)),
            Kernel::RowMax => {
                let shape = on.rows(0);
                loss::row_max(shape, self.columns(shape), on.input(0), on.output(0));
            }
            Kernel::SoftmaxStats => {
                let (shape, logits, max) = (on.rows(0), on.input(0), on.input(1));
                let (columns, stats) = (self.columns(shape), on.output(0));
                loss::softmax_stats(shape, columns, logits, max, on.ids(2), stats);
            }
            Kernel::CrossEntropy => {
                let losses = &mut self.workspace[..on.rows(0).rows];
                loss::cross_entropy(on.input(0), losses);
                let (sum, total) = (loss::sum(losses), &mut on.output(0)[0]);
                *total = if fresh { sum } else { *total + sum };
            }
            Kernel::CrossEntropyInput { scale } => {
                let (shape, stats, logits) = (on.rows(1), on.input(0), on.input(1));
                let (columns, max, dlogits) = (self.columns(shape), on.input(2), on.output(0));
                let targets = on.ids(3);
                loss::input_gradient(shape, columns, scale, logits, max, stats, targets, dlogits);
            }
            Kernel::BlockSquares { parts } => {
                update::block_squares(self.place, parts, on.input(0), on.output(0));
            }
            Kernel::TensorSquares => {
                update::tensor_squares(self.place, self.program, on.input(0), on.output(0));
            }
            Kernel::Norm2 => on.output(0)[0] = update::norm(on.input(0)),
        }
    }

    /// The first logical row or column that this rank holds of so many on every rank.
    fn first(&self, local: u64) -> u32 {
        let first = u64::from(self.place.tensor.index) * local;
        // Beyond the largest word there is only padding, which no token means.
        u32::try_from(first).unwrap_or(u32::MAX)
    }

    /// What the columns of this rank's logits stand for.
    fn columns(&self, logits: Rows) -> Columns {
        let first = self.first(logits.width as u64);
        let valid = logits.width.min(self.vocab.saturating_sub(first) as usize);
        Columns { first, valid }
    }

    /// The positions of this rank's rows: of all, or of its part of a stream cut along tokens.
    fn positions(&self, rows: usize) -> &[u32] {
        let first =
            if rows < self.positions.len() { self.place.tensor.index as usize * rows } else { 0 };
        &self.positions[first..first + rows]
    }

    /// The positions of one sequence.
    fn sequence(&self) -> &[u32] {
        &self.positions[..self.plan.strategy.seq as usize]
    }
}

/// Elements of workspace that a template's operators need with so many threads.
fn workspace(template: &Template, kernels: &[Kernel], threads: usize) -> usize {
    let need = |(op, kernel): (&LocalOp, &Kernel)| {
        let rows = |i: usize| template.operands[usize::from(op.inputs[i])].dims[0] as usize;
        match *kernel {
            Kernel::Attention(shape) => threads * shape.with_rows(rows(0)).forward_workspace(),
            Kernel::AttentionInput(shape) => {
                threads * shape.with_rows(rows(0)).backward_workspace()
            }
            Kernel::CrossEntropy => rows(0),
            Kernel::Embedding
            | Kernel::EmbeddingWeight
            | Kernel::Position
            | Kernel::PositionWeight
            | Kernel::Norm { .. }
            | Kernel::NormInput { .. }
            | Kernel::NormWeight { .. }
            | Kernel::Linear
            | Kernel::LinearInput
            | Kernel::LinearWeight
            | Kernel::Bias
            | Kernel::BiasWeight
            | Kernel::Rope(_)
            | Kernel::RopeInput(_)
            | Kernel::Activation(_)
            | Kernel::ActivationInput(_)
            | Kernel::SwiGlu
            | Kernel::SwiGluInput
            | Kernel::Add
            | Kernel::RowMax
            | Kernel::SoftmaxStats
            | Kernel::CrossEntropyInput { .. }
            | Kernel::BlockSquares { .. }
            | Kernel::TensorSquares
            | Kernel::Norm2 => 0,
        }
    };
    template.ops.iter().zip(kernels).map(need).max().unwrap_or(0)
}

/// The operands of one operator: inputs, parameters (or their gradients) and outputs.
struct Operands<'a> {
    views: Views<'a>,
    template: &'a Template,
    op: &'a LocalOp,
}

impl<'a> Operands<'a> {
    fn of(
        memory: &'a Memory<'_>,
        template: &'a Template,
        segment: &Segment,
        op: &'a LocalOp,
        running: u64,
    ) -> Result<Self, ArenaError> {
        let on_params = match op.part {
            Part::Forward | Part::InputGradient => Access::Read,
            Part::WeightGradient => Access::Write,
        };
        let inputs = op.inputs.iter().map(|i| (i, Access::Read));
        let params = op.params.iter().map(|i| (i, on_params));
        let outputs = op.outputs.iter().map(|i| (i, Access::Write));
        let mut spans = [(Span { offset: 0, len: 0 }, Access::Read); MOST_OPERANDS];
        let mut count = 0;
        for (&operand, access) in inputs.chain(params).chain(outputs) {
            let view = segment.operands[usize::from(operand)];
            spans[count] = (memory.span(view, running), access);
            count += 1;
        }
        Ok(Self { views: memory.views(&spans[..count])?, template, op })
    }

    fn input(&self, i: usize) -> &[f32] {
        self.views.f32(i)
    }

    /// An input of token numbers.
    fn ids(&self, i: usize) -> &[u32] {
        self.views.u32(i)
    }

    fn param(&self, i: usize) -> &[f32] {
        self.views.f32(self.op.inputs.len() + i)
    }

    fn gradient(&self, i: usize) -> &mut [f32] {
        self.views.take_f32(self.op.inputs.len() + i)
    }

    fn output(&self, i: usize) -> &mut [f32] {
        self.views.take_f32(self.op.inputs.len() + self.op.params.len() + i)
    }

    fn dims(&self, operand: u16) -> [u64; 2] {
        self.template.operands[usize::from(operand)].dims
    }

    fn param_dims(&self, i: usize) -> [u64; 2] {
        self.dims(self.op.params[i])
    }

    /// The shape of an input.
    fn rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.inputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    /// The shape of an output.
    fn output_rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.outputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    /// The shape of a linear operator, whose weight is `[outputs, inputs]`.
    fn linear(&self) -> linear::Shape {
        let [outputs, inputs] = self.param_dims(0);
        linear::Shape {
            rows: self.rows(0).rows,
            inputs: inputs as usize,
            outputs: outputs as usize,
        }
    }
}

/// More operands than any operator has.
const MOST_OPERANDS: usize = 8;
