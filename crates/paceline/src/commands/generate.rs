//! `paceline generate`: text from a prompt.

use super::loaded_model::{LoadedModel, Trained};
use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, real, whole};
use crate::output::escaped;
use clap::Args;
use paceline_exec::data::Tokenizer;
use paceline_exec::inference::{Sampling, generate};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Generate text from a prompt
///
/// A model trained on the built-in text generates its words: ba, da, fa and so on, in sentences of
/// fifteen words that end in a full stop.
#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  paceline generate runs/mini-001 --prompt \". ba\" --tokens 30\n  \
                  paceline generate gpt2/ --prompt \"Once upon a time\" --temperature 0.8 --top-k 40"
)]
pub(crate) struct Flags {
    /// Run directory, checkpoint, or Hugging Face directory
    #[arg(value_name = "RUN_DIR|HF_DIR")]
    directory: PathBuf,
    /// Beginning of the text
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Number of tokens to add [default: 64, or as many as the model has positions for]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    tokens: Option<String>,
    /// Sampling temperature: 1 is the model's distribution, less is sharper, 0 is greedy [default:
    /// 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<String>,
    /// Sample from the K most likely tokens only [default: all]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<String>,
    /// Seed of the sampling [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<String>,
    /// Tokenizer: builtin or a Hugging Face tokenizer.json [default: the model's own]
    #[arg(long, value_name = "builtin|FILE")]
    tokenizer: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Default number of tokens: enough to show that a model has learnt something.
const TOKENS: u64 = 64;

#[derive(Serialize)]
struct Record<'a> {
    model: &'a str,
    prompt: &'a str,
    text: String,
    tokens: Vec<u32>,
    tokens_per_s: f64,
}

/// Encodes the prompt and continues it.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let most = 1 << 32;
    let asked = whole("--tokens", flags.tokens.as_deref(), 1..=most, &mut problems);
    let temperature = real("--temperature", flags.temperature.as_deref(), 0.0..=1e6, &mut problems);
    let top_k = whole("--top-k", flags.top_k.as_deref(), 1..=most, &mut problems);
    let seed = whole("--seed", flags.seed.as_deref(), 0..=u64::MAX, &mut problems);
    if !problems.is_empty() {
        return Err(problems.into());
    }
    let trained = Trained::open(&flags.directory)?;
    let LoadedModel::Tokens(network) = &trained.network else {
        problems
            .located(format!("{}: a network on images writes no text", flags.directory.display()));
        return Err(problems.into());
    };
    let tokenizer = match flags.tokenizer.as_deref() {
        None => trained.tokenizer()?,
        Some("builtin") => Tokenizer::Bytes,
        Some(path) => Tokenizer::open(Path::new(path))
            .map_err(|error| Failure::flag("--tokenizer", error.to_string()))?,
    };
    let prompt = tokenizer
        .encode(&flags.prompt)
        .map_err(|error| Failure::flag("--prompt", error.to_string()))?;
    let room = match trained.network.model().max_positions {
        0 => u64::MAX,
        positions => (positions + 1).saturating_sub(prompt.len() as u64).max(1),
    };
    let tokens = asked.unwrap_or(TOKENS.min(room)) as usize;
    let sampling = Sampling {
        temperature: temperature.unwrap_or(1.0),
        top_k: top_k.map(|k| k as usize),
        seed: seed.unwrap_or(0),
    };
    let output = flags.common.output();
    let mut spoken = Spoken { tokenizer: &tokenizer, tokens: prompt.clone(), shown: 0 };
    let mut closed = None;
    let mut show = |text: &str| {
        if output.is_json() {
            return true;
        }
        let mut out = io::stdout();
        // The text is what a model learnt from its data, and a terminal must not obey that.
        let text = if out.is_terminal() { escaped(text) } else { text.into() };
        closed = out.write_all(text.as_bytes()).and_then(|()| out.flush()).err();
        closed.is_none()
    };
    let started = Instant::now();
    generate(network, &prompt, tokens, sampling, &mut |token| {
        spoken.tokens.push(token);
        show(&spoken.more())
    })
    .map_err(|error| Failure::flag("--prompt", error.to_string()))?;
    let seconds = started.elapsed().as_secs_f64();
    show(&(spoken.rest() + "\n"));
    if let Some(error) = closed {
        return Err(error.into());
    }
    let added = spoken.tokens[prompt.len()..].to_vec();
    Ok(output.print_json(&Record {
        model: trained.network.model().name(),
        prompt: &flags.prompt,
        text: tokenizer.decode(&spoken.tokens),
        tokens_per_s: added.len() as f64 / seconds.max(1e-9),
        tokens: added,
    })?)
}

/// Growing text: a character may need several tokens, and is shown once it is complete.
struct Spoken<'a> {
    tokenizer: &'a Tokenizer,
    tokens: Vec<u32>,
    /// Number of bytes of the text already shown.
    shown: usize,
}

impl Spoken<'_> {
    /// Returns the complete text that was not shown yet.
    fn more(&mut self) -> String {
        let text = self.tokenizer.decode(&self.tokens);
        if text.ends_with('\u{fffd}') {
            return String::new();
        }
        self.take(&text)
    }

    /// Returns all text that was not shown yet, complete or not.
    fn rest(&mut self) -> String {
        let text = self.tokenizer.decode(&self.tokens);
        self.take(&text)
    }

    fn take(&mut self, text: &str) -> String {
        let more = text.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = self.shown.max(text.len());
        more
    }
}
