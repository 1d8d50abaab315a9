//! Exact parameter counts, and floating-point operations of the GEMMs.

use super::QueryKeyNorm;
use super::{
    Body, Decoder, Experts, Latent, LayerForm, Model, ModelDims, ModelKind, Norms, Residual, Router,
};
use crate::graph::{HeadNormKind, NormKind};
use crate::units::Flops;

impl Model {
    /// Number of parameters, tied ones counted once.
    ///
    /// For GPT shapes this is P = 12·l·h²·(1 + 13/(12h) + (V+s)/(12lh)) of Narayanan et al., SC'21
    /// (arXiv 2104.04473), eq. 2, plus the 2h of the last layer norm, which the paper omits.
    pub fn parameters(&self) -> u64 {
        // The checks keep the count below `MAX_PARAMETERS`.
        match self.body() {
            body @ (Body::Tokens {} | Body::Decoder { .. }) => self.count(body) as u64,
            Body::Images(net) => net.count() as u64,
            Body::Clicks(net) => net.count() as u64,
            Body::Network(net) => net.count() as u64,
        }
    }

    /// Number of parameters of the last layer; all are equal, except for dense layers of a mixture
    /// of experts.
    pub fn layer_parameters(&self) -> u64 {
        self.layer_count(&self.decoder(), !self.experts.is_none()) as u64
    }

    /// Number of parameters used by one token: all but those of the experts it is not routed to.
    pub fn active_parameters(&self) -> u64 {
        let Experts { experts, topk, .. } = self.experts;
        let idle = u128::from(experts - topk) * self.expert_count(&self.decoder());
        self.parameters() - (u128::from(self.expert_layers()) * idle) as u64
    }

    /// Number of parameters of all routed experts.
    pub fn expert_parameters(&self) -> u64 {
        let experts = u128::from(self.expert_layers()) * u128::from(self.experts.experts);
        (experts * self.expert_count(&self.decoder())) as u64
    }

    /// GEMM operations of one iteration on `batch` samples of `seq` tokens, forward and backward,
    /// and with `recompute` the second forward of every layer (not of the head).
    ///
    /// A product of m×k by k×n takes 2mnk, its gradients twice that. For GPT shapes this is F =
    /// 96·B·s·l·h²·(1 + s/(6h) + V/(16lh)) with recomputation, Narayanan et al., SC'21 (arXiv
    /// 2104.04473), eq. 3, and 72·B·s·l·h²·(1 + s/(6h) + V/(12lh)) without, Korthikanti et al.
    /// (arXiv 2205.05198), eq. 7. As there, attention counts in full although half of it is masked.
    pub fn flops_per_iteration(&self, batch: u64, seq: u64, recompute: bool) -> Flops {
        let layers: Flops =
            self.layer_products(seq).map(|(times, product)| product.flops() * times as f64).sum();
        let layer_passes = if recompute { 4.0 } else { 3.0 };
        let per_sample = layers * layer_passes;
        let heads = (1 + self.mtp.depth) as f64;
        (per_sample + self.head_product(seq).flops() * 3.0 * heads) * batch as f64
    }

    /// Minimum operations per token by the closed form of MFU: 6N + 12·L·H·Q·T for L layers of H heads of
    /// width Q on T tokens, Chowdhery et al., PaLM (arXiv 2204.02311), appendix B. Recomputation
    /// never counts, and N is the number of parameters used by a token. A multi-token prediction
    /// module uses the head's parameters once more.
    pub fn model_flops_per_token(&self, seq: u64) -> Flops {
        let of = |(times, form): (u64, LayerForm)| {
            times as f64 * self.query_width() as f64 * form.mask.causal_keys(seq) as f64
        };
        let attention = 12.0 * self.forms(seq).into_iter().map(of).sum::<f64>();
        let heads = self.mtp.depth as f64 * self.vocab as f64 * self.d_model as f64;
        Flops(6.0 * (self.active_parameters() as f64 + heads) + attention)
    }

    /// Forms of layers on sequences of `seq` tokens, each with its number of layers.
    fn forms(&self, seq: u64) -> Vec<(u64, LayerForm)> {
        let decoder = self.decoder();
        let mut forms: Vec<(u64, LayerForm)> = Vec::new();
        let mut add = |times: u64, form: LayerForm| match forms
            .iter_mut()
            .find(|(_, known)| *known == form)
        {
            Some((known, _)) => *known += times,
            None => forms.push((times, form)),
        };
        for number in 0..self.layers {
            add(1, decoder.layer(self, number, seq));
        }
        if self.mtp.depth > 0 {
            add(self.mtp.depth, decoder.layer(self, self.layers.saturating_sub(1), seq));
        }
        forms
    }

    /// GEMMs of the layers' forward passes on one sample, each with its number of layers.
    fn layer_products(&self, seq: u64) -> impl Iterator<Item = (u64, Product)> {
        let joins = (self.mtp.depth > 0).then(|| {
            let join = Product { count: 2, m: seq, n: self.d_model, k: self.d_model };
            (self.mtp.depth, join)
        });
        let of = |(times, form): (u64, LayerForm)| {
            let products = self.form_products(seq, form);
            products.into_iter().map(move |product| (times, product))
        };
        self.forms(seq).into_iter().flat_map(of).collect::<Vec<_>>().into_iter().chain(joins)
    }

    /// GEMMs of one layer's forward pass on one sample.
    fn form_products(&self, seq: u64, form: LayerForm) -> Vec<Product> {
        let ModelDims { d_model, heads, head_dim, ffn, experts, latent, .. } = **self;
        let token_wise = |count, n, k| Product { count, m: seq, n, k };
        let v_dim = if latent.is_none() { head_dim } else { latent.v_dim };
        let mut products = Vec::new();
        if self.kind.has_attention() {
            if latent.is_none() {
                products.push(token_wise(1, self.query_width() + 2 * self.kv_width(), d_model));
            } else {
                let Latent { q_lora, kv_lora, qk_rope, v_dim } = latent;
                products.extend([
                    token_wise(1, q_lora + kv_lora + qk_rope, d_model),
                    token_wise(1, self.query_width(), if q_lora > 0 { q_lora } else { d_model }),
                    token_wise(1, heads * (head_dim - qk_rope + v_dim), kv_lora),
                ]);
            }
            let keys = form.mask.causal_keys(seq);
            products.extend([
                Product { count: heads, m: seq, n: keys, k: head_dim },
                Product { count: heads, m: seq, n: v_dim, k: keys },
                token_wise(1, d_model, heads * v_dim),
            ]);
        }
        let into_ffn = if self.gated() { 2 } else { 1 };
        let mut feed_forward = |networks: u64, ffn: u64| {
            products.extend([
                token_wise(networks.saturating_mul(into_ffn), ffn, d_model),
                token_wise(networks, d_model, ffn),
            ]);
        };
        match form.experts {
            true => {
                let decoder = self.decoder();
                match decoder.shared_ffn {
                    0 => feed_forward(experts.topk.saturating_add(experts.shared_experts), ffn),
                    shared => {
                        feed_forward(experts.topk, ffn);
                        feed_forward(1, shared);
                    }
                }
                products.push(token_wise(1, experts.experts, d_model));
            }
            false => feed_forward(1, if experts.is_none() { ffn } else { experts.dense_ffn }),
        }
        products
    }

    /// GEMM that computes the logits of one sample.
    fn head_product(&self, seq: u64) -> Product {
        Product { count: 1, m: seq, n: self.vocab, k: self.d_model }
    }
}

impl ModelDims {
    /// Number of parameters of dimensions within range; the total may exceed the maximum, which the
    /// checks detect by this count.
    pub(super) fn count(&self, body: &Body) -> u128 {
        let decoder = match body {
            Body::Decoder { decoder } => (**decoder).clone(),
            Body::Tokens {} | Body::Images(_) | Body::Clicks(_) | Body::Network(_) => {
                Decoder::of(self)
            }
        };
        let d = &decoder;
        let [d_model, positions, vocab] =
            [self.d_model, self.max_positions, self.vocab].map(u128::from);
        let tables = (vocab + positions) * d_model;
        let head = if self.tied { 0 } else { vocab * d_model };
        let bias = if d.head_bias { vocab } else { 0 };
        let norms = self.norm_count(d) * (1 + u128::from(d.embedding_norm));
        let with_experts = match self.experts.is_none() {
            true => 0,
            false => (0..self.layers).filter(|number| d.has_experts(self, *number)).count() as u128,
        };
        let dense = u128::from(self.layers) - with_experts;
        let last = d.has_experts(self, self.layers.saturating_sub(1));
        let layers = with_experts * self.layer_count(d, true)
            + dense * self.layer_count(d, false)
            + u128::from(self.mtp.depth) * self.module_count(d, last);
        tables + layers + norms + head + bias
    }

    /// Number of parameters of a multi-token prediction module: norms of its two inputs, the GEMM
    /// that joins them, a layer, and a norm before the head.
    fn module_count(&self, d: &Decoder, experts: bool) -> u128 {
        let d_model = u128::from(self.d_model);
        2 * d_model * d_model + 3 * self.norm_count(d) + self.layer_count(d, experts)
    }

    fn layer_count(&self, d: &Decoder, with_experts: bool) -> u128 {
        let Experts { experts, shared_experts, router, dense_ffn, .. } = self.experts;
        let feed_forward = if with_experts && experts > 0 {
            let shared = match d.shared_ffn {
                0 => u128::from(shared_experts) * self.network_count(d, self.ffn),
                width => self.network_count(d, width),
            };
            let gate = if d.shared_gate { u128::from(self.d_model) } else { 0 };
            // The router, and its biases if it has some.
            let choice = u128::from(self.d_model)
                + u128::from(router == Router::Sigmoid && d.choice_bias)
                + u128::from(d.router_bias);
            u128::from(experts) * (self.expert_count(d) + choice) + shared + gate
        } else {
            self.network_count(d, if self.experts.is_none() { self.ffn } else { dense_ffn })
        };
        self.attention_count(d) + feed_forward
    }

    /// Number of parameters of attention and of a layer's norms.
    fn attention_count(&self, d: &Decoder) -> u128 {
        if !self.kind.has_attention() {
            return 0;
        }
        let [d_model, heads, kv_heads, head_dim] =
            [self.d_model, self.heads, self.kv_heads, self.head_dim].map(u128::from);
        let linear = |out: u128, into: u128, bias: bool| out * into + if bias { out } else { 0 };
        let projections = if self.latent.is_none() {
            let norms = match d.qk_norm {
                None | Some(QueryKeyNorm::Heads(HeadNormKind::Bare)) => 0,
                Some(QueryKeyNorm::Heads(HeadNormKind::Head | HeadNormKind::HeadUnit)) => {
                    2 * head_dim
                }
                Some(QueryKeyNorm::Whole) => (heads + kv_heads) * head_dim,
            };
            linear((heads + 2 * kv_heads) * head_dim, d_model, d.qkv_bias)
                + linear(d_model, heads * head_dim, d.attention_bias)
                + norms
        } else {
            let Latent { q_lora, kv_lora, qk_rope, v_dim } = self.latent;
            let [q_lora, kv_lora, qk_rope, v_dim] =
                [q_lora, kv_lora, qk_rope, v_dim].map(u128::from);
            // Each latent vector has a norm.
            let unrotated = (head_dim + v_dim).saturating_sub(qk_rope);
            let queries = match q_lora {
                0 => d_model * heads * head_dim,
                _ => q_lora * (d_model + 1 + heads * head_dim),
            };
            queries
                + kv_lora * (d_model + 1 + heads * unrotated)
                + qk_rope * d_model
                + linear(d_model, heads * v_dim, d.attention_bias)
        };
        let inputs = if d.residual == Residual::Parallel { 1 } else { 2 };
        let norms = match d.norms {
            Norms::Pre => inputs,
            Norms::Post => 2,
            Norms::Sandwich => inputs + 2,
        };
        let sinks = if d.sinks { heads } else { 0 };
        projections + norms * self.norm_count(d) + sinks
    }

    /// Number of parameters of one expert.
    fn expert_count(&self, d: &Decoder) -> u128 {
        self.network_count(d, self.ffn)
    }

    /// Number of parameters of a feed-forward network of a given width.
    fn network_count(&self, d: &Decoder, ffn: u64) -> u128 {
        let [d_model, ffn] = [self.d_model, ffn].map(u128::from);
        let into_ffn = if self.gated() { 2 } else { 1 };
        let bias = if d.ffn_bias { into_ffn * ffn + d_model } else { 0 };
        (into_ffn + 1) * ffn * d_model + bias
    }

    /// Number of parameters of one norm: gain and bias, only a gain, or no norm at all.
    fn norm_count(&self, d: &Decoder) -> u128 {
        let vectors = match (self.kind, d.norm) {
            (ModelKind::Mlp | ModelKind::Resnet | ModelKind::Dlrm | ModelKind::Graph, _) => 0,
            (_, NormKind::Layer) => 2,
            (_, NormKind::Rms | NormKind::LayerGain | NormKind::RmsUnit) => 1,
        };
        vectors * u128::from(self.d_model)
    }
}

/// `count` GEMMs of an m×k by a k×n matrix.
struct Product {
    count: u64,
    m: u64,
    n: u64,
    k: u64,
}

impl Product {
    /// Operations as a float, because batch and sequence are arbitrary: a float loses the sixteenth
    /// digit where an integer would overflow.
    fn flops(&self) -> Flops {
        Flops(2.0 * self.count as f64 * self.m as f64 * self.n as f64 * self.k as f64)
    }
}

#[cfg(test)]
pub(in crate::model) mod tests {
    use super::*;
    use crate::model::{Activation, MAX_PARAMETERS, Mtp, built_in};
    use proptest::prelude::*;

    fn model(name: &str) -> Model {
        built_in::get(name).expect("built in").expect("sound")
    }

    /// Every built-in model to which the formulas of SC'21 apply.
    fn gpt_models() -> impl Iterator<Item = Model> {
        let all = built_in::all().iter().map(|(name, _)| model(name));
        all.filter(|model| model.kind == ModelKind::Gpt2)
    }

    /// Sizes of a GPT by their SC'21 names: l, h, V, s.
    fn letters(model: &Model) -> [u128; 4] {
        [model.layers, model.d_model, model.vocab, model.seq].map(u128::from)
    }

    #[test]
    fn parameters_equal_the_published_numbers_to_the_unit() {
        for (name, published) in [
            ("gpt2-124m", 124_439_808),
            ("gpt2-350m", 354_823_168),
            ("gpt2-774m", 774_030_080),
            ("gpt2-1.5b", 1_557_611_200),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3-405b", 405_853_388_800),
            // Counts of the published weights; DeepSeek-V3's without its MTP module.
            ("mixtral-8x7b", 46_702_792_704),
            ("mixtral-8x22b", 140_620_634_112),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
            ("deepseek-v3", 671_026_419_200),
            // Counted on the classes of transformers with the published configurations.
            ("llama3.1-8b", 8_030_261_248),
            ("llama3.1-70b", 70_553_706_496),
            ("llama3.1-405b", 405_853_388_800),
            ("llama3.2-1b", 1_235_814_400),
            ("llama3.2-3b", 3_212_749_824),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
            ("gemma3-1b", 999_885_952),
            ("gemma3-4b", 3_880_263_168),
            ("gemma3-12b", 11_766_034_176),
            ("gemma3-27b", 27_009_346_304),
            ("gpt-oss-20b", 20_914_757_184),
            ("gpt-oss-120b", 116_829_156_672),
            ("phi-4", 14_659_507_200),
            ("olmo2-7b", 7_298_617_344),
            ("olmo2-13b", 13_716_198_400),
            ("mistral-7b", 7_241_732_096),
            ("deepseek-v2", 235_741_434_880),
            ("llama4-scout", 107_769_861_120),
            ("llama4-maverick", 400_711_848_960),
            // Its layer 61: 11,507,286,272 of a layer, 2 · 7168² of the join, three norms.
            ("deepseek-v3-mtp", 671_026_419_200 + 11_507_286_272 + 102_760_448 + 3 * 7168),
        ] {
            assert_eq!(model(name).parameters(), published, "{name}");
        }
    }

    #[test]
    fn parameters_round_to_the_billions_of_sc21_table_1() {
        for (name, billions) in [
            ("gpt-1.7b", "1.7"),
            ("gpt-3.6b", "3.6"),
            ("gpt-7.5b", "7.5"),
            ("gpt-18b", "18.4"),
            ("gpt-39b", "39.1"),
            ("gpt-76b", "76.1"),
            ("gpt-145b", "145.6"),
            ("gpt-310b", "310.1"),
            ("gpt-530b", "529.6"),
            ("gpt-1008b", "1008.0"),
            ("gpt3-175b", "174.6"),
            ("turing-530b", "529.6"),
            ("megatron-8.3b", "8.3"),
            ("turing-nlg-17b", "17.2"),
        ] {
            assert_eq!(format!("{:.1}", model(name).parameters() as f64 / 1e9), billions, "{name}");
        }
    }

    #[test]
    fn parameters_are_sc21_eq_2_and_the_last_norm() {
        assert_eq!(gpt_models().count(), 19);
        for model in gpt_models() {
            let [l, h, v, s] = letters(&model);
            // 12·l·h²·(1 + 13/(12h) + (V+s)/(12lh)), expanded to stay in integers.
            let eq_2 = 12 * l * h * h + 13 * l * h + (v + s) * h;
            assert_eq!(u128::from(model.parameters()), eq_2 + 2 * h, "{}", model.name());
        }
    }

    #[test]
    fn small_models_are_counted_by_hand() {
        // Embedding and head of 256×64, two blocks of 64→128→64 with biases.
        assert_eq!(model("mlp").parameters(), 2 * 256 * 64 + 2 * (64 * 128 + 128 + 128 * 64 + 64));
        // Per layer q, k, v of 128, 64 and 64 rows, the output, three GEMMs of 384, two norms.
        let layer = 128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 384 + 2 * 128;
        assert_eq!(model("mini-llama").layer_parameters(), layer);
        assert_eq!(model("mini-llama").parameters(), 2 * 256 * 128 + 4 * layer + 128);
    }

    #[test]
    fn flops_are_sc21_eq_3_exactly() {
        for model in gpt_models() {
            let [l, h, v, s] = letters(&model);
            let exact = |product: Product| {
                2 * [product.count, product.m, product.n, product.k]
                    .map(u128::from)
                    .iter()
                    .product::<u128>()
            };
            let each = model.layer_products(model.seq).map(|(times, product)| {
                assert_eq!(times, model.layers);
                exact(product)
            });
            let layer: u128 = each.sum();
            let head = exact(model.head_product(model.seq));
            // 96·s·l·h²·(1 + s/(6h) + V/(16lh)) for one sample, expanded.
            let eq_3 = 96 * s * l * h * h + 16 * s * s * l * h + 6 * s * h * v;
            assert_eq!(4 * l * layer + 3 * head, eq_3, "{}", model.name());
            // 72·s·l·h²·(1 + s/(6h) + V/(12lh)), likewise.
            let eq_7 = 72 * s * l * h * h + 12 * s * s * l * h + 6 * s * h * v;
            assert_eq!(3 * l * layer + 3 * head, eq_7, "{}", model.name());

            for (recompute, whole) in [(true, eq_3), (false, eq_7)] {
                let flops = model.flops_per_iteration(512, model.seq, recompute).0;
                let relative = (flops / (512 * whole) as f64 - 1.0).abs();
                assert!(relative < 4.0 * f64::EPSILON, "{}: {relative:e}", model.name());
            }
        }
    }

    #[test]
    fn grouped_queries_and_gates_change_the_products() {
        let llama = model("llama3-8b");
        let (s, h, f) = (8192.0, 4096.0, 14336.0);
        let per_layer = 2.0 * s * h * (h + 2.0 * 1024.0 + h + 3.0 * f) + 4.0 * s * s * h;
        let forward = 32.0 * per_layer + 2.0 * s * h * 128_256.0;
        assert_eq!(llama.flops_per_iteration(1, 8192, false).0, 3.0 * forward);
        let mlp = model("mlp").flops_per_iteration(2, 16, false);
        assert_eq!(mlp.0, 3.0 * 2.0 * 16.0 * (2.0 * 2.0 * 2.0 * 64.0 * 128.0 + 2.0 * 64.0 * 256.0));
    }

    #[test]
    fn model_flops_follow_palm() {
        let gpt = model("gpt2-124m");
        let expected = 6.0 * 124_439_808.0 + 12.0 * 12.0 * 768.0 * 1024.0;
        assert_eq!(gpt.model_flops_per_token(1024).0, expected);
        let mlp = model("mlp");
        assert_eq!(mlp.model_flops_per_token(1 << 20).0, 6.0 * mlp.parameters() as f64);
    }

    #[test]
    fn absurd_batches_do_not_overflow() {
        let flops = model("gpt-1008b").flops_per_iteration(u64::MAX, u64::MAX, true).0;
        assert!(flops.is_finite() && flops > 0.0);
        assert_eq!(model("mini").flops_per_iteration(0, 0, true).0, 0.0);
        assert!(model("gpt-1008b").model_flops_per_token(u64::MAX).0.is_finite());
    }

    /// Sizes of every magnitude up to a limit, small ones as often as large ones.
    fn up_to(limit: u64) -> impl Strategy<Value = u64> {
        (1..=limit, 0..=limit.ilog2()).prop_map(|(size, shift)| (size >> shift).max(1))
    }

    /// Dimensions that a file could hold, from tiny to beyond the limit on parameters.
    pub(in crate::model) fn shapes() -> impl Strategy<Value = ModelDims> {
        let of_tokens = ModelKind::ALL.into_iter().filter(|kind| {
            use ModelKind::{Decoder, Dlrm, Graph, Resnet};
            !matches!(kind, Resnet | Dlrm | Decoder | Graph)
        });
        let kinds = prop::sample::select(of_tokens.collect::<Vec<_>>());
        let sizes = (up_to(65_535), up_to(1 << 17), up_to(1 << 12), up_to(64), up_to(1 << 26));
        let rest = (up_to(1 << 30), up_to(1 << 20), up_to(1 << 31), any::<bool>(), 0usize..4);
        (kinds, sizes, rest, 1e-12f64..0.09, 1.0f64..1e12).prop_map(
            |(kind, (layers, head_pairs, kv_heads, group, ffn), rest, norm_eps, rope_theta)| {
                let (seq, spare, vocab, tied, activation) = rest;
                let experts = match kind {
                    ModelKind::Moe => Experts {
                        experts: group + 1,
                        topk: group,
                        shared_experts: group - 1,
                        router: Router::ALL[activation % 2],
                        route_scale: norm_eps,
                        capacity: norm_eps - 0.01f64.min(norm_eps),
                        ..Experts::default()
                    },
                    ModelKind::Mlp
                    | ModelKind::Gpt2
                    | ModelKind::Llama
                    | ModelKind::Resnet
                    | ModelKind::Decoder
                    | ModelKind::Dlrm
                    | ModelKind::Graph => Experts::default(),
                };
                let (attention, learned, rotary) = (
                    u64::from(kind.has_attention()),
                    u64::from(kind == ModelKind::Gpt2),
                    f64::from(u8::from(kind.is_rotary())),
                );
                let activations: &[Activation] = kind.activations();
                ModelDims {
                    kind,
                    layers,
                    d_model: 2 * head_pairs * group,
                    heads: kv_heads * group * attention,
                    kv_heads: kv_heads * attention,
                    head_dim: 2 * head_pairs * attention,
                    ffn,
                    seq,
                    max_positions: (seq + spare).min(1 << 30) * learned,
                    vocab,
                    tied,
                    activation: activations[activation % activations.len()],
                    norm_eps: norm_eps * attention as f64,
                    rope_theta: rope_theta * rotary,
                    qk_norm: kind == ModelKind::Moe && tied,
                    experts,
                    latent: Latent::default(),
                    mtp: match (layers % 3) * u64::from(kind.is_rotary()) {
                        0 => Mtp::default(),
                        depth => Mtp { depth, weight: rope_theta.min(1e3) },
                    },
                }
            },
        )
    }

    proptest! {
        #[test]
        fn legal_shapes_have_positive_counts_that_fit(shape in shapes(), batch in any::<u64>()) {
            match Model::new("any", shape) {
                Ok(model) => {
                    let parameters = model.parameters();
                    prop_assert!((1..=MAX_PARAMETERS).contains(&parameters));
                    prop_assert!(model.layer_parameters() * model.layers < parameters);
                    let once = model.flops_per_iteration(batch, model.seq, false).0;
                    let twice = model.flops_per_iteration(batch, model.seq, true).0;
                    prop_assert!(once.is_finite() && once >= batch as f64);
                    prop_assert!(twice >= once && twice <= once * 4.0 / 3.0 * (1.0 + 1e-12));
                    let active = model.active_parameters();
                    prop_assert!((1..=parameters).contains(&active));
                    prop_assert!(model.model_flops_per_token(model.seq).0 >= 6.0 * active as f64);
                }
                Err(errors) => {
                    // The only rule that these dimensions can violate.
                    prop_assert!(shape.count(&Body::Tokens {}) > u128::from(MAX_PARAMETERS), "{errors}");
                    prop_assert_eq!(errors.problems.len(), 1);
                }
            }
        }

        #[test]
        fn shapes_of_any_numbers_never_panic(
            numbers in prop::array::uniform9(prop_oneof![
                any::<u64>(),
                0u64..4,
                Just(u64::MAX),
                Just(1 << 24),
            ]),
            kind in prop::sample::select(ModelKind::ALL.to_vec()),
            (norm_eps, rope_theta) in (any::<f64>(), any::<f64>()),
        ) {
            let [layers, d_model, heads, kv_heads, head_dim, ffn, seq, max_positions, vocab] = numbers;
            let shape = ModelDims {
                kind, layers, d_model, heads, kv_heads, head_dim, ffn, seq, max_positions, vocab,
                tied: false, activation: Activation::Gelu, norm_eps, rope_theta, qk_norm: false,
                experts: Experts { experts: layers, topk: heads, dense_layers: seq, ..Experts::default() },
                latent: Latent { q_lora: ffn, kv_lora: vocab, qk_rope: heads, v_dim: seq },
                mtp: Mtp { depth: heads, weight: norm_eps },
            };
            if let Ok(model) = Model::new("any", shape) {
                prop_assert!(model.parameters() > 0);
            }
        }
    }
}
