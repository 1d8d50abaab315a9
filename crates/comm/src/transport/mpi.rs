//! Transport whose messages travel by MPI, between processes that an MPI launcher started.
//!
//! Every message is a stream of segments from its sender, in MPI's order: a frame head with a small
//! payload, or a frame head and then parts of a large one. Parts are sent from copies that stay in the
//! cache, or from the sender's memory if it stays unchanged until they have gone ([`ZeroCopy`]), and
//! received where they belong, if that is one place. Rendezvous, heartbeats and the
//! detection of lost ranks are those of [`process`](super::process): MPI itself does not tell which
//! rank has failed. The thread that owns the transport makes all calls of MPI.

use super::process::{Noting, ProcessOptions, ProcessTransport, connect, online_cores};
use super::{Header, MessageSink, RecvStatus, Tag, Transport, Wait, Waker, ZeroCopy};
use crate::error::CommError;
use crate::frame_reader::{FrameReader, Source, StreamError};
use crate::mailbox::{Mailbox, QueuedMessage};
use crate::mpi::{Handle, Landing, Mpi};
use crate::recorder::{Direction, FlightRecorder};
use crate::transport::TransportKind;
use crate::wire::{self, HEAD};
use paceline_plan::ids::Rank;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// MPI's tag of all segments.
const SEGMENT: i32 = 1;
/// Payloads up to this size travel with their head.
const SMALL: usize = 32 << 10;
/// Bytes of a part: a fraction of a core's L2 cache, and a whole number of any elements.
const PART: usize = 256 << 10;
/// Bytes of a part that is sent from the sender's memory.
const LARGE_PART: usize = 2 << 20;
/// Least bytes of a vector whose messages are sent from the sender's memory.
const ZERO_COPY: u64 = 256 << 10;
/// Number of segments to one rank that may be under way before a sender waits.
const WINDOW: usize = 8;
/// Time that a wait without news spins if every rank has a core, and if ranks share cores.
const SPIN_ALONE: Duration = Duration::from_millis(2);
const SPIN_SHARED: Duration = Duration::from_micros(10);
/// Time after which a wait without news sleeps; it yields the core before.
const YIELD: Duration = Duration::from_millis(5);
/// Sleep of a wait that has yielded for long, or that runs beside a computation.
const NAP: Duration = Duration::from_micros(50);

/// Transport endpoint of one rank.
pub struct MpiTransport {
    /// The job's rendezvous and heartbeats.
    base: ProcessTransport,
    mpi: &'static Mpi,
    incoming: Vec<Incoming>,
    outgoing: Vec<Outgoing>,
    spare: Vec<Vec<u8>>,
    /// Time of the first wait since anything moved.
    idle: Option<Instant>,
    /// Time to spin.
    spin: Duration,
    /// True if another thread has asked to end the current wait, or the next one.
    woken: Arc<(Mutex<bool>, Condvar)>,
    heartbeat_timeout: Duration,
}

/// Data from one rank.
#[derive(Default)]
struct Incoming {
    mail: Mailbox,
    reader: FrameReader,
    segment: Segment,
}

/// Segments on their way to one rank.
#[derive(Default)]
struct Outgoing {
    /// Requests in order, each with its copy, or with `None` for a part in the sender's memory.
    pending: VecDeque<(Handle, Option<Vec<u8>>)>,
    /// True if a message is partly sent.
    begun: bool,
    /// Number of parts sent from the sender's memory, and number of those that have gone.
    zero_copy: u64,
    zero_copy_gone: u64,
    /// Receipt of the last message, if it was zero-copy.
    receipt: Option<u64>,
}

/// The segment that is arriving from a rank.
#[derive(Default)]
struct Segment {
    /// Its bytes, or room for them.
    bytes: Vec<u8>,
    /// Bytes that have arrived and are not consumed.
    start: usize,
    end: usize,
    /// Receive under way into `bytes`, and its length.
    request: Option<(Handle, usize)>,
    /// Receive under way to its destination.
    landing: Option<Landing>,
}

impl std::fmt::Debug for MpiTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MpiTransport").field("mpi", self.mpi).finish_non_exhaustive()
    }
}

impl MpiTransport {
    /// Joins the job. All ranks have joined MPI's world with the same numbers.
    pub fn connect(mpi: &'static Mpi, options: &ProcessOptions) -> Result<Self, CommError> {
        let options = ProcessOptions { transport: TransportKind::Mpi, ..options.clone() };
        if (mpi.rank(), mpi.size()) != (options.rank.0, options.world) {
            let (rank, world) = (options.rank, options.world);
            let problem = format!("rank {rank} of {world} is not that of {mpi:?}");
            return Err(CommError::Job { problem });
        }
        let base = connect(&options)?;
        // Ranks of other hosts have cores of their own, but how many are here is not known.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = options.world as usize * options.threads.max(1) > cores.max(online_cores());
        let each = || 0..options.world;
        Ok(Self {
            base,
            mpi,
            incoming: each().map(|_| Incoming::default()).collect(),
            outgoing: each().map(|_| Outgoing::default()).collect(),
            spare: Vec::new(),
            idle: None,
            spin: if shared { SPIN_SHARED } else { SPIN_ALONE },
            woken: Arc::default(),
            heartbeat_timeout: options.heartbeat_timeout,
        })
    }

    /// Fails if a rank has failed; MPI is not called any more then.
    fn check(&self) -> Result<(), CommError> {
        self.base.check().inspect_err(|_| self.mpi.fail())
    }

    /// Frees the buffers of segments that have gone; returns true if there were any.
    fn collect(&mut self) -> Result<bool, CommError> {
        let mut any = false;
        for outgoing in &mut self.outgoing {
            while let Some((request, _)) = outgoing.pending.front_mut() {
                if !self.mpi.test(request)? {
                    break;
                }
                match outgoing.pending.pop_front() {
                    Some((_, Some(bytes))) => self.spare.push(bytes),
                    Some((_, None)) => outgoing.zero_copy_gone += 1,
                    None => {}
                }
                any = true;
            }
        }
        Ok(any)
    }

    /// Starts to send a segment.
    fn put(&mut self, to: Rank, bytes: Vec<u8>) -> Result<(), CommError> {
        let request = self.mpi.send(&bytes, to.0, SEGMENT)?;
        self.outgoing[to.index()].pending.push_back((request, Some(bytes)));
        self.idle = None;
        Ok(())
    }

    /// An empty buffer.
    fn buffer(&mut self) -> Vec<u8> {
        let mut bytes = self.spare.pop().unwrap_or_default();
        bytes.clear();
        bytes
    }

    /// Sends more of a message, as far as the `window` allows; returns the bytes sent so far.
    fn send_some(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        (gone, window): (Option<usize>, usize),
    ) -> Result<Option<usize>, CommError> {
        self.check()?;
        let (rank, world) = (to, self.world());
        let state = self.outgoing.get(to.index()).ok_or(CommError::NoSuchRank { rank, world })?;
        let total: usize = data.iter().map(|piece| piece.len()).sum();
        if gone.is_none() && (state.begun || state.pending.len() >= window) {
            self.collect()?;
            let state = &self.outgoing[to.index()];
            if state.begun || state.pending.len() >= window {
                return Ok(None);
            }
        }
        let mut gone = match gone {
            Some(gone) => gone,
            None => {
                self.base.note(Direction::Sent, to, header, total);
                self.outgoing[to.index()].receipt = None;
                let mut bytes = self.buffer();
                bytes.extend_from_slice(&wire::encode(header, total, false));
                let with = if total <= SMALL { total } else { 0 };
                if with > 0 {
                    data.iter().for_each(|piece| bytes.extend_from_slice(piece));
                }
                self.put(to, bytes)?;
                with
            }
        };
        while gone < total {
            if self.outgoing[to.index()].pending.len() >= window {
                self.collect()?;
                if self.outgoing[to.index()].pending.len() >= window {
                    break;
                }
            }
            let mut bytes = self.buffer();
            for piece in rest(data, gone) {
                let room = PART - bytes.len();
                bytes.extend_from_slice(&piece[..piece.len().min(room)]);
                if bytes.len() == PART {
                    break;
                }
            }
            gone += bytes.len();
            self.put(to, bytes)?;
        }
        self.outgoing[to.index()].begun = gone < total;
        Ok(Some(gone))
    }

    /// Polls the data from a rank.
    fn poll<R>(
        &mut self,
        from: Rank,
        look: impl FnOnce(&mut FrameReader, &mut Arriving<'_>, &mut Mailbox) -> Result<R, StreamError>,
    ) -> Result<R, CommError> {
        self.check()?;
        let (own, world) = (self.rank(), self.world());
        let incoming = self.incoming.get_mut(from.index());
        let Incoming { mail, reader, segment } =
            incoming.ok_or(CommError::NoSuchRank { rank: from, world })?;
        let mut source = Arriving { mpi: self.mpi, from, own: from == own, segment, news: false };
        let found = look(reader, &mut source, mail);
        if source.news {
            self.idle = None;
        }
        found.map_err(|error| match error {
            StreamError::Comm(error) => error,
            StreamError::Altered => {
                let way = format!("messages from rank {from} to rank {own}");
                self.abort("messages were altered on their way");
                CommError::Altered { way }
            }
            StreamError::Wire(error) => {
                let reason = format!("rank {own} cannot read it: {error}");
                self.abort(&reason);
                CommError::Failed { rank: from, reason }
            }
        })
    }
}

/// Pieces without the first `skip` bytes.
fn rest<'m>(data: &'m [&'m [u8]], mut skip: usize) -> impl Iterator<Item = &'m [u8]> {
    data.iter().filter_map(move |piece| {
        let skipped = skip.min(piece.len());
        skip -= skipped;
        Some(&piece[skipped..]).filter(|rest| !rest.is_empty())
    })
}

/// Source of the bytes from one rank.
struct Arriving<'s> {
    mpi: &'static Mpi,
    from: Rank,
    /// True for this rank's messages to itself, which never leave its mailbox.
    own: bool,
    segment: &'s mut Segment,
    /// True if anything has arrived.
    news: bool,
}

impl Arriving<'_> {
    /// Receives a segment into the buffer, if none is there; returns true if one is.
    fn fetch(&mut self) -> Result<bool, CommError> {
        let segment = &mut *self.segment;
        if segment.start < segment.end {
            return Ok(true);
        }
        if let Some(landing) = &mut segment.landing {
            // The message is wanted in another place now: its bytes are copied from the first one.
            let Some(bytes) = landing.finish(self.mpi)? else { return Ok(false) };
            segment.bytes.clear();
            segment.bytes.extend_from_slice(bytes);
            (segment.start, segment.end) = (0, segment.bytes.len());
            segment.landing = None;
            self.news = true;
            return Ok(true);
        }
        if segment.request.is_none() && !self.own {
            let Some((message, length)) = self.mpi.probe(self.from.0, SEGMENT)? else {
                return Ok(false);
            };
            if length > segment.bytes.len() {
                segment.bytes.resize(length, 0);
            }
            let into = &mut segment.bytes[..length];
            segment.request = Some((self.mpi.receive(message, into)?, length));
        }
        let Some((request, length)) = &mut segment.request else { return Ok(false) };
        if !self.mpi.test(request)? {
            return Ok(false);
        }
        (segment.start, segment.end) = (0, *length);
        segment.request = None;
        self.news = true;
        Ok(segment.end > 0)
    }
}

impl Source for Arriving<'_> {
    fn head(&mut self) -> Result<Option<[u8; HEAD]>, StreamError> {
        if !self.fetch()? {
            return Ok(None);
        }
        let segment = &mut *self.segment;
        let head = segment.bytes[segment.start..segment.end].first_chunk().copied();
        let broken = || CommError::Job {
            problem: format!("rank {} sent a segment that is no frame", self.from),
        };
        segment.start += HEAD;
        Ok(Some(head.ok_or_else(broken)?))
    }

    fn peek(&mut self, wanted: usize) -> Result<&[u8], StreamError> {
        if wanted > 0 {
            self.fetch()?;
        }
        let Segment { bytes, start, end, .. } = &*self.segment;
        Ok(&bytes[*start..*end])
    }

    /// A message ends where its last segment does, so there is no padding to skip.
    fn consume(&mut self, bytes: usize) {
        let Segment { start, end, .. } = &mut *self.segment;
        *start += bytes.min(*end - *start);
    }

    fn read_into(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        let segment = &mut *self.segment;
        if self.own || segment.start < segment.end || segment.request.is_some() {
            return Ok(None);
        }
        if segment.landing.is_none() {
            let Some((message, length)) = self.mpi.probe(self.from.0, SEGMENT)? else {
                return Ok(Some(0));
            };
            if length > into.len() {
                // The pieces of the destination are smaller than the parts.
                if length > segment.bytes.len() {
                    segment.bytes.resize(length, 0);
                }
                let room = &mut segment.bytes[..length];
                segment.request = Some((self.mpi.receive(message, room)?, length));
                return Ok(None);
            }
            segment.landing = Some(Landing::begin(self.mpi, message, &mut into[..length])?);
        }
        let Some(landing) = &mut segment.landing else { return Ok(Some(0)) };
        if !landing.is_at(into) {
            return Ok(None);
        }
        let Some(bytes) = landing.finish(self.mpi)? else { return Ok(Some(0)) };
        let length = bytes.len();
        segment.landing = None;
        self.news = true;
        Ok(Some(length))
    }
}

impl Transport for MpiTransport {
    fn rank(&self) -> Rank {
        self.base.rank()
    }

    fn world(&self) -> u32 {
        self.base.world()
    }

    fn send(&mut self, to: Rank, header: &Header, data: &[&[u8]]) -> Result<(), CommError> {
        if to == self.rank() {
            self.check()?;
            let data = data.concat();
            let (header, total) = (*header, data.len());
            let message = QueuedMessage { header, total, shown: 0, data };
            self.incoming[to.index()].mail.push(message);
            return Ok(());
        }
        let began = Instant::now();
        let mut gone = None;
        // A message to the same rank that has begun is completed by its own sender first.
        while gone.is_none() {
            gone = self.send_some(to, header, data, (None, usize::MAX))?;
            if gone.is_none() && began.elapsed() > self.heartbeat_timeout {
                return Err(CommError::Timeout { rank: to, after: began.elapsed() });
            }
        }
        Ok(())
    }

    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        if to == self.rank() {
            self.send(to, header, data)?;
            return Ok(Some(data.iter().map(|piece| piece.len()).sum()));
        }
        self.send_some(to, header, data, (gone, WINDOW))
    }

    fn try_recv_into(
        &mut self,
        from: Rank,
        tag: Tag,
        visit: &mut dyn MessageSink,
    ) -> Result<RecvStatus, CommError> {
        let mut noting = Noting::new(visit);
        let taken = self.poll(from, |reader, source, mail| {
            reader.take(source, mail, tag.channel(), &mut noting)
        })?;
        match (taken, noting.last) {
            (RecvStatus::Complete, Some((header, total))) => {
                self.base.note(Direction::Received, from, &header, total);
            }
            _ => self.base.await_message(from, tag),
        }
        Ok(taken)
    }

    fn try_recv(
        &mut self,
        from: Rank,
        tag: Tag,
        read: &mut dyn FnMut(&Header, &[u8]),
    ) -> Result<bool, CommError> {
        let found = self.poll(from, |reader, source, mail| {
            reader.queued_message(source, mail, tag.channel())
        })?;
        match found {
            Some(QueuedMessage { header, data, total, .. }) => {
                self.base.note(Direction::Received, from, &header, total);
                read(&header, &data);
                self.incoming[from.index()].mail.recycle(data);
                Ok(true)
            }
            None => {
                self.base.await_message(from, tag);
                Ok(false)
            }
        }
    }

    fn wait(&mut self, how: Wait, at_most: Duration) -> Result<(), CommError> {
        self.check()?;
        if self.collect()? {
            self.idle = None;
        }
        let idle = self.idle.get_or_insert_with(Instant::now).elapsed();
        if how == Wait::Spin && idle < YIELD {
            if idle < self.spin {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let (woken, changed) = &*self.woken;
        let woken = woken.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = changed.wait_timeout_while(woken, NAP.min(at_most), |woken| !*woken);
        *ended.unwrap_or_else(PoisonError::into_inner).0 = false;
        Ok(())
    }

    fn waker(&self) -> Option<Waker> {
        let woken = Arc::clone(&self.woken);
        Some(Waker::new(move || {
            *woken.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
            woken.1.notify_all();
        }))
    }

    fn abort(&mut self, reason: &str) {
        self.mpi.fail();
        self.base.abort(reason);
    }

    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        Some(self)
    }

    fn flight_record(&self) -> Option<FlightRecorder> {
        self.base.flight_record()
    }
}

/// MPI reads the parts where they are, and tells by itself when it has.
impl ZeroCopy for MpiTransport {
    /// Nothing is sent as an ack.
    fn least(&self) -> u64 {
        ZERO_COPY
    }

    fn try_send(
        &mut self,
        to: Rank,
        header: &Header,
        data: &[&[u8]],
        gone: Option<usize>,
    ) -> Result<Option<usize>, CommError> {
        let total: usize = data.iter().map(|piece| piece.len()).sum();
        if to == self.rank() || total <= SMALL || gone.is_some() {
            return Transport::try_send(self, to, header, data, gone);
        }
        self.check()?;
        let (rank, world) = (to, self.world());
        if self.outgoing.get(to.index()).ok_or(CommError::NoSuchRank { rank, world })?.begun {
            self.collect()?;
            return Ok(None);
        }
        self.base.note(Direction::Sent, to, header, total);
        let mut head = self.buffer();
        head.extend_from_slice(&wire::encode(header, total, false));
        self.put(to, head)?;
        for part in data.iter().flat_map(|piece| piece.chunks(LARGE_PART)) {
            let request = self.mpi.send(part, to.0, SEGMENT)?;
            let outgoing = &mut self.outgoing[to.index()];
            outgoing.pending.push_back((request, None));
            outgoing.zero_copy += 1;
        }
        let outgoing = &mut self.outgoing[to.index()];
        outgoing.receipt = Some(outgoing.zero_copy);
        Ok(Some(total))
    }

    fn receipt(&mut self, to: Rank, _: Tag) -> Option<u64> {
        self.outgoing.get(to.index())?.receipt
    }

    /// The end of a request is its ack.
    fn send_acks(&mut self) -> Result<(), CommError> {
        self.check()
    }

    fn is_acked(&mut self, by: Rank, _: Tag, receipt: u64) -> Result<bool, CommError> {
        self.check()?;
        if self.collect()? {
            self.idle = None;
        }
        let (rank, world) = (by, self.world());
        let outgoing = self.outgoing.get(by.index());
        Ok(outgoing.ok_or(CommError::NoSuchRank { rank, world })?.zero_copy_gone >= receipt)
    }
}

impl Drop for MpiTransport {
    fn drop(&mut self) {
        let end = Instant::now() + self.heartbeat_timeout;
        let left = |this: &Self| this.outgoing.iter().any(|to| !to.pending.is_empty());
        while left(self) && self.check().is_ok() && Instant::now() < end {
            if self.collect().is_err() {
                break;
            }
            std::thread::yield_now();
        }
        if std::thread::panicking() || left(self) {
            // MPI may still read buffers that end here: it must not be called again.
            self.mpi.fail();
            self.outgoing
                .iter_mut()
                .for_each(|to| std::mem::forget(std::mem::take(&mut to.pending)));
        }
        self.incoming.iter_mut().filter(|from| from.segment.request.is_some()).for_each(|from| {
            self.mpi.fail();
            std::mem::forget(std::mem::take(&mut from.segment.bytes));
        });
    }
}
