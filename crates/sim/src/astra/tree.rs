//! The double binary tree: sums travel up, the result down.
//!
//! There are two trees over the same ranks, one rooted at the last rank, one at the first. The root
//! has one child, the root of a perfect binary tree over all other ranks in order. [`Node::key`]
//! counts the ranks of the perfect tree from 1 and gives the root `members`. A node's height is the
//! number of trailing zeros of its key, and its relatives are one bit away.

/// Constants of the state machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tree {
    /// Number of participating ranks: a power of two.
    pub(super) members: u32,
    /// Number of times a chunk used the dimension's trees before this phase.
    pub(super) uses_before: u32,
    /// Number of times a chunk uses the dimension's trees.
    pub(super) uses_per_chunk: u32,
}

/// Position of a rank in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    members: u32,
    /// Key, counted from 1; the root's is `members`.
    key: u32,
    /// True if the first rank is the root, false if the last is.
    root_first: bool,
}

/// Role of a rank in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It has a parent only.
    Leaf,
    /// It has a parent and two children.
    Inner,
    /// It has one child only.
    Root,
}

/// Progress of a rank in a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Next action.
    pub(super) state: State,
    /// True if an inner rank has added the packet of one child.
    pub(super) added_one: bool,
}

/// Next action of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    /// Wait for both children.
    #[default]
    AwaitBoth,
    /// Wait for the only child, or for the second one.
    AwaitOne,
    /// Send to the parent once ready.
    SendUp,
    /// Wait for the parent.
    AwaitParent,
    /// Send to the children once ready.
    SendDown,
    /// Leave once ready.
    Leave,
}

/// Sender of a packet, relative to its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sender {
    /// The left child, or the root's only one.
    Left = 0,
    /// The right child.
    Right = 1,
    /// The parent.
    Parent = 2,
}

impl Tree {
    pub(super) fn new(members: u32) -> Tree {
        Tree { members, uses_before: 0, uses_per_chunk: 1 }
    }

    /// Position of the rank at `index` in the tree that a chunk uses.
    pub(super) fn node(&self, index: u32, chunk: u32) -> Node {
        let uses = u64::from(self.uses_per_chunk) * u64::from(chunk) + u64::from(self.uses_before);
        let root_first = !uses.is_multiple_of(2);
        let key = match (root_first, index) {
            (false, index) => index + 1,
            (true, 0) => self.members,
            (true, index) => index,
        };
        Node { members: self.members, key, root_first }
    }
}

impl Node {
    pub(super) fn role(&self) -> Role {
        if self.key == self.members {
            Role::Root
        } else if self.key % 2 == 1 {
            Role::Leaf
        } else {
            Role::Inner
        }
    }

    /// Index of the parent of a non-root rank, and the rank's side under it.
    pub(super) fn parent(&self) -> (u32, Sender) {
        let height = self.key & self.key.wrapping_neg();
        let parent = (self.key & !height) | (height << 1);
        let side =
            if parent == self.members || self.key < parent { Sender::Left } else { Sender::Right };
        (self.index(parent), side)
    }

    /// Index of the left child of an inner rank, or of the root's only child.
    pub(super) fn left(&self) -> u32 {
        self.index(self.key - self.half())
    }

    /// Index of the right child of an inner rank.
    pub(super) fn right(&self) -> u32 {
        self.index(self.key + self.half())
    }

    fn half(&self) -> u32 {
        (self.key & self.key.wrapping_neg()) >> 1
    }

    fn index(&self, key: u32) -> u32 {
        if self.root_first { key % self.members } else { key - 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_but_one_is_the_child_of_its_parent() {
        for members in [2, 4, 8, 64] {
            for chunk in 0..2 {
                let tree = Tree::new(members);
                let mut children = 0;
                for index in 0..members {
                    let node = tree.node(index, chunk);
                    match node.role() {
                        Role::Root => {
                            assert_eq!(index, if chunk == 0 { members - 1 } else { 0 });
                            assert_eq!(tree.node(node.left(), chunk).parent().0, index);
                            children += 1;
                        }
                        Role::Inner => {
                            let (left, right) = (node.left(), node.right());
                            assert_eq!(tree.node(left, chunk).parent(), (index, Sender::Left));
                            assert_eq!(tree.node(right, chunk).parent(), (index, Sender::Right));
                            assert!(left < index && index < right);
                            children += 2;
                        }
                        Role::Leaf => {}
                    }
                }
                assert_eq!(children, members - 1);
            }
        }
    }

    #[test]
    fn the_trees_of_eight_ranks() {
        let tree = Tree::new(8);
        let parents = |chunk| -> Vec<u32> {
            let nodes = (0..8).map(|index| tree.node(index, chunk));
            nodes.filter(|node| node.role() != Role::Root).map(|node| node.parent().0).collect()
        };
        assert_eq!(parents(0), [1, 3, 1, 7, 5, 3, 5]);
        assert_eq!(parents(1), [2, 4, 2, 0, 6, 4, 6]);
    }
}
