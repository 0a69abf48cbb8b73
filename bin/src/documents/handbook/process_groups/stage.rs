//! Printing lines of all ranks in rank order.

use std::fmt::{Arguments, Display};

use candle_core::{Device, Tensor};
use cli::prelude::*;
use comm::{Communicator, gather_object};

/// Output of the demonstration: rank 0 prints for all ranks, so that the order is always the same.
#[derive(Debug)]
pub(super) struct OrderedOutput<'a> {
    pub(super) comm: &'a dyn Communicator,
    /// The device of tensors.
    pub(super) device: &'a Device,
}

impl<'a> OrderedOutput<'a> {
    pub(super) fn new(comm: &'a dyn Communicator, device: &'a Device) -> Self {
        Self { comm, device }
    }

    /// Prints the heading of a section.
    pub(super) fn title(&self, title: impl Display) -> Result<()> {
        self.say(format_args!("\n===== {title} ====="))
    }

    /// Prints one line, on rank 0.
    pub(super) fn say(&self, line: Arguments<'_>) -> Result<()> {
        if self.comm.rank() == 0 { say(line) } else { Ok(()) }
    }

    /// Prints one line for each rank. Every rank must call it.
    pub(super) fn each(&self, line: impl Display) -> Result<()> {
        let lines = gather_object(self.comm, &line.to_string(), 0)?;
        for (rank, line) in lines.iter().flatten().enumerate() {
            say(format_args!("rank {rank}: {line}"))?;
        }
        Ok(())
    }
}

/// Formats the numbers of a tensor: `[1, 10]`.
pub(super) fn numbers(tensor: &Tensor) -> Result<String> {
    let words: Vec<String> = tensor.flatten_all()?.to_vec1::<f32>()?.iter().map(f32::to_string).collect();
    Ok(format!("[{}]", words.join(", ")))
}

/// Returns Python's spelling of a bool.
pub(super) fn python_bool(truth: bool) -> &'static str {
    if truth { "True" } else { "False" }
}
