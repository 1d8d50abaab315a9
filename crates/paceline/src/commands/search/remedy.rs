//! Remedies if no strategy is legal, or none fits.

use super::pool;
use paceline_search::{Pins, Request, count};

/// The pin to release if a space is empty: each that alone empties it, with the number of
/// strategies without it.
pub(super) fn empty(request: &Request<'_>) -> (&'static str, String) {
    let model = request.model.name();
    let flags = request.pins.flags();
    let released = flags.iter().filter_map(|&flag| {
        let pins = request.pins.without(flag);
        let strategies = count(&Request { pins, ..request.clone() });
        (strategies > 0).then_some((flag, strategies))
    });
    if let Some((flag, strategies)) = released.max_by_key(|&(_, strategies)| strategies) {
        let text = format!(
            "no strategy of {model} on {} devices has this and the other pins; without {flag} \
             there are {strategies}",
            request.devices
        );
        return (flag, text);
    }
    let free = count(&Request { pins: Pins::default(), ..request.clone() });
    let flag = flags.first().copied().filter(|_| free > 0).unwrap_or("--global-batch");
    let text = if free > 0 {
        format!("no strategy of {model} has all of {}; release several", flags.join(", "))
    } else {
        format!(
            "no layout of {model} on {} devices works: no number of replicas divides {} samples, \
             or the model cannot be cut so often",
            request.devices, request.base.global_batch
        )
    };
    (flag, text)
}

/// The smallest change with which something fits: a pin released, or more hosts.
pub(super) fn nothing_fits(
    request: &Request<'_>,
    stopped: impl Fn() -> bool,
) -> (&'static str, String) {
    let model = request.model.name();
    let one = |request: Request<'_>| {
        let request = Request { top: 1, ..request };
        let result = pool::search(&request, |progress| progress.best.is_none() && !stopped());
        !result.candidates.is_empty()
    };
    // Those that trade time for memory come first.
    let saving = ["--recompute", "--zero", "--offload", "--micro-batch"];
    let mut flags = request.pins.flags();
    flags.sort_by_key(|flag| saving.iter().position(|known| known == flag).unwrap_or(saving.len()));
    for flag in flags {
        if stopped() {
            break;
        }
        let pins = request.pins.without(flag);
        if one(Request { pins, ..request.clone() }) {
            return (
                flag,
                format!("no strategy of {model} fits with this; without {flag} one does"),
            );
        }
    }
    let each = u32::try_from(request.cluster.devices_per_host()).unwrap_or(u32::MAX).max(1);
    let held = request.devices.div_ceil(each);
    for factor in [2, 4, 8, 16] {
        let hosts = held.saturating_mul(factor);
        let Ok(cluster) = request.cluster.with_hosts(hosts) else { break };
        let devices = hosts.saturating_mul(each);
        if stopped() {
            break;
        }
        let more = Request { cluster: &cluster, devices, ..request.clone() };
        if one(more) {
            let text = format!(
                "no strategy of {model} fits on {held} hosts; on {hosts} hosts ({devices} devices) \
                 one does"
            );
            return ("--cluster", text);
        }
    }
    let text = format!(
        "no strategy of {model} fits on {} devices of {}, whatever is recomputed, sharded or \
         offloaded, and neither does one on up to 16 times as many",
        request.devices, request.cluster.name
    );
    ("--cluster", text)
}
