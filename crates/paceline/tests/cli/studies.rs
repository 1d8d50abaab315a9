//! Tests of `--vary`, `--set` and the output of studies.

use super::support::Folder;
use serde_json::Value;

const RING: &str = "collective --op all_reduce --algorithm ring --size 64MiB --cluster dgx-a100:4";

fn number(object: &Value, field: &str) -> f64 {
    object[field].as_f64().unwrap_or_else(|| panic!("{field} in {object}"))
}

#[test]
fn every_point_is_what_the_command_says_by_itself() {
    let here = Folder::new();
    let study = here.run(&format!("{RING} --vary ranks=8,16,32 --json")).done().objects();
    assert_eq!(study.len(), 3);
    for (point, ranks) in study.iter().zip([8, 16, 32]) {
        assert_eq!(point["vary"]["ranks"], ranks);
        let alone = here.run(&format!("{RING} --ranks {ranks} --json")).done().objects();
        for field in ["time_s", "rounds", "bytes_sent_per_rank_max", "algorithm"] {
            assert_eq!(point[field], alone[0][field], "{field}");
        }
    }
}

#[test]
fn what_varies_takes_the_place_of_what_was_typed_or_stands_in_a_file() {
    let here = Folder::new();
    here.file(
        "run.toml",
        "model = \"mini\"\ndp = 2\nsp = true\nvary = [\"dp+tp=2+1,4+2\", \"sp=false,true\"]\n",
    );
    let points = here.run("plan --config run.toml --json").done().objects();
    let ranks: Vec<Option<u64>> = points.iter().map(|point| point["ranks"].as_u64()).collect();
    let skipped = None; // Sequence parallelism needs tensor parallelism.
    assert_eq!(ranks, [Some(2), skipped, Some(8), Some(8)]);
}

#[test]
fn fields_of_the_cluster_are_set_and_varied() {
    let here = Folder::new();
    let time = |more: &str| {
        let points = here.run(&format!("{RING} {more} --json")).done().objects();
        points.iter().map(|point| number(point, "time_s")).collect::<Vec<_>>()
    };
    let base = time("")[0];
    assert_eq!(time("--set dimension.0.latency=1x")[0], base);
    let fast = time("--set dimension.0.bandwidth=2x --set dimension.1.bandwidth=2x")[0];
    assert!(fast < base && fast > base / 2.0, "latency stays: {base} {fast}");
    let varied =
        time("--vary dimension.infiniband.bandwidth+dimension.nvlink.bandwidth=1x+1x,2x+2x");
    assert_eq!(varied, [base, fast]);
}

#[test]
fn a_picture_is_written_and_a_table_shown() {
    let here = Folder::new();
    let ran = here
        .run(&format!(
            "{RING} --vary size=1MiB,16MiB,256MiB --vary algorithm=ring,tree --plot deep/t.svg \
             --title All-reduce"
        ))
        .done();
    assert_eq!(ran.out.lines().count(), 5, "a title, a head and three sizes: {}", ran.out);
    assert!(ran.err.contains("wrote deep/t.svg"));
    let svg = std::fs::read_to_string(here.path().join("deep/t.svg")).unwrap();
    assert_eq!(svg.matches("<circle").count(), 6);
    for text in ["All-reduce", "ring", "tree", "256 MiB", "prefers-color-scheme:dark"] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn fields_can_be_named_and_computed_with() {
    let here = Folder::new();
    let line = "simulate --model mini --cluster laptop --vary global-batch=2,4";
    let y = "busy=compute_s / iteration_s,ops.forward.time_s";
    let arguments: Vec<&str> = line.split(' ').chain(["--y", y]).collect();
    let ran = here.run_with(&arguments).done();
    assert!(ran.out.starts_with("global-batch  busy  ops · forward · time\n"), "{}", ran.out);
}

#[test]
fn a_combination_that_does_not_work_is_a_gap_and_a_value_that_never_does_is_wrong() {
    let here = Folder::new();
    let line = "plan --model mini --vary dp=1,2 --vary global-batch=1,2";
    let ran = here.run(&format!("{line} --json")).done();
    let skipped: Vec<Value> =
        ran.objects().into_iter().filter(|point| point.get("skipped").is_some()).collect();
    assert_eq!(skipped.len(), 1);
    assert_eq!(
        (&skipped[0]["vary"]["dp"], &skipped[0]["vary"]["global_batch"]),
        (&2.into(), &1.into())
    );
    assert!(ran.err.contains("no dp=2, global-batch=1: --global-batch: 1 samples"), "{}", ran.err);
    here.run("plan --model mini --vary dp=1,0,x").refused(&[
        "2 problems",
        "--vary: dp=0: --dp: '0'",
        "--vary: dp=x: --dp: 'x'",
    ]);
    let told = here.run("plan --model minni --tp x --vary dp=1,2").refused(&["--tp: 'x'"]);
    assert_eq!(told.err.matches("--tp: 'x'").count(), 1, "{}", told.err);
}

#[test]
fn wrong_studies_say_what_would_work() {
    let here = Folder::new();
    for (flags, said) in [
        ("--vary rank=1,2", "--vary: there is no rank (did you mean ranks?)"),
        ("--vary json=true", "--vary: json cannot vary"),
        ("--vary ranks", "--vary: write NAME=V1,V2"),
        ("--vary ranks=1,2 --vary ranks=3,4", "--vary: ranks varies twice"),
        ("--vary ranks=1 --vary size=1 --vary root=0", "--vary: at most two"),
        ("--vary dimension.5.size=1,2", "--vary: dimension.5.size=1: --set: dimension.5.size=1:"),
        ("--vary ranks=2,4 --y tims_s", "--y: there is no number 'tims_s' (did you mean time_s?)"),
        ("--vary ranks=2,4 --y time_s+", "--y: a name or a number is missing"),
        ("--vary ranks=2,4 --y time_s,rounds --plot x.svg", "--y: time and rounds have different"),
        ("--vary ranks=2,4 --plot x.png", "--plot: pictures are SVG"),
        ("--vary ranks=2,4 --plot .", "--plot: name a file"),
        ("--vary ranks=2,4 --log z --plot x.svg", "--log: 'z' is none of"),
        ("--vary ranks=2,4 --title x", "--title: needs --plot"),
        ("--vary algorithm=ring,tree --vary size=1,2,3,4,5,6,7,8,9 --plot x.svg", "too many"),
        ("--plot x.svg --y time_s", "--plot: needs --vary"),
        ("--set dimension.0.bandwith=1GB/s", "did you mean `bandwidth`?"),
    ] {
        here.run(&format!("{RING} {flags}")).refused(&[said]);
    }
    let many: Vec<String> = (1..=200).map(|n| n.to_string()).collect();
    let many = many.join(",");
    here.run(&format!("{RING} --vary size={many} --vary root={many}")).refused(&["40000 points"]);
    here.run("plan --model mini --vary sp=1,2").refused(&["sp is a switch"]);
    here.run("plan --model mini --set hosts=2").refused(&["--set: needs --cluster"]);
    here.run("simulate --model mini --cluster laptop --vary dp=1,2 --report r.html")
        .refused(&["cannot be used with"]);
    assert!(!here.path().join("x.svg").exists());
}

/// Every section of a cluster file can vary, also the one of NICs and PCIe.
#[test]
fn nics_and_gpudirect_can_vary() {
    let here = Folder::new();
    let page = include_str!("../../../../docs/clusters.md");
    let start = page.find("name = \"pcie-hosts\"").unwrap();
    here.file("pcie.toml", page[start..].split("```").next().unwrap());
    let line = "collective --op all_reduce --size 64MiB --cluster pcie.toml";
    let times = |vary: &str| -> Vec<f64> {
        let objects = here.run(&format!("{line} --vary {vary} --json")).done().objects();
        objects.iter().map(|object| object["time_s"].as_f64().unwrap()).collect()
    };
    let nics = times("host.nics=1,2");
    assert!(nics[1] < nics[0], "{nics:?}");
    let rates = times("host.nic_bandwidth=50Gbit/s,100Gbit/s");
    assert!(rates[1] < rates[0], "{rates:?}");
    here.run(&format!("{line} --set host.protocol=rdma --vary host.gpudirect=true,false")).done();
}
