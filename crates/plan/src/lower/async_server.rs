//! Program of a server that applies gradients as they arrive (Downpour SGD: Dean et al., NIPS 2012,
//! section 4.1; with a bound on staleness: Ho et al., NIPS 2013).
//!
//! The body is one `serve`: as many requests as there are replicas, from any of them. A fast
//! replica may take the turn of a slow one. A body is thus the time in which the servers receive
//! the gradients of one iteration's samples; over the whole run every request is served. A request
//! of bucket b uses channel b: gradients arrive, the server updates its shard of the bucket, and
//! sends weights back.

use super::arena::{self, Home};
use super::{Context, bucket};
use crate::dtype::DType;
use crate::ids::{BufferId, LaneId};
use crate::mesh::GroupKind;
use crate::program::{Bucket, Buffer, MemoryKind, Op, Outputs, Program, Section, Service, View};
use crate::units::Bytes;

/// Builds the program of server `server`. No replica may get further ahead of the slowest than
/// `staleness` iterations.
pub(super) fn program(context: &mut Context, server: u32, staleness: Option<u32>) -> Program {
    let shapes = shapes(context);
    let s = context.strategy.clone();
    let servers = u64::from(s.sync.servers());
    let parts: Vec<u64> = shapes.iter().map(|shape| shape.elements / servers).collect();
    let total = parts.iter().sum();
    let mut buffers = Vec::new();
    let mut buffer = |name: String, dtype: DType, elements: u64, kind: MemoryKind| {
        buffers.push(Buffer { name, dtype, elements, copies: 1, kind, offset: Bytes::ZERO });
        View { buffer: BufferId::from(buffers.len() - 1), offset: 0, len: elements }
    };
    let act = s.activation_dtype();
    let params = buffer("param".into(), act, total, MemoryKind::Parameters);
    let grads = buffer("grad".into(), s.grad_dtype, total, MemoryKind::Gradients);
    let shard = Some(context.group(GroupKind::Servers));
    let mut offset = 0;
    let mut buckets = Vec::new();
    for (shape, &len) in shapes.iter().zip(&parts) {
        let mut state = |what: &str| {
            buffer(format!("{}.{what}", shape.name), DType::F32, len, MemoryKind::Optimizer)
        };
        buckets.push(Bucket {
            name: shape.name.clone(),
            elements: shape.elements,
            entries: shape.entries.clone(),
            params: View { offset, len, ..params },
            grads: View { offset, len, ..grads },
            master: (act != DType::F32).then(|| state("master")),
            moments: ["moment1", "moment2"][..s.optimizer.moments()]
                .iter()
                .map(|m| state(m))
                .collect(),
            offloaded: Vec::new(),
            tensor_norms: None,
            shard,
            updated: true,
        });
        offset += len;
    }
    let group = context.group(GroupKind::Served(server));
    let service = Service { group, receives: grads, sends: params, requests: 1, staleness };
    let mut body = Section::default();
    body.push(LaneId(1), Op::Serve { service: 0 }, &[]);
    let homes = vec![Home::Own; buffers.len()];
    let memory = arena::assign(&mut buffers, &homes, Bytes::ZERO);
    Program {
        name: format!("parameter server {server}"),
        lanes: ["compute", "serve"].map(String::from).to_vec(),
        buffers,
        frames: Vec::new(),
        segments: Vec::new(),
        calls: Vec::new(),
        buckets,
        services: vec![service],
        prologue: Section::default(),
        body,
        epilogue: Section::default(),
        in_flight: Vec::new(),
        outputs: Outputs::default(),
        memory,
    }
}

/// Buckets as on the replicas: a tied table occurs once, with the entries of the embedding.
fn shapes(context: &Context) -> Vec<bucket::BucketShape> {
    let mut shapes: Vec<bucket::BucketShape> = Vec::new();
    for shape in context.deal().buckets(0..context.graph.layers.len()) {
        match shapes.iter_mut().find(|known| known.tied && shape.tied) {
            Some(table) => table.entries = shape.entries,
            None => shapes.push(shape),
        }
    }
    shapes
}
