//! The plan of a language model as text lines, and as JSON.

use girandole::Layout;
use serde::Serialize;
use training::build::Recompute;

use super::layouts::LayoutComparison;
use super::{LayoutCost, StageCost, Subject, Training};
use crate::Result;
use crate::collective::all_reduce;
use crate::compare::{
    Candidate, JsonRanks, Memory, Ranks, RuledOut, aligned, cells, lack, recommendation, recommended,
};
use crate::optimizer::Optimizer;
use crate::units::{show_bytes, show_time};

const KINDS: [&str; 5] = ["parameters", "gradients", "optimizer", "activations", "buffers"];

/// Inputs of a plan, to be displayed with its results ([`Subject::compare`]).
#[derive(Debug, Clone, Copy)]
pub struct LanguageTable<'a> {
    /// What is trained.
    pub subject: &'a Subject,
    /// How it is trained.
    pub training: &'a Training,
    /// The ranks.
    pub ranks: &'a Ranks,
}

/// All inputs and results of a plan.
#[derive(Serialize)]
struct LanguagePlan<'a> {
    model: String,
    parameters: u64,
    trained: u64,
    /// Parameters of the reference whose log-probabilities are computed first, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<u64>,
    ranks: usize,
    batch_size: usize,
    length: usize,
    /// Tokens of a document, if attention stays within documents.
    #[serde(skip_serializing_if = "Option::is_none")]
    document_length: Option<f64>,
    /// Micro-batches; `None` is 1, or as many as pipeline stages.
    accumulate: Option<usize>,
    /// Every how many blocks one is recomputed, or "selective".
    recompute: Option<String>,
    schedule: &'static str,
    #[serde(flatten)]
    of_ranks: JsonRanks,
    /// Kind of optimizer, by its state.
    optimizer: Optimizer,
    layouts: Vec<LayoutRow<'a>>,
    ruled_out: Vec<ImpossibleLayouts<'a>>,
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

#[derive(Serialize)]
struct ImpossibleLayouts<'a> {
    meshes: &'a [String],
    reason: &'a str,
}

impl LanguageTable<'_> {
    /// Returns the plan as lines: a heading, each layout with its rank that needs most, impossible layouts, and the
    /// recommendation. A single layout has a line for each stage instead.
    ///
    /// # Errors
    /// A model that cannot be built.
    pub fn lines(&self, compared: &LayoutComparison) -> Result<Vec<String>> {
        let seconds = self.subject.seconds(self.training, compared, &self.ranks.hardware)?;
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
            lines.extend(aligned("mesh", KINDS, rows));
            lines.push(String::new());
        }
        for cost in compared.costs.iter().filter(|cost| cost.layout.far > 1) {
            lines.push(self.average(cost)?);
        }
        lines.extend(compared.ruled_out.iter().map(RuledOut::line));
        lines.extend(self.conclusion(compared, &seconds));
        Ok(lines)
    }

    /// Returns the line about an average of the groups of `far`: what the rank sends that sends most, and the time of that between nodes.
    fn average(&self, cost: &LayoutCost) -> Result<String> {
        let (parameters, trained) = self.subject.parameters()?;
        let copies = cost.layout.of_group().of_parameters().dp as f64;
        let most = cost.stages.iter().map(|stage| stage.memory.parameters).fold(0.0, f64::max);
        let own = most * trained as f64 / parameters as f64 / copies;
        let sent = all_reduce(own as u64, cost.layout.far);
        let link = &self.ranks.hardware.network.between;
        // Few bits are sent to each group, and f32 around a ring.
        let less = match cost.layout.far {
            2 => "; a half, quarter or eighth with --far-bits 16, 8 or 4",
            _ => "",
        };
        Ok(format!(
            "{}: a rank sends {} in each average, {} between nodes{less}",
            cost.layout,
            show_bytes(sent),
            show_time(sent * link.s_per_byte + 2.0 * (cost.layout.far - 1) as f64 * link.latency)
        ))
    }

    /// Returns how many layouts fit and the recommendation; or what could help if none fits.
    fn conclusion(&self, compared: &LayoutComparison, seconds: &[f64]) -> Vec<String> {
        let fitting = compared.costs.iter().filter(|cost| self.fits(&cost.most())).count();
        let candidates = self.candidates(compared, seconds);
        if let Some(best) = recommended(&candidates) {
            let line = recommendation(&candidates, best, "--mesh ");
            return vec![format!("{fitting} of {} fit", compared.costs.len()), line];
        }
        vec![match compared.costs.first() {
            Some(least) => format!(
                "nothing fits: {} needs least, {} of {}; compute blocks again (--recompute 1), take fewer rows at once (--accumulate), \
                 or more ranks",
                least.layout,
                show_bytes(least.most().total()),
                show_bytes(self.ranks.memory.bytes)
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
        let seconds = self.subject.seconds(self.training, compared, &self.ranks.hardware)?;
        let row =
            |cost: &'_ LayoutCost| (cost.layout.to_string(), self.fits(&cost.most()), cost.most().total());
        let rows = compared.costs.iter().zip(&seconds).map(|(cost, &seconds)| {
            let (mesh, fits, total) = row(cost);
            LayoutRow { mesh, fits, total, sent: cost.sent(), seconds, stages: &cost.stages }
        });
        let candidates = self.candidates(compared, &seconds);
        let ruled_out = compared
            .ruled_out
            .iter()
            .map(|out| ImpossibleLayouts { meshes: &out.names, reason: &out.reason });
        let plan = LanguagePlan {
            model: self.subject.config.family.to_string(),
            parameters,
            trained,
            reference: self.reference()?,
            ranks: self.ranks.count,
            batch_size: self.training.batch_size,
            length: self.training.length,
            document_length: self.training.document_length,
            accumulate: self.training.micro_batches,
            recompute: match self.training.recompute {
                Recompute::None => None,
                Recompute::Units => Some("1".into()),
                Recompute::Every(each) => Some(each.to_string()),
                Recompute::Selective => Some("selective".into()),
            },
            schedule: self.training.schedule.name(),
            of_ranks: self.ranks.json(),
            optimizer: self.training.optimizer,
            layouts: rows.collect(),
            ruled_out: ruled_out.collect(),
            recommended: recommended(&candidates).map(|best| candidates[best].name.clone()),
        };
        Ok(serde_json::to_string_pretty(&plan)? + "\n")
    }

    fn heading(&self) -> Result<Vec<String>> {
        let Self { subject, training, ranks } = self;
        let [count, hardware] = ranks.lines();
        let (parameters, trained) = subject.parameters()?;
        let adapters = match trained == parameters {
            true => String::new(),
            false => format!(", of which {trained} are trained"),
        };
        let parts = match training.micro_batches {
            Some(count) if count > 1 => format!(" in {count} micro-batches"),
            _ => String::new(),
        };
        let documents = match training.document_length {
            Some(length) => format!(", in documents of {length:.0},"),
            None => String::new(),
        };
        let again = match training.recompute {
            Recompute::None => String::new(),
            Recompute::Units | Recompute::Every(1) => "; all blocks are computed again".into(),
            Recompute::Every(each) => format!("; one block of {each} is computed again"),
            Recompute::Selective => "; norms and activations are computed again".into(),
        };
        let reference = self.reference()?.map_or_else(String::new, |parameters| {
            format!("; before, a forward pass of a reference of {parameters} parameters over all rows")
        });
        Ok(vec![
            format!(
                "{}: {parameters} parameters{adapters}, {}{reference}",
                subject.config.family,
                training.dtype.as_str()
            ),
            format!(
                "{} rows of {} tokens{documents} a step{parts}; {}{again}",
                training.batch_size,
                training.length,
                training.optimizer.name()
            ),
            count,
            hardware,
            String::new(),
        ])
    }

    /// Returns the number of parameters of the reference.
    fn reference(&self) -> Result<Option<u64>> {
        let of = |reference: &Subject| Ok(reference.parameters()?.0);
        self.subject.reference.as_deref().map(of).transpose()
    }

    fn fits(&self, memory: &Memory) -> bool {
        memory.total() <= self.ranks.memory.bytes
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

    fn row(&self, name: String, memory: &Memory, costs: (f64, f64)) -> [String; 10] {
        let Memory { parameters, gradients, optimizer, activations, buffers } = *memory;
        let kinds = [parameters, gradients, optimizer, activations, buffers];
        cells(name, self.fits(memory), (kinds, memory.total()), costs)
    }

    fn candidates(&self, compared: &LayoutComparison, seconds: &[f64]) -> Vec<Candidate<Complexity>> {
        let candidate = |(cost, &seconds): (&LayoutCost, &f64)| Candidate {
            name: cost.layout.to_string(),
            seconds,
            lacks: lack(cost.most().total(), self.ranks.memory.bytes),
            complexity: complexity(&cost.layout),
        };
        compared.costs.iter().zip(seconds).map(candidate).collect()
    }
}

/// Number of axes, and which there are.
type Complexity = (usize, [bool; 7]);

/// Ranks layouts by complexity: fewer axes are simpler; then replicas are simpler than shards, shards than divided
/// rows, these than tensor parallelism, and this than stages.
fn complexity(layout: &Layout) -> Complexity {
    let Layout { far, pp, dp, shard, cp, ep, tp } = *layout;
    let more = [far > 1, pp > 1, tp > 1, cp > 1, ep > 1, shard > 1, dp > 1];
    (more.iter().filter(|more| **more).count(), more)
}
