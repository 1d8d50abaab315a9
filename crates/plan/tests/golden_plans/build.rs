//! Builder for hand-written programs.

use paceline_plan::DType;
use paceline_plan::graph::{OpKind, OpPass};
use paceline_plan::ids::{BufferId, LaneId, Microbatch, SegmentId};
use paceline_plan::program::{
    Access, Buffer, ComputePass, LocalOp, Memory, MemoryKind, Op, Operand, Outputs, Program,
    Section, Segment, Template, View,
};
use paceline_plan::units::Bytes;

pub(crate) const COMPUTE: LaneId = LaneId(0);

/// A program under construction.
pub(crate) struct Build {
    pub(crate) program: Program,
}

impl Build {
    pub(crate) fn new(name: &str, lanes: &[&str]) -> Self {
        let program = Program {
            name: name.into(),
            lanes: lanes.iter().map(|l| l.to_string()).collect(),
            buffers: Vec::new(),
            frames: Vec::new(),
            segments: Vec::new(),
            calls: Vec::new(),
            buckets: Vec::new(),
            services: Vec::new(),
            prologue: Section::default(),
            body: Section::default(),
            epilogue: Section::default(),
            in_flight: Vec::new(),
            outputs: Outputs::default(),
            memory: Memory::default(),
        };
        Self { program }
    }

    pub(crate) fn buffer(
        &mut self,
        name: &str,
        dtype: DType,
        elements: u64,
        copies: u32,
        kind: MemoryKind,
    ) -> View {
        let buffer =
            Buffer { name: name.into(), dtype, elements, copies, kind, offset: Bytes::ZERO };
        self.program.buffers.push(buffer);
        let buffer = BufferId::from(self.program.buffers.len() - 1);
        View { buffer, offset: 0, len: elements }
    }

    pub(crate) fn activation(&mut self, name: &str, elements: u64, copies: u32) -> View {
        self.buffer(name, DType::F32, elements, copies, MemoryKind::Activations)
    }

    pub(crate) fn segment(&mut self, template: u32, operands: &[View]) -> SegmentId {
        let operands = operands.to_vec();
        self.program.segments.push(Segment { template, layer: None, operands });
        SegmentId::from(self.program.segments.len() - 1)
    }

    /// Assigns addresses, kind by kind.
    pub(crate) fn finish(mut self) -> Program {
        let mut cursor = Bytes::ZERO;
        for kind in MemoryKind::ALL {
            let start = cursor;
            for buffer in self.program.buffers.iter_mut().filter(|b| b.kind == kind) {
                buffer.offset = cursor;
                cursor += buffer.extent();
            }
            self.program.memory.by_kind[kind as usize] = cursor - start;
        }
        self.program
    }
}

pub(crate) fn compute(segment: SegmentId, microbatch: u32) -> Op {
    Op::Compute { segment, microbatch: Microbatch(microbatch), fresh: true }
}

/// An operand of a template: rows, width, access.
pub(crate) fn operand(rows: u64, width: u64, access: Access) -> Operand {
    Operand { dims: [rows, width], dtype: DType::F32, access }
}

pub(crate) fn local(
    kind: OpKind,
    part: OpPass,
    inputs: &[u16],
    params: &[u16],
    outputs: &[u16],
) -> LocalOp {
    LocalOp {
        kind,
        pass: part,
        inputs: inputs.to_vec(),
        params: params.to_vec(),
        outputs: outputs.to_vec(),
    }
}

pub(crate) fn template(
    name: &str,
    pass: ComputePass,
    operands: Vec<Operand>,
    ops: Vec<LocalOp>,
) -> Template {
    Template { name: name.into(), pass, operands, ops }
}
