//! A rank that dies during a step: every other rank's call fails with an error that names it, and so do all later calls.
#![allow(clippy::expect_used)]

mod common;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use candle_nn::Module;
use common::{INPUTS, Mlp, on_ranks, values};
use fsdp::{DistributedModel, Error, FsdpConfig, Result, ShardingStrategy};

/// Where rank 1 dies.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    BeforeForward,
    InForward,
    InBackward,
    BeforeClipping,
}

const PLACES: [Moment; 4] =
    [Moment::BeforeForward, Moment::InForward, Moment::InBackward, Moment::BeforeClipping];

/// Panics in backward, if its field is true.
struct Trap(bool);

impl CustomOp1 for Trap {
    fn name(&self) -> &'static str {
        "trap"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        assert!(!self.0, "this rank ends here");
        Ok(Some(grad.clone()))
    }
}

#[test]
fn every_other_rank_names_it_and_fails_for_good() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for place in PLACES {
            let ends = on_ranks(3, |comm| -> Result<()> {
                let rank = comm.rank();
                let dies = |here: Moment| assert!(rank != 1 || here != place, "this rank ends here");
                let fsdp = Mlp::fsdp(comm, 1, DType::F32, &FsdpConfig { strategy, ..FsdpConfig::default() })?;
                let x = values(1, &[2, INPUTS], DType::F32);
                let step = |last: bool| -> Result<()> {
                    if last {
                        dies(Moment::BeforeForward);
                    }
                    let model = fsdp.model()?;
                    let x = model.first.forward(&x)?.tanh()?;
                    if last {
                        dies(Moment::InForward);
                    }
                    let trap = Trap(last && rank == 1 && place == Moment::InBackward);
                    let x = model.middle.run(|(a, b)| b.forward(&a.forward(&x)?.apply_op1(trap)?))?;
                    let mut grads = fsdp.backward(&model.last.forward(&x)?.sqr()?.sum_all()?)?;
                    if last {
                        dies(Moment::BeforeClipping);
                    }
                    fsdp.clip_grad_norm(&mut grads, 1.0).map(drop)
                };
                step(false)?;
                let result = step(true).and_then(|()| step(false));
                if let (Err(error), Err(again)) = (&result, fsdp.model()) {
                    assert_eq!(error.to_string(), again.to_string());
                }
                result
            });
            for (rank, end) in ends.into_iter().enumerate() {
                match (rank, end) {
                    (1, end) => assert!(end.is_none(), "{place:?}: it panicked"),
                    (_, Some(Err(error @ Error::Comm(_)))) => {
                        assert!(error.is_peer_failure(), "{place:?}: {error}");
                        assert!(error.to_string().contains("rank 1"), "{strategy:?}, {place:?}: {error}");
                    }
                    (_, end) => panic!("{strategy:?}, {place:?}, rank {rank}: {end:?}"),
                }
            }
        }
    }
}
