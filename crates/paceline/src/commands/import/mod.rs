//! `paceline import`: a run file from another system's settings.

mod rules;
mod source;

use crate::failure::Failure;
use crate::flags::CommonFlags;
use crate::output::write as write_whole;
use anyhow::Context;
use clap::{Args, ValueEnum};
use paceline_exec::regular;
use rules::{DEEPSPEED, MEGATRON, Rule, TORCHTITAN, Target};
use serde::Serialize;
use source::Setting;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Make a run file from the settings of Megatron-LM, torchtitan or DeepSpeed
///
/// Writes FILE-run.toml, which --config reads, and for Megatron-LM also FILE-model.toml. Settings
/// without a counterpart are listed, and stand as comments in the run file.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  paceline import megatron pretrain_llama.sh\n  \
                        paceline import torchtitan llama3_8b.toml --out here/\n  \
                        paceline import deepspeed ds_config.json")]
pub(crate) struct Flags {
    /// System that the settings are for
    #[arg(value_enum, value_name = "megatron|torchtitan|deepspeed")]
    system: System,
    /// Shell script or YAML of a Megatron-LM launch, torchtitan's TOML, DeepSpeed's JSON
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Directory of the files to write [default: the current one]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum System {
    Megatron,
    Torchtitan,
    Deepspeed,
}

/// A setting of the other system that has no counterpart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Unmatched {
    name: String,
    value: String,
    line: usize,
}

/// Keys of the files to write, with their values as TOML.
#[derive(Debug, Default, PartialEq)]
struct Imported {
    /// Keys for all commands.
    common: BTreeMap<&'static str, String>,
    /// Keys for `paceline train`.
    train: BTreeMap<&'static str, String>,
    /// Keys of the model file.
    model: BTreeMap<&'static str, String>,
    unmatched: Vec<Unmatched>,
}

#[derive(Serialize)]
struct Record<'a> {
    run_file: &'a Path,
    model_file: Option<&'a Path>,
    unmatched: &'a [Unmatched],
}

/// Most bytes of a settings file.
const MOST: u64 = 16 << 20;

/// Converts the file and writes the results.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let file = &flags.file;
    let wrong = |text: String| Failure::flag("FILE", format!("{}: {text}", file.display()));
    let text = regular::read_text(file, MOST).map_err(|error| wrong(error.to_string()))?;
    let settings = match flags.system {
        System::Megatron => source::launch(&text),
        System::Torchtitan => source::toml(&text, &file.display().to_string()),
        System::Deepspeed => source::json(&text),
    };
    let settings = settings.map_err(wrong)?;
    if settings.is_empty() {
        return Err(wrong("there are no settings in it".to_owned()));
    }
    let mut imported = convert(flags.system, &settings);
    let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let folder = flags.out.clone().unwrap_or_default();
    let run_file = folder.join(format!("{stem}-run.toml"));
    let model_file = folder.join(format!("{stem}-model.toml"));
    let with_model = !imported.model.is_empty();
    if with_model {
        imported.common.insert("model", quoted(&model_file.display().to_string()));
    }
    let from = file.display().to_string();
    let write = |path: &Path, text: String| {
        write_whole(path, text.as_bytes())
            .with_context(|| format!("{}: cannot be written", path.display()))
            .map_err(Failure::Run)
    };
    if with_model {
        write(&model_file, model_text(&imported, &from))?;
    }
    write(&run_file, run_text(&imported, &from))?;
    let output = flags.common.output();
    let mut report = format!("wrote {}", run_file.display());
    if with_model {
        report.push_str(&format!(" and {}", model_file.display()));
    }
    report.push('\n');
    if !imported.unmatched.is_empty() {
        report.push_str("without a counterpart:\n");
        for Unmatched { name, value, line } in &imported.unmatched {
            report.push_str(&format!("  {from}:{line}: {name} = {value}\n"));
        }
    }
    output.print(&report)?;
    let model_file = with_model.then_some(&*model_file);
    Ok(output.print_json(&Record {
        run_file: &run_file,
        model_file,
        unmatched: &imported.unmatched,
    })?)
}

/// A text in quotes.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A value as TOML: numbers and flags as they are, and anything else in quotes.
fn literal(value: &str) -> String {
    let plain = matches!(value, "true" | "false")
        || value.parse::<i64>().is_ok()
        || value.parse::<f64>().is_ok_and(f64::is_finite);
    match value.parse::<f64>() {
        _ if !plain => quoted(value),
        // Notations that TOML lacks, such as `.1` and `1.`.
        Ok(number) if value.parse::<i64>().is_err() => format!("{number:?}"),
        _ => value.to_owned(),
    }
}

fn convert(system: System, settings: &[Setting]) -> Imported {
    let rules = match system {
        System::Megatron => MEGATRON,
        System::Torchtitan => TORCHTITAN,
        System::Deepspeed => DEEPSPEED,
    };
    let mut imported = Imported::default();
    let mut noted: BTreeMap<&str, &str> = BTreeMap::new();
    for setting in settings {
        let rule = rules.iter().find(|Rule { name, .. }| *name == setting.name);
        let value = setting.value.as_str();
        let unmatched = || Unmatched {
            name: setting.name.clone(),
            value: value.to_owned(),
            line: setting.line,
        };
        let Some(Rule { name, target, words }) = rule else {
            imported.unmatched.push(unmatched());
            continue;
        };
        let value = match words.is_empty() {
            true => Some(value),
            false => words.iter().find(|(word, _)| *word == value).map(|(_, ours)| *ours),
        };
        let Some(value) = value.filter(|value| *value != "auto") else {
            imported.unmatched.push(unmatched());
            continue;
        };
        match *target {
            Target::Common(key) => drop(imported.common.insert(key, literal(value))),
            Target::Train(key) => drop(imported.train.insert(key, literal(value))),
            Target::Model(key) => drop(imported.model.insert(key, literal(value))),
            Target::Noted => {
                noted.insert(*name, value);
            }
            Target::Off => {
                if value != "false" {
                    imported.unmatched.push(unmatched());
                }
            }
        }
    }
    let number = |name: &str| noted.get(name).and_then(|value| value.parse::<u64>().ok());
    match system {
        System::Megatron => megatron(&mut imported, &noted, &number),
        System::Torchtitan => torchtitan(&mut imported, &noted, &number),
        System::Deepspeed => deepspeed(&mut imported, &noted),
    }
    imported
}

/// Size of a key that was imported.
fn size(keys: &BTreeMap<&'static str, String>, key: &str) -> Option<u64> {
    keys.get(key)?.parse().ok()
}

fn set(keys: &mut BTreeMap<&'static str, String>, key: &'static str, value: impl ToString) {
    keys.insert(key, value.to_string());
}

/// Translates settings that several arguments of Megatron-LM make together.
fn megatron(
    imported: &mut Imported,
    noted: &BTreeMap<&str, &str>,
    number: &dyn Fn(&str) -> Option<u64>,
) {
    let has = |name: &str| noted.get(name).is_some_and(|value| *value != "false");
    let of = |imported: &Imported, key| size(&imported.common, key).unwrap_or(1);
    let cut = of(imported, "tp") * of(imported, "pp") * of(imported, "cp");
    let world = match (number("nproc-per-node"), number("nnodes")) {
        (Some(each), hosts) => Some(each * hosts.unwrap_or(1)),
        (None, _) => number("world-size"),
    };
    if let Some(world) = world.filter(|world| world.is_multiple_of(cut)) {
        set(&mut imported.common, "dp", world / cut);
    }
    let layers = size(&imported.model, "layers");
    if of(imported, "pp") > 1 {
        let each = number("num-layers-per-virtual-pipeline-stage");
        let chunks = match (number("num-virtual-stages-per-pipeline-rank"), each, layers) {
            (Some(chunks), _, _) => chunks,
            (None, Some(each), Some(layers)) => layers / of(imported, "pp") / each.max(1),
            _ => 1,
        };
        let schedule = if chunks > 1 { format!("interleaved:{chunks}") } else { "1f1b".to_owned() };
        set(&mut imported.common, "schedule", quoted(&schedule));
    }
    if has("use-distributed-optimizer") {
        set(&mut imported.common, "zero", 1);
    }
    match noted.get("data-parallel-sharding-strategy") {
        Some(&"optim") => set(&mut imported.common, "zero", 1),
        Some(&"optim_grads") => set(&mut imported.common, "zero", 2),
        Some(&"optim_grads_params") => set(&mut imported.common, "zero", 3),
        _ => {}
    }
    if imported.model.is_empty() {
        return;
    }
    let model = &mut imported.model;
    set(model, "kind", "\"decoder\"");
    let width = size(model, "d_model");
    let head_dim = size(model, "head_dim")
        .or_else(|| Some(width? / size(model, "heads").filter(|heads| *heads > 0)?));
    if let (Some(width), None) = (width, size(model, "ffn")) {
        set(model, "ffn", 4 * width);
    }
    if !model.contains_key("activation") {
        let gate = has("swiglu");
        set(model, "activation", if gate { "\"swiglu\"" } else { "\"gelu\"" });
    }
    if !model.contains_key("norm") {
        set(model, "norm", "\"layer\"");
    }
    if !has("group-query-attention") {
        model.remove("kv_heads");
    }
    if !has("disable-bias-linear") {
        for key in ["qkv_bias", "attention_bias", "ffn_bias"] {
            set(model, key, true);
        }
    }
    if has("add-qkv-bias") {
        set(model, "qkv_bias", true);
    }
    set(model, "tied", !has("untie-embeddings-and-output-weights"));
    if has("qk-layernorm") {
        set(model, "query_key_norm", "\"head\"");
    }
    if has("use-rope-scaling") {
        set(model, "rope_scaling", "\"llama3\"");
        set(model, "rope_factor", noted.get("rope-scaling-factor").unwrap_or(&"8.0"));
        for (key, value) in [("rope_low", "1.0"), ("rope_high", "4.0"), ("rope_original", "8192")] {
            set(model, key, value);
        }
    }
    match noted.get("position-embedding-type") {
        Some(&"rope") => {}
        Some(&"none") => set(model, "position", "\"none\""),
        _ => {
            set(model, "position", "\"learned\"");
            if let Some(positions) = number("max-position-embeddings") {
                set(model, "positions", positions);
            }
            model.remove("rope_theta");
        }
    }
    let percent = noted.get("rotary-percent").and_then(|value| value.parse::<f64>().ok());
    if let (Some(percent), Some(head_dim)) = (percent.filter(|p| *p < 1.0), head_dim) {
        set(model, "rotary_dims", (head_dim as f64 * percent) as u64);
    }
    if let Some(width) = number("moe-ffn-hidden-size") {
        set(model, "ffn", width);
    }
    if let Some(width) = number("moe-shared-expert-intermediate-size") {
        set(model, "shared_experts", 1);
        set(model, "shared_ffn", width);
    }
    if let Some(seq) = imported.common.get("seq").cloned() {
        set(&mut imported.model, "seq", seq);
    }
}

/// Models of torchtitan that are built in.
const FLAVORS: [(&str, &str, &str); 4] = [
    ("llama3", "8B", "llama3-8b"),
    ("llama3", "70B", "llama3-70b"),
    ("llama3", "405B", "llama3-405b"),
    ("deepseek_v3", "671B", "deepseek-v3"),
];

/// Translates settings that several keys of torchtitan make together.
fn torchtitan(
    imported: &mut Imported,
    noted: &BTreeMap<&str, &str>,
    number: &dyn Fn(&str) -> Option<u64>,
) {
    let named = |key: &str| noted.get(key).copied().unwrap_or_default();
    let (name, flavor) = (named("model.name"), named("model.flavor"));
    match FLAVORS.iter().find(|(known, size, _)| (*known, *size) == (name, flavor)) {
        Some((_, _, ours)) => set(&mut imported.common, "model", quoted(ours)),
        None if !name.is_empty() => imported.unmatched.push(Unmatched {
            name: "model".to_owned(),
            value: format!("{name} {flavor}"),
            line: 1,
        }),
        None => {}
    }
    let copies = number("parallelism.data_parallel_replicate_degree").unwrap_or(1);
    match number("parallelism.data_parallel_shard_degree") {
        Some(shards) => set(&mut imported.common, "dp", copies * shards),
        None => imported.unmatched.push(Unmatched {
            name: "parallelism.data_parallel_shard_degree".to_owned(),
            value: "all remaining ranks; give --dp".to_owned(),
            line: 1,
        }),
    }
    if number("parallelism.data_parallel_shard_degree") != Some(1) {
        set(&mut imported.common, "zero", 3);
    }
}

/// Translates settings that several keys of DeepSpeed make together.
fn deepspeed(imported: &mut Imported, noted: &BTreeMap<&str, &str>) {
    for (key, dtype) in [("bf16.enabled", "\"bf16\""), ("fp16.enabled", "\"f16\"")] {
        if noted.get(key) == Some(&"true") {
            set(&mut imported.common, "dtype", dtype);
        }
    }
    let to_host =
        |key: &str| noted.get(key).is_some_and(|device| matches!(*device, "cpu" | "nvme"));
    if to_host("zero_optimization.offload_optimizer.device") {
        set(&mut imported.common, "offload", "\"optimizer\"");
        let host = noted.get("zero_optimization.offload_optimizer.device") == Some(&"cpu");
        set(&mut imported.common, "offload-to", if host { "\"host\"" } else { "\"disk\"" });
    }
}

fn model_text(imported: &Imported, from: &str) -> String {
    let mut text = format!("# From {from}.\n");
    imported.model.iter().for_each(|(key, value)| text.push_str(&format!("{key} = {value}\n")));
    text
}

fn run_text(imported: &Imported, from: &str) -> String {
    let mut text = format!("# From {from}.\n");
    for Unmatched { name, value, line } in &imported.unmatched {
        let one_line = |text: &str| text.replace(['\n', '\r'], " ");
        text.push_str(&format!(
            "# Line {line}, without a counterpart: {} = {}\n",
            one_line(name),
            one_line(value)
        ));
    }
    imported.common.iter().for_each(|(key, value)| text.push_str(&format!("{key} = {value}\n")));
    if !imported.train.is_empty() {
        text.push_str("\n[train]\n");
        imported.train.iter().for_each(|(key, value)| text.push_str(&format!("{key} = {value}\n")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::model::Model;

    const LLAMA: &str = "#!/bin/bash\nGPUS_PER_NODE=8\nTP=2\n\
        torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py \\\n\
        --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 \\\n\
        --sequence-parallel --use-distributed-optimizer --num-layers 4 --hidden-size 64 \\\n\
        --num-attention-heads 8 --group-query-attention --num-query-groups 4 \\\n\
        --ffn-hidden-size 96 --seq-length 128 --max-position-embeddings 4096 --swiglu \\\n\
        --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 \\\n\
        --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 256 \\\n\
        --micro-batch-size 1 --global-batch-size 16 --bf16 --lr 3e-4 --train-iters 50 \\\n\
        --attention-backend flash\n";

    #[test]
    fn a_launch_of_megatron_becomes_a_run_and_a_model() {
        let imported = convert(System::Megatron, &source::launch(LLAMA).unwrap());
        let common = |key: &str| imported.common.get(key).map(String::as_str);
        assert_eq!([common("tp"), common("pp"), common("dp")], [Some("2"), Some("2"), Some("4")]);
        assert_eq!([common("sp"), common("zero")], [Some("true"), Some("1")]);
        assert_eq!([common("dtype"), common("schedule")], [Some("\"bf16\""), Some("\"1f1b\"")]);
        assert_eq!(imported.train.get("lr").map(String::as_str), Some("0.0003"));
        let names: Vec<_> = imported.unmatched.iter().map(|u| (&*u.name, u.line)).collect();
        assert_eq!(names, [("attention-backend", 12)]);
        let model = Model::parse(&model_text(&imported, "x.sh"), "m.toml").unwrap();
        assert_eq!((model.kv_heads, model.tied, model.seq), (4, false, 128));
        assert!(run_text(&imported, "x.sh").contains("# Line 12, without a counterpart"));
    }

    #[test]
    fn yaml_of_megatron_says_the_same() {
        let text = "MODEL_ARGS:\n  --num-layers: 4\n  --swiglu: true\n  hidden_size: 64 # width\n";
        let found = source::launch(text).unwrap();
        let names: Vec<_> = found.iter().map(|s| (&*s.name, &*s.value, s.line)).collect();
        assert_eq!(
            names,
            [("num-layers", "4", 2), ("swiglu", "true", 3), ("hidden-size", "64", 4)]
        );
    }

    #[test]
    fn a_file_of_torchtitan_becomes_a_run() {
        let text = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nseq_len = 8192\n\
                    local_batch_size = 1\nsteps = 1000\ncompile = true\n[parallelism]\n\
                    data_parallel_shard_degree = 8\ntensor_parallel_degree = 2\n";
        let settings = source::toml(text, "t.toml").unwrap();
        let imported = convert(System::Torchtitan, &settings);
        let common = |key: &str| imported.common.get(key).map(String::as_str);
        assert_eq!([common("model"), common("dp")], [Some("\"llama3-8b\""), Some("8")]);
        assert_eq!([common("zero"), common("micro-batch")], [Some("3"), Some("1")]);
        assert_eq!(imported.train.get("iterations").map(String::as_str), Some("1000"));
        assert_eq!(imported.unmatched[0].name, "training.compile");
    }

    #[test]
    fn a_file_of_deepspeed_becomes_a_run() {
        let text = r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "bf16": {"enabled": true}, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "wall_clock_breakdown": false}"#;
        let imported = convert(System::Deepspeed, &source::json(text).unwrap());
        let common = |key: &str| imported.common.get(key).map(String::as_str);
        assert_eq!([common("global-batch"), common("zero")], [Some("32"), Some("2")]);
        assert_eq!([common("dtype"), common("offload-to")], [Some("\"bf16\""), Some("\"host\"")]);
        let names: Vec<_> = imported.unmatched.iter().map(|u| &*u.name).collect();
        assert_eq!(names, ["train_micro_batch_size_per_gpu", "wall_clock_breakdown"]);
    }

    #[test]
    fn values_become_toml() {
        for (value, expected) in [
            ("3", "3"),
            (".1", "0.1"),
            ("1e-4", "0.0001"),
            ("true", "true"),
            ("a\"b", "\"a\\\"b\""),
        ] {
            assert_eq!(literal(value), expected);
        }
    }
}
