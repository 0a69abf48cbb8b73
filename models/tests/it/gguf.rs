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
        let written = export_gguf(&path, &merged, out.path(), None, GgufType::F32).unwrap();
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

/// What a tokenizer adds to a text has its number, also where no file names it.
#[test]
fn added_tokens_have_their_numbers() {
    let out = tempfile::tempdir().unwrap();
    Tokenizer::bytes().unwrap().save(out.path()).unwrap();
    let (file, path) = (out.path().join("tokenizer.json"), out.path().join("model.gguf"));
    let weights = weights("llama", |_| {});
    let before: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let export =
        |begin: &[&str], end: &[&str], bos: Option<&str>| -> Result<[(bool, Option<u32>); 2], String> {
            let mut json = before.clone();
            let special = |name: &&str| serde_json::json!({ "SpecialToken": { "id": name, "type_id": 0 } });
            let single = || {
                let text = serde_json::json!({ "Sequence": { "id": "A", "type_id": 0 } });
                begin.iter().map(special).chain([text]).chain(end.iter().map(special)).collect::<Vec<_>>()
            };
            for (id, name) in [(257, "<s>"), (258, "</s>")] {
                let mut token = json["added_tokens"][0].clone();
                (token["id"], token["content"]) = (id.into(), name.into());
                json["added_tokens"].as_array_mut().unwrap().push(token);
            }
            json["post_processor"] = serde_json::json!({
                "type": "TemplateProcessing", "single": single(), "pair": single(),
                "special_tokens": {
                    "<s>": { "id": "<s>", "ids": [257], "tokens": ["<s>"] },
                    "</s>": { "id": "</s>", "ids": [258], "tokens": ["</s>"] },
                },
            });
            std::fs::write(&file, json.to_string()).unwrap();
            let config = serde_json::json!({ "bos_token": bos });
            std::fs::write(out.path().join("tokenizer_config.json"), config.to_string()).unwrap();
            let written =
                export_gguf(&path, &MergedWeights::new(&weights, None), out.path(), None, GgufType::F16);
            written.map_err(|error| error.to_string())?;
            let metadata = Content::read(&mut File::open(&path).unwrap()).unwrap().metadata;
            let id = |name: &str| {
                metadata.get(&format!("tokenizer.ggml.{name}_token_id")).map(|id| id.to_u32().unwrap())
            };
            let flag = |name: &str| metadata[&format!("tokenizer.ggml.add_{name}_token")].to_bool().unwrap();
            Ok(["bos", "eos"].map(|name| (flag(name), id(name))))
        };
    assert_eq!(export(&[], &[], None), Ok([(false, None), (false, Some(256))]));
    assert_eq!(export(&["<s>"], &["</s>"], None), Ok([(true, Some(257)), (true, Some(258))]));
    let read = Tokenizer::from_folder(&path).unwrap();
    assert_eq!(read.encode_whole("a").unwrap(), [257, 97, 258]);
    assert_eq!(export(&["<s>"], &[], Some("<s>")), Ok([(true, Some(257)), (false, Some(256))]));
    let refused: String = export(&["<s>"], &[], Some("</s>")).unwrap_err();
    assert!(
        refused
            .contains("it adds token 257 to a text, and `bos_token` of tokenizer_config.json is token 258"),
        "{refused}"
    );
    let refused = export(&["<s>", "</s>"], &[], None).unwrap_err();
    assert!(refused.contains("a place for one token before a text, and one behind it"), "{refused}");
}

#[test]
fn what_it_cannot_say_is_refused() {
    let out = tempfile::tempdir().unwrap();
    Tokenizer::bytes().unwrap().save(out.path()).unwrap();
    let path = out.path().join("model.gguf");
    let refused = |weights: &Weights| {
        let merged = MergedWeights::new(weights, None);
        export_gguf(&path, &merged, out.path(), None, GgufType::F16).unwrap_err().to_string()
    };
    let line = refused(&weights("llama", |json| json["hidden_act"] = "gelu".into()));
    assert!(line.contains("the activation is Gelu; a GGUF file of a llama cannot say so"), "{line}");
    Tokenizer::characters("abc").unwrap().save(out.path()).unwrap();
    let line = refused(&weights("llama", |_| {}));
    assert!(line.contains("llama.cpp has no name for this tokenizer"), "{line}");
    assert!(!path.exists());
}
