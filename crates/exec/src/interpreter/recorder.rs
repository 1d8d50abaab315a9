//! Recorder of a rank's op times.

use crate::interpreter::lanes::WaitSpan;
use paceline_plan::ids::{LaneId, Rank};
use paceline_plan::program::{Node, Plan, Program, label};
use paceline_plan::trace::{Span, SpanKind, TraceBuilder};
use paceline_plan::units::Seconds;
use std::collections::VecDeque;

/// Default number of recorded iterations: enough for a median of steady-state ones.
const REMEMBERED: u32 = 6;
/// Record limit: long programs keep fewer iterations to stay small, at least a steady one.
const NOTES: usize = 1 << 16;
const FEWEST: u32 = 3;

/// Spans of one rank over the last few iterations, on the clock that all ranks share.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// Number of iterations that are recorded.
    remembered: u32,
    records: VecDeque<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    lane: LaneId,
    /// Op number, counted over all sections of the program.
    op: u32,
    iteration: u32,
    start: Seconds,
    end: Seconds,
    wait: WaitSpan,
}

impl Recorder {
    /// Creates a recorder. It records the last `asked` iterations,
    /// or a number that suits the program if `None`. Memory is reserved in advance, so that
    /// recording does not allocate.
    pub(crate) fn new(program: &Program, asked: Option<u32>) -> Self {
        let once = program.prologue.nodes.len() + program.epilogue.nodes.len();
        let body = program.body.nodes.len();
        let most = (NOTES / body.max(1)).max(FEWEST as usize);
        let remembered = asked.unwrap_or(most.min(REMEMBERED as usize) as u32);
        let room = match remembered {
            0 => 0,
            // One more for the iteration in progress.
            remembered => once + (remembered as usize).min(most) * body + body,
        };
        Self { remembered, records: VecDeque::with_capacity(room) }
    }

    /// Takes the records, leaving none.
    pub(crate) fn take(&mut self) -> Self {
        Self { records: std::mem::take(&mut self.records), ..*self }
    }

    /// Records that an op, numbered over the whole program, ran from `start` to `end`, and the part
    /// of it spent waiting for other ranks.
    pub(crate) fn note(
        &mut self,
        lane: LaneId,
        op: u32,
        iteration: u32,
        (start, end): (Seconds, Seconds),
        wait: WaitSpan,
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
            let Some(kind) = label::span_kind(plan, program, op) else { continue };
            let span = Span {
                rank,
                lane: trace.lane(&program.lanes[record.lane.index()]),
                kind,
                name: trace.name(&label::span_name(plan, program, op)),
                microbatch: op.microbatch().map(|microbatch| microbatch.0),
                iteration: record.iteration,
                op: record.op,
                start: record.start,
                end: record.end,
            };
            if let WaitSpan { from: Some(from), until: Some(until) } = record.wait {
                trace.push(Span { kind: SpanKind::Wait, start: from, end: until, ..span });
            }
            trace.push(span);
        }
    }
}
