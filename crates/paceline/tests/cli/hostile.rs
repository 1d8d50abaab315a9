//! Input that once crashed, hung or was believed: every one is refused with status 2 and the file, key or
//! flag, or is harmless.

use super::support::Folder;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A word-level tokenizer, with one part replaced.
fn tokenizer(part: &str, value: Value) -> String {
    let mut whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "a": 0, "word": 1 }, "unk_token": "a" },
    });
    whole[part] = value;
    whole.to_string()
}

const TRAIN: &str =
    "train --model mini --seq 16 --global-batch 2 --iterations 1 --out run --overwrite";

/// A model of two tiny layers in Hugging Face's files, of `vocab` tokens by its configuration.
fn hugging_face(here: &Folder, vocab: u64) {
    let mut tensors = vec![
        ("wte.weight".to_owned(), vec![100, 8]),
        ("wpe.weight".to_owned(), vec![16, 8]),
        ("ln_f.weight".to_owned(), vec![8]),
        ("ln_f.bias".to_owned(), vec![8]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("ln_1.weight", vec![8]),
            ("ln_1.bias", vec![8]),
            ("attn.c_attn.weight", vec![8, 24]),
            ("attn.c_attn.bias", vec![24]),
            ("attn.c_proj.weight", vec![8, 8]),
            ("attn.c_proj.bias", vec![8]),
            ("ln_2.weight", vec![8]),
            ("ln_2.bias", vec![8]),
            ("mlp.c_fc.weight", vec![8, 32]),
            ("mlp.c_fc.bias", vec![32]),
            ("mlp.c_proj.weight", vec![32, 8]),
            ("mlp.c_proj.bias", vec![8]),
        ] {
            tensors.push((format!("h.{layer}.{name}"), shape));
        }
    }
    let mut at = 0u64;
    let mut header = serde_json::Map::new();
    for (name, shape) in tensors {
        let end = at + 4 * shape.iter().product::<u64>();
        let row = json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] });
        header.insert(name, row);
        at = end;
    }
    let header = Value::Object(header).to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.resize(file.len() + at as usize, 0);
    let config = json!({
        "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16,
        "vocab_size": vocab,
    });
    here.file("hf/model.safetensors", file).file("hf/config.json", config.to_string());
}

/// Creates a pipe; returns false where the system has no `mkfifo`.
fn pipe(here: &Folder, name: &str) -> bool {
    let path = here.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    Command::new("mkfifo").arg(path).status().is_ok_and(|made| made.success())
}

#[test]
fn tokens_are_cached_for_their_owner_alone() {
    let here = Folder::new();
    here.file("data/text.txt", "a word ".repeat(3000));
    here.file("tokenizer.json", tokenizer("decoder", Value::Null));
    fs::create_dir(here.path().join("tmp")).unwrap();
    let locked = fs::Permissions::from_mode(0o555);
    fs::set_permissions(here.path().join("data"), locked).unwrap();
    let run = || {
        let line = format!("{TRAIN} --data data/text.txt --tokenizer tokenizer.json");
        let arguments: Vec<&str> = line.split(' ').collect();
        let ran = here.command().args(arguments).env("TMPDIR", here.path().join("tmp")).output();
        let ran = ran.unwrap();
        (ran.status.code(), String::from_utf8(ran.stderr).unwrap())
    };
    assert_eq!(run().0, Some(0));
    assert_eq!(fs::read_dir(here.path().join("tmp")).unwrap().count(), 0, "nothing is shared");
    assert_eq!(fs::read_dir(here.path().join("data")).unwrap().count(), 1);
    let cache = here.path().join(".cache/paceline/tokens");
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&cache), 0o700);
    let files: Vec<_> = fs::read_dir(&cache).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in &files {
        assert_eq!(mode(file), 0o600, "{}", file.display());
    }
    // A cache that others could have written is not believed.
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o777)).unwrap();
    let (code, err) = run();
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("can be read or written by other users"), "{err}");
    let open = fs::Permissions::from_mode(0o755);
    fs::set_permissions(here.path().join("data"), open).unwrap();
}

#[test]
fn a_corpus_is_neither_truncated_nor_padded() {
    let here = Folder::new();
    here.file("text.txt", "a word ".repeat(3000));
    let cut = json!({
        "direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0,
    });
    let fill = json!({
        "strategy": { "Fixed": 100_000 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    });
    let bytes = |tokenizer: String| {
        here.file("tokenizer.json", tokenizer);
        let _ = fs::remove_dir_all(here.path().join(".cache"));
        here.run(&format!("{TRAIN} --data text.txt --tokenizer tokenizer.json")).done();
        let cache = here.path().join(".cache/paceline/tokens");
        let files = fs::read_dir(cache).unwrap().map(|file| file.unwrap());
        let tokens = files.filter(|file| file.file_name().to_string_lossy().starts_with("tokens-"));
        tokens.map(|file| file.metadata().unwrap().len()).collect::<Vec<_>>()
    };
    // 6000 tokens of two bytes, after a header.
    let plain = bytes(tokenizer("decoder", Value::Null));
    assert!(plain.len() == 1 && plain[0] > 12_000, "{plain:?}");
    assert_eq!(bytes(tokenizer("truncation", cut)), plain);
    assert_eq!(bytes(tokenizer("padding", fill)), plain);
}

#[test]
fn broken_tokenizers_are_refused_or_harmless() {
    let here = Folder::new();
    here.file("text.txt", "a word ".repeat(3000));
    let line = format!("{TRAIN} --data text.txt --tokenizer tokenizer.json");
    let precompiled = json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" });
    here.file("tokenizer.json", tokenizer("normalizer", precompiled));
    here.run(&line).refused(&["tokenizer.json", "normalizer"]);
    let over = json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9,
    });
    here.file("tokenizer.json", tokenizer("truncation", over));
    let ran = here.run(&line);
    assert!(matches!(ran.code, Some(0 | 2)), "{}", ran.err);
    let huge = json!({
        "strategy": { "Fixed": 10_000_000_000u64 }, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    });
    here.file("tokenizer.json", tokenizer("padding", huge));
    here.run(&line).done();
    let beyond = json!({ "type": "WordLevel", "vocab": { "a": 0, "word": 4_000_000_000u32 }, "unk_token": "a" });
    here.file("tokenizer.json", tokenizer("model", beyond));
    here.run(&line).refused(&["tokenizer"]);
}

#[test]
fn a_vocabulary_that_the_file_does_not_have_is_not_allocated() {
    let here = Folder::new();
    hugging_face(&here, 1 << 31);
    for line in ["generate hf --prompt hi", "eval hf"] {
        here.run(line).refused(&["wte.weight", "[100, 8]"]);
    }
    here.run("train --init-from hf --global-batch 2 --iterations 1").refused(&["--model: hf"]);
    hugging_face(&here, 101);
    here.run("eval hf --seq 8").refused(&["wte.weight", "[101, 8]"]);
}

#[test]
fn long_names_are_refused_shortly() {
    let here = Folder::new();
    let name = "a".repeat(70_000);
    let line = format!("simulate --model mini --global-batch 4 --cluster laptop --vary {name}=1,2");
    let told = here.run(&line).refused(&["--vary", "70000 characters"]);
    assert!(told.err.len() < 10_000, "{} bytes", told.err.len());
    let line = "simulate --model mini --global-batch 4 --cluster laptop --vary tp=1,2 --y";
    here.run(&format!("{line} {name}")).refused(&["--y", "70000 characters"]);
}

#[test]
fn devices_and_pipes_are_not_read() {
    let here = Folder::new();
    here.run(&format!("{TRAIN} --data /etc/hosts --tokenizer /dev/zero"))
        .refused(&["/dev/zero", "not a regular file"]);
    here.run(&format!("{TRAIN} --data /dev/zero")).refused(&["/dev/zero", "not a regular file"]);
    std::os::unix::fs::symlink("/dev/zero", here.path().join("zero.toml")).unwrap();
    let train = TRAIN.replace("--model mini ", "");
    for (flag, rest) in [("--model", &*train), ("--cluster", TRAIN), ("--config", TRAIN)] {
        here.run(&format!("{rest} {flag} zero.toml")).refused(&["zero.toml"]);
    }
    fs::create_dir(here.path().join("report")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", here.path().join("report/run.json")).unwrap();
    here.run("report report").refused(&["run.json", "not a regular file"]);
    hugging_face(&here, 100);
    let index = json!({ "metadata": {}, "weight_map": { "wte.weight": "part.safetensors" } });
    fs::remove_file(here.path().join("hf/model.safetensors")).unwrap();
    here.file("hf/model.safetensors.index.json", index.to_string());
    if pipe(&here, "hf/part.safetensors") && pipe(&here, "piped/run.json") {
        here.run("eval hf").refused(&["part.safetensors", "not a regular file"]);
        here.run("report piped").refused(&["run.json", "not a regular file"]);
    }
}

#[test]
fn deep_models_and_long_files_end() {
    let here = Folder::new();
    let deep = "kind = \"gpt2\"\nlayers = 10000\nd_model = 8\nheads = 1\nffn = 8\nseq = 8\nvocab = 8\ntied = true\n";
    here.file("deep.toml", deep);
    here.run("plan --model deep.toml --global-batch 1 --json").done();
    let keys: String = (0..100_000).map(|key| format!("k{key} = 1\n")).collect();
    here.file("keys.toml", format!("kind = \"gpt2\"\n{keys}"));
    here.run("plan --model keys.toml --global-batch 1").refused(&["keys.toml:100001"]);
    here.run("collective --op all_reduce --algorithm tree --size 1MiB --cluster dgx-h100:200000")
        .refused(&["1048576 ranks"]);
}

#[test]
fn numbers_that_are_none_are_refused() {
    let here = Folder::new();
    let simulate = "simulate --model mini --global-batch 4 --cluster dgx-h100 --json";
    for (field, value) in
        [("max_efficiency", "1e-320"), ("memory_efficiency", "1e-9"), ("max_efficiency", "nan")]
    {
        here.run(&format!("{simulate} --set device.{field}={value}")).refused(&[field]);
    }
    let edge = here.run(&format!("{simulate} --set device.max_efficiency=1e-6")).done().objects();
    assert!(edge[0]["iteration_s"].as_f64().unwrap().is_finite());
    for flag in [
        "lr",
        "min-lr",
        "weight-decay",
        "clip",
        "warmup",
        "loss-scale",
        "expert-buffer-factor",
        "heartbeat-timeout",
        "straggler 0",
        "compress topk",
    ] {
        for value in ["nan", "inf", "-inf", "1e999"] {
            let value = if flag.contains(' ') { format!(":{value}") } else { format!("={value}") };
            let name = flag.split(' ').next().unwrap();
            let flag = flag.replacen(' ', "=", 1);
            here.run(&format!("{TRAIN} --{flag}{value}")).refused(&[&format!("--{name}")]);
        }
    }
}

#[test]
fn terminals_get_no_orders_from_names() {
    let here = Folder::new();
    let name = "evil\u{1b}]0;owned\u{7}\u{1b}[31m.toml";
    here.file(name, "kind = 3");
    let command = |arguments: &[&str]| {
        let told = here.run_with(arguments);
        assert_eq!(told.code, Some(2));
        for text in [&told.out, &told.err] {
            let obeyed = text.chars().find(|c| c.is_control() && !"\n\t".contains(*c));
            assert_eq!(obeyed, None, "{arguments:?}: {text:?}");
        }
        told.err
    };
    for arguments in [
        ["plan", "--global-batch", "1", "--model", name].as_slice(),
        &["simulate", "--model", "mini", "--global-batch", "1", "--cluster", name],
        &["report", name],
        &["eval", name],
        &[name],
    ] {
        let told = command(arguments);
        assert!(told.contains("\\u{1b}"), "{arguments:?}: {told}");
    }
    command(&["plan", &format!("--{name}")]);
}

#[test]
fn two_jobs_do_not_share_a_directory() {
    let here = Folder::new();
    here.run(TRAIN).done();
    let other = TRAIN.replace(" --overwrite", "").replace("mini", "mini-llama");
    here.run(&other).refused(&["--out", "run"]);
    let line = TRAIN.replace("--iterations 1 ", "--iterations 1000000 --json ");
    let mut first =
        here.command().args(line.split(' ')).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut begun = String::new();
    let mut reader = std::io::BufReader::new(first.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut reader, &mut begun).unwrap();
    assert!(begun.contains("iteration"), "{begun}");
    here.run(TRAIN).refused(&["run", "in use"]);
    first.kill().unwrap();
    first.wait().unwrap();
}
