//! Callbacks that a rank asked for.
//!
//! All callbacks of a rank in one tick are one event, at the place of the first: the rank works
//! them off without another rank in between. One that a callback asks for in the same tick joins
//! its end. On congested links that order decides who goes first.

/// What a rank wants to be told later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// A packet of this chunk is ready.
    Ready(u32),
    /// A packet of this chunk is at hand, and is ready once it is added up, which takes so long.
    Reduce(u32, u64),
}

/// The callbacks of all ranks.
#[derive(Debug)]
pub(super) struct Calls {
    /// Each rank's first group.
    first: Vec<u32>,
    groups: Vec<Group>,
    unused: Vec<u32>,
}

/// The callbacks of a rank in one tick.
#[derive(Debug)]
struct Group {
    tick: u64,
    /// The rank's next group; a rank has few at a time.
    next: u32,
    calls: Vec<Call>,
}

const NONE: u32 = u32::MAX;

impl Calls {
    pub(super) fn new(ranks: u32) -> Calls {
        Calls { first: vec![NONE; ranks as usize], groups: Vec::new(), unused: Vec::new() }
    }

    /// Asks for a callback. The number of a new group if this is the first of its tick.
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

    /// A callback of a group by its number, if there are so many.
    pub(super) fn get(&self, group: u32, number: usize) -> Option<Call> {
        self.groups[group as usize].calls.get(number).copied()
    }

    /// Forgets a group whose tick has come.
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
        // A group is used again, empty.
        assert_eq!(calls.add(0, 10, Call::Ready(5)), Some(a));
        assert_eq!(calls.get(a, 1), None);
        calls.end(0, a);
        calls.end(0, b);
        assert_eq!(calls.first, [NONE, c]);
    }
}
