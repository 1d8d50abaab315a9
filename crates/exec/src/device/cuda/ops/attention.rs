//! Attention and rotary embedding.

use crate::device::Stream;
use crate::device::cuda::Cuda;
use crate::device::cuda::bind::{Bound, kernel};
use crate::error::Fault;
use paceline_kernels::Rows;
use paceline_kernels::Write;
use paceline_kernels::arena::Span;
use paceline_kernels::cuda::{
    AttentionAt, AttentionGradientAt, AttentionShape, Device as Gpu, RingStepAt,
    RingStepGradientAt, RotationAt, Table,
};
use paceline_plan::graph::{Heads, OpPass};

/// Rotates queries and keys of packed rows in place, or back.
pub(in crate::device::cuda) fn rotate(
    cuda: &mut Cuda,
    on: Stream,
    shape: Rows,
    heads: Heads,
    theta: f64,
    rows: Span,
    back: bool,
) -> Result<(), Fault> {
    let table = cuda.rotation(theta, heads.head_dim)?;
    let at = RotationAt {
        rows,
        heads: (heads.heads + heads.kv_heads) as u32,
        head_dim: heads.head_dim as u32,
        seq: cuda.seq as u32,
        table,
        back,
    };
    Ok(cuda.gpu.rotate(on, cuda.element, shape, &at)?)
}

impl Cuda {
    /// Cosines and sines by position and pair.
    pub(super) fn rotation(&mut self, theta: f64, dims: u64) -> Result<Table, Fault> {
        let key = (theta.to_bits(), dims, self.seq);
        if let Some(&known) = self.rotations.get(&key) {
            return Ok(known);
        }
        let mut values = Vec::with_capacity(self.seq * dims as usize);
        for &position in &self.positions.0 {
            for pair in 0..dims / 2 {
                let angle = f64::from(position) * theta.powf(-2.0 * pair as f64 / dims as f64);
                values.extend([angle.cos() as f32, angle.sin() as f32]);
            }
        }
        let table = self.gpu.table(bytemuck::cast_slice(&values))?;
        self.rotations.insert(key, table);
        Ok(table)
    }
}

pub(in crate::device::cuda) fn rope(heads: Heads, theta: f64, pass: OpPass) -> Bound {
    let back = match pass {
        OpPass::Forward => false,
        OpPass::BackwardInput => true,
        OpPass::BackwardWeight => return None,
    };
    kernel(move |cuda, on, _| {
        let (from, to) = (on.input(0), on.output(0));
        if from != to {
            cuda.gpu.copy(on.on, from, to)?;
        }
        rotate(cuda, on.on, on.output_rows(0), heads, theta, to, back)
    })
}

fn shape_of(cuda: &Cuda, heads: Heads, seq: u64, rows: Rows) -> AttentionShape {
    let Heads { heads, kv_heads, head_dim } = heads;
    let (batch, element) = ((rows.rows as u64).checked_div(seq).unwrap_or(0), cuda.element);
    AttentionShape { batch, seq, heads, kv_heads, head_dim, element, deterministic: true }
}

pub(in crate::device::cuda) fn bind(heads: Heads, seq: u64, pass: OpPass) -> Bound {
    if !Gpu::has_attention(heads.head_dim) {
        return None;
    }
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let at = AttentionAt { qkv: on.input(0), output: on.output(0), lse: on.output(1) };
            let shape = shape_of(cuda, heads, seq, on.rows(0));
            Ok(cuda.gpu.attention_forward(on.on, &shape, &at)?)
        }),
        OpPass::BackwardInput => gradient(heads, seq, None),
        OpPass::BackwardWeight => None,
    }
}

/// Keys and values of packed rows, which go around the ring.
pub(in crate::device::cuda) fn keys_values(pass: OpPass) -> Bound {
    match pass {
        OpPass::Forward => kernel(|cuda, on, _| {
            let of = (on.rows(0), on.output_rows(0));
            let at = (on.input(0), on.output(0));
            Ok(cuda.gpu.keys_and_values(on.on, cuda.element, of, at, false)?)
        }),
        OpPass::BackwardInput => kernel(|cuda, on, _| {
            let of = (on.output_rows(0), on.rows(0));
            let at = (on.output(0), on.input(0));
            Ok(cuda.gpu.keys_and_values(on.on, cuda.element, of, at, true)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

/// Step of ring attention.
pub(in crate::device::cuda) fn block(heads: Heads, seq: u64, step: u32, pass: OpPass) -> Bound {
    if !Gpu::has_attention(heads.head_dim) {
        return None;
    }
    match pass {
        OpPass::Forward => kernel(move |cuda, on, _| {
            let (shape, other) = (shape_of(cuda, heads, seq, on.rows(0)), cuda.place.other(step));
            let (qkv, kv, output, lse) = (on.input(0), on.input(1), on.output(0), on.output(1));
            let at = RingStepAt { qkv, kv, output, lse };
            Ok(cuda.gpu.ring_step(on.on, &shape, other, &at)?)
        }),
        OpPass::BackwardInput => kernel(move |cuda, on, _| {
            let (shape, other) = (shape_of(cuda, heads, seq, on.rows(0)), cuda.place.other(step));
            let (qkv, output, lse, kv) = (on.input(1), on.input(2), on.input(3), on.input(4));
            let (doutput, dqkv, dkv) = (on.input(0), on.output(0), on.output(1));
            let forward = RingStepAt { qkv, kv, output, lse };
            let at = RingStepGradientAt { forward, doutput, dqkv, dkv };
            // The first step of a block initialises its gradients.
            let mode = if step == 1 { Write::Overwrite } else { Write::Accumulate };
            Ok(cuda.gpu.ring_step_gradient(on.on, &shape, other, &at, mode)?)
        }),
        OpPass::BackwardWeight => None,
    }
}

/// Gradient of packed rows, rotated back if the rows were rotated with base `theta`.
pub(in crate::device::cuda) fn gradient(heads: Heads, seq: u64, theta: Option<f64>) -> Bound {
    if !Gpu::has_attention(heads.head_dim) {
        return None;
    }
    kernel(move |cuda, on, _| {
        let dqkv = on.output(0);
        let forward = AttentionAt { qkv: on.input(1), output: on.input(2), lse: on.input(3) };
        let at = AttentionGradientAt { forward, doutput: on.input(0), dqkv };
        let shape = shape_of(cuda, heads, seq, on.rows(0));
        cuda.gpu.attention_gradient(on.on, &shape, &at)?;
        match theta {
            Some(theta) => rotate(cuda, on.on, on.output_rows(0), heads, theta, dqkv, true),
            None => Ok(()),
        }
    })
}
