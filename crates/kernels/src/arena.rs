//! Arena: the one block of memory in which a rank holds every planned buffer.
//!
//! The plan assigns each buffer an offset ahead of time, and buffers whose lifetimes do not overlap
//! share bytes. Aliasing that the compiler cannot see is checked here when an op begins.
//! [`Arena::views`] returns slices of several buffers at once, and rejects a pair that overlaps
//! where one of them is written. This holds within the op and against an op of another lane that is
//! still running. So the lanes of a rank may work in one arena concurrently. A faulty plan causes
//! an error that names the spans, not a wrong number. This is the only module that needs `unsafe`
//! to share memory.

use crate::element::Plain;
use crate::huge_pages::prefer_huge;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Zeroed block of bytes, aligned for the widest vectors.
pub struct Arena {
    /// First byte of the arena, at an aligned address inside its block.
    memory: NonNull<u8>,
    block: Block,
    bytes: u64,
    leases: Mutex<Leases>,
}

/// Origin of an arena's memory.
enum Block {
    /// Allocated by this process.
    Allocated(NonNull<u8>, Layout),
    /// Provided by an owner, which is kept alive as long as the arena and never accessed.
    Adopted { _owner: Box<dyn BackingMemory> },
}

/// Memory that can back an arena, for example shared memory that other processes read.
///
/// # Safety
///
/// The bytes at `memory` must stay where they are, readable, writable and initialised, until the
/// value is dropped, and nothing else in this process may access them meanwhile. Other processes
/// may write only bytes that this one has lent them for a collective and does not access until they
/// are done.
pub unsafe trait BackingMemory: Send + Sync {
    /// The bytes, aligned to 64.
    fn memory(&self) -> NonNull<[u8]>;
}

/// Range of an arena's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First byte, a multiple of two.
    pub offset: u64,
    /// Number of bytes, a multiple of two; zero is allowed.
    pub len: u64,
}

/// Access of an op to a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// The span is only read; other ops may read it too.
    Read,
    /// The span is written, or read and written; nothing else may touch it.
    Write,
}

/// Slices of one op, held until this value is dropped.
pub struct Views<'a> {
    arena: &'a Arena,
    holder: u64,
    spans: [(Span, Access); MAX_SPANS],
    count: usize,
    /// One bit per span that has been given out for writing.
    taken: Cell<u32>,
}

/// Maximum number of spans per call of [`Arena::views`]: more than any operator has.
pub const MAX_SPANS: usize = 32;

/// Error when creating an arena or using a span of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArenaError {
    /// The memory cannot be allocated.
    #[error("cannot allocate an arena of {bytes} bytes; use a plan whose peak memory is smaller")]
    OutOfMemory {
        /// Requested size.
        bytes: u64,
    },
    /// A span ends beyond the arena.
    #[error("span {index} ({span}) ends beyond the arena's {bytes} bytes")]
    OutOfBounds {
        /// Index of the span.
        index: usize,
        /// Span itself.
        span: Span,
        /// Size of the arena.
        bytes: u64,
    },
    /// A span does not begin and end at element boundaries.
    #[error("span {index} ({span}) does not begin and end at a multiple of two bytes")]
    Misaligned {
        /// Index of the span.
        index: usize,
        /// Span itself.
        span: Span,
    },
    /// Two spans of one op share bytes, and at least one of them is written.
    #[error("spans {first} ({first_span}) and {second} ({second_span}) overlap and one is written")]
    Overlap {
        /// Index of the first span in the list.
        first: usize,
        /// First span itself.
        first_span: Span,
        /// Index of the span it overlaps.
        second: usize,
        /// Second span itself.
        second_span: Span,
    },
    /// A span shares bytes with one that another op still holds, and one of them is written.
    #[error(
        "span {index} ({span}) overlaps {held}, which another op still holds, and one is written; \
         the plan lacks an edge between them"
    )]
    Busy {
        /// Index of the span.
        index: usize,
        /// Span itself.
        span: Span,
        /// Span that is held.
        held: Span,
    },
    /// An op names more spans than one call can hold.
    #[error("an op names {count} spans, but {MAX_SPANS} is the most it can hold at once")]
    TooManySpans {
        /// Number of spans it names.
        count: usize,
    },
}

impl Arena {
    /// Allocates `bytes` bytes, all zero, aligned to 64 bytes.
    pub fn new(bytes: u64) -> Result<Self, ArenaError> {
        let refused = || ArenaError::OutOfMemory { bytes };
        // For ordinary alignments the allocator returns untouched zero pages, but for larger ones
        // it clears every byte itself. So alignment is done here, with one cache line to spare.
        let size = bytes.checked_add(ALIGNMENT as u64).and_then(|size| size.try_into().ok());
        let layout = Layout::from_size_align(size.ok_or_else(refused)?, align_of::<f32>())
            .map_err(|_| refused())?;
        // SAFETY: the layout's size is at least ALIGNMENT, hence not zero.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        prefer_huge(allocation, layout.size());
        let padding = allocation.addr().get().wrapping_neg() % ALIGNMENT;
        // SAFETY: the padding is less than the ALIGNMENT bytes allocated beyond those requested.
        let memory = unsafe { allocation.add(padding) };
        let leases = Leases { next: 0, held: Vec::with_capacity(4 * MAX_SPANS) };
        let block = Block::Allocated(allocation, layout);
        Ok(Arena { memory, block, bytes, leases: Mutex::new(leases) })
    }

    /// Builds an arena on existing memory. It must be zero; its length is the arena's.
    ///
    /// Panics if the memory is not aligned to 64 bytes: mapped pages always are.
    pub fn adopt(lender: Box<dyn BackingMemory>) -> Self {
        let memory = lender.memory();
        let bytes = memory.len() as u64;
        let memory = memory.cast::<u8>();
        assert!(memory.addr().get().is_multiple_of(ALIGNMENT), "memory at {memory:?}");
        let leases = Leases { next: 0, held: Vec::with_capacity(4 * MAX_SPANS) };
        let block = Block::Adopted { _owner: lender };
        Arena { memory, block, bytes, leases: Mutex::new(leases) }
    }

    /// Size of the arena in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives access to several spans at once, for as long as the result lives.
    ///
    /// Rejects spans that are out of bounds or misaligned, and every overlap in which one side is
    /// written: between two of these spans, or with one that another [`Views`] holds. It never
    /// waits: an overlap between ops means that the plan lacks an edge.
    pub fn views(&self, spans: &[(Span, Access)]) -> Result<Views<'_>, ArenaError> {
        if spans.len() > MAX_SPANS {
            return Err(ArenaError::TooManySpans { count: spans.len() });
        }
        for (second, &(second_span, access)) in spans.iter().enumerate() {
            self.check(second, second_span)?;
            for (first, &(first_span, other)) in spans[..second].iter().enumerate() {
                if conflict((first_span, other), (second_span, access)) {
                    return Err(ArenaError::Overlap { first, first_span, second, second_span });
                }
            }
        }
        let mut leases = self.leases();
        for (index, &(span, access)) in spans.iter().enumerate() {
            if let Some(&(_, held)) =
                leases.held.iter().find(|&&(_, held)| conflict(held, (span, access)))
            {
                return Err(ArenaError::Busy { index, span, held: held.0 });
            }
        }
        let holder = leases.next;
        leases.next += 1;
        leases.held.extend(spans.iter().map(|&span| (holder, span)));
        drop(leases);

        let mut list = [(Span { offset: 0, len: 0 }, Access::Read); MAX_SPANS];
        list[..spans.len()].copy_from_slice(spans);
        Ok(Views { arena: self, holder, spans: list, count: spans.len(), taken: Cell::new(0) })
    }

    /// One span as `f32`, for reading. `&mut self` excludes other views, so no lease is taken.
    pub fn f32(&mut self, span: Span) -> Result<&[f32], ArenaError> {
        Ok(self.f32_mut(span)?)
    }

    /// One span as `f32`, for writing. `&mut self` excludes other views, so no lease is taken.
    pub fn f32_mut(&mut self, span: Span) -> Result<&mut [f32], ArenaError> {
        self.check(0, span)?;
        let len = span.elements::<f32>();
        // SAFETY: `check` found the span inside the arena, `elements` that it is aligned for `f32`,
        // every bit pattern is a valid `f32`, and `&mut self` proves that no view is alive.
        Ok(unsafe { slice::from_raw_parts_mut(self.pointer(span), len) })
    }

    /// One span as `u32`, for writing. `&mut self` excludes other views, so no lease is taken.
    pub fn u32_mut(&mut self, span: Span) -> Result<&mut [u32], ArenaError> {
        self.check(0, span)?;
        let len = span.elements::<u32>();
        // SAFETY: as in `f32_mut`; every bit pattern is a valid `u32`.
        Ok(unsafe { slice::from_raw_parts_mut(self.pointer(span), len) })
    }

    /// Copies one span to another of the same length that does not overlap it.
    ///
    /// Panics if the lengths differ.
    pub fn copy(&self, from: Span, to: Span) -> Result<(), ArenaError> {
        assert_eq!(from.len, to.len, "cannot copy {from} to {to}: their lengths differ");
        let views = self.views(&[(from, Access::Read), (to, Access::Write)])?;
        views.take_bytes(1).copy_from_slice(views.bytes(0));
        Ok(())
    }

    fn check(&self, index: usize, span: Span) -> Result<(), ArenaError> {
        if !span.offset.is_multiple_of(ELEMENT) || !span.len.is_multiple_of(ELEMENT) {
            return Err(ArenaError::Misaligned { index, span });
        }
        match span.offset.checked_add(span.len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(ArenaError::OutOfBounds { index, span, bytes: self.bytes }),
        }
    }

    /// Address of a span that `check` has accepted.
    fn pointer<T>(&self, span: Span) -> *mut T {
        // SAFETY: `check` found `span.offset` to be at most the arena's size, so the sum stays in
        // the allocation (or one past its end, for an empty span).
        unsafe { self.memory.as_ptr().add(span.offset as usize).cast() }
    }

    fn leases(&self) -> MutexGuard<'_, Leases> {
        // A panic under the lock cannot leave the list inconsistent.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: the arena owns its memory, and all access to it goes through leases behind a mutex or
// through `&mut self`; the elements are plain numbers.
unsafe impl Send for Arena {}
// SAFETY: as above: two threads can hold slices of the same bytes only if both read them.
unsafe impl Sync for Arena {}

/// Bytes for a library outside this program, which reads or writes them while an operation is under
/// way: an address without a lifetime. Its user sees to it that the memory outlasts the operation, and
/// that nothing else touches it meanwhile.
#[derive(Debug)]
pub struct HostBytes {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; using the address is the user's affair.
unsafe impl Send for HostBytes {}

impl HostBytes {
    /// The bytes of a slice.
    pub fn of(bytes: &mut [u8]) -> Self {
        Self { at: NonNull::from(&mut *bytes).cast(), len: bytes.len() }
    }

    /// Address of the first byte.
    pub fn pointer(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Arena {
    /// A span for a library outside this program. The plan orders all ops that touch it around the
    /// operation, and the arena stays until that has ended.
    pub fn lend(&self, span: Span) -> Result<HostBytes, ArenaError> {
        // No other op may be using it when the operation begins.
        drop(self.views(&[(span, Access::Write)])?);
        let at = NonNull::new(self.pointer(span)).unwrap_or(self.memory);
        Ok(HostBytes { at, len: span.len as usize })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        match self.block {
            // SAFETY: `new` allocated it with this layout, and it is freed once.
            Block::Allocated(allocation, layout) => unsafe {
                dealloc(allocation.as_ptr(), layout);
            },
            Block::Adopted { .. } => {}
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Views<'_> {
    /// Span `index`, requested for reading, as elements of type `T`. Panics if it was not, or if it
    /// is not aligned for the type.
    pub fn slice<T: Plain>(&self, index: usize) -> &[T] {
        let span = self.span(index, Access::Read);
        let len = span.elements::<T>();
        // SAFETY: the span is in bounds and aligned, every bit pattern is a valid value of plain
        // data, and until this value is dropped its lease excludes every writer.
        unsafe { slice::from_raw_parts(self.arena.pointer(span), len) }
    }

    /// Span `index`, requested for writing, as elements of type `T`. Panics if it was not, if it is
    /// not aligned for the type, or when it is taken a second time.
    #[expect(clippy::mut_from_ref, reason = "each span can be taken once, see `take_span`")]
    pub fn take<T: Plain>(&self, index: usize) -> &mut [T] {
        let span = self.take_span(index);
        let len = span.elements::<T>();
        // SAFETY: the span is in bounds and aligned, and every bit pattern is a valid value of
        // plain data. Nothing else accesses its bytes until this value is dropped: its lease
        // excludes other views, no other span of this one overlaps it, and `take_span` gives it out
        // once.
        unsafe { slice::from_raw_parts_mut(self.arena.pointer(span), len) }
    }

    /// [`slice`](Self::slice) of `f32`.
    pub fn f32(&self, index: usize) -> &[f32] {
        self.slice(index)
    }

    /// [`slice`](Self::slice) of `u32`.
    pub fn u32(&self, index: usize) -> &[u32] {
        self.slice(index)
    }

    /// [`slice`](Self::slice) of bytes, to be sent.
    pub fn bytes(&self, index: usize) -> &[u8] {
        self.slice(index)
    }

    /// [`take`](Self::take) of `f32`.
    pub fn take_f32(&self, index: usize) -> &mut [f32] {
        self.take(index)
    }

    /// [`take`](Self::take) of `u32`.
    pub fn take_u32(&self, index: usize) -> &mut [u32] {
        self.take(index)
    }

    /// [`take`](Self::take) of bytes, to be received.
    pub fn take_bytes(&self, index: usize) -> &mut [u8] {
        self.take(index)
    }

    #[track_caller]
    fn take_span(&self, index: usize) -> Span {
        let span = self.span(index, Access::Write);
        assert!(self.taken.get() & (1 << index) == 0, "span {index} ({span}) is taken twice");
        self.taken.set(self.taken.get() | (1 << index));
        span
    }

    #[track_caller]
    fn span(&self, index: usize, access: Access) -> Span {
        assert!(index < self.count, "there is no span {index} among {}", self.count);
        let (span, granted) = self.spans[index];
        assert!(granted == access, "span {index} ({span}) is held for {granted:?}, not {access:?}");
        span
    }
}

impl Drop for Views<'_> {
    fn drop(&mut self) {
        self.arena.leases().held.retain(|&(holder, _)| holder != self.holder);
    }
}

impl Span {
    /// Number of elements of type `T` in the span. Panics if it does not begin and end at such
    /// elements' boundaries: the arena itself is aligned for all of them.
    #[track_caller]
    fn elements<T: Plain>(&self) -> usize {
        let size = size_of::<T>() as u64;
        assert!(
            self.offset.is_multiple_of(size) && self.len.is_multiple_of(size),
            "{self} do not begin and end between elements of {size} bytes"
        );
        (self.len / size) as usize
    }

    /// Returns true if the spans share a byte. An empty span shares none.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.len > 0
            && other.len > 0
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}", self.len, self.offset)
    }
}

/// Alignment of an arena: one cache line, and one register of the widest vectors.
const ALIGNMENT: usize = 64;

/// Size of the smallest element that a span may hold, and alignment of a span.
const ELEMENT: u64 = 2;

/// Spans in use, each with the number of the [`Views`] that holds it.
struct Leases {
    next: u64,
    held: Vec<(u64, (Span, Access))>,
}

/// Returns true if two accesses exclude each other.
fn conflict((a, access): (Span, Access), (b, other): (Span, Access)) -> bool {
    (access == Access::Write || other == Access::Write) && a.overlaps(&b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Bf16, Element};
    use Access::{Read, Write};
    use proptest::prelude::*;

    fn span(offset: u64, len: u64) -> Span {
        Span { offset, len }
    }

    #[test]
    fn adopted_memory_is_used_in_place() {
        #[repr(align(64))]
        struct Page(#[expect(dead_code, reason = "reached through the arena")] [u8; 128]);
        struct Owner(NonNull<Page>);
        // SAFETY: the page is allocated until the owner is dropped, and only the arena uses it.
        unsafe impl BackingMemory for Owner {
            fn memory(&self) -> NonNull<[u8]> {
                NonNull::slice_from_raw_parts(self.0.cast(), 128)
            }
        }
        // SAFETY: as above.
        unsafe impl Send for Owner {}
        // SAFETY: as above.
        unsafe impl Sync for Owner {}
        impl Drop for Owner {
            fn drop(&mut self) {
                // SAFETY: it came from a box, and is dropped once.
                drop(unsafe { Box::from_raw(self.0.as_ptr()) });
            }
        }
        let page = NonNull::from(Box::leak(Box::new(Page([0; 128]))));
        let mut arena = Arena::adopt(Box::new(Owner(page)));
        assert_eq!(arena.bytes(), 128);
        let last = Span { offset: 124, len: 4 };
        arena.f32_mut(last).unwrap()[0] = 3.0;
        assert_eq!(arena.f32(last).unwrap(), [3.0]);
        assert!(arena.f32(Span { offset: 128, len: 4 }).is_err());
    }

    #[test]
    fn an_arena_is_aligned_and_zero() {
        let mut arena = Arena::new(1000).unwrap();
        let all = arena.f32(span(0, 1000)).unwrap();
        assert_eq!(all.as_ptr() as usize % 64, 0);
        assert_eq!(all, [0.0; 250]);
        assert_eq!(arena.bytes(), 1000);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri ends the process instead of refusing the memory")]
    fn absurd_sizes_fail_cleanly() {
        for bytes in [u64::MAX, u64::MAX / 2, i64::MAX as u64 - 63, 1 << 62] {
            assert_eq!(Arena::new(bytes).unwrap_err(), ArenaError::OutOfMemory { bytes });
        }
    }

    #[test]
    fn an_empty_arena_has_empty_spans() {
        let arena = Arena::new(0).unwrap();
        let views = arena.views(&[(span(0, 0), Write), (span(0, 0), Read)]).unwrap();
        assert!(views.take_f32(0).is_empty() && views.f32(1).is_empty());
    }

    #[test]
    fn several_spans_are_read_and_written_at_once() {
        let mut arena = Arena::new(64).unwrap();
        arena.f32_mut(span(0, 8)).unwrap().copy_from_slice(&[1.0, 2.0]);
        arena.u32_mut(span(8, 8)).unwrap().copy_from_slice(&[3, 4]);
        {
            let spans = [(span(0, 8), Read), (span(8, 8), Read), (span(16, 8), Write)];
            let views = arena.views(&spans).unwrap();
            let out = views.take_f32(2);
            for ((y, x), n) in out.iter_mut().zip(views.f32(0)).zip(views.u32(1)) {
                *y = x * *n as f32;
            }
            assert_eq!(views.bytes(0)[..4], 1.0f32.to_ne_bytes());
        }
        arena.copy(span(16, 8), span(24, 8)).unwrap();
        assert_eq!(arena.f32(span(24, 8)).unwrap(), [3.0, 8.0]);
        arena.views(&[(span(24, 4), Write)]).unwrap().take_bytes(0).fill(0);
        assert_eq!(arena.f32(span(24, 8)).unwrap(), [0.0, 8.0]);
        arena.views(&[(span(24, 4), Write)]).unwrap().take_u32(0)[0] = 7;
        assert_eq!(arena.u32_mut(span(24, 4)).unwrap(), [7]);
    }

    #[test]
    fn narrow_elements_stand_at_every_second_byte() {
        let arena = Arena::new(64).unwrap();
        arena.views(&[(span(2, 6), Write)]).unwrap().take::<Bf16>(0).fill(Bf16::narrow(1.5));
        let views = arena.views(&[(span(2, 6), Read), (span(4, 4), Read)]).unwrap();
        assert_eq!(views.slice::<Bf16>(0), [Bf16::from_bits(0x3fc0); 3]);
        assert_eq!(views.u32(1), [0x3fc0_3fc0]);
    }

    #[test]
    #[should_panic(expected = "6 bytes at 2 do not begin and end between elements of 4 bytes")]
    fn a_span_between_elements_is_not_read_as_them() {
        let arena = Arena::new(64).unwrap();
        arena.views(&[(span(2, 6), Read)]).unwrap().f32(0);
    }

    #[test]
    fn bad_spans_are_refused_with_their_index() {
        let arena = Arena::new(64).unwrap();
        let error = |spans: &[(Span, Access)]| arena.views(spans).err().unwrap();
        let good = (span(0, 4), Read);
        for bad in [span(64, 4), span(60, 8), span(u64::MAX - 3, 4), span(0, u64::MAX - 3)] {
            let expected = ArenaError::OutOfBounds { index: 1, span: bad, bytes: 64 };
            assert_eq!(error(&[good, (bad, Read)]), expected);
        }
        for bad in [span(1, 4), span(0, 3), span(1, 0)] {
            assert_eq!(error(&[(bad, Write)]), ArenaError::Misaligned { index: 0, span: bad });
        }
        let error = error(&[(span(0, 8), Write), (span(16, 4), Write), (span(4, 8), Read)]);
        let message = "spans 0 (8 bytes at 0) and 2 (8 bytes at 4) overlap and one is written";
        assert_eq!(error.to_string(), message);
        let many = [(span(0, 4), Read); MAX_SPANS + 1];
        assert_eq!(
            arena.views(&many).err().unwrap(),
            ArenaError::TooManySpans { count: MAX_SPANS + 1 }
        );
        assert!(arena.views(&many[1..]).is_ok());
        assert!(arena.copy(span(0, 8), span(4, 8)).is_err());
    }

    #[test]
    fn identical_spans_conflict_only_when_written() {
        let arena = Arena::new(64).unwrap();
        let (read, write) = ((span(8, 8), Read), (span(8, 8), Write));
        assert!(arena.views(&[read, read]).is_ok());
        assert!(arena.views(&[read, write]).is_err());
        assert!(arena.views(&[write, read]).is_err());
        assert!(arena.views(&[write, write]).is_err());
    }

    #[test]
    fn ops_of_different_lanes_may_not_collide() {
        let arena = Arena::new(64).unwrap();
        let reading = arena.views(&[(span(0, 16), Read)]).unwrap();
        assert!(arena.views(&[(span(0, 16), Read), (span(16, 16), Write)]).is_ok());
        let error = arena.views(&[(span(32, 4), Read), (span(12, 8), Write)]).err().unwrap();
        let expected = ArenaError::Busy { index: 1, span: span(12, 8), held: span(0, 16) };
        assert_eq!(error, expected);
        drop(reading);
        let writing = arena.views(&[(span(12, 8), Write)]).unwrap();
        assert!(arena.views(&[(span(16, 4), Read)]).is_err());
        drop(writing);
        assert!(arena.views(&[(span(16, 4), Read)]).is_ok());
    }

    #[test]
    fn lanes_work_in_one_arena_at_the_same_time() {
        let mut arena = Arena::new(4096).unwrap();
        std::thread::scope(|scope| {
            for lane in 0..4 {
                let arena = &arena;
                scope.spawn(move || {
                    for _ in 0..20 {
                        let views = arena.views(&[(span(lane * 1024, 1024), Write)]).unwrap();
                        views.take_f32(0).iter_mut().for_each(|v| *v += lane as f32);
                    }
                });
            }
        });
        for lane in 0..4 {
            let values = arena.f32(span(lane * 1024, 1024)).unwrap();
            assert!(values.iter().all(|&v| v == 20.0 * lane as f32));
        }
    }

    #[test]
    fn a_forgotten_view_blocks_ops_but_not_the_owner() {
        let mut arena = Arena::new(64).unwrap();
        std::mem::forget(arena.views(&[(span(0, 4), Write)]).unwrap());
        assert!(arena.views(&[(span(0, 4), Read)]).is_err());
        assert!(arena.f32_mut(span(0, 4)).is_ok());
    }

    #[test]
    #[should_panic(expected = "span 0 (4 bytes at 0) is taken twice")]
    fn a_span_is_taken_once() {
        let arena = Arena::new(64).unwrap();
        let views = arena.views(&[(span(0, 4), Write)]).unwrap();
        views.take_f32(0);
        views.take_u32(0);
    }

    #[test]
    #[should_panic(expected = "span 0 (4 bytes at 0) is held for Read, not Write")]
    fn a_span_asked_for_reading_is_not_written() {
        let arena = Arena::new(64).unwrap();
        arena.views(&[(span(0, 4), Read)]).unwrap().take_f32(0);
    }

    #[test]
    #[should_panic(expected = "there is no span 1 among 1")]
    fn a_span_that_was_not_asked_for_is_refused() {
        let arena = Arena::new(64).unwrap();
        arena.views(&[(span(0, 4), Read)]).unwrap().f32(1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 256 }))]
        #[test]
        fn overlap_means_a_shared_byte(a in 0u64..12, n in 0u64..6, b in 0u64..12, m in 0u64..6) {
            let shared = (a..a + n).any(|byte| (b..b + m).contains(&byte));
            prop_assert_eq!(span(a, n).overlaps(&span(b, m)), shared);
        }
    }
}
