//! The points of a role's program in order, and the passes that insert their ops there.
//!
//! A feature of a strategy is a pass: at each point it adds the ops that the feature needs, and
//! nothing else knows of it. [`linearize`] walks the points once.
//!
//! ```text
//! Init  turns that run ahead                                                       prologue
//! Start                                                                            prologue, body
//! turn: Begin  (Enter Reserve Layer Leave LeafDone) per layer  End  GradientsDone  body
//! Reduce  Collect  Report  Update  Step per bucket  Finish                         body
//! ```

use super::role::RoleIr;
use super::{
    compress, gradient_sync, hogwild, layer, local_sgd, no_overlap, offload, optimizer, outputs,
    pipeline, tied, weight_stash, zero,
};
use crate::compress::Compression;
use crate::ids::{Microbatch, OpId};
use crate::schedule::{Action, Pass, PassOutput};
use crate::strategy::{Offload, Strategy, Sync, Zero};
use std::ops::Range;

/// One pass of a virtual stage over one microbatch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) pass: Pass,
    /// Index of the stage among the role's.
    pub(super) at: usize,
    pub(super) microbatch: Microbatch,
    /// The stage's first layer, and the one after its last.
    pub(super) first: usize,
    pub(super) end: usize,
    /// Next action of the schedule.
    pub(super) following: Option<Action>,
}

impl Turn {
    pub(super) const fn layers(&self) -> Range<usize> {
        self.first..self.end
    }

    /// Index of the microbatch.
    pub(super) const fn k(&self) -> usize {
        self.microbatch.index()
    }

    /// Returns true if it computes the gradients of the weights.
    pub(super) fn makes_gradients(&self) -> bool {
        self.pass.makes(PassOutput::WeightGradients)
    }
}

/// A point at which passes insert ops. Ops that the turn's next compute op must wait for go to
/// [`Walk::after`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Point<'t> {
    /// Before the forward passes that run ahead of the first iteration.
    Init,
    /// Before the first iteration.
    Start,
    /// Before a turn: its inputs arrive.
    Begin(&'t Turn),
    /// Before a layer that reads activations and weights: they are brought to its buffers.
    Enter(&'t Turn, usize),
    /// Before a layer: its outputs' buffers must be free.
    Reserve(&'t Turn, usize),
    /// The layer itself.
    Layer(&'t Turn, usize),
    /// After a layer: its operands may leave their buffers.
    Leave(&'t Turn, usize),
    /// After a layer whose weight gradients are computed.
    LeafDone(&'t Turn, usize),
    /// After a turn's last layer: its outputs leave.
    End(&'t Turn),
    /// After a turn that computed all weight gradients of its stage for a microbatch.
    GradientsDone(&'t Turn),
    /// After all turns: gradients that are not reduced yet are.
    Reduce,
    /// Reductions in flight are completed.
    Collect,
    /// Numbers that are only reported.
    Report,
    /// Before the steps.
    Update,
    /// The step of a bucket.
    Step(usize),
    /// After everything.
    Finish,
}

/// State of the walk over the points.
#[derive(Default)]
pub(super) struct Walk {
    pub(super) last_compute: Option<OpId>,
    /// Exchanges that the next compute op must wait for.
    pub(super) pending: Vec<OpId>,
    /// Ops that the turn's next compute op must wait for.
    pub(super) after: Vec<OpId>,
    /// Ops that the steps must wait for.
    pub(super) known: Vec<OpId>,
}

type PassFn = fn(&mut RoleIr<'_>, Point<'_>);

/// Passes of a strategy, in the order in which they insert ops at a point.
fn passes(s: &Strategy) -> Vec<PassFn> {
    let flushes = s.schedule.flushes();
    let all: [(bool, PassFn); 13] = [
        (true, gradient_sync::pass),
        (!flushes, weight_stash::pass),
        (true, pipeline::pass),
        (true, optimizer::pass),
        (s.compress != Compression::None, compress::pass),
        (s.offload != Offload::None, offload::pass),
        (s.zero != Zero::None, zero::pass),
        (s.sync == Sync::Hogwild, hogwild::pass),
        (true, layer::pass),
        (true, tied::pass),
        (true, outputs::pass),
        (s.local.is_some(), local_sgd::pass),
        (!s.overlap, no_overlap::pass),
    ];
    all.into_iter().filter(|(active, _)| *active).map(|(_, pass)| pass).collect()
}

/// Adds all ops of a role: walks its points once, and calls every pass at each.
pub(super) fn linearize(ir: &mut RoleIr<'_>) {
    let passes = passes(&ir.context.strategy);
    let at = |ir: &mut RoleIr<'_>, point: Point<'_>| passes.iter().for_each(|pass| pass(ir, point));
    at(ir, Point::Init);
    if !ir.context.strategy.schedule.flushes() {
        let stage = ir.stages[0].stage;
        for microbatch in (0..ir.ahead()).map(Microbatch) {
            let turn = turn(ir, Action { pass: Pass::Forward, stage, microbatch }, None);
            walk(ir, &turn, at);
        }
    }
    at(ir, Point::Start);
    let mut number = 0;
    while let Some(&action) = ir.actions().get(number) {
        number += 1;
        let turn = turn(ir, action, ir.actions().get(number).copied());
        walk(ir, &turn, at);
    }
    for point in [Point::Reduce, Point::Collect, Point::Report, Point::Update] {
        at(ir, point);
    }
    if ir.context.strategy.sync == Sync::AllReduce && ir.context.strategy.local.is_none() {
        (0..ir.buckets.len()).for_each(|bucket| at(ir, Point::Step(bucket)));
    }
    at(ir, Point::Finish);
}

fn turn(ir: &RoleIr<'_>, action: Action, following: Option<Action>) -> Turn {
    let Action { pass, microbatch, stage } = action;
    let at = ir.stages.iter().position(|state| state.stage == stage);
    let at = at.expect("a rank runs its own stages");
    let Range { start: first, end } = ir.stages[at].layers;
    Turn { pass, at, microbatch, first, end, following }
}

/// Walks the points of one turn.
fn walk(ir: &mut RoleIr<'_>, turn: &Turn, at: impl Fn(&mut RoleIr<'_>, Point<'_>)) {
    let Turn { pass, first, end, .. } = *turn;
    at(ir, Point::Begin(turn));
    for place in 0..end - first {
        let layer = if pass == Pass::Forward { first + place } else { end - 1 - place };
        // Weight gradients read what the input half left in place.
        if pass != Pass::BackwardWeight {
            at(ir, Point::Enter(turn, layer));
        }
        at(ir, Point::Reserve(turn, layer));
        at(ir, Point::Layer(turn, layer));
        if pass != Pass::BackwardWeight {
            at(ir, Point::Leave(turn, layer));
        }
        if turn.makes_gradients() {
            at(ir, Point::LeafDone(turn, layer));
        }
    }
    at(ir, Point::End(turn));
    if turn.makes_gradients() {
        at(ir, Point::GradientsDone(turn));
    }
}
