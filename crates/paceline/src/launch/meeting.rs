//! Meeting point of an external launcher's ranks, and the secret by which they authenticate.
//!
//! The user may give both. Otherwise each launcher has its way: under `mpirun`, rank 0 makes them and
//! MPI carries them to the others. Elsewhere the address comes from the launcher, and the secret from a
//! file that only this user can read, mixed with the job's name.

use super::address::host_address;
use crate::failure::Failure;
use crate::flags::{Launch, SECRET};
use paceline_comm::launch::RankEnv;
use paceline_comm::mpi::Mpi;
use paceline_comm::{Secret, TransportKind};
use paceline_exec::private::PrivateDir;
use paceline_plan::collective::Library;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Meeting point of ranks.
pub(super) struct Meeting {
    /// Address of rank 0's rendezvous server.
    pub(super) rendezvous: SocketAddr,
    /// Secret of the job.
    pub(super) secret: Secret,
    /// File that the secret was made from, if neither the user nor a launcher gave one.
    pub(super) secret_file: Option<PathBuf>,
}

/// A meeting as rank 0 writes it for the others.
#[derive(Serialize, Deserialize)]
struct Shared {
    rendezvous: SocketAddr,
    secret: String,
}

/// Finds out where the ranks of the launcher meet. Under an MPI this is collective.
pub(super) fn meeting(env: &RankEnv, launch: &Launch, world: u32) -> Result<Meeting, Failure> {
    let by = env.launcher;
    let wrong = |text: String| Failure::flag("--launch", text);
    let uses_mpi = launch.transport == TransportKind::Mpi || launch.library == Some(Library::Mpi);
    let known = env.address.as_deref().zip(env.port);
    if uses_mpi || env.is_mpi() && (known.is_none() || launch.secret.is_none()) {
        let mpi = Mpi::join(env).map_err(|error| match (uses_mpi, env.is_mpi()) {
            (true, false) => wrong(format!("{by} started the ranks, and MPI does not join them: {error}")),
            (true, true) => wrong(error.to_string()),
            (false, _) => wrong(format!(
                "{error}; without MPI, {by}'s ranks meet if MASTER_ADDR, MASTER_PORT and {SECRET} are set"
            )),
        })?;
        let met = by_mpi(mpi, env, launch, world).map_err(wrong)?;
        if !uses_mpi {
            paceline_comm::mpi::leave();
        }
        return Ok(met);
    }
    let Some((address, port)) = known else {
        return Err(wrong(format!(
            "{by} gives rank {} but not the address of rank 0: set MASTER_ADDR and MASTER_PORT",
            env.rank
        )));
    };
    let rendezvous = resolve(address, port).ok_or_else(|| {
        wrong(format!("rank 0 is to be on '{address}', which is not a host that can be found"))
    })?;
    let rendezvous = match rendezvous.ip().is_loopback() && is_own_name(address) {
        // Debian gives a host's own name to the loopback, where other hosts find no listener.
        true => SocketAddr::new(own_address(launch).unwrap_or(rendezvous.ip()), port),
        false => rendezvous,
    };
    if let Some(secret) = launch.secret.clone() {
        return Ok(Meeting { rendezvous, secret, secret_file: None });
    }
    let job = env.job.clone().unwrap_or_else(|| rendezvous.to_string());
    let (secret, path) = user_secret().map_err(|error| {
        wrong(format!(
            "{by} started the ranks, which need a shared secret, and {error}: give --secret-file FILE, or \
             set {SECRET} in their environment"
        ))
    })?;
    Ok(Meeting { rendezvous, secret: secret.for_job(&job), secret_file: Some(path) })
}

/// Lets MPI carry what rank 0 decides to the others.
fn by_mpi(mpi: &Mpi, env: &RankEnv, launch: &Launch, world: u32) -> Result<Meeting, String> {
    let own = match env.rank {
        0 => {
            let one_host = env.local_world == Some(world);
            let address = match (&env.address, launch.bind) {
                (Some(address), _) => {
                    let found = resolve(address, 0).map(|found| found.ip());
                    found.ok_or_else(|| {
                        format!("MASTER_ADDR is '{address}', which cannot be found")
                    })?
                }
                (None, Some(bind)) if !bind.is_unspecified() => bind,
                (None, _) if one_host => Ipv4Addr::LOCALHOST.into(),
                (None, _) => host_address()?,
            };
            let port = env.port.map_or_else(|| free_port(address), Ok)?;
            let secret = match &launch.secret {
                Some(secret) => secret.clone(),
                None => Secret::random().map_err(|error| error.to_string())?,
            };
            let secret = secret.as_text().to_owned();
            let shared = Shared { rendezvous: SocketAddr::new(address, port), secret };
            serde_json::to_string(&shared).map_err(|error| error.to_string())?
        }
        _ => String::new(),
    };
    let text = mpi.share(&own).map_err(|error| error.to_string())?;
    let malformed = |_| "rank 0 sent something else than where the ranks meet".to_owned();
    let Shared { rendezvous, secret } = serde_json::from_str(&text).map_err(malformed)?;
    let secret = Secret::from_text(&secret).map_err(|error| error.to_string())?;
    Ok(Meeting { rendezvous, secret, secret_file: None })
}

/// Address of this host for others, as the user names it or else as it is likely.
fn own_address(launch: &Launch) -> Option<IpAddr> {
    launch.bind.filter(|bind| !bind.is_unspecified()).or_else(|| host_address().ok())
}

/// Returns true if a name is that of this host, with or without its domain.
fn is_own_name(name: &str) -> bool {
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let is_address = name.parse::<IpAddr>().is_ok();
    !is_address && !name.eq_ignore_ascii_case("localhost") && short(name) == short(&own)
}

/// A port of this host that is free now.
fn free_port(address: IpAddr) -> Result<u16, String> {
    let listener = TcpListener::bind((address, 0)).and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).map_err(|error| {
        format!(
            "rank 0 cannot listen on {address}: {error}; --interface or --bind name another address"
        )
    })
}

/// Address of a host. Slurm knows addresses of nodes whose names no other service knows.
pub(super) fn resolve(host: &str, port: u16) -> Option<SocketAddr> {
    let by_name = |host: &str| {
        let mut found: Vec<_> = (host, port).to_socket_addrs().ok()?.collect();
        found.sort_by_key(SocketAddr::is_ipv6);
        found.first().copied()
    };
    by_name(host).or_else(|| {
        std::env::var_os("SLURM_JOB_ID")?;
        let told =
            Command::new("scontrol").args(["show", "node", "--oneliner", host]).output().ok()?;
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        by_name(told.split_whitespace().find_map(|field| field.strip_prefix("NodeAddr="))?)
    })
}

/// The secret of this user, from which those of jobs are made; created if there is none.
pub(super) fn user_secret() -> Result<(Secret, PathBuf), String> {
    let home =
        |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let config = home("XDG_CONFIG_HOME").or_else(|| Some(home("HOME")?.join(".config")));
    let config = config.ok_or("neither XDG_CONFIG_HOME nor HOME is set")?;
    user_secret_in(&config)
}

fn user_secret_in(config: &Path) -> Result<(Secret, PathBuf), String> {
    const NAME: &str = "secret";
    let directory = PrivateDir::at(config, "launch").map_err(|error| error.to_string())?;
    let path = directory.path().join(NAME);
    let problem = |error: String| format!("{} cannot be used: {error}", path.display());
    let fresh = Secret::random().map_err(|error| error.to_string())?;
    let text = directory.create_once(NAME, fresh.as_text().as_bytes());
    let text = text.map_err(|error| problem(error.to_string()))?;
    let text = String::from_utf8_lossy(&text);
    let secret = Secret::from_text(&text).map_err(|error| problem(error.to_string()))?;
    Ok((secret, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_of_a_user_find_the_same_secret() {
        let home = paceline_exec::private::temporary_directory("paceline-secret").unwrap();
        let found: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> =
                (0..8).map(|_| scope.spawn(|| user_secret_in(&home).unwrap().0)).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(found.windows(2).all(|pair| pair[0] == pair[1]));
        let (_, path) = user_secret_in(&home).unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(user_secret_in(&home).unwrap_err().contains("other users"));
        std::fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn a_host_knows_its_name() {
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert!(is_own_name(&own) || own == "localhost");
        assert!(!is_own_name("localhost") && !is_own_name("127.0.1.1"));
        assert!(!is_own_name(&format!("not-{own}")));
    }

    #[test]
    fn hosts_are_found_by_name() {
        assert!(resolve("localhost", 7).unwrap().ip().is_loopback());
        assert_eq!(resolve("no such host", 7), None);
    }
}
