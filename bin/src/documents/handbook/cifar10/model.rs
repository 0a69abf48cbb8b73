//! The convolutional net of the PyTorch handbook, for pictures of 3 x 32 x 32.

use candle_core::{D, Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Module, VarBuilder};
use ops::{Linear, conv2d, linear, max_pool2d, relu};

/// Two convolutions, each followed by ReLU and pooling, and three linear layers; the handbook's `Net`.
#[derive(Debug)]
pub struct ConvNet {
    conv1: Conv2d,
    conv2: Conv2d,
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

impl ConvNet {
    /// Number of classes.
    pub const CLASSES: usize = 10;

    /// Creates the layers.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn new(builder: VarBuilder<'_>) -> Result<Self> {
        let conv = |from, to, name| candle_nn::conv2d(from, to, 5, Conv2dConfig::default(), builder.pp(name));
        let linear = |from, to, name| linear(from, to, builder.pp(name));
        Ok(Self {
            conv1: conv(3, 6, "conv1")?,
            conv2: conv(6, 16, "conv2")?,
            fc1: linear(16 * 5 * 5, 120, "fc1")?,
            fc2: linear(120, 84, "fc2")?,
            fc3: linear(84, Self::CLASSES, "fc3")?,
        })
    }
}

impl Module for ConvNet {
    /// # Shapes
    /// (batch, 3, 32, 32) to (batch, 10).
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = max_pool2d(&relu(&conv2d(x, &self.conv1)?)?, (2, 2))?; // (batch, 6, 14, 14)
        let x = max_pool2d(&relu(&conv2d(&x, &self.conv2)?)?, (2, 2))?; // (batch, 16, 5, 5)
        let x = x.flatten(1, D::Minus1)?;
        let x = relu(&self.fc1.forward(&x)?)?;
        let x = relu(&self.fc2.forward(&x)?)?;
        self.fc3.forward(&x)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::VarMap;

    use super::*;

    #[test]
    fn every_parameter_gets_a_gradient() -> Result<()> {
        let vars = VarMap::new();
        let net = ConvNet::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
        let x = Tensor::randn(0f32, 1., (3, 3, 32, 32), &Device::Cpu)?;
        let grads = net.forward(&x)?.sqr()?.sum_all()?.backward()?;
        let vars = vars.data().lock().unwrap();
        assert_eq!(vars.len(), 10);
        for (name, var) in vars.iter() {
            let gradient = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
            assert_eq!(gradient.dims(), var.dims());
            assert!(gradient.abs()?.sum_all()?.to_scalar::<f32>()? > 0.0, "{name}");
        }
        Ok(())
    }
}
