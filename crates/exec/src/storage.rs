//! A rank's thread for its store: it moves what is offloaded while the others compute and carry.

use crate::error::{ExecError, Fault};
use crate::lanes::{Kind, Lanes, Started, Wait};
use crate::memory::Memory;
use crate::train::message;
use paceline_plan::ids::{Microbatch, Rank};
use paceline_plan::program::Op;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Moves bytes to and from the store until there is nothing more to do; `done` hears of every move.
pub(crate) fn attend(
    rank: Rank,
    microbatches: u32,
    memory: &Memory<'_>,
    lanes: &Lanes<'_>,
    done: impl Fn(),
) {
    while let Some(started) = lanes.wait_for(Kind::Storage) {
        let moved = catch_unwind(AssertUnwindSafe(|| transfer(memory, &started, microbatches)));
        let trouble = match moved {
            Ok(Ok(())) => {
                lanes.finish(&started, Wait::default());
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
        lanes.report(trouble);
        done();
        return;
    }
}

fn transfer(memory: &Memory<'_>, started: &Started<'_>, microbatches: u32) -> Result<(), Fault> {
    let (Op::Stash { from, into, microbatch } | Op::Restore { from, into, microbatch }) =
        *started.op
    else {
        unreachable!("only what is offloaded is for the store");
    };
    let Microbatch(k) = microbatch;
    let running = u64::from(started.pass) * u64::from(microbatches) + u64::from(k);
    Ok(memory.transfer(memory.span(from, running), memory.span(into, running))?)
}

/// Ends the thread when dropped.
pub(crate) struct End<'r, 'a>(pub(crate) &'r Lanes<'a>);

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.0.end_waits();
    }
}
