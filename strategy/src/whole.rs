//! Whole parameters on the first rank, one at a time; files of the whole model, and back.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation};
use training::internal::TensorWriter;
use training::{FileError, TensorFile};

use crate::agreement::gather;
use crate::checkpoint::{NamedPart, Part};
use crate::{DistributedModel, Piece, Region, Result, all_agree};

/// A parameter or buffer, and the ranks that hold its elements.
struct Whole {
    name: String,
    dtype: DType,
    dims: Vec<usize>,
    /// Ranks, as [`gather`] orders them, and their elements.
    held: Vec<(usize, Region)>,
}

/// See [`DistributedModel::visit_full`].
pub(crate) fn visit<M: DistributedModel + ?Sized>(
    model: &M,
    mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>,
) -> std::result::Result<(), M::Error> {
    let (pieces, all) = describe(model)?;
    let mut failed = None;
    bring(model, &pieces, &all, &mut |name, tensor| {
        // The other ranks send their elements in any case.
        if failed.is_none() {
            failed = visit(name, tensor).err();
        }
    })?;
    let visited: Result<()> = failed.map_or(Ok(()), |error| Err(error.into()));
    Ok(all_agree(model.groups(), visited)?)
}

/// See [`DistributedModel::save_full`].
pub(crate) fn save<M: DistributedModel + ?Sized>(
    model: &M,
    path: &Path,
) -> std::result::Result<(), M::Error> {
    let (pieces, all) = describe(model)?;
    let ties: BTreeMap<String, String> = model.ties().into_iter().collect();
    let mut tensors = Vec::new();
    for Whole { name, dtype, dims, .. } in &all {
        let tied = ties.iter().filter(|(_, root)| *root == name).map(|(tied, _)| tied);
        let names = std::iter::once(name).chain(tied);
        tensors.extend(names.map(|name| (name.clone(), *dtype, dims.clone())));
    }
    // Widest dtypes first, so that all tensors are aligned.
    tensors.sort_by_cached_key(|(name, dtype, _)| (Reverse(dtype.size_in_bytes()), name.clone()));
    let is_first = model.groups().iter().all(|group| group.rank() == 0);
    let mut writer = is_first.then(|| TensorWriter::begin(path, &tensors));
    bring(model, &pieces, &all, &mut |name, tensor| {
        let place = tensors.iter().position(|(known, ..)| known == name);
        if let (Some(Ok(file)), Some(place)) = (&mut writer, place)
            && let Err(error) = file.write(place, &tensor)
        {
            writer = Some(Err(error));
        }
    })?;
    let written = writer.map_or(Ok(()), |file| file.and_then(TensorWriter::finish));
    let written: Result<()> = written.map_err(|error| FileError::write(path, error).into());
    Ok(all_agree(model.groups(), written)?)
}

/// See [`DistributedModel::load_full`].
pub(crate) fn load<M: DistributedModel + ?Sized>(
    model: &M,
    path: &Path,
) -> std::result::Result<(), M::Error> {
    let pieces = all_agree(model.groups(), model.pieces())?;
    let own: Vec<String> =
        pieces.iter().map(|piece| piece.name.clone()).chain(model.ties().into_keys()).collect();
    let names: HashSet<String> = gather(&model.groups(), own)?.into_iter().flatten().collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let file: TensorFile = all_agree::<_, crate::Error>(model.groups(), open(path, &pieces, &names))?;
    let set = model.replace(|| Ok(pieces.iter().try_for_each(|piece| set(&file, piece))?));
    all_agree(model.groups(), set)
}

/// Opens a file, which must match the model.
fn open(path: &Path, pieces: &[Piece], names: &[&str]) -> Result<TensorFile> {
    let file = TensorFile::open(path)?;
    for piece in pieces.iter().filter(|piece| !piece.is_buffer || file.has(&piece.name)) {
        let (own, found) = (piece.var.dtype(), file.dtype(&piece.name));
        let found = found.filter(|found| piece.is_buffer && found.is_float() && own.is_float());
        file.check(&piece.name, &piece.region.dims, found.unwrap_or(own))?;
    }
    file.only_of_model(names)?;
    Ok(file)
}

fn set(file: &TensorFile, piece: &Piece) -> Result<()> {
    if piece.is_buffer && !file.has(&piece.name) {
        return Ok(());
    }
    let elements: Vec<_> = piece.region.elements().collect();
    let values = piece.padded(file.read_ranges(&piece.name, &elements)?)?;
    Ok(piece.var.set(&values.to_dtype(piece.var.dtype())?.to_device(piece.var.device())?)?)
}

/// Returns this rank's pieces; and the parameters of all ranks, in one order on every rank.
fn describe<M: DistributedModel + ?Sized>(
    model: &M,
) -> std::result::Result<(Vec<Piece>, Vec<Whole>), M::Error> {
    model.check()?;
    let pieces = all_agree(model.groups(), model.pieces())?;
    let writes = pieces.iter().filter(|piece| model.copy().number == 0 && piece.is_described());
    let own: Vec<NamedPart> = writes
        .map(|piece| {
            let dtype = piece.var.dtype().as_str().to_string();
            (piece.name.clone(), piece.region.dims.clone(), dtype, Part::of("", &piece.region))
        })
        .collect();
    let mut all: Vec<Whole> = Vec::new();
    for (rank, parts) in gather(&model.groups(), own)?.into_iter().enumerate() {
        for (name, dims, dtype, part) in parts {
            let held = (rank, part.region(&dims));
            match all.iter_mut().find(|whole| whole.name == name) {
                Some(whole) => whole.held.push(held),
                None => {
                    let dtype: DType = dtype.parse().map_err(|_| {
                        crate::Error::invalid("a dtype", &dtype, "this is a mistake in girandole")
                    })?;
                    all.push(Whole { name, dtype, dims, held: vec![held] });
                }
            }
        }
    }
    Ok((pieces, all))
}

/// Passes each parameter to `receive` on the first rank, and those that are tied to it under their names.
fn bring<M: DistributedModel + ?Sized>(
    model: &M,
    pieces: &[Piece],
    all: &[Whole],
    receive: &mut dyn FnMut(&str, Tensor),
) -> Result<()> {
    let groups = model.groups();
    let ties: BTreeMap<String, String> = model.ties().into_iter().collect();
    let device = pieces.first().map_or(Device::Cpu, |piece| piece.var.device().clone());
    for whole in all {
        let own = pieces.iter().find(|piece| piece.is_first && piece.name == whole.name);
        if let Some(tensor) = whole.bring(&groups, own, &device)? {
            for (tied, _) in ties.iter().filter(|(_, root)| **root == whole.name) {
                receive(tied, tensor.clone());
            }
            receive(&whole.name, tensor);
        }
    }
    Ok(())
}

impl Whole {
    /// Sends this rank's elements towards the first rank, along one group after the other, and returns the whole there.
    fn bring(
        &self,
        groups: &[&dyn Communicator],
        own: Option<&Piece>,
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let place: Vec<usize> = groups.iter().map(|group| group.rank()).collect();
        let mut parts: Vec<(&Region, Tensor)> = Vec::new();
        for (rank, region) in self.held.iter().filter(|(_, region)| !region.is_empty()) {
            let holder: Vec<usize> = groups
                .iter()
                .scan(*rank, |rest, group| {
                    let place = *rest % group.world_size();
                    *rest /= group.world_size();
                    Some(place)
                })
                .collect();
            let mut tensor = None;
            if let Some(own) = own.filter(|_| holder == place) {
                let var = own.var.as_detached_tensor();
                tensor = Some(var.flatten_all()?.narrow(0, 0, region.len())?);
            }
            for (axis, group) in groups.iter().enumerate() {
                let is_on_the_way =
                    place[..axis].iter().all(|place| *place == 0) && place[axis + 1..] == holder[axis + 1..];
                if holder[axis] == 0 || !is_on_the_way {
                    continue;
                }
                if place[axis] == holder[axis] {
                    if let Some(tensor) = tensor.take() {
                        group.run(Operation::Send { tensor: tensor.force_contiguous()?, to: 0 })?;
                    }
                } else if place[axis] == 0 {
                    let room = Tensor::zeros(region.len(), self.dtype, device)?;
                    group.run(Operation::Recv { tensor: room.clone(), from: holder[axis] })?;
                    tensor = Some(room);
                }
            }
            parts.extend(tensor.map(|tensor| (region, tensor)));
        }
        if place.iter().any(|place| *place > 0) {
            return Ok(None);
        }
        let empty = Tensor::zeros(0, self.dtype, device)?;
        Ok(Some(assembled(&parts, empty)?.reshape(&self.dims[..])?))
    }
}

/// Puts the elements of regions that together are a whole tensor in its order; `empty` is returned if there are none.
pub(crate) fn assembled(parts: &[(&Region, Tensor)], empty: Tensor) -> candle_core::Result<Tensor> {
    let mut runs = Vec::new();
    for (region, tensor) in parts {
        for (elements, start) in region.ranges() {
            runs.push((elements.start, tensor.narrow(0, start, elements.len())?));
        }
    }
    runs.sort_by_key(|(start, _)| *start);
    let runs: Vec<Tensor> = runs.into_iter().map(|(_, run)| run).collect();
    match &runs[..] {
        [] => Ok(empty),
        [one] => Ok(one.clone()),
        several => Tensor::cat(several, 0),
    }
}
