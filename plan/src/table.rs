//! The plan as text lines.

use crate::compare::{Ranks, RuledOut, aligned, cells, listed, recommendation, recommended};
use crate::error::Result;
use crate::forecast::Link;
use crate::hardware::Hardware;
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::step::{Planned, candidates, planned};
use crate::strategy::{Estimate, Setting, Shortage, Strategy};
use crate::units::{show_bytes, show_flops, show_time};

/// Largest number of ranks tried when nothing fits.
const MOST_RANKS: usize = 4096;

/// Inputs of a plan, to be displayed with its results ([`planned`]).
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    /// The model.
    pub model: &'a Model,
    /// How it is trained.
    pub setting: &'a Setting,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The ranks.
    pub ranks: &'a Ranks,
}

impl Hardware {
    /// Returns a heading line that describes the hardware for so many ranks.
    pub(crate) fn line(&self, ranks: usize, measured: bool) -> String {
        let optimizer = match self.memory_bandwidth {
            rate if rate.is_finite() => format!(", {}/s of memory", show_bytes(rate)),
            _ => String::new(),
        };
        let source = if measured { "measured here between 2 processes, where not given" } else { "as given" };
        format!("{}, {}{optimizer} ({source})", self.links(ranks), show_flops(self.flops))
    }

    fn links(&self, ranks: usize) -> String {
        let network = &self.network;
        let link = |link: Link| {
            let bandwidth = show_bytes(link.s_per_byte.recip());
            format!("{bandwidth}/s, {} a step of communication", show_time(link.latency))
        };
        match network.per_node < ranks {
            true if network.per_node == 1 => link(network.between),
            true => {
                let (inside, between) = (link(network.inside), link(network.between));
                format!("{inside} in nodes of {}, {between} between them", network.per_node)
            }
            false => link(network.inside),
        }
    }
}

impl Table<'_> {
    /// Returns the plan as lines: a heading, each strategy, those that are not possible, and the recommendation.
    ///
    /// # Errors
    /// As [`planned`].
    pub fn lines(&self, all: &[Planned]) -> Result<Vec<String>> {
        let mut lines = self.heading();
        let kinds = ["weights", "copies", "gradients", "optimizer", "activations"];
        lines.extend(aligned("strategy", kinds, all.iter().map(|planned| self.cells(planned)).collect()));
        lines.push(String::new());
        lines.extend(self.missing(all));
        lines.push(self.recommendation(all)?);
        Ok(lines)
    }

    fn heading(&self) -> Vec<String> {
        let Self { model, setting, optimizer, ranks } = self;
        let Setting { batch_size, element, .. } = setting;
        let subject = format!(
            "{}: {} parameters of {element} bytes; {batch_size} {} a step; {}",
            model.name,
            model.parameters(),
            model.sample,
            optimizer.name()
        );
        let [count, hardware] = ranks.lines();
        vec![subject, count, hardware, String::new()]
    }

    fn lack(&self, estimate: &Estimate) -> Option<Shortage> {
        estimate.lack(self.setting, self.ranks.memory.bytes)
    }

    /// Returns lines for strategies that have too few samples, and for those that are not possible.
    fn missing(&self, all: &[Planned]) -> Vec<String> {
        let &Self { model, setting, .. } = self;
        let lacks = |planned: &&Planned| self.lack(&planned.estimate) == Some(Shortage::Samples);
        let few: Vec<String> = all.iter().filter(lacks).map(|planned| self.name(planned)).collect();
        let mut lines = Vec::new();
        if !few.is_empty() {
            let samples = setting.batch_size;
            lines.push(format!(
                "too few samples: {}: more copies of the model than the {samples} of a step (--batch-size)",
                listed(&few)
            ));
        }
        lines.extend(Strategy::left_out(model, setting).iter().map(RuledOut::line));
        lines
    }

    fn name(&self, planned: &Planned) -> String {
        planned.estimate.strategy.name(self.setting.ranks)
    }

    fn cells(&self, planned: &Planned) -> [String; 10] {
        let (estimate, memory) = (&planned.estimate, &planned.estimate.memory);
        let kinds =
            [memory.parameters, memory.buffers, memory.gradients, memory.optimizer, memory.activations];
        let fits = self.lack(estimate).is_none();
        cells(self.name(planned), fits, (kinds, memory.total()), (estimate.sent, planned.seconds))
    }

    /// Returns the recommendation, with reasons.
    fn recommendation(&self, all: &[Planned]) -> Result<String> {
        let candidates = candidates(all, self.setting, self.ranks.memory.bytes);
        match recommended(&candidates) {
            Some(best) => Ok(recommendation(&candidates, best, "")),
            None => self.nothing_fits(all),
        }
    }

    fn nothing_fits(&self, all: &[Planned]) -> Result<String> {
        let memory = self.ranks.memory.bytes;
        let enough = |estimate: &&Estimate| self.lack(estimate) != Some(Shortage::Samples);
        let estimates = all.iter().map(|planned| &planned.estimate).filter(enough);
        let least = estimates.min_by(|a, b| a.memory.total().total_cmp(&b.memory.total()));
        let Some(least) = least else {
            let copies = all.iter().map(|planned| planned.estimate.strategy.copies(self.setting.ranks)).min();
            return Ok(format!(
                "recommended: nothing, for nothing fits: give {} samples a step (--batch-size) or fewer ranks",
                copies.unwrap_or(1)
            ));
        };
        let fits = |setting: &Setting| {
            let mut all = Strategy::all(self.model, setting).into_iter();
            all.any(|strategy| strategy.estimate(self.model, setting).lack(setting, memory).is_none())
        };
        let more = std::iter::successors(Some(self.setting.ranks * 2), |ranks| Some(ranks * 2))
            .take_while(|ranks| *ranks <= MOST_RANKS)
            .map(|ranks| Setting { ranks, ..*self.setting })
            .find(fits);
        let advice = match more {
            Some(setting) => {
                let all = candidates(&planned(self.model, &setting, &self.ranks.hardware)?, &setting, memory);
                let name = recommended(&all).map_or("", |best| &all[best].name);
                let ranks = setting.ranks;
                format!("on {ranks} ranks {name} would fit (--ranks {ranks})")
            }
            None => {
                "no number of ranks up to 4096 helps: give a smaller batch or model, or more memory".into()
            }
        };
        let (name, needed) = (least.strategy.name(self.setting.ranks), show_bytes(least.memory.total()));
        Ok(format!(
            "recommended: nothing, for nothing fits: {name}, which needs least, needs {needed} of {}; {advice}",
            show_bytes(memory)
        ))
    }
}
