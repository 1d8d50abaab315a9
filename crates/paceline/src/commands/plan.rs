//! `paceline plan`: lowers and validates a plan, and shows each rank's ops and memory.

use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, HeadroomFlags, Origins, Problems, Request, StrategyFlags,
};
use crate::output::Subject;
use crate::overview::{largest_peak, plan_text, warnings};
use crate::sweep::SweepFlags;
use clap::Args;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::Model;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::schedule::{Action, ScheduleError, ScheduleKind, grid};
use paceline_plan::summary::{Summary, summarize};
use paceline_plan::units::Bytes;
use paceline_plan::validate::Violation;
use paceline_plan::{text, validate};
use paceline_sim::cluster::Cluster;
use paceline_sim::{Fit, Profile, fit};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Lower and validate a plan; show programs, memory and messages
///
/// Nothing is run: the plan is arithmetic. Shows the layers of each pipeline rank, its number of
/// ops, the memory of every kind of buffer, and the traffic along each mesh axis. With --cluster,
/// also reports if the plan fits there.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    strategy: StrategyFlags,
    #[command(flatten)]
    cluster: ClusterFlags,
    #[command(flatten)]
    headroom: HeadroomFlags,
    /// Print the pipeline's schedule (grid or csv) or the programs of all roles (text) instead
    ///
    /// grid: the schedule of textbooks. Every pass takes one slot and starts as early as it can, so
    /// that the forwards of the warm-up stand at the front.
    ///
    /// csv: the table that PyTorch prints for its schedules, for comparison with it. It reserves
    /// slots for backwards, and the last forward of 1F1B's warm-up stands late, right before its
    /// backward.
    ///
    /// Neither says how long a pass takes; `paceline simulate --picture` draws that.
    #[arg(long, value_name = "grid|csv|text", help_heading = "General")]
    #[arg(conflicts_with_all = ["json", "vary"])]
    format: Option<String>,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

/// Default columns of a study of plans.
pub(super) const USUAL: [&str; 6] = [
    "peak_bytes",
    "memory.parameters",
    "memory.gradients",
    "memory.optimizer",
    "memory.activations",
    "bubble_fraction",
];

const EXAMPLES: &str = "\
Examples:
  paceline plan --model gpt2-124m
  paceline plan --model gpt3-175b --tp 8 --pp 8 --dp 16 --global-batch 1536 \\
                --schedule interleaved:3 --cluster dgx-a100:128
  paceline plan --model mini --pp 4 --global-batch 8 --format grid    the pipeline's schedule
  paceline plan --model mini --dp 2 --format text                     every op of every role";

enum Format {
    Summary,
    Grid,
    Csv,
    Programs,
}

/// Lowers and prints the plan.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let format = match flags.format.as_deref() {
        None => Format::Summary,
        Some("grid") => Format::Grid,
        Some("csv") => Format::Csv,
        Some("text") => Format::Programs,
        Some(other) => {
            problems.add("--format", format!("'{other}' is none of grid, csv and text"));
            Format::Summary
        }
    };
    let Planned { model, plan, cluster, headroom } = lower(flags, problems)?;
    let output = flags.common.output();
    match format {
        Format::Grid => Ok(output.raw(&grid::to_text(&slots(&plan, grid::unit_grid)?))?),
        Format::Csv => Ok(output.raw(&grid::to_csv(&slots(&plan, grid::grid)?))?),
        Format::Programs => Ok(output.raw(&text::print(&plan))?),
        Format::Summary => {
            let summary = summarize(&plan);
            let warnings = warnings(&plan, &summary, on(&plan, cluster.as_ref(), headroom));
            if output.is_json() {
                let subject = Subject::new(&model, &plan.strategy, cluster.as_ref());
                let at_most = largest_peak(&model, &plan);
                return Ok(output.print_json(&Record::new(subject, &summary, at_most, &warnings))?);
            }
            let device = cluster.as_ref().map(|c| (c.device.name.as_str(), c.device.memory));
            Ok(output.print(&plan_text(&model, &plan, &summary, device, &warnings))?)
        }
    }
}

/// Returns the plan's summary as one JSON object.
pub(super) fn result(flags: &Flags, origins: Origins) -> Result<Value, Failure> {
    let Planned { model, plan, cluster, headroom } = lower(flags, Problems::new(origins))?;
    let summary = summarize(&plan);
    let warnings = warnings(&plan, &summary, on(&plan, cluster.as_ref(), headroom));
    let subject = Subject::new(&model, &plan.strategy, cluster.as_ref());
    let asked = flags.sweep.mentions(&["peak_bytes_at_most"]);
    let at_most = if asked { largest_peak(&model, &plan) } else { None };
    let record = Record::new(subject, &summary, at_most, &warnings);
    serde_json::to_value(record).map_err(|error| Failure::Run(error.into()))
}

/// The lowered plan with its model and cluster.
struct Planned {
    model: Model,
    plan: Plan,
    cluster: Option<Cluster>,
    headroom: Option<Bytes>,
}

/// The plan's cluster, and its memory there.
fn on<'a>(
    plan: &Plan,
    cluster: Option<&'a Cluster>,
    headroom: Option<Bytes>,
) -> Option<(&'a Cluster, Fit)> {
    cluster.map(|cluster| (cluster, fit(plan, cluster, &Profile::default(), headroom)))
}

/// Checks the flags, adding to `problems`, and lowers the plan.
fn lower(flags: &Flags, mut problems: Problems) -> Result<Planned, Failure> {
    let cluster = flags.cluster.check(&mut problems);
    let headroom = flags.headroom.check(&mut problems);
    let defaults = Defaults::for_cluster(cluster.as_ref(), SummationOrder::Canonical);
    let on = cluster.as_ref().map(|cluster| (&flags.cluster, cluster));
    let request = flags.strategy.check(defaults, on, &mut problems);
    let Some(Request { model, plan }) = request.filter(|_| problems.is_empty()) else {
        return Err(problems.into());
    };
    check_plan(&plan)?;
    Ok(Planned { model, plan, cluster, headroom })
}

/// Refuses a plan that does not pass validation.
pub(super) fn check_plan(plan: &Plan) -> Result<(), Failure> {
    refuse(&validate::validate(plan, None))
}

/// Fails on violations; a planner output that fails validation is a bug, not a user error.
pub(super) fn refuse(violations: &[Violation]) -> Result<(), Failure> {
    let Some(first) = violations.first() else { return Ok(()) };
    let more = match violations.len() - 1 {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    };
    Err(Failure::Run(anyhow::anyhow!("the plan is unsound, please report this: {first}{more}")))
}

/// Cells of a schedule: one row per pipeline rank.
type Cells = Vec<Vec<Option<Action>>>;

/// The plan's schedule in time slots, by the rules of `draw`.
fn slots(
    plan: &Plan,
    draw: impl Fn(ScheduleKind, u16, u32) -> Result<Cells, ScheduleError>,
) -> Result<Cells, Failure> {
    let s = &plan.strategy;
    let pp = u16::try_from(s.pp).unwrap_or(u16::MAX);
    draw(s.schedule, pp, s.microbatches())
        .map_err(|error| Failure::flag("--schedule", error.to_string()))
}

#[derive(Serialize)]
struct Record<'a> {
    #[serde(flatten)]
    subject: Subject,
    ranks: u32,
    roles: usize,
    ops_per_iteration: usize,
    bubble_fraction: f64,
    peak_bytes: u64,
    /// The same if uneven routing enlarges the buffers of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_bytes_at_most: Option<u64>,
    memory: BTreeMap<&'static str, u64>,
    /// Offload store of the role with the highest peak, outside its arena.
    offload_store_bytes: u64,
    /// Memory shared by all ranks; the peak counts it for the first rank.
    shared_bytes: u64,
    /// Bytes that one rank moves to and from the offload store per iteration.
    offload_traffic_bytes: u64,
    bytes_by_axis: BTreeMap<&'static str, u64>,
    messages_by_axis: BTreeMap<&'static str, u64>,
    warnings: &'a [String],
}

impl<'a> Record<'a> {
    fn new(
        subject: Subject,
        summary: &Summary,
        at_most: Option<Bytes>,
        warnings: &'a [String],
    ) -> Self {
        let traffic = || summary.traffic.iter();
        Self {
            subject,
            ranks: summary.ranks,
            roles: summary.roles,
            ops_per_iteration: summary.ops_per_iteration,
            bubble_fraction: summary.bubble_fraction,
            peak_bytes: summary.peak_bytes.0,
            peak_bytes_at_most: at_most.map(|bytes| bytes.0),
            memory: MemoryKind::ARENA.map(|kind| (kind.name(), summary.memory.of(kind).0)).into(),
            offload_store_bytes: summary.memory.stored().0,
            shared_bytes: summary.memory.shared().0,
            offload_traffic_bytes: summary.offloaded.0,
            bytes_by_axis: traffic().map(|(axis, sent)| (*axis, sent.bytes.0)).collect(),
            messages_by_axis: traffic().map(|(axis, sent)| (*axis, sent.messages)).collect(),
            warnings,
        }
    }
}
