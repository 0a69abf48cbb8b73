//! A model on all ranks.

use std::fmt;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, Mesh, Operation, ReduceOp, Stats};

use crate::averaging::Averaging;
use crate::context::own_backward;
use crate::{
    Context, Parameter, RandomStreams, Result, ShardBuilder, TensorParallelConfig, Weights, agreement,
};

/// A model of which each rank has a part, and what belongs to it: its parameters, its random numbers, its gradients.
///
/// The mesh has an axis `tp`, over which layers are divided, and may have an axis `dp`, over which batches are: gradients are
/// averaged along it. Other axes are not this model's: for each place along them there is a model of its own, with a first rank of
/// its own, whose files and checkpoints need a place of their own.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::Optimizer;
/// use comm::{Local, Mesh};
/// use tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
/// use training::{Adam, AdamConfig};
///
/// let sizes = LanguageModelConfig { vocab_size: 20, d_model: 8, num_heads: 2, num_layers: 1, max_len: 6, ..Default::default() };
/// let losses = Local::run_shared(2, |comm| {
///     let mesh = Mesh::new(comm, &[("dp", 1), ("tp", 2)])?;
///     let config = TensorParallelConfig { sequence_parallel: true, ..Default::default() };
///     let model = |builder| LanguageModel::new(builder, &sizes);
///     let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(42), model)?;
///     let config = AdamConfig { learning_rate: 0.05, ..AdamConfig::default() };
///     let mut optimizer = Adam::named(parallel.named_vars(), config).map_err(candle_core::Error::from)?;
///     let tokens = Tensor::zeros((3, 6), DType::U32, &Device::Cpu)?;
///     for _ in 0..20 {
///         let loss = parallel.model().loss(&tokens, &tokens)?;
///         let mut grads = parallel.backward(&loss)?;
///         parallel.clip_grad_norm(&mut grads, 1.0)?; // by the norm over all ranks
///         optimizer.step(&grads)?;
///     }
///     Ok(parallel.model().loss(&tokens, &tokens)?.to_scalar::<f32>()?)
/// })?;
/// assert!(losses[0] == losses[1] && losses[0] < 2.0);
/// # Ok::<(), comm::Error>(())
/// ```
pub struct TensorParallel<M> {
    model: M,
    parameters: Vec<Parameter>,
    context: Context,
    world: Arc<dyn Communicator>,
    /// None where there is one rank.
    dp: Option<Arc<dyn Communicator>>,
    averaging: Option<Arc<Averaging>>,
}

impl<M> TensorParallel<M> {
    /// Builds the model with `build`, on every rank of the mesh. Each rank gets its part of the weights.
    ///
    /// # Cost
    /// An all-gather of a hundred bytes, to see whether the ranks agree; where the mesh has other axes, a group of the ranks along
    /// `tp` and `dp`.
    ///
    /// # Errors
    /// What `build` fails with, on the other ranks [`Error::PeerBuild`](crate::Error::PeerBuild) in its place; on every rank
    /// the first thing in which the models differ; a mesh without an axis `tp`.
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
        let averaging = dp.as_ref().map(|dp| Arc::new(Averaging::new(dp.clone())));
        let builder = ShardBuilder::new(weights, config, context.clone(), averaging.clone());
        let built = builder.and_then(|builder| {
            let model = build(builder.clone())?;
            Ok((model, builder.finish()?))
        });
        let (model, parameters) = match built {
            Ok((model, parameters)) => (Some(model), Ok(parameters)),
            Err(error) => (None, Err(error)),
        };
        let parameters = agreement::check(&*world, place, config.describe(), parameters)?;
        let Some(model) = model else { return Err(no_model()) };
        Ok(Self { model, parameters, context, world, dp, averaging })
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// This rank's part of each parameter, in order of construction.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The same, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.parameters.iter().map(|parameter| parameter.var().clone()).collect()
    }

    /// The same with their names, by which an optimizer's state is saved.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.parameters.iter().map(|p| (p.name().to_string(), p.var().clone())).collect()
    }

    /// What layers know of the ranks.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Random numbers begin anew: to be called before each step of a run that may be resumed.
    pub fn begin_step(&self, step: u64) {
        self.context.random().begin_step(step);
    }

    /// Backward from `loss`, which every rank of the tensor-parallel group has computed alike: the gradient of this rank's part
    /// of each parameter, the mean over the data-parallel ranks.
    ///
    /// `loss.backward()` gives this rank's own gradients only. With sequence parallelism or data parallelism over several ranks it is
    /// refused ([`Error::OutsideBackward`](crate::Error::OutsideBackward)) by every divided layer, and on a CPU also by layers of
    /// `training` (norms, `Linear`, `embedding`, ..) whose parameters of f32 or f64 every rank has whole, where ranks put their gradients
    /// together. A graph of which neither is a part is not noticed: operations of candle's alone between whole parameters and the loss, or
    /// whole parameters alone on another device or in 16 bits.
    ///
    /// Where there are several data-parallel ranks, the divided layers' gradients go out as soon as there is a megabyte of them, while
    /// backward computes those of earlier layers; the rest follows in one. A weight that is used in several parts that are computed again
    /// ([`training::recompute`]) has several gradients, which go out as one sum: the first backward shows how often they come, and sends
    /// those weights at its end.
    ///
    /// # Cost
    /// That of the layers; with sequence parallelism one all-reduce of the parameters between the divided layers; with data
    /// parallelism all-reduces of this rank's gradients, along `dp`; a weight whose gradients come more often than before is sent twice.
    ///
    /// # Errors
    /// What candle's backward fails with; failures of communication, after which the group is of no use.
    ///
    /// # Source
    /// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let own = || self.own_gradients(loss);
        match &self.averaging {
            Some(averaging) => averaging.backward(&self.parameters, own),
            None => own(),
        }
    }

    /// The gradients of this copy of the model.
    fn own_gradients(&self, loss: &Tensor) -> Result<GradStore> {
        let mut gradients =
            own_backward(|| tracing::info_span!("backward").in_scope(|| training::backward(loss)))?;
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

    /// All ranks of this model.
    pub(crate) fn world(&self) -> &dyn Communicator {
        &*self.world
    }

    /// The group that batches are divided over, where there are several ranks.
    pub(crate) fn dp(&self) -> Option<&Arc<dyn Communicator>> {
        self.dp.as_ref()
    }

    /// What this rank has sent and received so far, along both axes.
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
