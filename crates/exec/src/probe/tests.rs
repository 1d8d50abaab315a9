use super::*;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::strategy::Strategy;

fn plan(model: &str) -> Plan {
    let model = built_in::get(model).unwrap().unwrap();
    let strategy = Strategy { seq: 16, ..Strategy::default() };
    lower(&model, &strategy).unwrap()
}

fn conditions<'a>(stop: &'a AtomicBool, ranks: u32, before: Before<'a>) -> Conditions<'a> {
    Conditions { ranks, threads: NonZeroUsize::MIN, before, effort: Duration::ZERO, stop }
}

#[test]
fn every_operator_of_the_small_models_can_be_timed() {
    let stop = AtomicBool::new(true);
    for model in ["mini", "mini-llama"] {
        let plan = plan(model);
        for (at, template) in plan.templates.iter().enumerate() {
            for op in 0..template.ops.len() {
                let time =
                    time(&plan, at, Subject::Operator(op), &conditions(&stop, 1, Before::Nothing));
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
        let time = time(&plan, 0, subject, &conditions(&stop, 3, Before::Sweep(&sweep)));
        assert!(time.unwrap().0 > 0.0, "{subject:?}");
    }
}

#[test]
fn an_op_without_work_costs_something_and_so_does_a_token() {
    let plan = plan("mini");
    for turn in [Turn::Computation, Turn::Exchange] {
        assert!(overhead(&plan, turn, Duration::ZERO).unwrap().0 > 0.0, "{turn:?}");
    }
    assert!(load(&plan, Duration::from_micros(100)).unwrap().0 > 0.0);
}

#[test]
fn exchanges_are_timed_on_every_rank() {
    use paceline_plan::collective::{Algorithm, CollectiveKind};
    let (patience, clock) = (Duration::from_secs(20), Instant::now());
    let timing = Timing { bytes: 4096, laps: 3, channel: 0, patience, clock };
    let sweep = Sweep::new(2, 1 << 20);
    std::thread::scope(|scope| {
        for mut transport in threads::world(2) {
            let sweep = &sweep;
            scope.spawn(move || {
                let there = message(&mut transport, &timing).unwrap();
                assert!(there.0 > 0.0);
                let told = |laps: Vec<Lap>| {
                    assert_eq!(laps.len(), 3);
                    for lap in laps {
                        let (from, until) = lap.waited.unwrap_or((lap.left, lap.left));
                        assert!(lap.came <= from && from <= until && until <= lap.left, "{lap:?}");
                        assert!(lap.spent_after(0.0) > 0.0, "{lap:?}");
                        assert_eq!(lap.spent_after(lap.left), 0.0);
                    }
                };
                let cold = Before::Sweep(sweep);
                let timing = Timing { channel: 2, ..timing };
                told(delivery(&mut transport, &timing, cold).unwrap());
                for (channel, kind) in (4..).step_by(4).zip(CollectiveKind::ALL) {
                    let warm = Before::Nothing;
                    for (channel, how) in [(channel, warm), (channel + 2, cold)] {
                        let timing = Timing { channel, ..timing };
                        let direct = Algorithm::Direct;
                        told(collective(&mut transport, kind, direct, 2, &timing, how).unwrap());
                    }
                }
            });
        }
    });
}

#[test]
fn waiting_for_others_is_no_time_in_an_exchange() {
    let lap = Lap { came: 1.0, waited: Some((1.5, 4.0)), left: 6.0 };
    assert_eq!(lap.spent_after(0.0), 2.5);
    assert_eq!(lap.spent_after(3.0), 2.0, "the others came at 3");
    assert_eq!(lap.spent_after(5.0), 1.0);
    assert_eq!(Lap { waited: None, ..lap }.spent_after(2.0), 4.0);
}

#[test]
fn a_crowd_goes_when_it_is_no_longer_wanted() {
    drop(Crowd::new(3));
}
