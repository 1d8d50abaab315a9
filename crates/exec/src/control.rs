//! What ranks in different processes tell each other beside the plan's own messages.

use crate::error::ExecError;
use paceline_comm::{CommError, Header, Progress, Purpose, Tag, Transport, finish};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::time::Duration;

/// The rank that draws the horizon, hears the others and reports.
pub(crate) const LEADER: Rank = Rank(0);

/// What a message is about. Each subject is a channel of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// What the leader's clock shows.
    Clock,
    /// How far all ranks go.
    Horizon,
    /// What a rank saw of an iteration.
    Sight,
    /// What is left of a rank at the end.
    Remains,
    /// Where checkpoints lie.
    Checkpoints,
    /// Leave for a replica that waits for nobody to run one more iteration.
    Leave,
}

/// Set in the channels of these messages, and in none of a plan's.
const CONTROL: u32 = 1 << 30;

/// Sends a message of any length.
pub(crate) fn say(
    transport: &mut dyn Transport,
    to: Rank,
    (subject, sequence): (Subject, u32),
    bytes: &[u8],
) -> Result<(), CommError> {
    let tag = Tag::new(CONTROL | subject as u32, sequence);
    transport.send(to, &header(tag, bytes.len()), &[bytes])
}

/// The next message on a subject, if it is there, given to `read`.
pub(crate) fn try_hear<R>(
    transport: &mut dyn Transport,
    from: Rank,
    (subject, sequence): (Subject, u32),
    read: impl FnOnce(&[u8]) -> R,
) -> Result<Option<R>, CommError> {
    let tag = Tag::new(CONTROL | subject as u32, sequence);
    let Some((found, data)) = transport.try_recv(from, tag)? else { return Ok(None) };
    header(tag, data.len()).check(transport.rank(), from, &found)?;
    Ok(Some(read(&data)))
}

/// Waits for the next message on a subject.
pub(crate) fn hear<R>(
    transport: &mut dyn Transport,
    from: Rank,
    about: (Subject, u32),
    patience: Duration,
    mut read: impl FnMut(&[u8]) -> R,
) -> Result<R, CommError> {
    let mut heard = None;
    finish(transport, patience, |transport| {
        heard = try_hear(transport, from, about, &mut read)?;
        Ok(match heard {
            Some(_) => Progress::Done,
            None => Progress::Pending { on: from, step: 0, moved: 0 },
        })
    })?;
    // `finish` ends well only when something was heard.
    heard.ok_or(CommError::Silent { rank: from, after: patience })
}

/// Says what a rank was about when such a message failed.
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
