//! The shape of native communicators, proved with doubles of MPI and NCCL on threads.

mod doubles;

use doubles::{Device, Host, Memory, Span, Stream, naive, world};
use paceline_comm::CommError;
use paceline_comm::native::{Communicator, NativeOp, NativeWorld, groups, join_groups};
use paceline_plan::collective::{CollectiveKind, Fabric, Library, Reduction, SummationOrder};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use paceline_plan::lower::lower_on;
use paceline_plan::model::built_in;
use paceline_plan::program::Plan;
use paceline_plan::strategy::Strategy;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

/// A queue of either double.
trait Queue {
    fn new() -> Self;
    /// Waits until the results of operations that tested true can be read.
    fn synchronize(&self);
}

impl Queue for () {
    fn new() -> Self {}

    fn synchronize(&self) {}
}

impl Queue for Stream {
    fn new() -> Self {
        Self::new()
    }

    fn synchronize(&self) {
        self.synchronize();
    }
}

/// Runs an operation to its end, as an executor does that knows the trait alone.
fn run<C: Communicator<Buffer = Span>>(
    group: &mut C,
    op: NativeOp,
    data: Span,
    output: Option<Span>,
    queue: &C::Queue,
) -> Result<(), CommError> {
    let mut request = group.start(&op, DType::F32, data, output, queue)?;
    while !group.test(&mut request)? {
        thread::yield_now();
    }
    Ok(())
}

fn memory(values: &[f32]) -> Memory {
    Arc::new(Mutex::new(values.to_vec()))
}

fn span(memory: &Memory) -> Span {
    let len = memory.lock().unwrap().len();
    Span { memory: Arc::clone(memory), at: 0..len }
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 31 + i * 17) % 25) as f32 - 12.0
}

/// Runs `body` on every rank of a world, each a thread.
fn on_all<D>(ranks: u32, body: impl Fn(Rank, doubles::Threads<D>) + Sync)
where
    doubles::Threads<D>: Send,
{
    thread::scope(|scope| {
        let body = &body;
        for (rank, library) in (0..ranks).map(Rank).zip(world::<D>(ranks)) {
            scope.spawn(move || body(rank, library));
        }
    });
}

/// All collectives of a group of some ranks of a world, and the messages of a ring.
fn everything<C>(rank: Rank, mut library: impl NativeWorld<Communicator = C>, ranks: u32)
where
    C: Communicator<Buffer = Span>,
    C::Queue: Queue,
{
    // In another order than that of the world, and without its last rank.
    let mut members: Vec<Rank> = (0..ranks - 1).map(Rank).rev().collect();
    if !members.contains(&rank) {
        members.clear();
    }
    let Some(mut group) = library.group(&members).unwrap() else {
        assert_eq!(rank, Rank(ranks - 1));
        return;
    };
    let me = members.iter().position(|&member| member == rank).unwrap();
    let (count, n, queue) = (members.len(), 6 * members.len(), C::Queue::new());
    let inputs: Vec<Vec<f32>> =
        (0..count).map(|member| (0..n).map(|i| value(member, i)).collect()).collect();
    let all: Vec<&[f32]> = inputs.iter().map(Vec::as_slice).collect();
    for kind in CollectiveKind::ALL {
        for (reduction, root) in [(Reduction::Sum, 0), (Reduction::Max, count as u32 - 1)] {
            let has_output = kind.has_output();
            if has_output && reduction == Reduction::Max {
                continue;
            }
            let (data, output) = (memory(&inputs[me]), memory(&vec![f32::NAN; n]));
            let op = NativeOp::Collective { kind, reduction, root, forced: None };
            let result = has_output.then(|| span(&output));
            run(&mut group, op, span(&data), result, &queue).unwrap();
            queue.synchronize();
            let (at, wanted) = naive(kind, reduction, root, me as u32, &all);
            let found = if has_output { output } else { data };
            assert_eq!(found.lock().unwrap()[at], wanted, "{kind} at {me}");
        }
    }
    let (next, previous) = ((me + 1) % count, (me + count - 1) % count);
    for lap in 0..3 {
        let (mine, theirs) = (memory(&[value(me, lap)]), memory(&[f32::NAN]));
        run(&mut group, NativeOp::Send { to: next as u32 }, span(&mine), None, &queue).unwrap();
        let op = NativeOp::Recv { from: previous as u32 };
        run(&mut group, op, span(&theirs), None, &queue).unwrap();
        queue.synchronize();
        assert_eq!(*theirs.lock().unwrap(), [value(previous, lap)]);
    }
}

#[test]
fn every_operation_gives_the_naive_result() {
    for ranks in 2..=6 {
        on_all::<Host>(ranks, |rank, library| everything(rank, library, ranks));
        on_all::<Device>(ranks, |rank, library| everything(rank, library, ranks));
    }
}

/// An operation runs after the kernels before it on its stream, and before those after it.
#[test]
fn operations_keep_their_place_on_a_stream() {
    on_all::<Device>(3, |rank, mut library| {
        let mut group = library.group(&[Rank(0), Rank(1), Rank(2)]).unwrap().unwrap();
        let (data, stream) = (memory(&[0.0; 4]), Stream::new());
        let kernel = |change: fn(f32, f32) -> f32| {
            let (data, by) = (Arc::clone(&data), rank.0 as f32 + 1.0);
            stream.push(move || data.lock().unwrap().iter_mut().for_each(|x| *x = change(*x, by)));
        };
        kernel(|x, by| x + by);
        let (kind, reduction) = (CollectiveKind::AllReduce, Reduction::Sum);
        let op = NativeOp::Collective { kind, reduction, root: 0, forced: None };
        run(&mut group, op, span(&data), None, &stream).unwrap();
        kernel(|x, by| x * by);
        stream.synchronize();
        assert_eq!(*data.lock().unwrap(), [6.0 * (rank.0 as f32 + 1.0); 4]);
    });
}

/// A rank that aborts ends all others, in the middle of a collective and in later calls.
fn abort<C>(rank: Rank, mut library: impl NativeWorld<Communicator = C>, joined: &Barrier)
where
    C: Communicator<Buffer = Span>,
    C::Queue: Queue,
{
    let failed = CommError::Failed { rank: Rank(2), reason: "out of memory".into() };
    let members: Vec<Rank> = (0..4).map(Rank).collect();
    let (mut group, queue) = (library.group(&members).unwrap().unwrap(), C::Queue::new());
    joined.wait();
    let (kind, reduction) = (CollectiveKind::AllReduce, Reduction::Sum);
    let op = NativeOp::Collective { kind, reduction, root: 0, forced: None };
    let data = memory(&[1.0; 8]);
    if rank == Rank(2) {
        group.abort("out of memory");
        group.abort("a later excuse");
    } else {
        // On a stream, the operation is under way when the host goes on.
        let mut first = run(&mut group, op, span(&data), None, &queue);
        while first.is_ok() {
            first = group.start(&op, DType::F32, span(&data), None, &queue).map(drop);
            thread::yield_now();
        }
        assert_eq!(first, Err(failed.clone()));
        queue.synchronize();
        assert_eq!(*data.lock().unwrap(), [1.0; 8], "nothing was summed without rank 2");
    }
    let later = group.start(&op, DType::F32, span(&data), None, &queue).map(drop);
    assert_eq!(later, Err(failed.clone()));
    assert_eq!(library.group(&members).map(drop), Err(failed));
}

#[test]
fn an_abort_ends_every_rank_with_its_name_and_reason() {
    let joined = &Barrier::new(4);
    on_all::<Host>(4, |rank, library| abort(rank, library, joined));
    on_all::<Device>(4, |rank, library| abort(rank, library, joined));
}

/// Plan with groups of several axes, and roles that use different ones.
fn plan(library: Option<Library>) -> Plan {
    let model = built_in::get("mini").unwrap().unwrap();
    let strategy = Strategy {
        dp: 2,
        tp: 2,
        pp: 2,
        leaves: 2,
        global_batch: 4,
        seq: model.seq,
        order: SummationOrder::Free,
        ..Strategy::default()
    };
    lower_on(&model, &strategy, &Fabric { library, ..Fabric::unknown() }).unwrap()
}

/// All ranks make the same groups in the same order, although their programs use different ones.
#[test]
fn groups_are_made_in_the_order_of_the_plan() {
    assert!(groups(&plan(None)).is_empty());
    let plan = plan(Some(Library::Mpi));
    let (world, plan) = (plan.mesh.world(), &plan);
    assert!(groups(plan).len() > 1, "groups of several axes");
    on_all::<Host>(world, |rank, mut library| {
        let mut joined = join_groups(&mut library, plan, rank).unwrap();
        for (&(group, lane), communicator) in &mut joined {
            let members = plan.mesh.members(plan.group(group), rank);
            let data = memory(&[rank.0 as f32]);
            let (kind, reduction) = (CollectiveKind::AllReduce, Reduction::Sum);
            let op = NativeOp::Collective { kind, reduction, root: 0, forced: None };
            run(communicator, op, span(&data), None, &()).unwrap();
            let sum: u32 = members.iter().map(|member| member.0).sum();
            assert_eq!(*data.lock().unwrap(), [sum as f32], "group {group} on {lane}");
        }
    });
}
