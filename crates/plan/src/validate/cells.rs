//! Memory cells: a role's arena, split at every start and end of a buffer, copy or view.
//!
//! Every op touches a *cell* completely or not at all. It is therefore enough to record, per cell,
//! its last writer, its content and the reads since. Buffers that share memory share cells, so a
//! write to one ends the content of the other. Views of one buffer that do not overlap share no
//! cell and never conflict.

use super::clocks::Epoch;
use super::effects::{Clobber, Effects};
use crate::ids::{BufferId, LaneId};
use crate::program::{Buffer, MemoryKind, Program, View};
use std::collections::BTreeSet;
use std::ops::Range;

/// Marks content or an access that belongs to no particular microbatch.
pub(super) const ANY: u32 = u32::MAX;

/// Owner of a cell without content.
const NOTHING: u32 = u32::MAX;

/// Content of one cell.
#[derive(Clone, Copy)]
struct Cell {
    /// The buffer that the content belongs to.
    owner: u32,
    /// The running microbatch that the content belongs to, or [`ANY`].
    microbatch: u32,
    /// The op that wrote or freed it.
    written: Epoch,
    /// True if it was freed.
    freed: bool,
}

const EMPTY: Cell = Cell {
    owner: NOTHING,
    microbatch: ANY,
    written: Epoch { lane: LaneId(0), position: 0 },
    freed: false,
};

/// Error of an access, at the first faulty cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The cell was never written.
    Undefined,
    /// The cell holds another buffer's content.
    Overwritten { other: BufferId, by: Epoch },
    /// The cell holds another microbatch's content.
    WrongMicrobatch { found: u32, by: Epoch },
    /// The content was freed.
    Freed { by: Epoch },
    /// A write that is not ordered with this access.
    RacesWrite { by: Epoch },
    /// A read that is not ordered with this write.
    RacesRead { by: Epoch },
    /// The freed copy was already free.
    FreedTwice,
}

/// The op of an access and its position in the happens-before order.
#[derive(Clone, Copy)]
pub(super) struct Visit<'c> {
    /// Epoch of the op.
    pub(super) epoch: Epoch,
    /// Vector clock of the op.
    pub(super) clock: &'c [u32],
    /// Running microbatch of the op, or [`ANY`].
    pub(super) microbatch: u32,
}

/// Cells of a view of one copy of a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct CellRange {
    slot: u32,
    first: u32,
    end: u32,
}

impl CellRange {
    fn cells(self) -> Range<usize> {
        self.first as usize..self.end as usize
    }
}

/// The cells of one role's arena.
#[derive(Default)]
pub(super) struct Cells {
    lanes: usize,
    /// First byte of each cell, ascending; a cell ends where the next starts.
    starts: Vec<u64>,
    cells: Vec<Cell>,
    /// Position of the last read since the last write, per cell and lane.
    reads: Vec<u32>,
    /// First slot of each buffer; a slot is one copy.
    slot_base: Vec<u32>,
    /// Range of cells of each slot.
    slots: Vec<(u32, u32)>,
    /// True for slots that were freed and not written since.
    freed: Vec<bool>,
    /// True for cells between the tensors of a bucket, which always hold zeros.
    padding: Vec<bool>,
}

impl Cells {
    /// Splits a program's arena into cells. `views` are all views that ops can touch; `padding` are
    /// those that may be read although nothing writes them. Clobbers of `effects` become ranges of
    /// cells, and operands whose location does not depend on the microbatch get their cells.
    pub(super) fn reset(
        &mut self,
        program: &Program,
        effects: &mut Effects,
        views: impl Iterator<Item = View>,
        padding: &[View],
    ) {
        self.lanes = program.lanes.len();
        self.slot_base.clear();
        let mut slots = 0u32;
        // A cut is a byte address and, at the start or end of a slot, twice the slot's number (plus
        // one at the end). Sorting by address then yields the cells of all slots in one sweep.
        let mut cuts: Vec<(u64, u32)> = Vec::new();
        for (buffer, private) in program.buffers.iter().zip(&effects.private) {
            self.slot_base.push(slots);
            for copy in (0..u64::from(buffer.copies)).filter(|_| !private) {
                let start = buffer.copy_offset(copy).0;
                cuts.push((start, slots * 2));
                cuts.push((start + buffer.bytes().0, slots * 2 + 1));
                slots += 1;
            }
        }
        let public = views.filter(|view| !effects.private[view.buffer.index()]);
        inner_cuts(program, public.chain(padding.iter().copied()), &mut cuts);
        for clobber in effects.clobbers() {
            cuts.extend([(clobber.range.start, INNER), (clobber.range.end, INNER)]);
        }
        cuts.sort();
        self.starts.clear();
        self.slots.clear();
        self.slots.resize(slots as usize, (0, 0));
        for (address, cut) in cuts {
            if self.starts.last() != Some(&address) {
                self.starts.push(address);
            }
            let cell = (self.starts.len() - 1) as u32;
            if cut != INNER {
                let slot = &mut self.slots[cut as usize / 2];
                *(if cut % 2 == 0 { &mut slot.0 } else { &mut slot.1 }) = cell;
            }
        }
        for clobber in effects.clobbers() {
            let cell = |byte| self.starts.partition_point(|&start| start < byte) as u64;
            clobber.range = cell(clobber.range.start)..cell(clobber.range.end);
        }
        for operand in effects.operands() {
            let buffer = program.buffer(operand.view.buffer);
            if buffer.copies == 1 {
                operand.place = Some(self.locate(buffer, operand.view, 0));
            }
        }
        self.empty(program, slots as usize, padding);
        let stored = program.buckets.iter().flat_map(|bucket| &bucket.offloaded);
        let state: BTreeSet<BufferId> = stored.map(|view| view.buffer).collect();
        for (id, buffer) in program.buffers.iter().enumerate() {
            let persistent = match buffer.kind {
                MemoryKind::Parameters | MemoryKind::Optimizer | MemoryKind::Shared => true,
                MemoryKind::Offloaded => state.contains(&BufferId::from(id)),
                MemoryKind::Gradients | MemoryKind::Activations | MemoryKind::Communication => {
                    false
                }
            };
            if persistent && !effects.private[id] {
                self.define(id as u32, buffer);
            }
        }
    }

    /// Clears the content of all cells.
    fn empty(&mut self, program: &Program, slots: usize, padding: &[View]) {
        self.freed.clear();
        self.freed.resize(slots, false);
        self.reads.clear();
        self.reads.resize(self.starts.len() * self.lanes, 0);
        self.cells.clear();
        self.cells.resize(self.starts.len(), EMPTY);
        self.padding.clear();
        self.padding.resize(self.starts.len(), false);
        for &view in padding {
            let place = self.locate(program.buffer(view.buffer), view, 0);
            self.padding[place.cells()].fill(true);
        }
    }

    /// Marks a buffer as holding content from before the first op.
    fn define(&mut self, id: u32, buffer: &Buffer) {
        let base = self.slot_base[id as usize];
        for &(first, end) in &self.slots[base as usize..][..buffer.copies as usize] {
            for cell in &mut self.cells[first as usize..end as usize] {
                *cell = Cell { owner: id, ..EMPTY };
            }
        }
    }

    /// Clears the content of buffers of this kind, which an iteration must write again.
    pub(super) fn forget(&mut self, program: &Program, kind: MemoryKind) {
        for cell in &mut self.cells {
            if cell.owner != NOTHING && program.buffers[cell.owner as usize].kind == kind {
                cell.owner = NOTHING;
            }
        }
    }

    /// Records a read of a view at `place`.
    pub(super) fn read(
        &mut self,
        buffer: &Buffer,
        view: View,
        place: CellRange,
        visit: Visit<'_>,
    ) -> Option<Fault> {
        let slot = place.slot as usize;
        let tagged = buffer.copies > 1 || buffer.kind == MemoryKind::Activations;
        let microbatch = if tagged { visit.microbatch } else { ANY };
        let (lanes, lane) = (self.lanes, visit.epoch.lane.index());
        let mut fault = None;
        for at in place.cells() {
            let cell = &mut self.cells[at];
            self.reads[at * lanes + lane] = visit.epoch.position;
            let alive = cell.owner == view.buffer.0 && !cell.freed;
            let right =
                cell.microbatch == microbatch || cell.microbatch == ANY || microbatch == ANY;
            if alive && right && cell.written.is_covered(visit.clock) {
                continue;
            }
            if cell.owner == NOTHING && self.padding[at] {
                continue;
            }
            let by = cell.written;
            let found = if cell.owner == NOTHING {
                Fault::Undefined
            } else if cell.owner != view.buffer.0 {
                Fault::Overwritten { other: BufferId(cell.owner), by }
            } else if cell.freed {
                Fault::Freed { by }
            } else if !by.is_covered(visit.clock) {
                Fault::RacesWrite { by }
            } else {
                Fault::WrongMicrobatch { found: cell.microbatch, by }
            };
            if matches!(found, Fault::Undefined | Fault::Freed { .. }) {
                // Reported once; later accesses would have the same cause.
                *cell = Cell { owner: view.buffer.0, ..EMPTY };
                self.freed[slot] = false;
            }
            fault = fault.or(Some(found));
        }
        fault
    }

    /// Records a write of a buffer at `place`.
    pub(super) fn write(
        &mut self,
        buffer: BufferId,
        place: CellRange,
        visit: Visit<'_>,
    ) -> Option<Fault> {
        self.freed[place.slot as usize] = false;
        self.overwrite(place.cells(), buffer, visit)
    }

    /// Records that an op destroys the content of some cells.
    pub(super) fn clobber(&mut self, clobber: &Clobber, visit: Visit<'_>) -> Option<Fault> {
        let range = clobber.range.start as usize..clobber.range.end as usize;
        self.overwrite(range, clobber.buffer, visit)
    }

    fn overwrite(
        &mut self,
        range: Range<usize>,
        buffer: BufferId,
        visit: Visit<'_>,
    ) -> Option<Fault> {
        let new = Cell {
            owner: buffer.0,
            microbatch: visit.microbatch,
            written: visit.epoch,
            freed: false,
        };
        let mut fault = None;
        for at in range {
            fault = fault.or(self.conflict(at, visit));
            self.reads[at * self.lanes..][..self.lanes].fill(0);
            self.cells[at] = new;
        }
        fault
    }

    /// Records that an op frees a whole copy.
    pub(super) fn free(
        &mut self,
        program: &Program,
        id: BufferId,
        running: u64,
        visit: Visit<'_>,
    ) -> Option<Fault> {
        let buffer = program.buffer(id);
        let whole = View { buffer: id, offset: 0, len: buffer.elements };
        let place = self.locate(buffer, whole, running);
        let twice = std::mem::replace(&mut self.freed[place.slot as usize], true);
        let mut fault = twice.then_some(Fault::FreedTwice);
        for at in place.cells() {
            // Content already overwritten by a buffer that shares the memory is dead.
            if self.cells[at].owner == id.0 && !self.cells[at].freed {
                fault = fault.or(self.conflict(at, visit));
                self.cells[at].freed = true;
                self.cells[at].written = visit.epoch;
            }
        }
        fault
    }

    /// Returns the race that changing a cell now would cause.
    fn conflict(&self, at: usize, visit: Visit<'_>) -> Option<Fault> {
        let by = self.cells[at].written;
        if !by.is_covered(visit.clock) {
            return Some(Fault::RacesWrite { by });
        }
        let reads = &self.reads[at * self.lanes..][..self.lanes];
        let lane = reads.iter().zip(visit.clock).position(|(read, done)| read > done)?;
        let by = Epoch { lane: LaneId(lane as u8), position: reads[lane] };
        Some(Fault::RacesRead { by })
    }

    /// Cells of a view in copy `running` mod copies of its buffer.
    pub(super) fn locate(&self, buffer: &Buffer, view: View, running: u64) -> CellRange {
        let copies = u64::from(buffer.copies);
        let copy = if copies == 1 { 0 } else { running % copies };
        let slot = self.slot_base[view.buffer.index()] + copy as u32;
        let (first, end) = self.slots[slot as usize];
        if view.offset == 0 && view.len == buffer.elements {
            return CellRange { slot, first, end };
        }
        let size = buffer.dtype.size();
        let start = buffer.copy_offset(copy).0 + view.offset * size;
        let starts = &self.starts[first as usize..end as usize];
        let cell = |address: u64| first + starts.partition_point(|&start| start < address) as u32;
        CellRange { slot, first: cell(start), end: cell(start + view.len * size) }
    }
}

/// Marks a cut that is not a slot's start or end.
const INNER: u32 = u32::MAX;

/// Adds the cuts of partial views, in every copy of their buffers.
fn inner_cuts(program: &Program, views: impl Iterator<Item = View>, cuts: &mut Vec<(u64, u32)>) {
    let mut inner: Vec<(BufferId, u64)> = views
        .flat_map(|view| [(view.buffer, view.offset), (view.buffer, view.offset + view.len)])
        .filter(|&(buffer, at)| at != 0 && at != program.buffer(buffer).elements)
        .collect();
    inner.sort_unstable();
    inner.dedup();
    for (id, at) in inner {
        let buffer = program.buffer(id);
        for copy in 0..u64::from(buffer.copies) {
            cuts.push((buffer.copy_offset(copy).0 + at * buffer.dtype.size(), INNER));
        }
    }
}
