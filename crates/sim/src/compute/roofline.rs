//! Operators of a plan on the roofline of its device (Williams et al., "Roofline", 2009).

use super::Roofline;
use crate::cluster::Device;
use crate::profile::Profile;
use paceline_plan::graph::{CostClass, OpPass};
use paceline_plan::program::{Op, Plan};
use paceline_plan::units::Seconds;
use serde::Serialize;
use std::collections::BTreeMap;

/// Equal operators of a plan, in the body of the role that runs them most often.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperatorPoint {
    /// The operator, its pass and the shape of its first operand.
    pub name: String,
    /// True for GEMMs and attention, whose arithmetic runs on matrix units.
    pub matrix: bool,
    /// Operations of one run.
    pub flops: f64,
    /// Bytes that one run moves, each operand once.
    pub bytes: f64,
    /// Time of one run.
    pub time: Seconds,
    /// Runs per iteration.
    pub count: u64,
}

/// All operators of a plan's compute ops that do arithmetic in a kernel of their own, longest in
/// total first, and the time and number of the others: they move data, or are fused.
pub fn operators(
    plan: &Plan,
    device: &Device,
    profile: &Profile,
) -> (Vec<OperatorPoint>, Seconds, u64) {
    let (dtype, microbatches) = (plan.strategy.dtype, plan.strategy.microbatches());
    let roofline = Roofline::new(device, profile, dtype, microbatches);
    let mut runs = vec![0u64; plan.templates.len()];
    for program in &plan.programs {
        let mut of_role = vec![0u64; plan.templates.len()];
        for node in &program.body.nodes {
            if let Op::Compute { segment, .. } = node.op {
                of_role[program.segment(segment).template as usize] += 1;
            }
        }
        runs.iter_mut().zip(of_role).for_each(|(most, here)| *most = (*most).max(here));
    }
    let mut points: BTreeMap<String, OperatorPoint> = BTreeMap::new();
    let (mut moving, mut movers) = (Seconds::ZERO, 0);
    for (template, count) in plan.templates.iter().zip(runs).filter(|(_, count)| *count > 0) {
        for op in &template.ops {
            let cost = template.cost(op);
            let (matrix, flops) = match op.kind.cost_class() {
                CostClass::Product(_) | CostClass::Attention { .. } => (true, cost.matrix.0),
                CostClass::RowWise(_)
                | CostClass::ElementWise(_)
                | CostClass::Lookup { .. }
                | CostClass::Permute(_)
                | CostClass::Reduction => (false, cost.vector.0 + cost.matrix.0),
            };
            let time = Seconds(roofline.operator(template, op).device);
            // Of a fused operator nothing is left but its place in another one's kernel.
            if flops <= 0.0 || cost.bytes.0 == 0 || time.0 <= 0.0 {
                moving += time * count as f64;
                movers += count;
                continue;
            }
            let pass = match op.pass {
                OpPass::Forward => "forward",
                OpPass::BackwardInput => "input gradient",
                OpPass::BackwardWeight => "weight gradient",
            };
            let of = op.params.first().or(op.inputs.first());
            let [rows, width] = of.map_or([1, 1], |&i| template.operands[usize::from(i)].dims);
            let name = format!("{} {rows}×{width}, {pass}", op.kind.name());
            let point = points.entry(name.clone()).or_insert_with(|| OperatorPoint {
                name,
                matrix,
                flops,
                bytes: cost.bytes.as_f64(),
                time,
                count: 0,
            });
            point.count += count;
        }
    }
    let mut points: Vec<OperatorPoint> = points.into_values().collect();
    points.sort_by(|a, b| {
        let whole = |point: &OperatorPoint| point.time.0 * point.count as f64;
        whole(b).total_cmp(&whole(a))
    });
    (points, moving, movers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    /// No operator is above the roof, and GEMMs are counted as the model has them.
    #[test]
    fn operators_stay_below_the_roof() {
        let model = built_in::get("gpt2-124m").unwrap().unwrap();
        let strategy = Strategy { seq: model.seq, ..Strategy::default() };
        let plan = lower(&model, &strategy).unwrap();
        let device = preset::get("dgx-a100").unwrap().device;
        let (points, moving, movers) = operators(&plan, &device, &Profile::default());
        assert!(points.len() > 15 && movers > 0 && moving > Seconds::ZERO);
        let peak = device.rate(strategy.dtype).0;
        for point in &points {
            let rate = point.flops / point.time.0;
            let slope = device.memory_bandwidth.0 * point.flops / point.bytes;
            assert!(rate <= peak.min(slope) * (1.0 + 1e-9), "{point:?}");
        }
        let qkv = points.iter().find(|p| p.name == "qkv 2304×768, forward").unwrap();
        assert_eq!((qkv.count, qkv.matrix), (12, true));
        assert_eq!(qkv.flops, 2.0 * 1024.0 * 2304.0 * 768.0);
    }
}
