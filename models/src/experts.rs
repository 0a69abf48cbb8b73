//! Feed-forward layer with experts, of which each token uses a few, and optionally one that all tokens use.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::Init;
use ops::tape::add;
use ops::{EXPERT_CORRECTION, Experts, Router, Scoring, cast, scale_rows, sigmoid, wide_dtype};
use training::build::{Division, ExpertConfig, Layers, Linear, LinearConfig, Part};

use crate::feed_forward::FeedForward;
use crate::names::{self, ExpertNames};
use crate::{ExpertsConfig, ModelConfig};

/// Experts, their router, and optionally a shared expert. Where layers are divided, each rank has a part of every expert and
/// computes the whole router, whose gradient is then the sum over ranks. Where experts are divided, each rank has some of them, and
/// router and shared expert are those of its own rows.
pub(crate) struct SparseFeedForward {
    scores: ops::Linear,
    /// Whether scores are computed in 32 bits at least, and not rounded to 16.
    has_wide_scores: bool,
    router: Router,
    experts: Experts,
    shared: Option<SharedExpert>,
    layers: Arc<dyn Layers>,
}

impl SparseFeedForward {
    pub(crate) fn new(config: &ModelConfig, experts: &ExpertsConfig, part: &Part) -> Result<Self> {
        let ExpertNames { gate, up, down, .. } = names::of_experts(config.family);
        let (hidden, width, gate_part) = (config.hidden_size, experts.width, part.pp("gate"));
        let config_of_each = ExpertConfig { names: [gate, up, down], hidden, intermediate: width };
        let expert =
            |number: usize| part.pp("experts").pp(number).expert(&config_of_each, (number, experts.count));
        let own = (0..experts.count).filter_map(|number| expert(number).transpose());
        let own = Experts::of(own.collect::<Result<_>>()?, config.activation)?;
        let own = match part.layers().experts(experts.count)? {
            None => own,
            Some(divided) => own.divided(divided)?,
        };
        Ok(Self {
            router: router(experts, &gate_part)?,
            scores: ops::linear_no_bias(hidden, experts.count, gate_part.of_heads())?,
            has_wide_scores: experts.sigmoid.is_some(),
            experts: own,
            shared: experts.shared_width.map(|width| SharedExpert::new(config, width, part)).transpose()?,
            layers: part.layers().clone(),
        })
    }

    /// Returns the scores of all experts. DeepSeek V3 has them of factors in 32 bits, as transformers computes them: rounded to 16 bits,
    /// scores that are almost equal would be the same, and other experts chosen.
    fn scores(&self, x: &Tensor) -> Result<Tensor> {
        let wide = wide_dtype(x.dtype());
        if !self.has_wide_scores || wide == x.dtype() {
            return self.scores.forward(x);
        }
        ops::Linear::new(cast(self.scores.weight(), wide)?, None).forward(&cast(x, wide)?)
    }
}

fn router(experts: &ExpertsConfig, part: &Part) -> Result<Router> {
    let vb = part.whole();
    let router = Router::new(&vb.prefix(), experts.per_token)?.normalized(experts.normalized);
    // All ranks that divide the layers compute the router, and sum its gradients.
    let router = router.balanced(part.layers().rank() == 0);
    let Some(sigmoid) = &experts.sigmoid else { return Ok(router) };
    // Steps of a thousandth would be lost in 16 bits.
    let dtype = wide_dtype(vb.dtype());
    let correction = vb.get_with_hints_dtype(experts.count, EXPERT_CORRECTION, Init::Const(0.0), dtype)?;
    let router = router.scoring(Scoring::Sigmoid).scaled(sigmoid.factor).corrected(correction);
    Ok(router.groups(sigmoid.groups, sigmoid.groups_per_token))
}

impl Module for SparseFeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let all = self.layers.divide(x)?;
        let routes = self.router.route(&self.scores(&all)?)?;
        let Some(shared) = &self.shared else {
            return self.layers.combine(&self.experts.forward(&all, &routes)?);
        };
        let (routed, shared) = self.experts.forward_beside(&all, &routes, || shared.forward(x))?;
        add(&self.layers.combine(&routed)?, &shared)
    }
}

/// An expert that all tokens use; with a gate, times a number from 0 to 1 of each token.
struct SharedExpert {
    expert: FeedForward,
    gate: Option<Linear>,
}

impl SharedExpert {
    fn new(config: &ModelConfig, width: usize, part: &Part) -> Result<Self> {
        let ExpertNames { shared, shared_gate, .. } = names::of_experts(config.family);
        let gate = LinearConfig::new(config.hidden_size, 1, Division::Whole);
        Ok(Self {
            expert: FeedForward::new(config, width, &part.pp(shared))?,
            gate: shared_gate.map(|name| part.pp(name).linear(&gate)).transpose()?,
        })
    }
}

impl Module for SharedExpert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Some(gate) = &self.gate else { return self.expert.forward(x) };
        let wide = wide_dtype(x.dtype());
        let gate = sigmoid(&cast(&gate.forward(x)?, wide)?)?;
        cast(&scale_rows(&cast(&self.expert.forward(x)?, wide)?, &gate)?, x.dtype())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, DType, Device};
    use candle_nn::VarMap;
    use training::build::Builder;

    use super::*;
    use crate::Weights;

    /// Scores of the router of DeepSeek V3 are those of the same numbers in 32 bits, and not rounded to 16.
    #[test]
    fn scores_of_16_bits_are_multiplied_in_32() -> Result<()> {
        let json = r#"{"model_type": "deepseek_v3", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
            "initializer_range": 0.5, "rope_theta": 10000.0, "n_routed_experts": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3,
            "moe_intermediate_size": 10, "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": true, "routed_scaling_factor": 1.0,
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}"#;
        let config = ModelConfig::from_json(json).map_err(candle_core::Error::wrap)?;
        let experts = config.experts.clone().expect("experts");
        for dtype in [DType::BF16, DType::F16] {
            let weights = Weights::random(&config, 3).map_err(candle_core::Error::wrap)?;
            let builder = Builder::new(weights.vars(&VarMap::new(), dtype, &Device::Cpu));
            let layer = builder.unit("layer", |part| {
                SparseFeedForward::new(&config, &experts, &part.pp("model.layers.0.mlp"))
            })?;
            let layer = layer.module().expect("built here");
            let x = Tensor::randn(0f32, 1., (1, 50, 32), &Device::Cpu)?.to_dtype(dtype)?;
            let scores = layer.scores(&x)?;
            let wide = layer.scores.weight().to_dtype(DType::F64)?;
            let expected = x.to_dtype(DType::F64)?.squeeze(0)?.matmul(&wide.t()?)?;
            let gap = (scores.to_dtype(DType::F64)?.squeeze(0)? - &expected)?
                .abs()?
                .max_all()?
                .to_scalar::<f64>()?;
            assert!(scores.dtype() == DType::F32 && gap < 1e-5, "{dtype:?}: {gap}");
            let best = expected.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, 3)?.contiguous()?;
            let routes = layer.router.route(&scores)?;
            assert_eq!(routes.experts(), best.flatten_all()?.to_vec1::<u32>()?);
            assert_eq!(layer.forward(&x)?.dtype(), dtype);
        }
        Ok(())
    }
}
