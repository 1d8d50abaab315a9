//! Times kernels, and the memory beneath them.

use super::grid::Probes;
use super::{DTYPE, Request, Told, host, number};
use crate::failure::Failure;
use paceline_exec::probe::{self, Before, Conditions, Subject, Sweep};
use paceline_plan::program::AccumulateMode;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::measured::{CopyRate, KernelTable, Memory, Sample, Temperatures};
use paceline_sim::compute::{KernelUse, accumulate_kernel, step_kernel};
use std::sync::atomic::AtomicBool;

/// Elements of optimizer steps, sums and copies.
const ELEMENTS: [u64; 5] = [1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23];

/// One table for each kernel and number of threads.
pub(super) fn tables(
    probes: &Probes,
    request: &Request,
    stop: &AtomicBool,
    tell: Told<'_>,
) -> Result<Vec<KernelTable>, Failure> {
    let optimizer = probes.plans[0].strategy.optimizer;
    let mut subjects: Vec<(usize, usize, Subject, KernelUse)> = (probes.operators.iter())
        .map(|p| (p.plan, p.template, Subject::Operator(p.op), p.used.clone()))
        .collect();
    for elements in ELEMENTS {
        for phase in optimizer.phases() {
            let step = step_kernel(optimizer, *phase, DTYPE, elements);
            subjects.push((0, 0, Subject::Step(elements, *phase), step));
        }
        for mode in [AccumulateMode::Add, AccumulateMode::Move] {
            let used = accumulate_kernel(mode, DTYPE, elements);
            subjects.push((0, 0, Subject::Accumulate(elements, mode), used));
        }
    }
    let cores = u32::try_from(request.cores.get()).unwrap_or(u32::MAX);
    let sweep = Sweep::new(cores, host::cache());
    let mut tables: Vec<KernelTable> = Vec::new();
    for (done, (plan, template, subject, used)) in subjects.iter().enumerate() {
        tell(done as f64 / subjects.len() as f64, &used.name)?;
        let plan = &probes.plans[*plan];
        let time = |ranks, threads, before| {
            let effort = request.effort();
            let conditions = Conditions { ranks, threads: number(threads), before, effort, stop };
            let time = probe::time(plan, *template, *subject, &conditions)?;
            Ok::<_, Failure>(Seconds(time.0.max(1e-10)))
        };
        let both = |ranks, threads| {
            let warm = time(ranks, threads, Before::Nothing)?;
            let cold = time(ranks, threads, Before::Sweep(&sweep))?;
            Ok::<_, Failure>(Temperatures { warm, cold })
        };
        let mut keep = |threads: usize, alone, together| {
            let sample = Sample { shape: used.shape.clone(), work: used.work, alone, together };
            let threads = u32::try_from(threads).unwrap_or(u32::MAX);
            match tables.iter_mut().find(|t| t.name == used.name && t.threads == threads) {
                Some(table) => table.samples.push(sample),
                None => tables.push(KernelTable {
                    name: used.name.clone(),
                    dtype: DTYPE,
                    threads,
                    samples: vec![sample],
                }),
            }
        };
        let alone = both(1, 1)?;
        keep(1, alone, if cores > 1 { both(cores, 1)? } else { alone });
        let threads = request.threads.get();
        if threads > 1 {
            let alone = both(1, threads)?;
            keep(threads, alone, alone);
        }
    }
    Ok(tables)
}

/// The rate of copies by how much is copied.
pub(super) fn memory(
    probes: &Probes,
    request: &Request,
    stop: &AtomicBool,
) -> Result<Memory, Failure> {
    let cores = u32::try_from(request.cores.get()).unwrap_or(u32::MAX);
    let largest = host::cache() * 3;
    let sizes = (14..40).map(|power| 1u64 << power).take_while(|bytes| *bytes < 2 * largest);
    let rate = |bytes: u64, ranks| {
        // Half is read, half is written.
        let subject = Subject::Accumulate(bytes / 8, AccumulateMode::Move);
        let (threads, effort) = (number(1), request.effort());
        let conditions = Conditions { ranks, threads, before: Before::Nothing, effort, stop };
        let time = probe::time(&probes.plans[0], 0, subject, &conditions)?;
        Ok::<_, Failure>(BytesPerSec(bytes as f64 / time.0.max(1e-10)))
    };
    let copy = |bytes| {
        let alone = rate(bytes, 1)?;
        let together = if cores > 1 { rate(bytes, cores)? } else { alone };
        Ok(CopyRate { bytes: Bytes(bytes), alone, together })
    };
    Ok(Memory { copies: sizes.step_by(2).map(copy).collect::<Result<_, Failure>>()? })
}
