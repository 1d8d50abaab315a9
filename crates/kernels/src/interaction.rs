//! Products of all pairs of a sample's vectors (Naumov et al., arXiv 1906.00091, section 2.1.3).

use crate::Element;
use crate::ordered_sum;
use crate::pool::{Pool, strips};
use crate::shape::expect_len;

/// Number of samples and of their interacting vectors: a dense one, and one per table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of samples.
    pub samples: usize,
    /// Number of tables.
    pub tables: usize,
    /// Width of a vector.
    pub width: usize,
}

impl Shape {
    /// Width of the output: the first vector, and the product of every vector with each earlier
    /// one.
    pub fn met(&self) -> usize {
        self.width + (self.tables + 1) * self.tables / 2
    }
}

/// `y[sample] = [x, products of pairs]`. `place` returns the offset in `sums` of the vector of a
/// sample and a table.
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Shape,
    place: impl Fn(usize, usize) -> usize + Sync,
    x: &[T],
    sums: &[T],
    y: &mut [T],
) {
    let Shape { samples, tables, width } = shape;
    expect_len("x", x.len(), &[samples, width]);
    expect_len("y", y.len(), &[samples, shape.met()]);
    pool.for_each_block(samples, 1, strips(y, shape.met()), |at, y| {
        let sample = at.start;
        let vector = |i: usize| match i {
            0 => &x[sample * width..][..width],
            _ => &sums[place(sample, i - 1)..][..width],
        };
        y[..width].copy_from_slice(vector(0));
        let mut products = y[width..].iter_mut();
        for i in 1..=tables {
            for (j, product) in (0..i).zip(&mut products) {
                *product = T::narrow(ordered_sum::sum([vector(i), vector(j)], |[a, b]| a * b));
            }
        }
    });
}

/// Input gradients of [`forward`]. `dsums` is zero at offsets that `place` never returns.
pub fn input_gradient<T: Element>(
    shape: Shape,
    place: impl Fn(usize, usize) -> usize,
    dy: &[T],
    x: &[T],
    sums: &[T],
    (dx, dsums): (&mut [T], &mut [T]),
) {
    let Shape { samples, tables, width } = shape;
    expect_len("dy", dy.len(), &[samples, shape.met()]);
    expect_len("dx", dx.len(), &[samples, width]);
    dsums.fill(T::ZERO);
    let mut gradients = vec![0.0f32; (tables + 1) * width];
    for sample in 0..samples {
        let vector = |i: usize| match i {
            0 => &x[sample * width..][..width],
            _ => &sums[place(sample, i - 1)..][..width],
        };
        let dy = &dy[sample * shape.met()..][..shape.met()];
        gradients.fill(0.0);
        for (gradient, dy) in gradients.iter_mut().zip(&dy[..width]) {
            *gradient = dy.widen();
        }
        let mut products = dy[width..].iter().map(|dy| dy.widen());
        for i in 1..=tables {
            for (j, dy) in (0..i).zip(&mut products) {
                let (before, after) = gradients.split_at_mut(i * width);
                let of_j = before[j * width..][..width].iter_mut().zip(vector(i));
                let of_i = after[..width].iter_mut().zip(vector(j));
                for (gradient, other) in of_j.chain(of_i) {
                    *gradient += dy * other.widen();
                }
            }
        }
        for (i, gradient) in gradients.chunks(width).enumerate() {
            let into = match i {
                0 => &mut dx[sample * width..][..width],
                _ => &mut dsums[place(sample, i - 1)..][..width],
            };
            for (into, gradient) in into.iter_mut().zip(gradient) {
                *into = T::narrow(*gradient);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, assert_within, numeric_gradient, random, widen};

    const SHAPE: Shape = Shape { samples: 3, tables: 4, width: 5 };

    fn reference(x: &[f64], sums: &[f64]) -> Vec<f64> {
        let mut y = Vec::new();
        for sample in 0..3 {
            let mut vectors = vec![&x[sample * 5..][..5]];
            vectors.extend(sums[sample * 20..][..20].chunks(5));
            y.extend_from_slice(vectors[0]);
            for i in 1..5 {
                for j in 0..i {
                    y.push(vectors[i].iter().zip(vectors[j]).map(|(a, b)| a * b).sum());
                }
            }
        }
        y
    }

    #[test]
    fn products_and_their_gradients_are_those_of_the_definition_wherever_vectors_stand() {
        let (x, sums, dy) = (random("x", 15), random("sums", 60), random("dy", 3 * 15));
        let plain = |sample: usize, table: usize| (sample * 4 + table) * 5;
        // From two ranks, each with two tables and an unused slot.
        let dealt = |sample: usize, table: usize| ((table % 2 * 3 + sample) * 3 + table / 2) * 5;
        let mut spread = vec![0.0; 2 * 3 * 3 * 5];
        for (sample, table) in (0..12).map(|i| (i / 4, i % 4)) {
            let from = &sums[plain(sample, table)..][..5];
            spread[dealt(sample, table)..][..5].copy_from_slice(from);
        }
        let pool = Pool::single();
        let (mut y, mut other) = (vec![f32::NAN; 45], vec![f32::NAN; 45]);
        forward(&pool, SHAPE, plain, &x, &sums, &mut y);
        forward(&pool, SHAPE, dealt, &x, &spread, &mut other);
        assert_eq!(y, other);
        let (x64, sums64, dy64) = (widen(&x), widen(&sums), widen(&dy));
        assert_close(&y, &reference(&x64, &sums64));

        let (mut dx, mut dsums) = (vec![f32::NAN; 15], vec![f32::NAN; 60]);
        input_gradient(SHAPE, plain, &dy, &x, &sums, (&mut dx, &mut dsums));
        let of_x = |x: &[f64]| reference(x, &sums64);
        assert_within(&dx, &numeric_gradient(&x64, &dy64, of_x), 1e-5);
        let of_sums = |sums: &[f64]| reference(&x64, sums);
        assert_within(&dsums, &numeric_gradient(&sums64, &dy64, of_sums), 1e-5);
        let mut far = vec![f32::NAN; spread.len()];
        input_gradient(SHAPE, dealt, &dy, &x, &spread, (&mut dx, &mut far));
        for (sample, table) in (0..12).map(|i| (i / 4, i % 4)) {
            assert_eq!(far[dealt(sample, table)..][..5], dsums[plain(sample, table)..][..5]);
        }
        assert!(far.iter().all(|g| g.is_finite()), "places to spare are zero");
    }
}
