//! Matching of communicating ops across ranks: one rule for validation, simulation and traces.
//!
//! Between two ranks, the k-th send of a channel and microbatch meets the k-th receive of them. In
//! a group, the k-th collective on a lane meets the k-th one on the lane of that name of every
//! other member.

use crate::ids::{OpId, Rank};
use crate::mesh::GroupKind;
use crate::program::{Op, Peer, Plan, Program, Section, View};
use std::collections::BTreeMap;

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Message {
    /// Rank at the other end.
    pub peer: Peer,
    /// Channel of the message.
    pub channel: u16,
    /// Microbatch of the message.
    pub microbatch: u32,
    /// The send or receive.
    pub op: OpId,
    /// Data of this end.
    pub view: View,
}

impl Message {
    /// Key of a message between two given ranks.
    pub fn key(&self) -> (u16, u32) {
        (self.channel, self.microbatch)
    }
}

/// All sends, or all receives, of a section: sorted by peer, channel, microbatch and op.
#[derive(Clone, Debug, Default)]
pub struct Side {
    messages: Vec<Message>,
    /// Peers with the end of their messages, in ascending order.
    peers: Vec<(Peer, usize)>,
}

impl Side {
    fn new(mut messages: Vec<Message>) -> Self {
        messages.sort_unstable_by_key(|m| (m.peer, m.channel, m.microbatch, m.op));
        let mut peers: Vec<(Peer, usize)> = Vec::new();
        for (at, message) in messages.iter().enumerate() {
            match peers.last_mut() {
                Some((peer, end)) if *peer == message.peer => *end = at + 1,
                _ => peers.push((message.peer, at + 1)),
            }
        }
        Self { messages, peers }
    }

    /// Each peer with its messages.
    pub fn peers(&self) -> impl Iterator<Item = (Peer, &[Message])> {
        (0..self.peers.len()).map(|at| (self.peers[at].0, self.of(at)))
    }

    /// Ranks that the peers of `rank` are, ascending and each once; peers that do not exist are
    /// left out.
    pub fn destinations(&self, plan: &Plan, rank: Rank) -> Vec<Rank> {
        let peers = self.peers.iter();
        let mut ranks: Vec<Rank> = peers.filter_map(|&(peer, _)| plan.peer(rank, peer)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Collects the messages that `rank`, which has these, exchanges with `other`, sorted by key
    /// and op. Two peers can be the same rank: on an axis of two, next and previous coincide.
    pub fn between<'m>(
        &'m self,
        plan: &Plan,
        rank: Rank,
        other: Rank,
        found: &mut Vec<&'m Message>,
    ) {
        found.clear();
        // A server has a peer for every replica; they are the last in order, and need no search.
        let relative = self.peers.partition_point(|&(peer, _)| peer < Peer::Replica(0));
        let replicas = &self.peers[relative..];
        let named = replicas.binary_search_by_key(&Peer::Replica(other.0), |&(peer, _)| peer);
        let candidates = (0..relative).chain(named.ok().map(|at| relative + at));
        let mut parts = 0;
        for at in candidates {
            if plan.peer(rank, self.peers[at].0) == Some(other) {
                found.extend(self.of(at));
                parts += 1;
            }
        }
        if parts > 1 {
            found.sort_unstable_by_key(|message| (message.key(), message.op));
        }
    }

    fn of(&self, peer: usize) -> &[Message] {
        let start = peer.checked_sub(1).map_or(0, |before| self.peers[before].1);
        &self.messages[start..self.peers[peer].1]
    }
}

/// Sends and receives of a section, without those of servers that answer as requests arrive.
pub fn sides(section: &Section, answers: impl Fn(Peer) -> bool) -> (Side, Side) {
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (index, node) in section.nodes.iter().enumerate() {
        let (list, peer, channel, view, microbatch) = match node.op {
            Op::Send { to, channel, view, microbatch } => {
                (&mut sends, to, channel, view, microbatch)
            }
            Op::Recv { from, channel, view, microbatch } => {
                (&mut recvs, from, channel, view, microbatch)
            }
            _ => continue,
        };
        if !answers(peer) {
            let (op, microbatch) = (OpId::from(index), microbatch.0);
            list.push(Message { peer, channel, microbatch, op, view });
        }
    }
    (Side::new(sends), Side::new(recvs))
}

/// Matches the messages of one end with those of the other, both sorted by key; among equal keys,
/// in order.
pub fn meet<'m>(
    these: &'m [&'m Message],
    those: &'m [&'m Message],
) -> impl Iterator<Item = (&'m Message, Option<&'m Message>)> {
    let mut rest = those.iter().peekable();
    these.iter().map(move |message| {
        while rest.next_if(|other| other.key() < message.key()).is_some() {}
        (*message, rest.next_if(|other| other.key() == message.key()).copied())
    })
}

/// Collectives of a section in order, by group and name of the lane.
pub fn calls<'p>(
    plan: &Plan,
    program: &'p Program,
    section: &Section,
) -> BTreeMap<(GroupKind, &'p str), Vec<OpId>> {
    let mut calls: BTreeMap<_, Vec<OpId>> = BTreeMap::new();
    let mut position = BTreeMap::new();
    // Looked up by numbers; names are compared once for each lane and group.
    let mut lists: Vec<Vec<OpId>> = Vec::new();
    for (index, node) in section.nodes.iter().enumerate() {
        let Op::Collective { call, .. } = node.op else { continue };
        let group = program.call(call).group;
        let at = *position.entry((group, node.lane)).or_insert_with(|| {
            lists.push(Vec::new());
            lists.len() - 1
        });
        lists[at].push(OpId::from(index));
    }
    for ((group, lane), at) in position {
        let name = program.lanes.get(lane.index()).map_or("", String::as_str);
        calls.entry((plan.group(group), name)).or_default().append(&mut lists[at]);
    }
    calls.values_mut().for_each(|ops| ops.sort_unstable());
    calls
}
