//! Weights of the ranks' gradients in the average.

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp, Work};

use crate::{Error, Result};

/// Value sent instead of a weight by a rank that has no more data.
const JOINED: f64 = -1.0;

/// The weights of one step: this rank's, then those of all ranks.
#[derive(Default)]
pub(crate) struct Weights {
    gathered: Accumulated,
    under_way: Option<(Work, Tensor)>,
    /// By rank, once they are known.
    all: Option<Vec<f64>>,
}

/// What the buckets contain.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
enum Accumulated {
    #[default]
    Nothing,
    /// A sum of gradients, to be averaged over ranks.
    Sum,
    /// The sum of each gradient times its weight, divided by `unit`, the first nonzero weight, so that the sum is of the
    /// magnitude of a gradient and f16 can represent it.
    Weighted { unit: f64, total: f64 },
}

impl Weights {
    /// Adds a loss. Returns the factor for its gradients; `None` if they are to be ignored.
    pub(crate) fn add(&mut self, weight: Option<f64>) -> Result<Option<f64>> {
        let (unit, total) = match (self.gathered, weight) {
            (Accumulated::Nothing | Accumulated::Sum, None) => {
                self.gathered = Accumulated::Sum;
                return Ok(Some(1.0));
            }
            (Accumulated::Weighted { .. }, None) | (Accumulated::Sum, Some(_)) => {
                return Err(Error::MixedAverages);
            }
            (Accumulated::Nothing, Some(_)) => (0.0, 0.0),
            (Accumulated::Weighted { unit, total }, Some(_)) => (unit, total),
        };
        let weight = weight.unwrap_or(0.0);
        if !weight.is_finite() || weight < 0.0 {
            return Err(Error::InvalidWeight { weight });
        }
        let unit = if unit == 0.0 { weight } else { unit };
        self.gathered = Accumulated::Weighted { unit, total: total + weight };
        Ok((weight > 0.0).then(|| weight / unit))
    }

    /// Returns an error if this rank has accumulated gradients that cannot be part of a weighted average.
    pub(crate) fn check_weighted(&self) -> Result<()> {
        if self.gathered == Accumulated::Sum { Err(Error::MixedAverages) } else { Ok(()) }
    }

    /// Starts to exchange the weights of all ranks' gradients, unless the average is unweighted.
    ///
    /// A separate operation: in f64, whatever the dtypes of the gradients, and finished before the first bucket is sent.
    pub(crate) fn exchange(&mut self, comm: &dyn Communicator) -> Result<()> {
        let own = match self.gathered {
            Accumulated::Sum => return Ok(()),
            Accumulated::Nothing => JOINED,
            Accumulated::Weighted { total, .. } => total,
        };
        let mut all = vec![0.0; comm.world_size()];
        all[comm.rank()] = own;
        if comm.world_size() == 1 {
            self.all = Some(all);
            return Ok(());
        }
        let tensor = Tensor::new(all, &Device::Cpu)?;
        let work = comm.submit(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
        self.under_way = Some((work, tensor));
        Ok(())
    }

    /// Returns true if no rank has data any more. Waits for the exchange.
    pub(crate) fn all_joined(&mut self) -> Result<bool> {
        Ok(self.all()?.is_some_and(|all| all.iter().all(|&weight| weight == JOINED)))
    }

    /// Returns the factor for this rank's gradients such that their mean over ranks is the average. Waits for the exchange.
    pub(crate) fn factor(&mut self) -> Result<f64> {
        let Accumulated::Weighted { unit, total } = self.gathered else { return Ok(1.0) };
        let Some(all) = self.all()? else { return Ok(1.0) };
        let mean = match all.iter().all(|&weight| weight == total) {
            true => total,
            false => all.iter().map(|weight| weight.max(0.0)).sum::<f64>() / all.len() as f64,
        };
        Ok(if total > 0.0 { unit / mean } else { 1.0 })
    }

    /// Returns true if a rank has data with a nonzero weight in this step. Waits for the exchange.
    pub(crate) fn any_counts(&mut self) -> Result<bool> {
        Ok(self.all()?.is_none_or(|all| all.iter().any(|&weight| weight > 0.0)))
    }

    /// Returns the first rank that has data in this step. Waits for the exchange.
    pub(crate) fn first_with_data(&mut self) -> Result<usize> {
        let first = |all: &[f64]| all.iter().position(|&weight| weight != JOINED);
        Ok(self.all()?.and_then(first).unwrap_or(0))
    }

    /// Resets for the next step.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    fn all(&mut self) -> Result<Option<&[f64]>> {
        if let Some((work, tensor)) = self.under_way.take() {
            work.wait()?;
            self.all = Some(tensor.to_vec1()?);
        }
        Ok(self.all.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::Local;

    /// Returns the factors by rank, where each rank has these weights.
    fn factors(weights: &[&[f64]]) -> Vec<(Vec<Option<f64>>, f64, bool)> {
        let ranks = Local::run(weights.len(), |comm| {
            let mut own = Weights::default();
            let scales = weights[comm.rank()].iter().map(|&weight| own.add(Some(weight)));
            let scales = scales.collect::<Result<Vec<_>>>()?;
            own.exchange(comm)?;
            assert_eq!(own.any_counts()?, weights.iter().flat_map(|own| *own).any(|&weight| weight > 0.0));
            Ok((scales, own.factor()?, own.all_joined()?))
        });
        ranks.expect("no failure")
    }

    #[test]
    fn equal_weights_change_nothing() {
        for weight in [1.0, 0.1, 3.0, 1e300, 1e-300] {
            for rank in factors(&[&[weight], &[weight], &[weight]]) {
                assert_eq!(rank, (vec![Some(1.0)], 1.0, false));
            }
        }
    }

    #[test]
    fn weights_add_up_and_joined_ranks_do_not_count() {
        let ranks = factors(&[&[0.0, 2.0, 4.0], &[6.0], &[]]);
        // The sum of all weights, divided by the three ranks, is 4.
        assert_eq!(ranks[0], (vec![None, Some(1.0), Some(2.0)], 0.5, false));
        assert_eq!(ranks[1], (vec![Some(1.0)], 1.5, false));
        assert_eq!(ranks[2], (vec![], 1.0, false));
        assert_eq!(factors(&[&[0.0], &[]])[0], (vec![None], 1.0, false));
        assert!(factors(&[&[], &[]]).iter().all(|(.., joined)| *joined));
        assert!(factors(&[&[]])[0].2 && !factors(&[&[1.0]])[0].2);
    }

    #[test]
    fn what_is_no_weight_is_refused() {
        for weight in [-1.0, f64::NAN, f64::INFINITY] {
            let refused = Weights::default().add(Some(weight));
            assert!(matches!(refused, Err(Error::InvalidWeight { .. })));
        }
        let mut sum = Weights::default();
        assert_eq!(sum.add(None).ok(), Some(Some(1.0)));
        assert!(matches!(sum.add(Some(1.0)), Err(Error::MixedAverages)));
        assert!(sum.check_weighted().is_err());
        sum.clear();
        assert!(sum.check_weighted().is_ok() && sum.add(Some(1.0)).is_ok() && sum.add(None).is_err());
    }
}
