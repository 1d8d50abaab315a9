//! Every family of models against Hugging Face's transformers, on small checkpoints whose weights
//! follow from the names of their tensors.
//!
//! `benches/peers/families.py --fixtures` generated the numbers.

use paceline_exec::hugging_face::Pretrained;
use paceline_exec::inference::{Network, Sampling, generate};
use paceline_exec::safetensors::Contents;
use paceline_exec::{Start, TrainOptions, train};
use paceline_plan::lower::lower;
use paceline_plan::model::Model;
use paceline_plan::model::hugging_face::{self, View};
use paceline_plan::strategy::{OptimizerKind, Strategy};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const SEQ: u64 = 32;
const SAMPLES: u64 = 4;

/// A directory that is removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("paceline-families-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A family's fixture, and its checkpoint.
struct Fixture {
    name: String,
    values: Value,
    folder: Folder,
}

impl Fixture {
    fn all() -> Vec<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
        let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<PathBuf> = files.collect();
        files.sort();
        files
    }

    fn open(path: &Path) -> Self {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let values: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let folder = Folder::new(&format!("family-{name}"));
        let config = values["config"].to_string();
        fs::write(folder.0.join("config.json"), &config).unwrap();
        let model = hugging_face::parse(&config, "config.json").unwrap_or_else(|e| panic!("{e}"));
        let (family, paired) = hugging_face::storage(&config).unwrap();
        let views = family.views(&model, paired).unwrap();
        let shapes: BTreeMap<String, Vec<u64>> = views
            .values()
            .flatten()
            .map(|View { name, shape, .. }| (name.clone(), shape.clone()))
            .collect();
        let bytes: Vec<u8> = shapes
            .iter()
            .flat_map(|(name, shape)| weights(name, shape))
            .flat_map(f32::to_le_bytes)
            .collect();
        let contents = Contents::new(shapes, &BTreeMap::new()).unwrap();
        let whole = [contents.header(), &bytes].concat();
        fs::write(folder.0.join("model.safetensors"), whole).unwrap();
        Self { name, values, folder }
    }

    fn pretrained(&self) -> Arc<Pretrained> {
        let opened = Pretrained::open(&self.folder.0);
        Arc::new(opened.unwrap_or_else(|error| panic!("{}: {error}", self.name)))
    }

    fn number(&self, key: &str) -> f64 {
        self.values[key].as_f64().unwrap()
    }

    fn tokens(&self, key: &str) -> Vec<u32> {
        let list = self.values[key].as_array().unwrap();
        list.iter().map(|token| token.as_u64().unwrap() as u32).collect()
    }
}

/// Numbers of a tensor, from its name, as in `families.py`.
fn weights(name: &str, shape: &[u64]) -> Vec<f32> {
    let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |seed, byte| {
        (seed ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    let gain = shape.len() == 1 && name.ends_with("weight");
    let number = |index: u64| {
        let z = seed.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let v = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32 - 0.5;
        if gain { 1.0 + 0.4 * v } else { 0.6 * v }
    };
    (0..shape.iter().product()).map(number).collect()
}

fn options(start: Start) -> TrainOptions {
    TrainOptions {
        iterations: 1,
        lr: 0.0,
        seed: 7,
        clip: Some(1e30),
        keep_parameters: true,
        start,
        ..TrainOptions::default()
    }
}

fn layout(more: Strategy) -> Strategy {
    Strategy {
        global_batch: SAMPLES,
        micro_batch: SAMPLES / u64::from(more.dp),
        seq: SEQ,
        optimizer: OptimizerKind::Sgd,
        ..more
    }
}

/// Ways to cut a model, each into two.
fn cuts() -> [(&'static str, Strategy); 6] {
    let one = Strategy::default;
    [
        ("dp", Strategy { dp: 2, leaves: 2, ..one() }),
        ("pp", Strategy { pp: 2, ..one() }),
        ("tp", Strategy { tp: 2, ..one() }),
        ("tp with sp", Strategy { tp: 2, sp: true, ..one() }),
        ("cp", Strategy { cp: 2, ..one() }),
        ("ep", Strategy { dp: 2, ep: 2, leaves: 2, expert_buffer_factor: 2.0, ..one() }),
    ]
}

/// Cuts that a family does not allow.
fn is_refused(name: &str, model: &Model, cut: &str) -> bool {
    match cut {
        "tp" => model.kv_heads == 1 || !model.experts.is_none(),
        "tp with sp" => model.kv_heads == 1,
        // The ring knows no distances.
        "cp" => model.depends_on_distance(SEQ),
        "ep" => model.experts.is_none(),
        other => panic!("{name}: {other} was refused"),
    }
}

#[test]
fn every_family_is_trained_in_every_layout() {
    let mut wrong = Vec::new();
    for path in Fixture::all() {
        let fixture = Fixture::open(&path);
        let pretrained = fixture.pretrained();
        let model = pretrained.model().without_mtp();
        for (cut, strategy) in cuts() {
            let plan = match lower(&model, &layout(strategy)) {
                Ok(plan) => plan,
                Err(problems) => {
                    if !is_refused(&fixture.name, &model, cut) {
                        wrong.push(format!("{} with {cut}: {problems}", fixture.name));
                    }
                    continue;
                }
            };
            let start = Start::Pretrained(Arc::clone(&pretrained));
            let run = train(&plan, &options(start), &mut |_| {})
                .unwrap_or_else(|error| panic!("{} with {cut}: {error}", fixture.name));
            let first = &run.iterations[0];
            for (what, ours) in [("loss", first.loss), ("gradient_norm", first.grad_norm)] {
                let (ours, theirs) = (f64::from(ours), fixture.number(what));
                let error = (ours / theirs - 1.0).abs();
                if error.is_nan() || error > 1e-4 {
                    wrong.push(format!("{} with {cut}: {what} {ours}, {theirs}", fixture.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn losses_gradients_and_tokens_are_those_of_transformers() {
    let mut wrong = Vec::new();
    for path in Fixture::all() {
        let fixture = Fixture::open(&path);
        let pretrained = fixture.pretrained();
        let model = pretrained.model().without_mtp();
        let plan = lower(&model, &layout(Strategy::default()))
            .unwrap_or_else(|problems| panic!("{}: {problems}", fixture.name));
        let run = train(&plan, &options(Start::Pretrained(Arc::clone(&pretrained))), &mut |_| {})
            .unwrap_or_else(|error| panic!("{}: {error}", fixture.name));
        let first = &run.iterations[0];
        for (what, ours, allowed) in
            [("loss", first.loss, 1e-5), ("gradient_norm", first.grad_norm, 1e-4)]
        {
            let (ours, theirs) = (f64::from(ours), fixture.number(what));
            let error = (ours / theirs - 1.0).abs();
            if error.is_nan() || error > allowed {
                wrong.push(format!("{}: {what} {ours} against {theirs}", fixture.name));
            }
        }

        let network = Network::from_pretrained(&pretrained).unwrap();
        let positions: Vec<u32> = (0..SEQ as u32).collect();
        let logits = network.logits(&fixture.tokens("tokens"), &positions);
        let last = &logits[logits.len() - model.vocab as usize..];
        let theirs = fixture.values["logits"].as_array().unwrap();
        let theirs: Vec<f64> = theirs.iter().map(|logit| logit.as_f64().unwrap()).collect();
        let ours: Vec<f64> = last[..theirs.len()].iter().map(|&logit| f64::from(logit)).collect();
        // Of the vector: single precision itself loses 4e-5 of a small logit beside large ones.
        let distance: f64 = ours.iter().zip(&theirs).map(|(a, b)| (a - b).powi(2)).sum();
        let error = (distance / theirs.iter().map(|b| b.powi(2)).sum::<f64>()).sqrt();
        if error.is_nan() || error > 1e-5 {
            wrong.push(format!("{}: logits {ours:?} against {theirs:?}", fixture.name));
        }
        let (mut said, theirs) = (Vec::new(), fixture.tokens("said"));
        let greedy = Sampling { temperature: 0.0, top_k: None, seed: 0 };
        generate(&network, &fixture.tokens("prompt"), theirs.len(), greedy, &mut |token| {
            said.push(token);
            true
        })
        .unwrap();
        if said != theirs {
            wrong.push(format!("{}: said {said:?} against {theirs:?}", fixture.name));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
