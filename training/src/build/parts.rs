//! Parameters of which each rank reads its part alone.

use std::ops::Range;

use candle_core::{DType, Result, Shape, Tensor};
use candle_nn::Init;

/// Where first values of parameters come from, part by part.
pub trait PartSource: Send + Sync {
    /// The numbers of a parameter in these ranges of its flat whole, one range after the other, on the CPU. `shape` is that of the
    /// whole; `init` is what a new one starts from, where the source has no opinion of its own.
    ///
    /// # Errors
    /// A parameter that there is not, or of another shape; failures to read.
    fn read(
        &self,
        name: &str,
        shape: &Shape,
        init: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> Result<Tensor>;

    /// The shape of what [`read`](Self::read) takes ranges of, where a model asks for a parameter of the shape `whole`: of the part that a
    /// rank has of a divided layer, for one. Called once for each parameter, before it is read. Default: `whole`.
    ///
    /// # Errors
    /// A shape that the ranks do not divide.
    fn shape(&self, _name: &str, whole: &Shape) -> Result<Shape> {
        Ok(whole.clone())
    }
}
