//! Every run file in `examples/` is valid, trains on real processes, and has the property that its
//! comment states.

use super::support::{Folder, Ran};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

/// Stated property of a run file's losses.
enum Promise {
    /// Bitwise equal to those of another file.
    Same(&'static str),
    /// Within a ten-thousandth of those of another file.
    Near(&'static str),
    /// Bitwise equal to its own under other flags.
    Under(&'static str),
    /// Falling only: it is the reference of the others, or its updates have no fixed order.
    Fall,
}

const SINGLE: &str = "single-device";

/// One line per file that trains.
const PROMISES: &[(&str, Promise)] = &[
    (SINGLE, Promise::Fall),
    ("parameter-server", Promise::Same(SINGLE)),
    ("parameter-servers", Promise::Same(SINGLE)),
    ("all-reduce", Promise::Same(SINGLE)),
    ("gpipe", Promise::Same(SINGLE)),
    ("1f1b", Promise::Same(SINGLE)),
    ("zero", Promise::Same(SINGLE)),
    ("offload", Promise::Same(SINGLE)),
    ("ring-all-reduce", Promise::Near(SINGLE)),
    ("tensor", Promise::Near(SINGLE)),
    ("hybrid", Promise::Near(SINGLE)),
    ("zero-bubble", Promise::Under("--schedule 1f1b")),
    ("pipedream", Promise::Under("--transport thread")),
    ("context-parallel", Promise::Under("--transport thread")),
    ("experts", Promise::Under("--transport thread")),
    ("multi-token", Promise::Under("--pp 1")),
    ("synchronous-sgd", Promise::Under("--dp 1")),
    ("large-batch", Promise::Under("--zero 3")),
    ("resnet", Promise::Under("--dp 1 --pp 2")),
    ("softmax", Promise::Under("--dp 1 --pp 2")),
    ("two-tower", Promise::Under("--transport thread")),
    ("encoder-decoder", Promise::Under("--dp 1 --pp 4")),
    ("dlrm", Promise::Under("--transport thread")),
    ("compression", Promise::Under("--transport thread")),
    ("diloco", Promise::Under("--transport thread")),
    ("downpour", Promise::Fall),
    ("bounded-staleness", Promise::Fall),
    ("hogwild", Promise::Fall),
];

/// Enough iterations for losses to fall, few enough for a dozen runs.
const FEW: &str = "--iterations 8 --warmup 2 --json --save-every 0 --out run --overwrite";
/// Shortened samples, for models that read tokens.
const SHORT: &str = "--seq 16";
/// Files whose samples are not tokens.
const NO_TOKENS: [&str; 4] = ["resnet", "dlrm", "softmax", "two-tower"];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples")
}

fn train(here: &Folder, name: &str, flags: &str) -> Vec<f32> {
    let file = folder().join(format!("{name}.toml"));
    let short = if NO_TOKENS.contains(&name) { "" } else { SHORT };
    let line = format!("train --config {} {FEW} {short} {flags}", file.display());
    let ran: Ran = here.run(&line).done();
    let objects = ran.objects();
    let losses = objects.iter().filter(|object| object["event"] == "iteration");
    let bits = losses.map(|object| object["loss_bits"].as_str().unwrap().to_owned());
    bits.map(|bits| f32::from_bits(u32::from_str_radix(&bits, 16).unwrap())).collect()
}

#[test]
fn every_example_trains_and_keeps_its_promise() {
    let here = Folder::new();
    let losses: BTreeMap<&str, Vec<f32>> =
        PROMISES.iter().map(|(name, _)| (*name, train(&here, name, ""))).collect();
    for (name, promise) in PROMISES {
        let own = &losses[name];
        assert_eq!(own.len(), 8, "{name}");
        assert!(own[7] < own[0] - 0.05, "{name}: {own:?}");
        match promise {
            Promise::Same(other) => assert_eq!(own, &losses[other], "{name}"),
            Promise::Near(other) => {
                for (own, other) in own.iter().zip(&losses[other]) {
                    assert!((own - other).abs() <= 1e-4 * other, "{name}: {own} and {other}");
                }
            }
            Promise::Under(flags) => assert_eq!(own, &train(&here, name, flags), "{name} {flags}"),
            Promise::Fall => {}
        }
    }
    assert_eq!(losses["hybrid"], train(&here, "hybrid", "--dp 1 --pp 1 --zero 0"), "hybrid");
}

#[test]
fn no_example_is_forgotten() {
    let here = Folder::new();
    for entry in fs::read_dir(folder()).unwrap().flatten() {
        let (path, text) = (entry.path(), fs::read_to_string(entry.path()).unwrap());
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        here.run(&format!("plan --config {} --json", path.display())).done();
        let trains = text.contains("paceline train --config");
        let promised = PROMISES.iter().any(|(known, _)| *known == name);
        assert_eq!(trains, promised, "{name}");
        assert!(text.starts_with('#') && text.contains(&format!("examples/{name}.toml")), "{name}");
    }
}
