//! Networks described operator by operator train like the built-in kinds, in every layout.

use crate::common::{assert_close, assert_same_bits, bits, options, plan, run, strategy};
use paceline_exec::{LrSchedule, TrainOptions, train};
use paceline_plan::DType;
use paceline_plan::model::{Model, built_in};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{OptimizerKind, Recompute, Strategy, Zero};
use std::num::NonZeroU64;

const NAMES: [&str; 3] = ["softmax-digits", "two-tower", "encoder-decoder"];

fn model(name: &str) -> Model {
    built_in::get(name).expect("built in").unwrap_or_else(|errors| panic!("{errors}"))
}

fn one(model: &Model) -> Strategy {
    Strategy { seq: model.seq, ..strategy(8, 2, 4) }
}

#[test]
fn any_layout_gives_the_same_bits() {
    for name in NAMES {
        let model = model(name);
        let one = one(&model);
        let schedule = ScheduleKind::ZbH1 { chunks: 1 };
        let layouts = [
            ("dp 2", Strategy { dp: 2, ..one.clone() }),
            ("zero 3", Strategy { dp: 4, zero: Zero::Parameters, ..one.clone() }),
            ("pp 2", Strategy { pp: 2, ..one.clone() }),
            ("pp 2, zero bubble", Strategy { pp: 2, schedule, ..one.clone() }),
            ("dp 2, pp 2", Strategy { dp: 2, pp: 2, ..one.clone() }),
            ("full", Strategy { recompute: Recompute::Full, ..one.clone() }),
        ];
        assert_same_bits(&model, &one, &layouts);
    }
    // Several tensors cross every boundary between stages.
    for name in &NAMES[1..] {
        let model = model(name);
        let one = one(&model);
        assert_same_bits(&model, &one, &[("pp 4", Strategy { pp: 4, ..one.clone() })]);
    }
}

#[test]
fn tensor_parallelism_changes_rounding_only() {
    for name in NAMES {
        let model = model(name);
        let one = one(&model);
        let layouts = [
            ("tp 2", Strategy { tp: 2, ..one.clone() }),
            ("tp 4, full", Strategy { tp: 4, recompute: Recompute::Full, ..one.clone() }),
            ("dp 2, tp 2, pp 2", Strategy { dp: 2, tp: 2, pp: 2, ..one.clone() }),
        ];
        assert_close(&model, &one, 1e-4, &layouts);
    }
}

/// The kind `mlp`, written out with the names of its parameters, is that network to the bit.
#[test]
fn a_network_written_out_is_the_built_in_one() {
    let text =
        "kind = \"mlp\"\nlayers = 2\nd_model = 16\nffn = 32\nseq = 16\nvocab = 40\ntied = false\n";
    let built_in = Model::parse(text, "tiny.toml").unwrap();
    let text = r#"
        kind = "graph"
        [input]
        data = "tokens"
        vocab = 40
        seq = 16
        [[layer]]
        name = "embedding"
        operators = [
            { op = "embedding", reads = "tokens", makes = "table", width = 16 },
        ]
        [[layer]]
        name = "blocks"
        repeat = 2
        operators = [
            { op = "linear", reads = "table", makes = "up", width = 32 },
            { op = "relu", reads = "up", makes = "active" },
            { op = "linear", reads = "active", makes = "down", width = 16 },
            { op = "relu", reads = "down", makes = "table" },
        ]
        [[layer]]
        name = "head"
        operators = [
            { op = "linear", reads = "table", makes = "table", width = 40, bias = false, init = 0.02 },
            { op = "cross_entropy", reads = "table" },
        ]
    "#;
    let described = Model::parse(text, "tiny.toml").unwrap_or_else(|errors| panic!("{errors}"));
    assert_eq!(described.parameters(), built_in.parameters());
    let layouts = [strategy(8, 2, 4), Strategy { dp: 2, pp: 2, ..strategy(8, 2, 4) }];
    for layout in layouts {
        let [found, expected] = [&described, &built_in].map(|model| run(model, &layout));
        assert_eq!(bits(&found), bits(&expected));
        assert_eq!(found.parameters, expected.parameters);
    }
    let cut = Strategy { tp: 2, ..strategy(8, 2, 4) };
    assert_eq!(bits(&run(&described, &cut)), bits(&run(&built_in, &cut)));
}

/// A small step down the gradient lowers the loss by the step's length times the gradient's.
#[test]
fn gradients_are_those_of_the_loss() {
    for name in NAMES {
        let model = model(name);
        let layout = Strategy { optimizer: OptimizerKind::Sgd, ..one(&model) };
        let lr = if name == "softmax-digits" { 1e-3 } else { 1e-4 };
        let (distinct, schedule) = (NonZeroU64::new(8), LrSchedule::Constant);
        let step = TrainOptions {
            lr,
            weight_decay: 0.0,
            distinct,
            clip: None,
            warmup: 0,
            schedule,
            ..options(2)
        };
        let outcome = train(&plan(&model, &layout), &step, &mut |_| {}).expect("runs");
        let [before, after] = [&outcome.iterations[0], &outcome.iterations[1]];
        let norm = f64::from(before.grad_norm);
        let expected = lr * norm * norm;
        let found = f64::from(before.loss - after.loss);
        assert!((found / expected - 1.0).abs() < 0.05, "{name}: {found} for {expected}");
    }
}

#[test]
fn losses_fall() {
    for (name, below) in [("softmax-digits", 0.8), ("two-tower", 0.5), ("encoder-decoder", 3.9)] {
        let model = model(name);
        let layout =
            Strategy { dp: 2, leaves: 2, ..Strategy { seq: model.seq, ..strategy(32, 16, 2) } };
        let options = TrainOptions { lr: 3e-3, ..options(120) };
        let outcome = train(&plan(&model, &layout), &options, &mut |_| {}).expect("runs");
        let [first, last] = [0, 119].map(|at| outcome.iterations[at].loss);
        assert!(last < below && last < first, "{name}: {first} to {last}");
        let narrow = Strategy { dtype: DType::Bf16, ..layout };
        let bf16 = train(&plan(&model, &narrow), &options, &mut |_| {}).expect("runs");
        let found = bf16.iterations[119].loss;
        assert!(found < 1.5 * below, "{name} in bf16: {found}");
    }
}
