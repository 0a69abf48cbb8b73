//! Which ranks have replicas of a parameter.

use std::fmt;
use std::sync::Arc;

use comm::{Communicator, Result};

/// The ranks over which the gradient of a parameter is averaged: those that hold the same elements of it. They are the same ranks
/// for all parameters, except for those of experts that are divided over ranks.
#[derive(Clone)]
pub struct ReplicaGroups {
    all: Arc<dyn Communicator>,
    fewer: Option<(Arc<dyn Communicator>, IsFewer)>,
}

type IsFewer = Arc<dyn Fn(&str) -> bool + Send + Sync>;

impl ReplicaGroups {
    /// All parameters have replicas on all ranks of a group.
    pub fn of(all: Arc<dyn Communicator>) -> Self {
        Self { all, fewer: None }
    }

    /// Those parameters whose names `is_of` says to be so have replicas on the ranks of `fewer` only, which are some of all ranks.
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

    /// The group of those parameters that all ranks have.
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

    /// The place in [`groups`](Self::groups) of a parameter's group.
    pub fn place_of(&self, parameter: &str) -> usize {
        usize::from(self.fewer.as_ref().is_some_and(|(_, is_of)| is_of(parameter)))
    }

    /// The group at a place: a [`place_of`](Self::place_of) a parameter.
    pub fn group(&self, place: usize) -> &Arc<dyn Communicator> {
        match &self.fewer {
            Some((fewer, _)) if place > 0 => fewer,
            _ => &self.all,
        }
    }
}

impl fmt::Debug for ReplicaGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.groups()).finish()
    }
}
