//! Gradients that are summed over several backward passes, and what follows a failed one.

use candle_core::{DType, Device, Tensor, Var};
use comm::{Local, Mesh};
use tensor_parallel::{
    DistributedModel, LanguageModel, ShardBuilder, Split, TensorParallel, TensorParallelConfig, Weights,
};

use super::experts::expert;
use crate::common::{batch, gap, gradients, on_mesh, sizes};

fn config(sequence_parallel: bool) -> TensorParallelConfig {
    TensorParallelConfig { sequence_parallel, dtype: DType::F64, ..TensorParallelConfig::default() }
}

#[test]
fn the_sum_of_passes_is_the_gradient_of_the_sum_of_losses() {
    for (dp, tp) in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)] {
        for sequence_parallel in [false, true] {
            let ranks = on_mesh(dp, tp, |mesh| {
                let model = |builder: ShardBuilder| LanguageModel::new(builder, &sizes());
                let parallel =
                    TensorParallel::new(mesh, &config(sequence_parallel), &Weights::seed(1), model)?;
                let loss = |step| {
                    let (tokens, next) = batch(&sizes(), step, mesh.axis("dp")?.rank());
                    parallel.model()?.loss(&tokens, &next)
                };
                // The second round is as the first one: nothing is left of it.
                for _ in 0..2 {
                    for step in 0..2 {
                        parallel.backward_no_sync(&loss(step)?)?;
                    }
                    let summed = gradients(&parallel, &parallel.backward(&loss(2)?)?);
                    let at_once = parallel.backward(&(loss(0)? + loss(1)? + loss(2)?)?)?;
                    let (summed, at_once) = (whole_of(summed), whole_of(gradients(&parallel, &at_once)));
                    for (name, expected) in at_once {
                        assert!(gap(&summed[&name], &expected) < 1e-12, "{name}");
                    }
                }
                Ok(())
            });
            assert_eq!(ranks.len(), dp * tp);
        }
    }
}

/// Names and values of a rank's own parts.
fn whole_of(parts: Vec<crate::common::Part>) -> std::collections::BTreeMap<String, Tensor> {
    parts.into_iter().map(|part| (part.0, part.1)).collect()
}

/// Replicas use different layers in different passes.
#[test]
fn a_parameter_of_any_pass_has_a_gradient() {
    for is_layer in [true, false] {
        let passes: [[&[usize]; 2]; 2] = [[&[0], &[1]], [&[1], &[2, 1]]];
        let found = Local::run_shared(2, |comm| {
            let rank = comm.rank();
            let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 1)])?;
            let build = |builder: ShardBuilder| {
                let one = |index| expert(&builder.pp(index), is_layer);
                (0..4).map(one).collect::<tensor_parallel::Result<Vec<_>>>()
            };
            let parallel = TensorParallel::new(&mesh, &config(false), &Weights::seed(1), build)?;
            let x = Tensor::ones((1, 4), DType::F64, &Device::Cpu)?;
            let loss = |pass: usize| {
                let outputs = passes[rank][pass].iter().map(|&index| parallel.model()?[index](&x)?.sum_all());
                outputs.reduce(|a, b| a? + b?).unwrap()? * [1.0, 10.0][rank]
            };
            parallel.backward_no_sync(&loss(0)?)?;
            let grads = parallel.backward(&loss(1)?)?;
            let first =
                |var: &Var| grads.get(var)?.flatten_all().ok()?.to_vec1::<f64>().ok()?.first().copied();
            Ok(parallel.vars().iter().map(first).collect::<Vec<_>>())
        });
        assert_eq!(found.unwrap(), vec![vec![Some(0.5), Some(10.5), Some(5.0), None]; 2], "{is_layer}");
    }
}

/// In 16 bits each of the later gradients would be lost.
#[test]
fn sums_of_16_bits_are_rounded_once() {
    for dp in [1, 2] {
        for is_layer in [true, false] {
            let found = on_mesh(dp, 1, |mesh| {
                let config = TensorParallelConfig { dtype: DType::BF16, ..config(false) };
                let build = |builder: ShardBuilder| expert(&builder.pp("a"), is_layer);
                let parallel = TensorParallel::new(mesh, &config, &Weights::seed(1), build)?;
                let x = Tensor::ones((1, 4), DType::BF16, &Device::Cpu)?;
                let loss = |scale: f64| {
                    Ok::<_, tensor_parallel::Error>((parallel.model()?(&x)?.sum_all()? * scale)?)
                };
                parallel.backward_no_sync(&loss(1.0)?)?;
                for _ in 1..64 {
                    parallel.backward_no_sync(&loss(1.0 / 512.0)?)?;
                }
                let grads = parallel.backward(&loss(1.0 / 512.0)?)?;
                let gradient = grads.get(&parallel.vars()[0]).unwrap();
                Ok(gradient.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?[0])
            });
            assert_eq!(found, vec![1.125; dp], "{is_layer}");
        }
    }
}

#[test]
fn after_a_failed_backward_every_call_gives_its_cause() {
    let messages = on_mesh(1, 2, |mesh| {
        let model = |builder: ShardBuilder| builder.get(4, "w", candle_nn::Init::Const(1.0), Split::Whole);
        let parallel = TensorParallel::new(mesh, &config(false), &Weights::seed(1), model)?;
        let fails = |_: &Tensor| Err(comm::Error::System { what: "the layer".into(), reason: "no".into() });
        let x = comm::autograd::custom("fails", &[parallel.model()?], parallel.model()?.sum_all()?, fails)?;
        let first = parallel.backward(&x).map(drop);
        let mut grads = Tensor::zeros((), DType::F64, &Device::Cpu)?.backward()?;
        let later = [
            parallel.model().map(drop),
            parallel.backward_no_sync(&x),
            parallel.clip_grad_norm(&mut grads, 1.0).map(drop),
            parallel.check_parameters(),
            parallel.visit_full(|_, _| Ok(())),
            parallel.save_full("no/such/folder"),
        ];
        Ok([first].into_iter().chain(later).map(|ended| ended.unwrap_err().to_string()).collect::<Vec<_>>())
    });
    for line in messages.iter().flatten() {
        assert!(line.contains("the layer: no"), "{line}");
    }
}
