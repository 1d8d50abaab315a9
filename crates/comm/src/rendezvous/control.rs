//! Control messages between ranks and the rendezvous server: short messages on a connection that
//! stays open for the whole job.

use super::handshake::Authenticated;
use crate::error::CommError;
use crate::secret::PROOF;
use crate::session::{Altered, RECORD_HEAD, Session};
use crate::shm::Address;
use crate::shm::inbox::SegmentNonce;
use paceline_plan::ids::Rank;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Maximum message length in bytes: the member list of a very large world.
const LONGEST: usize = 64 << 20;
/// Maximum bytes queued for a peer that does not read.
const MOST_UNSENT: usize = LONGEST + (1 << 20);

/// Random number of a job, drawn by its rendezvous server.
pub(crate) type JobNonce = [u8; PROOF];

/// A control message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// A rank asks to join.
    Join { member: Member, world: u32, facts: BTreeMap<String, String> },
    /// A connection for data from the rank that connects to the one that listens.
    Data { from: Rank, to: Rank, index: u32 },
    /// All ranks have joined. `rendezvous` is the rank whose process runs the rendezvous server;
    /// `job` distinguishes this job from others with the same secret.
    World { members: Vec<Member>, rendezvous: Option<Rank>, job: JobNonce },
    /// The rank is connected to all others.
    Ready,
    /// All ranks are ready.
    Go,
    /// The sender is alive; `doing` describes its current operation.
    Heartbeat { doing: String },
    /// The rank leaves normally.
    Goodbye,
    /// The rank cannot continue.
    Abort { reason: String },
    /// The job has ended, with its cause.
    Over { cause: CommError },
}

/// A rank and its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) rank: Rank,
    /// Host name, for display.
    pub(crate) host: String,
    /// Identifier common to ranks that can share memory.
    pub(crate) shm_domain: String,
    /// Address of its data listener, if it has one.
    pub(crate) listens: Option<SocketAddr>,
    pub(crate) segment: Address,
    pub(crate) mark: SegmentNonce,
}

impl Control {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::new());
        match self {
            Self::Join { member, world, facts } => {
                w.u8(0).member(member).u32(*world).u32(facts.len() as u32);
                for (name, value) in facts {
                    w.text(name).text(value);
                }
            }
            Self::Data { from, to, index } => w.u8(1).u32(from.0).u32(to.0).u32(*index).end(),
            Self::World { members, rendezvous, job } => {
                w.u8(2).0.extend(job);
                w.u32(rendezvous.map_or(u32::MAX, |rank| rank.0)).u32(members.len() as u32);
                members.iter().for_each(|member| w.member(member).end());
            }
            Self::Ready => w.u8(3).end(),
            Self::Go => w.u8(4).end(),
            Self::Heartbeat { doing } => w.u8(5).text(doing).end(),
            Self::Goodbye => w.u8(6).end(),
            Self::Abort { reason } => w.u8(7).text(reason).end(),
            Self::Over { cause } => w.u8(8).cause(cause).end(),
        }
        w.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader(bytes);
        let message = match r.u8()? {
            0 => {
                let (member, world) = (r.member()?, r.u32()?);
                let mut facts = BTreeMap::new();
                for _ in 0..r.u32()? {
                    facts.insert(r.text()?, r.text()?);
                }
                Self::Join { member, world, facts }
            }
            1 => Self::Data { from: Rank(r.u32()?), to: Rank(r.u32()?), index: r.u32()? },
            2 => {
                let job = r.array()?;
                let rendezvous = Some(r.u32()?).filter(|rank| *rank != u32::MAX).map(Rank);
                let members = (0..r.u32()?).map(|_| r.member()).collect::<Option<_>>()?;
                Self::World { members, rendezvous, job }
            }
            3 => Self::Ready,
            4 => Self::Go,
            5 => Self::Heartbeat { doing: r.text()? },
            6 => Self::Goodbye,
            7 => Self::Abort { reason: r.text()? },
            8 => Self::Over { cause: r.cause()? },
            _ => return None,
        };
        r.0.is_empty().then_some(message)
    }
}

struct Writer(Vec<u8>);

impl Writer {
    /// Ends a call chain.
    fn end(&mut self) {}

    fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Writes a text; long texts are truncated, since they are for display.
    fn text(&mut self, text: &str) -> &mut Self {
        let end = (0..=text.len().min(4000)).rev().find(|end| text.is_char_boundary(*end));
        let text = &text[..end.unwrap_or(0)];
        self.u32(text.len() as u32).0.extend(text.as_bytes());
        self
    }

    fn member(&mut self, member: &Member) -> &mut Self {
        let Member { rank, host, shm_domain: neighbourhood, listens, segment, mark } = member;
        self.u32(rank.0).text(host).text(neighbourhood);
        self.text(&listens.map(|address| address.to_string()).unwrap_or_default());
        self.u32(segment.process).u32(segment.descriptor).u64(segment.bytes).0.extend(mark);
        self
    }

    fn cause(&mut self, cause: &CommError) -> &mut Self {
        match cause {
            CommError::Failed { rank, reason } => self.u8(0).u32(rank.0).text(reason),
            CommError::PeerLost { rank, host, how, doing, silent } => {
                self.u8(1).u32(rank.0).text(host).text(how).text(doing);
                self.u64(silent.as_millis() as u64)
            }
            CommError::Altered { way } => self.u8(3).text(way),
            other => self.u8(2).text(&other.to_string()),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    fn member(&mut self) -> Option<Member> {
        let (rank, host, neighbourhood) = (Rank(self.u32()?), self.text()?, self.text()?);
        let listens = match self.text()?.as_str() {
            "" => None,
            text => Some(text.parse().ok()?),
        };
        let (process, descriptor, bytes) = (self.u32()?, self.u32()?, self.u64()?);
        let segment = Address { process, descriptor, bytes };
        Some(Member {
            rank,
            host,
            shm_domain: neighbourhood,
            listens,
            segment,
            mark: self.array()?,
        })
    }

    fn cause(&mut self) -> Option<CommError> {
        Some(match self.u8()? {
            0 => CommError::Failed { rank: Rank(self.u32()?), reason: self.text()? },
            1 => CommError::PeerLost {
                rank: Rank(self.u32()?),
                host: self.text()?,
                how: self.text()?,
                doing: self.text()?,
                silent: Duration::from_millis(self.u64()?),
            },
            2 => CommError::Job { problem: self.text()? },
            3 => CommError::Altered { way: self.text()? },
            _ => return None,
        })
    }
}

/// Connection for control messages, each a sealed record; blocks only in `recv_until` and `close`.
#[derive(Debug)]
pub(crate) struct ControlConnection {
    stream: TcpStream,
    session: Session,
    heard: Vec<u8>,
    /// Bytes of the record that is arriving, without its head, once that has been checked.
    expected: Option<usize>,
    unsent: Vec<u8>,
}

/// Reason why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disconnected {
    /// The peer closed it, or broke its rules.
    Peer(String),
    /// A record's tag is wrong: bytes were altered between the two ends.
    Altered,
}

impl fmt::Display for Disconnected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peer(how) => f.write_str(how),
            Self::Altered => f.write_str("its control messages were altered on the way"),
        }
    }
}

impl From<Altered> for Disconnected {
    fn from(_: Altered) -> Self {
        Self::Altered
    }
}

impl ControlConnection {
    pub(crate) fn new(authenticated: Authenticated) -> Result<Self, Disconnected> {
        let Authenticated { stream, session } = authenticated;
        let _ = stream.set_nodelay(true);
        stream.set_nonblocking(true).map_err(|error| Disconnected::Peer(error.to_string()))?;
        Ok(Self { stream, session, heard: Vec::new(), expected: None, unsent: Vec::new() })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Returns true if queued data has not been sent.
    pub(crate) fn has_backlog(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a message, now or as soon as the socket accepts it.
    pub(crate) fn send(&mut self, message: &Control) -> Result<(), Disconnected> {
        self.session.sealer.seal([message.encode().as_slice()], &mut self.unsent);
        if self.unsent.len() > MOST_UNSENT {
            return Err(Disconnected::Peer("it does not read its control messages".to_owned()));
        }
        self.flush()
    }

    pub(crate) fn flush(&mut self) -> Result<(), Disconnected> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(n) => drop(self.unsent.drain(..n)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Disconnected::Peer(error.to_string())),
            }
        }
        Ok(())
    }

    /// Returns the next message, if it has arrived.
    pub(crate) fn try_recv(&mut self) -> Result<Option<Control>, Disconnected> {
        loop {
            if self.expected.is_none()
                && let Some(head) = self.heard.first_chunk_mut::<RECORD_HEAD>()
            {
                let expected = self.session.opener.head(head)?;
                if expected > LONGEST {
                    return Err(impossible());
                }
                self.expected = Some(expected);
            }
            if let Some(expected) = self.expected
                && let Some(body) = self.heard.get_mut(RECORD_HEAD..RECORD_HEAD + expected)
            {
                let message = Control::decode(self.session.opener.body(body)?);
                self.heard.drain(..RECORD_HEAD + expected);
                self.expected = None;
                return message.ok_or_else(impossible).map(Some);
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Disconnected::Peer("its connection closed".to_owned())),
                Ok(n) => self.heard.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Disconnected::Peer(format!("its connection broke: {error}")));
                }
            }
        }
    }

    /// Sends a last message and waits up to `at_most` until the peer has closed the connection:
    /// closing it with unread data would discard the message.
    pub(crate) fn close(mut self, message: &Control, at_most: Duration) {
        let end = Instant::now() + at_most;
        let mut open = self.send(message).is_ok();
        let mut rest = [0; 4096];
        while open && Instant::now() < end {
            open = self.flush().is_ok();
            if !self.has_backlog() {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
            open &= match self.stream.read(&mut rest) {
                Ok(n) => n > 0,
                Err(error) => {
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
                }
            };
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the next message until `deadline`; returns `None` if none arrived.
    pub(crate) fn recv_until(
        &mut self,
        deadline: Instant,
    ) -> Result<Option<Control>, Disconnected> {
        use rustix::event::{PollFd, PollFlags, poll};
        loop {
            self.flush()?;
            if let Some(message) = self.try_recv()? {
                return Ok(Some(message));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let wanted =
                if self.has_backlog() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let mut watched = [PollFd::new(&self.stream, wanted)];
            let _ = poll(&mut watched, Some(&super::handshake::timespec(left)));
        }
    }
}

fn impossible() -> Disconnected {
    Disconnected::Peer("it sent something impossible".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> Vec<Control> {
        let member = |rank, listens: Option<&str>| Member {
            rank: Rank(rank),
            host: "a-host".into(),
            shm_domain: "x/y".into(),
            listens: listens.map(|text| text.parse().unwrap()),
            segment: Address { process: 12, descriptor: 3, bytes: 1 << 40 },
            mark: [5; 32],
        };
        let lost = CommError::PeerLost {
            rank: Rank(2),
            host: "b".into(),
            how: "died".into(),
            doing: "at a barrier".into(),
            silent: Duration::from_millis(1234),
        };
        let facts = [("plan", "abc"), ("seed", "1")];
        vec![
            Control::Join {
                member: member(1, None),
                world: 2,
                facts: facts.map(|(k, v)| (k.into(), v.into())).into(),
            },
            Control::Data { from: Rank(3), to: Rank(2), index: 1 },
            Control::World {
                members: vec![member(0, Some("127.0.0.1:80")), member(1, Some("[::1]:9"))],
                rendezvous: Some(Rank(0)),
                job: [9; PROOF],
            },
            Control::World { members: vec![], rendezvous: None, job: [0; PROOF] },
            Control::Ready,
            Control::Go,
            Control::Heartbeat { doing: "größer".into() },
            Control::Goodbye,
            Control::Abort { reason: String::new() },
            Control::Over { cause: lost },
            Control::Over { cause: CommError::Failed { rank: Rank(1), reason: "why".into() } },
            Control::Over { cause: CommError::Altered { way: "messages".into() } },
        ]
    }

    #[test]
    fn messages_survive_and_their_parts_do_not() {
        for message in messages() {
            let bytes = message.encode();
            assert_eq!(Control::decode(&bytes), Some(message.clone()));
            for end in 0..bytes.len() {
                assert_eq!(Control::decode(&bytes[..end]), None, "{message:?}");
            }
        }
        let long = Control::Abort { reason: "ü".repeat(5000) };
        let Some(Control::Abort { reason }) = Control::decode(&long.encode()) else { panic!() };
        assert_eq!(reason, "ü".repeat(2000));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Control::decode(&bytes);
        }
    }
}
