//! Checks that a strategy fits a model; reports all problems at once, each with a fix.

use super::{check_experts, check_networks, check_replicas, tables};
use crate::collective::{self, Algorithm, CollectiveKind, SummationOrder};
use crate::dtype::DType;
use crate::model::{Body, Model, ModelKind};
use crate::schedule::{self, ScheduleKind, Versions};
use crate::strategy::{Offload, Split, Strategy, Sync, TableSharding, Zero};
use std::fmt;
use thiserror::Error;

/// One problem of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The flag to change.
    pub flag: &'static str,
    /// Description of the problem and of values that work.
    pub message: String,
}

/// All problems of a request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub struct Problems(pub Vec<Problem>);

impl Problems {
    /// A single problem.
    pub fn one(flag: &'static str, message: impl Into<String>) -> Self {
        Self(vec![Problem { flag, message: message.into() }])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            write!(f, "{newline}{}: {}", problem.flag, problem.message)?;
        }
        Ok(())
    }
}

/// Maximum number of ranks of a world.
const MAX_WORLD: u64 = 1 << 24;
/// Maximum number of ops of one role's program.
const MAX_OPS: u64 = 1 << 24;

/// Collects all problems of a strategy.
pub(super) fn check(model: &Model, s: &Strategy) -> Result<(), Problems> {
    let mut problems = Vec::new();
    let mut say = |flag, message: String| problems.push(Problem { flag, message });

    let axes = [
        ("--dp", s.dp),
        ("--tp", s.tp),
        ("--pp", s.pp),
        ("--cp", s.cp),
        ("--ep", s.ep),
        ("--etp", s.etp),
    ];
    let mut world: u64 = 1;
    for (flag, size) in axes {
        if size == 0 {
            say(flag, "must be at least 1".into());
        }
        if !matches!(flag, "--ep" | "--etp") {
            world = world.saturating_mul(u64::from(size.max(1)));
        }
    }
    if world > MAX_WORLD {
        say(
            "--dp",
            format!("the world would have {world} ranks; at most {MAX_WORLD} can be planned"),
        );
    }
    tensor(model, s, &mut say);
    images(model, s, &mut say);
    clicks(model, s, &mut say);
    check_networks::check(model, s, &mut say);
    context(model, s, &mut say);
    types(s, &mut say);
    check_experts::check(model, s, &mut say);
    stages(model, s, &mut say);
    if !s.schedule.flushes() {
        unflushed(model, s, &mut say);
    }
    batch(model, s, &mut say);
    synchronisation(s, &mut say);
    offload(s, &mut say);
    check_replicas::check(model, s, &mut say);
    if problems.is_empty() { Ok(()) } else { Err(Problems(problems)) }
}

fn tensor(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let tp = u64::from(s.tp.max(1));
    if model.kind != ModelKind::Mlp && !model.kv_heads.is_multiple_of(tp) {
        let heads = if model.kv_heads == model.heads { "heads" } else { "key-value heads" };
        let legal = divisors(model.kv_heads);
        say(
            "--tp",
            format!(
                "{tp} does not divide {}'s {} {heads}; these do: {legal}",
                model.name(),
                model.kv_heads
            ),
        );
    }
    // Experts are sharded along --etp; the layers for all tokens are sharded as in other models.
    let widths = model.shared_widths();
    for ffn in widths.into_iter().filter(|ffn| !ffn.is_multiple_of(tp)) {
        let legal = divisors(ffn);
        say(
            "--tp",
            format!("{tp} does not divide the feed-forward width {ffn}; these do: {legal}"),
        );
    }
    if s.sp && s.tp <= 1 {
        say("--sp", "sequence parallelism needs --tp 2 or more".into());
    }
    let tokens = s.micro_batch.saturating_mul(s.seq) / u64::from(s.cp.max(1));
    if s.sp && !tokens.is_multiple_of(tp) {
        say(
            "--sp",
            format!(
                "a microbatch's {tokens} tokens cannot be cut into {tp} equal parts; choose --micro-batch or --seq such that they can"
            ),
        );
    }
}

/// Rejects axes along which image networks cannot be sharded.
fn images(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let normed = match model.body() {
        Body::Images(_) => true,
        Body::Network(net) => net.has_batch_norm(),
        Body::Tokens {} | Body::Decoder { .. } | Body::Clicks(_) => false,
    };
    if !normed && s.sync_batch_norm {
        say("--sync-batch-norm", format!("{} has no batch norm; leave it out", model.name()));
        return;
    }
    if s.sync_batch_norm && !s.schedule.flushes() {
        say(
            "--sync-batch-norm",
            format!(
                "the replicas of {} do not keep in step; use a schedule that flushes",
                s.schedule
            ),
        );
    }
    if s.sync_batch_norm && (s.sync.is_async() || s.local.is_some()) {
        let why = "asynchronous or local-SGD replicas cannot share batch statistics";
        say("--sync-batch-norm", format!("{why}; leave it out"));
    }
    let Body::Images(net) = model.body() else { return };
    for (flag, size) in [("--tp", s.tp), ("--cp", s.cp)] {
        if size > 1 {
            say(
                flag,
                format!("{} is cut by images and by blocks; use --dp and --pp", model.name()),
            );
        }
    }
    if s.seq != 1 {
        say("--seq", format!("{} reads images, not sequences; leave it out", model.name()));
    }
    let images = s.micro_batch.saturating_mul(u64::from(s.dp.max(1)));
    if images.checked_mul(net.largest_activation()).is_none_or(|e| e >= 1 << 56) {
        say("--micro-batch", format!("{images} images at a time are more than can be counted"));
    }
}

/// Rejects options that recommendation models do not support.
fn clicks(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let Body::Clicks(net) = model.body() else {
        if s.table_sharding != TableSharding::Auto {
            say(
                "--table-sharding",
                format!("{} has no tables to shard; leave it out", model.name()),
            );
        }
        return;
    };
    for (flag, size) in [("--tp", s.tp), ("--cp", s.cp), ("--pp", s.pp)] {
        if size > 1 {
            say(
                flag,
                format!(
                    "{} is cut by samples and by tables; use --dp and --table-sharding",
                    model.name()
                ),
            );
        }
    }
    if s.seq != 1 {
        say("--seq", format!("{} reads clicks, not sequences; leave it out", model.name()));
    }
    let dealt = matches!(s.table_sharding, TableSharding::Table | TableSharding::Row);
    if dealt && !tables::in_step(s) {
        let (with, why) = match (s.local, s.sync) {
            (Some(_), _) => ("--local-steps".into(), "every replica has weights of its own"),
            (None, sync @ Sync::Servers(_)) => {
                (format!("--sync {sync}"), "servers hold the weights")
            }
            (None, sync) => {
                (format!("--sync {sync}"), "replicas do not wait for each other's rows")
            }
        };
        let works = "use --table-sharding replicate, or --sync all-reduce without --local-steps";
        say("--table-sharding", format!("{}: with {with} {why}; {works}", s.table_sharding));
    }
    let samples = s.micro_batch.saturating_mul(u64::from(s.dp.max(1)));
    if samples.checked_mul(net.largest_activation()).is_none_or(|e| e >= 1 << 56) {
        say("--micro-batch", format!("{samples} samples at a time are more than can be counted"));
    }
}

fn context(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let runs = u64::from(s.cp).saturating_mul(2);
    if s.cp > 1 && !s.seq.is_multiple_of(runs) {
        say(
            "--cp",
            format!(
                "{} tokens do not split into two equal runs for each of {} ranks; choose --seq as a multiple of {runs}",
                s.seq, s.cp
            ),
        );
    }
    if s.cp > 1 && model.depends_on_distance(s.seq) {
        say(
            "--cp",
            format!(
                "{}'s attention depends on distances between tokens (a window, chunks or ALiBi), which the \
                 ring does not know; use --cp 1",
                model.name()
            ),
        );
    }
    if s.cp > 1 && model.kind == ModelKind::Mlp {
        say("--cp", format!("{} has no attention to cut; use --dp", model.name()));
    }
    // Channels distinguish a layer's messages.
    if s.cp > 1 << 12 {
        say("--cp", format!("{} is more than the 4096 ranks that can pass things round", s.cp));
    }
}

fn types(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let trains =
        matches!(s.dtype, DType::F32 | DType::Bf16 | DType::F16) || s.dtype.is_of_products();
    if !trains {
        let works = "use f32, bf16, f16, fp8, nvfp4 or mxfp4";
        say("--dtype", format!("{} holds no weights; {works}", s.dtype));
    }
    if !matches!(s.grad_dtype, DType::F32 | DType::Bf16 | DType::F16) {
        say("--grad-dtype", format!("{} holds no gradients; use f32, bf16 or f16", s.grad_dtype));
    }
}

fn stages(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let chunks = u64::from(s.schedule.chunks());
    let stages = u64::from(s.pp).saturating_mul(chunks);
    // Embedding and head may each occupy a stage alone.
    let units = model.layers + 2;
    if s.pp > u32::from(u16::MAX) / 2 || stages > units {
        let what = if chunks > 1 {
            format!("{} × {chunks} chunks = {stages} stages", s.pp)
        } else {
            format!("{stages} stages")
        };
        say(
            "--pp",
            format!(
                "{what} are more than {}'s {} layers, embedding and head can fill; at most {} pipeline ranks work",
                model.name(),
                model.layers,
                (units / chunks.max(1)).max(1)
            ),
        );
        return;
    }
    if let Split::At(starts) = &s.split {
        let ends = starts.iter().skip(1).map(|&start| u64::from(start)).chain([units]);
        let rising =
            starts.iter().zip(ends).all(|(&start, end)| start > 0 && u64::from(start) < end);
        if starts.len() as u64 + 1 != stages || !rising {
            say(
                "--split",
                format!(
                    "{} does not cut {}'s {units} layers, embedding and head included, into {stages} stages; \
                     name the {} layers at which stages behind the first begin, in order",
                    s.split,
                    model.name(),
                    stages.saturating_sub(1)
                ),
            );
            return;
        }
    }
    let interleaved = match s.schedule {
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::ZbH1 { chunks: 1 }
        | ScheduleKind::PipeDream { .. } => false,
        ScheduleKind::Interleaved { .. } | ScheduleKind::ZbH1 { .. } | ScheduleKind::DualPipeV => {
            true
        }
    };
    if interleaved && s.pp < 2 {
        say("--schedule", format!("{} needs --pp 2 or more", s.schedule));
    }
    let (Ok(pp), m) = (u16::try_from(s.pp), s.microbatches()) else { return };
    let ops = u64::from(m).saturating_mul(model.layers / stages.max(1) + 2).saturating_mul(16);
    if pp > 0 && m > 0 {
        if ops > MAX_OPS {
            say(
                "--global-batch",
                format!(
                    "{m} microbatches an iteration make a program of about {ops} ops; at most {MAX_OPS} can be planned: raise --micro-batch or --dp"
                ),
            );
        } else if let Err(error) = schedule::order(s.schedule, pp, m) {
            say("--schedule", format!("{error}{}", unflushed_help(s)));
        }
    }
}

/// Hint on how to give a pipeline without flush the number of microbatches it requires.
fn unflushed_help(s: &Strategy) -> String {
    let samples = s.global_batch / u64::from(s.dp.max(1));
    match s.schedule {
        ScheduleKind::PipeDream { versions: Versions::Stashed } => format!(
            ": it updates after each; use --micro-batch {samples}, all of a replica's samples, or \
             pipedream:2bw, which adds several up"
        ),
        ScheduleKind::PipeDream { versions: Versions::Two } => {
            format!(
                "; raise --global-batch to {} or lower --micro-batch",
                u64::from(s.pp).saturating_mul(s.micro_batch).saturating_mul(u64::from(s.dp))
            )
        }
        ScheduleKind::GPipe
        | ScheduleKind::OneFOneB
        | ScheduleKind::Interleaved { .. }
        | ScheduleKind::ZbH1 { .. }
        | ScheduleKind::DualPipeV => String::new(),
    }
}

/// Rejects options that need stages to wait for each other, as a pipeline without flush does not.
fn unflushed(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let schedule = s.schedule;
    if model.experts.capacity > 0.0 {
        say(
            "--schedule",
            format!(
                "{schedule}: tokens that {}'s experts drop are counted iteration by iteration, and these \
                 run into each other; use 1f1b, or a model without a capacity",
                model.name()
            ),
        );
    }
    if (model.tied || model.mtp.depth > 0) && s.pp > 1 {
        say(
            "--schedule",
            format!(
                "{schedule}: the first and the last stage of {} share one table, for whose \
                 gradients they would wait for each other after every update; models with tables of their own \
                 run, mini-llama for one",
                model.name()
            ),
        );
    }
    if s.zero != Zero::None {
        say("--zero", format!("{schedule} keeps whole versions of the weights; use --zero 0"));
    }
    if s.sync != Sync::AllReduce {
        say("--sync", format!("{schedule} updates on its stages; use --sync all-reduce"));
    }
    if s.dtype == DType::F16 {
        say(
            "--dtype",
            format!(
                "f16 needs one loss scale, which the stages of {schedule} would have to agree on; use bf16 \
                 or f32"
            ),
        );
    }
}

fn offload(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if s.offload.optimizer() && s.sync.servers() > 0 {
        say(
            "--offload",
            format!(
                "with --sync {} the servers hold the optimizer's state; use none or activations",
                s.sync
            ),
        );
    }
    let schedule = s.schedule;
    if s.offload != Offload::None && !schedule.flushes() {
        say("--offload", format!("{schedule} has no idle time for transfers; use 1f1b or gpipe"));
    }
    if s.offload.activations() && schedule.splits_backward() {
        say(
            "--offload",
            format!(
                "{schedule} reads activations in two separate passes; use 1f1b, interleaved:V or gpipe"
            ),
        );
    }
}

fn batch(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if s.seq == 0 {
        say("--seq", "must be at least 1".into());
    }
    if model.max_positions > 0 && s.seq > model.max_positions {
        say(
            "--seq",
            format!(
                "{} is longer than {}'s {} learned positions",
                s.seq,
                model.name(),
                model.max_positions
            ),
        );
    }
    if s.micro_batch == 0 || s.global_batch == 0 {
        let flag = if s.micro_batch == 0 { "--micro-batch" } else { "--global-batch" };
        say(flag, "must be at least 1".into());
        return;
    }
    let step = s.micro_batch.saturating_mul(u64::from(s.dp.max(1)));
    if !s.global_batch.is_multiple_of(step) {
        let below = s.global_batch / step * step;
        let nearest = if below == 0 {
            step.to_string()
        } else {
            format!("{below} or {}", below.saturating_add(step))
        };
        say(
            "--global-batch",
            format!(
                "{} samples do not divide among {} replicas in microbatches of {}; {nearest} do",
                s.global_batch, s.dp, s.micro_batch
            ),
        );
    }
    let tokens = s.micro_batch.checked_mul(u64::from(s.dp)).and_then(|b| b.checked_mul(s.seq));
    let widest = model.vocab.max(model.ffn.saturating_mul(2)).max(model.d_model.saturating_mul(3));
    let heads = model.heads.saturating_mul(model.head_dim).saturating_mul(3);
    let copies = model.experts.topk.max(1);
    let widest = widest.max(heads).saturating_mul(copies).max(model.experts.experts);
    let fits = |t: u64| t.checked_mul(widest).is_some_and(|e| e < 1 << 56);
    if !tokens.is_some_and(fits) || s.global_batch.checked_mul(s.seq).is_none_or(|t| t >= 1 << 56) {
        say(
            "--micro-batch",
            format!(
                "{} samples of {} tokens on {} replicas are more than can be counted; use fewer",
                s.micro_batch, s.seq, s.dp
            ),
        );
    }
}

fn synchronisation(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let dp = s.dp.max(1);
    if s.order == SummationOrder::Canonical {
        let m = s.microbatches();
        if s.leaves == 0 || !s.leaves.is_multiple_of(dp) || !(s.leaves / dp).is_power_of_two() {
            say(
                "--leaves",
                format!(
                    "{} leaves do not divide among {dp} replicas; use {dp} times a power of two ({dp}, {}, {}…)",
                    s.leaves,
                    dp.saturating_mul(2),
                    dp.saturating_mul(4)
                ),
            );
        } else if m > 0 && !m.is_multiple_of(s.leaves / dp) {
            say(
                "--leaves",
                format!(
                    "each replica's {m} microbatches cannot form {} equal leaves; choose --leaves so that they can ({dp} always works)",
                    s.leaves / dp
                ),
            );
        }
    }
    let reducing = if s.zero == Zero::None {
        CollectiveKind::AllReduce
    } else {
        CollectiveKind::ReduceScatter
    };
    match s.sync {
        Sync::AllReduce => {
            if let Algorithm::ParameterServer { .. } = s.collective
                && s.zero != Zero::None
            {
                say("--collective", "ps keeps whole gradients on each replica; with --zero use auto, ring, halving-doubling or direct".into());
            }
            if let Err(error) =
                collective::resolve(reducing, s.collective, dp * s.cp.max(1), s.order)
            {
                say("--collective", error.to_string());
            }
        }
        Sync::Hogwild => {}
        Sync::Servers(_) | Sync::Async { .. } => {
            for (flag, size) in [("--tp", s.tp), ("--pp", s.pp), ("--cp", s.cp)] {
                if size > 1 {
                    say(
                        flag,
                        format!(
                            "parameter servers (--sync {}) serve whole replicas; use {flag} 1",
                            s.sync
                        ),
                    );
                }
            }
            if s.zero != Zero::None {
                say(
                    "--zero",
                    format!(
                        "with --sync {} the servers hold the optimizer state; use --zero 0",
                        s.sync
                    ),
                );
            }
        }
    }
}

/// Divisors of a number as a readable list.
pub(super) fn divisors(n: u64) -> String {
    let all: Vec<u64> = (1..=n.min(1 << 20)).filter(|d| n.is_multiple_of(*d)).take(12).collect();
    all.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}
