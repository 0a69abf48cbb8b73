//! The model: PyTorch's variable names, and the effect of each mask.

use bin::documents::shared::transformer::{Transformer, TransformerConfig};
use candle_core::{DType, Device, Tensor};
use candle_nn::{ModuleT, VarMap};
use ops::AttentionMask;
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

fn model(config: &TransformerConfig) -> (Transformer, VarMap) {
    let generator = SharedGenerator::from(Generator::new(42));
    let vars = VarMap::new();
    let builder = TorchInit::var_builder(&generator, &vars, DType::F32, &Device::Cpu);
    (Transformer::new(builder, config, &generator).unwrap(), vars)
}

fn config() -> TransformerConfig {
    let (vocab_size, d_model, num_heads, d_ff, num_layers, max_len) = (20, 8, 2, 16, 2, 12);
    TransformerConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, ..Default::default() }
}

#[test]
fn names_are_pytorchs() {
    let (_, vars) = model(&TransformerConfig { num_layers: 1, ..config() });
    let names: Vec<String> = training::named_vars(&vars).into_iter().map(|(name, _)| name).collect();
    let mut expected: Vec<String> = [
        "attention.q_linear", "attention.k_linear", "attention.v_linear", "attention.out_linear", "norm1",
        "ffn.fc1", "ffn.fc2", "norm2",
    ]
    .iter()
    .flat_map(|name| ["weight", "bias"].map(|part| format!("layers.0.{name}.{part}")))
    .collect();
    expected.extend(
        ["embedding.weight", "out_linear.weight", "out_linear.bias", "pos_encoding.pe"].map(String::from),
    );
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn a_causal_model_does_not_see_what_is_to_come() {
    let logits = |mask, last: u32| {
        let (model, _) = model(&TransformerConfig { mask, ..config() });
        let tokens = Tensor::new(&[[1u32, 2, 3, last]], &Device::Cpu).unwrap();
        let logits = model.forward_t(&tokens, false).unwrap();
        logits.narrow(1, 0, 3).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(logits(AttentionMask::Causal, 4), logits(AttentionMask::Causal, 5));
    assert_ne!(logits(AttentionMask::AntiCausal, 4), logits(AttentionMask::AntiCausal, 5));
    assert_ne!(logits(AttentionMask::Full, 4), logits(AttentionMask::Full, 5));
}

#[test]
fn in_evaluation_nothing_is_dropped() {
    let (model, _) = model(&TransformerConfig { dropout: 0.5, ..config() });
    let tokens = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu).unwrap();
    let logits =
        |train| model.forward_t(&tokens, train).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(logits(false), logits(false));
    assert_ne!(logits(true), logits(true));
}
