//! The state of an optimizer in the file of a rank that has a part of the model.

use candle_core::Tensor;

use crate::{Error, OptimizerState, Result};

/// Prefix of the keys of optimizer state in a file that has the model's parameters, too.
pub const OPTIMIZER_KEY: &str = "optimizer.";

/// Returns an optimizer's state for the file of a rank that has a part of the model, each entry under [`OPTIMIZER_KEY`] and
/// its own key.
///
/// # Errors
/// [`Error::UnownedState`]: an entry for which `is_owned` is false. Its part could not be found when the file is read.
/// `named_vars` is the method whose variables the optimizer must have, e.g. `Fsdp::named_vars`.
pub fn state_of_part(
    optimizer: &dyn OptimizerState,
    named_vars: &'static str,
    is_owned: impl Fn(&str, &Tensor) -> bool,
) -> Result<Vec<(String, Tensor)>> {
    let entry = |(key, tensor): (String, Tensor)| match is_owned(&key, &tensor) {
        true => Ok((format!("{OPTIMIZER_KEY}{key}"), tensor)),
        false => Err(Error::UnownedState { key, named_vars }),
    };
    optimizer.state()?.into_iter().map(entry).collect()
}
