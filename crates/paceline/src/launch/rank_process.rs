//! A process that runs one rank.

use super::RankIdentity;
use super::rank_identity::AGENT;
use crate::failure::Failure;
use crate::flags::{Launch, Training};
use anyhow::anyhow;
use paceline_comm::process::{self, ProcessOptions};
use paceline_comm::transport::mpi::MpiTransport;
use paceline_comm::{CommError, Transport, TransportKind, affinity, mpi};
use paceline_exec::private::PrivateDir;
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use paceline_plan::text;
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Beginning of the line in which a rank tells its agent why it failed.
pub(super) const CAUSE: &str = "failed: ";

/// A rank with its transport.
pub(crate) struct RankProcess {
    /// Its identity.
    pub place: RankIdentity,
    /// Its transport.
    pub transport: Box<dyn Transport>,
}

/// Connects to the other ranks, which must have the same plan.
pub(crate) fn connect(
    place: RankIdentity,
    launch: &Launch,
    plan: &Plan,
    training: &Training,
) -> Result<RankProcess, Failure> {
    let world = plan.mesh.world();
    if place.world != world {
        let started = place.world;
        return Err(Failure::flag(
            "--ranks",
            format!("the plan has {world} ranks, but {started} were started: start {world}"),
        ));
    }
    let mut options =
        ProcessOptions::new(Rank(place.rank), world, place.rendezvous, place.secret.clone());
    options.rendezvous_in_rank_0 = place.launched.is_none();
    options.facts = facts(plan, training);
    options.bind = place.bind;
    options.heartbeat_timeout = launch.heartbeat_timeout;
    options.encrypt = launch.encrypt;
    // By default the ranks divide the cores among themselves, so there are enough for all.
    options.threads = training.threads_per_rank.map_or(1, std::num::NonZero::get);
    options.transport = match launch.transport {
        // Ranks of an external launcher are processes.
        TransportKind::Auto | TransportKind::Thread => TransportKind::Auto,
        kind @ (TransportKind::Shm | TransportKind::Tcp | TransportKind::Mpi) => kind,
    };
    let transport = connect_by(&options).map_err(|error| place.failed(place.hint(error)))?;
    Ok(RankProcess { place, transport })
}

/// Connects by the transport that the options name.
pub(crate) fn connect_by(options: &ProcessOptions) -> Result<Box<dyn Transport>, CommError> {
    if options.transport != TransportKind::Mpi {
        return Ok(Box::new(process::connect(options)?));
    }
    let problem = "this process has not joined MPI: start it by mpirun";
    let mpi = mpi::joined().ok_or_else(|| CommError::Job { problem: problem.into() })?;
    Ok(Box::new(MpiTransport::connect(mpi, options)?))
}

impl RankIdentity {
    /// Pins a rank that a launcher or an agent of ours started to its share of the machine's cores. No two ranks
    /// then wait for the same core while another is idle. A rank with more threads than its share
    /// has cores is left to the scheduler. So is a rank of another launcher: that launcher binds
    /// it, or was configured not to.
    pub(crate) fn keep_to_cores(&self, threads: NonZeroUsize, cores: usize) -> bool {
        let here = self.local_world.unwrap_or(self.world);
        let fits = threads.get().saturating_mul(here as usize) <= cores;
        let ours = self.launched.is_some() || std::env::var_os(AGENT).is_some();
        ours && fits && affinity::pin_to_share(self.local_rank, here)
    }

    /// The error with what else the user should look at.
    fn hint(&self, error: CommError) -> anyhow::Error {
        let text = error.to_string();
        match &self.secret_file {
            Some(file) if text.contains("the secret of this job") => anyhow!(
                "{text}; it comes from {}, which must be the same file on all hosts: share the home \
                 directory, or give --secret-file",
                file.display()
            ),
            _ => error.into(),
        }
    }

    /// The failure of this process after a failed run; the launcher, if any, reports the cause.
    pub(crate) fn failed(&self, error: anyhow::Error) -> Failure {
        match self.launched {
            Some(_) => {
                if std::env::var_os(AGENT).is_some() {
                    // For the rank's log.
                    eprintln!("{CAUSE}{error}");
                }
                Failure::Reported
            }
            // Its text already contains its cause.
            None => Failure::Run(anyhow!("{error}")),
        }
    }
}

impl RankProcess {
    /// Writes this rank's flight record for the analysis of a failure; returns its path.
    pub(crate) fn write_flight_record(
        &self,
        error: &str,
        named: Option<&PathBuf>,
    ) -> Option<PathBuf> {
        let directory = self.place.launched.as_ref().or(named);
        // Without a directory of the run, none that others could have prepared.
        let directory = directory
            .cloned()
            .or_else(|| Some(PrivateDir::cache("flight").ok()?.path().to_owned()))?;
        let path = directory.join(format!("flight-{}.txt", self.place.rank));
        let text = format!("{error}\n\n{}", self.transport.flight_record()?);
        // The run has already failed; a record that cannot be written must not hide the cause.
        fs::create_dir_all(&directory).ok()?;
        crate::output::write(&path, text.as_bytes()).ok()?;
        Some(path)
    }
}

/// Facts that all ranks must agree on, by readable names: an error names the difference.
fn facts(plan: &Plan, training: &Training) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::new();
    let mut know = |name: String, value: String| facts.insert(name, value);
    know("version of paceline".into(), env!("CARGO_PKG_VERSION").into());
    know("model".into(), plan.model.clone());
    if let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(&plan.strategy) {
        for (name, value) in fields {
            know(format!("strategy's {name}"), value.to_string());
        }
    }
    // The number of threads, a straggler, the trace and the directories do not change the results.
    let Training {
        iterations,
        lr,
        warmup,
        schedule,
        min_lr,
        batch_scaling,
        loss_scale,
        weight_decay,
        clip,
        seed,
        distinct,
        federated,
        threads_per_rank: _,
        straggler: _,
        traced: _,
        out: _,
        overwrite: _,
        offload_dir: _,
    } = training;
    for (name, value) in [
        ("iterations", iterations.to_string()),
        ("learning rate", lr.to_string()),
        ("warmup", warmup.to_string()),
        ("schedule of the learning rate", schedule.to_string()),
        ("lowest learning rate", min_lr.to_string()),
        ("scaling with the batch", format!("{batch_scaling:?}")),
        ("first loss scale", loss_scale.to_string()),
        ("weight decay", weight_decay.to_string()),
        ("clip norm", format!("{clip:?}")),
        ("seed", seed.to_string()),
        ("different samples", format!("{distinct:?}")),
        ("clients", format!("{federated:?}")),
    ] {
        know(name.into(), value);
    }
    // Sorts last, so that a difference with its own name is reported first.
    know("whole plan".into(), format!("{:016x}", fingerprint(&text::print(plan))));
    facts
}

/// FNV-1a hash; plans that differ by accident have different hashes.
fn fingerprint(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    #[test]
    fn what_differs_has_a_name() {
        let model = built_in::get("mini").unwrap().unwrap();
        let of = |strategy: Strategy, training: &Training| {
            let strategy = Strategy { seq: 16, global_batch: 8, leaves: 2, ..strategy };
            facts(&lower(&model, &strategy).unwrap(), training)
        };
        let training = Training::default();
        let (a, b) = (
            of(Strategy { dp: 2, ..Strategy::default() }, &training),
            of(Strategy { dp: 2, micro_batch: 2, ..Strategy::default() }, &training),
        );
        let differing: Vec<_> = a.keys().filter(|key| a.get(*key) != b.get(*key)).collect();
        assert_eq!(differing, ["strategy's micro_batch", "whole plan"]);
        let other = Training { seed: 5, ..training };
        let c = of(Strategy { dp: 2, ..Strategy::default() }, &other);
        let differing: Vec<_> = a.keys().filter(|key| a.get(*key) != c.get(*key)).collect();
        assert_eq!(differing, ["seed"]);
    }

    #[test]
    fn the_fingerprint_is_the_published_one() {
        // FNV-1a's test vectors.
        assert_eq!(fingerprint(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fingerprint("a"), 0xaf63_dc4c_8601_ec8c);
    }
}
