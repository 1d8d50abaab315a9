//! The loss curve and the memory bars.

use super::numbers::{fixed, ticks};
use super::{LossCurve, MemoryRow};
use maud::{Markup, html};
use paceline_plan::units::Bytes;

/// A line chart of every iteration's loss, and the lowest loss that the data allows.
pub(super) fn loss(curve: &LossCurve) -> Markup {
    let chart = Chart::fit(curve);
    let missing = curve.losses.iter().filter(|l| !l.is_finite()).count();
    let before = f64::from(curve.before);
    let iterations = ticks(before + 1.0, before + chart.count, 8);
    html! {
        figure {
            svg.chart viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label="loss" {
                @for value in ticks(chart.low, chart.high, 5) {
                    @let y = chart.y(value);
                    path.gridline d={ "M" (LEFT) " " (fixed::<1>(y)) "H" (WIDTH - RIGHT) } {}
                    text.end x=(fixed::<1>(LEFT - 6.0)) y=(fixed::<1>(y + 3.5)) { (short(value)) }
                }
                @for iteration in iterations.into_iter().filter(|i| i.fract() == 0.0) {
                    @let x = chart.x(iteration - before - 1.0);
                    text.middle x=(fixed::<1>(x)) y=(HEIGHT - BOTTOM + 15.0) { (iteration) }
                }
                text.middle x=((LEFT + WIDTH - RIGHT) / 2.0) y=(HEIGHT - 3.0) { "iteration" }
                path.loss d=(chart.path(&curve.losses)) {}
                @if let Some(floor) = curve.floor.filter(|f| f.is_finite()) {
                    @let y = chart.y(floor);
                    path.floor d={ "M" (LEFT) " " (fixed::<1>(y)) "H" (fixed::<1>(WIDTH - RIGHT)) } {}
                    // Labelled on the left, where a falling curve is farthest away.
                    text x=(fixed::<1>(LEFT + 6.0)) y=(fixed::<1>(y - 5.0)) {
                        "floor " (short(floor))
                    }
                }
            }
            figcaption {
                "Loss by iteration"
                @if let Some(last) = curve.losses.iter().rev().find(|l| l.is_finite()) {
                    ", ending at " (short(f64::from(*last)))
                }
                "."
                @if curve.floor.is_some() {
                    " The dashed line is the lowest loss that the data allows."
                }
                @if missing > 0 {
                    " "
                    strong { (missing) " of " (curve.losses.len()) " losses are not finite" }
                    " and leave gaps."
                }
            }
        }
    }
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;
/// Maximum number of points drawn; more would be indistinguishable.
const POINTS: usize = 1500;

/// Scale of the loss chart.
struct Chart {
    low: f64,
    high: f64,
    count: f64,
}

impl Chart {
    fn fit(curve: &LossCurve) -> Self {
        let values = curve.losses.iter().map(|l| f64::from(*l)).chain(curve.floor);
        let (low, high) = values
            .filter(|v| v.is_finite())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        let count = curve.losses.len() as f64;
        if low > high {
            return Self { low: 0.0, high: 1.0, count };
        }
        let margin = 0.05 * (high - low) + if high == low { 0.5 } else { 0.0 };
        Self { low: low - margin, high: high + margin, count }
    }

    fn x(&self, index: f64) -> f64 {
        LEFT + (WIDTH - RIGHT - LEFT) * index / (self.count - 1.0).max(1.0)
    }

    fn y(&self, loss: f64) -> f64 {
        TOP + (HEIGHT - BOTTOM - TOP) * (self.high - loss) / (self.high - self.low)
    }

    /// The curve, interrupted at non-finite losses. A long one is thinned to the mean of each run.
    fn path(&self, losses: &[f32]) -> String {
        let run = losses.len().div_ceil(POINTS).max(1);
        let mut path = String::new();
        let mut pen_down = false;
        for (i, part) in losses.chunks(run).enumerate() {
            let mean = part.iter().map(|l| f64::from(*l)).sum::<f64>() / part.len() as f64;
            if mean.is_finite() {
                let x = self.x((i * run) as f64 + (part.len() - 1) as f64 / 2.0);
                let command = if pen_down { 'L' } else { 'M' };
                path += &format!("{command}{x:.1} {:.1}", self.y(mean));
            }
            pen_down = mean.is_finite();
        }
        path
    }
}

/// Up to four digits, without trailing zeros.
fn short(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e5).contains(&value.abs()) {
        return format!("{value:.2e}").replace('-', "−");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').replace('-', "−")
}

/// Maximum number of roles drawn.
const ROLES: usize = 32;
/// Number of colours in the style sheet for kinds of memory.
const COLOURS: usize = 8;

/// The planned bytes of each role by kind: numbers, and one stacked bar per role.
pub(super) fn memory(rows: &[MemoryRow]) -> Markup {
    let mut roles: Vec<&str> = Vec::new();
    let mut kinds: Vec<&str> = Vec::new();
    for row in rows {
        if !roles.contains(&row.role.as_str()) {
            roles.push(&row.role);
        }
        if !kinds.contains(&row.kind.as_str()) {
            kinds.push(&row.kind);
        }
    }
    let bytes = |role: &str, kind: &str| {
        let matching = rows.iter().filter(|r| r.role == role && r.kind == kind);
        Bytes(matching.fold(0, |sum: u64, r| sum.saturating_add(r.bytes.0)))
    };
    let total = |role: &str| {
        Bytes(kinds.iter().fold(0, |sum: u64, kind| sum.saturating_add(bytes(role, kind).0)))
    };
    let largest = roles.iter().map(|role| total(role).0).max().unwrap_or(0).max(1) as f64;
    let class = |kind: usize| format!("m{}", kind % COLOURS);
    html! {
        table.memory {
            caption {
                "Planned memory of a rank of each role, by what it holds."
                @if roles.len() > ROLES {
                    " " strong { (ROLES) " of " (roles.len()) " roles are shown." }
                }
            }
            thead {
                tr {
                    th { "role" }
                    @for (i, kind) in kinds.iter().enumerate() { th { i class=(class(i)) {} (kind) } }
                    th { "total" }
                    th.bar {}
                }
            }
            tbody {
                @for role in roles.iter().take(ROLES) {
                    tr {
                        th { (role) }
                        @for kind in &kinds { td { (bytes(role, kind)) } }
                        td { (total(role)) }
                        td.bar {
                            div {
                                @for (i, kind) in kinds.iter().enumerate() {
                                    @let size = bytes(role, kind);
                                    @let width = fixed::<3>(100.0 * size.as_f64() / largest);
                                    i class=(class(i)) style={ "width:" (width) "%" }
                                        title={ (kind) ": " (size) } {}
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(losses: Vec<f32>, floor: Option<f64>) -> String {
        let out = loss(&LossCurve { before: 0, losses, floor }).into_string();
        assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
        out
    }

    #[test]
    fn a_loss_that_is_not_finite_breaks_the_line() {
        let html = drawn(vec![3.0, 2.0, f32::NAN, 1.0], Some(0.5));
        let path = html.split("class=\"loss\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!((path.matches('M').count(), path.matches('L').count()), (2, 1));
        assert!(html.contains("1 of 4 losses are not finite") && html.contains("floor 0.5"));
        assert!(html.contains("ending at 1."));
    }

    /// A run resumed after 1,000 iterations shows only its own iterations.
    #[test]
    fn iterations_count_from_the_runs_very_start() {
        let curve = LossCurve { before: 1000, losses: vec![2.0; 101], floor: None };
        let out = loss(&curve).into_string();
        assert!(out.contains(">1020</text>") && out.contains(">1100</text>"), "{out}");
        assert!(!out.contains(">20</text>"), "{out}");
    }

    #[test]
    fn any_curve_can_be_drawn() {
        for losses in [vec![], vec![2.0], vec![2.0; 3], vec![f32::NAN], vec![f32::MAX, f32::MIN]] {
            drawn(losses, None);
        }
        drawn(vec![1.0], Some(f64::INFINITY));
        let long = drawn((0..100_000).map(|i| 1.0 / (1.0 + i as f32)).collect(), None);
        assert!(long.len() < 40_000, "{}", long.len());
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [0.0, 2.5, -0.25, 1e-9, 12345.0, 1e300].map(short).into();
        assert_eq!(shown, ["0", "2.5", "−0.25", "1.00e−9", "12345", "1.00e300"]);
    }

    #[test]
    fn bars_are_as_long_as_their_bytes() {
        let row = |role: &str, kind: &str, bytes| {
            let (role, kind) = (role.to_owned(), kind.to_owned());
            MemoryRow { role, kind, bytes: Bytes(bytes) }
        };
        let rows = [row("a", "p", 300), row("a", "g", 100), row("b", "g", 100), row("a", "p", 0)];
        let out = memory(&rows).into_string();
        for width in ["width:75.000%", "width:25.000%", "width:0.000%"] {
            assert!(out.contains(width), "{width}\n{out}");
        }
        assert!(out.contains("<td>400 B</td>"));
        let vast = memory(&[row("a", "p", u64::MAX), row("a", "g", u64::MAX)]).into_string();
        assert!(!vast.contains("NaN"));
    }
}
