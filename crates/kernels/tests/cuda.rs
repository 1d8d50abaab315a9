//! Compares every GPU kernel with its CPU counterpart. Skips, visibly, if there is no GPU.
#![cfg(feature = "cuda")]

use paceline_kernels::arena::Span;
use paceline_kernels::cuda::{
    AttentionAt, AttentionGradientAt, AttentionShape, CudaError, Device, ElementType, Function,
    InputGradientAt, LinearAt, LossAt, NormAt, NormGradientAt, RotationAt, TensorBlocks, Update,
    UpdateAt, Words,
};
use paceline_kernels::loss::Columns;
use paceline_kernels::philox::Stream as Random;
use paceline_kernels::pool::Pool;
use paceline_kernels::{
    Rows, Write, activation, attention, bias, embedding, linear, loss, norm, optimizer, reduce,
    rope,
};

const F32: ElementType = ElementType::F32;

/// A device whose arena is filled from the front.
struct Bench {
    device: Device,
    next: u64,
}

impl Bench {
    fn open() -> Option<Self> {
        match Device::open(0, 2, 64 << 20, None) {
            Ok(device) => Some(Self { device, next: 0 }),
            Err(error @ (CudaError::NoLibrary { .. } | CudaError::NoDevice { .. })) => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn put(&mut self, values: &[f32]) -> Span {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let span = Span { offset: self.next, len: bytes.len() as u64 };
        self.next += span.len.next_multiple_of(64);
        self.device.upload(0, span, &bytes).unwrap();
        span
    }

    fn put_words(&mut self, words: &[u32]) -> Span {
        self.put(&words.iter().map(|word| f32::from_bits(*word)).collect::<Vec<_>>())
    }

    fn room(&mut self, elements: usize) -> Span {
        self.put(&vec![f32::NAN; elements])
    }

    fn get(&self, span: Span) -> Vec<f32> {
        let mut bytes = vec![0; span.len as usize];
        self.device.download(0, span, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
    }

    #[track_caller]
    fn same(&self, span: Span, expected: &[f32]) {
        self.near(span, expected, 2e-6);
    }

    #[track_caller]
    fn near(&self, span: Span, expected: &[f32], bound: f32) {
        let found = self.get(span);
        let scale = expected.iter().fold(1e-3f32, |largest, value| largest.max(value.abs()));
        for (at, (f, e)) in found.iter().zip(expected).enumerate() {
            assert!((f - e).abs() <= bound * scale, "element {at}: {f} against {e}, scale {scale}");
        }
        assert_eq!(found.len(), expected.len());
    }
}

fn random(name: &str, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    Random::new(11, name).fill_normal(0, 0.0, 1.0, &mut values);
    values
}

fn pool() -> Pool {
    Pool::single()
}

const SHAPES: [Rows; 3] =
    [Rows { rows: 1, width: 1 }, Rows { rows: 7, width: 33 }, Rows { rows: 64, width: 700 }];

#[test]
fn products_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for (rows, inputs, outputs) in [(1, 1, 1), (5, 7, 3), (64, 48, 130)] {
        let shape = linear::Shape { rows, inputs, outputs };
        let [x, w, dy] = [("x", rows * inputs), ("w", outputs * inputs), ("dy", rows * outputs)]
            .map(|(name, n)| random(name, n));
        let [on_x, on_w, on_dy] = [&x, &w, &dy].map(|values| bench.put(values));
        let mut y = vec![0.0; rows * outputs];
        linear::forward(&pool(), shape, &x, &w, &mut y);
        let on_y = bench.room(y.len());
        let at = LinearAt { x: on_x, w: on_w, bias: None, residual: None, kept: None, y: on_y };
        bench.device.linear(0, F32, shape, &at).unwrap();
        bench.same(on_y, &y);
        // With a bias and a residual.
        let (b, residual) = (random("b", outputs), random("residual", rows * outputs));
        let (on_b, on_residual) = (bench.put(&b), bench.put(&residual));
        let at = LinearAt { bias: Some(on_b), residual: Some(on_residual), ..at };
        bench.device.linear(0, F32, shape, &at).unwrap();
        let sums = y.iter().zip(&residual).enumerate();
        let sums: Vec<f32> = sums.map(|(i, (y, r))| y + b[i % outputs] + r).collect();
        bench.same(on_y, &sums);
        let mut dx = vec![0.0; x.len()];
        linear::input_gradient(&pool(), shape, &dy, &w, &mut dx);
        let on_dx = bench.room(dx.len());
        let at = InputGradientAt { dy: on_dy, w: on_w, kept: None, dx: on_dx };
        bench.device.linear_input(0, F32, shape, &at).unwrap();
        bench.same(on_dx, &dx);
        let mut dw = random("dw", w.len());
        let on_dw = bench.put(&dw);
        for mode in [Write::Accumulate, Write::Overwrite] {
            linear::weight_gradient(&pool(), shape, &dy, &x, &mut dw, mode);
            bench.device.linear_weight(0, F32, shape, (on_dy, on_x, on_dw), mode).unwrap();
            bench.same(on_dw, &dw);
        }
    }
}

type Forward = fn(&[f32], &mut [f32]);
type Gradient = fn(&[f32], &[f32], &mut [f32]);

const FUNCTIONS: [(Function, Forward, Gradient); 3] = [
    (Function::Relu, activation::relu_forward, activation::relu_input_gradient),
    (Function::Gelu, activation::gelu_tanh_forward, activation::gelu_tanh_input_gradient),
    (
        Function::SquaredRelu,
        activation::squared_relu_forward,
        activation::squared_relu_input_gradient,
    ),
];

#[test]
fn activations_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for shape in SHAPES {
        let n = shape.rows * shape.width;
        let [x, dy] = ["x", "dy"].map(|name| random(name, n));
        let (on_x, on_dy) = (bench.put(&x), bench.put(&dy));
        let (on_y, mut y) = (bench.room(n), vec![0.0; n]);
        for (function, forward, gradient) in FUNCTIONS {
            forward(&x, &mut y);
            bench.device.activation(0, F32, (function, shape), (on_x, on_y)).unwrap();
            bench.same(on_y, &y);
            gradient(&dy, &x, &mut y);
            let at = (on_dy, on_x, on_y);
            bench.device.activation_gradient(0, F32, (function, shape), at).unwrap();
            bench.same(on_y, &y);
        }
        let both = random("both", 2 * n);
        let on_both = bench.put(&both);
        activation::swiglu_forward(shape, &both, &mut y);
        let of = (Function::SwiGlu, shape);
        bench.device.activation(0, F32, of, (on_both, on_y)).unwrap();
        bench.same(on_y, &y);
        let (mut dboth, on_dboth) = (vec![0.0; 2 * n], bench.room(2 * n));
        activation::swiglu_input_gradient(shape, &dy, &both, &mut dboth);
        bench.device.activation_gradient(0, F32, of, (on_dy, on_both, on_dboth)).unwrap();
        bench.same(on_dboth, &dboth);
    }
}

#[test]
fn biases_and_sums_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for shape in SHAPES {
        let n = shape.rows * shape.width;
        let [x, dy] = ["x", "dy"].map(|name| random(name, n));
        let (on_x, on_dy) = (bench.put(&x), bench.put(&dy));
        let (on_y, mut y) = (bench.room(n), vec![0.0; n]);
        let b = random("b", shape.width);
        let on_b = bench.put(&b);
        bias::forward(shape, &x, &b, &mut y);
        bench.device.bias(0, F32, shape, (on_x, on_b, on_y)).unwrap();
        bench.same(on_y, &y);
        let mut db = random("db", shape.width);
        let on_db = bench.put(&db);
        for mode in [Write::Accumulate, Write::Overwrite] {
            bias::weight_gradient(&pool(), shape, &dy, &mut db, mode);
            bench.device.bias_weight(0, F32, shape, (on_dy, on_db), mode).unwrap();
            bench.same(on_db, &db);
        }
        reduce::add3(&x, &dy, &mut y);
        bench.device.add(0, F32, on_x, on_dy, on_y).unwrap();
        bench.same(on_y, &y);
        reduce::add(&x, &mut y);
        bench.device.accumulate(0, on_x, on_y).unwrap();
        bench.same(on_y, &y);
        bench.device.copy(0, on_x, on_y).unwrap();
        bench.same(on_y, &x);
    }
}

#[test]
fn norms_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for shape in SHAPES {
        let (n, width) = (shape.rows * shape.width, shape.width);
        let [x, dy] = ["x", "dy"].map(|name| random(name, n));
        let [gamma, beta] = ["gamma", "beta"].map(|name| random(name, width));
        let [on_x, on_dy] = [&x, &dy].map(|values| bench.put(values));
        let [on_gamma, on_beta] = [&gamma, &beta].map(|values| bench.put(values));
        for layer in [true, false] {
            let (mut y, mut dx) = (vec![0.0; n], vec![0.0; n]);
            let mut stats = vec![0.0; shape.rows * if layer { 2 } else { 1 }];
            let [mut dgamma, mut dbeta] = ["dgamma", "dbeta"].map(|name| random(name, width));
            let (on_y, on_dx, on_stats) = (bench.room(n), bench.room(n), bench.room(stats.len()));
            let [on_dgamma, on_dbeta] = [&dgamma, &dbeta].map(|values| bench.put(values));
            let mode = Write::Accumulate;
            if layer {
                norm::layer_norm_forward(shape, 1e-5, &x, &gamma, &beta, &mut y, &mut stats);
                norm::layer_norm_input_gradient(shape, &dy, &x, &gamma, &stats, &mut dx);
                let (g, b) = (&mut dgamma, &mut dbeta);
                norm::layer_norm_weight_gradient(&pool(), shape, &dy, &x, &stats, (g, b), mode);
            } else {
                norm::rms_norm_forward(shape, 1e-5, &x, &gamma, &mut y, &mut stats);
                norm::rms_norm_input_gradient(shape, &dy, &x, &gamma, &stats, &mut dx);
                norm::rms_norm_weight_gradient(&pool(), shape, &dy, &x, &stats, &mut dgamma, mode);
            }
            let on_sums = bench.room(width);
            let gpu = &mut bench.device;
            let second = |span| layer.then_some(span);
            let (bias, gain) = (second(on_beta), on_gamma);
            let (x, y_at, stats_at) = (on_x, on_y, on_stats);
            let at = NormAt { x, added: None, gain, bias, y: y_at, stats: stats_at };
            gpu.norm(0, F32, shape, 1e-5, &at).unwrap();
            let at = NormGradientAt {
                layer,
                dy: on_dy,
                x: on_x,
                stats: on_stats,
                gain: Some(on_gamma),
                added: None,
                dx: Some(on_dx),
                weights: Some((on_dgamma, second(on_dbeta), mode)),
            };
            gpu.norm_gradient(0, F32, shape, &at).unwrap();
            gpu.column_sums(0, F32, on_sums, Write::Overwrite).unwrap();
            bench.same(on_y, &y);
            bench.same(on_stats, &stats);
            // The variance of one element is zero, so the quotient is all rounding error.
            if width > 1 {
                bench.same(on_dx, &dx);
                let sum = |c: usize| (0..shape.rows).map(|r| dx[r * width + c]).sum();
                bench.near(on_sums, &(0..width).map(sum).collect::<Vec<f32>>(), 1e-5);
            }
            bench.same(on_dgamma, &dgamma);
            bench.same(on_dbeta, &dbeta);
        }
    }
}

#[test]
fn the_loss_agrees() {
    let Some(mut bench) = Bench::open() else { return };
    for shape in SHAPES {
        let (n, rows, words) = (shape.rows * shape.width, shape.rows, shape.width as u32);
        let logits = random("logits", n);
        let targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % words).collect();
        let columns = Columns { first: 0, valid: shape.width };
        let (on_logits, on_targets) = (bench.put(&logits), bench.put_words(&targets));
        let (mut max, mut stats) = (vec![0.0; rows], vec![0.0; 2 * rows]);
        let mut losses = vec![0.0; rows];
        loss::row_max(shape, columns, &logits, &mut max);
        loss::softmax_stats(shape, columns, &logits, &max, &targets, &mut stats);
        loss::cross_entropy(&stats, &mut losses);
        let (on_losses, on_stats) = (bench.room(rows), bench.room(2 * rows));
        let at = LossAt { logits: on_logits, targets: on_targets, stats: on_stats };
        let of = (shape, words);
        bench.device.cross_entropy(0, F32, of, &at, on_losses, None).unwrap();
        bench.near(on_losses, &losses, 1e-5);
        let on_total = bench.put(&[100.0]);
        bench.device.sum(0, on_losses, on_total, Write::Accumulate).unwrap();
        bench.same(on_total, &[100.0 + loss::sum(&losses)]);
        let (mut dlogits, on_dlogits) = (vec![0.0; n], bench.room(n));
        loss::input_gradient(shape, columns, 0.5, &logits, &max, &stats, &targets, &mut dlogits);
        let gpu = &bench.device;
        gpu.cross_entropy_gradient(0, F32, of, &at, on_dlogits, 0.5).unwrap();
        bench.near(on_dlogits, &dlogits, 1e-5);
        // In place of the logits, with their loss.
        bench.device.cross_entropy(0, F32, of, &at, on_losses, Some(0.5)).unwrap();
        bench.near(on_logits, &dlogits, 1e-5);
    }
}

#[test]
fn tables_of_words_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for shape in SHAPES {
        let n = shape.rows * shape.width;
        // A table of 5 tokens; ids are taken modulo 6.
        let (table, dy) = (random("table", 5 * shape.width), random("dy", n));
        let ids: Vec<u32> = (0..shape.rows as u32).map(|row| row * 3 % 6).collect();
        let (on_table, on_ids, on_dy) = (bench.put(&table), bench.put_words(&ids), bench.put(&dy));
        let (mut y, on_y) = (vec![0.0; n], bench.room(n));
        embedding::forward(shape, 0, &ids, &table, &mut y);
        let words = Words { table: on_table, first: 0 };
        bench.device.embedding(0, F32, shape, (on_ids, words, on_y), None).unwrap();
        bench.same(on_y, &y);
        let (mut dtable, mut room) = (table.clone(), vec![0; shape.rows]);
        for mode in [Write::Accumulate, Write::Overwrite] {
            embedding::weight_gradient(shape, 0, &ids, &dy, &mut dtable, mode, &mut room);
            bench.device.embedding_weight(0, F32, shape, (on_dy, words), &ids, mode).unwrap();
            bench.same(on_table, &dtable);
        }
    }
}

#[test]
fn attention_and_rotation_agree() {
    let Some(mut bench) = Bench::open() else { return };
    for (batch, seq, heads, kv_heads, head_dim) in
        [(2, 37, 4, 4, 32), (1, 65, 4, 2, 20), (3, 8, 2, 1, 128)]
    {
        let shape = attention::Shape {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            scores: attention::Scores::default(),
        };
        let (rows, width) = (batch * seq, (heads + 2 * kv_heads) * head_dim);
        let (qkv, dout) = (random("qkv", rows * width), random("dout", rows * heads * head_dim));
        let (mut out, mut lse) = (vec![0.0; dout.len()], vec![0.0; rows * heads]);
        let mut room = vec![0.0; shape.forward_workspace::<f32>()];
        attention::forward(&pool(), shape, &qkv, None, &mut out, &mut lse, &mut room);
        let mut dqkv = vec![0.0; qkv.len()];
        let mut room = vec![0.0; shape.backward_workspace::<f32>()];
        attention::backward(&pool(), shape, &dout, &qkv, &out, &lse, &mut dqkv, &mut room);
        let (on_qkv, on_dout) = (bench.put(&qkv), bench.put(&dout));
        let (on_out, on_lse) = (bench.room(out.len()), bench.room(lse.len()));
        let on_dqkv = bench.room(dqkv.len());
        let of = AttentionShape {
            batch: batch as u64,
            seq: seq as u64,
            heads: heads as u64,
            kv_heads: kv_heads as u64,
            head_dim: head_dim as u64,
            element: F32,
            deterministic: true,
        };
        let forward = AttentionAt { qkv: on_qkv, output: on_out, lse: on_lse };
        bench.device.attention_forward(0, &of, &forward).unwrap();
        bench.near(on_out, &out, 1e-5);
        let at = AttentionGradientAt { forward, doutput: on_dout, dqkv: on_dqkv };
        bench.device.attention_gradient(0, &of, &at).unwrap();
        bench.near(on_dqkv, &dqkv, 1e-5);
        let positions: Vec<u32> = (0..seq as u32).collect();
        let rotation = rope::Rotation {
            heads,
            kv_heads,
            head_dim,
            theta: 1e4,
            dims: 0,
            magnitude: 1.0,
            frequencies: &[],
        };
        let mut turned = vec![0.0; qkv.len()];
        rope::forward(rotation, &positions, &qkv, &mut turned);
        let mut turns = Vec::new();
        for position in 0..seq {
            for pair in 0..head_dim / 2 {
                let angle = position as f64 * 1e4f64.powf(-2.0 * pair as f64 / head_dim as f64);
                turns.extend([angle.cos() as f32, angle.sin() as f32].map(f32::to_ne_bytes));
            }
        }
        let at = RotationAt {
            rows: on_qkv,
            heads: (heads + kv_heads) as u32,
            head_dim: head_dim as u32,
            seq: seq as u32,
            table: bench.device.table(&turns.concat()).unwrap(),
            back: false,
        };
        bench.device.rotate(0, F32, Rows { rows, width }, &at).unwrap();
        bench.near(on_qkv, &turned, 1e-5);
        bench
            .device
            .rotate(0, F32, Rows { rows, width }, &RotationAt { back: true, ..at })
            .unwrap();
        bench.near(on_qkv, &qkv, 1e-5);
    }
}

#[test]
fn updates_and_norms_of_gradients_agree() {
    let Some(mut bench) = Bench::open() else { return };
    let n = 3072;
    let decays = bench.device.table(&[1; 3]).unwrap();
    let (mut p, g) = (random("p", n), random("g", n));
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    let (on_p, on_g, on_m, on_v) = (bench.put(&p), bench.put(&g), bench.put(&m), bench.put(&v));
    for step in 1..=3 {
        let rule = optimizer::AdamW {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            grad_scale: 0.5,
            step,
        };
        let weights = optimizer::Weights { master: &mut p, rounded: None::<&mut [f32]> };
        optimizer::adamw(&rule, true, weights, &g, &mut m, &mut v);
        let rule = Update::AdamW(rule.constants(true));
        let moments = [on_m, on_v];
        let at = UpdateAt {
            master: on_p,
            weights: None,
            gradients: on_g,
            moments: &moments,
            decays,
            norm: None,
            clip: None,
        };
        bench.device.update(0, F32, &rule, &at).unwrap();
    }
    bench.same(on_p, &p);
    bench.same(on_m, &m);
    bench.same(on_v, &v);
    let (mut sums, on_sums) = (vec![0.0; 3], bench.room(3));
    reduce::block_squares(&g, 1024, &mut sums);
    bench.device.block_squares(0, on_g, on_sums).unwrap();
    bench.same(on_sums, &sums);
    let on_root = bench.room(1);
    bench.device.root_of_sum(0, on_sums, on_root).unwrap();
    bench.same(on_root, &[sums.iter().sum::<f32>().sqrt()]);
    let of = |first, blocks, slot| TensorBlocks { first, blocks, slot };
    let squares = bench.device.squares(&[of(1, 2, 0), of(0, 1, 2)]).unwrap();
    let on_tensors = bench.room(3);
    bench.device.tensor_squares(0, (on_sums, on_tensors), &squares).unwrap();
    bench.same(on_tensors, &[sums[1] + sums[2], 0.0, sums[0]]);
    // A gradient longer than the clip is shortened, and an infinite one is skipped.
    let on_norm = bench.put(&[4.0]);
    let sgd = Update::Sgd { lr: 1.0, decay: 0.0, scale: 1.0, momentum: 0.0 };
    let at = UpdateAt {
        master: on_p,
        weights: None,
        gradients: on_g,
        moments: &[],
        decays,
        norm: Some(on_norm),
        clip: Some(1.0),
    };
    bench.device.update(0, F32, &sgd, &at).unwrap();
    p.iter_mut().zip(&g).for_each(|(p, g)| *p -= g * (1.0 / (4.0 + 1e-6)));
    bench.same(on_p, &p);
    let norm = Some(bench.put(&[f32::INFINITY]));
    bench.device.update(0, F32, &sgd, &UpdateAt { norm, ..at }).unwrap();
    bench.same(on_p, &p);
}

#[test]
fn streams_wait_for_marks_and_wrong_spans_are_refused() {
    let Some(mut bench) = Bench::open() else { return };
    let (a, b) = (bench.put(&vec![1.0; 1 << 20]), bench.room(1 << 20));
    bench.device.synchronise().unwrap();
    for _ in 0..20 {
        bench.device.accumulate(0, a, a).unwrap();
    }
    let start = bench.device.mark(0).unwrap();
    bench.device.wait(1, &start).unwrap();
    bench.device.copy(1, a, b).unwrap();
    let end = bench.device.mark(1).unwrap();
    bench.device.synchronise().unwrap();
    assert_eq!(bench.get(b)[77], (1u32 << 20) as f32);
    assert!(bench.device.seconds(&start, &end).unwrap() > 0.0);
    let beyond = Span { offset: 64 << 20, len: 4 };
    assert!(matches!(bench.device.accumulate(0, beyond, beyond), Err(CudaError::Span { .. })));
    let short = Span { len: 8, ..a };
    assert!(matches!(bench.device.add(0, F32, a, short, b), Err(CudaError::Span { .. })));
    assert!(matches!(Device::open(999, 1, 4, None), Err(CudaError::NoDevice { ordinal: 999, .. })));
}
