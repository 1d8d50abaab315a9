//! Residual network as operators: a stem, blocks of convolutions with skip connections, and a
//! classification head (He et al., arXiv 1512.03385, figure 5 and table 1).

use super::build::{Builder, Sizes};
use super::{
    ActivationKind, Graph, Init, LayerDecl, LayerGraph, LinearRole, OpKind, TensorClass, Window,
};
use crate::ids::{ParamId, TensorId};
use crate::model::{Block, ResNet, Stem};

/// Builds the graph for microbatches of `batch` images over all replicas.
pub(super) fn build(net: &ResNet, sizes: &Sizes<'_>, batch: u64) -> Graph {
    let mut kinds = vec![stem(net, sizes)];
    let mut layers = vec![LayerDecl { name: "stem".into(), kind: 0 }];
    let mut shapes: Vec<Block> = Vec::new();
    for (at, block) in net.all_blocks().into_iter().enumerate() {
        let known = shapes.iter().position(|shape| *shape == block);
        let kind = known.unwrap_or_else(|| {
            shapes.push(block);
            kinds.push(residual(net, &block, shapes.len() - 1, sizes));
            shapes.len() - 1
        });
        layers.push(LayerDecl { name: format!("blocks.{at}"), kind: kind + 1 });
    }
    kinds.push(head(net, sizes));
    layers.push(LayerDecl { name: "head".into(), kind: kinds.len() - 1 });
    Graph { kinds, layers, batch, seq: 1 }
}

/// Images between two operators.
#[derive(Clone, Copy)]
struct Images {
    tensor: TensorId,
    side: u64,
    channels: u64,
}

fn stem(net: &ResNet, sizes: &Sizes<'_>) -> LayerGraph {
    let mut layer = Builder::new("stem", sizes);
    let (side, channels) = (net.image, net.channels);
    let tensor = layer.tensor("images", side * side * channels, TensorClass::Features);
    let x = Images { tensor, side, channels };
    let (kernel, stride) = match net.stem {
        Stem::Large => (7, 2),
        Stem::Small => (3, 1),
    };
    let x = layer.conv_norm("1", x, net.width, kernel, stride);
    let mut x = layer.relu("active", x);
    if net.stem == Stem::Large {
        let window =
            Window { side: x.side, channels: x.channels, kernel: 3, stride: 2, padding: 1 };
        let side = window.side_out();
        let pooled = layer.activation("pooled", side * side * x.channels);
        layer.op(OpKind::MaxPool { window }, &[x.tensor], &[], &[pooled]);
        x = Images { tensor: pooled, side, ..x };
    }
    layer.finish(None, Some(x.tensor))
}

fn residual(net: &ResNet, block: &Block, number: usize, sizes: &Sizes<'_>) -> LayerGraph {
    let mut layer = Builder::new(&format!("block{number}"), sizes);
    let tensor = layer.activation("x", block.side * block.side * block.inputs);
    let x = Images { tensor, side: block.side, channels: block.inputs };
    let main = if net.bottleneck {
        let narrow = layer.conv_norm("1", x, block.width, 1, 1);
        let narrow = layer.relu("active1", narrow);
        let middle = layer.conv_norm("2", narrow, block.width, 3, block.stride);
        let middle = layer.relu("active2", middle);
        layer.conv_norm("3", middle, block.outputs, 1, 1)
    } else {
        let middle = layer.conv_norm("1", x, block.width, 3, block.stride);
        let middle = layer.relu("active1", middle);
        layer.conv_norm("2", middle, block.outputs, 3, 1)
    };
    let around = if block.projects() {
        layer.conv_norm("_around", x, block.outputs, 1, block.stride)
    } else {
        x
    };
    let sum = Images { tensor: layer.add("sum", main.tensor, around.tensor), ..main };
    let y = layer.relu("y", sum);
    layer.finish(Some(x.tensor), Some(y.tensor))
}

fn head(net: &ResNet, sizes: &Sizes<'_>) -> LayerGraph {
    let mut layer = Builder::new("head", sizes);
    let blocks = net.all_blocks();
    let side = blocks.last().map_or(net.side_after_stem(), Block::side_out);
    let channels = net.features();
    let x = layer.activation("x", side * side * channels);
    let mean = layer.activation("mean", channels);
    layer.op(OpKind::AveragePool { channels }, &[x], &[], &[mean]);
    let targets = layer.tensor("targets", 1, TensorClass::Targets);
    // Standard deviation of the head's weights in Goyal et al. (arXiv 1706.02677, section 5.1).
    let weight = layer.param("fc.weight", [net.classes, channels], Init::Normal(0.01), true);
    let bias = layer.param("fc.bias", [1, net.classes], Init::Zero, false);
    let product = layer.activation("product", net.classes);
    layer.op(OpKind::Linear { role: LinearRole::Head }, &[mean], &[weight], &[product]);
    let logits = layer.activation("logits", net.classes);
    layer.op(OpKind::Bias, &[product], &[bias], &[logits]);
    layer.loss(logits, targets, 1.0);
    layer.finish(Some(x), None)
}

impl Builder<'_> {
    /// A convolution without bias, followed by a batch norm.
    fn conv_norm(
        &mut self,
        name: &str,
        x: Images,
        filters: u64,
        kernel: u64,
        stride: u64,
    ) -> Images {
        let window =
            Window { side: x.side, channels: x.channels, kernel, stride, padding: kernel / 2 };
        let (side, seen) = (window.side_out(), kernel * kernel * x.channels);
        // He et al. (arXiv 1502.01852, equation 14), by fan-out.
        let spread = (2.0 / (kernel * kernel * filters) as f64).sqrt();
        let weight =
            self.param(&format!("conv{name}.weight"), [filters, seen], Init::Normal(spread), true);
        let y = self.activation(&format!("conv{name}"), side * side * filters);
        self.op(OpKind::Conv { window }, &[x.tensor], &[weight], &[y]);
        self.batch_norm(&format!("norm{name}"), Images { tensor: y, side, channels: filters })
    }

    fn batch_norm(&mut self, name: &str, x: Images) -> Images {
        let eps = self.sizes.model.norm_eps;
        Images { tensor: self.batch_norm_of(name, (x.tensor, x.side, x.channels), eps), ..x }
    }

    /// Normalises images of `side` and `channels`.
    pub(super) fn batch_norm_of(
        &mut self,
        name: &str,
        (x, side, channels): (TensorId, u64, u64),
        eps: f64,
    ) -> TensorId {
        let vector = |builder: &mut Self, what: &str, init: Init| {
            builder.param(&format!("{name}.{what}"), [1, channels], init, false)
        };
        let gain = vector(self, "weight", Init::One);
        let bias = vector(self, "bias", Init::Zero);
        let mean = vector(self, "running_mean", Init::Zero);
        let variance = vector(self, "running_var", Init::One);
        let averages: [ParamId; 2] = [mean, variance];
        for average in averages {
            self.graph.params[average.index()].running = true;
        }
        let sums = self.per_channel(&format!("{name}.sums"), channels);
        self.op(OpKind::BatchSums { channels }, &[x], &[mean], &[sums]);
        let y = self.activation(name, side * side * channels);
        let statistics = self.per_channel(&format!("{name}.statistics"), channels);
        let (images, samples) = (self.sizes.tokens, self.sizes.tokens_per_iteration);
        let kind = OpKind::BatchNorm {
            channels,
            eps,
            pixels: images * side * side,
            over: 1,
            share: images as f64 / samples as f64,
        };
        let params = [gain, bias, mean, variance];
        self.op(kind, &[x, sums], &params, &[y, statistics]);
        y
    }

    /// Two values per channel for a whole microbatch.
    fn per_channel(&mut self, name: &str, channels: u64) -> TensorId {
        let id = self.scalar(name, TensorClass::Statistic);
        self.graph.tensors[id.index()].dims = [1, 2 * channels];
        id
    }

    fn relu(&mut self, name: &str, x: Images) -> Images {
        let y = self.activation(name, x.side * x.side * x.channels);
        let function = ActivationKind::Relu;
        self.op(OpKind::Activation { function }, &[x.tensor], &[], &[y]);
        Images { tensor: y, ..x }
    }
}

#[cfg(test)]
mod tests {
    use crate::graph;
    use crate::model::built_in;

    /// torchvision reports 4.1 billion multiply-adds per image (4.089 · 10⁹). Table 1 of the
    /// original paper says 3.8, because it halves the sides one convolution earlier.
    #[test]
    fn an_image_costs_what_is_published() {
        let model = built_in::get("resnet50").unwrap().unwrap();
        let graph = graph::build(&model, 1, 1, 1);
        let mut forward = 0.0;
        for layer in &graph.layers {
            let kind = &graph.kinds[layer.kind];
            forward += kind.forward.iter().map(|op| kind.matrix_flops(op).0).sum::<f64>();
        }
        assert!((forward / 2.0 / 4.089e9 - 1.0).abs() < 1e-3, "{forward}");
    }

    #[test]
    fn blocks_of_one_shape_share_a_graph() {
        let model = built_in::get("resnet50").unwrap().unwrap();
        let graph = graph::build(&model, 1, 1, 1);
        // A stem, two kinds in each of four stages, and a head.
        assert_eq!((graph.layers.len(), graph.kinds.len()), (18, 10));
        let names: Vec<&str> = graph.kinds.iter().map(|kind| kind.name.as_str()).collect();
        assert!(names.iter().all(|name| names.iter().filter(|n| n == &name).count() == 1));
        // No gradient flows back to the images.
        assert!(graph.kinds[0].input_grad.is_none());
    }
}
