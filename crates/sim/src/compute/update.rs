//! From gradients to weights: the optimizer's step and the sums before it.

use super::Roofline;
use paceline_plan::program::{AccumulateMode, Bucket, Program, StepPhase, View};
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, Seconds};

impl Roofline<'_> {
    /// One optimizer step on this rank's part of a bucket: gradients are read, master weights and
    /// moments read and written, weights written (and read where they are their own master), and
    /// what the profile adds. Where tensors are gauged first, that reads gradients and weights and
    /// changes the moments, and the step proper only reads those.
    pub fn step(
        &self,
        program: &Program,
        bucket: &Bucket,
        phase: StepPhase,
        parts: u64,
    ) -> Seconds {
        if !bucket.updated {
            return Seconds::ZERO;
        }
        let size = |view: &View| program.buffer(view.buffer).dtype.size() as f64;
        let sum = |views: &[View]| views.iter().map(size).sum::<f64>();
        let (grads, moments) = (size(&bucket.grads), sum(&bucket.moments));
        let master = bucket.master.unwrap_or(bucket.params);
        let rounded = if bucket.master.is_some() { size(&bucket.params) } else { 0.0 };
        let changed = 2.0 * size(&master) + rounded;
        let per_element = match (phase, bucket.gauge) {
            (StepPhase::Apply, None) => grads + changed + 2.0 * moments + self.profile.update_bytes,
            (StepPhase::Gauge, _) => grads + size(&master) + 2.0 * moments,
            (StepPhase::Share, _) => 2.0 * grads + 0.5 * moments,
            // The first moment is written and not read.
            (StepPhase::Follow, _) => grads + changed + 1.5 * moments + self.profile.update_bytes,
            (StepPhase::Apply, Some(_)) => moments + changed + self.profile.update_bytes,
        };
        let elements = (bucket.elements / parts.max(1)) as f64;
        Seconds(self.streaming(elements * per_element).device)
    }

    /// An element-wise sum or copy of a view.
    pub fn accumulate(&self, program: &Program, view: &View, mode: AccumulateMode) -> Seconds {
        let touched = match mode {
            AccumulateMode::Add => 3.0,
            AccumulateMode::Move => 2.0,
        };
        let bytes = view.len as f64 * program.buffer(view.buffer).dtype.size() as f64;
        Seconds(self.streaming(bytes * touched).device)
    }

    /// A copy to or from the store; `simulate` has seen to it that its rate is known.
    pub fn offload(&self, store: Store, bytes: Bytes) -> Seconds {
        let rate = self.device.store(store).unwrap_or(self.device.memory_bandwidth);
        Seconds(self.device.launch_overhead.0 + bytes.as_f64() / rate.0)
    }

    /// What communication takes from computations beside it when it moves so many bytes through
    /// this device's memory.
    pub fn stolen(&self, bytes: f64) -> Seconds {
        Seconds(self.bytes(bytes))
    }
}
