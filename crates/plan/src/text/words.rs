//! Keywords of the plan's enums, with printer and parser side by side.

use super::ParseError;
use super::line::Line;
use crate::collective::Reduction;
use crate::graph::{ActivationKind, GateKind, HeadNormKind, Init, LinearRole, NormKind, OpPass};
use crate::ids::StageRank;
use crate::mesh::{Axis, GroupKind};
use crate::program::{Access, AccumulateMode, ComputePass, LoadKind, MemoryKind, Peer};
use crate::spec::{Layout, Placement};
use std::fmt::Write;

pub(super) type Result<T> = std::result::Result<T, ParseError>;

/// A value written as one keyword.
pub(crate) trait Word: Copy + PartialEq + 'static {
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
words!(NormKind, "norm", {
    Layer => "layer", Rms => "rms", LayerGain => "layer_gain", RmsUnit => "rms_unit",
});
words!(GateKind, "gate", { GeluErf => "geglu_erf", ClampedSwiGlu => "clamped_swiglu" });
words!(HeadNormKind, "norm of heads", {
    Head => "head", HeadUnit => "head_unit", Bare => "bare",
});
words!(ActivationKind, "function", {
    Gelu => "gelu", Relu => "relu", SquaredRelu => "squared_relu", GeluErf => "gelu_erf",
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
            _ => line.error(format!("peer '{word}' is neither next:AXIS nor previous:AXIS")),
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

/// Appends formatted text; writing to a string cannot fail.
pub(super) fn push(out: &mut String, text: std::fmt::Arguments<'_>) {
    let written = out.write_fmt(text);
    debug_assert!(written.is_ok(), "a string takes everything");
}
