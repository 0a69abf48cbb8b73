//! Gradients through collectives on CUDA tensors, compared with the dense computation on the CPU.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, Var};
use comm::{Communicator, autograd};

use crate::{Backend, device};

type Comm = Arc<dyn Communicator>;

struct Case {
    name: &'static str,
    /// Whether the input is the same on every rank, or each rank has its own; likewise for the output.
    same_input: bool,
    same_output: bool,
    apply: fn(&Tensor, &Comm) -> comm::Result<Tensor>,
    /// Returns the output of a rank, computed from the inputs of all.
    dense: fn(&[Tensor], usize) -> Result<Tensor>,
}

const CASES: [Case; 7] = [
    Case {
        name: "copy_to_group",
        same_input: true,
        same_output: false,
        apply: autograd::copy_to_group,
        dense: |all, rank| Ok(all[rank].clone()),
    },
    Case {
        name: "reduce_from_group",
        same_input: false,
        same_output: true,
        apply: autograd::reduce_from_group,
        dense: |all, _| sum(all),
    },
    Case {
        name: "split_to_group",
        same_input: true,
        same_output: false,
        apply: |x, comm| autograd::split_to_group(x, 1, comm),
        dense: |all, rank| part(&all[rank], 1, rank, all.len()),
    },
    Case {
        name: "gather_from_group",
        same_input: false,
        same_output: true,
        apply: |x, comm| autograd::gather_from_group(x, 1, comm),
        dense: |all, _| Tensor::cat(all, 1),
    },
    Case {
        name: "all_gather",
        same_input: false,
        same_output: false,
        apply: |x, comm| autograd::all_gather(x, 0, comm),
        dense: |all, _| Tensor::cat(all, 0),
    },
    Case {
        name: "reduce_scatter",
        same_input: false,
        same_output: false,
        apply: |x, comm| autograd::reduce_scatter(x, 1, comm),
        dense: |all, rank| part(&sum(all)?, 1, rank, all.len()),
    },
    Case {
        name: "all_to_all",
        same_input: false,
        same_output: false,
        apply: |x, comm| autograd::all_to_all(x, 1, 0, comm),
        dense: |all, rank| {
            let parts = all.iter().map(|x| part(x, 1, rank, all.len())).collect::<Result<Vec<_>>>()?;
            Tensor::cat(&parts, 0)
        },
    },
];

pub(crate) fn gradients(backend: &dyn Backend) {
    for world_size in 1..=4 {
        backend.run(world_size, &|comm| {
            let all: Vec<usize> = (0..world_size).collect();
            let comm = comm.subgroup(&all)?;
            for case in &CASES {
                case.check(&[3, 2 * world_size, 5], &comm)?;
            }
            Ok(())
        });
    }
}

/// The result of a custom operation may be any view of a computed tensor.
pub(crate) fn views(backend: &dyn Backend) {
    let views: [fn(&Tensor) -> Result<Tensor>; 7] = [
        |x| x.narrow(0, 1, 1),
        |x| x.narrow(0, 1, 2),
        |x| x.narrow(0, 0, 2),
        |x| x.narrow(1, 1, 2),
        |x| x.narrow(0, 1, 0),
        |x| x.t(),
        |x| Ok(x.clone()),
    ];
    for world_size in 1..=4 {
        backend.run(world_size, &|_| {
            for (index, view) in views.iter().enumerate() {
                let all = values(&[3, 4], 1)?;
                let (given, expected) = (view(&all.to_device(&device())?)?, view(&all)?);
                let x = Var::zeros((), DType::F64, &device())?;
                let got = autograd::custom("view", &[&x], given, |_| Ok(vec![None]))?;
                assert_eq!((got.device().is_cuda(), got.dims()), (true, expected.dims()), "view {index}");
                let values = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f64>();
                assert_eq!(values(&got)?, values(&expected)?, "view {index}");
            }
            Ok(())
        });
    }
}

impl Case {
    fn check(&self, dims: &[usize], comm: &Comm) -> Result<()> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let seed = |rank: usize| if self.same_input { 7 } else { rank };
        // Squares, and weights that differ by rank where outputs do, make the gradient depend on every value.
        let loss = |y: &Tensor, rank: usize| {
            let weights = values(y.dims(), if self.same_output { 50 } else { 60 + rank })?;
            (y.sqr()? * weights.to_device(y.device())?)?.sum_all()
        };

        let x = Var::from_tensor(&values(dims, seed(rank))?.to_device(&device())?)?;
        let y = (self.apply)(&(x.as_tensor() * 2.0)?, comm)?;
        assert!(y.device().is_cuda(), "{}", self.name);
        let grads = loss(&y, rank)?.backward()?;

        let inputs = (0..ranks).map(|rank| Var::from_tensor(&values(dims, seed(rank))?));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        // If all ranks have the same input, it is one variable.
        let own = |rank: usize| &inputs[if self.same_input { 0 } else { rank }];
        let doubled = (0..ranks).map(|rank| own(rank).as_tensor() * 2.0).collect::<Result<Vec<_>>>()?;
        close(&y, &(self.dense)(&doubled, rank)?, self.name)?;
        // If all ranks compute the same loss, it counts once.
        let losses = if self.same_output { 1 } else { ranks };
        let losses = (0..losses).map(|rank| loss(&(self.dense)(&doubled, rank)?, rank));
        let expected = sum(&losses.collect::<Result<Vec<_>>>()?)?.backward()?;
        close(grads.get(&x).unwrap(), expected.get(own(rank)).unwrap(), self.name)
    }
}

/// Returns values without a pattern, the same on every rank.
fn values(dims: &[usize], seed: usize) -> Result<Tensor> {
    let len: usize = dims.iter().product();
    let value = |index: usize| ((index * 37 + seed * 101) as f64 * 0.731).sin();
    Tensor::from_vec((0..len).map(value).collect::<Vec<_>>(), dims, &Device::Cpu)
}

fn sum(all: &[Tensor]) -> Result<Tensor> {
    all[1..].iter().try_fold(all[0].clone(), |sum, x| sum + x)
}

fn part(x: &Tensor, dim: usize, index: usize, parts: usize) -> Result<Tensor> {
    let len = x.dim(dim)? / parts;
    x.narrow(dim, index * len, len)
}

fn close(got: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let got = got.to_device(&Device::Cpu)?;
    let difference = (got - expected)?.abs()?.max_all()?.to_scalar::<f64>()?;
    assert!(difference < 1e-10, "{what}: {difference}");
    Ok(())
}
