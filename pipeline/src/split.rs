//! Splitting a list of modules into stages.

use std::ops::Range;

use crate::{Error, Result};

/// Cost of a module, for splitting into stages of equal cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Cost {
    /// Its number of parameters.
    #[default]
    Parameters,
    /// The duration of its forward, measured on rank 0.
    ForwardTime,
}

/// How a list of modules is split into stages.
///
/// ```
/// use pipeline::Split;
///
/// let names = ["embedding", "layers.0", "layers.1", "out"];
/// let cut = Split::at(["layers.1"]).stages(&names, &[], 2)?;
/// assert_eq!(cut, [0..2, 2..4]); // `layers.1` is the first module of stage 1
/// let balanced = Split::default().stages(&names, &[6.0, 2.0, 2.0, 2.0], 2)?;
/// assert_eq!(balanced, [0..1, 1..4]);
/// let error = Split::at(["layers.2"]).stages(&names, &[], 2).unwrap_err();
/// assert!(error.to_string().contains("embedding, layers.0, layers.1, out"));
/// # Ok::<(), pipeline::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Split {
    /// Before each of these modules, in the order of the model.
    At(Vec<String>),
    /// So that the cost of the most expensive stage is minimal.
    Balanced(Cost),
}

impl Default for Split {
    fn default() -> Self {
        Self::Balanced(Cost::default())
    }
}

impl Split {
    /// Splits before each of these modules.
    pub fn at<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::At(names.into_iter().map(Into::into).collect())
    }

    /// Returns the modules of each stage. `costs`, one per module, are used by [`Split::Balanced`].
    ///
    /// # Errors
    /// More stages than modules; a split at a module that does not exist, with the list of those that do; splits that result
    /// in the wrong number of stages, or in empty ones.
    pub fn stages(&self, names: &[&str], costs: &[f64], stages: usize) -> Result<Vec<Range<usize>>> {
        if stages == 0 || stages > names.len() {
            return Err(Error::TooManyStages { stages, modules: names.len() });
        }
        match self {
            Self::At(cuts) => at(cuts, names, stages),
            Self::Balanced(_) => Ok(balanced(costs, names.len(), stages)),
        }
    }
}

fn at(cuts: &[String], names: &[&str], stages: usize) -> Result<Vec<Range<usize>>> {
    let mut starts = vec![0];
    for cut in cuts {
        let Some(position) = names.iter().position(|name| name == cut) else {
            return Err(Error::UnknownModule { name: cut.clone(), modules: names.join(", ") });
        };
        // Splits must be in ascending order, and none at the first module.
        if starts.last().is_some_and(|last| position <= *last) {
            let before = match starts.len() {
                1 => "nothing is before it".to_string(),
                _ => format!("the cut before it is at {}", names[starts[starts.len() - 1]]),
            };
            let (what, help) = ("a cut of the model", format!("{before}; give cuts in the model's order"));
            return Err(Error::InvalidArgument { what: what.into(), got: cut.clone(), help });
        }
        starts.push(position);
    }
    if starts.len() != stages {
        let got = format!("{} ({} stages)", cuts.join(","), starts.len());
        let help =
            format!("{stages} stages need {} of them: one for each rank and stage but the first", stages - 1);
        return Err(Error::InvalidArgument { what: "the cuts of the model".into(), got, help });
    }
    starts.push(names.len());
    Ok(starts.windows(2).map(|pair| pair[0]..pair[1]).collect())
}

/// Returns the best way to split `modules` into `stages` parts: minimal cost of the most expensive part, then minimal sum of
/// squares.
fn balanced(costs: &[f64], modules: usize, stages: usize) -> Vec<Range<usize>> {
    let cost = |index: usize| costs.get(index).copied().unwrap_or(1.0);
    // best[n]: the value of the best split of the first n modules into as many parts as rounds have passed; `begins` stores
    // where the last part starts.
    let mut best: Vec<Option<(f64, f64)>> = vec![None; modules + 1];
    best[0] = Some((0.0, 0.0));
    let mut begins = Vec::new();
    for _ in 0..stages {
        let mut next = vec![None; modules + 1];
        let mut from = vec![0; modules + 1];
        for end in 1..=modules {
            let mut own = 0.0;
            for (start, worth) in best.iter().enumerate().take(end).rev() {
                own += cost(start);
                // A part that starts earlier costs even more.
                if next[end].is_some_and(|(most, _)| own > most) {
                    break;
                }
                let &Some((most, squares)) = worth else { continue };
                let worth = (own.max(most), squares + own * own);
                if next[end].is_none_or(|known| worth <= known) {
                    (next[end], from[end]) = (Some(worth), start);
                }
            }
        }
        best = next;
        begins.push(from);
    }
    let mut end = modules;
    let mut ranges: Vec<_> = begins
        .iter()
        .rev()
        .map(|from| {
            let range = from[end]..end;
            end = range.start;
            range
        })
        .collect();
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balanced_stages_are_the_best_of_all() {
        let parts = |costs: &[f64], stages| balanced(costs, costs.len(), stages);
        assert_eq!(parts(&[1.0; 6], 3), [0..2, 2..4, 4..6]);
        assert_eq!(parts(&[9.0, 1.0, 1.0, 1.0, 9.0], 3), [0..1, 1..4, 4..5]);
        assert_eq!(parts(&[0.0, 0.0, 5.0], 3), [0..1, 1..2, 2..3]);
        assert_eq!(parts(&[1.0, 2.0], 1)[0], 0..2);
    }

    #[test]
    fn wrong_cuts_are_named() {
        let names = ["a", "b", "c"];
        let line = |split: Split, stages| split.stages(&names, &[], stages).unwrap_err().to_string();
        assert_eq!(line(Split::at(["x"]), 2), "the model has no module x to be cut at; it has a, b, c");
        assert!(line(Split::at(["a"]), 2).contains("nothing is before it"));
        assert!(line(Split::at(["c", "b"]), 3).contains("the cut before it is at c"));
        assert!(line(Split::at(["b"]), 3).contains("got b (2 stages); 3 stages need 2"));
        assert!(line(Split::default(), 4).contains("4 stages cannot be made of 3 modules"));
    }
}
