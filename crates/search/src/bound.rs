//! Lower bounds of a strategy's time and memory, without lowering it.
//!
//! An op starts no earlier than the op before it on its lane and the ops that it names have ended,
//! and meetings of ranks only delay it. So an iteration is at least as long as any chain of ops.
//! [`Estimator::time`] takes the longest of a few chains in closed form, [`Estimator::replay`] those
//! of the schedule's whole order.

use crate::Request;
use crate::form::{Experts, Form, Ranges, Stage, Turn};
use crate::gathers::{GatherCounts, GatherKey};
use crate::replay;
use crate::space::{EQUAL_TIMES, METHODS};
use crate::update::{Update, slowdown};
use paceline_plan::collective::Algorithm;
use paceline_plan::compress::Compression;
use paceline_plan::ids::Rank;
use paceline_plan::lower::{self, Outline, Parameters, outline};
use paceline_plan::mesh::Axis;
use paceline_plan::schedule::{self, Action, Pass, ScheduleKind};
use paceline_plan::strategy::{Offload, Recompute, Split, Strategy, Sync, Zero};
use paceline_plan::units::Bytes;
use paceline_sim::Prices;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Absorbs rounding: sums here are in another order than the simulator's.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

/// A form, by its address, and what its stages depend on besides.
type StagedKey = (usize, ScheduleKind, (u32, u32), Split, u16);
type FormKey = ((u32, u32, u64, bool), (u32, u32, u32), (Recompute, bool, u8), (u32, u32), Experts);

/// Microbatches alive in each of a rank's stages, until the input and until the weight gradient.
pub(crate) type Alive = Rc<Vec<[u32; 2]>>;
/// Actions by pipeline rank.
type Order = Rc<Vec<Vec<Action>>>;
/// Times of messages between pipeline ranks.
type Hops = BTreeMap<(u16, u16), f64>;

/// Bounds the strategies of one request.
pub(crate) struct Estimator<'a> {
    pub(crate) request: &'a Request<'a>,
    /// Absent if times depend on what runs concurrently; then only memory is bounded.
    pub(crate) prices: Option<Prices<'a>>,
    forms: BTreeMap<FormKey, Option<Rc<Form>>>,
    staged: BTreeMap<StagedKey, Rc<Staged>>,
    splits: BTreeMap<(usize, u64, Split), Ranges>,
    pub(crate) alive: BTreeMap<(ScheduleKind, u32, u32, u32), Alive>,
    orders: BTreeMap<(ScheduleKind, u32, u32), Order>,
    pub(crate) gather_counts: BTreeMap<GatherKey, GatherCounts>,
    /// Messages between pipeline ranks that lie apart by a stride, of one size.
    hops: ((u32, u32, u64), Hops),
    /// Number of layers that stages are made of.
    units: usize,
    /// Collectives that a strategy may use.
    pub(crate) methods: Vec<Algorithm>,
}

/// A strategy's stages, priced.
pub(crate) struct Staged {
    pub(crate) ranges: Ranges,
    pub(crate) stages: Vec<Rc<Stage>>,
    /// Virtual stages of each pipeline rank, in model order.
    pub(crate) owners: Vec<Vec<usize>>,
    /// Bytes of the largest message between stages.
    pub(crate) widest: u64,
    /// For each pipeline rank the first one with the same stages, whose exchanges take as long.
    pub(crate) alike: Vec<usize>,
    form: Rc<Form>,
    ways: OnceCell<Ways>,
    /// By rank: how often ZeRO-3 gathers which parameters of a layer.
    pub(crate) gathers: OnceCell<Vec<Vec<(Parameters, u32)>>>,
    /// By rank: how many layers have which parameters.
    pub(crate) held: OnceCell<Vec<Vec<(Parameters, u32)>>>,
}

/// Times between stages.
struct Ways {
    /// Of the messages between a virtual stage and the next one: forward, backward.
    edges: Vec<(f64, f64)>,
    /// Least time of a microbatch from the start to each stage.
    there: Vec<f64>,
    /// Least time from each stage's gradient back to the start.
    back: Vec<f64>,
}

impl Staged {
    /// Passes over a virtual stage, by [`Pass`].
    pub(crate) fn turns(&self, stage: usize) -> &[Turn; 4] {
        self.form.turns(&self.stages[stage])
    }

    pub(crate) fn form(&self) -> &Form {
        &self.form
    }
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
            staged: BTreeMap::new(),
            splits: BTreeMap::new(),
            alive: BTreeMap::new(),
            orders: BTreeMap::new(),
            gather_counts: BTreeMap::new(),
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
        let spread = if s.dtype.is_of_products() { s.microbatches() } else { 0 };
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
    pub(crate) fn form(&mut self, s: &Strategy) -> Option<Rc<Form>> {
        self.form_with(s, Experts::Placed)
    }

    fn form_with(&mut self, s: &Strategy, experts: Experts) -> Option<Rc<Form>> {
        let mut key = self.key(s);
        let experts =
            if self.request.model.experts.experts > 0 { experts } else { Experts::Placed };
        if experts == Experts::Anywhere {
            key.1 = (0, 0, key.1.2);
        }
        key.4 = experts;
        if let Some(known) = self.forms.get(&key) {
            return known.clone();
        }
        if self.forms.len() >= FORMS {
            self.forms.clear();
            self.staged.clear();
        }
        let form = self.priced_form(s, experts).map(Rc::new);
        self.forms.insert(key, form.clone());
        form
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
    pub(crate) fn staged(&mut self, s: &Strategy) -> Option<Rc<Staged>> {
        let again = match s.recompute {
            Recompute::FullOf(layers) => layers,
            _ => 0,
        };
        let form = self.form(s)?;
        let key = (Rc::as_ptr(&form) as usize, s.schedule, (s.pp, s.dp), s.split.clone(), again);
        if let Some(known) = self.staged.get(&key) {
            return Some(Rc::clone(known));
        }
        let ranges = self.ranges(s, &form);
        let stages: Vec<Rc<Stage>> = ranges.iter().map(|range| form.stage(range, again)).collect();
        let widest = stages.iter().map(|stage| stage.output).max().unwrap_or(0);
        let pp = s.pp as u16;
        let mut owners = vec![Vec::new(); s.pp as usize];
        for stage in 0..stages.len() {
            let rank = s.schedule.rank_of(paceline_plan::ids::Stage::from(stage), pp);
            owners[usize::from(rank.0)].push(stage);
        }
        let placed = self.places_matter(s);
        let equal = |a: usize, b: usize| {
            let (a, b) = (&owners[a], &owners[b]);
            a.len() == b.len() && a.iter().zip(b).all(|(&a, &b)| Rc::ptr_eq(&stages[a], &stages[b]))
        };
        let mut alike: Vec<usize> = Vec::with_capacity(owners.len());
        for rank in 0..owners.len() {
            let like = alike.last().copied().filter(|&other| !placed && equal(other, rank));
            alike.push(like.unwrap_or(rank));
        }
        let (ways, gathers, held) = (OnceCell::new(), OnceCell::new(), OnceCell::new());
        let staged = Staged { ranges, stages, owners, widest, alike, form, ways, gathers, held };
        let staged = Rc::new(staged);
        if self.staged.len() >= STAGED {
            self.staged.clear();
        }
        self.staged.insert(key, Rc::clone(&staged));
        Some(staged)
    }

    /// Layers by virtual stage.
    fn ranges(&mut self, s: &Strategy, form: &Form) -> Ranges {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if s.split == EQUAL_TIMES && count > 1 {
            return self.equal_times(s, form);
        }
        let key = (count, s.micro_batch * u64::from(s.dp), s.split.clone());
        if let Some(known) = self.splits.get(&key) {
            return Rc::clone(known);
        }
        let ranges = Rc::new(lower::stages(self.request.model, s));
        self.splits.insert(key, Rc::clone(&ranges));
        ranges
    }

    /// Those splits of a strategy that differ in their stages.
    pub(crate) fn distinct(&mut self, s: &Strategy, splits: Vec<Split>) -> Vec<Split> {
        let Some(form) = self.form(s) else { return splits };
        let mut known: Vec<Ranges> = Vec::new();
        let mut distinct = Vec::new();
        for split in splits {
            let ranges = self.ranges(&Strategy { split: split.clone(), ..s.clone() }, &form);
            if !known.contains(&ranges) {
                known.push(ranges);
                distinct.push(split);
            }
        }
        distinct
    }

    fn equal_times(&mut self, s: &Strategy, form: &Form) -> Ranges {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if self.units == 0 {
            self.units = lower::units(self.request.model, s);
        }
        form.equal_times(self.units, count)
    }

    /// The strategy with explicit stages, if it asks for stages of equal times.
    pub(crate) fn explicit(&mut self, s: &Strategy) -> Option<Strategy> {
        let count = usize::from(s.schedule.chunks()) * s.pp as usize;
        if s.split != EQUAL_TIMES || count == 1 {
            return Some(s.clone());
        }
        let form = self.form(s)?;
        let ranges = self.equal_times(s, &form);
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
        if !open {
            return self.time_of(s, staged, false);
        }
        // Stages with overlap take the least time.
        let overlaps = self.request.pins.overlap.of([true, false]).into_iter();
        let times =
            overlaps.map(|overlap| self.time_of(&Strategy { overlap, ..s.clone() }, staged, true));
        times.fold(f64::INFINITY, f64::min)
    }

    fn time_of(&mut self, s: &Strategy, staged: &Staged, open: bool) -> f64 {
        let microbatches = f64::from(s.microbatches());
        let updates = self.updates(s, staged, open);
        let Ways { there, back, .. } = self.ways(s, staged);
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
            let start = there[first].max(update.lead);
            let load = (start + load).max(load + serial);
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

    /// Returns true if no plan gets faster by an op that takes longer.
    pub(crate) fn is_monotonic(&self) -> bool {
        let limited = self.request.cluster.kinds().any(|device| device.copy_engines.is_some());
        self.prices.is_some() && !limited
    }

    /// Least time of an iteration by replaying the schedule's order.
    pub(crate) fn replay(&mut self, s: &Strategy, staged: &Staged) -> f64 {
        if self.prices.is_none() || !s.schedule.flushes() {
            return 0.0;
        }
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
        let edges = &self.ways(s, staged).edges;
        // Without overlap, turns take these gathers besides.
        let lead = |update: &Update| if s.overlap { update.lead } else { 0.0 };
        let starts = updates.iter().map(lead).collect();
        let ends = replay::ends(s, staged, &order, (edges, &turns), (&slow, starts));
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

    fn ways<'s>(&mut self, s: &Strategy, staged: &'s Staged) -> &'s Ways {
        staged.ways.get_or_init(|| {
            let edges = self.edges(s, staged);
            let split = s.schedule.splits_backward();
            let input = if split { Pass::BackwardInput } else { Pass::Backward };
            let (mut there, mut back) = (vec![0.0], vec![0.0]);
            for (stage, &(forward, backward)) in edges.iter().enumerate() {
                let turn = |pass: Pass| {
                    let turn = &staged.turns(stage)[pass as usize];
                    turn.whole.at(1.0) + turn.open.at(1.0)
                };
                there.push(there.last().copied().unwrap_or(0.0) + turn(Pass::Forward) + forward);
                back.push(back.last().copied().unwrap_or(0.0) + turn(input) + backward);
            }
            Ways { edges, there, back }
        })
    }
}

/// Numbers of forms, staged strategies and orders that are kept.
const FORMS: usize = 20_000;
const STAGED: usize = 20_000;
const ORDERS: usize = 32;

/// Time that a rank's passes take one after the other, and the longest weight-gradient pass.
fn load(mine: &[usize], staged: &Staged, microbatches: f64, slow: f64, s: &Strategy) -> (f64, f64) {
    let turns = || mine.iter().map(|&stage| staged.turns(stage));
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
