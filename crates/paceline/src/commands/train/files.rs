//! Output of a finished run: its files, and its printed summary.

use crate::commands::report;
use crate::failure::Failure;
use crate::output::{RunDir, RunRecord, StalenessRecord};
use crate::report::{ErrorSummary, breakdown_table, error_summary};
use paceline_plan::trace::{Trace, to_perfetto, to_perfetto_with};
use paceline_plan::units::{Bytes, Seconds};

/// Writes the run's files; `run.json` comes second to last, because it lists the traces.
pub(super) fn write_files(
    directory: &RunDir,
    record: &mut RunRecord,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> Result<(), Failure> {
    for (name, trace, there) in [
        ("simulated.json", simulated, &mut record.simulated),
        ("measured.json", measured, &mut record.measured),
    ] {
        *there = trace.is_some();
        match trace {
            Some(trace) => {
                directory.write(name, &trace.to_json().map_err(|e| Failure::Run(e.into()))?)?;
            }
            None => directory.remove(name),
        }
    }
    let both = match (simulated, measured) {
        (Some(simulated), Some(measured)) => Some(to_perfetto_with(simulated, measured)),
        (Some(one), None) | (None, Some(one)) => Some(to_perfetto(one)),
        (None, None) => None,
    };
    match both {
        Some(both) => directory.write("trace.json", &both)?,
        None => directory.remove("trace.json"),
    }
    let json = serde_json::to_string_pretty(&record).map_err(|e| Failure::Run(e.into()))?;
    directory.write("run.json", &json)?;
    Ok(directory.write("report.html", &report::page(record, simulated, measured))?)
}

/// Number of ops named as causes of the prediction error; the report names more.
const CAUSES: usize = 3;

/// Summary printed at the end of a run.
pub(super) fn closing(
    record: &RunRecord,
    directory: &RunDir,
    simulated: Option<&Trace>,
    measured: Option<&Trace>,
) -> String {
    let mut text = String::new();
    let losses = record.losses();
    if let [first, .., last] | [first @ last] = losses.as_slice() {
        let floor = record.floor.map_or(String::new(), |floor| format!(" (floor {floor:.4})"));
        text += &format!("loss {first:.4} → {last:.4}{floor} in {} iterations\n", losses.len());
    }
    if let Some(measured) = record.measured_iteration_s {
        let error = record.predicted_iteration_s.map_or(String::new(), |predicted| {
            let off = 100.0 * (predicted / measured - 1.0);
            let band = record.predicted_band.map_or(String::new(), |band| {
                let [low, high] = band.map(|factor| Seconds(predicted * factor));
                format!(", expected {low} to {high}")
            });
            format!(", {} predicted ({off:+.1} %{band})", Seconds(predicted))
        });
        let over = record.measured_over();
        text += &format!("One iteration: {} measured, {over}{error}\n", Seconds(measured));
        if let Some(pace) = record.tokens_per_s {
            text += &format!("{pace:.0} {}/s at that median\n", record.model.unit());
        }
    }
    if let Some(StalenessRecord { mean, max, max_lead: ahead, .. }) = record.staleness() {
        text += &format!(
            "staleness: a gradient missed {mean:.2} updates on average, {max} at most; the fastest replica was \
             {ahead} iterations ahead at most\n"
        );
    }
    if record.stopped {
        let done = record.iterations_done();
        text += &format!("stopped after {done} of {}\n", record.iterations_asked);
    }
    let most = |bytes: &[u64]| Bytes(bytes.iter().copied().max().unwrap_or(0));
    text += &format!("memory of the fullest rank: {} planned", most(&record.planned_peak_bytes));
    if let Some(peak) = &record.peak_bytes {
        text += &format!(", {} measured", most(peak));
    }
    text += "\n\n";
    text += &breakdown_table(simulated, measured);
    if let Some(ErrorSummary { summary, lines }) = error_summary(simulated, measured) {
        text += &summary[1..].iter().map(|line| format!("{line}\n")).collect::<String>();
        text += &lines.iter().take(CAUSES).map(|line| format!("  {line}\n")).collect::<String>();
    }
    let path = |name: &str| directory.file(name).display().to_string();
    text += &format!("\nreport    {}\n", path("report.html"));
    text += &format!("trace     {} (opens in Perfetto)\n", path("trace.json"));
    if let Some(checkpoint) = &record.checkpoint {
        text += &format!("checkpoint {}\n", path(checkpoint));
    }
    if let Some(exported) = &record.exported {
        text += &format!("exported  {exported} (for transformers)\n");
    }
    text
}
