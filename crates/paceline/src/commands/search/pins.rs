//! Flags that pin or exclude values of the axes.

use crate::flags::{Problems, word};
use clap::Args;
use paceline_plan::collective::{Algorithm, Fabric};
use paceline_plan::ids::Rank;
use paceline_plan::schedule::ScheduleKind;
use paceline_plan::strategy::{Offload, Recompute, Split, Zero};
use paceline_plan::units::Bytes;
use paceline_search::{Choice, Pins};
use std::fmt::Display;
use std::str::FromStr;

/// Admitted values of each axis: a value, a list (`1,2,4`), or exclusions (`^1`).
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Pins: a value, a list 1,2,4, or exclusions ^1 [default: all]")]
pub(crate) struct PinFlags {
    /// Tensor-parallel degrees
    #[arg(long, value_name = "N,…")]
    tp: Option<String>,
    /// Context-parallel degrees
    #[arg(long, value_name = "N,…")]
    cp: Option<String>,
    /// Numbers of pipeline ranks
    #[arg(long, value_name = "N,…")]
    pp: Option<String>,
    /// Numbers of replicas
    #[arg(long, value_name = "N,…")]
    dp: Option<String>,
    /// Expert-parallel degrees
    #[arg(long, value_name = "N,…")]
    ep: Option<String>,
    /// Tensor-parallel degrees of experts
    #[arg(long, value_name = "N,…")]
    etp: Option<String>,
    /// Samples per microbatch
    #[arg(long, value_name = "N,…")]
    micro_batch: Option<String>,
    /// Sequence parallelism: true or false
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    sp: Option<String>,
    /// ZeRO stages
    #[arg(long, value_name = "0|1|2|3,…")]
    zero: Option<String>,
    /// Pipeline schedules; pipedream, which changes training, only if named
    #[arg(long, value_name = "KIND,…")]
    schedule: Option<String>,
    /// Recomputation of activations
    #[arg(long, value_name = "WHAT,…")]
    recompute: Option<String>,
    /// Boundaries of pipeline stages: cost, count or at:L,L… [default: also equal times]
    #[arg(long, value_name = "HOW")]
    split: Option<String>,
    /// Offloaded state
    #[arg(long, value_name = "WHAT,…")]
    offload: Option<String>,
    /// Minimum sizes of a gradient bucket, in MiB
    #[arg(long, value_name = "N,…")]
    bucket_mib: Option<String>,
    /// Algorithms of the gradient reduction
    #[arg(long, value_name = "ALGORITHM,…")]
    collective: Option<String>,
    /// Only strategies that do not overlap communication with compute
    #[arg(long)]
    no_overlap: bool,
}

impl PinFlags {
    /// Checks every flag.
    pub(super) fn check(&self, problems: &mut Problems) -> Pins {
        let mut pins = Pins {
            tp: choice("--tp", &self.tp, problems),
            cp: choice("--cp", &self.cp, problems),
            pp: choice("--pp", &self.pp, problems),
            dp: choice("--dp", &self.dp, problems),
            ep: choice("--ep", &self.ep, problems),
            etp: choice("--etp", &self.etp, problems),
            micro_batch: choice("--micro-batch", &self.micro_batch, problems),
            sp: choice("--sp", &self.sp, problems),
            zero: choice::<Zero>("--zero", &self.zero, problems),
            schedule: choice::<ScheduleKind>("--schedule", &self.schedule, problems),
            recompute: choice::<Recompute>("--recompute", &self.recompute, problems),
            offload: choice::<Offload>("--offload", &self.offload, problems),
            collective: choice::<Algorithm>("--collective", &self.collective, problems),
            ..Pins::default()
        };
        if let Some(split) = word::<Split>("--split", &self.split, problems) {
            pins.split = Choice::pin(split);
        }
        let mib: Choice<u64> = choice("--bucket-mib", &self.bucket_mib, problems);
        let bytes =
            |all: Vec<u64>| all.into_iter().map(|mib| Bytes(mib.min(1 << 30) << 20)).collect();
        pins.bucket = Choice { only: mib.only.map(bytes), never: bytes(mib.never) };
        if self.no_overlap {
            pins.overlap = Choice::pin(false);
        }
        pins
    }
}

/// Resolves the open parameters of named algorithms by the location of the first rank's replicas.
pub(super) fn resolved(pins: &mut Pins, fabric: &Fabric, problems: &mut Problems) {
    for algorithm in pins.collective.only.iter_mut().flatten() {
        let members: Vec<Rank> = (0..u32::try_from(fabric.host).unwrap_or(1)).map(Rank).collect();
        match fabric.resolve(*algorithm, &members) {
            Ok(known) => *algorithm = known,
            Err(error) => problems.add("--collective", error.to_string()),
        }
    }
}

/// Parses a value, a list of values, or exclusions.
fn choice<T>(flag: &str, text: &Option<String>, problems: &mut Problems) -> Choice<T>
where
    T: FromStr + PartialEq + Clone,
    T::Err: Display,
{
    let mut choice = Choice::default();
    let Some(text) = text else { return choice };
    for part in text.split(',') {
        let (excluded, value) = match part.strip_prefix(['^', '!']) {
            Some(value) => (true, value),
            None => (false, part),
        };
        let before = problems.count();
        let Some(value) = word::<T>(flag, &Some(value.to_owned()), problems) else {
            if problems.count() == before {
                problems.add(flag, format!("'{part}' is no value"));
            }
            continue;
        };
        if excluded {
            choice.never.push(value);
        } else {
            choice.only.get_or_insert_with(Vec::new).push(value);
        }
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lists_and_exclusions() {
        let mut problems = Problems::default();
        let read = |text: &str, problems: &mut Problems| {
            choice::<u32>("--tp", &Some(text.to_owned()), problems)
        };
        assert_eq!(read("4", &mut problems), Choice::pin(4));
        let list = read("1,2", &mut problems);
        assert!(list.admits(&1) && list.admits(&2) && !list.admits(&4));
        let others = read("^1,!2", &mut problems);
        assert!(!others.admits(&1) && others.admits(&4));
        assert!(problems.is_empty());
        read("x,2", &mut problems);
        assert!(problems.to_string().contains("--tp"));
    }
}
