//! Rotary position embedding table that grows with the length of rows.

use std::sync::{Arc, Mutex};

use candle_core::{Device, Result, Tensor, bail};
use ops::{Rotary, RotaryConfig, RowContext};
use training::internal::lock;

/// Table shared by all blocks. It grows on demand: a model for 131,072 positions is mostly used with fewer.
#[derive(Debug, Clone)]
pub(crate) struct Positions {
    config: RotaryConfig,
    table: Arc<Mutex<Option<Rotary>>>,
}

/// Number of positions of the first table.
const FIRST: usize = 512;

impl Positions {
    pub(crate) fn new(config: &RotaryConfig) -> Self {
        Self { config: config.clone(), table: Arc::default() }
    }

    /// Rotates queries or keys whose first place in the row is `offset`; in each document positions begin at 0.
    pub(crate) fn apply(&self, x: &Tensor, offset: usize) -> Result<Tensor> {
        let end =
            checked_longest(&RowContext::current(), offset.saturating_add(x.dim(1)?), self.config.max_len)?;
        self.table(end, x.device())?.apply(x, offset)
    }

    fn table(&self, end: usize, device: &Device) -> Result<Rotary> {
        let mut table = lock(&self.table);
        if let Some(table) = table.as_ref().filter(|table| table.config().max_len >= end) {
            return Ok(table.clone());
        }
        let max_len = end.next_power_of_two().max(FIRST).min(self.config.max_len);
        let grown = Rotary::new(&RotaryConfig { max_len, ..self.config.clone() }, device)?;
        *table = Some(grown.clone());
        Ok(grown)
    }
}

/// The number of positions that a model must have for rows whose last place is before `end`.
pub(crate) fn checked_longest(rows: &RowContext, end: usize, max_len: usize) -> Result<usize> {
    let longest = rows.longest(end);
    if longest <= max_len {
        return Ok(longest);
    }
    match rows.documents {
        Some(_) => bail!("a document of {longest} tokens is longer than the model's {max_len} positions"),
        None => bail!("rows of {longest} tokens are longer than the model's {max_len} positions"),
    }
}
