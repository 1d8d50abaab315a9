//! Flags of `simulate` about a whole training run: tokens, cost and failures.

use super::number::short;
use super::power::{Power, PowerFlags};
use super::{Problems, real, whole};
use clap::Args;
use paceline_plan::units::Seconds;

/// Flags about a whole training run.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Whole run")]
pub(crate) struct WholeRunFlags {
    /// Estimate the duration of training on this number of tokens: 300000000000, 300B or 3e11
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub tokens: Option<String>,
    /// Price of one device for an hour, to estimate the cost; with --tokens
    #[arg(long, value_name = "PRICE", allow_negative_numbers = true)]
    pub price_per_device_hour: Option<String>,
    #[command(flatten)]
    pub power: PowerFlags,
    /// Mean time between failures of one device, in hours, to estimate the goodput
    #[arg(long, value_name = "HOURS", allow_negative_numbers = true)]
    pub mtbf_hours: Option<String>,
    /// Seconds to write a checkpoint, with --mtbf-hours [default: 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub checkpoint_seconds: Option<String>,
    /// Seconds from a failure until training resumes, with --mtbf-hours [default: 300]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    pub restart_seconds: Option<String>,
    /// Iterations between checkpoints, with --mtbf-hours [default: the best number]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub checkpoint_every: Option<String>,
}

/// Validated flags about a whole training run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct WholeRun {
    /// Number of tokens to train on.
    pub tokens: Option<u64>,
    /// Price of one device for an hour.
    pub price_per_device_hour: Option<f64>,
    /// Settings of electricity.
    pub power: Power,
    /// Failure settings, with `--mtbf-hours`.
    pub failures: Option<FailureFlags>,
}

/// Failure rate of a device, and the costs of checkpoints and restarts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FailureFlags {
    /// Mean time between failures of one device.
    pub mtbf: Seconds,
    /// Time to write a checkpoint.
    pub checkpoint: Seconds,
    /// Time from a failure until training resumes.
    pub restart: Seconds,
    /// Iterations between checkpoints; the best number if `None`.
    pub every: Option<u64>,
}

/// Upper limit of --tokens: more than all text ever written, but safe to compute with.
const MOST_TOKENS: f64 = 1e18;

impl WholeRunFlags {
    /// Checks every flag, and that each is given together with the flag it depends on.
    pub(crate) fn check(&self, problems: &mut Problems) -> WholeRun {
        let tokens = tokens(self.tokens.as_deref(), problems);
        let mut number = |flag: &str, text: &Option<String>, least: f64, most: f64| {
            real(flag, text.as_deref(), least..=most, problems)
        };
        let price_per_device_hour =
            number("--price-per-device-hour", &self.price_per_device_hour, 0.0, 1e9);
        let mtbf = number("--mtbf-hours", &self.mtbf_hours, 1e-3, 1e9);
        let checkpoint = number("--checkpoint-seconds", &self.checkpoint_seconds, 1e-3, 1e7);
        let restart = number("--restart-seconds", &self.restart_seconds, 0.0, 1e7);
        let every =
            whole("--checkpoint-every", self.checkpoint_every.as_deref(), 1..=1 << 40, problems);
        for (flag, given, needed, has) in [
            ("--price-per-device-hour", &self.price_per_device_hour, "--tokens", &self.tokens),
            ("--checkpoint-seconds", &self.checkpoint_seconds, "--mtbf-hours", &self.mtbf_hours),
            ("--restart-seconds", &self.restart_seconds, "--mtbf-hours", &self.mtbf_hours),
            ("--checkpoint-every", &self.checkpoint_every, "--mtbf-hours", &self.mtbf_hours),
        ] {
            if given.is_some() && has.is_none() {
                problems.add(flag, format!("needs {needed}"));
            }
        }
        let failures = mtbf.map(|hours| FailureFlags {
            mtbf: Seconds(hours * 3600.0),
            checkpoint: Seconds(checkpoint.unwrap_or(60.0)),
            restart: Seconds(restart.unwrap_or(300.0)),
            every,
        });
        WholeRun { tokens, price_per_device_hour, power: self.power.check(problems), failures }
    }
}

/// Parses a number of tokens: digits, a power of ten, or a letter for thousands, millions etc.
fn tokens(text: Option<&str>, problems: &mut Problems) -> Option<u64> {
    let text = text?;
    let found = parse_tokens(text.trim());
    if found.is_none() {
        problems.add(
            "--tokens",
            format!(
                "'{}' is not a number of tokens from 1 to 10^18; write 300000000000, 3e11 or 300B",
                short(text)
            ),
        );
    }
    found
}

fn parse_tokens(text: &str) -> Option<u64> {
    const LETTERS: [(char, f64); 4] = [('k', 1e3), ('M', 1e6), ('B', 1e9), ('T', 1e12)];
    let letter = LETTERS.iter().find(|(letter, _)| text.ends_with(*letter));
    let (digits, scale) = match letter {
        Some(&(letter, scale)) => (text.trim_end_matches(letter).trim_end(), scale),
        None => (text, 1.0),
    };
    if letter.is_none()
        && let Ok(exact) = digits.parse::<u64>()
    {
        return (exact > 0 && exact as f64 <= MOST_TOKENS).then_some(exact);
    }
    let value = digits.parse::<f64>().ok()? * scale;
    (1.0..=MOST_TOKENS).contains(&value).then_some(value.round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl FnOnce(&mut WholeRunFlags)) -> Result<WholeRun, String> {
        let mut flags = WholeRunFlags::default();
        change(&mut flags);
        let mut problems = Problems::default();
        let run = flags.check(&mut problems);
        if problems.is_empty() { Ok(run) } else { Err(problems.to_string()) }
    }

    fn text(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn tokens_are_written_as_people_write_them() {
        for written in ["300000000000", "300B", "0.3T", "3e11", " 300000M "] {
            assert_eq!(parse_tokens(written.trim()), Some(300_000_000_000), "{written}");
        }
        assert_eq!(parse_tokens("1"), Some(1));
        for wrong in ["", "0", "-1", "x", "NaN", "inf", "1e19", "0.1", "B", "18446744073709551615"]
        {
            assert_eq!(parse_tokens(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn failures_have_defaults() {
        let run = checked(|flags| flags.mtbf_hours = text("50000")).unwrap();
        let failures = run.failures.unwrap();
        assert_eq!((failures.mtbf, failures.every), (Seconds(1.8e8), None));
        assert_eq!((failures.checkpoint, failures.restart), (Seconds(60.0), Seconds(300.0)));
        assert_eq!(checked(|_| {}), Ok(WholeRun::default()));
    }

    #[test]
    fn a_flag_without_its_partner_and_absurd_numbers_are_told_at_once() {
        let told = checked(|flags| {
            flags.price_per_device_hour = text("2");
            flags.checkpoint_every = text("0");
            flags.restart_seconds = text("NaN");
        })
        .unwrap_err();
        for said in [
            "--price-per-device-hour: needs --tokens",
            "--checkpoint-every: '0'",
            "--checkpoint-every: needs --mtbf-hours",
            "--restart-seconds: 'NaN'",
        ] {
            assert!(told.contains(said), "{said}\n{told}");
        }
    }
}
