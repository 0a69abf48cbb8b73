//! Gradients of recomputation (activation checkpointing): a parameter may get several in one pass.

use crate::common::{assert_close, builder, numbers, on_all_ranks, values};
use candle_core::{DType, Result, Tensor, Var};
use ddp::{Ddp, DdpConfig};
use ops::recompute;
use proptest::prelude::*;

const PARAMETERS: usize = 5;
const WIDTH: usize = 3;
const STEPS: usize = 4;

/// One use of a parameter.
#[derive(Clone, Copy, Debug)]
struct Use {
    parameter: usize,
    recomputed: bool,
    /// Bit mask of the ranks that have this use.
    ranks: u8,
}

fn forward(weights: &[Tensor], uses: &[Use], rank: usize, x: &Tensor, recomputes: bool) -> Result<Tensor> {
    let mut x = x.clone();
    for usage in uses.iter().filter(|usage| (usage.ranks >> rank) & 1 == 1) {
        let weight = weights[usage.parameter].clone();
        let segment = move |x: &Tensor| (x * &weight)?.sin();
        x = if usage.recomputed && recomputes { recompute(&x, segment)? } else { segment(&x)? };
    }
    x.sqr()?.sum_all()
}

fn shapes() -> Vec<(&'static str, &'static [usize])> {
    ["a", "b", "c", "d", "e"].into_iter().map(|name| (name, &[WIDTH][..])).collect()
}

fn input(step: usize, rank: usize) -> Tensor {
    values((step * 10 + rank) as u64, &[WIDTH], DType::F64)
}

/// Returns, by parameter, the mean over ranks of the gradients; `None` if no rank uses it.
fn expected(ranks: usize, uses: &[Use], step: usize, backwards: usize) -> Result<Vec<Option<Vec<f64>>>> {
    let vb = builder(1, &shapes(), DType::F64);
    let vars = shapes().into_iter().map(|(name, dims)| Var::from_tensor(&vb.get(dims, name)?));
    let vars = vars.collect::<Result<Vec<_>>>()?;
    let weights: Vec<_> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let mut sums: Vec<Option<Vec<f64>>> = vec![None; PARAMETERS];
    for rank in 0..ranks {
        let x = Var::from_tensor(&input(step, rank))?;
        let loss = forward(&weights, uses, rank, &x, false)?;
        let grads = (loss * (backwards as f64 / ranks as f64))?.backward()?;
        for (sum, var) in sums.iter_mut().zip(&vars) {
            let Some(grad) = grads.get(var) else { continue };
            let before = sum.clone().unwrap_or(vec![0.0; WIDTH]);
            *sum = Some(before.iter().zip(numbers([grad])).map(|(sum, grad)| sum + grad).collect());
        }
    }
    Ok(sums)
}

fn compare(ranks: usize, uses: &[Use], config: &DdpConfig, backwards: usize) {
    on_all_ranks(ranks, |comm| {
        let rank = comm.rank();
        let ddp = Ddp::new(comm, builder(1, &shapes(), DType::F64), config, |vb| {
            shapes().into_iter().map(|(name, dims)| vb.get(dims, name)).collect::<Result<Vec<_>>>()
        })?;
        for step in 0..STEPS {
            let x = Var::from_tensor(&input(step, rank))?;
            for _ in 1..backwards {
                ddp.backward_no_sync(&forward(ddp.model()?, uses, rank, &x, true)?)?;
            }
            let grads = ddp.backward(&forward(ddp.model()?, uses, rank, &x, true)?)?;
            let expected = expected(ranks, uses, step, backwards)?;
            for (parameter, expected) in ddp.parameters().iter().zip(expected) {
                let got = grads.get(parameter.var()).map(|grad| numbers([grad]));
                assert_eq!(got.is_some(), expected.is_some(), "step {step}, {}", parameter.name());
                if let (Some(got), Some(expected)) = (got, expected) {
                    assert_close(&got, &expected, 1e-12);
                }
            }
        }
        Ok(())
    });
}

fn apart() -> DdpConfig {
    DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..DdpConfig::default() }
}

#[test]
fn a_parameter_in_two_recomputed_segments_has_the_sum_of_both() {
    let segment = |parameter| Use { parameter, recomputed: true, ranks: 0xff };
    for ranks in 1..=3 {
        // Between the two uses of one parameter all others arrive, and their buckets are sent.
        compare(ranks, &[0, 1, 2, 3, 4, 0].map(segment), &apart(), 1);
        compare(ranks, &[4, 3, 2, 1, 0, 4, 3].map(segment), &apart(), 2);
        // One parameter is unused, so that the next pass predicts which gradients arrive.
        compare(ranks, &[0, 1, 2, 3, 3, 0].map(segment), &apart(), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn equal_to_one_process_whatever_is_computed_again(
        ranks in 1usize..=3,
        uses in proptest::collection::vec((0..PARAMETERS, any::<bool>(), 1u8..8), 1..9),
        backwards in 1usize..3,
        is_apart in any::<bool>(),
    ) {
        let uses: Vec<_> =
            uses.into_iter().map(|(parameter, recomputed, ranks)| Use { parameter, recomputed, ranks }).collect();
        let config = if is_apart { apart() } else { DdpConfig { first_bucket_bytes: 24, bucket_bytes: 48, ..DdpConfig::default() } };
        compare(ranks, &uses, &config, backwards);
    }
}

#[test]
fn one_more_use_than_in_the_first_step_is_an_error_and_not_a_wrong_gradient() {
    let ends = on_all_ranks(2, |comm| {
        let ddp = Ddp::new(comm.clone(), builder(1, &shapes(), DType::F64), &apart(), |vb| {
            shapes().into_iter().map(|(name, dims)| vb.get(dims, name)).collect::<Result<Vec<_>>>()
        })?;
        let x = Var::from_tensor(&input(0, comm.rank()))?;
        let segment = |parameter| Use { parameter, recomputed: true, ranks: 0xff };
        ddp.backward(&forward(ddp.model()?, &[0, 1, 2, 3, 4].map(segment), 0, &x, true)?)?;
        let loss = forward(ddp.model()?, &[4, 0, 1, 2, 3, 4].map(segment), 0, &x, true)?;
        Ok(ddp.backward(&loss).map(drop).map_err(|error| error.to_string()))
    });
    for end in ends {
        let line = end.expect_err("too late");
        assert!(line.contains("parameter e got one more gradient"), "{line}");
    }
}
