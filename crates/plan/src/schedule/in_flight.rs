use super::{Action, Pass};
use crate::ids::Stage;

/// Result of a pass that other passes depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassOutput {
    /// Activations read by the backward pass.
    Activations,
    /// Gradient of the stage's input.
    InputGradient,
    /// Gradients of the stage's weights.
    WeightGradients,
}

impl Pass {
    /// Returns true if the pass produces this output. A full backward pass produces both gradients.
    pub const fn makes(self, made: PassOutput) -> bool {
        match made {
            PassOutput::Activations => matches!(self, Self::Forward),
            PassOutput::InputGradient => matches!(self, Self::Backward | Self::BackwardInput),
            PassOutput::WeightGradients => matches!(self, Self::Backward | Self::BackwardWeight),
        }
    }
}

/// Maximum number of microbatches in a rank's row for which `from` has been produced and `until`
/// has not. Both name a stage of the rank; they may differ.
///
/// From activations to weight gradients, this is the number of microbatches whose activations a
/// stage saves. From the input gradient to the weight gradients, it is the additional state of a
/// split backward pass.
pub fn in_flight(row: &[Action], from: (Stage, PassOutput), until: (Stage, PassOutput)) -> u32 {
    let is = |action: &Action, (stage, made): (Stage, PassOutput)| {
        action.stage == stage && action.pass.makes(made)
    };
    let (mut now, mut most) = (0u32, 0);
    for action in row {
        if is(action, from) {
            now += 1;
            most = now.max(most);
        }
        if is(action, until) {
            now = now.saturating_sub(1);
        }
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::grid::parse_csv;
    use crate::schedule::{ScheduleKind, order};

    /// Number of microbatches a stage holds between their forward pass and their last gradients.
    fn kept(row: &[Action], stage: u16) -> u32 {
        let stage = Stage(stage);
        in_flight(row, (stage, PassOutput::Activations), (stage, PassOutput::WeightGradients))
    }

    #[test]
    fn stages_keep_as_many_microbatches_as_published() {
        for ranks in 1..7u16 {
            for microbatches in 1..10 {
                let of = |kind| order(kind, ranks, microbatches).unwrap();
                let gpipe = of(ScheduleKind::GPipe);
                let one_f_one_b = of(ScheduleKind::OneFOneB);
                let zero_bubble = of(ScheduleKind::ZbH1 { chunks: 1 });
                for rank in 0..ranks {
                    let at = usize::from(rank);
                    assert_eq!(kept(&gpipe[at], rank), microbatches);
                    assert_eq!(
                        kept(&one_f_one_b[at], rank),
                        microbatches.min((ranks - rank).into())
                    );
                    // The same as the first rank of 1F1B, on every rank.
                    assert_eq!(kept(&zero_bubble[at], rank), microbatches.min(ranks.into()));
                }
            }
        }
    }

    /// Activations in deepseek-ai/DualPipe's table: one more than the number of stages, each of
    /// half a rank's layers.
    #[test]
    fn a_v_keeps_one_more_than_there_are_stages() {
        for ranks in 1..9u16 {
            for microbatches in u32::from(2 * ranks)..u32::from(2 * ranks) + 5 {
                let rows = order(ScheduleKind::DualPipeV, ranks, microbatches).unwrap();
                for (rank, row) in (0..ranks).zip(&rows) {
                    let both = kept(row, rank) + kept(row, 2 * ranks - 1 - rank);
                    assert!(both <= 2 * u32::from(ranks) + 1, "{rank} of {ranks}: {both}");
                }
            }
        }
    }

    #[test]
    fn every_chunk_is_counted_by_itself() {
        let rows = order(ScheduleKind::Interleaved { chunks: 2 }, 2, 4).unwrap();
        assert_eq!([kept(&rows[0], 0), kept(&rows[0], 2)], [4, 2]);
        assert_eq!([kept(&rows[1], 1), kept(&rows[1], 3)], [3, 1]);
        assert_eq!(kept(&rows[1], 0), 0);
    }

    #[test]
    fn a_split_backward_keeps_the_activations_until_the_weight_gradient() {
        let rows = parse_csv("0F0,0I0,0F1,0I1,0W0,0W1").unwrap();
        let row: Vec<Action> = rows[0].iter().flatten().copied().collect();
        assert_eq!(kept(&row, 0), 2);
        let stage = Stage(0);
        let until = |made| in_flight(&row, (stage, PassOutput::Activations), (stage, made));
        assert_eq!(until(PassOutput::InputGradient), 1);
        let beside = (stage, PassOutput::InputGradient);
        assert_eq!(in_flight(&row, beside, (stage, PassOutput::WeightGradients)), 2);
    }
}
