//! Broadcast of a checkpoint from one rank to all, since the folder need not exist on every host.

use std::collections::BTreeMap;

use candle_core::Tensor;
use comm::{Communicator, broadcast_object, broadcast_tensors};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::Checkpoint;

use crate::error::Result;

/// A checkpoint without the values of its tensors.
#[derive(Default, Serialize, Deserialize)]
struct Outline {
    epoch: u64,
    step: u64,
    sampler: Value,
    extra: Value,
    /// Names of the sets of tensors.
    sets: Vec<String>,
}

impl Outline {
    fn of(checkpoint: &Checkpoint) -> Self {
        let Checkpoint { epoch, step, sampler, extra, tensors } = checkpoint;
        let sets = tensors.keys().cloned().collect();
        Self { epoch: *epoch, step: *step, sampler: sampler.clone(), extra: extra.clone(), sets }
    }
}

/// Broadcasts the checkpoint of rank `root`. No rank's existing tensors are changed.
///
/// # Cost
/// One broadcast for each tensor, two for each set, and two more.
pub(super) fn share(
    comm: &dyn Communicator,
    own: Option<Checkpoint>,
    root: usize,
) -> Result<Option<Checkpoint>> {
    if comm.world_size() == 1 {
        return Ok(own);
    }
    let Some(outline) = broadcast_object(comm, &own.as_ref().map(Outline::of), root)? else {
        return Ok(None);
    };
    let mut of_own = own.map(|own| own.tensors).unwrap_or_default();
    let mut tensors = BTreeMap::new();
    for set in outline.sets {
        let mut of_set: Vec<(String, Tensor)> = of_own.remove(&set).unwrap_or_default().into_iter().collect();
        of_set.sort_by(|(one, _), (other, _)| one.cmp(other));
        tensors.insert(set, broadcast_tensors(comm, of_set, root)?.into_iter().collect());
    }
    let Outline { epoch, step, sampler, extra, .. } = outline;
    Ok(Some(Checkpoint { epoch, step, sampler, extra, tensors }))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use candle_core::Device;
    use comm::Local;

    use super::*;

    #[test]
    fn every_rank_gets_what_one_rank_has() {
        let checkpoint = || {
            let tensor = |value: f32, len: usize| Tensor::full(value, len, &Device::Cpu).unwrap();
            let model = HashMap::from([("w".to_string(), tensor(2.0, 3)), ("b".to_string(), tensor(1.0, 0))]);
            let step = Tensor::new(7i64, &Device::Cpu).unwrap();
            let optimizer = HashMap::from([("w.step".to_string(), step)]);
            let tensors = [("model".to_string(), model), ("optimizer".to_string(), optimizer)].into();
            Checkpoint { epoch: 1, step: 2, sampler: 3.into(), extra: "x".into(), tensors }
        };
        for root in 0..3 {
            let shared = Local::run(3, |comm| {
                let own = (comm.rank() == root).then(checkpoint);
                let shared = share(comm, own, root)
                    .map_err(|error| candle_core::Error::msg(error.to_string()))?
                    .unwrap();
                assert_eq!(
                    (shared.epoch, shared.step, shared.sampler, shared.extra),
                    (1, 2, 3.into(), "x".into())
                );
                let step = shared.tensors["optimizer"]["w.step"].to_scalar::<i64>()?;
                Ok((
                    shared.tensors["model"]["w"].to_vec1::<f32>()?,
                    shared.tensors["model"]["b"].elem_count(),
                    step,
                ))
            });
            assert_eq!(shared.unwrap(), vec![(vec![2.0; 3], 0, 7); 3]);
        }
        let none = Local::run(2, |comm| Ok(share(comm, None, 0).is_ok_and(|shared| shared.is_none())));
        assert_eq!(none.unwrap(), [true; 2]);
    }
}
