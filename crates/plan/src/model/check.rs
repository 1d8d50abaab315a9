//! Rules that all model dimensions must satisfy, whatever their source.

use super::QueryKeyNorm;
use super::decoder::{Decoder, Position};
use super::field::{Field, Words};
use super::{Body, Experts, Latent, ModelDims, ModelKind, Router};
use crate::graph::HeadNormKind;
use std::collections::BTreeSet;

/// Maximum number of parameters of a model. At 16 bytes each, the maximum for training state, the
/// sum still fits 64 bits with a margin, so that no later arithmetic on bytes can overflow.
pub const MAX_PARAMETERS: u64 = 1 << 56;

/// A violated rule, and the field to change.
pub(super) struct Violation {
    pub(super) field: Field,
    pub(super) problem: String,
    pub(super) remedy: String,
}

/// Returns all violations at once, in the names of the dialect.
///
/// `wrong` holds the fields with known invalid values, such as a text where a number belongs. Rules
/// over them are skipped, because their messages would only confuse. Fields found out of range are
/// added to them.
pub(super) fn violations(
    shape: &ModelDims,
    body: &Body,
    words: &Words,
    wrong: &mut BTreeSet<Field>,
) -> Vec<Violation> {
    let mut check = Check { shape, dialect: words, wrong, found: Vec::new() };
    check.sizes();
    check.reals();
    check.attention();
    check.positions();
    check.activation();
    check.experts();
    check.latent();
    check.mtp();
    if let Body::Decoder { decoder } = body {
        check.decoder(decoder);
    }
    if check.found.is_empty() {
        check.total(body);
    }
    check.found
}

struct Check<'a> {
    shape: &'a ModelDims,
    dialect: &'a Words,
    wrong: &'a mut BTreeSet<Field>,
    found: Vec<Violation>,
}

impl Check<'_> {
    /// Attributes a problem to the first field, if a rule over valid fields finds one.
    fn rule(
        &mut self,
        over: &[Field],
        problem: impl FnOnce(&ModelDims) -> Option<(String, String)>,
    ) {
        if over.iter().any(|field| self.wrong.contains(field)) {
            return;
        }
        if let Some((problem, remedy)) = problem(self.shape) {
            self.found.push(Violation { field: over[0], problem, remedy });
        }
    }

    fn sizes(&mut self) {
        let kind = self.shape.kind;
        for (field, size) in sizes(self.shape) {
            let word = self.dialect.word(field);
            self.rule(&[field], |_| match field.applies_to(kind) {
                true if size == 0 && field.may_lack(kind) => None,
                true if !in_range(field, size) => {
                    Some((format!("`{word}` is {size}"), whole_number_remedy(field)))
                }
                false if size != 0 => Some(not_for(word, kind)),
                _ => None,
            });
        }
        self.distrust_what_was_found();
    }

    fn reals(&mut self) {
        let kind = self.shape.kind;
        for (field, value, sound, remedy) in [
            (
                Field::NormEps,
                self.shape.norm_eps,
                // NaN is in no range.
                f64::MIN_POSITIVE..0.1,
                "use a small positive number such as 1e-5",
            ),
            (
                Field::RopeTheta,
                self.shape.rope_theta,
                1.0..1e15,
                "use a number such as 10000.0 or 500000.0",
            ),
            (
                Field::RouteScale,
                self.shape.experts.route_scale,
                1e-6..1e6,
                "use 1.0, or the factor of the model's weights",
            ),
            (
                Field::Capacity,
                self.shape.experts.capacity,
                0.0..1e9,
                "use a factor such as 1.25, or 0.0 for no bound",
            ),
            (
                Field::MtpWeight,
                self.shape.mtp.weight,
                0.0..1e6,
                "use a share of the next token's loss such as 0.3",
            ),
            (
                Field::Balance,
                self.shape.experts.balance,
                0.0..1e6,
                "use a small number such as 0.01, or 0.0",
            ),
        ] {
            let word = self.dialect.word(field);
            self.rule(&[field], |_| match field.applies_to(kind) {
                true if value == 0.0 && field.may_lack(kind) => None,
                true if !sound.contains(&value) => {
                    Some((format!("`{word}` is {value:?}"), remedy.to_owned()))
                }
                false if value != 0.0 => Some(not_for(word, kind)),
                _ => None,
            });
        }
        self.distrust_what_was_found();
    }

    fn attention(&mut self) {
        if !self.shape.kind.has_attention() {
            return;
        }
        let heads_word = self.dialect.word(Field::Heads);
        let kv_word = self.dialect.word(Field::KvHeads);
        self.rule(&[Field::KvHeads, Field::Heads], |shape| {
            let ModelDims { heads, kv_heads, .. } = *shape;
            (!heads.is_multiple_of(kv_heads)).then(|| {
                (
                    format!(
                        "`{kv_word}` is {kv_heads}, which does not divide `{heads_word}` = {heads}"
                    ),
                    format!("use {}", divisors_near(heads, kv_heads)),
                )
            })
        });
        let head_dim_word = self.dialect.word(Field::HeadDim);
        self.rule(&[Field::HeadDim, Field::Heads, Field::DModel], |shape| {
            let odd = shape.kind.is_rotary()
                && shape.rope_theta > 0.0
                && !shape.head_dim.is_multiple_of(2);
            odd.then(|| {
                (
                    format!(
                        "`{head_dim_word}` is {}, and rotary positions turn pairs of numbers",
                        shape.head_dim
                    ),
                    format!("use an even `{head_dim_word}`, or fewer or more `{heads_word}`"),
                )
            })
        });
    }

    fn positions(&mut self) {
        if !Field::Positions.applies_to(self.shape.kind)
            || (self.shape.max_positions == 0 && self.shape.kind == ModelKind::Decoder)
        {
            return;
        }
        let seq_word = self.dialect.word(Field::Seq);
        self.rule(&[Field::Seq, Field::Positions], |shape| {
            let ModelDims { seq, max_positions, .. } = *shape;
            (seq > max_positions).then(|| {
                (
                    format!("`{seq_word}` is {seq}, beyond the table of learned positions"),
                    format!("use at most {max_positions}, or raise `positions` in the model file"),
                )
            })
        });
    }

    fn activation(&mut self) {
        let word = self.dialect.word(Field::Activation);
        self.rule(&[Field::Activation], |shape| {
            let known = shape.kind.activations();
            (!known.contains(&shape.activation)).then(|| {
                let names: Vec<_> = known.iter().map(|a| format!("\"{a}\"")).collect();
                (
                    format!(
                        "`{word}` is \"{}\", which kind \"{}\" does not have",
                        shape.activation, shape.kind
                    ),
                    format!("use {}", names.join(" or ")),
                )
            })
        });
    }

    fn experts(&mut self) {
        let kind = self.shape.kind;
        if kind != ModelKind::Moe && kind != ModelKind::Decoder {
            self.rule(&[Field::QkNorm], |shape| {
                shape.qk_norm.then(|| not_for(Field::QkNorm.word(), kind))
            });
            return;
        }
        self.rule(&[Field::Topk, Field::Experts], |shape| {
            let Experts { experts, topk, .. } = shape.experts;
            (topk > experts).then(|| {
                (
                    format!("`topk` is {topk}, and there are {experts} `experts` to choose from"),
                    format!("use at most {experts}"),
                )
            })
        });
        if self.shape.experts.is_none() {
            return;
        }
        self.rule(&[Field::DenseLayers, Field::Layers], |shape| {
            let (dense, layers) = (shape.experts.dense_layers, shape.layers);
            (dense >= layers).then(|| {
                (
                    format!("`dense_layers` is {dense}, which leaves none of {layers} to experts"),
                    format!("use at most {}, or kind \"llama\"", layers - 1),
                )
            })
        });
        if kind == ModelKind::Decoder {
            return self.groups();
        }
        self.rule(&[Field::DenseFfn, Field::DenseLayers], |shape| {
            let (ffn, layers) = (shape.experts.dense_ffn, shape.experts.dense_layers);
            ((ffn == 0) != (layers == 0)).then(|| {
                (
                    format!("`dense_ffn` is {ffn} for {layers} `dense_layers`"),
                    "give both, or leave both out".to_owned(),
                )
            })
        });
        self.groups();
    }

    fn groups(&mut self) {
        let [groups, group_topk] = [Field::Groups, Field::GroupTopk].map(|f| self.dialect.word(f));
        self.rule(&[Field::GroupTopk, Field::Groups, Field::Experts, Field::Topk], |shape| {
            let Experts { experts, topk, groups: all, group_topk: some, router, .. } =
                shape.experts;
            if all == 0 && some == 0 {
                return None;
            }
            let given =
                format!("`{group_topk}` is {some} of {all} `{groups}` of {experts} experts");
            let remedy = if all == 0 || some == 0 {
                "give both, or leave both out".to_owned()
            } else if router != Router::Sigmoid && shape.kind == ModelKind::Moe {
                "use router \"sigmoid\", whose scores of a group add up".to_owned()
            } else if !experts.is_multiple_of(all) || experts / all < 2 {
                format!(
                    "use a number of groups of two or more experts each; these divide: {}",
                    divisors_near(experts, all)
                )
            } else if some > all || some.saturating_mul(experts / all) < topk {
                let least = topk.div_ceil(experts / all);
                format!("use {least} to {all}, so that {topk} can be chosen")
            } else {
                return None;
            };
            Some((given, remedy))
        });
    }

    fn latent(&mut self) {
        if self.shape.latent.is_none() {
            return;
        }
        let all = [Field::KvLora, Field::QLora, Field::QkRope, Field::VDim, Field::HeadDim];
        self.rule(&all, |shape| {
            let Latent { q_lora, kv_lora, qk_rope, v_dim } = shape.latent;
            let q_lora = if shape.kind == ModelKind::Decoder { 1 } else { q_lora };
            ([q_lora, kv_lora, qk_rope, v_dim].contains(&0)).then(|| {
                (
                    "latent attention needs `q_lora`, `kv_lora`, `qk_rope` and `v_dim`".to_owned(),
                    "give all four, or leave all out".to_owned(),
                )
            })
        });
        self.rule(&[Field::QkRope, Field::HeadDim], |shape| {
            let (rope, head_dim) = (shape.latent.qk_rope, shape.head_dim);
            (rope > head_dim || !rope.is_multiple_of(2)).then(|| {
                (
                    format!("`qk_rope` is {rope} of a head's {head_dim} numbers"),
                    format!("use an even number, at most {head_dim}"),
                )
            })
        });
        self.rule(&[Field::VDim, Field::HeadDim], |shape| {
            let (v_dim, head_dim) = (shape.latent.v_dim, shape.head_dim);
            (v_dim > head_dim).then(|| {
                (
                    format!("`v_dim` is {v_dim}, beyond the `head_dim` of {head_dim}"),
                    format!("use at most {head_dim}"),
                )
            })
        });
        self.rule(&[Field::KvHeads, Field::Heads], |shape| {
            (shape.kv_heads != shape.heads).then(|| {
                (
                    "`kv_heads` differs from `heads`, and latent attention has keys for every head"
                        .to_owned(),
                    "leave it out".to_owned(),
                )
            })
        });
        self.rule(&[Field::QkNorm], |shape| {
            shape.qk_norm.then(|| {
                (
                    "`qk_norm` does not go with latent attention, whose latent vectors have norms"
                        .to_owned(),
                    "leave it out".to_owned(),
                )
            })
        });
    }

    fn mtp(&mut self) {
        let [depth, weight] = [Field::MtpDepth, Field::MtpWeight].map(|f| self.dialect.word(f));
        self.rule(&[Field::MtpWeight, Field::MtpDepth], |shape| {
            let (modules, share) = (shape.mtp.depth, shape.mtp.weight);
            ((modules == 0) != (share == 0.0)).then(|| {
                (
                    format!("`{weight}` is {share:?} for a `{depth}` of {modules}"),
                    "give both, or leave both out".to_owned(),
                )
            })
        });
    }

    /// Rules about a description of layers.
    fn decoder(&mut self, d: &Decoder) {
        self.rule(&[Field::Positions], |shape| {
            let learned = d.position == Position::Learned;
            (learned != (shape.max_positions > 0)).then(|| {
                (
                    format!(
                        "`positions` is {} for position \"{}\"",
                        shape.max_positions, d.position
                    ),
                    "give a table to position \"learned\" and to no other".to_owned(),
                )
            })
        });
        self.rule(&[Field::RopeTheta], |shape| {
            let rotary = d.position == Position::Rotary;
            (rotary != (shape.rope_theta > 0.0)).then(|| {
                (
                    format!(
                        "`rope_theta` is {:?} for position \"{}\"",
                        shape.rope_theta, d.position
                    ),
                    "give a base to position \"rotary\" and to no other".to_owned(),
                )
            })
        });
        self.rule(&[Field::HeadDim], |shape| {
            let dims = d.rotary.dims;
            (dims > shape.head_dim || !dims.is_multiple_of(2)).then(|| {
                (
                    format!("`rotary_dims` is {dims} of a head's {} elements", shape.head_dim),
                    "use an even number that is not larger".to_owned(),
                )
            })
        });
        let letters = |letters: &str, known: &str| {
            !letters.is_empty() && letters.chars().all(|letter| known.contains(letter))
        };
        for (key, found, known) in
            [("attention_pattern", &d.attention, "fscn"), ("ffn_pattern", &d.ffn, "ed")]
        {
            self.rule(&[Field::Layers], |_| {
                (!letters(found, known)).then(|| {
                    (
                        format!("`{key}` is \"{}\"", found.escape_debug()),
                        format!("use one or more of the letters {known}"),
                    )
                })
            });
        }
        for (letter, key, size) in [('s', "window", d.window), ('c', "chunk", d.chunk)] {
            self.rule(&[Field::Seq], |_| {
                (d.attention.contains(letter) && size == 0).then(|| {
                    (
                        format!("`{key}` is missing for layers with the letter {letter}"),
                        format!("add a line such as `{key} = 4096`"),
                    )
                })
            });
        }
        self.rule(&[Field::DenseFfn], |shape| {
            let dense = shape.experts.dense_layers > 0 || d.ffn.contains('d');
            let missing = !shape.experts.is_none() && dense && shape.experts.dense_ffn == 0;
            missing.then(|| {
                (
                    "`dense_ffn` is missing for layers without experts".to_owned(),
                    "add a line such as `dense_ffn = 3072`".to_owned(),
                )
            })
        });
        self.rule(&[Field::Topk], |shape| {
            (d.gated_inputs && shape.experts.topk != 1).then(|| {
                (
                    format!("`topk` is {} with gated inputs", shape.experts.topk),
                    "use 1: a token that is scaled goes to one expert".to_owned(),
                )
            })
        });
        self.rule(&[Field::KvLora], |shape| {
            let norm =
                d.qk_norm.is_some_and(|norm| norm != QueryKeyNorm::Heads(HeadNormKind::Bare))
                    || d.qkv_bias;
            (!shape.latent.is_none() && norm).then(|| {
                (
                    "latent attention has no biases or norms of queries and keys".to_owned(),
                    "leave out `qkv_bias` and `query_key_norm`".to_owned(),
                )
            })
        });
    }

    fn total(&mut self, body: &Body) {
        let words: Vec<_> = [Field::Layers, Field::DModel, Field::Ffn, Field::Vocab]
            .iter()
            .map(|field| format!("`{}`", self.dialect.word(*field)))
            .collect();
        let over: Vec<_> = sizes(self.shape).into_iter().map(|(field, _)| field).collect();
        self.rule(&over, |shape| {
            let parameters = shape.count(body);
            (parameters > u128::from(MAX_PARAMETERS)).then(|| {
                (
                    format!(
                        "the model would have {:.1e} parameters, more than the limit of {:.1e}",
                        parameters as f64, MAX_PARAMETERS as f64
                    ),
                    format!("lower one of {}", words.join(", ")),
                )
            })
        });
    }

    fn distrust_what_was_found(&mut self) {
        self.wrong.extend(self.found.iter().map(|violation| violation.field));
    }
}

/// Returns true if a size is within the field's limits.
pub(super) fn in_range(field: Field, size: u64) -> bool {
    field.range().contains(&size)
}

/// Remedy for an invalid size.
pub(super) fn whole_number_remedy(field: Field) -> String {
    format!("use a whole number from {} to {}", field.range().start(), field.range().end())
}

/// Problem and remedy for a field that does not apply to the kind.
pub(super) fn not_for(word: &str, kind: ModelKind) -> (String, String) {
    (format!("`{word}` does not apply to kind \"{kind}\""), "leave it out".to_owned())
}

/// Divisors of `number` on both sides of `wanted`, as a phrase: "4 or 8".
pub(super) fn divisors_near(number: u64, wanted: u64) -> String {
    let (mut below, mut above) = (1, number);
    for low in (1..=number.isqrt()).filter(|low| number.is_multiple_of(*low)) {
        for divisor in [low, number / low] {
            if divisor <= wanted {
                below = below.max(divisor);
            } else {
                above = above.min(divisor);
            }
        }
    }
    if below == above { below.to_string() } else { format!("{below} or {above}") }
}

fn sizes(shape: &ModelDims) -> [(Field, u64); 21] {
    [
        (Field::Layers, shape.layers),
        (Field::DModel, shape.d_model),
        (Field::Heads, shape.heads),
        (Field::KvHeads, shape.kv_heads),
        (Field::HeadDim, shape.head_dim),
        (Field::Ffn, shape.ffn),
        (Field::Seq, shape.seq),
        (Field::Positions, shape.max_positions),
        (Field::Vocab, shape.vocab),
        (Field::Experts, shape.experts.experts),
        (Field::Topk, shape.experts.topk),
        (Field::SharedExperts, shape.experts.shared_experts),
        (Field::DenseLayers, shape.experts.dense_layers),
        (Field::DenseFfn, shape.experts.dense_ffn),
        (Field::Groups, shape.experts.groups),
        (Field::GroupTopk, shape.experts.group_topk),
        (Field::QLora, shape.latent.q_lora),
        (Field::KvLora, shape.latent.kv_lora),
        (Field::QkRope, shape.latent.qk_rope),
        (Field::VDim, shape.latent.v_dim),
        (Field::MtpDepth, shape.mtp.depth),
    ]
}

#[cfg(test)]
mod tests {
    use super::divisors_near;

    #[test]
    fn divisors_are_offered_on_both_sides() {
        assert_eq!(divisors_near(64, 5), "4 or 8");
        assert_eq!(divisors_near(12, 5), "4 or 6");
        assert_eq!(divisors_near(7, 5), "1 or 7");
        assert_eq!(divisors_near(7, 100), "7");
        assert_eq!(divisors_near(1, 3), "1");
    }
}
