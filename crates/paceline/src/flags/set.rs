//! `--set PATH=VALUE`: overrides one field of a cluster's description.
//!
//! A path is the field's name in a cluster file: `hosts`, `device.memory`, `device.peak.bf16`,
//! `dimension.0.bandwidth` or, by the dimension's name, `dimension.nvlink.bandwidth`. The change is
//! applied to the file's text form, and the result is parsed like any file. Every field can
//! therefore be set, and the result is always a valid cluster. `hosts=8` without the size of a
//! dimension resizes the cluster: its outermost dimension follows.

use super::number::short;
use super::{Problems, suggest};
use paceline_sim::cluster::Cluster;
use toml::Value;

const FLAG: &str = "--set";

/// Applies all changes in order; `None` if one of them is invalid.
pub(super) fn set(
    cluster: Cluster,
    changes: &[String],
    problems: &mut Problems,
) -> Option<Cluster> {
    if changes.is_empty() {
        return Some(cluster);
    }
    let name = format!("{} with {}", cluster.name, changes.join(", "));
    let (cluster, resized) = match resize(&cluster, changes) {
        Ok(None) => (cluster, false),
        Ok(Some(resized)) => (resized, true),
        Err(what) => {
            problems.add(FLAG, format!("hosts: {what}"));
            return None;
        }
    };
    let rest = changes.iter().filter(|change| !resized || hosts_of(change).is_none());
    // A host model that the file lacks follows from the other fields, so these change first.
    let (ports, rest): (Vec<&String>, Vec<&String>) =
        rest.partition(|change| cluster.host_ports.is_none() && is_of_host(change));
    let mut cluster = changed_fields(&cluster, &rest, problems)?;
    if let Some(first) = ports.first() {
        match cluster.with_ports() {
            Ok(with) => cluster = with,
            Err(what) => {
                problems.add(FLAG, format!("{}: {what}", short(first)));
                return None;
            }
        }
        cluster = changed_fields(&cluster, &ports, problems)?;
    }
    Some(Cluster { name, ..cluster })
}

/// Applies changes to the text form of a cluster.
fn changed_fields(
    cluster: &Cluster,
    changes: &[&String],
    problems: &mut Problems,
) -> Option<Cluster> {
    let mut file = Value::Table(cluster.to_toml().parse().ok()?);
    let wrong = problems.count();
    for change in changes {
        if let Err(what) = apply(&mut file, change) {
            problems.add(FLAG, format!("{}: {what}", short(change)));
        }
    }
    if problems.count() > wrong {
        return None;
    }
    let found = Cluster::parse(&toml::to_string(&file).ok()?, &cluster.name);
    // Line numbers would refer to generated text; the message names the section instead.
    let found = found.map_err(|errors| {
        for problem in errors.problems {
            problems.add(FLAG, format!("{}; {}", problem.what, problem.remedy));
        }
    });
    found.ok()
}

/// Returns true if a change is to a field of `[host]`.
fn is_of_host(change: &str) -> bool {
    change.trim_start().starts_with("host.")
}

/// The cluster with the last number of hosts among `changes`; `None` if there is none, or if the
/// changes state a size or shape themselves.
fn resize(cluster: &Cluster, changes: &[String]) -> Result<Option<Cluster>, String> {
    let sizes = |change: &String| {
        let path = change.split('=').next().unwrap_or_default().trim();
        path.starts_with("dimension.") && (path.ends_with(".size") || path.ends_with(".shape"))
    };
    let Some(text) = changes.iter().rev().find_map(|change| hosts_of(change)) else {
        return Ok(None);
    };
    let hosts = match changed(Some(&Value::Integer(cluster.hosts.into())), text) {
        Ok(Value::Integer(hosts)) => u32::try_from(hosts).ok(),
        Ok(_) => None,
        Err(what) => return Err(what),
    };
    match hosts.filter(|_| !changes.iter().any(sizes)) {
        Some(hosts) => cluster.with_hosts(hosts).map(Some),
        None => Ok(None),
    }
}

/// The value of a change to the number of hosts.
fn hosts_of(change: &str) -> Option<&str> {
    let (path, value) = change.split_once('=')?;
    (path.trim() == "hosts" && !value.trim().is_empty()).then(|| value.trim())
}

/// Returns true if a name is a path into a cluster's description rather than a flag.
pub(crate) fn is_cluster_path(name: &str) -> bool {
    name == "hosts" || name.split_once('.').is_some_and(|(first, _)| SECTIONS.contains(&first))
}

/// First components of paths with several components.
const SECTIONS: [&str; 7] =
    ["device", "dimension", "host", "link", "straggler", "bandwidth_schedule", "measured"];

fn apply(file: &mut Value, change: &str) -> Result<(), String> {
    let (path, text) =
        change.split_once('=').ok_or("write PATH=VALUE, for example device.memory=40GiB")?;
    let text = text.trim();
    if text.is_empty() {
        return Err("the value is missing".to_owned());
    }
    let parts: Vec<&str> = path.trim().split('.').collect();
    let (key, sections) = parts.split_last().ok_or("the path is missing")?;
    let mut place = file;
    for section in sections {
        place = enter(place, section)?;
    }
    let Value::Table(table) = place else {
        return Err(format!("'{key}' is not a field; {}", entries(place)));
    };
    let old = table.get(*key);
    if let Some(section @ (Value::Table(_) | Value::Array(_))) = old
        && !matches!(section, Value::Array(list) if list.iter().all(Value::is_integer))
    {
        return Err(format!("{} has fields of its own; {}", path.trim(), entries(section)));
    }
    let value = changed(old, text)?;
    table.insert((*key).to_owned(), value);
    Ok(())
}

/// Descends one path component: a key of a table, or the index or name of a list entry.
fn enter<'v>(place: &'v mut Value, key: &str) -> Result<&'v mut Value, String> {
    let known = entries(place);
    let names = names(place);
    let found = match place {
        Value::Table(table) => table.get_mut(key),
        Value::Array(list) => {
            let named = names.iter().position(|name| name == key);
            let index = key.parse().ok().or(named);
            index.and_then(|index: usize| list.get_mut(index))
        }
        _ => None,
    };
    found.ok_or_else(|| match suggest(key, names.iter().map(String::as_str)) {
        Some(meant) => format!("there is no '{}' (did you mean {meant}?)", short(key)),
        None => format!("there is no '{}'; {known}", short(key)),
    })
}

/// Valid next path components: the keys of a table, or the names of a list's entries.
fn names(place: &Value) -> Vec<String> {
    match place {
        Value::Table(table) => table.keys().cloned().collect(),
        Value::Array(list) => {
            let name = |entry: &Value| Some(entry.get("name")?.as_str()?.to_owned());
            list.iter().map(|entry| name(entry).unwrap_or_default()).collect()
        }
        _ => Vec::new(),
    }
}

fn entries(place: &Value) -> String {
    match place {
        Value::Array(list) if !list.is_empty() => {
            format!("use 0 to {} or a name: {}", list.len() - 1, names(place).join(", "))
        }
        Value::Table(_) => format!("there are: {}", names(place).join(", ")),
        _ => "there are none here".to_owned(),
    }
}

/// The new value: a multiple of the old one (`2x`), or any value that the field accepts.
fn changed(old: Option<&Value>, text: &str) -> Result<Value, String> {
    let factor = text.strip_suffix('x').and_then(|digits| digits.trim().parse::<f64>().ok());
    if let Some(factor) = factor {
        let old = old.ok_or("there is no value yet that could be multiplied")?;
        return multiple(old, factor);
    }
    if let Some(Value::String(_)) = old {
        return Ok(Value::String(text.trim_matches('"').to_owned()));
    }
    let read = format!("value = {text}").parse::<toml::Table>().ok();
    let read = read.and_then(|mut table| table.remove("value"));
    Ok(read.unwrap_or_else(|| Value::String(text.to_owned())))
}

fn multiple(old: &Value, factor: f64) -> Result<Value, String> {
    if !(factor.is_finite() && factor > 0.0) {
        return Err(format!("{factor} is not a factor above 0"));
    }
    match old {
        Value::Float(number) => Ok(Value::Float(number * factor)),
        Value::Integer(number) => {
            let scaled = *number as f64 * factor;
            if scaled.fract() != 0.0 || scaled > i64::MAX as f64 {
                return Err(format!("{number} times {factor} is not a whole number"));
            }
            Ok(Value::Integer(scaled as i64))
        }
        Value::String(quantity) => {
            let end = quantity.find(|c: char| !c.is_ascii_digit() && c != '.');
            let (number, unit) = quantity.split_at(end.unwrap_or(quantity.len()));
            let number: f64 =
                number.parse().map_err(|_| format!("'{quantity}' cannot be multiplied"))?;
            Ok(Value::String(format!("{}{unit}", number * factor)))
        }
        other => Err(format!("{other} cannot be multiplied")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
    use paceline_sim::cluster::{DimensionKind, FlopsPerSec, preset};

    fn changed_to(cluster: &str, changes: &[&str]) -> Result<Cluster, String> {
        let mut problems = Problems::default();
        let changes: Vec<String> = changes.iter().map(|change| (*change).to_owned()).collect();
        set(preset::get(cluster).unwrap(), &changes, &mut problems).ok_or(problems.to_string())
    }

    #[test]
    fn fields_are_set_by_their_names_in_the_file() {
        let cluster = changed_to(
            "dgx-a100:4",
            &[
                "dimension.0.bandwidth=160GB/s",
                "dimension.infiniband.latency = 9 us",
                "device.peak.bf16=2x",
                "device.peak.fp8=1979 TFLOP/s",
                "device.memory=\"40 GiB\"",
                "device.sustained_efficiency=0.5x",
                "dimension.1.oversubscription=4",
            ],
        )
        .unwrap();
        let [nvlink, fabric] = &cluster.dimensions[..] else { panic!("two dimensions") };
        assert_eq!(nvlink.bandwidth, BytesPerSec(160e9));
        assert_eq!(fabric.latency, Seconds(9e-6));
        assert_eq!(fabric.tree.unwrap().oversubscription, 4.0);
        assert_eq!(cluster.device.peak.bf16, Some(FlopsPerSec(624e12)));
        assert_eq!(cluster.device.peak.fp8, Some(FlopsPerSec(1979e12)));
        assert_eq!(cluster.device.memory, Bytes(40 << 30));
        assert_eq!(cluster.device.sustained_efficiency, 0.4);
        assert!(cluster.name.starts_with("dgx-a100:4 with dimension.0.bandwidth=160GB/s, "));
    }

    #[test]
    fn changes_that_need_each_other_are_made_together() {
        let cluster = changed_to("dgx-a100:4", &["dimension.1.size=3", "hosts=3"]).unwrap();
        assert_eq!((cluster.devices(), cluster.hosts), (24, 3));
        for hosts in ["hosts=3", "hosts = 3", "hosts=0.75x"] {
            let cluster = changed_to("dgx-a100:4", &[hosts, "device.memory=40GiB"]).unwrap();
            assert_eq!((cluster.devices(), cluster.hosts), (24, 3), "{hosts}");
        }
        let flat = changed_to("tpu-v4:16", &["dimension.0.shape=[64]", "dimension.0.size=64"]);
        let DimensionKind::Torus { shape, .. } = &flat.unwrap().dimensions[0].kind.clone() else {
            panic!("a torus")
        };
        assert_eq!(shape, &[64]);
    }

    /// Every preset whose hosts a switch joins has the host model that its description implies.
    #[test]
    fn fields_of_the_host_are_set_without_a_section_of_the_file() {
        for name in ["dgx1-v100:2", "dgx-a100:2", "dgx-h100:2", "dgx-b200:2", "gb200-nvl72:2"] {
            let preset = preset::get(name).unwrap();
            let fabric = |cluster: &Cluster| {
                let index = cluster.host_ports.as_ref().map_or(1, |ports| ports.dimension);
                let (from, to) = (paceline_plan::ids::Rank(0), cluster.devices() as u32 - 1);
                let path = cluster.link(from, paceline_plan::ids::Rank(to)).unwrap();
                (path.bandwidth.0, path.latency.0, cluster.dimensions[index].devices_per_link)
            };
            let same = changed_to(name, &["host.gpudirect=true"]).unwrap();
            assert_eq!(fabric(&same), fabric(&preset), "{name}");
            let staged =
                changed_to(name, &["host.gpudirect=false", "host.memory_bandwidth=50GB/s"]);
            let (staged, direct) = (fabric(&staged.unwrap()), fabric(&preset));
            assert!(staged.0 < direct.0, "{name}: {staged:?} {direct:?}");
        }
        let nics = |count: u32| {
            let change = format!("host.nics={count}");
            let cluster = changed_to("dgx-a100:2", &["dimension.1.bandwidth=20GB/s", &change]);
            let cluster = cluster.unwrap();
            (cluster.dimensions[1].bandwidth.0, cluster.dimensions[1].devices_per_link)
        };
        assert_eq!([nics(8), nics(2)], [(20e9, 1), (20e9, 4)]);
        let told = changed_to("dgx-a100:2", &["host.nics=3"]).unwrap_err();
        assert!(told.contains("make nics a divisor of 8"), "{told}");
        let told = changed_to("tpu-v4:4", &["host.nics=3"]).unwrap_err();
        assert!(told.contains("make nics a divisor of 4"), "{told}");
    }

    #[test]
    fn wrong_paths_and_values_say_what_would_work() {
        for (change, said) in [
            ("device.peek.bf16=2x", "there is no 'peek' (did you mean peak?)"),
            ("dimension.nvlnk.bandwidth=2x", "did you mean nvlink?"),
            ("dimension.7.bandwidth=2x", "use 0 to 1 or a name: nvlink, infiniband"),
            ("dimension.0.bandwith=2x", "no value yet"),
            ("dimension.0.bandwith=2 GB/s", "did you mean `bandwidth`?"),
            ("dimension.0.bandwidth=160", "the unit is missing"),
            ("dimension.0.size=0", "it is not a whole number"),
            ("dimension.0.size=0.3x", "8 times 0.3 is not a whole number"),
            ("dimension.0.bandwidth=-2x", "-2 is not a factor above 0"),
            ("dimension.0.bandwidth=1e999x", "inf is not a factor above 0"),
            ("device.peak=2x", "device.peak has fields of its own; there are: bf16, f16"),
            ("dimension=3", "use 0 to 1 or a name"),
            ("dimension.0=3", "'0' is not a field; use 0 to 1"),
            ("nonsense", "write PATH=VALUE"),
            ("hosts=", "the value is missing"),
            ("=3", "unknown key ''"),
            ("host=3", "make it a table of keys and values"),
            ("host.nic=3", "unknown key 'nic'"),
            ("hosts=0", "hosts: 0 hosts: use 1 to"),
            ("hosts=0.3x", "hosts: 4 times 0.3 is not a whole number"),
            ("hosts=many", "it is not a whole number"),
            ("hosts.0=3", "'0' is not a field; there are none here"),
        ] {
            let told = changed_to("dgx-a100:4", &[change]).unwrap_err();
            assert!(told.starts_with("error: --set: ") && told.contains(said), "{change}: {told}");
        }
    }

    #[test]
    fn paths_are_told_apart_from_flags() {
        for path in ["hosts", "device.memory", "dimension.0.size", "straggler.0.factor"] {
            assert!(is_cluster_path(path), "{path}");
        }
        for flag in ["dp", "model", "device", "dim.0.size"] {
            assert!(!is_cluster_path(flag), "{flag}");
        }
    }
}
