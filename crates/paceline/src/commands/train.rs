//! `paceline train`: run a plan for real, and lay the prediction beside what happened.

use super::{plan::check_plan, report};
use crate::failure::Failure;
use crate::flags::{
    Carrier, CheckpointFlags, ClusterFlags, CommonFlags, DataChoice, DataDefaults, DataFlags,
    Defaults, Keeping, Launch, LaunchFlags, MODEL, Origins, Problems, Request, Saving,
    StrategyFlags, TOKENIZER, Training, TrainingFlags,
};
use crate::launch::{self, Member, Place};
use crate::output::{
    IterationRecord, MemoryRecord, ModelRecord, Output, Progress, RunDir, RunRecord,
};
use crate::overview::{facts, warnings};
use crate::report::breakdown_table;
use clap::Args;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::data::{Data, DataSource, Tokenizer};
use paceline_exec::hugging_face::{can_export, export};
use paceline_exec::{Device, IterationReport, Start, TrainOptions, resident};
use paceline_plan::DType;
use paceline_plan::collective::Order;
use paceline_plan::ids::Rank;
use paceline_plan::model::Model;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::summary::summarize;
use paceline_plan::trace::{Span, Trace, to_perfetto, to_perfetto_beside};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::{Cluster, preset};
use serde::Serialize;
use std::num::NonZeroUsize;
use std::path::Path;
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
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
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
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline train --model mini --dp 2 --global-batch 16 --micro-batch 4 --iterations 50
  paceline train --model mini --pp 2 --tp 2 --global-batch 8   two stages, halved matrices
  paceline train --model mini --dp 2 --zero 3 --json           one JSON object per iteration";

/// The most ranks that one machine can be asked to be.
const MOST_RANKS: u32 = 1024;
/// How long a rank waits for another before it gives up.
const SILENCE: Duration = Duration::from_secs(60);

/// Trains.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let keeping = flags.checkpoints.check(&mut problems);
    let mut defaults = Training::default();
    if let Some(resume) = &keeping.resume {
        defaults.seed = resume.state().seed;
    }
    let training = flags.training.check(&defaults, &mut problems);
    let mut strategy = flags.strategy.clone();
    strategy.model = strategy.model.or_else(|| keeping.model());
    let data = flags.data.check(&DataDefaults::of(&keeping), &mut problems);
    let launch = flags.launch.check(&mut problems);
    let job = Job::check(&strategy, &flags.cluster, training, (keeping, data), launch, problems)?;
    job.run(&flags.common.output())
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
}

impl Job {
    /// Everything that can be known to be wrong before a rank starts.
    pub(super) fn check(
        strategy: &StrategyFlags,
        cluster: &ClusterFlags,
        mut training: Training,
        (keeping, data): (Keeping, Option<DataChoice>),
        launch: Launch,
        mut problems: Problems,
    ) -> Result<Self, Failure> {
        let described = cluster.check(&mut problems);
        let on = described.as_ref().map(|described| (cluster, described));
        let defaults = Defaults { dtype: DType::F32, order: Order::Canonical, one_host: true };
        if strategy.dtype.as_deref() == Some("fp8") {
            problems.say("--dtype", "'fp8' cannot be trained in yet; f32, bf16 and f16 can");
        }
        let request = strategy.check(defaults, on, &mut problems);
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
        let done = keeping.resume.as_ref().map_or(0, |resume| resume.state().iteration);
        if done > 0 && training.iterations <= done {
            problems.say(
                "--iterations",
                format!(
                    "counts from the run's start, and the checkpoint is at {done}; use more than that"
                ),
            );
        }
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
        let cluster = match described {
            Some(cluster) => cluster,
            None => this_machine(plan.mesh.world())?,
        };
        let mut job = Self { model, plan, training, keeping, data, launch, place, cores, cluster };
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

    /// Trains: as threads of this process, as processes that this one starts, or as the one of them
    /// that this process is.
    pub(super) fn run(mut self, output: &Output) -> Result<(), Failure> {
        let world = self.plan.mesh.world();
        let threads = match self.launch.transport {
            Carrier::Thread => true,
            Carrier::Auto => world == 1,
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
                launch::run(world, &self.launch, directory.path())
            }
        }
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
    fn lead(self, mut member: Option<Member>, output: &Output) -> Result<(), Failure> {
        let directory = self.directory()?;
        let mut record = self.record();
        let predicted = self.predict(&mut record);
        self.announce(&record, output)?;

        let (stop, progress) = (stop_on_interrupt(output), self.progress(&record));
        let mut listener_left = false;
        let mut heard = |iteration: &IterationReport| {
            progress.advance(iteration.iteration, iteration.loss, iteration.tokens_per_s);
            record.iterations.push(IterationRecord::from(iteration));
            if output.object(&IterationEvent::from(iteration)).is_err() && !listener_left {
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
        output.people(&closing(&record, &directory, predicted.as_ref(), measured.as_ref()))?;
        Ok(output.object(&DoneEvent::new(&record, &directory))?)
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
            start: match (&self.keeping.resume, &self.keeping.init_from) {
                (Some(resume), _) => Start::Checkpoint(Arc::clone(resume)),
                (None, Some(from)) => Start::Pretrained(Arc::clone(from)),
                (None, None) => Start::Seed,
            },
            save: self.save(directory),
            stop: Arc::clone(stop),
            silence: SILENCE.max(self.launch.silence),
            device: self.launch.device,
            ..TrainOptions::default()
        }
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
        let Ok(last) = Checkpoint::open(&Keeping::folder(directory.path())) else { return Ok(()) };
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

    /// What is known before the first iteration.
    fn record(&self) -> RunRecord {
        let Self { model, plan, training, keeping, data, cores, cluster, .. } = self;
        let summary = summarize(plan);
        let mut warnings = warnings(plan, &summary, None);
        let ranks = plan.mesh.world();
        if ranks as usize > *cores && cluster.measured.is_none() {
            warnings.push(format!(
                "{ranks} ranks share {cores} core{}, the prediction gives each its own: expect it \
                 to be too fast",
                if *cores == 1 { "" } else { "s" }
            ));
        }
        if self.launch.device != Device::Cpu {
            warnings.push(format!(
                "the prediction is for {}; --cluster names one with the GPU",
                cluster.name
            ));
        }
        let memory = plan.programs.iter().flat_map(|program| {
            MemoryKind::ALL.map(|kind| MemoryRecord {
                role: program.name.clone(),
                kind: kind.name().to_owned(),
                bytes: program.memory.of(kind).0,
            })
        });
        let model = ModelRecord::from(model);
        let mut facts = facts(&model, plan);
        if let DataSource::Text(text) = &data.source {
            let (tokens, path) = (text.tokens(), text.path().display());
            facts.push(("data".to_owned(), format!("{path}, {tokens} tokens, 1 in 20 held out")));
        }
        if let Some(from) = &keeping.init_from {
            facts.push(("weights".to_owned(), format!("from {}", from.path().display())));
        }
        let resumed = keeping.resume.as_ref();
        if let Some(resume) = resumed {
            let (iteration, path) = (resume.state().iteration, resume.path().display());
            facts.push(("resumed".to_owned(), format!("after iteration {iteration}, from {path}")));
        }
        RunRecord {
            format: RunRecord::FORMAT,
            facts,
            iterations_before: resumed.map_or(0, |resume| resume.state().iteration),
            checkpoint: None,
            exported: None,
            model,
            strategy: plan.strategy.clone(),
            cluster: cluster.name.clone(),
            iterations_asked: training.iterations,
            lr: training.lr,
            warmup: training.warmup,
            weight_decay: training.weight_decay,
            clip: training.clip,
            seed: training.seed,
            iterations: Vec::new(),
            floor: self.floor(),
            predicted_iteration_s: None,
            measured_iteration_s: None,
            tokens_per_s: None,
            peak_bytes: None,
            planned_peak_bytes: planned(plan),
            memory: memory.collect(),
            warnings,
            stopped: false,
            failed: None,
            measured: false,
            simulated: false,
        }
    }

    /// The lowest loss that the data allows, where that is known.
    fn floor(&self) -> Option<f64> {
        let vocab = u32::try_from(self.model.vocab).ok()?;
        let (seq, seed) = (self.plan.strategy.seq, self.training.seed);
        Data::new(&self.data.source, vocab, seq, seed).ok()?.floor()
    }

    /// The simulator's trace; a run does not depend on it.
    fn predict(&self, record: &mut RunRecord) -> Option<Trace> {
        let options = paceline_sim::Options { trace: true, ..Default::default() };
        match paceline_sim::simulate(&self.plan, &self.cluster, &options) {
            Ok(outcome) => {
                record.predicted_iteration_s = Some(outcome.iteration.0);
                outcome.trace.map(|trace| unfold(trace, &self.plan))
            }
            Err(error) => {
                record.warnings.push(format!("there is no prediction: {error}"));
                None
            }
        }
    }

    fn progress(&self, record: &RunRecord) -> Progress {
        Progress::new(record.iterations_before, self.training.iterations, record.floor)
    }

    /// What is about to happen.
    fn announce(&self, record: &RunRecord, output: &Output) -> Result<(), Failure> {
        let mut text = String::new();
        for (name, fact) in &record.facts {
            text += &format!("{name:<9} {fact}\n");
        }
        if let Some(seconds) = record.predicted_iteration_s {
            let time = Seconds(seconds);
            text += &format!("predicted {time} an iteration on {}\n", record.cluster);
        }
        for warning in &record.warnings {
            text += &format!("warning: {warning}\n");
        }
        Ok(output.people(&text)?)
    }

    /// The pace, from all iterations.
    fn conclude(&self, record: &mut RunRecord) {
        let steady = match record.iterations.as_slice() {
            // The first iteration also fills caches and wakes threads.
            [_, steady @ ..] if !steady.is_empty() => steady,
            all => all,
        };
        let mut times: Vec<f64> = steady.iter().map(|iteration| iteration.seconds).collect();
        times.sort_by(f64::total_cmp);
        record.measured_iteration_s = times.get(times.len() / 2).copied();
        let tokens = self.plan.strategy.tokens() as f64;
        let pace = record.measured_iteration_s.filter(|seconds| *seconds > 0.0);
        record.tokens_per_s = pace.map(|seconds| tokens / seconds);
    }
}

/// The simulator writes one rank of each role, because all of them take the same time; here each
/// rank gets its copy, so that every measured rank has a prediction beside it.
fn unfold(mut trace: Trace, plan: &Plan) -> Trace {
    let folded = std::mem::take(&mut trace.spans);
    for rank in (0..plan.mesh.world()).map(Rank) {
        let stands_for = plan.representative(plan.role(rank));
        let own = folded.iter().filter(|span| span.rank == stands_for);
        trace.spans.extend(own.map(|span| Span { rank, ..*span }));
    }
    trace
}

/// Notes data that the model cannot learn from, and a model that cannot be exported.
fn can_learn(
    model: &Model,
    plan: &Plan,
    source: &DataSource,
    keeping: &Keeping,
    problems: &mut Problems,
) {
    let vocab = u32::try_from(model.vocab).unwrap_or(u32::MAX);
    if let Err(error) = Data::new(source, vocab, plan.strategy.seq, 0) {
        problems.say("--data", error.to_string());
    }
    if let (Some(_), Err(error)) = (&keeping.export_hf, can_export(model)) {
        problems.say("--export-hf", error.to_string());
    }
}

/// Notes a plan that this machine cannot hold: to find out by trying could take it down.
fn can_start(plan: &Plan, problems: &mut Problems) {
    let ranks = plan.mesh.world();
    if ranks > MOST_RANKS {
        problems.say(
            "--ranks",
            format!(
                "{ranks} ranks are more than the {MOST_RANKS} that one machine can be asked to be"
            ),
        );
        return;
    }
    let needed = Bytes(planned(plan).into_iter().fold(0u64, u64::saturating_add));
    if let Some(available) = resident::available().filter(|available| needed.0 > *available) {
        problems.say(
            "--model",
            format!(
                "{} on {ranks} ranks needs {needed}, and this machine has {} to give; \
                 `paceline simulate` needs no such memory",
                plan.model,
                Bytes(available)
            ),
        );
    }
}

/// Notes the rank that needs the most memory, if that is more than a rank may have.
fn fits_limit(plan: &Plan, limit: Option<Bytes>, problems: &mut Problems) {
    let most = (0..).map(Rank).zip(planned(plan)).max_by_key(|(_, bytes)| *bytes);
    if let (Some(limit), Some((rank, bytes))) = (limit, most)
        && bytes > limit.0
    {
        problems.say(
            "--memory-limit",
            format!(
                "a rank may have {limit}, and {} needs {} on rank {rank}; `paceline plan` shows what \
                 for, and --zero, --recompute, --tp, --pp or a smaller --micro-batch need less",
                plan.model,
                Bytes(bytes)
            ),
        );
    }
}

/// The arena of each rank.
fn planned(plan: &Plan) -> Vec<u64> {
    (0..plan.mesh.world()).map(|rank| plan.program(Rank(rank)).memory.total().0).collect()
}

/// The cluster that stands for this machine until it is measured: a core for each rank, which takes
/// turns with others where there are more ranks than cores.
fn this_machine(ranks: u32) -> Result<Cluster, Failure> {
    let mut cluster =
        preset::get("laptop").map_err(|error| Failure::flag("--cluster", error.to_string()))?;
    if let Some(cores) = cluster.dimensions.first_mut() {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        cores.size = u32::try_from(available).unwrap_or(u32::MAX);
    }
    Ok(cluster.crowded(ranks))
}

/// A flag that Ctrl-C sets. The second Ctrl-C leaves at once.
fn stop_on_interrupt(output: &Output) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let handled = ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    });
    if let Err(error) = handled {
        output.note(&format!("note: Ctrl-C will end the run without its files ({error})"));
    }
    stop
}

/// Writes the run's directory; the record last but one, because it says which traces there are.
fn write_files(
    directory: &RunDir,
    record: &mut RunRecord,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> Result<(), Failure> {
    for (name, trace, there) in [
        ("simulated.json", simulated, &mut record.simulated),
        ("measured.json", measured, &mut record.measured),
    ] {
        *there = trace.is_some();
        match trace {
            Some(trace) => {
                directory.write(name, &trace.to_json().map_err(|e| Failure::Run(e.into()))?)?;
            }
            None => directory.remove(name),
        }
    }
    let both = match (simulated, measured) {
        (Some(simulated), Some(measured)) => Some(to_perfetto_beside(simulated, measured)),
        (Some(one), None) | (None, Some(one)) => Some(to_perfetto(one)),
        (None, None) => None,
    };
    match both {
        Some(both) => directory.write("trace.json", &both)?,
        None => directory.remove("trace.json"),
    }
    let json = serde_json::to_string_pretty(&record).map_err(|e| Failure::Run(e.into()))?;
    directory.write("run.json", &json)?;
    Ok(directory.write("report.html", &report::page(record, simulated, measured))?)
}

/// How it went.
fn closing(
    record: &RunRecord,
    directory: &RunDir,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> String {
    let mut text = String::new();
    let losses = record.losses();
    if let [first, .., last] | [first @ last] = losses.as_slice() {
        let floor = record.floor.map_or(String::new(), |floor| format!(" (floor {floor:.4})"));
        let pace = record.tokens_per_s.unwrap_or(0.0);
        text += &format!(
            "loss {first:.4} → {last:.4}{floor} in {} iterations at {pace:.0} tokens/s\n",
            losses.len()
        );
    }
    if record.stopped {
        let done = record.iterations_before as usize + losses.len();
        text += &format!("stopped after {done} of {}\n", record.iterations_asked);
    }
    let most = |bytes: &[u64]| Bytes(bytes.iter().copied().max().unwrap_or(0));
    text += &format!("memory of the fullest rank: {} planned", most(&record.planned_peak_bytes));
    if let Some(peak) = &record.peak_bytes {
        text += &format!(", {} measured", most(peak));
    }
    text += "\n\n";
    text += &breakdown_table(simulated, measured);
    let path = |name: &str| directory.file(name).display().to_string();
    text += &format!("\nreport    {}\n", path("report.html"));
    text += &format!("trace     {} (opens in Perfetto)\n", path("trace.json"));
    if let Some(checkpoint) = &record.checkpoint {
        text += &format!("checkpoint {checkpoint}\n");
    }
    if let Some(exported) = &record.exported {
        text += &format!("exported  {exported} (for transformers)\n");
    }
    text
}

impl From<&IterationReport> for IterationRecord {
    fn from(report: &IterationReport) -> Self {
        let finite = |value: f32| value.is_finite().then_some(value);
        Self {
            loss: finite(report.loss),
            grad_norm: finite(report.grad_norm),
            seconds: report.seconds,
        }
    }
}

/// One iteration, for programs.
#[derive(Serialize)]
struct IterationEvent {
    event: &'static str,
    iteration: u32,
    loss: f32,
    loss_bits: String,
    tokens_per_s: f64,
    iteration_s: f64,
    grad_norm: f32,
    /// In f16 runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<f32>,
    /// Whether the gradient left the range of f16, so that no weight was changed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skipped: bool,
}

impl From<&IterationReport> for IterationEvent {
    fn from(report: &IterationReport) -> Self {
        Self {
            event: "iteration",
            iteration: report.iteration,
            loss: report.loss,
            loss_bits: bits(report.loss),
            tokens_per_s: report.tokens_per_s,
            iteration_s: report.seconds,
            grad_norm: report.grad_norm,
            loss_scale: report.loss_scale,
            skipped: report.skipped,
        }
    }
}

/// The whole run, for programs.
#[derive(Serialize)]
struct DoneEvent<'a> {
    event: &'static str,
    iterations: usize,
    loss: Option<f32>,
    loss_bits: Option<String>,
    floor: Option<f64>,
    tokens_per_s: Option<f64>,
    predicted_iteration_s: Option<f64>,
    measured_iteration_s: Option<f64>,
    peak_bytes: Option<&'a [u64]>,
    planned_peak_bytes: &'a [u64],
    stopped: bool,
    checkpoint: Option<&'a str>,
    run_dir: String,
}

impl<'a> DoneEvent<'a> {
    fn new(record: &'a RunRecord, directory: &RunDir) -> Self {
        let last = record.iterations.last().and_then(|iteration| iteration.loss);
        Self {
            event: "done",
            iterations: record.iterations.len(),
            loss: last,
            loss_bits: last.map(bits),
            floor: record.floor,
            tokens_per_s: record.tokens_per_s,
            predicted_iteration_s: record.predicted_iteration_s,
            measured_iteration_s: record.measured_iteration_s,
            peak_bytes: record.peak_bytes.as_deref(),
            planned_peak_bytes: &record.planned_peak_bytes,
            stopped: record.stopped,
            checkpoint: record.checkpoint.as_deref(),
            run_dir: directory.path().display().to_string(),
        }
    }
}

/// A float's bit pattern, by which two runs are compared exactly.
fn bits(value: f32) -> String {
    format!("{:08x}", value.to_bits())
}
