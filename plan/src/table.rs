//! The plan as text lines.

use crate::error::Result;
use crate::forecast::Link;
use crate::model::Model;
use crate::optimizer::Optimizer;
use crate::step::{Hardware, Planned, planned, recommended};
use crate::strategy::{Estimate, ImpossibleStrategies, Setting, Shortage, Strategy};
use crate::units::{show_bytes, show_flops, show_time};

/// Largest number of ranks tried when nothing fits.
const MOST_RANKS: usize = 4096;

/// Number of names listed before the rest is only counted.
const MOST_NAMES: usize = 6;

/// Inputs of a plan, to be displayed with its results ([`planned`]).
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    /// The model.
    pub model: &'a Model,
    /// How it is trained.
    pub setting: &'a Setting,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Hardware of the ranks.
    pub hardware: &'a Hardware,
    /// Bytes of memory per rank.
    pub memory: f64,
    /// What limits it ([`RankMemory`](crate::command::RankMemory)); may be empty.
    pub memory_limit: &'a str,
    /// Whether some of the hardware's numbers were measured.
    pub measured: bool,
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
        let names = [
            "strategy",
            "fits",
            "weights",
            "copies",
            "gradients",
            "optimizer",
            "activations",
            "all",
            "sent",
            "step",
        ];
        let rows = all.iter().map(|planned| self.cells(planned));
        lines.extend(aligned(std::iter::once(names.map(String::from)).chain(rows).collect()));
        lines.push(String::new());
        lines.extend(self.missing(all));
        lines.push(self.recommendation(all)?);
        Ok(lines)
    }

    fn heading(&self) -> Vec<String> {
        let Self { model, setting, optimizer: own, hardware, memory, memory_limit, measured } = self;
        let Setting { ranks, batch_size, element, .. } = setting;
        vec![
            format!(
                "{}: {} parameters of {element} bytes; {batch_size} {} a step; {}",
                model.name,
                model.parameters(),
                model.sample,
                own.name()
            ),
            ranks_line(*ranks, *memory, memory_limit),
            hardware.line(*ranks, *measured),
            String::new(),
        ]
    }

    fn fits(&self, estimate: &Estimate) -> bool {
        estimate.lack(self.setting, self.memory).is_none()
    }

    /// Returns lines for strategies that have too few samples, and for those that are not possible.
    fn missing(&self, all: &[Planned]) -> Vec<String> {
        let &Self { model, setting, memory, .. } = self;
        let lacks = |planned: &&Planned| planned.estimate.lack(setting, memory) == Some(Shortage::Samples);
        let few: Vec<String> = all.iter().filter(lacks).map(|planned| self.name(planned)).collect();
        let mut lines = Vec::new();
        if !few.is_empty() {
            let samples = setting.batch_size;
            lines.push(format!(
                "too few samples: {}: more copies of the model than the {samples} of a step (--batch-size)",
                listed(&few)
            ));
        }
        let line = |ImpossibleStrategies { strategies, reason }: ImpossibleStrategies| {
            format!("not possible: {}: {reason}", listed(&strategies))
        };
        lines.extend(Strategy::left_out(model, setting).into_iter().map(line));
        lines
    }

    fn name(&self, planned: &Planned) -> String {
        planned.estimate.strategy.name(self.setting.ranks)
    }

    fn cells(&self, planned: &Planned) -> [String; 10] {
        let (estimate, memory) = (&planned.estimate, &planned.estimate.memory);
        [
            estimate.strategy.name(self.setting.ranks),
            if self.fits(estimate) { "yes" } else { "no" }.to_string(),
            show_bytes(memory.weights),
            show_bytes(memory.copies),
            show_bytes(memory.gradients),
            show_bytes(memory.optimizer),
            show_bytes(memory.activations),
            show_bytes(memory.total()),
            show_bytes(estimate.sent),
            show_time(planned.seconds),
        ]
    }

    /// Returns the recommendation, with reasons.
    fn recommendation(&self, all: &[Planned]) -> Result<String> {
        let name = |planned: &Planned| self.name(planned);
        let Some(best) = recommended(all, self.setting, self.memory) else { return self.nothing_fits(all) };
        let others = || all.iter().filter(|other| other.estimate.strategy != best.estimate.strategy);
        let fitting = others().filter(|other| self.fits(&other.estimate));
        let mut reasons = Vec::new();
        if others().next().is_none() {
            reasons.push("it is the only way".to_string());
        } else if let Some(next) = fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) {
            let (own, next_time) = (show_time(best.seconds), show_time(next.seconds));
            let what = if next.seconds < best.seconds { "as quick as, and simpler than," } else { "before" };
            reasons.push(format!("{own} a step, {what} {} ({next_time})", name(next)));
        } else {
            reasons.push("nothing else fits".to_string());
        }
        let mut quicker = others().filter(|other| other.seconds < best.seconds);
        let lack = |other: &Planned| other.estimate.lack(self.setting, self.memory);
        if let Some((other, lack)) = quicker.find_map(|other| Some((other, lack(other)?))) {
            let needs = match lack {
                Shortage::Samples => {
                    format!("{} samples a step", other.estimate.strategy.copies(self.setting.ranks))
                }
                Shortage::Memory => {
                    format!("{} of {}", show_bytes(other.estimate.memory.total()), show_bytes(self.memory))
                }
            };
            reasons.push(format!("{} would be quicker, but needs {needs}", name(other)));
        }
        Ok(format!("recommended: {}: {}", name(best), reasons.join("; ")))
    }

    fn nothing_fits(&self, all: &[Planned]) -> Result<String> {
        let lack = |estimate: &Estimate, setting: &Setting| estimate.lack(setting, self.memory);
        let enough = |estimate: &&Estimate| lack(estimate, self.setting) != Some(Shortage::Samples);
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
            all.any(|strategy| lack(&strategy.estimate(self.model, setting), setting).is_none())
        };
        let more = std::iter::successors(Some(self.setting.ranks * 2), |ranks| Some(ranks * 2))
            .take_while(|ranks| *ranks <= MOST_RANKS)
            .map(|ranks| Setting { ranks, ..*self.setting })
            .find(fits);
        let advice = match more {
            Some(setting) => {
                let all = planned(self.model, &setting, self.hardware)?;
                let best = recommended(&all, &setting, self.memory)
                    .map(|best| best.estimate.strategy.name(setting.ranks));
                let (name, ranks) = (best.unwrap_or_default(), setting.ranks);
                format!("on {ranks} ranks {name} would fit (--ranks {ranks})")
            }
            None => {
                "no number of ranks up to 4096 helps: give a smaller batch or model, or more memory".into()
            }
        };
        let (name, needed) = (least.strategy.name(self.setting.ranks), show_bytes(least.memory.total()));
        Ok(format!(
            "recommended: nothing, for nothing fits: {name}, which needs least, needs {needed} of {}; {advice}",
            show_bytes(self.memory)
        ))
    }
}

/// Returns the heading line about the ranks and their memory.
pub(crate) fn ranks_line(ranks: usize, memory: f64, limit: &str) -> String {
    let limit = if limit.is_empty() { String::new() } else { format!(": {limit}") };
    format!("{ranks} {}, {} each{limit}", if ranks == 1 { "rank" } else { "ranks" }, show_bytes(memory))
}

/// Lists names, and only counts the last of many.
pub(crate) fn listed(names: &[String]) -> String {
    let (named, others) = names.split_at(names.len().min(MOST_NAMES));
    let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    format!("{}{more}", named.join(" | "))
}

pub(crate) fn aligned(rows: Vec<[String; 10]>) -> Vec<String> {
    let width = rows.iter().map(|[name, ..]| name.len() + 1).max().unwrap_or(0).max(20);
    let line = |[name, fits, numbers @ ..]: [String; 10]| {
        let numbers: String = numbers.iter().map(|number| format!("{number:>12}")).collect();
        format!("{name:<width$}{fits:<5}{numbers}")
    };
    rows.into_iter().map(line).collect()
}
