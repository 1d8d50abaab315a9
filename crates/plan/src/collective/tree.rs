//! Double binary trees: as few bytes as the ring, in a logarithmic number of rounds, for any rank
//! count.
//!
//! A single binary tree wastes half of the bandwidth: its leaves, half of the ranks, only receive.
//! Two trees with half of the vector each, in which no rank is interior twice, use all of it.
//! Chunks are pipelined through a tree, so that all its levels are busy at once. See Sanders, Speck
//! and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009),
//! sections 2 and 3; NCCL uses such trees for its all_reduce. Their edge colouring, which gives a
//! rank one message at a time, is omitted: here two chunks of half the size may share a round.
//!
//! **Shape.** Positions 1 to *n* are numbered in order: the position i = odd·2ʰ has height *h*, so
//! odd positions are leaves, and the root is the largest power of two. The second tree is the first
//! one mirrored if *n* is even and shifted by one if it is odd. Its even positions are therefore
//! those that are odd in the first.
//!
//! **Canonical order.** Interior ranks of those trees sum their own contribution between those of
//! their children, which is not the canonical tree. But the P−1 sums of the canonical tree over P
//! ranks, each numbered by the first rank of its right operand, are themselves numbered in order,
//! for any P. [`all_reduce`] can therefore execute exactly that tree: sum *m* is computed by rank
//! *m*−1 in the first half of the vector and by rank *m* in the second. An even-numbered sum is
//! computed by a rank whose own contribution is an operand elsewhere; sending it there costs half a
//! vector more per rank.
//!
//! In the formulas *P* is the number of ranks, *N* the bytes of the whole vector, *L* the height of
//! the trees and *K* the chunks of each half.

use super::definition::{AlgorithmDef, Counted, Hints, Inner, Symmetric, WHOLE};
use super::step::{Chunks, Combine, Step, StepList};
use super::{CollectiveKind, Pattern, SummationOrder, has_steps, relative};
use std::collections::BTreeMap;

/// Entry in the table.
pub(super) const DEF: AlgorithmDef = AlgorithmDef {
    name: "tree",
    number: 2,
    kinds: WHOLE,
    // Reductions to a root use the trees of the free order.
    is_canonical: |p| p.kind == CollectiveKind::AllReduce,
    chunks,
    rounds,
    steps: |p, me| match p.kind {
        CollectiveKind::AllReduce => all_reduce(p.ranks, me, p.order),
        CollectiveKind::Broadcast => broadcast(p.ranks, me, p.root),
        CollectiveKind::Reduce => reduce(p.ranks, me, p.root),
        _ => Vec::new(),
    },
    counted: Counted::AllIfSmall,
    edges: of_every_shape,
    inner: Inner { owned, ..AlgorithmDef::BASE.inner },
    hints: Hints { symmetric: Symmetric::None, ..AlgorithmDef::BASE.hints },
    ..AlgorithmDef::BASE
};

/// Up both trees to their roots, then down again.
///
/// In free order: L = ⌊log₂ P⌋ and K = 4(L−1) + 1; rounds 2(L + K − 1); bytes sent and received at
/// most 2N (N for two ranks, 3N/2 for three); fan-in 2 (1 for two ranks).
///
/// In canonical order: L = ⌊log₂ (P−1)⌋ and K = 4L + 1; the halves alternate, so rounds 4(L + K);
/// bytes sent at most 5N/2 (N for two ranks); received at most 5N/2 (N for two ranks, 2N for three
/// and four); fan-in 2 (1 for two ranks). Nothing is held.
///
/// Chunks: 2K.
pub fn all_reduce(ranks: u32, me: u32, order: SummationOrder) -> Vec<Step> {
    if !has_steps(ranks, me) || ranks == 1 {
        return Vec::new();
    }
    match order {
        SummationOrder::Canonical => canonical_all_reduce(ranks, me),
        SummationOrder::Free => {
            let up = TwoTrees { nodes: ranks, me: me + 1, chunks: chunks_of_half(ranks, order) };
            let rank = |position: u32| position - 1;
            let mut script = StepList::default();
            up.ascend(&mut script, 0, rank);
            up.descend(&mut script, up.rounds(), rank);
            script.sorted()
        }
    }
}

/// The root sends to the roots of two trees over all other ranks.
///
/// L = ⌊log₂ (P−1)⌋ and K = 4L + 1; rounds L + K; bytes sent and received per rank at most N;
/// fan-in 2 (1 for two ranks). Chunks: 2K (1 for two ranks, which need no second tree).
pub fn broadcast(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if !has_steps(ranks, me) || root >= ranks || ranks == 1 {
        return Vec::new();
    }
    let place = relative(me, root, ranks);
    let rank = |position: u32| (root + position) % ranks;
    if ranks == 2 {
        match place {
            0 => script.send(0, rank(1), Chunks::one(0)),
            _ => script.recv(0, root, Chunks::one(0), Combine::Replace),
        }
        return script.done();
    }
    let down = TwoTrees { nodes: ranks - 1, me: place, chunks: chunks_of_rooted_half(ranks) };
    for tree in 0..2 {
        let top = down.position(tree, down.root());
        for c in 0..down.chunks {
            if place == 0 {
                script.send(c, rank(top), down.chunk(tree, c));
            } else if place == top {
                script.recv(c, root, down.chunk(tree, c), Combine::Replace);
            }
        }
    }
    if place > 0 {
        down.descend(&mut script, 1, rank);
    }
    script.sorted()
}

/// Up two trees over all other ranks, whose roots send to the root: [`broadcast`] in reverse.
///
/// L = ⌊log₂ (P−1)⌋ and K = 4L + 1; rounds L + K; bytes sent and received per rank at most N;
/// fan-in 2 (1 for two ranks). Chunks: 2K (1 for two ranks, which need no second tree).
pub fn reduce(ranks: u32, me: u32, root: u32) -> Vec<Step> {
    let mut script = StepList::default();
    if !has_steps(ranks, me) || root >= ranks || ranks == 1 {
        return Vec::new();
    }
    let place = relative(me, root, ranks);
    let rank = |position: u32| (root + position) % ranks;
    if ranks == 2 {
        match place {
            0 => script.recv(0, rank(1), Chunks::one(0), Combine::Reduce),
            _ => script.send(0, root, Chunks::one(0)),
        }
        return script.done();
    }
    let up = TwoTrees { nodes: ranks - 1, me: place, chunks: chunks_of_rooted_half(ranks) };
    if place > 0 {
        up.ascend(&mut script, 0, rank);
    }
    for tree in 0..2 {
        let top = up.position(tree, up.root());
        for c in 0..up.chunks {
            let round = height(up.root()) + c;
            if place == 0 {
                script.recv(round, rank(top), up.chunk(tree, c), Combine::Reduce);
            } else if place == top {
                script.send(round, root, up.chunk(tree, c));
            }
        }
    }
    script.sorted()
}

/// Number of chunks the vector is split into.
fn chunks(p: &Pattern) -> u32 {
    let (ranks, order) = (p.ranks, p.order);
    match p.kind {
        CollectiveKind::AllReduce => 2 * chunks_of_half(ranks, order),
        _ if ranks <= 2 => 1,
        _ => 2 * chunks_of_rooted_half(ranks),
    }
}

/// Number of rounds.
fn rounds(p: &Pattern) -> u32 {
    let (ranks, order) = (p.ranks, p.order);
    match (p.kind, order) {
        (CollectiveKind::AllReduce, SummationOrder::Free) => {
            2 * (ranks.ilog2() + chunks_of_half(ranks, order) - 1)
        }
        (CollectiveKind::AllReduce, SummationOrder::Canonical) => {
            4 * ((ranks - 1).ilog2() + chunks_of_half(ranks, order))
        }
        _ => (ranks - 1).ilog2() + chunks_of_rooted_half(ranks),
    }
}

/// Half of the vector whose sum rank `me` holds between the up and down phases of an [`all_reduce`]
/// of two ranks or more.
fn owned(p: &Pattern, me: u32) -> Chunks {
    let (ranks, half_chunks) = (p.ranks, chunks(p) / 2);
    let root_of = |half: &u32| match p.order {
        SummationOrder::Free => {
            let trees = TwoTrees { nodes: ranks, me: me + 1, chunks: 1 };
            trees.position(*half, trees.root()) == me + 1
        }
        SummationOrder::Canonical => {
            let sums = Sums { ranks, half: *half };
            sums.maker(sums.last()) == me
        }
    };
    match (0..2).find(root_of) {
        Some(half) => Chunks::spaced(half * half_chunks, half_chunks, 1),
        None => Chunks::all(0),
    }
}

/// Number of chunks per half. A chunk waits for L−1 others before the roots are busy; four times as
/// many chunks limit the loss to a quarter, as in a chain ([`ring`](super::ring)).
fn chunks_of_half(ranks: u32, order: SummationOrder) -> u32 {
    let waits = match order {
        SummationOrder::Free => ranks.max(2).ilog2() - 1,
        SummationOrder::Canonical => ranks.saturating_sub(1).max(1).ilog2(),
    };
    4 * waits + 1
}

fn chunks_of_rooted_half(ranks: u32) -> u32 {
    4 * ranks.saturating_sub(1).max(1).ilog2() + 1
}

/// Height of a position above the leaves.
fn height(position: u32) -> u32 {
    position.trailing_zeros()
}

/// Parent of a position in a tree of `nodes` positions.
fn parent(position: u32, nodes: u32) -> Option<u32> {
    let bit = 1 << height(position);
    let above = (position ^ bit) | (bit << 1);
    // The last positions may have no parent to the right; then it is the nearest to the left.
    let above = if above <= nodes { above } else { position ^ bit };
    (above > 0).then_some(above)
}

/// Children of a position in a tree of `nodes` positions: left, and right if it exists.
fn children(position: u32, nodes: u32) -> [Option<u32>; 2] {
    let half = (1 << height(position)) / 2;
    let left = (half > 0).then(|| position - half);
    let right = (0..height(position)).rev().map(|h| position + (1 << h)).find(|&c| c <= nodes);
    [left, right]
}

/// Place of a position in a tree of `nodes` positions: its height, that of its parent, the parent's
/// side, and the heights of its children. Heights have 1 added; 0 means none.
type Shape = [u32; 5];

fn shape(position: u32, nodes: u32) -> Shape {
    let over = |other: Option<u32>| other.map_or(0, |other| height(other) + 1);
    let above = parent(position, nodes);
    let [left, right] = children(position, nodes);
    let side = u32::from(above > Some(position));
    [height(position) + 1, over(above), side, over(left), over(right)]
}

/// Ranks of a group that have all the shapes of its ranks in both trees.
///
/// Ranks of one shape send and receive alike, in the same rounds, and differ by the distance of their
/// peers only. The first and last `EACH` of a shape are taken, which cover all places within a host.
fn of_every_shape(p: &Pattern) -> Vec<u32> {
    /// Ranks of one shape, from each end.
    const EACH: usize = 80;
    let shapes = |me: u32| -> [Shape; 3] {
        match (p.kind, p.order) {
            (CollectiveKind::AllReduce, SummationOrder::Free) => {
                let trees = TwoTrees { nodes: p.ranks, me: me + 1, chunks: 1 };
                let [first, second] = [0, 1].map(|tree| shape(trees.within(tree, me + 1), p.ranks));
                [first, second, Shape::default()]
            }
            (CollectiveKind::AllReduce, SummationOrder::Canonical) => {
                let made = |half| {
                    let made = Sums { ranks: p.ranks, half }.made_by(me);
                    made.map_or(Shape::default(), |sum| shape(sum, p.ranks - 1))
                };
                // The halves of the first and of the last rank come from ranks of their own.
                let sums = [0, 1].map(|half| Sums { ranks: p.ranks, half });
                let feeds = |(sums, end): (&Sums, u32)| {
                    u32::from(sums.made_by(end).is_none() && sums.feeder(end) == me)
                };
                let [first, second] = [0, 1].map(|half: usize| {
                    feeds((&sums[half], 0)) + 2 * feeds((&sums[half], p.ranks - 1))
                });
                [made(0), made(1), [me % 2, first, second, 0, 0]]
            }
            _ => match relative(me, p.root, p.ranks) {
                0 => [Shape::default(); 3],
                place => {
                    let trees = TwoTrees { nodes: p.ranks - 1, me: place, chunks: 1 };
                    let within = |tree| shape(trees.within(tree, place), p.ranks - 1);
                    [within(0), within(1), Shape::default()]
                }
            },
        }
    };
    let mut ranks = Vec::new();
    let mut take = |all: &mut dyn Iterator<Item = u32>| {
        let mut taken: BTreeMap<[Shape; 3], usize> = BTreeMap::new();
        for me in all {
            let taken = taken.entry(shapes(me)).or_default();
            if *taken < EACH {
                *taken += 1;
                ranks.push(me);
            }
        }
    };
    take(&mut (0..p.ranks));
    take(&mut (0..p.ranks).rev());
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// One rank's view of two trees in which no rank is interior twice.
struct TwoTrees {
    nodes: u32,
    /// This rank's position in the first tree.
    me: u32,
    /// Number of chunks per half.
    chunks: u32,
}

impl TwoTrees {
    /// Converts a position of the first tree into one of `tree`.
    fn within(&self, tree: u32, position: u32) -> u32 {
        match tree {
            0 => position,
            _ if self.nodes.is_multiple_of(2) => self.nodes + 1 - position,
            _ => position % self.nodes + 1,
        }
    }

    /// Converts a position of `tree` into one of the first tree.
    fn position(&self, tree: u32, within: u32) -> u32 {
        match tree {
            0 => within,
            _ if self.nodes.is_multiple_of(2) => self.nodes + 1 - within,
            _ => (within + self.nodes - 2) % self.nodes + 1,
        }
    }

    fn root(&self) -> u32 {
        1 << self.nodes.ilog2()
    }

    fn chunk(&self, tree: u32, c: u32) -> Chunks {
        Chunks::one(tree * self.chunks + c)
    }

    /// Number of rounds of each direction.
    fn rounds(&self) -> u32 {
        height(self.root()) + self.chunks - 1
    }

    /// Chunk *c* leaves a position of height *h* in round h + c.
    fn ascend(&self, script: &mut StepList, first_round: u32, rank: impl Fn(u32) -> u32) {
        for tree in 0..2 {
            let at = self.within(tree, self.me);
            for c in 0..self.chunks {
                for child in children(at, self.nodes).into_iter().flatten() {
                    let from = rank(self.position(tree, child));
                    let round = first_round + height(child) + c;
                    script.recv(round, from, self.chunk(tree, c), Combine::Reduce);
                }
                if let Some(above) = parent(at, self.nodes) {
                    let to = rank(self.position(tree, above));
                    script.send(first_round + height(at) + c, to, self.chunk(tree, c));
                }
            }
        }
    }

    /// Chunk *c* leaves a position of height *h* in round L − h + c.
    fn descend(&self, script: &mut StepList, first_round: u32, rank: impl Fn(u32) -> u32) {
        let first_round = first_round + height(self.root());
        for tree in 0..2 {
            let at = self.within(tree, self.me);
            for c in 0..self.chunks {
                if let Some(above) = parent(at, self.nodes) {
                    let from = rank(self.position(tree, above));
                    let round = first_round - height(above) + c;
                    script.recv(round, from, self.chunk(tree, c), Combine::Replace);
                }
                for child in children(at, self.nodes).into_iter().flatten() {
                    let to = rank(self.position(tree, child));
                    script.send(first_round - height(at) + c, to, self.chunk(tree, c));
                }
            }
        }
    }
}

/// Assignment of the canonical tree's sums to ranks, in one half of the vector.
#[derive(Clone, Copy)]
struct Sums {
    ranks: u32,
    half: u32,
}

/// Operand of a sum.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operand {
    /// A rank's own contribution.
    Own(u32),
    /// Another sum.
    Sum(u32),
}

impl Sums {
    fn maker(&self, sum: u32) -> u32 {
        sum + self.half - 1
    }

    /// Sum that a rank computes, if any.
    fn made_by(&self, rank: u32) -> Option<u32> {
        Some(rank + 1 - self.half).filter(|sum| (1..self.ranks).contains(sum))
    }

    /// The final sum.
    fn last(&self) -> u32 {
        1 << (self.ranks - 1).ilog2()
    }

    /// Sum that has a rank's own contribution as operand: the lower one of the two beside it.
    fn of_own(&self, rank: u32) -> u32 {
        if rank.is_multiple_of(2) && rank + 1 < self.ranks { rank + 1 } else { rank }
    }

    fn operands(&self, sum: u32) -> [Operand; 2] {
        let [left, right] = children(sum, self.ranks - 1);
        [
            left.map_or(Operand::Own(sum - 1), Operand::Sum),
            right.map_or(Operand::Own(sum), Operand::Sum),
        ]
    }

    /// Rank that sends the result to a rank without a sum, which the down phase does not reach. It
    /// is the least loaded rank, which computes the last sum of the other half, if the down phase
    /// reaches it.
    fn feeder(&self, rank: u32) -> u32 {
        let other = self.last() - self.half;
        if self.made_by(other).is_some() { other } else { self.maker(self.of_own(rank)) }
    }

    /// Rank that holds an operand, and round in which its first chunk is sent.
    fn whereabouts(&self, operand: Operand) -> (u32, u32) {
        match operand {
            Operand::Own(rank) => (rank, 0),
            Operand::Sum(sum) => (self.maker(sum), height(sum) + 1),
        }
    }
}

/// Computes every sum of the canonical tree and returns the last one along the reverse path.
///
/// The halves alternate, since a rank may send a contribution of one half and a sum of the other to
/// the same peer.
fn canonical_all_reduce(ranks: u32, me: u32) -> Vec<Step> {
    let chunks = chunks_of_half(ranks, SummationOrder::Canonical);
    let mut script = StepList::default();
    for half in 0..2 {
        let sums = Sums { ranks, half };
        let levels = height(sums.last()) + 1;
        let made = sums.made_by(me);
        for c in 0..chunks {
            let chunk = Chunks::one(half * chunks + c);
            let up = |round: u32| 2 * (round + c) + half;
            let down = |round: u32| 2 * (levels + chunks - 1 + round + c) + half;
            let gives = sums.maker(sums.of_own(me));
            if gives != me {
                script.send(up(0), gives, chunk);
            }
            let Some(made) = made else {
                let feeder = sums.feeder(me);
                let round = sums.made_by(feeder).map_or(0, |sum| levels - 1 - height(sum));
                script.recv(down(round), feeder, chunk, Combine::Replace);
                continue;
            };
            let mut operands = sums.operands(made).map(|operand| sums.whereabouts(operand));
            operands.sort_unstable_by_key(|(_, round)| *round);
            let mut fresh = operands.iter().all(|(rank, _)| *rank != me);
            for (from, round) in operands.into_iter().filter(|(from, _)| *from != me) {
                let how = if fresh { Combine::Replace } else { Combine::Reduce };
                script.recv(up(round), from, chunk, how);
                fresh = false;
            }
            if let Some(above) = parent(made, ranks - 1) {
                script.send(up(height(made) + 1), sums.maker(above), chunk);
                let round = levels - 1 - height(above);
                script.recv(down(round), sums.maker(above), chunk, Combine::Replace);
            }
            let below = children(made, ranks - 1).into_iter().flatten();
            let off_the_way = [0, ranks - 1]
                .into_iter()
                .filter(|&rank| sums.made_by(rank).is_none() && sums.feeder(rank) == me);
            for to in below.map(|sum| sums.maker(sum)).chain(off_the_way) {
                script.send(down(levels - 1 - height(made)), to, chunk);
            }
        }
    }
    script.sorted()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_binary_and_as_high_as_they_need_be() {
        for nodes in 1..200u32 {
            let root = 1 << nodes.ilog2();
            for position in 1..=nodes {
                let mut above = position;
                let mut steps = 0;
                while let Some(next) = parent(above, nodes) {
                    assert!(height(next) > height(above));
                    assert!(children(next, nodes).contains(&Some(above)));
                    (above, steps) = (next, steps + 1);
                }
                assert_eq!(above, root);
                assert!(steps <= nodes.ilog2());
                for child in children(position, nodes).into_iter().flatten() {
                    assert_eq!(parent(child, nodes), Some(position));
                }
            }
        }
    }

    #[test]
    fn nobody_is_interior_in_both_trees() {
        for nodes in 1..200 {
            let trees = TwoTrees { nodes, me: 1, chunks: 1 };
            for position in 1..=nodes {
                let interior = |tree| {
                    let at = trees.within(tree, position);
                    assert_eq!(trees.position(tree, at), position);
                    children(at, nodes).iter().any(Option::is_some)
                };
                assert!(!(interior(0) && interior(1)), "{position} of {nodes}");
            }
        }
    }
}
