//! Generated handwritten digits: strokes of a pen on 28 × 28 pixels.
//!
//! A digit's strokes are straight lines between a few points. Every sample has its own slant, turn,
//! size, place and thickness of the pen, points that are a little off, and noise, so that a linear
//! classifier finds most of them and a network nearly all.

use paceline_kernels::philox::Stream;

/// Pixels along each side.
pub(super) const SIDE: usize = 28;
/// Number of classes.
pub(super) const CLASSES: u32 = 10;

/// Digits by number, each with its class.
#[derive(Clone, Debug)]
pub(super) struct Digits {
    classes: Stream,
    /// Slant, turn, size, place and thickness.
    forms: Stream,
    /// Deviations of the points.
    points: Stream,
    noise: Stream,
}

/// Deviation of a pixel's noise.
const NOISE: f32 = 0.1;
/// Numbers drawn for the form of a sample.
const FORM: u64 = 6;
/// Most points of a digit.
const POINTS: u64 = 16;

/// Strokes of every digit: points across and down, from 0 to 1.
const STROKES: [&[&[(f32, f32)]]; CLASSES as usize] = [
    &[&[(0.5, 0.0), (0.8, 0.2), (0.8, 0.8), (0.5, 1.0), (0.2, 0.8), (0.2, 0.2), (0.5, 0.0)]],
    &[&[(0.3, 0.2), (0.55, 0.0), (0.55, 1.0)]],
    &[&[(0.2, 0.2), (0.5, 0.0), (0.8, 0.25), (0.2, 1.0), (0.85, 1.0)]],
    &[&[(0.2, 0.05), (0.75, 0.1), (0.45, 0.45), (0.8, 0.75), (0.5, 1.0), (0.15, 0.9)]],
    &[&[(0.65, 1.0), (0.65, 0.0), (0.15, 0.65), (0.9, 0.65)]],
    &[&[(0.8, 0.0), (0.3, 0.0), (0.25, 0.45), (0.7, 0.45), (0.8, 0.75), (0.5, 1.0), (0.2, 0.9)]],
    &[&[(0.7, 0.0), (0.3, 0.4), (0.2, 0.8), (0.5, 1.0), (0.8, 0.8), (0.6, 0.5), (0.25, 0.65)]],
    &[&[(0.15, 0.0), (0.85, 0.0), (0.4, 1.0)]],
    &[
        &[(0.5, 0.48), (0.25, 0.25), (0.5, 0.0), (0.75, 0.25), (0.5, 0.48)],
        &[(0.5, 0.48), (0.2, 0.75), (0.5, 1.0), (0.8, 0.75), (0.5, 0.48)],
    ],
    &[&[(0.75, 0.3), (0.4, 0.45), (0.25, 0.2), (0.5, 0.0), (0.75, 0.3), (0.65, 1.0)]],
];

impl Digits {
    /// Creates digits drawn from a seed.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            classes: Stream::new(seed, "digit classes"),
            forms: Stream::new(seed, "digit forms"),
            points: Stream::new(seed, "digit points"),
            noise: Stream::new(seed, "digit noise"),
        }
    }

    /// Class of a sample.
    pub(super) fn class(&self, sample: u64) -> u32 {
        (self.classes.bits(sample) % u64::from(CLASSES)) as u32
    }

    /// Fills in the pixels of a sample, row by row: 0 for paper, 1 for ink.
    pub(super) fn fill(&self, sample: u64, pixels: &mut [f32]) {
        self.noise.fill_normal(sample.wrapping_mul(pixels.len() as u64), 0.0, NOISE, pixels);
        let drawn = |at: u64| self.forms.uniform(sample.wrapping_mul(FORM) + at) as f32 - 0.5;
        let [slant, turn, size, across, down, pen] = [0, 1, 2, 3, 4, 5].map(drawn);
        let (slant, turn, size) = (0.5 * slant, 0.4 * turn, 17.0 + 6.0 * size);
        let (middle, pen) = (SIDE as f32 / 2.0, 1.6 + 0.8 * pen);
        let mut number = sample.wrapping_mul(2 * POINTS);
        let mut off = || {
            number += 1;
            0.08 * (self.points.uniform(number) as f32 - 0.5)
        };
        // A small turn: its sine and cosine to second order.
        let (sin, cos) = (turn, 1.0 - turn * turn / 2.0);
        for stroke in STROKES[self.class(sample) as usize] {
            let place = |&(x, y): &(f32, f32)| {
                let (x, y) = (x - 0.5 + off(), y - 0.5 + off());
                let x = x - slant * y;
                let (x, y) = (cos * x - sin * y, sin * x + cos * y);
                (middle + size * x + 4.0 * across, middle + size * y + 4.0 * down)
            };
            let points: Vec<(f32, f32)> = stroke.iter().map(place).collect();
            for line in points.windows(2) {
                draw(line[0], line[1], pen, pixels);
            }
        }
    }
}

/// Draws a line with a round pen of radius `pen`, whose edge fades over a pixel.
fn draw(from: (f32, f32), to: (f32, f32), pen: f32, pixels: &mut [f32]) {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length = (dx * dx + dy * dy).max(1e-6);
    for (at, pixel) in pixels.iter_mut().enumerate() {
        let (x, y) = ((at % SIDE) as f32 + 0.5 - from.0, (at / SIDE) as f32 + 0.5 - from.1);
        let along = ((x * dx + y * dy) / length).clamp(0.0, 1.0);
        let (x, y) = (x - along * dx, y - along * dy);
        let ink = (pen - (x * x + y * y).sqrt()).clamp(0.0, 1.0);
        *pixel = pixel.max(ink);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digit(digits: &Digits, sample: u64) -> Vec<f32> {
        let mut pixels = vec![f32::NAN; SIDE * SIDE];
        digits.fill(sample, &mut pixels);
        pixels
    }

    #[test]
    fn a_digit_is_its_number_and_seed() {
        let digits = Digits::new(5);
        assert_eq!(digit(&digits, 7), digit(&Digits::new(5), 7));
        assert_ne!(digit(&digits, 7), digit(&digits, 8));
        assert_ne!(digit(&digits, 7), digit(&Digits::new(6), 7));
        for sample in [0, 1, u64::MAX] {
            assert!(digit(&digits, sample).iter().all(|x| (-1.0..=1.0).contains(x)));
        }
    }

    /// The nearest mean of 1,000 others tells most digits apart, and far from all.
    #[test]
    fn classes_look_alike_and_unlike_others() {
        let digits = Digits::new(1);
        let mut means = vec![vec![0.0; SIDE * SIDE]; CLASSES as usize];
        let mut seen = [0; CLASSES as usize];
        for sample in 0..1000 {
            let class = digits.class(sample) as usize;
            seen[class] += 1;
            means[class].iter_mut().zip(digit(&digits, sample)).for_each(|(m, x)| *m += x);
        }
        assert!(seen.iter().all(|&n| (60..140).contains(&n)), "{seen:?}");
        for (mean, n) in means.iter_mut().zip(seen) {
            mean.iter_mut().for_each(|m| *m /= n as f32);
        }
        let right = (1000..1500).filter(|&sample| {
            let x = digit(&digits, sample);
            let far = |mean: &Vec<f32>| -> f32 {
                mean.iter().zip(&x).map(|(m, x)| (m - x) * (m - x)).sum()
            };
            let nearest =
                (0..means.len()).min_by(|&a, &b| far(&means[a]).total_cmp(&far(&means[b])));
            nearest == Some(digits.class(sample) as usize)
        });
        let right = right.count();
        assert!((300..490).contains(&right), "{right} of 500");
    }
}
