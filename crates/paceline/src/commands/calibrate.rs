//! `paceline calibrate`: measure this machine into a cluster file.

use crate::calibrate::{self, Calibrated, ProgressSink, Request, TRANSPORTS};
use crate::failure::Failure;
use crate::flags::{CommonFlags, Origins, Problems, whole};
use crate::output::{self, StopRequest};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use paceline_sim::cluster::Cluster;
use serde::Serialize;
use std::io::{self, IsTerminal};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Measure this machine into a cluster file
///
/// Times kernels by shape, warm and cold, alone and with every core busy. Also times messages and
/// collectives over every transport, and offloading. The file describes a cluster of one host,
/// which `plan`, `simulate`, `search` and `train` read with --cluster; measurements then replace
/// the cost model. No command uses the file unless it is given.
///
/// Takes four or five minutes, one with --quick. Other work on this machine distorts the
/// measurements, so keep it idle. Ctrl-C stops the calibration, and no file is written.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Flags {
    /// Cluster file to write
    #[arg(long, value_name = "FILE.toml")]
    out: Option<PathBuf>,
    /// Maximum number of threads to measure for one rank [default: all cores]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    threads: Option<String>,
    /// Numbers of ranks among which exchanges are timed [default: 2, all cores, and twice as many]
    #[arg(long, value_name = "N,N…", allow_negative_numbers = true)]
    ranks: Option<String>,
    /// Transports to time (thread, shm, tcp); predictions use the first [default: all]
    #[arg(long, value_name = "NAME,NAME…")]
    transport: Option<String>,
    /// Directory that `train` will offload to [default: the folder of the cluster file]
    #[arg(long, value_name = "DIR")]
    offload_dir: Option<PathBuf>,
    /// Use few shapes and short measurements
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    common: CommonFlags,
}

const EXAMPLES: &str = "\
Examples:
  paceline calibrate --out this-machine.toml
  paceline train --model mini --dp 2 --cluster this-machine.toml   predicted from measurements
  paceline calibrate --out quick.toml --quick --transport thread   a first look";

/// Upper limit of --ranks.
const MOST_RANKS: u64 = 64;
/// Upper limit of --threads: more than any processor has cores.
const MOST_THREADS: u64 = 1024;

/// Measures this machine and writes the cluster file.
pub(crate) fn run(flags: &Flags, origins: Origins) -> Result<(), Failure> {
    let mut problems = Problems::new(origins);
    let out = flags.destination(&mut problems);
    let request = flags.request(&mut problems);
    let Some(out) = out.filter(|_| problems.is_empty()) else { return Err(problems.into()) };
    let output = flags.common.output();
    let began = Instant::now();
    let stop = StopRequest::listen_or_note(&output, "not be heard");
    let line = Line::new();
    let progress = |share: f64, next: &str| line.show(share, next);
    let measured =
        calibrate::measure(&request, &ProgressSink { stop: stop.flag(), progress: &progress });
    line.bar.finish_and_clear();
    let Calibrated { cluster, elsewhere } = measured?;
    let text = format!("{}{}", header(&request), cluster.to_toml());
    output::write(&out, text.as_bytes()).map_err(|error| {
        Failure::flag("--out", format!("{} cannot be written: {error}", out.display()))
    })?;
    let record = Record::new(&cluster, &out, began.elapsed().as_secs_f64());
    output.print(&record.words())?;
    if elsewhere > 0 {
        output.note(&format!(
            "note: {elsewhere} measurements used another core placement than the usual one: predicted exchange times \
             may be off; `paceline bench core-to-core` shows whether cores migrate; calibrate again on an idle machine"
        ));
    }
    Ok(output.print_json(&record)?)
}

impl Flags {
    fn destination(&self, problems: &mut Problems) -> Option<PathBuf> {
        let Some(out) = &self.out else {
            problems.add("--out", "missing; for example --out this-machine.toml");
            return None;
        };
        if out.is_dir() {
            problems.add("--out", format!("{} is a directory", out.display()));
        } else if out.extension().is_none_or(|extension| extension != "toml") {
            // Other commands distinguish a file from a built-in name by the extension.
            problems.add("--out", format!("{} does not end in .toml", out.display()));
        }
        Some(out.clone())
    }

    fn request(&self, problems: &mut Problems) -> Request {
        let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = whole("--threads", self.threads.as_deref(), 1..=MOST_THREADS, problems);
        let threads = threads.and_then(|n| NonZeroUsize::new(usize::try_from(n).ok()?));
        let mut ranks: Vec<u32> = match self.ranks.as_deref() {
            Some(list) => (list.split(','))
                .filter_map(|text| whole("--ranks", Some(text), 1..=MOST_RANKS, problems))
                .filter_map(|ranks| u32::try_from(ranks).ok())
                .collect(),
            None => [2, cores.get(), cores.get() * 2].map(|ranks| ranks.min(64) as u32).to_vec(),
        };
        ranks.sort_unstable();
        ranks.dedup();
        let transports = match self.transport.as_deref() {
            None | Some("auto") => TRANSPORTS.to_vec(),
            Some(list) => (list.split(','))
                .filter_map(|text| {
                    let known = TRANSPORTS.into_iter().find(|t| t.name() == text.trim());
                    if known.is_none() {
                        let message =
                            format!("'{text}' cannot be measured; thread, shm and tcp can");
                        problems.add("--transport", message);
                    }
                    known
                })
                .collect(),
        };
        let out_dir = self.out.as_deref().and_then(Path::parent);
        let out_dir = out_dir.filter(|folder| !folder.as_os_str().is_empty());
        let offload_dir = self.offload_dir.as_deref().or(out_dir).unwrap_or(Path::new("."));
        Request {
            cores,
            threads: threads.unwrap_or(cores),
            ranks,
            transports,
            offload_dir: offload_dir.to_owned(),
            quick: self.quick,
        }
    }
}

/// Comment at the top of the cluster file.
fn header(request: &Request) -> String {
    let how = if request.quick { " --quick" } else { "" };
    format!(
        "# Written by `paceline calibrate{how}` (version {}): one host, each rank a device.\n\
         # Measurements replace the model where they answer; see docs/calibration.md.\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// Progress display: a bar on a terminal, a few plain lines elsewhere.
struct Line {
    bar: ProgressBar,
    shown: std::cell::Cell<u32>,
}

impl Line {
    fn new() -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(100) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("measuring {bar:24} {pos} % {msg}  {eta} left");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("━╸─"));
        }
        Self { bar, shown: std::cell::Cell::new(0) }
    }

    fn show(&self, share: f64, next: &str) {
        let percent = (share.clamp(0.0, 1.0) * 100.0) as u32;
        self.bar.set_position(percent.into());
        self.bar.set_message(next.to_owned());
        if self.bar.is_hidden() && percent >= self.shown.get() + 20 {
            self.shown.set(percent / 20 * 20);
            // Progress is lost if standard error is closed; that is no failure.
            let _ = io::Write::write_fmt(
                &mut io::stderr(),
                format_args!("measured {percent} %: {next} is next\n"),
            );
        }
    }
}

/// Summary of the measurements.
#[derive(Serialize)]
struct Record {
    file: String,
    processor: String,
    cores: u32,
    kernels: usize,
    samples: usize,
    /// Best GEMM rate on one core, in FLOP/s.
    product_flops_per_s: f64,
    /// Copy bandwidth from memory: one core alone, and each core with all busy.
    copy_bytes_per_s: [f64; 2],
    /// Core round trip.
    core_round_trip_s: Option<f64>,
    transports: Vec<TransportRecord>,
    op_overhead_s: f64,
    took_s: f64,
}

#[derive(Serialize)]
struct TransportRecord {
    transport: String,
    latency_s: f64,
    bytes_per_s: f64,
    collectives: usize,
}

impl Record {
    fn new(cluster: &Cluster, out: &Path, took_s: f64) -> Self {
        let measured = cluster.measured.as_ref();
        let kernels = || measured.iter().flat_map(|m| &m.kernels);
        let copy = measured.and_then(|m| m.memory.copy_bandwidth.last());
        let transports = measured.iter().flat_map(|m| &m.transports).map(|table| TransportRecord {
            transport: table.name.clone(),
            latency_s: table.messages.first().map_or(0.0, |m| m.warm.0),
            bytes_per_s: table.messages.last().map_or(0.0, |m| m.bytes.as_f64() / m.warm.0),
            collectives: table.collectives.len(),
        });
        Self {
            file: out.display().to_string(),
            processor: cluster.device.name.clone(),
            cores: measured.map_or(1, |m| m.cores),
            kernels: kernels().count(),
            samples: kernels().map(|table| table.samples.len()).sum(),
            product_flops_per_s: cluster.device.peak.f32.0,
            copy_bytes_per_s: copy.map_or([0.0; 2], |c| [c.solo.0, c.all_cores.0]),
            core_round_trip_s: measured.and_then(|m| m.core_round_trip).map(|time| time.0),
            transports: transports.collect(),
            op_overhead_s: measured.map_or(0.0, |m| m.op_overhead.0),
            took_s,
        }
    }

    fn words(&self) -> String {
        let [alone, together] = self.copy_bytes_per_s.map(|rate| rate / 1e9);
        let mut text = format!(
            "{}, {} core{}: {} samples of {} kernels in {:.0} s\n\
             products  up to {:.0} GFLOP/s on one core\n\
             copies    {alone:.1} GB/s on one core, {together:.1} on each of all at once\n",
            self.processor,
            self.cores,
            if self.cores == 1 { "" } else { "s" },
            self.samples,
            self.kernels,
            self.took_s,
            self.product_flops_per_s / 1e9,
        );
        if let Some(apart) = self.core_round_trip_s {
            text += &format!("cores     {:.0} ns from one to another and back\n", apart * 1e9);
        }
        for wire in &self.transports {
            text += &format!(
                "{:<9} {:.1} µs, {:.1} GB/s\n",
                wire.transport,
                wire.latency_s * 1e6,
                wire.bytes_per_s / 1e9
            );
        }
        text + &format!("written   {} (give it to --cluster)\n", self.file)
    }
}
