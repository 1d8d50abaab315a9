//! Worlds whose ranks are threads of this process, joined by any transport.

use super::process::{self, ProcessOptions};
use super::thread::{self, ThreadTransport};
use super::{Transport, TransportKind};
use crate::error::CommError;
use crate::rendezvous::{RendezvousOptions, RendezvousServer};
use crate::secret::Secret;
use paceline_plan::ids::Rank;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A world of threads that exchange messages as threads do, or as processes do.
#[derive(Debug)]
pub struct LocalWorld(Joined);

#[derive(Debug)]
enum Joined {
    /// Ends that have not been handed out.
    Threads(Mutex<Vec<Option<ThreadTransport>>>),
    Processes {
        rendezvous: RendezvousServer,
        options: Box<ProcessOptions>,
    },
}

impl LocalWorld {
    /// Prepares a world of `ranks` ranks. With the transport of processes, a rank that is silent
    /// for `timeout` is lost.
    pub fn new(kind: TransportKind, ranks: u32, timeout: Duration) -> Result<Self, CommError> {
        if kind == TransportKind::Thread {
            let ends = thread::world(ranks).into_iter().map(Some).collect();
            return Ok(Self(Joined::Threads(Mutex::new(ends))));
        }
        let secret = Secret::random()?;
        let rendezvous = RendezvousServer::start(RendezvousOptions {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            secret: secret.clone(),
            world: ranks,
            in_rank: None,
            join: timeout,
            heartbeat_timeout: timeout,
        })?;
        let options = ProcessOptions {
            rendezvous_in_rank_0: false,
            transport: kind,
            ..ProcessOptions::new(Rank(0), ranks, rendezvous.address(), secret)
        };
        Ok(Self(Joined::Processes { rendezvous, options: Box::new(options) }))
    }

    /// Connects a rank, on its thread: returns once all ranks have been connected. May be called
    /// once per rank.
    pub fn connect(&self, rank: Rank) -> Result<Box<dyn Transport>, CommError> {
        match &self.0 {
            Joined::Threads(ends) => {
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
                let world = ends.len() as u32;
                let end = ends.get_mut(rank.index()).and_then(Option::take);
                Ok(Box::new(end.ok_or(CommError::NoSuchRank { rank, world })?))
            }
            Joined::Processes { options, .. } => {
                let options = ProcessOptions { rank, ..(**options).clone() };
                Ok(Box::new(process::connect(&options)?))
            }
        }
    }

    /// Waits until all ranks have left; returns the first failure, if there was one.
    pub fn join(self) -> Result<(), CommError> {
        match self.0 {
            Joined::Threads(_) => Ok(()),
            Joined::Processes { rendezvous, .. } => rendezvous.join(),
        }
    }
}
