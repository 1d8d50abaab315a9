//! A rank's second thread: it carries messages while the first one computes.
//!
//! Whoever has nothing to compute carries. The first thread has the courier as long as it waits for
//! messages itself, since nothing is faster than that, and between computations that are over sooner
//! than a thread is woken. Before a longer one, with something in flight, it hands the courier over;
//! it takes it back when there is nothing left to compute. The second thread sleeps in between, and
//! also while no message can be moved: it never keeps the first from the core that they may share.

use crate::courier::Courier;
use crate::error::ExecError;
use crate::train::message;
use paceline_comm::Waker;
use paceline_plan::ids::Rank;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// The courier and in whose hands it is.
pub(crate) struct Relay<'a> {
    rank: Rank,
    courier: Mutex<Courier<'a>>,
    hands: Mutex<Hands>,
    changed: Condvar,
    /// Ends the second thread's sleep at the wires; none where nothing can, and then there is no
    /// second thread.
    waker: Option<Waker>,
}

#[derive(Debug)]
struct Hands {
    whose: Whose,
    /// What the second thread met.
    trouble: Option<ExecError>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// The first thread's.
    First,
    /// The second thread's.
    Second,
    /// The second thread is to end.
    Over,
}

/// How long the second thread sleeps at most: it is woken when it is needed.
const NAP: Duration = Duration::from_secs(1);

impl<'a> Relay<'a> {
    pub(crate) fn new(courier: Courier<'a>) -> Self {
        // A rank by itself has nothing to carry.
        let waker = if courier.transport.world() > 1 { courier.transport.waker() } else { None };
        Self {
            rank: courier.transport.rank(),
            courier: Mutex::new(courier),
            hands: Mutex::new(Hands { whose: Whose::First, trouble: None }),
            changed: Condvar::new(),
            waker,
        }
    }

    /// Whether there can be a second thread.
    pub(crate) fn can_overlap(&self) -> bool {
        self.waker.is_some()
    }

    /// Takes the courier back, or keeps it; fails with what the second thread met meanwhile.
    pub(crate) fn take(&self) -> Result<MutexGuard<'_, Courier<'a>>, ExecError> {
        let before = std::mem::replace(&mut lock(&self.hands).whose, Whose::First);
        if before == Whose::Second {
            self.nudge();
        }
        let mut courier = lock(&self.courier);
        if let Some(trouble) = lock(&self.hands).trouble.take() {
            return Err(trouble);
        }
        courier.is_back();
        Ok(courier)
    }

    /// Hands the courier over. The first thread must have let go of it.
    pub(crate) fn lend(&self) {
        lock(&self.hands).whose = Whose::Second;
        self.changed.notify_one();
    }

    /// Makes the second thread look around: something may begin.
    pub(crate) fn nudge(&self) {
        self.waker.iter().for_each(Waker::wake);
    }

    /// The courier after a panic, if nobody else has it.
    pub(crate) fn after_panic(&self) -> Option<MutexGuard<'_, Courier<'a>>> {
        match self.courier.try_lock() {
            Ok(courier) => Some(courier),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Ends the second thread once the result is dropped, however that comes about.
    pub(crate) fn end_on_drop(&self) -> End<'_, 'a> {
        End(self)
    }

    /// The second thread.
    pub(crate) fn attend(&self) {
        while self.is_lent_or_over() {
            let mut courier = lock(&self.courier);
            let carried = catch_unwind(AssertUnwindSafe(|| self.carry(&mut courier)));
            let trouble = match carried {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error,
                Err(panic) => {
                    let at = courier.at();
                    let iteration = at.map_or(1, |at| at.iteration + 1);
                    let op = at.map_or_else(|| "start".into(), |at| courier.describe(&at));
                    let message = message(panic.as_ref());
                    ExecError::Panicked { rank: self.rank, iteration, op, message }
                }
            };
            let mut hands = lock(&self.hands);
            hands.trouble = Some(trouble);
            if hands.whose == Whose::Second {
                hands.whose = Whose::First;
            }
        }
    }

    /// Waits for the courier; false if there is nothing more to do.
    fn is_lent_or_over(&self) -> bool {
        let hands = lock(&self.hands);
        let first = |hands: &mut Hands| hands.whose == Whose::First;
        let hands = self.changed.wait_while(hands, first).unwrap_or_else(PoisonError::into_inner);
        hands.whose == Whose::Second
    }

    /// Moves messages until the courier is wanted back.
    fn carry(&self, courier: &mut Courier<'a>) -> Result<(), ExecError> {
        while lock(&self.hands).whose == Whose::Second {
            if !courier.carry()? {
                courier.sleep(NAP)?;
            }
        }
        Ok(())
    }
}

/// Ends the second thread when dropped.
pub(crate) struct End<'r, 'a>(&'r Relay<'a>);

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        lock(&self.0.hands).whose = Whose::Over;
        self.0.changed.notify_one();
        self.0.nudge();
    }
}

/// A panic while one of these locks is held leaves nothing that is used again but to say where.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{Kind, Lanes, SectionOf};
    use crate::memory::Memory;
    use crate::queue::Queue;
    use paceline_comm::Transport;
    use paceline_comm::thread::{ThreadTransport, world};
    use paceline_plan::collective::CollectiveKind;
    use paceline_plan::ids::{CallId, LaneId, Microbatch};
    use paceline_plan::lower::lower;
    use paceline_plan::model::built_in;
    use paceline_plan::program::{Op, Plan, Section};
    use paceline_plan::strategy::Strategy;
    use std::sync::Arc;
    use std::thread;
    use std::time::Instant;

    const AGES: Duration = Duration::from_secs(20);

    /// Two ranks whose iteration is so many all_reduces, one after the other.
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

    /// Lends a rank's courier to its second thread while `meanwhile` runs on the first.
    fn lent(
        plan: &Plan,
        transport: &mut ThreadTransport,
        meanwhile: impl FnOnce(&Relay<'_>, &Lanes<'_>),
    ) {
        let rank = transport.rank();
        let memory = Arc::new(Memory::new(plan.program(rank), transport).unwrap());
        let lanes = Arc::new(Lanes::new(plan, rank, Instant::now(), None));
        lanes.enter(SectionOf::Body, 0);
        lanes.open();
        let relay = Relay::new(Courier::new(plan, transport, &memory, &lanes));
        thread::scope(|scope| {
            let _end = relay.end_on_drop();
            scope.spawn(|| relay.attend());
            relay.lend();
            meanwhile(&relay, &lanes);
        });
    }

    #[test]
    fn messages_move_while_the_first_thread_does_something_else() {
        let plan = exchanges(1);
        thread::scope(|scope| {
            for mut transport in world(2) {
                let plan = &plan;
                scope.spawn(move || {
                    lent(plan, &mut transport, |relay, lanes| {
                        let began = Instant::now();
                        while !lanes.are(Queue::is_drained) && began.elapsed() < AGES {
                            thread::yield_now();
                        }
                        assert!(lanes.are(Queue::is_drained), "nobody carried");
                        assert!(!relay.take().unwrap().is_under_way());
                    });
                    transport
                });
            }
        });
    }

    /// Whoever has carried may go and compute: what could begin must not wait for that.
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
                    let lanes = Arc::new(Lanes::new(plan, rank, Instant::now(), None));
                    lanes.enter(SectionOf::Body, 0);
                    lanes.open();
                    let mut courier = Courier::new(plan, &mut transport, &memory, &lanes);
                    while !lanes.are(Queue::is_drained) {
                        if !courier.carry().unwrap() {
                            courier.wait(AGES).unwrap();
                        }
                        assert!(!lanes.has(Kind::Exchange), "something could have begun");
                    }
                    drop(courier);
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
        lent(&plan, &mut own, |relay, _| {
            other.abort("it is out of luck");
            let began = Instant::now();
            while lock(&relay.hands).trouble.is_none() && began.elapsed() < AGES {
                thread::yield_now();
            }
            let trouble = relay.take().err().expect("an error").to_string();
            assert!(trouble.starts_with("rank 0, iteration 1, all_reduce"), "{trouble}");
            assert!(trouble.ends_with("rank 1 failed: it is out of luck"), "{trouble}");
        });
    }
}
