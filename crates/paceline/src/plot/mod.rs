//! Charts, each a self-contained SVG file: lines over numbers, bars over categories.
//!
//! ```text
//! number   numbers with units: parsing and formatting
//! scale    mapping of values to positions, and ticks
//! frame    title, axes and grid
//! roofline kernels below the roof of a device
//! marks    lines with names at their ends, bars with values on top
//! style    colours, for light and for dark mode
//! ```
//!
//! A chart shows its own numbers: every mark has its value as a tooltip.

mod frame;
mod marks;
mod number;
mod roofline;
mod scale;
mod style;

pub(crate) use number::{Number, Unit, digits};
pub(crate) use roofline::{RooflinePlot, RooflinePoint};

use maud::{Markup, html};
use scale::Scale;

/// Contents of a chart.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chart {
    /// Title of the chart.
    pub title: Option<String>,
    /// Values of the x axis.
    pub x: Along,
    /// Label of the x axis.
    pub x_label: String,
    /// Label of the y axis.
    pub y_label: String,
    /// Unit of the y axis.
    pub unit: Unit,
    /// Lines, or bars of one colour each.
    pub series: Vec<Series>,
    /// True for a logarithmic x and y axis; `None` chooses by the values.
    pub log: [Option<bool>; 2],
}

/// Values of the x axis.
#[derive(Clone, Debug)]
pub(crate) enum Along {
    /// Numbers: the series are lines.
    Numbers(Vec<Number>),
    /// Category names: the series are bars.
    Words(Vec<String>),
}

impl Default for Along {
    fn default() -> Self {
        Self::Words(Vec::new())
    }
}

/// One line, or the bars of one colour.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Name shown in the chart.
    pub name: String,
    /// Index of its colour.
    pub colour: usize,
    /// Index of its dash pattern; 0 is a solid line.
    pub dash: usize,
    /// One value per position on the x axis; `None` leaves a gap.
    pub values: Vec<Option<f64>>,
}

/// Number of distinct colours.
pub(crate) const COLOURS: usize = 8;
/// Number of distinct dash patterns.
pub(crate) const DASHES: usize = 4;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 430.0;

impl Chart {
    /// Renders the chart.
    pub(crate) fn to_svg(&self) -> String {
        let area = self.area();
        let y = self.y_scale(&area);
        let (bottom, marks, x_unit) = match &self.x {
            Along::Numbers(numbers) => {
                let values: Vec<f64> = numbers.iter().map(|number| number.value).collect();
                let log = self.log[0].unwrap_or_else(|| scale::looks_geometric(&values));
                let x = Scale::of(&values, log, false, [area.left, area.right]);
                let (bottom, unit) = frame::numbers(numbers, &x, &area);
                (bottom, marks::lines(self, &values, [&x, &y], &area), unit)
            }
            Along::Words(words) => {
                (frame::words(words, &area), marks::bars(self, words.len(), &y, &area), None)
            }
        };
        let x_unit = x_unit.map_or(String::new(), |unit| format!(", {unit}"));
        svg_file(html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) }
                width=(WIDTH) height=(HEIGHT) role="img" {
                (frame::opening(self, &y))
                (frame::heights(self, &area, &y))
                (bottom)
                (marks)
                (frame::label(&format!("{}{x_unit}", self.x_label), &area))
            }
        })
    }

    /// All finite values.
    fn values(&self) -> Vec<f64> {
        let values = self.series.iter().flat_map(|series| series.values.iter().flatten().copied());
        values.filter(|value| value.is_finite()).collect()
    }

    fn y_scale(&self, area: &Area) -> Scale {
        let values = self.values();
        let lines = matches!(self.x, Along::Numbers(_));
        let log = self.log[1].unwrap_or(lines && scale::spans(&values, 40.0));
        Scale::of(&values, log, true, [area.bottom, area.top])
    }

    /// The area for the marks, excluding titles, ticks and line names.
    fn area(&self) -> Area {
        let lines = matches!(self.x, Along::Numbers(_));
        let names = self.series.iter().map(|series| marks::end_width(self, series));
        let right = match names.fold(0.0, f64::max) {
            longest if lines => (longest + 24.0).clamp(40.0, 280.0),
            _ => 24.0,
        };
        let legend = !lines && self.series.len() > 1;
        let top = if self.title.is_some() { 74.0 } else { 48.0 } + if legend { 24.0 } else { 0.0 };
        Area { left: 66.0, right: WIDTH - right, top, bottom: HEIGHT - 58.0 }
    }
}

/// A rectangle, in the chart's units.
#[derive(Clone, Copy, Debug)]
struct Area {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

/// Approximate width of a label: letters of a sans-serif font at 13 units.
fn text_width(text: &str) -> f64 {
    let width = |c: char| match c {
        'i' | 'j' | 'l' | 't' | 'f' | 'r' | '.' | ',' | ':' | ' ' | '|' | '-' | '/' => 4.6,
        'm' | 'w' | 'M' | 'W' | '%' => 11.0,
        c if c.is_ascii_uppercase() => 9.0,
        _ => 7.4,
    };
    text.chars().map(width).sum()
}

/// Text without control characters, which XML does not allow.
fn printable(text: &str) -> String {
    text.replace(char::is_control, " ")
}

/// An SVG file, one element a line, so that changes of committed pictures can be read. The text of
/// elements has no `<` or `>`: the template escapes them.
pub(crate) fn svg_file(svg: Markup) -> String {
    svg.into_string().replace("><", ">\n<").replace(">\n</", "></") + "\n"
}

#[cfg(test)]
mod tests;
