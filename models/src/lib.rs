//! Language models in Hugging Face's folder format, for training in any layout: the Llama family (Llama 2 and 3,
//! SmolLM2, Mistral, Qwen2.5, Qwen3), its models with experts (Mixtral, Qwen2-MoE, Qwen3-MoE), DeepSeek V3 and GPT-2.
//!
//! A folder is read, trained and written back:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Optimizer, VarMap};
//! use models::{CausalLm, FolderConfig, Weights, save_folder};
//! use training::{Adam, AdamConfig, build::Builder, named_vars};
//!
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
//! # let out = tempfile::tempdir()?;
//! let (weights, vars) = (Weights::folder(folder)?, VarMap::new());
//! let model = CausalLm::new(weights.config(), &Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu)))?;
//! let mut optimizer = Adam::named(named_vars(&vars), AdamConfig::adamw())?;
//! let tokens = Tensor::new(&[[1u32, 5, 9, 2], [3, 3, 7, 8]], &Device::Cpu)?;
//! for _ in 0..3 {
//!     let loss = model.loss(&tokens.narrow(1, 0, 3)?, &tokens.narrow(1, 1, 3)?)?;
//!     optimizer.backward_step(&loss)?;
//! }
//! save_folder(out.path(), weights.config(), &named_vars(&vars), &FolderConfig::default())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Read it in this order: [`ModelConfig`] and [`Weights`], what a folder holds; [`CausalLm`], the model; [`save_folder`]; [`tokens`],
//! text as rows of tokens.
//!
//! [`Tokenizer`] converts text to tokens, [`generate`] continues a text. [`Lora`] trains low-rank adapters of a frozen
//! model. [`export_gguf`] writes what llama.cpp runs; such a file is read in place of a folder, too. [`CausalLm::new`] is the only constructor of a model, for all layouts: see [`training::build`].
#![forbid(unsafe_code)]

mod bitsandbytes;
mod block;
mod config;
mod digest;
mod entry;
mod error;
mod experts;
mod feed_forward;
mod files;
mod fingerprint;
mod finite;
mod folder;
mod generate;
mod gguf;
mod gguf_file;
mod labels;
mod latent;
mod lora;
mod measures;
mod merged;
mod model;
mod names;
mod parts;
mod quantized;
mod reading;
mod rotary;
mod save;
mod shapes;
mod tokenizer;
pub mod tokens;
mod weights;
mod written;

pub use config::{
    DropoutConfig, ExpertsConfig, Family, LabelsConfig, LatentConfig, ModelConfig, Problem, SigmoidConfig,
};
pub use error::{Error, Result, TensorMismatches};
pub use files::{is_model_file, weights_in};
pub use generate::{GenerateConfig, generate, generate_with};
pub use gguf::{GgufFile, export_gguf, export_gguf_adapters};
pub use gguf_file::GgufType;
pub use lora::{Lora, LoraConfig};
pub use merged::MergedWeights;
pub use model::{Cache, CausalLm};
pub use reading::{is_gguf, pad_token};
pub use save::{FolderConfig, FolderWriter, save_folder};
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::Weights;
pub use written::{WrittenFiles, foreign_adapters_in};
