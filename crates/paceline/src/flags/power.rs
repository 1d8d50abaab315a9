//! Flags about the electricity that devices draw.

use super::{Problems, real};
use clap::Args;

/// Flags about electricity.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct PowerFlags {
    /// Grams of CO2 per kilowatt-hour of electricity, to estimate emissions
    #[arg(long, value_name = "G", allow_negative_numbers = true, help_heading = "Energy")]
    pub carbon_intensity: Option<String>,
    /// Power of the whole facility over that of the devices (power usage effectiveness), for energy
    /// and emissions of a run [default: 1]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, help_heading = "Energy")]
    pub pue: Option<String>,
}

/// Validated flags about electricity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Power {
    /// Grams of CO2 per kilowatt-hour.
    pub carbon_intensity: Option<f64>,
    /// Power of the facility over that of the devices.
    pub pue: Option<f64>,
}

/// Joules of a kilowatt-hour.
const KILOWATT_HOUR: f64 = 3.6e6;

impl PowerFlags {
    /// Checks both flags.
    pub(crate) fn check(&self, problems: &mut Problems) -> Power {
        let mut number = |flag: &str, text: &Option<String>, least: f64, most: f64| {
            real(flag, text.as_deref(), least..=most, problems)
        };
        Power {
            carbon_intensity: number("--carbon-intensity", &self.carbon_intensity, 0.0, 1e5),
            pue: number("--pue", &self.pue, 1.0, 100.0),
        }
    }
}

impl Power {
    /// Kilowatt-hours that the facility draws while its devices take `joules`.
    pub(crate) fn kwh(&self, joules: f64) -> f64 {
        joules * self.pue.unwrap_or(1.0) / KILOWATT_HOUR
    }

    /// Grams of CO2 of `kwh` kilowatt-hours, if the intensity is known.
    pub(crate) fn co2_g(&self, kwh: f64) -> Option<f64> {
        self.carbon_intensity.map(|grams| grams * kwh)
    }
}
