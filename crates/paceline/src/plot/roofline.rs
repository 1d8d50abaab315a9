//! Roofline pictures: kernels by their operations per byte and per second, below the roof of a device.

use super::scale::Scale;
use super::style::style;
use super::{HEIGHT, WIDTH, digits, printable, svg_file};
use crate::report::fixed;
use maud::{Markup, PreEscaped, html};

/// Contents of a roofline picture.
#[derive(Clone, Debug, Default)]
pub(crate) struct RooflinePlot {
    /// Title.
    pub title: String,
    /// Memory bandwidth, in bytes per second.
    pub bandwidth: f64,
    /// Ceilings: name and operations per second.
    pub ceilings: Vec<(String, f64)>,
    /// Kernels.
    pub points: Vec<RooflinePoint>,
    /// Remark below the axis.
    pub note: String,
}

/// A kernel.
#[derive(Clone, Debug)]
pub(crate) struct RooflinePoint {
    /// Name, shown as a tooltip.
    pub name: String,
    /// Operations per byte.
    pub intensity: f64,
    /// Operations per second.
    pub rate: f64,
    /// Share of the total time, from 0 to 1: its area.
    pub share: f64,
    /// Index of its colour.
    pub colour: usize,
}

/// Number of kernels whose names are written, those with the largest shares.
const NAMED: usize = 6;

impl RooflinePlot {
    /// Renders the picture.
    pub(crate) fn to_svg(&self) -> String {
        let (left, right, top, bottom) = (72.0, WIDTH - 28.0, 64.0, HEIGHT - 66.0);
        let highest = self.ceilings.iter().map(|(_, rate)| *rate).fold(1.0, f64::max);
        let lowest = self.points.iter().map(|point| point.rate).filter(|rate| *rate > 0.0);
        let lowest = lowest.fold(highest / 100.0, f64::min);
        let inside = self.points.iter().map(|point| point.intensity).filter(|at| *at > 0.0);
        let ridge = highest / self.bandwidth.max(1.0);
        let (low, high) = inside.fold((ridge / 30.0, ridge * 8.0), |(low, high), at| {
            (low.min(at / 1.5), high.max(at * 1.5))
        });
        let x = Scale::of(&[low, high], true, false, [left, right]);
        let y = Scale::of(&[lowest / 1.5, highest * 1.6], true, false, [bottom, top]);
        svg_file(html! {
            svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) }
                width=(WIDTH) height=(HEIGHT) role="img" {
                title { (printable(&self.title)) }
                style { (PreEscaped(style())) }
                rect.paper width=(WIDTH) height=(HEIGHT) rx="6" {}
                text.title x="20" y="30" { (printable(&self.title)) }
                text.what x="20" y="52" { "operations per second" }
                (self.grid([&x, &y], [left, right, top, bottom]))
                (self.roof([&x, &y], [low, high]))
                (self.dots([&x, &y]))
                text.middle x=(fixed::<1>((left + right) / 2.0)) y=(HEIGHT - 28.0) {
                    "operations per byte moved"
                }
                text.middle x=(fixed::<1>((left + right) / 2.0)) y=(HEIGHT - 10.0) {
                    (printable(&self.note))
                }
            }
        })
    }

    fn grid(&self, [x, y]: [&Scale; 2], [left, right, top, bottom]: [f64; 4]) -> Markup {
        html! {
            @for power in powers(y) {
                @let place = fixed::<1>(y.at(power));
                path.grid d={ "M" (fixed::<1>(left)) " " (place) "H" (fixed::<1>(right)) } {}
                text.end x=(fixed::<1>(left - 9.0)) y=(fixed::<1>(y.at(power) + 4.5)) {
                    (rate(power))
                }
            }
            @for power in powers(x) {
                @let place = fixed::<1>(x.at(power));
                path.grid d={ "M" (place) " " (fixed::<1>(top)) "V" (fixed::<1>(bottom)) } {}
                text.middle x=(place) y=(fixed::<1>(bottom + 20.0)) { (digits(power)) }
            }
        }
    }

    /// The slope of the memory and the ceilings of the units.
    fn roof(&self, [x, y]: [&Scale; 2], [low, high]: [f64; 2]) -> Markup {
        let at = |intensity: f64, rate: f64| {
            format!("{} {}", fixed::<1>(x.at(intensity)), fixed::<1>(y.at(rate)))
        };
        html! {
            @for (index, (name, peak)) in self.ceilings.iter().enumerate() {
                @let ridge = peak / self.bandwidth;
                @let start = low.max(y.low / self.bandwidth);
                @if index == 0 {
                    path.line.s0 d={ "M" (at(start, start * self.bandwidth)) "L" (at(ridge, *peak))
                        "L" (at(high, *peak)) } {}
                } @else {
                    path.line.s0.d1 d={ "M" (at(ridge, *peak)) "L" (at(high, *peak)) } {}
                }
                text.end x=(fixed::<1>(x.at(high))) y=(fixed::<1>(y.at(*peak) - 7.0)) {
                    (printable(name)) ", " (rate(*peak))
                }
            }
        }
    }

    fn dots(&self, [x, y]: [&Scale; 2]) -> Markup {
        let mut order: Vec<&RooflinePoint> = self.points.iter().collect();
        order.sort_by(|a, b| b.share.total_cmp(&a.share));
        let mut taken: Vec<(f64, f64)> = Vec::new();
        let mut named = Vec::new();
        for point in order.iter().take(NAMED) {
            let place = (x.at(point.intensity), y.at(point.rate));
            let clear = |&(left, top): &(f64, f64)| {
                (left - place.0).abs() > 180.0 || (top - place.1).abs() > 15.0
            };
            if taken.iter().all(clear) {
                taken.push(place);
                named.push((*point, place));
            }
        }
        html! {
            @for point in &order {
                circle class={ "dot f" (point.colour) } cx=(fixed::<1>(x.at(point.intensity)))
                    cy=(fixed::<1>(y.at(point.rate)))
                    r=(fixed::<1>(3.0 + 15.0 * point.share.max(0.0).sqrt())) opacity="0.8" {
                    title {
                        (printable(&point.name)) ": " (rate(point.rate)) ", "
                        (digits(point.intensity)) " per byte, " (digits(100.0 * point.share)) " %"
                    }
                }
            }
            @for (point, (left, top)) in &named {
                @let over = *left > WIDTH - 240.0;
                text.value.end[over] x=(fixed::<1>(if over { left - 12.0 } else { left + 12.0 }))
                    y=(fixed::<1>(top + 16.0)) { (printable(&point.name)) }
            }
        }
    }
}

/// Powers of ten on a scale.
fn powers(scale: &Scale) -> Vec<f64> {
    let (from, to) = (scale.low.log10().ceil() as i32, scale.high.log10().floor() as i32);
    (from..=to).map(|power| 10f64.powi(power)).collect()
}

/// A rate with its prefix.
fn rate(value: f64) -> String {
    const PREFIXES: [(&str, f64); 5] =
        [("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0)];
    let found = PREFIXES.iter().find(|(_, scale)| value >= *scale * 0.9995);
    let (name, scale) = found.copied().unwrap_or(("FLOP/s", 1.0));
    format!("{} {name}", digits(value / scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_drawn_below_its_roof() {
        let point = |name: &str, intensity, rate| RooflinePoint {
            name: name.to_owned(),
            intensity,
            rate,
            share: 0.5,
            colour: 0,
        };
        let plot = RooflinePlot {
            title: "a <roof>".to_owned(),
            bandwidth: 1e12,
            ceilings: vec![("bf16".to_owned(), 1e14), ("f32".to_owned(), 1e13)],
            points: vec![point("small & thin", 1.0, 5e11), point("large", 1000.0, 9e13)],
            note: String::new(),
        };
        let svg = plot.to_svg();
        assert_eq!(svg.matches("<circle").count(), 2, "{svg}");
        assert!(svg.contains("a &lt;roof&gt;") && svg.contains("small &amp; thin"), "{svg}");
        assert!(svg.contains("100 TFLOP/s") && !svg.contains("NaN"), "{svg}");
    }
}
