//! `paceline bench core-to-core`: core round trips of this machine.

use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, whole};
use crate::overview::table;
use clap::Args;
use paceline_comm::affinity::{self, CoreSet};
use paceline_exec::probe;
use serde::Serialize;

/// Measure the round trip between the cores of this machine
///
/// Bounces a cache line between every two cores. Cores that share a cache take tens of nanoseconds,
/// others hundreds. On a virtual machine the times may vary, because its host migrates the cores:
/// measurements and run times then depend on the moment.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Number of passes over all pairs of cores [default: 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Measuring")]
    rounds: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline bench core-to-core
  paceline bench core-to-core --rounds 100000     detect core migration while another job runs
  paceline bench core-to-core --rounds 1 --json   where they are now";

/// Upper limit of --rounds: enough to monitor a machine for hours.
const MOST_ROUNDS: u64 = 1_000_000_000;

/// Maximum number of cores shown as a table: more do not fit on a terminal.
const WIDEST: usize = 16;

/// Two cores, by their indices among those available to this process.
#[derive(Debug, Serialize)]
struct Pair {
    cores: [u32; 2],
    least_s: f64,
    most_s: f64,
}

/// Summary of all pairs.
#[derive(Debug, Serialize)]
struct Sum {
    event: &'static str,
    cores: usize,
    least_s: f64,
    most_s: f64,
    /// Round trip between the first and the last core, in the last round.
    core_round_trip_s: f64,
}

/// Measures and prints the round trips.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let rounds = whole("--rounds", flags.rounds.as_deref(), 1..=MOST_ROUNDS, &mut problems);
    let cores = affinity::cores();
    let count = u32::try_from(cores).unwrap_or(u32::MAX);
    let shares: Option<Vec<CoreSet>> = (0..count).map(|core| CoreSet::of(core, count)).collect();
    if !problems.is_empty() {
        return Err(problems.into());
    }
    let Some(shares) = shares.filter(|_| cores > 1) else {
        return Err(Failure::Run(anyhow::anyhow!("this process has one core only")));
    };
    let mut pairs: Vec<Pair> = (0..count)
        .flat_map(|one| (one + 1..count).map(move |other| [one, other]))
        .map(|cores| Pair { cores, least_s: f64::MAX, most_s: 0.0 })
        .collect();
    let mut core_round_trip_s = 0.0;
    for _ in 0..rounds.unwrap_or(10) {
        for Pair { cores: [one, other], least_s, most_s } in &mut pairs {
            let time = probe::round_trip(&shares[*one as usize], &shares[*other as usize]).0;
            (*least_s, *most_s) = (least_s.min(time), most_s.max(time));
            if (*one, *other) == (0, count - 1) {
                core_round_trip_s = time;
            }
        }
    }
    let output = flags.common.output();
    pairs.iter().try_for_each(|pair| output.print_json(pair))?;
    let least_s = pairs.iter().map(|pair| pair.least_s).fold(f64::MAX, f64::min);
    let most_s = pairs.iter().map(|pair| pair.most_s).fold(0.0, f64::max);
    let sum = Sum { event: "done", cores, least_s, most_s, core_round_trip_s };
    output.print_json(&sum)?;
    if output.is_json() { Ok(()) } else { Ok(output.print(&summary(&pairs, &sum))?) }
}

/// Table of round trips between all cores, and its interpretation.
fn summary(pairs: &[Pair], sum: &Sum) -> String {
    let nanoseconds = |seconds: f64| format!("{:.0}", seconds * 1e9);
    let mut text = String::new();
    if sum.cores <= WIDEST {
        let names: Vec<String> = (0..sum.cores).map(|core| core.to_string()).collect();
        let head: Vec<&str> =
            std::iter::once("ns").chain(names.iter().map(String::as_str)).collect();
        let cell = |one: u32, other: u32| {
            let found = pairs.iter().find(|pair| pair.cores == [one.min(other), one.max(other)]);
            found.map_or("-".to_owned(), |pair| {
                let (least, most) = (nanoseconds(pair.least_s), nanoseconds(pair.most_s));
                if pair.most_s > 2.0 * pair.least_s { format!("{least}-{most}") } else { least }
            })
        };
        let row = |one: u32| {
            let others = (0..sum.cores as u32).map(|other| cell(one, other));
            std::iter::once(one.to_string()).chain(others).collect()
        };
        text += &table(&head, 1, (0..sum.cores as u32).map(row));
    }
    let (least, most) = (nanoseconds(sum.least_s), nanoseconds(sum.most_s));
    text += &format!("\na word there and back: {least} to {most} ns between two cores\n");
    if pairs.iter().any(|pair| pair.most_s > 2.0 * pair.least_s) {
        text += "the same two cores were near and far: their host moves them, or something else is at work\n";
    }
    text
}
