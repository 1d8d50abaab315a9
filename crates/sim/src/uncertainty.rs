//! Uncertainty of predictions, from runs with measurements.
//!
//! A prediction's kind is its software profile, the family of its model and its built-in cluster.
//! Where at least [`ErrorBand::RUNS`] runs of a kind were measured, the band that is expected to
//! contain four of five follows from them by leave-one-out: every run is compared with the others'
//! median, so that none shapes the centre from which its own distance is taken. Elsewhere no
//! measurement supports a band: it is as wide as the runs of all other kinds together.
//!
//! The bands here are those of `validation/`; a test recomputes them. They come from runs that were
//! visible while the model was developed; others may deviate more.

use crate::cluster::{Cluster, Dimension, preset};
use crate::profile::Profile;
use paceline_plan::graph::{CostClass, Product};
use paceline_plan::program::Plan;
use serde::Serialize;

/// Factors on a predicted time that bound the measured one in four of five cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ErrorBand {
    /// Lower bound of measured over predicted.
    pub low: f64,
    /// Upper bound of measured over predicted.
    pub high: f64,
    /// Number of measured runs of this kind; 0 if the band follows from other kinds.
    pub runs: u32,
}

/// Fraction of measurements inside the band.
const INSIDE: f64 = 0.8;

/// Fraction of all runs inside the band of kinds without runs of their own.
const OF_OTHERS: f64 = 0.9;

/// Families of models, which differ in what limits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Transformers without experts.
    Dense,
    /// Transformers with experts.
    Experts,
    /// All others: images, clicks, networks without attention.
    Other,
}

impl Family {
    /// Family of a plan's model, by its operators.
    pub fn of(plan: &Plan) -> Self {
        let mut family = Self::Other;
        for op in plan.templates.iter().flat_map(|template| &template.ops) {
            match op.kind.cost_class() {
                CostClass::Product(Product::Grouped { .. }) => return Self::Experts,
                CostClass::Attention { .. } => family = Self::Dense,
                CostClass::Product(_)
                | CostClass::RowWise(_)
                | CostClass::ElementWise(_)
                | CostClass::Lookup { .. }
                | CostClass::Permute(_)
                | CostClass::Reduction => {}
            }
        }
        family
    }
}

/// A kind of which enough runs were measured.
struct Measured {
    profile: &'static str,
    family: Family,
    clusters: &'static [&'static str],
    band: ErrorBand,
}

/// All such kinds.
const MEASURED: [Measured; 5] = [
    Measured {
        profile: Profile::MEGATRON_2021.name,
        family: Family::Dense,
        clusters: &["dgx-a100"],
        band: ErrorBand { low: 0.911, high: 1.039, runs: 17 },
    },
    Measured {
        profile: Profile::MEGATRON_BRIDGE.name,
        family: Family::Dense,
        clusters: &["dgx-h100", "dgx-b200", "gb200-nvl72", "gb300-nvl72"],
        band: ErrorBand { low: 0.840, high: 1.200, runs: 11 },
    },
    Measured {
        profile: Profile::MEGATRON_BRIDGE.name,
        family: Family::Experts,
        clusters: &["dgx-h100", "dgx-b200", "gb200-nvl72"],
        band: ErrorBand { low: 0.750, high: 2.761, runs: 8 },
    },
    Measured {
        profile: Profile::TORCHTITAN_2024.name,
        family: Family::Dense,
        clusters: &["dgx-h100"],
        band: ErrorBand { low: 0.817, high: 1.352, runs: 8 },
    },
    Measured {
        profile: Profile::LLM_FOUNDRY.name,
        family: Family::Dense,
        clusters: &["dgx-a100", "dgx-a100-40gb", "dgx-h100"],
        band: ErrorBand { low: 0.907, high: 1.183, runs: 10 },
    },
];

/// Band where no runs were measured: nine of ten runs of any kind lie within.
const OTHERS: ErrorBand = ErrorBand { low: 0.74, high: 1.35, runs: 0 };

/// Error band of predictions of a plan under a profile on a cluster.
pub fn error_band(profile: &Profile, plan: &Plan, cluster: &Cluster) -> ErrorBand {
    let family = Family::of(plan);
    let kind = MEASURED.iter().find(|kind| {
        kind.profile == profile.name
            && kind.family == family
            && kind.clusters.iter().any(|name| is_built_in(cluster, name))
    });
    kind.map_or(OTHERS, |kind| kind.band)
}

/// Returns true if a cluster is the built-in one of this name, of any size and without changes.
fn is_built_in(cluster: &Cluster, name: &str) -> bool {
    let Ok(built_in) = preset::get(name) else { return false };
    let same = |(own, other): (&Dimension, &Dimension)| {
        Dimension { size: own.size, ..other.clone() } == *own
    };
    cluster.device == built_in.device
        && cluster.host_ports == built_in.host_ports
        && cluster.measured.is_none()
        && cluster.is_homogeneous()
        && cluster.dimensions.len() == built_in.dimensions.len()
        && cluster.dimensions.iter().zip(&built_in.dimensions).all(same)
}

impl ErrorBand {
    /// Minimum number of runs for a band.
    pub const RUNS: usize = 5;

    /// Band of runs given as (measured, predicted); `None` for fewer than [`Self::RUNS`].
    ///
    /// Of n distances to the others' median, on a logarithmic scale, the ⌈0.8 (n + 1)⌉th smallest
    /// is the half width: with that rank a further run is inside with a probability of at least
    /// 0.8 (the jackknife of Barber et al., "Predictive inference with the jackknife+", Annals of
    /// Statistics 2021).
    pub fn of_runs(runs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let ratios = sorted_logs(runs);
        let runs = ratios.len();
        if runs < Self::RUNS {
            return None;
        }
        let distance = |at: usize| {
            let mut others = ratios.clone();
            let own = others.remove(at);
            quantile(&others, 0.5).map(|centre| (own - centre).abs())
        };
        let mut distances: Vec<f64> = (0..runs).filter_map(distance).collect();
        distances.sort_by(f64::total_cmp);
        // At most `runs`, a small number.
        let rank = (INSIDE * (runs + 1) as f64).ceil() as usize;
        let (half, centre) = (distances[rank.min(runs) - 1], quantile(&ratios, 0.5)?);
        let (low, high) = ((centre - half).exp(), (centre + half).exp());
        Some(Self { low, high, runs: runs as u32 })
    }

    /// Band for kinds without runs of their own, from runs of other kinds: nine of ten lie within,
    /// and nothing says on which side of the prediction.
    pub fn of_other_kinds(runs: impl IntoIterator<Item = (f64, f64)>) -> Option<Self> {
        let mut distances: Vec<f64> = sorted_logs(runs).into_iter().map(f64::abs).collect();
        distances.sort_by(f64::total_cmp);
        let half = quantile(&distances, OF_OTHERS)?;
        Some(Self { low: (-half).exp(), high: half.exp(), runs: 0 })
    }
}

/// Logarithms of measured over predicted, in ascending order.
fn sorted_logs(runs: impl IntoIterator<Item = (f64, f64)>) -> Vec<f64> {
    let ratios = runs.into_iter().map(|(measured, predicted)| measured / predicted);
    let mut logs: Vec<f64> = ratios.filter(|r| r.is_finite() && *r > 0.0).map(f64::ln).collect();
    logs.sort_by(f64::total_cmp);
    logs
}

/// Quantile `share` of the sorted values, interpolated between neighbours.
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = share.clamp(0.0, 1.0) * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[3.0], 0.9), Some(3.0));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[0.0, 10.0], 0.9), Some(9.0));
    }

    /// Four runs as predicted and one that took twice as long: without it, the others' centre is
    /// the prediction, so it is off by a factor of two, and with five runs the farthest counts.
    #[test]
    fn no_run_shapes_the_centre_of_its_own_distance() {
        let runs = [1.0, 1.0, 1.0, 1.0, 2.0].map(|measured| (measured, 1.0));
        let band = ErrorBand::of_runs(runs).unwrap();
        assert!((band.low - 0.5).abs() < 1e-12 && (band.high - 2.0).abs() < 1e-12, "{band:?}");
        assert_eq!(band.runs, 5);
        let more = runs.into_iter().chain([(1.0, 1.0); 4]);
        let band = ErrorBand::of_runs(more).unwrap();
        assert_eq!((band.low, band.high), (1.0, 1.0), "eight of nine");
    }

    #[test]
    fn few_runs_and_runs_that_cannot_be_compared_make_no_band() {
        assert_eq!(ErrorBand::of_runs([(1.0, 1.0); 4]), None);
        let bad = [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (-1.0, 1.0)];
        assert_eq!(ErrorBand::of_runs(bad.into_iter().chain([(1.0, 1.0); 4])), None);
        assert_eq!(ErrorBand::of_other_kinds(bad), None);
    }

    /// A band is claimed only for what was measured: software, kind of model, and cluster.
    #[test]
    fn only_measured_kinds_have_runs() {
        let plan = |model: &str, strategy: Strategy| {
            let model = built_in::get(model).unwrap().unwrap();
            lower(&model, &Strategy { seq: model.seq, ..strategy }).unwrap()
        };
        let dense = plan("gpt2-124m", Strategy::default());
        let a100 = preset::get("dgx-a100:4").unwrap();
        let runs = |profile: &Profile, plan: &Plan, cluster: &Cluster| {
            error_band(profile, plan, cluster).runs
        };
        assert!(runs(&Profile::MEGATRON_2021, &dense, &a100) >= 5);
        assert_eq!(runs(&Profile::MODERN, &dense, &a100), 0);
        assert_eq!(runs(&Profile::MEGATRON_2021, &dense, &preset::get("dgx-h100").unwrap()), 0);
        let mut invented = a100.clone();
        invented.device.memory_bandwidth.0 *= 2.0;
        assert_eq!(runs(&Profile::MEGATRON_2021, &dense, &invented), 0);
        let mut invented = a100.clone();
        invented.dimensions[1].bandwidth.0 *= 2.0;
        assert_eq!(runs(&Profile::MEGATRON_2021, &dense, &invented), 0);
        for other in ["dlrm-mini", "resnet18", "mixtral-8x7b"] {
            let plan = plan(other, Strategy::default());
            assert_eq!(runs(&Profile::MEGATRON_2021, &plan, &a100), 0, "{other}");
        }
    }
}
