//! Output files: atomic replacement, and pipes with a timeout.

use std::fs::{self, File, OpenOptions, Permissions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::draft::TempName;
use crate::platform::{link, nameless};

pub use draft::remove_drafts;

mod draft;

/// A file that appears under its name only once it is complete and synced to disk. Until then an older file of that
/// name is unchanged, whatever happens: a full disk, a signal, a power loss.
///
/// It keeps the permissions of the file that it replaces; if the path is a symbolic link, the link's target is
/// replaced. It needs a folder in which files can be created. Where supported (Linux, on most file systems), it has
/// no name before it is complete, so that a killed process leaves nothing behind. Elsewhere it is called
/// `.NAME.HEX.tmp` until then; the next write to the same path removes such files of processes that have ended, and
/// [`remove_drafts`] those of this process.
///
/// ```
/// use std::io::Write;
/// use training::internal::AtomicFile;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("w");
/// std::fs::write(&path, "old")?;
/// let mut file = AtomicFile::create(&path)?;
/// file.write_all(b"new")?;
/// assert_eq!(std::fs::read(&path)?, b"old");
/// file.commit()?;
/// assert_eq!(std::fs::read(&path)?, b"new");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct AtomicFile {
    place: Destination,
    file: File,
    /// Its temporary name, if it has one; dropping it removes the file.
    name: Option<TempName>,
}

/// Where the finished file goes.
#[derive(Debug)]
struct Destination {
    target: PathBuf,
    folder: PathBuf,
    /// Permissions of the file that is replaced.
    permissions: Option<Permissions>,
}

impl AtomicFile {
    /// Begins a file, and removes temporary files for this path left by processes that have ended.
    ///
    /// # Errors
    /// System errors; [`ErrorKind::InvalidInput`] if the path has no file name, or names a device, a pipe or a
    /// folder.
    pub fn create(path: &Path) -> io::Result<Self> {
        let place = Destination::find(path)?;
        place.remove_stale();
        Self::at(place)
    }

    /// Checks whether [`create`](Self::create) would succeed, without a change to existing files: several processes
    /// may call it at the same time.
    ///
    /// # Errors
    /// Errors of [`create`](Self::create).
    pub fn check(path: &Path) -> io::Result<()> {
        Self::at(Destination::find(path)?).map(drop)
    }

    fn at(place: Destination) -> io::Result<Self> {
        let (file, name) = match nameless(&place.folder) {
            Some(file) => (file, None),
            None => place.named().map(|(file, name)| (file, Some(name)))?,
        };
        // The lock shows other processes that the file is still being written. Not every file system has locks.
        let _ = locks::take(&file);
        Ok(Self { place, file, name })
    }

    /// Syncs the file to disk, and moves it to its path.
    ///
    /// # Errors
    /// System errors, such as a full disk; an older file is then unchanged.
    pub fn commit(mut self) -> io::Result<()> {
        if let Some(permissions) = self.place.permissions.take() {
            self.file.set_permissions(permissions)?;
        }
        self.file.sync_all()?;
        let name = match self.name.take() {
            Some(name) => name,
            None => self.place.link(&self.file)?,
        };
        name.rename(&self.place.target)?;
        // Syncs the folder too, or a crash may lose the new name. Not every system lets a folder be opened.
        File::open(&self.place.folder).map_or(Ok(()), |folder| folder.sync_all())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Seek for AtomicFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Destination {
    fn find(path: &Path) -> io::Result<Self> {
        let refuse = |problem: &str| Err(io::Error::new(ErrorKind::InvalidInput, problem));
        let is_file = match fs::metadata(path) {
            Ok(found) if !found.is_file() => return refuse("it is not a regular file"),
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(error),
        };
        let target = match (is_file, fs::read_link(path)) {
            (true, _) => path.canonicalize()?,
            // A link to a file that does not exist yet.
            (false, Ok(to)) => parent(path).join(to),
            (false, Err(_)) => path.to_path_buf(),
        };
        if target.file_name().is_none() || target.as_os_str().as_encoded_bytes().ends_with(b"/") {
            return refuse("the path names no file");
        }
        // Its temporary name is longer.
        if target.file_name().is_some_and(|name| name.len() + TEMPORARY > LONGEST_NAME) {
            return refuse("the file name is too long: give one of up to 233 bytes");
        }
        // A file without write permission may not be replaced either.
        let permissions = match is_file {
            true => Some(OpenOptions::new().write(true).open(&target)?.metadata()?.permissions()),
            false => None,
        };
        let folder = parent(&target).to_path_buf();
        fs::metadata(&folder)?;
        Ok(Self { target, folder, permissions })
    }

    /// Prefix of temporary names for this file; hexadecimal digits and [`SUFFIX`] follow.
    fn prefix(&self) -> String {
        format!(".{}.", self.target.file_name().unwrap_or_default().to_string_lossy())
    }

    /// Tries names until one is free. They are random, since several hosts may write to one folder.
    fn free_name<T>(&self, take: impl Fn(&Path) -> io::Result<T>) -> io::Result<(T, TempName)> {
        loop {
            let random = RandomState::new().hash_one(0u8);
            let name = self.folder.join(format!("{}{random:016x}{SUFFIX}", self.prefix()));
            match TempName::new(&name, &take) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                taken => return taken,
            }
        }
    }

    fn named(&self) -> io::Result<(File, TempName)> {
        self.free_name(|name| OpenOptions::new().read(true).write(true).create_new(true).open(name))
    }

    /// Links a file that has no name to a temporary one.
    fn link(&self, file: &File) -> io::Result<TempName> {
        self.free_name(|name| link(file, name)).map(|((), name)| name)
    }

    /// Removes temporary files for this path left by processes that have ended.
    fn remove_stale(&self) {
        let prefix = self.prefix();
        let is_ours = |name: &str| {
            let random = name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(SUFFIX));
            random.is_some_and(|random| !random.is_empty() && random.bytes().all(|b| b.is_ascii_hexdigit()))
        };
        // Best effort: files that cannot be listed or removed do no harm.
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let is_old = || OpenOptions::new().write(true).open(entry.path()).is_ok_and(|f| locks::take(&f));
            if entry.file_name().to_str().is_some_and(is_ours)
                && entry.file_type().is_ok_and(|found| found.is_file())
                && is_old()
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

const SUFFIX: &str = ".tmp";
/// Bytes that a temporary name has beyond the file's own: two dots, 16 digits and [`SUFFIX`].
const TEMPORARY: usize = 18 + SUFFIX.len();
/// The longest name that file systems take, in bytes.
const LONGEST_NAME: usize = 255;

#[cfg(unix)]
mod locks {
    use rustix::fs::{FlockOperation, flock};

    /// Tries to lock a file exclusively until it is closed; false if another process holds the lock.
    pub(super) fn take(file: &std::fs::File) -> bool {
        flock(file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }
}

#[cfg(not(unix))]
mod locks {
    pub(super) fn take(_: &std::fs::File) -> bool {
        false
    }
}

/// Writes a file as an [`AtomicFile`], or directly if the path is a device or pipe.
///
/// # Errors
/// System errors, such as a full disk; an older file is then unchanged.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("page.html");
/// training::internal::write_output(&path, b"<html></html>")?;
/// training::internal::write_output("/dev/null".as_ref(), b"<html></html>")?;
/// assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_output(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return open_output(path, OpenOptions::new().write(true))?.write_all(bytes);
    }
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// How long to wait for a pipe to have a reader.
const READER_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a file, a device or a pipe for writing. Waits up to ten seconds for a pipe to have a reader, where the
/// system would block indefinitely.
///
/// # Errors
/// System errors; [`ErrorKind::BrokenPipe`] for a pipe without a reader.
///
/// ```
/// use std::fs::File;
/// use std::io::Write;
///
/// let mut output = training::internal::open_output("/dev/null".as_ref(), File::options().write(true))?;
/// writeln!(output, "a line")?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn open_output(path: &Path, options: &OpenOptions) -> io::Result<File> {
    #[cfg(unix)]
    return pipes::open(path, options, READER_TIMEOUT);
    #[cfg(not(unix))]
    options.open(path)
}

#[cfg(unix)]
mod pipes {
    use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
    use std::time::Instant;

    use rustix::fs::{OFlags, fcntl_setfl};
    use rustix::io::Errno;

    use super::*;

    pub(super) fn open(path: &Path, options: &OpenOptions, timeout: Duration) -> io::Result<File> {
        if !fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
            return options.open(path);
        }
        let mut options = options.clone();
        options.custom_flags(OFlags::NONBLOCK.bits() as i32);
        let began = Instant::now();
        loop {
            match options.open(path) {
                Ok(file) => {
                    // Writes block again: a slow reader is waited for.
                    fcntl_setfl(&file, OFlags::empty())?;
                    return Ok(file);
                }
                Err(error) if error.raw_os_error() != Some(Errno::NXIO.raw_os_error()) => return Err(error),
                Err(_) if began.elapsed() >= timeout => {
                    let problem = "it is a pipe that nobody reads; start what reads it first";
                    return Err(io::Error::new(ErrorKind::BrokenPipe, problem));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10).min(timeout)),
            }
        }
    }
}

/// The folder that contains a file.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests;
