//! Runs a plan on a described cluster and says how long it takes, what overlaps and what does not.
//!
//! This crate touches no real time, socket or thread: the same plan on the same cluster gives the
//! same answer, to the bit, on every machine. `cluster` is the description; everything else reads
//! it and changes nothing in it.

#![warn(clippy::wildcard_enum_match_arm)]

pub mod cluster;
