//! Lines with names at their ends, and bars with values on top.

use super::scale::Scale;
use super::{Area, Chart, Series, escaped, text_width};
use std::fmt::{self, Write};

/// Width of the label at a line's end: its name in bold and its last value.
pub(super) fn end_width(chart: &Chart, series: &Series) -> f64 {
    const BOLD: f64 = 1.13;
    text_width(&series.name) * BOLD + text_width(&last_value(chart, series)) + 5.0
}

fn last_value(chart: &Chart, series: &Series) -> String {
    let last = series.values.iter().rev().flatten().next();
    last.map_or_else(String::new, |value| chart.unit.show(*value))
}

/// Draws one line per series, interrupted at missing values.
pub(super) fn lines(
    out: &mut String,
    chart: &Chart,
    along: &[f64],
    [x, y]: [&Scale; 2],
    area: &Area,
) -> fmt::Result {
    let mut order: Vec<usize> = (0..along.len()).collect();
    order.sort_by(|a, b| along[*a].total_cmp(&along[*b]));
    let drawable = |value: f64| value.is_finite() && (!y.log || value > 0.0);
    let mut ends = Vec::new();
    for (index, series) in chart.series.iter().enumerate() {
        let later = &chart.series[index + 1..];
        let points: Vec<Option<(f64, f64, usize)>> = order
            .iter()
            .map(|&i| {
                let value = series.values.get(i).copied().flatten().filter(|v| drawable(*v))?;
                Some((x.at(along[i]), y.at(value), i))
            })
            .collect();
        let (colour, dash) = (series.colour, series.dash);
        let hidden = later.iter().any(|other| coincide(series, other));
        let under = if hidden { " under" } else { "" };
        writeln!(out, "<path class=\"line s{colour} d{dash}{under}\" d=\"{}\"/>", path(&points))?;
        for (left, top, index) in points.iter().flatten() {
            let told = title(chart, series, *index);
            writeln!(
                out,
                "<circle class=\"dot f{colour}\" cx=\"{left:.1}\" cy=\"{top:.1}\" r=\"4\">\
                 <title>{told}</title></circle>"
            )?;
        }
        // A single line has space for all of its values.
        let inner = points.iter().flatten().rev().skip(1);
        for (left, top, index) in inner.filter(|_| chart.series.len() == 1 && along.len() <= 12) {
            let value = series.values[*index].map_or_else(String::new, |v| chart.unit.show(v));
            let (left, top) = (left + 7.0, top - 9.0);
            writeln!(out, "<text class=\"value\" x=\"{left:.1}\" y=\"{top:.1}\">{value}</text>")?;
        }
        if let Some((left, top, _)) = points.iter().flatten().next_back() {
            ends.push(End { series, left: *left, top: *top, label: *top });
        }
    }
    spread(&mut ends, area);
    ends.iter().try_for_each(|end| end.write(out, chart, area))
}

/// Returns true if a line would be hidden by another; it is then drawn as a wide band.
fn coincide(one: &Series, other: &Series) -> bool {
    one.values.iter().zip(&other.values).all(|pair| match pair {
        (Some(a), Some(b)) => (a - b).abs() <= 5e-3 * a.abs().max(b.abs()),
        (None, _) => true,
        (Some(_), None) => false,
    })
}

fn path(points: &[Option<(f64, f64, usize)>]) -> String {
    let mut path = String::new();
    let mut pen_down = false;
    for point in points {
        if let Some((left, top, _)) = point {
            path += &format!("{}{left:.1} {top:.1}", if pen_down { 'L' } else { 'M' });
        }
        pen_down = point.is_some();
    }
    path
}

/// The tooltip of a mark.
fn title(chart: &Chart, series: &Series, index: usize) -> String {
    let value = series.values.get(index).copied().flatten().unwrap_or(f64::NAN);
    let place = match &chart.x {
        super::Along::Numbers(numbers) => numbers[index].unit.show(numbers[index].value),
        super::Along::Words(words) => words[index].clone(),
    };
    let name = if series.name.is_empty() { &chart.y_label } else { &series.name };
    escaped(&format!("{name} at {place}: {}", chart.unit.show(value)))
}

/// End of a line and position of its label.
struct End<'a> {
    series: &'a Series,
    left: f64,
    top: f64,
    label: f64,
}

impl End<'_> {
    fn write(&self, out: &mut String, chart: &Chart, area: &Area) -> fmt::Result {
        let Self { series, left, top, label } = self;
        let colour = series.colour;
        let start = area.right + 12.0;
        if (label - top).abs() > 4.0 || start - left > 24.0 {
            writeln!(
                out,
                "<path class=\"leader s{colour}\" d=\"M{:.1} {top:.1}L{:.1} {label:.1}\"/>",
                left + 6.0,
                start - 3.0
            )?;
        }
        let value = last_value(chart, series);
        let y = label + 4.5;
        writeln!(
            out,
            "<text x=\"{start:.1}\" y=\"{y:.1}\"><tspan class=\"name f{colour}\">{}</tspan> \
             <tspan class=\"value\">{value}</tspan></text>",
            escaped(&series.name)
        )
    }
}

/// Moves labels as little as possible so that none overlap.
fn spread(ends: &mut [End<'_>], area: &Area) {
    const LABEL_GAP: f64 = 18.0;
    ends.sort_by(|a, b| a.label.total_cmp(&b.label));
    // Groups that touch are merged and centred on the mean of their wanted positions.
    let mut groups: Vec<(f64, usize)> = Vec::new();
    for end in ends.iter() {
        groups.push((end.label, 1));
        while let [.., (above, n), (below, m)] = groups[..]
            && below - above < LABEL_GAP * (n + m) as f64 / 2.0
        {
            let total = (n + m) as f64;
            let centre = (above * n as f64 + below * m as f64) / total;
            groups.truncate(groups.len() - 2);
            groups.push((centre, n + m));
        }
    }
    let mut index = 0;
    for (centre, count) in groups {
        let half = LABEL_GAP * (count - 1) as f64 / 2.0;
        let least = area.top + half - 8.0;
        let centre = centre.clamp(least, (area.bottom - half).max(least));
        for place in 0..count {
            ends[index].label = centre - half + LABEL_GAP * place as f64;
            index += 1;
        }
    }
}

/// Draws grouped bars for each category, with a legend if there are several colours.
pub(super) fn bars(
    out: &mut String,
    chart: &Chart,
    words: usize,
    y: &Scale,
    area: &Area,
) -> fmt::Result {
    let room = (area.right - area.left) / words.max(1) as f64;
    let count = chart.series.len().max(1) as f64;
    let width = (room * 0.74 / count).min(64.0);
    let base = y.at(if y.log { y.low } else { 0.0 });
    for (position, series) in chart.series.iter().enumerate() {
        let colour = series.colour;
        for (index, value) in series.values.iter().enumerate().take(words) {
            let Some(value) = value.filter(|v| v.is_finite() && (!y.log || *v > 0.0)) else {
                continue;
            };
            let middle = area.left + room * (index as f64 + 0.5);
            let left = middle + width * (position as f64 - count / 2.0);
            let top = y.at(value);
            let (above, height) = (top.min(base), (top - base).abs().max(0.5));
            let told = title(chart, series, index);
            writeln!(
                out,
                "<rect class=\"f{colour}\" x=\"{:.1}\" y=\"{above:.1}\" width=\"{:.1}\" \
                 height=\"{height:.1}\" rx=\"2\"><title>{told}</title></rect>",
                left + 1.0,
                width - 2.0,
            )?;
            let label = chart.unit.show(value);
            if text_width(&label) * 0.92 <= width + 6.0 {
                let (centre, line) = (left + width / 2.0, above - 6.0);
                writeln!(
                    out,
                    "<text class=\"middle value\" x=\"{centre:.1}\" y=\"{line:.1}\">{label}</text>"
                )?;
            }
        }
    }
    if chart.series.len() > 1 {
        let mut left = 20.0;
        let top = area.top - 22.0;
        for Series { name, colour, .. } in &chart.series {
            writeln!(
                out,
                "<rect class=\"f{colour}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" \
                 rx=\"2\"/><text x=\"{:.1}\" y=\"{top:.1}\">{}</text>",
                top - 10.5,
                left + 18.0,
                escaped(name)
            )?;
            left += text_width(name) + 42.0;
        }
    }
    Ok(())
}
