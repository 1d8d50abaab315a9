//! Simulation time of whole iterations.

// The macro generates undocumented items.
#![allow(missing_docs)]

use criterion::{Criterion, criterion_group, criterion_main};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Strategy};
use paceline_sim::cluster::{Cluster, preset};
use paceline_sim::{NetworkKind, Options, simulate};
use std::hint::black_box;

/// GPT-3 175B with 8 tensor-parallel ranks, 8 stages of 3 chunks, and `dp` replicas.
fn gpt3(dp: u32) -> (Plan, Cluster) {
    let model = built_in::get("gpt3-175b").unwrap().unwrap();
    let strategy = Strategy {
        tp: 8,
        pp: 8,
        dp,
        schedule: ScheduleKind::Interleaved { chunks: 3 },
        global_batch: 96 * u64::from(dp),
        seq: model.seq,
        recompute: Recompute::Full,
        dtype: DType::Bf16,
        order: SummationOrder::Free,
        ..Strategy::default()
    };
    let plan = lower(&model, &strategy).unwrap();
    let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
    (plan, cluster)
}

fn iterations(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("iteration");
    group.sample_size(10);
    for (name, dp, network) in [
        ("gpt3-175b tp8 pp8 dp16 interleaved:3, analytic", 16, NetworkKind::Analytic),
        ("the same on 65,536 devices, analytic", 1024, NetworkKind::Analytic),
        ("the same on 1,024 devices, flow", 16, NetworkKind::Flow),
    ] {
        let (plan, cluster) = gpt3(dp);
        let options = Options { network, ..Options::default() };
        group.bench_function(name, |bencher| {
            bencher.iter(|| simulate(black_box(&plan), &cluster, &options).unwrap().iteration);
        });
    }
    group.bench_function("lowering gpt3-175b on 65,536 devices", |bencher| {
        bencher.iter(|| gpt3(black_box(1024)).0.programs.len());
    });
    group.finish();
}

criterion_group!(benches, iterations);
criterion_main!(benches);
