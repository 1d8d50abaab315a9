//! Pipelines without flush: bitwise equal to one rank that uses the same weight versions.

use crate::common::*;
use paceline_exec::{Outcome, TrainOptions, train};
use paceline_plan::ids::{BufferId, LaneId, Microbatch};
use paceline_plan::model::Model;
use paceline_plan::program::{AccumulateMode, Buffer, MemoryKind, Op, Plan, View};
use paceline_plan::schedule::{ScheduleKind, Versions};
use paceline_plan::strategy::{OptimizerKind, Recompute, Strategy};
use paceline_plan::units::Bytes;
use std::collections::BTreeMap;

const STASHED: ScheduleKind = ScheduleKind::PipeDream { versions: Versions::Stashed };
const TWO: ScheduleKind = ScheduleKind::PipeDream { versions: Versions::Two };

/// Options without clipping: stages clip by their own norms, which a single rank does not have.
fn unclipped(iterations: u32) -> TrainOptions {
    TrainOptions { clip: None, ..options(iterations) }
}

fn trained(plan: &Plan, iterations: u32) -> Outcome {
    train(plan, &unclipped(iterations), &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// Number of updates by which each tensor's weights are stale when a minibatch reads them.
fn delays(pipelined: &Plan) -> BTreeMap<String, u32> {
    let ranks = pipelined.strategy.pp;
    let stages = (0..ranks).zip(&pipelined.programs);
    let of = |(stage, program): (u32, &paceline_plan::program::Program)| {
        let entries = program.buckets.iter().flat_map(|bucket| bucket.entries.clone());
        entries.map(move |entry| (entry.name, ranks - 1 - stage)).collect::<Vec<_>>()
    };
    stages.flat_map(of).collect()
}

/// Plan of one rank that runs minibatch after minibatch, each on weights as old as in the pipeline.
/// Minibatch k reads version k − delay of each tensor (Narayanan et al., SOSP 2019, section 3.4),
/// or batch t reads version t − 1 of all (arXiv 2006.09503, section 3.1).
fn sequential(model: &Model, pipelined: &Plan) -> Plan {
    let strategy = &pipelined.strategy;
    let versions = match strategy.schedule {
        ScheduleKind::PipeDream { versions } => versions,
        other => panic!("{other} flushes"),
    };
    // One layer per bucket, so that no bucket spans stages.
    let one = Strategy {
        pp: 1,
        schedule: ScheduleKind::OneFOneB,
        bucket: Bytes(1),
        overlap: true,
        ..strategy.clone()
    };
    let delays = delays(pipelined);
    let mut plan = plan(model, &one);
    let program = &mut plan.programs[0];
    let compute = LaneId(0);
    for at in 0..program.buckets.len() {
        let bucket = program.buckets[at].clone();
        let delay = delays[&bucket.entries[0].name];
        assert!(bucket.entries.iter().all(|entry| delays[&entry.name] == delay));
        let copies = match versions {
            Versions::Stashed => delay + 1,
            Versions::Two => 1,
        };
        let params = program.buffer(bucket.params.buffer).clone();
        let kept = Buffer {
            name: format!("{}.kept", bucket.name),
            copies,
            kind: MemoryKind::Communication,
            offset: program.memory.total(),
            ..params
        };
        program.memory.by_kind[MemoryKind::Communication as usize] += kept.extent();
        program.buffers.push(kept);
        let kept = BufferId::from(program.buffers.len() - 1);
        // Every pass reads the version stashed for it; gradients and updates use the latest.
        for segment in &mut program.segments {
            for view in segment.operands.iter_mut().filter(|v| v.buffer == bucket.params.buffer) {
                view.buffer = kept;
            }
        }
        let (from, into) = (bucket.params, View { buffer: kept, ..bucket.params });
        let keep = |number: u32| match versions {
            Versions::Stashed => Op::Stash { from, into, microbatch: Microbatch(number) },
            Versions::Two => Op::Accumulate { from, into, mode: AccumulateMode::Move },
        };
        for number in 0..copies {
            program.prologue.push(compute, keep(number), &[]);
        }
        if versions == Versions::Stashed {
            // After the update of minibatch k, for minibatch k + delay + 1.
            program.body.push(compute, keep(delay + 1), &[]);
        } else {
            let step = program.body.nodes.iter().position(
                |node| matches!(node.op, Op::Step { bucket, .. } if bucket as usize == at),
            );
            // The copy takes the update's slot: the ops around it are small and on one lane.
            let node = &mut program.body.nodes[step.expect("every bucket is updated")];
            let update = std::mem::replace(&mut node.op, keep(0));
            program.body.push(compute, update, &[]);
        }
    }
    plan
}

fn assert_as_sequential(model: &Model, strategy: &Strategy) {
    let pipelined = plan(model, strategy);
    let expected = trained(&sequential(model, &pipelined), 9);
    let found = trained(&pipelined, 9);
    let losses = |outcome: &Outcome| -> Vec<u32> {
        outcome.iterations.iter().map(|i| i.loss.to_bits()).collect()
    };
    assert_eq!(losses(&found), losses(&expected), "{strategy:?}");
    assert!(found.parameters == expected.parameters, "{strategy:?}: other weights");
}

#[test]
fn stashed_weights_are_those_of_the_sequential_run() {
    for model in [tiny_gpt(false), tiny_llama(), tiny_mlp()] {
        for pp in [2, 4] {
            let pipe = Strategy { pp, schedule: STASHED, ..strategy(1, 1, 1) };
            assert_as_sequential(&model, &pipe);
            assert_as_sequential(&model, &Strategy { overlap: false, ..pipe.clone() });
        }
    }
    let base = Strategy { pp: 2, schedule: STASHED, ..strategy(2, 2, 1) };
    assert_as_sequential(&tiny_llama(), &Strategy { recompute: Recompute::Full, ..base.clone() });
    assert_as_sequential(
        &tiny_llama(),
        &Strategy { optimizer: OptimizerKind::Sgd, ..base.clone() },
    );
}

#[test]
fn two_versions_are_those_of_the_sequential_run() {
    for model in [tiny_gpt(false), tiny_llama()] {
        for (pp, batch) in [(2, 2), (2, 5), (4, 4), (4, 8)] {
            let pipe = Strategy { pp, schedule: TWO, ..strategy(batch, 1, 1) };
            assert_as_sequential(&model, &pipe);
        }
    }
}

/// Replicas synchronise after every minibatch; bitwise equal to one with the same sum order.
#[test]
fn replicas_of_a_pipeline_without_flush_give_the_same_bits() {
    let one = Strategy { pp: 2, schedule: TWO, ..strategy(8, 1, 2) };
    let two = Strategy { dp: 2, ..one.clone() };
    let model = tiny_llama();
    let [one, two] = [one, two].map(|strategy| trained(&plan(&model, &strategy), 5));
    let losses =
        |o: &Outcome| -> Vec<u32> { o.iterations.iter().map(|i| i.loss.to_bits()).collect() };
    assert_eq!(losses(&one), losses(&two));
    assert!(one.parameters == two.parameters);
}

#[test]
fn pipelines_without_flush_learn() {
    for strategy in [
        Strategy { pp: 4, schedule: STASHED, ..strategy(4, 4, 1) },
        Strategy { pp: 2, schedule: TWO, ..strategy(4, 1, 1) },
    ] {
        let options = TrainOptions { lr: 3e-3, ..options(60) };
        let outcome = train(&plan(&tiny_llama(), &strategy), &options, &mut |_| {}).unwrap();
        let (first, last) = (outcome.iterations[0].loss, outcome.iterations[59].loss);
        assert!(last < 0.85 * first, "{strategy:?}: {first} to {last}");
    }
}
