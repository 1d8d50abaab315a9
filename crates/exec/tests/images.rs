//! Residual networks keep the same guarantees as other models.

use crate::common::*;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::{Model, ResNet, Stem};
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{OptimizerKind, Recompute, Strategy, Sync, Zero};
use paceline_plan::units::Bytes;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Three blocks of three convolutions after a large stem, on small, repeatedly downsampled images.
fn deep() -> Model {
    let net = ResNet {
        image: 12,
        channels: 2,
        classes: 5,
        blocks: vec![1, 2],
        width: 4,
        bottleneck: true,
        stem: Stem::Large,
    };
    Model::resnet("deep", net).expect("sound")
}

/// Eight images per iteration, two per microbatch, four leaves.
fn one() -> Strategy {
    Strategy { seq: 1, optimizer: OptimizerKind::Momentum, ..strategy(8, 2, 4) }
}

#[test]
fn any_layout_gives_the_same_bits() {
    let zero = |zero| Strategy { dp: 2, zero, ..one() };
    let schedule = ScheduleKind::ZbH1 { chunks: 1 };
    let layouts = [
        ("dp 2", Strategy { dp: 2, ..one() }),
        ("dp 4", Strategy { dp: 4, ..one() }),
        ("dp 4, small buckets, no overlap", {
            Strategy { dp: 4, bucket: Bytes(1), overlap: false, ..one() }
        }),
        ("zero 1", zero(Zero::Optimizer)),
        ("zero 2", zero(Zero::Gradients)),
        ("zero 3", zero(Zero::Parameters)),
        ("two servers", Strategy { dp: 2, sync: Sync::Servers(2), ..one() }),
        ("pp 2", Strategy { pp: 2, ..one() }),
        ("pp 2, dp 2, zero 3", Strategy { pp: 2, ..zero(Zero::Parameters) }),
        ("pp 4, zero bubble", Strategy { pp: 4, schedule, ..one() }),
        ("dp 2, full", Strategy { dp: 2, recompute: Recompute::Full, ..one() }),
    ];
    for model in [tiny_resnet(), deep()] {
        assert_same_bits(&model, &one(), &layouts);
    }
}

/// Two replicas with synchronised batch norm equal one with twice the microbatch.
#[test]
fn batches_are_normalised_over_replicas() {
    let large = Strategy { global_batch: 8, micro_batch: 8, leaves: 1, ..one() };
    let sync = Strategy { sync_batch_norm: true, micro_batch: 4, leaves: 2, ..large.clone() };
    let layouts = [
        ("dp 2", Strategy { dp: 2, ..sync.clone() }),
        ("dp 2, zero 2", Strategy { dp: 2, zero: Zero::Gradients, ..sync.clone() }),
        ("dp 2, full", Strategy { dp: 2, recompute: Recompute::Full, ..sync.clone() }),
        ("dp 2, pp 2, zero bubble", {
            let schedule = ScheduleKind::ZbH1 { chunks: 1 };
            Strategy { dp: 2, pp: 2, schedule, ..sync }
        }),
    ];
    for model in [tiny_resnet(), deep()] {
        assert_close(&model, &large, 1e-5, &layouts);
    }
    let apart = Strategy { sync_batch_norm: false, ..layouts[0].1.clone() };
    let apart = run(&deep(), &apart);
    let together = run(&deep(), &layouts[0].1);
    assert_ne!(bits(&apart), bits(&together), "other statistics");
}

#[test]
fn threads_change_no_bit() {
    let model = tiny_resnet();
    let run = |threads: usize| {
        let threads_per_rank = NonZeroUsize::new(threads).expect("not zero");
        let options = TrainOptions { threads_per_rank, ..options(4) };
        train(&plan(&model, &one()), &options, &mut |_| {}).expect("runs")
    };
    let (one, three) = (run(1), run(3));
    assert_eq!(bits(&one), bits(&three));
    assert_eq!(one.parameters, three.parameters);
}

#[test]
fn classes_are_learnt_in_every_type() {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let strategy = Strategy { dtype, dp: 2, ..one() };
        let strategy = Strategy { global_batch: 32, micro_batch: 8, ..strategy };
        let options = TrainOptions { lr: 0.1, weight_decay: 0.0, clip: None, ..options(60) };
        let outcome = train(&plan(&tiny_resnet(), &strategy), &options, &mut |_| {});
        let losses = outcome.unwrap_or_else(|error| panic!("{dtype}: {error}")).iterations;
        let mean = |of: &[paceline_exec::IterationReport]| {
            of.iter().map(|i| i.loss).sum::<f32>() / of.len() as f32
        };
        let (first, last) = (mean(&losses[..4]), mean(&losses[52..]));
        assert!(last < 0.5 * first, "{dtype}: from {first} to {last}");
    }
}

/// Running averages follow the averages of each iteration, whatever the optimizer does.
#[test]
fn averages_follow_the_images() {
    let options = TrainOptions { lr: 0.0, ..options(40) };
    let strategy = Strategy { dp: 2, ..one() };
    let outcome = train(&plan(&tiny_resnet(), &strategy), &options, &mut |_| {}).expect("runs");
    let parameters = outcome.parameters.expect("kept");
    let gains = &parameters["stem.norm1.weight"];
    assert!(gains.iter().all(|&gain| gain == 1.0), "nothing is learnt at rate zero");
    let spreads = &parameters["stem.norm1.running_var"];
    // They start at one and move a tenth of the way in each iteration.
    assert!(spreads.iter().all(|&spread| spread > 0.0 && (spread - 1.0).abs() > 1e-3));
    let again = train(&plan(&tiny_resnet(), &one()), &options, &mut |_| {}).expect("runs");
    assert_eq!(again.parameters.expect("kept"), parameters);
}

/// With compressed gradients or an outer step with momentum, the averages are still those of all
/// images.
#[test]
fn averages_are_the_same_however_replicas_agree() {
    let averages = |strategy: &Strategy| {
        let mut parameters = run_for(strategy, TrainOptions { lr: 0.0, ..options(8) }).parameters;
        let all = parameters.as_mut().expect("kept");
        all.retain(|name, _| name.contains("running"));
        parameters.expect("kept")
    };
    let two = Strategy { dp: 2, micro_batch: 4, leaves: 2, order: SummationOrder::Free, ..one() };
    let expected = averages(&two);
    let compressed = ["int8", "onebit", "topk:0.1", "powersgd:2"].map(|word| {
        let compress = word.parse().expect("a compression");
        (word, Strategy { compress, ..two.clone() })
    });
    let apart = [OuterOptimizer::Average, OuterOptimizer::Nesterov].map(|outer| {
        let local = Some(LocalSgd { steps: 1, outer });
        ("apart", Strategy { local, ..two.clone() })
    });
    for (name, layout) in compressed.into_iter().chain(apart) {
        for (tensor, found) in averages(&layout) {
            for (f, e) in found.iter().zip(&expected[&tensor]) {
                assert!((f - e).abs() <= 1e-5 * e.abs().max(0.1), "{name}, {tensor}: {f} {e}");
            }
        }
    }
}

/// Pushes of a single replica to an asynchronous server, or to shared weights, are applied as
/// usual. A server that clipped by the received norm could not tell averages from gradients.
#[test]
fn one_replica_trains_as_ever_where_nobody_waits() {
    let alone = Strategy { order: SummationOrder::Free, leaves: 1, ..one() };
    let options = TrainOptions { clip: None, ..options(6) };
    let expected = run_for(&alone, options.clone()).parameters;
    for sync in ["async-ps:1", "async-ps:2", "ssp:1:1", "hogwild"] {
        let sync: Sync = sync.parse().expect("a way to agree");
        let found = run_for(&Strategy { sync, ..alone.clone() }, options.clone()).parameters;
        assert_eq!(found, expected, "{sync}");
    }
}

#[test]
fn classes_are_learnt_however_replicas_agree() {
    let two = Strategy { dp: 2, order: SummationOrder::Free, ..one() };
    let two = Strategy { global_batch: 32, micro_batch: 8, ..two };
    let sync = |word: &str| Strategy { sync: word.parse().expect("known"), ..two.clone() };
    let local = |outer| Strategy { local: Some(LocalSgd { steps: 2, outer }), ..two.clone() };
    let topk = "topk:0.1".parse().expect("a compression");
    let layouts = [
        ("top-k", Strategy { compress: topk, ..two.clone() }),
        ("local", local(OuterOptimizer::Average)),
        ("local, Nesterov", local(OuterOptimizer::Nesterov)),
        ("a server", sync("async-ps:1")),
        ("hogwild", sync("hogwild")),
    ];
    for (name, layout) in layouts {
        let options = TrainOptions { lr: 0.05, weight_decay: 0.0, clip: Some(1.0), ..options(60) };
        let losses = run_for(&layout, options).iterations;
        let mean = |of: &[paceline_exec::IterationReport]| {
            of.iter().map(|i| i.loss).sum::<f32>() / of.len() as f32
        };
        let (first, last) = (mean(&losses[..4]), mean(&losses[52..]));
        eprintln!("{name}: from {first} to {last}");
        assert!(last < 0.6 * first, "{name}: from {first} to {last}");
    }
}

#[test]
fn what_norms_over_replicas_cannot_do_is_told() {
    let two = Strategy { dp: 2, order: SummationOrder::Free, sync_batch_norm: true, ..one() };
    let local = Some(LocalSgd { steps: 2, outer: OuterOptimizer::Average });
    let sync = Sync::Async { servers: 1, staleness: None };
    for layout in [Strategy { local, ..two.clone() }, Strategy { sync, ..two }] {
        let told = lower(&tiny_resnet(), &layout).unwrap_err().to_string();
        assert!(told.contains("--sync-batch-norm: asynchronous or local-SGD replicas"), "{told}");
    }
}

#[test]
fn a_saved_run_goes_on_with_its_averages() {
    let folder = std::env::temp_dir().join(format!("paceline-images-{}", std::process::id()));
    let whole = run_for(&one(), options(8));
    let save = SaveOptions {
        directory: folder.clone(),
        every: None,
        keep: 1,
        attempt: 1,
        extra_files: Vec::new(),
    };
    let saver = Strategy { dp: 2, zero: Zero::Parameters, ..one() };
    run_for(&saver, TrainOptions { save: Some(save), ..options(4) });
    let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{error}"));
    let start = Start::Checkpoint(Arc::new(checkpoint));
    let rest = run_for(&Strategy { pp: 2, ..one() }, TrainOptions { start, ..options(8) });
    std::fs::remove_dir_all(&folder).expect("was written");
    assert_eq!(bits(&rest), bits(&whole)[4..]);
    assert_eq!(rest.parameters, whole.parameters);
}

fn run_for(strategy: &Strategy, options: TrainOptions) -> paceline_exec::Outcome {
    let run = train(&plan(&tiny_resnet(), strategy), &options, &mut |_| {});
    run.unwrap_or_else(|error| panic!("{strategy:?}: {error}"))
}
