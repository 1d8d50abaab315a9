//! Tests of the JSON fields that are specified.

use super::support::Folder;
use serde_json::Value;

#[track_caller]
fn has(object: &Value, fields: &[&str]) {
    for field in fields {
        assert!(object.get(field).is_some_and(|value| !value.is_null()), "{field} in {object}");
    }
}

#[test]
fn models_and_clusters_are_listed() {
    let here = Folder::new();
    let models = here.run("models --json").done().objects();
    let gpt2 = models.iter().find(|model| model["name"] == "gpt2-124m").unwrap();
    assert_eq!((&gpt2["kind"], gpt2["params"].as_u64()), (&"gpt2".into(), Some(124_439_808)));
    assert_eq!(gpt2["layers"], 12);
    let clusters = here.run("clusters --json").done().objects();
    assert_eq!(clusters.len(), 24);
    has(&clusters[1], &["name", "hosts", "devices", "device", "dimensions"]);
}

#[test]
fn a_plan_has_its_fields_and_adds_up() {
    let here = Folder::new();
    let line = "plan --model gpt2-124m --tp 2 --pp 2 --dp 2 --global-batch 16 --json";
    let ran = here.run(line).done();
    let plan = &ran.objects()[0];
    assert_eq!(ran.objects().len(), 1);
    has(plan, &["ranks", "roles", "ops_per_iteration", "bubble_fraction", "bytes_by_axis"]);
    assert_eq!((plan["ranks"].as_u64(), plan["roles"].as_u64()), (Some(8), Some(2)));
    let bubble = plan["bubble_fraction"].as_f64().unwrap();
    assert!((bubble - 1.0 / 9.0).abs() < 1e-12, "two stages, eight microbatches: {bubble}");
    let kinds = ["parameters", "gradients", "optimizer", "activations", "communication"];
    let sum: u64 = kinds.iter().map(|kind| plan["memory"][kind].as_u64().unwrap()).sum();
    assert_eq!(plan["peak_bytes"].as_u64(), Some(sum));
    for axis in ["dp", "pp", "tp"] {
        assert!(plan["bytes_by_axis"][axis].as_u64().unwrap() > 0, "{axis}");
    }
}

/// A cluster file with a straggler: text and JSON name the slowest rank.
#[test]
fn a_straggler_is_named() {
    let here = Folder::new();
    let file = paceline_sim::cluster::preset::get("dgx-a100:2").unwrap().to_toml();
    here.file("even.toml", &file);
    here.file("slow.toml", format!("{file}\n[[straggler]]\nranks = [9]\nfactor = 2.0\n"));
    let line = "simulate --model gpt2-124m --dp 16 --global-batch 64 --cluster";
    let slow = here.run(&format!("{line} slow.toml --json")).done().objects().remove(0);
    assert_eq!(
        (slow["slowest"]["rank"].as_u64(), slow["slowest"]["host"].as_u64()),
        (Some(9), Some(1))
    );
    assert_eq!(slow["rank_groups"].as_array().map(Vec::len), Some(2));
    let even = here.run(&format!("{line} even.toml --json")).done().objects().remove(0);
    assert_eq!(slow["limits"]["homogeneous_s"], even["iteration_s"]);
    assert!(even["rank_groups"].is_null() && even["limits"]["homogeneous_s"].is_null());
    let text = here.run(&format!("{line} slow.toml --details")).done().out;
    for part in
        ["rank 9: 2 times slower", "slowest rank: 9 on host 1", "devices and links all alike"]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
}

#[test]
fn sparse_weights_are_a_flag_of_any_profile() {
    let here = Folder::new();
    let time = |flags: &str| {
        let line = "simulate --model llama3-8b --tp 8 --global-batch 1 --cluster dgx-a100 --json";
        here.run(&format!("{line} {flags}")).done().objects()[0]["compute_s"].as_f64().unwrap()
    };
    assert_eq!(time("--sparse-weights"), time("--profile modern-sparse"));
    assert!(time("--sparse-weights") < 0.8 * time(""));
    let core = |flags: &str| time(&format!("--profile megatron-core {flags}"));
    assert!(core("--sparse-weights") < core(""));
}

#[test]
fn a_plan_prints_its_grid_and_its_programs() {
    let here = Folder::new();
    let grid = here.run("plan --model mini --pp 2 --global-batch 2 --schedule gpipe --format csv");
    assert_eq!(grid.done().out, "0F0,0F1,,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n");
    let textbook = here.run("plan --model mini --pp 4 --global-batch 8 --format grid").done().out;
    let columns = |line: &str| line.split_whitespace().skip(2).count();
    assert_eq!(textbook.lines().skip(1).map(columns).collect::<Vec<_>>(), [22; 4], "{textbook}");
    assert!(textbook.contains("rank 0 F0 F1 F2 F3  ·"), "{textbook}");
    let help = here.run("plan --help").done().out;
    assert!(help.contains("grid: the schedule of textbooks") && help.contains("PyTorch"), "{help}");
    let programs = here.run("plan --model mini --dp 2 --format text").done().out;
    assert!(paceline_plan::text::parse(&programs).is_ok());
    here.run("plan --model mini --format xml")
        .refused(&["--format: 'xml' is none of grid, csv and text"]);
}

#[test]
fn a_plan_for_people_fits_one_screen() {
    let here = Folder::new();
    for line in [
        "plan --model gpt3-175b --tp 8 --pp 8 --dp 16 --global-batch 1536 --schedule interleaved:3 \
         --zero 2 --cluster dgx-a100:128",
        "plan --model gpt-1008b --tp 8 --pp 64 --dp 6 --global-batch 3072 --cluster dgx-a100:384",
        "simulate --model gpt-1008b --tp 8 --pp 64 --dp 6 --global-batch 3072 --cluster dgx-a100:384",
    ] {
        let text = here.run(line).done().out;
        assert!(text.lines().count() <= 40, "{line}: {} lines", text.lines().count());
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= 100, "{line}: {widest} columns\n{text}");
    }
}

#[test]
fn a_simulation_has_its_fields_and_adds_up() {
    let here = Folder::new();
    let line = "simulate --model gpt2-1.5b --dp 8 --global-batch 64 --cluster dgx-a100 \
                --trace t.json --report r.html --json";
    let ran = here.run(line).done();
    let [object] = &ran.objects()[..] else { panic!("{}", ran.out) };
    has(object, &["iteration_s", "compute_s", "communication_s", "exposed_communication_s"]);
    has(object, &["bubble_fraction", "peak_bytes", "fits", "mfu", "tokens_per_s_per_device"]);
    let number = |field: &str| object[field].as_f64().unwrap();
    let iteration = number("iteration_s");
    let parts = number("compute_s")
        + number("exposed_communication_s")
        + number("bubble_fraction") * iteration;
    assert!((parts / iteration - 1.0).abs() < 1e-9, "{parts} of {iteration}");
    assert!((0.05..1.0).contains(&number("mfu")));
    let tokens = 64.0 * 1024.0 / iteration / 8.0;
    assert!((number("tokens_per_s_per_device") / tokens - 1.0).abs() < 1e-9);
    has(&object["ops"][0], &["name", "count", "time_s", "exposed_s"]);
    let trace = std::fs::read_to_string(here.path().join("t.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());
    let page = std::fs::read_to_string(here.path().join("r.html")).unwrap();
    assert!(page.contains("gpt2-1.5b on dgx-a100, simulated"));
    for fact in [
        "<dt>MFU</dt>",
        "<dt>tokens/s</dt>",
        " of 80.0 GiB, 2.00 GiB kept free: fits",
        "<dt>idle</dt>",
    ] {
        assert!(page.contains(fact), "{fact}");
    }
    let (causal, full) = (number("mfu"), number("mfu_full_attention"));
    assert!(causal < full && full < 1.2 * causal, "{causal} {full}");
}

#[test]
fn throughput_names_what_it_counts() {
    let here = Folder::new();
    let of = |model: &str, unit: &str, batch: &str| {
        let text = here
            .run(&format!("simulate --model {model} --global-batch 4 --cluster dgx-a100"))
            .done()
            .out;
        assert!(text.contains(&format!("\n{unit}/s")), "{model}\n{text}");
        assert!(text.contains(batch), "{model}\n{text}");
        assert_eq!(text.contains("token"), unit == "tokens", "{model}\n{text}");
    };
    of("resnet50", "images", "4 images: 1 replica");
    of("dlrm-mini", "clicks", "4 clicks: 1 replica");
    of("gpt2-124m", "tokens", "4 samples of 1,024 tokens: 1 replica");
}

#[test]
fn a_simulation_says_what_limits_it_and_what_it_waits_for() {
    let here = Folder::new();
    let line = "simulate --model gpt2-350m --dp 4 --pp 2 --tp 2 --global-batch 64 \
                --cluster dgx-a100:2 --json";
    let object = &here.run(line).done().objects()[0];
    let iteration = object["iteration_s"].as_f64().unwrap();
    let path = object["critical_path"].as_object().unwrap();
    let sum: f64 = path.values().map(|time| time.as_f64().unwrap()).sum();
    assert!((sum / iteration - 1.0).abs() < 1e-9, "{path:?}");
    for limit in ["no_network_s", "no_compute_s", "no_bubble_s"] {
        let time = object["limits"][limit].as_f64().unwrap();
        assert!(time > 0.0 && time <= iteration, "{limit} {time}");
    }
    let dimensions = object["bandwidth"].as_array().unwrap();
    assert_eq!(dimensions.len(), 2);
    for used in dimensions {
        has(used, &["dimension", "utilisation", "bytes_per_device", "message_s"]);
        assert!((0.0..1.0).contains(&used["utilisation"].as_f64().unwrap()), "{used}");
    }
    let band: Vec<f64> =
        object["error_band"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert!(band.len() == 2 && band[0] < band[1], "{band:?}");
    assert_eq!(object["error_band_runs"], 0, "no run of the default profile was measured");
    for absent in ["training", "failures", "memory_over_time"] {
        assert!(object.get(absent).is_none(), "{absent}");
    }
    let detailed = &here.run(&format!("{line} --details")).done().objects()[0];
    let roles = detailed["memory_over_time"].as_array().unwrap();
    assert_eq!(roles.len(), 2);
    assert!(roles.iter().all(|role| role["points"].as_array().unwrap().len() > 10));
}

#[test]
fn a_whole_run_is_timed_and_priced() {
    let here = Folder::new();
    let line = "simulate --model gpt2-1.5b --dp 8 --global-batch 64 --cluster dgx-a100 \
                --tokens 100B --price-per-device-hour 2 --mtbf-hours 10000 --checkpoint-every 5000";
    let object = &here.run(&format!("{line} --json")).done().objects()[0];
    let number = |path: &str| object.pointer(path).and_then(Value::as_f64).unwrap();
    let iterations = (100e9f64 / (64.0 * 1024.0)).ceil();
    assert_eq!(number("/training/iterations"), iterations);
    let goodput = number("/failures/goodput");
    assert!(goodput > 0.5 && goodput <= number("/failures/best_goodput"));
    assert_eq!(number("/failures/mtbf_s"), 10_000.0 * 3600.0 / 8.0);
    assert_eq!(number("/failures/checkpoint_every"), 5000.0);
    let wall = iterations * number("/iteration_s") / goodput;
    assert!((number("/training/wall_s") / wall - 1.0).abs() < 1e-9);
    assert!((number("/training/cost") / (wall / 3600.0 * 8.0 * 2.0) - 1.0).abs() < 1e-9);
    let text = here.run(&format!("{line} --details")).done().out;
    for said in ["training", "1,525,879 iterations", "goodput", "critical path", "infinitely fast"]
    {
        assert!(text.contains(said), "{said}\n{text}");
    }
    let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
    assert!(widest <= 100, "{widest} columns\n{text}");
}

/// The flow network shares links; a plan that hardly uses them takes about the same time.
#[test]
fn the_network_can_be_chosen() {
    let here = Folder::new();
    let line = "simulate --model gpt2-124m --dp 4 --global-batch 8 --cluster dgx-a100 --json";
    let analytic = &here.run(line).done().objects()[0];
    let flow = &here.run(&format!("{line} --network flow")).done().objects()[0];
    let time = |object: &Value| object["iteration_s"].as_f64().unwrap();
    assert!((time(flow) / time(analytic) - 1.0).abs() < 0.5, "{flow} {analytic}");
    let path = flow["critical_path"].as_object().unwrap();
    let sum: f64 = path.values().map(|time| time.as_f64().unwrap()).sum();
    assert!((sum / time(flow) - 1.0).abs() < 1e-9, "{path:?}");
}

/// 2(n − 1) rounds, and 2(n − 1)/n of the vector from each rank (Patarasuk and Yuan, 2009).
#[test]
fn a_collective_counts_what_its_algorithm_states() {
    let here = Folder::new();
    let line = "collective --op all_reduce --algorithm ring --size 8MiB --cluster dgx-a100 --json";
    let object = &here.run(line).done().objects()[0];
    assert_eq!(object["rounds"], 14);
    assert_eq!(object["bytes_sent_per_rank_max"], 14 * (1 << 20));
    assert_eq!(object["fan_in_max"], 1);
    // The links alone take 14 MiB at 300 GB/s.
    let floor = 14.0 * 1048576.0 / 300e9;
    let time = object["time_s"].as_f64().unwrap();
    assert!(time > floor && time < 10.0 * floor, "{time}");
}

#[test]
fn every_row_of_a_table_is_answered() {
    let here = Folder::new();
    let columns = "id,platform,gpus_per_node,gpus,layers,d_model,ffn,heads,kv_heads,seq,vocab,experts,\
                   activation_gated,tied_embeddings,tp,sp,pp,vpp,dp,cp,ep,etp,micro_batch,\
                   global_batch,precision,recompute,schedule,measured_iteration_s,software";
    let row = |id: &str, experts: &str| {
        format!(
            "{id},A100-SXM-80GB,8,8,24,2304,9216,24,24,2048,51200,{experts},gelu/no,True,1,False,1,1,\
             8,1,1,1,4,32,bf16,full,none,2.0,modern"
        )
    };
    here.file("t.csv", format!("{columns}\n{}\n{}\n", row("plain", ""), row("moe", "8")));
    let objects = here.run("validate --table t.csv --json").done().objects();
    let [plain, moe, total] = &objects[..] else { panic!("{objects:?}") };
    assert_eq!((&plain["id"], &plain["measured_s"]), (&"plain".into(), &2.0.into()));
    let (error, predicted) =
        (plain["error"].as_f64().unwrap(), plain["predicted_s"].as_f64().unwrap());
    assert!((error - (predicted - 2.0) / 2.0).abs() < 1e-12);
    assert!(moe["skipped"].as_str().unwrap().contains("topk"));
    assert_eq!(total["rows"], 2);
    assert!((total["median_abs_error"].as_f64().unwrap() - error.abs()).abs() < 1e-12);
    assert!(total.get("band").is_none(), "one run makes no band: {total}");
    let names = ["a", "b", "c", "d", "e"];
    let rows: Vec<String> = names.iter().map(|name| row(name, "")).collect();
    here.file("five.csv", format!("{columns}\n{}\n", rows.join("\n")));
    let text = here.run("validate --table five.csv").done().out;
    assert!(text.contains("5 rows, 5 compared, 0 skipped"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("four of five take"), "{text}");
    let nameless =
        format!("{}\n{}\n", columns.replace(",software", ""), rows[0].replace(",modern", ""));
    here.file("nameless.csv", nameless).run("validate --table nameless.csv").done();
    let text = here.run("validate --table nameless.csv").done().out;
    assert!(text.contains("skipped a: software is not stated"), "{text}");
}

#[test]
fn tables_of_collectives_are_answered_too() {
    let here = Folder::new();
    here.file(
        "nccl.csv",
        "source,gpu,gpus,op,dtype,size_bytes,time_us_out_of_place,busbw_GBps_out_of_place\n\
         x,A100,8,all_reduce,float,67108864,620,190\n",
    );
    let objects = here.run("validate --table nccl.csv --json").done().objects();
    assert_eq!(objects.len(), 2);
    assert!(objects[0]["error"].as_f64().unwrap().abs() < 0.5, "{}", objects[0]);
    here.file(
        "astra.csv",
        "id,backend,collective,bytes,topology,npus_per_dim,bandwidth_GBps,latency_ns,algorithm,\
         splits,active_chunks,collective_opt,endpoint_delay,local_mem_bw,sim_time_ns_max\n\
         r07,congestion_unaware,all_reduce,67108864,FullyConnected,8,50,500,direct,4,1,\
         localBWAware,10,1600,332336\n",
    );
    for semantics in ["", "--semantics astra-sim"] {
        let line = format!("validate --table astra.csv --json {semantics}");
        let objects = here.run(&line).done().objects();
        assert_eq!(objects[0]["error"].as_f64(), Some(0.0), "{}", objects[0]);
        assert_eq!(objects[0]["measured_s"].as_f64(), Some(332_336.0 * 1e-9));
    }
    // Paceline's own network model charges no copy at the end points: docs/astra-sim.md.
    let objects =
        here.run("validate --table astra.csv --json --semantics default").done().objects();
    let error = objects[0]["error"].as_f64().unwrap();
    assert!((-0.1..0.0).contains(&error), "{error}");
    let text = here.run("validate --table astra.csv").done().out;
    assert!(text.contains("r07") && !text.contains("GiB"), "{text}");
}

#[test]
fn a_search_lists_candidates_best_first() {
    let here = Folder::new();
    let line = "search --model gpt2-350m --cluster dgx-a100 --global-batch 32 --top 4 --json";
    let found = here.run(line).done().objects();
    assert_eq!(found.len(), 5, "four candidates and a last line");
    for (index, candidate) in found[..4].iter().enumerate() {
        has(candidate, &["rank", "strategy", "iteration_s", "peak_bytes", "fits"]);
        assert_eq!(candidate["rank"].as_u64(), Some(index as u64 + 1));
        has(&candidate["strategy"], &["dp", "tp", "pp", "micro_batch", "schedule"]);
    }
    let seconds: Vec<f64> = found[..4].iter().map(|c| c["iteration_s"].as_f64().unwrap()).collect();
    assert!(seconds.is_sorted(), "{seconds:?}");
    has(&found[4], &["considered", "search_s"]);
    assert!(found[4]["considered"].as_u64().unwrap() > 50);
    here.run("search --model gpt2-350m --cluster dgx-a100 --top 0")
        .refused(&["--global-batch", "--top: '0'"]);
}
