//! Bytes of a text file, which may be compressed, or of standard input.

use std::fmt;
use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use flate2::read::MultiGzDecoder;

use crate::{Error, Result};
use training::internal::lock;

/// Name of standard input in place of a file.
const STANDARD_INPUT: &str = "-";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    Zstd,
    Gzip,
}

impl Compression {
    /// Returns that of a file whose name has such an ending.
    fn by_name(path: &Path) -> Option<Self> {
        let ending = path.extension()?.to_str()?.to_ascii_lowercase();
        match &*ending {
            "zst" | "zstd" => Some(Self::Zstd),
            "gz" | "gzip" => Some(Self::Gzip),
            _ => None,
        }
    }

    /// Returns that of a file which begins so.
    fn by_begin(begin: &[u8]) -> Option<Self> {
        match begin {
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Self::Zstd),
            // A frame to skip, which programs that compress in parallel write.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            [0x1f, 0x8b, ..] => Some(Self::Gzip),
            _ => None,
        }
    }
}

/// Whether a path stands for standard input.
pub(super) fn is_standard(path: &Path) -> bool {
    path == Path::new(STANDARD_INPUT)
}

/// Returns the path by whose ending a file is read: without that of a compression.
pub(super) fn uncompressed(path: &Path) -> PathBuf {
    match Compression::by_name(path) {
        Some(_) => path.with_extension(""),
        None => path.into(),
    }
}

/// Bytes of a file.
pub(super) struct Input {
    pub(super) bytes: BufReader<Box<dyn Read + Send>>,
    /// Size of the file, and the number of its bytes that were read, if it is compressed.
    pub(super) size: u64,
    pub(super) read: Option<Arc<AtomicU64>>,
}

impl Input {
    /// Opens a file, or standard input for `-`: that is copied to an unnamed file in the folder for temporary files, so that it
    /// can be read again.
    ///
    /// # Errors
    /// A file that cannot be read, is not a regular file, or is named as compressed and is not.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = if is_standard(path) { standard_input() } else { training::internal::open_input(path) };
        let file = Arc::new(file.map_err(Error::io("read", path))?);
        let size = file.metadata().map_err(Error::io("read", path))?.len();
        let mut begin = Vec::new();
        let whole = || From { file: file.clone(), place: 0, read: Arc::default() };
        whole().take(4).read_to_end(&mut begin).map_err(Error::io("read", path))?;
        let found = Compression::by_begin(&begin);
        if let (Some(_), None) = (Compression::by_name(path), found) {
            let problem = "it is not compressed as its name says: rename it, or compress it again";
            return Err(Error::Format { path: path.into(), problem: problem.into() });
        }
        let from = whole();
        let read = found.map(|_| from.read.clone());
        let bytes: Box<dyn Read + Send> = match found {
            None => Box::new(from),
            Some(Compression::Gzip) => Box::new(Checked(MultiGzDecoder::new(from))),
            Some(Compression::Zstd) => {
                Box::new(Checked(zstd::Decoder::new(from).map_err(Error::io("read", path))?))
            }
        };
        Ok(Self { bytes: BufReader::with_capacity(1 << 18, bytes), size, read })
    }

    /// Returns the number of bytes of the file that were read, `done` of which it has in all decompressed.
    pub(super) fn bytes_read(&self, done: u64) -> u64 {
        self.read.as_ref().map_or(done, |read| read.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Input({} bytes)", self.size)
    }
}

/// Copies standard input to an unnamed file once; returns that.
fn standard_input() -> io::Result<File> {
    static SPOOL: Mutex<Option<File>> = Mutex::new(None);
    let mut spool = lock(&SPOOL);
    if spool.is_none() {
        let mut file = tempfile::tempfile()?;
        io::copy(&mut io::stdin().lock(), &mut file)?;
        file.flush()?;
        file.rewind()?;
        *spool = Some(file);
    }
    match &*spool {
        Some(file) => file.try_clone(),
        None => Err(ErrorKind::NotFound.into()),
    }
}

/// Reads a file at a position of its own, and counts what was read.
struct From {
    file: Arc<File>,
    place: u64,
    read: Arc<AtomicU64>,
}

impl Read for From {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.place)?;
        self.place += read as u64;
        self.read.store(self.place, Ordering::Relaxed);
        Ok(read)
    }
}

/// Says what to do about errors of a decoder.
struct Checked<R>(R);

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                let problem = "it is compressed, and ends too early: copy or download it again";
                io::Error::new(ErrorKind::UnexpectedEof, problem)
            }
            ErrorKind::Interrupted => error,
            _ if error.raw_os_error().is_none_or(|code| code == 0) => {
                let problem = format!("it is compressed, and damaged ({error}): copy or download it again");
                io::Error::new(ErrorKind::InvalidData, problem)
            }
            _ => error,
        })
    }
}
