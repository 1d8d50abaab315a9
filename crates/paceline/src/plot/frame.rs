//! Title, axes and grid of a chart.

use super::scale::Scale;
use super::style::style;
use super::{Area, Chart, HEIGHT, Number, Unit, WIDTH, digits, printable, text_width};
use crate::report::fixed;
use maud::{Markup, PreEscaped, html};

/// The background, the title and the label of the y axis.
pub(super) fn opening(chart: &Chart, y: &Scale) -> Markup {
    let baseline = if chart.title.is_some() { 54.0 } else { 28.0 };
    let label = match shared(chart, y) {
        Some((name, _)) if !name.is_empty() => format!("{}, {name}", chart.y_label),
        _ => chart.y_label.clone(),
    };
    html! {
        title { (printable(chart.title.as_deref().unwrap_or(&chart.y_label))) }
        style { (PreEscaped(style())) }
        rect.paper width=(WIDTH) height=(HEIGHT) rx="6" {}
        @if let Some(title) = &chart.title {
            text.title x="20" y="30" { (printable(title)) }
        }
        text.what x="20" y=(baseline) { (printable(&label)) }
    }
}

/// The scaled unit shared by all ticks. Ticks of a logarithmic axis each have their own, unless the
/// unit's multiples are not powers of its base.
fn shared(chart: &Chart, y: &Scale) -> Option<(&'static str, f64)> {
    let largest = chart.values().into_iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    let whole = matches!(chart.unit, Unit::Plain | Unit::Times | Unit::Share);
    let one = !y.log || whole || chart.unit.is_calendar(largest);
    one.then(|| chart.unit.part(largest))
}

/// The grid lines and their numbers.
pub(super) fn heights(chart: &Chart, area: &Area, y: &Scale) -> Markup {
    let part = shared(chart, y).map(|(_, part)| part);
    let label = |tick: f64| part.map_or_else(|| chart.unit.show(tick), |part| digits(tick / part));
    let across = |place: f64| format!("M{:.1} {place:.1}H{:.1}", area.left, area.right);
    html! {
        @for tick in y.ticks(chart.unit) {
            @let place = y.at(tick);
            path class=(if tick == 0.0 { "base" } else { "grid" }) d=(across(place)) {}
            text.end x=(fixed::<1>(area.left - 9.0)) y=(fixed::<1>(place + 4.5)) { (label(tick)) }
        }
        @if y.log { path.base d=(across(area.bottom)) {} }
    }
}

/// The numbers along the x axis, without those that would overlap; also the unit if all share one,
/// so that it is written once.
pub(super) fn numbers(
    numbers: &[Number],
    x: &Scale,
    area: &Area,
) -> (Markup, Option<&'static str>) {
    let mut sorted: Vec<&Number> = numbers.iter().collect();
    sorted.sort_by(|a, b| a.value.total_cmp(&b.value));
    let parts = sorted.iter().map(|number| number.unit.part(number.value));
    let common = parts.reduce(|a, b| if a == b { a } else { ("", 0.0) });
    let common = common.filter(|(name, _)| !name.is_empty() && *name != "×");
    let mut free = f64::NEG_INFINITY;
    let mut drawn = Vec::new();
    for number in sorted {
        let label = match common {
            Some((_, scale)) => digits(number.value / scale),
            None => number.unit.show(number.value),
        };
        let place = x.at(number.value);
        let half = text_width(&label) / 2.0;
        let shown = place - half >= free;
        if shown {
            free = place + half + 8.0;
        }
        drawn.push((fixed::<1>(place), Some(label).filter(|_| shown)));
    }
    let markup = html! {
        @for (place, label) in drawn {
            path.tick d={ "M" (place) " " (fixed::<1>(area.bottom)) "v5" } {}
            @if let Some(label) = label {
                text.middle x=(place) y=(fixed::<1>(area.bottom + 21.0)) { (label) }
            }
        }
    };
    (markup, common.map(|(name, _)| name))
}

/// The category names along the x axis, on two lines if one is too narrow.
pub(super) fn words(words: &[String], area: &Area) -> Markup {
    let room = (area.right - area.left) / words.len().max(1) as f64;
    html! {
        @for (index, word) in words.iter().enumerate() {
            @let place = area.left + room * (index as f64 + 0.5);
            @for (line, part) in folded(word, room - 8.0).into_iter().enumerate() {
                @let y = area.bottom + 19.0 + 15.0 * line as f64;
                text.middle x=(fixed::<1>(place)) y=(fixed::<1>(y)) { (printable(part)) }
            }
        }
    }
}

/// Splits a name that is too wide in two, at a space, a colon, a comma or a plus sign.
fn folded(word: &str, room: f64) -> Vec<&str> {
    if text_width(word) <= room {
        return vec![word];
    }
    let middle = word.len() / 2;
    let breaks = word.char_indices().filter(|(_, c)| " :+,".contains(*c)).map(|(at, _)| at + 1);
    match breaks.min_by_key(|at| at.abs_diff(middle)) {
        Some(at) if at < word.len() => vec![word[..at].trim(), &word[at..]],
        _ => vec![word],
    }
}

/// The label of the x axis.
pub(super) fn label(label: &str, area: &Area) -> Markup {
    let middle = fixed::<1>((area.left + area.right) / 2.0);
    html! { text.middle x=(middle) y=(HEIGHT - 13.0) { (printable(label)) } }
}
