//! One self-contained HTML page about a run: the prediction, the measurement and their differences.
//!
//! The page needs no network and no script; `view.js` only adds zooming and tooltips to the
//! drawings. `breakdown_table` prints the essentials in a terminal.

mod charts;
mod coarse;
mod insight;
mod memory_curve;
mod numbers;
mod page;
mod picture;
mod prediction_error;
mod rows;
mod staleness;
mod table;
mod timeline;

pub(crate) use insight::Insight;
pub(crate) use numbers::fixed;
pub(crate) use picture::picture;
pub(crate) use prediction_error::{ErrorSummary, error_summary};
pub(crate) use table::breakdown_table;

use paceline_plan::trace::Trace;
use paceline_plan::units::{Bytes, Seconds};

/// Contents of a page. Every part but the title may be missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReportInput<'a> {
    /// The page's heading.
    pub title: String,
    /// Key facts, shown in this order.
    pub summary: Vec<(String, String)>,
    /// Planned memory; the rows of one role are adjacent.
    pub memory: Vec<MemoryRow>,
    /// The loss curve of the run.
    pub loss: Option<LossCurve>,
    /// Staleness of gradients, with asynchronous servers.
    pub staleness: Option<StalenessBars>,
    /// The predicted trace.
    pub simulated: Option<&'a Trace>,
    /// Details of the prediction beyond its timeline.
    pub insight: Option<Insight<'a>>,
    /// The measured trace.
    pub measured: Option<&'a Trace>,
    /// Measured time of an iteration, over more of the run than was traced.
    pub iteration: Option<IterationTime>,
    /// Caveats about the results.
    pub warnings: Vec<String>,
}

/// Measured time of an iteration beside its prediction.
#[derive(Clone, Debug)]
pub(crate) struct IterationTime {
    /// The prediction, if there is one.
    pub predicted: Option<Seconds>,
    /// The median.
    pub measured: Seconds,
    /// The iterations of that median.
    pub over: String,
}

/// Memory of one kind of buffer on each rank of a role.
#[derive(Clone, Debug)]
pub(crate) struct MemoryRow {
    /// The role's name.
    pub role: String,
    /// Kind of buffer: parameters, gradients, activations and so on.
    pub kind: String,
    /// Bytes on each rank of the role.
    pub bytes: Bytes,
}

/// The loss of every iteration.
#[derive(Clone, Debug)]
pub(crate) struct LossCurve {
    /// Number of iterations done by an earlier run.
    pub before: u32,
    /// Losses in iteration order, starting after those.
    pub losses: Vec<f32>,
    /// The lowest loss that the data allows, if known.
    pub floor: Option<f64>,
}

/// Number of updates by others that gradients missed.
#[derive(Clone, Debug)]
pub(crate) struct StalenessBars {
    /// The mean.
    pub mean: f64,
    /// The maximum.
    pub max: u64,
    /// Maximum number of iterations by which the fastest replica led the slowest.
    pub ahead: u32,
    /// Number of updates that missed 0, 1, … others; the last bin also counts all that missed more.
    pub counts: Vec<u32>,
}

/// Renders the page as HTML.
pub(crate) fn render(input: &ReportInput<'_>) -> String {
    page::page(input).into_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use paceline_plan::ids::Rank;
    use paceline_plan::trace::{Origin, Span, SpanKind, TraceBuilder};

    /// Three iterations of a forward pass and an all_reduce on each rank.
    pub(crate) fn small(origin: Origin, ranks: u32, forward: f64) -> Trace {
        let mut builder = TraceBuilder::new(origin, "small", ranks);
        for rank in (0..ranks).map(Rank) {
            for iteration in 0..3 {
                let t = 1e-3 * f64::from(iteration);
                for (op, lane, kind, name, start, end) in [
                    (0, "compute", SpanKind::Forward, "F<0>", 0.0, forward),
                    (1, "grads", SpanKind::Collective, "all_reduce", 0.5e-3, 0.9e-3),
                ] {
                    let (lane, name) = (builder.lane(lane), builder.name(name));
                    let microbatch = (op == 0).then_some(7);
                    let (start, end) = (Seconds(t + start), Seconds(t + end));
                    builder.push(Span {
                        rank,
                        lane,
                        kind,
                        name,
                        microbatch,
                        iteration,
                        op,
                        start,
                        end,
                    });
                }
            }
        }
        builder.finish()
    }

    /// Checks that tags are closed in order, and returns those that stay open.
    pub(crate) fn left_open(markup: &str) -> Vec<String> {
        let mut open = Vec::new();
        for piece in markup.split('<').skip(1) {
            let tag = piece.split('>').next().unwrap();
            let name = tag.trim_start_matches('/').split([' ', '\n']).next().unwrap();
            if tag.starts_with('!') || ["meta", "br"].contains(&name) {
                continue;
            }
            assert!(!tag.ends_with('/'), "near <{tag}>");
            if tag.starts_with('/') {
                assert_eq!(open.pop().as_deref(), Some(name), "near <{tag}>");
            } else {
                open.push(name.to_owned());
            }
        }
        open
    }

    /// A browser need not guess where an element ends.
    fn assert_well_formed(html: &str) {
        let body = html.split("<script>").next().unwrap();
        assert_eq!(left_open(body), ["html", "body"], "left open before the script");
    }

    fn full<'a>(simulated: Option<&'a Trace>, measured: Option<&'a Trace>) -> ReportInput<'a> {
        let row = |role: &str, kind: &str, bytes| {
            let (role, kind) = (role.to_owned(), kind.to_owned());
            MemoryRow { role, kind, bytes: Bytes(bytes) }
        };
        ReportInput {
            title: "A <run> & its \"plan\"".to_owned(),
            summary: vec![("model".to_owned(), "<script>alert(1)</script>".to_owned())],
            memory: vec![row("stage 0", "parameters", 1 << 30), row("stage 0", "activations", 0)],
            loss: Some(LossCurve {
                before: 0,
                losses: vec![4.0, f32::NAN, 2.0, 1.0],
                floor: Some(0.5),
            }),
            staleness: Some(StalenessBars { mean: 0.5, max: 1, ahead: 0, counts: vec![1, 1] }),
            simulated,
            insight: None,
            measured,
            iteration: None,
            warnings: vec!["x < y".to_owned()],
        }
    }

    #[test]
    fn a_page_is_well_formed_and_loads_nothing_whatever_is_missing() {
        let simulated = small(Origin::Simulated, 2, 0.4e-3);
        let measured = small(Origin::Measured, 2, 0.6e-3);
        let empty = TraceBuilder::new(Origin::Measured, "", 0).finish();
        let traces = [None, Some(&simulated), Some(&measured), Some(&empty)];
        for (s, m) in traces.iter().flat_map(|&s| traces.iter().map(move |&m| (s, m))) {
            let html = render(&full(s, m));
            assert_well_formed(&html);
            for outside in ["http://", "https://", "src=", "@import", "url("] {
                assert!(!html.replace("http://www.w3.org", "").contains(outside), "{outside}");
            }
        }
        assert_well_formed(&render(&ReportInput::default()));
        let details = insight::tests::details();
        let insight = Some(insight::tests::insight(&details));
        let html = render(&ReportInput { insight, ..full(Some(&simulated), None) });
        assert_well_formed(&html);
        for heading in ["What limits this", "Critical path", "Bandwidth", "Memory over time"] {
            assert!(html.contains(&format!("<h2>{heading}</h2>")), "{heading}");
        }
    }

    #[test]
    fn text_is_escaped_everywhere() {
        let trace = small(Origin::Simulated, 1, 0.4e-3);
        let html = render(&full(Some(&trace), Some(&trace)));
        assert!(html.contains("<title>A &lt;run&gt; &amp; its &quot;plan&quot;</title>"));
        assert!(
            html.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && !html.contains("<script>a")
        );
        assert!(html.contains("x &lt; y") && html.contains("F&lt;0&gt;") && !html.contains("F<0>"));
    }

    #[test]
    fn both_traces_are_compared_and_drawn() {
        let simulated = small(Origin::Simulated, 2, 0.4e-3);
        let measured = small(Origin::Measured, 2, 0.6e-3);
        let html = render(&full(Some(&simulated), Some(&measured)));
        assert_eq!(html.matches("class=\"plot\"").count(), 2);
        // The predicted forward pass is 200 µs shorter than measured, of an iteration of 1 ms.
        assert!(html.contains("<td class=\"error\">−20.0 %</td>"));
        assert!(html.contains("microbatch 7"));
        assert!(html.contains("<li>F&lt;0&gt; (forward): 0.400 ms predicted, 0.600 ms measured"));
        let alone = render(&full(None, Some(&measured)));
        assert_eq!(alone.matches("class=\"plot\"").count(), 1);
        assert!(!alone.contains("Largest differences") && !alone.contains("was off"));
    }
}
