//! GEMM throughput on the shapes of training, compared with the `gemm` crate.
//!
//! `cargo bench -p paceline-kernels --bench products -- [THREADS [SECONDS [OUTPUTS]]]` prints
//! GFLOP/s for a linear operator's forward pass, input gradient and weight gradient. Each is the
//! best of the repetitions that fit into SECONDS (0.3). OUTPUTS selects the shapes with that number
//! of outputs. With one thread `gemm` runs alternately with ours; it does not divide its work as
//! ours does, and is left out with more. The last three columns are bfloat16, with gradients of
//! weights in single precision.

use gemm::Parallelism;
use paceline_kernels::linear::{self, Shape};
use paceline_kernels::philox::Stream;
use paceline_kernels::pool::Pool;
use paceline_kernels::{Bf16, Write, element, mixed_precision};
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

/// Rows, inputs and outputs of the linear operators, of a layer and of the head, of the two models
/// that are compared with PyTorch in `benches/peers`.
const SHAPES: [[usize; 3]; 10] = [
    [1024, 384, 1152],
    [1024, 384, 384],
    [1024, 384, 1536],
    [1024, 1536, 384],
    [1024, 384, 8192],
    [512, 768, 2304],
    [512, 768, 768],
    [512, 768, 3072],
    [512, 3072, 768],
    [512, 768, 50257],
];

fn main() {
    // Cargo adds `--bench`.
    let mut numbers = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    let threads = numbers.next().and_then(|n| n.parse().ok()).unwrap_or(NonZeroUsize::MIN);
    let seconds = numbers.next().and_then(|s| s.parse().ok()).unwrap_or(0.3);
    let only: Option<usize> = numbers.next().and_then(|n| n.parse().ok());
    let pool = Pool::new(threads).expect("threads to be had");
    let alone = threads == NonZeroUsize::MIN;
    println!("GFLOP/s with {threads} threads: ours (gemm crate)");
    let names = ["y", "dx", "dw", "y bf16", "dx bf16", "dw bf16"].map(|name| format!("{name:^18}"));
    println!("{:>6}{:>7}{:>7}  {}", "rows", "in", "out", names.concat());
    let named = |shape: &[usize; 3]| only.is_none_or(|outputs| shape[2] == outputs);
    for [rows, inputs, outputs] in SHAPES.into_iter().filter(named) {
        let shape = Shape { rows, inputs, outputs };
        let x = random("x", rows * inputs);
        let w = random("w", outputs * inputs);
        let dy = random("dy", rows * outputs);
        let [mut y, mut dx, mut dw] = [rows * outputs, rows * inputs, outputs * inputs].map(zeros);
        let flops = 2.0 * (rows * inputs * outputs) as f64;
        let cells = [
            turns(
                seconds,
                || linear::forward(&pool, shape, &x, &w, &mut y),
                alone.then_some([rows, outputs, inputs]),
                ([&x, &w], [(inputs, 1), (1, inputs)]),
            ),
            turns(
                seconds,
                || linear::input_gradient(&pool, shape, &dy, &w, &mut dx),
                alone.then_some([rows, inputs, outputs]),
                ([&dy, &w], [(outputs, 1), (inputs, 1)]),
            ),
            turns(
                seconds,
                || linear::weight_gradient(&pool, shape, &dy, &x, &mut dw, Write::Accumulate),
                alone.then_some([outputs, inputs, rows]),
                ([&dy, &x], [(1, outputs), (inputs, 1)]),
            ),
        ];
        let cells = cells.map(|times| {
            let [ours, theirs] = times.map(|time| flops / time.as_secs_f64() / 1e9);
            let beside = if alone { format!("({theirs:.1})") } else { String::new() };
            format!("{ours:>8.1} {beside:<9}")
        });
        let [x, w, dy] = [&x, &w, &dy].map(|wide| {
            let mut short = vec![Bf16::ZERO; wide.len()];
            element::narrow(wide, &mut short);
            short
        });
        let (mut y, mut dx) = (vec![Bf16::ZERO; dy.len()], vec![Bf16::ZERO; x.len()]);
        let mut sums = zeros(mixed_precision::linear_workspace::<Bf16, f32>(shape));
        let none = ([&[][..], &[]], [(0, 0), (0, 0)]);
        let short = [
            turns(
                seconds,
                || mixed_precision::linear_forward(&pool, shape, &x, &w, &mut y, &mut sums),
                None,
                none,
            ),
            turns(
                seconds,
                || {
                    mixed_precision::linear_input_gradient(
                        &pool, shape, &dy, &w, &mut dx, &mut sums,
                    )
                },
                None,
                none,
            ),
            turns(
                seconds,
                || {
                    let (mode, sums) = (Write::Accumulate, &mut []);
                    mixed_precision::linear_weight_gradient(
                        &pool, shape, &dy, &x, &mut dw, mode, sums,
                    );
                },
                None,
                none,
            ),
        ];
        let short =
            short.map(|[ours, _]| format!("{:>8.1}{:<10}", flops / ours.as_secs_f64() / 1e9, ""));
        println!("{rows:>6}{inputs:>7}{outputs:>7}  {}{}", cells.concat(), short.concat());
    }
}

/// Best times of our GEMM and of the crate's, run alternately.
fn turns(
    seconds: f64,
    mut ours: impl FnMut(),
    sizes: Option<[usize; 3]>,
    (operands, strides): ([&[f32]; 2], [(usize, usize); 2]),
) -> [Duration; 2] {
    let mut theirs = sizes.map(|sizes| {
        let mut c = zeros(sizes[0] * sizes[1]);
        move || product_of_gemm(sizes, operands, strides, &mut c)
    });
    let mut best = [Duration::MAX; 2];
    let start = Instant::now();
    while best[0] == Duration::MAX || start.elapsed().as_secs_f64() < seconds {
        let begin = Instant::now();
        ours();
        best[0] = best[0].min(begin.elapsed());
        if let Some(theirs) = &mut theirs {
            let begin = Instant::now();
            theirs();
            best[1] = best[1].min(begin.elapsed());
        }
    }
    best
}

/// GEMM of the crate as this project used it: the same split of the depth, one thread.
fn product_of_gemm(
    [height, width, depth]: [usize; 3],
    [a, b]: [&[f32]; 2],
    [(a_row, a_column), (b_row, b_column)]: [(usize, usize); 2],
    c: &mut [f32],
) {
    let part = depth.div_ceil(depth.div_ceil(512));
    for first in (0..depth).step_by(part) {
        let terms = part.min(depth - first);
        // SAFETY: operands and result have as many elements as their sizes and strides require.
        unsafe {
            gemm::gemm(
                height,
                width,
                terms,
                c.as_mut_ptr(),
                1,
                width as isize,
                first > 0,
                a.as_ptr().add(first * a_column),
                a_column as isize,
                a_row as isize,
                b.as_ptr().add(first * b_row),
                b_column as isize,
                b_row as isize,
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

fn random(name: &str, len: usize) -> Vec<f32> {
    let mut values = zeros(len);
    Stream::new(1, name).fill_normal(0, 0.0, 1.0, &mut values);
    values
}

fn zeros(len: usize) -> Vec<f32> {
    vec![0.0; len]
}
