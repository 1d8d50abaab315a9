//! ZeRO's gathers of sharded weights: of a layer's before it reads them (ZeRO-3), or of a bucket's
//! after the step (ZeRO-1 and 2).

use super::bucket_plan::Weights;
use super::role::RoleIr;
use super::slots::Point;
use crate::ids::Microbatch;
use crate::program::Op;
use crate::strategy::Zero;

/// Gathers weights.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    let whole = ir.context.strategy.zero == Zero::Parameters;
    match point {
        Point::Enter(_, layer) if whole => ir.gather(layer),
        Point::Leave(_, layer) if whole => ir.used(layer),
        Point::Step(bucket) => ir.gather_updated(bucket),
        _ => {}
    }
}

impl RoleIr<'_> {
    /// ZeRO-3: gathers a layer's weights, unless they are available.
    ///
    /// It waits only for its double buffer, so it runs while the previous layer computes (prefetch).
    fn gather(&mut self, layer: usize) {
        for bucket in self.buckets_of(layer) {
            let Weights::Gathered { whole, gather: call, present: false, .. } =
                self.buckets[bucket].weights
            else {
                continue;
            };
            // The buffer is free after the last compute op that read its contents.
            let mut free = None;
            for other in &mut self.buckets {
                if let Weights::Gathered { whole: home, present, used, .. } = &mut other.weights
                    && home.buffer == whole.buffer
                {
                    *present = false;
                    free = free.max(*used);
                }
            }
            let lane = self.lane("gather");
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            let gathered = self.body.push(lane, op, free.as_slice());
            self.walk.after.push(gathered);
            if let Weights::Gathered { present, .. } = &mut self.buckets[bucket].weights {
                *present = true;
            }
        }
    }

    /// Records that a layer's weights were just used.
    fn used(&mut self, layer: usize) {
        for bucket in self.buckets_of(layer) {
            if let Weights::Gathered { used, .. } = &mut self.buckets[bucket].weights {
                *used = self.walk.last_compute;
            }
        }
    }

    /// Gathers the weights that this rank's step has just changed with those of the others.
    fn gather_updated(&mut self, bucket: usize) {
        if let Weights::Whole { gather: Some(call), .. } = self.buckets[bucket].weights {
            let lane = self.lane("gather");
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            self.body.push(lane, op, self.walk.last_compute.as_slice());
        }
    }
}
