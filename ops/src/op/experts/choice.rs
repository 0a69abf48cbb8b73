//! Which experts a token uses, by their shares.

use candle_core::{DType, Result, Tensor};

use crate::Error;

/// Rules by which experts are chosen.
pub(super) struct Choice {
    per_token: usize,
    /// Number of experts of a group, and of groups that a token uses.
    groups: Option<(usize, usize)>,
    /// What is added to the share of each expert.
    correction: Option<Vec<f64>>,
}

impl Choice {
    pub(super) fn new(
        count: usize,
        per_token: usize,
        groups: Option<(usize, usize)>,
        correction: Option<&Tensor>,
    ) -> Result<Self> {
        let refuse = |field, got: usize, help| {
            Err(Error::InvalidConfig { of: "Router", field, got: got as f64, help }.into())
        };
        if per_token > count {
            return refuse(
                "the number of experts of a token",
                per_token,
                "it must be at most the number of experts",
            );
        }
        if let Some((groups, used)) = groups {
            if groups == 0 || !count.is_multiple_of(groups) || count / groups < 2 {
                let help = "it must divide the number of experts, and each must have two";
                return refuse("the number of groups", groups, help);
            }
            if used > groups || used * (count / groups) < per_token {
                let help = "it must be at most that of all groups, and they must have a token's experts";
                return refuse("the number of groups of a token", used, help);
            }
        }
        let correction: Option<Vec<f64>> =
            correction.map(|all| all.to_dtype(DType::F64)?.to_vec1()).transpose()?;
        if let Some(all) = correction.as_ref().filter(|all| all.len() != count) {
            return refuse("the length of the correction", all.len(), "give a number for each expert");
        }
        let groups = groups.map(|(groups, used)| (count / groups, used));
        Ok(Self { per_token, groups, correction })
    }

    /// Returns the experts of each token, the best first.
    pub(super) fn of_tokens(&self, shares: &Tensor, router: &str) -> Result<Vec<u32>> {
        let mut chosen = Vec::with_capacity(shares.dim(0)? * self.per_token);
        let mut order: Vec<u32> = Vec::new();
        for mut row in shares.to_dtype(DType::F64)?.to_vec2::<f64>()? {
            if let Some(correction) = &self.correction {
                row.iter_mut().zip(correction).for_each(|(share, own)| *share += own);
            }
            if row.iter().any(|share| share.is_nan()) {
                return Err(Error::ScoresNotFinite { router: router.to_string() }.into());
            }
            if let Some((size, used)) = self.groups {
                leave_groups(&mut row, size, used);
            }
            best(&row, self.per_token, &mut order);
            chosen.extend_from_slice(&order);
        }
        Ok(chosen)
    }
}

/// Leaves only the experts of the `used` best groups.
fn leave_groups(shares: &mut [f64], size: usize, used: usize) {
    let two_best = |group: &[f64]| {
        let (mut first, mut second) = (f64::NEG_INFINITY, f64::NEG_INFINITY);
        for &share in group {
            if share > first {
                (first, second) = (share, first);
            } else {
                second = second.max(share);
            }
        }
        first + second
    };
    let sums: Vec<f64> = shares.chunks(size).map(two_best).collect();
    let mut kept = Vec::new();
    best(&sums, used, &mut kept);
    for (group, shares) in (0u32..).zip(shares.chunks_mut(size)) {
        if !kept.contains(&group) {
            shares.fill(f64::NEG_INFINITY);
        }
    }
}

/// Sets `order` to the places of the `count` largest numbers, the largest first, the first of equal ones.
fn best(numbers: &[f64], count: usize, order: &mut Vec<u32>) {
    let better = |a: &u32, b: &u32| numbers[*b as usize].total_cmp(&numbers[*a as usize]).then(a.cmp(b));
    order.clear();
    order.extend(0..numbers.len() as u32);
    if (1..numbers.len()).contains(&count) {
        order.select_nth_unstable_by(count - 1, better);
    }
    order.truncate(count);
    order.sort_unstable_by(better);
}
