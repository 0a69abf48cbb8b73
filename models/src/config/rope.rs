//! Rotary position embedding fields of a configuration.

use ops::{RotaryConfig, RotaryScaling};
use serde_json::json;

use super::fields::Fields;
use crate::Result;

const ORIGINAL_MAX_LEN_FIELD: &str = "original_max_position_embeddings";
const SUPPORTED: &str = "supported are default, linear, llama3 and yarn";

/// Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`; `default_theta` is that of the family. In a family that
/// has `scale`, the factor of its attention scores, YaRN scales that, too.
pub(super) fn read(
    fields: &mut Fields<'_>,
    head_dim: usize,
    max_len: usize,
    default_theta: f64,
    scale: Option<&mut f64>,
) -> Result<RotaryConfig> {
    let theta = fields.above_zero("rope_theta")?;
    // These models' files only have the layout that is not interleaved: the two numbers of a pair are half a head
    // apart.
    fields.require_supported("rope_interleaved", &json!(false))?;
    fields.require_supported("partial_rotary_factor", &json!(1.0))?;
    let name = if fields.has("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
    let other = if name == "rope_parameters" { "rope_scaling" } else { "rope_parameters" };
    fields.require_supported(other, &json!(null))?;
    let Some(mut rope) = fields.object(name)? else {
        return Ok(RotaryConfig {
            theta: theta.unwrap_or(default_theta),
            ..RotaryConfig::new(head_dim, max_len)
        });
    };
    let own_theta = rope.above_zero("rope_theta")?;
    rope.require_supported("partial_rotary_factor", &json!(1.0))?;
    let old = rope.text("type")?;
    let kind = rope.text("rope_type")?.or(old).unwrap_or("default");
    let scaling = scaling(kind, &mut rope, max_len, scale)?;
    rope.finish()?;
    let theta = own_theta.or(theta).unwrap_or(default_theta);
    Ok(RotaryConfig { theta, scaling, ..RotaryConfig::new(head_dim, max_len) })
}

fn scaling(
    kind: &str,
    rope: &mut Fields<'_>,
    max_len: usize,
    scale: Option<&mut f64>,
) -> Result<RotaryScaling> {
    let needed = |rope: &mut Fields<'_>, name: &str| match rope.above_zero(name)? {
        Some(number) => Ok(number),
        None => Err(rope.config_error(name, "missing", "give a number")),
    };
    Ok(match kind {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor: needed(rope, "factor")? },
        "llama3" => {
            let low_freq_factor = needed(rope, "low_freq_factor")?;
            let high_freq_factor = needed(rope, "high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                let help = format!("it must be above low_freq_factor, {low_freq_factor}");
                return Err(rope.config_error("high_freq_factor", &high_freq_factor.to_string(), &help));
            }
            let factor = needed(rope, "factor")?;
            let missing = rope.config_error(ORIGINAL_MAX_LEN_FIELD, "missing", "give a whole number");
            let original_max_len = original_max_len(rope)?.ok_or(missing)?;
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_len }
        }
        "yarn" => {
            // The code of YaRN's authors multiplies by the one and the other; transformers reads neither, nor `finetuned`.
            rope.require_supported("attn_factor", &json!(1.0))?;
            rope.require_supported("extrapolation_factor", &json!(1.0))?;
            rope.flag("finetuned", true)?;
            let original = original_max_len(rope)?;
            let factor = match (original, rope.above_zero("factor")?) {
                (_, Some(factor)) => factor,
                // The field is present and null.
                (Some(original), None) if rope.has("factor") => max_len as f64 / original as f64,
                (_, None) => return Err(rope.config_error("factor", "missing", "give a number")),
            };
            let of_scores = match scale {
                Some(scale) => of_scores(rope, factor, scale)?,
                None => None,
            };
            RotaryScaling::Yarn {
                factor,
                original_max_len: original.unwrap_or(max_len),
                beta_fast: rope.above_zero("beta_fast")?.unwrap_or(32.0),
                beta_slow: rope.above_zero("beta_slow")?.unwrap_or(1.0),
                attention_factor: rope.above_zero("attention_factor")?.or(of_scores),
                // Null is false, as in transformers.
                truncate: rope.flag("truncate", !rope.has("truncate"))?,
            }
        }
        other => return Err(rope.config_error("rope_type", &format!("{other:?}"), SUPPORTED)),
    })
}

/// Reads `mscale` and `mscale_all_dim`; returns the factor of rotated numbers, if they say it, and changes that of scores.
fn of_scores(rope: &mut Fields<'_>, factor: f64, scale: &mut f64) -> Result<Option<f64>> {
    let sharper = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    let [rotated, all] = ["mscale", "mscale_all_dim"].map(|name| rope.not_negative(name));
    let [rotated, all] = [rotated?, all?].map(|by| by.filter(|by| *by > 0.0).map(sharper));
    *scale *= all.map_or(1.0, |all| all * all);
    Ok(rotated.zip(all).map(|(rotated, all)| rotated / all))
}

/// Reads the maximum length of the model before its context was extended.
fn original_max_len(rope: &mut Fields<'_>) -> Result<Option<usize>> {
    match rope.optional_size(ORIGINAL_MAX_LEN_FIELD)? {
        Some(0) => Err(rope.config_error(ORIGINAL_MAX_LEN_FIELD, "0", "it must be above 0")),
        len => Ok(len),
    }
}
