//! Test helpers: groups of ranks, and small models with known values.
#![allow(dead_code)]

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, SGD, VarBuilder, VarMap, linear};
use comm::{Communicator, InitMethod, Local, LocalConfig, Secret, Tcp, TcpConfig};
use fsdp::{DistributedModel, Fsdp, FsdpConfig, Result, Unit, UnitBuilder};
use strategy::checkpoint::{MODEL, read_whole};
use training::Contents;

pub(crate) type Comm = Arc<dyn Communicator>;

/// Runs `body` on each rank of a new group of threads, and returns the results; `None` for a rank that panicked.
pub(crate) fn on_ranks<T: Send>(
    world_size: usize,
    body: impl Fn(Comm) -> Result<T> + Sync,
) -> Vec<Option<Result<T>>> {
    let group = Local::group(world_size, &LocalConfig::default()).expect("a group of threads");
    let ranks: Vec<Comm> = group.into_iter().map(|comm| Arc::new(comm) as Comm).collect();
    on(ranks, body)
}

fn on<T: Send>(ranks: Vec<Comm>, body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<Option<Result<T>>> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

/// Does the same, and panics if a rank fails.
pub(crate) fn on_all_ranks<T: Send>(world_size: usize, body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<T> {
    all(on_ranks(world_size, body))
}

/// Does the same over TCP.
pub(crate) fn over_tcp<T: Send>(world_size: usize, body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<T> {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = Secret::random().expect("random numbers");
    let connect = |rank: usize| {
        let config = TcpConfig {
            rank,
            world_size,
            secret: Some(secret.clone()),
            init_method: InitMethod::File(folder.path().join("meeting")),
            ..TcpConfig::default()
        };
        Arc::new(Tcp::connect(&config).expect("a group")) as Comm
    };
    let ranks = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || connect(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    all(on(ranks, body))
}

fn all<T>(results: Vec<Option<Result<T>>>) -> Vec<T> {
    let one = |(rank, result): (usize, Option<Result<T>>)| {
        result.expect("no panic").unwrap_or_else(|error| panic!("rank {rank}: {error}"))
    };
    results.into_iter().enumerate().map(one).collect()
}

/// Returns deterministic pseudo-random numbers between -1 and 1.
pub(crate) fn values(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let len = shape.iter().product::<usize>();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.0
    };
    let values: Vec<f64> = (0..len).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .expect("on the CPU")
}

pub(crate) const INPUTS: usize = 5;
pub(crate) const OUTPUTS: usize = 3;
const WIDTHS: [usize; 5] = [INPUTS, 9, 7, 6, OUTPUTS];

/// Returns the initial values of the model below.
pub(crate) fn start(seed: u64, dtype: DType) -> HashMap<String, Tensor> {
    let layer = |(index, widths): (usize, &[usize])| {
        let seed = seed * 1000 + 2 * index as u64;
        let weight = values(seed, &[widths[1], widths[0]], dtype);
        let bias = values(seed + 1, &[widths[1]], dtype);
        [(format!("l{index}.weight"), weight), (format!("l{index}.bias"), bias)]
    };
    WIDTHS.windows(2).enumerate().flat_map(layer).collect()
}

pub(crate) fn builder(seed: u64, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_tensors(start(seed, dtype), dtype, &Device::Cpu)
}

/// Linear layers with tanh between them; each is a unit, except that the second and third form one unit.
pub(crate) struct Mlp {
    pub(crate) first: Unit<Linear>,
    pub(crate) middle: Unit<(Linear, Linear)>,
    pub(crate) last: Unit<Linear>,
}

impl Mlp {
    pub(crate) fn new(units: UnitBuilder<'_>) -> candle_core::Result<Self> {
        let layer = |vb: VarBuilder<'_>, index: usize| linear(WIDTHS[index], WIDTHS[index + 1], vb);
        Ok(Self {
            first: units.pp("l0").unit(|vb| layer(vb, 0))?,
            middle: units.unit(|vb| Ok((layer(vb.pp("l1"), 1)?, layer(vb.pp("l2"), 2)?)))?,
            last: units.pp("l3").unit(|vb| layer(vb, 3))?,
        })
    }

    pub(crate) fn fsdp(comm: Comm, seed: u64, dtype: DType, config: &FsdpConfig) -> Result<Fsdp<Self>> {
        Fsdp::new(comm, builder(seed, dtype), config, Self::new)
    }
}

impl Module for Mlp {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.first.forward(input)?.tanh()?;
        let x = self.middle.run(|(a, b)| b.forward(&a.forward(&x)?.tanh()?))?;
        self.last.forward(&x.tanh()?)
    }
}

/// The same model in a single process, and its variables by name.
pub(crate) struct Alone {
    layers: Vec<Linear>,
    pub(crate) vars: Vec<(String, Var)>,
}

impl Alone {
    pub(crate) fn new(seed: u64, dtype: DType) -> candle_core::Result<Self> {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, dtype, &Device::Cpu);
        let layer = |index: usize| linear(WIDTHS[index], WIDTHS[index + 1], vb.pp(format!("l{index}")));
        let layers = (0..4).map(layer).collect::<candle_core::Result<_>>()?;
        let start = start(seed, dtype);
        let mut vars: Vec<(String, Var)> = {
            let data = map.data().lock().expect("no panic");
            data.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
        };
        vars.sort_by_key(|(name, _)| name.clone());
        for (name, var) in &vars {
            var.set(&start[name])?;
        }
        Ok(Self { layers, vars })
    }

    pub(crate) fn list(&self) -> Vec<Var> {
        self.vars.iter().map(|(_, var)| var.clone()).collect()
    }

    pub(crate) fn values(&self) -> Vec<f64> {
        numbers(self.vars.iter().map(|(_, var)| var.as_tensor()))
    }
}

impl Module for Alone {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.layers[0].forward(input)?;
        for layer in &self.layers[1..] {
            x = layer.forward(&x.tanh()?)?;
        }
        Ok(x)
    }
}

/// Returns all parameters, then all buffers, on rank 0; nothing on the other ranks.
pub(crate) fn full_state<M>(fsdp: &Fsdp<M>) -> Result<Vec<(String, Tensor)>> {
    let mut all = Vec::new();
    fsdp.visit_full(|name, tensor| {
        all.push((name.to_string(), tensor));
        Ok(())
    })?;
    Ok(all)
}

/// Returns all parameters and buffers of a checkpoint, whole.
pub(crate) fn full_tensors(contents: &Contents) -> strategy::Result<Vec<(String, Tensor)>> {
    let mut whole = read_whole(contents)?;
    Ok(whole.tensors.remove(MODEL).unwrap_or_default().into_iter().collect())
}

/// Returns all parameters, sorted by name, on rank 0; nothing on the other ranks.
pub(crate) fn parameters<M>(fsdp: &Fsdp<M>) -> Result<Vec<f64>> {
    let mut all = full_state(fsdp)?;
    all.sort_by_key(|(name, _)| name.clone());
    Ok(numbers(all.iter().map(|(_, tensor)| tensor)))
}

/// Returns all elements of some tensors, exactly.
pub(crate) fn numbers<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<f64> {
    let one = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    tensors.into_iter().flat_map(|tensor| one(tensor).expect("on the CPU")).collect()
}

#[track_caller]
pub(crate) fn assert_close(left: &[f64], right: &[f64], tolerance: f64) {
    assert_eq!(left.len(), right.len());
    for (index, (left, right)) in left.iter().zip(right).enumerate() {
        let scale = left.abs().max(right.abs()).max(1.0);
        assert!((left - right).abs() <= tolerance * scale, "at {index}: {left} and {right}");
    }
}

/// Two of candle's optimizers, and one of `training`.
pub(crate) enum AnyOptimizer {
    Sgd(SGD),
    AdamW(AdamW),
    Ours(training::Adam),
}

pub(crate) const OPTIMIZERS: usize = 3;

impl AnyOptimizer {
    pub(crate) fn new(kind: usize, vars: Vec<Var>) -> candle_core::Result<Self> {
        let ours = || training::AdamConfig {
            learning_rate: 0.01,
            weight_decay: 0.1,
            ..training::AdamConfig::adamw()
        };
        Ok(match kind {
            0 => Self::Sgd(SGD::new(vars, 0.1)?),
            1 => Self::AdamW(AdamW::new(vars, ParamsAdamW { lr: 0.01, ..Default::default() })?),
            _ => Self::Ours(training::Adam::new(vars, ours())?),
        })
    }

    pub(crate) fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        match self {
            Self::Sgd(optimizer) => optimizer.step(grads),
            Self::AdamW(optimizer) => optimizer.step(grads),
            Self::Ours(optimizer) => optimizer.step(grads),
        }
    }
}
