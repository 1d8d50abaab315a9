//! Biases of experts, added to tokens in expert order.

use crate::shape::{Write, expect_len};
use crate::{Element, Rows};

/// Rows of each expert, region after region: its number and its rows.
fn experts(
    shape: Rows,
    regions: usize,
    counts: &[u32],
) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> + '_ {
    let each = counts.len() / regions.max(1);
    let region_rows = shape.rows / regions.max(1);
    (0..regions).flat_map(move |region| {
        let mut next = region * region_rows;
        (0..each).map(move |expert| {
            let first = next;
            next += counts[region * each + expert] as usize;
            (expert, first..next)
        })
    })
}

/// `y = x + share ·` the bias of the row's expert; `biases` are `[experts, width]`. Rows without a
/// token are copied.
pub fn forward<T: Element>(
    shape: Rows,
    regions: usize,
    (counts, biases): (&[u32], &[T]),
    share: f32,
    x: &[T],
    y: &mut [T],
) {
    expect_len("x", x.len(), &[shape.rows, shape.width]);
    expect_len("y", y.len(), &[shape.rows, shape.width]);
    y.copy_from_slice(x);
    for (expert, rows) in experts(shape, regions, counts) {
        let bias = &biases[expert * shape.width..][..shape.width];
        for row in rows {
            for (y, bias) in y[shape.range(row)].iter_mut().zip(bias) {
                *y = T::narrow(y.widen() + bias.widen() * share);
            }
        }
    }
}

/// `dbiases (+)=` the sums of the gradients of each expert's rows, in their order.
pub fn weight_gradient<T: Element, G: Element>(
    shape: Rows,
    regions: usize,
    dy: &[T],
    counts: &[u32],
    dbiases: &mut [G],
    mode: Write,
) {
    expect_len("dy", dy.len(), &[shape.rows, shape.width]);
    let mut sums: Vec<f32> = dbiases.iter().map(|dbias| mode.start(*dbias)).collect();
    for (expert, rows) in experts(shape, regions, counts) {
        let sums = &mut sums[expert * shape.width..][..shape.width];
        for row in rows {
            for (sum, dy) in sums.iter_mut().zip(&dy[shape.range(row)]) {
                *sum += dy.widen();
            }
        }
    }
    sums.iter().zip(dbiases).for_each(|(&sum, dbias)| *dbias = G::narrow(sum));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_gets_the_bias_of_its_expert_and_teaches_it() {
        // Two regions of three rows, two experts: counts 1 and 1, then 0 and 2.
        let (shape, counts) = (Rows { rows: 6, width: 2 }, [1, 1, 0, 2]);
        let biases = [1.0f32, 2.0, 10.0, 20.0];
        let mut y = [f32::NAN; 12];
        forward(shape, 2, (&counts, &biases), 1.0, &[0.5; 12], &mut y);
        let at = |row: usize| [y[2 * row], y[2 * row + 1]];
        assert_eq!(
            [at(0), at(1), at(3), at(4)],
            [[1.5, 2.5], [10.5, 20.5], [10.5, 20.5], [10.5, 20.5]]
        );
        assert_eq!([at(2), at(5)], [[0.5; 2]; 2], "rows without a token");
        let mut part = [f32::NAN; 12];
        forward(shape, 2, (&counts, &biases), 0.5, &[0.0; 12], &mut part);
        assert_eq!(part[2..4], [5.0, 10.0]);
        assert_eq!(part[4..6], [0.0; 2], "a row without a token");
        assert_eq!(part[6..8], [5.0, 10.0]);
        let dy: Vec<f32> = (0..12u8).map(f32::from).collect();
        let mut dbiases = [100.0f32; 4];
        weight_gradient(shape, 2, &dy, &counts, &mut dbiases, Write::Accumulate);
        assert_eq!(dbiases, [100.0, 101.0, 116.0, 119.0]);
    }
}
