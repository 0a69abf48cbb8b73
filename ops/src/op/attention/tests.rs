//! Tests of attention: the fused operation against the composed one.

use candle_core::{Device, Var};
use sampler::Generator;

use super::super::assert_agree;
use super::*;
use crate::product::ProductConfig;

fn random(dims: &[usize]) -> candle_core::Result<Var> {
    Var::from_tensor(&Tensor::randn(0f64, 2., dims, &Device::Cpu)?)
}

/// The fused operation equals the composed one, gradients included: for all masks, grouped heads, lengths within a
/// block and beyond, fewer queries than keys, hidden keys, and dropout.
#[test]
fn composed_equals_fused() -> candle_core::Result<()> {
    use AttentionMask::{AntiCausal, Causal, Full, SlidingWindow};
    let lengths = [(1, 1), (7, 7), (3, 8), (1, 6), (150, 150), (33, 131)];
    let heads = [(1, 1, 3), (4, 2, 5), (3, 1, 64), (2, 2, 40)];
    for mask in [Full, Causal, AntiCausal, SlidingWindow(1), SlidingWindow(5), SlidingWindow(100)] {
        for (((queries, keys), (heads, kv_heads, dims)), case) in
            lengths.iter().flat_map(|l| heads.iter().map(move |h| (*l, *h))).zip(0u64..)
        {
            compare(mask, (queries, keys), (heads, kv_heads, dims), case)?;
        }
    }
    Ok(())
}

/// The same where the keys are more than one block, so that sums of blocks are put together.
#[test]
fn composed_equals_fused_over_several_blocks_of_keys() -> candle_core::Result<()> {
    use AttentionMask::{AntiCausal, Causal, Full, SlidingWindow};
    for (mask, case) in [Full, Causal, AntiCausal, SlidingWindow(700)].into_iter().zip(0..) {
        compare(mask, (1100, 1100), (2, 1, 8), case)?;
        compare(mask, (40, 1300), (2, 2, 3), case + 1)?;
        compare(mask, (3, 1300), (4, 2, 20), case)?;
    }
    Ok(())
}

/// Compares the fused operation with the composed one, without and with hidden keys; with dropout if `case` is even.
fn compare(
    mask: AttentionMask,
    (queries, keys): (usize, usize),
    (heads, kv_heads, dims): (usize, usize, usize),
    case: u64,
) -> candle_core::Result<()> {
    let (q, k) = (random(&[2, queries, heads * dims])?, random(&[2, keys, kv_heads * dims])?);
    let (v, outer) = (random(&[2, keys, kv_heads * dims])?, random(&[2, queries, heads * dims])?);
    let seen = (0..2 * keys as u64).map(|key| u8::from(!(key + case).is_multiple_of(3) && key > 1));
    let seen = Tensor::from_vec(seen.collect::<Vec<u8>>(), (2, keys), &Device::Cpu)?;
    for key_mask in [None, Some(&seen)] {
        let dropout = case.is_multiple_of(2).then(|| Dropout::new(0.3, Generator::new(case))).transpose()?;
        let config = AttentionConfig {
            num_kv_heads: Some(kv_heads),
            dropout: dropout.clone(),
            ..AttentionConfig::new(heads, mask)
        };
        let sizes = check(&q, [("k", &k), ("v", &v)], &config)?;
        let hidden = key_mask.map(|mask| hidden(mask, &sizes)).transpose()?;
        let again = Dropout::new(0.3, Generator::new(case))?.mask(2, queries)?;
        let dropout = dropout.and(again);
        let (scale, how) = (1.0 / (dims as f64).sqrt(), ProductConfig::default());
        let documents = documents([sizes.batch, sizes.queries, sizes.keys], mask)?;
        let call = AttentionCall { sizes, mask, scale, hidden, documents, dropout, part: None, how };
        let both = [composed(&q, &k, &v, &call)?, attention_with(&q, &k, &v, key_mask, &config)?];
        let loss = |y: &Tensor| (y * outer.as_detached_tensor())?.sum_all();
        let what = format!("{mask:?}, {config:?}, {queries} by {keys}, {}", key_mask.is_some());
        assert_agree(both, loss, &[&q, &k, &v], 1e-11, &what)?;
    }
    Ok(())
}

/// The same in packed rows of other documents each, whose last places are unused.
#[test]
fn composed_equals_fused_within_documents() -> candle_core::Result<()> {
    use AttentionMask::{Causal, Full, SlidingWindow};
    let documents = |rows: [&[u32]; 2]| Documents::new(rows.map(<[u32]>::to_vec));
    for (mask, case) in [Full, Causal, SlidingWindow(1), SlidingWindow(70)].into_iter().zip(0..) {
        let compare = |lengths, heads| compare(mask, lengths, heads, case);
        documents([&[1, 3, 1, 2], &[6]])?.scope(|| compare((7, 7), (4, 2, 5)))?;
        documents([&[64, 1, 1, 80, 60], &[100, 100]])?.scope(|| compare((220, 220), (2, 1, 8)))?;
        documents([&[500, 13, 40], &[1, 20]])?.scope(|| compare((600, 600), (2, 2, 3)))?;
        // The last queries of rows whose keys are cached.
        documents([&[500, 72, 40], &[]])?.scope(|| compare((3, 614), (4, 2, 5)))?;
        documents([&[500, 72, 40], &[612]])?.scope(|| compare((40, 614), (4, 2, 5)))?;
    }
    Ok(())
}

/// The bits do not depend on the number of threads.
#[test]
fn threads_do_not_change_bits() -> candle_core::Result<()> {
    let (q, k, v) = (random(&[2, 200, 128])?, random(&[2, 200, 64])?, random(&[2, 200, 64])?);
    let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, AttentionMask::Causal) };
    let documents = Documents::new([vec![90, 3, 70], vec![200]])?;
    let numbers = |threads| -> candle_core::Result<Vec<Vec<f64>>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let y = attention(&q, &k, &v, &config)?;
            let y = (y + documents.scope(|| attention(&q, &k, &v, &config))?)?;
            let grads = y.sqr()?.backward()?;
            [&q, &k, &v]
                .map(|var| grads.get(var).unwrap().flatten_all()?.to_vec1::<f64>())
                .into_iter()
                .collect()
        })
    };
    let one = numbers(1)?;
    for threads in [2, 3, 5] {
        assert!(numbers(threads)? == one, "{threads} threads");
    }
    Ok(())
}

/// A NaN in a query shows in the result, whichever keys are hidden, so that it can be detected.
#[test]
fn what_is_not_a_number_stays_so() -> candle_core::Result<()> {
    let mut config = AttentionConfig::new(1, AttentionMask::Full);
    let (k, v) = (random(&[1, 3, 2])?, random(&[1, 3, 2])?);
    let q = Var::new(&[[[f64::NAN, 1.], [1., 1.], [1., 1.]]], &Device::Cpu)?;
    for mask in [AttentionMask::Full, AttentionMask::Causal] {
        config.mask = mask;
        for seen in [[1u8, 1, 1], [1, 0, 1], [0, 1, 1]] {
            let key_mask = Tensor::new(&[seen], &Device::Cpu)?;
            let sizes = check(&q, [("k", &k), ("v", &v)], &config)?;
            let hidden = Some(hidden(&key_mask, &sizes)?);
            let call = AttentionCall {
                part: None,
                sizes,
                mask,
                scale: 1.,
                hidden,
                documents: None,
                dropout: None,
                how: ProductConfig::default(),
            };
            let both = [composed(&q, &k, &v, &call)?, attention_with(&q, &k, &v, Some(&key_mask), &config)?];
            let all_hidden = mask == AttentionMask::Causal && seen[0] == 0;
            for y in both {
                let rows = y.squeeze(0)?.to_vec2::<f64>()?;
                assert_eq!(rows[0][0].is_nan(), !all_hidden, "{mask:?} {seen:?} {rows:?}");
                let gradient = y.sum_all()?.backward()?.get(&q).unwrap().flatten_all()?.to_vec1::<f64>()?;
                assert_eq!(gradient[0].is_nan(), !all_hidden, "{mask:?} {seen:?} {gradient:?}");
                assert!(rows[1..].iter().flatten().chain(&gradient[2..]).all(|x| x.is_finite()));
            }
        }
    }
    Ok(())
}

#[test]
fn an_empty_batch_draws_no_dropout() -> candle_core::Result<()> {
    let generator = sampler::SharedGenerator::from(Generator::new(1));
    let dropout = Some(Dropout::new(0.5, generator.clone())?);
    let config = AttentionConfig { dropout, ..AttentionConfig::new(2, AttentionMask::Causal) };
    let empty = Tensor::zeros((0, 2, 6), DType::F32, &Device::Cpu)?;
    attention(&empty, &empty, &empty, &config)?;
    assert_eq!(generator.with(|generator| generator.clone()), Generator::new(1));
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let x = zeros(&[1, 2, 6]);
    let full = |heads| AttentionConfig::new(heads, AttentionMask::Full);
    let line = |result: candle_core::Result<Tensor>| result.unwrap_err().to_string();
    let of = |q: &Tensor, k: &Tensor, config| line(attention(q, k, q, &config));
    assert_eq!(of(&x, &x, full(4)), "attention: q must be of shape [1, 2, 8], got [1, 2, 6]");
    assert_eq!(of(&x, &zeros(&[1, 3, 6]), full(2)), "attention: v must be of shape [1, 3, 6], got [1, 2, 6]");
    assert_eq!(of(&x, &zeros(&[1, 2, 3]), full(2)), "attention: k must be of shape [1, 2, 6], got [1, 2, 3]");
    assert!(of(&x, &x, full(0)).contains("num_heads is 0; there must be a head at least"));
    assert!(of(&zeros(&[6]), &zeros(&[6]), full(2)).contains("q must be of shape"));
    let grouped = AttentionConfig { num_kv_heads: Some(4), ..full(6) };
    assert!(of(&x, &x, grouped).contains("num_kv_heads is 4; it must divide num_heads"));
    let window = AttentionConfig::new(2, AttentionMask::SlidingWindow(0));
    assert!(of(&x, &x, window).contains("a window holds one position at least"));
    let causal = AttentionConfig::new(2, AttentionMask::Causal);
    let long = zeros(&[1, 3, 6]);
    let refused = line(attention(&long, &x, &x, &causal));
    assert_eq!(refused, "attention: k must be of shape [1, 3, 6], got [1, 2, 6]");
    let none = zeros(&[1, 2, 0]);
    assert_eq!(of(&none, &none, full(3)), "attention: q must be of shape [1, 2, 3], got [1, 2, 0]");
    let empty = zeros(&[0, 2, 6]);
    assert!(attention(&empty, &empty, &empty, &causal).is_ok());
    for (rows, config, said) in [
        (vec![vec![2]; 2], full(2), "1 rows, documents of 2: give as many"),
        (vec![vec![1, 2]], full(2), "the documents of row 0 take 3 places, the row has 2"),
        (
            vec![vec![2]],
            AttentionConfig::new(2, AttentionMask::AntiCausal),
            "AntiCausal is not for packed rows",
        ),
    ] {
        let refused = Documents::new(rows).unwrap().scope(|| of(&x, &x, config));
        assert!(refused.starts_with("attention within Documents: ") && refused.contains(said), "{refused}");
    }
    let mask = Tensor::zeros((1, 3), DType::U8, &Device::Cpu).unwrap();
    let refused = line(attention_with_key_mask(&x, &x, &x, &mask, &causal));
    assert_eq!(refused, "attention: key_mask must be of shape [1, 2], got [1, 3]");
}
