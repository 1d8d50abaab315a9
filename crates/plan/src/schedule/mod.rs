//! Pipeline schedules as data: the passes and microbatches that each pipeline rank runs, in order.
//!
//! Nothing here sends or computes. [`order`] lists each rank's actions. [`grid`](grid::grid)
//! arranges them in time slots, for display and for comparison with other systems. [`bubble`]
//! computes the idle fraction of an ideal machine, and [`in_flight()`] the number of microbatches
//! whose activations or gradients are retained. The orders are those of PyTorch's
//! `torch.distributed.pipelining`; `tests/schedule_golden.rs` compares them with its output.
//!
//! Every order guarantees an invariant that the canonical summation order relies on: within a
//! virtual stage, the backwards that yield weight gradients run in increasing microbatch order.
//! Gradients therefore accumulate in place in data order, whatever the schedule.

mod action;
mod dry_run;
mod dual_pipe_v;
mod error;
mod gpipe;
pub mod grid;
mod in_flight;
mod interleaved;
mod kind;
mod one_f_one_b;
mod pipe_dream;
mod zero_bubble;

pub use action::{Action, ActionParseError, Pass};
pub use dry_run::{Bubble, DryRunError, Slots, bubble};
pub use error::ScheduleError;
pub use in_flight::{PassOutput, in_flight};
pub use kind::{ScheduleKind, Versions};

use crate::ids::StageRank;

/// Maximum number of actions of an order, over all ranks.
///
/// Far above any real pipeline: 128 ranks with 8 chunks and 4,096 microbatches need half of it. Low
/// enough that a mistyped number gives an error instead of exhausting memory.
pub const MAX_ACTIONS: u64 = 1 << 24;

/// Compute actions of each pipeline rank, in execution order.
///
/// [`ScheduleKind::rank_of`] gives the rank of a virtual stage. If iterations overlap, the order is
/// that of one iteration in steady state. The first forward passes were run
/// [`ahead`](ScheduleKind::ahead); microbatch numbers beyond the iteration belong to the next one.
pub fn order(
    kind: ScheduleKind,
    pipeline_ranks: u16,
    microbatches: u32,
) -> Result<Vec<Vec<Action>>, ScheduleError> {
    rows(kind, pipeline_ranks, microbatches)
}

/// Sink for one rank's row: the order drops idle slots, the grid keeps them.
trait Row: Default {
    /// Appends an action.
    fn run(&mut self, action: Action);
    /// Appends `slots` idle slots.
    fn idle(&mut self, slots: u64);
}

impl Row for Vec<Action> {
    fn run(&mut self, action: Action) {
        self.push(action);
    }

    fn idle(&mut self, _: u64) {}
}

/// Compute actions of one pipeline rank, in execution order; see [`order`].
pub fn row(
    kind: ScheduleKind,
    pipeline_ranks: u16,
    microbatches: u32,
    rank: StageRank,
) -> Result<Vec<Action>, ScheduleError> {
    let per_round = check(kind, pipeline_ranks, microbatches)?;
    Ok(row_of(kind, pipeline_ranks, (microbatches, per_round), rank.0))
}

/// Builds one row per rank. Arguments are checked here, so the schedules cannot fail.
fn rows<R: Row>(
    kind: ScheduleKind,
    ranks: u16,
    microbatches: u32,
) -> Result<Vec<R>, ScheduleError> {
    let per_round = check(kind, ranks, microbatches)?;
    Ok((0..ranks).map(|rank| row_of(kind, ranks, (microbatches, per_round), rank)).collect())
}

fn row_of<R: Row>(
    kind: ScheduleKind,
    ranks: u16,
    (microbatches, per_round): (u32, u32),
    rank: u16,
) -> R {
    let shape = |chunks| interleaved::InterleavedLayout { ranks, chunks, microbatches, per_round };
    let mut row = R::default();
    match kind {
        ScheduleKind::GPipe => gpipe::row(rank, ranks, microbatches, &mut row),
        ScheduleKind::OneFOneB => one_f_one_b::row(rank, ranks, microbatches, &mut row),
        ScheduleKind::Interleaved { chunks } => shape(chunks).row(rank, &mut row),
        ScheduleKind::ZbH1 { chunks } => zero_bubble::row(&shape(chunks), rank, &mut row),
        ScheduleKind::DualPipeV => dual_pipe_v::row(rank, ranks, microbatches, &mut row),
        ScheduleKind::PipeDream { .. } => {
            pipe_dream::row(rank, kind.ahead(rank, ranks), microbatches, &mut row);
        }
    }
    row
}

/// Checks that a schedule can run as many microbatches on as many ranks, and returns the number of
/// microbatches of a round.
pub fn check(kind: ScheduleKind, ranks: u16, microbatches: u32) -> Result<u32, ScheduleError> {
    check_sizes(kind, ranks, microbatches)?;
    match kind {
        // With one chunk any number works: the length of a round does not matter.
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::DualPipeV
        | ScheduleKind::PipeDream { .. }
        | ScheduleKind::ZbH1 { chunks: 1 } => Ok(microbatches),
        ScheduleKind::Interleaved { .. } | ScheduleKind::ZbH1 { .. } => {
            interleaved::per_round(ranks, microbatches)
        }
    }
}

fn check_sizes(kind: ScheduleKind, ranks: u16, microbatches: u32) -> Result<(), ScheduleError> {
    let chunks = kind.chunks();
    if chunks == 0 {
        return Err(ScheduleError::Chunks { given: kind.to_string() });
    }
    if ranks == 0 {
        return Err(ScheduleError::NoRanks);
    }
    if microbatches == 0 {
        return Err(ScheduleError::NoMicrobatches);
    }
    let stages = u64::from(ranks) * u64::from(chunks);
    if stages > u64::from(u16::MAX) + 1 {
        return Err(ScheduleError::TooManyStages { ranks, chunks });
    }
    let needed = u32::from(ranks) * 2;
    if kind == ScheduleKind::DualPipeV && microbatches < needed {
        let schedule = "dualpipev";
        return Err(ScheduleError::NotEnoughMicrobatches { schedule, ranks, microbatches, needed });
    }
    if let ScheduleKind::PipeDream { versions } = kind {
        pipe_dream::check(versions, ranks, microbatches)?;
    }
    // At most 2^16 stages, 2^32 microbatches and three passes: cannot overflow.
    let passes = if kind.splits_backward() { 3 } else { 2 };
    let actions = stages * u64::from(microbatches) * passes;
    if actions > MAX_ACTIONS {
        return Err(ScheduleError::TooLarge {
            what: "actions",
            count: actions,
            limit: MAX_ACTIONS,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Microbatch;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Every schedule that flushes, including fewer microbatches than ranks and counts that only
    /// some schedules accept.
    fn any_schedule() -> impl Strategy<Value = (ScheduleKind, u16, u32)> {
        let kind = prop_oneof![
            Just(ScheduleKind::GPipe),
            Just(ScheduleKind::OneFOneB),
            (1u16..5).prop_map(|chunks| ScheduleKind::Interleaved { chunks }),
            (1u16..5).prop_map(|chunks| ScheduleKind::ZbH1 { chunks }),
            Just(ScheduleKind::DualPipeV),
        ];
        (kind, 1u16..10, 1u32..25)
    }

    fn text(order: &[Vec<Action>]) -> Vec<String> {
        let line =
            |row: &Vec<Action>| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        order.iter().map(line).collect()
    }

    #[test]
    fn one_f_one_b_reads_as_in_the_paper() {
        assert_eq!(
            text(&order(ScheduleKind::OneFOneB, 3, 4).unwrap()),
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ]
        );
    }

    #[test]
    fn one_f_one_b_takes_fewer_microbatches_than_ranks() {
        assert_eq!(
            text(&order(ScheduleKind::OneFOneB, 3, 2).unwrap()),
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"]
        );
    }

    #[test]
    fn absurd_sizes_are_refused_without_work() {
        let deep = ScheduleKind::Interleaved { chunks: u16::MAX };
        assert_eq!(order(ScheduleKind::GPipe, 0, 4), Err(ScheduleError::NoRanks));
        assert_eq!(order(ScheduleKind::GPipe, 4, 0), Err(ScheduleError::NoMicrobatches));
        assert_eq!(
            order(deep, 2, 4),
            Err(ScheduleError::TooManyStages { ranks: 2, chunks: u16::MAX })
        );
        assert!(matches!(
            order(ScheduleKind::OneFOneB, u16::MAX, u32::MAX),
            Err(ScheduleError::TooLarge { .. })
        ));
        assert!(matches!(
            order(ScheduleKind::Interleaved { chunks: 0 }, 2, 4),
            Err(ScheduleError::Chunks { .. })
        ));
        assert!(order(deep, 1, 128).is_ok());
    }

    #[test]
    fn zero_bubble_reads_as_in_the_paper() {
        assert_eq!(
            text(&order(ScheduleKind::ZbH1 { chunks: 1 }, 3, 4).unwrap()),
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
                "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
            ]
        );
    }

    #[test]
    fn a_v_needs_two_microbatches_for_each_rank() {
        let error = order(ScheduleKind::DualPipeV, 4, 7).unwrap_err();
        assert!(error.to_string().contains("at least 8 microbatches"), "{error}");
        assert!(order(ScheduleKind::DualPipeV, 4, 8).is_ok());
    }

    proptest! {
        /// Each rank runs each of its stages' passes once per microbatch, and nothing else.
        #[test]
        fn every_pass_runs_once_on_its_rank((kind, ranks, microbatches) in any_schedule()) {
            let Ok(order) = order(kind, ranks, microbatches) else {
                let interleaved =
                    matches!(kind, ScheduleKind::Interleaved { .. } | ScheduleKind::ZbH1 { chunks: 2.. });
                let short = kind == ScheduleKind::DualPipeV && microbatches < 2 * u32::from(ranks);
                prop_assert!(interleaved || short, "{} refused", kind);
                return Ok(());
            };
            prop_assert_eq!(order.len(), usize::from(ranks));
            let mut seen = BTreeSet::new();
            for (rank, row) in order.iter().enumerate() {
                for action in row {
                    prop_assert_eq!(kind.rank_of(action.stage, ranks).index(), rank);
                    prop_assert!(action.stage.0 < kind.chunks() * ranks);
                    prop_assert!(action.microbatch.0 < microbatches);
                    prop_assert!(kind.passes().contains(&action.pass));
                    for made in [PassOutput::Activations, PassOutput::InputGradient, PassOutput::WeightGradients] {
                        let at = (action.stage, action.microbatch, made);
                        prop_assert!(!action.pass.makes(made) || seen.insert(at), "{} twice", action);
                    }
                }
            }
            let stages = usize::from(kind.chunks() * ranks);
            prop_assert_eq!(seen.len(), stages * microbatches as usize * 3);
        }

        /// The canonical summation order relies on this: gradients of a stage arrive in data order.
        #[test]
        fn passes_of_a_stage_come_in_data_order((kind, ranks, microbatches) in any_schedule()) {
            for row in order(kind, ranks, microbatches).unwrap_or_default() {
                for made in [PassOutput::Activations, PassOutput::InputGradient, PassOutput::WeightGradients] {
                    for stage in row.iter().map(|action| action.stage).collect::<BTreeSet<_>>() {
                        let seen: Vec<Microbatch> = row
                            .iter()
                            .filter(|action| action.stage == stage && action.pass.makes(made))
                            .map(|action| action.microbatch)
                            .collect();
                        let expected: Vec<_> = (0..microbatches).map(Microbatch).collect();
                        prop_assert_eq!(seen, expected);
                    }
                }
            }
        }

        /// No order deadlocks, whatever the counts.
        #[test]
        fn every_order_can_run((kind, ranks, microbatches) in any_schedule()) {
            if let Ok(order) = order(kind, ranks, microbatches) {
                prop_assert!(bubble(&order, Slots::new(1, 2)).is_ok());
            }
        }
    }
}
