//! Gaps between the tensors of a bucket, which ops read but nothing writes.
//!
//! Tensors start at block boundaries, and a bucket is padded so that its shards are equal. The gaps
//! hold zeros from the start; reductions and moves of the whole bucket read them too.

use super::SectionKind;
use crate::ids::BufferId;
use crate::program::{MemoryKind, Op, Program, View};
use std::ops::Range;

/// Gaps in every buffer that holds a bucket's gradients: buffers that some op treats as a whole
/// vector of a bucket's length. Weights need none, as they exist from the start.
pub(super) fn padding(program: &Program) -> Vec<View> {
    let mut layouts: Vec<(u64, Vec<Range<u64>>)> = Vec::new();
    for bucket in &program.buckets {
        let gaps = gaps(bucket.elements, bucket.entries.iter().map(|e| (e.offset, e.elements())));
        if !layouts.iter().any(|(elements, known)| *elements == bucket.elements && *known == gaps) {
            layouts.push((bucket.elements, gaps));
        }
    }
    let mut wholes: Vec<(BufferId, u64)> = wholes(program)
        .filter(|view| view.offset == 0)
        .filter(|view| match program.buffer(view.buffer).kind {
            MemoryKind::Gradients | MemoryKind::Communication => true,
            MemoryKind::Parameters
            | MemoryKind::Optimizer
            | MemoryKind::Activations
            | MemoryKind::Offloaded
            | MemoryKind::Shared => false,
        })
        .map(|view| (view.buffer, view.len))
        .collect();
    wholes.sort_unstable();
    wholes.dedup();
    let mut padding = Vec::new();
    for (buffer, len) in wholes {
        for (_, gaps) in layouts.iter().filter(|(elements, _)| *elements == len) {
            padding.extend(gaps.iter().map(|gap| View {
                buffer,
                offset: gap.start,
                len: gap.end - gap.start,
            }));
        }
    }
    padding
}

/// Views that ops other than computations treat as one vector.
fn wholes(program: &Program) -> impl Iterator<Item = View> {
    let grads = program.buckets.iter().map(|bucket| bucket.grads);
    let calls = program.calls.iter().flat_map(|call| [call.input, call.output]);
    let ops = SectionKind::ALL.into_iter().flat_map(|section| &section.of(program).nodes);
    let moved = ops.flat_map(|node| match node.op {
        Op::Accumulate { from, into, .. } => [Some(from), Some(into)],
        Op::Load { .. }
        | Op::Compute { .. }
        | Op::Send { .. }
        | Op::Recv { .. }
        | Op::Collective { .. }
        | Op::Step { .. }
        | Op::Stash { .. }
        | Op::Restore { .. }
        | Op::Free { .. }
        | Op::Serve { .. } => [None, None],
    });
    grads.chain(calls).chain(moved.flatten())
}

/// Ranges that the entries of a vector leave uncovered.
fn gaps(elements: u64, entries: impl Iterator<Item = (u64, u64)>) -> Vec<Range<u64>> {
    let mut entries: Vec<(u64, u64)> = entries.collect();
    entries.sort_unstable();
    let mut gaps = Vec::new();
    let mut end = 0;
    for (offset, len) in entries {
        if offset > end {
            gaps.push(end..offset);
        }
        end = end.max(offset + len);
    }
    if end < elements {
        gaps.push(end..elements);
    }
    gaps
}
