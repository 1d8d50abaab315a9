//! The matrix product behind every kernel that has one.
//!
//! Its bits depend on the three sizes and the strides, and on nothing else. They do depend on the
//! sizes: the library treats single rows and very small results in their own ways, so a row
//! computed alone may differ in its last bits from the same row computed among others.

use crate::Write;
use gemm::Parallelism;

/// How many terms of an inner product are added before the partial sum goes to memory.
///
/// The library would choose this by the size of the processor's caches; fixing it here fixes the
/// order of summation, and with it the bits, for every processor with the same instructions.
const DEPTH: usize = 512;

/// How many rows of the result are computed at a time, which bounds the copy of an operand that
/// the library keeps while it works to 4 MiB.
const HEIGHT: usize = 2048;

/// A matrix that is read: element (i, j) stands at `i * row_stride + j * column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Operand<'a> {
    /// A matrix whose rows lie `stride` elements apart.
    pub(crate) fn rows(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: stride, column_stride: 1 }
    }

    /// The transpose of a matrix whose rows lie `stride` elements apart.
    pub(crate) fn transposed(data: &'a [f32], stride: usize) -> Self {
        Operand { data, row_stride: 1, column_stride: stride }
    }

    /// Panics unless all of a `height` x `width` matrix lies inside the slice.
    fn expect(&self, name: &str, height: usize, width: usize) {
        let needed = extent(height, width, self.row_stride, self.column_stride);
        assert!(
            needed.is_some_and(|needed| needed <= self.data.len()),
            "operand {name} of a product, {height} x {width}, reaches beyond its {} elements",
            self.data.len(),
        );
    }
}

/// The sizes of a product: `[height, width] = [height, depth] x [depth, width]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) depth: usize,
}

impl Product {
    /// Computes `c = a b`, or `c += a b`, where the rows of `c` lie `stride` elements apart.
    ///
    /// Every inner product is cut into equal parts of at most [`DEPTH`] terms; a part is summed by
    /// itself and the parts are added in order.
    pub(crate) fn compute(
        self,
        a: Operand<'_>,
        b: Operand<'_>,
        c: &mut [f32],
        stride: usize,
        mode: Write,
    ) {
        let Product { height, width, depth } = self;
        a.expect("a", height, depth);
        b.expect("b", depth, width);
        let needed = extent(height, width, stride, 1);
        assert!(
            needed.is_some_and(|needed| needed <= c.len()) && (width <= stride || height <= 1),
            "a result of {height} x {width} with rows {stride} apart does not fit {} elements",
            c.len(),
        );
        if height == 0 || width == 0 {
            return;
        }
        if depth == 0 {
            for row in 0..height {
                mode.prepare(&mut c[row * stride..][..width]);
            }
            return;
        }
        let part = depth.div_ceil(depth.div_ceil(DEPTH));
        for top in (0..height).step_by(HEIGHT) {
            let rows = HEIGHT.min(height - top);
            for first in (0..depth).step_by(part) {
                let terms = part.min(depth - first);
                let read = first > 0 || mode == Write::Accumulate;
                // SAFETY: the three pointers address matrices of `rows` x `terms`, `terms` x
                // `width` and `rows` x `width` elements with the given strides. They are blocks of
                // the matrices that `expect` and the assertion above found inside their slices, so
                // every element the product touches is in bounds; `c` is borrowed exclusively, and
                // its rows do not overlap because they are at least `width` apart.
                unsafe {
                    gemm::gemm(
                        rows,
                        width,
                        terms,
                        c.as_mut_ptr().add(top * stride),
                        1,
                        stride as isize,
                        read,
                        a.data.as_ptr().add(top * a.row_stride + first * a.column_stride),
                        a.column_stride as isize,
                        a.row_stride as isize,
                        b.data.as_ptr().add(first * b.row_stride),
                        b.column_stride as isize,
                        b.row_stride as isize,
                        1.0f32,
                        1.0f32,
                        false,
                        false,
                        false,
                        Parallelism::None,
                    );
                }
            }
        }
    }
}

/// How many elements a matrix with these strides spans, or nothing when that overflows.
fn extent(height: usize, width: usize, row_stride: usize, column_stride: usize) -> Option<usize> {
    if height == 0 || width == 0 {
        return Some(0);
    }
    let down = (height - 1).checked_mul(row_stride)?;
    let across = (width - 1).checked_mul(column_stride)?;
    down.checked_add(across)?.checked_add(1).filter(|&n| isize::try_from(n).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random, widen};
    use proptest::prelude::*;

    fn naive(p: Product, a: &Operand, b: &Operand) -> Vec<f64> {
        let at = |o: &Operand, i: usize, j: usize| {
            f64::from(o.data[i * o.row_stride + j * o.column_stride])
        };
        let mut c = vec![0.0; p.height * p.width];
        for i in 0..p.height {
            for j in 0..p.width {
                c[i * p.width + j] = (0..p.depth).map(|k| at(a, i, k) * at(b, k, j)).sum();
            }
        }
        c
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_the_naive_product_in_every_layout(
            height in 0usize..40, width in 0usize..40, depth in 0usize..40,
            pad in 0usize..5, flip in any::<(bool, bool)>(), accumulate in any::<bool>(),
        ) {
            let p = Product { height, width, depth };
            let operand = |data, rows: usize, columns: usize, flip| {
                if flip {
                    Operand::transposed(data, rows + pad)
                } else {
                    Operand::rows(data, columns + pad)
                }
            };
            let len = 45 * 45;
            let (da, db) = (random("a", len), random("b", len));
            let a = operand(&da, height, depth, flip.0);
            let b = operand(&db, depth, width, flip.1);
            let old = random("c", len);
            let mut c = old.clone();
            let mode = if accumulate { Write::Accumulate } else { Write::Overwrite };
            p.compute(a, b, &mut c, width + pad, mode);
            let mut expected = widen(&old);
            for (i, row) in naive(p, &a, &b).chunks(width.max(1)).enumerate() {
                for (j, &v) in row.iter().enumerate() {
                    let cell = &mut expected[i * (width + pad) + j];
                    *cell = v + if accumulate { *cell } else { 0.0 };
                }
            }
            assert_close(&c, &expected);
        }
    }

    #[test]
    fn deep_and_tall_products_are_cut_and_joined() {
        for (height, width, depth) in [(3, 5, 2 * DEPTH + 11), (HEIGHT + 3, 2, 7), (1, 1, DEPTH)] {
            let p = Product { height, width, depth };
            let (da, db) = (random("a", height * depth), random("b", width * depth));
            let (a, b) = (Operand::rows(&da, depth), Operand::transposed(&db, depth));
            let mut c = vec![f32::NAN; height * width];
            p.compute(a, b, &mut c, width, Write::Overwrite);
            assert_close(&c, &naive(p, &a, &b));
        }
    }

    #[test]
    fn the_bits_do_not_depend_on_addresses() {
        let p = Product { height: 37, width: 29, depth: 61 };
        let run = |shift: usize| {
            let mut a = vec![0.0; shift];
            a.extend(random("a", p.height * p.depth));
            let mut b = vec![0.0; 3 * shift];
            b.extend(random("b", p.width * p.depth));
            let mut c = vec![0.0; p.height * p.width + shift];
            let (a, b) = (Operand::rows(&a[shift..], 61), Operand::transposed(&b[3 * shift..], 61));
            p.compute(a, b, &mut c[shift..], 29, Write::Overwrite);
            c[shift..].iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        };
        let expected = run(0);
        for shift in 1..17 {
            assert_eq!(run(shift), expected, "shifted by {shift}");
        }
    }

    #[test]
    #[should_panic(expected = "operand a of a product, 2 x 3, reaches beyond its 5 elements")]
    fn a_short_operand_is_refused() {
        let x = [0.0; 6];
        let p = Product { height: 2, width: 1, depth: 3 };
        p.compute(
            Operand::rows(&x[..5], 3),
            Operand::rows(&x, 1),
            &mut [0.0; 2],
            1,
            Write::Overwrite,
        );
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn rows_of_a_result_may_not_overlap() {
        let x = [0.0; 6];
        let p = Product { height: 2, width: 3, depth: 1 };
        p.compute(Operand::rows(&x, 1), Operand::rows(&x, 3), &mut [0.0; 6], 2, Write::Overwrite);
    }
}
