//! Program of a synchronous parameter server: receive every replica's gradients for its shard of
//! each bucket, sum them in the canonical tree, update, send the weights back.

use super::arena::{self, Home};
use super::grad_norm::update_template;
use super::tensor_norms::halves;
use super::{Context, UNDECIDED, bucket};
use crate::collective::{CollectiveKind, Reduction};
use crate::dtype::DType;
use crate::graph::{BLOCK, OpKind};
use crate::ids::{BufferId, CallId, LaneId, Microbatch, OpId, SegmentId};
use crate::mesh::GroupKind;
use crate::program::{
    AccumulateMode, Bucket, Buffer, Call, MemoryKind, Op, Outputs, Peer, Program, Section, Segment,
    StepPhase, TensorNorms, View,
};
use crate::units::Bytes;

const COMPUTE: LaneId = LaneId(0);
const RECV: LaneId = LaneId(1);
const SEND: LaneId = LaneId(2);
const CONTROL: LaneId = LaneId(3);

/// Builds the program of server `server`.
pub(super) fn program(context: &mut Context, server: u32) -> Program {
    let shapes = context.deal().buckets(0..context.graph.layers.len());
    let mut role = Server {
        servers: context.strategy.sync.servers(),
        context,
        buffers: Vec::new(),
        segments: Vec::new(),
        calls: Vec::new(),
        buckets: Vec::new(),
        body: Section::default(),
    };
    // Replicas hold a tied table once and send it last, after summing both uses' gradients.
    let mut tied: Option<usize> = None;
    for shape in &shapes {
        match tied.filter(|_| shape.tied) {
            // The entries are the embedding's, as on the replicas: these count in the norm.
            Some(at) => role.buckets[at].entries = shape.entries.clone(),
            None => {
                let at = role.declare(shape);
                tied = tied.or(shape.tied.then_some(at));
            }
        }
    }
    let all = 0..role.buckets.len();
    let in_order: Vec<usize> = all.filter(|&at| Some(at) != tied).chain(tied).collect();
    let mut ready: Vec<(usize, OpId)> = in_order.iter().map(|&at| (at, role.receive(at))).collect();
    ready.sort();
    let ready: Vec<OpId> = ready.into_iter().map(|(_, op)| op).collect();
    let mut known = role.norm(&ready);
    if role.context.strategy.optimizer.needs_tensor_norms() {
        known = role.tensor_norms(known);
    }
    for at in in_order {
        role.step(at, known);
    }
    let homes = vec![Home::Own; role.buffers.len()];
    let memory = arena::assign(&mut role.buffers, &homes, Bytes::ZERO);
    let outputs = Outputs { norm: role.norm_buffer(), ..Outputs::default() };
    Program {
        name: format!("parameter server {server}"),
        lanes: ["compute", "recv", "send", "control"].map(String::from).to_vec(),
        buffers: role.buffers,
        frames: Vec::new(),
        segments: role.segments,
        calls: role.calls,
        buckets: role.buckets,
        services: Vec::new(),
        prologue: Section::default(),
        body: role.body,
        epilogue: Section::default(),
        in_flight: Vec::new(),
        outputs,
        memory,
    }
}

struct Server<'c> {
    context: &'c mut Context,
    servers: u32,
    buffers: Vec<Buffer>,
    segments: Vec<Segment>,
    calls: Vec<Call>,
    buckets: Vec<Bucket>,
    body: Section,
}

impl Server<'_> {
    fn buffer(&mut self, name: String, dtype: DType, elements: u64, kind: MemoryKind) -> View {
        let offset = Bytes::ZERO;
        self.buffers.push(Buffer { name, dtype, elements, copies: 1, kind, offset });
        let buffer = BufferId::from(self.buffers.len() - 1);
        View { buffer, offset: 0, len: elements }
    }

    /// Declares this server's shard of a bucket.
    fn declare(&mut self, shape: &bucket::BucketShape) -> usize {
        let s = self.context.strategy.clone();
        let part = shape.elements / u64::from(self.servers);
        let (name, act) = (&shape.name, shape.dtype(&s));
        let params = self.buffer(format!("{name}.param"), act, part, MemoryKind::Parameters);
        let grads = self.buffer(format!("{name}.grad"), s.grad_dtype, part, MemoryKind::Gradients);
        let mut state = |what: &str| {
            self.buffer(format!("{name}.{what}"), DType::F32, part, MemoryKind::Optimizer)
        };
        let master = (act != DType::F32).then(|| state("master"));
        let moments =
            ["moment1", "moment2"][..s.optimizer.moments()].iter().map(|m| state(m)).collect();
        let shard = Some(self.context.group(GroupKind::Servers));
        self.buckets.push(Bucket {
            name: shape.name.clone(),
            elements: shape.elements,
            entries: shape.entries.clone(),
            params,
            grads,
            master,
            moments,
            offloaded: Vec::new(),
            tensor_norms: None,
            shard,
            updated: true,
        });
        self.buckets.len() - 1
    }

    /// Receives every replica's shard and sums them like a binary counter. The final sum is in the
    /// bucket's gradients.
    fn receive(&mut self, at: usize) -> OpId {
        let s = &self.context.strategy;
        let (dtype, replicas) = (s.grad_dtype, self.context.mesh.size());
        let (grads, channel) = (self.buckets[at].grads, at as u16);
        let levels = replicas.next_power_of_two().trailing_zeros().max(1);
        let name = self.buckets[at].name.clone();
        let tree: Vec<View> = (0..levels)
            .map(|l| {
                self.buffer(format!("{name}.leaf{l}"), dtype, grads.len, MemoryKind::Communication)
            })
            .collect();
        let microbatch = Microbatch(0);
        let mut free: Option<OpId> = None;
        let mut last = None;
        for replica in 0..replicas {
            let after: Vec<OpId> = free.into_iter().collect();
            let op = Op::Recv { from: Peer::Replica(replica), channel, view: grads, microbatch };
            let mut done = self.body.push(RECV, op, &after);
            for &level in tree.iter().take(replica.trailing_ones() as usize) {
                let op = Op::Accumulate { from: level, into: grads, mode: AccumulateMode::Add };
                done = self.body.push(COMPUTE, op, &[done]);
            }
            if replica + 1 < replicas {
                let into = tree[replica.trailing_ones() as usize];
                let op = Op::Accumulate { from: grads, into, mode: AccumulateMode::Move };
                done = self.body.push(COMPUTE, op, &[done]);
            }
            free = Some(done);
            last = Some(done);
        }
        // If the count is not a power of two, sums remain at the other one bits of the last index.
        let mut done = last.expect("at least one replica");
        for level in levels_left(replicas) {
            let op = Op::Accumulate { from: tree[level], into: grads, mode: AccumulateMode::Add };
            done = self.body.push(COMPUTE, op, &[done]);
        }
        done
    }

    fn norm(&mut self, ready: &[OpId]) -> OpId {
        let counted = self.buckets.iter().filter(|bucket| bucket.is_clipped());
        let blocks: u64 = counted.map(|b| b.elements / BLOCK).sum();
        let entries = u64::from(bucket::norm_entries(&self.context.graph));
        let block_sums =
            self.buffer("norm.blocks".into(), DType::F32, blocks, MemoryKind::Communication);
        let tensors =
            self.buffer("norm.tensors".into(), DType::F32, entries, MemoryKind::Communication);
        let total = self.buffer("norm".into(), DType::F32, 1, MemoryKind::Communication);
        let parts = self.servers;
        let mut offset = 0;
        let (mut last, mut uncounted) = (None, Vec::new());
        for (at, &ready) in ready.iter().enumerate() {
            // Tables are the last bucket. Only networks are clipped, but the step of tables waits
            // as well.
            if !self.buckets[at].is_clipped() {
                uncounted.push(ready);
                continue;
            }
            let len = self.buckets[at].elements / BLOCK;
            let grads = self.buckets[at].grads;
            let sums = View { offset, len, ..block_sums };
            last = Some(self.small(
                OpKind::BlockSquares { parts, experts: false },
                grads,
                sums,
                &[ready],
            ));
            offset += len;
        }
        let mut after: Vec<OpId> = last.into_iter().collect();
        if parts > 1 {
            let call = self.sum("norm.blocks", block_sums);
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            after = vec![self.body.push(CONTROL, op, &after)];
        }
        self.small(OpKind::TensorSquares, block_sums, tensors, &after);
        self.small(OpKind::Norm2, tensors, total, &uncounted)
    }

    /// Computes the norms of tensors and of their update directions. The servers together hold
    /// whole tensors, so one sum among them completes the norms. Returns the op that the step must
    /// wait for.
    fn tensor_norms(&mut self, norm: OpId) -> OpId {
        let blocks: u64 = self.buckets.iter().map(|b| b.elements / BLOCK).sum();
        let tensors = u64::from(bucket::norm_entries(&self.context.graph));
        let kind = MemoryKind::Communication;
        let block_sums = self.buffer("tensor_norms.blocks".into(), DType::F32, 2 * blocks, kind);
        let tensor_sums = self.buffer("tensor_norms.tensors".into(), DType::F32, 2 * tensors, kind);
        let mut offset = 0;
        let mut known = norm;
        for (at, bucket) in self.buckets.iter_mut().enumerate() {
            let len = bucket.elements / BLOCK;
            bucket.tensor_norms = Some(TensorNorms {
                weights: View { offset, len, ..block_sums },
                directions: View { offset: blocks + offset, len, ..block_sums },
                tensors: tensor_sums,
            });
            let op = Op::Step { bucket: at as u32, phase: StepPhase::TensorNorms };
            known = self.body.push(COMPUTE, op, &[norm]);
            offset += len;
        }
        if self.servers > 1 {
            let call = self.sum("tensor_norms.blocks", block_sums);
            let op = Op::Collective { call, microbatch: Microbatch(0) };
            known = self.body.push(CONTROL, op, &[known]);
        }
        for [from, into] in halves(block_sums, tensor_sums) {
            known = self.small(OpKind::TensorSquares, from, into, &[known]);
        }
        known
    }

    fn norm_buffer(&self) -> Option<BufferId> {
        self.buffers.iter().position(|b| b.name == "norm").map(BufferId::from)
    }

    fn sum(&mut self, name: &str, view: View) -> CallId {
        let (kind, order) = (CollectiveKind::AllReduce, self.context.strategy.order);
        self.calls.push(Call {
            name: format!("{kind} {name}"),
            kind,
            reduction: Reduction::Sum,
            method: UNDECIDED,
            order,
            group: self.context.group(GroupKind::Servers),
            root: 0,
            input: view,
            output: view,
            dtype: DType::F32,
            block: 1,
        });
        CallId::from(self.calls.len() - 1)
    }

    fn small(&mut self, kind: OpKind, input: View, output: View, after: &[OpId]) -> OpId {
        let dtype = |v: View| self.buffers[v.buffer.index()].dtype;
        let template =
            update_template(kind, (input.len, dtype(input)), (output.len, dtype(output)));
        let template = self.context.template(template);
        self.segments.push(Segment { template, layer: None, operands: vec![input, output] });
        let segment = SegmentId::from(self.segments.len() - 1);
        let op = Op::Compute { segment, microbatch: Microbatch(0), fresh: true };
        self.body.push(COMPUTE, op, after)
    }

    /// Updates this server's shard of a bucket and sends it to every replica.
    fn step(&mut self, at: usize, known: OpId) {
        let op = Op::Step { bucket: at as u32, phase: StepPhase::Apply };
        let step = self.body.push(COMPUTE, op, &[known]);
        let (view, channel) = (self.buckets[at].params, at as u16);
        for replica in 0..self.context.mesh.size() {
            let to = Peer::Replica(replica);
            let op = Op::Send { to, channel, view, microbatch: Microbatch(0) };
            self.body.push(SEND, op, &[step]);
        }
    }
}

/// Tree levels that still hold a sum after the last of `count` leaves has joined those at its
/// trailing one bits: the other one bits of the last leaf's index.
fn levels_left(count: u32) -> Vec<usize> {
    let last = count - 1;
    (last.trailing_ones()..32).filter(|bit| last >> bit & 1 == 1).map(|bit| bit as usize).collect()
}
