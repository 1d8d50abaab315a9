//! Checks a strategy's replica synchronisation: asynchronous, local SGD or compressed.

use crate::collective::{self, CollectiveKind, SummationOrder};
use crate::compress::{Codec, Compression};
use crate::dtype::DType;
use crate::model::{Body, Model};
use crate::outer_optimizer::LocalSgd;
use crate::strategy::{Offload, OptimizerKind, Strategy, Sync, Zero};

/// Collects problems of the replica synchronisation.
pub(super) fn check(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if s.sync.is_async() {
        asynchronous(s, say);
    }
    if s.sync == Sync::Hogwild {
        sharing(s, say);
    }
    if let (Body::Clicks(_), true) = (model.body(), s.sync.is_async() && s.dtype != DType::F32) {
        say(
            "--dtype",
            format!("tables stay f32, and what {} serves has one type; use --dtype f32", s.sync),
        );
    }
    if let Some(local) = s.local {
        local_sgd(s, local, say);
    }
    if s.compress != Compression::None {
        compression(s, say);
    }
    if s.has_compress_warmup() {
        warm_up(s, say);
    }
}

/// Rejects options that asynchronous replicas do not support.
fn asynchronous(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let sync = s.sync;
    if s.order == SummationOrder::Canonical {
        say(
            "--order",
            format!(
                "canonical order is bitwise repeatable, and {sync} applies gradients in order of arrival; use --order free"
            ),
        );
    }
    if s.optimizer.needs_tensor_norms() {
        say(
            "--optimizer",
            format!(
                "{} needs norms of whole tensors, and {sync} has no point where all parts are known; use sgd, momentum or adamw",
                s.optimizer
            ),
        );
    }
}

/// Rejects options that replicas with shared weights do not support.
fn sharing(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let sync = s.sync;
    for (flag, size) in [("--tp", s.tp), ("--pp", s.pp), ("--cp", s.cp)] {
        if size > 1 {
            say(flag, format!("with --sync {sync} every rank is a whole replica; use {flag} 1"));
        }
    }
    if s.zero != Zero::None {
        say("--zero", format!("with --sync {sync} the state is there once already; use --zero 0"));
    }
    if s.offload != Offload::None {
        say(
            "--offload",
            format!("{sync} keeps what all ranks share in memory; use --offload none"),
        );
    }
    if s.dtype != DType::F32 || s.grad_dtype != DType::F32 {
        let works = "use --dtype f32 --grad-dtype f32";
        say("--dtype", format!("{sync} updates shared weights one f32 at a time; {works}"));
    }
}

/// Rejects options that local SGD does not support.
fn local_sgd(s: &Strategy, local: LocalSgd, say: &mut impl FnMut(&'static str, String)) {
    let steps = local.steps;
    let flag = "--local-steps";
    if steps == 0 || !s.microbatches().is_multiple_of(steps) {
        say(
            flag,
            format!(
                "each replica's {} microbatches cannot make {steps} updates of equally many; choose \
                 --global-batch as a multiple of {}",
                s.microbatches(),
                u64::from(steps.max(1)).saturating_mul(s.micro_batch).saturating_mul(s.dp.into())
            ),
        );
    }
    if s.dp <= 1 {
        say(flag, "--local-steps needs at least 2 replicas; use --dp 2 or more".into());
    }
    for (other, size) in [("--pp", s.pp), ("--cp", s.cp)] {
        if size > 1 {
            say(other, format!("{flag} needs whole replicas; use {other} 1"));
        }
    }
    if s.zero != Zero::None {
        say("--zero", format!("{flag}: each replica has a state of its own; use --zero 0"));
    }
    if s.sync != Sync::AllReduce {
        say("--sync", format!("{flag}: replicas compare among themselves; use --sync all-reduce"));
    }
    if s.offload != Offload::None {
        say("--offload", format!("{flag} keeps all its state in memory; use --offload none"));
    }
    if s.dtype != DType::F32 || s.grad_dtype != DType::F32 {
        say("--dtype", format!("{flag} compares weights in f32; use --dtype f32 --grad-dtype f32"));
    }
    if s.order == SummationOrder::Canonical {
        say(
            "--order",
            format!(
                "canonical order gives the same bits for every --dp, and with {flag} replicas diverge; use --order free"
            ),
        );
    }
    if s.optimizer.needs_tensor_norms() {
        say(
            "--optimizer",
            format!("{flag} runs with sgd, momentum and adamw, not with {}", s.optimizer),
        );
    }
}

/// Rejects options that a compression warm-up does not support.
fn warm_up(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let flag = "--compress-warmup";
    if s.compress == Compression::None {
        say(flag, "nothing is compressed after it; name a --compress".into());
    }
    if s.local.is_some() {
        let why = "replicas in local SGD exchange no gradients";
        say(flag, format!("{why}; leave it out"));
    }
    if s.exchanges_moments() && s.offload.optimizer() {
        let why = "after a warm-up first moments are exchanged, and must be at hand";
        let works = "use --offload none or activations, or --optimizer momentum";
        say("--offload", format!("{} with {}: {why}; {works}", s.compress, s.optimizer));
    }
}

/// Rejects options that compressed gradients do not support.
fn compression(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let compress = s.compress;
    if s.dp.saturating_mul(s.cp) <= 1 {
        say(
            "--compress",
            format!("{compress}: a single replica sends its gradients nowhere; use --dp 2 or more"),
        );
    }
    if s.order == SummationOrder::Canonical {
        say(
            "--order",
            format!(
                "canonical order gives the same bits for every --dp, and {compress} rounds per sender; use --order free"
            ),
        );
    }
    if s.zero != Zero::None {
        say("--zero", format!("{compress} gives every replica the whole sum; use --zero 0"));
    }
    if s.sync != Sync::AllReduce {
        say(
            "--sync",
            format!("{compress} is for gradients between replicas; use --sync all-reduce"),
        );
    }
    if s.dtype == DType::F16 {
        say(
            "--dtype",
            format!(
                "f16 changes the gradients' scale from iteration to iteration, and what {compress} left \
                 of the last one has the old; use bf16 or f32"
            ),
        );
    }
    if s.corrupts_second_moment() && !s.exchanges_moments() {
        let (flag, works) = match s.optimizer {
            OptimizerKind::Lamb => ("--optimizer", "use adamw"),
            _ => ("--compress-warmup", "leave it out for a fifth of the run, or use 1 or more"),
        };
        say(
            flag,
            format!(
                "{} divides by the gradients' second moments, and what {compress} leaves of gradients tells \
                 nothing about those, so they are learned from whole gradients first (Tang et al., arXiv \
                 2102.02888); {works}, or --local-steps 1, which sends steps, or --optimizer momentum or sgd",
                s.optimizer
            ),
        );
    } else if s.needs_compress_warmup() && !s.has_compress_warmup() {
        say(
            "--compress-warmup",
            format!(
                "{compress} sends late what stands out among its neighbours, and {} carries that on, from which \
                 losses suffer if a run starts so; leave it out for a fifth of the run, or use 1 or more, or use \
                 --compress int8 or topk:0.1, --local-steps 1, or --optimizer sgd",
                s.optimizer
            ),
        );
    }
    let kinds: &[CollectiveKind] = match compress.codec() {
        Some(Codec::Int8 | Codec::OneBit) => &[CollectiveKind::AllToAll, CollectiveKind::AllGather],
        Some(Codec::TopK) => &[CollectiveKind::AllGather],
        None => &[CollectiveKind::AllReduce],
    };
    let replicas = s.dp.saturating_mul(s.cp).max(1);
    let resolved =
        kinds.iter().map(|&kind| collective::resolve(kind, s.collective, replicas, s.order));
    if let Some(error) = resolved.filter_map(Result::err).next() {
        say("--collective", format!("{compress}: {error}"));
    }
}
