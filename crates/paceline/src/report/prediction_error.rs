//! Error attribution of a prediction, as text.

use super::numbers::{Scale, percent_of};
use super::timeline::words;
use paceline_plan::trace::{Cause, Class, ErrorAttribution, ErrorTerm, Tally, Trace};
use paceline_plan::units::Seconds;

/// Summary of a prediction's error against a measurement.
pub(crate) struct ErrorSummary {
    /// Size of the error, and the parts of an iteration that cause it.
    pub summary: Vec<String>,
    /// The ops that cause it, one per line, most important first.
    pub lines: Vec<String>,
}

/// Maximum number of named ops; the rest is one line.
const LINES: usize = 6;
/// An op with an error below this share of the iteration is not listed.
const WORTH: f64 = 0.005;
/// A part of an iteration with an error below this share counts as predicted.
const NOISE: f64 = 0.0005;
/// An iteration with an error below this share is not attributed: the errors of its parts cancel.
const RIGHT: f64 = 0.01;

/// Compares two traces; `None` if they have nothing in common.
pub(crate) fn error_summary(
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> Option<ErrorSummary> {
    let misses = paceline_plan::trace::attribute_error(simulated?, measured?)?;
    let ErrorAttribution { iteration, parts } = &misses;
    let whole = iteration.measured;
    let scale = Scale::of(iteration.simulated.max(whole));
    let error = iteration.error()?;
    let right = error.abs() < RIGHT;
    // Share of the error, or of the iteration if there is no error.
    let share = |tally: &Tally| {
        let (of, what) = match right {
            true => (whole, "the iteration"),
            false => (iteration.difference(), "the miss"),
        };
        let part = if right { tally.difference().0.abs() } else { tally.difference().0 };
        format!("{} of {what}", percent_of(part, of.0))
    };

    let mut summary = vec![match right {
        true => format!(
            "The iteration was predicted to {}; where its parts are off, they cancel.",
            percent_of(error.abs(), 1.0)
        ),
        false => format!(
            "The prediction is {} too {}, which is {} of the iteration.",
            scale.full(Seconds(iteration.difference().0.abs())),
            if error < 0.0 { "short" } else { "long" },
            percent_of(error.abs(), 1.0)
        ),
    }];
    let classes = [
        (Class::Compute, "computation"),
        (Class::Exposed, "exposed communication"),
        (Class::Waiting, "waiting"),
    ];
    let mut told: Vec<(Tally, &str)> =
        classes.iter().map(|(class, name)| (misses.of(*class), *name)).collect();
    told.sort_by(|a, b| size(&b.0).total_cmp(&size(&a.0)));
    let told: Vec<String> = told
        .iter()
        .map(|(tally, name)| match size(tally) >= NOISE * whole.0 {
            true => format!("{name} {} ({})", off(tally, &scale), share(tally)),
            false => format!("{name} as predicted"),
        })
        .collect();
    summary.push(format!("On the mean rank: {}.", told.join(", ")));

    let ops = || parts.iter().filter(|part| part.cause != Cause::Waiting);
    let worth = |part: &&ErrorTerm| size(&part.tally) >= WORTH * whole.0;
    let mut lines: Vec<String> = ops()
        .filter(worth)
        .take(LINES)
        .map(|ErrorTerm { cause, tally }| {
            let times = format!(
                "{} predicted, {} measured",
                scale.full(tally.simulated),
                scale.full(tally.measured)
            );
            format!("{}: {times}, {}", named(cause), share(tally))
        })
        .collect();
    let named = lines.len();
    if named > 0 && ops().count() > named {
        let mut rest = Tally::default();
        for part in ops().skip(named) {
            rest.simulated += part.tally.simulated;
            rest.measured += part.tally.measured;
        }
        lines.push(format!("all other ops: {}, {}", off(&rest, &scale), share(&rest)));
    }
    Some(ErrorSummary { summary, lines })
}

fn size(tally: &Tally) -> f64 {
    tally.difference().0.abs()
}

/// Formats a difference as text.
fn off(tally: &Tally, scale: &Scale) -> String {
    let by = scale.full(Seconds(size(tally)));
    format!("{by} too {}", if tally.difference().0 < 0.0 { "short" } else { "long" })
}

/// Names a cause of spent time.
fn named(cause: &Cause) -> String {
    match cause {
        Cause::Ops { name, kind } if kind.is_communication() => {
            format!("{name} ({}, as far as exposed)", words(*kind))
        }
        Cause::Ops { name, kind } => format!("{name} ({})", words(*kind)),
        Cause::Waiting => "waiting".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::small;
    use paceline_plan::trace::Origin;

    #[test]
    fn the_words_name_ops_sizes_and_shares() {
        let simulated = small(Origin::Simulated, 2, 0.4e-3);
        let mut measured = small(Origin::Measured, 2, 0.6e-3);
        // The measured iterations are a tenth longer, all of it at their end.
        for span in &mut measured.spans {
            let later = Seconds(1e-4 * f64::from(span.iteration));
            (span.start, span.end) = (span.start + later, span.end + later);
        }
        let ErrorSummary { summary, lines } =
            error_summary(Some(&simulated), Some(&measured)).unwrap();
        assert_eq!(
            summary[0],
            "The prediction is 0.100 ms too short, which is 9.1 % of the iteration."
        );
        assert_eq!(
            summary[1],
            "On the mean rank: computation 0.200 ms too short (200.0 % of the miss), exposed \
             communication 0.100 ms too long (−100.0 % of the miss), waiting as predicted."
        );
        assert_eq!(
            lines,
            [
                "F<0> (forward): 0.400 ms predicted, 0.600 ms measured, 200.0 % of the miss",
                "all_reduce (collective, as far as exposed): 0.400 ms predicted, 0.300 ms \
                 measured, −100.0 % of the miss",
            ]
        );
    }

    #[test]
    fn a_prediction_that_is_right_says_so() {
        let trace = small(Origin::Simulated, 2, 0.4e-3);
        let ErrorSummary { summary, lines } = error_summary(Some(&trace), Some(&trace)).unwrap();
        assert!(summary[0].starts_with("The iteration was predicted to 0.0 %"), "{summary:?}");
        assert!(lines.is_empty(), "{lines:?}");
        assert!(error_summary(None, Some(&trace)).is_none());
    }
}
