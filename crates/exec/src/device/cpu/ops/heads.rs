//! Operators that prepare heads for attention: their norms, and heads from latent vectors.

use super::attention::frequencies;
use crate::device::cpu::bind::{Bound, plain};
use crate::device::cpu::tiles::over_rows;
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, Rows, head_norm, latent as kernels, whole_norm};
use paceline_plan::graph::{HeadNormKind, Heads, LatentHeads, OpPass};

pub(in crate::device::cpu) fn norm<T: Element, G: Element>(
    heads: Heads,
    eps: f32,
    norm: HeadNormKind,
    pass: OpPass,
) -> Option<Bound> {
    let shape = head_shape(heads, norm);
    // Gains of norms without parameters are the least one.
    let none = vec![T::ZERO; if norm == HeadNormKind::Bare { shape.head_dim } else { 0 }];
    Some(match pass {
        OpPass::Forward => plain(move |cpu, on, _| {
            let gains = [0, 1].map(|i| if on.has_param(i) { on.param(i) } else { &none[..] });
            let (rows, x) = (on.rows(0), on.input::<T>(0));
            let outputs = (strips(on.output(0), rows.width), strips(on.output(1), shape.stats()));
            over_rows(&cpu.pool, rows, outputs, |_, at, (y, stats)| {
                let x = &x[at.start * rows.width..at.end * rows.width];
                head_norm::forward(shape, eps, x, gains, y, stats);
            });
        }),
        OpPass::BackwardInput => plain(move |cpu, on, _| {
            let (rows, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let gains = [0, 1].map(|i| if on.has_param(i) { on.param(i) } else { &none[..] });
            let stats = on.input::<f32>(2);
            over_rows(&cpu.pool, rows, strips(on.output(0), rows.width), |_, at, dx| {
                let of = at.start * rows.width..at.end * rows.width;
                let stats = &stats[at.start * shape.stats()..at.end * shape.stats()];
                head_norm::input_gradient(shape, &dy[of.clone()], &x[of], gains, stats, dx);
            });
        }),
        OpPass::BackwardWeight => plain(move |cpu, on, mode| {
            let (dy, x, stats) = (on.input::<T>(0), on.input(1), on.input(2));
            let gains = [on.gradient::<G>(0), on.gradient(1)];
            head_norm::weight_gradient(&cpu.pool, shape, dy, x, stats, gains, mode);
        }),
    })
}

/// Parameters of the norm kernels.
pub(crate) fn head_shape(heads: Heads, norm: HeadNormKind) -> head_norm::Shape {
    let [heads, kv_heads, head_dim] =
        [heads.heads, heads.kv_heads, heads.head_dim].map(|n| n as usize);
    let least = match norm {
        HeadNormKind::Head => 0.0,
        HeadNormKind::HeadUnit | HeadNormKind::Bare => 1.0,
    };
    head_norm::Shape { heads, kv_heads, head_dim, least }
}

pub(in crate::device::cpu) fn whole_squares<T: Element>(
    heads: Heads,
    pass: OpPass,
) -> Option<Bound> {
    let shape = whole_shape(heads);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (rows, x) = (on.rows(0), on.input::<T>(0));
            over_rows(&cpu.pool, rows, strips(on.output(0), 2), |_, at, squares| {
                whole_norm::squares(shape, &x[at.start * rows.width..at.end * rows.width], squares);
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (rows, dsquares, x) = (on.rows(1), on.input::<f32>(0), on.input::<T>(1));
            over_rows(&cpu.pool, rows, strips(on.output(0), rows.width), |_, at, dx| {
                let x = &x[at.start * rows.width..at.end * rows.width];
                whole_norm::squares_gradient(shape, &dsquares[2 * at.start..2 * at.end], x, dx);
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn whole_norm<T: Element, G: Element>(
    heads: Heads,
    whole: [u64; 2],
    eps: f32,
    pass: OpPass,
) -> Option<Bound> {
    let shape = whole_shape(heads);
    let norm = whole_norm::Norm { whole: whole.map(|width| width as usize), eps };
    Some(match pass {
        OpPass::Forward => plain(move |cpu, on, _| {
            let (rows, x, squares) = (on.rows(0), on.input::<T>(0), on.input::<f32>(1));
            let gains = [on.param(0), on.param(1)];
            over_rows(&cpu.pool, rows, strips(on.output(0), rows.width), |_, at, y| {
                let x = &x[at.start * rows.width..at.end * rows.width];
                whole_norm::forward(shape, norm, x, &squares[2 * at.start..2 * at.end], gains, y);
            });
        }),
        OpPass::BackwardInput => plain(move |cpu, on, _| {
            let (rows, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
            let (squares, gains) = (on.input::<f32>(2), [on.param(0), on.param(1)]);
            let outputs = (strips(on.output(0), rows.width), strips(on.output(1), 2));
            over_rows(&cpu.pool, rows, outputs, |_, at, made| {
                let of = at.start * rows.width..at.end * rows.width;
                let (inputs, squares) =
                    ((&dy[of.clone()], &x[of]), &squares[2 * at.start..2 * at.end]);
                whole_norm::input_gradient(shape, norm, inputs, squares, gains, made);
            });
        }),
        OpPass::BackwardWeight => plain(move |cpu, on, mode| {
            let (inputs, squares) = ((on.input::<T>(0), on.input(1)), on.input(2));
            let gains = [on.gradient::<G>(0), on.gradient(1)];
            whole_norm::weight_gradient(&cpu.pool, (shape, norm), inputs, squares, gains, mode);
        }),
    })
}

/// Widths of a fused row.
pub(crate) fn whole_shape(heads: Heads) -> whole_norm::Shape {
    let width = |count: u64| (count * heads.head_dim) as usize;
    whole_norm::Shape { queries: width(heads.heads), keys: width(heads.kv_heads) }
}

/// Parameters of the kernels of latent attention.
pub(crate) fn shape_of(heads: LatentHeads, frequencies: &[f64]) -> kernels::Shape<'_> {
    kernels::Shape {
        heads: heads.heads as usize,
        head_dim: heads.head_dim as usize,
        rope: heads.rope as usize,
        v_dim: heads.v_dim as usize,
        theta: heads.theta,
        magnitude: heads.rotary.magnitude as f32,
        frequencies,
    }
}

pub(in crate::device::cpu) fn latent<T: Element>(
    heads: LatentHeads,
    pass: OpPass,
) -> Option<Bound> {
    let frequencies = frequencies(heads.rope, heads.theta, heads.rotary);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let shape = shape_of(heads, &frequencies);
            let (q, kv, turned) = (on.input::<T>(0), on.input::<T>(1), on.input::<T>(2));
            let [qs, kvs, ts] = [0, 1, 2].map(|i| on.rows(i).width);
            let (rows, positions) = (on.output_rows(0), cpu.sequence());
            over_rows(&cpu.pool, rows, strips(on.output(0), rows.width), |_, at, qkv| {
                for (row, qkv) in at.zip(qkv.chunks_exact_mut(rows.width)) {
                    let (q, kv) = (&q[row * qs..][..qs], &kv[row * kvs..][..kvs]);
                    let (turned, position) =
                        (&turned[row * ts..][..ts], positions[row % positions.len()]);
                    kernels::heads(shape, position, q, kv, turned, qkv);
                }
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let shape = shape_of(heads, &frequencies);
            let (rows, dqkv, positions) = (on.rows(0), on.input::<T>(0), cpu.sequence());
            let [qs, kvs, ts] = [0, 1, 2].map(|i| on.output_rows(i).width);
            let outputs =
                (strips(on.output(0), qs), strips(on.output(1), kvs), strips(on.output(2), ts));
            over_rows(&cpu.pool, rows, outputs, |_, at, (dq, dkv, dturned)| {
                for (to, row) in at.enumerate() {
                    let dqkv = &dqkv[row * rows.width..][..rows.width];
                    let (dq, dkv) = (&mut dq[to * qs..][..qs], &mut dkv[to * kvs..][..kvs]);
                    let (dturned, position) =
                        (&mut dturned[to * ts..][..ts], positions[row % positions.len()]);
                    kernels::heads_gradient(shape, position, dqkv, dq, dkv, dturned);
                }
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

pub(in crate::device::cpu) fn values<T: Element>(
    heads: LatentHeads,
    pass: OpPass,
) -> Option<Bound> {
    let shape = shape_of(heads, &[]);
    match pass {
        OpPass::Forward => Some(plain(move |cpu, on, _| {
            let (rows, padded, width) = (on.rows(0), on.input::<T>(0), on.output_rows(0).width);
            over_rows(&cpu.pool, rows, strips(on.output(0), width), |_, at, y| {
                for (row, y) in at.zip(y.chunks_exact_mut(width)) {
                    kernels::values(shape, row_of(rows, padded, row), y);
                }
            });
        })),
        OpPass::BackwardInput => Some(plain(move |cpu, on, _| {
            let (rows, dy, width) = (on.rows(0), on.input::<T>(0), on.output_rows(0).width);
            over_rows(&cpu.pool, rows, strips(on.output(0), width), |_, at, dpadded| {
                for (row, dpadded) in at.zip(dpadded.chunks_exact_mut(width)) {
                    kernels::values_gradient(shape, row_of(rows, dy, row), dpadded);
                }
            });
        })),
        OpPass::BackwardWeight => None,
    }
}

fn row_of<T>(shape: Rows, x: &[T], row: usize) -> &[T] {
    &x[row * shape.width..(row + 1) * shape.width]
}
