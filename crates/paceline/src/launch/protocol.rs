//! Messages between the leader of a job and its agents: one JSON object per line, orders one way and
//! events the other.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, BufRead, Write};
use std::net::IpAddr;
use std::path::PathBuf;

/// Order of the leader to an agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub(super) enum Order {
    /// Compare what the host has with what the leader has.
    Compare {
        /// Files that all hosts must have alike.
        files: Vec<FileFact>,
        /// A file that exists if the run's directory is shared.
        shared: Option<PathBuf>,
    },
    /// Start a rank.
    Start(Box<RankOrder>),
    /// Let a rank end in good order.
    Interrupt {
        /// The rank.
        rank: u32,
    },
    /// End all ranks at once.
    Kill,
}

/// A file as the leader sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileFact {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Its number of bytes.
    pub(crate) bytes: u64,
    /// SHA-256 of its beginning and its end.
    pub(crate) digest: String,
}

/// A rank to start.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RankOrder {
    pub(super) rank: u32,
    /// Directory in which the leader was started.
    pub(super) directory: PathBuf,
    pub(super) arguments: Vec<String>,
    pub(super) variables: BTreeMap<String, String>,
    /// Address and port of the rendezvous server.
    pub(super) rendezvous: (IpAddr, u16),
    /// Address to listen on, if it is not that of the way to the rendezvous server.
    pub(super) bind: Option<IpAddr>,
    /// Interface to listen on, if the user names one.
    pub(super) interface: Option<String>,
}

/// Event that an agent reports.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub(super) enum Event {
    /// The agent is ready.
    Here(Box<HostFacts>),
    /// Differences to what the leader has.
    Compared {
        /// Files that are missing or different.
        differing: Vec<String>,
        /// True if the run's directory is the leader's.
        shares_directory: bool,
    },
    /// A rank has written a line.
    Line {
        /// The rank.
        rank: u32,
        /// True for standard error.
        error: bool,
        /// The line, without its end.
        text: String,
    },
    /// A rank has ended.
    Ended {
        /// The rank.
        rank: u32,
        /// Its exit status, if it was not ended by a signal.
        code: Option<i32>,
        /// Description of its end.
        how: String,
    },
    /// The agent lives.
    Alive,
}

/// Facts about a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HostFacts {
    /// Its own name.
    pub(super) name: String,
    /// Version of the program.
    pub(super) version: String,
    /// SHA-256 of the program.
    pub(super) program: String,
    /// Its time, in seconds since 1970.
    pub(super) clock: f64,
    /// Number of cores.
    pub(super) cores: u32,
    /// Number of GPUs that this program can use.
    pub(super) gpus: u32,
    /// Address of the leader as this host sees it, if the connection tells.
    pub(super) leader: Option<IpAddr>,
    /// Address of this host as the leader sees it, if the connection tells.
    pub(super) own: Option<IpAddr>,
}

/// Writes a message as a line.
pub(super) fn write<T: Serialize>(to: &mut dyn Write, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads messages until the end of the stream; calls `take` for each, until it returns false. Lines that
/// are no messages, such as a login script's greeting, are passed to `other`.
pub(super) fn read<T: for<'m> Deserialize<'m>>(
    from: impl io::Read,
    mut take: impl FnMut(T) -> bool,
    mut other: impl FnMut(String),
) {
    let mut from = io::BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        match from.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        match serde_json::from_slice(&line) {
            Ok(message) => {
                if !take(message) {
                    return;
                }
            }
            Err(_) => other(String::from_utf8_lossy(&line).trim_end().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_among_other_lines() {
        let mut bytes = b"Welcome to host b\n".to_vec();
        write(&mut bytes, &Event::Alive).unwrap();
        let ended = Event::Ended { rank: 3, code: None, how: "was ended by signal 9".into() };
        write(&mut bytes, &ended).unwrap();
        let (mut events, mut others) = (Vec::new(), Vec::new());
        let take = |event: Event| {
            events.push(format!("{event:?}"));
            true
        };
        read(bytes.as_slice(), take, |line| others.push(line));
        assert_eq!(others, ["Welcome to host b"]);
        assert_eq!(events, ["Alive".to_owned(), format!("{ended:?}")]);
    }
}
