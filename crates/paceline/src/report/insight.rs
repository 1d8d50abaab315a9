//! Explanation of a predicted iteration time: its limits, its critical path, and the link
//! utilisation.

use super::numbers::{Scale, fixed, percent_of};
use maud::{Markup, html};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::Cluster;
use paceline_sim::network::PhaseLatency;
use paceline_sim::{Details, ErrorBand, ExchangeStat, LayerStat, Outcome};

/// Details of a prediction beyond its timeline.
#[derive(Clone, Debug)]
pub(crate) struct Insight<'a> {
    /// The predicted iteration time.
    pub iteration: Seconds,
    /// Factors on it between which a measurement is expected.
    pub band: ErrorBand,
    /// Critical path, limits, bandwidth and memory.
    pub details: &'a Details,
    /// Memory of a device.
    pub capacity: Bytes,
}

impl<'a> Insight<'a> {
    /// The insight of a simulation; `None` if it ran without details.
    pub(crate) fn new(outcome: &'a Outcome, cluster: &Cluster) -> Option<Self> {
        Some(Self {
            iteration: outcome.iteration,
            band: outcome.error_band,
            details: outcome.details.as_ref()?,
            capacity: cluster.device.memory,
        })
    }
}

/// The iteration time without each of its costs in turn, and the prediction's error band.
pub(super) fn limits(insight: &Insight<'_>) -> Markup {
    let limits = insight.details.limits;
    let scale = Scale::of(insight.iteration);
    let whole = insight.iteration;
    let (low, high) = (insight.band.low, insight.band.high);
    html! {
        p {
            @if insight.band.runs == 0 {
                "No runs of this kind were measured; others took " (fixed::<2>(low)) " to "
                (fixed::<2>(high)) " times what is predicted for them: expect "
            } @else {
                "By " (insight.band.runs) " measured runs of this kind, four of five take "
                (fixed::<2>(low)) " to " (fixed::<2>(high)) " times what is predicted: expect "
            }
            strong { (scale.show(whole * low)) " to " (scale.full(whole * high)) } "."
        }
        table.bars {
            caption {
                "The iteration with one of its costs taken away, in " (scale.unit) ". What each would \
                 save does not add up: behind one, another may come to light."
            }
            thead {
                tr { th { "with" } th { "iteration" } th { "saves" } th {} th.bar {} }
            }
            tbody {
                @for (what, time) in [
                    ("everything as predicted", whole),
                    ("an infinitely fast network", limits.no_network),
                    ("infinitely fast computation", limits.no_compute),
                    ("no waiting for other ranks", limits.no_bubble),
                ] {
                    @let saved = (whole - time).max(Seconds::ZERO);
                    tr {
                        th { (what) }
                        td { (scale.show(time)) }
                        td { (scale.show(saved)) }
                        td { (percent_of(saved.0, whole.0)) }
                        (bar("m0", time.0 / whole.0))
                    }
                }
            }
        }
    }
}

/// The critical path by kind of op.
pub(super) fn critical_path(insight: &Insight<'_>) -> Markup {
    let path = &insight.details.critical_path;
    let scale = Scale::of(insight.iteration);
    html! {
        p {
            "From the end of the iteration back to its start, each op waited for the one before it: \
             on its lane, by a dependency, or on the other side of a message. These "
            (path.steps.len())
            " steps make up the iteration; speeding up anything else leaves it as it is."
        }
        table.bars {
            caption { "The critical path by kind, in " (scale.unit) "." }
            thead {
                tr { th { "kind" } th { "steps" } th { "time" } th { "share" } th.bar {} }
            }
            tbody {
                @for part in &path.parts {
                    tr {
                        th { i class=(part.kind) {} (part.name) }
                        td { (part.count) }
                        td { (scale.show(part.time)) }
                        td { (percent_of(part.time.0, insight.iteration.0)) }
                        (bar(part.kind.name(), part.time.0 / insight.iteration.0))
                    }
                }
            }
        }
    }
}

/// The bandwidth utilisation of each dimension of the cluster.
pub(super) fn bandwidth(insight: &Insight<'_>) -> Markup {
    let longest = insight.details.bandwidth.iter().map(|used| used.message).reduce(Seconds::max);
    let scale = Scale::of(longest.unwrap_or_default());
    html! {
        table.bars {
            caption {
                "What a device sends through each dimension of the cluster in an iteration, on \
                 average, against what its links could carry in that time. The last number is the \
                 average time of a message alone on its way, in " (scale.unit) "."
            }
            thead {
                tr {
                    th { "dimension" } th { "bytes" } th { "messages" } th { "each" } th { "used" }
                    th.bar {}
                }
            }
            tbody {
                @for used in &insight.details.bandwidth {
                    tr {
                        th { (used.dimension) }
                        td { (Bytes(used.bytes_per_device as u64)) }
                        td { (fixed::<0>(used.messages_per_device)) }
                        td { (scale.show(used.message)) }
                        td { (percent_of(used.utilisation, 1.0)) }
                        (bar("collective", used.utilisation))
                    }
                }
            }
        }
    }
}

/// Times of every layer: compute by pass, and its exchanges.
pub(super) fn layers(insight: &Insight<'_>) -> Markup {
    let all = &insight.details.layers;
    let scale = Scale::of(insight.iteration);
    let whole = |layer: &LayerStat| {
        layer.forward + layer.recompute + layer.input_gradient + layer.weight_gradient
    };
    let longest = all.iter().map(whole).fold(Seconds::ZERO, Seconds::max);
    html! {
        table.bars {
            caption {
                "The layers on the ranks that hold them, in " (scale.unit) ": forward passes with \
                 what is computed again, gradients for the input and for the weights, and the \
                 exchanges of the layer's activations and gradients, in all and as far as no \
                 compute hides them. A bucket's exchange counts for its layers by their parameters."
            }
            thead {
                tr {
                    th { "layer" } th { "forward" } th { "d input" } th { "d weights" }
                    th { "communication" } th { "exposed" } th.bar {}
                }
            }
            tbody {
                @for layer in all {
                    tr title=(layer.role) {
                        th { (layer.name) }
                        td { (scale.show(layer.forward + layer.recompute)) }
                        td { (scale.show(layer.input_gradient)) }
                        td { (scale.show(layer.weight_gradient)) }
                        td { (scale.show(layer.communication)) }
                        td { (scale.show(layer.exposed)) }
                        (bar("forward", whole(layer).0 / longest.0))
                    }
                }
            }
        }
    }
}

/// Every exchange by name, longest first.
pub(super) fn exchanges(insight: &Insight<'_>) -> Markup {
    let mut all: Vec<&ExchangeStat> = insight.details.exchanges.iter().collect();
    all.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
    let scale = Scale::of(insight.iteration);
    let longest = all.first().map_or(Seconds::ZERO, |exchange| exchange.time);
    let phases = |exchange: &ExchangeStat| {
        let one = |phase: &PhaseLatency| {
            let latency = Seconds(phase.message_latency_s);
            format!("{}: {latency}", phase.name)
        };
        exchange.phases.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    html! {
        table.bars {
            caption {
                "Exchanges by name, in " (scale.unit) ", and the latency of one message in each \
                 phase of a collective, alone on its links."
            }
            thead {
                tr {
                    th { "exchange" } th { "count" } th { "bytes" } th { "time" } th { "exposed" }
                    th { "a message" } th.bar {}
                }
            }
            tbody {
                @for exchange in all {
                    tr title=(exchange.role) {
                        th { (exchange.name) }
                        td { (exchange.count) }
                        td { (exchange.bytes) }
                        td { (scale.show(exchange.time)) }
                        td { (scale.show(exchange.exposed)) }
                        td { (phases(exchange)) }
                        (bar("collective", exchange.time.0 / longest.0))
                    }
                }
            }
        }
    }
}

/// The last cell of a table row: a share of a whole in its colour.
fn bar(class: &str, share: f64) -> Markup {
    let width = if share.is_finite() { share.clamp(0.0, 1.0) * 100.0 } else { 0.0 };
    html! {
        td.bar { div { i class=(class) style={ "width:" (fixed::<3>(width)) "%" } {} } }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use paceline_plan::trace::SpanKind;
    use paceline_sim::{CriticalPath, DimensionUse, Limits, MemoryCurve, MemoryPoint, PathPart};

    /// Two kinds on the path, one dimension, one role.
    pub(in crate::report) fn details() -> Details {
        let part = |name: &str, kind, time| PathPart {
            name: name.to_owned(),
            kind,
            count: 3,
            time: Seconds(time),
        };
        let point = |at, bytes| MemoryPoint { at: Seconds(at), bytes: Bytes(bytes) };
        Details {
            critical_path: CriticalPath {
                steps: Vec::new(),
                parts: vec![
                    part("forward", SpanKind::Forward, 0.75),
                    part("all_reduce <tp>", SpanKind::Collective, 0.25),
                ],
            },
            limits: Limits {
                no_network: Seconds(0.75),
                no_compute: Seconds(0.25),
                no_bubble: Seconds(1.0),
                homogeneous: None,
            },
            bandwidth: vec![DimensionUse {
                dimension: "nv<link>".to_owned(),
                bytes_per_device: 1e9,
                messages_per_device: 12.0,
                message: Seconds(1e-5),
                utilisation: 0.125,
            }],
            memory: vec![MemoryCurve {
                role: "stage <0>".to_owned(),
                persistent: Bytes(100),
                planned: Bytes(400),
                points: vec![point(0.0, 100), point(0.5, 300), point(0.9, 100)],
            }],
            layers: vec![LayerStat {
                name: "blocks.<0>".to_owned(),
                role: "stage <0>".to_owned(),
                forward: Seconds(0.25),
                weight_gradient: Seconds(0.125),
                ..LayerStat::default()
            }],
            exchanges: vec![ExchangeStat {
                name: "all_reduce <grad>".to_owned(),
                role: "stage <0>".to_owned(),
                count: 2,
                bytes: Bytes(1 << 20),
                time: Seconds(0.5),
                exposed: Seconds(0.25),
                phases: vec![PhaseLatency {
                    name: "all_gather in nv<link>".to_owned(),
                    messages_per_rank: 7.0,
                    message_latency_s: 1e-5,
                }],
            }],
        }
    }

    pub(in crate::report) fn insight(details: &Details) -> Insight<'_> {
        let band = ErrorBand { low: 0.9, high: 1.2, runs: 0 };
        Insight { iteration: Seconds(1.0), band, details, capacity: Bytes(1000) }
    }

    #[test]
    fn bars_and_savings_follow_the_numbers() {
        let details = details();
        let insight = insight(&details);
        let out = limits(&insight).into_string();
        assert!(out.contains("<strong>0.900 to 1.200 s</strong>"), "{out}");
        assert!(out.contains("<td>0.750</td><td>0.250</td><td>25.0 %</td>"), "{out}");
        let out = critical_path(&insight).into_string();
        assert!(out.contains("<i class=\"collective\" style=\"width:25.000%\">"), "{out}");
        assert!(out.contains("all_reduce &lt;tp&gt;"));
        let out = layers(&insight).into_string();
        assert!(out.contains("<td>0.250</td><td>0.000</td><td>0.125</td>"), "{out}");
        assert!(out.contains("blocks.&lt;0&gt;") && out.contains("width:100.000%"), "{out}");
        let out = exchanges(&insight).into_string();
        assert!(out.contains("all_gather in nv&lt;link&gt;: 10.0 µs"), "{out}");
        let out = bandwidth(&insight).into_string();
        assert!(out.contains("width:12.500%") && out.contains("nv&lt;link&gt;"), "{out}");
    }

    #[test]
    fn an_iteration_of_no_time_can_be_drawn() {
        let details = details();
        let insight = Insight { iteration: Seconds::ZERO, ..insight(&details) };
        let out = limits(&insight).into_string() + &critical_path(&insight).into_string();
        assert!(!out.contains("NaN") && !out.contains("inf%"), "{out}");
    }
}
