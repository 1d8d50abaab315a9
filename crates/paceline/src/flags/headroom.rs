//! Memory of a device that a plan leaves free.

use super::{Problems, size};
use clap::Args;
use paceline_plan::units::Bytes;

/// Flags for the memory that is left free.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct HeadroomFlags {
    /// Memory of a device that tensors cannot use: the driver, kernels, communicators; 0 for none
    /// [default: the profile's, usually 2GiB, at most a thirty-second part of the memory]
    #[arg(long, value_name = "SIZE", help_heading = "Cluster")]
    memory_headroom: Option<String>,
}

impl HeadroomFlags {
    pub(crate) fn check(&self, problems: &mut Problems) -> Option<Bytes> {
        match self.memory_headroom.as_deref().map(str::trim) {
            Some("0") => Some(Bytes::ZERO),
            text => size("--memory-headroom", text, problems),
        }
    }
}
