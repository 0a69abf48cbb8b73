//! Parameters of bytes, such as weights in 4 bits: sharded and gathered with their unit, and never trained.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use training::build::RangeReader;

use crate::layout::piece;
use crate::storage::take_storage;
use crate::values::copy_range;

/// A parameter of bytes.
#[derive(Debug, Clone)]
pub(crate) struct Bytes {
    pub(crate) name: String,
    /// The tensor that the model computes with; its storage is released while its unit does not run.
    pub(crate) tensor: Tensor,
    /// This rank's piece, of the same length on each rank.
    pub(crate) shard: Tensor,
}

/// Which piece a rank keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

impl Place {
    fn range(self, len: usize) -> Range<usize> {
        let each = piece(len, self.ranks);
        (self.rank * each).min(len)..((self.rank + 1) * each).min(len)
    }
}

impl Bytes {
    /// Reads this rank's piece of a parameter.
    pub(crate) fn read(
        source: &Arc<dyn RangeReader>,
        (name, whole, init): (&str, &Shape, Init),
        place: Place,
        device: &Device,
    ) -> Result<Self> {
        let shape = source.shape(name, whole)?;
        let range = place.range(shape.elem_count());
        let own = match range.is_empty() {
            true => Tensor::zeros(0, DType::U8, &Device::Cpu)?,
            false => source.read(name, whole, init, DType::U8, &[range])?.flatten_all()?,
        };
        Self::new(name, &shape, &own.to_device(device)?, place)
    }

    /// Takes this rank's piece of a whole parameter.
    pub(crate) fn of_whole(name: &str, whole: &Tensor, place: Place) -> Result<Self> {
        let flat = whole.detach().contiguous()?.flatten_all()?;
        let own = copy_range(&flat, place.range(flat.elem_count()))?;
        Self::new(name, whole.shape(), &own, place)
    }

    fn new(name: &str, shape: &Shape, own: &Tensor, place: Place) -> Result<Self> {
        let device = own.device();
        let shard = Tensor::zeros(piece(shape.elem_count(), place.ranks), DType::U8, device)?;
        if own.elem_count() > 0 {
            shard.slice_set(own, 0, 0)?;
        }
        let tensor = Tensor::zeros(shape, DType::U8, device)?;
        take_storage(&tensor)?;
        Ok(Self { name: name.into(), tensor, shard })
    }
}
