//! A described cluster with another number of hosts.

use super::{Cluster, DimensionKind};

impl Cluster {
    /// The cluster with `hosts` hosts of the same kind: the outermost dimension gets more or fewer
    /// members.
    ///
    /// Hosts that fill no whole unit of that dimension are spread evenly over as few units as hold
    /// them: 64 hosts of `gb200-nvl72` are four racks of 16, as such jobs are placed. The error
    /// says why a cluster cannot be resized, and what to do.
    pub fn with_hosts(&self, hosts: u32) -> Result<Self, String> {
        let each = self.devices_per_host();
        let devices = each * u64::from(hosts);
        if hosts == 0 || devices > Self::MAX_DEVICES {
            let most = Self::MAX_DEVICES / each;
            return Err(format!("{hosts} hosts: use 1 to {most}"));
        }
        let mut resized = self.clone();
        resized.hosts = hosts;
        let Some((outermost, inner)) = resized.dimensions.split_last_mut() else {
            return Err("the cluster has no dimension".to_owned());
        };
        let unit: u64 = inner.iter().map(|dimension| u64::from(dimension.size)).product();
        if self.hosts == 1 && hosts > 1 && unit < each {
            return Err(format!(
                "{} describes one host and no network between hosts; add a [[dimension]] for it",
                self.name
            ));
        }
        let units = devices.div_ceil(unit);
        if outermost.size as u64 != units {
            fixed(&outermost.kind, &outermost.name)?;
        }
        // At most MAX_DEVICES, which fits.
        outermost.size = units as u32;
        if units * unit != devices {
            let share = devices / units;
            let below: u64 = inner.iter().rev().skip(1).map(|d| u64::from(d.size)).product();
            let even = devices.is_multiple_of(units)
                && share.is_multiple_of(below)
                && share.is_multiple_of(each);
            let Some(next) = inner.last_mut().filter(|_| even) else {
                let name = &self.name;
                return Err(format!("{hosts} hosts cannot be spread evenly over {name}"));
            };
            fixed(&next.kind, &next.name)?;
            next.size = (share / below) as u32;
        }
        Ok(resized)
    }
}

/// Refuses to change the size of a dimension whose links are listed or shaped.
fn fixed(kind: &DimensionKind, name: &str) -> Result<(), String> {
    let what = match kind {
        DimensionKind::Ring | DimensionKind::Switch | DimensionKind::FullyConnected => {
            return Ok(());
        }
        DimensionKind::Torus { .. } => "a torus: set its shape and the number of hosts together",
        DimensionKind::Graph { .. } => "a graph of listed links: describe it in a file",
    };
    Err(format!("the dimension {name} is {what}"))
}

#[cfg(test)]
mod tests {
    use super::super::preset;

    fn sizes(name: &str, hosts: u32) -> Result<Vec<u32>, String> {
        let resized = preset::get(name).unwrap().with_hosts(hosts)?;
        assert_eq!(resized.hosts, hosts);
        Ok(resized.dimensions.iter().map(|dimension| dimension.size).collect())
    }

    #[test]
    fn hosts_are_added_along_the_outermost_dimension() {
        assert_eq!(sizes("dgx-a100", 8), Ok(vec![8, 8]));
        assert_eq!(sizes("dgx-a100:16", 8), Ok(vec![8, 8]));
        assert_eq!(
            preset::get("dgx-h100").unwrap().with_hosts(4).unwrap().dimensions,
            preset::get("dgx-h100:4").unwrap().dimensions
        );
    }

    #[test]
    fn racks_are_filled_evenly() {
        assert_eq!(sizes("gb200-nvl72", 36), Ok(vec![72, 2]));
        assert_eq!(sizes("gb200-nvl72", 64), Ok(vec![64, 4]));
        assert_eq!(sizes("gb200-nvl72:4", 8), Ok(vec![32, 1]));
        assert!(sizes("gb200-nvl72", 37).unwrap_err().contains("evenly"));
    }

    #[test]
    fn what_cannot_be_resized_says_why() {
        assert!(sizes("tpu-v4:16", 8).unwrap_err().contains("set its shape"));
        assert!(sizes("dgx-a100", 0).unwrap_err().contains("use 1 to"));
        let mut one = preset::get("dgx-a100").unwrap();
        one.dimensions.pop();
        assert!(one.with_hosts(2).unwrap_err().contains("no network between hosts"));
    }
}
