//! An NVIDIA GPU: lanes as streams, tasks issued behind their predecessors' events.
//!
//! The host's memory has the layout of the device's arena and stages what is loaded and read back;
//! only weights, optimizer state, loads and results are ever touched. The gradient is clipped on the
//! device, and the host reads the results of a pass when it has issued the next one.

mod bind;
mod fuse;
mod native;
mod operands;
mod ops;
mod step;

use crate::device::{Device, Operator, Pass, Setup, Step, Stream};
use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::progress::exchange::NativeExchange;
use crate::rank_coords::RankCoords;
use crate::run::options;
use crate::types::{Float, Types};
use native::Communicators;
use operands::Operands;
use paceline_comm::Transport;
use paceline_comm::native::Communicator;
use paceline_kernels::Rows;
use paceline_kernels::arena::{Access, Span};
use paceline_kernels::cuda::{Device as Gpu, ElementType, Mark, Places, Readback, Squares, Table};
use paceline_kernels::loss::Columns;
use paceline_plan::DType;
use paceline_plan::collective::Library;
use paceline_plan::program::{AccumulateMode, LocalOp, Pacing, Plan, Segment, Template};
use paceline_plan::units::Seconds;
use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::path::PathBuf;
use std::sync::Arc;

/// Launches of every template that some role uses, by template.
type Kernels = Vec<Vec<Launch>>;

/// One operator of a template, or several fused ones, with the operands of all.
#[derive(Debug)]
pub(crate) struct Launch {
    kernel: Box<dyn Operator<Cuda>>,
    op: LocalOp,
}

/// A GPU that executes one rank.
#[derive(Debug)]
pub(crate) struct Cuda {
    /// Before the GPU, whose memory they use.
    communicators: Communicators,
    gpu: Gpu,
    kernels: Arc<Kernels>,
    element: ElementType,
    pass: Pass,
    place: RankCoords,
    /// Size of the vocabulary.
    vocab: u32,
    /// Tokens of every sequence that the rank has.
    seq: usize,
    /// Rows of a microbatch.
    rows: usize,
    /// Positions of a sequence's tokens, and the same on the device, if they are not the first ones in order.
    positions: (Vec<u32>, Option<Table>),
    /// Longest gradient, if it is clipped.
    clip: Option<f32>,
    /// Blocks of the program's tensors.
    squares: Squares,
    /// Flags of decay of each bucket's blocks.
    decays: Vec<Table>,
    /// Rotations by base, elements of a head and tokens of a sequence.
    rotations: BTreeMap<(u64, u64, usize), Table>,
    /// Tokens of the global batch.
    tokens: f32,
    /// Tokens of every expert, by the offset of the counts that the last dispatch there wrote.
    counted: BTreeMap<u64, Vec<u32>>,
    /// Gradient of rows whose column sums the last gradient of a norm on a stream has left.
    summed: Option<(Stream, Span)>,
    /// Event of the moment at which the device was opened.
    zero: Mark,
    /// Events of two passes, used in turn, and the number of those of the current one.
    marks: [Vec<Mark>; 2],
    bank: usize,
    marked: usize,
    /// Passes left and not finished, the first one first.
    left: VecDeque<Left>,
}

/// Number of an event, by pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    bank: usize,
    number: usize,
}

/// A pass whose results are on their way.
#[derive(Debug)]
struct Left {
    end: Event,
    outputs: Vec<(Span, Readback)>,
}

impl Device for Cuda {
    type Operands<'a> = Operands<'a>;
    type Kernels = Kernels;
    type Event = Event;
    type Readback = (Span, Readback);

    const ISSUES: bool = true;
    const LIBRARY: Option<Library> = Some(Library::Nccl);

    fn bind(plan: &Plan, types: Types) -> Result<Kernels, ExecError> {
        let refuse = |what: String| {
            let (what, works) = (format!("{what} on a GPU"), WORKS);
            Err(ExecError::Unsupported { what, works })
        };
        if plan.facts().pacing != Pacing::Lockstep {
            return refuse(format!("--sync {}", plan.strategy.sync));
        }
        if plan.strategy.optimizer.needs_tensor_norms() {
            return refuse("an optimizer with tensor norms, such as lamb or lars,".into());
        }
        if types.gradient != Float::F32 {
            return refuse(format!("gradients in {}", plan.strategy.grad_dtype));
        }
        if plan.programs.iter().any(|program| program.memory.stored().0 > 0) {
            return refuse("offloading".into());
        }
        bind::bind(plan, types)
    }

    fn open(setup: &Setup<'_, Self>, memory: &Memory<'_>) -> Result<Self, Fault> {
        let Setup { plan, kernels, types, place, vocab, options } = *setup;
        let options::Device::Cuda(ordinal) = options.device else {
            unreachable!("the CPU has a device of its own");
        };
        let program = plan.program(place.rank);
        let stored = cache();
        let mut gpu = Gpu::open(ordinal, program.lanes.len(), memory.bytes(), stored.as_deref())?;
        let squares = step::squares(&mut gpu, program, place)?;
        let decays = program.buckets.iter().map(|bucket| {
            let owned = place.owned(bucket);
            step::decays(&mut gpu, bucket, owned)
        });
        let decays = decays.collect::<Result<_, _>>()?;
        let positions = place.runs(plan.strategy.seq).into_iter().flatten();
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let in_order = (0..).zip(&positions).all(|(at, &position)| at == position);
        let table = (!in_order).then(|| gpu.table(bytemuck::cast_slice(&positions))).transpose()?;
        let zero = gpu.mark(0)?;
        let mut cuda = Self {
            communicators: Communicators::new(),
            gpu,
            kernels: Arc::clone(kernels),
            element: element(types.activation),
            pass: Pass { rate: 0.0, loss_scale: 1.0, watching: false, share: 1.0 },
            place,
            vocab,
            seq: positions.len(),
            rows: positions.len() * plan.strategy.micro_batch as usize,
            positions: (positions, table),
            clip: options.clip.map(|clip| clip as f32),
            squares,
            decays,
            rotations: BTreeMap::new(),
            tokens: plan.strategy.tokens() as f32,
            counted: BTreeMap::new(),
            summed: None,
            zero,
            marks: [Vec::new(), Vec::new()],
            bank: 0,
            marked: 0,
            left: VecDeque::new(),
        };
        memory.kept().into_iter().try_for_each(|span| cuda.upload(0, memory, span))?;
        cuda.gpu.synchronise()?;
        cuda.gpu.record(0, &cuda.zero)?;
        cuda.gpu.synchronise()?;
        Ok(cuda)
    }

    fn join(
        &mut self,
        setup: &Setup<'_, Self>,
        transport: &mut dyn Transport,
    ) -> Result<(), Fault> {
        self.communicators = native::join(self, setup, transport)?;
        Ok(())
    }

    fn waits_for_ranks(&self) -> bool {
        !self.communicators.is_empty()
    }

    fn reset(&mut self, memory: &Memory<'_>) -> Result<(), Fault> {
        self.gpu.reset()?;
        (self.summed, self.marked) = (None, 0);
        self.counted.clear();
        memory.kept().into_iter().try_for_each(|span| self.upload(0, memory, span))?;
        Ok(self.gpu.synchronise()?)
    }

    fn exchange(&mut self, on: Stream, native: &NativeExchange) -> Result<(), Fault> {
        self.queue(on, native)
    }

    fn check_libraries(&mut self) -> Result<(), Fault> {
        let mut all = self.communicators.values_mut();
        Ok(all.try_for_each(|communicator| communicator.test(&mut ()).map(|_| ()))?)
    }

    fn abort(&mut self, reason: &str) {
        self.communicators.values_mut().for_each(|communicator| communicator.abort(reason));
    }

    fn begin_pass(&mut self, pass: Pass) {
        self.pass = pass;
    }

    fn end_pass(&mut self) -> Result<(), Fault> {
        self.marked = 0;
        Ok(self.gpu.synchronise()?)
    }

    fn leave_pass(&mut self, outputs: &[Span]) -> Result<(), Fault> {
        // The first stream comes behind all others, reads the results, and is waited for by them.
        for on in 1..self.gpu.streams() {
            let end = self.record(on)?;
            self.wait(0, end)?;
        }
        let outputs = outputs.iter().map(|&span| self.read_back(0, span));
        let outputs = outputs.collect::<Result<_, Fault>>()?;
        let end = self.record(0)?;
        (1..self.gpu.streams()).try_for_each(|on| self.wait(on, end))?;
        self.left.push_back(Left { end, outputs });
        (self.bank, self.marked) = (1 - self.bank, 0);
        Ok(())
    }

    fn is_idle(&self) -> Result<bool, Fault> {
        Ok(self.gpu.is_idle()?)
    }

    fn has_left(&self) -> Result<bool, Fault> {
        self.left.front().map_or(Ok(true), |left| self.is_done(left.end))
    }

    fn finish_pass(&mut self, memory: &Memory<'_>) -> Result<(), Fault> {
        let Some(Left { end, outputs }) = self.left.pop_front() else { return Ok(()) };
        self.gpu.wait_for(&self.marks[end.bank][end.number])?;
        outputs.into_iter().try_for_each(|read| self.take_back(memory, read))
    }

    fn upload(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault> {
        self.write(span);
        let views = memory.views(&[(span, Access::Read)])?;
        Ok(self.gpu.upload(on, span, views.bytes(0))?)
    }

    fn download(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault> {
        let views = memory.views(&[(span, Access::Write)])?;
        Ok(self.gpu.download(on, span, views.take_bytes(0))?)
    }

    fn read_back(&mut self, on: Stream, span: Span) -> Result<(Span, Readback), Fault> {
        Ok((span, self.gpu.read_back(on, span)?))
    }

    fn take_back(
        &mut self,
        memory: &Memory<'_>,
        (span, read): (Span, Readback),
    ) -> Result<(), Fault> {
        let views = memory.views(&[(span, Access::Write)])?;
        Ok(self.gpu.take_back(read, views.take_bytes(0))?)
    }

    fn is_done(&self, event: Event) -> Result<bool, Fault> {
        Ok(self.gpu.has_passed(&self.marks[event.bank][event.number])?)
    }

    fn segment(
        &mut self,
        on: Stream,
        memory: &Memory<'_>,
        (template, segment): (&Template, &Segment),
        running: u64,
        fresh: bool,
    ) -> Result<(), Fault> {
        let all = Arc::clone(&self.kernels);
        for Launch { kernel, op } in &all[segment.template as usize] {
            let operands = Operands::of(on, memory, (template, segment), op, running);
            operands.written().for_each(|span| self.write(span));
            kernel.run(self, &operands, operands.mode(fresh))?;
        }
        Ok(())
    }

    fn accumulate(
        &mut self,
        on: Stream,
        _: &Memory<'_>,
        (from, into): (Span, Span),
        dtype: DType,
        mode: AccumulateMode,
    ) -> Result<(), Fault> {
        self.write(into);
        match (mode, dtype) {
            (AccumulateMode::Move, _) if from == into => {}
            (AccumulateMode::Move, _) => self.gpu.copy(on, from, into)?,
            (AccumulateMode::Add, DType::F32) => self.gpu.accumulate(on, from, into)?,
            (AccumulateMode::Add, _) => self.gpu.add(on, self.element, into, from, into)?,
        }
        Ok(())
    }

    fn step(&mut self, on: Stream, memory: &Memory<'_>, step: &Step<'_>) -> Result<(), Fault> {
        self.update(on, memory, step)
    }

    fn pull(&mut self, _: &Memory<'_>, _: Span, _: Span) -> Result<(), Fault> {
        unreachable!("weights that ranks share are refused")
    }

    fn record(&mut self, on: Stream) -> Result<Event, Fault> {
        let event = Event { bank: self.bank, number: self.marked };
        let marks = &mut self.marks[event.bank];
        match marks.get(event.number) {
            Some(mark) => self.gpu.record(on, mark)?,
            None => marks.push(self.gpu.mark(on)?),
        }
        self.marked += 1;
        Ok(event)
    }

    fn wait(&mut self, on: Stream, event: Event) -> Result<(), Fault> {
        Ok(self.gpu.wait(on, &self.marks[event.bank][event.number])?)
    }

    fn time(&self, event: Event) -> Result<Seconds, Fault> {
        Ok(Seconds(self.gpu.seconds(&self.zero, &self.marks[event.bank][event.number])?))
    }

    fn taken(&self) -> Option<u64> {
        Some(self.gpu.taken())
    }
}

impl Cuda {
    /// First logical row that this rank holds, with `local` of them on every rank.
    fn first(&self, local: u64) -> u32 {
        let first = u64::from(self.place.tensor.index) * local;
        // Beyond the largest token there is only padding, to which no token refers.
        u32::try_from(first).unwrap_or(u32::MAX)
    }

    /// Vocabulary range of this rank's logit columns.
    fn columns(&self, logits: Rows) -> Columns {
        let first = self.first(logits.width as u64);
        let valid = logits.width.min(self.vocab.saturating_sub(first) as usize);
        Columns { first, valid }
    }

    /// Positions of this rank's rows: of whole sequences, or of its shard of a stream split along
    /// tokens.
    fn places(&self, rows: usize) -> Places {
        let offset = if rows < self.rows { self.place.tensor.index as usize * rows } else { 0 };
        let seq = self.seq.max(1);
        Places { table: self.positions.1, seq, offset: offset % seq }
    }

    /// Forgets what is known of memory that is about to be written: sums of columns, counts.
    fn write(&mut self, span: Span) {
        let meets =
            |of: &Span| span.offset < of.offset + of.len && of.offset < span.offset + span.len;
        self.summed = self.summed.filter(|(_, of)| !meets(of));
        let counts = |&offset: &u64| Span { offset, len: 4 };
        self.counted.retain(|offset, _| !meets(&counts(offset)));
    }
}

const WORKS: &str = "language models and an mlp run there, anything on --device cpu";

/// Folder in which the choice of algorithms is kept from run to run.
fn cache() -> Option<PathBuf> {
    let folder = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    Some(caches?.join("paceline"))
}

const fn element(float: Float) -> ElementType {
    match float {
        Float::F32 => ElementType::F32,
        Float::Bf16 => ElementType::Bf16,
        Float::F16 => ElementType::F16,
    }
}
