//! Timing and verification of collectives.
//!
//! The method is that of `nccl-tests`: all ranks start together, each rank times each lap, and a
//! lap's time is that of its slowest rank. *Algorithm bandwidth* is the vector's size over that
//! time. *Bus bandwidth* scales it by the traffic the operation needs through the busiest link. It
//! compares with link bandwidth for any number of ranks (NVIDIA/nccl-tests, doc/PERFORMANCE.md).

use crate::error::CommError;
use crate::native::{Communicator, NativeOp};
use crate::steps::{ActiveCollective, CollectiveSpec};
use crate::transport::{Tag, Transport, finish};
use crate::{barrier, steps};
use paceline_kernels::arena::HostBytes;
use paceline_plan::collective::{
    Algorithm, CollectiveKind, Reduction, SummationOrder, chunk_range,
};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Timing result of one collective of one size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveTiming {
    /// Median lap time.
    pub median: Duration,
    /// Number of wrong elements on this rank.
    pub wrong: u64,
}

/// Factor from algorithm to bus bandwidth for `ranks` ranks.
pub fn bus_factor(kind: CollectiveKind, ranks: u32) -> f64 {
    let n = f64::from(ranks.max(1));
    match kind {
        CollectiveKind::AllReduce => 2.0 * (n - 1.0) / n,
        CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Gather
        | CollectiveKind::Scatter
        | CollectiveKind::AllToAll => (n - 1.0) / n,
        CollectiveKind::Broadcast
        | CollectiveKind::Reduce
        | CollectiveKind::SendRecv
        | CollectiveKind::Barrier => 1.0,
    }
}

/// Minimum bytes that all ranks together read from and write to shared memory: every vector read
/// once plus every vector written once.
pub fn least_traffic(kind: CollectiveKind, ranks: u32, bytes: u64) -> u64 {
    let n = u64::from(ranks);
    match kind {
        CollectiveKind::AllReduce => 2 * n * bytes,
        CollectiveKind::ReduceScatter | CollectiveKind::Reduce => (n + 1) * bytes,
        CollectiveKind::AllGather | CollectiveKind::Broadcast => (n + 1) * bytes,
        CollectiveKind::Gather | CollectiveKind::Scatter => 2 * bytes,
        CollectiveKind::AllToAll | CollectiveKind::SendRecv => 2 * n * bytes,
        CollectiveKind::Barrier => 0,
    }
}

/// Runs a collective of f32 elements repeatedly on all ranks of a world.
///
/// `data` is the vector; `output` has the same size and is needed for the kinds that have one. Times
/// about as many laps as fit into `budget`, at least three, after untimed warm-up laps; the number
/// is the same on all ranks.
pub fn measure(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    data: &mut [u8],
    output: Option<&mut [u8]>,
    limits: (u32, Duration, Duration),
) -> Result<CollectiveTiming, CommError> {
    let members: Vec<Rank> = (0..transport.world()).map(Rank).collect();
    let first = Tag::new(limits.0, 0);
    let mut running = ActiveCollective::start(spec, &members, transport.rank(), first)?;
    measure_laps(transport, spec, data, output, limits, &mut |transport, tag, data, mut output| {
        running.restart(tag);
        finish(transport, limits.2, |transport| {
            running.progress_bytes(transport, DType::F32, data, output.as_deref_mut())
        })
    })
}

/// Like [`measure`], by a library's group of all ranks; MPI's, for one.
pub fn measure_native<C: Communicator<Buffer = HostBytes, Queue = ()>>(
    transport: &mut dyn Transport,
    group: &mut C,
    spec: &CollectiveSpec,
    data: &mut [u8],
    output: Option<&mut [u8]>,
    limits: (u32, Duration, Duration),
) -> Result<CollectiveTiming, CommError> {
    let CollectiveSpec { kind, reduction, root, .. } = *spec;
    let op = NativeOp::Collective { kind, reduction, root, forced: None };
    measure_laps(transport, spec, data, output, limits, &mut |_, _, data, output| {
        let output = output.map(HostBytes::of);
        let mut request = group.start(&op, DType::F32, HostBytes::of(data), output, &())?;
        while !group.test(&mut request)? {
            std::hint::spin_loop();
        }
        Ok(())
    })
}

/// One lap of a collective: its tag, its vector and its output.
type Lap<'l> =
    dyn FnMut(&mut dyn Transport, Tag, &mut [u8], Option<&mut [u8]>) -> Result<(), CommError> + 'l;

fn measure_laps(
    transport: &mut dyn Transport,
    spec: &CollectiveSpec,
    data: &mut [u8],
    mut output: Option<&mut [u8]>,
    (sequence, budget, timeout): (u32, Duration, Duration),
    run: &mut Lap<'_>,
) -> Result<CollectiveTiming, CommError> {
    let (me, world) = (transport.rank(), transport.world());
    let members: Vec<Rank> = (0..world).map(Rank).collect();
    let mut tag = Tag::new(sequence, 0);
    let mut lap = |transport: &mut dyn Transport, data: &mut [u8]| {
        // Laps of small vectors follow each other without a barrier, as in a training loop.
        if data.len() > 1 << 20 {
            barrier::wait(transport, &members, Tag::new(sequence + 1, tag.sequence()), timeout)?;
        }
        tag = tag.next();
        let began = Instant::now();
        run(transport, tag, data, output.as_deref_mut())?;
        Ok::<_, CommError>(began.elapsed())
    };
    fill(spec, me, world, data);
    let first = lap(transport, data)?;
    let second = lap(transport, data)?;
    let laps = budget.as_secs_f64() / second.min(first).as_secs_f64().max(1e-7);
    let laps = agree(transport, sequence + 2, laps.clamp(3.0, 5000.0) as f32, timeout)? as usize;
    for _ in 0..laps / 8 {
        lap(transport, data)?;
    }
    let mut times = Vec::with_capacity(laps);
    for _ in 0..laps {
        times.push(lap(transport, data)?.as_secs_f32());
    }
    slowest(transport, sequence + 3, &mut times, timeout)?;
    times.sort_unstable_by(f32::total_cmp);
    let median = Duration::from_secs_f32(times[times.len() / 2]);
    fill(spec, me, world, data);
    lap(transport, data)?;
    let result = output.as_deref().unwrap_or(data);
    Ok(CollectiveTiming { median, wrong: count_wrong(spec, me, world, result) })
}

/// Minimum of the ranks' proposals.
fn agree(
    transport: &mut dyn Transport,
    channel: u32,
    proposal: f32,
    timeout: Duration,
) -> Result<f32, CommError> {
    let mut least = [-proposal];
    maximum(transport, channel, &mut least, timeout)?;
    Ok(-least[0])
}

/// Replaces each lap's time by that of the slowest rank.
fn slowest(
    transport: &mut dyn Transport,
    channel: u32,
    times: &mut [f32],
    timeout: Duration,
) -> Result<(), CommError> {
    maximum(transport, channel, times, timeout)
}

fn maximum(
    transport: &mut dyn Transport,
    channel: u32,
    values: &mut [f32],
    timeout: Duration,
) -> Result<(), CommError> {
    let spec = CollectiveSpec {
        kind: CollectiveKind::AllReduce,
        algorithm: Algorithm::Direct,
        order: SummationOrder::Canonical,
        reduction: Reduction::Max,
        root: 0,
        block: 1,
    };
    let members: Vec<Rank> = (0..transport.world()).map(Rank).collect();
    steps::run(transport, &spec, &members, Tag::new(channel, 0), values, None, timeout)
}

/// Small integers, whose sums are exact in any order.
fn value(rank: u32, index: usize) -> f32 {
    ((rank as usize * 31 + index * 17) % 25) as f32 - 12.0
}

fn fill(spec: &CollectiveSpec, me: Rank, world: u32, data: &mut [u8]) {
    let elements = data.len() / 4;
    let own = part(spec, me.0, world, elements);
    for (i, element) in data.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let given = match spec.kind {
            CollectiveKind::AllGather | CollectiveKind::Gather => own.contains(&i),
            CollectiveKind::Broadcast | CollectiveKind::Scatter => me.0 == spec.root,
            CollectiveKind::AllReduce
            | CollectiveKind::ReduceScatter
            | CollectiveKind::Reduce
            | CollectiveKind::AllToAll
            | CollectiveKind::SendRecv
            | CollectiveKind::Barrier => true,
        };
        *element = if given { value(me.0, i) } else { f32::NAN }.to_ne_bytes();
    }
}

fn part(spec: &CollectiveSpec, rank: u32, world: u32, elements: usize) -> Range<usize> {
    let Range { start, end } = chunk_range(elements as u64, world, rank, spec.block);
    start as usize..end as usize
}

fn count_wrong(spec: &CollectiveSpec, me: Rank, world: u32, result: &[u8]) -> u64 {
    let elements = result.len() / 4;
    let own = part(spec, me.0, world, elements);
    let owner = |i: usize| (0..world).find(|rank| part(spec, *rank, world, elements).contains(&i));
    let reduced = |i: usize| {
        let values = (0..world).map(|rank| value(rank, i));
        match spec.reduction {
            Reduction::Sum => values.sum(),
            Reduction::Max => values.fold(f32::NEG_INFINITY, f32::max),
        }
    };
    let length = own.len().max(1);
    let wanted = |i: usize| -> Option<f32> {
        match spec.kind {
            CollectiveKind::AllReduce => Some(reduced(i)),
            CollectiveKind::ReduceScatter => own.contains(&i).then(|| reduced(i)),
            CollectiveKind::Reduce => (me.0 == spec.root).then(|| reduced(i)),
            CollectiveKind::AllGather => owner(i).map(|rank| value(rank, i)),
            CollectiveKind::Gather if me.0 == spec.root => owner(i).map(|rank| value(rank, i)),
            CollectiveKind::Gather => None,
            CollectiveKind::Broadcast => Some(value(spec.root, i)),
            CollectiveKind::Scatter => own.contains(&i).then(|| value(spec.root, i)),
            CollectiveKind::SendRecv => Some(value((me.0 + world - 1) % world, i)),
            CollectiveKind::Barrier => Some(value(me.0, i)),
            CollectiveKind::AllToAll => Some(value((i / length) as u32, own.start + i % length)),
        }
    };
    let found = result.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
    let wrong = |(i, found): (usize, f32)| wanted(i).is_some_and(|wanted| wanted != found);
    found.enumerate().filter(|element| wrong(*element)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::thread;

    #[test]
    fn every_collective_is_right_and_damage_is_seen() {
        for kind in CollectiveKind::ALL {
            let spec = CollectiveSpec {
                kind,
                algorithm: Algorithm::Auto,
                order: SummationOrder::Free,
                reduction: Reduction::Sum,
                root: 1,
                block: 1,
            };
            std::thread::scope(|scope| {
                for mut transport in thread::world(3) {
                    scope.spawn(move || {
                        let mut data = vec![0; 4 * 999];
                        let mut output = vec![0; 4 * 999];
                        let output = kind.has_output().then_some(&mut output[..]);
                        let settings = (10, Duration::from_millis(1), Duration::from_secs(10));
                        let measured =
                            measure(&mut transport, &spec, &mut data, output, settings).unwrap();
                        assert_eq!(measured.wrong, 0, "{kind}");
                        assert!(measured.median > Duration::ZERO);
                    });
                }
            });
        }
        let spec = CollectiveSpec {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::Auto,
            order: SummationOrder::Free,
            reduction: Reduction::Sum,
            root: 0,
            block: 1,
        };
        assert_eq!(count_wrong(&spec, Rank(0), 2, &[0xff; 40]), 10);
    }

    #[test]
    fn factors_are_those_of_nccl_tests() {
        assert_eq!(bus_factor(CollectiveKind::AllReduce, 8), 1.75);
        assert_eq!(bus_factor(CollectiveKind::AllGather, 4), 0.75);
        assert_eq!(bus_factor(CollectiveKind::Broadcast, 4), 1.0);
        assert_eq!(least_traffic(CollectiveKind::AllReduce, 2, 100), 400);
    }
}
