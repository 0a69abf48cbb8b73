//! Replicas of a model that use different layers: each gradient is averaged with that of the same parameter.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Init;
use comm::{Local, Mesh};
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, ShardBuilder, Split, TensorParallel, TensorParallelConfig, Weights,
};

pub(super) type Layer = Box<dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync>;

/// Returns a layer that delivers its gradient directly, or one that uses a variable in an ordinary operation.
pub(super) fn expert(builder: &ShardBuilder, is_layer: bool) -> tensor_parallel::Result<Layer> {
    if is_layer {
        let config = ColumnConfig { bias: false, ..ColumnConfig::default() };
        let layer = ColumnParallelLinear::new(4, 4, &config, builder)?;
        return Ok(Box::new(move |x| Ok(layer.forward(x)?)));
    }
    let weight = builder.get((4, 4), "w", Init::Const(0.3), Split::Whole)?;
    Ok(Box::new(move |x| x.matmul(&weight)))
}

/// Returns the first element of each expert's gradient on two data-parallel replicas. `used` are the experts that each
/// replica applies; its loss is the sum of their outputs times its scale.
fn gradients(is_layer: bool, used: [&[usize]; 2], scales: [f64; 2]) -> Vec<Vec<Option<f64>>> {
    Local::run_shared(2, |comm| {
        let rank = comm.rank();
        let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 1)])?;
        let config = TensorParallelConfig { dtype: DType::F64, ..TensorParallelConfig::default() };
        let build = |builder: ShardBuilder| {
            (0..3)
                .map(|index| expert(&builder.pp(index), is_layer))
                .collect::<tensor_parallel::Result<Vec<_>>>()
        };
        let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), build)?;
        let x = Tensor::ones((1, 4), DType::F64, &Device::Cpu)?;
        let losses = used[rank].iter().map(|&index| parallel.model()?[index](&x)?.sum_all());
        let loss = losses.reduce(|a, b| a? + b?).unwrap()?;
        let grads = parallel.backward(&(loss * scales[rank])?)?;
        let first = |var: &Var| grads.get(var)?.flatten_all().ok()?.to_vec1::<f64>().ok()?.first().copied();
        Ok(parallel.vars().iter().map(first).collect())
    })
    .unwrap()
}

#[test]
fn each_parameter_is_averaged_with_itself() {
    for is_layer in [true, false] {
        let experts = gradients(is_layer, [&[0], &[1]], [1.0, 10.0]);
        assert_eq!(experts, [[Some(0.5), Some(5.0), None], [Some(0.5), Some(5.0), None]]);
        let orders = gradients(is_layer, [&[0, 1], &[1, 0]], [1.0, 3.0]);
        assert_eq!(orders, [[Some(2.0), Some(2.0), None], [Some(2.0), Some(2.0), None]]);
        let one_more = gradients(is_layer, [&[2], &[2, 0]], [1.0, 1.0]);
        assert_eq!(one_more, [[Some(0.5), None, Some(1.0)], [Some(0.5), None, Some(1.0)]]);
    }
}
