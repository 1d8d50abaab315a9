//! Enumeration of the layouts to simulate.

use crate::Request;
use paceline_plan::collective::SummationOrder;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Strategy, Zero};

/// Maximum number of candidates per search.
const MOST: usize = 2000;

/// Layouts of the request's devices whose model state fits, by increasing `tp`, then `pp`.
pub fn candidates(request: &Request<'_>) -> Vec<Strategy> {
    let mut all = Vec::new();
    let devices = request.devices.max(1);
    let host = u32::try_from(request.cluster.devices_per_host()).unwrap_or(u32::MAX).max(1);
    for tp in divisors(devices).into_iter().filter(|&tp| tp <= host && tensor_fits(request, tp)) {
        for pp in divisors(devices / tp) {
            let dp = devices / tp / pp;
            for zero in zero_stages(dp) {
                for ep in parts_of_experts(request, tp * dp) {
                    if !state_fits(request, tp, pp, dp, ep, zero) {
                        continue;
                    }
                    for schedule in schedules(request, pp) {
                        batches(request, MeshSplit { tp, pp, dp, ep, zero, schedule }, &mut all);
                    }
                }
            }
        }
    }
    all.truncate(MOST);
    all
}

#[derive(Clone, Copy)]
struct MeshSplit {
    tp: u32,
    pp: u32,
    dp: u32,
    ep: u32,
    zero: Zero,
    schedule: ScheduleKind,
}

/// Adds microbatch sizes and recomputation options for one mesh split.
fn batches(request: &Request<'_>, cut: MeshSplit, all: &mut Vec<Strategy>) {
    let base = &request.base;
    let per_replica = base.global_batch / u64::from(cut.dp);
    if per_replica == 0 || !base.global_batch.is_multiple_of(u64::from(cut.dp)) {
        return;
    }
    for micro_batch in [1, 2, 4, 8].into_iter().filter(|m| per_replica.is_multiple_of(*m)) {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
            all.push(Strategy {
                tp: cut.tp,
                pp: cut.pp,
                dp: cut.dp,
                ep: cut.ep,
                sp: cut.tp > 1 && (micro_batch * base.seq).is_multiple_of(u64::from(cut.tp)),
                zero: cut.zero,
                schedule: cut.schedule,
                micro_batch,
                recompute,
                leaves: if base.order == SummationOrder::Canonical { cut.dp } else { base.leaves },
                ..base.clone()
            });
        }
    }
}

fn zero_stages(dp: u32) -> Vec<Zero> {
    if dp == 1 { vec![Zero::None] } else { vec![Zero::None, Zero::Optimizer, Zero::Parameters] }
}

fn schedules(request: &Request<'_>, pp: u32) -> Vec<ScheduleKind> {
    let mut all = vec![ScheduleKind::OneFOneB];
    if pp > 1 {
        let fits = |chunks: u16| u64::from(pp) * u64::from(chunks) <= request.model.layers;
        let chunked = [2, 4].into_iter().filter(|&c| fits(c));
        all.extend(chunked.map(|chunks| ScheduleKind::Interleaved { chunks }));
    }
    all
}

/// Possible expert-parallel degrees on `ranks` ranks; a model without experts has only 1.
fn parts_of_experts(request: &Request<'_>, ranks: u32) -> Vec<u32> {
    let experts = request.model.experts.experts.max(1);
    divisors(ranks).into_iter().filter(|ep| experts.is_multiple_of(u64::from(*ep))).collect()
}

/// Returns true if heads and widths divide by `tp`.
fn tensor_fits(request: &Request<'_>, tp: u32) -> bool {
    let tp = u64::from(tp);
    let m = request.model;
    let experts = m.experts.experts > 0;
    (experts || m.ffn.is_multiple_of(tp)) && (m.heads == 0 || m.kv_heads.is_multiple_of(tp))
}

/// Returns true if the model state alone fits (Rajbhandari et al., arXiv 1910.02054).
fn state_fits(request: &Request<'_>, tp: u32, pp: u32, dp: u32, ep: u32, zero: Zero) -> bool {
    let base = &request.base;
    let all = request.model.parameters() as f64;
    let experts = request.model.expert_parameters() as f64;
    // Tensor parallelism does not shard experts.
    let held = ((all - experts) / f64::from(tp) + experts / f64::from(ep)) / f64::from(pp);
    let weights = base.activation_dtype().size() as f64;
    let grads = base.grad_dtype.size() as f64;
    let master = if weights < 4.0 { 4.0 } else { 0.0 };
    let moments = 4.0 * base.optimizer.moments() as f64;
    let share = |dealt: bool| if dealt { 1.0 / f64::from(dp) } else { 1.0 };
    let bytes = weights * share(zero >= Zero::Parameters)
        + grads * share(zero >= Zero::Gradients)
        + (master + moments) * share(zero >= Zero::Optimizer);
    held * bytes <= request.cluster.device.memory.as_f64()
}

fn divisors(n: u32) -> Vec<u32> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}
