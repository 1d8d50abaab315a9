//! Recommendation model (DLRM) as operators: a bottom MLP on dense features, embedding tables for
//! sparse features, dot products of all pairs of vectors, and a top MLP on those (Naumov et al.,
//! arXiv 1906.00091, figure 1).

use super::build::{Builder, Sizes};
use super::{ActivationKind, Graph, Init, LayerDecl, LayerGraph, LinearRole, OpKind, TensorClass};
use crate::ids::TensorId;
use crate::model::Dlrm;

/// Builds the graph for microbatches of `batch` samples over all replicas.
pub(super) fn build(net: &Dlrm, sizes: &Sizes<'_>, batch: u64) -> Graph {
    let kinds = vec![bottom(net, sizes), head(net, sizes)];
    let layer = |name: &str, kind| LayerDecl { name: name.into(), kind };
    Graph { kinds, layers: vec![layer("bottom", 0), layer("head", 1)], batch, seq: 1 }
}

fn bottom(net: &Dlrm, sizes: &Sizes<'_>) -> LayerGraph {
    let mut layer = Builder::new("bottom", sizes);
    // Tables first: their exchange overlaps with the bottom network.
    let tables = net.tables.len() as u64;
    let ids = layer.tensor("ids", tables * net.lookups, TensorClass::Tokens);
    // Row norms match the bottom network's output for inputs of unit variance.
    let spread = 1.0 / (net.width as f64).sqrt();
    let table = layer.param("tables.weight", [net.rows(), net.width], Init::Normal(spread), false);
    let param = &mut layer.graph.params[table.index()];
    (param.blocks, param.sparse) = (net.tables.clone(), true);
    let pooled = layer.activation("pooled", tables * net.width);
    let bag = OpKind::EmbeddingBag { tables, lookups: net.lookups, width: net.width };
    layer.op(bag, &[ids], &[table], &[pooled]);
    let mut x = layer.tensor("measured", net.dense, TensorClass::Features);
    for (at, (inputs, outputs)) in net.bottom_layers().into_iter().enumerate() {
        x = layer.dense(at, x, (inputs, outputs));
        x = layer.active(at, x, outputs);
    }
    let met = layer.activation("met", net.met());
    let meet = OpKind::Interact { tables, width: net.width, parts: 1 };
    layer.op(meet, &[x, pooled], &[], &[met]);
    layer.finish(None, Some(met))
}

fn head(net: &Dlrm, sizes: &Sizes<'_>) -> LayerGraph {
    let mut layer = Builder::new("head", sizes);
    let input = layer.activation("x", net.met());
    let mut x = input;
    let layers = net.top_layers();
    for (at, &(inputs, outputs)) in layers.iter().enumerate() {
        x = layer.dense(at, x, (inputs, outputs));
        if at + 1 < layers.len() {
            x = layer.active(at, x, outputs);
        }
    }
    let targets = layer.tensor("targets", 1, TensorClass::Targets);
    let loss = layer.scalar("loss", TensorClass::Loss);
    let scale = 1.0 / sizes.tokens_per_iteration as f64;
    layer.op(OpKind::BinaryCrossEntropy { scale }, &[x, targets], &[], &[loss]);
    layer.finish(Some(input), None)
}

impl Builder<'_> {
    /// A linear layer with a bias.
    fn dense(&mut self, at: usize, x: TensorId, (inputs, outputs): (u64, u64)) -> TensorId {
        // He et al. (arXiv 1502.01852, equation 10).
        let spread = (2.0 / inputs as f64).sqrt();
        let weight =
            self.param(&format!("fc{at}.weight"), [outputs, inputs], Init::Normal(spread), true);
        let bias = self.param(&format!("fc{at}.bias"), [1, outputs], Init::Zero, false);
        let product = self.activation(&format!("fc{at}.product"), outputs);
        self.op(OpKind::Linear { role: LinearRole::Up }, &[x], &[weight], &[product]);
        let y = self.activation(&format!("fc{at}"), outputs);
        self.op(OpKind::Bias, &[product], &[bias], &[y]);
        y
    }

    fn active(&mut self, at: usize, x: TensorId, width: u64) -> TensorId {
        let y = self.activation(&format!("active{at}"), width);
        let function = ActivationKind::Relu;
        self.op(OpKind::Activation { function }, &[x], &[], &[y]);
        y
    }
}
