//! The model of the PyTorch handbook's sharded example: four linear layers, each a unit.

use candle_core::{Module, Result, Tensor};
use fsdp::{Unit, UnitBuilder};
use training::{Linear, linear};

/// Number of classes.
pub(super) const CLASSES: usize = 10;

/// Sizes of a [`LargeModel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LargeConfig {
    /// Features of a sample. Default: 1024.
    pub(super) features: usize,
    /// Width of the second and the third layer. Default: 4096.
    pub(super) hidden: usize,
}

impl Default for LargeConfig {
    fn default() -> Self {
        Self { features: 1024, hidden: 4096 }
    }
}

impl LargeConfig {
    /// Returns the numbers of inputs and outputs of each layer.
    pub(super) fn layers(&self) -> [(usize, usize); 4] {
        let &Self { features, hidden } = self;
        [(features, hidden), (hidden, hidden), (hidden, features), (features, CLASSES)]
    }

    /// Returns the number of elements of each layer's weight and bias; `None` on overflow.
    pub(super) fn elements(&self) -> Option<[usize; 4]> {
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

/// `layer1` to `layer4`, with nothing between them, as in the handbook.
#[derive(Debug)]
pub(super) struct LargeModel([Unit<Linear>; 4]);

impl LargeModel {
    /// Creates the layers.
    ///
    /// # Errors
    /// Those of the builder.
    pub(super) fn new(config: &LargeConfig, units: &UnitBuilder<'_>) -> Result<Self> {
        let [one, two, three, four] = config.layers();
        let layer = |number: usize, (inputs, outputs)| {
            units.pp(format!("layer{number}")).unit(|builder| linear(inputs, outputs, builder))
        };
        Ok(Self([layer(1, one)?, layer(2, two)?, layer(3, three)?, layer(4, four)?]))
    }
}

impl Module for LargeModel {
    /// # Shapes
    /// (batch, features) to logits (batch, 10).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }
}
