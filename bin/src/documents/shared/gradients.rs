//! Every parameter of every model gets a gradient: some of candle's fused operations have none, without any error.
#![allow(clippy::unwrap_used)]

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder, VarMap, linear, loss};
use ops::{AttentionMask, cross_entropy};
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

use crate::documents::from_scratch_tutorial::model::SimpleModel;
use crate::documents::handbook::cifar10::model::ConvNet;
use crate::documents::handbook::ddp_mlp::model::Mlp;
use crate::documents::shared::transformer::{Transformer, TransformerConfig};

/// Returns the names of the parameters that get no gradient from `loss`, or only zeros.
fn without_gradient(
    loss: impl FnOnce(VarBuilder<'static>, &SharedGenerator) -> Result<Tensor>,
) -> Vec<String> {
    let generator = SharedGenerator::from(Generator::new(42));
    let vars = VarMap::new();
    let builder = TorchInit::var_builder(&generator, &vars, DType::F32, &Device::Cpu);
    let grads = loss(builder, &generator).unwrap().backward().unwrap();
    let size = |grad: &Tensor| grad.abs()?.sum_all()?.to_scalar::<f32>();
    let reached = |var: &Var| grads.get(var).is_some_and(|grad| size(grad).unwrap() > 0.0);
    let all = training::named_vars(&vars);
    assert!(!all.is_empty());
    all.into_iter().filter(|(_, var)| !reached(var)).map(|(name, _)| name).collect()
}

fn random(generator: &SharedGenerator, shape: &[usize]) -> Result<Tensor> {
    let values = generator.with(|generator| generator.randn(shape.iter().product()));
    Tensor::from_vec(values.unwrap(), shape, &Device::Cpu)
}

fn classes(len: u32, classes: u32) -> Result<Tensor> {
    Tensor::from_vec((0..len).map(|sample| sample % classes).collect(), len as usize, &Device::Cpu)
}

#[test]
fn of_the_linear_models() {
    let simple = without_gradient(|builder, generator| {
        let model = SimpleModel::new(builder)?;
        loss::mse(&model.forward(&random(generator, &[8, 1])?)?, &random(generator, &[8, 1])?)
    });
    assert_eq!(simple, [""; 0], "ddp-linear");
    let trainer = without_gradient(|builder, generator| {
        let model = linear(20, 1, builder)?;
        loss::mse(&model.forward(&random(generator, &[8, 20])?)?, &random(generator, &[8, 1])?)
    });
    assert_eq!(trainer, [""; 0], "ddp-trainer");
}

#[test]
fn of_the_classifiers() {
    let mlp = without_gradient(|builder, generator| {
        let model = Mlp::new(builder)?;
        cross_entropy(&model.forward(&random(generator, &[32, 10])?)?, &classes(32, 2)?, None)
    });
    assert_eq!(mlp, [""; 0], "ddp-mlp");
    let net = without_gradient(|builder, generator| {
        let model = ConvNet::new(builder)?;
        cross_entropy(&model.forward(&random(generator, &[4, 3, 32, 32])?)?, &classes(4, 10)?, None)
    });
    assert_eq!(net, [""; 0], "cifar10");
}

#[test]
fn of_the_transformer_with_each_mask() {
    for mask in [AttentionMask::Full, AttentionMask::Causal, AttentionMask::AntiCausal] {
        for dropout in [0.0, 0.1] {
            let config = TransformerConfig {
                vocab_size: 20,
                d_model: 8,
                num_heads: 2,
                d_ff: 16,
                num_layers: 2,
                max_len: 12,
                mask,
                dropout,
            };
            let without = without_gradient(|builder, generator| {
                let model = Transformer::new(builder, &config, generator)?;
                let tokens = Tensor::new(&[[1u32, 2, 3, 4, 5], [6, 7, 8, 9, 10]], &Device::Cpu)?;
                cross_entropy(&model.forward_t(&tokens, true)?, &tokens, None)
            });
            // The table of positions is not a parameter.
            assert_eq!(without, ["pos_encoding.pe"], "{mask:?}, dropout {dropout}");
        }
    }
}

#[test]
fn a_parameter_without_one_is_found() {
    let without = without_gradient(|builder, generator| {
        let (used, _unused) = (linear(3, 2, builder.pp("used"))?, linear(3, 2, builder.pp("unused"))?);
        // Like candle's fused softmax: values are passed on, gradients are not.
        let cut = linear(3, 3, builder.pp("cut"))?.forward(&random(generator, &[4, 3])?)?.detach();
        used.forward(&cut)?.sqr()?.sum_all()
    });
    assert_eq!(without, ["cut.bias", "cut.weight", "unused.bias", "unused.weight"]);
}
