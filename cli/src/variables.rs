//! A model's variables, initialized from the seed or from `--init`.

use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use sampler::{Generator, SharedGenerator};
use training::{TorchInit, load_weights, save_weights};

use crate::error::Result;
use crate::options::CommonOptions;
use crate::rank::Rank;

/// A model's variables and the random generator that initializes them: the same in every process of a run.
///
/// Whatever else a tutorial draws from its seed (usually data) comes from the same generator, in the tutorial's
/// order: before [`make`](Self::make) if the model is created later.
///
/// ```no_run
/// use candle_nn::linear;
/// use cli::options::CommonOptions;
/// use cli::variables::Variables;
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
    /// The device of the variables.
    pub device: Device,
}

impl Variables {
    /// Creates an empty set of variables, and the generator.
    ///
    /// # Errors
    /// A device that is not available.
    pub fn new(options: &CommonOptions) -> Result<Self> {
        let generator = SharedGenerator::from(Generator::new(options.seed));
        Ok(Self { generator, map: VarMap::new(), device: options.device()? })
    }

    /// Creates the variables by building the model once, then loads those of `--init`. The training code builds the
    /// model again.
    ///
    /// # Errors
    /// Errors of the model; a file that does not fit.
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

    /// Writes the variables to `--save`, if requested; on rank 0 only.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, options: &CommonOptions, rank: &Rank) -> Result<()> {
        match &options.save {
            Some(path) if rank.is_first() => Ok(save_weights(path, &self.map)?),
            _ => Ok(()),
        }
    }

    /// Returns a builder from which a model gets these variables.
    pub fn builder(&self) -> VarBuilder<'static> {
        TorchInit::var_builder(&self.generator, &self.map, DType::F32, &self.device)
    }
}
