//! Expert layer computed from its formulas, token by token.

use super::{Rows, Weights, activated, add, dot, feed_forward, linear};
use paceline_plan::model::{Experts, Model, Router};

/// Output of an expert layer for a sequence, and the load imbalance of its experts (DeepSeek-V3,
/// arXiv 2412.19437, eq. 17 to 20).
pub(super) fn layer(
    model: &Model,
    weights: &Weights,
    name: &dyn Fn(&str) -> String,
    x: &Rows,
) -> (Rows, f64) {
    let Experts { experts, topk, route_scale, router, .. } = model.experts;
    let (experts, topk) = (experts as usize, topk as usize);
    let affinities = linear(weights, &name("router"), &x.clone());
    let scores: Rows = affinities
        .iter()
        .map(|row| match router {
            Router::Sigmoid => row.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
            Router::Softmax => {
                let sum: f64 = row.iter().map(|l| l.exp()).sum();
                row.iter().map(|l| l.exp() / sum).collect()
            }
        })
        .collect();
    let chosen: Vec<Vec<usize>> = scores
        .iter()
        .map(|scores| {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(topk);
            order
        })
        .collect();
    let room = model.experts.taken(model.seq).unwrap_or(u64::MAX);
    let mut taken = vec![0; experts];
    let mut fed: Rows = vec![vec![0.0; model.d_model as usize]; x.len()];
    for place in 0..topk {
        for (row, chosen) in chosen.iter().enumerate() {
            let expert = chosen[place];
            taken[expert] += 1;
            if taken[expert] > room {
                continue;
            }
            let sum: f64 =
                if topk == 1 { 1.0 } else { chosen.iter().map(|&e| scores[row][e]).sum() };
            let gate = route_scale * scores[row][expert] / sum;
            let y = expert_of(model, weights, name, expert, &x[row]);
            fed[row].iter_mut().zip(y).for_each(|(fed, y)| *fed += gate * y);
        }
    }
    if model.experts.shared_experts > 0 {
        let shared = feed_forward(model, weights, &name("shared."), x);
        fed.iter_mut().zip(&shared).for_each(|(fed, y)| add(fed, y));
    }
    let mut imbalance = 0.0;
    for expert in 0..experts {
        let liked = chosen.iter().flatten().filter(|&&e| e == expert).count() as f64;
        let share = experts as f64 * liked / (topk * x.len()) as f64;
        let normal = scores.iter().map(|s| s[expert] / s.iter().sum::<f64>());
        imbalance += share * normal.sum::<f64>() / x.len() as f64;
    }
    (fed, imbalance)
}

fn expert_of(
    model: &Model,
    weights: &Weights,
    name: &dyn Fn(&str) -> String,
    expert: usize,
    x: &[f64],
) -> Vec<f64> {
    let product = |matrix: &str, x: &[f64]| -> Vec<f64> {
        let all = &weights[&name(&format!("experts.{matrix}.weight"))];
        let each = all.len() / model.experts.experts as usize;
        all[expert * each..(expert + 1) * each].chunks(x.len()).map(|w| dot(w, x)).collect()
    };
    let active = activated(model, vec![product("up", x)]);
    product("down", &active[0])
}
