//! Lower bounds of a strategy's time and memory, without lowering it.
//!
//! An op starts no earlier than the op before it on its lane and the ops that it names have ended,
//! and meetings of ranks only delay it. So an iteration is at least as long as any chain of ops.
//! [`Estimator::time`] takes the longest of a few chains in closed form, [`Estimator::replay`] those
//! of the schedule's whole order.

use crate::Request;
use crate::form::{Experts, Form, Stage};
use crate::replay;
use crate::space::METHODS;
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::compress::Compression;
use paceline_plan::graph::BLOCK;
use paceline_plan::ids::{Rank, StageRank};
use paceline_plan::lower::{self, Outline, outline, squares};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::schedule::{self, Action, Pass, ScheduleKind};
use paceline_plan::strategy::{Offload, Recompute, Split, Strategy, Sync, Zero};
use paceline_plan::units::Bytes;
use paceline_sim::{Exchange, Prices};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Absorbs rounding: sums here are in another order than the simulator's.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

type FormKey = ((u32, u32, u64, bool), (u32, u32, u32), (Recompute, bool, u8), (u32, u32), Experts);

/// Layers by virtual stage.
type Ranges = Rc<Vec<Range<usize>>>;
/// Microbatches alive in each of a rank's stages, until the input and until the weight gradient.
type Alive = Rc<Vec<[u32; 2]>>;
/// Actions by pipeline rank.
type Order = Rc<Vec<Vec<Action>>>;
/// Times of messages between pipeline ranks.
type Hops = BTreeMap<(u16, u16), f64>;

/// Bounds the strategies of one request.
pub(crate) struct Estimator<'a> {
    request: &'a Request<'a>,
    /// Absent if times depend on what runs concurrently; then only memory is bounded.
    prices: Option<Prices<'a>>,
    forms: BTreeMap<FormKey, Option<Form>>,
    splits: BTreeMap<(usize, u64, Split), Ranges>,
    alive: BTreeMap<(ScheduleKind, u32, u32, u32), Alive>,
    orders: BTreeMap<(ScheduleKind, u32, u32), Order>,
    /// Messages between pipeline ranks that lie apart by a stride, of one size.
    hops: ((u32, u32, u64), Hops),
    /// Number of layers that stages are made of.
    units: usize,
    /// Collectives that a strategy may use.
    methods: Vec<Algorithm>,
}

/// A strategy's stages, priced.
pub(crate) struct Staged {
    pub(crate) ranges: Ranges,
    pub(crate) stages: Vec<Rc<Stage>>,
    /// Virtual stages of each pipeline rank, in model order.
    pub(crate) owners: Vec<Vec<usize>>,
    /// Bytes of the largest message between stages.
    widest: u64,
}

/// Time of an update on one rank after its passes, and what it adds to them.
#[derive(Clone, Copy, Debug, Default)]
struct Update {
    /// From the rank's last pass to where it waits for the other stages.
    ready: f64,
    /// From there to the end.
    rest: f64,
    /// Traffic that slows down compute, in seconds of memory bandwidth.
    stolen: f64,
    /// Time of each communication lane per iteration.
    lanes: [f64; 2],
}

impl<'a> Estimator<'a> {
    pub(crate) fn new(request: &'a Request<'a>) -> Self {
        let synchronous = request.base.sync == Sync::AllReduce
            && request.base.local.is_none()
            && request.base.compress == Compression::None
            // Groups of other orders are not evenly spaced.
            && request.base.axis_order == Default::default();
        let prices = Prices::new(request.cluster, &request.options).filter(|_| synchronous);
        Self {
            request,
            prices,
            forms: BTreeMap::new(),
            splits: BTreeMap::new(),
            alive: BTreeMap::new(),
            orders: BTreeMap::new(),
            hops: Default::default(),
            units: 0,
            methods: request.pins.collective.of(METHODS),
        }
    }

    fn key(&self, s: &Strategy) -> FormKey {
        let passes = match s.schedule {
            ScheduleKind::DualPipeV => 2,
            other => u8::from(other.splits_backward()),
        };
        let recompute = match s.recompute {
            Recompute::FullOf(_) => Recompute::FullOf(1),
            other @ (Recompute::None
            | Recompute::Selective
            | Recompute::SelectiveOp
            | Recompute::Full
            | Recompute::FullForward) => other,
        };
        // fp8 weights are cast once an iteration, whose cost is spread over its microbatches.
        let spread = if s.dtype == DType::Fp8 { s.microbatches() } else { 0 };
        let stage = s.mesh().stride(Axis::Pp);
        // Experts' groups and unaligned stages lie on the cluster as the stage's size says.
        let placed = if self.places_matter(s) { stage } else { 0 };
        (
            (s.tp, s.cp, s.micro_batch, s.sp),
            (s.ep, s.etp, placed),
            (recompute, s.overlap, passes),
            (spread, if placed > 0 { s.pp } else { 0 }),
            Experts::Placed,
        )
    }

    fn places_matter(&self, s: &Strategy) -> bool {
        let stage = u64::from(s.mesh().stride(Axis::Pp));
        let mut size = 1u64;
        !self.request.cluster.dimensions.iter().all(|dimension| {
            size = size.saturating_mul(dimension.size.into());
            size.is_multiple_of(stage) || stage.is_multiple_of(size)
        })
    }

    /// Priced layers of a strategy; `None` if the planner refuses it.
    fn form(&mut self, s: &Strategy) -> Option<&mut Form> {
        self.form_with(s, Experts::Placed)
    }

    fn form_with(&mut self, s: &Strategy, experts: Experts) -> Option<&mut Form> {
        let mut key = self.key(s);
        let experts =
            if self.request.model.experts.experts > 0 { experts } else { Experts::Placed };
        if experts == Experts::Anywhere {
            key.1 = (0, 0, key.1.2);
        }
        key.4 = experts;
        if !self.forms.contains_key(&key) {
            if self.forms.len() >= FORMS {
                self.forms.clear();
            }
            let form = self.priced_form(s, experts);
            self.forms.insert(key, form);
        }
        self.forms.get_mut(&key)?.as_mut()
    }

    fn priced_form(&mut self, s: &Strategy, experts: Experts) -> Option<Form> {
        let (schedule, pp) = match s.schedule {
            ScheduleKind::DualPipeV => (ScheduleKind::DualPipeV, 2),
            other if other.splits_backward() => (ScheduleKind::ZbH1 { chunks: 1 }, 1),
            _ => (ScheduleKind::OneFOneB, 1),
        };
        let microbatches = if pp == 2 { 4 } else { 1 };
        let global_batch = s.micro_batch * u64::from(s.dp) * microbatches;
        let leaves = s.dp;
        let alike = Strategy {
            schedule,
            pp,
            global_batch,
            leaves,
            zero: Zero::None,
            split: Split::Cost,
            recompute: match s.recompute {
                Recompute::FullOf(_) => Recompute::None,
                other => other,
            },
            offload: Offload::None,
            ..s.clone()
        };
        let of = |recompute| outline(self.request.model, &Strategy { recompute, ..alike.clone() });
        let plain: Outline = of(alike.recompute).ok()?;
        let again = match s.recompute {
            Recompute::FullOf(_) => Some(of(Recompute::FullOf(u16::MAX)).ok()?),
            _ => None,
        };
        match &mut self.prices {
            Some(prices) => Some(Form::new(&plain, again.as_ref(), (s, experts), prices)),
            None => Some(Form::unpriced(&plain, again.as_ref())),
        }
    }

    /// Least time of an iteration by the kernels of ring attention, one for each rank of the ring,
    /// which are launched one after the other.
    pub(crate) fn rings(&self, s: &Strategy) -> f64 {
        if self.prices.is_none() || s.cp < 2 {
            return 0.0;
        }
        let layers = self.request.model.layers as f64 / f64::from(s.pp);
        let launches = 2.0 * f64::from(s.cp) * layers * f64::from(s.microbatches());
        launches * self.request.cluster.device.launch_overhead.0 * ROUNDING
    }

    /// Stages of a strategy.
    pub(crate) fn staged(&mut self, s: &Strategy) -> Option<Staged> {
        let ranges = self.ranges(s)?;
        let again = match s.recompute {
            Recompute::FullOf(layers) => layers,
            _ => 0,
        };
        let form = self.form(s)?;
        let stages: Vec<Rc<Stage>> = ranges.iter().map(|range| form.stage(range, again)).collect();
        let widest = stages.iter().map(|stage| stage.output).max().unwrap_or(0);
        let pp = s.pp as u16;
        let mut owners = vec![Vec::new(); s.pp as usize];
        for stage in 0..stages.len() {
            let rank = s.schedule.rank_of(paceline_plan::ids::Stage::from(stage), pp);
            owners[usize::from(rank.0)].push(stage);
        }
        Some(Staged { ranges, stages, owners, widest })
    }

    /// Layers by virtual stage.
    fn ranges(&mut self, s: &Strategy) -> Option<Ranges> {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if s.split == Split::At(Vec::new()) && count > 1 {
            return self.equal_times(s);
        }
        let key = (count, s.micro_batch * u64::from(s.dp), s.split.clone());
        if let Some(known) = self.splits.get(&key) {
            return Some(Rc::clone(known));
        }
        let ranges = Rc::new(lower::stages(self.request.model, s));
        self.splits.insert(key, Rc::clone(&ranges));
        Some(ranges)
    }

    fn equal_times(&mut self, s: &Strategy) -> Option<Ranges> {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if self.units == 0 {
            self.units = lower::units(self.request.model, s);
        }
        let units = self.units;
        Some(self.form(s)?.equal_times(units, count))
    }

    /// The strategy with explicit stages, if it asks for stages of equal times.
    pub(crate) fn explicit(&mut self, s: &Strategy) -> Option<Strategy> {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if s.split != Split::At(Vec::new()) || count == 1 {
            return Some(s.clone());
        }
        let ranges = self.equal_times(s)?;
        let starts = ranges.iter().skip(1).map(|range| range.start as u32).collect();
        Some(Strategy { split: Split::At(starts), ..s.clone() })
    }

    /// Least time of an iteration by the work of all ranks alone, with experts anywhere or where the
    /// strategy places them.
    pub(crate) fn load(&mut self, s: &Strategy, experts: Experts) -> Option<f64> {
        let microbatches = f64::from(s.microbatches());
        let pp = f64::from(s.pp);
        if self.prices.is_none() {
            return self.form(s).map(|_| 0.0);
        }
        Some(self.form_with(s, experts)?.load() * microbatches / pp * ROUNDING)
    }

    /// Least time of an iteration in closed form. With `open`, of all settings of bucket size,
    /// collective, overlap and offload.
    pub(crate) fn time(&mut self, s: &Strategy, staged: &Staged, open: bool) -> f64 {
        if self.prices.is_none() {
            return 0.0;
        }
        let microbatches = f64::from(s.microbatches());
        let updates = self.updates(s, staged, open);
        let (there, back) = self.ways(s, staged);
        let split = s.schedule.splits_backward();
        let (mut ready, mut longest) = (0.0f64, 0.0f64);
        for (rank, mine) in staged.owners.iter().enumerate() {
            let update = &updates[rank];
            let slow = slowdown(update, mine, staged, microbatches, s);
            let (load, weights) = load(mine, staged, microbatches, slow, s);
            if !s.schedule.flushes() {
                longest = longest.max(load);
                continue;
            }
            let first = mine.first().copied().unwrap_or(0);
            // Without overlap, ZeRO-3's gathers and compute take turns.
            let serial = if s.overlap { 0.0 } else { update.lanes[1] };
            // The first gather may come before the input.
            let load = (there[first] + load).max(load + serial);
            ready = ready.max(load + update.ready);
            if s.schedule != ScheduleKind::DualPipeV {
                // Weight gradients may come after a split schedule's last input gradient.
                let late = if split { (rank + 1) as f64 * weights } else { 0.0 };
                ready = ready.max((load - late).max(0.0) + back[first] + updates[0].ready);
            }
            let lanes = update.lanes.iter().copied().fold(0.0, f64::max);
            longest = longest.max(there[first] + lanes);
            longest = longest.max(there[first] + self.offloaded(s, staged, mine));
        }
        let rest = updates.iter().map(|update| update.rest).fold(0.0, f64::max);
        if s.schedule.flushes() {
            longest = longest.max(ready + rest);
        }
        longest * ROUNDING
    }

    /// Least time of an iteration by replaying the schedule's order.
    pub(crate) fn replay(&mut self, s: &Strategy, staged: &Staged) -> f64 {
        if self.prices.is_none() || !s.schedule.flushes() {
            return 0.0;
        }
        let edges = self.edges(s, staged);
        let Some(order) = self.order(s) else { return 0.0 };
        let updates = self.updates(s, staged, false);
        let microbatches = f64::from(s.microbatches());
        let slow: Vec<f64> = (0..s.pp)
            .map(|rank| {
                let update = &updates[rank as usize];
                slowdown(update, &staged.owners[rank as usize], staged, microbatches, s)
            })
            .collect();
        let (turns, lanes) = self.exchanges(s, staged, &order);
        let ends = replay::ends(s, staged, &order, (&edges, &turns), &slow);
        let longest = lanes.into_iter().fold(0.0, f64::max) * ROUNDING;
        let ready = ends.iter().zip(&updates).map(|(end, update)| end + update.ready);
        let rest = updates.iter().map(|update| update.rest).fold(0.0, f64::max);
        ((ready.fold(0.0, f64::max) + rest) * ROUNDING).max(longest)
    }

    fn order(&mut self, s: &Strategy) -> Option<Order> {
        let key = (s.schedule, s.pp, s.microbatches());
        if let Some(known) = self.orders.get(&key) {
            return Some(Rc::clone(known));
        }
        let order = Rc::new(schedule::order(s.schedule, s.pp as u16, s.microbatches()).ok()?);
        if self.orders.len() >= ORDERS {
            self.orders.clear();
        }
        self.orders.insert(key, Rc::clone(&order));
        Some(order)
    }

    /// Times of the messages between a virtual stage and the next one: forward, backward.
    fn edges(&mut self, s: &Strategy, staged: &Staged) -> Vec<(f64, f64)> {
        let pp = s.pp as u16;
        let rank = |stage: usize| s.schedule.rank_of(paceline_plan::ids::Stage::from(stage), pp).0;
        let last = staged.stages.len().saturating_sub(1);
        let mut edges = Vec::with_capacity(last);
        for (stage, sent) in staged.stages.iter().enumerate().take(last) {
            let (from, to) = (rank(stage), rank(stage + 1));
            let bytes = sent.output;
            let hop = |this: &mut Self, from, to| this.hop(s, from, to, bytes);
            edges.push(match from == to {
                true => (0.0, 0.0),
                false => (hop(self, from, to), hop(self, to, from)),
            });
        }
        edges
    }

    /// Time of a message between two pipeline ranks.
    fn hop(&mut self, s: &Strategy, from: u16, to: u16, bytes: u64) -> f64 {
        let stride = s.mesh().stride(Axis::Pp);
        let key = (stride, if s.sp { 1 } else { s.tp }, bytes);
        if self.hops.0 != key {
            self.hops = (key, BTreeMap::new());
        }
        if let Some(&known) = self.hops.1.get(&(from, to)) {
            return known;
        }
        let Some(prices) = &mut self.prices else { return 0.0 };
        let (a, b) = (Rank(u32::from(from) * stride), Rank(u32::from(to) * stride));
        let time = prices.message(s, a, b, Bytes(bytes));
        self.hops.1.insert((from, to), time);
        time
    }

    /// Least times of a microbatch from the start to each stage, and from each stage's gradient back
    /// to the start.
    fn ways(&mut self, s: &Strategy, staged: &Staged) -> (Vec<f64>, Vec<f64>) {
        let edges = self.edges(s, staged);
        let split = s.schedule.splits_backward();
        let input = if split { Pass::BackwardInput } else { Pass::Backward };
        let (mut there, mut back) = (vec![0.0], vec![0.0]);
        for (stage, &(forward, backward)) in staged.stages.iter().zip(&edges) {
            let turn = |pass: Pass| {
                let turn = &stage.turns[pass as usize];
                turn.whole.at(1.0) + turn.open.at(1.0)
            };
            there.push(there.last().copied().unwrap_or(0.0) + turn(Pass::Forward) + forward);
            back.push(back.last().copied().unwrap_or(0.0) + turn(input) + backward);
        }
        (there, back)
    }

    /// Updates of all ranks. With `open`, what all settings of bucket, collective and overlap need.
    fn updates(&mut self, s: &Strategy, staged: &Staged, open: bool) -> Vec<Update> {
        (0..s.pp).map(|rank| self.update(s, staged, rank, open)).collect()
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
            let gathers = methods.iter().map(|&collective| {
                let s = Strategy { collective, ..s.clone() };
                self.gathers(&s, staged, mine, rank)
            });
            let least = gathers.fold(f64::INFINITY, f64::min);
            update.lanes[1] = if least.is_finite() { least } else { 0.0 };
            return update;
        }
        let steps = update.rest;
        let mut buckets = Vec::new();
        let Some(form) = self.form(s) else { return update };
        for &stage in mine.iter().rev() {
            buckets.extend(bucketed(form, &staged.ranges[stage], s, stage));
        }
        let Some(prices) = &mut self.prices else { return update };
        let rank = Rank(rank * mesh.stride(Axis::Pp));
        let times = f64::from(if transient { s.microbatches() } else { 1 });
        let mut lane = 0.0;
        let last_stage = mine.first().copied();
        let mut tail = Vec::new();
        // All gathers of updated weights, and the shortest.
        let mut gathers = (0.0, f64::INFINITY);
        for bucket in &buckets {
            let mut time = 0.0;
            for (elements, group, parts) in [
                (bucket.dense, GroupKind::Replicas, replicas),
                (bucket.experts, GroupKind::Axis(Axis::Edp), edp),
            ] {
                if elements == 0 || parts < 2 {
                    continue;
                }
                let step = BLOCK * if sharded { parts } else { 1 };
                let elements = elements.div_ceil(step) * step;
                let kind =
                    if sharded { CollectiveKind::ReduceScatter } else { CollectiveKind::AllReduce };
                let reduce = Exchange { group, kind, elements, dtype: s.grad_dtype, block: BLOCK };
                time += prices.collective(&reduce, s, rank);
                update.stolen += prices.stolen(&reduce, s) * times;
                let gather = Exchange {
                    kind: CollectiveKind::AllGather,
                    dtype: s.activation_dtype(),
                    ..reduce
                };
                match s.zero {
                    Zero::Optimizer | Zero::Gradients => {
                        update.stolen += prices.stolen(&gather, s);
                        let time = prices.collective(&gather, s, rank);
                        gathers.0 += time;
                        gathers.1 = gathers.1.min(time);
                    }
                    Zero::None | Zero::Parameters => {}
                }
            }
            lane += time * times;
            // Which pass of a V is last depends on the number of microbatches.
            if Some(bucket.stage) == last_stage && s.schedule != ScheduleKind::DualPipeV {
                tail.push((time, bucket.after));
            }
        }
        // Reductions of the last pass, one after the other as their layers end.
        let mut end = f64::NEG_INFINITY;
        for (time, after) in tail {
            end = end.max(-after) + time;
        }
        if s.overlap {
            update.ready = norms.max(end);
        } else if !transient {
            update.ready = norms + lane;
        }
        if gathers.1.is_finite() {
            let last = steps + gathers.1;
            update.rest = if prices.gathers_late(s) { last } else { last.max(gathers.0) };
        }
        // Reductions at the end are part of what comes after the passes.
        let during = if transient || s.overlap { lane } else { 0.0 };
        update.lanes = [during, self.gathers(s, staged, mine, rank)];
        if !s.overlap {
            update.stolen = 0.0;
        }
        update
    }

    /// Time in which a rank's offloaded state goes out, each value once.
    fn offloaded(&self, s: &Strategy, staged: &Staged, mine: &[usize]) -> f64 {
        let Some(prices) = &self.prices else { return 0.0 };
        let mut bytes = 0.0;
        if s.offload.activations() {
            for &stage in mine {
                let last = stage + 1 == staged.stages.len();
                let stage = &staged.stages[stage];
                // The input of a stage stays, and so do the last blocks of a microbatch whose
                // backward pass follows at once, as it may on the last stage.
                let moved = stage.block_bytes - stage.output.max(staged.widest) as f64;
                let stay = if last { 4.0 * stage.most_block_bytes } else { 0.0 };
                bytes += (moved - stay).max(0.0);
            }
            bytes *= f64::from(s.microbatches());
        }
        if bytes > 0.0 { prices.offload(s, Bytes(bytes as u64)) } else { 0.0 }
    }

    /// Time of ZeRO-3's gathers: each block's weights for each pass but the last two, which are
    /// still there when the direction turns.
    fn gathers(&mut self, s: &Strategy, staged: &Staged, mine: &[usize], rank: Rank) -> f64 {
        let mesh = s.mesh();
        if s.zero != Zero::Parameters || mesh.replicas() < 2 {
            return 0.0;
        }
        let passes = s.schedule.passes().iter().filter(|pass| **pass != Pass::BackwardWeight);
        // A microbatch's backward pass over a stage is whole or split.
        let passes = f64::from(passes.count().min(2) as u32);
        let mut total = 0.0;
        for &stage in mine {
            let range = staged.ranges[stage].clone();
            let Some(form) = self.form(s) else { return 0.0 };
            let blocks: Vec<u64> = (range.filter(|&layer| form.is_block(layer)))
                .map(|layer| form.parameters(layer).dense)
                .collect();
            let Some(prices) = &mut self.prices else { return 0.0 };
            let least = blocks.iter().copied().min().unwrap_or(0);
            if least == 0 || blocks.len() < 3 {
                continue;
            }
            let step = BLOCK * u64::from(mesh.replicas());
            let gather = Exchange {
                group: GroupKind::Replicas,
                kind: CollectiveKind::AllGather,
                elements: least.div_ceil(step) * step,
                dtype: s.activation_dtype(),
                block: BLOCK,
            };
            let time = prices.collective(&gather, s, rank);
            total += time * (blocks.len() - 2) as f64 * passes * f64::from(s.microbatches());
        }
        total
    }

    /// Exchanges among replicas during the passes, under ZeRO-2 and 3: the time of gathers in each
    /// turn of each rank if compute waits for them, and the time of the busiest lane of each rank.
    fn exchanges(
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
            let mut slots = [usize::MAX; 2];
            let mut present = vec![false; layers];
            let (mut reduce, mut gather) = (0.0, 0.0);
            let turn = |action: &Action| {
                let stage = action.stage.index();
                let mut time = 0.0;
                if gathered && action.pass != Pass::BackwardWeight {
                    let range = staged.ranges[stage].clone();
                    let forward = action.pass == Pass::Forward;
                    for at_place in 0..range.len() {
                        let layer =
                            if forward { range.start + at_place } else { range.end - 1 - at_place };
                        let Some(form) = self.form(s) else { continue };
                        let block = form.is_block(layer);
                        let there = if block { slots[layer % 2] == layer } else { present[layer] };
                        if there {
                            continue;
                        }
                        if block {
                            slots[layer % 2] = layer;
                        }
                        present[layer] = true;
                        if times[layer].is_nan() {
                            times[layer] = self.gather(s, layer, at);
                        }
                        time += times[layer];
                    }
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
        let Some(form) = self.form(s) else { return 0.0 };
        let buckets = bucketed(form, &staged.ranges[stage], s, stage);
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

    /// Time to gather a layer's weights under ZeRO-3.
    fn gather(&mut self, s: &Strategy, layer: usize, rank: Rank) -> f64 {
        let mesh = s.mesh();
        let Some(form) = self.form(s) else { return 0.0 };
        let own = *form.parameters(layer);
        let Some(prices) = &mut self.prices else { return 0.0 };
        let mut time = 0.0;
        for (elements, group, parts) in [
            (own.dense, GroupKind::Replicas, u64::from(mesh.replicas())),
            (own.experts, GroupKind::Axis(Axis::Edp), u64::from(mesh.edp())),
        ] {
            if elements > 0 && parts > 1 {
                let step = BLOCK * parts;
                let gather = Exchange {
                    group,
                    kind: CollectiveKind::AllGather,
                    elements: elements.div_ceil(step) * step,
                    dtype: s.activation_dtype(),
                    block: BLOCK,
                };
                time += prices.collective(&gather, s, rank);
            }
        }
        time
    }

    /// Least memory of the fullest rank, without the headroom.
    pub(crate) fn memory(&mut self, s: &Strategy, staged: &Staged) -> f64 {
        let ranks = [Some(0), (s.pp > 2).then_some(1), (s.pp > 1).then_some(s.pp - 1)];
        let mut most = 0.0f64;
        for rank in ranks.into_iter().flatten() {
            most = most.max(self.rank_memory(s, staged, rank));
        }
        most * ROUNDING
    }

    fn rank_memory(&mut self, s: &Strategy, staged: &Staged, rank: u32) -> f64 {
        let profile = &self.request.options.profile;
        let device = &self.request.cluster.device;
        let mesh = s.mesh();
        let mine = &staged.owners[rank as usize];
        let (mut state, mut scratch) = (0.0, 0.0f64);
        let tied = mine.iter().map(|&stage| staged.stages[stage].parameters.tied).max();
        let sum = |of: fn(&Stage) -> u64| -> f64 {
            mine.iter().map(|&stage| of(&staged.stages[stage]) as f64).sum()
        };
        let dense = sum(|stage| stage.parameters.dense) + tied.unwrap_or(0) as f64;
        let experts = sum(|stage| stage.parameters.experts);
        let offloaded = s.offload.optimizer();
        for (elements, parts) in
            [(dense, f64::from(mesh.replicas())), (experts, f64::from(mesh.edp()))]
        {
            let share =
                |sharded: bool| if sharded && parts > 1.0 { elements / parts } else { elements };
            let weight = s.activation_dtype().size() as f64;
            state += weight * share(s.zero >= Zero::Parameters);
            state += s.grad_dtype.size() as f64
                * share(s.zero >= Zero::Gradients && !s.keeps_whole_gradients());
            if !offloaded {
                let master = if weight < 4.0 { 4.0 } else { 0.0 };
                let moments = 4.0 * s.optimizer.moments() as f64;
                state += (master + moments) * share(s.zero >= Zero::Optimizer);
            }
        }
        let accelerator = device.is_accelerator();
        let cast = s.dtype == DType::Fp8;
        if accelerator && cast && profile.casts.weights_once && profile.fp8_weights {
            // Weights in fp8 only.
            state -= 0.5 * (dense + experts) * s.activation_dtype().size() as f64;
        }
        let halved =
            if accelerator && cast && profile.casts.input_recast == 0.0 { 0.5 } else { 1.0 };
        let mut frames = 0.0;
        let alive = self.alive(s, rank);
        for (&stage, &[early, late]) in mine.iter().zip(alive.iter()) {
            let stage = &staged.stages[stage];
            let bytes = |sizes: &[f64; 2]| sizes[0] * halved + sizes[1];
            if !s.offload.activations() {
                frames += f64::from(early) * bytes(&stage.kept);
                frames += f64::from(late) * bytes(&stage.kept_late);
            }
            scratch = scratch.max(stage.scratch);
        }
        let total = state.max(0.0) + frames + scratch;
        if accelerator { total * profile.allocator_overhead.max(1.0) } else { total }
    }

    /// Microbatches alive in each of a rank's stages when most are: until the input gradient, until
    /// the weight gradients.
    fn alive(&mut self, s: &Strategy, rank: u32) -> Alive {
        // More rounds keep no more.
        let round = 2 * s.pp;
        let microbatches = s.microbatches();
        let fewer = (round..microbatches.min(4 * s.pp)).find(|&m| {
            s.schedule != ScheduleKind::GPipe && schedule::check(s.schedule, s.pp as u16, m).is_ok()
        });
        let microbatches = fewer.unwrap_or(microbatches);
        let key = (s.schedule, s.pp, microbatches, rank);
        if let Some(known) = self.alive.get(&key) {
            return Rc::clone(known);
        }
        let mine = mine(s, rank);
        let row = schedule::row(s.schedule, s.pp as u16, microbatches, StageRank(rank as u16));
        let mut now = vec![[0u32; 2]; mine.len()];
        let (mut most, mut best) = (0, now.clone());
        for action in row.unwrap_or_default() {
            let Some(at) = mine.iter().position(|&stage| stage == action.stage.index()) else {
                continue;
            };
            match action.pass {
                Pass::Forward => now[at] = [now[at][0] + 1, now[at][1] + 1],
                Pass::Backward => now[at] = now[at].map(|n| n.saturating_sub(1)),
                Pass::BackwardInput => now[at][0] = now[at][0].saturating_sub(1),
                Pass::BackwardWeight => now[at][1] = now[at][1].saturating_sub(1),
            }
            let total: u32 = now.iter().map(|[early, late]| early + late).sum();
            if total > most {
                (most, best) = (total, now.clone());
            }
        }
        let best = Rc::new(best);
        self.alive.insert(key, Rc::clone(&best));
        best
    }

    /// Bytes of a device that a strategy may use.
    pub(crate) fn room(&self) -> f64 {
        let device = &self.request.cluster.device;
        let most = self.request.cluster.kinds().map(|kind| kind.memory.0).max();
        let memory = most.unwrap_or(device.memory.0);
        let usual = || self.request.options.profile.memory_headroom.0.min(memory / 32);
        let headroom = self.request.options.memory_headroom.map_or_else(usual, |bytes| bytes.0);
        memory.saturating_sub(headroom) as f64
    }
}

/// Numbers of forms and orders that are kept.
const FORMS: usize = 20_000;
const ORDERS: usize = 32;

/// Virtual stages of a pipeline rank, in model order.
fn mine(s: &Strategy, rank: u32) -> Vec<usize> {
    s.schedule.stages_of(StageRank(rank as u16), s.pp as u16).map(|stage| stage.index()).collect()
}

/// Factor by which concurrent exchanges slow down a rank's compute.
fn slowdown(
    update: &Update,
    mine: &[usize],
    staged: &Staged,
    microbatches: f64,
    s: &Strategy,
) -> f64 {
    let work: f64 = mine
        .iter()
        .map(|&stage| {
            let turns = &staged.stages[stage].turns;
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

/// Time that a rank's passes take one after the other, and the longest weight-gradient pass.
fn load(mine: &[usize], staged: &Staged, microbatches: f64, slow: f64, s: &Strategy) -> (f64, f64) {
    let turns = || mine.iter().map(|&stage| &staged.stages[stage].turns);
    let used = s.schedule.passes();
    let opens =
        turns().flat_map(|turns| used.iter().map(|&pass| turns[pass as usize].open.at(1.0)));
    let open = opens.fold(f64::INFINITY, f64::min);
    let open = if open.is_finite() { open } else { 0.0 };
    let (mut total, mut weights) = (0.0, 0.0f64);
    for turns in turns() {
        let time = |pass: Pass| {
            let turn = &turns[pass as usize];
            turn.whole.at(slow).max(turn.inner.at(slow) + open)
        };
        let split = time(Pass::BackwardInput) + time(Pass::BackwardWeight);
        let back = match s.schedule {
            ScheduleKind::DualPipeV => time(Pass::Backward).min(split),
            other if other.splits_backward() => split,
            _ => time(Pass::Backward),
        };
        weights = weights.max(time(Pass::BackwardWeight));
        total += time(Pass::Forward) + back;
    }
    // Nothing is open before a rank's first pass.
    ((total * microbatches - open).max(0.0), weights)
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
    // Other traffic may slow it down.
    let time = |layer: usize| 1.5 * form.backward_time(layer);
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
