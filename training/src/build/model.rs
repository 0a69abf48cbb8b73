//! What a model must have to be trained in any layout.

use candle_core::{Result, Tensor};

use super::Units;

/// A model that can be trained in any layout: a chain of units, and a loss of what the last one gives.
pub trait Model: Units {
    /// The mean loss of a batch's output, over those targets that count. In a pipeline, the last stage calls it.
    ///
    /// # Errors
    /// Targets that do not fit the output.
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor>
    where
        Self: Sized;

    /// The mean loss of a batch, where the whole model is in this process. By default the chain's, and [`output_loss`](Self::output_loss)
    /// of what it gives; a model may have a way that needs less memory.
    ///
    /// # Errors
    /// What a unit fails with; targets that do not fit.
    fn loss(&self, input: &Tensor, targets: &Tensor) -> Result<Tensor>
    where
        Self: Sized,
    {
        Self::output_loss(&self.without_loss(input)?, targets)
    }

    /// What a batch gives of which no target counts: outputs through the same units, in the same order, as [`loss`](Self::loss), since ranks
    /// that share parameters gather them together. By default what the last unit gives; a model with a `loss` of its own has this, too.
    ///
    /// # Errors
    /// What a unit fails with.
    fn without_loss(&self, input: &Tensor) -> Result<Tensor> {
        self.units().into_iter().try_fold(input.clone(), |x, unit| unit.forward(&x))
    }

    /// How many of these targets the mean is taken over, so that batches with different numbers of them can be put together. By default
    /// the rows.
    ///
    /// # Errors
    /// Targets of another kind.
    fn count(targets: &Tensor) -> Result<usize>
    where
        Self: Sized,
    {
        Ok(targets.dims().first().copied().unwrap_or(1))
    }

    /// Pairs of parameters that are one, but are in two units ([`Builder::unit_sharing`](super::Builder::unit_sharing)): a pipeline may
    /// have them in two stages. The first name is that of the unit that has it. By default none.
    fn ties(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Whether it may be divided along the sequence between divided layers (sequence parallelism): activations are `(batch, length, features)`,
    /// and of them each unit computes each position by itself there, with parameters from [`Part::whole`](super::Part::whole) and positions from
    /// [`Layers::positions`](super::Layers::positions). By default not.
    fn divides_sequences() -> bool
    where
        Self: Sized,
    {
        false
    }
}
