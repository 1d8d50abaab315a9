//! `paceline simulate`: predict a plan's time and memory on a described cluster.

use super::plan::check_plan;
use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, Origins, Problems, Request, StrategyFlags,
};
use crate::output::{ModelRecord, Output, write};
use crate::overview::{facts, simulation_text, warnings};
use crate::report::{MemoryRow, ReportInput, render};
use clap::Args;
use paceline_plan::collective::Order;
use paceline_plan::program::{MemoryKind, Plan};
use paceline_plan::summary::summarize;
use paceline_plan::trace::to_perfetto;
use paceline_sim::{Outcome, Profile, SimError};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Predict a plan's time and memory on a described cluster
///
/// The plan that `paceline train` would run is timed op by op: products by the device's rates,
/// messages and collectives by the links they cross. Times are those of the slowest rank; exposed
/// communication is what no computation hides.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    #[command(flatten)]
    strategy: StrategyFlags,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// How links are modelled; only analytic is available yet
    #[arg(long, value_name = "MODEL", hide = true)]
    network: Option<String>,
    /// What the software fuses: modern (fused attention, no dropout) or megatron-2021
    /// [default: modern]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    profile: Option<String>,
    /// Write the simulated timeline for Perfetto or Chrome
    #[arg(long, value_name = "FILE", help_heading = "General")]
    trace: Option<PathBuf>,
    /// Write the prediction as one HTML page
    #[arg(long, value_name = "FILE.html", help_heading = "General")]
    report: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline simulate --model llama3-8b --tp 8 --dp 2 --global-batch 32 --cluster dgx-a100:2
  paceline simulate --model gpt3-175b --tp 8 --pp 8 --dp 16 --global-batch 1536 \\
                    --recompute full --cluster dgx-a100:128 --report gpt3.html";

/// Simulates.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    if let Some(other) = flags.network.as_deref().filter(|name| *name != "analytic") {
        problems.say("--network", format!("'{other}' is not available yet; only analytic is"));
    }
    let profile = match flags.profile.as_deref().map(str::parse::<Profile>) {
        None => Profile::default(),
        Some(Ok(profile)) => profile,
        Some(Err(error)) => {
            problems.say("--profile", error);
            Profile::default()
        }
    };
    for (flag, path) in [("--trace", &flags.trace), ("--report", &flags.report)] {
        if path.as_ref().is_some_and(|path| path.is_dir() || path.file_name().is_none()) {
            problems.say(flag, "name a file, not a directory");
        }
    }
    let cluster = flags.cluster.required(&mut problems);
    let defaults = Defaults::for_cluster(cluster.as_ref(), Order::Free);
    let on = cluster.as_ref().map(|cluster| (&flags.cluster, cluster));
    let request = flags.strategy.check(defaults, on, &mut problems);
    let (Some(Request { model, plan }), Some(cluster), true) =
        (request, cluster, problems.is_empty())
    else {
        return Err(problems.into());
    };
    check_plan(&plan)?;
    let trace = flags.trace.is_some() || flags.report.is_some();
    let options = paceline_sim::Options { profile, trace };
    let outcome = paceline_sim::simulate(&plan, &cluster, &options).map_err(refused)?;
    let warnings = warnings(&plan, &summarize(&plan), Some(&cluster));
    let output = flags.common.output();

    if let (Some(path), Some(trace)) = (&flags.trace, &outcome.trace) {
        save(path, &to_perfetto(trace), &output)?;
    }
    let record = ModelRecord::from(&model);
    if let Some(path) = &flags.report {
        let mut summary = facts(&record, &plan);
        summary.push(("cluster".to_owned(), cluster.name.clone()));
        let page = render(&ReportInput {
            title: format!("{} on {}, simulated", model.name(), cluster.name),
            summary,
            memory: memory(&plan),
            simulated: outcome.trace.as_ref(),
            warnings: warnings.clone(),
            ..ReportInput::default()
        });
        save(path, &page, &output)?;
    }
    if output.is_json() {
        return Ok(output.object(&Record::from(&outcome))?);
    }
    Ok(output.people(&simulation_text(&record, &plan, &cluster, &outcome, &warnings))?)
}

/// What the simulator refuses is wrong with the request.
fn refused(error: SimError) -> Failure {
    let mut problems = Problems::default();
    problems.located(error);
    Failure::Input(problems)
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
            MemoryKind::ALL.map(|kind| MemoryRow {
                role: program.name.clone(),
                kind: kind.name().to_owned(),
                bytes: program.memory.of(kind),
            })
        })
        .collect()
}

#[derive(Serialize)]
struct Record {
    iteration_s: f64,
    compute_s: f64,
    communication_s: f64,
    exposed_communication_s: f64,
    bubble_fraction: f64,
    peak_bytes: u64,
    fits: bool,
    mfu: f64,
    tokens_per_s_per_device: f64,
    ops: Vec<OpRecord>,
}

#[derive(Serialize)]
struct OpRecord {
    name: String,
    count: u64,
    time_s: f64,
    exposed_s: f64,
}

impl From<&Outcome> for Record {
    fn from(outcome: &Outcome) -> Self {
        let op = |op: &paceline_sim::OpStat| OpRecord {
            name: op.name.clone(),
            count: op.count,
            time_s: op.time.0,
            exposed_s: op.exposed.0,
        };
        Self {
            iteration_s: outcome.iteration.0,
            compute_s: outcome.compute.0,
            communication_s: outcome.communication.0,
            exposed_communication_s: outcome.exposed_communication.0,
            bubble_fraction: outcome.bubble_fraction,
            peak_bytes: outcome.peak_bytes.0,
            fits: outcome.fits,
            mfu: outcome.mfu,
            tokens_per_s_per_device: outcome.tokens_per_s_per_device,
            ops: outcome.ops.iter().map(op).collect(),
        }
    }
}
