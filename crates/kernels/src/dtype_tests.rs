//! Tests that hold for every kernel. On operands of a 16-bit type it gives the single-precision
//! result on the same numbers, rounded once; and splitting a result changes no bit.

use crate::pool::Pool;
use crate::reference::{random, random_ids};
use crate::rope::Rotation;
use crate::{
    Bf16, Element, F16, Rows, Write, activation, bias, embedding, loss, norm, reduce, rope,
};
use proptest::prelude::*;
use std::num::NonZeroUsize;

/// Random numbers in a type, and the same numbers in single precision.
fn stored<T: Element>(name: &str, len: usize) -> (Vec<T>, Vec<f32>) {
    let x: Vec<T> = random(name, len).into_iter().map(T::narrow).collect();
    let wide = x.iter().map(|x| x.widen()).collect();
    (x, wide)
}

fn rounded<T: Element>(wide: &[f32]) -> Vec<T> {
    wide.iter().map(|&x| T::narrow(x)).collect()
}

/// Runs a kernel on both and compares the results.
macro_rules! same {
    ($type:ty, $len:expr, |$y:ident, $x:ident| $call:expr, $($name:ident: $size:expr),+) => {{
        let narrow = {
            $(let $name = stored::<$type>(stringify!($name), $size).0;)+
            let mut result = vec![<$type>::ZERO; $len];
            let ($y, $x) = (&mut result[..], ($(&$name[..],)+));
            $call;
            result
        };
        let wide = {
            $(let $name = stored::<$type>(stringify!($name), $size).1;)+
            let mut result = vec![0.0f32; $len];
            let ($y, $x) = (&mut result[..], ($(&$name[..],)+));
            $call;
            result
        };
        prop_assert_eq!(narrow, rounded::<$type>(&wide));
    }};
}

fn rows_of_every_kernel<T: Element>(shape: Rows) -> Result<(), TestCaseError> {
    let Rows { rows, width } = shape;
    let n = rows * width;
    same!(T, n, |y, x| activation::gelu_tanh_forward(x.0, y), x: n);
    same!(T, n, |y, x| activation::gelu_tanh_input_gradient(x.0, x.1, y), dy: n, x: n);
    same!(T, n, |y, x| activation::relu_forward(x.0, y), x: n);
    same!(T, n, |y, x| activation::squared_relu_input_gradient(x.0, x.1, y), dy: n, x: n);
    same!(T, n, |y, x| activation::swiglu_forward(shape, x.0, y), x: 2 * n);
    same!(T, 2 * n, |y, x| activation::swiglu_input_gradient(shape, x.0, x.1, y), dy: n, x: 2 * n);
    same!(T, n, |y, x| bias::forward(shape, x.0, x.1, y), x: n, b: width);
    same!(T, n, |y, x| reduce::add3(x.0, x.1, y), a: n, b: n);
    let mut stats = vec![0.0; 2 * rows];
    same!(
        T, n,
        |y, x| norm::layer_norm_forward(shape, 1e-5, x.0, x.1, x.2, y, &mut stats),
        x: n, gamma: width, beta: width
    );
    same!(
        T, n,
        |y, x| norm::layer_norm_input_gradient(shape, x.0, x.1, x.2, &stats, y),
        dy: n, x: n, gamma: width
    );
    let mut stats = vec![0.0; rows];
    same!(
        T, n,
        |y, x| norm::rms_norm_forward(shape, 1e-5, x.0, x.1, y, &mut stats),
        x: n, gamma: width
    );
    same!(
        T, n,
        |y, x| norm::rms_norm_input_gradient(shape, x.0, x.1, x.2, &stats, y),
        dy: n, x: n, gamma: width
    );
    let columns = loss::Columns { first: 0, valid: width };
    let targets = random_ids("targets", rows, width as u32);
    let (logits, wide) = stored::<T>("logits", n);
    let mut max = [vec![0.0; rows], vec![0.0; rows]];
    loss::row_max(shape, columns, &logits, &mut max[0]);
    loss::row_max(shape, columns, &wide, &mut max[1]);
    prop_assert_eq!(&max[0], &max[1]);
    let mut stats = [vec![0.0; 2 * rows], vec![0.0; 2 * rows]];
    loss::softmax_stats(shape, columns, &logits, &max[0], &targets, &mut stats[0]);
    loss::softmax_stats(shape, columns, &wide, &max[0], &targets, &mut stats[1]);
    prop_assert_eq!(&stats[0], &stats[1]);
    same!(
        T, n,
        |y, x| loss::input_gradient(shape, columns, 0.5, x.0, &max[0], &stats[0], &targets, y),
        logits: n
    );
    Ok(())
}

/// Weight gradients: summed in single precision, for any stored type and any number of threads.
fn sums_of_every_kernel<T: Element, G: Element>(
    shape: Rows,
    threads: usize,
) -> Result<(), TestCaseError> {
    let Rows { rows, width } = shape;
    let (dy, wide_dy) = stored::<T>("dy", rows * width);
    let (x, wide_x) = stored::<T>("x", rows * width);
    let stats = random("stats", 2 * rows);
    let old = stored::<G>("old", width).0;
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap();
    for mode in [Write::Overwrite, Write::Accumulate] {
        let fresh = || (old.clone(), old.iter().map(|x| x.widen()).collect::<Vec<f32>>());
        let (mut db, mut wide_db) = fresh();
        bias::weight_gradient(&pool, shape, &dy, &mut db, mode);
        bias::weight_gradient(&Pool::single(), shape, &wide_dy, &mut wide_db, mode);
        prop_assert_eq!(db, rounded::<G>(&wide_db));
        let ((mut a, mut wide_a), (mut b, mut wide_b)) = (fresh(), fresh());
        let outputs = (&mut a[..], &mut b[..]);
        norm::layer_norm_weight_gradient(&pool, shape, &dy, &x, &stats, outputs, mode);
        let outputs = (&mut wide_a[..], &mut wide_b[..]);
        let single = Pool::single();
        norm::layer_norm_weight_gradient(&single, shape, &wide_dy, &wide_x, &stats, outputs, mode);
        prop_assert_eq!((a, b), (rounded::<G>(&wide_a), rounded::<G>(&wide_b)));

        let ids = random_ids("ids", rows, 5);
        let old = stored::<G>("table", 5 * width).0;
        let mut wide: Vec<f32> = old.iter().map(|x| x.widen()).collect();
        let (mut table, mut order) = (old, vec![0; rows]);
        embedding::weight_gradient(shape, 0, &ids, &dy, &mut table, mode, &mut order);
        embedding::weight_gradient(shape, 0, &ids, &wide_dy, &mut wide, mode, &mut order);
        prop_assert_eq!(table, rounded::<G>(&wide));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn a_kernel_rounds_what_it_gives_in_single_precision_once(
        rows in 0usize..5, width in 1usize..70,
    ) {
        let shape = Rows { rows, width };
        rows_of_every_kernel::<Bf16>(shape)?;
        rows_of_every_kernel::<F16>(shape)?;
    }

    #[test]
    fn sums_over_rows_lose_nothing_to_narrow_types_or_threads(
        rows in 0usize..9, width in 1usize..300, threads in 1usize..4,
    ) {
        let shape = Rows { rows, width };
        sums_of_every_kernel::<f32, f32>(shape, threads)?;
        sums_of_every_kernel::<Bf16, f32>(shape, threads)?;
        sums_of_every_kernel::<Bf16, Bf16>(shape, threads)?;
        sums_of_every_kernel::<F16, f32>(shape, threads)?;
    }

    #[test]
    fn a_rotation_rounds_once(heads in 1usize..3, pairs in 1usize..5, seq in 1usize..4) {
        let rotation =
            Rotation { heads, kv_heads: 1, head_dim: 2 * pairs, theta: 10_000.0, dims: 0, magnitude: 1.0, frequencies: &[] };
        let positions: Vec<u32> = (0..seq as u32).collect();
        let n = 2 * seq * (heads + 2) * 2 * pairs;
        same!(Bf16, n, |y, x| rope::forward(rotation, &positions, x.0, y), qkv: n);
        same!(F16, n, |y, x| rope::input_gradient(rotation, &positions, x.0, y), dout: n);
    }
}
