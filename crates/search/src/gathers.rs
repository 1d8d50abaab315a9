//! Gathers of weights under ZeRO-3: how often each layer's come, and what that takes.

use crate::bound::{Estimator, Staged};
use crate::form::Form;
use crate::update::{SLOWER, Update, bucket_price};
use paceline_plan::collective::CollectiveKind;
use paceline_plan::graph::BLOCK;
use paceline_plan::ids::{Rank, StageRank};
use paceline_plan::lower::Parameters;
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::schedule::{self, Action, Pass, ScheduleKind};
use paceline_plan::strategy::{Strategy, Zero};
use paceline_sim::Exchange;
use std::rc::Rc;

impl Estimator<'_> {
    /// Adds ZeRO-3's gathers: the time of each rank's lane, and what they take from compute.
    pub(crate) fn add_gathers(
        &mut self,
        s: &Strategy,
        staged: &Staged,
        open: bool,
        all: &mut [Update],
    ) {
        let counts = staged.gathers.get_or_init(|| {
            let counts = self.gather_counts(s, staged);
            counts.iter().map(|rank| summed(staged.form(), rank.iter().copied())).collect()
        });
        let held = staged.held.get_or_init(|| {
            let layers = |mine: &Vec<usize>| -> Vec<(usize, u32)> {
                let ranges = mine.iter().map(|&stage| staged.ranges[stage].clone());
                ranges.flatten().map(|layer| (layer, 1)).collect()
            };
            let ranks = staged.owners.iter();
            ranks.map(|mine| summed(staged.form(), layers(mine).into_iter())).collect()
        });
        let methods = if open { self.methods.clone() } else { vec![s.collective] };
        let transient = !s.keeps_whole_gradients();
        let microbatches = f64::from(s.microbatches());
        let mut tried = s.clone();
        for (rank, update) in all.iter_mut().enumerate() {
            let at = Rank(rank as u32 * s.mesh().stride(Axis::Pp));
            let (mut least, mut least_reduced, mut stolen) = (f64::INFINITY, f64::INFINITY, 0.0);
            for &collective in &methods {
                tried.collective = collective;
                let (mut lane, mut reduced) = (0.0, 0.0);
                stolen = 0.0;
                for (own, count) in &counts[rank] {
                    let (time, taken) = self.gather(&tried, own, at);
                    lane += time * f64::from(*count);
                    stolen += taken * f64::from(*count);
                }
                least = least.min(lane);
                if let (true, true, Some(prices)) = (open, transient, &mut self.prices) {
                    for (own, count) in &held[rank] {
                        let price = bucket_price(prices, &tried, (own.dense, own.experts), at);
                        reduced += price.reduce * f64::from(*count);
                        stolen += price.reduce_stolen * f64::from(*count) * microbatches;
                    }
                }
                least_reduced = least_reduced.min(reduced);
            }
            if s.overlap {
                update.stolen += stolen;
            }
            update.lanes[1] = if least.is_finite() { least } else { 0.0 };
            if open && least_reduced.is_finite() {
                update.lanes[0] = least_reduced * microbatches;
            }
        }
    }

    /// Numbers of times that each rank gathers each of its layers' weights under ZeRO-3.
    fn gather_counts(&mut self, s: &Strategy, staged: &Staged) -> GatherCounts {
        let starts = staged.ranges.iter().map(|range| range.start as u32).collect();
        let key = (s.schedule, s.pp, s.microbatches(), starts);
        if let Some(known) = self.gather_counts.get(&key) {
            return Rc::clone(known);
        }
        let layers = staged.ranges.last().map_or(0, |range| range.end);
        let turns = u64::from(s.microbatches()) * u64::from(s.pp) * staged.stages.len() as u64;
        let counted = |rank: u32| {
            let mut counts = vec![0u32; layers];
            let mut weights = Weights::none(layers);
            let row = schedule::row(s.schedule, s.pp as u16, s.microbatches(), rank_of(rank));
            for action in row.unwrap_or_default() {
                weights.pass(&action, staged, |layer| counts[layer] += 1);
            }
            let counts = counts.into_iter().enumerate().filter(|(_, count)| *count > 0);
            counts.collect()
        };
        // Of long pipelines only the ends, which is a bound too.
        let ends = |rank: &u32| turns <= MOST_TURNS || *rank == 0 || rank + 1 == s.pp;
        let all: Vec<Vec<(usize, u32)>> =
            (0..s.pp).map(|rank| if ends(&rank) { counted(rank) } else { Vec::new() }).collect();
        let all = Rc::new(all);
        if self.gather_counts.len() >= GATHER_COUNTS {
            self.gather_counts.clear();
        }
        self.gather_counts.insert(key, Rc::clone(&all));
        all
    }

    /// Least delay of a rank's first pass by ZeRO-3's gathers before and during it.
    pub(crate) fn lead(
        &mut self,
        s: &Strategy,
        staged: &Staged,
        mine: &[usize],
        rank: Rank,
    ) -> f64 {
        let (Some(&first), true) = (mine.first(), s.zero == Zero::Parameters) else { return 0.0 };
        let form = staged.form();
        let (mut lane, mut most, mut compute) = (0.0, 0.0f64, 0.0);
        let mut last = (Parameters::default(), 0.0);
        for layer in staged.ranges[first].clone() {
            let own = form.parameters(layer);
            if *own != last.0 {
                last = (*own, self.gather(s, own, rank).0);
            }
            lane += last.1;
            most = most.max(lane - compute);
            compute += SLOWER * form.forward_time(layer);
        }
        most
    }

    /// Time to gather a layer's weights under ZeRO-3, and what it takes from compute.
    pub(crate) fn gather(&mut self, s: &Strategy, own: &Parameters, rank: Rank) -> (f64, f64) {
        let mesh = s.mesh();
        let Some(prices) = &mut self.prices else { return (0.0, 0.0) };
        let (mut time, mut stolen) = (0.0, 0.0);
        for (elements, group, parts) in [
            (own.dense, GroupKind::Replicas, u64::from(mesh.replicas())),
            (own.experts, GroupKind::Axis(Axis::Edp), u64::from(mesh.edp())),
        ] {
            if elements > 0 && parts > 1 {
                let step = BLOCK * parts;
                let gather = Exchange {
                    group,
                    kind: CollectiveKind::AllGather,
                    elements: elements.div_ceil(step) * step,
                    dtype: s.activation_dtype(),
                    block: BLOCK,
                };
                time += prices.collective(&gather, s, rank);
                stolen += prices.stolen(&gather, s);
            }
        }
        (time, stolen)
    }
}

/// By rank: layers, and how often each is gathered.
pub(crate) type GatherCounts = Rc<Vec<Vec<(usize, u32)>>>;
/// Properties that determine these counts, stages by their first layers.
pub(crate) type GatherKey = (ScheduleKind, u32, u32, Vec<u32>);

/// Number of counts that are kept.
const GATHER_COUNTS: usize = 1 << 12;
/// Turns of all ranks beyond which only those of the first and the last are counted.
const MOST_TURNS: u64 = 100_000;

fn rank_of(rank: u32) -> StageRank {
    StageRank(rank as u16)
}

/// Numbers of layers with equal parameters.
fn summed(form: &Form, layers: impl Iterator<Item = (usize, u32)>) -> Vec<(Parameters, u32)> {
    let mut all: Vec<(Parameters, u32)> = Vec::new();
    for (layer, count) in layers {
        let own = form.parameters(layer);
        match all.iter_mut().find(|(known, _)| known == own) {
            Some((_, sum)) => *sum += count,
            None => all.push((*own, count)),
        }
    }
    all
}

/// Gathered weights that a rank holds under ZeRO-3: two blocks, and whatever is no block.
pub(crate) struct Weights {
    blocks: [usize; 2],
    others: Vec<bool>,
}

impl Weights {
    pub(crate) fn none(layers: usize) -> Self {
        Self { blocks: [usize::MAX; 2], others: vec![false; layers] }
    }

    /// Gathers what a turn needs and is not there.
    pub(crate) fn pass(&mut self, action: &Action, staged: &Staged, mut gather: impl FnMut(usize)) {
        if action.pass == Pass::BackwardWeight {
            return;
        }
        let range = staged.ranges[action.stage.index()].clone();
        let forward = action.pass == Pass::Forward;
        for at in 0..range.len() {
            let layer = if forward { range.start + at } else { range.end - 1 - at };
            let is_block = staged.form().is_block(layer);
            if is_block && self.blocks[layer % 2] != layer {
                self.blocks[layer % 2] = layer;
                gather(layer);
            } else if !is_block && !self.others[layer] {
                self.others[layer] = true;
                gather(layer);
            }
        }
    }
}
