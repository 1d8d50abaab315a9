//! Attention, whole or in steps around a ring, and rotary embedding.

use crate::device::cpu::bind::{Bound, plain, with_workspace};
use crate::device::cpu::tiles::over_sequences;
use paceline_kernels::rope::Rotation;
use paceline_kernels::{Element, Write, attention, ring_attention, rope as kernels};
use paceline_plan::graph::{Heads, OpPass};

pub(in crate::device::cpu) fn rope<T: Element>(
    heads: Heads,
    theta: f64,
    pass: OpPass,
) -> Option<Bound> {
    let rotation = Rotation {
        heads: heads.heads as usize,
        kv_heads: heads.kv_heads as usize,
        head_dim: heads.head_dim as usize,
        theta,
    };
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (positions, qkv) = (cpu.sequence(), on.input::<T>(0));
            over_sequences(&cpu.pool, on.rows(0), positions, on.output(0), |at, out| {
                kernels::forward(rotation, positions, &qkv[at], out);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (positions, dout) = (cpu.sequence(), on.input::<T>(0));
            over_sequences(&cpu.pool, on.rows(0), positions, on.output(0), |at, dqkv| {
                kernels::input_gradient(rotation, positions, &dout[at], dqkv);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

/// Attention on sequences of one length; the operands give their number.
#[derive(Clone, Copy, Debug)]
struct Sequences {
    heads: Heads,
    seq: u64,
}

impl Sequences {
    /// Shape of the kernel for `rows` rows.
    fn with_rows(self, rows: usize) -> attention::Shape {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let seq = self.seq as usize;
        attention::Shape {
            batch: rows.checked_div(seq).unwrap_or(0),
            seq,
            heads: heads as usize,
            kv_heads: kv_heads as usize,
            head_dim: head_dim as usize,
            causal: true,
        }
    }
}

pub(in crate::device::cpu) fn whole<T: Element>(
    heads: Heads,
    seq: u64,
    pass: OpPass,
) -> Option<Bound> {
    let of = Sequences { heads, seq };
    match pass {
        OpPass::Forward => Some(with_workspace(
            move |on, threads| threads * of.with_rows(on.rows(0).rows).forward_workspace::<T>(),
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows);
                let need = cpu.pool.threads() * shape.forward_workspace::<T>();
                let (qkv, out, lse) = (on.input::<T>(0), on.output(0), on.output(1));
                attention::forward(&cpu.pool, shape, qkv, out, lse, &mut cpu.workspace[..need]);
            },
        )),
        OpPass::BackwardInput => Some(with_workspace(
            move |on, threads| threads * of.with_rows(on.rows(0).rows).backward_workspace::<T>(),
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows);
                let need = cpu.pool.threads() * shape.backward_workspace::<T>();
                let (dout, qkv) = (on.input::<T>(0), on.input(1));
                let (out, lse, dqkv) = (on.input(2), on.input(3), on.output(0));
                let room = &mut cpu.workspace[..need];
                attention::backward(&cpu.pool, shape, dout, qkv, out, lse, dqkv, room);
            },
        )),
        OpPass::BackwardWeight => None,
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
    pass: OpPass,
) -> Option<Bound> {
    let of = Sequences { heads, seq };
    match pass {
        OpPass::Forward => Some(with_workspace(
            move |on, threads| {
                ring_attention::forward_room::<T>(threads, of.with_rows(on.rows(0).rows))
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows);
                let need = ring_attention::forward_room::<T>(cpu.pool.threads(), shape);
                let (other, room) = (cpu.place.other(step), &mut cpu.workspace[..need]);
                let (qkv, kv) = (on.input::<T>(0), on.input(1));
                let (out, lse) = (on.output(0), on.output(1));
                ring_attention::merge_step(&cpu.pool, shape, other, qkv, kv, out, lse, room);
            },
        )),
        OpPass::BackwardInput => Some(with_workspace(
            move |on, threads| {
                ring_attention::backward_room::<T>(threads, of.with_rows(on.rows(0).rows))
            },
            move |cpu, on, _| {
                let shape = of.with_rows(on.rows(0).rows);
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
