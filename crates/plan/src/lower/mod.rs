//! Lowers a model and a strategy to programs.
//!
//! ```text
//! check ─► graph ─► shard (specs, conversions) ─► segment ─► partition into stages
//!                                                                  │
//!                            one role per pipeline rank and server ◄┘ (role, slots, server)
//! ```
//!
//! Every collective comes from the conversion table; every address from `arena`.

mod arena;
mod async_server;
mod bind;
mod bucket;
mod bucket_plan;
mod check;
mod check_experts;
mod check_networks;
mod check_replicas;
mod compress;
mod double_buffer;
mod dropped;
mod experts;
mod grad_norm;
mod gradient_sync;
mod hogwild;
mod layer;
mod local_sgd;
mod no_overlap;
mod offload;
mod optimizer;
mod outline;
mod outputs;
mod partition;
mod pipeline;
mod recompute;
mod ring_attention;
mod role;
mod segment;
mod shard;
mod slots;
mod split_backward;
mod sync_server;
mod tables;
mod tensor_norms;
mod tied;
mod weight_stash;
mod zero;

pub use check::{Problem, Problems};
pub use outline::{
    LayerOutline, Outline, OutlinePass, Parameters, PassPiece, outline, squares, stages, units,
};
pub use partition::balance;
pub use tables::{TableSlot, assign, slots};

use crate::collective::{Algorithm, Fabric, Method};
use crate::compress::Codec;
use crate::graph::{self, Graph};
use crate::ids::{GroupId, Microbatch};
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::model::Model;
use crate::program::{ComputePass, Plan, Template};
use crate::samples::SampleKind;
use crate::schedule::{self, Action, Pass};
use crate::strategy::{Strategy, Sync, Zero};
use segment::{LayerPass, Scratch};
use shard::{Item, ShardedLayer};
use std::ops::Range;

/// Plans a model under a strategy, or returns all problems of the request.
pub fn lower(model: &Model, strategy: &Strategy) -> Result<Plan, Problems> {
    lower_on(model, strategy, &Fabric::unknown())
}

/// Like [`lower`], with the methods of collectives chosen for a fabric.
pub fn lower_on(model: &Model, strategy: &Strategy, fabric: &Fabric) -> Result<Plan, Problems> {
    check::check(model, strategy)?;
    let mut context = Context::new(model, strategy)?;
    let mut programs = Vec::new();
    for rank in 0..strategy.pp {
        programs.push(role::program(&mut context, rank));
    }
    for server in 0..strategy.sync.servers() {
        programs.push(match strategy.sync {
            Sync::Async { staleness, .. } => async_server::program(&mut context, server, staleness),
            Sync::Servers(_) | Sync::AllReduce | Sync::Hogwild => {
                sync_server::program(&mut context, server)
            }
        });
    }
    let mut plan = Plan {
        model: model.name().to_string(),
        strategy: strategy.clone(),
        mesh: context.mesh,
        groups: context.groups,
        templates: context.templates,
        programs,
        layers: context.graph.layers.iter().map(|l| l.name.clone()).collect(),
        parameters: model.parameters(),
        samples: SampleKind::of(model, strategy.seq),
        norm_entries: bucket::norm_entries(&context.graph),
        messages: None,
    };
    fabric.decide(&mut plan);
    Ok(plan)
}

/// State shared by all roles.
struct Context {
    strategy: Strategy,
    mesh: Mesh,
    graph: Graph,
    /// Passes by layer kind.
    kinds: Vec<Kind>,
    sharded: Vec<ShardedLayer>,
    /// Layers by virtual stage.
    stages: Vec<Range<usize>>,
    /// Actions by pipeline rank.
    order: Vec<Vec<Action>>,
    groups: Vec<GroupKind>,
    templates: Vec<Template>,
}

/// Passes over a layer of one kind, by [`Pass`]; passes that the schedule does not run are empty.
#[derive(Default)]
struct Kind {
    walks: [Walk; 4],
}

/// One pass over a layer.
#[derive(Default)]
struct Walk {
    steps: LayerPass,
    scratch: Scratch,
}

/// Actions of each pipeline rank. A local step updates the weights that the next one reads, so each
/// has a schedule of its own.
fn order(strategy: &Strategy, pp: u16) -> Result<Vec<Vec<Action>>, Problems> {
    let steps = strategy.local.map_or(1, |local| local.steps.max(1));
    let each = (strategy.microbatches() / steps).max(1);
    let order = schedule::order(strategy.schedule, pp, each)
        .map_err(|e| Problems::one("--schedule", e.to_string()))?;
    let repeated = |row: Vec<Action>| {
        let step = |step: u32| {
            row.iter().map(move |action| {
                let microbatch = Microbatch(step * each + action.microbatch.0);
                Action { microbatch, ..*action }
            })
        };
        (0..steps).flat_map(step).collect()
    };
    Ok(order.into_iter().map(repeated).collect())
}

/// Layers of a strategy as one rank sees them, before stages have programs.
struct Layers {
    graph: Graph,
    stages: Vec<Range<usize>>,
    sharded: Vec<ShardedLayer>,
    kinds: Vec<Kind>,
    templates: Vec<Template>,
}

impl Layers {
    fn new(model: &Model, strategy: &Strategy) -> Self {
        let batch = strategy.micro_batch * u64::from(strategy.dp);
        let mut graph = graph::build(model, batch, strategy.seq, strategy.tokens_of_update());
        let stages = usize::from(strategy.schedule.chunks()) * strategy.pp as usize;
        let stages = partition::partition(&graph, stages, &strategy.split);
        let like = recompute::specialize_layers(&mut graph, &stages, strategy.recompute);
        let mut templates = Vec::new();
        let sharded: Vec<ShardedLayer> = (graph.kinds.iter().zip(&like))
            .map(|(kind, &like)| shard::shard(&graph, kind, strategy, like))
            .collect();
        let named = graph.kinds.iter().zip(&sharded);
        let kinds = named.map(|(g, s)| Kind::new(&g.name, s, strategy, &mut templates)).collect();
        Self { graph, stages, sharded, kinds, templates }
    }
}

impl Context {
    fn new(model: &Model, strategy: &Strategy) -> Result<Self, Problems> {
        let Layers { graph, stages, sharded, kinds, templates } = Layers::new(model, strategy);
        let pp = u16::try_from(strategy.pp).expect("checked");
        let order = order(strategy, pp)?;
        Ok(Self {
            strategy: strategy.clone(),
            mesh: strategy.mesh(),
            stages,
            graph,
            kinds,
            sharded,
            order,
            groups: Vec::new(),
            templates,
        })
    }

    /// Id of a group, declared on first use.
    fn group(&mut self, kind: GroupKind) -> GroupId {
        let at = self.groups.iter().position(|&known| known == kind);
        GroupId::from(at.unwrap_or_else(|| {
            self.groups.push(kind);
            self.groups.len() - 1
        }))
    }

    /// Id of a template, declared on first use.
    fn template(&mut self, template: Template) -> u32 {
        let at = self.templates.iter().rposition(|known| *known == template);
        at.unwrap_or_else(|| {
            self.templates.push(template);
            self.templates.len() - 1
        }) as u32
    }

    /// Group among which the update of a bucket is sharded, if it is; `holders` hold the same
    /// parameters.
    fn update_group(&self, holders: GroupKind) -> Option<GroupKind> {
        match (self.strategy.sync, self.strategy.zero) {
            (Sync::Servers(_) | Sync::Async { .. }, _) => Some(GroupKind::Servers),
            (Sync::AllReduce, Zero::None) | (Sync::Hogwild, _) => None,
            (Sync::AllReduce, Zero::Optimizer | Zero::Gradients | Zero::Parameters) => {
                (self.mesh.group_size(holders) > 1).then_some(holders)
            }
        }
    }

    fn deal(&self) -> bucket::Deal<'_> {
        // Block-encoded gradients are summed by shards.
        let by_block = self.strategy.compress.codec().and_then(Codec::words_per_block).is_some();
        let parts = |holders: GroupKind| match self.update_group(holders) {
            Some(group) => u64::from(self.mesh.group_size(group)),
            None if by_block => u64::from(self.mesh.group_size(holders)),
            None => 1,
        };
        bucket::Deal {
            graph: &self.graph,
            sharded: &self.sharded,
            strategy: &self.strategy,
            parts: parts(GroupKind::Replicas),
            expert_parts: parts(EXPERT_REPLICAS),
            before: bucket::params_before(&self.graph),
        }
    }
}

impl Kind {
    fn new(
        name: &str,
        layer: &ShardedLayer,
        strategy: &Strategy,
        templates: &mut Vec<Template>,
    ) -> Self {
        let ends = [layer.input, layer.output, layer.output_grad, layer.input_grad];
        let mut kept: Vec<_> = ends.into_iter().flatten().chain(layer.saved.clone()).collect();
        kept.extend(layer.halves.iter().flat_map(|halves| &halves.late));
        // The loss and the dropped-token count have their own buffers; aliases of a kept value are
        // kept with it.
        kept.extend((0..layer.values.len()).filter(|&v| layer.values[v].class.adds_up()));
        let mut kind = Self::default();
        for &pass in strategy.schedule.passes() {
            let parts = parts(layer, pass);
            let steps = segment::cut(name, &parts, layer, strategy, templates);
            let items: Vec<&[Item]> = parts.iter().map(|&(_, items)| items).collect();
            kind.walks[pass as usize] =
                Walk { steps, scratch: segment::scratch(&items, layer, &kept) };
        }
        kind
    }
}

/// Items of a pass.
fn parts(layer: &ShardedLayer, pass: Pass) -> Vec<(ComputePass, &[Item])> {
    let half =
        |of: fn(&split_backward::Halves) -> &[Item]| layer.halves.as_ref().map_or(&[][..], of);
    let recomputed = (ComputePass::Recompute, &layer.recompute[..]);
    let items = match pass {
        Pass::Forward => &layer.forward,
        Pass::Backward => &layer.backward,
        Pass::BackwardInput => half(|h| &h.input),
        Pass::BackwardWeight => half(|h| &h.weight),
    };
    let own = (ComputePass::from(pass), items);
    match pass {
        Pass::Forward | Pass::BackwardWeight => vec![own],
        Pass::Backward | Pass::BackwardInput => vec![recomputed, own],
    }
}

/// Method of a call until the fabric decides it.
const UNDECIDED: Method = Method::Steps(Algorithm::Auto);
/// The tensor-parallel group.
const TENSOR: GroupKind = GroupKind::Axis(Axis::Tp);
/// The ranks that hold the same experts.
const EXPERT_REPLICAS: GroupKind = GroupKind::Axis(Axis::Edp);
