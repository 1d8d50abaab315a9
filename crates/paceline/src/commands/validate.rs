//! `paceline validate`: the simulator beside a table of measured runs.

use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, read_text};
use crate::output::Output;
use crate::overview::{cut, table};
use clap::Args;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::table::training::{self, Row};
use serde::Serialize;
use std::path::PathBuf;

/// Simulate every row of a table of measured runs
///
/// The table is a CSV file whose header names its columns; what kind of table it is follows from
/// them. For each row the prediction stands beside the measurement, with its error; a row that
/// cannot be represented is reported with the reason. At the end, the errors in sum.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  paceline validate --table training.csv\n  paceline validate \
                        --table training.csv --json")]
pub(crate) struct Flags {
    /// Measured training runs: columns id, platform, gpus, layers, d_model, heads, seq, vocab, tp,
    /// pp, dp, global_batch, measured_iteration_s and so on
    #[arg(long, value_name = "FILE.csv", help_heading = "Table")]
    table: Option<PathBuf>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Columns by which tables of other kinds are known.
const LATER: [(&str, &str); 2] = [
    ("busbw_GBps_out_of_place", "measured collectives"),
    ("sim_time_ns_max", "collectives as ASTRA-sim simulates them"),
];

/// Simulates every row.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let Some(path) = &flags.table else {
        problems.say("--table", "say which, for example --table training.csv");
        return Err(problems.into());
    };
    let file = path.display().to_string();
    let rows = match read_text(path) {
        Err(what) => {
            problems.say("--table", format!("{file} {what}"));
            return Err(problems.into());
        }
        Ok(text) => rows(&text, &file, &mut problems),
    };
    let Some(rows) = rows else { return Err(problems.into()) };

    let output = flags.common.output();
    let mut records = Vec::new();
    for row in &rows {
        let record = Record::of(row);
        output.object(&record)?;
        records.push(record);
    }
    let total = Total::of(&records);
    output.object(&total)?;
    if output.is_json() { Ok(()) } else { people(&output, &records, &total) }
}

fn rows(text: &str, file: &str, problems: &mut Problems) -> Option<Vec<Row>> {
    let header = text.lines().next().unwrap_or("");
    let has = |column: &str| header.split(',').any(|name| name.trim() == column);
    if let Some((_, kind)) = LATER.iter().find(|(column, _)| has(column)) {
        problems.located(format!(
            "{file}:1: a table of {kind} is not available yet; tables of training runs are"
        ));
        return None;
    }
    training::rows(text, file).map_err(|error| problems.located(error)).ok()
}

#[derive(Serialize)]
struct Record {
    id: String,
    measured_s: Option<f64>,
    predicted_s: Option<f64>,
    error: Option<f64>,
    measured_bytes: Option<u64>,
    predicted_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
}

impl Record {
    fn of(row: &Row) -> Self {
        let (measured_s, prediction) = (row.measured_s(), row.simulate());
        let (predicted, skipped) = match prediction {
            Ok(prediction) => (Some(prediction), None),
            Err(why) => (None, Some(why.to_string())),
        };
        let predicted_s = predicted.map(|prediction| prediction.predicted_s);
        let error = predicted_s.zip(measured_s).map(|(p, m)| (p - m) / m);
        Self {
            id: row.id().to_owned(),
            measured_s,
            predicted_s,
            error: error.filter(|error| error.is_finite()),
            measured_bytes: row.measured_bytes().map(|bytes| bytes.0),
            predicted_bytes: predicted.map(|prediction| prediction.predicted_bytes.0),
            skipped,
        }
    }
}

#[derive(Serialize)]
struct Total {
    rows: usize,
    compared: usize,
    skipped: usize,
    median_abs_error: Option<f64>,
    p90_abs_error: Option<f64>,
}

impl Total {
    fn of(records: &[Record]) -> Self {
        let mut errors: Vec<f64> =
            records.iter().filter_map(|record| record.error.map(f64::abs)).collect();
        errors.sort_by(f64::total_cmp);
        Self {
            rows: records.len(),
            compared: errors.len(),
            skipped: records.iter().filter(|record| record.skipped.is_some()).count(),
            median_abs_error: quantile(&errors, 0.5),
            p90_abs_error: quantile(&errors, 0.9),
        }
    }
}

/// The value below which a share of the sorted values lies, interpolated between neighbours.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = share * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

fn people(output: &Output, records: &[Record], total: &Total) -> Result<(), Failure> {
    let dash = || "–".to_owned();
    let time = |value: Option<f64>| value.map_or_else(dash, |s| Seconds(s).to_string());
    let bytes = |value: Option<u64>| value.map_or_else(dash, |b| Bytes(b).to_string());
    let share = |value: Option<f64>| value.map_or_else(dash, |e| format!("{:+.1} %", e * 100.0));
    let head = ["run", "measured", "predicted", "error", "measured", "predicted"];
    let compared = records.iter().filter(|record| record.skipped.is_none()).map(|record| {
        vec![
            cut(&record.id, 44),
            time(record.measured_s),
            time(record.predicted_s),
            share(record.error),
            bytes(record.measured_bytes),
            bytes(record.predicted_bytes),
        ]
    });
    let mut text = table(&head, 1, compared);
    for record in records {
        if let Some(why) = &record.skipped {
            text += &format!("skipped {}: {why}\n", record.id);
        }
    }
    let absolute =
        |value: Option<f64>| value.map_or_else(dash, |error| format!("{:.1} %", error * 100.0));
    text += &format!(
        "\n{} rows, {} compared, {} skipped; error of the time: median {}, 90th percentile {}\n",
        total.rows,
        total.compared,
        total.skipped,
        absolute(total.median_abs_error),
        absolute(total.p90_abs_error)
    );
    Ok(output.people(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[3.0], 0.9), Some(3.0));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0], 0.5), Some(2.5));
        assert_eq!(quantile(&[0.0, 10.0], 0.9), Some(9.0));
    }

    #[test]
    fn other_tables_are_told_apart_by_their_header() {
        let mut problems = Problems::default();
        let nccl = "source,gpu,gpus,op,busbw_GBps_out_of_place\n";
        assert!(rows(nccl, "n.csv", &mut problems).is_none());
        assert!(problems.to_string().contains("n.csv:1: a table of measured collectives is not"));
    }
}
