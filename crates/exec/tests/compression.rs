//! Compressed gradients: traffic is as planned, replicas stay identical, and training reaches the
//! same loss as without compression.

use crate::common::wires::train_over;
use crate::common::{bits, options, plan, strategy, tiny_gpt, tiny_llama};
use paceline_comm::thread::{ThreadTransport, world};
use paceline_comm::{CommError, Header, MessageSink, RecvStatus, Tag, Transport, Wait, Waker};
use paceline_exec::{LrSchedule, Outcome, TrainOptions, run_process_rank, train};
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::compress::Compression;
use paceline_plan::ids::Rank;
use paceline_plan::outer_optimizer::{LocalSgd, OuterOptimizer};
use paceline_plan::program::{IterationFilter, Plan};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, OptimizerKind, Strategy};
use paceline_plan::summary::program_traffic;
use paceline_plan::units::Bytes;
use std::time::Duration;

const ALL: [Compression; 4] =
    [Compression::Int8, Compression::OneBit, Compression::TopK(0.1), Compression::PowerSgd(2)];

/// Replicas of one sample each, with compressed gradients.
fn replicas(dp: u32, compress: Compression) -> Strategy {
    let optimizer = OptimizerKind::Momentum;
    Strategy { dp, compress, optimizer, order: SummationOrder::Free, ..strategy(8, 1, 8) }
}

/// Transport that counts the plan's bytes.
struct Counted {
    wires: ThreadTransport,
    bytes: u64,
}

/// Bit set in the channels of control messages, which are not part of the plan.
const BESIDE: u32 = 1 << 30;

impl Transport for Counted {
    fn rank(&self) -> Rank {
        self.wires.rank()
    }

    fn world(&self) -> u32 {
        self.wires.world()
    }

    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
        if header.tag.channel() & BESIDE == 0 || header.tag.channel() >> 31 == 1 {
            self.bytes += data.iter().map(|piece| piece.len() as u64).sum::<u64>();
        }
        self.wires.send(to, header, data)
    }

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        self.wires.try_recv_into(from, tag, visit)
    }

    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError> {
        self.wires.try_recv(from, tag, read)
    }

    fn wait(&mut self, how: Wait, at_most: Duration) -> Result<(), CommError> {
        self.wires.wait(how, at_most)
    }

    fn waker(&self) -> Option<Waker> {
        self.wires.waker()
    }

    fn abort(&mut self, reason: &str) {
        self.wires.abort(reason);
    }
}

/// Bytes sent by each rank in a run.
fn counted(plan: &Plan, options: &TrainOptions) -> Vec<u64> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world(plan.mesh.world())
            .into_iter()
            .map(|wires| {
                scope.spawn(move || {
                    let mut wires = Counted { wires, bytes: 0 };
                    run_process_rank(plan, options, &mut wires, &mut |_| {}).expect("a sound plan");
                    wires
                })
            })
            .collect();
        let ends: Vec<Counted> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        ends.into_iter().map(|wires| wires.bytes).collect()
    })
}

/// Bytes that the first rank sends in an iteration according to the plan.
fn planned_bytes(plan: &Plan) -> u64 {
    let traffic = program_traffic(plan, plan.program(Rank(0)));
    traffic.values().map(|traffic| traffic.bytes.0).sum()
}

#[test]
fn bytes_on_the_wire_are_those_planned() {
    let model = tiny_gpt(false);
    let steps = Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average });
    for (dp, local) in [(2, None), (4, None), (2, steps)] {
        let mut whole = 0;
        for compress in [Compression::None].into_iter().chain(ALL) {
            let ring = Strategy { collective: Algorithm::Ring, local, ..replicas(dp, compress) };
            let plan = plan(&model, &ring);
            let planned = planned_bytes(&plan);
            // The traffic summary describes the first rank, if blocks do not divide equally.
            let whole_first = u64::from(ring.compress_warmup(3));
            let expected = whole_first * planned_bytes(&plan.filtered(IterationFilter::Warmup))
                + (3 - whole_first) * planned;
            assert_eq!(counted(&plan, &options(3))[0], expected, "{compress}");
            match compress {
                Compression::None => whole = planned,
                _ => assert!(2 * planned < whole, "{compress}: {planned} of {whole}"),
            }
            if compress != Compression::None && local.is_none() {
                let optimizer = OptimizerKind::AdamW;
                let late = Strategy { compress_warmup: Some(2), optimizer, ..ring };
                let plan = crate::common::plan(&model, &late);
                let warming_up = planned_bytes(&plan.filtered(IterationFilter::Warmup));
                assert!(warming_up >= whole && planned_bytes(&plan) == planned, "{compress}");
                let sent = counted(&plan, &options(3))[0];
                assert_eq!(sent, 2 * warming_up + planned, "{compress} after a warm-up");
            }
        }
    }
}

#[test]
fn replicas_end_alike_over_every_transport() {
    let model = tiny_llama();
    for compress in ALL {
        let plan = plan(&model, &replicas(2, compress));
        let expected = train_over(&plan, "thread", &options(4));
        for transport in ["shm", "tcp"] {
            let found = train_over(&plan, transport, &options(4));
            assert_eq!(bits(&found), bits(&expected), "{compress} over {transport}");
            assert_eq!(found.parameters, expected.parameters, "{compress} over {transport}");
        }
    }
}

/// Mean loss of the last iterations.
fn end(outcome: &Outcome) -> f32 {
    let last = &outcome.iterations[outcome.iterations.len() - 20..];
    last.iter().map(|i| i.loss).sum::<f32>() / last.len() as f32
}

/// Final loss of a layout at a learning rate, averaged over seeds: single runs differ by about one
/// percent.
fn rest(layout: &Strategy, lr: f64, seeds: &[u64]) -> f32 {
    let plan = &plan(&tiny_gpt(true), layout);
    let of_seed = |seed: u64| {
        // The learning rate decays, so that the loss hardly moves towards the end.
        let schedule = LrSchedule::Linear;
        let keep_parameters = false;
        let weight_decay = 0.0;
        let run =
            TrainOptions { keep_parameters, schedule, lr, seed, weight_decay, ..options(1000) };
        end(&train(plan, &run, &mut |_| {}).unwrap())
    };
    // Ranks of a tiny model mostly wait, so concurrent runs take little longer than one.
    let ends: Vec<f32> = std::thread::scope(|scope| {
        let runs: Vec<_> = seeds.iter().map(|&seed| scope.spawn(move || of_seed(seed))).collect();
        runs.into_iter().map(|run| run.join().expect("a run that ends")).collect()
    });
    ends.iter().sum::<f32>() / ends.len() as f32
}

/// Two replicas of two samples each.
fn small(optimizer: OptimizerKind, compress: Compression) -> Strategy {
    Strategy { optimizer, global_batch: 4, micro_batch: 2, ..replicas(2, compress) }
}

/// Unspecified options, such as the warm-up, have their defaults. Without a warm-up, momentum with
/// `onebit` would stay within the bound for seed 0; for each of the three other seeds it would end
/// more than 4 % higher.
#[test]
fn losses_end_within_two_percent_of_those_without_compression() {
    let mut wrong = Vec::new();
    let optimizers = [
        (OptimizerKind::Sgd, 1.0, &[0][..]),
        (OptimizerKind::Momentum, 0.3, &[1, 2, 3]),
        (OptimizerKind::AdamW, 0.01, &[0, 1]),
    ];
    for (optimizer, lr, seeds) in optimizers {
        let whole = rest(&small(optimizer, Compression::None), lr, seeds);
        let guessing = (tiny_gpt(true).vocab as f32).ln();
        assert!(whole < 0.9 * guessing, "{optimizer} learns nothing: {whole}");
        for compress in ALL {
            let found = rest(&small(optimizer, compress), lr, seeds);
            let off = 100.0 * (found - whole) / whole;
            let told = format!("{optimizer}, {compress}: {found} against {whole}, {off:+.2} %");
            eprintln!("{told}");
            if off.abs() > 2.0 {
                wrong.push(told);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Alternative that protects Adam's second moments: each replica makes its own step, and steps are
/// compressed. Where noise dominates the gradient, the second moments of one of P replicas are P
/// times as large, so the learning rate is √P times as large.
#[test]
fn compressed_steps_of_adam_end_within_two_percent_too() {
    let whole = small(OptimizerKind::AdamW, Compression::None);
    let expected = rest(&whole, 0.01, &[0, 1]);
    for compress in [Compression::OneBit, Compression::TopK(0.1)] {
        let local = Some(LocalSgd { steps: 1, outer: OuterOptimizer::Average });
        let steps = Strategy { compress, local, ..whole.clone() };
        let found = rest(&steps, 0.01 * 2f64.sqrt(), &[0, 1]);
        let off = (found - expected) / expected;
        eprintln!("{compress}: {found} against {expected}, {:+.2} %", 100.0 * off);
        assert!(off.abs() < 0.02, "{compress}: {found} against {expected}");
    }
}

/// With every layout, the first iterations match those of uncompressed gradients, within
/// quantisation error.
#[test]
fn every_layout_can_compress() {
    let (gpt, llama) = (tiny_gpt(true), tiny_llama());
    let small = Bytes(1);
    let base = |compress| Strategy { bucket: small, ..replicas(2, compress) };
    let layouts: [(&str, &dyn Fn(Compression) -> Strategy); 7] = [
        ("accumulation", &|c| Strategy { global_batch: 16, ..base(c) }),
        ("offloaded activations", &|c| Strategy { offload: Offload::Activations, ..base(c) }),
        ("no overlap", &|c| Strategy { overlap: false, ..base(c) }),
        ("pipeline", &|c| Strategy { pp: 2, ..base(c) }),
        ("pipeline without flush", &|c| Strategy {
            pp: 2,
            global_batch: 2,
            schedule: "pipedream".parse::<ScheduleKind>().expect("a schedule"),
            ..base(c)
        }),
        ("tensor", &|c| Strategy { tp: 2, ..base(c) }),
        ("context", &|c| Strategy { dp: 1, cp: 2, ..base(c) }),
    ];
    for (name, layout) in layouts {
        let model =
            if matches!(name, "pipeline without flush" | "context") { &llama } else { &gpt };
        let whole = crate::common::run(model, &layout(Compression::None));
        for compress in ALL {
            let found = crate::common::run(model, &layout(compress));
            let tolerance = if compress == Compression::Int8 { 2e-3 } else { 5e-2 };
            for (f, w) in found.iterations.iter().zip(&whole.iterations) {
                let off = (f.loss - w.loss).abs() / w.loss;
                assert!(off < tolerance, "{name}, {compress}: {} against {}", f.loss, w.loss);
                assert!(f.grad_norm.is_finite() && f.grad_norm > 0.0, "{name}, {compress}");
            }
        }
        // A warm-up is bitwise a run without compression, and the iterations after it stay close.
        let adam = Strategy { optimizer: OptimizerKind::AdamW, ..layout(Compression::None) };
        let whole = crate::common::run(model, &adam);
        let compress = Compression::OneBit;
        let found =
            crate::common::run(model, &Strategy { compress, compress_warmup: Some(3), ..adam });
        assert_eq!(bits(&found)[..3], bits(&whole)[..3], "{name}");
        for (f, w) in found.iterations.iter().zip(&whole.iterations) {
            let off = (f.loss - w.loss).abs() / w.loss;
            assert!(off < 5e-2, "{name}, after a warm-up: {} against {}", f.loss, w.loss);
        }
        assert_ne!(bits(&found)[3..], bits(&whole)[3..], "{name}: nothing was compressed");
    }
}
