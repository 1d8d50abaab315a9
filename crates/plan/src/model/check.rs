//! The rules that a shape must keep, wherever it came from.

use super::field::{Dialect, Field};
use super::{ModelKind, Shape};
use std::collections::BTreeSet;

/// The most parameters a model may have. At 16 bytes each, the most that training state takes, the
/// sum still fits 64 bits with room to spare, so that no later arithmetic on bytes can overflow.
pub const MAX_PARAMETERS: u64 = 1 << 56;

/// A rule that is not kept, and the field to change.
pub(super) struct Violation {
    pub(super) field: Field,
    pub(super) problem: String,
    pub(super) remedy: String,
}

/// All violations at once, in the words of the dialect.
///
/// `wrong` holds the fields whose values are known not to be meant, such as a text where a number
/// belongs; rules over them are not looked at, because their complaints would only confuse. Fields
/// found out of range join them.
pub(super) fn violations(
    shape: &Shape,
    dialect: Dialect,
    wrong: &mut BTreeSet<Field>,
) -> Vec<Violation> {
    let mut check = Check { shape, dialect, wrong, found: Vec::new() };
    check.sizes();
    check.reals();
    check.attention();
    check.positions();
    check.activation();
    check.total();
    check.found
}

struct Check<'a> {
    shape: &'a Shape,
    dialect: Dialect,
    wrong: &'a mut BTreeSet<Field>,
    found: Vec<Violation>,
}

impl Check<'_> {
    /// Blames the first field if a rule over sound fields finds a problem and its remedy.
    fn rule(&mut self, over: &[Field], problem: impl FnOnce(&Shape) -> Option<(String, String)>) {
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
        ] {
            let word = self.dialect.word(field);
            self.rule(&[field], |_| match field.applies_to(kind) {
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
            let Shape { heads, kv_heads, .. } = *shape;
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
            let odd = shape.kind == ModelKind::Llama && !shape.head_dim.is_multiple_of(2);
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
        if !Field::Positions.applies_to(self.shape.kind) {
            return;
        }
        let seq_word = self.dialect.word(Field::Seq);
        self.rule(&[Field::Seq, Field::Positions], |shape| {
            let Shape { seq, max_positions, .. } = *shape;
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

    fn total(&mut self) {
        let words: Vec<_> = [Field::Layers, Field::DModel, Field::Ffn, Field::Vocab]
            .iter()
            .map(|field| format!("`{}`", self.dialect.word(*field)))
            .collect();
        let over: Vec<_> = sizes(self.shape).into_iter().map(|(field, _)| field).collect();
        self.rule(&over, |shape| {
            let parameters = shape.count();
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

/// Whether a size can be meant.
pub(super) fn in_range(field: Field, size: u64) -> bool {
    (1..=field.limit()).contains(&size)
}

/// What to write where a size is not one.
pub(super) fn whole_number_remedy(field: Field) -> String {
    format!("use a whole number from 1 to {}", field.limit())
}

/// The complaint about a field that means nothing for the kind.
pub(super) fn not_for(word: &str, kind: ModelKind) -> (String, String) {
    (format!("`{word}` does not apply to kind \"{kind}\""), "leave it out".to_owned())
}

/// The divisors of `number` on both sides of `wanted`, as a phrase: "4 or 8".
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

fn sizes(shape: &Shape) -> [(Field, u64); 9] {
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
