//! Buffers of experts without a capacity, which uneven routing can overflow.

use super::Plan;
use crate::graph::{OpKind, OpPass};

/// Size of the buffers that hold the tokens sent to the experts of a rank, in equal shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertBuffers {
    /// Planned size: [`Strategy::expert_buffer_factor`](crate::strategy::Strategy::expert_buffer_factor).
    pub factor: f64,
    /// Size that holds everything that can come.
    pub largest: f64,
}

/// Headroom of buffers that replace overflowed ones: routing that grows uneven goes on to do so.
const HEADROOM: f64 = 1.25;

impl ExpertBuffers {
    /// Size for tokens that need `needed` equal shares, with headroom.
    pub fn enlarged(&self, needed: f64) -> f64 {
        // Hundredths are enough, and short to read.
        let wanted = (needed.max(self.factor) * HEADROOM * 100.0).ceil() / 100.0;
        wanted.min(self.largest)
    }
}

impl Plan {
    /// Buffers of its experts; `None` if nothing can overflow them.
    pub fn expert_buffers(&self) -> Option<ExpertBuffers> {
        let ops = || self.templates.iter().flat_map(|template| &template.ops);
        let bounded = |kind: OpKind| match kind {
            OpKind::Route(routing) => routing.capacity.is_some(),
            _ => false,
        };
        if ops().any(|op| bounded(op.kind)) {
            return None;
        }
        let largest =
            ops().filter(|op| op.pass == OpPass::Forward).find_map(|op| match op.kind {
                OpKind::Dispatch { experts, topk, regions } if regions > 1 => {
                    // An expert takes no token twice.
                    let most = topk.min(experts / regions);
                    Some(most as f64 * regions as f64 / topk.max(1) as f64)
                }
                _ => None,
            })?;
        let factor = self.strategy.expert_buffer_factor;
        (factor < largest).then_some(ExpertBuffers { factor, largest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::lower;
    use crate::model::built_in;
    use crate::strategy::Strategy;

    #[test]
    fn buffers_grow_until_they_hold_everything() {
        let model = built_in::get("mini-moe-mtp").unwrap().unwrap();
        let of = |ep, expert_buffer_factor| {
            let strategy = Strategy {
                dp: 4,
                leaves: 4,
                ep,
                expert_buffer_factor,
                seq: 16,
                global_batch: 4,
                ..Strategy::default()
            };
            lower(&model, &strategy).unwrap().expert_buffers()
        };
        assert_eq!(of(1, 1.0), None, "a rank with all experts holds every choice");
        let experts = model.experts;
        let largest = (experts.topk.min(experts.experts / 4) * 4) as f64 / experts.topk as f64;
        let buffers = of(4, 1.0).unwrap();
        assert_eq!(buffers, ExpertBuffers { factor: 1.0, largest });
        assert_eq!(of(4, largest), None);
        assert_eq!(buffers.enlarged(1.1), 1.38);
        assert_eq!(buffers.enlarged(largest), largest);
        let steps = std::iter::successors(Some(buffers), |b| {
            Some(ExpertBuffers { factor: b.enlarged(b.factor), ..*b })
        });
        assert!(steps.take(20).any(|b| b.factor == largest), "every step is longer than nothing");
    }
}
