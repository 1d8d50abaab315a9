//! From what a person typed to what a library takes.
//!
//! Flags reach this module as plain text: clap only tells them apart. Every value is then checked
//! here, so that all problems of a request are told at once, whether they stand on the command line
//! or in a run file, and nothing is read and ignored.

mod checkpoint;
mod cluster;
mod common;
pub(crate) mod config;
mod data;
mod file;
mod launch;
mod model;
mod number;
mod problems;
mod set;
mod size;
mod strategy;
mod training;
mod whole_run;
mod word;

pub(crate) use checkpoint::{CheckpointFlags, Keeping, MODEL, Saving};
pub(crate) use cluster::ClusterFlags;
pub(crate) use common::CommonFlags;
pub(crate) use data::{DataChoice, DataDefaults, DataFlags, TOKENIZER};
pub(crate) use file::read_text;
pub(crate) use launch::{Carrier, Launch, LaunchFlags, SECRET, Starter};
pub(crate) use model::model;
pub(crate) use number::{real, whole};
pub(crate) use paceline_plan::nearest::nearest;
pub(crate) use problems::{Origins, Problems};
pub(crate) use set::is_cluster_path;
pub(crate) use size::size;
pub(crate) use strategy::{Defaults, Request, StrategyFlags};
pub(crate) use training::{Training, TrainingFlags};
pub(crate) use whole_run::{WholeRun, WholeRunFlags};
pub(crate) use word::word;
