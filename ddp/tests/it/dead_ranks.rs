//! A rank that dies is named by every other rank, on each code path of a step.

use crate::common::{Comm, INPUTS, Mlp, on_ranks, values};
use candle_core::DType;
use candle_nn::{BatchNorm, Module, VarBuilder, VarMap, batch_norm};
use ddp::{CommHook, Ddp, DdpConfig, Error, PowerSgdConfig, Result};

const RANKS: usize = 3;
/// The step in which a rank dies, and that rank.
const LAST: usize = 2;
const DEAD: usize = 1;

/// Checks the errors of the other ranks; rank 1 panics in the third step.
fn others(steps: impl Fn(Comm) -> Result<()> + Sync) {
    for (rank, result) in on_ranks(RANKS, steps).into_iter().enumerate() {
        let Some(result) = result else {
            assert_eq!(rank, DEAD, "it panicked");
            continue;
        };
        let error = result.expect_err("a rank is dead");
        assert!(matches!(&error, Error::Comm(comm::Error::PeerDied { rank: DEAD, .. })), "{error}");
        assert!(error.is_peer_failure());
    }
}

fn step<M: Module>(ddp: &Ddp<M>, step: usize, rank: usize) -> Result<()> {
    assert!(step < LAST || rank != DEAD, "as it should");
    let loss = ddp.forward(&values(step as u64, &[4, INPUTS], DType::F32))?.sqr()?.mean_all()?;
    ddp.backward_weighted(&loss, 4.0).map(drop)
}

#[test]
fn in_weighted_averages_with_every_hook() {
    let low_rank = PowerSgdConfig { warm_up_steps: 0, min_compression: 1, ..Default::default() };
    for hook in [CommHook::AllReduce, CommHook::F16, CommHook::PowerSgd(low_rank)] {
        for bucket_bytes in [0, usize::MAX] {
            let config = DdpConfig {
                hook: hook.clone(),
                bucket_bytes,
                first_bucket_bytes: bucket_bytes,
                tune_bucket_bytes: true,
                ..Default::default()
            };
            others(|comm| {
                let rank = comm.rank();
                let ddp = Mlp::ddp(comm, DType::F32, &config)?;
                (0..=LAST).try_for_each(|index| step(&ddp, index, rank))
            });
        }
    }
}

#[test]
fn while_others_have_joined() {
    others(|comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, DType::F32, &DdpConfig::default())?;
        // Rank 0 has no data at all; rank 2 has more than the rank that dies.
        if rank > 0 {
            (0..=LAST).try_for_each(|index| step(&ddp, index, rank))?;
        }
        while ddp.join()?.is_some() {}
        Ok(())
    });
}

#[test]
fn when_it_has_joined_itself() {
    others(|comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, DType::F32, &DdpConfig::default())?;
        if rank == DEAD {
            ddp.join()?;
        }
        assert_ne!(rank, DEAD, "as it should");
        (0..=LAST).try_for_each(|index| step(&ddp, index, rank))
    });
}

#[test]
fn before_buffers_are_equal() {
    others(|comm| {
        let rank = comm.rank();
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &candle_core::Device::Cpu);
        let ddp: Ddp<BatchNorm> = Ddp::new(comm, vb, &DdpConfig::default(), |vb| batch_norm(2, 1e-5, vb))?;
        for step in 0..=LAST {
            assert!(step < LAST || rank != DEAD, "as it should");
            let x = values(step as u64, &[4, 2, 3], DType::F32);
            ddp.backward(&ddp.forward_t(&x, true)?.powf(3.0)?.mean_all()?)?;
        }
        Ok(())
    });
}

/// Ranks that leave without a panic are distinguished from those that die.
#[test]
fn a_rank_that_does_not_join_but_leaves_is_named() {
    let results = on_ranks(RANKS, |comm| {
        let rank = comm.rank();
        let ddp = Mlp::ddp(comm, DType::F32, &DdpConfig::default())?;
        let mine = if rank == DEAD { 0..LAST } else { 0..LAST + 1 };
        mine.into_iter().try_for_each(|index| step(&ddp, index, rank))
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result.expect("no panic") {
            Ok(()) => assert_eq!(rank, DEAD),
            Err(error) => {
                let left = matches!(error, Error::Comm(comm::Error::PeerLeft { rank: DEAD, .. }));
                assert!(left && rank != DEAD, "rank {rank}: {error}");
            }
        }
    }
}
