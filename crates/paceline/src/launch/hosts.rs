//! Lists of hosts, as mpirun and DeepSpeed write them.

use std::path::Path;

/// A host and the number of ranks it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Host {
    /// Name, with the user if one is given: `user@name`.
    pub(crate) name: String,
    /// Number of ranks; `None` for as many as the host has cores, or GPUs.
    pub(crate) slots: Option<u32>,
}

/// Maximum number of ranks of one host in a list.
const MOST_SLOTS: u32 = 1024;

/// Reads a hostfile, or a list `h1:8,h2:8`. An error names file and line.
pub(crate) fn parse(text: &str) -> Result<Vec<Host>, String> {
    let path = Path::new(text);
    let (entries, place): (Vec<(usize, String)>, _) = match path.is_file() {
        true => {
            let file = std::fs::read_to_string(path).map_err(|error| format!("{text}: {error}"))?;
            let lines = file.lines().map(|line| line.split('#').next().unwrap_or("").trim());
            let lines = (1..).zip(lines).filter(|(_, line)| !line.is_empty());
            (lines.map(|(number, line)| (number, line.to_owned())).collect(), Some(text))
        }
        false => {
            let entries = text.split(',').map(|entry| entry.trim().to_owned());
            ((1..).zip(entries).collect(), None)
        }
    };
    let mut hosts: Vec<Host> = Vec::new();
    for (number, entry) in entries {
        let host = read(&entry).map_err(|problem| match place {
            Some(file) => format!("{file}, line {number}: {problem}"),
            None => problem,
        })?;
        // As for mpirun, a host that is named again takes that number more.
        match hosts.iter_mut().find(|known| known.name == host.name) {
            Some(known) => {
                known.slots = Some(known.slots.unwrap_or(1) + host.slots.unwrap_or(1));
            }
            None => hosts.push(host),
        }
    }
    if hosts.is_empty() {
        return Err(format!("{text} names no host"));
    }
    Ok(hosts)
}

/// Reads `name`, `name:8`, `[::1]:8` or `name slots=8 max_slots=8`.
fn read(entry: &str) -> Result<Host, String> {
    let mut words = entry.split_whitespace();
    let name = words.next().unwrap_or_default();
    let (name, mut slots) = match name.rsplit_once(':') {
        Some((name, count)) if !name.contains(':') || name.ends_with(']') => {
            (name, Some(number(count, entry)?))
        }
        _ => (name, None),
    };
    for word in words {
        match word.split_once('=') {
            Some(("slots", count)) => slots = Some(number(count, entry)?),
            // mpirun's limit for oversubscription: this program starts no more than there are slots.
            Some(("max_slots" | "max-slots", _)) => {}
            _ => return Err(format!("'{word}' in '{entry}' is unknown; 'host slots=8' is known")),
        }
    }
    let name = name.trim_start_matches('[').trim_end_matches(']').to_owned();
    // A name that begins like an option would become one of ssh.
    if name.is_empty() || name.starts_with('-') {
        return Err(format!("'{entry}' is not a host; 'host slots=8' and 'host:8' are"));
    }
    Ok(Host { name, slots })
}

fn number(count: &str, entry: &str) -> Result<u32, String> {
    let found = count.parse().ok().filter(|count| (1..=MOST_SLOTS).contains(count));
    found.ok_or_else(|| format!("'{entry}' has '{count}' slots; 1 to {MOST_SLOTS} are possible"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, slots: impl Into<Option<u32>>) -> Host {
        Host { name: name.to_owned(), slots: slots.into() }
    }

    #[test]
    fn lists_name_hosts_and_slots() {
        let found = parse("a:8,b:4, user@c").unwrap();
        assert_eq!(found, [host("a", 8), host("b", 4), host("user@c", None)]);
        assert_eq!(parse("a,a").unwrap(), [host("a", 2)]);
        assert_eq!(
            parse("[fe80::1]:2,fe80::2").unwrap(),
            [host("fe80::1", 2), host("fe80::2", None)]
        );
    }

    #[test]
    fn hostfiles_of_mpirun_and_deepspeed_are_read() {
        let file = std::env::temp_dir().join(format!("paceline-hosts-{}", std::process::id()));
        std::fs::write(&file, "# cluster\nworker-1 slots=4\n\nworker-2 slots=2 max_slots=4 # x\n")
            .unwrap();
        let name = file.display().to_string();
        assert_eq!(parse(&name).unwrap(), [host("worker-1", 4), host("worker-2", 2)]);
        std::fs::write(&file, "worker-1 slots=4\nworker-2 slots=many\n").unwrap();
        let error = parse(&name).unwrap_err();
        assert!(
            error.contains(&format!("{name}, line 2: ")) && error.contains("'many'"),
            "{error}"
        );
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for list in ["", "a:0", "a:x", ":4", "-oProxyCommand=x:1", "a cores=4"] {
            assert!(parse(list).is_err(), "{list}");
        }
    }
}
