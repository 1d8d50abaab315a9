//! `--cluster`: a built-in name with an optional number of hosts, or a file.

use super::Problems;
use super::file::read_text;
use super::set::set;
use clap::Args;
use paceline_plan::mesh::Mesh;
use paceline_sim::cluster::{Cluster, preset};
use serde::Serialize;
use std::path::Path;

const FLAG: &str = "--cluster";

/// Flags that select a cluster.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ClusterFlags {
    /// Cluster: a built-in name or a TOML file, also with a number of hosts: dgx-a100:16,
    /// mine.toml:8
    #[arg(long, value_name = "NAME[:HOSTS]|FILE[:HOSTS]", help_heading = "Cluster")]
    pub cluster: Option<String>,
    /// Set a field of the cluster, by its name in a cluster file; may be repeated: hosts=8 (the
    /// outermost dimension follows), device.memory=40GiB, device.peak.bf16=2x (twice as much), dimension.0.bandwidth=160GB/s or
    /// dimension.nvlink.bandwidth=160GB/s
    #[arg(long, value_name = "PATH=VALUE", help_heading = "Cluster")]
    pub set: Vec<String>,
}

impl ClusterFlags {
    /// The cluster with the requested changes; `None` if it is absent or invalid.
    pub(crate) fn check(&self, problems: &mut Problems) -> Option<Cluster> {
        if self.cluster.is_none() && !self.set.is_empty() {
            problems.add("--set", "needs --cluster, whose fields it sets");
        }
        set(self.described(problems)?, &self.set, problems)
    }

    /// The cluster as described by its name or file.
    fn described(&self, problems: &mut Problems) -> Option<Cluster> {
        let text = self.cluster.as_deref()?;
        let (file, hosts) = file_and_hosts(text);
        let path = Path::new(file);
        if !path.exists() && !file.ends_with(".toml") {
            return preset::get(text).map_err(|e| problems.add(FLAG, e.to_string())).ok();
        }
        let contents = read_text(path)
            .map_err(|what| problems.add(FLAG, format!("{} {what}", path.display())))
            .ok()?;
        let found = Cluster::parse(&contents, file).map_err(|errors| problems.located(errors));
        let cluster = found.ok()?;
        let Some(hosts) = hosts else { return Some(cluster) };
        let Ok(count) = hosts.parse() else {
            let what = format!("'{text}': '{hosts}' is not a number of hosts; write {file}:2");
            problems.add(FLAG, what);
            return None;
        };
        let resized = cluster.with_hosts(count);
        let resized = resized.map_err(|what| problems.add(FLAG, format!("'{text}': {what}")));
        resized.map(|resized| Cluster { name: format!("{}:{count}", cluster.name), ..resized }).ok()
    }

    /// The same as [`check`](Self::check), for a command that requires a cluster.
    pub(crate) fn required(&self, problems: &mut Problems) -> Option<Cluster> {
        if self.cluster.is_none() {
            problems.add(
                FLAG,
                "missing; for example --cluster dgx-a100:16 (`paceline clusters` lists)",
            );
        }
        self.check(problems)
    }

    /// Reports a cluster with fewer devices than the mesh has ranks.
    pub(super) fn holds(&self, cluster: &Cluster, mesh: &Mesh, problems: &mut Problems) {
        let (world, devices) = (u64::from(mesh.world()), cluster.devices());
        if world <= devices {
            return;
        }
        let name = self.cluster.as_deref().unwrap_or_default();
        let kind = name.split_once(':').map_or(name, |(kind, _)| kind);
        let enough = preset::names().find(|known| *known == kind).and_then(|kind| {
            let unit = preset::get(kind).ok()?.devices();
            let enough = preset::get(&format!("{kind}:{}", world.div_ceil(unit))).ok()?;
            (enough.devices() >= world).then_some(enough)
        });
        let remedy = match enough {
            Some(enough) => format!("{} has {}", enough.name, enough.devices()),
            None => "use a larger cluster or fewer ranks".to_owned(),
        };
        problems.add(
            FLAG,
            format!("{world} ranks do not fit on the {devices} devices of {name}; {remedy}"),
        );
    }
}

/// Splits `FILE:HOSTS`; a file whose name contains the colon is taken as it is.
fn file_and_hosts(text: &str) -> (&str, Option<&str>) {
    match text.rsplit_once(':') {
        Some((file, hosts)) if !Path::new(text).exists() => (file, Some(hosts)),
        Some(_) | None => (text, None),
    }
}
