//! MPI library of this process: started when first needed, finalized when the process exits.

#![allow(unsafe_code, reason = "MPI is a C library")]

use std::ffi::{CStr, c_char, c_int};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use mpi::ffi;

use crate::base::lock;
use crate::{Error, Result};

/// Set once this process has given up on something that MPI may still be doing: from then on it frees no communicators,
/// and does not finalize MPI when it exits.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// Environment variables by which MPI launchers mark a rank's process: those of Open MPI, PMIx (also Slurm's), MPICH.
const LAUNCHED: [&str; 4] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID"];
/// Variables with the number of ranks: those of Open MPI, MPICH and Slurm.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// This process's rank among all that MPI has started.
#[derive(Debug, Clone, Copy)]
pub(super) struct MpiWorld {
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

/// Starts MPI, unless it was started before. Returns the same result on every call.
pub(super) fn start() -> Result<MpiWorld> {
    static WORLD: Mutex<Option<Result<MpiWorld>>> = Mutex::new(None);
    lock(&WORLD).get_or_insert_with(begin).clone()
}

fn begin() -> Result<MpiWorld> {
    let (mut started, mut ended, mut level) = (0, 0, 0);
    // SAFETY: these may be called at any time.
    unsafe {
        check("MPI_Initialized", ffi::MPI_Initialized(&mut started))?;
        check("MPI_Finalized", ffi::MPI_Finalized(&mut ended))?;
    }
    if ended != 0 {
        return Err(Error::system("MPI", "it was ended before, and cannot be started twice in a process"));
    }
    // SAFETY: the levels are constants.
    let (multiple, serialized, funneled) =
        unsafe { (ffi::RSMPI_THREAD_MULTIPLE, ffi::RSMPI_THREAD_SERIALIZED, ffi::RSMPI_THREAD_FUNNELED) };
    if started == 0 {
        // SAFETY: nobody has started it, and it needs no arguments.
        check("MPI_Init_thread", unsafe {
            ffi::MPI_Init_thread(null_mut(), null_mut(), multiple, &mut level)
        })?;
        // SAFETY: the function may be called when the process exits and nothing else runs.
        unsafe { at_exit() };
    } else {
        // SAFETY: it was started.
        check("MPI_Query_thread", unsafe { ffi::MPI_Query_thread(&mut level) })?;
    }
    if level != multiple {
        let got = match level {
            level if level == serialized => "MPI_THREAD_SERIALIZED",
            level if level == funneled => "MPI_THREAD_FUNNELED",
            _ => "MPI_THREAD_SINGLE",
        };
        let help =
            "groups are used by threads of their own: use a library, or start it, with MPI_THREAD_MULTIPLE";
        return Err(Error::invalid("MPI's thread level", got, help));
    }
    let (mut rank, mut size) = (0, 0);
    // SAFETY: MPI was started; the handles are its own.
    unsafe {
        let world = ffi::RSMPI_COMM_WORLD;
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN))?;
        check("MPI_Comm_rank", ffi::MPI_Comm_rank(world, &mut rank))?;
        check("MPI_Comm_size", ffi::MPI_Comm_size(world, &mut size))?;
    }
    let world = MpiWorld { rank: rank.max(0) as usize, world_size: size.max(1) as usize };
    fits_the_launcher(world.world_size, &|name| std::env::var(name).ok())?;
    Ok(world)
}

/// Returns true where an MPI launcher has started this process.
pub(super) fn is_launched() -> bool {
    LAUNCHED.iter().any(|name| std::env::var_os(name).is_some())
}

/// Checks that the launcher belongs to this MPI library: with another library's launcher, each process finds itself
/// alone.
fn fits_the_launcher(world_size: usize, variable: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    let total = SIZES.iter().find_map(|name| Some((name, variable(name)?.parse::<usize>().ok()?)));
    match total {
        Some((name, total)) if world_size == 1 && total > 1 => {
            let help = format!(
                "but to {} this process is alone: start it with the mpirun of the library that it was built with",
                version()
            );
            Err(Error::invalid("MPI", format!("{name}={total}"), help))
        }
        _ => Ok(()),
    }
}

/// Returns the library's name and version.
pub(super) fn version() -> String {
    let mut text = vec![0 as c_char; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is as large as the standard demands, and this may be called at any time.
    let code = unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr(), &mut len) };
    if code != ffi::MPI_SUCCESS as c_int {
        return "MPI".into();
    }
    // SAFETY: the last byte stays zero, whatever was written.
    short_version(&unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy())
}

/// Shortens `Open MPI v4.1.4, package: ..` and `MPICH Version:      4.0.2\n..` to a name and a number.
fn short_version(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    let line = line.split(',').next().unwrap_or_default().replace("Version:", " ").replace(" v", " ");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns an error for a code that is not success.
pub(super) fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the buffer is as large as the standard demands.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) };
    let reason = match known == ffi::MPI_SUCCESS as c_int {
        // SAFETY: the last byte stays zero, whatever was written.
        true => unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().replace('\n', " "),
        false => String::from("unknown"),
    };
    Err(Error::system(call, format!("MPI says: {reason} (code {code})")))
}

/// Records that a call was given up that MPI may still be working on: see [`may_clean_up`].
pub(super) fn mark_given_up() {
    GIVEN_UP.store(true, Ordering::Release);
}

/// Returns whether communicators may be freed and MPI be finalized: no call was given up, and MPI is not finalized yet.
pub(super) fn may_clean_up() -> bool {
    let mut ended = 0;
    // SAFETY: this may be called at any time.
    let code = unsafe { ffi::MPI_Finalized(&mut ended) };
    !GIVEN_UP.load(Ordering::Acquire) && code == ffi::MPI_SUCCESS as c_int && ended == 0
}

/// Finalizes MPI when the process exits, as its launcher expects. Not with a failure exit code: finalizing waits for all
/// ranks, and the launcher is to see at once that this one is gone.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
unsafe fn at_exit() {
    use std::ffi::c_void;

    unsafe extern "C" {
        fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }
    extern "C" fn end(status: c_int, _: *mut c_void) {
        if status == 0 && may_clean_up() {
            // SAFETY: MPI was started and has not ended.
            unsafe { ffi::MPI_Finalize() };
        }
    }
    // SAFETY: `end` has the signature that the C library expects.
    unsafe { on_exit(end, null_mut()) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
unsafe fn at_exit() {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    extern "C" fn end() {
        if may_clean_up() {
            // SAFETY: MPI was started and has not ended.
            unsafe { ffi::MPI_Finalize() };
        }
    }
    // SAFETY: `end` has the signature that the C library expects.
    unsafe { atexit(end) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_a_name_and_a_number() {
        assert_eq!(short_version("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"), "Open MPI 4.1.4");
        assert_eq!(short_version("MPICH Version:      4.0.2\nMPICH Release date: x"), "MPICH 4.0.2");
        assert_eq!(short_version(""), "");
    }

    #[test]
    fn a_process_that_another_library_has_started_is_told_so() {
        let total = |text: &'static str| move |name: &str| (name == "PMI_SIZE").then(|| text.to_string());
        assert!(fits_the_launcher(2, &total("2")).is_ok() && fits_the_launcher(1, &total("1")).is_ok());
        let message = fits_the_launcher(1, &total("2")).unwrap_err().to_string();
        assert!(message.starts_with("MPI: got PMI_SIZE=2; but to "), "{message}");
    }
}
