//! Errors for misuse: each names the mistake, in one line.
#![allow(clippy::expect_used)]

mod common;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
use common::{Comm, Mlp, on_all_ranks, on_ranks, values};
use fsdp::{DistributedModel, Fsdp, FsdpConfig, MixedPrecision, Result, Unit, UnitBuilder};

fn vb() -> VarBuilder<'static> {
    VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu)
}

fn refused<M>(
    config: &FsdpConfig,
    build: impl Fn(UnitBuilder<'static>) -> candle_core::Result<M> + Sync,
) -> String {
    let lines = on_all_ranks(2, |comm| {
        let zeros = [("ids", DType::U32), ("w", DType::F32), ("v", DType::F32)].map(|(name, dtype)| {
            (name.to_string(), Tensor::zeros(3, dtype, &Device::Cpu).expect("on the CPU"))
        });
        let vb = VarBuilder::from_tensors(zeros.into(), DType::F32, &Device::Cpu);
        Ok(Fsdp::new(comm, vb, config, &build).map(drop).expect_err("it cannot be sharded").to_string())
    });
    assert_eq!(lines[0], lines[1]);
    lines[0].clone()
}

#[test]
fn units_that_cannot_be_sharded_are_named() {
    let config = &FsdpConfig::default();
    let line = refused(config, |units| units.pp("relu").unit(|_| Ok(())));
    assert!(line.contains("unit relu has no parameters"), "{line}");
    let line = refused(config, |units| {
        Ok((units.pp("a").unit(|vb| vb.root().get(3, "w"))?, units.pp("b").unit(|vb| vb.root().get(3, "w"))?))
    });
    assert!(line.contains("parameter w is in unit a and in unit b"), "{line}");
    let line =
        refused(config, |units| Ok((units.unit(|vb| vb.get(3, "w"))?, units.unit(|vb| vb.get(3, "v"))?)));
    assert!(line.contains("two units are called the model"), "{line}");
    let line = refused(config, |units| {
        units.unit(|vb| vb.get_with_hints_dtype(3, "ids", Default::default(), DType::U32))
    });
    assert!(line.contains("parameter ids of unit the model is of dtype U32"), "{line}");
    let line = refused(config, |units| {
        units.unit(|vb| {
            Ok((vb.get(3, "w")?, vb.get_with_hints_dtype(3, "v", Default::default(), DType::F64)?))
        })
    });
    assert!(line.contains("parameter v") && line.contains("F64"), "{line}");
    let line = refused(config, |units| units.unit(|vb| Ok((vb.get(3, "w")?, vb.get((1, 3), "w")?))));
    assert!(line.contains("parameter w as [1, 3], and before as [3]"), "{line}");
    let buffers = FsdpConfig { buffers: vec!["v".into()], ..FsdpConfig::default() };
    let line = refused(&buffers, |units| {
        units.unit(|vb| Ok((vb.get(3, "w")?, vb.get(3, "v")?, vb.get(3, "v")?, vb.get((1, 3), "v")?)))
    });
    assert!(line.contains("parameter v as [1, 3], and before as [3]"), "{line}");
    let line = refused(config, |units| {
        units.pp("block").unit(|vb| {
            let attn = units.pp("block.attn").unit(|vb| vb.root().get(3, "v"))?;
            Ok((vb.root().get(3, "w")?, attn))
        })
    });
    assert!(line.contains("unit block.attn is made inside of unit block"), "{line}");
    let mixed_precision = MixedPrecision { reduce_dtype: Some(DType::U8), ..MixedPrecision::default() };
    let line = refused(&FsdpConfig { mixed_precision, ..FsdpConfig::default() }, |units| {
        units.unit(|vb| vb.get(3, "w"))
    });
    assert!(line.contains("reduce_dtype is U8"), "{line}");
}

#[test]
fn a_name_that_is_asked_for_twice_in_a_unit_is_one_parameter() {
    let gradients = on_all_ranks(2, |comm| {
        let start = [("w".to_string(), values(1, &[3], DType::F64))].into();
        let vb = VarBuilder::from_tensors(start, DType::F64, &Device::Cpu);
        let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
            units.unit(|vb| Ok((vb.get(3, "w")?, vb.get(3, "w")?)))
        })?;
        let unit: &Unit<(Tensor, Tensor)> = fsdp.model()?;
        let loss = unit.run(|(a, b)| (a * 2.0)?.add(&(b * 3.0)?)?.sum_all())?;
        let grads = fsdp.backward(&loss)?;
        Ok(grads.get(&fsdp.vars()[0]).expect("a gradient").to_vec1::<f64>()?)
    });
    assert_eq!(gradients, [vec![5.0, 5.0], vec![5.0, 0.0]]);
}

#[test]
fn more_ranks_than_elements_train() {
    let steps = on_all_ranks(4, |comm| {
        let vb = VarBuilder::from_tensors(
            [("w".to_string(), values(1, &[2], DType::F64))].into(),
            DType::F64,
            &Device::Cpu,
        );
        let fsdp = Fsdp::new(comm, vb, &FsdpConfig { pack_elements: 0, ..FsdpConfig::default() }, |units| {
            units.unit(|vb| vb.get(2, "w"))
        })?;
        let loss = fsdp.model()?.run(|w| w.sqr()?.sum_all())?;
        let mut grads = fsdp.backward(&loss)?;
        fsdp.clip_grad_norm(&mut grads, 1e9)
    });
    let expected = 2.0
        * values(1, &[2], DType::F64)
            .sqr()
            .and_then(|x| x.sum_all()?.to_scalar::<f64>())
            .expect("CPU")
            .sqrt();
    assert!(steps.iter().all(|norm| (norm - expected).abs() < 1e-12), "{steps:?}");
}

#[test]
fn ranks_with_different_models_or_values_are_told_which() {
    let build = |comm: Comm, seed: u64, config: &FsdpConfig| {
        Ok(Mlp::fsdp(comm, seed, DType::F32, config).map(drop).expect_err("they differ").to_string())
    };
    let lines =
        on_all_ranks(3, |comm| build(comm.clone(), u64::from(comm.rank() == 1), &FsdpConfig::default()));
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    assert!(lines[0].contains("rank 1 has unit l0 with values of hash"), "{}", lines[0]);
    let lines = on_all_ranks(3, |comm| {
        build(comm.clone(), 1, &FsdpConfig { pack_elements: comm.rank() / 2, ..FsdpConfig::default() })
    });
    assert!(lines[0].contains("rank 2 has FullShard") && lines[0].contains("small: below 1"), "{}", lines[0]);
}

#[test]
fn values_that_each_rank_has_drawn_for_itself_are_told_what_to_draw_them_with() {
    let lines = on_all_ranks(2, |comm| {
        let build = |units: UnitBuilder<'static>| units.unit(|vb| linear(3, 2, vb));
        let vars = Fsdp::new(comm.clone(), vb(), &FsdpConfig::default(), build);
        let generator = sampler::SharedGenerator::from(sampler::Generator::new(42));
        let drawn = training::TorchInit::tensor_builder(&generator, DType::F32, &Device::Cpu);
        Fsdp::new(comm, drawn, &FsdpConfig::default(), build)?;
        Ok(vars.map(drop).expect_err("they differ").to_string())
    });
    for line in lines {
        assert!(line.contains("unit the model with values of hash") && line.contains("a `VarMap`"), "{line}");
        assert!(line.contains("`training::TorchInit::tensor_builder` with the same seed"), "{line}");
    }
}

#[test]
fn backward_on_the_loss_itself_says_what_to_call() {
    let lines = on_all_ranks(2, |comm| {
        let fsdp = Mlp::fsdp(comm, 1, DType::F32, &FsdpConfig::default())?;
        let loss = fsdp.forward(&values(1, &[2, 5], DType::F32))?.sum_all()?;
        Ok(fsdp::Error::from(loss.backward().map(drop).expect_err("refused")).to_string())
    });
    assert!(lines[0].contains("unit l3") && lines[0].contains("fsdp.backward(&loss)"), "{}", lines[0]);
}

#[test]
fn a_unit_without_its_wrapper_says_so() {
    let comm = || common::on_all_ranks(1, Ok).remove(0);
    let lines = refused(&FsdpConfig::default(), |units| {
        let unit = units.unit(|vb| vb.get(3, "w"))?;
        unit.run(|w| w.sqr())
    });
    assert!(lines.contains("unit the model runs while there is no Fsdp"), "{lines}");
    let asked_late = Fsdp::new(comm(), vb(), &FsdpConfig::default(), |units| {
        units.unit(|vb| Ok((linear(2, 2, vb.clone())?, vb)))
    });
    let fsdp = asked_late.expect("it is whole");
    let late = fsdp.model().expect("no failure").module().1.get(3, "more").expect_err("too late").to_string();
    assert!(late.contains("parameter more was asked for after unit the model was built"), "{late}");
}

#[test]
fn a_unit_may_follow_one_that_could_not_be_made() {
    on_all_ranks(2, |comm| {
        let zeros = [("w".to_string(), values(1, &[3], DType::F32))].into();
        let vb = VarBuilder::from_tensors(zeros, DType::F32, &Device::Cpu);
        let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
            units.pp("a").unit(|vb| vb.get(3, "none")).map(drop).expect_err("there is no such parameter");
            units.unit(|vb| vb.get(3, "w"))
        })?;
        fsdp.model()?.run(|w| w.sqr())?;
        Ok(())
    });
}

#[test]
fn a_gradient_that_is_not_finite_is_named_by_all() {
    let lines = on_all_ranks(3, |comm| {
        let fsdp = Mlp::fsdp(comm.clone(), 1, DType::F32, &FsdpConfig::default())?;
        let mut grads = fsdp.backward(&fsdp.forward(&values(1, &[2, 5], DType::F32))?.sum_all()?)?;
        let (name, var) = fsdp.named_vars().remove(6);
        if comm.rank() == 1 {
            let nan = (grads.get(&var).expect("a gradient") * f64::NAN)?;
            grads.insert(&var, nan);
        }
        assert_eq!(name, "l3.weight");
        Ok(fsdp.clip_grad_norm(&mut grads, 1.0).expect_err("not finite").to_string())
    });
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    assert!(lines[0].contains("the gradient of parameter l3.weight on rank 1 is not finite"), "{}", lines[0]);
    assert!(lines[0].contains("NaN"), "{}", lines[0]);
}

struct Two(Unit<Linear>, Unit<Linear>);

#[test]
fn ranks_that_run_units_in_different_orders_are_named_before_a_gradient_is_used() {
    let ends = on_ranks(3, |comm| -> Result<()> {
        let rank = comm.rank();
        let vb = VarBuilder::from_tensors(
            ["a.weight", "a.bias", "b.weight", "b.bias"]
                .map(|name| {
                    (name.to_string(), values(1, &[3, 3][usize::from(name.ends_with("bias"))..], DType::F32))
                })
                .into(),
            DType::F32,
            &Device::Cpu,
        );
        let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), |units| {
            Ok(Two(units.pp("a").unit(|vb| linear(3, 3, vb))?, units.pp("b").unit(|vb| linear(3, 3, vb))?))
        })?;
        let Two(a, b) = fsdp.model()?;
        let x = values(1, &[2, 3], DType::F32);
        // Equal in size, so that no operation can detect the wrong order.
        let y = if rank == 2 { a.forward(&b.forward(&x)?)? } else { b.forward(&a.forward(&x)?)? };
        let error = fsdp.backward(&y.sum_all()?).map(drop).expect_err("out of order").to_string();
        assert!(error.contains("rank 2 ran other units than rank 0"), "{error}");
        assert_eq!(fsdp.forward_twice().expect_err("failed").to_string(), error);
        Ok(())
    });
    ends.into_iter().for_each(|end| end.expect("no panic").expect("no other error"));
}

trait ForwardTwice {
    fn forward_twice(&self) -> Result<()>;
}

impl ForwardTwice for Fsdp<Two> {
    fn forward_twice(&self) -> Result<()> {
        self.model().map(drop)
    }
}
