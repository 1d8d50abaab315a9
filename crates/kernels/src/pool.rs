//! Thread pool that computes for one rank.
//!
//! A kernel splits its result into tiles and distributes them with [`Pool::for_each`]; the next
//! free thread takes the next tile. The result of a tile must not depend on the thread that
//! computes it, nor on the number of threads: tiles are split by the shape of the result alone, and
//! no sum is ever split between threads. So a pool changes the time of a kernel, but not a bit of
//! its result.
//!
//! The threads live as long as the pool. Between two kernels they spin for some microseconds, since
//! the next one usually follows soon, and then sleep. A kernel does not wait for a thread that
//! wakes too late. Nothing here allocates once a pool exists.

use crate::matmul::PackBuffer;
use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::hint::spin_loop;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

mod choice;
mod strips;

pub use choice::{Choice, Timing};
pub use strips::{Cut, Strips, strips};

/// Calling thread and its helper threads.
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    rooms: Mutex<PackBuffers>,
    /// Set while a kernel runs: a nested kernel runs on the calling thread alone.
    taken: AtomicBool,
    /// Set while an operator runs that is faster on the calling thread alone, see [`Choice`].
    alone: AtomicBool,
    created: Instant,
}

impl Pool {
    /// Creates a pool of `threads` threads, including the calling one. Fails if a thread cannot be
    /// spawned.
    pub fn new(threads: NonZeroUsize) -> io::Result<Self> {
        let mut pool = Self::single();
        let shared = Arc::new(Shared::new(threads.get() - 1));
        pool.shared = Arc::clone(&shared);
        pool.rooms = Mutex::new(PackBuffers::new(threads.get()));
        for slot in 1..threads.get() {
            let shared = Arc::clone(&shared);
            let name = format!("compute {slot}");
            // If one fails, dropping the pool ends those that have been started.
            let helper = thread::Builder::new().name(name).spawn(move || shared.help(slot))?;
            pool.helpers.push(helper);
        }
        Ok(pool)
    }

    /// Creates a pool of the calling thread alone.
    pub fn single() -> Self {
        Self {
            shared: Arc::new(Shared::new(0)),
            helpers: Vec::new(),
            rooms: Mutex::new(PackBuffers::new(1)),
            taken: AtomicBool::new(false),
            alone: AtomicBool::new(false),
            created: Instant::now(),
        }
    }

    fn set_alone(&self, alone: bool) {
        self.alone.store(alone, Relaxed);
    }

    /// Number of compute threads, including the calling one.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Calls `body` once for each tile below `tiles`, on any thread and in any order, and returns
    /// when all calls are done.
    ///
    /// A panic of `body` is passed on to the caller once all threads have left it.
    pub fn for_each(&self, tiles: usize, body: impl Fn(usize) + Sync) {
        self.for_each_slot(tiles, |_, tile| body(tile));
    }

    /// [`Pool::for_each`] that also passes a thread slot: a number below [`Pool::threads`] that no
    /// two calls have at the same time.
    pub fn for_each_slot(&self, tiles: usize, body: impl Fn(usize, usize) + Sync) {
        let one = tiles < 2 || self.helpers.is_empty() || self.alone.load(Relaxed);
        if one || self.taken.swap(true, Acquire) {
            (0..tiles).for_each(|tile| body(0, tile));
            return;
        }
        let result = self.shared.run(tiles, &body, &self.helpers);
        self.taken.store(false, Release);
        if let Err(panic) = result {
            resume_unwind(panic);
        }
    }

    /// [`Pool::for_each`] with a workspace: each thread gets exclusive use of an element of `rooms`
    /// while it computes a tile. There must be one for every thread.
    pub fn for_each_with<T: Send>(
        &self,
        rooms: &mut [T],
        tiles: usize,
        body: impl Fn(&mut T, usize) + Sync,
    ) {
        let threads = self.threads();
        assert!(rooms.len() >= threads, "{threads} threads cannot work in {} rooms", rooms.len());
        let rooms = strips(rooms, 1);
        self.for_each_slot(tiles, |slot, tile| {
            // SAFETY: `slot` is below the number of threads, hence below that of rooms, and no two
            // calls have the same one at the same time.
            let room = unsafe { rooms.piece(slot..slot + 1) };
            body(&mut room[0], tile);
        });
    }

    /// Splits `rows` rows into blocks of `block` (the last may be shorter) and calls `body` for
    /// each with its rows and its writable part of `output`, see [`Cut`].
    pub fn for_each_block<C: Cut>(
        &self,
        rows: usize,
        block: usize,
        output: C,
        body: impl Fn(std::ops::Range<usize>, C::Piece) + Sync,
    ) {
        output.expect_rows(rows);
        let block = block.max(1);
        self.for_each(rows.div_ceil(block), |tile| {
            let range = tile * block..rows.min((tile + 1) * block);
            // SAFETY: the ranges of different tiles do not overlap, each tile is called once, and
            // all are within the rows that `output` was found to have.
            body(range.clone(), unsafe { output.piece(range) });
        });
    }

    /// Buffers in which the threads of this pool pack the operands of GEMMs.
    pub(crate) fn pack_buffers(&self) -> MutexGuard<'_, PackBuffers> {
        // The contents left by a panic do not matter: a buffer is always written before it is read.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory for packed operands, allocated with the pool so that GEMMs need not allocate. It is the
/// same for every model: 6.5 MB for a pool and 0.9 MB for each of its threads. Only
/// the part that GEMMs have used is ever resident.
pub(crate) struct PackBuffers {
    /// Buffer for a GEMM that all threads compute together.
    pub(crate) shared: PackBuffer,
    /// Buffer of each thread, for GEMMs that one thread computes alone.
    pub(crate) own: Vec<PackBuffer>,
}

impl PackBuffers {
    fn new(threads: usize) -> Self {
        Self {
            shared: PackBuffer::shared(),
            own: (0..threads).map(|_| PackBuffer::small()).collect(),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A panic of a tile was already passed to the caller of its kernel.
            let _ = helper.join();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

/// Number of spins of a thread before it sleeps: some tens of microseconds.
const SPINS: u32 = 4000;

/// Number of spins of the caller for the last helper before it yields.
const JOIN_SPINS: u32 = 20_000;

/// Bit of [`Shared::gate`] that is set while a kernel may be joined.
const OPEN: u64 = 1 << 31;
/// Bits that count the helpers inside the kernel.
const INSIDE: u64 = OPEN - 1;
/// Increment for every kernel: the bits above the others number them.
const NEXT: u64 = 1 << 32;

/// State that the threads of a pool share.
struct Shared {
    /// Number of the kernel, its open bit, and the number of helpers inside: one word, so that
    /// joining a kernel that has just been closed fails.
    gate: AtomicU64,
    /// Next tile to be taken.
    next: AtomicUsize,
    /// Current job. Written while the gate is closed and no thread is inside; read inside.
    job: UnsafeCell<Option<Job>>,
    /// Panic payload of a helper's tile, if one panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// True for each helper that sleeps or is about to.
    asleep: Vec<AtomicBool>,
    stop: AtomicBool,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. Its one writer is `run`, whose
// caller holds the pool's `taken`, while the gate is closed and counts no thread inside; readers
// have passed the open gate, whose release and acquire order the write before them, and leave it
// before the caller returns.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only dereferenced while its creator waits in `run`.
unsafe impl Send for Shared {}

/// Tiles of one kernel.
#[derive(Clone, Copy)]
struct Job {
    tiles: usize,
    /// Represents a borrow that ends when `Shared::run` returns, which is after its last use.
    body: *const (dyn Fn(usize, usize) + Sync),
}

impl Shared {
    fn new(helpers: usize) -> Self {
        Self {
            gate: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            asleep: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
        }
    }

    /// Runs one kernel on the calling thread and the helpers that join it.
    fn run(
        &self,
        tiles: usize,
        body: &(dyn Fn(usize, usize) + Sync),
        helpers: &[JoinHandle<()>],
    ) -> Result<(), Box<dyn Any + Send>> {
        // SAFETY: this only removes the lifetime; `run` does not return before every thread that
        // could dereference the pointer has left.
        let body: *const (dyn Fn(usize, usize) + Sync) = unsafe { std::mem::transmute(body) };
        let job = Job { tiles, body };
        // SAFETY: the gate is closed and no thread is inside, see `Sync for Shared`.
        unsafe { *self.job.get() = Some(job) };
        self.next.store(0, Relaxed);
        // Sequential consistency, here and in `rest`: either this thread sees a helper asleep, or
        // that helper sees the gate open before it sleeps.
        self.gate.fetch_add(NEXT | OPEN, SeqCst);
        for (helper, asleep) in helpers.iter().zip(&self.asleep) {
            if asleep.load(SeqCst) && asleep.swap(false, SeqCst) {
                helper.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| self.take_tiles(job, 0)));
        self.gate.fetch_and(!OPEN, AcqRel);
        let mut looks = 0u32;
        while self.gate.load(Acquire) & INSIDE != 0 {
            looks = looks.saturating_add(1);
            if looks < JOIN_SPINS { spin_loop() } else { thread::yield_now() }
        }
        let theirs = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        own.and(theirs.map_or(Ok(()), Err))
    }

    /// Takes tiles until there are none left.
    fn take_tiles(&self, job: Job, slot: usize) {
        // On a panic, the others take no more tiles.
        struct Rest<'a>(&'a AtomicUsize, usize);
        impl Drop for Rest<'_> {
            fn drop(&mut self) {
                self.0.store(self.1, Relaxed);
            }
        }
        let rest = Rest(&self.next, job.tiles);
        loop {
            let tile = self.next.fetch_add(1, Relaxed);
            if tile >= job.tiles {
                break;
            }
            // SAFETY: the caller of `run` waits until this thread has left, so the borrow that this
            // pointer represents is alive.
            unsafe { (*job.body)(slot, tile) };
        }
        drop(rest);
    }

    /// Main loop of a helper.
    fn help(&self, slot: usize) {
        let mut done = 0;
        while !self.stop.load(Relaxed) {
            match self.join(done) {
                Some(number) => {
                    // SAFETY: this thread is inside, see `Sync for Shared`.
                    let job = unsafe { *self.job.get() };
                    let job = job.expect("an open kernel has tiles");
                    if let Err(panic) =
                        catch_unwind(AssertUnwindSafe(|| self.take_tiles(job, slot)))
                    {
                        *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                    }
                    self.gate.fetch_sub(1, AcqRel);
                    done = number;
                }
                None => self.rest(slot, done),
            }
        }
    }

    /// Joins an open kernel other than number `done`, if there is one. Returns its number.
    fn join(&self, done: u64) -> Option<u64> {
        let mut gate = self.gate.load(SeqCst);
        loop {
            if !is_new(gate, done) {
                return None;
            }
            match self.gate.compare_exchange_weak(gate, gate + 1, AcqRel, SeqCst) {
                Ok(_) => return Some(gate / NEXT),
                Err(now) => gate = now,
            }
        }
    }

    /// Waits for a kernel other than number `done`: spins for a while, then sleeps.
    fn rest(&self, slot: usize, done: u64) {
        for _ in 0..SPINS {
            if is_new(self.gate.load(Relaxed), done) || self.stop.load(Relaxed) {
                return;
            }
            spin_loop();
        }
        let asleep = &self.asleep[slot - 1];
        asleep.store(true, SeqCst);
        if !is_new(self.gate.load(SeqCst), done) && !self.stop.load(SeqCst) {
            thread::park();
        }
        asleep.store(false, SeqCst);
    }
}

/// Returns true if the gate is open for a kernel other than number `done`.
fn is_new(gate: u64, done: u64) -> bool {
    gate & OPEN != 0 && gate / NEXT != done
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicU32;

    fn pool(threads: usize) -> Pool {
        Pool::new(NonZeroUsize::new(threads).unwrap()).unwrap()
    }

    #[test]
    fn every_tile_is_called_once_in_many_kernels() {
        for threads in [1, 2, 3, 7] {
            let pool = pool(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..300 {
                let tiles = round % 23;
                let calls: Vec<AtomicU32> = (0..tiles).map(|_| AtomicU32::new(0)).collect();
                pool.for_each_slot(tiles, |slot, tile| {
                    assert!(slot < threads);
                    calls[tile].fetch_add(1, Relaxed);
                });
                assert!(calls.iter().all(|c| c.load(Relaxed) == 1), "{threads}, {tiles}");
            }
        }
    }

    #[test]
    fn helpers_wake_up_after_a_sleep() {
        let pool = pool(2);
        for _ in 0..20 {
            thread::sleep(std::time::Duration::from_millis(1));
            let met = std::sync::Barrier::new(2);
            // Two tiles that wait for each other: only two threads can finish them.
            pool.for_each(2, |_| _ = met.wait());
        }
    }

    #[test]
    fn a_kernel_inside_a_kernel_runs_on_its_thread() {
        let pool = pool(3);
        let count = AtomicU32::new(0);
        pool.for_each(4, |_| pool.for_each(5, |_| _ = count.fetch_add(1, Relaxed)));
        assert_eq!(count.load(Relaxed), 20);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool(3);
        for bad in 0..6 {
            let run = catch_unwind(AssertUnwindSafe(|| {
                pool.for_each(6, |tile| assert!(tile != bad, "tile {tile} is bad"));
            }));
            let panic = run.unwrap_err();
            let text = panic.downcast_ref::<String>().unwrap();
            assert_eq!(*text, format!("tile {bad} is bad"));
        }
        pool.for_each(6, |_| {});
    }

    #[test]
    fn rooms_are_never_shared() {
        let pool = pool(4);
        let mut rooms = vec![0u64; 4];
        for _ in 0..200 {
            pool.for_each_with(&mut rooms, 50, |room, tile| *room += tile as u64);
        }
        assert_eq!(rooms.iter().sum::<u64>(), 200 * (49 * 50 / 2));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn blocks_cover_their_rows(
            rows in 0usize..40, block in 0usize..9, width in 0usize..4, threads in 1usize..4,
        ) {
            let (mut a, mut b) = (vec![0; rows * width], vec![0; rows]);
            pool(threads).for_each_block(
                rows,
                block,
                (strips(&mut a, width), strips(&mut b, 1)),
                |range, (a, b)| {
                    assert_eq!(a.len(), range.len() * width);
                    a.fill(range.start + 1);
                    for (b, row) in b.iter_mut().zip(range) {
                        *b = row;
                    }
                },
            );
            prop_assert!(b.iter().enumerate().all(|(row, &v)| row == v));
            let block = block.max(1);
            let first_of = |row: usize| row / block * block + 1;
            prop_assert!(a.iter().enumerate().all(|(i, &v)| v == first_of(i / width)));
        }
    }

    #[test]
    #[should_panic(expected = "5 elements are not 3 rows of 2")]
    fn output_of_the_wrong_size_is_refused() {
        let mut x = [0; 5];
        Pool::single().for_each_block(3, 1, strips(&mut x, 2), |_, _| {});
    }
}
