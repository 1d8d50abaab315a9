//! Parallelization strategy: degrees of parallelism, schedule, dtypes and all other user choices.

use crate::collective::{Algorithm, SummationOrder};
use crate::compress::Compression;
use crate::dtype::DType;
use crate::mesh::{AxisOrder, Mesh};
use crate::outer_optimizer::LocalSgd;
use crate::program::StepPhase;
use crate::schedule::ScheduleKind;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// All inputs that, together with a model, determine a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Strategy {
    /// Data-parallel replicas.
    pub dp: u32,
    /// Tensor-parallel degree.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Context-parallel degree.
    pub cp: u32,
    /// Expert-parallel degree.
    pub ep: u32,
    /// Tensor-parallel degree of an expert.
    pub etp: u32,
    /// Order of the axes: the innermost joins neighbouring ranks.
    #[serde(default)]
    pub axis_order: AxisOrder,
    /// True if activations outside the tensor-parallel matrices are sharded along tokens.
    pub sp: bool,
    /// State that ZeRO shards across replicas.
    pub zero: Zero,
    /// The pipeline schedule.
    pub schedule: ScheduleKind,
    /// Samples per iteration.
    pub global_batch: u64,
    /// Samples per microbatch on one replica.
    pub micro_batch: u64,
    /// Tokens per sample.
    pub seq: u64,
    /// Activations that are recomputed instead of saved.
    pub recompute: Recompute,
    /// Assignment of layers to pipeline stages.
    #[serde(default)]
    pub split: Split,
    /// True if batch norm statistics are over the microbatches of all replicas.
    #[serde(default)]
    pub sync_batch_norm: bool,
    /// Size of the expert buffer as a multiple of the equal share of a rank's tokens, if experts
    /// drop no tokens. A run fails if more tokens arrive.
    #[serde(default = "equal_share")]
    pub expert_buffer_factor: f64,
    /// Sharding of a recommendation model's tables.
    #[serde(default)]
    pub table_sharding: TableSharding,
    /// Dtype of weights and activations.
    pub dtype: DType,
    /// Dtype of gradients, in memory and in messages.
    pub grad_dtype: DType,
    /// Summation order: canonical or free.
    pub order: SummationOrder,
    /// Leaves of the summation tree.
    pub leaves: u32,
    /// Synchronisation of the replicas.
    pub sync: Sync,
    /// Algorithm of the gradient reduction.
    pub collective: Algorithm,
    /// Minimum size of a gradient bucket.
    pub bucket: Bytes,
    /// True if communication may overlap with compute.
    pub overlap: bool,
    /// The optimizer.
    pub optimizer: OptimizerKind,
    /// State that is offloaded from the ranks' memory.
    #[serde(default)]
    pub offload: Offload,
    /// Location of the offloaded state.
    #[serde(default)]
    pub store: Store,
    /// Compression of gradients between replicas.
    #[serde(default)]
    pub compress: Compression,
    /// Number of first iterations with uncompressed gradients. `None`: as many as the optimizer
    /// needs, a fraction of the run (see [`Strategy::compress_warmup()`]), so that a plan is valid
    /// for runs of any length.
    #[serde(default)]
    pub compress_warmup: Option<u32>,
    /// Local SGD settings, if replicas make local steps.
    #[serde(default)]
    pub local: Option<LocalSgd>,
}

/// Expert buffer factor for perfectly balanced routing.
fn equal_share() -> f64 {
    1.0
}

impl Default for Strategy {
    /// One rank, one sample, no parallelism.
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            etp: 1,
            axis_order: AxisOrder::default(),
            sp: false,
            zero: Zero::None,
            schedule: ScheduleKind::OneFOneB,
            global_batch: 1,
            micro_batch: 1,
            seq: 1,
            recompute: Recompute::None,
            split: Split::Cost,
            sync_batch_norm: false,
            expert_buffer_factor: equal_share(),
            table_sharding: TableSharding::Auto,
            dtype: DType::F32,
            grad_dtype: DType::F32,
            order: SummationOrder::Canonical,
            leaves: 1,
            sync: Sync::AllReduce,
            collective: Algorithm::Auto,
            bucket: Bytes(25 << 20),
            overlap: true,
            optimizer: OptimizerKind::AdamW,
            offload: Offload::None,
            store: Store::Disk,
            compress: Compression::None,
            compress_warmup: None,
            local: None,
        }
    }
}

impl Strategy {
    /// Device mesh of the strategy.
    pub fn mesh(&self) -> Mesh {
        Mesh {
            pp: self.pp,
            dp: self.dp,
            cp: self.cp,
            tp: self.tp,
            ep: self.ep,
            etp: self.etp,
            servers: self.sync.servers(),
            order: self.axis_order,
        }
    }

    /// Returns true if experts are held by other ranks than the rest of their layer, or their
    /// gradients are summed over other ranks.
    pub fn has_separate_experts(&self) -> bool {
        self.ep > 1 || self.etp > 1 || self.tp > 1
    }

    /// Microbatches per replica and iteration.
    pub fn microbatches(&self) -> u32 {
        let samples = self.micro_batch.saturating_mul(u64::from(self.dp));
        u32::try_from(self.global_batch / samples.max(1)).unwrap_or(u32::MAX)
    }

    /// Number of tokens over which the loss of one update is averaged: all of an iteration's, or
    /// one replica's if its gradients are applied separately.
    pub fn tokens_of_update(&self) -> u64 {
        let updates = match (self.sync.is_async(), self.local) {
            (_, Some(local)) => u64::from(self.dp).saturating_mul(local.steps.into()),
            (true, None) => self.dp.into(),
            (false, None) => 1,
        };
        self.tokens() / updates.max(1)
    }

    /// Tokens per iteration.
    pub fn tokens(&self) -> u64 {
        self.global_batch.saturating_mul(self.seq)
    }

    /// Leaves of the summation tree per replica.
    pub fn local_leaves(&self) -> u32 {
        match self.order {
            SummationOrder::Canonical => (self.leaves / self.dp).max(1),
            SummationOrder::Free => 1,
        }
    }

    /// Returns true if ZeRO-2 or 3 would shard gradients, but canonical order sums the microbatches
    /// of a replica first and so keeps whole ones.
    pub fn keeps_whole_gradients(&self) -> bool {
        let sharded = self.zero >= Zero::Gradients && self.mesh().replicas() > 1;
        sharded && self.order == SummationOrder::Canonical && self.microbatches() > 1
    }

    /// Dtype of stored activations; fp8 is used for GEMMs only.
    pub fn activation_dtype(&self) -> DType {
        match self.dtype {
            DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 => DType::Bf16,
            other @ (DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::U8) => other,
        }
    }
}

/// State that ZeRO shards across replicas (Rajbhandari et al., arXiv 1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Zero {
    /// Nothing: every replica holds everything.
    None,
    /// Optimizer state (stage 1).
    Optimizer,
    /// Gradients too (stage 2).
    Gradients,
    /// Parameters too (stage 3).
    Parameters,
}

impl Zero {
    /// ZeRO stage number.
    pub const fn stage(self) -> u8 {
        self as u8
    }

    /// Converts from the ZeRO stage number.
    pub const fn from_stage(stage: u8) -> Option<Self> {
        Some(match stage {
            0 => Self::None,
            1 => Self::Optimizer,
            2 => Self::Gradients,
            3 => Self::Parameters,
            _ => return None,
        })
    }
}

/// Activations that the backward pass recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// None: all activations are saved.
    None,
    /// The attention core: cheap to compute, large to save (Korthikanti et al., arXiv 2205.05198).
    Selective,
    /// Everything but attention and about half of the GEMM outputs. Outputs of the query-key-value
    /// matrix are saved. Outputs of the output matrix are saved only if tensor parallelism
    /// exchanges them, and inner outputs of the feed-forward part in every second layer.
    /// torchtitan's `selective` with option `op` saves as much: it counts GEMMs one by one (gate
    /// and up are two) and saves every second output, plus all reduce_scatter results.
    SelectiveOp,
    /// Every layer, from its input up to the last value that the backward pass reads.
    Full,
    /// Like `Full`, but only for the given number of first layers of each virtual stage.
    FullOf(u16),
    /// Every layer, from its input to its very end, although nothing reads the last GEMM and the
    /// exchange after it. Frameworks that rerun the whole forward pass do this.
    FullForward,
}

/// Criterion for assigning layers to pipeline stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Equal cost, as nearly as whole layers allow, including embedding and head.
    #[default]
    Cost,
    /// Equal number of blocks; embedding and head are added to the first and the last stage. If the
    /// blocks do not divide equally but would with embedding and head counted as two more, they are
    /// counted. Megatron-LM and torchtitan do the same.
    Count,
    /// Explicit: the stages after the first begin at these layers, counted from 0 with the
    /// embedding. A profile yields such a list.
    At(Vec<u32>),
}

/// State that a rank keeps in the offload store and prefetches before use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Master weights and moments, except while their bucket is updated (Ren et al., arXiv
    /// 2101.06840, but with the step executed where the weights are).
    Optimizer,
    /// Activations that blocks save for the backward pass (Rhu et al., arXiv 1602.08124).
    Activations,
    /// Both.
    All,
}

impl Offload {
    /// All variants, from least to most traffic.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Activations, Self::All];

    /// Returns true if the optimizer state is offloaded.
    pub const fn optimizer(self) -> bool {
        matches!(self, Self::Optimizer | Self::All)
    }

    /// Returns true if activations are offloaded.
    pub const fn activations(self) -> bool {
        matches!(self, Self::Activations | Self::All)
    }
}

/// Location of offloaded state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// A file.
    #[default]
    Disk,
    /// Host memory, separate from device memory.
    Host,
}

/// Sharding of a recommendation model's tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableSharding {
    /// Default: the same as `Table`.
    #[default]
    Auto,
    /// Every replica holds all of them.
    Replicate,
    /// Every replica holds some of the tables completely.
    Table,
    /// Every replica holds some rows of each table.
    Row,
}

impl TableSharding {
    /// Replaces `Auto` by the default.
    pub const fn resolve(self) -> Self {
        match self {
            Self::Auto => Self::Table,
            other @ (Self::Replicate | Self::Table | Self::Row) => other,
        }
    }
}

/// Method that keeps the replicas' weights in sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sync {
    /// Replicas all-reduce gradients.
    AllReduce,
    /// Replicas send gradients to this number of servers, which return updated weights.
    Servers(u32),
    /// The same, asynchronously: servers apply each replica's gradients on arrival.
    Async {
        /// Number of servers.
        servers: u32,
        /// Maximum lead of the fastest over the slowest replica, in iterations; `None`: no limit.
        staleness: Option<u32>,
    },
    /// Threads of one process that share one set of weights and update it without locks (Recht et al.,
    /// NIPS 2011).
    Hogwild,
}

impl Sync {
    /// Number of server ranks outside the mesh.
    pub const fn servers(self) -> u32 {
        match self {
            Self::AllReduce | Self::Hogwild => 0,
            Self::Servers(servers) | Self::Async { servers, .. } => servers,
        }
    }

    /// Returns true if replicas do not wait for each other.
    pub const fn is_async(self) -> bool {
        match self {
            Self::AllReduce | Self::Servers(_) => false,
            Self::Async { .. } | Self::Hogwild => true,
        }
    }
}

/// Optimizer algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Plain SGD.
    Sgd,
    /// SGD with momentum.
    Momentum,
    /// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
    AdamW,
    /// LAMB: Adam's direction scaled per tensor by the trust ratio, for large batches (You et al.,
    /// arXiv 1904.00962, algorithm 2).
    Lamb,
    /// LARS: momentum with a rate per tensor that follows the tensor's norm, for large batches of
    /// images (You, Gitman and Ginsburg, arXiv 1708.03888, algorithm 1).
    Lars,
}

impl OptimizerKind {
    /// Number of f32 values per parameter, in addition to the master weights.
    pub const fn moments(self) -> usize {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::Lars => 1,
            Self::AdamW | Self::Lamb => 2,
        }
    }

    /// Phases of an update, in order.
    pub const fn phases(self) -> &'static [StepPhase] {
        if self.needs_tensor_norms() {
            &[StepPhase::TensorNorms, StepPhase::Apply]
        } else {
            &[StepPhase::Apply]
        }
    }

    /// Phase of an update that advances the moments. LAMB's direction depends on them and must be
    /// known before its norm.
    pub const fn moves_moments_in(self) -> StepPhase {
        match self {
            Self::Lamb => StepPhase::TensorNorms,
            Self::Sgd | Self::Momentum | Self::AdamW | Self::Lars => StepPhase::Apply,
        }
    }

    /// Returns true if a step needs the norms of whole tensors and their directions, which a rank
    /// with only a shard cannot compute.
    pub const fn needs_tensor_norms(self) -> bool {
        match self {
            Self::Sgd | Self::Momentum | Self::AdamW => false,
            Self::Lamb | Self::Lars => true,
        }
    }
}

macro_rules! words {
    ($type:ty { $($value:pat => $word:literal = $make:expr),+ $(,)? }) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok($make),)+
                    _ => Err(format!("'{text}' is none of {}", [$($word),+].join(", "))),
                }
            }
        }
    };
}

words!(Zero {
    Zero::None => "0" = Zero::None,
    Zero::Optimizer => "1" = Zero::Optimizer,
    Zero::Gradients => "2" = Zero::Gradients,
    Zero::Parameters => "3" = Zero::Parameters,
});
words!(TableSharding {
    TableSharding::Auto => "auto" = TableSharding::Auto,
    TableSharding::Replicate => "replicate" = TableSharding::Replicate,
    TableSharding::Table => "table" = TableSharding::Table,
    TableSharding::Row => "row" = TableSharding::Row,
});
words!(Offload {
    Offload::None => "none" = Offload::None,
    Offload::Optimizer => "optimizer" = Offload::Optimizer,
    Offload::Activations => "activations" = Offload::Activations,
    Offload::All => "all" = Offload::All,
});
words!(Store {
    Store::Disk => "disk" = Store::Disk,
    Store::Host => "host" = Store::Host,
});
words!(OptimizerKind {
    OptimizerKind::Sgd => "sgd" = OptimizerKind::Sgd,
    OptimizerKind::Momentum => "momentum" = OptimizerKind::Momentum,
    OptimizerKind::AdamW => "adamw" = OptimizerKind::AdamW,
    OptimizerKind::Lamb => "lamb" = OptimizerKind::Lamb,
    OptimizerKind::Lars => "lars" = OptimizerKind::Lars,
});

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cost => f.write_str("cost"),
            Self::Count => f.write_str("count"),
            Self::At(starts) => {
                let starts: Vec<String> = starts.iter().map(u32::to_string).collect();
                write!(f, "at:{}", starts.join(","))
            }
        }
    }
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("at:") {
            None if text == "cost" => Ok(Self::Cost),
            None if text == "count" => Ok(Self::Count),
            None => Err(format!("'{text}' is none of cost, count, at:L,L…")),
            Some("") => Ok(Self::At(Vec::new())),
            Some(starts) => {
                let starts: Result<Vec<u32>, _> = starts.split(',').map(str::parse).collect();
                let unreadable = |_| format!("'{text}': write layers' numbers, as in at:3,7,10");
                starts.map(Self::At).map_err(unreadable)
            }
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Selective => f.write_str("selective"),
            Self::SelectiveOp => f.write_str("selective-op"),
            Self::Full => f.write_str("full"),
            Self::FullOf(layers) => write!(f, "full:{layers}"),
            Self::FullForward => f.write_str("full-forward"),
        }
    }
}

impl FromStr for Recompute {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "selective" => Ok(Self::Selective),
            "selective-op" => Ok(Self::SelectiveOp),
            "full" => Ok(Self::Full),
            "full-forward" => Ok(Self::FullForward),
            _ => match text.strip_prefix("full:").map(str::parse) {
                Some(Ok(layers)) => Ok(Self::FullOf(layers)),
                Some(Err(_)) => {
                    Err(format!("'{text}': the number of layers must be 0 to 65535, as in full:4"))
                }
                None => Err(format!(
                    "'{text}' is none of none, selective, selective-op, full, full:N, full-forward"
                )),
            },
        }
    }
}

impl fmt::Display for Sync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce => f.write_str("all-reduce"),
            Self::Hogwild => f.write_str("hogwild"),
            Self::Servers(k) => write!(f, "ps:{k}"),
            Self::Async { servers, staleness: None } => write!(f, "async-ps:{servers}"),
            Self::Async { servers, staleness: Some(bound) } => write!(f, "ssp:{servers}:{bound}"),
        }
    }
}

impl FromStr for Sync {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = |k: &str| match k.parse::<u32>() {
            Ok(k) if (1..=4096).contains(&k) => Ok(k),
            _ => Err(format!("'{text}': the number of servers must be 1 to 4096, as in ps:2")),
        };
        let bound = |s: &str| {
            let wrong =
                |_| format!("'{text}': the bound must be 0 or more iterations, as in ssp:1:4");
            s.parse::<u32>().map_err(wrong)
        };
        match text.split_once(':') {
            None if text == "all-reduce" => Ok(Self::AllReduce),
            None if text == "ps" => Ok(Self::Servers(1)),
            Some(("ps", k)) => count(k).map(Self::Servers),
            Some(("async-ps", k)) => {
                count(k).map(|servers| Self::Async { servers, staleness: None })
            }
            Some(("ssp", rest)) => match rest.split_once(':') {
                Some((k, s)) => Ok(Self::Async { servers: count(k)?, staleness: Some(bound(s)?) }),
                None => Err(format!("'{text}': missing staleness bound, as in ssp:1:4")),
            },
            None if text == "async-ps" => Ok(Self::Async { servers: 1, staleness: None }),
            None if text == "hogwild" => Ok(Self::Hogwild),
            _ => Err(format!("'{text}' is none of all-reduce, ps:K, async-ps:K, ssp:K:S, hogwild")),
        }
    }
}
