//! `paceline validate`: compares the simulator with a table of measured runs.

mod record;

use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, read_text, word};
use crate::output::Output;
use crate::overview::{cut, table};
use clap::Args;
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::table::{TableError, astra, collectives, training};
use record::{Record, Total};
use std::path::PathBuf;
use std::str::FromStr;

/// Simulate every row of a table of measured runs
///
/// The table is a CSV file with a header line. Its columns determine the kind of table: measured
/// training runs, collectives as nccl-tests measures them, or collectives as ASTRA-sim simulates
/// them. Each row is printed with its prediction, its measurement and the error; a row that cannot
/// be represented is reported with the reason. At the end come the total errors, and by
/// leave-one-out the band around a prediction that contains four of five measurements, where at
/// least five were compared.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  paceline validate --table training.csv\n  paceline validate \
                        --table training.csv --json")]
pub(crate) struct Flags {
    /// Table of measured training runs (columns id, platform, gpus, layers, …,
    /// measured_iteration_s), of measured collectives (gpu, gpus, op, size_bytes,
    /// time_us_out_of_place, …) or of ASTRA-sim (id, backend, collective, …, sim_time_ns_max)
    #[arg(long, value_name = "FILE.csv", help_heading = "Table")]
    table: Option<PathBuf>,
    /// Semantics of the prediction: default (Paceline's own models) or astra-sim (ASTRA-sim's
    /// semantics, for its own tables only, and their default)
    #[arg(long, value_name = "default|astra-sim", help_heading = "Table")]
    semantics: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

/// Semantics of a row's prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Semantics {
    /// Paceline's own models.
    Default,
    /// ASTRA-sim's semantics, shortcuts included.
    AstraSim,
}

impl FromStr for Semantics {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "default" => Ok(Self::Default),
            "astra-sim" => Ok(Self::AstraSim),
            other => Err(format!("'{other}' is neither default nor astra-sim")),
        }
    }
}

/// The rows of a table.
enum Rows {
    Training(Vec<training::Row>),
    Collectives(Vec<collectives::Row>),
    Astra(Vec<astra::AstraRow>),
}

/// Simulates every row and prints the comparison.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let semantics = word("--semantics", &flags.semantics, &mut problems);
    let Some(path) = &flags.table else {
        problems.add("--table", "missing; for example --table training.csv");
        return Err(problems.into());
    };
    let file = path.display().to_string();
    let rows = match read_text(path) {
        Err(what) => {
            problems.add("--table", format!("{file} {what}"));
            return Err(problems.into());
        }
        Ok(text) => rows(&text, &file).map_err(|error| problems.located(error)).ok(),
    };
    if let (Some(Rows::Training(_) | Rows::Collectives(_)), Some(Semantics::AstraSim)) =
        (&rows, semantics)
    {
        problems.add("--semantics", format!("astra-sim: {file} is not a table of ASTRA-sim's"));
    }
    let (Some(rows), true) = (rows, problems.is_empty()) else { return Err(problems.into()) };

    let output = flags.common.output();
    let mut records: Vec<Record> = Vec::new();
    let mut answer = |record: Record| {
        let written = output.print_json(&record);
        records.push(record);
        written
    };
    match &rows {
        Rows::Training(rows) => rows.iter().map(Record::of_training).try_for_each(&mut answer)?,
        Rows::Collectives(rows) => {
            rows.iter().map(Record::of_collective).try_for_each(&mut answer)?;
        }
        Rows::Astra(rows) => {
            let of_row = match semantics {
                None | Some(Semantics::AstraSim) => Record::of_astra,
                Some(Semantics::Default) => Record::of_astra_by_own,
            };
            rows.iter().map(of_row).try_for_each(&mut answer)?;
        }
    }
    let total = Total::of(&records);
    output.print_json(&total)?;
    if output.is_json() { Ok(()) } else { print_table(&output, &records, &total) }
}

/// Parses a table by the kind that its header indicates; the default is training runs, so that an
/// error names the columns such a table needs.
fn rows(text: &str, file: &str) -> Result<Rows, TableError> {
    let header = text.lines().next().unwrap_or("");
    let has = |column: &str| header.split(',').any(|name| name.trim() == column);
    if has("time_us_out_of_place") {
        collectives::rows(text, file).map(Rows::Collectives)
    } else if has("sim_time_ns_max") {
        astra::rows(text, file).map(Rows::Astra)
    } else {
        training::rows(text, file).map(Rows::Training)
    }
}

fn print_table(output: &Output, records: &[Record], total: &Total) -> Result<(), Failure> {
    let dash = || "–".to_owned();
    let time = |value: Option<f64>| value.map_or_else(dash, |s| Seconds(s).to_string());
    let bytes = |value: Option<u64>| value.map_or_else(dash, |b| Bytes(b).to_string());
    let share = |value: Option<f64>| value.map_or_else(dash, |e| format!("{:+.1} %", e * 100.0));
    // Collectives have no memory columns.
    let memory = records.iter().any(|record| record.predicted_bytes.is_some());
    let head = ["run", "measured", "predicted", "error", "measured", "predicted"];
    let head = if memory { &head[..] } else { &head[..4] };
    let compared = records.iter().filter(|record| record.skipped.is_none()).map(|record| {
        let mut row = vec![
            cut(&record.id, 44),
            time(record.measured_s),
            time(record.predicted_s),
            share(record.error),
        ];
        if memory {
            row.extend([bytes(record.measured_bytes), bytes(record.predicted_bytes)]);
        }
        row
    });
    let mut text = table(head, 1, compared);
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
    if let Some([low, high]) = total.band {
        text += &format!("four of five take {low:.3} to {high:.3} times their prediction");
        let of_profile =
            |(name, [low, high]): (&&str, &[f64; 2])| format!("{name} {low:.3} to {high:.3}");
        let profiles: Vec<String> = total.bands.iter().map(of_profile).collect();
        text += &match profiles.as_slice() {
            [] => "\n".to_owned(),
            some => format!(" (by profile: {})\n", some.join(", ")),
        };
    }
    Ok(output.print(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_told_apart_by_their_header() {
        let kind = |text: &str| rows(text, "t.csv").map_err(|error| error.to_string());
        let nccl = "source,gpu,gpus,op,size_bytes,time_us_out_of_place\nx,A100,2,all_reduce,1,2\n";
        assert!(matches!(kind(nccl), Ok(Rows::Collectives(rows)) if rows.len() == 1));
        let Err(told) = kind("id,sim_time_ns_max\n") else { panic!("columns are missing") };
        assert!(told.starts_with("t.csv:1: there is no column backend, collective"), "{told}");
        let Err(told) = kind("a,b\n") else { panic!("columns are missing") };
        assert!(told.starts_with("t.csv:1: there is no column id, platform"), "{told}");
    }

    #[test]
    fn semantics_have_two_names() {
        assert_eq!("astra-sim".parse(), Ok(Semantics::AstraSim));
        assert_eq!("default".parse(), Ok(Semantics::Default));
        let told = "astra".parse::<Semantics>().unwrap_err();
        assert_eq!(told, "'astra' is neither default nor astra-sim");
    }
}
