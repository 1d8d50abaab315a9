//! Laws of the search: no bound exceeds what the simulator says, and the best found is the best.

use super::*;
use crate::bound::Estimator;
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::built_in;
use paceline_sim::cluster::preset;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Deterministic draws.
fn runner() -> TestRunner {
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(Config::default(), rng)
}

fn base(model: &Model, global_batch: u64) -> Strategy {
    Strategy {
        global_batch,
        seq: model.seq,
        dtype: DType::Bf16,
        order: SummationOrder::Free,
        ..Strategy::default()
    }
}

fn request<'a>(model: &'a Model, cluster: &'a Cluster, devices: u32, batch: u64) -> Request<'a> {
    Request {
        model,
        cluster,
        devices,
        base: base(model, batch),
        options: Options::default(),
        pins: Pins::default(),
        top: 1,
        any_memory: false,
    }
}

/// All strategies of a request's space.
fn enumerate(request: &Request<'_>) -> Vec<Strategy> {
    let space = Space::new(request);
    let mut all = Vec::new();
    for mesh in space.meshes() {
        for (ep, etp) in space.experts(&mesh) {
            for sp in space.sequence(&mesh) {
                for recompute in space.recomputes() {
                    for schedule in space.schedules(&mesh) {
                        let strategy =
                            Strategy { ep, etp, sp, recompute, schedule, ..space.strategy(&mesh) };
                        for zero in space.zero_stages(&strategy) {
                            let strategy = Strategy { zero, ..strategy.clone() };
                            all.extend(leaves(&space, &strategy));
                        }
                    }
                }
            }
        }
    }
    all
}

fn leaves(space: &Space<'_>, strategy: &Strategy) -> Vec<Strategy> {
    let mut all = Vec::new();
    for split in space.splits(strategy) {
        for (offload, store) in space.offloads(strategy) {
            let strategy = Strategy { split: split.clone(), offload, store, ..strategy.clone() };
            for setting in space.settings(&strategy) {
                if let paceline_plan::strategy::Recompute::FullOf(first) = setting.recompute {
                    for more in 0..space.recomputed_layers(&setting) {
                        let recompute = paceline_plan::strategy::Recompute::FullOf(first + more);
                        all.push(Strategy { recompute, ..setting.clone() });
                    }
                } else {
                    all.push(setting);
                }
            }
        }
    }
    all
}

/// Cases of the laws: model, cluster, devices, batch.
const CASES: [(&str, &str, u32, u64); 8] = [
    ("gpt2-124m", "dgx-a100", 8, 32),
    ("llama3-8b", "dgx-h100:2", 16, 64),
    ("gpt-39b", "dgx-a100:4", 32, 64),
    ("mini", "laptop", 2, 8),
    ("mini-llama", "dgx-h100", 4, 16),
    ("mini-moe", "dgx-h100", 8, 32),
    ("llama3-8b", "dgx-a100:3", 24, 48),
    ("gpt2-1.5b", "dgx1-v100:2", 16, 32),
];

/// A strategy of a request's space, drawn at random.
fn draw(request: &Request<'_>, runner: &mut TestRunner) -> Option<Strategy> {
    fn pick<T>(all: Vec<T>, runner: &mut TestRunner) -> Option<T> {
        let count = all.len();
        let at = (0..count.max(1)).new_tree(runner).ok()?.current();
        all.into_iter().nth(at)
    }
    let space = Space::new(request);
    let mesh = pick(space.meshes(), runner)?;
    let (ep, etp) = pick(space.experts(&mesh), runner)?;
    let sp = pick(space.sequence(&mesh), runner)?;
    let recompute = pick(space.recomputes(), runner)?;
    let schedule = pick(space.schedules(&mesh), runner)?;
    let strategy = Strategy { ep, etp, sp, recompute, schedule, ..space.strategy(&mesh) };
    let zero = pick(space.zero_stages(&strategy), runner)?;
    pick(leaves(&space, &Strategy { zero, ..strategy }), runner)
}

/// Violations of the bounds of one strategy: its time, memory, and by how much they are exceeded.
fn judge(request: &Request<'_>, worker: &Worker<'_>, strategy: &Strategy) -> Option<[f64; 4]> {
    let mut estimator = Estimator::new(request);
    let explicit = estimator.explicit(strategy)?;
    let simulated = worker.simulate(&explicit)?;
    let staged = estimator.staged(strategy)?;
    let time = simulated.iteration.0;
    let open = estimator.time(strategy, &staged, true);
    let closed = estimator.time(strategy, &staged, false);
    let replay = estimator.replay(strategy, &staged);
    let load = estimator.load(strategy, form::Experts::Placed)?;
    let anywhere = estimator.load(strategy, form::Experts::Anywhere)?;
    let needed = simulated.fit.needed.as_f64();
    let memory = estimator.memory(strategy, &staged);
    let rings = estimator.rings(strategy);
    let early = load.max(anywhere).max(open).max(rings) / time;
    Some([early, closed / time, replay / time, memory / needed])
}

fn check_bounds(draws: usize) {
    let mut runner = runner();
    let (mut tight, mut seen, mut wrong) = (Vec::new(), 0, Vec::new());
    for (name, preset_name, devices, batch) in CASES {
        let Some(Ok(model)) = built_in::get(name) else { panic!("no model {name}") };
        let cluster = preset::get(preset_name).unwrap();
        let request = request(&model, &cluster, devices, batch);
        let worker = Worker::new(&request);
        for _ in 0..draws {
            let Some(strategy) = draw(&request, &mut runner) else { continue };
            let Some(bounds) = judge(&request, &worker, &strategy) else {
                let explicit = Estimator::new(&request).explicit(&strategy);
                let refused = explicit.map(|s| lower_on(&model, &s, &worker.fabric).err());
                panic!("{name} on {preset_name}: {strategy:?} is refused: {refused:?}");
            };
            for (bound, what) in bounds.iter().zip(["open", "closed", "replay", "memory"]) {
                if *bound > 1.0 + 1e-9 {
                    wrong.push(format!("{name} on {preset_name}: {what} {bound}: {strategy:?}"));
                }
            }
            seen += 1;
            if strategy.schedule.flushes() && request.cluster.measured.is_none() {
                tight.push(bounds[1].max(bounds[2]));
            }
        }
    }
    let few = &wrong[..wrong.len().min(8)];
    assert!(
        few.is_empty(),
        "{} bounds of {seen} strategies exceed the truth: {few:#?}",
        wrong.len()
    );
    tight.sort_by(f64::total_cmp);
    let median = tight[tight.len() / 2];
    assert!(seen >= draws * CASES.len() / 2, "{seen}");
    assert!(median > 0.9, "half of the bounds are below {median} of the truth");
}

#[test]
fn no_bound_exceeds_the_simulation() {
    check_bounds(12);
}

#[test]
#[ignore = "10,000 draws; run by .ci/nightly"]
fn no_bound_exceeds_the_simulation_of_many() {
    check_bounds(10_000 / CASES.len());
}

/// The best of a space by simulating all of it, and the best found.
fn compare_with_all(request: &Request<'_>) -> usize {
    let worker = Worker::new(request);
    let mut estimator = Estimator::new(request);
    let all = enumerate(request);
    let truth = all
        .iter()
        .filter_map(|strategy| worker.simulate(&estimator.explicit(strategy)?))
        .filter(|candidate| candidate.fit.fits)
        .map(|candidate| candidate.iteration.0)
        .fold(f64::INFINITY, f64::min);
    let result = search(request, |_| true);
    assert_eq!(result.counts.considered, all.len() as u64);
    assert_eq!(result.counts.bounded + result.counts.simulated, result.counts.considered);
    match result.candidates.first() {
        Some(best) => assert!(best.iteration.0 <= truth, "{} instead of {truth}", best.iteration.0),
        None => assert!(truth.is_infinite(), "nothing found, but {truth} is possible"),
    }
    all.len()
}

fn small_spaces(count: usize) {
    let mut runner = runner();
    let mut sizes = Vec::new();
    while sizes.len() < count {
        let draw = (0usize..4, 0usize..4, 0u32..3, 0u32..3, 0.02..1.0f64);
        let Ok(tree) = draw.new_tree(&mut runner) else { continue };
        let (model, cluster, devices, batch, memory) = tree.current();
        let model = ["mini", "mini-llama", "mini-moe", "mlp"][model];
        let Some(Ok(model)) = built_in::get(model) else { continue };
        let mut cluster =
            preset::get(["dgx-a100", "dgx-h100", "laptop", "dgx1-v100"][cluster]).unwrap();
        let devices = 1 << devices;
        if u64::from(devices) > cluster.devices() {
            continue;
        }
        // So little that some strategies do not fit.
        let parameters = model.parameters() as f64;
        cluster.device.memory = Bytes((parameters * 40.0 * memory) as u64);
        let mut request = request(&model, &cluster, devices, 2 << batch);
        request.pins.bucket =
            Choice { only: Some(vec![Bytes(25 << 20), Bytes(1 << 16)]), never: vec![] };
        sizes.push(compare_with_all(&request));
    }
    assert!(sizes.iter().max() > Some(&50), "{sizes:?}");
}

#[test]
fn the_best_found_is_the_best_of_all() {
    small_spaces(2);
}

#[test]
#[ignore = "1,000 spaces; run by .ci/nightly"]
fn the_best_found_is_the_best_of_all_in_many_spaces() {
    small_spaces(1000);
}

#[test]
fn a_small_model_is_trained_by_data_parallelism() {
    let model = built_in::get("gpt2-124m").unwrap().unwrap();
    let cluster = preset::get("dgx-a100").unwrap();
    let result = search(&request(&model, &cluster, 8, 64), |_| true);
    let best = &result.candidates[0];
    assert!(best.fit.fits);
    assert_eq!((best.strategy.dp, best.strategy.tp, best.strategy.pp), (8, 1, 1));
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let model = built_in::get("llama3-8b").unwrap().unwrap();
    let cluster = preset::get("dgx-h100").unwrap();
    let request = Request { top: 3, ..request(&model, &cluster, 8, 16) };
    let alone = search(&request, |_| true);
    let mut workers: Vec<Worker<'_>> = (0..3).map(|_| Worker::new(&request)).collect();
    let mut turn = 0;
    let answer = |tasks: Vec<Task>| {
        let answers = tasks.iter().map(|task| {
            turn += 1;
            workers[turn % 3].answer(task)
        });
        answers.collect()
    };
    assert_eq!(search_with(&request, answer, |_| true), alone);
    assert_eq!(alone.candidates.len(), 3);
    assert!(alone.candidates.windows(2).all(|pair| pair[0].iteration.0 <= pair[1].iteration.0));
}

#[test]
fn stopping_early_keeps_what_there_is() {
    let model = built_in::get("gpt2-124m").unwrap().unwrap();
    let cluster = preset::get("dgx-a100").unwrap();
    let request = request(&model, &cluster, 8, 8);
    let mut rounds = 0;
    let result = search(&request, |_| {
        rounds += 1;
        rounds < 2
    });
    assert!(result.open.is_some());
    assert!(result.counts.simulated < search(&request, |_| true).counts.simulated);
}
