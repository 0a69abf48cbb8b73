//! Process groups of a rank: its pipeline, the ranks that share its layers, and the ranks with the same stages.

use std::sync::Arc;

use comm::{Communicator, all_gather_object, broadcast_object};
use serde::Serialize;
use serde::de::DeserializeOwned;
use strategy::ParameterGroups;

use crate::{Error, PipelineConfig, Result};

/// The groups, as far as they are used.
pub(crate) struct Groups {
    pub(crate) pp: Arc<dyn Communicator>,
    pub(crate) tp: Option<Arc<dyn Communicator>>,
    pub(crate) averaged_over: Option<ParameterGroups>,
}

impl Groups {
    pub(crate) fn new(pp: Arc<dyn Communicator>, config: &PipelineConfig) -> Self {
        Self { pp, tp: config.tp.clone(), averaged_over: config.averaged_over.clone() }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &dyn Communicator> {
        [self.tp.as_ref(), self.same_stages()].into_iter().flatten().chain([&self.pp]).map(Arc::as_ref)
    }

    /// All ranks with the same stages.
    pub(crate) fn same_stages(&self) -> Option<&Arc<dyn Communicator>> {
        self.averaged_over.as_ref().map(ParameterGroups::all)
    }

    /// Returns true on exactly one of all ranks.
    pub(crate) fn is_first(&self) -> bool {
        self.all().all(|group| group.rank() == 0)
    }

    /// Returns the first rank's value. Every rank must call it.
    pub(crate) fn broadcast_from_first<T: Serialize + DeserializeOwned>(&self, mut own: T) -> Result<T> {
        for group in self.all() {
            own = broadcast_object(group, &own, 0)?;
        }
        Ok(own)
    }

    /// Returns the values of all ranks, in the same order on all. Every rank must call it.
    pub(crate) fn gather<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>> {
        let mut all = vec![own];
        for group in self.all() {
            all = all_gather_object(group, &all)?.into_iter().flatten().collect();
        }
        Ok(all)
    }

    /// Returns this rank's result if no rank has failed; otherwise an error on every rank. Every rank must call it.
    pub(crate) fn all_agree<T>(&self, own: Result<T>) -> Result<T> {
        strategy::all_agree_with(self.all(), own, peer_failed)
    }
}

/// The error of the other ranks, where a rank has failed.
pub(crate) fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFailed { rank, reason }
}
