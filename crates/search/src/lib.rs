//! Finds good strategies for a model on a cluster: proposes layouts, asks the simulator, keeps the best.
//!
//! The search costs nothing by itself. It enumerates layouts that a practitioner would try (tensor
//! parallelism inside a host, pipeline stages across hosts, the rest data-parallel), drops those whose model
//! state alone cannot fit, and simulates the others.

mod candidates;

pub use candidates::candidates;

use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::Cluster;
use paceline_sim::{Options, simulate};

/// What is asked.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Model,
    /// Where it should run.
    pub cluster: &'a Cluster,
    /// How many devices of it may be used.
    pub devices: u32,
    /// What every candidate has in common: batch, sequence, types.
    pub base: Strategy,
    /// How it is simulated.
    pub options: Options,
}

/// A strategy and what the simulator says of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// Time of an iteration.
    pub iteration: Seconds,
    /// Memory of the fullest rank.
    pub peak_bytes: Bytes,
    /// Whether that fits the device.
    pub fits: bool,
}

/// The outcome of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Best first: those that fit by time, then those that do not by memory.
    pub candidates: Vec<Candidate>,
    /// How many were simulated.
    pub considered: usize,
}

/// Simulates every candidate, telling `progress` how many of how many are done; stops early, with what there
/// is, when `progress` returns false.
pub fn search(request: &Request<'_>, mut progress: impl FnMut(usize, usize) -> bool) -> Found {
    let proposals = candidates(request);
    let mut found = Vec::new();
    let mut considered = 0;
    for strategy in &proposals {
        if !progress(considered, proposals.len()) {
            break;
        }
        considered += 1;
        let Ok(plan) = lower(request.model, strategy) else { continue };
        let Ok(outcome) = simulate(&plan, request.cluster, &request.options) else { continue };
        found.push(Candidate {
            strategy: strategy.clone(),
            iteration: outcome.iteration,
            peak_bytes: outcome.peak_bytes,
            fits: outcome.fits,
        });
    }
    found.sort_by(|a, b| {
        let by_time = || a.iteration.0.total_cmp(&b.iteration.0);
        let by_memory = || a.peak_bytes.cmp(&b.peak_bytes);
        match (a.fits, b.fits) {
            (true, true) => by_time().then_with(by_memory),
            (false, false) => by_memory().then_with(by_time),
            (true, false) => std::cmp::Ordering::Less,
            (false, true) => std::cmp::Ordering::Greater,
        }
    });
    Found { candidates: found, considered }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::DType;
    use paceline_plan::collective::Order;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Zero;
    use paceline_sim::cluster::preset;

    fn found(model: &str, cluster: &str, devices: u32, global_batch: u64) -> Found {
        let model = built_in::get(model).unwrap().unwrap();
        let cluster = preset::get(cluster).unwrap();
        let base = Strategy {
            global_batch,
            seq: model.seq,
            dtype: DType::Bf16,
            order: Order::Free,
            ..Default::default()
        };
        let options = Options::default();
        let request = Request { model: &model, cluster: &cluster, devices, base, options };
        search(&request, |_, _| true)
    }

    #[test]
    fn a_small_model_is_trained_by_data_parallelism() {
        let found = found("gpt2-124m", "dgx-a100", 8, 64);
        let best = &found.candidates[0];
        assert!(best.fits);
        assert_eq!((best.strategy.dp, best.strategy.tp, best.strategy.pp), (8, 1, 1));
        assert_eq!(found.considered, found.candidates.len());
    }

    #[test]
    fn a_large_model_is_cut_until_it_fits() {
        let found = found("gpt-39b", "dgx-a100:4", 32, 64);
        let best = &found.candidates[0];
        assert!(best.fits, "{best:?}");
        // 39 billion parameters have 600 GB of state: it must be cut at least eightfold, one way or another.
        let replicas = if best.strategy.zero == Zero::Parameters { best.strategy.dp } else { 1 };
        let cut = best.strategy.tp * best.strategy.pp * replicas;
        assert!(cut >= 8, "{:?}", best.strategy);
        let fitting = found.candidates.iter().filter(|c| c.fits);
        assert!(fitting.clone().all(|c| c.iteration.0 >= best.iteration.0));
    }

    #[test]
    fn stopping_early_keeps_what_there_is() {
        let model = built_in::get("gpt2-124m").unwrap().unwrap();
        let cluster = preset::get("dgx-a100").unwrap();
        let base = Strategy { global_batch: 8, seq: 128, ..Default::default() };
        let options = Options::default();
        let request = Request { model: &model, cluster: &cluster, devices: 8, base, options };
        let found = search(&request, |done, _| done < 3);
        assert_eq!(found.considered, 3);
    }
}
