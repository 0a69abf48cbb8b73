//! Packed rows are computed as their documents alone: results and gradients, of attention, rotary embedding and the layer of both.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use ops::{
    AttentionConfig, AttentionMask, Documents, Dropout, Rotary, RotaryConfig, RowContext, RowKeys, attention,
    attention_with_key_mask, backward, recompute, recompute_cheap, self_attention,
};
use proptest::prelude::*;

fn random(dims: &[usize]) -> Result<Var> {
    Var::from_tensor(&Tensor::randn(0f64, 1., dims, &Device::Cpu)?)
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    numbers(a).iter().zip(numbers(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

/// The documents of a row: their places, and those of each unused place.
fn places(lengths: &[u32], len: usize) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    for len in lengths {
        let first = all.last().map_or(0, |(first, len)| first + len);
        all.push((first, *len as usize));
    }
    let used = all.last().map_or(0, |(first, len)| first + len);
    all.extend((used..len).map(|place| (place, 1)));
    all
}

/// Results and gradients of packed rows, and of their documents alone.
fn compare(
    rows: &[Vec<u32>],
    len: usize,
    vars: &[&Var],
    outer: &Tensor,
    operation: impl Fn(&[Tensor], usize, (usize, usize)) -> Result<Tensor>,
) -> Result<()> {
    let documents = Documents::new(rows.to_vec()).unwrap();
    let whole: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let packed = documents.scope(|| operation(&whole, usize::MAX, (0, len)))?;
    let packed_grads = backward(&(&packed * outer)?.sum_all()?)?;
    let alone = rows.iter().enumerate().map(|(row, lengths)| {
        let own = places(lengths, len).into_iter().map(|(first, len)| {
            let own = whole
                .iter()
                .map(|x| x.narrow(0, row, 1)?.narrow(1, first, len))
                .collect::<Result<Vec<_>>>()?;
            operation(&own, row, (first, len))
        });
        Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 1)
    });
    let alone = Tensor::cat(&alone.collect::<Result<Vec<_>>>()?, 0)?;
    assert!(gap(&packed, &alone) < 1e-10, "{rows:?}: {}", gap(&packed, &alone));
    let alone_grads = backward(&(alone * outer)?.sum_all()?)?;
    for var in vars {
        let gap = gap(packed_grads.get(var).unwrap(), alone_grads.get(var).unwrap());
        assert!(gap < 1e-10, "{rows:?}: a gradient is {gap} off");
    }
    Ok(())
}

fn rows() -> impl Strategy<Value = (Vec<Vec<u32>>, usize)> {
    let length = prop_oneof![2 => 1u32..3, 3 => 1u32..20, 1 => 60u32..140];
    let rows = prop::collection::vec(prop::collection::vec(length, 0..6), 1..3);
    (rows, 0usize..9).prop_map(|(rows, unused)| {
        let longest = rows.iter().map(|row| row.iter().sum::<u32>()).max().unwrap_or_default();
        (rows, longest as usize + unused.max(1))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn packed_attention_is_that_of_documents_alone(
        (rows, len) in rows(),
        (heads, kv_heads, dims) in prop::sample::select(vec![(1, 1, 3), (4, 2, 5), (3, 1, 8), (2, 2, 4)]),
        mask in prop_oneof![
            2 => Just(AttentionMask::Causal),
            1 => Just(AttentionMask::Full),
            2 => prop_oneof![1usize..5, 1usize..150].prop_map(AttentionMask::SlidingWindow),
        ],
        hidden in prop::option::of(2usize..5),
    ) {
        let shape = |heads: usize| [rows.len(), len, heads * dims];
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|heads| random(&shape(heads)).unwrap());
        let config = AttentionConfig { num_kv_heads: Some(kv_heads), ..AttentionConfig::new(heads, mask) };
        let seen = (0..rows.len() * len).map(|key| u8::from(hidden.is_none_or(|each| key % each != 1)));
        let seen = Tensor::from_iter(seen, &Device::Cpu).unwrap().reshape((rows.len(), len)).unwrap();
        let outer = random(&shape(heads)).unwrap().as_detached_tensor();
        compare(&rows, len, &[&q, &k, &v], &outer, |x, row, (first, len)| {
            let own = if row == usize::MAX { seen.clone() } else { seen.narrow(0, row, 1)?.narrow(1, first, len)? };
            match hidden {
                Some(_) => attention_with_key_mask(&x[0], &x[1], &x[2], &own, &config),
                None => attention(&x[0], &x[1], &x[2], &config),
            }
        }).unwrap();
    }

    #[test]
    fn packed_self_attention_is_that_of_documents_alone((rows, len) in rows(), recomputed in 0..3) {
        let (vars, max_len) = (VarMap::new(), 140);
        let builder = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
        let config = AttentionConfig { num_kv_heads: Some(1), ..AttentionConfig::new(2, AttentionMask::Causal) };
        // The table is shorter than the row.
        let rotary = Rotary::new(&RotaryConfig::new(4, max_len), &Device::Cpu).unwrap();
        let layer = self_attention(8, 4, config, builder).unwrap().with_rotary(rotary);
        let x = random(&[rows.len(), len, 8]).unwrap();
        let outer = random(&[rows.len(), len, 8]).unwrap().as_detached_tensor();
        let parameters = vars.all_vars();
        let all: Vec<&Var> = parameters.iter().collect();
        let run = |x: &Tensor| {
            let layer = layer.clone();
            let part = move |x: &Tensor| layer.forward_t(x, true);
            match recomputed {
                0 => part(x),
                1 => recompute(x, part),
                _ => recompute_cheap(x, part),
            }
        };
        compare(&rows, len, &[&x], &outer, |x, _, _| run(&x[0])).unwrap();
        // Gradients of the parameters, which are sums over documents.
        let documents = Documents::new(rows.clone()).unwrap();
        let of = |y: Tensor, outer: &Tensor| backward(&(y * outer).unwrap().sum_all().unwrap()).unwrap();
        let packed = of(documents.scope(|| run(&x)).unwrap(), &outer);
        let mut sums: Vec<Option<Tensor>> = vec![None; all.len()];
        for (row, lengths) in rows.iter().enumerate() {
            for (first, len) in places(lengths, len) {
                let part = |x: &Tensor| x.narrow(0, row, 1).unwrap().narrow(1, first, len).unwrap();
                let alone = of(run(&part(x.as_tensor())).unwrap(), &part(&outer));
                for (sum, var) in sums.iter_mut().zip(&all) {
                    let own = alone.get(var).unwrap();
                    *sum = Some(sum.as_ref().map_or_else(|| own.clone(), |sum| (sum + own).unwrap()));
                }
            }
        }
        for (sum, var) in sums.iter().zip(&all) {
            let gap = gap(packed.get(var).unwrap(), sum.as_ref().unwrap());
            prop_assert!(gap < 1e-10 * len as f64, "{} off", gap);
        }
    }
}

/// The random numbers of dropout belong to the row and the place: documents do not change which weights are dropped.
#[test]
fn dropout_by_row_is_as_without_documents() -> Result<()> {
    let dropout = Some(Dropout::by_row(0.4, "layer")?);
    let config = AttentionConfig { dropout, ..AttentionConfig::new(2, AttentionMask::Causal) };
    let [q, k] = [random(&[2, 6, 4])?, random(&[2, 6, 4])?];
    // Values by which the result tells each key's weight.
    let v = Tensor::eye(6, DType::F64, &Device::Cpu)?.repeat((2, 1, 2))?.reshape((2, 6, 12))?;
    let config = AttentionConfig { scale: Some(0.0), ..config };
    let [q, k] = [q, k].map(|x| x.as_tensor().repeat((1, 1, 3)).unwrap());
    let keys = RowKeys::new(3, 1, 0..2);
    let run = |documents| {
        let context = RowContext { keys: Some(keys.clone()), documents, ..RowContext::default() };
        context.scope(|| attention(&q, &k, &v, &config)).map(|y| numbers(&y))
    };
    let whole = run(None)?;
    let packed = run(Some(Documents::new([vec![2, 4], vec![6]])?))?;
    for (at, (packed, whole)) in packed.iter().zip(whole).enumerate() {
        let (row, query, key) = (at / 72, at / 12 % 6, at % 6);
        let is_seen = key <= query && (row == 1 || (key < 2) == (query < 2));
        assert_eq!(*packed != 0.0, is_seen && whole != 0.0, "row {row}, query {query}, key {key}");
    }
    Ok(())
}

/// A changed place changes the places of its document from there on, and no others.
#[test]
fn a_change_stays_within_the_document() -> Result<()> {
    let documents = Documents::new([vec![70, 1, 90, 30]])?;
    for mask in [AttentionMask::Causal, AttentionMask::SlidingWindow(200)] {
        let config = AttentionConfig::new(2, mask);
        let x = random(&[1, 200, 8])?;
        let run = |x: &Tensor| documents.scope(|| attention(x, x, x, &config)).map(|y| numbers(&y));
        let before = run(&x)?;
        for (place, end) in [(0, 70), (69, 70), (70, 71), (71, 161), (100, 161), (161, 191), (193, 194)] {
            let changed = x.as_detached_tensor().copy()?;
            changed.slice_set(&Tensor::ones((1, 1, 8), DType::F64, &Device::Cpu)?, 1, place)?;
            let after = run(&changed)?;
            let differ = |at: &usize| before[at * 8..(at + 1) * 8] != after[at * 8..(at + 1) * 8];
            assert!((0..200).filter(differ).eq(place..end), "{mask:?}: {place}");
        }
    }
    Ok(())
}

#[test]
fn a_document_beyond_the_table_is_refused() -> Result<()> {
    let rotary = Rotary::new(&RotaryConfig::new(4, 8), &Device::Cpu)?;
    let x = random(&[1, 12, 4])?;
    let said = |lengths| {
        Documents::new([lengths]).unwrap().scope(|| rotary.apply(&x, 0)).map_err(|error| error.to_string())
    };
    assert!(said(vec![4, 8]).is_ok());
    assert!(
        said(vec![3, 9]).unwrap_err().starts_with("rotary: 9 positions from 0 on are beyond the table of 8")
    );
    let rows = Documents::new([vec![1], vec![2]])?.scope(|| rotary.apply(&x, 0)).unwrap_err().to_string();
    assert!(rows.starts_with("rotary within Documents: "), "{rows}");
    Ok(())
}
