//! Prices of what plans are made of: segments, collectives, messages and optimizer steps, each
//! alone.
//!
//! The engine times the ops of a plan by them, and a search bounds plans that it does not lower.

use crate::cluster::Cluster;
use crate::compute::{Roofline, StateSizes};
use crate::engine::interference;
use crate::network::{CostModel, NoPath, Vector, measured_transport, of_library};
use crate::profile::Profile;
use crate::{NetworkKind, Options};
use paceline_plan::DType;
use paceline_plan::collective::{
    self as native, Algorithm, Ask, CollectiveKind, Fabric, Method, Pattern, SummationOrder,
};
use paceline_plan::graph::{CostClass, Product};
use paceline_plan::ids::Rank;
use paceline_plan::mesh::{Axis, GroupKind, Mesh};
use paceline_plan::program::{StepPhase, Template};
use paceline_plan::strategy::{Strategy, Zero};
use paceline_plan::units::{Bytes, Seconds};
use std::collections::BTreeMap;

/// Time of a collective by its method.
pub(crate) fn collective(
    network: &dyn CostModel,
    method: Method,
    pattern: &Pattern,
    members: &[Rank],
    vector: &Vector,
) -> Result<Seconds, NoPath> {
    match method {
        Method::Steps(_) => network.collective(pattern, members, vector),
        Method::Library { library, forced } => {
            network.native((library, forced), pattern, members, vector)
        }
    }
}

/// Ends of a message.
pub(crate) struct Route {
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    /// Ranks that may receive a slice each; empty if the message cannot be sliced.
    pub(crate) receivers: Vec<Rank>,
}

/// Returns true if tensor-parallel ranks hold equal messages between stages, and the software
/// slices them.
pub(crate) fn slices(profile: &Profile, mesh: &Mesh, sp: bool) -> bool {
    profile.p2p_scatter_gather && mesh.tp > 1 && !sp
}

/// Time of a message, sliced if that is faster, which it is not inside a host.
pub(crate) fn message(
    network: &dyn CostModel,
    route: &Route,
    bytes: Bytes,
) -> Result<Seconds, NoPath> {
    let whole = network.message(route.from, route.to, bytes)?;
    let sliced = sliced(network, route, bytes)?;
    Ok(sliced.filter(|sliced| sliced.0 < whole.0).unwrap_or(whole))
}

/// Time of a message that is split among the tensor-parallel ranks and gathered again; `None` if
/// that is not possible.
pub(crate) fn sliced(
    network: &dyn CostModel,
    route: &Route,
    bytes: Bytes,
) -> Result<Option<Seconds>, NoPath> {
    let ranks = u32::try_from(route.receivers.len()).unwrap_or(u32::MAX);
    if ranks == 0 {
        return Ok(None);
    }
    let part = network.message(route.from, route.to, bytes / u64::from(ranks))?;
    let (kind, ring) = (CollectiveKind::AllGather, Algorithm::Ring);
    let Ok(pattern) = Pattern::new(kind, ring, SummationOrder::Free, ranks, 0) else {
        return Ok(None);
    };
    let by = (native::Library::Nccl, Some(ring));
    let gather = network.native(by, &pattern, &route.receivers, &Vector::of_bytes(bytes))?;
    Ok(Some(part + gather))
}

/// A collective of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The group.
    pub group: GroupKind,
    /// Kind of collective.
    pub kind: CollectiveKind,
    /// Elements of the whole vector.
    pub elements: u64,
    /// Type of the elements.
    pub dtype: DType,
    /// Granularity of parts, in elements.
    pub block: u64,
}

type CallKey = ((u32, u32, u32), (u8, Algorithm), (u64, u64, u64), (bool, bool));

/// Prices on one cluster, each computed once.
pub struct Prices<'a> {
    cluster: &'a Cluster,
    profile: Profile,
    fabric: Fabric,
    network: Box<dyn CostModel + 'a>,
    calls: BTreeMap<CallKey, f64>,
    messages: BTreeMap<(u32, u32, u32, u64), f64>,
}

impl<'a> Prices<'a> {
    /// Prices on a cluster whose ops take the same time whatever else runs: equal devices that were
    /// not measured, links that do not change and that the analytic network does not share; `None`
    /// on others.
    pub fn new(cluster: &'a Cluster, options: &Options) -> Option<Self> {
        let alone = options.network == NetworkKind::Analytic
            && cluster.is_homogeneous()
            && cluster.measured.is_none()
            && measured_transport(cluster).is_none();
        alone.then(|| Self {
            cluster,
            profile: options.profile,
            fabric: cluster.fabric_with(&options.profile),
            network: of_library(options.profile.library, cluster),
            calls: BTreeMap::new(),
            messages: BTreeMap::new(),
        })
    }

    fn roofline(&self, strategy: &Strategy) -> Roofline<'_> {
        let (dtype, microbatches) = (strategy.dtype, strategy.microbatches());
        Roofline::new(&self.cluster.device, &self.profile, dtype, microbatches)
    }

    /// Time of one run of a template, without concurrent communication.
    pub fn template(&self, template: &Template, strategy: &Strategy) -> f64 {
        self.roofline(strategy).template(template).0
    }

    /// Factor on compute of the slowest of all ranks.
    pub fn slowest(&self, ranks: u32) -> f64 {
        let ranks = if self.cluster.device.is_accelerator() { ranks } else { 1 };
        interference::slowest(ranks)
    }

    /// Compute time that an exchange among replicas takes by its memory traffic, if it overlaps.
    pub fn stolen(&self, exchange: &Exchange, strategy: &Strategy) -> f64 {
        let bytes = Bytes(exchange.elements * exchange.dtype.size());
        let moved = (exchange.group, exchange.kind, bytes);
        let bytes = interference::bytes_moved(moved, strategy.zero, &self.profile);
        self.roofline(strategy).stolen(bytes).0
    }

    /// Time of a collective of the group of `rank`, as the plan would run it; infinite if the
    /// cluster cannot.
    pub fn collective(&mut self, exchange: &Exchange, strategy: &Strategy, rank: Rank) -> f64 {
        let mesh = strategy.mesh();
        let ranks = mesh.group_size(exchange.group);
        if ranks < 2 {
            return 0.0;
        }
        let wide = exchange.group == GroupKind::Replicas;
        let algorithm = if wide { strategy.collective } else { Algorithm::Auto };
        let order = if exchange.kind.reduces() { strategy.order } else { SummationOrder::Free };
        // Groups that lie evenly are known by where they begin.
        let key: Option<CallKey> = mesh.spacing(exchange.group, rank).map(|(first, stride)| {
            (
                (first.0, stride, ranks),
                (exchange.kind as u8, algorithm),
                (exchange.elements, exchange.dtype.size(), exchange.block),
                (exchange.group == GroupKind::Axis(Axis::Tp), strategy.micro_batch > 1),
            )
        });
        if let Some(&known) = key.and_then(|key| self.calls.get(&key)) {
            return known;
        }
        let members = mesh.members(exchange.group, rank);
        let element = Bytes(exchange.dtype.size());
        let Exchange { kind, elements, block, .. } = *exchange;
        let ask =
            Ask { kind, algorithm, order, elements, element, dtype: Some(exchange.dtype), block };
        let method = self.fabric.method(&mesh, exchange.group, &ask);
        let vector = Vector { elements, element, block };
        let alone = (method.pattern(kind, order, ranks, 0).ok()).and_then(|pattern| {
            collective(self.network.as_ref(), method, &pattern, &members, &vector).ok()
        });
        let what = (exchange.group, kind, Bytes(elements * element.0));
        let roofline = self.roofline(strategy);
        let exposure = interference::exposure(what, strategy.micro_batch, &self.profile, &roofline);
        let time = alone.map_or(f64::INFINITY, |alone| exposure.of(alone).0);
        if let Some(key) = key {
            self.calls.insert(key, time);
        }
        time
    }

    /// Time of a message between ranks of two stages; infinite without a path.
    pub fn message(&mut self, strategy: &Strategy, from: Rank, to: Rank, bytes: Bytes) -> f64 {
        let mesh = strategy.mesh();
        let stage = |rank| mesh.coordinates(rank).map(|at| at.pp);
        let slices = slices(&self.profile, &mesh, strategy.sp) && stage(from) != stage(to);
        let key = (from.0, to.0, if slices { mesh.tp } else { 1 }, bytes.0);
        if let Some(&known) = self.messages.get(&key) {
            return known;
        }
        let receivers =
            if slices { mesh.members(GroupKind::Axis(Axis::Tp), to) } else { Vec::new() };
        let route = Route { from, to, receivers };
        let time = message(self.network.as_ref(), &route, bytes).map_or(f64::INFINITY, |t| t.0);
        self.messages.insert(key, time);
        time
    }

    /// Time of the optimizer step on `elements` elements of one rank.
    pub fn update(&self, elements: u64, strategy: &Strategy) -> f64 {
        let params = strategy.activation_dtype().size() as f64;
        let state = StateSizes {
            grads: strategy.grad_dtype.size() as f64,
            params,
            master: (params < 4.0).then_some(4.0),
            moments: 4.0 * strategy.optimizer.moments() as f64,
        };
        let norms = strategy.optimizer.needs_tensor_norms();
        self.roofline(strategy).update(elements, &state, StepPhase::Apply, norms).0
    }

    /// Time of a copy to or from the offload store.
    pub fn offload(&self, strategy: &Strategy, bytes: Bytes) -> f64 {
        self.roofline(strategy).offload(strategy.store, bytes).0
    }

    /// Least time of the experts' GEMMs of a template; `None` if it has none.
    pub fn experts(&self, template: &Template, strategy: &Strategy) -> Option<f64> {
        let experts = template.ops.iter().filter(|op| {
            matches!(op.kind.cost_class(), CostClass::Product(Product::Grouped { .. }))
        });
        let flops: Vec<f64> = experts.map(|op| template.cost(op).matrix.0).collect();
        let rate = self.cluster.device.sustained(strategy.dtype).0;
        (!flops.is_empty()).then(|| flops.iter().sum::<f64>() / rate)
    }

    /// The cluster.
    pub const fn cluster(&self) -> &'a Cluster {
        self.cluster
    }

    /// The software.
    pub const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Returns true if gathered weights under ZeRO-1 and 2 may run into the next iteration.
    pub fn gathers_late(&self, strategy: &Strategy) -> bool {
        let sharded = matches!(strategy.zero, Zero::Optimizer | Zero::Gradients);
        self.profile.overlap_param_gather && strategy.overlap && sharded
    }
}
