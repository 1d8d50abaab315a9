//! Values that a search may use on each axis.

use paceline_plan::collective::Algorithm;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, Recompute, Split, Strategy, Zero};
use paceline_plan::units::Bytes;

/// Admitted values of one axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice<T> {
    /// The only values; `None`: all that the search knows.
    pub only: Option<Vec<T>>,
    /// Values that are excluded.
    pub never: Vec<T>,
}

impl<T> Default for Choice<T> {
    fn default() -> Self {
        Self { only: None, never: Vec::new() }
    }
}

impl<T: PartialEq + Clone> Choice<T> {
    /// Exactly one value.
    pub fn pin(value: T) -> Self {
        Self { only: Some(vec![value]), never: Vec::new() }
    }

    /// Returns true if a value may be used.
    pub fn admits(&self, value: &T) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(value)) && !self.never.contains(value)
    }

    /// Returns true if all values may be used.
    pub fn is_free(&self) -> bool {
        self.only.is_none() && self.never.is_empty()
    }

    /// Admitted values of an axis on which the search would try the `usual` ones.
    pub fn of(&self, usual: impl IntoIterator<Item = T>) -> Vec<T> {
        let candidates: Vec<T> = match &self.only {
            Some(only) => only.clone(),
            None => usual.into_iter().collect(),
        };
        candidates.into_iter().filter(|value| !self.never.contains(value)).collect()
    }
}

/// Admitted values of all axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    /// Tensor-parallel degree.
    pub tp: Choice<u32>,
    /// Context-parallel degree.
    pub cp: Choice<u32>,
    /// Pipeline ranks.
    pub pp: Choice<u32>,
    /// Replicas.
    pub dp: Choice<u32>,
    /// Expert-parallel degree.
    pub ep: Choice<u32>,
    /// Tensor-parallel degree of an expert.
    pub etp: Choice<u32>,
    /// Samples per microbatch.
    pub micro_batch: Choice<u64>,
    /// Sequence parallelism.
    pub sp: Choice<bool>,
    /// ZeRO stage.
    pub zero: Choice<Zero>,
    /// Pipeline schedule.
    pub schedule: Choice<ScheduleKind>,
    /// Recomputation of activations.
    pub recompute: Choice<Recompute>,
    /// Split into stages.
    pub split: Choice<Split>,
    /// Offloaded state.
    pub offload: Choice<Offload>,
    /// Bucket size.
    pub bucket: Choice<Bytes>,
    /// Algorithm of the gradient reduction.
    pub collective: Choice<Algorithm>,
    /// Overlap of communication with compute.
    pub overlap: Choice<bool>,
}

impl Pins {
    /// Flags of the axes that are pinned or restricted.
    pub fn flags(&self) -> Vec<&'static str> {
        let all = [
            ("--tp", self.tp.is_free()),
            ("--cp", self.cp.is_free()),
            ("--pp", self.pp.is_free()),
            ("--dp", self.dp.is_free()),
            ("--ep", self.ep.is_free()),
            ("--etp", self.etp.is_free()),
            ("--micro-batch", self.micro_batch.is_free()),
            ("--sp", self.sp.is_free()),
            ("--zero", self.zero.is_free()),
            ("--schedule", self.schedule.is_free()),
            ("--recompute", self.recompute.is_free()),
            ("--split", self.split.is_free()),
            ("--offload", self.offload.is_free()),
            ("--bucket-mib", self.bucket.is_free()),
            ("--collective", self.collective.is_free()),
            ("--no-overlap", self.overlap.is_free()),
        ];
        all.into_iter().filter(|(_, free)| !free).map(|(flag, _)| flag).collect()
    }

    /// Returns true if a strategy has only admitted values.
    pub fn admit(&self, s: &Strategy) -> bool {
        self.tp.admits(&s.tp)
            && self.cp.admits(&s.cp)
            && self.pp.admits(&s.pp)
            && self.dp.admits(&s.dp)
            && self.ep.admits(&s.ep)
            && self.etp.admits(&s.etp)
            && self.micro_batch.admits(&s.micro_batch)
            && self.sp.admits(&s.sp)
            && self.zero.admits(&s.zero)
            && self.schedule.admits(&s.schedule)
            && self.recompute.admits(&s.recompute)
            && self.split.admits(&s.split)
            && self.offload.admits(&s.offload)
            && self.bucket.admits(&s.bucket)
            && self.collective.admits(&s.collective)
            && self.overlap.admits(&s.overlap)
    }

    /// The same pins with one axis released.
    pub fn without(&self, flag: &str) -> Self {
        let mut pins = self.clone();
        match flag {
            "--tp" => pins.tp = Choice::default(),
            "--cp" => pins.cp = Choice::default(),
            "--pp" => pins.pp = Choice::default(),
            "--dp" => pins.dp = Choice::default(),
            "--ep" => pins.ep = Choice::default(),
            "--etp" => pins.etp = Choice::default(),
            "--micro-batch" => pins.micro_batch = Choice::default(),
            "--sp" => pins.sp = Choice::default(),
            "--zero" => pins.zero = Choice::default(),
            "--schedule" => pins.schedule = Choice::default(),
            "--recompute" => pins.recompute = Choice::default(),
            "--split" => pins.split = Choice::default(),
            "--offload" => pins.offload = Choice::default(),
            "--bucket-mib" => pins.bucket = Choice::default(),
            "--collective" => pins.collective = Choice::default(),
            "--no-overlap" => pins.overlap = Choice::default(),
            _ => {}
        }
        pins
    }
}
