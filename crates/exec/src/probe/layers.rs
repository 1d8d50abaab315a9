//! What ranks compute between two exchanges.

use paceline_comm::affinity;
use paceline_kernels::linear::{self, Shape};
use paceline_kernels::pool::Pool;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

/// Layers of a network that ranks compute one after the other, each rank its own: what the caches hold of
/// anything else is pushed out at the pace at which training does so.
#[derive(Debug)]
pub struct Layers {
    /// One for each rank.
    networks: Vec<Mutex<Network>>,
    /// Of each, until the first comes again.
    layers: usize,
}

/// A product takes about a tenth of a millisecond.
const SHAPE: Shape = Shape { rows: 128, inputs: 256, outputs: 256 };

/// Layers of all ranks together: more weights and values than caches hold. Few ranks have no more each than
/// [`MOST`], and many no fewer than [`FEWEST`].
const ALL: usize = 1024;
const MOST: usize = 256;
const FEWEST: usize = 32;

/// Bytes that computing a layer touches and the one before has not.
pub const LAYER: u64 = 4 * (SHAPE.inputs * SHAPE.outputs + SHAPE.rows * SHAPE.outputs) as u64;

#[derive(Debug)]
struct Network {
    pool: Pool,
    weights: Vec<f32>,
    values: Vec<f32>,
    next: usize,
}

impl Layers {
    /// For up to so many ranks.
    pub fn new(ranks: u32) -> Self {
        let layers = (ALL / (ranks as usize).max(1)).clamp(FEWEST, MOST);
        let network = |_| {
            let Shape { rows, inputs, outputs } = SHAPE;
            let weights = vec![1.0 / inputs as f32; layers * inputs * outputs];
            let values = vec![1.0; (layers + 1) * rows * outputs];
            Mutex::new(Network { pool: Pool::single(), weights, values, next: 0 })
        };
        Self { networks: (0..ranks).map(network).collect(), layers }
    }

    /// Computes so many layers for a rank.
    pub(super) fn compute(&self, rank: u32, layers: u32) {
        let Some(network) = self.networks.get(rank as usize) else { return };
        let mut network = network.lock().unwrap_or_else(PoisonError::into_inner);
        let Network { pool, weights, values, next } = &mut *network;
        let Shape { rows, inputs, outputs } = SHAPE;
        for _ in 0..layers {
            let weights = &weights[*next * inputs * outputs..][..inputs * outputs];
            let (before, after) = values[*next * rows * outputs..].split_at_mut(rows * outputs);
            linear::forward(pool, SHAPE, before, weights, &mut after[..rows * outputs]);
            *next = (*next + 1) % self.layers;
        }
    }

    /// How much longer the last of so many ranks takes than the first, each with its share of the cores, in parts
    /// of what it takes: on average over rounds of so many layers.
    pub fn uneven(&self, ranks: u32, count: u32, rounds: usize) -> f64 {
        let together = Barrier::new(ranks as usize);
        let rank = |rank: u32| {
            affinity::keep_to_share(rank, ranks);
            let round = |_| {
                together.wait();
                let began = Instant::now();
                self.compute(rank, count);
                began.elapsed().as_secs_f64()
            };
            // The first finds pages and instructions that no other has to find.
            (0..=rounds).map(round).skip(1).collect::<Vec<f64>>()
        };
        let times: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let rank = &rank;
            let all: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
            all.into_iter().filter_map(|rank| rank.join().ok()).collect()
        });
        let apart = |round: usize| {
            let of_ranks = || times.iter().filter_map(|times| times.get(round).copied());
            let (first, last) =
                (of_ranks().fold(f64::MAX, f64::min), of_ranks().fold(0.0, f64::max));
            if first <= last && last > 0.0 { (last - first) / last } else { 0.0 }
        };
        (0..rounds).map(apart).sum::<f64>() / rounds.max(1) as f64
    }
}
