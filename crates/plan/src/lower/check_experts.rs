//! Checks that experts can be sharded as a strategy asks.

use super::check::divisors;
use crate::compress::Compression;
use crate::model::Model;
use crate::strategy::{Strategy, Sync};

/// Reports problems that prevent sharding the model's experts.
pub(super) fn check(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if model.experts.is_none() {
        for (flag, size) in [("--ep", s.ep), ("--etp", s.etp)] {
            if size > 1 {
                say(flag, format!("{} has no experts to cut; use {flag} 1", model.name()));
            }
        }
        return;
    }
    axes(model, s, say);
    tokens_dealt_out(s, say);
    if s.has_separate_experts() {
        sharded_experts(s, say);
    }
    if !(s.expert_buffer_factor >= 1.0 && s.expert_buffer_factor < 1e9) {
        let room = s.expert_buffer_factor;
        say(
            "--expert-buffer-factor",
            format!("{room:?} is less than an equal share; use 1 or more"),
        );
    }
}

fn axes(model: &Model, s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    let product = |sizes: &[u32]| {
        sizes.iter().fold(1u64, |product, &size| product.saturating_mul(size.max(1).into()))
    };
    let (stage, cut) = (product(&[s.dp, s.cp, s.tp]), product(&[s.ep, s.etp]));
    if !stage.is_multiple_of(cut) {
        say(
            "--ep",
            format!(
                "ep·etp = {cut} does not divide dp·cp·tp = {stage}, whose ranks hold the experts; these do: {}",
                divisors(stage)
            ),
        );
    }
    let (experts, ep) = (model.experts.experts, u64::from(s.ep.max(1)));
    if !experts.is_multiple_of(ep) {
        let legal = divisors(experts);
        say(
            "--ep",
            format!("{ep} does not divide {}'s {experts} experts; these do: {legal}", model.name()),
        );
    }
    let (ffn, etp) = (model.ffn, u64::from(s.etp.max(1)));
    if !ffn.is_multiple_of(etp) {
        let legal = divisors(ffn);
        say("--etp", format!("{etp} does not divide an expert's width {ffn}; these do: {legal}"));
    }
}

/// Checks that each token is sent to its experts from one rank only.
fn tokens_dealt_out(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if s.tp > 1 && !s.sp {
        say(
            "--tp",
            "each token must be dispatched by one rank; with experts, --tp needs --sp, which shards tokens"
                .into(),
        );
    }
}

/// Rejects options not implemented for experts on other ranks than the rest of their layers.
fn sharded_experts(s: &Strategy, say: &mut impl FnMut(&'static str, String)) {
    if s.sync != Sync::AllReduce {
        say("--sync", format!("{} serves whole replicas; use --ep 1 and --etp 1", s.sync));
    }
    if s.compress != Compression::None {
        let message = "gradients of sharded experts are not compressed; use none";
        say("--compress", message.into());
    }
    if s.local.is_some() {
        say(
            "--local-steps",
            "--local-steps needs whole experts on every replica; use --ep 1".into(),
        );
    }
}
