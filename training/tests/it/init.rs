//! [`TorchInit`] against PyTorch's layers.

use candle_core::{DType, Device, Result};
use candle_nn::{
    Conv1dConfig, Conv2dConfig, ConvTranspose2dConfig, Init, LayerNormConfig, VarBuilder, VarMap,
    conv_transpose2d, conv1d, conv2d, embedding, layer_norm, linear, linear_no_bias,
};
use sampler::{Generator, SharedGenerator};
use serde_json::Value;
use training::TorchInit;

fn start(seed: u64, dtype: DType) -> (SharedGenerator, VarMap, VarBuilder<'static>) {
    let generator = SharedGenerator::from(Generator::new(seed));
    let vars = VarMap::new();
    let builder = TorchInit::var_builder(&generator, &vars, dtype, &Device::Cpu);
    (generator, vars, builder)
}

#[test]
fn every_layer_starts_as_in_pytorch() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/init.json")).unwrap();
    let (generator, vars, vb) = start(fixture["seed"].as_u64().unwrap(), DType::F32);
    embedding(5, 4, vb.pp("embedding"))?;
    linear(7, 3, vb.pp("fc1"))?;
    layer_norm(3, LayerNormConfig::default(), vb.pp("norm"))?;
    conv2d(3, 4, 5, Conv2dConfig::default(), vb.pp("conv1"))?;
    conv2d(4, 6, 3, Conv2dConfig { groups: 2, ..Default::default() }, vb.pp("conv2"))?;
    conv1d(2, 3, 4, Conv1dConfig::default(), vb.pp("line"))?;
    linear_no_bias(3, 2, vb.pp("bare"))?;
    conv_transpose2d(2, 3, 2, ConvTranspose2dConfig::default(), vb.pp("up"))?;
    linear(1, 1, vb.pp("one"))?;

    let vars = vars.data().lock().unwrap();
    let state = fixture["state"].as_object().unwrap();
    assert_eq!(vars.len(), state.len());
    for (name, expected) in state {
        let var = vars.get(name).unwrap_or_else(|| panic!("no {name}"));
        let shape: Vec<usize> = serde_json::from_value(expected["shape"].clone()).unwrap();
        assert_eq!(var.dims(), shape, "{name}");
        let values: Vec<f32> = serde_json::from_value(expected["values"].clone()).unwrap();
        for (got, expected) in var.flatten_all()?.to_vec1::<f32>()?.into_iter().zip(values) {
            assert_eq!(got.to_bits(), expected.to_bits(), "{name}: {got} for {expected}");
        }
    }
    // The generator has drawn as many numbers as PyTorch's.
    assert_eq!(generator.with(|g| g.next_f32()), fixture["next_rand"].as_f64().unwrap() as f32);
    Ok(())
}

#[test]
fn other_dtypes_are_cast_from_the_same_numbers() -> Result<()> {
    let (_, _, vb) = start(1, DType::F32);
    let wanted =
        linear(4, 2, vb.pp("fc"))?.weight().to_dtype(DType::BF16)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let (_, _, vb) = start(1, DType::BF16);
    let got = linear(4, 2, vb.pp("fc"))?;
    assert_eq!(got.weight().dtype(), DType::BF16);
    assert_eq!(got.weight().to_dtype(DType::F32)?.to_vec2::<f32>()?, wanted);
    Ok(())
}

#[test]
fn tied_weights_are_one_variable() -> Result<()> {
    let (generator, vars, vb) = start(1, DType::F32);
    let first = vb.get_with_hints((3, 2), "w", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    let before = generator.with(|g| g.clone());
    let second = vb.get_with_hints((3, 2), "w", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
    assert_eq!(first.id(), second.id());
    assert_eq!(generator.with(|g| g.clone()), before);
    assert_eq!(vars.all_vars().len(), 1);
    assert!(vb.contains_tensor("w") && !vb.contains_tensor("v"));
    assert_eq!(vb.get_unchecked("w")?.id(), first.id());
    Ok(())
}

#[test]
fn a_variable_is_trainable() -> Result<()> {
    let (_, vars, vb) = start(1, DType::F32);
    let layer = linear(2, 1, vb)?;
    let grads = layer.weight().sum_all()?.backward()?;
    let data = vars.data().lock().unwrap();
    assert!(grads.get(&data["weight"]).is_some());
    Ok(())
}

#[test]
fn misfits_are_one_clear_line() -> Result<()> {
    let (_, _, vb) = start(1, DType::F32);
    linear(2, 3, vb.pp("fc"))?;
    for (error, words) in [
        (linear(4, 3, vb.pp("fc")).unwrap_err(), ["`fc.weight`", "[3, 2]", "[3, 4]"]),
        (vb.to_dtype(DType::F64).get((3, 2), "fc.weight").unwrap_err(), ["`fc.weight`", "F32", "F64"]),
        (vb.get_unchecked("nothing").unwrap_err(), ["`nothing`", "does not exist", "shape"]),
        (
            vb.get_with_hints(3, "w", candle_nn::init::DEFAULT_KAIMING_NORMAL).unwrap_err(),
            ["`w`", "[3]", "two dimensions"],
        ),
        (vb.get_with_hints(3, "u", Init::Uniform { lo: 1., up: 0. }).unwrap_err(), ["uniform", "1", "0"]),
    ] {
        let line = error.to_string();
        assert!(words.iter().all(|word| line.contains(word)) && !line.contains('\n'), "{line}");
    }
    Ok(())
}

#[test]
fn other_hints_are_taken_at_their_word() -> Result<()> {
    let (_, _, vb) = start(7, DType::F32);
    assert_eq!(vb.get_with_hints(2, "c", Init::Const(2.5))?.to_vec1::<f32>()?, [2.5, 2.5]);
    let uniform = vb.get_with_hints(1000, "u", Init::Uniform { lo: 3., up: 4. })?.to_vec1::<f32>()?;
    assert!(uniform.iter().all(|x| (3. ..=4.).contains(x)));
    let normal = vb.get_with_hints(10_000, "n", Init::Randn { mean: 5., stdev: 0.1 })?;
    assert!((normal.mean_all()?.to_scalar::<f32>()? - 5.).abs() < 0.01);
    let relu = vb.get_with_hints((100, 100), "k", candle_nn::init::DEFAULT_KAIMING_UNIFORM)?;
    let bound = 6f32.sqrt() / 10.;
    let largest = relu.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(largest <= bound && largest > 0.99 * bound, "{largest} {bound}");
    Ok(())
}
