//! Lines of all ranks, in the order of the ranks.

use std::fmt::{Arguments, Display};

use candle_core::{Device, Tensor};
use comm::{Communicator, gather_object};

use crate::console::say;
use crate::error::Result;

/// Where the ranks show what they do: rank 0 prints for all of them, so that the order is always the same.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    pub(super) comm: &'a dyn Communicator,
    /// Where tensors are.
    pub(super) device: &'a Device,
}

impl<'a> Stage<'a> {
    pub(super) fn new(comm: &'a dyn Communicator, device: &'a Device) -> Self {
        Self { comm, device }
    }

    /// The heading of a part.
    pub(super) fn title(&self, title: impl Display) -> Result<()> {
        self.say(format_args!("\n===== {title} ====="))
    }

    /// One line, said by rank 0.
    pub(super) fn say(&self, line: Arguments<'_>) -> Result<()> {
        if self.comm.rank() == 0 { say(line) } else { Ok(()) }
    }

    /// One line of each rank. Every rank must call it.
    pub(super) fn each(&self, line: impl Display) -> Result<()> {
        let lines = gather_object(self.comm, &line.to_string(), 0)?;
        for (rank, line) in lines.iter().flatten().enumerate() {
            say(format_args!("rank {rank}: {line}"))?;
        }
        Ok(())
    }
}

/// The numbers of a tensor: `[1, 10]`.
pub(super) fn numbers(tensor: &Tensor) -> Result<String> {
    let words: Vec<String> = tensor.flatten_all()?.to_vec1::<f32>()?.iter().map(f32::to_string).collect();
    Ok(format!("[{}]", words.join(", ")))
}

/// Python's word.
pub(super) fn word(truth: bool) -> &'static str {
    if truth { "True" } else { "False" }
}
