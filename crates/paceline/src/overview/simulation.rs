//! Summary of a prediction that fits one screen.

use super::details::{band, details_text, estimate_facts};
use super::plan::{facts, wrap, wrap_warnings};
use super::table::{count, cut, percent, table};
use crate::estimate::Estimate;
use crate::output::ModelRecord;
use paceline_plan::model::Model;
use paceline_plan::program::Plan;
use paceline_plan::staleness::Staleness;
use paceline_sim::cluster::Cluster;
use paceline_sim::{Fit, Outcome, RankGroup, Slowest};
use std::fmt::Write;

/// Number of ops listed before the rest is summed.
const OPS: usize = 12;

/// Maximum number of overrides listed.
const EXCEPTIONS: usize = 8;

/// The summary of a prediction, at most 40 lines of 100 columns; more if the outcome has details.
pub(crate) fn simulation_text(
    model: &Model,
    plan: &Plan,
    cluster: &Cluster,
    (outcome, estimate): (&Outcome, &Estimate),
    warnings: &[String],
) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_simulation(&mut out, model, plan, cluster, outcome);
    if let Some(details) = &outcome.details {
        out += &details_text(outcome, details);
    }
    let estimates = estimate_facts(estimate, outcome.error_band);
    for (index, (name, text)) in estimates.iter().enumerate() {
        for (line, part) in wrap(text, 88).iter().enumerate() {
            let name = if line == 0 { name } else { "" };
            let gap = if index + line == 0 { "\n" } else { "" };
            out += &format!("{gap}{name:<9}  {part}\n");
        }
    }
    out + &wrap_warnings(warnings)
}

/// A line of a prediction.
pub(crate) struct Line {
    pub name: String,
    pub value: String,
    /// Explanation of the value; may be empty.
    pub note: String,
}

/// The figures of a prediction, for the terminal and for the page.
pub(crate) fn prediction(model: &ModelRecord, plan: &Plan, outcome: &Outcome) -> Vec<Line> {
    let line =
        |name: &str, value: String, note: String| Line { name: name.to_owned(), value, note };
    let expected = band(outcome.iteration, outcome.error_band);
    let mut lines = vec![line("iteration", outcome.iteration.to_string(), expected)];
    if let Some(warm_up) = outcome.warm_up {
        let first = match plan.strategy.compress_warmup {
            Some(said) => format!("in each of the first {}", count(said.into())),
            None => "in the first fifth of a run".to_owned(),
        };
        lines.push(line("warm-up", warm_up.to_string(), first));
    }
    lines.push(line("compute", outcome.compute.to_string(), slowest(outcome)));
    let exposed = format!("of which {} exposed", outcome.exposed_communication);
    lines.push(line("communication", outcome.communication.to_string(), exposed));
    lines.push(line("idle", percent(outcome.bubble_fraction), String::new()));
    let (mfu, full) = (percent(outcome.mfu), percent(outcome.mfu_full_attention));
    let convention = match mfu == full {
        true => "model FLOPs over the peak".to_owned(),
        false => format!("model FLOPs with causal attention; {full} with full attention"),
    };
    lines.push(line("MFU", mfu, convention));
    let rate = format!("{:.0}", outcome.tokens_per_s_per_device);
    lines.push(line(&format!("{}/s", model.unit()), rate, "per device".to_owned()));
    lines.push(line("memory", outcome.fit.needed.to_string(), memory(outcome)));
    if let Some(Staleness { mean, max, max_lead, .. }) = outcome.staleness {
        let note = format!(
            "updates missed by a gradient on average, {max} at most; lead of a replica {max_lead} at most"
        );
        lines.push(line("staleness", format!("{mean:.2}"), note));
    }
    lines
}

fn write_simulation(
    out: &mut String,
    model: &Model,
    plan: &Plan,
    cluster: &Cluster,
    outcome: &Outcome,
) -> std::fmt::Result {
    for (name, text) in facts(model, plan) {
        writeln!(out, "{name:<9} {}", cut(&text, 90))?;
    }
    let device = &cluster.device;
    writeln!(
        out,
        "cluster   {}: {} devices {}",
        cluster.name,
        count(cluster.devices()),
        device.name
    )?;
    for line in cluster.exception_lines().iter().take(EXCEPTIONS) {
        writeln!(out, "          {}", cut(line, 90))?;
    }
    writeln!(out)?;
    for Line { name, value, note } in prediction(&ModelRecord::from(model), plan, outcome) {
        writeln!(out, "{}", format!("{name:<14} {value:>9}  {note}").trim_end())?;
    }
    writeln!(out)?;

    let mut ops: Vec<_> = outcome.ops.iter().collect();
    ops.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
    let rows = ops.iter().take(OPS).map(|op| {
        let exposed = op.exposed.to_string();
        vec![cut(&op.name, 56), count(op.count), op.time.to_string(), exposed]
    });
    let mut rows: Vec<_> = rows.collect();
    if let Some(rest) = ops.get(OPS..).filter(|rest| !rest.is_empty()) {
        rows.push(vec![format!("… {} more", rest.len())]);
    }
    write!(out, "{}", table(&["op", "count", "time", "exposed"], 1, rows))?;
    if outcome.rank_groups.is_empty() {
        return Ok(());
    }
    let rows = outcome.rank_groups.iter().take(OPS).map(|unequal| {
        let RankGroup { role, ranks, slowest, compute, exposed, idle } = unequal;
        let who = format!("{} ({})", slowest.rank, cut(&pace(slowest), 30));
        let times = [compute, exposed, idle].map(|time| time.to_string());
        [vec![cut(role, 30), who, count((*ranks).into())], times.to_vec()].concat()
    });
    let head = ["role", "rank", "ranks like it", "compute", "exposed", "idle"];
    write!(out, "\n{}", table(&head, 2, rows))
}

/// Capacity of the fullest rank's device, and whether all ranks fit. The plan's arena is named where
/// the profile's software needs another amount.
fn memory(outcome: &Outcome) -> String {
    let Fit { needed, headroom, memory, fits } = outcome.fit;
    let fits = if fits { "fits" } else { "does not fit" };
    let (needed, arena) = (needed.to_string(), outcome.peak_bytes.to_string());
    let planned = if needed == arena { String::new() } else { format!("; the plan has {arena}") };
    format!("of {memory}, {headroom} kept free: {fits}{planned}")
}

/// The rank whose times are shown, with its name if ranks differ.
fn slowest(outcome: &Outcome) -> String {
    if outcome.rank_groups.is_empty() {
        return "on the slowest rank".to_owned();
    }
    let Slowest { rank, host, .. } = &outcome.slowest;
    format!("on the slowest rank: {rank} on host {host} ({})", pace(&outcome.slowest))
}

/// A rank's device and slowdown.
fn pace(slowest: &Slowest) -> String {
    match slowest.slowdown > 1.0 {
        true => format!("{}, {} times slower", slowest.device, slowest.slowdown),
        false => slowest.device.clone(),
    }
}
