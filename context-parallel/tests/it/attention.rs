//! Attention, rotary embedding and dropout of divided rows equal those of whole rows: results and gradients.

use std::sync::Arc;

use candle_core::{DType, Device, ModuleT, Result, Tensor, Var};
use comm::{Communicator, Local};
use context_parallel::ContextParallel;
use ops::{
    AttentionConfig, AttentionMask, Documents, Dropout, Rotary, RotaryConfig, RowContext, RowKeys, attention,
    attention_with_key_mask, backward, recompute, recompute_cheap,
};
use proptest::prelude::*;

/// Sizes and kinds of one case.
#[derive(Debug, Clone)]
struct Case {
    ranks: usize,
    len: usize,
    mask: AttentionMask,
    /// Lengths of the documents of each of two rows.
    documents: Option<[Vec<u32>; 2]>,
    kv_heads: usize,
    dropout: bool,
    recompute: u8,
    /// Hides about one key in so many, and all of those of a row's first half; 0 has no mask of keys.
    hidden: usize,
}

const HEADS: usize = 4;
const DIMS: usize = 6;

/// Inputs of (2, len, ..): what becomes queries, keys and values, and what the result is weighed with.
fn inputs(case: &Case) -> Result<[Tensor; 4]> {
    let random = |width: usize, shift: usize| {
        let numbers =
            (0..2 * case.len * width).map(|at| ((at * 37 + shift * 101) as f64 * 0.618).sin() * 1.5);
        Tensor::from_iter(numbers, &Device::Cpu)?.reshape((2, case.len, width))
    };
    let (wide, narrow) = (HEADS * DIMS, case.kv_heads * DIMS);
    Ok([random(wide, 1)?, random(narrow, 2)?, random(narrow, 3)?, random(wide, 4)?])
}

/// Which keys of the whole rows are seen.
fn key_mask(case: &Case) -> Result<Option<Tensor>> {
    if case.hidden == 0 {
        return Ok(None);
    }
    let is_hidden = |at: usize| {
        let (row, place) = (at / case.len, at % case.len);
        (at * 7).is_multiple_of(case.hidden) || (row == 1 && place < case.len / 2)
    };
    let seen = (0..2 * case.len).map(|at| u8::from(!is_hidden(at)));
    Ok(Some(Tensor::from_iter(seen, &Device::Cpu)?.reshape((2, case.len))?))
}

/// Result and gradients of some places.
fn run(case: &Case, context: &RowContext, mask: Option<Tensor>, parts: [Tensor; 4]) -> Result<[Tensor; 4]> {
    let [q, k, v, outer] = parts;
    let [q, k, v] = [Var::from_tensor(&q)?, Var::from_tensor(&k)?, Var::from_tensor(&v)?];
    let rotary = Rotary::new(&RotaryConfig::new(DIMS, case.len), &Device::Cpu)?;
    let [inside, after] = [Dropout::by_row(0.3, "weights")?, Dropout::by_row(0.2, "after")?];
    let dropout = case.dropout.then_some(inside);
    let config = AttentionConfig {
        num_kv_heads: Some(case.kv_heads),
        dropout,
        ..AttentionConfig::new(HEADS, case.mask)
    };
    let (is_dropped, keys, values) = (case.dropout, k.as_tensor().clone(), v.as_tensor().clone());
    let part = move |q: &Tensor| {
        let (q, keys) = (rotary.apply(q, 0)?, rotary.apply(&keys, 0)?);
        let mixed = match &mask {
            Some(mask) => attention_with_key_mask(&q, &keys, &values, mask, &config)?,
            None => attention(&q, &keys, &values, &config)?,
        };
        if is_dropped { after.forward_t(&mixed, true) } else { Ok(mixed) }
    };
    let y = context.scope(|| match case.recompute {
        0 => part(&q),
        1 => recompute(&q, part),
        _ => recompute_cheap(&q, part),
    })?;
    let grads = backward(&(&y * outer)?.sum_all()?)?;
    let of = |var: &Var| grads.get(var).cloned().ok_or_else(|| candle_core::Error::Msg("no gradient".into()));
    Ok([y.detach(), of(&q)?, of(&k)?, of(&v)?])
}

fn gap(a: &Tensor, b: &Tensor) -> Result<f64> {
    (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

fn check(case: &Case) -> Result<()> {
    let documents = case.documents.clone().map(|rows| Documents::new(rows).unwrap());
    let context = RowContext { keys: Some(RowKeys::new(7, 3, 0..2)), documents, ..RowContext::default() };
    let whole = run(case, &context, key_mask(case)?, inputs(case)?)?;
    let on_rank = |comm: Arc<dyn Communicator>| {
        let rows = ContextParallel::new(comm).divide(case.len, context.documents.as_ref())?;
        let own = |x: &Tensor| rows.part_of(x);
        let [q, k, v, outer] = inputs(case)?;
        let parts = [own(&q)?, own(&k)?, own(&v)?, own(&outer)?];
        let divided = RowContext { divided: Some(rows.clone()), ..context.clone() };
        let mask = key_mask(case)?.map(|mask| own(&mask)).transpose()?;
        let found = run(case, &divided, mask, parts)?;
        let gaps = found.iter().zip(&whole).map(|(found, whole)| gap(found, &own(whole)?));
        Ok(gaps.collect::<Result<Vec<_>>>()?)
    };
    for (rank, gaps) in Local::run_shared(case.ranks, on_rank).unwrap().into_iter().enumerate() {
        assert!(gaps.iter().all(|gap| *gap < 1e-10), "{case:?}: rank {rank} is off by {gaps:?}");
    }
    Ok(())
}

fn lengths(len: usize) -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(1..=len as u32, 0..5).prop_map(move |mut lengths| {
        let mut left = len as u32;
        lengths.iter_mut().for_each(|own| {
            *own = left.min(*own);
            left -= *own;
        });
        lengths.retain(|own| *own > 0);
        lengths
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let mask = prop_oneof![
        Just(AttentionMask::Causal),
        Just(AttentionMask::Full),
        (1..40usize).prop_map(AttentionMask::SlidingWindow)
    ];
    let sizes = (1..5usize, 4..150usize);
    sizes.prop_flat_map(move |(ranks, len)| {
        let documents = proptest::option::of([lengths(len), lengths(len)]);
        let heads = prop_oneof![Just(1usize), Just(2), Just(4)];
        (mask.clone(), documents, heads, any::<bool>(), 0..3u8, 0..4usize).prop_map(
            move |(mask, documents, kv_heads, dropout, recompute, hidden)| Case {
                ranks,
                len,
                mask,
                documents,
                kv_heads,
                dropout,
                recompute,
                hidden,
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn divided_rows_are_computed_as_whole_ones(case in cases()) {
        check(&case).unwrap();
    }
}

/// Rows that are cut more finely, because of their documents, and blocks of keys.
#[test]
fn long_rows_of_unequal_documents() -> Result<()> {
    for (ranks, mask) in
        [(2, AttentionMask::Causal), (3, AttentionMask::SlidingWindow(100)), (4, AttentionMask::Full)]
    {
        let documents = Some([vec![700, 20, 20, 20, 20, 20, 20], vec![1, 1100]]);
        check(&Case {
            ranks,
            len: 1536,
            mask,
            documents,
            kv_heads: 2,
            dropout: false,
            recompute: 0,
            hidden: 0,
        })?;
    }
    Ok(())
}

/// Keys and values travel in the dtype of the input; gradients of 16 bits are as close to the whole row's as theirs to f64's.
#[test]
fn sixteen_bits_are_exchanged_as_they_are() -> Result<()> {
    let case = Case {
        ranks: 2,
        len: 64,
        mask: AttentionMask::Causal,
        documents: None,
        kv_heads: 4,
        dropout: false,
        recompute: 0,
        hidden: 0,
    };
    let config = AttentionConfig::new(HEADS, case.mask);
    let narrow = |x: Tensor| x.to_dtype(DType::BF16);
    let [q, k, v, _] = inputs(&case)?;
    let [q, k, v] = [narrow(q)?, narrow(k)?, narrow(v)?];
    let whole = attention(&q, &k, &v, &config)?.to_dtype(DType::F64)?;
    let gaps = Local::run_shared(2, |comm| {
        let rows = ContextParallel::new(comm.clone()).divide(case.len, None)?;
        let context = RowContext { divided: Some(rows.clone()), ..RowContext::default() };
        let own = |x: &Tensor| rows.part_of(x);
        let y = context.scope(|| attention(&own(&q)?, &own(&k)?, &own(&v)?, &config))?;
        // Keys and values of two rows that are seen elsewhere, of 2 bytes each, and nothing else.
        // The second rank, with the middle of the row, sees the first part of the first rank alone.
        let seen = [case.len / 4, case.len / 2][comm.rank()];
        assert_eq!(comm.stats().bytes_sent as usize, 2 * 2 * seen * HEADS * DIMS * 2);
        Ok(gap(&y.to_dtype(DType::F64)?, &own(&whole)?)?)
    });
    assert!(gaps.unwrap().iter().all(|gap| *gap < 0.01));
    Ok(())
}
