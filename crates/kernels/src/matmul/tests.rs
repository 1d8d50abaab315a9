//! GEMMs against their definition, in every layout and order.

use super::*;
use crate::reference::{assert_close, bits, random, widen};
use proptest::prelude::*;

fn pool(threads: usize) -> Pool {
    Pool::new(threads.try_into().unwrap()).unwrap()
}

fn naive(p: Product, a: &Operand, b: &Operand) -> Vec<f64> {
    let at =
        |o: &Operand, i: usize, j: usize| f64::from(o.data[i * o.row_stride + j * o.column_stride]);
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
        pad in 0usize..5, threads in 1usize..4, flip in any::<(bool, bool)>(), accumulate in any::<bool>(),
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
        let pool = pool(threads);
        p.compute(&pool, a, b, &mut c, width + pad, mode);
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
    for (height, width, depth) in [
        (3, 5, 2 * DEPTH + 11),
        (SHARED + 3, 2, 7),
        (2, SHARED + 50, 3),
        (BLOCK + 1, STRIPE + 1, 9),
        (1, 1, DEPTH),
    ] {
        let p = Product { height, width, depth };
        let (da, db) = (random("a", height * depth), random("b", width * depth));
        let (a, b) = (Operand::rows(&da, depth), Operand::transposed(&db, depth));
        let mut c = vec![f32::NAN; height * width];
        p.compute(&pool(2), a, b, &mut c, width, Write::Overwrite);
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
        p.compute(&Pool::single(), a, b, &mut c[shift..], 29, Write::Overwrite);
        c[shift..].iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    let expected = run(0);
    for shift in 1..17 {
        assert_eq!(run(shift), expected, "shifted by {shift}");
    }
}

/// One element, computed by the definition of the summation order.
fn chain(p: Product, a: &Operand, b: &Operand, old: Option<f32>, (i, j): (usize, usize)) -> f32 {
    let part = share(p.depth, DEPTH, 1);
    let mut total = old;
    for first in (0..p.depth).step_by(part) {
        let terms = first..p.depth.min(first + part);
        let sum = terms.fold(0.0f32, |sum, k| {
            let left = a.data[i * a.row_stride + k * a.column_stride];
            left.mul_add(b.data[k * b.row_stride + j * b.column_stride], sum)
        });
        total = Some(total.map_or(sum, |total| total + sum));
    }
    total.unwrap_or(0.0)
}

/// Replicas rely on this: the bits of an element depend on the depth alone.
#[test]
fn every_fused_kernel_sums_in_the_stated_order_wherever_an_element_stands() {
    for (height, width, depth) in [(1, 1, 1), (13, 67, 40), (150, 70, 530), (7, 200, 1300)] {
        let p = Product { height, width, depth };
        let (da, db) = (random("a", height * depth), random("b", width * depth));
        let (a, b) = (Operand::rows(&da, depth), Operand::transposed(&db, depth));
        let old = random("old", height * width);
        for kernel in Kernel::all().into_iter().filter(Kernel::is_fused) {
            for mode in [Write::Overwrite, Write::Accumulate] {
                let mut c = old.clone();
                let mut room = PackBuffer::with([kernel; 2], STRIPE);
                p.compute_in(&mut room, a, b, &mut c, width, mode);
                for (at, &found) in c.iter().enumerate() {
                    let before = (mode == Write::Accumulate).then_some(old[at]);
                    let expected = chain(p, &a, &b, before, (at / width, at % width));
                    assert_eq!(found.to_bits(), expected.to_bits(), "{p:?} {kernel:?} at {at}");
                }
            }
        }
    }
}

/// Left operands whose row stride is a power of two are packed, others are read in place.
#[test]
fn a_packed_left_operand_gives_the_bits_of_one_in_place() {
    let p = Product { height: 2 * BLOCK + 5, width: 50, depth: DEPTH + 30 };
    let (at_hand, to_stride) = ((DEPTH + 30).next_multiple_of(8), 1024);
    let db = random("b", p.width * p.depth);
    let b = Operand::transposed(&db, p.depth);
    for transposed in [false, true] {
        let (lines, len) = if transposed { (p.depth, p.height) } else { (p.height, p.depth) };
        let values = random("a", lines * len);
        let run = |stride: usize, expected: bool| {
            let mut data = vec![0.0; lines * stride];
            for (row, values) in data.chunks_mut(stride).zip(values.chunks(len)) {
                row[..len].copy_from_slice(values);
            }
            let a = if transposed {
                Operand::transposed(&data, stride)
            } else {
                Operand::rows(&data, stride)
            };
            assert_eq!(
                Lines::rows(a).are_at_hand(&Kernel::of::<f32>(), p.height, p.depth),
                expected
            );
            let mut c = vec![f32::NAN; p.height * p.width];
            p.compute(&pool(2), a, b, &mut c, p.width, Write::Overwrite);
            bits(&c)
        };
        assert_eq!(run(at_hand, true), run(to_stride, false), "transposed: {transposed}");
    }
}

#[test]
fn every_kernel_agrees_with_the_naive_product() {
    let p = Product { height: 29, width: 83, depth: 71 };
    let (da, db) = (random("a", 29 * 71), random("b", 83 * 71));
    let (a, b) = (Operand::transposed(&da, 29), Operand::rows(&db, 83));
    for kernel in Kernel::all() {
        let mut c = vec![f32::NAN; 29 * 83];
        let mut room = PackBuffer::with([kernel; 2], STRIPE);
        p.compute_in(&mut room, a, b, &mut c, 83, Write::Overwrite);
        assert_close(&c, &naive(p, &a, &b));
    }
}

#[test]
fn every_element_is_finished_once_and_complete() {
    for depth in [0, 5, DEPTH + 1] {
        let p = Product { height: BLOCK + 9, width: 2 * STRIPE + 5, depth };
        let (da, db) = (random("a", p.height * depth), random("b", p.width * depth));
        let (a, b) = (Operand::rows(&da, depth), Operand::transposed(&db, depth));
        let (mut plain, mut c) =
            (vec![f32::NAN; p.height * p.width], vec![f32::NAN; p.height * p.width]);
        p.compute(&pool(2), a, b, &mut plain, p.width, Write::Overwrite);
        p.compute_and(&pool(2), a, b, &mut c, p.width, Write::Overwrite, &|mut done| {
            for row in done.rows() {
                let first = done.columns().start;
                for (j, value) in done.row(row).iter_mut().enumerate() {
                    *value += (row * 1000 + first + j) as f32;
                }
            }
        });
        for (at, (&c, &plain)) in c.iter().zip(&plain).enumerate() {
            assert_eq!(c, plain + (at / p.width * 1000 + at % p.width) as f32);
        }
    }
}

#[test]
#[should_panic(expected = "operand a of a product, 2 x 3, reaches beyond its 5 elements")]
fn a_short_operand_is_refused() {
    let x = [0.0; 6];
    let p = Product { height: 2, width: 1, depth: 3 };
    p.compute(
        &Pool::single(),
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
    let (a, b) = (Operand::rows(&x, 1), Operand::rows(&x, 3));
    p.compute(&Pool::single(), a, b, &mut [0.0; 6], 2, Write::Overwrite);
}

fn brains(name: &str, len: usize) -> Vec<Bf16> {
    random(name, len).into_iter().map(Bf16::narrow).collect()
}

/// One element by the order of summation that a kernel for pairs states.
fn pair_chain(kernel: &Kernel, a: &[Bf16], b: &[Bf16]) -> f32 {
    let term =
        |k: usize| a.get(k).zip(b.get(k)).map_or((0.0, 0.0), |(a, b)| (a.widen(), b.widen()));
    let mul_add = |sum: f32, k: usize| term(k).0.mul_add(term(k).1, sum);
    let depth = a.len();
    if kernel.layout == tile::Layout::Tiles {
        return (0..depth).step_by(32).fold(0.0, |total, first| {
            let chain = |half: usize| (first + half..first + 32).step_by(2).fold(0.0, mul_add);
            total + (chain(0) + chain(1))
        });
    }
    let part = share(depth, 2 * DEPTH, 2);
    let sums = (0..depth).step_by(part).map(|first| {
        (first..depth.min(first + part)).step_by(2).fold(0.0, |sum, k| {
            let next = if k + 1 < depth { mul_add(sum, k + 1) } else { sum };
            mul_add(next, k)
        })
    });
    sums.reduce(|total, sum| total + sum).unwrap_or(0.0)
}

/// Replicas rely on this for pairs as well: the bits of an element depend on the depth alone, not
/// on the size of the result, the layout of the operands or the element's place.
#[test]
fn every_kernel_for_pairs_sums_in_the_stated_order_in_every_layout() {
    for (height, width, depth) in
        [(1, 1, 1), (13, 67, 41), (16, 32, 64), (150, 71, 530), (33, 200, 1300), (64, 49, 2080)]
    {
        let p = Product { height, width, depth };
        let pad = depth % 3;
        for (flip_a, flip_b) in [(false, false), (false, true), (true, false), (true, true)] {
            let (da, db) = (
                brains("a", (height + pad) * (depth + pad)),
                brains("b", (width + pad) * (depth + pad)),
            );
            let operand = |data, rows: usize, columns: usize, flip| {
                if flip {
                    Operand::transposed(data, rows + pad)
                } else {
                    Operand::rows(data, columns + pad)
                }
            };
            let (a, b) = (operand(&da, height, depth, flip_a), operand(&db, depth, width, flip_b));
            let line = |o: &Operand<'_, Bf16>, first: usize, along: usize| -> Vec<Bf16> {
                (0..depth).map(|k| o.data[first + k * along]).collect()
            };
            for kernel in brain::all().into_iter().flatten() {
                let mut c = vec![f32::NAN; height * width];
                let mut room = PackBuffer::with([kernel; 2], STRIPE);
                p.compute_in(&mut room, a, b, &mut c, width, Write::Overwrite);
                for (at, &found) in c.iter().enumerate() {
                    let left = line(&a, at / width * a.row_stride, a.column_stride);
                    let right = line(&b, at % width * b.column_stride, b.row_stride);
                    let expected = pair_chain(&kernel, &left, &right);
                    assert_eq!(found.to_bits(), expected.to_bits(), "{p:?} {kernel:?} at {at}");
                }
            }
        }
    }
}

/// Sums are the same whether they are stored at once, or in parts on some threads.
#[test]
fn parts_have_the_bits_of_a_result() {
    fn agree<T: Element>(p: Product, threads: usize) {
        let stored =
            |name: &str, len| -> Vec<T> { random(name, len).into_iter().map(T::narrow).collect() };
        let (da, db) = (stored("a", p.height * p.depth), stored("b", p.width * p.depth));
        let (a, b) = (Operand::rows(&da, p.depth), Operand::rows(&db, p.width));
        let mut whole = vec![f32::NAN; p.height * p.width];
        p.compute(&Pool::single(), a, b, &mut whole, p.width, Write::Overwrite);
        let mut found = vec![f32::NAN; p.height * p.width];
        let parts = strips(&mut found, 1);
        let mut sums = vec![f32::NAN; p.sums::<T>()];
        p.compute_parts(&pool(threads), a, b, &mut sums, &|mut done| {
            for row in done.rows() {
                let at = row * p.width;
                // SAFETY: every element is finished once.
                let part =
                    unsafe { parts.piece(at + done.columns().start..at + done.columns().end) };
                part.copy_from_slice(done.row(row));
            }
        });
        assert_eq!(bits(&found), bits(&whole), "{p:?}");
    }
    for (height, width, depth) in [(3, 5, 0), (140, 200, 70), (200, 500, 2500), (70, 40, 30_000)] {
        let p = Product { height, width, depth };
        agree::<f32>(p, 2);
        agree::<Bf16>(p, 3);
        agree::<crate::F16>(p, 2);
    }
}
