//! Ring attention (Liu et al., arXiv 2310.01889) over four context-parallel ranks, forward: every
//! rank keeps its queries, and keys and values travel around the ring. The next block is received
//! while the current one is processed.

use super::build::{Build, local, operand, template};
use paceline_plan::DType;
use paceline_plan::graph::{Heads, OpKind, OpPass, Scores};
use paceline_plan::ids::{LaneId, Microbatch};
use paceline_plan::mesh::Axis;
use paceline_plan::program::{Access, ComputePass, MemoryKind, Op, Peer, Plan, Program, Template};
use paceline_plan::samples::SampleKind;
use paceline_plan::strategy::Strategy;

const RANKS: u32 = 4;
const TOKENS: u64 = 16;
const HEADS: Heads = Heads { heads: 2, kv_heads: 2, head_dim: 8 };

pub(crate) fn plan() -> Plan {
    let strategy = Strategy { cp: RANKS, seq: TOKENS * u64::from(RANKS), ..Strategy::default() };
    Plan {
        model: "one attention".into(),
        mesh: strategy.mesh(),
        strategy,
        groups: Vec::new(),
        templates: templates(),
        programs: vec![program()],
        layers: vec!["attention".into()],
        parameters: 0,
        samples: SampleKind::Tokens { vocab: 64, seq: 16, lookahead: 0 },
        norm_entries: 0,
        messages: None,
    }
}

fn templates() -> Vec<Template> {
    let width = HEADS.heads * HEADS.head_dim;
    let kv = 2 * HEADS.kv_heads * HEADS.head_dim;
    let kind = OpKind::AttentionBlock {
        heads: HEADS,
        queries: TOKENS,
        keys: TOKENS,
        step: 1,
        scores: Scores::default(),
    };
    let block = |name: &str, access: Access| {
        template(
            name,
            ComputePass::Forward,
            vec![
                operand(TOKENS, width, Access::Read),
                operand(TOKENS, kv, Access::Read),
                operand(TOKENS, width, access),
                operand(TOKENS, HEADS.heads, access),
            ],
            vec![local(kind, OpPass::Forward, &[0, 1], &[], &[2, 3])],
        )
    };
    vec![block("F.attention.first", Access::Write), block("F.attention.merge", Access::Accumulate)]
}

fn program() -> Program {
    let width = HEADS.heads * HEADS.head_dim;
    let kv_width = 2 * HEADS.kv_heads * HEADS.head_dim;
    let mut b = Build::new("every rank", &["compute", "ring-send", "ring-recv", "load"]);
    let queries = b.buffer("queries", DType::F32, TOKENS * width, 1, MemoryKind::Activations);
    // Double buffer: one block is processed and sent on while the other is received.
    let blocks = [0, 1].map(|i| {
        b.buffer(&format!("kv.{i}"), DType::F32, TOKENS * kv_width, 1, MemoryKind::Communication)
    });
    let out = b.activation("out", TOKENS * width, 1);
    let lse = b.activation("lse", TOKENS * HEADS.heads, 1);
    let mut merges = Vec::new();
    for (step, kv) in (0..RANKS).map(|s| (s, blocks[s as usize % 2])) {
        merges.push(b.segment(u32::from(step > 0), &[queries, kv, out, lse]));
    }
    let (send, recv, load) = (LaneId(1), LaneId(2), LaneId(3));
    let bring = |buffer| Op::Load {
        what: paceline_plan::program::LoadKind::Tokens,
        into: buffer,
        microbatch: Microbatch(0),
    };
    let queries_in = b.program.body.push(load, bring(queries.buffer), &[]);
    let mut here = b.program.body.push(load, bring(blocks[0].buffer), &[]);
    let (mut attended, mut sent): (Option<_>, Option<_>) = (None, None);
    for step in 0..RANKS {
        let (now, next) = (blocks[step as usize % 2], blocks[(step as usize + 1) % 2]);
        let mut arrived = None;
        if step + 1 < RANKS {
            let channel = step as u16;
            let microbatch = Microbatch(0);
            let op = Op::Recv { from: Peer::Previous(Axis::Cp), channel, view: next, microbatch };
            // The receive buffer must have been processed and sent on.
            let free: Vec<_> = [attended, sent].into_iter().flatten().collect();
            arrived = Some(b.program.body.push(recv, op, &free));
            let op = Op::Send { to: Peer::Next(Axis::Cp), channel, view: now, microbatch };
            sent = Some(b.program.body.push(send, op, &[here]));
        }
        attended = Some(b.program.body.push(
            super::build::COMPUTE,
            Op::Compute {
                segment: merges[step as usize],
                microbatch: Microbatch(0),
                fresh: step == 0,
            },
            &[queries_in, here],
        ));
        here = arrived.unwrap_or(here);
    }
    b.finish()
}
