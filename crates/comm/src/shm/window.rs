//! Vectors in shared memory, and windows onto those of other ranks.
//!
//! A [`SharedBuffer`] is memory of one rank that the other ranks of its shm domain can read in
//! place. The owner sends its location in a [`Loan`], a message of a few dozen bytes; the peer maps
//! the buffer on first use and keeps it mapped. The collective ensures that no rank writes bytes
//! that another reads: lent bytes stay unchanged until the reader is done.

use super::{Address, Mapping, huge_pages};
use crate::error::CommError;
use crate::secret::{PROOF, nonce};
use crate::shared_memory::Pieces;
use paceline_kernels::arena::BackingMemory;
use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory that the ranks of this host can read in place: a collective on a vector stored in it
/// makes no unnecessary copies.
#[derive(Debug)]
pub struct SharedBuffer {
    site: Arc<Site>,
    bytes: usize,
}

/// Owner's record of a shared buffer.
#[derive(Debug)]
pub(crate) struct Site {
    map: Mapping,
    /// Kept open as long as peers may need to find the buffer.
    _file: OwnedFd,
    address: Address,
    mark: [u8; PROOF],
}

/// Offset of the buffer, after its mark.
const START: usize = 4096;

impl SharedBuffer {
    pub(crate) fn new(bytes: usize) -> Result<Self, CommError> {
        let total = bytes.checked_add(START).filter(|total| *total < isize::MAX as usize);
        let total = total.ok_or_else(|| super::problem(format!("{bytes} bytes are too many")))?;
        let (map, file, address) = Mapping::create(huge_pages::rounded(total))?;
        let mark = nonce()?;
        // SAFETY: no other thread or process knows of the segment yet.
        unsafe { map.write(0, &mark) };
        Ok(Self { site: Arc::new(Site { map, _file: file, address, mark }), bytes })
    }

    pub(crate) fn site(&self) -> Arc<Site> {
        Arc::clone(&self.site)
    }
}

impl SharedBuffer {
    /// Number of bytes.
    pub fn size(&self) -> usize {
        self.bytes
    }

    /// The bytes.
    ///
    /// # Safety
    ///
    /// While the result is used, no other rank may write them: every collective in which they were
    /// lent for writing must be done, or have no step left that writes them.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the range is within the mapping; the caller excludes writers.
        unsafe { self.site.map.slice(START, self.bytes) }
    }

    /// The bytes, for writing.
    ///
    /// # Safety
    ///
    /// While the result is used, no other rank may read or write a byte that is accessed through it:
    /// only the collective that the result is passed to may lend them.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is within the mapping; in this process the bytes are reached only
        // through this value, which is borrowed mutably, and the caller excludes other ranks.
        unsafe { self.site.map.slice_mut(START, self.bytes) }
    }
}

// SAFETY: the mapping stays until the value is dropped, and the arena owns the value. Other ranks
// write only bytes that a collective of this rank has lent them, and the collective's steps leave
// those alone until the writer says that it is done.
unsafe impl BackingMemory for SharedBuffer {
    fn memory(&self) -> NonNull<[u8]> {
        // SAFETY: the sum is within the mapping.
        let first = unsafe { self.site.map.base.add(START) };
        NonNull::slice_from_raw_parts(first, self.bytes)
    }
}

impl Site {
    /// Range of this process's `bytes` within the mapping, if they are stored in the buffer.
    fn locate(&self, bytes: &[u8]) -> Option<Range<u64>> {
        let base = self.map.base.as_ptr().addr();
        let start = bytes.as_ptr().addr().checked_sub(base)?;
        let end = start.checked_add(bytes.len())?;
        (start >= START && end <= self.map.bytes).then_some(start as u64..end as u64)
    }
}

/// Message that lends bytes: their location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Loan {
    address: Address,
    mark: [u8; PROOF],
    ranges: Pieces<Range<u64>>,
}

/// Bytes of a loan without ranges.
const LOAN: usize = 16 + PROOF;
/// Maximum number of ranges: more than any collective has chunks worth reading in place.
const MOST_RANGES: usize = 1 << 16;

impl Loan {
    /// Lends bytes, if all of them are stored in one of the buffers.
    pub(crate) fn of(sites: &[Arc<Site>], bytes: &[&[u8]]) -> Option<Self> {
        if bytes.len() > MOST_RANGES {
            return None;
        }
        sites.iter().find_map(|site| {
            let ranges = bytes.iter().map(|bytes| site.locate(bytes)).collect::<Option<_>>()?;
            Some(Self { address: site.address, mark: site.mark, ranges })
        })
    }

    pub(crate) fn encode(&self, into: &mut Vec<u8>) {
        into.extend(self.address.process.to_le_bytes());
        into.extend(self.address.descriptor.to_le_bytes());
        into.extend(self.address.bytes.to_le_bytes());
        into.extend(self.mark);
        for range in &self.ranges {
            into.extend(range.start.to_le_bytes());
            into.extend(range.end.to_le_bytes());
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, ranges) = bytes.split_at_checked(LOAN)?;
        let (process, head) = head.split_first_chunk::<4>()?;
        let (descriptor, head) = head.split_first_chunk::<4>()?;
        let (total, mark) = head.split_first_chunk::<8>()?;
        let total = u64::from_le_bytes(*total);
        let address = Address {
            process: u32::from_le_bytes(*process),
            descriptor: u32::from_le_bytes(*descriptor),
            bytes: total,
        };
        let (ranges, rest) = ranges.as_chunks::<16>();
        let range = |bytes: &[u8; 16]| {
            let (start, end) = bytes.split_first_chunk::<8>()?;
            let end = u64::from_le_bytes(*end.first_chunk::<8>()?);
            let range = u64::from_le_bytes(*start)..end;
            (range.start <= range.end && range.end <= total).then_some(range)
        };
        let ranges = ranges.iter().map(range).collect::<Option<_>>()?;
        rest.is_empty().then_some(Self { address, mark: *mark.first_chunk()?, ranges })
    }
}

/// Peers' buffers mapped by this rank, newest first.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    known: VecDeque<([u8; PROOF], Arc<Mapping>)>,
}

impl Windows {
    /// Maximum number of buffers that stay mapped.
    const MOST: usize = 256;

    /// Opens a peer's loan.
    pub(crate) fn open(&mut self, loan: &Loan) -> Result<Window, CommError> {
        let at = match self.known.iter().position(|(mark, _)| *mark == loan.mark) {
            Some(at) => at,
            None => {
                let map = Mapping::open(&loan.address)?;
                let mut mark = [0; PROOF];
                // SAFETY: the mark was written before the buffer was lent and does not change.
                unsafe { map.read(0, &mut mark) };
                if mark != loan.mark {
                    return Err(super::problem(
                        "the shared memory of a neighbour is not the one announced".to_owned(),
                    ));
                }
                self.known.push_front((mark, Arc::new(map)));
                self.known.truncate(Self::MOST);
                0
            }
        };
        let map = Arc::clone(&self.known[at].1);
        if loan.ranges.iter().any(|range| range.end > map.bytes as u64) {
            return Err(super::problem(
                "a peer lent bytes outside its shared-memory segment".to_owned(),
            ));
        }
        let range = |range: &Range<u64>| range.start as usize..range.end as usize;
        Ok(Window { map, ranges: loan.ranges.iter().map(range).collect() })
    }
}

/// Bytes in the memory of another rank.
#[derive(Debug)]
pub struct Window {
    map: Arc<Mapping>,
    ranges: Pieces<Range<usize>>,
}

impl Window {
    /// Number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.ranges.iter().map(ExactSizeIterator::len).sum()
    }

    /// The bytes, piece by piece.
    ///
    /// # Safety
    ///
    /// The lender must leave the bytes unchanged, and let no other rank change them, as long as the
    /// result is used: it must not have been told that this rank is done.
    pub(crate) unsafe fn pieces(&self) -> Pieces<&[u8]> {
        // SAFETY: the ranges were checked when the window was opened; the caller excludes writers.
        let piece = |range: &Range<usize>| unsafe { self.map.slice(range.start, range.len()) };
        self.ranges.iter().map(piece).collect()
    }

    /// Bytes of a window with one range, readable and writable.
    ///
    /// # Safety
    ///
    /// The owner must have left these bytes to this rank in a collective. As long as the result is
    /// used, neither the owner nor any other rank may access them: the owner must not have been told
    /// that this rank is done.
    pub(crate) unsafe fn part_mut(&mut self, part: Range<usize>) -> Option<&mut [u8]> {
        let [whole] = self.ranges.as_slice() else { return None };
        if part.start > part.end || part.end > whole.len() {
            return None;
        }
        // SAFETY: the range was checked, here and when the window was opened. The caller excludes
        // other ranks; within this process, the window is borrowed mutably.
        Some(unsafe { self.map.slice_mut(whole.start + part.start, part.len()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_shows_the_owners_bytes() {
        let mut buffer = SharedBuffer::new(10_000).unwrap();
        // SAFETY: here and below, no other process knows of the buffers.
        let bytes = unsafe { buffer.bytes_mut() };
        bytes[5000..5003].copy_from_slice(b"abc");
        // SAFETY: as above.
        let bytes = unsafe { buffer.bytes() };
        let sites = [SharedBuffer::new(8).unwrap().site(), buffer.site()];
        let loan = Loan::of(&sites, &[&bytes[5000..5002], &bytes[2..2], &bytes[5001..5003]]);
        let mut bytes = Vec::new();
        loan.as_ref().unwrap().encode(&mut bytes);
        assert_eq!(Loan::decode(&bytes), loan);
        assert_eq!(Loan::decode(&bytes[..bytes.len() - 1]), None);
        let mut windows = Windows::default();
        let window = windows.open(&loan.unwrap()).unwrap();
        // SAFETY: nothing writes the buffer any more.
        assert_eq!(unsafe { window.pieces() }.as_slice(), [b"ab".as_slice(), b"", b"bc"]);
        assert_eq!(window.bytes(), 4);
    }

    #[test]
    fn what_is_not_shared_or_not_there_is_not_lent() {
        let buffer = SharedBuffer::new(100).unwrap();
        // SAFETY: no other process knows of the buffer.
        let bytes = unsafe { buffer.bytes() };
        let sites = [buffer.site()];
        assert_eq!(Loan::of(&sites, &[&[1, 2, 3]]), None);
        let mut loan = Loan::of(&sites, &[bytes]).unwrap();
        loan.ranges[0].end += 1;
        assert!(Windows::default().open(&loan).is_err());
        let mut bytes = Vec::new();
        loan.encode(&mut bytes);
        assert_eq!(Loan::decode(&bytes), None);
        let mut forged = Loan::of(&sites, &[]).unwrap();
        forged.mark[0] ^= 1;
        assert!(Windows::default().open(&forged).is_err());
    }
}
