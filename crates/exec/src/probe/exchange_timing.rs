//! Exchange times over a transport, as observed by each rank.

use super::CachePrep;
use crate::error::ExecError;
use paceline_comm::{
    ActiveCollective, CollectiveSpec, CommError, Progress, Receiving, Sending, Tag, Transport,
    Vector, Wait, barrier, finish,
};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind, Reduction, SummationOrder};
use paceline_plan::ids::Rank;
use paceline_plan::units::Seconds;
use std::time::{Duration, Instant};

/// Repetition parameters of an exchange. All ranks must use the same.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Bytes of the message or of the whole vector.
    pub bytes: usize,
    /// Number of timed laps, after a quarter as many for warm-up.
    pub laps: u32,
    /// Channel of these messages, used for nothing else.
    pub channel: u32,
    /// Longest wait for another rank.
    pub timeout: Duration,
    /// Clock that all ranks share.
    pub clock: Instant,
}

/// One exchange as observed by one rank, in seconds of the shared clock.
///
/// It is recorded as in a run's trace: a rank that waits for the others to arrive does not move
/// bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lap {
    /// Time at which the rank arrived.
    pub arrived: f64,
    /// Start and end of the wait for the first response, if the rank waited.
    pub wait: Option<(f64, f64)>,
    /// Time at which the rank finished.
    pub finished: f64,
}

impl Lap {
    /// Time that the rank spent in the exchange after `moment`, without its first wait.
    pub fn spent_after(&self, moment: f64) -> f64 {
        let after = |from: f64, to: f64| (to - from.max(moment)).max(0.0);
        match self.wait {
            Some((from, until)) => after(self.arrived, from) + after(until, self.finished),
            None => after(self.arrived, self.finished),
        }
    }
}

/// Times collectives among the first `ranks` ranks, which all call this at once. The algorithm must
/// support the collective. The vector is allocated like a rank's buffers, and its rank has written
/// it.
pub fn collective(
    transport: &mut dyn Transport,
    kind: CollectiveKind,
    algorithm: Algorithm,
    ranks: u32,
    timing: &Timing,
    before: CachePrep<'_>,
) -> Result<Vec<Lap>, ExecError> {
    let me = transport.rank();
    let failed = |source| ExecError::Control { rank: me, doing: "timing a collective", source };
    let spec = CollectiveSpec {
        kind,
        algorithm,
        order: SummationOrder::Canonical,
        reduction: Reduction::Sum,
        root: 0,
        block: 1,
    };
    let members: Vec<Rank> = (0..ranks).map(Rank).collect();
    let bytes = timing.bytes.div_ceil(4).max(1) * 4;
    let mut vector = Vector::new(transport, bytes, true).map_err(failed)?;
    let mut output = kind.has_output().then(|| vec![0; bytes]);
    let mut tag = Tag::new(timing.channel, 0);
    let mut running = ActiveCollective::start(&spec, &members, me, tag).map_err(failed)?;
    laps(transport, &members, timing, |transport| {
        tag = tag.next();
        running.restart(tag);
        vector.with(|vector| {
            vector.fill(0);
            before.run(me.0, ranks);
            run_exchange(transport, timing, |transport| {
                running.progress_bytes(transport, DType::F32, vector, output.as_deref_mut())
            })
        })
    })
    .map_err(failed)
}

/// Time of a message from rank 0 to rank 1, which both call this at once: half of the round trip.
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
            finish(transport, timing.timeout, |transport| out.progress(transport, data))
        };
        let mut receive = |transport: &mut dyn Transport, data: &mut [f32]| {
            finish(transport, timing.timeout, |transport| back.progress(transport, data))
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
    let mut times = there_and_back.map_err(failed)?;
    times.sort_unstable_by(f64::total_cmp);
    Ok(Seconds(times[times.len() / 2] * 0.5))
}

/// Times messages from rank 0 to rank 1, which both call this at once: each returns its own laps.
pub fn delivery(
    transport: &mut dyn Transport,
    timing: &Timing,
    before: CachePrep<'_>,
) -> Result<Vec<Lap>, ExecError> {
    let me = transport.rank();
    let failed = |source| ExecError::Control { rank: me, doing: "timing a message", source };
    let members = [Rank(0), Rank(1)];
    let peer = members[usize::from(me == Rank(0))];
    let mut data = vec![0.5f32; timing.bytes.div_ceil(4).max(1)];
    let mut tag = Tag::new(timing.channel, 0);
    laps(transport, &members, timing, |transport| {
        tag = tag.next();
        data.fill(0.5);
        before.run(me.0, 2);
        if me == Rank(0) {
            let mut out = Sending::start(peer, tag);
            run_exchange(transport, timing, |transport| out.progress(transport, &data))
        } else {
            let mut back = Receiving::start(peer, tag);
            run_exchange(transport, timing, |transport| back.progress(transport, &mut data))
        }
    })
    .map_err(failed)
}

/// Drives one exchange to its end as a rank's progress engine does, and records the same times.
fn run_exchange(
    transport: &mut dyn Transport,
    timing: &Timing,
    mut progress: impl FnMut(&mut dyn Transport) -> Result<Progress, CommError>,
) -> Result<Lap, CommError> {
    let now = || timing.clock.elapsed().as_secs_f64();
    let came = now();
    let mut last = progress(transport)?;
    let (from, mut until) = (now(), None);
    let mut since = Instant::now();
    while let Progress::Pending { on, .. } = last {
        let waited = since.elapsed();
        if waited >= timing.timeout {
            return Err(CommError::Timeout { rank: on, after: waited });
        }
        transport.wait(Wait::Spin, timing.timeout - waited)?;
        let asked = now();
        let next = progress(transport)?;
        if next != last {
            until.get_or_insert(asked);
            (last, since) = (next, Instant::now());
        }
    }
    Ok(Lap { arrived: came, wait: until.map(|until| (from, until)), finished: now() })
}

/// Returns the timed laps; all members begin each lap together.
fn laps<T>(
    transport: &mut dyn Transport,
    members: &[Rank],
    timing: &Timing,
    mut lap: impl FnMut(&mut dyn Transport) -> Result<T, CommError>,
) -> Result<Vec<T>, CommError> {
    let mut laps = Vec::with_capacity(timing.laps as usize);
    let unmeasured = timing.laps / 4 + 1;
    for number in 0..unmeasured + timing.laps.max(1) {
        let meet = Tag::new(timing.channel + 1, number);
        barrier::wait(transport, members, meet, timing.timeout)?;
        let seen = lap(transport)?;
        if number >= unmeasured {
            laps.push(seen);
        }
    }
    Ok(laps)
}
