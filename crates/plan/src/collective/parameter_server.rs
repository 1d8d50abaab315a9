//! Parameter servers: some ranks of the group each own and serve a shard.
//!
//! With K servers the vector is split into K chunks; server *s* is the rank *s* places after the
//! root and owns chunk *s*. One server is the classic bottleneck; as many servers as ranks is the
//! direct algorithm. Li et al., "Scaling Distributed Machine Learning with the Parameter Server"
//! (2014), deploy numbers in between. Servers hold what they receive and sum in canonical order, or
//! in list order if the order is free.
//!
//! In the formulas *P* is the number of ranks and *N* the bytes of the whole vector.

use super::counts::around;
use super::definition::{AlgorithmDef, Hints, Inner, Parameter, WHOLE, ways};
use super::direct::{ahead, behind, take_in};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveError, CollectiveKind, Pattern, SummationOrder, has_steps, relative};

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "ps",
    number: 9,
    parameter: Some(Parameter {
        form: "ps, ps:K",
        needs: "a number of servers of at least 1, such as ps:4",
        parse: |word| {
            let servers = word.map_or(Some(1), |word| word.parse().ok().filter(|&n| n > 0))?;
            Some([servers, 0, 0, 0, 0, 0])
        },
        print: |[servers, ..]| (servers != 1).then(|| servers.to_string()),
    }),
    suggested: Some([1, 0, 0, 0, 0, 0]),
    kinds: WHOLE,
    check: |p| match p.servers() {
        servers if (1..=p.ranks).contains(&servers) => Ok(()),
        servers => Err(CollectiveError::Unfit(format!(
            "ps:{servers} in a group of {ranks}: servers are ranks of the group, from 1 to {ranks}",
            ranks = p.ranks
        ))),
    },
    chunks: Pattern::servers,
    rounds: |p| if p.servers() > 1 { 2 } else { ways(p) },
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me, p.root, p.servers(), p.order),
        CollectiveKind::Reduce => reduce(p.ranks, me, p.root, p.servers(), p.order),
        CollectiveKind::Broadcast => broadcast(p.ranks, me, p.root, p.servers()),
        _ => Vec::new(),
    },
    edges: |p| around(p.ranks, &[0, p.root, p.root + p.servers()]),
    inner: Inner {
        owned: |p, me| {
            let place = relative(me, p.root, p.ranks);
            if place < p.servers() { Chunks::one(place) } else { Chunks::all(0) }
        },
        ..AlgorithmDef::BASE.inner
    },
    hints: Hints { sends_in_place: true, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

/// Every rank pushes each chunk to its server, which sums it and sends it to all ranks.
///
/// Rounds 2; bytes sent and received at most N(P+K−2)/K, by a server; fan-in P−1. Chunks: K. Held
/// in canonical order: N(P−1)/K.
pub fn all_reduce(
    ranks: u32,
    me: u32,
    root: u32,
    servers: u32,
    order: SummationOrder,
) -> Vec<Step> {
    let mut script = StepList::default();
    if let Some(group) = Group::of(ranks, me, root, servers) {
        group.push_round(&mut script, 0, order);
        group.pull_round(&mut script, 1, None);
    }
    script.done()
}

/// Every rank pushes each chunk to its server, and the servers send the sums to the root, which is
/// itself the first server.
///
/// Rounds 2, or 1 with a single server; bytes sent per rank N; received at most N(P+K−2)/K, by the
/// root; fan-in P−1. Chunks: K. Held in canonical order: N(P−1)/K.
pub fn reduce(ranks: u32, me: u32, root: u32, servers: u32, order: SummationOrder) -> Vec<Step> {
    let mut script = StepList::default();
    if let Some(group) = Group::of(ranks, me, root, servers) {
        group.push_round(&mut script, 0, order);
        if me == root {
            for server in 1..servers {
                script.recv(1, group.rank_of(server), Chunks::one(server), Combine::Replace);
            }
        } else if let Some(server) = group.serves(me) {
            script.send(1, root, Chunks::one(server));
        }
    }
    script.done()
}

/// The root, itself the first server, sends each server its chunk, and the servers send them to all
/// ranks.
///
/// Rounds 2, or 1 with a single server; bytes sent at most N(P+K−2)/K, by the root; received per
/// rank N; fan-in K, or K−1 if every rank serves. Chunks: K.
pub fn broadcast(ranks: u32, me: u32, root: u32, servers: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if let Some(group) = Group::of(ranks, me, root, servers) {
        if me == root {
            for server in 1..servers {
                script.send(0, group.rank_of(server), Chunks::one(server));
            }
        } else if let Some(server) = group.serves(me) {
            script.recv(0, root, Chunks::one(server), Combine::Replace);
        }
        let round = u32::from(servers > 1);
        group.pull_round(&mut script, round, Some(root));
    }
    script.done()
}

/// Assignment of chunks to servers, as seen by rank `me`.
struct Group {
    ranks: u32,
    me: u32,
    root: u32,
    servers: u32,
}

impl Group {
    fn of(ranks: u32, me: u32, root: u32, servers: u32) -> Option<Self> {
        let legal = has_steps(ranks, me) && root < ranks && (1..=ranks).contains(&servers);
        legal.then_some(Self { ranks, me, root, servers })
    }

    fn rank_of(&self, server: u32) -> u32 {
        (self.root + server) % self.ranks
    }

    /// Chunk that a rank serves, if it is a server.
    fn serves(&self, rank: u32) -> Option<u32> {
        let place = relative(rank, self.root, self.ranks);
        (place < self.servers).then_some(place)
    }

    /// Sends every chunk to its server and sums it there.
    fn push_round(&self, script: &mut StepList, round: u32, order: SummationOrder) {
        for to in ahead(self.ranks, self.me) {
            if let Some(server) = self.serves(to) {
                script.send(round, to, Chunks::one(server));
            }
        }
        if let Some(server) = self.serves(self.me) {
            take_in(script, round, behind(self.ranks, self.me), Chunks::one(server), order);
        }
    }

    /// Sends every server's chunk to all ranks but `except`, which already has it.
    fn pull_round(&self, script: &mut StepList, round: u32, except: Option<u32>) {
        let Self { ranks, me, .. } = *self;
        if let Some(server) = self.serves(me) {
            for to in ahead(ranks, me).filter(|to| Some(*to) != except) {
                script.send(round, to, Chunks::one(server));
            }
        }
        if Some(me) != except {
            for from in behind(ranks, me) {
                if let Some(server) = self.serves(from) {
                    script.recv(round, from, Chunks::one(server), Combine::Replace);
                }
            }
        }
    }
}
