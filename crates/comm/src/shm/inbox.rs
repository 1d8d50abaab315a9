//! A rank's segment: one ring for each sender, and a bell.
//!
//! **Rings.** A ring is a stream of bytes with one producer and one consumer. `tail` counts the
//! bytes ever put in and only the producer writes it; `head` counts those taken out and only the
//! consumer writes it. Bytes `head..tail` belong to the consumer, the rest to the producer, and a
//! release store of either counter, read with acquire, hands bytes over.
//!
//! **The bell.** Whoever puts something in, or takes something out that made room for a waiting
//! producer, rings the other's bell: a counter that the owner watches for a while and then sleeps
//! on with a futex. Ringing costs a system call only while the owner sleeps.

use super::{Address, Mapping};
use crate::error::CommError;
use crate::secret::{PROOF, nonce};
use rustix::thread::futex;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

/// Where things lie in a segment. Counters of different writers never share a cache line, nor the
/// pair of lines that is fetched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// How many ranks may send.
    pub(crate) senders: u32,
    /// The size of each ring.
    pub(crate) ring: usize,
}

const MARK: usize = 0;
const BELL: usize = 128;
const ASLEEP: usize = 256;
const DEPARTED: usize = 384;
const RINGS: usize = 512;
const TAIL: usize = 0;
const HEAD: usize = 128;
const WANTED: usize = 256;
const RING_COUNTERS: usize = 384;
const PAGE: usize = 4096;

impl Layout {
    fn counters(&self, sender: u32) -> usize {
        RINGS + sender as usize * RING_COUNTERS
    }

    fn data(&self, sender: u32) -> usize {
        self.counters(self.senders).next_multiple_of(PAGE) + sender as usize * self.ring
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data(self.senders)
    }
}

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Inbox {
    map: Arc<Mapping>,
    layout: Layout,
}

/// A random number in the segment, announced over an authenticated connection: it proves that a
/// descriptor leads to the segment that is meant.
pub(crate) type Mark = [u8; PROOF];

impl Inbox {
    /// A new segment. The descriptor is to be kept until all neighbours have opened it.
    pub(crate) fn create(layout: Layout) -> Result<(Self, OwnedFd, Address, Mark), CommError> {
        let (map, file, address) = Mapping::create(layout.bytes())?;
        let mark = nonce()?;
        // SAFETY: nobody else knows of the segment yet.
        unsafe { map.write(MARK, &mark) };
        Ok((Self { map: Arc::new(map), layout }, file, address, mark))
    }

    pub(crate) fn bell(&self) -> Bell {
        Bell { map: Arc::clone(&self.map) }
    }

    /// Takes bytes of a sender's stream out; how many there were, at most as many as fit.
    pub(crate) fn pull(&mut self, sender: u32, into: &mut [u8]) -> Result<usize, CommError> {
        let Layout { ring, .. } = self.layout;
        let counters = self.layout.counters(sender);
        let tail = self.map.atomic_u64(counters + TAIL).load(Acquire);
        let head = self.map.atomic_u64(counters + HEAD).load(Relaxed);
        let there = filled(head, tail, ring)?;
        let taken = there.min(into.len());
        let at = (head % ring as u64) as usize;
        let first = taken.min(ring - at);
        let data = self.layout.data(sender);
        // SAFETY: bytes head..tail belong to the consumer, which is this `&mut self`, until `head`
        // moves past them.
        unsafe {
            self.map.read(data + at, &mut into[..first]);
            self.map.read(data, &mut into[first..taken]);
        }
        self.map.atomic_u64(counters + HEAD).store(head + taken as u64, Release);
        Ok(taken)
    }

    /// Whether a sender wants to be told that there is room again; asking takes the wish back.
    pub(crate) fn take_wish(&self, sender: u32) -> bool {
        let wanted = self.map.atomic_u32(self.layout.counters(sender) + WANTED);
        // `head` was moved before the look at the wish, as the wish is noted before the producer's
        // next look at `head`: one of the two sees the other.
        fence(SeqCst);
        wanted.load(SeqCst) != 0 && wanted.swap(0, SeqCst) != 0
    }
}

/// One sender's side.
#[derive(Debug)]
pub(crate) struct Outbox {
    map: Arc<Mapping>,
    layout: Layout,
    sender: u32,
}

impl Outbox {
    /// Opens a neighbour's segment to send to it. To be made once for a sender and an owner.
    pub(crate) fn open(
        address: &Address,
        mark: &Mark,
        layout: Layout,
        sender: u32,
    ) -> Result<Self, CommError> {
        let wrong = || {
            super::problem("the shared memory of a neighbour is not the one announced".to_owned())
        };
        if address.bytes != layout.bytes() as u64 || sender >= layout.senders {
            return Err(wrong());
        }
        let map = Mapping::open(address)?;
        let mut found = Mark::default();
        // SAFETY: the mark was written before the address was told and does not change.
        unsafe { map.read(MARK, &mut found) };
        if found != *mark {
            return Err(wrong());
        }
        Ok(Self { map: Arc::new(map), layout, sender })
    }

    pub(crate) fn bell(&self) -> Bell {
        Bell { map: Arc::clone(&self.map) }
    }

    /// Puts bytes into the stream, as many as there is room for, and says how many. Does not ring.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<usize, CommError> {
        let Layout { ring, .. } = self.layout;
        let counters = self.layout.counters(self.sender);
        let head = self.map.atomic_u64(counters + HEAD).load(Acquire);
        let tail = self.map.atomic_u64(counters + TAIL).load(Relaxed);
        let room = ring - filled(head, tail, ring)?;
        let put = room.min(bytes.len());
        let at = (tail % ring as u64) as usize;
        let first = put.min(ring - at);
        let data = self.layout.data(self.sender);
        // SAFETY: bytes outside head..tail belong to the producer, which is this `&mut self`, until
        // `tail` moves past them.
        unsafe {
            self.map.write(data + at, &bytes[..first]);
            self.map.write(data, &bytes[first..put]);
        }
        self.map.atomic_u64(counters + TAIL).store(tail + put as u64, Release);
        Ok(put)
    }

    /// Asks to be told when there is room. Room that came in between must be looked for afterwards.
    pub(crate) fn wish(&self) {
        self.map.atomic_u32(self.layout.counters(self.sender) + WANTED).store(1, SeqCst);
        fence(SeqCst);
    }
}

fn filled(head: u64, tail: u64, ring: usize) -> Result<usize, CommError> {
    match tail.wrapping_sub(head) {
        there if there <= ring as u64 => Ok(there as usize),
        _ => Err(super::problem("a ring in shared memory has impossible counters".to_owned())),
    }
}

/// The bell of a segment's owner, and the sign that it has left.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    map: Arc<Mapping>,
}

impl Bell {
    /// How often it has rung.
    pub(crate) fn count(&self) -> u32 {
        self.map.atomic_u32(BELL).load(Acquire)
    }

    /// Wakes the owner.
    pub(crate) fn ring(&self) {
        let bell = self.map.atomic_u32(BELL);
        // Ordered before the look at the sleeper, as the sleeper's note is before its look at the
        // bell: one of the two sees the other.
        bell.fetch_add(1, SeqCst);
        if self.map.atomic_u32(ASLEEP).load(SeqCst) != 0 {
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// For the owner: returns when the bell has rung since it had rung `seen` times, or after so
    /// long; watches it for `spin` before it sleeps.
    pub(crate) fn wait(&self, seen: u32, spin: Duration, at_most: Duration) {
        if self.count() != seen {
            return;
        }
        let began = Instant::now();
        let until = spin.min(at_most);
        loop {
            for _ in 0..64 {
                if self.count() != seen {
                    return;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= until {
                break;
            }
        }
        // Where ranks share a core, the one that is waited for may only need a turn.
        for _ in 0..2 {
            std::thread::yield_now();
            if self.count() != seen {
                return;
            }
        }
        let Some(left) = at_most.checked_sub(began.elapsed()) else { return };
        let timeout = futex::Timespec {
            tv_sec: left.as_secs().min(1 << 30) as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let asleep = self.map.atomic_u32(ASLEEP);
        asleep.store(1, SeqCst);
        // Sleeps only if the bell still has the count; interruptions are as good as a ring.
        if self.map.atomic_u32(BELL).load(SeqCst) == seen {
            let bell = self.map.atomic_u32(BELL);
            let _ = futex::wait(bell, futex::Flags::empty(), seen, Some(&timeout));
        }
        asleep.store(0, SeqCst);
    }

    /// For the owner: nothing more will come from it, nor be read by it.
    pub(crate) fn depart(&self) {
        self.map.atomic_u32(DEPARTED).store(1, Release);
    }

    /// Whether the owner has left. Everything it sent was put in place before.
    pub(crate) fn departed(&self) -> bool {
        self.map.atomic_u32(DEPARTED).load(Acquire) != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { senders: 3, ring: 4096 };

    #[test]
    fn a_stream_survives_a_small_ring_and_two_threads() {
        let (mut inbox, _file, address, mark) = Inbox::create(LAYOUT).unwrap();
        let mut outbox = Outbox::open(&address, &mark, LAYOUT, 1).unwrap();
        let total = 300_000u32;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
                let (mut rest, mut piece) = (bytes.as_slice(), 1);
                while !rest.is_empty() {
                    let put = outbox.push(&rest[..rest.len().min(piece)]).unwrap();
                    if put == 0 {
                        std::thread::yield_now();
                    }
                    outbox.bell().ring();
                    rest = &rest[put..];
                    piece = piece % 5000 + 37;
                }
            });
            let (mut got, mut buffer) = (0u32, [0; 1000]);
            let bell = inbox.bell();
            while got < total {
                let seen = bell.count();
                let n = inbox.pull(1, &mut buffer).unwrap();
                for byte in &buffer[..n] {
                    assert_eq!(*byte, (got % 251) as u8);
                    got += 1;
                }
                if n == 0 {
                    bell.wait(seen, Duration::ZERO, Duration::from_secs(5));
                }
            }
            assert_eq!(inbox.pull(0, &mut buffer).unwrap(), 0);
        });
    }

    #[test]
    fn nobody_sleeps_through_a_ring() {
        let (inbox, ..) = Inbox::create(LAYOUT).unwrap();
        let (bell, ringer) = (inbox.bell(), inbox.bell());
        let laps = 20_000;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..laps {
                    ringer.ring();
                    std::thread::yield_now();
                }
            });
            let began = Instant::now();
            let mut seen = 0;
            while seen != laps {
                bell.wait(seen, Duration::ZERO, Duration::from_secs(20));
                seen = bell.count();
            }
            assert!(began.elapsed() < Duration::from_secs(10), "a ring was missed");
        });
    }

    #[test]
    fn a_wrong_mark_size_or_place_is_refused() {
        let (_inbox, _file, address, mark) = Inbox::create(LAYOUT).unwrap();
        assert!(Outbox::open(&address, &[0; 32], LAYOUT, 0).is_err());
        assert!(Outbox::open(&address, &mark, LAYOUT, 3).is_err());
        let larger = Layout { senders: 4, ..LAYOUT };
        assert!(Outbox::open(&address, &mark, larger, 0).is_err());
        let elsewhere = Address { descriptor: 1_000_000, ..address };
        assert!(Outbox::open(&elsewhere, &mark, LAYOUT, 0).is_err());
    }

    #[test]
    fn impossible_counters_are_an_error() {
        let (mut inbox, _file, address, mark) = Inbox::create(LAYOUT).unwrap();
        let outbox = Outbox::open(&address, &mark, LAYOUT, 2).unwrap();
        let tail = LAYOUT.counters(2) + TAIL;
        outbox.map.atomic_u64(tail).store(1 << 40, SeqCst);
        assert!(inbox.pull(2, &mut [0; 8]).is_err());
    }
}
