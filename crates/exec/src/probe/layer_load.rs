//! Compute load of ranks between two exchanges.

use paceline_comm::affinity;
use paceline_kernels::linear::{self, Shape};
use paceline_kernels::pool::Pool;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

/// Layers that ranks compute one after the other, each rank its own. They evict other data from the
/// caches at the same rate as training does.
#[derive(Debug)]
pub struct LayerLoad {
    /// One network per rank.
    networks: Vec<Mutex<Network>>,
    /// Number of layers of each network, used cyclically.
    layers: usize,
}

/// Shape of one GEMM, which takes about 0.1 ms.
const SHAPE: Shape = Shape { rows: 128, inputs: 256, outputs: 256 };

/// Total number of layers over all ranks: more weights and values than caches hold. Each rank has
/// at most [`MOST`] and at least [`FEWEST`].
const ALL: usize = 1024;
const MOST: usize = 256;
const FEWEST: usize = 32;

/// Bytes that computing a layer touches and the previous layer did not.
pub const LAYER: u64 = 4 * (SHAPE.inputs * SHAPE.outputs + SHAPE.rows * SHAPE.outputs) as u64;

#[derive(Debug)]
struct Network {
    pool: Pool,
    weights: Vec<f32>,
    values: Vec<f32>,
    next: usize,
}

impl LayerLoad {
    /// Creates networks for up to `ranks` ranks.
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

    /// Computes `layers` layers for a rank.
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

    /// Rank skew: the time by which the slowest of `ranks` ranks exceeds the fastest, as a fraction
    /// of the slowest's time. It is averaged over `rounds` rounds of `count` layers, each rank on
    /// its share of the cores.
    pub fn rank_skew(&self, ranks: u32, count: u32, rounds: usize) -> f64 {
        let all_cores = Barrier::new(ranks as usize);
        let rank = |rank: u32| {
            affinity::pin_to_share(rank, ranks);
            let round = |_| {
                all_cores.wait();
                let began = Instant::now();
                self.compute(rank, count);
                began.elapsed().as_secs_f64()
            };
            // The first round alone pays for page faults and instruction misses.
            (0..=rounds).map(round).skip(1).collect::<Vec<f64>>()
        };
        let times: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let rank = &rank;
            let all: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
            all.into_iter().filter_map(|rank| rank.join().ok()).collect()
        });
        let skew = |round: usize| {
            let of_ranks = || times.iter().filter_map(|times| times.get(round).copied());
            let (first, last) =
                (of_ranks().fold(f64::MAX, f64::min), of_ranks().fold(0.0, f64::max));
            if first <= last && last > 0.0 { (last - first) / last } else { 0.0 }
        };
        (0..rounds).map(skew).sum::<f64>() / rounds.max(1) as f64
    }
}
