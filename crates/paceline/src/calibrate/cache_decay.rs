//! Measures cache decay: the warm benefit a rank loses while it computes on other data.

use super::core_placement::PlacementMonitor;
use super::shapes::{Probe, Probes};
use super::{Report, Request, exchanges, number};
use crate::failure::Failure;
use paceline_exec::probe::{
    self, CacheFlush, CachePrep, Conditions, LAYER, LayerLoad, ProbeTarget,
};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::measured::CacheDecay;
use std::sync::atomic::AtomicBool;

/// Layers computed between two runs of a probe, from none up to enough to evict every cache.
const COUNTS: [u32; 9] = [0, 1, 2, 4, 8, 16, 32, 64, 192];

/// Layers per round of the rank-skew probe: about as long as one layer of a larger model.
const A_WHILE: u32 = 128;

/// Kernels that take most of an iteration's time.
const KERNELS: [&str; 6] = [
    "attention.forward",
    "attention.input",
    "linear.forward",
    "linear.input",
    "linear.weight",
    "norm.layer.forward",
];

/// Bytes of the timed exchanges: code path only, fitting a core's own cache, exceeding it.
const EXCHANGED: [usize; 3] = [64, CacheDecay::SMALL as usize, CacheDecay::LARGE as usize];

/// Cache decay, measured in every round.
pub(super) struct DecayProbe<'a> {
    probes: &'a Probes,
    request: &'a Request,
    sweep: &'a CacheFlush,
    steady: &'a PlacementMonitor<'a>,
    stop: &'a AtomicBool,
    layers: LayerLoad,
    /// Fractions lost after each number of layers, by round: for kernels of one rank, for kernels
    /// with all cores busy, and for exchanges.
    solo: Vec<Vec<f64>>,
    all_cores: Vec<Vec<f64>>,
    exchanges: [Vec<Vec<f64>>; EXCHANGED.len()],
}

impl<'a> DecayProbe<'a> {
    pub(super) fn new(
        probes: &'a Probes,
        request: &'a Request,
        sweep: &'a CacheFlush,
        (steady, stop): (&'a PlacementMonitor<'a>, &'a AtomicBool),
    ) -> Self {
        let ranks = request.ranks.iter().copied().max().unwrap_or(1);
        let layers = LayerLoad::new(ranks.max(request.all_cores()));
        let (solo, all_cores, exchanges) = Default::default();
        Self { probes, request, sweep, steady, stop, layers, solo, all_cores, exchanges }
    }

    /// Measures one more round.
    pub(super) fn round(&mut self, report: Report<'_>) -> Result<(), Failure> {
        let layers = COUNTS.iter().map(|&count| CachePrep::Layers(&self.layers, count));
        let before: Vec<CachePrep<'_>> = layers.chain([CachePrep::Flush(self.sweep)]).collect();
        let cores = self.request.all_cores();
        let solo = self.kernels(1, &before, &|share| report(0.4 * share, CACHES))?;
        let all_cores = if cores > 1 {
            self.kernels(cores, &before, &|share| report(0.4 + 0.4 * share, CACHES))?
        } else {
            solo.clone()
        };
        report(0.8, "what caches lose of exchanges")?;
        // `None` if ranks exchange nothing; the fractions are not used then.
        let exchanges = exchanges::cache_decay(self.request, self.steady, &EXCHANGED, &before)?
            .unwrap_or_else(|| vec![vec![Seconds::ZERO; before.len()]; EXCHANGED.len()]);
        self.solo.push(solo);
        self.all_cores.push(all_cores);
        for (all, times) in self.exchanges.iter_mut().zip(exchanges) {
            all.push(parts(&times));
        }
        Ok(())
    }

    /// Fractions lost by all kernels together, weighted as in an iteration.
    fn kernels(
        &self,
        ranks: u32,
        before: &[CachePrep<'_>],
        report: &dyn Fn(f64) -> Result<(), Failure>,
    ) -> Result<Vec<f64>, Failure> {
        let (threads, effort, stop) = (number(1), self.request.effort(), self.stop);
        let mut sums = Vec::with_capacity(before.len());
        for (nth, &what) in before.iter().enumerate() {
            report(nth as f64 / before.len() as f64)?;
            let conditions = Conditions { ranks, threads, before: what, effort, stop };
            let mut sum = Seconds::ZERO;
            for Probe { plan, template, op, used } in &self.probes.operators {
                if *plan == 0 && KERNELS.contains(&used.name.as_str()) {
                    let (plan, subject) = (&self.probes.plans[*plan], ProbeTarget::Operator(*op));
                    sum += probe::time(plan, *template, subject, &conditions)?;
                }
            }
            sums.push(sum);
        }
        Ok(parts(&sums))
    }

    /// Cache-decay curves: the fraction lost after each number of bytes, averaged over the rounds.
    pub(super) fn curves(&self) -> Vec<CacheDecay> {
        let mean = |rounds: &[Vec<f64>], nth: usize| {
            rounds.iter().map(|parts| parts[nth]).sum::<f64>() / rounds.len().max(1) as f64
        };
        let [wires, small, large] = &self.exchanges;
        let aged = |nth: usize| CacheDecay {
            bytes: Bytes(u64::from(COUNTS[nth]) * LAYER),
            solo: mean(&self.solo, nth),
            all_cores: mean(&self.all_cores, nth),
            path: mean(wires, nth),
            small_data: mean(small, nth),
            large_data: mean(large, nth),
        };
        (1..COUNTS.len()).map(aged).collect()
    }
}

const CACHES: &str = "what caches lose";

/// Measures the rank skew with a rank on every core, relative to the time since they synchronised.
pub(super) fn rank_skew(request: &Request) -> f64 {
    let cores = request.all_cores();
    let rounds = if request.quick { 3 } else { 24 };
    LayerLoad::new(cores).rank_skew(cores, A_WHILE, rounds)
}

/// Scales times to fractions from 0 (first) to 1 (last), and makes them non-decreasing: lost data
/// stays lost. Decreasing neighbours are replaced by their mean (isotonic regression).
fn parts(times: &[Seconds]) -> Vec<f64> {
    let (Some(warm), Some(cold)) = (times.first(), times.last()) else { return Vec::new() };
    let whole = (cold.0 - warm.0).max(1e-12);
    let mut steps: Vec<(f64, usize)> = Vec::with_capacity(times.len());
    for time in times {
        let mut step = ((time.0 - warm.0) / whole, 1);
        while let Some(&(before, count)) = steps.last().filter(|before| before.0 > step.0) {
            let both = count + step.1;
            step = ((before * count as f64 + step.0 * step.1 as f64) / both as f64, both);
            steps.pop();
        }
        steps.push(step);
    }
    let steps = steps.into_iter();
    steps.flat_map(|(part, count)| vec![part.clamp(0.0, 1.0); count]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_stays_lost() {
        let times = [2.0, 1.0, 3.0, 5.0, 4.0, 6.0].map(Seconds);
        assert_eq!(parts(&times), [0.0, 0.0, 0.25, 0.625, 0.625, 1.0]);
        assert!(parts(&[]).is_empty());
        assert_eq!(parts(&[Seconds(1.0); 2]), [0.0, 0.0], "nothing to lose");
    }
}
