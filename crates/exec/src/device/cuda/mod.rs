//! An NVIDIA GPU: lanes as streams, tasks issued behind their predecessors' events.
//!
//! The host's memory has the layout of the device's arena and stages what is loaded and read back.
//! The host waits where it needs a number: the norm before a step, and results at the end of a
//! pass.

mod bind;
mod operands;

use crate::device::cpu::step::{Held, Rule};
use crate::device::{Device, Operator, Pass, Setup, Step, Stream};
use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::run::check;
use crate::run::options;
use crate::types::{Float, Types};
use operands::Operands;
use paceline_kernels::arena::{Access, Span};
use paceline_kernels::cuda::{Device as Gpu, Mark, Update};
use paceline_plan::DType;
use paceline_plan::program::{AccumulateMode, Entry, Plan, Segment, StepPhase, Template, View};
use paceline_plan::units::Seconds;
use std::sync::Arc;

/// Operators of every template that some role uses, by template.
type Kernels = Vec<Vec<Box<dyn Operator<Cuda>>>>;

/// A GPU that executes one rank.
#[derive(Debug)]
pub(crate) struct Cuda {
    gpu: Gpu,
    kernels: Arc<Kernels>,
    place: RankCoords,
    /// Event of the moment at which the device was opened.
    zero: Mark,
    /// Events of the pass, reused by every pass, and their number so far.
    marks: Vec<Mark>,
    marked: usize,
}

/// Number of an event of the pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event(usize);

impl Device for Cuda {
    type Operands<'a> = Operands<'a>;
    type Kernels = Kernels;
    type Event = Event;

    const ISSUES: bool = true;

    fn bind(plan: &Plan, types: Types) -> Result<Kernels, ExecError> {
        let refuse = |what: &str| {
            let (what, works) = (format!("{what} on a GPU"), WORKS);
            Err(ExecError::Unsupported { what, works })
        };
        if plan.mesh.world() > 1 {
            return refuse("a plan of several ranks");
        }
        if plan.strategy.optimizer.needs_tensor_norms() {
            return refuse("an optimizer with tensor norms, such as lamb or lars,");
        }
        if [types.activation, types.gradient] != [Float::F32; 2] {
            return refuse("any type but f32");
        }
        if plan.programs.iter().any(|program| program.memory.stored().0 > 0) {
            return refuse("offloading");
        }
        check::bind_all(plan, " on a GPU", WORKS, bind::bind)
    }

    fn open(setup: &Setup<'_, Self>, memory: &Memory<'_>) -> Result<Self, Fault> {
        let Setup { plan, kernels, place, options, .. } = *setup;
        let options::Device::Cuda(ordinal) = options.device else {
            unreachable!("the CPU has a device of its own");
        };
        let streams = plan.program(place.rank).lanes.len();
        let gpu = Gpu::open(ordinal, streams, memory.bytes())?;
        let zero = gpu.mark(0)?;
        let kernels = Arc::clone(kernels);
        let mut cuda = Self { gpu, kernels, place, zero, marks: Vec::new(), marked: 0 };
        cuda.upload(0, memory, Span { offset: 0, len: memory.bytes() })?;
        cuda.gpu.synchronise()?;
        cuda.gpu.record(0, &cuda.zero)?;
        cuda.gpu.synchronise()?;
        Ok(cuda)
    }

    fn begin_pass(&mut self, _: Pass) {}

    fn end_pass(&mut self) -> Result<(), Fault> {
        self.marked = 0;
        Ok(self.gpu.synchronise()?)
    }

    fn upload(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault> {
        let views = memory.views(&[(span, Access::Read)])?;
        Ok(self.gpu.upload(on, span, views.bytes(0))?)
    }

    fn download(&mut self, on: Stream, memory: &Memory<'_>, span: Span) -> Result<(), Fault> {
        let views = memory.views(&[(span, Access::Write)])?;
        Ok(self.gpu.download(on, span, views.take_bytes(0))?)
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
        for (op, kernel) in template.ops.iter().zip(&all[segment.template as usize]) {
            let operands = Operands::of(on, memory, (template, segment), op, running);
            kernel.run(self, &operands, operands.mode(fresh))?;
        }
        Ok(())
    }

    fn accumulate(
        &mut self,
        on: Stream,
        _: &Memory<'_>,
        (from, into): (Span, Span),
        _: DType,
        mode: AccumulateMode,
    ) -> Result<(), Fault> {
        match mode {
            AccumulateMode::Move if from == into => {}
            AccumulateMode::Move => self.gpu.copy(on, from, into)?,
            AccumulateMode::Add => self.gpu.add(on, from, into)?,
        }
        Ok(())
    }

    fn step(&mut self, on: Stream, memory: &Memory<'_>, step: &Step<'_>) -> Result<(), Fault> {
        let Step { bucket, phase, rule, running, .. } = *step;
        match phase {
            StepPhase::Apply if bucket.updated => {}
            // Rules with tensor norms and exchanges of momenta are refused.
            StepPhase::Apply
            | StepPhase::TensorNorms
            | StepPhase::LocalMomentum
            | StepPhase::ApplyMomentum => return Ok(()),
        }
        let owned = self.place.owned(bucket);
        for entry in &bucket.entries {
            let elements = entry.offset..entry.offset + entry.elements();
            let held = Held { memory, running, owned: &owned, elements };
            let moments = bucket.moments.iter().map(|&view: &View| held.span(view));
            let moments: Vec<Span> = moments.collect();
            let (params, grads) = (held.span(bucket.params), held.span(bucket.grads));
            self.gpu.update(on, update(&rule, entry), params, grads, &moments)?;
        }
        Ok(())
    }

    fn pull(&mut self, _: &Memory<'_>, _: Span, _: Span) -> Result<(), Fault> {
        unreachable!("one rank shares no weights")
    }

    fn record(&mut self, on: Stream) -> Result<Event, Fault> {
        let event = Event(self.marked);
        match self.marks.get(event.0) {
            Some(mark) => self.gpu.record(on, mark)?,
            None => self.marks.push(self.gpu.mark(on)?),
        }
        self.marked += 1;
        Ok(event)
    }

    fn wait(&mut self, on: Stream, event: Event) -> Result<(), Fault> {
        Ok(self.gpu.wait(on, &self.marks[event.0])?)
    }

    fn time(&self, event: Event) -> Result<Seconds, Fault> {
        Ok(Seconds(self.gpu.seconds(&self.zero, &self.marks[event.0])?))
    }

    fn taken(&self) -> Option<u64> {
        Some(self.gpu.taken())
    }
}

const WORKS: &str = "one rank of an mlp runs there, anything on --device cpu";

/// Update of an entry's elements, with all constants computed.
fn update(rule: &Rule, entry: &Entry) -> Update {
    let decays = |decay: f64| if entry.decay { decay as f32 } else { 0.0 };
    match rule {
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
    }
}
