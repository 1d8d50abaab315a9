//! A prediction as JSON.

use crate::estimate::{EnergyEstimate, Estimate, FailureEstimate};
use crate::output::Subject;
use paceline_plan::staleness::Staleness;
use paceline_plan::units::Bytes;
use paceline_sim::network::PhaseLatency;
use paceline_sim::training::TrainingCost;
use paceline_sim::{
    Details, DimensionUse, ExchangeStat, LayerStat, MemoryCurve, OpStat, Outcome, PathPart,
    RankGroup, Slowest,
};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The specified fields, and further results of a simulation.
#[derive(Serialize)]
pub(super) struct Record<'a> {
    #[serde(flatten)]
    subject: Subject,
    iteration_s: f64,
    /// Time of an iteration of the compression warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    warmup_iteration_s: Option<f64>,
    /// Factors on `iteration_s`.
    error_band: [f64; 2],
    /// Number of measured runs of this kind that the band follows from.
    error_band_runs: u32,
    compute_s: f64,
    communication_s: f64,
    exposed_communication_s: f64,
    bubble_fraction: f64,
    peak_bytes: u64,
    /// The same if uneven routing enlarges the buffers of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes_at_most: Option<u64>,
    /// Memory that the profile's software needs, and what it leaves free.
    needed_bytes: u64,
    headroom_bytes: u64,
    fits: bool,
    mfu: f64,
    mfu_full_attention: f64,
    tokens_per_s_per_device: f64,
    /// Updates that gradients miss, with asynchronous servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    staleness: Option<Staleness>,
    /// The rank that determines the iteration time.
    slowest: &'a Slowest,
    ops: Vec<Op<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rank_groups: Vec<Unequal<'a>>,
    #[serde(flatten)]
    details: Option<DetailsRecord<'a>>,
    #[serde(flatten)]
    energy: Option<EnergyRecord>,
    #[serde(skip_serializing_if = "Option::is_none")]
    training: Option<Training>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failures: Option<Failures>,
}

impl<'a> Record<'a> {
    /// Builds the record; `curves` adds the roles' memory over time, a long list.
    pub(super) fn new(
        subject: Subject,
        (outcome, at_most): (&'a Outcome, Option<Bytes>),
        estimate: &Estimate,
        curves: bool,
    ) -> Self {
        Self {
            subject,
            iteration_s: outcome.iteration.0,
            warmup_iteration_s: outcome.warm_up.map(|warm_up| warm_up.0),
            error_band: [outcome.error_band.low, outcome.error_band.high],
            error_band_runs: outcome.error_band.runs,
            compute_s: outcome.compute.0,
            communication_s: outcome.communication.0,
            exposed_communication_s: outcome.exposed_communication.0,
            bubble_fraction: outcome.bubble_fraction,
            peak_bytes: outcome.peak_bytes.0,
            peak_bytes_at_most: at_most.map(|bytes| bytes.0),
            needed_bytes: outcome.fit.needed.0,
            headroom_bytes: outcome.fit.headroom.0,
            fits: outcome.fit.fits,
            mfu: outcome.mfu,
            mfu_full_attention: outcome.mfu_full_attention,
            tokens_per_s_per_device: outcome.tokens_per_s_per_device,
            staleness: outcome.staleness,
            slowest: &outcome.slowest,
            ops: outcome.ops.iter().map(Op::from).collect(),
            rank_groups: outcome.rank_groups.iter().map(Unequal::from).collect(),
            details: outcome.details.as_ref().map(|details| DetailsRecord::new(details, curves)),
            energy: estimate.energy.as_ref().map(EnergyRecord::from),
            training: estimate.cost.as_ref().map(|cost| Training::new(cost, estimate)),
            failures: estimate.failures.as_ref().map(Failures::from),
        }
    }
}

#[derive(Serialize)]
struct Op<'a> {
    name: &'a str,
    count: u64,
    time_s: f64,
    exposed_s: f64,
}

impl<'a> From<&'a OpStat> for Op<'a> {
    fn from(op: &'a OpStat) -> Self {
        Self { name: &op.name, count: op.count, time_s: op.time.0, exposed_s: op.exposed.0 }
    }
}

/// Ranks of one role that differ from the others.
#[derive(Serialize)]
struct Unequal<'a> {
    role: &'a str,
    ranks: u32,
    #[serde(flatten)]
    slowest: &'a Slowest,
    compute_s: f64,
    exposed_s: f64,
    idle_s: f64,
}

impl<'a> From<&'a RankGroup> for Unequal<'a> {
    fn from(unequal: &'a RankGroup) -> Self {
        let RankGroup { role, ranks, slowest, compute, exposed, idle } = unequal;
        let (compute_s, exposed_s, idle_s) = (compute.0, exposed.0, idle.0);
        Self { role, ranks: *ranks, slowest, compute_s, exposed_s, idle_s }
    }
}

#[derive(Serialize)]
struct DetailsRecord<'a> {
    critical_path: Path<'a>,
    limits: Limits,
    bandwidth: Vec<Dimension<'a>>,
    layers: Vec<Layer<'a>>,
    exchanges: Vec<Exchange<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_over_time: Option<Vec<Curve<'a>>>,
}

impl<'a> DetailsRecord<'a> {
    fn new(details: &'a Details, curves: bool) -> Self {
        let limits = details.limits;
        Self {
            critical_path: Path(&details.critical_path.parts),
            limits: Limits {
                no_network_s: limits.no_network.0,
                no_compute_s: limits.no_compute.0,
                no_bubble_s: limits.no_bubble.0,
                homogeneous_s: limits.homogeneous.map(|even| even.0),
            },
            bandwidth: details.bandwidth.iter().map(Dimension::from).collect(),
            layers: details.layers.iter().map(Layer::from).collect(),
            exchanges: details.exchanges.iter().map(Exchange::from).collect(),
            memory_over_time: curves.then(|| details.memory.iter().map(Curve::from).collect()),
        }
    }
}

/// Seconds of the critical path by kind, longest first; they sum to the iteration time.
struct Path<'a>(&'a [PathPart]);

impl Serialize for Path<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for part in self.0 {
            map.serialize_entry(&part.name, &part.time.0)?;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct Limits {
    no_network_s: f64,
    no_compute_s: f64,
    no_bubble_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    homogeneous_s: Option<f64>,
}

#[derive(Serialize)]
struct Dimension<'a> {
    dimension: &'a str,
    utilisation: f64,
    bytes_per_device: f64,
    messages_per_device: f64,
    message_s: f64,
}

impl<'a> From<&'a DimensionUse> for Dimension<'a> {
    fn from(used: &'a DimensionUse) -> Self {
        Self {
            dimension: &used.dimension,
            utilisation: used.utilisation,
            bytes_per_device: used.bytes_per_device,
            messages_per_device: used.messages_per_device,
            message_s: used.message.0,
        }
    }
}

/// Times of one layer.
#[derive(Serialize)]
struct Layer<'a> {
    name: &'a str,
    role: &'a str,
    forward_s: f64,
    recompute_s: f64,
    input_gradient_s: f64,
    weight_gradient_s: f64,
    communication_s: f64,
    exposed_s: f64,
}

impl<'a> From<&'a LayerStat> for Layer<'a> {
    fn from(layer: &'a LayerStat) -> Self {
        Self {
            name: &layer.name,
            role: &layer.role,
            forward_s: layer.forward.0,
            recompute_s: layer.recompute.0,
            input_gradient_s: layer.input_gradient.0,
            weight_gradient_s: layer.weight_gradient.0,
            communication_s: layer.communication.0,
            exposed_s: layer.exposed.0,
        }
    }
}

/// Exchanges of one name.
#[derive(Serialize)]
struct Exchange<'a> {
    name: &'a str,
    role: &'a str,
    count: u64,
    bytes: u64,
    time_s: f64,
    exposed_s: f64,
    phases: &'a [PhaseLatency],
}

impl<'a> From<&'a ExchangeStat> for Exchange<'a> {
    fn from(exchange: &'a ExchangeStat) -> Self {
        Self {
            name: &exchange.name,
            role: &exchange.role,
            count: exchange.count,
            bytes: exchange.bytes.0,
            time_s: exchange.time.0,
            exposed_s: exchange.exposed.0,
            phases: &exchange.phases,
        }
    }
}

#[derive(Serialize)]
struct Curve<'a> {
    role: &'a str,
    planned_bytes: u64,
    persistent_bytes: u64,
    /// Pairs of a time and the bytes in use from then on.
    points: Vec<(f64, u64)>,
}

impl<'a> From<&'a MemoryCurve> for Curve<'a> {
    fn from(curve: &'a MemoryCurve) -> Self {
        Self {
            role: &curve.role,
            planned_bytes: curve.planned.0,
            persistent_bytes: curve.persistent.0,
            points: curve.points.iter().map(|point| (point.at.0, point.bytes.0)).collect(),
        }
    }
}

/// Energy of an iteration.
#[derive(Serialize)]
struct EnergyRecord {
    energy_j: f64,
    mean_power_w: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    co2_g: Option<f64>,
}

impl From<&EnergyEstimate> for EnergyRecord {
    fn from(energy: &EnergyEstimate) -> Self {
        Self { energy_j: energy.joules, mean_power_w: energy.watts, co2_g: energy.co2_g }
    }
}

#[derive(Serialize)]
struct Training {
    tokens: u64,
    iterations: u64,
    wall_s: f64,
    device_hours: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    energy_kwh: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    co2_kg: Option<f64>,
}

impl Training {
    fn new(cost: &TrainingCost, estimate: &Estimate) -> Self {
        let energy = estimate.energy;
        Self {
            energy_kwh: energy.and_then(|energy| energy.run_kwh),
            co2_kg: energy.and_then(|energy| energy.run_co2_kg),
            tokens: cost.tokens,
            iterations: cost.iterations,
            wall_s: cost.wall.0,
            device_hours: cost.device_hours,
            cost: cost.cost,
        }
    }
}

#[derive(Serialize)]
struct Failures {
    mtbf_s: f64,
    checkpoint_every: u64,
    checkpoint_interval_s: f64,
    goodput: f64,
    best_checkpoint_every: u64,
    best_interval_s: f64,
    best_goodput: f64,
}

impl From<&FailureEstimate> for Failures {
    fn from(estimate: &FailureEstimate) -> Self {
        Self {
            mtbf_s: estimate.mtbf.0,
            checkpoint_every: estimate.every,
            checkpoint_interval_s: estimate.chosen.interval.0,
            goodput: estimate.chosen.goodput,
            best_checkpoint_every: estimate.best_every,
            best_interval_s: estimate.best_interval.0,
            best_goodput: estimate.best.goodput,
        }
    }
}
