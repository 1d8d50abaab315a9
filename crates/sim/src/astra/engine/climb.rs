//! Actions of a rank in a phase of a double binary tree.

use super::super::tree::{Node, Role, Sender, State, Tree};
use super::{Engine, Network};

impl<N: Network> Engine<'_, N> {
    pub(super) fn start_tree(&mut self, rank: u32, chunk: u32, tree: &Tree) {
        let (_, node) = self.node(rank, chunk, tree);
        match node.role() {
            Role::Leaf => {
                self.next_state(rank, chunk, State::SendUp);
                self.pass_endpoint(rank, chunk, None);
            }
            Role::Inner => {
                self.next_state(rank, chunk, State::AwaitBoth);
                self.post(rank, chunk, Sender::Left as u32);
                self.post(rank, chunk, Sender::Right as u32);
            }
            Role::Root => {
                self.next_state(rank, chunk, State::AwaitOne);
                self.post(rank, chunk, Sender::Left as u32);
            }
        }
    }

    pub(super) fn receive_in_tree(&mut self, rank: u32, chunk: u32, tree: &Tree) {
        let (_, node) = self.node(rank, chunk, tree);
        let (next, reduced) = match (node.role(), self.lane(rank, chunk).tree.state) {
            (Role::Leaf, _) => (State::Leave, None),
            (Role::Inner, State::AwaitBoth) => (State::AwaitOne, Some(0)),
            (Role::Inner, State::AwaitOne) => (State::SendUp, Some(0)),
            // Downward packets are charged a reduction, although nothing is added.
            (Role::Inner | Role::Root, _) => (State::SendDown, Some(0)),
        };
        self.next_state(rank, chunk, next);
        self.pass_endpoint(rank, chunk, reduced);
    }

    pub(super) fn ready_in_tree(&mut self, rank: u32, chunk: u32, tree: &Tree) {
        let (index, node) = self.node(rank, chunk, tree);
        let progress = &mut self.lane(rank, chunk).tree;
        if node.role() == Role::Inner && !progress.added_one {
            progress.added_one = true;
            return;
        }
        match progress.state {
            State::SendUp => {
                let (parent, side) = node.parent();
                self.climb(rank, chunk, tree, index, parent, side);
                self.next_state(rank, chunk, State::AwaitParent);
                self.post(rank, chunk, Sender::Parent as u32);
            }
            State::SendDown => {
                self.climb(rank, chunk, tree, index, node.left(), Sender::Parent);
                if node.role() == Role::Inner {
                    self.climb(rank, chunk, tree, index, node.right(), Sender::Parent);
                }
                self.end_phase(rank, chunk);
            }
            State::Leave => self.end_phase(rank, chunk),
            // Nothing becomes ready while a rank waits.
            State::AwaitBoth | State::AwaitOne | State::AwaitParent => {}
        }
    }

    fn node(&self, rank: u32, chunk: u32, tree: &Tree) -> (u32, Node) {
        let lane = &self.lanes[rank as usize * self.schedule.chunks as usize + chunk as usize];
        let index = self.fold.index(rank, &self.schedule.phases[lane.phase as usize]);
        (index, tree.node(index, chunk))
    }

    fn next_state(&mut self, rank: u32, chunk: u32, state: State) {
        self.lane(rank, chunk).tree.state = state;
    }

    fn climb(&mut self, rank: u32, chunk: u32, tree: &Tree, index: u32, to: u32, from: Sender) {
        let offset = (to + tree.members - index) % tree.members;
        self.send(rank, chunk, index, offset, from as u32, 0);
    }
}
