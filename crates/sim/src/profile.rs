//! Software profiles: properties of the software stack that affect a plan's cost.
//!
//! A plan defines operators and messages, but not the number of kernels per operator or their
//! intermediate memory traffic. These are properties of the software, the same for every model and
//! every cluster. A profile therefore has a name and is chosen once.
//!
//! Byte counts come from the software's public sources: reads and writes of each expression of a
//! loss, a norm or an optimizer. `docs/validation.md` gives the sources.

use paceline_plan::DType;
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// Fusions, memory savings and overheads of a software stack.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// Name on the command line.
    pub name: &'static str,
    /// Attention implementation.
    pub attention: Attention,
    /// True if training uses dropout: masks are written, saved and applied again. The plan has no
    /// such operator, because it trains without dropout; published runs often use it.
    pub dropout: bool,
    /// Kernels of norms, rotary embeddings and element-wise operators.
    pub kernels: Kernels,
    /// True if GEMM epilogues add biases and sum bias gradients. Otherwise these are separate
    /// kernels.
    pub fused_bias: bool,
    /// True if GEMMs accumulate weight gradients of earlier microbatches while writing their
    /// result. Otherwise the result is written, read again and added.
    pub fused_accumulation: bool,
    /// True if tokens are permuted to expert order and back by dedicated kernels. Otherwise by
    /// tensor expressions, which sum the parts of a token with atomic operations.
    pub fused_permutation: bool,
    /// True if the GEMM of every expert is a call of its own, four at a time, and so are the casts of
    /// its operands (Transformer Engine's `GroupedLinear`). Otherwise one kernel computes all.
    pub separate_experts: bool,
    /// Host time to launch one kernel of experts. Their sizes follow from routing, so that graphs
    /// which remove the launches of other kernels do not contain them.
    pub expert_launch_time: Seconds,
    /// Relative standard deviation of expert load; 0 if routing is forced to be even. The most
    /// loaded rank sets the pace of its layer.
    pub expert_spread: f64,
    /// Memory traffic and peak memory of the loss.
    pub loss: Loss,
    /// Memory traffic of casts to fp8.
    pub casts: Casts,
    /// Bytes per parameter that an optimizer step moves beyond the minimum: gradients copied,
    /// unscaled and clipped, intermediates between kernels, weights copied back.
    pub update_bytes: f64,
    /// True if weights are 2:4 sparse and the device's sparse units are used.
    pub sparse_weights: bool,
    /// True if gathered weights and gradients to be reduced are copied between the layers' tensors
    /// and separate buffers (FSDP2).
    pub copies_shards: bool,
    /// True if activations are stored sequence by sequence (PyTorch's DTensor). With several
    /// sequences per microbatch, tensors that sequence parallelism gathers and scatters along
    /// tokens are then copied into and out of contiguous memory. Megatron stores tokens outermost.
    pub copies_tokens: bool,
    /// True if every result must be bitwise reproducible: kernels with arbitrary summation order
    /// are replaced, and PyTorch fills each new tensor before it is written
    /// (`torch.use_deterministic_algorithms` with `fill_uninitialized_memory`, its default).
    pub deterministic: bool,
    /// True if a message that all tensor-parallel ranks hold is split among them, sent in parts and
    /// gathered by the receivers: "scatter/gather" in Narayanan et al. (arXiv 2104.04473, section
    /// 4.1).
    pub p2p_scatter_gather: bool,
    /// True if GEMMs and adjacent tensor-parallel exchanges are split into parts that overlap:
    /// "user buffers" in Transformer Engine, "async TP" in PyTorch.
    pub tp_comm_overlap: bool,
    /// True if updated weights are gathered while the next iteration's forward pass begins.
    pub overlap_param_gather: bool,
    /// Ring attention between ranks that share a sequence.
    pub ring: Ring,
    /// Communication library.
    pub library: Library,
    /// Host time to launch one kernel. It matters if the device finishes sooner.
    pub cpu_launch_time: Seconds,
    /// Bytes that the software reserves on the device per byte held: a caching allocator rounds
    /// sizes up and retains fragments. 1 if the reported bytes are those held.
    pub allocator_overhead: f64,
    /// True if the weights of fp8 GEMMs are stored and gathered in fp8 only; the optimizer has
    /// their f32 masters. Otherwise casts are kept beside them.
    pub fp8_weights: bool,
    /// Memory of a device that tensors cannot use: the driver's context, kernels, workspaces of
    /// libraries and buffers of communicators. At most a thirty-second part of the memory.
    pub memory_headroom: Bytes,
}

/// Estimate: about 0.5 GiB of context and kernels, and as much for each of the two or three
/// communicators of a large job (`NCCL_BUFFSIZE` of 4 MiB for every channel and peer).
const HEADROOM: Bytes = Bytes(2 << 30);

/// Attention implementation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Every GEMM, the softmax and the dropout read and write all seq × seq scores of each head.
    Written,
    /// One kernel that never writes its scores: FlashAttention (Dao et al., arXiv 2205.14135).
    Flash1,
    /// One kernel that never writes its scores and skips the causally masked half, with the instructions of 2020: FlashAttention-2 (Dao, arXiv
    /// 2307.08691).
    Flash2,
    /// One kernel with the device's native instructions: cuDNN, FlashAttention-3 (Shah et al.,
    /// arXiv 2407.08608) or its successors.
    Native,
}

/// Kernels of norms, rotary embeddings and element-wise operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kernels {
    /// Every tensor expression is a kernel; norms and rotary embeddings are several, in f32.
    Eager,
    /// An operator is one kernel, and so are adjacent element-wise operators (bias and GELU; bias,
    /// dropout and the residual's addition): intermediates are never written. Compilers and
    /// hand-written kernels are equivalent in this.
    Fused,
}

/// Bytes per logit of the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Moved between the written logits and the loss.
    pub forward: f64,
    /// Moved between the loss and the written gradient of the logits.
    pub backward: f64,
    /// Peak bytes held, including logits and their gradient.
    pub live: f64,
    /// Peak bytes held if the vocabulary is sharded along the tensor-parallel axis.
    pub live_when_cut: f64,
}

impl Loss {
    /// One kernel per pass, without f32 logits in memory.
    pub const FUSED: Self = Self { forward: 5.0, backward: 5.0, live: 4.0, live_when_cut: 4.0 };

    /// Megatron's vocabulary-parallel loss. Forward: cast to f32 (2 read, 4 written), max (4),
    /// subtract, exp (8 each), sum (4), divide (8). Backward: scale in place (8), cast (6). Held:
    /// the f32 copy, which becomes the gradient, and 2 bytes of it.
    pub const MEGATRON: Self =
        Self { forward: 38.0, backward: 14.0, live: 6.0, live_when_cut: 6.0 };

    /// PyTorch's `cross_entropy` on logits cast to f32, as separate kernels: an H200 needs the time
    /// of 28 bytes forward and 26 backward. The peak holds the log-softmax, its gradient and that
    /// of the logits; the form for a sharded vocabulary holds a fourth tensor.
    pub const EAGER: Self = Self { forward: 28.0, backward: 26.0, live: 12.0, live_when_cut: 16.0 };
}

/// Bytes per element moved to cast GEMM operands to fp8: one pass for the maximum, one to cast, and
/// a transposed copy if the device needs one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Casts {
    /// Casts of the GEMM input, forward.
    pub input: f64,
    /// Casts of the output gradient, for both gradients.
    pub gradient: f64,
    /// Casts of the weights, forward.
    pub weight: f64,
    /// Repeated cast of the input, for the weight gradient.
    pub input_recast: f64,
    /// Repeated cast of the weights, for the input gradient.
    pub weight_recast: f64,
    /// True if cast weights are retained for all microbatches of an iteration.
    pub weights_once: bool,
}

/// Traffic of a cast relative to one to fp8, whose six bytes per element are a pass for the maximum
/// (2), the read (2) and two orientations (1 each): for activations and gradients, and for weights.
///
/// nvfp4 (NVIDIA, arXiv 2509.25149, section 4): a pass for the maxima, then each orientation by a
/// kernel of its own, because the one for weight gradients is rotated by random Hadamard matrices
/// first; weights are scaled in squares and cast in both orientations at once. mxfp4: a block's scale
/// follows from the block, so there is no pass for the maximum.
pub(crate) fn cast_traffic(dtype: DType) -> [f64; 2] {
    let bytes = dtype.scaled_bits() / 8.0;
    match dtype {
        DType::Nvfp4 => [(2.0 + 2.0 * (2.0 + bytes)) / 6.0, (4.0 + 2.0 * bytes) / 6.0],
        DType::Mxfp4 => [(2.0 + 2.0 * bytes) / 6.0; 2],
        DType::F32 | DType::Bf16 | DType::F16 | DType::Fp8 | DType::U32 | DType::U8 => [1.0; 2],
    }
}

impl Casts {
    /// Transformer Engine: both orientations at once, those of the weights once per iteration.
    pub const TRANSFORMER_ENGINE: Self = Self {
        input: 6.0,
        gradient: 6.0,
        weight: 6.0,
        input_recast: 0.0,
        weight_recast: 0.0,
        weights_once: true,
    };

    /// torchao's dynamic tensor-wise scaling, compiled: every operand is cast at its use.
    pub const TORCHAO: Self = Self {
        input: 5.0,
        gradient: 6.0,
        weight: 5.0,
        input_recast: 5.0,
        weight_recast: 5.0,
        weights_once: false,
    };
}

/// Ring attention between ranks that share a sequence, beyond what the plan defines.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ring {
    /// True if keys and values are copied for every query head before they are sent.
    pub repeats_heads: bool,
    /// True if gradients of keys and values are sent in f32, independent of the compute dtype.
    pub wide_gradients: bool,
    /// True if a rank waits for a message immediately instead of when it is needed.
    pub waits_at_once: bool,
    /// Bytes per query element that a step moves besides its attention kernel, forward and
    /// backward: halves sliced, results merged, gradients summed.
    pub merge: [f64; 2],
}

impl Ring {
    /// Transformer Engine (`AttnFuncWithCPAndKVP2P`). Forward, a step uses all queries or the
    /// second half: sliced (4 bytes of a half), the result cast to f32 (6 bytes of three quarters)
    /// and added to the accumulator (12 of three quarters). Backward, queries, result and its
    /// gradient are sliced (12 of a half, every other step) and the query gradient is added (6 of
    /// three quarters); those of keys and values are small.
    pub const TRANSFORMER_ENGINE: Self = Self {
        repeats_heads: false,
        wide_gradients: false,
        waits_at_once: false,
        merge: [15.0, 8.0],
    };

    /// PyTorch's `context_parallel` under torchtitan's model, which repeats keys and values for all
    /// query heads before it calls attention. Results are merged in f32 by tensor expressions.
    /// Measured by us on an H200 with 32,768 tokens and 32 heads of 128 on each of eight ranks:
    /// beyond its kernel, a step takes the time of 46 bytes forward (32 if compiled) and 157
    /// backward.
    pub const PYTORCH: Self = Self {
        repeats_heads: true,
        wide_gradients: true,
        waits_at_once: false,
        merge: [46.0, 157.0],
    };

    /// PyTorch's `context_parallel` inside a compiled layer: a traced collective is waited for
    /// immediately (`_maybe_wrap_tensor` in `torch.distributed._functional_collectives`).
    pub const PYTORCH_COMPILED: Self =
        Self { waits_at_once: true, merge: [32.0, 157.0], ..Self::PYTORCH };
}

/// Communication library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Library {
    /// Collective steps given by the plan, one after the other.
    Steps,
    /// NCCL on GPUs if the plan leaves the algorithm open; otherwise the plan's steps.
    Nccl,
}

/// Host time per kernel in eager PyTorch, also with Transformer Engine, including autograd.
const EAGER_ISSUE: Seconds = Seconds(10e-6);

impl Profile {
    /// Current stacks: fused attention, few passes over memory, no dropout.
    pub const MODERN: Self = Self {
        name: "modern",
        attention: Attention::Native,
        dropout: false,
        kernels: Kernels::Fused,
        fused_bias: true,
        fused_accumulation: true,
        fused_permutation: true,
        separate_experts: false,
        expert_launch_time: Seconds::ZERO,
        expert_spread: 0.0,
        loss: Loss::FUSED,
        casts: Casts::TRANSFORMER_ENGINE,
        update_bytes: 0.0,
        sparse_weights: false,
        copies_shards: false,
        copies_tokens: false,
        deterministic: false,
        p2p_scatter_gather: true,
        tp_comm_overlap: false,
        overlap_param_gather: false,
        ring: Ring::TRANSFORMER_ENGINE,
        library: Library::Nccl,
        cpu_launch_time: Seconds::ZERO,
        allocator_overhead: 1.0,
        fp8_weights: false,
        memory_headroom: HEADROOM,
    };

    /// [`Profile::MODERN`] with 2:4 sparse weights.
    pub const MODERN_SPARSE: Self =
        Self { name: "modern-sparse", sparse_weights: true, ..Self::MODERN };

    /// Megatron-LM as measured by Narayanan et al. (arXiv 2104.04473) and Korthikanti et al. (arXiv
    /// 2205.05198). Scores are written, softmax is one kernel with scale and mask, bias + GELU and
    /// bias + dropout + addition are one kernel each (section 4.2 of the former). Its step copies
    /// gradients to f32 (4 bytes written), unscales and clips them (8 each), and reads them and the
    /// master weights once more than necessary (4 each).
    pub const MEGATRON_2021: Self = Self {
        name: "megatron-2021",
        attention: Attention::Written,
        dropout: true,
        fused_bias: false,
        fused_accumulation: false,
        loss: Loss::MEGATRON,
        update_bytes: 28.0,
        cpu_launch_time: EAGER_ISSUE,
        ..Self::MODERN
    };

    /// Megatron Core on Transformer Engine as its own tests run it: gradients clipped (8 bytes),
    /// weights copied back (6). Routing is learned with a balancing loss, which leaves an expert
    /// load spread of 6 % (a log of 8 experts in 16 layers, issue 10 of `shawntan/scattermoe`).
    pub const MEGATRON_CORE: Self = Self {
        name: "megatron-core",
        fused_permutation: false,
        separate_experts: true,
        expert_launch_time: EAGER_ISSUE,
        expert_spread: 0.06,
        loss: Loss::MEGATRON,
        update_bytes: 14.0,
        overlap_param_gather: true,
        cpu_launch_time: EAGER_ISSUE,
        ..Self::MODERN
    };

    /// Megatron Core in deterministic mode, with its default dropout and weight gradients
    /// accumulated by a separate kernel.
    pub const MEGATRON_CORE_DETERMINISTIC: Self = Self {
        name: "megatron-core-deterministic",
        dropout: true,
        fused_accumulation: false,
        deterministic: true,
        ..Self::MEGATRON_CORE
    };

    /// Megatron Core as NVIDIA's Megatron Bridge configures it for speed: fused loss and
    /// permutations, forced even routing, and CUDA graphs that remove host launch time. Its mixed
    /// precisions set `fp8_param_gather`: weights are stored in fp8.
    pub const MEGATRON_BRIDGE: Self = Self {
        name: "megatron-bridge",
        fused_permutation: true,
        expert_spread: 0.0,
        loss: Loss::FUSED,
        cpu_launch_time: Seconds::ZERO,
        fp8_weights: true,
        ..Self::MEGATRON_CORE
    };

    /// torchtitan without a compiler. Its AdamW is a series of kernels over all tensors
    /// (`foreach`), which moves 64 bytes beyond the minimum; clipping moves 8.
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
        p2p_scatter_gather: false,
        ring: Ring::PYTORCH,
        cpu_launch_time: EAGER_ISSUE,
        allocator_overhead: 1.1,
        ..Self::MODERN
    };

    /// torchtitan of 2024 with compiled layers but an uncompiled loss.
    pub const TORCHTITAN_2024: Self = Self {
        name: "torchtitan-2024",
        kernels: Kernels::Fused,
        ring: Ring::PYTORCH_COMPILED,
        ..Self::TORCHTITAN_EAGER
    };

    /// torchtitan since 2025: the loss is compiled too, and the optimizer is one kernel.
    pub const TORCHTITAN: Self =
        Self { name: "torchtitan", loss: Loss::FUSED, update_bytes: 8.0, ..Self::TORCHTITAN_2024 };

    /// MosaicML's llm-foundry of 2023 on PyTorch 1.13's FSDP (the note above its benchmark tables) and
    /// FlashAttention 1.0.9 (the pin of its `gpu` extra): layer norms and GELU are one kernel each,
    /// biases are added by GEMMs, and the loss is flash-attention's fused one. Parameters of a block
    /// are one flat vector, of which layers see views, so that gathering copies nothing. Composer's
    /// AdamW is a series of kernels per vector, which moves 60 bytes beyond the minimum; clipping
    /// moves 12.
    pub const LLM_FOUNDRY: Self = Self {
        name: "llm-foundry",
        attention: Attention::Flash1,
        kernels: Kernels::Fused,
        loss: Loss::FUSED,
        copies_shards: false,
        ..Self::TORCHTITAN_EAGER
    };

    /// All profiles, the default first.
    pub const ALL: [Self; 10] = [
        Self::MODERN,
        Self::MODERN_SPARSE,
        Self::MEGATRON_2021,
        Self::MEGATRON_CORE,
        Self::MEGATRON_CORE_DETERMINISTIC,
        Self::MEGATRON_BRIDGE,
        Self::TORCHTITAN_EAGER,
        Self::TORCHTITAN_2024,
        Self::TORCHTITAN,
        Self::LLM_FOUNDRY,
    ];
}

impl Profile {
    /// Profile of the software that a table names, with or without its release:
    /// "megatron-bridge-26.04". `None` if no profile describes it.
    pub fn of_software(name: &str) -> Option<Self> {
        let known = SOFTWARE.iter().find(|(known, _)| {
            let release = name.strip_prefix(known).and_then(|rest| rest.strip_prefix('-'));
            let is_release = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '.');
            name == *known || release.is_some_and(is_release)
        });
        known.map(|&(_, profile)| profile).or_else(|| name.parse().ok())
    }
}

/// Software of measured runs by the names of `validation/`, beside the profiles' own names.
const SOFTWARE: [(&str, Profile); 6] = [
    ("megatron-lm-2021", Profile::MEGATRON_2021),
    ("megatron-bridge", Profile::MEGATRON_BRIDGE),
    ("torchtitan-eager", Profile::TORCHTITAN_EAGER),
    ("torchtitan-compile-2024", Profile::TORCHTITAN_2024),
    ("torchtitan-compile", Profile::TORCHTITAN),
    ("llm-foundry-fsdp1", Profile::LLM_FOUNDRY),
];

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
            format!("'{text}' is not a known software profile; known are: {known}")
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
            "'megatron' is not a known software profile; known are: modern, modern-sparse, "
        ));
    }

    #[test]
    fn software_is_named_with_or_without_its_release() {
        let name = |software: &str| Profile::of_software(software).map(|profile| profile.name);
        assert_eq!(name("megatron-bridge-26.04"), Some("megatron-bridge"));
        assert_eq!(name("torchtitan-compile-2024"), Some("torchtitan-2024"));
        assert_eq!(name("torchtitan-compile-2025"), Some("torchtitan"));
        assert_eq!(name("torchtitan-eager-2024"), Some("torchtitan-eager"));
        assert_eq!(name("megatron-core-deterministic"), Some("megatron-core-deterministic"));
        assert_eq!(name("llm-foundry-fsdp1"), Some("llm-foundry"));
        assert_eq!(name("megatron-bridge-nightly"), None);
    }

    #[test]
    fn a_loss_moves_and_holds_no_less_than_logits_and_gradient() {
        for profile in Profile::ALL {
            let Loss { forward, backward, live, live_when_cut } = profile.loss;
            assert!(forward >= 2.0 && backward >= 4.0, "{profile}");
            assert!(live >= 4.0 && live_when_cut >= live, "{profile}");
            assert!(profile.allocator_overhead >= 1.0, "{profile}");
        }
    }
}
