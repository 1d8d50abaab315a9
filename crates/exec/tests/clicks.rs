//! Recommendation models: however their tables are sharded, the losses are those of one rank.

use crate::common::*;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::collective::{CollectiveKind, SummationOrder};
use paceline_plan::lower::lower;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::program::MemoryKind;
use paceline_plan::strategy::{Offload, OptimizerKind, Strategy, Sync, TableSharding, Zero};
use std::sync::Arc;

/// 24 samples per iteration, in one microbatch.
fn one() -> Strategy {
    let strategy = Strategy { seq: 1, optimizer: OptimizerKind::Sgd, ..strategy(24, 24, 1) };
    Strategy { table_sharding: TableSharding::Auto, ..strategy }
}

/// Same on `dp` replicas.
fn on(dp: u32, tables: TableSharding) -> Strategy {
    Strategy { dp, leaves: dp, micro_batch: 24 / u64::from(dp), table_sharding: tables, ..one() }
}

const WAYS: [TableSharding; 3] =
    [TableSharding::Replicate, TableSharding::Table, TableSharding::Row];

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

/// Rows are updated in the order of samples, wherever they are held.
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
    let networks = of(TableSharding::Replicate, MemoryKind::Gradients);
    for tables in WAYS {
        assert_eq!(of(tables, MemoryKind::Gradients), networks);
        let plan = plan(&model, &on(2, tables));
        let kinds: Vec<CollectiveKind> = plan.programs[0].calls.iter().map(|c| c.kind).collect();
        let expected = match tables {
            TableSharding::Table => vec![CollectiveKind::AllToAll; 2],
            TableSharding::Row => vec![CollectiveKind::ReduceScatter, CollectiveKind::AllGather],
            TableSharding::Replicate | TableSharding::Auto => vec![CollectiveKind::AllGather],
        };
        let exchanged = kinds.iter().filter(|k| **k != CollectiveKind::AllReduce).copied();
        assert_eq!(exchanged.collect::<Vec<_>>(), expected, "{tables}");
    }
    let held = of(TableSharding::Replicate, MemoryKind::Parameters);
    assert!(of(TableSharding::Row, MemoryKind::Parameters).0 + rows * 4 / 2 <= held.0 + 4096);
}

/// Large batch on two replicas.
fn many(tables: TableSharding) -> Strategy {
    Strategy { global_batch: 256, micro_batch: 128, ..on(2, tables) }
}

/// First loss, last loss and loss floor of a run.
fn learnt(strategy: &Strategy, lr: f64) -> [f32; 3] {
    let options = TrainOptions { lr, weight_decay: 0.0, clip: None, ..options(400) };
    let outcome = train(&plan(&tiny_dlrm(), strategy), &options, &mut |_| {}).expect("runs");
    let losses: Vec<f32> = outcome.iterations.iter().map(|i| i.loss).collect();
    let mean = |of: &[f32]| of.iter().sum::<f32>() / of.len() as f32;
    [mean(&losses[..5]), mean(&losses[360..]), outcome.floor.expect("known") as f32]
}

#[test]
fn clicks_are_learnt_to_near_the_best_loss() {
    let [first, last, floor] = learnt(&many(TableSharding::Table), 0.5);
    assert!(last > floor - 0.02, "{last} is below the floor {floor}");
    assert!(last - floor < 0.35 * (first - floor), "from {first} to {last}, floor {floor}");
}

/// With compressed networks, and tables where they are replicated, losses end within 2 %.
#[test]
fn compressed_gradients_lead_to_the_same_losses() {
    for tables in [TableSharding::Table, TableSharding::Replicate] {
        let whole = Strategy { order: SummationOrder::Free, ..many(tables) };
        // Two microbatches, so that replicated tables have gradients.
        let whole = Strategy { micro_batch: 64, ..whole };
        let [_, exact, _] = learnt(&whole, 0.5);
        for word in ["int8", "onebit", "topk:0.1", "powersgd:2"] {
            let compress = word.parse().expect("a compression");
            let [_, found, _] = learnt(&Strategy { compress, ..whole.clone() }, 0.5);
            eprintln!("{tables}, {word}: {found} against {exact}");
            assert!((found - exact).abs() <= 0.02 * exact, "{tables}, {word}: {found} {exact}");
        }
    }
}

/// With one plain SGD update per iteration, averaging the replicas' weights equals a step along
/// their mean gradient. A single replica pushes exactly the update it would apply itself.
#[test]
fn replicas_that_do_not_keep_in_step_have_tables_of_their_own() {
    let free = |dp| Strategy { order: SummationOrder::Free, ..on(dp, TableSharding::Auto) };
    let options = TrainOptions { clip: None, lr: 0.5, ..options(6) };
    let go = |strategy: &Strategy| {
        train(&plan(&tiny_dlrm(), strategy), &options, &mut |_| {}).expect("runs")
    };
    let local = Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average });
    let [found, expected] = [Strategy { local, ..free(4) }, free(4)].map(|s| go(&s));
    for (f, e) in found.iterations.iter().zip(&expected.iterations) {
        assert!((f.loss - e.loss).abs() <= 1e-4 * e.loss, "{} against {}", f.loss, e.loss);
    }
    let adam = Strategy { optimizer: OptimizerKind::AdamW, ..free(1) };
    let expected = go(&adam).parameters;
    for word in ["ps:1", "async-ps:2", "ssp:1:1", "hogwild"] {
        let sync = word.parse().expect("a way to agree");
        assert_eq!(go(&Strategy { sync, ..adam.clone() }).parameters, expected, "{word}");
    }
}

#[test]
fn clicks_are_learnt_however_replicas_agree() {
    let free = Strategy { order: SummationOrder::Free, ..many(TableSharding::Auto) };
    let sync = |word: &str| Strategy { sync: word.parse().expect("known"), ..free.clone() };
    let local = |outer| {
        let local = Some(LocalSgd { steps: 2, outer });
        Strategy { local, micro_batch: 64, ..free.clone() }
    };
    let layouts = [
        ("local", local(OuterOptimizer::Average)),
        ("local, Nesterov", local(OuterOptimizer::Nesterov)),
        ("a server", sync("async-ps:1")),
        ("a bound", sync("ssp:2:1")),
        ("hogwild", sync("hogwild")),
    ];
    for (name, layout) in layouts {
        let [first, last, floor] = learnt(&layout, 0.25);
        eprintln!("{name}: from {first} to {last}, floor {floor}");
        assert!(last > floor - 0.02, "{name}: {last} is below the floor {floor}");
        assert!(last - floor < 0.4 * (first - floor), "{name}: from {first} to {last}, {floor}");
    }
}

#[test]
fn tables_are_saved_under_one_layout_and_go_on_under_another() {
    let model = tiny_dlrm();
    let run_for = |strategy: &Strategy, options: TrainOptions| {
        let run = train(&plan(&model, strategy), &options, &mut |_| {});
        run.unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
    };
    let optimizers = [OptimizerKind::Sgd, OptimizerKind::AdamW];
    for (saved, optimizer) in WAYS.into_iter().flat_map(|way| optimizers.map(|o| (way, o))) {
        let on = |dp, tables| Strategy { optimizer, ..on(dp, tables) };
        let name = format!("paceline-clicks-{}-{saved}-{optimizer}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let directory = folder.clone();
        let save =
            SaveOptions { directory, every: None, keep: 1, attempt: 1, extra_files: Vec::new() };
        run_for(&on(2, saved), TrainOptions { save: Some(save), ..options(3) });
        for resumed in
            [on(3, TableSharding::Table), on(2, TableSharding::Row), on(1, TableSharding::Auto)]
        {
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

/// With any optimizer, the state of a row is held where the row is held.
#[test]
fn any_optimizer_trains_tables_dealt_out_in_any_way() {
    use OptimizerKind::{AdamW, Lamb, Lars, Momentum};
    for optimizer in [Momentum, AdamW, Lamb, Lars] {
        let alone = Strategy { optimizer, ..one() };
        let on = |dp, tables| Strategy { optimizer, ..on(dp, tables) };
        for tables in WAYS {
            let layouts = [
                ("dp 2", on(2, tables)),
                // More ranks than tables.
                ("dp 8", on(8, tables)),
                ("dp 3, two microbatches", Strategy { micro_batch: 4, ..on(3, tables) }),
                ("dp 2, zero 3", Strategy { zero: Zero::Parameters, ..on(2, tables) }),
            ];
            assert_close(&tiny_dlrm(), &alone, 1e-4, &layouts);
        }
    }
}

#[test]
fn gradients_of_rows_add_up_over_microbatches() {
    for tables in WAYS {
        let parts = |dp, micro_batch| Strategy { micro_batch, ..on(dp, tables) };
        let free = Strategy { order: SummationOrder::Free, zero: Zero::Gradients, ..parts(2, 3) };
        let layouts = [
            ("dp 1, 3 microbatches", parts(1, 8)),
            ("dp 2, 2 microbatches", parts(2, 6)),
            ("dp 2, 4 microbatches in 4 leaves", Strategy { leaves: 4, ..parts(2, 3) }),
            ("dp 4, 6 microbatches", parts(4, 1)),
            ("dp 2, reduced one by one", free),
            ("dp 2, no overlap", Strategy { overlap: false, ..parts(2, 6) }),
        ];
        assert_close(&tiny_dlrm(), &one(), 1e-4, &layouts);
    }
}

/// Replicated tables are summed like all other parameters, and are bitwise identical.
#[test]
fn replicated_tables_have_the_same_bits_for_any_number_of_replicas() {
    for optimizer in [OptimizerKind::Sgd, OptimizerKind::AdamW] {
        let leaves = Strategy { optimizer, leaves: 4, micro_batch: 3, ..one() };
        let on = |dp| Strategy { dp, table_sharding: TableSharding::Replicate, ..leaves.clone() };
        let layouts = [
            ("dp 2", on(2)),
            ("dp 4", on(4)),
            ("dp 4, zero 1", Strategy { zero: Zero::Optimizer, ..on(4) }),
            ("dp 2, zero 3", Strategy { zero: Zero::Parameters, ..on(2) }),
            ("dp 2, a server", Strategy { sync: Sync::Servers(1), ..on(2) }),
        ];
        assert_same_bits(&tiny_dlrm(), &leaves, &layouts);
    }
}

/// Rows of sharded tables are summed where they are held, in the order of microbatches: the update
/// of the networks does not change a bit.
#[test]
fn dealt_out_tables_have_the_same_bits_however_networks_are_updated() {
    for tables in [TableSharding::Table, TableSharding::Row] {
        let optimizer = OptimizerKind::AdamW;
        let two = Strategy { optimizer, micro_batch: 6, ..on(2, tables) };
        let layouts = [
            ("zero 1", Strategy { zero: Zero::Optimizer, ..two.clone() }),
            ("zero 3", Strategy { zero: Zero::Parameters, ..two.clone() }),
            ("offloaded", Strategy { offload: Offload::Optimizer, ..two.clone() }),
            ("no overlap", Strategy { overlap: false, ..two.clone() }),
        ];
        assert_same_bits(&tiny_dlrm(), &two, &layouts);
    }
}

#[test]
fn the_state_of_rows_is_dealt_out_with_them() {
    let model = tiny_dlrm();
    let of = |tables, optimizer, kind: MemoryKind| {
        let strategy = Strategy { optimizer, ..on(2, tables) };
        lower(&model, &strategy).unwrap().programs[0].memory.of(kind).0
    };
    let networks = of(TableSharding::Row, OptimizerKind::Sgd, MemoryKind::Gradients);
    for tables in WAYS {
        let rows = of(tables, OptimizerKind::AdamW, MemoryKind::Gradients) - networks;
        let held = of(tables, OptimizerKind::AdamW, MemoryKind::Parameters);
        assert_eq!(rows + networks, held + 64, "as large as what is held, beside the loss");
        let state = of(tables, OptimizerKind::AdamW, MemoryKind::Optimizer);
        assert_eq!(state, 2 * held, "two moments of what is held");
        assert_eq!(of(tables, OptimizerKind::Momentum, MemoryKind::Optimizer), held);
    }
}

/// Networks in 16 bits with tables in 32: within 2 % of all in 32.
#[test]
fn networks_in_bf16_train_beside_tables_in_f32() {
    let model = tiny_dlrm();
    for optimizer in [OptimizerKind::Sgd, OptimizerKind::AdamW] {
        let exact = run(&model, &Strategy { optimizer, ..one() });
        for tables in WAYS {
            let narrow = Strategy { optimizer, dtype: DType::Bf16, ..on(2, tables) };
            let plan = plan(&model, &narrow);
            let rows = plan.programs[0].buckets.last().expect("of tables");
            assert_eq!(plan.programs[0].buffer(rows.params.buffer).dtype, DType::F32);
            assert_eq!(rows.master, None);
            let found = run(&model, &narrow);
            for (f, e) in found.iterations.iter().zip(&exact.iterations) {
                assert!(
                    (f.loss - e.loss).abs() <= 0.02 * e.loss,
                    "{tables}: {} {}",
                    f.loss,
                    e.loss
                );
            }
        }
    }
}

/// Clipping applies to the networks, whose norm all ranks know. Rows that are updated at once,
/// before the norm is known, move as far as rows that accumulate gradients.
#[test]
fn rows_are_not_clipped() {
    let model = tiny_dlrm();
    let trained = |micro_batch| {
        let strategy = Strategy { micro_batch, ..one() };
        let options = TrainOptions { clip: Some(1e-6), lr: 1.0, warmup: 0, ..options(1) };
        let outcome = train(&plan(&model, &strategy), &options, &mut |_| {}).expect("runs");
        outcome.parameters.expect("kept").remove("bottom.tables.weight").expect("there")
    };
    for (at_once, added) in trained(24).iter().zip(trained(8)) {
        assert!((at_once - added).abs() <= 1e-5 * at_once.abs().max(0.1), "{at_once} {added}");
    }
}

#[test]
fn what_tables_cannot_do_is_told() {
    let told = |change: &dyn Fn(&mut Strategy)| {
        let mut strategy = on(2, TableSharding::Row);
        change(&mut strategy);
        lower(&tiny_dlrm(), &strategy).unwrap_err().to_string()
    };
    let servers = told(&|s| s.sync = Sync::Servers(1));
    assert!(
        servers.contains("--table-sharding: row: with --sync ps:1 servers hold the weights"),
        "{servers}"
    );
    let apart = told(&|s| s.local = Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average }));
    assert!(
        apart.contains("--table-sharding: row: with --local-steps every replica has"),
        "{apart}"
    );
    assert!(told(&|s| s.pp = 2).contains("--pp: tiny-dlrm is cut by samples and by tables"));
    assert!(
        lower(
            &tiny_gpt(true),
            &Strategy { table_sharding: TableSharding::Row, ..strategy(8, 1, 1) }
        )
        .unwrap_err()
        .to_string()
        .contains("--table-sharding: tiny-gpt has no tables")
    );
}
