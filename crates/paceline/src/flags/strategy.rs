//! How the model is cut and scheduled: the flags that `train`, `plan` and `simulate` share.

use super::model::model;
use super::{ClusterFlags, Problems, whole, word};
use clap::Args;
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, Fabric, Order};
use paceline_plan::compress::Compression;
use paceline_plan::ids::Rank;
use paceline_plan::lower::{balance, lower};
use paceline_plan::mesh::GroupKind;
use paceline_plan::model::Model;
use paceline_plan::outer::Local;
use paceline_plan::program::Plan;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{
    Offload, OptimizerKind, Recompute, Split, Store, Strategy, Sync, Zero,
};
use paceline_plan::units::Bytes;
use paceline_sim::cluster::Cluster;

/// What to plan, as it was written.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Strategy")]
pub(crate) struct StrategyFlags {
    /// A built-in name, a TOML file, or a directory with a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE|DIR")]
    pub model: Option<String>,
    /// All ranks; --dp fills up what the other axes leave [default: the product of the axes]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ranks: Option<String>,
    /// Data parallelism: whole replicas, each with its share of the batch [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub dp: Option<String>,
    /// Tensor parallelism: every matrix cut into parts [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub tp: Option<String>,
    /// Pipeline parallelism: the layers cut into stages [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub pp: Option<String>,
    /// Context parallelism: every sequence cut into parts, which attention goes round [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub cp: Option<String>,
    /// Expert parallelism: every layer's experts dealt out to so many of the same ranks [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub ep: Option<String>,
    /// Tensor parallelism of experts: each expert's matrices cut into parts [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub etp: Option<String>,
    /// With --ep and experts that take all that come: for how many times an equal share of a rank's
    /// tokens the experts of another have room; more end the run [default: 1, 2 for train]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    pub expert_room: Option<String>,
    /// Sequence parallelism: with --tp, cut along tokens what is outside the matrices
    #[arg(long)]
    pub sp: bool,
    /// A strategy from a file or a search; not available yet
    #[arg(long, value_name = "FILE|auto", hide = true)]
    pub strategy: Option<String>,
    /// What replicas deal out among themselves: 0 nothing, 1 optimizer state, 2 also gradients,
    /// 3 also parameters [default: 0]
    #[arg(long, value_name = "0|1|2|3", allow_negative_numbers = true)]
    pub zero: Option<String>,
    /// Order of microbatches in the pipeline: gpipe, 1f1b, interleaved:V with V chunks of layers per
    /// rank, zb-h1 or zb-h1:V (zero bubble), dualpipev, pipedream or pipedream:2bw (no flush)
    /// [default: 1f1b]
    #[arg(long, value_name = "KIND")]
    pub schedule: Option<String>,
    /// Samples of one iteration [default: dp × micro-batch]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub global_batch: Option<String>,
    /// Samples that one replica works on at once [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub micro_batch: Option<String>,
    /// Tokens of one sample [default: the model's]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seq: Option<String>,
    /// What is computed again in the backward pass to save memory: none, selective (attention's
    /// core), selective-op (all but attention and half of the products), full (every layer), full:N
    /// (the first N layers of each stage) or full-forward (every layer to its end, as Megatron-LM
    /// does) [default: none]
    #[arg(long, value_name = "WHAT")]
    pub recompute: Option<String>,
    /// Where stages of the pipeline begin: such that they have equal cost, by counting operations, or
    /// an equal count of layers, or equal times in a profile (of --cluster: measured, if it is a
    /// file of `paceline calibrate`), or at:L,L… for stages that begin at these layers [default: cost]
    #[arg(long, value_name = "HOW")]
    pub split: Option<String>,
    /// Normalise batches over all replicas together instead of microbatch by microbatch
    #[arg(long)]
    pub sync_batch_norm: bool,
    /// Who holds what of a recommendation model's tables: every replica all (replicate), some of them whole
    /// (table) or some rows of each (row) [default: auto, which is table]
    #[arg(long, value_name = "HOW")]
    pub tables: Option<String>,
    /// Type of weights and activations: f32, bf16, f16 or fp8
    ///
    /// `train` has f32 where nothing is said, and no fp8. `plan` and `simulate` take what the device of --cluster computes
    /// fastest in training: bf16 where it has a unit for it, else f16, else f32; bf16 without a
    /// cluster.
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<String>,
    /// Type of gradients, in memory and on the wire: f32 or bf16 [default: f32]
    #[arg(long, value_name = "TYPE")]
    pub grad_dtype: Option<String>,
    /// Whether sums are taken in a fixed order (canonical: the same bits in every layout) or in
    /// the cheapest (free) [default: canonical; free for simulate]
    #[arg(long, value_name = "canonical|free")]
    pub order: Option<String>,
    /// Leaves of the canonical summation tree: equal leaves give equal bits for any --dp
    /// [default: dp]
    #[arg(long, value_name = "L", allow_negative_numbers = true)]
    pub leaves: Option<String>,
    /// How replicas agree: all-reduce; ps:K for K parameter servers; async-ps:K where nobody waits for
    /// anybody; ssp:K:S where nobody is more than S iterations ahead; hogwild for threads that share one
    /// set of weights and update it without locks [default: all-reduce]
    #[arg(long, value_name = "HOW")]
    pub sync: Option<String>,
    /// Algorithm of the gradients' reduction: auto, ring, multi-ring:C, halving-doubling, tree,
    /// direct, read-reduce, ps:K, naive, overlapped, partitioned, torus:AxBxC or
    /// hierarchical:INNER:OUTER/G with G replicas to a host [default: auto]
    #[arg(long, value_name = "ALGORITHM")]
    pub collective: Option<String>,
    /// Gradients are reduced in buckets of at least so many MiB [default: 25]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub bucket_mib: Option<String>,
    /// Keep communication from running beside compute
    #[arg(long)]
    pub no_overlap: bool,
    /// What gradients are turned into on the wire, what is lost being added to the next ones: int8,
    /// onebit (signs), topk:FRACTION (the largest) or powersgd:RANK (narrow factors) [default: none]
    #[arg(long, value_name = "HOW")]
    pub compress: Option<String>,
    /// First iterations in which gradients go as they are all the same. With adamw, first moments are
    /// compressed after them instead of gradients (1-bit Adam) [default: a fifth of the run with adamw and
    /// onebit, topk or powersgd and with momentum and onebit, else 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub compress_warmup: Option<String>,
    /// Updates that each replica makes by itself in an iteration, with an equal share of its samples,
    /// before replicas compare their weights (local SGD, DiLoCo) [default: none: they share gradients]
    #[arg(long, value_name = "H", allow_negative_numbers = true)]
    pub local_steps: Option<String>,
    /// What becomes of the mean of how far replicas moved: average (all go there) or nesterov (it is a
    /// gradient, as in DiLoCo) [default: nesterov]
    #[arg(long, value_name = "RULE")]
    pub outer_optimizer: Option<String>,
    /// What updates the weights: sgd, momentum, adamw, or for large batches lamb or
    /// lars [default: adamw]
    #[arg(long, value_name = "RULE")]
    pub optimizer: Option<String>,
    /// What rests outside a rank's memory until it is needed: none, optimizer (master weights and
    /// moments), activations (of blocks, from forward to backward pass), all of it, or auto: the
    /// first of these that lets the plan fit [default: none]
    #[arg(long, value_name = "WHAT")]
    pub offload: Option<String>,
    /// Where that is: a file on disk, or the host's memory [default: disk for train, host else]
    #[arg(long, value_name = "disk|host")]
    pub offload_to: Option<String>,
}

/// Defaults in which commands differ.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    /// Type of weights and activations.
    pub dtype: DType,
    /// Order of summation.
    pub order: Order,
    /// Room for tokens of uneven liking where experts take all that come.
    pub expert_room: f64,
    /// Whether all ranks share a host where no cluster is described: as here, on this machine.
    pub one_host: bool,
    /// Memory that a rank may have, if anybody said so.
    pub limit: Option<Bytes>,
}

impl Defaults {
    /// What a plan for a cluster starts from: the fastest type that training is done in.
    pub(crate) fn for_cluster(cluster: Option<&Cluster>, order: Order) -> Self {
        let half = [DType::Bf16, DType::F16];
        let dtype = match cluster {
            None => DType::Bf16,
            Some(cluster) => {
                let unit = half.into_iter().find(|dtype| cluster.device.supports(*dtype));
                unit.unwrap_or(DType::F32)
            }
        };
        let limit = cluster.and_then(|c| c.kinds().map(|device| device.memory).min());
        Self { dtype, order, expert_room: 1.0, one_host: false, limit }
    }
}

/// A model and its plan.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// What is trained.
    pub model: Model,
    /// How.
    pub plan: Plan,
}

/// The most ranks that can be planned; the same bound keeps products of axes from overflowing.
const MAX_RANKS: u64 = 1 << 24;
/// The most samples of an iteration, tokens of a sample, and MiB of a bucket: each product of two
/// of them with a number of ranks still fits 64 bits.
const MAX_SAMPLES: u64 = 1 << 32;
const MAX_TOKENS: u64 = 1 << 28;
const MAX_BUCKET_MIB: u64 = 1 << 30;

impl StrategyFlags {
    /// Checks every flag, lowers the result, and notes all that is wrong.
    pub(crate) fn check(
        &self,
        defaults: Defaults,
        on: Option<(&ClusterFlags, &Cluster)>,
        problems: &mut Problems,
    ) -> Option<Request> {
        let model = model(self.model.as_deref(), problems);
        let seq = model.as_ref().map_or(1, |model| model.seq);
        let mut strategy = self.strategy(defaults, seq, problems);
        self.not_yet(problems);
        let ranks = world(&strategy);
        if ranks > MAX_RANKS {
            problems.say(
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
        if let Some(fabric) = on.map(|(_, cluster)| cluster.fabric()).or(here) {
            settle(&mut strategy, &fabric, problems);
        }
        let model = model?;
        if self.split.as_deref() == Some(PROFILE) {
            strategy.split = profiled(&model, &strategy, on.map(|(_, cluster)| cluster), problems)?;
        }
        let plan = if self.offload.as_deref() == Some(AUTO) {
            fitting(&model, strategy, defaults.limit, problems)?
        } else {
            lower(&model, &strategy).map_err(|found| problems.planner(found)).ok()?
        };
        problems.is_empty().then_some(Request { model, plan })
    }

    /// The strategy, with a harmless value wherever a flag is wrong, so that the planner can still
    /// look at the rest.
    fn strategy(&self, defaults: Defaults, seq: u64, problems: &mut Problems) -> Strategy {
        let [dp, tp, pp, cp, ep, etp] = self.axes(problems);
        let micro_batch =
            whole("--micro-batch", self.micro_batch.as_deref(), 1..=MAX_SAMPLES, problems)
                .unwrap_or(1);
        let global_batch =
            whole("--global-batch", self.global_batch.as_deref(), 1..=MAX_SAMPLES, problems);
        let most_leaves = 1..=u64::from(u32::MAX);
        let leaves = whole("--leaves", self.leaves.as_deref(), most_leaves, problems);
        let bucket =
            whole("--bucket-mib", self.bucket_mib.as_deref(), 1..=MAX_BUCKET_MIB, problems);
        let least = Strategy::default();
        let compress = word("--compress", &self.compress, problems).unwrap_or_default();
        let most = 0..=u64::from(u32::MAX);
        let warmup = whole("--compress-warmup", self.compress_warmup.as_deref(), most, problems);
        let sync: Sync = word("--sync", &self.sync, problems).unwrap_or(Sync::AllReduce);
        // What is rounded for the wire cannot have the same bits in every layout, and what is applied as
        // it comes not even in two runs.
        let local = self.local(problems);
        let bits = compress == Compression::None && !sync.is_async() && local.is_none();
        let order = if bits { defaults.order } else { Order::Free };
        Strategy {
            dp,
            tp,
            pp,
            cp,
            ep,
            etp,
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
            expert_room: word("--expert-room", &self.expert_room, problems)
                .unwrap_or(defaults.expert_room),
            tables: word("--tables", &self.tables, problems).unwrap_or_default(),
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
        }
    }

    /// How replicas train apart, if they do.
    fn local(&self, problems: &mut Problems) -> Option<Local> {
        let outer = word("--outer-optimizer", &self.outer_optimizer, problems);
        let steps = whole("--local-steps", self.local_steps.as_deref(), 1..=1 << 20, problems);
        if outer.is_some() && self.local_steps.is_none() {
            problems.say("--outer-optimizer", "needs --local-steps, after which replicas compare");
        }
        let steps = u32::try_from(steps?).ok()?;
        Some(Local { steps, outer: outer.unwrap_or_default() })
    }

    /// The sizes of the axes, `dp` filled up to `--ranks`.
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
                problems.say("--ranks", mismatch(ranks, others, product, self.dp.is_some()));
            }
        }
        axes.map(|size| u32::try_from(size).unwrap_or(u32::MAX))
    }

    /// Flags of the contract that have no effect to offer yet.
    fn not_yet(&self, problems: &mut Problems) {
        if let Some(text) = &self.strategy {
            let text = format!(
                "'{text}' is not available yet; give the strategy's flags, on the command line or \
                 in a file with --config"
            );
            problems.say("--strategy", text);
        }
    }
}

/// The word for stages that take equally long.
const PROFILE: &str = "profile";

/// Stages that take equally long on a cluster, by a profile of the model's layers under this strategy.
fn profiled(
    model: &Model,
    strategy: &Strategy,
    cluster: Option<&Cluster>,
    problems: &mut Problems,
) -> Option<Split> {
    let Some(cluster) = cluster else {
        let text = "profile must know what layers take; say --cluster, best with a file of \
                    `paceline calibrate`";
        problems.say("--split", text.to_owned());
        return None;
    };
    let plan = lower(model, strategy).map_err(|found| problems.planner(found)).ok()?;
    let options = paceline_sim::Options::default();
    let times = paceline_sim::profile(&plan, cluster, &options);
    let times = times.map_err(|error| problems.say("--split", error.to_string())).ok()?;
    let mut costs: Vec<f64> = times.iter().map(|time| time.0).collect();
    if model.mtp.depth > 0 {
        // Modules for further tokens stay with the head.
        let behind: f64 = costs.split_off(model.layers as usize + 2).iter().sum();
        costs.last_mut().into_iter().for_each(|head| *head += behind);
    }
    let stages = strategy.pp as usize * usize::from(strategy.schedule.chunks());
    Some(balance(&costs, stages))
}

/// The word for as much as is needed.
const AUTO: &str = "auto";

/// The plan that offloads the least of those that fit; the one that needs the least if none does.
fn fitting(
    model: &Model,
    strategy: Strategy,
    limit: Option<Bytes>,
    problems: &mut Problems,
) -> Option<Plan> {
    let Some(limit) = limit else {
        let text = "auto must know what a rank may have; say --memory-limit, or --cluster";
        problems.say("--offload", text.to_owned());
        return None;
    };
    let mut best = lower(model, &strategy).map_err(|found| problems.planner(found)).ok()?;
    let peak = |plan: &Plan| plan.programs.iter().map(|p| p.memory.with_shared()).max();
    for offload in Offload::ALL {
        if peak(&best) <= Some(limit) {
            break;
        }
        // What cannot be offloaded here stays.
        let more = lower(model, &Strategy { offload, ..strategy.clone() });
        best = more.ok().filter(|plan| peak(plan) < peak(&best)).unwrap_or(best);
    }
    Some(best)
}

/// Settles what the collective leaves open to whoever knows where the replicas stand.
fn settle(strategy: &mut Strategy, fabric: &Fabric, problems: &mut Problems) {
    let members = strategy.mesh().members(GroupKind::Replicas, Rank(0));
    match fabric.settle(strategy.collective, &members) {
        Ok(settled) => strategy.collective = settled,
        Err(error) => problems.say("--collective", error.to_string()),
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

/// All ranks, servers included, without overflow.
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
        order: Order::Canonical,
        expert_room: 1.0,
        one_host: false,
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
            Defaults::for_cluster(Some(&cluster), Order::Free).dtype
        };
        assert_eq!(on("dgx-a100"), DType::Bf16);
        assert_eq!(on("dgx1-v100"), DType::F16);
        assert_eq!(on("laptop"), DType::F32);
        assert_eq!(Defaults::for_cluster(None, Order::Free).dtype, DType::Bf16);
    }
}
