//! `PACELINE_LOG`: diagnostic events of all crates on standard error.
//!
//! Libraries emit events with the targets `comm`, `exec`, `search`, `launch`, `calibrate` and `peers`. No
//! event is on a hot path: an unwanted one costs a load and a branch. By default only refused
//! connections (`peers`) are printed.

use crate::failure::Failure;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;

/// The variable with targets and levels: `debug`, or `comm=debug,launch=info`.
const VARIABLE: &str = "PACELINE_LOG";

/// Targets and levels without the variable.
const USUAL: &str = "peers=warn";

/// Starts printing the events that the variable asks for.
pub(crate) fn start() -> Result<(), Failure> {
    let wanted = match std::env::var(VARIABLE) {
        Ok(wanted) if !wanted.trim().is_empty() => wanted,
        _ => USUAL.to_owned(),
    };
    let targets: Targets = wanted.parse().map_err(|error| {
        let remedy = "write targets and levels, such as debug or comm=debug,launch=info";
        Failure::flag(VARIABLE, format!("'{wanted}': {error}; {remedy}"))
    })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let subscriber = tracing_subscriber::registry().with(lines).with(targets);
    tracing::subscriber::set_global_default(subscriber).map_err(|error| Failure::Run(error.into()))
}
