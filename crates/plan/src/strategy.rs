//! The choices a user makes: how the world is cut, in what order work is done, with which types.

use crate::collective::{Algorithm, Order};
use crate::compress::Compression;
use crate::dtype::DType;
use crate::mesh::Mesh;
use crate::outer::Local;
use crate::program::StepPhase;
use crate::schedule::ScheduleKind;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Everything that, with a model, determines a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Strategy {
    /// Data-parallel replicas.
    pub dp: u32,
    /// Tensor-parallel parts.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Context-parallel parts.
    pub cp: u32,
    /// Expert-parallel parts.
    pub ep: u32,
    /// Tensor-parallel parts of an expert.
    pub etp: u32,
    /// Whether activations outside the tensor-parallel matrices are cut along tokens.
    pub sp: bool,
    /// What is dealt out among replicas.
    pub zero: Zero,
    /// The pipeline schedule.
    pub schedule: ScheduleKind,
    /// Samples of one iteration.
    pub global_batch: u64,
    /// Samples of one microbatch on one replica.
    pub micro_batch: u64,
    /// Tokens of one sample.
    pub seq: u64,
    /// What is computed again instead of kept.
    pub recompute: Recompute,
    /// How layers are dealt out to pipeline stages.
    #[serde(default)]
    pub split: Split,
    /// Whether batch norms are over the microbatches of all replicas together.
    #[serde(default)]
    pub sync_batch_norm: bool,
    /// How many times its equal share of a rank's tokens another rank's experts have room for, where
    /// experts take all that come. More than that ends a run.
    #[serde(default = "equal_share")]
    pub expert_room: f64,
    /// Who holds what of the tables of a recommendation model.
    #[serde(default)]
    pub tables: Tables,
    /// Type of weights and activations.
    pub dtype: DType,
    /// Type of gradients, in memory and on the wire.
    pub grad_dtype: DType,
    /// Whether the order of summation is fixed.
    pub order: Order,
    /// Leaves of the summation tree.
    pub leaves: u32,
    /// How replicas agree.
    pub sync: Sync,
    /// Algorithm of the gradients' reduction.
    pub collective: Algorithm,
    /// Gradients are reduced in buckets of at least this size.
    pub bucket: Bytes,
    /// Whether communication may run beside compute.
    pub overlap: bool,
    /// What updates the weights.
    pub optimizer: OptimizerKind,
    /// What rests outside the ranks' memory.
    #[serde(default)]
    pub offload: Offload,
    /// Where that is.
    #[serde(default)]
    pub store: Store,
    /// What gradients are turned into on their way between replicas.
    #[serde(default)]
    pub compress: Compression,
    /// First iterations in which they go as they are; if nothing is said, as many as the optimizer needs, which
    /// is a share of the run (see [`Strategy::warm_up`]). So a plan holds for runs of any length.
    #[serde(default)]
    pub compress_warmup: Option<u32>,
    /// How replicas train apart, if they do.
    #[serde(default)]
    pub local: Option<Local>,
}

/// Room for what comes if all experts are equally liked.
fn equal_share() -> f64 {
    1.0
}

impl Default for Strategy {
    /// One rank, one sample, nothing clever.
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            etp: 1,
            sp: false,
            zero: Zero::None,
            schedule: ScheduleKind::OneFOneB,
            global_batch: 1,
            micro_batch: 1,
            seq: 1,
            recompute: Recompute::None,
            split: Split::Cost,
            sync_batch_norm: false,
            expert_room: equal_share(),
            tables: Tables::Auto,
            dtype: DType::F32,
            grad_dtype: DType::F32,
            order: Order::Canonical,
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
    /// The grid of ranks that the strategy asks for.
    pub fn mesh(&self) -> Mesh {
        Mesh {
            pp: self.pp,
            dp: self.dp,
            cp: self.cp,
            tp: self.tp,
            ep: self.ep,
            etp: self.etp,
            servers: self.sync.servers(),
        }
    }

    /// Whether experts are held by other ranks than the rest of a layer, or their gradients summed over
    /// others.
    pub fn experts_apart(&self) -> bool {
        self.ep > 1 || self.etp > 1 || self.tp > 1
    }

    /// Microbatches of one replica in one iteration.
    pub fn microbatches(&self) -> u32 {
        let samples = self.micro_batch.saturating_mul(u64::from(self.dp));
        u32::try_from(self.global_batch / samples.max(1)).unwrap_or(u32::MAX)
    }

    /// Tokens whose mean loss an update goes down: all of an iteration's, or those of one replica whose
    /// gradients are applied by themselves.
    pub fn tokens_of_update(&self) -> u64 {
        let updates = match (self.sync.is_async(), self.local) {
            (_, Some(local)) => u64::from(self.dp).saturating_mul(local.steps.into()),
            (true, None) => self.dp.into(),
            (false, None) => 1,
        };
        self.tokens() / updates.max(1)
    }

    /// Tokens of one iteration.
    pub fn tokens(&self) -> u64 {
        self.global_batch.saturating_mul(self.seq)
    }

    /// Leaves of the summation tree that one replica forms.
    pub fn local_leaves(&self) -> u32 {
        match self.order {
            Order::Canonical => (self.leaves / self.dp).max(1),
            Order::Free => 1,
        }
    }

    /// The type in which activations are stored: fp8 is for products only.
    pub fn activation_dtype(&self) -> DType {
        match self.dtype {
            DType::Fp8 => DType::Bf16,
            other @ (DType::F32 | DType::Bf16 | DType::F16 | DType::U32 | DType::U8) => other,
        }
    }
}

/// What ZeRO deals out among replicas (Rajbhandari et al., arXiv 1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Zero {
    /// Nothing: every replica has all.
    None,
    /// Optimizer state (stage 1).
    Optimizer,
    /// Gradients too (stage 2).
    Gradients,
    /// Parameters too (stage 3).
    Parameters,
}

impl Zero {
    /// The stage's number.
    pub const fn stage(self) -> u8 {
        self as u8
    }

    /// From the stage's number.
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

/// What is computed again in the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: all activations are kept.
    None,
    /// Attention's core, which is cheap to compute and large to keep (Korthikanti et al., arXiv 2205.05198).
    Selective,
    /// Everything but attention and about half of the products' results: those of the query, key and
    /// value matrix are kept, those of the output matrix only where tensor parallelism exchanges
    /// them, and those into the feed-forward part in every second layer. torchtitan's `selective`
    /// with option `op` keeps as much: it counts products one by one and keeps every second, gate
    /// and up being two of them, and all that a reduce_scatter yields.
    SelectiveOp,
    /// Every layer, from its input, as far as the backward pass reads what comes out.
    Full,
    /// The same for the first so many layers of each virtual stage only.
    FullOf(u16),
    /// Every layer, from its input to its very end, although nothing reads the last product and the
    /// exchange behind it: what software does that runs the forward pass again as a whole.
    FullForward,
}

/// What is equal among pipeline stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Their cost, as nearly as whole layers allow, embedding and head included.
    #[default]
    Cost,
    /// Their number of blocks; embedding and head come on top of the first and the last. Where the
    /// blocks cannot be dealt out equally but could if embedding and head counted as two more, they
    /// do. This is what Megatron-LM and torchtitan do.
    Count,
    /// Nothing is said: the stages behind the first begin at these layers, counted from 0 with the
    /// embedding. A profile yields such a list.
    At(Vec<u32>),
}

/// What a rank keeps in a store outside its memory, and brings when it is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing.
    #[default]
    None,
    /// Master weights and moments, except while their bucket is updated (Ren et al., arXiv 2101.06840,
    /// with the step where the weights are).
    Optimizer,
    /// What blocks keep from forward to backward pass (Rhu et al., arXiv 1602.08124).
    Activations,
    /// Both.
    All,
}

impl Offload {
    /// From the least that is moved to the most.
    pub const ALL: [Self; 4] = [Self::None, Self::Optimizer, Self::Activations, Self::All];

    /// Whether the optimizer's state rests in the store.
    pub const fn optimizer(self) -> bool {
        matches!(self, Self::Optimizer | Self::All)
    }

    /// Whether activations do.
    pub const fn activations(self) -> bool {
        matches!(self, Self::Activations | Self::All)
    }
}

/// Where offloaded bytes rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// A file.
    #[default]
    Disk,
    /// The host's memory, beside the device's.
    Host,
}

/// Who holds what of the tables of a recommendation model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tables {
    /// Whole tables on different replicas.
    #[default]
    Auto,
    /// Every replica holds all of them.
    Replicate,
    /// Every replica holds some of them whole.
    Table,
    /// Every replica holds some rows of each.
    Row,
}

impl Tables {
    /// What is done where nothing is asked for.
    pub const fn settled(self) -> Self {
        match self {
            Self::Auto => Self::Table,
            other @ (Self::Replicate | Self::Table | Self::Row) => other,
        }
    }
}

/// How replicas come to the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sync {
    /// They reduce gradients among themselves.
    AllReduce,
    /// They send gradients to so many servers, which update and send weights back.
    Servers(u32),
    /// The same, but nobody waits for anybody: servers apply each replica's gradients as they come.
    Async {
        /// How many servers.
        servers: u32,
        /// How many iterations the fastest replica may be ahead of the slowest; none for any number.
        staleness: Option<u32>,
    },
    /// Threads of one process that share one set of weights and update it without locks (Recht et al.,
    /// NIPS 2011).
    Hogwild,
}

impl Sync {
    /// Ranks beside the mesh.
    pub const fn servers(self) -> u32 {
        match self {
            Self::AllReduce | Self::Hogwild => 0,
            Self::Servers(servers) | Self::Async { servers, .. } => servers,
        }
    }

    /// Whether replicas do not wait for each other.
    pub const fn is_async(self) -> bool {
        match self {
            Self::AllReduce | Self::Servers(_) => false,
            Self::Async { .. } | Self::Hogwild => true,
        }
    }
}

/// The rule that updates weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Plain gradient descent.
    Sgd,
    /// With momentum.
    Momentum,
    /// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101).
    AdamW,
    /// Adam's direction, for each tensor as long as the tensor itself, for large batches (You et al.,
    /// arXiv 1904.00962, algorithm 2).
    Lamb,
    /// Momentum, for each tensor at a rate that follows its length, for large batches of images (You,
    /// Gitman and Ginsburg, arXiv 1708.03888, algorithm 1).
    Lars,
}

impl OptimizerKind {
    /// f32 values it keeps per parameter, beside a master copy of the weights.
    pub const fn moments(self) -> usize {
        match self {
            Self::Sgd => 0,
            Self::Momentum | Self::Lars => 1,
            Self::AdamW | Self::Lamb => 2,
        }
    }

    /// What an update consists of, in order.
    pub const fn phases(self) -> &'static [StepPhase] {
        if self.gauges() { &[StepPhase::Gauge, StepPhase::Apply] } else { &[StepPhase::Apply] }
    }

    /// The phase of an update that moves the moments on: LAMB's direction is one of them, and must be
    /// known before its length is.
    pub const fn moves_moments_in(self) -> StepPhase {
        match self {
            Self::Lamb => StepPhase::Gauge,
            Self::Sgd | Self::Momentum | Self::AdamW | Self::Lars => StepPhase::Apply,
        }
    }

    /// Whether a step must know how long a whole tensor and its direction are, which no rank sees
    /// that holds a part of it.
    pub const fn gauges(self) -> bool {
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
words!(Tables {
    Tables::Auto => "auto" = Tables::Auto,
    Tables::Replicate => "replicate" = Tables::Replicate,
    Tables::Table => "table" = Tables::Table,
    Tables::Row => "row" = Tables::Row,
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
                None => Err(format!("'{text}': say how far replicas may be apart, as in ssp:1:4")),
            },
            None if text == "async-ps" => Ok(Self::Async { servers: 1, staleness: None }),
            None if text == "hogwild" => Ok(Self::Hogwild),
            _ => Err(format!("'{text}' is none of all-reduce, ps:K, async-ps:K, ssp:K:S, hogwild")),
        }
    }
}
