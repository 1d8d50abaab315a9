//! `--model`: a built-in name, a file, or a Hugging Face directory.

use super::Problems;
use super::file::read_text;
use super::number::short;
use paceline_plan::model::{Model, built_in, hugging_face};
use std::path::Path;

const FLAG: &str = "--model";

/// The model named by the flag; `None` if it is absent or invalid.
pub(crate) fn model(text: Option<&str>, problems: &mut Problems) -> Option<Model> {
    let Some(text) = text else {
        problems.add(FLAG, "missing; for example --model mini (`paceline models` lists)");
        return None;
    };
    if let Some(found) = built_in::get(text) {
        return found.map_err(|errors| problems.located(errors)).ok();
    }
    let path = Path::new(text);
    let parsed = if path.is_dir() {
        let config = path.join("config.json");
        if !config.is_file() {
            problems.add(
                FLAG,
                format!("the directory '{text}' has no config.json; give a Hugging Face model"),
            );
            return None;
        }
        let name = config.display().to_string();
        read(&config, problems).map(|text| hugging_face::parse(&text, &name))
    } else if path.exists() {
        let json = path.extension().is_some_and(|extension| extension == "json");
        let parse = if json { hugging_face::parse } else { Model::parse };
        read(path, problems).map(|contents| parse(&contents, text))
    } else {
        problems.add(FLAG, unknown(text));
        None
    };
    parsed?.map_err(|errors| problems.located(errors)).ok()
}

fn read(path: &Path, problems: &mut Problems) -> Option<String> {
    read_text(path).map_err(|what| problems.add(FLAG, format!("{} {what}", path.display()))).ok()
}

fn unknown(text: &str) -> String {
    let names: Vec<&str> = built_in::all().iter().map(|(name, _)| *name).collect();
    let meant = match built_in::nearest(text) {
        Some(meant) => format!(" (did you mean {meant}?)"),
        None => String::new(),
    };
    format!(
        "'{}' is neither a built-in model{meant} nor a file nor a directory; built in are: {}",
        short(text),
        names.join(", ")
    )
}
