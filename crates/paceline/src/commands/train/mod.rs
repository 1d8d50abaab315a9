//! `paceline train`: runs a plan, and compares its prediction with the measurement.

mod contradictions;
mod directory;
mod events;
mod expert_buffers;
mod files;
mod machine;
mod record;
mod scratch;
mod settings;
mod study;
mod throughput;

pub(super) use study::{USUAL, result};

use super::plan::check_plan;
use crate::calibrate::profile_plan;
use crate::failure::Failure;
use crate::flags::{
    CheckpointFlags, CheckpointOptions, ClusterFlags, CommonFlags, DataChoice, DataDefaults,
    DataFlags, Defaults, Launch, LaunchFlags, MODEL, Origins, Problems, Request, SETTINGS,
    SavePolicy, StrategyFlags, TOKENIZER, Training, TrainingFlags,
};
use crate::launch::{self, Fleet, Layout, RankIdentity, RankProcess};
use crate::output::{
    self, IterationRecord, Journal, Output, RunDir, RunRecord, Second, StopRequest,
};
use crate::sweep::SweepFlags;
use clap::Args;
use contradictions::refuse_contradictions;
use events::{DoneEvent, IterationEvent};
use files::{closing, write_files};
use machine::{
    MACHINE, can_learn, can_start, core_migration_note, device_of, fits_limit, library_variables,
    share_a_process, shm_domain, this_machine,
};
use paceline_comm::TransportKind;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::data::Tokenizer;
use paceline_exec::hugging_face::export;
use paceline_exec::{Device, IterationReport, Start, TrainOptions};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::units::Seconds;
use paceline_sim::cluster::{Cluster, IndexRange, Selector as Somewhere, Straggler};
use scratch::Scratch;
use settings::Settings;
use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use throughput::Throughput;

/// Run a plan for real, on this machine
///
/// Every rank is a process with its own memory (or a thread, with --transport thread), and messages
/// between ranks are real. The text is built in: sentences of a small grammar with known entropy,
/// the floor that no model's loss can pass. The run's directory gets run.json, the measured and the
/// simulated trace, both combined for Perfetto (trace.json), and report.html.
///
/// Ctrl-C finishes the iteration, writes everything and exits with status 0; a second Ctrl-C exits
/// at once. SIGTERM, SIGHUP and SIGUSR1 do the same and exit with status 143, 129 and 138.
///
/// With --vary, runs once for each value of a flag, and reports the loss and the loss on held-out
/// samples. Such runs are threads of this process, and leave no files.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    pub(super) job: JobFlags,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
}

/// Flags of a run.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobFlags {
    #[command(flatten)]
    pub(super) strategy: StrategyFlags,
    #[command(flatten)]
    pub(super) training: TrainingFlags,
    #[command(flatten)]
    pub(super) data: DataFlags,
    #[command(flatten)]
    pub(super) checkpoints: CheckpointFlags,
    #[command(flatten)]
    pub(super) launch: LaunchFlags,
    #[command(flatten)]
    pub(super) cluster: ClusterFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline train --model mini --dp 2 --global-batch 16 --micro-batch 4 --iterations 50
  paceline train --model mini --pp 2 --tp 2 --global-batch 8   two stages, halved matrices
  paceline train --model mini --dp 2 --zero 3 --json           one JSON object per iteration";

/// Time that a blocked exchange waits before it fails.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Defaults of the strategy flags.
const DEFAULTS: Defaults = Defaults {
    dtype: DType::F32,
    order: SummationOrder::Canonical,
    expert_buffer_factor: 2.0,
    one_host: true,
    shm_domain: None,
    library: None,
    limit: None,
};

/// Runs the training.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    start(&flags.job, Purpose::Train, origins)
}

/// Purpose of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To train a model.
    Train,
    /// To measure throughput; only explicitly requested files are kept.
    Measure,
}

/// Default number of iterations of a measured run.
const MEASURED: u32 = 20;

/// Checks the flags and runs the job.
pub(crate) fn start(flags: &JobFlags, purpose: Purpose, origins: Origins) -> Result<(), Failure> {
    start_on(flags, (purpose, origins), &|_| Ok(None))
}

/// Number of ranks of a job that other hosts run.
pub(super) fn ranks_of(flags: &Flags, origins: Origins) -> Result<u32, Failure> {
    let mut job = flags.job.clone();
    job.launch.spread = true;
    Ok(prepare(&job, Purpose::Train, origins)?.plan.mesh.world())
}

/// Checks the flags, and runs the job on the hosts that `hosts` prepares for its number of ranks.
pub(super) fn train_on(
    flags: &Flags,
    origins: Origins,
    hosts: &dyn Fn(&Launch) -> Result<Fleet, Failure>,
) -> Result<(), Failure> {
    let mut job = flags.job.clone();
    job.launch.spread = true;
    start_on(&job, (Purpose::Train, origins), &|launch| hosts(launch).map(Some))
}

fn start_on(
    flags: &JobFlags,
    (purpose, origins): (Purpose, Origins),
    hosts: &dyn Fn(&Launch) -> Result<Option<Fleet>, Failure>,
) -> Result<(), Failure> {
    let mut job = prepare(flags, purpose, origins)?;
    let scratch = match (purpose, &job.training.out) {
        (Purpose::Measure, None) => Some(Scratch::new()?),
        (Purpose::Measure, Some(_)) | (Purpose::Train, _) => None,
    };
    if let Some(scratch) = &scratch {
        job.training.out = Some(scratch.path().to_owned());
    }
    job.fleet = hosts(&job.launch)?.map(RefCell::new);
    job.run(&flags.common.output())
}

/// Checks the flags.
fn prepare(flags: &JobFlags, purpose: Purpose, origins: Origins) -> Result<Job, Failure> {
    let mut problems = Problems::new(origins);
    let carried = launch::restart_state()?;
    let mut keeping = flags.checkpoints.check(carried.resume.as_deref(), &mut problems);
    let mut defaults = Training::default();
    if purpose == Purpose::Measure {
        defaults.iterations = MEASURED;
        if keeping.saving == SavePolicy::AtEnd && keeping.export_hf.is_none() {
            keeping.saving = SavePolicy::Never;
        }
    }
    let mut training = flags.training.check(&defaults, &mut problems);
    if let (Purpose::Train, Some(run)) = (purpose, &keeping.run) {
        training.out = training.out.or_else(|| run.home.clone());
    }
    let mut strategy = flags.strategy.clone();
    strategy.model = strategy.model.or_else(|| keeping.model());
    if let Some(layout) = &carried.layout {
        layout.apply(&mut strategy);
    }
    if let Some(factor) = carried.expert_buffer_factor {
        strategy.expert_buffer_factor = Some(factor.to_string());
    }
    let data = flags.data.check(&DataDefaults::of(&keeping), &mut problems);
    let launch = flags.launch.check(&mut problems);
    if flags.checkpoints.resume.is_some() && keeping.resume.is_none() && strategy.model.is_none() {
        // The model would come from the checkpoint, which cannot be opened.
        return Err(problems.into());
    }
    let mut job =
        Job::check(&strategy, &flags.cluster, training, (keeping, data), launch, problems)?;
    job.purpose = purpose;
    let written = job.training.out.as_ref().filter(|_| carried.layout.is_some());
    let written = written.and_then(|directory| Settings::read(&directory.join(SETTINGS)));
    // A layout that replaces the requested one for lack of ranks is not what a later run wants.
    job.settings = written.unwrap_or_else(|| Settings::of(&job, flags));
    if let Some(factor) = carried.expert_buffer_factor {
        job.settings.set("expert-buffer-factor", factor.into());
    }
    Ok(job)
}

/// A validated run.
struct Job {
    model: Model,
    plan: Plan,
    training: Training,
    keeping: CheckpointOptions,
    data: DataChoice,
    launch: Launch,
    /// Identity of the rank that this process runs, if it is a rank.
    place: Option<RankIdentity>,
    /// Number of cores that the ranks of this machine share.
    cores: usize,
    /// The cluster that the prediction is for.
    cluster: Cluster,
    /// True if the user named that cluster.
    is_described: bool,
    /// Purpose of the run.
    purpose: Purpose,
    /// Number of first iterations whose gradients are sent uncompressed.
    warm_up: u32,
    /// The requested flags, from which another layout is derived if ranks are lost.
    asked: (StrategyFlags, ClusterFlags),
    /// The settings that `--resume` takes over.
    settings: Settings,
    /// Requests to stop, once the run listens for them.
    interrupted: Option<StopRequest>,
    /// Agents of the hosts that run the ranks, if this machine does not.
    fleet: Option<RefCell<Fleet>>,
}

impl Job {
    /// Reports every error that can be detected before a rank starts.
    fn check(
        strategy: &StrategyFlags,
        flags: &ClusterFlags,
        mut training: Training,
        (keeping, data): (CheckpointOptions, Option<DataChoice>),
        mut launch: Launch,
        mut problems: Problems,
    ) -> Result<Self, Failure> {
        let described = flags.check(&mut problems);
        let on = described.as_ref().map(|described| (flags, described));
        if let Some(narrow @ ("fp8" | "nvfp4" | "mxfp4")) = strategy.dtype.as_deref() {
            let works = "f32, bf16 and f16 can";
            problems.add("--dtype", format!("'{narrow}' cannot be trained in yet; {works}"));
        }
        let shm_domain = shm_domain(&launch, strategy);
        let (limit, library) = (launch.memory_limit, launch.library);
        let defaults = Defaults { limit, shm_domain, library, ..DEFAULTS };
        let request = strategy.check(defaults, on, &mut problems);
        if let Some(Request { plan, .. }) = &request {
            share_a_process(plan, &mut launch, &mut problems);
        }
        // A rank skips the memory check: it would count the memory that other ranks have taken.
        let place = match &request {
            Some(Request { plan, .. }) if problems.is_empty() => {
                launch::rank_identity(&launch, plan.mesh.world())?
            }
            _ => None,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if let Some(Request { plan, .. }) = &request {
            fits_limit(plan, launch.memory_limit, &mut problems);
        }
        if let (Some(Request { plan, .. }), None) = (&request, &place) {
            can_start(plan, &launch, &mut problems);
        }
        if let (Some(Request { model, plan }), Some(data)) = (&request, &data) {
            can_learn(model, plan, &data.source, &keeping, &mut problems);
        }
        let plan = request.as_ref().map(|request| &request.plan);
        refuse_contradictions(plan, &training, &keeping, &mut problems);
        let resumed = keeping.resume.as_ref().map(|resume| resume.state());
        let warm_up = request.as_ref().map_or(Ok(0), |Request { plan, .. }| {
            paceline_exec::warm_up(&plan.strategy, training.iterations, resumed)
        });
        let warm_up = warm_up.unwrap_or_else(|error| {
            problems.add("--compress-warmup", error.to_string());
            0
        });
        let (Some(Request { model, plan }), Some(data), true) =
            (request, data, problems.is_empty())
        else {
            return Err(problems.into());
        };
        check_plan(&plan)?;
        paceline_exec::can_run(&plan, launch.device)?;
        launch.variables = library_variables(&plan, &launch);
        launch.variables.extend(strategy.hand_over(&plan.strategy));
        if let Some(RankIdentity { launched: Some(directory), .. }) = &place {
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
            // The prediction models the straggler too.
            cluster.heterogeneity.stragglers.push(Straggler {
                at: Somewhere::Ranks(vec![IndexRange::one(slow.rank)]),
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
            settings: Settings::default(),
            interrupted: None,
            fleet: None,
        };
        job.select_measurements();
        Ok(job)
    }

    /// Selects the calibration's measurements for this run's threads and transport.
    fn select_measurements(&mut self) {
        let threads = self.threads_per_rank();
        let Some(measured) = &mut self.cluster.measured else { return };
        measured.threads = u32::try_from(threads.get()).ok();
        measured.select_transport(match self.launch.transport {
            TransportKind::Auto | TransportKind::Shm => "shm",
            TransportKind::Thread => "thread",
            TransportKind::Tcp | TransportKind::Mpi => "tcp",
        });
    }

    /// Measures a quick profile of the plan on this machine, unless the user has described the
    /// machine. Saves it in the run's directory, for rank processes and for further predictions.
    fn profile_machine(&mut self, directory: &RunDir) {
        if self.is_described || self.purpose != Purpose::Train || self.launch.device != Device::Cpu
        {
            return;
        }
        let cores = NonZeroUsize::new(self.cores).unwrap_or(NonZeroUsize::MIN);
        // A run works without a prediction.
        let Ok(seen) = profile_plan(&self.plan, self.threads_per_rank(), cores) else { return };
        let text = format!("# Quick profile before a run of {}.\n", self.plan.model);
        let _ = output::write(&directory.path().join(MACHINE), (text + &seen.to_toml()).as_bytes());
        let uneven = std::mem::take(&mut self.cluster.heterogeneity);
        self.cluster = Cluster { heterogeneity: uneven, ..seen };
        self.select_measurements();
    }

    /// Trains: as threads of this process, as processes that it starts, or as one such rank
    /// process.
    fn run(mut self, output: &Output) -> Result<(), Failure> {
        let world = self.plan.mesh.world();
        let threads = match self.launch.transport {
            _ if self.fleet.is_some() => false,
            TransportKind::Thread => true,
            TransportKind::Auto => world == 1 && self.launch.recovery.most == 0,
            TransportKind::Shm | TransportKind::Tcp | TransportKind::Mpi => false,
        };
        // Once per job: by the launcher, or by rank 0 of another's.
        if !threads && self.place.as_ref().is_none_or(|p| p.rank == 0 && p.launched.is_none()) {
            for warning in &self.launch.warnings {
                output.note(&format!("warning: {warning}"));
            }
        }
        match self.place.take() {
            Some(place) => {
                // A launcher of this program has claimed the directory for its ranks.
                let directory = match &place.launched {
                    _ if place.rank > 0 => None,
                    Some(directory) => Some(RunDir::existing(directory)),
                    None => Some(self.directory()?),
                };
                place.keep_to_cores(self.threads_per_rank(), self.cores);
                let member = launch::connect(place, &self.launch, &self.plan, &self.training)?;
                match directory {
                    Some(directory) => self.run_leader(directory, Some(member), output),
                    None => self.run_follower(member),
                }
            }
            None if threads => {
                let directory = self.directory()?;
                Self::clear_scratch(&directory);
                self.run_leader(directory, None, output)
            }
            None => {
                let directory = self.directory()?;
                directory.share_lock();
                for left_out in self.keeping.left_out() {
                    output.note(&format!("warning: {left_out}"));
                }
                match &self.fleet {
                    Some(fleet) => {
                        self.check_hosts(fleet, directory.path())?;
                        if fleet.borrow().is_remote() && !self.launch.encrypt {
                            output.note(
                                "warning: ranks of several hosts send their payloads in plain: add \
                                 --encrypt, or keep the network private (docs/security.md)",
                            );
                        }
                    }
                    None => self.profile_machine(&directory),
                }
                Self::clear_scratch(&directory);
                let scratch = Self::scratch_folder(directory.path());
                let run = launch::SupervisedRun {
                    world,
                    launch: &self.launch,
                    directory: directory.path(),
                    checkpoints: &[CheckpointOptions::folder(directory.path()), scratch],
                    resume: self.keeping.resume.as_deref(),
                    iterations: self.training.iterations,
                    fleet: self.fleet.as_ref(),
                    replan: &|ranks| self.replan(ranks),
                };
                let before = core_migration_note(&self.cluster);
                let ended = launch::run(&run, output);
                Self::clear_scratch(&directory);
                if let Some(moved) = before.or_else(|| core_migration_note(&self.cluster)) {
                    output.note(&moved);
                }
                ended.map_err(|failure| self.with_remedy(failure, &directory))
            }
        }
    }

    /// Fails if the hosts have too little room for the ranks, other files, or no common directory for
    /// checkpoints.
    fn check_hosts(&self, fleet: &RefCell<Fleet>, directory: &Path) -> Result<(), Failure> {
        let mut fleet = fleet.borrow_mut();
        if let Some(shortage) = fleet.shortage(self.plan.mesh.world()) {
            return Err(Failure::flag("--hosts", shortage));
        }
        let named = |argument: &String| {
            let value = argument.split_once('=').map_or(argument.as_str(), |(_, value)| value);
            Some(PathBuf::from(value)).filter(|path| path.is_file())
        };
        let files = fleet.arguments().iter().filter_map(named);
        let files = files.map(|path| launch::file_fact(&path)).collect::<Result<_, _>>()?;
        fleet.compare(files, (directory, self.keeping.saving != SavePolicy::Never))
    }

    /// The largest layout of the request on at most `ranks` ranks, and the number of ranks it uses.
    fn replan(&self, ranks: u32) -> Option<(Layout, u32)> {
        Layout::smaller(&self.plan.strategy, ranks).into_iter().find_map(|layout| {
            let mut strategy = self.asked.0.clone();
            layout.apply(&mut strategy);
            let plan = self.lower_again(&strategy).ok()?;
            let mut problems = Problems::default();
            can_start(&plan, &self.launch, &mut problems);
            let runs =
                problems.is_empty() && paceline_exec::can_run(&plan, self.launch.device).is_ok();
            runs.then(|| (layout, plan.mesh.world()))
        })
    }

    /// Runs a rank that reports to rank 0.
    fn run_follower(&self, mut member: RankProcess) -> Result<(), Failure> {
        // All ranks of a job may get a signal; rank 0 heeds it for all of them.
        let _requests = StopRequest::listen(Second::Exits);
        let options = self.options(&Arc::default(), Path::new(""));
        let followed = paceline_exec::run_process_rank(
            &self.plan,
            &options,
            member.transport.as_mut(),
            &mut |_| {},
        );
        followed.map_err(|error| {
            if let Some(failure) = self.asks_for_buffers(&error, &member) {
                return failure;
            }
            member.write_flight_record(&error.to_string(), self.training.out.as_ref());
            member.place.failed(error.into())
        })?;
        // The status of the job is that of rank 0, which may still write files: a launcher must not end
        // all ranks because of this one's.
        Ok(())
    }

    /// Predicts, trains, writes the run's directory and prints the summary. All ranks are threads
    /// unless this process is rank 0 of several processes.
    fn run_leader(
        mut self,
        directory: RunDir,
        mut member: Option<RankProcess>,
        output: &Output,
    ) -> Result<(), Failure> {
        if member.is_none() {
            self.profile_machine(&directory);
        }
        let resumed = self.keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        let (mut journal, past) = Journal::go_on(&directory, resumed)?;
        let mut record = self.record(past);
        if self.purpose == Purpose::Train {
            record.warnings.extend(self.changes());
            self.store_settings(&directory)?;
        }
        let predicted = self.predict(&mut record);
        self.announce(&record, output)?;

        // The launcher ends its ranks itself.
        let launched = member.as_ref().is_some_and(|member| member.place.launched.is_some());
        let request = self.interrupted.get_or_insert_with(|| match launched {
            true => StopRequest::listen(Second::Counts).unwrap_or_default(),
            false => StopRequest::listen_or_note(output, "end the run without its files"),
        });
        let (request, progress) = (request.clone(), self.progress(&record));
        let mut listener_left = false;
        let mut heard = |iteration: &IterationReport| {
            let IterationReport { loss, tokens_per_s, dropped_tokens: dropped, .. } = *iteration;
            progress.advance(iteration.iteration, loss, tokens_per_s, dropped);
            let done = IterationRecord::from(iteration);
            journal.note(iteration.iteration, &done);
            record.iterations.push(done);
            let told = match self.purpose {
                Purpose::Train if listener_left => Ok(()),
                Purpose::Train => output.print_json(&IterationEvent::from(iteration)),
                Purpose::Measure => Ok(()),
            };
            if let Err(error) = told
                && !listener_left
            {
                listener_left = true;
                output.note(&format!(
                    "warning: standard output is closed ({error}); the run goes on, and writes its files"
                ));
            }
        };
        let options = self.options(request.flag(), directory.path());
        let trained = match &mut member {
            None => paceline_exec::train(&self.plan, &options, &mut heard),
            Some(RankProcess { transport, .. }) => {
                let transport = transport.as_mut();
                paceline_exec::run_process_rank(&self.plan, &options, transport, &mut heard)
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
                if let Some(failure) =
                    member.as_ref().and_then(|member| self.asks_for_buffers(&error, member))
                {
                    return Err(failure);
                }
                match (self.larger_buffers(&error), &member) {
                    (Some(larger), None) => return self.go_on(larger, directory, output),
                    // Its own launcher cannot start it again, but `--resume` can.
                    (Some(larger), Some(_)) if self.enlarge(&larger).is_ok() => {
                        self.store_settings(&directory)?;
                    }
                    (_, _) => {}
                }
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
            return Err(self.with_remedy(failure, &directory));
        }
        Journal::clear(&directory);
        if member.is_none() {
            Self::clear_scratch(&directory);
        }
        match self.purpose {
            Purpose::Train => {
                let (predicted, measured) = (predicted.as_ref(), measured.as_ref());
                let mut text = closing(&record, &directory, predicted, measured);
                let resume = self.resume_command(&directory).filter(|_| record.stopped);
                if let Some(command) = &resume {
                    text += &format!("resume with {command}\n");
                }
                Output::unless_closed(output.print(&text))?;
                let traces = (predicted, measured);
                let done = DoneEvent::new(&record, &self.cluster, &directory, traces, resume);
                Output::unless_closed(output.print_json(&done))?;
            }
            Purpose::Measure => {
                let stopped = || anyhow::anyhow!("stopped before there was anything to measure");
                let pace = Throughput::of(&self, &record).ok_or_else(|| Failure::Run(stopped()))?;
                output.print(&pace.to_string())?;
                output.print_json(&pace)?;
            }
        }
        // The launcher of a rank has received the signal too, and ends with its status.
        match &member {
            Some(member) if member.place.launched.is_some() => Ok(()),
            _ if record.stopped => request.status(),
            _ => Ok(()),
        }
    }

    /// Executor options from the user's flags, for a run in `directory`. Followers receive the
    /// directory from rank 0.
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
            federated: training.federated,
            start: match (&self.keeping.resume, &self.keeping.init_from) {
                (Some(resume), _) => Start::Checkpoint(Arc::clone(resume)),
                (None, Some(from)) => Start::Pretrained(Arc::clone(from)),
                (None, None) => Start::Seed,
            },
            save: self.save(directory),
            save_at_end: self.keeping.saving != SavePolicy::Never,
            stop: Arc::clone(stop),
            exchange_timeout: EXCHANGE_TIMEOUT.max(self.launch.heartbeat_timeout),
            device: device_of(&self.launch, self.place.as_ref()),
            offload_folder: self.offload_folder(directory),
            straggler: training.straggler,
            traced: training.traced,
            ..TrainOptions::default()
        }
    }

    /// Directory for offloaded state: next to the run's files, unless the user chose another.
    fn offload_folder(&self, directory: &Path) -> PathBuf {
        let own = Some(directory).filter(|path| !path.as_os_str().is_empty());
        let named = self.training.offload_dir.as_deref().or(own).or(self.training.out.as_deref());
        named.map_or_else(std::env::temp_dir, Path::to_owned)
    }

    /// The user's number of threads per rank, or the cores divided by the ranks.
    fn threads_per_rank(&self) -> NonZeroUsize {
        self.training.threads_per_rank.unwrap_or_else(|| {
            NonZeroUsize::new(self.cores / self.plan.mesh.world() as usize)
                .unwrap_or(NonZeroUsize::MIN)
        })
    }

    /// Checkpoint options of the run, if it is saved.
    fn save(&self, directory: &Path) -> Option<SaveOptions> {
        // A run that is not saved may still have to go on from where its experts overflowed.
        let overflows = self.launch.device == Device::Cpu && self.plan.expert_buffers().is_some();
        let (every, directory) = match self.keeping.saving {
            SavePolicy::Never if !overflows => return None,
            SavePolicy::Never => (None, Self::scratch_folder(directory)),
            SavePolicy::AtEnd => (None, CheckpointOptions::folder(directory)),
            SavePolicy::Every(every) => (Some(every), CheckpointOptions::folder(directory)),
        };
        let mut extra_files = vec![
            (MODEL.to_owned(), self.model.to_toml().into_bytes()),
            (SETTINGS.to_owned(), self.settings.to_toml().into_bytes()),
        ];
        if let Tokenizer::HuggingFace { json, .. } = &self.data.tokenizer {
            extra_files.push((TOKENIZER.to_owned(), json.clone()));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Some(SaveOptions {
            directory,
            every,
            keep: self.keeping.keep,
            // The start time and the process id distinguish two runs in one directory.
            attempt: (since.as_nanos() as u64) ^ (u64::from(std::process::id()) << 40),
            extra_files,
        })
    }

    /// Records the last checkpoint, and exports it on request.
    fn keep(&self, record: &mut RunRecord, directory: &RunDir) -> Result<(), Failure> {
        let newest = Checkpoint::all(&CheckpointOptions::folder(directory.path())).pop();
        let Some((_, path)) = newest.filter(|_| self.keeping.saving != SavePolicy::Never) else {
            return Ok(());
        };
        let last = Checkpoint::open(&path).map_err(|error| Failure::Run(error.into()))?;
        let within = last.path().strip_prefix(directory.path()).unwrap_or(last.path());
        record.checkpoint = Some(within.display().to_string());
        let Some(path) = &self.keeping.export_hf else { return Ok(()) };
        let vocab = u32::try_from(self.model.vocab).unwrap_or(u32::MAX);
        let tokenizer = self.data.tokenizer.to_json(vocab);
        let about = (tokenizer.as_slice(), self.plan.strategy.seq);
        export(&self.model, &last, about, path).map_err(|error| Failure::Run(error.into()))?;
        record.exported = Some(path.display().to_string());
        Ok(())
    }
}
