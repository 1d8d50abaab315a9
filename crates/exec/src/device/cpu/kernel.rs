//! Kernels that can be run: each is an operator of the plan in one of its passes.

use paceline_kernels::batch_norm::Shares;
use paceline_kernels::experts::route;
use paceline_kernels::rope::Rotation;
use paceline_kernels::{Window, attention, head_norm, latent};
use paceline_plan::compress::CompressOp;
use paceline_plan::graph::{
    self, ActivationKind, Heads, LatentHeads, NormKind, OpKind, OpPass, Routing,
};
use paceline_plan::outer_optimizer::OuterOp;

/// An implemented computation. Anything else in a plan is rejected before the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kernel {
    Embedding,
    EmbeddingWeight,
    Position,
    PositionWeight,
    Norm { norm: NormKind, eps: f32 },
    NormInput { norm: NormKind },
    NormWeight { norm: NormKind },
    Linear,
    LinearInput,
    LinearWeight,
    Bias,
    BiasWeight,
    Rope(Rotation),
    RopeInput(Rotation),
    Attention(AttentionShape),
    AttentionInput(AttentionShape),
    KeysValues { width: usize },
    KeysValuesInput { width: usize },
    AttentionBlock { shape: AttentionShape, step: u32 },
    AttentionBlockInput { shape: AttentionShape, step: u32 },
    Activation(ActivationKind),
    ActivationInput(ActivationKind),
    SwiGlu,
    SwiGluInput,
    Add,
    RowMax,
    SoftmaxStats,
    CrossEntropy,
    CrossEntropyInput { scale: f32 },
    Images(Images),
    Clicks(Clicks),
    BinaryCrossEntropy,
    BinaryCrossEntropyInput { scale: f32 },
    BlockSquares { parts: u32, experts: bool },
    TensorSquares,
    Norm2,
    Compress(CompressOp),
    Outer(OuterOp),
    Total,
    Expert(ExpertKernel),
    Heads(HeadKernel),
}

/// Kernels of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ExpertKernel {
    Route(route::Routing),
    RouteInput(route::Routing),
    RouteWeight(route::Routing),
    Dispatch { experts: usize, topk: usize, regions: usize },
    DispatchInput { topk: usize },
    Combine { topk: usize },
    CombineInput { topk: usize },
    Linear { experts: usize, regions: usize },
    LinearInput { experts: usize, regions: usize },
    LinearWeight { experts: usize, regions: usize },
}

/// Kernels that prepare heads for attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum HeadKernel {
    Norm { shape: head_norm::Shape, eps: f32 },
    NormInput { shape: head_norm::Shape },
    NormWeight { shape: head_norm::Shape },
    Latent(latent::Shape),
    LatentInput(latent::Shape),
    Values(latent::Shape),
    ValuesInput(latent::Shape),
}

/// Kernels on images; the operands give the number of images.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Images {
    Conv(Window),
    ConvInput(Window),
    ConvWeight(Window),
    BatchSums { channels: usize },
    BatchSumsInput { channels: usize },
    BatchNorm(BatchNorm),
    BatchNormInput(BatchNorm),
    BatchNormWeight(BatchNorm),
    MaxPool(Window),
    MaxPoolInput(Window),
    AveragePool { channels: usize },
    AveragePoolInput { channels: usize },
}

/// Kernels on embedding tables or their outputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Clicks {
    EmbeddingBag { tables: u64, lookups: u64, width: u64 },
    EmbeddingBagWeight { tables: u64, lookups: u64, width: u64 },
    StepRows { tables: u64, lookups: u64, width: u64 },
    Interact { tables: u64, parts: u32 },
    InteractInput { tables: u64, parts: u32 },
}

/// Parameters of a batch norm besides its operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchNorm {
    pub(crate) channels: usize,
    pub(crate) eps: f32,
    /// Number of pixels in the sums.
    pub(crate) count: f32,
    /// Share of this rank in the gradients, and of the microbatch in the running averages.
    pub(crate) shares: Shares,
}

/// Attention on sequences of one length; the operands give their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    heads: Heads,
    seq: u64,
}

impl AttentionShape {
    /// Shape of the kernel for `rows` rows.
    pub(crate) fn with_rows(self, rows: usize) -> attention::Shape {
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

impl Kernel {
    /// The expert kernel, if it is one.
    pub(crate) fn of_experts(&self) -> Option<ExpertKernel> {
        if let Self::Expert(kernel) = self { Some(*kernel) } else { None }
    }

    /// Kernel of an operator's pass; `None` if it cannot be run.
    pub(crate) fn of(kind: OpKind, part: OpPass) -> Option<Self> {
        let rotation = |heads: Heads, theta: f64| Rotation {
            heads: heads.heads as usize,
            kv_heads: heads.kv_heads as usize,
            head_dim: heads.head_dim as usize,
            theta,
        };
        let window = |w: graph::Window| Window {
            side: w.side as usize,
            channels: w.channels as usize,
            kernel: w.kernel as usize,
            stride: w.stride as usize,
            padding: w.padding as usize,
        };
        let images = |kernel: Images| Some(Self::Images(kernel));
        let [forward, input, weight] = match kind {
            OpKind::Embedding => [Some(Self::Embedding), None, Some(Self::EmbeddingWeight)],
            OpKind::Position => [Some(Self::Position), None, Some(Self::PositionWeight)],
            OpKind::Norm { norm, eps } => [
                Some(Self::Norm { norm, eps: eps as f32 }),
                Some(Self::NormInput { norm }),
                Some(Self::NormWeight { norm }),
            ],
            OpKind::Linear { role: _ } => {
                [Some(Self::Linear), Some(Self::LinearInput), Some(Self::LinearWeight)]
            }
            OpKind::Bias => [Some(Self::Bias), None, Some(Self::BiasWeight)],
            OpKind::Rope { heads, theta } => {
                let rotation = rotation(heads, theta);
                [Some(Self::Rope(rotation)), Some(Self::RopeInput(rotation)), None]
            }
            OpKind::Attention { heads, seq } => {
                let shape = AttentionShape { heads, seq };
                [Some(Self::Attention(shape)), Some(Self::AttentionInput(shape)), None]
            }
            OpKind::KeysValues { heads } => {
                let width = (2 * heads.kv_heads * heads.head_dim) as usize;
                [Some(Self::KeysValues { width }), Some(Self::KeysValuesInput { width }), None]
            }
            OpKind::AttentionBlock { heads, queries, keys, step } if queries == keys => {
                let shape = AttentionShape { heads, seq: queries };
                let [forward, input] = [
                    Self::AttentionBlock { shape, step },
                    Self::AttentionBlockInput { shape, step },
                ];
                [Some(forward), Some(input), None]
            }
            OpKind::Activation { function } => {
                [Some(Self::Activation(function)), Some(Self::ActivationInput(function)), None]
            }
            OpKind::SwiGlu => [Some(Self::SwiGlu), Some(Self::SwiGluInput), None],
            OpKind::Add => [Some(Self::Add), None, None],
            OpKind::RowMax => [Some(Self::RowMax), None, None],
            OpKind::SoftmaxStats => [Some(Self::SoftmaxStats), None, None],
            OpKind::CrossEntropy { scale } => {
                let scale = scale as f32;
                [Some(Self::CrossEntropy), Some(Self::CrossEntropyInput { scale }), None]
            }
            OpKind::EmbeddingBag { tables, lookups, width } => {
                let [forward, weight] = [
                    Clicks::EmbeddingBag { tables, lookups, width },
                    Clicks::EmbeddingBagWeight { tables, lookups, width },
                ];
                [Some(Self::Clicks(forward)), None, Some(Self::Clicks(weight))]
            }
            OpKind::StepRows { tables, lookups, width } => {
                let step = Clicks::StepRows { tables, lookups, width };
                [None, None, Some(Self::Clicks(step))]
            }
            OpKind::Interact { tables, width: _, parts } => {
                let [forward, input] =
                    [Clicks::Interact { tables, parts }, Clicks::InteractInput { tables, parts }];
                [Some(Self::Clicks(forward)), Some(Self::Clicks(input)), None]
            }
            OpKind::BinaryCrossEntropy { scale } => {
                let scale = scale as f32;
                let input = Self::BinaryCrossEntropyInput { scale };
                [Some(Self::BinaryCrossEntropy), Some(input), None]
            }
            OpKind::Conv { window: of } => {
                let of = window(of);
                [Images::Conv(of), Images::ConvInput(of), Images::ConvWeight(of)].map(images)
            }
            OpKind::BatchSums { channels } => {
                let channels = channels as usize;
                let input = images(Images::BatchSumsInput { channels });
                [images(Images::BatchSums { channels }), input, None]
            }
            OpKind::BatchNorm { channels, eps, pixels, over, share } => {
                let norm = BatchNorm {
                    channels: channels as usize,
                    eps: eps as f32,
                    count: pixels as f32 * over as f32,
                    shares: Shares { gradients: 1.0 / over as f32, averages: share as f32 },
                };
                let all = [
                    Images::BatchNorm(norm),
                    Images::BatchNormInput(norm),
                    Images::BatchNormWeight(norm),
                ];
                all.map(images)
            }
            OpKind::MaxPool { window: of } => {
                let of = window(of);
                [images(Images::MaxPool(of)), images(Images::MaxPoolInput(of)), None]
            }
            OpKind::AveragePool { channels } => {
                let channels = channels as usize;
                let input = images(Images::AveragePoolInput { channels });
                [images(Images::AveragePool { channels }), input, None]
            }
            OpKind::BlockSquares { parts, experts } => {
                [Some(Self::BlockSquares { parts, experts }), None, None]
            }
            OpKind::TensorSquares => [Some(Self::TensorSquares), None, None],
            OpKind::Norm2 => [Some(Self::Norm2), None, None],
            OpKind::Compress(op) => [Some(Self::Compress(op)), None, None],
            OpKind::Outer(op) => [Some(Self::Outer(op)), None, None],
            OpKind::Total => [Some(Self::Total), None, None],
            OpKind::Route(routing) => {
                let routing = routing_of(routing);
                [
                    Some(Self::Expert(ExpertKernel::Route(routing))),
                    Some(Self::Expert(ExpertKernel::RouteInput(routing))),
                    Some(Self::Expert(ExpertKernel::RouteWeight(routing))),
                ]
            }
            OpKind::Dispatch { experts, topk, regions } => {
                let [experts, topk, regions] = [experts, topk, regions].map(|n| n as usize);
                let forward = ExpertKernel::Dispatch { experts, topk, regions };
                let input = ExpertKernel::DispatchInput { topk };
                [Some(Self::Expert(forward)), Some(Self::Expert(input)), None]
            }
            OpKind::Combine { topk } => {
                let topk = topk as usize;
                let [forward, input] =
                    [ExpertKernel::Combine { topk }, ExpertKernel::CombineInput { topk }];
                [Some(Self::Expert(forward)), Some(Self::Expert(input)), None]
            }
            OpKind::ExpertLinear { experts, regions, role: _, rows: _ } => {
                let [experts, regions] = [experts, regions].map(|n| n as usize);
                [
                    Some(Self::Expert(ExpertKernel::Linear { experts, regions })),
                    Some(Self::Expert(ExpertKernel::LinearInput { experts, regions })),
                    Some(Self::Expert(ExpertKernel::LinearWeight { experts, regions })),
                ]
            }
            OpKind::HeadNorm { heads: Heads { heads, kv_heads, head_dim }, eps } => {
                let [heads, kv_heads, head_dim] = [heads, kv_heads, head_dim].map(|n| n as usize);
                let shape = head_norm::Shape { heads, kv_heads, head_dim };
                [
                    Some(Self::Heads(HeadKernel::Norm { shape, eps: eps as f32 })),
                    Some(Self::Heads(HeadKernel::NormInput { shape })),
                    Some(Self::Heads(HeadKernel::NormWeight { shape })),
                ]
            }
            OpKind::LatentHeads(heads) => {
                let shape = latent_of(heads);
                let [forward, input] = [HeadKernel::Latent(shape), HeadKernel::LatentInput(shape)];
                [Some(Self::Heads(forward)), Some(Self::Heads(input)), None]
            }
            OpKind::LatentValues(heads) => {
                let shape = latent_of(heads);
                let [forward, input] = [HeadKernel::Values(shape), HeadKernel::ValuesInput(shape)];
                [Some(Self::Heads(forward)), Some(Self::Heads(input)), None]
            }
            OpKind::AttentionBlock { heads: _, queries: _, keys: _, step: _ } => [None, None, None],
        };
        match part {
            OpPass::Forward => forward,
            OpPass::BackwardInput => input,
            OpPass::BackwardWeight => weight,
        }
    }
}

fn routing_of(routing: Routing) -> route::Routing {
    let Routing { experts, topk, sigmoid, scale, seq, capacity, balance, .. } = routing;
    let [groups, kept_groups, parts] =
        [routing.groups, routing.kept_groups, routing.parts].map(|n| n as usize);
    route::Routing {
        experts: experts as usize,
        topk: topk as usize,
        sigmoid,
        scale: scale as f32,
        seq: seq as usize,
        capacity: capacity.map(|capacity| capacity as usize),
        balance: balance as f32,
        groups,
        kept_groups,
        parts,
    }
}

fn latent_of(heads: LatentHeads) -> latent::Shape {
    latent::Shape {
        heads: heads.heads as usize,
        head_dim: heads.head_dim as usize,
        rope: heads.rope as usize,
        v_dim: heads.v_dim as usize,
        theta: heads.theta,
    }
}
