//! Rank of a process, read from the environment.

use super::address::address_towards;
use super::meeting::{Meeting, meeting};
use crate::failure::Failure;
use crate::flags::{Launch, SECRET};
use paceline_comm::Secret;
use paceline_comm::launch::{RankEnv, Variables};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Variables that the launcher sets for a rank; the secret's variable is also a user setting.
pub(crate) const RANK: &str = "PACELINE_RANK";
pub(super) const WORLD: &str = "PACELINE_WORLD";
pub(super) const LOCAL_RANK: &str = "PACELINE_LOCAL_RANK";
pub(super) const LOCAL_WORLD: &str = "PACELINE_LOCAL_WORLD";
/// Process of the agent that has started a rank.
pub(crate) const AGENT: &str = "PACELINE_AGENT";
pub(super) const BIND: &str = "PACELINE_BIND";
pub(super) const RENDEZVOUS: &str = "PACELINE_RENDEZVOUS";
pub(super) const RUN: &str = "PACELINE_RUN";
/// Variables that it also sets for restarted ranks.
pub(super) const RESUME: &str = "PACELINE_RESUME";
pub(super) const LAYOUT: &str = "PACELINE_LAYOUT";
/// Strategy that the launcher has found by a search.
pub(crate) const FOUND: &str = "PACELINE_STRATEGY";
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
    /// Number of ranks on its host, if known.
    pub local_world: Option<u32>,
    /// Address of the rendezvous server.
    pub rendezvous: SocketAddr,
    /// Address to listen on.
    pub bind: IpAddr,
    /// The secret shared by all ranks.
    pub secret: Secret,
    /// File that the secret was made from, if neither the user nor a launcher gave one.
    pub secret_file: Option<PathBuf>,
    /// The run's directory, if `paceline` itself started this rank. The launcher then also reports
    /// failures, and runs the rendezvous server.
    pub launched: Option<PathBuf>,
}

/// The environment of this process, as far as it is text.
pub(crate) fn environment() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// The identity of this process among `world` ranks; `None` if it is not a rank but has to start the
/// ranks.
pub(crate) fn rank_identity(launch: &Launch, world: u32) -> Result<Option<RankIdentity>, Failure> {
    if let Some(place) = from_launcher(&environment())? {
        return Ok(Some(place));
    }
    launch.env.as_ref().map(|env| from_environment(env, launch, world)).transpose()
}

/// The identity set by this program's launcher, if it started this process. A rank must never
/// mistake itself for a launcher: it would start ranks endlessly.
fn from_launcher(variables: &Variables) -> Result<Option<RankIdentity>, Failure> {
    let Some(rank) = variables.get(RANK) else { return Ok(None) };
    let read = || {
        Some(RankIdentity {
            rank: rank.parse().ok()?,
            local_rank: variables.get(LOCAL_RANK).unwrap_or(rank).parse().ok()?,
            world: variables.get(WORLD)?.parse().ok()?,
            local_world: variables.get(LOCAL_WORLD).unwrap_or(variables.get(WORLD)?).parse().ok(),
            rendezvous: variables.get(RENDEZVOUS)?.parse().ok()?,
            bind: variables.get(BIND).map_or("127.0.0.1", String::as_str).parse().ok()?,
            secret_file: None,
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

/// The identity that an external launcher set.
fn from_environment(env: &RankEnv, launch: &Launch, world: u32) -> Result<RankIdentity, Failure> {
    let world = env.world.unwrap_or(world);
    // Launchers that do not say fill one host after the other.
    let index = env.local_world.map_or(env.rank, |local| env.rank % local.max(1));
    let local_rank = env.local_rank.unwrap_or(index);
    let Meeting { rendezvous, secret, secret_file } = meeting(env, launch, world)?;
    let bind = match launch.bind {
        Some(bind) if bind.is_loopback() && !rendezvous.ip().is_loopback() => {
            return Err(Failure::flag(
                "--bind",
                format!(
                    "rank 0 is at {rendezvous}, and ranks listen on {bind} only: give the address on \
                     which this host may be reached, or 0.0.0.0, or leave the flag out"
                ),
            ));
        }
        Some(bind) => bind,
        None => address_towards(rendezvous).map_err(|text| Failure::flag("--bind", text))?,
    };
    Ok(RankIdentity {
        rank: env.rank,
        world,
        local_rank,
        local_world: env.local_world,
        rendezvous,
        bind,
        secret,
        secret_file,
        launched: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_comm::launch::rank_env;

    fn read(variables: &[(&str, &str)]) -> RankEnv {
        let map = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        rank_env(&map.collect()).unwrap().unwrap()
    }

    fn told(variables: &[(&str, &str)], launch: &Launch) -> String {
        from_environment(&read(variables), launch, 2).unwrap_err().message().unwrap()
    }

    #[test]
    fn what_is_missing_is_named() {
        let rank = [("RANK", "1"), ("WORLD_SIZE", "2")];
        assert!(told(&rank, &Launch::default()).contains("MASTER_ADDR and MASTER_PORT"));
        let mut far = rank.to_vec();
        far.extend([("MASTER_ADDR", "10.1.2.3"), ("MASTER_PORT", "29500")]);
        let secret = Secret::from_text("a secret of good length").ok();
        let launch = Launch { secret, bind: Some([127, 0, 0, 1].into()), ..Launch::default() };
        assert!(told(&far, &launch).contains("--bind: rank 0 is at 10.1.2.3:29500"));
        let mut nowhere = rank.to_vec();
        nowhere.extend([("MASTER_ADDR", "no such host"), ("MASTER_PORT", "29500")]);
        assert!(told(&nowhere, &launch).contains("'no such host'"));
    }

    #[test]
    fn a_rank_never_takes_itself_for_a_launcher() {
        let half = [(RANK.to_owned(), "1".to_owned())].into();
        let told = from_launcher(&half).unwrap_err().message().unwrap();
        assert!(told.contains("unset it"), "{told}");
        assert!(from_launcher(&Variables::new()).unwrap().is_none());
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
        let place = from_environment(&read(&variables), &launch, 4).unwrap();
        assert_eq!((place.rank, place.world, place.rendezvous.port()), (3, 4, 29500));
        assert!(place.launched.is_none() && place.bind.is_loopback());
    }
}
