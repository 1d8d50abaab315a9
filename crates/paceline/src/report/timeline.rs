//! The timelines of a prediction and a measurement, stacked on one time scale.
//!
//! One steady iteration is drawn here, so that the page works without a script. The horizontal axis
//! is an SVG's `viewBox`, stretched to the width of the page. `view.js` zooms by changing it;
//! everything that must not stretch (labels, ticks) is overlaid with positions in percent.

use super::coarse::Coarse;
use super::numbers::{Scale, fixed, ticks};
use maud::{Markup, html};
use paceline_plan::ids::Rank;
use paceline_plan::trace::{Origin, Span, SpanKind, Trace, Window};
use paceline_plan::units::Seconds;
use std::collections::{BTreeMap, BTreeSet};

/// The traces that are present; nothing if neither has an iteration.
pub(super) fn figure(simulated: Option<&Trace>, measured: Option<&Trace>) -> Markup {
    let traces: Vec<&Trace> = [simulated, measured].into_iter().flatten().collect();
    let plots: Vec<Plot<'_>> = traces.iter().filter_map(|trace| Plot::new(trace)).collect();
    let too_dense = |plot: &Plot<'_>| {
        let ranks = plot.trace.ranks().into_iter().collect();
        plot.steady_spans(&ranks) > SPANS / plots.len()
    };
    if !plots.iter().any(too_dense) {
        return draw(&plots);
    }
    let joined: Vec<Coarse> = traces.into_iter().map(Coarse::new).collect();
    let plots: Vec<Plot<'_>> = joined.iter().filter_map(Plot::of_runs).collect();
    draw(&plots)
}

fn draw(traces: &[Plot<'_>]) -> Markup {
    let Some(longest) = traces.iter().map(|p| p.window.length()).reduce(Seconds::max) else {
        return Markup::default();
    };
    let axis = Axis::new(longest);
    let rows = Rows::choose(traces);
    let drawn: Vec<Vec<&Span>> =
        traces.iter().map(|p| p.nearest(&rows, SPANS / traces.len())).collect();
    let reach = traces.iter().zip(&drawn).map(|(p, spans)| p.reach(&axis, spans));
    let (min, max) = reach.fold((0.0, axis.to), |a: (f64, f64), b| (a.0.min(b.0), a.1.max(b.1)));
    html! {
        figure.timeline tabindex="0" data-unit=(axis.unit) data-to=(axis.to)
            data-min=(fixed::<3>(min)) data-max=(fixed::<3>(max)) {
            (legend(&drawn))
            @for (plot, spans) in traces.iter().zip(&drawn) {
                (plot.draw(&axis, &rows, spans, (min, max)))
            }
            (caption(traces, &rows, &drawn))
        }
    }
}

/// Maximum number of spans drawn over both traces: with more, a browser cannot zoom smoothly.
const SPANS: usize = 20_000;
/// Maximum number of rows drawn.
const ROWS: usize = 96;
/// Drawing units for the longer of the two iterations.
const UNITS: f64 = 1000.0;
/// Minimum width for a label of two digits, as a share of the drawing's width.
const LABEL: f64 = 0.014;

/// The time scale shared by both plots.
struct Axis {
    /// Seconds per drawing unit.
    unit: f64,
    /// The right end of the initial view, in units.
    to: f64,
    scale: Scale,
}

impl Axis {
    fn new(longest: Seconds) -> Self {
        let unit = if longest.0 > 0.0 { longest.0 / UNITS } else { 1.0 };
        Self { unit, to: UNITS * 1.01, scale: Scale::of(longest) }
    }

    /// Converts a duration to drawing units.
    fn length(&self, time: Seconds) -> f64 {
        time.0 / self.unit
    }

    /// Converts a position to percent of the initial view.
    fn percent(&self, x: f64) -> f64 {
        100.0 * x / self.to
    }
}

/// A row of the drawing: one lane of one rank.
pub(super) struct RowSlot<'a> {
    pub(super) rank: Rank,
    pub(super) lane: &'a str,
    pub(super) top: f64,
    pub(super) height: f64,
    pub(super) first_of_rank: bool,
}

/// The rows shared by both plots, so that they can be compared by position.
pub(super) struct Rows<'a> {
    pub(super) places: Vec<RowSlot<'a>>,
    pub(super) height: f64,
    /// Number of ranks drawn, and number of ranks in the traces.
    ranks: (usize, usize),
}

/// Sort key of a lane: compute lanes first, then in the order of the traces.
type Lane<'a> = (bool, usize, &'a str);

/// The lanes of every rank, in both traces.
fn lanes_of<'a>(plots: &[Plot<'a>]) -> BTreeMap<Rank, BTreeSet<Lane<'a>>> {
    let spans = || plots.iter().flat_map(|p| p.trace.spans.iter().map(|s| (p.trace.lane(s), s)));
    let computing: BTreeSet<&str> =
        spans().filter(|(_, s)| s.kind.is_compute()).map(|(lane, _)| lane).collect();
    let mut order: BTreeMap<&str, usize> = BTreeMap::new();
    for lane in plots.iter().flat_map(|p| &p.trace.lanes) {
        let next = order.len();
        order.entry(lane).or_insert(next);
    }
    let mut lanes: BTreeMap<Rank, BTreeSet<Lane<'a>>> = BTreeMap::new();
    for (lane, span) in spans() {
        let place = order.get(lane).copied().unwrap_or(order.len());
        lanes.entry(span.rank).or_default().insert((!computing.contains(lane), place, lane));
    }
    lanes
}

impl<'a> Rows<'a> {
    /// All lanes of as many ranks as can be drawn. If there are too many, ranks are evenly spaced:
    /// neighbours mostly do the same, distant ones belong to different stages.
    pub(super) fn choose(plots: &[Plot<'a>]) -> Self {
        let lanes = lanes_of(plots);
        let all: Vec<Rank> = lanes.keys().copied().collect();
        let fits = |chosen: &[Rank]| {
            let rows: usize = chosen.iter().map(|rank| lanes[rank].len()).sum();
            let set: BTreeSet<Rank> = chosen.iter().copied().collect();
            let few = |p: &Plot<'_>| p.steady_spans(&set) <= SPANS / plots.len();
            rows <= ROWS && plots.iter().all(few)
        };
        let mut chosen = all.clone();
        while chosen.len() > 1 && !fits(&chosen) {
            let count = chosen.len().div_ceil(2);
            chosen = (0..count).map(|i| all[i * all.len() / count]).collect();
        }
        let mut top = 0.0;
        let mut places = Vec::new();
        for &rank in &chosen {
            for (i, &(wire, _, lane)) in lanes[&rank].iter().enumerate() {
                let height = if wire { 11.0 } else { 18.0 };
                places.push(RowSlot { rank, lane, top, height, first_of_rank: i == 0 });
                top += height + 1.0;
            }
            top += 5.0;
        }
        Self { places, height: (top - 5.0).max(1.0), ranks: (chosen.len(), all.len()) }
    }

    pub(super) fn find(&self, rank: Rank, lane: &str) -> Option<&RowSlot<'a>> {
        let first = self.places.partition_point(|p| p.rank < rank);
        self.places[first..].iter().take_while(|p| p.rank == rank).find(|p| p.lane == lane)
    }
}

/// A trace with the iteration of the initial view.
pub(super) struct Plot<'a> {
    pub(super) trace: &'a Trace,
    pub(super) window: Window,
    /// Present if spans represent runs of ops.
    pub(super) runs: Option<&'a Coarse>,
}

impl<'a> Plot<'a> {
    fn new(trace: &'a Trace) -> Option<Self> {
        Some(Self { trace, window: trace.steady_window()?, runs: None })
    }

    pub(super) fn of_runs(runs: &'a Coarse) -> Option<Self> {
        Some(Self { runs: Some(runs), ..Self::new(&runs.trace)? })
    }

    /// Distance of a span from the iteration of the initial view; zero if they overlap.
    fn distance(&self, span: &Span) -> f64 {
        let before = self.window.start.0 - span.end.0;
        let after = span.start.0 - self.window.end.0;
        before.max(after).max(0.0)
    }

    fn steady_spans(&self, ranks: &BTreeSet<Rank>) -> usize {
        let inside = |s: &&Span| self.distance(s) == 0.0 && ranks.contains(&s.rank);
        self.trace.spans.iter().filter(inside).count()
    }

    /// The spans to draw: those of the shown rows that are nearest to the steady iteration.
    fn nearest(&self, rows: &Rows<'_>, limit: usize) -> Vec<&'a Span> {
        let shown = |s: &&Span| rows.find(s.rank, self.trace.lane(s)).is_some();
        let mut spans: Vec<&Span> = self.trace.spans.iter().filter(shown).collect();
        spans.sort_by(|a, b| self.distance(a).total_cmp(&self.distance(b)));
        spans.truncate(limit);
        spans.sort_by(|a, b| a.start.0.total_cmp(&b.start.0));
        spans
    }

    /// Start and end of the drawn spans, in units.
    fn reach(&self, axis: &Axis, spans: &[&Span]) -> (f64, f64) {
        let at = |time: Seconds| axis.length(time - self.window.start);
        spans.iter().fold((0.0, 0.0), |(min, max): (f64, f64), s| {
            (min.min(at(s.start)), max.max(at(s.end)))
        })
    }

    fn draw(
        &self,
        axis: &Axis,
        rows: &Rows<'_>,
        spans: &[&Span],
        (min, max): (f64, f64),
    ) -> Markup {
        let origin = self.trace.origin;
        let height = rows.height;
        let end = axis.length(self.window.length());
        html! {
            div.plot data-origin=(origin.name()) {
                h3 {
                    (heading(origin)) " "
                    small {
                        (axis.scale.full(self.window.length())) ", iteration " (self.window.iteration)
                    }
                }
                (row_names(rows))
                div.field style={ "height:" (height) "px" } {
                    svg viewBox={ "0 0 " (axis.to) " " (height) } preserveAspectRatio="none"
                        role="img" aria-label={ (heading(origin)) " timeline" } {
                        @for place in &rows.places {
                            rect.track x=(fixed::<3>(min)) y=(place.top)
                                width=(fixed::<3>(max - min)) height=(place.height) {}
                        }
                        @for span in spans.iter().filter_map(|span| self.span(axis, rows, span)) {
                            (span)
                        }
                        // Spans outside the steady iteration stay visible, but are dimmed.
                        @for (from, to) in [(min, 0.0), (end, max)] {
                            rect.veil x=(fixed::<3>(from)) y="0"
                                width=(fixed::<3>((to - from).max(0.0))) height=(height) {}
                        }
                        path.bounds d={ "M0 0V" (height) "M" (fixed::<3>(end)) " 0V" (height) } {}
                    }
                    (self.labels(axis, rows, spans))
                }
                (ticks_below(axis))
            }
        }
    }

    fn span(&self, axis: &Axis, rows: &Rows<'_>, span: &Span) -> Option<Markup> {
        let place = rows.find(span.rank, self.trace.lane(span))?;
        let since = span.start - self.window.start;
        let filled = Some(self.runs.map_or(1.0, |runs| runs.filled(span))).filter(|f| *f < 1.0);
        let shown = span.iteration == self.window.iteration && span.kind != SpanKind::Wait;
        Some(html! {
            rect class=(span.kind) x=(fixed::<4>(axis.length(since))) y=(place.top)
                width=(fixed::<4>(axis.length(span.duration()).max(0.0))) height=(place.height)
                fill-opacity=[filled.map(|filled| fixed::<2>(filled.max(0.05)))]
                data-op=[shown.then(|| format!("{}.{}", span.rank, span.op))]
                data-m=[span.microbatch.filter(|_| labelled(span.kind))] {
                title {
                    (self.trace.name(span)) "\n" (words(span.kind))
                    @if let Some(microbatch) = span.microbatch { ", microbatch " (microbatch) }
                    ", iteration " (span.iteration) "\nrank " (span.rank) ", " (place.lane)
                    "\nfrom " (axis.scale.full(since)) ", for " (span.duration())
                }
            }
        })
    }

    /// Microbatch numbers on the spans that are wide enough in the initial view.
    fn labels(&self, axis: &Axis, rows: &Rows<'_>, spans: &[&Span]) -> Markup {
        let label = |span: &Span| {
            let microbatch = span.microbatch.filter(|_| labelled(span.kind))?;
            let place = rows.find(span.rank, self.trace.lane(span))?;
            let start = axis.length(span.start - self.window.start);
            let width = axis.length(span.duration());
            let shown = width >= LABEL * axis.to && start >= 0.0 && start + width <= axis.to;
            let (left, wide) = (fixed::<3>(axis.percent(start)), fixed::<3>(axis.percent(width)));
            let (top, height) = (place.top, place.height);
            let style = format!("left:{left}%;width:{wide}%;top:{top}px;line-height:{height}px");
            shown.then(|| html! { i style=(style) { (microbatch) } })
        };
        html! { div.labels { @for label in spans.iter().filter_map(|span| label(span)) { (label) } } }
    }
}

/// Name of a trace's origin in headings and tables.
pub(super) fn heading(origin: Origin) -> &'static str {
    match origin {
        Origin::Simulated => "Predicted",
        Origin::Measured => "Measured",
    }
}

/// Returns true if a span of this kind shows its microbatch number: those of the schedule.
pub(super) fn labelled(kind: SpanKind) -> bool {
    use SpanKind::{Backward, BackwardInput, BackwardWeight, Forward, Recompute};
    matches!(kind, Forward | Backward | BackwardInput | BackwardWeight | Recompute)
}

/// A kind's name as prose.
pub(super) fn words(kind: SpanKind) -> String {
    kind.name().replace('_', " ")
}

fn legend(drawn: &[Vec<&Span>]) -> Markup {
    let present: BTreeSet<SpanKind> = drawn.iter().flatten().map(|s| s.kind).collect();
    html! {
        p.legend {
            @for kind in SpanKind::ALL.into_iter().filter(|k| present.contains(k)) {
                span { i class=(kind) {} (words(kind)) } " "
            }
        }
    }
}

fn row_names(rows: &Rows<'_>) -> Markup {
    html! {
        div.names style={ "height:" (rows.height) "px" } {
            @for place in &rows.places {
                div style={ "top:" (place.top) "px;line-height:" (place.height) "px" } {
                    @if place.first_of_rank { b { "rank " (place.rank) } }
                    span { (place.lane) }
                }
            }
        }
    }
}

fn ticks_below(axis: &Axis) -> Markup {
    let ticks = ticks(0.0, axis.to * axis.unit, 8);
    let scale = match ticks.as_slice() {
        [first, second, ..] => axis.scale.for_steps(Seconds(second - first)),
        _ => axis.scale,
    };
    let at = |tick: f64| axis.percent(axis.length(Seconds(tick)));
    html! {
        div.axis {
            // The label of a later tick would be cut off.
            @for tick in ticks.into_iter().take_while(|tick| at(*tick) <= 96.0) {
                span style={ "left:" (fixed::<3>(at(tick))) "%" } { (scale.full(Seconds(tick))) }
            }
        }
    }
}

fn caption(plots: &[Plot<'_>], rows: &Rows<'_>, drawn: &[Vec<&Span>]) -> Markup {
    let (shown, all): (usize, usize) =
        (drawn.iter().map(Vec::len).sum(), plots.iter().map(|p| p.trace.spans.len()).sum());
    html! {
        figcaption {
            "One steady iteration, from its first op on any rank to the next iteration’s first. \
             Numbers are microbatches."
            @if plots.iter().any(|plot| plot.runs.is_some()) {
                " " strong { "Neighbouring ops of one microbatch and pass are drawn as one" }
                ", paler the less of it they fill; a trace for Perfetto has each of them."
            }
            @if rows.ranks.0 < rows.ranks.1 {
                " " strong { (rows.ranks.0) " of " (rows.ranks.1) " ranks are drawn" }
                ", at even distances."
            }
            @if shown < all {
                " " strong { (shown) " of " (all) " spans are drawn" }
                ", the nearest to this iteration."
            }
            span.hint hidden {
                " Drag across a range to zoom into it; click, then turn the wheel to zoom; arrow keys \
                 or Shift and drag move; Esc or a double click returns."
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::small;

    fn draw(simulated: Option<&Trace>, measured: Option<&Trace>) -> String {
        figure(simulated, measured).into_string()
    }

    #[test]
    fn both_plots_share_rows_and_scale() {
        let simulated = small(Origin::Simulated, 2, 0.4e-3);
        let mut measured = small(Origin::Measured, 2, 0.6e-3);
        measured.lanes.push("extra".to_owned());
        for span in measured.spans.iter_mut().filter(|s| s.rank == Rank(1) && s.op == 1) {
            span.lane = 2;
        }
        let html = draw(Some(&simulated), Some(&measured));
        let names: Vec<&str> = html
            .split("<div class=\"names\"")
            .skip(1)
            .map(|p| p.split("</div></div>").next().unwrap())
            .collect();
        assert_eq!(names.len(), 2);
        assert_eq!(names[0], names[1]);
        assert_eq!(names[0].matches("extra").count(), 1);
        // 0.4 ms and 0.6 ms of an iteration of 1 ms.
        assert!(html.contains("width=\"400.0000\"") && html.contains("width=\"600.0000\""));
    }

    #[test]
    fn what_is_too_much_to_draw_is_said() {
        let many = small(Origin::Measured, 200, 0.4e-3);
        let html = draw(None, Some(&many));
        assert!(html.contains("25 of 200 ranks are drawn"), "{}", &html[html.len() - 900..]);
        assert!(html.matches("<title>").count() <= SPANS);

        let mut long = small(Origin::Measured, 1, 0.4e-3);
        let one = long.spans[0];
        long.spans.extend((0..30_000).map(|i| {
            let start = Seconds(1.0 + f64::from(i));
            Span { start, end: start, iteration: 1, ..one }
        }));
        let html = draw(Some(&long), None);
        assert!(html.contains(&format!("20000 of {} spans", long.spans.len())));
    }

    #[test]
    fn crowded_traces_are_drawn_with_ops_joined() {
        let mut too_dense = small(Origin::Simulated, 2, 0.4e-3);
        let shown = too_dense.steady_window().unwrap().iteration;
        let one = *too_dense.spans.iter().find(|span| span.iteration == shown).unwrap();
        let count = SPANS as u32;
        too_dense.spans.extend((0..count).map(|i| {
            let start = one.start + one.duration() * (f64::from(i) / f64::from(count));
            Span { start, end: start + one.duration() * (1.0 / f64::from(count)), op: 7 + i, ..one }
        }));
        let html = draw(Some(&too_dense), None);
        assert!(html.contains("drawn as one") && !html.contains("spans are drawn"));
        assert!(html.matches("<title>").count() < 100, "{}", html.matches("<title>").count());
    }

    #[test]
    fn absurd_times_do_not_stop_the_drawing() {
        let mut trace = small(Origin::Measured, 1, 0.4e-3);
        for (span, time) in trace.spans.iter_mut().zip([f64::NAN, f64::INFINITY, 1e300, -1e300]) {
            span.end = Seconds(time);
        }
        draw(Some(&trace), None);
        for span in &mut trace.spans {
            (span.start, span.end) = (Seconds::ZERO, Seconds::ZERO);
        }
        assert!(draw(None, Some(&trace)).contains("class=\"plot\""));
    }
}
