//! The page around the figures: facts, tables and explanations.

use super::numbers::{Scale, Text, percent};
use super::prediction_error::{ErrorSummary, error_summary};
use super::rows::{PARTS, Pair, Row, rows};
use super::{ReportInput, charts, insight, memory_curve, staleness, timeline};
use paceline_plan::trace::{Comparison, Tally, Trace, Window, compare};
use paceline_plan::units::Seconds;
use std::fmt::{self, Write};

pub(super) const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("view.js");

/// Number of ranks in the breakdown table before the middle ones are left out.
const RANKS: usize = 32;
/// Number of lines in each list of differences.
const DIFFERENCES: usize = 12;

/// Writes the whole page.
pub(super) fn write(out: &mut String, input: &ReportInput<'_>) -> fmt::Result {
    let title = Text(&input.title);
    writeln!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n<body>\n<header><h1>{title}</h1>",
    )?;
    facts(out, input)?;
    writeln!(out, "</header>")?;
    warnings(out, input)?;
    let (simulated, measured) = (input.simulated, input.measured);
    let comparison = simulated.zip(measured).map(|(s, m)| compare(s, m));
    if let Some(longest) = longest(simulated, measured) {
        let scale = Scale::of(longest);
        section(out, heading(simulated, measured), |out| {
            iteration(out, simulated, measured, &scale)?;
            breakdown(out, simulated, measured, &scale)
        })?;
        section(out, "Timeline", |out| timeline::write(out, simulated, measured))?;
    }
    if let Some(verdict) = error_summary(simulated, measured) {
        section(out, "Where the prediction was off", |out| words(out, &verdict))?;
    }
    if let Some(found) = &input.insight {
        section(out, "What limits this", |out| insight::limits(out, found))?;
        section(out, "Critical path", |out| insight::critical_path(out, found))?;
        section(out, "Bandwidth", |out| insight::bandwidth(out, found))?;
        section(out, "Memory over time", |out| memory_curve::write(out, found))?;
    }
    if let Some(comparison) = comparison.filter(|c| c.joined > 0) {
        section(out, "Largest differences", |out| differences(out, &comparison))?;
    }
    if let Some(curve) = &input.loss {
        section(out, "Loss", |out| charts::loss(out, curve))?;
    }
    if let Some(bars) = &input.staleness {
        section(out, "Staleness", |out| staleness::histogram(out, bars))?;
    }
    if !input.memory.is_empty() {
        section(out, "Memory", |out| charts::memory(out, &input.memory))?;
    }
    writeln!(out, "<script>\n{SCRIPT}</script>\n</body>\n</html>")
}

fn section(
    out: &mut String,
    heading: &str,
    body: impl FnOnce(&mut String) -> fmt::Result,
) -> fmt::Result {
    writeln!(out, "<section>\n<h2>{heading}</h2>")?;
    body(out)?;
    writeln!(out, "</section>")
}

fn facts(out: &mut String, input: &ReportInput<'_>) -> fmt::Result {
    if input.summary.is_empty() {
        return Ok(());
    }
    writeln!(out, "<dl class=\"facts\">")?;
    for (name, fact) in &input.summary {
        writeln!(out, "<div><dt>{}</dt><dd>{}</dd></div>", Text(name), Text(fact))?;
    }
    writeln!(out, "</dl>")
}

fn warnings(out: &mut String, input: &ReportInput<'_>) -> fmt::Result {
    if input.warnings.is_empty() {
        return Ok(());
    }
    writeln!(out, "<ul class=\"warnings\">")?;
    for warning in &input.warnings {
        writeln!(out, "<li>{}</li>", Text(warning))?;
    }
    writeln!(out, "</ul>")
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

/// Writes the predicted and measured iteration time as a sentence.
fn iteration(
    out: &mut String,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
    scale: &Scale,
) -> fmt::Result {
    let of =
        |trace: Option<&Trace>| trace.and_then(Trace::steady_window).as_ref().map(Window::length);
    let show = |time| format!("<strong>{}</strong>", scale.full(time));
    match (of(simulated), of(measured)) {
        (Some(simulated), Some(measured)) => {
            let error = percent(Tally { simulated, measured }.error());
            let (simulated, measured) = (show(simulated), show(measured));
            write!(
                out,
                "<p>An iteration was predicted to take {simulated} and took {measured}: \
                 the prediction is off by <strong>{error}</strong>.",
            )?;
        }
        (Some(time), None) => write!(out, "<p>An iteration is predicted to take {}.", show(time))?,
        (None, Some(time)) => write!(out, "<p>An iteration took {}.", show(time))?,
        (None, None) => return Ok(()),
    }
    if let Some(trace) = measured {
        let mut times: Vec<Seconds> = trace.steady_windows().iter().map(Window::length).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let [first, .., last] = times.as_slice() {
            let (least, most, count) = (scale.show(*first), scale.full(*last), times.len());
            write!(
                out,
                " The measured one is the median of {count} steady iterations, \
                 which took {least} to {most}.",
            )?;
        }
    }
    writeln!(out, "</p>")
}

/// Writes compute, communication, exposed communication and bubble of every rank.
fn breakdown(
    out: &mut String,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
    scale: &Scale,
) -> fmt::Result {
    let both = simulated.is_some() && measured.is_some();
    write!(
        out,
        "<table class=\"{}\"><caption>Where the iteration’s time goes, in {}. Exposed is \
         communication that no computation hides; compute, exposed and bubble make up the iteration.",
        if both { "breakdown" } else { "breakdown narrow" },
        scale.unit,
    )?;
    if both {
        write!(
            out,
            " Errors are predicted less measured as a share of the measured iteration, \
             so that those three sum to the iteration’s error.",
        )?;
    }
    write!(out, "</caption>\n<thead>")?;
    if both {
        write!(out, "<tr><th></th>")?;
        for part in &PARTS {
            write!(out, "<th colspan=\"3\" class=\"group\">{}</th>", part.title)?;
        }
        write!(out, "</tr>\n<tr><th>rank</th>")?;
        for _ in &PARTS {
            write!(out, "<th class=\"first\">predicted</th><th>measured</th><th>error</th>")?;
        }
        writeln!(out, "</tr></thead>\n<tbody>")?;
    } else {
        write!(out, "<tr><th>rank</th>")?;
        for part in &PARTS {
            write!(out, "<th class=\"first\">{}</th>", part.title)?;
        }
        writeln!(out, "</tr></thead>\n<tbody>")?;
    }
    let columns = PARTS.len() * if both { 3 } else { 1 };
    for row in rows(simulated, measured, RANKS) {
        match row {
            Row::Rank(rank, pair) => {
                write!(out, "<tr><th>{rank}</th>")?;
                cells(out, &pair, both, scale)?;
            }
            Row::Mean(pair) => {
                write!(out, "<tr class=\"mean\"><th>mean</th>")?;
                cells(out, &pair, both, scale)?;
            }
            Row::Elided(count) => {
                write!(out, "<tr><th>…</th><td colspan=\"{columns}\">{count} more ranks</td>")?;
            }
        }
        writeln!(out, "</tr>")?;
    }
    writeln!(out, "</tbody></table>")
}

/// Writes the error attribution as text.
fn words(out: &mut String, verdict: &ErrorSummary) -> fmt::Result {
    writeln!(out, "<p>{}</p>", Text(&verdict.summary.join(" ")))?;
    if verdict.lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "<ul>")?;
    for line in &verdict.lines {
        writeln!(out, "<li>{}</li>", Text(line))?;
    }
    writeln!(
        out,
        "</ul>\n<p>Every moment of a rank counts once: to the computation that ran, else to the \
         exchange that was under way, else to waiting. A negative share makes up for others.</p>"
    )
}

fn cells(out: &mut String, pair: &Pair, both: bool, scale: &Scale) -> fmt::Result {
    let show = |time: Option<Seconds>| time.map_or("–".to_owned(), |t| scale.show(t));
    for part in &PARTS {
        let (predicted, measured) = pair.part(part);
        if both {
            let (p, m, error) = (show(predicted), show(measured), percent(pair.error(part)));
            write!(
                out,
                "<td class=\"first\">{p}</td><td>{m}</td><td class=\"error\">{error}</td>"
            )?;
        } else {
            write!(out, "<td class=\"first\">{}</td>", show(predicted.or(measured)))?;
        }
    }
    Ok(())
}

/// Writes the ops with the largest prediction errors, by name and individually.
fn differences(out: &mut String, comparison: &Comparison) -> fmt::Result {
    let tallies = comparison
        .by_name
        .iter()
        .map(|n| n.tally)
        .chain(comparison.largest.iter().map(|o| o.tally));
    let largest = tallies.map(|t| t.simulated.max(t.measured)).reduce(Seconds::max);
    let scale = Scale::of(largest.unwrap_or_default());

    writeln!(
        out,
        "<p>{} ops were found in both traces and compared by rank and number, \
         each averaged over the steady iterations and without its waiting.{}</p>",
        comparison.joined,
        unmatched(comparison),
    )?;
    let head =
        "<th class=\"first\">predicted</th><th>measured</th><th>difference</th><th>error</th>";
    let tally = |t: &Tally| {
        format!(
            "<td class=\"first\">{}</td><td>{}</td><td>{}</td><td class=\"error\">{}</td>",
            scale.show(t.simulated),
            scale.show(t.measured),
            scale.show(t.difference()),
            percent(t.error()),
        )
    };
    writeln!(
        out,
        "<table><caption>Ops of one name, summed over ranks, in {} an iteration.{}</caption>\n\
         <thead><tr><th>op</th><th class=\"text\">kind</th><th>count</th>{head}</tr></thead>\n\
         <tbody>",
        scale.unit,
        first_of(comparison.by_name.len()),
    )?;
    for name in comparison.by_name.iter().take(DIFFERENCES) {
        writeln!(
            out,
            "<tr><th>{}</th><td class=\"text\">{}</td><td>{}</td>{}</tr>",
            Text(&name.name),
            timeline::words(name.kind),
            name.count,
            tally(&name.tally),
        )?;
    }
    writeln!(
        out,
        "</tbody></table>\n<table><caption>Single ops, in {}.{}</caption>\n<thead><tr><th>op</th>\
         <th class=\"text\">kind</th><th>rank</th><th>microbatch</th>{head}</tr></thead>\n<tbody>",
        scale.unit,
        first_of(comparison.joined),
    )?;
    for op in comparison.largest.iter().take(DIFFERENCES) {
        writeln!(
            out,
            "<tr><th>{}</th><td class=\"text\">{}</td><td>{}</td><td>{}</td>{}</tr>",
            Text(&op.name),
            timeline::words(op.kind),
            op.rank,
            op.microbatch.map_or("–".to_owned(), |m| m.to_string()),
            tally(&op.tally),
        )?;
    }
    writeln!(out, "</tbody></table>")
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
