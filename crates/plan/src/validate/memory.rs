//! Checks the declared sizes of arena and offload store, and the arena against the limit.

use super::{Report, ViolationKind};
use crate::ids::RoleId;
use crate::program::{ALIGNMENT, MemoryKind};
use crate::units::Bytes;

/// Checks that every buffer is inside the region of its kind and that the regions are exactly as
/// large as their buffers need. The arena must be within the limit.
pub(super) fn check(report: &mut Report<'_>, role: RoleId, limit: Option<Bytes>) {
    let program = report.program(role);
    let memory = program.memory;
    let mut start = 0u64;
    for kind in MemoryKind::ALL {
        let declared = memory.of(kind);
        let Some(region_end) = start.checked_add(declared.0) else {
            let used = Bytes::ZERO;
            return report.role(role, ViolationKind::KindBytes { kind, declared, used });
        };
        let mut used_end = start;
        for buffer in program.buffers.iter().filter(|buffer| buffer.kind == kind) {
            let end = (buffer.offset + buffer.extent()).0;
            if end > region_end || buffer.offset.0 < start {
                let (bytes, part) = (buffer.offset.0..end, start..region_end);
                let buffer = buffer.name.clone();
                report.role(role, ViolationKind::OutsideArena { buffer, bytes, part });
            }
            used_end = used_end.max(end.min(region_end));
        }
        if used_end.next_multiple_of(ALIGNMENT) < region_end {
            let used = Bytes(used_end - start);
            report.role(role, ViolationKind::KindBytes { kind, declared, used });
        }
        start = region_end;
    }
    if let Some(limit) = limit
        && memory.total() > limit
    {
        report.role(role, ViolationKind::OverLimit { limit, memory });
    }
}
