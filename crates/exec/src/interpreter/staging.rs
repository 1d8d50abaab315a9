//! Exchanges of a device that issues its tasks.
//!
//! The progress engine moves bytes between the host memories of ranks. What an exchange reads is
//! copied from the device once the tasks before it are done, and what it has written is copied back;
//! the tasks behind it wait for that copy on the device.

use super::lanes::RunningOp;
use super::task::{DeviceTask, OpClass, Task};
use super::{GLANCE, Issued, Rank};
use crate::device::Device;
use crate::error::{ExecError, Fault};
use crate::progress::engine::{ProgressEngine, Staging};
use crate::progress::exchange::NativeExchange;
use paceline_plan::validate::SectionKind;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

/// Exchange whose bytes are on their way to the host.
#[derive(Debug)]
pub(super) struct StagedExchange<'a, D: Device> {
    started: RunningOp<'a>,
    read: Option<D::Readback>,
    arrived: D::Event,
}

impl<'a, D: Device> Rank<'a, D> {
    /// Starts, advances and finishes exchanges, without waiting. Returns true if anything happened.
    pub(super) fn make_progress(
        &mut self,
        engine: &mut ProgressEngine<'a>,
    ) -> Result<bool, ExecError> {
        if !D::ISSUES {
            return engine.make_progress();
        }
        let mut moved = false;
        while let Some(started) = self.lanes.start(OpClass::Exchange) {
            self.at = Some(started);
            if let Some(native) = engine.native(&started) {
                let queued = native.and_then(|native| self.queue(&started, &native));
                queued.map_err(|source| self.lanes.failed(&started, source))?;
                self.lanes.finish_issued(&started);
                moved = true;
                continue;
            }
            let staged = self.read_out(engine, started);
            let staged = staged.map_err(|source| self.lanes.failed(&started, source))?;
            self.staged.push(staged);
            moved = true;
        }
        let mut at = 0;
        while let Some(StagedExchange { started, arrived, .. }) = self.staged.get(at) {
            let started = *started;
            let arrived = self.device.is_done(*arrived);
            if !arrived.map_err(|source| self.lanes.failed(&started, source))? {
                at += 1;
                continue;
            }
            let StagedExchange { started, read, .. } = self.staged.remove(at);
            let taken = read.map_or(Ok(()), |read| self.device.take_back(&self.memory, read));
            taken.map_err(|source| self.lanes.failed(&started, source))?;
            // The exchange begins now: the device has just done what comes before it.
            engine.start(RunningOp { start: self.lanes.now(), ..started })?;
            moved = true;
        }
        moved |= engine.make_progress()?;
        while let Some((started, wait)) = engine.take_done() {
            let written = self.write_in(engine, &started);
            written.map_err(|source| self.lanes.failed(&started, source))?;
            self.lanes.finish(&started, wait);
            moved = true;
        }
        Ok(moved)
    }

    /// Runs the device's tasks once, on what its memory happens to hold: at their first use kernels are
    /// compiled and memory is allocated, and the device may have to finish all that it was issued. Later
    /// that may be an exchange which waits for what another rank is about to do.
    pub(super) fn prime(&mut self, iteration: u32) -> Result<(), ExecError> {
        if !self.device.waits_for_ranks() {
            return Ok(());
        }
        self.device.begin_pass(self.pass(iteration, false));
        let (program, progress) = (self.program, Arc::clone(&self.progress));
        let engine = progress.acquire()?;
        let mut seen = BTreeSet::new();
        for section in [SectionKind::Prologue, SectionKind::Body, SectionKind::Epilogue] {
            for started in self.lanes.all(section, iteration) {
                if let Task::Device(DeviceTask::Segment { segment, .. }) = started.task
                    && !seen.insert((started.lane, program.segment(segment).template))
                {
                    continue;
                }
                let done = self.try_out(&engine, &started);
                done.map_err(|source| self.lanes.failed(&started, source))?;
            }
        }
        drop(engine);
        let spans = self.outputs(iteration);
        let left = self.device.leave_pass(&spans);
        let finished = left.and_then(|()| self.device.finish_pass(&self.memory));
        let reset = finished.and_then(|()| self.device.reset(&self.memory));
        reset.map_err(|source| self.at_the_end(source))
    }

    /// Runs a task of the device, or copies what an exchange reads.
    fn try_out(
        &mut self,
        engine: &ProgressEngine<'a>,
        started: &RunningOp<'a>,
    ) -> Result<(), Fault> {
        let stream = started.lane.index();
        match started.task {
            Task::Device(task) => match self.run_task(stream, task, started) {
                // Nobody has sent the tokens that are routed here.
                Err(Fault::Full(_)) => Ok(()),
                other => other,
            },
            Task::Exchange(_) if engine.native(started).is_none() => {
                let Some(span) = engine.staging(started).read else { return Ok(()) };
                let read = self.device.read_back(stream, span)?;
                self.device.take_back(&self.memory, read)
            }
            Task::Exchange(_) | Task::Storage(_) | Task::Serve(_) | Task::Nothing => Ok(()),
        }
    }

    /// Returns true if an exchange waits for the device.
    pub(super) fn is_staging(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Queues an exchange that a library performs.
    fn queue(&mut self, started: &RunningOp<'a>, native: &NativeExchange) -> Result<(), Fault> {
        let stream = started.lane.index();
        self.wait_for_earlier(started)?;
        let begin = self.device.record(stream)?;
        self.device.exchange(stream, native)?;
        let end = self.device.record(stream)?;
        self.ended_at(started, end);
        self.issued.push(Issued { op: *started, begin, end });
        Ok(())
    }

    /// Waits until a device whose exchanges depend on other ranks satisfies `wanted`; fails if a rank
    /// or the library has failed meanwhile, or if none of the tasks `issued` gets done for long.
    pub(super) fn wait_for_device(
        &mut self,
        issued: &[Issued<'a, D>],
        wanted: fn(&D) -> Result<bool, Fault>,
    ) -> Result<(), ExecError> {
        if !D::ISSUES || self.run.plan.mesh.world() == 1 {
            return Ok(());
        }
        let mut stuck: Option<(usize, Instant)> = None;
        loop {
            let healthy = self.device.check_libraries();
            let done = healthy.and_then(|()| wanted(&self.device));
            if done.map_err(|source| self.at_the_end(source))? {
                return Ok(());
            }
            let at = self.first_not_done(issued)?;
            match stuck {
                Some((before, since)) if Some(before) == at => {
                    let (waited, timeout) = (since.elapsed(), self.run.options.exchange_timeout);
                    if waited >= timeout {
                        let source = Fault::Stalled { waited };
                        return Err(match issued.get(before) {
                            Some(Issued { op, .. }) => self.lanes.failed(op, source),
                            None => self.at_the_end(source),
                        });
                    }
                }
                _ => stuck = at.map(|at| (at, Instant::now())),
            }
            self.progress.acquire()?.sleep(GLANCE)?;
        }
    }

    /// Number of the first of some tasks that the device has not done.
    fn first_not_done(&self, issued: &[Issued<'a, D>]) -> Result<Option<usize>, ExecError> {
        for (at, Issued { op, end, .. }) in issued.iter().enumerate() {
            let done = self.device.is_done(*end);
            if !done.map_err(|source| self.lanes.failed(op, source))? {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Queues the copy of what an exchange reads.
    fn read_out(
        &mut self,
        engine: &ProgressEngine<'a>,
        started: RunningOp<'a>,
    ) -> Result<StagedExchange<'a, D>, Fault> {
        let stream = started.lane.index();
        self.wait_for_earlier(&started)?;
        let Staging { read, .. } = engine.staging(&started);
        let read = read.map(|span| self.device.read_back(stream, span)).transpose()?;
        let arrived = self.device.record(stream)?;
        Ok(StagedExchange { started, read, arrived })
    }

    /// Queues the copy of what an exchange has written.
    fn write_in(
        &mut self,
        engine: &ProgressEngine<'a>,
        started: &RunningOp<'a>,
    ) -> Result<(), Fault> {
        let stream = started.lane.index();
        if let Staging { written: Some(span), .. } = engine.staging(started) {
            self.device.upload(stream, &self.memory, span)?;
        }
        let end = self.device.record(stream)?;
        self.ended_at(started, end);
        Ok(())
    }
}
