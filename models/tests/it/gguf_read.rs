//! GGUF files in place of folders: what is read is what was written, here and by others.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{folder, gap};
use candle_core::{DType, Device, Tensor};
use models::tokens::{Chat, ChatTemplate};
use models::{CausalLm, GgufType, MergedWeights, ModelConfig, Tokenizer, Weights, export_gguf, save_folder};
use serde_json::{Value, json};
use training::build::Builder;

/// Returns random weights of a fixture's model as a GGUF file says it, with a vocabulary for the tokenizer of bytes.
fn weights(name: &str) -> Weights {
    let mut json: Value =
        serde_json::from_slice(&fs::read(folder(name).join("config.json")).unwrap()).unwrap();
    json["vocab_size"] = 260.into();
    match name {
        "mistral" | "mixtral" => json["sliding_window"] = Value::Null,
        "qwen2-moe" => json["decoder_sparse_step"] = 1.into(),
        "qwen3-moe" => json["mlp_only_layers"] = json!([]),
        _ => {}
    }
    Weights::random(&ModelConfig::from_json(&json.to_string()).unwrap(), 3).unwrap()
}

fn export(weights: &Weights, dtype: GgufType, out: &Path) -> PathBuf {
    Tokenizer::bytes().unwrap().save(out).unwrap();
    let path = out.join("model.gguf");
    export_gguf(&path, &MergedWeights::new(weights, None), out, None, dtype).unwrap();
    path
}

fn logits(weights: &Weights) -> Tensor {
    let builder = Builder::new(weights.tensors(DType::F32, &Device::Cpu));
    let tokens = Tensor::new(&[[1u32, 50, 9, 20, 3, 7, 90, 41]], &Device::Cpu).unwrap();
    CausalLm::new(weights.config(), &builder).unwrap().logits(&tokens).unwrap()
}

fn parameter(weights: &Weights, name: &str, dtype: DType) -> Tensor {
    weights.tensors(dtype, &Device::Cpu).get(&weights.shapes()[name][..], name).unwrap()
}

const FAMILIES: [&str; 9] =
    ["llama", "llama-tied", "mistral", "mixtral", "qwen2", "qwen2-moe", "qwen3", "qwen3-moe", "gpt2"];

#[test]
fn what_is_exported_is_read_back() {
    for name in FAMILIES {
        let (out, written) = (tempfile::tempdir().unwrap(), weights(name));
        for (kind, dtype) in
            [(GgufType::F32, DType::F32), (GgufType::F16, DType::F16), (GgufType::Bf16, DType::BF16)]
        {
            let read = Weights::folder(&export(&written, kind, out.path())).unwrap();
            assert_eq!(read.shapes(), written.shapes(), "{name}");
            for (parameter_name, dims) in written.shapes() {
                let expected = parameter(&written, parameter_name, DType::F32);
                let is_exact = read.dtype(parameter_name) == Some(DType::F32);
                let expected = if is_exact { expected } else { expected.to_dtype(dtype).unwrap() };
                let found = parameter(&read, parameter_name, DType::F32);
                assert_eq!(gap(&found, &expected), 0.0, "{name}: {parameter_name} in {dtype:?}");
                // A part of it, as a rank reads it.
                let (len, shape) = (dims.iter().product::<usize>(), dims.as_slice().into());
                let ranges = [0..1, len / 3..len / 2, len - 1..len];
                let init = candle_nn::Init::Const(0.0);
                let part = read.parts().read(parameter_name, &shape, init, DType::F32, &ranges).unwrap();
                let whole: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
                let expected: Vec<f32> = ranges.into_iter().flatten().map(|place| whole[place]).collect();
                assert_eq!(part.to_vec1::<f32>().unwrap(), expected, "{name}: {parameter_name}");
            }
            let far = gap(&logits(&read), &logits(&written));
            assert!(if kind == GgufType::F32 { far == 0.0 } else { far < 0.1 }, "{name}, {kind:?}: {far}");
        }
    }
}

/// Matrices in blocks are what candle makes of the blocks, whole and in parts that no block begins with.
#[test]
fn quantized_weights_are_widened() {
    let (out, written) = (tempfile::tempdir().unwrap(), weights("qwen3"));
    for (kind, apart, said) in [(GgufType::Q8_0, 0.01, "q8_0"), (GgufType::Q4_0, 0.2, "q4_0")] {
        let read = Weights::folder(&export(&written, kind, out.path())).unwrap();
        assert_eq!(read.quantized().as_deref(), Some(said));
        let name = "model.layers.0.mlp.gate_proj.weight";
        let (whole, expected) = (parameter(&read, name, DType::F32), parameter(&written, name, DType::F32));
        let far = gap(&whole, &expected);
        assert!(far > 0.0 && far < apart, "{said}: {far}");
        let whole: Vec<f32> = whole.flatten_all().unwrap().to_vec1().unwrap();
        let (shape, init) = (expected.shape().clone(), candle_nn::Init::Const(0.0));
        let part = read.parts().read(name, &shape, init, DType::F32, &[3..70, 100..101]).unwrap();
        assert_eq!(part.to_vec1::<f32>().unwrap(), [&whole[3..70], &whole[100..101]].concat());
    }
    assert_eq!(written.quantized(), None);
}

/// Files that the package `gguf` wrote of the fixtures' folders.
#[test]
fn files_of_others_are_the_folders_they_were_made_of() {
    for (name, apart) in [("llama", 0.0), ("mixtral", 1e-3), ("qwen3", 0.02), ("gpt2", 0.0)] {
        let read = Weights::folder(&folder("gguf").join(format!("{name}.gguf"))).unwrap();
        let expected = Weights::folder(&folder(name)).unwrap();
        assert_eq!(read.shapes(), expected.shapes(), "{name}");
        for parameter_name in expected.shapes().keys() {
            let [found, expected] = [&read, &expected].map(|of| parameter(of, parameter_name, DType::F32));
            let far = gap(&found, &expected);
            assert!(far <= apart, "{name}: {parameter_name} is {far} apart");
        }
        if apart == 0.0 {
            assert_eq!(gap(&logits(&read), &logits(&expected)), 0.0, "{name}");
        }
    }
    let cases: Value = serde_json::from_slice(&fs::read(folder("gguf/expected.json")).unwrap()).unwrap();
    for name in ["pairs", "sentences"] {
        let path = folder("gguf").join(format!("{name}.gguf"));
        let tokenizer = Tokenizer::from_folder(&path).unwrap();
        for case in cases[name].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(json!(tokenizer.encode_whole(text).unwrap()), case["ids"], "{name}: {text}");
            let plain = tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap();
            assert_eq!(plain, text.replace("</s>", "").replace("<s>", ""), "{name}");
        }
        let line = Weights::folder(&path).unwrap_err().to_string();
        assert!(line.contains("it has adapters or a vocabulary, and no model"), "{line}");
    }
    let template = ChatTemplate::from_folder(&folder("gguf/pairs.gguf")).unwrap().unwrap();
    let tokenizer = Tokenizer::from_folder(&folder("gguf/pairs.gguf")).unwrap();
    let chat = Chat::to_answer(r#"[{"role": "user", "content": "hi"}]"#).unwrap();
    let prompt = template.prompt(&chat, &tokenizer).unwrap();
    assert_eq!(tokenizer.decode(&prompt).unwrap(), "user: hi\n");
}

/// A tokenizer that is exported has the same numbers for the same texts; and so has a folder that is saved from the file.
#[test]
fn texts_have_the_same_tokens() {
    let out = tempfile::tempdir().unwrap();
    let mut json: Value =
        serde_json::from_slice(&fs::read(folder("llama").join("config.json")).unwrap()).unwrap();
    json["vocab_size"] = 300.into();
    let written = Weights::random(&ModelConfig::from_json(&json.to_string()).unwrap(), 3).unwrap();
    let path = out.path().join("model.gguf");
    let merged = MergedWeights::new(&written, None);
    export_gguf(&path, &merged, &folder("tokenizer"), None, GgufType::F16).unwrap();
    let saved = out.path().join("saved");
    let how = models::FolderConfig { tokenizer_of: Some(path.clone()), ..Default::default() };
    let vars = candle_nn::VarMap::new();
    let read = Weights::folder(&path).unwrap();
    CausalLm::new(read.config(), &Builder::new(read.vars(&vars, DType::F32, &Device::Cpu))).unwrap();
    save_folder(&saved, read.config(), &training::named_vars(&vars), &how).unwrap();
    let [before, exported, again] =
        [&folder("tokenizer"), &path, &saved].map(|model| Tokenizer::from_folder(model).unwrap());
    let words = [
        "def ", "naïve", " — ", "日本", "</s>", "🕯️", "\n\n", "   ", "1234", "it's", "<s>", "\t", "É",
        "return torch",
    ];
    for number in 0..1000usize {
        let text: String = (0..number % 9)
            .map(|place| words[(number * (place + 3) + place * place) % words.len()])
            .collect();
        let expected = (before.encode(&text).unwrap(), before.encode_whole(&text).unwrap());
        for tokenizer in [&exported, &again] {
            assert_eq!(
                (tokenizer.encode(&text).unwrap(), tokenizer.encode_whole(&text).unwrap()),
                expected,
                "{text:?}"
            );
        }
    }
    assert_eq!(exported.end_of_text(), before.end_of_text());
}

#[test]
fn what_is_no_model_s_file_is_one_line() {
    let (out, written) = (tempfile::tempdir().unwrap(), weights("llama"));
    let whole = fs::read(export(&written, GgufType::F16, out.path())).unwrap();
    let path = out.path().join("broken.gguf");
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let tokenizer = Tokenizer::from_folder(&path).map(drop);
        let line = tokenizer.and(Weights::folder(&path).map(drop)).err().map(|error| error.to_string());
        assert!(line.as_ref().is_none_or(|line| !line.contains('\n') && line.len() < 10_000), "{line:?}");
        line
    };
    assert_eq!(read(&whole), None);
    // Cut off anywhere.
    for len in (0..whole.len()).step_by(whole.len() / 97) {
        let line = read(&whole[..len]).unwrap();
        assert!(line.contains("it is not whole") || len < 8, "{len}: {line}");
    }
    // Any byte of the head is another one; numbers become huge.
    let mut refused = 0;
    for place in (0..9000).step_by(7) {
        let mut bytes = whole.clone();
        bytes[place] = 0xff;
        refused += usize::from(read(&bytes).is_some());
        bytes[place..place + 8].fill(0xff);
        read(&bytes);
    }
    assert!(refused > 0);
    let changed = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = whole.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        read(&bytes).unwrap()
    };
    // The value behind the key, its type and its length.
    let line = changed("llama", "gemma");
    assert!(line.contains("its architecture is \"gemma\"; supported are llama, qwen2"), "{line}");
    let line = changed("llama.vocab_size", "llama.vocab_sizo");
    assert!(line.contains("llama.vocab_sizo is 260, which is not known here"), "{line}");
    let line = changed("blk.0.attn_norm", "blk.0.attn_nerm");
    assert!(
        line.contains("missing model.layers.0.input_layernorm.weight; surplus blk.0.attn_nerm.weight"),
        "{line}"
    );
    let line = Weights::folder(&out.path().join("none.gguf")).unwrap_err().to_string();
    assert!(line.contains("none.gguf"), "{line}");
}

/// A width of heads that no memory holds the factors of is refused before they are computed.
#[test]
fn factors_of_other_heads_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let mut json = weights("llama").config().json().clone();
    json.insert(
        "rope_scaling".into(),
        json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16 }),
    );
    let written =
        Weights::random(&ModelConfig::from_json(&Value::Object(json).to_string()).unwrap(), 3).unwrap();
    let path = export(&written, GgufType::F16, out.path());
    let mut bytes = fs::read(&path).unwrap();
    for name in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        let key = format!("llama.{name}");
        let at = bytes.windows(key.len()).position(|found| found == key.as_bytes()).unwrap();
        // Behind the key and the number of its type.
        bytes[at + key.len() + 4..][..4].copy_from_slice(&4_294_967_294u32.to_le_bytes());
    }
    fs::write(&path, bytes).unwrap();
    let line = Weights::folder(&path).unwrap_err().to_string();
    assert!(
        line.contains("rope_freqs.weight has 4 factors, and a head of 4294967294 features has 2147483647"),
        "{line}"
    );
}

/// What a file has no place for is refused, and what is not normalized has the name that says so.
#[test]
fn texts_are_normalized_as_names_say() {
    let qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let llama = &qwen.replace(r"|\p{N}|", r"|\p{N}{1,3}|");
    let (out, written) = (tempfile::tempdir().unwrap(), weights("qwen3"));
    let (description, file) = (out.path().join("tokenizer.json"), out.path().join("model.gguf"));
    let exported = |expression: &str, normalizer: Value, lstrip: bool| {
        Tokenizer::bytes().unwrap().save(out.path()).unwrap();
        let mut json: Value = serde_json::from_slice(&fs::read(&description).unwrap()).unwrap();
        json["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false }
        ] });
        json["model"]["vocab"]["ab"] = 257.into();
        json["model"]["merges"] = json!([["a", "b"]]);
        json["normalizer"] = normalizer;
        json["added_tokens"][0]["lstrip"] = lstrip.into();
        fs::write(&description, json.to_string()).unwrap();
        export_gguf(&file, &MergedWeights::new(&written, None), out.path(), None, GgufType::F16)?;
        Ok::<_, models::Error>(Tokenizer::from_folder(&file)?.encode("abe\u{301}")?.len())
    };
    let normal = json!({ "type": "NFC" });
    assert_eq!(
        (exported(qwen, normal.clone(), false).unwrap(), exported(qwen, Value::Null, false).unwrap()),
        (3, 4)
    );
    assert_eq!(exported(llama, Value::Null, false).unwrap(), 4);
    let said = exported(llama, normal, false).unwrap_err().to_string();
    assert!(said.contains("its normalizer is NFC") && said.contains("llama-bpe"), "{said}");
    let said = exported(qwen, Value::Null, true).unwrap_err().to_string();
    assert!(said.contains("has lstrip") && !said.contains('\n'), "{said}");
}
