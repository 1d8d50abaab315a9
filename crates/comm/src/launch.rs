//! Rank and world size of this process, from the launcher's environment variables.

use crate::error::CommError;
use std::collections::BTreeMap;

/// Rank of a process in a job, as set by its launcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankEnv {
    /// Rank of the process.
    pub rank: u32,
    /// Number of ranks, if the launcher sets it.
    pub world: Option<u32>,
    /// Index among the ranks of its host, if the launcher sets it.
    pub local_rank: Option<u32>,
    /// Number of ranks on its host, if the launcher sets it and it is the same on all hosts.
    pub local_world: Option<u32>,
    /// Host of rank 0's listener, if the launcher sets it.
    pub address: Option<String>,
    /// Port of rank 0's listener, if the launcher sets it or it follows from the job's number.
    pub port: Option<u16>,
    /// Name of the job, equal on all ranks and for no other job at the same time, if the launcher
    /// gives enough to make one.
    pub job: Option<String>,
    /// Launcher whose variables were used.
    pub launcher: &'static str,
}

impl RankEnv {
    /// Returns true if the launcher is one of MPI's: its processes can reach each other by MPI.
    pub fn is_mpi(&self) -> bool {
        matches!(self.launcher, OPEN_MPI | PMI)
    }
}

const OPEN_MPI: &str = "Open MPI";
const PMI: &str = "PMI";
const TORCHRUN: &str = "torchrun";
const SLURM: &str = "Slurm";
const KUBEFLOW: &str = "Kubeflow";
const KUBERNETES: &str = "Kubernetes";

/// Names of one launcher's environment variables.
struct LauncherVars {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
}

/// Launchers in order of precedence. `torchrun`'s variables come first because people set them by
/// hand inside other launchers. Slurm's come after MPI's because they are set in every Slurm job, also
/// around an `mpirun`; only a step's own count of tasks means that `srun` started this process, and
/// not the job's script. Those of pods come last: an engine inside a pod knows more.
const LAUNCHERS: [LauncherVars; 6] = [
    LauncherVars {
        launcher: TORCHRUN,
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
    },
    LauncherVars {
        launcher: OPEN_MPI,
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    LauncherVars {
        launcher: PMI,
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
    },
    LauncherVars {
        launcher: SLURM,
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_rank: &["SLURM_LOCALID"],
        local_world: &["SLURM_NTASKS_PER_NODE"],
    },
    LauncherVars {
        launcher: KUBEFLOW,
        rank: "PET_NODE_RANK",
        world: "PET_NNODES",
        local_rank: &[],
        local_world: &["PET_NPROC_PER_NODE"],
    },
    LauncherVars {
        launcher: KUBERNETES,
        rank: "JOB_COMPLETION_INDEX",
        world: "WORLD_SIZE",
        local_rank: &[],
        local_world: &[],
    },
];

/// Environment variables of a process.
pub type Variables = BTreeMap<String, String>;

/// Reads rank and world size from `variables`; returns `None` if no launcher's variables are set.
///
/// The address and the port are `MASTER_ADDR` and `MASTER_PORT`, or the same with `PET_`, under every
/// launcher. Under Slurm the first host of the step's list replaces a missing address, and a port that
/// follows from the numbers of job and step a missing port. In pods, which have an address each, the
/// port is 29500 if none is set.
pub fn rank_env(variables: &Variables) -> Result<Option<RankEnv>, CommError> {
    let started = |vars: &&LauncherVars| {
        let complete = vars.launcher != SLURM || variables.contains_key(vars.world);
        complete && variables.contains_key(vars.rank)
    };
    let Some(vars) = LAUNCHERS.iter().find(started) else {
        return unknown(variables).map_or(Ok(None), Err);
    };
    let rank = number(variables, vars.rank)?.unwrap_or(0);
    let world = number(variables, vars.world)?;
    if world.is_none() && vars.launcher != KUBERNETES {
        let (a, b) = (vars.rank, vars.world);
        return Err(problem(format!("{a} is set but {b} is not: both are needed")));
    }
    if let Some(world) = world.filter(|world| rank >= *world) {
        let (a, b) = (vars.rank, vars.world);
        return Err(problem(format!("{a} is {rank}, but {b} is {world}: ranks count from 0")));
    }
    let first = |names: &[&str]| -> Result<Option<u32>, CommError> {
        let found = |found: Option<u32>, name: &&str| Ok(found.or(number(variables, name)?));
        names.iter().try_fold(None, found)
    };
    let mut env = RankEnv {
        rank,
        world,
        local_rank: first(vars.local_rank)?,
        local_world: if vars.launcher == KUBEFLOW { None } else { first(vars.local_world)? },
        address: master_address(variables),
        port: master_port(variables)?,
        job: None,
        launcher: vars.launcher,
    };
    match vars.launcher {
        TORCHRUN => torchrun(variables, &mut env),
        SLURM => slurm(variables, &mut env),
        KUBEFLOW => kubeflow(variables, &mut env)?,
        KUBERNETES => env.port = env.port.or(Some(USUAL_PORT)),
        _ => {}
    }
    if env.job.is_none()
        && let (Some(address), Some(port)) = (&env.address, env.port)
    {
        env.job = Some(format!("{address}:{port}"));
    }
    Ok(Some(env))
}

/// Refusal of a launcher that gives a rank and no number of ranks.
fn unknown(variables: &Variables) -> Option<CommError> {
    let rank = variables.get("PMIX_RANK")?;
    Some(problem(format!(
        "PMIX_RANK is {rank}, but no variable says how many ranks there are: set RANK and WORLD_SIZE, or \
         use --launch local"
    )))
}

/// Port that `torchrun` and pods use if none is set.
pub const USUAL_PORT: u16 = 29500;

/// The address of rank 0 that every launcher's user can set.
pub fn master_address(variables: &Variables) -> Option<String> {
    let found = variables.get("MASTER_ADDR").or_else(|| variables.get("PET_MASTER_ADDR"));
    found.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The port of rank 0 that every launcher's user can set.
pub fn master_port(variables: &Variables) -> Result<Option<u16>, CommError> {
    for name in ["MASTER_PORT", "PET_MASTER_PORT"] {
        if let Some(text) = variables.get(name) {
            let port = text.trim().parse().ok().filter(|port| *port != 0);
            let wrong = || problem(format!("{name} is '{text}', which is not a port"));
            return port.ok_or_else(wrong).map(Some);
        }
    }
    Ok(None)
}

/// A variable's number, if it is set.
pub fn number(variables: &Variables, name: &str) -> Result<Option<u32>, CommError> {
    let Some(text) = variables.get(name) else { return Ok(None) };
    let wrong = || problem(format!("{name} is '{text}', which is not a number"));
    text.trim().parse().map(Some).map_err(|_| wrong())
}

/// The port that `torchrun` names is taken by its own store, if its agent keeps one.
fn torchrun(variables: &Variables, env: &mut RankEnv) {
    let get = |name: &str| variables.get(name).map_or("", String::as_str);
    if variables.contains_key("TORCHELASTIC_RUN_ID") {
        let parts = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"].map(get);
        let job = parts.join("/");
        if get("TORCHELASTIC_USE_AGENT_STORE").eq_ignore_ascii_case("true") {
            env.port = Some(port_of(&job));
        }
        env.job = Some(job);
    }
}

fn slurm(variables: &Variables, env: &mut RankEnv) {
    let job = slurm_job(variables);
    env.port = env.port.or_else(|| job.as_deref().map(port_of));
    env.job = job;
    env.address = env.address.take().or_else(|| slurm_first_host(variables));
    if let Some(tasks) = variables.get("SLURM_STEP_TASKS_PER_NODE") {
        env.local_world = equal_tasks(tasks);
    }
}

/// Name of a Slurm job's step, also after a requeue unlike any other.
pub fn slurm_job(variables: &Variables) -> Option<String> {
    let get = |name: &str| variables.get(name).map_or("", String::as_str);
    let job = variables.get("SLURM_JOB_ID").or_else(|| variables.get("SLURM_JOBID"))?;
    let (cluster, step) = (get("SLURM_CLUSTER_NAME"), get("SLURM_STEP_ID"));
    Some(format!("{cluster}/{job}.{step}/{}", get("SLURM_RESTART_COUNT")))
}

/// First host of a Slurm step, which runs its first task.
pub fn slurm_first_host(variables: &Variables) -> Option<String> {
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    names.iter().find_map(|name| first_host(variables.get(*name)?))
}

/// Tasks of every host, from Slurm's `2(x4)`; `None` if they differ.
fn equal_tasks(list: &str) -> Option<u32> {
    let mut counts = list.split(',').map(|part| part.split('(').next()?.trim().parse().ok());
    let first = counts.next()??;
    counts.all(|count| count == Some(first)).then_some(first)
}

/// One process of a pod can be a rank only if it is the pod's only one.
fn kubeflow(variables: &Variables, env: &mut RankEnv) -> Result<(), CommError> {
    env.port = env.port.or(Some(USUAL_PORT));
    let each = variables.get("PET_NPROC_PER_NODE").map_or("1", String::as_str).trim();
    match each {
        "1" => Ok(()),
        _ => Err(problem(format!(
            "PET_NPROC_PER_NODE is {each}, but one process of a pod can be only one rank: set it to 1, or \
             start a process per rank with RANK and WORLD_SIZE"
        ))),
    }
}

/// Port for a job's rendezvous, below those that systems give to outgoing connections.
pub fn port_of(job: &str) -> u16 {
    const FIRST: u64 = 10_240;
    const PORTS: u64 = 20_000;
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325, step);
    (FIRST + (hash ^ hash >> 32) % PORTS) as u16
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
            world: Some(8),
            local_rank: Some(1),
            address,
            port: Some(29500),
            job: Some("10.0.0.7:29500".into()),
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
        assert_eq!((place.launcher, place.rank, place.world), ("Open MPI", 0, Some(2)));
        assert!(place.is_mpi() && place.port.is_none());
        let place = found(&[("PMI_RANK", "4"), ("PMI_SIZE", "5"), ("MPI_LOCALRANKID", "2")]);
        assert_eq!((place.rank, place.local_rank, place.port), (4, Some(2), None));
        assert_eq!(read(&[("PATH", "/bin")]), Ok(None));
    }

    #[test]
    fn a_step_of_slurm_has_a_host_a_port_and_a_name() {
        let slurm = [
            ("SLURM_PROCID", "6"),
            ("SLURM_NTASKS", "9"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_ID", "1234"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x4)"),
            ("SLURM_JOB_NODELIST", "gpu[03-07,11],login"),
        ];
        let place = found(&slurm);
        assert_eq!((place.rank, place.address.as_deref()), (6, Some("gpu03")));
        assert_eq!((place.world, place.local_world), (Some(8), Some(2)));
        let mut requeued = slurm.to_vec();
        requeued.push(("SLURM_RESTART_COUNT", "1"));
        let again = found(&requeued);
        assert!(again.job.is_some() && again.job != place.job);
        let port = place.port.unwrap();
        assert!((10_240..30_240).contains(&port), "{port}");
        // The job's script is not a rank, although Slurm numbers it.
        assert_eq!(read(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(None));
        assert_eq!(equal_tasks("3,2(x2)"), None);
        assert_eq!(equal_tasks("2,2(x2)"), Some(2));
    }

    #[test]
    fn pods_are_ranks_if_they_have_one_process() {
        let pod = [("JOB_COMPLETION_INDEX", "3"), ("MASTER_ADDR", "set-job-0-0.set")];
        let place = found(&pod);
        assert_eq!((place.rank, place.world, place.port), (3, None, Some(29500)));
        let mut pet = vec![
            ("PET_NODE_RANK", "1"),
            ("PET_NNODES", "2"),
            ("PET_MASTER_ADDR", "trainer-node-0-0.trainer"),
            ("PET_MASTER_PORT", "29400"),
            ("JOB_COMPLETION_INDEX", "1"),
        ];
        let place = found(&pet);
        assert_eq!((place.launcher, place.port), ("Kubeflow", Some(29400)));
        assert_eq!(place.job.as_deref(), Some("trainer-node-0-0.trainer:29400"));
        pet.push(("PET_NPROC_PER_NODE", "4"));
        assert!(read(&pet).unwrap_err().contains("set it to 1"));
    }

    #[test]
    fn the_store_of_torchrun_keeps_its_port() {
        let torchrun = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "job7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ];
        assert_ne!(found(&torchrun).port, Some(29500));
        assert_eq!(found(&torchrun[..5]).port, Some(29500));
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
        assert!(error(&[("PMIX_RANK", "0")]).contains("how many ranks"));
    }
}
