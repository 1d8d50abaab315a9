//! Parser for `[[link]]`, `[[straggler]]`, `[[bandwidth_schedule]]` and further `[[device]]`s.

use super::PLACE_KEYS;
use super::reader::{Reader, measured, ratio, text, whole};
use crate::cluster::quantity::{RATE, TIME};
use crate::cluster::{
    BandwidthChange, BandwidthSchedule, Cluster, Device, DeviceOverride, Heterogeneity, IndexRange,
    LinkOverride, Selector, Straggler,
};
use paceline_plan::located::{Section, Value};
use paceline_plan::suggest::suggest;
use paceline_plan::units::{BytesPerSec, Seconds};

/// Maximum number of entries of one kind; every rank is compared with each.
const MAX_ENTRIES: usize = 4096;

impl Reader {
    /// Reads the overrides of a cluster whose other parts have been read.
    pub(super) fn heterogeneity(
        &mut self,
        file: &Section<'_>,
        cluster: &Cluster,
        kinds: Vec<(Section<'_>, Device)>,
    ) -> Option<Heterogeneity> {
        let kinds: Vec<_> = (kinds.into_iter())
            .map(|(section, device)| {
                let at = self.named_place(&section, cluster)?;
                Some(DeviceOverride { at, device })
            })
            .collect();
        let links = self.entries(file, "link", |reader, section| reader.link(section, cluster));
        let stragglers =
            self.entries(file, "straggler", |reader, section| reader.straggler(section, cluster));
        let schedules = self.entries(file, "bandwidth_schedule", |reader, section| {
            reader.schedule(section, cluster)
        });
        let kinds = kinds.into_iter().collect::<Option<_>>()?;
        Some(Heterogeneity {
            kinds,
            links: links?,
            stragglers: stragglers?,
            schedules: schedules?,
            ..Heterogeneity::default()
        })
    }

    /// Reads all tables of one name, in order.
    fn entries<T>(
        &mut self,
        file: &Section<'_>,
        key: &str,
        mut read: impl FnMut(&mut Self, &Section<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let Some(value) = file.get(key) else { return Some(Vec::new()) };
        let Some(tables) = value.list().filter(|all| all.len() <= MAX_ENTRIES) else {
            let what = format!("{key} is {}", value);
            let remedy = format!("write [[{key}]] tables, at most {MAX_ENTRIES}");
            self.errors.add(file.line_of(key), what, remedy);
            return None;
        };
        self.each(tables, &format!("[[{key}]]"), |reader, section| read(reader, &section))
    }

    fn link(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<LinkOverride> {
        self.errors.known_keys(
            section,
            &[&["dimension", "bandwidth", "latency"], &PLACE_KEYS[..]].concat(),
        );
        let dimension = self.dimension_named(section, cluster);
        let at = self.named_place(section, cluster);
        let rate = |value: &Value| measured(value, &RATE).map(BytesPerSec);
        let bandwidth = self.errors.given(section, "bandwidth", RATE.example, rate)?;
        let time = |value: &Value| measured(value, &TIME).map(Seconds);
        let latency = self.errors.given(section, "latency", TIME.example, time)?;
        if bandwidth.is_none() && latency.is_none() {
            let what = format!("{} changes nothing", section.label);
            let remedy = "give its links a bandwidth, a latency or both";
            self.errors.add(section.table.line, what, remedy);
        }
        Some(LinkOverride { dimension: dimension?, at: at?, bandwidth, latency })
    }

    fn straggler(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<Straggler> {
        self.errors.known_keys(section, &[&["factor", "from", "until"], &PLACE_KEYS[..]].concat());
        let at = self.named_place(section, cluster);
        let factor = self.errors.required(section, "factor", "1.5", ratio);
        let time = |value: &Value| measured(value, &TIME).map(Seconds);
        let from = self.errors.optional(section, "from", "\"2 s\"", time, Seconds::ZERO);
        let until = self.errors.given(section, "until", "\"4 s\"", time);
        let (from, until) = (from?, until?);
        if until.is_some_and(|until| until <= from) {
            let what = format!("{} is over before it starts", section.label);
            let remedy = "make until later than from, or leave it out";
            self.errors.add(section.line_of("until"), what, remedy);
        }
        Some(Straggler { at: at?, factor: factor?, from, until })
    }

    fn schedule(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<BandwidthSchedule> {
        self.errors.known_keys(section, &[&["dimension", "changes"], &PLACE_KEYS[..]].concat());
        let dimension = self.dimension_named(section, cluster);
        let at = self.place(section, cluster);
        let example = "[{ at = \"1 s\", bandwidth = 0.5 }]";
        self.errors.required(section, "changes", example, |value| match value.list() {
            Some(list) if !list.is_empty() && list.len() <= MAX_ENTRIES => Ok(()),
            Some(_) | None => Err("it is not a list of changes".into()),
        })?;
        let list = section.get("changes")?.list()?;
        let label = format!("{} change", section.label);
        let changes = self.each(list, &label, |reader, change| reader.change(&change))?;
        if !changes.is_sorted_by(|a, b| a.at < b.at) {
            let what = format!("the changes of {} are not in order of time", section.label);
            let remedy = "let each be later than the one before";
            self.errors.add(section.line_of("changes"), what, remedy);
        }
        Some(BandwidthSchedule { dimension: dimension?, at: at?, changes })
    }

    fn change(&mut self, section: &Section<'_>) -> Option<BandwidthChange> {
        self.errors.known_keys(section, &["at", "bandwidth"]);
        let at = self.quantity(section, "at", &TIME);
        let bandwidth = self.errors.required(section, "bandwidth", "0.5", |value| {
            let number = value.number().filter(|factor| (1e-6..=1e6).contains(factor));
            number.ok_or_else(|| "it is not a factor from 0.000001 to 1000000".into())
        });
        Some(BandwidthChange { at: Seconds(at?), bandwidth: bandwidth? })
    }

    /// Index of the dimension that a section names.
    pub(super) fn dimension_named(
        &mut self,
        section: &Section<'_>,
        cluster: &Cluster,
    ) -> Option<usize> {
        let names = || cluster.dimensions.iter().map(|dimension| dimension.name.as_str());
        let example = format!("{:?}", names().next_back().unwrap_or_default());
        self.errors.required(section, "dimension", &example, |value| {
            let name = text(value)?;
            names().position(|known| known == name).ok_or_else(|| match suggest(&name, names()) {
                Some(meant) => format!("there is no such dimension, perhaps you mean \"{meant}\""),
                None => {
                    let names: Vec<_> = names().collect();
                    format!("there is no such dimension (there are: {})", names.join(", "))
                }
            })
        })
    }

    /// Selector of a section that must have one.
    fn named_place(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<Selector> {
        let place = self.place(section, cluster)?;
        if place == Selector::Everywhere {
            let what = format!("{} has neither hosts nor ranks", section.label);
            let remedy = "add for example hosts = [1] or ranks = [3, \"8-15\"]";
            self.errors.add(section.table.line, what, remedy);
            return None;
        }
        Some(place)
    }

    /// Selector of a section; `Everywhere` by default.
    fn place(&mut self, section: &Section<'_>, cluster: &Cluster) -> Option<Selector> {
        let runs = |count: u64| {
            move |value: &Value| {
                let list =
                    value.list().filter(|list| !list.is_empty() && list.len() <= MAX_ENTRIES);
                let list = list.ok_or("it is not a list of numbers")?;
                list.iter().map(|item| run(&item.value, count)).collect::<Result<Vec<_>, _>>()
            }
        };
        let hosts = self.errors.given(section, "hosts", "[1]", runs(cluster.hosts.into()))?;
        let ranks =
            self.errors.given(section, "ranks", "[3, \"8-15\"]", runs(cluster.devices()))?;
        match (hosts, ranks) {
            (None, None) => Some(Selector::Everywhere),
            (Some(hosts), None) => Some(Selector::Hosts(hosts)),
            (None, Some(ranks)) => Some(Selector::Ranks(ranks)),
            (Some(_), Some(_)) => {
                let what = format!("{} has both hosts and ranks", section.label);
                let remedy = "leave one of them out, or write two entries";
                self.errors.add(section.line_of("ranks"), what, remedy);
                None
            }
        }
    }
}

/// Parses a number below `count`, or two of them with a dash between.
fn run(value: &Value, count: u64) -> Result<IndexRange, String> {
    let last = count.saturating_sub(1);
    let Some(text) = value.text() else {
        return whole(value, 0, last).map(IndexRange::one);
    };
    parse_run(text).filter(|run| u64::from(run.last) <= last && run.first <= run.last).ok_or_else(
        || format!("\"{text}\" is not a range of numbers from 0 to {last} such as \"0-{last}\""),
    )
}

fn parse_run(text: &str) -> Option<IndexRange> {
    let (first, last) = text.split_once('-')?;
    let end = |text: &str| text.trim().parse().ok();
    Some(IndexRange { first: end(first)?, last: end(last)? })
}
