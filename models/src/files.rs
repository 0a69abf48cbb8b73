//! Names of the files in a folder of a model or of adapters.

use std::path::Path;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_TENSORS: &str = "adapter_model.safetensors";

/// All files of adapters, also those that only `peft` writes.
pub(crate) const ADAPTER_FILES: [&str; 3] = [ADAPTER_CONFIG, ADAPTER_TENSORS, "adapter_model.bin"];

/// Tokenizer and generation files, copied from another folder if they exist there.
pub(crate) const TOKENIZER_FILES: &[&str] = &[
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
    "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
    "vocab.txt",
];

/// Returns the file name of a folder's weights, of a model or of adapters; `None` if there are none. Of models only
/// safetensors files are looked for.
pub fn weights_in(folder: &Path) -> Option<&'static str> {
    let [_, adapters, older] = ADAPTER_FILES;
    [SINGLE, INDEX, adapters, older].into_iter().find(|name| folder.join(name).exists())
}

/// Returns whether this is the name of a file of a model: weights, adapters, configuration, tokenizer or generation
/// settings.
pub fn is_model_file(name: &str) -> bool {
    name == CONFIG || TOKENIZER_FILES.contains(&name) || is_weight_file(name)
}

/// Returns whether this is the name of a file of weights, of a model or of adapters.
pub(crate) fn is_weight_file(name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.contains("-of-") && name.ends_with(".safetensors");
    is_shard || name == SINGLE || name == INDEX || ADAPTER_FILES.contains(&name)
}
