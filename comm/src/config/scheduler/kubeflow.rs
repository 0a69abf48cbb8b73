//! Kubeflow's training operator: variables of a PyTorchJob's pod. They count pods, `RANK` included.

use super::{LaunchedRank, SchedulerInfo};
use crate::config::variables::Variables;
use crate::{Error, Result};

/// Reads the operator's variables, where each pod is one rank and there is no launcher in between.
pub(super) fn find(env: &Variables<'_>) -> Result<Option<SchedulerInfo>> {
    let launched = env.text("LOCAL_RANK")?.is_some();
    if launched || env.text("PET_NNODES")?.is_none() {
        return Ok(None);
    }
    if let Some(ranks) = env.text("PET_NPROC_PER_NODE")?.filter(|ranks| ranks.trim() != "1") {
        let help = "this pod is to be more than one rank, or as many as it has processors: start the command with \
                    `girandole launch -- girandole ...`, which reads these variables";
        return Err(Error::invalid("PET_NPROC_PER_NODE", ranks, help));
    }
    let world_size = env.required("PET_NNODES", "the number of pods, from 1")?;
    let rank_from = if env.text("PET_NODE_RANK")?.is_some() { "PET_NODE_RANK" } else { "RANK" };
    let rank = env.required(rank_from, "the number of this pod, from 0")?;
    Ok(Some(SchedulerInfo {
        place: LaunchedRank {
            rank,
            world_size,
            local_rank: Some(0),
            local_world_size: Some(1),
            node_rank: Some(rank),
        },
        rank_from,
        world_size_from: "PET_NNODES",
        host: env.host("PET_MASTER_ADDR")?.ok_or("PET_MASTER_ADDR is not set either: give the host of pod 0"),
        port_from: Some("PET_MASTER_PORT"),
        job: Some("kubeflow".into()),
    }))
}
