//! Chunks that pass through the dimensions of a grid: a flow shop with one machine per dimension.
//!
//! A chunk's visit to a dimension takes the time of its rounds with nothing else in that dimension.
//! It starts when the chunk has left the previous dimension and the dimension has served all visits
//! that precede it in the pattern.

use super::link_loads::LinkLoads;
use super::{Analytic, Group};
use crate::network::{NoPath, Vector};
use paceline_plan::collective::{Pattern, Visit};
use paceline_plan::ids::Rank;
use paceline_plan::units::Seconds;
use std::collections::BTreeMap;

/// Total time and all visits with their times.
pub(super) struct Schedule {
    pub(super) time: Seconds,
    pub(super) visits: Vec<Timed>,
}

/// Visit with its times.
pub(super) struct Timed {
    pub(super) visit: Visit,
    /// Time at which the chunk could have started.
    pub(super) ready: f64,
    pub(super) end: f64,
    /// Duration of each round.
    pub(super) rounds: Vec<f64>,
}

/// Maximum messages of a visit followed individually, for grids unlike the physical links.
const MAX_MESSAGES: u64 = 1 << 14;

/// Times a pattern that has visits.
pub(super) fn run(
    network: &Analytic<'_>,
    pattern: &Pattern,
    members: &[Rank],
    vector: &Vector,
) -> Result<Schedule, NoPath> {
    let rails = vec![1.0; network.cluster.dimensions.len()];
    let group = Group { pattern, members, vector, rails: &rails };
    let chosen = network.representatives(pattern, members);
    // Chunks on the same route take the same time: that of the first, which is the largest.
    let mut known: BTreeMap<(usize, bool, Vec<usize>), Vec<f64>> = BTreeMap::new();
    let (mut ready, mut free) = (BTreeMap::new(), BTreeMap::new());
    let (mut visits, mut last) = (Vec::new(), 0.0f64);
    for visit in pattern.visits() {
        let mut scattered = visit.scattered.clone();
        scattered.sort_unstable();
        let key = (visit.dimension, visit.gathers, scattered);
        let rounds = match known.get(&key) {
            Some(rounds) => rounds.clone(),
            None => {
                let first = Visit { chunk: 0, ..visit.clone() };
                let steps = |me: u32| pattern.visit_steps(&first, me);
                let rounds = match LinkLoads::of(network, &group, MAX_MESSAGES, &steps) {
                    Some(wires) => wires.rounds()?,
                    None => network.rounds_of(&group, &chosen, steps)?,
                };
                known.insert(key, rounds.clone());
                rounds
            }
        };
        let ready: &mut f64 = ready.entry(visit.chunk).or_default();
        let free: &mut f64 = free.entry(visit.dimension).or_default();
        let came = *ready;
        let end = came.max(*free) + rounds.iter().sum::<f64>();
        (*ready, *free) = (end, end);
        last = last.max(end);
        visits.push(Timed { visit, ready: came, end, rounds });
    }
    Ok(Schedule { time: Seconds(last), visits })
}
