//! `paceline eval`: the loss on text that training has not seen.

use super::trained::Trained;
use crate::failure::Failure;
use crate::flags::{CommonFlags, DataChoice, DataFlags, Origins, Problems, whole};
use clap::Args;
use paceline_exec::data::Data;
use paceline_exec::inference::evaluate;
use serde::Serialize;
use std::path::PathBuf;

/// The loss of a trained model on held-out text
///
/// Reads what training never did: the last twentieth of the run's files, or built-in text of another seed.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  paceline eval runs/mini-001\n  \
                  paceline eval gpt2/ --data book.txt --tokenizer gpt2/tokenizer.json")]
pub(crate) struct Flags {
    /// A run's directory, a checkpoint, or a Hugging Face directory
    #[arg(value_name = "RUN_DIR|HF_DIR")]
    directory: PathBuf,
    #[command(flatten)]
    data: DataFlags,
    /// Tokens of a sample [default: the model's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seq: Option<String>,
    /// Samples to read at most [default: 256, or all that there are]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    samples: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Samples that are enough to tell a hundredth of a nat.
const SAMPLES: u64 = 256;
/// Tokens that are computed on at once: their logits must fit.
const TOKENS_AT_ONCE: u64 = 1024;

#[derive(Serialize)]
struct Record {
    loss: f64,
    perplexity: f64,
    tokens: u64,
    samples: u64,
    floor: Option<f64>,
    data: String,
    model: String,
    path: String,
}

/// Reads, adds up, says.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let trained = Trained::open(&flags.directory)?;
    let model = trained.network.model();
    let most = if model.max_positions > 0 { model.max_positions } else { u64::from(u32::MAX) };
    let seq = whole("--seq", flags.seq.as_deref(), 1..=most, &mut problems).unwrap_or(model.seq);
    let samples = whole("--samples", flags.samples.as_deref(), 1..=u64::MAX, &mut problems);
    let choice = flags.data.check(&trained.defaults, &mut problems);
    let vocab = u32::try_from(model.vocab).unwrap_or(u32::MAX);
    let held_out = |choice: &DataChoice| Data::held_out(&choice.source, vocab, seq, trained.seed);
    let data = match choice.as_ref().map(held_out) {
        Some(Ok(data)) if problems.is_empty() => data,
        Some(Err(error)) => {
            problems.say("--data", error.to_string());
            return Err(problems.into());
        }
        Some(Ok(_)) | None => return Err(problems.into()),
    };
    let there = data.samples().unwrap_or(u64::MAX);
    let samples = samples.unwrap_or(SAMPLES).min(there);
    let batch = (TOKENS_AT_ONCE / seq).max(1);
    let found = evaluate(&trained.network, &data, seq, samples, batch, &mut |_| {})
        .map_err(|error| Failure::Run(error.into()))?;
    let name = data.path().map_or(data.name().to_owned(), |path| path.display().to_string());
    let output = flags.common.output();
    let floor = found.floor.map_or(String::new(), |floor| format!(" (floor {floor:.4})"));
    output.people(&format!(
        "loss {:.4}{floor}, perplexity {:.2}, on {} held-out tokens of {name}",
        found.loss,
        found.loss.exp(),
        found.tokens
    ))?;
    Ok(output.object(&Record {
        loss: found.loss,
        perplexity: found.loss.exp(),
        tokens: found.tokens,
        samples: found.samples,
        floor: found.floor,
        data: name,
        model: model.name().to_owned(),
        path: trained.path.display().to_string(),
    })?)
}
