//! A role's arena, cut at every place where a buffer, a copy or a view starts or ends.
//!
//! Each resulting *cell* is touched as a whole or not at all by any op, so it is enough to remember
//! per cell who wrote it last, what it holds, and who has read it since. Buffers that share memory
//! share cells: a write to one is then seen as what it is, the end of the other. Views of one
//! buffer that do not overlap have no cell in common, and never conflict.

use super::clocks::Epoch;
use super::effects::{Clobber, Effects};
use crate::ids::{BufferId, LaneId};
use crate::program::{Buffer, MemoryKind, Program, View};
use std::collections::BTreeSet;
use std::ops::Range;

/// What no microbatch in particular wrote, or may read.
pub(super) const ANY: u32 = u32::MAX;

/// No buffer: a cell that holds nothing.
const NOTHING: u32 = u32::MAX;

/// What one cell holds.
#[derive(Clone, Copy)]
struct Cell {
    /// The buffer whose content it is.
    owner: u32,
    /// The running microbatch whose content it is, or [`ANY`].
    microbatch: u32,
    /// Who wrote it, or gave it up.
    written: Epoch,
    /// Whether it was given up.
    freed: bool,
}

const EMPTY: Cell = Cell {
    owner: NOTHING,
    microbatch: ANY,
    written: Epoch { lane: LaneId(0), position: 0 },
    freed: false,
};

/// What is wrong with an access, at the first cell where something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Nothing was ever written here.
    Undefined,
    /// Another buffer's content lies here.
    Overwritten { other: BufferId, by: Epoch },
    /// Another microbatch's content lies here.
    WrongMicrobatch { found: u32, by: Epoch },
    /// The content was given up.
    Freed { by: Epoch },
    /// A write that is not ordered with this access.
    RacesWrite { by: Epoch },
    /// A read that is not ordered with this write.
    RacesRead { by: Epoch },
    /// What is given up had been given up before.
    FreedTwice,
}

/// Who accesses, and when.
#[derive(Clone, Copy)]
pub(super) struct Visit<'c> {
    /// The op.
    pub(super) epoch: Epoch,
    /// Its clock.
    pub(super) clock: &'c [u32],
    /// Its running microbatch, or [`ANY`].
    pub(super) microbatch: u32,
}

/// Where a view of one copy of a buffer lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    slot: u32,
    first: u32,
    end: u32,
}

impl Place {
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
    /// Per cell and lane, the position of the last read since the last write.
    reads: Vec<u32>,
    /// First slot of each buffer; a slot is one copy.
    slot_base: Vec<u32>,
    /// The cells of each slot.
    slots: Vec<(u32, u32)>,
    /// Slots that were freed and not written since.
    freed: Vec<bool>,
    /// Cells that hold zeros for ever, between the tensors of a bucket.
    padding: Vec<bool>,
}

impl Cells {
    /// Cuts a program's arena. `views` are all views that ops can touch, `padding` those that may be
    /// read although nothing writes them; the effects' clobbers become ranges of cells, and their
    /// operands get the places that no microbatch changes.
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
        // A cut is a byte address and, where a slot starts or ends, twice the slot's number plus
        // one at the end; sorting by address then yields all slots' cells in one sweep.
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
        let stored = program.buckets.iter().flat_map(|bucket| &bucket.stored);
        let state: BTreeSet<BufferId> = stored.map(|view| view.buffer).collect();
        for (id, buffer) in program.buffers.iter().enumerate() {
            let lasting = match buffer.kind {
                MemoryKind::Parameters | MemoryKind::Optimizer | MemoryKind::Shared => true,
                MemoryKind::Stored => state.contains(&BufferId::from(id)),
                MemoryKind::Gradients | MemoryKind::Activations | MemoryKind::Communication => {
                    false
                }
            };
            if lasting && !effects.private[id] {
                self.define(id as u32, buffer);
            }
        }
    }

    /// Lets no cell hold anything.
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

    /// Lets a buffer hold something from before the first op.
    fn define(&mut self, id: u32, buffer: &Buffer) {
        let base = self.slot_base[id as usize];
        for &(first, end) in &self.slots[base as usize..][..buffer.copies as usize] {
            for cell in &mut self.cells[first as usize..end as usize] {
                *cell = Cell { owner: id, ..EMPTY };
            }
        }
    }

    /// Forgets the content of buffers that an iteration must define anew.
    pub(super) fn forget(&mut self, program: &Program, kind: MemoryKind) {
        for cell in &mut self.cells {
            if cell.owner != NOTHING && program.buffers[cell.owner as usize].kind == kind {
                cell.owner = NOTHING;
            }
        }
    }

    /// An op reads a view that lies at a place.
    pub(super) fn read(
        &mut self,
        buffer: &Buffer,
        view: View,
        place: Place,
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
                // Told once; whoever touches it next has the same cause.
                *cell = Cell { owner: view.buffer.0, ..EMPTY };
                self.freed[slot] = false;
            }
            fault = fault.or(Some(found));
        }
        fault
    }

    /// An op writes a view of a buffer that lies at a place.
    pub(super) fn write(
        &mut self,
        buffer: BufferId,
        place: Place,
        visit: Visit<'_>,
    ) -> Option<Fault> {
        self.freed[place.slot as usize] = false;
        self.overwrite(place.cells(), buffer, visit)
    }

    /// An op destroys what lies in some cells.
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

    /// An op gives a whole copy up.
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
            // What has been overwritten by a buffer that shares the memory is dead already.
            if self.cells[at].owner == id.0 && !self.cells[at].freed {
                fault = fault.or(self.conflict(at, visit));
                self.cells[at].freed = true;
                self.cells[at].written = visit.epoch;
            }
        }
        fault
    }

    /// What forbids changing a cell now.
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

    /// Where a view lies in copy `running` mod copies of its buffer.
    pub(super) fn locate(&self, buffer: &Buffer, view: View, running: u64) -> Place {
        let copies = u64::from(buffer.copies);
        let copy = if copies == 1 { 0 } else { running % copies };
        let slot = self.slot_base[view.buffer.index()] + copy as u32;
        let (first, end) = self.slots[slot as usize];
        if view.offset == 0 && view.len == buffer.elements {
            return Place { slot, first, end };
        }
        let size = buffer.dtype.size();
        let start = buffer.copy_offset(copy).0 + view.offset * size;
        let starts = &self.starts[first as usize..end as usize];
        let cell = |address: u64| first + starts.partition_point(|&start| start < address) as u32;
        Place { slot, first: cell(start), end: cell(start + view.len * size) }
    }
}

/// Marks a cut that is no slot's start or end.
const INNER: u32 = u32::MAX;

/// Adds the cuts that partial views make, in every copy of their buffers.
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
