//! Training data: rows that are accessed by index.

use candle_core::{Device, Result, Tensor};
use models::tokens::Rows;

/// Training data: rows, accessed by index.
pub trait Data: Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns some rows as the model's input and targets.
    ///
    /// # Errors
    /// Rows that cannot be read.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)>;

    /// Returns an identification of the data: a run resumes only with the data that its checkpoint was made with. By
    /// default the number of rows.
    fn fingerprint(&self) -> String {
        format!("{} rows", self.rows())
    }
}

impl Data for Rows {
    fn rows(&self) -> usize {
        self.len()
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for row in rows {
            let row = self.get(*row).map_err(comm::carry)?;
            tokens.extend(row.tokens);
            targets.extend(row.targets);
        }
        let shape = (rows.len(), self.row_len());
        Ok((Tensor::from_vec(tokens, shape, device)?, Tensor::from_vec(targets, shape, device)?))
    }

    fn fingerprint(&self) -> String {
        Rows::fingerprint(self)
    }
}
