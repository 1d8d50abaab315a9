//! The gradient norm and the optimizer step.

use super::role::RoleIr;
use super::slots::Point;
use crate::program::StepPhase;
use crate::strategy::Sync;

/// Computes the norm, then updates bucket after bucket. Servers update what they serve, and under
/// local SGD the outer step updates the weights.
pub(super) fn pass(ir: &mut RoleIr<'_>, point: Point<'_>) {
    let s = &ir.context.strategy;
    match point {
        Point::Update if s.local.is_none() && !matches!(s.sync, Sync::Servers(_)) => {
            ir.walk.known = ir.norm();
            if ir.context.strategy.optimizer.needs_tensor_norms() {
                let norm = std::mem::take(&mut ir.walk.known);
                ir.walk.known = ir.tensor_norms(&norm);
            }
        }
        Point::Step(bucket) => {
            let known = std::mem::take(&mut ir.walk.known);
            ir.step(bucket, StepPhase::Apply, &known);
            ir.walk.known = known;
        }
        _ => {}
    }
}
