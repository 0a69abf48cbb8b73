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
    /// Choice by sigmoids, with a correction for each expert; `None` for a choice by a softmax.
    pub sigmoid: Option<SigmoidConfig>,
    /// Coefficient of the loss that balances the experts in training (`router_aux_loss_coef`).
    pub balance_coefficient: f64,
    /// Whether `transformers` adds that loss when it trains (`output_router_logits`).
    pub is_balanced: bool,
    /// Whether each block has experts; the others have a dense feed-forward layer.
    pub layers: Vec<bool>,
}

/// How experts are chosen by the sigmoids of their scores.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct SigmoidConfig {
    /// Number of groups of experts (`n_group`).
    pub groups: usize,
    /// Number of groups of which a token uses experts (`topk_group`).
    pub groups_per_token: usize,
    /// Factor of the weights (`routed_scaling_factor`).
    pub factor: f64,
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
        Family::DeepseekV3 => deepseek(fields, num_layers)?,
        _ => return Ok(None),
    };
    let coefficient = fields.not_negative("router_aux_loss_coef")?.unwrap_or(0.001);
    let is_balanced = fields.flag("output_router_logits", false)?;
    // DeepSeek V3 has no such loss.
    if family != Family::DeepseekV3 {
        (experts.balance_coefficient, experts.is_balanced) = (coefficient, is_balanced);
    }
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
        sigmoid: None,
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
        sigmoid: None,
        balance_coefficient: 0.0,
        is_balanced: false,
        layers: (0..num_layers).map(is_sparse).collect(),
    })
}

fn deepseek(fields: &mut Fields<'_>, num_layers: usize) -> Result<ExpertsConfig> {
    for (name, supported) in
        [("scoring_func", json!("sigmoid")), ("topk_method", json!("noaux_tc")), ("moe_layer_freq", json!(1))]
    {
        fields.require_supported(name, &supported)?;
    }
    let or = |size: Option<usize>, missing| size.unwrap_or(missing);
    let count = or(fields.optional_size("n_routed_experts")?, 256);
    let per_token = or(fields.optional_size("num_experts_per_tok")?, 8);
    let groups = or(fields.optional_size("n_group")?, 8);
    if groups == 0 || !count.is_multiple_of(groups) || (count > 0 && count / groups < 2) {
        let help = format!("it must divide n_routed_experts, {count}, and each group must have two experts");
        return Err(fields.config_error("n_group", &groups.to_string(), &help));
    }
    let groups_per_token = or(fields.optional_size("topk_group")?, 4);
    if groups_per_token > groups || groups_per_token * (count / groups) < per_token {
        let help =
            format!("it must be at most n_group, {groups}, and the groups must have {per_token} experts");
        return Err(fields.config_error("topk_group", &groups_per_token.to_string(), &help));
    }
    let factor = fields.above_zero("routed_scaling_factor")?.unwrap_or(2.5);
    let width = or(fields.optional_size("moe_intermediate_size")?, 2048);
    let dense = or(fields.optional_size("first_k_dense_replace")?, 3);
    Ok(ExpertsConfig {
        count,
        per_token,
        width,
        shared_width: Some(width * or(fields.optional_size("n_shared_experts")?, 1)),
        normalized: fields.flag("norm_topk_prob", true)?,
        sigmoid: Some(SigmoidConfig { groups, groups_per_token, factor }),
        balance_coefficient: 0.001,
        is_balanced: false,
        layers: (0..num_layers).map(|layer| count > 0 && layer >= dense).collect(),
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
