//! Reports of a run, its end, and its error messages.

use crate::common::*;
use paceline_exec::{ExecError, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::ids::{LaneId, Microbatch, OpId, Rank};
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::{CarryoverOp, Op, Peer, View};
use paceline_plan::strategy::{Strategy, Sync, Zero};
use paceline_plan::trace::{Origin, SpanKind};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn the_built_in_models_learn() {
    for (name, lr, iterations) in
        [("mini", 3e-3, 30), ("mini-llama", 3e-3, 30), ("mini-moe", 3e-3, 30), ("mlp", 1e-2, 90)]
    {
        let model = built_in::get(name).expect("built in").expect("sound");
        let strategy = Strategy { dp: 2, seq: model.seq, ..strategy(16, 8, 2) };
        let options = TrainOptions { iterations, lr, seed: 1, ..TrainOptions::default() };
        let outcome = train(&plan(&model, &strategy), &options, &mut |_| {}).unwrap();
        let losses: Vec<f32> = outcome.iterations.iter().map(|i| i.loss).collect();
        let last = losses[losses.len() - 5..].iter().sum::<f32>() / 5.0;
        assert!((losses[0] - 256f32.ln()).abs() < 0.1, "{name} starts from ignorance: {losses:?}");
        assert!(
            last < 0.75 * losses[0] && f64::from(last) > outcome.floor.unwrap(),
            "{name}: {losses:?}"
        );
    }
}

#[test]
fn iterations_are_reported_in_order_as_they_end() {
    let layouts = [
        Strategy { dp: 2, pp: 2, ..strategy(8, 1, 4) },
        Strategy { dp: 2, sync: Sync::Servers(2), ..strategy(8, 1, 4) },
    ];
    for strategy in layouts {
        let mut heard = Vec::new();
        let plan = plan(&tiny_gpt(true), &strategy);
        let outcome = train(&plan, &options(6), &mut |i| heard.push(*i)).unwrap();
        assert_eq!(heard, outcome.iterations);
        assert_eq!(heard.iter().map(|i| i.iteration).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        for i in &heard {
            assert!(i.loss > 0.0 && i.grad_norm > 0.0 && i.seconds > 0.0);
            assert!((i.tokens_per_s * i.seconds - 128.0).abs() < 1e-6);
        }
        assert!(!outcome.stopped);
        let planned = (0..plan.mesh.world()).map(|r| plan.program(Rank(r)).memory.total().0);
        assert_eq!(outcome.arena_bytes, planned.collect::<Vec<_>>());
    }
}

#[test]
fn no_iterations_are_a_run_too() {
    let outcome = train(&plan(&tiny_mlp(), &strategy(2, 1, 1)), &options(0), &mut |_| {}).unwrap();
    assert!(outcome.iterations.is_empty() && outcome.trace.spans.is_empty() && !outcome.stopped);
}

#[test]
fn the_trace_has_every_op_of_the_last_iterations() {
    let strategy = Strategy { dp: 2, pp: 2, zero: Zero::Optimizer, ..strategy(8, 1, 4) };
    let plan = plan(&tiny_gpt(true), &strategy);
    let traced = |traced| TrainOptions { traced: Some(traced), ..options(5) };
    let untraced = train(&plan, &traced(0), &mut |_| {}).unwrap();
    assert!(untraced.trace.spans.is_empty());
    let outcome = train(&plan, &traced(3), &mut |_| {}).unwrap();
    assert_eq!(bits(&outcome), bits(&untraced));
    let trace = outcome.trace;
    trace.check().unwrap();
    assert_eq!((trace.origin, trace.world), (Origin::Measured, 4));
    assert_eq!(trace.ranks(), [Rank(0), Rank(1), Rank(2), Rank(3)]);
    for rank in trace.ranks() {
        let body = &plan.program(rank).body.nodes;
        let shown = body.iter().filter(|node| !matches!(node.op, Op::Free { .. })).count();
        for iteration in 2..5 {
            let of = trace.spans.iter().filter(|s| s.rank == rank && s.iteration == iteration);
            // Ops that waited for other ranks appear as several spans.
            let ops: BTreeSet<u32> =
                of.filter(|s| s.kind != SpanKind::Wait).map(|s| s.op).collect();
            assert_eq!(ops.len(), shown);
        }
    }
    assert!(trace.spans.iter().all(|span| span.iteration >= 2));
    for span in &trace.spans {
        let program = plan.program(span.rank);
        let node = &program.body.nodes[span.op as usize];
        assert_eq!(trace.lane(span), program.lanes[node.lane.index()]);
        assert_eq!(span.microbatch, node.op.microbatch().map(|m| m.0));
        if span.kind != SpanKind::Wait {
            let collective = matches!(node.op, Op::Collective { .. });
            assert_eq!(span.kind == SpanKind::Collective, collective);
        }
    }
    let forward = trace.spans.iter().find(|s| s.kind == SpanKind::Forward).unwrap();
    assert!(trace.name(forward).starts_with("F."), "{}", trace.name(forward));
}

#[test]
fn a_wish_to_stop_ends_all_ranks_after_the_same_iteration() {
    let options = options(100_000);
    let plan = plan(&tiny_gpt(true), &Strategy { dp: 2, pp: 2, ..strategy(8, 1, 4) });
    let stop = options.stop.clone();
    let outcome = train(&plan, &options, &mut |i| {
        if i.iteration == 3 {
            stop.store(true, Ordering::Relaxed);
        }
    });
    let outcome = outcome.unwrap();
    let done = outcome.iterations.len();
    assert!(outcome.stopped && (3..100).contains(&done), "{done} iterations");
}

#[test]
fn a_loss_that_is_no_number_ends_the_run() {
    for (layout, dtype) in [
        (Strategy { dp: 2, ..strategy(4, 1, 2) }, DType::F32),
        (Strategy { pp: 2, ..strategy(4, 1, 2) }, DType::Bf16),
        (strategy(4, 1, 2), DType::F32),
    ] {
        let plan = plan(&tiny_gpt(true), &Strategy { dtype, ..layout });
        let options = TrainOptions { lr: 1e38, warmup: 0, clip: None, ..options(50) };
        let mut heard = 0;
        match train(&plan, &options, &mut |i| heard = i.iteration) {
            // The first update produces weights whose products overflow.
            Err(ExecError::Op { rank, iteration, op, source }) => {
                let told = source.to_string();
                assert_eq!((iteration, heard), (2, 1), "{op}: {told}");
                assert!(rank.0 < 2 && op.contains("F."), "{op}");
                assert!(told.contains(" makes ") && told.contains("no weight"), "{told}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_cannot_run_is_refused_by_name_before_the_start() {
    let told = |strategy: &Strategy| {
        let plan = lower(&tiny_gpt(true), strategy).unwrap();
        train(&plan, &options(1), &mut |_| panic!("nothing may run")).unwrap_err().to_string()
    };
    let quarter = told(&Strategy { dtype: DType::Fp8, ..strategy(2, 1, 1) });
    assert!(quarter.contains("fp8") && quarter.contains("--dtype f32, bf16"), "{quarter}");

    let mut serving = lower(&tiny_gpt(true), &strategy(2, 1, 1)).unwrap();
    serving.programs[0].body.push(LaneId(0), Op::Serve { service: 0 }, &[]);
    let told = train(&serving, &options(1), &mut |_| {}).unwrap_err().to_string();
    assert!(told.contains("an asynchronous server"), "{told}");
}

#[test]
fn too_small_a_vocabulary_has_no_text() {
    let plan = plan(&gpt_of(4, true), &strategy(2, 1, 1));
    let told = train(&plan, &options(1), &mut |_| {}).unwrap_err();
    assert!(matches!(told, ExecError::Data(_)), "{told}");
}

#[test]
fn a_silent_peer_is_named() {
    // Rank 1 expects one more message than rank 0 sends.
    let mut plan = lower(&tiny_gpt(true), &Strategy { pp: 2, ..strategy(4, 1, 4) }).unwrap();
    let program = &mut plan.programs[1];
    let view = View { len: 1, ..program.buckets[0].grads };
    let lane = LaneId::from(program.lanes.len());
    program.lanes.push("extra".into());
    let from = Peer::Stage(paceline_plan::ids::StageRank(0));
    let op = Op::Recv { from, channel: 99, view, microbatch: Microbatch(2) };
    // After all other ops, which may hold the buffer it would be written to.
    let all: Vec<OpId> = (0..program.body.nodes.len()).map(OpId::from).collect();
    program.body.push(lane, op, &all);
    let options = TrainOptions { exchange_timeout: Duration::from_millis(200), ..options(3) };
    let error = train(&plan, &options, &mut |_| {}).unwrap_err();
    let told = error.to_string();
    // Rank 0 may time out first: it waits for rank 1 in the second iteration.
    let named = told.contains("nothing came from rank 0 for 0.2 s")
        || told.contains("nothing came from rank 1 for 0.2 s");
    assert!(matches!(error, ExecError::Silent { .. }) && named, "{told}");
}

#[test]
fn an_error_of_one_rank_ends_all_and_is_the_cause() {
    // Rank 1 of two reads beyond its arena in its last op.
    let mut plan = lower(&tiny_gpt(true), &Strategy { pp: 2, ..strategy(4, 1, 4) }).unwrap();
    let program = &mut plan.programs[1];
    let from = View { offset: 1 << 40, ..program.buckets[0].grads };
    let op = Op::Accumulate {
        from,
        into: program.buckets[0].grads,
        mode: paceline_plan::program::AccumulateMode::Add,
    };
    program.body.push(LaneId(0), op, &[]);
    let told = train(&plan, &options(3), &mut |_| {}).unwrap_err().to_string();
    assert!(told.starts_with("rank 1, iteration 1, accumulate "), "{told}");
    assert!(told.contains("beyond the arena"), "{told}");
}

#[test]
fn a_panic_of_one_rank_ends_all_and_names_the_op() {
    let mut plan = lower(&tiny_gpt(true), &Strategy { dp: 2, ..strategy(4, 1, 4) }).unwrap();
    // A weight of the wrong length, which a kernel rejects.
    let segment = &mut plan.programs[0].segments[1];
    segment.operands.iter_mut().for_each(|view| view.len /= 2);
    let error = train(&plan, &options(1), &mut |_| {}).unwrap_err();
    let told = error.to_string();
    assert!(matches!(error, ExecError::Panicked { .. }), "{told}");
    assert!(told.contains("iteration 1, compute ") && told.contains("holds"), "{told}");
}

#[test]
fn a_circle_of_edges_is_found_at_once() {
    let mut plan = lower(&tiny_mlp(), &strategy(1, 1, 1)).unwrap();
    let body = &mut plan.programs[0].body;
    let next = OpId::from(body.nodes.len() + 1);
    body.push(LaneId(0), Op::Free { frame: 0, microbatch: Microbatch(0) }, &[next]);
    body.push(LaneId(0), Op::Free { frame: 0, microbatch: Microbatch(0) }, &[]);
    let error = train(&plan, &options(1), &mut |_| {}).unwrap_err();
    assert!(matches!(error, ExecError::Stuck { .. }), "{error}");
}

/// Carryover ops do not change the result.
#[test]
fn gathers_may_reach_into_the_next_iteration() {
    let strategy = Strategy { dp: 2, zero: Zero::Optimizer, ..strategy(4, 1, 4) };
    let mut plan = plan(&tiny_gpt(false), &strategy);
    let expected = bits(&train(&plan, &options(5), &mut |_| {}).unwrap());
    let program = &mut plan.programs[0];
    let gather = program.lanes.iter().position(|lane| lane == "gather").unwrap();
    let nodes = program.body.nodes.iter().enumerate();
    let gathers: Vec<OpId> = nodes
        .filter(|(_, node)| node.lane.index() == gather)
        .map(|(at, _)| OpId::from(at))
        .collect();
    let first_compute = program.body.nodes.iter().position(|node| node.lane == LaneId(0)).unwrap();
    let before = vec![OpId::from(first_compute)];
    program.in_flight =
        gathers.into_iter().map(|op| CarryoverOp { op, before: before.clone() }).collect();
    assert_eq!(bits(&train(&plan, &options(5), &mut |_| {}).unwrap()), expected);
}
