//! Real training, and the directory that a run writes.

use super::support::Folder;
use serde_json::Value;
use std::fs;

const TRAIN: &str = "train --model mini --seq 16 --iterations 3 --global-batch 4 --leaves 2 --json";

fn losses(objects: &[Value]) -> Vec<String> {
    let iterations = objects.iter().filter(|object| object["event"] == "iteration");
    iterations.map(|object| object["loss_bits"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_run_reports_every_iteration_and_its_end() {
    let here = Folder::new();
    let ran = here.run(&format!("{TRAIN} --dp 2 --out run")).done();
    let objects = ran.objects();
    assert_eq!(objects.len(), 4);
    for (number, object) in objects[..3].iter().enumerate() {
        assert_eq!(
            (&object["event"], &object["iteration"]),
            (&"iteration".into(), &(number + 1).into())
        );
        let loss = object["loss"].as_f64().unwrap();
        let bits = u32::from_str_radix(object["loss_bits"].as_str().unwrap(), 16).unwrap();
        assert_eq!(loss as f32, f32::from_bits(bits), "the digits restore the float");
        assert!((4.0..7.0).contains(&loss), "untrained, near ln 256: {loss}");
        assert!(object["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(object["iteration_s"].as_f64().unwrap() > 0.0);
        assert!(object["grad_norm"].as_f64().unwrap() > 0.0);
    }
    let done = &objects[3];
    assert_eq!((&done["event"], &done["loss"]), (&"done".into(), &objects[2]["loss"]));
    assert!(done["predicted_iteration_s"].as_f64().unwrap() > 0.0);
    assert!(done["measured_iteration_s"].as_f64().unwrap() > 0.0);
    let ranks = |field: &str| -> Vec<u64> {
        done[field].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect()
    };
    let planned = ranks("planned_peak_bytes");
    assert_eq!((planned.len(), planned[0]), (2, planned[1]));
    if cfg!(target_os = "linux") {
        assert_eq!(ranks("peak_bytes").len(), 2);
    }
    for name in
        ["run.json", "measured.json", "simulated.json", "trace.json", "report.html", "machine.toml"]
    {
        assert!(here.path().join("run").join(name).is_file(), "{name}");
    }
    let mut names: Vec<_> = fs::read_dir(here.path().join("run")).unwrap().flatten().collect();
    names.retain(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    assert_eq!(names.len(), 9, "and checkpoints, run.toml and model.toml");
    let checkpoint = here.path().join(done["checkpoint"].as_str().unwrap());
    assert_eq!(checkpoint, here.path().join("run/checkpoints/iteration-00000003"));
    for name in ["model.safetensors", "optimizer.safetensors", "training.json", "model.toml"] {
        assert!(checkpoint.join(name).is_file(), "{name}");
    }
}

/// A prediction without a description of the machine says how far off it may be; PowerSGD says that a
/// run is too short for it.
#[test]
fn what_is_known_of_a_prediction_and_of_a_short_run_is_told() {
    let here = Folder::new();
    let short =
        "train --model mini --seq 16 --dp 2 --global-batch 4 --iterations 3 --transport thread";
    let ran = here.run(&format!("{short} --compress powersgd:2 --out quick")).done();
    assert!(ran.out.contains("from a profile of half a second: "), "{}", ran.out);
    assert!(ran.out.contains("warning: powersgd is for runs of 1000 iterations"), "{}", ran.out);
    let read = |run: &str| -> Value {
        let text = fs::read_to_string(here.path().join(run).join("run.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(read("quick")["predicted_band"], serde_json::json!([0.85, 1.4]));
    let ran =
        here.run(&format!("{short} --compress topk:0.1 --cluster laptop --out described")).done();
    assert!(!ran.out.contains("from a profile") && !ran.out.contains("powersgd"), "{}", ran.out);
    assert!(read("described").get("predicted_band").is_none());
}

/// Layouts do not change a bit of the losses, tested through the command line.
#[test]
fn layouts_give_the_same_bits() {
    let here = Folder::new();
    let bits = |layout: &str| losses(&here.run(&format!("{TRAIN} {layout}")).done().objects());
    let alone = bits("--dp 1");
    assert_eq!(alone.len(), 3);
    for layout in ["--dp 2", "--dp 2 --zero 2", "--pp 2", "--dp 2 --pp 2 --schedule gpipe"] {
        assert_eq!(bits(layout), alone, "{layout}");
    }
    let runs: Vec<_> = fs::read_dir(here.path().join("runs")).unwrap().collect();
    assert_eq!(runs.len(), 5, "each in a directory of its own");
}

#[test]
fn people_see_the_prediction_beside_the_measurement() {
    let here = Folder::new();
    let ran = here.run("--iterations 3 --out demo").done();
    assert!(ran.out.contains("predicted") && ran.out.contains("(floor 1.0286)"), "{}", ran.out);
    assert!(ran.out.contains("One iteration: ") && ran.out.contains("│ pred."), "{}", ran.out);
    assert!(ran.out.contains("demo/report.html") || ran.out.contains("demo\\report.html"));
    assert!(ran.err.contains("iteration 3/3"), "{}", ran.err);
}

#[test]
fn a_report_is_drawn_again_and_broken_runs_are_named() {
    let here = Folder::new();
    here.run(&format!("{TRAIN} --out run")).done();
    let page = here.path().join("run/report.html");
    let first = fs::read_to_string(&page).unwrap();
    fs::remove_file(&page).unwrap();
    here.run("report run").done();
    assert_eq!(fs::read_to_string(&page).unwrap(), first, "from the files alone");

    here.run("report nowhere").refused(&["nowhere is not a directory"]);
    here.file("empty/note.txt", "").run("report empty").refused(&["run.json"]);
    fs::remove_file(here.path().join("run/measured.json")).unwrap();
    here.file("run/simulated.json", "{\"origin\":");
    here.run("report run").refused(&["measured.json", "simulated.json: not a trace"]);
    here.file("run/run.json", "[1, 2");
    here.run("report run").refused(&["run.json: not a run's record"]);
}

#[test]
fn a_run_that_fails_says_where_and_keeps_what_there_is() {
    let here = Folder::new();
    let ran = here.run("train --model mini --seq 16 --lr 1000 --clip 0 --iterations 99 --out run");
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(ran.err.contains("error: rank 0, iteration "), "{}", ran.err);
    let record = fs::read_to_string(here.path().join("run/run.json")).unwrap();
    let record: Value = serde_json::from_str(&record).unwrap();
    assert!(record["failed"].as_str().unwrap().contains("of finite numbers"));
    assert!(!record["iterations"].as_array().unwrap().is_empty());
    here.run("report run").done();
}

#[cfg(unix)]
#[test]
fn an_interrupt_finishes_the_iteration_and_writes_everything() {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Command, Stdio};
    let here = Folder::new();
    let arguments = "train --model mini --seq 16 --iterations 1000000 --out run --json";
    let mut child = here
        .command()
        .args(arguments.split(' '))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let done: Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    assert_eq!((&done["event"], &done["stopped"]), (&"done".into(), &true.into()));
    assert!(here.path().join("run/report.html").is_file());
}

/// A saved run continues as if it had never stopped, under another layout and with its own model.
#[test]
fn a_resumed_run_has_the_losses_of_one_that_never_stopped() {
    let here = Folder::new();
    let run = |line: &str| losses(&here.run(line).done().objects());
    let common = "--seq 16 --global-batch 4 --leaves 2 --json";
    let train = format!("train --model mini {common} --seed 5");
    let whole = run(&format!("{train} --iterations 6 --out whole --save-every 0"));
    let first = run(&format!("{train} --iterations 4 --dp 2 --save-every 2 --keep 1 --out first"));
    assert_eq!(first, whole[..4]);
    assert_eq!(fs::read_dir(here.path().join("first/checkpoints")).unwrap().count(), 1);
    let rest = run("train --json --iterations 6 --dp 1 --pp 2 --resume first --out rest");
    assert_eq!(rest, whole[4..]);
    assert!(!here.path().join("whole/checkpoints").exists());

    here.run("train --resume first")
        .refused(&["--iterations: 4 counts from the run's start, and the checkpoint is at 4"]);
    here.run("train --resume nowhere --model mini").refused(&["--resume: nowhere: no complete"]);
    // The checkpoint that names the model cannot be opened: --model is not reported as well.
    let told = here.run("train --resume nowhere").refused(&["--resume: nowhere: no complete"]);
    assert!(!told.err.contains("--model"), "{}", told.err);
    here.run("train --model mini --save-every -1 --keep 0")
        .refused(&["--save-every: '-1'", "--keep: '0'"]);
}

/// With Adam, compression starts after a fifth of the run. Plans report this, and runs know the
/// number of iterations, also when they resume a shorter run.
#[test]
fn compression_warms_up_by_default_and_once() {
    let here = Folder::new();
    let layout = "--seq 16 --dp 2 --global-batch 4 --compress topk:0.1";
    let planned = here.run(&format!("plan --model mini {layout}")).done().out;
    let told = "compress  first moments by topk:0.1, after a fifth of the run with whole gradients";
    assert!(planned.contains(told), "{planned}");
    let cluster = "--cluster laptop --tokens 1M";
    let simulated = here.run(&format!("simulate --model mini {layout} {cluster}")).done().out;
    assert!(simulated.contains("in the first fifth of a run"), "{simulated}");

    let common = format!("{layout} --transport thread");
    let first = format!("train --model mini {common} --iterations 10 --out first");
    let told = here.run(&first).done().out;
    assert!(told.contains("warm-up   iterations 1 to 2 of 10"), "{told}");
    let record = |name: &str| -> Value {
        let text = fs::read_to_string(here.path().join(name).join("run.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(record("first")["compress_warmup"], 2);
    here.run("train --iterations 100 --resume first --compress-warmup 20")
        .refused(&["--compress-warmup: the resumed run had a compression warm-up of 2 iterations"]);
    here.run("train --iterations 20 --resume first --out second").done();
    assert_eq!(record("second")["compress_warmup"], 2);
}

/// Starts a run that saves after every iteration and would continue for hours; ends it with a
/// signal once it has saved a few times.
fn signalled(here: &Folder, signal: &str, out: &str) -> std::process::ExitStatus {
    let line = "train --model mini --seq 16 --global-batch 4 --iterations 1000000 --save-every 1";
    let mut command = here.command();
    command.args(line.split_whitespace()).args(["--out", out]);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut child = command.spawn().unwrap();
    let third = || {
        let entries = fs::read_dir(here.path().join(out).join("checkpoints"));
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        names
            .filter_map(|name| name.to_str()?.strip_prefix("iteration-")?.parse::<u32>().ok())
            .max()
    };
    while third().is_none_or(|iteration| iteration < 3) {
        assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
    let signal = format!("-{signal}");
    let sent = std::process::Command::new("kill").args([&signal, &child.id().to_string()]).status();
    assert!(sent.unwrap().success());
    child.wait().unwrap()
}

/// However a run ends, its last complete checkpoint exists, and another run can resume from it.
#[test]
fn a_run_that_is_killed_or_interrupted_while_it_saves_can_be_resumed() {
    let here = Folder::new();
    let whole =
        "train --model mini --seq 16 --global-batch 4 --iterations 400 --save-every 0 --json";
    let whole = losses(&here.run(whole).done().objects());
    for (signal, times) in [("KILL", 3), ("INT", 1)] {
        for time in 0..times {
            let out = format!("{signal}-{time}");
            let status = signalled(&here, signal, &out);
            assert_eq!(status.success(), signal == "INT", "{signal}: {status}");
            let folder = here.path().join(&out).join("checkpoints");
            let names = || fs::read_dir(&folder).unwrap().flatten().map(|entry| entry.file_name());
            let last = names().filter_map(|name| {
                name.to_str()?.strip_prefix("iteration-")?.parse::<usize>().ok()
            });
            let last = last.max().unwrap();
            let until = last + 2;
            let rest = here.run(&format!("train --resume {out} --iterations {until} --json"));
            assert_eq!(losses(&rest.done().objects()), whole[last..until], "{out} after {last}");
            let hidden = names().filter(|name| name.to_string_lossy().starts_with('.')).count();
            assert_eq!(hidden, 0, "what the dead run left is swept away");
        }
    }
}

#[test]
fn a_text_is_learnt_evaluated_continued_and_exported() {
    let here = Folder::new();
    here.file("text/a.txt", "to be or not to be, that is the question. ".repeat(60));
    here.file("text/b.txt", "the rest is silence. ".repeat(60));
    let train = "train --model mini --seq 32 --global-batch 8 --iterations 40 --data text --out run \
                 --export-hf exported --json";
    let ran = here.run(train).done();
    let objects = ran.objects();
    let loss = |at: usize| objects[at]["loss"].as_f64().unwrap();
    assert!(loss(0) > 5.0 && loss(39) < 3.5, "{} to {}", loss(0), loss(39));
    assert!(objects[40]["floor"].is_null());

    let of = |line: &str| here.run(line).done().objects().remove(0);
    let run = of("eval run --seq 32 --json");
    assert_eq!(run["data"], here.path().join("text").display().to_string());
    let exported = of("eval exported --seq 32 --data text --json");
    assert_eq!(run["loss"], exported["loss"], "the same weights, whatever their names");
    assert!(run["loss"].as_f64().unwrap() < 4.0, "{run}");

    let said = of("generate run --prompt question --tokens 12 --temperature 0 --json");
    assert_eq!(said["tokens"].as_array().unwrap().len(), 12);
    assert!(said["text"].as_str().unwrap().starts_with("question"), "{said}");
    let again = of("generate exported --prompt question --tokens 12 --temperature 0 --json");
    assert_eq!(said["text"], again["text"]);
    let shown = here.run("generate run --prompt question --tokens 12 --temperature 0").done().out;
    assert_eq!(shown.trim_end_matches('\n'), said["text"].as_str().unwrap().trim_end_matches('\n'));

    let from = here.run(
        "train --init-from exported --seq 32 --global-batch 8 --iterations 1 --data text --json",
    );
    let first = from.done().objects()[0]["loss"].as_f64().unwrap();
    assert!(first < 3.5, "it starts where the other ended: {first}");

    here.run("eval text")
        .refused(&["neither a run with a checkpoint nor a Hugging Face directory"]);
    here.run("train --model mlp --export-hf there")
        .refused(&["--export-hf: mlp cannot be exported"]);
    here.run("train --model mini --data absent").refused(&["--data: absent: No such file"]);
    here.run("train --model mini --tokenizer text/a.txt")
        .refused(&["--tokenizer: the built-in text"]);
    here.run("train --model mini --data text --tokenizer text/a.txt")
        .refused(&["--tokenizer: text/a.txt: is not a tokenizer.json"]);
    here.run("train --model mini --data text/b.txt --seq 64").refused(&["--data: ", "too few"]);
    here.run("train --model mini --init-from text").refused(&["--init-from: text/config.json"]);
    here.run("generate run --prompt x --tokens 0 --temperature -1")
        .refused(&["--tokens: '0'", "--temperature: '-1'"]);
    here.run("generate run --prompt x --tokens 1000").refused(&["--prompt: ", "positions"]);
}

/// An exported model carries the tokenizer of its run, and a run that starts from it takes that one.
#[test]
fn a_tokenizer_goes_with_the_model() {
    let here = Folder::new();
    here.file("text/a.txt", "to be or not to be ".repeat(200));
    let words = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": null, "model": {
            "type": "WordLevel", "unk_token": "?",
            "vocab": {"?": 0, "to": 1, "be": 2, "or": 3, "not": 4},
        },
    });
    here.file("words.json", words.to_string());
    let data = |run: &str| -> String {
        let text = fs::read_to_string(here.path().join(run).join("run.json")).unwrap();
        let record: Value = serde_json::from_str(&text).unwrap();
        let facts = record["facts"].as_array().unwrap();
        let fact = facts.iter().find(|fact| fact[0] == "data").unwrap();
        fact[1].as_str().unwrap().to_owned()
    };
    let train = "train --seq 16 --global-batch 2 --data text";
    let first = "--model mini --iterations 2 --tokenizer words.json --out first --export-hf words";
    here.run(&format!("{train} {first}")).done();
    assert!(data("first").contains(", 1200 tokens"), "{}", data("first"));
    let names = fs::read_dir(here.path().join("words")).unwrap().flatten();
    let mut names: Vec<_> = names.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(
        names,
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    let about = fs::read_to_string(here.path().join("words/tokenizer_config.json")).unwrap();
    assert!(about.contains("\"model_max_length\": 16"), "{about}");
    here.run(&format!("{train} --init-from words --iterations 1 --out second")).done();
    assert_eq!(data("second"), data("first"));
    // The built-in tokenizer, of bytes, is written too.
    here.run(&format!("{train} --model mini --iterations 1 --export-hf bytes --out third")).done();
    here.run(&format!("{train} --init-from bytes --iterations 1 --out fourth")).done();
    assert!(data("third").contains(", 3800 tokens"), "{}", data("third"));
    assert_eq!(data("fourth"), data("third"));
}

#[test]
fn a_model_of_the_built_in_text_speaks_its_words() {
    let here = Folder::new();
    here.run("train --model mini --seq 16 --global-batch 4 --iterations 2 --out run").done();
    let said = here.run_with(&["generate", "run", "--prompt", ". ba", "--tokens", "5"]).done().out;
    assert!(said.starts_with(". ba "), "{said}");
    let eval = here.run("eval run --samples 3 --json").done().objects().remove(0);
    assert_eq!((&eval["data"], &eval["samples"]), (&"builtin".into(), &3.into()));
    assert!(eval["loss"].as_f64().unwrap() > eval["floor"].as_f64().unwrap());
    here.run_with(&["generate", "run", "--prompt", "hello"]).refused(&[
        "--prompt: 'hello' is not a word of the built-in text; its words are such as ba, da",
    ]);
}

/// Stages split by a profile take no longer than stages split by counting operations, and train to
/// the same bits.
#[test]
fn stages_can_be_cut_by_a_profile() {
    let here = Folder::new();
    let layout = "--model gpt2-124m --pp 4 --micro-batch 4 --global-batch 64 --cluster dgx-a100:1";
    let takes = |split: &str| -> f64 {
        let ran = here.run(&format!("simulate {layout} --split {split} --json")).done();
        ran.objects()[0]["iteration_s"].as_f64().unwrap()
    };
    assert!(takes("profile") <= takes("cost") && takes("profile") < takes("at:1,2,3"));
    let text = here.run(&format!("plan {layout} --split profile --format text")).done();
    assert!(text.out.contains("split at:"), "the plan says where stages begin");
    let train = |flags: &str| {
        losses(&here.run(&format!("{TRAIN} {flags} --out run --overwrite")).done().objects())
    };
    assert_eq!(train("--pp 2 --cluster laptop --split profile"), train(""));
    here.run(&format!("{TRAIN} --pp 2 --split profile")).refused(&["--split", "--cluster"]);
    here.run(&format!("{TRAIN} --pp 2 --split at:9")).refused(&["--split: at:9", "into 2 stages"]);
    here.run(&format!("{TRAIN} --pp 2 --split half")).refused(&["--split", "cost, count"]);
}
