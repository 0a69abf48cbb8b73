//! Source of initial parameter values of which each rank reads only its part.

use std::ops::Range;

use candle_core::{DType, Result, Shape, Tensor};
use candle_nn::Init;

/// Source of initial parameter values, read by ranges.
pub trait RangeReader: Send + Sync {
    /// Reads a parameter's elements in these ranges of the flattened whole, one range after the other, on the CPU.
    /// `shape` is that of the whole; `init` is used where the source has no value for the parameter.
    ///
    /// # Errors
    /// A missing parameter, or one of another shape; read failures.
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor>;

    /// Shape of the tensor that [`read`](Self::read) takes ranges of, where a model requests a parameter of shape
    /// `whole`: for example the part of a divided layer that a rank has. Called once for each parameter, before it is
    /// read. Default: `whole`.
    ///
    /// # Errors
    /// A shape that is not divisible by the number of ranks.
    fn shape(&self, _name: &str, whole: &Shape) -> Result<Shape> {
        Ok(whole.clone())
    }
}
