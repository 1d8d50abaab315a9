//! Folding: selects the ranks to simulate and the number of ranks that each represents.
//!
//! Ring, direct and halving-doubling look the same from every rank of a group: at any position,
//! partners have the same distances and delays. All ranks along such a dimension therefore act
//! alike at the same ticks, and one represents all. The packet it sends to the rank at some
//! distance equals the one it receives from the rank at that distance on the other side.
//!
//! Only the order of events within a tick can break the symmetry, because rank numbering starts
//! somewhere. Without congestion it matters only if two chunks enter a queue in the same tick,
//! which the engine detects. With congestion it matters if two chunks enter a link in the same
//! tick; [`Fold::by_symmetry`] folds only if the order is the same at all ranks:
//!
//! - one chunk at a time: packets of one chunk in one tick are interchangeable;
//! - or every link carries the packets of one rank only, or packets leave it at different ticks,
//!   so that no two packets reach a rank in the same tick unless in the order of their sending;
//!   and no callback of a rank was made in the same tick as a message that arrives with it.

use super::case::{Algorithm, Algorithms, AstraError, Backend, Case, Kind};
use super::schedule::{Phase, Schedule, Work};

/// The simulated ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fold {
    /// Number of simulated ranks.
    pub(super) ranks: u32,
    /// Number of ranks that each represents.
    pub(super) copies: u64,
    /// Rank-number stride by dimension that an algorithm sees; `None` if one rank represents the
    /// whole dimension.
    strides: Vec<Option<u32>>,
}

/// Maximum number of chunk states, and of messages in flight, that fit in memory.
const MAX_STATES: u64 = 1 << 26;

/// Maximum number of messages, simulated within a working day.
const MAX_MESSAGES: u64 = 1 << 36;

/// Times below this can be summed without overflow.
const MAX_NS: f64 = (1u64 << 62) as f64;

impl Fold {
    /// No folding: every rank is simulated.
    pub(super) fn none(case: &Case, schedule: &Schedule) -> Fold {
        Fold::new(case, &vec![false; schedule.queues])
    }

    /// Folds to as few ranks as symmetry allows; `None` if nothing can be folded.
    pub(super) fn by_symmetry(case: &Case, schedule: &Schedule) -> Option<Fold> {
        let folded: Vec<bool> = match &case.algorithms {
            Algorithms::PerDimension(algorithms) => algorithms
                .iter()
                .map(|algorithm| *algorithm != Algorithm::DoubleBinaryTree)
                .collect(),
            Algorithms::OverAll(_) => vec![true],
        };
        let orderly = match case.backend {
            Backend::CongestionUnaware => true,
            Backend::CongestionAware => {
                schedule.phases.iter().all(|phase| keeps_order(case, schedule, phase))
            }
        };
        (orderly && folded.contains(&true)).then(|| Fold::new(case, &folded))
    }

    fn new(case: &Case, folded: &[bool]) -> Fold {
        let mut sizes: Vec<u32> = case.dims.iter().map(|dim| dim.size).collect();
        if let Algorithms::OverAll(_) = case.algorithms {
            sizes = vec![sizes.iter().product()];
        }
        let mut ranks = 1;
        let mut strides = Vec::new();
        for (&size, &folded) in sizes.iter().zip(folded) {
            strides.push((!folded).then_some(ranks));
            ranks *= if folded { 1 } else { size };
        }
        Fold { ranks, copies: case.ranks() / u64::from(ranks), strides }
    }

    /// Index of a simulated rank in its group of a phase.
    pub(super) fn index(&self, rank: u32, phase: &Phase) -> u32 {
        self.strides[phase.dim].map_or(0, |stride| rank / stride % phase.members())
    }

    /// The simulated rank that is, or represents, the rank at distance `offset` in a group.
    pub(super) fn member(&self, rank: u32, index: u32, offset: u32, phase: &Phase) -> u32 {
        self.strides[phase.dim].map_or(rank, |stride| {
            let wraps = index + offset >= phase.members();
            let on = rank + offset * stride;
            if wraps { on - phase.members() * stride } else { on }
        })
    }

    /// Returns true if ranks represent others.
    pub(super) fn folds(&self) -> bool {
        self.copies > 1
    }

    /// Rejects cases that would exceed memory, a day of simulation, or the clock's range.
    pub(super) fn check(&self, case: &Case, schedule: &Schedule) -> Result<(), AstraError> {
        let refuse = |what, found: u64, limit| {
            let remedy = "use fewer ranks or chunks, or an algorithm with fewer messages";
            Err(AstraError::TooLarge { what, found, limit, remedy })
        };
        let lanes = u64::from(self.ranks).saturating_mul(schedule.chunks.into());
        let states = lanes.saturating_mul(schedule.phases.len() as u64);
        if states > MAX_STATES {
            return refuse("chunks at ranks", states, MAX_STATES);
        }
        let active = u64::from(self.ranks) * u64::from(case.active_chunks.min(schedule.chunks));
        let window = schedule.phases.iter().map(|phase| phase.window()).max().unwrap_or(0);
        let in_flight = active.saturating_mul(window.into());
        if in_flight > MAX_STATES {
            return refuse("messages in flight", in_flight, MAX_STATES);
        }
        let most = schedule.phases.iter().map(|phase| phase.packets()).max().unwrap_or(0);
        if most > u64::from(u32::MAX / 2) {
            return refuse("messages of a rank", most, u64::from(u32::MAX / 2));
        }
        let packets: u64 = schedule.phases.iter().map(|phase| phase.packets()).sum();
        let messages = lanes.saturating_mul(packets);
        if messages > MAX_MESSAGES {
            return refuse("messages", messages, MAX_MESSAGES);
        }
        // The sum of all messages run one after the other is an upper bound.
        let all = messages as f64 * self.copies as f64;
        let one = schedule.phases.iter().map(|phase| longest_ns(case, phase)).fold(0.0, f64::max);
        if all * one > MAX_NS {
            return refuse("nanoseconds", (all * one) as u64, MAX_NS as u64);
        }
        Ok(())
    }
}

/// Upper bound on the time of a message and everything that follows from it.
fn longest_ns(case: &Case, phase: &Phase) -> f64 {
    let reduce_ns = phase.reduce_ns.iter().copied().max().unwrap_or(0);
    1.0 + phase.wires.longest_ns() + 2.0 * case.endpoint_delay_ns as f64 + reduce_ns as f64
}

/// Returns true if packets enter congested links in the same order at every rank.
fn keeps_order(case: &Case, schedule: &Schedule, phase: &Phase) -> bool {
    let Work::Exchange(exchange) = &phase.work else { return false };
    let kind = case.dims[phase.dim].kind;
    if kind == Kind::Ring && !exchange.has_one_partner() {
        // Messages in transit compete with those that start here.
        return false;
    }
    if case.active_chunks.min(schedule.chunks) == 1 {
        return true;
    }
    let sizes = 0..phase.reduce_ns.len();
    let tied = |size| {
        let hop = phase.wires.hop_ns(size);
        hop == 0 || hop == case.endpoint_delay_ns || phase.reduce_ns.contains(&hop)
    };
    if sizes.clone().any(tied) {
        return false;
    }
    exchange.has_one_partner()
        || kind == Kind::Switch && sizes.clone().all(|size| phase.wires.busy_ns(size) > 0)
}
