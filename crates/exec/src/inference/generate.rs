//! Text generation, token by token.

use super::kv_cache::KvCache;
use super::network::Network;
use paceline_kernels::philox::Stream;
use thiserror::Error;

/// Sampling of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature: 1 samples as the model predicts, less is sharper, 0 takes the likeliest token.
    pub temperature: f64,
    /// Number of likeliest tokens to sample from; `None` samples from all.
    pub top_k: Option<usize>,
    /// Seed of the samples.
    pub seed: u64,
}

/// Reason why no text can be generated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GenerateError {
    /// The prompt is empty.
    #[error("the prompt has no token; give at least one")]
    Empty,
    /// The prompt has a token outside the model's vocabulary.
    #[error("token {token} of the prompt is beyond the model's vocabulary of {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// The model has too few positions.
    #[error(
        "a prompt of {prompt} tokens and {tokens} more are beyond the model's {positions} positions"
    )]
    Long {
        /// Number of tokens in the prompt.
        prompt: usize,
        /// Number of tokens requested.
        tokens: usize,
        /// Number of positions of the model.
        positions: u64,
    },
}

/// Continues a prompt by `tokens` tokens. `each` receives them one by one, and ends generation by
/// returning false.
///
/// A KV cache holds the keys and values of earlier tokens, so that a token costs one pass over the
/// weights for any length of text.
pub fn generate(
    network: &Network,
    prompt: &[u32],
    tokens: usize,
    sampling: Sampling,
    each: &mut dyn FnMut(u32) -> bool,
) -> Result<(), GenerateError> {
    let model = network.model();
    if prompt.is_empty() {
        return Err(GenerateError::Empty);
    }
    if let Some(&token) = prompt.iter().find(|&&token| u64::from(token) >= model.vocab) {
        return Err(GenerateError::Token { token, vocab: model.vocab });
    }
    let last = prompt.len().saturating_add(tokens).saturating_sub(1) as u64;
    let positions = match model.max_positions {
        0 => u64::from(u32::MAX),
        learned => learned,
    };
    if last > positions {
        return Err(GenerateError::Long { prompt: prompt.len(), tokens, positions });
    }
    let mut memory = KvCache::new(model.layers as usize);
    let graph = network.graph(last);
    let draws = Stream::new(sampling.seed, "generate");
    let mut read = prompt.to_vec();
    let mut position = 0;
    for number in 0..tokens {
        let positions: Vec<u32> = (position..position + read.len() as u32).collect();
        let mut logits = network.next(&graph, &read, &positions, &mut memory);
        position += read.len() as u32;
        let token = draw(&mut logits, sampling, draws.uniform(number as u64));
        if !each(token) {
            break;
        }
        read = vec![token];
    }
    Ok(())
}

/// Token chosen by a uniform number in [0, 1).
fn draw(logits: &mut [f32], sampling: Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let kept = match sampling.top_k {
        _ if sampling.temperature <= 0.0 => 1,
        Some(k) => k.clamp(1, order.len()),
        None => order.len(),
    };
    if kept < order.len() {
        order.select_nth_unstable_by(kept - 1, by_logit);
        order.truncate(kept);
    }
    if kept == 1 {
        return order[0];
    }
    // A fixed order: the same number draws the same token after any selection.
    order.sort_unstable();
    let most = order.iter().map(|&t| logits[t as usize]).fold(f32::NEG_INFINITY, f32::max);
    let weight =
        |&token: &u32| (f64::from(logits[token as usize] - most) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut left = uniform * total;
    for token in &order {
        left -= weight(token);
        if left < 0.0 {
            return *token;
        }
    }
    order[order.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_temperature_and_top_k() {
        let logits = [0.0f32, 2f32.ln(), 4f32.ln(), f32::NEG_INFINITY];
        let shares = |temperature, top_k| {
            let sampling = Sampling { temperature, top_k, seed: 0 };
            let mut counts = [0; 4];
            for i in 0..700 {
                let token = draw(&mut logits.clone(), sampling, (f64::from(i) + 0.5) / 700.0);
                counts[token as usize] += 1;
            }
            counts
        };
        assert_eq!(shares(1.0, None), [100, 200, 400, 0]);
        assert_eq!(shares(0.0, None), [0, 0, 700, 0]);
        assert_eq!(shares(5.0, Some(1)), [0, 0, 700, 0]);
        let [none, third, two_thirds, _] = shares(1.0, Some(2));
        assert_eq!(none, 0);
        assert!((233..=234).contains(&third) && (466..=467).contains(&two_thirds));
        // Half the temperature squares the odds: 1, 4 and 16 of 21.
        let [first, ..] = shares(0.5, None);
        assert!((33..=34).contains(&first), "{first}");
    }
}
