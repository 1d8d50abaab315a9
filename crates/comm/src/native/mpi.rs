//! MPI's collectives on the memory of ranks: groups as communicators, operations as requests.
//!
//! MPI sums in an order of its own. It has no 16-bit floats, so that plans reduce those by their own
//! steps.
#![allow(unsafe_code)]

use super::{Communicator, NativeOp, NativeWorld};
use crate::error::CommError;
use crate::mpi::{Handle, Mpi, UNDEFINED, count};
use paceline_kernels::arena::HostBytes;
use paceline_plan::collective::{CollectiveKind, Reduction};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ffi::{c_int, c_void};

/// MPI's tag of messages between two members.
const MESSAGE: c_int = 1;

/// One rank's side of the world that MPI has joined.
#[derive(Debug)]
pub struct MpiWorld(&'static Mpi);

impl MpiWorld {
    /// World of the processes that have joined MPI.
    pub fn new(mpi: &'static Mpi) -> Self {
        Self(mpi)
    }
}

impl NativeWorld for MpiWorld {
    type Communicator = MpiCommunicator;

    fn group(&mut self, members: &[Rank]) -> Result<Option<MpiCommunicator>, CommError> {
        let Self(mpi) = *self;
        mpi.check()?;
        let me = members.iter().position(|member| member.0 == mpi.rank());
        // Groups of one call are disjoint, so that their first members tell them apart.
        let color = me.map_or(UNDEFINED, |_| members[0].0 as c_int);
        let (key, mut group) = (me.unwrap_or(0), 0);
        // SAFETY: a communicator of this library, and a place for the new one.
        let code =
            unsafe { (mpi.functions().split)(mpi.world(), color, key as c_int, &raw mut group) };
        mpi.call("MPI_Comm_split", code)?;
        Ok(me.map(|index| MpiCommunicator { mpi, group, size: members.len(), index }))
    }
}

/// One rank's side of a group.
#[derive(Debug)]
pub struct MpiCommunicator {
    mpi: &'static Mpi,
    group: Handle,
    size: usize,
    index: usize,
}

/// An operation in flight.
#[derive(Debug)]
pub struct MpiRequest {
    request: Handle,
    /// Second request of a send_recv: that of its send.
    sent: Option<Handle>,
    done: bool,
    /// Vector whose first part is this rank's result of a reduce_scatter, and has to move to its place.
    scattered: Option<HostBytes>,
}

// SAFETY: MPI joined with `MPI_THREAD_SERIALIZED`, so that any thread may use it, one at a time.
unsafe impl Send for MpiCommunicator {}

impl MpiCommunicator {
    /// Type of MPI and number of its elements in `bytes`.
    fn elements(
        &self,
        kind: Option<CollectiveKind>,
        dtype: DType,
        bytes: usize,
    ) -> Result<(Handle, c_int), CommError> {
        let constants = self.mpi.constants();
        let reduces = kind.is_some_and(CollectiveKind::reduces);
        match dtype {
            DType::F32 => Ok((constants.float, count(bytes / 4)?)),
            DType::U32 => Ok((constants.unsigned, count(bytes / 4)?)),
            DType::F16 | DType::Bf16 | DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 if reduces => {
                Err(CommError::Job {
                    problem: format!("MPI has no elements of type {dtype} to reduce"),
                })
            }
            // Moved bytes keep their values whatever they are called; words need fewer elements.
            _ if !reduces && bytes.is_multiple_of(4) => Ok((constants.unsigned, count(bytes / 4)?)),
            _ => Ok((constants.byte, count(bytes)?)),
        }
    }

    fn collective(
        &self,
        (kind, reduction, root): (CollectiveKind, Reduction, u32),
        dtype: DType,
        data: &HostBytes,
        output: Option<&HostBytes>,
    ) -> Result<Handle, CommError> {
        let (functions, constants) = (self.mpi.functions(), self.mpi.constants());
        let part = data.len() / self.size;
        let (whole_type, whole) = self.elements(Some(kind), dtype, data.len())?;
        let (part_type, parts) = self.elements(Some(kind), dtype, part)?;
        let op = match reduction {
            Reduction::Sum => constants.sum,
            Reduction::Max => constants.max,
        };
        let all: *mut c_void = data.pointer().cast();
        let in_place = std::ptr::without_provenance::<c_void>(constants.in_place);
        let (nothing, group, is_root) =
            (std::ptr::null_mut(), self.group, self.index == root as usize);
        let root = root as c_int;
        let mut request = 0;
        let to = &raw mut request;
        // SAFETY: `data`, and `output` of an all_to_all, are memory of an arena that stays until the
        // operation is done, or MPI is called no more; every member has an equal part of each.
        let code = unsafe {
            match kind {
                CollectiveKind::AllReduce => {
                    (functions.all_reduce)(in_place, all, whole, whole_type, op, group, to)
                }
                CollectiveKind::Reduce if is_root => {
                    (functions.reduce)(in_place, all, whole, whole_type, op, root, group, to)
                }
                CollectiveKind::Reduce => {
                    (functions.reduce)(all, nothing, whole, whole_type, op, root, group, to)
                }
                CollectiveKind::Broadcast => {
                    (functions.broadcast)(all, whole, whole_type, root, group, to)
                }
                CollectiveKind::ReduceScatter => {
                    (functions.reduce_scatter)(in_place, all, parts, part_type, op, group, to)
                }
                CollectiveKind::AllGather => {
                    (functions.all_gather)(in_place, 0, part_type, all, parts, part_type, group, to)
                }
                CollectiveKind::Gather => {
                    let own = all.byte_add(self.index * part).cast_const();
                    let (from, sent) = if is_root { (in_place, 0) } else { (own, parts) };
                    (functions.gather)(
                        from, sent, part_type, all, parts, part_type, root, group, to,
                    )
                }
                CollectiveKind::Scatter => {
                    let own: *mut c_void = all.byte_add(self.index * part);
                    let (into, got) = if is_root { (in_place.cast_mut(), 0) } else { (own, parts) };
                    let from = all.cast_const();
                    (functions.scatter)(
                        from, parts, part_type, into, got, part_type, root, group, to,
                    )
                }
                CollectiveKind::SendRecv => {
                    let before = (self.index + self.size - 1) % self.size;
                    let into = whole_output(data, output)?;
                    (functions.recv)(into, whole, whole_type, before as c_int, MESSAGE, group, to)
                }
                CollectiveKind::Barrier => (functions.barrier)(group, to),
                CollectiveKind::AllToAll => {
                    let into = whole_output(data, output)?;
                    let from = all.cast_const();
                    (functions.all_to_all)(
                        from, parts, part_type, into, parts, part_type, group, to,
                    )
                }
            }
        };
        self.mpi.call("a collective of MPI", code)?;
        Ok(request)
    }
}

impl MpiCommunicator {
    /// Starts to send a vector to a member.
    fn send(
        &self,
        dtype: DType,
        data: &HostBytes,
        to: u32,
        kind: Option<CollectiveKind>,
    ) -> Result<Handle, CommError> {
        let (of, elements) = self.elements(kind, dtype, data.len())?;
        let (at, send, mut request) = (data.pointer().cast(), self.mpi.functions().send, 0);
        // SAFETY: as for collectives.
        let code =
            unsafe { send(at, elements, of, to as c_int, MESSAGE, self.group, &raw mut request) };
        self.mpi.call("MPI_Isend", code)?;
        Ok(request)
    }
}

/// Address of an output buffer as large as the vector.
fn whole_output(data: &HostBytes, output: Option<&HostBytes>) -> Result<*mut c_void, CommError> {
    let output = output.filter(|output| output.len() == data.len());
    let none = || CommError::Job {
        problem: "the collective needs an output buffer as large as its vector".into(),
    };
    Ok(output.ok_or_else(none)?.pointer().cast())
}

impl Communicator for MpiCommunicator {
    type Buffer = HostBytes;
    type Queue = ();
    type Request = MpiRequest;

    fn start(
        &mut self,
        op: &NativeOp,
        dtype: DType,
        data: HostBytes,
        output: Option<HostBytes>,
        (): &(),
    ) -> Result<MpiRequest, CommError> {
        self.mpi.check()?;
        let mut request = MpiRequest { request: 0, sent: None, done: false, scattered: None };
        let message = || self.elements(None, dtype, data.len());
        let (functions, to) = (self.mpi.functions(), &raw mut request.request);
        match *op {
            NativeOp::Collective { kind, reduction, root, forced: _ } => {
                let how = (kind, reduction, root);
                request.request = self.collective(how, dtype, &data, output.as_ref())?;
                let moves = kind == CollectiveKind::ReduceScatter && self.index > 0;
                if kind == CollectiveKind::SendRecv {
                    // The next member receives it by the same call.
                    let next = ((self.index + 1) % self.size) as u32;
                    request.sent = Some(self.send(dtype, &data, next, Some(kind))?);
                }
                request.scattered = moves.then_some(data);
            }
            NativeOp::Send { to: member } => {
                request.request = self.send(dtype, &data, member, None)?;
            }
            NativeOp::Recv { from } => {
                let (of, elements) = message()?;
                let (at, from) = (data.pointer().cast(), from as c_int);
                // SAFETY: as for collectives.
                let code =
                    unsafe { (functions.recv)(at, elements, of, from, MESSAGE, self.group, to) };
                self.mpi.call("MPI_Irecv", code)?;
            }
        }
        Ok(request)
    }

    fn test(&mut self, request: &mut MpiRequest) -> Result<bool, CommError> {
        if request.done {
            return Ok(true);
        }
        if let Some(sent) = &mut request.sent {
            if !self.mpi.test(sent)? {
                return Ok(false);
            }
            request.sent = None;
        }
        if !self.mpi.test(&mut request.request)? {
            return Ok(false);
        }
        request.done = true;
        if let Some(data) = request.scattered.take() {
            let part = data.len() / self.size;
            // SAFETY: both parts lie in the vector, which the operation that has ended wrote last.
            unsafe {
                let at: *mut u8 = data.pointer();
                at.copy_to(at.add(self.index * part), part);
            }
        }
        Ok(true)
    }

    /// The other ranks learn of it from the transport; MPI is called no more.
    fn abort(&mut self, _: &str) {
        self.mpi.fail();
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        if self.mpi.check().is_ok() && self.group != self.mpi.constants().no_group {
            // SAFETY: freed once, and not used afterwards.
            let _ = unsafe { (self.mpi.functions().free)(&raw mut self.group) };
        }
    }
}
