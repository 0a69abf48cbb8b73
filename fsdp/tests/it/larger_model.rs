//! Clipping if the sharded model is a part of a larger one, whose other parts are along other axes of a mesh.

use crate::common::{INPUTS, Mlp, builder, numbers, on_all_ranks, values};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, VarBuilder};
use comm::Mesh;
use fsdp::{DistributedModel, Fsdp, FsdpConfig, LossScaler, LossScalerConfig};
use training::{clip_grad_norm, grad_norm};

const MAX_NORM: f64 = 0.1;

fn input() -> Tensor {
    values(3, &[2, INPUTS], DType::F64)
}

/// The norm equals that of the models of all stages together, each of which is sharded.
#[test]
fn the_norm_is_that_of_all_stages() {
    for axes in [
        [("pp", 2), ("dp", 2), ("shard", 2)],
        [("pp", 3), ("shard", 2), ("dp", 1)],
        [("shard", 1), ("dp", 1), ("pp", 2)],
    ] {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let stages = axes.iter().find(|(name, _)| *name == "pp").map_or(1, |(_, size)| *size);
        // The norm of each stage alone, unsharded.
        let own = |stage: usize| {
            let norms = on_all_ranks(1, |comm| {
                let fsdp = Mlp::fsdp(comm, 1 + stage as u64, DType::F64, &FsdpConfig::default())?;
                let grads = fsdp.backward(&fsdp.forward(&input())?.sqr()?.sum_all()?)?;
                fsdp.grad_norm(&grads)
            });
            norms[0]
        };
        let expected = (0..stages).map(|stage| own(stage).powi(2)).sum::<f64>().sqrt();
        let found = on_all_ranks(ranks, |comm| {
            let mesh = Mesh::new(comm, &axes)?;
            let stage = mesh.axis("pp")?.rank();
            let (vb, config) = (builder(1 + stage as u64, DType::F64), FsdpConfig::default());
            let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &config, Mlp::new)?;
            fsdp.set_norm_over(vec![mesh.axis("pp")?.clone()], |_| true);
            let mut grads = fsdp.backward(&fsdp.forward(&input())?.sqr()?.sum_all()?)?;
            let list = |grads: &candle_core::backprop::GradStore| {
                numbers(fsdp.vars().iter().map(|var| grads.get(var).expect("a gradient")))
            };
            let before = list(&grads);
            let norm = fsdp.clip_grad_norm(&mut grads, MAX_NORM)?;
            let factor = MAX_NORM / (norm + 1e-6);
            for (after, before) in list(&grads).iter().zip(before) {
                assert_eq!(*after, before * factor);
            }
            Ok(norm)
        });
        assert!(found.iter().all(|norm| norm.to_bits() == found[0].to_bits()), "{found:?}");
        assert!((found[0] - expected).abs() < 1e-12 * expected, "{found:?}, {expected}");
    }
}

/// A matrix of which each rank along `tp` has different rows, and a vector that all of them have.
#[test]
fn what_several_ranks_have_is_counted_once() {
    let (tp, shards) = (2, 3);
    let matrix = values(5, &[4, INPUTS], DType::F64);
    let vector = values(6, &[INPUTS], DType::F64);
    let loss = |matrix: &Tensor, vector: &Tensor| -> candle_core::Result<Tensor> {
        matrix.broadcast_mul(vector)?.sqr()?.sum_all()
    };
    let expected = {
        let vars = [Var::from_tensor(&matrix), Var::from_tensor(&vector)].map(|var| var.expect("a variable"));
        let mut grads = loss(&vars[0], &vars[1]).and_then(|loss| loss.backward()).expect("gradients");
        clip_grad_norm(&mut grads, &vars, MAX_NORM).expect("finite")
    };
    for pack_elements in [0, 1000] {
        let norms = on_all_ranks(tp * shards, |comm| {
            let mesh = Mesh::new(comm, &[("shard", shards), ("dp", 1), ("tp", tp)])?;
            let place = mesh.axis("tp")?.rank();
            let rows = matrix.narrow(0, 2 * place, 2)?.contiguous()?;
            let tensors = [("matrix".to_string(), rows), ("vector".to_string(), vector.clone())];
            let vb = VarBuilder::from_tensors(tensors.into(), DType::F64, &Device::Cpu);
            let config = FsdpConfig { pack_elements, ..FsdpConfig::default() };
            let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &config, |units| {
                units.unit(|vb| Ok((vb.get((2, INPUTS), "matrix")?, vb.get(INPUTS, "vector")?)))
            })?;
            fsdp.set_norm_over(vec![mesh.axis("tp")?.clone()], |name| place == 0 || name == "matrix");
            let loss = fsdp.model()?.run(|(matrix, vector)| {
                // As in tensor parallelism, the vector's gradient is summed over the ranks that have parts of the matrix.
                let vector = comm::autograd::copy_to_group(vector, mesh.axis("tp")?)?;
                loss(matrix, &vector)
            })?;
            let mut grads = fsdp.backward(&loss)?;
            fsdp.clip_grad_norm(&mut grads, MAX_NORM)
        });
        for norm in &norms {
            assert_eq!(norm.to_bits(), norms[0].to_bits());
            assert!((norm - expected).abs() < 1e-12 * expected, "{norm}, in one process {expected}");
        }
    }
}

#[test]
fn a_step_is_skipped_and_an_odd_gradient_named_by_all_stages() {
    let found = on_all_ranks(4, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 2), ("shard", 2), ("dp", 1)])?;
        let stage = mesh.axis("pp")?.rank();
        let (vb, config) = (builder(1, DType::F64), FsdpConfig::default());
        let mut fsdp = Fsdp::hybrid(&mesh, ("shard", "dp"), vb, &config, Mlp::new)?;
        fsdp.set_norm_over(vec![mesh.axis("pp")?.clone()], |_| true);
        let mut grads = fsdp.backward(&fsdp.forward(&input())?.sum_all()?)?;
        let var = fsdp.vars().remove(1);
        if mesh.world().rank() == 3 {
            let nan = (grads.get(&var).expect("a gradient") * f64::NAN)?;
            grads.insert(&var, nan);
        }
        let line = fsdp.clip_grad_norm(&mut grads, 1.0).expect_err("not finite").to_string();
        let mut scaler = LossScaler::new(LossScalerConfig::default())?;
        let steps = scaler.unscale(&fsdp, &mut grads)?;
        assert!(grad_norm(&grads, &fsdp.vars()[..1])?.is_finite());
        Ok((stage, line, steps, scaler.factor().to_bits()))
    });
    for (_, line, steps, factor) in &found {
        assert_eq!((line, steps, factor), (&found[0].1, &false, &found[0].3));
        assert!(
            line.starts_with("the gradient of parameter ") && line.contains("rank 3") && line.contains("NaN"),
            "{line}"
        );
    }
}
