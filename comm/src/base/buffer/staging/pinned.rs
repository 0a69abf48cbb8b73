//! Pinned host memory, which a CUDA device accesses directly.

#![allow(unsafe_code, reason = "the driver gives and takes memory by its address")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use candle_core::cuda::cudarc::driver::{CudaContext, result, sys};

use crate::base::lock;
use crate::{Error, Result};

/// Blocks kept for reuse, at most [`MAX_IDLE`] for all devices: pinning memory takes milliseconds.
static IDLE: Mutex<Vec<Block>> = Mutex::new(Vec::new());
const MAX_IDLE: usize = 16;
/// The smallest block.
const PAGE: usize = 4096;

/// A buffer in pinned memory. Dropping it keeps the memory for reuse.
pub(super) struct Pinned {
    /// `None` only while it is dropped.
    block: Option<Block>,
    len: usize,
}

struct Block {
    start: NonNull<c_void>,
    capacity: usize,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to this value alone, and may be used on any thread.
unsafe impl Send for Block {}

impl Pinned {
    /// Returns a buffer of `len` bytes. They are zero, or what an earlier user left there.
    pub(super) fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        let capacity = len.max(PAGE).next_power_of_two();
        let mut idle = lock(&IDLE);
        let fits = |block: &Block| block.capacity == capacity && block.context == *context;
        let known = idle.iter().position(fits).map(|index| idle.swap_remove(index));
        drop(idle);
        let block = known.map_or_else(|| Block::new(context, capacity), Ok)?;
        Ok(Self { block: Some(block), len })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        let Some(block) = &self.block else { return &[] };
        // SAFETY: the block has at least `len` bytes, all initialised, and lives as long as `self`, which owns it.
        unsafe { std::slice::from_raw_parts(block.start.as_ptr().cast(), self.len) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let Some(block) = &self.block else { return &mut [] };
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(block.start.as_ptr().cast(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut idle = lock(&IDLE);
        if idle.len() >= MAX_IDLE {
            // Removes an old block, to make room. (`swap_remove` may have changed the order, so it need not be the
            // oldest.)
            idle.remove(0);
        }
        idle.extend(self.block.take());
    }
}

impl Block {
    fn new(context: &Arc<CudaContext>, capacity: usize) -> Result<Self> {
        let failed = |error| Error::system(format!("pinning {capacity} bytes of memory"), error);
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the flag is one that the driver knows.
        let start =
            unsafe { result::malloc_host(capacity, sys::CU_MEMHOSTALLOC_PORTABLE) }.map_err(failed)?;
        let start = NonNull::new(start).ok_or_else(|| Error::system("pinning memory", "there is none"))?;
        // SAFETY: the driver has allocated `capacity` bytes, for this value alone.
        unsafe { start.as_ptr().cast::<u8>().write_bytes(0, capacity) };
        Ok(Self { start, capacity, context: context.clone() })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the block comes from `malloc_host`, and is owned by this value. All copies from and to it have
            // completed.
            let _ = unsafe { result::free_host(self.start.as_ptr()) };
        }
    }
}
