//! Contents of `config.json` for a model.

use super::family::Family;
use paceline_plan::model::{Activation, Experts, Latent, Model};
use serde_json::{Value, json};

/// Configuration of a model in the format of its class, trained on sequences of `seq` tokens. Begin-of-text and end-of-text tokens are
/// unknown, and there is no dropout.
pub(super) fn config(family: Family, model: &Model, seq: u64) -> Value {
    let own = match family {
        Family::Gpt2 => gpt2(model),
        Family::Llama => json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": model.ffn,
            "head_dim": model.head_dim,
            "mlp_bias": false,
        }),
        Family::Mixtral => json!({
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": model.ffn,
            "head_dim": model.head_dim,
            "num_local_experts": model.experts.experts,
            "router_aux_loss_coef": model.experts.balance,
            "router_jitter_noise": 0.0,
            "sliding_window": null,
        }),
        Family::Qwen3Moe => qwen3(model),
        Family::DeepseekV3 => deepseek(model),
    };
    let shared = match family {
        Family::Gpt2 => json!({}),
        Family::Llama | Family::Mixtral | Family::Qwen3Moe | Family::DeepseekV3 => {
            rotary(model, seq)
        }
    };
    let mut whole = json!({
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "bos_token_id": null,
        "eos_token_id": null,
        "torch_dtype": "float32",
    });
    for entries in [own, shared] {
        if let (Value::Object(whole), Value::Object(entries)) = (&mut whole, entries) {
            whole.extend(entries);
        }
    }
    whole
}

fn gpt2(model: &Model) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": model.max_positions,
        "n_embd": model.d_model,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "activation_function": match model.activation {
            Activation::Gelu | Activation::SwiGlu => "gelu_new",
            Activation::Relu => "relu",
            Activation::SquaredRelu => "relu2",
        },
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    })
}

/// Fields common to all families with rotary positions.
fn rotary(model: &Model, seq: u64) -> Value {
    let mut shared = json!({
        "max_position_embeddings": seq,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "attention_bias": false,
        "attention_dropout": 0.0,
    });
    if !model.experts.is_none() {
        shared["num_experts_per_tok"] = model.experts.topk.into();
    }
    shared
}

/// Returns true if gates are shares (several experts), false if a score (one), as in ours.
fn shares(experts: &Experts) -> bool {
    experts.topk > 1
}

fn qwen3(model: &Model) -> Value {
    let Experts { experts, dense_layers, dense_ffn, balance, .. } = model.experts;
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        // Width of dense layers, of which there may be none.
        "intermediate_size": if dense_layers > 0 { dense_ffn } else { model.ffn },
        "moe_intermediate_size": model.ffn,
        "head_dim": model.head_dim,
        "num_experts": experts,
        "norm_topk_prob": shares(&model.experts),
        "decoder_sparse_step": 1,
        "mlp_only_layers": (0..dense_layers).collect::<Vec<_>>(),
        "router_aux_loss_coef": balance,
        "use_sliding_window": false,
    })
}

fn deepseek(model: &Model) -> Value {
    let Experts { experts, shared_experts, dense_layers, dense_ffn, route_scale, .. } =
        model.experts;
    let Experts { groups, group_topk, .. } = model.experts;
    let Latent { q_lora, kv_lora, qk_rope, v_dim } = model.latent;
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": if dense_layers > 0 { dense_ffn } else { model.ffn },
        "moe_intermediate_size": model.ffn,
        "n_routed_experts": experts,
        "n_shared_experts": shared_experts,
        "first_k_dense_replace": dense_layers,
        "routed_scaling_factor": route_scale,
        "norm_topk_prob": shares(&model.experts),
        "n_group": groups.max(1),
        "topk_group": group_topk.max(1),
        "q_lora_rank": q_lora,
        "kv_lora_rank": kv_lora,
        "qk_rope_head_dim": qk_rope,
        "qk_nope_head_dim": model.head_dim - qk_rope,
        "v_head_dim": v_dim,
        "rope_interleave": false,
        "num_nextn_predict_layers": model.mtp.depth,
    })
}
