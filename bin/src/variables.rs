//! A model's variables, from the seed or from `--init`.

use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

use crate::error::Result;
use crate::options::CommonOptions;
use crate::rank::Rank;
use crate::weights::{load_weights, save_weights};

/// A model's variables and the generator that they are drawn from: the same in every process of a run.
///
/// What else a tutorial draws from its seed (data, most times) is drawn from the same generator, in the tutorial's order:
/// before [`make`](Self::make) if that makes the model later.
///
/// ```no_run
/// use candle_nn::linear;
/// use bin::options::CommonOptions;
/// use bin::variables::Variables;
///
/// # fn setup(options: &CommonOptions) -> Result<(), Box<dyn std::error::Error>> {
/// let variables = Variables::new(options)?;
/// let data = variables.generator.with(|generator| generator.randn(1000))?;
/// variables.make(options, |builder| linear(20, 1, builder))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Variables {
    /// The run's generator, seeded with `--seed`.
    pub generator: SharedGenerator,
    /// The variables, by PyTorch's names.
    pub map: VarMap,
    /// Where they are.
    pub device: Device,
}

impl Variables {
    /// None yet.
    ///
    /// # Errors
    /// A device that is not there.
    pub fn new(options: &CommonOptions) -> Result<Self> {
        let generator = SharedGenerator::from(Generator::new(options.seed));
        Ok(Self { generator, map: VarMap::new(), device: options.device()? })
    }

    /// Makes the variables by building the model once, and reads those of `--init`. Whoever trains builds it again.
    ///
    /// # Errors
    /// What the model fails with; a file that does not fit.
    pub fn make<M>(
        &self,
        options: &CommonOptions,
        model: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<()> {
        model(self.builder())?;
        if let Some(path) = &options.init {
            load_weights(path, &self.map)?;
        }
        Ok(())
    }

    /// Writes them to `--save`, where that is asked for; rank 0 alone does.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, options: &CommonOptions, rank: &Rank) -> Result<()> {
        match &options.save {
            Some(path) if rank.is_first() => Ok(save_weights(path, &self.map)?),
            _ => Ok(()),
        }
    }

    /// Gives a model these variables.
    pub fn builder(&self) -> VarBuilder<'static> {
        TorchInit::var_builder(&self.generator, &self.map, DType::F32, &self.device)
    }
}
