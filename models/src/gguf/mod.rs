//! Models, and adapters of models, as GGUF files: what llama.cpp, and programs that are built on it, run.
//!
//! [`export_gguf`] and [`export_gguf_adapters`] write one; the format is in `gguf_file`, `metadata` and `tensors` say what
//! a family's model has in it, `vocabulary` its tokenizer. The way back, a file in place of a folder, is `reading::gguf`.
//!
//! # Source
//! The specification of GGUF in the repository of ggml, `docs/gguf.md`.

mod metadata;
mod tensors;
mod vocabulary;

use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use training::internal::AtomicFile;

use self::tensors::{Source, TensorPlan};
use crate::gguf_file::{self, GgufType, Info, Value, padding, pairs_adjacent};
use crate::names::ADAPTER;
use crate::tokens::NamedTemplate;
use crate::{Error, Lora, MergedWeights, ModelConfig, Result, Weights};

/// What was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufFile {
    /// Number of tensors.
    pub tensors: usize,
    /// Size of the file.
    pub bytes: u64,
    /// Names of tensors whose rows are no multiple of the type's blocks, and which have a wider type.
    pub wider: Vec<String>,
    /// What the file cannot say of the model, one line each.
    pub notes: Vec<String>,
}

/// Writes a model as a GGUF file, with the tokenizer of a folder, and its chat template or the one that is given. The file appears complete or not at all.
///
/// Matrices have the type `dtype`; norms, biases, routers and learned positions are f32. With a type of 4 bits the head, or the
/// embedding that stands for it, has 6, as llama.cpp's own files have. A matrix whose rows no block divides gets a
/// wider type: [`GgufFile::wider`].
///
/// # Cost
/// One tensor at a time is in memory, in f32 and in the type written.
///
/// # Errors
/// A model or a tokenizer that llama.cpp would compute otherwise, named; a number beyond f16; files that cannot be read or written.
///
/// ```
/// use models::{GgufType, MergedWeights, Tokenizer, Weights, export_gguf};
///
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen3");
/// # let out = tempfile::tempdir()?;
/// # Tokenizer::bytes()?.save(out.path())?;
/// # let with_tokenizer = out.path();
/// # let config = std::fs::read_to_string(std::path::Path::new(folder).join("config.json"))?;
/// # let config = models::ModelConfig::from_json(&config.replace("\"vocab_size\": 96", "\"vocab_size\": 257"))?;
/// # let weights = Weights::random(&config, 1)?;
/// let path = out.path().join("model.gguf");
/// let file = export_gguf(&path, &MergedWeights::new(&weights, None), with_tokenizer, None, GgufType::Q8_0)?;
/// assert_eq!(file.bytes, std::fs::metadata(&path)?.len());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn export_gguf(
    path: &Path,
    weights: &MergedWeights<'_>,
    tokenizer_of: &Path,
    template: Option<&NamedTemplate>,
    dtype: GgufType,
) -> Result<GgufFile> {
    let config = weights.weights().config();
    let (mut metadata, notes) = metadata::of_model(config, tokenizer_of, dtype)?;
    metadata.extend(vocabulary::of_folder(tokenizer_of, template, config.vocab_size)?);
    let plans = tensors::of_model(weights.weights())?;
    let mut wider = Vec::new();
    let plans = plans.into_iter().map(|plan| {
        let exact = if plan.is_exact { GgufType::F32 } else { dtype };
        let of_tensor = exact.of_tensor(&plan.name, &plan.dims, config.tied);
        if of_tensor.is_wider {
            wider.push(plan.name.clone());
        }
        (plan, of_tensor.dtype)
    });
    let plans: Vec<_> = plans.collect();
    let bytes = write(path, &metadata, &plans, |name| weights.get(name))?;
    Ok(GgufFile { tensors: plans.len(), bytes, wider, notes })
}

/// Writes adapters as a GGUF file, in f32, which llama.cpp applies to the GGUF file of their model. `weights` are those that have them.
///
/// # Errors
/// Those of [`export_gguf`].
pub fn export_gguf_adapters(path: &Path, weights: &Weights, lora: &Lora) -> Result<GgufFile> {
    let config = weights.config();
    // A file has one alpha, and what reads it divides by each rank. Another scale is in the second matrix.
    let alpha_of = |layer: &str| lora.config().scale_of(layer) * lora.config().rank_of(layer) as f64;
    let second = |name: &str| name.strip_suffix(&format!(".{}.weight", ADAPTER[1])).map(alpha_of);
    let alpha =
        lora.shapes().keys().filter_map(|name| second(name)).find(|alpha| *alpha != 0.0).unwrap_or(1.0);
    let metadata = metadata::of_adapters(config, alpha)?;
    let plans: Vec<_> =
        tensors::of_adapters(config, lora)?.into_iter().map(|plan| (plan, GgufType::F32)).collect();
    let builder = weights.tensors(DType::F32, &Device::Cpu);
    let bytes = write(path, &metadata, &plans, |name| {
        let dims = lora.shapes().get(name).cloned().unwrap_or_default();
        let matrix = builder.get(dims, name)?;
        match second(name).filter(|own| *own != alpha) {
            Some(own) => Ok((matrix * (own / alpha))?),
            None => Ok(matrix),
        }
    })?;
    Ok(GgufFile { tensors: plans.len(), bytes, ..GgufFile::default() })
}

/// Writes a file of these tensors, made of the parameters that `get` returns by name, and returns its size.
fn write(
    path: &Path,
    metadata: &[(String, Value)],
    plans: &[(TensorPlan, GgufType)],
    get: impl Fn(&str) -> Result<Tensor>,
) -> Result<u64> {
    let refuse = Error::io("write", path);
    let infos: Vec<Info<'_>> = plans
        .iter()
        .map(|(plan, dtype)| Info { name: &plan.name, dims: &plan.dims, dtype: *dtype })
        .collect();
    let mut file = AtomicFile::create(path).map_err(&refuse)?;
    let mut out = BufWriter::new(&mut file);
    let head = gguf_file::bytes(metadata, &infos);
    let mut written = head.len() as u64;
    out.write_all(&head).map_err(&refuse)?;
    for (plan, dtype) in plans {
        let bytes = dtype.encode(&plan.name, &plan.read(&get)?, path)?;
        out.write_all(&bytes).map_err(&refuse)?;
        let filled = padding(bytes.len());
        out.write_all(&vec![0; filled]).map_err(&refuse)?;
        written += (bytes.len() + filled) as u64;
    }
    out.flush().map_err(&refuse)?;
    drop(out);
    file.commit().map_err(&refuse)?;
    Ok(written)
}

impl TensorPlan {
    /// Returns its values, made of the parameters that `get` returns by name.
    fn read(&self, get: impl Fn(&str) -> Result<Tensor>) -> Result<Tensor> {
        let tensor = match &self.source {
            Source::Parameter { name, rotated_heads: None } => get(name)?,
            Source::Parameter { name, rotated_heads: Some(heads) } => pairs_adjacent(&get(name)?, *heads)?,
            Source::Experts(names) => {
                let all = names.iter().map(|name| get(name)).collect::<Result<Vec<_>>>()?;
                Tensor::stack(&all, 0)?
            }
            Source::Numbers(numbers) => Tensor::new(numbers.as_slice(), &Device::Cpu)?,
        };
        Ok(tensor.reshape(self.dims.as_slice())?)
    }
}

/// An error about a field that GGUF or llama.cpp cannot express.
fn unsupported(config: &ModelConfig, field: &str, got: &str) -> Error {
    Error::Config {
        file: "config.json",
        field: field.into(),
        got: got.into(),
        help: format!(
            "a GGUF file of a {} cannot say so, and would be computed otherwise: export to a folder of transformers instead",
            config.family
        ),
    }
}
