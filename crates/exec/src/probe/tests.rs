use super::*;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::strategy::Strategy;

fn plan(model: &str) -> Plan {
    let model = built_in::get(model).unwrap().unwrap();
    let strategy = Strategy { seq: 16, ..Strategy::default() };
    lower(&model, &strategy).unwrap()
}

fn conditions<'a>(stop: &'a AtomicBool, ranks: u32, sweep: Option<&'a Sweep>) -> Conditions<'a> {
    Conditions { ranks, threads: NonZeroUsize::MIN, sweep, effort: Duration::ZERO, stop }
}

#[test]
fn every_operator_of_the_small_models_can_be_timed() {
    let stop = AtomicBool::new(true);
    for model in ["mini", "mini-llama"] {
        let plan = plan(model);
        for (at, template) in plan.templates.iter().enumerate() {
            for op in 0..template.ops.len() {
                let time = time(&plan, at, Subject::Operator(op), &conditions(&stop, 1, None));
                assert!(time.unwrap().0 > 0.0, "{model}: {} {op}", template.name);
            }
        }
    }
}

#[test]
fn ranks_run_beside_each_other_on_memory_of_their_own() {
    let stop = AtomicBool::new(true);
    let plan = plan("mini");
    let sweep = Sweep::new(3, 1 << 20);
    for subject in [
        Subject::Step(5000, StepPhase::Apply),
        Subject::Accumulate(4096, AccumulateMode::Add),
        Subject::Accumulate(4096, AccumulateMode::Move),
    ] {
        let time = time(&plan, 0, subject, &conditions(&stop, 3, Some(&sweep)));
        assert!(time.unwrap().0 > 0.0, "{subject:?}");
    }
}

#[test]
fn an_op_without_work_costs_something_and_so_does_a_token() {
    let plan = plan("mini");
    assert!(overhead(&plan, Duration::ZERO).unwrap().0 > 0.0);
    assert!(load(&plan, Duration::from_micros(100)).unwrap().0 > 0.0);
}

#[test]
fn exchanges_are_timed_on_every_rank() {
    use paceline_plan::collective::{Algorithm, CollectiveKind};
    let timing = Timing { bytes: 4096, laps: 3, channel: 0, patience: Duration::from_secs(20) };
    std::thread::scope(|scope| {
        for mut transport in threads::world(2) {
            scope.spawn(move || {
                let there = message(&mut transport, &timing).unwrap();
                assert!(there.0 > 0.0);
                for (channel, kind) in (2..).step_by(2).zip(CollectiveKind::ALL) {
                    let timing = Timing { channel, ..timing };
                    let time = collective(&mut transport, kind, Algorithm::Direct, 2, &timing);
                    assert!(time.unwrap().0 > 0.0, "{kind}");
                }
            });
        }
    });
}
