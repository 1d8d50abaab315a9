//! `paceline clusters`: lists the built-in clusters.

use crate::failure::Failure;
use crate::flags::CommonFlags;
use clap::Args;
use paceline_sim::cluster::{Cluster, preset};
use serde::Serialize;

/// List the built-in clusters
///
/// Each name can be given to --cluster, optionally followed by a colon and the number of hosts (of
/// racks, for gb200-nvl72). A custom cluster is a TOML file like those in the repository's
/// `clusters/`.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  paceline clusters\n  paceline simulate --model gpt2-1.5b --dp 16 \
                  --cluster dgx-a100:2"
)]
pub(crate) struct Flags {
    #[command(flatten)]
    common: CommonFlags,
}

#[derive(Serialize)]
struct Record<'a> {
    devices: u64,
    #[serde(flatten)]
    cluster: &'a Cluster,
}

/// Lists the built-in clusters.
pub(crate) fn run(flags: &Flags) -> Result<(), Failure> {
    let output = flags.common.output();
    let clusters: Vec<Cluster> =
        preset::names().filter_map(|name| preset::get(name).ok()).collect();
    if output.is_json() {
        let record = |cluster| Record { devices: Cluster::devices(cluster), cluster };
        return Ok(clusters.iter().try_for_each(|cluster| output.print_json(&record(cluster)))?);
    }
    let texts: Vec<String> = clusters.iter().map(Cluster::summary).collect();
    Ok(output.print(&texts.join("\n"))?)
}
