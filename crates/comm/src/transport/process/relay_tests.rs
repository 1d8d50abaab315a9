//! A relay between two ranks that does not know the secret and alters bytes after the handshake:
//! both ranks and the rendezvous server end with an error that says so.

use super::{ProcessOptions, ProcessTransport, connect};
use crate::rendezvous::loopback::detour;
use crate::rendezvous::{RendezvousOptions, RendezvousServer};
use crate::transport::TransportKind;
use crate::{CommError, Secret, Tag, Transport, point};
use paceline_plan::ids::Rank;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const HERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const SILENCE: Duration = Duration::from_secs(10);

/// Connection of rank 1 that the relay alters, in the order in which rank 1 connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Altered {
    Control,
    Data,
}

/// Direction of the altered bytes, seen from rank 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

/// Alteration of one byte.
#[derive(Clone, Copy, Debug)]
struct Deed {
    connection: Altered,
    way: Way,
    /// Number of bytes after the handshake before the altered one.
    at: usize,
}

/// Opens a relay to `to` that alters a byte of one direction; returns its address.
fn relay(to: SocketAddr, deed: Option<Deed>) -> SocketAddr {
    let listener = TcpListener::bind(HERE).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let Ok((near, _)) = listener.accept() else { return };
        let Ok(far) = TcpStream::connect(to) else { return };
        let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let altered = |way| deed.filter(|deed| deed.way == way).map(|deed| deed.at);
        let (outward, inward) = (altered(Way::Out), altered(Way::In));
        let back = std::thread::spawn(move || carry(far_too, near_too, inward, Way::In));
        carry(near, far, outward, Way::Out);
        let _ = back.join();
    });
    at
}

/// Carries bytes; alters the one at `at` after the handshake.
fn carry(mut from: TcpStream, mut to: TcpStream, at: Option<usize>, way: Way) {
    let mut copy = |bytes: usize| -> Option<Vec<u8>> {
        let mut data = vec![0; bytes];
        from.read_exact(&mut data).ok()?;
        to.write_all(&data).ok()?;
        Some(data)
    };
    // Hello and proof, then the welcome; or hello, then the length of the body, proof and body.
    let handshake = match way {
        Way::In => copy(44 + 32).and_then(|_| copy(32)).map(drop),
        Way::Out => copy(44).and_then(|_| copy(4)).and_then(|length| {
            let length = u32::from_le_bytes(length.try_into().ok()?);
            copy(32 + length as usize).map(drop)
        }),
    };
    let (mut buffer, mut gone) = (vec![0; 64 << 10], 0);
    while handshake.is_some() {
        let Ok(n @ 1..) = from.read(&mut buffer) else { break };
        if let Some(at) = at.filter(|at| (gone..gone + n).contains(at)) {
            buffer[at - gone] ^= 0x80;
        }
        gone += n;
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}

/// Exchanges vectors between the two ranks until an error, at most `most` times.
fn exchange(
    transport: &mut ProcessTransport,
    most: u32,
    elements: usize,
) -> Result<f32, CommError> {
    let peer = Rank(1 - transport.rank().0);
    let mine = vec![transport.rank().0 as f32 + 1.0; elements];
    let mut theirs = vec![0.0; elements];
    for i in 0..most {
        let tag = Tag::new(0, i);
        let transport: &mut dyn Transport = transport;
        point::send(transport, peer, tag, &mine)?;
        point::recv(transport, peer, tag, &mut theirs, SILENCE)?;
        if i % 8 == 7 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(theirs.iter().all(|value| *value == theirs[0]));
    Ok(theirs[0])
}

/// Runs two ranks, rank 1 behind relays; returns what each received or the error it ended with, and
/// the end of the rendezvous server.
fn job(
    deed: Option<Deed>,
    encrypt: bool,
    most: u32,
    elements: usize,
) -> ([Result<f32, CommError>; 2], Result<(), CommError>) {
    let secret = Secret::random().unwrap();
    let server = RendezvousServer::start(RendezvousOptions {
        listen: HERE,
        secret: secret.clone(),
        world: 2,
        in_rank: None,
        join: SILENCE,
        heartbeat_timeout: Duration::from_secs(1),
    })
    .unwrap();
    let at = server.address();
    let rank = |rank: u32| {
        let mut options = ProcessOptions::new(Rank(rank), 2, at, secret.clone());
        options.rendezvous_in_rank_0 = false;
        options.transport = TransportKind::Tcp;
        options.encrypt = encrypt;
        options.join = SILENCE;
        options.heartbeat_timeout = Duration::from_secs(1);
        std::thread::spawn(move || {
            if rank == 1 {
                detour::take(move |to| {
                    let connection = if to == at { Altered::Control } else { Altered::Data };
                    relay(to, deed.filter(|deed| deed.connection == connection))
                });
            }
            exchange(&mut connect(&options)?, most, elements)
        })
    };
    let outcomes = [rank(0), rank(1)].map(|thread| thread.join().unwrap());
    (outcomes, server.join())
}

#[test]
fn a_relay_that_alters_nothing_changes_nothing() {
    for encrypt in [false, true] {
        for (most, elements) in [(20, 3), (3, 1_000_000)] {
            let (outcomes, end) = job(None, encrypt, most, elements);
            assert_eq!((outcomes, end), ([Ok(2.0), Ok(1.0)], Ok(())), "encrypted: {encrypt}");
        }
    }
}

fn assert_detected(deed: Deed, encrypt: bool, elements: usize) {
    let (outcomes, end) = job(Some(deed), encrypt, u32::MAX, elements);
    let [zero, one] = outcomes.map(|outcome| outcome.unwrap_err().to_string());
    let end = end.unwrap_err().to_string();
    for told in [zero, one, end] {
        assert!(told.contains("were altered on the way"), "{deed:?}: {told}");
        assert!(told.contains("rank "), "{deed:?}: {told}");
    }
}

#[test]
fn altered_control_messages_end_the_job_on_both_sides() {
    // The length, its tag, the body, its tag; and bytes of later messages.
    for at in [0, 3, 4, 19, 20, 21, 36, 40, 75] {
        for way in [Way::Out, Way::In] {
            let deed = Deed { connection: Altered::Control, way, at };
            assert_detected(deed, at % 2 == 0, 1000);
        }
    }
}

#[test]
fn altered_encrypted_payloads_end_the_job_on_both_sides() {
    for (at, elements) in [
        (0, 10),
        (3, 10),
        (19, 10),
        (20, 10),
        (150, 10),
        (200, 10),
        (5000, 10),
        (70_000, 1_000_000),
        (9_000_000, 1_000_000),
    ] {
        for way in [Way::Out, Way::In] {
            assert_detected(Deed { connection: Altered::Data, way, at }, true, elements);
        }
    }
}

#[test]
fn encrypted_payloads_are_not_readable_on_the_way() {
    use std::sync::{Arc, Mutex};
    let heard = Arc::new(Mutex::new(Vec::new()));
    for encrypt in [false, true] {
        let secret = Secret::random().unwrap();
        let (listener, heard) = (TcpListener::bind(HERE).unwrap(), Arc::clone(&heard));
        let (at, sink) = (listener.local_addr().unwrap(), Arc::clone(&heard));
        let reader = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            *sink.lock().unwrap() = bytes;
        });
        let stream = TcpStream::connect(at).unwrap();
        let session =
            crate::session::Session::new(&secret, crate::session::Side::Peer, &[1; 32], &[2; 32]);
        let authenticated = crate::rendezvous::handshake::Authenticated { stream, session };
        let connection = super::connection::Connection::new(authenticated, encrypt);
        let header = crate::wire::tests::messages()[2].0;
        let data = b"gradients that nobody else is to read".repeat(10);
        let pieces = [data.as_slice()];
        let message =
            super::link::Sending { header: &header, data: &pieces, gone: None, in_place: true };
        assert!(!connection.send(message));
        drop(connection);
        reader.join().unwrap();
        let heard = heard.lock().unwrap();
        let readable = heard.windows(9).any(|window| window == b"gradients");
        assert_eq!(readable, !encrypt);
    }
}
