//! Memory that a plan's operators use, by which devices decide what they may fuse.

use paceline_plan::program::{Access, LocalOp, Op, Plan, Program, Segment, Template, View};
use std::ops::Range;

/// Memory uses of a plan's programs.
pub(crate) struct Uses<'p> {
    /// Each program with the byte ranges that are read outside the segment that wrote them.
    programs: Vec<(&'p Program, Vec<Range<u64>>)>,
}

impl<'p> Uses<'p> {
    /// Collects all reads in a plan of data that another op wrote.
    pub(crate) fn of(plan: &'p Plan) -> Self {
        let of = |program: &'p Program| (program, read(plan, program));
        Self { programs: plan.programs.iter().map(of).collect() }
    }

    /// Returns true if operators of template number `at` may be fused into `op` in all its uses,
    /// without writing the operands `skipped`.
    pub(crate) fn allow(
        &self,
        at: usize,
        template: &Template,
        op: &LocalOp,
        skipped: &[u16],
    ) -> bool {
        let once = |operand: &u16| {
            let by = |op: &LocalOp| op.inputs.contains(operand) || op.outputs.contains(operand);
            // Once by its writer and once by its reader.
            template.ops.iter().filter(|op| by(op)).count() == 2
        };
        let fits = |(program, read): &(&Program, Vec<Range<u64>>)| {
            let mut bound = program.segments.iter().filter(|s| s.template as usize == at);
            bound.all(|segment| fits(program, segment, read, op, skipped))
        };
        skipped.iter().all(once) && self.programs.iter().all(fits)
    }
}

/// Returns true if operators may be fused in a segment: nothing else reads the skipped operands, and
/// no early write overwrites data that is still read. (The plan may give an output the memory of an
/// input that an earlier operator was the last to read.)
fn fits(
    program: &Program,
    segment: &Segment,
    read: &[Range<u64>],
    op: &LocalOp,
    skipped: &[u16],
) -> bool {
    let bytes = |operand: &u16| spans(program, segment.operands[usize::from(*operand)]);
    let LocalOp { inputs, params, outputs, .. } = op;
    let is_read = skipped.iter().flat_map(bytes).any(|span| meets(&span, read));
    let is_shared = outputs.iter().any(|output| {
        let others = inputs.iter().chain(params).chain(outputs).filter(|&o| o != output);
        let others: Vec<_> = others.flat_map(bytes).collect();
        bytes(output).any(|span| meets(&span, &others))
    });
    !is_read && !is_shared
}

/// Byte ranges that are read outside the segment that wrote them: by another segment, or to be sent
/// to another rank.
fn read(plan: &Plan, program: &Program) -> Vec<Range<u64>> {
    let mut read = Vec::new();
    for segment in &program.segments {
        let operands = &plan.templates[segment.template as usize].operands;
        for (operand, &view) in operands.iter().zip(&segment.operands) {
            match operand.access {
                Access::Read | Access::Accumulate | Access::Add => {
                    read.extend(spans(program, view))
                }
                Access::Write => {}
            }
        }
    }
    for node in [&program.prologue, &program.body, &program.epilogue].iter().flat_map(|s| &s.nodes)
    {
        match node.op {
            Op::Send { view, .. } => read.extend(spans(program, view)),
            Op::Collective { call, .. } => read.extend(spans(program, program.call(call).input)),
            Op::Accumulate { from, into, .. } => {
                read.extend(spans(program, from).chain(spans(program, into)));
            }
            Op::Stash { from, .. } | Op::Restore { from, .. } => read.extend(spans(program, from)),
            // These access no intermediate results of a segment.
            Op::Load { .. }
            | Op::Compute { .. }
            | Op::Recv { .. }
            | Op::Step { .. }
            | Op::Free { .. }
            | Op::Serve { .. } => {}
        }
    }
    read
}

/// Byte ranges of a view, in every copy of its buffer.
fn spans(program: &Program, view: View) -> impl Iterator<Item = Range<u64>> {
    let buffer = program.buffer(view.buffer);
    let (size, copies) = (buffer.dtype.size(), u64::from(buffer.copies));
    (0..copies).map(move |copy| {
        let start = buffer.copy_offset(copy).0 + view.offset * size;
        start..start + view.len * size
    })
}

fn meets(span: &Range<u64>, others: &[Range<u64>]) -> bool {
    others.iter().any(|other| span.start < other.end && other.start < span.end)
}

/// Operand added to a value, if it is not the value itself.
pub(crate) fn other(add: &LocalOp, value: u16) -> Option<u16> {
    match add.inputs[..] {
        [a, b] if a == value && b != value => Some(b),
        [a, b] if b == value && a != value => Some(a),
        _ => None,
    }
}
