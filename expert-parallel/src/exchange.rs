//! The exchange of rows between ranks with different experts.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use comm::{Communicator, Operation};
use ops::{ExpertExchange, RowsOnTheWay};

#[derive(Debug)]
pub(crate) struct Exchange(pub(crate) Arc<dyn Communicator>);

impl ExpertExchange for Exchange {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn ranks(&self) -> usize {
        self.0.world_size()
    }

    fn numbers(&self, own: &[u32]) -> Result<Vec<Vec<u32>>> {
        let output = Tensor::zeros(own.len() * self.ranks(), DType::U32, &Device::Cpu)?;
        let input = Tensor::new(own, &Device::Cpu)?;
        let operation = Operation::AllGather { output: output.clone(), input, counts: None };
        self.0.run(operation).map_err(comm::carry)?;
        Ok(output.to_vec1::<u32>()?.chunks(own.len().max(1)).map(<[u32]>::to_vec).collect())
    }

    fn rows(&self, rows: &Tensor, sent: &[usize], received: &[usize]) -> Result<Tensor> {
        let (output, operation) = all_to_all(rows, sent, received)?;
        self.0.run(operation).map_err(comm::carry)?;
        Ok(output)
    }

    fn start_rows(&self, rows: &Tensor, sent: &[usize], received: &[usize]) -> Result<RowsOnTheWay> {
        let (output, operation) = all_to_all(rows, sent, received)?;
        let work = self.0.submit(operation).map_err(comm::carry)?;
        Ok(Box::new(|| work.wait().map_err(comm::carry).map(|()| output)))
    }
}

/// Returns the tensor of what arrives, and the operation.
fn all_to_all(rows: &Tensor, sent: &[usize], received: &[usize]) -> Result<(Tensor, Operation)> {
    let size = rows.dim(1)?;
    let output = Tensor::zeros((received.iter().sum::<usize>(), size), rows.dtype(), rows.device())?;
    let counts = |rows: &[usize]| Some(rows.iter().map(|rows| rows * size).collect());
    let operation = Operation::AllToAll {
        output: output.clone(),
        input: rows.clone(),
        output_counts: counts(received),
        input_counts: counts(sent),
    };
    Ok((output, operation))
}
