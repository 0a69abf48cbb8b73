//! `Ddp`: the wrapper around a data-parallel model.

mod join;

use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder};
use comm::{Communicator, Stats};
use strategy::{ParameterGroups, traffic};

use crate::builder::{HookingBackend, Registry};
use crate::group_setup::{ModelState, set_up_group};
use crate::hook::ReducerRef;
use crate::parameter::Parameter;
use crate::reducer::Reducer;
use crate::{DdpConfig, Error, Result, lock};

/// A model of which every rank has a replica, and whose gradients are averaged over the ranks.
///
/// # Memory
/// Per rank, in addition to what a single process needs: one copy of the parameters, which the model computes with while the
/// optimizer changes the variables. Gradients exist once, in the flat buckets; [`Ddp::backward`] returns views of them. Only
/// the gradient that is being copied into its bucket exists twice. A single rank has no buckets, and copies nothing. While a bucket of f16 or bf16 is averaged, the communicator holds it as f32. If such gradients are accumulated over
/// several backward passes, a sum of each is kept in f32 until its bucket is sent, so that they are rounded once.
///
/// # Failure
/// If a call of [`Ddp::backward`] or [`Ddp::backward_no_sync`] fails, for any reason, the ranks may be out of step: every
/// later call fails immediately with the same cause. The variables are as they were before the failed call. If a rank was
/// lost, the others can continue in a smaller group: [`Ddp::regroup`].
pub struct Ddp<M> {
    model: M,
    parameters: Vec<Parameter>,
    buffers: Vec<(String, Var)>,
    /// Tensors of integers, which are synchronised like parameters and never change.
    integers: Vec<(String, Var)>,
    config: DdpConfig,
    link: ReducerRef,
    reducer: Arc<Reducer>,
}

impl<M> Ddp<M> {
    /// Builds the model with `build`, on every rank, and sets all ranks to rank 0's parameters and buffers.
    ///
    /// `vb` supplies the parameters: variables of a `VarMap` are shared with it, everything else gets new variables.
    /// Parameters of floating-point dtype are trained, and integers stay as rank 0 has them; a name or variable that is requested twice is one parameter. Anything
    /// that the model creates without `vb` is not synchronised.
    ///
    /// # Cost
    /// One all-gather of 24 bytes per rank to compare the models; then the parameters once, in broadcasts of
    /// [`DdpConfig::bucket_bytes`].
    ///
    /// # Errors
    /// Errors of `build`; a parameter that cannot be averaged or is ambiguous; on every rank the first parameter that differs
    /// between the ranks' models; failures of communication.
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
        Self::with_groups(ParameterGroups::of(comm), vb, config, build)
    }

    /// Like [`new`](Self::new), with parameters that only some of the ranks have, such as experts: each is averaged over the ranks
    /// that have it. [`Ddp::pieces`](strategy::DistributedModel::pieces), and so its norm and its checkpoints, are those of this
    /// rank's parameters alone: who divides parameters over ranks knows what each has.
    ///
    /// # Errors
    /// Those of [`new`](Self::new); a [`DdpConfig::hook`] other than [`CommHook::AllReduce`](crate::CommHook::AllReduce), if
    /// there are several groups.
    pub fn with_groups<'a>(
        averaged_over: ParameterGroups,
        vb: VarBuilder<'a>,
        config: &DdpConfig,
        build: impl FnOnce(VarBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        let link = ReducerRef::default();
        let registry: Arc<Mutex<Registry>> = Arc::default();
        let built = build(HookingBackend::builder(vb, registry.clone(), link.clone(), config));
        let Registry { parameters, buffers, integers, .. } = lock(&registry).close();
        let model = built.map_err(Error::during("building the model"))?;
        let state = ModelState { parameters: &parameters, buffers: &buffers, integers: &integers };
        let reducer = set_up_group(averaged_over, &state, config, &link)?;
        let ddp = Self { model, parameters, buffers, integers, config: config.clone(), link, reducer };
        ddp.model()?;
        Ok(ddp)
    }

    /// Continues in another group: a smaller one after a loss ([`shrink`](comm::ElasticGroup::shrink)), or one with new ranks
    /// ([`grow`](comm::ElasticGroup::grow)). Every existing rank of the new group calls this, while a new rank calls
    /// [`Ddp::new`]. All ranks get rank 0's parameters and buffers. Gradients that were not averaged yet are dropped; from
    /// then on the average is over the new group.
    ///
    /// After a loss, some ranks may have taken a step that others have not: first broadcast the parameters and optimizer
    /// state of a rank that is ahead ([`comm::broadcast_tensors`]).
    ///
    /// # Cost
    /// As [`Ddp::new`].
    ///
    /// # Errors
    /// On every rank the first parameter that differs between the ranks' models; failures of communication. After an error
    /// the `Ddp` is in no group; `regroup` can be called again with another one.
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
        let Self { parameters, buffers, integers, .. } = &*self;
        let state = ModelState { parameters, buffers, integers };
        let reducer = set_up_group(ParameterGroups::of(comm), &state, &self.config, &self.link);
        self.reducer = reducer.map_err(|error| self.reducer.fail(error))?;
        self.model().map(drop)
    }

    /// Returns the model, with the variables' current values. Must be called for each forward pass, in training and in
    /// evaluation, since optimizers and loading change the variables and not the copies that the model computes with.
    ///
    /// # Cost
    /// A copy of the parameters, in place.
    ///
    /// # Errors
    /// The first cause, if an earlier call failed.
    pub fn model(&self) -> Result<&M> {
        self.reducer.check()?;
        self.parameters
            .iter()
            .try_for_each(Parameter::refresh)
            .map_err(Error::during("copying parameters to the model"))?;
        Ok(&self.model)
    }

    /// Returns the group, unless an earlier call failed.
    pub(crate) fn comm(&self) -> Result<&dyn Communicator> {
        self.reducer.check()?;
        Ok(self.reducer.comm())
    }

    /// Returns all variables by name: parameters, buffers, integers.
    pub(crate) fn state(&self) -> Vec<(String, Var)> {
        [&self.named_vars(), &self.buffers[..], &self.integers[..]].concat()
    }

    /// Returns this rank's traffic so far in its current group.
    pub fn stats(&self) -> Stats {
        traffic(self.groups())
    }

    /// The groups in which this rank's copy communicates. Several of them may be the same communicator.
    pub fn groups(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        self.reducer.averaged_over().groups()
    }

    /// Returns the parameters' variables, for an optimizer: in order of construction, each once.
    pub fn vars(&self) -> Vec<Var> {
        self.parameters.iter().map(|parameter| parameter.var().clone()).collect()
    }

    /// Returns the same with their names, for an optimizer whose state is kept by name ([`training::Adam::named`]).
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.parameters
            .iter()
            .map(|parameter| (parameter.name().to_string(), parameter.var().clone()))
            .collect()
    }

    /// Returns the variables that are state and not parameters ([`DdpConfig::buffers`]), by name.
    pub fn buffers(&self) -> &[(String, Var)] {
        &self.buffers
    }

    /// Returns the parameters, in order of construction.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Runs backward from `loss`, on every rank. The result holds, by variable, the gradients averaged over ranks, including
    /// those of [`Ddp::backward_no_sync`] since the last call. It is bitwise equal on every rank.
    ///
    /// A parameter that this rank did not use counts as zero here; one that no rank used has no gradient, as in a single
    /// process, and optimizers do not change it. With unequal batches the result is the mean of the ranks' means, as in
    /// PyTorch. Variables that do not belong to the model have this rank's own gradient. If the loss depends on the models of
    /// several `Ddp`s, only this one's parameters get gradients.
    ///
    /// Communication of a bucket starts as soon as the gradients in it are complete, while backward continues.
    ///
    /// # Cost
    /// One all-reduce per bucket ([`DdpConfig::bucket_bytes`]), of the gradients and one more element per parameter; with
    /// several buckets, the first call also gathers 8 bytes of each rank and broadcasts 8 bytes per parameter.
    ///
    /// # Errors
    /// Errors of candle's backward; [`Error::DirectUse`]; [`Error::LateGradient`]; failures of communication. After any of
    /// them the `Ddp` is unusable.
    ///
    /// # Source
    /// Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.reducer.backward(loss, None, true)
    }

    /// Runs backward from `loss` without communication: adds the gradients to those that the next [`Ddp::backward`] averages.
    ///
    /// Gradients of such calls are summed, not averaged: for the mean over k micro-batches, divide each loss by k.
    ///
    /// # Cost
    /// No communication. The sums are kept in the buckets, without a further copy.
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

    /// Runs backward from `loss`, this rank's mean over `weight` samples or tokens. The result holds the gradients of the
    /// mean over the samples of all ranks, `sum(weight * gradient) / sum(weight)`, bitwise equal on every rank. With unequal
    /// batches this is what a single process computes on all batches together; the mean of the ranks' means, which
    /// [`Ddp::backward`] returns, is not.
    ///
    /// A rank whose weight is 0 changes nothing, even if its loss is NaN (the mean over nothing). If all weights are 0, no
    /// parameter has a gradient. A weight of 1 on every rank gives the result of [`Ddp::backward`]. Gradients of
    /// [`Ddp::backward_weighted_no_sync`] since the last call are included with their weights.
    ///
    /// Every rank must call it, or [`Ddp::join`] if it has no more data.
    ///
    /// # Cost
    /// That of [`Ddp::backward`], and an all-reduce of 8 bytes per rank, overlapped with the computation of the first
    /// bucket's gradients. If weights differ, one pass over each bucket.
    ///
    /// # Errors
    /// [`Error::InvalidWeight`] and [`Error::MixedAverages`], which change nothing; otherwise as [`Ddp::backward`].
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

    /// Runs backward from `loss`, a mean over `weight` samples or tokens, without communication: the next
    /// [`Ddp::backward_weighted`] or [`Ddp::join`] includes its gradients in the average. Micro-batches may differ in size,
    /// and ranks in their number of micro-batches; losses need not be divided.
    ///
    /// # Cost
    /// As [`Ddp::backward_no_sync`].
    ///
    /// # Errors
    /// As [`Ddp::backward_weighted`].
    pub fn backward_weighted_no_sync(&self, loss: &Tensor, weight: f64) -> Result<()> {
        self.reducer.backward(loss, Some(weight), false).map(drop)
    }

    /// Compares the parameters of all ranks, bit for bit. Must be called on every rank, at the same point: occasionally
    /// during a long training, or when debugging.
    ///
    /// # Cost
    /// One pass over the parameters, and an all-gather of 8 bytes per rank. Only if they differ: 8 bytes per parameter, then
    /// a broadcast of one parameter.
    ///
    /// # Errors
    /// [`strategy::Error::ParametersDiffer`], the same on every rank, names the first parameter that differs, the ranks, the element
    /// and both values. Training can continue after it. Failures of communication.
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
    /// Returns the current bucket size in bytes: [`DdpConfig::bucket_bytes`], or the size chosen by measurement, once all
    /// were tried. The same on every rank.
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
    /// Runs forward of a model that behaves differently in training and in evaluation.
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
