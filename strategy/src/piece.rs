//! Which elements of which parameter a rank holds.

use candle_core::{Shape, Tensor, Var};

use crate::Region;

/// A variable of this rank, and the elements of a parameter that it holds.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Name of the parameter; for tied ones, of the first.
    pub name: String,
    /// Name of the variable.
    pub var_name: String,
    /// Which elements of the whole parameter it holds.
    pub region: Region,
    /// The variable; it may have more elements, which are padding.
    pub var: Var,
    /// Whether this rank is the first of those in its copy of the model that hold these elements: it contributes their
    /// gradients to the norm, and writes its copy's share of them to checkpoints.
    pub is_first: bool,
    /// Whether it is state that is not trained, such as running statistics, which differ between ranks.
    pub is_buffer: bool,
}

impl Piece {
    /// Creates the piece of a variable that holds a whole parameter of the same name.
    pub fn whole(name: String, var: Var) -> Self {
        let region = Region::whole(var.dims());
        Self { var_name: name.clone(), name, region, var, is_first: true, is_buffer: false }
    }

    /// Whether this rank has a manifest entry for it: it holds elements, or the parameter has none at all.
    pub(crate) fn is_described(&self) -> bool {
        self.is_first && (!self.region.is_empty() || self.region.dims.contains(&0))
    }

    /// Returns the values of its elements in the shape of the variable.
    pub(crate) fn padded(&self, values: Tensor) -> candle_core::Result<Tensor> {
        padded(values, self.var.shape())
    }
}

/// Returns values with zeros behind them, in a shape that may have more elements.
pub(crate) fn padded(values: Tensor, shape: &Shape) -> candle_core::Result<Tensor> {
    let missing = shape.elem_count() - values.elem_count();
    let values = if missing == 0 { values } else { values.pad_with_zeros(0, 0, missing)? };
    values.reshape(shape)
}
