//! Handshake: mutual authentication of every connection of a job.
//!
//! The connecting peer speaks first and sends its proof last:
//!
//! ```text
//! peer     → listener  "PACELINE", version, nonce g
//! listener → peer      "PACELINE", version, nonce d, HMAC("listener", g, d)
//! peer     → listener  length, HMAC("peer", d, g, body), body
//! listener → peer      HMAC("welcome", g, d, body)
//! ```
//!
//! Both sides then derive the keys of the connection's records from the secret, g and d.
//!
//! Until its proof is verified a connection costs a few kilobytes, has a deadline, and counts
//! against a limit. Beyond that limit the oldest unauthenticated connection is dropped. Data from
//! an unauthenticated peer can do no more than end its own connection. A valid peer that is dropped
//! because of the limit receives no welcome and connects again.

use super::loopback;
use crate::error::CommError;
use crate::secret::{PROOF, Secret, nonce};
use crate::session::{Session, Side};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Protocol version; raised whenever a frame or the handshake changes.
pub(crate) const VERSION: u32 = 4;
const MAGIC: &[u8; 8] = b"PACELINE";
const HELLO: usize = 8 + 4 + PROOF;
const ANSWER: usize = HELLO + PROOF;
/// Maximum bytes of a peer's body.
pub(crate) const LONGEST_BODY: usize = 32 << 10;
/// Time limit of a peer's handshake.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// Number of unauthenticated connections allowed in addition to the expected peers.
const MAX_UNAUTHENTICATED: usize = 32;

/// A connection whose sides have proved to each other that they know the secret.
#[derive(Debug)]
pub(crate) struct Authenticated {
    pub(crate) stream: TcpStream,
    pub(crate) session: Session,
}

/// A listener and its connections that are not authenticated yet.
#[derive(Debug)]
pub(crate) struct AuthListener {
    listener: TcpListener,
    secret: Secret,
    pending: Vec<PendingPeer>,
    limit: usize,
    /// True once a refused peer has been logged.
    logged: bool,
}

impl AuthListener {
    /// Opens a listener for about `expected` peers.
    pub(crate) fn open(at: SocketAddr, secret: Secret, expected: u32) -> Result<Self, CommError> {
        let listener = loopback::listen(at)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| problem(format!("cannot listen on {at}: {error}")))?;
        Ok(Self {
            listener,
            secret,
            pending: Vec::new(),
            limit: MAX_UNAUTHENTICATED + expected as usize,
            logged: false,
        })
    }

    pub(crate) fn address(&self) -> Result<SocketAddr, CommError> {
        let failed = |error| problem(format!("a listener without an address: {error}"));
        self.listener.local_addr().map_err(failed)
    }

    /// Replaces the secret that peers must know.
    pub(crate) fn set_secret(&mut self, secret: Secret) {
        self.secret = secret;
    }

    /// Waits up to `at_most` for activity; returns the connections authenticated meanwhile, each
    /// with its body.
    pub(crate) fn attend(&mut self, at_most: Duration) -> Vec<(Authenticated, Vec<u8>)> {
        let mut watched = vec![PollFd::new(&self.listener, PollFlags::IN)];
        watched.extend(self.pending.iter().map(|peer| PollFd::new(&peer.stream, PollFlags::IN)));
        let _ = poll(&mut watched, Some(&timespec(at_most)));
        drop(watched);
        self.accept();
        let now = Instant::now();
        let mut admitted = Vec::new();
        let (mut waiting, mut refused) = (Vec::new(), None);
        for mut peer in self.pending.drain(..) {
            match peer.listen(&self.secret) {
                Verdict::Admitted(body, session) => {
                    let session = *session;
                    admitted.push((Authenticated { stream: peer.stream, session }, body));
                }
                Verdict::Waiting if now < peer.deadline => waiting.push(peer),
                Verdict::Waiting | Verdict::Refused => refused = refused.or(Some(peer.address)),
            }
        }
        self.pending = waiting;
        if let Some(address) = refused {
            self.log_refusal(address);
        }
        admitted
    }

    fn accept(&mut self) {
        // Bounded, so that a flood of connections cannot starve the pending ones.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, address)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        let _ = stream.set_nodelay(true);
                        self.pending.push(PendingPeer::new(stream, address));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Out of descriptors, or a connection that closed at once: later ones may succeed.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(1));
                    break;
                }
            }
            if self.pending.len() > self.limit {
                let oldest = self.pending.remove(0);
                self.log_refusal(oldest.address);
            }
        }
    }

    /// Logs the first refused peer of this listener: they change nothing, and may be many.
    fn log_refusal(&mut self, address: SocketAddr) {
        if !std::mem::replace(&mut self.logged, true) {
            let own = self.listener.local_addr().ok();
            let listener = own.map(|own| own.to_string()).unwrap_or_default();
            tracing::warn!(
                target: "peers", from = %address, listener,
                "refused a connection that does not know this job's secret; further ones are not logged"
            );
        }
    }
}

/// A connection during its handshake.
#[derive(Debug)]
struct PendingPeer {
    stream: TcpStream,
    address: SocketAddr,
    heard: Vec<u8>,
    /// Both nonces, once known: the peer's and the listener's.
    nonces: Option<([u8; PROOF], [u8; PROOF])>,
    deadline: Instant,
}

enum Verdict {
    Waiting,
    Refused,
    Admitted(Vec<u8>, Box<Session>),
}

impl PendingPeer {
    fn new(stream: TcpStream, address: SocketAddr) -> Self {
        let deadline = Instant::now() + HANDSHAKE;
        Self { stream, address, heard: Vec::new(), nonces: None, deadline }
    }

    fn listen(&mut self, secret: &Secret) -> Verdict {
        loop {
            let wanted = self.wanted();
            if wanted > 4 + PROOF + LONGEST_BODY {
                return Verdict::Refused;
            }
            if self.heard.len() < wanted {
                // Never more than belongs to the handshake: later bytes are for other readers.
                let mut buffer = [0; 1024];
                let room = (wanted - self.heard.len()).min(buffer.len());
                match self.stream.read(&mut buffer[..room]) {
                    Ok(0) => return Verdict::Refused,
                    Ok(n) => self.heard.extend_from_slice(&buffer[..n]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Verdict::Waiting,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return Verdict::Refused,
                }
                continue;
            }
            match self.nonces {
                None => {
                    if self.answer(secret).is_none() {
                        return Verdict::Refused;
                    }
                }
                Some((peer, listener)) if self.heard.len() >= 4 + PROOF => {
                    let (proof, body) = self.heard[4..].split_at(PROOF);
                    if !secret.verify("peer", &[&listener, &peer, body], proof) {
                        return Verdict::Refused;
                    }
                    let welcome = secret.prove("welcome", &[&peer, &listener, body]);
                    // It always fits; a peer that has disconnected meanwhile is not admitted.
                    return match self.stream.write_all(&welcome) {
                        Ok(()) => {
                            let session = Session::new(secret, Side::Listener, &peer, &listener);
                            Verdict::Admitted(body.to_vec(), Box::new(session))
                        }
                        Err(_) => Verdict::Refused,
                    };
                }
                // The length has arrived and determines the number of further bytes.
                Some(_) => {}
            }
        }
    }

    /// Number of bytes in the current part of the handshake, as far as known.
    fn wanted(&self) -> usize {
        match (self.nonces, self.heard.first_chunk::<4>()) {
            (None, _) => HELLO,
            (Some(_), None) => 4,
            (Some(_), Some(length)) => {
                (u32::from_le_bytes(*length) as usize).saturating_add(4 + PROOF)
            }
        }
    }

    fn answer(&mut self, secret: &Secret) -> Option<()> {
        let heard = std::mem::take(&mut self.heard);
        let (magic, rest) = heard.split_first_chunk::<8>()?;
        let (version, rest) = rest.split_first_chunk::<4>()?;
        let peer = *rest.first_chunk::<PROOF>()?;
        if magic != MAGIC {
            return None;
        }
        let listener = nonce().ok()?;
        let mut answer = hello(&listener);
        answer.extend(secret.prove("listener", &[&peer, &listener]));
        // The answer is short enough to always fit into the buffer of a fresh connection.
        self.stream.write_all(&answer).ok()?;
        // A peer of another version learns ours from the answer, and is then refused.
        (u32::from_le_bytes(*version) == VERSION).then_some(())?;
        self.nonces = Some((peer, listener));
        Some(())
    }
}

/// Connects to a listener and authenticates; retries until `deadline` while there is no answer and
/// `go_on` allows it.
pub(crate) fn connect_authenticated(
    at: SocketAddr,
    secret: &Secret,
    body: &[u8],
    deadline: Instant,
    go_on: &mut dyn FnMut() -> Result<(), CommError>,
) -> Result<Authenticated, CommError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let error = match loopback::connect(at, left.min(Duration::from_secs(5))) {
            Ok(stream) => match introduce(stream, at, secret, body, deadline) {
                Ok(authenticated) => return Ok(authenticated),
                // Perhaps dropped because of too many unauthenticated peers: worth another try.
                Err(Refusal::Gone(error)) => error,
                Err(Refusal::Wrong(error)) => return Err(error),
            },
            Err(error) => problem(format!("cannot connect to {at}: {error}")),
        };
        if Instant::now() >= deadline {
            return Err(error);
        }
        go_on()?;
        std::thread::sleep(Duration::from_millis(10));
    }
}

enum Refusal {
    Gone(CommError),
    Wrong(CommError),
}

fn introduce(
    mut stream: TcpStream,
    at: SocketAddr,
    secret: &Secret,
    body: &[u8],
    deadline: Instant,
) -> Result<Authenticated, Refusal> {
    let gone = |error: std::io::Error| {
        Refusal::Gone(problem(format!("{at} ended the handshake: {error}")))
    };
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
    let _ = stream.set_nodelay(true);
    stream.set_read_timeout(Some(left.min(HANDSHAKE))).map_err(gone)?;
    stream.set_write_timeout(Some(left.min(HANDSHAKE))).map_err(gone)?;
    let peer = nonce().map_err(Refusal::Wrong)?;
    stream.write_all(&hello(&peer)).map_err(gone)?;
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).map_err(gone)?;
    let wrong = |text: String| Err(Refusal::Wrong(problem(text)));
    let version = u32::from_le_bytes([answer[8], answer[9], answer[10], answer[11]]);
    let (listener, proof) = (array(&answer, 12), &answer[HELLO..]);
    if &answer[..8] != MAGIC {
        return wrong(format!("what listens on {at} is not this program"));
    }
    if version != VERSION {
        return wrong(format!(
            "what listens on {at} speaks version {version} and this program version {VERSION}: \
             start all ranks from the same release"
        ));
    }
    if !secret.verify("listener", &[&peer, &listener], proof) {
        return wrong(format!("what listens on {at} does not know the secret of this job"));
    }
    let mut reply = (body.len() as u32).to_le_bytes().to_vec();
    reply.extend(secret.prove("peer", &[&listener, &peer, body]));
    reply.extend_from_slice(body);
    stream.write_all(&reply).map_err(gone)?;
    let mut welcome = [0; PROOF];
    stream.read_exact(&mut welcome).map_err(gone)?;
    if !secret.verify("welcome", &[&peer, &listener, body], &welcome) {
        return wrong(format!("the handshake with {at} was altered on the way"));
    }
    let session = Session::new(secret, Side::Peer, &peer, &listener);
    Ok(Authenticated { stream, session })
}

fn array(answer: &[u8; ANSWER], at: usize) -> [u8; PROOF] {
    let mut array = [0; PROOF];
    array.copy_from_slice(&answer[at..at + PROOF]);
    array
}

fn hello(nonce: &[u8; PROOF]) -> Vec<u8> {
    [MAGIC.as_slice(), &VERSION.to_le_bytes(), nonce].concat()
}

pub(crate) fn timespec(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: duration.as_secs().min(1 << 30) as i64,
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

    fn secret() -> Secret {
        Secret::from_text("the secret of these tests").unwrap()
    }

    /// Serves a listener until a peer is admitted, at most `at_most`.
    fn attend(listener: &mut AuthListener, at_most: Duration) -> Vec<(Authenticated, Vec<u8>)> {
        let end = Instant::now() + at_most;
        while Instant::now() < end {
            let admitted = listener.attend(Duration::from_millis(5));
            if !admitted.is_empty() {
                return admitted;
            }
        }
        Vec::new()
    }

    fn soon(seconds: f64) -> Instant {
        Instant::now() + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_friend_comes_in_among_strangers_of_all_kinds() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let at = listener.address().unwrap();
        let connect = |said: &[u8]| {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.write_all(said).unwrap();
            stream
        };
        let mut giant = hello(&[1; PROOF]);
        giant.extend(u32::MAX.to_le_bytes());
        giant.extend([0; 64]);
        let strangers = [
            connect(b""),
            connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n and more than a hello has"),
            connect(&[0xff; 4000]),
            connect(&hello(&[2; PROOF])[..20]),
            connect(&giant),
        ];
        drop(connect(b"PACEL"));
        let friend = std::thread::spawn(move || {
            connect_authenticated(at, &secret(), b"it is me", soon(5.0), &mut || Ok(()))
        });
        let mut admitted = attend(&mut listener, Duration::from_secs(5));
        assert_eq!(admitted.len(), 1);
        let (mut near, body) = admitted.pop().unwrap();
        assert_eq!(body, b"it is me");
        let mut friend = friend.join().unwrap().unwrap();
        let mut record = Vec::new();
        near.session.sealer.seal([b"welcome".as_slice()], &mut record);
        near.stream.write_all(&record).unwrap();
        let mut heard = vec![0; record.len()];
        friend.stream.read_exact(&mut heard).unwrap();
        let (head, rest) = heard.split_first_chunk_mut().unwrap();
        assert_eq!(friend.session.opener.head(head), Ok(rest.len()));
        assert_eq!(friend.session.opener.body(rest), Ok(b"welcome".as_slice()));
        drop(strangers);
    }

    #[test]
    fn a_crowd_cannot_lock_the_door() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let at = listener.address().unwrap();
        let friend = std::thread::spawn(move || {
            let crowd: Vec<_> = (0..200).filter_map(|_| TcpStream::connect(at).ok()).collect();
            let friend =
                connect_authenticated(at, &secret(), b"", soon(5.0), &mut || Ok(())).map(drop);
            drop(crowd);
            friend
        });
        assert_eq!(attend(&mut listener, Duration::from_secs(5)).len(), 1);
        assert!(listener.pending.len() <= listener.limit);
        friend.join().unwrap().unwrap();
    }

    #[test]
    fn a_friend_that_was_crowded_out_comes_again() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let at = listener.address().unwrap();
        let friend = std::thread::spawn(move || {
            connect_authenticated(at, &secret(), b"", soon(20.0), &mut || Ok(())).map(drop)
        });
        while listener.pending.is_empty() {
            listener.accept();
        }
        // The valid peer is answered by hand and dropped before its proof is checked.
        let peer = &mut listener.pending[0];
        peer.stream.set_nonblocking(false).unwrap();
        peer.heard = vec![0; HELLO];
        peer.stream.read_exact(&mut peer.heard).unwrap();
        peer.answer(&secret()).unwrap();
        listener.pending.clear();
        assert_eq!(attend(&mut listener, Duration::from_secs(20)).len(), 1);
        friend.join().unwrap().unwrap();
    }

    #[test]
    fn one_who_talks_too_slowly_is_shown_out() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let mut stream = TcpStream::connect(listener.address().unwrap()).unwrap();
        stream.write_all(&hello(&[3; PROOF])[..10]).unwrap();
        while listener.pending.is_empty() {
            listener.attend(Duration::from_millis(5));
        }
        listener.pending[0].deadline = Instant::now();
        listener.attend(Duration::from_millis(5));
        assert!(listener.pending.is_empty());
        let mut rest = Vec::new();
        assert!(matches!(stream.read_to_end(&mut rest), Ok(0) | Err(_)));
    }

    #[test]
    fn a_wrong_secret_is_told_to_its_holder_only() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let at = listener.address().unwrap();
        let other = Secret::from_text("not the secret of these tests").unwrap();
        let peer = std::thread::spawn(move || {
            connect_authenticated(at, &other, b"let me in", soon(20.0), &mut || Ok(()))
        });
        while !peer.is_finished() {
            assert!(listener.attend(Duration::from_millis(5)).is_empty());
        }
        let error = peer.join().unwrap().unwrap_err().to_string();
        assert!(error.ends_with("does not know the secret of this job"), "{error}");
    }

    #[test]
    fn a_forged_proof_is_refused() {
        let mut listener = AuthListener::open(HERE, secret(), 1).unwrap();
        let mut stream = TcpStream::connect(listener.address().unwrap()).unwrap();
        let mut said = hello(&[7; PROOF]);
        said.extend(3u32.to_le_bytes());
        said.extend([0; PROOF]);
        said.extend(b"abc");
        stream.write_all(&said).unwrap();
        assert!(attend(&mut listener, Duration::from_millis(200)).is_empty());
        assert!(listener.pending.is_empty());
    }

    #[test]
    fn nobody_listening_ends_at_the_deadline() {
        let at = AuthListener::open(HERE, secret(), 1).unwrap().address().unwrap();
        let error = connect_authenticated(at, &secret(), b"", soon(0.2), &mut || Ok(()))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(&format!("cannot connect to {at}")), "{error}");
    }
}
