//! Results of backward for all the ways in which a model can use its parameters.

use crate::common::{Abc, abc, builder, gradients, numbers, on_all_ranks, values};
use candle_core::{DType, Device, Tensor, Var};
use ddp::{Ddp, DdpConfig, Result};

/// Returns configurations with a separate bucket for every parameter, and with a single bucket.
fn configs() -> [DdpConfig; 2] {
    let apart = DdpConfig { bucket_bytes: 0, first_bucket_bytes: 0, ..Default::default() };
    [apart, DdpConfig::default()]
}

/// Runs the same step three times with each configuration: before and after buckets are rebuilt and unused parameters are
/// predicted.
fn each_step(world_size: usize, step: impl Fn(&Ddp<Abc>, usize) -> Result<()> + Sync) {
    for config in configs() {
        on_all_ranks(world_size, |comm| {
            let rank = comm.rank();
            let ddp = abc(comm, DType::F64, &config)?;
            (0..3).try_for_each(|_| step(&ddp, rank))
        });
    }
}

#[test]
fn parameters_unused_on_some_ranks_count_as_zero_and_on_all_ranks_have_none() {
    each_step(3, |ddp, rank| {
        let Abc { a, b, .. } = ddp.model()?;
        let loss = if rank == 1 { (a.sum_all()? + (b.sum_all()? * 6.0)?)? } else { a.sum_all()? };
        let grads = ddp.backward(&loss)?;
        assert_eq!(gradients(ddp, &grads), [Some(vec![1.0; 2]), Some(vec![2.0; 2]), None]);
        Ok(())
    });
}

#[test]
fn one_rank_alone_has_gradients_of_what_it_uses() {
    each_step(1, |ddp, _| {
        let Abc { a, c, .. } = ddp.model()?;
        let grads = ddp.backward(&(a * c)?.sum_all()?)?;
        assert_eq!(gradients(ddp, &grads), [Some(vec![5.0, 6.0]), None, Some(vec![1.0, 2.0])]);
        Ok(())
    });
}

#[test]
fn a_rank_changes_what_it_uses_from_step_to_step() {
    for config in configs() {
        on_all_ranks(2, |comm| {
            let rank = comm.rank();
            let ddp = abc(comm, DType::F64, &config)?;
            for step in 0..12 {
                let Abc { a, b, c } = ddp.model()?;
                let used = |index: usize, rank: usize| (step * 5 + index * 3 + rank * 7) % 4 < 2;
                let mut loss = Tensor::zeros((), DType::F64, &Device::Cpu)?;
                for (index, parameter) in [a, b, c].into_iter().enumerate() {
                    if used(index, rank) {
                        loss = (loss + (parameter.sum_all()? * (index + 1) as f64)?)?;
                    }
                }
                let grads = ddp.backward(&loss)?;
                let expected = |index: usize| {
                    let users = (0..2).filter(|&rank| used(index, rank)).count();
                    (users > 0).then(|| vec![(index + 1) as f64 * users as f64 / 2.0; 2])
                };
                assert_eq!(gradients(&ddp, &grads), (0..3).map(expected).collect::<Vec<_>>(), "step {step}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_loss_of_no_parameter_has_no_gradients() {
    each_step(2, |ddp, rank| {
        let loss = Tensor::new(1f64, &Device::Cpu)?;
        // First one rank's loss depends on no parameter, then that of both.
        let loss = if rank == 0 { ddp.model()?.a.sum_all()? } else { loss };
        let grads = ddp.backward(&loss)?;
        assert_eq!(gradients(ddp, &grads), [Some(vec![0.5; 2]), None, None]);
        let grads = ddp.backward(&Tensor::new(1f64, &Device::Cpu)?)?;
        assert_eq!(gradients(ddp, &grads), [None, None, None]);
        Ok(())
    });
}

#[test]
fn a_shared_parameter_has_the_sum_over_its_uses() {
    each_step(2, |ddp, rank| {
        let factor = rank as f64 + 1.0;
        let first = (ddp.model()?.a.sum_all()? * factor)?;
        let second = ddp.model()?.a.sqr()?.sum_all()?;
        let loss = (first + second)?;
        // Two backward passes through one graph: the first leaves no state behind.
        for _ in 0..2 {
            let grads = ddp.backward(&loss)?;
            assert_eq!(gradients(ddp, &grads)[0], Some(vec![3.5, 5.5]));
        }
        Ok(())
    });
}

#[test]
fn accumulation_sums_and_communicates_once() {
    each_step(2, |ddp, rank| {
        let factor = rank as f64 + 1.0;
        let Abc { a, b, .. } = ddp.model()?;
        ddp.backward_no_sync(&(a.sum_all()? * factor)?)?;
        ddp.backward_no_sync(&((a.sum_all()? * 10.0)? + b.sum_all()?)?)?;
        // `b` is used in accumulation only.
        let grads = ddp.backward(&(a.sum_all()? * 100.0)?)?;
        assert_eq!(gradients(ddp, &grads), [Some(vec![111.5; 2]), Some(vec![1.0; 2]), None]);
        let grads = ddp.backward(&a.sum_all()?)?;
        assert_eq!(gradients(ddp, &grads), [Some(vec![1.0; 2]), None, None]);
        Ok(())
    });
    let operations = on_all_ranks(2, |comm| {
        let ddp = abc(comm.clone(), DType::F32, &DdpConfig::default())?;
        let before = comm.stats().operations;
        for _ in 0..5 {
            ddp.backward_no_sync(&ddp.model()?.a.sum_all()?)?;
        }
        assert_eq!(comm.stats().operations, before);
        ddp.backward(&ddp.model()?.a.sum_all()?)?;
        Ok(comm.stats().operations - before)
    });
    assert_eq!(operations, [1, 1]);
}

#[test]
fn gradients_outlive_the_next_backward_and_are_contiguous() {
    each_step(2, |ddp, rank| {
        let Abc { a, b, .. } = ddp.model()?;
        let first = ddp.backward(&((a * b)?.sum_all()? * (rank as f64 + 1.0))?)?;
        let second = ddp.backward(&a.sum_all()?)?;
        assert_eq!(gradients(ddp, &first), [Some(vec![4.5, 6.0]), Some(vec![1.5, 3.0]), None]);
        assert_eq!(gradients(ddp, &second)[0], Some(vec![1.0; 2]));
        assert!(ddp.vars().iter().filter_map(|var| first.get(var)).all(Tensor::is_contiguous));
        Ok(())
    });
}

#[test]
fn gradients_that_are_not_contiguous_and_scalars_and_nothing() {
    for config in configs() {
        on_all_ranks(2, |comm| {
            let vb = builder(1, &[("matrix", &[2, 3]), ("scalar", &[]), ("none", &[0, 4])], DType::F64);
            let weights = values(7, &[3, 2], DType::F64);
            let ddp = Ddp::new(comm, vb, &config, |vb| {
                Ok([vb.get((2, 3), "matrix")?, vb.get((), "scalar")?, vb.get((0, 4), "none")?])
            })?;
            for _ in 0..2 {
                let [matrix, scalar, none] = ddp.model()?;
                let loss = ((matrix.t()? * &weights)?.sum_all()? + scalar.sqr()?)?;
                let grads = ddp.backward(&(loss + none.sum_all()?)?)?;
                let [matrix, scalar, none] =
                    ddp.vars().try_into().unwrap_or_else(|_| panic!("three parameters"));
                let of = |var: &Var| grads.get(var).expect("a gradient").clone();
                assert_eq!(of(&matrix).dims(), [2, 3]);
                assert_eq!(numbers([&of(&matrix)]), numbers([&weights.t()?.contiguous()?]));
                assert_eq!(of(&scalar).to_scalar::<f64>()?, 2.0 * scalar.to_scalar::<f64>()?);
                assert_eq!(of(&none).dims(), [0, 4]);
            }
            Ok(())
        });
    }
}

/// In 16 bits the small gradients would be lost when added to the large one.
#[test]
fn sums_of_16_bits_are_rounded_once() {
    for (dtype, world_size) in [(DType::BF16, 2), (DType::F16, 1)] {
        for config in configs() {
            on_all_ranks(world_size, |comm| {
                let ddp = abc(comm, dtype, &config)?;
                for _ in 0..3 {
                    let Abc { a, b, .. } = ddp.model()?;
                    ddp.backward_no_sync(&(a.sum_all()? + b.sum_all()?)?)?;
                    for _ in 0..1023 {
                        ddp.backward_no_sync(&(a.sum_all()? / 4096.0)?)?;
                    }
                    // `b` has no gradient in the last pass.
                    let grads = ddp.backward(&(a.sum_all()? / 4096.0)?)?;
                    assert_eq!(gradients(&ddp, &grads)[..2], [Some(vec![1.25; 2]), Some(vec![1.0; 2])]);
                    assert_eq!(grads.get(&ddp.vars()[0]).expect("a gradient").dtype(), dtype);
                }
                Ok(())
            });
        }
    }
}
