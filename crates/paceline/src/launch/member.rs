//! A process that is one rank.

use super::Place;
use crate::failure::Failure;
use crate::flags::{Carrier, Launch, Training};
use paceline_comm::affinity;
use paceline_comm::process::{self, ProcessOptions, ProcessTransport, Wires};
use paceline_plan::ids::Rank;
use paceline_plan::program::Plan;
use paceline_plan::text;
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// A rank with its wires.
pub(crate) struct Member {
    /// Where it stands.
    pub place: Place,
    /// Its end of the wires.
    pub transport: ProcessTransport,
}

/// Finds the other ranks, which must have the same plan in mind.
pub(crate) fn connect(
    place: Place,
    launch: &Launch,
    plan: &Plan,
    training: &Training,
) -> Result<Member, Failure> {
    let world = plan.mesh.world();
    if place.world != world {
        return Err(Failure::flag(
            "--ranks",
            format!("the plan has {world} ranks, but {} were started", place.world),
        ));
    }
    let mut options = ProcessOptions::new(Rank(place.rank), world, place.hub, place.secret.clone());
    options.hub_in_rank_0 = place.launched.is_none();
    options.facts = facts(plan, training);
    options.bind = launch.bind;
    options.detection = launch.silence;
    // Cores that are shared out among ranks are enough for all.
    options.threads = training.threads_per_rank.map_or(1, std::num::NonZero::get);
    options.wires = match launch.transport {
        Carrier::Auto | Carrier::Thread => Wires::Auto,
        Carrier::SharedMemory => Wires::SharedMemory,
        Carrier::Tcp => Wires::Tcp,
    };
    let transport = process::connect(&options).map_err(|error| place.failed(error.into()))?;
    Ok(Member { place, transport })
}

impl Place {
    /// Keeps a rank that `paceline` itself has started to its share of the machine's cores, so that no
    /// two ranks wait for the same core while another idles. A rank that is to compute on more threads
    /// than its share has cores is left to the scheduler, and so is one that another launcher has
    /// started: that launcher binds, or has been told not to.
    pub(crate) fn keep_to_cores(&self, threads: NonZeroUsize, cores: usize) -> bool {
        let fits = threads.get().saturating_mul(self.world as usize) <= cores;
        self.launched.is_some() && fits && affinity::keep_to_share(self.rank, self.world)
    }

    /// How this process ends when the run has failed: the launcher, if there is one, says why.
    pub(crate) fn failed(&self, error: anyhow::Error) -> Failure {
        match self.launched {
            Some(_) => Failure::Told,
            None => Failure::Run(error),
        }
    }
}

impl Member {
    /// Leaves what this rank did last for whoever looks into the failure. Says where.
    pub(crate) fn write_flight_record(
        &self,
        error: &str,
        named: Option<&PathBuf>,
    ) -> Option<PathBuf> {
        let directory = self.place.launched.as_ref().or(named);
        let directory = directory.cloned().unwrap_or_else(std::env::temp_dir);
        let path = directory.join(format!("flight-{}.txt", self.place.rank));
        let text = format!("{error}\n\n{}", self.transport.flight_record());
        // The run has failed already; a record that cannot be written must not hide why.
        fs::create_dir_all(&directory).ok()?;
        crate::output::write(&path, text.as_bytes()).ok()?;
        Some(path)
    }
}

/// What all ranks must agree on, in words where words exist: ranks that differ are told in what.
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
    // Neither the number of threads nor a slow rank, the trace or the directory changes what is
    // computed.
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
        threads_per_rank: _,
        straggler: _,
        traced: _,
        out: _,
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
    ] {
        know(name.into(), value);
    }
    // Last in the order of names, so that a difference with a name of its own is told by that.
    know("whole plan".into(), format!("{:016x}", fingerprint(&text::print(plan))));
    facts
}

/// FNV-1a: two plans that differ by accident differ in it.
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
