//! Tests of recomputation: losses and gradients are those without it, to the bit.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor, Var, bail};
use candle_nn::{Init, ModuleT, VarBuilder, VarMap};
use sampler::{Generator, SharedGenerator};

use ops::{
    AttentionConfig, AttentionMask, Dropout, LayerNorm, Linear, Precision, activation_bytes, attention,
    autocast, backward, defer_weights, drawn, kept_result, layer_norm, linear, recompute, recompute_cheap,
    recomputed_node,
};
use training::{TorchInit, named_vars};

/// A Transformer's block, with dropout.
#[derive(Clone)]
struct Block {
    norm: LayerNorm,
    layers: [Linear; 4],
    dropout: Dropout,
}

const WIDTH: usize = 8;

impl Block {
    fn new(vb: VarBuilder<'_>, draws: &SharedGenerator) -> Result<Self> {
        let one = |name: &str| linear(WIDTH, WIDTH, vb.pp(name));
        let layers = [one("q")?, one("k")?, one("v")?, one("out")?];
        let dropout = Dropout::new(0.3, draws.clone())?;
        Ok(Self { norm: layer_norm(WIDTH, 1e-5, vb.pp("norm"))?, layers, dropout })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [q, k, v, out] = &self.layers;
        let y = self.norm.forward(x)?;
        let config = AttentionConfig::new(2, AttentionMask::Causal);
        let y = attention(&q.forward(&y)?, &k.forward(&y)?, &v.forward(&y)?, &config)?;
        x + self.dropout.forward_t(&out.forward(&y)?, true)?
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Kept,
    Again,
    /// Parts inside a part.
    Nested,
    /// Results of products are kept.
    Cheap,
    /// Results of products are kept by the outer part, not by those inside it.
    CheapNested,
}

type Named = Vec<(String, Var)>;
type Part = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// The same loss of the same variables, computed in different ways.
fn loss(dtype: DType, how: How) -> Result<(Tensor, Named)> {
    let (vars, start) = (VarMap::new(), SharedGenerator::from(Generator::new(1)));
    let vb = TorchInit::var_builder(&start, &vars, dtype, &Device::Cpu);
    let input = vb.get_with_hints((2, 3, WIDTH), "input", Init::Randn { mean: 0.0, stdev: 1.0 })?;
    // Used both outside of parts and in one.
    let scale = vb.get_with_hints(WIDTH, "scale", Init::Const(1.5))?;
    let draws = SharedGenerator::from(Generator::new(5));
    let blocks = (0..4).map(|place| Block::new(vb.pp(place), &draws)).collect::<Result<Vec<_>>>()?;
    let first = blocks[0].clone();
    let by = scale.clone();
    let mut parts: Vec<Part> = vec![Box::new(move |x| first.forward(&x.broadcast_mul(&by)?))];
    parts.extend(blocks[1..].iter().cloned().map(|block| Box::new(move |x: &Tensor| block.forward(x)) as _));
    let x = input.broadcast_mul(&scale)?;
    let x = match how {
        How::Kept => parts.iter().try_fold(x, |x, part| part(&x))?,
        How::Again => parts.into_iter().try_fold(x, |x, part| recompute(&x, part))?,
        How::Cheap => parts.into_iter().try_fold(x, |x, part| recompute_cheap(&x, part))?,
        How::Nested | How::CheapNested => {
            let parts: Vec<_> = parts.into_iter().map(std::sync::Arc::new).collect();
            let all = move |x: &Tensor| {
                parts.iter().cloned().try_fold(x.clone(), |x, part| recompute(&x, move |x| part(x)))
            };
            if how == How::Nested { recompute(&x, all)? } else { recompute_cheap(&x, all)? }
        }
    };
    Ok((x.sqr()?.mean_all()?, named_vars(&vars)))
}

/// Bits of the gradients, in the order of `vars`.
fn bits(grads: &GradStore, vars: &Named) -> Vec<Vec<u64>> {
    let of = |(name, var): &(String, Var)| {
        let grad = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
        let numbers = grad.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        numbers.into_iter().map(f64::to_bits).collect()
    };
    vars.iter().map(of).collect()
}

#[test]
fn losses_and_gradients_are_those_without_to_the_bit() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let (kept, vars) = loss(dtype, How::Kept)?;
        let expected = bits(&backward(&kept)?, &vars);
        assert_eq!(expected, bits(&kept.backward()?, &vars));
        for how in [How::Again, How::Nested, How::Cheap, How::CheapNested] {
            let (again, vars) = loss(dtype, how)?;
            let numbers = [&kept, &again].map(|loss| loss.to_dtype(DType::F64).unwrap().to_scalar::<f64>());
            let [kept_loss, again_loss] = numbers;
            assert_eq!(again_loss?, kept_loss?, "{dtype:?}, {how:?}");
            let most = if matches!(how, How::Again | How::Nested) { 3 } else { 1 };
            assert!(activation_bytes(&again, []) < activation_bytes(&kept, []) / most);
            // Backward may run twice.
            for _ in 0..2 {
                assert_eq!(bits(&backward(&again)?, &vars), expected, "{dtype:?}, {how:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn weights_may_be_deferred() -> Result<()> {
    let (kept, vars) = loss(DType::F32, How::Kept)?;
    let expected = bits(&kept.backward()?, &vars);
    for how in [How::Again, How::Nested, How::Cheap, How::CheapNested] {
        let (again, vars) = loss(DType::F32, how)?;
        let (mut grads, deferred) = defer_weights(|| backward(&again))?;
        assert_eq!(deferred.len(), 4 * 4);
        deferred.compute(|id, gradient| {
            assert!(grads.insert_id(id, gradient).is_none());
            Ok(())
        })?;
        assert_eq!(bits(&grads, &vars), expected, "{how:?}");
    }
    Ok(())
}

#[test]
fn candles_own_backward_loses_no_gradient_silently() -> Result<()> {
    for how in [How::Again, How::Nested] {
        let (again, vars) = loss(DType::F32, how)?;
        let line = again.backward().unwrap_err().to_string();
        assert!(line.contains("call `ops::backward(&loss)`"), "{line}");
        // Later passes are not affected.
        let (kept, others) = loss(DType::F32, How::Kept)?;
        assert_eq!(bits(&backward(&again)?, &vars), bits(&backward(&kept)?, &others));
    }
    // Without variables in parts, candle's backward works.
    let x = Var::new(&[2f32], &Device::Cpu)?;
    let grads = recompute(&x, |x| x.sqr())?.backward()?;
    assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [4.0]);
    Ok(())
}

#[test]
fn inputs_need_no_gradient() -> Result<()> {
    let weight = Var::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
    let (table, factor) = (weight.clone(), weight.clone());
    let tokens = Tensor::new(&[1u32, 1], &Device::Cpu)?;
    let of_tokens = recompute(&tokens, move |tokens| table.embedding(tokens))?;
    let data = Tensor::new(&[[1f32, 1.0]], &Device::Cpu)?;
    let of_data = recompute(&data, move |data| data.matmul(&factor))?;
    let grads = backward(&(of_tokens.sum_all()? + of_data.sum_all()?)?)?;
    assert_eq!(grads.get(&weight).unwrap().to_vec2::<f32>()?, [[1.0, 1.0], [3.0, 3.0]]);
    assert!(grads.get(&tokens).is_none() && grads.get(&data).is_none());
    // Without gradients nothing is recorded.
    assert!(!recompute(&data, |data| data.sqr())?.track_op());
    // An input that the result does not depend on has a gradient of 0.
    let x = Var::new(&[5f32], &Device::Cpu)?;
    let grads = backward(&recompute(&(x.as_tensor() * 2.0)?, move |_| weight.sum_all())?)?;
    assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [0.0]);
    Ok(())
}

#[test]
fn what_was_computed_outside_gets_its_gradient() -> Result<()> {
    let (x, weight) = (Var::new(&[3f32], &Device::Cpu)?, Var::new(&[2f32], &Device::Cpu)?);
    let outside = weight.sqr()?;
    // The inner part captures the input of the outer one.
    let y = recompute(&x, move |x| {
        let (outer, outside) = (x.clone(), outside.clone());
        recompute(&x.sqr()?, move |square| (square * &outer)? * &outside)
    })?;
    let grads = backward(&y)?;
    assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [3.0 * 9.0 * 4.0]);
    assert_eq!(grads.get(&weight).unwrap().to_vec1::<f32>()?, [27.0 * 4.0]);
    Ok(())
}

#[test]
fn views_precision_and_half_floats() -> Result<()> {
    let x = Var::new(&[[1f32, 2.0, 3.0], [4.0, 5.0, 6.5]], &Device::Cpu)?;
    let plain = |x: &Tensor| x.t()?.narrow(0, 1, 2)?.sqr();
    let [kept, again] = [plain(&x)?, recompute(&x.t()?.narrow(0, 1, 2)?, |x| x.sqr())?];
    assert_eq!(again.to_vec2::<f32>()?, kept.to_vec2::<f32>()?);
    // A part may return a view of its input.
    let view = recompute(&x, |x| x.t()?.narrow(0, 1, 2))?;
    assert_eq!(view.to_vec2::<f32>()?, [[2.0, 5.0], [3.0, 6.5]]);
    let grads = backward(&(again.sum_all()? + view.sum_all()?)?)?;
    assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[0.0, 5.0, 7.0], [0.0, 11.0, 14.0]]);
    let layer = Linear::new(Tensor::new(&[[1f32 / 3.0, 0.7, 1.1]], &Device::Cpu)?, None);
    let other = layer.clone();
    let [kept, again] = autocast(Precision::Bf16, || {
        Ok::<_, candle_core::Error>([layer.forward(&x)?, recompute(&x, move |x| other.forward(x))?])
    })?;
    let of = |y: &Tensor| backward(y)?.get(&x).unwrap().to_vec2::<f32>();
    assert_eq!(of(&again)?, of(&kept)?);
    for dtype in [DType::F16, DType::BF16] {
        let half = Var::from_tensor(&x.to_dtype(dtype)?)?;
        let y = recompute(&half, |x| x.sqr())?.sum_all()?;
        let grad = backward(&y)?.get(&half).unwrap().to_dtype(DType::F32)?.to_vec2::<f32>()?;
        assert_eq!(grad, [[2.0, 4.0, 6.0], [8.0, 10.0, 13.0]]);
    }
    Ok(())
}

#[test]
fn a_part_that_does_something_else_the_second_time_is_named() -> Result<()> {
    let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
    let calls = AtomicUsize::new(0);
    let y = recompute(&x, move |x| x.narrow(0, 0, 2 - calls.fetch_add(1, Ordering::Relaxed)))?;
    let line = backward(&y).unwrap_err().to_string();
    assert!(line.contains("it gave F32 of shape [2], and then F32 of shape [1]"), "{line}");
    for [first, again] in [[1, 2], [2, 1]] {
        let calls = AtomicUsize::new(0);
        let y = recompute(&x, move |x| {
            let count = if calls.fetch_add(1, Ordering::Relaxed) == 0 { first } else { again };
            (0..count).for_each(|_| assert_eq!(drawn(|| 7), 7));
            x.sqr()
        })?;
        let line = backward(&y).unwrap_err().to_string();
        let expected = format!("it drew {first} random numbers, and then {again} random numbers");
        assert!(line.contains(&expected), "{line}");
    }
    for [first, again] in [[1, 2], [2, 1]] {
        let (calls, layer) =
            (AtomicUsize::new(0), Linear::new(Tensor::ones((2, 2), DType::F32, &Device::Cpu)?, None));
        let y = recompute_cheap(&(x.as_tensor() * 1.0)?.reshape((1, 2))?, move |x| {
            let count = if calls.fetch_add(1, Ordering::Relaxed) == 0 { first } else { again };
            (0..count).try_fold(x.clone(), |x, _| layer.forward(&x))
        })?;
        let line = backward(&y).unwrap_err().to_string();
        let expected = format!("it computed {first} products, and then {again} products");
        assert!(line.contains(&expected), "{line}");
    }
    // A failure leaves no state behind.
    assert!(recompute(&x, |_| bail!("no")).is_err());
    let y = recompute(&x, |x| x * drawn(|| 3) as f64)?;
    assert_eq!(backward(&y)?.get(&x).unwrap().to_vec1::<f32>()?, [3.0, 3.0]);
    assert!(recomputed_node().is_none());
    Ok(())
}

#[test]
fn products_and_attention_are_computed_once() -> Result<()> {
    let (weight, runs) =
        (Var::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?, std::sync::Arc::new(AtomicUsize::new(0)));
    let (layer, counted) = (Linear::new(weight.as_tensor().clone(), None), runs.clone());
    let x = Var::new(&[[[1f32, -1.0], [0.5, 2.0]]], &Device::Cpu)?;
    let part = move |x: &Tensor| {
        kept_result(|known| {
            counted.fetch_add(usize::from(known.is_none()), Ordering::Relaxed);
            // A layer inside of another keeps nothing itself.
            let y = layer.forward(x)?;
            assert!(known.is_none_or(|known| known.to_vec3::<f32>().unwrap() == y.to_vec3::<f32>().unwrap()));
            Ok(y)
        })?
        .sqr()
    };
    let y = recompute_cheap(&x, part)?;
    assert_eq!(activation_bytes(&y, []), 4 * (4 + 4));
    assert!(backward(&y)?.get(&weight).is_some());
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    // With frozen weights, only the second run has a graph to go backward through.
    let frozen = Linear::new(Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?, None);
    let config = AttentionConfig::new(1, AttentionMask::Causal);
    let part = move |x: &Tensor| attention(&frozen.forward(x)?, x, x, &config)?.sqr();
    let [expected, got] = [part(&x)?, recompute_cheap(&x, part)?].map(|y| backward(&y).unwrap());
    let of = |grads: &GradStore| grads.get(&x).unwrap().to_vec3::<f32>();
    assert_eq!(of(&got)?, of(&expected)?);
    Ok(())
}
