//! Keywords of the plan's enums, with printer and parser side by side.

use super::ParseError;
use super::line::Line;
use crate::collective::Reduction;
use crate::compress::{Codec, CompressOp};
use crate::graph::{
    ActivationKind, Heads, Init, LatentHeads, LinearRole, NormKind, OpKind, OpPass, Routing, Window,
};
use crate::ids::StageRank;
use crate::mesh::{Axis, GroupKind};
use crate::outer_optimizer::OuterOp;
use crate::program::{Access, AccumulateMode, ComputePass, LoadKind, MemoryKind, Peer};
use crate::spec::{Layout, Placement};
use std::fmt::Write;

type Result<T> = std::result::Result<T, ParseError>;

/// A value written as one keyword.
pub(super) trait Word: Copy + PartialEq + 'static {
    /// Description of the value, for messages.
    const WHAT: &'static str;
    /// Every value.
    const ALL: &'static [Self];

    /// Keyword of the value.
    fn word(self) -> &'static str;

    /// Parses a keyword.
    fn parse(line: &mut Line<'_>) -> Result<Self> {
        let word = line.word(Self::WHAT)?;
        match Self::ALL.iter().copied().find(|value| value.word() == word) {
            Some(value) => Ok(value),
            None => {
                let known: Vec<&str> = Self::ALL.iter().map(|value| value.word()).collect();
                line.error(format!("{} '{word}' is none of {}", Self::WHAT, known.join(", ")))
            }
        }
    }
}

macro_rules! words {
    ($type:ident, $what:literal, { $($value:ident => $word:literal),+ $(,)? }) => {
        impl Word for $type {
            const WHAT: &'static str = $what;
            const ALL: &'static [Self] = &[$(Self::$value),+];

            fn word(self) -> &'static str {
                match self { $(Self::$value => $word),+ }
            }
        }
    };
}

words!(Axis, "axis", {
    Pp => "pp", Dp => "dp", Cp => "cp", Tp => "tp", Edp => "edp", Ep => "ep", Etp => "etp",
});
words!(Access, "access", {
    Read => "read", Write => "write", Accumulate => "accumulate", Add => "add",
});
words!(AccumulateMode, "mode", { Add => "add", Move => "move" });
words!(OpPass, "part", {
    Forward => "forward", BackwardInput => "input_gradient", BackwardWeight => "weight_gradient",
});
words!(ComputePass, "pass", {
    Forward => "F", Backward => "B", BackwardInput => "I", BackwardWeight => "W", Recompute => "R",
    Update => "U",
});
words!(LinearRole, "matrix", {
    Qkv => "qkv", AttentionOut => "attention_out", Up => "up", Down => "down", Head => "head",
    Router => "router", Latent => "latent", Join => "join",
});
words!(NormKind, "norm", { Layer => "layer", Rms => "rms" });
words!(ActivationKind, "function", {
    Gelu => "gelu", Relu => "relu", SquaredRelu => "squared_relu",
});
words!(MemoryKind, "kind of memory", {
    Parameters => "parameters", Gradients => "gradients", Optimizer => "optimizer",
    Activations => "activations", Communication => "communication",
    Offloaded => "offloaded", Shared => "shared",
});

/// Writes a load's kind: `tokens`, `lookahead2`.
pub(super) fn print_load(what: LoadKind, out: &mut String) {
    match what {
        LoadKind::Tokens => out.push_str("tokens"),
        LoadKind::Features => out.push_str("features"),
        LoadKind::Targets => out.push_str("targets"),
        LoadKind::Lookahead(places) => push(out, format_args!("lookahead{places}")),
    }
}

/// Reads a load's kind.
pub(super) fn parse_load(line: &mut Line<'_>) -> Result<LoadKind> {
    Ok(match line.word("load")? {
        "tokens" => LoadKind::Tokens,
        "features" => LoadKind::Features,
        "targets" => LoadKind::Targets,
        other => match other.strip_prefix("lookahead") {
            Some(places) => LoadKind::Lookahead(line.read("number of places", places)?),
            None => {
                return line.error(format!(
                    "load '{other}' is none of tokens, features, targets, lookahead1"
                ));
            }
        },
    })
}

/// Writes a group: `axis tp`, `served 1`.
pub(super) fn print_group(group: GroupKind, out: &mut String) {
    match group {
        GroupKind::Axis(axis) => push(out, format_args!("axis {axis}")),
        GroupKind::Replicas => out.push_str("replicas"),
        GroupKind::Ends => out.push_str("ends"),
        GroupKind::Served(server) => push(out, format_args!("served {server}")),
        GroupKind::Servers => out.push_str("servers"),
    }
}

/// Reads a group.
pub(super) fn parse_group(line: &mut Line<'_>) -> Result<GroupKind> {
    Ok(match line.word("group")? {
        "axis" => GroupKind::Axis(Axis::parse(line)?),
        "replicas" => GroupKind::Replicas,
        "ends" => GroupKind::Ends,
        "served" => GroupKind::Served(line.value("server")?),
        "servers" => GroupKind::Servers,
        other => {
            return line.error(format!(
                "group '{other}' is none of axis, replicas, ends, served, servers"
            ));
        }
    })
}

/// Writes a peer: `stage1`, `next:cp`.
pub(super) fn print_peer(peer: Peer, out: &mut String) {
    match peer {
        Peer::Stage(stage) => push(out, format_args!("stage{stage}")),
        Peer::Next(axis) => push(out, format_args!("next:{axis}")),
        Peer::Previous(axis) => push(out, format_args!("previous:{axis}")),
        Peer::Server(server) => push(out, format_args!("server{server}")),
        Peer::Replica(rank) => push(out, format_args!("rank{rank}")),
    }
}

/// Reads a peer.
pub(super) fn parse_peer(line: &mut Line<'_>) -> Result<Peer> {
    let word = line.word("peer")?;
    if let Some((direction, axis)) = word.split_once(':') {
        let axis = Axis::ALL.iter().copied().find(|known| known.word() == axis);
        return match (direction, axis) {
            ("next", Some(axis)) => Ok(Peer::Next(axis)),
            ("previous", Some(axis)) => Ok(Peer::Previous(axis)),
            _ => line.error(format!("peer '{word}' is no next:AXIS or previous:AXIS")),
        };
    }
    if let Some(stage) = word.strip_prefix("stage") {
        Ok(Peer::Stage(StageRank(line.read("stage", stage)?)))
    } else if let Some(server) = word.strip_prefix("server") {
        Ok(Peer::Server(line.read("server", server)?))
    } else if let Some(rank) = word.strip_prefix("rank") {
        Ok(Peer::Replica(line.read("rank", rank)?))
    } else {
        line.error(format!(
            "peer '{word}' is none of stageN, serverN, rankN, next:AXIS, previous:AXIS"
        ))
    }
}

/// Reads the [`Display`](std::fmt::Display) form of a [`Placement`].
pub(super) fn parse_placement(line: &mut Line<'_>) -> Result<Placement> {
    let word = line.word("placement")?;
    Ok(match word {
        "R" => Placement::Replicate,
        "P+" => Placement::Partial(Reduction::Sum),
        "P^" => Placement::Partial(Reduction::Max),
        "F" => Placement::FlatShard,
        _ => {
            let Some(shard) = word.strip_prefix('S') else {
                return line
                    .error(format!("placement '{word}' is none of R, S0, S0b, S0z, P+, P^, F"));
            };
            let digits = shard.trim_end_matches(['b', 'z', 'w']);
            let layout = match &shard[digits.len()..] {
                "" => Layout::Contiguous,
                "b" => Layout::Blocks,
                "z" => Layout::Zigzag,
                "w" => Layout::Whole,
                _ => return line.error(format!("placement '{word}' has more than one layout")),
            };
            Placement::Shard { dim: line.read("cut dimension", digits)?, layout }
        }
    })
}

/// Writes initial values: `normal=0.02`.
pub(super) fn print_init(init: Init, out: &mut String) {
    match init {
        Init::Zero => out.push_str("zero"),
        Init::One => out.push_str("one"),
        Init::Normal(deviation) => push(out, format_args!("normal={deviation:?}")),
    }
}

/// Reads initial values.
pub(super) fn parse_init(line: &mut Line<'_>) -> Result<Init> {
    let word = line.word("init")?;
    Ok(match (word, word.strip_prefix("normal=")) {
        ("zero", _) => Init::Zero,
        ("one", _) => Init::One,
        (_, Some(deviation)) => Init::Normal(line.read("standard deviation", deviation)?),
        _ => return line.error(format!("init '{word}' is none of zero, one, normal=DEVIATION")),
    })
}

/// Writes an operator: its keyword, then its attributes.
pub(super) fn print_op_kind(kind: &OpKind, out: &mut String) {
    let plain = match *kind {
        OpKind::Embedding => "embedding",
        OpKind::Position => "position",
        OpKind::Bias => "bias",
        OpKind::SwiGlu => "swiglu",
        OpKind::Add => "add",
        OpKind::RowMax => "row_max",
        OpKind::SoftmaxStats => "softmax_stats",
        OpKind::TensorSquares => "tensor_squares",
        OpKind::Norm2 => "norm2",
        OpKind::Total => "total",
        OpKind::Norm { norm, eps } => {
            return push(out, format_args!("norm {} eps={eps:?}", norm.word()));
        }
        OpKind::Linear { role } => return push(out, format_args!("linear {}", role.word())),
        OpKind::Rope { heads, theta } => {
            out.push_str("rope");
            print_heads(heads, out);
            return push(out, format_args!(" theta={theta:?}"));
        }
        OpKind::Attention { heads, seq } => {
            out.push_str("attention");
            print_heads(heads, out);
            return push(out, format_args!(" seq={seq}"));
        }
        OpKind::KeysValues { heads } => {
            out.push_str("keys_values");
            print_heads(heads, out);
            return;
        }
        OpKind::AttentionBlock { heads, queries, keys, step } => {
            out.push_str("attention_block");
            print_heads(heads, out);
            return push(out, format_args!(" queries={queries} keys={keys} step={step}"));
        }
        OpKind::Activation { function } => {
            return push(out, format_args!("activation {}", function.word()));
        }
        OpKind::CrossEntropy { scale } => {
            return push(out, format_args!("cross_entropy scale={scale:?}"));
        }
        OpKind::EmbeddingBag { tables, lookups, width } => {
            push(out, format_args!("embedding_bag tables={tables} lookups={lookups}"));
            return push(out, format_args!(" width={width}"));
        }
        OpKind::StepRows { tables, lookups, width } => {
            push(out, format_args!("step_rows tables={tables} lookups={lookups}"));
            return push(out, format_args!(" width={width}"));
        }
        OpKind::Interact { tables, width, parts } => {
            let sizes = format_args!("interact tables={tables} width={width} parts={parts}");
            return push(out, sizes);
        }
        OpKind::BinaryCrossEntropy { scale } => {
            return push(out, format_args!("binary_cross_entropy scale={scale:?}"));
        }
        OpKind::Conv { window } => {
            out.push_str("conv");
            return print_window(window, out);
        }
        OpKind::BatchSums { channels } => {
            return push(out, format_args!("batch_sums channels={channels}"));
        }
        OpKind::BatchNorm { channels, eps, pixels, over, share } => {
            push(out, format_args!("batch_norm channels={channels} eps={eps:?} pixels={pixels}"));
            return push(out, format_args!(" over={over} share={share:?}"));
        }
        OpKind::MaxPool { window } => {
            out.push_str("max_pool");
            return print_window(window, out);
        }
        OpKind::AveragePool { channels } => {
            return push(out, format_args!("average_pool channels={channels}"));
        }
        OpKind::Route(routing) => return print_routing(&routing, out),
        OpKind::Dispatch { experts, topk, regions } => {
            let text = format_args!("dispatch experts={experts} topk={topk} regions={regions}");
            return push(out, text);
        }
        OpKind::ExpertLinear { role, experts, regions, rows } => {
            push(out, format_args!("expert_linear {} experts={experts}", role.word()));
            return push(out, format_args!(" regions={regions} rows={rows}"));
        }
        OpKind::Combine { topk } => return push(out, format_args!("combine topk={topk}")),
        OpKind::HeadNorm { heads, eps } => {
            out.push_str("head_norm");
            print_heads(heads, out);
            return push(out, format_args!(" eps={eps:?}"));
        }
        OpKind::LatentHeads(heads) => return print_latent("latent_heads", heads, out),
        OpKind::LatentValues(heads) => return print_latent("latent_values", heads, out),
        OpKind::BlockSquares { parts, experts } => {
            let of = if experts { " experts" } else { "" };
            return push(out, format_args!("block_squares parts={parts}{of}"));
        }
        OpKind::Compress(op) => return print_compress_op(op, out),
        OpKind::Outer(OuterOp::PseudoGradient) => "pseudo_gradient",
        OpKind::Outer(OuterOp::Step { replicas, rate, momentum }) => {
            let rule =
                format_args!("outer_step replicas={replicas} rate={rate:?} momentum={momentum:?}");
            return push(out, rule);
        }
    };
    out.push_str(plain);
}

/// Reads an operator.
pub(super) fn parse_op_kind(line: &mut Line<'_>) -> Result<OpKind> {
    Ok(match line.word("operator")? {
        "embedding" => OpKind::Embedding,
        "position" => OpKind::Position,
        "bias" => OpKind::Bias,
        "swiglu" => OpKind::SwiGlu,
        "add" => OpKind::Add,
        "row_max" => OpKind::RowMax,
        "softmax_stats" => OpKind::SoftmaxStats,
        "tensor_squares" => OpKind::TensorSquares,
        "norm2" => OpKind::Norm2,
        "total" => OpKind::Total,
        "norm" => OpKind::Norm { norm: NormKind::parse(line)?, eps: line.id("eps=", "eps")? },
        "linear" => OpKind::Linear { role: LinearRole::parse(line)? },
        "rope" => OpKind::Rope { heads: parse_heads(line)?, theta: line.id("theta=", "theta")? },
        "attention" => {
            OpKind::Attention { heads: parse_heads(line)?, seq: line.id("seq=", "seq")? }
        }
        "attention_block" => OpKind::AttentionBlock {
            heads: parse_heads(line)?,
            queries: line.id("queries=", "queries")?,
            keys: line.id("keys=", "keys")?,
            step: line.id("step=", "step")?,
        },
        "keys_values" => OpKind::KeysValues { heads: parse_heads(line)? },
        "activation" => OpKind::Activation { function: ActivationKind::parse(line)? },
        "cross_entropy" => OpKind::CrossEntropy { scale: line.id("scale=", "scale")? },
        "embedding_bag" => OpKind::EmbeddingBag {
            tables: line.id("tables=", "tables")?,
            lookups: line.id("lookups=", "lookups")?,
            width: line.id("width=", "width")?,
        },
        "step_rows" => OpKind::StepRows {
            tables: line.id("tables=", "tables")?,
            lookups: line.id("lookups=", "lookups")?,
            width: line.id("width=", "width")?,
        },
        "interact" => OpKind::Interact {
            tables: line.id("tables=", "tables")?,
            width: line.id("width=", "width")?,
            parts: line.id("parts=", "parts")?,
        },
        "binary_cross_entropy" => OpKind::BinaryCrossEntropy { scale: line.id("scale=", "scale")? },
        "conv" => OpKind::Conv { window: parse_window(line)? },
        "batch_sums" => OpKind::BatchSums { channels: line.id("channels=", "channels")? },
        "batch_norm" => OpKind::BatchNorm {
            channels: line.id("channels=", "channels")?,
            eps: line.id("eps=", "eps")?,
            pixels: line.id("pixels=", "pixels")?,
            over: line.id("over=", "over")?,
            share: line.id("share=", "share")?,
        },
        "max_pool" => OpKind::MaxPool { window: parse_window(line)? },
        "average_pool" => OpKind::AveragePool { channels: line.id("channels=", "channels")? },
        "route" => OpKind::Route(parse_routing(line)?),
        "dispatch" => OpKind::Dispatch {
            experts: line.id("experts=", "experts")?,
            topk: line.id("topk=", "topk")?,
            regions: line.id("regions=", "regions")?,
        },
        "expert_linear" => OpKind::ExpertLinear {
            role: LinearRole::parse(line)?,
            experts: line.id("experts=", "experts")?,
            regions: line.id("regions=", "regions")?,
            rows: line.id("rows=", "rows")?,
        },
        "combine" => OpKind::Combine { topk: line.id("topk=", "topk")? },
        "pseudo_gradient" => OpKind::Outer(OuterOp::PseudoGradient),
        "outer_step" => OpKind::Outer(OuterOp::Step {
            replicas: line.id("replicas=", "replicas")?,
            rate: line.id("rate=", "rate")?,
            momentum: line.id("momentum=", "momentum")?,
        }),
        "compress" => OpKind::Compress(parse_compress_op(line)?),
        "head_norm" => OpKind::HeadNorm { heads: parse_heads(line)?, eps: line.id("eps=", "eps")? },
        "latent_heads" => OpKind::LatentHeads(parse_latent(line)?),
        "latent_values" => OpKind::LatentValues(parse_latent(line)?),
        "block_squares" => OpKind::BlockSquares {
            parts: line.id("parts=", "parts")?,
            experts: line.eat("experts"),
        },
        other => return line.error(format!("there is no operator '{other}'")),
    })
}

fn print_routing(routing: &Routing, out: &mut String) {
    let Routing { experts, topk, sigmoid, scale, seq, capacity, balance, .. } = *routing;
    let Routing { groups, kept_groups, parts, .. } = *routing;
    let scores = if sigmoid { "sigmoid" } else { "softmax" };
    push(out, format_args!("route {scores} experts={experts} topk={topk} scale={scale:?}"));
    push(out, format_args!(" seq={seq} balance={balance:?}"));
    if let Some(capacity) = capacity {
        push(out, format_args!(" capacity={capacity}"));
    }
    if (groups, kept_groups) != (1, 1) {
        push(out, format_args!(" groups={groups} kept={kept_groups}"));
    }
    if parts != 1 {
        push(out, format_args!(" parts={parts}"));
    }
}

fn parse_routing(line: &mut Line<'_>) -> Result<Routing> {
    let sigmoid = match line.word("scores")? {
        "sigmoid" => true,
        "softmax" => false,
        other => return line.error(format!("scores '{other}' is none of softmax, sigmoid")),
    };
    let mut routing = Routing {
        experts: line.id("experts=", "experts")?,
        topk: line.id("topk=", "topk")?,
        sigmoid,
        scale: line.id("scale=", "scale")?,
        seq: line.id("seq=", "seq")?,
        balance: line.id("balance=", "balance")?,
        capacity: None,
        groups: 1,
        kept_groups: 1,
        parts: 1,
    };
    if line.peek().starts_with("capacity=") {
        routing.capacity = Some(line.id("capacity=", "capacity")?);
    }
    if line.peek().starts_with("groups=") {
        routing.groups = line.id("groups=", "groups")?;
        routing.kept_groups = line.id("kept=", "kept groups")?;
    }
    if line.peek().starts_with("parts=") {
        routing.parts = line.id("parts=", "parts")?;
    }
    Ok(routing)
}

fn print_latent(word: &str, heads: LatentHeads, out: &mut String) {
    let LatentHeads { heads, head_dim, rope, v_dim, theta } = heads;
    push(out, format_args!("{word} heads={heads} head_dim={head_dim} rope={rope}"));
    push(out, format_args!(" v_dim={v_dim} theta={theta:?}"));
}

fn parse_latent(line: &mut Line<'_>) -> Result<LatentHeads> {
    Ok(LatentHeads {
        heads: line.id("heads=", "heads")?,
        head_dim: line.id("head_dim=", "head_dim")?,
        rope: line.id("rope=", "rope")?,
        v_dim: line.id("v_dim=", "v_dim")?,
        theta: line.id("theta=", "theta")?,
    })
}

fn print_compress_op(op: CompressOp, out: &mut String) {
    match op {
        CompressOp::Encode { codec } => {
            push(out, format_args!("compress encode {}", codec.word()));
        }
        CompressOp::SelectTopK { fraction, bucket } => {
            push(out, format_args!("compress select_topk fraction={fraction:?} bucket={bucket}"));
        }
        CompressOp::Merge { codec, terms } => {
            push(out, format_args!("compress merge {} terms={terms}", codec.word()));
        }
        CompressOp::Decode { codec, terms } => {
            push(out, format_args!("compress decode {} terms={terms}", codec.word()));
        }
        CompressOp::InitRight { rank, bucket } => {
            push(out, format_args!("compress init_right rank={rank} bucket={bucket}"));
        }
        CompressOp::Left { rank, bucket } => {
            push(out, format_args!("compress left rank={rank} bucket={bucket}"));
        }
        CompressOp::Right { rank, bucket } => {
            push(out, format_args!("compress right rank={rank} bucket={bucket}"));
        }
        CompressOp::Product { rank, bucket } => {
            push(out, format_args!("compress product rank={rank} bucket={bucket}"));
        }
    }
}

fn parse_compress_op(line: &mut Line<'_>) -> Result<CompressOp> {
    let step = line.word("step of a compression")?;
    let factors = |line: &mut Line<'_>| -> Result<(u32, u32)> {
        Ok((line.id("rank=", "rank")?, line.id("bucket=", "bucket")?))
    };
    Ok(match step {
        "encode" => CompressOp::Encode { codec: parse_codec(line)? },
        "select_topk" => CompressOp::SelectTopK {
            fraction: line.id("fraction=", "fraction")?,
            bucket: line.id("bucket=", "bucket")?,
        },
        "merge" => {
            CompressOp::Merge { codec: parse_codec(line)?, terms: line.id("terms=", "terms")? }
        }
        "decode" => {
            CompressOp::Decode { codec: parse_codec(line)?, terms: line.id("terms=", "terms")? }
        }
        "init_right" => {
            factors(line).map(|(rank, bucket)| CompressOp::InitRight { rank, bucket })?
        }
        "left" => factors(line).map(|(rank, bucket)| CompressOp::Left { rank, bucket })?,
        "right" => factors(line).map(|(rank, bucket)| CompressOp::Right { rank, bucket })?,
        "product" => factors(line).map(|(rank, bucket)| CompressOp::Product { rank, bucket })?,
        other => return line.error(format!("there is no step '{other}' of a compression")),
    })
}

fn parse_codec(line: &mut Line<'_>) -> Result<Codec> {
    let word = line.word("codec")?;
    match Codec::ALL.into_iter().find(|codec| codec.word() == word) {
        Some(codec) => Ok(codec),
        None => line.error(format!("there is no codec '{word}'")),
    }
}

fn print_heads(heads: Heads, out: &mut String) {
    let Heads { heads, kv_heads, head_dim } = heads;
    push(out, format_args!(" heads={heads} kv_heads={kv_heads} head_dim={head_dim}"));
}

fn parse_heads(line: &mut Line<'_>) -> Result<Heads> {
    Ok(Heads {
        heads: line.id("heads=", "heads")?,
        kv_heads: line.id("kv_heads=", "kv_heads")?,
        head_dim: line.id("head_dim=", "head_dim")?,
    })
}

fn print_window(window: Window, out: &mut String) {
    let Window { side, channels, kernel, stride, padding } = window;
    let sizes = format_args!(
        " side={side} channels={channels} kernel={kernel} stride={stride} padding={padding}"
    );
    push(out, sizes);
}

fn parse_window(line: &mut Line<'_>) -> Result<Window> {
    Ok(Window {
        side: line.id("side=", "side")?,
        channels: line.id("channels=", "channels")?,
        kernel: line.id("kernel=", "kernel")?,
        stride: line.id("stride=", "stride")?,
        padding: line.id("padding=", "padding")?,
    })
}

/// Appends formatted text; writing to a string cannot fail.
pub(super) fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let written = out.write_fmt(text);
    debug_assert!(written.is_ok(), "a string takes everything");
}
