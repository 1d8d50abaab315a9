//! Text form of operators' fields: ` eps=1e-5`, ` heads=8 kv_heads=8 head_dim=64`.

use super::line::Line;
use super::words::{Result, Word, push};
use crate::compress::{Codec, CompressOp};
use crate::graph::{
    ActivationKind, GateKind, HeadNormKind, Heads, LatentHeads, LinearRole, Mask, NormKind, Rotary,
    Routing, Scaling, Scores, Window,
};
use crate::outer_optimizer::OuterOp;

/// A field of an operator, or all of its fields in one struct.
pub(crate) trait Attribute: Copy {
    /// Word with which an operator begins that has these fields; `word` unless it has several.
    fn keyword(&self, word: &'static str) -> &'static str {
        word
    }

    /// Writes it after a space. `key` is the field's name.
    fn print(&self, key: &str, out: &mut String);

    /// Reads it. `key` is the field's name, or the operator's word if this is all of its fields.
    fn parse(key: &str, line: &mut Line<'_>) -> Result<Self>;

    /// The field of an operator on one of `tp` equal shares of its heads.
    fn cut(self, _tp: u64) -> Self {
        self
    }
}

macro_rules! numbers {
    ($($type:ty)+) => { $(
        impl Attribute for $type {
            fn print(&self, key: &str, out: &mut String) {
                push(out, format_args!(" {key}={self:?}"));
            }

            fn parse(key: &str, line: &mut Line<'_>) -> Result<Self> {
                line.assigned(key, key)
            }
        }
    )+ };
}

numbers!(u32 u64 f64);

macro_rules! keywords {
    ($($type:ty)+) => { $(
        impl Attribute for $type {
            fn print(&self, _key: &str, out: &mut String) {
                push(out, format_args!(" {}", self.word()));
            }

            fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
                Word::parse(line)
            }
        }
    )+ };
}

keywords!(LinearRole NormKind ActivationKind GateKind);

/// Structs whose fields are written one after the other; the fields in brackets count heads.
macro_rules! structs {
    ($($type:ident [$($heads:ident)*] { $($field:ident)+ })+) => { $(
        impl Attribute for $type {
            fn print(&self, _key: &str, out: &mut String) {
                $(self.$field.print(stringify!($field), out);)+
            }

            fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
                Ok(Self { $($field: Attribute::parse(stringify!($field), line)?),+ })
            }

            fn cut(self, _tp: u64) -> Self {
                Self { $($heads: self.$heads / _tp,)* ..self }
            }
        }
    )+ };
}

structs! {
    Heads [heads kv_heads] { heads kv_heads head_dim }
    LatentHeads [heads] { heads head_dim rope v_dim theta rotary }
    Window [] { side channels kernel stride padding }
}

impl Attribute for bool {
    fn print(&self, key: &str, out: &mut String) {
        if *self {
            push(out, format_args!(" {key}"));
        }
    }

    fn parse(key: &str, line: &mut Line<'_>) -> Result<Self> {
        Ok(line.eat(key))
    }
}

/// A number after `key=`, if the next word is one.
fn given<T: std::str::FromStr>(key: &str, line: &mut Line<'_>) -> Result<Option<T>> {
    match line.peek().strip_prefix(key).is_some_and(|rest| rest.starts_with('=')) {
        true => Ok(Some(line.assigned(key, key)?)),
        false => Ok(None),
    }
}

impl Attribute for HeadNormKind {
    fn print(&self, _key: &str, out: &mut String) {
        if *self != Self::default() {
            push(out, format_args!(" {}", self.word()));
        }
    }

    fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
        let word = line.peek();
        let named = Self::ALL.iter().find(|norm| **norm != Self::default() && norm.word() == word);
        Ok(match named {
            Some(_) => Word::parse(line)?,
            None => Self::default(),
        })
    }
}

impl Attribute for Scores {
    fn print(&self, _key: &str, out: &mut String) {
        let Self { mask, scale, softcap, alibi, alibi_scale, sinks } = *self;
        match mask {
            Mask::Causal => {}
            Mask::Window(window) => push(out, format_args!(" window={window}")),
            Mask::Chunk(chunk) => push(out, format_args!(" chunk={chunk}")),
            Mask::Full => out.push_str(" full"),
        }
        for (key, value) in [("scale", scale), ("softcap", softcap)] {
            if value != 0.0 {
                push(out, format_args!(" {key}={value:?}"));
            }
        }
        if alibi != 0 {
            push(out, format_args!(" alibi={alibi}"));
        }
        if alibi_scale != 0.0 {
            push(out, format_args!(" alibi_scale={alibi_scale:?}"));
        }
        sinks.print("sinks", out);
    }

    fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
        let mask = if let Some(window) = given("window", line)? {
            Mask::Window(window)
        } else if let Some(chunk) = given("chunk", line)? {
            Mask::Chunk(chunk)
        } else if line.eat("full") {
            Mask::Full
        } else {
            Mask::Causal
        };
        Ok(Self {
            mask,
            scale: given("scale", line)?.unwrap_or(0.0),
            softcap: given("softcap", line)?.unwrap_or(0.0),
            alibi: given("alibi", line)?.unwrap_or(0),
            alibi_scale: given("alibi_scale", line)?.unwrap_or(0.0),
            sinks: line.eat("sinks"),
        })
    }
}

impl Attribute for Rotary {
    fn print(&self, _key: &str, out: &mut String) {
        let Self { dims, scaling, magnitude } = *self;
        if dims != 0 {
            push(out, format_args!(" dims={dims}"));
        }
        match scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => push(out, format_args!(" linear={factor:?}")),
            Scaling::Llama3 { factor, low, high, original } => {
                push(out, format_args!(" llama3={factor:?} low={low:?} high={high:?}"));
                push(out, format_args!(" original={original}"));
            }
            Scaling::Yarn { factor, fast, slow, original, exact } => {
                push(out, format_args!(" yarn={factor:?} fast={fast:?} slow={slow:?}"));
                push(out, format_args!(" original={original}"));
                exact.print("exact", out);
            }
            Scaling::Each(factors) => push(out, format_args!(" factors={factors:?}")),
        }
        if magnitude != 1.0 {
            push(out, format_args!(" magnitude={magnitude:?}"));
        }
    }

    fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
        let dims = given("dims", line)?.unwrap_or(0);
        let scaling = if let Some(factor) = given("linear", line)? {
            Scaling::Linear { factor }
        } else if let Some(factor) = given("llama3", line)? {
            Scaling::Llama3 {
                factor,
                low: line.assigned("low", "low")?,
                high: line.assigned("high", "high")?,
                original: line.assigned("original", "original")?,
            }
        } else if let Some(factor) = given("yarn", line)? {
            Scaling::Yarn {
                factor,
                fast: line.assigned("fast", "fast")?,
                slow: line.assigned("slow", "slow")?,
                original: line.assigned("original", "original")?,
                exact: line.eat("exact"),
            }
        } else if let Some(factors) = given("factors", line)? {
            Scaling::Each(factors)
        } else {
            Scaling::None
        };
        let magnitude = given("magnitude", line)?.unwrap_or(1.0);
        Ok(Self { dims, scaling, magnitude })
    }
}

impl Attribute for Routing {
    fn print(&self, _key: &str, out: &mut String) {
        let Self { experts, topk, sigmoid, scale, seq, capacity, balance, .. } = *self;
        let Self { groups, kept_groups, parts, .. } = *self;
        let scores = if sigmoid { "sigmoid" } else { "softmax" };
        push(out, format_args!(" {scores} experts={experts} topk={topk} scale={scale:?}"));
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
        self.raw.print("raw", out);
        self.best_of_group.print("best_of_group", out);
    }

    fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
        let sigmoid = match line.word("scores")? {
            "sigmoid" => true,
            "softmax" => false,
            other => return line.error(format!("scores '{other}' is none of softmax, sigmoid")),
        };
        let mut routing = Self {
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
            raw: false,
            best_of_group: false,
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
        routing.raw = line.eat("raw");
        routing.best_of_group = line.eat("best_of_group");
        Ok(routing)
    }
}

impl Attribute for Codec {
    fn print(&self, _key: &str, out: &mut String) {
        push(out, format_args!(" {}", self.word()));
    }

    fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
        let word = line.word("codec")?;
        match Self::ALL.into_iter().find(|codec| codec.word() == word) {
            Some(codec) => Ok(codec),
            None => line.error(format!("there is no codec '{word}'")),
        }
    }
}

/// Writes and reads the variants of an enum: a word, then its fields.
macro_rules! variants {
    ($type:ident, $unknown:literal, { $($variant:ident = $word:literal { $($field:ident)+ })+ }) => {
        impl Attribute for $type {
            fn print(&self, _key: &str, out: &mut String) {
                match self {
                    $(Self::$variant { $($field),+ } => {
                        out.push_str(concat!(" ", $word));
                        $($field.print(stringify!($field), out);)+
                    })+
                }
            }

            fn parse(_key: &str, line: &mut Line<'_>) -> Result<Self> {
                Ok(match line.word("step of a compression")? {
                    $($word => Self::$variant {
                        $($field: Attribute::parse(stringify!($field), line)?),+
                    },)+
                    other => return line.error(format!($unknown, other)),
                })
            }
        }
    };
}

variants!(CompressOp, "there is no step '{}' of a compression", {
    Encode = "encode" { codec }
    SelectTopK = "select_topk" { fraction bucket }
    Merge = "merge" { codec terms }
    Decode = "decode" { codec terms }
    InitRight = "init_right" { rank bucket }
    Left = "left" { rank bucket }
    Right = "right" { rank bucket }
    Product = "product" { rank bucket }
});

impl Attribute for OuterOp {
    fn keyword(&self, _word: &'static str) -> &'static str {
        self.name()
    }

    fn print(&self, _key: &str, out: &mut String) {
        if let Self::Step { replicas, rate, momentum } = self {
            push(out, format_args!(" replicas={replicas} rate={rate:?} momentum={momentum:?}"));
        }
    }

    fn parse(key: &str, line: &mut Line<'_>) -> Result<Self> {
        if key == Self::PseudoGradient.name() {
            return Ok(Self::PseudoGradient);
        }
        Ok(Self::Step {
            replicas: line.id("replicas=", "replicas")?,
            rate: line.id("rate=", "rate")?,
            momentum: line.id("momentum=", "momentum")?,
        })
    }
}
