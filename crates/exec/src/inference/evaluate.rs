//! The loss on text that training has not seen.

use super::attend::Sequences;
use super::network::Network;
use crate::data::{Data, DataError};
use paceline_kernels::Rows;
use paceline_kernels::loss::{self, Columns};

/// What a model makes of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss of a token, in nats.
    pub loss: f64,
    /// The share of images whose class was found the likeliest.
    pub accuracy: Option<f64>,
    /// Tokens predicted, or images.
    pub tokens: u64,
    /// Samples read.
    pub samples: u64,
    /// The loss that no model can stay below, where that is known.
    pub floor: Option<f64>,
}

/// Reads the first `samples` samples of `seq` tokens, `batch` at a time, and adds up what the model did not expect.
///
/// `on_progress` hears how many samples are done.
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
        let hidden = network.hidden(&tokens, &positions, &mut Sequences { seq });
        let logits = network.logits(&hidden);
        let rows = Rows { rows: tokens.len(), width: vocab };
        let columns = Columns { first: 0, valid: vocab };
        let mut max = vec![0.0; rows.rows];
        let mut stats = vec![0.0; 2 * rows.rows];
        let mut losses = vec![0.0; rows.rows];
        loss::row_max(rows, columns, &logits, &mut max);
        loss::softmax_stats(rows, columns, &logits, &max, &targets, &mut stats);
        loss::cross_entropy(&stats, &mut losses);
        total += losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
        done += count;
        on_progress(done);
    }
    let tokens = samples * seq as u64;
    let loss = if tokens == 0 { f64::NAN } else { total / tokens as f64 };
    Ok(Evaluation { loss, accuracy: None, tokens, samples, floor: data.floor() })
}
