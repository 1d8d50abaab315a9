//! Times single computations and exchanges exactly as a run executes them.
//!
//! To predict a run, the time of its parts on this machine must be known. They are timed here
//! because only the executor knows the kernel of each operator. A probe is a program of one op on
//! its own arena, run by the same code as any other program. When a kernel or a transport gets
//! faster, so do its probes.

mod background_load;
mod bench;
mod cache_flush;
mod cache_prep;
mod core_latency;
mod exchange_timing;
mod layer_load;
mod store;
mod timing_loop;

pub use crate::memory::store::StoreError;
pub use background_load::BackgroundLoad;
pub use cache_flush::CacheFlush;
pub use cache_prep::CachePrep;
pub use core_latency::{core_round_trip, cores_migrated, round_trip};
pub use exchange_timing::{Lap, Timing, collective, delivery, message};
pub use layer_load::{LAYER, LayerLoad};
pub use store::store;

use crate::data::Data;
use crate::device::cpu::Cpu;
use crate::error::ExecError;
use crate::run::check;
use crate::run::job::{ResumePoint, RunContext};
use crate::run::options::TrainOptions;
use crate::run::stop_consensus::{SharedStop, StopConsensus};
use crate::run::threads::run_rank;
use bench::Bench;
use paceline_comm::affinity::CoreSet;
use paceline_comm::{Transport, thread as threads};
use paceline_plan::collective::{Algorithm, CollectiveKind, Method, Reduction, SummationOrder};
use paceline_plan::ids::{CallId, GroupId, LaneId, Microbatch, Rank, SegmentId};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{
    AccumulateMode, Call, ComputePass, Op, Plan, Section, Segment, StepPhase, Template, View,
};
use paceline_plan::units::Seconds;
use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Op to be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeTarget {
    /// Operator of a template, by its position.
    Operator(usize),
    /// Phase of the optimizer step on the given number of elements.
    Step(u64, StepPhase),
    /// Sum or copy of the given number of elements.
    Accumulate(u64, AccumulateMode),
}

/// Conditions of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Conditions<'a> {
    /// Number of ranks that run the same op at once, each a thread with its own memory.
    pub ranks: u32,
    /// Number of compute threads per rank.
    pub threads: NonZeroUsize,
    /// Cache preparation before each run.
    pub before: CachePrep<'a>,
    /// Minimum measuring time; sampling continues until it has passed.
    pub effort: Duration,
    /// Set from outside to return early.
    pub stop: &'a AtomicBool,
}

/// Time of one run of a probe target: the median of many runs, averaged over the ranks. An operator
/// is taken from the template `template` of the plan.
///
/// The plan must be for one rank: it supplies its shapes and its vocabulary.
pub fn time(
    plan: &Plan,
    template: usize,
    subject: ProbeTarget,
    conditions: &Conditions<'_>,
) -> Result<Seconds, ExecError> {
    let bench = Bench::new(plan, template, subject)?;
    let medians = Mutex::new(Vec::new());
    let pace = timing_loop::TimingLoop::new(conditions.ranks);
    let mut first = Ok(());
    std::thread::scope(|scope| {
        let runs: Vec<_> = threads::world(conditions.ranks)
            .into_iter()
            .map(|mut transport| {
                let (bench, pace, medians) = (&bench, &pace, &medians);
                scope.spawn(move || {
                    let rank = transport.rank().0;
                    let stand = spread(rank, conditions, || {
                        bench.set_up(&mut transport, conditions.threads)
                    })?;
                    let stand = RefCell::new(stand);
                    let before = || {
                        conditions.before.run(rank, conditions.ranks);
                        stand.borrow().wake();
                    };
                    let median = pace.median(conditions, before, || stand.borrow_mut().run())?;
                    medians.lock().unwrap_or_else(|e| e.into_inner()).push(median);
                    Ok(())
                })
            })
            .collect();
        for run in runs {
            let ended = run.join().unwrap_or_else(|panic| {
                let message = crate::run::threads::message(panic.as_ref());
                let op = format!("probe of {subject:?}");
                Err(ExecError::Panicked { rank: Rank(0), iteration: 1, op, message })
            });
            first = std::mem::replace(&mut first, Ok(())).and(ended);
        }
    });
    first?;
    let medians = medians.into_inner().unwrap_or_else(|e| e.into_inner());
    Ok(Seconds(medians.iter().sum::<f64>() / medians.len().max(1) as f64))
}

/// Sets a rank up on cores of its own, as training does. Its threads are placed where training's
/// threads end up over time: many probes finish before the scheduler rebalances.
fn spread<T>(rank: u32, conditions: &Conditions<'_>, set_up: impl FnOnce() -> T) -> T {
    match CoreSet::of(rank, conditions.ranks) {
        Some(share) if conditions.threads.get() > 1 => share.pin_with_helpers(set_up),
        Some(share) => {
            share.pin();
            set_up()
        }
        None => set_up(),
    }
}

/// Op without work, which costs only its scheduling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EmptyOp {
    /// Computation without operators.
    Computation,
    /// Collective of a single rank.
    Exchange,
}

/// Overhead of one op of a program, without its work.
pub fn overhead(plan: &Plan, turn: EmptyOp, effort: Duration) -> Result<Seconds, ExecError> {
    /// Enough ops to be a large part of an iteration's time.
    const OPS: u32 = 2000;
    let mut idle = plan.clone();
    let alone = GroupId::from(idle.groups.len());
    idle.groups.push(GroupKind::Replicas);
    let name = "nothing".to_owned();
    let template =
        Template { name, pass: ComputePass::Forward, operands: Vec::new(), ops: Vec::new() };
    let segment =
        Segment { template: plan.templates.len() as u32, layer: None, operands: Vec::new() };
    idle.templates.push(template);
    let program = &mut idle.programs[0];
    let nothing = SegmentId::from(program.segments.len());
    program.segments.push(segment);
    let call = CallId::from(program.calls.len());
    let view = View { buffer: program.buckets[0].grads.buffer, offset: 0, len: 1 };
    program.calls.push(Call {
        name: "nothing".to_owned(),
        kind: CollectiveKind::AllReduce,
        reduction: Reduction::Sum,
        method: Method::Steps(Algorithm::Direct),
        order: SummationOrder::Canonical,
        group: alone,
        root: 0,
        input: view,
        output: view,
        dtype: program.buffer(view.buffer).dtype,
        block: 1,
    });
    (program.prologue, program.epilogue) = (Section::default(), Section::default());
    program.body = Section::default();
    for microbatch in (0..OPS).map(Microbatch) {
        let op = match turn {
            EmptyOp::Computation => Op::Compute { segment: nothing, microbatch, fresh: false },
            EmptyOp::Exchange => Op::Collective { call, microbatch },
        };
        program.body.push(LaneId(0), op, &[]);
    }
    (program.in_flight, program.outputs) = (Vec::new(), Default::default());
    let mut stop = TrainOptions { iterations: u32::MAX - 1, ..TrainOptions::default() };
    stop.clip = None;
    let kernels = Arc::new(check::check::<Cpu>(&idle)?);
    let vocab = idle.samples.classes();
    let data = Data::new(&stop.data, plan.samples.clone(), 0)?;
    let clock = Instant::now();
    let run = RunContext::<Cpu> {
        plan: &idle,
        facts: idle.facts(),
        options: &stop,
        kernels: &kernels,
        types: check::types(&idle)?,
        data: &data,
        from: ResumePoint::default(),
        saving: None,
        shared_weights: None,
        vocab,
        finishes_overflow: false,
        stop: StopConsensus::Shared(SharedStop::new(stop.iterations, &stop.stop)),
        clock,
    };
    let mut times = Vec::new();
    let mut wires = threads::world(1);
    run_rank(&run, &mut wires[0], &mut |stats, _| {
        times.push(stats.took.0);
        if clock.elapsed() >= effort && times.len() > 3 {
            stop.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    })?;
    times.sort_unstable_by(f64::total_cmp);
    Ok(Seconds(times.get(times.len() / 2).copied().unwrap_or(0.0) / f64::from(OPS)))
}

/// Time to load one token of the built-in text.
pub fn load(plan: &Plan, effort: Duration) -> Result<Seconds, ExecError> {
    let (seq, source) = (plan.strategy.seq, TrainOptions::default().data);
    let data = Data::new(&source, plan.samples.clone(), 0)?;
    let mut tokens = vec![0; usize::try_from(seq).unwrap_or(1)];
    let (began, mut samples) = (Instant::now(), 0u64);
    while samples == 0 || began.elapsed() < effort {
        data.fill(samples, 0, &mut tokens)?;
        samples += 1;
    }
    Ok(Seconds(began.elapsed().as_secs_f64() / (samples * seq.max(1)) as f64))
}

#[cfg(test)]
mod tests;
