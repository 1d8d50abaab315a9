//! Starts the ranks of a plan, hears their reports, and puts together what is left of them.

use crate::check;
use crate::checkpoint::{Shared, TrainingState};
use crate::commons::Commons;
use crate::data::Data;
use crate::error::ExecError;
use crate::hearing::{Speaker, hearing};
use crate::horizon::{Asked, Common, Dealt, Horizon};
use crate::options::{Device, Start, TrainOptions};
use crate::outcome::{IterationReport, Outcome};
use crate::parameters;
use crate::rank::{Rank, Remains, Sight, Tell};
use crate::reports::Reports;
use crate::resident::Resident;
use crate::run::{From, Run};
use crate::warm_up::warm_up;
use paceline_comm::Transport;
use paceline_comm::thread::{self as wires, ThreadTransport};
use paceline_kernels::arena::ArenaError;
use paceline_plan::ids::Rank as RankId;
use paceline_plan::program::Plan;
use paceline_plan::trace::{Origin, TraceBuilder};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

/// How many words of ranks there is room for until they are heard.
const UNHEARD: usize = 1024;

/// Trains a model as a plan says. The plan must have passed `paceline_plan::validate`.
///
/// `report` is called on the calling thread for every iteration, in order. An error is the first
/// cause: what the other ranks then said for want of the first is left out.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Outcome, ExecError> {
    options.check()?;
    match options.device {
        Device::Cpu => {}
        Device::Cuda(ordinal) => return on_gpu(plan, options, ordinal, report),
    }
    let kernels = check::check(plan)?;
    let vocab = check::vocabulary(plan)?;
    let data = Data::new(&options.data, check::reads(plan)?, options.seed)?;
    let data = data.again(options.distinct);
    let saving = options.save.as_ref().map(|save| Shared::new(save, plan, options.silence));
    let begins = from(plan, options, &data)?;
    let resident = Resident::start();
    let refused = |source: ArenaError| ExecError::Memory { rank: RankId(0), source: source.into() };
    let commons = Commons::of(plan).map_err(refused)?;
    let run = Run {
        plan,
        options,
        kernels: &kernels,
        from: begins,
        data: &data,
        saving: saving.transpose()?.map(Arc::new),
        commons: commons.map(Arc::new),
        vocab,
        horizon: asked(plan, options, begins.iteration)
            .unwrap_or_else(|| Horizon::Common(Common::new(options.iterations, &options.stop))),
        clock: Instant::now(),
    };
    let cause = OnceLock::new();
    let mut reports = Reports::new(plan, options);
    // What goes wrong with a thread itself comes before anything that ranks say about each other.
    let mut broken = None;
    let remains = thread::scope(|scope| {
        let (tell, hear) = hearing(UNHEARD);
        let mut threads = Vec::new();
        for mut transport in wires::world(plan.mesh.world()) {
            let rank = transport.rank();
            let (run, cause, tell) = (&run, &cause, tell.clone());
            // The wires are handed back, so that no rank leaves before all are done. If there is no
            // thread, they go down with the closure; the ranks that wait for this one hear of it.
            let work = move || {
                let remains = work(run, &mut transport, cause, &tell);
                (remains, transport)
            };
            let name = format!("rank {rank}");
            match thread::Builder::new().name(name).spawn_scoped(scope, work) {
                Ok(thread) => threads.push((rank, thread)),
                Err(source) => {
                    broken = Some(ExecError::Thread { rank, source });
                    break;
                }
            }
        }
        drop(tell);
        for (rank, sight) in hear {
            reports.hear(rank, sight, report);
        }
        let mut done = Vec::new();
        for (rank, thread) in threads {
            match thread.join() {
                Ok(end) => done.push(end),
                Err(panic) => {
                    let (op, message) = ("start".into(), message(panic.as_ref()));
                    broken = Some(ExecError::Panicked { rank, iteration: 1, op, message });
                }
            }
        }
        done.into_iter().filter_map(|(remains, _)| remains).collect::<Vec<_>>()
    });
    match broken.or(cause.into_inner()) {
        Some(cause) => {
            run.saving.iter().for_each(|saving| saving.clear());
            Err(cause)
        }
        None => outcome(&run, reports, remains, &resident),
    }
}

/// How far ranks go that do not wait for each other; none if they do.
pub(crate) fn asked<'a>(plan: &Plan, options: &'a TrainOptions, first: u32) -> Option<Horizon<'a>> {
    let servers = plan.mesh.size()..plan.mesh.world();
    let (stop, silence) = (&*options.stop, options.silence);
    match (plan.strategy.sync.is_async(), servers.is_empty()) {
        (false, _) => None,
        (true, false) => Some(Horizon::Asked(Asked::new(servers, first, stop, silence))),
        (true, true) => {
            let ranks = plan.mesh.size();
            Some(Horizon::Dealt(Dealt::new(ranks, first, options.iterations, stop)))
        }
    }
}

/// Where a run begins. A checkpoint's moments belong to one optimizer.
pub(crate) fn from(plan: &Plan, options: &TrainOptions, data: &Data) -> Result<From, ExecError> {
    let state = match &options.start {
        Start::Seed | Start::Pretrained(_) => None,
        Start::Checkpoint(checkpoint) => Some(checkpoint.state()),
    };
    let warm_up = warm_up(&plan.strategy, options.iterations, state)?;
    let Some(state) = state else {
        return Ok(From { warm_up, ..From::default() });
    };
    let TrainingState { iteration, optimizer, data: ref position, .. } = *state;
    if optimizer != plan.strategy.optimizer {
        let value = format!("{:?}", plan.strategy.optimizer).to_lowercase();
        let works = "the optimizer of the run that is resumed";
        return Err(ExecError::Option { option: "--optimizer", value, works });
    }
    let samples = if position.source == data.name() { position.samples } else { 0 };
    Ok(From { iteration, samples, warm_up })
}

#[cfg(feature = "cuda")]
use crate::cuda::train as on_gpu;

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: &Plan,
    _: &TrainOptions,
    ordinal: usize,
    _: &mut dyn FnMut(&IterationReport),
) -> Result<Outcome, ExecError> {
    let what = format!("--device cuda:{ordinal}");
    Err(ExecError::Unsupported { what, works: "a paceline built with --features cuda can" })
}

/// One rank's thread. None if the run failed, here or elsewhere; the first to fail says why.
fn work(
    run: &Run<'_>,
    transport: &mut ThreadTransport,
    cause: &OnceLock<ExecError>,
    tell: &Speaker<(RankId, Sight)>,
) -> Option<Remains> {
    match attempt(run, transport, tell) {
        Ok(remains) => Some(remains),
        Err(error) => {
            let reason = error.to_string();
            if !error.is_echo() {
                // Set before the others can notice, so that theirs cannot come first.
                let _ = cause.set(error);
            }
            transport.abort(&reason);
            None
        }
    }
}

fn attempt(
    run: &Run<'_>,
    transport: &mut ThreadTransport,
    tell: &Speaker<(RankId, Sight)>,
) -> Result<Remains, ExecError> {
    let id = transport.rank();
    run_rank(run, transport, &mut |sight, _| {
        tell.say((id, sight));
        Ok(())
    })
}

/// Runs one rank's whole program. A panic is an error that says where.
pub(crate) fn run_rank(
    run: &Run<'_>,
    transport: &mut dyn Transport,
    tell: &mut Tell<'_>,
) -> Result<Remains, ExecError> {
    let id = transport.rank();
    let mut rank = Rank::new(run, transport)?;
    let worked = catch_unwind(AssertUnwindSafe(|| rank.work(tell)));
    worked.unwrap_or_else(|panic| {
        let (iteration, op) = rank.whereabouts();
        let message = message(panic.as_ref());
        Err(ExecError::Panicked { rank: id, iteration, op, message })
    })?;
    rank.remains()
}

/// What a panic said.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".into())
}

fn outcome(
    run: &Run<'_>,
    reports: Reports,
    remains: Vec<Remains>,
    resident: &Resident,
) -> Result<Outcome, ExecError> {
    let plan = run.plan;
    let title = format!("{} on {} ranks", plan.model, plan.mesh.world());
    let mut trace = TraceBuilder::new(Origin::Measured, title, plan.mesh.world());
    let ranks = || (0..plan.mesh.world()).map(RankId);
    for (rank, remains) in ranks().zip(&remains) {
        remains.recorder.write(plan, rank, &mut trace);
    }
    let held = ranks().zip(&remains).filter_map(|(rank, remains)| {
        remains.holding.as_ref().map(|holding| (holding, plan.program(rank)))
    });
    let parameters =
        if run.options.keep_parameters { Some(parameters::assemble(held)?) } else { None };
    let mut arena_bytes: Vec<u64> = remains.iter().map(|remains| remains.arena_bytes).collect();
    if let (Some(first), Some(commons)) = (arena_bytes.first_mut(), &run.commons) {
        *first += commons.bytes();
    }
    Ok(Outcome {
        iterations: reports.done,
        trace: trace.finish().gathered(plan),
        peak_bytes: resident.per_rank(&arena_bytes),
        arena_bytes,
        copy_bytes: remains.iter().map(|remains| remains.copy_bytes).collect(),
        floor: run.data.floor(),
        stopped: run.horizon.stopped(),
        parameters,
    })
}
