//! `paceline eval`: the loss on held-out text or images.

use super::loaded_model::{LoadedModel, Trained};
use crate::failure::Failure;
use crate::flags::{CommonFlags, DataChoice, DataFlags, Origins, Problems, whole};
use clap::Args;
use paceline_exec::data::{Data, SampleKind};
use paceline_exec::inference::evaluate;
use serde::Serialize;
use std::path::PathBuf;

/// Compute the loss of a trained model on held-out text or images
///
/// Reads data that training never saw: the last twentieth of the run's files, or built-in text or
/// images of another seed.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  paceline eval runs/mini-001\n  \
                  paceline eval gpt2/ --data book.txt --tokenizer gpt2/tokenizer.json")]
pub(crate) struct Flags {
    /// Run directory, checkpoint, or Hugging Face directory
    #[arg(value_name = "RUN_DIR|HF_DIR")]
    directory: PathBuf,
    #[command(flatten)]
    data: DataFlags,
    /// Tokens per sample [default: the model's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seq: Option<String>,
    /// Maximum number of samples to read [default: 256, or all that there are]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    samples: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Default number of samples: enough to resolve a hundredth of a nat.
const SAMPLES: u64 = 256;
/// Number of tokens computed at once: their logits must fit.
const TOKENS_AT_ONCE: u64 = 1024;
/// Number of images computed at once.
const IMAGES_AT_ONCE: u64 = 16;

#[derive(Serialize)]
struct Record {
    loss: f64,
    perplexity: f64,
    /// Share of correctly classified images; image networks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy: Option<f64>,
    tokens: u64,
    samples: u64,
    floor: Option<f64>,
    data: String,
    model: String,
    path: String,
}

/// Evaluates the model and prints the loss.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let trained = Trained::open(&flags.directory)?;
    let model = trained.network.model();
    let most = if model.max_positions > 0 { model.max_positions } else { u64::from(u32::MAX) };
    let seq = whole("--seq", flags.seq.as_deref(), 1..=most, &mut problems).unwrap_or(model.seq);
    let samples = whole("--samples", flags.samples.as_deref(), 1..=u64::MAX, &mut problems);
    let choice = flags.data.check(&trained.defaults, &mut problems);
    let reads = SampleKind::of(model, seq);
    let held_out =
        |choice: &DataChoice| Data::held_out(&choice.source, reads.clone(), trained.seed);
    let data = match choice.as_ref().map(held_out) {
        Some(Ok(data)) if problems.is_empty() => data,
        Some(Err(error)) => {
            problems.add("--data", error.to_string());
            return Err(problems.into());
        }
        Some(Ok(_)) | None => return Err(problems.into()),
    };
    let there = data.samples().unwrap_or(u64::MAX);
    let samples = samples.unwrap_or(SAMPLES).min(there);
    let batch = (TOKENS_AT_ONCE / seq).max(1);
    let found = match &trained.network {
        LoadedModel::Tokens(network) => evaluate(network, &data, seq, samples, batch, &mut |_| {}),
        LoadedModel::Images(network) => network.evaluate(&data, samples, IMAGES_AT_ONCE),
    };
    let found = found.map_err(|error| Failure::Run(error.into()))?;
    let name = data.path().map_or(data.name().to_owned(), |path| path.display().to_string());
    let output = flags.common.output();
    let floor = found.floor.map_or(String::new(), |floor| format!(" (floor {floor:.4})"));
    let (loss, count) = (found.loss, found.tokens);
    output.print(&match found.accuracy {
        None => {
            let perplexity = loss.exp();
            format!(
                "loss {loss:.4}{floor}, perplexity {perplexity:.2}, on {count} held-out tokens of {name}"
            )
        }
        Some(share) => {
            let percent = 100.0 * share;
            format!("loss {loss:.4}{floor}, {percent:.1} % right, on {count} held-out samples")
        }
    })?;
    Ok(output.print_json(&Record {
        loss: found.loss,
        perplexity: found.loss.exp(),
        accuracy: found.accuracy,
        tokens: found.tokens,
        samples: found.samples,
        floor: found.floor,
        data: name,
        model: model.name().to_owned(),
        path: trained.path.display().to_string(),
    })?)
}
