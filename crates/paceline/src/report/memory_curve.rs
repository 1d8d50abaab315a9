//! Memory of ranks over an iteration, drawn as a step curve.

use super::insight::Insight;
use super::numbers::{Scale, fixed, ticks};
use maud::{Markup, html};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::MemoryCurve;

/// Maximum number of roles drawn: the number of colours.
const ROLES: usize = 8;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;

/// One line per role, and a dashed one for a device's memory if it is near.
pub(super) fn figure(insight: &Insight<'_>) -> Markup {
    let curves = &insight.details.memory;
    let shown = chosen(curves);
    let highest = shown.iter().map(|curve| curve.peak().0).max().unwrap_or(0);
    // The capacity of a nearly empty device would flatten the curves.
    let capacity = Some(insight.capacity).filter(|bytes| bytes.0 / 2 < highest);
    let top = highest.max(capacity.map_or(0, |bytes| bytes.0));
    let chart = Chart { end: insight.iteration.0, top: Bytes(top).as_f64().max(1.0) * 1.05 };
    html! {
        figure {
            svg.chart viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img"
                aria-label="memory over time" {
                (chart.axes())
                @if let Some(bytes) = capacity {
                    @let y = chart.y(bytes.as_f64());
                    path.floor d={ "M" (LEFT) " " (fixed::<1>(y)) "H" (fixed::<1>(WIDTH - RIGHT)) } {}
                    text x=(fixed::<1>(LEFT + 6.0)) y=(fixed::<1>(y - 5.0)) {
                        "a device has " (bytes)
                    }
                }
                @for (index, curve) in shown.iter().enumerate() {
                    path class={ "curve m" (index) } d=(chart.path(curve)) {
                        title { (curve.role) ": " (curve.peak()) " at most" }
                    }
                }
            }
            p.legend {
                @for (index, curve) in shown.iter().enumerate() {
                    span { i class={ "m" (index) } {} (curve.role) } " "
                }
            }
            figcaption {
                "Memory of a rank of each role over one iteration: what is always there, activations \
                 from when they are first written until they are freed, and scratch memory while it \
                 is used."
                @if shown.len() < curves.len() {
                    " "
                    strong { (shown.len()) " of " (curves.len()) " roles are drawn" }
                    ", at even distances."
                }
            }
        }
    }
}

/// All roles, or an evenly spaced selection that includes the first and the last.
fn chosen(curves: &[MemoryCurve]) -> Vec<&MemoryCurve> {
    let count = curves.len().min(ROLES);
    (0..count).map(|i| &curves[i * (curves.len() - 1) / (count - 1).max(1)]).collect()
}

struct Chart {
    /// Duration of the iteration in seconds.
    end: f64,
    /// Bytes at the upper edge.
    top: f64,
}

impl Chart {
    fn x(&self, time: f64) -> f64 {
        let share = if self.end > 0.0 { (time / self.end).clamp(0.0, 1.0) } else { 0.0 };
        LEFT + (WIDTH - RIGHT - LEFT) * share
    }

    fn y(&self, bytes: f64) -> f64 {
        TOP + (HEIGHT - BOTTOM - TOP) * (1.0 - bytes / self.top)
    }

    fn axes(&self) -> Markup {
        // Steps of 1, 2 or 5 in the binary unit of the upper edge.
        let unit = 1024f64.powi((self.top.log2() / 10.0).floor().max(0.0) as i32);
        let scale = Scale::of(Seconds(self.end));
        let times = ticks(0.0, self.end, 8);
        let scale = match times.as_slice() {
            [first, second, ..] => scale.for_steps(Seconds(second - first)),
            _ => scale,
        };
        html! {
            @for value in ticks(0.0, self.top / unit, 5) {
                @let y = self.y(value * unit);
                path.gridline d={ "M" (LEFT) " " (fixed::<1>(y)) "H" (WIDTH - RIGHT) } {}
                text.end x=(fixed::<1>(LEFT - 6.0)) y=(fixed::<1>(y + 3.5)) {
                    (short(Bytes((value * unit) as u64)))
                }
            }
            @for time in times {
                text.middle x=(fixed::<1>(self.x(time))) y=(HEIGHT - BOTTOM + 15.0) {
                    (scale.full(Seconds(time)))
                }
            }
        }
    }

    fn path(&self, curve: &MemoryCurve) -> String {
        let mut path = String::new();
        for point in &curve.points {
            let (x, y) = (self.x(point.at.0), self.y(point.bytes.as_f64()));
            let step =
                if path.is_empty() { format!("M{x:.1} {y:.1}") } else { format!("H{x:.1}V{y:.1}") };
            path += &step;
        }
        path + &format!("H{:.1}", self.x(self.end))
    }
}

/// Formats a size without unnecessary digits: `20 GiB`, not `20.0 GiB`.
fn short(bytes: Bytes) -> String {
    let text = bytes.to_string();
    let Some((number, unit)) = text.split_once(' ') else { return text };
    let number = if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    };
    format!("{number} {unit}")
}

#[cfg(test)]
mod tests {
    use super::super::insight::tests::{details, insight};
    use super::*;
    use paceline_sim::MemoryPoint;

    fn drawn(insight: &Insight<'_>) -> String {
        let out = figure(insight).into_string();
        assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
        out
    }

    #[test]
    fn steps_are_drawn_where_they_happen() {
        let details = details();
        let html = drawn(&insight(&details));
        let path = html.split("class=\"curve m0\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        // 680 wide from 64, 206 high from 10, the edge at 105 % of 300 bytes.
        assert_eq!(path, "M64.0 150.6H404.0V19.8H676.0V150.6H744.0");
        assert!(!html.contains("a device has"), "it is more than twice as large");
        assert!(html.contains("stage &lt;0&gt;: 300 B at most"));
        let full = Insight { capacity: Bytes(500), ..insight(&details) };
        assert!(drawn(&full).contains("a device has 500 B"));
    }

    #[test]
    fn of_many_roles_some_are_drawn() {
        let mut details = details();
        let one = details.memory[0].clone();
        details.memory =
            (0..20).map(|i| MemoryCurve { role: format!("role {i}."), ..one.clone() }).collect();
        let html = drawn(&insight(&details));
        assert_eq!(html.matches("class=\"curve").count(), ROLES);
        assert!(html.contains("8 of 20 roles are drawn"));
        assert!(html.contains("role 0.") && html.contains("role 19."));
    }

    #[test]
    fn anything_can_be_drawn() {
        let mut details = details();
        details.memory[0].points = vec![MemoryPoint { at: Seconds(1e300), bytes: Bytes(u64::MAX) }];
        drawn(&insight(&details));
        drawn(&Insight { iteration: Seconds::ZERO, ..insight(&details) });
        details.memory.clear();
        drawn(&insight(&details));
    }

    #[test]
    fn axes_have_no_digits_to_spare() {
        let shown = [20 << 30, 1536 << 20, 0, 300].map(|bytes| short(Bytes(bytes)));
        assert_eq!(shown, ["20 GiB", "1.5 GiB", "0 B", "300 B"]);
    }
}
