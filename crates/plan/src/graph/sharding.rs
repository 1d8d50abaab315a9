//! Sharding rules: placements of an operator's operands along the tensor-parallel axis (Shoeybi et
//! al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198).

use super::OpPass;
use super::attributes::LinearRole;
use crate::spec::Placement as P;

/// Sharding rule of an operator. The *stream* is the residual stream: sharded by token under
/// sequence parallelism, replicated otherwise.
#[derive(Clone, Copy)]
pub(crate) enum Sharding {
    /// Every rank computes all of it.
    Replicated,
    /// Like the stream. Under sequence parallelism, parameter gradients are partial sums: they
    /// cover a rank's own tokens.
    Stream,
    /// By width: each rank has its own heads or columns.
    Width,
    /// By width, its parameters too.
    WidthWithParams,
    /// By width, with parameters that all ranks hold: a rank's gradient covers its own heads only.
    WidthWithPartialGradients,
    /// By width if an input is, as between GEMMs; else like the stream.
    LikeInput,
    /// A routing decision: on whole sequences, for a rank's own tokens.
    Routed,
    /// A placement for every operand.
    Forms(Forms),
}

/// Placements of all operands.
#[derive(Clone, Copy)]
pub(crate) struct Forms {
    forward: Form,
    input: Form,
    weight: Form,
    pub(crate) params: Option<P>,
}

/// Placements of inputs and outputs.
type Form = (&'static [P], &'static [P]);

impl Forms {
    pub(crate) const fn of(&self, pass: OpPass) -> Form {
        match pass {
            OpPass::Forward => self.forward,
            OpPass::BackwardInput => self.input,
            OpPass::BackwardWeight => self.weight,
        }
    }
}

const fn forms(forward: Form, input: Form, weight: Form, params: Option<P>) -> Sharding {
    Sharding::Forms(Forms { forward, input, weight, params })
}

const NONE: Form = (&[], &[]);

/// A table whose rows are sharded: a rank finds only its own, and the others' are zero.
pub(super) const VOCABULARY: Sharding =
    forms((&[P::Replicate], &[P::SUM]), NONE, (&[P::Replicate, P::Replicate], &[]), Some(P::ROWS));

/// A matrix sharded by outputs.
const COLUMN_PARALLEL: Sharding = forms(
    (&[P::Replicate], &[P::WIDTH]),
    (&[P::WIDTH], &[P::SUM]),
    (&[P::WIDTH, P::Replicate], &[]),
    Some(P::ROWS),
);

/// A matrix sharded by inputs.
const ROW_PARALLEL: Sharding = forms(
    (&[P::WIDTH], &[P::SUM]),
    (&[P::Replicate], &[P::WIDTH]),
    (&[P::Replicate, P::WIDTH], &[]),
    Some(P::WIDTH),
);

/// The maximum of a rank's own logits.
pub(super) const ROW_MAX: Sharding = forms((&[P::WIDTH], &[P::MAX]), NONE, NONE, None);

/// Sums over a rank's own logits.
pub(super) const SOFTMAX_STATS: Sharding =
    forms((&[P::WIDTH, P::Replicate, P::Replicate], &[P::SUM]), NONE, NONE, None);

/// The vocabulary-parallel loss.
pub(super) const CROSS_ENTROPY: Sharding = {
    const READS: &[P] = &[P::Replicate, P::WIDTH, P::Replicate, P::Replicate];
    forms((READS, &[P::Replicate]), (READS, &[P::WIDTH]), NONE, None)
};

/// Heads from latent vectors; all heads share the rotated keys.
pub(super) const LATENT_HEADS: Sharding = forms(
    (&[P::WIDTH, P::WIDTH, P::Replicate], &[P::WIDTH]),
    (&[P::WIDTH], &[P::WIDTH, P::WIDTH, P::SUM]),
    NONE,
    None,
);

/// Sums of squares over a rank's own heads.
pub(super) const WHOLE_SQUARES: Sharding =
    forms((&[P::WIDTH], &[P::SUM]), (&[P::Replicate, P::WIDTH], &[P::WIDTH]), NONE, None);

/// A norm by sums over all heads, whose gradient is a sum over them too.
pub(super) const WHOLE_NORM: Sharding = forms(
    (&[P::WIDTH, P::Replicate], &[P::WIDTH]),
    (&[P::WIDTH, P::WIDTH, P::Replicate], &[P::WIDTH, P::SUM]),
    (&[P::WIDTH, P::WIDTH, P::Replicate], &[]),
    Some(P::WIDTH),
);

/// Rule of a linear operator, by the role of its matrix.
pub(super) const fn linear(role: LinearRole) -> Sharding {
    match role {
        LinearRole::Qkv | LinearRole::Up | LinearRole::Head => COLUMN_PARALLEL,
        LinearRole::AttentionOut | LinearRole::Down => ROW_PARALLEL,
        LinearRole::Router | LinearRole::Latent | LinearRole::Join => Sharding::Stream,
    }
}
