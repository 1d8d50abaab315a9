//! `paceline report`: redraws a run's page.

use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Power, PowerFlags, Problems};
use crate::output::{RunDir, RunRecord};
use crate::overview::prefixed;
use crate::report::{
    ErrorSummary, IterationTime, LossCurve, MemoryRow, ReportInput, StalenessBars, error_summary,
    render,
};
use clap::Args;
use paceline_plan::trace::{ErrorAttribution, Trace, attribute_error};
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Redraw a run and its prediction as one HTML page
///
/// Reads run.json and the traces of a directory that `paceline train` or the demo wrote. Writes
/// report.html next to them, and reports the prediction error. The page needs no network and no
/// server.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  paceline train --model mini --out runs/first --iterations 20\n  \
                        paceline report runs/first --open"
)]
pub(crate) struct Flags {
    /// Run directory
    #[arg(value_name = "RUN_DIR")]
    run_dir: PathBuf,
    /// Open the page in a browser
    #[arg(long)]
    open: bool,
    #[command(flatten)]
    power: PowerFlags,
    #[command(flatten)]
    common: CommonFlags,
}

#[derive(Serialize)]
struct Record {
    model: String,
    cluster: String,
    report: String,
    /// Error of the iteration time, split by cause, largest difference first.
    #[serde(skip_serializing_if = "Option::is_none")]
    error_attribution: Option<ErrorAttribution>,
    #[serde(flatten)]
    energy: Option<EnergyRecord>,
}

/// Energy of a run, from the power that the cluster's description states and the measured time.
#[derive(Clone, Copy, Serialize)]
struct EnergyRecord {
    /// Joules of an iteration, of the devices alone.
    energy_j: f64,
    mean_power_w: f64,
    /// Kilowatt-hours of all iterations done, in the facility.
    energy_kwh: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    co2_g: Option<f64>,
}

impl EnergyRecord {
    /// Energy of a run; `None` if its time was not measured or its cluster states no power.
    fn of(record: &RunRecord, power: &Power) -> Option<Self> {
        let (watts, seconds) = (record.predicted_power_w?, record.measured_iteration_s?);
        let kwh = power.kwh(watts * seconds * f64::from(record.iterations_done()));
        Some(Self {
            energy_j: watts * seconds,
            mean_power_w: watts,
            energy_kwh: kwh,
            co2_g: power.co2_g(kwh),
        })
    }

    fn text(&self) -> String {
        let [joules, watts] = [(self.energy_j, "J"), (self.mean_power_w, "W")]
            .map(|(value, unit)| prefixed(value, unit));
        let run = prefixed(self.energy_kwh * 1000.0, "Wh");
        let co2 = self.co2_g.map(|grams| format!(", {} of CO2", prefixed(grams, "g")));
        format!(
            "{joules} of an iteration, {watts} of all devices by their description; the run {run}{}",
            co2.unwrap_or_default()
        )
    }
}

/// Reads the run, and writes and prints its report.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let power = flags.power.check(&mut problems);
    let directory = RunDir::existing(&flags.run_dir);
    let mut traces = (None, None);
    let record = if flags.run_dir.is_dir() {
        let record = directory.record(&mut problems);
        if let Some(record) = &record {
            let mut read = |promised: bool, name: &str| {
                if promised { directory.trace(name, &mut problems) } else { None }
            };
            traces =
                (read(record.simulated, "simulated.json"), read(record.measured, "measured.json"));
        }
        record
    } else {
        problems.located(format!("{} is not a directory", flags.run_dir.display()));
        None
    };
    let Some(record) = record.filter(|_| problems.is_empty()) else {
        return Err(problems.into());
    };
    let energy = EnergyRecord::of(&record, &power);
    let page_of = |energy| page_with(&record, energy, traces.0.as_ref(), traces.1.as_ref());
    directory.write("report.html", &page_of(energy))?;
    let page = directory.file("report.html");
    let output = flags.common.output();
    let (simulated, measured) = (traces.0.as_ref(), traces.1.as_ref());
    let mut text = format!("{}\n", page.display());
    if let Some(ErrorSummary { summary, lines }) = error_summary(simulated, measured) {
        text += &summary.iter().map(|line| format!("{line}\n")).collect::<String>();
        text += &lines.iter().map(|line| format!("  {line}\n")).collect::<String>();
    }
    text += &energy.map_or(String::new(), |energy| format!("energy: {}\n", energy.text()));
    output.print(&text)?;
    let misses = simulated.zip(measured).and_then(|(s, m)| attribute_error(s, m));
    output.print_json(&Record {
        model: record.model.name.clone(),
        cluster: record.cluster.clone(),
        report: page.display().to_string(),
        error_attribution: misses,
        energy,
    })?;
    if flags.open {
        open(&page)?;
    }
    Ok(())
}

/// Renders the page of a run.
pub(super) fn page(
    record: &RunRecord,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> String {
    page_with(record, EnergyRecord::of(record, &Power::default()), simulated, measured)
}

fn page_with(
    record: &RunRecord,
    energy: Option<EnergyRecord>,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> String {
    let mut summary = record.facts.clone();
    let mut fact = |name: &str, text: String| summary.push((name.to_owned(), text));
    let losses = record.losses();
    if let [first, .., last] | [first @ last] = losses.as_slice() {
        fact("loss", format!("{first:.4} → {last:.4} in {} iterations", losses.len()));
    }
    for restart in &record.restarts {
        fact("restarted", format!("after iteration {}: {}", restart.after, restart.cause));
    }
    if let Some(pace) = record.tokens_per_s {
        fact("pace", format!("{pace:.0} {}/s at the median iteration", record.model.unit()));
    }
    if let Some(predicted) = record.predicted_iteration_s {
        fact("predicted", format!("{} an iteration on {}", Seconds(predicted), record.cluster));
    }
    if let Some(measured) = record.measured_iteration_s {
        fact("measured", format!("{} an iteration, {}", Seconds(measured), record.measured_over()));
    }
    if let Some(energy) = energy {
        fact("energy", energy.text());
    }
    let most = |bytes: &[u64]| Bytes(bytes.iter().copied().max().unwrap_or(0));
    let planned = most(&record.planned_peak_bytes);
    fact(
        "memory",
        match record.peak_bytes.as_deref().map(most) {
            Some(peak) => format!("{planned} planned, {peak} measured on the fullest rank"),
            None => format!("{planned} planned on the fullest rank"),
        },
    );
    fact(
        "training",
        format!(
            "lr {} after {} iterations, weight decay {}, clip {}, seed {}",
            record.lr,
            record.warmup,
            record.weight_decay,
            record.clip.map_or("none".to_owned(), |norm| norm.to_string()),
            record.seed
        ),
    );
    let mut warnings = record.warnings.clone();
    if record.stopped {
        warnings.push(format!(
            "The run was stopped after {} of {} iterations.",
            record.iterations_done(),
            record.iterations_asked
        ));
    }
    warnings.extend(record.failed.iter().map(|why| format!("The run failed: {why}")));
    let row = |row: &crate::output::MemoryRecord| MemoryRow {
        role: row.role.clone(),
        kind: row.kind.clone(),
        bytes: Bytes(row.bytes),
    };
    render(&ReportInput {
        title: format!("{} on {} ranks", record.model.name, record.planned_peak_bytes.len()),
        summary,
        memory: record.memory.iter().map(row).collect(),
        loss: (!losses.is_empty()).then_some(LossCurve {
            before: record.iterations_before,
            losses,
            floor: record.floor,
        }),
        staleness: record.staleness().map(|found| StalenessBars {
            mean: found.mean,
            max: found.max,
            ahead: found.max_lead,
            counts: found.histogram.to_vec(),
        }),
        simulated,
        measured,
        iteration: record.measured_iteration_s.map(|measured| IterationTime {
            predicted: record.predicted_iteration_s.map(Seconds),
            measured: Seconds(measured),
            over: record.measured_over(),
        }),
        warnings,
        ..ReportInput::default()
    })
}

/// Opens a file with the system's default application.
fn open(page: &Path) -> Result<(), Failure> {
    let (program, first): (&str, &[&str]) = if cfg!(target_os = "macos") {
        ("open", &[])
    } else if cfg!(windows) {
        ("cmd", &["/C", "start", ""])
    } else {
        ("xdg-open", &[])
    };
    let shown = Command::new(program)
        .args(first)
        .arg(page)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match shown {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::Run(anyhow::anyhow!(
            "{program} could not show {} ({status})",
            page.display()
        ))),
        Err(error) => Err(Failure::Run(anyhow::anyhow!(
            "{program} cannot be started to show the page: {error}"
        ))),
    }
}
