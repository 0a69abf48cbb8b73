//! Maps the nodes of a loss's autograd graph to the unit runs that made them: when backward has passed all nodes of a unit,
//! the unit can be released.
//!
//! The hook of a parameter does not see every use of it: a detached parameter (a frozen weight) has no hook, and backward
//! still needs its values. And the graph of a loss does not contain what is recomputed in backward (activation
//! checkpointing). So a unit is needed as long as backward has not passed all nodes that were made in one of its runs, or in
//! a recomputed part that contains one of its runs.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use candle_core::{DType, Device, Result, Tensor, TensorId};
use ops::PartMember;

/// Returns the number of a tensor. Candle numbers tensors in order of creation, so later tensors have larger numbers.
fn number(id: TensorId) -> usize {
    /// Hasher that stores the one number that a `TensorId` writes to it.
    #[derive(Default)]
    struct Number(usize);

    impl Hasher for Number {
        fn finish(&self) -> u64 {
            self.0 as u64
        }

        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|&byte| self.0 = (self.0 << 8) | usize::from(byte));
        }

        fn write_usize(&mut self, number: usize) {
            self.0 = number;
        }
    }

    let mut hasher = Number::default();
    id.hash(&mut hasher);
    hasher.0
}

/// Returns a number larger than those of all tensors created so far.
fn next_number() -> Result<usize> {
    Ok(number(Tensor::zeros((), DType::U8, &Device::Cpu)?.id()))
}

/// One run of a unit. It lives as long as a graph contains its outputs.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) unit: usize,
    /// Whether the unit ran during backward, as part of a recomputation.
    pub(crate) in_backward: bool,
    /// Tensors created during the run have numbers from `start`
    start: usize,
    /// to `end`, which is set once the run has finished.
    end: OnceLock<usize>,
    /// If the unit ran in a part that backward recomputes: the number of the part's output tensor, which stands for the part
    /// in the loss's graph; otherwise 0.
    part: AtomicUsize,
}

impl PartMember for Run {
    fn is_in(&self, node: TensorId) {
        self.part.store(number(node), Ordering::Relaxed);
    }
}

/// The runs that backward may still reach.
#[derive(Debug, Default)]
pub(super) struct Runs(Vec<Weak<Run>>);

impl Run {
    fn begin(unit: usize, in_backward: bool) -> Result<Self> {
        Ok(Self { unit, in_backward, start: next_number()?, end: OnceLock::new(), part: AtomicUsize::new(0) })
    }

    /// Marks the run as finished.
    pub(crate) fn end(&self) -> Result<()> {
        let end = next_number()?;
        self.end.get_or_init(|| end);
        Ok(())
    }

    fn has(&self, number: usize) -> bool {
        self.start <= number && self.end.get().is_none_or(|end| number <= *end)
    }

    /// Returns the number of the output of the recomputed part that it ran in.
    fn part(&self) -> Option<usize> {
        Some(self.part.load(Ordering::Relaxed)).filter(|part| *part > 0)
    }
}

impl Runs {
    /// Records that a unit starts to run.
    pub(super) fn begin(&mut self, unit: usize, in_backward: bool) -> Result<Arc<Run>> {
        let run = Arc::new(Run::begin(unit, in_backward)?);
        if self.0.len() == self.0.capacity() {
            self.0.retain(|run| run.strong_count() > 0);
        }
        self.0.push(Arc::downgrade(&run));
        Ok(run)
    }

    /// Returns the runs that are still alive, in the order in which they started.
    fn alive(&self) -> Vec<Arc<Run>> {
        let mut living: Vec<_> = self.0.iter().filter_map(Weak::upgrade).collect();
        living.sort_unstable_by_key(|run| run.start);
        living
    }

    /// Returns true while a graph exists that was made in backward by running this unit again.
    pub(super) fn is_recomputed(&self, unit: usize) -> bool {
        self.0.iter().filter_map(Weak::upgrade).any(|run| run.in_backward && run.unit == unit)
    }
}

/// The order in which backward visits the nodes of a loss's graph.
#[derive(Debug, Default)]
pub(super) struct Graph {
    /// Number of each node and its position in that order; sorted by number.
    nodes: Vec<(usize, usize)>,
    /// Position that backward has reached.
    place: usize,
    /// The runs that have nodes in the graph, in the order in which they started.
    runs: Vec<RunInGraph>,
    /// By unit: position of the last node that needs it; `None`: it has no node.
    last: Vec<Option<usize>>,
}

impl Graph {
    /// Analyses the graph of a loss, before backward runs. `parameters` yields the parameters of each unit.
    pub(super) fn new<'a, P: Iterator<Item = &'a Tensor>>(
        loss: &Tensor,
        parameters: impl Iterator<Item = P>,
        runs: &Runs,
    ) -> Self {
        let nodes = loss.sorted_nodes();
        let mut nodes: Vec<_> =
            nodes.iter().enumerate().map(|(place, node)| (number(node.id()), place)).collect();
        nodes.sort_unstable();
        let mut graph = Self { nodes, ..Self::default() };
        let last = |graph: &Self, of: P| of.filter_map(|tensor| graph.find(tensor.id())).max();
        graph.last = parameters.map(|of| last(&graph, of)).collect();
        for run in runs.alive() {
            let first = graph.nodes.partition_point(|(number, _)| *number < run.start);
            let within = graph.nodes[first..].iter().take_while(|(number, _)| run.has(*number));
            let part = run.part().and_then(|part| graph.position_of(part));
            let Some(last) = within.map(|(_, place)| *place).max().or(part) else { continue };
            graph.runs.push(RunInGraph { unit: run.unit, start: run.start, part });
            graph.last[run.unit] = graph.last[run.unit].max(Some(last));
        }
        graph
    }

    fn find(&self, id: TensorId) -> Option<usize> {
        self.position_of(number(id))
    }

    fn position_of(&self, number: usize) -> Option<usize> {
        let place = self.nodes.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        Some(self.nodes[place].1)
    }

    pub(super) fn contains(&self, node: &Tensor) -> bool {
        self.find(node.id()).is_some()
    }

    /// Returns true if the unit ran exactly once, and not in a recomputed part.
    pub(super) fn has_one_run(&self, unit: usize) -> bool {
        let mut runs = self.runs.iter().filter(|run| run.unit == unit);
        runs.next().is_some_and(|run| run.part.is_none()) && runs.next().is_none()
    }

    /// Records that backward has reached this node. Nodes of another graph, that of a recomputation, are ignored.
    pub(super) fn advance_to(&mut self, node: TensorId) {
        self.place = self.find(node).unwrap_or(self.place);
    }

    /// Returns true while backward has not passed all nodes of this unit.
    pub(super) fn needs(&self, unit: usize) -> bool {
        self.last[unit].is_some_and(|last| last >= self.place)
    }

    /// Returns the unit that backward needs next, after that of this run. For a run in a recomputed part: only if it is of
    /// the part's first unit, so that at most one unit is gathered too early.
    pub(super) fn after(&self, run: &Run) -> Option<usize> {
        let start = match run.in_backward {
            false => run.start,
            true => {
                let first = self.runs.iter().find(|seen| seen.part == Some(self.place))?;
                if first.unit != run.unit {
                    return None;
                }
                first.start
            }
        };
        let before = &self.runs[..self.runs.partition_point(|seen| seen.start < start)];
        let mut units = before.iter().rev().map(|seen| seen.unit);
        units.find(|&unit| unit != run.unit && self.needs(unit))
    }
}

/// A run that backward will reach.
#[derive(Debug)]
struct RunInGraph {
    unit: usize,
    start: usize,
    /// Position of the output of the part that it is in, if that is recomputed.
    part: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Var;

    #[test]
    fn later_tensors_have_larger_numbers() -> Result<()> {
        let before = next_number()?;
        let tensor = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        let view = tensor.narrow(0, 0, 1)?;
        let numbers = [before, number(tensor.id()), number(view.id()), next_number()?];
        assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
        Ok(())
    }

    #[test]
    fn a_unit_is_needed_until_backward_is_past_its_last_node() -> Result<()> {
        let (x, w) = (Var::new(2f32, &Device::Cpu)?, Var::new(3f32, &Device::Cpu)?);
        let mut runs = Runs::default();
        let mut run = |unit, body: &dyn Fn() -> Result<Tensor>| -> Result<(Tensor, Arc<Run>)> {
            let run = runs.begin(unit, false)?;
            let output = body()?;
            run.end()?;
            // The boundary operation on an output is applied after the run has ended.
            Ok(((output * 1.0)?, run))
        };
        let (a, first) = run(0, &|| x.sqr())?;
        // Backward reaches the weight before the square root.
        let (b, second) = run(1, &|| a.sqrt()?.mul(&w))?;
        let (c, third) = run(2, &|| b.exp())?;
        drop(third);
        let mut graph =
            Graph::new(&c, [vec![], vec![w.as_tensor()], vec![]].into_iter().map(Vec::into_iter), &runs);
        assert_eq!([0, 1, 2].map(|unit| graph.needs(unit)), [true, true, false]);
        graph.advance_to(b.id());
        assert_eq!((graph.needs(1), graph.after(&second)), (true, Some(0)));
        graph.advance_to(a.id());
        assert_eq!((graph.needs(0), graph.needs(1), graph.after(&first)), (true, false, None));
        Ok(())
    }
}
