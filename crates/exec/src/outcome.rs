//! What a run tells.

use crate::staleness::Staleness;
use paceline_plan::trace::Trace;
use std::collections::BTreeMap;

/// One iteration, as soon as it is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IterationReport {
    /// Which one, counted from 1.
    pub iteration: u32,
    /// The mean loss of its tokens, in nats.
    pub loss: f32,
    /// That of predictions of further tokens, the mean over the modules that make them; none for models
    /// without.
    pub further_loss: Option<f32>,
    /// The norm of the gradient, before clipping.
    pub grad_norm: f32,
    /// The factor of the loss that kept gradients in the range of f16, in runs that have one.
    pub loss_scale: Option<f32>,
    /// Whether its gradient left that range all the same, so that no weight was changed.
    pub skipped: bool,
    /// Choices of tokens, over all layers, whose expert had its fill; none for models in which that
    /// cannot happen. Exact up to 2²⁴.
    pub dropped: Option<u64>,
    /// How long it took, from the end of the one before.
    pub seconds: f64,
    /// Tokens of the global batch a second.
    pub tokens_per_s: f64,
    /// How stale gradients were, where servers apply them as they come.
    pub staleness: Option<Staleness>,
}

/// A run that came to its end.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// All iterations, in order.
    pub iterations: Vec<IterationReport>,
    /// When every rank did what, for the last few iterations.
    pub trace: Trace,
    /// The size of each rank's arena.
    pub arena_bytes: Vec<u64>,
    /// The most memory that each rank really used, where the system tells.
    pub peak_bytes: Option<Vec<u64>>,
    /// What each rank holds beside its arena: the copy of its state that checkpoints are written
    /// from.
    pub copy_bytes: Vec<u64>,
    /// The loss that no model can stay below on this text, where that is known.
    pub floor: Option<f64>,
    /// Whether the run was ended from outside.
    pub stopped: bool,
    /// The final weights, if they were asked for.
    pub parameters: Option<Parameters>,
}

/// Whole tensors by name, free of any layout.
pub type Parameters = BTreeMap<String, Vec<f32>>;
