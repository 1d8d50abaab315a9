//! Checks that a plan can be run, before anything starts.

use crate::data::SampleKind;
use crate::device::cpu::Cpu;
use crate::device::{self, Device};
use crate::error::ExecError;
use crate::run::options;
use crate::shard;
use crate::types::Types;
use paceline_plan::DType;
use paceline_plan::collective::Library;
use paceline_plan::graph::{OpKind, OpPass};
use paceline_plan::program::{LocalOp, Op, Pacing, Plan, Program, Template};

/// Checks that a plan can be run on a device, before anything is started for it.
pub fn can_run(plan: &Plan, device: options::Device) -> Result<(), ExecError> {
    match device {
        options::Device::Cpu => check::<Cpu>(plan).map(|_| ())?,
        #[cfg(feature = "cuda")]
        options::Device::Cuda(_) => check::<device::cuda::Cuda>(plan).map(|_| ())?,
        #[cfg(not(feature = "cuda"))]
        options::Device::Cuda(_) => return Err(device::no_cuda()),
    }
    vocabulary(plan)
}

/// Finds the kernels of a plan, or fails with the first part that cannot be run.
pub(crate) fn check<D: Device>(plan: &Plan) -> Result<D::Kernels, ExecError> {
    for program in &plan.programs {
        buffers(plan, program)?;
        ops(plan, program)?;
        methods(program, D::LIBRARY)?;
        placements(program)?;
    }
    D::bind(plan, types(plan)?)
}

/// Binds the operators of every template that some role uses. An operator without a kernel
/// `place` is refused, with what `works`.
pub(crate) fn bind_all<K>(
    plan: &Plan,
    place: &str,
    works: &'static str,
    bind: impl Fn(OpKind, OpPass) -> Option<K>,
) -> Result<Vec<Vec<K>>, ExecError> {
    let mut used = vec![false; plan.templates.len()];
    let segments = plan.programs.iter().flat_map(|program| &program.segments);
    segments.for_each(|segment| used[segment.template as usize] = true);
    let of = |(template, used): (&Template, bool)| {
        let kernel = |op: &LocalOp| {
            bind(op.kind, op.pass).ok_or_else(|| {
                let (name, kind) = (&template.name, op.kind.name());
                unsupported(format!("{name}: the operator {kind} ({:?}){place}", op.pass), works)
            })
        };
        template.ops.iter().filter(|_| used).map(kernel).collect()
    };
    plan.templates.iter().zip(used).map(of).collect()
}

/// Checks that tables of words or classes have as many rows as the samples have words or classes.
fn vocabulary(plan: &Plan) -> Result<(), ExecError> {
    let entries = plan.programs.iter().flat_map(|p| &p.buckets).flat_map(|b| &b.entries);
    let mut rows = entries
        .filter(|e| {
            matches!(
                e.name.as_str(),
                "embedding.table.weight" | "head.table.weight" | "head.fc.weight"
            )
        })
        .map(|e| e.dims[0]);
    match rows.all(|rows| rows == u64::from(plan.samples.classes())) {
        true => Ok(()),
        false => Err(unsupported(
            "a model whose tables have other rows than its samples have words or classes",
            "models of language and of images run",
        )),
    }
}

/// Dtypes that the kernels of a plan work on.
pub(crate) fn types(plan: &Plan) -> Result<Types, ExecError> {
    let strategy = &plan.strategy;
    if matches!(plan.samples, SampleKind::Clicks { .. }) && strategy.dtype == DType::F16 {
        return Err(unsupported(
            "f16 with tables, whose gradients do not enter the norm by which overflows are seen,",
            "--dtype bf16 and f32 train models with tables",
        ));
    }
    if strategy.dtype == DType::F16 && plan.mesh.servers > 0 {
        return Err(unsupported(
            "f16 with parameter servers, whose replicas do not hear of overflows,",
            "--dtype bf16 runs with servers, and f16 with --sync all-reduce",
        ));
    }
    Types::of(strategy).ok_or_else(|| {
        let what = format!("{} with {} gradients", strategy.dtype, strategy.grad_dtype);
        unsupported(what, "--dtype f32, bf16 and f16 run")
    })
}

/// Checks that every buffer has a dtype of the strategy, or f32 or u32.
fn buffers(plan: &Plan, program: &Program) -> Result<(), ExecError> {
    let strategy = &plan.strategy;
    let known = [DType::F32, DType::U32, strategy.activation_dtype(), strategy.grad_dtype];
    match program.buffers.iter().find(|buffer| !known.contains(&buffer.dtype)) {
        None => Ok(()),
        Some(buffer) => Err(unsupported(
            format!("{}: the {} buffer '{}'", program.name, buffer.dtype, buffer.name),
            "buffers of the strategy's types run",
        )),
    }
}

fn ops(plan: &Plan, program: &Program) -> Result<(), ExecError> {
    for section in [&program.prologue, &program.body, &program.epilogue] {
        for node in &section.nodes {
            let what = match node.op {
                Op::Load { .. }
                | Op::Compute { .. }
                | Op::Send { .. }
                | Op::Recv { .. }
                | Op::Collective { .. }
                | Op::Accumulate { .. }
                | Op::Step { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Free { .. } => continue,
                // Replicas request grants only at a pace of their own.
                Op::Serve { .. } if plan.facts().pacing != Pacing::Lockstep => continue,
                Op::Serve { .. } => "an asynchronous server",
            };
            return Err(unsupported(
                format!("{}: {what}", program.name),
                "--sync async-ps:K and ssp:K:S make plans with such servers that run",
            ));
        }
    }
    Ok(())
}

/// Checks that the plan's own steps, or the device's library, carry out every collective.
fn methods(program: &Program, library: Option<Library>) -> Result<(), ExecError> {
    let mut calls = program.calls.iter();
    let called = calls.find_map(|call| {
        let by = call.method.library().filter(|by| Some(*by) != library)?;
        Some((by, call))
    });
    let Some((library, call)) = called else { return Ok(()) };
    let library = library.name().to_uppercase();
    Err(unsupported(
        format!(
            "{}: '{}' by {library}, for which there is no communicator,",
            program.name, call.name
        ),
        "plans for a fabric without a library run",
    ))
}

fn placements(program: &Program) -> Result<(), ExecError> {
    let mut entries = program.buckets.iter().flat_map(|bucket| &bucket.entries);
    match entries.find(|entry| !shard::is_holdable(entry.tp)) {
        None => Ok(()),
        Some(entry) => Err(unsupported(
            format!("{}: the parameter {} placed as {}", program.name, entry.name, entry.tp),
            "whole parameters and those cut along one dimension run",
        )),
    }
}

fn unsupported(what: impl Into<String>, works: &'static str) -> ExecError {
    ExecError::Unsupported { what: what.into(), works }
}
