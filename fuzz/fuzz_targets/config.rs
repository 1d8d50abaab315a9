//! Any Hugging Face `config.json` is refused with the file's name, or is a model that the model file
//! format can express.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_plan::model::{Model, hugging_face};

fuzz_target!(|text: &str| {
    match hugging_face::parse(text, "config.json") {
        Ok(model) => assert_eq!(Model::parse(&model.to_toml(), "model.toml").as_ref(), Ok(&model)),
        Err(problems) => assert!(problems.to_string().contains("config.json")),
    }
});
