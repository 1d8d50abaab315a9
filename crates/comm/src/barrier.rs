//! Barriers: no rank passes before all have arrived.

use crate::error::CommError;
use crate::steps::ActiveCollective;
use crate::transport::{Progress, Tag, Transport, finish};
use paceline_plan::collective::{Action, Chunks, Combine, Step, bruck};
use paceline_plan::ids::Rank;
use std::time::Duration;

/// One rank's side of a barrier.
#[derive(Debug)]
pub struct Barrier(ActiveCollective);

impl Barrier {
    /// Prepares the side of rank `me`, a member, of a **dissemination** barrier (Hensgen, Finkel
    /// and Manber 1988, "Two algorithms for barrier synchronization"). In round k every rank
    /// signals the rank 2ᵏ places ahead that it, and all ranks it has heard of, have arrived.
    ///
    /// ⌈log₂ P⌉ rounds and as many messages per rank; fan-in 1.
    pub fn start(members: &[Rank], me: Rank, tag: Tag) -> Result<Self, CommError> {
        ActiveCollective::barrier(members, me, tag, bruck::barrier).map(Self)
    }

    /// Like [`start`](Self::start), for a **central** barrier: all members signal the first, and
    /// then it signals all of them. Sends fewer messages in total, for groups whose ranks share few
    /// cores.
    ///
    /// 2 rounds of P − 1 messages each; fan-in P − 1.
    pub fn central(members: &[Rank], me: Rank, tag: Tag) -> Result<Self, CommError> {
        ActiveCollective::barrier(members, me, tag, central).map(Self)
    }

    /// Advances the barrier; done once every member has arrived.
    pub fn progress(&mut self, transport: &mut dyn Transport) -> Result<Progress, CommError> {
        self.0.progress(transport, &mut [], None)
    }
}

/// Waits until every member has arrived; fails if a member is silent for `timeout`.
pub fn wait(
    transport: &mut dyn Transport,
    members: &[Rank],
    tag: Tag,
    timeout: Duration,
) -> Result<(), CommError> {
    let mut barrier = Barrier::start(members, transport.rank(), tag)?;
    finish(transport, timeout, |transport| barrier.progress(transport))
}

fn central(ranks: u32, me: u32) -> Vec<Step> {
    match me {
        0 => {
            let coming = (1..ranks).map(|from| recv(0, from));
            coming.chain((1..ranks).map(|to| send(1, to))).collect()
        }
        _ => vec![send(0, 0), recv(1, 0)],
    }
}

fn send(round: u32, to: u32) -> Step {
    Step { round, action: Action::Send { to, chunks: Chunks::all(0) } }
}

fn recv(round: u32, from: u32) -> Step {
    let how = Combine::Replace;
    Step { round, action: Action::Recv { from, chunks: Chunks::all(0), how } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Ranks that each rank has heard of, directly or indirectly, once all messages have arrived.
    fn heard(steps: fn(u32, u32) -> Vec<Step>, ranks: u32) -> Vec<BTreeSet<u32>> {
        let programs: Vec<Vec<Step>> = (0..ranks).map(|me| steps(ranks, me)).collect();
        let mut known: Vec<BTreeSet<u32>> = (0..ranks).map(|me| BTreeSet::from([me])).collect();
        let rounds = programs.iter().flatten().map(|step| step.round + 1).max().unwrap_or(0);
        for round in 0..rounds {
            let before = known.clone();
            for (me, program) in programs.iter().enumerate() {
                for step in program.iter().filter(|step| step.round == round) {
                    if let Action::Recv { from, .. } = step.action {
                        known[me].extend(&before[from as usize]);
                    }
                }
            }
        }
        known
    }

    #[test]
    fn everyone_hears_of_everyone_in_as_many_rounds_as_are_said() {
        for ranks in 1..=33 {
            let all: BTreeSet<u32> = (0..ranks).collect();
            for steps in [bruck::barrier, central] {
                assert!(heard(steps, ranks).iter().all(|known| *known == all), "{ranks} ranks");
            }
            let messages = bruck::barrier(ranks, 0).len() as u32 / 2;
            assert_eq!(messages, f64::from(ranks).log2().ceil() as u32);
        }
        assert_eq!(central(9, 0).len(), 16);
        assert_eq!(central(9, 4).len(), 2);
    }
}
