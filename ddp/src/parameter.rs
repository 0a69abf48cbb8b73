//! One parameter: its variable, and the copy that the model computes with.

use candle_core::{DType, DeviceLocation, Result, Tensor, Var};

use crate::bucket_plan::Item;

/// A parameter of the model.
#[derive(Debug, Clone)]
pub struct Parameter {
    name: String,
    var: Var,
    tensor: Tensor,
    /// The variable existed before, in the user's `VarMap`, and is returned whatever dtype is requested.
    pub(crate) shared: bool,
    /// Flat views of both, without gradient; `None` for a parameter without elements.
    copy: Option<(Tensor, Tensor)>,
}

impl Parameter {
    /// `tensor` is a copy of `var`'s values; `shared`: the variable existed before.
    pub(crate) fn new(name: &str, var: Var, tensor: Tensor, shared: bool) -> Result<Self> {
        let elements = var.elem_count();
        let flat = |tensor: &Tensor| tensor.detach().reshape(elements);
        let copy = if elements == 0 { None } else { Some((flat(&var)?, flat(&tensor)?)) };
        Ok(Self { name: name.into(), var, tensor, shared, copy })
    }

    /// Returns its name relative to the root of the `VarBuilder`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the variable, which the optimizer changes.
    pub fn var(&self) -> &Var {
        &self.var
    }

    /// Returns the tensor that the model computes with: the variable's values as of the last [`crate::Ddp::model`]. A loss
    /// that uses a parameter outside the model (e.g. weight decay) must use this tensor, so that the gradient is averaged,
    /// too.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Copies the variable's values to the model's tensor.
    pub(crate) fn refresh(&self) -> Result<()> {
        match &self.copy {
            Some((from, to)) => to.slice_set(from, 0, 0),
            None => Ok(()),
        }
    }
}

/// Numbers combinations of dtype, device and group in order of first occurrence. The numbers are the same on every rank even if
/// device names differ.
#[derive(Debug, Default)]
pub(crate) struct Kinds(Vec<(DType, DeviceLocation, usize)>);

impl Kinds {
    /// The item of a tensor, of the group of this index ([`strategy::ParameterGroups`]).
    pub(crate) fn item(&mut self, tensor: &Tensor, group: usize) -> Item {
        let kind = (tensor.dtype(), tensor.device().location(), group);
        let elements = tensor.elem_count();
        let bytes = elements * kind.0.size_in_bytes();
        let number = self.0.iter().position(|known| *known == kind).unwrap_or_else(|| {
            self.0.push(kind);
            self.0.len() - 1
        });
        Item { elements, bytes, kind: number, group }
    }
}
