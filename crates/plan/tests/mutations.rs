//! Plans that the lowering makes are valid, and stop being so when they are damaged.

use paceline_plan::DType;
use paceline_plan::collective::Order;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Strategy, Sync, Zero};
use paceline_plan::validate::validate;

fn strategies() -> Vec<(&'static str, Strategy)> {
    let base = Strategy { global_batch: 8, micro_batch: 1, seq: 16, ..Strategy::default() };
    let mut all = Vec::new();
    for (dp, tp, pp, sp) in
        [(1, 1, 1, false), (2, 1, 1, false), (1, 2, 1, false), (1, 2, 1, true), (1, 1, 2, false),
         (2, 2, 2, true), (4, 1, 3, false), (2, 2, 1, false)]
    {
        for zero in [Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters] {
            for order in [Order::Canonical, Order::Free] {
                for schedule in [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::Interleaved { chunks: 2 }] {
                    for overlap in [true, false] {
                        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                        for leaves in [dp, 4] {
                        for sync in [Sync::AllReduce, Sync::Servers(1), Sync::Servers(2)] {
                            let dtype = if overlap { DType::F32 } else { DType::Bf16 };
                            for model in ["mlp", "mini", "mini-llama"] {
                            all.push((model, Strategy { dp, tp, pp, sp, zero, order, schedule, overlap, recompute, leaves, sync, dtype, ..base.clone() }));
                            }
                        }}}
                    }
                }
            }
        }
    }
    all
}

#[test]
fn probe() {
    let mut ok = 0; let mut refused = std::collections::BTreeMap::new(); let mut bad = 0; let mut classes = std::collections::BTreeMap::new();
    for (model, strategy) in strategies() {
        let model = built_in::get(model).unwrap().unwrap();
        match std::panic::catch_unwind(|| lower(&model, &strategy)) {
            Err(_) => { bad += 1; eprintln!("PANIC {} {strategy:?}", model.name()); }
            Ok(Err(e)) => { *refused.entry(e.to_string()).or_insert(0) += 1; }
            Ok(Ok(plan)) => {
                let v = validate(&plan, None);
                if v.is_empty() { ok += 1; } else {
                    bad += 1;
                    let key = format!("{} pp{} dp{} tp{} {:?} {:?} {:?} {:?}", model.name(), strategy.pp, strategy.dp, strategy.tp, strategy.zero, strategy.order, strategy.schedule, strategy.sync);
                    classes.entry(key).or_insert_with(|| v.iter().take(5).map(|v| v.to_string()).collect::<Vec<_>>());
                }
            }
        }
    }
    eprintln!("{classes:#?}");
    eprintln!("ok {ok} bad {bad} refused {refused:#?}");
    let _: Option<Plan> = None;
}
#[test]
#[ignore]
fn speed() {
    let model = built_in::get("gpt-1008b").unwrap().unwrap();
    for (overlap, zero, sp) in [(true, Zero::None, false), (true, Zero::Parameters, true)] {
    let strategy = Strategy { dp: 6, tp: 8, pp: 64, sp, zero, overlap, global_batch: 3072, micro_batch: 1, seq: 2048, dtype: DType::Bf16, order: Order::Free, leaves: 6, recompute: Recompute::Full, ..Strategy::default() };
    let t = std::time::Instant::now();
    let plan = lower(&model, &strategy).unwrap();
    let ops: usize = plan.programs.iter().map(|p| p.body.nodes.len()).sum();
    eprintln!("lower {:?} ops {ops} lanes {:?} buffers {} segs {} templ ops {:?}", t.elapsed(), plan.programs[1].lanes, plan.programs[1].buffers.len(), plan.programs[1].segments.len(), plan.templates.iter().map(|t| t.operands.len()).collect::<Vec<_>>());
    let t = std::time::Instant::now();
    let v = validate(&plan, None);
    eprintln!("validate {:?} {}", t.elapsed(), v.len());
    for v in v.iter().take(5) { eprintln!("    {v}"); }
    }
}
