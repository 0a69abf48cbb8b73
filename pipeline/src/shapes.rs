//! Dry run: determines the shape and dtype of each stage's output.

use candle_core::{Device, Tensor};
use comm::{Communicator, broadcast_object};
use training::internal::is_buffer;

use crate::links::Spec;
use crate::stage::Stage;
use crate::{Error, Result, Table};

/// Runs each stage once on zeros, in order, and broadcasts the shape and dtype of its output to every rank. Changes no
/// variable: those that modules may update in a forward pass are `buffers`.
pub(crate) fn find(
    comm: &dyn Communicator,
    table: &Table,
    stages: &[Stage],
    example: &Tensor,
    device: &Device,
    buffers: &[String],
) -> Result<Vec<Spec>> {
    let (mut specs, mut input) = (Vec::with_capacity(table.stages()), Spec::of(example));
    for (number, &owner) in table.owners.iter().enumerate() {
        let own = stages.iter().find(|stage| stage.number == number);
        let found = own.map_or(Ok(input.clone()), |stage| {
            keeping_buffers(stage, buffers, || try_one(stage, &input, device))
        });
        let last = number + 1 == table.stages();
        let reason = match broadcast_object(comm, &found, owner)? {
            Ok(spec) if last || matches!(spec.dtype.as_str(), "f32" | "f64" | "f16" | "bf16") => {
                specs.push(spec.clone());
                input = spec;
                continue;
            }
            Ok(spec) => format!("it gives {spec}, and gradients flow through floating-point numbers only"),
            Err(reason) => reason,
        };
        let (stage, rank, input) = (number, comm.world_ranks()[owner], input.to_string());
        return Err(Error::DryRun { stage, rank, input, reason });
    }
    Ok(specs)
}

/// Returns the result of `body`, and gives the stage's buffers the values that they had before.
fn keeping_buffers<T>(
    stage: &Stage,
    buffers: &[String],
    body: impl FnOnce() -> std::result::Result<T, String>,
) -> std::result::Result<T, String> {
    let vars = stage.vars.iter().filter(|(name, _)| is_buffer(buffers, name)).map(|(_, var)| var);
    let copied = vars.map(|var| Ok((var, var.copy()?))).collect::<candle_core::Result<Vec<_>>>();
    let copied = copied.map_err(first_line)?;
    let result = body();
    copied.iter().try_for_each(|(var, value)| var.set(value)).map_err(first_line)?;
    result
}

/// Returns the message without candle's backtrace.
fn first_line(error: impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().to_string()
}

fn try_one(stage: &Stage, input: &Spec, device: &Device) -> std::result::Result<Spec, String> {
    let run = || {
        let output = stage.forward(&input.zeros(device)?.as_detached_tensor(), false);
        output.map(|output| Spec::of(&output)).map_err(Error::during("forward"))
    };
    run().map_err(|error| match error {
        Error::Tensor { source, .. } => first_line(source),
        other => other.to_string(),
    })
}
