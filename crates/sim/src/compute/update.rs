//! Weight update: the optimizer step and the accumulation before it.

use super::Roofline;
use paceline_plan::program::{AccumulateMode, Bucket, Program, StepPhase, View};
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, Seconds};

/// Bytes of one parameter's state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateSizes {
    /// Its gradient.
    pub(crate) grads: f64,
    /// The weight that layers read.
    pub(crate) params: f64,
    /// The master weight, if it is another.
    pub(crate) master: Option<f64>,
    /// All moments.
    pub(crate) moments: f64,
}

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
        let state = StateSizes {
            grads: size(&bucket.grads),
            params: size(&bucket.params),
            master: bucket.master.as_ref().map(size),
            moments: bucket.moments.iter().map(size).sum(),
        };
        self.update(bucket.elements / parts.max(1), &state, phase, bucket.tensor_norms.is_some())
    }

    /// Time of a phase of the optimizer step on `elements` elements; `norms` is true if tensor norms
    /// are computed first.
    pub(crate) fn update(
        &self,
        elements: u64,
        state: &StateSizes,
        phase: StepPhase,
        norms: bool,
    ) -> Seconds {
        let StateSizes { grads, params, master, moments } = *state;
        let rounded = if master.is_some() { params } else { 0.0 };
        let master = master.unwrap_or(params);
        let changed = 2.0 * master + rounded;
        let per_element = match (phase, norms) {
            (StepPhase::Apply, false) => {
                grads + changed + 2.0 * moments + self.profile.update_bytes
            }
            (StepPhase::TensorNorms, _) => grads + master + 2.0 * moments,
            (StepPhase::LocalMomentum, _) => 2.0 * grads + 0.5 * moments,
            // The first moment is written but not read.
            (StepPhase::ApplyMomentum, _) => {
                grads + changed + 1.5 * moments + self.profile.update_bytes
            }
            (StepPhase::Apply, true) => moments + changed + self.profile.update_bytes,
        };
        Seconds(self.streaming(elements as f64 * per_element).device)
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
