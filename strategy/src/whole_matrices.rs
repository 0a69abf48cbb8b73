//! Matrices of which ranks hold parts, each brought together on one rank.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use comm::{Communicator, Operation, Stats};
use training::internal::map_matrices;
use training::{Error as TrainingError, WholeMatrices};

use crate::agreement::gather;
use crate::checkpoint::{NamedPart, Part};
use crate::piece::padded;
use crate::whole::assembled;
use crate::{Piece, Region, Result, all_agree};

/// Matrices in any layout, for an optimizer that needs them whole ([`training::Muon`]): each has an owner, one of the ranks that hold
/// a part or a copy of it, on which it is computed with. Owners are chosen so that all ranks have about equal work.
///
/// # Cost
/// In each step, every element is sent once to its matrix' owner, unless that holds it, and the result to all others that hold
/// it: at most as much as a reduce-scatter and an all-gather; then a barrier. Memory for the matrices of which a rank is the owner.
///
/// # Source
/// Liu et al., "Muon is scalable for LLM training" (2025), section 2.3.
#[derive(Debug)]
pub struct OwnedMatrices {
    comm: Arc<dyn Communicator>,
    /// By name of this rank's variables.
    variables: HashMap<String, String>,
    /// In one order on all ranks.
    matrices: Vec<Matrix>,
    /// Place of each matrix in that order, by name: there may be tens of thousands, of experts.
    places: HashMap<String, usize>,
    /// In which numbers are sent.
    dtype: DType,
    device: Device,
}

/// A parameter, or several matrices in one.
#[derive(Debug)]
struct Matrix {
    name: String,
    dims: Vec<usize>,
    owner: usize,
    /// All ranks that hold elements of it.
    held: Vec<(usize, Region)>,
    /// Those of them that send theirs to the owner: together they have each element once.
    sources: Vec<(usize, Region)>,
}

impl OwnedMatrices {
    /// Describes the matrices of a model, on all ranks of `comm`: those of each rank's pieces for whose variables `is_matrix` is true.
    /// Call it on all of them, also on those that have none; and again when the ranks have changed.
    ///
    /// # Errors
    /// On every rank: a parameter with less than two dimensions; no matrix on any rank; failures of communication.
    pub fn new(
        comm: Arc<dyn Communicator>,
        pieces: &[Piece],
        is_matrix: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let own = || pieces.iter().filter(|piece| !piece.is_buffer && is_matrix(&piece.var_name));
        let described: Vec<NamedPart> = own()
            .map(|piece| {
                let dtype = piece.var.dtype().as_str().to_string();
                (piece.name.clone(), piece.region.dims.clone(), dtype, Part::of("", &piece.region))
            })
            .collect();
        let (mut matrices, mut is_wide) = (Vec::<Matrix>::new(), false);
        let mut places = HashMap::<String, usize>::new();
        for (rank, parts) in gather(&[&*comm], described)?.into_iter().enumerate() {
            for (name, dims, dtype, part) in parts {
                is_wide |= dtype == DType::F64.as_str();
                let held = (rank, part.region(&dims));
                match places.get(&name) {
                    Some(&place) => matrices[place].held.push(held),
                    None => {
                        places.insert(name.clone(), matrices.len());
                        matrices.push(Matrix { name, dims, owner: 0, held: vec![held], sources: Vec::new() });
                    }
                }
            }
        }
        if matrices.is_empty() {
            return Err(TrainingError::NoMatrix.into());
        }
        if let Some(Matrix { name, dims, .. }) = matrices.iter().find(|matrix| matrix.dims.len() < 2) {
            return Err(TrainingError::NotAMatrix { parameter: name.clone(), dims: dims.clone() }.into());
        }
        choose_owners(&mut matrices, comm.world_size());
        let variables = own().map(|piece| (piece.var_name.clone(), piece.name.clone())).collect();
        let device = own().next().map_or(Device::Cpu, |piece| piece.var.device().clone());
        let dtype = if is_wide { DType::F64 } else { DType::F32 };
        Ok(Self { comm, variables, matrices, places, dtype, device })
    }

    /// Returns what this rank has sent and received in its group.
    pub fn stats(&self) -> Stats {
        self.comm.stats()
    }

    /// Sends each rank the tensors for it, flattened; returns the numbers that come from each rank.
    fn exchange(&self, outgoing: &[Vec<Tensor>], incoming: &[usize]) -> CandleResult<Vec<Tensor>> {
        let counts = outgoing.iter().map(|tensors| tensors.iter().map(Tensor::elem_count).sum()).collect();
        let all: Vec<&Tensor> = outgoing.iter().flatten().collect();
        let input = match all.is_empty() {
            true => Tensor::zeros(0, self.dtype, &self.device)?,
            false => Tensor::cat(&all, 0)?,
        };
        let output = Tensor::zeros(incoming.iter().sum::<usize>(), self.dtype, &self.device)?;
        let operation = Operation::AllToAll {
            output: output.clone(),
            input,
            output_counts: Some(incoming.to_vec()),
            input_counts: Some(counts),
        };
        self.comm.run(operation).map_err(comm::carry)?;
        let parts = incoming.iter().scan(0, |end, count| {
            let start = *end;
            *end += count;
            Some(output.narrow(0, start, *count))
        });
        parts.collect()
    }

    /// Brings the matrices of this rank together, of what each rank holds of them; `own` are this rank's, by name.
    fn gather(&self, own: &HashMap<&str, Tensor>) -> CandleResult<Vec<(&Matrix, Tensor)>> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let (mut outgoing, mut incoming) = (vec![Vec::new(); ranks], vec![0; ranks]);
        for matrix in &self.matrices {
            for (source, region) in matrix.sources.iter().filter(|(source, _)| *source != matrix.owner) {
                if *source == rank {
                    outgoing[matrix.owner].extend(own.get(&*matrix.name).cloned());
                } else if matrix.owner == rank {
                    incoming[*source] += region.len();
                }
            }
        }
        let received = self.exchange(&outgoing, &incoming)?;
        let mut begin = vec![0; ranks];
        let mut found = Vec::new();
        for matrix in self.matrices.iter().filter(|matrix| matrix.owner == rank) {
            let mut parts = Vec::new();
            for (source, region) in &matrix.sources {
                let kept = own.get(&*matrix.name).filter(|_| *source == rank);
                let part = match kept {
                    Some(own) => own.clone(),
                    None => received[*source].narrow(0, begin[*source], region.len())?,
                };
                begin[*source] += if kept.is_some() { 0 } else { region.len() };
                parts.push((region, part));
            }
            let empty = Tensor::zeros(0, self.dtype, &self.device)?;
            found.push((matrix, assembled(&parts, empty)?.reshape(&matrix.dims[..])?));
        }
        Ok(found)
    }

    /// Sends all ranks their parts of the results of the owners; returns this rank's, by name.
    fn spread(&self, results: &HashMap<&str, Tensor>) -> CandleResult<HashMap<&str, Tensor>> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let (mut outgoing, mut incoming) = (vec![Vec::new(); ranks], vec![0; ranks]);
        let mut own = HashMap::new();
        for matrix in &self.matrices {
            for (holder, region) in &matrix.held {
                if let Some(whole) = results.get(&*matrix.name) {
                    let part = part_of(whole, region)?;
                    match *holder == rank {
                        true => drop(own.insert(&*matrix.name, part)),
                        false => outgoing[*holder].push(part),
                    }
                } else if *holder == rank {
                    incoming[matrix.owner] += region.len();
                }
            }
        }
        let received = self.exchange(&outgoing, &incoming)?;
        let mut begin = vec![0; ranks];
        for matrix in self.matrices.iter().filter(|matrix| matrix.owner != rank) {
            for (_, region) in matrix.held.iter().filter(|(holder, _)| *holder == rank) {
                let first = begin[matrix.owner];
                own.insert(&*matrix.name, received[matrix.owner].narrow(0, first, region.len())?);
                begin[matrix.owner] += region.len();
            }
        }
        Ok(own)
    }
}

impl WholeMatrices for OwnedMatrices {
    fn map(
        &mut self,
        names: &[&str],
        part: &dyn Fn(usize) -> CandleResult<Tensor>,
        compute: &dyn Fn(&Tensor) -> CandleResult<Tensor>,
    ) -> CandleResult<Vec<Tensor>> {
        let parts = names.iter().enumerate().map(|(place, _)| part(place));
        let parts: Result<Vec<Tensor>> = parts.collect::<CandleResult<_>>().map_err(Into::into);
        let parts = all_agree([&*self.comm], parts).map_err(comm::carry)?;
        let rank = self.comm.rank();
        let mut own = HashMap::new();
        for (variable, part) in names.iter().zip(&parts) {
            let Some((name, region)) = self.variables.get(*variable).and_then(|name| {
                let matrix = &self.matrices[*self.places.get(name)?];
                Some((&**name, &matrix.held.iter().find(|(holder, _)| *holder == rank)?.1))
            }) else {
                candle_core::bail!("Muon: {variable} is not among the matrices that the ranks have described")
            };
            // What is beyond the region is padding.
            own.insert(name, part.flatten_all()?.narrow(0, 0, region.len())?.to_dtype(self.dtype)?);
        }
        let mut results = HashMap::new();
        for (matrix, whole) in self.gather(&own)? {
            let &[.., rows, columns] = whole.dims() else { continue };
            let computed = map_matrices(&whole, (rows, columns), compute)?;
            results.insert(&*matrix.name, computed.flatten_all()?);
        }
        let found = self.spread(&results)?;
        // A rank that has received its parts may not step before all have: if one is lost, the others must be at the same step.
        self.comm.run(Operation::Barrier).map_err(comm::carry)?;
        let of = |(variable, part): (&&str, &Tensor)| {
            let result = self.variables.get(*variable).and_then(|name| found.get(&**name));
            let Some(result) = result else { return part.zeros_like() };
            padded(result.to_dtype(part.dtype())?, part.shape())
        };
        names.iter().zip(&parts).map(of).collect()
    }
}

/// The elements of a region of a flattened tensor.
fn part_of(whole: &Tensor, region: &Region) -> CandleResult<Tensor> {
    let runs = region.ranges().map(|(elements, _)| whole.narrow(0, elements.start, elements.len()));
    match &runs.collect::<CandleResult<Vec<_>>>()?[..] {
        [] => whole.narrow(0, 0, 0),
        [one] => Ok(one.clone()),
        several => Tensor::cat(several, 0),
    }
}

/// Gives each matrix to the rank with the least work of those that hold some of it, the largest first, and chooses who sends what.
fn choose_owners(matrices: &mut [Matrix], ranks: usize) {
    let cost = |matrix: &Matrix| {
        let [rest @ .., rows, columns] = &matrix.dims[..] else { return 0 };
        rest.iter().product::<usize>() as u128 * (rows * columns * rows.min(columns)) as u128
    };
    let mut order: Vec<usize> = (0..matrices.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(cost(&matrices[*at])));
    let mut work = vec![0u128; ranks];
    for at in order {
        let matrix = &mut matrices[at];
        let holders = matrix.held.iter().filter(|(_, region)| !region.is_empty());
        matrix.owner = holders.map(|(rank, _)| *rank).min_by_key(|rank| (work[*rank], *rank)).unwrap_or(0);
        work[matrix.owner] += cost(matrix);
        let owner = matrix.owner;
        // Of copies the owner's own is taken, or that of the rank that is nearest to it.
        let mut held: Vec<_> = matrix.held.iter().filter(|(_, region)| !region.is_empty()).collect();
        held.sort_by_key(|(rank, _)| rank.abs_diff(owner));
        for (rank, region) in held {
            if !matrix.sources.iter().any(|(_, known)| known == region) {
                matrix.sources.push((*rank, region.clone()));
            }
        }
        matrix.sources.sort_by_key(|(rank, _)| *rank);
    }
}
