//! Generated images: waves over the image, at an angle, width and colour specific to the class.
//!
//! The phase and strength of a wave vary from image to image, and noise is added. A single pixel
//! carries no information, so a network must learn to detect directions; a small one does within
//! seconds. The look of a class does not depend on the seed: another seed gives new images of the
//! same classes.

use paceline_kernels::optimizer::half_cosine;
use paceline_kernels::philox::Stream;

/// Images by number, each with its class.
#[derive(Clone, Debug)]
pub struct Images {
    side: usize,
    channels: usize,
    waves: Vec<Wave>,
    classes: Stream,
    /// Phase and strength of the waves.
    forms: Stream,
    noise: Stream,
}

/// Wave common to the images of one class.
#[derive(Clone, Debug)]
struct Wave {
    /// Turns of the wave per pixel, across and down.
    across: f64,
    down: f64,
    /// Phase lead by channel, in turns.
    ahead: Vec<f64>,
}

/// Deviation of the noise; a wave's strength (half its amplitude) is 0.5 to 1.5 times this.
const NOISE: f32 = 0.5;

impl Images {
    /// Creates images of `side` × `side` pixels, drawn from a seed.
    pub fn new(side: u64, channels: u64, classes: u32, seed: u64) -> Self {
        let colours = Stream::new(0, "colours");
        let wave = |class: u32| {
            // Angles cover half a turn: the other half looks the same. Neighbouring angles differ
            // in width, so that many classes stay distinguishable.
            let angle = f64::from(class) / f64::from(classes.max(1)) * 0.5;
            let length = 4.0 + f64::from(class % 3) * 2.0;
            let ahead = |channel: u64| colours.uniform(u64::from(class) * channels + channel);
            Wave {
                across: cosine(angle) / length,
                down: cosine(angle - 0.25) / length,
                ahead: (0..channels).map(ahead).collect(),
            }
        };
        Self {
            side: side as usize,
            channels: channels as usize,
            waves: (0..classes.max(1)).map(wave).collect(),
            classes: Stream::new(seed, "classes"),
            forms: Stream::new(seed, "forms"),
            noise: Stream::new(seed, "noise"),
        }
    }

    /// Class of image `sample`.
    pub fn class(&self, sample: u64) -> u32 {
        (self.classes.bits(sample) % self.waves.len() as u64) as u32
    }

    /// Fills in the pixels of image `sample`, row by row, with the channels of a pixel adjacent.
    pub fn fill(&self, sample: u64, pixels: &mut [f32]) {
        let wave = &self.waves[self.class(sample) as usize];
        let begins = self.forms.uniform(sample.wrapping_mul(2));
        let strength = NOISE * (0.5 + self.forms.uniform(sample.wrapping_mul(2) + 1)) as f32;
        let first = sample.wrapping_mul(pixels.len() as u64);
        self.noise.fill_normal(first, 0.0, NOISE, pixels);
        for (at, pixel) in pixels.chunks_mut(self.channels.max(1)).enumerate() {
            let (x, y) = ((at % self.side) as f64, (at / self.side) as f64);
            let turns = begins + x * wave.across + y * wave.down;
            for (value, ahead) in pixel.iter_mut().zip(&wave.ahead) {
                *value += 2.0 * strength * cosine(turns + ahead) as f32;
            }
        }
    }
}

/// Cosine of `turns` turns, with the same bits on every platform.
fn cosine(turns: f64) -> f64 {
    2.0 * half_cosine(2.0 * (turns - turns.floor())) - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_its_number_and_seed() {
        let images = Images::new(8, 3, 10, 5);
        let image = |images: &Images, sample| {
            let mut pixels = vec![f32::NAN; 8 * 8 * 3];
            images.fill(sample, &mut pixels);
            pixels
        };
        assert_eq!(image(&images, 7), image(&Images::new(8, 3, 10, 5), 7));
        assert_ne!(image(&images, 7), image(&images, 8));
        assert_ne!(image(&images, 7), image(&Images::new(8, 3, 10, 6), 7));
        for sample in [0, 1, u64::MAX] {
            assert!(image(&images, sample).iter().all(|x| x.abs() < 8.0));
            assert!(images.class(sample) < 10);
        }
    }

    #[test]
    fn classes_are_about_equally_frequent_and_look_different() {
        let images = Images::new(8, 1, 4, 1);
        let mut seen = [0; 4];
        for sample in 0..4000 {
            seen[images.class(sample) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (850..1150).contains(&n)), "{seen:?}");
        let waves = &images.waves;
        for (i, one) in waves.iter().enumerate() {
            for other in &waves[..i] {
                let far = (one.across - other.across).abs() + (one.down - other.down).abs();
                assert!(far > 0.01, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn cosines_have_their_values() {
        for (turns, value) in [(0.0, 1.0), (0.25, 0.0), (-0.5, -1.0), (3.0, 1.0), (-0.25, 0.0)] {
            assert!((cosine(turns) - value).abs() < 1e-12, "{turns}");
        }
    }
}
