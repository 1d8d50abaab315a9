//! Ops decoded into tasks: the only match on ops.

use paceline_plan::ids::{BufferId, CallId, Microbatch, SegmentId};
use paceline_plan::program::{
    AccumulateMode, LoadKind, MemoryKind, Op, Peer, Program, Section, StepPhase, View,
};
use paceline_plan::validate::SectionKind;

/// Work of an op, by the part of the rank that executes it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Work of the device.
    Device(DeviceTask),
    /// Send, receive or collective; in flight for a while.
    Exchange(ExchangeTask),
    /// Copy between the arena and the store.
    Storage(Move),
    /// Service of an asynchronous server, by number.
    Serve(u32),
    /// A declaration only: memory is planned, and nothing is released.
    Nothing,
}

/// Task of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceTask {
    /// Loads a microbatch of this rank's replica.
    Load { what: LoadKind, into: BufferId, microbatch: Microbatch },
    /// Computes a segment; `fresh` overwrites gradients.
    Segment { segment: SegmentId, microbatch: Microbatch, fresh: bool },
    /// Copies or adds one view to another.
    Accumulate { from: View, into: View, mode: AccumulateMode, microbatch: Microbatch },
    /// Runs a phase of the update of a bucket; `earlier` steps of it came before in the iteration.
    Step { bucket: u32, phase: StepPhase, earlier: u64 },
    /// Copies the current shared weights of a bucket to the buffer that this rank computes on.
    Pull { from: View, into: View },
}

/// Exchange with other ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExchangeTask {
    Send { to: Peer, channel: u16, view: View, microbatch: Microbatch },
    Receive { from: Peer, channel: u16, view: View, microbatch: Microbatch },
    Collective { call: CallId, microbatch: Microbatch },
}

/// Copy of a microbatch's view to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) from: View,
    pub(crate) into: View,
    pub(crate) microbatch: Microbatch,
}

/// Tasks of a program, by section and op.
#[derive(Debug)]
pub(crate) struct Tasks {
    prologue: Vec<Task>,
    body: Vec<Task>,
    epilogue: Vec<Task>,
}

impl Tasks {
    pub(crate) fn of(program: &Program) -> Self {
        let decode = |section: &Section| {
            let nodes = section.nodes.iter().enumerate();
            nodes.map(|(at, node)| Task::of(program, section, at, &node.op)).collect()
        };
        Self {
            prologue: decode(&program.prologue),
            body: decode(&program.body),
            epilogue: decode(&program.epilogue),
        }
    }

    /// Tasks of a section's ops.
    pub(crate) fn section(&self, section: SectionKind) -> &[Task] {
        match section {
            SectionKind::Prologue => &self.prologue,
            SectionKind::Body => &self.body,
            SectionKind::Epilogue => &self.epilogue,
        }
    }
}

impl Task {
    fn of(program: &Program, section: &Section, at: usize, op: &Op) -> Self {
        match *op {
            Op::Load { what, into, microbatch } => {
                Self::Device(DeviceTask::Load { what, into, microbatch })
            }
            Op::Compute { segment, microbatch, fresh } => {
                Self::Device(DeviceTask::Segment { segment, microbatch, fresh })
            }
            Op::Accumulate { from, into, mode } => {
                let microbatch = Microbatch(0);
                Self::Device(DeviceTask::Accumulate { from, into, mode, microbatch })
            }
            Op::Step { bucket, phase } => {
                let earlier = section.nodes[..at].iter().filter(|node| node.op == *op).count();
                Self::Device(DeviceTask::Step { bucket, phase, earlier: earlier as u64 })
            }
            Op::Send { to, channel, view, microbatch } => {
                Self::Exchange(ExchangeTask::Send { to, channel, view, microbatch })
            }
            Op::Recv { from, channel, view, microbatch } => {
                Self::Exchange(ExchangeTask::Receive { from, channel, view, microbatch })
            }
            Op::Collective { call, microbatch } => {
                Self::Exchange(ExchangeTask::Collective { call, microbatch })
            }
            Op::Restore { from, into, .. }
                if program.buffer(from.buffer).kind == MemoryKind::Shared =>
            {
                Self::Device(DeviceTask::Pull { from, into })
            }
            Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch } => {
                match program.offloaded(op) {
                    Some(_) => Self::Storage(Move { from, into, microbatch }),
                    None => {
                        let mode = AccumulateMode::Move;
                        Self::Device(DeviceTask::Accumulate { from, into, mode, microbatch })
                    }
                }
            }
            Op::Serve { service } => Self::Serve(service),
            Op::Free { .. } => Self::Nothing,
        }
    }

    /// Thread that runs it.
    pub(crate) fn class(&self) -> OpClass {
        match self {
            Self::Device(_) | Self::Serve(_) | Self::Nothing => OpClass::Compute,
            Self::Exchange(_) => OpClass::Exchange,
            Self::Storage(_) => OpClass::Offload,
        }
    }
}

/// Class of a task, by the thread that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpClass {
    /// Runs to completion, or is issued, on the compute thread.
    Compute,
    /// In flight for a while, advanced by the progress engine.
    Exchange,
    /// Copied on the offload thread.
    Offload,
}
