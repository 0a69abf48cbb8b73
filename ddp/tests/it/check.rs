//! The check for equal parameters names the first that differs, the same on every rank.

use crate::common::{Mlp, abc, assert_close, numbers, on_all_ranks, on_ranks};
use candle_core::{DType, Device, Tensor, Var};
use comm::Mesh;
use ddp::{DdpConfig, Error};

/// Changes one element.
fn change(var: &Var, index: usize, value: f64) -> candle_core::Result<()> {
    let mut elements = numbers([var.as_tensor()]);
    elements[index] = value;
    var.set(&Tensor::from_vec(elements, var.shape(), &Device::Cpu)?.to_dtype(var.dtype())?)
}

#[test]
fn equal_parameters_pass_with_little_communication() {
    for world_size in 1..=4 {
        on_all_ranks(world_size, |comm| {
            let ddp = Mlp::ddp(comm.clone(), DType::F32, &DdpConfig::default())?;
            let before = comm.stats();
            ddp.check_parameters()?;
            assert_eq!(comm.stats().bytes_sent - before.bytes_sent, 8 * (world_size as u64 - 1));
            // Compared bit for bit, so a NaN equals itself.
            change(&ddp.vars()[2], 3, f64::NAN)?;
            ddp.check_parameters()
        });
    }
}

#[test]
fn the_first_difference_is_named_on_every_rank() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        for world_size in 2..=4 {
            let odd = world_size - 1;
            let errors = on_all_ranks(world_size, |comm| {
                let rank = comm.rank();
                let ddp = Mlp::ddp(comm, dtype, &DdpConfig::default())?;
                let vars = ddp.vars();
                // The last parameter differs on another rank, too, but is not the first difference.
                change(&vars[7], 1, rank as f64)?;
                change(&vars[4], 9, 0.25)?;
                if rank == odd {
                    change(&vars[4], 9, -0.5)?;
                    change(&vars[4], 30, 8.0)?;
                }
                let error = ddp.check_parameters().expect_err("they differ");
                // Once they are equal again, training can continue.
                vars.iter().try_for_each(|var| var.set(&var.as_tensor().zeros_like()?))?;
                ddp.check_parameters()?;
                ddp.model()?;
                Ok(error)
            });
            for error in &errors {
                let Error::Strategy(strategy::Error::ParametersDiffer(found)) = error else {
                    panic!("{error}")
                };
                assert_eq!((found.parameter.as_str(), &found.index[..]), ("l2.weight", &[1, 2][..]));
                assert_eq!((found.odd_rank, found.rank, &found.odd_ranks[..]), (odd, 0, &[odd][..]));
                let text = error.to_string();
                assert!(
                    text.contains(&format!("rank {odd} has -0.5, and rank 0 has 0.25 (2 of 42")),
                    "{text}"
                );
                assert_eq!(text, errors[0].to_string());
            }
        }
    }
}

#[test]
fn zeros_of_different_signs_differ_and_the_majority_is_right() {
    let errors = on_all_ranks(4, |comm| {
        let rank = comm.rank();
        let ddp = abc(comm, DType::F32, &DdpConfig::default())?;
        change(&ddp.vars()[1], 0, if rank == 0 || rank == 2 { -0.0 } else { 0.0 })?;
        change(&ddp.vars()[2], 1, if rank == 0 { 1.0 } else { 2.0 })?;
        let sign = ddp.check_parameters().expect_err("they differ").to_string();
        change(&ddp.vars()[1], 0, 0.0)?;
        Ok((sign, ddp.check_parameters().expect_err("they differ").to_string()))
    });
    for (sign, minority) in errors {
        assert!(sign.contains("parameter b") && sign.contains("0.0, and rank 0 has -0.0"), "{sign}");
        assert!(sign.contains("ranks [1, 3]"), "{sign}");
        assert!(minority.contains("rank 0 has 1.0, and rank 1 has 2.0"), "{minority}");
        assert!(minority.contains("ranks [0]"), "{minority}");
    }
}

#[test]
fn a_rank_that_is_gone_is_named() {
    let results = on_ranks(3, |comm| {
        let rank = comm.rank();
        let ddp = abc(comm, DType::F32, &DdpConfig::default())?;
        assert_ne!(rank, 1, "as it should");
        assert_close(&numbers([ddp.vars()[0].as_tensor()]), &[1.0, 2.0], 0.0);
        ddp.check_parameters()
    });
    for (rank, result) in results.into_iter().enumerate() {
        let Some(result) = result else {
            assert_eq!(rank, 1);
            continue;
        };
        let error = result.expect_err("a rank is gone");
        assert!(matches!(error, Error::Comm(comm::Error::PeerDied { rank: 1, .. })), "{error}");
    }
}

/// In a group along an axis of a mesh, too, ranks are reported as ranks in the whole job.
#[test]
fn the_odd_rank_of_a_group_is_named_by_its_number_in_the_job() {
    let found = on_all_ranks(4, |world| {
        let rank = world.rank();
        let mesh = Mesh::new(world, &[("dp", 2), ("tp", 2)])?;
        let dp = mesh.axis("dp")?;
        let ddp = abc(dp.clone(), DType::F32, &DdpConfig::default())?;
        if rank == 3 {
            change(&ddp.vars()[1], 0, -9.0)?;
        }
        let values = ddp.check_parameters().err();
        let bucket_bytes = if rank == 3 { 7 } else { 8 };
        let config = DdpConfig { bucket_bytes, ..DdpConfig::default() };
        Ok((values, abc(dp.clone(), DType::F32, &config).err()))
    });
    for (rank, found) in found.into_iter().enumerate() {
        match found {
            (None, None) => assert_eq!(rank % 2, 0),
            (
                Some(Error::Strategy(strategy::Error::ParametersDiffer(values))),
                Some(Error::ModelMismatch(model)),
            ) => {
                assert_eq!((values.odd_rank, values.rank, &values.odd_ranks[..]), (3, 1, &[3][..]));
                assert_eq!((model.odd_rank, model.rank), (3, 1));
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
}
