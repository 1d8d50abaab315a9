//! Measures this machine into a cluster.
//!
//! ```text
//! grid      which operators, on which shapes: those of layers of real models
//! glance    those of one plan, in a fraction of a second
//! kernels   what each takes: in the cache and from memory, alone and with all cores busy
//! wires     what messages and collectives take over each transport
//! aging     what caches lose of both while ranks compute something else
//! steady    again what was measured while the host had moved the cores
//! stores    how fast bytes are offloaded and brought back
//! ```
//!
//! The clock is read by `paceline_exec::probe`, which runs every op as training does; how a table
//! answers for what was not measured is `paceline_sim`'s affair. Here the two meet.

mod aging;
mod glance;
mod grid;
mod host;
mod kernels;
mod steady;
mod wires;

pub(crate) use glance::glance;
pub(crate) use wires::Transport;

use crate::failure::Failure;
use aging::Aging;
use kernels::Kernels;
use paceline_exec::probe::{self, Sweep, Turn};
use paceline_plan::DType;
use paceline_plan::strategy::Store;
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use paceline_sim::cluster::{Cluster, Device, FlopsPerSec, Measured, Peak, preset};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use steady::Steady;
use wires::Exchanges;

/// How thoroughly to measure what.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Cores of this machine: the ranks that can compute at once.
    pub cores: NonZeroUsize,
    /// The most threads that compute for one rank.
    pub threads: NonZeroUsize,
    /// Counts of ranks among which exchanges are timed.
    pub ranks: Vec<u32>,
    /// Transports, the one that answers first.
    pub transports: Vec<Transport>,
    /// Where offloaded bytes would be kept on disk.
    pub offload_dir: PathBuf,
    /// Few shapes, for a look.
    pub quick: bool,
}

impl Request {
    /// Ranks that can compute at once.
    fn all_cores(&self) -> u32 {
        u32::try_from(self.cores.get()).unwrap_or(u32::MAX)
    }

    /// How long a measurement goes on at least.
    fn effort(&self) -> Duration {
        if self.quick { Duration::from_micros(1000) } else { Duration::from_millis(4) }
    }
}

/// Who hears how far it has got, and may end it.
pub(crate) struct Listener<'a> {
    /// Set to end it.
    pub stop: &'a AtomicBool,
    /// Told the part that is done, from 0 to 1, and what comes next.
    pub progress: &'a dyn Fn(f64, &str),
}

impl Listener<'_> {
    fn tell(&self, share: f64, next: &str) -> Result<(), Failure> {
        (self.progress)(share, next);
        if self.stop.load(Ordering::Relaxed) {
            return Err(Failure::Run(anyhow::anyhow!(
                "stopped before the end; nothing was written"
            )));
        }
        Ok(())
    }
}

/// How often everything is measured, the whole of it each time: a machine is faster in some minutes than in others, and its
/// caches are larger when nobody else wants them. Whatever was timed in one of those would stay out of proportion.
const ROUNDS: u32 = 3;

/// Of a round's time, what kernels take, and when exchanges are done.
const KERNELS: f64 = 0.5;
const WIRES: f64 = 0.85;

/// A measured machine.
#[derive(Debug)]
pub(crate) struct Calibrated {
    /// What it is.
    pub cluster: Cluster,
    /// How many of the measurements that depend on it had to be made while its cores were not where they usually are.
    pub elsewhere: u32,
}

/// Measures everything that was asked for.
pub(crate) fn measure(request: &Request, listener: &Listener<'_>) -> Result<Calibrated, Failure> {
    let (probes, stop) = (grid::probes(request.quick)?, listener.stop);
    listener.tell(0.0, "how far the cores are apart")?;
    let (sweep, steady) = (sweep(request), Steady::new(request, stop));
    let mut kernels = Kernels::new(&probes, request, (&steady, stop));
    let mut exchanges = Exchanges::new(request, &steady, &sweep);
    let mut aging = Aging::new(&probes, request, &sweep, (&steady, stop));
    for round in 0..ROUNDS {
        let part = |from: f64, to: f64| {
            move |share: f64, next: &str| {
                let done = f64::from(round) + from + share * (to - from);
                listener.tell(done / f64::from(ROUNDS), next)
            }
        };
        kernels.round(&part(0.0, KERNELS))?;
        // A look has kernels three times over and the rest once.
        if !request.quick || round + 1 == ROUNDS {
            exchanges.round(&part(KERNELS, WIRES))?;
            aging.round(&part(WIRES, 1.0))?;
        }
    }
    let effort = request.effort() * 10;
    let measured = Measured {
        cores: request.all_cores(),
        threads: None,
        apart: steady.apart(),
        per_op: probe::overhead(&probes.plans[0], Turn::Computation, effort)?,
        per_exchange: probe::overhead(&probes.plans[0], Turn::Exchange, effort)?,
        per_token: paceline_exec::probe::load(&probes.plans[0], effort)?,
        memory: kernels::memory(&probes, request, stop)?,
        kernels: kernels.tables(),
        aging: aging.curves(),
        uneven: aging::uneven(request),
        wires: exchanges.tables(),
    };
    let mut cluster = describe(measured)?;
    listener.tell(1.0, "what is offloaded")?;
    stores(request, &mut cluster.device)?;
    Ok(Calibrated { cluster, elsewhere: steady.elsewhere() })
}

/// Memory to empty the caches with, for as many ranks as exchange something.
fn sweep(request: &Request) -> Sweep {
    Sweep::new(request.ranks.iter().copied().max().unwrap_or(1), host::cache())
}

/// Measures how fast offloaded bytes are put away and brought back.
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

/// More ranks than anyone starts on so many cores; beyond the cores they take turns.
fn most_ranks(cores: u32) -> u32 {
    cores.saturating_mul(8).clamp(64, 1024)
}

/// The cluster of a measured host: one device for each rank, as one core behaves.
fn describe(measured: Measured) -> Result<Cluster, Failure> {
    let products = measured.kernels.iter().filter(|table| table.name.starts_with("linear."));
    let fewest = measured.kernels.iter().map(|table| table.threads).min();
    let samples = products.filter(|t| Some(t.threads) == fewest).flat_map(|table| &table.samples);
    let best = samples.map(|sample| sample.work / sample.alone.warm.0).fold(1.0, f64::max);
    let rate = measured.memory.copies.last().map_or(1e9, |copy| copy.together.0);
    let (bandwidth, latency) = match measured.wires.first() {
        Some(wire) => match (wire.messages.first(), wire.messages.last()) {
            (Some(small), Some(large)) => (large.bytes.as_f64() / large.time.0, small.time),
            _ => (rate, Seconds(1e-6)),
        },
        None => (rate, Seconds(1e-6)),
    };
    let mut cluster = preset::get("laptop").map_err(|e| Failure::Run(anyhow::anyhow!("{e}")))?;
    cluster.name = "calibrated".into();
    cluster.device = Device {
        name: host::processor(),
        peak: Peak { f32: FlopsPerSec(best), tf32: None, bf16: None, f16: None, fp8: None },
        max_efficiency: 1.0,
        sustained_efficiency: 1.0,
        memory: Bytes((host::memory() / u64::from(measured.cores.max(1))).max(1)),
        memory_bandwidth: BytesPerSec(rate),
        memory_efficiency: 1.0,
        launch_overhead: measured.per_op,
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

/// The type that everything is measured in: the one that training computes in today.
const DTYPE: DType = DType::F32;

fn number(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).unwrap_or(NonZeroUsize::MIN)
}

impl From<paceline_comm::CommError> for Failure {
    fn from(error: paceline_comm::CommError) -> Self {
        Self::Run(error.into())
    }
}

type Told<'a> = &'a dyn Fn(f64, &str) -> Result<(), Failure>;

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
            transports: vec![Transport::Thread],
            offload_dir: std::env::temp_dir(),
            quick: true,
        }
    }

    /// Measured with the least effort: what matters is that everything fits together.
    fn hasty() -> Cluster {
        let (request, stop) = (request(), AtomicBool::new(true));
        let steady = Steady::new(&request, &stop);
        let mut probes = grid::probes(true).unwrap();
        probes.operators.retain(|probe| probe.used.work < 3e5);
        let sweep = Sweep::new(2, 1 << 20);
        let mut kernels = Kernels::new(&probes, &request, (&steady, &stop));
        let mut exchanges = Exchanges::new(&request, &steady, &sweep);
        let tell = |_: f64, _: &str| Ok(());
        for _ in 0..2 {
            kernels.round(&tell).unwrap();
            exchanges.round(&tell).unwrap();
        }
        describe(Measured {
            cores: 2,
            threads: None,
            apart: steady.apart(),
            per_op: Seconds(1e-7),
            per_exchange: Seconds(1e-6),
            per_token: Seconds(1e-9),
            memory: kernels::memory(&probes, &request, &stop).unwrap(),
            kernels: kernels.tables(),
            aging: Vec::new(),
            uneven: 0.01,
            wires: exchanges.tables(),
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
        let listener = Listener { stop: &stop, progress: &|_, _| {} };
        let told = measure(&request(), &listener).unwrap_err().message().unwrap();
        assert!(told.contains("nothing was written"), "{told}");
    }
}
