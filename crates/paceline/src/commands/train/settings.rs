//! Settings of a run as flags, stored when it starts, so that `--resume` can take them over.

use super::{Job, JobFlags};
use crate::flags::{MODEL, TOKENIZER, read_text};
use paceline_exec::data::{BUILTIN, Tokenizer};
use paceline_plan::compress::Compression;
use serde::Serialize;
use std::path::Path;
use toml::{Table, Value};

/// A run's settings: every flag that was given, and every default that depends on other flags.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings(Table);

/// Flags of this invocation only: where a run lies and how its ranks are started.
const TRANSIENT: [&str; 7] =
    ["resume", "out", "overwrite", "launch", "bind", "secret-file", "ranks"];

/// Flags that name files or directories.
const PATHS: [&str; 5] = ["data", "cluster", "init-from", "export-hf", "offload-dir"];

/// Flags that alter the result in any summation order.
const RESULT: [&str; 27] = [
    "data",
    "tokenizer",
    "unique-samples",
    "clients",
    "client-fraction",
    "global-batch",
    "micro-batch",
    "seq",
    "leaves",
    "order",
    "dtype",
    "grad-dtype",
    "optimizer",
    "lr",
    "warmup",
    "lr-schedule",
    "min-lr",
    "base-batch",
    "lr-scaling",
    "weight-decay",
    "clip",
    "seed",
    "compress",
    "sync",
    "local-steps",
    "outer-optimizer",
    "sync-batch-norm",
];

/// Flags that alter the result where sums are in free order.
const LAYOUT: [&str; 9] = ["dp", "tp", "pp", "cp", "ep", "etp", "zero", "schedule", "collective"];

impl Settings {
    /// The settings of a job.
    pub(super) fn of(job: &Job, flags: &JobFlags) -> Self {
        let JobFlags { strategy, training, data, checkpoints, launch, cluster, common: _ } = flags;
        let mut all = Table::new();
        given(strategy, &mut all);
        given(training, &mut all);
        given(data, &mut all);
        given(checkpoints, &mut all);
        given(launch, &mut all);
        given(cluster, &mut all);
        TRANSIENT.iter().for_each(|flag| drop(all.remove(*flag)));
        for flag in PATHS {
            if let Some(Value::String(text)) = all.get_mut(flag) {
                *text = from_anywhere(text);
            }
        }
        all.insert("model".to_owned(), MODEL.into());
        if let Tokenizer::HuggingFace { .. } = &job.data.tokenizer {
            all.insert("tokenizer".to_owned(), TOKENIZER.into());
        }
        let (s, t) = (&job.plan.strategy, &job.training);
        let number =
            |value: u64| i64::try_from(value).map_or(value.to_string().into(), Value::from);
        for (flag, value) in [
            ("dp", number(s.dp.into())),
            ("tp", number(s.tp.into())),
            ("pp", number(s.pp.into())),
            ("cp", number(s.cp.into())),
            ("ep", number(s.ep.into())),
            ("etp", number(s.etp.into())),
            ("global-batch", number(s.global_batch)),
            ("micro-batch", number(s.micro_batch)),
            ("seq", number(s.seq)),
            ("leaves", number(s.leaves.into())),
            ("dtype", s.dtype.to_string().into()),
            ("grad-dtype", s.grad_dtype.to_string().into()),
            ("order", s.order.to_string().into()),
            ("optimizer", s.optimizer.to_string().into()),
            ("schedule", s.schedule.to_string().into()),
            ("iterations", number(t.iterations.into())),
            ("lr", t.lr.into()),
            ("warmup", number(t.warmup.into())),
            ("lr-schedule", t.schedule.to_string().into()),
            ("min-lr", t.min_lr.into()),
            ("loss-scale", f64::from(t.loss_scale).into()),
            ("weight-decay", t.weight_decay.into()),
            ("clip", t.clip.unwrap_or(0.0).into()),
            ("seed", number(t.seed)),
        ] {
            all.insert(flag.to_owned(), value);
        }
        if job.plan.expert_buffers().is_some() {
            all.insert("expert-buffer-factor".to_owned(), s.expert_buffer_factor.into());
        }
        if s.compress != Compression::None {
            all.insert("compress-warmup".to_owned(), number(job.warm_up.into()));
        }
        Self(all)
    }

    /// Sets a flag to another value.
    pub(super) fn set(&mut self, flag: &str, value: Value) {
        self.0.insert(flag.to_owned(), value);
    }

    /// Reads a file written by [`to_toml`](Self::to_toml).
    pub(super) fn read(path: &Path) -> Option<Self> {
        read_text(path).ok()?.parse().ok().map(Self)
    }

    /// The settings as a run file.
    pub(super) fn to_toml(&self) -> String {
        format!("# Settings of this run; `paceline train --resume` takes them over.\n{}", self.0)
    }

    /// Differences to `before` that alter the result, as one line.
    pub(super) fn changes_since(&self, before: &Self) -> Option<String> {
        let text = |settings: &Self, flag: &str| match settings.0.get(flag) {
            None => "default".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        };
        let any = |flag: &str, word: &str| [self, before].iter().any(|s| text(s, flag) == word);
        let schedule = |settings: &Self| text(settings, "schedule");
        let mut flags = RESULT.to_vec();
        if any("order", "free") {
            flags.extend(LAYOUT);
        } else if [self, before].iter().any(|s| schedule(s).starts_with("pipedream")) {
            flags.push("schedule");
        }
        if any("lr-schedule", "linear") || any("lr-schedule", "cosine") {
            flags.push("iterations");
        }
        let changed = flags.into_iter().filter_map(|flag| {
            let (then, now) = (text(before, flag), text(self, flag));
            (then != now).then(|| format!("--{flag} {then} → {now}"))
        });
        let changed: Vec<String> = changed.collect();
        let told = "so it does not end as the run that was saved would have";
        (!changed.is_empty()).then(|| format!("changed: {}; {told}", changed.join(", ")))
    }
}

/// Adds the flags of a group that were given.
fn given(flags: &impl Serialize, all: &mut Table) {
    // Flags are text, switches and lists of text; a path that is no text cannot be stored.
    let Ok(serde_json::Value::Object(fields)) = serde_json::to_value(flags) else { return };
    for (flag, value) in fields {
        let value = match value {
            serde_json::Value::String(text) => Value::String(text),
            serde_json::Value::Bool(true) => Value::Boolean(true),
            serde_json::Value::Array(list) if !list.is_empty() => {
                let texts = list.iter().filter_map(serde_json::Value::as_str);
                Value::Array(texts.map(Value::from).collect())
            }
            _ => continue,
        };
        all.insert(flag, value);
    }
}

/// An absolute path for what is a path; built-in names, also with a number, stay.
fn from_anywhere(text: &str) -> String {
    let (file, rest) = match text.rsplit_once(':') {
        Some((file, _)) if !Path::new(text).exists() => (file, &text[file.len()..]),
        Some(_) | None => (text, ""),
    };
    let is_path = Path::new(file).exists() || file.contains('/');
    let found = Path::new(file).canonicalize().or_else(|_| std::path::absolute(file));
    match found {
        Ok(path) if is_path && text != BUILTIN => format!("{}{rest}", path.display()),
        Ok(_) | Err(_) => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> Settings {
        Settings(text.parse().unwrap())
    }

    #[test]
    fn changes_that_alter_the_result_are_one_line() {
        let before = settings("dp = 2\nglobal-batch = 8\norder = \"canonical\"\nlr = 0.003\n");
        assert_eq!(before.changes_since(&before), None);
        let other = settings("dp = 4\nglobal-batch = 8\norder = \"canonical\"\nlr = 0.003\n");
        assert_eq!(other.changes_since(&before), None, "layouts have the same bits");
        let free = settings("dp = 4\nglobal-batch = 8\norder = \"free\"\nlr = 0.003\n");
        let told = free.changes_since(&before).unwrap();
        assert!(told.contains("--order canonical → free") && told.contains("--dp 2 → 4"), "{told}");
        let more = settings("dp = 2\nglobal-batch = 16\norder = \"canonical\"\nlr = 0.01\n");
        let told = more.changes_since(&before).unwrap();
        assert!(told.starts_with("changed: --global-batch 8 → 16, --lr 0.003 → 0.01; "), "{told}");
    }
}
