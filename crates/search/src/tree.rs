//! The tree of all strategies: each node stands for the strategies below it and has a bound that
//! none of them beats.

use crate::Request;
use crate::bound::{Estimator, Staged};
use crate::form::Experts;
use crate::space::{Mesh, Space};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, Recompute, Split, Store, Strategy, Zero};
use std::rc::Rc;

/// Choices from the mesh down to the ZeRO stage: a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Point {
    pub(crate) mesh: Mesh,
    pub(crate) experts: (u32, u32),
    pub(crate) sp: bool,
    /// `full:N` without its number.
    pub(crate) recompute: Recompute,
    pub(crate) schedule: ScheduleKind,
    pub(crate) zero: Zero,
    /// Not part of a layout, but decided with it.
    pub(crate) offload: (Offload, Store),
}

/// Node of the tree.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    /// All strategies of a mesh.
    Mesh(Mesh),
    /// Those with a sequence parallelism and a recomputation; experts are anywhere.
    Open(Point),
    /// Those with their experts placed, before they are priced.
    Placed(Point),
    /// Those with their experts placed.
    Form(Point),
    /// Those of a schedule, with any offload.
    Schedule(Point),
    /// Those of a ZeRO stage.
    Layout(Point),
    /// A layout with its stages, recomputed layers and offloads.
    Part(Box<Strategy>),
    /// A strategy; the flag is set once its bound is that of the replay.
    Leaf(Box<Strategy>, bool),
}

impl Node {
    /// Height of the tree.
    pub(crate) const HEIGHT: u8 = 8;

    /// Number of levels between a node and a simulation.
    pub(crate) const fn height(&self) -> u8 {
        match self {
            Self::Leaf(_, true) => 0,
            Self::Leaf(_, false) => 1,
            Self::Part(_) => 2,
            Self::Layout(_) => 3,
            Self::Schedule(_) => 4,
            Self::Form(_) => 5,
            Self::Placed(_) => 6,
            Self::Open(_) => 7,
            Self::Mesh(_) => Self::HEIGHT,
        }
    }
}

/// A node and its bound in seconds.
pub(crate) type Bounded = (f64, Node);

/// Expands nodes; the same node always has the same children.
pub(crate) struct Expander<'a> {
    space: Space<'a>,
    estimator: Estimator<'a>,
    room: f64,
    lifted: bool,
}

impl<'a> Expander<'a> {
    pub(crate) fn new(request: &'a Request<'a>) -> Self {
        let estimator = Estimator::new(request);
        let room = estimator.room();
        Self { space: Space::new(request), estimator, room, lifted: request.any_memory }
    }

    /// Bound of all strategies of a mesh, before its layers are priced.
    pub(crate) fn root(&self, mesh: &Mesh) -> f64 {
        self.estimator.rings(&self.space.strategy(mesh))
    }

    /// Children that may fit and take no longer than `limit`, each with its bound, and the number of
    /// all that may fit.
    pub(crate) fn expand(&mut self, node: &Node, limit: f64) -> (Vec<Bounded>, u64) {
        let mut children = self.children(node);
        let count = children.len() as u64;
        children.retain(|(bound, _)| *bound <= limit);
        (children, count)
    }

    fn children(&mut self, node: &Node) -> Vec<Bounded> {
        match node {
            Node::Mesh(mesh) => self.mesh(mesh),
            Node::Open(point) => self.open(point),
            Node::Placed(point) => self.placed(point),
            Node::Form(point) => self.form(point),
            Node::Schedule(point) => self.schedule(point),
            Node::Layout(point) => self.layout(point),
            Node::Part(strategy) => self.part(strategy),
            Node::Leaf(strategy, _) => self.replayed(strategy),
        }
    }

    fn strategy(&self, point: &Point) -> Strategy {
        let (ep, etp) = point.experts;
        Strategy {
            ep,
            etp,
            sp: point.sp,
            recompute: point.recompute,
            schedule: point.schedule,
            zero: point.zero,
            offload: point.offload.0,
            store: point.offload.1,
            ..self.space.strategy(&point.mesh)
        }
    }

    fn mesh(&mut self, mesh: &Mesh) -> Vec<Bounded> {
        let mut children = Vec::new();
        let Some(&experts) = self.space.experts(mesh).last() else { return children };
        if self.space.schedules(mesh).is_empty() {
            return children;
        }
        for sp in self.space.sequence(mesh) {
            let (schedule, zero) = (ScheduleKind::OneFOneB, Zero::None);
            let recompute = Recompute::None;
            let offload = (Offload::None, self.space.strategy(mesh).store);
            let point = Point { mesh: *mesh, experts, sp, recompute, schedule, zero, offload };
            // Recomputation only takes longer.
            let strategy = self.strategy(&point);
            let Some(bound) = self.estimator.load(&strategy, Experts::Anywhere) else {
                continue;
            };
            let modes = self.space.recomputes().into_iter();
            children
                .extend(modes.map(|recompute| (bound, Node::Open(Point { recompute, ..point }))));
        }
        children
    }

    fn open(&mut self, point: &Point) -> Vec<Bounded> {
        let mut children = Vec::new();
        let moe = self.space.moe();
        for experts in self.space.experts(&point.mesh) {
            let point = Point { experts, ..*point };
            let strategy = self.strategy(&point);
            let where_to = if moe { Experts::Anywhere } else { Experts::Placed };
            if let Some(bound) = self.estimator.load(&strategy, where_to) {
                let node = if moe { Node::Placed(point) } else { Node::Form(point) };
                children.push((bound, node));
            }
        }
        children
    }

    fn placed(&mut self, point: &Point) -> Vec<Bounded> {
        let bound = self.estimator.load(&self.strategy(point), Experts::Placed);
        bound.map(|bound| (bound, Node::Form(*point))).into_iter().collect()
    }

    fn form(&mut self, point: &Point) -> Vec<Bounded> {
        let mut children = Vec::new();
        for schedule in self.space.schedules(&point.mesh) {
            let point = Point { schedule, ..*point };
            // Offload only takes longer; with most of it least memory is needed.
            let offloads = self.space.offloads(&self.strategy(&point));
            let covers = |a: Offload, b: Offload| {
                a != b && a.optimizer() >= b.optimizer() && a.activations() >= b.activations()
            };
            let most = offloads
                .iter()
                .filter(|(one, _)| !offloads.iter().any(|(other, _)| covers(*other, *one)));
            let mut least = f64::INFINITY;
            for &offload in most {
                let point = Point { offload, ..point };
                // State is smallest under ZeRO-3. Of the others it is under ZeRO-2, whose updates
                // are as short.
                let stages = self.space.zero_stages(&self.strategy(&point));
                let small = stages.iter().rev().find(|&&zero| zero < Zero::Parameters);
                let three = stages.iter().find(|&&zero| zero == Zero::Parameters);
                for &zero in small.into_iter().chain(three) {
                    let bound = self.least(&Point { zero, ..point }, true);
                    least = least.min(bound.unwrap_or(f64::INFINITY));
                }
            }
            if least.is_finite() {
                children.push((least, Node::Schedule(point)));
            }
        }
        children
    }

    fn schedule(&mut self, point: &Point) -> Vec<Bounded> {
        let mut children = Vec::new();
        for zero in self.space.zero_stages(&self.strategy(point)) {
            for offload in self.space.offloads(&self.strategy(point)) {
                let point = Point { zero, offload, ..*point };
                let least = self.least(&point, false);
                children.extend(least.map(|bound| (bound, Node::Layout(point))));
            }
        }
        children
    }

    /// Least time of a layout's strategies that may fit; `None` if none may. If `open`, its offload is
    /// only what may be used.
    fn least(&mut self, point: &Point, open: bool) -> Option<f64> {
        let strategy = self.strategy(point);
        let mut least: Option<f64> = None;
        for split in self.splits(&strategy) {
            let strategy = Strategy { split, ..strategy.clone() };
            let Some((strategy, staged)) = self.fitting(&strategy) else { continue };
            let offload = if open { Offload::None } else { strategy.offload };
            let strategy = Strategy { offload, ..strategy };
            let time = self.estimator.time(&strategy, &staged, true);
            least = Some(least.map_or(time, |known| known.min(time)));
        }
        least
    }

    fn splits(&mut self, strategy: &Strategy) -> Vec<Split> {
        let splits = self.space.splits(strategy);
        self.estimator.distinct(strategy, splits)
    }

    fn layout(&mut self, point: &Point) -> Vec<Bounded> {
        let mut children = Vec::new();
        let strategy = self.strategy(point);
        for split in self.splits(&strategy) {
            let strategy = Strategy { split, ..strategy.clone() };
            let Some((strategy, staged)) = self.fitting(&strategy) else { continue };
            let bound = self.estimator.time(&strategy, &staged, true);
            children.push((bound, Node::Part(Box::new(strategy))));
        }
        children
    }

    /// The strategy that may fit, under `full:N` with the fewest recomputed layers: more of them take
    /// less memory and more time.
    fn fitting(&mut self, strategy: &Strategy) -> Option<(Strategy, Rc<Staged>)> {
        let Recompute::FullOf(least) = strategy.recompute else {
            let staged = self.estimator.staged(strategy)?;
            return self.may_fit(strategy, &staged).then(|| (strategy.clone(), staged));
        };
        let with = |layers| Strategy { recompute: Recompute::FullOf(layers), ..strategy.clone() };
        let (mut low, mut high) = (least, self.space.recomputed_layers(strategy).max(least));
        let mut found = None;
        while low <= high {
            // The most, then halfway.
            let layers = if found.is_none() { high } else { low.midpoint(high) };
            let strategy = with(layers);
            let staged = self.estimator.staged(&strategy)?;
            if !self.may_fit(&strategy, &staged) {
                found.as_ref()?;
                low = layers + 1;
                continue;
            }
            found = Some((strategy, staged));
            if layers == least {
                break;
            }
            high = layers - 1;
        }
        found
    }

    /// The next strategy with more recomputed layers, after one that did not fit.
    pub(crate) fn further(&mut self, strategy: &Strategy) -> Option<Bounded> {
        let Recompute::FullOf(layers) = strategy.recompute else { return None };
        if layers >= self.space.recomputed_layers(strategy) {
            return None;
        }
        let recompute = Recompute::FullOf(layers + 1);
        let strategy = Strategy { recompute, ..strategy.clone() };
        let staged = self.estimator.staged(&strategy)?;
        let bound = self.estimator.time(&strategy, &staged, false);
        Some((bound, Node::Leaf(Box::new(strategy), false)))
    }

    fn part(&mut self, strategy: &Strategy) -> Vec<Bounded> {
        let mut children = Vec::new();
        let mut known: Vec<(Strategy, Vec<f64>)> = Vec::new();
        for tail in self.space.settings(strategy) {
            let Some(staged) = self.estimator.staged(&tail) else { continue };
            if self.estimator.is_monotonic() {
                // A collective none of whose calls is faster than another's gains nothing.
                let calls = self.estimator.calls(&tail, &staged);
                let slower = |(other, less): &(Strategy, Vec<f64>)| {
                    (other.bucket, other.overlap) == (tail.bucket, tail.overlap)
                        && less.iter().zip(&calls).all(|(less, more)| less <= more)
                };
                if known.iter().any(slower) {
                    continue;
                }
                known.push((tail.clone(), calls));
            }
            let bound = self.estimator.time(&tail, &staged, false);
            children.push((bound, Node::Leaf(Box::new(tail), false)));
        }
        children
    }

    fn replayed(&mut self, strategy: &Strategy) -> Vec<Bounded> {
        let Some(staged) = self.estimator.staged(strategy) else { return Vec::new() };
        let bound = self.estimator.time(strategy, &staged, false);
        let bound = bound.max(self.estimator.replay(strategy, &staged));
        vec![(bound, Node::Leaf(Box::new(strategy.clone()), true))]
    }

    fn may_fit(&mut self, strategy: &Strategy, staged: &Staged) -> bool {
        self.lifted || self.estimator.memory(strategy, staged) <= self.room
    }

    /// The strategy with its stages written out.
    pub(crate) fn explicit(&mut self, strategy: &Strategy) -> Option<Strategy> {
        self.estimator.explicit(strategy)
    }
}

/// Layout of a strategy: all that its offload, stages and recomputed layers do not change.
pub(crate) fn layout(s: &Strategy) -> Point {
    let Strategy { tp, cp, pp, dp, micro_batch, .. } = *s;
    Point {
        mesh: Mesh { tp, cp, pp, dp, micro_batch },
        experts: (s.ep, s.etp),
        sp: s.sp,
        recompute: match s.recompute {
            Recompute::FullOf(_) => Recompute::FullOf(1),
            other => other,
        },
        schedule: s.schedule,
        zero: s.zero,
        offload: (Offload::None, Store::Disk),
    }
}

/// Identifies what two strategies may share: the priced layers.
pub(crate) fn worker_key(node: &Node) -> u64 {
    let of = |mesh: &Mesh, sp: bool| {
        let mixed = u64::from(mesh.tp).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ u64::from(mesh.cp).wrapping_mul(0xc2b2_ae3d_27d4_eb4f)
            ^ mesh.micro_batch.wrapping_mul(0x1656_67b1_9e37_79f9)
            ^ u64::from(sp);
        mixed >> 17 ^ mixed
    };
    match node {
        Node::Mesh(mesh) => of(mesh, true),
        Node::Open(point)
        | Node::Placed(point)
        | Node::Form(point)
        | Node::Schedule(point)
        | Node::Layout(point) => of(&point.mesh, true),
        Node::Part(s) | Node::Leaf(s, _) => of(&layout(s).mesh, true),
    }
}
