//! The page around the figures: facts, tables and explanations.

use super::numbers::{Scale, percent};
use super::prediction_error::{ErrorSummary, error_summary};
use super::rows::{PARTS, Pair, Row, rows};
use super::{IterationTime, ReportInput, charts, insight, memory_curve, staleness, timeline};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use paceline_plan::trace::{Comparison, Tally, Trace, Window, compare};
use paceline_plan::units::Seconds;

pub(super) const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("view.js");

/// Number of ranks in the breakdown table before the middle ones are left out.
const RANKS: usize = 32;
/// Number of lines in each list of differences.
const DIFFERENCES: usize = 12;

/// The whole page.
pub(super) fn page(input: &ReportInput<'_>) -> Markup {
    let (simulated, measured) = (input.simulated, input.measured);
    let comparison = simulated.zip(measured).map(|(s, m)| compare(s, m));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (input.title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (input.title) }
                    @if !input.summary.is_empty() {
                        dl.facts {
                            @for (name, fact) in &input.summary {
                                div { dt { (name) } dd { (fact) } }
                            }
                        }
                    }
                }
                @if !input.warnings.is_empty() {
                    ul.warnings { @for warning in &input.warnings { li { (warning) } } }
                }
                @if let Some(longest) = longest(simulated, measured) {
                    @let scale = Scale::of(longest);
                    (section(heading(simulated, measured), html! {
                        (iteration(input, &scale))
                        (breakdown(simulated, measured, &scale))
                    }))
                    (section("Timeline", timeline::figure(simulated, measured)))
                }
                @if let Some(verdict) = error_summary(simulated, measured) {
                    (section("Where the prediction was off", words(&verdict)))
                }
                @if let Some(found) = &input.insight {
                    (section("What limits this", insight::limits(found)))
                    (section("Critical path", insight::critical_path(found)))
                    (section("Bandwidth", insight::bandwidth(found)))
                    @if !found.details.layers.is_empty() {
                        (section("Layers", insight::layers(found)))
                    }
                    @if !found.details.exchanges.is_empty() {
                        (section("Exchanges", insight::exchanges(found)))
                    }
                    (section("Memory over time", memory_curve::figure(found)))
                }
                @if let Some(comparison) = comparison.filter(|c| c.joined > 0) {
                    (section("Largest differences", differences(&comparison)))
                }
                @if let Some(curve) = &input.loss {
                    (section("Loss", charts::loss(curve)))
                }
                @if let Some(bars) = &input.staleness {
                    (section("Staleness", staleness::histogram(bars)))
                }
                @if !input.memory.is_empty() {
                    (section("Memory", charts::memory(&input.memory)))
                }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    }
}

fn section(heading: &str, body: Markup) -> Markup {
    html! { section { h2 { (heading) } (body) } }
}

fn longest(simulated: Option<&Trace>, measured: Option<&Trace>) -> Option<Seconds> {
    let windows = [simulated, measured].into_iter().flatten().filter_map(Trace::steady_window);
    windows.map(|w| w.length()).reduce(Seconds::max)
}

fn heading(simulated: Option<&Trace>, measured: Option<&Trace>) -> &'static str {
    match (simulated, measured) {
        (Some(_), Some(_)) => "Prediction and measurement",
        (Some(_), None) => "Prediction",
        (None, _) => "Measurement",
    }
}

/// The predicted and measured iteration time as sentences: over the run, and of the traced
/// iteration that table and timeline show.
fn iteration(input: &ReportInput<'_>, scale: &Scale) -> Markup {
    let of =
        |trace: Option<&Trace>| trace.and_then(Trace::steady_window).as_ref().map(Window::length);
    let show = |time| html! { strong { (scale.full(time)) } };
    html! {
        p {
            @match &input.iteration {
                Some(IterationTime { predicted: Some(simulated), measured, over }) => {
                    "An iteration was predicted to take " (show(*simulated)) " and took "
                    (show(*measured)) ", " (over) ": the prediction is off by "
                    strong {
                        (percent(Tally { simulated: *simulated, measured: *measured }.error()))
                    } ". "
                }
                Some(IterationTime { predicted: None, measured, over }) => {
                    "An iteration took " (show(*measured)) ", " (over) ". "
                }
                None => {}
            }
            @match (of(input.simulated), of(input.measured)) {
                (Some(simulated), Some(measured)) => {
                    "The traced iteration shown here was predicted to take "
                    (scale.full(simulated)) " and took " (scale.full(measured)) "."
                }
                (Some(time), None) if input.iteration.is_none() => {
                    "An iteration is predicted to take " (show(time)) "."
                }
                (Some(_), None) => {}
                (None, Some(time)) => { "The traced iteration shown here took " (scale.full(time)) "." }
                (None, None) => {}
            }
        }
    }
}

/// Compute, communication, exposed communication and bubble of every rank.
fn breakdown(simulated: Option<&Trace>, measured: Option<&Trace>, scale: &Scale) -> Markup {
    let both = simulated.is_some() && measured.is_some();
    let columns = PARTS.len() * if both { 3 } else { 1 };
    html! {
        table.breakdown.narrow[!both] {
            caption {
                "Where the iteration’s time goes, in " (scale.unit) ". Exposed is communication that \
                 no computation hides; compute, exposed and bubble make up the iteration."
                @if both {
                    " Errors are predicted less measured as a share of the measured iteration, \
                     so that those three sum to the iteration’s error."
                }
            }
            thead {
                @if both {
                    tr { th {} @for part in &PARTS { th.group colspan="3" { (part.title) } } }
                    tr {
                        th { "rank" }
                        @for _ in &PARTS {
                            th.first { "predicted" } th { "measured" } th { "error" }
                        }
                    }
                } @else {
                    tr { th { "rank" } @for part in &PARTS { th.first { (part.title) } } }
                }
            }
            tbody {
                @for row in rows(simulated, measured, RANKS) {
                    @match row {
                        Row::Rank(rank, pair) => {
                            tr { th { (rank) } (cells(&pair, both, scale)) }
                        }
                        Row::Mean(pair) => {
                            tr.mean { th { "mean" } (cells(&pair, both, scale)) }
                        }
                        Row::Elided(count) => {
                            tr { th { "…" } td colspan=(columns) { (count) " more ranks" } }
                        }
                    }
                }
            }
        }
    }
}

/// The error attribution as text.
fn words(verdict: &ErrorSummary) -> Markup {
    html! {
        p { (verdict.summary.join(" ")) }
        @if !verdict.lines.is_empty() {
            ul { @for line in &verdict.lines { li { (line) } } }
            p {
                "Every moment of a rank counts once: to the computation that ran, else to the \
                 exchange that was under way, else to waiting. A negative share makes up for others."
            }
        }
    }
}

fn cells(pair: &Pair, both: bool, scale: &Scale) -> Markup {
    let show = |time: Option<Seconds>| time.map_or("–".to_owned(), |t| scale.show(t));
    html! {
        @for part in &PARTS {
            @let (predicted, measured) = pair.part(part);
            @if both {
                td.first { (show(predicted)) }
                td { (show(measured)) }
                td.error { (percent(pair.error(part))) }
            } @else {
                td.first { (show(predicted.or(measured))) }
            }
        }
    }
}

/// The ops with the largest prediction errors, by name and individually.
fn differences(comparison: &Comparison) -> Markup {
    let tallies = comparison
        .by_name
        .iter()
        .map(|n| n.tally)
        .chain(comparison.largest.iter().map(|o| o.tally));
    let largest = tallies.map(|t| t.simulated.max(t.measured)).reduce(Seconds::max);
    let scale = Scale::of(largest.unwrap_or_default());
    let head = html! {
        th.first { "predicted" } th { "measured" } th { "difference" } th { "error" }
    };
    let tally = |t: &Tally| {
        html! {
            td.first { (scale.show(t.simulated)) }
            td { (scale.show(t.measured)) }
            td { (scale.show(t.difference())) }
            td.error { (percent(t.error())) }
        }
    };
    html! {
        p {
            (comparison.joined)
            " ops were found in both traces and compared by rank and number, each averaged over the \
             steady iterations and without its waiting."
            (unmatched(comparison))
        }
        table {
            caption {
                "Ops of one name, summed over ranks, in " (scale.unit) " an iteration."
                (first_of(comparison.by_name.len()))
            }
            thead { tr { th { "op" } th.text { "kind" } th { "count" } (head) } }
            tbody {
                @for name in comparison.by_name.iter().take(DIFFERENCES) {
                    tr {
                        th { (name.name) }
                        td.text { (timeline::words(name.kind)) }
                        td { (name.count) }
                        (tally(&name.tally))
                    }
                }
            }
        }
        table {
            caption { "Single ops, in " (scale.unit) "." (first_of(comparison.joined)) }
            thead {
                tr { th { "op" } th.text { "kind" } th { "rank" } th { "microbatch" } (head) }
            }
            tbody {
                @for op in comparison.largest.iter().take(DIFFERENCES) {
                    tr {
                        th { (op.name) }
                        td.text { (timeline::words(op.kind)) }
                        td { (op.rank) }
                        td { (op.microbatch.map_or("–".to_owned(), |m| m.to_string())) }
                        (tally(&op.tally))
                    }
                }
            }
        }
    }
}

fn first_of(count: usize) -> String {
    if count > DIFFERENCES {
        format!(" The {DIFFERENCES} of {count} that differ most.")
    } else {
        String::new()
    }
}

/// Numbers of ops that could not be compared, as a note for the lists.
fn unmatched(comparison: &Comparison) -> String {
    let (predicted, measured) = (comparison.only_simulated, comparison.only_measured);
    if predicted + measured == 0 {
        return String::new();
    }
    format!(" {predicted} were only predicted, {measured} only measured.")
}
