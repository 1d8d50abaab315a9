//! A description as words and values, read with a note of everything that is wrong.
//!
//! Both readers, of TOML and of Hugging Face's JSON, come down to this: entries with lines on one
//! side, a [`Shape`] on the other. A wrong entry is noted and a stand-in used, so that reading goes
//! on and all problems are told at once; the stand-in never leaves, because a note means an error.

use super::check::{self, divisors_near, in_range, whole_number_remedy};
use super::error::{ModelError, ModelErrors};
use super::field::{Dialect, Field};
use super::parse::stem;
use super::{Activation, Body, Experts, Latent, Model, ModelKind, Mtp, Router, Shape};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The entries of one description.
pub(super) struct Fields {
    dialect: Dialect,
    file: String,
    entries: BTreeMap<String, Entry>,
    /// Where the kind is told; what the kind demands and the file lacks is reported there.
    anchor: usize,
    wrong: BTreeSet<Field>,
    problems: Vec<ModelError>,
}

/// A value and the line of its key.
pub(super) struct Entry {
    pub(super) line: usize,
    pub(super) value: Value,
}

/// A value, as far as any field needs to tell.
pub(super) enum Value {
    Whole(i128),
    Real(f64),
    Flag(bool),
    Text(String),
    /// An array, with its whole numbers.
    List(Vec<Option<i128>>),
    /// Anything else, in words: "an array".
    Other(&'static str),
}

/// What is settled before the sizes are read.
pub(super) struct Given {
    pub(super) kind: ModelKind,
    pub(super) activation: Activation,
    /// The epsilon of a file that does not name one.
    pub(super) norm_eps: f64,
    /// Whether the number of key heads must be told; otherwise silence means as many as `heads`.
    pub(super) needs_kv_heads: bool,
}

impl Fields {
    pub(super) fn new(dialect: Dialect, file: &str, entries: BTreeMap<String, Entry>) -> Self {
        let kind = entries.get(dialect.word(Field::Kind));
        let anchor = kind.map_or(1, |entry| entry.line);
        Self {
            dialect,
            file: file.to_owned(),
            entries,
            anchor,
            wrong: BTreeSet::new(),
            problems: Vec::new(),
        }
    }

    /// Reads every size that the kind has.
    pub(super) fn shape(&mut self, given: &Given) -> Shape {
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
            | ModelKind::Dlrm => self.size(Field::Ffn),
        };
        let seq = self.size(Field::Seq);
        let max_positions = match has(Field::Positions) {
            true => self.size_after(Field::Positions, Field::Seq, seq),
            false => 0,
        };
        let norm_eps =
            if has(Field::NormEps) { self.real_or(Field::NormEps, given.norm_eps) } else { 0.0 };
        let rope_theta =
            if has(Field::RopeTheta) { self.real_or(Field::RopeTheta, 10_000.0) } else { 0.0 };
        Shape {
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
            experts: if has(Field::Experts) { self.experts() } else { Experts::default() },
            latent: if has(Field::KvLora) { self.latent() } else { Latent::default() },
            mtp: if has(Field::MtpDepth) { self.mtp() } else { Mtp::default() },
        }
    }

    /// The experts; what is not told is absent, and their weights add up to one.
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

    /// The modules for further tokens; they count as DeepSeek-V3's did unless it is told.
    fn mtp(&mut self) -> Mtp {
        let depth = self.size_if_given(Field::MtpDepth).unwrap_or(0);
        let usual = if depth > 0 { Mtp::WEIGHT } else { 0.0 };
        Mtp { depth, weight: self.real_or(Field::MtpWeight, usual) }
    }

    /// Checks the shape that was read: a model, or all that was noted and all that is violated.
    pub(super) fn finish(mut self, name: String, shape: Shape) -> Result<Model, ModelErrors> {
        for violation in check::violations(&shape, self.dialect, &mut self.wrong) {
            self.blame(violation.field, violation.problem, violation.remedy);
        }
        if self.problems.is_empty() {
            Ok(Model { name, shape, body: Body::Tokens {} })
        } else {
            Err(ModelErrors::new(self.problems))
        }
    }

    /// A model whose numbers stand in its body, or all that was noted.
    pub(super) fn finish_body(mut self, file_name: &str, body: Body) -> Result<Model, ModelErrors> {
        let name = self.text(Field::Name).unwrap_or_else(|| stem(file_name).to_owned());
        if !self.problems.is_empty() {
            return Err(self.give_up());
        }
        Model::from_body(name, body)
    }

    /// The line where the kind is told.
    pub(super) fn anchor(&self) -> usize {
        self.anchor
    }

    /// Gives up where the shape cannot even be guessed at, with what was noted.
    pub(super) fn give_up(self) -> ModelErrors {
        ModelErrors::new(self.problems)
    }

    /// Notes a problem at a line.
    pub(super) fn note(&mut self, line: usize, problem: String, remedy: impl Into<String>) {
        self.problems.push(ModelError {
            file: self.file.clone(),
            line: Some(line),
            problem,
            remedy: remedy.into(),
        });
    }

    /// Notes a problem with a field, which no rule is then applied to.
    pub(super) fn blame(&mut self, field: Field, problem: String, remedy: impl Into<String>) {
        let line = self.entry(field).map_or(self.anchor, |entry| entry.line);
        self.note(line, problem, remedy);
        self.wrong.insert(field);
    }

    /// The entry of a field, if the dialect has the field and the description has the entry.
    pub(super) fn entry(&self, field: Field) -> Option<&Entry> {
        self.entries.get(self.dialect.own_word(field)?)
    }

    /// All entries, by word.
    pub(super) fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// A flag, if it is there and is one.
    pub(super) fn flag(&mut self, field: Field) -> Option<bool> {
        let value = &self.entry(field)?.value;
        if let Value::Flag(flag) = value {
            return Some(*flag);
        }
        let problem = format!("`{}` is {value}", self.dialect.word(field));
        self.blame(field, problem, "use true or false");
        None
    }

    /// A text, if it is there and is one.
    pub(super) fn text(&mut self, field: Field) -> Option<String> {
        let value = &self.entry(field)?.value;
        if let Value::Text(text) = value {
            return Some(text.clone());
        }
        let problem = format!("`{}` is {value}", self.dialect.word(field));
        self.blame(field, problem, "use a text in quotes");
        None
    }

    /// A size that must be there.
    fn size(&mut self, field: Field) -> u64 {
        if self.entry(field).is_none() {
            let word = self.dialect.word(field);
            let remedy = match self.dialect {
                Dialect::Toml => format!("add a line such as `{word} = {}`", field.example()),
                _ => format!("add an entry such as `\"{word}\": {}`", field.example()),
            };
            self.blame(field, format!("`{word}` is missing"), remedy);
        }
        self.size_if_given(field).unwrap_or(STAND_IN)
    }

    /// A size that follows from another where it is not told; it is as wrong as that one then.
    fn size_after(&mut self, field: Field, source: Field, default: u64) -> u64 {
        self.size_if_given(field).unwrap_or_else(|| {
            if self.wrong.contains(&source) {
                self.wrong.insert(field);
            }
            default
        })
    }

    fn size_if_given(&mut self, field: Field) -> Option<u64> {
        let value = &self.entry(field)?.value;
        if let Value::Whole(whole) = value
            && let Ok(size) = u64::try_from(*whole)
            && in_range(field, size)
        {
            return Some(size);
        }
        let problem = format!("`{}` is {value}", self.dialect.word(field));
        self.blame(field, problem, whole_number_remedy(field));
        Some(STAND_IN)
    }

    fn real_or(&mut self, field: Field, default: f64) -> f64 {
        let Some(entry) = self.entry(field) else { return default };
        match &entry.value {
            Value::Real(real) => *real,
            Value::Whole(whole) => *whole as f64,
            value => {
                let problem = format!("`{}` is {value}", self.dialect.word(field));
                self.blame(field, problem, format!("use a number such as {default:?}"));
                default
            }
        }
    }

    /// The width of a head: told, or an equal share of the model's width.
    fn head_dim(&mut self, d_model: u64, heads: u64) -> u64 {
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
        let d_word = self.dialect.word(Field::DModel);
        let heads_word = self.dialect.word(Field::Heads);
        let or_give = match self.dialect.own_word(Field::HeadDim) {
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

/// What stands in for a size that could not be read: a value that breaks no rule by itself.
const STAND_IN: u64 = 2;

impl fmt::Display for Value {
    /// As the author wrote it, cut where it would fill the screen.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(whole) => whole.fmt(f),
            Self::Real(real) => write!(f, "{real:?}"),
            Self::Flag(flag) => flag.fmt(f),
            Self::Text(text) => write!(f, "the text {}", quoted(text)),
            Self::List(_) => f.write_str("an array"),
            Self::Other(what) => f.write_str(what),
        }
    }
}

/// A user's word in quotes, cut where it would fill the screen.
pub(super) fn quoted(text: &str) -> String {
    const LONGEST: usize = 40;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("\"{}…\"", text[..end].escape_debug()),
        None => format!("\"{}\"", text.escape_debug()),
    }
}
