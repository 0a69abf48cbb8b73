//! A checkpoint of any strategy goes on in any other, on any number of ranks, to the bit.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, VarBuilder, VarMap, linear, loss};
use girandole::DistributedModel;
use girandole::checkpoint::read_whole;
use girandole::comm::{Communicator, Local};
use girandole::ddp::{Ddp, DdpConfig};
use girandole::fsdp::{Fsdp, FsdpConfig, Unit};
use girandole::pipeline::{Modules, Pipeline, PipelineConfig};
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};

type Comm = Arc<dyn Communicator>;
/// Bits of all elements, by set and name.
type Bits = BTreeMap<(String, String), Vec<u64>>;

/// Two layers, one after the other.
struct Two<L>(L, L);

impl<L: Module> Module for Two<L> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?)
    }
}

fn builder(map: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(map, DType::F64, &Device::Cpu)
}

fn layer(vb: VarBuilder<'_>) -> candle_core::Result<Linear> {
    linear(5, 5, vb)
}

fn open(dir: &Path) -> Checkpoints {
    Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 9 }).unwrap()
}

/// Resumes from the latest checkpoint in `from`, if given, and saves one in `to`.
fn pass_on<M: DistributedModel>(
    model: &mut M,
    adam: &mut Adam,
    from: Option<&Path>,
    to: &Path,
) -> Result<(), M::Error> {
    if let Some(from) = from {
        let contents = open(from).latest()?.unwrap();
        model.load_checkpoint(&contents, Some(adam))?;
    }
    model.save_checkpoint(&open(to), Some(adam), &Checkpoint::default()).map(drop)
}

fn ddp(comm: Comm, from: Option<&Path>, to: &Path) -> girandole::Result<()> {
    let build = |vb: VarBuilder<'static>| Ok(Two(layer(vb.pp("a"))?, layer(vb.pp("b"))?));
    let mut ddp = Ddp::new(comm, builder(&VarMap::new()), &DdpConfig::default(), build)?;
    let mut adam = Adam::named(ddp.named_vars(), AdamConfig::default())?;
    if from.is_none() {
        let x = Tensor::ones((2, 5), DType::F64, &Device::Cpu)?;
        let grads = ddp.backward(&loss::mse(&ddp.forward(&x)?, &x)?)?;
        adam.step(&grads)?;
    }
    Ok(pass_on(&mut ddp, &mut adam, from, to)?)
}

fn fsdp(comm: Comm, from: Option<&Path>, to: &Path) -> girandole::Result<()> {
    // The same on every rank; what is loaded replaces it.
    let zeros = VarBuilder::zeros(DType::F64, &Device::Cpu);
    let mut fsdp = Fsdp::new(comm, zeros, &FsdpConfig::default(), |units| {
        let unit = |name: &str| -> candle_core::Result<Unit<Linear>> { units.pp(name).unit(layer) };
        Ok(Two(unit("a")?, unit("b")?))
    })?;
    let mut adam = Adam::named(fsdp.named_vars(), AdamConfig::default())?;
    Ok(pass_on(&mut fsdp, &mut adam, from, to)?)
}

fn pipeline(comm: Comm, from: Option<&Path>, to: &Path) -> girandole::Result<()> {
    let modules = Modules::new().module("a", layer).module("b", layer);
    let x = Tensor::zeros((1, 5), DType::F64, &Device::Cpu)?;
    let mut pipeline = Pipeline::new(
        comm,
        &modules,
        &|map: &VarMap| builder(map),
        &x,
        loss::mse,
        &PipelineConfig::default(),
    )?;
    let mut adam = Adam::named(pipeline.named_vars(), AdamConfig::default())?;
    Ok(pass_on(&mut pipeline, &mut adam, from, to)?)
}

fn bits(dir: &Path) -> Bits {
    let whole = read_whole(&open(dir).latest().unwrap().unwrap()).unwrap();
    let of_set = |(set, tensors): (String, std::collections::HashMap<String, Tensor>)| {
        tensors.into_iter().map(move |(name, tensor)| {
            let values = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
            let values = values.to_vec1::<f64>().unwrap().into_iter().map(f64::to_bits);
            ((set.clone(), name), values.collect())
        })
    };
    whole.tensors.into_iter().flat_map(of_set).collect()
}

#[test]
fn a_checkpoint_of_any_strategy_goes_on_in_any_other() {
    type Run = fn(Comm, Option<&Path>, &Path) -> girandole::Result<()>;
    let steps: [(usize, Run); 7] =
        [(2, ddp), (3, fsdp), (2, pipeline), (1, fsdp), (1, ddp), (1, pipeline), (2, fsdp)];
    let folder = tempfile::tempdir().unwrap();
    let dir = |step: usize| folder.path().join(step.to_string());
    for (step, (ranks, run)) in steps.into_iter().enumerate() {
        let from = step.checked_sub(1).map(&dir);
        Local::run_shared(ranks, |comm| Ok(run(comm, from.as_deref(), &dir(step))?)).unwrap();
    }
    let first = bits(&dir(0));
    assert!(
        first.len() > 8 && first.keys().any(|(set, name)| set == "optimizer" && name == "a.weight.exp_avg")
    );
    for step in 1..steps.len() {
        assert!(bits(&dir(step)) == first, "{step}");
    }
}
