//! Times kernels and memory copies.

use super::core_placement::PlacementMonitor;
use super::shapes::Probes;
use super::{DTYPE, ROUNDS, Report, Request, host, number};
use crate::failure::Failure;
use paceline_exec::probe::{self, CacheFlush, CachePrep, Conditions, ProbeTarget};
use paceline_plan::program::AccumulateMode;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::measured::{CopyRate, KernelTable, Memory, Sample, WarmCold};
use paceline_sim::compute::{KernelUse, accumulate_kernel, step_kernel};
use std::sync::atomic::AtomicBool;

/// Element counts of optimizer steps, sums and copies.
const ELEMENTS: [u64; 5] = [1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23];

/// Kernels, and their times in every round.
pub(super) struct Kernels<'a> {
    probes: &'a Probes,
    request: &'a Request,
    steady: &'a PlacementMonitor<'a>,
    stop: &'a AtomicBool,
    subjects: Vec<Timed>,
    /// Number of concurrent ranks and threads per rank.
    companies: Vec<(u32, usize)>,
    sweep: CacheFlush,
    /// Times by round, then by subject and company.
    rounds: Vec<Vec<WarmCold>>,
}

/// Index of the plan, index of its template, the probe target, and the kernel it measures.
type Timed = (usize, usize, ProbeTarget, KernelUse);

impl<'a> Kernels<'a> {
    pub(super) fn new(
        probes: &'a Probes,
        request: &'a Request,
        (steady, stop): (&'a PlacementMonitor<'a>, &'a AtomicBool),
    ) -> Self {
        let optimizer = probes.plans[0].strategy.optimizer;
        let mut subjects: Vec<Timed> = (probes.operators.iter())
            .map(|p| (p.plan, p.template, ProbeTarget::Operator(p.op), p.used.clone()))
            .collect();
        for elements in ELEMENTS {
            for phase in optimizer.phases() {
                let step = step_kernel(optimizer, *phase, DTYPE, elements);
                subjects.push((0, 0, ProbeTarget::Step(elements, *phase), step));
            }
            for mode in [AccumulateMode::Add, AccumulateMode::Move] {
                let used = accumulate_kernel(mode, DTYPE, elements);
                subjects.push((0, 0, ProbeTarget::Accumulate(elements, mode), used));
            }
        }
        let (cores, threads) = (request.all_cores(), request.threads.get());
        let mut companies = vec![(1, 1)];
        companies.extend((cores > 1).then_some((cores, 1)));
        companies.extend((threads > 1).then_some((1, threads)));
        let (sweep, rounds) = (CacheFlush::new(cores, host::cache()), Vec::new());
        Self { probes, request, steady, stop, subjects, companies, sweep, rounds }
    }

    /// Times every kernel once more.
    pub(super) fn round(&mut self, report: Report<'_>) -> Result<(), Failure> {
        let mut times = Vec::with_capacity(self.subjects.len() * self.companies.len());
        for (done, subject) in self.subjects.iter().enumerate() {
            report(done as f64 / self.subjects.len() as f64, &subject.3.name)?;
            for &company in &self.companies {
                let warm = self.time(subject, company, CachePrep::Warm)?;
                let cold = self.time(subject, company, CachePrep::Flush(&self.sweep))?;
                times.push(WarmCold { warm, cold });
            }
        }
        self.rounds.push(times);
        Ok(())
    }

    fn time(
        &self,
        (plan, template, subject, _): &Timed,
        (ranks, threads): (u32, usize),
        before: CachePrep<'_>,
    ) -> Result<Seconds, Failure> {
        let (threads, stop) = (number(threads), self.stop);
        let effort = self.request.effort() / ROUNDS;
        let conditions = Conditions { ranks, threads, before, effort, stop };
        let plan = &self.probes.plans[*plan];
        let time = || Ok(probe::time(plan, *template, *subject, &conditions)?);
        // The speed of cooperating threads depends on the core placement.
        let time = if threads.get() > 1 { self.steady.measure(time) } else { time() }?;
        Ok(Seconds(time.0.max(1e-10)))
    }

    /// One table per kernel and thread count.
    pub(super) fn tables(&self) -> Vec<KernelTable> {
        let (cores, threads) = (self.request.all_cores(), self.request.threads.get());
        let mut tables: Vec<KernelTable> = Vec::new();
        for (nth, (.., used)) in self.subjects.iter().enumerate() {
            let of = |company: (u32, usize)| {
                let at = self.companies.iter().position(|known| *known == company)?;
                let times = || self.rounds.iter().map(|r| r[nth * self.companies.len() + at]);
                let warm = middle(times().map(|time| time.warm));
                Some(WarmCold { warm, cold: middle(times().map(|time| time.cold)) })
            };
            let mut keep = |threads: usize, solo, all_cores| {
                let sample = Sample { shape: used.shape.clone(), work: used.work, solo, all_cores };
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
            if let Some(solo) = of((1, 1)) {
                keep(1, solo, of((cores, 1)).unwrap_or(solo));
            }
            if let Some(solo) = of((1, threads)).filter(|_| threads > 1) {
                keep(threads, solo, solo);
            }
        }
        tables
    }
}

/// The median time.
fn middle(times: impl Iterator<Item = Seconds>) -> Seconds {
    let mut times: Vec<Seconds> = times.collect();
    times.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    times.get(times.len() / 2).copied().unwrap_or(Seconds::ZERO)
}

/// Measures copy bandwidth by size.
pub(super) fn memory(
    probes: &Probes,
    request: &Request,
    stop: &AtomicBool,
) -> Result<Memory, Failure> {
    let cores = request.all_cores();
    let largest = host::cache() * 3;
    let sizes = (14..40).map(|power| 1u64 << power).take_while(|bytes| *bytes < 2 * largest);
    let rate = |bytes: u64, ranks| {
        // Half of the bytes are read, half are written.
        let subject = ProbeTarget::Accumulate(bytes / 8, AccumulateMode::Move);
        let (threads, effort) = (number(1), request.effort());
        let conditions = Conditions { ranks, threads, before: CachePrep::Warm, effort, stop };
        let time = probe::time(&probes.plans[0], 0, subject, &conditions)?;
        Ok::<_, Failure>(BytesPerSec(bytes as f64 / time.0.max(1e-10)))
    };
    let copy = |bytes| {
        let solo = rate(bytes, 1)?;
        let all_cores = if cores > 1 { rate(bytes, cores)? } else { solo };
        Ok(CopyRate { bytes: Bytes(bytes), solo, all_cores })
    };
    Ok(Memory { copy_bandwidth: sizes.step_by(2).map(copy).collect::<Result<_, Failure>>()? })
}
