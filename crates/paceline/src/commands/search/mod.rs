//! `paceline search`: finds the best strategies for a model on a cluster.

mod pins;
mod plot;
pub(super) mod pool;
mod remedy;
mod table;

use crate::failure::Failure;
use crate::flags::{
    ClusterFlags, CommonFlags, Defaults, HeadroomFlags, Origins, Problems, WholeRunFlags, model,
    real, whole, word,
};
use crate::output::{Output, Second, StopRequest, StrategyRecord, write};
use crate::overview::count;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use paceline_plan::DType;
use paceline_plan::collective::SummationOrder;
use paceline_plan::model::Model;
use paceline_plan::strategy::{OptimizerKind, Store, Strategy};
use paceline_plan::units::Seconds;
use paceline_search::{Candidate, Counts, Progress, Request, SearchResult};
use paceline_sim::cluster::Cluster;
use paceline_sim::{Options, Profile};
use pins::PinFlags;
use serde::Serialize;
use std::cell::Cell;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;
use table::{Context, Record};

/// Find the best strategies for a model on a cluster, and prove it
///
/// Searches all of tensor, sequence, context, pipeline, expert and data parallelism, ZeRO stages,
/// schedules with their chunks, microbatches, recomputation, stage boundaries, offload, bucket sizes,
/// collectives and overlap. Bounds of time and memory exclude most of them; what is left is
/// simulated, best first, until nothing can be faster than the strategies listed. Ctrl-C ends the
/// search and lists what was found, with the time that may still be possible.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Model: a built-in name, a TOML file, or a directory with a Hugging Face config.json
    #[arg(long, value_name = "NAME|FILE|DIR", help_heading = "What")]
    model: Option<String>,
    #[command(flatten)]
    cluster: ClusterFlags,
    /// Another cluster to choose from, with --objective cost; may be repeated
    #[arg(long, value_name = "NAME[:HOSTS]|FILE[:HOSTS]", help_heading = "Cluster")]
    or_cluster: Vec<String>,
    /// Samples per iteration
    #[arg(long, value_name = "N", help_heading = "What")]
    global_batch: Option<String>,
    /// Number of devices to use, with --objective cost also several: 256,512 [default: all of the
    /// cluster]
    #[arg(long, value_name = "N", help_heading = "What")]
    ranks: Option<String>,
    /// Tokens per sample [default: the model's]
    #[arg(long, value_name = "N", help_heading = "What")]
    seq: Option<String>,
    /// Dtype of weights and activations [default: the best that the device has]
    #[arg(long, value_name = "TYPE", help_heading = "What")]
    dtype: Option<String>,
    /// Dtype of gradients [default: f32]
    #[arg(long, value_name = "TYPE", help_heading = "What")]
    grad_dtype: Option<String>,
    /// Order of the axes tp, cp, dp and pp, the innermost first: neighbouring ranks, which share a
    /// host, differ along it [default: tp-cp-dp-pp]
    #[arg(long, value_name = "AXIS-…", help_heading = "What")]
    axis_order: Option<String>,
    /// Optimizer: sgd, momentum, adamw, lamb or lars [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = "What")]
    optimizer: Option<String>,
    /// Size of the expert buffer as a multiple of an equal share; see `paceline simulate --help`
    /// [default: 1]
    #[arg(long, value_name = "FACTOR", help_heading = "What")]
    expert_buffer_factor: Option<String>,
    /// Software profile; see `paceline simulate --help` [default: modern]
    #[arg(long, value_name = "NAME", help_heading = "Cluster")]
    profile: Option<String>,
    #[command(flatten)]
    headroom: HeadroomFlags,
    #[command(flatten)]
    pins: PinFlags,
    /// Objective: the least time, or with --tokens the least cost
    #[arg(long, value_name = "time|cost", default_value = "time", help_heading = "Objective")]
    objective: String,
    /// Tokens to train on: 300B or 3e11; lists days
    #[arg(long, value_name = "N", help_heading = "Objective")]
    tokens: Option<String>,
    /// Price of one device for an hour; one for each cluster, separated by commas
    #[arg(long, value_name = "PRICE,…", help_heading = "Objective")]
    price: Option<String>,
    /// Days within which training must end, with --objective cost
    #[arg(long, value_name = "DAYS", help_heading = "Objective")]
    deadline: Option<String>,
    /// Number of strategies to list [default: 10]
    #[arg(long, value_name = "K", help_heading = "General")]
    top: Option<String>,
    /// Say by what each of the next best strategies loses
    #[arg(long, help_heading = "General")]
    explain: bool,
    /// Draw time against memory of the strategies listed, with the Pareto front, to an SVG file
    #[arg(long, value_name = "FILE.svg", help_heading = "General")]
    plot: Option<PathBuf>,
    /// Seconds after which the search stops and lists its results [default: no limit]
    #[arg(long, value_name = "SECONDS", help_heading = "General")]
    limit: Option<String>,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline search --model llama3-8b --cluster dgx-h100:2 --global-batch 128
  paceline search --model gpt3-175b --cluster dgx-a100:128 --global-batch 1536 --top 5 --explain
  paceline search --model llama3-8b --cluster dgx-h100:2 --global-batch 128 --tp 1,2 --schedule ^gpipe
  paceline search --model llama3-8b --cluster dgx-h100:4 --or-cluster dgx-a100:4 --ranks 16,32 \\
    --global-batch 128 --objective cost --price 3,1.8 --tokens 100B --deadline 60";

/// Objective of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Objective {
    Time,
    Cost,
}

impl std::str::FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "time" => Ok(Self::Time),
            "cost" => Ok(Self::Cost),
            other => Err(format!("'{other}' is none of time, cost")),
        }
    }
}

/// Cluster to choose from, its name as given, and the price of a device for an hour.
struct Offer {
    cluster: Cluster,
    name: String,
    price: Option<f64>,
}

/// Checked flags.
struct Checked {
    model: Model,
    offers: Vec<Offer>,
    /// Numbers of devices.
    ranks: Vec<u32>,
    base: Strategy,
    pins: paceline_search::Pins,
    options: Options,
    objective: Objective,
    tokens: Option<u64>,
    deadline: Option<f64>,
    top: usize,
    limit: Option<f64>,
}

/// Searches and prints the best strategies.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins.clone());
    let checked = flags.check(&mut problems);
    let (Some(checked), true) = (checked, problems.is_empty()) else {
        return Err(problems.into());
    };
    let output = flags.common.output();
    let watch = Watch::new(checked.limit, &output);
    match checked.objective {
        Objective::Time => fastest(flags, &checked, &watch, &output, origins)?,
        Objective::Cost => cheapest(flags, &checked, &watch, &output, origins)?,
    }
    watch.stop.status()
}

/// Lists the fastest strategies on one cluster.
fn fastest(
    flags: &Flags,
    checked: &Checked,
    watch: &Watch,
    output: &Output,
    origins: Origins,
) -> Result<(), Failure> {
    let offer = &checked.offers[0];
    let request = checked.request(&offer.cluster, checked.ranks[0]);
    let found = pool::search(&request, |progress| watch.goes_on(progress));
    watch.finish();
    if found.candidates.is_empty() {
        let (flag, text) = if found.counts.considered == 0 {
            remedy::empty(&request)
        } else if watch.is_over() {
            ("--limit", "nothing that fits was found before the search was stopped".to_owned())
        } else {
            remedy::nothing_fits(&request, || watch.is_over())
        };
        let text = match &found.closest {
            Some(closest) if found.counts.considered > 0 => format!(
                "{text}; the closest needs {} of {} ({})",
                closest.fit.needed,
                closest.fit.memory,
                StrategyRecord::from(&closest.strategy).flags()
            ),
            _ => text,
        };
        let mut problems = Problems::new(origins);
        problems.add(flag, text);
        return Err(problems.into());
    }
    let context = checked.context(flags, offer);
    if let Some(path) = &flags.plot {
        let title = format!("{} on {}", checked.model.name(), offer.cluster.name);
        let svg = plot::chart(title, &found.candidates).to_svg();
        write(path, svg.as_bytes())?;
    }
    let last = Last::new(&found, watch);
    if output.is_json() {
        for (index, candidate) in found.candidates.iter().enumerate() {
            output.print_json(&Record::new(index + 1, candidate, &context))?;
        }
        return Ok(output.print_json(&last)?);
    }
    let mut text = context.table(&found.candidates);
    if flags.explain {
        text.push_str(&table::explanation(&found.candidates));
    }
    text.push_str(&last.text(checked.model.name(), &offer.cluster.name, found.open));
    Ok(output.print(&text)?)
}

/// Lists the cheapest strategies over all clusters and numbers of devices.
fn cheapest(
    flags: &Flags,
    checked: &Checked,
    watch: &Watch,
    output: &Output,
    origins: Origins,
) -> Result<(), Failure> {
    let mut all: Vec<(f64, usize, Candidate)> = Vec::new();
    let mut counts = Counts::default();
    let mut open = None;
    for (at, offer) in checked.offers.iter().enumerate() {
        let context = checked.context(flags, offer);
        for &ranks in &checked.ranks {
            if u64::from(ranks) > offer.cluster.devices() || watch.is_over() {
                continue;
            }
            let request = checked.request(&offer.cluster, ranks);
            let found = pool::search(&request, |progress| watch.goes_on(progress));
            counts.considered += found.counts.considered;
            counts.bounded += found.counts.bounded;
            counts.simulated += found.counts.simulated;
            counts.nodes += found.counts.nodes;
            open = open.or(found.open);
            for candidate in found.candidates {
                let late = match (checked.deadline, context.days(&candidate)) {
                    (Some(deadline), Some(days)) => days > deadline,
                    _ => false,
                };
                if let (Some(cost), false) = (context.cost(&candidate), late) {
                    all.push((cost, at, candidate));
                }
            }
        }
    }
    watch.finish();
    all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    all.truncate(checked.top);
    if all.is_empty() {
        let mut problems = Problems::new(origins);
        let (flag, text) = match checked.deadline {
            Some(days) => (
                "--deadline",
                format!(
                    "no strategy that fits ends within {days} days; allow more, or more --ranks"
                ),
            ),
            None => ("--cluster", "no strategy fits on any of the clusters".to_owned()),
        };
        problems.add(flag, text);
        return Err(problems.into());
    }
    let last = Last::of(counts, open, watch);
    let contexts: Vec<Context<'_>> =
        checked.offers.iter().map(|offer| checked.context(flags, offer)).collect();
    if output.is_json() {
        for (index, (_, at, candidate)) in all.iter().enumerate() {
            output.print_json(&Record::new(index + 1, candidate, &contexts[*at]))?;
        }
        return Ok(output.print_json(&last)?);
    }
    let head = ["", "cluster", "devices", "strategy", "iteration", "days", "cost"];
    let rows = all.iter().enumerate().map(|(index, (cost, at, candidate))| {
        vec![
            (index + 1).to_string(),
            checked.offers[*at].name.clone(),
            candidate.strategy.mesh().world().to_string(),
            StrategyRecord::from(&candidate.strategy).flags(),
            candidate.iteration.to_string(),
            contexts[*at].days(candidate).map_or_else(String::new, |days| format!("{days:.1}")),
            format!("{cost:.0}"),
        ]
    });
    let mut text = crate::overview::table(&head, 4, rows);
    text.push('\n');
    for (index, (_, at, candidate)) in all.iter().enumerate() {
        text.push_str(&format!("{:>2}  {}\n", index + 1, contexts[*at].command(candidate)));
    }
    let names: Vec<&str> = checked.offers.iter().map(|offer| offer.name.as_str()).collect();
    text.push_str(&last.text(checked.model.name(), &names.join(", "), open));
    Ok(output.print(&text)?)
}

impl Flags {
    /// Checks every flag.
    fn check(&self, problems: &mut Problems) -> Option<Checked> {
        let model = model(self.model.as_deref(), problems);
        let cluster = self.cluster.required(problems);
        let objective: Option<Objective> =
            word("--objective", &Some(self.objective.clone()), problems);
        let objective = objective.unwrap_or(Objective::Time);
        let others: Vec<Option<Cluster>> = (self.or_cluster.iter())
            .map(|name| {
                ClusterFlags { cluster: Some(name.clone()), set: Vec::new() }.check(problems)
            })
            .collect();
        let batch = whole("--global-batch", self.global_batch.as_deref(), 1..=1 << 32, problems);
        if self.global_batch.is_none() {
            problems.add("--global-batch", "missing: number of samples of an iteration");
        }
        let available = cluster.as_ref().map_or(1, Cluster::devices).min(1 << 20);
        let most = others.iter().flatten().map(Cluster::devices).fold(available, u64::max);
        let ranks = self.ranks(objective, available, most, problems);
        let top = whole("--top", self.top.as_deref(), 1..=10_000, problems).unwrap_or(10);
        let limit = real("--limit", self.limit.as_deref(), 0.1..=1e6, problems);
        let deadline = real("--deadline", self.deadline.as_deref(), 1e-6..=1e6, problems);
        let profile: Profile = word("--profile", &self.profile, problems).unwrap_or_default();
        let memory_headroom = self.headroom.check(problems);
        let prices = self.prices(1 + others.len(), problems);
        let whole_run = WholeRunFlags { tokens: self.tokens.clone(), ..Default::default() };
        let tokens = whole_run.check(problems).tokens;
        self.check_objective(objective, problems);
        let mut pins = self.pins.check(problems);
        let base = self.base(model.as_ref(), cluster.as_ref(), batch, problems);
        let (model, cluster) = (model?, cluster?);
        pins::resolved(&mut pins, &cluster.fabric_with(&profile), problems);
        let names = self.cluster.cluster.iter().chain(&self.or_cluster).cloned();
        let clusters = std::iter::once(Some(cluster)).chain(others);
        let offers: Option<Vec<Offer>> = (clusters.zip(names).zip(prices))
            .map(|((cluster, name), price)| Some(Offer { cluster: cluster?, name, price }))
            .collect();
        Some(Checked {
            model,
            offers: offers?,
            ranks,
            base,
            pins,
            options: Options { profile, memory_headroom, ..Default::default() },
            objective,
            tokens,
            deadline,
            top: top as usize,
            limit,
        })
    }

    fn base(
        &self,
        model: Option<&Model>,
        cluster: Option<&Cluster>,
        batch: Option<u64>,
        problems: &mut Problems,
    ) -> Strategy {
        let defaults = Defaults::for_cluster(cluster, SummationOrder::Free);
        let seq = whole("--seq", self.seq.as_deref(), 1..=1 << 28, problems);
        if let (Some(seq), Some(model)) = (seq, model)
            && model.max_positions > 0
            && seq > model.max_positions
        {
            let most = model.max_positions;
            problems.add(
                "--seq",
                format!("{seq} is longer than {}'s {most} learned positions", model.name()),
            );
        }
        let factor = real(
            "--expert-buffer-factor",
            self.expert_buffer_factor.as_deref(),
            1.0..=1e9,
            problems,
        );
        Strategy {
            global_batch: batch.unwrap_or(1),
            seq: seq.or(model.map(|m| m.seq)).unwrap_or(1),
            dtype: word("--dtype", &self.dtype, problems).unwrap_or(defaults.dtype),
            grad_dtype: word("--grad-dtype", &self.grad_dtype, problems).unwrap_or(DType::F32),
            optimizer: word("--optimizer", &self.optimizer, problems)
                .unwrap_or(OptimizerKind::AdamW),
            order: SummationOrder::Free,
            axis_order: word("--axis-order", &self.axis_order, problems).unwrap_or_default(),
            store: Store::Host,
            expert_buffer_factor: factor.unwrap_or(1.0),
            ..Strategy::default()
        }
    }

    /// Numbers of devices.
    fn ranks(
        &self,
        objective: Objective,
        available: u64,
        most: u64,
        problems: &mut Problems,
    ) -> Vec<u32> {
        let limit = if objective == Objective::Cost { most } else { available };
        let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let Some(text) = &self.ranks else {
            // Every halving down to a host's worth may be cheaper.
            let halved = |n: &u64| (*n > 1 && n.is_multiple_of(2)).then(|| n / 2);
            let all = std::iter::successors(Some(limit), halved).take(6);
            return match objective {
                Objective::Time => vec![small(available)],
                Objective::Cost => all.map(small).collect(),
            };
        };
        let parts: Vec<&str> = text.split(',').collect();
        if parts.len() > 1 && objective == Objective::Time {
            problems.add("--ranks", "several numbers of devices need --objective cost");
        }
        let read = |part: &&str| whole("--ranks", Some(part), 1..=limit, problems).map(small);
        parts.iter().filter_map(read).collect()
    }

    /// Price of a device of each cluster.
    fn prices(&self, clusters: usize, problems: &mut Problems) -> Vec<Option<f64>> {
        let Some(text) = &self.price else { return vec![None; clusters] };
        let prices: Vec<Option<f64>> =
            text.split(',').map(|part| real("--price", Some(part), 0.0..=1e9, problems)).collect();
        if prices.len() != clusters {
            let given = prices.len();
            problems.add(
                "--price",
                format!("{given} prices for {clusters} clusters; give one for each"),
            );
        }
        prices
    }

    fn check_objective(&self, objective: Objective, problems: &mut Problems) {
        let cost = objective == Objective::Cost;
        let needs = [
            ("--or-cluster", !self.or_cluster.is_empty() && !cost, "--objective cost"),
            ("--deadline", self.deadline.is_some() && !cost, "--objective cost"),
            ("--price", self.price.is_some() && self.tokens.is_none(), "--tokens"),
            ("--objective", cost && self.tokens.is_none(), "--tokens"),
            ("--objective", cost && self.price.is_none(), "--price"),
            ("--explain", self.explain && cost, "--objective time"),
            ("--plot", self.plot.is_some() && cost, "--objective time"),
        ];
        for (flag, wrong, needed) in needs {
            if wrong {
                problems.add(flag, format!("needs {needed}"));
            }
        }
    }
}

impl Checked {
    fn request<'a>(&'a self, cluster: &'a Cluster, devices: u32) -> Request<'a> {
        Request {
            model: &self.model,
            cluster,
            devices,
            base: self.base.clone(),
            options: self.options,
            pins: self.pins.clone(),
            top: self.top,
            any_memory: false,
        }
    }

    fn context<'a>(&'a self, flags: &Flags, offer: &'a Offer) -> Context<'a> {
        Context {
            model: &self.model,
            cluster: &offer.cluster,
            names: (flags.model.clone().unwrap_or_default(), offer.name.clone()),
            tokens: self.tokens,
            price: offer.price,
        }
    }
}

/// Progress of searches: a line that is redrawn on a terminal, plain lines elsewhere.
struct Watch {
    start: Instant,
    limit: Option<f64>,
    stop: StopRequest,
    bar: ProgressBar,
    plain: bool,
    /// Seconds after which the next plain line is printed.
    next: Cell<f64>,
}

/// Seconds between plain lines.
const PLAIN_EVERY: f64 = 5.0;

impl Watch {
    fn new(limit: Option<f64>, output: &Output) -> Self {
        // Without a handler Ctrl-C ends the process at once, and only the list is lost.
        let stop = StopRequest::listen(Second::Exits).unwrap_or_default();
        let terminal = std::io::stderr().is_terminal();
        let quiet = output.is_json() || !terminal;
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new_spinner() };
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
            bar.set_style(style);
        }
        let plain = !terminal && !output.is_json();
        Self { start: Instant::now(), limit, stop, bar, plain, next: Cell::new(PLAIN_EVERY) }
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn is_over(&self) -> bool {
        let late = self.limit.is_some_and(|limit| self.seconds() > limit);
        late || self.stop.is_made()
    }

    /// Shows progress; returns false once the search must stop.
    fn goes_on(&self, progress: &Progress<'_>) -> bool {
        let due = self.plain && self.seconds() >= self.next.get();
        if due || !self.bar.is_hidden() {
            let best = progress.best.map_or_else(
                || "nothing fits so far".to_owned(),
                |best| {
                    let flags = StrategyRecord::from(&best.strategy).flags();
                    format!("best {}: {flags}", best.iteration)
                },
            );
            let message = format!(
                "{} nodes, {} simulated; nothing left below {}; {best}",
                count(progress.counts.nodes),
                count(progress.counts.simulated),
                progress.bound
            );
            if due {
                self.next.set(self.seconds() + PLAIN_EVERY);
                eprintln!("{:.0} s: {message}", self.seconds());
            }
            self.bar.set_message(message);
            self.bar.tick();
        }
        !self.is_over()
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Last line of a search.
#[derive(Serialize)]
struct Last {
    considered: u64,
    bounded: u64,
    simulated: u64,
    nodes: u64,
    search_s: f64,
    proven: bool,
    /// Least iteration time that is still possible, if the search was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    open_s: Option<f64>,
}

impl Last {
    fn new(found: &SearchResult, watch: &Watch) -> Self {
        Self::of(found.counts, found.open, watch)
    }

    fn of(counts: Counts, open: Option<Seconds>, watch: &Watch) -> Self {
        let Counts { considered, bounded, simulated, nodes } = counts;
        let (proven, open_s) = (open.is_none(), open.map(|open| open.0));
        Self { considered, bounded, simulated, nodes, search_s: watch.seconds(), proven, open_s }
    }

    fn text(&self, model: &str, cluster: &str, open: Option<Seconds>) -> String {
        let mut text = format!(
            "\n{} strategies of {model} on {cluster}: {} excluded by bounds, {} simulated, in {:.1} s\n",
            count(self.considered),
            count(self.bounded),
            count(self.simulated),
            self.search_s
        );
        if let Some(open) = open {
            text.push_str(&format!("stopped early: strategies of {open} may still be possible\n"));
        }
        text
    }
}
