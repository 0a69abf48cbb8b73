//! Losses of documents' scores. A document's target stands at the one place of its row whose score counts, so that targets are
//! divided with the rows in every layout, as those of tokens are.

use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use ops::{
    Linear, PreferenceLoss, Preferences, RowContext, binary_cross_entropy, cross_entropy, embedding,
    linear_no_bias, mse, wide_dtype,
};
use training::build::{Layers, Part};

use crate::tokens::IGNORE_INDEX;
use crate::{LabelsConfig, Problem, measures};

impl LabelsConfig {
    /// Returns the targets of rows of `len` places: of each row the places whose scores count, with the numbers of their labels
    /// ([`Row::scored`](crate::tokens::Row)).
    ///
    /// # Shapes
    /// Integers `(rows, len)`, of which -100 does not count; of several labels and of numbers f32 `(rows, len, labels)`, of which NaN
    /// does not count.
    ///
    /// # Errors
    /// A place behind the row's end, or other numbers than the labels need.
    pub fn targets(&self, scored: &[Vec<(u32, Vec<f32>)>], len: usize, device: &Device) -> Result<Tensor> {
        let (rows, count) = (scored.len(), self.names.len());
        let is_single = self.problem == Problem::SingleLabel;
        let width = if is_single { 1 } else { count };
        let mut all = vec![f32::NAN; rows * len * width];
        for (row, scored) in scored.iter().enumerate() {
            for (place, numbers) in scored {
                let place = *place as usize;
                if place >= len || numbers.len() != width {
                    bail!(
                        "a label of {} numbers at place {place} of {len}: {width} are needed",
                        numbers.len()
                    )
                }
                let first = (row * len + place) * width;
                all[first..first + width].copy_from_slice(numbers);
            }
        }
        if is_single {
            let class = |number: f32| if number.is_nan() { IGNORE_INDEX } else { number as i64 };
            return Tensor::from_vec(all.into_iter().map(class).collect(), (rows, len), device);
        }
        Tensor::from_vec(all, (rows, len, count), device)
    }
}

/// Head that scores documents for labels: a linear layer without a bias, the same on every rank that divides layers.
pub(crate) struct Scores {
    linear: Linear,
    problem: Problem,
    layers: Arc<dyn Layers>,
}

impl Scores {
    pub(crate) fn new(labels: &LabelsConfig, features: usize, part: &Part) -> Result<Self> {
        let linear = linear_no_bias(features, labels.names.len(), part.replicated())?;
        Ok(Self { linear, problem: labels.problem, layers: part.layers().clone() })
    }

    /// Returns the mean loss over the documents whose targets are in these rows; in a scope of pairs, that of their rewards.
    pub(crate) fn loss(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if let Some(pairs) = RowContext::current().preferences {
            return self.loss_of_pairs(&pairs, x, targets);
        }
        let (scores, targets) = self.of_documents(x, targets)?;
        self.loss_of(&scores, &targets)
    }

    /// As [`loss`](Self::loss), with what [`measures`](LabelsConfig::measures) are made of.
    pub(crate) fn evaluate(&self, x: &Tensor, targets: &Tensor) -> Result<(Tensor, Vec<f64>)> {
        if RowContext::current().preferences.is_some() {
            return Ok((self.loss(x, targets)?, Vec::new()));
        }
        let (scores, targets) = self.of_documents(x, targets)?;
        Ok((self.loss_of(&scores, &targets)?, measures::sums(self.problem, &scores, &targets)?))
    }

    /// A reward is the only score of a document; it takes the place of an answer's log-probability, at the one place with a target.
    fn loss_of_pairs(&self, pairs: &Preferences, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if pairs.config().loss != PreferenceLoss::Reward {
            bail!("a head that scores documents learns from pairs by PreferenceLoss::Reward alone")
        }
        let scores = self.forward(x)?;
        let scores = scores.to_dtype(wide_dtype(scores.dtype()))?;
        match scores.dim(2)? {
            1 => pairs.loss(&scores.squeeze(2)?, targets, IGNORE_INDEX),
            labels => bail!("pairs need a head with one score, their reward, and this one has {labels}"),
        }
    }

    fn loss_of(&self, scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
        match self.problem {
            Problem::SingleLabel => cross_entropy(scores, targets, None),
            Problem::MultiLabel => binary_cross_entropy(scores, targets),
            Problem::Regression => mse(scores, targets),
        }
    }

    /// Returns the scores of the documents that have targets, of (documents, labels), and these: (documents), or (documents, labels).
    fn of_documents(&self, x: &Tensor, targets: &Tensor) -> Result<(Tensor, Tensor)> {
        let (x, labels) = (self.layers.gather(x)?, self.linear.weight().dim(0)?);
        let (rows, len, features) = x.dims3()?;
        let is_single = self.problem == Problem::SingleLabel;
        let expected = if is_single { vec![rows, len] } else { vec![rows, len, labels] };
        if targets.dims() != expected || targets.dtype().is_float() == is_single {
            let (got, dtype) = (targets.dims(), targets.dtype());
            let numbers = if is_single { "integers" } else { "floats" };
            bail!(
                "targets of a head for {labels} labels: got {got:?} of {dtype:?}; give {expected:?} of {numbers}"
            )
        }
        let places = Tensor::new(scored(targets)?, x.device())?;
        let scores = self.linear.forward(&embedding(&x.reshape(((), features))?, &places)?)?;
        let scores = scores.to_dtype(wide_dtype(scores.dtype()))?;
        let targets = match is_single {
            true => targets.flatten_all()?.index_select(&places, 0)?,
            false => targets.reshape(((), labels))?.index_select(&places, 0)?.to_dtype(scores.dtype())?,
        };
        Ok((scores, targets))
    }
}

impl Module for Scores {
    /// Scores all places.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.linear.forward(&self.layers.gather(x)?)
    }
}

/// Returns the places of all rows, one after the other, that have a target: integers that are not -100, or numbers of which the
/// first is not NaN.
pub(crate) fn scored(targets: &Tensor) -> Result<Vec<u32>> {
    let places = |has: Vec<bool>| (0u32..).zip(has).filter(|(_, has)| *has).map(|(place, _)| place).collect();
    if targets.dtype().is_float() {
        let labels = targets.dims().last().copied().unwrap_or(1).max(1);
        let numbers = targets.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        return Ok(places(numbers.chunks(labels).map(|document| !document[0].is_nan()).collect()));
    }
    let numbers = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    Ok(places(numbers.into_iter().map(|number| number != IGNORE_INDEX).collect()))
}
