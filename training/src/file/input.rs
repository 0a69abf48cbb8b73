//! Input files: regular files only.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Opens a regular file for reading. A pipe, a device or a folder is refused without blocking: several processes read
/// the same file, some of them twice, and each must get all of its content.
///
/// # Errors
/// System errors; [`ErrorKind::InvalidInput`] if it is not a regular file, or a path such as `/dev/stdin`, which
/// refers to a different file in each process.
///
/// ```
/// use std::path::Path;
///
/// # let folder = tempfile::tempdir()?;
/// let error = training::internal::open_input(folder.path()).unwrap_err();
/// assert_eq!(error.to_string(), "it is a folder, and not a regular file");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn open_input(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    // Opening a pipe would block until it has a writer.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        (rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits() as i32,
    );
    let file = options.open(path)?;
    let problem = match describe_special_file(file.metadata()?.file_type()) {
        None if !is_process_local(path) => return Ok(file),
        None => "it is another file for each process; give the file's own name".into(),
        Some(kind) => format!("it is {kind}, and not a regular file"),
    };
    Err(io::Error::new(ErrorKind::InvalidInput, problem))
}

/// Whether a path refers to an open file of this process.
fn is_process_local(path: &Path) -> bool {
    ["/dev/stdin", "/dev/fd", "/proc/self"].iter().any(|own| path.starts_with(own))
}

/// Reads all of a regular file, opened with [`open_input`].
///
/// # Errors
/// Errors of [`open_input`] and of reading.
pub fn read_input(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_input(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Describes the type of a file that is not regular; `None` for a regular file.
fn describe_special_file(found: FileType) -> Option<&'static str> {
    #[cfg(unix)]
    use std::os::unix::fs::FileTypeExt;
    match found {
        _ if found.is_file() => None,
        _ if found.is_dir() => Some("a folder"),
        #[cfg(unix)]
        _ if found.is_fifo() => Some("a pipe"),
        #[cfg(unix)]
        _ if found.is_socket() => Some("a socket"),
        _ => Some("a device"),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        let devices = ["/dev/zero", "/dev/null"].map(Path::new);
        for (path, word) in [
            (&*pipe, "a pipe"),
            (folder.path(), "a folder"),
            (devices[0], "a device"),
            (devices[1], "a device"),
        ] {
            let error = read_input(path).unwrap_err();
            assert_eq!(error.to_string(), format!("it is {word}, and not a regular file"));
        }
        let link = folder.path().join("link");
        std::fs::write(folder.path().join("file"), "abc").unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        assert_eq!(read_input(&link).unwrap(), b"abc");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_another_file_for_each_process_is_refused() {
        use std::os::fd::AsRawFd;

        let file = tempfile::tempfile().unwrap();
        let error = read_input(format!("/dev/fd/{}", file.as_raw_fd()).as_ref()).unwrap_err();
        assert_eq!(error.to_string(), "it is another file for each process; give the file's own name");
    }
}
