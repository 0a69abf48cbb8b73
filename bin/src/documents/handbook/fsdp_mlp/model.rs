//! The handbook's model for sharding (FSDP): four linear layers, each a unit, with nothing between them.

use candle_core::{Module, Result, Tensor};
use training::build::{Builder, Division, Linear, LinearConfig, Unit, Units};

/// Number of classes.
pub const CLASSES: usize = 10;

/// Sizes of a [`LargeModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargeConfig {
    /// Features of a sample. Default: 1024.
    pub features: usize,
    /// Width of the second and the third layer. Default: 4096.
    pub hidden: usize,
}

impl Default for LargeConfig {
    fn default() -> Self {
        Self { features: 1024, hidden: 4096 }
    }
}

impl LargeConfig {
    /// Returns the numbers of inputs and outputs of each layer.
    pub fn layers(&self) -> [(usize, usize); 4] {
        let &Self { features, hidden } = self;
        [(features, hidden), (hidden, hidden), (hidden, features), (features, CLASSES)]
    }

    /// Returns names and shapes of the parameters.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let layer = |(index, (inputs, outputs)): (usize, (usize, usize))| {
            let name = format!("layer{}", index + 1);
            [(format!("{name}.weight"), vec![outputs, inputs]), (format!("{name}.bias"), vec![outputs])]
        };
        self.layers().into_iter().enumerate().flat_map(layer).collect()
    }

    /// Returns the number of elements of each layer's weight and bias; `None` if the model's bytes overflow.
    pub fn elements(&self) -> Option<[usize; 4]> {
        let mut elements = [0; 4];
        for (elements, (inputs, outputs)) in elements.iter_mut().zip(self.layers()) {
            *elements = inputs.checked_add(1)?.checked_mul(outputs)?;
        }
        elements
            .iter()
            .try_fold(0usize, |sum, &more| sum.checked_add(more))?
            .checked_mul(size_of::<f64>() * 4)?;
        Some(elements)
    }
}

/// `layer1` to `layer4`.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use bin::documents::handbook::fsdp_mlp::model::{LargeConfig, LargeModel};
/// use training::build::Builder;
///
/// let vars = VarMap::new();
/// let builder = Builder::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu));
/// let model = LargeModel::new(&LargeConfig { features: 4, hidden: 8 }, &builder)?;
/// assert_eq!(model.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu)?)?.dims(), [3, 10]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LargeModel([Unit<Linear>; 4]);

impl LargeModel {
    /// Creates the layers.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(config: &LargeConfig, builder: &Builder) -> Result<Self> {
        let [one, two, three, four] = config.layers();
        let layer = |number: usize, (inputs, outputs)| {
            let name = format!("layer{number}");
            let config = LinearConfig::new(inputs, outputs, Division::Whole).with_bias(true);
            builder.unit(&name, |part| part.pp(&name).linear(&config))
        };
        Ok(Self([layer(1, one)?, layer(2, two)?, layer(3, three)?, layer(4, four)?]))
    }
}

impl Units for LargeModel {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Module for LargeModel {
    /// # Shapes
    /// (batch, features) to logits (batch, 10).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}
