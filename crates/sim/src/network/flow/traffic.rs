//! All possible exchanges: the script of each and the ranks that run it.

use super::FlowError;
use super::rails::rails;
use super::script::{Party, RoundScript};
use crate::cluster::Cluster;
use crate::network::Vector;
use paceline_plan::collective::Pattern;
use paceline_plan::ids::Rank;

/// Ranks and the exchanges between them. An exchange that occurs many times, with vectors of any
/// size, is stored once.
#[derive(Debug)]
pub(crate) struct Traffic<'c> {
    pub(super) cluster: &'c Cluster,
    /// In ascending order.
    pub(super) ranks: Vec<Rank>,
    pub(super) exchanges: Vec<Exchange>,
    pub(super) scripts: Vec<RoundScript>,
    /// Source of each script.
    sources: Vec<Source>,
    transfers: usize,
}

/// Script and the ranks that run it.
#[derive(Clone, Debug)]
pub(super) struct Exchange {
    pub(super) script: u32,
    /// Exchanges that may take place at different times have different marks and are never folded
    /// together.
    pub(super) mark: u32,
    /// Rank of each actor.
    pub(super) ranks: Vec<Rank>,
}

/// Key under which exchanges share a script.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    /// A collective, and the position of the root in each ring.
    Collective(Pattern, Vec<u32>),
    Message(Party, Party),
    Sliced(u32),
}

/// Maximum number of messages in the distinct rounds of all exchanges: a few gigabytes.
const MAX_TRANSFERS: usize = 1 << 24;

impl<'c> Traffic<'c> {
    /// Creates traffic between these ranks, initially without exchanges.
    pub(crate) fn new(cluster: &'c Cluster, mut ranks: Vec<Rank>) -> Self {
        ranks.sort_unstable();
        ranks.dedup();
        let (exchanges, scripts, sources) = (Vec::new(), Vec::new(), Vec::new());
        Self { cluster, ranks, exchanges, scripts, sources, transfers: 0 }
    }

    /// Cluster on which the traffic takes place.
    pub(crate) fn cluster(&self) -> &'c Cluster {
        self.cluster
    }

    /// Adds a collective among `members`, in group order, and returns its number. Exchanges with
    /// the same mark take place at the same times.
    pub(crate) fn collective(
        &mut self,
        mark: u32,
        pattern: &Pattern,
        members: &[Rank],
    ) -> Result<u32, FlowError> {
        let rings = rails(self.cluster, pattern, members);
        let place = |ring: &Vec<u32>| ring.iter().position(|&member| member == pattern.root());
        let roots = rings.iter().map(|ring| match pattern.kind().has_root() {
            true => place(ring).unwrap_or(0) as u32,
            false => 0,
        });
        let source = Source::Collective(*pattern, roots.collect());
        let script = self.script(source, || RoundScript::collective(pattern, &rings))?;
        let places = rings.iter().flatten();
        let lanes = self.scripts[script as usize].lanes as usize;
        let of_member = places.filter_map(|&member| members.get(member as usize));
        let ranks = of_member.flat_map(|&rank| std::iter::repeat_n(rank, lanes)).collect();
        self.push(mark, script, ranks)
    }

    /// Adds a message and returns its number.
    pub(crate) fn message(
        &mut self,
        mark: u32,
        (from, sender): (Rank, Party),
        (to, receiver): (Rank, Party),
    ) -> Result<u32, FlowError> {
        let source = Source::Message(sender, receiver);
        let script = self.script(source, || Some(RoundScript::message(sender, receiver)))?;
        self.push(mark, script, vec![from, to])
    }

    /// Adds a message that all senders hold and all receivers need in full; returns its number.
    pub(crate) fn sliced_message(
        &mut self,
        mark: u32,
        senders: &[Rank],
        receivers: &[Rank],
    ) -> Result<u32, FlowError> {
        let ways = senders.len().min(receivers.len());
        let ranks = [&senders[..ways], &receivers[..ways]].concat();
        let ways = ways as u32;
        let script =
            self.script(Source::Sliced(ways), || Some(RoundScript::sliced_message(ways)))?;
        self.push(mark, script, ranks)
    }

    /// Message bytes of an exchange for a vector, by the script's sizes.
    pub(crate) fn bytes(&self, exchange: u32, vector: &Vector) -> Vec<f64> {
        self.scripts[self.exchanges[exchange as usize].script as usize].bytes(vector)
    }

    /// Script of an exchange; [`Traffic::bytes`] depends only on it and the vector.
    pub(crate) fn script_of(&self, exchange: u32) -> u32 {
        self.exchanges[exchange as usize].script
    }

    /// Index of a rank among the ranks.
    pub(crate) fn place(&self, rank: Rank) -> u32 {
        self.ranks.binary_search(&rank).unwrap_or(0) as u32
    }

    fn script(
        &mut self,
        source: Source,
        write: impl FnOnce() -> Option<RoundScript>,
    ) -> Result<u32, FlowError> {
        let known = self.sources.iter().position(|known| *known == source);
        if let Some(script) = known {
            return Ok(script as u32);
        }
        let script = write().ok_or(FlowError::TooManyMessages)?;
        self.scripts.push(script);
        self.sources.push(source);
        Ok(self.scripts.len() as u32 - 1)
    }

    fn push(&mut self, mark: u32, script: u32, ranks: Vec<Rank>) -> Result<u32, FlowError> {
        // Actors that send nothing also take memory.
        self.transfers += self.scripts[script as usize].transfers().max(ranks.len());
        if self.transfers > MAX_TRANSFERS {
            return Err(FlowError::TooManyMessages);
        }
        self.exchanges.push(Exchange { script, mark, ranks });
        Ok(self.exchanges.len() as u32 - 1)
    }
}
