//! Slots: the parameters of an optimizer, each with its state; and reading saved state into them.

use std::collections::{BTreeSet, HashMap, HashSet};

use candle_core::{DType, Tensor, Var};

use crate::low_bits::LowBits;
use crate::state::{on_host, state_dtype};
use crate::{Error, Result};

/// A parameter and its optimizer state, `None` before its first gradient.
#[derive(Debug)]
pub(crate) struct Slot<S> {
    pub(crate) name: String,
    pub(crate) var: Var,
    pub(crate) low: LowBits,
    pub(crate) state: Option<S>,
}

/// Makes slots for the float variables; the others cannot be trained and are ignored.
pub(crate) fn slots<S>(
    optimizer: &'static str,
    vars: impl IntoIterator<Item = (String, Var)>,
) -> Result<Vec<Slot<S>>> {
    let (mut names, mut known) = (HashSet::new(), HashMap::new());
    let mut slots = vec![];
    for (name, var) in vars {
        if !names.insert(name.clone()) {
            return Err(Error::DuplicateName { optimizer, name });
        }
        if var.dtype().is_float() {
            if let Some(first) = known.insert(var.id(), name.clone()) {
                return Err(Error::DuplicateVariable { optimizer, first, second: name });
            }
            slots.push(Slot { name, var, low: LowBits::None, state: None });
        }
    }
    Ok(slots)
}

/// Checks that a gradient factor is finite.
pub(crate) fn check_scale(of: &'static str, scale: f64) -> Result<()> {
    // Checked as f32, in which f32 parameters use it.
    match (scale as f32).is_finite() {
        true => Ok(()),
        false => {
            Err(Error::InvalidConfig { of, field: "scale", got: scale, help: "it must be a finite number" })
        }
    }
}

/// Names variables by their indices.
pub(crate) fn named_by_index(vars: Vec<Var>) -> impl Iterator<Item = (String, Var)> {
    vars.into_iter().enumerate().map(|(index, var)| (index.to_string(), var))
}

impl<S> Slot<S> {
    /// Whether the parameter is stepped in place.
    pub(crate) fn steps_in_place(&self) -> bool {
        on_host(&self.var)
    }

    pub(crate) fn check(&self, optimizer: &'static str, grad: &Tensor) -> Result<()> {
        // Gradients of a 16-bit parameter may have been summed or scaled in f32.
        let fits = [self.var.dtype(), state_dtype(&self.var)].contains(&grad.dtype());
        if self.var.shape() == grad.shape() && fits {
            return Ok(());
        }
        Err(Error::GradientMismatch {
            optimizer,
            parameter: self.name.clone(),
            expected: self.var.dims().to_vec(),
            got: grad.dims().to_vec(),
            dtype: self.var.dtype(),
            got_dtype: grad.dtype(),
        })
    }
}

/// Reads a saved state and detects entries that were not read.
pub(crate) struct Reader<'a> {
    optimizer: &'static str,
    state: &'a HashMap<String, Tensor>,
    read: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(optimizer: &'static str, state: &'a HashMap<String, Tensor>) -> Self {
        Self { optimizer, state, read: BTreeSet::new() }
    }

    /// Returns the entry `{parameter}.{field}` if it exists; it must have this shape and dtype.
    pub(crate) fn optional(
        &mut self,
        parameter: &str,
        field: &str,
        dims: &[usize],
        dtype: DType,
    ) -> Result<Option<&'a Tensor>> {
        let key = format!("{parameter}.{field}");
        let Some(tensor) = self.state.get(&key) else { return Ok(None) };
        if tensor.dims() != dims || tensor.dtype() != dtype {
            return Err(Error::StateMismatch {
                optimizer: self.optimizer,
                key,
                expected: dims.to_vec(),
                got: tensor.dims().to_vec(),
                dtype,
                got_dtype: tensor.dtype(),
            });
        }
        self.read.insert(key);
        Ok(Some(tensor))
    }

    /// As [`Self::optional`], but a missing entry is an error.
    pub(crate) fn required(
        &mut self,
        parameter: &str,
        field: &str,
        dims: &[usize],
        dtype: DType,
    ) -> Result<&'a Tensor> {
        self.optional(parameter, field, dims, dtype)?.ok_or_else(|| Error::MissingState {
            optimizer: self.optimizer,
            key: format!("{parameter}.{field}"),
        })
    }

    /// Takes what a parameter of 16 bits has no room for. Without it, the parameter goes on from its rounded numbers.
    pub(crate) fn low_bits(&mut self, parameter: &str, var: &Var) -> Result<LowBits> {
        let (low, key) = LowBits::load(self.state, parameter, var)?;
        self.read.extend(key);
        Ok(low)
    }

    /// Returns an error that names an entry which was not read, if there is one.
    pub(crate) fn finish(self) -> Result<()> {
        match self.state.keys().filter(|key| !self.read.contains(*key)).min() {
            None => Ok(()),
            Some(key) => Err(Error::UnknownState { optimizer: self.optimizer, key: key.clone() }),
        }
    }
}
