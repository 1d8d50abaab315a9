//! The ops of one layer in one pass: segments, and the exchanges between them.

use super::role::RoleIr;
use super::slots::Point;
use super::weight_stash::WeightVersion;
use crate::ids::{CallId, Microbatch, OpId, SegmentId};
use crate::mesh::Axis;
use crate::program::{Op, Peer, View};
use crate::schedule::Pass;

/// First channel of ring messages; channels below belong to stages.
const RING: u16 = 1 << 15;

/// A pass over one of this rank's layers, bound to its buffers.
#[derive(Clone, Debug, Default)]
pub(super) struct BoundPass {
    pub(super) pieces: Vec<Bound>,
    pub(super) open: Vec<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum Bound {
    Run { segment: SegmentId, waits: Vec<usize> },
    Exchange { call: CallId, axis: Axis },
    Shift { sent: View, received: View },
}

/// Adds a layer's own ops.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    let Point::Layer(turn, layer) = point else { return };
    let reads = match turn.pass {
        Pass::Forward => ir.forward_reads(turn.microbatch),
        Pass::Backward | Pass::BackwardInput => ir.backward_reads(),
        Pass::BackwardWeight => WeightVersion::Latest,
    };
    // In a forward pass only the loss and the dropped-token count accumulate.
    let fresh = match turn.pass {
        Pass::Forward => ir.opens_leaf(turn.k()),
        Pass::Backward | Pass::BackwardInput | Pass::BackwardWeight => ir.is_fresh(turn.k()),
    };
    ir.run_layer(layer, (turn.pass, reads), turn.microbatch, fresh);
}

impl RoleIr<'_> {
    /// Adds a pass over a layer; its first compute op waits for [`Walk::after`](super::slots::Walk::after).
    fn run_layer(
        &mut self,
        layer: usize,
        (pass, reads): (Pass, WeightVersion),
        microbatch: Microbatch,
        fresh: bool,
    ) {
        let bound = std::mem::take(self.bound(layer, pass, reads));
        let mut done: Vec<Vec<OpId>> = vec![Vec::new(); bound.pieces.len()];
        let mut shifted: Vec<OpId> = Vec::new();
        let mut waits: Vec<OpId> = Vec::new();
        for (at, piece) in bound.pieces.iter().enumerate() {
            match piece {
                Bound::Run { segment, waits: exchanges } => {
                    waits.clear();
                    waits.extend(exchanges.iter().flat_map(|&e| &done[e]));
                    waits.append(&mut self.walk.pending);
                    waits.append(&mut self.walk.after);
                    let op = Op::Compute { segment: *segment, microbatch, fresh };
                    self.compute(op, &waits);
                }
                Bound::Exchange { call, axis } => {
                    waits.clear();
                    waits.extend(self.walk.last_compute);
                    waits.extend_from_slice(&self.walk.after);
                    // Exchanges along both expert axes are serialised on one lane.
                    let lane = self.lane(match axis {
                        Axis::Dp => "batch",
                        Axis::Ep | Axis::Etp => "experts",
                        Axis::Pp | Axis::Cp | Axis::Tp | Axis::Edp => "tensor",
                    });
                    let op = Op::Collective { call: *call, microbatch };
                    done[at].push(self.body.push(lane, op, &waits));
                }
                Bound::Shift { sent, received } => {
                    // The sent value may have just arrived, and the receive buffer may still be
                    // read by the previous send.
                    waits.clear();
                    waits.extend(self.walk.last_compute);
                    waits.extend_from_slice(&shifted);
                    waits.extend_from_slice(&self.walk.after);
                    let channel = RING + at as u16;
                    let (to, from) = (Peer::Next(Axis::Cp), Peer::Previous(Axis::Cp));
                    let send = Op::Send { to, channel, view: *sent, microbatch };
                    let recv = Op::Recv { from, channel, view: *received, microbatch };
                    let lanes = [self.lane("ring-send"), self.lane("ring-recv")];
                    shifted = vec![
                        self.body.push(lanes[0], send, &waits),
                        self.body.push(lanes[1], recv, &waits),
                    ];
                    done[at].clone_from(&shifted);
                }
            }
        }
        self.walk.pending.extend(bound.open.iter().flat_map(|&e| &done[e]));
        *self.bound(layer, pass, reads) = bound;
    }

    fn bound(&mut self, layer: usize, pass: Pass, reads: WeightVersion) -> &mut BoundPass {
        match (pass, reads) {
            (Pass::Forward, WeightVersion::Stashed) => &mut self.kept_forwards[layer],
            _ => &mut self.passes[layer][pass as usize],
        }
    }

    /// Returns true if gradients start from zero with this microbatch: the first of a leaf, or
    /// every one if gradients are reduced immediately.
    pub(super) fn is_fresh(&self, k: usize) -> bool {
        let opens = self
            .local_sgd_steps()
            .map_or_else(|| self.opens_leaf(k), |size| k.is_multiple_of(size));
        self.transient_gradients() || opens
    }

    /// Returns true if this microbatch is the first of a leaf.
    fn opens_leaf(&self, k: usize) -> bool {
        let strategy = &self.context.strategy;
        let leaf = (strategy.microbatches() / strategy.local_leaves()).max(1) as usize;
        k.is_multiple_of(leaf)
    }
}
