//! Buffer that a schedule works on: tensors and scratch space, one after the other, addressed in bytes.
//!
//! A tensor's storage is locked only while bytes are moved, never while waiting for a peer: views of one storage may
//! take part in operations of several groups at the same time.

use std::ops::Range;

use candle_core::Tensor;

use crate::Result;
use crate::base::buffer::staging::StagedTensor;
use crate::base::buffer::storage;

/// Bytes copied at a time: they stay in the processor's cache in between.
const CHUNK: usize = 64 * 1024;

#[derive(Default)]
pub(crate) struct Memory<'a> {
    pieces: Vec<Piece<'a>>,
    len: usize,
}

struct Piece<'a> {
    /// Byte range in the whole buffer.
    range: Range<usize>,
    place: Backing<'a>,
}

enum Backing<'a> {
    Tensor(&'a Tensor),
    /// A tensor on a device other than the CPU.
    Staged(StagedTensor<'a>),
    /// Scratch space. Of u64 so that every element type is aligned.
    Room(Vec<u64>),
    /// A tensor of f16 or bf16, held as f32.
    Wide {
        tensor: &'a Tensor,
        values: Vec<f32>,
        write_back: bool,
    },
}

impl<'a> Memory<'a> {
    /// Returns a buffer of the elements of one tensor.
    pub(crate) fn of(tensor: &'a Tensor) -> Self {
        Self::default().tensor(tensor)
    }

    /// Appends the elements of a tensor.
    pub(crate) fn tensor(self, tensor: &'a Tensor) -> Self {
        self.append_tensor(tensor, true)
    }

    /// Appends the elements of a tensor that is only an output: the schedule writes all of them, and reads only what it
    /// has written.
    pub(crate) fn output(self, tensor: &'a Tensor) -> Self {
        self.append_tensor(tensor, false)
    }

    fn append_tensor(self, tensor: &'a Tensor, keeps: bool) -> Self {
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.append(bytes, StagedTensor::of(tensor, keeps).map_or(Backing::Tensor(tensor), Backing::Staged))
    }

    /// Appends `bytes` bytes of scratch space, all zero.
    pub(crate) fn scratch(self, bytes: usize) -> Self {
        self.append(bytes, Backing::Room(vec![0; bytes.div_ceil(size_of::<u64>())]))
    }

    /// Appends a copy of the elements of a tensor.
    pub(crate) fn copy_of(self, tensor: &Tensor) -> Result<Self> {
        let (start, bytes) = (self.len, tensor.elem_count() * tensor.dtype().size_in_bytes());
        let mut memory = self.scratch(bytes);
        if bytes > 0 {
            let fill =
                |source: &[u8]| memory.write(start..start + bytes, |room| room.copy_from_slice(source));
            storage::read(tensor, 0..bytes, fill)??;
        }
        Ok(memory)
    }

    /// Appends the elements of a tensor of f16 or bf16 as f32. If `write_back` is set, [`Memory::finish`] rounds them
    /// and writes them to the tensor.
    pub(crate) fn wide(self, tensor: &'a Tensor, write_back: bool) -> Result<Self> {
        let mut values = vec![0f32; tensor.elem_count()];
        let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        if bytes > 0 {
            storage::read(tensor, 0..bytes, |narrow| storage::widen(tensor.dtype(), narrow, &mut values))?;
        }
        Ok(self.append(values.len() * size_of::<f32>(), Backing::Wide { tensor, values, write_back }))
    }

    fn append(mut self, bytes: usize, place: Backing<'a>) -> Self {
        if bytes > 0 {
            self.pieces.push(Piece { range: self.len..self.len + bytes, place });
            self.len += bytes;
        }
        self
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Calls `look` with the bytes of `range`: with all of them, or with the first ones that are contiguous, at least
    /// one unless `range` is empty.
    pub(crate) fn read<R>(&self, range: Range<usize>, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        let Some(piece) = self.pieces.get(self.find(&range)) else { return Ok(look(&[])) };
        let range = piece.within(&range);
        match &piece.place {
            Backing::Tensor(tensor) => storage::read(tensor, range, look),
            Backing::Staged(stage) => stage.read(range, look),
            Backing::Room(room) => Ok(look(&bytemuck::cast_slice(room)[range])),
            Backing::Wide { values, .. } => Ok(look(&bytemuck::cast_slice(values)[range])),
        }
    }

    /// Calls `change` with the bytes of `range`, as many of them as [`Memory::read`] would pass.
    pub(crate) fn write<R>(&mut self, range: Range<usize>, change: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        let index = self.find(&range);
        let Some(piece) = self.pieces.get_mut(index) else { return Ok(change(&mut [])) };
        let range = piece.within(&range);
        match &mut piece.place {
            Backing::Tensor(tensor) => storage::write(tensor, range, change),
            Backing::Staged(stage) => stage.write(range, change),
            Backing::Room(room) => Ok(change(&mut bytemuck::cast_slice_mut(room)[range])),
            Backing::Wide { values, .. } => Ok(change(&mut bytemuck::cast_slice_mut(values)[range])),
        }
    }

    /// Calls `change` for all bytes of `range`, one contiguous piece at a time, with the offset of the piece in
    /// `range`.
    pub(crate) fn write_all(
        &mut self,
        range: Range<usize>,
        mut change: impl FnMut(usize, &mut [u8]),
    ) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let done = at - range.start;
            at += self.write(at..range.end, |bytes| {
                change(done, bytes);
                bytes.len()
            })?;
        }
        Ok(())
    }

    /// Calls `look` for all bytes of `range`, one contiguous piece at a time, with the offset of the piece in `range`.
    pub(crate) fn read_all(&self, range: Range<usize>, mut look: impl FnMut(usize, &[u8])) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let done = at - range.start;
            at += self.read(at..range.end, |bytes| {
                look(done, bytes);
                bytes.len()
            })?;
        }
        Ok(())
    }

    /// Copies the bytes of `range` to offset `to`. No two storages are locked at the same time.
    pub(crate) fn copy(&mut self, range: Range<usize>, to: usize) -> Result<()> {
        let mut chunk = Vec::with_capacity(range.len().min(CHUNK));
        let mut done = 0;
        while done < range.len() {
            let len = CHUNK.min(range.len() - done);
            let start = range.start + done;
            chunk.clear();
            self.read_all(start..start + len, |_, bytes| chunk.extend_from_slice(bytes))?;
            self.write_all(to + done..to + done + len, |at, bytes| {
                bytes.copy_from_slice(&chunk[at..at + bytes.len()]);
            })?;
            done += len;
        }
        Ok(())
    }

    /// Writes widened and staged elements back to their tensors.
    pub(crate) fn finish(self) -> Result<()> {
        for piece in self.pieces {
            match piece.place {
                Backing::Wide { tensor, values, write_back: true } => {
                    let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
                    storage::write(tensor, 0..bytes, |narrow| {
                        storage::narrow(tensor.dtype(), &values, narrow)
                    })?;
                }
                Backing::Staged(stage) => stage.finish()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the index of the piece in which `range` begins; an invalid index if `range` is empty.
    fn find(&self, range: &Range<usize>) -> usize {
        if range.is_empty() {
            return usize::MAX;
        }
        self.pieces.partition_point(|piece| piece.range.end <= range.start)
    }
}

impl Piece<'_> {
    /// Returns the part of `range`, which begins in this piece, that lies in it, relative to the beginning of the
    /// piece.
    fn within(&self, range: &Range<usize>) -> Range<usize> {
        range.start - self.range.start..range.end.min(self.range.end) - self.range.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn pieces_are_one_after_the_other() {
        let first = Tensor::new(&[1u8, 2, 3], &Device::Cpu).unwrap();
        let empty = first.narrow(0, 0, 0).unwrap();
        let second = Tensor::new(&[4u8, 5], &Device::Cpu).unwrap();
        let mut memory = Memory::of(&first).tensor(&empty).tensor(&second).scratch(2);
        memory.copy(1..5, 3).unwrap();
        let mut seen = Vec::new();
        memory.read_all(0..7, |_, bytes| seen.extend_from_slice(bytes)).unwrap();
        assert_eq!(seen, [1, 2, 3, 2, 3, 4, 5]);
        assert_eq!(second.to_vec1::<u8>().unwrap(), [2, 3]);
        assert_eq!(memory.read(2..5, <[u8]>::len).unwrap(), 1);
        assert_eq!(memory.read(7..7, <[u8]>::len).unwrap(), 0);
    }

    #[test]
    fn views_of_one_storage_can_be_copied_into_each_other() {
        let whole = Tensor::arange(0u32, 6, &Device::Cpu).unwrap();
        let (front, back) = (whole.narrow(0, 0, 3).unwrap(), whole.narrow(0, 3, 3).unwrap());
        let mut memory = Memory::of(&front).tensor(&back);
        memory.copy(0..12, 12).unwrap();
        assert_eq!(whole.to_vec1::<u32>().unwrap(), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn halves_are_rounded_once() {
        let tensor =
            Tensor::new(&[1f32, 2.5], &Device::Cpu).unwrap().to_dtype(candle_core::DType::F16).unwrap();
        let mut memory = Memory::default().wide(&tensor, true).unwrap();
        let add = |_, bytes: &mut [u8]| {
            bytemuck::cast_slice_mut(bytes).iter_mut().for_each(|x: &mut f32| *x += 1.0)
        };
        memory.write_all(0..8, add).unwrap();
        memory.finish().unwrap();
        let values = tensor.to_dtype(candle_core::DType::F32).unwrap();
        assert_eq!(values.to_vec1::<f32>().unwrap(), [2.0, 3.5]);
    }
}
