//! User options of a run that are not part of the plan.

use crate::checkpoint::{Checkpoint, SaveOptions};
use crate::data::{DataSource, Federated};
use crate::error::ExecError;
use crate::hugging_face::Pretrained;
use crate::run::learning_rate::{BatchScaling, LrSchedule};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Device that computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// Cores of this machine.
    #[default]
    Cpu,
    /// GPU with this index. Requires a build with the feature `cuda`.
    Cuda(usize),
}

/// A GPU of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Name of the model.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
}

/// GPUs of this machine, or the reason why there are none to be used.
#[cfg(feature = "cuda")]
pub fn gpus() -> Result<Vec<Gpu>, ExecError> {
    let found = paceline_kernels::cuda::devices()
        .map_err(|error| ExecError::NoGpu { problem: error.to_string() })?;
    let gpu = |paceline_kernels::cuda::DeviceInfo { name, memory }| Gpu { name, memory };
    Ok(found.into_iter().map(gpu).collect())
}

/// GPUs of this machine, or the reason why there are none to be used.
#[cfg(not(feature = "cuda"))]
pub fn gpus() -> Result<Vec<Gpu>, ExecError> {
    Err(crate::device::no_cuda())
}

/// Training options. The plan defines how work is sharded; these set the run's length and learning.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Last iteration to run, counted from the very first: a resumed run has already completed
    /// those before its checkpoint.
    pub iterations: u32,
    /// Learning rate after warmup.
    pub lr: f64,
    /// Iterations over which the learning rate rises linearly to `lr`.
    pub warmup: u32,
    /// Learning-rate schedule after warmup, until the last iteration.
    pub schedule: LrSchedule,
    /// Final value of a decaying learning rate.
    pub min_lr: f64,
    /// Scaling of `lr` and `min_lr` with the global batch size; `None` leaves them unchanged.
    pub batch_scaling: Option<BatchScaling>,
    /// Weight decay coefficient, for tensors that decay.
    pub weight_decay: f64,
    /// Maximum gradient norm; a gradient with a larger norm is scaled down to it.
    pub clip: Option<f64>,
    /// Initial loss scale of an f16 run; from there it follows the gradients.
    pub loss_scale: f32,
    /// Number of compute threads per rank. Results are bitwise independent of it.
    pub threads_per_rank: NonZeroUsize,
    /// Seed of the initial weights, and of the text or its order.
    pub seed: u64,
    /// Training data.
    pub data: DataSource,
    /// Number of distinct samples, repeated in a cycle; `None` for all there are.
    pub distinct: Option<NonZeroU64>,
    /// Federated averaging: the samples are divided among the replicas of local SGD.
    pub federated: Option<Federated>,
    /// Initial weights of the run.
    pub start: Start,
    /// Checkpoint options, if the run is saved.
    pub save: Option<SaveOptions>,
    /// True if the final state is saved too, with `save`.
    pub save_at_end: bool,
    /// Set from outside to end the run after the current iteration.
    pub stop: Arc<AtomicBool>,
    /// Time without progress after which a blocked exchange fails.
    pub exchange_timeout: Duration,
    /// Device that computes.
    pub device: Device,
    /// Folder of the disk offload store.
    pub offload_folder: PathBuf,
    /// Number of final iterations in the trace, 0 for none; `None` picks a suitable number.
    pub traced: Option<u32>,
    /// True if the outcome includes the final weights, unsharded and by name.
    pub keep_parameters: bool,
    /// Rank that is slowed down on purpose.
    pub straggler: Option<Straggler>,
}

/// Rank whose computations take `factor` times as long: it sleeps after each of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// Rank to slow down.
    pub rank: u32,
    /// Slowdown factor, at least 1.
    pub factor: f64,
}

/// Starting point of a run.
#[derive(Clone, Debug, Default)]
pub enum Start {
    /// Random weights.
    #[default]
    Seed,
    /// Saved state of another run, of any layout.
    Checkpoint(Arc<Checkpoint>),
    /// Pretrained weights; the optimizer state starts from zero.
    Pretrained(Arc<Pretrained>),
}

impl Default for TrainOptions {
    fn default() -> Self {
        Self {
            iterations: 100,
            lr: 1e-3,
            warmup: 0,
            schedule: LrSchedule::Constant,
            min_lr: 0.0,
            batch_scaling: None,
            weight_decay: 0.0,
            clip: Some(1.0),
            loss_scale: 65536.0,
            threads_per_rank: NonZeroUsize::MIN,
            seed: 0,
            data: DataSource::Builtin,
            distinct: None,
            federated: None,
            start: Start::Seed,
            save: None,
            save_at_end: true,
            stop: Arc::default(),
            exchange_timeout: Duration::from_secs(60),
            device: Device::Cpu,
            offload_folder: std::env::temp_dir(),
            traced: None,
            keep_parameters: false,
            straggler: None,
        }
    }
}

impl TrainOptions {
    /// Rejects values with which nothing can be learnt.
    pub(crate) fn check(&self) -> Result<(), ExecError> {
        let sound = |x: f64| x.is_finite() && x >= 0.0;
        let refuse = |option, value: f64, works| {
            Err(ExecError::Option { option, value: value.to_string(), works })
        };
        if !sound(self.lr) {
            return refuse("--lr", self.lr, "a number from 0 on, such as 0.001");
        }
        if !sound(self.min_lr) {
            return refuse("--min-lr", self.min_lr, "a number from 0 on, such as 0.0001");
        }
        if !sound(self.weight_decay) {
            return refuse("--weight-decay", self.weight_decay, "a number from 0 on, such as 0.1");
        }
        if !(sound(f64::from(self.loss_scale)) && self.loss_scale >= 1.0) {
            let value = f64::from(self.loss_scale);
            return refuse("--loss-scale", value, "a number from 1 on, such as 65536");
        }
        if let Some(Straggler { factor, .. }) =
            self.straggler.filter(|slow| !(1.0..=1e6).contains(&slow.factor))
        {
            return refuse("--straggler", factor, "a rank and a factor from 1 on, such as 1:2");
        }
        match self.clip {
            Some(clip) if !(sound(clip) && clip > 0.0) => {
                refuse("--clip", clip, "a number above 0, such as 1, or leave it out")
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Learning rate of an iteration, counted from 0, with `batch` samples in its global batch.
    pub(crate) fn lr_at(&self, iteration: u32, batch: u64) -> f64 {
        let done = f64::from(iteration) + 1.0;
        let lr = if iteration < self.warmup {
            self.lr * done / f64::from(self.warmup)
        } else {
            let fall = f64::from(self.iterations.saturating_sub(self.warmup)).max(1.0);
            let progress = ((done - f64::from(self.warmup)) / fall).min(1.0);
            let lowest = self.min_lr.min(self.lr);
            match self.schedule {
                LrSchedule::Constant => self.lr,
                falling @ (LrSchedule::Linear | LrSchedule::Cosine) => {
                    lowest + (self.lr - lowest) * falling.left(progress)
                }
            }
        };
        lr * self.batch_scaling.map_or(1.0, |scaling| scaling.factor(batch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::learning_rate::ScalingRule;

    #[test]
    fn warmup_rises_linearly_and_then_stays() {
        let options = TrainOptions { lr: 0.8, warmup: 4, ..TrainOptions::default() };
        let rates: Vec<f64> = (0..6).map(|i| options.lr_at(i, 1)).collect();
        assert_eq!(rates, [0.2, 0.4, 0.6000000000000001, 0.8, 0.8, 0.8]);
        let options = TrainOptions { warmup: 0, ..options };
        assert_eq!(options.lr_at(0, 1), 0.8);
        assert_eq!(options.lr_at(u32::MAX, 1), 0.8);
    }

    #[test]
    fn it_falls_to_the_lowest_at_the_last_iteration_and_follows_the_batch() {
        let options = TrainOptions {
            iterations: 10,
            lr: 0.75,
            warmup: 2,
            schedule: LrSchedule::Linear,
            min_lr: 0.25,
            ..TrainOptions::default()
        };
        assert_eq!([0, 1, 5].map(|i| options.lr_at(i, 1)), [0.375, 0.75, 0.5]);
        for schedule in [LrSchedule::Linear, LrSchedule::Cosine] {
            let options = TrainOptions { schedule, ..options.clone() };
            assert!((options.lr_at(9, 1) - 0.25).abs() < 1e-15);
            assert_eq!(options.lr_at(u32::MAX, 1), options.lr_at(9, 1));
            let always = TrainOptions { iterations: 0, warmup: 0, ..options };
            assert!(always.lr_at(0, 1).is_finite());
        }
        let scaling = BatchScaling { base: 4, rule: ScalingRule::Sqrt };
        let options = TrainOptions { batch_scaling: Some(scaling), ..options };
        assert_eq!(options.lr_at(1, 16), 1.5);
    }

    #[test]
    fn absurd_numbers_are_refused_by_name() {
        let told = |options: TrainOptions| options.check().unwrap_err().to_string();
        let base = TrainOptions::default;
        for lr in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(told(TrainOptions { lr, ..base() }).starts_with("--lr is "));
        }
        assert!(told(TrainOptions { weight_decay: -0.1, ..base() }).contains("--weight-decay"));
        for loss_scale in [0.0, f32::NAN, -1.0] {
            assert!(told(TrainOptions { loss_scale, ..base() }).contains("--loss-scale"));
        }
        for clip in [0.0, f64::NAN, -1.0] {
            assert!(told(TrainOptions { clip: Some(clip), ..base() }).contains("--clip"));
        }
        assert!(base().check().is_ok());
    }
}
