//! Exchange times of a measured transport.

use super::{CostModel, NoPath, Vector};
use crate::cluster::measured::TransportTable;
use paceline_plan::collective::{Action, Pattern};
use paceline_plan::ids::Rank;
use paceline_plan::units::{Bytes, Seconds};

/// Network with the times of a measured transport. A collective that was measured as a whole takes
/// the measured time; any other is the sum of its messages, each driven by its own rank.
pub struct Measured<'c> {
    wire: &'c TransportTable,
    /// Fallback for worlds too large to process rank by rank.
    model: Box<dyn CostModel + 'c>,
}

/// Maximum number of ranks processed one by one: more than share a host.
const MOST: u32 = 256;

impl<'c> Measured<'c> {
    /// Creates a network from a transport table, with `model` as fallback.
    pub fn new(wire: &'c TransportTable, model: Box<dyn CostModel + 'c>) -> Self {
        Self { wire, model }
    }

    /// Sum over rounds of the busiest rank's time in each.
    fn steps(&self, pattern: &Pattern, vector: &Vector) -> Option<Seconds> {
        let cut = vector.cut(pattern);
        let mut rounds: Vec<f64> = Vec::new();
        for me in 0..pattern.ranks() {
            let mut own = vec![0.0; rounds.len()];
            for step in pattern.steps(me) {
                let round = step.round as usize;
                own.resize(own.len().max(round + 1), 0.0);
                match step.action {
                    Action::Recv { chunks, .. }
                    | Action::Read { chunks, .. }
                    | Action::Take { chunks, .. } => {
                        let bytes = cut.elements_in(chunks).saturating_mul(vector.element.0);
                        own[round] += self.wire.message(Bytes(bytes))?.0;
                    }
                    // Included in the time of the matching receive.
                    Action::Send { .. } | Action::Lend { .. } | Action::Offer { .. } => {}
                    Action::Write { chunks, .. } => {
                        let bytes = cut.elements_in(chunks).saturating_mul(vector.element.0);
                        own[round] += self.wire.message(Bytes(bytes))?.0;
                    }
                    Action::Fold { .. } | Action::Emit { .. } => {}
                }
            }
            rounds.resize(rounds.len().max(own.len()), 0.0);
            rounds.iter_mut().zip(own).for_each(|(most, own)| *most = most.max(own));
        }
        Some(Seconds(rounds.iter().sum()))
    }
}

impl CostModel for Measured<'_> {
    fn message(&self, from: Rank, to: Rank, bytes: Bytes) -> Result<Seconds, NoPath> {
        match self.wire.message(bytes) {
            Some(time) => Ok(time),
            None => self.model.message(from, to, bytes),
        }
    }

    fn collective(
        &self,
        pattern: &Pattern,
        members: &[Rank],
        vector: &Vector,
    ) -> Result<Seconds, NoPath> {
        if pattern.ranks() < 2 {
            return Ok(Seconds::ZERO);
        }
        let (kind, algorithm, ranks) = (pattern.kind(), pattern.algorithm(), pattern.ranks());
        let whole = self.wire.collective(kind, algorithm, ranks, vector.bytes());
        let steps = || if ranks <= MOST { self.steps(pattern, vector) } else { None };
        match whole.or_else(steps) {
            Some(time) => Ok(time),
            None => self.model.collective(pattern, members, vector),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Analytic;
    use super::*;
    use crate::cluster::{measured, preset};
    use paceline_plan::collective::{Algorithm, CollectiveKind, SummationOrder};

    #[test]
    fn a_measured_collective_takes_what_it_took_and_another_its_messages() {
        let cluster = preset::get("laptop").unwrap();
        let machine = measured::tests::two_cores();
        let wire = &machine.transports[0];
        let network = Measured::new(wire, Box::new(Analytic::new(&cluster)));
        let time = |algorithm, bytes| {
            let kind = CollectiveKind::AllReduce;
            let pattern = Pattern::new(kind, algorithm, SummationOrder::Free, 2, 0).unwrap();
            let vector = Vector::of_bytes(Bytes(bytes));
            network.collective(&pattern, &[Rank(0), Rank(1)], &vector).unwrap()
        };
        let table = &wire.collectives[0];
        for measured in &table.times {
            let time = time(table.algorithm, measured.bytes.0);
            assert!((time.0 / measured.warm.0 - 1.0).abs() < 1e-9);
        }
        let ring = time(Algorithm::Ring, 8192);
        let half = wire.message(Bytes(4096)).unwrap();
        assert!((ring.0 - 2.0 * half.0).abs() < 1e-12, "two rounds of half the vector");
        let message = network.message(Rank(0), Rank(1), Bytes(64)).unwrap();
        assert_eq!(message, wire.messages[0].warm);
    }
}
