//! Summary of a plan that fits one screen.

use super::experts::expert_fact;
use super::table::{count, cut, percent, table};
use crate::output::ModelRecord;
use paceline_plan::collective::{CollectiveKind, SummationOrder, resolve};
use paceline_plan::compress::Compression;
use paceline_plan::model::Model;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::strategy::{Offload, Recompute, Sync, Zero};
use paceline_plan::summary::Summary;
use paceline_plan::units::Bytes;
use std::fmt::Write;

/// Number of roles shown before the middle ones are left out.
const ROLES: usize = 8;
/// Maximum width of a role's name, in columns.
const ROLE_WIDTH: usize = 64;

/// Facts about the plan, as pairs of a name and its explanation.
pub(crate) fn facts(described: &Model, plan: &Plan) -> Vec<(String, String)> {
    let model = ModelRecord::from(described);
    let s = &plan.strategy;
    let fact = |name: &str, text: String| (name.to_owned(), text);
    let mut extras = if model.tied { ", tied head".to_owned() } else { String::new() };
    if model.mtp_depth > 0 {
        extras += &format!(", {} for further tokens", plural(model.mtp_depth, "module"));
    }
    let shape = format!(
        "{} ({}): {} parameters, {} layers of width {}{extras}",
        model.name,
        model.kind,
        count(model.params),
        model.layers,
        model.d_model
    );
    let samples = match model.unit() {
        "tokens" => {
            format!("{} of {}", plural(s.global_batch, "sample"), plural(s.seq, "token"))
        }
        // A sample of these is one image or one click.
        unit => plural(s.global_batch, unit.trim_end_matches('s')),
    };
    let batch = format!(
        "{samples}: {} × {} of {}",
        plural(s.dp.into(), "replica"),
        plural(s.microbatches().into(), "microbatch"),
        s.micro_batch
    );
    let mut types = format!("{} weights and activations, {} gradients", s.dtype, s.grad_dtype);
    if s.recompute != Recompute::None {
        types += &format!(", {} recomputation", s.recompute);
    }
    if s.offload != Offload::None {
        types += &format!(", {} offloaded to {}", s.offload, s.store);
    }
    let mut facts = vec![
        fact("model", shape),
        fact("mesh", mesh(plan)),
        fact("batch", batch),
        fact("types", types),
        fact("update", update(plan)),
    ];
    facts.extend(agreement(plan).map(|text| fact("replicas", text)));
    facts.extend(compression(plan).map(|text| fact("compress", text)));
    facts.extend(expert_fact(described, plan).map(|text| fact("experts", text)));
    facts.push(fact("schedule", schedule(plan)));
    facts
}

fn schedule(plan: &Plan) -> String {
    let s = &plan.strategy;
    match s.pp {
        1 => "one stage".to_owned(),
        pp => {
            let stages = u64::from(pp) * u64::from(s.schedule.chunks());
            format!("{}, {stages} stages", s.schedule)
        }
    }
}

/// The schedule of a plan and its microbatches, for the caption of a picture.
pub(crate) fn pipeline(plan: &Plan) -> String {
    let microbatches = plural(plan.strategy.microbatches().into(), "microbatch");
    format!("{}, {microbatches}", schedule(plan))
}

fn mesh(plan: &Plan) -> String {
    let mesh = &plan.mesh;
    let axes = mesh.order.axes().into_iter().rev();
    let axes = axes.map(|axis| (axis.name(), mesh.axis(axis)));
    let used: Vec<String> =
        axes.filter(|axis| axis.1 > 1).map(|(name, size)| format!("{name} {size}")).collect();
    let mut text = plural(mesh.world().into(), "rank");
    if !used.is_empty() {
        text += &format!(" = {}", used.join(" × "));
    }
    if plan.strategy.sp {
        text += ", sequence-parallel";
    }
    let experts = [("edp", mesh.edp()), ("ep", mesh.ep), ("etp", mesh.etp)];
    if mesh.ep * mesh.etp > 1 {
        let used = experts.iter().filter(|axis| axis.1 > 1);
        let used: Vec<String> = used.map(|(name, size)| format!("{name} {size}")).collect();
        text += &format!(", for experts {}", used.join(" × "));
    }
    if mesh.servers > 0 {
        text += &format!(" + {}", plural(mesh.servers.into(), "parameter server"));
    }
    text
}

fn update(plan: &Plan) -> String {
    let s = &plan.strategy;
    match s.zero {
        Zero::None => s.optimizer.to_string(),
        zero => format!("{}, ZeRO-{} among {}", s.optimizer, zero, plural(s.dp.into(), "replica")),
    }
}

/// Synchronisation of replicas; `None` for a single replica without servers.
fn agreement(plan: &Plan) -> Option<String> {
    let s = &plan.strategy;
    if s.sync == Sync::Hogwild {
        return Some("one set of weights in shared memory, updated without locks".to_owned());
    }
    if s.sync.is_async() {
        return Some(format!("gradients to servers ({}) asynchronously, weights back", s.sync));
    }
    if let Sync::Servers(_) = s.sync {
        return Some(format!("gradients to servers ({}), weights back", s.sync));
    }
    if plan.mesh.replicas() == 1 {
        return None;
    }
    let overlap = if s.overlap { "beside" } else { "after" };
    let order = match s.order {
        SummationOrder::Canonical => format!("canonical ({})", plural(s.leaves.into(), "leaf")),
        SummationOrder::Free => "free order".to_owned(),
    };
    let kind = match s.zero {
        Zero::None => CollectiveKind::AllReduce,
        Zero::Optimizer | Zero::Gradients | Zero::Parameters => CollectiveKind::ReduceScatter,
    };
    let algorithm = resolve(kind, s.collective, plan.mesh.replicas(), s.order);
    let calls = plan.programs.iter().flat_map(|program| &program.calls);
    let mut methods = calls.filter(|call| call.kind == kind).map(|call| call.method);
    let algorithm = match methods.find(|method| method.library().is_some()) {
        Some(library) => library.to_string(),
        None => algorithm.unwrap_or(s.collective).to_string(),
    };
    let bucket = s.bucket;
    Some(format!("{kind} by {algorithm} {overlap} compute, {bucket} buckets, {order}"))
}

/// Compressed data and its warm-up; `None` without compression.
fn compression(plan: &Plan) -> Option<String> {
    let s = &plan.strategy;
    if s.compress == Compression::None {
        return None;
    }
    let what = match (s.local, s.exchanges_moments()) {
        (Some(_), _) => "how far replicas moved",
        (None, true) => "first moments",
        (None, false) => "gradients",
    };
    let after = match s.compress_warmup {
        _ if !s.has_compress_warmup() => String::new(),
        Some(said) => format!(", after {} of whole gradients", plural(said.into(), "iteration")),
        None => ", after a fifth of the run with whole gradients".to_owned(),
    };
    Some(format!("{what} by {}{after}", s.compress))
}

/// The summary of a plan, at most 40 lines of 100 columns.
pub(crate) fn plan_text(
    model: &Model,
    plan: &Plan,
    summary: &Summary,
    device: Option<(&str, Bytes)>,
    warnings: &[String],
) -> String {
    let mut out = String::new();
    let mut facts = facts(model, plan);
    if plan.mesh.pp > 1
        && let Some((_, schedule)) = facts.last_mut()
    {
        *schedule += &format!("; idle {} at best", percent(summary.bubble_fraction));
    }
    // Writing to a string cannot fail.
    let _ = write_plan(&mut out, &facts, plan, summary, device);
    out + &wrap_warnings(warnings)
}

/// Warnings, each wrapped to several lines if needed.
pub(super) fn wrap_warnings(warnings: &[String]) -> String {
    let mut out = String::new();
    for warning in warnings {
        for (index, line) in wrap(warning, 90).iter().enumerate() {
            let lead = if index == 0 { "warning: " } else { "         " };
            out += &format!("{lead}{line}\n");
        }
    }
    out
}

fn write_plan(
    out: &mut String,
    facts: &[(String, String)],
    plan: &Plan,
    summary: &Summary,
    device: Option<(&str, Bytes)>,
) -> std::fmt::Result {
    for (name, text) in facts {
        writeln!(out, "{name:<9} {}", cut(text, 90))?;
    }
    writeln!(out)?;

    let role = |role: usize| {
        let program = &plan.programs[role];
        let ops = count(program.body.nodes.len() as u64);
        vec![cut(&short(&program.name), ROLE_WIDTH), ops, program.memory.total().to_string()]
    };
    let roles = plan.programs.len();
    let shown: Vec<Vec<String>> = if roles <= ROLES {
        (0..roles).map(role).collect()
    } else {
        let (head, tail) = (ROLES / 2, roles - (ROLES / 2 - 1));
        let between = vec![format!("… {} more roles", tail - head)];
        (0..head).map(role).chain([between]).chain((tail..roles).map(role)).collect()
    };
    writeln!(out, "{}", table(&["role", "ops", "memory"], 1, shown))?;

    let fullest = plan.programs.get(summary.fullest).map_or("", |program| &program.name);
    let short = fullest.split_once(" (").map_or(fullest, |(short, _)| short);
    writeln!(out, "memory of {short}, the fullest role")?;
    for kind in MemoryKind::ARENA {
        let bytes = summary.memory.of(kind);
        let share = bytes.as_f64() / summary.peak_bytes.as_f64().max(1.0);
        let (text, share) = (bytes.to_string(), percent(share));
        writeln!(out, "  {:<14}{text:>10}  {share:>7}", kind.name())?;
    }
    let of = match device {
        Some((name, memory)) => format!("  of {memory} on {name}"),
        None => String::new(),
    };
    writeln!(out, "  {:<14}{:>10}{of}", "all", summary.peak_bytes.to_string())?;
    let shared = summary.memory.shared();
    if shared > Bytes::ZERO {
        writeln!(out, "  {:<14}{:>10}  of it, once for all ranks", "shared", shared.to_string())?;
    }
    let stored = summary.memory.stored();
    if stored > Bytes::ZERO {
        let (to, moved) = (plan.strategy.store, summary.offloaded);
        writeln!(
            out,
            "  {:<14}{:>10}  on {to}, {moved} moved an iteration",
            "stored",
            stored.to_string()
        )?;
    }
    writeln!(out)?;

    if summary.traffic.is_empty() {
        return writeln!(out, "nothing is sent between ranks");
    }
    let rows = summary
        .traffic
        .iter()
        .map(|(axis, sent)| vec![(*axis).to_owned(), count(sent.messages), sent.bytes.to_string()]);
    let rows: Vec<_> = rows.collect();
    writeln!(out, "sent by one rank in an iteration, at most")?;
    for line in table(&["axis", "messages", "bytes"], 1, rows).lines() {
        writeln!(out, "  {line}")?;
    }
    Ok(())
}

/// Shortens a role's name for a narrow column: "blocks.4..blocks.7" repeats "blocks" needlessly.
fn short(name: &str) -> String {
    let mut pieces = name.split("..");
    let mut text = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let first = text.rsplit(['(', ' ']).next().unwrap_or_default();
        let last = piece.strip_prefix("blocks.").filter(|_| first.starts_with("blocks."));
        text = format!("{text}..{}", last.unwrap_or(piece));
    }
    text
}

fn plural(number: u64, noun: &str) -> String {
    let noun = match (number, noun) {
        (1, noun) => noun.to_owned(),
        (_, "leaf") => "leaves".to_owned(),
        (_, noun) if noun.ends_with("ch") => format!("{noun}es"),
        (_, noun) => format!("{noun}s"),
    };
    format!("{} {noun}", count(number))
}

/// Wraps a text to lines of at most `width` columns, between words.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().expect("there is always a line");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= width {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_roles_are_shortened_where_nothing_is_lost() {
        let name = "pipeline rank 0 (embedding..blocks.3, blocks.32..blocks.35, blocks.92..head)";
        let expected = "pipeline rank 0 (embedding..blocks.3, blocks.32..35, blocks.92..head)";
        assert_eq!(short(name), expected);
        assert_eq!(short("server 1"), "server 1");
    }

    #[test]
    fn long_warnings_are_wrapped() {
        let text = wrap_warnings(&["word ".repeat(40)]);
        assert!(text.starts_with("warning: word") && text.lines().count() == 3, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100));
    }
}
