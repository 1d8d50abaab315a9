//! Random faults at random moments in worlds of random shapes: none hangs, every survivor names a
//! rank, and nothing is left behind.
//!
//! `PACELINE_FAULTS=300 cargo test -p paceline-comm --test campaign -- --nocapture` runs 300 cases
//! instead of the default 30; `PACELINE_FAULTS_SEED` repeats the cases of a seed.

use paceline_comm::rendezvous::RendezvousServer;
use ranks::{Processes, rendezvous, unused_address};
use rustix::net::{AddressFamily, Shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

mod ranks;

/// Not a test: entry point of the started processes.
#[test]
fn a_rank() {
    ranks::take_part();
}

/// SplitMix64 random numbers (Steele, Lea and Flood 2014).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    /// The process is killed.
    Kill,
    /// The process is stopped.
    Stop,
    /// One of its connections is shut down.
    Cut,
    /// Garbage is written into one of its connections.
    Garble,
    /// Unauthenticated peers send garbage to the server's port from the start; then a kill.
    Strangers,
}

const HARMS: [Harm; 5] = [Harm::Kill, Harm::Stop, Harm::Cut, Harm::Garble, Harm::Strangers];

/// One world and the fault injected into it.
#[derive(Clone, Copy, Debug)]
struct Case {
    wires: &'static str,
    world: u32,
    rendezvous_in_0: bool,
    victim: u32,
    harm: Harm,
    after: Duration,
    /// Seed for the choice of connection and garbage.
    luck: u64,
}

impl Case {
    fn random(chance: &mut Chance) -> Self {
        let world = 2 + chance.below(3) as u32;
        Self {
            wires: chance.pick(&["shm", "tcp", "auto"]),
            world,
            rendezvous_in_0: chance.below(3) == 0,
            victim: chance.below(world as usize) as u32,
            harm: chance.pick(&HARMS),
            after: Duration::from_micros(chance.below(60_000) as u64),
            luck: chance.next(),
        }
    }

    /// Runs the case; returns each rank's final message, `None` for one that could not send any.
    fn carry_out(self) -> Vec<Option<String>> {
        let rendezvous = (!self.rendezvous_in_0).then(|| rendezvous(self.world));
        let at = rendezvous.as_ref().map_or_else(unused_address, RendezvousServer::address);
        // With `direct` every connection carries data, so a fault in any is detected.
        let deed = if self.rendezvous_in_0 { "direct,rendezvous-in-0" } else { "direct" };
        let mut chance = Chance(self.luck);
        let strangers = (self.harm == Harm::Strangers).then(|| pester(at, chance.next()));
        let mut processes = Processes::start(self.wires, self.world, at, deed);
        if let Some(strangers) = strangers {
            strangers.join().unwrap();
        }
        std::thread::sleep(self.after);
        let silenced = match self.harm {
            Harm::Kill | Harm::Strangers => {
                processes.signal(self.victim, Signal::KILL);
                true
            }
            Harm::Stop => {
                processes.signal(self.victim, Signal::STOP);
                true
            }
            Harm::Cut => {
                let connection = self.connection(&processes, &mut chance);
                rustix::net::shutdown(&connection, Shutdown::Both).unwrap();
                false
            }
            Harm::Garble => {
                let connection = self.connection(&processes, &mut chance);
                let garbage: Vec<u8> = (0..200).map(|_| chance.next() as u8).collect();
                // A faster peer may have closed it.
                let _ = rustix::io::write(&connection, &garbage);
                false
            }
        };
        let end = |rank| {
            let ends = !(silenced && rank == self.victim);
            ends.then(|| processes.line(rank, "ended: "))
        };
        let said = (0..self.world).map(end).collect();
        drop(processes);
        if let Some(rendezvous) = rendezvous {
            assert!(rendezvous.join().is_err(), "{self:?}: the launcher takes it for a good end");
        }
        said
    }

    /// Returns one of the victim's connections; the victim continues to use it.
    fn connection(self, processes: &Processes, chance: &mut Chance) -> OwnedFd {
        let pid = Pid::from_child(processes.child(self.victim));
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
        let connected = |entry: fs::DirEntry| {
            let number = entry.file_name().to_string_lossy().parse().ok()?;
            let fd = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()?;
            let peer = rustix::net::getpeername(&fd).ok().flatten()?;
            (peer.address_family() == AddressFamily::INET).then_some(fd)
        };
        let all = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
        let mut connections: Vec<OwnedFd> = all.filter_map(connected).collect();
        connections.swap_remove(chance.below(connections.len()))
    }

    fn check(self, said: &[Option<String>]) {
        for (rank, said) in (0..).zip(said) {
            let victim = rank == self.victim;
            let right = match (self.harm, said) {
                (Harm::Kill | Harm::Stop | Harm::Strangers, None) => victim,
                (Harm::Kill | Harm::Stop | Harm::Strangers, Some(said)) => {
                    said.contains(&format!("rank {} on ", self.victim))
                }
                // The rank at the other end is equally at fault, as far as can be known.
                (Harm::Cut | Harm::Garble, Some(said)) => {
                    said.contains("rank ") || (victim && said.contains("the launcher"))
                }
                (Harm::Cut | Harm::Garble, None) => false,
            };
            assert!(right, "{self:?}, rank {rank}: {said:?}");
        }
    }
}

/// Connects repeatedly and sends anything but a valid handshake.
fn pester(at: SocketAddr, seed: u64) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut chance = Chance(seed);
        let mut open = Vec::new();
        for _ in 0..40 {
            // The rendezvous server may not be up yet, or not listen any more.
            let Ok(mut stream) = TcpStream::connect(at) else {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            };
            let length = chance.below(3000);
            let garbage: Vec<u8> = (0..length).map(|_| chance.next() as u8).collect();
            let _ = stream.write_all(chance.pick(&[&b""[..], b"PACELINE\x02\0\0\0", b"GET / "]));
            let _ = stream.write_all(&garbage);
            if chance.below(2) == 0 {
                open.push(stream);
            }
        }
    })
}

/// System resources of this process: descriptors, segments, children, names of shared memory.
fn holdings() -> (usize, usize, String, BTreeSet<String>) {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let segments = maps.lines().filter(|line| line.contains("memfd:paceline")).count();
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let children = threads.map(|thread| fs::read_to_string(thread.path().join("children")));
    let children: String = children.map(|children| children.unwrap_or_default()).collect();
    let named = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let named = named.map(|entry| entry.file_name().to_string_lossy().into_owned());
    (descriptors, segments, children, named.filter(|name| name.contains("paceline")).collect())
}

#[test]
fn no_harm_hangs_a_world_or_leaves_anything_behind() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let faults = number("PACELINE_FAULTS").unwrap_or(30) as usize;
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = number("PACELINE_FAULTS_SEED").unwrap_or_else(now);
    println!("PACELINE_FAULTS_SEED={seed} PACELINE_FAULTS={faults}");
    let mut chance = Chance(seed);
    // Warm-up case: creates everything that a process creates only once.
    Case { harm: Harm::Kill, ..Case::random(&mut Chance(0)) }.carry_out();
    // The threads that read a process's output end a moment after it.
    let mut before = holdings();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(10));
        before = before.min(holdings());
    }
    let cases: Vec<Case> = (0..faults).map(|_| Case::random(&mut chance)).collect();
    // Most of the time is spent waiting for the heartbeat timeout, so a few worlds run at once.
    for some in cases.chunks(3) {
        std::thread::scope(|scope| {
            for case in some {
                let name = format!("{case:?}");
                let run = move || case.check(&case.carry_out());
                std::thread::Builder::new().name(name).spawn_scoped(scope, run).unwrap();
            }
        });
        let end = Instant::now() + Duration::from_secs(20);
        while holdings() != before && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(holdings(), before, "left behind by one of {some:?}, seed {seed}");
    }
}
