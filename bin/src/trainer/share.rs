//! Rank 0 reads a checkpoint, and all ranks get it: the folder need not be on every host.

use std::collections::{BTreeMap, HashMap};
use std::str::FromStr;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, broadcast_object};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::Checkpoint;

use crate::error::Result;

/// All of a checkpoint but its numbers.
#[derive(Default, Serialize, Deserialize)]
struct Outline {
    epoch: u64,
    step: u64,
    sampler: Value,
    extra: Value,
    /// Sets of tensors, by name.
    sets: Vec<(String, Vec<TensorOutline>)>,
}

/// Name, dtype and shape.
type TensorOutline = (String, String, Vec<usize>);

impl Outline {
    fn of(checkpoint: &Checkpoint) -> Self {
        let set = |(name, tensors): (&String, &HashMap<String, Tensor>)| {
            let mut outlines: Vec<_> = tensors
                .iter()
                .map(|(name, tensor)| {
                    (name.clone(), tensor.dtype().as_str().to_string(), tensor.dims().to_vec())
                })
                .collect();
            outlines.sort();
            (name.clone(), outlines)
        };
        Self {
            epoch: checkpoint.epoch,
            step: checkpoint.step,
            sampler: checkpoint.sampler.clone(),
            extra: checkpoint.extra.clone(),
            sets: checkpoint.tensors.iter().map(set).collect(),
        }
    }
}

/// Gives every rank what rank 0 has.
///
/// # Cost
/// A broadcast for each tensor, and four more.
pub(super) fn share(comm: &dyn Communicator, own: Option<Checkpoint>) -> Result<Option<Checkpoint>> {
    if comm.world_size() == 1 {
        return Ok(own);
    }
    let Some(outline) = broadcast_object(comm, &own.as_ref().map(Outline::of), 0)? else { return Ok(None) };
    let mut tensors = BTreeMap::new();
    for (set, outlines) in outline.sets {
        let mut all = HashMap::new();
        for (name, dtype, dims) in outlines {
            let known = own.as_ref().and_then(|own| own.tensors.get(&set)?.get(&name)).cloned();
            let tensor = match known {
                Some(tensor) => tensor,
                None => Tensor::zeros(
                    dims,
                    DType::from_str(&dtype).map_err(candle_core::Error::msg)?,
                    &Device::Cpu,
                )?,
            };
            if tensor.elem_count() > 0 {
                comm.run(Operation::Broadcast { tensor: tensor.clone(), root: 0 })?;
            }
            all.insert(name, tensor);
        }
        tensors.insert(set, all);
    }
    let Outline { epoch, step, sampler, extra, .. } = outline;
    Ok(Some(Checkpoint { epoch, step, sampler, extra, tensors }))
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    #[test]
    fn every_rank_gets_what_rank_0_has() {
        let checkpoint = || {
            let tensor = |value: f32, len: usize| Tensor::full(value, len, &Device::Cpu).unwrap();
            let model = HashMap::from([("w".to_string(), tensor(2.0, 3)), ("b".to_string(), tensor(1.0, 0))]);
            let step = Tensor::new(7i64, &Device::Cpu).unwrap();
            let optimizer = HashMap::from([("w.step".to_string(), step)]);
            let tensors = [("model".to_string(), model), ("optimizer".to_string(), optimizer)].into();
            Checkpoint { epoch: 1, step: 2, sampler: 3.into(), extra: "x".into(), tensors }
        };
        let shared = Local::run(3, |comm| {
            let own = (comm.rank() == 0).then(checkpoint);
            let shared =
                share(comm, own).map_err(|error| candle_core::Error::msg(error.to_string()))?.unwrap();
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
        let none = Local::run(2, |comm| Ok(share(comm, None).is_ok_and(|shared| shared.is_none())));
        assert_eq!(none.unwrap(), [true; 2]);
    }
}
