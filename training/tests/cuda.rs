//! The operations on a CUDA device against those on a CPU: results, gradients, steps of Adam, norms.
#![allow(clippy::unwrap_used, reason = "these are tests")]

use std::mem::ManuallyDrop;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{ModuleT, Optimizer};
use ops::{
    AttentionConfig, AttentionMask, Documents, Dropout, Gate, LayerNorm, Linear, LinearCrossEntropyConfig,
    RmsNorm, Rotary, RotaryConfig, RotaryLayout, RowContext, RowKeys, attention, attention_with_key_mask,
    columns, cross_entropy, embedding, linear_cross_entropy,
};
use sampler::Generator;
use training::{Adam, AdamConfig};

const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::BF16, 0.03), (DType::F16, 0.004)];

fn device() -> Device {
    thread_local! {
        // Not dropped at the end of the thread, which may come after that of the process, when CUDA is gone.
        static DEVICE: ManuallyDrop<Device> = ManuallyDrop::new(Device::new_cuda(0).unwrap());
    }
    DEVICE.with(|device| Device::clone(device))
}

/// Numbers that are the same in every run.
fn drawn(shape: &[usize], seed: u64) -> Tensor {
    let count = shape.iter().product::<usize>();
    let numbers = (0..count as u64).map(|i| {
        let bits = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed.wrapping_mul(0xd1b5_4a32_d192_ed03);
        let bits = (bits ^ (bits >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((bits >> 40) as f32 / (1 << 24) as f32 - 0.5) * 3.0
    });
    Tensor::from_vec(numbers.collect(), shape, &Device::Cpu).unwrap()
}

/// The largest difference, relative to the largest number or to 1.
fn gap(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    let [a, b] = [a, b].map(|x| x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all());
    let (a, b) = (a?, b?);
    if a.elem_count() == 0 {
        return Ok(0.0);
    }
    let size = b.abs()?.max(0)?.to_scalar::<f64>()?.max(1.0);
    Ok((a - b)?.abs()?.max(0)?.to_scalar::<f64>()? / size)
}

/// Compares an operation's result and gradients on both devices; on the CPU it has f32, of the numbers that the dtype can hold.
fn compare(what: &str, shapes: &[&[usize]], operation: impl Fn(&[Tensor]) -> Result<Tensor>) {
    for (dtype, most) in DTYPES {
        compare_in(dtype, most, shapes, &operation)
            .unwrap_or_else(|error| panic!("{what}, {dtype:?}: {error}"));
    }
}

fn compare_in(
    dtype: DType,
    most: f64,
    shapes: &[&[usize]],
    operation: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<()> {
    let inputs = shapes.iter().zip(1..).map(|(shape, seed)| drawn(shape, seed).to_dtype(dtype));
    let inputs = inputs.collect::<Result<Vec<_>>>()?;
    let run = |device: &Device, dtype: DType| {
        let var = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?.to_device(device)?);
        let vars = inputs.iter().map(var).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let y = operation(&tensors)?;
        let outer = drawn(y.dims(), 99).to_dtype(y.dtype())?.to_device(device)?;
        let grads = ops::backward(&ops::tape::scalar_with_gradient(&y, outer)?)?;
        let of = |var: &Var| grads.get(var).cloned().ok_or(candle_core::Error::Msg("no gradient".into()));
        let gradients = vars.iter().map(of).collect::<Result<Vec<_>>>()?;
        Ok::<_, candle_core::Error>([vec![y], gradients].concat())
    };
    let (on_cuda, on_cpu) = (run(&device(), dtype)?, run(&Device::Cpu, DType::F32)?);
    for (place, (a, b)) in on_cuda.iter().zip(&on_cpu).enumerate() {
        let gap = gap(a, b)?;
        if gap.is_nan() || gap > most {
            candle_core::bail!("{} differs by {gap:e}", if place == 0 { "the result" } else { "a gradient" });
        }
    }
    Ok(())
}

#[test]
fn norms() {
    for dims in [&[3, 5, 19][..], &[300, 40], &[2, 1000], &[1, 1]] {
        let width = &dims[dims.len() - 1..];
        compare("rms norm", &[dims, width], |t| RmsNorm::new(t[1].clone(), 1e-5).forward(&t[0]));
        compare("layer norm", &[dims, width, width], |t| {
            LayerNorm::new(t[1].clone(), t[2].clone(), 1e-5).forward(&t[0])
        });
    }
    compare("rms norm of heads", &[&[2, 3, 24], &[8]], |t| {
        RmsNorm::new(t[1].clone(), 1e-5).forward_heads(&t[0])
    });
}

#[test]
fn activations() {
    for gate in [Gate::Silu, Gate::Gelu, Gate::GeluTanh] {
        for dims in [&[3, 7][..], &[5, 200]] {
            compare("gated", &[dims, dims], |t| gate.apply(&t[0], &t[1]));
            compare("activation", &[dims], |t| gate.activate(&t[0]));
        }
    }
}

#[test]
fn rotation() {
    for layout in [RotaryLayout::HalfSplit, RotaryLayout::Interleaved] {
        for dims in [&[2, 5, 18][..], &[5, 6], &[2, 3, 5, 6]] {
            compare("rotary", &[dims], |t| {
                let config = RotaryConfig { layout, ..RotaryConfig::new(6, 9) };
                Rotary::new(&config, t[0].device())?.apply(&t[0], 3)
            });
            if dims.len() > 2 {
                compare("rotary within documents", &[dims], |t| {
                    let config = RotaryConfig { layout, ..RotaryConfig::new(6, 9) };
                    let rotary = Rotary::new(&config, t[0].device())?;
                    let documents = Documents::new(vec![vec![2, 4]; dims[0]])?;
                    RowContext { documents: Some(documents), ..RowContext::default() }
                        .scope(|| rotary.apply(&t[0], 3))
                });
            }
        }
    }
}

#[test]
fn products() {
    for dims in [&[5, 4][..], &[2, 3, 4], &[1, 4]] {
        compare("linear", &[dims, &[6, 4], &[6]], |t| Linear::new(t[1].clone(), t[2].clone()).forward(&t[0]));
        compare("linear without bias", &[dims, &[6, 4]], |t| Linear::new(t[1].clone(), None).forward(&t[0]));
    }
}

/// Under `autocast` the products of f32 are those of bf16.
#[test]
fn products_in_bf16() -> Result<()> {
    let [q, kv] = [[2, 7, 24], [2, 7, 12]];
    let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, AttentionMask::Causal) };
    let both =
        |t: &[Tensor]| attention(&t[0], &Linear::new(t[1].clone(), None).forward(&t[0])?, &t[2], &config);
    let in_bf16 = |t: &[Tensor]| ops::autocast(ops::Precision::Bf16, || both(t));
    let shapes = [&q[..], &[12, 24], &kv];
    compare_in(DType::F32, 0.03, &shapes, in_bf16)?;
    let inputs: Vec<Tensor> =
        shapes.iter().zip(1..).map(|(dims, seed)| drawn(dims, seed).to_device(&device()).unwrap()).collect();
    assert!(gap(&both(&inputs)?, &in_bf16(&inputs)?)? > 1e-4);
    Ok(())
}

#[test]
fn rows_and_columns() {
    compare("embedding", &[&[7, 5]], |t| {
        embedding(&t[0], &Tensor::new(&[[1u32, 3, 3], [0, 6, 1]], t[0].device())?)
    });
    for range in [0..6, 0..2, 2..5] {
        compare("columns", &[&[2, 3, 6]], |t| columns(&t[0], range.clone()));
    }
}

#[test]
fn attention_with_every_mask() {
    let masks = [
        AttentionMask::Full,
        AttentionMask::Causal,
        AttentionMask::SlidingWindow(3),
        AttentionMask::SlidingWindow(100),
        AttentionMask::AntiCausal,
    ];
    for mask in masks {
        for (queries, keys) in [(7, 7), (1, 5), (3, 40)] {
            let shapes = [&[2, queries, 4 * 6][..], &[2, keys, 2 * 6], &[2, keys, 2 * 6]];
            let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, mask) };
            compare(&format!("{mask:?}"), &shapes, |t| attention(&t[0], &t[1], &t[2], &config));
            compare(&format!("{mask:?}, some hidden"), &shapes, |t| {
                let seen = (0..2 * keys).map(|key| u8::from(key % 3 != 1)).collect::<Vec<_>>();
                let seen = Tensor::from_vec(seen, (2, keys), t[0].device())?;
                attention_with_key_mask(&t[0], &t[1], &t[2], &seen, &config)
            });
        }
    }
    for (queries, keys) in [(7, 7), (3, 40)] {
        let shapes = [&[2, queries, 4 * 6][..], &[2, keys, 2 * 6], &[2, keys, 2 * 6]];
        for mask in &masks[..4] {
            let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, *mask) };
            let documents = Documents::new([vec![2, 1, 3], vec![keys as u32]]).unwrap();
            compare(&format!("{mask:?}, documents"), &shapes, |t| {
                documents.scope(|| attention(&t[0], &t[1], &t[2], &config))
            });
            compare(&format!("{mask:?}, documents, some hidden"), &shapes, |t| {
                let seen = (0..2 * keys).map(|key| u8::from(key % 3 != 1)).collect::<Vec<_>>();
                let seen = Tensor::from_vec(seen, (2, keys), t[0].device())?;
                documents.scope(|| attention_with_key_mask(&t[0], &t[1], &t[2], &seen, &config))
            });
        }
    }
    // All of the second row's keys are hidden.
    let shape = &[2, 3, 6][..];
    compare("none seen", &[shape; 3], |t| {
        let seen = Tensor::new(&[[1u8, 1, 0], [0, 0, 0]], t[0].device())?;
        attention_with_key_mask(&t[0], &t[1], &t[2], &seen, &AttentionConfig::new(2, AttentionMask::Causal))
    });
}

#[test]
fn losses() {
    let targets = [2i64, -100, 0, 4, 4, -100];
    for chunk_rows in [None, Some(1), Some(4)] {
        for label_smoothing in [0.0, 0.1] {
            let config = LinearCrossEntropyConfig { label_smoothing, chunk_rows, ..Default::default() };
            let of = |t: &[Tensor], bias: Option<&Tensor>| {
                let targets = Tensor::new(&targets, t[0].device())?.reshape((2, 3))?;
                linear_cross_entropy(&t[0], &t[1], bias, &targets, &config)
            };
            compare("loss", &[&[2, 3, 4], &[5, 4]], |t| of(t, None));
            compare("loss with bias", &[&[2, 3, 4], &[5, 4], &[5]], |t| of(t, Some(&t[2])));
        }
    }
}

#[test]
fn losses_of_logits() {
    for ignore_index in [None, Some(3)] {
        compare("cross-entropy", &[&[2, 3, 5]], |t| {
            cross_entropy(&t[0], &Tensor::new(&[[2u32, 3, 0], [4, 3, 1]], t[0].device())?, ignore_index)
        });
    }
}

/// The masks are the CPU's: of one key, and of a key for each row.
#[test]
fn dropout() {
    let q = &[2, 7, 24][..];
    for seed in [1, 2] {
        compare("dropout", &[&[3, 4, 50]], |t| {
            Dropout::new(0.3, Generator::new(seed))?.forward_t(&t[0], true)
        });
        compare("dropout by row", &[&[3, 4, 50]], |t| {
            let keys = RowKeys::new(seed, 5, [3, 4, 9]);
            keys.scope(|| Dropout::by_row(0.3, "layer")?.after(2).forward_t(&t[0], true))
        });
        compare("dropout of attention", &[q, q, q], |t| {
            let dropout = Some(Dropout::new(0.3, Generator::new(seed))?);
            let config = AttentionConfig { dropout, ..AttentionConfig::new(4, AttentionMask::Causal) };
            attention(&t[0], &t[1], &t[2], &config)
        });
    }
}

/// A frozen weight gets no gradient, and what is below gets its own.
#[test]
fn what_is_frozen_has_no_gradient() -> Result<()> {
    let x = Var::from_tensor(&drawn(&[3, 4], 1).to_device(&device())?)?;
    let weight = drawn(&[2, 4], 2).to_device(&device())?;
    let y = Linear::new(weight.clone(), None).forward(&x)?;
    let grads = ops::backward(&ops::tape::scalar_with_gradient(&y, y.ones_like()?)?)?;
    assert!(grads.get(&weight).is_none());
    let expected = weight.sum_keepdim(0)?.broadcast_as((3, 4))?;
    assert!(gap(grads.get(&x).unwrap(), &expected)? < 1e-6);
    Ok(())
}

fn store(vars: &[Var], grads: &[Tensor]) -> Result<GradStore> {
    let mut store = vars[0].as_tensor().sum_all()?.backward()?;
    vars.iter().zip(grads).for_each(|(var, grad)| drop(store.insert(var, grad.clone())));
    Ok(store)
}

#[test]
fn steps_of_adam() -> Result<()> {
    let dtypes = [
        (DType::F32, DType::F32, 1e-6),
        (DType::BF16, DType::BF16, 0.01),
        (DType::BF16, DType::F32, 0.01),
        (DType::F16, DType::F32, 0.002),
    ];
    for (dtype, of_grad, most) in dtypes {
        for config in [AdamConfig::default(), AdamConfig::adamw()] {
            let config = AdamConfig { learning_rate: 0.1, weight_decay: 0.1, ..config };
            let start = drawn(&[70, 9], 3).to_dtype(dtype)?;
            let vars = [Var::from_tensor(&start.to_device(&device())?)?, Var::from_tensor(&start)?];
            let [mut on_cuda, mut on_cpu] =
                vars.each_ref().map(|var| Adam::new(vec![var.clone()], config.clone()).unwrap());
            for step in 0..4 {
                let grad = drawn(&[70, 9], 10 + step).to_dtype(of_grad)?;
                let on_device = store(&vars[..1], &[grad.to_device(&device())?])?;
                on_cuda.step_scaled(&on_device, 0.5)?;
                on_cpu.step_scaled(&store(&vars[1..], &[grad])?, 0.5)?;
            }
            let gap = gap(&vars[0], &vars[1])?;
            assert!(gap <= most, "{dtype:?}, gradients {of_grad:?}, {config:?}: {gap:e}");
        }
    }
    Ok(())
}

#[test]
fn norms_of_gradients() -> Result<()> {
    for (dtype, _) in DTYPES {
        let shapes = [&[3, 4][..], &[1], &[1_200_000], &[8193]];
        let grads = shapes.iter().zip(1..).map(|(shape, seed)| drawn(shape, seed).to_dtype(dtype));
        let grads = grads.collect::<Result<Vec<_>>>()?;
        let norm = |device: &Device| {
            let vars = grads.iter().map(|grad| Var::from_tensor(&grad.to_device(device)?));
            let vars = vars.collect::<Result<Vec<_>>>()?;
            let own = vars.iter().map(|var| var.as_detached_tensor()).collect::<Vec<_>>();
            training::grad_norm(&store(&vars, &own)?, &vars)
        };
        let (on_cuda, on_cpu) = (norm(&device()).unwrap(), norm(&Device::Cpu).unwrap());
        assert!((on_cuda / on_cpu - 1.0).abs() < 1e-6, "{dtype:?}: {on_cuda}, {on_cpu}");
        // Part of a larger tensor.
        let whole = drawn(&[4, 10], 1).to_device(&device())?;
        let var = Var::from_tensor(&whole.narrow(0, 1, 2)?)?;
        let part = whole.narrow(0, 1, 2)?;
        let expected = part.sqr()?.flatten_all()?.sum(D::Minus1)?.to_scalar::<f32>()?.sqrt();
        let found =
            training::grad_norm(&store(std::slice::from_ref(&var), &[part])?, std::slice::from_ref(&var))
                .unwrap();
        assert!((found - f64::from(expected)).abs() < 1e-5);
    }
    Ok(())
}
