//! Chart of the strategies found: time against memory, with the Pareto front.

use crate::plot::{Along, Chart, Number, Series, Unit};
use paceline_search::Candidate;

/// The chart: all strategies by memory, and those that no other beats in both time and memory.
pub(super) fn chart(title: String, candidates: &[Candidate]) -> Chart {
    let mut all: Vec<&Candidate> = candidates.iter().collect();
    all.sort_by(|a, b| {
        let by_time = a.iteration.0.total_cmp(&b.iteration.0);
        a.fit.needed.cmp(&b.fit.needed).then(by_time)
    });
    let mut best = f64::INFINITY;
    let front: Vec<Option<f64>> = all
        .iter()
        .map(|candidate| {
            let time = candidate.iteration.0;
            let beats = time < best;
            best = best.min(time);
            beats.then_some(time)
        })
        .collect();
    let series = |name: &str, dash: usize, values: Vec<Option<f64>>| Series {
        name: name.to_owned(),
        colour: dash,
        dash,
        values,
    };
    let times = all.iter().map(|candidate| Some(candidate.iteration.0)).collect();
    Chart {
        title: Some(title),
        x: Along::Numbers(
            all.iter()
                .map(|candidate| Number { value: candidate.fit.needed.as_f64(), unit: Unit::Size })
                .collect(),
        ),
        x_label: "memory of the fullest rank".to_owned(),
        y_label: "iteration".to_owned(),
        unit: Unit::Time,
        series: vec![series("strategies", 1, times), series("Pareto front", 0, front)],
        log: [None, None],
    }
}
