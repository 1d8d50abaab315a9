//! Time of a collective in each algorithm and protocol, and NCCL's choice between them.
//!
//! Symbols: n ranks on N hosts with g on each; S bytes, the full vector even if a rank holds a
//! shard; B total bandwidth of the rings. A ring has `steps` steps, 2(n−1) for all_reduce and n−1
//! for its halves, and moves `steps`/n of S through every link.
//!
//! NCCL ranks candidates by *latency + S/rate*, both from its table (`ncclTopoTuneModel`). The
//! actual time of the chosen one has four more parts, which follow from its kernels:
//!
//! - **Start** ([`START`]): launch and synchronisation.
//! - **Rounds.** In LL and LL128 the threads of a channel load, wait for flags and store in rounds
//!   of fixed size. The next rank can proceed once it has a round, so each step costs a round at
//!   the channel's own rate in addition to the hop; the rest of a chunk follows meanwhile.
//! - **Slices.** In Simple, data becomes visible one slice at a time. All channels behind a switch
//!   share the same links and run in lockstep, so the transfer of the first slice is exposed: a
//!   slice at a channel's share of B.
//! - **The last copy.** The last part that a rank receives is only copied into place: S/n at memory
//!   bandwidth, while the links are idle.
//!
//! The last two vanish if every ring has dedicated links (a cube mesh): the two channels of such a
//! ring alternate, and while one waits or copies, the other uses the links.

use super::topology::Topology;
use super::tuning::{self, IN_SWITCH, Protocol, RING, START, TREE};
use paceline_plan::collective::CollectiveKind;

/// Collective on a topology.
pub(super) struct Job<'a> {
    pub(super) kind: CollectiveKind,
    /// Bytes of the full vector.
    pub(super) bytes: f64,
    pub(super) topology: &'a Topology,
}

/// Candidate algorithm and protocol, times in seconds.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Time predicted by NCCL; decides the choice.
    ranked: f64,
    /// Modelled actual time.
    time: f64,
}

/// Bytes that the threads of a channel move in a round of LL: 512 threads (`NCCL_LL_MAX_NTHREADS`)
/// with eight bytes of data each.
const LL_ROUND: f64 = 512.0 * 8.0;

/// Bytes per round in LL128: 640 threads (`NCCL_LL128_MAX_NTHREADS`) with eight words of eight
/// bytes (`NCCL_LL128_SHMEM_ELEMS_PER_THREAD`), a sixteenth of them flags.
const LL128_ROUND: f64 = 640.0 * 64.0 * Protocol::LL128_PAYLOAD;

/// Maximum slice in Simple, in bytes: a quarter of a channel's buffer of 4 MiB (`DEFAULT_BUFFSIZE`
/// in `src/init.cc`; `ALLREDUCE_SLICESTEPS` of `NCCL_STEPS`). Smaller chunks are two slices.
const SLICE: f64 = 1048576.0;

/// Fraction of link bandwidth that NCCL's ranking assumes for rings in LL128.
const RANKED_LL128: f64 = 0.92;

impl Job<'_> {
    /// Time of the candidate that NCCL chooses.
    pub(super) fn time(&self, rings_only: bool) -> f64 {
        let rings = Protocol::ALL.map(|protocol| self.ring(protocol));
        let trees = Protocol::ALL.map(|protocol| self.tree(protocol));
        let reduces_all = self.kind == CollectiveKind::AllReduce && !rings_only;
        let others = trees.into_iter().chain(self.in_switch()).filter(|_| reduces_all);
        let all = rings.into_iter().chain(others);
        let taken = all.min_by(|a, b| a.ranked.total_cmp(&b.ranked));
        taken.map_or(0.0, |candidate| candidate.time)
    }

    fn ring(&self, protocol: Protocol) -> Candidate {
        let Topology { generation, ranks, hosts, per_host, .. } = *self.topology;
        let (n, others) = (f64::from(ranks), f64::from(ranks.saturating_sub(1)));
        let far = f64::from(hosts.saturating_sub(1));
        let (steps, far_steps, volume) = match self.kind {
            CollectiveKind::AllReduce => (2.0 * others, 2.0 * far, 2.0 * others / n),
            CollectiveKind::ReduceScatter | CollectiveKind::AllGather => (others, far, others / n),
            CollectiveKind::Broadcast
            | CollectiveKind::Reduce
            | CollectiveKind::Gather
            | CollectiveKind::AllToAll
            | CollectiveKind::Scatter
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => (others, far, 1.0),
        };
        let reduces = self.kind == CollectiveKind::AllReduce || self.kind == CollectiveKind::Reduce;
        let links = self.topology.ring_rate();
        let channels = self.topology.rings() * generation.ll128_channel();
        let (ranked, rate) = match protocol {
            Protocol::Ll => {
                let share = if reduces || hosts > 1 { 1.0 / 4.0 } else { 1.0 / 3.0 };
                let rate = (links * share).min(generation.ll_most(hosts));
                (rate, rate)
            }
            Protocol::Ll128 => {
                let rate = |share: f64| (links * share).min(channels);
                (rate(RANKED_LL128), rate(Protocol::LL128_PAYLOAD))
            }
            Protocol::Simple => (links, links),
        };
        let hop = if hosts > 1 { RING.hop_with_network(protocol) } else { RING.hop(protocol) };
        // With one GPU per host there is no hop inside the host to hide behind.
        let network = if per_host > 1 { &RING } else { &TREE }.network(protocol);
        let mut latency = RING.base(protocol) + (steps - far_steps) * hop + far_steps * network;
        let flat = protocol == Protocol::Simple && self.kind == CollectiveKind::AllReduce;
        if flat && hosts > 1 {
            latency *= generation.plateau();
        }
        let moved = self.bytes * volume;
        let time = START
            + latency
            + steps * self.round(protocol)
            + moved / rate
            + self.slice_and_copy(protocol);
        Candidate { ranked: latency + moved / ranked, time }
    }

    /// Double binary tree over hosts, with members in a chain inside each host.
    fn tree(&self, protocol: Protocol) -> Candidate {
        let Topology { generation, hosts, per_host, across, .. } = *self.topology;
        // Between two hosts every byte is sent once in each direction, half of what rings send.
        let (links, most) = match (across, hosts) {
            (Some(across), 0..=2) if per_host > 1 => (self.topology.inside_rate(), across),
            (Some(_) | None, _) => (self.topology.ring_rate(), f64::INFINITY),
        };
        let rings = self.topology.rings();
        let mut rate = (links * 0.92).min(rings * generation.tree_channel(hosts));
        match protocol {
            Protocol::Ll => rate = (rate / 3.8).min(generation.ll_most(hosts)),
            Protocol::Ll128 => {
                let share = if hosts > 1 { Protocol::LL128_PAYLOAD } else { 7.0 / 9.0 };
                rate = (rate * share).min(rings * generation.ll128_channel());
            }
            Protocol::Simple => {}
        }
        rate *= tuning::tree_share(protocol, self.bytes);
        let (hops, levels) = (2.0 * f64::from(per_host.saturating_sub(1)), self.levels());
        let latency =
            TREE.base(protocol) + hops * TREE.hop(protocol) + levels * TREE.network(protocol);
        let ranked = latency + self.bytes / (rate / 2.0).min(most);
        Candidate { ranked, time: START + ranked + (hops + levels) * self.round(protocol) }
    }

    /// Reduction inside NVSwitches, with a tree of the results over hosts.
    ///
    /// For every byte, the owner of its part asks the switch, which reads it from all g GPUs and
    /// returns the sum. The owner sends the sum back, and the switch writes it to all. A GPU thus
    /// sends all of its vector once and its part a second time: (1 + 1/g) S.
    fn in_switch(&self) -> Option<Candidate> {
        let Topology { generation, hosts, per_host, across, .. } = *self.topology;
        let inside = self.topology.inside.filter(|inside| inside.switch && per_host > 1)?;
        let share = generation.in_switch()?;
        let (once, level) = IN_SWITCH;
        let mut rate = inside.rate * share / (1.0 + 1.0 / f64::from(per_host));
        if let Some(across) = across {
            rate = rate.min(if hosts > 2 { across / 2.0 } else { across });
        }
        let ranked = once + self.levels() * level + self.bytes / rate;
        Some(Candidate { ranked, time: START + ranked })
    }

    /// Levels of the tree over hosts, up and down.
    fn levels(&self) -> f64 {
        2.0 * f64::from(self.topology.hosts.max(1).ilog2())
    }

    /// Time that a step waits in addition to the hop.
    fn round(&self, protocol: Protocol) -> f64 {
        let generation = self.topology.generation;
        match protocol {
            Protocol::Ll => LL_ROUND / generation.ll_channel(),
            Protocol::Ll128 => LL128_ROUND / generation.ll128_channel(),
            Protocol::Simple => 0.0,
        }
    }

    /// Exposed time of the first slice and of the last copy.
    fn slice_and_copy(&self, protocol: Protocol) -> f64 {
        let Topology { ranks, inside, across, copy, .. } = *self.topology;
        let (Protocol::Simple, Some(inside), None) = (protocol, inside, across) else { return 0.0 };
        if !inside.switch {
            return 0.0;
        }
        let channels = 2.0 * f64::from(inside.rings);
        let part = self.bytes / f64::from(ranks);
        let slice = (part / channels / 2.0).min(SLICE);
        slice * channels / inside.rate + part / copy
    }
}
