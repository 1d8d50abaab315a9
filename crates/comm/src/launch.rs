//! Rank and world size of this process, from the launcher's environment variables.

use crate::error::CommError;
use std::collections::BTreeMap;

/// Rank of a process in a job, as set by its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank of the process.
    pub rank: u32,
    /// Number of ranks.
    pub world: u32,
    /// Index among the ranks of its host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Number of ranks on its host, if the launcher sets it.
    pub local_world: Option<u32>,
    /// Host of rank 0's listener, if the launcher sets it.
    pub address: Option<String>,
    /// Port of rank 0's listener, if the launcher sets it.
    pub port: Option<u16>,
    /// Launcher whose variables were used.
    pub launcher: &'static str,
}

/// Names of one launcher's environment variables.
struct LauncherVars {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

/// Launchers in order of precedence. `torchrun`'s variables come first because people set them by
/// hand inside other launchers. Slurm's come last because they are set in every Slurm job, also
/// around an `mpirun`.
const LAUNCHERS: [LauncherVars; 4] = [
    LauncherVars {
        launcher: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
    },
    LauncherVars {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    LauncherVars {
        launcher: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    LauncherVars {
        launcher: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
        local_world: &["SLURM_NTASKS_PER_NODE"],
    },
];

/// Reads rank and world size from `variables`; returns `None` if no launcher's variables are set.
///
/// The address and the port are `MASTER_ADDR` and `MASTER_PORT` under every launcher. Under Slurm
/// the first host of the job's list replaces a missing address.
pub fn rank_env(variables: &BTreeMap<String, String>) -> Result<Option<RankEnv>, CommError> {
    let Some(dialect) = LAUNCHERS.iter().find(|dialect| variables.contains_key(dialect.rank))
    else {
        return Ok(None);
    };
    let number = |name: &str| -> Result<Option<u32>, CommError> {
        let Some(text) = variables.get(name) else { return Ok(None) };
        let wrong = || problem(format!("{name} is '{text}', which is not a number"));
        text.trim().parse().map(Some).map_err(|_| wrong())
    };
    let rank = number(dialect.rank)?.unwrap_or(0);
    let world = number(dialect.world)?.ok_or_else(|| {
        problem(format!("{} is set but {} is not: both are needed", dialect.rank, dialect.world))
    })?;
    if rank >= world {
        let (a, b) = (dialect.rank, dialect.world);
        return Err(problem(format!("{a} is {rank}, but {b} is {world}: ranks count from 0")));
    }
    let first = |names: &[&str]| -> Result<Option<u32>, CommError> {
        names.iter().try_fold(None, |found: Option<u32>, name| Ok(found.or(number(name)?)))
    };
    let (local_rank, local_world) = (first(dialect.local_rank)?, first(dialect.local_world)?);
    let port = match variables.get("MASTER_PORT") {
        None => None,
        Some(text) => {
            let port = text.trim().parse().ok().filter(|port| *port != 0);
            let wrong = || problem(format!("MASTER_PORT is '{text}', which is not a port"));
            Some(port.ok_or_else(wrong)?)
        }
    };
    let address = variables.get("MASTER_ADDR").map(|text| text.trim().to_owned());
    let address = address.filter(|text| !text.is_empty()).or_else(|| {
        let list = (dialect.launcher == "Slurm")
            .then(|| variables.get("SLURM_JOB_NODELIST").or(variables.get("SLURM_NODELIST")));
        first_host(list??)
    });
    let launcher = dialect.launcher;
    Ok(Some(RankEnv { rank, world, local_rank, local_world, address, port, launcher }))
}

/// First host of Slurm's list: `a,b` or `gpu[03-07,11],login`.
fn first_host(list: &str) -> Option<String> {
    let host = match list.find(['[', ',']) {
        Some(at) if list[at..].starts_with('[') => {
            let inside = &list[at + 1..];
            let number = &inside[..inside.find(['-', ',', ']'])?];
            let after = &inside[inside.find(']')? + 1..];
            let suffix = &after[..after.find(',').unwrap_or(after.len())];
            format!("{}{number}{suffix}", &list[..at])
        }
        Some(at) => list[..at].to_owned(),
        None => list.to_owned(),
    };
    Some(host).filter(|host| !host.is_empty())
}

fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<RankEnv>, String> {
        let map = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        rank_env(&map.collect()).map_err(|error| error.to_string())
    }

    fn found(variables: &[(&str, &str)]) -> RankEnv {
        read(variables).unwrap().unwrap()
    }

    #[test]
    fn every_launcher_is_understood() {
        let place = found(&[
            ("RANK", "3"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "10.0.0.7"),
            ("MASTER_PORT", "29500"),
        ]);
        let address = Some("10.0.0.7".to_owned());
        let launcher = "torchrun";
        let wanted = RankEnv {
            local_world: None,
            rank: 3,
            world: 8,
            local_rank: Some(1),
            address,
            port: Some(29500),
            launcher,
        };
        assert_eq!(place, wanted);
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("SLURM_PROCID", "9"),
        ];
        let place = found(&open_mpi);
        assert_eq!((place.launcher, place.rank, place.world), ("Open MPI", 0, 2));
        let place = found(&[("PMI_RANK", "4"), ("PMI_SIZE", "5"), ("MPI_LOCALRANKID", "2")]);
        assert_eq!((place.rank, place.local_rank, place.port), (4, Some(2), None));
        let slurm = [
            ("SLURM_PROCID", "6"),
            ("SLURM_NTASKS", "7"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_NODELIST", "gpu[03-07,11],login"),
        ];
        let place = found(&slurm);
        assert_eq!((place.rank, place.address.as_deref()), (6, Some("gpu03")));
        assert_eq!(read(&[("PATH", "/bin")]), Ok(None));
    }

    #[test]
    fn slurm_lists_begin_with_a_host() {
        let first = |list| first_host(list);
        assert_eq!(first("a,b,c").as_deref(), Some("a"));
        assert_eq!(first("solo").as_deref(), Some("solo"));
        assert_eq!(first("rack[2,5]-x,b").as_deref(), Some("rack2-x"));
        assert_eq!(first("open[1-"), None);
        assert_eq!(first(""), None);
    }

    #[test]
    fn nonsense_is_named() {
        let error = |variables: &[(&str, &str)]| read(variables).unwrap_err();
        assert_eq!(
            error(&[("RANK", "x"), ("WORLD_SIZE", "2")]),
            "RANK is 'x', which is not a number"
        );
        assert!(error(&[("RANK", "0")]).contains("WORLD_SIZE is not"));
        assert!(error(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("ranks count from 0"));
        assert!(error(&[("RANK", "0"), ("WORLD_SIZE", "0")]).contains("WORLD_SIZE is 0"));
        let port = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "99999")];
        assert_eq!(error(&port), "MASTER_PORT is '99999', which is not a port");
    }
}
