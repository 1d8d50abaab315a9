//! Shared-memory segment of a rank: one ring per sender, and a doorbell.
//!
//! Rings: a ring is a stream of bytes with one producer and one consumer. `tail` counts the bytes
//! ever put in, and only the producer writes it; `head` counts those taken out, and only the
//! consumer writes it. Bytes `head..tail` belong to the consumer, the rest to the producer. A
//! release store of either counter, read with acquire, hands bytes over. Each side caches the
//! other's counter and reloads it only when the cached value does not suffice. So a cache line
//! travels between two cores once per message and not once per poll. Both counters move by
//! multiples of [`GRAIN`].
//!
//! Doorbell: a waiting rank polls the rings it waits for, without help from its peers. Only after
//! it has spun long enough does it set its sleep flag, check once more, and sleep on a counter with
//! a futex. A peer then checks the owner's sleep flag whenever it puts bytes in, or frees space for
//! a waiting producer. It rings only if the flag is set. The common case costs neither a system
//! call nor a write to a cache line that others poll.

use super::{Address, Mapping};
use crate::error::CommError;
use crate::frame_reader::{Source, StreamError};
use crate::secret::{PROOF, nonce};
use crate::wire::{GRAIN, HEAD};
use rustix::thread::futex;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

/// Layout of a segment. Counters of different writers never share a cache line, nor the pair of
/// lines that is fetched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Number of ranks that may send.
    pub(crate) senders: u32,
    /// Bytes of each ring.
    pub(crate) ring: usize,
}

const MARK: usize = 0;
const BELL: usize = 128;
const ASLEEP: usize = 256;
const DEPARTED: usize = 384;
const RINGS: usize = 512;
const TAIL: usize = 0;
const HEAD_COUNT: usize = 128;
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

/// Owner's side of a segment.
#[derive(Debug)]
pub(crate) struct Inbox {
    map: Arc<Mapping>,
    layout: Layout,
    /// Bytes taken out and last known bytes put in, by sender.
    counts: Vec<(u64, u64)>,
}

/// Random number in the segment, announced over an authenticated connection. It proves that a
/// descriptor leads to the intended segment.
pub(crate) type SegmentNonce = [u8; PROOF];

impl Inbox {
    /// Creates a segment. Keep the descriptor open until all ranks of the domain have opened it.
    pub(crate) fn create(
        layout: Layout,
    ) -> Result<(Self, OwnedFd, Address, SegmentNonce), CommError> {
        let (map, file, address) = Mapping::create(layout.bytes())?;
        let mark = nonce()?;
        // SAFETY: no other thread or process knows of the segment yet.
        unsafe { map.write(MARK, &mark) };
        let counts = vec![(0, 0); layout.senders as usize];
        Ok((Self { map: Arc::new(map), layout, counts }, file, address, mark))
    }

    pub(crate) fn bell(&self) -> Doorbell {
        Doorbell { map: Arc::clone(&self.map) }
    }

    /// Byte stream of a sender.
    pub(crate) fn ring(&mut self, sender: u32) -> Ring<'_> {
        Ring { inbox: self, sender }
    }

    /// Number of bytes taken out of a sender's stream.
    pub(crate) fn taken(&self, sender: u32) -> u64 {
        self.counts.get(sender as usize).map_or(0, |(head, _)| *head)
    }

    /// Returns true if a sender has put in more than was taken out.
    pub(crate) fn has_news(&self, sender: u32) -> bool {
        let tail = self.map.atomic_u64(self.layout.counters(sender) + TAIL).load(Acquire);
        self.counts.get(sender as usize).is_some_and(|(head, _)| *head != tail)
    }

    /// Returns true if a sender has requested a notice about free space; clears the request.
    pub(crate) fn take_space_request(&self, sender: u32) -> bool {
        let wanted = self.map.atomic_u32(self.layout.counters(sender) + WANTED);
        // `head` was moved before this load of the request, and the producer sets the request
        // before it reloads `head`: one of the two sees the other.
        fence(SeqCst);
        wanted.load(Relaxed) != 0 && wanted.swap(0, SeqCst) != 0
    }
}

/// Consumer's view of one sender's stream.
pub(crate) struct Ring<'i> {
    inbox: &'i mut Inbox,
    sender: u32,
}

impl Ring<'_> {
    /// Number of bytes available; reloads `tail` only if fewer than `wanted` are known.
    fn available(&mut self, wanted: usize) -> Result<usize, CommError> {
        let Inbox { map, layout, counts } = &mut *self.inbox;
        let (head, tail) = &mut counts[self.sender as usize];
        if *tail - *head < wanted as u64 {
            let new = map.atomic_u64(layout.counters(self.sender) + TAIL).load(Acquire);
            if new < *tail {
                return Err(impossible());
            }
            filled(*head, new, layout.ring)?;
            *tail = new;
        }
        Ok((*tail - *head) as usize)
    }

    fn place(&self) -> (usize, usize) {
        let (head, _) = self.inbox.counts[self.sender as usize];
        let Layout { ring, .. } = self.inbox.layout;
        (self.inbox.layout.data(self.sender), (head % ring as u64) as usize)
    }
}

impl Source for Ring<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError> {
        if self.available(HEAD)? < HEAD {
            return Ok(None);
        }
        let (data, at) = self.place();
        let mut bytes = [0; HEAD];
        let first = HEAD.min(self.inbox.layout.ring - at);
        // SAFETY: bytes head..tail belong to the consumer, which holds the inbox mutably, until
        // `head` moves past them.
        unsafe {
            self.inbox.map.read(data + at, &mut bytes[..first]);
            self.inbox.map.read(data, &mut bytes[first..]);
        }
        self.consume(HEAD);
        Ok(Some(bytes))
    }

    fn peek(&mut self, wanted: usize) -> Result<&[u8], StreamError> {
        let there = self.available(wanted)?;
        let (data, at) = self.place();
        let there = there.min(self.inbox.layout.ring - at);
        // SAFETY: as in `head`; the result borrows the stream, so `head` cannot move.
        Ok(unsafe { self.inbox.map.slice(data + at, there) })
    }

    fn consume(&mut self, bytes: usize) {
        let (head, tail) = &mut self.inbox.counts[self.sender as usize];
        debug_assert!(*head + bytes as u64 <= *tail, "consumed what is not there");
        *head += bytes as u64;
        let counters = self.inbox.layout.counters(self.sender);
        self.inbox.map.atomic_u64(counters + HEAD_COUNT).store(*head, Release);
    }
}

/// Sender's side of a segment.
#[derive(Debug)]
pub(crate) struct Outbox {
    map: Arc<Mapping>,
    layout: Layout,
    sender: u32,
    /// Bytes put in and last known bytes taken out.
    counts: (u64, u64),
}

impl Outbox {
    /// Opens a peer's segment to send to it. Must be called once per sender and owner.
    pub(crate) fn open(
        address: &Address,
        mark: &SegmentNonce,
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
        let mut found = SegmentNonce::default();
        // SAFETY: the mark was written before the address was announced and does not change.
        unsafe { map.read(MARK, &mut found) };
        if found != *mark {
            return Err(wrong());
        }
        Ok(Self { map: Arc::new(map), layout, sender, counts: (0, 0) })
    }

    pub(crate) fn bell(&self) -> Doorbell {
        Doorbell { map: Arc::clone(&self.map) }
    }

    /// Bytes of free space; reloads `head` only if fewer than `wanted` are known.
    pub(crate) fn room(&mut self, wanted: usize) -> Result<usize, CommError> {
        let Layout { ring, .. } = self.layout;
        let (tail, head) = &mut self.counts;
        let mut room = ring - (*tail - *head) as usize;
        if room < wanted.min(ring) {
            let counters = self.layout.counters(self.sender);
            let new = self.map.atomic_u64(counters + HEAD_COUNT).load(Acquire);
            if new < *head {
                return Err(impossible());
            }
            room = ring - filled(new, *tail, ring)?;
            *head = new;
        }
        Ok(room)
    }

    /// Puts bytes into the stream, without making them visible before [`publish`](Self::publish).
    /// There must be space for them.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        let Layout { ring, .. } = self.layout;
        let (tail, head) = &mut self.counts;
        assert!((*tail - *head) as usize + bytes.len() <= ring, "no room for what is put");
        let at = (*tail % ring as u64) as usize;
        let first = bytes.len().min(ring - at);
        let data = self.layout.data(self.sender);
        // SAFETY: bytes outside head..tail belong to the producer, which is this `&mut self`, until
        // `tail` moves past them.
        unsafe {
            self.map.write(data + at, &bytes[..first]);
            self.map.write(data, &bytes[first..]);
        }
        *tail += bytes.len() as u64;
    }

    /// Pads the stream to a multiple of the grain; there is always space for that.
    pub(crate) fn pad(&mut self) {
        self.counts.0 = self.counts.0.next_multiple_of(GRAIN as u64);
    }

    /// Makes the bytes put in visible to the owner, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self) {
        let counters = self.layout.counters(self.sender);
        self.map.atomic_u64(counters + TAIL).store(self.counts.0, Release);
        Doorbell::ring_if_asleep(&self.map);
    }

    /// Requests a notice about free space. The caller must check for space once more afterwards.
    pub(crate) fn request_space(&self) {
        self.map.atomic_u32(self.layout.counters(self.sender) + WANTED).store(1, SeqCst);
        fence(SeqCst);
    }
}

fn filled(head: u64, tail: u64, ring: usize) -> Result<usize, CommError> {
    match tail.wrapping_sub(head) {
        there if there <= ring as u64 && tail.is_multiple_of(GRAIN as u64) => Ok(there as usize),
        _ => Err(impossible()),
    }
}

fn impossible() -> CommError {
    super::problem("a ring in shared memory has impossible counters".to_owned())
}

/// Doorbell of a segment's owner, and the flag that it has left.
#[derive(Clone, Debug)]
pub(crate) struct Doorbell {
    map: Arc<Mapping>,
}

impl Doorbell {
    /// Number of times it has rung.
    pub(crate) fn count(&self) -> u32 {
        self.map.atomic_u32(BELL).load(Acquire)
    }

    /// Notifies the owner, awake or asleep, of an event that no ring shows.
    pub(crate) fn ring(&self) {
        let bell = self.map.atomic_u32(BELL);
        // Ordered before the load of the sleep flag; the sleeper sets its flag before it loads the
        // doorbell: one of the two sees the other.
        bell.fetch_add(1, SeqCst);
        if self.map.atomic_u32(ASLEEP).load(SeqCst) != 0 {
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Notifies the owner, if it is asleep, of an event that it sees by polling while awake.
    pub(crate) fn notify(&self) {
        Self::ring_if_asleep(&self.map);
    }

    fn ring_if_asleep(map: &Mapping) {
        // The event was written before, and the sleeper sets its flag before its last check.
        fence(SeqCst);
        if map.atomic_u32(ASLEEP).load(Relaxed) != 0 {
            let bell = map.atomic_u32(BELL);
            bell.fetch_add(1, SeqCst);
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Called by the owner: sleeps until the doorbell count differs from `seen`, at most `at_most`.
    /// Does not sleep if `anything` returns true.
    pub(crate) fn sleep(&self, seen: u32, at_most: Duration, mut anything: impl FnMut() -> bool) {
        let asleep = self.map.atomic_u32(ASLEEP);
        asleep.store(1, SeqCst);
        fence(SeqCst);
        let bell = self.map.atomic_u32(BELL);
        // Sleeps only if the doorbell count is unchanged; an interruption is as good as a ring.
        if bell.load(SeqCst) == seen && !anything() {
            let timeout = futex::Timespec {
                tv_sec: at_most.as_secs().min(1 << 30) as i64,
                tv_nsec: i64::from(at_most.subsec_nanos()),
            };
            let _ = futex::wait(bell, futex::Flags::empty(), seen, Some(&timeout));
        }
        asleep.store(0, SeqCst);
    }

    /// Called by the owner: it will neither send nor read any more.
    pub(crate) fn depart(&self) {
        self.map.atomic_u32(DEPARTED).store(1, Release);
    }

    /// Returns true if the owner has left. Everything it sent was published before.
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
        let total = 5000 * GRAIN;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let bytes: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
                let (mut rest, mut piece) = (bytes.as_slice(), GRAIN);
                while !rest.is_empty() {
                    let wanted = rest.len().min(piece);
                    let put = outbox.room(wanted).unwrap().min(wanted);
                    if put == 0 {
                        std::thread::yield_now();
                    }
                    outbox.put(&rest[..put]);
                    outbox.publish();
                    rest = &rest[put..];
                    piece = piece % (70 * GRAIN) + 3 * GRAIN;
                }
            });
            let mut got = 0;
            let bell = inbox.bell();
            while got < total {
                let seen = bell.count();
                let mut ring = inbox.ring(1);
                let there = ring.peek(1000).unwrap();
                for (i, byte) in there.iter().enumerate() {
                    assert_eq!(*byte, ((got + i) % 251) as u8);
                }
                let n = there.len();
                ring.consume(n);
                got += n;
                if n == 0 {
                    bell.sleep(seen, Duration::from_secs(5), || inbox.has_news(1));
                }
            }
            assert!(inbox.ring(0).peek(1).unwrap().is_empty());
        });
    }

    #[test]
    fn nobody_sleeps_through_a_ring() {
        let (inbox, ..) = Inbox::create(LAYOUT).unwrap();
        let (bell, ringer) = (inbox.bell(), inbox.bell());
        let laps = 5_000;
        // A missed ring costs a sleep of this length; nothing else takes that long.
        let long = Duration::from_secs(120);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..laps {
                    ringer.ring();
                    std::thread::yield_now();
                }
            });
            let began = std::time::Instant::now();
            let mut seen = 0;
            while seen != laps {
                bell.sleep(seen, long, || false);
                seen = bell.count();
            }
            assert!(began.elapsed() < long, "a ring was missed");
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
        assert!(inbox.ring(2).peek(1).is_err());
        outbox.map.atomic_u64(tail).store(65, SeqCst);
        assert!(inbox.ring(2).head().is_err());
    }
}
