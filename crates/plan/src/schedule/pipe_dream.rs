use super::{Action, Pass, Row, ScheduleError, ScheduleKind, Versions};
use crate::ids::{Microbatch, Stage};

/// One PipeDream iteration, overlapping with its neighbours (Narayanan et al., SOSP 2019, section
/// 3.2). Forward and backward passes alternate; each forward pass is `ahead` microbatches ahead of
/// the backward pass. Over a whole run this is 1F1B's order.
pub(super) fn row(rank: u16, ahead: u32, microbatches: u32, row: &mut impl Row) {
    let stage = Stage(rank);
    for index in 0..microbatches {
        let microbatch = Microbatch(index.saturating_add(ahead));
        row.run(Action { stage, pass: Pass::Forward, microbatch });
        row.run(Action { stage, pass: Pass::Backward, microbatch: Microbatch(index) });
    }
}

/// Checks that an iteration may have this number of microbatches.
///
/// Weight stashing updates after every microbatch. With two versions, no microbatch may begin
/// before the batch before the last is done, so a batch must be at least as long as the pipeline.
pub(super) fn check(
    versions: Versions,
    ranks: u16,
    microbatches: u32,
) -> Result<(), ScheduleError> {
    let (fits, takes) = match versions {
        Versions::Stashed => (microbatches == 1, "one microbatch".to_owned()),
        Versions::Two => {
            (microbatches >= u32::from(ranks), format!("{ranks} microbatches or more"))
        }
    };
    if fits {
        return Ok(());
    }
    let schedule = ScheduleKind::PipeDream { versions }.to_string();
    Err(ScheduleError::Unflushed { schedule, ranks, microbatches, takes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{PassOutput, in_flight, order};

    #[test]
    fn iterations_in_a_row_are_one_forward_one_backward() {
        for (versions, microbatches) in [(Versions::Stashed, 1), (Versions::Two, 4)] {
            let kind = ScheduleKind::PipeDream { versions };
            let iterations = 12 / microbatches;
            let body = order(kind, 4, microbatches).unwrap();
            let long = order(ScheduleKind::OneFOneB, 4, 12).unwrap();
            for (rank, (body, long)) in (0u16..).zip(body.iter().zip(&long)) {
                let stage = Stage(rank);
                let forward = |k| Action { stage, pass: Pass::Forward, microbatch: Microbatch(k) };
                let ahead = kind.ahead(rank, 4);
                let mut run: Vec<Action> = (0..ahead).map(forward).collect();
                for iteration in 0..iterations {
                    run.extend(body.iter().map(|action| Action {
                        microbatch: Microbatch(action.microbatch.0 + iteration * microbatches),
                        ..*action
                    }));
                }
                // The run continues at the point where 1F1B drains.
                run.retain(|action| action.microbatch.0 < 12);
                assert_eq!(run, *long, "{kind}, rank {rank}");
                let kept = in_flight(
                    &run,
                    (stage, PassOutput::Activations),
                    (stage, PassOutput::InputGradient),
                );
                assert_eq!(kept, 4 - u32::from(rank), "as published");
            }
        }
    }

    #[test]
    fn batches_that_do_not_fit_are_refused() {
        let of = |text: &str, m| order(text.parse().unwrap(), 4, m);
        assert!(of("pipedream", 1).is_ok() && of("pipedream:2bw", 4).is_ok());
        let error = of("pipedream", 2).unwrap_err().to_string();
        assert!(error.contains("wants one microbatch per iteration; there are 2"), "{error}");
        let error = of("pipedream:2bw", 3).unwrap_err().to_string();
        assert!(error.contains("wants 4 microbatches or more"), "{error}");
    }
}
