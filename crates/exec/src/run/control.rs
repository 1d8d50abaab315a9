//! Control messages between ranks of different processes, besides the plan's own messages.

use crate::error::ExecError;
use paceline_comm::{CommError, Header, Progress, Purpose, Tag, Transport, finish};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::time::Duration;

/// Rank that decides the stop, collects the others' reports and prints them.
pub(crate) const LEADER: Rank = Rank(0);

/// Topic of a control message. Each topic has its own channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlTopic {
    /// Time on the leader's clock.
    Clock,
    /// Last iteration of all ranks.
    Stop,
    /// A rank's statistics of an iteration.
    Stats,
    /// A rank's result at the end.
    Result,
    /// Directory of the checkpoints.
    Checkpoints,
    /// Grant for an asynchronous replica to run one more iteration.
    Grant,
    /// Largest of the ranks' numbers.
    Largest,
}

/// Bit set in the channels of control messages, and in none of a plan's.
const CONTROL: u32 = 1 << 30;

/// Sends a message of any length.
pub(crate) fn send(
    transport: &mut dyn Transport,
    to: Rank,
    (subject, sequence): (ControlTopic, u32),
    bytes: &[u8],
) -> Result<(), CommError> {
    let tag = Tag::new(CONTROL | subject as u32, sequence);
    transport.send(to, &header(tag, bytes.len()), &[bytes])
}

/// Passes the next message on a topic to `read`, if it has arrived.
pub(crate) fn try_recv<R>(
    transport: &mut dyn Transport,
    from: Rank,
    (subject, sequence): (ControlTopic, u32),
    read: impl FnOnce(&[u8]) -> R,
) -> Result<Option<R>, CommError> {
    let tag = Tag::new(CONTROL | subject as u32, sequence);
    let (rank, mut read, mut result) = (transport.rank(), Some(read), Ok(None));
    transport.try_recv(from, tag, &mut |found, data| {
        let checked = header(tag, data.len()).check(rank, from, found);
        result = checked.map(|()| read.take().map(|read| read(data)));
    })?;
    result
}

/// Waits for the next message on a topic.
pub(crate) fn recv<R>(
    transport: &mut dyn Transport,
    from: Rank,
    about: (ControlTopic, u32),
    timeout: Duration,
    mut read: impl FnMut(&[u8]) -> R,
) -> Result<R, CommError> {
    let mut heard = None;
    finish(transport, timeout, |transport| {
        heard = try_recv(transport, from, about, &mut read)?;
        Ok(match heard {
            Some(_) => Progress::Done,
            None => Progress::Pending { on: from, step: 0, moved: 0 },
        })
    })?;
    // `finish` succeeds only if a message was received.
    heard.ok_or(CommError::Timeout { rank: from, after: timeout })
}

/// Largest of the numbers of all ranks, which all call this.
pub(crate) fn largest(
    transport: &mut dyn Transport,
    own: f64,
    sequence: u32,
    timeout: Duration,
) -> Result<f64, CommError> {
    let about = (ControlTopic::Largest, sequence);
    let read = |bytes: &[u8]| bytes.try_into().map_or(0.0, f64::from_le_bytes);
    if transport.rank() != LEADER {
        send(transport, LEADER, about, &own.to_le_bytes())?;
        return recv(transport, LEADER, about, timeout, read);
    }
    let world = transport.world();
    let others = || (1..world).map(Rank);
    let mut largest = own;
    for rank in others() {
        largest = largest.max(recv(transport, rank, about, timeout, read)?);
    }
    others().try_for_each(|rank| send(transport, rank, about, &largest.to_le_bytes()))?;
    Ok(largest)
}

/// Adds the rank and its activity to a control message error.
pub(crate) fn during(
    rank: Rank,
    doing: &'static str,
) -> impl Fn(CommError) -> ExecError + Copy + 'static {
    move |source| ExecError::Control { rank, doing, source }
}

fn header(tag: Tag, bytes: usize) -> Header {
    let purpose = Purpose::PointToPoint { elements: bytes as u64, dtype: DType::U8 };
    Header { tag, purpose, round: 0 }
}
