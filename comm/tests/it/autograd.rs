//! Gradients through collectives, compared with finite differences and with the dense computation.

use std::sync::Arc;

use candle_core::{CpuStorage, Device, Result, Storage, Tensor, Var};
use comm::{Communicator, Error, Local, LocalConfig, ReduceOp, Work, autograd};

type Comm = Arc<dyn Communicator>;

fn on_each(world_size: usize, body: impl Fn(Comm) -> Result<()> + Send + Sync) {
    let group = Local::group(world_size, &LocalConfig::default()).unwrap();
    std::thread::scope(|scope| {
        for comm in group {
            scope.spawn(|| body(Arc::new(comm)).unwrap());
        }
    });
}

/// Returns values without a pattern, the same on every rank.
fn values(dims: &[usize], seed: usize) -> Tensor {
    let len: usize = dims.iter().product();
    let value = |index: usize| ((index * 37 + seed * 101) as f64 * 0.731).sin();
    Tensor::from_vec((0..len).map(value).collect::<Vec<_>>(), dims, &Device::Cpu).unwrap()
}

/// A function under test, and whether its input and its output are the same on every rank or each rank has its own.
struct Case {
    same_input: bool,
    same_output: bool,
    apply: fn(&Tensor, &Comm) -> comm::Result<Tensor>,
}

impl Case {
    /// Returns this rank's loss. Squares, and weights that differ by rank where outputs do, make the gradient depend on
    /// every value.
    fn loss(&self, x: &Tensor, comm: &Comm) -> Result<Tensor> {
        let y = (self.apply)(&x.sin()?, comm)?;
        let weights = values(y.dims(), if self.same_output { 50 } else { 60 + comm.rank() });
        (y.sqr()? * weights)?.sum_all()
    }

    /// Returns the loss of the group.
    fn total(&self, x: &Tensor, comm: &Comm) -> Result<f64> {
        let loss = self.loss(x, comm)?.detach().force_contiguous()?;
        if !self.same_output {
            comm.all_reduce(&loss, ReduceOp::Sum)?.wait()?;
        }
        loss.to_scalar()
    }

    fn check(&self, dims: &[usize], comm: &Comm) -> Result<()> {
        let start = values(dims, if self.same_input { 7 } else { comm.rank() });
        let x = Var::from_tensor(&start)?;
        let grads = self.loss(x.as_tensor(), comm)?.backward()?;
        let gradient = grads.get(&x).unwrap().flatten_all()?.to_vec1::<f64>()?;
        let turns = if self.same_input { 1 } else { comm.world_size() };
        for turn in 0..turns {
            for index in 0..start.elem_count() {
                let moved = |by: f64| {
                    let mut values = start.flatten_all()?.to_vec1::<f64>()?;
                    if self.same_input || turn == comm.rank() {
                        values[index] += by;
                    }
                    self.total(&Tensor::from_vec(values, dims, &Device::Cpu)?, comm)
                };
                let slope = (moved(1e-5)? - moved(-1e-5)?) / 2e-5;
                if self.same_input || turn == comm.rank() {
                    let rank = comm.rank();
                    assert!(
                        (slope - gradient[index]).abs() < 1e-6,
                        "rank {rank}, {index}: {slope} {gradient:?}"
                    );
                }
            }
        }
        Ok(())
    }
}

fn check(case: Case) {
    for world_size in 1..=4 {
        on_each(world_size, |comm| {
            case.check(&[world_size, 2 * world_size, 3], &comm)?;
            case.check(&[2 * world_size, world_size], &comm)
        });
    }
}

#[test]
fn copy_to_group() {
    check(Case { same_input: true, same_output: false, apply: autograd::copy_to_group });
}

#[test]
fn reduce_from_group() {
    check(Case { same_input: false, same_output: true, apply: autograd::reduce_from_group });
}

#[test]
fn split_to_group() {
    for apply in [
        |x: &_, comm: &_| autograd::split_to_group(x, 0, comm),
        |x: &_, comm: &_| autograd::split_to_group(x, 1, comm),
    ] {
        check(Case { same_input: true, same_output: false, apply });
    }
}

#[test]
fn gather_from_group() {
    for apply in [
        |x: &_, comm: &_| autograd::gather_from_group(x, 0, comm),
        |x: &_, comm: &_| autograd::gather_from_group(x, 1, comm),
    ] {
        check(Case { same_input: false, same_output: true, apply });
    }
}

#[test]
fn all_gather() {
    for apply in [
        |x: &_, comm: &_| autograd::all_gather(x, 0, comm),
        |x: &_, comm: &_| autograd::all_gather(x, 1, comm),
    ] {
        check(Case { same_input: false, same_output: false, apply });
    }
}

#[test]
fn reduce_scatter() {
    for apply in [
        |x: &_, comm: &_| autograd::reduce_scatter(x, 0, comm),
        |x: &_, comm: &_| autograd::reduce_scatter(x, 1, comm),
    ] {
        check(Case { same_input: false, same_output: false, apply });
    }
}

#[test]
fn all_to_all() {
    for apply in [
        |x: &_, comm: &_| autograd::all_to_all(x, 0, 1, comm),
        |x: &_, comm: &_| autograd::all_to_all(x, 1, 0, comm),
    ] {
        check(Case { same_input: false, same_output: false, apply });
    }
}

/// Two layers, the first divided by columns, the second by rows.
#[test]
fn a_divided_network_equals_the_whole_one() {
    let (x, first, second) = (values(&[5, 12], 1), values(&[12, 24], 2), values(&[24, 7], 3));
    let dense = |x: &Var| x.matmul(&first)?.gelu()?.matmul(&second);
    let input = Var::from_tensor(&x).unwrap();
    let output = dense(&input).unwrap();
    let grads = output.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let gradient = grads.get(&input).unwrap();
    let close = |a: &Tensor, b: &Tensor| -> Result<()> {
        let difference = (a - b)?.abs()?.max_all()?.to_scalar::<f64>()?;
        assert!(difference < 1e-10, "{difference}");
        Ok(())
    };
    for world_size in 1..=4 {
        on_each(world_size, |comm| {
            let width = 24 / world_size;
            let columns = first.narrow(1, comm.rank() * width, width)?.contiguous()?;
            let rows = second.narrow(0, comm.rank() * width, width)?.contiguous()?;
            let input = Var::from_tensor(&x.copy()?)?;
            let hidden = autograd::copy_to_group(&input, &comm)?.matmul(&columns)?.gelu()?;
            let divided = autograd::reduce_from_group(&hidden.matmul(&rows)?, &comm)?;
            close(&divided, &output)?;
            close(divided.sqr()?.sum_all()?.backward()?.get(&input).unwrap(), gradient)
        });
    }
}

/// A queued operation runs even if its caller drops the group and does not wait, and then the group closes, also if the
/// last reference to it was in the graph of a tensor in the queue.
#[test]
fn a_group_closes_after_what_is_queued() {
    for waits in [true, false] {
        on_each(2, |comm| {
            let x = Var::from_tensor(&values(&[3], comm.rank()))?;
            let y = autograd::reduce_from_group(&x, &comm)?;
            let expected = (y.detach() * 2.0)?.to_vec1::<f64>()?;
            let work = comm.all_reduce(&y, ReduceOp::Sum)?;
            if comm.rank() == 0 {
                drop(comm);
                drop(y);
                return if waits { Ok(work.wait()?) } else { Ok(()) };
            }
            work.wait()?;
            assert_eq!(y.to_vec1::<f64>()?, expected);
            let left = comm.barrier().and_then(Work::wait).unwrap_err();
            assert!(matches!(left, Error::PeerLeft { rank: 0, .. }), "{left}");
            Ok(())
        });
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    on_each(2, |comm| {
        let x = values(&[3, 2], 0);
        assert!(autograd::split_to_group(&x, 0, &comm).unwrap_err().to_string().contains("multiple of 2"));
        assert!(autograd::reduce_scatter(&x, 0, &comm).is_err());
        assert!(autograd::all_to_all(&x, 1, 2, &comm).is_err());
        assert!(autograd::gather_from_group(&x, 2, &comm).is_err());
        let empty = Tensor::zeros((0, 2), candle_core::DType::F64, &Device::Cpu)?;
        assert_eq!(autograd::all_gather(&empty, 0, &comm)?.dims(), [0, 2]);
        Ok(())
    });
}

/// Applies a custom operation with this many inputs whose result is `output` of the last input; its gradient for every
/// input is 7. Returns the result, the expected result and the last input.
fn applied(inputs: usize, output: impl Fn(&Tensor) -> Result<Tensor>) -> Result<(Tensor, Tensor, Tensor)> {
    let vars = (0..inputs).map(|index| Var::from_tensor(&values(&[3, 4], index)));
    let vars = vars.collect::<Result<Vec<_>>>()?;
    let last = vars[inputs - 1].as_detached_tensor();
    let (expected, given) = (output(&last)?.force_contiguous()?, output(&last)?);
    let nodes: Vec<&Tensor> = vars.iter().map(Var::as_tensor).collect();
    let backward = move |gradient: &Tensor| {
        let all = Tensor::full(7f64, (3, 4), gradient.device())?;
        Ok(vec![Some(all); inputs])
    };
    let got = autograd::custom("given", &nodes, given, backward)?;
    let grads = got.sum_all()?.backward()?;
    assert_eq!(grads.get(&vars[0]).unwrap().flatten_all()?.to_vec1::<f64>()?, [7.0; 12]);
    for (index, var) in vars.iter().enumerate() {
        let before = values(&[3, 4], index).flatten_all()?.to_vec1::<f64>()?;
        assert_eq!(var.flatten_all()?.to_vec1::<f64>()?, before, "the input is as it was");
    }
    Ok((got, expected, last))
}

/// Each view is a computed tensor that is not the whole of its storage, or shares it with an input.
#[test]
fn a_custom_result_may_be_any_view() {
    let views: [fn(&Tensor) -> Result<Tensor>; 9] = [
        |x| x.copy()?.t(),
        |x| x.copy()?.narrow(0, 1, 2),
        |x| x.copy()?.narrow(0, 0, 2),
        |x| x.copy()?.narrow(1, 1, 2),
        |x| x.copy()?.narrow(0, 1, 0),
        |x| x.narrow(0, 0, 1)?.copy()?.broadcast_as((3, 4)),
        |x| Ok(x.clone()),
        |x| x.narrow(0, 2, 1),
        |x| x.flatten_all()?.narrow(0, 0, 0),
    ];
    for inputs in 1..=3 {
        for (index, view) in views.iter().enumerate() {
            let (got, expected, _) = applied(inputs, view).unwrap();
            let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap();
            assert_eq!((got.dims(), values(&got)), (expected.dims(), values(&expected)), "view {index}");
        }
    }
}

/// If the result is a part of a storage, another tensor of that storage that is no input keeps its elements.
#[test]
fn a_custom_result_takes_no_more_than_its_storage() {
    let all = values(&[3, 4], 1);
    let x = Var::zeros((), candle_core::DType::F64, &Device::Cpu).unwrap();
    let row = autograd::custom("row", &[&x], all.narrow(0, 0, 1).unwrap(), |_| Ok(vec![None])).unwrap();
    assert_eq!(row.to_vec2::<f64>().unwrap()[0], all.to_vec2::<f64>().unwrap()[0]);
    assert_eq!(all.to_vec2::<f64>().unwrap(), values(&[3, 4], 1).to_vec2::<f64>().unwrap());
}

/// The output is the whole of its storage, as in every layer of this project.
#[test]
fn a_custom_result_is_not_copied() {
    let place = |tensor: &Tensor| match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F64(elements)) => elements.as_ptr().addr(),
        _ => panic!("of another kind"),
    };
    let x = Var::from_tensor(&values(&[3, 4], 0)).unwrap();
    let output = values(&[4, 3], 1).reshape((2, 6)).unwrap();
    let before = place(&output);
    let got = autograd::custom("whole", &[&x], output, |_| Ok(vec![None])).unwrap();
    assert_eq!((place(&got), got.dims()), (before, &[2, 6][..]));
}
