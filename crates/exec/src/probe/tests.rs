use super::*;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::strategy::Strategy;

fn plan(model: &str) -> Plan {
    let model = built_in::get(model).unwrap().unwrap();
    let strategy = Strategy { seq: 16, ..Strategy::default() };
    lower(&model, &strategy).unwrap()
}

fn conditions<'a>(stop: &'a AtomicBool, ranks: u32, before: CachePrep<'a>) -> Conditions<'a> {
    Conditions { ranks, threads: NonZeroUsize::MIN, before, effort: Duration::ZERO, stop }
}

#[test]
fn every_operator_of_the_small_models_can_be_timed() {
    let stop = AtomicBool::new(true);
    for model in ["mini", "mini-llama"] {
        let plan = plan(model);
        for (at, template) in plan.templates.iter().enumerate() {
            for op in 0..template.ops.len() {
                let time = time(
                    &plan,
                    at,
                    ProbeTarget::Operator(op),
                    &conditions(&stop, 1, CachePrep::Warm),
                );
                assert!(time.unwrap().0 > 0.0, "{model}: {} {op}", template.name);
            }
        }
    }
}

#[test]
fn ranks_run_beside_each_other_on_memory_of_their_own() {
    let stop = AtomicBool::new(true);
    let plan = plan("mini");
    let sweep = CacheFlush::new(3, 1 << 20);
    for subject in [
        ProbeTarget::Step(5000, StepPhase::Apply),
        ProbeTarget::Accumulate(4096, AccumulateMode::Add),
        ProbeTarget::Accumulate(4096, AccumulateMode::Move),
    ] {
        let time = time(&plan, 0, subject, &conditions(&stop, 3, CachePrep::Flush(&sweep)));
        assert!(time.unwrap().0 > 0.0, "{subject:?}");
    }
}

#[test]
fn an_op_without_work_costs_something_and_so_does_a_token() {
    let plan = plan("mini");
    for turn in [EmptyOp::Computation, EmptyOp::Exchange] {
        assert!(overhead(&plan, turn, Duration::ZERO).unwrap().0 > 0.0, "{turn:?}");
    }
    assert!(load(&plan, Duration::from_micros(100)).unwrap().0 > 0.0);
}

#[test]
fn exchanges_are_timed_on_every_rank() {
    use paceline_plan::collective::{Algorithm, CollectiveKind};
    let (timeout, clock) = (Duration::from_secs(20), Instant::now());
    let timing = Timing { bytes: 4096, laps: 3, channel: 0, timeout, clock };
    let sweep = CacheFlush::new(2, 1 << 20);
    std::thread::scope(|scope| {
        for mut transport in threads::world(2) {
            let sweep = &sweep;
            scope.spawn(move || {
                let there = message(&mut transport, &timing).unwrap();
                assert!(there.0 > 0.0);
                let told = |laps: Vec<Lap>| {
                    assert_eq!(laps.len(), 3);
                    for lap in laps {
                        let (from, until) = lap.wait.unwrap_or((lap.finished, lap.finished));
                        assert!(
                            lap.arrived <= from && from <= until && until <= lap.finished,
                            "{lap:?}"
                        );
                        assert!(lap.spent_after(0.0) > 0.0, "{lap:?}");
                        assert_eq!(lap.spent_after(lap.finished), 0.0);
                    }
                };
                let cold = CachePrep::Flush(sweep);
                let timing = Timing { channel: 2, ..timing };
                told(delivery(&mut transport, &timing, cold).unwrap());
                for (channel, kind) in (4..).step_by(4).zip(CollectiveKind::ALL) {
                    let warm = CachePrep::Warm;
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
    let lap = Lap { arrived: 1.0, wait: Some((1.5, 4.0)), finished: 6.0 };
    assert_eq!(lap.spent_after(0.0), 2.5);
    assert_eq!(lap.spent_after(3.0), 2.0, "the others came at 3");
    assert_eq!(lap.spent_after(5.0), 1.0);
    assert_eq!(Lap { wait: None, ..lap }.spent_after(2.0), 4.0);
}

#[test]
fn a_crowd_goes_when_it_is_no_longer_wanted() {
    drop(BackgroundLoad::new(3));
}
