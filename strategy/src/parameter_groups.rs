//! Of each parameter, a group of ranks.

use std::fmt;
use std::sync::Arc;

use comm::{Communicator, Result};

/// Of each parameter, a group of ranks: those over which its gradient is averaged, or those that hold the same shard of it. It is the
/// same group for all parameters, except for those of experts that are divided over ranks.
#[derive(Clone)]
pub struct ParameterGroups {
    all: Arc<dyn Communicator>,
    fewer: Option<(Arc<dyn Communicator>, IsFewer)>,
}

type IsFewer = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl ParameterGroups {
    /// The same group for all parameters.
    pub fn of(all: Arc<dyn Communicator>) -> Self {
        Self { all, fewer: None }
    }

    /// Of the parameters for whose names `is_of` returns true, the group is `fewer`: some of the ranks of all others.
    #[must_use]
    pub fn with_fewer(
        self,
        fewer: Arc<dyn Communicator>,
        is_of: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { fewer: Some((fewer, Arc::new(is_of))), ..self }
    }

    /// Creates groups of the same ranks, which end when their owner drops them. Every rank must call it.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn duplicate(&self) -> Result<Self> {
        let duplicate = |comm: &Arc<dyn Communicator>| match comm.world_size() {
            1 => Ok(comm.clone()),
            ranks => comm.subgroup(&(0..ranks).collect::<Vec<_>>()),
        };
        let all = duplicate(&self.all)?;
        let fewer = match &self.fewer {
            Some((comm, is_of)) => Some((duplicate(comm)?, is_of.clone())),
            None => None,
        };
        Ok(Self { all, fewer })
    }

    /// The group of all parameters but those of [`with_fewer`](Self::with_fewer).
    pub fn all(&self) -> &Arc<dyn Communicator> {
        &self.all
    }

    /// The groups: that of all ranks, and if there is one, that of fewer ranks.
    pub fn groups(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        std::iter::once(&self.all).chain(self.fewer.iter().map(|(comm, _)| comm))
    }

    /// Returns the [`groups`](Self::groups).
    pub fn into_groups(self) -> impl Iterator<Item = Arc<dyn Communicator>> {
        std::iter::once(self.all).chain(self.fewer.map(|(comm, _)| comm))
    }

    /// The index in [`groups`](Self::groups) of a parameter's group.
    pub fn index_of(&self, parameter: &str) -> usize {
        usize::from(self.fewer.as_ref().is_some_and(|(_, is_of)| is_of(parameter)))
    }

    /// The group of an index: an [`index_of`](Self::index_of) a parameter.
    pub fn group(&self, index: usize) -> &Arc<dyn Communicator> {
        match &self.fewer {
            Some((fewer, _)) if index > 0 => fewer,
            _ => &self.all,
        }
    }
}

impl fmt::Debug for ParameterGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.groups()).finish()
    }
}
