//! Parameters that are not trained: in every layout they are left unchanged, and are neither clipped, nor averaged, nor
//! saved.

use std::sync::Arc;

use crate::common::{LEN, ROWS, optimizer, own_batch};
use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use girandole::comm::Local;
use girandole::models::{CausalLm, FolderConfig, Lora, LoraConfig, ModelConfig, Weights};
use girandole::training::build::Builder;
use girandole::{DistributedModel, Layout, Parallel, ParallelConfig};

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Logits of the model in the saved folder.
    logits: Vec<f32>,
    bytes_sent: u64,
}

/// Trains the adapters, or without adapters the norms of the blocks and the last block.
fn train(layout: &str, lora: Option<&Lora>, tied: bool) -> Trained {
    train_as(layout, lora, &crate::common::config(tied), false)
}

fn train_as(layout: &str, lora: Option<&Lora>, config: &ModelConfig, sequence_parallel: bool) -> Trained {
    let (layout, out): (Layout, _) = (layout.parse().unwrap(), tempfile::tempdir().unwrap());
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let weights = Weights::random(config, 7).unwrap();
        let rows = ROWS / layout.data_ranks() / 2;
        let is_adapter = lora.is_some();
        let is_trained = move |name: &str| match is_adapter {
            true => Lora::is_adapter(name),
            false => name.contains("layernorm") || name.contains("layers.5.") || name.contains("lm_head"),
        };
        let settings = ParallelConfig {
            dtype: DType::F64,
            micro_batches: 2,
            example: Some(Tensor::zeros((rows, LEN), DType::U32, &Device::Cpu)?),
            is_trained: Some(Arc::new(is_trained)),
            sequence_parallel,
            ..ParallelConfig::default()
        };
        let (model, adapters) = (config.clone(), lora.cloned());
        let build = move |builder: &Builder| match &adapters {
            Some(lora) => CausalLm::new(&model, &lora.adapt(builder.clone())),
            None => CausalLm::new(&model, builder),
        };
        let mut parallel = Parallel::new(comm, &layout, weights.parts(), &settings, build)?;
        let mut adam = optimizer(&parallel)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for number in 0..6 {
            let (tokens, targets) = own_batch(&parallel, number)?;
            let mut step = parallel.step(&tokens, &targets)?;
            norms.push(parallel.clip_grad_norm(&mut step.grads, 0.05)?);
            adam.step(&step.grads)?;
            losses.push(step.loss);
        }
        let bytes_sent = parallel.stats().bytes_sent;
        parallel.save_folder(out.path(), &weights, &FolderConfig::default(), lora)?;
        Ok((losses, norms, bytes_sent))
    });
    let (losses, norms, bytes_sent) = ranks.unwrap().remove(0);
    let weights = Weights::folder(out.path()).unwrap();
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let model = CausalLm::new(weights.config(), &builder).unwrap();
    let tokens = Tensor::arange(0u32, 12, &Device::Cpu).unwrap().reshape((1, 12)).unwrap();
    let logits = model.logits(&tokens).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    Trained { losses, norms, logits, bytes_sent }
}

const LAYOUTS: [&str; 8] =
    ["dp=2", "shard=2", "tp=2", "pp=2", "pp=2,dp=2", "pp=2,shard=2", "shard=2,tp=2", "dp=2,tp=2"];

fn close(got: &[f64], expected: &[f64]) -> bool {
    got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-10)
}

fn assert_equal(layout: &str, got: &Trained, expected: &Trained) {
    assert!(close(&got.losses, &expected.losses), "{layout}: {:?}, {:?}", got.losses, expected.losses);
    assert!(close(&got.norms, &expected.norms), "{layout}: {:?}, {:?}", got.norms, expected.norms);
    let gaps = got.logits.iter().zip(&expected.logits).map(|(a, b)| (a - b).abs());
    assert!(gaps.fold(0.0, f32::max) < 1e-5, "{layout}");
}

#[test]
fn adapters_in_every_layout() {
    for tied in [false, true] {
        let config = LoraConfig { rank: 4, ..LoraConfig::default() };
        let lora = Lora::new(&config, &crate::common::config(tied)).unwrap();
        let expected = train("", Some(&lora), tied);
        assert!(expected.losses[5] < expected.losses[0]);
        for layout in LAYOUTS {
            assert_equal(layout, &train(layout, Some(&lora), tied), &expected);
        }
        // Copies only exchange the adapters' gradients: in 8 bytes each, twice over for two ranks.
        let adapters: usize = lora.shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
        let sent = train("dp=2", Some(&lora), tied).bytes_sent as usize;
        assert!(sent < 6 * adapters * 8 + 8 * adapters + 20_000, "{sent} bytes, {adapters} adapters");
    }
}

#[test]
fn adapters_and_frozen_parts_where_sequences_are_divided() {
    let lora =
        Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &crate::common::config(true)).unwrap();
    for lora in [Some(&lora), None] {
        let expected = train("", lora, true);
        for layout in ["tp=2", "shard=2,tp=2", "dp=2,tp=2"] {
            assert_equal(layout, &train_as(layout, lora, &crate::common::config(true), true), &expected);
        }
    }
}

#[test]
fn dropout_before_adapters_in_every_layout() {
    let of = |dropout: f64| {
        let config = LoraConfig { rank: 4, dropout, ..LoraConfig::default() };
        Lora::new(&config, &crate::common::config(true)).unwrap()
    };
    let (lora, none) = (of(0.3), of(0.0));
    let expected = train("", Some(&lora), true);
    // The second matrices are zero before the first step.
    assert!((expected.losses[1] - train("", Some(&none), true).losses[1]).abs() > 1e-4);
    for layout in LAYOUTS {
        assert_equal(layout, &train(layout, Some(&lora), true), &expected);
    }
    for layout in ["tp=2", "shard=2,tp=2", "dp=2,tp=2"] {
        assert_equal(layout, &train_as(layout, Some(&lora), &crate::common::config(true), true), &expected);
    }
}

/// Adapters are of attention and of shared experts; the experts are frozen, and tokens go to their ranks all the same.
#[test]
fn adapters_beside_divided_experts() {
    let experts = crate::common::experts();
    let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &experts).unwrap();
    let expected = train_as("", Some(&lora), &experts, false);
    assert!(expected.losses[5] < expected.losses[0]);
    for layout in ["ep=2", "dp=2,ep=2", "shard=2,ep=2", "pp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"] {
        assert_equal(layout, &train_as(layout, Some(&lora), &experts, false), &expected);
    }
}

#[test]
fn frozen_parts_in_every_layout() {
    for tied in [false, true] {
        let expected = train("", None, tied);
        for layout in LAYOUTS {
            assert_equal(layout, &train(layout, None, tied), &expected);
        }
    }
}
