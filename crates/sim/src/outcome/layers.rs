//! Times by layer, and of every exchange by name.
//!
//! A segment of a layer is timed as a whole. If it computes input and weight gradients together, its
//! time is divided in proportion to the roofline times of the operators of each. The exchange of a
//! gradient bucket counts for the layers whose parameters it holds, in proportion to their elements.

use super::SimContext;
use super::statistics::Account;
use crate::compute::Roofline;
use crate::engine::{Timeline, vector as whole_vector};
use crate::network::{Analytic, PhaseLatency, Vector};
use paceline_plan::collective::Pattern;
use paceline_plan::ids::{BufferId, LayerId, OpId, RoleId};
use paceline_plan::program::label::{span_kind, span_name};
use paceline_plan::program::{ComputePass, Op, Program};
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;
use std::collections::BTreeMap;

/// Times of one layer on a rank that holds it, per iteration.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LayerStat {
    /// The layer's name.
    pub name: String,
    /// Role of the rank.
    pub role: String,
    /// Forward passes.
    pub forward: Seconds,
    /// Forward passes that are repeated in the backward pass.
    pub recompute: Seconds,
    /// Gradients for the layer's input.
    pub input_gradient: Seconds,
    /// Gradients for the layer's weights.
    pub weight_gradient: Seconds,
    /// Exchanges of the layer's activations and gradients.
    pub communication: Seconds,
    /// Part of `communication` that no compute of the rank hides.
    pub exposed: Seconds,
}

/// Exchanges of one name on a rank of a role, per iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExchangeStat {
    /// Name as in traces: `all_reduce blocks.3.down.product`, `send blocks.7.out`.
    pub name: String,
    /// Role of the rank.
    pub role: String,
    /// Number of exchanges.
    pub count: u64,
    /// Bytes of the whole vector, or of the message, of one exchange.
    pub bytes: Bytes,
    /// Total time.
    pub time: Seconds,
    /// Part of `time` that no compute of the rank hides.
    pub exposed: Seconds,
    /// Latency of a message in every phase of a collective that the plan's steps carry out, alone
    /// on its links.
    pub phases: Vec<PhaseLatency>,
}

/// Times of all layers, and of all exchanges, of every role.
pub(super) fn layers(
    context: &SimContext<'_>,
    timeline: &Timeline,
    iteration: Seconds,
) -> (Vec<LayerStat>, Vec<ExchangeStat>) {
    let mut tally = Tally::new(context);
    for role in (0..context.plan.programs.len()).map(RoleId::from) {
        let account =
            Account::new(context.plan, timeline.representative(role), timeline, iteration);
        tally.role(role, &account, timeline);
    }
    (tally.layers.into_values().collect(), tally.exchanges.into_values().collect())
}

struct Tally<'a> {
    context: &'a SimContext<'a>,
    /// By template, shares of its time for input and for weight gradients.
    shares: Vec<[f64; 2]>,
    layers: BTreeMap<(LayerId, RoleId), LayerStat>,
    exchanges: BTreeMap<(RoleId, String), ExchangeStat>,
    phases: Vec<(Pattern, RoleId, Vector, Vec<PhaseLatency>)>,
}

impl<'a> Tally<'a> {
    fn new(context: &'a SimContext<'a>) -> Self {
        let strategy = &context.plan.strategy;
        let (dtype, microbatches) = (strategy.dtype, strategy.microbatches());
        let profile = &context.options.profile;
        let roofline = Roofline::new(&context.cluster.device, profile, dtype, microbatches);
        let share = |template| {
            let [_, input, weight] = roofline.by_pass(template).map(|time| time.0);
            let sum = input + weight;
            if sum > 0.0 { [input / sum, weight / sum] } else { [1.0, 0.0] }
        };
        Self {
            context,
            shares: context.plan.templates.iter().map(share).collect(),
            layers: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            phases: Vec::new(),
        }
    }

    fn role(&mut self, role: RoleId, account: &Account, timeline: &Timeline) {
        let plan = self.context.plan;
        let program = &plan.programs[role.index()];
        for (index, node) in program.body.nodes.iter().enumerate() {
            let Some(kind) = span_kind(plan, program, &node.op) else { continue };
            let (start, end) = timeline.span(role, OpId::from(index));
            let time = end - start;
            if let Op::Compute { segment, .. } = node.op {
                let segment = program.segment(segment);
                if let Some(layer) = segment.layer {
                    self.compute(role, layer, segment.template, time);
                }
            } else if kind.is_communication() {
                let exposed = account.exposed_within(start, end);
                self.exchange(role, &node.op, (time, exposed));
            }
        }
    }

    fn layer(&mut self, layer: LayerId, role: RoleId) -> &mut LayerStat {
        let plan = self.context.plan;
        self.layers.entry((layer, role)).or_insert_with(|| LayerStat {
            name: plan.layers.get(layer.index()).cloned().unwrap_or_default(),
            role: plan.programs[role.index()].name.clone(),
            ..LayerStat::default()
        })
    }

    fn compute(&mut self, role: RoleId, layer: LayerId, template: u32, time: Seconds) {
        let pass = self.context.plan.templates[template as usize].pass;
        let [input, weight] = self.shares[template as usize];
        let stat = self.layer(layer, role);
        match pass {
            ComputePass::Forward => stat.forward += time,
            ComputePass::Recompute => stat.recompute += time,
            ComputePass::BackwardInput => stat.input_gradient += time,
            ComputePass::BackwardWeight => stat.weight_gradient += time,
            ComputePass::Backward => {
                stat.input_gradient += time * input;
                stat.weight_gradient += time * weight;
            }
            ComputePass::Update => {}
        }
    }

    fn exchange(&mut self, role: RoleId, op: &Op, (time, exposed): (Seconds, Seconds)) {
        let plan = self.context.plan;
        let program = &plan.programs[role.index()];
        let name = span_name(plan, program, op).into_owned();
        let buffer = buffer(program, op);
        for (layer, share) in self.holders(program, buffer, &name) {
            let stat = self.layer(layer, role);
            stat.communication += time * share;
            stat.exposed += exposed * share;
        }
        if let Some(known) = self.exchanges.get_mut(&(role, name.clone())) {
            known.count += 1;
            known.time += time;
            known.exposed += exposed;
            return;
        }
        let (bytes, phases) = match *op {
            Op::Collective { call, .. } => {
                let call = program.call(call);
                (whole_vector(plan, call).bytes(), self.phases(role, op))
            }
            Op::Send { view, .. } | Op::Recv { view, .. } => {
                let size = program.buffer(view.buffer).dtype.size();
                (Bytes(view.len.saturating_mul(size)), Vec::new())
            }
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Accumulate { .. }
            | Op::Step { .. }
            | Op::Stash { .. }
            | Op::Restore { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => (Bytes::ZERO, Vec::new()),
        };
        let role_name = program.name.clone();
        let stat = ExchangeStat {
            name: name.clone(),
            role: role_name,
            count: 1,
            bytes,
            time,
            exposed,
            phases,
        };
        self.exchanges.insert((role, name), stat);
    }

    /// Layers that an exchange is for, and their shares of it; none for those of no layer.
    fn holders(
        &self,
        program: &Program,
        buffer: Option<BufferId>,
        name: &str,
    ) -> Vec<(LayerId, f64)> {
        let bucket = program.buckets.iter().find(|bucket| {
            Some(bucket.grads.buffer) == buffer || Some(bucket.params.buffer) == buffer
        });
        let Some(bucket) = bucket else {
            return self.layer_in(name).map(|layer| (layer, 1.0)).into_iter().collect();
        };
        let mut elements: BTreeMap<LayerId, f64> = BTreeMap::new();
        for entry in &bucket.entries {
            if let Some(layer) = self.layer_in(&entry.name) {
                *elements.entry(layer).or_default() += entry.elements() as f64;
            }
        }
        let sum: f64 = elements.values().sum();
        elements.into_iter().map(|(layer, of)| (layer, of / sum)).collect()
    }

    /// The layer whose name begins a word of this text: `send blocks.7.out` is of `blocks.7`.
    fn layer_in(&self, text: &str) -> Option<LayerId> {
        let named = |layer: &str| {
            text.split(' ').any(|word| {
                word.strip_prefix(layer)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            })
        };
        let at = self.context.plan.layers.iter().position(|layer| named(layer))?;
        Some(LayerId::from(at))
    }

    /// Message latencies of a collective's phases, each kind of call computed once.
    fn phases(&mut self, role: RoleId, op: &Op) -> Vec<PhaseLatency> {
        let plan = self.context.plan;
        let program = &plan.programs[role.index()];
        let Some(call) = op.call().map(|call| program.call(call)) else { return Vec::new() };
        if !matches!(call.method, paceline_plan::collective::Method::Steps(_)) {
            return Vec::new();
        }
        let placement = self.context.costs.placement();
        let mut members = plan.mesh.members(plan.group(call.group), plan.representative(role));
        members.iter_mut().for_each(|member| *member = placement.device(*member));
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let Ok(pattern) = call.pattern(ranks) else { return Vec::new() };
        let vector = whole_vector(plan, call);
        let known = self.phases.iter().find(|(of, on, size, _)| {
            (*of, *on) == (pattern, role) && size.bytes() == vector.bytes()
        });
        if let Some((.., phases)) = known {
            return phases.clone();
        }
        let profile = Analytic::new(self.context.cluster).profile(&pattern, &members, &vector);
        let phases = profile.map_or_else(|_| Vec::new(), |profile| profile.phases);
        self.phases.push((pattern, role, vector, phases.clone()));
        phases
    }
}

/// Buffer that an exchange moves.
fn buffer(program: &Program, op: &Op) -> Option<BufferId> {
    match *op {
        Op::Send { view, .. } | Op::Recv { view, .. } => Some(view.buffer),
        Op::Collective { call, .. } => Some(program.call(call).input.buffer),
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Accumulate { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::cases::{close, mini, run, strategy};
    use crate::cluster::preset;
    use paceline_plan::lower::lower;
    use paceline_plan::strategy::Strategy;

    /// The layers' times add up to the rank's: nothing is counted twice or left out.
    #[test]
    fn layers_add_up_to_the_ops() {
        let cluster = preset::get("dgx-a100:2").unwrap();
        for (dp, tp, pp) in [(1, 1, 1), (4, 1, 1), (2, 2, 2), (1, 2, 2)] {
            let base = strategy(pp, u64::from(dp) * 2);
            let plan = lower(&mini(), &Strategy { dp, tp, leaves: dp, ..base }).unwrap();
            let (outcome, details) = run(&plan, &cluster);
            let stage = outcome.roles.iter().position(|role| role.compute == outcome.compute);
            let role = &outcome.roles[stage.unwrap()].name;
            let of = |name: &str| {
                let ops = outcome.ops.iter().filter(|op| op.name.starts_with(name));
                ops.map(|op| op.time.0).sum::<f64>()
            };
            let layers = details.layers.iter().filter(|layer| layer.role == *role);
            let (mut forward, mut backward) = (0.0, 0.0);
            for layer in layers {
                forward += layer.forward.0;
                backward += layer.input_gradient.0 + layer.weight_gradient.0;
                assert!(layer.exposed.0 <= layer.communication.0 + 1e-12, "{layer:?}");
            }
            close(forward, of("forward"));
            close(backward, of("backward"));
            let exchanges = details.exchanges.iter().filter(|exchange| exchange.role == *role);
            let time: f64 = exchanges.map(|exchange| exchange.time.0).sum();
            let known = ["all_reduce", "send", "recv", "reduce_scatter", "all_gather"];
            close(time, known.iter().map(|name| of(name)).sum());
        }
    }

    /// Weight and input gradients of a linear layer are products of the same size.
    #[test]
    fn the_backward_pass_is_divided_by_its_products() {
        let plan = lower(&mini(), &strategy(1, 1)).unwrap();
        let (_, details) = run(&plan, &preset::get("dgx-a100").unwrap());
        let block = details.layers.iter().find(|layer| layer.name == "blocks.0").unwrap();
        let ratio = block.input_gradient.0 / block.weight_gradient.0;
        assert!((0.7..3.0).contains(&ratio), "{block:?}");
        let exchange = details.exchanges.first();
        assert!(exchange.is_none(), "one rank exchanges nothing: {exchange:?}");
    }

    /// Gradients of replicas are exchanged per bucket; each has its phases.
    #[test]
    fn exchanges_have_their_phases() {
        let collective = "hierarchical:ring:ring/8".parse().unwrap();
        let base = Strategy { dp: 16, leaves: 16, ..strategy(1, 16) };
        let plan = lower(&mini(), &Strategy { collective, ..base }).unwrap();
        let (_, details) = run(&plan, &preset::get("dgx-a100:2").unwrap());
        let reduced =
            details.exchanges.iter().find(|e| e.name.starts_with("all_reduce embedding.."));
        let reduced = reduced.unwrap_or_else(|| panic!("{:?}", details.exchanges));
        let phases: Vec<&str> = reduced.phases.iter().map(|phase| phase.name.as_str()).collect();
        assert!(phases.len() >= 3, "{phases:?}");
        assert!(phases[0].contains("nvlink") && phases[1].contains("infiniband"), "{phases:?}");
        assert!(reduced.phases.iter().all(|phase| phase.message_latency_s > 0.0));
    }
}
