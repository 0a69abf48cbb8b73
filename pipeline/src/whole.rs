//! Visiting the variables of all stages, one at a time.

use candle_core::{DType, Device, Tensor};
use comm::{Operation, all_gather_object};

use crate::{Error, Pipeline, Result};

/// The dtypes that ranks exchange, by index.
const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

impl Pipeline {
    /// Passes each variable of all stages and its name to `visit` on the first rank, for writing other file formats. Of tied
    /// variables all are passed. Must be called on every rank. Tensor-parallel layers are refused: no rank holds the whole of
    /// them.
    ///
    /// # Memory
    /// On the first rank, one variable at a time.
    ///
    /// # Errors
    /// On every rank, the error of `visit`; a pipeline of divided layers; a variable of a dtype that ranks do not exchange;
    /// failures of communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        if let Some(first) = self.failed() {
            return Err(first.clone());
        }
        let groups = self.groups();
        if let Some(tp) = groups.tp.as_ref().filter(|tp| tp.world_size() > 1) {
            return Err(Error::InvalidArgument {
                what: "the variables of a pipeline".into(),
                got: format!("layers that {} ranks share", tp.world_size()),
                help: "save a checkpoint in its place".into(),
            });
        }
        let (pp, own) = (&*groups.pp, self.named_vars());
        let place = |dtype| DTYPES.iter().position(|known| *known == dtype);
        let described: Vec<(String, Option<usize>, Vec<usize>)> =
            own.iter().map(|(name, var)| (name.clone(), place(var.dtype()), var.dims().to_vec())).collect();
        let all = all_gather_object(pp, &described)?;
        if let Some((name, ..)) = all.iter().flatten().find(|(_, dtype, _)| dtype.is_none()) {
            let (what, got) = (
                "the variables of a pipeline".into(),
                format!("{name} of a dtype that ranks do not exchange"),
            );
            let help = "save a checkpoint in its place".into();
            return Err(Error::InvalidArgument { what, got, help });
        }
        let (mut failed, is_first) = (None, groups.is_first());
        let mut show = |name: &str, tensor: Tensor| {
            if is_first && failed.is_none() {
                failed = visit(name, tensor).err();
            }
        };
        for (rank, vars) in all.iter().enumerate() {
            for (index, (name, dtype, dims)) in vars.iter().enumerate() {
                let Some(dtype) = dtype.map(|dtype| DTYPES[dtype]) else { continue };
                let during = || Error::during("variables of all stages");
                // The other ranks send their variables in any case.
                if rank == pp.rank() {
                    let tensor = own[index].1.as_detached_tensor();
                    match rank {
                        0 => show(name, tensor),
                        _ => {
                            let tensor = tensor.contiguous().map_err(during())?;
                            pp.run(Operation::Send { tensor, to: 0 })?;
                        }
                    }
                } else if pp.rank() == 0 {
                    let device = own.first().map_or(&Device::Cpu, |(_, var)| var.device());
                    let tensor = Tensor::zeros(&dims[..], dtype, device).map_err(during())?;
                    pp.run(Operation::Recv { tensor: tensor.clone(), from: rank })?;
                    show(name, tensor);
                }
            }
        }
        groups.all_agree(failed.map_or(Ok(()), |error| Err(Error::during("showing a variable")(error))))
    }
}
