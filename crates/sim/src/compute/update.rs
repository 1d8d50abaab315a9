//! Weight update: the optimizer step and the accumulation before it.

use super::Roofline;
use paceline_plan::program::{AccumulateMode, Bucket, Program, StepPhase, View};
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, Seconds};

impl Roofline<'_> {
    /// Time of one optimizer step on this rank's shard of a bucket. Gradients are read, master
    /// weights and moments are read and written, weights are written (and read if they are their
    /// own master); the profile may add bytes. If tensor norms are computed first, that phase reads
    /// gradients and weights and updates the moments, and the step itself only reads the moments.
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
        let per_element = match (phase, bucket.tensor_norms) {
            (StepPhase::Apply, None) => grads + changed + 2.0 * moments + self.profile.update_bytes,
            (StepPhase::TensorNorms, _) => grads + size(&master) + 2.0 * moments,
            (StepPhase::LocalMomentum, _) => 2.0 * grads + 0.5 * moments,
            // The first moment is written but not read.
            (StepPhase::ApplyMomentum, _) => {
                grads + changed + 1.5 * moments + self.profile.update_bytes
            }
            (StepPhase::Apply, Some(_)) => moments + changed + self.profile.update_bytes,
        };
        let elements = (bucket.elements / parts.max(1)) as f64;
        Seconds(self.streaming(elements * per_element).device)
    }

    /// Time of an element-wise sum or copy of a view.
    pub fn accumulate(&self, program: &Program, view: &View, mode: AccumulateMode) -> Seconds {
        let touched = match mode {
            AccumulateMode::Add => 3.0,
            AccumulateMode::Move => 2.0,
        };
        let bytes = view.len as f64 * program.buffer(view.buffer).dtype.size() as f64;
        Seconds(self.streaming(bytes * touched).device)
    }

    /// Time of a copy to or from the store; `simulate` has checked that its bandwidth is known.
    pub fn offload(&self, store: Store, bytes: Bytes) -> Seconds {
        let rate = self.device.store(store).unwrap_or(self.device.memory_bandwidth);
        Seconds(self.device.launch_overhead.0 + bytes.as_f64() / rate.0)
    }

    /// Time that communication takes from concurrent compute by moving `bytes` through this
    /// device's memory.
    pub fn stolen(&self, bytes: f64) -> Seconds {
        Seconds(self.bytes(bytes))
    }
}
