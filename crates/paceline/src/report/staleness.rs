//! Histogram of staleness: updates by others that gradients missed.

use super::StalenessBars;
use super::numbers::fixed;
use maud::{Markup, html};

/// One bar per number of missed updates, up to the last that occurred.
pub(super) fn histogram(bars: &StalenessBars) -> Markup {
    let last = bars.counts.iter().rposition(|count| *count > 0).unwrap_or(0);
    let all: u64 = bars.counts.iter().map(|count| u64::from(*count)).sum();
    let most = bars.counts.iter().copied().max().unwrap_or(0).max(1);
    let step = (WIDTH - 2.0 * SIDE) / (last + 1) as f64;
    html! {
        figure {
            svg.chart viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label="staleness" {
                @for (missed, count) in bars.counts[..=last].iter().enumerate() {
                    @let tall = (HEIGHT - TOP - BOTTOM) * f64::from(*count) / f64::from(most);
                    @let (x, y) = (SIDE + step * missed as f64, HEIGHT - BOTTOM - tall);
                    @let middle = fixed::<1>(x + step / 2.0);
                    @let share = 100.0 * f64::from(*count) / all.max(1) as f64;
                    // The last bar counts all that missed as many or more.
                    @let more = if missed + 1 == bars.counts.len() { "+" } else { "" };
                    rect.stale x=(fixed::<1>(x + 0.1 * step)) y=(fixed::<1>(y))
                        width=(fixed::<1>(0.8 * step)) height=(fixed::<1>(tall)) {
                        title { (count) " updates missed " (missed) (more) }
                    }
                    text.middle x=(middle) y=(fixed::<1>(y - 4.0)) { (fixed::<0>(share)) " %" }
                    text.middle x=(middle) y=(fixed::<1>(HEIGHT - BOTTOM + 15.0)) { (missed) (more) }
                }
                text.middle x=(fixed::<1>(WIDTH / 2.0)) y=(fixed::<1>(HEIGHT - 3.0)) {
                    "updates by others that a gradient missed"
                }
            }
            figcaption {
                "Staleness of " (all) " updates: " (fixed::<2>(bars.mean)) " missed on average, "
                (bars.max) " at most; the fastest replica was up to " (bars.ahead)
                " iterations ahead of the slowest."
            }
        }
    }
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 190.0;
const SIDE: f64 = 30.0;
const TOP: f64 = 18.0;
const BOTTOM: f64 = 34.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_tall_as_their_share_and_end_with_the_last() {
        let mut counts = vec![0; 17];
        (counts[0], counts[1], counts[3]) = (30, 60, 10);
        let draw = |counts: Vec<u32>| {
            let bars = StalenessBars { mean: 0.9, max: 3, ahead: 2, counts };
            histogram(&bars).into_string()
        };
        let html = draw(counts.clone());
        assert_eq!(html.matches("<rect").count(), 4, "none, one, two, three");
        assert!(html.contains("60 updates missed 1") && html.contains(">30 %<"));
        assert!(html.contains("height=\"138.0\"") && html.contains("height=\"69.0\""), "{html}");
        counts[16] = 1;
        assert!(draw(counts).contains("1 updates missed 16+"));
        assert!(draw(vec![0; 17]).contains("Staleness of 0 updates"));
    }
}
