//! Layouts of the same work on fewer ranks than requested.

use crate::flags::StrategyFlags;
use paceline_plan::strategy::Strategy;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fmt;

/// A layout that replaces the requested one. The samples per iteration stay the same, so that the
/// data continues where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    dp: u32,
    tp: u32,
    pp: u32,
    sp: bool,
    leaves: u32,
    global_batch: u64,
}

impl Layout {
    /// The layout of a strategy.
    pub(crate) fn of(strategy: &Strategy) -> Self {
        let Strategy { dp, tp, pp, sp, leaves, global_batch, .. } = *strategy;
        Self { dp, tp, pp, sp, leaves, global_batch }
    }

    /// Layouts of at most `ranks` ranks that may replace a strategy's, the largest first. Among
    /// equals, those that shard the model as before come first, because that made it fit. Among
    /// those, the ones that sum gradients in the same order come first, because losses then keep
    /// their bits.
    pub(crate) fn smaller(than: &Strategy, ranks: u32) -> Vec<Self> {
        let asked = Self::of(than);
        let divisors = |of: u32| (1..=of).filter(move |part| of.is_multiple_of(*part));
        let shares = |dp: u32| {
            let samples = u64::from(dp).saturating_mul(than.micro_batch);
            than.global_batch.is_multiple_of(samples.max(1))
        };
        let mut found = Vec::new();
        for (pp, tp) in divisors(than.pp).flat_map(|pp| divisors(than.tp).map(move |tp| (pp, tp))) {
            let replica = u64::from(pp) * u64::from(tp) * u64::from(than.cp);
            for dp in (1..=than.dp).filter(|dp| shares(*dp)) {
                let world = replica * u64::from(dp) + u64::from(than.sync.servers());
                if world > u64::from(ranks) {
                    continue;
                }
                let sp = than.sp && tp > 1;
                for leaves in [than.leaves, dp] {
                    let layout = Self { dp, tp, pp, sp, leaves, ..asked.clone() };
                    found.push(((Reverse(world), Reverse(replica), leaves != than.leaves), layout));
                }
            }
        }
        found.sort_by_key(|(key, _)| *key);
        found.dedup_by(|(_, a), (_, b)| a == b);
        found.into_iter().map(|(_, layout)| layout).collect()
    }

    /// Replaces the layout in the flags.
    pub(crate) fn apply(&self, flags: &mut StrategyFlags) {
        flags.ranks = None;
        flags.sp = self.sp;
        for (flag, value) in [
            (&mut flags.dp, u64::from(self.dp)),
            (&mut flags.tp, u64::from(self.tp)),
            (&mut flags.pp, u64::from(self.pp)),
            (&mut flags.leaves, u64::from(self.leaves)),
            (&mut flags.global_batch, self.global_batch),
        ] {
            *flag = Some(value.to_string());
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dp, tp, pp, leaves, .. } = self;
        let word = if *leaves == 1 { "leaf" } else { "leaves" };
        write!(f, "pp {pp} × dp {dp} × tp {tp} with {leaves} {word}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::strategy::Sync;

    fn first(than: &Strategy, ranks: u32) -> Option<String> {
        Layout::smaller(than, ranks).first().map(Layout::to_string)
    }

    #[test]
    fn the_largest_layout_keeps_samples_and_order() {
        let than = Strategy { dp: 4, leaves: 4, global_batch: 8, ..Strategy::default() };
        // Eight samples cannot be divided among three replicas.
        assert_eq!(first(&than, 3).unwrap(), "pp 1 × dp 2 × tp 1 with 4 leaves");
        let than = Strategy { global_batch: 12, ..than };
        let all: Vec<String> = Layout::smaller(&than, 3).iter().map(Layout::to_string).collect();
        assert_eq!(all[0], "pp 1 × dp 3 × tp 1 with 4 leaves", "the planner refuses this one");
        assert_eq!(all[1], "pp 1 × dp 3 × tp 1 with 3 leaves");
    }

    #[test]
    fn the_model_stays_cut_where_it_can() {
        let than = Strategy { dp: 2, pp: 2, tp: 2, global_batch: 8, ..Strategy::default() };
        assert_eq!(first(&than, 7).unwrap(), "pp 2 × dp 1 × tp 2 with 1 leaf");
        let than = Strategy { dp: 1, ..than };
        assert_eq!(first(&than, 3).unwrap(), "pp 1 × dp 1 × tp 2 with 1 leaf");
        assert_eq!(first(&than, 0), None);
    }

    #[test]
    fn servers_are_needed_by_whoever_is_left() {
        let sync = Sync::Servers(2);
        let than = Strategy { dp: 2, leaves: 2, global_batch: 2, sync, ..Strategy::default() };
        assert_eq!(first(&than, 3).unwrap(), "pp 1 × dp 1 × tp 1 with 2 leaves");
        assert_eq!(first(&than, 2), None);
    }
}
