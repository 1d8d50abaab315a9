//! Generated images of some classes: waves over the image, at a class's own angle, width and colour.
//!
//! Where a wave begins and how strong it is differs from image to image, and noise lies over it. No pixel
//! tells anything by itself, so that a network must learn to see directions; a small one does within
//! seconds. What a class looks like does not depend on the seed: images of another seed are new, and of
//! the same classes.

use paceline_kernels::counter::Stream;
use paceline_kernels::optimizer::half_cosine;

/// Images by number, each with its class.
#[derive(Clone, Debug)]
pub struct Images {
    side: usize,
    channels: usize,
    waves: Vec<Wave>,
    classes: Stream,
    /// Where a wave begins, and how strong it is.
    forms: Stream,
    noise: Stream,
}

/// What the images of one class have in common.
#[derive(Clone, Debug)]
struct Wave {
    /// Turns of the wave from one pixel to the next, across and down.
    across: f64,
    down: f64,
    /// By channel, how far the wave is ahead, in turns.
    ahead: Vec<f64>,
}

/// The deviation of the noise; waves are between half as strong and once and a half as strong as it.
const NOISE: f32 = 0.5;

impl Images {
    /// Images of `side` × `side` pixels, drawn from a seed.
    pub fn new(side: u64, channels: u64, classes: u32, seed: u64) -> Self {
        let colours = Stream::new(0, "colours");
        let wave = |class: u32| {
            // Angles over half a turn: the other half looks the same. Neighbouring angles differ in
            // width, so that many classes stay apart.
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

    /// What image `sample` shows.
    pub fn class(&self, sample: u64) -> u32 {
        (self.classes.bits(sample) % self.waves.len() as u64) as u32
    }

    /// The pixels of image `sample`, row by row, a pixel's channels side by side.
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

/// The cosine of so many turns, the same bits everywhere.
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
