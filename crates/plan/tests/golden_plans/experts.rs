//! A mixture of experts with ep > dp, forward: eight ranks as dp 2 × tp 4 for the dense part are ep 8 for the
//! experts. Tokens go to their experts and come back by all_to_all along `ep`, the table's way from one cut
//! to another.

use super::build::{Build, local, operand, template};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
use paceline_plan::graph::{ActivationKind, LinearRole, OpKind, Part};
use paceline_plan::ids::{GroupId, LaneId, Microbatch};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{
    Access, Call, LoadKind, MemoryKind, Op, Plan, Program, SegmentPass, Template, View,
};
use paceline_plan::spec::{Conversion, Layout, Placement, conversion};
use paceline_plan::strategy::Strategy;

const EP: u64 = 8;
const EXPERTS: u64 = 16;
const TOPK: u64 = 2;
const TOKENS: u64 = 32;
const WIDTH: u64 = 16;
const FFN: u64 = 32;
/// Tokens an expert takes from each rank.
const CAPACITY: u64 = TOKENS * TOPK / EXPERTS;

pub(crate) fn plan() -> Plan {
    let strategy = Strategy {
        dp: 2,
        tp: 4,
        ep: EP as u32,
        leaves: 2,
        global_batch: 2,
        seq: TOKENS,
        ..Strategy::default()
    };
    Plan {
        model: "one layer of experts".into(),
        mesh: strategy.mesh(),
        strategy,
        groups: vec![GroupKind::Axis(Axis::Ep)],
        templates: templates(),
        programs: vec![program()],
        layers: vec!["experts".into()],
        parameters: EXPERTS * 2 * WIDTH * FFN,
        norm_entries: 2,
    }
}

fn templates() -> Vec<Template> {
    use Access::{Read, Write};
    let here = EXPERTS / EP;
    let sent = EXPERTS * CAPACITY;
    let dispatch = template(
        "F.experts.dispatch",
        SegmentPass::Forward,
        vec![
            operand(TOKENS, WIDTH, Read),
            operand(TOKENS, 2 * TOPK, Write),
            operand(sent, WIDTH, Write),
        ],
        vec![
            local(OpKind::Route { experts: EXPERTS, topk: TOPK }, Part::Forward, &[0], &[], &[1]),
            local(
                OpKind::Dispatch { experts: EXPERTS, capacity: CAPACITY },
                Part::Forward,
                &[0, 1],
                &[],
                &[2],
            ),
        ],
    );
    let relu = OpKind::Activation { function: ActivationKind::Relu };
    let linear = |role| OpKind::ExpertLinear { role, experts: here };
    let expert = template(
        "F.experts.ffn",
        SegmentPass::Forward,
        vec![
            operand(sent, WIDTH, Read),
            operand(here * FFN, WIDTH, Read),
            operand(sent, FFN, Write),
            operand(sent, FFN, Write),
            operand(here * WIDTH, FFN, Read),
            operand(sent, WIDTH, Write),
        ],
        vec![
            local(linear(LinearRole::Up), Part::Forward, &[0], &[1], &[2]),
            local(relu, Part::Forward, &[2], &[], &[3]),
            local(linear(LinearRole::Down), Part::Forward, &[3], &[4], &[5]),
        ],
    );
    let combine = template(
        "F.experts.combine",
        SegmentPass::Forward,
        vec![
            operand(sent, WIDTH, Read),
            operand(TOKENS, 2 * TOPK, Read),
            operand(TOKENS, WIDTH, Write),
        ],
        vec![local(OpKind::Combine { topk: TOPK }, Part::Forward, &[0, 1], &[], &[2])],
    );
    vec![dispatch, expert, combine]
}

fn program() -> Program {
    let here = EXPERTS / EP;
    let sent = EXPERTS * CAPACITY;
    let mut b = Build::new("every rank", &["compute", "load", "experts"]);
    let x = b.activation("x", TOKENS * WIDTH, 1);
    let choices = b.activation("choices", TOKENS * 2 * TOPK, 1);
    let by_expert = b.activation("dispatched", sent * WIDTH, 1);
    let arrived = b.activation("arrived", sent * WIDTH, 1);
    let up = b.buffer("up.weight", DType::F32, here * FFN * WIDTH, 1, MemoryKind::Parameters);
    let down = b.buffer("down.weight", DType::F32, here * FFN * WIDTH, 1, MemoryKind::Parameters);
    let wide = [0, 1].map(|i| b.activation(&format!("wide.{i}"), sent * FFN, 1));
    let done = b.activation("done", sent * WIDTH, 1);
    let returned = b.activation("returned", sent * WIDTH, 1);
    let y = b.activation("y", TOKENS * WIDTH, 1);
    let dispatch = b.segment(0, &[x, choices, by_expert]);
    let expert = b.segment(1, &[arrived, up, wide[0], wide[1], down, done]);
    let combine = b.segment(2, &[returned, choices, y]);

    // From "cut by token" to "cut by expert" and back: what the table asks for.
    let (by_token, by_experts) =
        (Placement::TOKENS, Placement::Shard { dim: 0, layout: Layout::Blocks });
    let Ok(Conversion::Collective(kind, reduction)) = conversion(by_token, by_experts) else {
        panic!("a change of cut is a collective")
    };
    assert_eq!((kind, reduction), (CollectiveKind::AllToAll, Reduction::Sum));
    let mut exchange = |name: &str, input: View, output: View| {
        b.call(Call {
            name: name.into(),
            kind,
            reduction,
            algorithm: Algorithm::Direct,
            order: Order::Free,
            group: GroupId(0),
            root: 0,
            input,
            output,
            dtype: DType::F32,
            block: 1,
        })
    };
    let there = exchange("all_to_all dispatch", by_expert, arrived);
    let back = exchange("all_to_all combine", done, returned);

    let microbatch = Microbatch(0);
    let load = Op::Load { what: LoadKind::Tokens, into: x.buffer, microbatch };
    let lane = LaneId(2);
    let loaded = b.program.body.push(LaneId(1), load, &[]);
    let routed = b.compute(dispatch, 0, &[loaded]);
    let out = b.program.body.push(lane, Op::Collective { call: there, microbatch }, &[routed]);
    let computed = b.compute(expert, 0, &[out]);
    let home = b.program.body.push(lane, Op::Collective { call: back, microbatch }, &[computed]);
    b.compute(combine, 0, &[home]);
    b.finish()
}
