//! Feed-forward layer with experts, of which each token uses a few, and optionally one that all tokens use.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::Init;
use ops::tape::add;
use ops::{EXPERT_CORRECTION, Experts, Router, Scoring, wide_dtype};
use training::build::{Division, Layers, Linear, LinearConfig, Part};

use crate::feed_forward::FeedForward;
use crate::names::{self, ExpertNames};
use crate::{ExpertsConfig, ModelConfig};

/// Experts, their router, and optionally a shared expert. Where layers are divided, each rank has a part of every expert and
/// computes the whole router, whose gradient is then the sum over ranks. Where experts are divided, each rank has some of them, and
/// router and shared expert are those of its own rows.
pub(crate) struct SparseFeedForward {
    scores: ops::Linear,
    router: Router,
    experts: Experts,
    shared: Option<SharedExpert>,
    layers: Arc<dyn Layers>,
}

impl SparseFeedForward {
    pub(crate) fn new(config: &ModelConfig, experts: &ExpertsConfig, part: &Part) -> Result<Self> {
        let ExpertNames { gate, up, down, .. } = names::of_experts(config.family);
        let (hidden, width, gate_part) = (config.hidden_size, experts.width, part.pp("gate"));
        let expert = |expert: usize| {
            let of = |name: &str, inputs, outputs, division| {
                let part = part.pp("experts").pp(expert).pp(name);
                part.weight_of_expert(&LinearConfig::new(inputs, outputs, division), (expert, experts.count))
            };
            let gate = of(gate, hidden, width, Division::Outputs)?;
            let up = of(up, hidden, width, Division::Outputs)?;
            let down = of(down, width, hidden, Division::Inputs)?;
            Ok(gate.zip(up).zip(down).map(|((gate, up), down)| [gate, up, down]))
        };
        let weights = (0..experts.count).filter_map(|number| expert(number).transpose());
        let own = Experts::new(weights.collect::<Result<_>>()?, config.activation)?;
        let own = match part.layers().experts(experts.count)? {
            None => own,
            Some(divided) => own.divided(divided)?,
        };
        Ok(Self {
            router: router(experts, &gate_part)?,
            scores: ops::linear_no_bias(hidden, experts.count, gate_part.of_heads())?,
            experts: own,
            shared: experts.shared_width.map(|width| SharedExpert::new(config, width, part)).transpose()?,
            layers: part.layers().clone(),
        })
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
        let routes = self.router.route(&self.scores.forward(&all)?)?;
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
        let wide = |x: Tensor| x.to_dtype(wide_dtype(x.dtype()));
        let Some(gate) = &self.gate else { return self.expert.forward(x) };
        let gate = candle_nn::ops::sigmoid(&wide(gate.forward(x)?)?)?;
        wide(self.expert.forward(x)?)?.broadcast_mul(&gate)?.to_dtype(x.dtype())
    }
}
