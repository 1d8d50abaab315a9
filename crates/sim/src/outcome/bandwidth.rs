//! Bandwidth utilisation of each dimension in an iteration.
//!
//! Every message counts in the dimension that carries it, once for each link it crosses there. The
//! bytes that all ranks send in an iteration, divided by the number of devices, are compared with
//! the capacity of one device's links in that dimension over the iteration. Capacity is the
//! datasheet rate in one direction; links shared by several devices are divided among them.

use super::details::SimContext;
use crate::engine::vector;
use crate::network::{Analytic, CostModel, all_links};
use paceline_plan::collective::{
    Action, Algorithm, Chunking, CollectiveKind, Method, SummationOrder,
};
use paceline_plan::ids::{Rank, RoleId};
use paceline_plan::mesh::{Axis, GroupKind};
use paceline_plan::program::{Op, Program, View};
use paceline_plan::units::{Bytes, Seconds};
use serde::Serialize;
use std::collections::BTreeMap;

/// Traffic through one dimension of the cluster in an iteration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DimensionUse {
    /// Dimension name.
    pub dimension: String,
    /// Bytes that a device sends through it, averaged over all ranks.
    pub bytes_per_device: f64,
    /// Messages that a device sends through it, averaged over all ranks.
    pub messages_per_device: f64,
    /// Mean time of such a message, alone on its links. A hierarchical collective has one phase per
    /// dimension, so this is the message latency of each of its phases.
    pub message: Seconds,
    /// Used over available bandwidth: fraction of the iteration in which device links are busy.
    pub utilisation: f64,
}

pub(super) fn bandwidth(run: &SimContext<'_>, iteration: Seconds) -> Vec<DimensionUse> {
    let SimContext { plan, cluster, .. } = *run;
    let mut counter = Counter { run, known: BTreeMap::new() };
    let mut all = vec![Traffic::default(); cluster.dimensions.len()];
    for role in (0..plan.programs.len()).map(RoleId::from) {
        let ranks = f64::from(crate::engine::ranks(plan, role));
        for (sum, of_role) in all.iter_mut().zip(counter.role(role)) {
            sum.add(&of_role, ranks);
        }
    }
    let devices = f64::from(plan.mesh.world()).max(1.0);
    let named = cluster.dimensions.iter().enumerate().zip(&all);
    named
        .map(|((index, dimension), traffic)| {
            let shared = f64::from(dimension.devices_per_link.max(1));
            let achievable = all_links(dimension, cluster, index, Rank(0)) / shared;
            let capacity = achievable / dimension.efficiency * iteration.0;
            let share = traffic.link_bytes / devices / capacity;
            let average = traffic.time / traffic.messages;
            let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
            DimensionUse {
                dimension: dimension.name.clone(),
                bytes_per_device: traffic.bytes / devices,
                messages_per_device: traffic.messages / devices,
                message: Seconds(finite(average)),
                utilisation: finite(share),
            }
        })
        .collect()
}

/// Traffic through one dimension.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    messages: f64,
    bytes: f64,
    /// Bytes, counted once per link crossed.
    link_bytes: f64,
    /// Total time of the messages if sent one after the other.
    time: f64,
}

impl Traffic {
    fn add(&mut self, other: &Self, times: f64) {
        self.messages += other.messages * times;
        self.bytes += other.bytes * times;
        self.link_bytes += other.link_bytes * times;
        self.time += other.time * times;
    }
}

/// Traffic of one rank through one dimension, per byte of the vector, for a message or a collective
/// of any size.
#[derive(Clone, Copy, Debug, Default)]
struct Unit {
    messages: f64,
    bytes: f64,
    link_bytes: f64,
    /// Size-independent seconds.
    latency: f64,
    /// Seconds per byte of the vector.
    slowness: f64,
}

impl Unit {
    fn of(&self, bytes: f64) -> Traffic {
        Traffic {
            messages: self.messages,
            bytes: self.bytes * bytes,
            link_bytes: self.link_bytes * bytes,
            time: self.latency + self.slowness * bytes,
        }
    }
}

/// Key of calls whose traffic is proportional to their bytes in the same way.
type Key = (RoleId, CollectiveKind, Method, SummationOrder, GroupKind, u32);

struct Counter<'a> {
    run: &'a SimContext<'a>,
    known: BTreeMap<Key, Vec<Unit>>,
}

impl Counter<'_> {
    /// Traffic that one rank of a role sends in an iteration, by dimension.
    fn role(&mut self, role: RoleId) -> Vec<Traffic> {
        let program = &self.run.plan.programs[role.index()];
        let me = self.run.plan.representative(role);
        let mut sums = vec![Traffic::default(); self.run.cluster.dimensions.len()];
        let mut add = |units: &[Unit], bytes: Bytes| {
            for (sum, unit) in sums.iter_mut().zip(units) {
                sum.add(&unit.of(bytes.as_f64()), 1.0);
            }
        };
        for node in &program.body.nodes {
            match node.op {
                Op::Send { to, view, .. } => {
                    let Some(peer) = self.run.plan.peer(me, to) else { continue };
                    let bytes = bytes(program, &view);
                    let parts = self.run.costs.parts(self.run.epochs.first(), me, peer, bytes);
                    add(&self.message(me, peer), bytes / u64::from(parts));
                    if parts > 1 {
                        let receiver = self.run.plan.role(peer);
                        let (kind, group) = (CollectiveKind::AllGather, GroupKind::Axis(Axis::Tp));
                        let ring = Method::Steps(Algorithm::Ring);
                        let gather = (receiver, kind, ring, SummationOrder::Free, group, 0);
                        add(self.collective(gather), bytes);
                    }
                }
                Op::Collective { call, .. } => {
                    let call = program.call(call);
                    let group = self.run.plan.group(call.group);
                    let key = (role, call.kind, call.method, call.order, group, call.root);
                    let bytes = vector(self.run.plan, call).bytes();
                    add(self.collective(key), bytes);
                }
                Op::Serve { service } => {
                    let service = &program.services[service as usize];
                    let answer = bytes(program, &service.sends);
                    let peers = self.run.plan.mesh.members(self.run.plan.group(service.group), me);
                    for peer in peers.into_iter().filter(|&peer| peer != me) {
                        let units = self.message(me, peer);
                        (0..service.requests).for_each(|_| add(&units, answer));
                    }
                }
                Op::Load { .. }
                | Op::Compute { .. }
                | Op::Recv { .. }
                | Op::Accumulate { .. }
                | Op::Step { .. }
                | Op::Stash { .. }
                | Op::Restore { .. }
                | Op::Free { .. } => {}
            }
        }
        sums
    }

    /// Traffic of a message from one rank to another, by dimension.
    fn message(&self, from: Rank, to: Rank) -> Vec<Unit> {
        let mut units = vec![Unit::default(); self.run.cluster.dimensions.len()];
        self.send(&mut units, (from, to), 1.0, 1.0);
        units
    }

    /// Adds `count` messages that carry `share` of a vector in total.
    fn send(&self, units: &mut [Unit], (from, to): (Rank, Rank), share: f64, count: f64) {
        /// Large enough that latency is negligible.
        const LARGE: Bytes = Bytes(1 << 30);
        let Some(path) = self.run.cluster.link(from, to) else { return };
        let links = Analytic::new(self.run.cluster);
        let time = |bytes| links.message(from, to, bytes).map_or(0.0, |time| time.0);
        let latency = time(Bytes::ZERO);
        let unit = &mut units[path.dimension];
        unit.messages += count;
        unit.bytes += share;
        unit.link_bytes += share * f64::from(path.hops);
        unit.latency += latency * count;
        unit.slowness += (time(LARGE) - latency) / LARGE.as_f64() * share;
    }

    /// Mean traffic of a rank in a collective, by dimension.
    fn collective(&mut self, key: Key) -> &[Unit] {
        if !self.known.contains_key(&key) {
            let units = self.average(key);
            self.known.insert(key, units);
        }
        &self.known[&key]
    }

    fn average(&self, (role, kind, method, order, group, root): Key) -> Vec<Unit> {
        /// Maximum number of steps examined; in a larger group the first ranks represent all.
        const STEPS: usize = 1 << 18;
        let mut units = vec![Unit::default(); self.run.cluster.dimensions.len()];
        let members = self.run.plan.mesh.members(group, self.run.plan.representative(role));
        let ranks = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let Ok(pattern) = method.pattern(kind, order, ranks, root) else { return units };
        // Many elements per chunk, so that uneven chunking does not matter.
        let elements = u64::from(pattern.chunks()) << 20;
        let cut = Chunking { elements, chunks: pattern.chunks(), block: 1 };
        let (mut seen, mut counted) = (0, 0.0);
        for (me, &from) in (0..ranks).zip(&members) {
            // Most algorithms have few neighbours, so messages are summed by receiver.
            let mut sent: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
            for step in pattern.steps(me) {
                seen += 1;
                if let Action::Send { to, chunks }
                | Action::Lend { to, chunks }
                | Action::Write { to, chunks } = step.action
                {
                    let sum = sent.entry(to).or_default();
                    sum.0 += cut.elements_in(chunks) as f64 / elements as f64;
                    sum.1 += 1.0;
                }
            }
            for (to, (share, count)) in sent {
                self.send(&mut units, (from, members[to as usize]), share, count);
            }
            counted += 1.0;
            if seen > STEPS {
                break;
            }
        }
        for unit in &mut units {
            let Unit { messages, bytes, link_bytes, latency, slowness } = unit;
            for sum in [messages, bytes, link_bytes, latency, slowness] {
                *sum /= counted;
            }
        }
        units
    }
}

fn bytes(program: &Program, view: &View) -> Bytes {
    Bytes(view.len.saturating_mul(program.buffer(view.buffer).dtype.size()))
}

#[cfg(test)]
mod tests {
    use super::super::cases::{close, mini, run, strategy};
    use super::*;
    use crate::cluster::preset;
    use paceline_plan::lower::lower;
    use paceline_plan::model::{Model, ModelDims, built_in};
    use paceline_plan::program::Plan;
    use paceline_plan::strategy::{Strategy, Sync};

    fn replicas(dp: u32) -> Plan {
        let (leaves, global_batch, collective) = (dp, dp.into(), Algorithm::Ring);
        lower(&mini(), &Strategy { dp, leaves, global_batch, collective, ..strategy(1, 1) })
            .unwrap()
    }

    /// Bytes that a plan's collectives process in an iteration.
    fn gradients(plan: &Plan) -> f64 {
        let program = &plan.programs[0];
        let calls = program.body.nodes.iter().filter_map(|node| {
            let Op::Collective { call, .. } = node.op else { return None };
            Some(vector(plan, program.call(call)).bytes().as_f64())
        });
        calls.sum()
    }

    /// Patarasuk and Yuan (2009): 2(n − 1)/n of the vector from each rank.
    #[test]
    fn a_ring_inside_a_host_uses_its_links_alone() {
        let plan = replicas(8);
        let (outcome, details) = run(&plan, &preset::get("dgx-a100:2").unwrap());
        let [inside, across] = &details.bandwidth[..] else { panic!("two dimensions") };
        let sent = 2.0 * 7.0 / 8.0 * gradients(&plan);
        close(inside.bytes_per_device, sent);
        close(inside.utilisation, sent / (300e9 * outcome.iteration.0));
        assert_eq!((across.bytes_per_device, across.utilisation), (0.0, 0.0));
        assert_eq!(across.message, Seconds::ZERO);
    }

    /// In a ring through two hosts of eight, the last rank of each sends to the other host.
    #[test]
    fn a_ring_over_two_hosts_crosses_the_fabric_twice_a_round() {
        let plan = replicas(16);
        let cluster = preset::get("dgx-a100:2").unwrap();
        let (_, details) = run(&plan, &cluster);
        let [inside, across] = &details.bandwidth[..] else { panic!("two dimensions") };
        let sent = 2.0 * 15.0 / 16.0 * gradients(&plan);
        close(inside.bytes_per_device, sent * 14.0 / 16.0);
        close(across.bytes_per_device, sent * 2.0 / 16.0);
        let rounds = across.messages_per_device + inside.messages_per_device;
        close(across.messages_per_device, rounds / 8.0);
        let fabric = &cluster.dimensions[1];
        let size = across.bytes_per_device / across.messages_per_device;
        close(across.message.0, fabric.latency.0 + size / fabric.achievable().0);
    }

    /// Model whose first and last stage share no weights.
    fn untied(name: &str) -> Model {
        let model = built_in::get(name).unwrap().unwrap();
        Model::new(name, ModelDims { tied: false, ..*model }).unwrap()
    }

    /// Two stages on one host: one activation forward and its gradient back per microbatch.
    #[test]
    fn stages_send_one_tensor_each_way() {
        let model = untied("mini");
        let plan = lower(&model, &strategy(2, 4)).unwrap();
        let (_, details) = run(&plan, &preset::get("dgx-a100").unwrap());
        let tensor = (model.seq * model.d_model * 4) as f64;
        let inside = &details.bandwidth[0];
        // Each of the two ranks sends one tensor four times; the rest is the gradient norm.
        let (few, more) = (4.0 * tensor, inside.bytes_per_device);
        assert!(few <= more && more < few * 1.01, "{few} {more}");
    }

    /// Across hosts, a message that all tensor-parallel ranks hold is split among them: each sends
    /// its part over the fabric, and the receivers gather inside their host.
    #[test]
    fn sliced_messages_cross_the_fabric_once() {
        let layout = Strategy { tp: 8, seq: 2048, ..strategy(2, 4) };
        let model = untied("gpt3-175b");
        let plan = lower(&model, &layout).unwrap();
        let (_, details) = run(&plan, &preset::get("dgx-a100:2").unwrap());
        let tensor = (layout.seq * model.d_model * 4) as f64;
        let (few, more) = (4.0 * tensor / 8.0, details.bandwidth[1].bytes_per_device);
        assert!(few <= more && more < few * 1.01, "{few} {more}");
    }

    #[test]
    fn what_servers_answer_counts_too() {
        let (dp, servers) = (3, 1);
        let served = Strategy {
            dp,
            leaves: dp,
            global_batch: 3,
            sync: Sync::Servers(servers),
            ..strategy(1, 3)
        };
        let plan = lower(&mini(), &served).unwrap();
        let (_, details) = run(&plan, &preset::get("dgx-a100").unwrap());
        let elements: u64 = plan.programs[0].buckets.iter().map(|bucket| bucket.elements).sum();
        // Three replicas send all gradients and receive all weights; four ranks in total.
        let sent = 2.0 * 3.0 * (elements * 4) as f64 / 4.0;
        let counted = details.bandwidth[0].bytes_per_device;
        assert!((counted / sent - 1.0).abs() < 0.01, "{counted} {sent}");
    }
}
