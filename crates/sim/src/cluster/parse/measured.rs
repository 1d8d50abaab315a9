//! The `[measured]` table of a cluster file, which `paceline calibrate` writes.
//!
//! ```toml
//! [measured]
//! cores = 2
//! core_round_trip = 5e-8             # seconds, cache-line ping-pong between two cores; optional
//! op_overhead = 3e-7                 # seconds, as all times here
//! exchange_overhead = 1e-6
//! load_time_per_token = 2e-8
//! copy_bandwidth = [{ bytes = 65536, solo = 6.4e10, all_cores = 6.4e10 }]
//! rank_skew = 0.01                   # relative drift between equal ranks; optional
//! cache_decay = [                    # fraction of the warm benefit lost after touching `bytes`; optional
//!   { bytes = 393216, solo = 0.1, all_cores = 0.2, path = 0.1, small_data = 0.1, large_data = 0.05 },
//! ]
//!
//! [[measured.kernel]]
//! name = "linear.forward"
//! dtype = "f32"
//! threads = 1                        # per rank; optional, 1 if absent
//! samples = [                        # times: warm, cold
//!   { shape = [64, 128, 128], work = 2097152.0, solo = [2e-5, 3e-5], all_cores = [2e-5, 4e-5] },
//! ]
//!
//! [[measured.transport]]
//! name = "thread"
//! messages = [                       # cold and cpu_oversubscribed: optional
//!   { bytes = 64, warm = 1e-5, cold = 4e-5, cpu_oversubscribed = 1e-3 },
//! ]
//!
//! [[measured.transport.collective]]
//! kind = "all_reduce"
//! algorithm = "halving-doubling"
//! ranks = 2
//! times = [{ bytes = 64, warm = 2e-5 }]
//! ```

use super::super::measured::{
    CacheDecay, CollectiveTable, CopyRate, ExchangeSample, KernelTable, Measured, Memory, Sample,
    TransportTable, WarmCold,
};
use super::reader::{Reader, count, text};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::located::{Entry, Section, Table, Value};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};

/// Keys that earlier versions of `paceline calibrate` wrote.
const RETIRED: [&str; 8] =
    ["apart", "per_op", "per_exchange", "per_token", "copies", "aging", "uneven", "wire"];

/// Maximum number of samples; more than any calibration takes.
const MOST: usize = 1 << 16;

impl Reader {
    /// Reads the table, if the file has one.
    pub(super) fn measured(&mut self, file: &Section<'_>) -> Option<Option<Measured>> {
        if file.get("measured").is_none() {
            return Some(None);
        }
        let section = self.errors.table(file, "measured", "[measured]")?;
        if let Some(key) = RETIRED.into_iter().find(|key| section.get(key).is_some()) {
            let what = format!("{} has '{key}', a key of an earlier version", section.label);
            self.errors.add(section.line_of(key), what, "calibrate again");
            return None;
        }
        self.errors.known_keys(
            &section,
            &[
                "cores",
                "threads",
                "core_round_trip",
                "op_overhead",
                "exchange_overhead",
                "load_time_per_token",
                "copy_bandwidth",
                "cache_decay",
                "rank_skew",
                "kernel",
                "transport",
            ],
        );
        let cores = self.errors.required(&section, "cores", "2", count);
        let threads = self.errors.given(&section, "threads", "1", count);
        let core_round_trip = self.errors.given(&section, "core_round_trip", "5e-8", time);
        let op_overhead =
            self.errors.optional(&section, "op_overhead", "3e-7", time, Seconds::ZERO);
        let exchange_overhead =
            self.errors.optional(&section, "exchange_overhead", "1e-6", time, Seconds::ZERO);
        let load_time_per_token =
            self.errors.optional(&section, "load_time_per_token", "2e-8", time, Seconds::ZERO);
        let example = "[{ bytes = 65536, solo = 6.4e10, all_cores = 6.4e10 }]";
        let copy_bandwidth = self.errors.required(&section, "copy_bandwidth", example, |value| {
            let copies = list(value, |fields| {
                let rate = |key| fields.of(key).and_then(positive).map(BytesPerSec);
                Ok(CopyRate {
                    bytes: size(fields.of("bytes")?)?,
                    solo: rate("solo")?,
                    all_cores: rate("all_cores")?,
                })
            })?;
            grows(copies, |copy: &CopyRate| copy.bytes)
        });
        let example = "[{ bytes = 393216, solo = 0.1, all_cores = 0.2, path = 0.1, small_data = 0.1, large_data = 0.05 }]";
        let read = |value: &Value| {
            let decay = list(value, |fields| {
                let share = |key| fields.of(key).and_then(share);
                Ok(CacheDecay {
                    bytes: size(fields.of("bytes")?)?,
                    solo: share("solo")?,
                    all_cores: share("all_cores")?,
                    path: share("path")?,
                    small_data: share("small_data")?,
                    large_data: share("large_data")?,
                })
            })?;
            grows(decay, |decay: &CacheDecay| decay.bytes)
        };
        let cache_decay = self.errors.optional(&section, "cache_decay", example, read, Vec::new());
        let rank_skew = self.errors.optional(&section, "rank_skew", "0.01", share, 0.0);
        let kernels = self.tables(&section, "kernel", Self::kernel_table);
        let transports = self.tables(&section, "transport", Self::transport_table);
        Some(Some(Measured {
            cores: cores?,
            threads: threads?,
            core_round_trip: core_round_trip?,
            op_overhead: op_overhead?,
            exchange_overhead: exchange_overhead?,
            load_time_per_token: load_time_per_token?,
            memory: Memory { copy_bandwidth: copy_bandwidth? },
            kernels: kernels?,
            cache_decay: cache_decay?,
            rank_skew: rank_skew?,
            transports: transports?,
        }))
    }

    /// Reads the tables of a list that may be absent.
    fn tables<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        mut read: impl FnMut(&mut Self, &Section<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(value) = section.get(key) else { return Some(Vec::new()) };
        let Some(tables) = value.list() else {
            let what = format!("{} has {key} = {}", section.label, value);
            let remedy = format!("write it as [[measured.{key}]] tables");
            self.errors.add(section.line_of(key), what, remedy);
            return None;
        };
        self.each(tables, key, |reader, table| read(reader, &table))
    }

    fn kernel_table(&mut self, section: &Section<'_>) -> Option<KernelTable> {
        self.errors.known_keys(section, &["name", "dtype", "threads", "samples"]);
        let name = self.errors.required(section, "name", "\"linear.forward\"", text);
        let dtype = self.errors.required(section, "dtype", "\"f32\"", |value| text(value)?.parse());
        let threads = self.errors.optional(section, "threads", "1", count, 1);
        let example = "[{ shape = [64, 64], work = 1e6, solo = [1e-6, 2e-6] }]";
        let samples =
            self.errors.required(section, "samples", example, |value| list(value, sample));
        let (name, dtype, samples): (String, DType, Vec<Sample>) = (name?, dtype?, samples?);
        Some(KernelTable { name, dtype, threads: threads?, samples })
    }

    fn transport_table(&mut self, section: &Section<'_>) -> Option<TransportTable> {
        self.errors.known_keys(section, &["name", "messages", "collective"]);
        let name = self.errors.required(section, "name", "\"thread\"", text);
        let messages = self.errors.required(section, "messages", EXCHANGES, exchanges);
        let collectives = self.tables(section, "collective", Self::collective_table);
        Some(TransportTable { name: name?, messages: messages?, collectives: collectives? })
    }

    fn collective_table(&mut self, section: &Section<'_>) -> Option<CollectiveTable> {
        self.errors.known_keys(section, &["kind", "algorithm", "ranks", "times"]);
        let kind = self.errors.required(section, "kind", "\"all_reduce\"", |value| {
            text(value)?.parse::<CollectiveKind>().map_err(|error| error.to_string())
        });
        let algorithm = self.errors.required(section, "algorithm", "\"ring\"", |value| {
            text(value)?.parse::<Algorithm>().map_err(|error| error.to_string())
        });
        let ranks = self.errors.required(section, "ranks", "2", count);
        let times = self.errors.required(section, "times", EXCHANGES, exchanges);
        Some(CollectiveTable { kind: kind?, algorithm: algorithm?, ranks: ranks?, times: times? })
    }
}

const EXCHANGES: &str = "[{ bytes = 64, warm = 2e-5 }]";

/// Fields of one entry of a list.
struct Fields<'a>(&'a Table);

impl<'a> Fields<'a> {
    fn of(&self, key: &str) -> Result<&'a Value, String> {
        let value = self.0.entries.get(key).map(|entry| &entry.value);
        value.ok_or_else(|| format!("an entry has no {key}"))
    }
}

fn list<T>(
    value: &Value,
    read: impl Fn(&Fields<'_>) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let entries = value.list().filter(|entries| (1..=MOST).contains(&entries.len()));
    let entries = entries.ok_or("it is not a list of entries")?;
    let entry = |(index, entry): (usize, &Entry)| {
        let table = entry.value.table().ok_or("an entry is not a table of keys and values");
        let read = table.map_err(str::to_owned).and_then(|table| read(&Fields(table)));
        read.map_err(|why| format!("entry {}: {why}", index + 1))
    };
    entries.iter().enumerate().map(entry).collect()
}

fn sample(fields: &Fields<'_>) -> Result<Sample, String> {
    let sizes = fields.of("shape")?.list();
    let sizes = sizes.filter(|sizes| (1..=4).contains(&sizes.len()));
    let sizes = sizes.ok_or("its shape is not a list of one to four sizes")?;
    let whole = |size: &Entry| size.value.whole(0..=u64::MAX).ok_or("a size is not a whole number");
    let solo = warm_cold(fields.of("solo")?)?;
    let all_cores = match fields.of("all_cores") {
        Ok(value) => warm_cold(value)?,
        Err(_) => solo,
    };
    Ok(Sample {
        shape: sizes.iter().map(whole).collect::<Result<_, _>>()?,
        work: positive(fields.of("work")?)?,
        solo,
        all_cores,
    })
}

fn warm_cold(value: &Value) -> Result<WarmCold, String> {
    let Some([warm, cold]) = value.list() else {
        return Err("its times are not a pair: warm, cold".into());
    };
    Ok(WarmCold { warm: Seconds(positive(&warm.value)?), cold: Seconds(positive(&cold.value)?) })
}

fn exchanges(value: &Value) -> Result<Vec<ExchangeSample>, String> {
    let entries = list(value, |fields| {
        let warm = Seconds(positive(fields.of("warm")?)?);
        let optional = |key| fields.of(key).ok().map(positive).transpose();
        let (cold, cpu_oversubscribed) = (optional("cold")?, optional("cpu_oversubscribed")?);
        let (cold, cpu_oversubscribed) = (cold.map(Seconds), cpu_oversubscribed.map(Seconds));
        Ok(ExchangeSample { bytes: size(fields.of("bytes")?)?, warm, cold, cpu_oversubscribed })
    })?;
    grows(entries, |entry| entry.bytes)
}

fn grows<T>(entries: Vec<T>, bytes: impl Fn(&T) -> Bytes) -> Result<Vec<T>, String> {
    let ordered = entries.windows(2).all(|pair| bytes(&pair[0]) < bytes(&pair[1]));
    if ordered { Ok(entries) } else { Err("its bytes do not grow from entry to entry".into()) }
}

fn share(value: &Value) -> Result<f64, String> {
    let share = value.number().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "a share is not a number from 0 to 1".into())
}

fn size(value: &Value) -> Result<Bytes, String> {
    value.whole(1..=u64::MAX).map(Bytes).ok_or_else(|| "bytes is not a number from 1 on".into())
}

fn time(value: &Value) -> Result<Seconds, String> {
    let seconds = value.number().filter(|seconds| (0.0..=1e3).contains(seconds));
    seconds.map(Seconds).ok_or_else(|| "it is not a number of seconds from 0 to 1000".into())
}

/// Parses a positive number with a finite logarithm and reciprocal.
fn positive(value: &Value) -> Result<f64, String> {
    let number = value.number().filter(|number| (1e-15..=1e30).contains(number));
    number.ok_or_else(|| "a value is not a number above 0".into())
}

#[cfg(test)]
mod tests {
    use super::super::super::{Cluster, measured, preset};

    #[test]
    fn a_measured_cluster_reads_back_as_itself() {
        let mut cluster = preset::get("laptop").unwrap();
        cluster.measured = Some(measured::tests::two_cores());
        let text = cluster.to_toml();
        assert_eq!(Cluster::parse(&text, "m.toml"), Ok(cluster), "{text}");
    }

    #[test]
    fn a_file_in_the_old_spelling_asks_for_a_new_calibration() {
        let mut cluster = preset::get("laptop").unwrap();
        cluster.measured = Some(measured::tests::two_cores());
        let text = cluster.to_toml().replacen("op_overhead", "per_op", 1);
        let problem = Cluster::parse(&text, "m.toml").unwrap_err().to_string();
        assert!(problem.contains("'per_op'") && problem.contains("calibrate again"), "{problem}");
    }

    #[test]
    fn problems_are_located_and_told_at_once() {
        let mut cluster = preset::get("laptop").unwrap();
        cluster.measured = Some(measured::tests::two_cores());
        let text = cluster.to_toml();
        let told = |from: &str, to: &str| {
            assert!(text.contains(from), "{text}");
            Cluster::parse(&text.replacen(from, to, 1), "m.toml").unwrap_err().to_string()
        };
        let cores = told("cores = 2", "cores = 0");
        assert!(cores.contains("[measured] has cores = 0"), "{cores}");
        let named = told("dtype = \"f32\"", "dtype = \"f33\"");
        assert!(named.contains("kernel 1 has dtype"), "{named}");
        let negative = told("op_overhead = 5e-7", "op_overhead = -1.0");
        assert!(negative.contains("op_overhead"), "{negative}");
        let order = told("bytes = 64,", "bytes = 9999999999,");
        assert!(order.contains("do not grow"), "{order}");
        let key = told("\nname = \"thread\"", "\nnmae = \"thread\"");
        assert!(key.contains("did you mean `name`?"), "{key}");
        let shape = told("shape = [32, 64, 64]", "shape = []");
        assert!(shape.contains("entry 1: its shape"), "{shape}");
        let value = told("cpu_oversubscribed = ", "cpu_oversubscribed = -1.0, x = ");
        assert!(value.contains("entry 1: a value is not a number above 0"), "{value}");
        let line = told("algorithm = ", "algorithm = 3 #");
        assert!(line.starts_with("m.toml:") && line.contains("algorithm"), "{line}");
    }
}
