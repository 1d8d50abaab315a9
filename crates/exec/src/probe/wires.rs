//! What exchanges take over a transport, seen from each of its ranks.

use crate::error::ExecError;
use paceline_comm::{
    CollectiveSpec, CommError, Receiving, Running, Sending, Tag, Transport, barrier, finish,
};
use paceline_kernels::prefer_large_pages;
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind, Order, Reduction};
use paceline_plan::ids::Rank;
use paceline_plan::units::Seconds;
use std::time::{Duration, Instant};

/// How an exchange is repeated. All ranks must be given the same.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Bytes of the message or of the whole vector.
    pub bytes: usize,
    /// How often, after a quarter as often to get going.
    pub laps: u32,
    /// A conversation of its own.
    pub channel: u32,
    /// How long a rank waits for another.
    pub patience: Duration,
}

/// The time of a collective among the first `ranks` ranks, all of whom call this at once: the
/// median of its laps. The algorithm must be one that can do it. The vector lies where a rank's
/// buffers lie.
pub fn collective(
    transport: &mut dyn Transport,
    kind: CollectiveKind,
    algorithm: Algorithm,
    ranks: u32,
    timing: &Timing,
) -> Result<Seconds, ExecError> {
    let me = transport.rank();
    let failed = |source| ExecError::Control { rank: me, doing: "timing a collective", source };
    let spec = CollectiveSpec {
        kind,
        algorithm,
        order: Order::Canonical,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let bytes = timing.bytes.div_ceil(4).max(1) * 4;
    let mut shared = transport.neighbourly_memory(bytes).map_err(failed)?;
    let mut own = if shared.is_none() { vec![0; bytes] } else { Vec::new() };
    prefer_large_pages(&mut own);
    let vector = shared.as_deref_mut().unwrap_or(&mut own);
    let mut output = match kind {
        CollectiveKind::AllToAll => Some(vec![0; bytes]),
        CollectiveKind::AllReduce
        | CollectiveKind::ReduceScatter
        | CollectiveKind::AllGather
        | CollectiveKind::Broadcast
        | CollectiveKind::Gather
        | CollectiveKind::Reduce => None,
    };
    let mut tag = Tag::new(timing.channel, 0);
    let mut running = Running::start(&spec, &members, me, tag).map_err(failed)?;
    laps(transport, &members, timing, |transport| {
        tag = tag.next();
        running.restart(tag);
        vector.fill(0);
        let began = Instant::now();
        finish(transport, timing.patience, |transport| {
            running.progress_bytes(transport, DType::F32, vector, output.as_deref_mut())
        })?;
        Ok(began.elapsed().as_secs_f64())
    })
    .map_err(failed)
}

/// The time of a message from rank 0 to rank 1, who both call this at once: half of what it takes
/// there and back.
pub fn message(transport: &mut dyn Transport, timing: &Timing) -> Result<Seconds, ExecError> {
    let me = transport.rank();
    let failed = |source| ExecError::Control { rank: me, doing: "timing a message", source };
    let members = [Rank(0), Rank(1)];
    let peer = members[usize::from(me == Rank(0))];
    let mut data = vec![0.5f32; timing.bytes.div_ceil(4).max(1)];
    let mut tag = Tag::new(timing.channel, 0);
    let there_and_back = laps(transport, &members, timing, |transport| {
        tag = tag.next();
        let began = Instant::now();
        let (mut out, mut back) = (Sending::start(peer, tag), Receiving::start(peer, tag));
        let mut send = |transport: &mut dyn Transport, data: &[f32]| {
            finish(transport, timing.patience, |transport| out.progress(transport, data))
        };
        let mut receive = |transport: &mut dyn Transport, data: &mut [f32]| {
            finish(transport, timing.patience, |transport| back.progress(transport, data))
        };
        if me == Rank(0) {
            send(transport, &data)?;
            receive(transport, &mut data)?;
        } else {
            receive(transport, &mut data)?;
            send(transport, &data)?;
        }
        Ok(began.elapsed().as_secs_f64())
    });
    Ok(there_and_back.map_err(failed)? * 0.5)
}

/// The median lap, each of which all members begin together.
fn laps(
    transport: &mut dyn Transport,
    members: &[Rank],
    timing: &Timing,
    mut lap: impl FnMut(&mut dyn Transport) -> Result<f64, CommError>,
) -> Result<Seconds, CommError> {
    let mut times = Vec::with_capacity(timing.laps as usize);
    let unmeasured = timing.laps / 4 + 1;
    for number in 0..unmeasured + timing.laps.max(1) {
        let meet = Tag::new(timing.channel + 1, number);
        barrier::wait(transport, members, meet, timing.patience)?;
        let time = lap(transport)?;
        if number >= unmeasured {
            times.push(time);
        }
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(Seconds(times[times.len() / 2]))
}
