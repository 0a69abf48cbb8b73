//! Mixed precision equals a single process with the same casts, and all ranks skip the same steps.

use crate::common::{
    Comm, INPUTS, Mlp, OUTPUTS, assert_close, numbers, on_all_ranks, parameters, start, values,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, Optimizer, SGD, VarBuilder, linear, loss};
use fsdp::{Fsdp, FsdpConfig, LossScaler, LossScalerConfig, MixedPrecision, Result};
use training::build::{Builder, Division, LinearConfig, Recompute};

const STEPS: usize = 5;

#[derive(Clone, Copy, Debug)]
struct Run {
    param: DType,
    reduce: Option<DType>,
    world_size: usize,
    seed: u64,
}

impl Run {
    fn batch(&self, step: usize, rank: usize) -> (Tensor, Tensor) {
        let seed = self.seed * 10_000 + (step * 100 + rank) as u64;
        (values(seed, &[4, INPUTS], DType::F32), values(seed + 50, &[4, OUTPUTS], DType::F32))
    }

    fn sharded(&self, comm: Comm) -> Result<(Vec<f64>, Vec<f64>)> {
        let rank = comm.rank();
        let mixed_precision = MixedPrecision {
            param_dtype: Some(self.param),
            reduce_dtype: self.reduce,
            output_dtype: Some(DType::F32),
        };
        let config = FsdpConfig { mixed_precision, pack_elements: 20, ..FsdpConfig::default() };
        let fsdp = Mlp::fsdp(comm, self.seed, DType::F32, &config)?;
        let mut optimizer = SGD::new(fsdp.vars(), 0.1)?;
        let mut losses = vec![];
        for step in 0..STEPS {
            let (x, y) = self.batch(step, rank);
            let loss = loss::mse(&fsdp.forward(&x)?, &y)?;
            losses.extend(numbers([&loss]));
            optimizer.step(&fsdp.backward(&loss)?)?;
        }
        Ok((losses, parameters(&fsdp)?))
    }

    /// Trains in a single process: f32 variables, cast for each rank's batch; each rank's gradients are cast, averaged in
    /// f32, rounded once.
    fn alone(&self) -> candle_core::Result<(Vec<Vec<f64>>, Vec<f64>)> {
        let mut vars: Vec<(String, Var)> = start(self.seed, DType::F32)
            .into_iter()
            .map(|(name, value)| Ok((name, Var::from_tensor(&value)?)))
            .collect::<candle_core::Result<_>>()?;
        vars.sort_by_key(|(name, _)| name.clone());
        let mut losses = vec![vec![]; self.world_size];
        for step in 0..STEPS {
            let mut sums: Vec<Option<Tensor>> = vec![None; vars.len()];
            for (rank, losses) in losses.iter_mut().enumerate() {
                let casts: Vec<(String, Var)> = vars
                    .iter()
                    .map(|(name, var)| {
                        Ok((
                            name.clone(),
                            Var::from_tensor(&var.as_detached_tensor().to_dtype(self.param)?.copy()?)?,
                        ))
                    })
                    .collect::<candle_core::Result<_>>()?;
                let loss = self.loss(&casts, step, rank)?;
                losses.extend(numbers([&loss]));
                let grads = loss.backward()?;
                for (sum, (_, var)) in sums.iter_mut().zip(&casts) {
                    let grad =
                        grads.get(var).expect("a gradient").to_dtype(self.reduce.unwrap_or(self.param))?;
                    let grad = grad.to_dtype(DType::F32)?;
                    *sum = Some(match sum.take() {
                        Some(sum) => (sum + grad)?,
                        None => grad,
                    });
                }
            }
            for (sum, (_, var)) in sums.iter().zip(&vars) {
                let mean = (sum.as_ref().expect("a gradient") / self.world_size as f64)?;
                let rounded = mean.to_dtype(self.reduce.unwrap_or(self.param))?.to_dtype(DType::F32)?;
                var.set(&(var.as_detached_tensor() - (rounded * 0.1)?)?)?;
            }
        }
        Ok((losses, numbers(vars.iter().map(|(_, var)| var.as_tensor()))))
    }

    fn loss(&self, casts: &[(String, Var)], step: usize, rank: usize) -> candle_core::Result<Tensor> {
        let named = casts.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let vb = VarBuilder::from_tensors(named, self.param, &Device::Cpu);
        let widths = [INPUTS, 9, 7, 6, OUTPUTS];
        let (x, y) = self.batch(step, rank);
        let mut x = x.to_dtype(self.param)?;
        for layer in 0..4 {
            if layer > 0 {
                x = x.tanh()?;
            }
            x = linear(widths[layer], widths[layer + 1], vb.pp(format!("l{layer}")))?.forward(&x)?;
        }
        loss::mse(&x.to_dtype(DType::F32)?, &y)
    }
}

#[test]
fn equal_to_one_process_with_the_same_casts() {
    for world_size in 1..=4 {
        for (param, reduce, tolerance) in [
            (DType::F16, None, 2e-3),
            (DType::BF16, None, 2e-2),
            (DType::F16, Some(DType::F32), 1e-3),
            (DType::BF16, Some(DType::F32), 4e-3),
            (DType::F32, Some(DType::BF16), 2e-2),
        ] {
            let run = Run { param, reduce, world_size, seed: 3 };
            let ranks = on_all_ranks(world_size, |comm| run.sharded(comm));
            let (losses, parameters) = run.alone().expect("one process trains");
            for ((got, _), expected) in ranks.iter().zip(&losses) {
                // The first loss is computed before any averaging, and so is bitwise equal.
                assert_eq!(got[0], expected[0], "{run:?}");
                assert_close(got, expected, tolerance);
            }
            assert_close(&ranks[0].1, &parameters, tolerance);
        }
    }
}

#[test]
fn many_backwards_are_summed_in_f32_and_rounded_once() {
    const BACKWARDS: usize = 256;
    for (param, reduce) in [
        (DType::BF16, None),
        (DType::F16, None),
        (DType::BF16, Some(DType::F32)),
        (DType::F32, Some(DType::BF16)),
        (DType::F32, Some(DType::F16)),
        (DType::F64, Some(DType::BF16)),
    ] {
        // Each slope is exact in every dtype used here, but the sums are not; the first one is large compared to the others.
        let slope = |rank: usize, backward: usize| match backward {
            0 => 1.0,
            _ => (1 + (rank + backward) % 3) as f64 / 1024.0,
        };
        let ends = on_all_ranks(2, |comm| {
            let rank = comm.rank();
            let vb = VarBuilder::from_tensors(
                [("w".into(), values(1, &[6], DType::F64))].into(),
                DType::F64,
                &Device::Cpu,
            );
            let mixed_precision = MixedPrecision {
                param_dtype: Some(param),
                reduce_dtype: reduce,
                ..MixedPrecision::default()
            };
            let config = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
            let fsdp = Fsdp::new(comm, vb, &config, |units| units.unit(|vb| vb.get(6, "w")))?;
            let loss = |backward: usize| fsdp.model()?.run(|w| (w * slope(rank, backward))?.sum_all());
            for backward in 1..BACKWARDS {
                fsdp.backward_no_sync(&loss(backward - 1)?)?;
            }
            let grads = fsdp.backward(&loss(BACKWARDS - 1)?)?;
            let live = fsdp.memory().gradients.live;
            Ok((numbers([grads.get(&fsdp.vars()[0]).expect("a gradient")]), live))
        });
        let reduce = reduce.unwrap_or(param);
        let round = |sum: f64, dtype: DType| {
            let rounded =
                Tensor::new(sum, &Device::Cpu).and_then(|sum| sum.to_dtype(dtype)?.to_dtype(DType::F64));
            rounded.and_then(|rounded| rounded.to_scalar::<f64>()).expect("on the CPU")
        };
        let sums =
            [0, 1].map(|rank| round((0..BACKWARDS).map(|backward| slope(rank, backward)).sum(), reduce));
        let expected = round((sums[0] + sums[1]) / 2.0, reduce);
        for (got, live) in ends {
            assert_eq!(got, [expected; 3], "{param:?}, {reduce:?}");
            assert_eq!(live, 3 * size_of::<f64>(), "the gradient that was given out");
        }
    }
}

/// As in `Unit::forward`: a model that is written for any layout knows nothing of the dtype its units compute in.
#[test]
fn a_model_for_any_layout_gets_its_input_in_the_dtype_of_its_parameters() {
    let (config, x) =
        (LinearConfig::new(3, 2, Division::Whole).with_bias(true), values(3, &[4, 3], DType::F32));
    for recompute in [Recompute::None, Recompute::Units] {
        let ends = on_all_ranks(2, |comm| {
            let shapes = [("fc.weight", vec![2, 3]), ("fc.bias", vec![2])];
            let tensors = shapes.map(|(name, shape)| (name.to_string(), values(1, &shape, DType::F32)));
            let vb = || VarBuilder::from_tensors(tensors.clone().into(), DType::F32, &Device::Cpu);
            let mixed_precision =
                MixedPrecision { param_dtype: Some(DType::F16), ..MixedPrecision::default() };
            let fsdp = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
            let plain = Fsdp::new(comm.clone(), vb(), &fsdp, |units| {
                units.pp("fc").unit(|vb| ops::linear(3, 2, vb))
            })?;
            let any = Fsdp::new(comm, vb(), &fsdp, |units| {
                let builder = Builder::from(units).recomputing(recompute);
                builder.unit("fc", |part| part.pp("fc").linear(&config))
            })?;
            let (plain_loss, any_loss) = (plain.forward(&x)?, any.forward(&x)?);
            assert_eq!(any_loss.dtype(), DType::F16);
            let plain_grads = plain.backward(&plain_loss.sqr()?.sum_all()?)?;
            let any_grads = any.backward(&any_loss.sqr()?.sum_all()?)?;
            let of = |fsdp: Vec<Var>, grads: &GradStore| {
                numbers(fsdp.iter().map(|var| grads.get(var).expect("a gradient")))
            };
            let values = numbers([&plain_loss]) == numbers([&any_loss]);
            Ok(values && of(plain.vars(), &plain_grads) == of(any.vars(), &any_grads))
        });
        assert_eq!(ends, [true, true], "{recompute:?}");
    }
}

#[test]
fn a_step_that_one_rank_cannot_take_is_skipped_by_all() {
    let ends = on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let vb = VarBuilder::from_tensors(
            [("w".into(), values(1, &[6], DType::F32))].into(),
            DType::F32,
            &Device::Cpu,
        );
        let mixed_precision = MixedPrecision { param_dtype: Some(DType::F16), ..MixedPrecision::default() };
        let config = FsdpConfig { mixed_precision, ..FsdpConfig::default() };
        let fsdp = Fsdp::new(comm, vb, &config, |units| units.unit(|vb| vb.get(6, "w")))?;
        let mut optimizer = SGD::new(fsdp.vars(), 1.0)?;
        let config = LossScalerConfig { scale: 1024.0, growth_interval: 2, ..LossScalerConfig::default() };
        let mut scaler = LossScaler::new(config)?;
        let mut seen = vec![];
        for step in 0..6 {
            // In the third step, an element of rank 1's gradient overflows that belongs to the shard of rank 2.
            let factor = if step == 2 && rank == 1 { 1e4 } else { 1e-3 };
            let slope = Tensor::new(&[1e-3f32, 1e-3, 1e-3, 1e-3, 1e-3, factor], &Device::Cpu)?;
            let loss = fsdp.model()?.run(|w| w.to_dtype(DType::F32)?.mul(&slope)?.sum_all())?;
            let before = fsdp.vars()[0].to_vec1::<f32>()?;
            let mut grads = fsdp.backward(&scaler.scale(&loss)?)?;
            let steps = scaler.unscale(&fsdp, &mut grads)?;
            if steps {
                let grad = grads.get(&fsdp.vars()[0]).expect("a gradient").to_vec1::<f32>()?;
                assert!(grad.iter().all(|grad| (grad - 1e-3).abs() < 1e-6), "{grad:?}");
                optimizer.step(&grads)?;
            } else {
                assert_eq!(before, fsdp.vars()[0].to_vec1::<f32>()?);
            }
            seen.push((steps, scaler.factor()));
        }
        assert_eq!(scaler.skipped(), 1);
        Ok(seen)
    });
    let expected =
        [(true, 1024.0), (true, 2048.0), (false, 1024.0), (true, 1024.0), (true, 2048.0), (true, 2048.0)];
    assert!(ends.iter().all(|end| end[..] == expected), "{ends:?}");
}

#[test]
fn scalers_that_cannot_work_are_refused() {
    let line = |config| LossScaler::new(config).expect_err("refused").to_string();
    let good = LossScalerConfig::default();
    assert!(line(LossScalerConfig { scale: 0.0, ..good }).contains("scale is 0"));
    assert!(line(LossScalerConfig { growth: 1.0, ..good }).contains("growth is 1"));
    assert!(line(LossScalerConfig { backoff: f64::NAN, ..good }).contains("backoff is NaN"));
    assert!(line(LossScalerConfig { growth_interval: 0, ..good }).contains("growth_interval is 0"));
}
