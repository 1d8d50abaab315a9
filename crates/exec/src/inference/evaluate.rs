//! Loss on held-out text.

use super::network::{Network, losses};
use crate::data::{Data, DataError};

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss per token, in nats.
    pub loss: f64,
    /// Fraction of samples classified correctly, for images and clicks.
    pub accuracy: Option<f64>,
    /// Number of tokens predicted, or of images.
    pub tokens: u64,
    /// Number of samples read.
    pub samples: u64,
    /// Loss floor that no model goes below, if known.
    pub floor: Option<f64>,
}

/// Evaluates the loss on the first `samples` samples of `seq` tokens, `batch` at a time.
///
/// `on_progress` receives the number of samples done.
pub fn evaluate(
    network: &Network,
    data: &Data,
    seq: u64,
    samples: u64,
    batch: u64,
    on_progress: &mut dyn FnMut(u64),
) -> Result<Evaluation, DataError> {
    let (seq, vocab) = (seq as usize, network.model().vocab as usize);
    let positions: Vec<u32> = (0..seq as u32).collect();
    let mut total = 0.0;
    let mut done = 0;
    while done < samples {
        let count = batch.max(1).min(samples - done);
        let mut tokens = vec![0; count as usize * seq];
        let mut targets = tokens.clone();
        for (ahead, buffer) in [(0, &mut tokens), (1, &mut targets)] {
            for (sample, tokens) in (done..).zip(buffer.chunks_mut(seq)) {
                data.fill(sample, ahead, tokens)?;
            }
        }
        let logits = network.logits(&tokens, &positions);
        total += losses(&logits, &targets, vocab);
        done += count;
        on_progress(done);
    }
    let tokens = samples * seq as u64;
    let loss = if tokens == 0 { f64::NAN } else { total / tokens as f64 };
    Ok(Evaluation { loss, accuracy: None, tokens, samples, floor: data.floor() })
}
