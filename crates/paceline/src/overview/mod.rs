//! Summaries of a plan and of a prediction that fit one screen.

mod advice;
mod details;
mod experts;
mod plan;
mod simulation;
mod table;

pub(crate) use advice::warnings;
pub(crate) use details::{estimate_facts, prefixed};
pub(crate) use experts::largest_peak;
pub(crate) use plan::{facts, pipeline, plan_text};
pub(crate) use simulation::{Line, prediction, simulation_text};
pub(crate) use table::{count, cut, percent, table};
