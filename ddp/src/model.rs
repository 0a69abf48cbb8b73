//! The wrapper around a model.

use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder};
use comm::{Communicator, Stats};

use crate::builder::{Hooking, Registry};
use crate::hook::Link;
use crate::meeting::meet;
use crate::parameter::Parameter;
use crate::reducer::Reducer;
use crate::{DdpConfig, Error, Result, lock};

/// A model that every rank has a copy of, and whose gradients are averaged over the ranks.
///
/// # Memory
/// Per rank, beyond what one process needs: one copy of the parameters, which the model computes with while the
/// optimizer changes the variables. Gradients exist once, in the flat buckets that [`Ddp::backward`] gives out views
/// of; a gradient on its way to its bucket is a second copy of that one parameter only. While a bucket of f16 or bf16
/// is averaged, the communicator holds it as f32. Where such gradients are accumulated over several backward passes, there is
/// a sum of each in f32 until its bucket goes, so that they are rounded once.
///
/// # Failure
/// When a call of [`Ddp::backward`] or [`Ddp::backward_no_sync`] fails, for whatever reason, the ranks may be out of
/// step: every later call fails at once with the same cause. The variables are as they were before the failed call. Where a
/// rank was lost, the others can go on in a smaller group: [`Ddp::regroup`].
pub struct Ddp<M> {
    model: M,
    parameters: Vec<Parameter>,
    buffers: Vec<(String, Var)>,
    config: DdpConfig,
    link: Link,
    reducer: Arc<Reducer>,
}

impl<M> Ddp<M> {
    /// Builds the model with `build`, on every rank, and gives all ranks rank 0's parameters and buffers.
    ///
    /// `vb` says where parameters come from: variables of a `VarMap` are shared with it, anything else gets variables
    /// of its own. Parameters of floating-point dtype are trained; a name or variable that is asked for twice is one
    /// parameter. What the model makes without `vb` is its own affair on each rank.
    ///
    /// # Cost
    /// One all-gather of 16 bytes a rank to compare the models; then the parameters once, in broadcasts of
    /// [`DdpConfig::bucket_bytes`].
    ///
    /// # Errors
    /// What `build` fails with; a parameter that cannot be averaged or is ambiguous; on every rank the first parameter
    /// in which the ranks' models differ; failures of communication.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use comm::{Local, LocalConfig};
    /// use ddp::{Ddp, DdpConfig};
    ///
    /// // The only rank of its group; see the crate's page for several.
    /// let comm = Local::group(1, &LocalConfig::default())?.remove(0);
    /// let variables = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    /// let ddp = Ddp::new(Arc::new(comm), vb, &DdpConfig::default(), |vb| linear(3, 2, vb.pp("layer")))?;
    /// assert_eq!(ddp.parameters()[0].name(), "layer.weight");
    /// assert_eq!(ddp.vars().len(), variables.all_vars().len());
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn new<'a>(
        comm: Arc<dyn Communicator>,
        vb: VarBuilder<'a>,
        config: &DdpConfig,
        build: impl FnOnce(VarBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        let link = Link::default();
        let registry: Arc<Mutex<Registry>> = Arc::default();
        let built = build(Hooking::builder(vb, registry.clone(), link.clone(), config));
        let (parameters, buffers) = lock(&registry).close();
        let model = built.map_err(Error::during("building the model"))?;
        let reducer = meet(comm, (&parameters, &buffers), config, &link)?;
        let ddp = Self { model, parameters, buffers, config: config.clone(), link, reducer };
        ddp.model()?;
        Ok(ddp)
    }

    /// Goes on in another group: a smaller one after a loss ([`shrink`](comm::ElasticGroup::shrink)), or one with newcomers
    /// ([`grow`](comm::ElasticGroup::grow)). Every rank of it calls this, while a newcomer calls [`Ddp::new`]. All ranks get rank 0's
    /// parameters and buffers. Gradients that were not averaged yet are forgotten; from now on the average is over the new
    /// group.
    ///
    /// After a loss some ranks may have taken a step that others have not: let the one that is ahead give its parameters and
    /// its optimizer's state to all ([`comm::broadcast_tensors`]) before.
    ///
    /// # Cost
    /// As [`Ddp::new`].
    ///
    /// # Errors
    /// On every rank the first parameter in which the ranks' models differ; failures of communication. After these it is in
    /// no group, and can go on in another one.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Result, Tensor};
    /// # use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
    /// # use comm::{Communicator, Local};
    /// # use ddp::{Ddp, DdpConfig};
    /// // Of three ranks one leaves after the second step.
    /// let trained = Local::run_shared(3, |mut comm| {
    ///     # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let leaves = comm.rank() == 0;
    ///     let mut ddp = Ddp::new(comm.clone(), vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
    ///     let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
    ///     let mut step = 0;
    ///     while step < if leaves { 2 } else { 4 } {
    ///         let loss = ddp.forward(&Tensor::ones((4, 1), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
    ///         match ddp.backward(&loss) {
    ///             Ok(grads) => {
    ///                 optimizer.step(&grads)?;
    ///                 step += 1;
    ///             }
    ///             Err(ddp::Error::Comm(error)) if error.is_loss() => {
    ///                 comm = comm.elastic()?.shrink()?;
    ///                 // All have taken as many steps here: one that leaves lets its last step end.
    ///                 ddp.regroup(comm.clone())?;
    ///             }
    ///             Err(error) => return Err(error.into()),
    ///         }
    ///     }
    ///     Ok((comm.world_size(), ddp.vars()[1].to_vec1::<f32>()?))
    /// })?;
    /// assert_eq!((trained[1].0, &trained[1]), (2, &trained[2]));
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()> {
        self.reducer = meet(comm, (&self.parameters, &self.buffers), &self.config, &self.link)?;
        self.model().map(drop)
    }

    /// The model, with the variables' present values. To be called for each forward pass, in training as in evaluation,
    /// since optimizers and loading change the variables and not what the model computes with.
    ///
    /// # Cost
    /// A copy of the parameters, in place.
    ///
    /// # Errors
    /// The cause, if an earlier call failed.
    pub fn model(&self) -> Result<&M> {
        self.reducer.check()?;
        self.parameters
            .iter()
            .try_for_each(Parameter::refresh)
            .map_err(Error::during("copying parameters to the model"))?;
        Ok(&self.model)
    }

    /// What this rank has sent and received so far, in the group that it was made with.
    pub fn stats(&self) -> Stats {
        self.reducer.comm().stats()
    }

    /// The parameters' variables, for an optimizer: in order of construction, each once.
    pub fn vars(&self) -> Vec<Var> {
        self.parameters.iter().map(|parameter| parameter.var().clone()).collect()
    }

    /// The same with their names, for an optimizer whose state is kept by name ([`training::Adam::named`]).
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.parameters
            .iter()
            .map(|parameter| (parameter.name().to_string(), parameter.var().clone()))
            .collect()
    }

    /// Variables that are state and not parameters ([`DdpConfig::buffers`]), by name.
    pub fn buffers(&self) -> &[(String, Var)] {
        &self.buffers
    }

    /// The parameters, in order of construction.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Backward from `loss`, on every rank; the result holds, by variable, the mean over ranks of the gradients, those
    /// of [`Ddp::backward_no_sync`] since the last call added. It is equal to the bit on every rank.
    ///
    /// A parameter that this rank did not use counts as zero here; one that no rank used has no gradient, as in one
    /// process, and optimizers leave it alone. With unequal batches it is the mean of the ranks' means, as in PyTorch.
    /// Variables that are not the model's have this rank's own gradient. If the loss goes through the models of
    /// several `Ddp`s, only this one's parameters get gradients.
    ///
    /// Communication of a bucket begins as soon as the gradients in it are complete, while backward goes on.
    ///
    /// # Cost
    /// One all-reduce for each bucket ([`DdpConfig::bucket_bytes`]), one element for each parameter more than the
    /// gradients have; the first call also gathers 8 bytes of each rank and broadcasts 8 bytes for each parameter if there are
    /// several buckets.
    ///
    /// # Errors
    /// What candle's backward fails with; [`Error::DirectUse`]; [`Error::LateGradient`]; failures of communication. After any
    /// of them the `Ddp` is of no use any more.
    ///
    /// # Source
    /// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.reducer.backward(loss, None, true)
    }

    /// Backward from `loss` on this rank alone: adds the gradients to those that the next [`Ddp::backward`] averages.
    ///
    /// They are summed and not averaged over such calls: for the mean over k micro-batches, divide each loss by k.
    ///
    /// # Cost
    /// No communication. The sums lie in the buckets; no further copy.
    ///
    /// # Errors
    /// As [`Ddp::backward`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear};
    /// # use comm::{Local, LocalConfig};
    /// # use ddp::{Ddp, DdpConfig};
    /// # let comm = Arc::new(Local::group(1, &LocalConfig::default())?.remove(0));
    /// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
    /// let micro_batch = Tensor::new(&[[1f32], [2.0]], &Device::Cpu)?;
    /// ddp.backward_no_sync(&(ddp.forward(&micro_batch)?.sum_all()? / 2.0)?)?;
    /// let grads = ddp.backward(&(ddp.forward(&micro_batch)?.sum_all()? / 2.0)?)?;
    /// let weight = grads.get(&ddp.vars()[0]).map(Tensor::flatten_all).transpose()?;
    /// assert_eq!(weight.map(|grad| grad.to_vec1::<f32>()).transpose()?, Some(vec![3.0]));
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        self.reducer.backward(loss, None, false).map(drop)
    }

    /// Backward from `loss`, this rank's mean over `weight` samples or tokens; the result holds the gradients of the mean
    /// over those of all ranks, `sum(weight * gradient) / sum(weight)`, equal to the bit on every rank. With unequal
    /// batches this is what one process has on all batches together; the mean of the ranks' means, which
    /// [`Ddp::backward`] gives, is not.
    ///
    /// A rank whose weight is 0 changes nothing, even if its loss is NaN, the mean over nothing. Where all weights are 0
    /// no parameter has a gradient. A weight of 1 on every rank gives the result of [`Ddp::backward`]. Gradients of
    /// [`Ddp::backward_weighted_no_sync`] since the last call count with their weights.
    ///
    /// Every rank must call it, or [`Ddp::join`] where it has no more data.
    ///
    /// # Cost
    /// That of [`Ddp::backward`], and an all-reduce of 8 bytes for each rank, which is under way while backward computes
    /// the first bucket's gradients. Where weights differ, one pass over each bucket.
    ///
    /// # Errors
    /// [`Error::InvalidWeight`] and [`Error::MixedAverages`], which change nothing; else as [`Ddp::backward`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
    /// # use comm::{Communicator, Local};
    /// # use ddp::{Ddp, DdpConfig};
    /// // Rank 0 has one sample, rank 1 has three.
    /// let batches = [vec![4f32], vec![1.0, 2.0, 3.0]];
    /// let gradients = Local::run_shared(2, |comm| {
    ///     let batch = &batches[comm.rank()];
    ///     # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear_no_bias(1, 1, vb))?;
    ///     let x = Tensor::from_slice(batch, (batch.len(), 1), &Device::Cpu)?;
    ///     let loss = ddp.forward(&x)?.mean_all()?;
    ///     let grads = ddp.backward_weighted(&loss, batch.len() as f64)?;
    ///     Ok(grads.get(&ddp.vars()[0]).map(|grad| grad.flatten_all()?.to_vec1::<f32>()).transpose()?)
    /// })?;
    /// // The mean of all four; the mean of the ranks' means would be 3.
    /// assert_eq!(gradients, [Some(vec![2.5]), Some(vec![2.5])]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn backward_weighted(&self, loss: &Tensor, weight: f64) -> Result<GradStore> {
        self.reducer.backward(loss, Some(weight), true)
    }

    /// Backward from `loss`, a mean over `weight` samples or tokens, on this rank alone: what the next
    /// [`Ddp::backward_weighted`] or [`Ddp::join`] averages has it in. Micro-batches need not be equal, nor their number
    /// the same on every rank; no loss is divided by hand.
    ///
    /// # Cost
    /// As [`Ddp::backward_no_sync`].
    ///
    /// # Errors
    /// As [`Ddp::backward_weighted`].
    pub fn backward_weighted_no_sync(&self, loss: &Tensor, weight: f64) -> Result<()> {
        self.reducer.backward(loss, Some(weight), false).map(drop)
    }

    /// Takes part in a step of the ranks that still have data, and gives their averaged gradients, for this rank's
    /// optimizer too: so its parameters stay equal to theirs. `None` when no rank has data any more; then every rank has
    /// come here, and training can go on together.
    ///
    /// The others call [`Ddp::backward_weighted`], as always. The average is that of those who have data, which this
    /// rank does not change: with samples as weights, the mean over all samples of the step; with a weight of 1, the mean
    /// over the ranks that are left (in PyTorch: `join(divide_by_initial_world_size=False)`. Its default divides by all
    /// ranks, so that late samples count less; that is a loss times the fraction of ranks left).
    /// What [`Ddp::backward_weighted_no_sync`] has gathered goes along in the first step.
    ///
    /// # Cost
    /// That of [`Ddp::backward_weighted`]; nothing more for those who have data. The last call: an all-reduce of 8 bytes
    /// for each rank.
    ///
    /// # Errors
    /// As [`Ddp::backward`]. Where the others call [`Ddp::backward`], without a weight, every rank gets
    /// [`comm::Error::Mismatch`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
    /// # use comm::{Communicator, Local};
    /// # use ddp::{Ddp, DdpConfig};
    /// // Rank 0 has one batch, rank 1 has three.
    /// let trained = Local::run_shared(2, |comm| {
    ///     let batches = vec![Tensor::ones((4, 1), DType::F32, &Device::Cpu)?; 1 + 2 * comm.rank()];
    ///     # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
    ///     let mut optimizer = SGD::new(ddp.vars(), 0.1)?;
    ///     for x in batches {
    ///         let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
    ///         optimizer.step(&ddp.backward_weighted(&loss, x.dim(0)? as f64)?)?;
    ///     }
    ///     while let Some(grads) = ddp.join()? {
    ///         optimizer.step(&grads)?;
    ///     }
    ///     Ok(ddp.vars()[1].to_vec1::<f32>()?)
    /// })?;
    /// assert_eq!(trained[0], trained[1]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn join(&self) -> Result<Option<GradStore>> {
        self.reducer.join()
    }

    /// Compares the parameters of all ranks, bit for bit. To be called on every rank, at the same place: now and then in a
    /// long training, or while looking for a mistake.
    ///
    /// # Cost
    /// One pass over the parameters, and an all-gather of 8 bytes a rank. Only where they differ: 8 bytes for each
    /// parameter, then a broadcast of one parameter.
    ///
    /// # Errors
    /// [`Error::ParametersDiffer`], the same on every rank, names the first parameter that differs, the ranks, the element
    /// and both values. Training can go on after it. Failures of communication.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap, linear};
    /// # use comm::{Communicator, Local};
    /// # use ddp::{Ddp, DdpConfig};
    /// let messages = Local::run_shared(3, |comm| {
    ///     # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let rank = comm.rank();
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(1, 1, vb))?;
    ///     ddp.check_parameters()?;
    ///     ddp.vars()[1].set(&ddp.vars()[1].affine(0.0, if rank == 2 { 0.5 } else { 0.25 })?)?;
    ///     Ok(ddp.check_parameters().err().map(|error| error.to_string()).unwrap_or_default())
    /// })?;
    /// assert!(messages[0].starts_with(
    ///     "parameter bias is not the same on every rank: at [0] rank 2 has 0.5, and rank 0 has 0.25"
    /// ));
    /// assert_eq!(messages[0], messages[2]);
    /// # Ok::<(), ddp::Error>(())
    /// ```
    pub fn check_parameters(&self) -> Result<()> {
        self.reducer.check_parameters(&self.parameters)
    }
}

impl<M> Ddp<M> {
    /// The size of buckets in use, in bytes: that of [`DdpConfig::bucket_bytes`], or the one that was chosen by
    /// measurement, once all were tried. The same on every rank.
    pub fn bucket_bytes(&self) -> usize {
        self.reducer.bucket_bytes()
    }
}

impl<M: Module> Module for Ddp<M> {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        self.model()?.forward(input)
    }
}

impl<M: ModuleT> Ddp<M> {
    /// Forward of a model that does something else in training than in evaluation.
    ///
    /// # Errors
    /// Those of [`Ddp::model`] and of the model.
    pub fn forward_t(&self, input: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.model()?.forward_t(input, train)
    }
}

impl<M> fmt::Debug for Ddp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ddp({} parameters on {:?})", self.parameters.len(), self.reducer.comm())
    }
}
