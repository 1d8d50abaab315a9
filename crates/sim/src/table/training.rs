//! Measured training runs: one row per model, layout and cluster.
//!
//! All inputs of a row come from its own columns by the same rules for all rows: no constant is
//! specific to one row or one source.

use super::csv::{self, Record};
use super::{Skipped, TableError, platform};
use crate::cluster::Cluster;
use crate::profile::Attention;
use crate::{Fit, Options, Profile, footprint, simulate};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, SummationOrder};
use paceline_plan::ids::RoleId;
use paceline_plan::lower::lower_on;
use paceline_plan::model::{
    Activation, Decoder, Experts, Latent, Model, ModelDims, ModelKind, Mtp,
};
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Recompute, Split, Strategy, Zero};
use paceline_plan::units::Bytes;
use std::str::FromStr;

/// Columns that identify a table of this kind.
pub const COLUMNS: [&str; 12] = [
    "id",
    "platform",
    "gpus",
    "layers",
    "d_model",
    "heads",
    "seq",
    "vocab",
    "tp",
    "pp",
    "dp",
    "global_batch",
];

/// Reads the rows of a table of measured training runs.
pub fn rows(text: &str, file: &str) -> Result<Vec<Row>, TableError> {
    let records = csv::parse(text, file, &COLUMNS)?;
    Ok(records.into_iter().map(|record| Row { record }).collect())
}

/// One measured run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    record: Record,
}

/// Simulation input of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Trained model.
    pub model: Model,
    /// Parallelism and training strategy.
    pub strategy: Strategy,
    /// Cluster of the run.
    pub cluster: Cluster,
    /// Software profile of the run.
    pub profile: Profile,
}

/// Simulated result of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Iteration time in seconds.
    pub predicted_s: f64,
    /// Footprint of the rank whose memory the source reports.
    pub predicted_bytes: Bytes,
    /// Memory of the fullest rank against its device's.
    pub fit: Fit,
}

impl Row {
    /// Row name.
    pub fn id(&self) -> &str {
        self.record.get("id").unwrap_or("")
    }

    /// Line of the row in its file.
    pub fn line(&self) -> usize {
        self.record.line
    }

    /// Completeness of the source: A if it states everything, B if one value is inferred, C if
    /// several are unknown.
    pub fn tier(&self) -> Option<&str> {
        self.record.get("tier")
    }

    /// Measured iteration time in seconds, from tokens per second if only that was published.
    pub fn measured_s(&self) -> Option<f64> {
        let positive = |column: &str| {
            let value: f64 = self.record.get(column)?.parse().ok()?;
            (value.is_finite() && value > 0.0).then_some(value)
        };
        positive("measured_iteration_s").or_else(|| {
            let rate = positive("measured_tokens_per_s_per_gpu")? * positive("gpus")?;
            Some(positive("global_batch")? * positive("seq")? / rate)
        })
    }

    /// Measured peak memory, if the source has it.
    pub fn measured_bytes(&self) -> Option<Bytes> {
        self.record.get("measured_peak_mem_bytes")?.parse().ok().map(Bytes)
    }

    /// Plans and simulates the run, or returns the reason that it is not possible.
    pub fn simulate(&self) -> Result<Prediction, Skipped> {
        let Request { model, strategy, cluster, profile } = self.request()?;
        let plan = lower_on(&model, &strategy, &cluster.fabric_with(&profile))
            .map_err(|problems| Skipped(problems.to_string().replace('\n', "; ")))?;
        let options = Options { profile, ..Options::default() };
        let outcome =
            simulate(&plan, &cluster, &options).map_err(|error| Skipped(error.to_string()))?;
        // Megatron-LM reports its last rank, which is on the last stage; others report the maximum.
        let last = strategy.pp.saturating_sub(1);
        let first = if self.runs_on("megatron-core") { last } else { 0 };
        let of = |role| footprint(&plan, RoleId(role), &profile, &cluster.device);
        let bytes = (first..=last).map(of);
        let predicted_bytes = bytes.max().unwrap_or_default();
        let predicted_s = outcome.iteration.0;
        Ok(Prediction { predicted_s, predicted_bytes, fit: outcome.fit })
    }

    /// Model, strategy, cluster and profile of the run.
    pub fn request(&self) -> Result<Request, Skipped> {
        let strategy = self.strategy()?;
        let axes = [strategy.tp, strategy.pp, strategy.cp, strategy.dp];
        let ranks =
            axes.into_iter().fold(1u64, |product, axis| product.saturating_mul(axis.into()));
        let gpus: u64 = self.number("gpus")?;
        if gpus != ranks {
            return Err(Skipped(format!("{gpus} GPUs are not tp·pp·cp·dp = {ranks}")));
        }
        let cluster = platform::cluster(self.word("platform")?, ranks)?;
        let profile = self.profile()?;
        Ok(Request { model: self.model()?, strategy, cluster, profile })
    }

    /// Software profile that the columns `software`, `overlap_flags` and `deterministic_flags` name.
    fn profile(&self) -> Result<Profile, Skipped> {
        let software = self.word("software")?;
        let Some(profile) = Profile::of_software(software) else {
            return Err(Skipped(format!("no profile describes the software '{software}'")));
        };
        let cut = |words: &str| self.has("overlap_flags", words);
        let attention = match self.has("deterministic_flags", "attention-backend=unfused") {
            true => Attention::Written,
            false => profile.attention,
        };
        let tp_comm_overlap = cut("tp-comm-overlap") || cut("async-TP");
        Ok(Profile { attention, tp_comm_overlap, ..profile })
    }

    /// Returns true if the run's software is of this family.
    fn runs_on(&self, family: &str) -> bool {
        self.record.get("software").is_some_and(|software| software.starts_with(family))
    }

    fn model(&self) -> Result<Model, Skipped> {
        let heads: u64 = self.number("heads")?;
        let d_model: u64 = self.number("d_model")?;
        let seq: u64 = self.number("seq")?;
        let words = self.record.get("activation_gated").unwrap_or("gelu/no");
        let (activation, kind) = match words.split(['/', ' ']).next() {
            Some("swiglu") => (Activation::SwiGlu, ModelKind::Llama),
            // Nemotron: rotary embeddings and no biases.
            Some("squared-relu") => (Activation::SquaredRelu, ModelKind::Llama),
            // gpt-oss: Megatron's name for the gate that it clamps.
            Some("quick-geglu") => (Activation::ClampedSwiGlu, ModelKind::Decoder),
            Some("relu") => (Activation::Relu, ModelKind::Gpt2),
            Some("gelu" | "unknown") if !words.contains("/yes") => {
                (Activation::Gelu, ModelKind::Gpt2)
            }
            _ => return Err(Skipped(format!("activation '{words}' cannot be planned"))),
        };
        let (experts, latent) = (self.experts()?, self.latent()?);
        let window = self.window()?;
        let kind = match (kind, experts.is_none(), window) {
            (ModelKind::Decoder, _, _) | (_, _, Some(_)) => ModelKind::Decoder,
            (kind, true, None) => kind,
            (_, false, None) => ModelKind::Moe,
        };
        if kind == ModelKind::Decoder && !latent.is_none() {
            return Err(Skipped("windows with latent attention cannot be planned".into()));
        }
        let learned = kind == ModelKind::Gpt2;
        let head_dim = self.optional("head_dim")?.unwrap_or(d_model / heads.max(1));
        let kv_heads = if latent.is_none() { self.optional("kv_heads")? } else { None };
        let shape = ModelDims {
            kind,
            layers: self.number("layers")?,
            d_model,
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim: if latent.is_none() {
                head_dim
            } else {
                self.mla("qk_nope")? + latent.qk_rope
            },
            ffn: self.optional("ffn")?.unwrap_or(d_model.saturating_mul(4)),
            seq,
            max_positions: if learned { seq } else { 0 },
            vocab: self.vocabulary()?,
            tied: self.has("tied_embeddings", "True"),
            activation,
            norm_eps: 1e-5,
            rope_theta: if learned { 0.0 } else { 500_000.0 },
            // Property of the model family, not stated in the row.
            qk_norm: kind == ModelKind::Moe && latent.is_none() && self.has("model", "Qwen3"),
            experts,
            latent,
            mtp: match self.optional("mtp_layers")?.unwrap_or(0) {
                0 => Mtp::default(),
                depth => Mtp { depth, weight: Mtp::WEIGHT },
            },
        };
        let described = if kind == ModelKind::Decoder {
            let biased = self.has("notes", "biases");
            let (window, attention) = window.unwrap_or((0, "f"));
            let decoder = Decoder {
                qkv_bias: biased,
                attention_bias: biased,
                ffn_bias: biased,
                router_bias: biased && !experts.is_none(),
                sinks: self.has("notes", "attention sinks"),
                window,
                attention: attention.into(),
                ..Decoder::default()
            };
            Model::from_decoder(self.id(), shape, decoder)
        } else {
            Model::new(self.id(), shape)
        };
        described.map_err(|errors| Skipped(errors.to_string().replace('\n', "; ")))
    }

    /// Window of attention and the letters of the layers that have it: "128 on every second layer".
    fn window(&self) -> Result<Option<(u64, &'static str)>, Skipped> {
        let Some(words) = self.record.get("window") else { return Ok(None) };
        let (size, layers) = words.split_once(' ').unwrap_or((words, ""));
        match (size.parse(), layers) {
            (Ok(0 | 1), _) => Ok(None),
            (Ok(size), "") => Ok(Some((size, "s"))),
            (Ok(size), "on every second layer") => Ok(Some((size, "sf"))),
            (_, _) => Err(Skipped(format!("window '{words}' cannot be planned"))),
        }
    }

    /// Experts, if the run had any. None of these rows limits expert capacity, and the balancing
    /// loss has no measurable cost.
    fn experts(&self) -> Result<Experts, Skipped> {
        if !self.number::<u64>("experts").is_ok_and(|experts| experts > 1) {
            return Ok(Experts::default());
        }
        let or_none = |column: &str| Ok(self.optional(column)?.unwrap_or(0));
        Ok(Experts {
            experts: self.number("experts")?,
            topk: self.number("topk")?,
            shared_experts: or_none("shared_experts")?,
            dense_layers: or_none("dense_layers")?,
            dense_ffn: or_none("dense_ffn")?,
            route_scale: 1.0,
            ..Experts::default()
        })
    }

    /// Dimensions of latent attention, if the run used it.
    fn latent(&self) -> Result<Latent, Skipped> {
        if !self.has("attention", "mla") {
            return Ok(Latent::default());
        }
        Ok(Latent {
            q_lora: self.mla("q_lora")?,
            kv_lora: self.mla("kv_lora")?,
            qk_rope: self.mla("qk_rope")?,
            v_dim: self.mla("v")?,
        })
    }

    /// Reads one value of a list like `mla:q_lora=1536;kv_lora=512`.
    fn mla(&self, name: &str) -> Result<u64, Skipped> {
        let words = self.record.get("attention").unwrap_or("").trim_start_matches("mla:");
        let mut pairs = words.split(';').filter_map(|pair| pair.split_once('='));
        let value = pairs.find(|(key, _)| *key == name).and_then(|(_, value)| value.parse().ok());
        value.ok_or_else(|| Skipped(format!("attention '{words}' lacks {name}")))
    }

    /// Padded vocabulary of the run: Megatron-LM pads to a multiple of 128 on each tensor-parallel
    /// rank.
    fn vocabulary(&self) -> Result<u64, Skipped> {
        let words: u64 = self.number("vocab")?;
        let tp: u64 = self.number("tp")?;
        let unit = if self.runs_on("megatron") { tp.saturating_mul(128).max(1) } else { 1 };
        Ok(words.checked_next_multiple_of(unit).unwrap_or(words))
    }

    fn strategy(&self) -> Result<Strategy, Skipped> {
        let (tp, pp): (u32, u32) = (self.number("tp")?, self.number("pp")?);
        let dp = self.number("dp")?;
        let chunks: Option<u16> = self.optional("vpp")?;
        let dtype = self.dtype()?;
        let schedule = match chunks {
            Some(chunks) if chunks > 1 && pp > 1 => ScheduleKind::Interleaved { chunks },
            Some(_) | None => ScheduleKind::OneFOneB,
        };
        Ok(Strategy {
            dp,
            cp: self.optional("cp")?.unwrap_or(1),
            tp,
            pp,
            ep: self.optional("ep")?.unwrap_or(1),
            etp: self.optional("etp")?.unwrap_or(1),
            sp: tp > 1 && self.has("sp", "True"),
            zero: self.zero(),
            schedule,
            global_batch: self.number("global_batch")?,
            micro_batch: self.number("micro_batch")?,
            seq: self.number("seq")?,
            recompute: self.recompute()?,
            split: Split::Count,
            dtype,
            grad_dtype: self.grad_dtype(dtype),
            order: SummationOrder::Free,
            leaves: dp,
            // NCCL's choice for large vectors.
            collective: Algorithm::Ring,
            overlap: self.overlaps(),
            ..Strategy::default()
        })
    }

    fn dtype(&self) -> Result<DType, Skipped> {
        let words = self.word("precision")?.to_lowercase();
        for (word, dtype) in [("nvfp4", DType::Nvfp4), ("mxfp4", DType::Mxfp4)] {
            if words.contains(word) {
                return Ok(dtype);
            }
        }
        if words.contains("fp8") || words.contains("float8") {
            return Ok(DType::Fp8);
        }
        match words.split([' ', ';', ',']).next() {
            Some("bf16" | "amp_bf16") => Ok(DType::Bf16),
            Some("fp16") => Ok(DType::F16),
            Some("fp32" | "tf32") => Ok(DType::F32),
            _ => Err(Skipped(format!("precision '{words}' cannot be planned"))),
        }
    }

    /// Gradient dtype if the row states it; otherwise that of the activations.
    fn grad_dtype(&self, dtype: DType) -> DType {
        let says = |words: &str| self.has("precision", words) || self.has("notes", words);
        match dtype {
            _ if says("fp32 grad") => DType::F32,
            // Composer: parameters in the dtype of autocast, reductions in f32. "PURE" has one dtype.
            _ if says("FSDP mixed DEFAULT") => DType::F32,
            DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 | DType::Bf16 => DType::Bf16,
            DType::F16 => DType::F16,
            DType::F32 | DType::U32 | DType::U8 => DType::F32,
        }
    }

    fn zero(&self) -> Zero {
        let says = |words: &str| self.has("zero_dist_optimizer", words);
        if says("ZeRO-3") {
            Zero::Parameters
        } else if says("FSDP2 (ZeRO-2-like)") {
            // Between the microbatches of a pipeline, FSDP2 accumulates gradients unsharded.
            Zero::Optimizer
        } else if says("ZeRO-2") {
            Zero::Gradients
        } else if says("ZeRO-1") || says("dist-optimizer") {
            Zero::Optimizer
        } else {
            Zero::None
        }
    }

    fn recompute(&self) -> Result<Recompute, Skipped> {
        let words = self.record.get("recompute").unwrap_or("none");
        if words.starts_with("none") {
            Ok(Recompute::None)
        } else if words.starts_with("full") {
            // PyTorch since 2.1 stops once nothing more is needed; Megatron-LM recomputes whole layers.
            let stops = self.runs_on("torchtitan");
            Ok(match layers(words) {
                Some(layers) => Recompute::FullOf(layers),
                None if stops => Recompute::Full,
                None => Recompute::FullForward,
            })
        } else if words.starts_with("selective-op")
            || words.starts_with("selective") && self.runs_on("torchtitan")
        {
            Ok(Recompute::SelectiveOp)
        } else if words.starts_with("selective") {
            Ok(Recompute::Selective)
        } else {
            Err(Skipped(format!("recomputation is '{words}'")))
        }
    }

    fn overlaps(&self) -> bool {
        let says = |words: &str| self.has("overlap_flags", words);
        !says("NOT overlapped") && (says("overlap") || says("prefetch"))
    }

    fn has(&self, column: &str, words: &str) -> bool {
        self.record.get(column).is_some_and(|text| text.contains(words))
    }

    fn word(&self, column: &str) -> Result<&str, Skipped> {
        self.record.get(column).ok_or_else(|| Skipped(format!("{column} is not stated")))
    }

    fn number<T: FromStr>(&self, column: &str) -> Result<T, Skipped> {
        let text = self.word(column)?;
        text.parse()
            .map_err(|_| Skipped(format!("{column} '{text}' is not a number that can be used")))
    }

    fn optional<T: FromStr>(&self, column: &str) -> Result<Option<T>, Skipped> {
        if self.record.get(column).is_none() {
            return Ok(None);
        }
        self.number(column).map(Some)
    }
}

/// Returns the number before the word "layers".
fn layers(words: &str) -> Option<u16> {
    let mut words = words.split_whitespace().rev();
    words.find(|word| word.starts_with("layers"))?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests;
