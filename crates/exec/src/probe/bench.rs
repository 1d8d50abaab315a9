//! One-op program of a probe, and the arena it works on.

use super::ProbeTarget;
use crate::device::Device;
use crate::device::cpu::step::Rule;
use crate::device::cpu::{Cpu, Kernels};
use crate::error::{ExecError, Fault};
use crate::memory::Memory;
use crate::rank_coords::RankCoords;
use crate::run::check;
use crate::run::loss_scale::LossScale;
use crate::run::options::TrainOptions;
use crate::types::Types;
use paceline_comm::Transport;
use paceline_kernels::arena::{Access, ArenaError};
use paceline_kernels::pool::Pool;
use paceline_kernels::{Bf16, Element, F16, reduce};
use paceline_plan::DType;
use paceline_plan::graph::{BLOCK, Init};
use paceline_plan::ids::{BufferId, Rank};
use paceline_plan::program::{
    self, AccumulateMode, Bucket, Buffer, Entry, MemoryKind, Plan, Program, Segment, Template,
    TensorNorms, View,
};
use paceline_plan::spec::Placement;
use paceline_plan::strategy::Strategy;
use paceline_plan::units::Bytes;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One-op plan of a probe target.
pub(super) struct Bench {
    plan: Plan,
    kernels: Arc<Kernels>,
    types: Types,
    vocab: u32,
    subject: ProbeTarget,
}

impl Bench {
    /// Builds the plan; `lender` supplies the template that an operator belongs to.
    pub(super) fn new(
        lender: &Plan,
        template: usize,
        subject: ProbeTarget,
    ) -> Result<Self, ExecError> {
        let vocab = lender.samples.classes();
        let template = match subject {
            ProbeTarget::Operator(op) => {
                let whole = &lender.templates[template];
                Template { ops: vec![whole.ops[op].clone()], ..whole.clone() }
            }
            ProbeTarget::Step(..) | ProbeTarget::Accumulate(..) => {
                let whole = &lender.templates[template];
                Template { ops: Vec::new(), operands: Vec::new(), ..whole.clone() }
            }
        };
        let mut buffers = match subject {
            ProbeTarget::Operator(_) => operands(&template),
            ProbeTarget::Step(elements, _) => {
                let strategy = &lender.strategy;
                let (optimizer, act) = (strategy.optimizer, strategy.activation_dtype());
                let elements = elements.next_multiple_of(BLOCK);
                let state = usize::from(act != DType::F32) + optimizer.moments();
                let mut buffers =
                    vec![buffer(act, elements), buffer(strategy.grad_dtype, elements)];
                buffers.extend(vec![buffer(DType::F32, elements); state]);
                if optimizer.needs_tensor_norms() {
                    let blocks = elements / BLOCK;
                    buffers.extend([blocks, blocks, 2].map(|len| buffer(DType::F32, len)));
                }
                buffers
            }
            ProbeTarget::Accumulate(elements, _) => vec![buffer(DType::F32, elements); 2],
        };
        let mut end = Bytes(0);
        for buffer in &mut buffers {
            buffer.offset = end;
            end += buffer.extent();
        }
        let mut by_kind = program::Memory::default().by_kind;
        by_kind[MemoryKind::Activations as usize] = end;
        let whole = |(at, buffer): (usize, &Buffer)| View {
            buffer: BufferId::from(at),
            offset: 0,
            len: buffer.elements,
        };
        let views: Vec<View> = buffers.iter().enumerate().map(whole).collect();
        let buckets = match subject {
            ProbeTarget::Step(elements, _) => {
                let elements = elements.next_multiple_of(BLOCK);
                vec![bucket(elements, &lender.strategy, &views)]
            }
            ProbeTarget::Operator(_) | ProbeTarget::Accumulate(..) => {
                lender.programs[0].buckets.clone()
            }
        };
        let program = Program {
            buffers,
            buckets,
            segments: vec![Segment { template: 0, layer: None, operands: views }],
            memory: program::Memory { by_kind },
            ..lender.programs[0].clone()
        };
        let plan = Plan { templates: vec![template], programs: vec![program], ..lender.clone() };
        let types = check::types(&plan)?;
        let kernels = Arc::new(Cpu::bind(&plan, types)?);
        Ok(Self { plan, kernels, types, vocab, subject })
    }

    /// Allocates one rank's memory and fills it with plausible values.
    pub(super) fn set_up(
        &self,
        transport: &mut dyn Transport,
        threads: NonZeroUsize,
    ) -> Result<OpRunner<'_>, ExecError> {
        let rank = transport.rank();
        let program = &self.plan.programs[0];
        let memory = Memory::new(program, transport).map_err(|source| ExecError::Op {
            rank,
            iteration: 1,
            op: "start".into(),
            source,
        })?;
        let place = RankCoords::of(&self.plan, Rank(0));
        let pool = Pool::new(threads).map_err(|source| ExecError::Thread { rank, source })?;
        let compute = Cpu::new(&self.plan, &self.kernels, self.types, place, self.vocab, pool);
        let stand = OpRunner { bench: self, rank, memory, place, compute };
        stand.fill().map_err(|source| ExecError::Memory { rank, source: source.into() })?;
        Ok(stand)
    }
}

/// Longer than a thread takes to wake up.
const UP: Duration = Duration::from_micros(200);

/// Rank that is ready to run the op repeatedly.
pub(super) struct OpRunner<'b> {
    bench: &'b Bench,
    rank: Rank,
    memory: Memory<'b>,
    place: RankCoords,
    compute: Cpu,
}

impl OpRunner<'_> {
    /// Wakes all threads of the rank and keeps them busy briefly: in training they seldom sleep.
    pub(super) fn wake(&self) {
        let pool = self.compute.pool();
        if pool.threads() > 1 {
            pool.for_each(pool.threads(), |_| {
                let began = Instant::now();
                while began.elapsed() < UP {
                    std::hint::spin_loop();
                }
            });
        }
    }

    /// Runs the op once.
    pub(super) fn run(&mut self) -> Result<(), ExecError> {
        let program = &self.bench.plan.programs[0];
        let done: Result<(), Fault> = match self.bench.subject {
            ProbeTarget::Operator(_) => {
                let template = &self.bench.plan.templates[0];
                let what = (template, &program.segments[0]);
                self.compute.segment(0, &self.memory, what, 0, false)
            }
            ProbeTarget::Step(_, phase) => {
                let options = TrainOptions::default();
                let strategy = &self.bench.plan.strategy;
                let scale = LossScale::new(strategy, &options);
                let rule = Rule::new(strategy, &options, 1000, Some(1.0), &scale);
                let (types, pool) = (self.bench.types, self.compute.pool());
                rule.step(types, &self.memory, pool, self.place, &program.buckets[0], phase, 0)
                    .map_err(Fault::from)
            }
            ProbeTarget::Accumulate(_, mode) => self.accumulate(mode).map_err(Fault::from),
        };
        let (rank, iteration) = (self.rank, 1);
        done.map_err(|source| ExecError::Op { rank, iteration, op: "a probe".into(), source })
    }

    fn accumulate(&self, mode: AccumulateMode) -> Result<(), ArenaError> {
        let [from, into] = [0, 1].map(|buffer| self.memory.whole(BufferId(buffer), 0));
        match mode {
            AccumulateMode::Move => self.memory.copy(from, into),
            AccumulateMode::Add => {
                let views = self.memory.views(&[(from, Access::Read), (into, Access::Write)])?;
                reduce::add::<f32>(views.slice(0), views.take(1));
                Ok(())
            }
        }
    }

    /// Fills every buffer: token ids of the vocabulary, and values of normal magnitude, because
    /// arithmetic on subnormal numbers takes many times as long.
    fn fill(&self) -> Result<(), ArenaError> {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 40
        };
        for (at, buffer) in self.bench.plan.programs[0].buffers.iter().enumerate() {
            let span = self.memory.whole(BufferId::from(at), 0);
            let views = self.memory.views(&[(span, Access::Write)])?;
            match buffer.dtype {
                DType::U32 => views.take_u32(0).iter_mut().for_each(|id| {
                    *id = (next() % u64::from(self.bench.vocab.max(1))) as u32;
                }),
                DType::F32 => sane::<f32>(views.take(0), &mut next),
                DType::Bf16 => sane::<Bf16>(views.take(0), &mut next),
                DType::F16 => sane::<F16>(views.take(0), &mut next),
                // No op computes on these.
                DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::U8 => {}
            }
        }
        Ok(())
    }
}

/// Fills a slice with numbers between 0.25 and 3.
fn sane<T: Element>(values: &mut [T], next: &mut impl FnMut() -> u64) {
    values.iter_mut().for_each(|value| {
        *value = T::narrow(0.25 + next() as f32 / (1 << 25) as f32);
    });
}

fn operands(template: &Template) -> Vec<Buffer> {
    let used = |at: usize| {
        let op = &template.ops[0];
        let all = op.inputs.iter().chain(&op.params).chain(&op.outputs);
        all.into_iter().any(|&i| usize::from(i) == at)
    };
    let operand = |(at, operand): (usize, &program::Operand)| {
        // The template's other operators do not run, so their operands need no memory.
        buffer(operand.dtype, if used(at) { operand.elements() } else { 0 })
    };
    template.operands.iter().enumerate().map(operand).collect()
}

fn buffer(dtype: DType, elements: u64) -> Buffer {
    let (name, kind) = ("probe".to_owned(), MemoryKind::Activations);
    Buffer { name, dtype, elements, copies: 1, kind, offset: Bytes(0) }
}

/// Bucket of one tensor: parameters, gradients, a master copy if parameters are rounded, moments,
/// and the sums of the tensor norms if there are any.
fn bucket(elements: u64, strategy: &Strategy, views: &[View]) -> Bucket {
    let (master, rest) =
        views[2..].split_at(usize::from(strategy.activation_dtype() != DType::F32));
    let (moments, sums) = rest.split_at(strategy.optimizer.moments());
    let entry = Entry {
        name: "probe".into(),
        dims: [1, elements],
        blocks: Vec::new(),
        experts: 0,
        tp: Placement::Replicate,
        local: [1, elements],
        offset: 0,
        init: Init::Zero,
        decay: true,
        running: false,
        sparse: false,
        counted: true,
        norm_entry: 0,
    };
    Bucket {
        name: "probe".into(),
        elements,
        entries: vec![entry],
        params: views[0],
        grads: views[1],
        master: master.first().copied(),
        moments: moments.to_vec(),
        offloaded: Vec::new(),
        tensor_norms: match *sums {
            [weights, directions, tensors] => Some(TensorNorms { weights, directions, tensors }),
            _ => None,
        },
        shard: None,
        updated: true,
    }
}
