//! Export to the Chrome trace event format, which Perfetto reads.

use super::{Span, Trace};
use crate::units::Seconds;
use serde::Serialize;
use std::collections::BTreeSet;

/// Exports the trace as Chrome trace events: one process per rank, one thread per lane.
pub fn to_perfetto(trace: &Trace) -> String {
    let processes = |rank: u32| u64::from(rank);
    write(&[Part { trace, offset: Seconds::ZERO - first(trace), pid: &processes }])
}

/// Exports both traces to one file, each rank's simulation directly above its measurement, with the
/// steady iterations aligned.
pub fn to_perfetto_with(simulated: &Trace, measured: &Trace) -> String {
    let lead = |trace: &Trace| {
        trace.steady_window().map_or(Seconds::ZERO, |window| window.start - first(trace))
    };
    let aligned = lead(simulated).max(lead(measured));
    let offset = |trace| aligned - lead(trace) - first(trace);
    write(&[
        Part { trace: simulated, offset: offset(simulated), pid: &|rank| 2 * u64::from(rank) },
        Part { trace: measured, offset: offset(measured), pid: &|rank| 2 * u64::from(rank) + 1 },
    ])
}

/// A trace, its time offset, and the mapping from ranks to process ids.
struct Part<'a> {
    trace: &'a Trace,
    offset: Seconds,
    pid: &'a dyn Fn(u32) -> u64,
}

#[derive(Serialize)]
struct File<'a> {
    #[serde(rename = "displayTimeUnit")]
    unit: &'static str,
    #[serde(rename = "traceEvents")]
    events: Vec<Event<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Event<'a> {
    /// Name or sort order of a process or thread.
    Metadata { ph: &'static str, name: &'static str, pid: u64, tid: u8, args: Label },
    /// A span, in microseconds as the format requires.
    Complete {
        ph: &'static str,
        name: &'a str,
        cat: &'static str,
        pid: u64,
        tid: u8,
        ts: f64,
        dur: f64,
        args: Place,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Label {
    Name(String),
    SortIndex(u64),
}

#[derive(Serialize)]
struct Place {
    iteration: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    microbatch: Option<u32>,
    op: u32,
}

fn write(parts: &[Part<'_>]) -> String {
    let mut events = Vec::new();
    for part in parts {
        metadata(part, &mut events);
        events.extend(part.trace.spans.iter().map(|span| complete(part, span)));
    }
    let file = File { unit: "ms", events };
    serde_json::to_string(&file).expect("strings and numbers always have a JSON form")
}

/// Adds names and sort orders of the processes and threads of a part.
fn metadata<'a>(part: &Part<'a>, events: &mut Vec<Event<'a>>) {
    let trace = part.trace;
    let mut push = |name, pid, tid, args| {
        events.push(Event::Metadata { ph: "M", name, pid, tid, args });
    };
    for rank in trace.ranks() {
        let pid = (part.pid)(rank.0);
        push("process_name", pid, 0, Label::Name(format!("rank {rank} {}", trace.origin.name())));
        push("process_sort_index", pid, 0, Label::SortIndex(pid));
    }
    let threads: BTreeSet<_> = trace.spans.iter().map(|s| (s.rank, s.lane)).collect();
    for (rank, lane) in threads {
        let pid = (part.pid)(rank.0);
        let name = trace.lanes.get(usize::from(lane)).cloned().unwrap_or_else(|| "?".to_owned());
        push("thread_name", pid, lane, Label::Name(name));
        push("thread_sort_index", pid, lane, Label::SortIndex(lane.into()));
    }
}

fn complete<'a>(part: &Part<'a>, span: &Span) -> Event<'a> {
    Event::Complete {
        ph: "X",
        name: part.trace.name(span),
        cat: span.kind.name(),
        pid: (part.pid)(span.rank.0),
        tid: span.lane,
        ts: (span.start + part.offset).0 * 1e6,
        dur: span.duration().0 * 1e6,
        args: Place { iteration: span.iteration, microbatch: span.microbatch, op: span.op },
    }
}

/// Start of the trace's first span, so that a file starts at zero for any clock.
fn first(trace: &Trace) -> Seconds {
    let first = trace.spans.iter().map(|s| s.start.0).fold(f64::INFINITY, f64::min);
    Seconds(if first.is_finite() { first } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Origin;
    use crate::trace::SpanKind::*;
    use crate::trace::tests::Sketch;
    use serde_json::Value;

    fn run(origin: Origin, clock: f64, iteration: f64) -> Trace {
        let mut sketch = Sketch::new(origin, 2);
        for i in 0..3u32 {
            let t = clock + iteration * f64::from(i);
            sketch = sketch.span((0, i, 0), ("compute", Forward, "F \"0\""), (t, t + 0.25)).span(
                (1, i, 0),
                ("wire", Recv, "R0"),
                (t + 0.25, t + 0.5),
            );
        }
        sketch.finish()
    }

    fn events(text: &str) -> Vec<Value> {
        let file: Value = serde_json::from_str(text).unwrap();
        file["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn spans_become_events_on_their_rank_and_lane() {
        let events = events(&to_perfetto(&run(Origin::Measured, 1000.0, 1.0)));
        let spans: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(spans.len(), 6);
        assert_eq!(spans[0]["name"], "F \"0\"");
        assert_eq!(spans[0]["cat"], "forward");
        assert_eq!((&spans[0]["ts"], &spans[0]["dur"]), (&0.0.into(), &0.25e6.into()));
        assert_eq!((&spans[3]["pid"], &spans[3]["tid"]), (&1.into(), &1.into()));
        assert_eq!(spans[5]["args"]["iteration"], 2);
        let named = |name: &str, pid: u64| {
            let found = events.iter().find(|e| e["name"] == name && e["pid"] == pid).unwrap();
            found["args"]["name"].as_str().unwrap().to_owned()
        };
        assert_eq!(named("process_name", 1), "rank 1 measured");
        assert_eq!(named("thread_name", 1), "wire");
    }

    #[test]
    fn two_traces_share_a_file_with_steady_iterations_aligned() {
        let (simulated, measured) =
            (run(Origin::Simulated, 0.0, 0.5), run(Origin::Measured, 77.0, 1.0));
        let events = events(&to_perfetto_with(&simulated, &measured));
        let processes: BTreeSet<_> = events
            .iter()
            .filter(|e| e["name"] == "process_name")
            .map(|e| (e["pid"].as_u64().unwrap(), e["args"]["name"].as_str().unwrap().to_owned()))
            .collect();
        let expected =
            ["rank 0 simulated", "rank 0 measured", "rank 1 simulated", "rank 1 measured"];
        assert!(processes.into_iter().map(|(_, name)| name).eq(expected));
        let steady: Vec<f64> = events
            .iter()
            .filter(|e| e["ph"] == "X" && e["args"]["iteration"] == 1 && e["cat"] == "forward")
            .map(|e| e["ts"].as_f64().unwrap())
            .collect();
        assert_eq!(steady, [1e6, 1e6]);
        assert!(events.iter().filter_map(|e| e["ts"].as_f64()).all(|ts| ts >= 0.0));
    }

    #[test]
    fn an_empty_trace_is_a_valid_file() {
        let empty = Sketch::new(Origin::Simulated, 0).finish();
        assert!(events(&to_perfetto(&empty)).is_empty());
    }
}
