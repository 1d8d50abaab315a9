//! Connection of a process to its job: creates the transport.

use super::connection::Connection;
use super::incoming::Arrivals;
use super::link::{Link, RingLink};
use super::service_thread::ServiceThread;
use super::wait_policy::{Interest, WaitPolicy};
use super::{Common, ProcessTransport};
use crate::error::CommError;
use crate::recorder::FlightRecorder;
use crate::rendezvous::control::{Control, ControlConnection, Disconnected, JobNonce, Member};
use crate::rendezvous::handshake::{
    AuthListener, Authenticated, LONGEST_BODY, connect_authenticated,
};
use crate::rendezvous::{RendezvousOptions, RendezvousServer};
use crate::secret::Secret;
use crate::shm::inbox::{Inbox, Layout, Outbox};
use crate::transport::TransportKind;
use paceline_plan::ids::Rank;
use rustix::event::EventfdFlags;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Rank of a process and its connection settings.
#[derive(Clone, Debug)]
pub struct ProcessOptions {
    /// This rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// Address of the rendezvous server.
    pub rendezvous: SocketAddr,
    /// True if the rendezvous server runs in rank 0; otherwise the launcher runs one.
    pub rendezvous_in_rank_0: bool,
    /// Secret shared by all ranks.
    pub secret: Secret,
    /// Facts, by name, that all ranks must agree on to start: the plan's hash, for example.
    pub facts: BTreeMap<String, String>,
    /// Transport for messages.
    pub transport: TransportKind,
    /// Address to listen on for ranks of other hosts.
    pub bind: IpAddr,
    /// Number of TCP connections between two ranks.
    pub connections: u32,
    /// Bytes of each shared-memory ring; one per ordered pair of ranks in an shm domain.
    pub ring: usize,
    /// True to encrypt and authenticate everything that is sent over TCP. Connection set-up and
    /// control messages always are.
    pub encrypt: bool,
    /// Time limit for all ranks to join and to connect to each other.
    pub join: Duration,
    /// Silence after which a rank is declared lost. Process death is detected at once.
    pub heartbeat_timeout: Duration,
    /// Threads of each rank that need a core while it waits: a spinning thread must not delay
    /// another rank's threads.
    pub threads: usize,
    /// Name of this host, if not the system's. Ranks with different host names never share memory.
    pub host: Option<String>,
}

impl ProcessOptions {
    /// Default settings: everything on loopback, the rendezvous server in rank 0.
    pub fn new(rank: Rank, world: u32, rendezvous: SocketAddr, secret: Secret) -> Self {
        Self {
            rank,
            world,
            rendezvous,
            rendezvous_in_rank_0: true,
            secret,
            facts: BTreeMap::new(),
            transport: TransportKind::Auto,
            bind: IpAddr::V4(Ipv4Addr::LOCALHOST),
            connections: 1,
            ring: 256 << 10,
            encrypt: false,
            join: Duration::from_secs(60),
            heartbeat_timeout: Duration::from_secs(10),
            threads: 1,
            host: None,
        }
    }
}

/// Joins the job: finds the other ranks and connects to all of them.
pub fn connect(options: &ProcessOptions) -> Result<ProcessTransport, CommError> {
    let deadline = Instant::now() + options.join;
    check(options)?;
    let rendezvous = start_rendezvous(options)?;
    let layout = Layout { senders: options.world, ring: options.ring };
    let (inbox, segment, address, mark) = Inbox::create(layout)?;
    let listener = match options.transport {
        TransportKind::Shm | TransportKind::Mpi => None,
        TransportKind::Thread => {
            return Err(problem("processes share no threads; use auto, shm or tcp".to_owned()));
        }
        TransportKind::Auto | TransportKind::Tcp => {
            let at = SocketAddr::new(options.bind, 0);
            Some(AuthListener::open(at, options.secret.clone(), options.world)?)
        }
    };
    let host = options.host.clone().unwrap_or_else(host_name);
    let member = Member {
        rank: options.rank,
        shm_domain: shm_domain(&host),
        host,
        listens: listener.as_ref().map(AuthListener::address).transpose()?,
        segment: address,
        mark,
    };
    let World { mut line, members, rendezvous: rendezvous_rank, job } =
        join(options, member, deadline)?;
    let connected = links(options, layout, listener, (&mut line, &members, &job), deadline)
        .map_err(|cause| (Control::Abort { reason: cause.to_string() }, cause))
        .and_then(|links| match get_ready(options, &mut line, deadline) {
            Ok(()) => Ok(links),
            Err(cause) => Err((Control::Over { cause: cause.clone() }, cause)),
        });
    let links = match connected {
        Ok(links) => links,
        Err((message, cause)) => {
            // The other ranks learn of it from the rendezvous server instead of waiting.
            line.close(&message, GRACE);
            return Err(cause);
        }
    };
    // All ranks of the shm domain have mapped the segment by now: its name is no longer needed.
    drop(segment);
    let event = || {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| problem(format!("cannot make an event descriptor: {error}")))
    };
    let arrivals = links.iter().map(Arrivals::new).collect();
    let shares_memory = links.iter().any(|link| matches!(link, Link::Shared(_)));
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
    let own = &members[options.rank.index()].shm_domain;
    let here = members.iter().filter(|member| member.shm_domain == *own).count();
    let service_thread = start_service_thread(options, &common, line, members, rendezvous_rank)?;
    // A rank pinned to its share of the cores has at least one dedicated core.
    let bound = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let cores = online_cores().max(bound);
    Ok(ProcessTransport {
        seen: common.bell.count(),
        aside: false,
        common,
        inbox,
        arrivals,
        interest: Interest::default(),
        policy: WaitPolicy::among(here.saturating_mul(options.threads.max(1)), cores),
        sharing: Default::default(),
        shares_memory,
        service_thread: Some(service_thread),
        rendezvous,
        heartbeat_timeout: options.heartbeat_timeout,
    })
}

/// Time for the rendezvous server to receive the reason why a rank does not begin.
const GRACE: Duration = Duration::from_secs(1);

fn check(options: &ProcessOptions) -> Result<(), CommError> {
    let ProcessOptions { rank, world, connections, ring, .. } = *options;
    let wrong = if rank.0 >= world {
        format!("rank {rank} is not one of {world} ranks")
    } else if !(1..=64).contains(&connections) {
        format!("{connections} connections between two ranks; from 1 to 64 are possible")
    } else if !(4096..=1 << 30).contains(&ring) || !ring.is_multiple_of(4096) {
        format!("a ring of {ring} bytes; multiples of 4096 up to {} are possible", 1 << 30)
    } else if options.heartbeat_timeout < Duration::from_millis(50) {
        format!("a heartbeat timeout of {:?}; at least 50 ms are needed", options.heartbeat_timeout)
    } else {
        return Ok(());
    };
    Err(problem(wrong))
}

fn start_rendezvous(options: &ProcessOptions) -> Result<Option<RendezvousServer>, CommError> {
    if !options.rendezvous_in_rank_0 || options.rank != Rank(0) {
        return Ok(None);
    }
    let rendezvous = RendezvousOptions {
        listen: options.rendezvous,
        secret: options.secret.clone(),
        world: options.world,
        in_rank: Some(Rank(0)),
        join: options.join,
        heartbeat_timeout: options.heartbeat_timeout,
    };
    RendezvousServer::start(rendezvous).map(Some)
}

/// All ranks of a job, and this rank's connection to their rendezvous server.
struct World {
    line: ControlConnection,
    members: Vec<Member>,
    rendezvous: Option<Rank>,
    job: JobNonce,
}

/// Joins through the rendezvous server's listener and waits until all ranks have joined.
fn join(
    options: &ProcessOptions,
    mut member: Member,
    deadline: Instant,
) -> Result<World, CommError> {
    // A listener on all addresses is reachable at this rank's address towards the server.
    if let Some(address) = member.listens.as_mut().filter(|address| address.ip().is_unspecified()) {
        let probe = std::net::UdpSocket::bind(SocketAddr::new(options.bind, 0))
            .and_then(|probe| probe.connect(options.rendezvous).and_then(|()| probe.local_addr()))
            .map_err(|error| {
                problem(format!(
                    "no way to the rendezvous server at {}: {error}",
                    options.rendezvous
                ))
            })?;
        address.set_ip(probe.ip());
    }
    let facts = facts(options);
    let body = Control::Join { member, world: options.world, facts }.encode();
    if body.len() > LONGEST_BODY {
        let bytes = body.len();
        return Err(problem(format!(
            "{bytes} bytes of facts; at most {LONGEST_BODY} are possible"
        )));
    }
    let authenticated = connect_authenticated(
        options.rendezvous,
        &options.secret,
        &body,
        deadline,
        &mut || Ok(()),
    )?;
    let hung_up = |how| hung_up(options, how);
    let mut line = ControlConnection::new(authenticated).map_err(hung_up)?;
    // The rendezvous server has the same deadline and reports the missing ranks.
    match line.recv_until(deadline + Duration::from_secs(1)).map_err(hung_up) {
        Ok(Some(Control::World { members, rendezvous, job }))
            if members.len() == options.world as usize =>
        {
            Ok(World { line, members, rendezvous, job })
        }
        Ok(Some(Control::Over { cause })) => Err(cause),
        Ok(_) => {
            Err(problem(format!("the rendezvous server at {} does not answer", options.rendezvous)))
        }
        Err(cause) => {
            line.close(&Control::Over { cause: cause.clone() }, GRACE);
            Err(cause)
        }
    }
}

/// Facts that all ranks must agree on: those of the job, and those of its connections.
fn facts(options: &ProcessOptions) -> BTreeMap<String, String> {
    let mut facts = options.facts.clone();
    for (name, value) in [
        ("transport", options.transport.name().to_owned()),
        ("encryption of messages", if options.encrypt { "on" } else { "off" }.to_owned()),
        ("number of connections between two ranks", options.connections.to_string()),
        ("bytes of a shared-memory ring", options.ring.to_string()),
    ] {
        facts.insert(name.to_owned(), value);
    }
    facts
}

/// Tells the rendezvous server that all links are up and waits until every rank has done so.
fn get_ready(
    options: &ProcessOptions,
    line: &mut ControlConnection,
    deadline: Instant,
) -> Result<(), CommError> {
    let hung_up = |how| hung_up(options, how);
    line.send(&Control::Ready).map_err(hung_up)?;
    loop {
        match line.recv_until(deadline + Duration::from_secs(1)).map_err(hung_up)? {
            Some(Control::Go) => return Ok(()),
            Some(Control::Heartbeat { .. }) => {}
            Some(Control::Over { cause }) => return Err(cause),
            _ => {
                return Err(problem(
                    "the rendezvous server does not let the ranks begin".to_owned(),
                ));
            }
        }
    }
}

fn links(
    options: &ProcessOptions,
    layout: Layout,
    listener: Option<AuthListener>,
    (line, members, job): (&mut ControlConnection, &[Member], &JobNonce),
    deadline: Instant,
) -> Result<Vec<Link>, CommError> {
    if options.transport == TransportKind::Mpi {
        let link = |member: &Member| match member.rank == options.rank {
            true => Link::Own,
            false => Link::Outside,
        };
        return Ok(members.iter().map(link).collect());
    }
    let own = &members[options.rank.index()];
    let shares = |member: &Member| member.shm_domain == own.shm_domain;
    let by_socket = |member: &&Member| {
        member.rank != options.rank && (options.transport == TransportKind::Tcp || !shares(member))
    };
    if let (TransportKind::Shm, Some(far)) = (options.transport, members.iter().find(by_socket)) {
        return Err(problem(format!(
            "rank {} on {} cannot share memory with rank {} on {}: use TCP between them",
            own.rank, own.host, far.rank, far.host
        )));
    }
    let far: Vec<&Member> = members.iter().filter(by_socket).collect();
    // A connection of another job with the same secret cannot take the place of one of this.
    let secret = options.secret.derive("paceline data connections", job);
    let mut go_on = || still_on(options, line);
    let mut streams = call(options, &secret, &far, deadline, &mut go_on)?;
    if let Some(mut listener) = listener {
        listener.set_secret(secret);
        answer(options, listener, &far, &mut streams, deadline, &mut go_on)?;
    }
    let link = |member: &Member| {
        if member.rank == options.rank {
            return Ok(Link::Own);
        }
        if let Some(streams) = streams.remove(&member.rank) {
            let connection = |stream| Connection::new(stream, options.encrypt);
            return Ok(Link::Sockets(streams.into_values().map(connection).collect()));
        }
        let outbox = Outbox::open(&member.segment, &member.mark, layout, options.rank.0)?;
        Ok(Link::Shared(RingLink::new(outbox)))
    };
    members.iter().map(link).collect()
}

/// Returns the reason why the job has ended while the ranks still connect to each other, if it has.
fn still_on(options: &ProcessOptions, line: &mut ControlConnection) -> Result<(), CommError> {
    loop {
        match line.try_recv().map_err(|how| hung_up(options, how))? {
            None => return Ok(()),
            Some(Control::Over { cause }) => return Err(cause),
            Some(_) => {}
        }
    }
}

/// TCP streams to each rank, by connection index.
type Streams = BTreeMap<Rank, BTreeMap<u32, Authenticated>>;

/// Connects to all lower ranks; this order cannot deadlock.
fn call(
    options: &ProcessOptions,
    secret: &Secret,
    far: &[&Member],
    deadline: Instant,
    go_on: &mut dyn FnMut() -> Result<(), CommError>,
) -> Result<Streams, CommError> {
    let mut streams = Streams::new();
    for member in far.iter().filter(|member| member.rank < options.rank) {
        let Member { rank, host, listens, .. } = member;
        let at = listens.ok_or_else(|| {
            problem(format!("rank {rank} on {host} uses shared memory only; others need TCP"))
        })?;
        for index in 0..options.connections {
            let body = Control::Data { from: options.rank, to: *rank, index }.encode();
            let stream = connect_authenticated(at, secret, &body, deadline, go_on)
                .and_then(|authenticated| match prepare(&authenticated.stream) {
                    Ok(()) => Ok(authenticated),
                    Err(error) => Err(problem(error.to_string())),
                })
                .map_err(|error| problem(format!("rank {rank} on {host}: {error}")))?;
            streams.entry(*rank).or_default().insert(index, stream);
        }
    }
    Ok(streams)
}

/// Accepts connections from all higher ranks.
fn answer(
    options: &ProcessOptions,
    mut listener: AuthListener,
    far: &[&Member],
    streams: &mut Streams,
    deadline: Instant,
    go_on: &mut dyn FnMut() -> Result<(), CommError>,
) -> Result<(), CommError> {
    let higher: Vec<_> = far.iter().filter(|member| member.rank > options.rank).collect();
    let missing = |streams: &Streams| {
        let complete = |rank: &Rank| {
            streams.get(rank).is_some_and(|found| found.len() == options.connections as usize)
        };
        higher.iter().find(|member| !complete(&member.rank)).copied()
    };
    while let Some(member) = missing(streams) {
        go_on()?;
        if Instant::now() >= deadline {
            let (rank, host) = (member.rank, &member.host);
            return Err(problem(format!("rank {rank} on {host} did not connect in time")));
        }
        for (authenticated, body) in listener.attend(Duration::from_millis(20)) {
            let Some(Control::Data { from, to, index }) = Control::decode(&body) else { continue };
            let expected = to == options.rank && higher.iter().any(|member| member.rank == from);
            if expected && index < options.connections && prepare(&authenticated.stream).is_ok() {
                streams.entry(from).or_default().insert(index, authenticated);
            }
        }
    }
    Ok(())
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    stream.set_nodelay(true)?;
    // Amount that a rank hands over at once, so that ranks sharing a core run for long time slices.
    // It is also enough for the longest cables of a cluster: 4 MiB are 320 µs at 100 Gbit/s. A
    // system with a lower limit grants less.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    stream.set_nonblocking(true)
}

/// Socket buffer size for one direction of a connection. The kernel reserves twice as much, half of
/// it for itself.
const SOCKET_BUFFER: usize = 2 << 20;

fn start_service_thread(
    options: &ProcessOptions,
    common: &Arc<Common>,
    line: ControlConnection,
    members: Vec<Member>,
    rendezvous: Option<Rank>,
) -> Result<std::thread::JoinHandle<()>, CommError> {
    let service_thread = ServiceThread {
        common: Arc::clone(common),
        control: line,
        members,
        rendezvous,
        heartbeat_timeout: options.heartbeat_timeout,
        server_knows: false,
    };
    std::thread::Builder::new()
        .name(format!("rank {}'s attendant", options.rank))
        .spawn(move || service_thread.run())
        .map_err(|error| problem(format!("cannot start a thread: {error}")))
}

/// Number of cores of the host, regardless of this process's affinity.
pub(crate) fn online_cores() -> usize {
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

/// Identifier common to ranks that can share memory: boot ID, PID namespace, user and host name.
fn shm_domain(host: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let processes = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let user = rustix::process::getuid().as_raw();
    format!("{}/{}/{user}/{host}", boot.trim(), processes.display())
}

fn hung_up(options: &ProcessOptions, how: Disconnected) -> CommError {
    match how {
        Disconnected::Peer(how) => problem(format!("the rendezvous server is gone: {how}")),
        Disconnected::Altered => {
            let rank = options.rank;
            let way = format!("control messages from the rendezvous server to rank {rank}");
            CommError::Altered { way }
        }
    }
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}
