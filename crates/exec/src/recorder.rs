//! What a rank notes about when it did what.

use crate::lanes::Wait;
use paceline_plan::ids::{LaneId, Rank};
use paceline_plan::program::{LoadKind, Node, Op, Plan, Program, SegmentPass};
use paceline_plan::trace::{Span, SpanKind, TraceBuilder};
use paceline_plan::units::Seconds;
use std::collections::VecDeque;
use std::time::Instant;

/// Iterations that a rank remembers where nobody says how many: enough for a median of steady ones.
const REMEMBERED: u32 = 6;
/// Of long programs fewer, so that notes stay small beside what they are of, but a steady one at least.
const NOTES: usize = 1 << 16;
const FEWEST: u32 = 3;

/// One rank's spans of the last few iterations, on the clock that all ranks share.
#[derive(Debug)]
pub(crate) struct Recorder {
    clock: Instant,
    /// Iterations that are remembered.
    remembered: u32,
    records: VecDeque<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    lane: LaneId,
    /// Counted over all sections of the program.
    op: u32,
    iteration: u32,
    start: Seconds,
    end: Seconds,
    wait: Wait,
}

impl Recorder {
    /// `clock` is when the run started; of `asked` iterations all is remembered, of as many as suits the
    /// program if nobody asked. There is room for all of that, so that taking notes never waits for
    /// memory.
    pub(crate) fn new(clock: Instant, program: &Program, asked: Option<u32>) -> Self {
        let once = program.prologue.nodes.len() + program.epilogue.nodes.len();
        let body = program.body.nodes.len();
        let most = (NOTES / body.max(1)).max(FEWEST as usize);
        let remembered = asked.unwrap_or(most.min(REMEMBERED as usize) as u32);
        let room = match remembered {
            0 => 0,
            // The one that is under way comes on top.
            remembered => once + (remembered as usize).min(most) * body + body,
        };
        Self { clock, remembered, records: VecDeque::with_capacity(room) }
    }

    /// Takes the notes, and leaves none.
    pub(crate) fn take(&mut self) -> Self {
        Self { records: std::mem::take(&mut self.records), ..*self }
    }

    /// The time since the run started.
    pub(crate) fn now(&self) -> Seconds {
        Seconds(self.clock.elapsed().as_secs_f64())
    }

    /// Notes that an op, numbered over the whole program, ran from `start` until now, and how much of that
    /// it waited for other ranks to join.
    pub(crate) fn note(
        &mut self,
        lane: LaneId,
        op: u32,
        iteration: u32,
        start: Seconds,
        wait: Wait,
    ) {
        let end = self.now();
        self.note_between(lane, op, iteration, (start, end), wait);
    }

    /// The same for an op whose end is known.
    pub(crate) fn note_between(
        &mut self,
        lane: LaneId,
        op: u32,
        iteration: u32,
        (start, end): (Seconds, Seconds),
        wait: Wait,
    ) {
        let Self { remembered, records, .. } = self;
        if *remembered == 0 {
            return;
        }
        let is_old = |r: &Record| r.iteration.saturating_add(*remembered) <= iteration;
        while records.front().is_some_and(is_old) {
            records.pop_front();
        }
        records.push_back(Record { lane, op, iteration, start, end, wait });
    }

    /// Adds this rank's spans to a trace.
    pub(crate) fn write(&self, plan: &Plan, rank: Rank, trace: &mut TraceBuilder) {
        let program = plan.program(rank);
        let sections = [&program.prologue, &program.body, &program.epilogue];
        let nodes: Vec<&Node> = sections.into_iter().flat_map(|s| &s.nodes).collect();
        let last = self.records.iter().map(|r| r.iteration).max().unwrap_or(0);
        let is_known = |r: &&Record| r.iteration.saturating_add(self.remembered) > last;
        let known = self.records.iter().filter(is_known);
        for record in known {
            let op = &nodes[record.op as usize].op;
            let Some((kind, name)) = describe(plan, program, op) else { continue };
            let span = Span {
                rank,
                lane: trace.lane(&program.lanes[record.lane.index()]),
                kind,
                name: trace.name(&name),
                microbatch: op.microbatch().map(|microbatch| microbatch.0),
                iteration: record.iteration,
                op: record.op,
                start: record.start,
                end: record.end,
            };
            if let Wait { from: Some(from), until: Some(until) } = record.wait {
                trace.push(Span { kind: SpanKind::Wait, start: from, end: until, ..span });
            }
            trace.push(span);
        }
    }
}

/// An op's kind and name in a trace; none for what takes no time by nature.
fn describe(plan: &Plan, program: &Program, op: &Op) -> Option<(SpanKind, String)> {
    let buffer = |id| &program.buffer(id).name;
    Some(match *op {
        Op::Load { what: LoadKind::Tokens, .. } => (SpanKind::Load, "load tokens".into()),
        Op::Load { what: LoadKind::Features, .. } => (SpanKind::Load, "load features".into()),
        Op::Load { what: LoadKind::Targets, .. } => (SpanKind::Load, "load targets".into()),
        Op::Load { what: LoadKind::Further(_), .. } => {
            (SpanKind::Load, "load further tokens".into())
        }
        Op::Compute { segment, .. } => {
            let template = &plan.templates[program.segment(segment).template as usize];
            let kind = match template.pass {
                SegmentPass::Forward => SpanKind::Forward,
                SegmentPass::Backward => SpanKind::Backward,
                SegmentPass::BackwardInput => SpanKind::BackwardInput,
                SegmentPass::BackwardWeight => SpanKind::BackwardWeight,
                SegmentPass::Recompute => SpanKind::Recompute,
                SegmentPass::Update => SpanKind::Optimizer,
            };
            (kind, template.name.clone())
        }
        Op::Send { view, .. } => (SpanKind::Send, format!("send {}", buffer(view.buffer))),
        Op::Recv { view, .. } => (SpanKind::Recv, format!("recv {}", buffer(view.buffer))),
        Op::Collective { call, .. } => (SpanKind::Collective, program.call(call).name.clone()),
        Op::Accumulate { into, .. } => {
            (SpanKind::Accumulate, format!("accumulate {}", buffer(into.buffer)))
        }
        Op::Step { bucket, phase } => {
            let bucket = &program.buckets[bucket as usize].name;
            (SpanKind::Optimizer, format!("{} {bucket}", phase.word()))
        }
        Op::Stash { from, .. } if program.offloaded(op).is_some() => {
            (SpanKind::Offload, format!("stash {}", buffer(from.buffer)))
        }
        Op::Restore { into, .. } if program.offloaded(op).is_some() => {
            (SpanKind::Offload, format!("restore {}", buffer(into.buffer)))
        }
        Op::Stash { into, .. } => (SpanKind::Weights, format!("stash {}", buffer(into.buffer))),
        Op::Restore { into, .. } => (SpanKind::Weights, format!("restore {}", buffer(into.buffer))),
        Op::Serve { service } => (SpanKind::Serve, format!("serve {service}")),
        Op::Free { .. } => return None,
    })
}
