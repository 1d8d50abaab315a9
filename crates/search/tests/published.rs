//! Published runs of `validation/training.csv`: each is in the space of its search, and the search
//! finds nothing slower.

use paceline_plan::strategy::{Recompute, Split};
use paceline_search::{Choice, Pins, contains, search};
use paceline_sim::Options;
use paceline_sim::table::training::{Request, rows};

const TABLE: &str = include_str!("../../../validation/training.csv");

/// The search of a published run: its model, cluster, batch and dtypes, on its number of devices.
fn searched(run: &Request, mut pins: Pins) -> paceline_search::Request<'_> {
    let s = &run.strategy;
    // Values that a search does not try by itself are tried if the run had them.
    if matches!(s.recompute, Recompute::FullOf(_) | Recompute::FullForward) {
        let usual =
            [Recompute::None, Recompute::Selective, Recompute::SelectiveOp, Recompute::Full];
        let all = usual.into_iter().chain([s.recompute]).collect();
        pins.recompute = Choice { only: Some(all), never: vec![] };
    }
    if matches!(s.split, Split::At(_)) {
        let splits = vec![Split::Cost, Split::Count, s.split.clone()];
        pins.split = Choice { only: Some(splits), never: vec![] };
    }
    pins.bucket = Choice::pin(s.bucket);
    pins.collective = Choice::pin(s.collective);
    paceline_search::Request {
        model: &run.model,
        cluster: &run.cluster,
        devices: s.mesh().world(),
        base: s.clone(),
        options: Options { profile: run.profile, ..Options::default() },
        pins,
        top: 1,
        any_memory: true,
    }
}

/// Every run that can be described.
fn runs() -> Vec<(String, Request)> {
    let rows = rows(TABLE, "training.csv").unwrap();
    let described = rows.iter().filter_map(|row| Some((row.id().to_owned(), row.request().ok()?)));
    described.collect()
}

#[test]
fn every_published_strategy_is_in_the_space() {
    let runs = runs();
    assert!(runs.len() >= 30, "{}", runs.len());
    for (id, run) in &runs {
        let request = searched(run, Pins::default());
        assert!(contains(&request, &run.strategy), "{id}: {:?}", run.strategy);
    }
}

/// The search with the degrees of parallelism of each run.
#[test]
fn what_is_found_on_a_published_mesh_is_at_least_as_fast() {
    for (id, run) in runs().iter().step_by(6) {
        let s = &run.strategy;
        let pins = Pins {
            tp: Choice::pin(s.tp),
            cp: Choice::pin(s.cp),
            pp: Choice::pin(s.pp),
            ep: Choice::pin(s.ep),
            etp: Choice::pin(s.etp),
            micro_batch: Choice::pin(s.micro_batch),
            sp: Choice::pin(s.sp),
            schedule: Choice::pin(s.schedule),
            offload: Choice::pin(s.offload),
            overlap: Choice::pin(s.overlap),
            ..Pins::default()
        };
        at_least_as_fast(id, run, pins);
    }
}

#[test]
#[ignore = "searches the whole space of every run; run by .ci/nightly"]
fn what_is_found_is_at_least_as_fast() {
    for (id, run) in &runs() {
        at_least_as_fast(id, run, Pins::default());
    }
}

fn at_least_as_fast(id: &str, run: &Request, pins: Pins) {
    let request = searched(run, pins);
    let published = paceline_search::Worker::new(&request).simulate(&run.strategy);
    let published = published.unwrap_or_else(|| panic!("{id} cannot be simulated"));
    let found = search(&request, |_| true);
    let best = found.candidates.first().unwrap_or_else(|| panic!("{id}: nothing found"));
    assert!(
        best.iteration.0 <= published.iteration.0 * (1.0 + 1e-12),
        "{id}: found {}, published {}",
        best.iteration,
        published.iteration
    );
}
