//! The directory of a run: its files, and reading them back.
//!
//! | file | what |
//! |---|---|
//! | `run.json` | model, strategy, settings, every iteration's loss and time, memory |
//! | `measured.json` | the executor's trace of the last iterations |
//! | `simulated.json` | the simulator's trace of the same plan |
//! | `trace.json` | both, for Perfetto and Chrome |
//! | `report.html` | both, as a page |
//! | `iterations.jsonl` | every iteration so far, during a run |
//! | `checkpoints/` | the trained state; the last few |
//! | `run.toml`, `model.toml`, `tokenizer.json` | the settings, for `--resume` |
//! | `.lock` | locked while a job writes here |

use super::lock::Lock;
use super::write;
use crate::flags::{CheckpointOptions, MODEL, Problems, SETTINGS, TOKENIZER};
use paceline_exec::{Staleness, regular};
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use paceline_plan::trace::Trace;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Settings and results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// Format version of this file; a later format has a higher number.
    pub format: u32,
    /// The trained model.
    pub model: ModelRecord,
    /// Readable facts about the plan.
    pub facts: Vec<(String, String)>,
    /// The parallelisation strategy and schedule.
    pub strategy: Strategy,
    /// The cluster that the prediction is for.
    pub cluster: String,
    /// Number of requested iterations.
    pub iterations_asked: u32,
    /// Learning rate after the warmup.
    pub lr: f64,
    /// Number of iterations of linear warmup.
    pub warmup: u32,
    /// Number of first iterations in which replicas exchanged uncompressed gradients.
    #[serde(default)]
    pub compress_warmup: u32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Norm to which gradients were clipped.
    pub clip: Option<f64>,
    /// Seed of weights and data.
    pub seed: u64,
    /// Number of iterations done by an earlier run, if this one resumed it.
    #[serde(default)]
    pub iterations_before: u32,
    /// All later iterations.
    pub iterations: Vec<IterationRecord>,
    /// Restarts after the loss of ranks, oldest first.
    #[serde(default)]
    pub restarts: Vec<RestartRecord>,
    /// The last checkpoint, relative to the run's directory, if there is one.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// The exported Hugging Face directory, if requested.
    #[serde(default)]
    pub exported: Option<String>,
    /// The lowest mean loss that the data allows, in nats per token.
    pub floor: Option<f64>,
    /// Predicted iteration time.
    pub predicted_iteration_s: Option<f64>,
    /// Mean power of all devices that the cluster's description predicts, if it states power.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_power_w: Option<f64>,
    /// Factors on the predicted time between which the measured time is expected on an idle machine; absent where the
    /// machine is described, whose description has the error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_band: Option<[f64; 2]>,
    /// Number of iterations done before the part that is measured: when the run was started,
    /// resumed or restarted last.
    #[serde(default)]
    pub part_from: u32,
    /// Median time of the steady iterations of that part.
    pub measured_iteration_s: Option<f64>,
    /// The first and the last steady iteration.
    #[serde(default)]
    pub measured_iterations: Option<[u32; 2]>,
    /// Tokens per second at that iteration time.
    pub tokens_per_s: Option<f64>,
    /// Measured peak memory of each rank, if the system reports it.
    pub peak_bytes: Option<Vec<u64>>,
    /// Planned peak memory of each rank.
    pub planned_peak_bytes: Vec<u64>,
    /// The planned memory of each role.
    pub memory: Vec<MemoryRecord>,
    /// Caveats about the results.
    pub warnings: Vec<String>,
    /// True if the user ended the run early.
    pub stopped: bool,
    /// Cause of the failure, if the run failed.
    pub failed: Option<String>,
    /// True if there is a `measured.json`.
    pub measured: bool,
    /// True if there is a `simulated.json`.
    pub simulated: bool,
}

/// Dimensions of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelRecord {
    /// Its name.
    pub name: String,
    /// Its family.
    pub kind: String,
    /// Number of trained parameters; tied ones count once.
    pub params: u64,
    /// Number of layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub d_model: u64,
    /// Number of query heads.
    pub heads: u64,
    /// Number of key and value heads.
    pub kv_heads: u64,
    /// Inner width of the feed-forward network.
    pub ffn: u64,
    /// Tokens per sample.
    pub seq: u64,
    /// Vocabulary size.
    pub vocab: u64,
    /// True if the head uses the token embedding.
    pub tied: bool,
    /// Number of routed experts per layer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub experts: u64,
    /// Number of routed experts per token.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub topk: u64,
    /// Number of experts that process every token.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_experts: u64,
    /// Number of parameters used per token, if experts leave some out.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub active_params: u64,
    /// Number of multi-token prediction modules.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mtp_depth: u64,
}

impl ModelRecord {
    /// What throughput counts.
    pub(crate) fn unit(&self) -> &'static str {
        match self.kind.as_str() {
            "resnet" => "images",
            "dlrm" => "clicks",
            _ => "tokens",
        }
    }
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

impl From<&Model> for ModelRecord {
    fn from(model: &Model) -> Self {
        Self {
            name: model.name().to_owned(),
            kind: model.kind.name().to_owned(),
            params: model.parameters(),
            layers: model.layers,
            d_model: model.d_model,
            heads: model.heads,
            kv_heads: model.kv_heads,
            ffn: model.ffn,
            seq: model.seq,
            vocab: model.vocab,
            tied: model.tied,
            experts: model.experts.experts,
            topk: model.experts.topk,
            shared_experts: model.experts.shared_experts,
            active_params: if model.experts.is_none() { 0 } else { model.active_parameters() },
            mtp_depth: model.mtp.depth,
        }
    }
}

/// One iteration. A loss that is not finite is absent, because JSON cannot represent it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct IterationRecord {
    /// Mean loss per token.
    pub loss: Option<f32>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<f32>,
    /// Duration in seconds.
    #[serde(rename = "iteration_s", alias = "seconds")]
    pub seconds: f64,
    /// Staleness of gradients, with asynchronous servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staleness: Option<StalenessRecord>,
}

/// Number of updates by others that gradients missed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StalenessRecord {
    /// The mean.
    pub mean: f64,
    /// The maximum.
    pub max: u64,
    /// Maximum number of iterations by which the fastest replica led the slowest.
    pub max_lead: u32,
    /// Number of updates that missed 0, 1, … others; the last bin also counts all that missed more.
    #[serde(default)]
    pub histogram: [u32; Staleness::BINS],
}

/// A restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RestartRecord {
    /// The iteration after which training resumed.
    pub after: u32,
    /// Cause of the failure.
    pub cause: String,
}

/// Memory of one kind of buffer on each rank of a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MemoryRecord {
    /// The role's name.
    pub role: String,
    /// Kind of buffer: parameters, gradients and so on.
    pub kind: String,
    /// Bytes on each rank of the role.
    pub bytes: u64,
}

impl RunRecord {
    /// Staleness of gradients over the whole run, with asynchronous servers.
    pub(crate) fn staleness(&self) -> Option<StalenessRecord> {
        let all = || self.iterations.iter().filter_map(|iteration| iteration.staleness);
        let count = all().count();
        (count > 0).then(|| StalenessRecord {
            mean: all().map(|staleness| staleness.mean).sum::<f64>() / count as f64,
            max: all().map(|staleness| staleness.max).max().unwrap_or(0),
            max_lead: all().map(|staleness| staleness.max_lead).max().unwrap_or(0),
            histogram: std::array::from_fn(|at| {
                all().map(|staleness| staleness.histogram[at]).fold(0, u32::saturating_add)
            }),
        })
    }

    /// The steady iterations, and the number of the first: those of the last part without its first
    /// tenth, at least one, which fills caches and wakes threads, and without a compression warm-up,
    /// which the prediction leaves out too.
    pub(crate) fn steady(&self) -> (u32, &[IterationRecord]) {
        let len = self.iterations.len();
        let index = |iteration: u32| iteration.saturating_sub(self.iterations_before) as usize;
        let part = index(self.part_from).min(len);
        let compressed = index(self.compress_warmup).max(part);
        let from = if compressed < len { compressed } else { part };
        let left_out = (len - from).div_ceil(10).min((len - from).saturating_sub(1));
        let first = from + left_out;
        (self.iterations_before + first as u32 + 1, &self.iterations[first..])
    }

    /// The measured iterations as text.
    pub(crate) fn measured_over(&self) -> String {
        match self.measured_iterations {
            Some([first, last]) if first < last => {
                format!("the median of iterations {first} to {last}")
            }
            Some([only, _]) => format!("iteration {only}"),
            None => "the median".to_owned(),
        }
    }

    /// The current format version.
    pub(crate) const FORMAT: u32 = 1;

    /// The last finished iteration, counted from the original start.
    pub(crate) fn iterations_done(&self) -> u32 {
        self.iterations_before + self.iterations.len() as u32
    }

    /// The losses, with NaN for those that are not finite.
    pub(crate) fn losses(&self) -> Vec<f32> {
        self.iterations.iter().map(|i| i.loss.unwrap_or(f32::NAN)).collect()
    }
}

/// A run's directory.
#[derive(Clone, Debug)]
pub(crate) struct RunDir {
    path: PathBuf,
    /// Held while a job writes here.
    lock: Option<Arc<Lock>>,
}

/// Treatment of a run that the directory already holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    /// The directory is refused.
    Refuse,
    /// The run is removed.
    Replace,
    /// The job continues it.
    Continue,
}

/// Maximum size of a record or trace: a trace of a thousand ranks has some hundred megabytes.
const LARGEST: u64 = 4 << 30;

/// Files of a run, besides its checkpoints and flight records.
const FILES: [&str; 10] = [
    SETTINGS,
    MODEL,
    TOKENIZER,
    "run.json",
    "measured.json",
    "simulated.json",
    "trace.json",
    "report.html",
    "iterations.jsonl",
    "machine.toml",
];

impl RunDir {
    /// Creates the directory named by the user, or the next free one for the model, and locks it
    /// for this job. A directory that is not writable, in use, or taken by another run is thus
    /// reported before training.
    pub(crate) fn claim(
        named: Option<&Path>,
        model: &str,
        existing: Existing,
    ) -> Result<Self, String> {
        let made = match named {
            Some(path) => fs::create_dir_all(path).map(|()| path.to_owned()),
            None => next_free(model),
        };
        let shown = named.unwrap_or(Path::new("runs")).display();
        let unwritable = |error: io::Error| format!("{shown} cannot be written to: {error}");
        let path = made.map_err(unwritable)?;
        let lock = Lock::take(&path, existing == Existing::Continue).map_err(unwritable)?;
        let lock = lock.map_err(|owner| {
            format!("{} is in use by another job{owner}; use another directory", path.display())
        })?;
        let run = Self { path, lock: Some(Arc::new(lock)) };
        let checkpoints = CheckpointOptions::folder(&run.path);
        let has_checkpoints = fs::read_dir(&checkpoints).is_ok_and(|mut all| all.next().is_some());
        let is_taken = has_checkpoints || FILES.iter().any(|name| run.file(name).exists());
        match existing {
            Existing::Refuse if is_taken => {
                let path = run.path.display();
                return Err(format!(
                    "{path} holds a run; --resume {path} continues it, --overwrite replaces it, or use another directory"
                ));
            }
            Existing::Replace => run.clear(&checkpoints).map_err(unwritable)?,
            Existing::Refuse | Existing::Continue => {}
        }
        Ok(run)
    }

    /// Removes a run's files and checkpoints.
    fn clear(&self, checkpoints: &Path) -> io::Result<()> {
        let there = |removed: io::Result<()>| match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        FILES.iter().try_for_each(|name| there(fs::remove_file(self.file(name))))?;
        for entry in fs::read_dir(&self.path)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("flight-") {
                there(fs::remove_file(entry.path()))?;
            }
        }
        there(fs::remove_dir_all(checkpoints))
    }

    /// A directory that is expected to hold a run.
    pub(crate) fn existing(path: &Path) -> Self {
        Self { path: path.to_owned(), lock: None }
    }

    /// Lets the processes that this one starts hold the lock too: it is released when the last of
    /// them has ended, also if this one is killed.
    pub(crate) fn share_lock(&self) {
        if let Some(lock) = &self.lock {
            lock.inherit();
        }
    }

    /// The record of the run so far; `None` if it has not ended yet.
    pub(crate) fn past_record(&self) -> Option<RunRecord> {
        let text = regular::read(&self.file("run.json"), LARGEST).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of one of its files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes one of its files atomically.
    pub(crate) fn write(&self, name: &str, contents: &str) -> io::Result<()> {
        let named = |e: io::Error| {
            io::Error::new(
                e.kind(),
                format!("{} cannot be written: {e}", self.file(name).display()),
            )
        };
        write(&self.file(name), contents.as_bytes()).map_err(named)
    }

    /// Removes one of its files if an earlier run left it here.
    pub(crate) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.file(name));
    }

    /// Reads the run's record, or reports the problem.
    pub(crate) fn record(&self, problems: &mut Problems) -> Option<RunRecord> {
        let text = self.read("run.json", problems)?;
        let place = self.file("run.json").display().to_string();
        let record: RunRecord = serde_json::from_str(&text)
            .map_err(|error| problems.located(format!("{place}: not a run's record: {error}")))
            .ok()?;
        if record.format > RunRecord::FORMAT {
            problems.located(format!(
                "{place}: written in layout {}, this version reads up to {}; use a newer paceline",
                record.format,
                RunRecord::FORMAT
            ));
            return None;
        }
        Some(record)
    }

    /// Reads a trace that the record lists, or reports the problem.
    pub(crate) fn trace(&self, name: &str, problems: &mut Problems) -> Option<Trace> {
        let text = self.read(name, problems)?;
        Trace::from_json(&text)
            .map_err(|e| problems.located(format!("{}: {e}", self.file(name).display())))
            .ok()
    }

    fn read(&self, name: &str, problems: &mut Problems) -> Option<String> {
        let path = self.file(name);
        regular::read_text(&path, LARGEST)
            .map_err(|error| problems.located(format!("{}: {error}", path.display())))
            .ok()
    }
}

/// Creates `runs/MODEL-001`, or the first free number after it.
fn next_free(model: &str) -> io::Result<PathBuf> {
    let name: String = model
        .chars()
        .map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '-' })
        .collect();
    let runs = Path::new("runs");
    fs::create_dir_all(runs)?;
    for number in 1..=99_999 {
        let path = runs.join(format!("{name}-{number:03}"));
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("runs/{name}-99999 is taken; clear the directory or use --out")))
}

/// Median of a list of times; of two middle ones the mean.
pub(crate) fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    let (low, high) = (times.get(times.len().checked_sub(1)? / 2)?, times.get(times.len() / 2)?);
    Some((low + high) / 2.0)
}
