//! Mapping from platform names in tables to clusters: one description per kind of hardware, for all
//! rows.

use super::Skipped;
use crate::cluster::{Cluster, preset};
use paceline_plan::units::{Bytes, BytesPerSec};

/// Smallest cluster of a platform with at least `devices` devices.
pub(super) fn cluster(platform: &str, devices: u64) -> Result<Cluster, Skipped> {
    let known = KNOWN.iter().find(|known| platform.starts_with(known.prefix));
    let Some(known) = known else {
        return Err(Skipped(format!("no built-in cluster describes '{platform}'")));
    };
    let mut cluster =
        preset::holding(known.preset, devices).map_err(|error| Skipped(error.to_string()))?;
    (known.change)(&mut cluster);
    Ok(cluster)
}

struct Known {
    /// Prefix of the platform name.
    prefix: &'static str,
    /// Built-in cluster that equals or is closest to it.
    preset: &'static str,
    /// Changes to the built-in cluster.
    change: fn(&mut Cluster),
}

const fn same(prefix: &'static str, preset: &'static str) -> Known {
    Known { prefix, preset, change: |_| {} }
}

/// Known platforms; the first match counts, so special variants precede general ones.
const KNOWN: [Known; 17] = [
    Known { prefix: "H100-96GB-HBM2e", preset: "dgx-h100", change: h100_hbm2e },
    Known { prefix: "A100-SXM (80GB inferred)", preset: "dgx-a100", change: four_nics },
    same("A100-SXM", "dgx-a100"),
    same("A100-40GB", "dgx-a100-40gb"),
    same("A800-SXM", "dgx-a800"),
    same("H100-SXM", "dgx-h100"),
    same("H800-SXM", "dgx-h800"),
    same("H20-SXM", "dgx-h20"),
    same("H200-SXM", "dgx-h200"),
    same("B200-SXM", "dgx-b200"),
    same("B300-SXM", "dgx-b300"),
    same("GB200", "gb200-nvl72"),
    same("GB300", "gb300-nvl72"),
    same("MI300X", "mi300x"),
    same("V100-SXM", "dgx1-v100"),
    same("TPU-v4", "tpu-v4"),
    same("TPU-v5p", "tpu-v5p"),
];

/// H100 of Meta's clusters (torchtitan's benchmarks): 96 GB of HBM2e at 2.4 TB/s and 500 W.
///
/// Clocks follow about the square root of power while voltage can still fall with them, so GEMMs
/// sustain √(500/700) of their rate at 700 W. Limited to 500 W, an H200 reaches 0.84 of its bf16
/// and fp8 GEMM rate and 0.85 and 0.87 of its attention rate, measured by us.
fn h100_hbm2e(cluster: &mut Cluster) {
    cluster.name = format!("{} with 96 GB HBM2e at 500 W", cluster.name);
    cluster.device.name = "H100-96GB-HBM2e-500W".into();
    cluster.device.memory = Bytes(95 << 30);
    cluster.device.memory_bandwidth = BytesPerSec(2.4e12);
    cluster.device.sustained_efficiency *= (500.0f64 / 700.0).sqrt();
}

/// Hosts with 800 Gbit/s instead of 1,600 (vTrain's validation runs): two GPUs share a NIC.
fn four_nics(cluster: &mut Cluster) {
    cluster.name = format!("{} with four NICs", cluster.name);
    if let Some(fabric) = cluster.dimensions.last_mut() {
        fabric.devices_per_link = 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_platform_has_one_description() {
        for known in &KNOWN {
            let found = cluster(known.prefix, 64).unwrap();
            assert!(found.devices() >= 64, "{}", known.prefix);
        }
        assert_eq!(cluster("GB200-NVL72", 256).unwrap().devices(), 256);
        assert_eq!(cluster("A100-SXM-80GB", 32).unwrap(), preset::get("dgx-a100:4").unwrap());
        let special = cluster("H100-96GB-HBM2e-500W", 8).unwrap();
        assert_eq!(special.device.memory_bandwidth, BytesPerSec(2.4e12));
        assert!(special.device.sustained_efficiency < 0.6);
    }

    #[test]
    fn an_unknown_platform_is_named() {
        let told = cluster("MI250X", 8).unwrap_err().to_string();
        assert_eq!(told, "no built-in cluster describes 'MI250X'");
    }
}
