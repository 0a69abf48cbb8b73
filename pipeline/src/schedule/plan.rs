//! Timing of a schedule: simulates a table with given durations.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::check::parts;
use super::{Action, ActionKind, Table};
use crate::{Error, Result};

/// Durations of actions, in any unit. Default: 1 for forward and for each part of backward, 0 for messages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Durations {
    /// A stage's forward pass.
    pub forward: f64,
    /// The part of its backward pass that computes the gradient of its input.
    pub backward_input: f64,
    /// The part that computes the gradients of its weights.
    pub backward_weight: f64,
    /// Time from send to arrival.
    pub message: f64,
}

impl Default for Durations {
    fn default() -> Self {
        Self { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, message: 0.0 }
    }
}

impl Durations {
    fn of(&self, kind: ActionKind) -> f64 {
        match kind {
            ActionKind::Forward => self.forward,
            ActionKind::Backward => self.backward_input + self.backward_weight,
            ActionKind::BackwardInput => self.backward_input,
            ActionKind::BackwardWeight => self.backward_weight,
            _ => 0.0,
        }
    }
}

/// A computation with its times.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The computation.
    pub action: Action,
    /// Start time.
    pub start: f64,
    /// End time.
    pub end: f64,
}

/// The times of each rank's computations: planned, or measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Computations, by rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Plan {
    /// Returns the time from the beginning until the last rank has finished.
    pub fn makespan(&self) -> f64 {
        self.ranks.iter().flatten().fold(0.0, |last, span| span.end.max(last))
    }

    /// Returns how long each rank computes.
    pub fn busy(&self) -> Vec<f64> {
        let busy = |spans: &Vec<Span>| spans.iter().map(|span| span.end - span.start).sum();
        self.ranks.iter().map(busy).collect()
    }

    /// Returns the longest time that a rank takes from its own first action to its own last.
    pub fn span(&self) -> f64 {
        let span = |spans: &Vec<Span>| match (spans.first(), spans.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.ranks.iter().map(span).fold(0.0, f64::max)
    }

    /// Returns the longest [`span`](Self::span) of a rank minus the longest computing time of a rank: what the literature
    /// calls the bubble. It ignores that ranks start and end at different times, as one rank may start the next step while
    /// others still finish this one.
    pub fn bubble(&self) -> f64 {
        self.span() - self.busy().into_iter().fold(0.0, f64::max)
    }

    /// Returns the fraction of all ranks' time that is idle, from 0 to 1, between the first action of any rank and the last
    /// of any: the fraction of dots in a grid.
    ///
    /// ```
    /// use pipeline::{Durations, Schedule, ScheduleKind};
    ///
    /// let plan = Schedule::of(ScheduleKind::ZbV, 2, 2, 4)?.plan(&Durations::default());
    /// assert_eq!((plan.bubble(), plan.makespan(), plan.busy()), (0.0, 25.0, vec![24.0, 24.0]));
    /// assert!((plan.bubble_fraction() - 1.0 / 25.0).abs() < 1e-12);
    /// # Ok::<(), pipeline::Error>(())
    /// ```
    pub fn bubble_fraction(&self) -> f64 {
        let first = self.ranks.iter().flatten().fold(f64::INFINITY, |first, span| span.start.min(first));
        let all = (self.makespan() - first) * self.ranks.len() as f64;
        if all > 0.0 { 1.0 - self.busy().iter().sum::<f64>() / all } else { 0.0 }
    }
}

/// Simulates a table. Sends never block; a receive waits for its message.
///
/// # Errors
/// Ranks that wait indefinitely: for each, what it waits for.
pub(super) fn simulate(table: &Table, durations: &Durations) -> Result<Plan> {
    let mut done: HashMap<Action, f64> = HashMap::new();
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); table.ranks()];
    let (mut next, mut clock) = (vec![0; table.ranks()], vec![0.0f64; table.ranks()]);
    loop {
        let mut moved = false;
        for (rank, actions) in table.actions.iter().enumerate() {
            while let Some(&action) = actions.get(next[rank]) {
                let ready = needs(table, action).into_iter().flatten().try_fold(clock[rank], |time, need| {
                    let delay = if action.kind.is_compute() { 0.0 } else { delay(action.kind, durations) };
                    done.get(&need).map(|at| time.max(at + delay))
                });
                let Some(start) = ready else { break };
                let end = start + durations.of(action.kind);
                parts(action.kind).iter().for_each(|&part| {
                    done.insert(action.as_kind(part), end);
                });
                if action.kind.is_compute() {
                    ranks[rank].push(Span { action, start, end });
                }
                clock[rank] = end;
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let waiting = |(rank, actions): (usize, &Vec<Action>)| {
        let &action = actions.get(next[rank])?;
        let missing = needs(table, action).into_iter().flatten().find(|need| !done.contains_key(need))?;
        Some(format!("rank {rank} waits with {action} for {missing}"))
    };
    let stuck: Vec<String> = table.actions.iter().enumerate().filter_map(waiting).collect();
    match stuck.is_empty() {
        true => Ok(Plan { ranks }),
        false => Err(Error::BadTable { reason: format!("it never ends: {}", stuck.join("; ")) }),
    }
}

fn delay(kind: ActionKind, durations: &Durations) -> f64 {
    match kind {
        ActionKind::RecvActivation | ActionKind::RecvGradient => durations.message,
        _ => 0.0,
    }
}

/// Returns the actions that must be done before an action; for backward, the parts of actions.
fn needs(table: &Table, action: Action) -> [Option<Action>; 2] {
    let Action { stage, .. } = action;
    let own = |kind| Some(action.as_kind(kind));
    let of = |stage, kind| Some(Action { stage, ..action.as_kind(kind) });
    let last = stage + 1 == table.stages();
    match action.kind {
        ActionKind::Forward if stage == 0 => [None, None],
        ActionKind::Forward if table.sender_before(stage).is_some() => {
            [own(ActionKind::RecvActivation), None]
        }
        ActionKind::Forward => [of(stage - 1, ActionKind::Forward), None],
        ActionKind::Backward | ActionKind::BackwardInput => {
            let gradient = match table.sender_after(stage) {
                Some(_) => own(ActionKind::RecvGradient),
                None if last => None,
                None => of(stage + 1, ActionKind::BackwardInput),
            };
            [own(ActionKind::Forward), gradient]
        }
        ActionKind::BackwardWeight => [own(ActionKind::BackwardInput), None],
        ActionKind::SendActivation => [own(ActionKind::Forward), None],
        ActionKind::RecvActivation => [of(stage - 1, ActionKind::SendActivation), None],
        ActionKind::SendGradient => [own(ActionKind::BackwardInput), None],
        ActionKind::RecvGradient => [of(stage + 1, ActionKind::SendGradient), None],
    }
}
