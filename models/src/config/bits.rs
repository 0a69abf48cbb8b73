//! The field `quantization_config`: weights that transformers saved in 4 or 8 bits with bitsandbytes.

use candle_core::DType;
use ops::quantized::Format;
use serde_json::{Map, Value, json};

use super::ModelConfig;
use super::fields::Fields;
use crate::Result;

/// The field. A folder with the weights in numbers is saved without it.
pub(crate) const FIELD: &str = "quantization_config";

/// Fields that say how others load and compute, or which layers were quantized: tensors themselves say that.
const WITHOUT_EFFECT: [&str; 5] = [
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules",
];

/// Checks the field; returns a note where what is computed is not what transformers computes.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Option<String>> {
    let Some(mut own) = fields.object(FIELD)? else { return Ok(None) };
    match own.value("quant_method") {
        Some(Value::String(method)) if method == "bitsandbytes" => {}
        got => {
            let got = got.map_or_else(|| "missing".into(), Value::to_string);
            let help = "supported is \"bitsandbytes\", in 4 and 8 bits; or give a folder with the weights in f32, f16 or bf16";
            return Err(own.config_error("quant_method", &got, help));
        }
    }
    let [in_4_bits, in_8_bits] = ["4", "8"].map(|bits| {
        // Older configurations have the name without an underscore alone.
        let older = own.flag(&format!("_load_in_{bits}bit"), false)?;
        own.flag(&format!("load_in_{bits}bit"), older)
    });
    let (in_4_bits, in_8_bits) = (in_4_bits?, in_8_bits?);
    if in_4_bits == in_8_bits {
        let help = "one of load_in_4bit and load_in_8bit must be true";
        return Err(own.config_error("load_in_4bit", &in_4_bits.to_string(), help));
    }
    match own.text("bnb_4bit_quant_type")? {
        None | Some("nf4" | "fp4") => {}
        Some(other) => {
            let help = "supported are \"nf4\" and \"fp4\"";
            return Err(own.config_error("bnb_4bit_quant_type", &json!(other).to_string(), help));
        }
    }
    own.require_supported("llm_int8_has_fp16_weight", &json!(false))?;
    let threshold = own.not_negative("llm_int8_threshold")?;
    WITHOUT_EFFECT.iter().for_each(|name| _ = own.value(name));
    own.finish()?;
    let note = "activations are not rounded to 8 bits, as bitsandbytes rounds them: weights alone are in 8 bits here";
    Ok(in_8_bits.then(|| match threshold {
        Some(threshold) => format!("llm_int8_threshold of {threshold} is not applied: {note}"),
        None => note.into(),
    }))
}

/// Returns the bits that a configuration says its weights are in; `None` if it has no such field.
fn bits(json: &Map<String, Value>) -> Option<u8> {
    let own = json.get(FIELD)?.as_object()?;
    let is_set = |name: &str| own.get(name).and_then(Value::as_bool).unwrap_or(false);
    Some(if is_set("load_in_8bit") || is_set("_load_in_8bit") { 8 } else { 4 })
}

impl ModelConfig {
    /// Returns the bits of the weights of linear layers, 4 or 8, where transformers saved them with bitsandbytes
    /// (`quantization_config`).
    pub fn bits(&self) -> Option<u8> {
        bits(&self.json)
    }

    /// Returns the format that such weights have, as the configuration says; `None` without, and for FP4.
    pub fn base_format(&self) -> Option<Format> {
        let own = |name: &str| self.json.get(FIELD)?.get(name);
        let is_double = own("bnb_4bit_use_double_quant").and_then(Value::as_bool).unwrap_or(false);
        match self.bits()? {
            8 => Some(Format::Int8),
            _ if own("bnb_4bit_quant_type").and_then(Value::as_str) != Some("nf4") => None,
            _ if is_double => Some(Format::Nf4),
            _ => Some(Format::Nf4Wide),
        }
    }

    /// Returns the dtype that weights were saved in, or had before they were quantized.
    pub(crate) fn saved_dtype(&self) -> Option<DType> {
        match ["dtype", "torch_dtype"].into_iter().find_map(|name| self.json.get(name)?.as_str())? {
            "float32" => Some(DType::F32),
            "float16" => Some(DType::F16),
            "bfloat16" => Some(DType::BF16),
            "float64" => Some(DType::F64),
            _ => None,
        }
    }
}
