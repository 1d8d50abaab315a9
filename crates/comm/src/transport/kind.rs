//! Transports by name: the values of `--transport`, of cluster files and of benchmark records.

use std::fmt;
use std::str::FromStr;

/// Implementation that carries messages between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransportKind {
    /// Shared memory between ranks of one host, TCP between hosts.
    Auto,
    /// Memory of one process whose threads are the ranks.
    Thread,
    /// Shared memory between processes of one host.
    Shm,
    /// TCP only.
    Tcp,
    /// Point-to-point messages of MPI, between processes that its launcher started.
    Mpi,
}

impl TransportKind {
    /// All transports, in the order in which messages list them.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Thread, Self::Shm, Self::Tcp, Self::Mpi];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Thread => "thread",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Mpi => "mpi",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known
            .ok_or_else(|| format!("unknown transport '{text}'; use auto, thread, shm, tcp or mpi"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for kind in TransportKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("shmem".parse::<TransportKind>().unwrap_err().contains("use auto, thread"));
    }
}
