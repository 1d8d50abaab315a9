//! Recommendation models: however their tables are dealt out, the losses are those of one rank.

mod common;

use common::*;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::collective::CollectiveKind;
use paceline_plan::lower::lower;
use paceline_plan::program::MemoryKind;
use paceline_plan::strategy::{OptimizerKind, Strategy, Tables, Zero};
use std::sync::Arc;

/// 24 samples an iteration, which is one microbatch.
fn one() -> Strategy {
    let strategy = Strategy { seq: 1, optimizer: OptimizerKind::Sgd, ..strategy(24, 24, 1) };
    Strategy { tables: Tables::Auto, ..strategy }
}

/// The same on so many replicas.
fn on(dp: u32, tables: Tables) -> Strategy {
    Strategy { dp, leaves: dp, micro_batch: 24 / u64::from(dp), tables, ..one() }
}

const WAYS: [Tables; 3] = [Tables::Replicate, Tables::Table, Tables::Row];

#[test]
fn tables_are_dealt_out_in_any_way() {
    for tables in WAYS {
        let layouts = [
            ("dp 2", on(2, tables)),
            ("dp 3", on(3, tables)),
            // More ranks than tables.
            ("dp 8", on(8, tables)),
            ("dp 2, zero 2", Strategy { zero: Zero::Gradients, ..on(2, tables) }),
            ("dp 2, no overlap", Strategy { overlap: false, ..on(2, tables) }),
        ];
        assert_close(&tiny_dlrm(), &one(), 1e-4, &layouts);
    }
}

/// Rows step in the order of samples, wherever they are.
#[test]
fn rows_end_where_one_rank_takes_them() {
    let trained = |strategy: &Strategy| {
        let mut parameters = run(&tiny_dlrm(), strategy).parameters.expect("kept");
        parameters.remove("bottom.tables.weight").expect("there are tables")
    };
    let (alone, start) = (trained(&one()), {
        let options = TrainOptions { lr: 0.0, ..options(1) };
        let outcome = train(&plan(&tiny_dlrm(), &one()), &options, &mut |_| {}).expect("runs");
        outcome.parameters.expect("kept").remove("bottom.tables.weight").expect("there")
    });
    let moved = alone.iter().zip(&start).filter(|(a, b)| a != b).count();
    assert!(moved > 0 && moved < alone.len(), "{moved} of {}", alone.len());
    for tables in WAYS {
        for (one, other) in alone.iter().zip(trained(&on(4, tables))) {
            assert!((one - other).abs() <= 1e-4 * one.abs().max(0.1), "{one} {other}");
        }
    }
}

#[test]
fn no_rank_holds_or_exchanges_a_gradient_of_the_tables() {
    let model = tiny_dlrm();
    let rows: u64 = 100 * 4;
    let of = |tables, kind: MemoryKind| {
        lower(&model, &on(2, tables)).unwrap().programs[0].memory.of(kind)
    };
    let networks = of(Tables::Replicate, MemoryKind::Gradients);
    for tables in WAYS {
        assert_eq!(of(tables, MemoryKind::Gradients), networks);
        let plan = plan(&model, &on(2, tables));
        let kinds: Vec<CollectiveKind> = plan.programs[0].calls.iter().map(|c| c.kind).collect();
        let expected = match tables {
            Tables::Table => vec![CollectiveKind::AllToAll; 2],
            Tables::Row => vec![CollectiveKind::ReduceScatter, CollectiveKind::AllGather],
            Tables::Replicate | Tables::Auto => vec![CollectiveKind::AllGather],
        };
        let exchanged = kinds.iter().filter(|k| **k != CollectiveKind::AllReduce).copied();
        assert_eq!(exchanged.collect::<Vec<_>>(), expected, "{tables}");
    }
    let held = of(Tables::Replicate, MemoryKind::Parameters);
    assert!(of(Tables::Row, MemoryKind::Parameters).0 + rows * 4 / 2 <= held.0 + 4096);
}

#[test]
fn clicks_are_learnt_to_near_the_best_loss() {
    let options = TrainOptions { lr: 0.5, weight_decay: 0.0, clip: None, ..options(400) };
    let strategy = Strategy { global_batch: 256, micro_batch: 128, ..on(2, Tables::Table) };
    let outcome = train(&plan(&tiny_dlrm(), &strategy), &options, &mut |_| {}).expect("runs");
    let floor = outcome.floor.expect("known") as f32;
    let losses: Vec<f32> = outcome.iterations.iter().map(|i| i.loss).collect();
    let mean = |of: &[f32]| of.iter().sum::<f32>() / of.len() as f32;
    let (first, last) = (mean(&losses[..5]), mean(&losses[360..]));
    assert!(last > floor - 0.02, "{last} is below the floor {floor}");
    assert!(last - floor < 0.35 * (first - floor), "from {first} to {last}, floor {floor}");
}

#[test]
fn tables_are_saved_under_one_layout_and_go_on_under_another() {
    let model = tiny_dlrm();
    let run_for = |strategy: &Strategy, options: TrainOptions| {
        let run = train(&plan(&model, strategy), &options, &mut |_| {});
        run.unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
    };
    for saved in WAYS {
        let name = format!("paceline-clicks-{}-{saved}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let directory = folder.clone();
        let save = SaveOptions { directory, every: None, keep: 1, attempt: 1, beside: Vec::new() };
        run_for(&on(2, saved), TrainOptions { save: Some(save), ..options(3) });
        for resumed in [on(3, Tables::Table), on(2, Tables::Row), one()] {
            let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{error}"));
            let start = Start::Checkpoint(Arc::new(checkpoint));
            let rest = run_for(&resumed, TrainOptions { start, ..options(6) });
            let whole = run_for(&resumed, options(6));
            for (one, other) in rest.iterations.iter().zip(&whole.iterations[3..]) {
                let near = (one.loss - other.loss).abs() <= 1e-4 * other.loss;
                assert!(near, "{saved}: {} and {}", one.loss, other.loss);
            }
        }
        std::fs::remove_dir_all(&folder).expect("was written");
    }
}

#[test]
fn what_tables_cannot_do_is_told() {
    let told = |change: &dyn Fn(&mut Strategy)| {
        let mut strategy = on(2, Tables::Row);
        change(&mut strategy);
        lower(&tiny_dlrm(), &strategy).unwrap_err().to_string()
    };
    assert!(told(&|s| s.optimizer = OptimizerKind::AdamW).contains("--optimizer: adamw keeps"));
    assert!(told(&|s| s.micro_batch = 6).contains("--micro-batch: rows of tables"));
    assert!(told(&|s| s.pp = 2).contains("--pp: tiny-dlrm is cut by samples and by tables"));
    assert!(
        lower(&tiny_gpt(true), &Strategy { tables: Tables::Row, ..strategy(8, 1, 1) })
            .unwrap_err()
            .to_string()
            .contains("--tables: tiny-gpt has no tables")
    );
}
