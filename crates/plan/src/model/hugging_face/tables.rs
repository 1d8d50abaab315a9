//! Tables of the families' tensors.

use super::tensors::{Layout, Rows};
use Layout::{Experts, Grouped, Heads, Same, Transposed};

const QKV: &str = "self_attn.q_proj.*|self_attn.k_proj.*|self_attn.v_proj.*";

pub(super) const OUTSIDE: Rows = &[
    ("embedding.table.weight", "model.embed_tokens.weight", Same),
    ("head.norm.*", "model.norm.*", Same),
    ("head.table.weight", "lm_head.weight", Same),
];

pub(super) const LLAMA: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("q_norm.weight", "self_attn.q_norm.weight", Same),
    ("k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.gate_proj.*|mlp.up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
];

pub(super) const GEMMA2: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("q_norm.weight", "self_attn.q_norm.weight", Same),
    ("k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("post1.weight", "post_attention_layernorm.weight", Same),
    ("norm2.*", "pre_feedforward_layernorm.*", Same),
    ("up.*", "mlp.gate_proj.*|mlp.up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
    ("post2.weight", "post_feedforward_layernorm.weight", Same),
];

pub(super) const OLMO2: Rows = &[
    ("qkv.*", QKV, Heads),
    ("q_norm.weight", "self_attn.q_norm.weight", Same),
    ("k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("post1.weight", "post_attention_layernorm.weight", Same),
    ("up.*", "mlp.gate_proj.*|mlp.up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
    ("post2.weight", "post_feedforward_layernorm.weight", Same),
];

pub(super) const GLM4: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("post1.weight", "post_self_attn_layernorm.weight", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.gate_up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
    ("post2.weight", "post_mlp_layernorm.weight", Same),
];

pub(super) const PHI_OUTSIDE: Rows = &[
    ("embedding.table.weight", "model.embed_tokens.weight", Same),
    ("head.norm.*", "model.final_layernorm.*", Same),
    ("head.table.*", "lm_head.*", Same),
];

pub(super) const PHI: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.dense.*", Same),
    ("up.*", "mlp.fc1.*", Same),
    ("down.*", "mlp.fc2.*", Same),
];

pub(super) const PHI3: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", "self_attn.qkv_proj.*", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.gate_up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
];

pub(super) const STARCODER2: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.c_fc.*", Same),
    ("down.*", "mlp.c_proj.*", Same),
];

pub(super) const GPT2_OUTSIDE: Rows = &[
    ("embedding.table.weight", "transformer.wte.weight", Same),
    ("embedding.position.weight", "transformer.wpe.weight", Same),
    ("head.norm.*", "transformer.ln_f.*", Same),
    ("head.table.*", "lm_head.*", Same),
];

pub(super) const GPT2: Rows = &[
    ("norm1.*", "ln_1.*", Same),
    ("qkv.weight", "attn.c_attn.weight", Transposed),
    ("qkv.bias", "attn.c_attn.bias", Same),
    ("attention_out.weight", "attn.c_proj.weight", Transposed),
    ("attention_out.bias", "attn.c_proj.bias", Same),
    ("norm2.*", "ln_2.*", Same),
    ("up.weight", "mlp.c_fc.weight", Transposed),
    ("up.bias", "mlp.c_fc.bias", Same),
    ("down.weight", "mlp.c_proj.weight", Transposed),
    ("down.bias", "mlp.c_proj.bias", Same),
];

pub(super) const GPT_BIGCODE: Rows = &[
    ("norm1.*", "ln_1.*", Same),
    ("qkv.*", "attn.c_attn.*", Grouped),
    ("attention_out.*", "attn.c_proj.*", Same),
    ("norm2.*", "ln_2.*", Same),
    ("up.*", "mlp.c_fc.*", Same),
    ("down.*", "mlp.c_proj.*", Same),
];

pub(super) const GPTJ: Rows = &[
    ("norm1.*", "ln_1.*", Same),
    ("qkv.*", "attn.q_proj.*|attn.k_proj.*|attn.v_proj.*", Heads),
    ("attention_out.*", "attn.out_proj.*", Same),
    ("up.*", "mlp.fc_in.*", Same),
    ("down.*", "mlp.fc_out.*", Same),
];

pub(super) const GPT_NEOX_OUTSIDE: Rows = &[
    ("embedding.table.weight", "gpt_neox.embed_in.weight", Same),
    ("head.norm.*", "gpt_neox.final_layer_norm.*", Same),
    ("head.table.weight", "embed_out.weight", Same),
];

pub(super) const GPT_NEOX: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", "attention.query_key_value.*", Grouped),
    ("attention_out.*", "attention.dense.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.dense_h_to_4h.*", Same),
    ("down.*", "mlp.dense_4h_to_h.*", Same),
];

pub(super) const FALCON_OUTSIDE: Rows = &[
    ("embedding.table.weight", "transformer.word_embeddings.weight", Same),
    ("embedding.norm.*", "transformer.word_embeddings_layernorm.*", Same),
    ("head.norm.*", "transformer.ln_f.*", Same),
    ("head.table.weight", "lm_head.weight", Same),
];

pub(super) const FALCON: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", "self_attention.query_key_value.*", Grouped),
    ("attention_out.*", "self_attention.dense.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.dense_h_to_4h.*", Same),
    ("down.*", "mlp.dense_4h_to_h.*", Same),
];

pub(super) const FALCON_NORMS: Rows = &[
    ("norm1.*", "ln_attn.*", Same),
    ("qkv.*", "self_attention.query_key_value.*", Grouped),
    ("attention_out.*", "self_attention.dense.*", Same),
    ("norm2.*", "ln_mlp.*", Same),
    ("up.*", "mlp.dense_h_to_4h.*", Same),
    ("down.*", "mlp.dense_4h_to_h.*", Same),
];

pub(super) const OPT_OUTSIDE: Rows = &[
    ("embedding.table.weight", "model.decoder.embed_tokens.weight", Same),
    // The class adds two to every position.
    ("embedding.position.weight", "model.decoder.embed_positions.weight", Layout::Behind(2)),
    ("head.norm.*", "model.decoder.final_layer_norm.*", Same),
    ("head.table.weight", "lm_head.weight", Same),
];

pub(super) const OPT: Rows = &[
    ("norm1.*", "self_attn_layer_norm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.out_proj.*", Same),
    ("norm2.*", "final_layer_norm.*", Same),
    ("up.*", "fc1.*", Same),
    ("down.*", "fc2.*", Same),
];

pub(super) const MPT_OUTSIDE: Rows = &[
    ("embedding.table.weight", "transformer.wte.weight", Same),
    ("head.norm.weight", "transformer.norm_f.weight", Same),
    ("head.table.weight", "lm_head.weight", Same),
];

pub(super) const MPT: Rows = &[
    ("norm1.weight", "norm_1.weight", Same),
    ("qkv.weight", "attn.Wqkv.weight", Same),
    ("attention_out.weight", "attn.out_proj.weight", Same),
    ("norm2.weight", "norm_2.weight", Same),
    ("up.weight", "ffn.up_proj.weight", Same),
    ("down.weight", "ffn.down_proj.weight", Same),
];

const EXPERT_UP: &str = "mlp.experts.{e}.gate_proj.weight|mlp.experts.{e}.up_proj.weight";

pub(super) const QWEN_MOE: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("q_norm.weight", "self_attn.q_norm.weight", Same),
    ("k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.gate_proj.*|mlp.up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
    ("router.weight", "mlp.gate.weight", Same),
    ("experts.up.weight", EXPERT_UP, Experts),
    ("experts.down.weight", "mlp.experts.{e}.down_proj.weight", Experts),
    (
        "shared.up.weight",
        "mlp.shared_expert.gate_proj.weight|mlp.shared_expert.up_proj.weight",
        Same,
    ),
    ("shared.down.weight", "mlp.shared_expert.down_proj.weight", Same),
    ("shared.gate.weight", "mlp.shared_expert_gate.weight", Layout::Matrix),
];

pub(super) const MIXTRAL: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("router.weight", "block_sparse_moe.gate.weight", Same),
    (
        "experts.up.weight",
        "block_sparse_moe.experts.{e}.w1.weight|block_sparse_moe.experts.{e}.w3.weight",
        Experts,
    ),
    ("experts.down.weight", "block_sparse_moe.experts.{e}.w2.weight", Experts),
];

pub(super) const GPT_OSS: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("sinks", "self_attn.sinks", Same),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("router.*", "mlp.router.*", Same),
    ("experts.up.weight", "mlp.experts.gate_up_proj", Layout::Alternating),
    ("experts.up.bias", "mlp.experts.gate_up_proj_bias", Layout::AlternatingBias),
    ("experts.down.weight", "mlp.experts.down_proj", Layout::Stacked),
    ("experts.down.bias", "mlp.experts.down_proj_bias", Layout::Matrix),
];

pub(super) const LLAMA4: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("qkv.*", QKV, Heads),
    ("attention_out.*", "self_attn.o_proj.*", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "feed_forward.gate_proj.*|feed_forward.up_proj.*", Same),
    ("down.*", "feed_forward.down_proj.*", Same),
    ("router.weight", "feed_forward.router.weight", Same),
    ("experts.up.weight", "feed_forward.experts.gate_up_proj", Layout::Stacked),
    ("experts.down.weight", "feed_forward.experts.down_proj", Layout::Stacked),
    (
        "shared.up.weight",
        "feed_forward.shared_expert.gate_proj.weight|feed_forward.shared_expert.up_proj.weight",
        Same,
    ),
    ("shared.down.weight", "feed_forward.shared_expert.down_proj.weight", Same),
];

pub(super) const DEEPSEEK: Rows = &[
    ("norm1.*", "input_layernorm.*", Same),
    ("q_down.weight", "self_attn.q_a_proj.weight", Same),
    ("q_norm.weight", "self_attn.q_a_layernorm.weight", Same),
    ("q_up.weight", "self_attn.q_b_proj.weight", Layout::LatentQueries),
    ("q_up.weight", "self_attn.q_proj.weight", Layout::DirectQueries),
    ("kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight", Layout::LatentKeys),
    ("k_rope.weight", "self_attn.kv_a_proj_with_mqa.weight", Layout::LatentRotated),
    ("kv_norm.weight", "self_attn.kv_a_layernorm.weight", Same),
    ("kv_up.weight", "self_attn.kv_b_proj.weight", Same),
    ("attention_out.weight", "self_attn.o_proj.weight", Same),
    ("norm2.*", "post_attention_layernorm.*", Same),
    ("up.*", "mlp.gate_proj.*|mlp.up_proj.*", Same),
    ("down.*", "mlp.down_proj.*", Same),
    ("router.weight", "mlp.gate.weight", Same),
    ("router.bias", "mlp.gate.e_score_correction_bias", Same),
    ("experts.up.weight", EXPERT_UP, Experts),
    ("experts.down.weight", "mlp.experts.{e}.down_proj.weight", Experts),
    (
        "shared.up.weight",
        "mlp.shared_experts.gate_proj.weight|mlp.shared_experts.up_proj.weight",
        Same,
    ),
    ("shared.down.weight", "mlp.shared_experts.down_proj.weight", Same),
    ("join.token_norm.weight", "enorm.weight", Same),
    ("join.hidden_norm.weight", "hnorm.weight", Same),
    ("join.token.weight", "eh_proj.weight", Layout::Left),
    ("join.hidden.weight", "eh_proj.weight", Layout::Right),
    ("head.norm.weight", "shared_head.norm.weight", Same),
];
