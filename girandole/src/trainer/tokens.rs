//! Training data from token files.

use candle_core::{Device, Result, Tensor};
use models::tokens::Rows;

use super::Data;

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
