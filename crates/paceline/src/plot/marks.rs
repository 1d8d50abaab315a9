//! Lines with names at their ends, and bars with values on top.

use super::scale::Scale;
use super::{Area, Chart, Series, printable, text_width};
use crate::report::fixed;
use maud::{Markup, html};

/// Width of the label at a line's end: its name in bold and its last value.
pub(super) fn end_width(chart: &Chart, series: &Series) -> f64 {
    const BOLD: f64 = 1.13;
    text_width(&series.name) * BOLD + text_width(&last_value(chart, series)) + 5.0
}

fn last_value(chart: &Chart, series: &Series) -> String {
    let last = series.values.iter().rev().flatten().next();
    last.map_or_else(String::new, |value| chart.unit.show(*value))
}

/// A drawable value: its position, and its index in the series.
type Point = (f64, f64, usize);

/// One line per series, interrupted at missing values.
pub(super) fn lines(chart: &Chart, along: &[f64], [x, y]: [&Scale; 2], area: &Area) -> Markup {
    let mut order: Vec<usize> = (0..along.len()).collect();
    order.sort_by(|a, b| along[*a].total_cmp(&along[*b]));
    let drawable = |value: f64| value.is_finite() && (!y.log || value > 0.0);
    let points = |series: &Series| -> Vec<Option<Point>> {
        let point = |&i: &usize| {
            let value = series.values.get(i).copied().flatten().filter(|v| drawable(*v))?;
            Some((x.at(along[i]), y.at(value), i))
        };
        order.iter().map(point).collect()
    };
    let all: Vec<Vec<Option<Point>>> = chart.series.iter().map(points).collect();
    let mut ends = Vec::new();
    for (series, points) in chart.series.iter().zip(&all) {
        if let Some(&(left, top, _)) = points.iter().flatten().next_back() {
            ends.push(End { series, left, top, label: top });
        }
    }
    spread(&mut ends, area);
    html! {
        @for (index, (series, points)) in chart.series.iter().zip(&all).enumerate() {
            @let hidden = chart.series[index + 1..].iter().any(|later| coincide(series, later));
            (line(chart, series, points, hidden))
        }
        @for end in &ends { (end.draw(chart, area)) }
    }
}

/// One line with its dots; a hidden one is drawn as a wide band.
fn line(chart: &Chart, series: &Series, points: &[Option<Point>], hidden: bool) -> Markup {
    let (colour, dash) = (series.colour, series.dash);
    let under = if hidden { " under" } else { "" };
    // A single line has space for all of its values.
    let roomy = chart.series.len() == 1 && points.len() <= 12;
    let inner = points.iter().flatten().rev().skip(1).filter(|_| roomy);
    let value =
        |index: usize| series.values[index].map_or_else(String::new, |v| chart.unit.show(v));
    html! {
        path class={ "line s" (colour) " d" (dash) (under) } d=(path(points)) {}
        @for (left, top, index) in points.iter().flatten() {
            circle class={ "dot f" (colour) } cx=(fixed::<1>(*left)) cy=(fixed::<1>(*top)) r="4" {
                title { (title(chart, series, *index)) }
            }
        }
        @for (left, top, index) in inner {
            text.value x=(fixed::<1>(left + 7.0)) y=(fixed::<1>(top - 9.0)) { (value(*index)) }
        }
    }
}

/// Returns true if a line would be hidden by another; it is then drawn as a wide band.
fn coincide(one: &Series, other: &Series) -> bool {
    one.values.iter().zip(&other.values).all(|pair| match pair {
        (Some(a), Some(b)) => (a - b).abs() <= 5e-3 * a.abs().max(b.abs()),
        (None, _) => true,
        (Some(_), None) => false,
    })
}

fn path(points: &[Option<Point>]) -> String {
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
    printable(&format!("{name} at {place}: {}", chart.unit.show(value)))
}

/// End of a line and position of its label.
struct End<'a> {
    series: &'a Series,
    left: f64,
    top: f64,
    label: f64,
}

impl End<'_> {
    fn draw(&self, chart: &Chart, area: &Area) -> Markup {
        let Self { series, left, top, label } = *self;
        let colour = series.colour;
        let start = area.right + 12.0;
        let far = (label - top).abs() > 4.0 || start - left > 24.0;
        let (from, to) = (left + 6.0, start - 3.0);
        html! {
            @if far {
                path class={ "leader s" (colour) }
                    d=(format!("M{from:.1} {top:.1}L{to:.1} {label:.1}")) {}
            }
            text x=(fixed::<1>(start)) y=(fixed::<1>(label + 4.5)) {
                tspan class={ "name f" (colour) } { (printable(&series.name)) } " "
                tspan.value { (last_value(chart, series)) }
            }
        }
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

/// Grouped bars for each category, with a legend if there are several colours.
pub(super) fn bars(chart: &Chart, words: usize, y: &Scale, area: &Area) -> Markup {
    let room = (area.right - area.left) / words.max(1) as f64;
    let count = chart.series.len().max(1) as f64;
    let width = (room * 0.74 / count).min(64.0);
    let base = y.at(if y.log { y.low } else { 0.0 });
    let left = |position: usize, index: usize| {
        let middle = area.left + room * (index as f64 + 0.5);
        middle + width * (position as f64 - count / 2.0)
    };
    let bar = |position: usize, index: usize, value: f64| {
        let (left, top) = (left(position, index), y.at(value));
        let (above, height) = (top.min(base), (top - base).abs().max(0.5));
        let series = &chart.series[position];
        let label = chart.unit.show(value);
        html! {
            rect class={ "f" (series.colour) } x=(fixed::<1>(left + 1.0)) y=(fixed::<1>(above))
                width=(fixed::<1>(width - 2.0)) height=(fixed::<1>(height)) rx="2" {
                title { (title(chart, series, index)) }
            }
            @if text_width(&label) * 0.92 <= width + 6.0 {
                text class="middle value" x=(fixed::<1>(left + width / 2.0))
                    y=(fixed::<1>(above - 6.0)) { (label) }
            }
        }
    };
    let drawable = |value: &f64| value.is_finite() && (!y.log || *value > 0.0);
    html! {
        @for (position, series) in chart.series.iter().enumerate() {
            @for (index, value) in series.values.iter().enumerate().take(words) {
                @if let Some(value) = value.filter(drawable) { (bar(position, index, value)) }
            }
        }
        @if chart.series.len() > 1 { (legend(chart, area.top - 22.0)) }
    }
}

/// The colours of the bars and their names.
fn legend(chart: &Chart, top: f64) -> Markup {
    let mut left = 20.0;
    html! {
        @for Series { name, colour, .. } in &chart.series {
            rect class={ "f" (colour) } x=(fixed::<1>(left)) y=(fixed::<1>(top - 10.5)) width="12"
                height="12" rx="2" {}
            text x=(fixed::<1>(left + 18.0)) y=(fixed::<1>(top)) { (printable(name)) }
            @let () = left += text_width(name) + 42.0;
        }
    }
}
