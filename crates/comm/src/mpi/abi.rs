//! Functions and constants of an MPI library, by its binary interface.
//!
//! Three interfaces cover the implementations in use: that of Open MPI, whose handles are addresses
//! of its own variables; that of MPICH, shared by Intel MPI, whose handles are `int`; and the one
//! that MPI 5.0 standardises. A handle is passed as a word: an `int` occupies a word of its own in
//! registers and on the stack of the 64-bit systems this program runs on.
#![allow(unsafe_code)]

use crate::error::CommError;
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};

/// `MPI_Comm`, `MPI_Datatype`, `MPI_Op`, `MPI_Request` and `MPI_Message` of any interface.
pub(crate) type Handle = usize;

/// `MPI_Status`, opaque: the largest of the interfaces has 32 bytes.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Status([u64; 8]);

/// Binary interface of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    OpenMpi,
    Mpich,
    Standard,
}

type In = *const c_void;
type Out = *mut c_void;
type Integer = *mut c_int;
type Made = *mut Handle;
type Code = c_int;

/// Functions, with the types that `mpi.h` declares.
#[rustfmt::skip]
pub(crate) struct Functions {
    pub(crate) init: unsafe extern "C" fn(Integer, Out, c_int, Integer) -> Code,
    pub(crate) finalize: unsafe extern "C" fn() -> Code,
    pub(crate) version: unsafe extern "C" fn(*mut c_char, Integer) -> Code,
    pub(crate) error_text: unsafe extern "C" fn(c_int, *mut c_char, Integer) -> Code,
    pub(crate) rank: unsafe extern "C" fn(Handle, Integer) -> Code,
    pub(crate) size: unsafe extern "C" fn(Handle, Integer) -> Code,
    pub(crate) dup: unsafe extern "C" fn(Handle, Made) -> Code,
    pub(crate) split: unsafe extern "C" fn(Handle, c_int, c_int, Made) -> Code,
    pub(crate) free: unsafe extern "C" fn(Made) -> Code,
    pub(crate) set_handler: unsafe extern "C" fn(Handle, Handle) -> Code,
    pub(crate) send: unsafe extern "C" fn(In, c_int, Handle, c_int, c_int, Handle, Made) -> Code,
    pub(crate) recv: unsafe extern "C" fn(Out, c_int, Handle, c_int, c_int, Handle, Made) -> Code,
    pub(crate) probe: unsafe extern "C" fn(c_int, c_int, Handle, Integer, Made, *mut Status) -> Code,
    pub(crate) recv_probed: unsafe extern "C" fn(Out, c_int, Handle, Made, Made) -> Code,
    pub(crate) count: unsafe extern "C" fn(*const Status, Handle, Integer) -> Code,
    pub(crate) test: unsafe extern "C" fn(Made, Integer, *mut Status) -> Code,
    pub(crate) all_reduce: unsafe extern "C" fn(In, Out, c_int, Handle, Handle, Handle, Made) -> Code,
    pub(crate) reduce: unsafe extern "C" fn(In, Out, c_int, Handle, Handle, c_int, Handle, Made) -> Code,
    pub(crate) reduce_scatter: unsafe extern "C" fn(In, Out, c_int, Handle, Handle, Handle, Made) -> Code,
    pub(crate) broadcast: unsafe extern "C" fn(Out, c_int, Handle, c_int, Handle, Made) -> Code,
    pub(crate) all_gather: unsafe extern "C" fn(In, c_int, Handle, Out, c_int, Handle, Handle, Made) -> Code,
    pub(crate) gather: unsafe extern "C" fn(In, c_int, Handle, Out, c_int, Handle, c_int, Handle, Made) -> Code,
    pub(crate) scatter: unsafe extern "C" fn(In, c_int, Handle, Out, c_int, Handle, c_int, Handle, Made) -> Code,
    pub(crate) barrier: unsafe extern "C" fn(Handle, Made) -> Code,
    pub(crate) all_to_all: unsafe extern "C" fn(In, c_int, Handle, Out, c_int, Handle, Handle, Made) -> Code,
}

/// Constants that the functions take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Constants {
    pub(crate) world: Handle,
    pub(crate) no_group: Handle,
    pub(crate) byte: Handle,
    pub(crate) unsigned: Handle,
    pub(crate) float: Handle,
    pub(crate) sum: Handle,
    pub(crate) max: Handle,
    pub(crate) errors_return: Handle,
    pub(crate) in_place: usize,
    pub(crate) thread_serialized: c_int,
}

/// `MPI_UNDEFINED`, which all interfaces define alike.
pub(crate) const UNDEFINED: c_int = -32766;

/// Most bytes that an implementation writes as a version or an error.
const LONGEST_TEXT: usize = 1 << 14;

impl Functions {
    pub(crate) fn of(library: &Library) -> Result<Self, CommError> {
        Ok(Self {
            init: find(library, c"MPI_Init_thread")?,
            finalize: find(library, c"MPI_Finalize")?,
            version: find(library, c"MPI_Get_library_version")?,
            error_text: find(library, c"MPI_Error_string")?,
            rank: find(library, c"MPI_Comm_rank")?,
            size: find(library, c"MPI_Comm_size")?,
            dup: find(library, c"MPI_Comm_dup")?,
            split: find(library, c"MPI_Comm_split")?,
            free: find(library, c"MPI_Comm_free")?,
            set_handler: find(library, c"MPI_Comm_set_errhandler")?,
            send: find(library, c"MPI_Isend")?,
            recv: find(library, c"MPI_Irecv")?,
            probe: find(library, c"MPI_Improbe")?,
            recv_probed: find(library, c"MPI_Imrecv")?,
            count: find(library, c"MPI_Get_count")?,
            test: find(library, c"MPI_Test")?,
            all_reduce: find(library, c"MPI_Iallreduce")?,
            reduce: find(library, c"MPI_Ireduce")?,
            reduce_scatter: find(library, c"MPI_Ireduce_scatter_block")?,
            broadcast: find(library, c"MPI_Ibcast")?,
            all_gather: find(library, c"MPI_Iallgather")?,
            gather: find(library, c"MPI_Igather")?,
            scatter: find(library, c"MPI_Iscatter")?,
            barrier: find(library, c"MPI_Ibarrier")?,
            all_to_all: find(library, c"MPI_Ialltoall")?,
        })
    }

    /// Name and version, as the library writes them; may be asked before it is initialised.
    pub(crate) fn name(&self) -> String {
        let mut text = vec![0u8; LONGEST_TEXT];
        let mut length = 0;
        // SAFETY: the buffer is larger than any implementation's maximum, and lives during the call.
        let _ = unsafe { (self.version)(text.as_mut_ptr().cast(), &raw mut length) };
        // MPICH writes a page about its build; the first line names it.
        let text = first_text(&text);
        let line = text.lines().next().unwrap_or_default();
        let line = line.split(", package:").next().unwrap_or_default();
        line.split_whitespace().collect::<Vec<_>>().join(" ").replace("Version: ", "")
    }

    /// Fails with the library's text if a call did.
    pub(crate) fn check(&self, call: &str, code: Code) -> Result<(), CommError> {
        if code == 0 {
            return Ok(());
        }
        let mut text = vec![0u8; LONGEST_TEXT];
        let mut length = 0;
        // SAFETY: as in `name`.
        let _ = unsafe { (self.error_text)(code, text.as_mut_ptr().cast(), &raw mut length) };
        Err(problem(format!("{call}: {}", first_text(&text))))
    }
}

impl Constants {
    /// Constants of a library, by its interface.
    pub(crate) fn of(library: &Library, name: &str) -> Result<(Interface, Self), CommError> {
        // SAFETY: only the address is used.
        let open_mpi = unsafe { library.get::<Handle>(c"ompi_mpi_comm_world".to_bytes_with_nul()) };
        if open_mpi.is_ok() {
            return Ok((Interface::OpenMpi, Self::open_mpi(library)?));
        }
        if has_standard_interface(library) {
            return Ok((Interface::Standard, Self::STANDARD));
        }
        if name.contains("MPICH") || name.contains("Intel(R) MPI") || name.contains("MVAPICH") {
            return Ok((Interface::Mpich, Self::MPICH));
        }
        Err(problem(format!(
            "'{name}' has a binary interface that is not known: Open MPI, MPICH, Intel MPI and MPI 5's \
             standard interface (libmpi_abi.so.1) are"
        )))
    }

    /// Values of MPI 5.0, chapter "Application Binary Interface".
    const STANDARD: Self = Self {
        world: 0x101,
        no_group: 0x100,
        byte: 0x247,
        unsigned: 0x20d,
        float: 0x210,
        sum: 0x21,
        max: 0x23,
        errors_return: 0x143,
        in_place: 1,
        thread_serialized: 2048,
    };

    /// Values of MPICH's `mpi.h`, which its common interface keeps since version 3.1.
    const MPICH: Self = Self {
        world: 0x4400_0000,
        no_group: 0x0400_0000,
        byte: 0x4c00_010d,
        unsigned: 0x4c00_0406,
        float: 0x4c00_040a,
        sum: 0x5800_0003,
        max: 0x5800_0001,
        errors_return: 0x5400_0001,
        in_place: usize::MAX,
        thread_serialized: 2,
    };

    fn open_mpi(library: &Library) -> Result<Self, CommError> {
        let address = |name: &'static CStr| -> Result<Handle, CommError> {
            // SAFETY: only the address is used.
            let symbol = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) };
            symbol.map(|symbol| symbol.into_raw() as Handle).map_err(|error| missing(name, &error))
        };
        Ok(Self {
            world: address(c"ompi_mpi_comm_world")?,
            no_group: address(c"ompi_mpi_comm_null")?,
            byte: address(c"ompi_mpi_byte")?,
            unsigned: address(c"ompi_mpi_unsigned")?,
            float: address(c"ompi_mpi_float")?,
            sum: address(c"ompi_mpi_op_sum")?,
            max: address(c"ompi_mpi_op_max")?,
            errors_return: address(c"ompi_mpi_errors_return")?,
            in_place: 1,
            thread_serialized: 2,
        })
    }
}

/// Returns true if the library has the interface of MPI 5: one with another answers -1.
fn has_standard_interface(library: &Library) -> bool {
    type Ask = unsafe extern "C" fn(Integer, Integer) -> Code;
    let Ok(ask) = find::<Ask>(library, c"MPI_Abi_get_version") else { return false };
    let (mut major, mut minor) = (-1, -1);
    // SAFETY: two numbers that live during the call, which MPI 5 allows before initialisation.
    unsafe { ask(&raw mut major, &raw mut minor) == 0 && major >= 1 }
}

/// Address of a function of the library.
fn find<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, CommError> {
    // SAFETY: `F` is the type that mpi.h declares for the name.
    let found: Result<Symbol<F>, _> = unsafe { library.get(name.to_bytes_with_nul()) };
    found.map(|symbol| *symbol).map_err(|error| missing(name, &error))
}

fn missing(name: &CStr, error: &libloading::Error) -> CommError {
    problem(format!("this MPI has no {}: {error}; MPI 3 or later has", name.to_string_lossy()))
}

fn first_text(bytes: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(bytes).map(CStr::to_string_lossy);
    text.map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

pub(super) fn problem(problem: String) -> CommError {
    CommError::Job { problem }
}
