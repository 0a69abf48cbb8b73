//! Convolution and pooling against PyTorch, and their handling of invalid input.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Conv2d, Conv2dConfig};
use ops::{conv2d, max_pool2d};
use serde_json::Value;

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn sizes(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}

fn assert_close(got: &Tensor, expected: &[f64], tolerance: f64, what: &str) -> Result<()> {
    let got = got.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    assert_eq!(got.len(), expected.len(), "{what}");
    let size = expected.iter().fold(1e-3, |size: f64, x| size.max(x.abs()));
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() <= tolerance * size, "{what}[{index}]: {got} for {expected}");
    }
    Ok(())
}

/// Runs the layer or the pooling of a case on its variables.
fn compute(case: &Value, vars: &[Var]) -> Result<Tensor> {
    let tensor = |index: usize| vars[index].as_tensor().clone();
    if case["kind"] == "max_pool2d" {
        let kernel = sizes(&case["kernel"]);
        return max_pool2d(&tensor(0), (kernel[0], kernel[1]));
    }
    let number = |name: &str| case[name].as_u64().unwrap() as usize;
    let config =
        Conv2dConfig { stride: number("stride"), padding: number("padding"), ..Conv2dConfig::default() };
    conv2d(&tensor(0), &Conv2d::new(tensor(1), Some(tensor(2)), config))
}

#[test]
fn values_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/picture.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-8), (DType::BF16, 2e-2)] {
            let what = format!("{} of {} in {dtype:?}", case["kind"], case["shapes"]);
            let arrays = |name: &str| case[name].as_array().unwrap().iter();
            let vars = arrays("shapes").zip(arrays("inputs")).map(|(shape, numbers)| {
                let tensor = Tensor::from_vec(floats(numbers), sizes(shape), &Device::Cpu)?;
                Var::from_tensor(&tensor.to_dtype(dtype)?)
            });
            let vars: Vec<Var> = vars.collect::<Result<_>>()?;
            let y = compute(case, &vars)?;
            assert_eq!(y.dtype(), dtype);
            let expected = floats(&case["result"]);
            assert_close(&y, &expected, tolerance, &what)?;
            // The same weights as in the script that made the fixture.
            let last = (expected.len() - 1).max(1) as f64;
            let outer = (0..expected.len()).map(|i| 2.0 * i as f64 / last - 1.0).collect::<Vec<_>>();
            let outer = Tensor::from_vec(outer, y.shape(), &Device::Cpu)?.to_dtype(dtype)?;
            let grads = (y * outer)?.sum_all()?.backward()?;
            for (index, (var, expected)) in vars.iter().zip(arrays("gradients")).enumerate() {
                let what = format!("{what}, gradient {index}");
                assert_close(grads.get(var).unwrap(), &floats(expected), tolerance, &what)?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_layer_computes_what_candle_computes() -> Result<()> {
    let device = &Device::Cpu;
    let x = Tensor::randn(0f32, 1., (2, 8, 9, 4), device)?;
    // A transposed view, and layers with and without a bias, with groups, and with dilation.
    let x = x.transpose(1, 3)?;
    let bias = Tensor::randn(0f32, 1., 6, device)?;
    for (bias, groups, dilation) in
        [(None, 1, 1), (Some(bias.clone()), 1, 1), (Some(bias), 2, 1), (None, 1, 2)]
    {
        let weight = Tensor::randn(0f32, 1., (6, 4 / groups, 3, 3), device)?;
        let config = Conv2dConfig { groups, dilation, padding: 1, ..Conv2dConfig::default() };
        let layer = Conv2d::new(weight, bias, config);
        let expected = layer.forward(&x)?.flatten_all()?.to_vec1::<f32>()?;
        let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
        assert_close(&conv2d(&x, &layer)?, &expected, 1e-5, "conv2d")?;
    }
    Ok(())
}

#[test]
fn a_picture_alone_is_computed_as_among_others_to_the_bit() -> Result<()> {
    let x = Tensor::randn(0f32, 1., (7, 3, 12, 12), &Device::Cpu)?;
    let weight = Tensor::randn(0f32, 1., (6, 3, 5, 5), &Device::Cpu)?;
    let layer = Conv2d::new(weight, None, Conv2dConfig::default());
    let bits = |x: &Tensor| -> Result<Vec<u32>> {
        Ok(conv2d(x, &layer)?.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
    };
    let together = bits(&x)?;
    for (picture, expected) in together.chunks(together.len() / 7).enumerate() {
        assert_eq!(bits(&x.narrow(0, picture, 1)?)?, expected);
    }
    Ok(())
}

#[test]
fn pictures_that_do_not_fit_are_errors() -> Result<()> {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
    let layer = |shape: &[usize], stride| {
        let config = Conv2dConfig { stride, ..Conv2dConfig::default() };
        Ok::<_, candle_core::Error>(Conv2d::new(zeros(shape, DType::F32)?, None, config))
    };
    let good = layer(&[4, 3, 5, 5], 1)?;
    for shape in [&[1, 2, 8, 8][..], &[1, 3, 4, 8], &[1, 3, 8, 4], &[3, 8, 8], &[]] {
        let line = conv2d(&zeros(shape, DType::F32)?, &good).unwrap_err().to_string();
        assert!(line.contains("conv2d") && line.contains("[1, 3, 5, 5]"), "{shape:?}: {line}");
    }
    assert!(conv2d(&zeros(&[1, 3, 8, 8], DType::F32)?, &layer(&[4, 3, 5, 5], 0)?).is_err());
    assert!(conv2d(&zeros(&[1, 3, 8, 8], DType::F64)?, &good).unwrap_err().to_string().contains("weight"));
    assert!(conv2d(&zeros(&[1, 3, 8, 8], DType::U8)?, &good).is_err());
    assert_eq!(conv2d(&zeros(&[0, 3, 8, 8], DType::F32)?, &good)?.dims(), [0, 4, 4, 4]);
    for (shape, kernel) in [(&[1, 8][..], (2, 2)), (&[8], (1, 1)), (&[], (1, 1)), (&[4, 4], (0, 1))] {
        assert!(max_pool2d(&zeros(shape, DType::F32)?, kernel).is_err(), "{shape:?}");
    }
    assert!(max_pool2d(&zeros(&[4, 4], DType::I64)?, (2, 2)).is_err());
    Ok(())
}

#[test]
fn a_window_with_a_nan_is_nan() -> Result<()> {
    let x = Var::new(&[[f32::NAN, 1., 2., 3.], [0., f32::NAN, 4., 1.]], &Device::Cpu)?;
    let y = max_pool2d(&x, (2, 2))?;
    let row = y.flatten_all()?.to_vec1::<f32>()?;
    assert!(row[0].is_nan() && row[1] == 4.);
    let grads = y.sum_all()?.backward()?;
    assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[0., 0., 0., 0.], [0., 1., 1., 0.]]);
    Ok(())
}
