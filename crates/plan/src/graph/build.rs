//! Builds the operator graph of each model, before sharding.

mod attention;
mod experts;

use super::{
    ActivationKind, GateKind, Graph, Init, LayerDecl, LayerGraph, LinearRole, NormKind, OpKind,
    OpPass, Operator, Param, Tensor, TensorClass, differentiate, dlrm, network, resnet,
};
use crate::ids::{ParamId, TensorId};
use crate::model::{
    Activation, Body, Decoder, LayerForm, Model, ModelKind, Norms, Position, Residual,
};

/// Builds the graph of a model for microbatches of `batch` sequences (over all replicas) of `seq`
/// tokens.
///
/// `tokens_per_iteration` is the number of predictions over which the loss is averaged.
pub fn build(model: &Model, batch: u64, seq: u64, tokens_per_iteration: u64) -> Graph {
    let decoder = model.decoder();
    let sizes = Sizes { model, decoder, tokens: batch * seq, seq, tokens_per_iteration };
    match model.body() {
        Body::Tokens {} | Body::Decoder { .. } => {}
        Body::Images(net) => return resnet::build(net, &sizes, batch),
        Body::Clicks(net) => return dlrm::build(net, &sizes, batch),
        Body::Network(net) => return network::build(net, &sizes, batch, seq),
    }
    let mut layers = vec![LayerDecl { name: "embedding".into(), kind: 0 }];
    let mut kinds = vec![embedding(&sizes)];
    if model.kind == ModelKind::Mlp {
        kinds.push(mlp_block(&sizes));
    } else {
        // Prediction modules have layers like the last one.
        kinds.push(block(&sizes, sizes.form(model.layers.saturating_sub(1))));
    }
    kinds.push(head(&sizes, 0));
    let mut forms = vec![(sizes.form(model.layers.saturating_sub(1)), 1)];
    for number in 0..model.layers {
        let form = sizes.form(number);
        let known = forms.iter().find(|(known, _)| *known == form).map(|(_, kind)| *kind);
        let kind = known.unwrap_or_else(|| {
            kinds.push(block(&sizes, form));
            forms.push((form, kinds.len() - 1));
            kinds.len() - 1
        });
        layers.push(LayerDecl { name: format!("blocks.{number}"), kind });
    }
    layers.push(LayerDecl { name: "head".into(), kind: 2 });
    for depth in 1..=model.mtp.depth {
        let (name, kind) = (format!("blocks.{}", model.layers + depth - 1), kinds.len());
        kinds.extend([join(&sizes, depth), head(&sizes, depth)]);
        layers.extend([
            LayerDecl { name: format!("{name}.join"), kind },
            LayerDecl { name: name.clone(), kind: 1 },
            LayerDecl { name: format!("{name}.head"), kind: kind + 1 },
        ]);
    }
    Graph { kinds, layers, batch, seq }
}

/// Sizes for which the layers of a graph are built.
pub(super) struct Sizes<'a> {
    pub(super) model: &'a Model,
    /// Description of the layers; unused by networks that are no decoders.
    decoder: Decoder,
    pub(super) tokens: u64,
    seq: u64,
    pub(super) tokens_per_iteration: u64,
}

impl Sizes<'_> {
    fn form(&self, number: u64) -> LayerForm {
        self.decoder.layer(self.model, number, self.seq)
    }
}

fn embedding(s: &Sizes<'_>) -> LayerGraph {
    let (m, d) = (s.model, &s.decoder);
    let mut layer = Builder::new("embedding", s);
    let tokens = layer.tensor("tokens", 1, TensorClass::Tokens);
    let table = layer.table(0, m.tied || m.mtp.depth > 0);
    let mut x = layer.activation("embedded", m.d_model);
    layer.op(OpKind::Embedding, &[tokens], &[table], &[x]);
    x = layer.scaled("embedding.scaled", x, d.embedding_scale);
    if d.position == Position::Learned && m.kind != ModelKind::Mlp {
        let positions =
            layer.param("position.weight", [m.max_positions, m.d_model], Init::Normal(0.02), true);
        let y = layer.activation("y", m.d_model);
        layer.op(OpKind::Position, &[x], &[positions], &[y]);
        x = y;
    }
    if d.embedding_norm {
        x = layer.norm("norm", x);
    }
    layer.finish(None, Some(x))
}

/// Attention and a feed-forward part: one network, or several experts.
fn block(s: &Sizes<'_>, form: LayerForm) -> LayerGraph {
    let (m, d) = (s.model, &s.decoder);
    let last = s.form(m.layers.saturating_sub(1));
    let mut name = if form.experts { "experts" } else { "block" }.to_owned();
    if (form.mask, form.rotation) != (last.mask, last.rotation) {
        name.push_str(match (form.rotation, form.mask) {
            (None, _) => ".unrotated",
            (Some(_), super::Mask::Window(_)) => ".window",
            (Some(_), super::Mask::Chunk(_)) => ".chunk",
            (Some(_), super::Mask::Causal | super::Mask::Full) => ".full",
        });
    }
    let mut layer = Builder::new(&name, s);
    let x = layer.activation("x", m.d_model);
    let y = match d.residual {
        Residual::Sequential => {
            let n1 = layer.pre_norm("norm1", x);
            let out = layer.attended(n1, form);
            let out = layer.contribution("1", out);
            let middle = layer.add("middle", x, out);
            let n2 = layer.pre_norm("norm2", middle);
            let fed = layer.fed(n2, form);
            let fed = layer.contribution("2", fed);
            layer.add("y", middle, fed)
        }
        Residual::Parallel | Residual::ParallelNorms => {
            let n1 = layer.pre_norm("norm1", x);
            let n2 = match d.residual {
                Residual::ParallelNorms => layer.pre_norm("norm2", x),
                Residual::Parallel | Residual::Sequential => n1,
            };
            let out = layer.attended(n1, form);
            let out = layer.contribution("1", out);
            let fed = layer.fed(n2, form);
            let fed = layer.contribution("2", fed);
            let middle = layer.add("middle", out, fed);
            layer.add("y", middle, x)
        }
    };
    layer.finish(Some(x), Some(y))
}

/// Two fully connected layers, each with a ReLU.
fn mlp_block(s: &Sizes<'_>) -> LayerGraph {
    let m = s.model;
    let relu = OpKind::Activation { function: ActivationKind::Relu };
    let mut layer = Builder::new("block", s);
    let x = layer.activation("x", m.d_model);
    let up = layer.linear("up", x, &[m.ffn], LinearRole::Up);
    let active = layer.activation("active", m.ffn);
    layer.op(relu, &[up], &[], &[active]);
    let down = layer.linear("down", active, &[m.d_model], LinearRole::Down);
    let y = layer.activation("y", m.d_model);
    layer.op(relu, &[down], &[], &[y]);
    layer.finish(Some(x), Some(y))
}

/// First layer of a multi-token prediction module (DeepSeek-V3, arXiv 2412.19437, eq. 21). The
/// output of the previous head and the embedding of the token `depth` positions ahead, each
/// normalised, are multiplied by one matrix. Its two halves are separate GEMMs here, so that no
/// concatenation is needed.
fn join(s: &Sizes<'_>, depth: u64) -> LayerGraph {
    let m = s.model;
    let mut layer = Builder::new(&format!("join{depth}"), s);
    let x = layer.activation("x", m.d_model);
    let tokens = layer.tensor("tokens", 1, TensorClass::Lookahead(depth as u16));
    // The next module's join uses the same table later, and so does this module's head if tied.
    let table = layer.table(depth, true);
    layer.graph.params[table.index()].adds = m.tied || depth < m.mtp.depth;
    let embedded = layer.activation("embedded", m.d_model);
    layer.op(OpKind::Embedding, &[tokens], &[table], &[embedded]);
    let token = layer.norm("token_norm", embedded);
    let token = layer.linear("token", token, &[m.d_model], LinearRole::Join);
    let hidden = layer.norm("hidden_norm", x);
    let hidden = layer.linear("hidden", hidden, &[m.d_model], LinearRole::Join);
    let y = layer.add("y", token, hidden);
    layer.finish(Some(x), Some(y))
}

/// Norm, logits and loss: the model's own, or those of the module that predicts the token `depth`
/// positions after the next one. The next module reads the normalised output, as in Megatron-LM.
fn head(s: &Sizes<'_>, depth: u64) -> LayerGraph {
    let m = s.model;
    let (name, class) = match depth {
        0 => ("head".to_owned(), TensorClass::Targets),
        _ => (format!("head{depth}"), TensorClass::Lookahead(depth as u16 + 1)),
    };
    let mut layer = Builder::new(&name, s);
    let x = layer.activation("x", m.d_model);
    let normed = if m.kind == ModelKind::Mlp { x } else { layer.norm("norm", x) };
    let targets = layer.tensor("targets", 1, class);
    let table = layer.table(depth, m.tied);
    layer.graph.params[table.index()].adds = depth < m.mtp.depth;
    let mut logits = layer.activation("logits", m.vocab);
    layer.op(OpKind::Linear { role: LinearRole::Head }, &[normed], &[table], &[logits]);
    let d = &s.decoder;
    if d.head_bias {
        logits = layer.biased("logits.biased", "table.bias", logits, &[m.vocab]);
    }
    logits = layer.scaled("logits.scaled", logits, d.logit_scale);
    if d.logit_softcap > 0.0 {
        let capped = layer.activation("logits.capped", m.vocab);
        layer.op(OpKind::SoftCap { cap: d.logit_softcap }, &[logits], &[], &[capped]);
        logits = capped;
    }
    layer.loss(logits, targets, if depth == 0 { 1.0 } else { m.mtp.share() });
    layer.finish(Some(x), (depth < m.mtp.depth).then_some(normed))
}

fn activation(kind: Activation) -> OpKind {
    let function = match kind {
        Activation::Gelu => ActivationKind::Gelu,
        Activation::GeluErf => ActivationKind::GeluErf,
        Activation::Relu => ActivationKind::Relu,
        Activation::SquaredRelu => ActivationKind::SquaredRelu,
        Activation::SwiGlu => return OpKind::SwiGlu,
        Activation::GeGlu => return OpKind::GeGlu,
        Activation::GeGluErf => return OpKind::Gated { gate: GateKind::GeluErf },
        Activation::ClampedSwiGlu => return OpKind::Gated { gate: GateKind::ClampedSwiGlu },
    };
    OpKind::Activation { function }
}

/// Appends operators to a layer.
pub(super) struct Builder<'a> {
    pub(super) sizes: &'a Sizes<'a>,
    pub(super) graph: LayerGraph,
}

impl<'a> Builder<'a> {
    pub(super) fn new(name: &str, sizes: &'a Sizes<'a>) -> Self {
        let graph = LayerGraph {
            name: name.into(),
            tensors: Vec::new(),
            params: Vec::new(),
            forward: Vec::new(),
            backward: Vec::new(),
            input: None,
            output: None,
            output_grad: None,
            input_grad: None,
        };
        Self { sizes, graph }
    }

    fn push(&mut self, tensor: Tensor) -> TensorId {
        self.graph.tensors.push(tensor);
        TensorId::from(self.graph.tensors.len() - 1)
    }

    pub(super) fn tensor(&mut self, name: &str, width: u64, class: TensorClass) -> TensorId {
        let dims = [self.sizes.tokens, width];
        self.push(Tensor { name: name.into(), dims, class, blocks: Vec::new() })
    }

    pub(super) fn scalar(&mut self, name: &str, class: TensorClass) -> TensorId {
        self.push(Tensor { name: name.into(), dims: [1, 1], class, blocks: Vec::new() })
    }

    pub(super) fn activation(&mut self, name: &str, width: u64) -> TensorId {
        self.tensor(name, width, TensorClass::Activation)
    }

    /// An activation whose rows consist of blocks.
    pub(super) fn activation_of(&mut self, name: &str, blocks: &[u64]) -> TensorId {
        let id = self.activation(name, blocks.iter().sum());
        if blocks.len() > 1 {
            self.graph.tensors[id.index()].blocks = blocks.to_vec();
        }
        id
    }

    pub(super) fn param(&mut self, name: &str, dims: [u64; 2], init: Init, decay: bool) -> ParamId {
        let (name, blocks, experts) = (name.into(), Vec::new(), 0);
        let [tied, borrowed, adds, running, sparse] = [false; 5];
        let param = Param {
            name,
            dims,
            blocks,
            init,
            decay,
            experts,
            tied,
            borrowed,
            adds,
            running,
            sparse,
        };
        self.graph.params.push(param);
        ParamId::from(self.graph.params.len() - 1)
    }

    /// Vocabulary table: the embedding's if tied, else the head's, which prediction modules borrow.
    fn table(&mut self, depth: u64, tied: bool) -> ParamId {
        let dims = [self.sizes.model.vocab, self.sizes.model.d_model];
        let id = self.param("table.weight", dims, Init::Normal(0.02), true);
        let param = &mut self.graph.params[id.index()];
        (param.tied, param.borrowed) = (tied, !tied && depth > 0);
        id
    }

    pub(super) fn op(
        &mut self,
        kind: OpKind,
        inputs: &[TensorId],
        params: &[ParamId],
        outputs: &[TensorId],
    ) {
        self.graph.forward.push(Operator {
            kind,
            pass: OpPass::Forward,
            inputs: inputs.to_vec(),
            params: params.to_vec(),
            outputs: outputs.to_vec(),
        });
    }

    fn norm(&mut self, name: &str, x: TensorId) -> TensorId {
        self.norm_with(name, x, self.sizes.model.norm_eps)
    }

    fn norm_with(&mut self, name: &str, x: TensorId, eps: f64) -> TensorId {
        self.norm_of(name, x, self.sizes.decoder.norm, eps)
    }

    pub(super) fn norm_of(
        &mut self,
        name: &str,
        x: TensorId,
        norm: NormKind,
        eps: f64,
    ) -> TensorId {
        let width = self.graph.tensor(x).dims[1];
        let one = if norm == NormKind::RmsUnit { Init::Zero } else { Init::One };
        let gain = self.param(&format!("{name}.weight"), [1, width], one, false);
        let mut params = vec![gain];
        if norm == NormKind::Layer {
            params.push(self.param(&format!("{name}.bias"), [1, width], Init::Zero, false));
        }
        let y = self.activation(name, width);
        // Mean and reciprocal deviation, or only the reciprocal root mean square.
        let width = if norm.is_centred() { 2 } else { 1 };
        let stats = self.tensor(&format!("{name}.stats"), width, TensorClass::Statistic);
        self.op(OpKind::Norm { norm, eps }, &[x], &params, &[y, stats]);
        y
    }

    /// Input of a half of a layer: normalised, unless only outputs are.
    fn pre_norm(&mut self, name: &str, x: TensorId) -> TensorId {
        match self.sizes.decoder.norms {
            Norms::Pre | Norms::Sandwich => self.norm(name, x),
            Norms::Post => x,
        }
    }

    /// Contribution of half a layer to the residual stream: its output, normalised and scaled.
    fn contribution(&mut self, half: &str, out: TensorId) -> TensorId {
        let d = &self.sizes.decoder;
        let out = match d.norms {
            Norms::Pre => out,
            Norms::Post | Norms::Sandwich => self.norm(&format!("post{half}"), out),
        };
        self.scaled(&format!("scaled{half}"), out, d.residual_scale)
    }

    /// x·factor, or x without a factor.
    fn scaled(&mut self, name: &str, x: TensorId, factor: f64) -> TensorId {
        if factor == 0.0 || factor == 1.0 {
            return x;
        }
        let y = self.activation(name, self.graph.tensor(x).dims[1]);
        self.op(OpKind::Scale { factor }, &[x], &[], &[y]);
        y
    }

    /// Output of attention, projected to the stream.
    fn attended(&mut self, x: TensorId, form: LayerForm) -> TensorId {
        let m = self.sizes.model;
        let attended =
            if m.latent.is_none() { self.attention(x, form) } else { self.latent(x, form) };
        self.linear("attention_out", attended, &[m.d_model], LinearRole::AttentionOut)
    }

    /// Output of the feed-forward part.
    fn fed(&mut self, x: TensorId, form: LayerForm) -> TensorId {
        let m = self.sizes.model;
        match form.experts {
            true => self.experts(x),
            false if !m.experts.is_none() => self.feed_forward("", x, m.experts.dense_ffn),
            false => self.feed_forward("", x, m.ffn),
        }
    }

    /// x·Wᵀ, plus a bias if the model has one. `blocks` are the widths of the concatenated outputs.
    fn linear(&mut self, name: &str, x: TensorId, blocks: &[u64], role: LinearRole) -> TensorId {
        let d = &self.sizes.decoder;
        let biased = match role {
            LinearRole::Qkv => d.qkv_bias,
            LinearRole::AttentionOut => d.attention_bias,
            LinearRole::Up | LinearRole::Down => d.ffn_bias,
            LinearRole::Router => d.router_bias,
            LinearRole::Head | LinearRole::Latent | LinearRole::Join => false,
        };
        self.linear_with(name, x, blocks, role, biased)
    }

    fn linear_with(
        &mut self,
        name: &str,
        x: TensorId,
        blocks: &[u64],
        role: LinearRole,
        biased: bool,
    ) -> TensorId {
        let inner = self.graph.tensor(x).dims[1];
        let out: u64 = blocks.iter().sum();
        let init = self.spread(inner, role);
        let weight = self.param(&format!("{name}.weight"), [out, inner], init, true);
        if blocks.len() > 1 {
            self.graph.params[weight.index()].blocks = blocks.to_vec();
        }
        let product = if biased { format!("{name}.product") } else { name.to_string() };
        let y = self.activation_of(&product, blocks);
        self.op(OpKind::Linear { role }, &[x], &[weight], &[y]);
        if biased { self.biased(name, &format!("{name}.bias"), y, blocks) } else { y }
    }

    /// y + b.
    pub(super) fn biased(
        &mut self,
        name: &str,
        param: &str,
        y: TensorId,
        blocks: &[u64],
    ) -> TensorId {
        let bias = self.param(param, [1, blocks.iter().sum()], Init::Zero, false);
        if blocks.len() > 1 {
            self.graph.params[bias.index()].blocks = blocks.to_vec();
        }
        let z = self.activation_of(name, blocks);
        self.op(OpKind::Bias, &[y], &[bias], &[z]);
        z
    }

    /// Initial values of a linear weight.
    fn spread(&self, inner: u64, role: LinearRole) -> Init {
        let m = self.sizes.model;
        // GPT-2 divides the matrices that write to the residual stream by the root of their number.
        let residual = matches!(role, LinearRole::AttentionOut | LinearRole::Down);
        Init::Normal(match m.kind {
            ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Graph => {
                (2.0 / inner as f64).sqrt()
            }
            _ if residual => 0.02 / (2.0 * m.layers as f64).sqrt(),
            ModelKind::Gpt2 | ModelKind::Llama | ModelKind::Moe | ModelKind::Decoder => 0.02,
        })
    }

    /// A feed-forward network of a given width.
    fn feed_forward(&mut self, prefix: &str, x: TensorId, ffn: u64) -> TensorId {
        let m = self.sizes.model;
        let up_blocks = if m.gated() { vec![ffn, ffn] } else { vec![ffn] };
        let up = self.linear(&format!("{prefix}up"), x, &up_blocks, LinearRole::Up);
        let active = self.activation(&format!("{prefix}active"), ffn);
        self.op(activation(m.activation), &[up], &[], &[active]);
        self.linear(&format!("{prefix}down"), active, &[m.d_model], LinearRole::Down)
    }

    pub(super) fn add(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        let width = self.graph.tensor(a).dims[1];
        let y = self.activation(name, width);
        self.op(OpKind::Add, &[a, b], &[], &[y]);
        y
    }

    /// Cross-entropy loss of logits, averaged over an iteration and weighted with `share`.
    pub(super) fn loss(&mut self, logits: TensorId, targets: TensorId, share: f64) {
        let max = self.tensor("max", 1, TensorClass::Statistic);
        self.op(OpKind::RowMax, &[logits], &[], &[max]);
        let stats = self.tensor("stats", 2, TensorClass::Statistic);
        self.op(OpKind::SoftmaxStats, &[logits, max, targets], &[], &[stats]);
        let loss = self.scalar("loss", TensorClass::Loss);
        let scale = share / self.sizes.tokens_per_iteration as f64;
        let kind = OpKind::CrossEntropy { scale };
        self.op(kind, &[stats, logits, max, targets], &[], &[loss]);
    }

    pub(super) fn finish(
        mut self,
        input: Option<TensorId>,
        output: Option<TensorId>,
    ) -> LayerGraph {
        self.graph.input = input;
        self.graph.output = output;
        differentiate::differentiate(&mut self.graph);
        self.graph
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::built_in;

    fn parameters(graph: &Graph) -> u64 {
        let of = |kind: usize| {
            let layer = &graph.kinds[kind];
            let second_use = layer.input.is_some();
            let counted =
                layer.params.iter().filter(|p| !(p.tied && second_use || p.borrowed || p.running));
            counted.map(|p| p.dims[0] * p.dims[1]).sum::<u64>()
        };
        graph.layers.iter().map(|layer| of(layer.kind)).sum()
    }

    #[test]
    fn the_graph_has_as_many_parameters_as_the_model() {
        for (name, _) in built_in::all() {
            let model = built_in::get(name).unwrap().unwrap();
            let graph = build(&model, 1, model.seq, model.seq);
            assert_eq!(parameters(&graph), model.parameters(), "{name}");
        }
    }

    /// Narayanan et al. (arXiv 2104.04473), eq. 3 without recomputation: 72·B·s·l·h²(1 + s/6h +
    /// V/12lh), including the logits' GEMM and its gradient.
    #[test]
    fn operators_add_up_to_the_published_flops() {
        let model = built_in::get("gpt3-175b").unwrap().unwrap();
        let graph = build(&model, 1, model.seq, model.seq);
        let mut flops = 0.0;
        for layer in &graph.layers {
            let kind = &graph.kinds[layer.kind];
            for op in kind.forward.iter().chain(&kind.backward) {
                flops += kind.matrix_flops(op).0;
            }
        }
        let (s, l) = (model.seq as f64, model.layers as f64);
        let (h, v) = (model.d_model as f64, model.vocab as f64);
        let published = 72.0 * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        assert!((flops / published - 1.0).abs() < 1e-12, "{flops} against {published}");
    }
}
