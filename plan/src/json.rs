//! The plan as JSON.

use serde::Serialize;

use crate::compare::{JsonRanks, Memory, recommended};
use crate::error::Result;
use crate::optimizer::Optimizer;
use crate::step::{Planned, candidates};
use crate::strategy::{Shortage, Strategy};
use crate::table::Table;

/// All inputs and results of a plan.
#[derive(Serialize)]
struct JsonPlan<'a> {
    model: &'a str,
    parameters: u64,
    ranks: usize,
    batch_size: usize,
    #[serde(flatten)]
    of_ranks: JsonRanks,
    /// Kind of optimizer, by its state.
    optimizer: Optimizer,
    strategies: Vec<StrategyRow>,
    left_out: Vec<LeftOut>,
    recommended: Option<&'a str>,
}

#[derive(Serialize)]
struct StrategyRow {
    strategy: String,
    fits: bool,
    /// What is missing if it does not fit.
    lacks: Option<Shortage>,
    weights: f64,
    copies: f64,
    gradients: f64,
    optimizer: f64,
    activations: f64,
    sent: f64,
    seconds: f64,
    waiting: f64,
}

#[derive(Serialize)]
struct LeftOut {
    strategies: Vec<String>,
    reason: String,
}

impl Table<'_> {
    /// Returns a JSON object with all numbers, on several lines, with a trailing newline.
    ///
    /// # Errors
    /// A number that cannot be written as JSON.
    pub fn json(&self, all: &[Planned]) -> Result<String> {
        let &Table { model, setting, optimizer, ranks } = self;
        let candidates = candidates(all, setting, ranks.memory.bytes);
        let row = |planned: &Planned| {
            let estimate = &planned.estimate;
            let lacks = estimate.lack(setting, ranks.memory.bytes);
            let Memory { parameters, gradients, optimizer, activations, buffers } = estimate.memory;
            StrategyRow {
                strategy: estimate.strategy.name(setting.ranks),
                fits: lacks.is_none(),
                lacks,
                weights: parameters,
                copies: buffers,
                gradients,
                optimizer,
                activations,
                sent: estimate.sent,
                seconds: planned.seconds,
                waiting: planned.waiting,
            }
        };
        let left_out = Strategy::left_out(model, setting).into_iter();
        let plan = JsonPlan {
            model: &model.name,
            parameters: model.parameters(),
            ranks: setting.ranks,
            batch_size: setting.batch_size,
            of_ranks: ranks.json(),
            optimizer,
            strategies: all.iter().map(row).collect(),
            left_out: left_out.map(|out| LeftOut { strategies: out.names, reason: out.reason }).collect(),
            recommended: recommended(&candidates).map(|best| &*candidates[best].name),
        };
        Ok(serde_json::to_string_pretty(&plan)? + "\n")
    }
}
