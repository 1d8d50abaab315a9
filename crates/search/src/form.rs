//! Forms: the priced layers of a rank under the degrees that decide its kernels and messages.
//!
//! A form knows for every kind of layer what each pass takes and what it keeps. Stages are sums over
//! its layers, made once for each composition.

use paceline_plan::ids::Rank;
use paceline_plan::lower::{LayerOutline, Outline, OutlinePass, Parameters, PassPiece};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::schedule::Pass;
use paceline_plan::strategy::{Split, Strategy};
use paceline_plan::units::Bytes;
use paceline_sim::{Exchange, Prices};
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Layers by virtual stage.
pub(crate) type Ranges = Rc<Vec<Range<usize>>>;

/// Length of a path through a program: compute, which concurrent traffic slows down, and the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Path {
    pub(crate) run: f64,
    pub(crate) fixed: f64,
}

impl Path {
    /// Length if compute takes `slowdown` times as long.
    pub(crate) fn at(self, slowdown: f64) -> f64 {
        self.run * slowdown + self.fixed
    }

    fn plus(self, other: Self) -> Self {
        Self { run: self.run + other.run, fixed: self.fixed + other.fixed }
    }

    fn less(self, other: Self) -> Self {
        Self { run: self.run - other.run, fixed: self.fixed - other.fixed }
    }

    fn run(time: f64) -> Self {
        Self { run: time, fixed: 0.0 }
    }

    fn fixed(time: f64) -> Self {
        Self { run: 0.0, fixed: time }
    }

    fn later(self, other: Self) -> Self {
        if other.at(1.0) > self.at(1.0) { other } else { self }
    }
}

/// One pass over the layers of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// From the rank's last compute op before it to the last one in it.
    pub(crate) whole: Path,
    /// The same from the first compute op on, which waits for exchanges of the turn before.
    pub(crate) inner: Path,
    /// From the last compute op to the end of the exchanges that the next one must wait for.
    pub(crate) open: Path,
    /// Compute alone.
    pub(crate) work: f64,
}

/// A stage: its passes, and what it holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stage {
    /// Kinds of its layers.
    kinds: Vec<usize>,
    /// By [`Pass`]; see [`Form::turns`].
    turns: OnceCell<[Turn; 4]>,
    /// Bytes of a microbatch until the input gradient: in two-byte types, and in others.
    pub(crate) kept: [f64; 2],
    /// The same until the weight gradients.
    pub(crate) kept_late: [f64; 2],
    pub(crate) scratch: f64,
    pub(crate) parameters: Parameters,
    /// Bytes sent to the next stage.
    pub(crate) output: u64,
    /// Bytes that its blocks keep of a microbatch, and the most that one of them keeps.
    pub(crate) block_bytes: f64,
    pub(crate) most_block_bytes: f64,
}

#[derive(Clone, Debug)]
enum Priced {
    Run { time: f64, waits: Vec<usize> },
    Exchange { lane: usize, time: f64 },
}

#[derive(Clone, Debug, Default)]
struct PricedPass {
    pieces: Vec<Priced>,
    open: Vec<usize>,
    work: f64,
}

#[derive(Clone, Debug)]
struct Kind {
    passes: [PricedPass; 4],
    kept: [f64; 2],
    kept_late: [f64; 2],
    scratch: f64,
    parameters: Parameters,
    output: u64,
    is_block: bool,
}

impl Kind {
    fn sized(kind: &LayerOutline, passes: [PricedPass; 4]) -> Self {
        let sizes = |bytes: [Bytes; 2]| bytes.map(|bytes| bytes.as_f64());
        Self {
            passes,
            kept: sizes(kind.kept),
            kept_late: sizes(kind.kept_late),
            scratch: kind.scratch.as_f64(),
            parameters: kind.parameters,
            output: kind.output.0,
            is_block: kind.is_block,
        }
    }
}

/// Priced layers.
pub(crate) struct Form {
    kinds: Vec<Kind>,
    /// Kind of each layer.
    pub(crate) layers: Vec<usize>,
    /// Kind of each layer if it recomputes from its input, under `full:N`.
    again: Option<Vec<usize>>,
    /// First layer of the stretch, of period two, that ends with each layer.
    stretch: Vec<usize>,
    /// Times of a forward and a backward pass over each kind of layer alone.
    alone: Vec<(f64, f64)>,
    load: OnceCell<f64>,
    stages: RefCell<BTreeMap<(usize, usize, u16), Rc<Stage>>>,
    splits: RefCell<BTreeMap<usize, Ranges>>,
}

/// Places of a model's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Experts {
    /// As the strategy says.
    Placed,
    /// Any: their GEMMs run at the best rate, and their tokens arrive at once.
    Anywhere,
}

/// Part of the experts' operations that every placement computes at least: a capacity drops tokens.
const ROUTED: f64 = 0.5;

const PASSES: [Pass; 4] =
    [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight];
const LANES: usize = 4;

impl Form {
    /// Prices an outline. `again` is the outline in which every block recomputes from its input.
    pub(crate) fn new(
        outline: &Outline,
        again: Option<&Outline>,
        (strategy, experts): (&Strategy, Experts),
        prices: &mut Prices<'_>,
    ) -> Self {
        let source = again.unwrap_or(outline);
        let factor = prices.slowest(strategy.mesh().world());
        let time = |template| match experts {
            Experts::Placed => prices.template(template, strategy),
            Experts::Anywhere => prices
                .experts(template, strategy)
                .map_or_else(|| prices.template(template, strategy), |least| least * ROUTED),
        };
        let times: Vec<f64> = source.templates.iter().map(|t| time(t) * factor).collect();
        let kinds = source.kinds.iter().map(|kind| {
            let passes =
                PASSES.map(|pass| priced(kind.pass(pass), (strategy, experts), &times, prices));
            Kind::sized(kind, passes)
        });
        let kinds = kinds.collect();
        Self::of(kinds, outline, again)
    }

    /// The same with passes that take no time, where times depend on what runs concurrently.
    pub(crate) fn unpriced(outline: &Outline, again: Option<&Outline>) -> Self {
        let source = again.unwrap_or(outline);
        let kinds = source.kinds.iter().map(|kind| Kind::sized(kind, Default::default()));
        Self::of(kinds.collect(), outline, again)
    }

    fn of(kinds: Vec<Kind>, outline: &Outline, again: Option<&Outline>) -> Self {
        let layers = outline.layers.clone();
        let mut stretch: Vec<usize> = Vec::with_capacity(layers.len());
        for (at, &kind) in layers.iter().enumerate() {
            stretch.push(match at {
                0 | 1 => 0,
                _ if kind == layers[at - 2] => stretch[at - 1],
                _ => at - 1,
            });
        }
        let alone = (0..kinds.len())
            .map(|kind| {
                let time = |pass| alone(&kinds, kind, pass);
                let split = time(Pass::BackwardInput) + time(Pass::BackwardWeight);
                (time(Pass::Forward), time(Pass::Backward).max(split))
            })
            .collect();
        Self {
            kinds,
            again: again.map(|again| again.layers.clone()),
            layers,
            stretch,
            alone,
            load: OnceCell::new(),
            stages: RefCell::default(),
            splits: RefCell::default(),
        }
    }

    /// A stage of consecutive layers, of which the first `again` blocks are recomputed from their
    /// inputs under `full:N`.
    pub(crate) fn stage(&self, layers: &Range<usize>, again: u16) -> Rc<Stage> {
        let again = if self.again.is_some() { again } else { 0 };
        let key = (self.canonical(layers), layers.len(), again);
        if let Some(known) = self.stages.borrow().get(&key) {
            return Rc::clone(known);
        }
        let mut left = usize::from(again);
        let kinds: Vec<usize> = (layers.clone())
            .map(|layer| {
                let kind = self.layers[layer];
                match &self.again {
                    Some(twins) if left > 0 && self.kinds[kind].is_block => {
                        left -= 1;
                        twins[layer]
                    }
                    _ => kind,
                }
            })
            .collect();
        let stage = Rc::new(self.summed(kinds));
        self.stages.borrow_mut().insert(key, Rc::clone(&stage));
        stage
    }

    /// First layer of the earliest equal stage.
    fn canonical(&self, layers: &Range<usize>) -> usize {
        let first = self.stretch[layers.end - 1];
        if first > layers.start {
            return layers.start;
        }
        let period = if layers.end - first < 2 || self.layers[first] == self.layers[first + 1] {
            1
        } else {
            2
        };
        first + (layers.start - first) % period
    }

    fn summed(&self, kinds: Vec<usize>) -> Stage {
        let mut stage = Stage::default();
        for &kind in &kinds {
            let kind = &self.kinds[kind];
            let sums = stage.kept.iter_mut().chain(&mut stage.kept_late);
            for (sum, more) in sums.zip(kind.kept.iter().chain(&kind.kept_late)) {
                *sum += more;
            }
            stage.scratch = stage.scratch.max(kind.scratch);
            if kind.is_block {
                let bytes = kind.kept.iter().chain(&kind.kept_late).sum::<f64>();
                stage.block_bytes += bytes;
                stage.most_block_bytes = stage.most_block_bytes.max(bytes);
            }
            let (sum, more) = (&mut stage.parameters, &kind.parameters);
            sum.dense += more.dense;
            sum.unpadded += more.unpadded;
            sum.unpadded_experts += more.unpadded_experts;
            sum.experts += more.experts;
            sum.sparse += more.sparse;
            // Two uses on one stage share a table.
            sum.tied = sum.tied.max(more.tied);
        }
        stage.output = kinds.last().map_or(0, |&kind| self.kinds[kind].output);
        stage.kinds = kinds;
        stage
    }

    /// Passes over one of its stages.
    pub(crate) fn turns<'s>(&self, stage: &'s Stage) -> &'s [Turn; 4] {
        stage.turns.get_or_init(|| PASSES.map(|pass| self.turn(&stage.kinds, pass)))
    }

    fn turn(&self, kinds: &[usize], pass: Pass) -> Turn {
        if kinds.iter().all(|&kind| self.kinds[kind].passes[pass as usize].pieces.is_empty()) {
            return Turn::default();
        }
        let forward = pass == Pass::Forward;
        let order: Vec<usize> =
            if forward { kinds.to_vec() } else { kinds.iter().rev().copied().collect() };
        let run = |leading: bool| Walk::over(&self.kinds, &order, pass, leading);
        let (whole, inner) = (run(true), run(false));
        let work = order.iter().map(|&kind| self.kinds[kind].passes[pass as usize].work).sum();
        Turn { whole: whole.last, inner: inner.last, open: whole.open(), work }
    }

    /// Stages of nearly equal forward and backward times.
    pub(crate) fn equal_times(&self, units: usize, stages: usize) -> Ranges {
        if let Some(known) = self.splits.borrow().get(&stages) {
            return Rc::clone(known);
        }
        let time = |kind| PASSES.map(|pass| alone(&self.kinds, kind, pass)).iter().sum::<f64>();
        let times: Vec<f64> = (0..self.kinds.len()).map(time).collect();
        let mut costs: Vec<f64> = self.layers.iter().map(|&kind| times[kind]).collect();
        let behind: f64 = costs.drain(units..).sum();
        if let Some(last) = costs.last_mut() {
            *last += behind;
        }
        let starts = match paceline_plan::lower::balance(&costs, stages) {
            Split::At(starts) => starts,
            Split::Cost | Split::Count => Vec::new(),
        };
        let mut edges: Vec<usize> = vec![0];
        edges.extend(starts.iter().map(|&start| start as usize));
        edges.push(self.layers.len());
        let ranges = Rc::new(edges.windows(2).map(|pair| pair[0]..pair[1]).collect());
        self.splits.borrow_mut().insert(stages, Rc::clone(&ranges));
        ranges
    }

    /// Parameters of a layer.
    pub(crate) fn parameters(&self, layer: usize) -> &Parameters {
        &self.kinds[self.layers[layer]].parameters
    }

    /// Returns true if a layer is neither embedding nor head.
    pub(crate) fn is_block(&self, layer: usize) -> bool {
        self.kinds[self.layers[layer]].is_block
    }

    /// Time of one layer in a backward pass, not less than within any stage.
    pub(crate) fn backward_time(&self, layer: usize) -> f64 {
        self.alone[self.layers[layer]].1
    }

    /// The same in a forward pass.
    pub(crate) fn forward_time(&self, layer: usize) -> f64 {
        self.alone[self.layers[layer]].0
    }

    /// Time that all layers keep the ranks of a pipeline busy with one microbatch, in sum. No split
    /// into stages and no order of passes needs less.
    pub(crate) fn load(&self) -> f64 {
        *self.load.get_or_init(|| self.total_load())
    }

    fn total_load(&self) -> f64 {
        let turn = |kind: usize, pass: Pass| {
            let whole = Walk::over(&self.kinds, &[kind], pass, true);
            let inner = Walk::over(&self.kinds, &[kind], pass, false);
            (whole.last.at(1.0), inner.last.at(1.0), whole.open().at(1.0))
        };
        let turns: Vec<[(f64, f64, f64); 4]> =
            (0..self.kinds.len()).map(|kind| PASSES.map(|pass| turn(kind, pass))).collect();
        // Exchanges that any compute op after a block's pass waits for.
        let blocks = (0..self.kinds.len()).filter(|&kind| self.kinds[kind].is_block);
        let used = |kind: usize, at: usize| !self.kinds[kind].passes[at].pieces.is_empty();
        let opens = blocks.flat_map(|kind| {
            let turns = &turns;
            (0..4).filter(move |&at| used(kind, at)).map(move |at| turns[kind][at].2)
        });
        let open = opens.fold(f64::INFINITY, f64::min);
        let open = if open.is_finite() { open } else { 0.0 };
        let first_block = self.layers.iter().position(|&kind| self.kinds[kind].is_block);
        let mut total = 0.0;
        for (layer, &kind) in self.layers.iter().enumerate() {
            // What precedes the ends, or follows them, leaves nothing open.
            let before = self.kinds[kind].is_block && Some(layer) != first_block;
            let before = if before { open } else { 0.0 };
            let time = |at: usize| {
                let (whole, inner, _) = turns[kind][at];
                whole.max(inner + before)
            };
            let (backward, split) = (time(1), time(2) + time(3));
            let back = match (used(kind, 1), used(kind, 2)) {
                (true, true) => backward.min(split),
                (true, false) => backward,
                (false, _) => split,
            };
            total += time(0) + back;
        }
        // The last block's backward pass follows the head's.
        total - 2.0 * open
    }
}

/// Time of a pass over one layer alone.
fn alone(kinds: &[Kind], kind: usize, pass: Pass) -> f64 {
    let walk = Walk::over(kinds, &[kind], pass, true);
    walk.last.plus(walk.open()).at(1.0)
}

fn priced(
    pass: &OutlinePass,
    (strategy, experts): (&Strategy, Experts),
    times: &[f64],
    prices: &mut Prices<'_>,
) -> PricedPass {
    let mut work = 0.0;
    let pieces = pass.pieces.iter().map(|piece| match piece {
        PassPiece::Run { template, waits } => {
            work += times[*template];
            Priced::Run { time: times[*template], waits: waits.clone() }
        }
        PassPiece::Collective { axis, kind, elements, dtype } => {
            let lane = match axis {
                Axis::Dp => 0,
                Axis::Ep | Axis::Etp => 1,
                Axis::Pp | Axis::Cp | Axis::Tp | Axis::Edp => 2,
            };
            let group = GroupKind::Axis(*axis);
            let exchange =
                Exchange { group, kind: *kind, elements: *elements, dtype: *dtype, block: 1 };
            let free = lane == 1 && experts == Experts::Anywhere;
            let time = if free {
                0.0
            } else {
                least(strategy, prices, |prices, rank| prices.collective(&exchange, strategy, rank))
            };
            Priced::Exchange { lane, time }
        }
        PassPiece::Shift(bytes) => {
            let next = strategy.mesh().stride(Axis::Cp);
            let time = least(strategy, prices, |prices, rank| {
                prices.message(strategy, rank, Rank(rank.0 + next), *bytes)
            });
            Priced::Exchange { lane: 3, time }
        }
    });
    let pieces = pieces.collect();
    PricedPass { pieces, open: pass.open.clone(), work }
}

/// Least price among the stages, whose ranks may lie differently on the hosts.
pub(crate) fn least(
    strategy: &Strategy,
    prices: &mut Prices<'_>,
    price: impl Fn(&mut Prices<'_>, Rank) -> f64,
) -> f64 {
    let stride = strategy.mesh().stride(Axis::Pp);
    let stages = if is_aligned(stride, prices) { 1 } else { strategy.pp };
    (0..stages).map(|stage| price(prices, Rank(stage * stride))).fold(f64::INFINITY, f64::min)
}

/// Returns true if stages of `ranks` ranks all lie alike on the cluster's dimensions.
fn is_aligned(ranks: u32, prices: &Prices<'_>) -> bool {
    let mut size = 1u64;
    prices.cluster().dimensions.iter().all(|dimension| {
        size = size.saturating_mul(dimension.size.into());
        size.is_multiple_of(ranks.into()) || u64::from(ranks).is_multiple_of(size)
    })
}

/// Replay of one pass over layers, from the compute op before it.
#[derive(Clone, Copy, Debug, Default)]
struct Walk {
    /// End of the last compute op.
    last: Path,
    lanes: [Path; LANES],
    /// End of the exchanges that the next compute op must wait for.
    pending: Path,
}

impl Walk {
    /// Replays a pass. Without `leading`, exchanges before the first compute op take no time.
    fn over(kinds: &[Kind], order: &[usize], pass: Pass, leading: bool) -> Self {
        let mut walk = Self::default();
        let mut counts = leading;
        let mut before: [Option<(Self, Path)>; 2] = [None; 2];
        let mut ends = Vec::new();
        let mut at = 0;
        while at < order.len() {
            let start = walk;
            walk.layer(&kinds[order[at]].passes[pass as usize], &mut counts, &mut ends);
            at += 1;
            // Once a period of two layers repeats, the others repeat it too.
            let gain = walk.last.less(start.last);
            let relative = walk.relative();
            let [older, _] = before;
            let repeats = older.is_some_and(|(state, _)| state.equals(&relative)) && at >= 4;
            let like = |n: usize| order[n] == order[n - 2];
            if repeats && like(at - 1) && like(at - 2) {
                let rest = (at..order.len()).take_while(|&n| like(n)).count() / 2;
                let [_, newer] = before;
                let pair = newer.map_or(Path::default(), |(_, gain)| gain).plus(gain);
                let further = Path { run: pair.run * rest as f64, fixed: pair.fixed * rest as f64 };
                walk.shift(further);
                at += 2 * rest;
            }
            before = [before[1], Some((relative, gain))];
        }
        walk
    }

    fn layer(&mut self, pass: &PricedPass, counts: &mut bool, ends: &mut Vec<Path>) {
        ends.clear();
        ends.resize(pass.pieces.len(), Path::default());
        for (at, piece) in pass.pieces.iter().enumerate() {
            match piece {
                Priced::Run { time, waits } => {
                    let mut start = self.last.later(self.pending);
                    for &exchange in waits {
                        start = start.later(ends[exchange]);
                    }
                    self.pending = Path::default();
                    self.last = start.plus(Path::run(*time));
                    *counts = true;
                }
                Priced::Exchange { lane, time } => {
                    let time = if *counts { *time } else { 0.0 };
                    let start = self.last.later(self.lanes[*lane]);
                    ends[at] = start.plus(Path::fixed(time));
                    self.lanes[*lane] = ends[at];
                }
            }
        }
        for &exchange in &pass.open {
            self.pending = self.pending.later(ends[exchange]);
        }
    }

    fn open(&self) -> Path {
        let open = self.pending.less(self.last);
        if open.at(1.0) > 0.0 { open } else { Path::default() }
    }

    /// State relative to the last compute op.
    fn relative(&self) -> Self {
        let relative = |path: Path| {
            let rest = path.less(self.last);
            if rest.at(1.0) > 0.0 { rest } else { Path::default() }
        };
        Self {
            last: Path::default(),
            lanes: self.lanes.map(relative),
            pending: relative(self.pending),
        }
    }

    fn equals(&self, other: &Self) -> bool {
        let close = |a: Path, b: Path| {
            let size = a.run.abs() + a.fixed.abs() + 1e-12;
            (a.run - b.run).abs() + (a.fixed - b.fixed).abs() <= 1e-9 * size
        };
        close(self.pending, other.pending)
            && self.lanes.iter().zip(&other.lanes).all(|(&a, &b)| close(a, b))
    }

    fn shift(&mut self, by: Path) {
        let relative = self.relative();
        self.last = self.last.plus(by);
        self.lanes = relative.lanes.map(|lane| lane.plus(self.last));
        self.pending = relative.pending.plus(self.last);
    }
}
