//! Connections within one host.
//!
//! Congestion control protects wires that many share. Within a host there is no wire, and a system that
//! paces its connections (BBR does, with a timer for every few packets) lets copies within memory wait for
//! what it believes that they can do: it was seen to halve what two ranks exchange. Reno, which every system
//! has and lets everyone choose, does not pace, and finds no reason to slow down where nothing gets lost. It
//! has to be chosen before the connection is made, since pacing that has begun never ends.

use rustix::net::sockopt::{Timeout, set_socket_timeout, set_tcp_congestion};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

const UNPACED: &str = "reno";

/// Listens; whoever comes from this host to an address that only this host has is not slowed down.
pub(super) fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(at)?;
    if at.ip().is_loopback() {
        // A system without it is as fast as it was.
        let _ = set_tcp_congestion(&listener, UNPACED);
    }
    Ok(listener)
}

/// Connects, within so long.
pub(super) fn connect(at: SocketAddr, at_most: Duration) -> io::Result<TcpStream> {
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
