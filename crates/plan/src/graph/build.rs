//! Builds the operator graph of each model, before sharding.

use super::{
    ActivationKind, Graph, Heads, Init, LatentHeads, LayerDecl, LayerGraph, LinearRole, NormKind,
    OpKind, OpPass, Operator, Param, Routing, Tensor, TensorClass, differentiate, dlrm, resnet,
};
use crate::ids::{ParamId, TensorId};
use crate::model::{Activation, Body, Experts, Latent, Model, ModelKind, Router};

/// Builds the graph of a model for microbatches of `batch` sequences (over all replicas) of `seq`
/// tokens.
///
/// `tokens_per_iteration` is the number of predictions over which the loss is averaged.
pub fn build(model: &Model, batch: u64, seq: u64, tokens_per_iteration: u64) -> Graph {
    let sizes = Sizes { model, tokens: batch * seq, seq, tokens_per_iteration };
    match model.body() {
        Body::Tokens {} => {}
        Body::Images(net) => return resnet::build(net, &sizes, batch),
        Body::Clicks(net) => return dlrm::build(net, &sizes, batch),
    }
    let block = match model.kind {
        ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm => mlp_block(&sizes),
        ModelKind::Gpt2 | ModelKind::Llama => transformer_block("block", &sizes),
        ModelKind::Moe => transformer_block("experts", &sizes),
    };
    let mut kinds = vec![embedding(&sizes), block, head(&sizes, 0)];
    let dense = model.experts.dense_layers;
    if dense > 0 {
        kinds.push(transformer_block("block", &sizes));
    }
    let mut layers = vec![LayerDecl { name: "embedding".into(), kind: 0 }];
    layers.extend((0..model.layers).map(|i| {
        let kind = if i < dense { 3 } else { 1 };
        LayerDecl { name: format!("blocks.{i}"), kind }
    }));
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
    pub(super) tokens: u64,
    seq: u64,
    pub(super) tokens_per_iteration: u64,
}

fn embedding(s: &Sizes<'_>) -> LayerGraph {
    let m = s.model;
    let mut layer = Builder::new("embedding", s);
    let tokens = layer.tensor("tokens", 1, TensorClass::Tokens);
    let table = layer.table(0, m.tied || m.mtp.depth > 0);
    let mut x = layer.activation("embedded", m.d_model);
    layer.op(OpKind::Embedding, &[tokens], &[table], &[x]);
    if m.kind == ModelKind::Gpt2 {
        let positions =
            layer.param("position.weight", [m.max_positions, m.d_model], Init::Normal(0.02), true);
        let y = layer.activation("y", m.d_model);
        layer.op(OpKind::Position, &[x], &[positions], &[y]);
        x = y;
    }
    layer.finish(None, Some(x))
}

/// Attention and a feed-forward part: one network in a `block`, several in a layer of `experts`.
fn transformer_block(name: &str, s: &Sizes<'_>) -> LayerGraph {
    let m = s.model;
    let mut layer = Builder::new(name, s);
    let x = layer.activation("x", m.d_model);
    let n1 = layer.norm("norm1", x);
    let attended = if m.latent.is_none() { layer.attention(n1) } else { layer.latent(n1) };
    let out = layer.linear("attention_out", attended, &[m.d_model], LinearRole::AttentionOut);
    let middle = layer.add("middle", x, out);
    let n2 = layer.norm("norm2", middle);
    let fed = match name {
        "experts" => layer.experts(n2),
        _ if m.kind == ModelKind::Moe => layer.feed_forward("", n2, m.experts.dense_ffn),
        _ => layer.feed_forward("", n2, m.ffn),
    };
    let y = layer.add("y", middle, fed);
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
    let logits = layer.activation("logits", m.vocab);
    layer.op(OpKind::Linear { role: LinearRole::Head }, &[normed], &[table], &[logits]);
    layer.loss(logits, targets, if depth == 0 { 1.0 } else { m.mtp.share() });
    layer.finish(Some(x), (depth < m.mtp.depth).then_some(normed))
}

fn activation(kind: Activation) -> OpKind {
    let function = match kind {
        Activation::Gelu => ActivationKind::Gelu,
        Activation::Relu => ActivationKind::Relu,
        Activation::SquaredRelu => ActivationKind::SquaredRelu,
        Activation::SwiGlu => return OpKind::SwiGlu,
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
    fn activation_of(&mut self, name: &str, blocks: &[u64]) -> TensorId {
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
        let m = self.sizes.model;
        let norm = match m.kind {
            ModelKind::Gpt2 | ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm => {
                NormKind::Layer
            }
            ModelKind::Llama | ModelKind::Moe => NormKind::Rms,
        };
        let width = self.graph.tensor(x).dims[1];
        let gain = self.param(&format!("{name}.weight"), [1, width], Init::One, false);
        let mut params = vec![gain];
        if norm == NormKind::Layer {
            params.push(self.param(&format!("{name}.bias"), [1, width], Init::Zero, false));
        }
        let y = self.activation(name, width);
        // Mean and reciprocal deviation, or only the reciprocal root mean square.
        let width = if norm == NormKind::Layer { 2 } else { 1 };
        let stats = self.tensor(&format!("{name}.stats"), width, TensorClass::Statistic);
        self.op(OpKind::Norm { norm, eps: m.norm_eps }, &[x], &params, &[y, stats]);
        y
    }

    /// x·Wᵀ, plus a bias if the model has one. `blocks` are the widths of the concatenated outputs.
    fn linear(&mut self, name: &str, x: TensorId, blocks: &[u64], role: LinearRole) -> TensorId {
        let m = self.sizes.model;
        let inner = self.graph.tensor(x).dims[1];
        let out: u64 = blocks.iter().sum();
        let init = self.spread(inner, role);
        let weight = self.param(&format!("{name}.weight"), [out, inner], init, true);
        if blocks.len() > 1 {
            self.graph.params[weight.index()].blocks = blocks.to_vec();
        }
        let biased = matches!(m.kind, ModelKind::Gpt2 | ModelKind::Mlp);
        let product = if biased { format!("{name}.product") } else { name.to_string() };
        let y = self.activation_of(&product, blocks);
        self.op(OpKind::Linear { role }, &[x], &[weight], &[y]);
        if !biased {
            return y;
        }
        let bias = self.param(&format!("{name}.bias"), [1, out], Init::Zero, false);
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
            ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm => (2.0 / inner as f64).sqrt(),
            ModelKind::Gpt2 | ModelKind::Llama | ModelKind::Moe if residual => {
                0.02 / (2.0 * m.layers as f64).sqrt()
            }
            ModelKind::Gpt2 | ModelKind::Llama | ModelKind::Moe => 0.02,
        })
    }

    /// Attention of all heads on the output of a norm.
    fn attention(&mut self, x: TensorId) -> TensorId {
        let m = self.sizes.model;
        let heads = Heads { heads: m.heads, kv_heads: m.kv_heads, head_dim: m.head_dim };
        let blocks = [m.query_width(), m.kv_width(), m.kv_width()];
        let mut qkv = self.linear("qkv", x, &blocks, LinearRole::Qkv);
        if m.qk_norm {
            let gains = ["q_norm.weight", "k_norm.weight"]
                .map(|name| self.param(name, [1, m.head_dim], Init::One, false));
            let normed = self.activation_of("qkv.normed", &blocks);
            let stats = self.tensor("qkv.stats", m.heads + m.kv_heads, TensorClass::Statistic);
            self.graph.tensors[stats.index()].blocks = vec![m.heads, m.kv_heads];
            let kind = OpKind::HeadNorm { heads, eps: m.norm_eps };
            self.op(kind, &[qkv], &gains, &[normed, stats]);
            qkv = normed;
        }
        if m.kind.is_rotary() {
            let rotated = self.activation_of("qkv.rotated", &blocks);
            self.op(OpKind::Rope { heads, theta: m.rope_theta }, &[qkv], &[], &[rotated]);
            qkv = rotated;
        }
        self.attend(qkv, heads)
    }

    fn attend(&mut self, qkv: TensorId, heads: Heads) -> TensorId {
        let attended = self.activation("attended", heads.heads * heads.head_dim);
        let lse = self.tensor("lse", heads.heads, TensorClass::Statistic);
        let kind = OpKind::Attention { heads, seq: self.sizes.seq };
        self.op(kind, &[qkv], &[], &[attended, lse]);
        attended
    }

    /// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, eq. 9 to 19).
    fn latent(&mut self, x: TensorId) -> TensorId {
        let m = self.sizes.model;
        let Latent { q_lora, kv_lora, qk_rope, v_dim } = m.latent;
        let (heads, head_dim) = (m.heads, m.head_dim);
        let shape = LatentHeads { heads, head_dim, rope: qk_rope, v_dim, theta: m.rope_theta };
        let down = self.linear("q_down", x, &[q_lora], LinearRole::Latent);
        let down = self.norm("q_norm", down);
        let q = self.linear("q_up", down, &[heads * head_dim], LinearRole::Qkv);
        let down = self.linear("kv_down", x, &[kv_lora], LinearRole::Latent);
        let down = self.norm("kv_norm", down);
        let own = head_dim - qk_rope + v_dim;
        let kv = self.linear("kv_up", down, &[heads * own], LinearRole::Qkv);
        let turned = self.linear("k_rope", x, &[qk_rope], LinearRole::Latent);
        let qkv = self.activation_of("qkv", &[heads * head_dim; 3]);
        self.op(OpKind::LatentHeads(shape), &[q, kv, turned], &[], &[qkv]);
        let padded = self.attend(qkv, Heads { heads, kv_heads: heads, head_dim });
        let values = self.activation("values", heads * v_dim);
        self.op(OpKind::LatentValues(shape), &[padded], &[], &[values]);
        values
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

    /// Routed experts, plus a shared network for all tokens if the model has one.
    fn experts(&mut self, x: TensorId) -> TensorId {
        let m = self.sizes.model;
        let Experts { experts, topk, shared_experts, router, .. } = m.experts;
        let logits = self.linear("router", x, &[experts], LinearRole::Router);
        let choices = self.tensor("choices", topk, TensorClass::Index);
        let gates = self.tensor("gates", topk, TensorClass::Statistic);
        let (mut made, mut params) = (vec![choices, gates], Vec::new());
        let routing = self.routing();
        if routing.capacity.is_some() {
            made.push(self.scalar("dropped", TensorClass::Dropped));
        }
        if router == Router::Sigmoid {
            params.push(self.param("router.bias", [1, experts], Init::Zero, false));
        }
        self.op(OpKind::Route(routing), &[logits], &params, &made);

        let rows = self.dispatched("dispatched", m.d_model);
        let slots = self.tensor("slots", topk, TensorClass::Index);
        let counts = self.push(Tensor {
            name: "counts".into(),
            dims: [1, experts],
            class: TensorClass::Counts,
            blocks: Vec::new(),
        });
        let kind = OpKind::Dispatch { experts, topk, regions: 1 };
        self.op(kind, &[x, choices], &[], &[rows, slots, counts]);
        let up_blocks = if m.gated() { vec![m.ffn, m.ffn] } else { vec![m.ffn] };
        let up = self.expert_linear("experts.up", rows, counts, &up_blocks, LinearRole::Up);
        let active = self.dispatched("experts.active", m.ffn);
        self.op(activation(m.activation), &[up], &[], &[active]);
        let down =
            self.expert_linear("experts.down", active, counts, &[m.d_model], LinearRole::Down);
        let combined = self.activation("combined", m.d_model);
        self.op(OpKind::Combine { topk }, &[down, slots, gates], &[], &[combined]);
        if shared_experts == 0 {
            return combined;
        }
        let shared = self.feed_forward("shared.", x, shared_experts * m.ffn);
        self.add("fed", combined, shared)
    }

    fn routing(&self) -> Routing {
        let (m, seq) = (self.sizes.model, self.sizes.seq);
        let sequences = (self.sizes.tokens_per_iteration / seq.max(1)).max(1);
        Routing {
            experts: m.experts.experts,
            topk: m.experts.topk,
            sigmoid: m.experts.router == Router::Sigmoid,
            scale: m.experts.route_scale,
            seq,
            capacity: m.experts.taken(seq),
            balance: m.experts.balance / sequences as f64,
            groups: m.experts.groups.max(1),
            kept_groups: m.experts.group_topk.max(1),
            parts: 1,
        }
    }

    /// Tokens in expert order. Sharding determines the number of rows.
    fn dispatched(&mut self, name: &str, width: u64) -> TensorId {
        let dims = [self.sizes.tokens * self.sizes.model.experts.topk, width];
        let (name, class) = (name.into(), TensorClass::Dispatched);
        self.push(Tensor { name, dims, class, blocks: Vec::new() })
    }

    /// Multiplies every token by its expert's matrix.
    fn expert_linear(
        &mut self,
        name: &str,
        x: TensorId,
        counts: TensorId,
        blocks: &[u64],
        role: LinearRole,
    ) -> TensorId {
        let Experts { experts, .. } = self.sizes.model.experts;
        let [rows, inner] = self.graph.tensor(x).dims;
        let out: u64 = blocks.iter().sum();
        let init = self.spread(inner, role);
        let weight = self.param(&format!("{name}.weight"), [experts * out, inner], init, true);
        let param = &mut self.graph.params[weight.index()];
        param.experts = experts;
        if blocks.len() > 1 {
            param.blocks = blocks.to_vec();
        }
        let y = self.dispatched(name, out);
        let kind = OpKind::ExpertLinear { role, experts, regions: 1, rows };
        self.op(kind, &[x, counts], &[weight], &[y]);
        y
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
