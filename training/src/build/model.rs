//! Trait of models that can be trained in any layout.

use candle_core::{Result, Tensor};

use super::Units;

/// A model that can be trained in any layout: a chain of units, and a loss of the last unit's output.
pub trait Model: Units {
    /// The mean loss of a batch's output, over the targets that count.
    ///
    /// # Errors
    /// Targets that do not fit the output.
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor>
    where
        Self: Sized;

    /// The mean loss of a batch, from the input of the last unit; in a pipeline, the last stage calls it. By default it
    /// runs the unit and calls [`output_loss`](Self::output_loss); a model may override it with a way that needs less
    /// memory.
    ///
    /// # Errors
    /// Errors of the unit; targets that do not fit.
    fn last_unit_loss(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor>
    where
        Self: Sized,
    {
        Self::output_loss(&self.last_unit(x)?, targets)
    }

    /// The output of the last unit, from its input.
    ///
    /// # Errors
    /// Errors of the unit.
    fn last_unit(&self, x: &Tensor) -> Result<Tensor> {
        self.units().last().map_or_else(|| Ok(x.clone()), |unit| unit.forward(x))
    }

    /// The mean loss of a batch, where the whole model is in this process: that of the last unit, after the others.
    ///
    /// # Errors
    /// Errors of a unit; targets that do not fit.
    fn loss(&self, input: &Tensor, targets: &Tensor) -> Result<Tensor>
    where
        Self: Sized,
    {
        let mut units = self.units();
        units.pop();
        let x = units.into_iter().try_fold(input.clone(), |x, unit| unit.forward(&x))?;
        self.last_unit_loss(&x, targets)
    }

    /// The mean loss of a batch as [`loss`](Self::loss), and sums over its targets that an evaluation adds up, as many for each
    /// batch, such as the number of right answers. It runs the units of [`loss`](Self::loss), and by default
    /// [`evaluate_last_unit`](Self::evaluate_last_unit) after all but the last.
    ///
    /// # Errors
    /// Errors of a unit; targets that do not fit.
    fn evaluate(&self, input: &Tensor, targets: &Tensor) -> Result<(Tensor, Vec<f64>)>
    where
        Self: Sized,
    {
        let mut units = self.units();
        units.pop();
        let x = units.into_iter().try_fold(input.clone(), |x, unit| unit.forward(&x))?;
        self.evaluate_last_unit(&x, targets)
    }

    /// The loss of [`last_unit_loss`](Self::last_unit_loss), with the sums of [`evaluate`](Self::evaluate); in a pipeline, the last
    /// stage calls it. By default there are no sums.
    ///
    /// # Errors
    /// Errors of the unit; targets that do not fit.
    fn evaluate_last_unit(&self, x: &Tensor, targets: &Tensor) -> Result<(Tensor, Vec<f64>)>
    where
        Self: Sized,
    {
        Ok((self.last_unit_loss(x, targets)?, Vec::new()))
    }

    /// Output for a batch of which no target counts. It must run the same units in the same order as
    /// [`loss`](Self::loss), since ranks that share parameters gather them together. By default the output of the
    /// last unit.
    ///
    /// # Errors
    /// Errors of a unit.
    fn without_loss(&self, input: &Tensor) -> Result<Tensor> {
        self.units().into_iter().try_fold(input.clone(), |x, unit| unit.forward(&x))
    }

    /// Number of targets that the mean is taken over, so that batches with different numbers of them, and parts of rows, can be
    /// combined. By default the elements of the targets.
    ///
    /// # Errors
    /// Targets of another shape or dtype.
    fn count(targets: &Tensor) -> Result<usize>
    where
        Self: Sized,
    {
        Ok(targets.elem_count())
    }

    /// Pairs of tied parameters, which are one but used in two units
    /// ([`Builder::unit_sharing`](super::Builder::unit_sharing)): a pipeline may have the units in two stages. The
    /// first name is that of the unit that owns it. By default none.
    fn ties(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Whether it supports sequence parallelism, that is, division along the sequence between divided layers:
    /// activations are `(batch, length, features)`, and between divided layers each unit computes every position
    /// independently, with parameters from [`Part::whole`](super::Part::whole) and positions from
    /// [`Layers::positions`](super::Layers::positions). By default false.
    fn divides_sequences() -> bool
    where
        Self: Sized,
    {
        false
    }
}
