//! Layouts: how many ranks each kind of parallelism uses.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The size of each axis of the device mesh. Their product is the number of ranks; an axis that is not used has size 1.
///
/// Ranks along `tp` are neighbours, then those along `ep`, `cp` and `shard`: the axes with most communication are closest together.
///
/// ```
/// use girandole::Layout;
///
/// let layout: Layout = "pp=2,shard=2".parse()?;
/// assert_eq!((layout.pp, layout.shard, layout.tp), (2, 2, 1));
/// assert_eq!((layout.ranks(), layout.to_string()), (4, "pp=2,shard=2".to_string()));
/// assert!(layout.check(8).is_err());
/// # Ok::<(), girandole::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Groups of ranks that train on their own and average rarely ([`FarConfig`](crate::FarConfig)); the other axes divide each group.
    #[serde(default = "one")]
    pub far: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Copies of the model.
    pub dp: usize,
    /// Ranks that each keep a shard of every parameter (FSDP).
    pub shard: usize,
    /// Ranks that divide each row by position (context parallelism). Parameters are copies along it, or with `shard` divided along
    /// both together.
    pub cp: usize,
    /// Ranks that each have some of the experts of a model (expert parallelism), and different rows. All other parameters are copies
    /// along it.
    pub ep: usize,
    /// Ranks that divide each layer (tensor parallelism).
    pub tp: usize,
}

fn one() -> usize {
    1
}

impl Default for Layout {
    /// One rank.
    fn default() -> Self {
        Self { far: 1, pp: 1, dp: 1, shard: 1, cp: 1, ep: 1, tp: 1 }
    }
}

impl Layout {
    /// Returns a layout of `ranks` copies.
    pub fn copies(ranks: usize) -> Self {
        Self { dp: ranks, ..Self::default() }
    }

    /// Returns the names and sizes of the axes, the outermost first.
    pub fn axes(&self) -> [(&'static str, usize); 7] {
        let Self { far, pp, dp, shard, cp, ep, tp } = *self;
        [("far", far), ("pp", pp), ("dp", dp), ("shard", shard), ("cp", cp), ("ep", ep), ("tp", tp)]
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes().iter().fold(1, |product: usize, (_, size)| product.saturating_mul(*size))
    }

    /// Returns the number of ranks that process different rows of a batch.
    pub fn data_ranks(&self) -> usize {
        self.far.saturating_mul(self.dp).saturating_mul(self.shard).saturating_mul(self.ep)
    }

    /// The layout within each of the groups of `far`.
    #[must_use]
    pub fn of_group(&self) -> Self {
        Self { far: 1, ..*self }
    }

    /// The layout of the parameters: ranks along `cp`, which have the same rows, are shards of them if there are any, otherwise
    /// copies. Ranks have the same numbers in it.
    #[must_use]
    pub fn of_parameters(&self) -> Self {
        match self.shard {
            1 => Self { dp: self.dp.saturating_mul(self.cp), cp: 1, ..*self },
            _ => Self { shard: self.shard.saturating_mul(self.cp), cp: 1, ..*self },
        }
    }

    /// Whether training can continue in this layout when a rank is lost: another rank holds the same part of the model, or
    /// checkpoints do. `pp`, `cp`, `ep` and `tp` keep their sizes. With `far` the whole group of the rank is lost, and the others go on.
    pub fn survives_loss(&self, has_checkpoints: bool) -> bool {
        self.far > 1 || self.dp > 1 || (self.shard > 1 && has_checkpoints)
    }

    /// Returns the layout in which most of `ranks` ranks can continue, with batches of so many rows in so many
    /// micro-batches: with the same `pp`, `cp`, `ep` and `tp`, and smaller `dp` and `shard`. If possible, a rank holds no more than
    /// before, and if there were copies of the model, there still are. With `far`, fewer groups of the same size, at least one. `None` if there
    /// are too few ranks.
    ///
    /// ```
    /// let layout: girandole::Layout = "dp=2,shard=2,tp=2".parse()?;
    /// // 7 of 8 ranks are left; one of them is not needed.
    /// assert_eq!(layout.for_fewer(7, 16, 1), Some("shard=3,tp=2".parse()?));
    /// # Ok::<(), girandole::Error>(())
    /// ```
    pub fn for_fewer(&self, ranks: usize, batch_size: usize, micro_batches: usize) -> Option<Self> {
        self.fewer(ranks, |data| self.fits(data, batch_size, micro_batches))
    }

    /// Like [`for_fewer`](Self::for_fewer), but if a layout has all of the ranks, that one, even if there are no copies of the
    /// model in it: where new ranks may join, one that leaves would be missing when they have come.
    ///
    /// ```
    /// let layout: girandole::Layout = "dp=3,shard=2".parse()?;
    /// assert_eq!(layout.for_fewer(5, 16, 1), Some("dp=2,shard=2".parse()?));
    /// assert_eq!(layout.for_all(5, 16, 1), Some("shard=5".parse()?));
    /// # Ok::<(), girandole::Error>(())
    /// ```
    pub fn for_all(&self, ranks: usize, batch_size: usize, micro_batches: usize) -> Option<Self> {
        let are_all = |data: usize| Self { dp: data, shard: 1, ..*self }.ranks() == ranks;
        self.fewer(ranks, |data| are_all(data) && self.fits(data, batch_size, micro_batches))
            .or_else(|| self.for_fewer(ranks, batch_size, micro_batches))
    }

    /// Whether a batch can be divided if `dp` and `shard` are so many ranks together.
    fn fits(&self, data: usize, batch_size: usize, micro_batches: usize) -> bool {
        let data = data * self.ep;
        match self.pp {
            1 => batch_size >= data * micro_batches,
            // The micro-batches of a pipeline are equally large.
            _ => batch_size.is_multiple_of(data * micro_batches),
        }
    }

    fn fewer(&self, ranks: usize, fits: impl Fn(usize) -> bool) -> Option<Self> {
        if self.far > 1 {
            let far = (ranks / self.of_group().ranks()).min(self.far);
            return (far > 0).then_some(Self { far, ..*self });
        }
        let most = ranks / Self { dp: 1, shard: 1, ..*self }.ranks();
        let of = |data: usize| {
            let shard = (self.shard..=data).find(|shard| data.is_multiple_of(*shard)).unwrap_or(data);
            Self { dp: data / shard, shard, ..*self }
        };
        let fitting: Vec<Self> = (1..=most).rev().filter(|data| fits(*data)).map(of).collect();
        let with_copies = fitting.iter().find(|layout| layout.dp > 1).filter(|_| self.dp > 1);
        with_copies.or(fitting.first()).copied()
    }

    pub(crate) fn size_mut(&mut self, axis: &str) -> Option<&mut usize> {
        Some(match axis {
            "far" => &mut self.far,
            "pp" => &mut self.pp,
            "dp" => &mut self.dp,
            "shard" => &mut self.shard,
            "cp" => &mut self.cp,
            "ep" => &mut self.ep,
            "tp" => &mut self.tp,
            _ => return None,
        })
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used: Vec<_> = self.axes().into_iter().filter(|(_, size)| *size != 1).collect();
        match &used[..] {
            [] => f.write_str("dp=1"),
            used => {
                let axes: Vec<_> = used.iter().map(|(name, size)| format!("{name}={size}")).collect();
                f.write_str(&axes.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Layout;

    #[test]
    fn fewer_ranks_hold_no_more_if_possible() {
        let fewer = |layout: &str, ranks, batch: usize| {
            let layout = layout.parse::<Layout>().unwrap();
            layout.fewer(ranks, |data| batch.is_multiple_of(data)).map(|layout| layout.to_string())
        };
        for (layout, ranks, batch, expected) in [
            ("dp=4", 3, 12, Some("dp=3")),
            ("dp=2,shard=2", 3, 12, Some("shard=3")),
            ("dp=2,shard=2", 3, 8, Some("shard=2")),
            ("dp=2,shard=2", 1, 8, Some("dp=1")),
            ("dp=2,shard=4", 6, 12, Some("shard=6")),
            ("dp=3,shard=2", 4, 12, Some("dp=2,shard=2")),
            ("dp=3,shard=2", 5, 60, Some("dp=2,shard=2")),
            ("dp=3,shard=4", 11, 110, Some("dp=2,shard=5")),
            ("shard=8", 7, 7, Some("shard=7")),
            ("dp=2,tp=2", 3, 8, Some("tp=2")),
            ("pp=2,shard=2,tp=2", 7, 8, Some("pp=2,tp=2")),
            ("pp=2,shard=2,tp=2", 3, 8, None),
            ("dp=3,cp=2", 5, 12, Some("dp=2,cp=2")),
            ("cp=2", 1, 8, None),
            ("dp=3,ep=2", 5, 12, Some("dp=2,ep=2")),
            ("shard=2,ep=3", 5, 12, Some("ep=3")),
            ("ep=2", 1, 8, None),
            ("far=3,dp=2", 5, 12, Some("far=2,dp=2")),
            ("far=2", 1, 8, Some("dp=1")),
            ("far=2,tp=2", 3, 8, Some("tp=2")),
            ("far=2,tp=2", 1, 8, None),
        ] {
            assert_eq!(fewer(layout, ranks, batch).as_deref(), expected, "{layout} on {ranks}");
        }
    }
}
