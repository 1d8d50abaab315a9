//! One steady iteration as one SVG file, for pages and slides.
//!
//! The rows are those of the report's timeline. Ops of one microbatch and pass are joined, so that
//! a schedule looks as in a textbook: a box for each forward and backward pass, with its
//! microbatch.

use super::coarse::Coarse;
use super::numbers::{Scale, fixed, ticks};
use super::timeline::{Plot, RowSlot, Rows, labelled, words};
use crate::plot::svg_file;
use maud::{Markup, PreEscaped, html};
use paceline_plan::ids::Rank;
use paceline_plan::trace::{Span, SpanKind, Trace};
use paceline_plan::units::Seconds;
use std::collections::{BTreeMap, BTreeSet};

/// Draws a trace's steady iteration under a title and a note; `None` if it has none.
pub(crate) fn picture(trace: &Trace, title: &str, note: &str) -> Option<String> {
    let mut runs = Coarse::new(trace);
    leave_out_what_does_not_show(&mut runs.trace);
    let plot = Plot::of_runs(&runs)?;
    let rows = Rows::choose(std::slice::from_ref(&plot));
    Some(svg_file(Picture::new(&plot, &rows).draw(title, note)))
}

/// Removes lanes of a rank that are busy for less than a pixel in total, and waits on lanes that do
/// not compute: an idle communication lane costs nothing.
fn leave_out_what_does_not_show(trace: &mut Trace) {
    let Some(window) = trace.steady_window() else { return };
    let mut busy: BTreeMap<(Rank, u8), f64> = BTreeMap::new();
    let mut computes: BTreeSet<u8> = BTreeSet::new();
    for span in trace.spans.iter().filter(|span| span.kind != SpanKind::Wait) {
        let inside = span.end.0.min(window.end.0) - span.start.0.max(window.start.0);
        *busy.entry((span.rank, span.lane)).or_default() += inside.max(0.0);
        if span.kind.is_compute() && span.kind != SpanKind::Load {
            computes.insert(span.lane);
        }
    }
    let least = window.length().0 / (WIDTH - NAMES - MARGIN);
    trace.spans.retain(|span| {
        let shows = busy.get(&(span.rank, span.lane)).is_some_and(|&busy| busy >= least);
        computes.contains(&span.lane) || (shows && span.kind != SpanKind::Wait)
    });
}

const WIDTH: f64 = 960.0;
/// Width of the row names.
const NAMES: f64 = 132.0;
/// Top of the rows, below title, note and legend.
const TOP: f64 = 96.0;
const MARGIN: f64 = 16.0;
/// Minimum width of a box that shows its microbatch number.
const NUMBER: f64 = 11.0;
/// Approximate width of a letter of the legend.
const LETTER: f64 = 6.6;

struct Picture<'a, 'p> {
    plot: &'p Plot<'a>,
    rows: &'p Rows<'a>,
    spans: Vec<&'a Span>,
    /// Drawing units per second.
    rate: f64,
}

impl<'a, 'p> Picture<'a, 'p> {
    fn new(plot: &'p Plot<'a>, rows: &'p Rows<'a>) -> Self {
        let shown = |span: &&Span| {
            let inside = span.end.0 > plot.window.start.0 && span.start.0 < plot.window.end.0;
            inside && rows.find(span.rank, plot.trace.lane(span)).is_some()
        };
        let spans = plot.trace.spans.iter().filter(shown).collect();
        let length = plot.window.length().0;
        let rate = if length > 0.0 { (WIDTH - NAMES - MARGIN) / length } else { 0.0 };
        Self { plot, rows, spans, rate }
    }

    fn x(&self, time: Seconds) -> f64 {
        NAMES + (time - self.plot.window.start).0 * self.rate
    }

    fn draw(&self, title: &str, note: &str) -> Markup {
        let height = TOP + self.rows.height + 34.0;
        let length = Scale::of(self.plot.window.length()).full(self.plot.window.length());
        html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (height) }
                width=(WIDTH) height=(height) role="img" {
                title { (title) ", one iteration of " (length) }
                style { (PreEscaped(style())) }
                rect.paper width=(WIDTH) height=(height) {}
                text.title x=(MARGIN) y="28" { (title) }
                text x=(MARGIN) y="48" { (note) ", one iteration of " (length) }
                (self.legend())
                @for place in &self.rows.places { (row(place)) }
                @for span in self.spans.iter().filter_map(|span| self.span(span)) { (span) }
                (self.axis())
            }
        }
    }

    fn legend(&self) -> Markup {
        let present: BTreeSet<SpanKind> = self.spans.iter().map(|span| span.kind).collect();
        let mut x = MARGIN;
        html! {
            @for kind in SpanKind::ALL.into_iter().filter(|kind| present.contains(kind)) {
                @let name = words(kind);
                rect class=(kind) x=(fixed::<1>(x)) y="64" width="11" height="11" {}
                text x=(fixed::<1>(x + 16.0)) y="74" { (name) }
                @let () = x += 34.0 + LETTER * name.len() as f64;
            }
        }
    }

    fn span(&self, span: &Span) -> Option<Markup> {
        let place = self.rows.find(span.rank, self.plot.trace.lane(span))?;
        let window = self.plot.window;
        let from = self.x(span.start.max(window.start));
        let end = if span.end.0 < window.end.0 { span.end } else { window.end };
        let width = self.x(end) - from;
        let filled = self.plot.runs.map_or(1.0, |runs| runs.filled(span)).max(0.05);
        let top = TOP + place.top;
        let number = span.microbatch.filter(|_| labelled(span.kind) && width >= NUMBER);
        Some(html! {
            rect class=(span.kind) x=(fixed::<2>(from)) y=(top) width=(fixed::<2>(width))
                height=(place.height)
                fill-opacity=[(filled < 1.0).then(|| fixed::<2>(filled))] {
                title { (self.plot.trace.name(span)) ", " (span.duration()) }
            }
            @if let Some(microbatch) = number {
                text.on x=(fixed::<2>(from + width / 2.0)) y=(top + place.height - 5.0) {
                    (microbatch)
                }
            }
        })
    }

    fn axis(&self) -> Markup {
        let length = self.plot.window.length();
        let ticks = ticks(0.0, length.0, 8);
        let scale = match ticks.as_slice() {
            [first, second, ..] => Scale::of(length).for_steps(Seconds(second - first)),
            _ => Scale::of(length),
        };
        let bottom = TOP + self.rows.height;
        html! {
            @for tick in ticks.into_iter().map(Seconds) {
                @let x = fixed::<2>(self.x(self.plot.window.start + tick));
                path.tick d={ "M" (x) " " (TOP) "V" (fixed::<1>(bottom + 6.0)) } {}
                text.middle x=(x) y=(fixed::<1>(bottom + 22.0)) { (scale.full(tick)) }
            }
        }
    }
}

fn row(place: &RowSlot<'_>) -> Markup {
    let top = TOP + place.top;
    let base = top + place.height / 2.0 + 4.0;
    html! {
        @if place.first_of_rank { text.rank x=(MARGIN) y=(base) { "rank " (place.rank) } }
        text.end x=(NAMES - 8.0) y=(base) { (place.lane) }
        rect.track x=(NAMES) y=(top) width=(WIDTH - NAMES - MARGIN) height=(place.height) {}
    }
}

/// The report's colours without CSS variables, because some SVG viewers do not support them.
fn style() -> String {
    let mut out = "\n\
         text{font:11px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Helvetica Neue\",Arial,sans-serif}\
         .title{font-size:15px;font-weight:600}.rank{font-weight:600}\
         .end{text-anchor:end}.middle,.on{text-anchor:middle}.on{font-size:10px}.tick{fill:none}\n"
        .to_owned();
    for (query, nth) in [("", 0), ("@media (prefers-color-scheme:dark){", 1)] {
        let colour = |name: &str| colour(name, nth);
        out += &format!(
            "{query}text{{fill:{quiet}}}.title,.rank{{fill:{ink}}}.on{{fill:{on}}}\
             .paper{{fill:{paper}}}.track{{fill:{track}}}.tick{{stroke:{rule};stroke-opacity:.6}}",
            quiet = colour("quiet"),
            ink = colour("ink"),
            on = colour("on"),
            paper = colour("paper"),
            track = colour("track"),
            rule = colour("rule"),
        );
        for kind in SpanKind::ALL {
            out += &format!(".{kind}{{fill:{}}}", colour(kind.name()));
        }
        out += if query.is_empty() { "\n" } else { "}\n" };
    }
    out
}

/// A colour of the report's style sheet: the light one, or the dark one after it.
fn colour(name: &str, nth: usize) -> &'static str {
    let sheet = super::page::STYLE;
    let found = sheet.match_indices(&format!("--{name}: ")).nth(nth);
    let value = found.map(|(at, text)| &sheet[at + text.len()..]);
    value.and_then(|value| value.split(';').next()).unwrap_or("currentColor")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{left_open, small};
    use paceline_plan::trace::Origin;

    #[test]
    fn a_pass_is_a_box_with_its_microbatch() {
        let svg = picture(&small(Origin::Simulated, 2, 0.4e-3), "F<0>", "1f1b, idle 0 %").unwrap();
        // An iteration of 1 ms fills the width, so a forward pass of 0.4 ms has 0.4 of it.
        let width = format!("width=\"{:.2}\"", 0.4 * (WIDTH - NAMES - MARGIN));
        assert_eq!(svg.matches("class=\"forward\"").count(), 3, "two ranks and the legend");
        assert_eq!(svg.matches(&width).count(), 4, "a forward pass and an all_reduce each");
        assert_eq!(svg.matches(">7</text>").count(), 2);
        assert!(svg.contains("rank 1") && svg.contains("F&lt;0&gt;") && !svg.contains("F<0>"));
        assert!(svg.contains("1f1b, idle 0 %, one iteration of 1.000 ms"));
        assert_eq!(left_open(&svg), [""; 0]);
    }

    #[test]
    fn every_kind_has_two_colours() {
        for kind in SpanKind::ALL {
            let (light, dark) = (colour(kind.name(), 0), colour(kind.name(), 1));
            assert!(light.starts_with('#') && dark.starts_with('#') && light != dark, "{kind}");
        }
    }

    #[test]
    fn without_an_iteration_there_is_no_picture() {
        let mut trace = small(Origin::Simulated, 1, 0.4e-3);
        trace.spans.clear();
        assert_eq!(picture(&trace, "", ""), None);
    }
}
