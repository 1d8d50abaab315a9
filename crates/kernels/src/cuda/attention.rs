//! Causal attention by cuDNN, on the packed rows `[q | k | v]` of a projection.
//!
//! Forward: `O = softmax(scale · Q Kᵀ + mask) V`; the logarithm of each row's sum of exponentials is
//! kept. Backward recomputes the probabilities from it (Dao et al., "FlashAttention-2", 2023). The
//! deterministic backward pass writes dQ by one product instead of adding to it atomically.

use super::cudnn::{Cudnn, Data, FLOAT, Graph, Layout, Plan, Tensor};
use super::device::CudaError;
use super::element_type::ElementType;
use cudarc::cudnn::sys::{cudnnPointwiseMode_t as Mode, cudnnReduceTensorOp_t as Reduce};
use cudarc::driver::sys::CUdeviceptr;

/// Shape of an attention operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Elements of a head.
    pub head_dim: u64,
    /// Element type.
    pub element: ElementType,
    /// True for a backward pass with equal bits every time.
    pub deterministic: bool,
}

/// Compiled forward and backward passes of a shape.
pub struct Attention {
    shape: AttentionShape,
    forward: Plan,
    backward: Plan,
}

/// Addresses of a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct ForwardAt {
    /// Rows of queries, keys and values.
    pub qkv: CUdeviceptr,
    /// Output rows.
    pub output: CUdeviceptr,
    /// Logarithms of the sums of exponentials, `[batch, heads, seq]`.
    pub stats: CUdeviceptr,
    /// Workspace of [`Attention::workspace`] bytes.
    pub workspace: CUdeviceptr,
}

/// Addresses of a backward pass.
#[derive(Clone, Copy, Debug)]
pub struct BackwardAt {
    /// Tensors of the forward pass.
    pub forward: ForwardAt,
    /// Gradient of the output.
    pub output_gradient: CUdeviceptr,
    /// Gradient of the packed rows.
    pub qkv_gradient: CUdeviceptr,
}

const Q: i64 = 1;
const K: i64 = 2;
const V: i64 = 3;
const O: i64 = 4;
const STATS: i64 = 5;
const DO: i64 = 6;
const DQ: i64 = 7;
const DK: i64 = 8;
const DV: i64 = 9;
const SUMS: i64 = 10;
const DQ_SUM: i64 = 11;

/// Layouts of a shape's tensors.
struct Layouts {
    q: Layout,
    k: Layout,
    v: Layout,
    o: Layout,
    stats: Layout,
    scores: Layout,
}

impl AttentionShape {
    fn sizes(&self) -> [i64; 5] {
        [self.batch, self.seq, self.heads, self.kv_heads, self.head_dim].map(|size| size as i64)
    }

    fn layouts(&self) -> Layouts {
        let [b, s, h, g, d] = self.sizes();
        let row = (h + 2 * g) * d;
        let packed = |heads| Layout { dims: [b, heads, s, d], strides: [s * row, d, row, 1] };
        Layouts {
            q: packed(h),
            k: packed(g),
            v: packed(g),
            o: Layout { dims: [b, h, s, d], strides: [s * h * d, d, h * d, 1] },
            stats: Layout::packed([b, h, s, 1]),
            scores: Layout::packed([b, h, s, s]),
        }
    }

    /// Returns true if cuDNN may have kernels for the shape.
    pub(super) fn is_fused(&self) -> bool {
        let sixteen = self.element != ElementType::F32;
        sixteen && self.head_dim.is_multiple_of(8) && self.head_dim <= 128
    }

    /// Byte offsets of keys and values in a packed row.
    fn offsets(&self) -> [u64; 2] {
        let head = self.head_dim * self.element.bytes();
        [self.heads * head, (self.heads + self.kv_heads) * head]
    }

    /// Bytes of the backward pass's row sums.
    fn sums_bytes(&self) -> u64 {
        (self.batch * self.heads * self.seq * 4).next_multiple_of(256)
    }

    /// Bytes of the f32 sum of dQ of the backward pass that adds atomically.
    fn dq_bytes(&self) -> u64 {
        let elements = self.batch * self.heads * self.seq * self.head_dim;
        if self.deterministic { 0 } else { (elements * 4).next_multiple_of(256) }
    }
}

impl Attention {
    /// Compiles both passes of a shape.
    pub fn new(cudnn: &Cudnn, shape: AttentionShape) -> Result<Self, CudaError> {
        Ok(Self {
            shape,
            forward: forward(&shape)?.plan(cudnn, "attention")?,
            backward: backward(&shape)?.plan(cudnn, "attention backward")?,
        })
    }

    /// Bytes of workspace that the forward and the backward pass need.
    pub fn workspace(&self) -> [u64; 2] {
        let own = self.shape.sums_bytes() + self.shape.dq_bytes();
        [self.forward.workspace, self.backward.workspace + own]
    }

    /// Queues the forward pass.
    ///
    /// # Safety
    ///
    /// The addresses are valid for the shape until the stream has passed the call.
    pub unsafe fn forward(&self, cudnn: &Cudnn, at: &ForwardAt) -> Result<(), CudaError> {
        let [k, v] = self.shape.offsets();
        let tensors =
            [(Q, at.qkv), (K, at.qkv + k), (V, at.qkv + v), (O, at.output), (STATS, at.stats)];
        // SAFETY: the caller's promise.
        unsafe { cudnn.run(&self.forward, &tensors, at.workspace) }
    }

    /// Queues the backward pass.
    ///
    /// # Safety
    ///
    /// As for [`Self::forward`].
    pub unsafe fn backward(&self, cudnn: &Cudnn, at: &BackwardAt) -> Result<(), CudaError> {
        let ([k, v], forward) = (self.shape.offsets(), &at.forward);
        let (sums, dq_sum) = (forward.workspace, forward.workspace + self.shape.sums_bytes());
        let mut tensors = vec![
            (Q, forward.qkv),
            (K, forward.qkv + k),
            (V, forward.qkv + v),
            (O, forward.output),
            (STATS, forward.stats),
            (DO, at.output_gradient),
            (DQ, at.qkv_gradient),
            (DK, at.qkv_gradient + k),
            (DV, at.qkv_gradient + v),
            (SUMS, sums),
        ];
        if !self.shape.deterministic {
            tensors.push((DQ_SUM, dq_sum));
        }
        // SAFETY: the caller's promise.
        unsafe { cudnn.run(&self.backward, &tensors, dq_sum + self.shape.dq_bytes()) }
    }
}

/// Scaled scores with later positions masked; `below` is subtracted between scale and mask.
fn scores(
    graph: &mut Graph,
    layouts: &Layouts,
    (q, k): (Tensor, Tensor),
    scale: f32,
    below: Option<Tensor>,
) -> Result<Tensor, CudaError> {
    let square = layouts.scores;
    let raw = graph.inner(square, FLOAT)?;
    graph.matmul(q, k, raw)?;
    let (factor, mut last) = (graph.scalar(scale)?, graph.inner(square, FLOAT)?);
    graph.pointwise(Mode::CUDNN_POINTWISE_MUL, FLOAT, &[raw, factor], last, None)?;
    if let Some(below) = below {
        let less = graph.inner(square, FLOAT)?;
        graph.pointwise(Mode::CUDNN_POINTWISE_SUB, FLOAT, &[last, below], less, None)?;
        last = less;
    }
    let row = graph.inner(square, Data::Int32)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, FLOAT, &[last], row, Some(2))?;
    let column = graph.inner(square, Data::Int32)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_GEN_INDEX, FLOAT, &[last], column, Some(3))?;
    let seen = graph.inner(square, Data::Boolean)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_CMP_GE, Data::Boolean, &[row, column], seen, None)?;
    let lowest = if Cudnn::version() < 91000 { f32::MIN } else { f32::NEG_INFINITY };
    let (lowest, masked) = (graph.scalar(lowest)?, graph.inner(square, FLOAT)?);
    let select = Mode::CUDNN_POINTWISE_BINARY_SELECT;
    graph.pointwise(select, FLOAT, &[last, lowest, seen], masked, None)
}

fn forward(shape: &AttentionShape) -> Result<Graph, CudaError> {
    let (layouts, element) = (shape.layouts(), Data::Element(shape.element));
    let mut graph = Graph::new();
    let q = graph.tensor(Q, layouts.q, element)?;
    let k = graph.tensor(K, layouts.k.transposed(), element)?;
    let v = graph.tensor(V, layouts.v, element)?;
    let o = graph.tensor(O, layouts.o, element)?;
    let stats = graph.tensor(STATS, layouts.stats, FLOAT)?;
    let scale = (shape.head_dim as f32).sqrt().recip();
    let masked = scores(&mut graph, &layouts, (q, k), scale, None)?;
    let (square, column) = (layouts.scores, layouts.stats);
    let max = graph.inner(column, FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, masked, max)?;
    let less = graph.inner(square, FLOAT)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_SUB, FLOAT, &[masked, max], less, None)?;
    let exp = graph.inner(square, FLOAT)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_EXP, FLOAT, &[less], exp, None)?;
    let sum = graph.inner(column, FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exp, sum)?;
    let log = graph.inner(column, FLOAT)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_LOG, FLOAT, &[sum], log, None)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_ADD, FLOAT, &[max, log], stats, None)?;
    let p = graph.inner(square, element)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_DIV, FLOAT, &[exp, sum], p, None)?;
    graph.matmul(p, v, o)?;
    Ok(graph)
}

fn backward(shape: &AttentionShape) -> Result<Graph, CudaError> {
    let (layouts, element) = (shape.layouts(), Data::Element(shape.element));
    let [b, s, h, g, d] = shape.sizes();
    let mut graph = Graph::new();
    let q = graph.tensor(Q, layouts.q, element)?;
    let k = graph.tensor(K, layouts.k.transposed(), element)?;
    let v = graph.tensor(V, layouts.v.transposed(), element)?;
    let o = graph.tensor(O, layouts.o, element)?;
    let stats = graph.tensor(STATS, layouts.stats, FLOAT)?;
    let dout = graph.tensor(DO, layouts.o, element)?;
    let dq = graph.tensor(DQ, layouts.q, element)?;
    let dk = graph.tensor(DK, layouts.k, element)?;
    let dv = graph.tensor(DV, layouts.v, element)?;
    let (square, column) = (layouts.scores, layouts.stats);
    let (mul, sub) = (Mode::CUDNN_POINTWISE_MUL, Mode::CUDNN_POINTWISE_SUB);
    // Row sums of dO · O.
    let both =
        graph.inner(Layout { dims: [b, h, s, d], strides: [h * s * d, s * d, h * d, 1] }, FLOAT)?;
    graph.pointwise(mul, FLOAT, &[dout, o], both, None)?;
    let reduced = graph.inner(column, FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, both, reduced)?;
    let (one, sums) = (graph.scalar(1.0)?, graph.tensor(SUMS, column, FLOAT)?);
    graph.pointwise(mul, FLOAT, &[reduced, one], sums, None)?;
    // P = exp(scores - stats); dV = Pᵀ dO.
    let scale = (shape.head_dim as f32).sqrt().recip();
    let masked = scores(&mut graph, &layouts, (q, k), scale, Some(stats))?;
    let p = graph.inner(square, FLOAT)?;
    graph.pointwise(Mode::CUDNN_POINTWISE_EXP, FLOAT, &[masked], p, None)?;
    let turned = graph.inner(square.transposed(), element)?;
    graph.reshape(p, turned)?;
    key_gradient(&mut graph, (turned, dout, dv), [b, s, h, g, d], element)?;
    // dS = (dO Vᵀ - sums) · P · scale; dK = dSᵀ Q; dQ = dS K.
    let dp = graph.inner(square, FLOAT)?;
    graph.matmul(dout, v, dp)?;
    let less = graph.inner(square, FLOAT)?;
    graph.pointwise(sub, FLOAT, &[dp, sums], less, None)?;
    let weighted = graph.inner(square, FLOAT)?;
    graph.pointwise(mul, FLOAT, &[less, p], weighted, None)?;
    let (factor, ds) = (graph.scalar(scale)?, graph.inner(square, FLOAT)?);
    graph.pointwise(mul, FLOAT, &[weighted, factor], ds, None)?;
    let turned = graph.inner(square.transposed(), element)?;
    graph.reshape(ds, turned)?;
    key_gradient(&mut graph, (turned, q, dk), [b, s, h, g, d], element)?;
    let keys = graph.inner(layouts.k, element)?;
    graph.reshape(k, keys)?;
    if shape.deterministic {
        graph.matmul(ds, keys, dq)?;
    } else {
        let sum = graph.tensor(DQ_SUM, Layout::packed([b, h, s, d]), FLOAT)?;
        graph.matmul(ds, keys, sum)?;
        graph.pointwise(Mode::CUDNN_POINTWISE_IDENTITY, FLOAT, &[sum], dq, None)?;
    }
    Ok(graph)
}

/// Product into the gradient of keys or values; with grouped queries, summed over each group.
fn key_gradient(
    graph: &mut Graph,
    (a, b, to): (Tensor, Tensor, Tensor),
    [batch, s, h, g, d]: [i64; 5],
    element: Data,
) -> Result<(), CudaError> {
    if h == g {
        return graph.matmul(a, b, to).map(|_| ());
    }
    let full = graph.inner(Layout::packed([batch, h, s, d]), element)?;
    graph.matmul(a, b, full)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, full, to).map(|_| ())
}
