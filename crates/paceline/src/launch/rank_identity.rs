//! Rank of a process, read from the environment.

use crate::failure::Failure;
use crate::flags::{Launch, LaunchMode, SECRET};
use paceline_comm::{Secret, launch};
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Variables that the launcher sets for a rank; the secret's variable is also a user setting.
pub(super) const RANK: &str = "PACELINE_RANK";
pub(super) const WORLD: &str = "PACELINE_WORLD";
pub(super) const RENDEZVOUS: &str = "PACELINE_RENDEZVOUS";
pub(super) const RUN: &str = "PACELINE_RUN";
/// Variables that it also sets for restarted ranks.
pub(super) const RESUME: &str = "PACELINE_RESUME";
pub(super) const LAYOUT: &str = "PACELINE_LAYOUT";
pub(super) const EXPERT_BUFFERS: &str = "PACELINE_EXPERT_BUFFERS";

/// Identity of a process in a job.
#[derive(Clone, Debug)]
pub(crate) struct RankIdentity {
    /// Its rank.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Its index among the ranks of its host.
    pub local_rank: u32,
    /// Address of the rendezvous server.
    pub rendezvous: SocketAddr,
    /// The secret shared by all ranks.
    pub secret: Secret,
    /// The run's directory, if `paceline` itself started this rank. The launcher then also reports
    /// failures, and runs the rendezvous server.
    pub launched: Option<PathBuf>,
}

/// The identity of this process; `None` if it is not a rank but has to start the ranks.
pub(crate) fn rank_identity(launch: &Launch) -> Result<Option<RankIdentity>, Failure> {
    let variables: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    if let Some(place) = from_launcher(&variables)? {
        return Ok(Some(place));
    }
    match launch.by {
        LaunchMode::Local => Ok(None),
        LaunchMode::Environment => from_environment(&variables, launch).map(Some),
    }
}

/// The identity set by this program's launcher, if it started this process. A rank must never
/// mistake itself for a launcher: it would start ranks endlessly.
fn from_launcher(variables: &BTreeMap<String, String>) -> Result<Option<RankIdentity>, Failure> {
    let Some(rank) = variables.get(RANK) else { return Ok(None) };
    let read = || {
        Some(RankIdentity {
            rank: rank.parse().ok()?,
            local_rank: rank.parse().ok()?,
            world: variables.get(WORLD)?.parse().ok()?,
            rendezvous: variables.get(RENDEZVOUS)?.parse().ok()?,
            secret: Secret::from_text(variables.get(SECRET)?).ok()?,
            launched: Some(variables.get(RUN)?.into()),
        })
    };
    let mistaken = || {
        let text = format!("{RANK} is set, but not by a launcher of paceline: unset it");
        Failure::flag("--launch", text)
    };
    read().map(Some).ok_or_else(mistaken)
}

fn from_environment(
    variables: &BTreeMap<String, String>,
    launch: &Launch,
) -> Result<RankIdentity, Failure> {
    let wrong = |text: String| Failure::flag("--launch", text);
    let found = launch::rank_env(variables).map_err(|error| wrong(error.to_string()))?;
    let found = found.ok_or_else(|| {
        wrong(
            "env finds no rank in the environment: torchrun sets RANK and WORLD_SIZE, Open MPI \
             OMPI_COMM_WORLD_RANK, other MPIs PMI_RANK, srun SLURM_PROCID"
                .to_owned(),
        )
    })?;
    let by = found.launcher;
    let (Some(address), Some(port)) = (&found.address, found.port) else {
        return Err(wrong(format!(
            "{by} gives rank {} but not the address of rank 0: set MASTER_ADDR and MASTER_PORT",
            found.rank
        )));
    };
    let resolved = (address.as_str(), port).to_socket_addrs();
    let rendezvous = resolved.ok().and_then(|mut found| found.next()).ok_or_else(|| {
        wrong(format!("MASTER_ADDR is '{address}', which is not a host that can be found"))
    })?;
    if !rendezvous.ip().is_loopback() && launch.bind.is_loopback() {
        return Err(Failure::flag(
            "--bind",
            format!(
                "rank 0 is at {rendezvous}, and ranks listen on {} only: give the address on which this \
                 host may be reached, or 0.0.0.0",
                launch.bind
            ),
        ));
    }
    let secret = launch.secret.clone().ok_or_else(|| {
        wrong(format!(
            "{by} started the ranks, which need a shared secret: --secret-file FILE, or {SECRET} in their environment"
        ))
    })?;
    let (rank, world) = (found.rank, found.world);
    // Launchers that do not say fill one host after the other.
    let index = found.local_world.map_or(rank, |local| rank % local.max(1));
    let local_rank = found.local_rank.unwrap_or(index);
    Ok(RankIdentity { rank, world, local_rank, rendezvous, secret, launched: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(variables: &[(&str, &str)], launch: &Launch) -> String {
        let variables =
            variables.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        from_environment(&variables, launch).unwrap_err().message().unwrap()
    }

    #[test]
    fn what_is_missing_is_named() {
        let launch = Launch::default();
        assert!(told(&[], &launch).contains("finds no rank"));
        let rank = [("RANK", "1"), ("WORLD_SIZE", "2")];
        assert!(told(&rank, &launch).contains("MASTER_ADDR and MASTER_PORT"));
        let mut far = rank.to_vec();
        far.extend([("MASTER_ADDR", "10.1.2.3"), ("MASTER_PORT", "29500")]);
        assert!(told(&far, &launch).contains("--bind: rank 0 is at 10.1.2.3:29500"));
        let mut near = rank.to_vec();
        near.extend([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]);
        assert!(told(&near, &launch).contains("--secret-file"));
    }

    #[test]
    fn a_rank_never_takes_itself_for_a_launcher() {
        let half = [(RANK.to_owned(), "1".to_owned())].into();
        let told = from_launcher(&half).unwrap_err().message().unwrap();
        assert!(told.contains("unset it"), "{told}");
        assert!(from_launcher(&BTreeMap::new()).unwrap().is_none());
    }

    #[test]
    fn a_complete_place_is_taken() {
        let secret = Secret::from_text("a secret of good length").unwrap();
        let launch = Launch { secret: Some(secret), ..Launch::default() };
        let variables = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ];
        let variables = variables.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        let place = from_environment(&variables, &launch).unwrap();
        assert_eq!((place.rank, place.world, place.rendezvous.port()), (3, 4, 29500));
        assert!(place.launched.is_none());
    }
}
