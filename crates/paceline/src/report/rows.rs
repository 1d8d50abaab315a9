//! Rows of a breakdown table.

use paceline_plan::ids::Rank;
use paceline_plan::trace::{Breakdown, RankComparison, Trace, compare_ranks};
use paceline_plan::units::Seconds;

/// A row of a breakdown table.
pub(super) enum Row {
    /// One rank.
    Rank(Rank, Pair),
    /// Number of ranks left out here.
    Elided(usize),
    /// The mean over all ranks, including those left out.
    Mean(Pair),
}

/// The prediction and the measurement, if present.
#[derive(Clone, Copy, Default)]
pub(super) struct Pair {
    pub simulated: Option<Breakdown>,
    pub measured: Option<Breakdown>,
}

impl Pair {
    /// One part of both, as `(predicted, measured)`.
    pub(super) fn part(&self, part: &Column) -> (Option<Seconds>, Option<Seconds>) {
        (self.simulated.as_ref().map(part.of), self.measured.as_ref().map(part.of))
    }

    /// Prediction error of one part, as a share of the measured iteration. The errors of compute,
    /// exposed communication and bubble thus sum to the error of the iteration.
    pub(super) fn error(&self, part: &Column) -> Option<f64> {
        let (predicted, measured) = (self.simulated.as_ref()?, self.measured.as_ref()?);
        let off = (part.of)(predicted) - (part.of)(measured);
        (measured.total.0 > 0.0).then(|| off.0 / measured.total.0)
    }
}

/// A column of a breakdown.
pub(super) struct Column {
    pub title: &'static str,
    of: fn(&Breakdown) -> Seconds,
}

/// The columns in display order.
pub(super) const PARTS: [Column; 4] = [
    Column { title: "compute", of: |b| b.compute },
    Column { title: "communication", of: |b| b.communication },
    Column { title: "exposed", of: |b| b.exposed_communication },
    Column { title: "bubble", of: |b| b.idle },
];

/// One row per rank of a trace; beyond `limit`, only the first and the last ones.
pub(super) fn rows(simulated: Option<&Trace>, measured: Option<&Trace>, limit: usize) -> Vec<Row> {
    let ranks = compare_ranks(simulated, measured);
    let row = |r: &RankComparison| {
        Row::Rank(r.rank, Pair { simulated: r.simulated, measured: r.measured })
    };
    let mut rows: Vec<Row> = if ranks.len() <= limit {
        ranks.iter().map(row).collect()
    } else {
        let (head, tail) = (limit.div_ceil(2), ranks.len() - limit / 2);
        let elided = Row::Elided(tail - head);
        ranks[..head].iter().map(row).chain([elided]).chain(ranks[tail..].iter().map(row)).collect()
    };
    if ranks.len() > 1 {
        rows.push(Row::Mean(mean(&ranks)));
    }
    rows
}

/// The mean of each trace; with two traces, over their common ranks, to be comparable.
fn mean(ranks: &[RankComparison]) -> Pair {
    let both = ranks.iter().any(|r| r.simulated.is_some() && r.measured.is_some());
    let of = |side: fn(&RankComparison) -> Option<Breakdown>| {
        let counted =
            ranks.iter().filter(|r| !both || r.simulated.is_some() && r.measured.is_some());
        let all: Vec<Breakdown> = counted.filter_map(side).collect();
        let mean = |part: fn(&Breakdown) -> Seconds| {
            all.iter().map(part).sum::<Seconds>() * (1.0 / all.len() as f64)
        };
        (!all.is_empty()).then(|| Breakdown {
            total: mean(|b| b.total),
            compute: mean(|b| b.compute),
            communication: mean(|b| b.communication),
            exposed_communication: mean(|b| b.exposed_communication),
            idle: mean(|b| b.idle),
        })
    };
    Pair { simulated: of(|r| r.simulated), measured: of(|r| r.measured) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::small;
    use paceline_plan::trace::Origin;

    fn shape(rows: &[Row]) -> Vec<String> {
        rows.iter()
            .map(|row| match row {
                Row::Rank(rank, _) => rank.to_string(),
                Row::Elided(n) => format!("+{n}"),
                Row::Mean(_) => "mean".to_owned(),
            })
            .collect()
    }

    #[test]
    fn many_ranks_are_elided_in_the_middle() {
        let trace = small(Origin::Measured, 9, 1e-4);
        assert_eq!(shape(&rows(None, Some(&trace), 4)), ["0", "1", "+5", "7", "8", "mean"]);
        assert_eq!(shape(&rows(None, Some(&trace), 9)).len(), 10);
        assert_eq!(shape(&rows(None, None, 4)).len(), 0);
    }

    #[test]
    fn the_mean_is_over_ranks_that_both_hold_and_errors_sum() {
        let simulated = small(Origin::Simulated, 1, 2e-4);
        let mut measured = small(Origin::Measured, 2, 4e-4);
        for span in measured.spans.iter_mut().filter(|s| s.rank == Rank(1)) {
            span.end = span.start;
        }
        let rows = rows(Some(&simulated), Some(&measured), 16);
        let Some(Row::Mean(pair)) = rows.last() else { panic!("no mean") };
        let (predicted, seen) = pair.part(&PARTS[0]);
        assert!((predicted.unwrap().0 - 2e-4).abs() < 1e-12);
        assert!((seen.unwrap().0 - 4e-4).abs() < 1e-12);
        let sum: f64 = [0, 2, 3].map(|i| pair.error(&PARTS[i]).unwrap()).iter().sum();
        assert!(sum.abs() < 1e-9, "iterations are equally long, so the errors cancel: {sum}");
        assert!((pair.error(&PARTS[0]).unwrap() + 0.2).abs() < 1e-9);
    }
}
