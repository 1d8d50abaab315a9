//! Memory that the control groups of this process leave it: a container's limit is not the
//! machine's.

use std::fs;
use std::path::{Path, PathBuf};

/// Smallest number of bytes left in any enclosing control group; `None` without a limit.
pub(crate) fn room() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    room_in(&groups, |file| fs::read_to_string(file).ok())
}

/// File names of one version of control groups.
struct Version {
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// Field of memory that the kernel frees on demand: cached files.
    spare: &'static str,
}

const FIRST: Version = Version {
    mount: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    spare: "total_inactive_file",
};
const SECOND: Version = Version {
    mount: "/sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    spare: "inactive_file",
};

/// Computes the available memory. `groups` is `/proc/self/cgroup`: a line `number:controllers:path`
/// for each hierarchy; that of version 2 has no controllers.
fn room_in(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => SECOND,
            _ if controllers.split(',').any(|controller| controller == "memory") => FIRST,
            _ => continue,
        };
        let inside: PathBuf = path.trim_start_matches('/').into();
        // A limit applies to all groups below it. Inside a container the path may not exist, but
        // its root is the container's own group.
        for group in inside.ancestors() {
            let room = version.room(&Path::new(version.mount).join(group), &read);
            least = least.into_iter().chain(room).min();
        }
    }
    least
}

impl Version {
    fn room(&self, group: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
        let number = |name: &str| read(&group.join(name))?.trim().parse::<u64>().ok();
        // No limit is given as "max", or as a number beyond any machine's memory.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 60)?;
        let used = number(self.used)?;
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let spare =
            stat.lines().find_map(|line| line.strip_prefix(self.spare)?.trim().parse().ok());
        Some(limit.saturating_sub(used.saturating_sub(spare.unwrap_or(0))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        room_in(groups, |path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        })
    }

    #[test]
    fn the_tightest_group_around_counts() {
        let files = [
            ("/sys/fs/cgroup/a/memory.max", "1000\n"),
            ("/sys/fs/cgroup/a/memory.current", "300\n"),
            ("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "900\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "50\n"),
        ];
        assert_eq!(room("0::/a/b\n", &files), Some(800));
        assert_eq!(room("0::/a\n", &files), Some(800));
        assert_eq!(room("0::/other\n", &files), None);
    }

    #[test]
    fn the_first_version_and_no_limit_are_understood() {
        let files = [
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5"),
            ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "64"),
            ("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "100"),
        ];
        assert_eq!(room("5:cpu:/x\n4:memory:/\n", &files), None);
        assert_eq!(room("4:cpu,memory:/x\n", &files), Some(0), "more is used than allowed");
        assert_eq!(room("garbage\n::\n", &[("/sys/fs/cgroup/memory.max", "max")]), None);
    }
}
