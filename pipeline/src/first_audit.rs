//! The audit of the first step's gradients, over all stages.

use std::sync::Arc;

use comm::{Communicator, all_gather_object};
use serde::{Deserialize, Serialize};
use training::{AuditConfig, OnMissingGradient};

use crate::Result;
use crate::failure_reports::FailureReports;
use crate::groups::Groups;

/// Audits once, with what the ranks of a pipeline know together.
pub(crate) struct FirstAudit {
    config: AuditConfig,
    /// The ranks of the pipeline, if there are several. A group of its own: a rank that fails in the same step closes it, so that
    /// the others do not wait for that rank.
    stages: Option<Arc<dyn Communicator>>,
    /// Whether this rank, alone of all, warns.
    is_speaker: bool,
}

/// A parameter after the first step.
#[derive(Serialize, Deserialize)]
pub(crate) struct Audited {
    pub(crate) stage: usize,
    pub(crate) name: String,
    pub(crate) dims: Vec<usize>,
    pub(crate) has_gradient: bool,
    /// Whether variables of other stages are the same parameter.
    pub(crate) is_tied: bool,
}

impl FirstAudit {
    /// Creates its group. Every rank must call it.
    pub(crate) fn new(groups: &Groups, config: &AuditConfig) -> Result<Option<Self>> {
        if config.on_missing == OnMissingGradient::Ignore {
            return Ok(None);
        }
        let ranks: Vec<usize> = (0..groups.pp.world_size()).collect();
        let stages = (ranks.len() > 1).then(|| groups.pp.subgroup(&ranks)).transpose()?;
        Ok(Some(Self { config: config.clone(), stages, is_speaker: groups.is_first() }))
    }

    /// Warns or fails because of parameters without a gradient. `own` are the parameters of this rank's stages; `cut` is the last
    /// of its stages whose input has no gradient. Every rank must call it.
    pub(crate) fn act(&self, own: Vec<Audited>, cut: Option<usize>, failures: &FailureReports) -> Result<()> {
        let all = match &self.stages {
            Some(stages) => {
                all_gather_object(&**stages, &(own, cut)).map_err(|error| failures.cause(error))?
            }
            None => vec![(own, cut)],
        };
        let cut = all.iter().filter_map(|(_, cut)| *cut).max().unwrap_or(0);
        let mut all: Vec<Audited> = all.into_iter().flat_map(|(parameters, _)| parameters).collect();
        all.sort_by_key(|parameter| parameter.stage);
        // What the stages before a cut get are zeros.
        let is_reached = |of: &Audited| of.has_gradient && (of.is_tied || of.stage >= cut);
        let parameters = all.iter().map(|of| (of.name.as_str(), of.dims.as_slice(), is_reached(of)));
        Ok(self.config.act("Pipeline", self.is_speaker, parameters)?)
    }
}
