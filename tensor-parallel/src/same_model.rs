//! Checks that all ranks build the same model; reports the first difference and the rank that has it.

use candle_core::Tensor;
use comm::Communicator;
use comm::internal::{Digest, line_difference};

use crate::{Error, Parameter, Result, Split};

/// Returns this rank's parameters if all ranks have built the same model with the same weights; otherwise an error on every
/// rank. `place` is the rank along the tensor-parallel axis.
///
/// # Cost
/// Five all-gathers of some ten bytes; more only if the ranks differ. One pass over the parameters.
pub(crate) fn check(
    comm: &dyn Communicator,
    place: usize,
    configuration: String,
    built: Result<Vec<Parameter>>,
) -> Result<Vec<Parameter>> {
    let parameters =
        strategy::all_agree_with([comm], built, |rank, reason| Error::PeerBuild { rank, reason })?;
    let names = parameters.iter().map(Parameter::describe);
    let lines: Vec<String> = std::iter::once(configuration).chain(names).collect();
    if let Some(difference) = line_difference(comm, 0, &lines)? {
        return Err(Error::ModelMismatch(difference));
    }
    // Whole parameters are compared over all ranks, divided ones over ranks with the same tensor-parallel rank.
    let (whole, divided): (Vec<_>, Vec<_>) =
        parameters.iter().partition(|parameter| parameter.split() == Split::Whole);
    for (party, parameters) in [(0, whole), (place, divided)] {
        let values = parameters.iter().map(|parameter| values(parameter.var()));
        if let Some(mut difference) = line_difference(comm, party, &values.collect::<Result<Vec<_>>>()?)? {
            difference.odd = format!("other values of {}", parameters[difference.place].describe());
            difference.expected = "its own".into();
            return Err(Error::ModelMismatch(difference));
        }
    }
    Ok(parameters)
}

/// Returns a line with a hash of all values, bit for bit.
fn values(tensor: &Tensor) -> Result<String> {
    Ok(Digest::new().floats(tensor)?.value().to_string())
}
