//! Vocabulary-parallel embedding operation: each rank has some of the rows.

use candle_core::{DType, Tensor};
use comm::{Operation, ReduceOp, autograd};

use crate::context::sequence_dim;
use crate::split::rank_range;
use crate::{Context, Error, Result};

use super::{bytes_of, rows, with_kept_bytes};

/// Looks up the rows of `tokens` in the whole table: rows of other ranks are zeros until the ranks' results are summed.
///
/// With sequence parallelism each rank gets its part of the sequence.
pub(crate) fn embedding(
    tokens: &Tensor,
    (weight, vocabulary): (&Tensor, usize),
    context: &Context,
) -> Result<Tensor> {
    let table = weight.detach();
    let (own, features) = table.dims2()?;
    let (places, mask) = find(tokens, vocabulary, &table, context)?;
    let mut dims = tokens.dims().to_vec();
    dims.push(features);
    let partial = table.index_select(&places, 0)?.broadcast_mul(&mask)?.reshape(dims)?;
    let output = match context.sequence_parallel() {
        true => autograd::reduce_scatter(&partial, context.check_sequence(partial.dims())?, context.comm())?,
        false => {
            let op = ReduceOp::Sum;
            context.comm().run(Operation::AllReduce { tensor: partial.clone(), op })?;
            partial
        }
    };
    let context = context.clone();
    let bytes = bytes_of(&places) + bytes_of(&mask);
    with_kept_bytes(bytes, "vocab_parallel_embedding", &[weight], output, move |gradient| {
        context.check_backward()?;
        let gradient = match context.sequence_parallel() {
            true => {
                let dim = sequence_dim(gradient.dims())?;
                autograd::gather_from_group(&gradient.detach(), dim, context.comm())?
            }
            false => gradient.clone(),
        };
        let gradient = rows(&gradient)?.broadcast_mul(&mask)?;
        let zeros = Tensor::zeros((own, features), gradient.dtype(), gradient.device())?;
        Ok(vec![Some(zeros.index_add(&places, &gradient, 0)?)])
    })
}

/// Returns each token's row in this rank's part, and a mask: 1 if the token is this rank's, else 0.
fn find(tokens: &Tensor, vocabulary: usize, weight: &Tensor, context: &Context) -> Result<(Tensor, Tensor)> {
    let own = rank_range(vocabulary, context.rank(), context.ranks());
    let all = tokens.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let mut places = Vec::with_capacity(all.len());
    let mut mask = Vec::with_capacity(all.len());
    for (place, token) in all.iter().enumerate() {
        let Some(token) = usize::try_from(*token).ok().filter(|token| *token < vocabulary) else {
            let help = format!("the vocabulary has the tokens 0 to {}", vocabulary.saturating_sub(1));
            return Err(Error::invalid("tokens", format!("{token} at place {place}"), help));
        };
        let here = own.contains(&token).then(|| token - own.start);
        places.push(here.unwrap_or(0) as u32);
        mask.push(if here.is_some() { 1f32 } else { 0.0 });
    }
    let (len, device) = (all.len(), weight.device());
    let mask = Tensor::from_vec(mask, (len, 1), device)?.to_dtype(weight.dtype())?;
    Ok((Tensor::from_vec(places, len, device)?, mask))
}
