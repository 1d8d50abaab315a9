//! Times how caches lose what a rank has touched, while it computes something else.

use super::grid::{Probe, Probes};
use super::steady::Steady;
use super::{Request, Told, number, wires};
use crate::failure::Failure;
use paceline_exec::probe::{self, Before, Conditions, LAYER, Layers, Subject, Sweep};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::measured::Aged;
use std::sync::atomic::AtomicBool;

/// Layers between two runs of the same thing: none, and then up to as many as leave nothing in any cache.
const COUNTS: [u32; 9] = [0, 1, 2, 4, 8, 16, 32, 64, 192];

/// About as many as a layer of a larger model takes.
const A_WHILE: u32 = 128;

/// What most of an iteration's time goes to.
const KERNELS: [&str; 6] = [
    "attention.forward",
    "attention.input",
    "linear.forward",
    "linear.input",
    "linear.weight",
    "norm.layer.forward",
];

/// Exchanges of nothing but how it is done, of what a core's own cache has room for, and of more than that.
const EXCHANGED: [usize; 3] = [64, Aged::SMALL as usize, Aged::LARGE as usize];

/// What caches lose, as it was in every round.
pub(super) struct Aging<'a> {
    probes: &'a Probes,
    request: &'a Request,
    sweep: &'a Sweep,
    steady: &'a Steady<'a>,
    stop: &'a AtomicBool,
    layers: Layers,
    /// Of kernels of one rank, of kernels with all cores at work, and of exchanges: by round, the parts that are lost
    /// after each number of layers.
    alone: Vec<Vec<f64>>,
    together: Vec<Vec<f64>>,
    exchanges: [Vec<Vec<f64>>; EXCHANGED.len()],
}

impl<'a> Aging<'a> {
    pub(super) fn new(
        probes: &'a Probes,
        request: &'a Request,
        sweep: &'a Sweep,
        (steady, stop): (&'a Steady<'a>, &'a AtomicBool),
    ) -> Self {
        let ranks = request.ranks.iter().copied().max().unwrap_or(1);
        let layers = Layers::new(ranks.max(request.all_cores()));
        let (alone, together, exchanges) = Default::default();
        Self { probes, request, sweep, steady, stop, layers, alone, together, exchanges }
    }

    /// Looks once more.
    pub(super) fn round(&mut self, tell: Told<'_>) -> Result<(), Failure> {
        let layers = COUNTS.iter().map(|&count| Before::Layers(&self.layers, count));
        let before: Vec<Before<'_>> = layers.chain([Before::Sweep(self.sweep)]).collect();
        let cores = self.request.all_cores();
        let alone = self.kernels(1, &before, &|share| tell(0.4 * share, CACHES))?;
        let together = if cores > 1 {
            self.kernels(cores, &before, &|share| tell(0.4 + 0.4 * share, CACHES))?
        } else {
            alone.clone()
        };
        tell(0.8, "what caches lose of exchanges")?;
        // Whoever exchanges nothing asks for none of it.
        let exchanges = wires::aged(self.request, self.steady, &EXCHANGED, &before)?
            .unwrap_or_else(|| vec![vec![Seconds::ZERO; before.len()]; EXCHANGED.len()]);
        self.alone.push(alone);
        self.together.push(together);
        for (all, times) in self.exchanges.iter_mut().zip(exchanges) {
            all.push(parts(&times));
        }
        Ok(())
    }

    /// Of all kernels together, as an iteration is made of them.
    fn kernels(
        &self,
        ranks: u32,
        before: &[Before<'_>],
        tell: &dyn Fn(f64) -> Result<(), Failure>,
    ) -> Result<Vec<f64>, Failure> {
        let (threads, effort, stop) = (number(1), self.request.effort(), self.stop);
        let mut sums = Vec::with_capacity(before.len());
        for (nth, &what) in before.iter().enumerate() {
            tell(nth as f64 / before.len() as f64)?;
            let conditions = Conditions { ranks, threads, before: what, effort, stop };
            let mut sum = Seconds::ZERO;
            for Probe { plan, template, op, used } in &self.probes.operators {
                if *plan == 0 && KERNELS.contains(&used.name.as_str()) {
                    let (plan, subject) = (&self.probes.plans[*plan], Subject::Operator(*op));
                    sum += probe::time(plan, *template, subject, &conditions)?;
                }
            }
            sums.push(sum);
        }
        Ok(parts(&sums))
    }

    /// The parts of what there is to lose that are lost after so many bytes, on average over the rounds.
    pub(super) fn curves(&self) -> Vec<Aged> {
        let mean = |rounds: &[Vec<f64>], nth: usize| {
            rounds.iter().map(|parts| parts[nth]).sum::<f64>() / rounds.len().max(1) as f64
        };
        let [wires, small, large] = &self.exchanges;
        let aged = |nth: usize| Aged {
            bytes: Bytes(u64::from(COUNTS[nth]) * LAYER),
            alone: mean(&self.alone, nth),
            together: mean(&self.together, nth),
            wires: mean(wires, nth),
            small: mean(small, nth),
            large: mean(large, nth),
        };
        (1..COUNTS.len()).map(aged).collect()
    }
}

const CACHES: &str = "what caches lose";

/// How far ranks on all cores come apart, in parts of the time since they met.
pub(super) fn uneven(request: &Request) -> f64 {
    let cores = request.all_cores();
    let rounds = if request.quick { 3 } else { 24 };
    Layers::new(cores).uneven(cores, A_WHILE, rounds)
}

/// From 0 for the first time to 1 for the last, and never back: what is lost stays lost. Times that go back are
/// taken together with those before them, to the mean that they have (the nearest curve that only rises).
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
