//! The check of averaged gradients: all ranks find the same, and the audit, which sees a gradient of every parameter, does not.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use ddp::{Ddp, DdpConfig};
use training::GradientCheckConfig;

use crate::common::{builder, on_all_ranks, parameters_of, values};

type Softmax = fn(&Tensor) -> Result<Tensor>;

/// Attention with one projection for queries, keys and values.
fn attention(qkv: &Linear, x: &Tensor, softmax: Softmax) -> Result<Tensor> {
    let qkv = qkv.forward(x)?;
    let [q, k, v] = [0, 1, 2].map(|i| qkv.narrow(1, 8 * i, 8)?.contiguous());
    softmax(&q?.matmul(&k?.t()?)?)?.matmul(&v?)?.sqr()?.mean_all()
}

#[test]
fn rows_without_a_gradient_are_named_by_all_ranks() {
    for world_size in 1..=3 {
        let found = on_all_ranks(world_size, |comm| {
            let x = values(comm.rank() as u64, &[6, 8], DType::F32);
            let vb = builder(1, &[("qkv.weight", &[24, 8])], DType::F32);
            let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear_no_bias(8, 24, vb.pp("qkv")))?;
            let (before, config) = (parameters_of(&ddp), GradientCheckConfig::default());
            let check = |softmax: Softmax| ddp.check_gradient(|qkv| attention(qkv, &x, softmax), &config);
            let lost = check(candle_nn::ops::softmax_last_dim).unwrap_err().to_string();
            let passes = check(ops::softmax)?;
            assert_eq!((passes.lost, passes.undecided), (vec![], vec![]));
            assert_eq!(parameters_of(&ddp), before);
            Ok(lost)
        });
        assert!(found[0].contains("qkv.weight, rows 0 to 15 (the gradient is 0"), "{}", found[0]);
        assert!(found.iter().all(|line| *line == found[0]), "{found:?}");
    }
}
