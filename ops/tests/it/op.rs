//! Layer norm, softmax, losses, activations and embedding against PyTorch, and their handling of invalid input.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use ops::{LayerNorm, cross_entropy, embedding, gelu, layer_norm, log_softmax, mse, relu, softmax};
use serde_json::Value;

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn assert_close(got: &Tensor, expected: &[f64], tolerance: f64, least: f64, what: &str) -> Result<()> {
    let got = got.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    assert_eq!(got.len(), expected.len(), "{what}");
    // Relative to the largest number, since a small result may be a difference of numbers of that size.
    let size = expected.iter().fold(0f64, |size, x| size.max(x.abs())).max(least);
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance * size, "{what}[{index}]: {got} for {expected}");
    }
    Ok(())
}

#[test]
fn values_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/op.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 90);
    for case in cases {
        let (dtype, tolerance) =
            if case["dtype"] == "float64" { (DType::F64, 1e-13) } else { (DType::F32, 1e-6) };
        let shape: Vec<usize> = floats(&case["shape"]).iter().map(|&x| x as usize).collect();
        let (rows, last) = shape.split_at(shape.len() - 1);
        // A row of one number equals its mean: PyTorch's result is a rounding error, multiplied by 1 / sqrt(eps).
        let least = if last == [1] { 316.0 } else { 1e-3 };
        let what = format!("{} of {shape:?} in {dtype:?}", case["kind"]);
        let vars = case["inputs"].as_array().unwrap().iter().enumerate().map(|(index, numbers)| {
            let shape = if index == 0 || case["kind"] == "mse" { &shape[..] } else { last };
            Var::from_tensor(&Tensor::from_vec(floats(numbers), shape, &Device::Cpu)?.to_dtype(dtype)?)
        });
        let vars: Vec<Var> = vars.collect::<Result<_>>()?;
        let x = vars[0].as_tensor();
        let y = match case["kind"].as_str().unwrap() {
            "layer_norm" => {
                LayerNorm::new(vars[1].as_tensor().clone(), vars[2].as_tensor().clone(), 1e-5).forward(x)?
            }
            "softmax" => softmax(x)?,
            "log_softmax" => log_softmax(x)?,
            "gelu" => gelu(x)?,
            "relu" => relu(x)?,
            "mse" => mse(x, &vars[1])?,
            "embedding" => {
                let rows: Vec<i64> = floats(&case["rows"]).iter().map(|&x| x as i64).collect();
                embedding(x, &Tensor::from_vec(rows, (2, 3), &Device::Cpu)?)?
            }
            _ => {
                let targets: Vec<i64> = floats(&case["targets"]).iter().map(|&x| x as i64).collect();
                cross_entropy(x, &Tensor::from_vec(targets, rows, &Device::Cpu)?, Some(-100))?
            }
        };
        assert_close(&y, &floats(&case["result"]), tolerance, least, &what)?;
        let outer = Tensor::from_vec(floats(&case["outer"]), y.shape(), &Device::Cpu)?.to_dtype(dtype)?;
        let grads = (y * outer)?.sum_all()?.backward()?;
        for (index, (var, expected)) in vars.iter().zip(case["gradients"].as_array().unwrap()).enumerate() {
            let what = format!("{what}, gradient {index}");
            assert_close(grads.get(var).unwrap(), &floats(expected), tolerance, least, &what)?;
        }
    }
    Ok(())
}

#[test]
fn half_types_are_computed_in_f32() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let x = Var::from_tensor(&Tensor::randn(0f32, 1., (3, 8), &Device::Cpu)?.to_dtype(dtype)?)?;
        let wide = x.to_dtype(DType::F32)?;
        let targets = Tensor::new(&[1u32, 0, 7], &Device::Cpu)?;
        let loss = cross_entropy(&x, &targets, None)?;
        assert_eq!(loss.dtype(), dtype);
        let expected = cross_entropy(&wide, &targets, None)?.to_dtype(dtype)?.to_dtype(DType::F32)?;
        assert_eq!(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?, expected.to_scalar::<f32>()?);
        let norm = LayerNorm::new(
            Tensor::ones(8, dtype, &Device::Cpu)?,
            Tensor::zeros(8, dtype, &Device::Cpu)?,
            1e-5,
        );
        for y in [softmax(&x)?, log_softmax(&x)?, norm.forward(&x)?, loss] {
            assert_eq!(y.dtype(), dtype);
            assert_eq!(y.sqr()?.sum_all()?.backward()?.get(&x).unwrap().dtype(), dtype);
        }
    }
    Ok(())
}

#[test]
fn extreme_logits_are_no_nan() -> Result<()> {
    let x = Var::new(&[[1e4f32, -1e4, 0.], [-1e4, -1e4, -1e4], [f32::MIN, f32::MAX / 4., 0.]], &Device::Cpu)?;
    let targets = Tensor::new(&[1u32, 0, 1], &Device::Cpu)?;
    let norm = LayerNorm::new(
        Tensor::ones(3, DType::F32, &Device::Cpu)?,
        Tensor::zeros(3, DType::F32, &Device::Cpu)?,
        1e-5,
    );
    let small = x.narrow(0, 0, 2)?;
    for y in [softmax(&x)?, log_softmax(&small)?, cross_entropy(&x, &targets, None)?, norm.forward(&small)?] {
        let grads = y.sum_all()?.backward()?;
        for t in [&y, grads.get(&x).unwrap()] {
            assert!(t.flatten_all()?.to_vec1::<f32>()?.iter().all(|x| x.is_finite()), "{y} {t}");
        }
    }
    Ok(())
}

#[test]
fn rows_that_make_no_sense_are_nan_as_in_pytorch() -> Result<()> {
    let rows = [[f32::NAN, 0.], [f32::INFINITY, 0.], [f32::NEG_INFINITY, f32::NEG_INFINITY]];
    let x = Tensor::new(&rows, &Device::Cpu)?;
    for y in [softmax(&x)?, log_softmax(&x)?] {
        assert!(y.to_vec2::<f32>()?.iter().all(|row| row.iter().any(|x| x.is_nan())), "{y}");
    }
    let nothing = cross_entropy(&x, &Tensor::new(&[-1i64, -1, -1], &Device::Cpu)?, Some(-1))?;
    assert!(nothing.to_scalar::<f32>()?.is_nan());
    Ok(())
}

#[test]
fn ignored_rows_count_nothing_whatever_they_hold() -> Result<()> {
    let x = Var::new(&[[f32::NAN, f32::INFINITY], [0., 0.]], &Device::Cpu)?;
    let loss = cross_entropy(&x, &Tensor::new(&[7u32, 1], &Device::Cpu)?, Some(7))?;
    assert_eq!(loss.to_scalar::<f32>()?, 2f32.ln());
    assert_eq!(loss.backward()?.get(&x).unwrap().to_vec2::<f32>()?, [[0., 0.], [0.5, -0.5]]);
    Ok(())
}

#[test]
fn backward_may_run_twice() -> Result<()> {
    let x = Var::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
    let loss = cross_entropy(&x, &Tensor::new(&[0u32], &Device::Cpu)?, None)?;
    let (a, b) = (loss.backward()?, (&loss * 2.)?.backward()?);
    let twice = (a.get(&x).unwrap() * 2.)?.to_vec2::<f32>()?;
    assert_eq!(b.get(&x).unwrap().to_vec2::<f32>()?, twice);
    Ok(())
}

#[test]
fn empty_tensors_stay_empty() -> Result<()> {
    let x = Tensor::zeros((0, 3), DType::F32, &Device::Cpu)?;
    assert_eq!(softmax(&x)?.dims(), [0, 3]);
    let norm = LayerNorm::new(
        Tensor::ones(3, DType::F32, &Device::Cpu)?,
        Tensor::zeros(3, DType::F32, &Device::Cpu)?,
        1e-5,
    );
    assert_eq!(norm.forward(&x)?.dims(), [0, 3]);
    assert!(
        cross_entropy(&x, &Tensor::zeros(0, DType::U32, &Device::Cpu)?, None)?.to_scalar::<f32>()?.is_nan()
    );
    assert_eq!(softmax(&Tensor::zeros((2, 0), DType::F32, &Device::Cpu)?)?.dims(), [2, 0]);
    Ok(())
}

#[test]
fn a_model_of_names_and_first_values() -> Result<()> {
    let vars = VarMap::new();
    let norm = layer_norm(3, 1e-5, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("norm1"))?;
    let mut names: Vec<_> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(names, ["norm1.bias", "norm1.weight"]);
    assert_eq!(norm.weight().to_vec1::<f32>()?, [1.; 3]);
    assert_eq!(norm.bias().to_vec1::<f32>()?, [0.; 3]);
    Ok(())
}

#[test]
fn misfits_are_one_clear_line() -> Result<()> {
    let x = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let loss = |targets: &Tensor| cross_entropy(&x, targets, None).unwrap_err().to_string();
    let ones = |size: usize, dtype| Tensor::ones(size, dtype, &Device::Cpu);
    let norm = |weight: Tensor, bias: Tensor| {
        LayerNorm::new(weight, bias, 1e-5).forward(&x).unwrap_err().to_string()
    };
    for (message, parts) in [
        (loss(&Tensor::new(&[0u32, 3], &Device::Cpu)?), ["row 1 is 3", "3 classes"]),
        (loss(&Tensor::new(&[-100i64, 0], &Device::Cpu)?), ["row 0 is -100", "ignore_index"]),
        (loss(&Tensor::new(&[0u32], &Device::Cpu)?), ["[2]", "[1]"]),
        (loss(&Tensor::new(&[0f32, 1.], &Device::Cpu)?), ["targets", "F32"]),
        (norm(ones(2, DType::F32)?, ones(3, DType::F32)?), ["weight", "[3]"]),
        (norm(ones(3, DType::F32)?, ones(3, DType::F64)?), ["bias", "F64"]),
        (softmax(&x.to_dtype(DType::U32)?).unwrap_err().to_string(), ["softmax", "U32"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)) && !message.contains('\n'), "{message}");
    }
    let scalar = Tensor::new(1f32, &Device::Cpu)?;
    assert!(softmax(&scalar).is_err() && cross_entropy(&scalar, &scalar, None).is_err());
    assert!(LayerNorm::new(scalar.clone(), scalar.clone(), 1e-5).forward(&scalar).is_err());
    Ok(())
}
