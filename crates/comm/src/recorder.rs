//! Flight recorder: the last messages of a rank, for analysis after a failure.

use crate::transport::{Header, Tag};
use paceline_plan::ids::Rank;
use std::fmt::{self, Write};
use std::time::{Duration, Instant};

/// Ring buffer of a rank's last messages.
#[derive(Clone, Debug)]
pub struct FlightRecorder {
    began: Instant,
    entries: Vec<Entry>,
    /// Number of messages recorded; the next one is stored at this index modulo the capacity.
    count: u64,
    awaited: Option<(Rank, Tag)>,
}

/// One recorded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Time since the recorder was created.
    pub at: Duration,
    /// Direction of the message.
    pub way: Direction,
    /// The other rank.
    pub peer: Rank,
    /// Header of the message.
    pub header: Header,
    /// Size of the message.
    pub bytes: u64,
}

/// Direction of a message, from the recording rank's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Handed to the transport.
    Sent,
    /// Taken from the transport.
    Received,
}

impl FlightRecorder {
    const CAPACITY: usize = 256;

    pub(crate) fn new() -> Self {
        let entries = Vec::with_capacity(Self::CAPACITY);
        Self { began: Instant::now(), entries, count: 0, awaited: None }
    }

    pub(crate) fn record(&mut self, way: Direction, peer: Rank, header: &Header, bytes: usize) {
        let at = self.began.elapsed();
        let entry = Entry { at, way, peer, header: *header, bytes: bytes as u64 };
        let place = (self.count % Self::CAPACITY as u64) as usize;
        match self.entries.get_mut(place) {
            Some(old) => *old = entry,
            None => self.entries.push(entry),
        }
        self.count += 1;
        self.awaited = None;
    }

    /// Records the message that is currently missing.
    pub(crate) fn awaiting(&mut self, peer: Rank, tag: Tag) {
        self.awaited = Some((peer, tag));
    }

    /// Recorded messages, oldest first.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        let split = if self.entries.len() < Self::CAPACITY {
            0
        } else {
            (self.count % Self::CAPACITY as u64) as usize
        };
        self.entries[split..].iter().chain(&self.entries[..split])
    }

    /// Short description of the rank's current operation; empty before the first message.
    pub fn doing(&self) -> String {
        let mut text = String::new();
        if let Some(last) = self.entries().last() {
            let _ = write!(text, "at {}", last.header);
        }
        if let Some((peer, tag)) = self.awaited {
            let comma = if text.is_empty() { "" } else { ", " };
            let _ = write!(text, "{comma}waiting for rank {peer} on {tag}");
        }
        text
    }
}

impl fmt::Display for FlightRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} messages, the last {} of them:", self.count, self.entries.len())?;
        for Entry { at, way, peer, header, bytes } in self.entries() {
            let way = match way {
                Direction::Sent => "sent to",
                Direction::Received => "received from",
            };
            let seconds = at.as_secs_f64();
            writeln!(f, "{seconds:12.6} s  {way} rank {peer}, {bytes} bytes: {header}")?;
        }
        match self.awaited {
            Some((peer, tag)) => writeln!(f, "waiting for rank {peer} on {tag}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Purpose;

    #[test]
    fn the_last_messages_are_kept_in_order() {
        let mut recorder = FlightRecorder::new();
        assert_eq!(recorder.doing(), "");
        for i in 0..1000 {
            let header =
                Header { tag: Tag::new(1, i), purpose: Purpose::Barrier { ranks: 2 }, round: 0 };
            recorder.record(Direction::Sent, Rank(i), &header, 8);
        }
        let kept: Vec<u32> = recorder.entries().map(|entry| entry.peer.0).collect();
        assert_eq!(kept, (744..1000).collect::<Vec<_>>());
        recorder.awaiting(Rank(5), Tag::new(1, 1000));
        assert_eq!(
            recorder.doing(),
            "at a barrier of 2 ranks (channel 1, operation 999, round 0), \
             waiting for rank 5 on channel 1, operation 1000"
        );
        let text = recorder.to_string();
        assert_eq!(text.lines().count(), 258);
        assert!(text.starts_with("1000 messages, the last 256 of them:"), "{text}");
    }
}
