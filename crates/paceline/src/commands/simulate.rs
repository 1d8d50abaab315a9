//! `paceline simulate`: predicts a plan's time and memory on a described cluster.

mod record;

use super::plan::refuse;
use crate::estimate::Estimate;
use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, HeadroomFlags, Origins, Problems, Request, StrategyFlags,
    WholeRunFlags, word,
};
use crate::output::{ModelRecord, Output, Subject, write};
use crate::overview::{
    Line, estimate_facts, facts, largest_peak, percent, pipeline, prediction, simulation_text,
    warnings,
};
use crate::plot::{RooflinePlot, RooflinePoint};
use crate::report::{Insight, MemoryRow, ReportInput, picture, render};
use crate::sweep::SweepFlags;
use clap::Args;
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::Model;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::summary::summarize;
use paceline_plan::trace::to_perfetto;
use paceline_plan::validate::{self, Violation};
use paceline_sim::cluster::Cluster;
use paceline_sim::compute::operators;
use paceline_sim::{Options, Outcome, Profile, SimError};
use record::Record;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Predict a plan's time and memory on a described cluster
///
/// Times the plan that `paceline train` would run, op by op: GEMMs by the device's rates, messages
/// and collectives by the links they cross. Times are those of the slowest rank; exposed
/// communication is not hidden by any compute.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    strategy: StrategyFlags,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// Network model: analytic (each op alone) or flow (concurrent messages share links) [default:
    /// analytic]
    #[arg(long, value_name = "analytic|flow", help_heading = "Cluster")]
    network: Option<String>,
    /// Software profile that runs the plan: modern, megatron-2021, megatron-core, torchtitan or
    /// another; an unknown name lists all [default: modern]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    profile: Option<String>,
    #[command(flatten)]
    headroom: HeadroomFlags,
    /// Assume 2:4 sparse weights and use the device's sparse units
    #[arg(long, help_heading = "Cluster")]
    sparse_weights: bool,
    /// Also report limits of the iteration time, its critical path and the link utilisation
    #[arg(long, help_heading = "General")]
    details: bool,
    /// Write the simulated timeline for Perfetto or Chrome
    #[arg(long, value_name = "FILE", conflicts_with = "vary", help_heading = "General")]
    trace: Option<PathBuf>,
    /// Draw one iteration: compute and communication of each rank over time
    ///
    /// Widths are predicted times, and a pass starts when its inputs have arrived, as in textbooks;
    /// --title sets the title. `paceline plan --format grid` shows the schedule alone, in equal
    /// slots.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "vary", help_heading = "General")]
    picture: Option<PathBuf>,
    /// Draw the roofline of the device with every operator of the plan below it
    ///
    /// The area of a dot is its share of the compute time; --title sets the title.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "vary", help_heading = "General")]
    roofline: Option<PathBuf>,
    /// Write the prediction as one HTML page
    #[arg(long, value_name = "FILE.html", conflicts_with = "vary", help_heading = "General")]
    report: Option<PathBuf>,
    #[command(flatten)]
    whole_run: WholeRunFlags,
    #[command(flatten)]
    pub(super) sweep: SweepFlags,
    #[command(flatten)]
    pub(super) common: CommonFlags,
}

impl Flags {
    /// Returns true if a picture is requested.
    pub(super) fn has_picture(&self) -> bool {
        self.picture.is_some() || self.roofline.is_some()
    }
}

/// Default columns of a study of predictions.
pub(super) const USUAL: [&str; 6] =
    ["iteration_s", "compute_s", "exposed_communication_s", "bubble_fraction", "peak_bytes", "mfu"];

const EXAMPLES: &str = "\
Examples:
  paceline simulate --model llama3-8b --tp 8 --dp 2 --global-batch 32 --cluster dgx-a100:2
  paceline simulate --model gpt3-175b --tp 8 --pp 8 --dp 16 --global-batch 1536 \\
                    --recompute full --cluster dgx-a100:128 --report gpt3.html
  paceline simulate --model llama3-70b --tp 8 --pp 4 --dp 4 --global-batch 256 --zero 1 \\
                    --cluster dgx-h100:16 --tokens 1T --price-per-device-hour 2.5 \\
                    --mtbf-hours 50000
  paceline simulate --model gpt3-175b --tp 8 --pp 8 --schedule 1f1b --recompute full \\
                    --cluster dgx-a100:8 --vary global-batch=8,16,32,64,128 \\
                    --vary schedule=gpipe,1f1b,interleaved:3 --y bubble_fraction --plot bubble.svg";

/// Simulates the plan and prints the prediction.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let output = flags.common.output();
    let trace = flags.trace.is_some() || flags.picture.is_some() || flags.report.is_some();
    let details = flags.details || flags.report.is_some() || output.is_json();
    let Prediction { model, plan, cluster, mut outcome, estimate } =
        predict(flags, origins, trace, details)?;
    let warnings = warnings(&plan, &summarize(&plan), Some((&cluster, outcome.fit)));

    if let (Some(path), Some(trace)) = (&flags.trace, &outcome.trace) {
        save(path, &to_perfetto(trace), &output)?;
    }
    if let (Some(path), Some(trace)) = (&flags.picture, &outcome.trace) {
        let title = flags.sweep.title.as_deref().unwrap_or(&trace.title);
        let idle = percent(outcome.bubble_fraction);
        let note = format!("{}, idle {idle} on the slowest rank", pipeline(&plan));
        let svg = picture(trace, title, &note).ok_or_else(|| {
            Failure::Run(anyhow::anyhow!("the plan has no iteration that could be drawn"))
        })?;
        save(path, &svg, &output)?;
    }
    if let Some(path) = &flags.roofline {
        let title = flags.sweep.title.as_deref();
        save(path, &roofline(&plan, &cluster, &profile(flags), title), &output)?;
    }
    let record = ModelRecord::from(&model);
    if let Some(path) = &flags.report {
        let mut summary = facts(&model, &plan);
        summary.push(("cluster".to_owned(), cluster.name.clone()));
        summary.extend(prediction(&record, &plan, &outcome).into_iter().map(
            |Line { name, value, note }| (name, format!("{value} {note}").trim_end().to_owned()),
        ));
        let estimates = estimate_facts(&estimate, outcome.error_band);
        summary.extend(estimates.into_iter().map(|(name, text)| (name.to_owned(), text)));
        let page = render(&ReportInput {
            title: format!("{} on {}, simulated", model.name(), cluster.name),
            summary,
            memory: memory(&plan),
            simulated: outcome.trace.as_ref(),
            insight: Insight::new(&outcome, &cluster),
            warnings: warnings.clone(),
            ..ReportInput::default()
        });
        save(path, &page, &output)?;
    }
    if output.is_json() {
        let subject = Subject::new(&model, &plan.strategy, Some(&cluster));
        let at_most = largest_peak(&model, &plan);
        output.print_json(&Record::new(subject, (&outcome, at_most), &estimate, flags.details))?;
        std::mem::forget((plan, outcome));
        return Ok(());
    }
    if !flags.details {
        outcome.details = None;
    }
    let predicted = (&outcome, &estimate);
    output.print(&simulation_text(&model, &plan, &cluster, predicted, &warnings))?;
    // The process ends here and frees its memory at once.
    std::mem::forget((plan, outcome));
    Ok(())
}

/// Returns the prediction as one JSON object, with details only on request: they cost several
/// simulations, and these add up in a study.
pub(super) fn result(flags: &Flags, origins: Origins) -> Result<Value, Failure> {
    let wanted =
        flags.sweep.mentions(&["limits.", "critical_path.", "bandwidth.", "layers.", "exchanges."]);
    let Prediction { model, plan, cluster, outcome, estimate } =
        predict(flags, origins, false, flags.details || wanted)?;
    let subject = Subject::new(&model, &plan.strategy, Some(&cluster));
    let asked = flags.sweep.mentions(&["peak_bytes_at_most"]);
    let at_most = if asked { largest_peak(&model, &plan) } else { None };
    let record = Record::new(subject, (&outcome, at_most), &estimate, flags.details);
    serde_json::to_value(record).map_err(|error| Failure::Run(error.into()))
}

/// The validated request and its simulation.
struct Prediction {
    model: Model,
    plan: Plan,
    cluster: Cluster,
    outcome: Outcome,
    estimate: Estimate,
}

fn predict(
    flags: &Flags,
    origins: Origins,
    trace: bool,
    details: bool,
) -> Result<Prediction, Failure> {
    let mut problems = Problems::new(origins);
    let network = word("--network", &flags.network, &mut problems).unwrap_or_default();
    let _: Option<Profile> = word("--profile", &flags.profile, &mut problems);
    let profile = profile(flags);
    let files = [
        ("--trace", &flags.trace),
        ("--picture", &flags.picture),
        ("--report", &flags.report),
        ("--roofline", &flags.roofline),
    ];
    for (flag, path) in files {
        if path.as_ref().is_some_and(|path| path.is_dir() || path.file_name().is_none()) {
            problems.add(flag, "name a file, not a directory");
        }
    }
    let memory_headroom = flags.headroom.check(&mut problems);
    let whole_run = flags.whole_run.check(&mut problems);
    let cluster = flags.cluster.required(&mut problems);
    let defaults = Defaults {
        library: cluster.as_ref().and_then(|cluster| cluster.fabric_with(&profile).library),
        ..Defaults::for_cluster(cluster.as_ref(), SummationOrder::Free)
    };
    let on = cluster.as_ref().map(|cluster| (&flags.cluster, cluster));
    let request = flags.strategy.check(defaults, on, &mut problems);
    let (Some(Request { model, plan }), Some(cluster), true) =
        (request, cluster, problems.is_empty())
    else {
        return Err(problems.into());
    };
    let options = Options { profile, network, memory_headroom, trace, details };
    let (violations, outcome) = check_and_simulate(&plan, &cluster, &options);
    refuse(&violations)?;
    let outcome = outcome.map_err(refused)?;
    let estimate = Estimate::new(&whole_run, &plan, &outcome);
    Ok(Prediction { model, plan, cluster, outcome, estimate })
}

/// Validates and simulates a plan in parallel: both take about the same time and are independent.
/// The thread that finishes first runs the remaining checks.
fn check_and_simulate(
    plan: &Plan,
    cluster: &Cluster,
    options: &Options,
) -> (Vec<Violation>, Result<Outcome, SimError>) {
    let taken = AtomicBool::new(false);
    let rest = || match taken.swap(true, Ordering::Relaxed) {
        true => Vec::new(),
        false => validate::check_across_roles(plan),
    };
    std::thread::scope(|scope| {
        let checking = scope.spawn(|| {
            let mut found = validate::check_roles(plan, None);
            found.extend(rest());
            found
        });
        let outcome = paceline_sim::simulate(plan, cluster, options);
        let mut found = rest();
        found.extend(checking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        (found, outcome)
    })
}

/// Converts a simulator error to an input error: the request is at fault.
fn refused(error: SimError) -> Failure {
    let mut problems = Problems::default();
    problems.located(error);
    Failure::Input(problems)
}

/// The requested software profile; the default one if its name is wrong, which is reported elsewhere.
fn profile(flags: &Flags) -> Profile {
    let named = word("--profile", &flags.profile, &mut Problems::default());
    let profile: Profile = named.unwrap_or_default();
    Profile { sparse_weights: profile.sparse_weights || flags.sparse_weights, ..profile }
}

/// The operators of a plan below the roof of the device.
fn roofline(plan: &Plan, cluster: &Cluster, profile: &Profile, title: Option<&str>) -> String {
    let (points, moving, movers) = operators(plan, &cluster.device, profile);
    let whole: f64 = points.iter().map(|point| point.time.0 * point.count as f64).sum();
    let dots = points.iter().map(|point| RooflinePoint {
        name: format!("{} ({} times)", point.name, point.count),
        intensity: point.flops / point.bytes,
        rate: point.flops / point.time.0,
        share: point.time.0 * point.count as f64 / (whole + moving.0),
        colour: if point.matrix { 1 } else { 2 },
    });
    let dtype = plan.strategy.dtype;
    let mut ceilings = vec![(dtype.to_string(), cluster.device.rate(dtype).0)];
    if dtype != DType::F32 {
        ceilings.push(("f32".to_owned(), cluster.device.rate(DType::F32).0));
    }
    let device = &cluster.device;
    let note = format!(
        "area: share of the compute time; {movers} operators that move data or are fused take {moving} more"
    );
    let plot = RooflinePlot {
        title: title.map_or_else(|| format!("{} on {}", plan.model, device.name), str::to_owned),
        bandwidth: device.memory_bandwidth.0,
        ceilings,
        points: dots.collect(),
        note,
    };
    plot.to_svg()
}

fn save(path: &Path, text: &str, output: &Output) -> Result<(), Failure> {
    write(path, text.as_bytes()).map_err(|error| {
        Failure::Run(anyhow::anyhow!("{} cannot be written: {error}", path.display()))
    })?;
    output.note(&format!("wrote {}", path.display()));
    Ok(())
}

fn memory(plan: &Plan) -> Vec<MemoryRow> {
    let roles = plan.programs.iter();
    roles
        .flat_map(|program| {
            MemoryKind::ARENA.map(|kind| MemoryRow {
                role: program.name.clone(),
                kind: kind.name().to_owned(),
                bytes: program.memory.of(kind),
            })
        })
        .collect()
}
