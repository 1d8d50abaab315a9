//! Results of a run.

use paceline_plan::staleness::Staleness;
use paceline_plan::trace::Trace;
use std::collections::BTreeMap;

/// Report of one iteration, delivered as soon as it is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IterationReport {
    /// Iteration number, counted from 1.
    pub iteration: u32,
    /// Mean loss per token, in nats.
    pub loss: f32,
    /// Loss of multi-token prediction, the mean over its modules; `None` for models without.
    pub mtp_loss: Option<f32>,
    /// Gradient norm before clipping.
    pub grad_norm: f32,
    /// Loss scale that kept gradients in the range of f16, in runs that use one.
    pub loss_scale: Option<f32>,
    /// True if the gradient overflowed that range nevertheless, so that no weight was changed.
    pub skipped: bool,
    /// Token-to-expert assignments, over all layers, dropped because the expert was full; `None`
    /// for models that cannot drop. Exact up to 2²⁴.
    pub dropped_tokens: Option<u64>,
    /// Duration in seconds, from the end of the previous iteration.
    pub seconds: f64,
    /// Tokens of the global batch per second.
    pub tokens_per_s: f64,
    /// Gradient staleness, where updates are applied asynchronously.
    pub staleness: Option<Staleness>,
}

/// Outcome of a completed run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// All iterations, in order.
    pub iterations: Vec<IterationReport>,
    /// Trace of every rank over the last few iterations.
    pub trace: Trace,
    /// Arena size of each rank.
    pub arena_bytes: Vec<u64>,
    /// Peak memory that each rank really used, where the system reports it.
    pub peak_bytes: Option<Vec<u64>>,
    /// Memory of each rank outside its arena: the copy of its state that checkpoints are written
    /// from.
    pub copy_bytes: Vec<u64>,
    /// Loss floor of this text, where it is known: no model can go below it.
    pub floor: Option<f64>,
    /// True if the run was ended from outside.
    pub stopped: bool,
    /// Final weights, if requested.
    pub parameters: Option<Parameters>,
}

/// Unsharded tensors by name, independent of any layout.
pub type Parameters = BTreeMap<String, Vec<f32>>;
