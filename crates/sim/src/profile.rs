//! The software that runs a plan, as far as it changes what a plan costs.
//!
//! A plan says which operators run and what is sent; it does not say how many kernels an operator
//! takes or what those write to memory in between. That is a property of the software, the same for
//! every model and every cluster, so it has a name and is chosen once.
//!
//! Numbers of bytes are counted from the software's public sources: what each expression of a loss,
//! a norm or an optimizer reads and writes. `docs/validation.md` says where they come from.

use paceline_plan::units::Seconds;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// What a software stack fuses, keeps out of memory and adds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// What it is called on the command line.
    pub name: &'static str,
    /// How attention is computed.
    pub attention: Attention,
    /// Whether activations are dropped at random: masks are written, kept and applied again. The
    /// plan has no such operator, because it trains without; published runs often do not.
    pub dropout: bool,
    /// What norms, rotations and element-wise operators are made of.
    pub kernels: Kernels,
    /// Whether products add biases and sum the biases' gradients while they write their result.
    /// Otherwise these are kernels of their own.
    pub fused_bias: bool,
    /// Whether products add weight gradients to what earlier microbatches left while they write
    /// their result. Otherwise the result is written, read again and added.
    pub fused_accumulation: bool,
    /// Whether tokens are brought into their experts' order and back by kernels made for it.
    /// Otherwise by tensor expressions, which add with atomic operations what belongs to one token.
    pub fused_permutation: bool,
    /// The standard deviation of experts' loads around the equal share; nothing where routing is
    /// forced to be even. The fullest rank sets the pace of its layer.
    pub expert_spread: f64,
    /// What the loss moves and holds.
    pub loss: Loss,
    /// What making fp8 operands moves.
    pub casts: Casts,
    /// Bytes per parameter that an optimizer step moves beyond the least: gradients copied,
    /// unscaled and clipped, values between kernels, weights copied back.
    pub update_bytes: f64,
    /// Whether two of each four weights are zero, and the device's units for that are used.
    pub sparse_weights: bool,
    /// Whether gathered weights and gradients to be reduced are copied between the layers' tensors
    /// and buffers of their own (FSDP2).
    pub copies_shards: bool,
    /// Whether activations lie sequence by sequence, so that what sequence parallelism gathers and
    /// scatters along tokens is copied into and out of one piece where a microbatch has several
    /// sequences (PyTorch's DTensor). Megatron lays tokens outermost.
    pub copies_tokens: bool,
    /// Whether every result must have the same bits each time: kernels that sum in any order are
    /// replaced, and PyTorch fills each new tensor before it is written
    /// (`torch.use_deterministic_algorithms` with `fill_uninitialized_memory`, its default).
    pub deterministic: bool,
    /// Whether a message that all tensor-parallel ranks hold whole is cut among them, sent in parts
    /// and gathered again by the receivers: "scatter/gather" in Narayanan et al. (arXiv 2104.04473,
    /// section 4.1).
    pub sliced_messages: bool,
    /// Whether products and the tensor-parallel exchanges next to them are cut into parts that run
    /// beside each other: "user buffers" in Transformer Engine, "async TP" in PyTorch.
    pub overlapped_tensor: bool,
    /// Whether updated weights are gathered while the next iteration's forward pass begins.
    pub gathers_ahead: bool,
    /// How attention goes round the ranks that share a sequence.
    pub ring: Ring,
    /// What moves the bytes of messages and collectives.
    pub library: Library,
    /// What the host needs to put one kernel on its way. It counts where the device is done sooner.
    pub host_issue: Seconds,
    /// Bytes that the software takes from the device for each byte that it holds: a caching
    /// allocator rounds sizes up and keeps pieces that fit nothing. 1 where what is reported is
    /// what is held.
    pub reserve: f64,
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Every product, the softmax and the dropout read and write all seq × seq scores of each head.
    Written,
    /// One kernel that never writes its scores (Dao et al., arXiv 2205.14135) and skips the half
    /// that causality masks, in the instructions of 2020: FlashAttention-2 (Dao, arXiv 2307.08691).
    Flash2,
    /// The same in the device's own instructions: cuDNN, FlashAttention-3 (Shah et al., arXiv
    /// 2407.08608) or its successors.
    Native,
}

/// What norms, rotations and element-wise operators are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Every tensor expression is a kernel; norms and rotations are many, in f32.
    Eager,
    /// An operator is one kernel, and so are neighbours that treat every element by itself (bias
    /// and GELU; bias, dropout and the residual's addition): what stands between them is never
    /// written. Compilers and hand-written kernels come to the same.
    Fused,
}

/// Bytes per logit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Moved from the written logits to the loss.
    pub forward: f64,
    /// Moved from there to the written gradient of the logits.
    pub backward: f64,
    /// Held at the worst moment, logits and their gradient included.
    pub live: f64,
    /// The same where the vocabulary is cut along the tensor-parallel axis.
    pub live_when_cut: f64,
}

impl Loss {
    /// One kernel each way, which writes no f32 logits.
    pub const FUSED: Self = Self { forward: 5.0, backward: 5.0, live: 4.0, live_when_cut: 4.0 };

    /// Megatron's vocabulary-parallel loss. Forward: cast to f32 (2 read, 4 written), largest (4),
    /// subtracted, raised to powers (8 each), summed (4), divided (8). Backward: scaled in place
    /// (8), cast (6). What is held is the f32 copy, which becomes the gradient, and 2 bytes of it.
    pub const MEGATRON: Self =
        Self { forward: 38.0, backward: 14.0, live: 6.0, live_when_cut: 6.0 };

    /// PyTorch's `cross_entropy` on logits cast to f32, as kernels of their own: an H200 needs the
    /// time of 28 bytes forward and 26 backward. Held at worst are the log of the softmax, its
    /// gradient and that of the logits; the form for a cut vocabulary holds a fourth.
    pub const EAGER: Self = Self { forward: 28.0, backward: 26.0, live: 12.0, live_when_cut: 16.0 };
}

/// Bytes per element that making fp8 operands of products moves: one pass for the largest value,
/// one to cast, and a copy the other way round where the device wants one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Casts {
    /// Of a product's input, forward.
    pub input: f64,
    /// Of the gradient of its output, for both gradients.
    pub gradient: f64,
    /// Of its weights, forward.
    pub weight: f64,
    /// Of its input once more, for the weight's gradient.
    pub input_again: f64,
    /// Of its weights once more, for the input's gradient.
    pub weight_again: f64,
    /// Whether the weights' casts are kept for all microbatches of an iteration.
    pub weights_once: bool,
}

impl Casts {
    /// Transformer Engine: both orientations at once, those of the weights once an iteration.
    pub const TRANSFORMER_ENGINE: Self = Self {
        input: 6.0,
        gradient: 6.0,
        weight: 6.0,
        input_again: 0.0,
        weight_again: 0.0,
        weights_once: true,
    };

    /// torchao's dynamic tensor-wise scaling, compiled: everything is cast where it is used.
    pub const TORCHAO: Self = Self {
        input: 5.0,
        gradient: 6.0,
        weight: 5.0,
        input_again: 5.0,
        weight_again: 5.0,
        weights_once: false,
    };
}

/// How attention goes round the ranks that share a sequence, beyond what the plan says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ring {
    /// Whether keys and values are copied for every query head before they travel.
    pub repeats_heads: bool,
    /// Whether the gradients of keys and values travel in f32, whatever the model computes in.
    pub wide_gradients: bool,
    /// Whether a rank waits for a message as soon as it is on its way, instead of when it is needed.
    pub waits_at_once: bool,
    /// Bytes per element of the queries that a step moves beside its attention kernel, forward and
    /// backward: halves cut out, results merged, gradients added up.
    pub merge: [f64; 2],
}

impl Ring {
    /// Transformer Engine (`AttnFuncWithCPAndKVP2P`). Forward, the queries of a step are all or the
    /// second half: cut out (4 bytes of a half), the result cast to f32 (6 bytes of three quarters)
    /// and added to what there is (12 of three quarters). Backward, queries, result and its gradient
    /// are cut out (12 of a half, every other step) and the queries' gradient is added (6 of three
    /// quarters); those of keys and values are few.
    pub const TRANSFORMER_ENGINE: Self = Self {
        repeats_heads: false,
        wide_gradients: false,
        waits_at_once: false,
        merge: [15.0, 8.0],
    };

    /// PyTorch's `context_parallel` under torchtitan's model, which repeats keys and values for all
    /// query heads before it calls attention. Everything is merged in f32 by tensor expressions:
    /// measured by us on an H200 with 32,768 tokens and 32 heads of 128 on each of eight ranks, what
    /// a step takes beyond its kernel is the time of 32 bytes forward and 157 backward.
    pub const PYTORCH: Self = Self {
        repeats_heads: true,
        wide_gradients: true,
        waits_at_once: false,
        merge: [46.0, 157.0],
    };

    /// The same inside a compiled layer: a traced collective is waited for where it stands
    /// (`_maybe_wrap_tensor` in `torch.distributed._functional_collectives`).
    pub const PYTORCH_COMPILED: Self =
        Self { waits_at_once: true, merge: [32.0, 157.0], ..Self::PYTORCH };
}

/// What moves the bytes of messages and collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Library {
    /// The steps that the plan spells out, one after the other.
    Steps,
    /// NCCL wherever there are GPUs and the plan leaves the algorithm open; the steps elsewhere.
    Nccl,
}

/// What eager PyTorch, and Transformer Engine in it, need on the host for one kernel, autograd
/// included.
const EAGER_ISSUE: Seconds = Seconds(10e-6);

impl Profile {
    /// What current stacks do: fused attention, few passes over memory, no dropout.
    pub const MODERN: Self = Self {
        name: "modern",
        attention: Attention::Native,
        dropout: false,
        kernels: Kernels::Fused,
        fused_bias: true,
        fused_accumulation: true,
        fused_permutation: true,
        expert_spread: 0.0,
        loss: Loss::FUSED,
        casts: Casts::TRANSFORMER_ENGINE,
        update_bytes: 0.0,
        sparse_weights: false,
        copies_shards: false,
        copies_tokens: false,
        deterministic: false,
        sliced_messages: true,
        overlapped_tensor: false,
        gathers_ahead: false,
        ring: Ring::TRANSFORMER_ENGINE,
        library: Library::Nccl,
        host_issue: Seconds::ZERO,
        reserve: 1.0,
    };

    /// The same with 2:4 sparse weights.
    pub const MODERN_SPARSE: Self =
        Self { name: "modern-sparse", sparse_weights: true, ..Self::MODERN };

    /// Megatron-LM as Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv 2205.05198)
    /// measured it: scores are written, softmax is one kernel with scale and mask, bias + GELU and
    /// bias + dropout + addition are one kernel each (section 4.2 of the former). Its step copies
    /// gradients to f32 (4 bytes written), unscales and clips them (8 each), reads them once more
    /// than it must, and the master weights too (4 each).
    pub const MEGATRON_2021: Self = Self {
        name: "megatron-2021",
        attention: Attention::Written,
        dropout: true,
        fused_bias: false,
        fused_accumulation: false,
        loss: Loss::MEGATRON,
        update_bytes: 28.0,
        host_issue: EAGER_ISSUE,
        ..Self::MODERN
    };

    /// Megatron Core on Transformer Engine as its own tests run it: gradients clipped (8 bytes),
    /// weights copied back (6). Routing is learned with a balancing loss, which leaves experts' loads
    /// a spread of 6 % (a log of 8 experts in 16 layers, issue 10 of `shawntan/scattermoe`).
    pub const MEGATRON_CORE: Self = Self {
        name: "megatron-core",
        fused_permutation: false,
        expert_spread: 0.06,
        loss: Loss::MEGATRON,
        update_bytes: 14.0,
        gathers_ahead: true,
        host_issue: EAGER_ISSUE,
        ..Self::MODERN
    };

    /// Megatron Core in deterministic mode, with the dropout of its defaults and weight gradients
    /// accumulated by a kernel of their own.
    pub const MEGATRON_CORE_DETERMINISTIC: Self = Self {
        name: "megatron-core-deterministic",
        dropout: true,
        fused_accumulation: false,
        deterministic: true,
        ..Self::MEGATRON_CORE
    };

    /// Megatron Core as NVIDIA's Megatron Bridge configures it for speed: the loss and permutations
    /// are fused, routing is forced to be even, and CUDA graphs take the host out of the way.
    pub const MEGATRON_BRIDGE: Self = Self {
        name: "megatron-bridge",
        fused_permutation: true,
        expert_spread: 0.0,
        loss: Loss::FUSED,
        host_issue: Seconds::ZERO,
        ..Self::MEGATRON_CORE
    };

    /// torchtitan without a compiler. Its AdamW is a row of kernels over all tensors
    /// (`foreach`), which moves 64 bytes beyond the least; clipping moves 8.
    pub const TORCHTITAN_EAGER: Self = Self {
        name: "torchtitan-eager",
        attention: Attention::Flash2,
        kernels: Kernels::Eager,
        fused_bias: true,
        fused_accumulation: true,
        loss: Loss::EAGER,
        casts: Casts::TORCHAO,
        update_bytes: 72.0,
        copies_shards: true,
        copies_tokens: true,
        sliced_messages: false,
        ring: Ring::PYTORCH,
        host_issue: EAGER_ISSUE,
        reserve: 1.1,
        ..Self::MODERN
    };

    /// torchtitan of 2024 with compiled layers; the loss was not compiled yet.
    pub const TORCHTITAN_2024: Self = Self {
        name: "torchtitan-2024",
        kernels: Kernels::Fused,
        ring: Ring::PYTORCH_COMPILED,
        ..Self::TORCHTITAN_EAGER
    };

    /// torchtitan from 2025 on: the loss is compiled too, and the optimizer is one kernel.
    pub const TORCHTITAN: Self =
        Self { name: "torchtitan", loss: Loss::FUSED, update_bytes: 8.0, ..Self::TORCHTITAN_2024 };

    /// All profiles, the default first.
    pub const ALL: [Self; 9] = [
        Self::MODERN,
        Self::MODERN_SPARSE,
        Self::MEGATRON_2021,
        Self::MEGATRON_CORE,
        Self::MEGATRON_CORE_DETERMINISTIC,
        Self::MEGATRON_BRIDGE,
        Self::TORCHTITAN_EAGER,
        Self::TORCHTITAN_2024,
        Self::TORCHTITAN,
    ];
}

impl Default for Profile {
    fn default() -> Self {
        Self::MODERN
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|profile| profile.name == text).ok_or_else(|| {
            let known = Self::ALL.map(|profile| profile.name).join(", ");
            format!("'{text}' is no known software profile; known are: {known}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_profile() {
        for profile in Profile::ALL {
            assert_eq!(profile.to_string().parse(), Ok(profile));
        }
        let told = "megatron".parse::<Profile>().unwrap_err();
        assert!(told.starts_with(
            "'megatron' is no known software profile; known are: modern, modern-sparse, "
        ));
    }

    #[test]
    fn a_loss_moves_and_holds_no_less_than_logits_and_gradient() {
        for profile in Profile::ALL {
            let Loss { forward, backward, live, live_when_cut } = profile.loss;
            assert!(forward >= 2.0 && backward >= 4.0, "{profile}");
            assert!(live >= 4.0 && live_when_cut >= live, "{profile}");
            assert!(profile.reserve >= 1.0, "{profile}");
        }
    }
}
