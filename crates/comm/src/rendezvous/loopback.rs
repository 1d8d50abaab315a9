//! TCP connections within one host.
//!
//! Congestion control protects shared links. Within a host there is no link, but a system that
//! paces its connections delays copies within memory to its bandwidth estimate. BBR paces, with a
//! timer for every few packets: it was measured to halve the throughput between two ranks. Reno is
//! available on every system to every user, does not pace, and has no reason to slow down without
//! packet loss. It must be selected before the connection is established, since pacing never ends
//! once it has begun.

use rustix::net::sockopt::{Timeout, set_socket_timeout, set_tcp_congestion};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const UNPACED: &str = "reno";

/// Listens on `at`; connections over loopback are not paced.
pub(super) fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    if at.ip().is_loopback() {
        // On a system without Reno the speed is merely unchanged.
        let _ = set_tcp_congestion(&listener, UNPACED);
    }
    Ok(listener)
}

/// Connects to `at` within `at_most`.
pub(super) fn connect(at: SocketAddr, at_most: Duration) -> io::Result<TcpStream> {
    #[cfg(test)]
    let at = detour::of(at);
    if !at.ip().is_loopback() {
        return TcpStream::connect_timeout(&at, at_most);
    }
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let _ = set_tcp_congestion(&socket, UNPACED);
    set_socket_timeout(&socket, Timeout::Send, Some(at_most))?;
    rustix::net::connect(&socket, &at)?;
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket.into())
}

/// Relays of a test between this thread and the addresses it connects to.
#[cfg(test)]
pub(crate) mod detour {
    use std::cell::RefCell;
    use std::net::SocketAddr;

    type Detour = Box<dyn FnMut(SocketAddr) -> SocketAddr>;

    thread_local!(static DETOUR: RefCell<Option<Detour>> = const { RefCell::new(None) });

    /// Takes `detour` for all later connections of this thread.
    pub(crate) fn take(detour: impl FnMut(SocketAddr) -> SocketAddr + 'static) {
        DETOUR.set(Some(Box::new(detour)));
    }

    pub(super) fn of(at: SocketAddr) -> SocketAddr {
        DETOUR.with_borrow_mut(|detour| detour.as_mut().map_or(at, |detour| detour(at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::tcp_congestion;
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    #[test]
    fn both_ends_of_a_connection_within_the_host_are_unpaced() {
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let Ok(listener) = listen(SocketAddr::new(ip, 0)) else {
                continue; // A host without this family.
            };
            let near = connect(listener.local_addr().unwrap(), Duration::from_secs(5)).unwrap();
            let (far, _) = listener.accept().unwrap();
            for end in [&near, &far] {
                assert_eq!(tcp_congestion(end).unwrap(), UNPACED);
                assert_eq!(end.write_timeout().unwrap(), None);
            }
        }
    }

    #[test]
    fn nobody_there_is_an_error() {
        let listener = listen(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)).unwrap();
        let at = listener.local_addr().unwrap();
        drop(listener);
        let error = connect(at, Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
