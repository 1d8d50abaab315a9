//! One rank of a world whose ranks are processes.
//!
//! State that threads of one process share is exchanged between processes as messages: the leader's
//! clock, the stop consensus, iteration statistics, and at the end the rank results.

use crate::checkpoint::SaveOptions;
use crate::device::{self, cpu::Cpu};
use crate::error::ExecError;
use crate::interpreter::{IterationStats, RankResult};
use crate::parameters::{self, HeldWeights};
use crate::rank_coords::RankCoords;
use crate::run::control::{ControlTopic, LEADER, during, recv, send, try_recv};
use crate::run::job::{Job, RunContext};
use crate::run::options::{Device, TrainOptions};
use crate::run::outcome::{IterationReport, Outcome};
use crate::run::reports::ReportAggregator;
use crate::run::resident::Resident;
use crate::run::stop_consensus::{LeaderStop, StopConsensus};
use crate::run::threads::run_rank;
use paceline_comm::{CommError, Transport, mpi};
use paceline_plan::collective::{Action, Library};
use paceline_plan::ids::Rank;
use paceline_plan::program::{Pacing, Plan};
use paceline_plan::staleness::Staleness;
use paceline_plan::trace::{Origin, Trace, TraceBuilder};
use paceline_plan::units::Seconds;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::{Duration, Instant};

/// Runs this process's rank of a plan, which must have passed `paceline_plan::validate`. Every rank
/// of the world calls this with the same plan and options, each with its own transport.
///
/// Rank 0 receives every iteration through `report`, in order, and returns the outcome of the whole
/// world; the others return `None`. A rank that cannot continue reports the reason to all others.
pub fn run_process_rank(
    plan: &Plan,
    options: &TrainOptions,
    transport: &mut dyn Transport,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Option<Outcome>, ExecError> {
    let result = match options.device {
        Device::Cpu => attempt::<Cpu>(plan, options, transport, report),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => attempt::<device::cuda::Cuda>(plan, options, transport, report),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(device::no_cuda()),
    };
    if let Err(error) = &result
        && !error.is_echo()
        && !matches!(error, ExecError::ExpertOverflow { .. })
    {
        // An overflow ends all ranks alike.
        transport.abort(&error.to_string());
    }
    result
}

fn attempt<D: device::Device>(
    plan: &Plan,
    options: &TrainOptions,
    transport: &mut dyn Transport,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Option<Outcome>, ExecError> {
    if plan.programs.iter().any(|program| program.memory.shared().0 > 0) {
        let what = format!("--sync {} among processes", plan.strategy.sync);
        let works = "ranks that share their weights are threads of one process: --transport thread";
        return Err(ExecError::Unsupported { what, works });
    }
    check_shared_memory(plan, transport)?;
    check_communicators(plan)?;
    let job = Job::<D>::new(plan, options)?;
    let (rank, timeout) = (transport.rank(), options.exchange_timeout);
    let clock = sync_clock(transport, timeout).map_err(during(rank, "agreeing on the clock"))?;
    let mut save = options.save.clone();
    if let Some(save) = &mut save {
        sync_checkpoint_dir(save, transport, timeout)
            .map_err(during(rank, "agreeing on where checkpoints lie"))?;
    }
    let first = job.from.iteration;
    let stop = job.asked().unwrap_or_else(|| {
        let ahead = plan.iterations_ahead();
        StopConsensus::Leader(LeaderStop::new(options.iterations, &options.stop, timeout, ahead))
    });
    let run = job.start(save.as_ref(), None, stop, clock)?;
    let resident = Resident::start();
    let mut reports = ReportAggregator::new(plan, options);
    if rank == LEADER {
        let mut collector = ReportCollector::new(&reports, job.facts.pacing != Pacing::Lockstep);
        let result = run_rank(&run, transport, &mut |stats, transport| {
            reports.add(LEADER, stats, report);
            collector.catch_up(transport, &mut reports, report)
        });
        if let Err(error) = &result {
            run.saving.iter().for_each(|saving| saving.clear());
            if let ExecError::ExpertOverflow { .. } = error {
                // The iterations before it count.
                collector.drain(transport, timeout, &mut reports, report)?;
            }
        }
        let result = result?;
        // With asynchronous replicas, the servers count the iterations.
        collector.own = run.stop.end().map_or(collector.own, |end| end - first);
        collector.drain(transport, timeout, &mut reports, report)?;
        let left = EncodedResult::of(&run, rank, result, &resident);
        return gather(&run, transport, left, reports).map(Some);
    }
    let speaks = reports.reporting_ranks().contains(&rank);
    let (mut words, mut encoded) = (0, Vec::new());
    let result = run_rank(&run, transport, &mut |stats, transport| {
        if speaks {
            encoded.clear();
            stats.encode(&mut encoded);
            let said = send(transport, LEADER, (ControlTopic::Stats, words), &encoded);
            said.map_err(during(rank, "reporting an iteration"))?;
            words += 1;
        }
        Ok(())
    })?;
    let left = EncodedResult::of(&run, rank, result, &resident).encode(rank)?;
    send(transport, LEADER, (ControlTopic::Result, 0), &left)
        .map_err(during(rank, "handing over what it has"))?;
    Ok(None)
}

/// Checks that this process has joined MPI, if MPI carries out any of the plan's collectives.
fn check_communicators(plan: &Plan) -> Result<(), ExecError> {
    let mut calls = plan.programs.iter().flat_map(|program| &program.calls);
    let by_mpi = calls.find(|call| call.method.library() == Some(Library::Mpi));
    let Some(call) = by_mpi.filter(|_| mpi::joined().is_none()) else { return Ok(()) };
    let what = format!("'{}' by MPI, for which there is no communicator,", call.name);
    let works = "ranks that mpirun or srun has started join MPI";
    Err(ExecError::Unsupported { what, works })
}

/// Checks that this rank can map the memory of every peer with which the plan's steps share it.
fn check_shared_memory(plan: &Plan, transport: &mut dyn Transport) -> Result<(), ExecError> {
    let rank = transport.rank();
    let mut shares =
        |peer| transport.memory().is_some_and(|memory| memory.shares_memory_with(peer));
    let mut seen = BTreeSet::new();
    for call in &plan.program(rank).calls {
        if !seen.insert((call.method, call.kind, call.group)) {
            continue;
        }
        let members = plan.mesh.members(plan.group(call.group), rank);
        let me = members.iter().position(|&member| member == rank);
        let Some((me, Ok(pattern))) = me.map(|me| (me, call.pattern(members.len() as u32))) else {
            continue;
        };
        let steps = pattern.steps(me as u32).into_iter();
        let sharers = steps.filter_map(|step| match step.action {
            Action::Lend { to: peer, .. }
            | Action::Read { from: peer, .. }
            | Action::Write { to: peer, .. } => Some(members[peer as usize]),
            Action::Send { .. }
            | Action::Recv { .. }
            | Action::Fold { .. }
            | Action::Emit { .. }
            | Action::Offer { .. }
            | Action::Take { .. } => None,
        });
        if let Some(far) = { sharers }.find(|&peer| !shares(peer)) {
            let what =
                format!("'{}' between rank {rank} and rank {far} in shared memory", call.name);
            let works = "they share none; start equally many consecutive ranks on every host, or \
                         use --transport tcp";
            return Err(ExecError::Unsupported { what, works });
        }
    }
    Ok(())
}

/// Rank 0's collector of reports from the ranks that report the loss and the norm.
struct ReportCollector {
    /// Reporting ranks, each with the number of reports received.
    reporters: Vec<(Rank, u32)>,
    /// Number of iterations that rank 0 itself has completed.
    own: u32,
    /// True if the reporters count iterations independently of rank 0, and stay until it has left.
    independent: bool,
}

impl ReportCollector {
    fn new(reports: &ReportAggregator, apart: bool) -> Self {
        let others = reports.reporting_ranks().into_iter().filter(|rank| *rank != LEADER);
        Self { reporters: others.map(|rank| (rank, 0)).collect(), own: 0, independent: apart }
    }

    /// Receives the available reports without waiting.
    fn catch_up(
        &mut self,
        transport: &mut dyn Transport,
        reports: &mut ReportAggregator,
        report: &mut dyn FnMut(&IterationReport),
    ) -> Result<(), ExecError> {
        self.own += 1;
        for (rank, heard) in &mut self.reporters {
            let next = |transport: &mut dyn Transport, heard| {
                let stats = try_recv(
                    transport,
                    *rank,
                    (ControlTopic::Stats, heard),
                    IterationStats::decode,
                );
                stats.map_err(during(LEADER, "hearing of an iteration"))
            };
            // A rank that has sent all its reports may have left already.
            while (self.independent || *heard < self.own)
                && let Some(stats) = next(transport, *heard)?
            {
                *heard += 1;
                reports.add(*rank, readable(stats, *rank)?, report);
            }
        }
        Ok(())
    }

    /// Receives the remaining reports.
    fn drain(
        &mut self,
        transport: &mut dyn Transport,
        timeout: Duration,
        reports: &mut ReportAggregator,
        report: &mut dyn FnMut(&IterationReport),
    ) -> Result<(), ExecError> {
        for (rank, heard) in &mut self.reporters {
            while *heard < self.own {
                let about = (ControlTopic::Stats, *heard);
                let stats = recv(transport, *rank, about, timeout, IterationStats::decode)
                    .map_err(during(LEADER, "hearing of an iteration"))?;
                *heard += 1;
                reports.add(*rank, readable(stats, *rank)?, report);
            }
        }
        Ok(())
    }
}

impl IterationStats {
    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.iteration.to_le_bytes());
        for value in [self.loss, self.mtp_loss, self.norm, self.dropped] {
            bytes.push(u8::from(value.is_some()));
            bytes.extend(value.unwrap_or(0.0).to_le_bytes());
        }
        bytes.extend(self.took.0.to_le_bytes());
        if let Some(Staleness { mean, max, max_lead: ahead, histogram }) = self.staleness {
            bytes.extend(mean.to_le_bytes());
            bytes.extend(max.to_le_bytes());
            bytes.extend(ahead.to_le_bytes());
            bytes.extend(histogram.iter().flat_map(|count| count.to_le_bytes()));
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (iteration, rest) = bytes.split_first_chunk::<4>()?;
        let (loss, rest) = rest.split_first_chunk::<5>()?;
        let (further, rest) = rest.split_first_chunk::<5>()?;
        let (norm, rest) = rest.split_first_chunk::<5>()?;
        let (dropped, rest) = rest.split_first_chunk::<5>()?;
        let (took, rest) = rest.split_first_chunk::<8>()?;
        let staleness = || {
            let (mean, rest) = rest.split_first_chunk::<8>()?;
            let (max, rest) = rest.split_first_chunk::<8>()?;
            let (ahead, rest) = rest.split_first_chunk::<4>()?;
            let (counts, _) = rest.as_chunks::<4>();
            let counts: &[[u8; 4]; Staleness::BINS] = counts.try_into().ok()?;
            Some(Staleness {
                mean: f64::from_le_bytes(*mean),
                max: u64::from_le_bytes(*max),
                max_lead: u32::from_le_bytes(*ahead),
                histogram: counts.map(u32::from_le_bytes),
            })
        };
        let value =
            |[there, a, b, c, d]: [u8; 5]| (there != 0).then(|| f32::from_le_bytes([a, b, c, d]));
        Some(Self {
            iteration: u32::from_le_bytes(*iteration),
            loss: value(*loss),
            mtp_loss: value(*further),
            norm: value(*norm),
            dropped: value(*dropped),
            took: Seconds(f64::from_le_bytes(*took)),
            staleness: staleness(),
        })
    }
}

/// Rank result in serialisable form.
struct EncodedResult {
    arena_bytes: u64,
    copy_bytes: u64,
    peak_bytes: Option<u64>,
    trace: Trace,
    /// Weights by bucket, if requested.
    values: Option<Vec<Vec<f32>>>,
}

impl EncodedResult {
    fn of<D: device::Device>(
        run: &RunContext<'_, D>,
        rank: Rank,
        result: RankResult,
        resident: &Resident,
    ) -> Self {
        let RankResult { arena_bytes, copy_bytes, device_bytes, recorder, weights: holding } =
            result;
        let mut trace = TraceBuilder::new(Origin::Measured, "", run.plan.mesh.world());
        recorder.write(run.plan, rank, &mut trace);
        Self {
            arena_bytes,
            copy_bytes,
            peak_bytes: device_bytes.or_else(|| resident.grown(arena_bytes)),
            trace: trace.finish(),
            values: holding.map(|holding| holding.values().to_vec()),
        }
    }

    fn encode(&self, rank: Rank) -> Result<Vec<u8>, ExecError> {
        let trace = self.trace.to_json().map_err(|error| ExecError::Control {
            rank,
            doing: "writing down its trace",
            source: CommError::Job { problem: error.to_string() },
        })?;
        let mut bytes = Vec::new();
        let peak = self.peak_bytes.unwrap_or(u64::MAX);
        for number in [self.arena_bytes, self.copy_bytes, peak, trace.len() as u64] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(trace.as_bytes());
        for values in self.values.iter().flatten() {
            bytes.extend((values.len() as u64).to_le_bytes());
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        Ok(bytes)
    }

    fn decode(mut bytes: &[u8], keeps_values: bool) -> Option<Self> {
        let mut take = |count: u64| {
            let (taken, rest) = bytes.split_at_checked(usize::try_from(count).ok()?)?;
            bytes = rest;
            Some(taken)
        };
        let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
        let (arena_bytes, copy_bytes) = (number(take(8)?)?, number(take(8)?)?);
        let peak = number(take(8)?)?;
        let length = number(take(8)?)?;
        let trace = Trace::from_json(std::str::from_utf8(take(length)?).ok()?).ok()?;
        let mut values = Vec::new();
        while keeps_values && let Some(length) = take(8) {
            let (floats, _) = take(number(length)?.checked_mul(4)?)?.as_chunks::<4>();
            values.push(floats.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect());
        }
        Some(Self {
            arena_bytes,
            copy_bytes,
            peak_bytes: (peak != u64::MAX).then_some(peak),
            trace,
            values: keeps_values.then_some(values),
        })
    }
}

/// Gathers the results of all ranks into the outcome.
fn gather<D: device::Device>(
    run: &RunContext<'_, D>,
    transport: &mut dyn Transport,
    own: EncodedResult,
    reports: ReportAggregator,
) -> Result<Outcome, ExecError> {
    let RunContext { plan, options, .. } = *run;
    let world = plan.mesh.world();
    let mut left = vec![own];
    for rank in (1..world).map(Rank) {
        let read = |bytes: &[u8]| EncodedResult::decode(bytes, options.keep_parameters);
        let heard =
            recv(transport, rank, (ControlTopic::Result, 0), options.exchange_timeout, read)
                .map_err(during(LEADER, "collecting what the ranks have"))?;
        left.push(readable(heard, rank)?);
    }
    let title = format!("{} on {world} ranks", plan.model);
    let mut trace = TraceBuilder::new(Origin::Measured, title, world);
    left.iter().for_each(|left| trace.append(&left.trace));
    let held: Vec<_> = (0..world)
        .map(Rank)
        .zip(&mut left)
        .filter_map(|(rank, left)| Some((rank, left.values.take()?)))
        .map(|(rank, values)| (rank, HeldWeights::of(RankCoords::of(plan, rank), values)))
        .collect();
    let held = held.iter().map(|(rank, holding)| (holding, plan.program(*rank)));
    let parameters = if options.keep_parameters { Some(parameters::assemble(held)?) } else { None };
    Ok(Outcome {
        iterations: reports.done,
        trace: trace.finish().split_arrival_wait(plan),
        arena_bytes: left.iter().map(|left| left.arena_bytes).collect(),
        peak_bytes: left.iter().map(|left| left.peak_bytes).collect(),
        copy_bytes: left.iter().map(|left| left.copy_bytes).collect(),
        floor: run.data.floor(),
        stopped: run.stop.stopped(),
        parameters,
    })
}

fn readable<T>(decoded: Option<T>, from: Rank) -> Result<T, ExecError> {
    decoded.ok_or_else(|| ExecError::Control {
        rank: LEADER,
        doing: "hearing the others",
        source: CommError::Failed { rank: from, reason: "malformed message".into() },
    })
}

/// Distributes the leader's checkpoint directory and attempt to all ranks.
fn sync_checkpoint_dir(
    save: &mut SaveOptions,
    transport: &mut dyn Transport,
    timeout: Duration,
) -> Result<(), CommError> {
    let about = (ControlTopic::Checkpoints, 0);
    if transport.rank() != LEADER {
        let place = recv(transport, LEADER, about, timeout, |bytes| {
            let (attempt, directory) = bytes.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*attempt), OsString::from_vec(directory.to_vec())))
        })?;
        let reason = "malformed message about checkpoints";
        let place = place.ok_or(CommError::Failed { rank: LEADER, reason: reason.into() })?;
        (save.attempt, save.directory) = (place.0, place.1.into());
        return Ok(());
    }
    let mut place = save.attempt.to_le_bytes().to_vec();
    place.extend_from_slice(save.directory.as_os_str().as_bytes());
    for rank in (1..transport.world()).map(Rank) {
        send(transport, rank, about, &place)?;
    }
    Ok(())
}

/// Number of clock requests to the leader. The one with the shortest round trip counts.
const QUESTIONS: u32 = 8;

/// Start of the leader's clock, in this rank's time: taken halfway between request and response,
/// after F. Cristian, "Probabilistic clock synchronization" (1989).
fn sync_clock(transport: &mut dyn Transport, timeout: Duration) -> Result<Instant, CommError> {
    let began = Instant::now();
    if transport.rank() != LEADER {
        let mut best = (Duration::MAX, began);
        for question in 0..QUESTIONS {
            let about = (ControlTopic::Clock, question);
            let asked = Instant::now();
            send(transport, LEADER, about, &[])?;
            let shown = recv(transport, LEADER, about, timeout, |bytes| {
                bytes.try_into().map_or(0, u64::from_le_bytes)
            })?;
            let took = asked.elapsed();
            if let Some(start) = (asked + took / 2).checked_sub(Duration::from_nanos(shown)) {
                best = best.min((took, start));
            }
        }
        return Ok(best.1);
    }
    for rank in (1..transport.world()).map(Rank) {
        for question in 0..QUESTIONS {
            let about = (ControlTopic::Clock, question);
            recv(transport, rank, about, timeout, |_| ())?;
            let shown = began.elapsed().as_nanos() as u64;
            send(transport, rank, about, &shown.to_le_bytes())?;
        }
    }
    Ok(began)
}
