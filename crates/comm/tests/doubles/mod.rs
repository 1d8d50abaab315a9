//! Test doubles of native libraries, on threads: one like MPI, whose operations are host requests,
//! and one like NCCL, whose operations run on streams of a device.

use paceline_comm::CommError;
use paceline_comm::native::{Communicator, NativeOp, NativeWorld};
use paceline_plan::collective::{CollectiveKind, Reduction};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;

/// Memory of a rank.
pub(crate) type Memory = Arc<Mutex<Vec<f32>>>;

/// A span of a rank's memory: host memory for one double, device memory for the other.
#[derive(Clone)]
pub(crate) struct Span {
    pub(crate) memory: Memory,
    pub(crate) at: Range<usize>,
}

impl Span {
    fn read(&self) -> Vec<f32> {
        self.memory.lock().unwrap()[self.at.clone()].to_vec()
    }

    fn write(&self, at: Range<usize>, values: &[f32]) {
        self.memory.lock().unwrap()[self.at.clone()][at].copy_from_slice(values);
    }
}

/// State shared by the ranks of a world.
#[derive(Default)]
struct World {
    failure: OnceLock<CommError>,
    /// Operations in flight: the group, by number and first member, the number of the operation,
    /// and its peers if it is a message.
    board: Mutex<HashMap<Slot, Posted>>,
}

type Slot = (u32, Rank, u32, Option<(u32, u32)>);

/// Contributions to an operation, by member.
struct Posted {
    op: NativeOp,
    of: Vec<Option<Vec<f32>>>,
    /// Number of members that have not taken the result.
    left: usize,
}

impl World {
    fn check(&self) -> Result<(), CommError> {
        self.failure.get().map_or(Ok(()), |failure| Err(failure.clone()))
    }

    fn fail(&self, rank: Rank, reason: &str) {
        let _ = self.failure.set(CommError::Failed { rank, reason: reason.to_owned() });
    }
}

/// One member's side of a group.
struct Member {
    world: Arc<World>,
    rank: Rank,
    /// Number of the group.
    group: u32,
    members: Vec<Rank>,
    /// Operations started: collectives, and messages by peer, sent and received.
    collectives: u32,
    sent: HashMap<u32, u32>,
    received: HashMap<u32, u32>,
}

/// An operation under way, at one member.
pub(crate) struct Job {
    world: Arc<World>,
    slot: Slot,
    op: NativeOp,
    me: u32,
    data: Span,
    output: Option<Span>,
    is_done: bool,
}

impl Member {
    fn prepare(&mut self, op: &NativeOp, data: Span, output: Option<Span>) -> Job {
        let me = self.members.iter().position(|&member| member == self.rank).unwrap() as u32;
        let peers = match *op {
            NativeOp::Collective { .. } => None,
            NativeOp::Send { to } => Some((me, to)),
            NativeOp::Recv { from } => Some((from, me)),
        };
        let begun = match *op {
            NativeOp::Collective { .. } => &mut self.collectives,
            NativeOp::Send { to } => self.sent.entry(to).or_default(),
            NativeOp::Recv { from } => self.received.entry(from).or_default(),
        };
        let slot = (self.group, self.members[0], *begun, peers);
        *begun += 1;
        Job { world: Arc::clone(&self.world), slot, op: *op, me, data, output, is_done: false }
    }

    fn check(&self, dtype: DType, op: &NativeOp, output: bool) -> Result<(), CommError> {
        self.world.check()?;
        assert_eq!(dtype, DType::F32, "the doubles know one dtype");
        let has_output = matches!(op, NativeOp::Collective { kind, .. } if kind.has_output());
        assert_eq!(output, has_output);
        Ok(())
    }
}

impl Job {
    /// Hands in this member's contribution to a group of `members`.
    fn post(&self, members: usize) {
        let (of, place, left) = match self.op {
            NativeOp::Collective { .. } => (members, self.me as usize, members),
            NativeOp::Send { .. } => (1, 0, 1),
            NativeOp::Recv { .. } => return,
        };
        let mut board = self.world.board.lock().unwrap();
        let fresh = || Posted { op: self.op, of: vec![None; of], left };
        let posted = board.entry(self.slot).or_insert_with(fresh);
        assert_eq!(posted.op, self.op, "the members start different operations");
        posted.of[place] = Some(self.data.read());
    }

    /// Takes the result once all contributions are there.
    fn poll(&mut self) -> Result<bool, CommError> {
        self.world.check()?;
        if self.is_done || matches!(self.op, NativeOp::Send { .. }) {
            return Ok(true);
        }
        let mut board = self.world.board.lock().unwrap();
        let Some(posted) = board.get_mut(&self.slot) else { return Ok(false) };
        let Some(all) = posted.of.iter().map(Option::as_deref).collect::<Option<Vec<_>>>() else {
            return Ok(false);
        };
        match self.op {
            NativeOp::Collective { kind, reduction, root, forced: _ } => {
                let (at, result) = naive(kind, reduction, root, self.me, &all);
                self.output.as_ref().unwrap_or(&self.data).write(at, &result);
            }
            NativeOp::Recv { .. } => self.data.write(0..all[0].len(), all[0]),
            NativeOp::Send { .. } => {}
        }
        posted.left -= 1;
        if posted.left == 0 {
            board.remove(&self.slot);
        }
        self.is_done = true;
        Ok(true)
    }
}

/// Result of a collective at member `me`, and its place, by its definition.
pub(crate) fn naive(
    kind: CollectiveKind,
    reduction: Reduction,
    root: u32,
    me: u32,
    all: &[&[f32]],
) -> (Range<usize>, Vec<f32>) {
    let n = all[0].len();
    let part = |i: usize| i * (n / all.len())..(i + 1) * (n / all.len());
    let reduced = |at: Range<usize>| -> Vec<f32> {
        let of = |i: usize| all.iter().map(move |vector| vector[i]);
        at.map(|i| match reduction {
            Reduction::Sum => of(i).sum(),
            Reduction::Max => of(i).fold(f32::NEG_INFINITY, f32::max),
        })
        .collect()
    };
    let gathered = || all.iter().enumerate().flat_map(|(i, v)| &v[part(i)]).copied().collect();
    match kind {
        CollectiveKind::AllReduce => (0..n, reduced(0..n)),
        CollectiveKind::ReduceScatter => (part(me as usize), reduced(part(me as usize))),
        CollectiveKind::AllGather => (0..n, gathered()),
        CollectiveKind::Broadcast => (0..n, all[root as usize].to_vec()),
        CollectiveKind::Reduce if me == root => (0..n, reduced(0..n)),
        CollectiveKind::Gather if me == root => (0..n, gathered()),
        CollectiveKind::Reduce | CollectiveKind::Gather => (0..0, Vec::new()),
        CollectiveKind::Scatter => {
            (part(me as usize), all[root as usize][part(me as usize)].to_vec())
        }
        CollectiveKind::SendRecv => (0..n, all[(me as usize + all.len() - 1) % all.len()].to_vec()),
        CollectiveKind::Barrier => (0..n, all[me as usize].to_vec()),
        CollectiveKind::AllToAll => {
            (0..n, all.iter().flat_map(|v| &v[part(me as usize)]).copied().collect())
        }
    }
}

/// A library's world on threads; `D` decides the way in which operations run.
pub(crate) struct Threads<D> {
    world: Arc<World>,
    rank: Rank,
    groups: u32,
    double: std::marker::PhantomData<D>,
}

/// Joins `ranks` ranks, each to be moved into its thread.
pub(crate) fn world<D>(ranks: u32) -> Vec<Threads<D>> {
    let world = Arc::new(World::default());
    let side = |rank| Threads {
        world: Arc::clone(&world),
        rank: Rank(rank),
        groups: 0,
        double: std::marker::PhantomData,
    };
    (0..ranks).map(side).collect()
}

/// Side of a group with requests of the host, as in MPI.
pub(crate) struct Host(Member);

/// Side of a group whose operations run on a stream of a device, as in NCCL.
pub(crate) struct Device(Member);

trait Double {
    fn of(member: Member) -> Self;
}

impl Double for Host {
    fn of(member: Member) -> Self {
        Self(member)
    }
}

impl Double for Device {
    fn of(member: Member) -> Self {
        Self(member)
    }
}

#[allow(private_bounds, reason = "the doubles are the two of this file")]
impl<D: Double + Communicator> NativeWorld for Threads<D> {
    type Communicator = D;

    fn group(&mut self, members: &[Rank]) -> Result<Option<D>, CommError> {
        self.world.check()?;
        let group = self.groups;
        self.groups += 1;
        let member = || Member {
            world: Arc::clone(&self.world),
            rank: self.rank,
            group,
            members: members.to_vec(),
            collectives: 0,
            sent: HashMap::new(),
            received: HashMap::new(),
        };
        Ok(members.contains(&self.rank).then(|| D::of(member())))
    }
}

impl Communicator for Host {
    type Buffer = Span;
    type Queue = ();
    type Request = Job;

    fn start(
        &mut self,
        op: &NativeOp,
        dtype: DType,
        data: Span,
        output: Option<Span>,
        (): &(),
    ) -> Result<Job, CommError> {
        self.0.check(dtype, op, output.is_some())?;
        let job = self.0.prepare(op, data, output);
        job.post(self.0.members.len());
        Ok(job)
    }

    fn test(&mut self, request: &mut Job) -> Result<bool, CommError> {
        request.poll()
    }

    fn abort(&mut self, reason: &str) {
        self.0.world.fail(self.0.rank, reason);
    }
}

/// Work of a stream.
type Work = Box<dyn FnOnce() + Send>;

/// Queue of a device: runs its work in order, on a thread of its own.
pub(crate) struct Stream {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    pub(crate) fn new() -> Self {
        let (work, queue) = channel::<Work>();
        let thread = std::thread::spawn(move || queue.into_iter().for_each(|work| work()));
        Self { work: Some(work), thread: Some(thread) }
    }

    /// Adds work, a kernel for example.
    pub(crate) fn push(&self, work: impl FnOnce() + Send + 'static) {
        self.work.as_ref().unwrap().send(Box::new(work)).unwrap();
    }

    /// Waits for the end of all work.
    pub(crate) fn synchronize(&self) {
        let (done, told) = channel();
        self.push(move || done.send(()).unwrap());
        told.recv().unwrap();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.work.take();
        let _ = self.thread.take().unwrap().join();
    }
}

impl Communicator for Device {
    type Buffer = Span;
    type Queue = Stream;
    type Request = ();

    fn start(
        &mut self,
        op: &NativeOp,
        dtype: DType,
        data: Span,
        output: Option<Span>,
        on: &Stream,
    ) -> Result<(), CommError> {
        self.0.check(dtype, op, output.is_some())?;
        let (mut job, members) = (self.0.prepare(op, data, output), self.0.members.len());
        on.push(move || {
            job.post(members);
            // A failure ends the operation; the host learns of it from the next call.
            while job.poll() == Ok(false) {
                std::thread::yield_now();
            }
        });
        Ok(())
    }

    fn test(&mut self, (): &mut ()) -> Result<bool, CommError> {
        self.0.world.check().map(|()| true)
    }

    fn abort(&mut self, reason: &str) {
        self.0.world.fail(self.0.rank, reason);
    }
}
