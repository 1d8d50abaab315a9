//! Arbitrary plans.

use crate::collective::{
    Algorithm, CollectiveKind, Library, Method, Reduction, RingSet, SummationOrder, TorusShape,
};
use crate::compress::{Codec, CompressOp, Compression};
use crate::dtype::DType;
use crate::graph::{
    ActivationKind, Factors, GateKind, HeadNormKind, Heads, Init, LatentHeads, LinearRole, Mask,
    NormKind, OpKind, OpPass, Rotary, Routing, Scaling, Scores, Window,
};
use crate::ids::{
    BufferId, CallId, GroupId, LaneId, LayerId, Microbatch, OpId, SegmentId, StageRank,
};
use crate::mesh::{Axis, GroupKind, Mesh};
use crate::outer_optimizer::{LocalSgd, OuterOp, OuterOptimizer};
use crate::program::{
    Access, AccumulateMode, Bucket, Buffer, Call, CarryoverOp, ComputePass, Entry, IterationFilter,
    LoadKind, LocalOp, Memory, MemoryKind, Op, Operand, Outputs, Peer, Plan, Program, Section,
    Segment, Service, StepPhase, Template, TensorNorms, View,
};
use crate::samples::SampleKind;
use crate::schedule::ScheduleKind;
use crate::spec::{Layout, Placement};
use crate::strategy::{
    Offload, OptimizerKind, Recompute, Split, Store, Strategy, Sync, TableSharding, Zero,
};
use crate::units::Bytes;

/// Generator of arbitrary plans, with all variants and absurd numbers.
pub(super) struct Draw(pub(super) u64);

impl Draw {
    fn next(&mut self) -> u64 {
        // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 16).
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Draws a mostly small number, occasionally any.
    fn number(&mut self) -> u64 {
        match self.below(8) {
            0 => self.next(),
            1 => u64::MAX,
            _ => self.below(10),
        }
    }

    fn short(&mut self) -> u32 {
        self.number() as u32
    }

    fn pick<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(4)).map(|_| one(self)).collect()
    }

    fn option<T>(&mut self, one: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(2) == 0).then(|| one(self))
    }

    fn samples(&mut self) -> SampleKind {
        let (a, b, n) = (self.number(), self.number(), self.short());
        let tables = self.list(Self::number);
        self.pick(&[
            SampleKind::Tokens { vocab: n, seq: a, lookahead: b },
            SampleKind::Images { side: a, channels: b, classes: n },
            SampleKind::Digits,
            SampleKind::Clicks { dense: a, lookups: b, tables },
        ])
    }

    fn flag(&mut self) -> bool {
        self.below(2) == 0
    }

    fn float(&mut self) -> f64 {
        let any = f64::from_bits(self.next());
        let any = if any.is_nan() { f64::INFINITY } else { any };
        self.pick(&[0.1, 1e-5, -0.0, 1.0 / 3.0, f64::MIN_POSITIVE, any])
    }

    fn name(&mut self) -> String {
        self.pick(&[
            "compute",
            "blocks.3.qkv.weight",
            "",
            "two words",
            "a \"quote\" and a \\",
            "line\nbreak\ttab\r",
            "#] @3 b7[0..1]",
            "Größe \u{85}\u{2028}\u{0}\u{7f} ∂x",
        ])
        .to_owned()
    }

    fn view(&mut self) -> View {
        View { buffer: BufferId(self.below(4) as u32), offset: self.number(), len: self.number() }
    }

    fn dims(&mut self) -> [u64; 2] {
        [self.number(), self.number()]
    }

    fn dtype(&mut self) -> DType {
        self.pick(&[
            DType::F32,
            DType::Bf16,
            DType::F16,
            DType::Fp8,
            DType::Nvfp4,
            DType::Mxfp4,
            DType::U32,
            DType::U8,
        ])
    }

    fn axis(&mut self) -> Axis {
        self.pick(&[Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp, Axis::Edp, Axis::Ep, Axis::Etp])
    }

    fn order(&mut self) -> SummationOrder {
        self.pick(&[SummationOrder::Canonical, SummationOrder::Free])
    }

    fn method(&mut self) -> Method {
        let library = self.pick(&Library::ALL);
        match self.below(4) {
            0 => Method::Library { library, forced: None },
            1 => Method::Library { library, forced: Some(self.algorithm()) },
            _ => Method::Steps(self.algorithm()),
        }
    }

    fn algorithm(&mut self) -> Algorithm {
        let servers = self.short().max(1);
        let shape = TorusShape::new(&[servers, self.short().max(1)]).unwrap();
        let rings = RingSet::new(self.below(256) as u32 + 1);
        let levels = [
            Algorithm::Ring,
            Algorithm::ParameterServer { servers },
            Algorithm::MultiRing { rings },
            Algorithm::Tree,
        ];
        let (inner, outer) = (self.pick(&levels), self.pick(&levels));
        let hierarchical = Algorithm::hierarchical(inner, outer).unwrap();
        self.pick(&[
            Algorithm::Auto,
            Algorithm::Ring,
            Algorithm::MultiRing { rings },
            Algorithm::HalvingDoubling,
            Algorithm::Tree,
            Algorithm::Direct,
            Algorithm::SharedMemory,
            Algorithm::ParameterServer { servers },
            Algorithm::Naive,
            Algorithm::Overlapped,
            Algorithm::OneShot,
            Algorithm::Partitioned,
            Algorithm::Torus { shape },
            hierarchical,
            hierarchical.with_host(servers),
        ])
    }

    fn strategy(&mut self) -> Strategy {
        let chunks = (self.short() as u16).max(1);
        let servers = self.below(4096) as u32 + 1;
        Strategy {
            dp: self.short(),
            tp: self.short(),
            pp: self.short(),
            cp: self.short(),
            ep: self.short(),
            etp: self.short(),
            axis_order: self.pick(&["tp", "dp", "pp-tp", "cp-dp-tp"]).parse().unwrap(),
            sp: self.flag(),
            zero: self.pick(&[Zero::None, Zero::Optimizer, Zero::Gradients, Zero::Parameters]),
            schedule: self.pick(&[
                ScheduleKind::GPipe,
                ScheduleKind::OneFOneB,
                ScheduleKind::Interleaved { chunks },
            ]),
            global_batch: self.number(),
            micro_batch: self.number(),
            seq: self.number(),
            recompute: self.pick(&[
                Recompute::None,
                Recompute::Selective,
                Recompute::SelectiveOp,
                Recompute::Full,
                Recompute::FullOf(chunks),
                Recompute::FullForward,
            ]),
            split: self.pick(&[Split::Cost, Split::Count]),
            sync_batch_norm: self.flag(),
            expert_buffer_factor: self.pick(&[1.0, 2.5]),
            offload: self.pick(&Offload::ALL),
            store: self.pick(&[Store::Disk, Store::Host]),
            table_sharding: self.pick(&[
                TableSharding::Auto,
                TableSharding::Replicate,
                TableSharding::Table,
                TableSharding::Row,
            ]),
            dtype: self.dtype(),
            grad_dtype: self.dtype(),
            order: self.order(),
            leaves: self.short(),
            sync: self.pick(&[
                Sync::AllReduce,
                Sync::Servers(servers),
                Sync::Async { servers, staleness: None },
                Sync::Async { servers, staleness: Some(servers) },
            ]),
            collective: self.algorithm(),
            bucket: Bytes(self.number()),
            overlap: self.flag(),
            optimizer: self.pick(&[
                OptimizerKind::Sgd,
                OptimizerKind::Momentum,
                OptimizerKind::AdamW,
                OptimizerKind::Lamb,
                OptimizerKind::Lars,
            ]),
            compress: self.pick(&[
                Compression::None,
                Compression::Int8,
                Compression::OneBit,
                Compression::TopK(0.01),
                Compression::PowerSgd(4),
            ]),
            compress_warmup: self.flag().then(|| self.short()),
            local: self.pick(&[None, Some(LocalSgd { steps: 8, outer: OuterOptimizer::Nesterov })]),
        }
    }

    fn op_kind(&mut self) -> OpKind {
        let heads =
            Heads { heads: self.number(), kv_heads: self.number(), head_dim: self.number() };
        let role = self.pick(&[
            LinearRole::Qkv,
            LinearRole::AttentionOut,
            LinearRole::Up,
            LinearRole::Down,
            LinearRole::Head,
            LinearRole::Router,
            LinearRole::Latent,
            LinearRole::Join,
        ]);
        let latent = LatentHeads {
            heads: self.number(),
            head_dim: self.number(),
            rope: self.number(),
            v_dim: self.number(),
            theta: self.float(),
            rotary: Rotary::default(),
        };
        let function = self.pick(&[
            ActivationKind::Gelu,
            ActivationKind::Relu,
            ActivationKind::SquaredRelu,
            ActivationKind::GeluErf,
        ]);
        let (a, b, x) = (self.number(), self.number(), self.float());
        let window = Window { side: a, channels: b, kernel: a, stride: b, padding: a };
        let capacity = self.pick(&[None, Some(a)]);
        let routing = Routing {
            experts: a,
            topk: b,
            sigmoid: capacity.is_none(),
            scale: x,
            seq: b,
            capacity,
            balance: x,
            groups: a,
            kept_groups: b,
            parts: a,
            raw: a < b,
            best_of_group: a > b,
        };
        let scaling = self.pick(&[
            Scaling::None,
            Scaling::Linear { factor: x },
            Scaling::Llama3 { factor: x, low: x, high: 4.0, original: a },
            Scaling::Yarn { factor: x, fast: 32.0, slow: x, original: b, exact: a > b },
            Scaling::Each(Factors::new(&[1.0, x])),
        ]);
        let dims = self.pick(&[0, a]);
        let rotary = Rotary { dims, scaling, magnitude: self.pick(&[1.0, x]) };
        let latent = LatentHeads { rotary, ..latent };
        let mask = self.pick(&[Mask::Causal, Mask::Window(a), Mask::Chunk(b), Mask::Full]);
        let scores = Scores {
            mask,
            scale: self.pick(&[0.0, x]),
            softcap: self.pick(&[0.0, x]),
            alibi: self.pick(&[0, a]),
            alibi_scale: self.pick(&[0.0, x]),
            sinks: a < b,
        };
        self.pick(&[
            OpKind::Embedding,
            OpKind::Position,
            OpKind::Norm { norm: NormKind::Layer, eps: x },
            OpKind::Norm { norm: NormKind::Rms, eps: x },
            OpKind::Linear { role },
            OpKind::Bias,
            OpKind::Rope { heads, theta: x, rotary },
            OpKind::Attention { heads, seq: a, scores },
            OpKind::AttentionBlock { heads, queries: a, keys: b, step: 3, scores },
            OpKind::Temperature { heads, floor: x, slope: x },
            OpKind::Norm { norm: NormKind::LayerGain, eps: x },
            OpKind::Norm { norm: NormKind::RmsUnit, eps: x },
            OpKind::Gated { gate: GateKind::GeluErf },
            OpKind::Gated { gate: GateKind::ClampedSwiGlu },
            OpKind::Scale { factor: x },
            OpKind::SoftCap { cap: x },
            OpKind::Clamp { limit: x },
            OpKind::RowScale { sigmoid: a > b },
            OpKind::ExpertBias { experts: a, regions: b, parts: a },
            OpKind::Return { topk: a },
            OpKind::KeysValues { heads },
            OpKind::Activation { function },
            OpKind::SwiGlu,
            OpKind::Add,
            OpKind::Concat { parts: a },
            OpKind::Slice { first: a, width: b },
            OpKind::RowMax,
            OpKind::SoftmaxStats,
            OpKind::CrossEntropy { scale: x },
            OpKind::EmbeddingBag { tables: a, lookups: b, width: a },
            OpKind::StepRows { tables: b, lookups: a, width: b },
            OpKind::Interact { tables: a, width: b, parts: 3 },
            OpKind::BinaryCrossEntropy { scale: x },
            OpKind::Conv { window },
            OpKind::BatchSums { channels: a },
            OpKind::BatchNorm { channels: a, eps: x, pixels: b, over: 2, share: x },
            OpKind::MaxPool { window },
            OpKind::AveragePool { channels: b },
            OpKind::Route(routing),
            OpKind::Dispatch { experts: a, topk: b, regions: a },
            OpKind::ExpertLinear { role, experts: a, regions: b, rows: a },
            OpKind::Combine { topk: a },
            OpKind::HeadNorm { heads, eps: x, norm: HeadNormKind::Head },
            OpKind::HeadNorm { heads, eps: x, norm: HeadNormKind::HeadUnit },
            OpKind::WholeSquares { heads },
            OpKind::WholeNorm { heads, queries: a, keys: b, eps: x },
            OpKind::HeadNorm { heads, eps: x, norm: HeadNormKind::Bare },
            OpKind::LatentHeads(latent),
            OpKind::LatentValues(latent),
            OpKind::BlockSquares { parts: b as u32, experts: a > b },
            OpKind::TensorSquares,
            OpKind::Norm2,
            OpKind::Total,
            OpKind::Outer(OuterOp::PseudoGradient),
            OpKind::Outer(OuterOp::Step { replicas: b as u32, rate: x, momentum: 0.5 }),
            OpKind::Compress(CompressOp::Encode { codec: Codec::Int8 }),
            OpKind::Compress(CompressOp::SelectTopK { fraction: x, bucket: b as u32 }),
            OpKind::Compress(CompressOp::Merge { codec: Codec::OneBit, terms: b as u32 }),
            OpKind::Compress(CompressOp::Decode { codec: Codec::TopK, terms: b as u32 }),
            OpKind::Compress(CompressOp::InitRight { rank: 4, bucket: b as u32 }),
            OpKind::Compress(CompressOp::Left { rank: 4, bucket: b as u32 }),
            OpKind::Compress(CompressOp::Right { rank: 4, bucket: b as u32 }),
            OpKind::Compress(CompressOp::Product { rank: 4, bucket: b as u32 }),
        ])
    }

    fn pass(&mut self) -> ComputePass {
        self.pick(&[
            ComputePass::Forward,
            ComputePass::Backward,
            ComputePass::BackwardInput,
            ComputePass::BackwardWeight,
            ComputePass::Recompute,
            ComputePass::Update,
        ])
    }

    fn template(&mut self) -> Template {
        Template {
            name: self.name(),
            pass: self.pass(),
            operands: self.list(|d| Operand {
                dims: d.dims(),
                dtype: d.dtype(),
                access: d.pick(&[Access::Read, Access::Write, Access::Accumulate]),
            }),
            ops: self.list(|d| LocalOp {
                kind: d.op_kind(),
                pass: d.pick(&[OpPass::Forward, OpPass::BackwardInput, OpPass::BackwardWeight]),
                inputs: d.list(|d| d.short() as u16),
                params: d.list(|d| d.short() as u16),
                outputs: d.list(|d| d.short() as u16),
            }),
        }
    }

    fn group(&mut self) -> GroupKind {
        let (axis, server) = (self.axis(), self.short());
        self.pick(&[
            GroupKind::Axis(axis),
            GroupKind::Replicas,
            GroupKind::Ends,
            GroupKind::Served(server),
            GroupKind::Servers,
        ])
    }

    fn entry(&mut self) -> Entry {
        let (dim, deviation) = (self.below(256) as u8, self.float());
        let layout = self.pick(&[Layout::Contiguous, Layout::Blocks, Layout::Zigzag]);
        Entry {
            name: self.name(),
            dims: self.dims(),
            blocks: self.list(Self::number),
            experts: self.below(3),
            tp: self.pick(&[
                Placement::Replicate,
                Placement::Shard { dim, layout },
                Placement::SUM,
                Placement::MAX,
                Placement::FlatShard,
            ]),
            local: self.dims(),
            offset: self.number(),
            init: self.pick(&[Init::Zero, Init::One, Init::Normal(deviation)]),
            decay: self.flag(),
            running: self.flag(),
            sparse: self.flag(),
            counted: self.flag(),
            norm_entry: self.short(),
        }
    }

    fn call(&mut self) -> Call {
        let input = self.view();
        Call {
            name: self.name(),
            kind: self.pick(&CollectiveKind::ALL),
            reduction: self.pick(&[Reduction::Sum, Reduction::Max]),
            method: self.method(),
            order: self.order(),
            group: GroupId(self.short() as u16),
            root: self.short(),
            input,
            output: if self.flag() { input } else { self.view() },
            dtype: self.dtype(),
            block: self.number(),
        }
    }

    fn op(&mut self) -> Op {
        let microbatch = Microbatch(self.short());
        let (axis, n, m) = (self.axis(), self.short(), self.short() as u16);
        let peer = self.pick(&[
            Peer::Stage(StageRank(m)),
            Peer::Next(axis),
            Peer::Previous(axis),
            Peer::Server(n),
            Peer::Replica(n),
        ]);
        let (view, into) = (self.view(), self.view());
        let what = self.pick(&[
            LoadKind::Tokens,
            LoadKind::Features,
            LoadKind::Targets,
            LoadKind::Lookahead(m),
        ]);
        let mode = self.pick(&[AccumulateMode::Add, AccumulateMode::Move]);
        let phase = self.pick(&[
            StepPhase::TensorNorms,
            StepPhase::Apply,
            StepPhase::LocalMomentum,
            StepPhase::ApplyMomentum,
        ]);
        let fresh = self.flag();
        self.pick(&[
            Op::Load { what, into: into.buffer, microbatch },
            Op::Compute { segment: SegmentId(n), microbatch, fresh },
            Op::Send { to: peer, channel: m, view, microbatch },
            Op::Recv { from: peer, channel: m, view, microbatch },
            Op::Collective { call: CallId(n), microbatch },
            Op::Accumulate { from: view, into, mode },
            Op::Step { bucket: n, phase },
            Op::Stash { from: view, into, microbatch },
            Op::Restore { from: view, into, microbatch },
            Op::Free { frame: n, microbatch },
            Op::Serve { service: n },
        ])
    }

    fn section(&mut self) -> Section {
        let mut section = Section::default();
        for _ in 0..self.below(6) {
            let after = self.list(|d| OpId(d.short()));
            let (lane, op) = (LaneId(self.short() as u8), self.op());
            let turn = self.pick(&IterationFilter::ALL);
            section.push_filtered(turn, lane, op, &after);
        }
        section
    }

    pub(super) fn program(&mut self) -> Program {
        let mut memory = Memory::default();
        memory.by_kind.iter_mut().for_each(|bytes| bytes.0 = self.number());
        let buffer = |d: &mut Self| Buffer {
            name: d.name(),
            dtype: d.dtype(),
            elements: d.number(),
            copies: d.short(),
            kind: d.pick(&MemoryKind::ALL),
            offset: Bytes(d.number()),
        };
        Program {
            name: self.name(),
            lanes: self.list(Self::name),
            buffers: self.list(buffer),
            frames: self.list(|d| d.list(|d| BufferId(d.short()))),
            segments: self.list(|d| Segment {
                template: d.short(),
                layer: d.option(|d| LayerId(d.short())),
                operands: d.list(Self::view),
            }),
            calls: self.list(Self::call),
            buckets: self.list(|d| Bucket {
                name: d.name(),
                elements: d.number(),
                entries: d.list(Self::entry),
                params: d.view(),
                grads: d.view(),
                master: d.option(Self::view),
                moments: d.list(Self::view),
                offloaded: d.list(Self::view),
                tensor_norms: d.option(|d| TensorNorms {
                    weights: d.view(),
                    directions: d.view(),
                    tensors: d.view(),
                }),
                shard: d.option(|d| GroupId(d.short() as u16)),
                updated: d.flag(),
            }),
            services: self.list(|d| Service {
                group: GroupId(d.short() as u16),
                receives: d.view(),
                sends: d.view(),
                requests: d.short(),
                staleness: d.option(Self::short),
            }),
            prologue: self.section(),
            body: self.section(),
            epilogue: self.section(),
            in_flight: self
                .list(|d| CarryoverOp { op: OpId(d.short()), before: d.list(|d| OpId(d.short())) }),
            outputs: Outputs {
                loss: self.option(|d| BufferId(d.short())),
                norm: self.option(|d| BufferId(d.short())),
                dropped: self.option(|d| BufferId(d.short())),
            },
            memory,
        }
    }

    pub(super) fn plan(&mut self) -> Plan {
        let strategy = self.strategy();
        let order = strategy.axis_order;
        Plan {
            model: self.name(),
            strategy,
            mesh: Mesh {
                pp: self.short(),
                dp: self.short(),
                cp: self.short(),
                tp: self.short(),
                ep: self.short(),
                etp: self.short(),
                servers: self.short(),
                order,
            },
            groups: self.list(Self::group),
            templates: self.list(Self::template),
            programs: self.list(Self::program),
            layers: self.list(Self::name),
            parameters: self.number(),
            samples: self.samples(),
            norm_entries: self.short(),
            messages: self.pick(&[None, Some(Library::Nccl), Some(Library::Mpi)]),
        }
    }
}
