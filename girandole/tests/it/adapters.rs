//! Parameters that are not trained: in every layout they are left unchanged, and are neither clipped, nor averaged, nor
//! saved.

use std::path::Path;
use std::sync::Arc;

use crate::common::{ROWS, Setup, optimizer, own_rows};
use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use girandole::comm::Local;
use girandole::models::{CausalLm, FolderConfig, Lora, LoraConfig, ModelConfig, Weights};
use girandole::training::build::Builder;
use girandole::{DistributedModel, Layout, Parallel, ParallelConfig};
use ops::quantized::Format;

pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
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
    train_with(layout, lora, config, |settings| settings.sequence_parallel = sequence_parallel)
}

/// As [`train`], with some settings changed.
pub(crate) fn train_with(
    layout: &str,
    lora: Option<&Lora>,
    config: &ModelConfig,
    change: impl Fn(&mut ParallelConfig) + Sync,
) -> Trained {
    train_rows(layout, lora, config, &Setup::default(), change)
}

/// As [`train_with`], with the rows of a setup.
pub(crate) fn train_rows(
    layout: &str,
    lora: Option<&Lora>,
    config: &ModelConfig,
    setup: &Setup,
    change: impl Fn(&mut ParallelConfig) + Sync,
) -> Trained {
    train_weights(layout, lora, || Weights::random(config, 7).unwrap(), setup, change)
}

/// As [`train_rows`], from these weights.
fn train_weights(
    layout: &str,
    lora: Option<&Lora>,
    weights: impl Fn() -> Weights + Sync,
    setup: &Setup,
    change: impl Fn(&mut ParallelConfig) + Sync,
) -> Trained {
    let (layout, out): (Layout, _) = (layout.parse().unwrap(), tempfile::tempdir().unwrap());
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let weights = weights();
        let rows = ROWS / layout.data_ranks() / 2;
        let is_trained = match lora {
            Some(lora) => lora.trained(),
            None => Arc::new(|name: &str| {
                name.contains("layernorm") || name.contains("layers.5.") || name.contains("lm_head")
            }),
        };
        let mut settings = ParallelConfig {
            dtype: DType::F64,
            micro_batches: 2,
            example: Some(Tensor::zeros((rows, setup.len), DType::U32, &Device::Cpu)?),
            is_trained: Some(is_trained),
            ..ParallelConfig::default()
        };
        change(&mut settings);
        let (model, adapters) = (weights.config().clone(), lora.cloned());
        let build = move |builder: &Builder| match &adapters {
            Some(lora) => CausalLm::new(&model, &lora.adapt(builder.clone())),
            None => CausalLm::new(&model, builder),
        };
        let mut parallel = Parallel::new(comm, &layout, weights.parts(), &settings, build)?;
        let mut adam = optimizer(&parallel)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for number in 0..6 {
            let mut step = parallel.step_batch(&own_rows(&parallel, number, setup)?)?;
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

pub(crate) const LAYOUTS: [&str; 8] =
    ["dp=2", "shard=2", "tp=2", "pp=2", "pp=2,dp=2", "pp=2,shard=2", "shard=2,tp=2", "dp=2,tp=2"];

fn close(got: &[f64], expected: &[f64]) -> bool {
    got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-10)
}

pub(crate) fn assert_equal(layout: &str, got: &Trained, expected: &Trained) {
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

/// Experts have adapters of their own, also beside weights in few bits, and every layout has the losses of one process.
#[test]
fn adapters_of_experts_in_every_layout() {
    let json = r#"{"model_type": "qwen3_moe", "head_dim": 32, "vocab_size": 48, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0], "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
    let model = ModelConfig::from_json(json).unwrap();
    let targets = ["all-linear", "experts.gate_up_proj", "experts.down_proj"].map(String::from).into();
    let config = LoraConfig { rank: 4, targets, ..LoraConfig::default() };
    let wide = Lora::new(&config, &model).unwrap();
    let without = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &model).unwrap();
    let gap = |a: &Trained, b: &Trained| (a.losses[5] - b.losses[5]).abs();
    let expected = train_as("", Some(&wide), &model, false);
    assert!(gap(&train_as("", Some(&without), &model, false), &expected) > 1e-3);
    for lora in [wide.clone(), wide.quantized(Format::Nf4).unwrap(), wide.quantized(Format::Int8).unwrap()] {
        let own = train_as("", Some(&lora), &model, false);
        assert!(
            own.losses[5] < own.losses[0] && (lora.base_format().is_none() || gap(&own, &expected) > 1e-6)
        );
        let layouts = [
            "dp=2", "shard=2", "tp=2", "pp=2", "ep=2", "dp=2,ep=2", "shard=2,ep=2", "pp=2,ep=2", "ep=2,tp=2",
            "cp=2,ep=2", "ep=4",
        ];
        for layout in layouts {
            assert_equal(layout, &train_as(layout, Some(&lora), &model, false), &own);
        }
        assert_equal("tp=2 along sequences", &train_as("tp=2", Some(&lora), &model, true), &own);
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

/// Qwen3, with norms of queries and keys, and GPT-2, with biases and fused layers, of widths that blocks of 64 divide.
pub(crate) fn of_whole_blocks() -> [ModelConfig; 2] {
    let qwen3 = r#"{"model_type": "qwen3", "head_dim": 32, "vocab_size": 48, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
    let gpt2 = r#"{"model_type": "gpt2", "vocab_size": 48, "n_embd": 128, "n_inner": 256, "n_layer": 3, "n_head": 4, "n_positions": 16,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}"#;
    [qwen3, gpt2].map(|json| ModelConfig::from_json(json).unwrap())
}

/// Models of widths that blocks divide, in both formats.
pub(crate) fn in_each_format() -> Vec<(Format, ModelConfig)> {
    let of = |format| of_whole_blocks().map(|config| (format, config));
    [Format::Nf4, Format::Int8].into_iter().flat_map(of).collect()
}

#[test]
fn adapters_on_a_quantized_base_in_every_layout() {
    for (format, config) in in_each_format() {
        let whole = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &config).unwrap();
        let lora = whole.quantized(format).unwrap();
        let expected = train_as("", Some(&lora), &config, false);
        assert!(expected.losses[5] < expected.losses[0]);
        let gap = expected.losses[0] - train_as("", Some(&whole), &config, false).losses[0];
        let least = if format == Format::Nf4 { 1e-4 } else { 1e-6 };
        assert!(gap.abs() > least, "{gap}");
        for layout in LAYOUTS {
            assert_equal(layout, &train_as(layout, Some(&lora), &config, false), &expected);
        }
        assert_equal("tp=2", &train_as("tp=2", Some(&lora), &config, true), &expected);
    }
}

/// Bases as transformers saves them with bitsandbytes: codes are read, and no layer has others.
#[test]
fn adapters_on_a_saved_base_in_every_layout() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/bits");
    for (name, dora) in [
        ("nf4", false),
        ("nf4-double", false),
        ("nf4-double", true),
        ("int8", false),
        ("gpt2", true),
        ("fp4", false),
    ] {
        let open = || Weights::folder(&fixtures.join(name)).unwrap();
        let (weights, config) = (open(), LoraConfig { rank: 4, dora, ..LoraConfig::default() });
        let whole = Lora::new(&config, weights.config()).unwrap();
        let lora = whole.quantized_as(&weights.formats()).unwrap();
        assert_eq!(lora.base_format().is_some(), name != "fp4");
        let train = |layout, lora| train_weights(layout, Some(lora), open, &Setup::default(), |_| ());
        let expected = train("", &lora);
        assert!(expected.losses[5] < expected.losses[0]);
        // Those of f32 are widened to f64 after they were to f32, and rounded.
        let widened = train("", &whole);
        let gap = widened.losses.iter().zip(&expected.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < 1e-6, "{name}: {gap}");
        for layout in LAYOUTS {
            assert_equal(layout, &train(layout, &lora), &expected);
        }
    }
}

/// The folder of a quantized base, merged, has the losses that training ended with: its weights are the widened ones.
#[test]
fn a_quantized_base_is_the_one_of_its_widened_weights() {
    [Format::Nf4, Format::Int8].into_iter().for_each(compare_with_widened);
}

fn compare_with_widened(format: Format) {
    let config = &of_whole_blocks()[0];
    let lora = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, config).unwrap();
    let (weights, out) = (Weights::random(config, 7).unwrap(), tempfile::tempdir().unwrap());
    let adapted = |weights: &Weights, lora: &Lora, dtype| {
        let builder = Builder::new(weights.tensors(dtype, &Device::Cpu));
        let model = CausalLm::new(config, &lora.adapt(builder)).unwrap();
        let tokens = Tensor::arange(0u32, 12, &Device::Cpu).unwrap().reshape((1, 12)).unwrap();
        model
            .logits(&tokens)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_dtype(DType::F64)
            .unwrap()
            .to_vec1::<f64>()
            .unwrap()
    };
    let quantized = adapted(&weights, &lora.quantized(format).unwrap(), DType::F32);
    // New adapters change nothing: what is saved are the widened weights.
    Local::run_shared(1, |comm| {
        let settings =
            ParallelConfig { is_trained: Some(Arc::new(Lora::is_adapter)), ..ParallelConfig::default() };
        let (model, adapters) = (config.clone(), lora.quantized(format).unwrap());
        let build = move |builder: &Builder| CausalLm::new(&model, &adapters.adapt(builder.clone()));
        let parallel = Parallel::new(comm, &Layout::default(), weights.parts(), &settings, build)?;
        let lora = lora.quantized(format).unwrap();
        Ok(parallel.save_folder(out.path(), &weights, &FolderConfig::default(), Some(&lora))?)
    })
    .unwrap();
    let widened = adapted(&Weights::folder(out.path()).unwrap(), &lora, DType::F32);
    let gap = quantized.iter().zip(&widened).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(gap < 1e-5, "{gap}");
    let before = adapted(&weights, &lora, DType::F32);
    let least = if format == Format::Nf4 { 1e-3 } else { 1e-4 };
    assert!(quantized.iter().zip(&before).any(|(a, b)| (a - b).abs() > least));
}

#[test]
fn what_has_no_whole_blocks_is_refused() {
    let lora = Lora::new(&LoraConfig::default(), &crate::common::config(true)).unwrap();
    let said = lora.quantized(Format::Nf4).unwrap_err().to_string();
    assert!(said.starts_with("a base in few bits: hidden_size") && said.contains("multiple of 64"), "{said}");
    let config = &of_whole_blocks()[0];
    let lora = Lora::new(&LoraConfig::default(), config).unwrap().quantized(Format::Nf4).unwrap();
    let said = Local::run_shared(4, |comm| {
        let (model, adapters) = (config.clone(), lora.clone());
        let build = move |builder: &Builder| CausalLm::new(&model, &adapters.adapt(builder.clone()));
        let weights = Weights::random(config, 7).unwrap().parts();
        let settings =
            ParallelConfig { is_trained: Some(Arc::new(Lora::is_adapter)), ..ParallelConfig::default() };
        let layout: Layout = "tp=4".parse().unwrap();
        Ok(Parallel::new(comm, &layout, weights, &settings, build).map(drop).unwrap_err().to_string())
    });
    let said = said.unwrap().remove(0);
    assert!(said.contains("2 blocks of 64, which cannot be divided over 4"), "{said}");
}
