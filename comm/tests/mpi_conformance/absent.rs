//! A rank that meets the members of a new group and then stands still: this program's own `MPI_Comm_create_group`, between the
//! library's callers and the library, as MPI provides for it (MPI 4.1, 15.2, "Profiling Interface").
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::time::Duration;

use mpi::ffi::{MPI_Comm, MPI_Group};

/// Of the ranks that this happens to, of which number 1 is the odd one.
pub(crate) const ROLE: &str = "standing still in a new group";

unsafe extern "C" {
    fn PMPI_Comm_create_group(from: MPI_Comm, of: MPI_Group, tag: c_int, made: *mut MPI_Comm) -> c_int;
}

/// # Safety
/// As the library's own demands.
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
    // SAFETY: as this function demands.
    unsafe { PMPI_Comm_create_group(from, of, tag, made) }
}
