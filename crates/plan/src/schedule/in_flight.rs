use super::{Action, Pass};
use crate::ids::Stage;

/// What a pass leaves behind, and others wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Made {
    /// What the backward pass reads.
    Activations,
    /// The gradient for the stage's input.
    InputGradient,
    /// The gradients for the stage's weights.
    WeightGradients,
}

impl Pass {
    /// Whether a pass makes this. A whole backward pass makes both gradients.
    pub const fn makes(self, made: Made) -> bool {
        match made {
            Made::Activations => matches!(self, Self::Forward),
            Made::InputGradient => matches!(self, Self::Backward | Self::BackwardInput),
            Made::WeightGradients => matches!(self, Self::Backward | Self::BackwardWeight),
        }
    }
}

/// The most microbatches of a rank's row for which the first has been made on its stage and the
/// second, on the same stage or on another of the rank, has not.
///
/// From activations to weights' gradients it is what a stage keeps of all that the backward pass
/// reads; from the input's gradient to the weights' what a split backward pass keeps beside.
pub fn in_flight(row: &[Action], from: (Stage, Made), until: (Stage, Made)) -> u32 {
    let is = |action: &Action, (stage, made): (Stage, Made)| {
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

    /// What a stage keeps of each microbatch from its forward pass to its last gradients.
    fn kept(row: &[Action], stage: u16) -> u32 {
        let stage = Stage(stage);
        in_flight(row, (stage, Made::Activations), (stage, Made::WeightGradients))
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
                    // As the first rank of 1F1B, wherever the rank stands.
                    assert_eq!(kept(&zero_bubble[at], rank), microbatches.min(ranks.into()));
                }
            }
        }
    }

    /// The activations of deepseek-ai/DualPipe's table: one more than there are stages, of half a
    /// rank's layers each.
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
        let until = |made| in_flight(&row, (stage, Made::Activations), (stage, made));
        assert_eq!(until(Made::InputGradient), 1);
        let beside = (stage, Made::InputGradient);
        assert_eq!(in_flight(&row, beside, (stage, Made::WeightGradients)), 2);
    }
}
