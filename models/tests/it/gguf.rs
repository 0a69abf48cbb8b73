//! GGUF files: what is written is what the model has.

use std::fs::File;

use crate::common::folder;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device};
use models::{GgufType, MergedWeights, ModelConfig, Tokenizer, Weights, export_gguf};

/// Returns random weights of a fixture's model, with a vocabulary for the tokenizer of bytes.
fn weights(name: &str, change: impl Fn(&mut serde_json::Value)) -> Weights {
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder(name).join("config.json")).unwrap()).unwrap();
    json["vocab_size"] = 260.into();
    change(&mut json);
    Weights::random(&ModelConfig::from_json(&json.to_string()).unwrap(), 3).unwrap()
}

#[test]
fn a_file_has_each_parameter_once() {
    for name in ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2"] {
        let (out, weights) = (tempfile::tempdir().unwrap(), weights(name, |_| {}));
        Tokenizer::bytes().unwrap().save(out.path()).unwrap();
        let path = out.path().join("model.gguf");
        let merged = MergedWeights::new(&weights, None);
        let written = export_gguf(&path, &merged, out.path(), GgufType::F32).unwrap();
        assert_eq!(written.bytes, std::fs::metadata(&path).unwrap().len(), "{name}");
        let mut file = File::open(&path).unwrap();
        let content = Content::read(&mut file).unwrap();
        let count: usize = weights.shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
        let names = || content.tensor_infos.iter().filter(|(name, _)| *name != "rope_freqs.weight");
        assert_eq!(names().map(|(_, info)| info.shape.elem_count()).sum::<usize>(), count, "{name}");
        // The values, wherever their order is: sums of squares are equal.
        let square = |tensor: candle_core::Tensor| {
            tensor.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap()
        };
        let found: f64 = names()
            .map(|(name, _)| {
                let tensor = content.tensor(&mut File::open(&path).unwrap(), name, &Device::Cpu).unwrap();
                square(tensor.dequantize(&Device::Cpu).unwrap())
            })
            .sum();
        let expected: f64 = weights.shapes().keys().map(|name| square(merged.get(name).unwrap())).sum();
        assert!((found - expected).abs() < 1e-9 * expected, "{name}: {found} and {expected}");
        assert_eq!(content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap().len(), 260, "{name}");
    }
}

#[test]
fn what_it_cannot_say_is_refused() {
    let out = tempfile::tempdir().unwrap();
    Tokenizer::bytes().unwrap().save(out.path()).unwrap();
    let path = out.path().join("model.gguf");
    let refused = |weights: &Weights| {
        let merged = MergedWeights::new(weights, None);
        export_gguf(&path, &merged, out.path(), GgufType::F16).unwrap_err().to_string()
    };
    let line = refused(&weights("llama", |json| json["hidden_act"] = "gelu".into()));
    assert!(line.contains("the activation is Gelu; a GGUF file of a llama cannot say so"), "{line}");
    Tokenizer::characters("abc").unwrap().save(out.path()).unwrap();
    let line = refused(&weights("llama", |_| {}));
    assert!(line.contains("llama.cpp has no name for this tokenizer"), "{line}");
    assert!(!path.exists());
}
