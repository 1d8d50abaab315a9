//! The door through which every connection of a job comes: strangers stay outside.
//!
//! The one who connects speaks first, and proves last:
//!
//! ```text
//! guest → door   "PACELINE", version, nonce g
//! door  → guest  "PACELINE", version, nonce d, HMAC("door", g, d)
//! guest → door   length, HMAC("guest", d, g, body), body
//! door  → guest  "W"
//! ```
//!
//! Until the proof is checked a connection costs a few kilobytes, has a deadline, and counts
//! against a limit beyond which the oldest unproven one has to go. Nothing that a stranger sends
//! can do more than end its own connection. A guest that has to go because of a crowd hears no
//! welcome, and comes again.

use super::loopback;
use crate::error::CommError;
use crate::secret::{PROOF, Secret, nonce};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// What this program speaks; raised whenever a frame or the handshake changes.
pub(crate) const VERSION: u32 = 3;
const MAGIC: &[u8; 8] = b"PACELINE";
const HELLO: usize = 8 + 4 + PROOF;
const WELCOME: [u8; 1] = *b"W";
const ANSWER: usize = HELLO + PROOF;
/// The most a guest can say of itself.
pub(crate) const LONGEST_BODY: usize = 32 << 10;
/// How long a guest may take to prove itself.
const HANDSHAKE: Duration = Duration::from_secs(2);
/// How many guests may be unproven beside as many as are expected.
const STRANGERS: usize = 32;

/// A listener and the connections that have not proven themselves yet.
#[derive(Debug)]
pub(crate) struct Door {
    listener: TcpListener,
    secret: Secret,
    guests: Vec<Guest>,
    limit: usize,
}

impl Door {
    /// Opens a door for about so many guests.
    pub(crate) fn open(at: SocketAddr, secret: Secret, expected: u32) -> Result<Self, CommError> {
        let listener = loopback::listen(at)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| problem(format!("cannot listen on {at}: {error}")))?;
        Ok(Self { listener, secret, guests: Vec::new(), limit: STRANGERS + expected as usize })
    }

    pub(crate) fn address(&self) -> Result<SocketAddr, CommError> {
        let failed = |error| problem(format!("a listener without an address: {error}"));
        self.listener.local_addr().map_err(failed)
    }

    /// Waits at most so long for something to happen, and gives the connections that have proven
    /// themselves meanwhile, each with what it said.
    pub(crate) fn attend(&mut self, at_most: Duration) -> Vec<(TcpStream, Vec<u8>)> {
        let mut watched = vec![PollFd::new(&self.listener, PollFlags::IN)];
        watched.extend(self.guests.iter().map(|guest| PollFd::new(&guest.stream, PollFlags::IN)));
        let _ = poll(&mut watched, Some(&timespec(at_most)));
        drop(watched);
        self.accept();
        let now = Instant::now();
        let mut admitted = Vec::new();
        let mut waiting = Vec::new();
        for mut guest in self.guests.drain(..) {
            match guest.listen(&self.secret) {
                Verdict::Admitted(body) => admitted.push((guest.stream, body)),
                Verdict::Waiting if now < guest.deadline => waiting.push(guest),
                Verdict::Waiting | Verdict::Refused => {}
            }
        }
        self.guests = waiting;
        admitted
    }

    fn accept(&mut self) {
        // Bounded, so that a flood of connections cannot keep the known ones from being served.
        for _ in 0..64 {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        let _ = stream.set_nodelay(true);
                        self.guests.push(Guest::new(stream));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // Out of descriptors, or a connection that was gone at once: later ones may do.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(1));
                    break;
                }
            }
            if self.guests.len() > self.limit {
                self.guests.remove(0);
            }
        }
    }
}

/// A connection on its way in.
#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    heard: Vec<u8>,
    /// Both nonces, once they are known: the guest's and ours.
    nonces: Option<([u8; PROOF], [u8; PROOF])>,
    deadline: Instant,
}

enum Verdict {
    Waiting,
    Refused,
    Admitted(Vec<u8>),
}

impl Guest {
    fn new(stream: TcpStream) -> Self {
        let deadline = Instant::now() + HANDSHAKE;
        Self { stream, heard: Vec::new(), nonces: None, deadline }
    }

    fn listen(&mut self, secret: &Secret) -> Verdict {
        loop {
            let wanted = self.wanted();
            if wanted > 4 + PROOF + LONGEST_BODY {
                return Verdict::Refused;
            }
            if self.heard.len() < wanted {
                // Never more than belongs to the handshake: what follows is for others to read.
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
                Some((guest, door)) if self.heard.len() >= 4 + PROOF => {
                    let (proof, body) = self.heard[4..].split_at(PROOF);
                    if !secret.verify("guest", &[&door, &guest, body], proof) {
                        return Verdict::Refused;
                    }
                    // One byte always fits; a guest that has gone meanwhile is not let in.
                    return match self.stream.write_all(&WELCOME) {
                        Ok(()) => Verdict::Admitted(body.to_vec()),
                        Err(_) => Verdict::Refused,
                    };
                }
                // The length is there, and says how much more is wanted.
                Some(_) => {}
            }
        }
    }

    /// How many bytes the present part of the handshake has, as far as that is known.
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
        let guest = *rest.first_chunk::<PROOF>()?;
        if magic != MAGIC {
            return None;
        }
        let door = nonce().ok()?;
        let mut answer = hello(&door);
        answer.extend(secret.prove("door", &[&guest, &door]));
        // So few bytes always fit into the buffer of a fresh connection.
        self.stream.write_all(&answer).ok()?;
        // A guest of another version learns ours from the answer, and comes no further.
        (u32::from_le_bytes(*version) == VERSION).then_some(())?;
        self.nonces = Some((guest, door));
        Some(())
    }
}

/// Connects to a door and comes in, trying again until the deadline while nobody answers there.
pub(crate) fn enter(
    at: SocketAddr,
    secret: &Secret,
    body: &[u8],
    deadline: Instant,
) -> Result<TcpStream, CommError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let error = match loopback::connect(at, left.min(Duration::from_secs(5))) {
            Ok(stream) => match introduce(stream, at, secret, body, deadline) {
                Ok(stream) => return Ok(stream),
                // Crowded out by strangers, perhaps: worth another try.
                Err(Refusal::Gone(error)) => error,
                Err(Refusal::Wrong(error)) => return Err(error),
            },
            Err(error) => problem(format!("cannot connect to {at}: {error}")),
        };
        if Instant::now() >= deadline {
            return Err(error);
        }
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
) -> Result<TcpStream, Refusal> {
    let gone = |error: std::io::Error| {
        Refusal::Gone(problem(format!("{at} ended the handshake: {error}")))
    };
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
    let _ = stream.set_nodelay(true);
    stream.set_read_timeout(Some(left.min(HANDSHAKE))).map_err(gone)?;
    stream.set_write_timeout(Some(left.min(HANDSHAKE))).map_err(gone)?;
    let guest = nonce().map_err(Refusal::Wrong)?;
    stream.write_all(&hello(&guest)).map_err(gone)?;
    let mut answer = [0; ANSWER];
    stream.read_exact(&mut answer).map_err(gone)?;
    let wrong = |text: String| Err(Refusal::Wrong(problem(text)));
    let version = u32::from_le_bytes([answer[8], answer[9], answer[10], answer[11]]);
    let (door, proof) = answer[12..].split_at(PROOF);
    if &answer[..8] != MAGIC {
        return wrong(format!("what listens on {at} is not this program"));
    }
    if version != VERSION {
        return wrong(format!(
            "what listens on {at} speaks version {version} and this program version {VERSION}: \
             start all ranks from the same release"
        ));
    }
    if !secret.verify("door", &[&guest, door], proof) {
        return wrong(format!("what listens on {at} does not know the secret of this job"));
    }
    let mut reply = (body.len() as u32).to_le_bytes().to_vec();
    reply.extend(secret.prove("guest", &[door, &guest, body]));
    reply.extend_from_slice(body);
    stream.write_all(&reply).map_err(gone)?;
    let mut welcome = [0; WELCOME.len()];
    stream.read_exact(&mut welcome).map_err(gone)?;
    if welcome != WELCOME {
        return wrong(format!("what listens on {at} does not speak as this program does"));
    }
    Ok(stream)
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

    /// Attends a door until somebody came in, or for so long.
    fn attend(door: &mut Door, at_most: Duration) -> Vec<(TcpStream, Vec<u8>)> {
        let end = Instant::now() + at_most;
        while Instant::now() < end {
            let admitted = door.attend(Duration::from_millis(5));
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
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let at = door.address().unwrap();
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
        let friend = std::thread::spawn(move || enter(at, &secret(), b"it is me", soon(5.0)));
        let mut admitted = attend(&mut door, Duration::from_secs(5));
        assert_eq!(admitted.len(), 1);
        let (mut stream, body) = admitted.pop().unwrap();
        assert_eq!(body, b"it is me");
        let mut friend = friend.join().unwrap().unwrap();
        stream.write_all(b"welcome").unwrap();
        let mut heard = [0; 7];
        friend.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"welcome");
        drop(strangers);
    }

    #[test]
    fn a_crowd_cannot_lock_the_door() {
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let at = door.address().unwrap();
        let friend = std::thread::spawn(move || {
            let crowd: Vec<_> = (0..200).filter_map(|_| TcpStream::connect(at).ok()).collect();
            let friend = enter(at, &secret(), b"", soon(5.0)).map(drop);
            drop(crowd);
            friend
        });
        assert_eq!(attend(&mut door, Duration::from_secs(5)).len(), 1);
        assert!(door.guests.len() <= door.limit);
        friend.join().unwrap().unwrap();
    }

    #[test]
    fn a_friend_that_was_crowded_out_comes_again() {
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let at = door.address().unwrap();
        let friend = std::thread::spawn(move || enter(at, &secret(), b"", soon(20.0)).map(drop));
        while door.guests.is_empty() {
            door.accept();
        }
        // The friend is answered by hand, and shown out before its proof is looked at.
        let guest = &mut door.guests[0];
        guest.stream.set_nonblocking(false).unwrap();
        guest.heard = vec![0; HELLO];
        guest.stream.read_exact(&mut guest.heard).unwrap();
        guest.answer(&secret()).unwrap();
        door.guests.clear();
        assert_eq!(attend(&mut door, Duration::from_secs(20)).len(), 1);
        friend.join().unwrap().unwrap();
    }

    #[test]
    fn one_who_talks_too_slowly_is_shown_out() {
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let mut stream = TcpStream::connect(door.address().unwrap()).unwrap();
        stream.write_all(&hello(&[3; PROOF])[..10]).unwrap();
        while door.guests.is_empty() {
            door.attend(Duration::from_millis(5));
        }
        door.guests[0].deadline = Instant::now();
        door.attend(Duration::from_millis(5));
        assert!(door.guests.is_empty());
        let mut rest = Vec::new();
        assert!(matches!(stream.read_to_end(&mut rest), Ok(0) | Err(_)));
    }

    #[test]
    fn a_wrong_secret_is_told_to_its_holder_only() {
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let at = door.address().unwrap();
        let other = Secret::from_text("not the secret of these tests").unwrap();
        let guest = std::thread::spawn(move || enter(at, &other, b"let me in", soon(20.0)));
        while !guest.is_finished() {
            assert!(door.attend(Duration::from_millis(5)).is_empty());
        }
        let error = guest.join().unwrap().unwrap_err().to_string();
        assert!(error.ends_with("does not know the secret of this job"), "{error}");
    }

    #[test]
    fn a_forged_proof_is_refused() {
        let mut door = Door::open(HERE, secret(), 1).unwrap();
        let mut stream = TcpStream::connect(door.address().unwrap()).unwrap();
        let mut said = hello(&[7; PROOF]);
        said.extend(3u32.to_le_bytes());
        said.extend([0; PROOF]);
        said.extend(b"abc");
        stream.write_all(&said).unwrap();
        assert!(attend(&mut door, Duration::from_millis(200)).is_empty());
        assert!(door.guests.is_empty());
    }

    #[test]
    fn nobody_listening_ends_at_the_deadline() {
        let at = Door::open(HERE, secret(), 1).unwrap().address().unwrap();
        let began = Instant::now();
        let error = enter(at, &secret(), b"", soon(0.2)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot connect to {at}")), "{error}");
        assert!(began.elapsed() < Duration::from_secs(2));
    }
}
