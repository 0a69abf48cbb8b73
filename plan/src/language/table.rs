//! The plan of a language model as text lines, and as JSON.

use serde::Serialize;
use training::build::Recompute;

use super::layouts::{LayoutComparison, RuledOut};
use super::{LayoutCost, Memory, StageCost, Subject, Training, recommend};
use crate::optimizer::Optimizer;
use crate::table::{aligned, listed, ranks_line};
use crate::units::{show_bytes, show_time};
use crate::{Hardware, Result};

/// Inputs of a plan, to be displayed with its results ([`Subject::compare`]).
#[derive(Debug, Clone, Copy)]
pub struct LanguageTable<'a> {
    /// What is trained.
    pub subject: &'a Subject,
    /// How it is trained.
    pub training: &'a Training,
    /// Ranks.
    pub ranks: usize,
    /// Bytes of memory per rank.
    pub memory: f64,
    /// What limits it ([`RankMemory`](crate::command::RankMemory)); may be empty.
    pub memory_limit: &'a str,
    /// Hardware of the ranks.
    pub hardware: &'a Hardware,
    /// Whether some of the hardware's numbers were measured.
    pub measured: bool,
}

/// All inputs and results of a plan.
#[derive(Serialize)]
struct LanguagePlan<'a> {
    model: String,
    parameters: u64,
    trained: u64,
    ranks: usize,
    batch_size: usize,
    length: usize,
    /// Micro-batches; `None` is 1, or as many as pipeline stages.
    accumulate: Option<usize>,
    /// Every how many blocks one is recomputed, or "selective".
    recompute: Option<String>,
    schedule: &'static str,
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
    flops: f64,
    /// Bytes per second that the optimizer reads and writes; `None` if its time is not counted.
    memory_bandwidth: Option<f64>,
    /// Kind of optimizer, by its state.
    optimizer: Optimizer,
    layouts: Vec<LayoutRow<'a>>,
    ruled_out: &'a [RuledOut],
    /// The recommended layout, if one fits.
    recommended: Option<String>,
}

#[derive(Serialize)]
struct LayoutRow<'a> {
    mesh: String,
    fits: bool,
    /// Memory of the rank that needs most.
    total: f64,
    sent: f64,
    /// Seconds of a step.
    seconds: f64,
    stages: &'a [StageCost],
}

const NAMES: [&str; 10] =
    ["mesh", "fits", "parameters", "gradients", "optimizer", "activations", "buffers", "all", "sent", "step"];

impl LanguageTable<'_> {
    /// Returns the plan as lines: a heading, each layout with its rank that needs most, impossible layouts, and the
    /// recommendation. A single layout has a line for each stage instead.
    ///
    /// # Errors
    /// A model that cannot be built.
    pub fn lines(&self, compared: &LayoutComparison) -> Result<Vec<String>> {
        let seconds = self.subject.seconds(self.training, compared, self.hardware)?;
        let mut lines = self.heading()?;
        let rows = match &compared.costs[..] {
            [only] if only.stages.len() > 1 => {
                only.stages.iter().map(|stage| self.stage(only, stage, seconds[0])).collect()
            }
            all => {
                all.iter().zip(&seconds).map(|(cost, seconds)| self.cells(cost, *seconds)).collect::<Vec<_>>()
            }
        };
        if !rows.is_empty() {
            lines.extend(aligned(std::iter::once(NAMES.map(String::from)).chain(rows).collect()));
            lines.push(String::new());
        }
        let ruled_out =
            |RuledOut { meshes, reason }: &RuledOut| format!("not possible: {}: {reason}", listed(meshes));
        lines.extend(compared.ruled_out.iter().map(ruled_out));
        lines.extend(self.conclusion(compared, &seconds));
        Ok(lines)
    }

    /// Returns how many layouts fit and the recommendation; or what could help if none fits.
    fn conclusion(&self, compared: &LayoutComparison, seconds: &[f64]) -> Vec<String> {
        let fitting = compared.costs.iter().filter(|cost| self.fits(&cost.most())).count();
        if let Some(recommended) = recommend::line(compared, seconds, self.memory) {
            return vec![format!("{fitting} of {} fit", compared.costs.len()), recommended];
        }
        vec![match compared.costs.first() {
            Some(least) => format!(
                "nothing fits: {} needs least, {} of {}; compute blocks again (--recompute 1), take fewer rows at once (--accumulate), \
                 or more ranks",
                least.layout,
                show_bytes(least.most().total()),
                show_bytes(self.memory)
            ),
            None => "nothing is possible".into(),
        }]
    }

    /// Returns a JSON object, on several lines, with a trailing newline.
    ///
    /// # Errors
    /// A model that cannot be built; a number that cannot be written as JSON.
    pub fn json(&self, compared: &LayoutComparison) -> Result<String> {
        let (parameters, trained) = self.subject.parameters()?;
        let seconds = self.subject.seconds(self.training, compared, self.hardware)?;
        let row =
            |cost: &'_ LayoutCost| (cost.layout.to_string(), self.fits(&cost.most()), cost.most().total());
        let rows = compared.costs.iter().zip(&seconds).map(|(cost, &seconds)| {
            let (mesh, fits, total) = row(cost);
            LayoutRow { mesh, fits, total, sent: cost.sent(), seconds, stages: &cost.stages }
        });
        let recommended = recommend::recommended(compared, &seconds, self.memory);
        let (hardware, network) = (self.hardware, &self.hardware.network);
        let plan = LanguagePlan {
            model: self.subject.config.family.to_string(),
            parameters,
            trained,
            ranks: self.ranks,
            batch_size: self.training.batch_size,
            length: self.training.length,
            accumulate: self.training.micro_batches,
            recompute: match self.training.recompute {
                Recompute::None => None,
                Recompute::Units => Some("1".into()),
                Recompute::Every(each) => Some(each.to_string()),
                Recompute::Selective => Some("selective".into()),
            },
            schedule: self.training.schedule.name(),
            memory: self.memory,
            bandwidth: network.inside.s_per_byte.recip(),
            latency: network.inside.latency,
            ranks_per_node: (network.per_node < self.ranks).then_some(network.per_node),
            node_bandwidth: network.between.s_per_byte.recip(),
            node_latency: network.between.latency,
            flops: hardware.flops,
            memory_bandwidth: Some(hardware.memory_bandwidth).filter(|rate| rate.is_finite()),
            optimizer: self.training.optimizer,
            layouts: rows.collect(),
            ruled_out: &compared.ruled_out,
            recommended: recommended.map(|place| compared.costs[place].layout.to_string()),
        };
        Ok(serde_json::to_string_pretty(&plan)? + "\n")
    }

    fn heading(&self) -> Result<Vec<String>> {
        let Self { subject, training, ranks, memory, memory_limit, hardware, measured } = self;
        let (parameters, trained) = subject.parameters()?;
        let adapters = match trained == parameters {
            true => String::new(),
            false => format!(", of which {trained} are trained"),
        };
        let parts = match training.micro_batches {
            Some(count) if count > 1 => format!(" in {count} micro-batches"),
            _ => String::new(),
        };
        let again = match training.recompute {
            Recompute::None => String::new(),
            Recompute::Units | Recompute::Every(1) => "; all blocks are computed again".into(),
            Recompute::Every(each) => format!("; one block of {each} is computed again"),
            Recompute::Selective => "; norms and activations are computed again".into(),
        };
        Ok(vec![
            format!(
                "{}: {parameters} parameters{adapters}, {}",
                subject.config.family,
                training.dtype.as_str()
            ),
            format!(
                "{} rows of {} tokens a step{parts}; {}{again}",
                training.batch_size,
                training.length,
                training.optimizer.name()
            ),
            ranks_line(*ranks, *memory, memory_limit),
            hardware.line(*ranks, *measured),
            String::new(),
        ])
    }

    fn fits(&self, memory: &Memory) -> bool {
        memory.total() <= self.memory
    }

    fn cells(&self, cost: &LayoutCost, seconds: f64) -> [String; 10] {
        self.row(cost.layout.to_string(), &cost.most(), (cost.sent(), seconds))
    }

    fn stage(&self, cost: &LayoutCost, stage: &StageCost, seconds: f64) -> [String; 10] {
        let each = cost.layout.ranks() / cost.layout.pp;
        let (first, last) = (stage.stage * each, (stage.stage + 1) * each - 1);
        let ranks = if each == 1 { format!("rank {first}") } else { format!("ranks {first}-{last}") };
        self.row(format!("{}: {ranks}", cost.layout), &stage.memory, (stage.sent, seconds))
    }

    fn row(&self, name: String, memory: &Memory, (sent, seconds): (f64, f64)) -> [String; 10] {
        let fits = if self.fits(memory) { "yes" } else { "no" };
        let Memory { parameters, gradients, optimizer, activations, buffers } = *memory;
        let [parameters, gradients, optimizer, activations, buffers, all, sent] =
            [parameters, gradients, optimizer, activations, buffers, memory.total(), sent].map(show_bytes);
        let step = show_time(seconds);
        [name, fits.into(), parameters, gradients, optimizer, activations, buffers, all, sent, step]
    }
}
