//! The losses and further quantities of a run's steps, kept for its report.

/// Maximum number of points kept; beyond it, neighbouring points are averaged.
const MOST_POINTS: usize = 1 << 17;

/// The losses, and further quantities with the same number of values.
#[derive(Debug)]
pub(super) struct Curves {
    losses: Curve,
    quantities: Vec<(String, Curve)>,
}

impl Default for Curves {
    fn default() -> Self {
        Self { losses: Curve::new(MOST_POINTS), quantities: Vec::new() }
    }
}

impl Curves {
    /// Adds a step. A quantity that earlier steps did not have is NaN for them, and one that this step has not, for it.
    pub(super) fn push(&mut self, loss: f32, quantities: &[(&str, f64)]) {
        for (name, _) in quantities {
            if !self.quantities.iter().any(|(known, _)| known == name) {
                self.quantities.push((name.to_string(), self.losses.unknown()));
            }
        }
        self.losses.push(loss);
        for (name, curve) in &mut self.quantities {
            let value = quantities.iter().find(|(given, _)| given == name);
            curve.push(value.map_or(f32::NAN, |(_, value)| *value as f32));
        }
    }

    /// Returns the losses, the number of steps of each, and sum and count of those that are no point yet.
    pub(super) fn losses(&self) -> (&[f32], usize, (f64, usize)) {
        let Curve { losses, steps_per_loss, sum, count, .. } = &self.losses;
        (losses, *steps_per_loss, (*sum, *count))
    }

    /// Returns names and values of the further quantities.
    pub(super) fn quantities(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.quantities.iter().map(|(name, curve)| (&**name, &*curve.losses))
    }

    /// Restores what [`losses`](Self::losses) returned.
    pub(super) fn resume(&mut self, losses: Vec<f32>, steps_per_loss: usize, sum: f64, count: usize) {
        self.losses = Curve { losses, steps_per_loss, sum, count, ..Curve::new(MOST_POINTS) };
        self.quantities.clear();
    }

    /// Restores further quantities, those that have as many values as there are losses.
    pub(super) fn resume_quantities(&mut self, all: impl IntoIterator<Item = (String, Vec<f32>)>) {
        let fits = all.into_iter().filter(|(_, values)| values.len() == self.losses.losses.len());
        self.quantities =
            fits.map(|(name, losses)| (name, Curve { losses, ..self.losses.unknown() })).collect();
    }

    /// Keeps the first `steps` steps.
    pub(super) fn truncate(&mut self, steps: usize) {
        let quantities = self.quantities.iter_mut().map(|(_, curve)| curve);
        quantities.chain([&mut self.losses]).for_each(|curve| curve.truncate(steps));
    }
}

/// Losses, or for a long run the means of `steps_per_loss` consecutive losses.
#[derive(Debug, Clone)]
struct Curve {
    losses: Vec<f32>,
    most: usize,
    steps_per_loss: usize,
    sum: f64,
    count: usize,
}

impl Curve {
    fn new(most: usize) -> Self {
        Self { losses: Vec::new(), most, steps_per_loss: 1, sum: 0.0, count: 0 }
    }

    fn push(&mut self, loss: f32) {
        self.sum += f64::from(loss);
        self.count += 1;
        if self.count < self.steps_per_loss {
            return;
        }
        if self.losses.len() == self.most {
            self.losses =
                self.losses.chunks(2).map(|pair| pair.iter().sum::<f32>() / pair.len() as f32).collect();
            self.steps_per_loss *= 2;
            // The point just completed counts as half a point at the new resolution.
            if self.count < self.steps_per_loss {
                return;
            }
        }
        self.losses.push((self.sum / self.count as f64) as f32);
        (self.sum, self.count) = (0.0, 0);
    }

    /// As many values that are not known.
    fn unknown(&self) -> Self {
        let losses = vec![f32::NAN; self.losses.len()];
        Self { losses, sum: if self.count > 0 { f64::NAN } else { 0.0 }, ..self.clone() }
    }

    /// Keeps the losses of the first `steps` steps.
    fn truncate(&mut self, steps: usize) {
        let (points, count) = (steps / self.steps_per_loss, steps % self.steps_per_loss);
        let mean = match self.losses.get(points) {
            Some(mean) => f64::from(*mean),
            None => self.sum / self.count.max(1) as f64,
        };
        self.losses.truncate(points);
        (self.sum, self.count) = (mean * count as f64, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_as_many_values_as_there_are_losses() {
        let mut curves = Curves::default();
        curves.push(3.0, &[]);
        curves.push(2.0, &[("rate", 0.5)]);
        curves.push(1.0, &[("norm", 7.0)]);
        let all = |curves: &Curves| -> Vec<(String, Vec<String>)> {
            let text = |values: &[f32]| values.iter().map(f32::to_string).collect();
            curves.quantities().map(|(name, values)| (name.to_string(), text(values))).collect()
        };
        let expected = |name: &str, values: [&str; 3]| (name.to_string(), values.map(String::from).to_vec());
        let both = [expected("rate", ["NaN", "0.5", "NaN"]), expected("norm", ["NaN", "NaN", "7"])];
        assert_eq!(all(&curves), both);
        let mut resumed = Curves::default();
        resumed.resume(vec![3.0, 2.0, 1.0], 1, 0.0, 0);
        let kept = curves.quantities().map(|(name, values)| (name.to_string(), values.to_vec()));
        resumed.resume_quantities(kept.chain([("short".to_string(), vec![1.0])]));
        assert_eq!(all(&resumed), both);
        resumed.truncate(2);
        assert!(resumed.quantities().all(|(_, values)| values.len() == 2));
    }

    #[test]
    fn a_long_run_becomes_means_and_stays_small() {
        let mut curve = Curve::new(8);
        (0..64).for_each(|step| curve.push(step as f32));
        assert_eq!((curve.steps_per_loss, curve.losses.len()), (8, 8));
        assert_eq!(curve.losses[..2], [3.5, 11.5]);
        curve.truncate(20);
        assert_eq!((&curve.losses[..], curve.sum, curve.count), (&[3.5, 11.5][..], 4.0 * 19.5, 4));
        (20..24).for_each(|step| curve.push(step as f32));
        assert_eq!((curve.losses.len(), curve.count), (3, 0));
        let mut short = Curve::new(8);
        (0..8).for_each(|step| short.push(step as f32));
        assert_eq!((short.steps_per_loss, short.losses), (1, (0..8).map(|step| step as f32).collect()));
    }
}
