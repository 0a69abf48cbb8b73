//! A small model with random weights and one token per byte.

use candle_core::{DType, Device};
use models::{CausalLm, FolderConfig, ModelConfig, Tokenizer, Weights, save_folder};
use training::build::Builder;
use training::named_vars;

use super::Folder;

const CONFIG: &str = r#"{"model_type": "llama", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}"#;

/// Returns a folder with a model and its tokenizer.
pub(crate) fn model() -> (Folder, String) {
    let folder = Folder::new();
    let (path, vars) = (folder.path("model"), candle_nn::VarMap::new());
    let weights = Weights::random(&ModelConfig::from_json(CONFIG).unwrap(), 7).unwrap();
    CausalLm::new(weights.config(), &Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu))).unwrap();
    save_folder(&path, weights.config(), &named_vars(&vars), &FolderConfig::default()).unwrap();
    Tokenizer::bytes().unwrap().save(&path).unwrap();
    let argument = folder.argument("model");
    (folder, argument)
}
