//! Plot axes with ticks at round numbers, linear or logarithmic, or with one position for each of several names.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use crate::number::{significant, trimmed};

/// Approximate number of ticks.
const TICKS: f64 = 6.;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    log: bool,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Linear axis from `low` to `high`, widened if they are (nearly) the same.
    pub(super) fn linear(low: f64, high: f64) -> Self {
        let least = (low.abs().max(high.abs()) * 1e-6).max(f64::MIN_POSITIVE * 1e10);
        let (low, high) = if high - low < least {
            let widen = if low == 0. { 1. } else { low.abs() * 0.1 };
            (low - widen, high + widen)
        } else {
            (low, high)
        };
        Self { low, high, log: false, ticks: linear_ticks(low, high) }
    }

    /// Linear axis from 0 to a little above the largest value, for bars.
    pub(super) fn from_zero(largest: f64) -> Self {
        let high = if largest > 0. { largest * 1.15 } else { 1. };
        Self { low: 0., high, log: false, ticks: linear_ticks(0., high) }
    }

    /// Logarithmic axis from `low` to `high`, both above 0.
    pub(super) fn log(low: f64, high: f64) -> Self {
        let (low, high) = if high / low < 1.001 { (low / 1.1, high * 1.1) } else { (low, high) };
        Self { low, high, log: true, ticks: log_ticks(low, high) }
    }

    /// Logarithmic axis with a tick at each of these values, which are ascending and above 0; if there are many, at
    /// some of them.
    pub(super) fn at(values: &[f64]) -> Self {
        let (low, high) = (values.first().copied().unwrap_or(1.), values.last().copied().unwrap_or(1.));
        let every = values.len().div_ceil(12).max(1);
        let ticks = values.iter().step_by(every).map(|value| (*value, significant(*value, 4)));
        Self { ticks: ticks.collect(), ..Self::log(low / 1.1, high * 1.1) }
    }

    /// Axis with a position for each name, the first at 0, the second at 1; if there are many, not all names are
    /// written.
    pub(super) fn names(names: impl ExactSizeIterator<Item = String>) -> Self {
        let count = names.len();
        let every = count.div_ceil(16).max(1);
        let ticks = names
            .enumerate()
            .filter(|(place, _)| place % every == 0)
            .map(|(place, name)| (place as f64, name));
        Self { low: -0.5, high: count.max(1) as f64 - 0.5, log: false, ticks: ticks.collect() }
    }

    /// Its ends, and whether it is logarithmic.
    pub(super) fn ends(&self) -> (f64, f64, bool) {
        (self.low, self.high, self.log)
    }

    fn scale(&self, value: f64) -> f64 {
        if self.log { value.max(f64::MIN_POSITIVE).ln() } else { value }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        let (low, high) = (self.scale(self.low), self.scale(self.high));
        let share = ((self.scale(*value) - low) / (high - low)).clamp(-0.1, 1.1);
        start + (share * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(place, _)| *place).collect()
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        let tick = self.ticks.iter().find(|(place, _)| place == value);
        tick.map_or_else(String::new, |(_, text)| text.clone())
    }
}

/// Returns ticks at multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let rough = (high - low) / TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1., 2., 5., 10.].map(|factor| factor * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(rough);
    if !(step.is_finite() && step > 0.) {
        return Vec::new();
    }
    let digits = (-step.log10().floor()).clamp(0., 300.) as usize;
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    let count = (last - first).clamp(0., 4. * TICKS) as usize;
    let places = (0..=count).map(|index| (first + index as f64) * step);
    places
        .map(|place| (place, if digits > 6 { significant(place, 3) } else { trimmed(place, digits) }))
        .collect()
}

/// Returns ticks at powers of ten, all or some; if the range has few, also at 2 and 5 times a power of ten, or the
/// ticks of a linear axis.
fn log_ticks(low: f64, high: f64) -> Vec<(f64, String)> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let every = ((f64::from(last - first)) / TICKS).ceil().max(1.) as i32;
    let within = |factors: &[f64]| -> Vec<(f64, String)> {
        let powers = (first..=last).filter(|power| power % every == 0);
        let places = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
        places
            .filter(|place| (low..=high).contains(place))
            .map(|place| (place, significant(place, 1)))
            .collect()
    };
    let candidates = [within(&[1.]), within(&[1., 2., 5.])];
    candidates.into_iter().find(|ticks| ticks.len() >= 3).unwrap_or_else(|| linear_ticks(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, text)| text.as_str()).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(texts(&Axis::linear(0., 10.)), ["0", "2", "4", "6", "8", "10"]);
        assert_eq!(texts(&Axis::linear(0., 0.5)), ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]);
        assert_eq!(texts(&Axis::log(0.008, 30.)), ["0.01", "0.1", "1", "10"]);
        assert_eq!(texts(&Axis::log(0.8, 6.)), ["1", "2", "5"]);
        assert_eq!(texts(&Axis::log(2.0, 2.3)), ["2", "2.05", "2.1", "2.15", "2.2", "2.25", "2.3"]);
        assert!(texts(&Axis::log(1e-30, 1e30)).len() <= 8);
        assert_eq!(texts(&Axis::at(&[1., 2., 4., 8.])), ["1", "2", "4", "8"]);
        assert!(texts(&Axis::at(&(1..100).map(f64::from).collect::<Vec<_>>())).len() <= 12);
        assert_eq!(texts(&Axis::names(["a", "b"].map(String::from).into_iter())), ["a", "b"]);
        assert!(texts(&Axis::names((0..200).map(|rank| rank.to_string()))).len() <= 16);
    }

    #[test]
    fn no_range_breaks_it() {
        for (low, high) in
            [(0., 0.), (5., 5.), (-1., -1.), (1e-40, 1e-40), (-3e38, 3e38), (0., 1e-45), (1., 1. + 1e-12)]
        {
            let axis = Axis::linear(low, high);
            assert!(!axis.ticks.is_empty() && axis.ticks.len() < 30, "{low} {high}: {axis:?}");
            assert!((0..=100).contains(&axis.map(&low, (0, 100))));
        }
        for (low, high) in [(1e-45, 3e38), (1., 1.), (1e-45, 1e-45), (2., 2.001)] {
            let axis = Axis::log(low, high);
            assert!(!axis.ticks.is_empty() && axis.ticks.len() < 30, "{low} {high}: {axis:?}");
        }
        assert!(!Axis::from_zero(0.).ticks.is_empty());
    }

    #[test]
    fn places_are_in_proportion() {
        assert_eq!(Axis::linear(0., 10.).map(&5., (100, 300)), 200);
        assert_eq!(Axis::log(0.01, 100.).map(&1., (300, 100)), 200);
        assert_eq!(Axis::log(0.01, 100.).map(&-1., (0, 100)), -10);
    }
}
