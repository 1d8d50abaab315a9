//! Text form of operators' fields: ` eps=1e-5`, ` heads=8 kv_heads=8 head_dim=64`.

use super::line::Line;
use super::words::{Result, Word, push};
use crate::compress::{Codec, CompressOp};
use crate::graph::{ActivationKind, Heads, LatentHeads, LinearRole, NormKind, Routing, Window};
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

keywords!(LinearRole NormKind ActivationKind);

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
    LatentHeads [heads] { heads head_dim rope v_dim theta }
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
