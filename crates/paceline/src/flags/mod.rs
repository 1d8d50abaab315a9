//! Converts command-line flags to library types.
//!
//! Flags reach this module as plain text: clap only separates them. Every value is then checked
//! here, so that all problems of a request are reported at once, from the command line and from a
//! run file. No flag is silently ignored.

mod checkpoint;
mod cluster;
mod common;
pub(crate) mod config;
mod data;
mod file;
mod headroom;
mod launch;
mod model;
mod number;
mod power;
mod problems;
mod resumed;
mod set;
mod size;
mod strategy;
mod training;
mod whole_run;
mod word;

pub(crate) use checkpoint::{CheckpointFlags, CheckpointOptions, MODEL, SavePolicy};
pub(crate) use cluster::ClusterFlags;
pub(crate) use common::{CommonFlags, wants_json};
pub(crate) use config::CONTINUE;
pub(crate) use data::{DataChoice, DataDefaults, DataFlags, TOKENIZER};
pub(crate) use file::read_text;
pub(crate) use headroom::HeadroomFlags;
pub(crate) use launch::{Launch, LaunchFlags, LaunchMode, SECRET};
pub(crate) use model::model;
pub(crate) use number::{real, whole};
pub(crate) use paceline_plan::suggest::suggest;
pub(crate) use power::{Power, PowerFlags};
pub(crate) use problems::{Origins, Problem, Problems};
pub(crate) use resumed::{ResumedRun, SETTINGS};
pub(crate) use set::is_cluster_path;
pub(crate) use size::size;
pub(crate) use strategy::{Defaults, Request, StrategyFlags};
pub(crate) use training::{Training, TrainingFlags};
pub(crate) use whole_run::{WholeRun, WholeRunFlags};
pub(crate) use word::word;
