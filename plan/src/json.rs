//! The plan as JSON.

use serde::Serialize;

use crate::error::Result;
use crate::optimizer::Optimizer;
use crate::step::{Planned, recommended};
use crate::strategy::{ImpossibleStrategies, Memory, Shortage, Strategy};
use crate::table::Table;

/// All inputs and results of a plan.
#[derive(Serialize)]
struct JsonPlan<'a> {
    model: &'a str,
    parameters: u64,
    ranks: usize,
    batch_size: usize,
    /// Bytes per rank.
    memory: f64,
    /// Bytes per second.
    bandwidth: f64,
    /// Seconds.
    latency: f64,
    /// Ranks per node; `None` if all are on one node.
    ranks_per_node: Option<usize>,
    /// Bytes per second between nodes.
    node_bandwidth: f64,
    /// Seconds.
    node_latency: f64,
    /// Operations per second of a rank.
    flops: f64,
    /// Bytes per second that the optimizer reads and writes; `None` if its time is not counted.
    memory_bandwidth: Option<f64>,
    /// Kind of optimizer, by its state.
    optimizer: Optimizer,
    strategies: Vec<StrategyRow>,
    left_out: Vec<ImpossibleStrategies>,
    recommended: Option<String>,
}

#[derive(Serialize)]
struct StrategyRow {
    strategy: String,
    fits: bool,
    /// What is missing if it does not fit.
    lacks: Option<Shortage>,
    #[serde(flatten)]
    memory: Memory,
    sent: f64,
    seconds: f64,
    waiting: f64,
}

impl Table<'_> {
    /// Returns a JSON object with all numbers, on several lines, with a trailing newline.
    ///
    /// # Errors
    /// A number that cannot be written as JSON.
    pub fn json(&self, all: &[Planned]) -> Result<String> {
        let &Table { model, setting, optimizer, hardware, memory, .. } = self;
        let name = |planned: &Planned| planned.estimate.strategy.name(setting.ranks);
        let row = |planned: &Planned| {
            let lacks = planned.estimate.lack(setting, memory);
            StrategyRow {
                strategy: name(planned),
                fits: lacks.is_none(),
                lacks,
                memory: planned.estimate.memory,
                sent: planned.estimate.sent,
                seconds: planned.seconds,
                waiting: planned.waiting,
            }
        };
        let network = &hardware.network;
        let plan = JsonPlan {
            model: &model.name,
            parameters: model.parameters(),
            ranks: setting.ranks,
            batch_size: setting.batch_size,
            memory,
            bandwidth: network.inside.s_per_byte.recip(),
            latency: network.inside.latency,
            ranks_per_node: (network.per_node < setting.ranks).then_some(network.per_node),
            node_bandwidth: network.between.s_per_byte.recip(),
            node_latency: network.between.latency,
            flops: hardware.flops,
            memory_bandwidth: Some(hardware.memory_bandwidth).filter(|rate| rate.is_finite()),
            optimizer,
            strategies: all.iter().map(row).collect(),
            left_out: Strategy::left_out(model, setting),
            recommended: recommended(all, setting, memory).map(name),
        };
        Ok(serde_json::to_string_pretty(&plan)? + "\n")
    }
}
