//! Strategy search for a model on a cluster: proposes layouts, simulates them and ranks the
//! results.
//!
//! The search enumerates layouts that a practitioner would try: tensor parallelism inside a host,
//! pipeline stages across hosts, the rest data-parallel. It drops those whose model state alone
//! cannot fit and simulates the others. Simulation dominates its cost.

mod candidates;

pub use candidates::candidates;

use paceline_plan::lower::lower_on;
use paceline_plan::model::Model;
use paceline_plan::strategy::Strategy;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::cluster::Cluster;
use paceline_sim::{Options, simulate};

/// Input of a search.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The model.
    pub model: &'a Model,
    /// The cluster to run on.
    pub cluster: &'a Cluster,
    /// Number of devices that may be used.
    pub devices: u32,
    /// Settings common to all candidates: batch, sequence, dtypes.
    pub base: Strategy,
    /// Simulation options.
    pub options: Options,
}

/// A strategy and its simulation results.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// Iteration time.
    pub iteration: Seconds,
    /// Memory of the rank with the largest footprint.
    pub peak_bytes: Bytes,
    /// True if that fits the device.
    pub fits: bool,
}

/// Result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct SearchResult {
    /// Candidates, best first: those that fit by time, then those that do not by memory.
    pub candidates: Vec<Candidate>,
    /// Number of candidates tried.
    pub considered: usize,
}

/// Simulates every candidate and calls `progress` with the numbers of finished and of all
/// candidates. Stops early with partial results if `progress` returns false.
pub fn search(
    request: &Request<'_>,
    mut progress: impl FnMut(usize, usize) -> bool,
) -> SearchResult {
    let proposals = candidates(request);
    let fabric = request.cluster.fabric_with(&request.options.profile);
    let mut found = Vec::new();
    let mut considered = 0;
    for strategy in &proposals {
        if !progress(considered, proposals.len()) {
            break;
        }
        considered += 1;
        let Ok(plan) = lower_on(request.model, strategy, &fabric) else { continue };
        let Ok(outcome) = simulate(&plan, request.cluster, &request.options) else { continue };
        let (seconds, bytes, fits) = (outcome.iteration.0, outcome.peak_bytes.0, outcome.fit.fits);
        tracing::debug!(target: "search", considered, seconds, bytes, fits, "simulated");
        found.push(Candidate {
            strategy: strategy.clone(),
            iteration: outcome.iteration,
            peak_bytes: outcome.peak_bytes,
            fits: outcome.fit.fits,
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
    SearchResult { candidates: found, considered }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::DType;
    use paceline_plan::collective::SummationOrder;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Zero;
    use paceline_sim::cluster::preset;

    fn found(model: &str, cluster: &str, devices: u32, global_batch: u64) -> SearchResult {
        let model = built_in::get(model).unwrap().unwrap();
        let cluster = preset::get(cluster).unwrap();
        let base = Strategy {
            global_batch,
            seq: model.seq,
            dtype: DType::Bf16,
            order: SummationOrder::Free,
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
        // 39 billion parameters have 600 GB of state, which must be sharded at least eightfold.
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
