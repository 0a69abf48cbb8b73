//! Planned memory by kind and bytes sent are within a tenth of those measured with trained models.

use std::sync::Arc;

use bin::documents::handbook::tensor_parallel::Mlp;
use bin::documents::shared::transformer::{Transformer, TransformerConfig};
use candle_core::{DType, Device, Tensor};
use candle_nn::{ModuleT, Optimizer, VarBuilder, VarMap};
use comm::{Communicator, Local, Mesh};
use ddp::{Ddp, DdpConfig};
use ops::{activation_bytes, cross_entropy};
use plan::{Estimate, MlpLoss, Model, Setting, Strategy, TransformerSizes};
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
use training::{Adam, AdamConfig, OptimizerState};

/// Measured bytes, each of the rank with the most.
#[derive(Debug, Default, Clone, Copy)]
struct Found {
    weights: f64,
    gradients: f64,
    optimizer: f64,
    activations: f64,
    sent: f64,
}

impl Found {
    fn most(all: Vec<Found>) -> Self {
        let most = |of: fn(&Found) -> f64| all.iter().map(of).fold(0.0, f64::max);
        Self {
            weights: most(|f| f.weights),
            gradients: most(|f| f.gradients),
            optimizer: most(|f| f.optimizer),
            activations: most(|f| f.activations),
            sent: most(|f| f.sent),
        }
    }
}

fn bytes<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> f64 {
    tensors.into_iter().map(|t| (t.elem_count() * t.dtype().size_in_bytes()) as f64).sum()
}

fn setting(ranks: usize, batch_size: usize) -> Setting {
    Setting { ranks, batch_size, micro_batches: 4, element: 4, gathered: 4, optimizer: 2 }
}

/// Takes two steps; the bytes sent are those of the second.
fn measure<M: Send>(
    (dp, tp): (usize, usize),
    sequence_parallel: bool,
    model: impl Fn(tensor_parallel::ShardBuilder) -> tensor_parallel::Result<M> + Sync,
    loss: impl Fn(&TensorParallel<M>) -> tensor_parallel::Result<Tensor> + Sync,
) -> Found {
    let ranks = Local::run_shared(dp * tp, |comm| {
        let mesh = Mesh::new(comm, &[("dp", dp), ("tp", tp)])?;
        let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
        let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), &model)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::default()).unwrap();
        let mut found = Found::default();
        for _ in 0..2 {
            let before = parallel.stats().bytes_sent;
            let loss = loss(&parallel)?;
            found.activations = activation_bytes(&loss, []) as f64;
            let gradients = parallel.backward(&loss)?;
            found.gradients = bytes(parallel.vars().iter().map(|var| gradients.get(var).unwrap()));
            adam.step(&gradients)?;
            found.sent = (parallel.stats().bytes_sent - before) as f64;
        }
        found.weights = bytes(parallel.vars().iter().map(|var| var.as_tensor()));
        found.optimizer = bytes(adam.state().unwrap().iter().map(|(_, tensor)| tensor));
        Ok(found)
    });
    Found::most(ranks.unwrap())
}

fn assert_within_a_tenth(what: &str, kind: &str, estimated: f64, found: f64) {
    assert!((estimated - found).abs() <= 0.1 * found, "{what}: {kind}: {estimated} estimated, {found} found");
}

fn compare(what: &str, estimate: &Estimate, found: &Found) {
    let memory = &estimate.memory;
    for (kind, estimated, found) in [
        ("weights", memory.parameters, found.weights),
        ("gradients", memory.gradients, found.gradients),
        ("optimizer", memory.optimizer, found.optimizer),
        ("activations", memory.activations, found.activations),
        ("sent", estimate.sent, found.sent),
    ] {
        assert_within_a_tenth(what, kind, estimated, found);
    }
}

const LAYOUTS: [(usize, usize, bool); 8] = [
    (1, 1, false),
    (1, 2, false),
    (1, 2, true),
    (1, 4, false),
    (1, 4, true),
    (2, 2, false),
    (2, 2, true),
    (4, 1, false),
];

#[test]
fn of_a_transformer() {
    // Small messages, then large ones: batch, length, model sizes.
    for (batch, length, d_model, num_layers, vocab_size) in [(8, 12, 32, 3, 64), (4, 48, 128, 2, 512)] {
        let sizes = LanguageModelConfig {
            vocab_size,
            d_model,
            num_heads: 4,
            num_layers,
            max_len: length,
            ..LanguageModelConfig::default()
        };
        let shape = TransformerSizes {
            vocab_size: vocab_size as u64,
            d_model: d_model as u64,
            num_heads: 4,
            d_ff: 4 * d_model as u64,
            num_layers: num_layers as u64,
            max_len: length as u64,
            length: length as u64,
            is_modern: true,
            has_dropout: false,
        };
        let model = Model::transformer("test", &shape);
        for (dp, tp, sequence_parallel) in LAYOUTS {
            let tokens = Tensor::zeros((batch / dp, length), DType::U32, &Device::Cpu).unwrap();
            let found = measure(
                (dp, tp),
                sequence_parallel,
                |builder| LanguageModel::new(builder, &sizes),
                |parallel| parallel.model()?.loss(&tokens, &tokens),
            );
            let setting = setting(dp * tp, batch);
            let estimate = Strategy::Tensor { tp, sequence_parallel }.estimate(&model, &setting);
            compare(&format!("{sizes:?}, dp {dp}, tp {tp}, {sequence_parallel}"), &estimate, &found);
        }
    }
}

#[test]
fn of_linear_layers() {
    for hidden in [16, 128] {
        let batch = 32;
        let model = Model::mlp("test", &[hidden, 4 * hidden, hidden], true, MlpLoss::Squares);
        for (dp, tp, sequence_parallel) in LAYOUTS {
            let x = Tensor::ones((batch / dp, hidden as usize), DType::F32, &Device::Cpu).unwrap();
            let found = measure(
                (dp, tp),
                sequence_parallel,
                |builder| Mlp::new(hidden as usize, &builder),
                |parallel| Ok(ops::mse(&parallel.model()?.forward(&x)?, &x)?),
            );
            let strategy = Strategy::Tensor { tp, sequence_parallel };
            let estimate = strategy.estimate(&model, &setting(dp * tp, batch));
            compare(&format!("{hidden}, dp {dp}, tp {tp}, {sequence_parallel}"), &estimate, &found);
        }
    }
}

#[test]
fn of_copies() {
    let config = TransformerConfig {
        vocab_size: 100,
        d_model: 32,
        num_heads: 4,
        d_ff: 96,
        num_layers: 2,
        max_len: 20,
        dropout: 0.0,
        ..TransformerConfig::default()
    };
    let sizes = TransformerSizes {
        vocab_size: 100,
        d_model: 32,
        num_heads: 4,
        d_ff: 96,
        num_layers: 2,
        max_len: 20,
        length: 10,
        is_modern: false,
        has_dropout: false,
    };
    let model = Model::transformer("test", &sizes);
    for ranks in [1, 2, 4] {
        let found = Local::run_shared(ranks, |comm: Arc<dyn Communicator>| {
            let vars = VarMap::new();
            let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let options = DdpConfig { buffers: vec!["pe".into()], ..DdpConfig::default() };
            let random = SharedGenerator::from(Generator::new(1));
            let ddp = Ddp::new(comm.clone(), builder, &options, |b| Transformer::new(b, &config, &random))?;
            let tokens = Tensor::zeros((2, 10), DType::U32, &Device::Cpu)?;
            let mut sent = 0;
            for _ in 0..3 {
                let before = comm.stats().bytes_sent;
                let loss = cross_entropy(&ddp.model()?.forward_t(&tokens, true)?, &tokens, None)?;
                ddp.backward(&loss)?;
                sent = comm.stats().bytes_sent - before;
            }
            Ok((bytes(ddp.vars().iter().map(|var| var.as_tensor())), sent as f64))
        });
        let estimate = Strategy::Data.estimate(&model, &setting(ranks, 2 * ranks));
        for (weights, sent) in found.unwrap() {
            assert_within_a_tenth(&format!("{ranks} copies"), "copies", estimate.memory.buffers, weights);
            assert_within_a_tenth(&format!("{ranks} copies"), "sent", estimate.sent, sent);
        }
    }
}
