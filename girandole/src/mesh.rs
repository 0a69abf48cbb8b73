//! The mesh of a layout: the layout is read from text, and checked against the number of ranks.

use std::str::FromStr;
use std::sync::Arc;

use comm::{Communicator, Mesh};

use crate::{Error, Layout, Result};

impl Layout {
    /// Checks that this is a layout for `ranks` ranks.
    ///
    /// # Errors
    /// An axis of size 0; a product that is not the number of ranks. The error then suggests layouts with
    /// that product.
    pub fn check(&self, ranks: usize) -> Result<()> {
        let refuse = |help: String| Err(Error::invalid("the layout", self, help));
        if let Some((name, _)) = self.axes().into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("give {name} at least 1"));
        }
        if self.ranks() != ranks {
            let fitting = self.fitting(ranks).iter().map(Self::to_string).collect::<Vec<_>>().join("; ");
            return refuse(format!(
                "its product is {}, and the job has {ranks} ranks: products of {ranks} are for example {fitting}",
                self.ranks()
            ));
        }
        Ok(())
    }

    /// Returns similar layouts for `ranks` ranks, with one axis changed.
    fn fitting(&self, ranks: usize) -> Vec<Self> {
        let fit = |axis: &str| {
            let mut fitted = *self;
            let size = fitted.size_mut(axis)?;
            *size = 1;
            let others = fitted.ranks();
            *fitted.size_mut(axis)? = ranks / others;
            (fitted.ranks() == ranks).then_some(fitted)
        };
        let mut found: Vec<Self> = Vec::new();
        let alone = [Self::copies(ranks), Self { shard: ranks, ..Self::default() }];
        for layout in ["dp", "shard", "tp", "pp", "cp", "ep", "far"].into_iter().filter_map(fit).chain(alone)
        {
            if !found.contains(&layout) {
                found.push(layout);
            }
        }
        found
    }

    /// Creates the mesh of the ranks of `comm`, without an axis `far` if there are no such groups. Call on every rank.
    ///
    /// # Errors
    /// Those of [`check`](Self::check); failures of communication.
    pub fn mesh(&self, comm: Arc<dyn Communicator>) -> Result<Mesh> {
        self.check(comm.world_size())?;
        let axes = self.axes();
        Ok(Mesh::new(comm, if self.far == 1 { &axes[1..] } else { &axes })?)
    }
}

impl FromStr for Layout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut layout = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        let refuse = |help: &str| Err(Error::invalid("a layout", format!("{text:?}"), help));
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((name, size)) = part.split_once('=') else {
                return refuse("give axes with their sizes, such as pp=2,shard=2,tp=2");
            };
            let (name, size) = (name.trim(), size.trim());
            if seen.contains(&name) {
                return refuse("give each axis once");
            }
            seen.push(name);
            let Some(axis) = layout.size_mut(name) else {
                return refuse("the axes are far, pp, dp, shard, cp, ep and tp (shard is FSDP, dp is DDP)");
            };
            match size.parse() {
                Ok(number) if number > 0 => *axis = number,
                _ => return refuse("each size is a whole number of at least 1"),
            }
        }
        Ok(layout)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Layout;

    #[test]
    fn what_does_not_fit_is_told_what_would() {
        let line = |text: &str, ranks| text.parse::<Layout>().unwrap().check(ranks).unwrap_err().to_string();
        let said = line("pp=2,tp=2", 8);
        assert!(said.contains("its product is 4, and the job has 8 ranks"), "{said}");
        assert!(said.contains("pp=2,dp=2,tp=2") && said.contains("pp=2,shard=2,tp=2"), "{said}");
        assert!(line("tp=3", 4).contains("are for example tp=4"), "{}", line("tp=3", 4));
        for text in ["pp", "pp=x", "pp=0", "zp=2", "pp=2,pp=2", "pp=-1"] {
            assert!(text.parse::<Layout>().is_err(), "{text}");
        }
        assert_eq!("".parse::<Layout>().unwrap(), Layout::default());
        assert_eq!(Layout::default().to_string().parse::<Layout>().unwrap(), Layout::default());
    }
}
