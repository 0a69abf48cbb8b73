//! `TensorParallel`: a model divided over the ranks of a mesh.

use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, Mesh, Operation, ReduceOp, Stats};
use strategy::average_gradients;
use training::AuditConfig;
use training::internal::{GradSums, lock};

use crate::context::own_backward;
use crate::{
    Context, Error, Parameter, RandomStreams, Result, ShardBuilder, TensorParallelConfig, Weights, same_model,
};

/// A model of which each rank has a part, with its parameters, random streams and gradients.
///
/// The mesh has an axis `tp`, over which layers are divided, and may have an axis `dp`, over which batches are divided and
/// gradients averaged. For each position along other axes there is a separate model, with its own first rank, whose files and
/// checkpoints need separate paths.
///
/// The [first page](crate) of this crate has a training loop.
pub struct TensorParallel<M> {
    model: M,
    parameters: Vec<Parameter>,
    context: Context,
    world: Arc<dyn Communicator>,
    /// `None` if it has a single rank.
    dp: Option<Arc<dyn Communicator>>,
    /// Sums of the gradients of [`backward_no_sync`](Self::backward_no_sync) since the last backward, if there were any.
    held: Mutex<Option<GradSums>>,
    failed: Mutex<Option<Error>>,
    /// How the first backward is checked for missing gradients; `None` after it.
    unaudited: Mutex<Option<AuditConfig>>,
}

impl<M> TensorParallel<M> {
    /// Builds the model with `build`, on every rank of the mesh. Each rank gets its part of the weights.
    ///
    /// # Cost
    /// Five all-gathers of some ten bytes, to check that the ranks agree; if the mesh has other axes, also the creation of a
    /// group of the ranks along `tp` and `dp`.
    ///
    /// # Errors
    /// Errors of `build`, on the other ranks [`Error::PeerBuild`](crate::Error::PeerBuild) instead; on every rank the first
    /// difference between the models; a mesh without an axis `tp`.
    pub fn new(
        mesh: &Mesh,
        config: &TensorParallelConfig,
        weights: &Weights,
        build: impl FnOnce(ShardBuilder) -> Result<M>,
    ) -> Result<Self> {
        let tp = mesh.axis("tp")?.clone();
        let has_dp = mesh.axes().any(|(name, _)| name == "dp");
        let dp = if has_dp { Some(mesh.axis("dp")?.clone()) } else { None };
        let world = mesh.plane(if has_dp { &["dp", "tp"] } else { &["tp"] })?;
        let place = tp.rank();
        let dp_rank = dp.as_ref().map_or(0, |dp| dp.rank());
        let random = RandomStreams::new(config.seed, dp_rank, place);
        let dp = dp.filter(|dp| dp.world_size() > 1);
        let sums = config.sequence_parallel && tp.world_size() > 1;
        let mut context = Context::new(tp, config.sequence_parallel, random);
        if sums || dp.is_some() {
            context = context.with_own_backward();
        }
        let builder = ShardBuilder::new(weights, config, context.clone(), dp.is_some());
        let built = builder.and_then(|builder| {
            let model = build(builder.clone())?;
            Ok((model, builder.finish()?))
        });
        let (model, parameters) = match built {
            Ok((model, parameters)) => (Some(model), Ok(parameters)),
            Err(error) => (None, Err(error)),
        };
        let parameters = same_model::check(&*world, place, config.describe(), parameters)?;
        let Some(model) = model else { return Err(no_model()) };
        let (held, failed) = Default::default();
        let unaudited = Mutex::new(Some(config.audit.clone()));
        Ok(Self { model, parameters, context, world, dp, held, failed, unaudited })
    }

    /// Returns the model.
    ///
    /// # Errors
    /// The first cause, if an earlier backward failed.
    pub fn model(&self) -> Result<&M> {
        self.check_failed()?;
        Ok(&self.model)
    }

    /// Returns the first failure of an earlier backward.
    pub(crate) fn check_failed(&self) -> Result<()> {
        lock(&self.failed).clone().map_or(Ok(()), Err)
    }

    /// Returns this rank's part of each parameter, in order of construction.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the variables, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.parameters.iter().map(|parameter| parameter.var().clone()).collect()
    }

    /// Returns the variables with their names, by which an optimizer's state is saved.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.parameters.iter().map(|p| (p.name().to_string(), p.var().clone())).collect()
    }

    /// Returns the tensor-parallel context of the layers.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Re-seeds the random streams for a step: must be called before each step of a run that may be resumed.
    pub fn begin_step(&self, step: u64) {
        self.context.random().begin_step(step);
    }

    /// Runs backward from `loss`, which every rank of the tensor-parallel group has computed alike. Returns the gradient of
    /// this rank's part of each parameter, averaged over the data-parallel ranks, including those of
    /// [`backward_no_sync`](Self::backward_no_sync) since the last call.
    ///
    /// `loss.backward()` returns only this rank's own gradients. With sequence parallelism, or data parallelism over several
    /// ranks, every divided layer refuses it ([`Error::OutsideBackward`](crate::Error::OutsideBackward)). On a CPU, so do
    /// layers of `training` (norms, `Linear`, `embedding`, ..) with f32 or f64 parameters that every rank holds whole and
    /// whose gradients the ranks combine. It is not detected in a graph that contains neither: candle's own operations
    /// between whole parameters and the loss, or only whole parameters on another device or in 16 bits.
    ///
    /// With several data-parallel ranks, gradients are averaged after backward. A `Ddp` over [`Shards`](crate::Shards), as in the
    /// crate `girandole`, does so while backward computes those of earlier layers.
    ///
    /// # Cost
    /// That of the layers; one all-reduce of the gradients of norms per attention head and, with sequence parallelism, of all
    /// parameters between the divided layers; with data parallelism two all-reduces along `dp`: of a byte for each parameter, and
    /// of this rank's gradients.
    ///
    /// # Errors
    /// Errors of candle's backward; failures of communication. After any of them the `TensorParallel` is unusable.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.pass(|| {
            let held = lock(&self.held).take();
            let mut gradients = self.own_gradients(loss)?;
            if let Some(mut held) = held {
                held.take(&mut gradients)?;
                let mut sums = held.finish()?;
                for var in self.vars() {
                    sums.remove(&var).map(|sum| gradients.insert(&var, sum));
                }
            }
            if let Some(dp) = &self.dp {
                average_gradients(dp, &self.vars(), &mut gradients)?;
            }
            self.audit(&gradients)?;
            Ok(gradients)
        })
    }

    /// Applies [`TensorParallelConfig::audit`] once. All ranks have gradients of the same parameters.
    fn audit(&self, gradients: &GradStore) -> Result<()> {
        let Some(audit) = lock(&self.unaudited).take() else { return Ok(()) };
        let parameters = self.parameters.iter().map(|parameter| {
            (parameter.name(), parameter.var().dims(), gradients.get(parameter.var()).is_some())
        });
        Ok(audit.act("TensorParallel", self.world.rank() == 0, parameters)?)
    }

    /// Runs backward from `loss` without communication along `dp`: adds the gradients to those that the next
    /// [`backward`](Self::backward) averages.
    ///
    /// Gradients of such calls are summed, not averaged: for the mean over k micro-batches, divide each loss by k. Those of
    /// variables that are not parameters of the model are dropped.
    ///
    /// # Cost
    /// That of the layers, and of the sums along `tp` that [`backward`](Self::backward) makes. The sums are kept, as many bytes
    /// as this rank has parameters, twice as many for f16 and bf16, which are summed in f32.
    ///
    /// # Errors
    /// As [`backward`](Self::backward).
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use comm::{Local, Mesh};
    /// use tensor_parallel::{ParallelMlp, TensorParallel, TensorParallelConfig, Weights};
    ///
    /// let differences = Local::run_shared(4, |comm| {
    ///     let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
    ///     let model = |builder| ParallelMlp::new(4, 8, &builder);
    ///     let parallel = TensorParallel::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(1), model)?;
    ///     let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
    ///     let loss = || tensor_parallel::Result::Ok(parallel.model()?.forward(&x)?.sqr()?.mean_all()?);
    ///     let whole = parallel.backward(&loss()?)?;
    ///     parallel.backward_no_sync(&(loss()? / 2.0)?)?;
    ///     let halves = parallel.backward(&(loss()? / 2.0)?)?;
    ///     let weight = &parallel.vars()[0];
    ///     let of = |grads: &candle_core::backprop::GradStore| grads.get(weight).cloned();
    ///     let (Some(whole), Some(halves)) = (of(&whole), of(&halves)) else { return Ok(f32::NAN) };
    ///     Ok((whole - halves)?.abs()?.max_all()?.to_scalar::<f32>()?)
    /// })?;
    /// assert_eq!(differences, [0.0; 4]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        self.pass(|| {
            let mut gradients = self.own_gradients(loss)?;
            Ok(lock(&self.held).get_or_insert_with(|| GradSums::new(self.vars())).take(&mut gradients)?)
        })
    }

    /// Runs a backward, whose failure makes the model unusable.
    fn pass<T>(&self, backward: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check_failed()?;
        let fail = |error: Error| lock(&self.failed).get_or_insert(error).clone();
        own_backward(backward, || drop(fail(Error::Panicked))).map_err(fail)
    }

    /// Computes the gradients of this replica of the model.
    fn own_gradients(&self, loss: &Tensor) -> Result<GradStore> {
        let mut gradients = tracing::info_span!("backward").in_scope(|| ops::backward(loss))?;
        let mut tensors = Vec::new();
        for parameter in self.parameters.iter().filter(|parameter| parameter.is_summed()) {
            let Some(gradient) = gradients.get(parameter.var()) else { continue };
            let gradient = gradient.contiguous()?;
            gradients.insert(parameter.var(), gradient.clone());
            tensors.push(gradient);
        }
        if !tensors.is_empty() {
            self.context.comm().run(Operation::AllReduceCoalesced { tensors, op: ReduceOp::Sum })?;
        }
        Ok(gradients)
    }

    /// Returns the group of all ranks of this model.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// Returns the data-parallel group; `None` if it has a single rank.
    pub(crate) fn dp(&self) -> Option<&Arc<dyn Communicator>> {
        self.dp.as_ref()
    }

    /// Returns this rank's traffic so far, along both axes.
    pub fn stats(&self) -> Stats {
        let along_tp = self.context.comm().stats();
        self.dp.as_ref().map_or(along_tp, |dp| along_tp + dp.stats())
    }
}

fn no_model() -> crate::Error {
    crate::Error::invalid("the model", "none", "this is a mistake in tensor-parallel")
}

impl<M> fmt::Debug for TensorParallel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorParallel({} parameters on {:?})", self.parameters.len(), self.context.comm())
    }
}
