//! MPI communicator.

#![allow(unsafe_code, reason = "MPI is a C library")]

use std::ffi::c_int;
use std::sync::mpsc::channel;
use std::time::Instant;

use mpi::ffi;

use crate::{Error, Result};

use super::library::{check, mark_given_up, may_clean_up};

/// A tag that no message uses.
const NO_TAG: c_int = 3;

/// A separate communicator: its messages cannot match those of other users of MPI.
#[derive(Debug)]
pub(super) struct MpiHandle(ffi::MPI_Comm);

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE, so any thread may use its handles.
unsafe impl Send for MpiHandle {}
// SAFETY: as above.
unsafe impl Sync for MpiHandle {}

impl MpiHandle {
    /// Duplicates the communicator of all processes. Every process must call it.
    pub(super) fn world(deadline: Instant) -> Result<Self> {
        // SAFETY: MPI was started, and what the call writes to stays valid until it is done: this function waits for it,
        // or gives MPI up for good and leaks that memory.
        unsafe {
            let made = Box::leak(Box::new(ffi::RSMPI_COMM_NULL));
            let mut request = ffi::RSMPI_REQUEST_NULL;
            check("MPI_Comm_idup", ffi::MPI_Comm_idup(ffi::RSMPI_COMM_WORLD, made, &mut request))?;
            wait(&mut request, "MPI_Comm_idup", deadline)?;
            let made = *Box::from_raw(made);
            Self::new(made)
        }
    }

    /// Creates a communicator of some processes, by their world ranks. Only they call it, all with the same list and tag.
    pub(super) fn of(world_ranks: &[usize], tag: c_int, deadline: Instant) -> Result<Self> {
        const CALL: &str = "MPI_Comm_create_group";
        let ranks: Vec<c_int> = world_ranks.iter().map(|rank| *rank as c_int).collect();
        // MPI has only a blocking form of this call, so it runs on a thread of its own, which is left behind after the
        // deadline.
        let (sender, made) = channel();
        let make = move || sender.send(Self::create(&ranks, tag));
        let thread = std::thread::Builder::new().name("mpi-group".into()).spawn(make);
        thread.map_err(|reason| Error::system(CALL, reason))?;
        made.recv_timeout(deadline.saturating_duration_since(Instant::now())).unwrap_or_else(|_| {
            mark_given_up();
            let what = format!("not all of ranks {world_ranks:?} took part within the time-out");
            Err(Error::system(CALL, what))
        })
    }

    fn create(ranks: &[c_int], tag: c_int) -> Result<Self> {
        // SAFETY: MPI was started; the groups are made and freed here, and the list lives throughout.
        unsafe {
            let (mut all, mut some) = (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL);
            let mut made = ffi::RSMPI_COMM_NULL;
            check("MPI_Comm_group", ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, &mut all))?;
            check(
                "MPI_Group_incl",
                ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut some),
            )?;
            check(
                "MPI_Comm_create_group",
                ffi::MPI_Comm_create_group(ffi::RSMPI_COMM_WORLD, some, tag, &mut made),
            )?;
            ffi::MPI_Group_free(&mut some);
            ffi::MPI_Group_free(&mut all);
            Self::new(made)
        }
    }

    /// # Safety
    /// The communicator is one that MPI has just made.
    unsafe fn new(made: ffi::MPI_Comm) -> Result<Self> {
        let handle = Self(made);
        // SAFETY: the communicator is valid.
        check("MPI_Comm_set_errhandler", unsafe {
            ffi::MPI_Comm_set_errhandler(handle.0, ffi::RSMPI_ERRORS_RETURN)
        })?;
        Ok(handle)
    }

    pub(super) fn raw(&self) -> ffi::MPI_Comm {
        self.0
    }

    /// Drives MPI's progress on messages of calls that are already done for this rank.
    pub(super) fn pump(&self) {
        let mut found = 0;
        // SAFETY: the communicator is valid; MPI allows a status to be ignored.
        unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, NO_TAG, self.0, &mut found, ffi::RSMPI_STATUS_IGNORE);
        }
    }

    /// Returns the bytes of all processes, by rank; all must have the same number.
    pub(super) fn all_gather(
        &self,
        own: &[u8],
        world_size: usize,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>> {
        let len = own.len();
        // Leaked if the call does not finish in time.
        let input: &mut [u8] = Box::leak(Box::from(own));
        let output: &mut [u8] = Box::leak(vec![0; len * world_size].into_boxed_slice());
        // SAFETY: the buffers are as large as said, and live until the call is done: see above.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (bytes, count) = (ffi::RSMPI_UINT8_T, len as c_int);
            let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
            check(
                "MPI_Iallgather",
                ffi::MPI_Iallgather(from, count, bytes, to, count, bytes, self.0, &mut request),
            )?;
            wait(&mut request, "MPI_Iallgather", deadline)?;
            let (_input, output) = (Box::from_raw(input), Box::from_raw(output));
            Ok(output.chunks(len.max(1)).map(<[u8]>::to_vec).collect())
        }
    }
}

impl Drop for MpiHandle {
    fn drop(&mut self) {
        if may_clean_up() {
            // SAFETY: MPI runs, and nobody else has the communicator.
            unsafe { ffi::MPI_Comm_free(&mut self.0) };
        }
    }
}

/// Waits for a request. After the deadline, MPI is given up for good.
///
/// # Safety
/// The request was started, or is the null request.
unsafe fn wait(request: &mut ffi::MPI_Request, call: &str, deadline: Instant) -> Result<()> {
    let mut nap = crate::transport::carrier::PollBackoff::default();
    loop {
        let mut done = 0;
        // SAFETY: the caller's obligation.
        check(call, unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) })?;
        if done != 0 {
            return Ok(());
        }
        if Instant::now() >= deadline {
            mark_given_up();
            return Err(Error::system(call, "not all ranks of the MPI job took part within the time-out"));
        }
        nap.wait();
    }
}
