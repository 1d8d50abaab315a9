//! Losses and gradients against a second implementation: the models' formulas, written out plainly
//! in double precision.

mod experts;

use crate::common::*;
use paceline_exec::data::{Corpus, sample_start};
use paceline_exec::{Parameters, TrainOptions, train};
use paceline_plan::model::{Activation, Model, ModelKind};
use paceline_plan::strategy::{OptimizerKind, Strategy};
use std::collections::BTreeMap;

type Weights = BTreeMap<String, Vec<f64>>;
/// One row per token.
type Rows = Vec<Vec<f64>>;

/// Losses of the first iteration's samples.
#[derive(Clone, Copy, Default)]
struct Losses {
    /// Loss of next-token prediction.
    next: f64,
    /// Loss of multi-token prediction, the mean over its modules.
    further: f64,
    /// Total loss that gradients are taken of: both, and the balancing loss of the experts.
    whole: f64,
}

fn loss(model: &Model, weights: &Weights, samples: u64, seed: u64) -> Losses {
    let corpus = Corpus::new(model.vocab as u32, seed).unwrap();
    let modules = model.mtp.depth.max(1) as f64;
    let mut losses = Losses::default();
    for sample in 0..samples {
        let start = sample_start(0, sample, samples, model.seq);
        let mut text = vec![0; (model.seq + 1 + model.mtp.depth) as usize];
        corpus.fill(start, &mut text);
        let (heads, balance) = logits(model, weights, &text);
        let of_token = |(row, &target): (&Vec<f64>, &u32)| {
            row.iter().map(|l| l.exp()).sum::<f64>().ln() - row[target as usize]
        };
        losses.whole += model.experts.balance * balance / samples as f64;
        for (ahead, logits) in heads.iter().enumerate() {
            let sum = logits.iter().zip(&text[1 + ahead..]).map(of_token).sum::<f64>();
            let mean = sum / (model.seq * samples) as f64;
            match ahead {
                0 => losses.next += mean,
                _ => losses.further += mean / modules,
            }
        }
    }
    losses.whole += losses.next + model.mtp.weight * losses.further;
    losses
}

/// Logits of every head for the tokens of a sequence, which is followed by the target tokens; and
/// the load imbalance of its experts, summed over layers.
fn logits(model: &Model, weights: &Weights, text: &[u32]) -> (Vec<Rows>, f64) {
    let mut balance = 0.0;
    let (width, seq) = (model.d_model as usize, model.seq as usize);
    let row = |name: &str, i: usize| weights[name][i * width..(i + 1) * width].to_vec();
    let embedded = |ahead: usize| -> Rows {
        text[ahead..][..seq].iter().map(|&t| row("embedding.table.weight", t as usize)).collect()
    };
    let table = if model.tied { "embedding.table" } else { "head.table" };
    let mut x = embedded(0);
    if model.kind == ModelKind::Gpt2 {
        for (position, x) in x.iter_mut().enumerate() {
            add(x, &row("embedding.position.weight", position));
        }
    }
    for layer in 0..model.layers {
        balance += block(model, weights, layer, &mut x);
    }
    if model.kind != ModelKind::Mlp {
        x = norm(model, weights, "head.norm", &x);
    }
    let mut heads = vec![linear(weights, table, &x)];
    for depth in 1..=model.mtp.depth {
        let layer = model.layers + depth - 1;
        let name = |what: &str| format!("blocks.{layer}.{what}");
        let token = norm(model, weights, &name("join.token_norm"), &embedded(depth as usize));
        let hidden = norm(model, weights, &name("join.hidden_norm"), &x);
        x = linear(weights, &name("join.token"), &token);
        let hidden = linear(weights, &name("join.hidden"), &hidden);
        x.iter_mut().zip(&hidden).for_each(|(x, y)| add(x, y));
        balance += block(model, weights, layer, &mut x);
        x = norm(model, weights, &name("head.norm"), &x);
        heads.push(linear(weights, table, &x));
    }
    (heads, balance)
}

/// Applies a layer to the residual stream. Returns the load imbalance of its experts.
fn block(model: &Model, weights: &Weights, layer: u64, x: &mut Rows) -> f64 {
    let name = |what: &str| format!("blocks.{layer}.{what}");
    if model.kind == ModelKind::Mlp {
        for product in ["up", "down"] {
            *x = each(linear(weights, &name(product), x), |v| v.max(0.0));
        }
        return 0.0;
    }
    let normed = norm(model, weights, &name("norm1"), x);
    let attended = match model.latent.is_none() {
        true => attention(model, qkv(model, weights, &name, &normed)),
        false => latent(model, weights, &name, &normed),
    };
    let out = linear(weights, &name("attention_out"), &attended);
    x.iter_mut().zip(&out).for_each(|(x, y)| add(x, y));
    let normed = norm(model, weights, &name("norm2"), x);
    let has_experts = model.kind == ModelKind::Moe && layer >= model.experts.dense_layers;
    let (fed, imbalance) = match has_experts {
        true => experts::layer(model, weights, &name, &normed),
        false => (feed_forward(model, weights, &name(""), &normed), 0.0),
    };
    x.iter_mut().zip(&fed).for_each(|(x, y)| add(x, y));
    imbalance
}

fn feed_forward(model: &Model, weights: &Weights, prefix: &str, x: &Rows) -> Rows {
    let up = linear(weights, &format!("{prefix}up"), x);
    linear(weights, &format!("{prefix}down"), &activated(model, up))
}

fn activated(model: &Model, up: Rows) -> Rows {
    match model.activation {
        Activation::Gelu => each(up, gelu),
        Activation::SwiGlu => up.iter().map(|row| swiglu(row)).collect(),
        Activation::Relu => each(up, |v| v.max(0.0)),
        Activation::SquaredRelu => each(up, |v| v.max(0.0).powi(2)),
        other => unreachable!("the models here have no {other}"),
    }
}

fn qkv(model: &Model, weights: &Weights, name: &dyn Fn(&str) -> String, x: &Rows) -> Rows {
    let [heads, kv_heads, dim] = [model.heads, model.kv_heads, model.head_dim].map(|n| n as usize);
    let mut qkv = linear(weights, &name("qkv"), x);
    if model.qk_norm {
        for head in qkv.iter_mut().flat_map(|row| {
            row[..(heads + kv_heads) * dim].chunks_mut(dim).enumerate().collect::<Vec<_>>()
        }) {
            let gain = if head.0 < heads { "q_norm" } else { "k_norm" };
            let normed = norm(model, weights, &name(gain), &vec![head.1.to_vec()]);
            head.1.copy_from_slice(&normed[0]);
        }
    }
    qkv
}

/// Latent attention in expanded form: plain heads, with values of their own width.
fn latent(model: &Model, weights: &Weights, name: &dyn Fn(&str) -> String, x: &Rows) -> Rows {
    let [heads, dim] = [model.heads, model.head_dim].map(|n| n as usize);
    let [rope, v_dim] = [model.latent.qk_rope, model.latent.v_dim].map(|n| n as usize);
    let plain = dim - rope;
    let through = |down: &str, of: &str, up: &str| {
        let down = norm(model, weights, &name(of), &linear(weights, &name(down), x));
        linear(weights, &name(up), &down)
    };
    let (q, kv) = (through("q_down", "q_norm", "q_up"), through("kv_down", "kv_norm", "kv_up"));
    let turned = linear(weights, &name("k_rope"), x);
    let turn = |position: usize, x: &[f64]| {
        let mut y = x.to_vec();
        for i in 0..rope / 2 {
            let angle = position as f64 * model.rope_theta.powf(-2.0 * i as f64 / rope as f64);
            let (sin, cos) = angle.sin_cos();
            y[i] = x[i] * cos - x[i + rope / 2] * sin;
            y[i + rope / 2] = x[i + rope / 2] * cos + x[i] * sin;
        }
        y
    };
    let own = |row: usize, head: usize| &kv[row][head * (plain + v_dim)..][..plain + v_dim];
    let attend = |row: usize| {
        let mut out = Vec::new();
        for head in 0..heads {
            let query = &q[row][head * dim..][..dim];
            let query = [&query[..plain], &turn(row, &query[plain..])].concat();
            let score = |at: usize| {
                let key = [&own(at, head)[..plain], &turn(at, &turned[at])].concat();
                (dot(&query, &key) / (dim as f64).sqrt()).exp()
            };
            let scores: Vec<f64> = (0..=row).map(score).collect();
            let total: f64 = scores.iter().sum();
            out.extend((0..v_dim).map(|v| {
                let values = scores.iter().enumerate().map(|(i, s)| s * own(i, head)[plain + v]);
                values.sum::<f64>() / total
            }));
        }
        out
    };
    (0..x.len()).map(attend).collect()
}

fn attention(model: &Model, mut qkv: Rows) -> Rows {
    let [heads, kv_heads, dim] = [model.heads, model.kv_heads, model.head_dim].map(|n| n as usize);
    if model.kind.is_rotary() {
        for (position, row) in qkv.iter_mut().enumerate() {
            for head in row[..(heads + kv_heads) * dim].chunks_mut(dim) {
                for i in 0..dim / 2 {
                    let turn = model.rope_theta.powf(-2.0 * i as f64 / dim as f64);
                    let (sin, cos) = (position as f64 * turn).sin_cos();
                    let (a, b) = (head[i], head[i + dim / 2]);
                    (head[i], head[i + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
                }
            }
        }
    }
    let attend = |query: usize| {
        let mut out = Vec::new();
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let q = &qkv[query][head * dim..][..dim];
            let key = |i: usize| &qkv[i][(heads + kv) * dim..][..dim];
            let value = |i: usize| &qkv[i][(heads + kv_heads + kv) * dim..][..dim];
            let scores: Vec<f64> =
                (0..=query).map(|i| (dot(q, key(i)) / (dim as f64).sqrt()).exp()).collect();
            let total: f64 = scores.iter().sum();
            out.extend((0..dim).map(|d| {
                scores.iter().enumerate().map(|(i, s)| s * value(i)[d]).sum::<f64>() / total
            }));
        }
        out
    };
    (0..qkv.len()).map(attend).collect()
}

fn norm(model: &Model, weights: &Weights, name: &str, x: &Rows) -> Rows {
    let gain = &weights[&format!("{name}.weight")];
    let bias = weights.get(&format!("{name}.bias"));
    let of_row = |row: &Vec<f64>| {
        let count = row.len() as f64;
        let mean = if bias.is_some() { row.iter().sum::<f64>() / count } else { 0.0 };
        let variance = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / count;
        let scale = 1.0 / (variance + model.norm_eps).sqrt();
        let mut y: Vec<f64> = row.iter().zip(gain).map(|(v, g)| (v - mean) * scale * g).collect();
        bias.inspect(|bias| add(&mut y, bias));
        y
    };
    x.iter().map(of_row).collect()
}

fn linear(weights: &Weights, name: &str, x: &Rows) -> Rows {
    let (weight, bias) =
        (&weights[&format!("{name}.weight")], weights.get(&format!("{name}.bias")));
    let of_row = |row: &Vec<f64>| {
        let mut y: Vec<f64> = weight.chunks(row.len()).map(|w| dot(w, row)).collect();
        bias.inspect(|bias| add(&mut y, bias));
        y
    };
    x.iter().map(of_row).collect()
}

fn swiglu(row: &[f64]) -> Vec<f64> {
    let (gate, up) = row.split_at(row.len() / 2);
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}

fn each(rows: Rows, f: impl Fn(f64) -> f64) -> Rows {
    rows.into_iter().map(|row| row.into_iter().map(&f).collect()).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Weights with one tensor moved by `by` along a direction.
fn moved(weights: &Weights, name: &str, direction: &[f64], by: f64) -> Weights {
    let mut weights = weights.clone();
    let tensor = weights.get_mut(name).unwrap();
    tensor.iter_mut().zip(direction).for_each(|(w, d)| *w += by * d);
    weights
}

/// One step of plain SGD moves the weights by the gradient itself. Along it, the reference loss
/// must change by the squared norm of the gradient, tensor by tensor. A wrong gradient of the same
/// norm changes it by less.
#[test]
fn losses_and_gradients_are_those_of_the_formulas() {
    let dense = [tiny_gpt(true), tiny_gpt(false), tiny_llama(), tiny_mlp()];
    let sparse = [tiny_moe(), dropless_moe(), latent_moe()];
    let further = [further(&tiny_llama(), 2, true), further(&latent_moe(), 2, false)];
    for model in dense.into_iter().chain(sparse).chain(further) {
        let one = Strategy { optimizer: OptimizerKind::Sgd, ..strategy(2, 1, 2) };
        let after = |iterations: u32, lr: f64| {
            let options = TrainOptions {
                iterations,
                lr,
                seed: 3,
                clip: None,
                keep_parameters: true,
                ..TrainOptions::default()
            };
            train(&plan(&model, &one), &options, &mut |_| {}).unwrap()
        };
        let wide = |p: Parameters| -> Weights {
            p.into_iter().map(|(n, v)| (n, v.into_iter().map(f64::from).collect())).collect()
        };
        let start = wide(after(0, 0.0).parameters.unwrap());
        let run = after(1, 1.0);
        let end = wide(run.parameters.unwrap());

        let expected = loss(&model, &start, 2, 3);
        let close = |found: f32, expected: f64| {
            let off = f64::from(found) / expected - 1.0;
            assert!(off.abs() < 1e-6, "{}: {found}, {expected}", model.name());
        };
        close(run.iterations[0].loss, expected.next);
        assert_eq!(run.iterations[0].mtp_loss.is_some(), model.mtp.depth > 0);
        run.iterations[0].mtp_loss.inspect(|&found| close(found, expected.further));

        let mut squares = 0.0;
        // The router's selection bias follows the experts' loads, not the loss.
        for (name, before) in start.iter().filter(|(name, _)| !name.ends_with("router.bias")) {
            let gradient: Vec<f64> = before.iter().zip(&end[name]).map(|(a, b)| a - b).collect();
            let square = dot(&gradient, &gradient);
            squares += square;
            // Such a small step hardly changes the routing.
            let by = 1e-6 / square.sqrt().max(1e-6);
            let at = |by: f64| loss(&model, &moved(&start, name, &gradient, by), 2, 3).whole;
            let slope = (at(by) - at(-by)) / (2.0 * by);
            let error = (slope - square).abs();
            assert!(
                error < 1e-3 * square + 1e-10,
                "{} {name}: along its gradient the loss changes by {slope}, not {square}",
                model.name()
            );
        }
        let norm = f64::from(run.iterations[0].grad_norm);
        assert!((norm / squares.sqrt() - 1.0).abs() < 1e-4, "{norm} against {}", squares.sqrt());
    }
}
