//! Devices that execute the ops of a rank's program, and the seam between them and the
//! interpreter.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod uses;

use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::progress::exchange::NativeExchange;
use crate::rank_coords::RankCoords;
use crate::run::options::TrainOptions;
use crate::types::Types;
use cpu::step::Rule;
use paceline_comm::Transport;
use paceline_kernels::arena::Span;
use paceline_kernels::compressed_adam::CompressedAdam;
use paceline_kernels::experts::dispatch::Full;
use paceline_kernels::{Rows, Write, linear};
use paceline_plan::DType;
use paceline_plan::collective::Library;
use paceline_plan::program::{AccumulateMode, Bucket, LocalOp, Plan, Segment, StepPhase, Template};
use paceline_plan::units::Seconds;
use std::fmt;
use std::sync::Arc;

/// Executes the tasks of one rank, on streams that are numbered like the lanes of its program.
///
/// Host memory has the layout of the device's arena: the CPU computes in it; for any other device
/// it is the staging area of loads, results and checkpoints.
pub(crate) trait Device: Sized + fmt::Debug + 'static {
    /// Operands of an operator in the device's memory.
    type Operands<'a>;
    /// Kernels of a plan.
    type Kernels: fmt::Debug + Send + Sync;
    /// Point in the order of a stream that other streams can wait for.
    type Event: Copy + fmt::Debug;
    /// Bytes of a span on their way to the host.
    type Readback: fmt::Debug;

    /// True if tasks are issued to streams and complete later. Edges between streams are then
    /// events, and a task may be issued once those before it are.
    const ISSUES: bool;

    /// Finds the kernels of a plan, or fails with the first part that cannot be run.
    fn bind(plan: &Plan, types: Types) -> Result<Self::Kernels, ExecError>;

    /// Opens the device for a rank.
    fn open(setup: &Setup<'_, Self>, memory: &Memory<'_>) -> Result<Self, Fault>;

    /// Library that performs exchanges in the device's memory, if there is one.
    const LIBRARY: Option<Library>;

    /// Joins the groups of the plan's library with the other ranks.
    fn join(&mut self, setup: &Setup<'_, Self>, transport: &mut dyn Transport)
    -> Result<(), Fault>;

    /// Returns true if tasks may wait on the device for other ranks. What a first use of a kernel or
    /// of memory waits for must not be among them, so that all tasks are run once before.
    fn waits_for_ranks(&self) -> bool;

    /// Brings memory to the state that it had when the device was opened.
    fn reset(&mut self, memory: &Memory<'_>) -> Result<(), Fault>;

    /// Queues an exchange that the library performs.
    fn exchange(&mut self, on: Stream, native: &NativeExchange) -> Result<(), Fault>;

    /// Fails if the library has.
    fn check_libraries(&mut self) -> Result<(), Fault>;

    /// Ends the exchanges of the library, so that none waits for another rank.
    fn abort(&mut self, reason: &str);

    /// Begins a pass of the body.
    fn begin_pass(&mut self, pass: Pass);

    /// Waits for everything issued.
    fn end_pass(&mut self) -> Result<(), Fault>;

    /// Ends a pass without waiting for it: what is issued next comes behind all of it. At most one
    /// pass besides the current one is left and not finished.
    fn leave_pass(&mut self, outputs: &[Span]) -> Result<(), Fault>;

    /// Returns true if everything issued is done.
    fn is_idle(&self) -> Result<bool, Fault>;

    /// Returns true if the pass left first is done.
    fn has_left(&self) -> Result<bool, Fault>;

    /// Waits for the pass left first, whose outputs are in host memory then.
    fn finish_pass(&mut self, memory: &Memory<'_>) -> Result<(), Fault>;

    /// Copies a span of host memory to the device.
    fn upload(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault>;

    /// Copies a span of the device to host memory, behind what is issued on the stream.
    fn download(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault>;

    /// Queues a copy of a span to the host, behind what is issued on the stream.
    fn read_back(&mut self, on: Stream, span: Span) -> Result<Self::Readback, Fault>;

    /// Copies bytes that have arrived to host memory.
    fn take_back(&mut self, memory: &Memory<'_>, read: Self::Readback) -> Result<(), Fault>;

    /// Returns true if everything before an event is done.
    fn is_done(&self, event: Self::Event) -> Result<bool, Fault>;

    /// Computes a segment for microbatch number `running`; `fresh` overwrites gradients.
    fn segment(
        &mut self,
        on: Stream,
        memory: &Memory<'_>,
        what: (&Template, &Segment),
        running: u64,
        fresh: bool,
    ) -> Result<(), Fault>;

    /// Copies or adds one span to another.
    fn accumulate(
        &mut self,
        on: Stream,
        memory: &Memory<'_>,
        spans: (Span, Span),
        dtype: DType,
        mode: AccumulateMode,
    ) -> Result<(), Fault>;

    /// Runs a phase of the update of a bucket.
    fn step(&mut self, on: Stream, memory: &Memory<'_>, step: &Step<'_>) -> Result<(), Fault>;

    /// Copies shared weights into the arena.
    fn pull(&mut self, memory: &Memory<'_>, from: Span, into: Span) -> Result<(), Fault>;

    /// Marks this point of a stream.
    fn record(&mut self, on: Stream) -> Result<Self::Event, Fault>;

    /// Lets a stream wait for an event of another.
    fn wait(&mut self, on: Stream, event: Self::Event) -> Result<(), Fault>;

    /// Time of an event of the pass that has ended or been finished last, since the device was opened.
    fn time(&self, event: Self::Event) -> Result<Seconds, Fault>;

    /// Takes the largest overflow of experts' buffers since the last call, on a device that computes
    /// on with the tokens that have a place; others fail.
    fn take_overflow(&mut self) -> Option<Full> {
        None
    }

    /// Device memory outside the host that this rank takes.
    fn taken(&self) -> Option<u64>;
}

/// Refusal of a build without GPUs.
#[cfg(not(feature = "cuda"))]
pub(crate) fn no_cuda() -> ExecError {
    let works = "a paceline built with --features cuda can";
    ExecError::Unsupported { what: "--device cuda".into(), works }
}

/// Number of a stream: that of the lane.
pub(crate) type Stream = usize;

/// Plan, kernels and options that a device is opened with.
#[derive(Debug)]
pub(crate) struct Setup<'a, D: Device> {
    pub(crate) plan: &'a Plan,
    pub(crate) kernels: &'a Arc<D::Kernels>,
    pub(crate) types: Types,
    pub(crate) place: RankCoords,
    pub(crate) vocab: u32,
    pub(crate) options: &'a TrainOptions,
}

/// Constants of one pass of the body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pass {
    /// Learning rate of row updates.
    pub(crate) rate: f32,
    /// Factor of the loss gradient, so that small gradients stay in range.
    pub(crate) loss_scale: f32,
    /// True if every output of an operator is checked for non-finite values.
    pub(crate) watching: bool,
    /// Factor of this replica's step in the mean of local SGD.
    pub(crate) share: f32,
}

/// Phase of the update of a bucket.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    pub(crate) bucket: &'a Bucket,
    pub(crate) phase: StepPhase,
    pub(crate) rule: Rule,
    /// Rule of the momentum exchange, where first moments are exchanged.
    pub(crate) momentum: Option<CompressedAdam>,
    /// Number of the microbatch, over all iterations, whose buffer copies are used.
    pub(crate) running: u64,
    /// Norm of the gradient in the memory of a device that issues its tasks, which clips by it and
    /// leaves the weights as they are if it is not finite; the rule of other devices is clipped.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU reads the norm itself"))]
    pub(crate) norm: Option<Span>,
}

/// One pass of an operator, bound to a kernel of a device.
pub(crate) trait Operator<D: Device>: Send + Sync {
    /// Elements of workspace that it needs with `threads` threads.
    fn workspace(&self, shape: &OpShape<'_>, threads: usize) -> usize;

    /// Runs it on its operands.
    fn run(&self, device: &mut D, on: &D::Operands<'_>, mode: Write) -> Result<(), Fault>;
}

impl<D: Device> fmt::Debug for dyn Operator<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Operator")
    }
}

/// Shapes of an operator's operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpShape<'a> {
    pub(crate) template: &'a Template,
    pub(crate) op: &'a LocalOp,
}

impl OpShape<'_> {
    fn dims(&self, operand: u16) -> [u64; 2] {
        self.template.operands[usize::from(operand)].dims
    }

    /// Dimensions of a parameter.
    pub(crate) fn param_dims(&self, i: usize) -> [u64; 2] {
        self.dims(self.op.params[i])
    }

    /// Shape of an input.
    pub(crate) fn rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.inputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    /// Shape of an output.
    pub(crate) fn output_rows(&self, i: usize) -> Rows {
        let [rows, width] = self.dims(self.op.outputs[i]);
        Rows { rows: rows as usize, width: width as usize }
    }

    /// Number of inputs.
    pub(crate) fn inputs(&self) -> usize {
        self.op.inputs.len()
    }

    /// Number of outputs.
    pub(crate) fn outputs(&self) -> usize {
        self.op.outputs.len()
    }

    /// Returns true if the operator has a parameter `i`.
    pub(crate) fn has_param(&self, i: usize) -> bool {
        i < self.op.params.len()
    }

    /// Shape of a linear operator, whose weight is `[outputs, inputs]`.
    pub(crate) fn linear(&self) -> linear::Shape {
        let [outputs, inputs] = self.param_dims(0).map(|n| n as usize);
        linear::Shape { rows: self.rows(0).rows, inputs, outputs }
    }

    /// Mode of writing gradients: fresh segments overwrite those that are not always added.
    pub(crate) fn mode(&self, fresh: bool) -> Write {
        match fresh && !self.op.adds(self.template) {
            true => Write::Overwrite,
            false => Write::Accumulate,
        }
    }
}
