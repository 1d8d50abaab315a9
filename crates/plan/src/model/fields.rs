//! A description as keys and values, read with a record of all problems.
//!
//! Both readers, of TOML and of Hugging Face's JSON, use this: entries with lines as input, a
//! [`ModelDims`] as output. An invalid entry is recorded and a placeholder used, so that reading
//! continues and all problems are reported at once. The placeholder is never returned, because a
//! recorded problem means an error.

use super::check::{self, divisors_near, whole_number_remedy};
use super::codec;
use super::field::{Field, Words};
use super::hugging_face;
use super::parse::stem;
use super::{Activation, Body, Experts, Latent, Model, ModelDims, ModelKind, Mtp, Router};
use crate::located::{Entry, Errors, Value, quoted};
use crate::suggest::suggest;
use std::collections::{BTreeMap, BTreeSet};

/// Entries of one description.
pub(super) struct Fields {
    pub(super) words: Words,
    entries: BTreeMap<String, Entry>,
    /// Line of the kind; fields that the kind requires and the file lacks are reported there.
    anchor: usize,
    wrong: BTreeSet<Field>,
    errors: Errors,
}

/// Properties known before the sizes are read.
pub(super) struct Given {
    pub(super) kind: ModelKind,
    pub(super) activation: Activation,
    /// Default epsilon of norms.
    pub(super) norm_eps: f64,
    /// True if the number of key heads is required; otherwise it defaults to `heads`.
    pub(super) needs_kv_heads: bool,
    /// Default base of rotary positions.
    pub(super) rope_theta: f64,
}

impl Fields {
    pub(super) fn new(words: Words, file: &str, entries: BTreeMap<String, Entry>) -> Self {
        let kind = entries.get(words.word(Field::Kind));
        let anchor = kind.map_or(1, |entry| entry.line);
        Self { words, entries, anchor, wrong: BTreeSet::new(), errors: Errors::new(file) }
    }

    /// Reads all sizes of the kind.
    pub(super) fn shape(&mut self, given: &Given) -> ModelDims {
        let kind = given.kind;
        let has = |field: Field| field.applies_to(kind);
        let d_model = self.size(Field::DModel);
        let heads = if has(Field::Heads) { self.size(Field::Heads) } else { 0 };
        let kv_heads = match has(Field::KvHeads) {
            true if given.needs_kv_heads => self.size(Field::KvHeads),
            true => self.size_after(Field::KvHeads, Field::Heads, heads),
            false => 0,
        };
        let head_dim = if has(Field::HeadDim) { self.head_dim(d_model, heads) } else { 0 };
        let ffn = match kind {
            ModelKind::Gpt2 => self.size_after(Field::Ffn, Field::DModel, 4 * d_model),
            ModelKind::Mlp
            | ModelKind::Llama
            | ModelKind::Moe
            | ModelKind::Resnet
            | ModelKind::Dlrm
            | ModelKind::Decoder
            | ModelKind::Graph => self.size(Field::Ffn),
        };
        let seq = self.size(Field::Seq);
        let max_positions = match has(Field::Positions) {
            _ if kind == ModelKind::Decoder => self.size_if_given(Field::Positions).unwrap_or(0),
            true => self.size_after(Field::Positions, Field::Seq, seq),
            false => 0,
        };
        let norm_eps =
            if has(Field::NormEps) { self.real_or(Field::NormEps, given.norm_eps) } else { 0.0 };
        let rope_theta = if has(Field::RopeTheta) {
            self.real_or(Field::RopeTheta, given.rope_theta)
        } else {
            0.0
        };
        ModelDims {
            kind,
            layers: self.size(Field::Layers),
            d_model,
            heads,
            kv_heads,
            head_dim,
            ffn,
            seq,
            max_positions,
            vocab: self.size(Field::Vocab),
            tied: self.flag(Field::Tied).unwrap_or(kind == ModelKind::Gpt2),
            activation: given.activation,
            norm_eps,
            rope_theta,
            qk_norm: has(Field::QkNorm) && self.flag(Field::QkNorm).unwrap_or(false),
            experts: match has(Field::Experts) {
                true if kind != ModelKind::Decoder || self.entry(Field::Experts).is_some() => {
                    self.experts()
                }
                _ => Experts::default(),
            },
            latent: if has(Field::KvLora) { self.latent() } else { Latent::default() },
            mtp: if has(Field::MtpDepth) { self.mtp() } else { Mtp::default() },
        }
    }

    /// Reads the experts; missing fields mean absent, and the weights sum to one by default.
    fn experts(&mut self) -> Experts {
        let mut or_none = |field: Field| self.size_if_given(field).unwrap_or(0);
        let [shared_experts, dense_layers, dense_ffn] =
            [Field::SharedExperts, Field::DenseLayers, Field::DenseFfn].map(&mut or_none);
        let [groups, group_topk] = [Field::Groups, Field::GroupTopk].map(&mut or_none);
        Experts {
            experts: self.size(Field::Experts),
            topk: self.size(Field::Topk),
            shared_experts,
            dense_layers,
            dense_ffn,
            router: self.router(),
            groups,
            group_topk,
            route_scale: self.real_or(Field::RouteScale, 1.0),
            capacity: self.real_or(Field::Capacity, 0.0),
            balance: self.real_or(Field::Balance, 0.0),
        }
    }

    fn router(&mut self) -> Router {
        let Some(word) = self.text(Field::Router) else { return Router::default() };
        let found = Router::ALL.into_iter().find(|router| router.name() == word);
        if found.is_none() {
            let problem = format!("router {} is unknown", quoted(&word));
            self.blame(Field::Router, problem, "use \"softmax\" or \"sigmoid\"");
        }
        found.unwrap_or_default()
    }

    fn latent(&mut self) -> Latent {
        let [q_lora, kv_lora, qk_rope, v_dim] =
            [Field::QLora, Field::KvLora, Field::QkRope, Field::VDim]
                .map(|field| self.size_if_given(field).unwrap_or(0));
        Latent { q_lora, kv_lora, qk_rope, v_dim }
    }

    /// Reads the multi-token prediction modules; the weight defaults to DeepSeek-V3's.
    fn mtp(&mut self) -> Mtp {
        let depth = self.size_if_given(Field::MtpDepth).unwrap_or(0);
        let usual = if depth > 0 { Mtp::WEIGHT } else { 0.0 };
        Mtp { depth, weight: self.real_or(Field::MtpWeight, usual) }
    }

    /// Reads the family in which the model is exported, if one is named.
    pub(super) fn family(&mut self) -> Option<&'static str> {
        let word = self.text(Field::Family)?;
        let names = || hugging_face::families().iter().map(|family| family.name);
        let found = names().find(|name| *name == word);
        if found.is_none() {
            let remedy = match suggest(&word, names()) {
                Some(meant) => format!("did you mean \"{meant}\"?"),
                None => format!("use one of {}", names().collect::<Vec<_>>().join(", ")),
            };
            self.blame(Field::Family, format!("family {} is unknown", quoted(&word)), remedy);
        }
        found
    }

    /// Checks the dimensions: returns a model, or all recorded problems and violations.
    pub(super) fn finish(
        mut self,
        name: String,
        shape: ModelDims,
        body: Body,
    ) -> Result<Model, Errors> {
        for violation in check::violations(&shape, &body, &self.words, &mut self.wrong) {
            self.blame(violation.field, violation.problem, violation.remedy);
        }
        if self.errors.problems.is_empty() {
            Ok(Model { name, family: None, shape, body })
        } else {
            Err(self.give_up())
        }
    }

    /// Returns a model with its dimensions in `body`, or all recorded problems.
    pub(super) fn finish_body(mut self, file_name: &str, body: Body) -> Result<Model, Errors> {
        let name = self.text(Field::Name).unwrap_or_else(|| stem(file_name).to_owned());
        if !self.errors.problems.is_empty() {
            return Err(self.give_up());
        }
        Model::from_body(name, body)
    }

    /// Returns true if no problem has been recorded.
    pub(super) fn is_sound(&self) -> bool {
        self.errors.problems.is_empty()
    }

    /// Line of the kind.
    pub(super) fn anchor(&self) -> usize {
        self.anchor
    }

    /// Returns the recorded problems if the dimensions cannot be determined at all.
    pub(super) fn give_up(self) -> Errors {
        self.errors.sorted()
    }

    /// Records a problem at a line.
    pub(super) fn note(&mut self, line: usize, problem: String, remedy: impl Into<String>) {
        self.errors.add(line, problem, remedy);
    }

    /// Records a problem with a field and excludes the field from further rules.
    pub(super) fn blame(&mut self, field: Field, problem: String, remedy: impl Into<String>) {
        let line = self.entry(field).map_or(self.anchor, |entry| entry.line);
        self.note(line, problem, remedy);
        self.wrong.insert(field);
    }

    /// Entry of a field, if the dialect has the field and the description has the entry.
    pub(super) fn entry(&self, field: Field) -> Option<&Entry> {
        let entry = self.entries.get(self.words.own_word(field)?)?;
        Some(entry).filter(|entry| !codec::is_null(&entry.value))
    }

    /// All entries, by key.
    pub(super) fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// Value of a key: `None` if it is absent, `Some(None)` if it is unfit, which is recorded with
    /// the remedy.
    pub(super) fn read<T>(
        &mut self,
        key: &str,
        fit: impl FnOnce(&Value) -> Option<T>,
        remedy: impl FnOnce() -> String,
    ) -> Option<Option<T>> {
        let Entry { line, value } =
            self.entries.get(key).filter(|entry| !codec::is_null(&entry.value))?;
        let found = fit(value);
        if found.is_none() {
            self.errors.add(*line, format!("`{key}` is {value}"), remedy());
        }
        Some(found)
    }

    /// Value of a field, as [`Fields::read`]; an unfit field is excluded from further rules.
    fn value<T>(
        &mut self,
        field: Field,
        fit: impl FnOnce(&Value) -> Option<T>,
        remedy: impl FnOnce() -> String,
    ) -> Option<Option<T>> {
        let read = self.read(self.words.own_word(field)?, fit, remedy);
        if let Some(None) = read {
            self.wrong.insert(field);
        }
        read
    }

    /// Reads a flag, if it is present and valid.
    pub(super) fn flag(&mut self, field: Field) -> Option<bool> {
        self.value(field, Value::flag, || "use true or false".to_owned()).flatten()
    }

    /// Reads a text, if it is present and valid.
    pub(super) fn text(&mut self, field: Field) -> Option<String> {
        let text = |value: &Value| value.text().map(str::to_owned);
        self.value(field, text, || "use a text in quotes".to_owned()).flatten()
    }

    /// Reads a required size.
    pub(super) fn size(&mut self, field: Field) -> u64 {
        if self.entry(field).is_none() {
            let word = self.words.word(field);
            let remedy = match self.words.is_toml() {
                true => format!("add a line such as `{word} = {}`", field.example()),
                false => format!("add an entry such as `\"{word}\": {}`", field.example()),
            };
            self.blame(field, format!("`{word}` is missing"), remedy);
        }
        self.size_if_given(field).unwrap_or(STAND_IN)
    }

    /// Reads a size with a default derived from `source`; the default is invalid if `source` is.
    pub(super) fn size_after(&mut self, field: Field, source: Field, default: u64) -> u64 {
        self.size_if_given(field).unwrap_or_else(|| {
            if self.wrong.contains(&source) {
                self.wrong.insert(field);
            }
            default
        })
    }

    pub(super) fn size_if_given(&mut self, field: Field) -> Option<u64> {
        let size = |value: &Value| value.whole(field.range());
        let size = self.value(field, size, || whole_number_remedy(field));
        size.map(|size| size.unwrap_or(STAND_IN))
    }

    pub(super) fn real_or(&mut self, field: Field, default: f64) -> f64 {
        let remedy = || format!("use a number such as {default:?}");
        self.value(field, Value::number, remedy).flatten().unwrap_or(default)
    }

    /// Width of a head: given, or an equal share of the model's width.
    pub(super) fn head_dim(&mut self, d_model: u64, heads: u64) -> u64 {
        if let Some(head_dim) = self.size_if_given(Field::HeadDim) {
            return head_dim;
        }
        if self.wrong.contains(&Field::DModel) || self.wrong.contains(&Field::Heads) {
            self.wrong.insert(Field::HeadDim);
            return STAND_IN;
        }
        if d_model.is_multiple_of(heads) {
            return d_model / heads;
        }
        let d_word = self.words.word(Field::DModel);
        let heads_word = self.words.word(Field::Heads);
        let or_give = match self.words.own_word(Field::HeadDim) {
            Some(word) => format!(", or give `{word}`"),
            None => String::new(),
        };
        self.blame(
            Field::Heads,
            format!("`{heads_word}` is {heads}, which does not divide `{d_word}` = {d_model}"),
            format!("use {}{or_give}", divisors_near(d_model, heads)),
        );
        self.wrong.insert(Field::HeadDim);
        STAND_IN
    }
}

/// Placeholder for a size that could not be read; violates no rule on its own.
const STAND_IN: u64 = 2;
