//! Self-attention layers against PyTorch's `nn.MultiheadAttention` and transformers' `LlamaAttention`.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use ops::{
    AttentionConfig, AttentionMask, Dropout, Rotary, RotaryConfig, RowKeys, SelfAttention,
    multihead_attention, self_attention,
};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn assert_near(got: &Tensor, expected: &Value, what: &str) -> Result<()> {
    let expected = Tensor::from_vec(numbers(expected), got.shape(), &Device::Cpu)?;
    let gap: f32 = (got - expected)?.abs()?.max_all()?.to_scalar()?;
    assert!(gap < 1e-5, "{what} is {gap} off");
    Ok(())
}

/// The layer of a case; its parameters are those of the map.
fn layer(case: &Value, vars: &VarMap) -> Result<SelfAttention> {
    let size = |name: &str| case[name].as_u64().map(|size| size as usize);
    let (hidden, heads) = (size("hidden").unwrap(), size("heads").unwrap());
    let config = AttentionConfig {
        num_kv_heads: size("kv_heads"),
        ..AttentionConfig::new(heads, AttentionMask::Causal)
    };
    let builder = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    match size("head_dim") {
        None => multihead_attention(hidden, config, builder),
        Some(head_dim) => {
            let rotary = Rotary::new(&RotaryConfig::new(head_dim, 8), &Device::Cpu)?;
            Ok(self_attention(hidden, head_dim, config, builder)?.with_rotary(rotary))
        }
    }
}

#[test]
fn values_and_gradients_are_theirs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/self_attention.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for (index, case) in cases.iter().enumerate() {
        let vars = VarMap::new();
        let parameters = case["parameters"].as_object().unwrap();
        for (name, parameter) in parameters {
            let shape: Vec<usize> = numbers(&parameter["shape"]).iter().map(|&size| size as usize).collect();
            let values = Tensor::from_vec(numbers(&parameter["values"]), shape, &Device::Cpu)?;
            vars.data().lock().unwrap().insert(name.clone(), Var::from_tensor(&values)?);
        }
        let layer = layer(case, &vars)?;
        // No other names are asked for.
        assert_eq!(vars.data().lock().unwrap().len(), parameters.len());
        let shape = (2, 5, case["hidden"].as_u64().unwrap() as usize);
        let x = Var::from_tensor(&Tensor::from_vec(numbers(&case["x"]), shape, &Device::Cpu)?)?;
        let y = layer.forward_t(&x, true)?;
        assert_near(&y, &case["result"], &format!("case {index}"))?;
        let count = y.elem_count();
        let outer = (0..count).map(|at| at as f32 * 2.0 / (count - 1) as f32 - 1.0).collect::<Vec<_>>();
        let outer = Tensor::from_vec(outer, y.shape(), &Device::Cpu)?;
        let grads = (y * outer)?.sum_all()?.backward()?;
        assert_near(
            grads.get(&x).unwrap(),
            &case["gradient"],
            &format!("case {index}: the input's gradient"),
        )?;
        for (name, parameter) in parameters {
            let var = vars.data().lock().unwrap()[name].clone();
            let what = format!("case {index}: the gradient of {name}");
            assert_near(grads.get(&var).unwrap(), &parameter["gradient"], &what)?;
        }
    }
    Ok(())
}

#[test]
fn first_values_are_distributed_as_pytorchs() -> Result<()> {
    let (vars, hidden) = (VarMap::new(), 64);
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    multihead_attention(hidden, AttentionConfig::new(4, AttentionMask::Full), builder)?;
    let vars = vars.data().lock().unwrap();
    let largest = |name: &str| vars[name].abs()?.max_all()?.to_scalar::<f32>();
    assert_eq!((largest("in_proj_bias")?, largest("out_proj.bias")?), (0.0, 0.0));
    // Uniform in the square root of 6 / (3 * 64 + 64), by Xavier's rule.
    let bound = (6.0f32 / 256.0).sqrt();
    assert!((0.99 * bound..=bound).contains(&largest("in_proj_weight")?));
    // `nn.Linear`'s, in one eighth.
    assert!((0.99 / 8.0..=1.0 / 8.0).contains(&largest("out_proj.weight")?));
    Ok(())
}

#[test]
fn padding_is_hidden_and_dropout_is_for_training() -> Result<()> {
    let dropout = Some(Dropout::by_row(0.5, "attn")?);
    let config = AttentionConfig { dropout, ..AttentionConfig::new(2, AttentionMask::Full) };
    let builder = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let layer = multihead_attention(8, config, builder)?;
    let x = Tensor::randn(0f32, 1.0, (2, 5, 8), &Device::Cpu)?;
    let same = |a: &Tensor, b: &Tensor| {
        Ok::<_, candle_core::Error>((a - b)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6)
    };
    let whole = layer.forward_t(&x, false)?;
    assert!(same(&whole, &layer.forward_t(&x, false)?)?);
    let dropped = RowKeys::new(1, 0, 0..2).scope(|| layer.forward_t(&x, true))?;
    assert!(!same(&whole, &dropped)?);
    // The last two positions are padding: the others see what they would without them.
    let seen = Tensor::new(&[[1u8, 1, 1, 0, 0]; 2], &Device::Cpu)?;
    let masked = layer.forward_with_key_mask(&x, &seen, false)?.narrow(1, 0, 3)?;
    assert!(same(&masked, &layer.forward_t(&x.narrow(1, 0, 3)?, false)?)?);
    Ok(())
}

#[test]
fn misfits_are_one_clear_line() {
    let builder = || VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let config = |heads, kv_heads| AttentionConfig {
        num_kv_heads: Some(kv_heads),
        ..AttentionConfig::new(heads, AttentionMask::Causal)
    };
    let pytorchs = |heads, kv_heads| multihead_attention(6, config(heads, kv_heads), builder()).unwrap_err();
    let llamas = |heads, kv_heads| self_attention(6, 2, config(heads, kv_heads), builder()).unwrap_err();
    let rotary = Rotary::new(&RotaryConfig::new(2, 4), &Device::Cpu).unwrap();
    let layer = self_attention(6, 2, config(2, 1), builder()).unwrap().with_rotary(rotary);
    let given = |shape: (usize, usize, usize), dtype| {
        layer.forward_t(&Tensor::zeros(shape, dtype, &Device::Cpu).unwrap(), true).unwrap_err()
    };
    for (error, part) in [
        (pytorchs(4, 4), "num_heads"),
        (pytorchs(0, 0), "a head at least"),
        (pytorchs(3, 2), "num_kv_heads"),
        (llamas(3, 2), "num_kv_heads"),
        (given((1, 5, 6), DType::F32), "beyond the table of 4"),
        (given((1, 4, 5), DType::F32), "[1, 4, 6]"),
        (given((1, 4, 6), DType::F64), "F64"),
    ] {
        let message = error.to_string();
        assert!(message.contains(part) && !message.contains('\n'), "{part}: {message}");
    }
}
