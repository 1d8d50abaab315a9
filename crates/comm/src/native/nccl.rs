//! NCCL, loaded at run time: groups whose operations run on streams of a GPU.
//!
//! Only functions that every NCCL 2 has are used, so that one binary works with all of them. The
//! memory of operations is a device's arena, by addresses that [`DeviceBytes`] vouches for.
#![allow(unsafe_code)]

use super::{Communicator, NativeOp, NativeWorld};
use crate::error::CommError;
use crate::transport::{Header, Progress, Purpose, Tag, Transport, finish};
use libloading::{Library, Symbol};
use paceline_kernels::cuda::{Binding, DeviceBytes, StreamHandle};
use paceline_plan::collective::{CollectiveKind, Reduction};
use paceline_plan::dtype::DType;
use paceline_plan::ids::Rank;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Names under which distributions install the library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

type Comm = *mut c_void;
type Status = c_int;
type Stream = *mut c_void;

/// `ncclUniqueId`: the address at which a group meets.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// Functions of the library, with the types that `nccl.h` declares.
struct Functions {
    error_text: unsafe extern "C" fn(Status) -> *const c_char,
    version: unsafe extern "C" fn(*mut c_int) -> Status,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> Status,
    init: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> Status,
    destroy: unsafe extern "C" fn(Comm) -> Status,
    abort: unsafe extern "C" fn(Comm) -> Status,
    async_error: unsafe extern "C" fn(Comm, *mut Status) -> Status,
    group_start: unsafe extern "C" fn() -> Status,
    group_end: unsafe extern "C" fn() -> Status,
    all_reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Stream) -> Status,
    reduce: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, c_int, Comm, Stream) -> Status,
    broadcast: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Stream) -> Status,
    reduce_scatter: unsafe extern "C" fn(u64, u64, usize, c_int, c_int, Comm, Stream) -> Status,
    all_gather: unsafe extern "C" fn(u64, u64, usize, c_int, Comm, Stream) -> Status,
    send: unsafe extern "C" fn(u64, usize, c_int, c_int, Comm, Stream) -> Status,
    recv: unsafe extern "C" fn(u64, usize, c_int, c_int, Comm, Stream) -> Status,
}

/// The library.
#[derive(Clone)]
pub struct Nccl {
    functions: Arc<Functions>,
    version: (u32, u32, u32),
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Nccl {
    /// Loads the library, or says what is missing.
    pub fn load() -> Result<Self, CommError> {
        let mut problem = String::new();
        for name in NAMES {
            // SAFETY: the initialisers of NCCL have no preconditions.
            match unsafe { Library::new(name) } {
                Ok(library) => return Self::of(library),
                Err(error) => problem = error.to_string(),
            }
        }
        let names = NAMES.join(" or ");
        Err(failed(format!(
            "NCCL ({names}) cannot be loaded: {problem}; put its folder into LD_LIBRARY_PATH, or use \
             --library none"
        )))
    }

    fn of(library: Library) -> Result<Self, CommError> {
        /// Address of a function of the library.
        fn find<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, CommError> {
            // SAFETY: `F` is the type that nccl.h declares for the name.
            let found: Result<Symbol<'_, F>, _> = unsafe { library.get(name.to_bytes_with_nul()) };
            let missing = |error| failed(format!("this NCCL has no {name:?}: {error}"));
            found.map(|symbol| *symbol).map_err(missing)
        }
        let functions = Functions {
            error_text: find(&library, c"ncclGetErrorString")?,
            version: find(&library, c"ncclGetVersion")?,
            unique_id: find(&library, c"ncclGetUniqueId")?,
            init: find(&library, c"ncclCommInitRank")?,
            destroy: find(&library, c"ncclCommDestroy")?,
            abort: find(&library, c"ncclCommAbort")?,
            async_error: find(&library, c"ncclCommGetAsyncError")?,
            group_start: find(&library, c"ncclGroupStart")?,
            group_end: find(&library, c"ncclGroupEnd")?,
            all_reduce: find(&library, c"ncclAllReduce")?,
            reduce: find(&library, c"ncclReduce")?,
            broadcast: find(&library, c"ncclBroadcast")?,
            reduce_scatter: find(&library, c"ncclReduceScatter")?,
            all_gather: find(&library, c"ncclAllGather")?,
            send: find(&library, c"ncclSend")?,
            recv: find(&library, c"ncclRecv")?,
        };
        // Its threads may outlive the last communicator.
        std::mem::forget(library);
        let mut code = 0;
        // SAFETY: the address of a number that lives during the call.
        functions.check("ncclGetVersion", unsafe { (functions.version)(&raw mut code) })?;
        let code = u32::try_from(code).unwrap_or(0);
        let version = match code {
            10_000.. => (code / 10_000, code / 100 % 100, code % 100),
            _ => (code / 1_000, code / 100 % 10, code % 100),
        };
        if version < (2, 7, 0) {
            let (a, b, c) = version;
            return Err(failed(format!("NCCL {a}.{b}.{c} has no ncclSend; 2.7 or later has")));
        }
        Ok(Self { functions: Arc::new(functions), version })
    }

    /// Version of the library.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }
}

impl Functions {
    fn check(&self, call: &str, status: Status) -> Result<(), CommError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant text for every number.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        Err(failed(format!("{call}: {}", text.to_string_lossy())))
    }
}

fn failed(problem: String) -> CommError {
    CommError::Job { problem }
}

/// One rank's side of a world that has joined NCCL. Groups meet by messages of the transport.
pub struct NcclWorld<'t> {
    nccl: Nccl,
    transport: &'t mut dyn Transport,
    /// Makes the rank's GPU the current one of a thread.
    binding: Binding,
    timeout: Duration,
    groups: u32,
}

impl fmt::Debug for NcclWorld<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclWorld").field("groups", &self.groups).finish_non_exhaustive()
    }
}

/// Channel of the messages by which groups meet: a control channel that no plan uses.
const MEETING: u32 = 1 << 30 | 1 << 16;

impl<'t> NcclWorld<'t> {
    /// World of the ranks of a transport, each with a GPU.
    pub fn new(
        nccl: Nccl,
        transport: &'t mut dyn Transport,
        binding: Binding,
        timeout: Duration,
    ) -> Self {
        Self { nccl, transport, binding, timeout, groups: 0 }
    }

    /// Identity of a group, made by its first member and sent to the others.
    fn meet(&mut self, members: &[Rank]) -> Result<UniqueId, CommError> {
        let (me, first) = (self.transport.rank(), members[0]);
        let tag = Tag::new(MEETING, self.groups);
        let purpose = Purpose::PointToPoint { elements: 128, dtype: DType::U8 };
        let header = Header { tag, purpose, round: 0 };
        let mut id = UniqueId([0; 128]);
        if me == first {
            // SAFETY: the address of an identity that lives during the call.
            let status = unsafe { (self.nccl.functions.unique_id)(&raw mut id) };
            self.nccl.functions.check("ncclGetUniqueId", status)?;
            for &member in &members[1..] {
                self.transport.send(member, &header, &[&id.0])?;
            }
            return Ok(id);
        }
        finish(self.transport, self.timeout, |transport| {
            let mut result = Ok(());
            let there = transport.try_recv(first, tag, &mut |found, data| {
                let malformed =
                    || failed(format!("rank {first} sent a malformed identity of a group"));
                result = header.check(me, first, found).and_then(|()| {
                    id.0 = data.try_into().map_err(|_| malformed())?;
                    Ok(())
                });
            })?;
            if !there {
                return Ok(Progress::Pending { on: first, step: 0, moved: 0 });
            }
            result?;
            Ok(Progress::Done)
        })?;
        Ok(id)
    }

    /// Joins a group. Another thread waits for its members, while this one hears of failures.
    fn join(&mut self, id: UniqueId, size: usize, index: usize) -> Result<Comm, CommError> {
        /// Communicator on its way from the thread that made it.
        struct Made(Comm);
        // SAFETY: NCCL's communicators may be used by one thread at a time, whichever.
        unsafe impl Send for Made {}

        let (sender, receiver) = channel();
        let (functions, binding) = (Arc::clone(&self.nccl.functions), self.binding.clone());
        let start = move || {
            binding.bind();
            let mut comm = std::ptr::null_mut();
            // SAFETY: the address of a handle that lives during the call.
            let status =
                unsafe { (functions.init)(&raw mut comm, size as c_int, id, index as c_int) };
            let _ = sender.send((status, Made(comm)));
        };
        thread::Builder::new()
            .name("nccl".into())
            .spawn(start)
            .map_err(|error| failed(format!("a thread for NCCL cannot be started: {error}")))?;
        let began = Instant::now();
        loop {
            match receiver.recv_timeout(Duration::from_millis(1)) {
                Ok((status, Made(comm))) => {
                    self.nccl.functions.check("ncclCommInitRank", status)?;
                    return Ok(comm);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(failed("ncclCommInitRank ended without a result".into()));
                }
                Err(RecvTimeoutError::Timeout) if began.elapsed() > self.timeout => {
                    let seconds = self.timeout.as_secs();
                    return Err(failed(format!("NCCL has not joined a group in {seconds} s")));
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.transport.wait(crate::transport::Wait::Block, Duration::ZERO)?;
                }
            }
        }
    }
}

impl NativeWorld for NcclWorld<'_> {
    type Communicator = NcclCommunicator;

    fn group(&mut self, members: &[Rank]) -> Result<Option<NcclCommunicator>, CommError> {
        self.groups += 1;
        let me = self.transport.rank();
        let Some(index) = members.iter().position(|&member| member == me) else {
            return Ok(None);
        };
        let id = self.meet(members)?;
        let comm = self.join(id, members.len(), index)?;
        let functions = Arc::clone(&self.nccl.functions);
        let (size, index) = (members.len() as u64, index as u64);
        Ok(Some(NcclCommunicator { functions, comm, size, index, aborted: false }))
    }
}

impl NcclCommunicator {
    /// Queues sends of one byte between all members, so that later ones find their connections: NCCL
    /// makes them at the first use, and blocks the calling thread meanwhile. `bytes` has one byte for
    /// each member to send, and as many to receive.
    pub fn connect(&mut self, bytes: DeviceBytes, on: &StreamHandle) -> Result<(), CommError> {
        if bytes.len() < 2 * self.size {
            let (size, len) = (self.size, bytes.len());
            return Err(failed(format!("{len} bytes to connect {size} ranks")));
        }
        let all = |from: u64| (0..self.size).map(move |member| (member, from + member));
        let byte = data_type(DType::U8).unwrap_or(1);
        let (first, second) = (bytes.address(), bytes.address() + self.size);
        self.exchange(all(first), all(second), (1, byte, on.raw() as Stream))
    }
}

/// One rank's side of a group.
pub struct NcclCommunicator {
    functions: Arc<Functions>,
    comm: Comm,
    size: u64,
    index: u64,
    aborted: bool,
}

// SAFETY: NCCL's communicators may be used by one thread at a time, whichever.
unsafe impl Send for NcclCommunicator {}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclCommunicator").field("size", &self.size).finish_non_exhaustive()
    }
}

/// Number of `ncclDataType_t`; `None` for types that NCCL does not have in every version.
const fn data_type(dtype: DType) -> Option<c_int> {
    match dtype {
        DType::U8 => Some(1),
        DType::U32 => Some(3),
        DType::F16 => Some(6),
        DType::F32 => Some(7),
        DType::Bf16 => Some(9),
        DType::Fp8 | DType::Nvfp4 | DType::Mxfp4 => None,
    }
}

const fn reduction_number(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
    }
}

impl NcclCommunicator {
    /// Queues sends and receives between all members at once.
    fn exchange(
        &self,
        sends: impl Iterator<Item = (u64, u64)>,
        receives: impl Iterator<Item = (u64, u64)>,
        (count, dtype, stream): (usize, c_int, Stream),
    ) -> Result<(), CommError> {
        let Functions { group_start, group_end, send, recv, .. } = *self.functions;
        // SAFETY: no arguments; the group ends below.
        self.functions.check("ncclGroupStart", unsafe { group_start() })?;
        let mut all = Ok(());
        for (member, at) in sends {
            // SAFETY: the callers pass parts of vectors with `count` elements.
            let status = unsafe { send(at, count, dtype, member as c_int, self.comm, stream) };
            all = all.and(self.functions.check("ncclSend", status));
        }
        for (member, at) in receives {
            // SAFETY: as above.
            let status = unsafe { recv(at, count, dtype, member as c_int, self.comm, stream) };
            all = all.and(self.functions.check("ncclRecv", status));
        }
        // SAFETY: ends the group begun above.
        all.and(self.functions.check("ncclGroupEnd", unsafe { group_end() }))
    }

    fn collective(
        &self,
        (kind, reduction, root): (CollectiveKind, Reduction, u32),
        (at, output, count): (u64, Option<u64>, u64),
        (element, dtype, stream): (u64, c_int, Stream),
    ) -> Result<(), CommError> {
        let (comm, op) = (self.comm, reduction_number(reduction));
        let part = count / self.size;
        let mine = at + self.index * part * element;
        let (whole, parts, root) = (count as usize, part as usize, root as c_int);
        let check = |call, status| self.functions.check(call, status);
        let Functions { all_reduce, reduce, broadcast, reduce_scatter, all_gather, .. } =
            *self.functions;
        let others =
            |from: u64| (0..self.size).map(move |member| (member, from + member * part * element));
        // SAFETY: `at`, and `output` for an all_to_all, are vectors of `count` elements, of which
        // every member has an equal part; operations in place name that part.
        unsafe {
            match kind {
                CollectiveKind::AllReduce => {
                    check("ncclAllReduce", all_reduce(at, at, whole, dtype, op, comm, stream))
                }
                CollectiveKind::Reduce => {
                    check("ncclReduce", reduce(at, at, whole, dtype, op, root, comm, stream))
                }
                CollectiveKind::Broadcast => {
                    check("ncclBroadcast", broadcast(at, at, whole, dtype, root, comm, stream))
                }
                CollectiveKind::ReduceScatter => check(
                    "ncclReduceScatter",
                    reduce_scatter(at, mine, parts, dtype, op, comm, stream),
                ),
                CollectiveKind::AllGather => {
                    check("ncclAllGather", all_gather(mine, at, parts, dtype, comm, stream))
                }
                CollectiveKind::Gather if self.index == root as u64 => {
                    let from = others(at).filter(|(member, _)| *member != self.index);
                    self.exchange(std::iter::empty(), from, (parts, dtype, stream))
                }
                CollectiveKind::Gather => {
                    let to = std::iter::once((root as u64, mine));
                    self.exchange(to, std::iter::empty(), (parts, dtype, stream))
                }
                CollectiveKind::Scatter if self.index == root as u64 => {
                    let to = others(at).filter(|(member, _)| *member != self.index);
                    self.exchange(to, std::iter::empty(), (parts, dtype, stream))
                }
                CollectiveKind::Scatter => {
                    let from = std::iter::once((root as u64, mine));
                    self.exchange(std::iter::empty(), from, (parts, dtype, stream))
                }
                CollectiveKind::SendRecv => {
                    let none = || failed("a send_recv without an output buffer".into());
                    let output = output.ok_or_else(none)?;
                    let next = (self.index + 1) % self.size;
                    let previous = (self.index + self.size - 1) % self.size;
                    let (to, from) = ((next, at), (previous, output));
                    let (to, from) = (std::iter::once(to), std::iter::once(from));
                    self.exchange(to, from, (whole, dtype, stream))
                }
                CollectiveKind::Barrier => Err(failed(
                    "NCCL has no barrier: it is a collective of the plan's steps".into(),
                )),
                CollectiveKind::AllToAll => {
                    let none = || failed("an all_to_all without an output buffer".into());
                    let output = output.ok_or_else(none)?;
                    self.exchange(others(at), others(output), (parts, dtype, stream))
                }
            }
        }
    }
}

impl Communicator for NcclCommunicator {
    type Buffer = DeviceBytes;
    type Queue = StreamHandle;
    type Request = ();

    fn start(
        &mut self,
        op: &NativeOp,
        dtype: DType,
        data: DeviceBytes,
        output: Option<DeviceBytes>,
        on: &StreamHandle,
    ) -> Result<(), CommError> {
        if self.aborted {
            return Err(failed("the group of NCCL has been aborted".into()));
        }
        let unknown = || failed(format!("NCCL has no elements of type {dtype}"));
        let (number, element) = (data_type(dtype).ok_or_else(unknown)?, dtype.size());
        let (at, stream) = (data.address(), on.raw() as Stream);
        let count = data.len() / element.max(1);
        match *op {
            NativeOp::Collective { kind, reduction, root, forced: _ } => {
                if output.is_some_and(|output| output.len() != data.len()) {
                    return Err(failed("an output buffer of another length".into()));
                }
                let vectors = (at, output.map(DeviceBytes::address), count);
                self.collective((kind, reduction, root), vectors, (element, number, stream))
            }
            NativeOp::Send { to } => {
                let to = std::iter::once((u64::from(to), at));
                self.exchange(to, std::iter::empty(), (count as usize, number, stream))
            }
            NativeOp::Recv { from } => {
                let from = std::iter::once((u64::from(from), at));
                self.exchange(std::iter::empty(), from, (count as usize, number, stream))
            }
        }
    }

    /// The stream orders what comes behind an operation, so it is done once it is queued.
    fn test(&mut self, (): &mut ()) -> Result<bool, CommError> {
        if self.aborted {
            return Err(failed("the group of NCCL has been aborted".into()));
        }
        let mut status = 0;
        // SAFETY: the communicator lives, and so does the number during the call.
        let asked = unsafe { (self.functions.async_error)(self.comm, &raw mut status) };
        self.functions.check("ncclCommGetAsyncError", asked)?;
        self.functions.check("an operation of NCCL", status)?;
        Ok(true)
    }

    fn abort(&mut self, _: &str) {
        if !std::mem::replace(&mut self.aborted, true) {
            // SAFETY: aborted once, and not used afterwards.
            let _ = unsafe { (self.functions.abort)(self.comm) };
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        if !self.aborted {
            // SAFETY: destroyed once, and not used afterwards.
            let _ = unsafe { (self.functions.destroy)(self.comm) };
        }
    }
}
