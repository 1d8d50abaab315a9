//! The `[measured]` table of a cluster file, which `paceline calibrate` writes.
//!
//! ```toml
//! [measured]
//! cores = 2
//! apart = 5e-8                       # a word from a core to another and back; optional
//! per_op = 3e-7                      # seconds, as all times here
//! per_exchange = 1e-6
//! per_token = 2e-8
//! copies = [{ bytes = 65536, alone = 6.4e10, together = 6.4e10 }]
//! uneven = 0.01                      # how far ranks come apart; optional
//! aging = [                          # what caches lose while ranks compute; optional
//!   { bytes = 393216, alone = 0.1, together = 0.2, wires = 0.1, small = 0.1, large = 0.05 },
//! ]
//!
//! [[measured.kernel]]
//! name = "linear.forward"
//! dtype = "f32"
//! threads = 1                        # of each rank; optional, 1 if absent
//! samples = [                        # times: operands in the cache, operands in memory
//!   { shape = [64, 128, 128], work = 2097152.0, alone = [2e-5, 3e-5], together = [2e-5, 4e-5] },
//! ]
//!
//! [[measured.wire]]
//! transport = "thread"
//! messages = [                       # cold and crowded: optional
//!   { bytes = 64, time = 1e-5, cold = 4e-5, crowded = 1e-3 },
//! ]
//!
//! [[measured.wire.collective]]
//! kind = "all_reduce"
//! algorithm = "halving-doubling"
//! ranks = 2
//! times = [{ bytes = 64, time = 2e-5 }]
//! ```

use super::super::measured::{
    Aged, CollectiveTable, CopyRate, Exchange, KernelTable, Measured, Memory, Sample, Temperatures,
    Wire,
};
use super::reader::{Reader, Section, count, integer, number, shown, text};
use paceline_plan::DType;
use paceline_plan::collective::{Algorithm, CollectiveKind};
use paceline_plan::units::{Bytes, BytesPerSec, Seconds};
use toml::Spanned;
use toml::de::DeValue;

/// More samples than any calibration takes.
const MOST: usize = 1 << 16;

impl Reader<'_> {
    /// The table, if the file has one.
    pub(super) fn measured(&mut self, file: &Section<'_>) -> Option<Option<Measured>> {
        if file.get("measured").is_none() {
            return Some(None);
        }
        let section = self.table(file, "measured", "[measured]")?;
        self.known_keys(
            &section,
            &[
                "cores",
                "threads",
                "apart",
                "per_op",
                "per_exchange",
                "per_token",
                "copies",
                "aging",
                "uneven",
                "kernel",
                "wire",
            ],
        );
        let cores = self.required(&section, "cores", "2", count);
        let some = |value: &DeValue<'_>| count(value).map(Some);
        let threads = self.optional(&section, "threads", "1", some, None);
        let some = |value: &DeValue<'_>| time(value).map(Some);
        let apart = self.optional(&section, "apart", "5e-8", some, None);
        let per_op = self.optional(&section, "per_op", "3e-7", time, Seconds::ZERO);
        let per_exchange = self.optional(&section, "per_exchange", "1e-6", time, Seconds::ZERO);
        let per_token = self.optional(&section, "per_token", "2e-8", time, Seconds::ZERO);
        let example = "[{ bytes = 65536, alone = 6.4e10, together = 6.4e10 }]";
        let copies = self.required(&section, "copies", example, |value| {
            let copies = list(value, |fields| {
                let rate = |key| fields.of(key).and_then(positive).map(BytesPerSec);
                Ok(CopyRate {
                    bytes: size(fields.of("bytes")?)?,
                    alone: rate("alone")?,
                    together: rate("together")?,
                })
            })?;
            grows(copies, |copy: &CopyRate| copy.bytes)
        });
        let example = "[{ bytes = 393216, alone = 0.1, together = 0.2, wires = 0.1, small = 0.1, large = 0.05 }]";
        let read = |value: &DeValue<'_>| {
            let aging = list(value, |fields| {
                let share = |key| fields.of(key).and_then(share);
                Ok(Aged {
                    bytes: size(fields.of("bytes")?)?,
                    alone: share("alone")?,
                    together: share("together")?,
                    wires: share("wires")?,
                    small: share("small")?,
                    large: share("large")?,
                })
            })?;
            grows(aging, |aged: &Aged| aged.bytes)
        };
        let aging = self.optional(&section, "aging", example, read, Vec::new());
        let uneven = self.optional(&section, "uneven", "0.01", share, 0.0);
        let kernels = self.tables(&section, "kernel", Self::kernel_table);
        let wires = self.tables(&section, "wire", Self::wire);
        Some(Some(Measured {
            cores: cores?,
            threads: threads?,
            apart: apart?,
            per_op: per_op?,
            per_exchange: per_exchange?,
            per_token: per_token?,
            memory: Memory { copies: copies? },
            kernels: kernels?,
            aging: aging?,
            uneven: uneven?,
            wires: wires?,
        }))
    }

    /// The tables of a list that may be absent.
    fn tables<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        mut read: impl FnMut(&mut Self, &Section<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(value) = section.get(key) else { return Some(Vec::new()) };
        let Some(tables) = value.get_ref().as_array() else {
            let what = format!("{} has {key} = {}", section.label, shown(value.get_ref()));
            let remedy = format!("write it as [[measured.{key}]] tables");
            self.problem(section.span_of(key), what, remedy);
            return None;
        };
        let read: Vec<_> = (tables.iter().enumerate())
            .map(|(index, value)| {
                let table = self.as_table(value, format!("{key} {}", index + 1))?;
                read(self, &table)
            })
            .collect();
        read.into_iter().collect()
    }

    fn kernel_table(&mut self, section: &Section<'_>) -> Option<KernelTable> {
        self.known_keys(section, &["name", "dtype", "threads", "samples"]);
        let name = self.required(section, "name", "\"linear.forward\"", text);
        let dtype = self.required(section, "dtype", "\"f32\"", |value| text(value)?.parse());
        let threads = self.optional(section, "threads", "1", count, 1);
        let example = "[{ shape = [64, 64], work = 1e6, alone = [1e-6, 2e-6] }]";
        let samples = self.required(section, "samples", example, |value| list(value, sample));
        let (name, dtype, samples): (String, DType, Vec<Sample>) = (name?, dtype?, samples?);
        Some(KernelTable { name, dtype, threads: threads?, samples })
    }

    fn wire(&mut self, section: &Section<'_>) -> Option<Wire> {
        self.known_keys(section, &["transport", "messages", "collective"]);
        let transport = self.required(section, "transport", "\"thread\"", text);
        let messages = self.required(section, "messages", EXCHANGES, exchanges);
        let collectives = self.tables(section, "collective", Self::collective_table);
        Some(Wire { transport: transport?, messages: messages?, collectives: collectives? })
    }

    fn collective_table(&mut self, section: &Section<'_>) -> Option<CollectiveTable> {
        self.known_keys(section, &["kind", "algorithm", "ranks", "times"]);
        let kind = self.required(section, "kind", "\"all_reduce\"", |value| {
            text(value)?.parse::<CollectiveKind>().map_err(|error| error.to_string())
        });
        let algorithm = self.required(section, "algorithm", "\"ring\"", |value| {
            text(value)?.parse::<Algorithm>().map_err(|error| error.to_string())
        });
        let ranks = self.required(section, "ranks", "2", count);
        let times = self.required(section, "times", EXCHANGES, exchanges);
        Some(CollectiveTable { kind: kind?, algorithm: algorithm?, ranks: ranks?, times: times? })
    }
}

const EXCHANGES: &str = "[{ bytes = 64, time = 2e-5 }]";

/// The fields of one entry of a list.
struct Fields<'a>(&'a toml::de::DeTable<'a>);

impl<'a> Fields<'a> {
    fn of(&self, key: &str) -> Result<&'a DeValue<'a>, String> {
        let value = self.0.get(key).map(Spanned::get_ref);
        value.ok_or_else(|| format!("an entry has no {key}"))
    }
}

fn list<T>(
    value: &DeValue<'_>,
    read: impl Fn(&Fields<'_>) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let entries = value.as_array().filter(|entries| (1..=MOST).contains(&entries.len()));
    let entries = entries.ok_or("it is no list of entries")?;
    let entry = |(index, value): (usize, &Spanned<DeValue<'_>>)| {
        let table = value.get_ref().as_table().ok_or("an entry is no table of keys and values");
        let read = table.map_err(str::to_owned).and_then(|table| read(&Fields(table)));
        read.map_err(|why| format!("entry {}: {why}", index + 1))
    };
    entries.iter().enumerate().map(entry).collect()
}

fn sample(fields: &Fields<'_>) -> Result<Sample, String> {
    let sizes = fields.of("shape")?.as_array();
    let sizes = sizes.filter(|sizes| (1..=4).contains(&sizes.len()));
    let sizes = sizes.ok_or("its shape is no list of one to four sizes")?;
    let whole = |value: &Spanned<DeValue<'_>>| {
        let whole = value.get_ref().as_integer().and_then(integer);
        whole.and_then(|size| u64::try_from(size).ok()).ok_or("a size is no whole number")
    };
    let alone = temperatures(fields.of("alone")?)?;
    let together = match fields.of("together") {
        Ok(value) => temperatures(value)?,
        Err(_) => alone,
    };
    Ok(Sample {
        shape: sizes.iter().map(whole).collect::<Result<_, _>>()?,
        work: positive(fields.of("work")?)?,
        alone,
        together,
    })
}

fn temperatures(value: &DeValue<'_>) -> Result<Temperatures, String> {
    let times: Vec<_> = value.as_array().into_iter().flatten().map(Spanned::get_ref).collect();
    let [warm, cold] = times[..] else { return Err("its times are no pair: warm, cold".into()) };
    Ok(Temperatures { warm: Seconds(positive(warm)?), cold: Seconds(positive(cold)?) })
}

fn exchanges(value: &DeValue<'_>) -> Result<Vec<Exchange>, String> {
    let entries = list(value, |fields| {
        let time = Seconds(positive(fields.of("time")?)?);
        let optional = |key| fields.of(key).ok().map(positive).transpose();
        let (cold, crowded) = (optional("cold")?, optional("crowded")?);
        let (cold, crowded) = (cold.map(Seconds), crowded.map(Seconds));
        Ok(Exchange { bytes: size(fields.of("bytes")?)?, time, cold, crowded })
    })?;
    grows(entries, |entry| entry.bytes)
}

fn grows<T>(entries: Vec<T>, bytes: impl Fn(&T) -> Bytes) -> Result<Vec<T>, String> {
    let ordered = entries.windows(2).all(|pair| bytes(&pair[0]) < bytes(&pair[1]));
    if ordered { Ok(entries) } else { Err("its bytes do not grow from entry to entry".into()) }
}

fn share(value: &DeValue<'_>) -> Result<f64, String> {
    let share = number(value).filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "a share is no number from 0 to 1".into())
}

fn size(value: &DeValue<'_>) -> Result<Bytes, String> {
    let whole = value.as_integer().and_then(integer).and_then(|size| u64::try_from(size).ok());
    whole.filter(|&size| size > 0).map(Bytes).ok_or_else(|| "bytes is no number from 1 on".into())
}

fn time(value: &DeValue<'_>) -> Result<Seconds, String> {
    let seconds = number(value).filter(|seconds| (0.0..=1e3).contains(seconds));
    seconds.map(Seconds).ok_or_else(|| "it is no number of seconds from 0 to 1000".into())
}

/// A number that can be divided by, and whose logarithm is a number.
fn positive(value: &DeValue<'_>) -> Result<f64, String> {
    let number = number(value).filter(|number| (1e-15..=1e30).contains(number));
    number.ok_or_else(|| "a value is no number above 0".into())
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
        let negative = told("per_op = 5e-7", "per_op = -1.0");
        assert!(negative.contains("per_op"), "{negative}");
        let order = told("bytes = 64,", "bytes = 9999999999,");
        assert!(order.contains("do not grow"), "{order}");
        let key = told("transport = ", "transprt = ");
        assert!(key.contains("did you mean transport?"), "{key}");
        let shape = told("shape = [32, 64, 64]", "shape = []");
        assert!(shape.contains("entry 1: its shape"), "{shape}");
        let crowded = told("crowded = ", "crowded = -1.0, x = ");
        assert!(crowded.contains("entry 1: a value is no number above 0"), "{crowded}");
        let line = told("algorithm = ", "algorithm = 3 #");
        assert!(line.starts_with("m.toml:") && line.contains("algorithm"), "{line}");
    }
}
