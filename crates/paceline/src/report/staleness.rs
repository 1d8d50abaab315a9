//! Histogram of staleness: updates by others that gradients missed.

use super::StalenessBars;
use std::fmt::{self, Write};

/// Draws one bar per number of missed updates, up to the last that occurred.
pub(super) fn histogram(out: &mut String, bars: &StalenessBars) -> fmt::Result {
    let last = bars.counts.iter().rposition(|count| *count > 0).unwrap_or(0);
    let all: u64 = bars.counts.iter().map(|count| u64::from(*count)).sum();
    let most = bars.counts.iter().copied().max().unwrap_or(0).max(1);
    let step = (WIDTH - 2.0 * SIDE) / (last + 1) as f64;
    writeln!(
        out,
        "<figure><svg class=\"chart\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"staleness\">",
    )?;
    for (missed, count) in bars.counts[..=last].iter().enumerate() {
        let tall = (HEIGHT - TOP - BOTTOM) * f64::from(*count) / f64::from(most);
        let (x, y) = (SIDE + step * missed as f64, HEIGHT - BOTTOM - tall);
        let (middle, share) = (x + step / 2.0, 100.0 * f64::from(*count) / all.max(1) as f64);
        // The last bar counts all that missed as many or more.
        let more = if missed + 1 == bars.counts.len() { "+" } else { "" };
        writeln!(
            out,
            "<rect class=\"stale\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{tall:.1}\">\
             <title>{count} updates missed {missed}{more}</title></rect>\
             <text class=\"middle\" x=\"{middle:.1}\" y=\"{:.1}\">{share:.0} %</text>\
             <text class=\"middle\" x=\"{middle:.1}\" y=\"{:.1}\">{missed}{more}</text>",
            x + 0.1 * step,
            0.8 * step,
            y - 4.0,
            HEIGHT - BOTTOM + 15.0,
        )?;
    }
    writeln!(
        out,
        "<text class=\"middle\" x=\"{:.1}\" y=\"{:.1}\">updates by others that a gradient missed</text></svg>\n\
         <figcaption>Staleness of {all} updates: {:.2} missed on average, {} at most; the fastest replica was \
         up to {} iterations ahead of the slowest.</figcaption></figure>",
        WIDTH / 2.0,
        HEIGHT - 3.0,
        bars.mean,
        bars.max,
        bars.ahead,
    )
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
            let mut out = String::new();
            let bars = StalenessBars { mean: 0.9, max: 3, ahead: 2, counts };
            histogram(&mut out, &bars).unwrap();
            out
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
