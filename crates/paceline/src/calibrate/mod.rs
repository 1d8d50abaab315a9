//! Measures this machine and describes it as a cluster.
//!
//! ```text
//! shapes          operators and shapes to time: those of layers of real models
//! quick_profile   times the operators of one plan, in a fraction of a second
//! kernels         kernel times: warm and cold, solo and with all cores busy
//! exchanges       times of messages and collectives over each transport
//! cache_decay     warm benefit lost by both while ranks compute on other data
//! core_placement  repeats measurements during which the host had migrated the cores
//! stores          bandwidth of offloading and of loading back
//! ```
//!
//! `paceline_exec::probe` reads the clock and runs every op as training does. `paceline_sim`
//! interpolates the tables for shapes that were not measured. This module connects the two.

mod cache_decay;
mod core_placement;
mod exchanges;
mod host;
mod kernels;
mod quick_profile;
mod shapes;

pub(crate) use exchanges::TRANSPORTS;
pub(crate) use quick_profile::profile_plan;

use crate::failure::Failure;
use cache_decay::DecayProbe;
use core_placement::PlacementMonitor;
use exchanges::ExchangeSuite;
use kernels::Kernels;
use paceline_comm::TransportKind;
use paceline_exec::probe::{self, CacheFlush, EmptyOp};
use paceline_plan::DType;
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::{Cluster, Device, FlopsPerSec, Measured, Peak, preset};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Scope and thoroughness of a calibration.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Number of cores of this machine: the ranks that can compute at once.
    pub cores: NonZeroUsize,
    /// Maximum number of compute threads per rank.
    pub threads: NonZeroUsize,
    /// Rank counts for which exchanges are timed.
    pub ranks: Vec<u32>,
    /// Transports to time; predictions use the first.
    pub transports: Vec<TransportKind>,
    /// Directory in which offloaded state would be stored on disk.
    pub offload_dir: PathBuf,
    /// True for fewer shapes and shorter measurements.
    pub quick: bool,
}

impl Request {
    /// Number of ranks that can compute at once.
    fn all_cores(&self) -> u32 {
        u32::try_from(self.cores.get()).unwrap_or(u32::MAX)
    }

    /// Minimum duration of one measurement.
    fn effort(&self) -> Duration {
        if self.quick { Duration::from_micros(1000) } else { Duration::from_millis(4) }
    }
}

/// Receives the progress of a calibration, and can stop it.
pub(crate) struct ProgressSink<'a> {
    /// Set to stop the calibration.
    pub stop: &'a AtomicBool,
    /// Called with the fraction done, from 0 to 1, and the name of the next step.
    pub progress: &'a dyn Fn(f64, &str),
}

impl ProgressSink<'_> {
    fn report(&self, share: f64, next: &str) -> Result<(), Failure> {
        (self.progress)(share, next);
        if self.stop.load(Ordering::Relaxed) {
            return Err(Failure::Run(anyhow::anyhow!(
                "stopped before the end; nothing was written"
            )));
        }
        Ok(())
    }
}

/// Number of times that the full set of measurements is repeated. A machine is faster in some
/// minutes than in others, and has more cache when no other process uses it. A probe timed only in
/// such a period would be out of proportion.
const ROUNDS: u32 = 3;

/// Fractions of a round's progress at which kernels, and then exchanges, are done.
const KERNELS: f64 = 0.5;
const WIRES: f64 = 0.85;

/// A measured machine.
#[derive(Debug)]
pub(crate) struct Calibrated {
    /// Its description as a cluster.
    pub cluster: Cluster,
    /// Number of placement-dependent measurements made while the core placement was unusual.
    pub elsewhere: u32,
}

/// Runs the requested calibration.
pub(crate) fn measure(
    request: &Request,
    listener: &ProgressSink<'_>,
) -> Result<Calibrated, Failure> {
    let (probes, stop) = (shapes::probes(request.quick)?, listener.stop);
    listener.report(0.0, "core round trip")?;
    let (sweep, steady) = (sweep(request), PlacementMonitor::new(request, stop));
    let mut kernels = Kernels::new(&probes, request, (&steady, stop));
    let mut exchanges = ExchangeSuite::new(request, &steady, &sweep);
    let mut decay = DecayProbe::new(&probes, request, &sweep, (&steady, stop));
    for round in 0..ROUNDS {
        tracing::debug!(target: "calibrate", round = round + 1, of = ROUNDS, "round begun");
        let part = |from: f64, to: f64| {
            move |share: f64, next: &str| {
                let done = f64::from(round) + from + share * (to - from);
                listener.report(done / f64::from(ROUNDS), next)
            }
        };
        kernels.round(&part(0.0, KERNELS))?;
        // A quick calibration runs kernels in every round and the rest once.
        if !request.quick || round + 1 == ROUNDS {
            exchanges.round(&part(KERNELS, WIRES))?;
            decay.round(&part(WIRES, 1.0))?;
        }
    }
    let effort = request.effort() * 10;
    let measured = Measured {
        cores: request.all_cores(),
        threads: None,
        core_round_trip: steady.core_round_trip(),
        op_overhead: probe::overhead(&probes.plans[0], EmptyOp::Computation, effort)?,
        exchange_overhead: probe::overhead(&probes.plans[0], EmptyOp::Exchange, effort)?,
        load_time_per_token: paceline_exec::probe::load(&probes.plans[0], effort)?,
        memory: kernels::memory(&probes, request, stop)?,
        kernels: kernels.tables(),
        cache_decay: decay.curves(),
        rank_skew: cache_decay::rank_skew(request),
        transports: exchanges.tables(),
    };
    let elsewhere = steady.off_placement();
    tracing::debug!(target: "calibrate", elsewhere, "measured");
    let mut cluster = describe(measured)?;
    listener.report(1.0, "what is offloaded")?;
    stores(request, &mut cluster.device)?;
    Ok(Calibrated { cluster, elsewhere })
}

/// Memory for flushing the caches of the largest number of ranks that exchange data.
fn sweep(request: &Request) -> CacheFlush {
    CacheFlush::new(request.ranks.iter().copied().max().unwrap_or(1), host::cache())
}

/// Measures the bandwidth of offloading and of loading back.
fn stores(request: &Request, device: &mut Device) -> Result<(), Failure> {
    let bytes = if request.quick { 16 << 20 } else { 128 << 20 };
    let rate = |kind| {
        let rate = paceline_exec::probe::store(kind, &request.offload_dir, bytes);
        rate.map_err(|error| Failure::Run(error.into()))
    };
    device.host_bandwidth = Some(rate(Store::Host)?);
    device.disk_bandwidth = Some(rate(Store::Disk)?);
    Ok(())
}

/// Upper bound on the ranks per host; ranks beyond `cores` share cores.
fn most_ranks(cores: u32) -> u32 {
    cores.saturating_mul(8).clamp(64, 1024)
}

/// The cluster of a measured host: one device per rank, with the performance of one core.
fn describe(measured: Measured) -> Result<Cluster, Failure> {
    let products = measured.kernels.iter().filter(|table| table.name.starts_with("linear."));
    let fewest = measured.kernels.iter().map(|table| table.threads).min();
    let samples = products.filter(|t| Some(t.threads) == fewest).flat_map(|table| &table.samples);
    let best = samples.map(|sample| sample.work / sample.solo.warm.0).fold(1.0, f64::max);
    let rate = measured.memory.copy_bandwidth.last().map_or(1e9, |copy| copy.all_cores.0);
    let (bandwidth, latency) = match measured.transports.first() {
        Some(wire) => match (wire.messages.first(), wire.messages.last()) {
            (Some(small), Some(large)) => (large.bytes.as_f64() / large.warm.0, small.warm),
            _ => (rate, Seconds(1e-6)),
        },
        None => (rate, Seconds(1e-6)),
    };
    let mut cluster = preset::get("laptop").map_err(|e| Failure::Run(anyhow::anyhow!("{e}")))?;
    cluster.name = "calibrated".into();
    cluster.device = Device {
        name: host::processor(),
        peak: Peak {
            f32: FlopsPerSec(best),
            tf32: None,
            bf16: None,
            f16: None,
            fp8: None,
            fp4: None,
        },
        max_efficiency: 1.0,
        sustained_efficiency: 1.0,
        memory: Bytes((host::memory() / u64::from(measured.cores.max(1))).max(1)),
        memory_bandwidth: BytesPerSec(rate),
        memory_efficiency: 1.0,
        launch_overhead: measured.op_overhead,
        ..cluster.device
    };
    cluster.dimensions.truncate(1);
    for dimension in &mut cluster.dimensions {
        dimension.size = most_ranks(measured.cores);
        (dimension.bandwidth, dimension.latency) = (BytesPerSec(bandwidth), latency);
    }
    cluster.measured = Some(measured);
    Ok(cluster)
}

/// The dtype of all measurements: the one that training computes in today.
const DTYPE: DType = DType::F32;

fn number(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN)
}

impl From<paceline_comm::CommError> for Failure {
    fn from(error: paceline_comm::CommError) -> Self {
        Self::Run(error.into())
    }
}

type Report<'a> = &'a dyn Fn(f64, &str) -> Result<(), Failure>;

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::strategy::Strategy;

    fn request() -> Request {
        Request {
            cores: number(2),
            threads: number(2),
            ranks: vec![1, 2],
            transports: vec![TransportKind::Thread],
            offload_dir: std::env::temp_dir(),
            quick: true,
        }
    }

    /// A cluster measured with minimal effort, to test that all parts fit together.
    fn hasty() -> Cluster {
        let (request, stop) = (request(), AtomicBool::new(true));
        let steady = PlacementMonitor::new(&request, &stop);
        let mut probes = shapes::probes(true).unwrap();
        probes.operators.retain(|probe| probe.used.work < 3e5);
        let sweep = CacheFlush::new(2, 1 << 20);
        let mut kernels = Kernels::new(&probes, &request, (&steady, &stop));
        let mut exchanges = ExchangeSuite::new(&request, &steady, &sweep);
        let tell = |_: f64, _: &str| Ok(());
        for _ in 0..2 {
            kernels.round(&tell).unwrap();
            exchanges.round(&tell).unwrap();
        }
        describe(Measured {
            cores: 2,
            threads: None,
            core_round_trip: steady.core_round_trip(),
            op_overhead: Seconds(1e-7),
            exchange_overhead: Seconds(1e-6),
            load_time_per_token: Seconds(1e-9),
            memory: kernels::memory(&probes, &request, &stop).unwrap(),
            kernels: kernels.tables(),
            cache_decay: Vec::new(),
            rank_skew: 0.01,
            transports: exchanges.tables(),
        })
        .unwrap()
    }

    #[test]
    fn what_is_measured_is_a_cluster_file_that_predicts() {
        let mut cluster = hasty();
        stores(&request(), &mut cluster.device).unwrap();
        let text = cluster.to_toml();
        assert_eq!(Cluster::parse(&text, "measured.toml").as_ref(), Ok(&cluster));
        let mini = built_in::get("mini").unwrap().unwrap();
        let iteration = |dp: u32| {
            let strategy = Strategy {
                dp,
                leaves: dp,
                seq: mini.seq,
                global_batch: 8,
                micro_batch: 1,
                ..Strategy::default()
            };
            let plan = lower(&mini, &strategy).unwrap();
            paceline_sim::simulate(&plan, &cluster, &Default::default()).unwrap().iteration.0
        };
        let times = [1, 2, 4, 8].map(iteration);
        assert!(times.iter().all(|time| time.is_finite() && *time > 0.0), "{times:?}");
        assert!(times[3] > times[1] * 0.8, "eight ranks on two cores are not faster: {times:?}");
    }

    #[test]
    fn a_wish_to_stop_is_heard() {
        let stop = AtomicBool::new(true);
        let listener = ProgressSink { stop: &stop, progress: &|_, _| {} };
        let told = measure(&request(), &listener).unwrap_err().message().unwrap();
        assert!(told.contains("nothing was written"), "{told}");
    }
}
