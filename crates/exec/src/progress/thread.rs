//! Progress thread: drives a rank's exchanges while the compute thread computes.
//!
//! The thread with nothing to compute drives the progress engine. The compute thread owns the
//! engine while it waits for messages itself, since that is fastest, and between computations
//! shorter than waking a thread. Before a longer computation with an exchange in flight, it hands
//! the engine over; it takes it back when there is nothing left to compute. The progress thread
//! sleeps in between, and also while no message can be moved: it never blocks the compute thread
//! from a core that they may share.

use crate::error::ExecError;
use crate::progress::engine::ProgressEngine;
use crate::run::threads::message;
use paceline_comm::Waker;
use paceline_plan::ids::Rank;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// Progress engine and the thread that owns it.
pub(crate) struct ProgressThread<'a> {
    rank: Rank,
    engine: Mutex<ProgressEngine<'a>>,
    ownership: Mutex<Ownership>,
    changed: Condvar,
    /// Ends the progress thread's sleep in the transport. If `None`, the transport cannot be woken
    /// and there is no progress thread.
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Ownership {
    owner: Owner,
    /// Error of the progress thread.
    error: Option<ExecError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The compute thread owns the engine.
    ComputeThread,
    /// The progress thread owns the engine.
    ProgressThread,
    /// The progress thread must end.
    Shutdown,
}

/// Longest sleep of the progress thread: it is woken when it is needed.
const NAP: Duration = Duration::from_secs(1);

impl<'a> ProgressThread<'a> {
    pub(crate) fn new(engine: ProgressEngine<'a>) -> Self {
        // A single rank has no exchanges to drive.
        let waker = if engine.transport.world() > 1 { engine.transport.waker() } else { None };
        Self { waker, ..Self::without(engine) }
    }

    /// Leaves the engine to the compute thread: it issues its work and never computes for long.
    pub(crate) fn without(engine: ProgressEngine<'a>) -> Self {
        Self {
            rank: engine.transport.rank(),
            engine: Mutex::new(engine),
            ownership: Mutex::new(Ownership { owner: Owner::ComputeThread, error: None }),
            changed: Condvar::new(),
            waker: None,
        }
    }

    /// Returns true if there can be a progress thread.
    pub(crate) fn can_overlap(&self) -> bool {
        self.waker.is_some()
    }

    /// Takes the engine back, or keeps it. Fails with the progress thread's error, if any.
    pub(crate) fn acquire(&self) -> Result<MutexGuard<'_, ProgressEngine<'a>>, ExecError> {
        let before = std::mem::replace(&mut lock(&self.ownership).owner, Owner::ComputeThread);
        if before == Owner::ProgressThread {
            self.wake();
        }
        let mut engine = lock(&self.engine);
        if let Some(error) = lock(&self.ownership).error.take() {
            return Err(error);
        }
        engine.is_back();
        Ok(engine)
    }

    /// Hands the engine to the progress thread. The compute thread must have unlocked it.
    pub(crate) fn release(&self) {
        lock(&self.ownership).owner = Owner::ProgressThread;
        self.changed.notify_one();
    }

    /// Wakes the progress thread: an exchange may start.
    pub(crate) fn wake(&self) {
        self.waker.iter().for_each(Waker::wake);
    }

    /// Engine after a panic, if the other thread does not hold it.
    pub(crate) fn after_panic(&self) -> Option<MutexGuard<'_, ProgressEngine<'a>>> {
        match self.engine.try_lock() {
            Ok(engine) => Some(engine),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Returns a guard that ends the progress thread when dropped, on any exit path.
    pub(crate) fn shutdown_on_drop(&self) -> ShutdownGuard<'_, 'a> {
        ShutdownGuard(self)
    }

    /// Main loop of the progress thread.
    pub(crate) fn run(&self) {
        while self.is_progress_threads_turn() {
            let mut engine = lock(&self.engine);
            let carried = catch_unwind(AssertUnwindSafe(|| self.drive(&mut engine)));
            let error = match carried {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error,
                Err(panic) => {
                    let at = engine.at();
                    let iteration = at.map_or(1, |at| at.iteration + 1);
                    let op = at.map_or_else(|| "start".into(), |at| engine.describe(&at));
                    let message = message(panic.as_ref());
                    ExecError::Panicked { rank: self.rank, iteration, op, message }
                }
            };
            let mut ownership = lock(&self.ownership);
            ownership.error = Some(error);
            if ownership.owner == Owner::ProgressThread {
                ownership.owner = Owner::ComputeThread;
            }
        }
    }

    /// Waits for ownership of the engine. Returns false on shutdown.
    fn is_progress_threads_turn(&self) -> bool {
        let ownership = lock(&self.ownership);
        let first = |ownership: &mut Ownership| ownership.owner == Owner::ComputeThread;
        let ownership =
            self.changed.wait_while(ownership, first).unwrap_or_else(PoisonError::into_inner);
        ownership.owner == Owner::ProgressThread
    }

    /// Moves messages until the compute thread wants the engine back.
    fn drive(&self, engine: &mut ProgressEngine<'a>) -> Result<(), ExecError> {
        while lock(&self.ownership).owner == Owner::ProgressThread {
            if !engine.make_progress()? {
                engine.sleep(NAP)?;
            }
        }
        Ok(())
    }
}

/// Ends the progress thread when dropped.
pub(crate) struct ShutdownGuard<'r, 'a>(&'r ProgressThread<'a>);

impl Drop for ShutdownGuard<'_, '_> {
    fn drop(&mut self) {
        lock(&self.0.ownership).owner = Owner::Shutdown;
        self.0.changed.notify_one();
        self.0.wake();
    }
}

/// Locks despite poisoning: after a panic, the state is used only to report its location.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interpreter::lanes::OpScheduler;
    use crate::interpreter::queue::ReadyQueue;
    use crate::interpreter::task::OpClass;
    use crate::memory::Memory;
    use crate::progress::exchange::MpiGroups;
    use paceline_comm::Transport;
    use paceline_comm::thread::{ThreadTransport, world};
    use paceline_plan::collective::CollectiveKind;
    use paceline_plan::ids::{CallId, LaneId, Microbatch};
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::program::{Op, Plan, Section};
    use paceline_plan::strategy::Strategy;
    use paceline_plan::validate::SectionKind;
    use std::sync::Arc;
    use std::thread;
    use std::time::Instant;

    const AGES: Duration = Duration::from_secs(20);

    /// Plan of two ranks whose iteration is `count` all-reduces, one after the other.
    fn exchanges(count: usize) -> Plan {
        let model = built_in::get("mini").unwrap().unwrap();
        let strategy =
            Strategy { dp: 2, leaves: 2, global_batch: 2, seq: model.seq, ..Strategy::default() };
        let mut plan = lower(&model, &strategy).unwrap();
        for program in &mut plan.programs {
            let reduces =
                |call: &paceline_plan::program::Call| call.kind == CollectiveKind::AllReduce;
            let call = CallId::from(program.calls.iter().position(reduces).unwrap());
            program.body = Section::default();
            program.in_flight.clear();
            for _ in 0..count {
                let op = Op::Collective { call, microbatch: Microbatch(0) };
                program.body.push(LaneId(1), op, &[]);
            }
        }
        plan
    }

    /// Releases a rank's engine to its progress thread and runs `meanwhile` on this one.
    fn lent(
        plan: &Plan,
        transport: &mut ThreadTransport,
        meanwhile: impl FnOnce(&ProgressThread<'_>, &OpScheduler<'_>),
    ) {
        let rank = transport.rank();
        let memory = Arc::new(Memory::new(plan.program(rank), transport).unwrap());
        let lanes = Arc::new(OpScheduler::new(plan, rank, Instant::now(), None));
        lanes.enter(SectionKind::Body, 0);
        lanes.open();
        let progress = ProgressThread::new(ProgressEngine::new(
            plan,
            transport,
            &memory,
            &lanes,
            MpiGroups::new(),
        ));
        thread::scope(|scope| {
            let _end = progress.shutdown_on_drop();
            scope.spawn(|| progress.run());
            progress.release();
            meanwhile(&progress, &lanes);
        });
    }

    #[test]
    fn messages_move_while_the_first_thread_does_something_else() {
        let plan = exchanges(1);
        thread::scope(|scope| {
            for mut transport in world(2) {
                let plan = &plan;
                scope.spawn(move || {
                    lent(plan, &mut transport, |progress, lanes| {
                        let began = Instant::now();
                        while !lanes.are(ReadyQueue::is_drained) && began.elapsed() < AGES {
                            thread::yield_now();
                        }
                        assert!(lanes.are(ReadyQueue::is_drained), "nobody carried");
                        assert!(!progress.acquire().unwrap().is_under_way());
                    });
                    transport
                });
            }
        });
    }

    /// The driving thread may compute next: a ready exchange must not wait for that.
    #[test]
    fn the_next_exchange_begins_where_the_last_one_ends() {
        let plan = exchanges(3);
        thread::scope(|scope| {
            for mut transport in world(2) {
                let plan = &plan;
                scope.spawn(move || {
                    let rank = transport.rank();
                    let memory = Memory::new(plan.program(rank), &mut transport).unwrap();
                    let memory = Arc::new(memory);
                    let lanes = Arc::new(OpScheduler::new(plan, rank, Instant::now(), None));
                    lanes.enter(SectionKind::Body, 0);
                    lanes.open();
                    let mut engine = ProgressEngine::new(
                        plan,
                        &mut transport,
                        &memory,
                        &lanes,
                        MpiGroups::new(),
                    );
                    while !lanes.are(ReadyQueue::is_drained) {
                        if !engine.make_progress().unwrap() {
                            engine.wait(AGES).unwrap();
                        }
                        assert!(!lanes.has(OpClass::Exchange), "something could have begun");
                    }
                    drop(engine);
                    transport
                });
            }
        });
    }

    #[test]
    fn what_the_second_thread_meets_the_first_one_says() {
        let plan = exchanges(1);
        let mut wires = world(2);
        let (mut other, mut own) = (wires.pop().unwrap(), wires.pop().unwrap());
        lent(&plan, &mut own, |progress, _| {
            other.abort("it is out of luck");
            let began = Instant::now();
            while lock(&progress.ownership).error.is_none() && began.elapsed() < AGES {
                thread::yield_now();
            }
            let error = progress.acquire().err().expect("an error").to_string();
            assert!(error.starts_with("rank 0, iteration 1, all_reduce"), "{error}");
            assert!(error.ends_with("rank 1 failed: it is out of luck"), "{error}");
        });
    }
}
