use super::*;
use crate::cluster::{
    BandwidthChange, BandwidthSchedule, DeviceOverride, Dimension, DimensionKind, GraphLink,
    IndexRange, LinkOverride, Selector, Straggler, Tree,
};
use paceline_plan::ids::Rank;
use paceline_plan::units::Bytes;
use proptest::prelude::*;

const GOOD: &str = r#"
name = "two-hosts"
hosts = 2
[device]
name = "A100"
memory = "80 GiB"
memory_bandwidth = "2039 GB/s"
peak = { f32 = "19.5 TFLOP/s", bf16 = "312 TFLOP/s" }
[[dimension]]
name = "nvlink"
kind = "switch"
size = 4
bandwidth = "300 GB/s"
latency = "2 us"
[[dimension]]
name = "infiniband"
kind = "switch"
size = 2
bandwidth = "200 Gbit/s"
latency = "5 us"
"#;

/// Problems of `GOOD` after one change to it, as lines of text.
fn problems(from: &str, to: &str) -> Vec<String> {
    assert!(GOOD.contains(from), "{from} is not in the file");
    let changed = GOOD.replacen(from, to, 1);
    let errors = Cluster::parse(&changed, "bad.toml").expect_err("this should not parse");
    errors.to_string().lines().map(String::from).collect()
}

#[test]
fn what_is_left_out_has_its_plain_meaning() {
    let cluster = Cluster::parse(GOOD, "good.toml").unwrap();
    assert_eq!((cluster.devices(), cluster.hosts), (8, 2));
    assert_eq!(cluster.device.max_efficiency, 1.0);
    assert_eq!(cluster.device.sustained_efficiency, 1.0);
    assert_eq!((cluster.device.multiprocessors, cluster.device.systolic_width), (None, None));
    assert_eq!(cluster.device.memory_efficiency, 1.0);
    assert_eq!(cluster.device.launch_overhead, Seconds::ZERO);
    assert_eq!(cluster.device.peak.tf32, None);
    let fabric = &cluster.dimensions[1];
    assert_eq!((fabric.efficiency, fabric.devices_per_link), (1.0, 1));
    assert_eq!(fabric.bandwidth, BytesPerSec(25e9));
}

/// Overrides to append to `GOOD`.
const UNEVEN: &str = r#"
[[link]]
dimension = "infiniband"
hosts = [1]
bandwidth = "100 Gbit/s"
latency = "8 us"
[[straggler]]
ranks = [3, "5-6"]
factor = 1.5
from = "2 s"
until = "4 s"
[[bandwidth_schedule]]
dimension = "nvlink"
changes = [{ at = "1 s", bandwidth = 0.5 }, { at = "3 s", bandwidth = 1 }]
"#;

#[test]
fn what_is_not_alike_is_read() {
    let cluster = Cluster::parse(&format!("{GOOD}{UNEVEN}"), "uneven.toml").unwrap();
    let Heterogeneity { kinds, links, stragglers, schedules, .. } = &cluster.heterogeneity;
    assert!(kinds.is_empty());
    assert_eq!(links[0].dimension, 1);
    assert_eq!(links[0].at, Selector::Hosts(vec![IndexRange::one(1)]));
    assert_eq!(
        (links[0].bandwidth, links[0].latency),
        (Some(BytesPerSec(12.5e9)), Some(Seconds(8e-6)))
    );
    assert_eq!(
        stragglers[0].at,
        Selector::Ranks(vec![IndexRange::one(3), IndexRange { first: 5, last: 6 }])
    );
    assert_eq!((stragglers[0].factor, stragglers[0].until), (1.5, Some(Seconds(4.0))));
    assert_eq!((schedules[0].dimension, &schedules[0].at), (0, &Selector::Everywhere));
    assert_eq!(schedules[0].changes.len(), 2);
    let text = cluster.summary();
    assert!(text.contains("ranks 3, 5-6: 1.5 times slower from 2"), "{text}");
}

#[test]
fn devices_may_be_of_several_kinds() {
    let second = GOOD[GOOD.find("[device]").unwrap()..GOOD.find("[[dimension]]").unwrap()]
        .replace("[device]", "[[device]]\nhosts = [1]")
        .replace("A100", "H100");
    let text = GOOD.replace("[device]", "[[device]]").replacen(
        "[[dimension]]",
        &format!("{second}[[dimension]]"),
        1,
    );
    let cluster = Cluster::parse(&text, "mixed.toml").unwrap();
    assert_eq!(cluster.device.name, "A100");
    assert_eq!(cluster.heterogeneity.kinds[0].device.name, "H100");
    assert_eq!(Cluster::parse(&cluster.to_toml(), "again.toml"), Ok(cluster));
    let nowhere = text.replace("hosts = [1]", "");
    let told = Cluster::parse(&nowhere, "mixed.toml").unwrap_err().to_string();
    assert!(told.contains("[[device]] 2 has neither hosts nor ranks; add for example"), "{told}");
    let first = GOOD.replace("[device]", "[[device]]\nhosts = [0]");
    let told = Cluster::parse(&first, "mixed.toml").unwrap_err().to_string();
    assert!(told.contains("[[device]] 1 has an unknown key 'hosts'"), "{told}");
}

/// A host of four devices with two NICs, to append to `GOOD` without the fabric's own rate.
const HOST: &str = r#"
[host]
dimension = "infiniband"
nics = 2
nic_bandwidth = "100 Gbit/s"
protocol = "tcp"
pcie_bandwidth = "16 GB/s"
devices_per_switch = 4
nics_on_switches = false
memory_bandwidth = "100 GB/s"
cores = 4
"#;

fn with_host(from: &str, to: &str) -> Result<Cluster, Errors> {
    assert!(HOST.contains(from), "{from}");
    let fabric = "bandwidth = \"200 Gbit/s\"\n";
    assert!(GOOD.contains(fabric));
    let text = format!("{}{}", GOOD.replacen(fabric, "", 1), HOST.replacen(from, to, 1));
    Cluster::parse(&text, "host.toml")
}

/// The inter-host rates follow from the hardware between devices and fabric.
#[test]
fn the_fabric_follows_from_the_host() {
    let cluster = with_host("", "").unwrap();
    assert_eq!(Cluster::parse(&cluster.to_toml(), "again.toml"), Ok(cluster.clone()));
    let fabric = &cluster.dimensions[1];
    assert_eq!((fabric.bandwidth, fabric.devices_per_link), (BytesPerSec(12.5e9), 2));
    let path = cluster.link(Rank(0), Rank(4)).unwrap();
    let rate = path.bandwidth.0 / path.sharing;
    // Per device: NIC 5.9, switch uplink 4, memory 6.25, cores 2.625 GB/s.
    assert!((rate / 2.625e9 - 1.0).abs() < 1e-12, "{rate}");
    assert_eq!(path.latency, Seconds(5e-6) + Seconds(12e-6));
    let rate = |from: &str, to: &str| {
        let path = with_host(from, to).unwrap().link(Rank(0), Rank(4)).unwrap();
        path.bandwidth.0 / path.sharing
    };
    assert!((rate("cores = 4", "") / 4e9 - 1.0).abs() < 1e-12, "the uplink");
    let direct = rate("\"tcp\"", "\"rdma\"\ngpudirect = true\nmtu = 4096");
    assert!((direct / 4e9 - 1.0).abs() < 1e-12, "NICs are at the root");
}

#[test]
fn every_wrong_host_is_told() {
    let cases = [
        (
            "nics = 2",
            "nics = 3",
            "[host] has nics = 3 for the 4 devices of a host; make nics a divisor",
        ),
        (
            "devices_per_switch = 4",
            "devices_per_switch = 3",
            "make devices_per_switch a divisor of 4",
        ),
        (
            "\"tcp\"",
            "\"udp\"",
            "there is no such protocol (known: tcp, rdma, gpudirect-async, 1rma)",
        ),
        ("cores = 4", "control = \"gpu\"", "[host] has control by the GPU with gpudirect = false"),
        ("cores = 4", "control = \"nic\"", "there is no such control plane (known: cpu, gpu)"),
        ("\"tcp\"", "\"tcp\"\ngpudirect = true", "the kernel's TCP goes through host memory"),
        ("\"infiniband\"", "\"fabric\"", "[host] names the dimension 'fabric', and there is none"),
        ("nic_bandwidth = \"100 Gbit/s\"", "", "[host] has no nic_bandwidth"),
        ("cores = 4", "cores = 0", "it is not a whole number from 1"),
        ("cores = 4", "mtu = 12", "it is not a whole number from 256 to 65536"),
    ];
    for (from, to, told) in cases {
        let errors = with_host(from, to).expect_err(to).to_string();
        assert!(errors.contains(told), "{to}: {errors}");
    }
    let both = Cluster::parse(&format!("{GOOD}{HOST}"), "host.toml").unwrap_err().to_string();
    assert!(
        both.contains("has bandwidth, which follows from [host]; leave bandwidth out"),
        "{both}"
    );
}

#[test]
fn every_wrong_exception_is_told() {
    let cases = [
        ("\"infiniband\"", "\"infinband\"", "perhaps you mean \"infiniband\""),
        ("hosts = [1]", "hosts = [2]", "it is not a whole number from 0 to 1"),
        ("hosts = [1]", "hosts = []", "it is not a list of numbers"),
        ("hosts = [1]\n", "", "[[link]] 1 has neither hosts nor ranks"),
        ("bandwidth = \"100 Gbit/s\"\nlatency = \"8 us\"", "", "[[link]] 1 changes nothing"),
        ("\"5-6\"", "\"6-5\"", "\"6-5\" is not a range of numbers from 0 to 7"),
        ("\"5-6\"", "\"5-8\"", "\"5-8\" is not a range of numbers from 0 to 7"),
        ("factor = 1.5", "factor = 0.5", "it is not a number from 1 to 1000000"),
        ("factor = 1.5", "factor = nan", "it is not a number from 1 to 1000000"),
        ("factor = 1.5", "hosts = [0]\nfactor = 1.5", "has both hosts and ranks"),
        ("until = \"4 s\"", "until = \"2 s\"", "is over before it starts"),
        ("\"3 s\"", "\"1 s\"", "are not in order of time"),
        ("bandwidth = 0.5", "bandwidth = 0", "it is not a factor from 0.000001"),
        (
            "changes = [{ at = \"1 s\", bandwidth = 0.5 }, { at = \"3 s\", bandwidth = 1 }]",
            "changes = []",
            "it is not a list of changes",
        ),
        ("[[bandwidth_schedule]]", "[[bandwidth_scheduel]]", "did you mean `bandwidth_schedule`?"),
    ];
    for (from, to, told) in cases {
        assert!(UNEVEN.contains(from), "{from}");
        let text = format!("{GOOD}{}", UNEVEN.replacen(from, to, 1));
        let errors = Cluster::parse(&text, "bad.toml").expect_err(to).to_string();
        assert!(errors.contains(told), "{to}: {errors}");
    }
}

#[test]
fn a_switch_may_be_a_thin_tree() {
    let add = |text: &str| format!("size = 2\nbandwidth = \"200 Gbit/s\"\n{text}");
    let from = "size = 2\nbandwidth = \"200 Gbit/s\"";
    let read = |text: &str| {
        let changed = GOOD.replacen(from, &add(text), 1);
        Cluster::parse(&changed, "tree.toml").unwrap().dimensions[1].tree
    };
    assert_eq!(read(""), None);
    let thin = |leaf| Some(Tree { leaf, oversubscription: 4.0 });
    assert_eq!(read("oversubscription = 4"), thin(1));
    assert_eq!(read("oversubscription = 4.0\nleaf = 2"), thin(2));
    assert_eq!(
        problems(from, &add("leaf = 2")),
        ["bad.toml:20: [[dimension]] 2 has a leaf but no oversubscription; add for example \
          oversubscription = 4.0, or leave leaf out"]
    );
    let told = problems(from, &add("oversubscription = 0.5"));
    assert!(told[0].contains("it is not a number from 1 to 1000000"), "{told:?}");
    let told = problems("kind = \"switch\"", "kind = \"ring\"\noversubscription = 2.0");
    assert!(told[0].contains("unknown key 'oversubscription'"), "{told:?}");
}

#[test]
fn a_switch_may_sum_what_is_sent_to_it() {
    let from = "size = 2\nbandwidth = \"200 Gbit/s\"";
    let read = |text: &str| {
        let changed = GOOD.replacen(from, &format!("{from}\n{text}"), 1);
        Cluster::parse(&changed, "sums.toml").unwrap().dimensions[1].in_network_reduction
    };
    assert!(!read(""));
    assert!(read("in_network_reduction = true"));
    assert!(!read("in_network_reduction = false"));
    let told = problems("kind = \"switch\"", "kind = \"ring\"\nin_network_reduction = true");
    assert!(told[0].contains("unknown key 'in_network_reduction'"), "{told:?}");
}

#[test]
fn bare_numbers_are_in_base_units() {
    let text = GOOD
        .replace("\"80 GiB\"", "85_899_345_920")
        .replace("\"300 GB/s\"", "3e11")
        .replace("\"200 Gbit/s\"", "25000000000")
        .replace("\"2 us\"", "2e-6");
    assert_eq!(Cluster::parse(&text, "bare.toml"), Cluster::parse(GOOD, "good.toml"));
}

#[test]
fn all_problems_come_at_once_in_order_with_their_lines() {
    let text = GOOD
        .replace("hosts = 2", "hosts = 0")
        .replace("memory = \"80 GiB\"", "memory = \"80 gigs\"")
        .replace("f32 = \"19.5 TFLOP/s\", ", "")
        .replacen("kind = \"switch\"", "kind = \"swich\"", 1)
        .replace("latency = \"5 us\"", "latancy = \"5 us\"");
    let errors = Cluster::parse(&text, "clusters/mine.toml").unwrap_err();
    let lines: Vec<_> = errors.problems.iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [3, 6, 8, 11, 15, 20].map(Some));
    let text = errors.to_string();
    for part in [
        "clusters/mine.toml:3: the file has hosts = 0: it is not a whole number from 1 to 16777216; \
         write for example hosts = 1",
        "clusters/mine.toml:6: [device] has memory = \"80 gigs\": unknown unit 'gigs' (known: B, ",
        "clusters/mine.toml:8: [device.peak] has no f32; add for example f32 = \"312 TFLOP/s\"",
        "clusters/mine.toml:11: [[dimension]] 1 has kind = \"swich\": there is no such kind, \
         perhaps you mean \"switch\"",
        "clusters/mine.toml:15: [[dimension]] 2 has no latency; add for example latency = \"5 us\"",
        "clusters/mine.toml:20: [[dimension]] 2 has an unknown key 'latancy'; did you mean `latency`?",
    ] {
        assert!(text.contains(part), "{part}\nis not in\n{text}");
    }
}

#[test]
fn absurd_numbers_are_refused_where_they_stand() {
    for (from, to) in [
        ("size = 4", "size = -4"),
        ("size = 4", "size = 4.0"),
        ("size = 4", "size = 18446744073709551615"),
        ("size = 4", "size = 99999999999999999999999999999999999999999999"),
        ("\"300 GB/s\"", "nan"),
        ("\"300 GB/s\"", "inf"),
        ("\"300 GB/s\"", "-1.0"),
        ("\"300 GB/s\"", "0"),
        ("\"300 GB/s\"", "true"),
        ("\"300 GB/s\"", "\"-300 GB/s\""),
    ] {
        let problems = problems(from, to);
        assert_eq!(problems.len(), 1, "{to}: {problems:?}");
        let line = if from == "size = 4" { 12 } else { 13 };
        assert!(problems[0].starts_with(&format!("bad.toml:{line}: ")), "{to}: {problems:?}");
    }
    for value in ["0", "-0.5", "1.01", "nan", "\"half\""] {
        let to = format!("latency = \"2 us\"\nefficiency = {value}");
        let problems = problems("latency = \"2 us\"", &to);
        assert!(problems[0].contains("not a number from 0.000001 to 1"), "{problems:?}");
    }
}

#[test]
fn sizes_and_hosts_must_agree() {
    assert_eq!(
        problems("hosts = 2", "hosts = 3"),
        ["bad.toml:3: 8 devices cannot be spread evenly over 3 hosts; \
          make hosts a divisor of the product of the dimensions' sizes"]
    );
    let problems = problems("size = 4", "size = 16777216");
    assert!(problems[0].contains("multiply to 33554432 devices; use at most 16777216"));
}

#[test]
fn names_must_tell_things_apart() {
    let twice = problems("\"infiniband\"", "\"nvlink\"");
    assert_eq!(
        twice,
        ["bad.toml:16: two dimensions are called 'nvlink'; give each a name of its own"]
    );
    assert!(problems("\"nvlink\"", "\"  \"")[0].contains("it is empty"));
    assert!(problems("\"nvlink\"", "7")[0].contains("has name = 7: it is not text"));
}

#[test]
fn the_shape_of_the_file_is_checked() {
    let empty = Cluster::parse("", "empty.toml").unwrap_err().to_string();
    for part in ["no name", "no hosts", "no [device]", "no [[dimension]]"] {
        assert!(empty.contains(&format!("empty.toml:1: the file has {part}")), "{empty}");
    }
    let odd = "name = 'x'\nhosts = 1\ndevice = 3\ndimension = []";
    let odd = Cluster::parse(odd, "odd.toml").unwrap_err().to_string();
    assert!(odd.contains("odd.toml:3: [device] is 3; make it a table of keys"), "{odd}");
    assert!(odd.contains("odd.toml:4: dimension is an empty list; describe"), "{odd}");
}

#[test]
fn syntax_errors_are_located_and_nothing_else_is_said() {
    let problems = problems("size = 4", "size = = 4");
    assert!(problems.iter().all(|problem| problem.starts_with("bad.toml:12: not TOML: ")));
    assert!(!problems.is_empty());
}

const GRAPH: &str = "kind = \"graph\"\nswitches = 1\nlinks = [
  { between = [0, 4] }, { between = [1, 4], width = 2 }, { between = [2, 4], bandwidth = 1e9 },
  { between = [3, 4], latency = \"1 ns\" } ]";

#[test]
fn a_graph_lists_its_links() {
    let text = GOOD.replacen("kind = \"switch\"", GRAPH, 1);
    let cluster = Cluster::parse(&text, "graph.toml").unwrap();
    let DimensionKind::Graph { switches: 1, links } = &cluster.dimensions[0].kind else {
        panic!("{:?}", cluster.dimensions[0].kind)
    };
    let widths: Vec<_> = links.iter().map(|link| link.width).collect();
    assert_eq!(widths, [1, 2, 1, 1]);
    assert_eq!(links[2].bandwidth, Some(BytesPerSec(1e9)));
    assert_eq!(links[3].latency, Some(Seconds(1e-9)));
}

#[test]
fn a_broken_graph_is_refused() {
    let graph = |from: &str, to: &str| {
        assert!(GRAPH.contains(from), "{from}");
        problems("kind = \"switch\"", &GRAPH.replace(from, to)).join("\n")
    };
    assert!(
        graph("[2, 4]", "[2, 5]")
            .contains("link 3 has between = a list: it is not a whole number from 0 to 4")
    );
    assert!(graph("[2, 4]", "[2, 2]").contains("it joins a point to itself"));
    assert!(graph("[2, 4]", "[2]").contains("it is not a pair of points"));
    assert!(graph("[2, 4]", "[4, 1]").contains("points 4 and 1 are joined twice"));
    assert!(
        graph("{ between = [1, 4], width = 2 }, ", "")
            .contains("no way leads from device 0 to device 1 of [[dimension]] 1; add the links")
    );
    assert!(graph("width = 2", "widht = 2").contains("unknown key 'widht'; did you mean `width`?"));
    assert!(graph("switches = 1", "switches = 4096").contains("a graph of 4100 points"));
    assert!(graph("{ between = [0, 4] }", "7").contains("[[dimension]] 1 link 1 is 7"));
}

#[test]
fn links_belong_to_graphs_alone() {
    let problems = problems("kind = \"switch\"", "kind = \"ring\"\nlinks = []");
    assert!(problems[0].contains("[[dimension]] 1 has an unknown key 'links'"), "{problems:?}");
}

#[test]
fn a_torus_is_as_large_as_its_shape() {
    let shaped = |shape: &str| {
        let kind = format!("kind = \"torus\"\nshape = {shape}");
        Cluster::parse(&GOOD.replacen("kind = \"switch\"", &kind, 1), "torus.toml")
    };
    assert_eq!(shaped("[2, 2]").unwrap().devices(), 8);
    let error = shaped("[2, 3]").unwrap_err().to_string();
    assert!(error.contains("has size = 4, but its shape multiplies to 6; write size = 6"));
    assert!(shaped("[]").unwrap_err().to_string().contains("it is not a list of sizes"));
    assert!(shaped("[0, 4]").unwrap_err().to_string().contains("not a whole number from 1"));
    let vast = shaped("[16777216, 16777216, 16777216]").unwrap_err().to_string();
    assert!(vast.contains("shape multiplies to 18446744073709551615 devices"), "{vast}");
    let unsized_torus =
        GOOD.replacen("kind = \"switch\"\nsize = 4", "kind = \"torus\"\nshape = [4]", 1);
    assert_eq!(Cluster::parse(&unsized_torus, "torus.toml").unwrap().dimensions[0].size, 4);
}

/// Rates over their whole range, so that every unit and fraction is written.
fn rate(most: f64) -> impl Strategy<Value = f64> {
    (0.0..most.log10()).prop_map(|exponent| 10f64.powf(exponent))
}

fn time() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), (-12.0..3.0).prop_map(|exponent| 10f64.powf(exponent))]
}

fn efficiency() -> impl Strategy<Value = f64> {
    prop_oneof![Just(1.0), 1e-6..1.0]
}

fn name() -> impl Strategy<Value = String> {
    ".{0,12}".prop_map(|name| format!("n{name}"))
}

fn device() -> impl Strategy<Value = Device> {
    let flops = || rate(1e24).prop_map(FlopsPerSec);
    let peaks = (flops(), proptest::option::of(flops()), proptest::option::of(flops()));
    let numbers = (efficiency(), efficiency(), 1u64..1 << 60, rate(1e18), time());
    let units = (
        efficiency(),
        efficiency(),
        proptest::option::of(1u32..1000),
        proptest::option::of(1u32..1000),
        1.0..4.0,
        proptest::option::of(0u32..9),
    );
    let stores = (proptest::option::of(rate(1e18)), proptest::option::of(rate(1e18)));
    let powers = (proptest::option::of(1.0..1e5), proptest::option::of(1.0..1e3));
    let all = (name(), peaks, numbers, units, (stores, powers));
    all.prop_map(|(name, (f32, tf32, fp8), numbers, units, ((host, disk), (power, idle_power)))| {
        let (max_efficiency, memory_efficiency, memory, bandwidth, launch) = numbers;
        let (sustained_efficiency, legacy_mma_efficiency, multiprocessors, ..) = units;
        let (.., systolic_width, sparse, copy_engines) = units;
        Device {
            name,
            peak: Peak { f32, tf32, bf16: tf32, f16: fp8, fp8, fp4: tf32 },
            max_efficiency,
            sustained_efficiency,
            legacy_mma_efficiency,
            multiprocessors,
            systolic_width,
            systolic_arrays: systolic_width.map_or(1, |width| width % 9 + 1),
            sparse_speedup: sparse,
            memory: Bytes(memory),
            memory_bandwidth: BytesPerSec(bandwidth),
            memory_efficiency,
            launch_overhead: Seconds(launch),
            copy_engines,
            host_bandwidth: host.map(BytesPerSec),
            disk_bandwidth: disk.map(BytesPerSec),
            power,
            idle_power,
        }
    })
}

fn kind() -> impl Strategy<Value = (DimensionKind, u32)> {
    let torus = (proptest::collection::vec(1u32..5, 1..4), any::<bool>());
    let link = (1u32..9, proptest::option::of(rate(1e18)), proptest::option::of(time()));
    let star = proptest::collection::vec(link, 1..6);
    prop_oneof![
        (1u32..100).prop_map(|size| (DimensionKind::Ring, size)),
        (1u32..100).prop_map(|size| (DimensionKind::Switch, size)),
        (1u32..100).prop_map(|size| (DimensionKind::FullyConnected, size)),
        torus.prop_map(|(shape, wrap)| {
            let size = shape.iter().product();
            (DimensionKind::Torus { shape, wrap }, size)
        }),
        star.prop_map(|links| {
            let size = links.len() as u32;
            let links = links.into_iter().zip(0..).map(|((width, bandwidth, latency), member)| {
                let (bandwidth, latency) = (bandwidth.map(BytesPerSec), latency.map(Seconds));
                GraphLink { between: [member, size], width, bandwidth, latency }
            });
            (DimensionKind::Graph { switches: 1, links: links.collect() }, size)
        }),
    ]
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let tree =
        (1u32..9, 1.0..9.0).prop_map(|(leaf, oversubscription)| Tree { leaf, oversubscription });
    let numbers =
        (rate(1e18), time(), efficiency(), 1u32..9, proptest::option::of(tree), any::<bool>());
    let dimensions = proptest::collection::vec((kind(), numbers, name()), 1..4);
    let exceptions = (device(), place(), rate(1e18), time(), 1.0f64..9.0, any::<[bool; 4]>());
    let whole = (name(), any::<bool>(), device(), dimensions, exceptions);
    whole.prop_map(|(name, many, device, dimensions, exceptions)| {
        let dimensions: Vec<_> = dimensions
            .into_iter()
            .zip(0..)
            .map(|(((kind, size), numbers, name), index)| {
                let (bandwidth, latency, efficiency, devices_per_link, tree, sums) = numbers;
                let is_switch = kind == DimensionKind::Switch;
                let tree = tree.filter(|_| is_switch);
                Dimension {
                    name: format!("{index}{name}"),
                    kind,
                    size,
                    bandwidth: BytesPerSec(bandwidth),
                    latency: Seconds(latency),
                    efficiency,
                    devices_per_link,
                    tree,
                    in_network_reduction: sums && is_switch,
                }
            })
            .collect();
        let hosts = if many { dimensions[0].size } else { 1 };
        let (measured, host_ports, uneven) = (None, None, Heterogeneity::default());
        let mut cluster = Cluster {
            name,
            hosts,
            device,
            dimensions,
            measured,
            host_ports,
            heterogeneity: uneven,
        };
        let (device, at, rate, from, factor, given) = exceptions;
        let Heterogeneity { kinds, links, stragglers, schedules, .. } = &mut cluster.heterogeneity;
        if given[0] {
            kinds.push(DeviceOverride { at: at.clone(), device });
        }
        if given[1] {
            let (bandwidth, latency) = (Some(BytesPerSec(rate)), given[2].then_some(Seconds(from)));
            links.push(LinkOverride { dimension: 0, at: at.clone(), bandwidth, latency });
        }
        if given[2] {
            let until = given[3].then_some(Seconds(from + factor));
            stragglers.push(Straggler { at: at.clone(), factor, from: Seconds(from), until });
        }
        if given[3] {
            let at = if given[0] { at } else { Selector::Everywhere };
            let change = |at, bandwidth| BandwidthChange { at: Seconds(at), bandwidth };
            let changes = vec![change(from, factor), change(from + 1.0, 0.25)];
            schedules.push(BandwidthSchedule { dimension: 0, at, changes });
        }
        cluster
    })
}

/// Selectors that are valid in every cluster.
fn place() -> impl Strategy<Value = Selector> {
    prop_oneof![
        Just(Selector::Hosts(vec![IndexRange::one(0)])),
        Just(Selector::Ranks(vec![IndexRange::one(0), IndexRange { first: 0, last: 0 }])),
    ]
}

proptest! {
    #[test]
    fn what_is_printed_parses_back_as_the_same_cluster(cluster in cluster()) {
        let text = cluster.to_toml();
        prop_assert_eq!(Cluster::parse(&text, "printed.toml"), Ok(cluster), "{}", text);
    }

    #[test]
    fn no_text_breaks_the_parser(text in "(name|hosts|device|dimension|kind|size|[\\[\\]{}=\"\n 0-9a-z.-]){0,60}") {
        let _ = Cluster::parse(&text, "noise.toml");
    }
}
