//! Event queue: events by tick, and within a tick in order of creation.

use std::collections::BTreeMap;

/// Pending events.
///
/// Most simulations have many events in few distinct ticks, because ranks act in lockstep. A tick
/// is therefore a list, with fast lookup of the lists in use.
#[derive(Debug)]
pub(super) struct EventQueue<E> {
    now: u64,
    lists: Vec<Vec<E>>,
    unused: Vec<u32>,
    ticks: BTreeMap<u64, u32>,
    recent: [(u64, u32); RECENT],
}

/// Number of ticks found without a search; a power of two.
const RECENT: usize = 64;

/// Later than any tick: the duration of a case is bounded when it is checked.
const NEVER: u64 = u64::MAX;

impl<E: Copy> EventQueue<E> {
    pub(super) fn new() -> EventQueue<E> {
        let (lists, unused) = (Vec::new(), Vec::new());
        EventQueue { now: 0, lists, unused, ticks: BTreeMap::new(), recent: [(NEVER, 0); RECENT] }
    }

    /// The current tick.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// Adds an event `delay` from now, after the events already in that tick. With zero delay it
    /// runs in the current tick, after all others.
    pub(super) fn add(&mut self, delay: u64, event: E) {
        let tick = self.now + delay;
        let recent = &mut self.recent[tick as usize % RECENT];
        if recent.0 != tick {
            let (lists, unused) = (&mut self.lists, &mut self.unused);
            let list = *self.ticks.entry(tick).or_insert_with(|| {
                unused.pop().unwrap_or_else(|| {
                    lists.push(Vec::new());
                    lists.len() as u32 - 1
                })
            });
            *recent = (tick, list);
        }
        self.lists[recent.1 as usize].push(event);
    }

    /// Advances to the next tick with events; `None` if there is none.
    pub(super) fn next_tick(&mut self) -> Option<Tick> {
        let (&tick, &list) = self.ticks.first_key_value()?;
        self.now = tick;
        Some(Tick { list, next: 0 })
    }

    /// Returns the next event of this tick; ends the tick if none is left.
    pub(super) fn next(&mut self, tick: &mut Tick) -> Option<E> {
        let event = self.lists[tick.list as usize].get(tick.next).copied();
        tick.next += 1;
        if event.is_none() {
            self.end(tick.list);
        }
        event
    }

    fn end(&mut self, list: u32) {
        self.ticks.remove(&self.now);
        let recent = &mut self.recent[self.now as usize % RECENT];
        if recent.0 == self.now {
            recent.0 = NEVER;
        }
        self.lists[list as usize].clear();
        self.unused.push(list);
    }
}

/// Cursor over the events of the current tick.
#[derive(Debug)]
pub(super) struct Tick {
    list: u32,
    next: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(
        agenda: &mut EventQueue<u32>,
        mut on: impl FnMut(&mut EventQueue<u32>, u32),
    ) -> Vec<(u64, u32)> {
        let mut seen = Vec::new();
        while let Some(mut tick) = agenda.next_tick() {
            while let Some(event) = agenda.next(&mut tick) {
                seen.push((agenda.now(), event));
                on(agenda, event);
            }
        }
        seen
    }

    #[test]
    fn ticks_come_in_order_and_events_in_the_order_of_their_making() {
        let mut agenda = EventQueue::new();
        // 5 and 5 + RECENT share a slot among the recent ticks.
        for (delay, event) in [(5, 1), (5 + RECENT as u64, 2), (5, 3), (0, 4), (2, 5)] {
            agenda.add(delay, event);
        }
        let seen = drain(&mut agenda, |_, _| {});
        assert_eq!(seen, [(0, 4), (2, 5), (5, 1), (5, 3), (69, 2)]);
    }

    #[test]
    fn an_event_may_add_to_its_own_tick() {
        let mut agenda = EventQueue::new();
        agenda.add(1, 1);
        agenda.add(1, 2);
        let seen = drain(&mut agenda, |agenda, event| match event {
            1 => agenda.add(0, 3),
            3 => agenda.add(RECENT as u64, 4),
            _ => {}
        });
        assert_eq!(seen, [(1, 1), (1, 2), (1, 3), (1 + RECENT as u64, 4)]);
    }
}
