//! Tests that the output of `bench kernels`, `core-to-core` and `train` is consistent at any speed.

use super::support::Folder;
use serde_json::Value;
use std::fs;

fn number(object: &Value, field: &str) -> f64 {
    object[field].as_f64().unwrap_or_else(|| panic!("{field} in {object}"))
}

#[test]
fn kernels_of_a_model_are_timed_and_add_up() {
    let here = Folder::new();
    for flags in ["--optimizer lamb", "--dtype bf16 --micro-batch 2 --threads-per-rank 2"] {
        let line = format!("bench kernels --model mini --seq 16 {flags} --budget 0 --json");
        let objects = here.run(&line).done().objects();
        let (sum, rows) = objects.split_last().unwrap();
        assert_eq!(number(sum, "kernels") as usize, rows.len(), "{line}");
        let share: f64 = rows.iter().map(|row| number(row, "share")).sum();
        assert!((share - 1.0).abs() < 1e-9, "{share}");
        let spent: f64 = rows.iter().map(|r| number(r, "uses") * number(r, "median_us")).sum();
        assert!((spent * 1e-6 / number(sum, "compute_s") - 1.0).abs() < 1e-9, "{spent} {sum}");
        let of = |name: &str| rows.iter().filter(|row| row["kernel"] == name).collect::<Vec<_>>();
        for product in of("linear.forward") {
            // Two operations per token, input and output.
            let shape = product["shape"].as_array().unwrap();
            let work: f64 = shape.iter().map(|n| n.as_f64().unwrap()).product::<f64>() * 2.0;
            let rate = work / number(product, "median_us") / 1e3;
            assert!((number(product, "gflops") / rate - 1.0).abs() < 1e-9, "{product}");
            assert!(number(product, "of_peak") <= 1.0, "{product}");
        }
        assert_eq!(of("linear.forward").len(), 5, "four of a block, and the head");
        assert!(of("attention.input")[0]["gbps"].is_null());
        assert!(number(of("gelu.forward")[0], "gbps") > 0.0);
        let gauged = usize::from(flags.contains("lamb"));
        assert_eq!(of("tensor_norms.lamb").is_empty(), gauged == 0, "{line}");
    }
    // The last of two stages has the loss, the first the embedding; sharded matrices are halved.
    for (rank, own, other) in [(0, "embedding.forward", "row_max"), (4, "row_max", "embedding")] {
        let line = format!(
            "bench kernels --model mini --seq 16 --tp 2 --pp 2 --dp 2 --zero 1 --global-batch 4 \
             --rank {rank} --budget 0 --json"
        );
        let objects = here.run(&line).done().objects();
        let named = |name: &'static str| {
            objects
                .iter()
                .filter(move |row| row["kernel"].as_str().is_some_and(|k| k.starts_with(name)))
        };
        assert!(named(own).count() > 0 && named(other).count() == 0, "rank {rank}");
        let mut products = named("linear.forward").map(|row| row["shape"][2].as_u64().unwrap());
        assert!(products.any(|outputs| outputs == 256), "512 in two halves");
    }
    here.run("bench kernels --model mini --dp 2 --rank 2").refused(&["--rank"]);
    let told = here.run("bench kernels --model mini --seq 16 --budget 0").done().out;
    assert!(told.contains("GFLOP/s") && told.contains("GB/s") && told.contains("of peak"));
    here.run("bench kernels --model mini --budget -1 --threads-per-rank 0 --tp 3").refused(&[
        "--budget",
        "--threads-per-rank",
        "--tp",
    ]);
}

#[test]
fn cores_are_some_way_from_each_other() {
    let here = Folder::new();
    here.run("bench core-to-core --rounds 0").refused(&["--rounds"]);
    let cores = std::thread::available_parallelism().unwrap().get();
    if cores < 2 {
        return;
    }
    let objects = here.run("bench core-to-core --rounds 2 --json").done().objects();
    let (sum, pairs) = objects.split_last().unwrap();
    assert_eq!(pairs.len(), cores * (cores - 1) / 2);
    for pair in pairs {
        let (least, most) = (number(pair, "least_s"), number(pair, "most_s"));
        assert!(0.0 < least && least <= most, "{pair}");
        assert!(number(sum, "least_s") <= least && most <= number(sum, "most_s"), "{sum}");
    }
    let told = here.run("bench core-to-core --rounds 1").done().out;
    assert!(told.contains("there and back"), "{told}");
}

#[test]
fn training_is_measured_and_nothing_is_left() {
    let here = Folder::new();
    here.file(
        "run.toml",
        "model = \"mini\"\ndp = 2\nseq = 16\nglobal-batch = 4\n[train]\niterations = 12\n",
    );
    let ran = here.run("bench train --config run.toml --json").done();
    let objects = ran.objects();
    assert_eq!(objects.len(), 1, "{}", ran.out);
    let pace = &objects[0];
    let [left_out, iterations] = ["left_out", "iterations"].map(|field| number(pace, field));
    assert_eq!((left_out, iterations), (2.0, 10.0), "the file says twelve");
    let order = ["min_s", "p10_s", "measured_iteration_s", "p90_s", "max_s"]
        .map(|field| number(pace, field));
    assert!(order.is_sorted() && order[0] > 0.0, "{pace}");
    let tokens = number(pace, "tokens_per_iteration") / number(pace, "measured_iteration_s");
    assert_eq!(number(pace, "tokens_per_iteration"), 64.0);
    assert!((number(pace, "tokens_per_s") / tokens - 1.0).abs() < 1e-9, "{pace}");
    for field in ["peak_bytes", "planned_peak_bytes"] {
        assert_eq!(pace[field].as_array().unwrap().len(), 2, "{pace}");
    }
    let trained = here.run("train --config run.toml --out run --json").done().objects();
    assert_eq!(trained.last().unwrap()["loss_bits"], pace["loss_bits"], "the same run");
    let left: Vec<_> =
        fs::read_dir(here.path()).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left.len(), 2, "run.toml and run: {left:?}");

    let told = here.run("bench train --config run.toml --iterations 3 --transport thread").done();
    assert!(told.out.contains("tokens/s") && told.out.contains("rank 1 "), "{}", told.out);
}
