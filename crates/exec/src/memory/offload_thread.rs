//! Offload thread of a rank: moves offloaded state while the other threads compute and communicate.

use crate::error::{ExecError, Fault};
use crate::interpreter::lanes::{OpScheduler, RunningOp, WaitSpan};
use crate::interpreter::task::{Move, OpClass, Task};
use crate::memory::Memory;
use crate::run::threads::message;
use paceline_plan::ids::{Microbatch, Rank};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Moves bytes to and from the store until the scheduler ends; calls `done` after every move.
pub(crate) fn run(
    rank: Rank,
    microbatches: u32,
    memory: &Memory<'_>,
    lanes: &OpScheduler<'_>,
    done: impl Fn(),
) {
    while let Some(started) = lanes.wait_for(OpClass::Offload) {
        let moved = catch_unwind(AssertUnwindSafe(|| transfer(memory, &started, microbatches)));
        let error = match moved {
            Ok(Ok(())) => {
                lanes.finish(&started, WaitSpan::default());
                done();
                continue;
            }
            Ok(Err(fault)) => lanes.failed(&started, fault),
            Err(panic) => ExecError::Panicked {
                rank,
                iteration: started.iteration + 1,
                op: lanes.describe(&started),
                message: message(panic.as_ref()),
            },
        };
        lanes.report(error);
        done();
        return;
    }
}

fn transfer(memory: &Memory<'_>, started: &RunningOp<'_>, microbatches: u32) -> Result<(), Fault> {
    let Task::Storage(Move { from, into, microbatch }) = started.task else {
        unreachable!("only what is offloaded is for the store");
    };
    let Microbatch(k) = microbatch;
    let running = u64::from(started.pass) * u64::from(microbatches) + u64::from(k);
    Ok(memory.transfer(memory.span(from, running), memory.span(into, running))?)
}

/// Ends the thread when dropped.
pub(crate) struct ShutdownGuard<'r, 'a>(pub(crate) &'r OpScheduler<'a>);

impl Drop for ShutdownGuard<'_, '_> {
    fn drop(&mut self) {
        self.0.end_waits();
    }
}
