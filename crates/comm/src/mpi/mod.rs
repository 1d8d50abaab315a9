//! MPI, loaded at run time: one binary works with every implementation, and without any.
//!
//! A process joins MPI at most once, with [`Mpi::join`], and leaves it with [`leave`]. Calls are made
//! by one thread at a time. After a failure nothing calls MPI any more: a library that waits for a
//! dead process would never return, and the launcher ends what is left.
#![allow(unsafe_code)]

mod abi;
mod find;

pub(crate) use abi::{Handle, Status, UNDEFINED};

use crate::error::CommError;
use crate::launch::RankEnv;
use abi::{Constants, Functions, Interface, problem};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

/// Environment variable with the path of the library to load.
pub const LIBRARY: &str = "PACELINE_MPI";

/// Setting of Open MPI: the algorithm of `MPI_Iallreduce`. Its own choice is a tree of whole vectors
/// below four ranks, which takes up to twice as long as `MPI_Allreduce`; Rabenseifner's takes as long.
const ALL_REDUCE: &str = "OMPI_MCA_coll_libnbc_iallreduce_algorithm";
const RABENSEIFNER: &str = "3";

/// The library, joined by this process.
pub struct Mpi {
    functions: Functions,
    constants: Constants,
    interface: Interface,
    name: String,
    path: PathBuf,
    rank: u32,
    size: u32,
    /// Duplicate of `MPI_COMM_WORLD`, for messages that no other part of the process sees.
    world: Handle,
    state: AtomicU8,
}

const JOINED: u8 = 0;
const LEFT: u8 = 1;
const FAILED: u8 = 2;

static MPI: OnceLock<Result<Mpi, CommError>> = OnceLock::new();

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, interface, rank, size, .. } = self;
        write!(f, "Mpi({name}, {interface:?}, rank {rank} of {size})")
    }
}

impl Mpi {
    /// Loads the library that belongs to the launcher of this process and initialises it; later calls
    /// return the same. Fails if the library does not know the launcher's other processes.
    pub fn join(env: &RankEnv) -> Result<&'static Self, CommError> {
        let joined = MPI.get_or_init(|| Self::start(env)).as_ref().map_err(Clone::clone)?;
        joined.check()?;
        Ok(joined)
    }

    fn start(env: &RankEnv) -> Result<Self, CommError> {
        let (library, path) = find::load(env.launcher)?;
        let functions = Functions::of(&library)?;
        let name = functions.name();
        let (interface, constants) = Constants::of(&library, &name)?;
        // Its threads and exit handlers outlive everything here.
        std::mem::forget(library);
        if interface == Interface::OpenMpi && std::env::var_os(ALL_REDUCE).is_none() {
            // SAFETY: a process joins MPI before it starts threads that read its environment.
            unsafe { std::env::set_var(ALL_REDUCE, RABENSEIFNER) };
        }
        let mut provided = 0;
        let wanted = constants.thread_serialized;
        // SAFETY: no arguments but the addresses of numbers that live during the call.
        let code = unsafe {
            let none = std::ptr::null_mut();
            (functions.init)(std::ptr::null_mut(), none, wanted, &raw mut provided)
        };
        functions.check("MPI_Init_thread", code)?;
        let state = AtomicU8::new(JOINED);
        let world = constants.world;
        let (rank, size) = (0, 0);
        let mut mpi =
            Self { functions, constants, interface, name, path, rank, size, world, state };
        if provided < wanted {
            let (name, path) = (&mpi.name, mpi.path.display());
            return Err(problem(format!(
                "{name} ({path}) cannot be called by more than one thread in turn (MPI_THREAD_SERIALIZED)"
            )));
        }
        // SAFETY: handles of this library, and addresses of numbers that live during the calls.
        unsafe {
            let Functions { set_handler, dup, .. } = mpi.functions;
            let handler = mpi.constants.errors_return;
            mpi.call("MPI_Comm_set_errhandler", set_handler(world, handler))?;
            let mut own = 0;
            mpi.call("MPI_Comm_dup", dup(world, &raw mut own))?;
            mpi.world = own;
            mpi.call("MPI_Comm_set_errhandler", set_handler(mpi.world, handler))?;
        }
        (mpi.rank, mpi.size) = mpi.place(mpi.world)?;
        tracing::debug!(target: "comm", ?mpi, path = %mpi.path.display(), "joined MPI");
        mpi.agree(env)?;
        Ok(mpi)
    }

    /// Fails if the library counts other processes than the launcher.
    fn agree(&self, env: &RankEnv) -> Result<(), CommError> {
        let Self { name, rank, size, .. } = self;
        let world = env.world.unwrap_or(*size);
        if (*rank, *size) == (env.rank, world) {
            return Ok(());
        }
        let (path, launcher, own) = (self.path.display(), env.launcher, env.rank);
        let found = match size {
            1 => "finds no other process".to_owned(),
            _ => format!("calls it rank {rank} of {size}"),
        };
        Err(problem(format!(
            "{launcher} started rank {own} of {world}, but {name} ({path}) {found}: the library belongs \
             to another launcher; start with its own mpirun, or set {LIBRARY} to the launcher's libmpi"
        )))
    }

    /// Name and version of the library.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path or name by which the library was found.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Rank of this process in MPI's world.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of processes in MPI's world.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Sends rank 0's text to all ranks, which all call this at once.
    pub fn share(&self, text: &str) -> Result<String, CommError> {
        const LONGEST: usize = 4096;
        let mut bytes = [0u8; LONGEST];
        if self.rank == 0 {
            if text.len() >= LONGEST {
                return Err(problem(format!("a text of {} bytes cannot be shared", text.len())));
            }
            bytes[..text.len()].copy_from_slice(text.as_bytes());
        }
        let mut request = 0;
        let (data, count) = (bytes.as_mut_ptr().cast(), LONGEST as c_int);
        let broadcast = self.functions.broadcast;
        // SAFETY: the buffer lives until the request is done, which is waited for below.
        let code =
            unsafe { broadcast(data, count, self.constants.byte, 0, self.world, &raw mut request) };
        self.call("MPI_Ibcast", code)?;
        while !self.test(&mut request)? {
            std::thread::yield_now();
        }
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(LONGEST);
        Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    /// Marks MPI as unusable: a rank has failed.
    pub(crate) fn fail(&self) {
        let _ = self.state.compare_exchange(JOINED, FAILED, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Fails if MPI must not be called any more.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        match self.state.load(Ordering::Acquire) {
            JOINED => Ok(()),
            LEFT => Err(problem("this process has left MPI".to_owned())),
            _ => Err(problem("MPI is not called any more: a rank has failed".to_owned())),
        }
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(crate) fn constants(&self) -> &Constants {
        &self.constants
    }

    pub(crate) fn world(&self) -> Handle {
        self.world
    }

    pub(crate) fn call(&self, name: &str, code: c_int) -> Result<(), CommError> {
        self.functions.check(name, code)
    }

    /// Rank and size of a communicator.
    fn place(&self, of: Handle) -> Result<(u32, u32), CommError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a communicator of this library, and numbers that live during the calls.
        unsafe {
            self.call("MPI_Comm_rank", (self.functions.rank)(of, &raw mut rank))?;
            self.call("MPI_Comm_size", (self.functions.size)(of, &raw mut size))?;
        }
        Ok((rank as u32, size as u32))
    }

    /// Returns true if a request is done.
    pub(crate) fn test(&self, request: &mut Handle) -> Result<bool, CommError> {
        self.check()?;
        let (mut done, mut status) = (0, Status::default());
        // SAFETY: a request of this library, and places for the results.
        let code = unsafe { (self.functions.test)(request, &raw mut done, &raw mut status) };
        self.call("MPI_Test", code)?;
        Ok(done != 0)
    }

    /// Starts to send bytes. They must stay valid and unchanged until the request is done.
    pub(crate) fn send(&self, data: &[u8], to: u32, tag: c_int) -> Result<Handle, CommError> {
        self.check()?;
        let (at, count) = (data.as_ptr().cast::<c_void>(), count(data.len())?);
        let mut request = 0;
        // SAFETY: the slice is valid now; the callers keep it until the request is done, or, after a
        // failure, see to it that nothing calls MPI any more.
        let code = unsafe {
            let send = self.functions.send;
            send(at, count, self.constants.byte, to as c_int, tag, self.world, &raw mut request)
        };
        self.call("MPI_Isend", code)?;
        Ok(request)
    }

    /// Takes the next message from a rank with a tag, if one has arrived: its handle and its length.
    pub(crate) fn probe(
        &self,
        from: u32,
        tag: c_int,
    ) -> Result<Option<(Handle, usize)>, CommError> {
        self.check()?;
        let (mut found, mut message, mut status) = (0, 0, Status::default());
        let mut bytes = 0;
        // SAFETY: handles of this library, and places for the results.
        unsafe {
            let Functions { probe, count, .. } = self.functions;
            let result = (&raw mut found, &raw mut message, &raw mut status);
            let code = probe(from as c_int, tag, self.world, result.0, result.1, result.2);
            self.call("MPI_Improbe", code)?;
            if found == 0 {
                return Ok(None);
            }
            let code = count(&raw const status, self.constants.byte, &raw mut bytes);
            self.call("MPI_Get_count", code)?;
        }
        Ok(Some((message, bytes.max(0) as usize)))
    }

    /// Starts to receive a probed message. The memory must stay valid, and untouched by others, until
    /// the request is done.
    pub(crate) fn receive(
        &self,
        mut message: Handle,
        into: &mut [u8],
    ) -> Result<Handle, CommError> {
        self.check()?;
        let (at, count) = (into.as_mut_ptr().cast::<c_void>(), count(into.len())?);
        let mut request = 0;
        // SAFETY: as for `send`.
        let code = unsafe {
            let receive = self.functions.recv_probed;
            receive(at, count, self.constants.byte, &raw mut message, &raw mut request)
        };
        self.call("MPI_Imrecv", code)?;
        Ok(request)
    }
}

/// A receive into memory of another owner, which outlasts the call that began it.
///
/// The owner is a [`MessageSink`](crate::transport::MessageSink), whose destination stays in place until
/// the message is complete or the world has failed; after a failure nothing calls MPI, which alone
/// writes there.
pub(crate) struct Landing {
    request: Handle,
    at: *mut u8,
    length: usize,
    done: bool,
}

// SAFETY: the memory is that of a message that one thread at a time receives, whichever.
unsafe impl Send for Landing {}

impl Landing {
    /// Begins to receive a probed message.
    pub(crate) fn begin(mpi: &Mpi, message: Handle, into: &mut [u8]) -> Result<Self, CommError> {
        let request = mpi.receive(message, into)?;
        Ok(Self { request, at: into.as_mut_ptr(), length: into.len(), done: false })
    }

    /// Returns true if the memory begins where the receive writes.
    pub(crate) fn is_at(&self, into: &[u8]) -> bool {
        std::ptr::eq(self.at, into.as_ptr()) && self.length <= into.len()
    }

    /// Returns the bytes once they are there.
    pub(crate) fn finish(&mut self, mpi: &Mpi) -> Result<Option<&[u8]>, CommError> {
        self.done = self.done || mpi.test(&mut self.request)?;
        // SAFETY: the memory stays in place until the message is complete, and is written no more.
        Ok(self.done.then(|| unsafe { std::slice::from_raw_parts(self.at, self.length) }))
    }
}

/// Number of elements as MPI counts them.
pub(crate) fn count(elements: usize) -> Result<c_int, CommError> {
    let text = || format!("{elements} elements are more than a call of MPI takes");
    c_int::try_from(elements).map_err(|_| problem(text()))
}

/// The library, if this process has joined it.
pub fn joined() -> Option<&'static Mpi> {
    MPI.get()?.as_ref().ok().filter(|mpi| mpi.check().is_ok())
}

/// Leaves MPI, if this process has joined it and no rank has failed. Every process calls this before
/// it ends: launchers take an end without it for a failure.
pub fn leave() {
    let Some(Ok(mpi)) = MPI.get() else { return };
    if mpi.state.compare_exchange(JOINED, LEFT, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        // SAFETY: called once, and nothing calls the library afterwards.
        let _ = unsafe { (mpi.functions.finalize)() };
    }
}
