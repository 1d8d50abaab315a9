//! Flags of `train` other than the strategy: duration, learning rate, seed and files.

use super::{Problems, real, whole, word};
use clap::Args;
use paceline_exec::data::Federated;
use paceline_exec::{BatchScaling, LrSchedule, ScalingRule, Straggler};
use serde::Serialize;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

/// Upper limit of --threads-per-rank: more than any processor has cores.
const MAX_THREADS: u64 = 1024;

/// Training flags of a run.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Training")]
pub(crate) struct TrainingFlags {
    /// Number of iterations to train [default: 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub iterations: Option<String>,
    /// Learning rate after the warmup [default: 0.003]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub lr: Option<String>,
    /// Number of iterations over which the learning rate rises from zero [default: 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub warmup: Option<String>,
    /// Learning rate schedule after the warmup: constant, linear or cosine [default: constant]
    #[arg(long, value_name = "SCHEDULE")]
    pub lr_schedule: Option<String>,
    /// Final value of a decaying learning rate [default: a tenth of --lr]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub min_lr: Option<String>,
    /// Global batch in samples that --lr was chosen for; with another --global-batch the learning
    /// rate is scaled
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub base_batch: Option<String>,
    /// Scaling of --lr: linear in the batch, with its root (sqrt), or none [default: linear]
    #[arg(long, value_name = "RULE")]
    pub lr_scaling: Option<String>,
    /// Initial loss scale of an f16 run [default: 65536]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub loss_scale: Option<String>,
    /// Decoupled weight decay, multiplied by the learning rate [default: 0.01]
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    pub weight_decay: Option<String>,
    /// Clip gradients to this norm; 0 disables clipping [default: 1]
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub clip: Option<String>,
    /// Train on this number of samples repeatedly, instead of on new ones
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub unique_samples: Option<String>,
    /// Federated averaging: divide the --unique-samples images among the replicas of --local-steps,
    /// iid (equal shares of every class) or dirichlet:A (shares of every class drawn from Dir(A), the
    /// smaller A the more unequal); no sample leaves its replica
    #[arg(long, value_name = "iid|dirichlet:A")]
    pub clients: Option<String>,
    /// Fraction of the clients that take part in an iteration, drawn anew for each; the mean is
    /// weighted by their numbers of samples [default: 1]
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub client_fraction: Option<String>,
    /// Seed of the initial weights and of the data [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<String>,
    /// Compute threads per rank [default: the cores, shared out among the ranks]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub threads_per_rank: Option<String>,
    /// Slow one rank down on purpose: its computations take FACTOR times as long
    #[arg(long, value_name = "RANK:FACTOR")]
    pub straggler: Option<String>,
    /// Number of iterations at the end of the run whose ops are traced, 0 for none [default: 6, of
    /// long programs 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub trace_iterations: Option<String>,
    /// Directory for the run's files [default: runs/MODEL-NUMBER, the next free one;
    /// the resumed run's]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace the run that --out names; with --resume, discard its later checkpoints
    #[arg(long)]
    pub overwrite: bool,
    /// Directory for state that --offload moves to disk [default: the run's]
    #[arg(long, value_name = "DIR")]
    pub offload_dir: Option<PathBuf>,
}

/// Validated training flags of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Training {
    /// Number of iterations to train.
    pub iterations: u32,
    /// Learning rate after the warmup.
    pub lr: f64,
    /// Number of iterations of linear warmup.
    pub warmup: u32,
    /// Learning rate schedule after the warmup.
    pub schedule: LrSchedule,
    /// Final value of a decaying learning rate.
    pub min_lr: f64,
    /// Scaling of the learning rate with the batch.
    pub batch_scaling: Option<BatchScaling>,
    /// Initial loss scale of an f16 run.
    pub loss_scale: f32,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Norm to which gradients are clipped.
    pub clip: Option<f64>,
    /// Compute threads per rank, if given.
    pub threads_per_rank: Option<NonZeroUsize>,
    /// Seed of weights and data.
    pub seed: u64,
    /// Number of distinct samples, if given.
    pub distinct: Option<NonZeroU64>,
    /// Federated averaging, if the replicas are clients.
    pub federated: Option<Federated>,
    /// A rank that is slowed down on purpose.
    pub straggler: Option<Straggler>,
    /// Number of traced iterations, if given.
    pub traced: Option<u32>,
    /// Directory for the run's files, if given.
    pub out: Option<PathBuf>,
    /// True if a run in that directory is replaced.
    pub overwrite: bool,
    /// Directory for offloaded state, if given.
    pub offload_dir: Option<PathBuf>,
}

impl Default for Training {
    /// Settings for the small built-in models on the built-in text.
    fn default() -> Self {
        Self {
            iterations: 100,
            lr: 3e-3,
            warmup: 10,
            schedule: LrSchedule::Constant,
            min_lr: 0.1 * 3e-3,
            batch_scaling: None,
            loss_scale: 65536.0,
            weight_decay: 0.01,
            clip: Some(1.0),
            threads_per_rank: None,
            seed: 0,
            distinct: None,
            federated: None,
            straggler: None,
            traced: None,
            out: None,
            overwrite: false,
            offload_dir: None,
        }
    }
}

impl TrainingFlags {
    /// Checks every flag; absent ones take their value from `defaults`.
    pub(crate) fn check(&self, defaults: &Training, problems: &mut Problems) -> Training {
        let mut count = |flag, text: &Option<String>, least, default: u32| {
            let most = u64::from(u32::MAX - 1);
            let found = whole(flag, text.as_deref(), least..=most, problems);
            found.and_then(|n| u32::try_from(n).ok()).unwrap_or(default)
        };
        let iterations = count("--iterations", &self.iterations, 1, defaults.iterations);
        let warmup = count("--warmup", &self.warmup, 0, defaults.warmup);
        let traced = self
            .trace_iterations
            .as_ref()
            .map(|_| count("--trace-iterations", &self.trace_iterations, 0, 0));
        let mut number =
            |flag, text: &Option<String>, most| real(flag, text.as_deref(), 0.0..=most, problems);
        let lr = number("--lr", &self.lr, 1e3).unwrap_or(defaults.lr);
        let min_lr = number("--min-lr", &self.min_lr, 1e3).unwrap_or(0.1 * lr);
        let loss_scale = real("--loss-scale", self.loss_scale.as_deref(), 1.0..=1e7, problems);
        let loss_scale = loss_scale.map_or(defaults.loss_scale, |scale| scale as f32);
        let mut number =
            |flag, text: &Option<String>, most| real(flag, text.as_deref(), 0.0..=most, problems);
        let weight_decay =
            number("--weight-decay", &self.weight_decay, 1e3).unwrap_or(defaults.weight_decay);
        let clip = match number("--clip", &self.clip, 1e9) {
            Some(norm) => (norm > 0.0).then_some(norm),
            None => defaults.clip,
        };
        let schedule = word("--lr-schedule", &self.lr_schedule, problems);
        let schedule = schedule.unwrap_or(defaults.schedule);
        let batch_scaling = self.batch_scaling(problems).or(defaults.batch_scaling);
        let seed = whole("--seed", self.seed.as_deref(), 0..=u64::MAX, problems);
        let distinct =
            whole("--unique-samples", self.unique_samples.as_deref(), 1..=u64::MAX, problems);
        let distinct = distinct.and_then(NonZeroU64::new).or(defaults.distinct);
        let federated = self.federated(distinct.is_some(), problems).or(defaults.federated);
        let threads = self.threads_per_rank.as_deref();
        let threads = whole("--threads-per-rank", threads, 1..=MAX_THREADS, problems);
        let threads = threads.and_then(|n| NonZeroUsize::new(usize::try_from(n).ok()?));
        let out = self.out.clone().or_else(|| defaults.out.clone());
        if out.as_ref().is_some_and(|out| out.exists() && !out.is_dir()) {
            problems.add("--out", "exists and is not a directory");
        }
        let seed = seed.unwrap_or(defaults.seed);
        let straggler = self.straggler(problems).or(defaults.straggler);
        let threads_per_rank = threads.or(defaults.threads_per_rank);
        Training {
            iterations,
            lr,
            warmup,
            schedule,
            min_lr,
            batch_scaling,
            loss_scale,
            weight_decay,
            clip,
            threads_per_rank,
            seed,
            distinct,
            federated,
            straggler,
            traced: traced.or(defaults.traced),
            out,
            overwrite: self.overwrite || defaults.overwrite,
            offload_dir: self.offload_dir.clone().or(defaults.offload_dir.clone()),
        }
    }

    /// Federated averaging, if requested.
    fn federated(&self, finite: bool, problems: &mut Problems) -> Option<Federated> {
        let split = word("--clients", &self.clients, problems);
        let fraction = self.client_fraction.as_deref();
        let fraction = real("--client-fraction", fraction, 0.001..=1.0, problems).unwrap_or(1.0);
        if self.clients.is_none() && self.client_fraction.is_some() {
            problems.add("--client-fraction", "needs --clients");
        }
        if self.clients.is_some() && !finite {
            problems.add("--clients", "needs --unique-samples, the images that are divided");
        }
        Some(Federated { split: split?, fraction })
    }

    /// The straggler's rank and factor.
    fn straggler(&self, problems: &mut Problems) -> Option<Straggler> {
        let text = self.straggler.as_deref()?;
        let parsed = text.split_once(':').and_then(|(rank, factor)| {
            Some(Straggler { rank: rank.parse().ok()?, factor: factor.parse().ok()? })
        });
        let found = parsed.filter(|slow| (1.0..=1e6).contains(&slow.factor));
        if found.is_none() {
            let works = "is not a rank and factor from 1 on, as in 1:2";
            problems.add("--straggler", format!("'{text}' {works}"));
        }
        found
    }

    /// The scaling of the learning rate with the batch, if --base-batch is given.
    fn batch_scaling(&self, problems: &mut Problems) -> Option<BatchScaling> {
        let rule = word("--lr-scaling", &self.lr_scaling, problems);
        let base = whole("--base-batch", self.base_batch.as_deref(), 1..=u64::MAX, problems);
        let follows = rule.is_some_and(|rule| rule != ScalingRule::None);
        if follows && self.base_batch.is_none() {
            problems.add("--lr-scaling", "needs --base-batch, the batch that --lr was chosen for");
        }
        base.map(|base| BatchScaling { base, rule: rule.unwrap_or_default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl FnOnce(&mut TrainingFlags)) -> Result<Training, String> {
        let mut flags = TrainingFlags::default();
        change(&mut flags);
        let mut problems = Problems::default();
        let training = flags.check(&Training::default(), &mut problems);
        if problems.is_empty() { Ok(training) } else { Err(problems.to_string()) }
    }

    #[test]
    fn silence_means_the_defaults_and_flags_change_them() {
        assert_eq!(checked(|_| {}), Ok(Training::default()));
        let text = |text: &str| Some(text.to_owned());
        let changed = checked(|flags| {
            flags.iterations = text("7");
            flags.clip = text("0");
            flags.threads_per_rank = text("3");
            flags.trace_iterations = text("0");
            flags.seed = text("18446744073709551615");
        });
        let expected = Training {
            iterations: 7,
            clip: None,
            threads_per_rank: NonZeroUsize::new(3),
            traced: Some(0),
            seed: u64::MAX,
            ..Training::default()
        };
        assert_eq!(changed, Ok(expected));
    }
}
