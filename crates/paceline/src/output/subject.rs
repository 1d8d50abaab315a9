//! Fields that say what a JSON answer is about: model, strategy, cluster and its capacity.

use paceline_plan::mesh::AxisOrder;
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use paceline_sim::cluster::Cluster;
use serde::Serialize;

/// Model, strategy and cluster of an answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Subject {
    model: String,
    strategy: StrategyRecord,
    #[serde(flatten)]
    place: Option<Place>,
}

/// Cluster of an answer, and the memory of a device.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Place {
    cluster: String,
    devices: u64,
    /// Memory of a device, of the smallest if they differ.
    capacity_bytes: u64,
}

impl Subject {
    pub(crate) fn new(model: &Model, strategy: &Strategy, cluster: Option<&Cluster>) -> Self {
        Self::named(model.name(), strategy, cluster)
    }

    /// The same for a model of this name.
    pub(crate) fn named(model: &str, strategy: &Strategy, cluster: Option<&Cluster>) -> Self {
        let strategy = StrategyRecord::from(strategy);
        Self { model: model.to_owned(), strategy, place: cluster.map(Place::from) }
    }
}

impl From<&Cluster> for Place {
    fn from(cluster: &Cluster) -> Self {
        let least = cluster.kinds().map(|device| device.memory.0).min();
        Self {
            cluster: cluster.name.clone(),
            devices: cluster.devices(),
            capacity_bytes: least.unwrap_or(cluster.device.memory.0),
        }
    }
}

/// A strategy by its flags, with underscores: the keys and values work in a run file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StrategyRecord {
    pub dp: u32,
    pub tp: u32,
    pub pp: u32,
    pub cp: u32,
    pub ep: u32,
    pub etp: u32,
    pub axis_order: String,
    pub sp: bool,
    pub zero: u8,
    pub schedule: String,
    pub global_batch: u64,
    pub micro_batch: u64,
    pub seq: u64,
    pub recompute: String,
    pub split: String,
    pub dtype: String,
    pub grad_dtype: String,
    pub order: String,
    pub leaves: u32,
    pub sync: String,
    pub collective: String,
    pub bucket_mib: u64,
    pub no_overlap: bool,
    pub optimizer: String,
    pub offload: String,
    pub compress: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_steps: Option<u32>,
}

impl From<&Strategy> for StrategyRecord {
    fn from(s: &Strategy) -> Self {
        Self {
            dp: s.dp,
            tp: s.tp,
            pp: s.pp,
            cp: s.cp,
            ep: s.ep,
            etp: s.etp,
            axis_order: s.axis_order.to_string(),
            sp: s.sp,
            zero: s.zero.stage(),
            schedule: s.schedule.to_string(),
            global_batch: s.global_batch,
            micro_batch: s.micro_batch,
            seq: s.seq,
            recompute: s.recompute.to_string(),
            split: s.split.to_string(),
            dtype: s.dtype.to_string(),
            grad_dtype: s.grad_dtype.to_string(),
            order: s.order.to_string(),
            leaves: s.leaves,
            sync: s.sync.to_string(),
            collective: s.collective.to_string(),
            bucket_mib: s.bucket.0 >> 20,
            no_overlap: !s.overlap,
            optimizer: s.optimizer.to_string(),
            offload: s.offload.to_string(),
            compress: s.compress.to_string(),
            local_steps: s.local.map(|local| local.steps),
        }
    }
}

impl StrategyRecord {
    /// All flags whose values differ from the defaults of `paceline simulate`, for a command line.
    pub(crate) fn command(&self) -> String {
        let mut flags: Vec<String> = Vec::new();
        let axes = [
            ("--dp", self.dp),
            ("--tp", self.tp),
            ("--pp", self.pp),
            ("--cp", self.cp),
            ("--ep", self.ep),
            ("--etp", self.etp),
        ];
        flags.extend(axes.iter().filter(|axis| axis.1 > 1).map(|(flag, n)| format!("{flag} {n}")));
        if self.sp {
            flags.push("--sp".to_string());
        }
        flags.push(format!("--global-batch {}", self.global_batch));
        flags.push(format!("--micro-batch {}", self.micro_batch));
        flags.push(format!("--seq {}", self.seq));
        flags.push(format!("--dtype {}", self.dtype));
        let zero = self.zero.to_string();
        let bucket = self.bucket_mib.to_string();
        let others = [
            ("--zero", &zero, "0"),
            ("--schedule", &self.schedule, "1f1b"),
            ("--recompute", &self.recompute, "none"),
            ("--split", &self.split, "cost"),
            ("--grad-dtype", &self.grad_dtype, "f32"),
            ("--collective", &self.collective, "auto"),
            ("--bucket-mib", &bucket, "25"),
            ("--optimizer", &self.optimizer, "adamw"),
            ("--offload", &self.offload, "none"),
        ];
        let changed = others.iter().filter(|(_, value, usual)| value != usual);
        if self.axis_order != AxisOrder::default().to_string() {
            flags.push(format!("--axis-order {}", self.axis_order));
        }
        flags.extend(changed.map(|(flag, value, _)| format!("{flag} {value}")));
        if self.no_overlap {
            flags.push("--no-overlap".to_string());
        }
        flags.join(" ")
    }

    /// The layout as flags, without those that have their defaults.
    pub(crate) fn flags(&self) -> String {
        let mut flags = Vec::new();
        let axes = [
            ("--dp", self.dp),
            ("--tp", self.tp),
            ("--pp", self.pp),
            ("--cp", self.cp),
            ("--ep", self.ep),
            ("--etp", self.etp),
        ];
        for (flag, size) in axes {
            if size > 1 {
                flags.push(format!("{flag} {size}"));
            }
        }
        if self.axis_order != AxisOrder::default().to_string() {
            flags.push(format!("--axis-order {}", self.axis_order));
        }
        if self.sp {
            flags.push("--sp".to_string());
        }
        if self.zero > 0 {
            flags.push(format!("--zero {}", self.zero));
        }
        if self.pp > 1 {
            flags.push(format!("--schedule {}", self.schedule));
        }
        flags.push(format!("--micro-batch {}", self.micro_batch));
        if self.recompute != "none" {
            flags.push(format!("--recompute {}", self.recompute));
        }
        if self.offload != "none" {
            flags.push(format!("--offload {}", self.offload));
        }
        flags.join(" ")
    }
}
