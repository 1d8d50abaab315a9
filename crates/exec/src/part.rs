//! One rank of a world whose ranks are processes.
//!
//! What threads of one process have in common, processes tell each other: the leader's clock, how
//! far to go, what was seen of an iteration, and at the end what is left of each rank.

use crate::check;
use crate::checkpoint::{SaveOptions, Shared};
use crate::control::{LEADER, Subject, during, hear, say, try_hear};
use crate::data::Data;
use crate::error::ExecError;
use crate::horizon::{Horizon, Led};
use crate::options::{Device, TrainOptions};
use crate::outcome::{IterationReport, Outcome};
use crate::parameters::{self, Holding};
use crate::place::Place;
use crate::rank::{Remains, Sight};
use crate::reports::Reports;
use crate::resident::Resident;
use crate::run::Run;
use crate::staleness::Staleness;
use crate::train::{asked, from, run_rank};
use paceline_comm::{CommError, Transport};
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use paceline_plan::trace::{Origin, Trace, TraceBuilder};
use paceline_plan::units::Seconds;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs this process's rank of a plan, which must have passed `paceline_plan::validate`. Every rank
/// of the world calls this with the same plan and options, each over its own end of the wires.
///
/// Rank 0 hears of every iteration through `report`, in order, and gets the outcome of the whole
/// world; the others get none. A rank that cannot go on tells all others why.
pub fn take_part(
    plan: &Plan,
    options: &TrainOptions,
    transport: &mut dyn Transport,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Option<Outcome>, ExecError> {
    let result = attempt(plan, options, transport, report);
    if let Err(error) = &result
        && !error.is_echo()
    {
        transport.abort(&error.to_string());
    }
    result
}

fn attempt(
    plan: &Plan,
    options: &TrainOptions,
    transport: &mut dyn Transport,
    report: &mut dyn FnMut(&IterationReport),
) -> Result<Option<Outcome>, ExecError> {
    options.check()?;
    if options.device != Device::Cpu {
        let what = "a GPU for one rank of several".to_owned();
        return Err(ExecError::Unsupported { what, works: "--device cpu runs any layout" });
    }
    if plan.programs.iter().any(|program| program.memory.shared().0 > 0) {
        let what = format!("--sync {} among processes", plan.strategy.sync);
        let works = "ranks that share their weights are threads of one process: --transport thread";
        return Err(ExecError::Unsupported { what, works });
    }
    let kernels = check::check(plan)?;
    let vocab = check::vocabulary(plan)?;
    let data = Data::new(&options.data, check::reads(plan)?, options.seed)?;
    let data = data.again(options.distinct);
    let (rank, patience) = (transport.rank(), options.silence);
    let clock =
        agree_on_clock(transport, patience).map_err(during(rank, "agreeing on the clock"))?;
    let mut save = options.save.clone();
    if let Some(save) = &mut save {
        agree_on_place(save, transport, patience)
            .map_err(during(rank, "agreeing on where checkpoints lie"))?;
    }
    let saving = save.as_ref().map(|save| Shared::new(save, plan, patience));
    let begins = from(plan, options, &data)?;
    let first = begins.iteration;
    let run = Run {
        plan,
        options,
        kernels: &kernels,
        from: begins,
        data: &data,
        saving: saving.transpose()?.map(Arc::new),
        commons: None,
        vocab,
        horizon: match asked(plan, options, first) {
            Some(asked) => asked,
            None => Horizon::Led(Led::new(
                options.iterations,
                &options.stop,
                patience,
                plan.iterations_ahead(),
            )),
        },
        clock,
    };
    let resident = Resident::start();
    let mut reports = Reports::new(plan, options);
    if rank == LEADER {
        let mut ears = Ears::new(&reports, plan.strategy.sync.is_async());
        let remains = run_rank(&run, transport, &mut |sight, transport| {
            reports.hear(LEADER, sight, report);
            ears.catch_up(transport, &mut reports, report)
        });
        if remains.is_err() {
            run.saving.iter().for_each(|saving| saving.clear());
        }
        let remains = remains?;
        // Where replicas wait for nobody, the servers count the iterations.
        ears.own = run.horizon.end().map_or(ears.own, |end| end - first);
        ears.hear_out(transport, patience, &mut reports, report)?;
        let left = Left::of(&run, rank, remains, &resident);
        return gather(&run, transport, left, reports).map(Some);
    }
    let speaks = reports.speakers().contains(&rank);
    let mut words = 0;
    let remains = run_rank(&run, transport, &mut |sight, transport| {
        if speaks {
            let said = say(transport, LEADER, (Subject::Sight, words), &sight.encode());
            said.map_err(during(rank, "reporting an iteration"))?;
            words += 1;
        }
        Ok(())
    })?;
    let left = Left::of(&run, rank, remains, &resident).encode(rank)?;
    say(transport, LEADER, (Subject::Remains, 0), &left)
        .map_err(during(rank, "handing over what it has"))?;
    Ok(None)
}

/// What rank 0 still has to hear of the ranks that speak for the loss and the norm.
struct Ears {
    /// Each with how often it was heard.
    speakers: Vec<(Rank, u32)>,
    /// How many iterations rank 0 itself has seen the end of.
    own: u32,
    /// Whether the speakers count other iterations than rank 0, and stay until it has left.
    apart: bool,
}

impl Ears {
    fn new(reports: &Reports, apart: bool) -> Self {
        let others = reports.speakers().into_iter().filter(|rank| *rank != LEADER);
        Self { speakers: others.map(|rank| (rank, 0)).collect(), own: 0, apart }
    }

    /// Hears what there is, without waiting.
    fn catch_up(
        &mut self,
        transport: &mut dyn Transport,
        reports: &mut Reports,
        report: &mut dyn FnMut(&IterationReport),
    ) -> Result<(), ExecError> {
        self.own += 1;
        for (rank, heard) in &mut self.speakers {
            let next = |transport: &mut dyn Transport, heard| {
                let sight = try_hear(transport, *rank, (Subject::Sight, heard), Sight::decode);
                sight.map_err(during(LEADER, "hearing of an iteration"))
            };
            // Whoever has said all may have left already.
            while (self.apart || *heard < self.own)
                && let Some(sight) = next(transport, *heard)?
            {
                *heard += 1;
                reports.hear(*rank, readable(sight, *rank)?, report);
            }
        }
        Ok(())
    }

    /// Hears the rest.
    fn hear_out(
        &mut self,
        transport: &mut dyn Transport,
        patience: Duration,
        reports: &mut Reports,
        report: &mut dyn FnMut(&IterationReport),
    ) -> Result<(), ExecError> {
        for (rank, heard) in &mut self.speakers {
            while *heard < self.own {
                let about = (Subject::Sight, *heard);
                let sight = hear(transport, *rank, about, patience, Sight::decode)
                    .map_err(during(LEADER, "hearing of an iteration"))?;
                *heard += 1;
                reports.hear(*rank, readable(sight, *rank)?, report);
            }
        }
        Ok(())
    }
}

impl Sight {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(32);
        bytes.extend(self.iteration.to_le_bytes());
        for value in [self.loss, self.further, self.norm, self.dropped] {
            bytes.push(u8::from(value.is_some()));
            bytes.extend(value.unwrap_or(0.0).to_le_bytes());
        }
        bytes.extend(self.took.0.to_le_bytes());
        if let Some(Staleness { mean, max, ahead, histogram }) = self.staleness {
            bytes.extend(mean.to_le_bytes());
            bytes.extend(max.to_le_bytes());
            bytes.extend(ahead.to_le_bytes());
            bytes.extend(histogram.iter().flat_map(|count| count.to_le_bytes()));
        }
        bytes
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
                ahead: u32::from_le_bytes(*ahead),
                histogram: counts.map(u32::from_le_bytes),
            })
        };
        let value =
            |[there, a, b, c, d]: [u8; 5]| (there != 0).then(|| f32::from_le_bytes([a, b, c, d]));
        Some(Self {
            iteration: u32::from_le_bytes(*iteration),
            loss: value(*loss),
            further: value(*further),
            norm: value(*norm),
            dropped: value(*dropped),
            took: Seconds(f64::from_le_bytes(*took)),
            staleness: staleness(),
        })
    }
}

/// What is left of a rank, in a form that travels.
struct Left {
    arena_bytes: u64,
    copy_bytes: u64,
    peak_bytes: Option<u64>,
    trace: Trace,
    /// The weights by bucket, if they were asked for.
    values: Option<Vec<Vec<f32>>>,
}

impl Left {
    fn of(run: &Run<'_>, rank: Rank, remains: Remains, resident: &Resident) -> Self {
        let Remains { arena_bytes, copy_bytes, recorder, holding } = remains;
        let mut trace = TraceBuilder::new(Origin::Measured, "", run.plan.mesh.world());
        recorder.write(run.plan, rank, &mut trace);
        Self {
            arena_bytes,
            copy_bytes,
            peak_bytes: resident.grown(arena_bytes),
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

/// Puts together what is left of all ranks.
fn gather(
    run: &Run<'_>,
    transport: &mut dyn Transport,
    own: Left,
    reports: Reports,
) -> Result<Outcome, ExecError> {
    let Run { plan, options, .. } = *run;
    let world = plan.mesh.world();
    let mut left = vec![own];
    for rank in (1..world).map(Rank) {
        let read = |bytes: &[u8]| Left::decode(bytes, options.keep_parameters);
        let heard = hear(transport, rank, (Subject::Remains, 0), options.silence, read)
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
        .map(|(rank, values)| (rank, Holding::of(Place::of(plan, rank), values)))
        .collect();
    let held = held.iter().map(|(rank, holding)| (holding, plan.program(*rank)));
    let parameters = if options.keep_parameters { Some(parameters::assemble(held)?) } else { None };
    Ok(Outcome {
        iterations: reports.done,
        trace: trace.finish().gathered(plan),
        arena_bytes: left.iter().map(|left| left.arena_bytes).collect(),
        peak_bytes: left.iter().map(|left| left.peak_bytes).collect(),
        copy_bytes: left.iter().map(|left| left.copy_bytes).collect(),
        floor: run.data.floor(),
        stopped: run.horizon.stopped(),
        parameters,
    })
}

fn readable<T>(decoded: Option<T>, from: Rank) -> Result<T, ExecError> {
    decoded.ok_or_else(|| ExecError::Control {
        rank: LEADER,
        doing: "hearing the others",
        source: CommError::Failed { rank: from, reason: "what it said cannot be read".into() },
    })
}

/// All ranks save to the leader's directory, under the leader's attempt.
fn agree_on_place(
    save: &mut SaveOptions,
    transport: &mut dyn Transport,
    patience: Duration,
) -> Result<(), CommError> {
    let about = (Subject::Checkpoints, 0);
    if transport.rank() != LEADER {
        let place = hear(transport, LEADER, about, patience, |bytes| {
            let (attempt, directory) = bytes.split_first_chunk::<8>()?;
            Some((u64::from_le_bytes(*attempt), OsString::from_vec(directory.to_vec())))
        })?;
        let reason = "what it said of checkpoints cannot be read";
        let place = place.ok_or(CommError::Failed { rank: LEADER, reason: reason.into() })?;
        (save.attempt, save.directory) = (place.0, place.1.into());
        return Ok(());
    }
    let mut place = save.attempt.to_le_bytes().to_vec();
    place.extend_from_slice(save.directory.as_os_str().as_bytes());
    for rank in (1..transport.world()).map(Rank) {
        say(transport, rank, about, &place)?;
    }
    Ok(())
}

/// How often a rank asks for the leader's time. The answer that came back soonest counts.
const QUESTIONS: u32 = 8;

/// When the leader's clock began, on this rank's own: halfway between question and answer, after
/// F. Cristian, "Probabilistic clock synchronization" (1989).
fn agree_on_clock(transport: &mut dyn Transport, patience: Duration) -> Result<Instant, CommError> {
    let began = Instant::now();
    if transport.rank() != LEADER {
        let mut best = (Duration::MAX, began);
        for question in 0..QUESTIONS {
            let about = (Subject::Clock, question);
            let asked = Instant::now();
            say(transport, LEADER, about, &[])?;
            let shown = hear(transport, LEADER, about, patience, |bytes| {
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
            let about = (Subject::Clock, question);
            hear(transport, rank, about, patience, |_| ())?;
            let shown = began.elapsed().as_nanos() as u64;
            say(transport, rank, about, &shown.to_le_bytes())?;
        }
    }
    Ok(began)
}
