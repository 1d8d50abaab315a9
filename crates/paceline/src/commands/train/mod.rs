//! `paceline train`: run a plan for real, and lay the prediction beside what happened.

mod events;
mod files;
mod machine;
mod pace;
mod record;
mod study;

pub(super) use study::{USUAL, result};

use super::plan::check_plan;
use crate::calibrate::glance;
use crate::failure::Failure;
use crate::flags::{
    Carrier, CheckpointFlags, ClusterFlags, CommonFlags, DataChoice, DataDefaults, DataFlags,
    Defaults, Keeping, Launch, LaunchFlags, MODEL, Origins, Problems, Request, Saving,
    StrategyFlags, TOKENIZER, Training, TrainingFlags,
};
use crate::launch::{self, Layout, Member, Place};
use crate::output::{self, IterationRecord, Journal, Output, RunDir, RunRecord, stop_on_interrupt};
use crate::sweep::SweepFlags;
use clap::Args;
use events::{DoneEvent, IterationEvent};
use files::{closing, write_files};
use machine::{MACHINE, can_learn, can_start, fits_limit, moved, share_a_process, this_machine};
use pace::Pace;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::data::Tokenizer;
use paceline_exec::hugging_face::export;
use paceline_exec::{Device, IterationReport, Start, TrainOptions};
use paceline_plan::DType;
use paceline_plan::collective::Order;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use paceline_sim::cluster::{Cluster, Place as Somewhere, Run, Straggler};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Run a plan for real, on this machine
///
/// Every rank is a process with its own memory (or a thread, with --transport thread), and messages
/// between ranks are real. The text is built in: sentences of a small grammar whose entropy is known, so that the loss can be seen beside
/// the floor that no model can pass. The run's directory gets run.json, the traces of what was
/// measured and what was simulated, both together for Perfetto (trace.json), and report.html.
///
/// Ctrl-C finishes the iteration, writes everything and exits with status 0; a second Ctrl-C leaves
/// at once.
///
/// With --vary, one run for each of some values of a flag: its loss, and the loss on samples that it never
/// saw. Such runs are threads of this process, and leave no files.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(super) job: JobFlags,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
}

/// A run, as it was written.
#[derive(Args, Debug)]
pub(crate) struct JobFlags {
    #[command(flatten)]
    strategy: StrategyFlags,
    #[command(flatten)]
    training: TrainingFlags,
    #[command(flatten)]
    data: DataFlags,
    #[command(flatten)]
    checkpoints: CheckpointFlags,
    #[command(flatten)]
    launch: LaunchFlags,
    #[command(flatten)]
    cluster: ClusterFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline train --model mini --dp 2 --global-batch 16 --micro-batch 4 --iterations 50
  paceline train --model mini --pp 2 --tp 2 --global-batch 8   two stages, halved matrices
  paceline train --model mini --dp 2 --zero 3 --json           one JSON object per iteration";

/// How long a rank waits for another before it gives up.
const SILENCE: Duration = Duration::from_secs(60);

/// What holds where no flag says otherwise.
const DEFAULTS: Defaults = Defaults {
    dtype: DType::F32,
    order: Order::Canonical,
    expert_room: 2.0,
    one_host: true,
    limit: None,
};

/// Trains.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    start(&flags.job, Purpose::Train, origins)
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A trained model.
    Train,
    /// Its pace. Nothing stays that was not asked for.
    Measure,
}

/// Iterations of a run that is measured.
const MEASURED: u32 = 20;

/// Checks what was asked for, and runs it.
pub(crate) fn start(flags: &JobFlags, purpose: Purpose, origins: Origins) -> Result<(), Failure> {
    let mut job = prepare(flags, purpose, origins)?;
    let scratch = match (purpose, &job.training.out) {
        (Purpose::Measure, None) => Some(Scratch::new()?),
        (Purpose::Measure, Some(_)) | (Purpose::Train, _) => None,
    };
    if let Some(Scratch(path)) = &scratch {
        job.training.out = Some(path.clone());
    }
    job.run(&flags.common.output())
}

/// Checks what was asked for.
fn prepare(flags: &JobFlags, purpose: Purpose, origins: Origins) -> Result<Job, Failure> {
    let mut problems = Problems::new(origins);
    let carried = launch::carried()?;
    let mut keeping = flags.checkpoints.check(&mut problems);
    if let Some(resume) = &carried.resume {
        keeping.go_on_from(resume, &mut problems);
    }
    let mut defaults = Training::default();
    if purpose == Purpose::Measure {
        defaults.iterations = MEASURED;
        if keeping.saving == Saving::AtEnd && keeping.export_hf.is_none() {
            keeping.saving = Saving::Never;
        }
    }
    if let Some(resume) = &keeping.resume {
        defaults.seed = resume.state().seed;
    }
    let training = flags.training.check(&defaults, &mut problems);
    let mut strategy = flags.strategy.clone();
    strategy.model = strategy.model.or_else(|| keeping.model());
    if let (None, Some(resume)) = (&strategy.optimizer, &keeping.resume) {
        strategy.optimizer = Some(resume.state().optimizer.to_string());
    }
    if let Some(layout) = &carried.layout {
        layout.apply(&mut strategy);
    }
    let data = flags.data.check(&DataDefaults::of(&keeping), &mut problems);
    let launch = flags.launch.check(&mut problems);
    if flags.checkpoints.resume.is_some() && keeping.resume.is_none() && strategy.model.is_none() {
        // What cannot be opened would have said which model it is.
        return Err(problems.into());
    }
    let mut job =
        Job::check(&strategy, &flags.cluster, training, (keeping, data), launch, problems)?;
    job.purpose = purpose;
    Ok(job)
}

/// A directory that goes when the run has ended.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("paceline-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is in nobody's way.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A run that can start.
pub(super) struct Job {
    model: Model,
    plan: Plan,
    training: Training,
    keeping: Keeping,
    data: DataChoice,
    launch: Launch,
    /// Which of the ranks this process is, if it is one.
    place: Option<Place>,
    /// How many cores the ranks of this machine have together.
    cores: usize,
    /// What the prediction is for.
    cluster: Cluster,
    /// Whether the user said so.
    is_described: bool,
    /// What it is for.
    purpose: Purpose,
    /// First iterations whose gradients go as they are before they are compressed.
    warm_up: u32,
    /// What was asked for: ranks that are lost may ask for another layout of it.
    asked: (StrategyFlags, ClusterFlags),
}

impl Job {
    /// Everything that can be known to be wrong before a rank starts.
    pub(super) fn check(
        strategy: &StrategyFlags,
        flags: &ClusterFlags,
        mut training: Training,
        (keeping, data): (Keeping, Option<DataChoice>),
        mut launch: Launch,
        mut problems: Problems,
    ) -> Result<Self, Failure> {
        let described = flags.check(&mut problems);
        let on = described.as_ref().map(|described| (flags, described));
        if strategy.dtype.as_deref() == Some("fp8") {
            problems.say("--dtype", "'fp8' cannot be trained in yet; f32, bf16 and f16 can");
        }
        let defaults = Defaults { limit: launch.memory_limit, ..DEFAULTS };
        let request = strategy.check(defaults, on, &mut problems);
        if let Some(Request { plan, .. }) = &request {
            share_a_process(plan, &mut launch, &mut problems);
        }
        // Of several ranks on one machine, each would count what the others have taken.
        let place = if problems.is_empty() { launch::place(&launch)? } else { None };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if let Some(Request { plan, .. }) = &request {
            fits_limit(plan, launch.memory_limit, &mut problems);
        }
        if let (Some(Request { plan, .. }), None) = (&request, &place) {
            can_start(plan, &mut problems);
        }
        if let (Some(Request { model, plan }), Some(data)) = (&request, &data) {
            can_learn(model, plan, &data.source, &keeping, &mut problems);
        }
        if let (Some(slow), Some(Request { plan, .. })) = (training.straggler, &request)
            && slow.rank >= plan.mesh.world()
        {
            let (rank, last) = (slow.rank, plan.mesh.world() - 1);
            problems.say("--straggler", format!("there is no rank {rank}; the last one is {last}"));
        }
        if let (Saving::Every(_), Some(Request { plan, .. })) = (&keeping.saving, &request)
            && plan.strategy.sync.is_async()
        {
            let sync = plan.strategy.sync;
            problems.say(
                "--save-every",
                format!(
                    "with {sync} ranks are at different iterations; the run is saved at its end"
                ),
            );
        }
        let done = keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        if done > 0 && training.iterations <= done {
            problems.say(
                "--iterations",
                format!(
                    "counts from the run's start, and the checkpoint is at {done}; use more than that"
                ),
            );
        }
        let resumed = keeping.resume.as_ref().map(|resume| resume.state());
        let warm_up = request.as_ref().map_or(Ok(0), |Request { plan, .. }| {
            paceline_exec::warm_up(&plan.strategy, training.iterations, resumed)
        });
        let warm_up = warm_up.unwrap_or_else(|error| {
            problems.say("--compress-warmup", error.to_string());
            0
        });
        let (Some(Request { model, plan }), Some(data), true) =
            (request, data, problems.is_empty())
        else {
            return Err(problems.into());
        };
        check_plan(&plan)?;
        paceline_exec::can_run(&plan)?;
        if let Some(Place { launched: Some(directory), .. }) = &place {
            training.out = Some(directory.clone());
        }
        let is_described = described.is_some();
        let mut cluster = match described {
            Some(cluster) => cluster,
            None => {
                let launched = place.as_ref().and_then(|place| place.launched.as_deref());
                this_machine(plan.mesh.world(), launched)?
            }
        };
        if let Some(slow) = training.straggler {
            // The prediction knows of it too.
            cluster.uneven.stragglers.push(Straggler {
                at: Somewhere::Ranks(vec![Run::one(slow.rank)]),
                factor: slow.factor,
                from: Seconds::ZERO,
                until: None,
            });
        }
        let asked = (strategy.clone(), flags.clone());
        let purpose = Purpose::Train;
        let mut job = Self {
            model,
            plan,
            training,
            keeping,
            data,
            launch,
            place,
            cores,
            cluster,
            is_described,
            purpose,
            warm_up,
            asked,
        };
        job.suit_measurements();
        Ok(job)
    }

    /// Lets the measurements of a calibrated cluster answer for how this run is started.
    fn suit_measurements(&mut self) {
        let threads = self.threads_per_rank();
        let Some(measured) = &mut self.cluster.measured else { return };
        measured.threads = u32::try_from(threads.get()).ok();
        measured.choose_wire(match self.launch.transport {
            Carrier::Auto | Carrier::SharedMemory => "shm",
            Carrier::Thread => "thread",
            Carrier::Tcp => "tcp",
        });
    }

    /// Has a short look at what this machine takes for the plan, unless the user has said what it is, and leaves
    /// it in the run's directory, for ranks that are processes and for whoever wants to predict more.
    fn look_around(&mut self, directory: &RunDir) {
        if self.is_described || self.purpose != Purpose::Train || self.launch.device != Device::Cpu
        {
            return;
        }
        let cores = NonZeroUsize::new(self.cores).unwrap_or(NonZeroUsize::MIN);
        // A run does not depend on its prediction.
        let Ok(seen) = glance(&self.plan, self.threads_per_rank(), cores) else { return };
        let text = format!("# Seen in a short look before a run of {}.\n", self.plan.model);
        let _ = output::write(&directory.path().join(MACHINE), (text + &seen.to_toml()).as_bytes());
        let uneven = std::mem::take(&mut self.cluster.uneven);
        self.cluster = Cluster { uneven, ..seen };
        self.suit_measurements();
    }

    /// Trains: as threads of this process, as processes that this one starts, or as the one of them
    /// that this process is.
    pub(super) fn run(mut self, output: &Output) -> Result<(), Failure> {
        let world = self.plan.mesh.world();
        let threads = match self.launch.transport {
            Carrier::Thread => true,
            Carrier::Auto => world == 1 && self.launch.recovery.most == 0,
            Carrier::SharedMemory | Carrier::Tcp => false,
        };
        match self.place.take() {
            Some(place) => {
                place.keep_to_cores(self.threads_per_rank(), self.cores);
                let member = launch::connect(place, &self.launch, &self.plan, &self.training)?;
                if member.place.rank == 0 {
                    self.lead(Some(member), output)
                } else {
                    self.follow(member)
                }
            }
            None if threads => self.lead(None, output),
            None => {
                let directory = self.directory()?;
                self.look_around(&directory);
                let run = launch::Run {
                    world,
                    launch: &self.launch,
                    directory: directory.path(),
                    iterations: self.training.iterations,
                    replan: &|ranks| self.replan(ranks),
                };
                let before = moved(&self.cluster);
                let ended = launch::run(&run, output);
                if let Some(moved) = before.or_else(|| moved(&self.cluster)) {
                    output.note(&moved);
                }
                ended
            }
        }
    }

    /// The largest layout of what was asked for on so many ranks, and how many of them it uses.
    fn replan(&self, ranks: u32) -> Option<(Layout, u32)> {
        let (asked, flags) = &self.asked;
        let on = flags.cluster.is_some().then_some((flags, &self.cluster));
        Layout::smaller(&self.plan.strategy, ranks).into_iter().find_map(|layout| {
            let mut strategy = asked.clone();
            layout.apply(&mut strategy);
            let mut problems = Problems::default();
            let defaults = Defaults { limit: self.launch.memory_limit, ..DEFAULTS };
            let plan = strategy.check(defaults, on, &mut problems)?.plan;
            fits_limit(&plan, self.launch.memory_limit, &mut problems);
            can_start(&plan, &mut problems);
            let sound = problems.is_empty() && check_plan(&plan).is_ok();
            let runs = sound && paceline_exec::can_run(&plan).is_ok();
            runs.then(|| (layout, plan.mesh.world()))
        })
    }

    fn directory(&self) -> Result<RunDir, Failure> {
        let named = self.training.out.as_deref();
        RunDir::create(named, self.model.name()).map_err(|error| {
            let path = named.unwrap_or(std::path::Path::new("runs")).display();
            Failure::flag("--out", format!("{path} cannot be written to: {error}"))
        })
    }

    /// Runs a rank that reports to rank 0.
    fn follow(&self, mut member: Member) -> Result<(), Failure> {
        let options = self.options(&Arc::default(), Path::new(""));
        let followed =
            paceline_exec::take_part(&self.plan, &options, &mut member.transport, &mut |_| {});
        followed.map(|_| ()).map_err(|error| {
            member.write_flight_record(&error.to_string(), self.training.out.as_ref());
            member.place.failed(error.into())
        })
    }

    /// Predicts, trains, writes the run's directory and says how it went. All ranks are threads
    /// unless this process is the first of several.
    fn lead(mut self, mut member: Option<Member>, output: &Output) -> Result<(), Failure> {
        let directory = self.directory()?;
        if member.is_none() {
            self.look_around(&directory);
        }
        // Ranks that the launcher starts again go on with the journal of those before them.
        if member.as_ref().is_none_or(|member| member.place.launched.is_none()) {
            Journal::clear(&directory);
        }
        let resumed = self.keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        let (mut journal, past) = Journal::go_on(&directory, resumed)?;
        let mut record = self.record(past);
        let predicted = self.predict(&mut record);
        self.announce(&record, output)?;

        let (stop, progress) =
            (stop_on_interrupt(output, "end the run without its files"), self.progress(&record));
        let mut listener_left = false;
        let mut heard = |iteration: &IterationReport| {
            let IterationReport { loss, tokens_per_s, dropped, .. } = *iteration;
            progress.advance(iteration.iteration, loss, tokens_per_s, dropped);
            let done = IterationRecord::from(iteration);
            journal.note(iteration.iteration, &done);
            record.iterations.push(done);
            let told = match self.purpose {
                Purpose::Train => output.object(&IterationEvent::from(iteration)),
                Purpose::Measure => Ok(()),
            };
            if told.is_err() && !listener_left {
                // Nobody reads on: what is done is kept, the rest is not started.
                listener_left = true;
                stop.store(true, Ordering::Relaxed);
            }
        };
        let options = self.options(&stop, directory.path());
        let trained = match &mut member {
            None => paceline_exec::train(&self.plan, &options, &mut heard),
            Some(Member { transport, .. }) => {
                paceline_exec::take_part(&self.plan, &options, transport, &mut heard)
                    .map(|outcome| outcome.expect("rank 0 gets the outcome"))
            }
        };
        progress.finish();

        let (measured, failure) = match trained {
            Ok(outcome) => {
                record.stopped = outcome.stopped;
                record.floor = outcome.floor;
                let planned = outcome.arena_bytes.iter().zip(&outcome.copy_bytes);
                record.planned_peak_bytes = planned.map(|(arena, copy)| arena + copy).collect();
                record.peak_bytes = outcome.peak_bytes;
                let exported = self.keep(&mut record, &directory).err();
                (Some(outcome.trace), exported)
            }
            Err(error) => {
                let cause = error.to_string();
                let failure = match &member {
                    Some(member) => {
                        member.write_flight_record(&cause, Some(&directory.path().to_owned()));
                        member.place.failed(error.into())
                    }
                    None => Failure::from(error),
                };
                record.failed = Some(cause);
                (None, Some(failure))
            }
        };
        self.conclude(&mut record);
        write_files(&directory, &mut record, predicted.as_ref(), measured.as_ref())?;
        if let Some(failure) = failure {
            output.note(&format!("what there is lies in {}", directory.path().display()));
            return Err(failure);
        }
        Journal::clear(&directory);
        match self.purpose {
            Purpose::Train => {
                let (predicted, measured) = (predicted.as_ref(), measured.as_ref());
                output.people(&closing(&record, &directory, predicted, measured))?;
                Ok(output.object(&DoneEvent::new(&record, &directory, predicted, measured))?)
            }
            Purpose::Measure => {
                let stopped = || anyhow::anyhow!("stopped before there was anything to measure");
                let pace = Pace::of(&self, &record).ok_or_else(|| Failure::Run(stopped()))?;
                output.people(&pace.to_string())?;
                Ok(output.object(&pace)?)
            }
        }
    }

    /// What a user chose, for a run that lies in this directory. Ranks that follow are told the
    /// directory by rank 0.
    fn options(&self, stop: &Arc<AtomicBool>, directory: &Path) -> TrainOptions {
        let training = &self.training;
        TrainOptions {
            iterations: training.iterations,
            lr: training.lr,
            warmup: training.warmup,
            schedule: training.schedule,
            min_lr: training.min_lr,
            batch_scaling: training.batch_scaling,
            loss_scale: training.loss_scale,
            weight_decay: training.weight_decay,
            clip: training.clip,
            threads_per_rank: self.threads_per_rank(),
            seed: training.seed,
            data: self.data.source.clone(),
            distinct: training.distinct,
            start: match (&self.keeping.resume, &self.keeping.init_from) {
                (Some(resume), _) => Start::Checkpoint(Arc::clone(resume)),
                (None, Some(from)) => Start::Pretrained(Arc::clone(from)),
                (None, None) => Start::Seed,
            },
            save: self.save(directory),
            stop: Arc::clone(stop),
            silence: SILENCE.max(self.launch.silence),
            device: self.launch.device,
            offload_folder: self.offload_folder(directory),
            straggler: training.straggler,
            traced: training.traced,
            ..TrainOptions::default()
        }
    }

    /// Where offloaded bytes go: beside the run's files, unless the user said otherwise.
    fn offload_folder(&self, directory: &Path) -> PathBuf {
        let own = Some(directory).filter(|path| !path.as_os_str().is_empty());
        let named = self.training.offload_dir.as_deref().or(own).or(self.training.out.as_deref());
        named.map_or_else(std::env::temp_dir, Path::to_owned)
    }

    /// As many threads as the user said, or the cores, shared out among the ranks.
    fn threads_per_rank(&self) -> NonZeroUsize {
        self.training.threads_per_rank.unwrap_or_else(|| {
            NonZeroUsize::new(self.cores / self.plan.mesh.world() as usize)
                .unwrap_or(NonZeroUsize::MIN)
        })
    }

    /// Where the run is saved, if it is.
    fn save(&self, directory: &Path) -> Option<SaveOptions> {
        let every = match self.keeping.saving {
            Saving::Never => return None,
            Saving::AtEnd => None,
            Saving::Every(every) => Some(every),
        };
        let mut beside = vec![(MODEL.to_owned(), self.model.to_toml().into_bytes())];
        if let Tokenizer::HuggingFace { json, .. } = &self.data.tokenizer {
            beside.push((TOKENIZER.to_owned(), json.clone()));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(SaveOptions {
            directory: Keeping::folder(directory),
            every,
            keep: self.keeping.keep,
            // Two runs in one directory are told apart by when they started and by their process.
            attempt: (since.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40),
            beside,
        })
    }

    /// Notes the last checkpoint, and exports it if that was asked for.
    fn keep(&self, record: &mut RunRecord, directory: &RunDir) -> Result<(), Failure> {
        // A directory may hold checkpoints of another run, which was longer.
        let done = record.iterations_done();
        let all = Checkpoint::all(&Keeping::folder(directory.path())).into_iter().rev();
        let mut own = all.filter(|(iteration, _)| *iteration <= done);
        let Some((_, path)) = own.next().filter(|_| self.keeping.saving != Saving::Never) else {
            return Ok(());
        };
        let last = Checkpoint::open(&path).map_err(|error| Failure::Run(error.into()))?;
        record.checkpoint = Some(last.path().display().to_string());
        let Some(path) = &self.keeping.export_hf else { return Ok(()) };
        let tokenizer = match &self.data.tokenizer {
            Tokenizer::HuggingFace { json, .. } => Some(json.as_slice()),
            Tokenizer::Bytes | Tokenizer::Words => None,
        };
        export(&self.model, &last, tokenizer, path).map_err(|error| Failure::Run(error.into()))?;
        record.exported = Some(path.display().to_string());
        Ok(())
    }
}
