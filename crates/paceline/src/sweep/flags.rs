//! Flags of a study: the varied names and the shown fields.

use super::axis::Axis;
use super::field::Field;
use crate::flags::{Problems, is_cluster_path, suggest};
use crate::plot::{COLOURS, DASHES, Unit};
use clap::{ArgAction, Args, Command};
use std::path::PathBuf;

/// Flags of a study.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Study")]
pub(crate) struct SweepFlags {
    /// Run for each value of a flag or of a cluster field, and show a table
    ///
    /// `--vary dp=1,2,4` varies a flag, `--vary dimension.0.bandwidth=1x,2x,4x` a field that --set
    /// could set. A second --vary is combined with the first: one line of the chart for each of its
    /// values. Names that change together are joined: `--vary dp+global-batch=1+16,2+32`. A value
    /// may have a label: `--vary zero=none::0,all::3`. A switch takes false and true.
    #[arg(long, value_name = "NAME=V1,V2,…")]
    pub vary: Vec<String>,
    /// Values to show: JSON fields, sums and quotients of them, each with an optional name
    ///
    /// `--y iteration_s,compute_s`, `--y "bubble=bubble_fraction"`, `--y "one message=ops.send
    /// pp.time_s / ops.send pp.count"`
    #[arg(long, value_name = "[NAME=]FIELD,…")]
    pub y: Option<String>,
    /// Draw the table as a chart
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Title of the chart, or of simulate's --picture
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
    /// Label of the chart's x axis [default: the name of what varies]
    #[arg(long, value_name = "TEXT")]
    pub x_label: Option<String>,
    /// Logarithmic axes of the chart: x, y, both or none [default: as the values suggest]
    #[arg(long, value_name = "AXES")]
    pub log: Option<String>,
}

/// A validated study.
#[derive(Clone, Debug)]
pub(super) struct Study {
    /// One or two axes.
    pub axes: Vec<Axis>,
    /// The shown fields; never empty.
    pub fields: Vec<Field>,
    /// True if the user chose these fields.
    pub chosen: bool,
    /// True for a logarithmic x and y axis of the chart; `None` chooses by the values.
    pub log: [Option<bool>; 2],
}

/// Maximum number of points.
const MOST_POINTS: usize = 10_000;

/// Flags that cannot vary.
const FIXED: [&str; 15] = [
    "vary", "y", "plot", "title", "x-label", "log", "json", "config", "help", "set", "trace",
    "report", "format", "details", "strategy",
];

/// Maximum characters of a name or label in a table.
const LONGEST_NAME: usize = 1000;

impl SweepFlags {
    /// Returns true if a study is requested.
    pub(crate) fn is_asked_for(&self) -> bool {
        !self.vary.is_empty()
    }

    /// Returns true if `--y` names something below one of `fields`.
    pub(crate) fn mentions(&self, fields: &[&str]) -> bool {
        self.y.as_ref().is_some_and(|text| fields.iter().any(|field| text.contains(field)))
    }

    /// Reports study flags that are given without a study; a title may be for a picture.
    pub(crate) fn absent(&self, has_picture: bool, problems: &mut Problems) {
        for (flag, given) in [
            ("--y", self.y.is_some()),
            ("--plot", self.plot.is_some()),
            ("--title", self.title.is_some() && !has_picture),
            ("--x-label", self.x_label.is_some()),
            ("--log", self.log.is_some()),
        ] {
            if given {
                problems.add(flag, "needs --vary, for example --vary dp=1,2,4");
            }
        }
    }

    /// Checks every flag against a command whose default fields are `usual`.
    pub(super) fn check(
        &self,
        command: &Command,
        usual: &[&str],
        problems: &mut Problems,
    ) -> Option<Study> {
        let axes: Vec<Axis> = self
            .vary
            .iter()
            .filter_map(|text| {
                let axis = Axis::parse(text).map_err(|what| problems.add("--vary", what)).ok()?;
                for name in &axis.names {
                    if let Err(what) = known(command, name, &axis) {
                        problems.add("--vary", what);
                    }
                }
                Some(axis)
            })
            .collect();
        if let [first, second] = &axes[..]
            && let Some(name) = first.names.iter().find(|name| second.names.contains(name))
        {
            problems.add("--vary", format!("{name} varies twice; name it once"));
        }
        if axes.len() > 2 {
            problems.add(
                "--vary",
                "at most two; join flags that change in step, as in dp+global-batch=1+16,2+32",
            );
        }
        let points = axes.iter().map(|axis| axis.settings.len()).fold(1, usize::saturating_mul);
        if points > MOST_POINTS {
            problems.add("--vary", format!("{points} points are more than {MOST_POINTS}"));
        }
        let fields = match &self.y {
            Some(text) => Field::parse_all(text, problems),
            None => usual.iter().map(|name| Field::named(name)).collect(),
        };
        let labels = axes.iter().flat_map(|axis| &axis.settings).map(|setting| &setting.label);
        let names = axes.iter().flat_map(|axis| &axis.names).chain(labels);
        let shown = names.map(|name| ("--vary", name));
        for (flag, name) in shown.chain(fields.iter().map(|field| ("--y", &field.name))) {
            let length = name.chars().count();
            if length > LONGEST_NAME {
                let text =
                    format!("a name of {length} characters; at most {LONGEST_NAME} are shown");
                problems.add(flag, text);
            }
        }
        let log = self.log(problems);
        let study = Study { axes, fields, chosen: self.y.is_some(), log };
        self.picture(&study, problems);
        problems.is_empty().then_some(study)
    }

    fn log(&self, problems: &mut Problems) -> [Option<bool>; 2] {
        match self.log.as_deref() {
            None => [None, None],
            Some("x") => [Some(true), Some(false)],
            Some("y") => [Some(false), Some(true)],
            Some("both") => [Some(true), Some(true)],
            Some("none") => [Some(false), Some(false)],
            Some(other) => {
                problems.add("--log", format!("'{other}' is none of x, y, both and none"));
                [None, None]
            }
        }
    }

    /// Reports a study that a chart cannot show.
    fn picture(&self, study: &Study, problems: &mut Problems) {
        let Some(path) = &self.plot else {
            for (flag, given) in
                [("--title", &self.title), ("--x-label", &self.x_label), ("--log", &self.log)]
            {
                if given.is_some() {
                    problems.add(flag, "needs --plot, whose picture it is for");
                }
            }
            return;
        };
        if path.is_dir() || path.file_name().is_none() {
            problems.add("--plot", "name a file, not a directory");
        } else if path.extension().is_none_or(|extension| extension != "svg") {
            problems.add("--plot", "pictures are SVG: name a file that ends in .svg");
        }
        let fields = study.drawn();
        let colours = study.axes.get(1).map_or(1, |axis| axis.settings.len());
        if colours > COLOURS || fields.len() > if colours > 1 { DASHES } else { COLOURS } {
            problems.add(
                "--plot",
                format!(
                    "{} lines are too many; at most {COLOURS} colours with {DASHES} dashes are distinguishable",
                    colours * fields.len()
                ),
            );
        }
        let units: Vec<Unit> = fields.iter().map(|field| field.unit).collect();
        if let Some(index) = units.iter().position(|unit| *unit != units[0]) {
            problems.add(
                "--y",
                format!(
                    "{} and {} have different units, and a picture has one height",
                    fields[0].name, fields[index].name
                ),
            );
        }
    }
}

impl Study {
    /// The fields of the chart: those chosen by the user, or the first default one.
    pub(super) fn drawn(&self) -> &[Field] {
        if self.chosen { &self.fields } else { &self.fields[..1] }
    }
}

/// Checks that a command can vary `name`; the error suggests another name.
fn known(command: &Command, name: &str, axis: &Axis) -> Result<(), String> {
    if is_cluster_path(name) {
        return Ok(());
    }
    let flags = || command.get_arguments().filter_map(|flag| Some((flag.get_long()?, flag)));
    let varying = || flags().filter(|(name, _)| !FIXED.contains(name));
    if let Some((_, flag)) = varying().find(|(long, _)| *long == name) {
        let values = axis.settings.iter().flat_map(|setting| {
            let of_this = |(own, _): &(&String, &String)| *own == name;
            axis.names.iter().zip(&setting.values).find(of_this).map(|(_, value)| value)
        });
        let wrong = values.into_iter().find(|value| !["true", "false"].contains(&value.as_str()));
        return match wrong {
            Some(value) if matches!(flag.get_action(), ArgAction::SetTrue) => {
                Err(format!("{name} is a switch: it takes false and true, not '{value}'"))
            }
            _ => Ok(()),
        };
    }
    if flags().any(|(long, _)| long == name) {
        return Err(format!("{name} cannot vary"));
    }
    let long = name.chars().count() > 100;
    let shown = name.chars().take(100).chain(long.then_some('…')).collect::<String>();
    let names: Vec<&str> = varying().filter(|(_, f)| !f.is_hide_set()).map(|(n, _)| n).collect();
    let known = names.iter().copied().chain(["hosts", "device", "dimension"]);
    Err(match suggest(name, known) {
        Some(meant @ ("device" | "dimension")) => {
            format!("{name}: name a field of it, as in {meant}.memory or dimension.0.bandwidth")
        }
        Some(meant) => format!("there is no {name} (did you mean {meant}?)"),
        None => format!(
            "there is no {shown}; these can vary: {}, and fields of the cluster such as \
             dimension.0.bandwidth",
            names.join(", ")
        ),
    })
}
