//! The CPU: segments as kernels on the threads of a rank, directly in its arena.

pub(crate) mod bind;
pub(crate) mod compressed_adam;
pub(crate) mod fuse;
pub(crate) mod hogwild;
mod operands;
pub(crate) mod ops;
pub(crate) mod step;
mod tiles;

use crate::device::uses::Uses;
use crate::device::{Device, OpShape, Operator, Pass, Setup, Step, Stream};
use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::progress::exchange::NativeExchange;
use crate::rank_coords::RankCoords;
use crate::run::check;
use crate::run::expert_overflow::finishes_overflow;
use crate::types::{Float, Types};
use bind::Bound;
use compressed_adam::MomentumExchange;
use fuse::Step as FusedStep;
pub(crate) use operands::Operands;
use ops::clicks::TablesHeld;
use ops::experts::Routed;
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, ArenaError, Span};
use paceline_kernels::experts::dispatch::Full;
use paceline_kernels::loss::Columns;
use paceline_kernels::pool::{Choice, Pool};
use paceline_kernels::{Bf16, F16, Rows, reduce};
use paceline_plan::DType;
use paceline_plan::collective::Library;
use paceline_plan::graph::{OpKind, OpPass};
use paceline_plan::program::{AccumulateMode, LocalOp, Plan, Segment, StepPhase, Template};
use paceline_plan::units::Seconds;
use std::sync::Arc;
use tiles::add;

/// Kernels of a plan on the CPU.
#[derive(Debug)]
pub(crate) struct Kernels {
    /// Kernels of every template that some role uses, by template.
    of: Vec<Vec<Bound>>,
    /// Execution steps of the kernels, by template.
    pub(crate) steps: Vec<Vec<FusedStep>>,
}

/// State of one rank's computations besides its memory.
#[derive(Debug)]
pub(crate) struct Cpu {
    kernels: Arc<Kernels>,
    place: RankCoords,
    pool: Pool,
    /// For every step of every template, whether helper threads gain time.
    choices: Vec<Vec<Choice>>,
    /// Size of the vocabulary.
    vocab: u32,
    /// Number of tokens of the global batch.
    tokens: f32,
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
    /// Embedding table rows that this rank holds, if the model has tables.
    tables: Option<TablesHeld>,
    types: Types,
    pub(crate) pass: Pass,
}

impl Device for Cpu {
    type Operands<'a> = Operands<'a>;
    type Kernels = Kernels;

    type Event = ();
    type Readback = ();

    const ISSUES: bool = false;
    const LIBRARY: Option<Library> = Some(Library::Mpi);

    /// In 16 bits a fused kernel rounds every intermediate result, as separate operators do.
    fn bind(plan: &Plan, types: Types) -> Result<Kernels, ExecError> {
        let of = check::bind_all(plan, "", "dense models run", |kind, pass| {
            bind::bind(kind, pass, types)
        })?;
        let several = of.iter().any(|kernels| kernels.len() > 1);
        let uses = several.then(|| Uses::of(plan));
        let steps = |(at, kernels): (usize, &Vec<Bound>)| match &uses {
            Some(uses) if !kernels.is_empty() => fuse::fuse(at, &plan.templates[at], uses),
            Some(_) | None => (0..kernels.len()).map(FusedStep::One).collect(),
        };
        let steps = of.iter().enumerate().map(steps).collect();
        Ok(Kernels { of, steps })
    }

    fn open(setup: &Setup<'_, Self>, _: &Memory<'_>) -> Result<Self, Fault> {
        let Setup { plan, kernels, types, place, vocab, options, .. } = *setup;
        let pool = Pool::new(options.threads_per_rank).map_err(Fault::Threads)?;
        Ok(Self::new(plan, kernels, types, place, vocab, pool))
    }

    fn join(&mut self, _: &Setup<'_, Self>, _: &mut dyn Transport) -> Result<(), Fault> {
        Ok(())
    }

    fn waits_for_ranks(&self) -> bool {
        false
    }

    fn reset(&mut self, _: &Memory<'_>) -> Result<(), Fault> {
        Ok(())
    }

    fn exchange(&mut self, _: Stream, _: &NativeExchange) -> Result<(), Fault> {
        unreachable!("a plan whose exchanges a library performs is refused")
    }

    fn check_libraries(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn abort(&mut self, _: &str) {}

    fn begin_pass(&mut self, pass: Pass) {
        self.pass = pass;
    }

    fn is_idle(&self) -> Result<bool, Fault> {
        Ok(true)
    }

    fn has_left(&self) -> Result<bool, Fault> {
        Ok(true)
    }

    fn end_pass(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn leave_pass(&mut self, _: &[Span]) -> Result<(), Fault> {
        Ok(())
    }

    fn finish_pass(&mut self, _: &Memory<'_>) -> Result<(), Fault> {
        Ok(())
    }

    fn upload(&mut self, _: Stream, _: &Memory<'_>, _: Span) -> Result<(), Fault> {
        Ok(())
    }

    fn download(&mut self, _: Stream, _: &Memory<'_>, _: Span) -> Result<(), Fault> {
        Ok(())
    }

    fn read_back(&mut self, _: Stream, _: Span) -> Result<(), Fault> {
        Ok(())
    }

    fn take_back(&mut self, _: &Memory<'_>, (): ()) -> Result<(), Fault> {
        Ok(())
    }

    fn is_done(&self, (): ()) -> Result<bool, Fault> {
        Ok(true)
    }

    fn segment(
        &mut self,
        _: Stream,
        memory: &Memory<'_>,
        (template, segment): (&Template, &Segment),
        running: u64,
        fresh: bool,
    ) -> Result<(), Fault> {
        let all = Arc::clone(&self.kernels);
        let at = segment.template as usize;
        let watching = self.pass.watching;
        if watching {
            for (op, kernel) in template.ops.iter().zip(&all.of[at]) {
                let operands = Operands::of(memory, template, segment, op, running)?;
                kernel.run(self, &operands, operands.mode(fresh))?;
                drop(operands);
                if op.kind != OpKind::RowMax {
                    check_finite(memory, template, segment, op, running)?;
                }
            }
            return Ok(());
        }
        for (number, step) in all.steps[at].iter().enumerate() {
            let (op, kernel): (_, &dyn Operator<Self>) = match step {
                FusedStep::One(number) => (&template.ops[*number], &*all.of[at][*number]),
                FusedStep::Several(kernel, op) => (op, kernel),
            };
            let operands = Operands::of(memory, template, segment, op, running)?;
            let timing = self.pool.begin(&self.choices[at][number]);
            let done = kernel.run(self, &operands, operands.mode(fresh));
            self.pool.end(timing, &mut self.choices[at][number]);
            done?;
        }
        Ok(())
    }

    fn accumulate(
        &mut self,
        _: Stream,
        memory: &Memory<'_>,
        (from, into): (Span, Span),
        dtype: DType,
        mode: AccumulateMode,
    ) -> Result<(), Fault> {
        match mode {
            AccumulateMode::Move => memory.copy(from, into)?,
            AccumulateMode::Add => {
                let views = memory.views(&[(from, Access::Read), (into, Access::Write)])?;
                match Float::of(dtype).unwrap_or(Float::F32) {
                    Float::F32 => add::<f32>(&self.pool, views.slice(0), views.take(1)),
                    Float::Bf16 => add::<Bf16>(&self.pool, views.slice(0), views.take(1)),
                    Float::F16 => add::<F16>(&self.pool, views.slice(0), views.take(1)),
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, _: Stream, memory: &Memory<'_>, step: &Step<'_>) -> Result<(), Fault> {
        let (types, pool, place) = (self.types, &self.pool, self.place);
        let Step { bucket, phase, rule, momentum, running, norm: _ } = *step;
        let on = MomentumExchange { types, memory, pool, place, bucket, running };
        match (phase, momentum) {
            (StepPhase::TensorNorms | StepPhase::Apply, _) => {
                rule.step(types, memory, pool, place, bucket, phase, running)?;
            }
            (StepPhase::LocalMomentum, Some(momentum)) => on.local_momentum(&momentum)?,
            (StepPhase::ApplyMomentum, Some(momentum)) => on.apply_momentum(&momentum)?,
            (StepPhase::LocalMomentum | StepPhase::ApplyMomentum, None) => {}
        }
        Ok(())
    }

    fn pull(&mut self, memory: &Memory<'_>, from: Span, into: Span) -> Result<(), Fault> {
        Ok(hogwild::pull(&self.pool, memory, from, into)?)
    }

    fn record(&mut self, _: Stream) -> Result<(), Fault> {
        Ok(())
    }

    fn wait(&mut self, _: Stream, (): ()) -> Result<(), Fault> {
        Ok(())
    }

    fn time(&self, (): ()) -> Result<Seconds, Fault> {
        Ok(Seconds(0.0))
    }

    fn take_overflow(&mut self) -> Option<Full> {
        self.routed.take_overflow()
    }

    fn taken(&self) -> Option<u64> {
        None
    }
}

impl Cpu {
    /// Creates the state; `pool` holds the threads that compute for this rank.
    pub(crate) fn new(
        plan: &Plan,
        kernels: &Arc<Kernels>,
        types: Types,
        place: RankCoords,
        vocab: u32,
        pool: Pool,
    ) -> Self {
        let program = plan.program(place.rank);
        let seq = plan.strategy.seq;
        let runs = place.runs(seq).into_iter().flatten();
        let sequence: Vec<u32> = runs.map(|position| position as u32).collect();
        let rows = plan.strategy.micro_batch * sequence.len() as u64;
        let used = || program.segments.iter().map(|segment| segment.template as usize);
        let needs = used().flat_map(|t| {
            let template = &plan.templates[t];
            let shape = |op| OpShape { template, op };
            let ops = template.ops.iter().zip(&kernels.of[t]);
            ops.map(|(op, kernel)| kernel.workspace(&shape(op), pool.threads())).max()
        });
        let kinds = used().flat_map(|t| plan.templates[t].ops.iter().map(|op| op.kind));
        let choices = kernels.steps.iter().map(|steps| vec![Choice::default(); steps.len()]);
        Self {
            choices: choices.collect(),
            kernels: Arc::clone(kernels),
            place,
            vocab,
            tokens: plan.strategy.tokens() as f32,
            own_seq: sequence.len(),
            positions: sequence.iter().copied().cycle().take(rows as usize).collect(),
            workspace: vec![0.0; needs.max().unwrap_or(0)],
            order: vec![0; rows as usize],
            routed: Routed::for_all(kinds, finishes_overflow(plan)),
            tables: TablesHeld::of(program, place),
            types,
            pass: Pass { rate: 0.0, loss_scale: 1.0, watching: false, share: 1.0 },
            pool,
        }
    }

    /// Threads that compute for this rank.
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// First logical row or column that this rank holds, with `local` of them on every rank.
    pub(in crate::device::cpu) fn first(&self, local: u64) -> u32 {
        let first = u64::from(self.place.tensor.index) * local;
        // Beyond the largest token there is only padding, to which no token refers.
        u32::try_from(first).unwrap_or(u32::MAX)
    }

    /// Vocabulary range of this rank's logit columns.
    pub(in crate::device::cpu) fn columns(&self, logits: Rows) -> Columns {
        let first = self.first(logits.width as u64);
        let valid = logits.width.min(self.vocab.saturating_sub(first) as usize);
        Columns { first, valid }
    }

    /// Positions of this rank's rows: of one sequence if it has whole ones, or of its shard of a
    /// stream split along tokens.
    pub(in crate::device::cpu) fn positions(&self, rows: usize) -> &[u32] {
        let first =
            if rows < self.positions.len() { self.place.tensor.index as usize * rows } else { 0 };
        let seq = self.sequence().len();
        if first.is_multiple_of(seq) && rows.is_multiple_of(seq) {
            return self.sequence();
        }
        &self.positions[first..first + rows]
    }

    /// Positions of one sequence.
    pub(in crate::device::cpu) fn sequence(&self) -> &[u32] {
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
                    from = "weights that are no longer finite";
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
