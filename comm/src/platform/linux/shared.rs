//! Shared memory as a file without a name (memfd): it is freed with the last process that holds it, however that process
//! ends.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::{Errno, Result};

/// Nobody can shrink the memory while others have mapped it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Creates memory of this size, all zeros.
pub(crate) fn create(size: usize) -> Result<OwnedFd> {
    let file = memfd_create("girandole", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, size as u64)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Fails if the file is not such memory, of this size.
pub(crate) fn check(file: &OwnedFd, size: usize) -> Result<()> {
    let sealed = fcntl_get_seals(file)?.contains(SEALS);
    let is_such = sealed && usize::try_from(fstat(file)?.st_size) == Ok(size);
    is_such.then_some(()).ok_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_can_make_it_smaller() {
        let file = create(8192).unwrap();
        assert!(ftruncate(&file, 4096).is_err() && check(&file, 8192).is_ok());
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 8192).unwrap();
        assert!(check(&unsealed, 8192).is_err());
    }
}
