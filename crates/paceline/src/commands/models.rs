//! `paceline models`: lists the built-in models.

use crate::failure::Failure;
use crate::flags::{CommonFlags, Problems};
use crate::output::ModelRecord;
use crate::overview::{count, table};
use clap::Args;
use paceline_plan::model::built_in;

/// List the built-in models
///
/// Each name can be given to --model. A custom model is a TOML file with the same fields as those
/// in the repository's `models/`, or a directory with a Hugging Face config.json.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  paceline models\n  paceline plan --model gpt2-124m")]
pub(crate) struct Flags {
    #[command(flatten)]
    common: CommonFlags,
}

/// Lists the built-in models.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let output = flags.common.output();
    let mut models = Vec::new();
    for (name, _) in built_in::all() {
        match built_in::get(name) {
            Some(Ok(model)) => models.push(ModelRecord::from(&model)),
            Some(Err(errors)) => {
                let mut problems = Problems::default();
                problems.located(errors);
                return Err(problems.into());
            }
            None => {}
        }
    }
    if output.is_json() {
        return Ok(models.iter().try_for_each(|model| output.print_json(model))?);
    }
    let head = ["name", "kind", "params", "layers", "width", "heads", "seq", "vocab"];
    let rows = models.iter().map(|m| {
        let heads = match m.heads {
            0 => "–".to_owned(),
            heads if heads == m.kv_heads => heads.to_string(),
            heads => format!("{heads}/{}", m.kv_heads),
        };
        let [layers, width, seq, vocab] = [m.layers, m.d_model, m.seq, m.vocab].map(count);
        vec![m.name.clone(), m.kind.clone(), count(m.params), layers, width, heads, seq, vocab]
    });
    Ok(output.print(&table(&head, 2, rows))?)
}
