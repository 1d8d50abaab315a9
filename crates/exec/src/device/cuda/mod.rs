//! Execution of one rank on a GPU: the same program, at the same offsets, with lanes as streams.
//!
//! The compute lane is one stream; all other lanes (loading, communication) are a second one. An op
//! is queued when its turn comes and then counts as done for the host. The device preserves the
//! order of its stream. If an op depends on one of the other stream, its stream waits for that op's
//! mark. The host waits at the end of an iteration, when it reads the loss, and before the
//! optimizer's first step, when it reads the norm.

use crate::data::Data;
use crate::device::cpu::kernel::Kernel;
use crate::device::cpu::step::{Held, Rule};
use crate::error::{ExecError, Fault};
use crate::interpreter::IterationStats;
use crate::interpreter::lanes::WaitSpan;
use crate::interpreter::queue::ReadyQueue;
use crate::interpreter::recorder::Recorder;
use crate::memory::{Memory, within};
use crate::parameters::{self, HeldWeights};
use crate::rank_coords::RankCoords;
use crate::run::check;
use crate::run::loss_scale::LossScale;
use crate::run::options::{Start, TrainOptions};
use crate::run::outcome::{IterationReport, Outcome};
use crate::run::reports::ReportAggregator;
use crate::run::stop_consensus::SharedStop;
use crate::types::Float;
use paceline_comm::thread;
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::cuda::{CudaError, Device, Function, Mark, Stream, Update};
use paceline_kernels::{Rows, Write, linear};
use paceline_plan::DType;
use paceline_plan::graph::{ActivationKind, BLOCK, NormKind};
use paceline_plan::ids::{BufferId, LaneId, Microbatch, OpId, Rank};
use paceline_plan::program::label::describe;
use paceline_plan::program::{
    AccumulateMode, Bucket, LoadKind, LocalOp, Op, Plan, Program, Section, Segment, Template, View,
};
use paceline_plan::trace::{Origin, TraceBuilder};
use paceline_plan::units::Seconds;
use std::time::Instant;

const COMPUTE: Stream = 0;
const COPY: Stream = 1;

/// Trains a plan of one rank on a GPU; otherwise like [`crate::train()`].
pub(crate) fn train(
    plan: &Plan,
    options: &TrainOptions,
    ordinal: usize,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Outcome, ExecError> {
    let kernels = check::check(plan)?;
    supported(plan, options, &kernels)?;
    let data = Data::new(&options.data, check::reads(plan)?, options.seed)?;
    let data = data.repeat_first(options.distinct);
    let (rank, program) = (Rank(0), plan.program(Rank(0)));
    let place = RankCoords::of(plan, rank);
    let memory = host_memory(program, &kernels, place, options.seed)?;
    let bytes = memory.bytes();
    let whole = Span { offset: 0, len: bytes };
    let starting = |source| {
        let (iteration, op, source) = (1, "start".into(), Fault::Gpu(source));
        ExecError::Op { rank, iteration, op, source }
    };
    let device = Device::open(ordinal, 2, bytes).map_err(starting)?;
    let refused = |source: ArenaError| ExecError::Memory { rank, source: source.into() };
    let views = memory.views(&[(whole, Access::Read)]).map_err(refused)?;
    device.upload(COMPUTE, whole, views.bytes(0)).map_err(starting)?;
    drop(views);
    device.synchronise().map_err(starting)?;
    let recorder = Recorder::new(Instant::now(), program, options.traced);
    let zero = device.mark(COMPUTE).map_err(starting)?;
    let mut gpu = Gpu {
        plan,
        program,
        options,
        kernels: &kernels,
        data: &data,
        place,
        memory: &memory,
        device: &device,
        recorder,
        zero,
        marks: Vec::new(),
        spans: Vec::new(),
        tokens: Vec::new(),
    };
    let stop = SharedStop::new(options.iterations, &options.stop);
    let mut reports = ReportAggregator::new(plan, options);
    gpu.work(&stop, &mut |stats| {
        reports.add(rank, stats, report);
    })?;
    let recorder = gpu.recorder;
    let mut trace =
        TraceBuilder::new(Origin::Measured, format!("{} on {}", plan.model, device.name()), 1);
    recorder.write(plan, rank, &mut trace);
    let parameters = if options.keep_parameters {
        let views = memory.views(&[(whole, Access::Write)]).map_err(refused)?;
        device.download(COMPUTE, whole, views.take_bytes(0)).map_err(starting)?;
        drop(views);
        let read = HeldWeights::read(&memory, place, program);
        let holding = read.map_err(|source| ExecError::Memory { rank, source })?;
        Some(parameters::assemble([(&holding, program)])?)
    } else {
        None
    };
    Ok(Outcome {
        iterations: reports.done,
        trace: trace.finish(),
        arena_bytes: vec![bytes],
        peak_bytes: Some(vec![device.taken()]),
        copy_bytes: vec![0],
        floor: data.floor(),
        stopped: crate::run::stop_consensus::StopConsensus::Shared(stop).stopped(),
        parameters,
    })
}

/// Creates the arena on the host, with the initial weights.
fn host_memory<'p>(
    program: &'p Program,
    kernels: &check::Kernels,
    place: RankCoords,
    seed: u64,
) -> Result<Memory<'p>, ExecError> {
    let rank = place.rank;
    let failed = |source| ExecError::Op { rank, iteration: 1, op: "start".into(), source };
    let mut wires = thread::world(1);
    let memory = Memory::new(program, &mut wires[0]).map_err(failed)?;
    parameters::initialise(&memory, kernels.types, place, program, seed)
        .map_err(|source| ExecError::Memory { rank, source })?;
    Ok(memory)
}

/// Rejects plans and options that have no GPU kernel yet.
fn supported(
    plan: &Plan,
    options: &TrainOptions,
    kernels: &check::Kernels,
) -> Result<(), ExecError> {
    let refuse = |what: &str| {
        let what = format!("{what} on a GPU");
        Err(ExecError::Unsupported {
            what,
            works: "one rank of an mlp runs there, anything on --device cpu",
        })
    };
    if plan.mesh.world() > 1 {
        return refuse("a plan of several ranks");
    }
    if plan.strategy.optimizer.needs_tensor_norms() {
        return refuse("an optimizer with tensor norms, such as lamb or lars,");
    }
    if options.save.is_some() || !matches!(options.start, Start::Seed) {
        return refuse("saving and resuming");
    }
    if [kernels.types.activation, kernels.types.gradient] != [Float::F32; 2] {
        return refuse("any type but f32");
    }
    for kernel in kernels.of.iter().flatten() {
        match kernel {
            Kernel::Attention(_)
            | Kernel::AttentionInput(_)
            | Kernel::KeysValues { .. }
            | Kernel::KeysValuesInput { .. }
            | Kernel::AttentionBlock { .. }
            | Kernel::AttentionBlockInput { .. } => return refuse("attention"),
            Kernel::Rope(_) | Kernel::RopeInput(_) => return refuse("rotary embedding"),
            Kernel::Expert(_) | Kernel::Total => return refuse("experts"),
            Kernel::Heads(_) => return refuse("norms of heads and latent attention"),
            Kernel::Position | Kernel::PositionWeight => return refuse("position embedding"),
            Kernel::Images(_) => return refuse("a network on images"),
            Kernel::Clicks(_)
            | Kernel::BinaryCrossEntropy
            | Kernel::BinaryCrossEntropyInput { .. } => return refuse("a recommendation model"),
            Kernel::Embedding
            | Kernel::EmbeddingWeight
            | Kernel::Norm { .. }
            | Kernel::NormInput { .. }
            | Kernel::NormWeight { .. }
            | Kernel::Linear
            | Kernel::LinearInput
            | Kernel::LinearWeight
            | Kernel::Bias
            | Kernel::BiasWeight
            | Kernel::Activation(_)
            | Kernel::ActivationInput(_)
            | Kernel::SwiGlu
            | Kernel::SwiGluInput
            | Kernel::Add
            | Kernel::RowMax
            | Kernel::SoftmaxStats
            | Kernel::CrossEntropy
            | Kernel::CrossEntropyInput { .. }
            | Kernel::BlockSquares { .. }
            | Kernel::TensorSquares
            | Kernel::Norm2 => {}
            Kernel::Compress(_) | Kernel::Outer(_) => return refuse("what replicas exchange"),
        }
    }
    Ok(())
}

struct Gpu<'a> {
    plan: &'a Plan,
    program: &'a Program,
    options: &'a TrainOptions,
    kernels: &'a check::Kernels,
    data: &'a Data,
    place: RankCoords,
    /// Offsets of buffers; the host's copy of the arena.
    memory: &'a Memory<'a>,
    device: &'a Device,
    recorder: Recorder,
    /// Device mark at the zero of the recorder's clock.
    zero: Mark,
    /// End marks by op of the running section.
    marks: Vec<Option<Mark>>,
    /// Ops of the iteration, until their times can be read.
    spans: Vec<(LaneId, OpId, u32, Mark)>,
    /// Host buffer for the upload of a load.
    tokens: Vec<u32>,
}

impl<'a> Gpu<'a> {
    fn work(
        &mut self,
        stop: &SharedStop<'_>,
        report: &mut dyn FnMut(IterationStats),
    ) -> Result<(), ExecError> {
        let program = self.program;
        self.run(&program.prologue, 0, 0)?;
        let before = program.prologue.nodes.len() as u32;
        let mut iteration = 0;
        let mut ended = self.recorder.now();
        while stop.begin(iteration) {
            self.run(&program.body, before, iteration)?;
            let stats = self.stats(iteration, &mut ended)?;
            iteration += 1;
            if let Some(loss) = stats.loss.filter(|loss| !loss.is_finite()) {
                return Err(ExecError::Diverged { iteration, loss });
            }
            report(stats);
        }
        let before = before + program.body.nodes.len() as u32;
        self.run(&program.epilogue, before, iteration.saturating_sub(1))
    }

    /// Queues a section, waits for its end and records the times of its ops.
    fn run(&mut self, section: &'a Section, before: u32, iteration: u32) -> Result<(), ExecError> {
        let lanes = self.program.lanes.len();
        let mut queue = ReadyQueue::new(section, lanes, &[]);
        queue.open();
        self.marks.clear();
        self.marks.resize_with(section.nodes.len(), || None);
        while !queue.is_drained() {
            let mut moved = false;
            for lane in (0..lanes).map(LaneId::from) {
                let Some((op, _)) = queue.ready(lane) else { continue };
                self.enqueue(section, lane, op, iteration)
                    .map_err(|source| self.failed(section, op, iteration, source))?;
                queue.finish(lane);
                moved = true;
            }
            if !moved {
                let (rank, iteration) = (self.place.rank, iteration + 1);
                return Err(ExecError::Stuck { rank, iteration, op: "its lanes".into() });
            }
        }
        let (rank, ended_at) = (self.place.rank, iteration + 1);
        let ended = |source| {
            let (op, source) = ("the end of an iteration".into(), Fault::Gpu(source));
            ExecError::Op { rank, iteration: ended_at, op, source }
        };
        self.device.synchronise().map_err(ended)?;
        for (lane, op, iteration, start) in std::mem::take(&mut self.spans) {
            let Some(end) = &self.marks[op.index()] else { continue };
            let at = |mark: &Mark| self.device.seconds(&self.zero, mark).map(Seconds);
            let times = (at(&start).map_err(ended)?, at(end).map_err(ended)?);
            self.recorder.note_between(lane, before + op.0, iteration, times, WaitSpan::default());
        }
        Ok(())
    }

    fn failed(&self, section: &Section, op: OpId, iteration: u32, source: Fault) -> ExecError {
        let op = describe(self.plan, self.program, &section.nodes[op.index()].op);
        ExecError::Op { rank: self.place.rank, iteration: iteration + 1, op, source }
    }

    /// Queues an op behind its dependencies.
    fn enqueue(
        &mut self,
        section: &Section,
        lane: LaneId,
        op: OpId,
        iteration: u32,
    ) -> Result<(), Fault> {
        let stream_of = |lane: LaneId| if lane.index() == 0 { COMPUTE } else { COPY };
        let stream = stream_of(lane);
        for earlier in section.after(op) {
            if stream_of(section.nodes[earlier.index()].lane) != stream
                && let Some(mark) = &self.marks[earlier.index()]
            {
                self.device.wait(stream, mark)?;
            }
        }
        let start = self.device.mark(stream)?;
        self.perform(&section.nodes[op.index()].op, stream, iteration)?;
        self.marks[op.index()] = Some(self.device.mark(stream)?);
        self.spans.push((lane, op, iteration, start));
        Ok(())
    }

    fn perform(&mut self, op: &Op, stream: Stream, iteration: u32) -> Result<(), Fault> {
        let running = |microbatch: Microbatch| {
            u64::from(iteration) * u64::from(self.plan.strategy.microbatches())
                + u64::from(microbatch.0)
        };
        let now = running(Microbatch(0));
        match *op {
            Op::Load { what, into, microbatch } => {
                let span = self.memory.whole(into, running(microbatch));
                self.load(stream, what, span, iteration, microbatch)
            }
            Op::Compute { segment, microbatch, fresh } => {
                let (segment, running) = (self.program.segment(segment), running(microbatch));
                Ok(self.segment(stream, segment, running, fresh)?)
            }
            Op::Accumulate { from, into, mode } => {
                let (from, into) = (self.memory.span(from, now), self.memory.span(into, now));
                match mode {
                    AccumulateMode::Move if from == into => Ok(()),
                    AccumulateMode::Move => Ok(self.device.copy(stream, from, into)?),
                    AccumulateMode::Add => Ok(self.device.add(stream, from, into)?),
                }
            }
            Op::Step { bucket, phase: _ } => {
                let norm = match self.program.outputs.norm {
                    Some(norm) => Some(self.scalar(norm, now)?),
                    None => None,
                };
                let scale = LossScale::new(&self.plan.strategy, self.options);
                let rule = Rule::new(&self.plan.strategy, self.options, iteration, norm, &scale);
                Ok(self.step(stream, &rule, &self.program.buckets[bucket as usize], now)?)
            }
            Op::Free { .. } => Ok(()),
            Op::Send { .. }
            | Op::Recv { .. }
            | Op::Collective { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Serve { .. } => unreachable!("one rank exchanges nothing"),
        }
    }

    /// Uploads consecutive samples of the global batch.
    fn load(
        &mut self,
        stream: Stream,
        what: LoadKind,
        span: Span,
        iteration: u32,
        microbatch: Microbatch,
    ) -> Result<(), Fault> {
        let strategy = &self.plan.strategy;
        let ahead = match what {
            LoadKind::Tokens | LoadKind::Features => 0,
            LoadKind::Targets => 1,
            LoadKind::Lookahead(places) => u64::from(places),
        };
        self.tokens.resize((span.len / 4) as usize, 0);
        let before = u64::from(iteration) * strategy.global_batch;
        let first = before.wrapping_add(u64::from(microbatch.0) * strategy.micro_batch);
        for (sample, tokens) in (first..).zip(self.tokens.chunks_mut(strategy.seq as usize)) {
            self.data.fill(sample, ahead, tokens)?;
        }
        let bytes: Vec<u8> = self.tokens.iter().flat_map(|token| token.to_ne_bytes()).collect();
        Ok(self.device.upload(stream, span, &bytes)?)
    }

    fn segment(
        &self,
        stream: Stream,
        segment: &Segment,
        running: u64,
        fresh: bool,
    ) -> Result<(), CudaError> {
        let template = &self.plan.templates[segment.template as usize];
        let kernels = &self.kernels.of[segment.template as usize];
        for (op, &kernel) in template.ops.iter().zip(kernels) {
            let on = Operands { memory: self.memory, template, segment, op, running };
            self.compute(stream, kernel, &on, fresh)?;
        }
        Ok(())
    }

    fn compute(
        &self,
        stream: Stream,
        kernel: Kernel,
        on: &Operands<'_>,
        fresh: bool,
    ) -> Result<(), CudaError> {
        let fresh = fresh && !on.op.adds(on.template);
        let mode = if fresh { Write::Overwrite } else { Write::Accumulate };
        let gpu = self.device;
        match kernel {
            Kernel::Embedding => {
                gpu.embedding(stream, on.output_rows(0), on.input(0), on.param(0), on.output(0))
            }
            Kernel::EmbeddingWeight => {
                let (dy, ids) = (on.input(0), on.input(1));
                gpu.embedding_weight(stream, on.rows(0), ids, dy, on.param(0), mode)
            }
            Kernel::Norm { norm, eps } => {
                let beta = (norm == NormKind::Layer).then(|| on.param(1));
                let (x, gamma, y) = (on.input(0), on.param(0), on.output(0));
                gpu.norm(stream, on.rows(0), eps, x, gamma, beta, y, on.output(1))
            }
            Kernel::NormInput { norm } => {
                let (layer, dy, x) = (norm == NormKind::Layer, on.input(0), on.input(1));
                let (gamma, stats, dx) = (on.param(0), on.input(2), on.output(0));
                gpu.norm_input(stream, on.rows(0), layer, dy, x, gamma, stats, dx)
            }
            Kernel::NormWeight { norm } => {
                let dbeta = (norm == NormKind::Layer).then(|| on.param(1));
                let (dy, x, stats) = (on.input(0), on.input(1), on.input(2));
                gpu.norm_weight(stream, on.rows(0), dy, x, stats, on.param(0), dbeta, mode)
            }
            Kernel::Linear => {
                gpu.linear(stream, on.linear(), on.input(0), on.param(0), on.output(0))
            }
            Kernel::LinearInput => {
                gpu.linear_input(stream, on.linear(), on.input(0), on.param(0), on.output(0))
            }
            Kernel::LinearWeight => {
                let (dy, x) = (on.input(0), on.input(1));
                gpu.linear_weight(stream, on.linear(), dy, x, on.param(0), mode)
            }
            Kernel::Bias => gpu.bias(stream, on.rows(0), on.input(0), on.param(0), on.output(0)),
            Kernel::BiasWeight => {
                gpu.bias_weight(stream, on.rows(0), on.input(0), on.param(0), mode)
            }
            Kernel::Activation(kind) => {
                gpu.activation(stream, function(kind), on.input(0), on.output(0))
            }
            Kernel::ActivationInput(kind) => {
                let (dy, x) = (on.input(0), on.input(1));
                gpu.activation_input(stream, function(kind), dy, x, on.output(0))
            }
            Kernel::SwiGlu => gpu.swiglu(stream, on.output_rows(0), on.input(0), on.output(0)),
            Kernel::SwiGluInput => {
                gpu.swiglu_input(stream, on.rows(0), on.input(0), on.input(1), on.output(0))
            }
            Kernel::Add => gpu.add3(stream, on.input(0), on.input(1), on.output(0)),
            Kernel::RowMax => gpu.row_max(stream, on.rows(0), on.input(0), on.output(0)),
            Kernel::SoftmaxStats => {
                let (logits, max, targets) = (on.input(0), on.input(1), on.input(2));
                gpu.softmax_stats(stream, on.rows(0), logits, max, targets, on.output(0))
            }
            Kernel::CrossEntropy => {
                gpu.cross_entropy(stream, on.rows(0).rows, on.input(0), on.output(0), mode)
            }
            Kernel::CrossEntropyInput { scale } => {
                let (stats, max, targets) = (on.input(0), on.input(2), on.input(3));
                let dlogits = on.output(0);
                // If the gradient replaces the logits in place, they are stored there already.
                let logits = if on.input(1).len == 0 { dlogits } else { on.input(1) };
                let shape = on.rows(1);
                gpu.cross_entropy_input(stream, shape, scale, stats, logits, max, targets, dlogits)
            }
            Kernel::BlockSquares { .. } => {
                gpu.block_squares(stream, on.input(0), BLOCK, on.output(0))
            }
            Kernel::TensorSquares => self.tensor_squares(stream, on.input(0), on.output(0)),
            Kernel::Norm2 => gpu.sum(stream, on.input(0), on.output(0), true),
            Kernel::Attention(_)
            | Kernel::AttentionInput(_)
            | Kernel::KeysValues { .. }
            | Kernel::KeysValuesInput { .. }
            | Kernel::AttentionBlock { .. }
            | Kernel::AttentionBlockInput { .. }
            | Kernel::Rope(_)
            | Kernel::RopeInput(_)
            | Kernel::Images(_)
            | Kernel::Clicks(_)
            | Kernel::BinaryCrossEntropy
            | Kernel::BinaryCrossEntropyInput { .. }
            | Kernel::Position
            | Kernel::PositionWeight
            | Kernel::Expert(_)
            | Kernel::Heads(_)
            | Kernel::Total
            | Kernel::Compress(_)
            | Kernel::Outer(_) => unreachable!("refused before the start"),
        }
    }

    /// Like [`crate::device::cpu::step::tensor_squares`], for a single rank.
    fn tensor_squares(&self, stream: Stream, blocks: Span, sums: Span) -> Result<(), CudaError> {
        self.device.fill(stream, sums, 0.0)?;
        let mut before = 0;
        for bucket in &self.program.buckets {
            for entry in bucket.entries.iter().filter(|entry| entry.counted) {
                let first = before + entry.offset / BLOCK;
                let count = entry.elements().div_ceil(BLOCK);
                let from = within(blocks, DType::F32, first..first + count);
                let slot = u64::from(entry.norm_entry);
                let into = within(sums, DType::F32, slot..slot + 1);
                self.device.sum(stream, from, into, false)?;
            }
            before += bucket.elements / BLOCK;
        }
        Ok(())
    }

    fn step(
        &self,
        stream: Stream,
        rule: &Rule,
        bucket: &Bucket,
        running: u64,
    ) -> Result<(), CudaError> {
        if !bucket.updated {
            return Ok(());
        }
        let owned = self.place.owned(bucket);
        for entry in &bucket.entries {
            let elements = entry.offset..entry.offset + entry.elements();
            let held = Held { memory: self.memory, running, owned: &owned, elements };
            let span = |view: View| held.span(view);
            let moments: Vec<Span> = bucket.moments.iter().map(|&view| span(view)).collect();
            let decays = |decay: f64| if entry.decay { decay as f32 } else { 0.0 };
            let update = match rule {
                Rule::Sgd(rule) => Update::Sgd {
                    lr: rule.lr as f32,
                    decay: decays(rule.weight_decay),
                    scale: rule.grad_scale,
                },
                Rule::Momentum(rule) => Update::Momentum {
                    lr: rule.lr as f32,
                    keep: rule.momentum as f32,
                    decay: decays(rule.weight_decay),
                    scale: rule.grad_scale,
                },
                Rule::AdamW(rule) => Update::AdamW(rule.constants(entry.decay)),
                Rule::Lamb(_) | Rule::Lars(_) => unreachable!("refused before the start"),
            };
            self.device.update(
                stream,
                update,
                span(bucket.params),
                span(bucket.grads),
                &moments,
            )?;
        }
        Ok(())
    }

    fn stats(&self, iteration: u32, ended: &mut Seconds) -> Result<IterationStats, ExecError> {
        let running = u64::from(iteration) * u64::from(self.plan.strategy.microbatches());
        let read = |buffer: Option<BufferId>| {
            let value = buffer.map(|buffer| self.scalar(buffer, running)).transpose();
            let (rank, iteration) = (self.place.rank, iteration + 1);
            value.map_err(|source| {
                let (op, source) = ("reading a result".to_owned(), Fault::Gpu(source));
                ExecError::Op { rank, iteration, op, source }
            })
        };
        let (loss, norm) = (read(self.program.outputs.loss)?, read(self.program.outputs.norm)?);
        let now = self.recorder.now();
        let took = now - std::mem::replace(ended, now);
        Ok(IterationStats {
            iteration,
            loss,
            mtp_loss: None,
            norm,
            dropped: None,
            staleness: None,
            took,
        })
    }

    /// Downloads a number once the compute stream has reached this point.
    fn scalar(&self, buffer: BufferId, running: u64) -> Result<f32, CudaError> {
        let span = Span { len: 4, ..self.memory.whole(buffer, running) };
        let mut bytes = [0; 4];
        self.device.download(COMPUTE, span, &mut bytes)?;
        Ok(f32::from_ne_bytes(bytes))
    }
}

fn function(kind: ActivationKind) -> Function {
    match kind {
        ActivationKind::Gelu => Function::Gelu,
        ActivationKind::Relu => Function::Relu,
        ActivationKind::SquaredRelu => Function::SquaredRelu,
    }
}

/// Operands of one operator, as spans of the arena.
struct Operands<'a> {
    memory: &'a Memory<'a>,
    template: &'a Template,
    segment: &'a Segment,
    op: &'a LocalOp,
    running: u64,
}

impl Operands<'_> {
    fn span(&self, operand: u16) -> Span {
        self.memory.span(self.segment.operands[usize::from(operand)], self.running)
    }

    fn input(&self, i: usize) -> Span {
        self.span(self.op.inputs[i])
    }

    fn param(&self, i: usize) -> Span {
        self.span(self.op.params[i])
    }

    fn output(&self, i: usize) -> Span {
        self.span(self.op.outputs[i])
    }

    fn shape(&self, operand: u16) -> Rows {
        let [rows, width] = self.template.operands[usize::from(operand)].dims;
        Rows { rows: rows as usize, width: width as usize }
    }

    fn rows(&self, i: usize) -> Rows {
        self.shape(self.op.inputs[i])
    }

    fn output_rows(&self, i: usize) -> Rows {
        self.shape(self.op.outputs[i])
    }

    fn linear(&self) -> linear::Shape {
        let Rows { rows: outputs, width: inputs } = self.shape(self.op.params[0]);
        linear::Shape { rows: self.rows(0).rows, inputs, outputs }
    }
}
