//! A rank's segment: one ring for each sender, and a bell.
//!
//! **Rings.** A ring is a stream of bytes with one producer and one consumer. `tail` counts the
//! bytes ever put in and only the producer writes it; `head` counts those taken out and only the
//! consumer writes it. Bytes `head..tail` belong to the consumer, the rest to the producer, and a
//! release store of either counter, read with acquire, hands bytes over. Each side remembers the
//! other's counter as it last saw it and looks again only when that does not suffice, so that a line
//! travels between two cores once for a message and not once for a look. Both counters move by
//! multiples of [`GRAIN`](crate::wire::GRAIN).
//!
//! **The bell.** A rank that waits watches the rings it waits for; nobody else has to do anything.
//! Only when it has watched for long enough it says that it is asleep, looks once more, and sleeps
//! on a counter with a futex. Whoever puts something in, or takes something out that made room for
//! a waiting producer, then looks whether the owner is asleep, and only then rings: the common case
//! costs neither a system call nor a write to a line that others watch.

use super::{Address, Mapping};
use crate::error::CommError;
use crate::inflow::Source;
use crate::secret::{PROOF, nonce};
use crate::wire::{GRAIN, HEAD};
use rustix::thread::futex;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

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

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Inbox {
    map: Arc<Mapping>,
    layout: Layout,
    /// By sender: how many bytes were taken out, and how many were put in as far as was seen.
    counts: Vec<(u64, u64)>,
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
        let counts = vec![(0, 0); layout.senders as usize];
        Ok((Self { map: Arc::new(map), layout, counts }, file, address, mark))
    }

    pub(crate) fn bell(&self) -> Bell {
        Bell { map: Arc::clone(&self.map) }
    }

    /// A sender's stream.
    pub(crate) fn ring(&mut self, sender: u32) -> Ring<'_> {
        Ring { inbox: self, sender }
    }

    /// How many bytes of a sender's stream have been taken out.
    pub(crate) fn taken(&self, sender: u32) -> u64 {
        self.counts.get(sender as usize).map_or(0, |(head, _)| *head)
    }

    /// Whether a sender has put in more than was taken out.
    pub(crate) fn has_news(&self, sender: u32) -> bool {
        let tail = self.map.atomic_u64(self.layout.counters(sender) + TAIL).load(Acquire);
        self.counts.get(sender as usize).is_some_and(|(head, _)| *head != tail)
    }

    /// Whether a sender wants to be told that there is room again; asking takes the wish back.
    pub(crate) fn take_wish(&self, sender: u32) -> bool {
        let wanted = self.map.atomic_u32(self.layout.counters(sender) + WANTED);
        // `head` was moved before the look at the wish, as the wish is noted before the producer's
        // next look at `head`: one of the two sees the other.
        fence(SeqCst);
        wanted.load(Relaxed) != 0 && wanted.swap(0, SeqCst) != 0
    }
}

/// One sender's stream, for its consumer.
pub(crate) struct Ring<'i> {
    inbox: &'i mut Inbox,
    sender: u32,
}

impl Ring<'_> {
    /// How many bytes are there; looks anew only if fewer than so many are known of.
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
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, CommError> {
        if self.available(HEAD)? < HEAD {
            return Ok(None);
        }
        let (data, at) = self.place();
        let mut bytes = [0; HEAD];
        let first = HEAD.min(self.inbox.layout.ring - at);
        // SAFETY: bytes head..tail belong to the consumer, which has the inbox mutably, until `head`
        // moves past them.
        unsafe {
            self.inbox.map.read(data + at, &mut bytes[..first]);
            self.inbox.map.read(data, &mut bytes[first..]);
        }
        self.consume(HEAD);
        Ok(Some(bytes))
    }

    fn peek(&mut self, wanted: usize) -> Result<&[u8], CommError> {
        let there = self.available(wanted)?;
        let (data, at) = self.place();
        let there = there.min(self.inbox.layout.ring - at);
        // SAFETY: as in `head`; the result borrows the stream, so `head` cannot move meanwhile.
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

/// One sender's side.
#[derive(Debug)]
pub(crate) struct Outbox {
    map: Arc<Mapping>,
    layout: Layout,
    sender: u32,
    /// How many bytes were put in, and how many were taken out as far as was seen.
    counts: (u64, u64),
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
        Ok(Self { map: Arc::new(map), layout, sender, counts: (0, 0) })
    }

    pub(crate) fn bell(&self) -> Bell {
        Bell { map: Arc::clone(&self.map) }
    }

    /// How many bytes there is room for; looks anew only if fewer than so many are known of.
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

    /// Puts bytes into the stream, for which there must be room, and hides them until
    /// [`publish`](Self::publish).
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

    /// Fills the stream up to a multiple of the grain; there is always room for that.
    pub(crate) fn pad(&mut self) {
        self.counts.0 = self.counts.0.next_multiple_of(GRAIN as u64);
    }

    /// Shows what was put in to the owner, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self) {
        let counters = self.layout.counters(self.sender);
        self.map.atomic_u64(counters + TAIL).store(self.counts.0, Release);
        Bell::ring_if_asleep(&self.map);
    }

    /// Asks to be told when there is room. Room that came in between must be looked for afterwards.
    pub(crate) fn wish(&self) {
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

    /// Tells the owner of something that no ring shows, awake or asleep.
    pub(crate) fn ring(&self) {
        let bell = self.map.atomic_u32(BELL);
        // Ordered before the look at the sleeper, as the sleeper's note is before its look at the
        // bell: one of the two sees the other.
        bell.fetch_add(1, SeqCst);
        if self.map.atomic_u32(ASLEEP).load(SeqCst) != 0 {
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// Tells the owner, if it is asleep, of something that it sees anyhow while it is awake.
    pub(crate) fn knock(&self) {
        Self::ring_if_asleep(&self.map);
    }

    fn ring_if_asleep(map: &Mapping) {
        // What there is to see was written before, and the sleeper's note before its last look.
        fence(SeqCst);
        if map.atomic_u32(ASLEEP).load(Relaxed) != 0 {
            let bell = map.atomic_u32(BELL);
            bell.fetch_add(1, SeqCst);
            let _ = futex::wake(bell, futex::Flags::empty(), u32::MAX);
        }
    }

    /// For the owner: sleeps until the bell has rung since it had rung `seen` times, or for so long.
    /// Does not sleep if there is something to see already.
    pub(crate) fn sleep(&self, seen: u32, at_most: Duration, mut anything: impl FnMut() -> bool) {
        let asleep = self.map.atomic_u32(ASLEEP);
        asleep.store(1, SeqCst);
        fence(SeqCst);
        let bell = self.map.atomic_u32(BELL);
        // Sleeps only if the bell still has the count; interruptions are as good as a ring.
        if bell.load(SeqCst) == seen && !anything() {
            let timeout = futex::Timespec {
                tv_sec: at_most.as_secs().min(1 << 30) as i64,
                tv_nsec: i64::from(at_most.subsec_nanos()),
            };
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
        // A ring that is missed is slept through for as long as this; nothing else takes that long.
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
