//! Limits of a prediction, and estimates of a whole run, as text for a terminal.

use super::table::{count, cut, percent, table};
use crate::estimate::{EnergyEstimate, Estimate, FailureEstimate};
use paceline_plan::units::{Bytes, Seconds};
use paceline_sim::network::PhaseLatency;
use paceline_sim::training::TrainingCost;
use paceline_sim::{Details, ErrorBand, ExchangeStat, LayerStat, Outcome};

/// Number of parts of the critical path named before the rest is summed.
const PARTS: usize = 5;

/// Limits of the iteration time, its critical path, and the link utilisation.
pub(super) fn details_text(outcome: &Outcome, details: &Details) -> String {
    let mut text = format!("\n{}", limits(outcome, details));
    text += &format!("\n{}", path(outcome, details));
    text += &format!("\n{}", links(details));
    text += &format!("\n{}", layers(details));
    text + &exchanges(details)
}

/// Number of layers, and of exchanges, listed before the rest is summed.
const ROWS: usize = 16;

/// Times of every layer: a row each, the middle ones summed if there are many.
fn layers(details: &Details) -> String {
    let row = |name: String, stats: &[LayerStat]| {
        let sum = |of: fn(&LayerStat) -> Seconds| {
            stats.iter().map(of).fold(Seconds::ZERO, |a, b| a + b).to_string()
        };
        vec![
            name,
            sum(|layer| layer.forward + layer.recompute),
            sum(|layer| layer.input_gradient),
            sum(|layer| layer.weight_gradient),
            sum(|layer| layer.communication),
            sum(|layer| layer.exposed),
        ]
    };
    let all = &details.layers[..];
    let one = |layer: &LayerStat| row(layer.name.clone(), std::slice::from_ref(layer));
    let rows: Vec<_> = if all.len() <= ROWS + 1 {
        all.iter().map(one).collect()
    } else {
        let (first, rest) = all.split_at(ROWS / 2);
        let (middle, last) = rest.split_at(rest.len() - ROWS / 2);
        let name = format!("… {} more, together", middle.len());
        let first = first.iter().map(one).chain([row(name, middle)]);
        first.chain(last.iter().map(one)).collect()
    };
    let head = ["layer", "forward", "d input", "d weights", "communication", "exposed"];
    table(&head, 1, rows)
}

/// Every exchange by name, longest first, with the latency of a message in each of its phases.
fn exchanges(details: &Details) -> String {
    if details.exchanges.is_empty() {
        return String::new();
    }
    let mut all: Vec<&ExchangeStat> = details.exchanges.iter().collect();
    all.sort_by(|a, b| b.time.0.total_cmp(&a.time.0));
    let rows = all.iter().take(ROWS).map(|exchange| {
        let phases = exchange.phases.iter();
        let phase = |phase: &PhaseLatency| Seconds(phase.message_latency_s).to_string();
        vec![
            cut(&exchange.name, 48),
            count(exchange.count),
            exchange.bytes.to_string(),
            exchange.time.to_string(),
            exchange.exposed.to_string(),
            phases.map(phase).collect::<Vec<_>>().join(" + "),
        ]
    });
    let mut rows: Vec<_> = rows.collect();
    if all.len() > ROWS {
        rows.push(vec![format!("… {} more", all.len() - ROWS)]);
    }
    let head = ["exchange", "count", "bytes", "time", "exposed", "a message, by phase"];
    format!("\n{}", table(&head, 1, rows))
}

fn limits(outcome: &Outcome, details: &Details) -> String {
    let limits = details.limits;
    let row = |what: &str, time: Seconds| {
        let saved = (outcome.iteration - time).max(Seconds::ZERO);
        let share = percent(share(saved, outcome.iteration));
        vec![what.to_owned(), time.to_string(), saved.to_string(), share]
    };
    let mut rows = vec![
        row("an infinitely fast network", limits.no_network),
        row("infinitely fast computation", limits.no_compute),
        row("no waiting for other ranks", limits.no_bubble),
    ];
    rows.extend(limits.homogeneous.map(|even| row("devices and links all alike", even)));
    table(&["with", "iteration", "saves", ""], 1, rows)
}

fn path(outcome: &Outcome, details: &Details) -> String {
    let parts = &details.critical_path.parts;
    let part = |name: &str, count: u64, time: Seconds| {
        let share = percent(share(time, outcome.iteration));
        vec![name.to_owned(), super::count(count), time.to_string(), share]
    };
    let shown = parts.len().min(if parts.len() == PARTS + 1 { PARTS + 1 } else { PARTS });
    let (first, rest) = parts.split_at(shown);
    let mut rows: Vec<_> = first.iter().map(|p| part(&p.name, p.count, p.time)).collect();
    if !rest.is_empty() {
        let (steps, time) = (rest.iter().map(|p| p.count).sum(), rest.iter().map(|p| p.time).sum());
        rows.push(part(&format!("{} other kinds", rest.len()), steps, time));
    }
    table(&["critical path", "steps", "time", ""], 1, rows)
}

fn links(details: &Details) -> String {
    let rows = details.bandwidth.iter().map(|used| {
        vec![
            used.dimension.clone(),
            percent(used.utilisation),
            Bytes(used.bytes_per_device as u64).to_string(),
            count(used.messages_per_device.round() as u64),
            used.message.to_string(),
        ]
    });
    let head = ["links", "used", "bytes/device", "messages/device", "each"];
    table(&head, 1, rows)
}

fn share(part: Seconds, whole: Seconds) -> f64 {
    if whole.0 > 0.0 { part.0 / whole.0 } else { 0.0 }
}

/// A time with the band in which measurements are expected.
pub(super) fn band(time: Seconds, band: ErrorBand) -> String {
    let (low, high) = (time * band.low, time * band.high);
    let basis = match band.runs {
        0 => "no measured runs of this kind".to_owned(),
        runs => format!("four of five, by {runs} measured runs"),
    };
    format!("expect {low} to {high} ({basis})")
}

/// Estimates of a whole run as facts; empty if none was requested.
pub(crate) fn estimate_facts(estimate: &Estimate, band: ErrorBand) -> Vec<(&'static str, String)> {
    let failures = estimate.failures.as_ref().map(|found| ("failures", failures(found)));
    let training = estimate.cost.as_ref().map(|found| ("training", training(found, band)));
    let energy = estimate.energy.as_ref().map(|found| ("energy", energy(found)));
    energy.into_iter().chain(training).chain(failures).collect()
}

fn energy(found: &EnergyEstimate) -> String {
    let EnergyEstimate { joules, watts, co2_g, run_kwh, run_co2_kg } = *found;
    let mut text = format!(
        "{} of an iteration, {} of all devices",
        prefixed(joules, "J"),
        prefixed(watts, "W")
    );
    if let Some(grams) = co2_g {
        text += &format!(", {} of CO2", prefixed(grams, "g"));
    }
    if let Some(kwh) = run_kwh {
        text += &format!("; the run {}", prefixed(kwh * 1000.0, "Wh"));
    }
    if let Some(kilograms) = run_co2_kg {
        text += &format!(", {} t of CO2", digits(kilograms / 1000.0));
    }
    text
}

/// Formats a quantity with three digits and a decimal prefix.
pub(crate) fn prefixed(value: f64, unit: &str) -> String {
    const PREFIXES: [(&str, f64); 6] =
        [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)];
    let found = PREFIXES.iter().find(|(_, scale)| value >= *scale);
    let (prefix, scale) = found.copied().unwrap_or(("m", 1e-3));
    let scaled = value / scale;
    let decimals = if scaled < 9.995 { 2 } else { usize::from(scaled < 99.95) };
    format!("{scaled:.decimals$} {prefix}{unit}")
}

fn training(cost: &TrainingCost, band: ErrorBand) -> String {
    let mut text = format!(
        "{} tokens: {} iterations, {} ({} to {}), {} device hours",
        count(cost.tokens),
        count(cost.iterations),
        long(cost.wall),
        long(cost.wall * band.low),
        long(cost.wall * band.high),
        rounded(cost.device_hours)
    );
    if let Some(money) = cost.cost {
        text += &format!(", cost {}", rounded(money));
    }
    text
}

fn failures(estimate: &FailureEstimate) -> String {
    let FailureEstimate { mtbf, devices, every, chosen, best_every, best, .. } = estimate;
    let mut text = format!(
        "one in {} on {} devices; {} goodput with a checkpoint every {} iterations ({})",
        long(*mtbf),
        count(*devices),
        percent(chosen.goodput),
        count(*every),
        long(chosen.interval)
    );
    if every == best_every {
        text += ", which is best";
    } else {
        text += &format!("; best is every {}: {}", count(*best_every), percent(best.goodput));
    }
    text
}

/// Formats a long time with a suitable unit, up to years.
fn long(time: Seconds) -> String {
    const HOUR: f64 = 3600.0;
    const DAY: f64 = 24.0 * HOUR;
    const YEAR: f64 = 365.25 * DAY;
    match time.0 {
        t if !t.is_finite() => "for ever".to_owned(),
        t if t >= 2.0 * YEAR => format!("{} years", digits(t / YEAR)),
        t if t >= 2.0 * DAY => format!("{} days", digits(t / DAY)),
        t if t >= 2.0 * HOUR => format!("{} hours", digits(t / HOUR)),
        t if t >= 120.0 => format!("{} minutes", digits(t / 60.0)),
        _ => time.to_string(),
    }
}

/// Formats a number with three digits or more, and thousands separators.
fn digits(value: f64) -> String {
    if value < 100.0 { format!("{value:.1}") } else { count(value.round() as u64) }
}

/// Formats a large number without a fraction, and a small one with two decimals.
fn rounded(value: f64) -> String {
    if !value.is_finite() {
        "without end".to_owned()
    } else if value < 100.0 {
        format!("{value:.2}")
    } else {
        count(value.round() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_times_have_the_unit_that_fits() {
        let shown = [0.5, 119.0, 120.0, 7200.0, 172_800.0, 86_400.0 * 400.0, 1e9, f64::INFINITY]
            .map(|seconds| long(Seconds(seconds)));
        assert_eq!(
            shown,
            [
                "500 ms",
                "119 s",
                "2.0 minutes",
                "2.0 hours",
                "2.0 days",
                "400 days",
                "31.7 years",
                "for ever"
            ]
        );
    }

    #[test]
    fn quantities_have_their_prefix() {
        let shown = [0.5, 1.0, 12.34, 999.0, 123_456.0, 1.287e9].map(|value| prefixed(value, "Wh"));
        assert_eq!(shown, ["500 mWh", "1.00 Wh", "12.3 Wh", "999 Wh", "123 kWh", "1.29 GWh"]);
    }

    #[test]
    fn money_is_rounded_to_what_matters() {
        assert_eq!([0.5, 99.999, 1234.5].map(rounded), ["0.50", "100.00", "1,235"]);
    }
}
