//! Parallelism and schedule flags, shared by `train`, `plan` and `simulate`.

use super::model::model;
use super::size::in_mib;
use super::{ClusterFlags, Problems, real, whole, word};
use crate::launch::{FOUND, RANK};
use clap::Args;
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, Fabric, Library, SummationOrder};
use paceline_plan::compress::Compression;
use paceline_plan::ids::Rank;
use paceline_plan::lower::{balance, lower, lower_on};
use paceline_plan::mesh::GroupKind;
use paceline_plan::model::Model;
use paceline_plan::outer_optimizer::LocalSgd;
use paceline_plan::program::Plan;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{
    Offload, OptimizerKind, Recompute, Split, Store, Strategy, Sync, Zero,
};
use paceline_plan::units::Bytes;
use paceline_search::{Choice, Pins};
use paceline_sim::cluster::Cluster;
use serde::Serialize;

/// Flags of a plan.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
#[command(next_help_heading = "Strategy")]
pub(crate) struct StrategyFlags {
    /// Model: a built-in name, a TOML file, or a directory with a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE|DIR")]
    pub model: Option<String>,
    /// Total ranks; --dp fills what the other axes leave [default: the product of the axes]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ranks: Option<String>,
    /// Data parallelism: number of replicas, each with a share of the batch [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub dp: Option<String>,
    /// Tensor parallelism: number of shards of every matrix [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub tp: Option<String>,
    /// Pipeline parallelism: number of pipeline ranks that the layers are split over [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub pp: Option<String>,
    /// Context parallelism: number of shards of every sequence, with ring attention [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cp: Option<String>,
    /// Expert parallelism: number of the same ranks that share each layer's experts [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ep: Option<String>,
    /// Tensor parallelism of experts: number of shards of each expert's matrices [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub etp: Option<String>,
    /// Order of the axes tp, cp, dp and pp, the innermost first: neighbouring ranks, which share a
    /// host, differ along it; those left out follow in the usual order [default: tp-cp-dp-pp]
    #[arg(long, value_name = "AXIS-…")]
    pub axis_order: Option<String>,
    /// Size of the buffer for tokens sent to another rank's experts, as a multiple of an equal
    /// share of a rank's tokens, with --ep and experts without a capacity; a run that needs more goes
    /// on with larger buffers [default: 1, 2 for train]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub expert_buffer_factor: Option<String>,
    /// Sequence parallelism: with --tp, shard activations outside the matrices along tokens
    #[arg(long)]
    pub sp: bool,
    /// Strategy from a file, a run file or an answer of `paceline search --json`, or auto: the best
    /// that a search finds on --cluster, with the flags that are given pinned; flags win over a file
    #[arg(long, value_name = "FILE|auto")]
    pub strategy: Option<String>,
    /// ZeRO stage, the state sharded over replicas: 0 nothing, 1 optimizer state, 2 also gradients,
    /// 3 also parameters [default: 0]
    #[arg(long, value_name = "0|1|2|3", allow_negative_numbers = true)]
    pub zero: Option<String>,
    /// Pipeline schedule: gpipe, 1f1b, interleaved:V with V chunks of layers per rank, zb-h1 or
    /// zb-h1:V (zero bubble), dualpipev, pipedream or pipedream:2bw (no flush) [default: 1f1b]
    #[arg(long, value_name = "KIND")]
    pub schedule: Option<String>,
    /// Samples per iteration [default: dp × micro-batch]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub global_batch: Option<String>,
    /// Samples that one replica processes at once [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub micro_batch: Option<String>,
    /// Tokens per sample [default: the model's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seq: Option<String>,
    /// Activation recomputation in the backward pass, to save memory: none, selective (attention's
    /// core), selective-op (all but attention and half of the GEMMs), full (every layer), full:N
    /// (the first N layers of each stage) or full-forward (every layer to its end, as Megatron-LM
    /// does) [default: none]
    #[arg(long, value_name = "WHAT")]
    pub recompute: Option<String>,
    /// Boundaries of pipeline stages: cost (equal cost, by counting operations), count (equal
    /// number of layers), profile (equal times on --cluster; measured, if it is a file of `paceline
    /// calibrate`) or at:L,L… (stages begin at these layers) [default: cost]
    #[arg(long, value_name = "HOW")]
    pub split: Option<String>,
    /// Compute batch-norm statistics over all replicas instead of per microbatch
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// Tables of a recommendation model held by each replica: all (replicate), some whole tables
    /// (table) or some rows of each (row) [default: auto, which is table]
    #[arg(long, value_name = "HOW")]
    pub table_sharding: Option<String>,
    /// Dtype of weights and activations: f32, bf16, f16, fp8, nvfp4 or mxfp4
    ///
    /// The default for `train` is f32, and it has no type of less than two bytes. `plan` and
    /// `simulate` default to the fastest training dtype of the device of --cluster: bf16 if it has a
    /// unit for it, else f16, else f32; bf16 without a cluster. With fp8, nvfp4 and mxfp4, linear
    /// layers cast their operands, and all else is bf16.
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Dtype of gradients, in memory and in messages: f32 or bf16 [default: f32]
    #[arg(long, value_name = "TYPE")]
    pub grad_dtype: Option<String>,
    /// Summation order: canonical (fixed: the same bits in every layout) or free (the cheapest)
    /// [default: canonical, unless --zero 2|3 would keep the whole gradients of several
    /// microbatches; free for simulate; canonical with --leaves]
    #[arg(long, value_name = "canonical|free")]
    pub order: Option<String>,
    /// Number of leaves of the canonical summation tree: equal leaves give equal bits for any --dp
    /// [default: dp]
    #[arg(long, value_name = "L", allow_negative_numbers = true)]
    pub leaves: Option<String>,
    /// Synchronisation of replicas: all-reduce; ps:K (K parameter servers); async-ps:K
    /// (asynchronous: no replica waits for another); ssp:K:S (stale synchronous: no replica is more
    /// than S iterations ahead); hogwild (threads update one shared set of weights without locks)
    /// [default: all-reduce]
    #[arg(long, value_name = "HOW")]
    pub sync: Option<String>,
    /// Algorithm of the gradient reduction
    #[arg(long, value_name = "ALGORITHM", help = collective_help())]
    pub collective: Option<String>,
    /// Minimum size of a gradient bucket, in MiB [default: 25]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub bucket_mib: Option<String>,
    /// Do not overlap communication with compute
    #[arg(long)]
    pub no_overlap: bool,
    /// Gradient compression with error feedback: int8, onebit (signs), topk:FRACTION (the largest)
    /// or powersgd:RANK (low-rank factors) [default: none]
    #[arg(long, value_name = "HOW")]
    pub compress: Option<String>,
    /// Number of first iterations in which gradients are sent uncompressed. With adamw, first
    /// moments are compressed after them instead of gradients (1-bit Adam) [default: a fifth of the
    /// run with adamw and onebit, topk or powersgd and with momentum and onebit, else 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub compress_warmup: Option<String>,
    /// Local steps of each replica per iteration, each with an equal share of its samples, before
    /// replicas synchronise their weights (local SGD, DiLoCo) [default: none: they share gradients]
    #[arg(long, value_name = "H", allow_negative_numbers = true)]
    pub local_steps: Option<String>,
    /// Outer optimizer of local SGD: average (all replicas take the mean weights) or nesterov (the
    /// mean change is a pseudo-gradient, as in DiLoCo) [default: nesterov]
    #[arg(long, value_name = "RULE")]
    pub outer_optimizer: Option<String>,
    /// Optimizer: sgd, momentum, adamw, or for large batches lamb or lars [default: adamw]
    #[arg(long, value_name = "RULE")]
    pub optimizer: Option<String>,
    /// State to offload from a rank's memory until it is needed: none, optimizer (master weights
    /// and moments), activations (of blocks, from forward to backward pass), all, or auto: the
    /// first of these that lets the plan fit [default: none]
    #[arg(long, value_name = "WHAT")]
    pub offload: Option<String>,
    /// Offload store: a file on disk, or the host's memory [default: disk for train, host else]
    #[arg(long, value_name = "disk|host")]
    pub offload_to: Option<String>,
}

fn collective_help() -> String {
    let known = Algorithm::known();
    format!(
        "Algorithm of the gradient reduction: {known}; hierarchical:INNER:OUTER/G has G replicas per host [default: auto]"
    )
}

/// Defaults that differ between commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Summation order.
    pub order: SummationOrder,
    /// Headroom for uneven routing to experts without a capacity.
    pub expert_buffer_factor: f64,
    /// True if all ranks share this host when no cluster is described.
    pub one_host: bool,
    /// Number of consecutive ranks of the run that can map each other's memory, where a run
    /// follows; otherwise the cluster tells.
    pub shm_domain: Option<u64>,
    /// Communication library that carries out the collectives that it can.
    pub library: Option<Library>,
    /// Memory limit of a rank, if one was given.
    pub limit: Option<Bytes>,
}

impl Defaults {
    /// Defaults of a plan for a cluster: the fastest training dtype.
    pub(crate) fn for_cluster(cluster: Option<&Cluster>, order: SummationOrder) -> Self {
        let half = [DType::Bf16, DType::F16];
        let dtype = match cluster {
            None => DType::Bf16,
            Some(cluster) => {
                let unit = half.into_iter().find(|dtype| cluster.device.supports(*dtype));
                unit.unwrap_or(DType::F32)
            }
        };
        let limit = cluster.and_then(|c| c.kinds().map(|device| device.memory).min());
        let (one_host, shm_domain, library) = (false, None, None);
        Self { dtype, order, expert_buffer_factor: 1.0, one_host, shm_domain, library, limit }
    }
}

/// A model and its plan.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The model to train.
    pub model: Model,
    /// Its plan.
    pub plan: Plan,
}

/// Maximum number of ranks; the bound also keeps products of axes from overflowing.
const MAX_RANKS: u64 = 1 << 24;
/// Maximum samples per iteration, tokens per sample, and MiB per bucket: the product of any two of
/// them and a number of ranks fits 64 bits.
const MAX_SAMPLES: u64 = 1 << 32;
const MAX_TOKENS: u64 = 1 << 28;
const MAX_BUCKET_MIB: u64 = 1 << 30;

impl StrategyFlags {
    /// Checks every flag, lowers the result, and reports all problems.
    pub(crate) fn check(
        &self,
        defaults: Defaults,
        on: Option<(&ClusterFlags, &Cluster)>,
        problems: &mut Problems,
    ) -> Option<Request> {
        let model = model(self.model.as_deref(), problems);
        let seq = model.as_ref().map_or(1, |model| model.seq);
        let mut strategy = self.strategy(defaults, seq, problems);
        if self.strategy.as_deref() == Some(super::config::AUTO) {
            let found = model.as_ref().zip(on).filter(|_| problems.is_empty());
            match found {
                Some((model, (_, cluster))) => {
                    strategy = self.found(model, &strategy, cluster, problems)?;
                }
                None if on.is_none() => {
                    let text = "auto needs a cluster to search on; add --cluster, for this machine \
                                a file of `paceline calibrate`";
                    problems.add("--strategy", text);
                }
                None => {}
            }
        }
        let ranks = world(&strategy);
        if ranks > MAX_RANKS {
            problems.add(
                "--dp",
                format!("the world would have {ranks} ranks; at most {MAX_RANKS} can be planned"),
            );
            return None;
        }
        if let Some((flags, cluster)) = on {
            flags.holds(cluster, &strategy.mesh(), problems);
        }
        let world = u32::try_from(ranks).unwrap_or(u32::MAX);
        let here = defaults.one_host.then(|| Fabric::one_host(world));
        let known = on.map(|(_, cluster)| cluster.fabric()).or(here);
        if let Some(fabric) = &known {
            resolve(&mut strategy, fabric, problems);
        }
        let mut fabric = known.unwrap_or_else(Fabric::unknown);
        fabric.library = defaults.library;
        if defaults.one_host {
            fabric.shm_domain = defaults.shm_domain;
            let shared = strategy.collective == Algorithm::SharedMemory;
            if shared && !fabric.share_memory(&strategy.mesh(), GroupKind::Replicas) {
                let text = "shared-memory needs replicas that share memory: processes of one host, \
                            with --transport auto or shm";
                problems.add("--collective", text);
            }
        }
        let model = model?;
        if self.split.as_deref() == Some(PROFILE) {
            strategy.split = profiled(&model, &strategy, on.map(|(_, cluster)| cluster), problems)?;
        }
        let plan = if self.offload.as_deref() == Some(AUTO) {
            fitting(&model, strategy, (&fabric, defaults.limit), problems)?
        } else {
            lower_on(&model, &strategy, &fabric).map_err(|found| problems.planner(found)).ok()?
        };
        problems.is_empty().then_some(Request { model, plan })
    }

    /// The strategy, with a harmless value for every invalid flag, so that the planner can still
    /// check the others.
    fn strategy(&self, defaults: Defaults, seq: u64, problems: &mut Problems) -> Strategy {
        let [dp, tp, pp, cp, ep, etp] = self.axes(problems);
        let micro_batch =
            whole("--micro-batch", self.micro_batch.as_deref(), 1..=MAX_SAMPLES, problems)
                .unwrap_or(1);
        let global_batch =
            whole("--global-batch", self.global_batch.as_deref(), 1..=MAX_SAMPLES, problems);
        let most_leaves = 1..=u64::from(u32::MAX);
        let leaves = whole("--leaves", self.leaves.as_deref(), most_leaves, problems);
        let bucket = self.bucket_mib.as_deref().map(in_mib);
        let bucket = whole("--bucket-mib", bucket, 1..=MAX_BUCKET_MIB, problems);
        let least = Strategy::default();
        let compress = word("--compress", &self.compress, problems).unwrap_or_default();
        let most = 0..=u64::from(u32::MAX);
        let warmup = whole("--compress-warmup", self.compress_warmup.as_deref(), most, problems);
        let sync: Sync = word("--sync", &self.sync, problems).unwrap_or(Sync::AllReduce);
        // Compressed gradients differ in their bits between layouts, and asynchronous updates even
        // between two runs.
        let local = self.local(problems);
        let bits = compress == Compression::None && !sync.is_async() && local.is_none();
        let order = if bits { defaults.order } else { SummationOrder::Free };
        let mut strategy = Strategy {
            dp,
            tp,
            pp,
            cp,
            ep,
            etp,
            axis_order: word("--axis-order", &self.axis_order, problems).unwrap_or_default(),
            sp: self.sp,
            zero: word("--zero", &self.zero, problems).unwrap_or(Zero::None),
            schedule: word("--schedule", &self.schedule, problems)
                .unwrap_or(ScheduleKind::OneFOneB),
            global_batch: global_batch.unwrap_or(u64::from(dp).saturating_mul(micro_batch)),
            micro_batch,
            seq: whole("--seq", self.seq.as_deref(), 1..=MAX_TOKENS, problems).unwrap_or(seq),
            recompute: word("--recompute", &self.recompute, problems).unwrap_or(Recompute::None),
            split: match self.split.as_deref() {
                Some(PROFILE) => Split::default(),
                _ => word("--split", &self.split, problems).unwrap_or_default(),
            },
            sync_batch_norm: self.sync_batch_norm,
            expert_buffer_factor: real(
                "--expert-buffer-factor",
                self.expert_buffer_factor.as_deref(),
                0.0..=1e9,
                problems,
            )
            .unwrap_or(defaults.expert_buffer_factor),
            table_sharding: word("--table-sharding", &self.table_sharding, problems)
                .unwrap_or_default(),
            dtype: word("--dtype", &self.dtype, problems).unwrap_or(defaults.dtype),
            grad_dtype: word("--grad-dtype", &self.grad_dtype, problems).unwrap_or(DType::F32),
            order: word("--order", &self.order, problems).unwrap_or(order),
            leaves: leaves.and_then(|leaves| u32::try_from(leaves).ok()).unwrap_or(dp),
            sync,
            collective: word("--collective", &self.collective, problems).unwrap_or(Algorithm::Auto),
            bucket: bucket.map_or(least.bucket, |mib| Bytes(mib << 20)),
            overlap: !self.no_overlap,
            optimizer: word("--optimizer", &self.optimizer, problems)
                .unwrap_or(OptimizerKind::AdamW),
            offload: match self.offload.as_deref() {
                Some(AUTO) => Offload::None,
                _ => word("--offload", &self.offload, problems).unwrap_or_default(),
            },
            store: word("--offload-to", &self.offload_to, problems)
                .unwrap_or(if defaults.one_host { Store::Disk } else { Store::Host }),
            compress,
            compress_warmup: warmup.and_then(|n| u32::try_from(n).ok()),
            local,
        };
        // ZeRO-2 promises shards of gradients; only who asks for equal bits pays for whole ones.
        if self.order.is_none() && self.leaves.is_none() && strategy.keeps_whole_gradients() {
            strategy.order = SummationOrder::Free;
        }
        strategy
    }

    /// The local SGD settings, if requested.
    fn local(&self, problems: &mut Problems) -> Option<LocalSgd> {
        let outer = word("--outer-optimizer", &self.outer_optimizer, problems);
        let steps = whole("--local-steps", self.local_steps.as_deref(), 1..=1 << 20, problems);
        if outer.is_some() && self.local_steps.is_none() {
            problems.add("--outer-optimizer", "needs --local-steps, after which replicas compare");
        }
        let steps = u32::try_from(steps?).ok()?;
        Some(LocalSgd { steps, outer: outer.unwrap_or_default() })
    }

    /// Sizes of the axes; `dp` is filled up to `--ranks`.
    fn axes(&self, problems: &mut Problems) -> [u32; 6] {
        let given = [
            ("--dp", &self.dp),
            ("--tp", &self.tp),
            ("--pp", &self.pp),
            ("--cp", &self.cp),
            ("--ep", &self.ep),
            ("--etp", &self.etp),
        ];
        let mut axes = given
            .map(|(flag, text)| whole(flag, text.as_deref(), 1..=MAX_RANKS, problems).unwrap_or(1));
        let ranks = whole("--ranks", self.ranks.as_deref(), 1..=MAX_RANKS, problems);
        let readable = given[..4].iter().all(|(flag, _)| !problems.about(flag));
        let [dp, tp, pp, cp, ..] = axes;
        if let (Some(ranks), true) = (ranks, readable) {
            let others = pp.saturating_mul(cp).saturating_mul(tp);
            let product = others.saturating_mul(dp);
            if self.dp.is_none() && ranks % others == 0 {
                axes[0] = ranks / others;
            } else if product != ranks {
                problems.add("--ranks", mismatch(ranks, others, product, self.dp.is_some()));
            }
        }
        axes.map(|size| u32::try_from(size).unwrap_or(u32::MAX))
    }

    /// The best strategy that a search finds, with the flags that are given pinned.
    fn found(
        &self,
        model: &Model,
        base: &Strategy,
        cluster: &Cluster,
        problems: &mut Problems,
    ) -> Option<Strategy> {
        let axes = [&self.dp, &self.tp, &self.pp, &self.cp];
        let available = cluster.devices().min(MAX_RANKS);
        let devices = match &self.ranks {
            Some(ranks) => whole("--ranks", Some(ranks), 1..=available, problems)?,
            // Without a number, the axes say it if all are given.
            None if axes.iter().all(|axis| axis.is_some()) => world(base),
            None => available,
        };
        if self.global_batch.is_none() {
            problems.add("--strategy", "auto needs --global-batch, the samples of an iteration");
            return None;
        }
        if let Some(found) = self.handed_over(base) {
            return Some(found);
        }
        let request = paceline_search::Request {
            model,
            cluster,
            devices: u32::try_from(devices).unwrap_or(u32::MAX),
            base: base.clone(),
            options: paceline_sim::Options::default(),
            pins: self.pins(base),
            top: 1,
            any_memory: false,
        };
        let result = crate::commands::find_strategies(&request);
        let best = result.candidates.into_iter().next();
        if best.is_none() {
            let text = match result.counts.considered {
                0 => {
                    "auto: no strategy has all of the given flags; release one, or see \
                      `paceline search --help`"
                }
                _ => "auto: no strategy fits; `paceline search` says what to change",
            };
            problems.add("--strategy", text);
        }
        best.map(|best| best.strategy)
    }

    /// The strategy that this rank's launcher has found, unless the rank was restarted with another
    /// layout.
    fn handed_over(&self, base: &Strategy) -> Option<Strategy> {
        std::env::var_os(RANK)?;
        let found: Strategy = serde_json::from_str(&std::env::var(FOUND).ok()?).ok()?;
        let expert_buffer_factor = base.expert_buffer_factor;
        let same = self.pins(base).admit(&found);
        same.then_some(Strategy { expert_buffer_factor, ..found })
    }

    /// Environment variable that hands a found strategy to the ranks, so that they need not search.
    pub(crate) fn hand_over(&self, found: &Strategy) -> Option<(&'static str, String)> {
        let searched = self.strategy.as_deref() == Some(super::config::AUTO);
        searched.then(|| Some((FOUND, serde_json::to_string(found).ok()?)))?
    }

    /// Pins of the flags that are given.
    fn pins(&self, base: &Strategy) -> Pins {
        fn pin<T: PartialEq + Clone>(given: bool, value: T) -> Choice<T> {
            if given { Choice::pin(value) } else { Choice::default() }
        }
        // With --ranks, --dp is what the other axes leave.
        Pins {
            tp: pin(self.tp.is_some(), base.tp),
            cp: pin(self.cp.is_some(), base.cp),
            pp: pin(self.pp.is_some(), base.pp),
            dp: pin(self.dp.is_some(), base.dp),
            ep: pin(self.ep.is_some(), base.ep),
            etp: pin(self.etp.is_some(), base.etp),
            micro_batch: pin(self.micro_batch.is_some(), base.micro_batch),
            sp: pin(self.sp, true),
            zero: pin(self.zero.is_some(), base.zero),
            schedule: pin(self.schedule.is_some(), base.schedule),
            recompute: pin(self.recompute.is_some(), base.recompute),
            split: pin(self.split.is_some(), base.split.clone()),
            offload: pin(self.offload.is_some(), base.offload),
            bucket: pin(self.bucket_mib.is_some(), base.bucket),
            collective: pin(self.collective.is_some(), base.collective),
            overlap: pin(self.no_overlap, false),
        }
    }
}

/// Value of `--split` for stages of equal time.
const PROFILE: &str = "profile";

/// Stages of equal time on a cluster, from a profile of the model's layers under this strategy.
fn profiled(
    model: &Model,
    strategy: &Strategy,
    cluster: Option<&Cluster>,
    problems: &mut Problems,
) -> Option<Split> {
    let Some(cluster) = cluster else {
        let text =
            "profile needs layer times; add --cluster, best with a file of `paceline calibrate`";
        problems.add("--split", text.to_owned());
        return None;
    };
    let plan = lower(model, strategy).map_err(|found| problems.planner(found)).ok()?;
    let options = paceline_sim::Options::default();
    let times = paceline_sim::profile(&plan, cluster, &options);
    let times = times.map_err(|error| problems.add("--split", error.to_string())).ok()?;
    let mut costs: Vec<f64> = times.iter().map(|time| time.0).collect();
    if model.mtp.depth > 0 {
        // Multi-token prediction modules stay with the head.
        let behind: f64 = costs.split_off(model.layers as usize + 2).iter().sum();
        costs.last_mut().into_iter().for_each(|head| *head += behind);
    }
    let stages = strategy.pp as usize * usize::from(strategy.schedule.chunks());
    Some(balance(&costs, stages))
}

/// Value of `--offload` for as much as is needed.
const AUTO: &str = "auto";

/// The plan that fits and offloads the least; if none fits, the one that needs the least memory.
fn fitting(
    model: &Model,
    strategy: Strategy,
    (fabric, limit): (&Fabric, Option<Bytes>),
    problems: &mut Problems,
) -> Option<Plan> {
    let Some(limit) = limit else {
        let text = "auto needs the memory of a rank; add --memory-limit or --cluster";
        problems.add("--offload", text.to_owned());
        return None;
    };
    let mut best =
        lower_on(model, &strategy, fabric).map_err(|found| problems.planner(found)).ok()?;
    let peak = |plan: &Plan| plan.programs.iter().map(|p| p.memory.with_shared()).max();
    for offload in Offload::ALL {
        if peak(&best) <= Some(limit) {
            break;
        }
        // State that cannot be offloaded here stays in memory.
        let more = lower_on(model, &Strategy { offload, ..strategy.clone() }, fabric);
        best = more.ok().filter(|plan| peak(plan) < peak(&best)).unwrap_or(best);
    }
    Some(best)
}

/// Resolves the collective's open parameters from the location of the replicas.
fn resolve(strategy: &mut Strategy, fabric: &Fabric, problems: &mut Problems) {
    let members = strategy.mesh().members(GroupKind::Replicas, Rank(0));
    match fabric.resolve(strategy.collective, &members) {
        Ok(settled) => strategy.collective = settled,
        Err(error) => problems.add("--collective", error.to_string()),
    }
}

fn mismatch(ranks: u64, others: u64, product: u64, dp_given: bool) -> String {
    if dp_given {
        let filled = match ranks % others {
            0 => format!(", or leave out --dp and {} replicas fill them", ranks / others),
            _ => String::new(),
        };
        return format!(
            "the axes make {product} ranks, not {ranks}; use --ranks {product}{filled}"
        );
    }
    let below = ranks / others * others;
    let fits = match below {
        0 => format!("{others} or a multiple of it can"),
        below => format!("{below} or {} can", below.saturating_add(others)),
    };
    format!("{ranks} ranks cannot be made of whole replicas of {others}; {fits}")
}

/// Number of ranks, servers included, without overflow.
fn world(strategy: &Strategy) -> u64 {
    [strategy.dp, strategy.tp, strategy.pp, strategy.cp]
        .into_iter()
        .fold(1u64, |product, size| product.saturating_mul(size.into()))
        .saturating_add(strategy.sync.servers().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CANONICAL: Defaults = Defaults {
        dtype: DType::F32,
        order: SummationOrder::Canonical,
        expert_buffer_factor: 1.0,
        one_host: false,
        shm_domain: None,
        library: None,
        limit: None,
    };

    fn flags(pairs: &[(&str, &str)]) -> StrategyFlags {
        let mut flags = StrategyFlags { model: Some("mini".to_owned()), ..Default::default() };
        for (name, value) in pairs {
            let field = match *name {
                "model" => &mut flags.model,
                "ranks" => &mut flags.ranks,
                "dp" => &mut flags.dp,
                "tp" => &mut flags.tp,
                "pp" => &mut flags.pp,
                "cp" => &mut flags.cp,
                "global-batch" => &mut flags.global_batch,
                "micro-batch" => &mut flags.micro_batch,
                "seq" => &mut flags.seq,
                "leaves" => &mut flags.leaves,
                "zero" => &mut flags.zero,
                "order" => &mut flags.order,
                "schedule" => &mut flags.schedule,
                "compress" => &mut flags.compress,
                "sync" => &mut flags.sync,
                other => panic!("{other}"),
            };
            *field = Some((*value).to_owned());
        }
        flags
    }

    fn checked(pairs: &[(&str, &str)]) -> Result<Strategy, String> {
        let mut problems = Problems::default();
        let request = flags(pairs).check(CANONICAL, None, &mut problems);
        request.map(|request| request.plan.strategy).ok_or(problems.to_string())
    }

    #[test]
    fn one_rank_is_the_default_and_ranks_fill_replicas() {
        let alone = checked(&[]).unwrap();
        assert_eq!((alone.dp, alone.global_batch, alone.seq, alone.leaves), (1, 1, 64, 1));
        let filled = checked(&[("ranks", "8"), ("tp", "2"), ("micro-batch", "3")]).unwrap();
        assert_eq!((filled.dp, filled.global_batch, filled.leaves), (4, 12, 4));
        assert_eq!(checked(&[("ranks", "4"), ("dp", "4")]).unwrap().dp, 4);
    }

    #[test]
    fn ranks_that_do_not_fit_say_what_would() {
        assert_eq!(
            checked(&[("ranks", "6"), ("tp", "4")]).unwrap_err(),
            "error: --ranks: 6 ranks cannot be made of whole replicas of 4; 4 or 8 can"
        );
        assert_eq!(
            checked(&[("ranks", "8"), ("tp", "2"), ("dp", "2")]).unwrap_err(),
            "error: --ranks: the axes make 4 ranks, not 8; use --ranks 4, or leave out --dp and 4 \
             replicas fill them"
        );
    }

    #[test]
    fn problems_of_flags_and_of_the_plan_are_told_together() {
        let told = checked(&[
            ("tp", "3"),
            ("pp", "100"),
            ("global-batch", "x"),
            ("compress", "int8"),
            ("schedule", "zb-h2"),
        ])
        .unwrap_err();
        for flag in ["--tp: 3", "--pp: 100", "--global-batch: 'x'", "--compress", "--schedule"] {
            assert!(told.contains(&format!("\n  {flag}")), "{flag}\n{told}");
        }
    }

    #[test]
    fn absurd_products_do_not_overflow() {
        let most = MAX_RANKS.to_string();
        let all = ["dp", "tp", "pp", "cp"].map(|axis| (axis, most.as_str()));
        assert!(checked(&all).unwrap_err().contains("at most 16777216 can be planned"));
        let samples = MAX_SAMPLES.to_string();
        let told = checked(&[
            ("dp", "16777216"),
            ("micro-batch", &samples),
            ("global-batch", &samples),
            ("seq", "268435456"),
            ("leaves", "4294967295"),
        ]);
        assert!(told.is_err());
        assert!(checked(&[("sync", "ps:4096"), ("dp", "16777216")]).is_err());
    }

    #[test]
    fn a_cluster_decides_the_type() {
        let on = |name| {
            let cluster = paceline_sim::cluster::preset::get(name).unwrap();
            Defaults::for_cluster(Some(&cluster), SummationOrder::Free).dtype
        };
        assert_eq!(on("dgx-a100"), DType::Bf16);
        assert_eq!(on("dgx1-v100"), DType::F16);
        assert_eq!(on("laptop"), DType::F32);
        assert_eq!(Defaults::for_cluster(None, SummationOrder::Free).dtype, DType::Bf16);
    }

    #[test]
    fn zero_2_shards_the_gradients_of_several_microbatches_unless_asked_for_bits() {
        let order = |more: &[(&str, &str)]| {
            let base = [("dp", "2"), ("global-batch", "8"), ("micro-batch", "2")];
            let pairs: Vec<_> = base.iter().chain(more).copied().collect();
            checked(&pairs).expect("a sound strategy").order
        };
        assert_eq!(order(&[]), SummationOrder::Canonical);
        assert_eq!(order(&[("zero", "1")]), SummationOrder::Canonical);
        assert_eq!(order(&[("zero", "2")]), SummationOrder::Free);
        assert_eq!(order(&[("zero", "3")]), SummationOrder::Free);
        assert_eq!(order(&[("zero", "2"), ("leaves", "2")]), SummationOrder::Canonical);
        assert_eq!(order(&[("zero", "2"), ("order", "canonical")]), SummationOrder::Canonical);
        assert_eq!(order(&[("zero", "2"), ("global-batch", "4")]), SummationOrder::Canonical);
    }
}
