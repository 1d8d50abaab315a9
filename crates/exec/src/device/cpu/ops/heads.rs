//! Operators that prepare heads for attention: their norms, and heads from latent vectors.

use crate::device::cpu::kernel::HeadKernel;
use crate::device::cpu::operands::Operands;
use crate::device::cpu::{Compute, Write, over_rows};
use paceline_kernels::pool::strips;
use paceline_kernels::{Element, Rows, head_norm, latent};

impl Compute<'_> {
    pub(in crate::device::cpu) fn run_heads<T: Element, G: Element>(
        &self,
        kernel: HeadKernel,
        on: &Operands<'_>,
        mode: Write,
    ) {
        let pool = &self.pool;
        match kernel {
            HeadKernel::Norm { shape, eps } => {
                let (rows, x, gains) = (on.rows(0), on.input::<T>(0), [on.param(0), on.param(1)]);
                let outputs =
                    (strips(on.output(0), rows.width), strips(on.output(1), shape.stats()));
                over_rows(pool, rows, outputs, |_, at, (y, stats)| {
                    let x = &x[at.start * rows.width..at.end * rows.width];
                    head_norm::forward(shape, eps, x, gains, y, stats);
                });
            }
            HeadKernel::NormInput { shape } => {
                let (rows, dy, x) = (on.rows(0), on.input::<T>(0), on.input::<T>(1));
                let (gains, stats) = ([on.param(0), on.param(1)], on.input::<f32>(2));
                over_rows(pool, rows, strips(on.output(0), rows.width), |_, at, dx| {
                    let of = at.start * rows.width..at.end * rows.width;
                    let stats = &stats[at.start * shape.stats()..at.end * shape.stats()];
                    head_norm::input_gradient(shape, &dy[of.clone()], &x[of], gains, stats, dx);
                });
            }
            HeadKernel::NormWeight { shape } => {
                let (dy, x, stats) = (on.input::<T>(0), on.input(1), on.input(2));
                let gains = [on.gradient::<G>(0), on.gradient(1)];
                head_norm::weight_gradient(pool, shape, dy, x, stats, gains, mode);
            }
            HeadKernel::Latent(shape) => {
                let (q, kv, turned) = (on.input::<T>(0), on.input::<T>(1), on.input::<T>(2));
                let [qs, kvs, ts] = [0, 1, 2].map(|i| on.rows(i).width);
                let rows = on.output_rows(0);
                over_rows(pool, rows, strips(on.output(0), rows.width), |_, at, qkv| {
                    for (row, qkv) in at.zip(qkv.chunks_exact_mut(rows.width)) {
                        let (q, kv) = (&q[row * qs..][..qs], &kv[row * kvs..][..kvs]);
                        let turned = &turned[row * ts..][..ts];
                        latent::heads(shape, self.position(row), q, kv, turned, qkv);
                    }
                });
            }
            HeadKernel::LatentInput(shape) => {
                let (rows, dqkv) = (on.rows(0), on.input::<T>(0));
                let [qs, kvs, ts] = [0, 1, 2].map(|i| on.output_rows(i).width);
                let outputs =
                    (strips(on.output(0), qs), strips(on.output(1), kvs), strips(on.output(2), ts));
                over_rows(pool, rows, outputs, |_, at, (dq, dkv, dturned)| {
                    for (to, row) in at.enumerate() {
                        let dqkv = &dqkv[row * rows.width..][..rows.width];
                        let (dq, dkv) = (&mut dq[to * qs..][..qs], &mut dkv[to * kvs..][..kvs]);
                        let dturned = &mut dturned[to * ts..][..ts];
                        latent::heads_gradient(shape, self.position(row), dqkv, dq, dkv, dturned);
                    }
                });
            }
            HeadKernel::Values(shape) => {
                let (rows, padded, width) = (on.rows(0), on.input::<T>(0), on.output_rows(0).width);
                over_rows(pool, rows, strips(on.output(0), width), |_, at, y| {
                    for (row, y) in at.zip(y.chunks_exact_mut(width)) {
                        latent::values(shape, row_of(rows, padded, row), y);
                    }
                });
            }
            HeadKernel::ValuesInput(shape) => {
                let (rows, dy, width) = (on.rows(0), on.input::<T>(0), on.output_rows(0).width);
                over_rows(pool, rows, strips(on.output(0), width), |_, at, dpadded| {
                    for (row, dpadded) in at.zip(dpadded.chunks_exact_mut(width)) {
                        latent::values_gradient(shape, row_of(rows, dy, row), dpadded);
                    }
                });
            }
        }
    }

    /// Position of a row of whole sequences.
    fn position(&self, row: usize) -> u32 {
        self.positions[row % self.own_seq]
    }
}

fn row_of<T>(shape: Rows, x: &[T], row: usize) -> &[T] {
    &x[row * shape.width..(row + 1) * shape.width]
}
