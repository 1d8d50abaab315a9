//! Exchanges between stages, loads of the model's inputs, and lifetimes of what outlives a turn.

use super::role::RoleIr;
use super::slots::{Point, Turn};
use crate::ids::{BufferId, LaneId, Microbatch, OpId, Stage};
use crate::program::{CarryoverOp, LoadKind, Op, Peer, View};
use crate::schedule::{Pass, PassOutput, ScheduleKind};
use std::collections::VecDeque;
use std::ops::Range;

/// Lifetime of a value that outlives a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// From the forward pass to the input gradient.
    Input,
    /// From the forward pass to the weight gradients: the whole backward pass, unless it is split.
    Whole,
    /// From the input gradient to the weight gradients.
    Gradient,
}

impl Life {
    pub(super) fn start(self) -> PassOutput {
        match self {
            Self::Input | Self::Whole => PassOutput::Activations,
            Self::Gradient => PassOutput::InputGradient,
        }
    }

    pub(super) fn end(self) -> PassOutput {
        match self {
            Self::Input => PassOutput::InputGradient,
            Self::Whole | Self::Gradient => PassOutput::WeightGradients,
        }
    }
}

/// A virtual stage of this rank.
pub(super) struct StageState {
    pub(super) stage: Stage,
    pub(super) layers: Range<usize>,
    /// Buffer for the previous stage's output.
    pub(super) received: Option<View>,
    /// Buffer for the output to the next stage.
    pub(super) sent: Option<View>,
    pub(super) received_grad: Option<View>,
    pub(super) sent_grad: Option<View>,
    /// Inputs of the model, and their buffers.
    pub(super) loads: Vec<(LoadKind, BufferId)>,
    /// Per microbatch so far: op after which values that live until the input gradient are free.
    input_done: Vec<OpId>,
    /// The same for values that live until the weight gradients.
    freed: Vec<OpId>,
    forward_sends: Vec<OpId>,
    backward_sends: Vec<OpId>,
    /// Index of the first forward pass of the current section.
    first_forward: usize,
    /// Receive of the next forward pass's input, if it is posted one pass early.
    arriving: Option<OpId>,
    /// First op of the section's first forward pass that reads its input.
    first_op: Option<OpId>,
    /// Ops that the input half of each backward pass should have waited for but did not, because it
    /// computed nothing. The weight half waits for them.
    unread: VecDeque<Vec<OpId>>,
    /// Indices of the frames by [`Life`], if there are such buffers.
    pub(super) frames: [Option<u32>; 3],
}

impl StageState {
    pub(super) fn new(stage: Stage, layers: Range<usize>) -> Self {
        Self {
            stage,
            layers,
            received: None,
            sent: None,
            received_grad: None,
            sent_grad: None,
            loads: Vec::new(),
            input_done: Vec::new(),
            freed: Vec::new(),
            forward_sends: Vec::new(),
            backward_sends: Vec::new(),
            first_forward: 0,
            arriving: None,
            first_op: None,
            unread: VecDeque::new(),
            frames: [None; 3],
        }
    }
}

/// Receives, loads, sends and frees.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    match point {
        // Input of the very first forward pass.
        Point::Init if !ir.context.strategy.schedule.flushes() => {
            ir.stages[0].arriving = ir.receive(0, Microbatch(0));
        }
        Point::Start if !ir.context.strategy.schedule.flushes() => ir.end_prologue(),
        Point::Begin(turn) => ir.begin_turn(turn),
        Point::Reserve(turn, layer) => ir.reserve_send(turn, layer),
        Point::End(turn) => ir.end_turn(turn),
        Point::Finish => ir.declare_carryover(),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// Ends the prologue: all of it is complete when the first iteration begins.
    fn end_prologue(&mut self) {
        self.prologue = std::mem::take(&mut self.body);
        self.walk.last_compute = None;
        self.walk.pending.clear();
        let first = self.ahead() as usize;
        let state = &mut self.stages[0];
        state.forward_sends.clear();
        state.first_forward = first;
        (state.arriving, state.first_op) = (None, None);
    }

    fn begin_turn(&mut self, turn: &Turn) {
        self.walk.after.clear();
        match turn.pass {
            Pass::Forward => self.begin_forward(turn),
            Pass::Backward | Pass::BackwardInput => {
                let arrived = self.receive_gradient(turn);
                self.walk.after.extend(arrived);
            }
            Pass::BackwardWeight => {
                self.walk.after = self.stages[turn.at].unread.pop_front().unwrap_or_default();
            }
        }
    }

    fn begin_forward(&mut self, turn: &Turn) {
        let (at, microbatch) = (turn.at, turn.microbatch);
        let arrived = if self.context.strategy.schedule.flushes() {
            self.receive(at, microbatch)
        } else if self.stages[at].received.is_some() {
            // The receive of this pass's input was posted one pass ago, for an iteration's first
            // pass in the previous iteration. The receive for the next pass is posted now.
            let posted = self.stages[at].arriving;
            self.stages[at].arriving = self.receive(at, Microbatch(microbatch.0 + 1));
            posted
        } else {
            None
        };
        self.walk.after.extend(arrived);
        for (what, into) in self.stages[at].loads.clone() {
            let free = self.freed(at, into, turn.k());
            let lane = self.lane("load");
            let load = self.body.push(lane, Op::Load { what, into, microbatch }, &free);
            self.walk.after.push(load);
        }
        let first = OpId::from(self.body.nodes.len());
        self.stages[at].first_op.get_or_insert(first);
    }

    /// Before the layer that writes what is sent: waits for the send that used the same copy.
    fn reserve_send(&mut self, turn: &Turn, layer: usize) {
        let state = &self.stages[turn.at];
        let (view, sends, first) = match turn.pass {
            Pass::Forward if layer + 1 == turn.end => {
                (state.sent, &state.forward_sends, state.first_forward)
            }
            Pass::Backward | Pass::BackwardInput if layer == turn.first => {
                (state.sent_grad, &state.backward_sends, 0)
            }
            Pass::Forward | Pass::Backward | Pass::BackwardInput | Pass::BackwardWeight => return,
        };
        let free = view.and_then(|view| self.reusable(sends, view, turn.k(), first));
        self.walk.after.extend(free);
    }

    fn end_turn(&mut self, turn: &Turn) {
        self.send(turn);
        match turn.pass {
            Pass::Forward => {}
            Pass::Backward | Pass::BackwardInput => {
                self.free(turn.at, Life::Input, turn.microbatch);
                if turn.makes_gradients() {
                    self.free_rest(turn.at, turn.microbatch);
                } else {
                    let unread = std::mem::take(&mut self.walk.after);
                    self.stages[turn.at].unread.push_back(unread);
                }
                let done = self.walk.last_compute.expect("a backward pass follows a forward pass");
                self.stages[turn.at].input_done.push(done);
            }
            Pass::BackwardWeight => self.free_rest(turn.at, turn.microbatch),
        }
    }

    /// Sends the output of a turn to the stage that reads it, if another rank has it.
    fn send(&mut self, turn: &Turn) {
        let (state, microbatch) = (&self.stages[turn.at], turn.microbatch);
        let (stage, forward) = (state.stage.0, turn.pass == Pass::Forward);
        let view = match turn.pass {
            Pass::Forward => state.sent,
            Pass::Backward | Pass::BackwardInput => state.sent_grad,
            Pass::BackwardWeight => None,
        };
        let Some(view) = view else { return };
        let (to, edge, name) = if forward {
            (stage + 1, stage, "forward-send")
        } else {
            (stage - 1, stage - 1, "backward-send")
        };
        let produced = self.produced();
        let (to, channel) = (Peer::Stage(self.neighbour(to)), 2 * edge + u16::from(!forward));
        let lane = self.pipeline_lane(name, edge);
        let id = self.body.push(lane, Op::Send { to, channel, view, microbatch }, &produced);
        let state = &mut self.stages[turn.at];
        if forward { &mut state.forward_sends } else { &mut state.backward_sends }.push(id);
    }

    /// Adds the receive of the previous stage's output for a microbatch, if there is such a stage.
    fn receive(&mut self, at: usize, microbatch: Microbatch) -> Option<OpId> {
        let (stage, view) = (self.stages[at].stage, self.stages[at].received?);
        let free = self.freed(at, view.buffer, microbatch.index());
        let from = Peer::Stage(self.neighbour(stage.0 - 1));
        let lane = self.pipeline_lane("forward-recv", stage.0 - 1);
        let op = Op::Recv { from, channel: 2 * (stage.0 - 1), view, microbatch };
        Some(self.body.push(lane, op, &free))
    }

    /// Adds the receive of the gradient of a stage's output, if the next stage is on another rank.
    fn receive_gradient(&mut self, turn: &Turn) -> Option<OpId> {
        let (stage, view) = (self.stages[turn.at].stage, self.stages[turn.at].received_grad?);
        let free = self.freed(turn.at, view.buffer, turn.k());
        let from = Peer::Stage(self.neighbour(stage.0 + 1));
        let lane = self.pipeline_lane("backward-recv", stage.0);
        let (channel, microbatch) = (2 * stage.0 + 1, turn.microbatch);
        Some(self.body.push(lane, Op::Recv { from, channel, view, microbatch }, &free))
    }

    /// Lane for messages between a virtual stage and the next one. If stages form a V, both
    /// directions pass the same ranks, and neither may block the other.
    fn pipeline_lane(&mut self, name: &str, stage: u16) -> LaneId {
        let upwards =
            self.context.strategy.schedule == ScheduleKind::DualPipeV && stage >= self.pp();
        if upwards { self.lane(&format!("{name}-up")) } else { self.lane(name) }
    }

    /// Declares the receives of the next iteration's first forward pass as carryover ops: they may
    /// still be in flight when that iteration begins.
    fn declare_carryover(&mut self) {
        let stages = self.stages.iter();
        self.in_flight = stages
            .filter_map(|state| {
                let before = state.first_op.into_iter().collect();
                state.arriving.map(|op| CarryoverOp { op, before })
            })
            .collect();
    }

    /// Frees values that live until the weight gradients are computed.
    fn free_rest(&mut self, at: usize, microbatch: Microbatch) {
        self.free(at, Life::Gradient, microbatch);
        self.free(at, Life::Whole, microbatch);
        let done = self.walk.last_compute.expect("a backward pass follows a forward pass");
        self.stages[at].freed.push(done);
    }

    /// Frees a stage's buffers of one lifetime.
    fn free(&mut self, at: usize, life: Life, microbatch: Microbatch) {
        let Some(frame) = self.stages[at].frames[life as usize] else { return };
        // No buffer may be freed while an exchange still reads it.
        let open = std::mem::take(&mut self.walk.pending);
        self.compute(Op::Free { frame, microbatch }, &open);
    }

    /// Ops to complete before microbatch `k` is written to a buffer: the last use of its copy.
    fn freed(&self, at: usize, buffer: BufferId, k: usize) -> Vec<OpId> {
        let state = &self.stages[at];
        let late =
            self.lives.get(&buffer).is_some_and(|life| life.end() == PassOutput::WeightGradients);
        let freed = if late { &state.freed } else { &state.input_done };
        let copies = self.buffers[buffer.index()].copies as usize;
        k.checked_sub(copies).map(|old| freed[old]).into_iter().collect()
    }

    /// Send that used the same copy of a double buffer and must complete before it is written. The
    /// section's sends begin with that of microbatch `first`; earlier ones are complete.
    fn reusable(&self, sends: &[OpId], view: View, k: usize, first: usize) -> Option<OpId> {
        let copies = self.buffers[view.buffer.index()].copies as usize;
        k.checked_sub(copies + first).map(|old| sends[old])
    }
}
