use crate::cluster::preset;
use crate::{Options, Outcome, simulate};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::lower::lower;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::strategy::{Recompute, Strategy, Sync};
use paceline_plan::trace::{Origin, SpanKind};
use paceline_plan::units::Bytes;

fn gpt3(strategy: Strategy) -> (Plan, Outcome) {
    let model = built_in::get("gpt3-175b").unwrap().unwrap();
    let strategy =
        Strategy { seq: model.seq, dtype: DType::Bf16, order: SummationOrder::Free, ..strategy };
    let plan = lower(&model, &strategy).unwrap();
    let cluster = preset::holding("dgx-a100", plan.mesh.world().into()).unwrap();
    let outcome = simulate(&plan, &cluster, &Options { trace: true, ..Options::default() });
    (plan, outcome.unwrap())
}

/// Narayanan et al. (arXiv 2104.04473), eq. 3 without the quarter for recomputation.
#[test]
fn mfu_counts_the_published_operations_whatever_the_layout() {
    let model = built_in::get("gpt3-175b").unwrap().unwrap();
    let (b, s, l) = (16.0, model.seq as f64, model.layers as f64);
    let (h, v) = (model.d_model as f64, model.vocab as f64);
    let published = 72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
    let base = Strategy { global_batch: 16, ..Strategy::default() };
    let layouts = [
        Strategy { tp: 8, ..base.clone() },
        Strategy { tp: 8, pp: 8, recompute: Recompute::Full, ..base.clone() },
        Strategy { tp: 8, dp: 4, sp: true, recompute: Recompute::Selective, ..base },
    ];
    for layout in layouts {
        let (plan, outcome) = gpt3(layout);
        let devices = f64::from(plan.mesh.world());
        let scale = outcome.iteration.0 * devices * 312e12;
        let counted = outcome.mfu_full_attention * scale;
        // A vocabulary not divisible by tp is padded, and the padding is computed.
        assert!((counted / published - 1.0).abs() < 1e-4, "{counted} {published}");
        // Causal attention halves the term of the scores.
        let causal = published - 6.0 * b * s * s * l * h;
        assert!((outcome.mfu * scale / causal - 1.0).abs() < 1e-4, "{causal}");
        let tokens = outcome.tokens_per_s_per_device * devices * outcome.iteration.0;
        assert!((tokens / (16.0 * s) - 1.0).abs() < 1e-9);
    }
}

/// Whatever the length of the sequence: attention that is never computed is no work done.
#[test]
fn mfu_never_exceeds_what_the_device_sustains() {
    for (name, seq, cp) in
        [("llama3-70b", 131_072, 1), ("llama3-8b", 65_536, 4), ("llama3-8b", 8192, 1)]
    {
        let model = built_in::get(name).unwrap().unwrap();
        for kind in ["dgx-a100", "dgx-h100", "dgx-b200", "tpu-v4"] {
            let strategy = Strategy {
                tp: 8,
                cp,
                sp: true,
                seq,
                global_batch: 1,
                dtype: DType::Bf16,
                order: SummationOrder::Free,
                ..Strategy::default()
            };
            let plan = lower(&model, &strategy).unwrap();
            let cluster = preset::holding(kind, plan.mesh.world().into()).unwrap();
            let outcome = simulate(&plan, &cluster, &Options::default()).unwrap();
            let sustained = cluster.device.sustained_efficiency;
            assert!(outcome.mfu <= sustained, "{name} on {kind}: {} > {sustained}", outcome.mfu);
            assert!(outcome.mfu < outcome.mfu_full_attention);
        }
    }
}

#[test]
fn ops_are_summed_by_what_they_do() {
    let layout = Strategy { tp: 8, pp: 4, dp: 2, global_batch: 16, ..Strategy::default() };
    let (_, outcome) = gpt3(layout);
    let find = |name: &str| outcome.ops.iter().find(|op| op.name == name);
    for name in ["forward", "backward", "all_reduce tp", "all_reduce dp", "optimizer step"] {
        assert!(find(name).is_some_and(|op| op.count > 0 && op.time.0 > 0.0), "{name}");
    }
    assert!(find("recompute").is_none());
    assert_eq!(find("forward").unwrap().exposed.0, 0.0);
    let all = find("all_reduce tp").unwrap();
    assert!(0.0 < all.exposed.0 && all.exposed.0 < all.time.0, "weight gradients hide a part");
    assert!(outcome.ops.windows(2).all(|pair| pair[0].time.0 >= pair[1].time.0));
}

#[test]
fn what_does_not_fit_is_told() {
    let (plan, alone) = gpt3(Strategy { global_batch: 1, ..Strategy::default() });
    assert!(!alone.fit.fits && alone.peak_bytes > Bytes(1 << 40));
    assert_eq!(alone.peak_bytes, plan.programs[0].memory.total());
    let (_, spread) = gpt3(Strategy { tp: 8, pp: 16, global_batch: 16, ..Strategy::default() });
    assert!(spread.fit.fits);
}

#[test]
fn the_trace_has_one_rank_of_each_role_and_the_programs_op_numbers() {
    let layout = Strategy { tp: 8, pp: 2, dp: 2, global_batch: 8, ..Strategy::default() };
    let (plan, outcome) = gpt3(layout);
    let trace = outcome.trace.unwrap();
    assert_eq!(trace.origin, Origin::Simulated);
    assert_eq!(trace.world, 32);
    let ranks: Vec<u32> = trace.ranks().iter().map(|rank| rank.0).collect();
    assert_eq!(ranks, [0, 16]);
    let mut forward = 0;
    for span in trace.spans.iter().filter(|span| span.kind == SpanKind::Forward) {
        let program = plan.program(span.rank);
        let node = &program.body.nodes[span.op as usize];
        let paceline_plan::program::Op::Compute { segment, microbatch, .. } = node.op else {
            panic!("{span:?} is {:?}", node.op)
        };
        let template = &plan.templates[program.segment(segment).template as usize];
        assert_eq!(trace.name(span), template.name);
        assert_eq!(trace.lane(span), "compute");
        assert_eq!(span.microbatch, Some(microbatch.0));
        forward += 1;
    }
    assert!(forward > 100);
}

/// A receive that represents both replicas ends with the later one, by which time the next op on
/// its lane may have ended.
#[test]
fn no_span_of_a_trace_runs_backwards() {
    let model = built_in::get("mini").unwrap().unwrap();
    for servers in 1..=3 {
        let (dp, sync) = (2, Sync::Servers(servers));
        let strategy =
            Strategy { dp, sync, seq: 16, leaves: 2, global_batch: 4, ..Strategy::default() };
        let plan = lower(&model, &strategy).unwrap();
        let cluster = preset::get("laptop").unwrap().with_oversubscribed_cores(plan.mesh.world());
        let options = Options { trace: true, ..Options::default() };
        let trace = simulate(&plan, &cluster, &options).unwrap().trace.unwrap();
        for span in &trace.spans {
            assert!(span.start.0 <= span.end.0, "ps:{servers}: {span:?}");
        }
        assert!(trace.to_json().is_ok());
    }
}
