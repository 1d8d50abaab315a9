//! A short look at this machine through one plan.
//!
//! Whoever trains without having calibrated is still told what to expect. The operators of the very plan
//! that is about to run are timed, a few runs each, with as many ranks at work as the run will have; what is
//! too long for a look is left to the time per unit of work of its nearest like. The rest of the
//! description is that of a common machine.

use super::grid::{self, Probe};
use super::{DTYPE, describe, host, number};
use crate::failure::Failure;
use paceline_exec::probe::{self, Before, Conditions, Subject, Turn};
use paceline_plan::program::{AccumulateMode, Plan, Program};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::measured::{CopyRate, KernelTable, Memory, Sample, Temperatures};
use paceline_sim::cluster::{Cluster, Measured};
use paceline_sim::compute::{KernelUse, accumulate_kernel, step_kernel};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// How long looking at kernels may take, with the one that was begun before that; twice as long where a rank
/// has several threads, which take a while to spread over the cores.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long to look at one.
const EFFORT: Duration = Duration::from_micros(500);
/// What takes longer than some milliseconds at a rate that any core has.
const MOST_FLOPS: f64 = 5e8;
const MOST_BYTES: f64 = (16 << 20) as f64;
/// Kernels that a device's rate is known by.
const PRODUCTS: &str = "linear.";
/// Operations of a product that shows what a core can do.
const TELLING: f64 = 3e7;
/// Elements of sums, and the most of an optimizer's step.
const SUMS: [u64; 2] = [1 << 14, 1 << 20];
const MOST_ELEMENTS: u64 = 1 << 22;

/// What this machine takes for the operators of a plan whose ranks have so many threads each.
pub(crate) fn glance(
    plan: &Plan,
    threads: NonZeroUsize,
    cores: NonZeroUsize,
) -> Result<Cluster, Failure> {
    let at_once = (cores.get() / threads.get()).clamp(1, plan.mesh.world() as usize);
    let stop = AtomicBool::new(false);
    let conditions = |effort| Conditions {
        ranks: u32::try_from(at_once).unwrap_or(1),
        threads,
        before: Before::Nothing,
        effort,
        stop: &stop,
    };
    let lender = grid::probes(true)?;
    let copies = copies(&lender.plans[0], &conditions(EFFORT))?;
    let from_memory = copies.last().map_or(1e9, |copy| copy.together.0);
    let homes = homes(plan);
    let mut tables: Vec<KernelTable> = Vec::new();
    let patience = if threads.get() > 1 { 2 * PATIENCE } else { PATIENCE };
    let began = Instant::now();
    for Look { plan, template, subject, used, bytes } in looks(plan, &homes, &lender) {
        if began.elapsed() > patience {
            break;
        }
        // What cannot be timed by itself is the model's to answer for.
        let Ok(warm) = probe::time(plan, template, subject, &conditions(EFFORT)) else { continue };
        let warm = warm.0.max(1e-10);
        let both =
            Temperatures { warm: Seconds(warm), cold: Seconds(warm.max(bytes / from_memory)) };
        let KernelUse { name, shape, work, .. } = used;
        let sample = Sample { shape, work, alone: both, together: both };
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
        per_op: probe::overhead(&lender.plans[0], Turn::Computation, EFFORT * 4)?,
        per_exchange: probe::overhead(&lender.plans[0], Turn::Exchange, EFFORT * 4)?,
        per_token: probe::load(&lender.plans[0], EFFORT * 2)?,
        memory: Memory { copies },
        kernels: tables,
        aging: Vec::new(),
        uneven: 0.0,
        apart: None,
        wires: Vec::new(),
    })?;
    cluster.name = "this machine".into();
    Ok(cluster)
}

/// Something to time.
struct Look<'p> {
    plan: &'p Plan,
    template: usize,
    subject: Subject,
    used: KernelUse,
    bytes: f64,
}

impl Look<'_> {
    /// What it takes, roughly, to tell what matters from what does not.
    fn guess(&self) -> f64 {
        let flops = if self.is_product() { self.used.work } else { 0.0 };
        (flops / 50e9).max(self.bytes / 10e9)
    }

    fn is_product(&self) -> bool {
        self.used.shape.len() == 3
    }
}

/// The plan as each of its programs alone, without what it does: operators stand where they are at home.
fn homes(plan: &Plan) -> Vec<Plan> {
    let alone = |program: &Program| {
        let (prologue, body, epilogue) = Default::default();
        let program = Program { prologue, body, epilogue, ..program.clone() };
        Plan { programs: vec![program], ..plan.clone() }
    };
    plan.programs.iter().map(alone).collect()
}

/// What a plan does, each kernel and shape once: the longest of each kernel, then the next; beside
/// products that are all too long or too short, one of middling size. Only kernels that `calibrate` times
/// as well are sure to run by themselves.
fn looks<'p>(plan: &'p Plan, homes: &'p [Plan], lender: &'p grid::Probes) -> Vec<Look<'p>> {
    let mut looks = Vec::new();
    let mut known = BTreeSet::new();
    let mut add = |look: Look<'p>, looks: &mut Vec<Look<'p>>| {
        let most = if look.is_product() { MOST_FLOPS } else { MOST_BYTES };
        let used = &look.used;
        if used.dtype == DTYPE
            && (1.0..=most).contains(&used.work)
            && known.insert((used.name.clone(), used.shape.clone()))
        {
            looks.push(look);
        }
    };
    let names: BTreeSet<&str> = lender.operators.iter().map(|p| p.used.name.as_str()).collect();
    for Probe { template, op, used, .. } in grid::operators(plan) {
        let has_it = |home: &&Plan| {
            let segments = home.programs.iter().flat_map(|program| &program.segments);
            segments.into_iter().any(|segment| segment.template as usize == template)
        };
        let whole = &plan.templates[template];
        let bytes = whole.cost(&whole.ops[op]).bytes.as_f64();
        // What goes by a program's buckets is at home in a whole program only.
        let alone = names.contains(used.name.as_str()) && !used.name.contains("_squares.");
        if let (Some(plan), true) = (homes.iter().find(has_it), alone) {
            add(Look { plan, template, subject: Subject::Operator(op), used, bytes }, &mut looks);
        }
    }
    for Probe { plan, template, op, used } in &lender.operators {
        let is_product = used.name.starts_with(PRODUCTS);
        let tells = |used: &KernelUse| !is_product || used.work >= TELLING;
        let like = |look: &Look<'_>| look.used.name == used.name && tells(&look.used);
        let stands_in = (is_product || used.name.contains("_squares.")) && !looks.iter().any(like);
        let whole = &lender.plans[*plan];
        if stands_in && tells(used) {
            let bytes = whole.templates[*template].cost(&whole.templates[*template].ops[*op]).bytes;
            let (template, subject, used) = (*template, Subject::Operator(*op), used.clone());
            add(Look { plan: whole, template, subject, used, bytes: bytes.as_f64() }, &mut looks);
        }
    }
    let optimizer = plan.strategy.optimizer;
    // Weights, gradient and moments are read, all but the gradient written.
    let step = (3 + 2 * optimizer.moments() as u64) * DTYPE.size();
    let buckets = plan.programs.iter().flat_map(|program| &program.buckets);
    for elements in buckets.map(|bucket| bucket.grads.len.min(MOST_ELEMENTS)) {
        for phase in optimizer.phases() {
            let (subject, template) = (Subject::Step(elements, *phase), 0);
            let used = step_kernel(optimizer, *phase, DTYPE, elements);
            let bytes = (elements * step) as f64;
            add(Look { plan, template, subject, used, bytes }, &mut looks);
        }
    }
    for (elements, mode) in
        SUMS.into_iter().flat_map(|e| [(e, AccumulateMode::Add), (e, AccumulateMode::Move)])
    {
        let (subject, template) = (Subject::Accumulate(elements, mode), 0);
        let used = accumulate_kernel(mode, DTYPE, elements);
        let touched = match mode {
            AccumulateMode::Add => 3,
            AccumulateMode::Move => 2,
        };
        let bytes = (elements * touched * DTYPE.size()) as f64;
        add(Look { plan: &lender.plans[0], template, subject, used, bytes }, &mut looks);
    }
    looks.sort_by(|a, b| b.guess().total_cmp(&a.guess()));
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    looks.sort_by_cached_key(|look| {
        let times = seen.entry(look.used.name.clone()).or_default();
        *times += 1;
        (*times, !look.is_product())
    });
    looks
}

/// The rate of copies in the nearest caches, in the farthest one, and beyond it.
fn copies(lender: &Plan, conditions: &Conditions<'_>) -> Result<Vec<CopyRate>, Failure> {
    let largest = host::cache();
    let sizes = BTreeSet::from([1 << 18, largest / 4, largest * 3 / 2]);
    let rate = |bytes: u64| {
        // Half is read, half is written.
        let subject = Subject::Accumulate(bytes / 8, AccumulateMode::Move);
        let conditions = Conditions { threads: number(1), ..*conditions };
        let time = probe::time(lender, 0, subject, &conditions)?;
        let rate = BytesPerSec(bytes as f64 / time.0.max(1e-10));
        Ok(CopyRate { bytes: Bytes(bytes), alone: rate, together: rate })
    };
    sizes.into_iter().map(rate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::{OptimizerKind, Strategy, Zero};

    /// Every kind of program lends its operators, and what was seen of them predicts.
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
            let seen = glance(&plan, number(1), number(2)).unwrap();
            assert_eq!(Cluster::parse(&seen.to_toml(), "machine.toml").as_ref(), Ok(&seen));
            let kernels = &seen.measured.as_ref().unwrap().kernels;
            let step = |table: &KernelTable| table.name.ends_with(&format!(".{optimizer}"));
            assert!(kernels.iter().any(step), "{name}: no step of {optimizer} was seen");
            let iteration = paceline_sim::simulate(&plan, &seen, &Default::default()).unwrap();
            assert!((1e-7..10.0).contains(&iteration.iteration.0), "{name}: {iteration:?}");
        }
    }
}
