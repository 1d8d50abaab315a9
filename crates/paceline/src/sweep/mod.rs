//! Studies: one command for many values of its flags, as a table, as JSON and as a chart.
//!
//! ```text
//! axis        the varied names, and their values
//! expression  arithmetic over the fields of a result
//! field       the shown values of a result
//! flags       the flags, and the study that they request
//! table       the table for the terminal
//! ```
//!
//! Every point is computed by the command itself, as if its flags had been typed. This module does
//! not depend on the meaning of a result.

mod axis;
mod expression;
mod field;
mod flags;
mod table;

pub(crate) use flags::SweepFlags;

use crate::failure::Failure;
use crate::flags::{Origins, Problems};
use crate::output::{Output, Second, StopRequest, write};
use crate::plot::{Along, Chart, Series};
use axis::Setting;
use clap::Command;
use flags::Study;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Map, Value};

/// One changed flag, or one changed field of the cluster.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Change {
    /// The flag's long name without dashes, or a path into the cluster.
    pub name: String,
    /// The new value.
    pub value: String,
}

/// Interface of a command to a study.
pub(crate) struct Subject<'a> {
    /// Its definition, with the flags that can vary.
    pub command: &'a Command,
    /// The default fields, most important first.
    pub usual: &'a [&'a str],
    /// Returns the result with some changes, as `--json` prints it.
    pub result: &'a dyn Fn(&[Change]) -> Result<Value, Failure>,
}

/// A combination of values, and its result.
struct Point {
    /// One setting per axis.
    settings: Vec<Setting>,
    /// The result, or the reason that there is none.
    result: Result<Value, Problems>,
}

/// Runs a study and prints it.
pub(crate) fn run(
    flags: &SweepFlags,
    subject: &Subject<'_>,
    origins: Origins,
    output: &Output,
) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let Some(study) = flags.check(subject.command, subject.usual, &mut problems) else {
        return Err(problems.into());
    };
    let combinations = combinations(&study);
    let total = combinations.len();
    // The first Ctrl-C finishes the current point; the second exits at once. Without a handler
    // Ctrl-C ends the process at once, and only the table is lost.
    let stop = StopRequest::listen(Second::Exits).unwrap_or_default();
    let points = compute(&study, combinations, subject, &stop)?;
    refuse(&study, &points, total)?;
    for point in &points {
        output.print_json(&object(&study, point))?;
    }
    if !output.is_json() {
        output.print(&table::text(&study, &points))?;
    }
    for point in &points {
        if let Err(why) = &point.result {
            output.note(&format!("no {}: {}", name(&study, &point.settings), why.brief()));
        }
    }
    if points.len() < total {
        let undrawn = if flags.plot.is_some() { "; no picture was drawn" } else { "" };
        output.note(&format!("stopped after {} of {total} points{undrawn}", points.len()));
        return stop.status();
    }
    if let Some(path) = &flags.plot {
        let chart = chart(flags, &study, &points);
        write(path, chart.to_svg().as_bytes()).map_err(|error| {
            Failure::Run(anyhow::anyhow!("{} cannot be written: {error}", path.display()))
        })?;
        output.note(&format!("wrote {}", path.display()));
    }
    Ok(())
}

/// Every combination of the axes' values; the first axis varies slowest.
fn combinations(study: &Study) -> Vec<Vec<Setting>> {
    study.axes.iter().fold(vec![Vec::new()], |so_far, axis| {
        let extended = so_far.iter().flat_map(|begun| {
            axis.settings.iter().map(|next| begun.iter().chain([next]).cloned().collect())
        });
        extended.collect()
    })
}

/// Computes the points in order, until done or interrupted.
fn compute(
    study: &Study,
    combinations: Vec<Vec<Setting>>,
    subject: &Subject<'_>,
    stop: &StopRequest,
) -> Result<Vec<Point>, Failure> {
    let bar = ProgressBar::new(combinations.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} points, {eta} left") {
        bar.set_style(style);
    }
    let mut points = Vec::new();
    for settings in combinations {
        if stop.is_made() {
            break;
        }
        let result = match (subject.result)(&changes(study, &settings)) {
            Ok(result) => Ok(shown(study, result)?),
            Err(Failure::Input(problems)) => Err(problems),
            Err(other) => return Err(other),
        };
        points.push(Point { settings, result });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(points)
}

fn changes(study: &Study, settings: &[Setting]) -> Vec<Change> {
    let pairs =
        study.axes.iter().zip(settings).flat_map(|(axis, setting)| {
            axis.names.iter().cloned().zip(setting.values.iter().cloned())
        });
    pairs.map(|(name, value)| Change { name, value }).collect()
}

/// Checks that a result has all values to be shown.
///
/// An op that only another layout has leaves a gap; a field that no result can have is an error.
fn shown(study: &Study, result: Value) -> Result<Value, Failure> {
    for field in study.fields.iter().filter(|_| study.chosen) {
        if let Err(path) = field.value(&result)
            && !["ops.", "critical_path.", "bandwidth."].iter().any(|list| path.starts_with(list))
        {
            return Err(Failure::flag("--y", field::missing(&result, path)));
        }
    }
    Ok(result)
}

/// Refuses a study in which a value works with no other value, or a field exists at no point.
fn refuse(study: &Study, points: &[Point], total: usize) -> Result<(), Failure> {
    let mut problems = Problems::default();
    let works = |point: &&Point| point.result.is_ok();
    let failed = |point: &Point| point.result.as_ref().err().map(Problems::brief);
    // A problem that is the same at every point does not depend on the varied values.
    if let Some(Point { result: Err(first), .. }) = points.first()
        && points.iter().all(|point| failed(point) == Some(first.brief()))
    {
        return Err(Failure::Input(first.clone()));
    }
    for (place, axis) in study.axes.iter().enumerate().filter(|_| points.len() == total) {
        for setting in &axis.settings {
            let own = || points.iter().filter(|point| point.settings[place] == *setting);
            if let (None, Some(reason)) = (own().find(works), own().find_map(failed)) {
                let value = format!("{}={}", axis.names.join("+"), setting.values.join("+"));
                problems.add("--vary", format!("{value}: {reason}"));
            }
        }
    }
    for field in study.fields.iter().filter(|_| study.chosen) {
        let results = || points.iter().filter_map(|point| point.result.as_ref().ok());
        let missing = |result| field.value(result).err().map(|path| field::missing(result, path));
        if results().all(|result| field.value(result).is_err())
            && let Some(why) = results().find_map(missing)
        {
            problems.add("--y", why);
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems.into()) }
}

/// Name of a point: `dp=4, zero=1`.
fn name(study: &Study, settings: &[Setting]) -> String {
    let parts = changes(study, settings);
    let parts: Vec<String> = parts.iter().map(|c| format!("{}={}", c.name, c.value)).collect();
    parts.join(", ")
}

/// A point as JSON: the varied values, then all fields of the result.
fn object(study: &Study, point: &Point) -> Value {
    let varied = changes(study, &point.settings).into_iter().map(|Change { name, value }| {
        let number = serde_json::from_str(&value).ok().filter(Value::is_number);
        (name.replace('-', "_"), number.unwrap_or(Value::String(value)))
    });
    let mut fields = Map::new();
    fields.insert("vary".to_owned(), Value::Object(varied.collect()));
    match &point.result {
        Ok(Value::Object(result)) => fields.extend(result.clone()),
        Ok(other) => drop(fields.insert("result".to_owned(), other.clone())),
        Err(why) => drop(fields.insert("skipped".to_owned(), Value::String(why.brief()))),
    }
    Value::Object(fields)
}

fn chart(flags: &SweepFlags, study: &Study, points: &[Point]) -> Chart {
    let bottom = &study.axes[0];
    let fields = study.drawn();
    let several = fields.len() > 1;
    let names: Vec<Option<&Setting>> = match study.axes.get(1) {
        Some(axis) => axis.settings.iter().map(Some).collect(),
        None => vec![None],
    };
    let mut series = Vec::new();
    for (line, across) in names.iter().enumerate() {
        for (index, field) in fields.iter().enumerate() {
            let values = bottom.settings.iter().map(|setting| {
                let here = |point: &&Point| {
                    point.settings[0] == *setting && point.settings.get(1) == *across
                };
                let result = points.iter().find(here)?.result.as_ref().ok()?;
                field.value(result).ok().filter(|value| value.is_finite())
            });
            let (name, colour, dash) = match across {
                Some(setting) => (series_name(study, setting), line, index),
                None => (String::new(), index, 0),
            };
            let name = match (name.is_empty(), several) {
                (false, false) => name,
                (false, true) => format!("{name}, {}", field.name),
                (true, true) => field.name.clone(),
                (true, false) => String::new(),
            };
            series.push(Series { name, colour, dash, values: values.collect() });
        }
    }
    let x = match bottom.numbers() {
        Some(numbers) => Along::Numbers(numbers),
        None => Along::Words(bottom.settings.iter().map(|s| s.label.clone()).collect()),
    };
    let y_label = if several { common(fields[0].unit) } else { fields[0].name.clone() };
    Chart {
        title: flags.title.clone(),
        x,
        x_label: flags.x_label.clone().unwrap_or_else(|| bottom.title().to_owned()),
        y_label,
        unit: fields[0].unit,
        series,
        log: study.log,
    }
}

/// Name of a line; a bare number is prefixed with the name of its axis.
fn series_name(study: &Study, setting: &Setting) -> String {
    let plain = setting.label == setting.values[0] && setting.label.parse::<f64>().is_ok();
    let switch = ["true", "false"].contains(&setting.label.as_str());
    match study.axes.get(1) {
        Some(axis) if plain || switch => format!("{} {}", axis.title(), setting.label),
        _ => setting.label.clone(),
    }
}

/// Label of the y axis if several fields share it.
fn common(unit: crate::plot::Unit) -> String {
    use crate::plot::Unit;
    match unit {
        Unit::Time => "time",
        Unit::Size => "memory",
        Unit::Rate => "rate",
        Unit::Work => "arithmetic",
        Unit::Share => "share",
        Unit::Plain | Unit::Times => "value",
    }
    .to_owned()
}
