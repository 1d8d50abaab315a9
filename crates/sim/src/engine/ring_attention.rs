//! Software-dependent cost of ring-attention messages between ranks that share a sequence.
//!
//! The plan sends keys and values with the model's KV heads, and the next block arrives while a
//! rank attends to the current one. Some software differs ([`Ring`]): it may send keys and values
//! once per query head, send gradients in f32, or wait for each message immediately in a compiled
//! layer.

use crate::profile::Ring;
use paceline_plan::DType;
use paceline_plan::graph::{OpKind, OpPass};
use paceline_plan::ids::{BufferId, LaneId};
use paceline_plan::mesh::Axis;
use paceline_plan::program::{Node, Op, Peer, Plan, Program};
use std::collections::BTreeMap;

/// Size of a role's messages relative to the plan, by the buffer that is sent.
#[derive(Clone, Debug, Default)]
pub(super) struct Sizes(BTreeMap<BufferId, f64>);

impl Sizes {
    /// Computes the sizes of keys, values and their gradients sent around the ranks of a role.
    pub(super) fn new(plan: &Plan, program: &Program, ring: &Ring) -> Self {
        let mut sizes = BTreeMap::new();
        if plan.mesh.cp < 2 {
            return Self(sizes);
        }
        for segment in &program.segments {
            let template = &plan.templates[segment.template as usize];
            for op in &template.ops {
                // Data sent first, data forwarded, and gradients accumulated so far.
                let (heads, values, gradients) = match (op.kind, op.pass) {
                    (OpKind::KeysValues { heads }, OpPass::Forward) => {
                        (heads, op.outputs.first(), None)
                    }
                    (OpKind::AttentionBlock { heads, .. }, OpPass::Forward) => {
                        (heads, op.inputs.get(1), None)
                    }
                    (OpKind::AttentionBlock { heads, .. }, OpPass::BackwardInput) => {
                        (heads, op.inputs.get(4), op.outputs.get(1))
                    }
                    _ => continue,
                };
                let copies = heads.heads as f64 / heads.kv_heads.max(1) as f64;
                let times = if ring.repeats_heads { copies } else { 1.0 };
                let buffer = |&operand: &u16| segment.operands[usize::from(operand)].buffer;
                let size = |&operand: &u16| template.operands[usize::from(operand)].dtype.size();
                let wider = |operand: &u16| match ring.wide_gradients {
                    true => DType::F32.size() as f64 / size(operand) as f64,
                    false => 1.0,
                };
                sizes.extend(values.map(|values| (buffer(values), times)));
                sizes.extend(gradients.map(|made| (buffer(made), times * wider(made))));
            }
        }
        Self(sizes)
    }

    /// Size of a message from a buffer relative to the plan.
    pub(super) fn of(&self, buffer: BufferId) -> f64 {
        self.0.get(&buffer).copied().unwrap_or(1.0)
    }
}

/// Lane on which an op runs.
///
/// If software waits for a ring message immediately, the receive is on the compute lane. The send
/// is not, or two ranks would wait for each other.
pub(super) fn lane(node: &Node, ring: &Ring) -> LaneId {
    let received = matches!(node.op, Op::Recv { from: Peer::Previous(Axis::Cp), .. });
    if received && ring.waits_at_once { COMPUTE } else { node.lane }
}

/// Compute lane, the first of every program.
const COMPUTE: LaneId = LaneId(0);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::preset;
    use crate::{NetworkKind, Options, Outcome, Profile, simulate};
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    const PLANNED: Ring = Ring {
        repeats_heads: false,
        wide_gradients: false,
        waits_at_once: false,
        merge: [0.0, 0.0],
    };

    /// Plan with context parallelism over four hosts and four query heads per KV head.
    fn plan() -> Plan {
        let model = built_in::get("llama3-8b").unwrap().unwrap();
        let (tp, cp, seq, dtype, grad_dtype) = (8, 4, 65536, DType::Bf16, DType::Bf16);
        let strategy = Strategy { tp, cp, seq, dtype, grad_dtype, ..Strategy::default() };
        lower(&model, &strategy).unwrap()
    }

    /// Total time of the ring messages.
    fn messages(outcome: &Outcome) -> f64 {
        let ring = outcome.ops.iter().filter(|op| op.name == "recv cp");
        ring.map(|op| op.time.0).sum()
    }

    fn outcome(ring: Ring, network: NetworkKind) -> Outcome {
        let cluster = preset::get("dgx-a100:4").unwrap();
        let profile = Profile { ring, ..Profile::MODERN };
        simulate(&plan(), &cluster, &Options { profile, network, ..Options::default() }).unwrap()
    }

    #[test]
    fn messages_have_the_heads_and_the_type_that_software_gives_them() {
        let plan = plan();
        let program = &plan.programs[0];
        let counted = |ring: Ring| {
            let sizes = Sizes::new(&plan, program, &ring);
            let mut times: Vec<f64> = Vec::new();
            for node in &program.body.nodes {
                if let Op::Send { to: Peer::Next(Axis::Cp), view, .. } = node.op {
                    times.push(sizes.of(view.buffer));
                }
            }
            times.sort_by(f64::total_cmp);
            times.dedup();
            times
        };
        assert_eq!(counted(PLANNED), [1.0]);
        assert_eq!(counted(Ring { repeats_heads: true, ..PLANNED }), [4.0]);
        assert_eq!(counted(Ring { wide_gradients: true, ..PLANNED }), [1.0, 2.0]);
        assert_eq!(counted(Ring::PYTORCH), [4.0, 8.0], "every message of the ring is found");
    }

    #[test]
    fn larger_messages_take_longer_and_those_waited_for_are_exposed() {
        for network in [NetworkKind::Analytic, NetworkKind::Flow] {
            let planned = outcome(PLANNED, network);
            let larger = outcome(Ring { repeats_heads: true, ..PLANNED }, network);
            let ratio = messages(&larger) / messages(&planned);
            assert!((3.0..4.2).contains(&ratio), "{network:?}: {ratio}");
            let waited = outcome(Ring { waits_at_once: true, ..PLANNED }, network);
            let more = waited.exposed_communication.0 - planned.exposed_communication.0;
            assert!(more > 0.5 * messages(&planned), "{network:?}: {more}");
            // The iteration changes only by the additional waiting.
            let longer = waited.iteration.0 - planned.iteration.0;
            assert!((longer / more - 1.0).abs() < 0.1, "{network:?}: {longer} {more}");
        }
    }

    #[test]
    fn merging_takes_memory_s_time() {
        let base = outcome(PLANNED, NetworkKind::Analytic).iteration.0;
        let merged = outcome(Ring { merge: [16.0, 32.0], ..PLANNED }, NetworkKind::Analytic);
        // Three steps in each of 32 layers, on 16,384 tokens with four heads of 128.
        let device = preset::get("dgx-a100").unwrap().device;
        let bytes = 3.0 * 32.0 * 16384.0 * 512.0 * (16.0 + 32.0);
        let least = bytes / device.sustained_memory_bandwidth().0;
        let longer = merged.iteration.0 - base;
        assert!((0.9..1.4).contains(&(longer / least)), "{longer} {least}");
    }
}
