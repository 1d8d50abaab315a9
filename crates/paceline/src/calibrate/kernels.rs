//! Times kernels, and the memory beneath them.

use super::grid::Probes;
use super::steady::Steady;
use super::{DTYPE, ROUNDS, Request, Told, host, number};
use crate::failure::Failure;
use paceline_exec::probe::{self, Before, Conditions, Subject, Sweep};
use paceline_plan::program::AccumulateMode;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::measured::{CopyRate, KernelTable, Memory, Sample, Temperatures};
use paceline_sim::compute::{KernelUse, accumulate_kernel, step_kernel};
use std::sync::atomic::AtomicBool;

/// Elements of optimizer steps, sums and copies.
const ELEMENTS: [u64; 5] = [1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23];

/// Kernels, and what they took in every round.
pub(super) struct Kernels<'a> {
    probes: &'a Probes,
    request: &'a Request,
    steady: &'a Steady<'a>,
    stop: &'a AtomicBool,
    subjects: Vec<Timed>,
    /// Ranks at once and threads of each.
    companies: Vec<(u32, usize)>,
    sweep: Sweep,
    /// By round, and then by subject and company.
    rounds: Vec<Vec<Temperatures>>,
}

/// A plan and its template, what is timed of it, and as which kernel it is known.
type Timed = (usize, usize, Subject, KernelUse);

impl<'a> Kernels<'a> {
    pub(super) fn new(
        probes: &'a Probes,
        request: &'a Request,
        (steady, stop): (&'a Steady<'a>, &'a AtomicBool),
    ) -> Self {
        let optimizer = probes.plans[0].strategy.optimizer;
        let mut subjects: Vec<Timed> = (probes.operators.iter())
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
        let (cores, threads) = (request.all_cores(), request.threads.get());
        let mut companies = vec![(1, 1)];
        companies.extend((cores > 1).then_some((cores, 1)));
        companies.extend((threads > 1).then_some((1, threads)));
        let (sweep, rounds) = (Sweep::new(cores, host::cache()), Vec::new());
        Self { probes, request, steady, stop, subjects, companies, sweep, rounds }
    }

    /// Times every kernel once more.
    pub(super) fn round(&mut self, tell: Told<'_>) -> Result<(), Failure> {
        let mut times = Vec::with_capacity(self.subjects.len() * self.companies.len());
        for (done, subject) in self.subjects.iter().enumerate() {
            tell(done as f64 / self.subjects.len() as f64, &subject.3.name)?;
            for &company in &self.companies {
                let warm = self.time(subject, company, Before::Nothing)?;
                let cold = self.time(subject, company, Before::Sweep(&self.sweep))?;
                times.push(Temperatures { warm, cold });
            }
        }
        self.rounds.push(times);
        Ok(())
    }

    fn time(
        &self,
        (plan, template, subject, _): &Timed,
        (ranks, threads): (u32, usize),
        before: Before<'_>,
    ) -> Result<Seconds, Failure> {
        let (threads, stop) = (number(threads), self.stop);
        let effort = self.request.effort() / ROUNDS;
        let conditions = Conditions { ranks, threads, before, effort, stop };
        let plan = &self.probes.plans[*plan];
        let time = || Ok(probe::time(plan, *template, *subject, &conditions)?);
        // Threads that work on the same are as fast as their cores are near.
        let time = if threads.get() > 1 { self.steady.measure(time) } else { time() }?;
        Ok(Seconds(time.0.max(1e-10)))
    }

    /// One table for each kernel and number of threads.
    pub(super) fn tables(&self) -> Vec<KernelTable> {
        let (cores, threads) = (self.request.all_cores(), self.request.threads.get());
        let mut tables: Vec<KernelTable> = Vec::new();
        for (nth, (.., used)) in self.subjects.iter().enumerate() {
            let of = |company: (u32, usize)| {
                let at = self.companies.iter().position(|known| *known == company)?;
                let times = || self.rounds.iter().map(|r| r[nth * self.companies.len() + at]);
                let warm = middle(times().map(|time| time.warm));
                Some(Temperatures { warm, cold: middle(times().map(|time| time.cold)) })
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
            if let Some(alone) = of((1, 1)) {
                keep(1, alone, of((cores, 1)).unwrap_or(alone));
            }
            if let Some(alone) = of((1, threads)).filter(|_| threads > 1) {
                keep(threads, alone, alone);
            }
        }
        tables
    }
}

/// The time in the middle.
fn middle(times: impl Iterator<Item = Seconds>) -> Seconds {
    let mut times: Vec<Seconds> = times.collect();
    times.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    times.get(times.len() / 2).copied().unwrap_or(Seconds::ZERO)
}

/// The rate of copies by how much is copied.
pub(super) fn memory(
    probes: &Probes,
    request: &Request,
    stop: &AtomicBool,
) -> Result<Memory, Failure> {
    let cores = request.all_cores();
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
