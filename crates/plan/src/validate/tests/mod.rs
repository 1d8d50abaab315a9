//! A small hand-written plan, and the violations found after damaging it.

mod dataflow;
mod matching;
mod structure;

use super::*;
use crate::collective::{Algorithm, CollectiveKind, Method, Reduction, SummationOrder};
use crate::dtype::DType;
use crate::graph::{Init, OpKind, OpPass};
use crate::ids::{BufferId, CallId, GroupId, LaneId, LayerId, Microbatch, SegmentId, StageRank};
use crate::mesh::{Axis, GroupKind};
use crate::program::{
    Access, Bucket, Buffer, Call, CarryoverOp, ComputePass, Entry, LoadKind, LocalOp, Memory,
    MemoryKind, Op, Operand, Outputs, Peer, Segment, Service, StepPhase, Template, View,
};
use crate::samples::SampleKind;
use crate::spec::Placement;
use crate::strategy::Strategy;

const N: u64 = 16;
const WHOLE: u64 = u64::MAX;

/// Ops with their lanes and `after` edges.
type Ops = Vec<(u8, Op, Vec<u32>)>;

fn section(ops: &Ops) -> Section {
    let mut section = Section::default();
    for (lane, op, after) in ops {
        let after: Vec<OpId> = after.iter().copied().map(OpId).collect();
        section.push(LaneId(*lane), *op, &after);
    }
    section
}

fn view(buffer: u32) -> View {
    View { buffer: BufferId(buffer), offset: 0, len: N }
}

fn mb(microbatch: u32) -> Microbatch {
    Microbatch(microbatch)
}

/// Lays out buffers kind by kind, one after the other.
fn lay_out(program: &mut Program) {
    let mut end = Bytes::ZERO;
    program.memory = Memory::default();
    for kind in MemoryKind::ALL {
        for buffer in program.buffers.iter_mut().filter(|buffer| buffer.kind == kind) {
            buffer.offset = end;
            end += buffer.extent();
            program.memory.by_kind[kind as usize] += buffer.extent();
        }
    }
}

fn operator(part: OpPass, inputs: &[u16], params: &[u16], outputs: &[u16]) -> LocalOp {
    LocalOp {
        kind: OpKind::Add,
        pass: part,
        inputs: inputs.to_vec(),
        params: params.to_vec(),
        outputs: outputs.to_vec(),
    }
}

fn template(name: &str, pass: ComputePass, accesses: &[Access], ops: Vec<LocalOp>) -> Template {
    let operand = |&access: &Access| Operand { dims: [1, N], dtype: DType::F32, access };
    Template { name: name.into(), pass, operands: accesses.iter().map(operand).collect(), ops }
}

// Buffers of both stages.
const X: u32 = 0;
const Y: u32 = 1;
const DY: u32 = 2;
const DX: u32 = 3;
const W: u32 = 4;
const DW: u32 = 5;
const NORM: u32 = 6;
const TEMP: u32 = 7;

// Segments of both stages.
const FORWARD: SegmentId = SegmentId(0);
const BACKWARD: SegmentId = SegmentId(1);
const SQUARES: SegmentId = SegmentId(2);

// Lanes of both stages.
const COMPUTE: u8 = 0;
const RECV: u8 = 1;
const SEND: u8 = 2;
const REDUCE: u8 = 3;

fn program(name: &str, body: &Ops) -> Program {
    let buffer = |name: &str, copies, kind| Buffer {
        name: name.into(),
        dtype: DType::F32,
        elements: N,
        copies,
        kind,
        offset: Bytes::ZERO,
    };
    let segment = |template, layer, operands: &[u32]| Segment {
        template,
        layer,
        operands: operands.iter().map(|&buffer| view(buffer)).collect(),
    };
    let call = |group, buffer| Call {
        name: format!("all_reduce {buffer} {group}"),
        kind: CollectiveKind::AllReduce,
        reduction: Reduction::Sum,
        method: Method::Steps(Algorithm::Direct),
        order: SummationOrder::Canonical,
        group: GroupId(group),
        root: 0,
        input: view(buffer),
        output: view(buffer),
        dtype: DType::F32,
        block: 1,
    };
    let layer = Some(LayerId(0));
    let mut program = Program {
        name: name.into(),
        lanes: ["compute", "recv", "send", "reduce"].map(String::from).to_vec(),
        buffers: vec![
            buffer("x", 2, MemoryKind::Activations),
            buffer("y", 2, MemoryKind::Activations),
            buffer("dy", 2, MemoryKind::Communication),
            buffer("dx", 2, MemoryKind::Communication),
            buffer("w", 1, MemoryKind::Parameters),
            buffer("dw", 1, MemoryKind::Gradients),
            buffer("norm", 1, MemoryKind::Communication),
            buffer("temp", 1, MemoryKind::Activations),
        ],
        frames: vec![vec![BufferId(X), BufferId(Y)]],
        segments: vec![
            segment(0, layer, &[X, W, Y, TEMP]),
            segment(1, layer, &[X, DY, W, DX, DW]),
            segment(2, None, &[DW, NORM]),
        ],
        calls: vec![call(0, DW), call(1, NORM), call(2, NORM)],
        buckets: vec![Bucket {
            name: "bucket".into(),
            elements: N,
            entries: vec![Entry {
                name: "w".into(),
                dims: [1, N],
                blocks: Vec::new(),
                experts: 0,
                tp: Placement::Replicate,
                local: [1, N],
                offset: 0,
                init: Init::One,
                decay: true,
                running: false,
                sparse: false,
                counted: true,
                norm_entry: 0,
            }],
            params: view(W),
            grads: view(DW),
            master: None,
            moments: Vec::new(),
            offloaded: Vec::new(),
            shard: None,
            tensor_norms: None,
            updated: true,
        }],
        services: Vec::new(),
        prologue: Section::default(),
        body: section(body),
        epilogue: Section::default(),
        in_flight: Vec::new(),
        outputs: Outputs { norm: Some(BufferId(NORM)), ..Outputs::default() },
        memory: Memory::default(),
    };
    lay_out(&mut program);
    program
}

fn compute(segment: SegmentId, microbatch: u32) -> Op {
    Op::Compute { segment, microbatch: mb(microbatch), fresh: microbatch == 0 }
}

fn send(to: u16, channel: u16, buffer: u32, microbatch: u32) -> Op {
    let (to, microbatch) = (Peer::Stage(StageRank(to)), mb(microbatch));
    Op::Send { to, channel, view: view(buffer), microbatch }
}

fn recv(from: u16, channel: u16, buffer: u32, microbatch: u32) -> Op {
    let (from, microbatch) = (Peer::Stage(StageRank(from)), mb(microbatch));
    Op::Recv { from, channel, view: view(buffer), microbatch }
}

fn collective(call: u32) -> Op {
    Op::Collective { call: CallId(call), microbatch: mb(0) }
}

fn free(microbatch: u32) -> Op {
    Op::Free { frame: 0, microbatch: mb(microbatch) }
}

/// Appends reduction, norm over stages (twice, with different shapes) and update, after op `done`.
fn update(ops: &mut Ops, done: u32) {
    let first = ops.len() as u32;
    ops.push((REDUCE, collective(0), vec![done]));
    ops.push((
        COMPUTE,
        Op::Compute { segment: SQUARES, microbatch: mb(0), fresh: true },
        vec![first],
    ));
    ops.push((REDUCE, collective(1), vec![first + 1]));
    ops.push((REDUCE, collective(2), vec![]));
    ops.push((COMPUTE, Op::Step { bucket: 0, phase: StepPhase::Apply }, vec![first + 3]));
}

fn first_stage() -> Ops {
    let x = BufferId(X);
    let load = |k| Op::Load { what: LoadKind::Tokens, into: x, microbatch: mb(k) };
    let mut ops: Ops = vec![
        (COMPUTE, load(0), vec![]),
        (COMPUTE, compute(FORWARD, 0), vec![]),
        (SEND, send(1, 0, Y, 0), vec![1]),
        (COMPUTE, load(1), vec![]),
        (COMPUTE, compute(FORWARD, 1), vec![]),
        (SEND, send(1, 0, Y, 1), vec![4]),
        (RECV, recv(1, 1, DY, 0), vec![]),
        (COMPUTE, compute(BACKWARD, 0), vec![6]),
        (COMPUTE, free(0), vec![2]),
        (RECV, recv(1, 1, DY, 1), vec![]),
        (COMPUTE, compute(BACKWARD, 1), vec![9]),
        (COMPUTE, free(1), vec![5]),
    ];
    update(&mut ops, 11);
    ops
}

fn second_stage() -> Ops {
    // The forward output also serves as the gradient.
    let mut ops: Ops = vec![
        (RECV, recv(0, 0, X, 0), vec![]),
        (COMPUTE, compute(FORWARD, 0), vec![0]),
        (COMPUTE, Op::Stash { from: view(Y), into: view(DY), microbatch: mb(0) }, vec![]),
        (COMPUTE, compute(BACKWARD, 0), vec![]),
        (SEND, send(0, 1, DX, 0), vec![3]),
        (COMPUTE, free(0), vec![]),
        (RECV, recv(0, 0, X, 1), vec![]),
        (COMPUTE, compute(FORWARD, 1), vec![6]),
        (COMPUTE, Op::Stash { from: view(Y), into: view(DY), microbatch: mb(1) }, vec![]),
        (COMPUTE, compute(BACKWARD, 1), vec![]),
        (SEND, send(0, 1, DX, 1), vec![9]),
        (COMPUTE, free(1), vec![]),
    ];
    update(&mut ops, 9);
    ops
}

fn plan_of(stages: &[Ops]) -> Plan {
    use Access::{Accumulate, Read, Write};
    let forward = vec![
        operator(OpPass::Forward, &[0], &[1], &[3]),
        operator(OpPass::Forward, &[3], &[], &[2]),
    ];
    let backward = vec![
        operator(OpPass::BackwardInput, &[1], &[2], &[3]),
        operator(OpPass::BackwardWeight, &[0, 1], &[4], &[]),
    ];
    let mut strategy = Strategy { pp: 2, dp: 2, global_batch: 4, leaves: 2, ..Strategy::default() };
    strategy.pp = stages.len() as u32;
    let programs = stages.iter().map(|body| program("stage", body)).collect();
    Plan {
        model: "by hand".into(),
        mesh: strategy.mesh(),
        strategy,
        groups: vec![GroupKind::Axis(Axis::Dp), GroupKind::Axis(Axis::Pp), GroupKind::Ends],
        templates: vec![
            template("F.layer", ComputePass::Forward, &[Read, Read, Write, Write], forward),
            template(
                "B.layer",
                ComputePass::Backward,
                &[Read, Read, Read, Write, Accumulate],
                backward,
            ),
            template(
                "U.squares",
                ComputePass::Update,
                &[Read, Write],
                vec![operator(OpPass::Forward, &[0], &[], &[1])],
            ),
        ],
        programs,
        layers: vec!["layer".into()],
        parameters: N,
        samples: SampleKind::Tokens { vocab: 64, seq: 16, lookahead: 0 },
        norm_entries: 1,
        messages: None,
    }
}

fn plan() -> Plan {
    plan_of(&[first_stage(), second_stage()])
}

fn found(plan: &Plan) -> Vec<String> {
    validate(plan, None).iter().map(Violation::to_string).collect()
}

/// Asserts that validation finds exactly these messages.
#[track_caller]
fn expect(plan: &Plan, messages: &[&str]) {
    assert_eq!(found(plan), messages);
}

/// A plan with a change to the ops of one stage.
fn with(stage: usize, change: impl FnOnce(&mut Ops)) -> Plan {
    let mut stages = [first_stage(), second_stage()];
    change(&mut stages[stage]);
    plan_of(&stages)
}

/// Removes an op and renumbers those behind it.
fn remove(ops: &mut Ops, at: u32) {
    ops.remove(at as usize);
    for (_, _, after) in ops {
        after.retain(|&op| op != at);
        after.iter_mut().filter(|op| **op > at).for_each(|op| *op -= 1);
    }
}
