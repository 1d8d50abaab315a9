//! From a model and a strategy to programs.
//!
//! ```text
//! check ─► graph ─► shard (specs, conversions) ─► segment ─► partition into stages
//!                                                                  │
//!                            one role per pipeline rank and server ◄┘ (role, update, server)
//! ```
//!
//! Every collective comes from the conversion table; every address from `arena`.

mod again;
mod apart;
mod arena;
mod bind;
mod bucket;
mod check;
mod check_experts;
mod check_replicas;
mod compress;
mod dropped;
mod experts;
mod gauge;
mod hogwild;
mod local;
mod norm;
mod offload;
mod partition;
mod ring;
mod role;
mod rotating;
mod segment;
mod serve;
mod server;
mod shard;
mod split;
mod tables;
mod tied;
mod update;
mod versions;

pub use check::{Problem, Problems};
pub use partition::balance;
pub use tables::{Seat, assign, slots};

use crate::compress::Codec;
use crate::graph::{self, Graph};
use crate::ids::GroupId;
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::model::Model;
use crate::program::{Plan, SegmentPass, Template};
use crate::schedule::{self, Action, Pass};
use crate::strategy::{Strategy, Sync, Zero};
use segment::{LayerPass, Scratch};
use shard::{Item, ShardedLayer};
use std::ops::Range;

/// Plans a model under a strategy, or says everything that is wrong with the request.
pub fn lower(model: &Model, strategy: &Strategy) -> Result<Plan, Problems> {
    check::check(model, strategy)?;
    let mut context = Context::new(model, strategy)?;
    let mut programs = Vec::new();
    for rank in 0..strategy.pp {
        programs.push(role::program(&mut context, rank));
    }
    for server in 0..strategy.sync.servers() {
        programs.push(match strategy.sync {
            Sync::Async { staleness, .. } => serve::program(&mut context, server, staleness),
            Sync::Servers(_) | Sync::AllReduce | Sync::Hogwild => {
                server::program(&mut context, server)
            }
        });
    }
    Ok(Plan {
        model: model.name().to_string(),
        strategy: strategy.clone(),
        mesh: context.mesh,
        groups: context.groups,
        templates: context.templates,
        programs,
        layers: context.graph.layers.iter().map(|l| l.name.clone()).collect(),
        parameters: model.parameters(),
        norm_entries: bucket::norm_entries(&context.graph),
    })
}

/// What all roles share.
struct Context {
    strategy: Strategy,
    mesh: Mesh,
    graph: Graph,
    /// By layer kind.
    kinds: Vec<Kind>,
    sharded: Vec<ShardedLayer>,
    /// Layers by virtual stage.
    stages: Vec<Range<usize>>,
    /// Actions by pipeline rank.
    order: Vec<Vec<Action>>,
    groups: Vec<GroupKind>,
    templates: Vec<Template>,
}

/// The passes over a layer of one kind, by [`Pass`]; those that the schedule does not run are empty.
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

impl Context {
    fn new(model: &Model, strategy: &Strategy) -> Result<Self, Problems> {
        let batch = strategy.micro_batch * u64::from(strategy.dp);
        let mut graph = graph::build(model, batch, strategy.seq, strategy.tokens_of_update());
        let stages = usize::from(strategy.schedule.chunks()) * strategy.pp as usize;
        let stages = partition::partition(&graph, stages, &strategy.split);
        let like = again::tell_apart(&mut graph, &stages, strategy.recompute);
        let mut templates = Vec::new();
        let sharded: Vec<ShardedLayer> = (graph.kinds.iter().zip(&like))
            .map(|(kind, &like)| shard::shard(&graph, kind, strategy, like))
            .collect();
        let named = graph.kinds.iter().zip(&sharded);
        let kinds = named.map(|(g, s)| Kind::new(&g.name, s, strategy, &mut templates)).collect();
        let pp = u16::try_from(strategy.pp).expect("checked");
        let order = schedule::order(strategy.schedule, pp, strategy.microbatches())
            .map_err(|e| Problems::one("--schedule", e.to_string()))?;
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

    /// The id of a group, declared on first use.
    fn group(&mut self, kind: GroupKind) -> GroupId {
        let at = self.groups.iter().position(|&known| known == kind);
        GroupId::from(at.unwrap_or_else(|| {
            self.groups.push(kind);
            self.groups.len() - 1
        }))
    }

    /// The id of a template, declared on first use.
    fn template(&mut self, template: Template) -> u32 {
        let at = self.templates.iter().rposition(|known| *known == template);
        at.unwrap_or_else(|| {
            self.templates.push(template);
            self.templates.len() - 1
        }) as u32
    }

    /// Into how many parts the update of a bucket is dealt out, and among whom, given who holds the same
    /// of it.
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
        // What is encoded by block is summed by parts.
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
        // The loss and the count of dropped tokens have buffers of their own; what is aliased to something kept is kept with it.
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

/// What a pass consists of.
fn parts(layer: &ShardedLayer, pass: Pass) -> Vec<(SegmentPass, &[Item])> {
    let half = |of: fn(&split::Halves) -> &[Item]| layer.halves.as_ref().map_or(&[][..], of);
    let again = (SegmentPass::Recompute, &layer.recompute[..]);
    match pass {
        Pass::Forward => vec![(SegmentPass::Forward, &layer.forward)],
        Pass::Backward => vec![again, (SegmentPass::Backward, &layer.backward)],
        Pass::BackwardInput => vec![again, (SegmentPass::BackwardInput, half(|h| &h.input))],
        Pass::BackwardWeight => vec![(SegmentPass::BackwardWeight, half(|h| &h.weight))],
    }
}

/// The tensor-parallel group.
const TENSOR: GroupKind = GroupKind::Axis(Axis::Tp);
/// The ranks that hold the same experts.
const EXPERT_REPLICAS: GroupKind = GroupKind::Axis(Axis::Edp);
