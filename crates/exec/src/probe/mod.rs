//! Times single computations and exchanges, exactly as a run does them.
//!
//! Whoever wants to predict a run has to know what its parts take on this machine. They are timed
//! here and not from outside because only the executor knows which kernel an operator becomes: a
//! probe is a program of one op on an arena of its own, run by the same code as any other program.
//! When a kernel or a wire gets faster, so do its probes.

mod apart;
mod before;
mod bench;
mod crowd;
mod layers;
mod pace;
mod store;
mod sweep;
mod wires;

pub use crate::store::StoreError;
pub use apart::{apart, round_trip, were_moved};
pub use before::Before;
pub use crowd::Crowd;
pub use layers::{LAYER, Layers};
pub use store::store;
pub use sweep::Sweep;
pub use wires::{Lap, Timing, collective, delivery, message};

use crate::check;
use crate::data::Data;
use crate::error::ExecError;
use crate::horizon::{Common, Horizon};
use crate::options::TrainOptions;
use crate::run::{From, Run};
use crate::train::run_rank;
use bench::Bench;
use paceline_comm::affinity::Share;
use paceline_comm::{Transport, thread as threads};
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
use paceline_plan::ids::{CallId, GroupId, LaneId, Microbatch, Rank, SegmentId};
use paceline_plan::mesh::GroupKind;
use paceline_plan::program::{
    AccumulateMode, Call, Op, Plan, Section, Segment, SegmentPass, StepPhase, Template, View,
};
use paceline_plan::units::Seconds;
use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// What is to be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// An operator of a template, by its position.
    Operator(usize),
    /// A phase of the optimizer's step on so many elements.
    Step(u64, StepPhase),
    /// A sum or copy of so many elements.
    Accumulate(u64, AccumulateMode),
}

/// Under which conditions.
#[derive(Clone, Copy, Debug)]
pub struct Conditions<'a> {
    /// Ranks that do the same at once, each a thread with its own memory.
    pub ranks: u32,
    /// Threads that compute for each of them.
    pub threads: NonZeroUsize,
    /// What comes before each run, and pushes its operands out of the caches.
    pub before: Before<'a>,
    /// How long to go on once enough was seen.
    pub effort: Duration,
    /// Set from outside to come back early.
    pub stop: &'a AtomicBool,
}

/// The time of one run of a subject, which stands in the template `template` of a plan if it is an
/// operator: the median of many, averaged over the ranks.
///
/// The plan must be one that runs on one rank: it lends its shapes and its vocabulary.
pub fn time(
    plan: &Plan,
    template: usize,
    subject: Subject,
    conditions: &Conditions<'_>,
) -> Result<Seconds, ExecError> {
    let bench = Bench::new(plan, template, subject)?;
    let medians = Mutex::new(Vec::new());
    let pace = pace::Pace::new(conditions.ranks);
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
                        conditions.before.happens(rank, conditions.ranks);
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
                let message = crate::train::message(panic.as_ref());
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

/// Sets a rank up on cores of its own, as training does. Its threads are where training's come to be in a
/// while: many probes are over before a scheduler looks where it left them.
fn spread<T>(rank: u32, conditions: &Conditions<'_>, set_up: impl FnOnce() -> T) -> T {
    match Share::of(rank, conditions.ranks) {
        Some(share) if conditions.threads.get() > 1 => share.keep_beside(set_up),
        Some(share) => {
            share.keep();
            set_up()
        }
        None => set_up(),
    }
}

/// An op that does nothing but take its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A computation of no operators.
    Computation,
    /// A collective of a rank with itself.
    Exchange,
}

/// What an op of a program takes beside its work.
pub fn overhead(plan: &Plan, turn: Turn, effort: Duration) -> Result<Seconds, ExecError> {
    /// Enough of them to be a large part of what an iteration takes.
    const OPS: u32 = 2000;
    let mut idle = plan.clone();
    let alone = GroupId::from(idle.groups.len());
    idle.groups.push(GroupKind::Replicas);
    let name = "nothing".to_owned();
    let template =
        Template { name, pass: SegmentPass::Forward, operands: Vec::new(), ops: Vec::new() };
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
        algorithm: Algorithm::Direct,
        order: Order::Canonical,
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
            Turn::Computation => Op::Compute { segment: nothing, microbatch, fresh: false },
            Turn::Exchange => Op::Collective { call, microbatch },
        };
        program.body.push(LaneId(0), op, &[]);
    }
    (program.in_flight, program.outputs) = (Vec::new(), Default::default());
    let mut stop = TrainOptions { iterations: u32::MAX - 1, ..TrainOptions::default() };
    stop.clip = None;
    let kernels = check::check(&idle)?;
    let vocab = check::vocabulary(&idle)?;
    let data = Data::new(&stop.data, check::reads(plan)?, 0)?;
    let clock = Instant::now();
    let run = Run {
        plan: &idle,
        options: &stop,
        kernels: &kernels,
        data: &data,
        from: From::default(),
        saving: None,
        commons: None,
        vocab,
        horizon: Horizon::Common(Common::new(stop.iterations, &stop.stop)),
        clock,
    };
    let mut times = Vec::new();
    let mut wires = threads::world(1);
    run_rank(&run, &mut wires[0], &mut |sight, _| {
        times.push(sight.took.0);
        if clock.elapsed() >= effort && times.len() > 3 {
            stop.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        Ok(())
    })?;
    times.sort_unstable_by(f64::total_cmp);
    Ok(Seconds(times.get(times.len() / 2).copied().unwrap_or(0.0) / f64::from(OPS)))
}

/// What bringing one token of the built-in text takes.
pub fn load(plan: &Plan, effort: Duration) -> Result<Seconds, ExecError> {
    let (seq, source) = (plan.strategy.seq, TrainOptions::default().data);
    let data = Data::new(&source, check::reads(plan)?, 0)?;
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
