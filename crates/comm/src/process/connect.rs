//! From a place in a job to a transport.

use super::attendant::Attendant;
use super::connection::Connection;
use super::link::{Link, SharedMemory};
use super::waiting::{Interest, Manners};
use super::{Arrivals, Common, ProcessTransport};
use crate::error::CommError;
use crate::recorder::FlightRecorder;
use crate::rendezvous::control::{Control, Hangup, Line, Member};
use crate::rendezvous::door::{Door, LONGEST_BODY, enter};
use crate::rendezvous::{Hub, HubOptions};
use crate::secret::Secret;
use crate::shm::inbox::{Inbox, Layout, Outbox};
use paceline_plan::ids::Rank;
use rustix::event::EventfdFlags;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// What carries messages between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wires {
    /// Shared memory between ranks of one host, TCP between hosts.
    Auto,
    /// Shared memory only; all ranks must be on one host.
    SharedMemory,
    /// TCP only.
    Tcp,
}

/// A place in a job, and how to take it.
#[derive(Clone, Debug)]
pub struct ProcessOptions {
    /// This rank.
    pub rank: Rank,
    /// How many there are.
    pub world: u32,
    /// Where the hub listens.
    pub hub: SocketAddr,
    /// Whether the hub is to run in rank 0; otherwise the launcher has one.
    pub hub_in_rank_0: bool,
    /// What all ranks know.
    pub secret: Secret,
    /// What all ranks must agree on before they start, by name: the hash of the plan, for one.
    pub facts: BTreeMap<String, String>,
    /// What carries messages.
    pub wires: Wires,
    /// On which address to listen for ranks of other hosts.
    pub bind: IpAddr,
    /// How many TCP connections there are between two ranks.
    pub connections: u32,
    /// Bytes of each ring in shared memory; there is one for each ordered pair of neighbours.
    pub ring: usize,
    /// How long all ranks together may take to come and to connect to each other.
    pub join: Duration,
    /// After how long without a sign a rank is given up. Death is noticed at once.
    pub detection: Duration,
    /// Threads of each rank that want a core while it waits: whoever watches for a message must not be in
    /// the way of another rank's.
    pub threads: usize,
    /// This host's name, if it is not to be the system's. Ranks of different names never share
    /// memory.
    pub host: Option<String>,
}

impl ProcessOptions {
    /// The usual settings: everything on loopback, the hub in rank 0.
    pub fn new(rank: Rank, world: u32, hub: SocketAddr, secret: Secret) -> Self {
        Self {
            rank,
            world,
            hub,
            hub_in_rank_0: true,
            secret,
            facts: BTreeMap::new(),
            wires: Wires::Auto,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            connections: 1,
            ring: 256 << 10,
            join: Duration::from_secs(60),
            detection: Duration::from_secs(10),
            threads: 1,
            host: None,
        }
    }
}

/// Takes the place: finds the others and connects to all of them.
pub fn connect(options: &ProcessOptions) -> Result<ProcessTransport, CommError> {
    let deadline = Instant::now() + options.join;
    check(options)?;
    let hub = start_hub(options)?;
    let layout = Layout { senders: options.world, ring: options.ring };
    let (inbox, segment, address, mark) = Inbox::create(layout)?;
    let door = match options.wires {
        Wires::SharedMemory => None,
        Wires::Auto | Wires::Tcp => {
            let at = SocketAddr::new(options.bind, 0);
            Some(Door::open(at, options.secret.clone(), options.world)?)
        }
    };
    let host = options.host.clone().unwrap_or_else(host_name);
    let member = Member {
        rank: options.rank,
        neighbourhood: neighbourhood(&host),
        host,
        listens: door.as_ref().map(Door::address).transpose()?,
        segment: address,
        mark,
    };
    let (mut line, members, hub_rank) = join(options, member, deadline)?;
    let links = match links(options, layout, door, &members, deadline) {
        Ok(links) => links,
        Err(cause) => {
            // The others learn of it from the hub, instead of waiting.
            let _ = line.say(&Control::Abort { reason: cause.to_string() });
            return Err(cause);
        }
    };
    get_ready(&mut line, deadline)?;
    // All neighbours have mapped the segment by now: nothing needs to find it any more.
    drop(segment);
    let event = || {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| problem(format!("cannot make an event descriptor: {error}")))
    };
    let arrivals = links.iter().map(Arrivals::new).collect();
    let common = Arc::new(Common {
        rank: options.rank,
        links,
        bell: inbox.bell(),
        failure: OnceLock::new(),
        abort: OnceLock::new(),
        leaving: AtomicBool::new(false),
        wake: event()?,
        alarm: event()?,
        nudge: event()?,
        polling: AtomicBool::new(false),
        listening: AtomicBool::new(false),
        behind: AtomicUsize::new(0),
        recorder: Mutex::new(FlightRecorder::new()),
    });
    let own = &members[options.rank.index()].neighbourhood;
    let here = members.iter().filter(|member| member.neighbourhood == *own).count();
    let attendant = attend(options, &common, line, members, hub_rank)?;
    // A rank that is bound to its share of the cores has at least one of its own.
    let bound = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let cores = online_cores().max(bound);
    Ok(ProcessTransport {
        seen: common.bell.count(),
        aside: false,
        common,
        inbox,
        arrivals,
        interest: Interest::default(),
        manners: Manners::among(here.saturating_mul(options.threads.max(1)), cores),
        sites: Vec::new(),
        windows: Default::default(),
        stages: Vec::new(),
        attendant: Some(attendant),
        hub,
        detection: options.detection,
    })
}

fn check(options: &ProcessOptions) -> Result<(), CommError> {
    let ProcessOptions { rank, world, connections, ring, .. } = *options;
    let wrong = if rank.0 >= world {
        format!("rank {rank} is not one of {world} ranks")
    } else if !(1..=64).contains(&connections) {
        format!("{connections} connections between two ranks; from 1 to 64 are possible")
    } else if !(4096..=1 << 30).contains(&ring) || !ring.is_multiple_of(4096) {
        format!("a ring of {ring} bytes; multiples of 4096 up to {} are possible", 1 << 30)
    } else if options.detection < Duration::from_millis(50) {
        format!("a detection bound of {:?}; at least 50 ms are needed", options.detection)
    } else {
        return Ok(());
    };
    Err(problem(wrong))
}

fn start_hub(options: &ProcessOptions) -> Result<Option<Hub>, CommError> {
    if !options.hub_in_rank_0 || options.rank != Rank(0) {
        return Ok(None);
    }
    let hub = HubOptions {
        listen: options.hub,
        secret: options.secret.clone(),
        world: options.world,
        in_rank: Some(Rank(0)),
        join: options.join,
        detection: options.detection,
    };
    Hub::start(hub).map(Some)
}

/// Comes in through the hub's door and waits until everyone has.
fn join(
    options: &ProcessOptions,
    mut member: Member,
    deadline: Instant,
) -> Result<(Line, Vec<Member>, Option<Rank>), CommError> {
    // A listener on all addresses is reached at the one from which this rank reaches the hub.
    if let Some(address) = member.listens.as_mut().filter(|address| address.ip().is_unspecified()) {
        let probe = std::net::UdpSocket::bind(SocketAddr::new(options.bind, 0))
            .and_then(|probe| probe.connect(options.hub).and_then(|()| probe.local_addr()))
            .map_err(|error| problem(format!("no way to the hub at {}: {error}", options.hub)))?;
        address.set_ip(probe.ip());
    }
    let facts = options.facts.clone();
    let body = Control::Join { member, world: options.world, facts }.encode();
    if body.len() > LONGEST_BODY {
        let bytes = body.len();
        return Err(problem(format!(
            "{bytes} bytes of facts; at most {LONGEST_BODY} are possible"
        )));
    }
    let stream = enter(options.hub, &options.secret, &body, deadline)?;
    let mut line = Line::new(stream).map_err(hung_up)?;
    // The hub has the same deadline, and says which ranks are missing.
    match line.hear_until(deadline + Duration::from_secs(1)).map_err(hung_up)? {
        Some(Control::World { members, hub }) if members.len() == options.world as usize => {
            Ok((line, members, hub))
        }
        Some(Control::Over { cause }) => Err(cause),
        _ => Err(problem(format!("the hub at {} does not answer", options.hub))),
    }
}

/// Tells the hub that all links are there and waits until that is so for every rank.
fn get_ready(line: &mut Line, deadline: Instant) -> Result<(), CommError> {
    line.say(&Control::Ready).map_err(hung_up)?;
    loop {
        match line.hear_until(deadline + Duration::from_secs(1)).map_err(hung_up)? {
            Some(Control::Go) => return Ok(()),
            Some(Control::Heartbeat { .. }) => {}
            Some(Control::Over { cause }) => return Err(cause),
            _ => return Err(problem("the hub does not let the ranks begin".to_owned())),
        }
    }
}

fn links(
    options: &ProcessOptions,
    layout: Layout,
    door: Option<Door>,
    members: &[Member],
    deadline: Instant,
) -> Result<Vec<Link>, CommError> {
    let own = &members[options.rank.index()];
    let shares = |member: &Member| member.neighbourhood == own.neighbourhood;
    let by_socket = |member: &&Member| {
        member.rank != options.rank && (options.wires == Wires::Tcp || !shares(member))
    };
    if let (Wires::SharedMemory, Some(far)) = (options.wires, members.iter().find(by_socket)) {
        return Err(problem(format!(
            "rank {} on {} cannot share memory with rank {} on {}: use TCP between them",
            own.rank, own.host, far.rank, far.host
        )));
    }
    let far: Vec<&Member> = members.iter().filter(by_socket).collect();
    let mut streams = call(options, &far, deadline)?;
    if let Some(door) = door {
        answer(options, door, &far, &mut streams, deadline)?;
    }
    let link = |member: &Member| {
        if member.rank == options.rank {
            return Ok(Link::Own);
        }
        if let Some(streams) = streams.remove(&member.rank) {
            return Ok(Link::Sockets(streams.into_values().map(Connection::new).collect()));
        }
        let outbox = Outbox::open(&member.segment, &member.mark, layout, options.rank.0)?;
        Ok(Link::Shared(SharedMemory::new(outbox)))
    };
    members.iter().map(link).collect()
}

/// The streams to each rank, by the number of the connection.
type Streams = BTreeMap<Rank, BTreeMap<u32, TcpStream>>;

/// Connects to all lower ranks. No circle of waiting can come from that.
fn call(
    options: &ProcessOptions,
    far: &[&Member],
    deadline: Instant,
) -> Result<Streams, CommError> {
    let mut streams = Streams::new();
    for member in far.iter().filter(|member| member.rank < options.rank) {
        let Member { rank, host, listens, .. } = member;
        let at = listens.ok_or_else(|| {
            problem(format!("rank {rank} on {host} uses shared memory only; others need TCP"))
        })?;
        for index in 0..options.connections {
            let body = Control::Data { from: options.rank, index }.encode();
            let stream = enter(at, &options.secret, &body, deadline)
                .and_then(|stream| prepare(stream).map_err(|e| problem(e.to_string())))
                .map_err(|error| problem(format!("rank {rank} on {host}: {error}")))?;
            streams.entry(*rank).or_default().insert(index, stream);
        }
    }
    Ok(streams)
}

/// Lets all higher ranks connect.
fn answer(
    options: &ProcessOptions,
    mut door: Door,
    far: &[&Member],
    streams: &mut Streams,
    deadline: Instant,
) -> Result<(), CommError> {
    let higher: Vec<_> = far.iter().filter(|member| member.rank > options.rank).collect();
    let missing = |streams: &Streams| {
        let complete = |rank: &Rank| {
            streams.get(rank).is_some_and(|found| found.len() == options.connections as usize)
        };
        higher.iter().find(|member| !complete(&member.rank)).copied()
    };
    while let Some(member) = missing(streams) {
        if Instant::now() >= deadline {
            let (rank, host) = (member.rank, &member.host);
            return Err(problem(format!("rank {rank} on {host} did not connect in time")));
        }
        for (stream, body) in door.attend(Duration::from_millis(20)) {
            let Some(Control::Data { from, index }) = Control::decode(&body) else { continue };
            let expected = higher.iter().any(|member| member.rank == from);
            if expected && index < options.connections && prepare_ref(&stream).is_ok() {
                streams.entry(from).or_default().insert(index, stream);
            }
        }
    }
    Ok(())
}

fn prepare(stream: TcpStream) -> std::io::Result<TcpStream> {
    prepare_ref(&stream).map(|()| stream)
}

fn prepare_ref(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nodelay(true)?;
    // What a rank hands over at once, so that ranks which share a core take long turns; and enough for the
    // longest cables of a cluster: 4 MiB are 320 µs of 100 Gbit/s. A system that allows less gives less.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    stream.set_nonblocking(true)
}

/// What a system keeps for one direction of a connection; it takes twice as much, half of it for
/// itself.
const SOCKET_BUFFER: usize = 2 << 20;

fn attend(
    options: &ProcessOptions,
    common: &Arc<Common>,
    line: Line,
    members: Vec<Member>,
    hub: Option<Rank>,
) -> Result<std::thread::JoinHandle<()>, CommError> {
    let attendant = Attendant {
        common: Arc::clone(common),
        line,
        members,
        hub,
        detection: options.detection,
        told: false,
    };
    std::thread::Builder::new()
        .name(format!("rank {}'s attendant", options.rank))
        .spawn(move || attendant.run())
        .map_err(|error| problem(format!("cannot start a thread: {error}")))
}

/// How many cores the host has, whichever of them this process may use.
fn online_cores() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let count = |range: &str| -> Option<usize> {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        Some(last.saturating_sub(first) + 1)
    };
    list.trim().split(',').filter_map(count).sum()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// What ranks that can share memory have in common: the running system, the process numbers, the
/// user, and the host's name.
fn neighbourhood(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let user = rustix::process::getuid().as_raw();
    format!("{}/{}/{user}/{host}", boot.trim(), processes.display())
}

fn hung_up(Hangup(how): Hangup) -> CommError {
    problem(format!("the hub is gone: {how}"))
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}
