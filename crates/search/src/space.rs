//! The space of strategies: which values each axis has, given the axes before it, and how many
//! strategies there are.

use crate::Request;
use paceline_plan::collective::{Algorithm, CollectiveKind, resolve};
use paceline_plan::model::{Body, ModelKind};
use paceline_plan::schedule::{self, ScheduleKind};
use paceline_plan::strategy::{Offload, Recompute, Split, Store, Strategy, Zero};
use paceline_plan::units::Bytes;

/// Degrees of parallelism of the dense layers, and the microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mesh {
    pub(crate) tp: u32,
    pub(crate) cp: u32,
    pub(crate) pp: u32,
    pub(crate) dp: u32,
    pub(crate) micro_batch: u64,
}

/// Bucket sizes that are tried; the last one holds everything.
const BUCKETS: [Bytes; 4] = [Bytes(25 << 20), Bytes(100 << 20), Bytes(400 << 20), Bytes(1 << 50)];

/// Collectives that are tried for gradients.
pub(crate) const METHODS: [Algorithm; 4] =
    [Algorithm::Auto, Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::Tree];

/// Maximum number of ops of one role's program that the planner accepts.
const MAX_OPS: u64 = 1 << 24;

/// The space of a request.
pub(crate) struct Space<'a> {
    request: &'a Request<'a>,
    /// Layers that stages are made of.
    units: u64,
}

impl<'a> Space<'a> {
    pub(crate) fn new(request: &'a Request<'a>) -> Self {
        Self { request, units: request.model.layers + 2 }
    }

    /// Returns true if the model has experts.
    pub(crate) fn moe(&self) -> bool {
        !self.request.model.experts.is_none()
    }

    /// All meshes with their microbatches.
    pub(crate) fn meshes(&self) -> Vec<Mesh> {
        let (pins, base) = (&self.request.pins, &self.request.base);
        let devices = self.request.devices.max(1);
        let mut all = Vec::new();
        for tp in divisors(devices).into_iter().filter(|tp| pins.tp.admits(tp)) {
            if !self.tensor_fits(tp) {
                continue;
            }
            for cp in divisors(devices / tp).into_iter().filter(|cp| pins.cp.admits(cp)) {
                if !self.context_fits(cp) {
                    continue;
                }
                for pp in divisors(devices / tp / cp).into_iter().filter(|pp| pins.pp.admits(pp)) {
                    let dp = devices / tp / cp / pp;
                    let per_replica = base.global_batch / u64::from(dp);
                    if !self.stages_fit(pp)
                        || !pins.dp.admits(&dp)
                        || !base.global_batch.is_multiple_of(u64::from(dp))
                    {
                        continue;
                    }
                    let batches = divisors_of(per_replica).into_iter();
                    let batches = batches.filter(|batch| pins.micro_batch.admits(batch));
                    all.extend(batches.map(|micro_batch| Mesh { tp, cp, pp, dp, micro_batch }));
                }
            }
        }
        all
    }

    fn tensor_fits(&self, tp: u32) -> bool {
        let (model, tp) = (self.request.model, u64::from(tp));
        if matches!(model.body(), Body::Images(_) | Body::Clicks(_)) {
            return tp == 1;
        }
        if let Body::Network(net) = model.body() {
            return net.undivided(tp).is_none();
        }
        let heads = model.kind == ModelKind::Mlp || model.kv_heads.is_multiple_of(tp);
        heads && model.shared_widths().iter().all(|width| width.is_multiple_of(tp))
    }

    fn context_fits(&self, cp: u32) -> bool {
        let (model, seq) = (self.request.model, self.request.base.seq);
        let sequences =
            !matches!(model.body(), Body::Images(_) | Body::Clicks(_) | Body::Network(_))
                && model.kind != ModelKind::Mlp
                && !model.depends_on_distance(seq);
        cp == 1 || sequences && cp <= 1 << 12 && seq.is_multiple_of(2 * u64::from(cp))
    }

    fn stages_fit(&self, pp: u32) -> bool {
        let clicks = matches!(self.request.model.body(), Body::Clicks(_));
        u64::from(pp) <= self.units && pp <= u32::from(u16::MAX) / 2 && (pp == 1 || !clicks)
    }

    /// Degrees of expert parallelism: ep and etp.
    pub(crate) fn experts(&self, mesh: &Mesh) -> Vec<(u32, u32)> {
        let pins = &self.request.pins;
        if !self.moe() {
            let none = pins.ep.admits(&1) && pins.etp.admits(&1);
            return none.then_some((1, 1)).into_iter().collect();
        }
        let (model, ranks) = (self.request.model, mesh.dp * mesh.cp * mesh.tp);
        let experts =
            |ep: &u32| pins.ep.admits(ep) && model.experts.experts.is_multiple_of(u64::from(*ep));
        let mut all = Vec::new();
        for ep in divisors(ranks).into_iter().filter(experts) {
            let cut = |etp: &u32| pins.etp.admits(etp) && model.ffn.is_multiple_of(u64::from(*etp));
            all.extend(divisors(ranks / ep).into_iter().filter(cut).map(|etp| (ep, etp)));
        }
        all
    }

    /// Settings of sequence parallelism.
    pub(crate) fn sequence(&self, mesh: &Mesh) -> Vec<bool> {
        let pins = &self.request.pins;
        let tokens = mesh.micro_batch * self.request.base.seq / u64::from(mesh.cp);
        let described = matches!(self.request.model.body(), Body::Network(_));
        let can = mesh.tp > 1 && !described && tokens.is_multiple_of(u64::from(mesh.tp));
        let must = mesh.tp > 1 && self.moe();
        let legal = [false, true].into_iter().filter(|&sp| if sp { can } else { !must });
        legal.filter(|sp| pins.sp.admits(sp)).collect()
    }

    /// Recomputation modes that treat all stages alike; `full:N` is refined in each layout.
    pub(crate) fn recomputes(&self) -> Vec<Recompute> {
        use Recompute::{Full, FullOf, None, Selective, SelectiveOp};
        self.request.pins.recompute.of([None, Selective, SelectiveOp, FullOf(1), Full])
    }

    /// Numbers of recomputed layers per stage that a layout may choose among.
    pub(crate) fn recomputed_layers(&self, strategy: &Strategy) -> u16 {
        match strategy.recompute {
            Recompute::FullOf(_) if self.request.pins.recompute.only.is_none() => {
                let stages = u64::from(strategy.pp) * u64::from(strategy.schedule.chunks());
                let layers = self.request.model.layers.div_ceil(stages).saturating_sub(1);
                u16::try_from(layers).unwrap_or(u16::MAX)
            }
            _ => 1,
        }
    }

    /// Schedules that run on a mesh.
    pub(crate) fn schedules(&self, mesh: &Mesh) -> Vec<ScheduleKind> {
        let microbatches = self.microbatches(mesh);
        let usual = if mesh.pp == 1 {
            vec![ScheduleKind::OneFOneB]
        } else {
            let most = (self.units / u64::from(mesh.pp)).min(u16::MAX.into()) as u16;
            let interleaved = (2..=most).map(|chunks| ScheduleKind::Interleaved { chunks });
            let zero_bubble = (1..=most).map(|chunks| ScheduleKind::ZbH1 { chunks });
            [ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::DualPipeV]
                .into_iter()
                .chain(interleaved)
                .chain(zero_bubble)
                .collect()
        };
        let legal = |kind: &ScheduleKind| {
            let chunks = kind.chunks();
            let stages = u64::from(mesh.pp) * u64::from(chunks);
            let shape = match kind {
                ScheduleKind::Interleaved { .. } | ScheduleKind::DualPipeV => mesh.pp > 1,
                ScheduleKind::ZbH1 { chunks } => *chunks == 1 || mesh.pp > 1,
                ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::PipeDream { .. } => {
                    true
                }
            };
            let ops = u64::from(microbatches) * (self.request.model.layers / stages.max(1) + 2);
            shape
                && stages <= self.units
                && ops * 16 <= MAX_OPS
                && schedule::check(*kind, mesh.pp as u16, microbatches).is_ok()
        };
        self.request.pins.schedule.of(usual).into_iter().filter(legal).collect()
    }

    fn microbatches(&self, mesh: &Mesh) -> u32 {
        let samples = mesh.micro_batch * u64::from(mesh.dp);
        u32::try_from(self.request.base.global_batch / samples.max(1)).unwrap_or(u32::MAX)
    }

    /// ZeRO stages. They shard nothing if every rank holds other parameters.
    pub(crate) fn zero_stages(&self, strategy: &Strategy) -> Vec<Zero> {
        let pins = &self.request.pins.zero;
        let mesh = strategy.mesh();
        let shared = mesh.replicas() > 1 || self.moe() && mesh.edp() > 1;
        let flushes = strategy.schedule.flushes();
        let all = [Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters];
        let legal = all.into_iter().take(if shared && flushes { 4 } else { 1 });
        legal.filter(|zero| pins.admits(zero)).collect()
    }

    /// Splits into stages; `Split::At` stands for equal times, which each layout computes.
    pub(crate) fn splits(&self, strategy: &Strategy) -> Vec<Split> {
        let stages = u64::from(strategy.pp) * u64::from(strategy.schedule.chunks());
        if stages == 1 && self.request.pins.split.only.is_none() {
            return self.request.pins.split.of([Split::Cost]);
        }
        self.request.pins.split.of([Split::Cost, Split::Count, EQUAL_TIMES])
    }

    /// Options that change neither stages nor memory much: bucket size, collective and overlap.
    pub(crate) fn settings(&self, strategy: &Strategy) -> Vec<Strategy> {
        let pins = &self.request.pins;
        let replicas = strategy.mesh().replicas() > 1;
        let synced = replicas || self.moe() && strategy.mesh().edp() > 1;
        // Under ZeRO-3 every layer is a bucket.
        let one = !synced || strategy.zero == Zero::Parameters;
        let buckets = pins.bucket.of(BUCKETS);
        let buckets = buckets.into_iter().take(if one { 1 } else { usize::MAX });
        let reducing = match strategy.zero {
            Zero::None => CollectiveKind::AllReduce,
            Zero::Optimizer | Zero::Gradients | Zero::Parameters => CollectiveKind::ReduceScatter,
        };
        let group = strategy.mesh().replicas();
        let methods = pins.collective.of(METHODS).into_iter();
        let methods = methods
            .filter(|&method| resolve(reducing, method, group, strategy.order).is_ok())
            .take(if replicas { usize::MAX } else { 1 });
        let methods: Vec<Algorithm> = methods.collect();
        let overlaps = pins.overlap.of([true, false]);
        let mut all = Vec::new();
        for bucket in buckets {
            for &collective in &methods {
                for &overlap in &overlaps {
                    all.push(Strategy { bucket, collective, overlap, ..strategy.clone() });
                }
            }
        }
        all
    }

    /// State that may be offloaded, and where to.
    pub(crate) fn offloads(&self, strategy: &Strategy) -> Vec<(Offload, Store)> {
        let base = &self.request.base;
        let device = &self.request.cluster.device;
        let store = [base.store, Store::Host, Store::Disk]
            .into_iter()
            .find(|&store| device.store(store).is_some());
        let splits = strategy.schedule.splits_backward();
        let legal = |offload: &Offload| match offload {
            Offload::None => true,
            Offload::Optimizer => store.is_some() && strategy.schedule.flushes(),
            Offload::Activations | Offload::All => {
                store.is_some() && strategy.schedule.flushes() && !splits
            }
        };
        let admitted = self.request.pins.offload.of(Offload::ALL).into_iter();
        admitted.filter(legal).map(|offload| (offload, store.unwrap_or(base.store))).collect()
    }

    /// Strategy of a mesh, before the choices below it.
    pub(crate) fn strategy(&self, mesh: &Mesh) -> Strategy {
        let Mesh { tp, cp, pp, dp, micro_batch } = *mesh;
        let base = &self.request.base;
        let canonical = base.order == paceline_plan::collective::SummationOrder::Canonical;
        let leaves = if canonical { dp } else { base.leaves };
        Strategy { tp, cp, pp, dp, micro_batch, leaves, ..base.clone() }
    }

    /// Number of strategies of a mesh with its microbatch and these expert degrees.
    pub(crate) fn count(&self, mesh: &Mesh, (ep, etp): (u32, u32)) -> u64 {
        let strategy = Strategy { ep, etp, ..self.strategy(mesh) };
        let sequences = self.sequence(mesh).len() as u64;
        let mut count = 0;
        let mut tails: Vec<((bool, Zero), u64)> = Vec::new();
        for schedule in self.schedules(mesh) {
            let strategy = Strategy { schedule, ..strategy.clone() };
            let splits = self.splits(&strategy).len() as u64;
            let modes: u64 = (self.recomputes().into_iter())
                .map(|recompute| {
                    let strategy = Strategy { recompute, ..strategy.clone() };
                    u64::from(self.recomputed_layers(&strategy))
                })
                .sum();
            let mut tail = 0;
            for zero in self.zero_stages(&strategy) {
                let key = (schedule.splits_backward() || !schedule.flushes(), zero);
                let known = tails.iter().find(|(known, _)| *known == key).map(|(_, count)| *count);
                tail += known.unwrap_or_else(|| {
                    let strategy = Strategy { zero, ..strategy.clone() };
                    let count =
                        (self.settings(&strategy).len() * self.offloads(&strategy).len()) as u64;
                    tails.push((key, count));
                    count
                });
            }
            count += splits * modes * tail;
        }
        count * sequences
    }
}

/// Stands for stages of equal times.
pub(crate) const EQUAL_TIMES: Split = Split::At(Vec::new());

pub(crate) fn divisors(n: u32) -> Vec<u32> {
    divisors_of(n.into()).into_iter().map(|d| d as u32).collect()
}

pub(crate) fn divisors_of(n: u64) -> Vec<u64> {
    let low: Vec<u64> = (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let high: Vec<u64> = low.iter().rev().map(|d| n / d).filter(|d| d * d > n).collect();
    low.into_iter().chain(high).collect()
}
