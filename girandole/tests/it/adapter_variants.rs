//! Variants of LoRA (rsLoRA, ranks and alphas by layer, modules trained whole, DoRA): each layout has the losses, norms and weights of
//! one process.

use candle_core::{DType, Device, Tensor};
use girandole::models::{CausalLm, Lora, LoraConfig, ModelConfig, Problem, Weights};
use girandole::ops::PreferenceLoss;
use girandole::pipeline::ScheduleKind;
use girandole::training::build::Builder;
use girandole::{ParallelConfig, Recompute};
use ops::quantized::Format;

use crate::adapters::{
    LAYOUTS, Trained, assert_equal, in_each_format, of_whole_blocks, train_rows, train_with,
};
use crate::common::{self, Setup};

fn rslora() -> LoraConfig {
    LoraConfig {
        rank: 4,
        by_root: true,
        rank_pattern: [("down_proj".into(), 2), (r"layers\.[0-2]\.self_attn\.q_proj".into(), 6)].into(),
        alpha_pattern: [("v_proj".into(), 3.0)].into(),
        ..LoraConfig::default()
    }
}

fn saved(modules: &[&str]) -> LoraConfig {
    let save_modules = modules.iter().map(ToString::to_string).collect();
    LoraConfig {
        rank: 2,
        save_modules,
        targets: vec!["q_proj".into(), "down_proj".into()],
        ..LoraConfig::default()
    }
}

fn dora() -> LoraConfig {
    LoraConfig { rank: 4, dora: true, ..LoraConfig::default() }
}

fn train(layout: &str, lora: &Lora, model: &ModelConfig) -> Trained {
    train_with(layout, Some(lora), model, |_| {})
}

/// Compares the layouts with one process.
fn compare(lora: &LoraConfig, model: &ModelConfig, layouts: &[&str]) -> Trained {
    let lora = Lora::new(lora, model).unwrap();
    let expected = train("", &lora, model);
    assert!(expected.losses[5] < expected.losses[0]);
    for layout in layouts {
        assert_equal(layout, &train(layout, &lora, model), &expected);
    }
    expected
}

fn all_layouts() -> Vec<&'static str> {
    [&LAYOUTS[..], &["cp=2", "pp=2,tp=2", "cp=2,tp=2", "dp=2,cp=2"]].concat()
}

#[test]
fn ranks_and_scales_by_layer_in_every_layout() {
    let model = common::config(false);
    let other = Lora::new(&LoraConfig { rank: 4, ..LoraConfig::default() }, &model).unwrap();
    let expected = compare(&rslora(), &model, &all_layouts());
    assert!((expected.losses[5] - train("", &other, &model).losses[5]).abs() > 1e-4);
}

#[test]
fn modules_trained_whole_in_every_layout() {
    for (tied, modules) in
        [(false, &["embed_tokens", "lm_head"][..]), (false, &["lm_head"]), (true, &["embed_tokens"])]
    {
        let model = common::config(tied);
        let lora = Lora::new(&saved(modules), &model).unwrap();
        let own = lora.shapes().keys().filter(|name| !Lora::is_adapter(name)).count();
        assert_eq!(own, modules.len());
        let expected = compare(&saved(modules), &model, &all_layouts());
        let none = Lora::new(&saved(&[]), &model).unwrap();
        assert!((expected.losses[5] - train("", &none, &model).losses[5]).abs() > 1e-4, "{modules:?}");
    }
}

#[test]
fn magnitudes_in_every_layout() {
    for tied in [false, true] {
        let model = common::config(tied);
        let other = Lora::new(&LoraConfig { dora: false, ..dora() }, &model).unwrap();
        let expected = compare(&dora(), &model, &all_layouts());
        // New magnitudes change nothing.
        let without = train("", &other, &model);
        assert!((expected.losses[0] - without.losses[0]).abs() < 1e-10);
        assert!((expected.losses[5] - without.losses[5]).abs() > 1e-4);
    }
    // Fused layers, biases.
    compare(
        &LoraConfig { save_modules: vec!["lm_head".into()], ..dora() },
        &common::gpt2(),
        &["tp=2", "shard=2,tp=2", "pp=2"],
    );
}

/// All variants at once, with dropout, in everything that changes how a layout computes.
#[test]
fn variants_together_with_dropout_recomputation_and_schedules() {
    let config =
        LoraConfig { dora: true, dropout: 0.2, save_modules: vec!["embed_tokens".into()], ..rslora() };
    for tied in [false, true] {
        let model = common::config(tied);
        let lora = Lora::new(&config, &model).unwrap();
        let expected = train("", &lora, &model);
        let check = |layout: &str, change: &(dyn Fn(&mut ParallelConfig) + Sync)| {
            assert_equal(layout, &train_with(layout, Some(&lora), &model, change), &expected);
        };
        if !tied {
            for recompute in [Recompute::Units, Recompute::Every(2), Recompute::Selective] {
                for layout in ["shard=2", "tp=2", "pp=2,tp=2", "cp=2"] {
                    check(layout, &|settings| settings.recompute = recompute);
                }
            }
            continue;
        }
        for layout in ["tp=2", "shard=2,tp=2", "pp=2,tp=2"] {
            check(layout, &|settings| settings.sequence_parallel = true);
        }
        for schedule in ScheduleKind::ALL {
            check("pp=2", &|settings| settings.schedule = schedule);
        }
    }
}

#[test]
fn variants_beside_divided_experts() {
    let experts = common::experts();
    let config = LoraConfig { save_modules: vec!["lm_head".into()], ..dora() };
    compare(&config, &experts, &["ep=2", "dp=2,ep=2", "shard=2,ep=2", "pp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2"]);
    compare(&config, &common::deepseek(), &["ep=2,tp=2", "shard=2"]);
}

/// The norms, and the first magnitudes, are those of the weights as few bits hold them.
#[test]
fn magnitudes_on_a_quantized_base_in_every_layout() {
    for (format, model) in in_each_format() {
        let whole = Lora::new(&dora(), &model).unwrap();
        let lora = whole.quantized(format).unwrap();
        let plain =
            Lora::new(&LoraConfig { dora: false, ..dora() }, &model).unwrap().quantized(format).unwrap();
        let expected = train("", &lora, &model);
        assert!((expected.losses[0] - train("", &plain, &model).losses[0]).abs() < 1e-6);
        let least = if format == Format::Nf4 { 1e-4 } else { 1e-6 };
        assert!((expected.losses[0] - train("", &whole, &model).losses[0]).abs() > least);
        for layout in LAYOUTS {
            assert_equal(layout, &train(layout, &lora, &model), &expected);
        }
        let divided = |settings: &mut ParallelConfig| settings.sequence_parallel = true;
        assert_equal("tp=2", &train_with("tp=2", Some(&lora), &model, divided), &expected);
    }
}

/// Heads that score documents are trained whole beside adapters, for every task; also on a base in 4 bits.
#[test]
fn heads_beside_adapters_in_every_layout() {
    let of_labels = Problem::ALL.map(|problem| (problem, None));
    let tasks = of_labels.into_iter().chain([(Problem::Regression, Some(PreferenceLoss::Reward))]);
    for (at, (problem, pairs)) in tasks.enumerate() {
        let setup = Setup { problem: Some(problem), pairs, len: 12, ..Setup::default() };
        let with_head = |model: ModelConfig| model.with_labels(common::labels(problem)).unwrap();
        let plain = LoraConfig { rank: 4, ..LoraConfig::default() };
        let config = match at % 2 {
            0 => plain.clone(),
            _ => LoraConfig { save_modules: vec!["embed_tokens".into()], ..dora() },
        };
        let compare = |lora: &Lora, model: &ModelConfig, layouts: &[&str]| {
            assert!(lora.trains("score.weight"));
            let train = |layout: &str, divided: bool| {
                let change = |settings: &mut ParallelConfig| settings.sequence_parallel = divided;
                train_rows(layout, Some(lora), model, &setup, change)
            };
            let expected = train("", false);
            for layout in layouts {
                assert_equal(layout, &train(layout, false), &expected);
            }
            assert_equal("tp=2", &train("tp=2", true), &expected);
        };
        let model = with_head(if at == 2 { common::mistral() } else { common::config(at == 1) });
        compare(&Lora::new(&config, &model).unwrap(), &model, &all_layouts());
        let [model, ..] = of_whole_blocks();
        let model = with_head(model);
        let lora = Lora::new(&plain, &model).unwrap().quantized(Format::Nf4).unwrap();
        compare(&lora, &model, &["dp=2", "shard=2", "tp=2", "pp=2", "cp=2"]);
    }
    let model = common::experts().with_labels(common::labels(Problem::SingleLabel)).unwrap();
    let lora = Lora::new(&dora(), &model).unwrap();
    let setup = Setup { problem: Some(Problem::SingleLabel), ..Setup::default() };
    let expected = train_rows("", Some(&lora), &model, &setup, |_| {});
    for layout in ["dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2"] {
        assert_equal(layout, &train_rows(layout, Some(&lora), &model, &setup, |_| {}), &expected);
    }
}

/// A row of zeros has no direction.
#[test]
fn magnitudes_of_a_row_of_zeros_are_refused() {
    let model = common::config(false);
    let lora = Lora::new(&dora(), &model).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let weights = Weights::random(&model, 7).unwrap();
    let tensors = weights.tensors(DType::F32, &Device::Cpu);
    let mut all = std::collections::HashMap::new();
    for (name, dims) in weights.shapes() {
        let tensor = tensors.get(dims.as_slice(), name).unwrap();
        let is_first = name.ends_with("layers.3.mlp.up_proj.weight");
        let rest = if is_first { tensor.narrow(0, 1, dims[0] - 1).unwrap() } else { tensor.clone() };
        let zeros = Tensor::zeros((1, *dims.last().unwrap()), DType::F32, &Device::Cpu).unwrap();
        all.insert(name.clone(), if is_first { Tensor::cat(&[&rest, &zeros], 0).unwrap() } else { rest });
    }
    candle_core::safetensors::save(&all, dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), serde_json::to_string(model.json()).unwrap()).unwrap();
    let weights = Weights::folder(dir.path()).unwrap();
    let builder = lora.adapt(Builder::new(weights.tensors(DType::F32, &Device::Cpu)));
    let said = CausalLm::new(&model, &builder).unwrap_err().to_string();
    assert!(said.contains("layers.3.mlp.up_proj.weight: row 31 is zero"), "{said}");
}
