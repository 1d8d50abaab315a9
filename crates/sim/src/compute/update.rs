//! From gradients to weights: the optimizer's step and the sums before it.

use super::Roofline;
use paceline_plan::program::{AccumulateMode, Bucket, Program, View};
use paceline_plan::units::Seconds;

impl Roofline<'_> {
    /// One optimizer step on this rank's part of a bucket: gradients are read, master weights and
    /// moments read and written, weights written (and read where they are their own master), and
    /// what the profile adds.
    pub fn step(&self, program: &Program, bucket: &Bucket, parts: u64) -> Seconds {
        if !bucket.updated {
            return Seconds::ZERO;
        }
        let size = |view: &View| program.buffer(view.buffer).dtype.size() as f64;
        let state = bucket.master.iter().chain(&bucket.moments);
        let weights = if bucket.master.is_some() { 1.0 } else { 2.0 };
        let per_element = size(&bucket.grads)
            + size(&bucket.params) * weights
            + state.map(|view| 2.0 * size(view)).sum::<f64>()
            + self.profile.update_bytes;
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

    /// What communication takes from computations beside it when it moves so many bytes through
    /// this device's memory.
    pub fn stolen(&self, bytes: f64) -> Seconds {
        Seconds(self.bytes(bytes))
    }
}
