//! Fused kernels: several operators at once.

use crate::device::cpu::Cpu;
use crate::device::cpu::fuse::FusedKernel;
use crate::device::cpu::operands::Operands;
use crate::device::cpu::ops::norm::least;
use crate::device::cpu::tiles::{elements, over_rows};
use crate::device::{OpShape, Operator};
use crate::error::Fault;
use crate::types::Float;
use paceline_kernels::linear::{self, Epilogue};
use paceline_kernels::pool::strips;
use paceline_kernels::{Bf16, Element, F16, Write, activation, loss, norm, reduce};
use paceline_plan::graph::{ActivationKind, NormKind};

impl Operator<Cpu> for FusedKernel {
    fn workspace(&self, _: &OpShape<'_>, _: usize) -> usize {
        0
    }

    fn run(&self, cpu: &mut Cpu, on: &Operands<'_>, _: Write) -> Result<(), Fault> {
        match cpu.types.activation {
            Float::F32 => self.run_as::<f32>(cpu, on),
            Float::Bf16 => self.run_as::<Bf16>(cpu, on),
            Float::F16 => self.run_as::<F16>(cpu, on),
        }
        Ok(())
    }
}

impl FusedKernel {
    fn run_as<T: Element>(&self, cpu: &mut Cpu, on: &Operands<'_>) {
        let pool = &cpu.pool;
        match *self {
            FusedKernel::Linear { bias, residual, activation } => {
                let (x, w) = (on.input::<T>(0), on.param::<T>(0));
                let after = Epilogue {
                    bias: bias.then(|| on.param(1)),
                    residual: residual.then(|| on.input(1)),
                    active: activation.map(|function| (forward(function), on.output(1))),
                };
                let sums = &mut cpu.workspace;
                linear::forward_and(pool, on.linear(), x, w, on.output(0), after, sums);
            }
            FusedKernel::LinearInput(function) => {
                let (dy, w) = (on.input::<T>(0), on.param::<T>(0));
                let before = (gradient(function), on.input::<T>(1));
                let (dx, sums) = (on.output(0), &mut cpu.workspace);
                linear::input_gradient_through(pool, on.linear(), dy, w, before, dx, sums);
            }
            FusedKernel::AddNorm { norm, eps } => {
                let (shape, a, b) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
                let gain = on.param::<T>(0);
                let (bias, width): (&[T], _) = match norm {
                    NormKind::Layer => (on.param(1), 2),
                    NormKind::LayerGain => (&[], 2),
                    NormKind::Rms | NormKind::RmsUnit => (&[], 1),
                };
                let [sum, y] = [0, 1].map(|i| strips(on.output::<T>(i), shape.width));
                let outputs = (sum, y, strips(on.output(2), width));
                over_rows(pool, shape, outputs, |part, at, (sum, y, stats)| {
                    let at = elements(shape, &at);
                    reduce::add3(&a[at.clone()], &b[at], sum);
                    match norm {
                        NormKind::Layer | NormKind::LayerGain => {
                            norm::layer_norm_forward(part, eps, sum, gain, bias, y, stats);
                        }
                        NormKind::Rms | NormKind::RmsUnit => {
                            let least = least(norm);
                            norm::rms_norm_forward_from(part, eps, least, sum, gain, y, stats);
                        }
                    }
                });
            }
            FusedKernel::NormInputAdd { norm } => {
                let (shape, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
                let (gain, stats) = (on.param::<T>(0), on.input::<f32>(2));
                let so_far = on.input::<T>(3);
                over_rows(pool, shape, strips(on.output(0), shape.width), |part, rows, dx| {
                    let at = elements(shape, &rows);
                    let (dy, x) = (&dy[at.clone()], &x[at.clone()]);
                    match norm {
                        NormKind::Layer | NormKind::LayerGain => {
                            let stats = &stats[2 * rows.start..2 * rows.end];
                            norm::layer_norm_input_gradient(part, dy, x, gain, stats, dx);
                        }
                        NormKind::Rms | NormKind::RmsUnit => {
                            let (least, stats) = (least(norm), &stats[rows]);
                            norm::rms_norm_input_gradient_from(part, least, dy, x, gain, stats, dx);
                        }
                    }
                    reduce::add(&so_far[at], dx);
                });
            }
            FusedKernel::RowMaxStats => {
                let (shape, logits, targets) = (on.rows(0), on.input::<T>(0), on.ids(1));
                let columns = cpu.columns(shape);
                let outputs = (strips(on.output(0), 1), strips(on.output(1), 2));
                over_rows(pool, shape, outputs, |part, at, (max, stats)| {
                    let logits = &logits[elements(shape, &at)];
                    loss::row_max(part, columns, logits, max);
                    loss::softmax_stats(part, columns, logits, max, &targets[at], stats);
                });
            }
        }
    }
}

fn forward<T: Element>(function: ActivationKind) -> linear::Forward<T> {
    match function {
        ActivationKind::Gelu => activation::gelu_tanh_forward,
        ActivationKind::Relu => activation::relu_forward,
        ActivationKind::SquaredRelu => activation::squared_relu_forward,
        ActivationKind::GeluErf => activation::gelu_erf_forward,
    }
}

fn gradient<T: Element>(function: ActivationKind) -> linear::Gradient<T> {
    match function {
        ActivationKind::Gelu => activation::gelu_tanh_input_gradient,
        ActivationKind::Relu => activation::relu_input_gradient,
        ActivationKind::SquaredRelu => activation::squared_relu_input_gradient,
        ActivationKind::GeluErf => activation::gelu_erf_input_gradient,
    }
}

#[cfg(test)]
mod tests {
    use crate::device::Device;
    use crate::device::cpu::fuse::Step;
    use crate::device::cpu::{Cpu, Kernels};
    use crate::memory::Memory;
    use crate::rank_coords::RankCoords;
    use crate::run::check;
    use paceline_comm::thread::world;
    use paceline_kernels::arena::{Access, Span};
    use paceline_kernels::pool::Pool;
    use paceline_kernels::{Bf16, Element, F16};
    use paceline_plan::DType;
    use paceline_plan::ids::Rank;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::program::{Plan, Segment};
    use paceline_plan::strategy::Strategy;
    use std::collections::BTreeSet;
    use std::num::NonZeroUsize;
    use std::sync::Arc;

    /// Fills a segment's operands with reproducible numbers.
    fn fill(memory: &Memory<'_>, plan: &Plan, segment: &Segment, vocab: u32) {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as u32
        };
        let operands = &plan.templates[segment.template as usize].operands;
        for (operand, view) in operands.iter().zip(&segment.operands) {
            let views = memory.views(&[(memory.span(*view, 0), Access::Write)]).unwrap();
            match operand.dtype {
                DType::U32 => views.take_u32(0).iter_mut().for_each(|id| *id = next() % vocab),
                // Row statistics are among them and must be positive.
                DType::F32 => views.take::<f32>(0).iter_mut().for_each(|x| {
                    *x = 0.125 + next() as f32 / (1 << 24) as f32;
                }),
                DType::Bf16 => views.take::<Bf16>(0).iter_mut().for_each(|x| {
                    *x = Bf16::narrow(0.125 + next() as f32 / (1 << 24) as f32);
                }),
                DType::F16 => views.take::<F16>(0).iter_mut().for_each(|x| {
                    // Sums of products of larger ones leave the range of the type.
                    *x = F16::narrow((0.125 + next() as f32 / (1 << 24) as f32) / 16.0);
                }),
                DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::U8 => {
                    unreachable!("no operands of this type")
                }
            }
        }
    }

    /// Bytes of every operand after a segment's steps.
    fn left(
        memory: &Memory<'_>,
        plan: &Plan,
        kernels: &Kernels,
        segment: &Segment,
    ) -> Vec<Vec<u8>> {
        let number = segment.template as usize;
        let template = &plan.templates[number];
        let skipped = |at: u16| {
            let written = |step: &Step| match step {
                Step::One(op) => template.ops[*op].outputs.contains(&at),
                Step::Several(_, op) => op.outputs.contains(&at),
            };
            template.ops.iter().any(|op| op.outputs.contains(&at))
                && !kernels.steps[number].iter().any(written)
        };
        // The memory of a skipped operand still has the bytes of another, dead operand.
        let span = |at: u16| memory.span(segment.operands[usize::from(at)], 0);
        let all = 0..segment.operands.len() as u16;
        let holes: Vec<Span> = all.clone().filter(|at| skipped(*at)).map(span).collect();
        let is_whole = |at: &u16| {
            let Span { offset, len } = span(*at);
            let meets = |hole: &Span| offset < hole.offset + hole.len && hole.offset < offset + len;
            !holes.iter().any(meets)
        };
        let bytes = |at: u16| memory.views(&[(span(at), Access::Read)]).unwrap().bytes(0).to_vec();
        all.filter(is_whole).map(bytes).collect()
    }

    /// Every segment with fused operators produces the bits of the separate operators.
    #[test]
    fn joined_operators_have_the_bits_of_separate_ones() {
        let mut seen: BTreeSet<String> = BTreeSet::new();
        let models = [("mini", 1), ("mini", 2), ("mini-llama", 1), ("mini-llama", 2)];
        let types = [DType::F32, DType::Bf16, DType::F16];
        for ((name, tp), dtype) in models.into_iter().flat_map(|m| types.map(|t| (m, t))) {
            let model = built_in::get(name).expect("a built-in model").expect("a sound one");
            let strategy = Strategy {
                tp,
                dtype,
                seq: 16,
                micro_batch: 3,
                global_batch: 3,
                ..Strategy::default()
            };
            let plan = lower(&model, &strategy).expect("a sound strategy");
            let kernels = Arc::new(check::check::<Cpu>(&plan).expect("a plan that runs"));
            let program = plan.program(Rank(0));
            let memory = Memory::new(program, &mut world(1)[0]).unwrap();
            let vocab = model.vocab as u32;
            let pool = Pool::new(NonZeroUsize::new(2).expect("not zero")).unwrap();
            let place = RankCoords::of(&plan, Rank(0));
            let mut cpu = Cpu::new(
                &plan,
                &kernels,
                check::types(&plan).expect("known types"),
                place,
                vocab,
                pool,
            );
            for segment in &program.segments {
                let several = |step: &Step| match step {
                    Step::One(_) => None,
                    Step::Several(joined, _) => Some(format!("{joined:?}")),
                };
                let steps = &kernels.steps[segment.template as usize];
                let joined: Vec<String> = steps.iter().filter_map(several).collect();
                if joined.is_empty() {
                    continue;
                }
                let template = &plan.templates[segment.template as usize];
                let mut run = |watching| {
                    fill(&memory, &plan, segment, vocab);
                    cpu.pass.watching = watching;
                    cpu.segment(0, &memory, (template, segment), 0, true).expect("sound numbers");
                    left(&memory, &plan, &kernels, segment)
                };
                let (together, apart) = (run(false), run(true));
                let template = &template.name;
                assert!(together == apart, "{name}, {dtype:?}, tp {tp}, {template}: {joined:?}");
                seen.extend(joined);
            }
        }
        for kind in ["Linear {", "LinearInput(", "AddNorm { norm: Layer", "AddNorm { norm: Rms"] {
            assert!(seen.iter().any(|joined| joined.starts_with(kind)), "no {kind} in {seen:?}");
        }
        for kind in ["NormInputAdd { norm: Layer", "NormInputAdd { norm: Rms", "RowMaxStats"] {
            assert!(seen.iter().any(|joined| joined.starts_with(kind)), "no {kind} in {seen:?}");
        }
    }
}
