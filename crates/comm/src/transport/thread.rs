//! Transport for ranks that are threads of one process.

use super::{Header, MessageChunk, MessageSink, RecvStatus, Tag, Transport, Wait, Waker};
use crate::error::CommError;
use paceline_plan::ids::Rank;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Creates `ranks` connected transports, in rank order, each to be moved into its thread.
pub fn world(ranks: u32) -> Vec<ThreadTransport> {
    let shared = Arc::new(World {
        ranks: (0..ranks).map(|_| RankState::default()).collect(),
        failure: OnceLock::new(),
        spare: Mutex::new(Vec::new()),
    });
    (0..ranks)
        .map(|rank| ThreadTransport { world: Arc::clone(&shared), rank: Rank(rank), seen: 0 })
        .collect()
}

/// Transport endpoint of one rank.
///
/// Dropping it tells the other ranks that this one has left; dropping it during a panic tells them
/// that it has failed.
#[derive(Debug)]
pub struct ThreadTransport {
    world: Arc<World>,
    rank: Rank,
    /// Event count of this rank's mailbox at the last wait.
    seen: u64,
}

#[derive(Debug)]
struct World {
    ranks: Vec<RankState>,
    failure: OnceLock<CommError>,
    /// Buffers of consumed messages, reused for later sends of any rank.
    spare: Mutex<Vec<Vec<u8>>>,
}

#[derive(Debug, Default)]
struct RankState {
    mail: Mutex<Mail>,
    arrived: Condvar,
    departed: AtomicBool,
}

impl RankState {
    fn wake(&self) {
        lock(&self.mail).events += 1;
        self.arrived.notify_all();
    }
}

/// Header and bytes of a message.
type Message = (Header, Vec<u8>);

#[derive(Debug, Default)]
struct Mail {
    /// Queues by sender and channel, oldest message first.
    queues: HashMap<(Rank, u32), VecDeque<Message>>,
    /// Number of events that end a wait.
    events: u64,
}

impl World {
    fn check(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn state(&self, rank: Rank) -> Result<&RankState, CommError> {
        let world = self.ranks.len() as u32;
        self.ranks.get(rank.index()).ok_or(CommError::NoSuchRank { rank, world })
    }

    fn fail(&self, rank: Rank, reason: &str) {
        let failure = CommError::Failed { rank, reason: reason.to_owned() };
        if self.failure.set(failure).is_ok() {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        self.ranks.iter().for_each(RankState::wake);
    }

    /// Returns an empty buffer with capacity for `bytes` bytes, reusing a spare one if possible.
    fn buffer(&self, bytes: usize) -> Vec<u8> {
        let mut spare = lock(&self.spare);
        // The smallest that suffices, or else the largest, as it needs to grow least.
        let fitting = |(_, buffer): &(usize, &Vec<u8>)| {
            let capacity = buffer.capacity();
            if capacity >= bytes { (0, capacity) } else { (1, usize::MAX - capacity) }
        };
        let index = spare.iter().enumerate().min_by_key(fitting).map(|(index, _)| index);
        let mut buffer = index.map(|index| spare.swap_remove(index)).unwrap_or_default();
        drop(spare);
        buffer.clear();
        buffer.reserve_exact(bytes);
        buffer
    }

    /// Keeps the buffer of a consumed message, a few per rank.
    fn recycle(&self, buffer: Vec<u8>) {
        let mut spare = lock(&self.spare);
        if buffer.capacity() > 0 && spare.len() < 4 * self.ranks.len() {
            spare.push(buffer);
        }
    }
}

impl ThreadTransport {
    fn queued_message(&self, from: Rank, tag: Tag) -> Result<Option<(Header, Vec<u8>)>, CommError> {
        self.world.check()?;
        // Checked before the queue: all messages sent before the departure are queued.
        let departed = self.world.state(from)?.departed.load(Ordering::Acquire);
        let mut mail = lock(&self.world.state(self.rank)?.mail);
        match mail.queues.get_mut(&(from, tag.channel())).and_then(VecDeque::pop_front) {
            None if departed => Err(CommError::PeerClosed { rank: self.rank, peer: from }),
            message => Ok(message),
        }
    }
}

impl Transport for ThreadTransport {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world(&self) -> u32 {
        self.world.ranks.len() as u32
    }

    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
        self.world.check()?;
        let receiver = self.world.state(to)?;
        if receiver.departed.load(Ordering::Acquire) {
            return Err(CommError::PeerClosed { rank: self.rank, peer: to });
        }
        let mut message = self.world.buffer(data.iter().map(|piece| piece.len()).sum());
        data.iter().for_each(|piece| message.extend_from_slice(piece));
        let mut mail = lock(&receiver.mail);
        let key = (self.rank, header.tag.channel());
        mail.queues.entry(key).or_default().push_back((*header, message));
        mail.events += 1;
        drop(mail);
        receiver.arrived.notify_one();
        Ok(())
    }

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let Some((header, data)) = self.queued_message(from, tag)? else {
            return Ok(RecvStatus::None);
        };
        visit.chunk(&header, MessageChunk { total: data.len(), at: 0, bytes: &data })?;
        self.world.recycle(data);
        Ok(RecvStatus::Complete)
    }

    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError> {
        let Some((header, data)) = self.queued_message(from, tag)? else { return Ok(false) };
        read(&header, &data);
        self.world.recycle(data);
        Ok(true)
    }

    fn wait(&mut self, _: Wait, at_most: Duration) -> Result<(), CommError> {
        self.world.check()?;
        let state = self.world.state(self.rank)?;
        let seen = self.seen;
        let (mail, _) = state
            .arrived
            .wait_timeout_while(lock(&state.mail), at_most, |mail| mail.events == seen)
            .unwrap_or_else(PoisonError::into_inner);
        self.seen = mail.events;
        drop(mail);
        self.world.check()
    }

    fn waker(&self) -> Option<Waker> {
        let (world, rank) = (Arc::clone(&self.world), self.rank.index());
        Some(Waker::new(move || world.ranks[rank].wake()))
    }

    fn abort(&mut self, reason: &str) {
        self.world.fail(self.rank, reason);
    }
}

impl Drop for ThreadTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.world.fail(self.rank, "its thread panicked");
        }
        if let Ok(state) = self.world.state(self.rank) {
            state.departed.store(true, Ordering::Release);
        }
        self.world.wake_all();
    }
}

/// Locks a mutex, ignoring poison: no panic can happen in the middle of an update here, so the data
/// stays consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Purpose;
    use paceline_plan::dtype::DType;

    fn send(
        transport: &mut ThreadTransport,
        to: Rank,
        tag: Tag,
        value: u8,
    ) -> Result<(), CommError> {
        let purpose = Purpose::PointToPoint { elements: 1, dtype: DType::U8 };
        transport.send(to, &Header { tag, purpose, round: 0 }, &[&[value]])
    }

    fn take(
        transport: &mut ThreadTransport,
        from: Rank,
        tag: Tag,
    ) -> Result<Option<(Tag, u8)>, CommError> {
        let mut found = None;
        transport.try_recv_into(from, tag, &mut |header: &Header, piece: MessageChunk<'_>| {
            found = Some((header.tag, piece.bytes[0]));
            Ok(())
        })?;
        Ok(found)
    }

    fn pair() -> (ThreadTransport, ThreadTransport) {
        let mut world = world(2).into_iter();
        (world.next().unwrap(), world.next().unwrap())
    }

    #[test]
    fn channels_do_not_mix_and_keep_their_order() {
        let (mut a, mut b) = pair();
        let (x, y) = (Tag::new(1, 0), Tag::new(2, 0));
        send(&mut a, Rank(1), x, 1).unwrap();
        send(&mut a, Rank(1), y, 2).unwrap();
        send(&mut a, Rank(1), x.next(), 3).unwrap();
        let mut take = |tag| take(&mut b, Rank(0), tag).unwrap();
        assert_eq!(take(y), Some((y, 2)));
        assert_eq!(take(y), None);
        assert_eq!(take(x), Some((x, 1)));
        assert_eq!(take(x.next()), Some((x.next(), 3)));
    }

    #[test]
    fn abort_reaches_every_call_of_every_rank() {
        let (mut a, mut b) = pair();
        a.abort("out of memory");
        a.abort("a later excuse");
        let failed = CommError::Failed { rank: Rank(0), reason: "out of memory".into() };
        let tag = Tag::new(0, 0);
        assert_eq!(b.wait(Wait::Spin, Duration::from_secs(60)), Err(failed.clone()));
        assert_eq!(take(&mut b, Rank(0), tag), Err(failed.clone()));
        assert_eq!(send(&mut b, Rank(0), tag, 0), Err(failed));
    }

    #[test]
    fn messages_outlive_their_sender_but_waiting_for_it_does_not() {
        let (mut a, mut b) = pair();
        let tag = Tag::new(0, 0);
        send(&mut a, Rank(1), tag, 1).unwrap();
        drop(a);
        assert!(take(&mut b, Rank(0), tag).unwrap().is_some());
        let departed = CommError::PeerClosed { rank: Rank(1), peer: Rank(0) };
        assert_eq!(take(&mut b, Rank(0), tag), Err(departed.clone()));
        assert_eq!(send(&mut b, Rank(0), tag, 0), Err(departed));
    }

    #[test]
    fn a_wait_ends_by_itself_and_misses_nothing() {
        let (mut a, mut b) = pair();
        b.wait(Wait::Spin, Duration::from_millis(1)).unwrap();
        let tag = Tag::new(0, 0);
        send(&mut a, Rank(1), tag, 1).unwrap();
        // The message arrived before the wait: missing it would take an hour.
        b.wait(Wait::Spin, Duration::from_secs(3600)).unwrap();
        assert!(take(&mut b, Rank(0), tag).unwrap().is_some());
    }

    #[test]
    fn a_waker_ends_the_wait_under_way_or_the_next() {
        let (mut a, _b) = pair();
        let waker = a.waker().unwrap();
        waker.wake();
        a.wait(Wait::Spin, Duration::from_secs(3600)).unwrap();
        let other = std::thread::spawn(move || waker.wake());
        a.wait(Wait::Spin, Duration::from_secs(3600)).unwrap();
        other.join().unwrap();
    }

    #[test]
    fn ranks_outside_the_world_are_refused() {
        let (mut a, _b) = pair();
        let tag = Tag::new(0, 0);
        let refused = CommError::NoSuchRank { rank: Rank(2), world: 2 };
        assert_eq!(send(&mut a, Rank(2), tag, 0), Err(refused.clone()));
        assert_eq!(take(&mut a, Rank(2), tag), Err(refused));
    }

    #[test]
    fn buffers_are_reused_by_size() {
        let (a, b) = pair();
        a.world.recycle(Vec::with_capacity(100));
        a.world.recycle(Vec::with_capacity(10));
        assert_eq!(b.world.buffer(5).capacity(), 10);
        assert_eq!(b.world.buffer(5).capacity(), 100);
        assert_eq!(b.world.buffer(5).capacity(), 5);
    }
}
