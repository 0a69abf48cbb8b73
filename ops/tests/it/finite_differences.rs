//! Gradients of the fused operations against finite differences in f64, for random shapes and layouts.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Conv2d, Conv2dConfig};
use ops::{
    AttentionConfig, AttentionMask, Gate, LayerNorm, LinearCrossEntropyConfig, RmsNorm, Rotary, RotaryConfig,
    RotaryLayout, attention, attention_with_key_mask, conv2d, cross_entropy, linear_cross_entropy,
    log_softmax, softmax,
};
use proptest::prelude::*;

const STEP: f64 = 1e-5;

/// The variable as an operation may receive it: contiguous, transposed, or with a storage offset.
fn view(var: &Tensor, layout: u8) -> Result<Tensor> {
    match layout {
        0 => Ok(var.clone()),
        1 => var.t(),
        _ => var.narrow(1, 1, var.dim(1)? - 1),
    }
}

/// Compares the gradient of `f` with its finite difference along each element of each variable.
fn check(vars: &[Var], f: impl Fn() -> Result<Tensor>) -> Result<()> {
    let grads = f()?.backward()?;
    for var in vars {
        let gradient = grads.get(var).unwrap().flatten_all()?.to_vec1::<f64>()?;
        let start = var.as_detached_tensor().copy()?;
        let numbers = start.flatten_all()?.to_vec1::<f64>()?;
        for (index, gradient) in gradient.into_iter().enumerate() {
            let at = |by: f64| {
                let mut moved = numbers.clone();
                moved[index] += by;
                var.set(&Tensor::from_vec(moved, var.shape(), &Device::Cpu)?)?;
                f()?.to_scalar::<f64>()
            };
            let slope = (at(STEP)? - at(-STEP)?) / (2.0 * STEP);
            assert!(
                (slope - gradient).abs() < 1e-6 * slope.abs().max(1.0),
                "{index}: {gradient} for {slope}"
            );
        }
        var.set(&start)?;
    }
    Ok(())
}

/// Random numbers from a seed.
fn numbers(shape: (usize, usize), seed: u64) -> Result<Tensor> {
    let values = sampler::Generator::new(seed).normal(shape.0 * shape.1, 0.0, 1.0).unwrap();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(DType::F64)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_slopes(rows in 1usize..5, columns in 2usize..20, layout in 0u8..3, seed in 0u64..1000) {
        let run = || -> Result<()> {
            let x = Var::from_tensor(&numbers((rows, columns), seed)?)?;
            let (rows, width) = view(&x, layout)?.dims2()?;
            let outer = numbers((rows, width), seed + 1)?;
            let vars = [x.clone()];
            check(&vars, || (softmax(&view(&x, layout)?)? * &outer)?.sum_all())?;
            check(&vars, || (log_softmax(&view(&x, layout)?)? * &outer)?.sum_all())?;
            let targets: Vec<i64> = (0..rows).map(|row| if row == 1 { -1 } else { (row % width) as i64 }).collect();
            let targets = Tensor::from_vec(targets, rows, &Device::Cpu)?;
            check(&vars, || cross_entropy(&view(&x, layout)?, &targets, Some(-1))? * 2.0)?;
            // A large eps, since the slope near a constant row changes too fast for finite differences.
            let parameter = |seed| Var::from_tensor(&numbers((1, width), seed)?.squeeze(0)?);
            let (weight, bias) = (parameter(seed + 2)?, parameter(seed + 3)?);
            let norm = LayerNorm::new(weight.as_tensor().clone(), bias.as_tensor().clone(), 0.1);
            check(&[x.clone(), weight, bias], || (norm.forward(&view(&x, layout)?)? * &outer)?.sum_all())
        };
        run().unwrap();
    }

    #[test]
    fn gradients_of_what_llama_is_made_of_are_slopes(
        (rows, columns) in (2usize..5, 2usize..20),
        layout in 0u8..3,
        smoothing in 0u8..3,
        chunk in 1usize..5,
        seed in 0u64..1000,
    ) {
        let run = || -> Result<()> {
            let x = Var::from_tensor(&numbers((rows, columns), seed)?)?;
            let (rows, width) = view(&x, layout)?.dims2()?;
            let outer = numbers((rows, width), seed + 1)?;
            let other = |shape, seed| Var::from_tensor(&numbers(shape, seed)?);
            // A large eps, since the slope near a row of zeros changes too fast for finite differences.
            let weight = Var::from_tensor(&numbers((1, width), seed + 2)?.squeeze(0)?)?;
            let norm = RmsNorm::new(weight.as_tensor().clone(), 0.1);
            check(&[x.clone(), weight], || (norm.forward(&view(&x, layout)?)? * &outer)?.sum_all())?;
            let up = other((rows, width), seed + 3)?;
            for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
                let gated = || (gate.apply(&view(&x, layout)?, &up)? * &outer)?.sum_all();
                check(&[x.clone(), up.clone()], gated)?;
            }
            for layout in [RotaryLayout::HalfSplit, RotaryLayout::Interleaved] {
                let rotary = Rotary::new(&RotaryConfig { layout, ..RotaryConfig::new(4, 24) }, &Device::Cpu)?;
                let (x, outer) = (other((rows, 8), seed + 4)?, numbers((rows, 8), seed + 5)?);
                check(std::slice::from_ref(&x), || (rotary.apply(&x, 4)? * &outer)?.sum_all())?;
            }
            let targets = (0..rows).map(|row| if row == 1 { -100 } else { (row % 3) as i64 });
            let targets = Tensor::from_iter(targets, &Device::Cpu)?;
            let label_smoothing = f64::from(smoothing) * 0.5;
            let config = LinearCrossEntropyConfig { label_smoothing, chunk_rows: Some(chunk), ..Default::default() };
            let (weight, bias) = (other((3, width), seed + 6)?, other((1, 3), seed + 7)?);
            let loss = || {
                linear_cross_entropy(&view(&x, layout)?, &weight, Some(&bias.squeeze(0)?), &targets, &config)
            };
            check(&[x.clone(), weight.clone(), bias.clone()], || loss()? * 2.0)
        };
        run().unwrap();
    }

    #[test]
    fn gradients_of_attention_are_slopes(
        (batch, queries, keys) in (1usize..3, 1usize..5, 1usize..5),
        (kv_heads, group, dims) in (1usize..3, 1usize..3, 1usize..4),
        (mask, window) in (0usize..4, 1usize..5),
        seen in proptest::option::of(proptest::collection::vec(0u8..2, 8)),
        seed in 0u64..1000,
    ) {
        let masks = [
            AttentionMask::Full,
            AttentionMask::Causal,
            AttentionMask::AntiCausal,
            AttentionMask::SlidingWindow(window),
        ];
        // Masks by position are of as many queries as keys.
        let keys = if mask == 0 { keys } else { queries };
        let heads = kv_heads * group;
        let config =
            AttentionConfig { num_kv_heads: Some(kv_heads), ..AttentionConfig::new(heads, masks[mask]) };
        let run = || -> Result<()> {
            let var = |len, heads, seed| {
                Var::from_tensor(&numbers((batch * len, heads * dims), seed)?.reshape((batch, len, heads * dims))?)
            };
            let (q, outer) = (var(queries, heads, seed)?, var(queries, heads, seed + 1)?);
            let (k, v) = (var(keys, kv_heads, seed + 2)?, var(keys, kv_heads, seed + 3)?);
            let seen = seen.as_ref().map(|seen| {
                Tensor::from_slice(&seen[..batch * keys], (batch, keys), &Device::Cpu)
            });
            let seen = seen.transpose()?;
            let attended = || match &seen {
                Some(seen) => attention_with_key_mask(&q, &k, &v, seen, &config),
                None => attention(&q, &k, &v, &config),
            };
            let mixed = || (attended()? * outer.as_detached_tensor())?.sum_all();
            check(&[q.clone(), k.clone(), v.clone()], mixed)
        };
        run().unwrap();
    }

    #[test]
    fn gradients_of_a_convolution_are_slopes(
        (channels, out) in (1usize..3, 1usize..3),
        (height, width) in (1usize..6, 1usize..6),
        (rows, columns) in (1usize..4, 1usize..4),
        (stride, padding) in (1usize..4, 0usize..3),
        seed in 0u64..1000,
    ) {
        if height + 2 * padding < rows || width + 2 * padding < columns {
            return Ok(());
        }
        let run = || -> Result<()> {
            let var = |shape: &[usize], seed| {
                Var::from_tensor(&numbers((1, shape.iter().product()), seed)?.reshape(shape)?)
            };
            let x = var(&[2, channels, height, width], seed)?;
            let (weight, bias) = (var(&[out, channels, rows, columns], seed + 1)?, var(&[out], seed + 2)?);
            let config = Conv2dConfig { stride, padding, ..Conv2dConfig::default() };
            let layer = Conv2d::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), config);
            check(&[x.clone(), weight, bias], || conv2d(&x, &layer)?.sqr()?.sum_all())
        };
        run().unwrap();
    }
}
