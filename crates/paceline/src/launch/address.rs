//! Addresses of this host, as other hosts reach it.

use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Address of an interface of this host, IPv4 if it has one.
pub(crate) fn interface_address(name: &str) -> Result<IpAddr, String> {
    let all = all()?;
    let mut of: Vec<IpAddr> =
        all.iter().filter(|(known, _)| known == name).map(|(_, address)| *address).collect();
    of.sort_by_key(IpAddr::is_ipv6);
    of.first().copied().ok_or_else(|| {
        let mut names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        names.dedup();
        format!("this host has no interface '{name}' with an address; it has {}", names.join(", "))
    })
}

/// Local address from which packets to `there` leave.
pub(super) fn address_towards(there: SocketAddr) -> Result<IpAddr, String> {
    let any: IpAddr = if there.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    // Connecting a datagram socket sends nothing; it only asks for the route.
    let probe = UdpSocket::bind((any, 0)).and_then(|probe| {
        probe.connect(there)?;
        probe.local_addr()
    });
    probe.map(|address| address.ip()).map_err(|error| {
        format!("this host has no way to rank 0 at {there}: {error}; --interface names one")
    })
}

/// Address at which other hosts are most likely to reach this one: that of the default route, or else
/// of the first interface that is not the loopback.
pub(super) fn host_address() -> Result<IpAddr, String> {
    let default = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    if let Some(address) = default_interface(&default).and_then(|name| interface_address(name).ok())
    {
        return Ok(address);
    }
    let mut far: Vec<IpAddr> = all()?.into_iter().map(|(_, address)| address).collect();
    far.retain(|address| !address.is_loopback());
    far.sort_by_key(IpAddr::is_ipv6);
    far.first().copied().ok_or_else(|| "this host has no interface but the loopback".to_owned())
}

/// Interface of the default route, in the kernel's table.
fn default_interface(table: &str) -> Option<&str> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let (name, destination) = (fields.next()?, fields.next()?);
        (destination == "00000000").then_some(name)
    })
}

/// Interfaces with their addresses, without those that only work on one link.
fn all() -> Result<Vec<(String, IpAddr)>, String> {
    let found =
        if_addrs::get_if_addrs().map_err(|error| format!("no list of interfaces: {error}"))?;
    let local = |address: &IpAddr| match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let all = found.into_iter().map(|found| (found.name.clone(), found.ip()));
    Ok(all.filter(|(_, address)| !local(address)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_has_an_address_and_other_names_have_none() {
        assert!(interface_address("lo").unwrap().is_loopback());
        assert!(interface_address("nowhere0").unwrap_err().contains("it has lo"));
        assert!(address_towards("127.0.0.1:1".parse().unwrap()).unwrap().is_loopback());
    }

    #[test]
    fn the_default_route_names_its_interface() {
        let table =
            "Iface\tDestination\tGateway\nib0\t0000000A\t00000000\neth1\t00000000\t0100000A\n";
        assert_eq!(default_interface(table), Some("eth1"));
        assert_eq!(default_interface("Iface\n"), None);
    }
}
