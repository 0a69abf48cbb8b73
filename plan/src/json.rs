//! The plan for programs.

use serde::Serialize;

use crate::error::Result;
use crate::optimizer::Optimizer;
use crate::step::{Planned, recommended};
use crate::strategy::{Lack, LeftOut, Memory, Strategy};
use crate::table::Table;

/// All that is planned for, and what comes of it.
#[derive(Serialize)]
struct Plan<'a> {
    model: &'a str,
    parameters: u64,
    ranks: usize,
    batch_size: usize,
    /// Bytes.
    memory: f64,
    /// Bytes a second.
    bandwidth: f64,
    /// Seconds.
    latency: f64,
    /// Ranks of a node; none where all are on one.
    ranks_per_node: Option<usize>,
    /// Bytes a second between nodes.
    node_bandwidth: f64,
    /// Seconds.
    node_latency: f64,
    /// Operations a second.
    flops: f64,
    /// Bytes a second of the optimizer; none where it takes no time.
    memory_bandwidth: Option<f64>,
    /// What the optimizer is, by what it remembers.
    optimizer: Optimizer,
    strategies: Vec<Row>,
    left_out: Vec<LeftOut>,
    recommended: Option<String>,
}

#[derive(Serialize)]
struct Row {
    strategy: String,
    fits: bool,
    /// What is missing where it does not fit.
    lacks: Option<Lack>,
    #[serde(flatten)]
    memory: Memory,
    sent: f64,
    seconds: f64,
    waiting: f64,
}

impl Table<'_> {
    /// An object with all numbers, on several lines, with a newline at its end.
    ///
    /// # Errors
    /// A number that JSON does not have.
    pub fn json(&self, all: &[Planned]) -> Result<String> {
        let &Table { model, setting, optimizer, hardware, memory, .. } = self;
        let name = |planned: &Planned| planned.estimate.strategy.name(setting.ranks);
        let row = |planned: &Planned| {
            let lacks = planned.estimate.lack(setting, memory);
            Row {
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
        let plan = Plan {
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
