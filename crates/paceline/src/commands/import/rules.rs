//! Counterparts of other systems' settings.

/// Counterpart of one setting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    pub(super) name: &'static str,
    pub(super) target: Target,
    /// Their values and ours; other values have no counterpart. Empty if values are the same.
    pub(super) words: &'static [(&'static str, &'static str)],
}

/// Place of a counterpart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// A key of the run file.
    Common(&'static str),
    /// A key of its section for training.
    Train(&'static str),
    /// A key of the model file.
    Model(&'static str),
    /// A part of what several settings say together.
    Noted,
    /// Something that we lack; false is the same as leaving it out.
    Off,
}

use Target::{Common, Model, Noted, Off, Train};

const fn same(name: &'static str, target: Target) -> Rule {
    Rule { name, target, words: &[] }
}

const fn of(
    name: &'static str,
    target: Target,
    words: &'static [(&'static str, &'static str)],
) -> Rule {
    Rule { name, target, words }
}

/// Arguments of Megatron-LM's training scripts.
pub(super) const MEGATRON: &[Rule] = &[
    same("tensor-model-parallel-size", Common("tp")),
    same("pipeline-model-parallel-size", Common("pp")),
    same("context-parallel-size", Common("cp")),
    same("expert-model-parallel-size", Common("ep")),
    same("expert-tensor-parallel-size", Common("etp")),
    same("sequence-parallel", Common("sp")),
    same("micro-batch-size", Common("micro-batch")),
    same("global-batch-size", Common("global-batch")),
    same("seq-length", Common("seq")),
    of("bf16", Common("dtype"), &[("true", "bf16")]),
    of("fp16", Common("dtype"), &[("true", "f16")]),
    of("recompute-activations", Common("recompute"), &[("true", "selective")]),
    of(
        "recompute-granularity",
        Common("recompute"),
        &[("full", "full"), ("selective", "selective")],
    ),
    of("optimizer", Common("optimizer"), &[("adam", "adamw"), ("sgd", "sgd")]),
    same("nproc-per-node", Noted),
    same("nnodes", Noted),
    same("world-size", Noted),
    same("num-layers-per-virtual-pipeline-stage", Noted),
    same("num-virtual-stages-per-pipeline-rank", Noted),
    same("use-distributed-optimizer", Noted),
    same("data-parallel-sharding-strategy", Noted),
    same("train-iters", Train("iterations")),
    same("lr", Train("lr")),
    same("min-lr", Train("min-lr")),
    same("lr-warmup-iters", Train("warmup")),
    of(
        "lr-decay-style",
        Train("lr-schedule"),
        &[("constant", "constant"), ("linear", "linear"), ("cosine", "cosine")],
    ),
    same("weight-decay", Train("weight-decay")),
    same("clip-grad", Train("clip")),
    same("seed", Train("seed")),
    same("save-interval", Train("save-every")),
    same("num-layers", Model("layers")),
    same("hidden-size", Model("d_model")),
    same("num-attention-heads", Model("heads")),
    same("num-query-groups", Model("kv_heads")),
    same("kv-channels", Model("head_dim")),
    same("ffn-hidden-size", Model("ffn")),
    same("vocab-size", Model("vocab")),
    same("padded-vocab-size", Model("vocab")),
    same("norm-epsilon", Model("norm_eps")),
    same("rotary-base", Model("rope_theta")),
    of("normalization", Model("norm"), &[("RMSNorm", "rms"), ("LayerNorm", "layer")]),
    of("squared-relu", Model("activation"), &[("true", "squared-relu")]),
    same("num-experts", Model("experts")),
    same("moe-router-topk", Model("topk")),
    of(
        "moe-router-score-function",
        Model("router"),
        &[("softmax", "softmax"), ("sigmoid", "sigmoid")],
    ),
    same("moe-router-topk-scaling-factor", Model("route_scale")),
    same("moe-router-num-groups", Model("groups")),
    same("moe-router-group-topk", Model("group_topk")),
    same("moe-aux-loss-coeff", Model("balance")),
    same("moe-expert-capacity-factor", Model("capacity")),
    same("q-lora-rank", Model("q_lora")),
    same("kv-lora-rank", Model("kv_lora")),
    same("qk-pos-emb-head-dim", Model("qk_rope")),
    same("v-head-dim", Model("v_dim")),
    same("mtp-num-layers", Model("mtp_depth")),
    same("mtp-loss-scaling-factor", Model("mtp_weight")),
    same("moe-ffn-hidden-size", Noted),
    same("moe-shared-expert-intermediate-size", Noted),
    same("group-query-attention", Noted),
    same("swiglu", Noted),
    same("disable-bias-linear", Noted),
    same("add-qkv-bias", Noted),
    same("qk-layernorm", Noted),
    same("position-embedding-type", Noted),
    same("max-position-embeddings", Noted),
    same("use-rope-scaling", Noted),
    same("rope-scaling-factor", Noted),
    same("rotary-percent", Noted),
    same("untie-embeddings-and-output-weights", Noted),
];

/// Keys of torchtitan's files.
pub(super) const TORCHTITAN: &[Rule] = &[
    same("model.name", Noted),
    same("model.flavor", Noted),
    same("training.local_batch_size", Common("micro-batch")),
    same("training.batch_size", Common("micro-batch")),
    same("training.global_batch_size", Common("global-batch")),
    same("training.seq_len", Common("seq")),
    same("training.steps", Train("iterations")),
    same("training.max_norm", Train("clip")),
    same("training.seed", Train("seed")),
    same("debug.seed", Train("seed")),
    of(
        "training.mixed_precision_param",
        Common("dtype"),
        &[("bfloat16", "bf16"), ("float32", "f32")],
    ),
    of(
        "training.mixed_precision_reduce",
        Common("grad-dtype"),
        &[("bfloat16", "bf16"), ("float32", "f32")],
    ),
    of("training.compile", Off, &[("false", "false")]),
    of("optimizer.name", Common("optimizer"), &[("AdamW", "adamw"), ("Adam", "adamw")]),
    same("optimizer.lr", Train("lr")),
    same("optimizer.weight_decay", Train("weight-decay")),
    same("lr_scheduler.warmup_steps", Train("warmup")),
    of(
        "lr_scheduler.decay_type",
        Train("lr-schedule"),
        &[("linear", "linear"), ("cosine", "cosine")],
    ),
    same("parallelism.data_parallel_replicate_degree", Noted),
    same("parallelism.data_parallel_shard_degree", Noted),
    same("parallelism.tensor_parallel_degree", Common("tp")),
    same("parallelism.pipeline_parallel_degree", Common("pp")),
    same("parallelism.context_parallel_degree", Common("cp")),
    same("parallelism.expert_parallel_degree", Common("ep")),
    same("parallelism.expert_tensor_parallel_degree", Common("etp")),
    of(
        "parallelism.pipeline_parallel_schedule",
        Common("schedule"),
        &[
            ("1F1B", "1f1b"),
            ("GPipe", "gpipe"),
            ("DualPipeV", "dualpipev"),
            ("ZBVZeroBubble", "zb-h1:2"),
        ],
    ),
    of(
        "activation_checkpoint.mode",
        Common("recompute"),
        &[("none", "none"), ("selective", "selective"), ("full", "full")],
    ),
    same("checkpoint.interval", Train("save-every")),
];

/// Keys of DeepSpeed's files.
pub(super) const DEEPSPEED: &[Rule] = &[
    same("train_batch_size", Common("global-batch")),
    same("train_micro_batch_size_per_gpu", Common("micro-batch")),
    same("zero_optimization.stage", Common("zero")),
    of(
        "zero_optimization.offload_optimizer.device",
        Noted,
        &[("cpu", "cpu"), ("nvme", "nvme"), ("none", "none")],
    ),
    same("bf16.enabled", Noted),
    same("fp16.enabled", Noted),
    of(
        "communication_data_type",
        Common("grad-dtype"),
        &[("fp32", "f32"), ("bf16", "bf16"), ("bfp16", "bf16")],
    ),
    of(
        "optimizer.type",
        Common("optimizer"),
        &[("AdamW", "adamw"), ("Adam", "adamw"), ("SGD", "sgd"), ("Lamb", "lamb")],
    ),
    same("optimizer.params.lr", Train("lr")),
    same("optimizer.params.weight_decay", Train("weight-decay")),
    same("scheduler.params.warmup_num_steps", Train("warmup")),
    same("gradient_clipping", Train("clip")),
];
