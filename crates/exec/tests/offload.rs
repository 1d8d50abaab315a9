//! Offloaded state returns unchanged: the same bits, in less memory, with the planned traffic.

use crate::common::*;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::ids::Rank;
use paceline_plan::model::{Model, ModelDims};
use paceline_plan::program::{Op, Plan};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, OptimizerKind, Recompute, Store, Strategy, Zero};
use paceline_plan::trace::SpanKind;
use paceline_plan::units::Bytes;
use std::sync::Arc;

/// Eight samples per iteration, one per microbatch, four leaves.
fn one() -> Strategy {
    strategy(8, 1, 4)
}

/// Same model with more blocks than have a slot in memory.
fn deep(model: &Model) -> Model {
    Model::new("deep", ModelDims { layers: 6, ..**model }).expect("sound")
}

#[test]
fn offloading_changes_no_bit() {
    let (host, all) = (Store::Host, Offload::All);
    let pipe = Strategy { pp: 2, schedule: ScheduleKind::OneFOneB, ..one() };
    for model in [tiny_gpt(true), tiny_llama()].map(|model| deep(&model)) {
        let layouts = [
            ("optimizer", Strategy { offload: Offload::Optimizer, ..one() }),
            ("activations", Strategy { offload: Offload::Activations, ..one() }),
            ("all", Strategy { offload: all, bucket: Bytes(1), ..one() }),
            ("all, to the host", Strategy { offload: all, store: host, ..one() }),
            ("dp 2", Strategy { dp: 2, offload: all, ..one() }),
            ("dp 2, zero 1", Strategy { dp: 2, zero: Zero::Optimizer, offload: all, ..one() }),
            ("dp 2, zero 3", Strategy { dp: 2, zero: Zero::Parameters, offload: all, ..one() }),
            ("pp 2", Strategy { offload: all, ..pipe.clone() }),
            ("gpipe", Strategy { offload: all, schedule: ScheduleKind::GPipe, ..pipe.clone() }),
            ("full", Strategy { offload: all, recompute: Recompute::Full, ..pipe.clone() }),
            ("no overlap", Strategy { offload: all, overlap: false, ..pipe.clone() }),
        ];
        assert_same_bits(&model, &one(), &layouts);
    }
}

#[test]
fn it_goes_with_other_optimizers_and_types() {
    let model = deep(&tiny_llama());
    use OptimizerKind::{Lamb, Lars, Momentum, Sgd};
    for optimizer in [Sgd, Momentum, Lamb, Lars] {
        let kept = Strategy { optimizer, ..one() };
        let moved = Strategy { offload: Offload::All, bucket: Bytes(1), ..kept.clone() };
        assert_same_bits(&model, &kept, &[("all", moved)]);
    }
    let (dtype, grad_dtype) = (DType::Bf16, DType::Bf16);
    let kept = Strategy { dtype, grad_dtype, ..one() };
    let moved = Strategy { offload: Offload::All, ..kept.clone() };
    let dealt = Strategy { dp: 2, zero: Zero::Gradients, ..moved.clone() };
    assert_same_bits(&model, &kept, &[("bf16", moved), ("bf16, zero 2", dealt)]);
}

#[test]
fn experts_offload_what_they_were_given_too() {
    for model in [tiny_moe(), dropless_moe()].map(|model| deep(&model)) {
        let all = Offload::All;
        let one = Strategy { expert_buffer_factor: 4.0, ..one() };
        let layouts = [("all", Strategy { offload: all, ..one.clone() })];
        assert_same_bits(&model, &one, &layouts);
        let apart = Strategy { dp: 2, ep: 2, ..one };
        assert_same_bits(&model, &apart, &[("ep 2", Strategy { offload: all, ..apart.clone() })]);
    }
}

/// Number and bytes of transfers between a rank's body and the store.
fn planned(plan: &Plan, rank: Rank) -> (usize, u64) {
    let program = plan.program(rank);
    let moves = program.body.nodes.iter().filter_map(|node| program.offloaded(&node.op));
    let moves: Vec<u64> = moves.map(|bytes| bytes.0).collect();
    (moves.len(), moves.iter().sum())
}

#[test]
fn memory_is_saved_and_the_traffic_is_the_planned_one() {
    let model = deep(&tiny_gpt(false));
    let kept = plan(&model, &one());
    let moved = plan(&model, &Strategy { offload: Offload::All, bucket: Bytes(1), ..one() });
    let outcome = train(&moved, &options(5), &mut |_| {}).unwrap();
    let arena = kept.programs[0].memory.total().0;
    assert!(outcome.arena_bytes[0] < arena * 4 / 5, "{:?} of {arena}", outcome.arena_bytes);
    // Every planned op ran in every iteration.
    let (moves, bytes) = planned(&moved, Rank(0));
    assert!(moves > 0 && bytes > 16 * model.parameters());
    let spans = outcome.trace.spans.iter().filter(|span| span.kind == SpanKind::Offload);
    let iterations = outcome.trace.windows().len();
    assert_eq!(spans.count(), moves * iterations);
    // The last blocks of a microbatch whose backward pass follows at once stay in memory.
    let program = moved.program(Rank(0));
    let activations = |op: &Op| match *op {
        Op::Stash { from, .. } => program.buffer(from.buffer).name.contains("slot"),
        _ => false,
    };
    let stashes = program.body.nodes.iter().filter(|node| activations(&node.op)).count();
    let one_block = program.buffers.iter().filter(|b| b.name.contains("slot0")).count();
    // Three of six blocks in each of eight microbatches; the first keeps its input.
    assert!(stashes <= 8 * 3 * one_block, "{stashes} stashes of {one_block} each");
}

#[test]
fn a_run_goes_on_elsewhere_with_what_was_offloaded() {
    let folder = std::env::temp_dir().join(format!("paceline-offload-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let model = deep(&tiny_llama());
    let whole = train(&plan(&model, &one()), &options(8), &mut |_| {}).unwrap();
    let bf16 = |s: Strategy| Strategy { dtype: DType::Bf16, ..s };
    let whole_bf16 = train(&plan(&model, &bf16(one())), &options(8), &mut |_| {}).unwrap();
    let moved = Strategy { offload: Offload::All, dp: 2, zero: Zero::Optimizer, ..one() };
    let cases = [
        (moved.clone(), one(), &whole),
        (one(), moved.clone(), &whole),
        (bf16(moved.clone()), bf16(one()), &whole_bf16),
        (bf16(one()), bf16(moved), &whole_bf16),
    ];
    for (at, (first, second, whole)) in cases.into_iter().enumerate() {
        let directory = folder.join(at.to_string());
        let every = Some(2);
        let save = Some(SaveOptions {
            directory: directory.clone(),
            every,
            keep: 1,
            attempt: 7,
            extra_files: vec![],
        });
        train(&plan(&model, &first), &TrainOptions { save, ..options(4) }, &mut |_| {}).unwrap();
        let start = Start::Checkpoint(Arc::new(Checkpoint::open(&directory).unwrap()));
        let rest = TrainOptions { start, ..options(8) };
        let rest = train(&plan(&model, &second), &rest, &mut |_| {}).unwrap();
        assert_eq!(bits(&rest), bits(whole)[4..], "{first:?} then {second:?}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The offload thread and the compute thread wait for each other all the time.
#[test]
fn a_rank_and_its_store_never_miss_each_other() {
    let model = deep(&tiny_llama());
    let moved = Strategy { offload: Offload::All, store: Store::Host, ..one() };
    for moved in [Strategy { bucket: Bytes(1), ..moved.clone() }, Strategy { dp: 2, ..moved }] {
        let outcome = train(&plan(&model, &moved), &options(60), &mut |_| {});
        assert_eq!(outcome.unwrap_or_else(|error| panic!("{error}")).iterations.len(), 60);
    }
}

#[test]
fn a_folder_that_cannot_be_written_to_is_named() {
    let file = std::env::temp_dir().join(format!("paceline-offload-file-{}", std::process::id()));
    std::fs::write(&file, "a file").unwrap();
    let plan = plan(&tiny_llama(), &Strategy { offload: Offload::Optimizer, dp: 2, ..one() });
    let options = TrainOptions { offload_folder: file.clone(), ..options(2) };
    let told = train(&plan, &options, &mut |_| {}).unwrap_err().to_string();
    std::fs::remove_file(&file).unwrap();
    assert!(told.starts_with("rank ") && told.contains("--offload-dir"), "{told}");
}
