//! Checks and times the GPU kernels of a training iteration, alone, at the sizes of a model.
//!
//! `cargo bench -p paceline-kernels --features cuda --bench cuda -- [check] [gpt2-124m]`
#![allow(clippy::undocumented_unsafe_blocks, reason = "every buffer lives until the end")]

use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use paceline_kernels::cuda::{
    Arg, Attention, AttentionShape, BackwardAt, Cudnn, ElementType, Epilogue, ForwardAt, Grid,
    Kernels, Operands, Pass, Product, Products, Routing, Source, UpdateConstants,
};
use paceline_kernels::experts::{dispatch, route};
use paceline_kernels::philox::Stream as Random;
use paceline_kernels::{head_norm, latent, rope};
use std::sync::Arc;

const BF16: ElementType = ElementType::Bf16;
const F32: ElementType = ElementType::F32;

struct Bench {
    stream: Arc<CudaStream>,
    kernels: Kernels,
    products: Products,
    cudnn: Option<Cudnn>,
    held: Vec<CudaSlice<u8>>,
    noise: Vec<f32>,
}

fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn unbf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

impl Bench {
    fn new() -> Self {
        let context = CudaContext::new(0).expect("a GPU");
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().unwrap();
        let workspace = stream.alloc_zeros::<u8>(64 << 20).unwrap();
        let at = workspace.device_ptr(&stream).0;
        let products = unsafe { Products::new(&stream, at, 64 << 20) }.unwrap();
        let kernels = Kernels::new(&context).unwrap();
        let cudnn = Cudnn::open(&stream).unwrap();
        let mut noise = vec![0.0; 1 << 20];
        Random::new(3, "noise").fill_normal(0, 0.0, 1.0, &mut noise);
        Self { stream, kernels, products, cudnn, held: vec![workspace], noise }
    }

    fn bytes(&mut self, bytes: &[u8]) -> CUdeviceptr {
        let slice = self.stream.clone_htod(bytes).unwrap();
        let at = slice.device_ptr(&self.stream).0;
        self.held.push(slice);
        at
    }

    fn put(&mut self, ty: ElementType, values: &[f32]) -> CUdeviceptr {
        let bytes: Vec<u8> = match ty {
            ElementType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| bf16(*v).to_le_bytes()).collect(),
        };
        self.bytes(&bytes)
    }

    fn words(&mut self, values: &[u32]) -> CUdeviceptr {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.bytes(&bytes)
    }

    /// Random values, a tile of a million repeated.
    fn random(&mut self, ty: ElementType, n: u64, scale: f32) -> CUdeviceptr {
        let tile: Vec<f32> = self.noise.iter().map(|v| v * scale).collect();
        let values: Vec<f32> = tile.iter().copied().cycle().take(n as usize).collect();
        self.put(ty, &values)
    }

    fn room(&mut self, bytes: u64) -> CUdeviceptr {
        let slice = self.stream.alloc_zeros::<u8>(bytes.max(16) as usize).unwrap();
        let at = slice.device_ptr(&self.stream).0;
        self.held.push(slice);
        at
    }

    fn get(&self, ty: ElementType, at: CUdeviceptr, n: usize) -> Vec<f32> {
        self.stream.synchronize().unwrap();
        let mut bytes = vec![0u8; n * ty.bytes() as usize];
        unsafe { cudarc::driver::result::memcpy_dtoh_sync(&mut bytes, at) }.unwrap();
        match ty {
            ElementType::F32 => {
                bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
            }
            _ => {
                bytes.chunks(2).map(|b| unbf16(u16::from_le_bytes(b.try_into().unwrap()))).collect()
            }
        }
    }

    fn run(&self, source: Source, ty: ElementType, name: &'static str, grid: Grid, args: &[Arg]) {
        unsafe { self.kernels.launch(&self.stream, (source, ty, name), grid, args) }.unwrap();
    }

    /// Median milliseconds of a call.
    fn time(&mut self, mut call: impl FnMut(&mut Self)) -> f64 {
        for _ in 0..3 {
            call(self);
        }
        let mut times: Vec<f32> = (0..15)
            .map(|_| {
                let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
                let start = self.stream.record_event(flags).unwrap();
                call(self);
                let end = self.stream.record_event(flags).unwrap();
                start.elapsed_ms(&end).unwrap()
            })
            .collect();
        times.sort_by(f32::total_cmp);
        f64::from(times[times.len() / 2])
    }
}

fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let off: f64 =
        found.iter().zip(expected).map(|(f, e)| square(f64::from(*f) - f64::from(*e))).sum();
    let norm: f64 = expected.iter().map(|e| square(f64::from(*e))).sum();
    (off / norm.max(1e-30)).sqrt()
}

fn report(name: &str, off: f64, bound: f64) {
    let verdict = if off < bound { "ok" } else { "WRONG" };
    println!("{verdict:6} {name}: {off:.2e}");
}

fn tensor(seed: &str, ty: ElementType, n: usize, scale: f32) -> Vec<f32> {
    let mut values = vec![0.0; n];
    Random::new(7, seed).fill_normal(0, 0.0, 1.0, &mut values);
    let round = |v: f32| if ty == F32 { v * scale } else { unbf16(bf16(v * scale)) };
    values.into_iter().map(round).collect()
}

fn check_norm(bench: &mut Bench, ty: ElementType, layer: bool, rows: usize, width: usize) {
    let n = rows * width;
    let (x, add) = (tensor("x", ty, n, 1.0), tensor("add", ty, n, 1.0));
    let (gamma, beta) = (tensor("gamma", ty, width, 1.0), tensor("beta", ty, width, 1.0));
    let dy = tensor("dy", ty, n, 1.0);
    let round = |v: f32| if ty == F32 { v } else { unbf16(bf16(v)) };
    let sum: Vec<f32> = x.iter().zip(&add).map(|(a, b)| round(a + b)).collect();
    let (mut y, mut dx) = (vec![0.0; n], vec![0.0; n]);
    let (mut dgamma, mut dbeta, mut dbias) =
        (vec![0f64; width], vec![0f64; width], vec![0f64; width]);
    for r in 0..rows {
        let at = |v: &[f32], c: usize| f64::from(v[r * width + c]);
        let w = width as f64;
        let mean = if layer { (0..width).map(|c| at(&sum, c)).sum::<f64>() / w } else { 0.0 };
        let var = (0..width).map(|c| (at(&sum, c) - mean).powi(2)).sum::<f64>() / w;
        let scale = 1.0 / (var + 1e-5).sqrt();
        let hat = |c: usize| (at(&sum, c) - mean) * scale;
        let g = |c: usize| at(&dy, c) * f64::from(gamma[c]);
        let along = if layer { (0..width).map(g).sum::<f64>() / w } else { 0.0 };
        let across = (0..width).map(|c| g(c) * hat(c)).sum::<f64>() / w;
        for c in 0..width {
            let b = if layer { f64::from(beta[c]) } else { 0.0 };
            y[r * width + c] = (hat(c) * f64::from(gamma[c]) + b) as f32;
            let d = scale * (g(c) - along - hat(c) * across) + at(&add, c);
            dx[r * width + c] = d as f32;
            dgamma[c] += at(&dy, c) * hat(c);
            dbeta[c] += at(&dy, c);
            dbias[c] += f64::from(round(d as f32));
        }
    }
    let warps = match width.div_ceil(32) {
        0..=24 => 1,
        25..=48 => 2,
        49..=96 => 4,
        _ => 8,
    };
    let groups = 8 / warps;
    let source = Source::Norm { width: width as u32, layer, warps };
    let [xa, aa, ga, ba, dya] = [&x, &add, &gamma, &beta, &dy].map(|v| bench.put(ty, v));
    let (suma, ya, dxa) =
        (bench.room(n as u64 * 4), bench.room(n as u64 * 4), bench.room(n as u64 * 4));
    let stats = bench.room(rows as u64 * 8);
    let blocks = (rows as u32).div_ceil(groups);
    let args = [xa, aa, ga, ba, suma, ya, stats].map(Arg::At);
    let args: Vec<Arg> =
        args.into_iter().chain([Arg::Word(rows as u32), Arg::Real(1e-5)]).collect();
    bench.run(source, ty, "norm_forward", Grid::of(blocks, 256), &args);
    let parts = 5u32;
    let partial = bench.room(u64::from(parts) * 3 * width as u64 * 4);
    let args = [dya, suma, ga, stats, aa, dxa, partial].map(Arg::At);
    let args: Vec<Arg> = args.into_iter().chain([Arg::Word(rows as u32)]).collect();
    bench.run(source, ty, "norm_backward", Grid::of(parts, 256), &args);
    let bound = if ty == F32 { 1e-5 } else { 8e-3 };
    let name = |what: &str| format!("norm {what} {ty:?} layer {layer} {rows}x{width}");
    report(&name("y"), error(&bench.get(ty, ya, n), &y), bound);
    report(&name("dx"), error(&bench.get(ty, dxa, n), &dx), bound);
    for (which, (what, expected)) in
        [("dgamma", dgamma), ("dbeta", dbeta), ("dbias", dbias)].into_iter().enumerate()
    {
        let to = bench.room(width as u64 * 4);
        let args = [
            Arg::At(partial + which as u64 * width as u64 * 4),
            Arg::At(to),
            Arg::Word(parts),
            Arg::Long(3 * width as u64),
            Arg::Word(width as u32),
            Arg::Word(1),
        ];
        let grid = Grid::of((width as u32).div_ceil(32), 256);
        bench.run(Source::Elementwise, ty, "fold_partials", grid, &args);
        let expected: Vec<f32> = expected.into_iter().map(|v| v as f32).collect();
        report(&name(what), error(&bench.get(F32, to, width), &expected), bound);
    }
}

fn check_loss(bench: &mut Bench, ty: ElementType, rows: usize, width: usize, words: usize) {
    let logits = tensor("logits", ty, rows * width, 3.0);
    let targets: Vec<u32> = (0..rows).map(|r| (r * 7919 % words) as u32).collect();
    let scale = 0.25f32;
    let (mut losses, mut gradient) = (vec![0.0; rows], vec![0.0; rows * width]);
    for r in 0..rows {
        let row = &logits[r * width..][..words];
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|v| f64::from(v - max).exp()).sum();
        let t = targets[r] as usize;
        losses[r] = (sum.ln() + f64::from(max) - f64::from(row[t])) as f32;
        for c in 0..words {
            let p = f64::from(row[c] - max).exp() / sum - if c == t { 1.0 } else { 0.0 };
            gradient[r * width + c] = (p * f64::from(scale)) as f32;
        }
    }
    let (la, ta) = (bench.put(ty, &logits), bench.words(&targets));
    let (stats, lossa) = (bench.room(rows as u64 * 8), bench.room(rows as u64 * 4));
    let other = bench.room((rows * width) as u64 * ty.bytes());
    let held = width.is_multiple_of(8) && width <= 51200;
    let source = Source::CrossEntropy {
        width: width as u32,
        words: words as u32,
        threads: 1024,
        blocks: 1,
        held,
    };
    let tail = [Arg::Real(scale)];
    let args: Vec<Arg> = [la, ta, stats, lossa, 0].map(Arg::At).into_iter().chain(tail).collect();
    bench.run(source, ty, "cross_entropy", Grid::of(rows as u32, 1024), &args);
    let args: Vec<Arg> = [la, ta, stats, other].map(Arg::At).into_iter().chain(tail).collect();
    bench.run(source, ty, "cross_entropy_gradient", Grid::of(rows as u32, 1024), &args);
    let bound = if ty == F32 { 1e-5 } else { 5e-3 };
    let name = |what: &str| format!("cross entropy {what} {ty:?} {rows}x{width}/{words}");
    report(&name("gradient alone"), error(&bench.get(ty, other, rows * width), &gradient), bound);
    let args: Vec<Arg> = [la, ta, stats, lossa, la].map(Arg::At).into_iter().chain(tail).collect();
    bench.run(source, ty, "cross_entropy", Grid::of(rows as u32, 1024), &args);
    report(&name("loss"), error(&bench.get(F32, lossa, rows), &losses), 1e-5);
    report(&name("gradient"), error(&bench.get(ty, la, rows * width), &gradient), bound);
}

/// Rows by word, cut into segments.
struct Segments {
    order: CUdeviceptr,
    starts: CUdeviceptr,
    words: CUdeviceptr,
    places: CUdeviceptr,
    count: u32,
    fold_starts: CUdeviceptr,
    fold_words: CUdeviceptr,
    folds: u32,
    partial: CUdeviceptr,
}

impl Segments {
    fn of(bench: &mut Bench, ids: &[u32], most: usize, width: u64) -> Self {
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|&r| ids[r as usize]);
        let (mut starts, mut words, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let (mut fold_starts, mut fold_words, mut used) = (Vec::new(), Vec::new(), 0u32);
        let mut at = 0u32;
        for run in order.chunk_by(|a, b| ids[*a as usize] == ids[*b as usize]) {
            let word = ids[run[0] as usize];
            if run.len() > most {
                fold_starts.push(used);
                fold_words.push(word);
            }
            for part in run.chunks(most) {
                starts.push(at);
                words.push(word);
                places.push(if run.len() > most { used } else { u32::MAX });
                used += u32::from(run.len() > most);
                at += part.len() as u32;
            }
        }
        starts.push(at);
        fold_starts.push(used);
        Self {
            count: words.len() as u32,
            folds: fold_words.len() as u32,
            order: bench.words(&order),
            starts: bench.words(&starts),
            words: bench.words(&words),
            places: bench.words(&places),
            fold_starts: bench.words(&fold_starts),
            fold_words: if fold_words.is_empty() { 0 } else { bench.words(&fold_words) },
            partial: bench.room(u64::from(used.max(1)) * width * 4),
        }
    }

    fn run(
        &self,
        bench: &mut Bench,
        ty: ElementType,
        (dy, table): (CUdeviceptr, CUdeviceptr),
        width: u32,
    ) {
        let e = Source::Elementwise;
        let args = [dy, self.order, self.starts, self.words, self.places, table, self.partial]
            .map(Arg::At);
        let args: Vec<Arg> = args.into_iter().chain([Arg::Word(width)]).collect();
        bench.run(
            e,
            ty,
            "embedding_segments",
            Grid::of(self.count, (width / 8).clamp(32, 256).next_multiple_of(32)),
            &args,
        );
        if self.folds > 0 {
            let args = [self.partial, self.fold_starts, self.fold_words, table].map(Arg::At);
            let args: Vec<Arg> = args.into_iter().chain([Arg::Word(width)]).collect();
            bench.run(e, ty, "embedding_fold", Grid::of(self.folds, 256), &args);
        }
    }
}

fn gelu(v: f64) -> f64 {
    0.5 * v * (1.0 + (0.7978845608028654 * (v + 0.044715 * v * v * v)).tanh())
}

fn slope(v: f64) -> f64 {
    let t = (0.7978845608028654 * (v + 0.044715 * v * v * v)).tanh();
    0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * v * v)
}

fn check_elementwise(bench: &mut Bench, ty: ElementType) {
    let (rows, width) = (37usize, 264usize);
    let n = rows * width;
    let bound = if ty == F32 { 1e-5 } else { 5e-3 };
    let e = Source::Elementwise;
    let (x, dy) = (tensor("x", ty, 2 * n, 1.0), tensor("dy", ty, n, 1.0));
    let (xa, dya, to) = (bench.put(ty, &x), bench.put(ty, &dy), bench.room(8 * n as u64));
    let odd = n - 3;
    bench.run(
        e,
        ty,
        "gelu_forward",
        Grid::over(odd as u64),
        &[Arg::At(xa), Arg::At(to), Arg::Long(odd as u64)],
    );
    let expected: Vec<f32> = x[..odd].iter().map(|v| gelu(f64::from(*v)) as f32).collect();
    report(&format!("gelu {ty:?}"), error(&bench.get(ty, to, odd), &expected), bound);
    bench.run(
        e,
        ty,
        "gelu_backward",
        Grid::over(n as u64),
        &[Arg::At(dya), Arg::At(xa), Arg::At(to), Arg::Long(n as u64)],
    );
    let expected: Vec<f32> =
        (0..n).map(|i| (f64::from(dy[i]) * slope(f64::from(x[i]))) as f32).collect();
    report(&format!("gelu backward {ty:?}"), error(&bench.get(ty, to, n), &expected), bound);
    let sizes = [Arg::Word(rows as u32), Arg::Word(width as u32)];
    for (name, back, act, dact) in [
        (
            "swiglu_forward",
            "swiglu_backward",
            (|v: f64| v / (1.0 + (-v).exp())) as fn(f64) -> f64,
            (|v: f64| {
                let s = 1.0 / (1.0 + (-v).exp());
                s * (1.0 + v * (1.0 - s))
            }) as fn(f64) -> f64,
        ),
        ("geglu_forward", "geglu_backward", gelu as fn(f64) -> f64, slope as fn(f64) -> f64),
    ] {
        let at = |r: usize, c: usize| f64::from(x[r * 2 * width + c]);
        let (mut y, mut dx) = (vec![0.0; n], vec![0.0; 2 * n]);
        for r in 0..rows {
            for c in 0..width {
                let (g, u, d) = (at(r, c), at(r, width + c), f64::from(dy[r * width + c]));
                y[r * width + c] = (act(g) * u) as f32;
                dx[r * 2 * width + c] = (d * u * dact(g)) as f32;
                dx[r * 2 * width + width + c] = (d * act(g)) as f32;
            }
        }
        bench.run(
            e,
            ty,
            name,
            Grid::over(n as u64),
            &[Arg::At(xa), Arg::At(to), sizes[0], sizes[1]],
        );
        report(&format!("{name} {ty:?}"), error(&bench.get(ty, to, n), &y), bound);
        bench.run(
            e,
            ty,
            back,
            Grid::over(n as u64),
            &[Arg::At(dya), Arg::At(xa), Arg::At(to), sizes[0], sizes[1]],
        );
        report(&format!("{back} {ty:?}"), error(&bench.get(ty, to, 2 * n), &dx), bound);
    }
    // Embedding and its gradient.
    let (vocab, seq) = (50usize, 37usize);
    let ids: Vec<u32> = (0..rows).map(|r| (r * r % vocab) as u32).collect();
    let (table, places) =
        (tensor("table", ty, vocab * width, 1.0), tensor("places", ty, seq * width, 1.0));
    let (ia, ta, pa) = (bench.words(&ids), bench.put(ty, &table), bench.put(ty, &places));
    let args = [
        Arg::At(ia),
        Arg::At(ta),
        Arg::At(pa),
        Arg::At(to),
        sizes[0],
        sizes[1],
        Arg::Word(vocab as u32),
        Arg::Word(0),
        Arg::At(0),
        Arg::Word(seq as u32),
        Arg::Word(0),
    ];
    bench.run(e, ty, "embedding_forward", Grid::over(n as u64), &args);
    let expected: Vec<f32> = (0..n)
        .map(|i| {
            table[ids[i / width] as usize * width + i % width]
                + places[i / width % seq * width + i % width]
        })
        .collect();
    report(&format!("embedding {ty:?}"), error(&bench.get(ty, to, n), &expected), bound);
    let dtable = bench.room((vocab * width * 4) as u64);
    let segments = Segments::of(bench, &ids, 2, width as u64);
    segments.run(bench, ty, (dya, dtable), width as u32);
    let mut expected = vec![0f32; vocab * width];
    for i in 0..n {
        expected[ids[i / width] as usize * width + i % width] += dy[i];
    }
    report(
        &format!("embedding gradient {ty:?}"),
        error(&bench.get(F32, dtable, vocab * width), &expected),
        1e-5,
    );
    // Column sums.
    let partial = bench.room(3 * width as u64 * 4);
    let mut grid = Grid::of(3, 256);
    grid.blocks.1 = (width as u32).div_ceil(1024);
    let args = [Arg::At(dya), Arg::At(partial), sizes[0], sizes[1], Arg::Word(2)];
    bench.run(e, ty, "column_sums", grid, &args);
    let args = [
        Arg::At(partial),
        Arg::At(to),
        Arg::Word(3),
        Arg::Long(width as u64),
        sizes[1],
        Arg::Word(1),
    ];
    bench.run(e, ty, "fold_partials", Grid::of((width as u32).div_ceil(32), 256), &args);
    let expected: Vec<f32> =
        (0..width).map(|c| (0..rows).map(|r| dy[r * width + c]).sum()).collect();
    report(&format!("column sums {ty:?}"), error(&bench.get(F32, to, width), &expected), 1e-5);
}

fn check_products(bench: &mut Bench, ty: ElementType) {
    let (rows, inputs, outputs) = (64usize, 48usize, 96usize);
    let (x, w) = (tensor("x", ty, rows * inputs, 1.0), tensor("w", ty, outputs * inputs, 1.0));
    let (dy, bias) = (tensor("dy", ty, rows * outputs, 1.0), tensor("b", ty, outputs, 1.0));
    let bound = if ty == F32 { 1e-5 } else { 8e-3 };
    let (xa, wa, dya, ba) =
        (bench.put(ty, &x), bench.put(ty, &w), bench.put(ty, &dy), bench.put(ty, &bias));
    let (to, kept, db) = (bench.room(1 << 16), bench.room(1 << 16), bench.room(1 << 12));
    let y: Vec<f64> = (0..rows * outputs)
        .map(|i| {
            let (r, o) = (i / outputs, i % outputs);
            (0..inputs)
                .map(|k| f64::from(x[r * inputs + k]) * f64::from(w[o * inputs + k]))
                .sum::<f64>()
        })
        .collect();
    let dx: Vec<f64> = (0..rows * inputs)
        .map(|i| {
            let (r, k) = (i / inputs, i % inputs);
            (0..outputs)
                .map(|o| f64::from(dy[r * outputs + o]) * f64::from(w[o * inputs + k]))
                .sum::<f64>()
        })
        .collect();
    let dw: Vec<f32> = (0..outputs * inputs)
        .map(|i| {
            let (o, k) = (i / inputs, i % inputs);
            (0..rows)
                .map(|r| f64::from(dy[r * outputs + o]) * f64::from(x[r * inputs + k]))
                .sum::<f64>() as f32
        })
        .collect();
    let product = |pass, epilogue, result, accumulate| Product {
        pass,
        rows: rows as u64,
        inputs: inputs as u64,
        outputs: outputs as u64,
        operand: ty,
        result,
        accumulate,
        epilogue,
    };
    let forward =
        Operands { left: xa, right: wa, result: to, bias: ba, kept, ..Operands::default() };
    let run = |bench: &mut Bench, product: Product, at: &Operands, name: &str| match unsafe {
        bench.products.run(product, at)
    } {
        Ok(()) => true,
        Err(error) => {
            println!("REFUSED {name}: {error}");
            false
        }
    };
    let singles = |v: &[f64]| v.iter().map(|v| *v as f32).collect::<Vec<_>>();
    if run(bench, product(Pass::Forward, Epilogue::None, ty, false), &forward, "forward") {
        report(
            &format!("product {ty:?}"),
            error(&bench.get(ty, to, rows * outputs), &singles(&y)),
            bound,
        );
    }
    let biased: Vec<f64> =
        (0..rows * outputs).map(|i| y[i] + f64::from(bias[i % outputs])).collect();
    if run(bench, product(Pass::Forward, Epilogue::Bias, ty, false), &forward, "bias") {
        report(
            &format!("product + bias {ty:?}"),
            error(&bench.get(ty, to, rows * outputs), &singles(&biased)),
            bound,
        );
    }
    let residual = Operands { addend: dya, ..forward };
    if run(bench, product(Pass::Forward, Epilogue::Bias, ty, true), &residual, "bias and residual")
    {
        let expected: Vec<f32> = (0..rows * outputs).map(|i| biased[i] as f32 + dy[i]).collect();
        report(
            &format!("product + bias + residual {ty:?}"),
            error(&bench.get(ty, to, rows * outputs), &expected),
            bound,
        );
    }
    if run(bench, product(Pass::Forward, Epilogue::BiasGelu, ty, false), &forward, "bias and gelu")
    {
        let expected: Vec<f32> = biased.iter().map(|v| gelu(*v) as f32).collect();
        report(
            &format!("product + bias + gelu {ty:?}"),
            error(&bench.get(ty, to, rows * outputs), &expected),
            bound,
        );
        report(
            &format!("  its kept sum {ty:?}"),
            error(&bench.get(ty, kept, rows * outputs), &singles(&biased)),
            bound,
        );
    }
    let back =
        Operands { left: dya, right: wa, result: to, bias: db, kept: xa, ..Operands::default() };
    if run(bench, product(Pass::InputGradient, Epilogue::None, ty, false), &back, "input gradient")
    {
        report(
            &format!("input gradient {ty:?}"),
            error(&bench.get(ty, to, rows * inputs), &singles(&dx)),
            bound,
        );
    }
    if run(
        bench,
        product(Pass::InputGradient, Epilogue::GeluGradientBias, ty, false),
        &back,
        "gelu gradient and bias",
    ) {
        let expected: Vec<f32> =
            (0..rows * inputs).map(|i| (dx[i] * slope(f64::from(x[i]))) as f32).collect();
        report(
            &format!("input gradient · gelu' {ty:?}"),
            error(&bench.get(ty, to, rows * inputs), &expected),
            bound,
        );
        let sums: Vec<f32> =
            (0..inputs).map(|k| (0..rows).map(|r| expected[r * inputs + k]).sum()).collect();
        report(
            &format!("  its bias gradient {ty:?}"),
            error(&bench.get(ty, db, inputs), &sums),
            bound,
        );
    }
    if run(
        bench,
        product(Pass::InputGradient, Epilogue::GeluGradient, ty, false),
        &back,
        "gelu gradient",
    ) {
        let expected: Vec<f32> =
            (0..rows * inputs).map(|i| (dx[i] * slope(f64::from(x[i]))) as f32).collect();
        report(
            &format!("input gradient · gelu' alone {ty:?}"),
            error(&bench.get(ty, to, rows * inputs), &expected),
            bound,
        );
    }
    let weight =
        Operands { left: xa, right: dya, result: to, addend: to, bias: db, ..Operands::default() };
    for epilogue in [Epilogue::None, Epilogue::BiasGradient] {
        if run(
            bench,
            product(Pass::WeightGradient, epilogue, F32, false),
            &weight,
            "weight gradient",
        ) {
            report(
                &format!("weight gradient {epilogue:?} {ty:?}"),
                error(&bench.get(F32, to, outputs * inputs), &dw),
                bound,
            );
            if epilogue == Epilogue::BiasGradient {
                let sums: Vec<f32> =
                    (0..outputs).map(|o| (0..rows).map(|r| dy[r * outputs + o]).sum()).collect();
                report(
                    &format!("  its bias gradient {ty:?}"),
                    error(&bench.get(F32, db, outputs), &sums),
                    bound,
                );
            }
            if run(
                bench,
                product(Pass::WeightGradient, epilogue, F32, true),
                &weight,
                "accumulated",
            ) {
                let twice: Vec<f32> = dw.iter().map(|v| 2.0 * v).collect();
                report(
                    &format!("  accumulated {ty:?}"),
                    error(&bench.get(F32, to, outputs * inputs), &twice),
                    bound,
                );
            }
        }
    }
}

fn check_attention(bench: &mut Bench, shape: AttentionShape) {
    let Some(cudnn) = bench.cudnn.take() else { return println!("no cuDNN") };
    let attention = match Attention::new(&cudnn, shape) {
        Ok(attention) => attention,
        Err(error) => {
            println!("REFUSED {shape:?}: {error}");
            bench.cudnn = Some(cudnn);
            return;
        }
    };
    let [b, s, h, g, d] =
        [shape.batch, shape.seq, shape.heads, shape.kv_heads, shape.head_dim].map(|v| v as usize);
    let row = (h + 2 * g) * d;
    let qkv = tensor("qkv", BF16, b * s * row, 1.0);
    let dout = tensor("dout", BF16, b * s * h * d, 1.0);
    let mut out = vec![0f32; b * s * h * d];
    let mut dqkv = vec![0f64; b * s * row];
    let scale = 1.0 / (d as f64).sqrt();
    for bi in 0..b {
        for hi in 0..h {
            let gi = hi / (h / g);
            let at = |t: usize, head: usize, c: usize| (bi * s + t) * row + head * d + c;
            let q = |t: usize, c: usize| f64::from(qkv[at(t, hi, c)]);
            let k = |t: usize, c: usize| f64::from(qkv[at(t, h + gi, c)]);
            let v = |t: usize, c: usize| f64::from(qkv[at(t, h + g + gi, c)]);
            for t in 0..s {
                let scores: Vec<f64> = (0..=t)
                    .map(|u| (0..d).map(|c| q(t, c) * k(u, c)).sum::<f64>() * scale)
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exp: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
                let sum: f64 = exp.iter().sum();
                let p: Vec<f64> = exp.iter().map(|x| x / sum).collect();
                let o = |c: usize| (0..=t).map(|u| p[u] * v(u, c)).sum::<f64>();
                let place = ((bi * s + t) * h + hi) * d;
                let dof = |c: usize| f64::from(dout[place + c]);
                let mut dot = 0.0;
                for c in 0..d {
                    let value = o(c);
                    out[place + c] = value as f32;
                    dot += value * dof(c);
                }
                for u in 0..=t {
                    let dp: f64 = (0..d).map(|c| dof(c) * v(u, c)).sum();
                    let ds = p[u] * (dp - dot) * scale;
                    for c in 0..d {
                        dqkv[at(t, hi, c)] += ds * k(u, c);
                        dqkv[at(u, h + gi, c)] += ds * q(t, c);
                        dqkv[at(u, h + g + gi, c)] += p[u] * dof(c);
                    }
                }
            }
        }
    }
    let (qa, da) = (bench.put(BF16, &qkv), bench.put(BF16, &dout));
    let (oa, ga) = (bench.room((b * s * h * d * 2) as u64), bench.room((b * s * row * 2) as u64));
    let stats = bench.room((b * s * h * 4) as u64);
    let workspace = bench.room(attention.workspace().into_iter().max().unwrap_or(0));
    let forward = ForwardAt { qkv: qa, output: oa, stats, workspace };
    let name = format!("attention {b}x{s}x{h}/{g}x{d} deterministic {}", shape.deterministic);
    match unsafe { attention.forward(&cudnn, &forward) } {
        Ok(()) => report(&name, error(&bench.get(BF16, oa, out.len()), &out), 8e-3),
        Err(error) => println!("FAILED {name}: {error}"),
    }
    let back = BackwardAt { forward, output_gradient: da, qkv_gradient: ga };
    let expected: Vec<f32> = dqkv.iter().map(|v| *v as f32).collect();
    match unsafe { attention.backward(&cudnn, &back) } {
        Ok(()) => report(
            &format!("{name} backward"),
            error(&bench.get(BF16, ga, expected.len()), &expected),
            2e-2,
        ),
        Err(error) => println!("FAILED {name} backward: {error}"),
    }
    bench.cudnn = Some(cudnn);
}

/// Compares the kernels of experts with the CPU's, in f32.
fn check_experts(bench: &mut Bench, routing: route::Routing, biased: bool) {
    let pool = paceline_kernels::pool::Pool::single();
    let route::Routing { experts, topk, seq, .. } = routing;
    let (tokens, width, regions) = (3 * seq, 64usize, 2usize);
    let logits = tensor("logits", F32, tokens * experts, 1.0);
    let bias = tensor("bias", F32, experts, 0.3);
    let bias = biased.then_some(&bias[..]);
    let (mut choices, mut gates) = (vec![0u32; tokens * topk], vec![0f32; tokens * topk]);
    let (whole, floats) = routing.room();
    let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
    let each = tokens / routing.parts;
    let shards = || (0..routing.parts).map(|part| part * each..(part + 1) * each);
    let mut dropped = 0;
    for own in shards() {
        let at = own.start * topk..own.end * topk;
        dropped += route::forward(
            routing,
            own,
            &logits,
            bias,
            &mut choices[at.clone()],
            &mut gates[at],
            route::Room { whole: &mut whole, floats: &mut floats },
        );
    }
    let dgates = tensor("dgates", F32, tokens * topk, 1.0);
    let mut dlogits = vec![0f32; tokens * experts];
    for own in shards() {
        let (at, to) = (own.start * topk..own.end * topk, own.start * experts..own.end * experts);
        route::input_gradient(
            routing,
            own,
            &dgates[at],
            &logits,
            bias,
            &mut dlogits[to],
            2.0,
            route::Room { whole: &mut whole, floats: &mut floats },
        );
    }
    let name = |what: &str| {
        format!(
            "experts {experts} top {topk} sigmoid {} capacity {:?} parts {} {what}",
            routing.sigmoid, routing.capacity, routing.parts
        )
    };
    let r = Routing {
        experts: experts as u32,
        topk: topk as u32,
        sigmoid: routing.sigmoid.into(),
        seq: seq as u32,
        capacity: routing.capacity.unwrap_or(0) as u32,
        groups: routing.groups as u32,
        kept_groups: routing.kept_groups as u32,
        parts: routing.parts as u32,
        scale: routing.scale,
        balance: routing.balance,
    };
    let (rows, e) = (tokens as u32, Source::Experts);
    let la = bench.put(F32, &logits);
    let ba = bias.map_or(0, |bias| bench.put(F32, bias));
    let (chosen, counts, lost) = (
        bench.room((tokens * topk * 4) as u64),
        bench.room((3 * experts * 4) as u64),
        bench.room(12),
    );
    let warps =
        Grid { blocks: (rows.div_ceil(8), 1), threads: 256, shared: 8 * 4 * experts as u32 };
    bench.run(
        e,
        F32,
        "choose_experts",
        warps,
        &[Arg::At(la), Arg::At(ba), Arg::At(chosen), Arg::Routing(r), Arg::Word(rows)],
    );
    bench.run(
        e,
        F32,
        "count_and_drop",
        Grid::of(3, 1024),
        &[Arg::At(chosen), Arg::At(counts), Arg::At(lost), Arg::Routing(r)],
    );
    let (ca, ga) = (bench.room((tokens * topk * 4) as u64), bench.room((tokens * topk * 4) as u64));
    let args = [
        Arg::At(la),
        Arg::At(chosen),
        Arg::At(ca),
        Arg::At(ga),
        Arg::Routing(r),
        Arg::Word(rows),
        Arg::Word(0),
        Arg::Word(rows),
    ];
    bench.run(e, F32, "gate_weights", Grid::of(rows.div_ceil(8), 256), &args);
    let as_words = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    let found = as_words(bench.get(F32, ca, tokens * topk));
    println!("{:6} {}", if found == choices { "ok" } else { "WRONG" }, name("choices"));
    let found: u32 = as_words(bench.get(F32, lost, 3)).into_iter().sum();
    println!("{:6} {}", if u64::from(found) == dropped { "ok" } else { "WRONG" }, name("dropped"));
    report(&name("gates"), error(&bench.get(F32, ga, tokens * topk), &gates), 1e-5);
    let (dga, dla) = (bench.put(F32, &dgates), bench.room((tokens * experts * 4) as u64));
    let scale = bench.put(F32, &[2.0]);
    let args = [
        Arg::At(dga),
        Arg::At(la),
        Arg::At(chosen),
        Arg::At(counts),
        Arg::At(dla),
        Arg::Routing(r),
        Arg::Word(rows),
        Arg::Word(0),
        Arg::Word(rows),
        Arg::At(scale),
    ];
    bench.run(e, F32, "route_gradient", Grid::of(rows.div_ceil(8), 256), &args);
    report(&name("dlogits"), error(&bench.get(F32, dla, tokens * experts), &dlogits), 2e-5);
    // Dispatch and combine.
    let region_rows = tokens * topk;
    let shape = dispatch::Shape {
        tokens: paceline_kernels::Rows { rows: tokens, width },
        topk,
        experts,
        regions,
        region_rows,
    };
    let (mut slots, mut each, mut starts) =
        (vec![0u32; tokens * topk], vec![0u32; experts], vec![0u32; experts]);
    dispatch::places(shape, &choices, &mut slots, &mut each, &mut starts).unwrap();
    let n = (tokens * topk) as u32;
    let tiles = n.div_ceil(1024);
    let tile = bench.room(u64::from(tiles) * experts as u64 * 4);
    let (each_at, over, slots_at) =
        (bench.room(4 * experts as u64), bench.room(4), bench.room(u64::from(n) * 4));
    let places = (regions * region_rows) as u32;
    let origins = bench.words(&vec![u32::MAX; places as usize]);
    let small = |blocks| Grid { blocks: (blocks, 1), threads: 1024, shared: 4 * experts as u32 };
    bench.run(
        e,
        F32,
        "tile_counts",
        small(tiles),
        &[Arg::At(ca), Arg::At(tile), Arg::Word(n), Arg::Word(r.experts), Arg::Word(0)],
    );
    bench.run(
        e,
        F32,
        "tile_starts",
        small(1),
        &[
            Arg::At(tile),
            Arg::At(each_at),
            Arg::At(over),
            Arg::Word(tiles),
            Arg::Word(r.experts),
            Arg::Word(regions as u32),
            Arg::Word(region_rows as u32),
        ],
    );
    let large = Grid { blocks: (tiles, 1), threads: 1024, shared: 32 * 4 * experts as u32 };
    bench.run(
        e,
        F32,
        "assign_slots",
        large,
        &[
            Arg::At(ca),
            Arg::At(tile),
            Arg::At(slots_at),
            Arg::At(origins),
            Arg::Word(n),
            Arg::Word(r.experts),
            Arg::Word(regions as u32),
            Arg::Word(region_rows as u32),
        ],
    );
    let found = as_words(bench.get(F32, slots_at, slots.len()));
    println!("{:6} {}", if found == slots { "ok" } else { "WRONG" }, name("slots"));
    let found = as_words(bench.get(F32, each_at, experts));
    println!("{:6} {}", if found == each { "ok" } else { "WRONG" }, name("counts"));
    let x = tensor("x", F32, tokens * width, 1.0);
    let mut spread = vec![f32::NAN; places as usize * width];
    dispatch::scatter(&pool, shape, &x, &slots, &mut spread);
    let (xa, ra) = (bench.put(F32, &x), bench.room(u64::from(places) * width as u64 * 4));
    let sizes = [Arg::Word(width as u32), Arg::Word(r.topk)];
    bench.run(
        e,
        F32,
        "dispatch_rows",
        Grid::over(u64::from(places) * width as u64),
        &[
            Arg::At(xa),
            Arg::At(origins),
            Arg::At(0),
            Arg::At(ra),
            Arg::Word(places),
            sizes[0],
            sizes[1],
        ],
    );
    report(&name("dispatch"), error(&bench.get(F32, ra, spread.len()), &spread), 1e-6);
    let y = tensor("y", F32, places as usize * width, 1.0);
    let mut combined = vec![0f32; tokens * width];
    dispatch::combine(&pool, shape, &y, &slots, &gates, &mut combined);
    let (ya, to) = (bench.put(F32, &y), bench.room((tokens * width * 4) as u64));
    bench.run(
        e,
        F32,
        "combine_rows",
        Grid::over((tokens * width) as u64),
        &[
            Arg::At(ya),
            Arg::At(slots_at),
            Arg::At(ga),
            Arg::At(to),
            Arg::Word(rows),
            sizes[0],
            sizes[1],
        ],
    );
    report(&name("combine"), error(&bench.get(F32, to, combined.len()), &combined), 1e-6);
    let (mut drows, mut dg) = (vec![0f32; y.len()], vec![0f32; tokens * topk]);
    dispatch::combine_gradient(&pool, shape, &x, &y, &slots, &gates, &mut drows, &mut dg);
    bench.run(
        e,
        F32,
        "dispatch_rows",
        Grid::over(u64::from(places) * width as u64),
        &[
            Arg::At(xa),
            Arg::At(origins),
            Arg::At(ga),
            Arg::At(ra),
            Arg::Word(places),
            sizes[0],
            sizes[1],
        ],
    );
    report(&name("combine's gradient"), error(&bench.get(F32, ra, drows.len()), &drows), 1e-6);
    bench.run(
        e,
        F32,
        "gate_gradient",
        Grid::of(n.div_ceil(8), 256),
        &[
            Arg::At(xa),
            Arg::At(ya),
            Arg::At(slots_at),
            Arg::At(dga),
            Arg::Word(n),
            sizes[0],
            sizes[1],
        ],
    );
    report(&name("gates' gradient"), error(&bench.get(F32, dga, dg.len()), &dg), 1e-5);
}

/// Compares norms of heads, rotation and latent attention with the CPU's, in f32.
fn check_heads(bench: &mut Bench) {
    let pool = paceline_kernels::pool::Pool::single();
    let (batch, seq, heads, kv_heads, dim) = (2usize, 9usize, 4usize, 2usize, 48usize);
    let rows = batch * seq;
    let shape = head_norm::Shape { heads, kv_heads, head_dim: dim, least: 0.0 };
    let n = rows * shape.width();
    let (x, dy) = (tensor("x", F32, n, 1.0), tensor("dy", F32, n, 1.0));
    let gains = [tensor("gain q", F32, dim, 1.0), tensor("gain k", F32, dim, 1.0)];
    let both = [&gains[0][..], &gains[1][..]];
    let (mut y, mut dx, mut stats) = (vec![0.0; n], vec![0.0; n], vec![0.0; rows * shape.stats()]);
    head_norm::forward(shape, 1e-6, &x, both, &mut y, &mut stats);
    head_norm::input_gradient(shape, &dy, &x, both, &stats, &mut dx);
    let mut dgains = [vec![0f32; dim], vec![0f32; dim]];
    let [dq, dk] = &mut dgains;
    head_norm::weight_gradient(
        &pool,
        shape,
        &dy,
        &x,
        &stats,
        [dq, dk],
        paceline_kernels::Write::Overwrite,
    );
    let (xa, dya, q, k) =
        (bench.put(F32, &x), bench.put(F32, &dy), bench.put(F32, both[0]), bench.put(F32, both[1]));
    let (to, sa, partial) = (
        bench.room(n as u64 * 4),
        bench.room(stats.len() as u64 * 4),
        bench.room(5 * 2 * dim as u64 * 4),
    );
    let sizes = [rows, heads, kv_heads, dim].map(|v| Arg::Word(v as u32));
    let count = (rows * (heads + 2 * kv_heads)) as u32;
    let args: Vec<Arg> =
        [xa, q, k, to, sa].map(Arg::At).into_iter().chain(sizes).chain([Arg::Real(1e-6)]).collect();
    bench.run(Source::Heads, F32, "head_norm_forward", Grid::of(count.div_ceil(8), 256), &args);
    report("head norm", error(&bench.get(F32, to, n), &y), 1e-5);
    let args: Vec<Arg> =
        [dya, xa, q, k, sa, to, partial].map(Arg::At).into_iter().chain(sizes).collect();
    bench.run(Source::Heads, F32, "head_norm_backward", Grid::of(5, 256), &args);
    report("head norm dx", error(&bench.get(F32, to, n), &dx), 1e-5);
    for (which, dgain) in dgains.iter().enumerate() {
        let args = [
            Arg::At(partial + (which * dim * 4) as u64),
            Arg::At(to),
            Arg::Word(5),
            Arg::Long(2 * dim as u64),
            Arg::Word(dim as u32),
            Arg::Word(1),
        ];
        bench.run(
            Source::Elementwise,
            F32,
            "fold_partials",
            Grid::of((dim as u32).div_ceil(32), 256),
            &args,
        );
        report("head norm dgain", error(&bench.get(F32, to, dim), dgain), 1e-5);
    }
    // Rotation.
    let table = |rope: usize, theta: f64| -> Vec<f32> {
        (0..seq)
            .flat_map(|t| {
                (0..rope / 2).flat_map(move |i| {
                    let angle = t as f64 * theta.powf(-2.0 * i as f64 / rope as f64);
                    [angle.cos() as f32, angle.sin() as f32]
                })
            })
            .collect()
    };
    let positions: Vec<u32> = (0..seq as u32).collect();
    let rotation = rope::Rotation {
        heads,
        kv_heads,
        head_dim: dim,
        theta: 10000.0,
        dims: 0,
        magnitude: 1.0,
        frequencies: &[],
    };
    rope::forward(rotation, &positions, &x, &mut y);
    let turn = bench.put(F32, &table(dim, 10000.0));
    let args = [
        Arg::At(xa),
        Arg::At(turn),
        Arg::Word(rows as u32),
        Arg::Word(shape.width() as u32),
        Arg::Word((heads + kv_heads) as u32),
        Arg::Word(dim as u32),
        Arg::Word(seq as u32),
        Arg::Word(0),
        Arg::Real(1.0),
    ];
    bench.run(Source::Elementwise, F32, "rope", Grid::over(n as u64), &args);
    report("rope", error(&bench.get(F32, xa, n), &y), 1e-6);
    let mut back = args;
    back[8] = Arg::Real(-1.0);
    bench.run(Source::Elementwise, F32, "rope", Grid::over(n as u64), &back);
    report("rope back", error(&bench.get(F32, xa, n), &x), 1e-6);
    // Latent attention.
    let shape = latent::Shape {
        heads,
        head_dim: 24,
        rope: 8,
        v_dim: 12,
        theta: 10000.0,
        magnitude: 1.0,
        frequencies: &[],
    };
    let (width, own) = (shape.width(), heads * (24 - 8 + 12));
    let (q, kv, turned) = (
        tensor("q", F32, rows * width, 1.0),
        tensor("kv", F32, rows * own, 1.0),
        tensor("turned", F32, rows * 8, 1.0),
    );
    let dqkv = tensor("dqkv", F32, rows * 3 * width, 1.0);
    let mut qkv = vec![0f32; rows * 3 * width];
    let (mut dq, mut dkv, mut dturned) =
        (vec![0f32; q.len()], vec![0f32; kv.len()], vec![0f32; turned.len()]);
    let mut values = vec![0f32; rows * heads * 12];
    for r in 0..rows {
        let at = |n: usize| r * n..(r + 1) * n;
        let position = (r % seq) as u32;
        latent::heads(
            shape,
            position,
            &q[at(width)],
            &kv[at(own)],
            &turned[at(8)],
            &mut qkv[at(3 * width)],
        );
        latent::heads_gradient(
            shape,
            position,
            &dqkv[at(3 * width)],
            &mut dq[at(width)],
            &mut dkv[at(own)],
            &mut dturned[at(8)],
        );
        latent::values(shape, &q[at(width)], &mut values[at(heads * 12)]);
    }
    let turn = bench.put(F32, &table(8, 10000.0));
    let [qa, kva, ta, dqkva] = [&q, &kv, &turned, &dqkv].map(|v| bench.put(F32, v));
    let [qkva, dqa, dkva, dta] =
        [qkv.len(), dq.len(), dkv.len(), dturned.len()].map(|n| bench.room(n as u64 * 4));
    let sizes = [rows, heads, 24, 8, 12, seq].map(|v| Arg::Word(v as u32));
    let args: Vec<Arg> = [qa, kva, ta, qkva, turn].map(Arg::At).into_iter().chain(sizes).collect();
    bench.run(Source::Heads, F32, "latent_heads", Grid::over((rows * width) as u64), &args);
    report("latent heads", error(&bench.get(F32, qkva, qkv.len()), &qkv), 1e-6);
    let args: Vec<Arg> =
        [dqkva, dqa, dkva, dta, turn].map(Arg::At).into_iter().chain(sizes).collect();
    bench.run(
        Source::Heads,
        F32,
        "latent_heads_gradient",
        Grid::over((rows * width) as u64),
        &args,
    );
    for (what, at, expected) in [("dq", dqa, &dq), ("dkv", dkva, &dkv), ("dturned", dta, &dturned)]
    {
        report(
            &format!("latent {what}"),
            error(&bench.get(F32, at, expected.len()), expected),
            1e-6,
        );
    }
    let args = [
        Arg::At(qa),
        Arg::At(qkva),
        Arg::Word(rows as u32),
        Arg::Word(heads as u32),
        Arg::Word(24),
        Arg::Word(12),
        Arg::Word(0),
    ];
    bench.run(Source::Heads, F32, "latent_values", Grid::over((rows * width) as u64), &args);
    report("latent values", error(&bench.get(F32, qkva, values.len()), &values), 1e-6);
}

/// Times every kernel of an iteration of a GPT-2 at one microbatch.
fn gpt2(bench: &mut Bench, [batch, seq, layers, d, heads]: [u64; 5]) {
    let (rows, vocab, f) = (batch * seq, 50304u64, 4 * d);
    println!("\n{layers} layers of {d}, {rows} tokens of {seq}");
    let mut total = 0.0;
    let mut line = |name: &str, count: u64, ms: f64, bytes: f64, flops: f64| {
        total += ms * count as f64;
        println!(
            "{name:34} {count:4} × {ms:7.3} ms = {:7.2}   {:6.0} GB/s {:6.0} TFLOP/s",
            ms * count as f64,
            bytes / ms / 1e6,
            flops / ms / 1e9
        );
    };
    let (x, h) = (bench.random(BF16, rows * d, 1.0), bench.random(BF16, rows * f, 1.0));
    let (y, y4) = (bench.room(rows * d * 2), bench.room(rows * f * 2));
    let (other, kept) = (bench.random(BF16, rows * d, 1.0), bench.random(BF16, rows * f, 1.0));
    let w = bench.random(BF16, vocab * d, 0.02);
    let dw = bench.room(vocab * d * 4);
    let vector = bench.random(BF16, f, 1.0);
    let bias = bench.room(f * 4);
    let logits = bench.random(BF16, rows * vocab, 1.0);
    for (name, count, pass, inputs, outputs, epilogue, accumulate) in [
        ("qkv forward + bias", layers, Pass::Forward, d, 3 * d, Epilogue::Bias, false),
        ("out forward + bias + residual", layers, Pass::Forward, d, d, Epilogue::Bias, true),
        ("up forward + bias + gelu", layers, Pass::Forward, d, f, Epilogue::BiasGelu, false),
        ("up forward + bias", 0, Pass::Forward, d, f, Epilogue::Bias, false),
        ("down forward + bias + residual", layers, Pass::Forward, f, d, Epilogue::Bias, true),
        ("head forward", 1, Pass::Forward, d, vocab, Epilogue::None, false),
        ("head input gradient", 1, Pass::InputGradient, d, vocab, Epilogue::None, false),
        ("head weight gradient", 1, Pass::WeightGradient, d, vocab, Epilogue::None, false),
        (
            "down input gradient · gelu' + db",
            0,
            Pass::InputGradient,
            f,
            d,
            Epilogue::GeluGradientBias,
            false,
        ),
        (
            "down input gradient · gelu'",
            layers,
            Pass::InputGradient,
            f,
            d,
            Epilogue::GeluGradient,
            false,
        ),
        ("down input gradient", 0, Pass::InputGradient, f, d, Epilogue::None, false),
        ("down weight gradient", layers, Pass::WeightGradient, f, d, Epilogue::None, false),
        ("down weight gradient + db", 0, Pass::WeightGradient, f, d, Epilogue::BiasGradient, false),
        ("up input gradient", layers, Pass::InputGradient, d, f, Epilogue::None, false),
        ("up weight gradient", layers, Pass::WeightGradient, d, f, Epilogue::None, false),
        ("up weight gradient + db", 0, Pass::WeightGradient, d, f, Epilogue::BiasGradient, false),
        ("out input gradient", layers, Pass::InputGradient, d, d, Epilogue::None, false),
        ("out weight gradient", layers, Pass::WeightGradient, d, d, Epilogue::None, false),
        ("out weight gradient accumulated", 0, Pass::WeightGradient, d, d, Epilogue::None, true),
        ("qkv input gradient", layers, Pass::InputGradient, d, 3 * d, Epilogue::None, false),
        (
            "qkv weight gradient + db",
            0,
            Pass::WeightGradient,
            d,
            3 * d,
            Epilogue::BiasGradient,
            false,
        ),
        ("qkv weight gradient", layers, Pass::WeightGradient, d, 3 * d, Epilogue::None, false),
    ] {
        let wide = |n: u64, small: CUdeviceptr, big: CUdeviceptr| match n {
            n if n == vocab => logits,
            n if n > d => big,
            _ => small,
        };
        let weight = pass == Pass::WeightGradient;
        let result = if weight { F32 } else { BF16 };
        let product =
            Product { pass, rows, inputs, outputs, operand: BF16, result, accumulate, epilogue };
        let at = match pass {
            Pass::Forward => Operands {
                left: wide(inputs, x, h),
                right: w,
                addend: other,
                result: wide(outputs, y, y4),
                bias: vector,
                kept,
            },
            Pass::InputGradient => Operands {
                left: wide(outputs, x, h),
                right: w,
                addend: other,
                result: wide(inputs, y, y4),
                bias,
                kept,
            },
            Pass::WeightGradient => Operands {
                left: wide(inputs, x, h),
                right: wide(outputs, other, kept),
                addend: dw,
                result: dw,
                bias,
                kept,
            },
        };
        match unsafe { bench.products.tune(product, &at) } {
            Ok(_) => {
                let ms = bench.time(|bench| unsafe { bench.products.run(product, &at) }.unwrap());
                line(name, count, ms, 0.0, 2.0 * (rows * inputs * outputs) as f64);
            }
            Err(error) => println!("{name}: {error}"),
        }
    }
    let shape = AttentionShape {
        batch,
        seq,
        heads,
        kv_heads: heads,
        head_dim: d / heads,
        element: BF16,
        deterministic: true,
    };
    for deterministic in [true, false] {
        let cudnn = bench.cudnn.take().unwrap();
        match Attention::new(&cudnn, AttentionShape { deterministic, ..shape }) {
            Ok(attention) => {
                let workspace = bench.room(attention.workspace().into_iter().max().unwrap_or(0));
                let stats = bench.room(batch * seq * heads * 4);
                let forward = ForwardAt { qkv: h, output: y, stats, workspace };
                let back = BackwardAt { forward, output_gradient: other, qkv_gradient: y4 };
                let flops = 2.0 * (batch * seq * seq * d) as f64;
                println!(
                    "workspace {} MiB",
                    attention.workspace().into_iter().max().unwrap_or(0) >> 20
                );
                let ms = bench.time(|_| unsafe { attention.forward(&cudnn, &forward) }.unwrap());
                line("attention forward", if deterministic { layers } else { 0 }, ms, 0.0, flops);
                let ms = bench.time(|_| unsafe { attention.backward(&cudnn, &back) }.unwrap());
                let name = if deterministic {
                    "attention backward, deterministic"
                } else {
                    "attention backward, atomic"
                };
                line(name, if deterministic { layers } else { 0 }, ms, 0.0, 2.5 * flops);
            }
            Err(error) => println!("attention: {error}"),
        }
        bench.cudnn = Some(cudnn);
    }
    let e = Source::Elementwise;
    let stats = bench.room(rows * 8);
    let bytes = (rows * d * 2) as f64;
    for warps in [1u32, 2, 4, 8] {
        if d.div_ceil(u64::from(warps) * 256) > 4 {
            continue;
        }
        let counts = |best: bool, n: u64| if best { n } else { 0 };
        let best = warps == if d <= 768 { 4 } else { 8 };
        let first = warps == if d <= 768 { 1 } else { 2 };
        let norm = Source::Norm { width: d as u32, layer: true, warps };
        let groups = u64::from(8 / warps);
        let args: Vec<Arg> = [x, 0, vector, vector, 0, y, stats]
            .map(Arg::At)
            .into_iter()
            .chain([Arg::Word(rows as u32), Arg::Real(1e-5)])
            .collect();
        let ms = bench.time(|b| {
            b.run(norm, BF16, "norm_forward", Grid::of((rows / groups) as u32, 256), &args)
        });
        line(
            &format!("norm forward, {warps} warps"),
            counts(first, 2 * layers + 1),
            ms,
            2.0 * bytes,
            0.0,
        );
        for parts in [264u32, 528, 660, 792, 1056, 1320] {
            let partial = bench.room(u64::from(parts) * 3 * d * 4);
            let args: Vec<Arg> = [y, x, vector, stats, other, h, partial]
                .map(Arg::At)
                .into_iter()
                .chain([Arg::Word(rows as u32)])
                .collect();
            let ms =
                bench.time(|b| b.run(norm, BF16, "norm_backward", Grid::of(parts, 256), &args));
            line(
                &format!("norm backward, {warps} warps, {parts} blocks"),
                counts(best && parts == 528, 2 * layers + 1),
                ms,
                4.0 * bytes,
                0.0,
            );
        }
    }
    let wide_bytes = (rows * f * 2) as f64;
    let args = [Arg::At(kept), Arg::At(y4), Arg::Long(rows * f)];
    let ms = bench.time(|b| b.run(e, BF16, "gelu_forward", Grid::over(rows * f), &args));
    line("gelu forward alone", 0, ms, 2.0 * wide_bytes, 0.0);
    let args = [Arg::At(h), Arg::At(kept), Arg::At(y4), Arg::Long(rows * f)];
    let ms = bench.time(|b| b.run(e, BF16, "gelu_backward", Grid::over(rows * f), &args));
    line("gelu backward alone", 0, ms, 3.0 * wide_bytes, 0.0);
    for (columns, from) in [(3 * d, h), (d, x), (f, h)] {
        let partial = bench.room(528 * columns * 4);
        let mut grid = Grid::of(528, 256);
        grid.blocks.1 = (columns as u32).div_ceil(2048);
        let [of_rows, of_columns] = [rows, columns].map(|n| Arg::Word(n as u32));
        let args = [Arg::At(from), Arg::At(partial), of_rows, of_columns, Arg::Word(1)];
        let ms = bench.time(|b| b.run(e, BF16, "column_sums", grid, &args));
        line(
            &format!("column sums of {columns} alone"),
            if columns == d { 0 } else { layers },
            ms,
            (rows * columns * 2) as f64,
            0.0,
        );
    }
    let targets: Vec<u32> = (0..rows).map(|r| (r * 7919 % 50257) as u32).collect();
    let ids = bench.words(&targets);
    let losses = bench.room(rows * 4);
    let tail = [Arg::Real(1e-3)];
    let big = (rows * vocab * 2) as f64;
    for (threads, blocks, held) in
        [(1024, 1, true), (1024, 1, false), (768, 1, true), (896, 1, true)]
    {
        let loss =
            Source::CrossEntropy { width: vocab as u32, words: 50257, threads, blocks, held };
        let grid = Grid::of(rows as u32, threads);
        let args: Vec<Arg> =
            [logits, ids, stats, losses, logits].map(Arg::At).into_iter().chain(tail).collect();
        let ms = bench.time(|b| b.run(loss, BF16, "cross_entropy", grid, &args));
        line(
            &format!("cross entropy, {threads} × {blocks} {held}"),
            u64::from(threads == 1024 && held),
            ms,
            2.0 * big,
            0.0,
        );
        let args: Vec<Arg> =
            [logits, ids, stats, losses, 0].map(Arg::At).into_iter().chain(tail).collect();
        let ms = bench.time(|b| b.run(loss, BF16, "cross_entropy", grid, &args));
        line("cross entropy alone", 0, ms, big, 0.0);
        let args: Vec<Arg> =
            [logits, ids, stats, logits].map(Arg::At).into_iter().chain(tail).collect();
        let ms = bench.time(|b| b.run(loss, BF16, "cross_entropy_gradient", grid, &args));
        line("its gradient alone", 0, ms, 2.0 * big, 0.0);
    }
    let positions = bench.random(BF16, seq * d, 1.0);
    let args = [
        Arg::At(ids),
        Arg::At(w),
        Arg::At(positions),
        Arg::At(y),
        Arg::Word(rows as u32),
        Arg::Word(d as u32),
        Arg::Word(50257),
        Arg::Word(0),
        Arg::At(0),
        Arg::Word(seq as u32),
        Arg::Word(0),
    ];
    let ms = bench.time(|b| b.run(e, BF16, "embedding_forward", Grid::over(rows * d), &args));
    line("embedding", 1, ms, 2.0 * bytes, 0.0);
    // Words as frequent as Zipf's law has them.
    let zipf: Vec<u32> = (0..rows)
        .map(|r| ((50257f64).powf((r as f64 * 0.618_033_988_7).fract()) as u32 - 1).min(50256))
        .collect();
    for most in [32, 64, 128] {
        let segments = Segments::of(bench, &zipf, most, d);
        let ms = bench.time(|b| segments.run(b, BF16, (x, dw), d as u32));
        line(
            &format!("embedding gradient, segments of {most}"),
            u64::from(most == 64),
            ms,
            bytes,
            0.0,
        );
    }
    let args = [
        Arg::At(x),
        Arg::At(dw),
        Arg::Word(rows as u32),
        Arg::Word(d as u32),
        Arg::Word(1),
        Arg::At(0),
        Arg::Word(seq as u32),
        Arg::Word(0),
    ];
    let ms = bench.time(|b| b.run(e, BF16, "position_gradient", Grid::over(seq * d), &args));
    line("position gradient", 1, ms, bytes, 0.0);
    let n = 12 * layers * d * d + vocab * d;
    let [master, g, m, v] = [0; 4].map(|_: u64| bench.random(F32, n, 0.1));
    let weights = bench.room(n * 2);
    let constants = UpdateConstants {
        keep: 0.999,
        rate: 1e-3,
        correction: 1.0,
        towards: 0.1,
        beta2: 0.95,
        fresh: 0.05,
        epsilon: 1e-8,
        scale: 1.0,
        clip: 0.0,
    };
    let decays = bench.room(n.div_ceil(1024));
    let args: Vec<Arg> = [master, g, m, v, weights, decays]
        .map(Arg::At)
        .into_iter()
        .chain([Arg::Long(n), Arg::Update(constants), Arg::At(0)])
        .collect();
    let ms = bench.time(|b| b.run(e, BF16, "adamw", Grid::over(n), &args));
    line("adamw", 1, ms, 30.0 * n as f64, 0.0);
    let sums = bench.room(n / 1024 * 4);
    let args = [Arg::At(g), Arg::At(sums), Arg::Long(n / 1024)];
    let ms = bench.time(|b| {
        b.run(e, BF16, "block_squares", Grid::of((n / 1024).div_ceil(8) as u32, 256), &args)
    });
    line("squares of gradients", 1, ms, 4.0 * n as f64, 0.0);
    println!("sum of kernels: {total:.1} ms, {:.0} k tokens/s", rows as f64 / total);
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|a| a == name);
    let mut bench = Bench::new();
    println!("cuDNN {}", if bench.cudnn.is_some() { Cudnn::version() } else { 0 });
    if wants("check") {
        for ty in [F32, BF16] {
            for (rows, width) in [(37, 768), (20, 33), (19, 1600), (23, 2048), (11, 4096), (5, 8)] {
                check_norm(&mut bench, ty, true, rows, width);
            }
            check_norm(&mut bench, ty, false, 29, 768);
            check_norm(&mut bench, ty, false, 29, 5120);
            check_loss(&mut bench, ty, 5, 50304, 50257);
            check_loss(&mut bench, ty, 7, 1000, 1000);
            check_loss(&mut bench, ty, 7, 33, 33);
            check_loss(&mut bench, ty, 3, 128256, 128256);
            check_elementwise(&mut bench, ty);
            check_products(&mut bench, ty);
        }
        let routing = route::Routing {
            experts: 6,
            topk: 2,
            sigmoid: false,
            scale: 1.5,
            seq: 48,
            capacity: None,
            balance: 0.1,
            groups: 1,
            kept_groups: 1,
            parts: 1,
            raw: false,
            best_of_group: false,
        };
        check_experts(&mut bench, routing, false);
        check_experts(&mut bench, route::Routing { topk: 1, ..routing }, false);
        check_experts(&mut bench, route::Routing { capacity: Some(15), ..routing }, false);
        check_experts(&mut bench, route::Routing { parts: 2, ..routing }, false);
        let many = route::Routing {
            experts: 128,
            topk: 8,
            sigmoid: true,
            groups: 8,
            kept_groups: 3,
            seq: 512,
            ..routing
        };
        check_experts(&mut bench, many, true);
        check_experts(
            &mut bench,
            route::Routing { sigmoid: false, capacity: Some(40), ..many },
            false,
        );
        check_heads(&mut bench);
        for deterministic in [true, false] {
            for (batch, seq, heads, kv_heads, head_dim) in
                [(2, 128, 4, 4, 64), (2, 256, 4, 2, 64), (1, 200, 4, 1, 128), (1, 64, 2, 2, 32)]
            {
                let shape = AttentionShape {
                    batch,
                    seq,
                    heads,
                    kv_heads,
                    head_dim,
                    element: BF16,
                    deterministic,
                };
                check_attention(&mut bench, shape);
            }
        }
        bench.held.truncate(1);
    }
    for (name, sizes) in
        [("gpt2-124m", [64, 1024, 12, 768, 12]), ("gpt2-1.5b", [16, 1024, 48, 1600, 25])]
    {
        if wants(name) {
            gpt2(&mut bench, sizes);
            bench.held.truncate(1);
        }
    }
}
