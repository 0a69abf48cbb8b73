//! What `plan` prints.

use super::model::Model;
use super::strategy::{Estimate, Setting, Strategy};
use super::units::{show_bytes, show_flops, show_time};
use super::{estimates, recommended};

/// Ranks beyond which no number that would do is looked for.
const MOST_RANKS: usize = 4096;

/// What the estimates are of.
pub(super) struct Shown<'a> {
    pub(super) model: &'a Model,
    pub(super) setting: &'a Setting,
    pub(super) memory: f64,
    pub(super) measured: bool,
}

impl Shown<'_> {
    pub(super) fn lines(&self, all: &[Estimate]) -> Vec<String> {
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
        lines.push(row(&names.map(String::from)));
        lines.extend(all.iter().map(|estimate| self.line(estimate)));
        lines.push(String::new());
        lines.extend(self.recommendation(all));
        lines
    }

    fn heading(&self) -> Vec<String> {
        let Self { model, setting, memory, measured } = self;
        let Setting { ranks, batch_size, element, bandwidth, latency, flops, .. } = setting;
        let source =
            if *measured { "measured here between 2 processes, where not given" } else { "as given" };
        vec![
            format!(
                "{}: {} parameters of {element} bytes; {batch_size} {} a step",
                model.name,
                model.parameters(),
                model.sample
            ),
            format!("{ranks} {}, {} each", if *ranks == 1 { "rank" } else { "ranks" }, show_bytes(*memory)),
            format!(
                "{}/s, {} a step of communication, {} ({source})",
                show_bytes(*bandwidth),
                show_time(*latency),
                show_flops(*flops)
            ),
            String::new(),
        ]
    }

    fn fits(&self, estimate: &Estimate) -> bool {
        estimate.memory.total() <= self.memory
    }

    fn line(&self, estimate: &Estimate) -> String {
        let memory = &estimate.memory;
        row(&[
            estimate.strategy.name(self.setting.ranks),
            if self.fits(estimate) { "yes" } else { "no" }.to_string(),
            show_bytes(memory.weights),
            show_bytes(memory.copies),
            show_bytes(memory.gradients),
            show_bytes(memory.optimizer),
            show_bytes(memory.activations),
            show_bytes(memory.total()),
            show_bytes(estimate.sent),
            show_time(estimate.seconds),
        ])
    }

    /// Which to take, and why.
    fn recommendation(&self, all: &[Estimate]) -> Vec<String> {
        let name = |strategy: Strategy| strategy.name(self.setting.ranks);
        let Some(best) = recommended(all, self.memory) else { return self.nothing_fits(all) };
        let others: Vec<&Estimate> = all.iter().filter(|other| other.strategy != best.strategy).collect();
        let quicker: Vec<&&Estimate> = others.iter().filter(|other| other.seconds < best.seconds).collect();
        let mut reasons = Vec::new();
        if others.is_empty() {
            reasons.push("it is the only way".to_string());
        } else if let Some(next) =
            others.iter().filter(|other| self.fits(other)).min_by(|a, b| a.seconds.total_cmp(&b.seconds))
        {
            let (own, next_time) = (show_time(best.seconds), show_time(next.seconds));
            let what = if next.seconds < best.seconds { "as quick as, and simpler than," } else { "before" };
            reasons.push(format!("{own} a step, {what} {} ({next_time})", name(next.strategy)));
        } else {
            reasons.push("nothing else fits".to_string());
        }
        if let Some(other) = quicker.iter().find(|other| !self.fits(other)) {
            let (needed, held) = (show_bytes(other.memory.total()), show_bytes(self.memory));
            reasons.push(format!("{} would be quicker, but needs {needed} of {held}", name(other.strategy)));
        }
        vec![format!("recommended: {}: {}", name(best.strategy), reasons.join("; "))]
    }

    fn nothing_fits(&self, all: &[Estimate]) -> Vec<String> {
        let least = all.iter().min_by(|a, b| a.memory.total().total_cmp(&b.memory.total()));
        let Some(least) = least else { return vec!["recommended: nothing".into()] };
        let more = std::iter::successors(Some(self.setting.ranks * 2), |ranks| Some(ranks * 2))
            .take_while(|ranks| *ranks <= MOST_RANKS)
            .find_map(|ranks| {
                let setting = Setting { ranks, ..*self.setting };
                let all = estimates(self.model, &setting);
                recommended(&all, self.memory).map(|best| (ranks, best.strategy.name(ranks)))
            });
        let advice = match more {
            Some((ranks, name)) => format!("on {ranks} ranks {name} would fit (--ranks {ranks})"),
            None => {
                "no number of ranks up to 4096 helps: give a smaller batch or model, or more memory".into()
            }
        };
        let (name, needed) = (least.strategy.name(self.setting.ranks), show_bytes(least.memory.total()));
        vec![format!(
            "recommended: nothing, for nothing fits: {name}, which needs least, needs {needed} of {}; {advice}",
            show_bytes(self.memory)
        )]
    }
}

fn row(cells: &[String; 10]) -> String {
    let [name, fits, numbers @ ..] = cells;
    let numbers: String = numbers.iter().map(|number| format!("{number:>12}")).collect();
    format!("{name:<20}{fits:<5}{numbers}")
}
