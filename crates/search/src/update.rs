//! Lower bounds of what replicas exchange: reductions, gathers, and the update after the passes.

use crate::bound::{Estimator, Staged};
use crate::form::Form;
use crate::gathers::Weights;
use paceline_plan::DType;
use paceline_plan::collective::CollectiveKind;
use paceline_plan::graph::BLOCK;
use paceline_plan::ids::Rank;
use paceline_plan::lower::{Parameters, squares};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::schedule::{Action, Pass, ScheduleKind};
use paceline_plan::strategy::{Strategy, Zero};
use paceline_plan::units::Bytes;
use paceline_sim::{Exchange, Prices};
use std::collections::BTreeMap;
use std::ops::Range;

/// Time of an update on one rank after its passes, and what it adds to them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Update {
    /// Least time by which the first pass is later than if weights were there.
    pub(crate) lead: f64,
    /// From the rank's last pass to where it waits for the other stages.
    pub(crate) ready: f64,
    /// From there to the end.
    pub(crate) rest: f64,
    /// Traffic that slows down compute, in seconds of memory bandwidth.
    pub(crate) stolen: f64,
    /// Time of each communication lane per iteration.
    pub(crate) lanes: [f64; 2],
}

impl Estimator<'_> {
    /// Updates of all ranks. With `open`, what all settings of bucket and collective need.
    pub(crate) fn updates(&mut self, s: &Strategy, staged: &Staged, open: bool) -> Vec<Update> {
        let mut all: Vec<Update> = Vec::with_capacity(staged.alike.len());
        for (rank, &like) in staged.alike.iter().enumerate() {
            all.push(match all.get(like) {
                Some(known) => *known,
                None => self.update(s, staged, rank as u32, open),
            });
        }
        if s.zero == Zero::Parameters && s.mesh().replicas() > 1 {
            self.add_gathers(s, staged, open, &mut all);
        }
        all
    }

    /// Prices of all exchanges that a strategy's gradient collective decides.
    pub(crate) fn calls(&mut self, s: &Strategy, staged: &Staged) -> Vec<f64> {
        let mut calls = Vec::new();
        let mut known = (u64::MAX, u64::MAX);
        for (rank, &like) in staged.alike.iter().enumerate() {
            if like != rank {
                continue;
            }
            let at = Rank(rank as u32 * s.mesh().stride(Axis::Pp));
            let mut padded = 0;
            for &stage in &staged.owners[rank] {
                for bucket in bucketed(staged.form(), &staged.ranges[stage], s, stage) {
                    let size = (bucket.dense, bucket.experts);
                    padded += padded_to(s, bucket.dense);
                    let Some(prices) = &mut self.prices else { return calls };
                    if size == known {
                        continue;
                    }
                    known = size;
                    let price = bucket_price(prices, s, size, at);
                    let parameters = Parameters { dense: size.0, ..Parameters::default() };
                    let gather = self.gather(s, &parameters, at).0;
                    calls.extend([price.reduce, price.gather, gather]);
                }
            }
            // Sums of the norm, the loss and what experts drop.
            for elements in (1..=8).chain([padded / BLOCK]) {
                calls.push(self.sum(s, elements, at));
            }
        }
        calls
    }

    /// Time of a sum of `f32` elements over all replicas.
    fn sum(&mut self, s: &Strategy, elements: u64, at: Rank) -> f64 {
        let Some(prices) = &mut self.prices else { return 0.0 };
        let sum = Exchange {
            group: GroupKind::Replicas,
            kind: CollectiveKind::AllReduce,
            elements,
            dtype: DType::F32,
            block: 1,
        };
        prices.collective(&sum, s, at)
    }

    fn update(&mut self, s: &Strategy, staged: &Staged, rank: u32, open: bool) -> Update {
        let mine = &staged.owners[rank as usize];
        let mesh = s.mesh();
        let (replicas, edp) = (u64::from(mesh.replicas()), u64::from(mesh.edp()));
        let sharded = s.zero != Zero::None;
        let parts = if sharded { replicas } else { 1 };
        let expert_parts = if sharded { edp } else { 1 };
        let transient = s.zero >= Zero::Gradients && replicas > 1 && !s.keeps_whole_gradients();
        let mut update = Update::default();
        let tied = mine.iter().map(|&stage| staged.stages[stage].parameters.tied).max();
        let dense: u64 = mine.iter().map(|&stage| staged.stages[stage].parameters.dense).sum();
        let experts: u64 = mine.iter().map(|&stage| staged.stages[stage].parameters.experts).sum();
        let dense = dense + tied.unwrap_or(0);
        let Some(prices) = &mut self.prices else { return update };
        let steps = prices.update(dense / parts, s) + prices.update(experts / expert_parts, s);
        // The launch of a step's kernel is counted once at most.
        let held = |elements: u64, parts: u64| {
            elements / if s.zero >= Zero::Gradients { parts } else { 1 }
        };
        let norm = |elements: u64, parts: u64, experts: bool| {
            if elements < BLOCK {
                return 0.0;
            }
            let template = squares(held(elements, parts), s.grad_dtype, parts as u32, experts);
            prices.template(&template, s)
        };
        let norms = norm(dense, parts, false) + norm(experts, expert_parts, true);
        update.rest = steps;
        update.ready = norms;
        if s.offload.optimizer() {
            // State goes out after its step.
            let master = if s.activation_dtype().size() < 4 { 4 } else { 0 };
            let size = master + 4 * s.optimizer.moments() as u64;
            let bytes = (dense / parts + experts / expert_parts) * size;
            update.rest = steps.max(prices.offload(s, Bytes(bytes)));
        }
        if open {
            let rank = Rank(rank * mesh.stride(Axis::Pp));
            // The best of all collectives.
            let methods =
                if s.zero == Zero::Parameters { self.methods.clone() } else { Vec::new() };
            let mut least = (f64::INFINITY, f64::INFINITY);
            for collective in methods {
                let s = Strategy { collective, ..s.clone() };
                least.0 = self.lead(&s, staged, mine, rank).min(least.0);
                least.1 = self.last_reduction(&s, staged, mine, rank).min(least.1);
            }
            if least.0.is_finite() {
                update.lead = least.0;
                update.ready = norms.max(least.1);
            }
            return update;
        }
        let steps = update.rest;
        let mut buckets = Vec::new();
        for &stage in mine.iter().rev() {
            buckets.extend(bucketed(staged.form(), &staged.ranges[stage], s, stage));
        }
        let Some(prices) = &mut self.prices else { return update };
        let rank = Rank(rank * mesh.stride(Axis::Pp));
        let times = f64::from(if transient { s.microbatches() } else { 1 });
        let mut lane = 0.0;
        let last_stage = mine.first().copied();
        let mut tail = Vec::new();
        // All gathers of updated weights, and the shortest.
        let mut gathers = (0.0, f64::INFINITY);
        let mut known: Vec<((u64, u64), BucketPrice)> = Vec::new();
        for bucket in &buckets {
            let size = (bucket.dense, bucket.experts);
            let price = match known.iter().find(|(known, _)| *known == size) {
                Some((_, price)) => *price,
                None => {
                    let price = bucket_price(prices, s, size, rank);
                    known.push((size, price));
                    price
                }
            };
            update.stolen += price.reduce_stolen * times + price.gather_stolen;
            gathers = (gathers.0 + price.gather, gathers.1.min(price.shortest_gather));
            lane += price.reduce * times;
            // Which pass of a V is last depends on the number of microbatches.
            if Some(bucket.stage) == last_stage && s.schedule != ScheduleKind::DualPipeV {
                tail.push((price.reduce, bucket.after));
            }
        }
        // Reductions of the last pass, one after the other as their layers end.
        let mut end = f64::NEG_INFINITY;
        for (time, after) in tail {
            end = end.max(-after) + time;
        }
        if s.overlap || transient {
            update.ready = norms.max(end);
        } else {
            update.ready = norms + lane;
        }
        if sharded && replicas > 1 && experts == 0 {
            // Ranks sum the blocks of their shards, after all reductions.
            let padded: u64 = buckets.iter().map(|bucket| padded_to(s, bucket.dense)).sum();
            update.ready += self.sum(s, padded / BLOCK, rank);
        }
        let Some(prices) = &mut self.prices else { return update };
        if gathers.1.is_finite() {
            let last = steps + gathers.1;
            update.rest = if prices.gathers_late(s) { last } else { last.max(gathers.0) };
        }
        // Reductions at the end are part of what comes after the passes.
        let during = if transient || s.overlap { lane } else { 0.0 };
        update.lanes = [during, 0.0];
        update.lead = self.lead(s, staged, mine, rank);
        if !s.overlap {
            update.stolen = 0.0;
        }
        update
    }

    /// Time in which a rank's offloaded state goes out, each value once.
    pub(crate) fn offloaded(&self, s: &Strategy, staged: &Staged, mine: &[usize]) -> f64 {
        let Some(prices) = &self.prices else { return 0.0 };
        let mut bytes = 0.0;
        if s.offload.activations() {
            for &stage in mine {
                // The input of a stage stays, and so do the last blocks of a microbatch whose
                // backward pass follows at once, as it may on the last stage, and where there is but
                // one microbatch.
                let alone = s.microbatches() == 1 && mine.last() == Some(&stage);
                let last = alone || stage + 1 == staged.stages.len();
                let stage = &staged.stages[stage];
                let moved = stage.block_bytes - stage.output.max(staged.widest) as f64;
                let stay = if last { 4.0 * stage.most_block_bytes } else { 0.0 };
                bytes += (moved - stay).max(0.0);
            }
            bytes *= f64::from(s.microbatches());
        }
        if bytes > 0.0 { prices.offload(s, Bytes(bytes as u64)) } else { 0.0 }
    }

    /// Time of ZeRO-3's reduction of the layer that the last backward pass ends with.
    fn last_reduction(&mut self, s: &Strategy, staged: &Staged, mine: &[usize], at: Rank) -> f64 {
        let (Some(&first), Some(prices)) = (mine.first(), &mut self.prices) else { return 0.0 };
        if s.schedule == ScheduleKind::DualPipeV || s.keeps_whole_gradients() {
            return 0.0;
        }
        let own = staged.form().parameters(staged.ranges[first].start);
        bucket_price(prices, s, (own.dense, own.experts), at).reduce
    }

    /// Exchanges among replicas during the passes, under ZeRO-2 and 3: the time of gathers in each
    /// turn of each rank if compute waits for them, and the time of the busiest lane of each rank.
    pub(crate) fn exchanges(
        &mut self,
        s: &Strategy,
        staged: &Staged,
        order: &[Vec<Action>],
    ) -> (Vec<Vec<f64>>, Vec<f64>) {
        let mesh = s.mesh();
        let transient =
            s.zero >= Zero::Gradients && mesh.replicas() > 1 && !s.keeps_whole_gradients();
        let gathered = s.zero == Zero::Parameters && mesh.replicas() > 1;
        if !transient && !gathered {
            return (Vec::new(), Vec::new());
        }
        let (mut turns, mut lanes) = (Vec::new(), Vec::new());
        for (rank, row) in order.iter().enumerate() {
            let at = Rank(rank as u32 * mesh.stride(Axis::Pp));
            let reduces: BTreeMap<usize, f64> = (staged.owners[rank].iter())
                .map(|&stage| (stage, self.reduced(s, staged, stage, at)))
                .collect();
            let layers: usize = staged.ranges.last().map_or(0, |range| range.end);
            let mut times = vec![f64::NAN; layers];
            let mut weights = Weights::none(layers);
            let (mut reduce, mut gather) = (0.0, 0.0);
            let turn = |action: &Action| {
                let stage = action.stage.index();
                let mut time = 0.0;
                if gathered {
                    weights.pass(action, staged, |layer| {
                        if times[layer].is_nan() {
                            let own = staged.form().parameters(layer);
                            times[layer] = self.gather(s, own, at).0;
                        }
                        time += times[layer];
                    });
                }
                gather += time;
                if transient && matches!(action.pass, Pass::Backward | Pass::BackwardWeight) {
                    reduce += reduces.get(&stage).copied().unwrap_or(0.0);
                }
                if s.overlap { 0.0 } else { time }
            };
            turns.push(row.iter().map(turn).collect());
            lanes.push(f64::max(reduce, gather));
        }
        (turns, lanes)
    }

    /// Time of the reductions of a stage's buckets after one microbatch.
    fn reduced(&mut self, s: &Strategy, staged: &Staged, stage: usize, rank: Rank) -> f64 {
        let mesh = s.mesh();
        let buckets = bucketed(staged.form(), &staged.ranges[stage], s, stage);
        let Some(prices) = &mut self.prices else { return 0.0 };
        let mut time = 0.0;
        for bucket in &buckets {
            for (elements, group, parts) in [
                (bucket.dense, GroupKind::Replicas, u64::from(mesh.replicas())),
                (bucket.experts, GroupKind::Axis(Axis::Edp), u64::from(mesh.edp())),
            ] {
                if elements > 0 && parts > 1 {
                    let step = BLOCK * parts;
                    let reduce = Exchange {
                        group,
                        kind: CollectiveKind::ReduceScatter,
                        elements: elements.div_ceil(step) * step,
                        dtype: s.grad_dtype,
                        block: BLOCK,
                    };
                    time += prices.collective(&reduce, s, rank);
                }
            }
        }
        time
    }
}

/// Factor by which concurrent exchanges slow down a rank's compute.
pub(crate) fn slowdown(
    update: &Update,
    mine: &[usize],
    staged: &Staged,
    microbatches: f64,
    s: &Strategy,
) -> f64 {
    let work: f64 = mine
        .iter()
        .map(|&stage| {
            let turns = staged.turns(stage);
            let whole = turns[Pass::Backward as usize].work;
            let split = turns[Pass::BackwardInput as usize].work
                + turns[Pass::BackwardWeight as usize].work;
            turns[0].work + whole.max(split)
        })
        .sum();
    // The norm is compute too; it takes less than the update.
    let compute = work * microbatches + 2.0 * update.ready + update.rest + 1e-3;
    if s.overlap && compute > 0.0 { 1.0 + update.stolen / compute } else { 1.0 }
}

/// Factor by which other traffic slows down compute at most.
pub(crate) const SLOWER: f64 = 1.5;

/// Times of the exchanges of a bucket's gradients and weights, and what they take from compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BucketPrice {
    pub(crate) reduce: f64,
    pub(crate) reduce_stolen: f64,
    gather: f64,
    shortest_gather: f64,
    gather_stolen: f64,
}

pub(crate) fn bucket_price(
    prices: &mut Prices<'_>,
    s: &Strategy,
    (dense, experts): (u64, u64),
    rank: Rank,
) -> BucketPrice {
    let mesh = s.mesh();
    let sharded = s.zero != Zero::None;
    let mut price = BucketPrice {
        reduce: 0.0,
        reduce_stolen: 0.0,
        gather: 0.0,
        shortest_gather: f64::INFINITY,
        gather_stolen: 0.0,
    };
    for (elements, group, parts) in [
        (dense, GroupKind::Replicas, u64::from(mesh.replicas())),
        (experts, GroupKind::Axis(Axis::Edp), u64::from(mesh.edp())),
    ] {
        if elements == 0 || parts < 2 {
            continue;
        }
        let step = BLOCK * if sharded { parts } else { 1 };
        let elements = elements.div_ceil(step) * step;
        let kind = if sharded { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
        let reduce = Exchange { group, kind, elements, dtype: s.grad_dtype, block: BLOCK };
        price.reduce += prices.collective(&reduce, s, rank);
        price.reduce_stolen += prices.stolen(&reduce, s);
        if matches!(s.zero, Zero::Optimizer | Zero::Gradients) {
            let dtype = s.activation_dtype();
            let gather = Exchange { kind: CollectiveKind::AllGather, dtype, ..reduce };
            let time = prices.collective(&gather, s, rank);
            price.gather += time;
            price.shortest_gather = price.shortest_gather.min(time);
            price.gather_stolen += prices.stolen(&gather, s);
        }
    }
    price
}

/// Elements of a bucket's vector.
fn padded_to(s: &Strategy, dense: u64) -> u64 {
    let parts = if s.zero == Zero::None { 1 } else { u64::from(s.mesh().replicas()) };
    dense.div_ceil(BLOCK * parts) * BLOCK * parts
}

/// A bucket of a stage.
struct Bucketed {
    stage: usize,
    dense: u64,
    experts: u64,
    /// Backward compute of the stage's layers after it.
    after: f64,
}

/// Buckets of a stage, in the order in which its backward pass fills them.
fn bucketed(form: &Form, layers: &Range<usize>, s: &Strategy, stage: usize) -> Vec<Bucketed> {
    let mut all = Vec::new();
    let (mut dense, mut experts, mut size) = (0, 0, 0u64);
    let time = |layer: usize| SLOWER * form.backward_time(layer);
    let mut after: f64 = layers.clone().map(time).sum();
    for layer in layers.clone().rev() {
        let own = form.parameters(layer);
        dense += own.dense;
        experts += own.experts;
        size += own.unpadded * s.grad_dtype.size();
        after -= time(layer);
        let full = size >= s.bucket.0 || s.zero == Zero::Parameters;
        if size > 0 && (full || layer == layers.start) {
            all.push(Bucketed { stage, dense, experts, after: after.max(0.0) });
            (dense, experts, size) = (0, 0, 0);
        }
    }
    all
}
