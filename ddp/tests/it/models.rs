//! Models that share parameters, mix dtypes, have buffers, or depend on each other.

use crate::common::{Mlp, abc, assert_close, builder, gradients, numbers, on_all_ranks, values};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use ddp::{Ddp, DdpConfig, Error};

#[test]
fn dtypes_do_not_mix_in_a_bucket() {
    for dtypes in
        [[DType::F32, DType::F64, DType::BF16, DType::F16], [DType::F16, DType::F32, DType::F16, DType::F64]]
    {
        on_all_ranks(3, |comm| {
            let rank = comm.rank() as f64;
            let names = ["a", "b", "c", "d"];
            let vb = builder(1, &names.map(|name| (name, &[3usize] as &[usize])), DType::F64);
            let build = |vb: VarBuilder<'static>| {
                let parameter = |(name, dtype)| vb.get_with_hints_dtype(3, name, Default::default(), dtype);
                names.into_iter().zip(dtypes).map(parameter).collect::<candle_core::Result<Vec<_>>>()
            };
            let ddp = Ddp::new(comm, vb, &DdpConfig::default(), build)?;
            for _ in 0..2 {
                let sums = ddp.model()?.iter().map(|parameter| parameter.to_dtype(DType::F64)?.sum_all());
                let sums = sums.collect::<candle_core::Result<Vec<_>>>()?;
                let grads = ddp.backward(&(Tensor::stack(&sums, 0)?.sum_all()? * (rank + 1.0))?)?;
                for (var, dtype) in ddp.vars().iter().zip(dtypes) {
                    assert_eq!((var.dtype(), grads.get(var).map(Tensor::dtype)), (dtype, Some(dtype)));
                    assert_eq!(numbers(grads.get(var)), [2.0; 3]);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn tied_weights_are_one_parameter() {
    on_all_ranks(2, |comm| {
        let rank = comm.rank() as u64;
        let vb = builder(1, &[("embedding", &[4, 3])], DType::F64);
        let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| {
            Ok((vb.get((4, 3), "embedding")?, vb.get((4, 3), "embedding")?))
        })?;
        let x = values(3 + rank, &[2, 4], DType::F64);
        let (encode, decode) = ddp.model()?;
        assert_eq!((encode.id(), ddp.vars().len()), (decode.id(), 1));
        let loss = |weight: &Tensor, x: &Tensor| x.matmul(weight)?.matmul(&weight.t()?)?.sqr()?.mean_all();
        let grads = ddp.backward(&loss(encode, &x)?)?;
        let alone = Var::from_tensor(&ddp.vars()[0].as_detached_tensor())?;
        let losses =
            [loss(&alone, &values(3, &[2, 4], DType::F64))?, loss(&alone, &values(4, &[2, 4], DType::F64))?];
        let expected = Tensor::stack(&losses, 0)?.mean_all()?.backward()?;
        assert_close(&numbers(grads.get(&ddp.vars()[0])), &numbers(expected.get(&alone)), 1e-12);
        Ok(())
    });
}

#[test]
fn variables_tied_under_two_names_are_one_parameter() {
    on_all_ranks(2, |comm| {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let renamed = vb.rename_f(|name: &str| name.replace("decode", "encode"));
        let ddp = Ddp::new(comm, renamed, &DdpConfig::default(), |vb| {
            Ok([vb.get(2, "encode.weight")?, vb.get(2, "decode.weight")?])
        })?;
        let [encode, decode] = ddp.model()?;
        assert_eq!((encode.id(), ddp.vars().len()), (decode.id(), 1));
        Ok(())
    });
}

#[test]
fn one_models_loss_may_go_through_another() {
    on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let config = DdpConfig::default();
        let (generator, judge) = (abc(comm.clone(), DType::F64, &config)?, abc(comm, DType::F64, &config)?);
        let loss = (&generator.model()?.a * &judge.model()?.b)?.sum_all()?;
        let loss = (loss * (rank as f64 + 1.0))?;
        let grads = generator.backward(&loss)?;
        assert_eq!(gradients(&generator, &grads)[0], Some(vec![4.5, 6.0]));
        assert_eq!(gradients(&judge, &grads), [None, None, None]);
        let grads = judge.backward(&loss)?;
        assert_eq!(gradients(&judge, &grads)[1], Some(vec![1.5, 3.0]));
        Ok(())
    });
}

#[test]
fn a_penalty_on_the_parameters_is_averaged_too() {
    on_all_ranks(2, |comm| {
        let ddp = Mlp::ddp(comm, DType::F64, &DdpConfig::default())?;
        ddp.model()?;
        let penalties = ddp.parameters().iter().map(|parameter| parameter.tensor().sqr()?.sum_all());
        let penalties = penalties.collect::<candle_core::Result<Vec<_>>>()?;
        let grads = ddp.backward(&Tensor::stack(&penalties, 0)?.sum_all()?)?;
        for var in ddp.vars() {
            assert_eq!(numbers(grads.get(&var)), numbers([&(var.as_tensor() * 2.0)?]));
        }
        Ok(())
    });
}

#[test]
fn a_direct_use_of_a_variable_is_refused() {
    on_all_ranks(2, |comm| {
        let ddp = abc(comm, DType::F64, &DdpConfig::default())?;
        let loss = (ddp.model()?.a.sum_all()? + ddp.vars()[1].sum_all()?)?;
        // Later calls fail as well.
        for _ in 0..2 {
            let refused = ddp.backward_no_sync(&loss);
            assert!(matches!(refused, Err(Error::DirectUse { parameter }) if parameter == "b"));
        }
        Ok(())
    });
    on_all_ranks(2, |comm| {
        let ddp = abc(comm, DType::F64, &DdpConfig::default())?;
        let refused = ddp.backward(&(&ddp.model()?.a * ddp.vars()[0].as_tensor())?);
        assert!(matches!(refused, Err(Error::DirectUse { parameter }) if parameter == "a"));
        Ok(())
    });
}

#[test]
fn evaluation_needs_no_backward_and_a_loss_may_outlive_the_ddp() {
    on_all_ranks(2, |comm| {
        let ddp = abc(comm, DType::F64, &DdpConfig::default())?;
        let var = ddp.vars()[0].clone();
        let loss = ddp.model()?.a.sum_all()?;
        assert!(matches!(
            Error::from(loss.backward().expect_err("not averaged")),
            Error::OutsideBackward { parameter } if parameter == "a"
        ));
        // That has not changed any state.
        ddp.backward(&loss)?;
        drop(ddp);
        assert_eq!(numbers(loss.backward()?.get(&var)), [1.0; 2]);
        Ok(())
    });
}

#[test]
fn buffers_are_shared_and_equal_and_not_trained() {
    let statistics = on_all_ranks(2, |comm| {
        let rank = comm.rank();
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
        let init = |value| candle_nn::Init::Const(value);
        // E.g. what rank 0 has loaded.
        variables.get(2, "norm.running_mean", init(5.0 + rank as f64), DType::F32, &Device::Cpu)?;
        let ddp =
            Ddp::new(comm, vb, &DdpConfig::default(), |vb| candle_nn::batch_norm(2, 1e-5, vb.pp("norm")))?;
        assert_eq!(ddp.vars().len(), 2);
        let first = numbers([ddp.model()?.running_mean()]);
        let x = Tensor::new(&[[1f32, 2.0], [3.0, 6.0]], &Device::Cpu)?.reshape((2, 2, 1))?;
        let loss = ddp.forward_t(&x, true)?.sqr()?.mean_all()?;
        let grads = ddp.backward(&loss)?;
        SGD::new(ddp.vars(), 0.1)?.step(&grads)?;
        let shared = variables.data().lock().expect("no panic")["norm.running_mean"].clone();
        assert_eq!(numbers([shared.as_tensor()]), numbers([ddp.model()?.running_mean()]));
        assert_ne!(numbers([shared.as_tensor()]), first);
        Ok(first)
    });
    assert_eq!(statistics, [[5.0; 2], [5.0; 2]]);
}

#[test]
fn a_ddp_can_be_shared_among_threads() {
    fn is_shareable<T: Send + Sync>() {}
    is_shareable::<Ddp<candle_nn::Linear>>();
}
