//! A rank that connects to the members of a new group and then stops responding. This program defines its own
//! `MPI_Comm_create_group`, which intercepts the calls to the library, as MPI provides for it (MPI 4.1, 15.2,
//! "Profiling Interface").
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::time::Duration;

use mpi::ffi::{MPI_Comm, MPI_Group};

/// The role of the ranks in this test; rank 1 stops responding.
pub(crate) const ROLE: &str = "standing still in a new group";

unsafe extern "C" {
    fn PMPI_Comm_create_group(from: MPI_Comm, of: MPI_Group, tag: c_int, made: *mut MPI_Comm) -> c_int;
}

/// # Safety
/// The same as for the library's function.
#[unsafe(no_mangle)]
unsafe extern "C" fn MPI_Comm_create_group(
    from: MPI_Comm,
    of: MPI_Group,
    tag: c_int,
    made: *mut MPI_Comm,
) -> c_int {
    if crate::job::is_odd_in(ROLE) {
        std::thread::sleep(Duration::from_secs(6));
    }
    // SAFETY: the caller guarantees it.
    unsafe { PMPI_Comm_create_group(from, of, tag, made) }
}
