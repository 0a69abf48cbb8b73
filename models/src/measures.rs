//! How good scores of documents are, from sums over all documents, which ranks and batches add up.

use candle_core::{DType, Result, Tensor};

use crate::{LabelsConfig, Problem};

/// Sums of one label: of documents that have it and for which it is predicted, for which it is predicted, and that have it.
const COUNTS: usize = 3;
/// Sums of one number: of documents, scores, targets, their squares, their products, and squared errors.
const MOMENTS: usize = 7;

/// Returns the sums over some documents.
///
/// # Shapes
/// Scores `(documents, labels)`, targets `(documents)` or `(documents, labels)`.
pub(crate) fn sums(problem: Problem, scores: &Tensor, targets: &Tensor) -> Result<Vec<f64>> {
    let wide = |tensor: &Tensor| tensor.detach().to_dtype(DType::F64);
    let scores = wide(scores)?.to_vec2::<f64>()?;
    let labels = scores.first().map_or(0, Vec::len);
    let of_label = if problem == Problem::Regression { MOMENTS } else { COUNTS };
    let mut sums = vec![0.0; labels * of_label];
    let mut add = |label: usize, own: &[f64]| {
        sums[label * of_label..].iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    };
    let one = |is_so: bool| f64::from(u8::from(is_so));
    let mut count = |label: usize, is_predicted: bool, applies: bool| {
        add(label, &[one(is_predicted && applies), one(is_predicted), one(applies)]);
    };
    match problem {
        Problem::SingleLabel => {
            for (scores, target) in scores.iter().zip(targets.to_dtype(DType::I64)?.to_vec1::<i64>()?) {
                // The first of equal scores, as argmax of PyTorch.
                let best = (0..labels).rev().max_by(|a, b| scores[*a].total_cmp(&scores[*b]));
                (0..labels).for_each(|label| count(label, best == Some(label), target == label as i64));
            }
        }
        Problem::MultiLabel => {
            for (scores, targets) in scores.iter().zip(wide(targets)?.to_vec2::<f64>()?) {
                (0..labels).for_each(|label| count(label, scores[label] > 0.0, targets[label] > 0.5));
            }
        }
        Problem::Regression => {
            for (scores, targets) in scores.iter().zip(wide(targets)?.to_vec2::<f64>()?) {
                for (label, (x, y)) in scores.iter().zip(targets).enumerate() {
                    add(label, &[1.0, *x, y, x * x, y * y, x * y, (x - y).powi(2)]);
                }
            }
        }
    }
    Ok(sums)
}

impl LabelsConfig {
    /// Returns how good a model is, from the sums of an evaluation ([`Model::evaluate`](training::build::Model::evaluate)): of single
    /// labels accuracy and macro F1, of several micro and macro F1, of numbers Pearson's correlation (its mean over several) and the
    /// mean squared error. Macro F1 is the mean over the labels that occur or are predicted. What is not defined is NaN.
    pub fn measures(&self, sums: &[f64]) -> Vec<(&'static str, f64)> {
        if self.problem == Problem::Regression {
            let all: Vec<&[f64]> = sums.chunks_exact(MOMENTS).collect();
            let count: f64 = all.iter().map(|sums| sums[0]).sum();
            let errors: f64 = all.iter().map(|sums| sums[6]).sum();
            let pearson: f64 = all.iter().map(|sums| correlation(sums)).sum::<f64>() / all.len() as f64;
            return vec![("Pearson", pearson), ("MSE", errors / count)];
        }
        let all: Vec<&[f64]> = sums.chunks_exact(COUNTS).collect();
        let sum = |place: usize| all.iter().map(|counts| counts[place]).sum::<f64>();
        let known = all.iter().filter(|counts| counts[1] + counts[2] > 0.0);
        let of_labels: Vec<f64> = known.map(|counts| f1(counts[0], counts[1], counts[2])).collect();
        let macro_f1 = of_labels.iter().sum::<f64>() / of_labels.len() as f64;
        match self.problem {
            Problem::SingleLabel => vec![("accuracy", sum(0) / sum(2)), ("macro F1", macro_f1)],
            _ => vec![("micro F1", f1(sum(0), sum(1), sum(2))), ("macro F1", macro_f1)],
        }
    }
}

/// The harmonic mean of precision and recall.
fn f1(right: f64, predicted: f64, applying: f64) -> f64 {
    2.0 * right / (predicted + applying)
}

/// Pearson's correlation of scores and targets.
fn correlation(sums: &[f64]) -> f64 {
    let [count, x, y, xx, yy, xy] = [0, 1, 2, 3, 4, 5].map(|place| sums[place]);
    (count * xy - x * y) / ((count * xx - x * x) * (count * yy - y * y)).sqrt()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn measured(problem: Problem, labels: usize, scores: &Tensor, targets: &Tensor) -> Vec<f64> {
        let names = (0..labels).map(|id| id.to_string()).collect();
        let labels = LabelsConfig { names, problem, pad_token: None };
        labels
            .measures(&sums(problem, scores, targets).unwrap())
            .into_iter()
            .map(|(_, measure)| measure)
            .collect()
    }

    /// As scikit-learn's `accuracy_score`, `f1_score` and SciPy's `pearsonr` compute them.
    #[test]
    fn measures_are_those_of_the_formulas() -> Result<()> {
        let device = &Device::Cpu;
        // Predicted 0, 1, 1, 2 for 0, 1, 2, 2: F1 of 1, 2/3 and 2/3; of the fourth label nothing is known.
        let scores = Tensor::new(
            &[[3f32, 1., 0., -1.], [0., 1., 0., 0.], [0., 2., 1., 0.], [1., 0., 2., 0.]],
            device,
        )?;
        let found = measured(Problem::SingleLabel, 4, &scores, &Tensor::new(&[0i64, 1, 2, 2], device)?);
        assert!((found[0] - 0.75).abs() < 1e-12 && (found[1] - 7.0 / 9.0).abs() < 1e-12, "{found:?}");
        let scores = Tensor::new(&[[0.5f32, -1.0], [-0.5, 1.0], [2.0, 3.0]], device)?;
        let targets = Tensor::new(&[[1f32, 0.0], [1.0, 1.0], [0.0, 1.0]], device)?;
        let found = measured(Problem::MultiLabel, 2, &scores, &targets);
        assert!((found[0] - 0.75).abs() < 1e-12 && (found[1] - 0.75).abs() < 1e-12, "{found:?}");
        let scores = Tensor::new(&[[1f32], [2.0], [4.0]], device)?;
        let targets = Tensor::new(&[[2f32], [1.0], [5.0]], device)?;
        let found = measured(Problem::Regression, 1, &scores, &targets);
        assert!((found[0] - 0.8386278693775346).abs() < 1e-12 && (found[1] - 1.0).abs() < 1e-12, "{found:?}");
        Ok(())
    }
}
