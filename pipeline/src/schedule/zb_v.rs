//! ZB-V: two stages per rank, laid out as a V, and no rank idle between its first action and its last.

use super::Action;

/// One of a rank's two stages, with the next micro-batch of each kind of action.
struct StageCursor {
    stage: usize,
    forward: usize,
    input: usize,
    weight: usize,
}

impl StageCursor {
    fn new(stage: usize) -> Self {
        Self { stage, forward: 0, input: 0, weight: 0 }
    }

    fn forward(&mut self) -> Action {
        self.forward += 1;
        Action::forward(self.stage, self.forward - 1)
    }

    fn input(&mut self) -> Action {
        self.input += 1;
        Action::input(self.stage, self.input - 1)
    }

    fn weight(&mut self) -> Action {
        self.weight += 1;
        Action::weight(self.stage, self.weight - 1)
    }

    /// Returns both parts of backward, one after the other.
    fn backward(&mut self) -> [Action; 2] {
        [self.input(), self.weight()]
    }
}

/// Returns the actions. Rank r has stages r and 2P-1-r, so that a micro-batch returns to the first rank, which computes the
/// loss.
///
/// # Cost
/// If forward and both parts of backward take equally long, and there are at least 2P-1 micro-batches, no rank is idle
/// between its first action and its last. At most 2P stages' activations are alive, as much memory as 1F1B needs for P stages
/// of twice the size.
///
/// # Source
/// Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), section 3.2. Fewer micro-batches use the table of 2P-1,
/// without the surplus ones.
pub(super) fn actions(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Action> {
    let planned = micro_batches.max(2 * ranks - 1);
    let (mut down, mut up) = (StageCursor::new(rank), StageCursor::new(2 * ranks - 1 - rank));
    let mut actions = Vec::with_capacity(6 * planned);
    // Fill phase.
    actions.extend((0..2 * (ranks - rank) - 1).map(|_| down.forward()));
    for _ in 0..rank {
        actions.extend([up.forward(), down.forward()]);
    }
    for _ in 0..ranks - rank {
        actions.push(up.forward());
        actions.extend(up.backward());
    }
    // Steady state.
    while up.forward < planned {
        if down.forward < planned {
            actions.push(down.forward());
        }
        actions.extend(down.backward());
        actions.push(up.forward());
        actions.extend(up.backward());
    }
    // Drain phase; what other ranks wait for comes first.
    for _ in 0..rank {
        actions.extend([down.input(), up.input()]);
    }
    for _ in 0..ranks - rank {
        actions.extend([down.input(), down.weight()]);
    }
    actions.extend((up.weight..planned).map(|m| Action::weight(up.stage, m)));
    actions.extend((down.weight..planned).map(|m| Action::weight(down.stage, m)));
    actions.retain(|action| action.micro_batch < micro_batches);
    actions
}
