//! Rotary positions and attention patterns in `config.json`.

use super::super::codec::Codec;
use super::super::field::Field;
use super::super::{Decoder, ModelDims};
use crate::graph::{Factors, Rotary, Scaling};
use crate::located::{Table, Value};
use serde_json::{Map, Value as Json, json};

const THETA: &str = "rope_theta";
const SCALING: &str = "rope_scaling";
const PARAMETERS: &str = "rope_parameters";

/// Conventions of a family.
#[derive(Clone, Copy)]
pub(super) struct Rope {
    /// Default base.
    pub(super) theta: f64,
    /// Key and default of the fraction of a head that is rotated, if there is one.
    pub(super) partial: Option<(&'static str, f64)>,
    /// Key and default of the base in windows, if it is another one.
    pub(super) window: Option<(&'static str, f64)>,
}

/// Whole heads, a base of 10 000.
pub(super) const PLAIN: Rope = Rope { theta: 1e4, partial: None, window: None };

/// Base, scaling and rotated part of a rotation of `dims` elements.
pub(super) fn rope(c: &mut Codec<'_>, s: &mut ModelDims, d: &mut Decoder, of: Rope, dims: u64) {
    if c.writes() {
        return write(c, s, d, of, dims);
    }
    let object = c.value(PARAMETERS);
    let nested = |key: &str| object.as_ref()?.table()?.entries.get(key)?.value.table().cloned();
    let (full, window) = (nested("full_attention"), nested("sliding_attention"));
    let object = match (&full, object) {
        (Some(full), _) => Some(Value::Table(full.clone())),
        (None, Some(object)) => Some(object),
        (None, None) => c.value(SCALING),
    };
    c.ignore(&[SCALING]);
    let table = object.as_ref().and_then(Value::table);
    let number = |key: &str| table?.entries.get(key)?.value.number();
    c.real(Field::RopeTheta, THETA, &mut s.rope_theta, number(THETA).unwrap_or(of.theta));
    if let Some((key, default)) = of.window {
        let own = window.as_ref().and_then(|table| table.entries.get(THETA)?.value.number());
        c.number(key, &mut d.window_theta, own.unwrap_or(default));
    }
    if let Some((key, default)) = of.partial {
        let mut part = 1.0;
        c.number(key, &mut part, number("partial_rotary_factor").unwrap_or(default));
        let turned = (dims as f64 * part) as u64;
        d.rotary.dims = if turned >= dims { 0 } else { turned };
    }
    if let Some(table) = table {
        scaling(c, s, d, table);
    }
}

/// Reads a scaling.
fn scaling(c: &mut Codec<'_>, s: &ModelDims, d: &mut Decoder, table: &Table) {
    let value = |key: &str| table.entries.get(key).map(|entry| &entry.value);
    let number = |key: &str| value(key).and_then(Value::number);
    let kind = value("rope_type").or_else(|| value("type")).and_then(Value::text);
    let given = number("original_max_position_embeddings").map(|n| n as u64);
    let beside = c.value("original_max_position_embeddings").and_then(|v| v.number());
    let original = given.or(beside.map(|n| n as u64)).unwrap_or(s.seq).max(1);
    let stretched = s.seq as f64 / original as f64;
    let factor = number("factor");
    let list = |key: &str| -> Option<Vec<f64>> {
        value(key)?.list()?.iter().map(|entry| entry.value.number()).collect()
    };
    let mut lacks = |what: &str| {
        let key = if c.is_null(SCALING) { PARAMETERS } else { SCALING };
        let problem = format!("`{key}` of type \"{}\" has no {what}", kind.unwrap_or_default());
        c.refuse(key, problem, "use the file of the published weights");
    };
    match kind {
        None | Some("default") => {}
        Some("linear") => match factor {
            Some(factor) => d.rotary.scaling = Scaling::Linear { factor },
            None => lacks("`factor`"),
        },
        Some("dynamic") => match factor {
            Some(factor) => (d.long_from, d.long_growth) = (s.seq, factor),
            None => lacks("`factor`"),
        },
        Some("llama3") => match (factor, number("low_freq_factor"), number("high_freq_factor")) {
            (Some(factor), Some(low), Some(high)) => {
                d.rotary.scaling = Scaling::Llama3 { factor, low, high, original };
            }
            _ => lacks("`factor`, `low_freq_factor` and `high_freq_factor`"),
        },
        Some("yarn") => {
            let factor = factor.unwrap_or(stretched);
            let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
            let some = |key: &str| number(key).filter(|n| *n != 0.0);
            let inferred = match (some("mscale"), some("mscale_all_dim")) {
                (Some(own), Some(all)) => scale(own) / scale(all),
                _ => scale(1.0),
            };
            d.rotary.magnitude = number("attention_factor").unwrap_or(inferred);
            d.rotary.scaling = Scaling::Yarn {
                factor,
                fast: some("beta_fast").unwrap_or(32.0),
                slow: some("beta_slow").unwrap_or(1.0),
                original,
                exact: value("truncate").and_then(Value::flag) == Some(false),
            };
        }
        Some("longrope" | "su") => match (list("short_factor"), list("long_factor")) {
            (Some(short), Some(long)) => {
                let factor = factor.unwrap_or(stretched);
                let inferred = match factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
                };
                d.rotary.magnitude = number("attention_factor").unwrap_or(inferred);
                d.rotary.scaling = Scaling::Each(Factors::new(&short));
                (d.long_from, d.long_scaling) = (original, Scaling::Each(Factors::new(&long)));
            }
            _ => lacks("`short_factor` and `long_factor`"),
        },
        Some(other) => {
            let known = "linear, dynamic, llama3, yarn or longrope";
            let problem = format!("rope scaling of type \"{}\" is unknown", other.escape_debug());
            let key = if c.entry(SCALING).is_some() { SCALING } else { PARAMETERS };
            c.refuse(key, problem, format!("use {known}, or null to train anew without it"));
        }
    }
}

/// Writes a rotation in the words that all releases of `transformers` read.
fn write(c: &mut Codec<'_>, s: &ModelDims, d: &Decoder, of: Rope, dims: u64) {
    let Rotary { dims: turned, scaling, magnitude, .. } = d.rotary;
    let mut object = Map::new();
    let mut put = |key: &str, value: Json| object.insert(key.to_owned(), value);
    match scaling {
        _ if d.long_growth > 0.0 => {
            put("rope_type", "dynamic".into());
            put("factor", d.long_growth.into());
        }
        Scaling::None => {}
        Scaling::Linear { factor } => {
            put("rope_type", "linear".into());
            put("factor", factor.into());
        }
        Scaling::Llama3 { factor, low, high, original } => {
            put("rope_type", "llama3".into());
            put("factor", factor.into());
            put("low_freq_factor", low.into());
            put("high_freq_factor", high.into());
            put("original_max_position_embeddings", original.into());
        }
        Scaling::Yarn { factor, fast, slow, original, exact } => {
            put("rope_type", "yarn".into());
            put("factor", factor.into());
            put("beta_fast", fast.into());
            put("beta_slow", slow.into());
            put("attention_factor", magnitude.into());
            put("original_max_position_embeddings", original.into());
            put("truncate", (!exact).into());
        }
        Scaling::Each(short) => {
            let long = match d.long_scaling {
                Scaling::Each(long) => long.list(),
                _ => short.list(),
            };
            put("rope_type", "longrope".into());
            put("short_factor", short.list().into());
            put("long_factor", long.into());
            put("attention_factor", magnitude.into());
            put("original_max_position_embeddings", d.long_from.into());
        }
    }
    if d.attention_scale > 0.0
        && !s.latent.is_none()
        && let Scaling::Yarn { factor, .. } = scaling
    {
        // The scores' factor of latent attention follows from this number.
        let grown = (d.attention_scale * (s.head_dim as f64).sqrt()).sqrt();
        object.insert("mscale_all_dim".to_owned(), ((grown - 1.0) / (0.1 * factor.ln())).into());
    }
    c.put(THETA, s.rope_theta);
    c.put(SCALING, if object.is_empty() { Json::Null } else { object.into() });
    if let Some((key, _)) = of.partial {
        let mut part = if turned == 0 { 1.0 } else { turned as f64 / dims as f64 };
        // The reader rounds down.
        while ((dims as f64 * part) as u64) < turned {
            part = part.next_up();
        }
        c.put(key, part);
    }
    if let Some((key, _)) = of.window {
        c.put(key, d.window_theta);
    }
}

/// Names of the letters of attention patterns.
const LAYERS: [(char, &str); 3] =
    [('f', "full_attention"), ('s', "sliding_attention"), ('c', "chunked_attention")];

/// Kinds of layers, by default those that `usual` gives for a layer's number.
pub(super) fn layer_types(
    c: &mut Codec<'_>,
    s: &ModelDims,
    d: &mut Decoder,
    usual: impl Fn(u64) -> char,
) {
    const KEY: &str = "layer_types";
    let letters = letters(&d.attention, s.layers);
    if c.writes() {
        let of = |letter: char| {
            let letter = if letter == 'n' { 'f' } else { letter };
            LAYERS.iter().find(|(known, _)| *known == letter).map(|(_, name)| *name)
        };
        let names: Vec<Option<&str>> = letters.chars().map(of).collect();
        return c.put(KEY, json!(names));
    }
    d.attention = match c.value(KEY) {
        None => shortest(&(0..s.layers).map(usual).collect::<String>()),
        Some(value) => {
            let letter = |value: &Value| {
                let name = value.text()?;
                LAYERS.iter().find(|(_, known)| *known == name).map(|(letter, _)| *letter)
            };
            let named: Option<String> = value
                .list()
                .and_then(|list| list.iter().map(|entry| letter(&entry.value)).collect());
            match named.filter(|named| named.len() as u64 >= s.layers) {
                Some(named) => shortest(&named[..s.layers as usize]),
                None => {
                    c.refuse(
                        KEY,
                        format!("`{KEY}` is not a list of the kinds of {} layers", s.layers),
                        "use full_attention, sliding_attention or chunked_attention for each",
                    );
                    "f".to_owned()
                }
            }
        }
    };
}

/// Letters of all layers.
pub(super) fn letters(pattern: &str, layers: u64) -> String {
    pattern.chars().cycle().take(layers as usize).collect()
}

/// The shortest pattern whose repetition begins with the letters.
pub(super) fn shortest(letters: &str) -> String {
    let bytes = letters.as_bytes();
    let repeats = |period: &usize| (*period..bytes.len()).all(|at| bytes[at] == bytes[at - period]);
    let period = (1..=bytes.len()).find(repeats).unwrap_or(bytes.len());
    letters[..period].to_owned()
}
