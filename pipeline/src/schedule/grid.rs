//! Text output of a schedule: time from left to right, one line per rank.

use std::fmt;

use super::{ActionKind, Durations, Schedule, Span};

impl fmt::Display for Schedule {
    /// Prints the grid with unit durations: a whole backward takes as long as its two parts. If ranks have several stages,
    /// the stage precedes the micro-batch: `F2.0`. The bubble is [`Plan::bubble_fraction`](crate::Plan::bubble_fraction).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan(&Durations::default());
        let several = self.table().stages() > self.table().ranks();
        let name = |span: &Span| {
            let action = span.action;
            match several {
                true => format!("{}{}.{}", action.kind.letters(), action.stage, action.micro_batch),
                false => format!("{}{}", action.kind.letters(), action.micro_batch),
            }
        };
        let columns = plan.makespan().round() as usize;
        let longest = plan.ranks.iter().flatten().map(|span| name(span).len()).max().unwrap_or(1);
        let width = longest.max(columns.saturating_sub(1).to_string().len());
        let label = format!("rank {}", plan.ranks.len().saturating_sub(1)).len();
        let line = |f: &mut fmt::Formatter<'_>, head: String, cells: &[String]| {
            let mut text = format!("{head:<label$}");
            cells.iter().for_each(|cell| text += &format!(" {cell:<width$}"));
            writeln!(f, "{}", text.trim_end())
        };
        let times: Vec<String> = (0..columns).map(|time| time.to_string()).collect();
        line(f, "time".into(), &times)?;
        for (rank, spans) in plan.ranks.iter().enumerate() {
            let mut cells = vec![".".to_string(); columns];
            for span in spans {
                let at = span.start.round() as usize;
                cells[at] = name(span);
                if span.action.kind == ActionKind::Backward {
                    cells[at + 1] = cells[at].clone();
                }
            }
            line(f, format!("rank {rank}"), &cells)?;
        }
        let live: Vec<String> = self.live().iter().map(ToString::to_string).collect();
        let bubble = 100.0 * plan.bubble_fraction();
        writeln!(f, "bubble: {bubble:.1} % of the time; activations alive, by rank: {}", live.join(" "))
    }
}
