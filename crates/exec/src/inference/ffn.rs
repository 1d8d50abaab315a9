//! Feed-forward part of a layer: one network, or the experts that a token chooses.

use super::affine::Affine;
use crate::run::outcome::Parameters;
use paceline_kernels::experts::dispatch::{self, Full};
use paceline_kernels::experts::product;
use paceline_kernels::experts::route::{self, Room, Routing};
use paceline_kernels::pool::Pool;
use paceline_kernels::{Rows, activation, reduce};
use paceline_plan::model::{Activation, Model, Router};

/// Feed-forward part of a layer.
#[derive(Debug)]
pub(super) enum Ffn {
    /// One network.
    Dense(Dense),
    /// Several experts; each token passes through some.
    Experts(Experts),
}

/// Two GEMMs with an activation between them.
#[derive(Debug)]
pub(super) struct Dense {
    up: Affine,
    down: Affine,
}

/// Experts, whose matrices are stacked by rows.
///
/// No token is dropped here. A capacity bounds the memory of training; the tokens it drops depend
/// on later tokens, but a text being generated does not have those yet.
#[derive(Debug)]
pub(super) struct Experts {
    router: Affine,
    /// Bias that affects the choice only.
    bias: Option<Vec<f32>>,
    up: Vec<f32>,
    down: Vec<f32>,
    /// Network that all tokens pass through.
    shared: Option<Dense>,
}

impl Ffn {
    /// Takes the tensors of layer `number`, whose names begin with `name`.
    pub(super) fn take(model: &Model, tensors: &mut Parameters, number: u64, name: &str) -> Self {
        if model.experts.is_none() || number < model.experts.dense_layers {
            return Self::Dense(Dense::take(tensors, name));
        }
        let mut router = Affine::take(tensors, &format!("{name}.router"));
        let bias = router.bias.take();
        let [up, down] = ["up", "down"]
            .map(|what| Affine::take(tensors, &format!("{name}.experts.{what}")).weight);
        let shared = (model.experts.shared_experts > 0)
            .then(|| Dense::take(tensors, &format!("{name}.shared")));
        Self::Experts(Experts { router, bias, up, down, shared })
    }

    /// Output for `rows` rows.
    pub(super) fn forward(&self, model: &Model, pool: &Pool, rows: usize, x: &[f32]) -> Vec<f32> {
        match self {
            Self::Dense(dense) => dense.forward(model, pool, rows, x),
            Self::Experts(experts) => experts.forward(model, pool, rows, x),
        }
    }
}

impl Dense {
    fn take(tensors: &mut Parameters, name: &str) -> Self {
        let [up, down] =
            ["up", "down"].map(|what| Affine::take(tensors, &format!("{name}.{what}")));
        Self { up, down }
    }

    fn forward(&self, model: &Model, pool: &Pool, rows: usize, x: &[f32]) -> Vec<f32> {
        let width = self.down.weight.len() / model.d_model.max(1) as usize;
        let active = activated(model, Rows { rows, width }, &self.up.product(pool, rows, x));
        self.down.product(pool, rows, &active)
    }
}

impl Experts {
    fn forward(&self, model: &Model, pool: &Pool, rows: usize, x: &[f32]) -> Vec<f32> {
        let [experts, topk, inner, width] =
            [model.experts.experts, model.experts.topk, model.ffn, model.d_model]
                .map(|n| n as usize);
        let (choices, gates) = self.choices(model, rows, &self.router.product(pool, rows, x));
        let tokens = Rows { rows, width };
        let region_rows = rows * topk;
        let places = dispatch::Shape { tokens, topk, experts, regions: 1, region_rows };
        let (mut slots, mut counts) = (vec![0; region_rows], vec![0; experts]);
        let placed =
            dispatch::places(places, &choices, &mut slots, &mut counts, &mut vec![0; experts]);
        if let Err(Full { tokens, rows, .. }) = placed {
            unreachable!("{tokens} choices have {rows} places, one for each");
        }
        let mut sorted = vec![0.0; region_rows * width];
        dispatch::scatter(pool, places, x, &slots, &mut sorted);
        let through = |x: &[f32], weight: &[f32], inputs: usize| {
            let outputs = weight.len() / (experts * inputs).max(1);
            let shape = product::Shape { experts, regions: 1, region_rows, inputs, outputs };
            let mut workspace = vec![0.0; shape.workspace::<f32, f32>()];
            let mut y = vec![0.0; region_rows * outputs];
            product::forward(pool, shape, x, &counts, weight, &mut y, &mut workspace);
            y
        };
        let up = through(&sorted, &self.up, width);
        let active = activated(model, Rows { rows: region_rows, width: inner }, &up);
        let made = through(&active, &self.down, inner);
        let mut y = vec![0.0; rows * width];
        dispatch::combine(pool, places, &made, &slots, &gates, &mut y);
        if let Some(shared) = &self.shared {
            reduce::add(&shared.forward(model, pool, rows, x), &mut y);
        }
        y
    }

    /// Experts chosen for each token, and their gates.
    fn choices(&self, model: &Model, rows: usize, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let [experts, topk] = [model.experts.experts, model.experts.topk].map(|n| n as usize);
        let routing = Routing {
            experts,
            topk,
            sigmoid: model.experts.router == Router::Sigmoid,
            scale: model.experts.route_scale as f32,
            seq: rows,
            capacity: None,
            balance: 0.0,
            groups: model.experts.groups.max(1) as usize,
            kept_groups: model.experts.group_topk.max(1) as usize,
            parts: 1,
        };
        let (whole, floats) = routing.room();
        let (mut whole, mut floats) = (vec![0; whole], vec![0.0; floats]);
        let room = Room { whole: &mut whole, floats: &mut floats };
        let (mut choices, mut gates) = (vec![0; rows * topk], vec![0.0; rows * topk]);
        let bias = self.bias.as_deref();
        route::forward(routing, 0..rows, logits, bias, &mut choices, &mut gates, room);
        (choices, gates)
    }
}

/// Activation between a network's GEMMs, on rows of its inner width.
fn activated(model: &Model, rows: Rows, up: &[f32]) -> Vec<f32> {
    let mut active = vec![0.0; rows.rows * rows.width];
    match model.activation {
        Activation::Gelu => activation::gelu_tanh_forward(up, &mut active),
        Activation::Relu => activation::relu_forward(up, &mut active),
        Activation::SquaredRelu => activation::squared_relu_forward(up, &mut active),
        Activation::SwiGlu => activation::swiglu_forward(rows, up, &mut active),
    }
    active
}
