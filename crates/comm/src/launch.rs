//! Which rank this process is, from what its launcher put into the environment.

use crate::error::CommError;
use std::collections::BTreeMap;

/// A process's place in a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its rank.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// Its number among the ranks of its host, where the launcher says so.
    pub local_rank: Option<u32>,
    /// The host on which rank 0 listens, where the launcher says so.
    pub address: Option<String>,
    /// The port on which it listens, where the launcher says so.
    pub port: Option<u16>,
    /// Whose variables were believed.
    pub launcher: &'static str,
}

/// One launcher's words for a place.
struct Dialect {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static [&'static str],
}

/// In the order in which they are believed. `torchrun`'s come first because people set them by
/// hand inside other launchers; Slurm's come last because they are set in every Slurm job, also
/// around an `mpirun`.
const DIALECTS: [Dialect; 4] = [
    Dialect {
        launcher: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
    },
    Dialect {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    },
    Dialect {
        launcher: "PMI",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
    },
    Dialect {
        launcher: "Slurm",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        local_rank: &["SLURM_LOCALID"],
    },
];

/// Reads a place from variables; with none of them set there is none.
///
/// The address and the port are `MASTER_ADDR` and `MASTER_PORT` under every launcher; under Slurm
/// the first host of the job's list stands in for a missing address.
pub fn place(variables: &BTreeMap<String, String>) -> Result<Option<Place>, CommError> {
    let Some(dialect) = DIALECTS.iter().find(|dialect| variables.contains_key(dialect.rank)) else {
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
    let mut local_rank = None;
    for name in dialect.local_rank {
        local_rank = local_rank.or(number(name)?);
    }
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
    Ok(Some(Place { rank, world, local_rank, address, port, launcher: dialect.launcher }))
}

/// The first host of Slurm's list: `a,b` or `gpu[03-07,11],login`.
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

    fn read(variables: &[(&str, &str)]) -> Result<Option<Place>, String> {
        let map = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        place(&map.collect()).map_err(|error| error.to_string())
    }

    fn found(variables: &[(&str, &str)]) -> Place {
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
        let wanted =
            Place { rank: 3, world: 8, local_rank: Some(1), address, port: Some(29500), launcher };
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
