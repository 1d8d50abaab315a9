//! The directory of a run: what is in it, and how it is read back.
//!
//! | file | what |
//! |---|---|
//! | `run.json` | model, strategy, settings, every iteration's loss and time, memory |
//! | `measured.json` | the executor's trace of the last iterations |
//! | `simulated.json` | the simulator's trace of the same plan |
//! | `trace.json` | both, for Perfetto and Chrome |
//! | `report.html` | both, for people |
//! | `iterations.jsonl` | every iteration so far, while a run is under way |
//! | `checkpoints/` | the trained state; the last few |

use super::write;
use crate::flags::Problems;
use paceline_exec::Staleness;
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use paceline_plan::trace::Trace;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What a run was and how it went.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The layout of this file; a later layout has a higher number.
    pub format: u32,
    /// What was trained.
    pub model: ModelRecord,
    /// What was planned, for people.
    pub facts: Vec<(String, String)>,
    /// How it was cut and scheduled.
    pub strategy: Strategy,
    /// The cluster that the prediction is for.
    pub cluster: String,
    /// Iterations asked for.
    pub iterations_asked: u32,
    /// Learning rate after the warmup.
    pub lr: f64,
    /// Iterations of linear warmup.
    pub warmup: u32,
    /// First iterations in which gradients went between replicas as they are, before they were compressed.
    #[serde(default)]
    pub compress_warmup: u32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// The norm to which gradients were scaled down.
    pub clip: Option<f64>,
    /// Seed of weights and data.
    pub seed: u64,
    /// Iterations that a run before this one had done, if it was resumed.
    #[serde(default)]
    pub iterations_before: u32,
    /// Every iteration after those.
    pub iterations: Vec<IterationRecord>,
    /// Where ranks were lost and all started anew, oldest first.
    #[serde(default)]
    pub restarts: Vec<RestartRecord>,
    /// The last checkpoint, if there is one.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// The directory for transformers, if one was asked for.
    #[serde(default)]
    pub exported: Option<String>,
    /// The lowest mean loss that the data allows, in nats per token.
    pub floor: Option<f64>,
    /// The simulator's iteration.
    pub predicted_iteration_s: Option<f64>,
    /// The median iteration, the first left out where there are others.
    pub measured_iteration_s: Option<f64>,
    /// Tokens a second at that pace.
    pub tokens_per_s: Option<f64>,
    /// Measured peak memory of each rank, where the system tells it.
    pub peak_bytes: Option<Vec<u64>>,
    /// Planned peak memory of each rank.
    pub planned_peak_bytes: Vec<u64>,
    /// The planned memory of each role.
    pub memory: Vec<MemoryRecord>,
    /// What the reader should know before trusting the rest.
    pub warnings: Vec<String>,
    /// Whether the user ended the run early.
    pub stopped: bool,
    /// What ended the run, if it failed.
    pub failed: Option<String>,
    /// Whether there is a `measured.json`.
    pub measured: bool,
    /// Whether there is a `simulated.json`.
    pub simulated: bool,
}

/// A model in numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModelRecord {
    /// Its name.
    pub name: String,
    /// Its family.
    pub kind: String,
    /// Trained parameters, tied ones once.
    pub params: u64,
    /// Layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub d_model: u64,
    /// Query heads.
    pub heads: u64,
    /// Heads of keys and values.
    pub kv_heads: u64,
    /// Inner width of the feed-forward network.
    pub ffn: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// Tokens of the vocabulary.
    pub vocab: u64,
    /// Whether the head uses the token embedding.
    pub tied: bool,
    /// Experts of a layer that tokens choose from.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub experts: u64,
    /// Experts that a token goes to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub topk: u64,
    /// Experts that every token goes to.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shared_experts: u64,
    /// Parameters that one token meets, where experts leave some out.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub active_params: u64,
    /// Modules that predict further tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mtp_depth: u64,
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

/// One iteration. A loss that is not finite has no JSON number; it is absent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct IterationRecord {
    /// Mean loss of a token.
    pub loss: Option<f32>,
    /// Norm of the gradient, before clipping.
    pub grad_norm: Option<f32>,
    /// How long it took.
    pub seconds: f64,
    /// How stale gradients were, where servers apply them as they come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staleness: Option<StalenessRecord>,
}

/// How many updates by others gradients missed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StalenessRecord {
    /// The mean.
    pub mean: f64,
    /// The most.
    pub max: u64,
    /// By how many iterations the fastest replica was ahead of the slowest at most.
    pub ahead: u32,
    /// How many updates missed none, one and so on; the last number is of all that missed more.
    #[serde(default)]
    pub histogram: [u32; Staleness::BINS],
}

/// A restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RestartRecord {
    /// The iteration after which training went on.
    pub after: u32,
    /// What had ended it.
    pub cause: String,
}

/// What one kind of buffer takes on the ranks of one role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MemoryRecord {
    /// The role's name.
    pub role: String,
    /// Parameters, gradients and so on.
    pub kind: String,
    /// Bytes on each rank of the role.
    pub bytes: u64,
}

impl RunRecord {
    /// How stale gradients were over the whole run, where servers applied them as they came.
    pub(crate) fn staleness(&self) -> Option<StalenessRecord> {
        let all = || self.iterations.iter().filter_map(|iteration| iteration.staleness);
        let count = all().count();
        (count > 0).then(|| StalenessRecord {
            mean: all().map(|staleness| staleness.mean).sum::<f64>() / count as f64,
            max: all().map(|staleness| staleness.max).max().unwrap_or(0),
            ahead: all().map(|staleness| staleness.ahead).max().unwrap_or(0),
            histogram: std::array::from_fn(|at| {
                all().map(|staleness| staleness.histogram[at]).fold(0, u32::saturating_add)
            }),
        })
    }

    /// The layout written today.
    pub(crate) const FORMAT: u32 = 1;

    /// The last iteration that was done, counted from the very first.
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
}

impl RunDir {
    /// The directory that the user named, or the next free one for the model, made now: whoever
    /// cannot write finds out before training, not after.
    pub(crate) fn create(named: Option<&Path>, model: &str) -> io::Result<Self> {
        let path = match named {
            Some(path) => {
                fs::create_dir_all(path)?;
                path.to_owned()
            }
            None => next_free(model)?,
        };
        let probe = path.join(".writable");
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        Ok(Self { path })
    }

    /// A directory that should hold a run.
    pub(crate) fn existing(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// One of its files.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes one of its files, whole or not at all.
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

    /// The run's record, or what is wrong with it.
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

    /// A trace that the record promises, or what is wrong with it.
    pub(crate) fn trace(&self, name: &str, problems: &mut Problems) -> Option<Trace> {
        let text = self.read(name, problems)?;
        Trace::from_json(&text)
            .map_err(|e| problems.located(format!("{}: {e}", self.file(name).display())))
            .ok()
    }

    fn read(&self, name: &str, problems: &mut Problems) -> Option<String> {
        let path = self.file(name);
        fs::read_to_string(&path)
            .map_err(|error| problems.located(format!("{}: {error}", path.display())))
            .ok()
    }
}

/// Claims `runs/MODEL-001` or the first number after it that is free.
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
