//! `paceline bench kernels`: kernel performance of this machine.

use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, Origins, Problems, StrategyFlags, real, whole,
};
use crate::overview::{percent, table};
use clap::Args;
use paceline_exec::probe::{self, CachePrep, Conditions, ProbeTarget};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::ids::Rank;
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::program::{AccumulateMode, Op, Plan, StepPhase};
use paceline_plan::strategy::Strategy;
use paceline_plan::units::Seconds;
use paceline_sim::compute::{KernelUse, accumulate_kernel, kernel, step_kernel};
use serde::Serialize;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Measure the kernels of a model on this machine
///
/// Times every kernel that one rank of a layout runs in an iteration, on the shapes it has there,
/// as training runs it. GEMMs and attention are reported in GFLOP/s, next to the best GEMM seen on
/// this machine. All others are reported in GB/s, next to a plain copy or sum of the same number of
/// bytes.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    strategy: StrategyFlags,
    /// Rank whose kernels are timed; stages and servers differ [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Measuring")]
    rank: Option<String>,
    /// Compute threads of the rank [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Measuring")]
    threads_per_rank: Option<String>,
    /// Milliseconds to spend on each kernel [default: 50]
    #[arg(long, value_name = "MS", allow_negative_numbers = true, help_heading = "Measuring")]
    budget: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline bench kernels --model gpt2-124m --seq 256 --micro-batch 2
  paceline bench kernels --model mini --tp 2 --pp 2 --rank 2    one of the last stage
  paceline bench kernels --model mini --threads-per-rank 2 --json";

/// Upper limit of --threads-per-rank: more than any processor has cores.
const MOST_THREADS: u64 = 1024;
/// Upper limit of --budget, in milliseconds.
const LONGEST: f64 = 60_000.0;

/// Measures and prints the kernels.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let threads = whole(
        "--threads-per-rank",
        flags.threads_per_rank.as_deref(),
        1..=MOST_THREADS,
        &mut problems,
    );
    let budget = real("--budget", flags.budget.as_deref(), 0.0..=LONGEST, &mut problems);
    let defaults = Defaults {
        dtype: DType::F32,
        order: SummationOrder::Canonical,
        expert_buffer_factor: 2.0,
        one_host: true,
        shm_domain: None,
        library: None,
        limit: None,
    };
    let on: Option<(&ClusterFlags, _)> = None;
    let request = flags.strategy.check(defaults, on, &mut problems);
    let world = request.as_ref().map_or(u32::MAX, |request| request.plan.mesh.world());
    let last = u64::from(world.saturating_sub(1));
    let rank = whole("--rank", flags.rank.as_deref(), 0..=last, &mut problems).unwrap_or(0);
    let rank = u32::try_from(rank).unwrap_or(u32::MAX);
    let Some(request) = request.filter(|_| problems.is_empty()) else {
        return Err(problems.into());
    };
    let mut plan = request.plan;
    paceline_exec::can_run(&plan, paceline_exec::Device::Cpu)?;
    // Probes run the first program.
    let role = plan.role(Rank(rank)).index();
    plan.programs.swap(0, role);
    let bench = Bench {
        plan,
        threads: threads
            .and_then(|threads| NonZeroUsize::new(usize::try_from(threads).ok()?))
            .unwrap_or(NonZeroUsize::MIN),
        effort: Duration::from_secs_f64(budget.unwrap_or(50.0) / 1e3),
        stop: AtomicBool::new(false),
    };
    let output = flags.common.output();
    let (rows, best) = bench.measure()?;
    for row in &rows {
        output.print_json(row)?;
    }
    let sum = Sum::of(&bench, &rows, best);
    output.print_json(&sum)?;
    if output.is_json() { Ok(()) } else { Ok(output.print(&summary(&rows, &sum))?) }
}

struct Bench {
    plan: Plan,
    threads: NonZeroUsize,
    effort: Duration,
    stop: AtomicBool,
}

/// A kernel on one shape.
#[derive(Debug, Serialize)]
struct Row {
    kernel: String,
    dtype: String,
    shape: Vec<u64>,
    /// Number of uses per iteration.
    uses: u64,
    median_us: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    gflops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
    /// Its rate relative to the best GEMM, or to a copy or sum of the same number of bytes.
    of_peak: f64,
    /// Its share of the time of all kernels in an iteration.
    share: f64,
}

/// Totals over all kernels.
#[derive(Serialize)]
struct Sum {
    model: String,
    threads: usize,
    kernels: usize,
    /// Time of all kernels in an iteration.
    compute_s: f64,
    /// Rate of the best GEMM seen.
    peak_gflops: f64,
}

impl Sum {
    fn of(bench: &Bench, rows: &[Row], best: f64) -> Self {
        let compute_s = rows.iter().map(|row| row.uses as f64 * row.median_us * 1e-6).sum();
        Self {
            model: bench.plan.model.clone(),
            threads: bench.threads.get(),
            kernels: rows.len(),
            compute_s,
            peak_gflops: best / 1e9,
        }
    }
}

/// A kernel to time, and its number of uses per iteration.
struct Timed {
    template: usize,
    subject: ProbeTarget,
    used: KernelUse,
    uses: u64,
}

impl Bench {
    /// The kernels, sorted by their share of an iteration, and the rate of the best GEMM.
    fn measure(&self) -> Result<(Vec<Row>, f64), Failure> {
        let mut timed = Vec::new();
        let mut best = self.best_product()?;
        for kernel in self.kernels() {
            let time = self.time(&self.plan, kernel.template, kernel.subject, 1, self.threads)?;
            if is_product(&kernel.used) {
                best = best.max(kernel.used.work / time.0);
            }
            timed.push((kernel, time));
        }
        let whole: f64 = timed.iter().map(|(kernel, time)| kernel.uses as f64 * time.0).sum();
        let mut plain = BTreeMap::new();
        let mut rows = Vec::new();
        for (Timed { used, uses, subject, .. }, time) in timed {
            let product = is_product(&used);
            let work = if product { used.work } else { self.bytes(&used, subject) };
            let rate = work / time.0;
            let peak = if product { best } else { self.plain_rate(work, &mut plain)? };
            rows.push(Row {
                kernel: used.name,
                dtype: used.dtype.to_string(),
                shape: used.shape,
                uses,
                median_us: time.0 * 1e6,
                gflops: product.then_some(rate / 1e9),
                gbps: (!product).then_some(rate / 1e9),
                of_peak: rate / peak,
                share: uses as f64 * time.0 / whole,
            });
        }
        rows.sort_by(|a, b| b.share.total_cmp(&a.share));
        Ok((rows, best))
    }

    /// Every kernel and shape that an iteration of the rank runs, each once.
    fn kernels(&self) -> Vec<Timed> {
        let program = &self.plan.programs[0];
        let mut found: Vec<Timed> = Vec::new();
        let mut note = |template, subject, used: KernelUse| {
            let same = |t: &&mut Timed| (&t.used.name, &t.used.shape) == (&used.name, &used.shape);
            match found.iter_mut().find(same) {
                Some(timed) => timed.uses += 1,
                None => found.push(Timed { template, subject, used, uses: 1 }),
            }
        };
        for node in &program.body.nodes {
            match node.op {
                Op::Compute { segment, .. } => {
                    let at = program.segment(segment).template as usize;
                    let template = &self.plan.templates[at];
                    for (index, op) in template.ops.iter().enumerate() {
                        note(at, ProbeTarget::Operator(index), kernel(template, op));
                    }
                }
                Op::Step { bucket, phase } => {
                    let (bucket, strategy) =
                        (&program.buckets[bucket as usize], &self.plan.strategy);
                    let group = bucket.shard.map(|group| self.plan.group(group));
                    let parts = group.map_or(1, |group| self.plan.mesh.group_size(group));
                    let elements = bucket.elements / u64::from(parts.max(1));
                    if !bucket.updated {
                        continue;
                    }
                    let used = step_kernel(
                        strategy.optimizer,
                        phase,
                        strategy.activation_dtype(),
                        elements,
                    );
                    note(0, ProbeTarget::Step(elements, phase), used);
                }
                Op::Accumulate { from, mode, .. } => {
                    let dtype = program.buffer(from.buffer).dtype;
                    let used = accumulate_kernel(mode, dtype, from.len);
                    note(0, ProbeTarget::Accumulate(from.len, mode), used);
                }
                Op::Load { .. }
                | Op::Send { .. }
                | Op::Recv { .. }
                | Op::Collective { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Free { .. }
                | Op::Serve { .. } => {}
            }
        }
        found
    }

    /// Bytes read and written by a kernel that is not a GEMM.
    fn bytes(&self, used: &KernelUse, subject: ProbeTarget) -> f64 {
        match subject {
            ProbeTarget::Operator(_) => used.work,
            ProbeTarget::Accumulate(elements, mode) => {
                // Probes of sums and copies use f32.
                (elements * 4 * touched(mode)) as f64
            }
            ProbeTarget::Step(elements, phase) => {
                let strategy = &self.plan.strategy;
                let (act, grad) = (strategy.activation_dtype().size(), strategy.grad_dtype.size());
                let rounded = if strategy.activation_dtype() == DType::F32 { 0 } else { act };
                let moments = 4 * strategy.optimizer.moments() as u64;
                let has_norms = strategy.optimizer.needs_tensor_norms();
                let each = match phase {
                    StepPhase::TensorNorms => 4 + grad + 2 * moments,
                    StepPhase::LocalMomentum => 2 * grad + moments / 2,
                    StepPhase::ApplyMomentum => 8 + rounded + grad + moments + moments / 2,
                    StepPhase::Apply if has_norms => 8 + rounded + moments,
                    StepPhase::Apply => 8 + rounded + grad + 2 * moments,
                };
                (elements * each) as f64
            }
        }
    }

    /// Rate of a large GEMM of this dtype, as the processor's attainable peak.
    fn best_product(&self) -> Result<f64, Failure> {
        let strategy = Strategy {
            dtype: self.plan.strategy.dtype,
            grad_dtype: self.plan.strategy.grad_dtype,
            seq: 512,
            ..Strategy::default()
        };
        let wrong =
            |error: String| Failure::Run(anyhow::anyhow!("a probe is not a model: {error}"));
        let model = Model::parse(LARGE, "probe.toml").map_err(|error| wrong(error.to_string()))?;
        let plan = lower(&model, &strategy).map_err(|error| wrong(error.to_string()))?;
        let mut best: f64 = 1.0;
        for (at, template) in plan.templates.iter().enumerate() {
            for (index, op) in template.ops.iter().enumerate() {
                let used = kernel(template, op);
                if used.name.starts_with("linear.") && used.shape == [512, 1024, 4096] {
                    let subject = ProbeTarget::Operator(index);
                    let time = self.time(&plan, at, subject, 1, self.threads)?;
                    best = best.max(used.work / time.0);
                }
            }
        }
        Ok(best)
    }

    /// Rate at which the same number of threads streams `bytes` bytes without computing: the faster
    /// of a copy and a sum, because some machines read faster than they write.
    fn plain_rate(&self, bytes: f64, known: &mut BTreeMap<u64, f64>) -> Result<f64, Failure> {
        let ranks = u32::try_from(self.threads.get()).unwrap_or(u32::MAX);
        let each = (bytes / f64::from(ranks)).max(256.0) as u64;
        if let Some(rate) = known.get(&each) {
            return Ok(*rate);
        }
        let mut best: f64 = 1.0;
        for mode in [AccumulateMode::Move, AccumulateMode::Add] {
            let elements = each / (4 * touched(mode));
            let subject = ProbeTarget::Accumulate(elements, mode);
            let time = self.time(&self.plan, 0, subject, ranks, NonZeroUsize::MIN)?;
            let moved = elements * 4 * touched(mode) * u64::from(ranks);
            best = best.max(moved as f64 / time.0);
        }
        known.insert(each, best);
        Ok(best)
    }

    fn time(
        &self,
        plan: &Plan,
        template: usize,
        subject: ProbeTarget,
        ranks: u32,
        threads: NonZeroUsize,
    ) -> Result<Seconds, Failure> {
        let (effort, stop) = (self.effort, &self.stop);
        let conditions = Conditions { ranks, threads, before: CachePrep::Warm, effort, stop };
        let time = probe::time(plan, template, subject, &conditions)?;
        Ok(Seconds(time.0.max(1e-10)))
    }
}

/// A layer with large GEMMs.
const LARGE: &str = "\
kind = \"gpt2\"
layers = 1
d_model = 1024
heads = 16
ffn = 4096
seq = 512
vocab = 256
tied = true
";

/// Number of memory accesses per element of a sum or a copy.
fn touched(mode: AccumulateMode) -> u64 {
    match mode {
        AccumulateMode::Add => 3,
        AccumulateMode::Move => 2,
    }
}

/// Returns true if a kernel's rate is reported in FLOP/s.
fn is_product(used: &KernelUse) -> bool {
    used.shape.len() == 3
}

fn summary(rows: &[Row], sum: &Sum) -> String {
    let lines = rows.iter().map(|row| {
        let shape: Vec<String> = row.shape.iter().map(u64::to_string).collect();
        let (rate, unit) = match (row.gflops, row.gbps) {
            (Some(rate), _) => (rate, "GFLOP/s"),
            (None, rate) => (rate.unwrap_or(0.0), "GB/s"),
        };
        vec![
            row.kernel.clone(),
            shape.join("×"),
            row.uses.to_string(),
            format!("{:.1}", row.median_us),
            format!("{rate:.1} {unit:<7}"),
            percent(row.of_peak),
            percent(row.share),
        ]
    });
    let head = ["kernel", "shape", "uses", "µs", "rate", "of peak", "of all"];
    let mut text = table(&head, 2, lines);
    let Sum { compute_s, peak_gflops, threads, .. } = sum;
    let plural = if *threads == 1 { "" } else { "s" };
    text += &format!(
        "\nall kernels of an iteration: {} with {threads} thread{plural}\n\
         peak: {peak_gflops:.1} GFLOP/s, the best product seen; for the others, a copy or a sum of as many bytes\n",
        Seconds(*compute_s)
    );
    text
}
