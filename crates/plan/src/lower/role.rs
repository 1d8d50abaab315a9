//! Program of one pipeline rank: its layers' passes in schedule order, and their exchanges.

use super::arena::{self, Home};
use super::bucket_plan::{BucketIndex, BucketPlan};
use super::compress::PendingReduce;
use super::dropped::Dropped;
use super::layer::BoundPass;
use super::offload::Offloading;
use super::pipeline::{Life, StageState};
use super::shard::ValueId;
use super::slots::{self, Walk};
use super::tables::TableState;
use super::{Context, UNDECIDED};
use crate::collective::{CollectiveKind, Reduction, SummationOrder};
use crate::dtype::DType;
use crate::ids::{BufferId, CallId, LaneId, OpId, Stage, StageRank};
use crate::mesh::GroupKind;
use crate::program::{
    Bucket, Buffer, Call, CarryoverOp, MemoryKind, Op, Outputs, Program, Section, Segment, View,
};
use crate::schedule::{Action, Pass, PassOutput, in_flight};
use crate::units::Bytes;
use std::collections::BTreeMap;

/// Builds the program of pipeline rank `rank`.
pub(super) fn program(context: &mut Context, rank: u32) -> Program {
    let mut ir = RoleIr::new(context, rank);
    slots::linearize(&mut ir);
    ir.finish()
}

pub(super) struct RoleIr<'c> {
    pub(super) context: &'c mut Context,
    rank: u32,
    lanes: Vec<String>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) homes: Vec<Home>,
    /// Lifetimes of buffers that outlive a pass.
    pub(super) lives: BTreeMap<BufferId, Life>,
    pub(super) frames: Vec<Vec<BufferId>>,
    pub(super) scratch: BTreeMap<(usize, Pass, ValueId), BufferId>,
    pub(super) scratch_size: Bytes,
    pub(super) segments: Vec<Segment>,
    pub(super) calls: Vec<Call>,
    pub(super) stages: Vec<StageState>,
    /// Passes by layer of the model; empty for other ranks' layers.
    pub(super) passes: Vec<[BoundPass; 4]>,
    /// The same for forward passes that read stashed weights.
    pub(super) kept_forwards: Vec<BoundPass>,
    /// Stage and buffer of an output for a next stage on the same rank, and of the gradient that
    /// returns, until the receiving stage is declared.
    pub(super) handed: Option<(Stage, BufferId)>,
    pub(super) handed_grad: Option<(Stage, BufferId)>,
    pub(super) buckets: Vec<BucketPlan>,
    pub(super) index: BucketIndex,
    /// Streamed gradients by parity of their layers and size.
    pub(super) grad_streams: BTreeMap<(usize, u64), BufferId>,
    /// Tables with sparse steps.
    pub(super) tables: Option<TableState>,
    /// The current section.
    pub(super) body: Section,
    pub(super) prologue: Section,
    pub(super) epilogue: Section,
    pub(super) in_flight: Vec<CarryoverOp>,
    pub(super) walk: Walk,
    /// Buckets whose reduction of a microbatch is not yet added to the previous ones.
    pub(super) staged: Vec<(usize, usize)>,
    /// Compressed reductions in flight.
    pub(super) waiting: Vec<PendingReduce>,
    pub(super) outputs: Outputs,
    pub(super) loss_tree: Vec<BufferId>,
    /// Buffers that count dropped tokens, if tokens can be dropped.
    pub(super) dropped: Option<Dropped>,
    pub(super) offloading: Offloading,
}

impl<'c> RoleIr<'c> {
    fn new(context: &'c mut Context, rank: u32) -> Self {
        let layers = context.graph.layers.len();
        let mut role = Self {
            context,
            rank,
            lanes: vec!["compute".into()],
            buffers: Vec::new(),
            homes: Vec::new(),
            lives: BTreeMap::new(),
            frames: Vec::new(),
            scratch: BTreeMap::new(),
            scratch_size: Bytes::ZERO,
            segments: Vec::new(),
            calls: Vec::new(),
            stages: Vec::new(),
            passes: vec![Default::default(); layers],
            kept_forwards: vec![Default::default(); layers],
            handed: None,
            handed_grad: None,
            buckets: Vec::new(),
            index: BucketIndex::default(),
            grad_streams: BTreeMap::new(),
            tables: None,
            body: Section::default(),
            prologue: Section::default(),
            epilogue: Section::default(),
            in_flight: Vec::new(),
            walk: Walk::default(),
            staged: Vec::new(),
            waiting: Vec::new(),
            outputs: Outputs::default(),
            loss_tree: Vec::new(),
            dropped: None,
            offloading: Offloading::default(),
        };
        let last = Stage::from(role.context.stages.len() - 1);
        let mine: Vec<Stage> =
            role.context.strategy.schedule.stages_of(StageRank(rank as u16), role.pp()).collect();
        for &stage in &mine {
            role.declare_buckets(role.context.stages[stage.index()].clone());
            role.declare_tables(role.context.stages[stage.index()].clone());
        }
        if mine.contains(&last) {
            role.declare_loss();
        }
        let layers: Vec<usize> =
            mine.iter().flat_map(|stage| role.context.stages[stage.index()].clone()).collect();
        role.declare_dropped(layers.into_iter());
        for &stage in &mine {
            role.declare_stage(stage);
        }
        role
    }

    pub(super) fn pp(&self) -> u16 {
        self.context.strategy.pp as u16
    }

    /// This rank's actions in schedule order.
    pub(super) fn actions(&self) -> &[Action] {
        &self.context.order[self.rank as usize]
    }

    /// Returns true if this rank holds a virtual stage.
    pub(super) fn is_mine(&self, stage: Stage) -> bool {
        let all = self.context.stages.len();
        stage.index() < all && u32::from(self.neighbour(stage.0).0) == self.rank
    }

    /// Number of microbatches whose forward pass has run on this rank when an iteration begins.
    pub(super) fn ahead(&self) -> u32 {
        self.context.strategy.schedule.ahead(self.rank as u16, self.pp())
    }

    /// Maximum number of microbatches between two points of this rank's order, at least one.
    pub(super) fn in_flight(&self, from: (Stage, PassOutput), until: (Stage, PassOutput)) -> u32 {
        let row = &self.context.order[self.rank as usize];
        // Microbatches run ahead are between a forward pass and all that follows it.
        let ahead = if from.1 == PassOutput::Activations { self.ahead() } else { 0 };
        (ahead + in_flight(row, from, until)).max(1)
    }

    /// Lane with the given name, declared on first use.
    pub(super) fn lane(&mut self, name: &str) -> LaneId {
        let at = self.lanes.iter().position(|known| known == name);
        LaneId::from(at.unwrap_or_else(|| {
            self.lanes.push(name.into());
            self.lanes.len() - 1
        }))
    }

    pub(super) fn buffer(
        &mut self,
        name: String,
        dtype: DType,
        elements: u64,
        copies: u32,
        kind: MemoryKind,
    ) -> BufferId {
        self.buffers.push(Buffer { name, dtype, elements, copies, kind, offset: Bytes::ZERO });
        self.homes.push(Home::Own);
        BufferId::from(self.buffers.len() - 1)
    }

    /// Declares a buffer with one copy and returns a view of all of it.
    pub(super) fn view(
        &mut self,
        name: String,
        dtype: DType,
        elements: u64,
        kind: MemoryKind,
    ) -> View {
        let id = self.buffer(name, dtype, elements, 1, kind);
        self.whole(id)
    }

    pub(super) fn whole(&self, buffer: BufferId) -> View {
        View { buffer, offset: 0, len: self.buffers[buffer.index()].elements }
    }

    /// Declares a collective. This rank's shard is split at multiples of `block`.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn call(
        &mut self,
        name: &str,
        kind: CollectiveKind,
        reduction: Reduction,
        group: GroupKind,
        input: View,
        output: View,
        block: u64,
    ) -> CallId {
        let order = self.context.strategy.order;
        let order = if kind.reduces() { order } else { SummationOrder::Free };
        let dtype = self.buffers[input.buffer.index()].dtype;
        let group = self.context.group(group);
        let name = format!("{kind} {name}");
        self.calls.push(Call {
            name,
            kind,
            reduction,
            method: UNDECIDED,
            order,
            group,
            root: 0,
            input,
            output,
            dtype,
            block,
        });
        CallId::from(self.calls.len() - 1)
    }

    /// Adds an op to the compute lane, after the ops it must wait for.
    pub(super) fn compute(&mut self, op: Op, after: &[OpId]) -> OpId {
        let id = self.body.push(LaneId(0), op, after);
        self.walk.last_compute = Some(id);
        id
    }

    /// Ops that a send must wait for: the last compute op, or the exchange after it.
    pub(super) fn produced(&mut self) -> Vec<OpId> {
        self.walk.last_compute.into_iter().chain(self.walk.pending.iter().copied()).collect()
    }

    pub(super) fn neighbour(&self, stage: u16) -> StageRank {
        self.context.strategy.schedule.rank_of(Stage(stage), self.pp())
    }

    fn finish(mut self) -> Program {
        let memory = arena::assign(&mut self.buffers, &self.homes, self.scratch_size);
        let spans: Vec<String> = self
            .stages
            .iter()
            .map(|s| {
                let name = |l: usize| self.context.graph.layers[l].name.as_str();
                match s.layers.len() {
                    1 => name(s.layers.start).to_string(),
                    _ => format!("{}..{}", name(s.layers.start), name(s.layers.end - 1)),
                }
            })
            .collect();
        let mut buckets: Vec<Bucket> = self.buckets.iter().map(|state| state.finish()).collect();
        buckets.extend(self.tables.iter().map(TableState::finish));
        Program {
            name: format!("pipeline rank {} ({})", self.rank, spans.join(", ")),
            lanes: self.lanes,
            buffers: self.buffers,
            frames: self.frames,
            segments: self.segments,
            calls: self.calls,
            buckets,
            services: Vec::new(),
            prologue: self.prologue,
            body: self.body,
            epilogue: self.epilogue,
            in_flight: self.in_flight,
            outputs: self.outputs,
            memory,
        }
    }
}
