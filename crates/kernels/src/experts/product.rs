//! GEMMs of experts with the tokens routed to them.

use crate::linear;
use crate::mixed_precision;
use crate::pool::Pool;
use crate::shape::expect_len;
use crate::{Element, Write};
use std::ops::Range;

/// Sizes of the experts' GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of experts; their weights are stacked by rows.
    pub experts: usize,
    /// Number of regions of rows, each with all the experts.
    pub regions: usize,
    /// Number of rows per region.
    pub region_rows: usize,
    /// Width of an input row.
    pub inputs: usize,
    /// Width of an output row.
    pub outputs: usize,
}

impl Shape {
    /// Number of workspace elements that the functions here need.
    pub fn workspace<T: Element, G: Element>(self) -> usize {
        mixed_precision::linear_workspace::<T, G>(self.linear(self.region_rows))
    }

    fn linear(self, rows: usize) -> linear::Shape {
        linear::Shape { rows, inputs: self.inputs, outputs: self.outputs }
    }

    fn weights(self, expert: usize) -> Range<usize> {
        let each = self.inputs * self.outputs;
        expert * each..(expert + 1) * each
    }

    /// Calls `each` with the rows of every expert that has any, region by region.
    fn each(self, counts: &[u32], mut each: impl FnMut(usize, Range<usize>)) {
        expect_len("counts", counts.len(), &[self.regions, self.experts]);
        for (region, counts) in counts.chunks_exact(self.experts.max(1)).enumerate() {
            let mut next = region * self.region_rows;
            let end = next + self.region_rows;
            for (expert, &count) in counts.iter().enumerate() {
                let rows = next..(next + count as usize).min(end);
                next = rows.end;
                if !rows.is_empty() {
                    each(expert, rows);
                }
            }
        }
    }

    /// Clears the rows without a token.
    fn clear<T: Element>(self, counts: &[u32], width: usize, y: &mut [T]) {
        let regions = counts.chunks_exact(self.experts.max(1)).enumerate();
        for (region, counts) in regions {
            let taken: usize = counts.iter().map(|&count| count as usize).sum();
            let (start, end) = (region * self.region_rows, (region + 1) * self.region_rows);
            y[(start + taken.min(self.region_rows)) * width..end * width].fill(T::ZERO);
        }
    }
}

/// `y = x wᵀ` with the weight of each row's expert.
pub fn forward<T: Element>(
    pool: &Pool,
    shape: Shape,
    x: &[T],
    counts: &[u32],
    w: &[T],
    y: &mut [T],
    workspace: &mut [f32],
) {
    let Shape { inputs, outputs, .. } = shape;
    shape.each(counts, |expert, rows| {
        let linear = shape.linear(rows.len());
        let (x, w) = (&x[rows.start * inputs..rows.end * inputs], &w[shape.weights(expert)]);
        let y = &mut y[rows.start * outputs..rows.end * outputs];
        let workspace = &mut workspace[..mixed_precision::linear_workspace::<T, f32>(linear)];
        mixed_precision::linear_forward(pool, linear, x, w, y, workspace);
    });
    shape.clear(counts, outputs, y);
}

/// `dx = dy w` with the weight of each row's expert.
pub fn input_gradient<T: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    counts: &[u32],
    w: &[T],
    dx: &mut [T],
    workspace: &mut [f32],
) {
    let Shape { inputs, outputs, .. } = shape;
    shape.each(counts, |expert, rows| {
        let linear = shape.linear(rows.len());
        let (dy, w) = (&dy[rows.start * outputs..rows.end * outputs], &w[shape.weights(expert)]);
        let dx = &mut dx[rows.start * inputs..rows.end * inputs];
        let workspace = &mut workspace[..mixed_precision::linear_workspace::<T, f32>(linear)];
        mixed_precision::linear_input_gradient(pool, linear, dy, w, dx, workspace);
    });
    shape.clear(counts, inputs, dx);
}

/// `dw (+)= dyᵀ x` over each expert's rows, region after region.
#[expect(clippy::too_many_arguments, reason = "one name per tensor of the operator")]
pub fn weight_gradient<T: Element, G: Element>(
    pool: &Pool,
    shape: Shape,
    dy: &[T],
    x: &[T],
    counts: &[u32],
    dw: &mut [G],
    mode: Write,
    workspace: &mut [f32],
) {
    let Shape { inputs, outputs, .. } = shape;
    for expert in 0..shape.experts {
        let mut mode = mode;
        let dw = &mut dw[shape.weights(expert)];
        shape.each(counts, |of, rows| {
            if of == expert {
                let linear = shape.linear(rows.len());
                let dy = &dy[rows.start * outputs..rows.end * outputs];
                let x = &x[rows.start * inputs..rows.end * inputs];
                let workspace = &mut workspace[..mixed_precision::linear_workspace::<T, G>(linear)];
                mixed_precision::linear_weight_gradient(pool, linear, dy, x, dw, mode, workspace);
                mode = Write::Accumulate;
            }
        });
        // An expert without tokens has a gradient too.
        mode.prepare(dw);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, numeric_gradient, random, widen};

    const SHAPE: Shape = Shape { experts: 3, regions: 2, region_rows: 5, inputs: 4, outputs: 6 };
    const COUNTS: [u32; 6] = [2, 0, 3, 1, 0, 2];

    /// Expert of each row.
    const OWNERS: [Option<usize>; 10] =
        [Some(0), Some(0), Some(2), Some(2), Some(2), Some(0), Some(2), Some(2), None, None];

    fn reference(x: &[f64], w: &[f64]) -> Vec<f64> {
        let Shape { inputs, outputs, .. } = SHAPE;
        let mut y = vec![0.0; OWNERS.len() * outputs];
        for (row, owner) in OWNERS.iter().enumerate() {
            let Some(owner) = owner else { continue };
            for out in 0..outputs {
                for i in 0..inputs {
                    let weight = w[(owner * outputs + out) * inputs + i];
                    y[row * outputs + out] += x[row * inputs + i] * weight;
                }
            }
        }
        y
    }

    #[test]
    fn products_and_gradients_agree_with_the_reference() {
        let Shape { experts, inputs, outputs, .. } = SHAPE;
        let pool = Pool::single();
        let (x, w) = (random("x", 10 * inputs), random("w", experts * inputs * outputs));
        let dy = random("dy", 10 * outputs);
        let mut y = vec![f32::NAN; 10 * outputs];
        forward(&pool, SHAPE, &x, &COUNTS, &w, &mut y, &mut []);
        assert_close(&y, &reference(&widen(&x), &widen(&w)));
        let mut dx = vec![f32::NAN; 10 * inputs];
        input_gradient(&pool, SHAPE, &dy, &COUNTS, &w, &mut dx, &mut []);
        let (wide_x, wide_w, wide_dy) = (widen(&x), widen(&w), widen(&dy));
        assert_close(&dx, &numeric_gradient(&wide_x, &wide_dy, |x| reference(x, &wide_w)));
        let mut dw = vec![f32::NAN; w.len()];
        let run = |dw: &mut [f32], mode| {
            weight_gradient(&pool, SHAPE, &dy, &x, &COUNTS, dw, mode, &mut []);
        };
        run(&mut dw, Write::Overwrite);
        let expected = numeric_gradient(&wide_w, &wide_dy, |w| reference(&wide_x, w));
        assert_close(&dw, &expected);
        assert_eq!(dw[SHAPE.weights(1)], [0.0; 24], "nobody came to the second expert");
        run(&mut dw, Write::Accumulate);
        assert_close(&dw, &expected.iter().map(|g| 2.0 * g).collect::<Vec<_>>());
    }
}
