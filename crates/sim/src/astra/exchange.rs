//! Ring, direct and halving-doubling exchanges: each rank sends and receives equally many packets.
//!
//! All three are one state machine with a window. A rank prepares `window` packets. Each is sent
//! when it is ready, together with a receive for a partner's packet; each received packet prepares
//! the next one. The phase ends when all packets are sent and a whole window has returned.

use super::case::{AstraError, Collective};
use std::ops::Range;

/// Constants of the state machine, the same for all ranks.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    /// Number of participating ranks.
    pub(super) members: u32,
    /// Maximum number of packets in flight.
    pub(super) window: u32,
    /// Total number of packets to send.
    pub(super) sends: u64,
    /// Bytes of each packet, or one size for all.
    pub(super) sizes: Vec<u64>,
    pattern: Pattern,
    /// Number of received packets in a wave, after `window` packets of the rank's own. In an
    /// all-reduce, those of every other wave are reduced.
    received_in_wave: u32,
    reduces: Reduces,
    /// Number of packets that must be received before the second half is sent.
    barrier: Option<u32>,
}

/// Destinations of the packets.
#[derive(Clone, Debug)]
enum Pattern {
    /// Always to the next rank.
    Next { clockwise: bool },
    /// To every other rank in turn.
    Each { clockwise: bool },
    /// To a partner at this distance, packet by packet.
    Pairs { distances: Vec<u32> },
}

/// Received packets that are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduces {
    Never,
    OddWaves,
    Always,
}

impl Reduces {
    fn of(collective: Collective) -> Reduces {
        match collective {
            Collective::AllReduce => Reduces::OddWaves,
            Collective::ReduceScatter => Reduces::Always,
            Collective::AllGather | Collective::AllToAll => Reduces::Never,
        }
    }
}

/// Progress of a rank in a phase.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progress {
    prepared: u32,
    sent: u32,
    received: u32,
    /// Number of packets that are ready and not sent.
    free: u32,
    /// Own packets left in the wave; received ones follow in `received_left`.
    own_left: u32,
    received_left: u32,
    odd_wave: bool,
}

/// Destination of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    /// Distance to the receiver in the group; in 1..members.
    pub(super) offset: u32,
    /// Tag that distinguishes it from other packets that the receiver may get in the phase.
    pub(super) label: u32,
    /// Index of its size.
    pub(super) size: usize,
}

/// Task of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    /// The collective, or the group's part of one.
    pub(super) collective: Collective,
    /// Number of ranks of the group.
    pub(super) members: u32,
    /// True if packets travel clockwise.
    pub(super) clockwise: bool,
    /// Size of the chunk at each rank.
    pub(super) bytes: u64,
}

impl Job {
    /// Bytes of a packet that holds one rank's share of the chunk.
    fn share(&self) -> u64 {
        match self.collective {
            Collective::AllGather => self.bytes,
            Collective::AllReduce | Collective::ReduceScatter | Collective::AllToAll => {
                self.bytes / u64::from(self.members)
            }
        }
    }
}

impl Exchange {
    /// Ring: every packet is sent to the next rank. In an all-to-all, data for the rank at distance
    /// d is forwarded d times.
    pub(super) fn ring(job: &Job) -> Exchange {
        let others = u64::from(job.members - 1);
        let sends = match job.collective {
            Collective::AllReduce => 2 * others,
            Collective::AllGather | Collective::ReduceScatter => others,
            Collective::AllToAll => u64::from(job.members) * others / 2,
        };
        Exchange {
            members: job.members,
            window: 1,
            sends,
            sizes: vec![job.share()],
            pattern: Pattern::Next { clockwise: job.clockwise },
            received_in_wave: job.members - 1,
            reduces: Reduces::of(job.collective),
            barrier: None,
        }
    }

    /// Direct: sends to every other rank. An all-reduce's second half waits for all of the first.
    pub(super) fn direct(job: &Job, window: Option<u32>) -> Exchange {
        let others = job.members - 1;
        let window = window.unwrap_or(others).min(others);
        let twice = job.collective == Collective::AllReduce;
        Exchange {
            members: job.members,
            window,
            sends: u64::from(others) * if twice { 2 } else { 1 },
            sizes: vec![job.share()],
            pattern: Pattern::Each { clockwise: job.clockwise },
            received_in_wave: window,
            reduces: Reduces::of(job.collective),
            barrier: twice.then_some(others),
        }
    }

    /// Halving-doubling: to the rank at distance 1, 2, 4…, halving the size each time, and back.
    ///
    /// Each halving rounds down, so the first doubling may differ in size from the last halving.
    pub(super) fn halving_doubling(job: &Job) -> Result<Exchange, AstraError> {
        let Job { members, bytes, .. } = *job;
        let steps = members.ilog2();
        let halving = (0..steps).map(|step| (1 << step, bytes >> (step + 1)));
        let (distances, sizes): (Vec<u32>, Vec<u64>) = match job.collective {
            Collective::ReduceScatter => halving.unzip(),
            Collective::AllGather => {
                (0..steps).map(|step| (members >> (step + 1), bytes << step)).unzip()
            }
            Collective::AllReduce => {
                let least = bytes >> (steps + 1);
                let doubling = (0..steps).map(|step| (members >> (step + 1), least << (step + 1)));
                halving.chain(doubling).unzip()
            }
            Collective::AllToAll => {
                return Err(AstraError::Unsupported {
                    algorithm: "halving-doubling",
                    collective: "all_to_all",
                    remedy: "use ring or direct",
                });
            }
        };
        // Blocks of twice the distance must tile the group; otherwise some rank's partner has
        // another partner.
        if distances.iter().any(|distance| !members.is_multiple_of(2 * distance)) {
            return Err(AstraError::Value {
                field: "the number of ranks in halving-doubling".into(),
                found: members.to_string(),
                remedy: "without a power of two, ranks wait without end",
            });
        }
        Ok(Exchange {
            members,
            window: 1,
            sends: distances.len() as u64,
            sizes,
            pattern: Pattern::Pairs { distances },
            received_in_wave: steps - 1,
            reduces: Reduces::of(job.collective),
            barrier: None,
        })
    }

    /// Starts preparing the next packet. Returns the index of its size if it must be reduced.
    pub(super) fn prepare(&self, progress: &mut Progress) -> Option<usize> {
        if progress.own_left == 0 && progress.received_left == 0 {
            progress.own_left = self.window;
            progress.received_left = self.received_in_wave;
            progress.odd_wave = !progress.odd_wave;
        }
        let packet = progress.prepared;
        progress.prepared += 1;
        if progress.own_left > 0 {
            progress.own_left -= 1;
            return None;
        }
        progress.received_left -= 1;
        let reduced = match self.reduces {
            Reduces::Never => false,
            Reduces::OddWaves => progress.odd_wave,
            Reduces::Always => true,
        };
        reduced.then(|| (packet as usize).min(self.sizes.len() - 1))
    }

    /// Records a received packet and prepares the next.
    pub(super) fn receive(&self, progress: &mut Progress) -> Option<usize> {
        progress.received += 1;
        self.prepare(progress)
    }

    /// Records a ready packet. Returns the packets to send now, and true if the phase ends.
    pub(super) fn ready(&self, progress: &mut Progress) -> (Range<u32>, bool) {
        progress.free += 1;
        let sends = self.sends as u32;
        let left = sends - progress.sent;
        let at_once = match self.barrier {
            Some(barrier) if left <= barrier => {
                if progress.received < barrier {
                    return (0..0, false);
                }
                self.window
            }
            Some(_) | None => 1,
        };
        let waiting = progress.prepared - progress.sent;
        let count = at_once.min(progress.free).min(waiting).min(left);
        let first = progress.sent;
        progress.sent += count;
        progress.free -= count;
        (first..progress.sent, progress.sent == sends && progress.free == self.window)
    }

    /// Destination of packet number `packet` of the rank at `index` in its group.
    pub(super) fn packet(&self, packet: u32, index: u32) -> Packet {
        let around = |clockwise, distance| {
            if clockwise { distance } else { self.members - distance }
        };
        match &self.pattern {
            Pattern::Next { clockwise } => {
                Packet { offset: around(*clockwise, 1), label: 0, size: 0 }
            }
            Pattern::Each { clockwise } => {
                let label = packet % (self.members - 1);
                Packet { offset: around(*clockwise, label + 1), label, size: 0 }
            }
            Pattern::Pairs { distances } => {
                let distance = distances[packet as usize];
                let clockwise = (index / distance).is_multiple_of(2);
                let offset = around(clockwise, distance);
                Packet { offset, label: packet, size: packet as usize }
            }
        }
    }

    /// Labels of the packets that a rank may receive.
    pub(super) fn labels(&self) -> Labels {
        match self.pattern {
            Pattern::Next { .. } => Labels::One,
            Pattern::Each { .. } => Labels::Often(self.members - 1),
            Pattern::Pairs { .. } => Labels::Once,
        }
    }

    /// Returns true if all packets of a rank go to the same rank.
    pub(super) fn has_one_partner(&self) -> bool {
        matches!(self.pattern, Pattern::Next { .. })
    }
}

/// Method for distinguishing the packets that a rank receives in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Labels {
    /// None: all packets come from one rank, in order.
    One,
    /// Each label occurs once, and there are at most 64.
    Once,
    /// Each of this number of labels may occur more than once.
    Often(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(collective: Collective, members: u32, bytes: u64) -> Job {
        Job { collective, members, clockwise: true, bytes }
    }

    /// Distances and sizes of all packets of the rank at `index`.
    fn packets(exchange: &Exchange, index: u32) -> Vec<(u32, u64)> {
        (0..exchange.sends as u32)
            .map(|number| exchange.packet(number, index))
            .map(|packet| (packet.offset, exchange.sizes[packet.size]))
            .collect()
    }

    #[test]
    fn halving_doubling_goes_out_and_back() {
        let all = Exchange::halving_doubling(&job(Collective::AllReduce, 8, 100)).unwrap();
        // 100 → 50 → 25 → 12, halved once more before it is doubled.
        let expected = [(1, 50), (2, 25), (4, 12), (4, 12), (2, 24), (1, 48)];
        assert_eq!(packets(&all, 0), expected);
        let mirrored = expected.map(|(offset, bytes)| (8 - offset, bytes));
        assert_eq!(packets(&all, 7), mirrored);
        let gather = Exchange::halving_doubling(&job(Collective::AllGather, 8, 100)).unwrap();
        assert_eq!(packets(&gather, 0), [(4, 100), (2, 200), (1, 400)]);
        // Distances 3 and 1 pair up six ranks; 1 and 2 do not.
        assert!(Exchange::halving_doubling(&job(Collective::AllGather, 6, 100)).is_ok());
        assert!(Exchange::halving_doubling(&job(Collective::ReduceScatter, 6, 100)).is_err());
    }

    /// Runs one rank as if every sent packet were received at once; returns the number of reduced
    /// packets.
    fn reductions(exchange: &Exchange) -> usize {
        let mut progress = Progress::default();
        let mut ready = 0;
        let mut reduced = 0;
        for _ in 0..exchange.window {
            ready += 1;
            assert_eq!(exchange.prepare(&mut progress), None);
        }
        loop {
            assert!(ready > 0, "the rank waits without end");
            ready -= 1;
            let (packets, ends) = exchange.ready(&mut progress);
            for _ in packets {
                ready += 1;
                reduced += usize::from(exchange.receive(&mut progress).is_some());
            }
            if ends {
                assert_eq!(u64::from(progress.sent), exchange.sends);
                return reduced;
            }
        }
    }

    #[test]
    fn half_of_an_all_reduce_adds_up() {
        let all_reduce = job(Collective::AllReduce, 8, 64);
        let scatter = job(Collective::ReduceScatter, 8, 64);
        let gather = job(Collective::AllGather, 8, 64);
        assert_eq!(reductions(&Exchange::ring(&all_reduce)), 7);
        assert_eq!(reductions(&Exchange::ring(&scatter)), 7);
        assert_eq!(reductions(&Exchange::ring(&gather)), 0);
        assert_eq!(reductions(&Exchange::direct(&all_reduce, None)), 7);
        assert_eq!(reductions(&Exchange::direct(&scatter, None)), 7);
        // The last packet of each half begins a wave and is therefore not reduced.
        assert_eq!(reductions(&Exchange::halving_doubling(&all_reduce).unwrap()), 2);
        assert_eq!(reductions(&Exchange::halving_doubling(&scatter).unwrap()), 2);
    }

    #[test]
    fn direct_reaches_everyone_else_in_turn() {
        let back = Job { clockwise: false, ..job(Collective::AllGather, 4, 9) };
        assert_eq!(packets(&Exchange::direct(&back, Some(2)), 3), [(3, 9), (2, 9), (1, 9)]);
        let both = Exchange::direct(&job(Collective::AllReduce, 3, 9), None);
        assert_eq!(packets(&both, 0), [(1, 3), (2, 3), (1, 3), (2, 3)]);
    }
}
