//! Attention, whole or in steps around a ring, and rotary embedding.

use crate::device::cpu::bind::{Bound, plain, with_workspace};
use crate::device::cpu::tiles::over_sequences;
use crate::rank_coords::ShardIndex;
use paceline_kernels::rope::Rotation;
use paceline_kernels::{Element, Write, attention, ring_attention, rope as kernels};
use paceline_plan::graph::{Heads, Mask, OpPass, Rotary, Scaling, Scores};

pub(in crate::device::cpu) fn rope<T: Element>(
    heads: Heads,
    theta: f64,
    rotary: Rotary,
    pass: OpPass,
) -> Option<Bound> {
    let frequencies = frequencies(heads.head_dim, theta, rotary);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let rotation = rotation(heads, theta, rotary, &frequencies);
            let (positions, qkv) = (cpu.sequence(), on.input::<T>(0));
            over_sequences(&cpu.pool, on.rows(0), positions, on.output(0), |at, out| {
                kernels::forward(rotation, positions, &qkv[at], out);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let rotation = rotation(heads, theta, rotary, &frequencies);
            let (positions, dout) = (cpu.sequence(), on.input::<T>(0));
            over_sequences(&cpu.pool, on.rows(0), positions, on.output(0), |at, dqkv| {
                kernels::input_gradient(rotation, positions, &dout[at], dqkv);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Frequencies of a rotation of `dims` elements, if they are scaled.
pub(crate) fn frequencies(dims: u64, theta: f64, rotary: Rotary) -> Vec<f64> {
    if rotary.scaling == Scaling::None {
        return Vec::new();
    }
    let dims = if rotary.dims == 0 { dims } else { rotary.dims };
    rotary.scaling.frequencies(theta, dims)
}

/// Parameters of the rotation kernels.
pub(crate) fn rotation(
    heads: Heads,
    theta: f64,
    rotary: Rotary,
    frequencies: &[f64],
) -> Rotation<'_> {
    Rotation {
        heads: heads.heads as usize,
        kv_heads: heads.kv_heads as usize,
        head_dim: heads.head_dim as usize,
        theta,
        dims: rotary.dims as usize,
        magnitude: rotary.magnitude as f32,
        frequencies,
    }
}

/// Parameters of the attention kernels, on shard `tensor` of the heads.
pub(crate) fn scores_of(scores: Scores, heads: Heads, tensor: ShardIndex) -> attention::Scores {
    let mask = match scores.mask {
        Mask::Causal => attention::Mask::Causal,
        Mask::Window(window) => attention::Mask::Window(window as usize),
        Mask::Chunk(chunk) => attention::Mask::Chunk(chunk as usize),
        Mask::Full => attention::Mask::Full,
    };
    let alibi = (scores.alibi > 0).then(|| attention::Alibi {
        heads: scores.alibi as usize,
        first: match heads.heads < scores.alibi {
            true => tensor.index as usize * heads.heads as usize,
            false => 0,
        },
        scale: if scores.alibi_scale > 0.0 { scores.alibi_scale as f32 } else { 1.0 },
    });
    let (scale, softcap) = (scores.scale as f32, scores.softcap as f32);
    attention::Scores { mask, scale, softcap, alibi }
}

/// Attention on sequences of one length; the operands give their number.
#[derive(Clone, Copy, Debug)]
struct Sequences {
    heads: Heads,
    seq: u64,
    scores: Scores,
}

impl Sequences {
    /// Shape of the kernel for `rows` rows.
    fn with_rows(self, rows: usize, tensor: ShardIndex) -> attention::Shape {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let seq = self.seq as usize;
        attention::Shape {
            batch: rows.checked_div(seq).unwrap_or(0),
            seq,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            scores: scores_of(self.scores, self.heads, tensor),
        }
    }
}

pub(in crate::device::cpu) fn whole<T: Element, G: Element>(
    heads: Heads,
    seq: u64,
    scores: Scores,
    pass: OpPass,
) -> Option<Bound> {
    let of = Sequences { heads, seq, scores };
    match pass {
        OpPass::Forward => Some(with_workspace(
            move |on, threads| {
                threads * of.with_rows(on.rows(0).rows, ShardIndex::WHOLE).forward_workspace::<T>()
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows, cpu.place.tensor);
                let need = cpu.pool.threads() * shape.forward_workspace::<T>();
                let (qkv, out, lse) = (on.input::<T>(0), on.output(0), on.output(1));
                let sinks = on.has_param(0).then(|| on.param::<T>(0));
                let room = &mut cpu.workspace[..need];
                attention::forward(&cpu.pool, shape, qkv, sinks, out, lse, room);
                if let Some(sinks) = sinks {
                    let copy = on.output::<f32>(2);
                    copy.iter_mut().zip(sinks).for_each(|(copy, sink)| *copy = sink.widen());
                }
            },
        )),
        OpPass::BackwardInput => Some(with_workspace(
            move |on, threads| {
                threads * of.with_rows(on.rows(0).rows, ShardIndex::WHOLE).backward_workspace::<T>()
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows, cpu.place.tensor);
                let need = cpu.pool.threads() * shape.backward_workspace::<T>();
                let (dout, qkv) = (on.input::<T>(0), on.input(1));
                let (out, lse, dqkv) = (on.input(2), on.input(3), on.output(0));
                let room = &mut cpu.workspace[..need];
                attention::backward(&cpu.pool, shape, dout, qkv, out, lse, dqkv, room);
            },
        )),
        OpPass::BackwardWeight => Some(plain(move |cpu, on, mode| {
            let shape = of.with_rows(on.rows(0).rows, cpu.place.tensor);
            let (dout, out, lse) = (on.input::<T>(0), on.input::<T>(1), on.input::<f32>(2));
            let sinks = on.input::<f32>(3);
            attention::sink_gradient(shape, dout, out, lse, sinks, on.gradient::<G>(0), mode);
        })),
    }
}

pub(in crate::device::cpu) fn keys_values<T: Element>(heads: Heads, pass: OpPass) -> Option<Bound> {
    let width = (2 * heads.kv_heads * heads.head_dim) as usize;
    match pass {
        OpPass::Forward => Some(plain(move |_, on, _| {
            ring_attention::keys_and_values(width, on.input::<T>(0), on.output(0));
        })),
        OpPass::BackwardInput => Some(plain(move |_, on, _| {
            ring_attention::add_keys_and_values(width, on.input::<T>(0), on.output(0));
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn block<T: Element>(
    heads: Heads,
    seq: u64,
    step: u32,
    scores: Scores,
    pass: OpPass,
) -> Option<Bound> {
    let of = Sequences { heads, seq, scores };
    match pass {
        OpPass::Forward => Some(with_workspace(
            move |on, threads| {
                ring_attention::forward_room::<T>(
                    threads,
                    of.with_rows(on.rows(0).rows, ShardIndex::WHOLE),
                )
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows, cpu.place.tensor);
                let need = ring_attention::forward_room::<T>(cpu.pool.threads(), shape);
                let (other, room) = (cpu.place.other(step), &mut cpu.workspace[..need]);
                let (qkv, kv) = (on.input::<T>(0), on.input(1));
                let (out, lse) = (on.output(0), on.output(1));
                ring_attention::merge_step(&cpu.pool, shape, other, qkv, kv, out, lse, room);
            },
        )),
        OpPass::BackwardInput => Some(with_workspace(
            move |on, threads| {
                ring_attention::backward_room::<T>(
                    threads,
                    of.with_rows(on.rows(0).rows, ShardIndex::WHOLE),
                )
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows, cpu.place.tensor);
                let need = ring_attention::backward_room::<T>(cpu.pool.threads(), shape);
                let (other, room) = (cpu.place.other(step), &mut cpu.workspace[..need]);
                let saved = ring_attention::Saved {
                    dout: on.input::<T>(0),
                    qkv: on.input(1),
                    out: on.input(2),
                    lse: on.input(3),
                    kv: on.input(4),
                };
                // The first step of a block initialises its gradients.
                let mode = if step == 1 { Write::Overwrite } else { Write::Accumulate };
                let outputs = (on.output(0), on.output(1));
                ring_attention::step_gradient(&cpu.pool, shape, other, saved, outputs, mode, room);
            },
        )),
        OpPass::BackwardWeight => None,
    }
}
