//! Memory shared by two processes: a header of atomics, and the bytes of a ring, mapped twice in a row so that no read or
//! write has to wrap around.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, copy_nonoverlapping, null_mut};
use std::sync::atomic::AtomicU64;
pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::io::{Errno, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::Token;
use crate::platform::shared;

/// Bytes that a ring holds. A power of two, and a multiple of every page size.
pub(super) const CAPACITY: usize = 512 * 1024;
/// Size reserved for the header: a multiple of every page size, of which only one page is ever touched.
const HEADER: usize = 64 * 1024;
const FILE: usize = HEADER + CAPACITY;
const MAPPED: usize = FILE + CAPACITY;

/// A value on its own cache lines (128 bytes, since processors fetch lines in pairs).
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct CacheAligned<T>(pub(super) T);

/// State that the two ends share beside the bytes.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Header {
    token: CacheAligned<[AtomicU64; 4]>,
    /// Bytes written so far. Stored by the writer only.
    pub(super) head: CacheAligned<AtomicU64>,
    /// Bytes read so far. Stored by the reader only.
    pub(super) tail: CacheAligned<AtomicU64>,
    /// Not 0 while the reader sleeps until bytes arrive.
    pub(super) reader_waits: CacheAligned<AtomicU32>,
    /// Not 0 while the writer sleeps until there is room.
    pub(super) writer_waits: CacheAligned<AtomicU32>,
}

/// One process's view of the shared memory of one ring.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone and is valid on every thread.
unsafe impl Send for Region {}

impl Region {
    /// Creates memory, all zeros but for the token, and the file through which another process can map it. The file has
    /// no name: the memory is freed with the last process that holds it, however that process ends.
    pub(super) fn create(token: &Token) -> Result<(Self, OwnedFd)> {
        let file = shared::create(FILE)?;
        let region = Self::map(&file)?;
        for (word, bytes) in region.header().token.0.iter().zip(token.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::SeqCst);
        }
        Ok((region, file))
    }

    /// Maps memory that another process has created; fails if the file is not such memory.
    pub(super) fn open(file: &OwnedFd) -> Result<Self> {
        shared::check(file, FILE)?;
        Self::map(file)
    }

    fn map(file: &OwnedFd) -> Result<Self> {
        // SAFETY: a new mapping, at an address that the system chooses.
        let base = unsafe { mmap_anonymous(null_mut(), MAPPED, ProtFlags::empty(), MapFlags::PRIVATE)? };
        let Some(base) = NonNull::new(base.cast::<u8>()) else { return Err(Errno::NOMEM) };
        // From here on it is unmapped if anything fails.
        let region = Self { base };
        for (at, len, from) in [(0, FILE, 0), (FILE, CAPACITY, HEADER)] {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: the pages replaced lie within the mapping made above, which nothing else refers to yet. The file
            // cannot shrink, so that all of them stay valid.
            unsafe {
                let place = base.as_ptr().add(at).cast();
                mmap(place, len, access, MapFlags::SHARED | MapFlags::FIXED, file.as_fd(), from as u64)?
            };
        }
        Ok(region)
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping starts on a page, is longer than the header, and lives as long as `self`. The header
        // consists of atomics only, for which every bit pattern is valid and which others may change at any time.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    pub(super) fn token(&self) -> Token {
        let mut token = Token::default();
        for (bytes, word) in token.as_chunks_mut::<8>().0.iter_mut().zip(&self.header().token.0) {
            *bytes = word.load(Ordering::SeqCst).to_le_bytes();
        }
        token
    }

    /// Writes bytes at a position of the stream; at most [`CAPACITY`] of them.
    pub(super) fn write(&mut self, position: u64, bytes: &[u8]) {
        let len = bytes.len().min(CAPACITY);
        // SAFETY: `place` leaves room for CAPACITY bytes. The only Rust references into the ring are those of `bytes`
        // below, in the reader's process, which cover what was published and not yet read; the ring's protocol keeps
        // writers off it.
        unsafe { copy_nonoverlapping(bytes.as_ptr(), self.place(position).as_ptr(), len) }
    }

    /// Returns the bytes from a position of the stream on, at most [`CAPACITY`] of them. A process that violates the
    /// ring's protocol can change their values at any time; they are only ever used as plain values.
    pub(super) fn bytes(&self, position: u64, len: usize) -> &[u8] {
        // SAFETY: `place` leaves CAPACITY bytes, all of them initialised (by the system, at first), valid while `self`
        // lives. The writer does not touch what is published and not yet read.
        unsafe { std::slice::from_raw_parts(self.place(position).as_ptr(), len.min(CAPACITY)) }
    }

    /// Returns the address of a position of the stream; CAPACITY bytes from there on are mapped, whatever `position` is.
    fn place(&self, position: u64) -> NonNull<u8> {
        let offset = HEADER + (position % CAPACITY as u64) as usize;
        // SAFETY: at most HEADER + CAPACITY - 1, in a mapping of HEADER + 2 CAPACITY bytes.
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this value's own mapping, of that length; every reference into it borrows from `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), MAPPED) };
    }
}
