//! Fields of `config.json` about experts.

use serde_json::{Value, json};

use super::Family;
use super::fields::Fields;
use crate::Result;

/// Experts of a model's feed-forward layers.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ExpertsConfig {
    /// Number of experts of a block.
    pub count: usize,
    /// Number of experts that each token uses.
    pub per_token: usize,
    /// Width of an expert.
    pub width: usize,
    /// Width of an expert that all tokens use besides; `None` for a model without one.
    pub shared_width: Option<usize>,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Coefficient of the loss that balances the experts in training (`router_aux_loss_coef`).
    pub balance_coefficient: f64,
    /// Whether `transformers` adds that loss when it trains (`output_router_logits`).
    pub is_balanced: bool,
    /// Whether each block has experts; the others have a dense feed-forward layer.
    pub layers: Vec<bool>,
}

/// Reads the experts of a family that may have them; `None` if no block does.
pub(super) fn read(
    family: Family,
    fields: &mut Fields<'_>,
    num_layers: usize,
) -> Result<Option<ExpertsConfig>> {
    let mut experts = match family {
        Family::Mixtral => mixtral(fields, num_layers)?,
        Family::Qwen2Moe | Family::Qwen3Moe => qwen(family, fields, num_layers)?,
        _ => return Ok(None),
    };
    experts.balance_coefficient = fields.not_negative("router_aux_loss_coef")?.unwrap_or(0.001);
    experts.is_balanced = fields.flag("output_router_logits", false)?;
    if !experts.layers.contains(&true) {
        return Ok(None);
    }
    if !(1..=experts.count).contains(&experts.per_token) {
        let help = format!("it must be from 1 to the number of experts, {}", experts.count);
        return Err(fields.config_error("num_experts_per_tok", &experts.per_token.to_string(), &help));
    }
    if experts.count > 1 << 16 {
        let help = "it must be at most 65536";
        return Err(fields.config_error("the number of experts", &experts.count.to_string(), help));
    }
    Ok(Some(experts))
}

fn mixtral(fields: &mut Fields<'_>, num_layers: usize) -> Result<ExpertsConfig> {
    fields.require_supported("router_jitter_noise", &json!(0.0))?;
    let count = fields.optional_size("num_local_experts")?;
    let count = fields.optional_size("num_experts")?.or(count).unwrap_or(8);
    Ok(ExpertsConfig {
        count,
        per_token: fields.optional_size("num_experts_per_tok")?.unwrap_or(2),
        width: fields.size("intermediate_size")?,
        shared_width: None,
        normalized: true,
        balance_coefficient: 0.0,
        is_balanced: false,
        layers: vec![count > 0; num_layers],
    })
}

fn qwen(family: Family, fields: &mut Fields<'_>, num_layers: usize) -> Result<ExpertsConfig> {
    let is_shared = family == Family::Qwen2Moe;
    let [count, per_token, width] = if is_shared { [60, 4, 1408] } else { [128, 8, 768] };
    let named = fields.optional_size("num_local_experts")?;
    let count = fields.optional_size("num_experts")?.or(named).unwrap_or(count);
    let step = fields.optional_size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(fields.config_error("decoder_sparse_step", "0", "it must be above 0"));
    }
    let dense = dense_layers(fields)?;
    let is_sparse = |layer: usize| count > 0 && !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    let shared_width = match is_shared {
        true => Some(fields.optional_size("shared_expert_intermediate_size")?.unwrap_or(5632)),
        false => None,
    };
    Ok(ExpertsConfig {
        count,
        per_token: fields.optional_size("num_experts_per_tok")?.unwrap_or(per_token),
        width: fields.optional_size("moe_intermediate_size")?.unwrap_or(width),
        shared_width,
        normalized: fields.flag("norm_topk_prob", false)?,
        balance_coefficient: 0.0,
        is_balanced: false,
        layers: (0..num_layers).map(is_sparse).collect(),
    })
}

/// Reads `mlp_only_layers`, the indices of blocks without experts.
fn dense_layers(fields: &mut Fields<'_>) -> Result<Vec<usize>> {
    let Some(value) = fields.value("mlp_only_layers") else { return Ok(Vec::new()) };
    let index = |index: &Value| index.as_u64().and_then(|index| usize::try_from(index).ok());
    match value.as_array().and_then(|all| all.iter().map(index).collect()) {
        Some(indices) => Ok(indices),
        None => Err(fields.invalid_value("mlp_only_layers", value, "it must be a list of indices of layers")),
    }
}
