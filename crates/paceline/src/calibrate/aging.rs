//! Times how caches lose what a rank has touched, while it computes something else.

use super::grid::{Probe, Probes};
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

/// The parts of what there is to lose that are lost after so many bytes.
pub(super) fn aging(
    probes: &Probes,
    request: &Request,
    sweep: &Sweep,
    stop: &AtomicBool,
    tell: Told<'_>,
) -> Result<Vec<Aged>, Failure> {
    let cores = u32::try_from(request.cores.get()).unwrap_or(u32::MAX);
    let layers = Layers::new(request.ranks.iter().copied().max().unwrap_or(1).max(cores));
    let mut before: Vec<Before<'_>> =
        COUNTS.iter().map(|&count| Before::Layers(&layers, count)).collect();
    before.push(Before::Sweep(sweep));
    let all = before.len() as f64;
    // Of all kernels together, as an iteration is made of them.
    let kernels = |ranks: u32, done: f64| {
        let sum = |(nth, &before): (usize, &Before<'_>)| {
            let part = nth as f64 / all;
            tell(done + 0.4 * part, "what caches lose")?;
            let some = probes
                .operators
                .iter()
                .filter(|probe| probe.plan == 0 && KERNELS.contains(&probe.used.name.as_str()));
            let time = |probe: &Probe| {
                let (threads, effort) = (number(1), request.effort());
                let conditions = Conditions { ranks, threads, before, effort, stop };
                let (plan, subject) = (&probes.plans[probe.plan], Subject::Operator(probe.op));
                Ok::<_, Failure>(probe::time(plan, probe.template, subject, &conditions)?)
            };
            some.map(time).try_fold(Seconds::ZERO, |sum, time| Ok::<_, Failure>(sum + time?))
        };
        let sums: Result<Vec<Seconds>, Failure> = before.iter().enumerate().map(sum).collect();
        sums.map(|sums| parts(&sums))
    };
    let alone = kernels(1, 0.0)?;
    let together = if cores > 1 { kernels(cores, 0.4)? } else { alone.clone() };
    tell(0.8, "what caches lose of exchanges")?;
    // Whoever exchanges nothing asks for none of it.
    let exchanges = wires::aged(request, &EXCHANGED, &before)?
        .unwrap_or_else(|| vec![vec![Seconds::ZERO; before.len()]; EXCHANGED.len()]);
    let exchanges: Vec<Vec<f64>> = exchanges.iter().map(|times| parts(times)).collect();
    let aged = |nth: usize| Aged {
        bytes: Bytes(u64::from(COUNTS[nth]) * LAYER),
        alone: alone[nth],
        together: together[nth],
        wires: exchanges[0][nth],
        small: exchanges[1][nth],
        large: exchanges[2][nth],
    };
    Ok((1..COUNTS.len()).map(aged).collect())
}

/// How far ranks on all cores come apart, in parts of the time since they met.
pub(super) fn uneven(request: &Request) -> f64 {
    let cores = u32::try_from(request.cores.get()).unwrap_or(u32::MAX);
    let rounds = if request.quick { 3 } else { 24 };
    Layers::new(cores).uneven(cores, A_WHILE, rounds)
}

/// From 0 for the first time to 1 for the last, and never back: what is lost stays lost.
fn parts(times: &[Seconds]) -> Vec<f64> {
    let (Some(warm), Some(cold)) = (times.first(), times.last()) else { return Vec::new() };
    let whole = (cold.0 - warm.0).max(1e-12);
    let mut most = 0.0f64;
    let part = |time: &Seconds| {
        most = most.max(((time.0 - warm.0) / whole).clamp(0.0, 1.0));
        most
    };
    times.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_stays_lost() {
        let times = [2.0, 1.0, 3.0, 2.5, 6.0].map(Seconds);
        assert_eq!(parts(&times), [0.0, 0.0, 0.25, 0.25, 1.0]);
        assert!(parts(&[]).is_empty());
        assert_eq!(parts(&[Seconds(1.0); 2]), [0.0, 0.0], "nothing to lose");
    }
}
