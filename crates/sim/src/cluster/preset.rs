//! Built-in clusters: the descriptions in `clusters/`, scaled to a count.
//!
//! `dgx-a100` is one host, `dgx-a100:128` is 128 of them. The count is of hosts, with one exception
//! and one special default. `gb200-nvl72` and `gb300-nvl72` count racks of 18 hosts, since the name
//! denotes a rack, and `tpu-v6e` counts pods of 32. `tpu-v4` alone is a whole pod of 1,024 hosts,
//! `tpu-v4:16` a slice of it; `tpu-v5p` likewise, with 2,240 hosts.

use super::{Cluster, Dimension, DimensionKind};
use paceline_plan::suggest::suggest;
use thiserror::Error;

/// Returns the built-in cluster of a name with an optional count: "dgx-a100", "dgx-a100:128".
pub fn get(spec: &str) -> Result<Cluster, PresetError> {
    match spec.split_once(':') {
        None => Ok(Preset::find(spec)?.describe()),
        Some((name, count)) => {
            let preset = Preset::find(name)?;
            let count = count.parse().ok().filter(|&count: &u64| count > 0).ok_or_else(|| {
                PresetError::Count { name: preset.name, count: count.into(), what: preset.counted }
            })?;
            preset.scaled(count)
        }
    }
}

/// Returns the smallest cluster of a built-in kind with at least `devices` devices.
///
/// If the devices fill whole hosts evenly, the outermost units are reduced to just those hosts: 256
/// devices of `gb200-nvl72` are four racks of 64, as such jobs are placed, not 3.5 racks of 72
/// devices.
pub fn holding(name: &str, devices: u64) -> Result<Cluster, PresetError> {
    let preset = Preset::find(name)?;
    let unit = match preset.scaling {
        Scaling::Copies | Scaling::One => preset.describe(),
        Scaling::Slices => {
            return preset.scaled(slice_hosts(devices, preset.describe().hosts.into()));
        }
    };
    let units = devices.div_ceil(unit.devices()).max(1);
    let mut cluster = preset.scaled(units)?;
    let (each, host) = (devices / units, unit.devices_per_host());
    let even = devices.is_multiple_of(units) && each > 0 && each.is_multiple_of(host);
    if let ([Dimension { kind: DimensionKind::Switch, size, .. }, _], true) =
        (&mut cluster.dimensions[..], even)
    {
        if u64::from(*size) != each {
            cluster.name = format!("{name} cut to {devices} devices");
        }
        // Both fit: `each` is at most the unit's size, and hosts are at most the devices.
        *size = each as u32;
        cluster.hosts = (devices / host) as u32;
    }
    Ok(cluster)
}

/// Names of the built-in clusters, oldest hardware first.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// Reason that a name and count are not a built-in cluster.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PresetError {
    /// Unknown name.
    #[error("no built-in cluster is called '{name}'{}; built in are: {}",
        meant.map(|meant| format!(" (did you mean {meant}?)")).unwrap_or_default(),
        names().collect::<Vec<_>>().join(", "))]
    Unknown {
        /// The given name.
        name: String,
        /// The built-in name closest to it.
        meant: Option<&'static str>,
    },
    /// The text after the colon is not a count.
    #[error("'{name}:{count}': '{count}' is not a count of {what}; write {name} or {name}:2")]
    Count {
        /// The built-in cluster.
        name: &'static str,
        /// The text after the colon.
        count: String,
        /// The counted unit (hosts or racks).
        what: &'static str,
    },
    /// The count exceeds the maximum number of devices.
    #[error(
        "'{name}:{count}' would have more than {} devices; the largest is {name}:{most}",
        Cluster::MAX_DEVICES
    )]
    TooLarge {
        /// The built-in cluster.
        name: &'static str,
        /// Requested count.
        count: u64,
        /// Largest possible count.
        most: u64,
    },
    /// This number of hosts is not a slice of a torus.
    #[error(
        "'{name}:{hosts}': {hosts} hosts of four chips make no slice of a pod; \
        use 1, 2, 4, 8, a multiple of 16 up to {pod}, or whole pods of {pod}"
    )]
    NoSlice {
        /// The built-in cluster.
        name: &'static str,
        /// Requested number of hosts.
        hosts: u64,
        /// Number of hosts of a pod.
        pod: u32,
    },
}

struct Preset {
    name: &'static str,
    text: &'static str,
    /// The counted unit (hosts or racks).
    counted: &'static str,
    scaling: Scaling,
}

/// Effect of a count on the description.
#[derive(Clone, Copy)]
enum Scaling {
    /// Copies of it along the outermost dimension.
    Copies,
    /// None: its devices differ, so that there is one host.
    One,
    /// Hosts of a torus: a slice of the pod, or several pods along the outermost dimension.
    Slices,
}

macro_rules! preset {
    ($name:literal, $counted:literal, $scaling:ident) => {
        Preset {
            name: $name,
            text: include_str!(concat!("../../../../clusters/", $name, ".toml")),
            counted: $counted,
            scaling: Scaling::$scaling,
        }
    };
}

const PRESETS: [Preset; 24] = [
    preset!("dgx1-v100", "hosts", Copies),
    preset!("dgx-a100", "hosts", Copies),
    preset!("dgx-a100-40gb", "hosts", Copies),
    preset!("dgx-a800", "hosts", Copies),
    preset!("dgx-h100", "hosts", Copies),
    preset!("dgx-h800", "hosts", Copies),
    preset!("dgx-h20", "hosts", Copies),
    preset!("dgx-h200", "hosts", Copies),
    preset!("dgx-b200", "hosts", Copies),
    preset!("dgx-b300", "hosts", Copies),
    preset!("gb200-nvl72", "racks", Copies),
    preset!("gb300-nvl72", "racks", Copies),
    preset!("mi300x", "hosts", Copies),
    preset!("tpu-v4", "hosts", Slices),
    preset!("tpu-v5p", "hosts", Slices),
    preset!("tpu-v6e", "pods", Copies),
    preset!("zionex", "hosts", Copies),
    preset!("a100-pcie", "hosts", Copies),
    preset!("a800-pcie", "hosts", Copies),
    preset!("pcie-servers", "hosts", One),
    preset!("gaudi2", "hosts", Copies),
    preset!("cs-2", "systems", Copies),
    preset!("dojo", "tiles", Copies),
    preset!("laptop", "hosts", Copies),
];

impl Preset {
    fn find(name: &str) -> Result<&'static Self, PresetError> {
        PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| {
            let meant = suggest(name, names());
            PresetError::Unknown { name: name.into(), meant }
        })
    }

    fn describe(&self) -> Cluster {
        Cluster::parse(self.text, self.name).expect("a test parses every built-in description")
    }

    fn scaled(&self, count: u64) -> Result<Cluster, PresetError> {
        let mut cluster = self.describe();
        let unit = match self.scaling {
            Scaling::Copies | Scaling::One => cluster.devices(),
            Scaling::Slices => CHIPS_PER_HOST,
        };
        let most = match self.scaling {
            Scaling::One => 1,
            Scaling::Copies | Scaling::Slices => Cluster::MAX_DEVICES / unit,
        };
        let (Ok(small), true) = (u32::try_from(count), count <= most) else {
            return Err(PresetError::TooLarge { name: self.name, count, most });
        };
        cluster.name = format!("{}:{count}", self.name);
        let copies = match self.scaling {
            Scaling::Copies | Scaling::One => small,
            Scaling::Slices => {
                let pod = cluster.hosts;
                let no_slice = PresetError::NoSlice { name: self.name, hosts: count, pod };
                slice(&mut cluster, small).ok_or(no_slice)?
            }
        };
        cluster.hosts *= copies;
        if let Some(outermost) = cluster.dimensions.last_mut() {
            outermost.size *= copies;
        }
        Ok(cluster)
    }
}

const CHIPS_PER_HOST: u64 = 4;
const CHIPS_PER_CUBE: u64 = 64;
const HOSTS_PER_CUBE: u32 = 16;

/// Reduces a pod's torus to `hosts` hosts and returns the number of such tori.
///
/// Google Cloud documentation, TPU v4, and "How to Scale Your Model": slices are made of cubes of
/// 4×4×4 chips, whose ends are connected by optical switches; less than a cube is a mesh.
fn slice(pod: &mut Cluster, hosts: u32) -> Option<u32> {
    let whole = pod.hosts;
    let torus = pod.dimensions.first_mut()?;
    let (shape, wrap) = match hosts {
        1 => ([2, 2, 1], false),
        2 => ([2, 2, 2], false),
        4 => ([2, 2, 4], false),
        8 => ([2, 4, 4], false),
        pods if pods % whole == 0 => return Some(pods / whole),
        cubes if cubes % HOSTS_PER_CUBE == 0 && cubes < whole => {
            (most_cubic(cubes / HOSTS_PER_CUBE).map(|axis| axis * 4), true)
        }
        _ => return None,
    };
    torus.size = shape.iter().product();
    torus.kind = DimensionKind::Torus { shape: shape.to_vec(), wrap };
    pod.hosts = hosts;
    Some(1)
}

/// Smallest number of hosts that is a slice with at least `chips` chips.
fn slice_hosts(chips: u64, pod: u64) -> u64 {
    let hosts = chips.div_ceil(CHIPS_PER_HOST).max(1);
    let cube = CHIPS_PER_CUBE / CHIPS_PER_HOST;
    match hosts {
        0..=8 => hosts.next_power_of_two(),
        _ if hosts <= pod => hosts.next_multiple_of(cube),
        _ => hosts.div_ceil(pod).saturating_mul(pod),
    }
}

/// Three factors with the smallest sum, ascending: the smallest diameter.
fn most_cubic(product: u32) -> [u32; 3] {
    let divisors = |n: u32| (1..=n).filter(move |&d| n.is_multiple_of(d));
    divisors(product)
        .flat_map(|a| divisors(product / a).map(move |b| [a, b, product / a / b]))
        .filter(|[a, b, c]| a <= b && b <= c)
        .min_by_key(|axes| axes.iter().sum::<u32>())
        .unwrap_or([1, 1, product])
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::DType;
    use paceline_plan::units::{Bytes, BytesPerSec};

    #[test]
    fn every_preset_parses_and_prints_back() {
        for preset in &PRESETS {
            let cluster = Cluster::parse(preset.text, preset.name).unwrap();
            assert_eq!(cluster.name, preset.name, "the name in the file is the file's name");
            let printed = cluster.to_toml();
            assert_eq!(Cluster::parse(&printed, preset.name), Ok(cluster));
        }
    }

    #[test]
    fn every_preset_scales() {
        assert!(get("pcie-servers:2").is_err() && get("pcie-servers:1").is_ok());
        for name in names().filter(|name| *name != "pcie-servers") {
            let (one, two) =
                (get(&format!("{name}:1")).unwrap(), get(&format!("{name}:2")).unwrap());
            assert_eq!(two.devices(), 2 * one.devices(), "{name}");
            assert_eq!(two.hosts, 2 * one.hosts, "{name}");
            assert_eq!(two.devices_per_host(), one.devices_per_host(), "{name}");
            assert_eq!(Cluster::parse(&two.to_toml(), name), Ok(two), "{name}");
        }
    }

    /// Name, devices, hosts, bf16 or f16 TFLOP/s, advertised memory in GB, inner and outer GB/s.
    type Facts = (&'static str, u64, u32, f64, f64, f64, f64);

    #[test]
    fn the_datasheets_are_kept() {
        let facts: [Facts; 18] = [
            ("dgx1-v100", 8, 1, 125.0, 32.0, 25.0, 12.5),
            ("dgx-a100-40gb", 8, 1, 312.0, 40.0, 300.0, 25.0),
            ("dgx-a100", 8, 1, 312.0, 80.0, 300.0, 25.0),
            ("dgx-a800", 8, 1, 312.0, 80.0, 200.0, 25.0),
            ("dgx-h100", 8, 1, 989.4, 80.0, 450.0, 50.0),
            ("dgx-h800", 8, 1, 989.4, 80.0, 200.0, 50.0),
            ("dgx-h20", 8, 1, 148.0, 95.6, 450.0, 50.0),
            ("dgx-h200", 8, 1, 989.4, 141.0, 450.0, 50.0),
            ("dgx-b200", 8, 1, 2250.0, 180.0, 900.0, 50.0),
            ("dgx-b300", 8, 1, 2250.0, 251.5, 900.0, 100.0),
            ("gb300-nvl72", 72, 18, 2500.0, 259.8, 900.0, 100.0),
            ("mi300x", 8, 1, 1307.4, 192.0, 64.0, 50.0),
            ("tpu-v5p", 8960, 2240, 459.0, 95.0, 100.0, 25.0),
            ("tpu-v6e", 256, 32, 918.0, 32.0, 100.0, 100.0),
            ("gb200-nvl72", 72, 18, 2500.0, 186.0, 900.0, 50.0),
            ("tpu-v4", 4096, 1024, 275.0, 32.0, 50.0, 25.0),
            ("zionex", 8, 1, 312.0, 40.0, 300.0, 25.0),
            ("gaudi2", 8, 1, 432.0, 89.4, 37.5, 37.5),
        ];
        for (name, devices, hosts, tflops, memory, inner, outer) in facts {
            let cluster = get(name).unwrap();
            assert_eq!((cluster.devices(), cluster.hosts), (devices, hosts), "{name}");
            let half = if name == "dgx1-v100" { DType::F16 } else { DType::Bf16 };
            assert!((cluster.device.rate(half).0 / 1e12 - tflops).abs() < 1e-9, "{name}");
            let gib = cluster.device.memory.as_f64() / f64::from(1 << 30);
            assert!((gib / memory - 1.0).abs() < 0.01, "{name}: {gib} GiB");
            let [inside, outside] = &cluster.dimensions[..] else { panic!("{name}") };
            assert_eq!(inside.bandwidth, BytesPerSec(inner * 1e9), "{name}");
            assert_eq!(outside.bandwidth, BytesPerSec(outer * 1e9), "{name}");
        }
        for (name, bridge) in [("a100-pcie", 300.0), ("a800-pcie", 200.0)] {
            let cards = get(&format!("{name}:2")).unwrap();
            let rates: Vec<f64> = cards.dimensions.iter().map(|d| d.bandwidth.0 / 1e9).collect();
            assert_eq!((cards.devices(), rates), (16, vec![bridge, 31.5, 25.0]), "{name}");
        }
        let tile = get("dojo").unwrap();
        assert_eq!(tile.devices(), 25);
        assert!((25.0 * tile.device.rate(DType::Bf16).0 / 9.05e15 - 1.0).abs() < 1e-9, "9 PFLOP/s");
        assert_eq!(get("cs-2:4").unwrap().devices(), 4);
        assert_eq!(get("dgx-a100").unwrap().device.memory, Bytes(80 << 30));
        assert_eq!(get("dgx-h100").unwrap().device.memory_bandwidth, BytesPerSec(3.35e12));
        assert_eq!(get("dgx-h200").unwrap().device.memory_bandwidth, BytesPerSec(4.8e12));
        assert_eq!(get("dgx-h100").unwrap().device.rate(DType::Fp8).0, 1978.9e12);
    }

    #[test]
    fn every_v100_has_six_links() {
        let DimensionKind::Graph { links, .. } =
            &get("dgx1-v100").unwrap().dimensions[0].kind.clone()
        else {
            panic!("a graph")
        };
        for gpu in 0..8 {
            let own = links.iter().filter(|link| link.between.contains(&gpu));
            assert_eq!(own.map(|link| link.width).sum::<u32>(), 6, "GPU {gpu}");
        }
    }

    /// The efficiencies reproduce the measurements they are derived from.
    #[test]
    fn links_reach_what_was_measured() {
        let nvlink = |name| get(name).unwrap().dimensions[0].achievable().0 / 1e9;
        assert!((229.0..=236.0).contains(&nvlink("dgx-a100")), "nccl-tests: 229 to 235 GB/s");
        assert!((361.0..=368.0).contains(&nvlink("dgx-h100")), "nccl-tests: 361 to 367 GB/s");
        assert!((678.0..=686.0).contains(&nvlink("dgx-b200")), "nccl-tests: 682 GB/s");
        assert_eq!(nvlink("dgx1-v100"), 22.5);
        let nic = get("dgx-h100").unwrap().dimensions[1].achievable().0 / 1e9;
        assert!((46.0..=48.0).contains(&nic));
    }

    #[test]
    fn a_laptop_is_two_cores() {
        let laptop = get("laptop").unwrap();
        assert_eq!((laptop.devices(), laptop.hosts), (2, 1));
        assert_eq!(laptop.device.rate(DType::F32).0, 100e9);
        assert_eq!(laptop.dimensions[0].achievable(), BytesPerSec(5e9));
    }

    #[test]
    fn a_count_scales_the_outermost_dimension() {
        let cluster = get("dgx-a100:128").unwrap();
        assert_eq!(cluster.name, "dgx-a100:128");
        assert_eq!((cluster.devices(), cluster.hosts), (1024, 128));
        let sizes: Vec<_> = cluster.dimensions.iter().map(|d| d.size).collect();
        assert_eq!(sizes, [8, 128]);
        let racks = get("gb200-nvl72:4").unwrap();
        assert_eq!((racks.devices(), racks.hosts), (288, 72));
    }

    #[test]
    fn tpu_slices_have_the_shapes_that_exist() {
        let shape = |hosts: u32| {
            let slice = get(&format!("tpu-v4:{hosts}")).unwrap();
            assert_eq!(slice.devices(), u64::from(hosts) * 4);
            assert_eq!(slice.hosts, hosts);
            let DimensionKind::Torus { shape, wrap } = slice.dimensions[0].kind.clone() else {
                panic!("a torus")
            };
            (shape, wrap)
        };
        assert_eq!(shape(1), (vec![2, 2, 1], false));
        assert_eq!(shape(8), (vec![2, 4, 4], false));
        assert_eq!(shape(16), (vec![4, 4, 4], true));
        assert_eq!(shape(32), (vec![4, 4, 8], true));
        assert_eq!(shape(512), (vec![8, 16, 16], true));
        assert_eq!(shape(1024), (vec![16, 16, 16], true));
        let two_pods = get("tpu-v4:2048").unwrap();
        assert_eq!((two_pods.devices(), two_pods.dimensions[1].size), (8192, 2));
        assert_eq!(
            get("tpu-v4:3").unwrap_err().to_string(),
            "'tpu-v4:3': 3 hosts of four chips make no slice of a pod; \
             use 1, 2, 4, 8, a multiple of 16 up to 1024, or whole pods of 1024"
        );
    }

    #[test]
    fn a_cluster_can_be_asked_for_by_devices() {
        let sizes = |name: &str, devices| {
            let cluster = holding(name, devices).unwrap();
            (cluster.dimensions.iter().map(|d| d.size).collect::<Vec<_>>(), cluster.hosts)
        };
        assert_eq!(sizes("dgx-a100", 1), (vec![8, 1], 1));
        assert_eq!(sizes("dgx-a100", 12), (vec![8, 2], 2));
        assert_eq!(sizes("dgx-a100", 3072), (vec![8, 384], 384));
        assert_eq!(sizes("dgx1-v100", 16), (vec![8, 2], 2));
        assert_eq!(sizes("gb200-nvl72", 8), (vec![8, 1], 2));
        assert_eq!(sizes("gb200-nvl72", 256), (vec![64, 4], 64));
        assert_eq!(holding("gb200-nvl72", 144).unwrap().name, "gb200-nvl72:2");
        assert_eq!(holding("gb200-nvl72", 8).unwrap().name, "gb200-nvl72 cut to 8 devices");
        assert_eq!(sizes("gb200-nvl72", 100), (vec![72, 2], 36), "25 hosts are no two halves");
        assert_eq!(sizes("tpu-v4", 100), (vec![128, 1], 32));
        assert_eq!(sizes("dgx-a100", 0), (vec![8, 1], 1));
        assert!(holding("dgx-a100", u64::MAX).is_err());
        assert!(holding("tpu-v4", u64::MAX).is_err());
    }

    #[test]
    fn unknown_names_get_the_nearest_and_the_list() {
        let error = get("dgx-a10:4").unwrap_err().to_string();
        assert_eq!(
            error,
            "no built-in cluster is called 'dgx-a10' (did you mean dgx-a100?); built in are: \
             dgx1-v100, dgx-a100, dgx-a100-40gb, dgx-a800, dgx-h100, dgx-h800, dgx-h20, dgx-h200, \
             dgx-b200, dgx-b300, gb200-nvl72, gb300-nvl72, mi300x, tpu-v4, tpu-v5p, tpu-v6e, \
             zionex, a100-pcie, a800-pcie, pcie-servers, gaudi2, cs-2, dojo, laptop"
        );
        let far = get("frontier").unwrap_err().to_string();
        assert!(far.starts_with("no built-in cluster is called 'frontier'; built in are: dgx1"));
        assert!(matches!(get(""), Err(PresetError::Unknown { meant: None, .. })));
        assert!(matches!(get("DGX-A100"), Err(PresetError::Unknown { .. })));
    }

    #[test]
    fn absurd_counts_are_refused() {
        for count in ["0", "abc", "", "-1", "1.5", " 2", "2:2", "99999999999999999999999"] {
            let spec = format!("dgx-a100:{count}");
            let error = get(&spec).unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "'{spec}': '{count}' is not a count of hosts; write dgx-a100 or dgx-a100:2"
                )
            );
        }
        assert!(get("gb200-nvl72:x").unwrap_err().to_string().contains("not a count of racks"));
        for count in [2_097_153, u64::from(u32::MAX), u64::MAX] {
            assert_eq!(
                get(&format!("dgx-a100:{count}")).unwrap_err().to_string(),
                format!(
                    "'dgx-a100:{count}' would have more than 16777216 devices; \
                     the largest is dgx-a100:2097152"
                )
            );
        }
        assert_eq!(get("dgx-a100:2097152").unwrap().devices(), Cluster::MAX_DEVICES);
    }
}
