//! Wrong input: exit status 2, all problems at once, never a panic.

use super::support::Folder;

#[test]
fn heads_that_do_not_divide_name_the_flag_and_what_would_work() {
    let here = Folder::new();
    here.run("plan --model gpt2-124m --tp 5")
        .refused(&["--tp: 5 does not divide gpt2-124m's 12 heads; these do: 1, 2, 3, 4, 6, 12"]);
}

#[test]
fn more_stages_than_layers_are_refused() {
    let here = Folder::new();
    here.run("plan --model mini --pp 7 --global-batch 7").refused(&["--pp: 7 stages", "at most 6"]);
}

#[test]
fn a_batch_that_does_not_divide_says_the_nearest_that_do() {
    let here = Folder::new();
    here.run("plan --model mini --dp 3 --micro-batch 2 --global-batch 20")
        .refused(&["--global-batch: 20 samples", "18 or 24 do"]);
}

#[test]
fn all_problems_are_told_at_once() {
    let here = Folder::new();
    let told = here
        .run(
            "simulate --model gpt2-124m --tp 5 --pp 99 --global-batch x --zero 4 --compress int5 \
             --schedule zb-h2 --cluster nowhere --network packet --dtype f64",
        )
        .refused(&[
            "problems",
            "--tp: 5",
            "--pp: 99",
            "--global-batch: 'x'",
            "--zero: '4'",
            "--compress: 'int5' is none of none, int8",
            "--schedule: unknown schedule 'zb-h2'",
            "--cluster: no built-in cluster is called 'nowhere'",
            "--network: the packet network is not available yet; use analytic or flow",
            "--dtype: unknown element type 'f64'",
        ]);
    assert_eq!(told.err.lines().count(), 10, "{}", told.err);
}

/// Second moments cannot be estimated from signs, and momentum does not tolerate them at first.
/// Flags and run files are both refused, with a message that names a remedy.
#[test]
fn compression_from_the_start_is_refused_where_optimizers_do_not_bear_it() {
    let here = Folder::new();
    let layout = "--model mini --dp 2 --global-batch 4";
    for how in ["onebit", "topk:0.1", "powersgd:2"] {
        here.run(&format!("train {layout} --compress {how} --compress-warmup 0")).refused(&[
            "--compress-warmup: adamw divides by",
            "leave it out for a fifth of the run, or use 1 or more",
        ]);
    }
    here.file("run.toml", "compress = \"onebit\"\ncompress-warmup = 0\n");
    here.run(&format!("plan {layout} --config run.toml")).refused(&["run.toml:2", "adamw divides"]);
    here.run(&format!("plan {layout} --compress int8 --compress-warmup 0")).done();
    let momentum = format!("plan {layout} --optimizer momentum --compress");
    here.run(&format!("{momentum} onebit --compress-warmup 0")).refused(&[
        "--compress-warmup: onebit sends late",
        "leave it out for a fifth of the run, or use 1 or more",
    ]);
    for works in ["onebit", "onebit --compress-warmup 1", "topk:0.1 --compress-warmup 0"] {
        here.run(&format!("{momentum} {works}")).done();
    }
    here.run(&format!("plan {layout} --compress onebit --optimizer sgd --compress-warmup 0"))
        .done();
    here.run(&format!("plan {layout} --compress-warmup 5")).refused(&["name a --compress"]);
}

#[test]
fn unknown_models_and_clusters_get_a_suggestion_and_the_list() {
    let here = Folder::new();
    here.run("plan --model gpt2-124").refused(&["did you mean gpt2-124m?", "llama3-8b"]);
    here.run("plan --model nothing/like/it").refused(&["nor a file"]);
    here.run("plan").refused(&["--model: missing; for example --model mini"]);
    here.run("simulate --model mini --cluster dgx-a10").refused(&["did you mean", "gb200-nvl72"]);
    here.run("simulate --model mini").refused(&["--cluster: missing; for example"]);
}

#[test]
fn broken_files_are_named_with_the_line() {
    let here = Folder::new();
    here.file("cut.toml", "kind = \"gpt2\"\nlayers = 4\nd_model = ")
        .file("noise.toml", [0u8, 159, 146, 150, 255, 0, 7])
        .file("empty/readme.txt", "no config here")
        .file("rendezvous/config.json", "{\"model_type\": \"gpt2\", ")
        .file("cluster.toml", "name = \"x\"\nhosts = 0\n");
    here.run("plan --model cut.toml").refused(&["cut.toml:3:"]);
    here.run("plan --model noise.toml").refused(&["--model: noise.toml is not a text file"]);
    here.run("plan --model empty").refused(&["--model: the directory 'empty' has no config.json"]);
    here.run("plan --model rendezvous").refused(&["config.json:1: this is not JSON"]);
    here.run("plan --model mini --cluster cluster.toml").refused(&["cluster.toml:2:"]);
    here.run("plan --model mini --cluster none.toml").refused(&["none.toml cannot be read"]);
    here.run("plan --model mini --config none.toml").refused(&["--config: none.toml cannot be"]);
    here.run("validate --table noise.toml").refused(&["--table: noise.toml is not a text file"]);
    here.run("validate --table cluster.toml").refused(&["cluster.toml:1:"]);
    here.run("validate").refused(&["--table: missing; for example"]);
}

#[test]
fn absurd_numbers_are_refused_by_name() {
    let here = Folder::new();
    let absurd = ["0", "-1", "1e9", "18446744073709551616", "99999999999999999999999", "NaN"];
    let flags = [
        "--ranks",
        "--dp",
        "--tp",
        "--pp",
        "--cp",
        "--ep",
        "--etp",
        "--global-batch",
        "--micro-batch",
        "--seq",
        "--leaves",
        "--bucket-mib",
    ];
    for value in absurd {
        let mut arguments = vec!["plan", "--model", "mini"];
        arguments.extend(flags.iter().flat_map(|flag| [*flag, value]));
        let said: Vec<String> = flags.iter().map(|flag| format!("{flag}: '{value}'")).collect();
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        here.run_with(&arguments).refused(&said);
    }
    for value in ["-1", "1e400", "inf", "x"] {
        let line = format!(
            "train --model mini --lr {value} --weight-decay {value} --clip {value} --warmup {value} \
             --iterations {value} --seed {value}"
        );
        let flags = [
            "--lr: '",
            "--weight-decay: '",
            "--clip: '",
            "--warmup: '",
            "--iterations: '",
            "--seed: '",
        ];
        here.run(&line).refused(&flags);
    }
    here.run("collective --op all_reduce --cluster laptop --size 1e9 --ranks 3 --root -1")
        .refused(&["--size: '1e9'", "--ranks: '3'", "--root: '-1'"]);
}

/// The largest accepted numbers, combined.
#[test]
fn large_numbers_do_not_overflow() {
    let here = Folder::new();
    for line in [
        "plan --model mini --dp 16777216 --tp 16777216 --pp 16777216 --cp 16777216",
        "plan --model mini --dp 16777216 --micro-batch 4294967296 --global-batch 4294967296",
        "plan --model mini --seq 268435456 --micro-batch 4294967296",
        "plan --model mlp --seq 268435456 --global-batch 4294967296 --leaves 4294967295",
        "plan --model mini --pp 65535 --schedule interleaved:65535",
        "plan --model mini --sync ps:4096 --dp 16777216",
        "simulate --model mini --ranks 16777216 --cluster dgx-a100:2097152 --tp 3",
        "train --model mini --dp 16777216",
    ] {
        here.run(line).refused(&["error: "]);
    }
}

#[test]
fn a_calibration_that_cannot_be_is_refused_before_anything_is_measured() {
    let here = Folder::new();
    here.run("calibrate").refused(&["--out: missing; for example"]);
    here.run("calibrate --out machine --threads 0 --ranks 2,x --transport mpi").refused(&[
        "--out: machine does not end in .toml",
        "--threads: '0'",
        "--ranks: 'x'",
        "--transport: 'mpi' cannot be measured; thread, shm and tcp can",
    ]);
}

#[test]
fn what_is_not_available_yet_says_so_and_is_not_advertised() {
    let here = Folder::new();
    here.run("serve --whatever 3").refused(&["not available yet", "simulate"]);
    here.run("trian").refused(&["did you mean train?"]);
    here.run("train --model mini --dtype fp8").refused(&["--dtype", " yet"]);
    let help = here.run("--help").done().out + &here.run("train --help").done().out;
    assert!(!help.contains("\n  serve"));
}

#[test]
fn ranks_that_share_their_weights_are_threads_of_one_process() {
    let here = Folder::new();
    let run = "train --model mini --dp 2 --sync hogwild --iterations 1";
    here.run(&format!("{run} --transport tcp --max-restarts 1 --save-every 2")).refused(&[
        "--transport: ranks",
        "--max-restarts: ranks",
        "--save-every",
    ]);
    let launched = here
        .command()
        .args(format!("{run} --launch env").split(' '))
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", "29500")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&launched.stderr);
    assert!(launched.status.code() == Some(2) && told.contains("--launch: ranks"), "{told}");
    here.run(&format!("{run} --order canonical --tp 2 --pp 2 --zero 1 --dtype bf16"))
        .refused(&["--order", "--tp", "--pp", "--zero", "--dtype"]);
    let simulate = "simulate --model mini --sync hogwild --dtype f32";
    let alone = here.run(&format!("{simulate} --dp 2 --cluster dgx-a100:1"));
    assert!(alone.err.contains("every device has a memory of its own"), "{}", alone.err);
    let apart = here.run(&format!("{simulate} --cluster laptop:2 --dp 4"));
    assert!(apart.err.contains("they stand on several hosts"), "{}", apart.err);
    let planned =
        here.run("plan --model mini --dp 2 --sync hogwild --order free --dtype f32 --json").done();
    assert!(planned.objects()[0]["shared_bytes"].as_u64() > Some(0));
}

#[test]
fn a_whole_run_is_asked_about_with_numbers_that_mean_something() {
    let here = Folder::new();
    let absurd = ["0", "-1", "1e400", "NaN", "x", ""];
    let flags = ["--tokens", "--mtbf-hours", "--checkpoint-seconds", "--checkpoint-every"];
    for value in absurd {
        let mut arguments = vec!["simulate", "--model", "mini", "--cluster", "laptop"];
        arguments.extend(flags.iter().flat_map(|flag| [*flag, value]));
        let said: Vec<String> = flags.iter().map(|flag| format!("{flag}: '{value}'")).collect();
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        here.run_with(&arguments).refused(&said);
    }
    let alone = "simulate --model mini --cluster laptop --restart-seconds 3 \
                 --price-per-device-hour 2";
    here.run(alone).refused(&[
        "--price-per-device-hour: needs --tokens",
        "--restart-seconds: needs --mtbf-hours",
    ]);
}

#[test]
fn semantics_belong_to_their_table() {
    let here = Folder::new();
    here.file("c.csv", "gpu,gpus,op,size_bytes,time_us_out_of_place\nA100,2,all_reduce,1024,9\n");
    here.run("validate --table c.csv --semantics astra-sim")
        .refused(&["--semantics: astra-sim: c.csv"]);
    here.run("validate --table c.csv --semantics mine").refused(&["'mine' is neither default nor"]);
}

#[test]
fn a_cluster_that_is_too_small_says_how_large_a_one_is_needed() {
    let here = Folder::new();
    here.run("simulate --model gpt2-124m --dp 64 --cluster dgx-a100:2").refused(&[
        "--cluster: 64 ranks do not fit on the 16 devices of dgx-a100:2; dgx-a100:8 has 64",
    ]);
}

#[test]
fn every_help_shows_an_example() {
    let here = Folder::new();
    let commands =
        ["", "train", "plan", "simulate", "validate", "collective", "report", "models", "clusters"];
    for command in commands {
        let help = here.run(&format!("{command} --help")).done().out;
        assert!(help.contains("Example") && help.contains("  paceline "), "{command}: {help}");
    }
}

/// `paceline models | head -1` is not an error.
#[test]
fn a_reader_that_leaves_is_no_failure() {
    use std::process::Stdio;
    let here = Folder::new();
    let mut child = here
        .command()
        .args(["plan", "--model", "gpt3-175b", "--format", "text"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Words and units in the spellings of other systems, and clusters of another size.
#[test]
fn words_and_units_are_read_as_people_write_them() {
    let here = Folder::new();
    let file = paceline_sim::cluster::preset::get("dgx-a100").unwrap().to_toml();
    here.file("mine.toml", file.replace("25 GB/s", "200Gbps").replace("312 TFLOP/s", "312 TFLOPS"));
    let usual = here.run("collective --op all_reduce --size 25MiB --cluster dgx-a100:8 --json");
    let usual = &usual.done().objects()[0];
    for line in [
        "--op all-reduce --size 25M --cluster dgx-a100:8",
        "--op AllReduce --size 25MiB --cluster mine.toml:8",
        "--op allreduce --size 25M --cluster dgx-a100 --set hosts=8",
        "--op all_reduce --size 25M --cluster mine.toml --set hosts=8x",
        "--op all_reduce --size 25M --cluster mine.toml:8 --set dimension.1.bandwidth=200Gb/s",
    ] {
        let own = &here.run(&format!("collective {line} --json")).done().objects()[0];
        assert_eq!((&own["time_s"], own["ranks"].as_u64()), (&usual["time_s"], Some(64)), "{line}");
    }
    here.run("plan --model mini --dtype FP32 --grad-dtype bfloat16 --bucket-mib 25M").done();
    here.run("collective --op all_reduce --size 1M --cluster mine.toml:x")
        .refused(&["--cluster: 'mine.toml:x': 'x' is not a number of hosts; write mine.toml:2"]);
    here.run("collective --op all_reduce --size 1M --cluster none.toml:2")
        .refused(&["--cluster: none.toml cannot be read"]);
}
