//! Starts the ranks of a plan, receives their reports, and gathers their results.

use crate::device::{self, cpu::Cpu};
use crate::error::ExecError;
use crate::interpreter::{IterationStats, Rank, RankResult, ReportFn};
use crate::memory::shared_weights::SharedWeights;
use crate::parameters;
use crate::run::job::{Job, RunContext};
use crate::run::options::{Device, TrainOptions};
use crate::run::outcome::{IterationReport, Outcome};
use crate::run::report_channel::{ReportSender, report_channel};
use crate::run::reports::ReportAggregator;
use crate::run::resident::Resident;
use crate::run::stop_consensus::{SharedStop, StopConsensus};
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

/// Initial capacity of the report queue.
const UNHEARD: usize = 1024;

/// Trains a model according to a plan. The plan must have passed `paceline_plan::validate`.
///
/// `report` is called on the calling thread for every iteration, in order. An error is the root
/// cause: errors of other ranks that follow from it are left out.
pub fn train(
    plan: &Plan,
    options: &TrainOptions,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Outcome, ExecError> {
    match options.device {
        Device::Cpu => run::<Cpu>(plan, options, report),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => run::<crate::device::cuda::Cuda>(plan, options, report),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(device::no_cuda()),
    }
}

fn run<D: device::Device>(
    plan: &Plan,
    options: &TrainOptions,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Outcome, ExecError> {
    let job = Job::<D>::new(plan, options)?;
    let resident = Resident::start();
    let refused = |source: ArenaError| ExecError::Memory { rank: RankId(0), source: source.into() };
    let shared_weights = SharedWeights::of(plan).map_err(refused)?.map(Arc::new);
    let stop = job.asked().unwrap_or_else(|| {
        StopConsensus::Shared(SharedStop::new(options.iterations, &options.stop))
    });
    let run = job.start(options.save.as_ref(), shared_weights, stop, Instant::now())?;
    let cause = OnceLock::new();
    let mut reports = ReportAggregator::new(plan, options);
    // A failure of a thread itself takes precedence over errors that ranks report about each other.
    let mut broken = None;
    let result = thread::scope(|scope| {
        let (sender, receiver) = report_channel(UNHEARD);
        let mut threads = Vec::new();
        for mut transport in wires::world(plan.mesh.world()) {
            let rank = transport.rank();
            let (run, cause, sender) = (&run, &cause, sender.clone());
            // The thread returns its transport, so that no rank leaves before all are done. If the
            // thread cannot be spawned, the transport is dropped with the closure, and ranks that
            // wait for this one are notified.
            let work = move || {
                let result = work(run, &mut transport, cause, &sender);
                (result, transport)
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
        drop(sender);
        for (rank, stats) in receiver {
            reports.add(rank, stats, report);
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
        done.into_iter().filter_map(|(result, _)| result).collect::<Vec<_>>()
    });
    match broken.or(cause.into_inner()) {
        Some(cause) => {
            run.saving.iter().for_each(|saving| saving.clear());
            Err(cause)
        }
        None => outcome(&run, reports, result, &resident),
    }
}

/// Body of one rank's thread. `None` if any rank failed; the first to fail sets the cause.
fn work<D: device::Device>(
    run: &RunContext<'_, D>,
    transport: &mut ThreadTransport,
    cause: &OnceLock<ExecError>,
    report: &ReportSender<(RankId, IterationStats)>,
) -> Option<RankResult> {
    match attempt(run, transport, report) {
        Ok(result) => Some(result),
        Err(error) => {
            let reason = error.to_string();
            if !error.is_echo() {
                // Set before the others can notice, so that their errors cannot come first.
                let _ = cause.set(error);
            }
            transport.abort(&reason);
            None
        }
    }
}

fn attempt<D: device::Device>(
    run: &RunContext<'_, D>,
    transport: &mut ThreadTransport,
    report: &ReportSender<(RankId, IterationStats)>,
) -> Result<RankResult, ExecError> {
    let id = transport.rank();
    run_rank(run, transport, &mut |stats, _| {
        report.send((id, stats));
        Ok(())
    })
}

/// Runs one rank's whole program. A panic becomes an error that names the op.
pub(crate) fn run_rank<D: device::Device>(
    run: &RunContext<'_, D>,
    transport: &mut dyn Transport,
    report: &mut ReportFn<'_>,
) -> Result<RankResult, ExecError> {
    let id = transport.rank();
    let mut rank = Rank::new(run, transport)?;
    let worked = catch_unwind(AssertUnwindSafe(|| rank.work(report)));
    worked.unwrap_or_else(|panic| {
        let (iteration, op) = rank.current_op();
        let message = message(panic.as_ref());
        Err(ExecError::Panicked { rank: id, iteration, op, message })
    })?;
    rank.into_result()
}

/// Message of a panic.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked".into())
}

fn outcome<D: device::Device>(
    run: &RunContext<'_, D>,
    reports: ReportAggregator,
    result: Vec<RankResult>,
    resident: &Resident,
) -> Result<Outcome, ExecError> {
    let plan = run.plan;
    let title = format!("{} on {} ranks", plan.model, plan.mesh.world());
    let mut trace = TraceBuilder::new(Origin::Measured, title, plan.mesh.world());
    let ranks = || (0..plan.mesh.world()).map(RankId);
    for (rank, result) in ranks().zip(&result) {
        result.recorder.write(plan, rank, &mut trace);
    }
    let held = ranks().zip(&result).filter_map(|(rank, result)| {
        result.weights.as_ref().map(|holding| (holding, plan.program(rank)))
    });
    let parameters =
        if run.options.keep_parameters { Some(parameters::assemble(held)?) } else { None };
    let mut arena_bytes: Vec<u64> = result.iter().map(|result| result.arena_bytes).collect();
    if let (Some(first), Some(shared_weights)) = (arena_bytes.first_mut(), &run.shared_weights) {
        *first += shared_weights.bytes();
    }
    let taken: Option<Vec<u64>> = result.iter().map(|result| result.device_bytes).collect();
    Ok(Outcome {
        iterations: reports.done,
        trace: trace.finish().split_arrival_wait(plan),
        peak_bytes: taken.or_else(|| resident.per_rank(&arena_bytes)),
        arena_bytes,
        copy_bytes: result.iter().map(|result| result.copy_bytes).collect(),
        floor: run.data.floor(),
        stopped: run.stop.stopped(),
        parameters,
    })
}
