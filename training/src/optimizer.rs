//! What a training loop needs of an optimizer, whichever it is.

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};

use crate::{Error, OptimizerState};

/// An optimizer for a model of which this rank may hold parts only. A further optimizer implements this; a trainer that
/// chooses among several by name has to know the name.
pub trait StepOptimizer: OptimizerState {
    /// Sets the learning rate. An optimizer with several keeps their ratios.
    fn set_learning_rate(&mut self, learning_rate: f64);

    /// Steps with gradients multiplied by `scale`. What needs whole matrices asks `matrices` for them, which may communicate:
    /// call it on every rank. If that fails, nothing has changed.
    ///
    /// # Errors
    /// A gradient that does not fit its parameter; an invalid configuration; failures of communication.
    fn step_whole(&mut self, grads: &GradStore, scale: f64, matrices: &mut dyn WholeMatrices) -> Result<()>;
}

/// Implements candle's `Optimizer` and [`StepOptimizer`] for one with a `config` that steps each element by itself, by `named` and
/// `step_scaled`.
macro_rules! steps_alone {
    ($optimizer:ident, $config:ident) => {
        impl candle_nn::Optimizer for $optimizer {
            type Config = $config;

            /// Takes the float variables of `vars`; the others cannot be trained and are ignored.
            fn new(vars: Vec<Var>, config: $config) -> candle_core::Result<Self> {
                Ok(Self::named($crate::slot::named_by_index(vars), config)?)
            }

            fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
                self.step_scaled(grads, 1.)
            }

            fn learning_rate(&self) -> f64 {
                self.config.learning_rate
            }

            fn set_learning_rate(&mut self, lr: f64) {
                self.config.learning_rate = lr;
            }
        }

        impl $crate::StepOptimizer for $optimizer {
            fn set_learning_rate(&mut self, learning_rate: f64) {
                self.config.learning_rate = learning_rate;
            }

            fn step_whole(
                &mut self,
                grads: &GradStore,
                scale: f64,
                _: &mut dyn $crate::WholeMatrices,
            ) -> candle_core::Result<()> {
                self.step_scaled(grads, scale)
            }
        }
    };
}

pub(crate) use steps_alone;

/// Where a matrix of which ranks hold parts is whole: on one of them.
pub trait WholeMatrices {
    /// Computes a function of whole matrices. `names` are this rank's variables, `part` returns for the index of one what it
    /// holds, and the result has the same parts of `compute`'s results, in the shapes of the variables. A parameter with more than two dimensions is
    /// several matrices, of its last two.
    ///
    /// # Errors
    /// Those of `part` and `compute`; [`Error::NotAMatrix`]; [`Error::NoMatrix`] if no rank has any; failures of communication.
    fn map(
        &mut self,
        names: &[&str],
        part: &dyn Fn(usize) -> Result<Tensor>,
        compute: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>>;
}

/// Matrices that this process holds whole: for a model in one process, and for an optimizer that asks for none.
#[derive(Debug, Clone, Copy)]
pub struct HeldWhole;

impl WholeMatrices for HeldWhole {
    fn map(
        &mut self,
        names: &[&str],
        part: &dyn Fn(usize) -> Result<Tensor>,
        compute: &dyn Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        if names.is_empty() {
            return Err(Error::NoMatrix.into());
        }
        let one = |(place, name): (usize, &&str)| {
            let whole = part(place)?;
            let [.., rows, columns] = whole.dims() else {
                let (parameter, dims) = (name.to_string(), whole.dims().to_vec());
                return Err(Error::NotAMatrix { parameter, dims }.into());
            };
            map_matrices(&whole, (*rows, *columns), compute)
        };
        names.iter().enumerate().map(one).collect()
    }
}

/// Computes a function of each of the matrices of these dimensions that a tensor is.
///
/// # Errors
/// Those of `compute`, and of candle.
pub fn map_matrices(
    whole: &Tensor,
    (rows, columns): (usize, usize),
    compute: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let each = whole.reshape(((), rows, columns))?;
    let computed = (0..each.dim(0)?).map(|matrix| compute(&each.get(matrix)?));
    match &computed.collect::<Result<Vec<_>>>()?[..] {
        [] => Ok(whole.clone()),
        [one] => one.reshape(whole.shape()),
        several => Tensor::stack(several, 0)?.reshape(whole.shape()),
    }
}
