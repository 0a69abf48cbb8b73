//! What an optimizer that needs whole matrices costs: memory and bytes sent to bring them together, and its operations.

use fsdp::FsdpConfig;
use girandole::Layout;
use training::MuonConfig;

use super::outline::{Parameter, Unit};
use super::partition::PartitionedModel;
use crate::optimizer::Optimizer;

/// A matrix of a hidden layer, or several in one parameter.
struct Whole {
    elements: f64,
    /// Ranks that hold the same part.
    copies: f64,
    /// Parts that it is divided into.
    parts: f64,
    /// Of one matrix, and of all.
    operations: f64,
}

impl PartitionedModel<'_> {
    /// Returns the hidden matrices of some units, which the ranks of a stage hold.
    fn matrices(&self, units: impl IntoIterator<Item = usize>) -> Vec<Whole> {
        if self.training.optimizer != Optimizer::Muon {
            return Vec::new();
        }
        let units = units.into_iter().flat_map(|place| {
            let (own, whole) = (&self.units[place], self.whole_units.get(place));
            let hidden = own.tensors.iter().filter(|tensor| tensor.is_hidden());
            hidden.map(move |tensor| self.matrix(tensor, own, whole))
        });
        units.collect()
    }

    fn matrix(&self, tensor: &Parameter, own: &Unit, whole: Option<&Unit>) -> Whole {
        let Layout { dp, shard, ep, tp, pp, .. } = self.layout;
        let find = |unit: &Unit| unit.tensors.iter().find(|other| other.name == tensor.name).cloned();
        let whole = whole.and_then(find).unwrap_or_else(|| tensor.clone());
        let is_divided = whole.elements > tensor.elements;
        let shards = match pp {
            // Small tensors of a unit are packed, and the pack is divided: few of them are on two ranks.
            1 if tensor.elements < FsdpConfig::default().pack_elements => {
                let small = own.tensors.iter().map(|tensor| tensor.elements);
                let pack: usize =
                    small.filter(|elements| *elements < FsdpConfig::default().pack_elements).sum();
                1.0 + (shard - 1) as f64 * tensor.elements as f64 / pack.max(1) as f64
            }
            _ => shard as f64,
        };
        let [rows, columns] = whole.matrix.unwrap_or_default();
        let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
        let each = 4.0 * short * short * long + 2.0 * short.powi(3);
        // The other ranks of `ep` have as many experts, or copies of everything else.
        let (sets, copies) = if tensor.is_expert() { (ep, dp) } else { (1, dp * ep) };
        let count = (sets * whole.elements) as f64 / (rows * columns).max(1) as f64;
        let (parts, copies) = if is_divided { (tp, copies) } else { (1, copies * tp) };
        Whole {
            elements: (sets * whole.elements) as f64,
            copies: copies as f64,
            parts: shards * parts as f64,
            operations: MuonConfig::default().iterations as f64 * each * count,
        }
    }

    /// Ranks that hold a stage.
    fn stage_ranks(&self) -> f64 {
        let Layout { dp, shard, ep, tp, .. } = self.layout;
        (dp * shard * ep * tp) as f64
    }

    /// Returns the bytes that a rank sends in the mean: what it holds of matrices that others own, and the others' parts of the results for
    /// those that it owns.
    pub(super) fn sent_for_matrices(&self, units: impl IntoIterator<Item = usize>) -> f64 {
        let of = |matrix: Whole| {
            let own = matrix.elements / matrix.parts;
            matrix.elements - own + matrix.elements * matrix.copies - own
        };
        self.matrices(units).into_iter().map(of).sum::<f64>() * self.working() / self.stage_ranks()
    }

    /// Returns the operations of a rank to make directions orthogonal.
    pub(super) fn orthogonal_flops(&self, units: impl IntoIterator<Item = usize>) -> f64 {
        self.matrices(units).into_iter().map(|matrix| matrix.operations).sum::<f64>() / self.stage_ranks()
    }

    /// Returns the bytes in the step of the optimizer: the directions and the results of a rank's `hidden` elements; and the matrices that
    /// it owns, whole, before and after.
    pub(super) fn bytes_of_matrices(&self, units: impl IntoIterator<Item = usize>, hidden: f64) -> f64 {
        let matrices = self.matrices(units);
        if matrices.is_empty() {
            return 0.0;
        }
        let whole: f64 = matrices.iter().map(|matrix| matrix.elements).sum::<f64>() / self.stage_ranks();
        2.0 * (hidden + whole) * self.working()
    }
}
