//! Callbacks requested by a rank.
//!
//! All callbacks of a rank in one tick form one event, at the position of the first; the rank runs
//! them without interleaving with other ranks. A callback requested during the same tick is
//! appended. On congested links this order decides which message goes first.

/// A requested callback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// A packet of this chunk is ready.
    Ready(u32),
    /// A packet of this chunk has arrived; it is ready after a reduction of this many ns.
    Reduce(u32, u64),
}

/// Callbacks of all ranks.
#[derive(Debug)]
pub(super) struct Calls {
    /// Each rank's first group.
    first: Vec<u32>,
    groups: Vec<Group>,
    unused: Vec<u32>,
}

/// Callbacks of a rank in one tick.
#[derive(Debug)]
struct Group {
    tick: u64,
    /// The rank's next group; a rank has only a few.
    next: u32,
    calls: Vec<Call>,
}

const NONE: u32 = u32::MAX;

impl Calls {
    pub(super) fn new(ranks: u32) -> Calls {
        Calls { first: vec![NONE; ranks as usize], groups: Vec::new(), unused: Vec::new() }
    }

    /// Requests a callback. Returns the number of a new group if this is the first of its tick.
    pub(super) fn add(&mut self, rank: u32, tick: u64, call: Call) -> Option<u32> {
        let head = self.first[rank as usize];
        let mut at = head;
        while at != NONE {
            let group = &mut self.groups[at as usize];
            if group.tick == tick {
                group.calls.push(call);
                return None;
            }
            at = group.next;
        }
        let new = self.unused.pop().unwrap_or_else(|| {
            self.groups.push(Group { tick, next: NONE, calls: Vec::new() });
            self.groups.len() as u32 - 1
        });
        let group = &mut self.groups[new as usize];
        (group.tick, group.next) = (tick, head);
        group.calls.push(call);
        self.first[rank as usize] = new;
        Some(new)
    }

    /// Callback `number` of a group; `None` past the end.
    pub(super) fn get(&self, group: u32, number: usize) -> Option<Call> {
        self.groups[group as usize].calls.get(number).copied()
    }

    /// Removes a group whose tick has been processed.
    pub(super) fn end(&mut self, rank: u32, group: u32) {
        let next = self.groups[group as usize].next;
        let head = &mut self.first[rank as usize];
        if *head == group {
            *head = next;
        } else {
            let mut at = *head;
            while self.groups[at as usize].next != group {
                at = self.groups[at as usize].next;
            }
            self.groups[at as usize].next = next;
        }
        self.groups[group as usize].calls.clear();
        self.unused.push(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_of_a_tick_are_one_group() {
        let mut calls = Calls::new(2);
        let a = calls.add(0, 10, Call::Ready(1)).unwrap();
        let b = calls.add(0, 20, Call::Ready(2)).unwrap();
        assert_eq!(calls.add(0, 10, Call::Reduce(3, 5)), None);
        let c = calls.add(1, 10, Call::Ready(4)).unwrap();
        assert_eq!(calls.get(a, 0), Some(Call::Ready(1)));
        assert_eq!(calls.get(a, 1), Some(Call::Reduce(3, 5)));
        assert_eq!(calls.get(a, 2), None);
        calls.end(0, a);
        assert_eq!(calls.get(b, 0), Some(Call::Ready(2)));
        assert_eq!(calls.get(c, 0), Some(Call::Ready(4)));
        // A group is reused, empty.
        assert_eq!(calls.add(0, 10, Call::Ready(5)), Some(a));
        assert_eq!(calls.get(a, 1), None);
        calls.end(0, a);
        calls.end(0, b);
        assert_eq!(calls.first, [NONE, c]);
    }
}
