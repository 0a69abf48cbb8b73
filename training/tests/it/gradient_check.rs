//! The check of gradients: what candle's layers lose is found and named; what is rightly zero is not.

use std::cell::Cell;

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{ModuleT, RNN, VarBuilder, VarMap};
use ops::{Dropout, RowKeys, cross_entropy, layer_norm, linear, rms_norm, softmax};
use sampler::{Generator, SharedGenerator};
use training::{
    GradientCheck, GradientCheckConfig, OnMissingGradient, TorchInit, check_gradient, named_vars,
};

/// A map of variables, and its builder of PyTorch's values for a seed.
fn model(seed: u64) -> (VarMap, VarBuilder<'static>) {
    let vars = VarMap::new();
    let random = SharedGenerator::from(Generator::new(seed));
    let builder = TorchInit::var_builder(&random, &vars, DType::F32, &Device::Cpu);
    (vars, builder)
}

fn random(dims: &[usize]) -> Result<Tensor> {
    let mut state = 17u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let all: Vec<f32> = std::iter::repeat_with(next).take(dims.iter().product()).collect();
    Tensor::from_vec(all, dims, &Device::Cpu)
}

fn values(vars: &VarMap) -> Vec<(String, Vec<u32>)> {
    let bits = |var: Var| {
        var.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    named_vars(vars).into_iter().map(|(name, var)| (name, bits(var))).collect()
}

/// Checks a loss; the variables are as before.
fn checked(vars: &VarMap, loss: impl FnMut() -> Result<Tensor>) -> GradientCheck {
    let config = GradientCheckConfig { on_lost: OnMissingGradient::Ignore, ..GradientCheckConfig::default() };
    let before = values(vars);
    let check = check_gradient(loss, &named_vars(vars), &config).unwrap();
    assert!(values(vars) == before, "the variables have changed");
    check
}

fn names(check: &GradientCheck) -> Vec<&str> {
    check.lost.iter().map(|lost| lost.name.as_str()).collect()
}

/// Attention with one projection for queries, keys and values, 4 heads of 8.
fn fused_attention(
    builder: &VarBuilder<'_>,
    x: &Tensor,
    rope: bool,
    softmax: fn(&Tensor) -> Result<Tensor>,
) -> Result<impl Fn() -> Result<Tensor>> {
    let (rows, len, width) = x.dims3()?;
    let (qkv, out) = (linear(width, 3 * width, builder.pp("qkv"))?, linear(width, width, builder.pp("out"))?);
    let (x, angles) = (x.clone(), random(&[len, 4])?);
    Ok(move || {
        let qkv = qkv.forward(&x)?.reshape((rows, len, 3, 4, width / 4))?.permute((2, 0, 3, 1, 4))?;
        let [q, k, v] = [0, 1, 2].map(|i| qkv.get(i)?.contiguous());
        let turned = |x: Tensor| match rope {
            true => candle_nn::rotary_emb::rope(&x, &angles.cos()?, &angles.sin()?),
            false => Ok(x),
        };
        let scores = (turned(q?)?.matmul(&turned(k?)?.t()?)? * 0.35)?;
        let mixed = softmax(&scores)?.matmul(&v?)?.transpose(1, 2)?.reshape((rows, len, width))?;
        out.forward(&mixed)?.sqr()?.mean_all()
    })
}

#[test]
fn the_rows_that_softmax_and_rope_lose_are_named() -> Result<()> {
    let x = random(&[4, 6, 32])?;
    let ours: fn(&Tensor) -> Result<Tensor> = softmax;
    for (rope, softmax, is_lost) in [
        (false, candle_nn::ops::softmax_last_dim as fn(&Tensor) -> Result<Tensor>, true),
        (true, ours, true),
        (false, ours, false),
    ] {
        let (vars, builder) = model(1);
        let check = checked(&vars, fused_attention(&builder, &x, rope, softmax)?);
        let found: Vec<_> = check.lost.iter().filter(|lost| lost.name == "qkv.weight").collect();
        assert_eq!(found.len(), usize::from(is_lost), "rope {rope}: {check}");
        if let Some(lost) = found.first() {
            assert!(lost.rows.len() == 1 && lost.rows[0] == (0..64) && lost.is_zero, "{check}");
        }
        assert!(
            !is_lost || check.to_string().contains("qkv.weight, rows 0 to 63 (the gradient is 0"),
            "{check}"
        );
        assert!(names(&check).iter().all(|name| name.starts_with("qkv.")), "{check}");
    }
    Ok(())
}

#[test]
fn what_candles_norms_lose_is_named() -> Result<()> {
    let x = random(&[16, 12])?;
    for by_candle in [true, false] {
        for rms in [true, false] {
            let (vars, builder) = model(2);
            let (first, last) = (linear(12, 12, builder.pp("first"))?, linear(12, 3, builder.pp("last"))?);
            let norm: Box<dyn Module> = match (by_candle, rms) {
                (true, true) => Box::new(candle_nn::rms_norm(12, 1e-5, builder.pp("norm"))?),
                (true, false) => Box::new(candle_nn::layer_norm(12, 1e-5, builder.pp("norm"))?),
                (false, true) => Box::new(rms_norm(12, 1e-5, builder.pp("norm"))?),
                (false, false) => Box::new(layer_norm(12, 1e-5, builder.pp("norm"))?),
            };
            let check =
                checked(&vars, || last.forward(&norm.forward(&first.forward(&x)?)?)?.sqr()?.mean_all());
            let mut found = names(&check);
            found.sort_unstable();
            let expected: &[&str] = match (by_candle, rms) {
                (false, _) => &[],
                (true, true) => &["first.bias", "first.weight", "norm.weight"],
                (true, false) => &["first.bias", "first.weight", "norm.bias", "norm.weight"],
            };
            assert_eq!(found, expected, "{check}");
            assert!(check.lost.iter().all(|lost| lost.rows.is_empty() && lost.is_zero), "{check}");
        }
    }
    Ok(())
}

/// Past a lost layer, a residual connection still brings a gradient, which is not the loss's.
#[test]
fn a_gradient_that_is_only_a_part_is_found() -> Result<()> {
    let x = random(&[16, 12])?;
    let (vars, builder) = model(3);
    let (first, last) = (linear(12, 12, builder.pp("first"))?, linear(12, 12, builder.pp("last"))?);
    let norm = candle_nn::layer_norm(12, 1e-5, builder.pp("norm"))?;
    let check = checked(&vars, || {
        let x = first.forward(&x)?;
        (&x + last.forward(&norm.forward(&x)?)?)?.sqr()?.mean_all()
    });
    let part = check.lost.iter().find(|lost| lost.name == "first.weight");
    assert!(part.is_some_and(|lost| !lost.is_zero), "{check}");
    assert!(!names(&check).iter().any(|name| name.starts_with("last")), "{check}");
    Ok(())
}

#[test]
fn an_lstm_below_such_a_layer_is_named() -> Result<()> {
    let x = random(&[3, 5, 8])?;
    for by_candle in [true, false] {
        let (vars, builder) = model(4);
        let cell = candle_nn::lstm(8, 8, candle_nn::LSTMConfig::default(), builder.pp("cell"))?;
        let norm: Box<dyn Module> = match by_candle {
            true => Box::new(candle_nn::rms_norm(8, 1e-5, builder.pp("norm"))?),
            false => Box::new(rms_norm(8, 1e-5, builder.pp("norm"))?),
        };
        let last = linear(8, 2, builder.pp("last"))?;
        let check = checked(&vars, || {
            let hidden = cell.states_to_tensor(&cell.seq(&x)?)?.contiguous()?;
            last.forward(&norm.forward(&hidden)?)?.sqr()?.mean_all()
        });
        let mut found = names(&check);
        found.sort_unstable();
        let cells = ["cell.bias_hh_l0", "cell.bias_ih_l0", "cell.weight_hh_l0", "cell.weight_ih_l0"];
        assert_eq!(
            found,
            if by_candle { [&cells[..], &["norm.weight"]].concat() } else { vec![] },
            "{check}"
        );
    }
    Ok(())
}

/// Words that do not occur, units that are off, experts that are not chosen, dropout with a key, running statistics.
#[test]
fn what_is_rightly_zero_is_no_alarm() -> Result<()> {
    let words = Tensor::new(&[[3u32, 9, 3, 40], [7, 9, 1, 3]], &Device::Cpu)?;
    let targets = Tensor::new(&[0u32, 2, 1, 0, 1, 2, 0, 1], &Device::Cpu)?;
    for seed in 0..12 {
        let (vars, builder) = model(seed);
        let table = candle_nn::embedding(300, 16, builder.pp("words"))?;
        let (up, down) = (linear(16, 64, builder.pp("up"))?, linear(64, 16, builder.pp("down"))?);
        let experts = [0, 1, 2].map(|i| linear(16, 3, builder.pp(format!("experts.{i}"))).unwrap());
        let statistics = candle_nn::batch_norm(16, 1e-5, builder.pp("statistics"))?;
        let dropout = Dropout::by_row(0.3, "dropout")?;
        let check = checked(&vars, || {
            RowKeys::new(5, 1, 0..2).scope(|| {
                let x = table.forward(&words)?;
                // Most units are off for all words.
                let hidden = (up.forward(&x)? - 1.0)?.relu()?;
                let x = (x + dropout.forward_t(&down.forward(&hidden)?, true)?)?.reshape((8, 16))?;
                let x = statistics.forward_t(&x, true)?;
                // The third expert gets nothing.
                let gate = (words.flatten_all()?.to_dtype(DType::F32)?.ge(5f32)?)
                    .to_dtype(DType::F32)?
                    .unsqueeze(1)?;
                let chosen = experts[0].forward(&x)?.broadcast_mul(&gate)?;
                let others = experts[1].forward(&x)?.broadcast_mul(&(1.0 - gate)?)?;
                let _ = experts[2].forward(&x)?;
                cross_entropy(&(chosen + others)?, &targets, None)
            })
        });
        assert!(check.lost.is_empty(), "seed {seed}: {check}");
        assert!(check.forward_passes <= 64, "{}", check.forward_passes);
    }
    Ok(())
}

#[test]
fn a_failing_pass_leaves_the_variables_as_they_were() -> Result<()> {
    let x = random(&[4, 6])?;
    for failing in 1..12 {
        let (vars, builder) = model(5);
        let (layer, before, passes) = (linear(6, 6, builder.pp("layer"))?, values(&vars), Cell::new(0));
        let loss = || {
            passes.set(passes.get() + 1);
            if passes.get() == failing {
                candle_core::bail!("the pass failed")
            }
            layer.forward(&x)?.sqr()?.mean_all()
        };
        let result = check_gradient(loss, &named_vars(&vars), &GradientCheckConfig::default());
        assert!(result.is_ok() || result.unwrap_err().to_string().contains("the pass failed"));
        assert!(values(&vars) == before, "{failing}");
    }
    Ok(())
}

#[test]
fn what_cannot_be_checked_is_said() -> Result<()> {
    let x = random(&[4, 6])?;
    let (vars, builder) = model(6);
    let (layer, passes) = (linear(6, 6, builder.pp("layer"))?, Cell::new(0.0));
    let drifting = || {
        passes.set(passes.get() + 1.0);
        layer.forward(&x)?.sqr()?.mean_all()? + passes.get()
    };
    let config = GradientCheckConfig::default();
    let refused = check_gradient(drifting, &named_vars(&vars), &config).unwrap_err().to_string();
    assert!(refused.contains("two forward passes") && refused.contains("RowKeys"), "{refused}");

    let narrow = Var::from_tensor(&random(&[6, 6])?.to_dtype(DType::BF16)?)?;
    let loss = || x.to_dtype(DType::BF16)?.matmul(narrow.as_tensor())?.sqr()?.mean_all();
    let check = check_gradient(loss, &[("narrow".into(), narrow.clone())], &config).unwrap();
    assert_eq!((check.undecided, check.lost), (vec!["narrow".to_string()], vec![]));

    // Stopped on purpose.
    let stopped = || layer.forward(&x)?.detach().sqr()?.mean_all();
    let frozen = GradientCheckConfig { frozen: vec!["layer".into()], ..config.clone() };
    assert!(check_gradient(stopped, &named_vars(&vars), &config).is_err());
    assert_eq!(check_gradient(stopped, &named_vars(&vars), &frozen).unwrap().parameters, 0);
    Ok(())
}
