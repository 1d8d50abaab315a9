//! Quick profile: a short measurement of one plan's kernels on this machine.
//!
//! It gives a prediction for training without a calibration. The operators of the plan to be run
//! are timed, a few runs each, with as many concurrent ranks as in the run. An operator too long
//! for a probe is estimated from the time per unit of work of the most similar one. The rest of the
//! description is that of a common machine.

use super::shapes::{self, Probe};
use super::{DTYPE, describe, host, number};
use crate::failure::Failure;
use paceline_exec::probe::{self, CachePrep, Conditions, EmptyOp, ProbeTarget};
use paceline_plan::program::{AccumulateMode, Plan, Program};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::measured::{CopyRate, KernelTable, Memory, Sample, WarmCold};
use paceline_sim::cluster::{Cluster, Measured};
use paceline_sim::compute::{KernelUse, accumulate_kernel, step_kernel};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Time limit of the kernel probes, after which no further one is started. It is doubled for ranks
/// with several threads, which take a while to spread over the cores.
const TIMEOUT: Duration = Duration::from_millis(300);
/// Minimum duration of one probe.
const EFFORT: Duration = Duration::from_micros(500);
/// Limits on the work of a probe: beyond them any core takes more than a few milliseconds.
const MOST_FLOPS: f64 = 5e8;
const MOST_BYTES: f64 = (16 << 20) as f64;
/// Name prefix of the kernels that determine a device's peak rate.
const PRODUCTS: &str = "linear.";
/// Minimum FLOPs of a GEMM that shows a core's peak rate.
const TELLING: f64 = 3e7;
/// Element counts of sums, and the maximum for an optimizer step.
const SUMS: [u64; 2] = [1 << 14, 1 << 20];
const MOST_ELEMENTS: u64 = 1 << 22;

/// Measures the operators of a plan whose ranks have `threads` threads each.
pub(crate) fn profile_plan(
    plan: &Plan,
    threads: NonZeroUsize,
    cores: NonZeroUsize,
) -> Result<Cluster, Failure> {
    profile_within(plan, threads, cores, if threads.get() > 1 { 2 * TIMEOUT } else { TIMEOUT })
}

/// Same with a time limit of the kernel probes.
fn profile_within(
    plan: &Plan,
    threads: NonZeroUsize,
    cores: NonZeroUsize,
    timeout: Duration,
) -> Result<Cluster, Failure> {
    let at_once = (cores.get() / threads.get()).clamp(1, plan.mesh.world() as usize);
    let stop = AtomicBool::new(false);
    let conditions = |effort| Conditions {
        ranks: u32::try_from(at_once).unwrap_or(1),
        threads,
        before: CachePrep::Warm,
        effort,
        stop: &stop,
    };
    let lender = shapes::probes(true)?;
    let copies = copies(&lender.plans[0], &conditions(EFFORT))?;
    let from_memory = copies.last().map_or(1e9, |copy| copy.all_cores.0);
    let homes = homes(plan);
    let mut tables: Vec<KernelTable> = Vec::new();
    let began = Instant::now();
    for PlannedProbe { plan, template, subject, used, bytes } in
        planned_probes(plan, &homes, &lender)
    {
        if began.elapsed() > timeout {
            break;
        }
        // Operators that cannot be timed alone are left to the cost model.
        let Ok(warm) = probe::time(plan, template, subject, &conditions(EFFORT)) else { continue };
        let warm = warm.0.max(1e-10);
        let both = WarmCold { warm: Seconds(warm), cold: Seconds(warm.max(bytes / from_memory)) };
        let KernelUse { name, shape, work, .. } = used;
        let sample = Sample { shape, work, solo: both, all_cores: both };
        match tables.iter_mut().find(|table| table.name == name) {
            Some(table) => table.samples.push(sample),
            None => tables.push(KernelTable {
                name,
                dtype: DTYPE,
                threads: u32::try_from(threads.get()).unwrap_or(u32::MAX),
                samples: vec![sample],
            }),
        }
    }
    if !tables.iter().any(|table| table.name.starts_with(PRODUCTS)) {
        return Err(Failure::Run(anyhow::anyhow!("no product was seen")));
    }
    let mut cluster = describe(Measured {
        cores: u32::try_from(cores.get()).unwrap_or(u32::MAX),
        threads: None,
        op_overhead: probe::overhead(&lender.plans[0], EmptyOp::Computation, EFFORT * 4)?,
        exchange_overhead: probe::overhead(&lender.plans[0], EmptyOp::Exchange, EFFORT * 4)?,
        load_time_per_token: probe::load(&lender.plans[0], EFFORT * 2)?,
        memory: Memory { copy_bandwidth: copies },
        kernels: tables,
        cache_decay: Vec::new(),
        rank_skew: 0.0,
        core_round_trip: None,
        transports: Vec::new(),
    })?;
    cluster.name = "this machine".into();
    Ok(cluster)
}

/// A kernel to time.
struct PlannedProbe<'p> {
    plan: &'p Plan,
    template: usize,
    subject: ProbeTarget,
    used: KernelUse,
    bytes: f64,
}

impl PlannedProbe<'_> {
    /// Rough time estimate in seconds, to rank probes by importance.
    fn guess(&self) -> f64 {
        let flops = if self.is_product() { self.used.work } else { 0.0 };
        (flops / 50e9).max(self.bytes / 10e9)
    }

    fn is_product(&self) -> bool {
        self.used.shape.len() == 3
    }
}

/// One plan per program, without its ops: each operator is probed in the program that contains it.
fn homes(plan: &Plan) -> Vec<Plan> {
    let alone = |program: &Program| {
        let (prologue, body, epilogue) = Default::default();
        let program = Program { prologue, body, epilogue, ..program.clone() };
        Plan { programs: vec![program], ..plan.clone() }
    };
    plan.programs.iter().map(alone).collect()
}

/// The probes of a plan, each kernel and shape once: first the longest of each kernel, then the
/// next. If all GEMMs of a plan are too long or too short, one of medium size is added. Only
/// kernels that `calibrate` also times are certain to run alone.
fn planned_probes<'p>(
    plan: &'p Plan,
    homes: &'p [Plan],
    lender: &'p shapes::Probes,
) -> Vec<PlannedProbe<'p>> {
    let mut planned_probes = Vec::new();
    let mut known = BTreeSet::new();
    let mut add = |probe: PlannedProbe<'p>, planned_probes: &mut Vec<PlannedProbe<'p>>| {
        let most = if probe.is_product() { MOST_FLOPS } else { MOST_BYTES };
        let used = &probe.used;
        if used.dtype == DTYPE
            && (1.0..=most).contains(&used.work)
            && known.insert((used.name.clone(), used.shape.clone()))
        {
            planned_probes.push(probe);
        }
    };
    let names: BTreeSet<&str> = lender.operators.iter().map(|p| p.used.name.as_str()).collect();
    for Probe { template, op, used, .. } in shapes::operators(plan) {
        let has_it = |home: &&Plan| {
            let segments = home.programs.iter().flat_map(|program| &program.segments);
            segments.into_iter().any(|segment| segment.template as usize == template)
        };
        let whole = &plan.templates[template];
        let bytes = whole.cost(&whole.ops[op]).bytes.as_f64();
        // Kernels that work on a program's buckets run in a whole program only.
        let alone = names.contains(used.name.as_str()) && !used.name.contains("_squares.");
        if let (Some(plan), true) = (homes.iter().find(has_it), alone) {
            add(
                PlannedProbe { plan, template, subject: ProbeTarget::Operator(op), used, bytes },
                &mut planned_probes,
            );
        }
    }
    for Probe { plan, template, op, used } in &lender.operators {
        let is_product = used.name.starts_with(PRODUCTS);
        let tells = |used: &KernelUse| !is_product || used.work >= TELLING;
        let like = |probe: &PlannedProbe<'_>| probe.used.name == used.name && tells(&probe.used);
        let stands_in =
            (is_product || used.name.contains("_squares.")) && !planned_probes.iter().any(like);
        let whole = &lender.plans[*plan];
        if stands_in && tells(used) {
            let bytes = whole.templates[*template].cost(&whole.templates[*template].ops[*op]).bytes;
            let (template, subject, used) = (*template, ProbeTarget::Operator(*op), used.clone());
            add(
                PlannedProbe { plan: whole, template, subject, used, bytes: bytes.as_f64() },
                &mut planned_probes,
            );
        }
    }
    let optimizer = plan.strategy.optimizer;
    // Weights, gradient and moments are read; all but the gradient are written.
    let step = (3 + 2 * optimizer.moments() as u64) * DTYPE.size();
    let buckets = plan.programs.iter().flat_map(|program| &program.buckets);
    for elements in buckets.map(|bucket| bucket.grads.len.min(MOST_ELEMENTS)) {
        for phase in optimizer.phases() {
            let (subject, template) = (ProbeTarget::Step(elements, *phase), 0);
            let used = step_kernel(optimizer, *phase, DTYPE, elements);
            let bytes = (elements * step) as f64;
            add(PlannedProbe { plan, template, subject, used, bytes }, &mut planned_probes);
        }
    }
    for (elements, mode) in
        SUMS.into_iter().flat_map(|e| [(e, AccumulateMode::Add), (e, AccumulateMode::Move)])
    {
        let (subject, template) = (ProbeTarget::Accumulate(elements, mode), 0);
        let used = accumulate_kernel(mode, DTYPE, elements);
        let touched = match mode {
            AccumulateMode::Add => 3,
            AccumulateMode::Move => 2,
        };
        let bytes = (elements * touched * DTYPE.size()) as f64;
        add(
            PlannedProbe { plan: &lender.plans[0], template, subject, used, bytes },
            &mut planned_probes,
        );
    }
    planned_probes.sort_by(|a, b| b.guess().total_cmp(&a.guess()));
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    planned_probes.sort_by_cached_key(|probe| {
        let times = seen.entry(probe.used.name.clone()).or_default();
        *times += 1;
        (*times, !probe.is_product())
    });
    planned_probes
}

/// Copy bandwidth in the inner caches, in the last-level cache, and in memory.
fn copies(lender: &Plan, conditions: &Conditions<'_>) -> Result<Vec<CopyRate>, Failure> {
    let largest = host::cache();
    let sizes = BTreeSet::from([1 << 18, largest / 4, largest * 3 / 2]);
    let rate = |bytes: u64| {
        // Half of the bytes are read, half are written.
        let subject = ProbeTarget::Accumulate(bytes / 8, AccumulateMode::Move);
        let conditions = Conditions { threads: number(1), ..*conditions };
        let time = probe::time(lender, 0, subject, &conditions)?;
        let rate = BytesPerSec(bytes as f64 / time.0.max(1e-10));
        Ok(CopyRate { bytes: Bytes(bytes), solo: rate, all_cores: rate })
    };
    sizes.into_iter().map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::{OptimizerKind, Strategy, Zero};

    /// Every kind of program can be profiled, and the result predicts its iteration time.
    #[test]
    fn a_look_at_any_plan_predicts_it() {
        let adamw = OptimizerKind::AdamW;
        for (name, dp, tp, pp, ep, optimizer) in [
            ("mini", 1, 1, 1, 1, adamw),
            ("mini-llama", 1, 2, 2, 1, adamw),
            ("mini-moe", 2, 1, 1, 2, OptimizerKind::Momentum),
            ("mini", 4, 1, 1, 1, OptimizerKind::Lamb),
            ("resnet-mini", 2, 1, 1, 1, OptimizerKind::Lars),
            ("dlrm-mini", 2, 1, 1, 1, OptimizerKind::Sgd),
        ] {
            let model = built_in::get(name).unwrap().unwrap();
            let strategy = Strategy {
                dp,
                tp,
                pp,
                ep,
                leaves: dp,
                seq: model.seq,
                global_batch: u64::from(2 * dp),
                micro_batch: 2,
                optimizer,
                zero: if dp == 4 { Zero::Parameters } else { Zero::None },
                ..Strategy::default()
            };
            let plan = lower(&model, &strategy).unwrap();
            // However busy the machine is, every kernel is timed.
            let seen = profile_within(&plan, number(1), number(2), Duration::MAX).unwrap();
            assert_eq!(Cluster::parse(&seen.to_toml(), "machine.toml").as_ref(), Ok(&seen));
            let kernels = &seen.measured.as_ref().unwrap().kernels;
            let step = |table: &KernelTable| table.name.ends_with(&format!(".{optimizer}"));
            assert!(kernels.iter().any(step), "{name}: no step of {optimizer} was seen");
            let iteration = paceline_sim::simulate(&plan, &seen, &Default::default()).unwrap();
            assert!((1e-7..10.0).contains(&iteration.iteration.0), "{name}: {iteration:?}");
        }
    }
}
