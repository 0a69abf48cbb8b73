//! Column-parallel linear operation: each rank computes some of the outputs.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use candle_core::{Module, Tensor, TensorId};
use comm::autograd;
use ops::{Linear, Precision};

use crate::context::sequence_dim;
use crate::{Context, Result};

use super::reduce::Reduction;
use super::{bytes_of, of_weights, rows, with_kept_bytes, with_kept_result};

/// Computes `x w' + b` for this rank's rows of the weight. In backward, the all-reduce of the input's gradient overlaps with
/// the computation of the weight's gradient.
///
/// With sequence parallelism the input is this rank's part of the sequence, and is gathered first; its gradient is
/// reduce-scattered.
pub(crate) fn column(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    context: &Context,
) -> Result<Tensor> {
    with_kept_result(|known| layer(x, weight, bias, context, known))
}

/// The input of the product, at all positions of the sequence.
struct Input {
    flat: Tensor,
    /// Shape before flattening.
    dims: Vec<usize>,
}

/// The last gathered input, while a layer still holds it. The key is the tensor that was gathered and the address of the
/// group.
type LastGathered = ((TensorId, usize), Weak<Input>);

thread_local! {
    static LAST_GATHERED: RefCell<Option<LastGathered>> = const { RefCell::new(None) };
}

impl Input {
    /// Returns the input of a layer, and the bytes that it keeps in addition to the graph. With sequence parallelism, layers
    /// with the same input (queries, keys and values) gather it once and share it.
    fn of(x: &Tensor, context: &Context) -> Result<(Arc<Self>, usize)> {
        if !context.sequence_parallel() {
            let flat = rows(x)?;
            let bytes = if x.is_contiguous() { 0 } else { bytes_of(&flat) };
            return Ok((Arc::new(Self { flat, dims: x.dims().to_vec() }), bytes));
        }
        let key = (x.id(), Arc::as_ptr(context.comm()).addr());
        let known = LAST_GATHERED.with_borrow(|last| match last {
            Some((of, input)) if *of == key => input.upgrade(),
            _ => None,
        });
        if let Some(known) = known {
            return Ok((known, 0));
        }
        let all = autograd::gather_from_group(&x.detach(), sequence_dim(x.dims())?, context.comm())?;
        let input = Arc::new(Self { flat: rows(&all)?, dims: all.dims().to_vec() });
        LAST_GATHERED.set(Some((key, Arc::downgrade(&input))));
        let bytes = bytes_of(&input.flat);
        Ok((input, bytes))
    }
}

/// `known` is the result, if it was computed before.
fn layer(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    context: &Context,
    known: Option<Tensor>,
) -> Result<Tensor> {
    let precision = Precision::current();
    let (input, bytes) = Input::of(x, context)?;
    let (flat, matrix) = (&input.flat, weight.detach());
    let output = match (known, bias) {
        (Some(known), _) => known,
        (None, Some(bias)) => Linear::new(matrix.clone(), bias.detach()).forward(flat)?,
        (None, None) => precision.matmul(flat, &matrix.t()?)?,
    };
    let mut dims = input.dims.clone();
    if let Some(last) = dims.last_mut() {
        *last = matrix.dim(0)?;
    }
    let output = output.reshape(dims)?;
    let (context, needs_input) = (context.clone(), x.track_op());
    let variables: Vec<Tensor> = [weight].into_iter().chain(bias).cloned().collect();
    let backward = move |gradient: &Tensor| {
        context.check_backward()?;
        let gradient = rows(gradient)?;
        let of_input = match needs_input {
            true => {
                let partial = precision.matmul(&gradient, &matrix)?.reshape(&input.dims[..])?;
                Some(Reduction::start(partial, &context)?)
            }
            false => None,
        };
        let of_weights = of_weights(&variables, [&gradient, &gradient], &input.flat, precision)?;
        let of_input = match of_input {
            Some(reduction) => {
                let _span = tracing::info_span!("wait for input gradient").entered();
                Some(reduction.finish()?)
            }
            None => None,
        };
        Ok((of_input, of_weights))
    };
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    with_kept_bytes(bytes, "column_parallel_linear", &inputs, output, move |gradient| {
        let (of_input, of_weights) = backward(gradient).map_err(into_comm)?;
        Ok([of_input].into_iter().chain(of_weights).collect())
    })
}

fn into_comm(error: crate::Error) -> comm::Error {
    error.into()
}
