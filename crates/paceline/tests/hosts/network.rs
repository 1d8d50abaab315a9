//! Hosts as network namespaces, connected by a switch in another namespace; every port is shaped.

use std::process::{Child, Command, Output, Stdio};

/// Bandwidth of a port in each direction.
pub(crate) const RATE: &str = "1gbit";
/// The same in bytes of payload per second: the shaper counts the 1514 bytes of a full frame, of
/// which 1448 are payload.
pub(crate) const PAYLOAD_PER_SECOND: f64 = 125e6 * EFFICIENCY;
/// Fraction of a frame that is payload.
pub(crate) const EFFICIENCY: f64 = 1448.0 / 1514.0;

/// Hosts and their network; removed on drop, with all processes that still run there.
pub(crate) struct Network {
    name: String,
    hosts: u32,
}

impl Network {
    /// Builds the network, or returns the reason that this machine cannot.
    pub(crate) fn build(hosts: u32) -> Result<Self, String> {
        let network = Self { name: format!("paceline-{}", std::process::id()), hosts };
        let switch = network.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add bridge type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for host in 0..hosts {
            let (here, port) = (network.host(host), format!("port{host}"));
            ip(&format!("netns add {here}"))?;
            ip(&format!("-n {here} link add nic type veth peer name {port} netns {switch}"))?;
            ip(&format!("-n {here} address add {}/24 dev nic", network.address(host)))?;
            ip(&format!("-n {switch} link set {port} master bridge up"))?;
            ip(&format!("-n {here} link set nic up"))?;
            ip(&format!("-n {here} link set lo up"))?;
            // Shapes both ends: traffic from the host, and traffic from the switch to it. The
            // queues are deep, which in effect makes the network lossless.
            for (namespace, device) in [(&here, "nic"), (&switch, port.as_str())] {
                let queue = format!("tbf rate {RATE} burst 128kb limit 16mb");
                let line = format!("netns exec {namespace} tc qdisc add dev {device} root {queue}");
                ip(&line)?;
            }
        }
        Ok(network)
    }

    /// IP address of a host.
    pub(crate) fn address(&self, host: u32) -> String {
        format!("10.209.77.{}", host + 1)
    }

    /// Host name of a host.
    pub(crate) fn host_name(&self, host: u32) -> String {
        format!("shaped-host-{host}")
    }

    /// Starts a program on a host.
    pub(crate) fn start(&self, host: u32, change: impl FnOnce(&mut Command)) -> Child {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.host(host), "unshare", "--uts", "sh", "-c"])
            .args([&format!("hostname {} && exec \"$@\"", self.host_name(host)), "sh"])
            .arg(env!("CARGO_BIN_EXE_paceline"));
        change(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Disconnects a host from the network.
    pub(crate) fn cut_off(&self, host: u32) {
        ip(&format!("-n {} link set nic down", self.host(host))).unwrap();
    }

    fn host(&self, host: u32) -> String {
        format!("{}-host-{host}", self.name)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for namespace in (0..self.hosts).map(|host| self.host(host)).chain([self.switch()]) {
            // A namespace that was never created cannot be removed; that is no failure.
            let _ = ip(&format!("netns delete {namespace}"));
        }
    }
}

/// Number of existing namespaces of this process's networks.
pub(crate) fn namespaces() -> usize {
    let prefix = format!("paceline-{}-", std::process::id());
    let all = std::fs::read_dir("/run/netns").into_iter().flatten().flatten();
    all.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).count()
}

fn ip(line: &str) -> Result<(), String> {
    let failed = |why: String| Err(format!("ip {line}: {why}"));
    match Command::new("ip").args(line.split_whitespace()).output() {
        Ok(Output { status, .. }) if status.success() => Ok(()),
        Ok(Output { stderr, .. }) => failed(String::from_utf8_lossy(&stderr).trim().to_owned()),
        Err(error) => failed(error.to_string()),
    }
}
