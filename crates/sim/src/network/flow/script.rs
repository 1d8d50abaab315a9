//! Messages between the parties of an exchange, round by round, independent of concrete ranks.
//!
//! An *actor* is a member of a group in one of the rings over which the group's vector is
//! distributed; most exchanges have one ring. It starts its sends of a round when all of its own
//! messages of earlier rounds have completed. Nothing else delays it, so parts of a group may be
//! rounds apart.
//!
//! **Shapes.** Rounds of most algorithms are alike: all 2(P−1) rounds of a ring's all_reduce have
//! the same sends. Each distinct round is stored once, as a *shape*.
//!
//! **Visits.** Chunks of some algorithms pass through the dimensions of a grid one after the other.
//! A member then has one actor per dimension, its *lane*, which serves chunks in the order of the
//! dimension's queue. A [`Gate`] keeps a chunk from a dimension until it has left the previous one.
//!
//! **Sizes.** Chunks of an uneven split differ by one block. Every message counts as the largest of
//! its kind, that of the first chunks. No time is too short, an even split is exact, and equal
//! steps stay equal, as folding requires.

use crate::network::Vector;
use paceline_plan::collective::{Action, Chunking, Chunks, Pattern, Peers, Step, Visit};
use std::collections::BTreeMap;
use std::ops::Range;

/// Pattern of messages between actors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RoundScript {
    /// Function of each actor.
    pub(super) parties: Vec<Party>,
    /// Distinct rounds.
    pub(super) shapes: Vec<Vec<Send>>,
    /// Shape of every round.
    pub(super) rounds: Vec<u32>,
    /// Number of chunks of a vector.
    chunks: u32,
    /// Number of rings over which the vector is distributed.
    rings: u32,
    /// Distinct message sizes.
    sizes: Vec<Chunks>,
    /// Number of actors of each member.
    pub(super) lanes: u32,
    /// Sorted by lane and round.
    pub(super) gates: Vec<Gate>,
}

/// Start of a chunk's visit to a dimension, which waits for the end of its previous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Gate {
    /// Lane that waits, and the round before which it does.
    pub(super) lane: u32,
    pub(super) round: u32,
    /// Lane of the same member that it waits for, and the round that must have begun there.
    pub(super) after: u32,
    pub(super) until: u32,
}

/// Function of an actor in an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Party {
    /// Member of a collective.
    Member,
    /// Sender of a message.
    Sender,
    /// Receiver of a message.
    Receiver,
    /// Asynchronous server: no op of a program waits for it.
    Server,
}

/// One message of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Send {
    pub(super) from: u32,
    pub(super) to: u32,
    /// Index among the script's sizes.
    pub(super) size: u32,
    /// Part of the route that it crosses.
    pub(super) via: Via,
}

/// Part of the route between two actors that a message takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Via {
    /// The whole route.
    Through,
    /// Up to the reducing switch between them.
    Up,
    /// Down from that switch.
    Down,
}

/// Maximum number of steps for which a collective is expanded.
const MAX_STEPS: u64 = 1 << 29;

impl RoundScript {
    /// Expands a collective over rings, each given as the member at each position; `None` if it has
    /// too many steps.
    pub(super) fn collective(pattern: &Pattern, rings: &[Vec<u32>]) -> Option<Self> {
        let ranks = pattern.ranks();
        let all = ranks.checked_mul(rings.len() as u32)?;
        // The root has as many steps as any rank.
        let steps = pattern.steps(pattern.root()).len() as u64;
        if steps.saturating_mul(all.into()) > MAX_STEPS {
            return None;
        }
        let visits = pattern.visits();
        let lanes = visits.iter().map(|visit| visit.dimension as u32 + 1).max().unwrap_or(1);
        let actors = all.checked_mul(lanes)?;
        let mut script = Self::empty(vec![Party::Member; actors as usize], pattern.chunks());
        script.rings = rings.len() as u32;
        script.lanes = lanes;
        script.gates = gates(&visits);
        let plays = plays(pattern, rings)?;
        script.rounds = script.shapes_of(&plays, &visits);
        script.fill(&plays, &visits);
        Some(script)
    }

    /// Script of one message from actor 0 to actor 1.
    pub(crate) fn message(from: Party, to: Party) -> Self {
        let mut script = Self::empty(vec![from, to], 1);
        let size = script.size(Chunks::all(1));
        script.push(vec![Send { from: 0, to: 1, size, via: Via::Through }]);
        script
    }

    /// Script of a message that `ways` senders all hold: each sends its part to its receiver, and
    /// the receivers gather the parts around a ring. The senders are the first actors.
    pub(crate) fn sliced_message(ways: u32) -> Self {
        let mut parties = vec![Party::Sender; ways as usize];
        parties.extend(vec![Party::Receiver; ways as usize]);
        let mut script = Self::empty(parties, ways);
        let size = script.size(Chunks::one(0));
        let send = |from, to| Send { from, to, size, via: Via::Through };
        script.push((0..ways).map(|i| send(i, ways + i)).collect());
        let around = |i: u32| send(ways + i, ways + (i + 1) % ways);
        for _ in 1..ways {
            script.push((0..ways).map(around).collect());
        }
        script
    }

    /// Bytes of each size for a vector.
    pub(crate) fn bytes(&self, vector: &Vector) -> Vec<f64> {
        let cut = Chunking { elements: vector.elements, chunks: self.chunks, block: vector.block };
        let scale = vector.element.as_f64() / f64::from(self.rings.max(1));
        self.sizes.iter().map(|&chunks| cut.elements_in(chunks) as f64 * scale).collect()
    }

    /// Number of messages of the distinct rounds.
    pub(super) fn transfers(&self) -> usize {
        self.shapes.iter().map(Vec::len).sum()
    }

    fn empty(parties: Vec<Party>, chunks: u32) -> Self {
        let (shapes, rounds, sizes) = (Vec::new(), Vec::new(), Vec::new());
        let gates = Vec::new();
        Self { parties, shapes, rounds, chunks, rings: 1, sizes, lanes: 1, gates }
    }

    /// Index of a size, independent of the first chunk. The first chunks, and the first piece of
    /// each, are never smaller than others.
    fn size(&mut self, chunks: Chunks) -> u32 {
        let first = Chunks { first: 0, piece: 0, ..chunks };
        let known = self.sizes.iter().position(|&size| size == first);
        known.unwrap_or_else(|| {
            self.sizes.push(first);
            self.sizes.len() - 1
        }) as u32
    }

    /// Appends a round.
    fn push(&mut self, round: Vec<Send>) {
        let known = self.shapes.iter().position(|shape| *shape == round);
        let shape = known.unwrap_or_else(|| {
            self.shapes.push(round);
            self.shapes.len() - 1
        });
        self.rounds.push(shape as u32);
    }

    /// Identifies rounds by a fingerprint of their sends, so that only one rank's sends are in
    /// memory at a time.
    fn shapes_of(&mut self, plays: &[Play], visits: &[Visit]) -> Vec<u32> {
        let mut prints: Vec<u128> = Vec::new();
        for (index, play) in plays.iter().enumerate() {
            play.sends(visits, |(round, lane), from, to, chunks, via| {
                let size = self.size(chunks);
                let (from, to) = (from * self.lanes + lane, to * self.lanes + lane);
                if prints.len() <= round as usize {
                    prints.resize(round as usize + 1, 0);
                }
                let words = [index as u32 * 3 + via as u32, from, to, size];
                let word = words.into_iter().fold(1u128, |all, word| all << 32 | u128::from(word));
                let print = &mut prints[round as usize];
                *print = (*print ^ word).wrapping_mul(FINGERPRINT).rotate_left(57);
            });
        }
        let mut known: BTreeMap<u128, u32> = BTreeMap::new();
        let mut shape = |print| {
            let all = known.len() as u32;
            *known.entry(print).or_insert(all)
        };
        prints.into_iter().map(&mut shape).collect()
    }

    /// Expands the first round of every shape.
    fn fill(&mut self, plays: &[Play], visits: &[Visit]) {
        let shapes = self.rounds.iter().max().map_or(0, |&last| last as usize + 1);
        let mut first: Vec<Option<u32>> = vec![None; shapes];
        let mut kept: Vec<Option<u32>> = Vec::new();
        for &shape in &self.rounds {
            let new = first[shape as usize].replace(shape).is_none();
            kept.push(new.then_some(shape));
        }
        self.shapes = vec![Vec::new(); shapes];
        for play in plays {
            play.sends(visits, |(round, lane), from, to, chunks, via| {
                let Some(shape) = kept[round as usize] else { return };
                let size = self.size(chunks);
                for ring in play.rings.clone() {
                    let member = |place: u32| ring * play.pattern.ranks() + place;
                    let actor = |place: u32| member(place) * self.lanes + lane;
                    let send = Send { from: actor(from), to: actor(to), size, via };
                    self.shapes[shape as usize].push(send);
                }
            });
        }
    }
}

/// Odd 128-bit multiplier with random-looking bits: those of the golden ratio, as for
/// multiplicative hashing (Knuth, "The Art of Computer Programming", volume 3, section 6.4).
const FINGERPRINT: u128 = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835;

/// Pattern of a range of rings.
struct Play {
    pattern: Pattern,
    rings: Range<u32>,
}

impl Play {
    /// Steps of one position in a visit, each with its round and lane.
    fn visit(&self, visit: &Visit, me: u32) -> impl Iterator<Item = ((u32, u32), Step)> + use<> {
        let (lane, first) = (visit.dimension as u32, visit.rounds.start);
        let steps = self.pattern.visit_steps(visit, me).into_iter();
        steps.map(move |step| ((first + step.round, lane), step))
    }

    /// Calls `each` for every send of every position: round and lane, sender, receiver, chunks and
    /// route part.
    ///
    /// A reducing switch forwards data as it arrives: its ranks send up and receive down
    /// concurrently. A message needs two ends, so each up and each down message is directed at a
    /// neighbour among the ranks at the switch.
    fn sends(&self, visits: &[Visit], mut each: impl FnMut((u32, u32), u32, u32, Chunks, Via)) {
        for me in 0..self.pattern.ranks() {
            let steps: Vec<((u32, u32), Step)> = match visits {
                [] => {
                    self.pattern.steps(me).into_iter().map(|step| ((step.round, 0), step)).collect()
                }
                visits => visits.iter().flat_map(|visit| self.visit(visit, me)).collect(),
            };
            for (at, step) in steps {
                match step.action {
                    // Lent data crosses the same links when the peer reads it.
                    Action::Send { to, chunks }
                    | Action::Lend { to, chunks }
                    | Action::Write { to, chunks } => {
                        each(at, me, to, chunks, Via::Through);
                    }
                    Action::Offer { to, chunks } => {
                        each(at, me, neighbour(to, me, 1), chunks, Via::Up);
                    }
                    Action::Take { from, chunks } => {
                        let last = from.count.saturating_sub(1);
                        each(at, neighbour(from, me, last), me, chunks, Via::Down);
                    }
                    // Covered by the sender's side. Sums and copies inside a device run at many
                    // times the network bandwidth.
                    Action::Recv { .. }
                    | Action::Read { .. }
                    | Action::Fold { .. }
                    | Action::Emit { .. } => {}
                }
            }
        }
    }
}

/// Gates between the visits of each chunk.
fn gates(visits: &[Visit]) -> Vec<Gate> {
    let mut last: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    let mut gates = Vec::new();
    for visit in visits {
        let (lane, round) = (visit.dimension as u32, visit.rounds.start);
        if let Some((after, until)) = last.insert(visit.chunk, (lane, visit.rounds.end))
            && after != lane
        {
            gates.push(Gate { lane, round, after, until });
        }
    }
    gates.sort_unstable();
    gates
}

/// Rank `places` positions after `me`, cyclically among those at a switch.
fn neighbour(peers: Peers, me: u32, places: u32) -> u32 {
    let at = (me - peers.first) / peers.stride.max(1);
    peers.first + (at + places) % peers.count.max(1) * peers.stride
}

/// Pattern of each ring: the same for all, unless the root has a different position in each.
fn plays(pattern: &Pattern, rings: &[Vec<u32>]) -> Option<Vec<Play>> {
    let all = rings.len() as u32;
    if !pattern.kind().has_root() || all < 2 {
        return Some(vec![Play { pattern: *pattern, rings: 0..all }]);
    }
    let play = |(ring, places): (u32, &Vec<u32>)| {
        let root = places.iter().position(|&member| member == pattern.root())? as u32;
        let pattern = Pattern::new(
            pattern.kind(),
            pattern.algorithm(),
            pattern.order(),
            pattern.ranks(),
            root,
        );
        Some(Play { pattern: pattern.ok()?, rings: ring..ring + 1 })
    };
    (0..all).zip(rings).map(play).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::collective::{Algorithm, CollectiveKind, SummationOrder};
    use paceline_plan::units::Bytes;
    use proptest::prelude::*;

    fn pattern(kind: CollectiveKind, algorithm: Algorithm, ranks: u32, root: u32) -> Pattern {
        Pattern::new(kind, algorithm, SummationOrder::Free, ranks, root)
            .or_else(|_| Pattern::new(kind, Algorithm::Auto, SummationOrder::Free, ranks, root))
            .unwrap()
    }

    #[test]
    fn rounds_that_look_alike_are_kept_once() {
        let ring = pattern(CollectiveKind::AllReduce, Algorithm::Ring, 100, 0);
        let script = RoundScript::collective(&ring, &[(0..100).collect()]).unwrap();
        assert_eq!((script.shapes.len(), script.rounds.len()), (1, 198));
        assert_eq!(script.transfers(), 100);
        let halving = pattern(CollectiveKind::AllReduce, Algorithm::HalvingDoubling, 16, 0);
        let script = RoundScript::collective(&halving, &[(0..16).collect()]).unwrap();
        assert_eq!((script.shapes.len(), script.rounds.len()), (4, 8), "doubling is halving back");
    }

    #[test]
    fn uneven_chunks_count_as_the_largest() {
        let ring = pattern(CollectiveKind::AllGather, Algorithm::Ring, 4, 0);
        let script = RoundScript::collective(&ring, &[(0..4).collect()]).unwrap();
        assert_eq!(script.bytes(&Vector::of_bytes(Bytes(10))), [3.0]);
        let two = RoundScript::collective(&ring, &[vec![0, 1, 2, 3], vec![1, 0, 3, 2]]).unwrap();
        assert_eq!(two.bytes(&Vector::of_bytes(Bytes(16))), [2.0], "each ring has its share");
    }

    #[test]
    fn a_sliced_message_is_sent_in_parts_and_gathered() {
        let script = RoundScript::sliced_message(4);
        assert_eq!((script.shapes.len(), script.rounds.len()), (2, 4));
        assert_eq!(script.bytes(&Vector::of_bytes(Bytes(400))), [100.0]);
        assert_eq!(script.parties[3..5], [Party::Sender, Party::Receiver]);
    }

    /// The root's position differs from ring to ring; the member does not.
    #[test]
    fn rings_turn_around_their_root() {
        let chain = pattern(CollectiveKind::Broadcast, Algorithm::Ring, 4, 1);
        let rings = [vec![0, 1, 2, 3], vec![1, 0, 3, 2]];
        let script = RoundScript::collective(&chain, &rings).unwrap();
        let first: Vec<u32> = script.shapes[0].iter().map(|send| send.from).collect();
        assert_eq!(first, [1, 4], "place 1 of the first ring and place 0 of the second");
    }

    proptest! {
        /// Shapes and rounds reproduce the pattern's steps.
        #[test]
        fn a_script_is_its_pattern(
            kind in proptest::sample::select(CollectiveKind::ALL.to_vec()),
            algorithm in proptest::sample::select(vec![
                "ring", "halving-doubling", "direct", "ps:2", "tree", "multi-ring:2", "shared-memory",
                "hierarchical:ring:ring/2", "partitioned", "naive", "overlapped", "one-shot"
            ]),
            ranks in 1u32..20,
            root in 0u32..20,
            bytes in 0u64..100_000,
        ) {
            let pattern = pattern(kind, algorithm.parse().unwrap(), ranks, root % ranks);
            let script = RoundScript::collective(&pattern, &[(0..ranks).collect()]).unwrap();
            let cut = Chunking { elements: bytes, chunks: pattern.chunks(), block: 1 };
            let sizes = script.bytes(&Vector::of_bytes(Bytes(bytes)));
            let mut written: Vec<(u32, u32, u32)> = Vec::new();
            for (round, &shape) in script.rounds.iter().enumerate() {
                let sends = script.shapes[shape as usize].iter();
                written.extend(sends.map(|send| (round as u32, send.from, send.to)));
            }
            let mut meant: Vec<(u32, u32, u32)> = Vec::new();
            for me in 0..ranks {
                for step in pattern.steps(me) {
                    let (Action::Send { to, chunks }
                    | Action::Lend { to, chunks }
                    | Action::Write { to, chunks }) = step.action
                    else {
                        continue;
                    };
                    meant.push((step.round, me, to));
                    let shape = script.rounds[step.round as usize];
                    let mut sends = script.shapes[shape as usize].iter();
                    let send = sends.find(|send| (send.from, send.to) == (me, to)).unwrap();
                    prop_assert!(sizes[send.size as usize] >= cut.elements_in(chunks) as f64);
                    if bytes % u64::from(pattern.chunks() * chunks.pieces.max(1)) == 0 {
                        prop_assert_eq!(sizes[send.size as usize], cut.elements_in(chunks) as f64);
                    }
                }
            }
            written.sort_unstable();
            meant.sort_unstable();
            prop_assert_eq!(written, meant);
        }
    }
}
