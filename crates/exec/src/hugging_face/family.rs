//! Mapping of our models to model classes of `transformers`.

use paceline_plan::model::{Activation, Experts, Model, ModelKind, Router};

/// Model class of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Gpt2,
    Llama,
    /// Softmax routing only: no shared experts, no dense layers.
    Mixtral,
    /// Like Mixtral, with norms on queries and keys, and dense layers at listed positions.
    Qwen3Moe,
    /// Latent attention, sigmoid routing, a shared expert, and dense layers first.
    DeepseekV3,
}

/// Epsilon of DeepSeek-V3's class for the norms of latent vectors, regardless of its configuration.
const LATENT_EPS: f64 = 1e-6;

impl Family {
    /// Class of a model, or the reason why there is none.
    pub(super) fn of(model: &Model) -> Result<Self, String> {
        match (model.kind, model.activation) {
            (ModelKind::Gpt2, _) => Ok(Self::Gpt2),
            (ModelKind::Llama, Activation::SwiGlu) => Ok(Self::Llama),
            (ModelKind::Moe, Activation::SwiGlu) => Self::of_experts(model),
            (ModelKind::Llama | ModelKind::Moe, other) => Err(format!(
                "transformers' classes have gated networks, and this model's activation is {other}"
            )),
            (ModelKind::Mlp, _) => Err("transformers has no such model as an mlp".to_owned()),
            (ModelKind::Resnet | ModelKind::Dlrm, _) => {
                Err(format!("a {}'s weights are not written for transformers", model.kind))
            }
        }
    }

    fn of_experts(model: &Model) -> Result<Self, String> {
        let Experts { topk, shared_experts, dense_layers, router, route_scale, .. } = model.experts;
        let plain = shared_experts == 0 && route_scale == 1.0;
        match (router, model.latent.is_none(), model.qk_norm) {
            (Router::Softmax, true, true) if plain => Ok(Self::Qwen3Moe),
            // Mixtral divides by the sum of the chosen scores even for a single expert.
            (Router::Softmax, true, false) if plain && dense_layers == 0 && topk > 1 => {
                Ok(Self::Mixtral)
            }
            (Router::Sigmoid, false, false) if shared_experts > 0 => match model.norm_eps {
                LATENT_EPS => Ok(Self::DeepseekV3),
                eps => Err(format!(
                    "transformers' DeepSeek-V3 norms latent vectors with an epsilon of {LATENT_EPS:e}, and \
                     this model's is {eps:e}"
                )),
            },
            _ => Err("transformers has experts as in Mixtral (a softmax over several, nothing shared, no \
                      dense layers), Qwen3 (the same with norms on queries and keys, and dense layers) \
                      and DeepSeek-V3 (sigmoids, shared experts, latent attention), and this model's are \
                      like none of them"
                .to_owned()),
        }
    }
}
