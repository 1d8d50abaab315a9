//! Exhaustive model check of the sleep protocol of `shm::inbox`.
//!
//! A producer puts data into a ring and rings the doorbell if the consumer sleeps. A consumer
//! checks the ring, sets its sleep flag, checks again, and sleeps on the doorbell. Both are
//! modelled as the memory operations that the code performs, one per step. The machine's processors
//! keep their stores in a buffer until it is drained (x86-TSO; Sewell et al., CACM 53(7), 2010): a
//! load sees the thread's own latest buffered store, or memory. Every interleaving of steps and
//! drains is visited. In none of them may the consumer sleep forever while there is data.

use std::collections::{BTreeSet, VecDeque};

/// Addresses in memory.
const TAIL: usize = 0;
const ASLEEP: usize = 1;
const BELL: usize = 2;

/// One step of a thread.
#[derive(Clone, Copy, Debug)]
enum Do {
    /// A plain or release store.
    Store(usize, u8),
    /// Drains the thread's own stores.
    Fence,
    /// Ends the thread if the address has this value.
    EndIf(usize, u8),
    /// Continues only if the address has this value; otherwise the thread ends.
    OnlyIf(usize, u8),
    /// An atomic increment, preceded by a drain.
    Increment(usize),
    /// Wakes the other thread if it sleeps.
    Wake,
    /// The futex: sleeps if the address has this value in memory, atomically with the check.
    SleepIf(usize, u8),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Machine {
    memory: [u8; 3],
    threads: [Thread; 2],
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    at: usize,
    stores: VecDeque<(usize, u8)>,
    sleeps: bool,
    ended: bool,
}

impl Machine {
    fn load(&self, thread: usize, place: usize) -> u8 {
        let own = self.threads[thread].stores.iter().rev().find(|(p, _)| *p == place);
        own.map_or(self.memory[place], |(_, value)| *value)
    }

    fn drained(&self, thread: usize) -> bool {
        self.threads[thread].stores.is_empty()
    }

    /// Possible next states: a thread's step, or its oldest store reaching memory.
    fn successors(&self, programs: &[&[Do]; 2]) -> Vec<Machine> {
        let mut all = Vec::new();
        for (i, program) in programs.iter().enumerate() {
            let thread = &self.threads[i];
            if let Some((place, value)) = thread.stores.front().copied() {
                let mut next = self.clone();
                next.memory[place] = value;
                next.threads[i].stores.pop_front();
                all.push(next);
            }
            if thread.sleeps || thread.ended {
                continue;
            }
            let Some(step) = program.get(thread.at).copied() else { continue };
            let needs_drain = matches!(step, Do::Fence | Do::Increment(_) | Do::SleepIf(..));
            if needs_drain && !self.drained(i) {
                continue;
            }
            let mut next = self.clone();
            next.threads[i].at += 1;
            match step {
                Do::Store(place, value) => next.threads[i].stores.push_back((place, value)),
                Do::Fence => {}
                Do::EndIf(place, value) => {
                    next.threads[i].ended = self.load(i, place) == value;
                }
                Do::OnlyIf(place, value) => {
                    next.threads[i].ended = self.load(i, place) != value;
                }
                Do::Increment(place) => next.memory[place] += 1,
                Do::Wake => next.threads[1 - i].sleeps = false,
                Do::SleepIf(place, value) => {
                    next.threads[i].sleeps = self.memory[place] == value;
                }
            }
            all.push(next);
        }
        all
    }
}

/// Returns a state in which the consumer sleeps forever, if any, and the number of states.
fn explore(producer: &[Do], consumer: &[Do]) -> (Option<Machine>, usize) {
    let programs = [producer, consumer];
    let start = Machine { memory: [0; 3], threads: Default::default() };
    let (mut seen, mut open) = (BTreeSet::from([start.clone()]), vec![start]);
    let mut lost = None;
    while let Some(machine) = open.pop() {
        let successors = machine.successors(&programs);
        if successors.is_empty() && machine.threads[1].sleeps && machine.memory[TAIL] == 1 {
            lost = Some(machine);
        }
        for next in successors {
            if seen.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    (lost, seen.len())
}

/// `Outbox::publish`.
const PRODUCER: [Do; 5] =
    [Do::Store(TAIL, 1), Do::Fence, Do::OnlyIf(ASLEEP, 1), Do::Increment(BELL), Do::Wake];
/// The last check, and `Doorbell::sleep`.
const CONSUMER: [Do; 5] =
    [Do::EndIf(TAIL, 1), Do::Store(ASLEEP, 1), Do::Fence, Do::EndIf(TAIL, 1), Do::SleepIf(BELL, 0)];

#[test]
fn nobody_sleeps_through_a_message() {
    let (lost, states) = explore(&PRODUCER, &CONSUMER);
    assert_eq!(lost, None);
    assert!(states > 30, "only {states} states were visited");
}

#[test]
fn without_either_fence_a_message_can_be_slept_through() {
    let without = |program: &[Do]| -> Vec<Do> {
        program.iter().copied().filter(|step| !matches!(step, Do::Fence)).collect()
    };
    assert!(explore(&without(&PRODUCER), &CONSUMER).0.is_some());
    assert!(explore(&PRODUCER, &without(&CONSUMER)).0.is_some());
}

/// Space in a full ring: the producer sets its request and checks again; the consumer takes data
/// out and checks for the request. Here TAIL represents the space, and ASLEEP the request.
#[test]
fn nobody_waits_for_room_that_is_there() {
    let consumer_makes_room =
        [Do::Store(TAIL, 1), Do::Fence, Do::OnlyIf(ASLEEP, 1), Do::Increment(BELL), Do::Wake];
    let producer_wishes = [
        Do::EndIf(TAIL, 1),
        Do::Store(ASLEEP, 1),
        Do::Fence,
        Do::EndIf(TAIL, 1),
        Do::SleepIf(BELL, 0),
    ];
    assert_eq!(explore(&consumer_makes_room, &producer_wishes).0, None);
}
