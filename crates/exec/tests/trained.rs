//! Trained models outside of training: Hugging Face directories, evaluation, generation.

use crate::common::*;
use paceline_exec::checkpoint::{Checkpoint, SaveOptions};
use paceline_exec::data::{Data, DataSource, SampleKind};
use paceline_exec::hugging_face::{Pretrained, can_export, export};
use paceline_exec::inference::{GenerateError, Network, Sampling, evaluate, generate};
use paceline_exec::safetensors::{Contents, Reader};
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::model::{Experts, Model, ModelDims};
use paceline_plan::strategy::{Strategy, Zero};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Directory that is deleted at the end of its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("paceline-trained-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Expert model in the form that transformers calls Mixtral.
fn mixtral_like() -> Model {
    let shape = *dropless_moe();
    let experts = Experts { shared_experts: 0, dense_layers: 0, dense_ffn: 0, ..shape.experts };
    Model::new("mixtral-like", ModelDims { qk_norm: false, experts, ..shape }).expect("sound")
}

/// Expert model with latent attention in the form that transformers calls DeepSeek-V3, whose
/// configuration has no key for the balancing loss.
fn deepseek_like() -> Model {
    let shape = *latent_moe();
    let experts = Experts { balance: 0.0, ..shape.experts };
    Model::new("deepseek-like", ModelDims { norm_eps: 1e-6, experts, ..shape }).expect("sound")
}

/// Runs and saves `iterations` iterations.
fn saved(model: &Model, iterations: u32, folder: &Path) -> Checkpoint {
    let directory = folder.join("checkpoints");
    let save = SaveOptions { directory, every: None, keep: 1, attempt: 1, extra_files: Vec::new() };
    let options = TrainOptions { save: Some(save), ..options(iterations) };
    train(&plan(model, &strategy(8, 1, 4)), &options, &mut |_| {}).unwrap();
    Checkpoint::open(folder).unwrap()
}

#[test]
fn exported_weights_come_back_to_the_bit_under_any_layout() {
    for model in [tiny_gpt(true), tiny_gpt(false), tiny_llama(), mixtral_like(), deepseek_like()] {
        let folder = Folder::new(&format!("exported-{}-{}", model.name(), model.tied));
        let checkpoint = saved(&model, 0, &folder.0);
        let directory = folder.0.join("hf");
        export(&model, &checkpoint, (b"{}", model.seq), &directory).unwrap();
        let pretrained = Arc::new(Pretrained::open(&directory).unwrap_or_else(|e| panic!("{e}")));
        assert_eq!(**pretrained.model(), *model);
        let expected = bits(&run(&model, &strategy(8, 1, 4)));
        let one = strategy(8, 1, 4);
        for layout in [
            one.clone(),
            Strategy { dp: 2, zero: Zero::Parameters, ..one.clone() },
            Strategy { pp: 2, ..one },
        ] {
            let start = Start::Pretrained(Arc::clone(&pretrained));
            let options = TrainOptions { start, ..options(5) };
            let found = train(&plan(&model, &layout), &options, &mut |_| {}).unwrap();
            assert_eq!(bits(&found), expected, "{} {layout:?}", model.name());
        }
    }
}

/// Large models have several files with an index; GPT-2's first files have no name prefix.
#[test]
fn sharded_and_older_files_are_read() {
    let model = tiny_gpt(true);
    let folder = Folder::new("sharded");
    let checkpoint = saved(&model, 0, &folder.0);
    let directory = folder.0.join("hf");
    export(&model, &checkpoint, (b"{}", model.seq), &directory).unwrap();
    let table = |directory: &Path| {
        let pretrained = Pretrained::open(directory).unwrap_or_else(|e| panic!("{e}"));
        pretrained.tensor("blocks.3.qkv.weight", [48, 16]).unwrap()
    };
    let expected = table(&directory);
    assert_eq!(expected, checkpoint.weights().whole("blocks.3.qkv.weight").unwrap());

    let whole = Reader::open(&directory.join("model.safetensors")).unwrap();
    let mut list = BTreeMap::new();
    for part in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", part + 1);
        let own = whole.tensors().iter().enumerate().filter(|(i, _)| i % 2 == part);
        let short = |name: &str| name.strip_prefix("transformer.").unwrap().to_owned();
        let mut bytes = Vec::new();
        let mut shapes = BTreeMap::new();
        for (_, (name, tensor)) in own {
            let values = whole.whole(name).unwrap();
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            shapes.insert(short(name), tensor.shape.clone());
            list.insert(short(name), file.clone());
        }
        let contents = Contents::new(shapes, &BTreeMap::new()).unwrap();
        fs::write(directory.join(file), [contents.header(), &bytes].concat()).unwrap();
    }
    fs::remove_file(directory.join("model.safetensors")).unwrap();
    let told = Pretrained::open(&directory).unwrap_err().to_string();
    assert!(told.contains("neither model.safetensors nor"), "{told}");
    let index = directory.join("model.safetensors.index.json");
    fs::write(&index, serde_json::json!({ "weight_map": list }).to_string()).unwrap();
    assert_eq!(table(&directory), expected);
    fs::write(&index, r#"{"weight_map": {"a": "../elsewhere"}}"#).unwrap();
    let told = Pretrained::open(&directory).unwrap_err().to_string();
    assert!(told.contains("names the file '../elsewhere' outside"), "{told}");
}

#[test]
fn what_has_no_form_elsewhere_is_not_exported() {
    let told = can_export(&tiny_mlp()).unwrap_err().to_string();
    assert_eq!(told, "tiny-mlp cannot be exported: transformers has no such model as an mlp");
    let told = can_export(&tiny_moe()).unwrap_err().to_string();
    assert!(
        told.starts_with("tiny-moe cannot be exported: no family of transformers has all of its"),
        "{told}"
    );
    assert!(can_export(&tiny_llama()).is_ok());
}

/// Evaluation uses the same network as training: on the same samples, the same loss.
#[test]
fn evaluation_agrees_with_training() {
    for model in
        [tiny_gpt(true), tiny_gpt(false), tiny_llama(), tiny_mlp(), dropless_moe(), latent_moe()]
    {
        let folder = Folder::new(&format!("eval-{}-{}", model.name(), model.tied));
        let checkpoint = saved(&model, 3, &folder.0);
        let whole = train(&plan(&model, &strategy(8, 1, 4)), &options(4), &mut |_| {}).unwrap();
        let network = Network::from_checkpoint(&model, &checkpoint).unwrap();
        let data = Data::new(
            &DataSource::Builtin,
            SampleKind::Tokens { vocab: 40, seq: 16, lookahead: 0 },
            7,
        )
        .unwrap();
        // The fourth iteration's samples are 24 to 31: the sum over 32 samples minus that over 24.
        let until = |samples| {
            let found = evaluate(&network, &data, 16, samples, 3, &mut |_| {}).unwrap();
            found.loss * found.tokens as f64
        };
        let found = (until(32) - until(24)) / (8.0 * 16.0);
        let expected = f64::from(whole.iterations[3].loss);
        assert!((found / expected - 1.0).abs() < 1e-5, "{}: {found}, {expected}", model.name());
        let held_out = Data::held_out(
            &DataSource::Builtin,
            SampleKind::Tokens { vocab: 40, seq: 16, lookahead: 0 },
            7,
        )
        .unwrap();
        let found = evaluate(&network, &held_out, 16, 16, 3, &mut |_| {}).unwrap();
        assert!(found.loss > found.floor.unwrap() && found.loss < 4.5, "{found:?}");
    }
}

/// Keys and values from the KV cache equal those computed from the whole text.
#[test]
fn generation_from_memory_is_generation_from_the_whole_text() {
    let said = |network: &Network, prompt: &[u32], tokens, sampling| {
        let mut said = Vec::new();
        let done = generate(network, prompt, tokens, sampling, &mut |token| {
            said.push(token);
            true
        });
        done.map(|()| said)
    };
    let bold = Sampling { temperature: 0.0, top_k: None, seed: 0 };
    for model in [tiny_gpt(true), tiny_llama(), tiny_mlp(), tiny_moe(), latent_moe()] {
        let folder = Folder::new(&format!("generate-{}", model.name()));
        let checkpoint = saved(&model, 30, &folder.0);
        let network = Network::from_checkpoint(&model, &checkpoint).unwrap();
        let whole = said(&network, &[0, 5], 14, bold).unwrap();
        let mut text = vec![0, 5];
        for (number, &token) in whole.iter().enumerate() {
            assert_eq!(said(&network, &text, 1, bold).unwrap(), [token], "token {number}");
            text.push(token);
        }
        let draw =
            |seed| said(&network, &[0], 10, Sampling { temperature: 1.0, top_k: Some(8), seed });
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
    let model = tiny_gpt(true);
    let folder = Folder::new("limits");
    let network = Network::from_checkpoint(&model, &saved(&model, 0, &folder.0)).unwrap();
    assert_eq!(said(&network, &[], 1, bold), Err(GenerateError::Empty));
    assert_eq!(said(&network, &[40], 1, bold), Err(GenerateError::Token { token: 40, vocab: 40 }));
    assert!(said(&network, &[1; 16], 1, bold).is_ok());
    let long = GenerateError::Long { prompt: 16, tokens: 2, positions: 16 };
    assert_eq!(said(&network, &[1; 16], 2, bold), Err(long));
}
