//! Title, axes and grid of a chart.

use super::scale::Scale;
use super::style::style;
use super::{Area, Chart, HEIGHT, Number, Unit, WIDTH, digits, escaped, text_width};
use std::fmt::{self, Write};

/// Writes the background, the title and the label of the y axis.
pub(super) fn opening(out: &mut String, chart: &Chart, y: &Scale) -> fmt::Result {
    let title = chart.title.as_deref().unwrap_or(&chart.y_label);
    writeln!(out, "<title>{}</title>", escaped(title))?;
    style(out)?;
    writeln!(out, "<rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\"/>")?;
    let mut baseline = 28.0;
    if let Some(title) = &chart.title {
        writeln!(out, "<text class=\"title\" x=\"20\" y=\"30\">{}</text>", escaped(title))?;
        baseline = 54.0;
    }
    let label = match shared(chart, y) {
        Some((name, _)) if !name.is_empty() => format!("{}, {name}", chart.y_label),
        _ => chart.y_label.clone(),
    };
    writeln!(out, "<text class=\"what\" x=\"20\" y=\"{baseline}\">{}</text>", escaped(&label))
}

/// The scaled unit shared by all ticks. Ticks of a logarithmic axis each have their own, unless the
/// unit's multiples are not powers of its base.
fn shared(chart: &Chart, y: &Scale) -> Option<(&'static str, f64)> {
    let largest = chart.values().into_iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    let whole = matches!(chart.unit, Unit::Plain | Unit::Times | Unit::Share);
    let one = !y.log || whole || chart.unit.is_calendar(largest);
    one.then(|| chart.unit.part(largest))
}

/// Writes the grid lines and their numbers.
pub(super) fn heights(out: &mut String, chart: &Chart, area: &Area, y: &Scale) -> fmt::Result {
    let part = shared(chart, y).map(|(_, part)| part);
    for tick in y.ticks(chart.unit) {
        let place = y.at(tick);
        let class = if tick == 0.0 { "base" } else { "grid" };
        let label = part.map_or_else(|| chart.unit.show(tick), |part| digits(tick / part));
        writeln!(
            out,
            "<path class=\"{class}\" d=\"M{:.1} {place:.1}H{:.1}\"/>\
             <text class=\"end\" x=\"{:.1}\" y=\"{:.1}\">{label}</text>",
            area.left,
            area.right,
            area.left - 9.0,
            place + 4.5,
        )?;
    }
    if y.log {
        let (left, right, bottom) = (area.left, area.right, area.bottom);
        writeln!(out, "<path class=\"base\" d=\"M{left:.1} {bottom:.1}H{right:.1}\"/>")?;
    }
    Ok(())
}

/// Writes the numbers along the x axis; those that would overlap are left out. Returns the unit if
/// all share one, so that it is written once.
pub(super) fn numbers(
    out: &mut String,
    numbers: &[Number],
    x: &Scale,
    area: &Area,
) -> Result<Option<&'static str>, fmt::Error> {
    let mut sorted: Vec<&Number> = numbers.iter().collect();
    sorted.sort_by(|a, b| a.value.total_cmp(&b.value));
    let parts = sorted.iter().map(|number| number.unit.part(number.value));
    let common = parts.reduce(|a, b| if a == b { a } else { ("", 0.0) });
    let common = common.filter(|(name, _)| !name.is_empty() && *name != "×");
    let mut free = f64::NEG_INFINITY;
    for number in sorted {
        let label = match common {
            Some((_, scale)) => digits(number.value / scale),
            None => number.unit.show(number.value),
        };
        let place = x.at(number.value);
        let half = text_width(&label) / 2.0;
        writeln!(out, "<path class=\"tick\" d=\"M{place:.1} {:.1}v5\"/>", area.bottom)?;
        if place - half < free {
            continue;
        }
        free = place + half + 8.0;
        let y = area.bottom + 21.0;
        writeln!(out, "<text class=\"middle\" x=\"{place:.1}\" y=\"{y:.1}\">{label}</text>")?;
    }
    Ok(common.map(|(name, _)| name))
}

/// Writes the category names along the x axis, on two lines if one is too narrow.
pub(super) fn words(out: &mut String, words: &[String], area: &Area) -> fmt::Result {
    let room = (area.right - area.left) / words.len().max(1) as f64;
    for (index, word) in words.iter().enumerate() {
        let place = area.left + room * (index as f64 + 0.5);
        for (line, part) in folded(word, room - 8.0).iter().enumerate() {
            let y = area.bottom + 19.0 + 15.0 * line as f64;
            let part = escaped(part);
            writeln!(out, "<text class=\"middle\" x=\"{place:.1}\" y=\"{y:.1}\">{part}</text>")?;
        }
    }
    Ok(())
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

/// Writes the label of the x axis.
pub(super) fn label(out: &mut String, label: &str, area: &Area) -> fmt::Result {
    let (middle, y) = ((area.left + area.right) / 2.0, HEIGHT - 13.0);
    writeln!(out, "<text class=\"middle\" x=\"{middle:.1}\" y=\"{y}\">{}</text>", escaped(label))
}
