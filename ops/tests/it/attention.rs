//! Attention against PyTorch's `scaled_dot_product_attention`.

use candle_core::{DType, Device, Result, Tensor, Var};
use ops::{AttentionConfig, AttentionMask, attention, attention_with_key_mask};
use serde_json::Value;

fn numbers<T: From<f32>>(value: &Value) -> Vec<T> {
    value.as_array().unwrap().iter().map(|x| (x.as_f64().unwrap() as f32).into()).collect()
}

fn gap(got: &Tensor, expected: &Value) -> Result<f64> {
    let expected = Tensor::from_vec(numbers::<f64>(expected), got.shape(), &Device::Cpu)?;
    (got.to_dtype(DType::F64)? - expected)?.abs()?.max_all()?.to_scalar()
}

#[test]
fn values_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/attention.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 28);
    for case in cases {
        let sizes: Vec<usize> = numbers::<f64>(&case["sizes"]).iter().map(|&x| x as usize).collect();
        let &[batch, queries, keys, heads, kv_heads, width] = &sizes[..] else { panic!("{sizes:?}") };
        let mask = match case["mask"].as_str().unwrap() {
            "full" => AttentionMask::Full,
            "causal" => AttentionMask::Causal,
            "anti_causal" => AttentionMask::AntiCausal,
            _ => AttentionMask::SlidingWindow(case["window"].as_u64().unwrap() as usize),
        };
        let config = AttentionConfig { num_kv_heads: Some(kv_heads), ..AttentionConfig::new(heads, mask) };
        let shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)];
        let vars = shapes.iter().zip(case["inputs"].as_array().unwrap()).map(|(&(len, heads), x)| {
            let x = Tensor::from_vec(numbers::<f32>(x), (batch, len, heads * width), &Device::Cpu)?;
            Var::from_tensor(&x)
        });
        let vars: Vec<Var> = vars.collect::<Result<_>>()?;
        let [q, k, v] = &vars[..] else { unreachable!() };
        let y = match case["padding"].is_null() {
            true => attention(q, k, v, &config)?,
            false => {
                let seen: Vec<u8> = numbers::<f64>(&case["padding"]).iter().map(|&x| x as u8).collect();
                let seen = Tensor::from_vec(seen, (batch, keys), &Device::Cpu)?;
                attention_with_key_mask(q, k, v, &seen, &config)?
            }
        };
        let what = format!("{sizes:?}, {mask:?}, padding {}", case["padding"]);
        let found = gap(&y, &case["result"])?;
        assert!(found < 2e-6, "{what}: {found}");
        let count = y.elem_count();
        let outer = (0..count).map(|at| at as f32 * 2.0 / (count - 1) as f32 - 1.0).collect::<Vec<_>>();
        let outer = Tensor::from_vec(outer, y.shape(), &Device::Cpu)?;
        let grads = (y * outer)?.sum_all()?.backward()?;
        for (var, expected) in vars.iter().zip(case["gradients"].as_array().unwrap()) {
            let found = gap(grads.get(var).unwrap(), expected)?;
            assert!(found < 1e-5, "{what}: a gradient is {found} off");
        }
    }
    Ok(())
}

/// In 16 bits the result and the gradients are those of f32 for the same numbers. What the products are given, the weights of the
/// values and the gradients of the scores, is rounded, and so is what they give: three roundings.
#[test]
fn half_types_are_near_f32() -> Result<()> {
    let masks = [AttentionMask::Full, AttentionMask::Causal, AttentionMask::SlidingWindow(5)];
    let mut generator = sampler::Generator::new(1);
    let mut random = |len: usize, width: usize| {
        let numbers = generator.normal(2 * len * width, 0.0, 1.0).unwrap();
        Tensor::from_vec(numbers, (2, len, width), &Device::Cpu)?.to_dtype(DType::F32)
    };
    for (dtype, unit) in [(DType::BF16, 1.0 / 256.0), (DType::F16, 1.0 / 2048.0)] {
        for (mask, len) in masks.into_iter().flat_map(|mask| [(mask, 7), (mask, 70)]) {
            let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, mask) };
            let given = [random(len, 32)?, random(len, 16)?, random(len, 16)?, random(len, 32)?];
            let results = |dtype_of_run: DType| -> Result<Vec<Tensor>> {
                let rounded = given.iter().map(|x| x.to_dtype(dtype)?.to_dtype(dtype_of_run));
                let rounded = rounded.collect::<Result<Vec<_>>>()?;
                let vars = rounded[..3].iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
                let y = attention(&vars[0], &vars[1], &vars[2], &config)?;
                let grads = (&y * &rounded[3])?.to_dtype(DType::F32)?.sum_all()?.backward()?;
                let gradients = vars.iter().map(|var| grads.get(var).unwrap().clone());
                Ok(std::iter::once(y).chain(gradients).collect())
            };
            for (half, full) in results(dtype)?.iter().zip(results(DType::F32)?) {
                assert_eq!(half.dtype(), dtype);
                let gap = (half.to_dtype(DType::F32)? - &full)?.abs()?.max_all()?.to_scalar::<f32>()?;
                let most = full.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(gap < 3.0 * unit * most, "{dtype:?}, {mask:?}, {len}: {gap} of {most}");
            }
        }
    }
    Ok(())
}
