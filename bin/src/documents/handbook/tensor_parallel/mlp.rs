//! `tensor-parallel-mlp`: the handbook's two feed-forward layers, divided over ranks.

use candle_core::{DType, Device, Tensor};
use clap::Args;
use cli::prelude::*;
use cli::start::MOST_RANKS;
use cli::trainer::sampler_state;
use sampler::Generator;
use tensor_parallel::{
    Context, ParallelMlp, Result as LayerResult, ShardBuilder, TensorParallel, TensorParallelConfig, Weights,
};
use training::{Contents, FileError, TensorFile};

use super::mesh::{
    self, MeshOptions, OnMesh, Task, TensorParallelRunConfig, Trained, memory_per_rank, weights,
};
use crate::documents::shared::python::Float;

/// Options of `tensor-parallel-mlp`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains fc2(gelu(fc1(x))) on random samples with Adam and the mean squared error. fc1 is divided
over the ranks by its outputs, fc2 by its inputs. At the end it prints what each rank held and sent, as
measured, and what it would hold and send with a copy of the whole model on each rank.

--data FILE holds the tensors x and y, f32 of shape (samples, hidden size). --init and --save hold
PyTorch's state_dict: fc1.weight (4 x hidden size, hidden size), fc1.bias, fc2.weight, fc2.bias.")]
pub struct TensorParallelMlpOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) mesh: MeshOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub(crate) epochs: usize,
    /// Samples per step, on each data-parallel rank
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.001", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Samples in the data set
    #[arg(long, value_name = "N", default_value = "640", value_parser = count, conflicts_with = "data")]
    pub(crate) samples: usize,
    /// Features of a sample; the hidden layer is 4 times as wide
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count, help_heading = "Model")]
    pub(crate) hidden_size: usize,
}

/// Samples and their targets, both (samples, hidden size), and the source of the weights.
pub struct Setup {
    x: Tensor,
    y: Tensor,
    weights: Weights,
}

impl OnMesh for TensorParallelMlpOptions {
    fn mesh(&self) -> &MeshOptions {
        &self.mesh
    }
}

impl Command for TensorParallelMlpOptions {
    const NAME: &'static str = "tensor-parallel-mlp";
    const WORLD_SIZE: usize = 2;
    const JOINT: &'static [&'static str] = &["save"];
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        settings!(self, lr, batch_size, hidden_size, samples)
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let (dp, tp) = self.mesh.sizes(world_size)?;
        if !self.hidden_size.saturating_mul(4).is_multiple_of(tp) {
            let help = format!(
                "the first layer has four times as many outputs, which are divided over {tp} tensor-parallel ranks (--tp): \
                 give a size so that four times the size is a multiple of {tp}"
            );
            return refuse("--hidden-size", self.hidden_size, help);
        }
        memory_check::check_model(
            [("--hidden-size", self.hidden_size)],
            |[size]| 8.0 * size * size + 5.0 * size,
            |all| memory_per_rank(&self.common, world_size, tp, |parts| memory_check::with_adam(all, parts)),
        )?;
        // Inputs and targets, f32.
        let bytes = self.hidden_size.saturating_mul(2 * 4);
        memory_check::check_samples("--samples", self.samples, bytes, &self.common, world_size)?;
        if self.mesh.sequence_parallel {
            MeshOptions::divides("--batch-size", self.batch_size, tp)?;
            if let (None, Some(help)) = (&self.common.data, self.uneven(self.samples, (dp, tp))) {
                return refuse("--samples", self.samples, help);
            }
        }
        Ok(())
    }

    fn setup(&self) -> Result<Setup> {
        let device = self.common.device()?;
        let mut generator = Generator::new(self.common.seed);
        let (x, y) = match &self.common.data {
            Some(path) => read(&TensorFile::open(path)?, self.hidden_size)?,
            None => {
                let shape = (self.samples, self.hidden_size);
                let numbers = self.samples.saturating_mul(self.hidden_size);
                let mut draw = || -> Result<Tensor> {
                    Ok(Tensor::from_vec(generator.randn(numbers)?, shape, &Device::Cpu)?)
                };
                (draw()?, draw()?)
            }
        };
        let weights = weights(&self.common, generator);
        let (x, y) = (x.to_device(&device)?, y.to_device(&device)?);
        let model = |builder| Mlp::new(self.hidden_size, &builder);
        weights.check(&TensorParallelConfig::default(), model)?;
        Ok(Setup { x, y, weights })
    }

    fn prepare(&self, setup: &Setup, world_size: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        if let (Some(path), true) = (&self.common.data, self.mesh.sequence_parallel) {
            let samples = setup.x.dim(0)?;
            if let Some(help) = self.uneven(samples, self.mesh.sizes(world_size)?) {
                let reason = format!("it has {samples} samples; {help}");
                return Err(FileError::tensor(path, "x", reason).into());
            }
        }
        note(format_args!(
            "the PyTorch handbook draws other weights on each rank, gathers the first layer's output only to divide it \
            again, and sums \
             the gradients of divided weights over ranks, to whom they do not belong; here each rank has its part of one \
             model, and the losses are those of one process"
        ));
        Ok(())
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let weights = setup.weights.clone();
        let config = TensorParallelRunConfig::of(self, weights, self.batch_size, self.lr, rank)?;
        mesh::train(self, &Regression(setup), &config, rank)
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        mesh::print(self.mesh.sizes(outcome.ranks.len())?, &outcome.trained)
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let mut facts = self.mesh.facts(outcome.ranks.len());
        facts.push(fact("hidden size", self.hidden_size));
        facts.push(fact("batch size, each data-parallel rank", self.batch_size));
        facts.push(fact("learning rate", self.lr));
        Report { facts, runs: vec![outcome.trained.series], ..Report::default() }
    }
}

impl Experiment for TensorParallelMlpOptions {
    options_of!(epochs);

    fn copies(&self, world_size: usize) -> usize {
        self.mesh.copies(world_size)
    }

    fn check_left(&self, contents: &Contents, world_size: usize) -> Result<()> {
        let state = sampler_state(&contents.sampler)?;
        let left = state.dataset_len.saturating_sub(state.consumed);
        self.check_rest(contents.epoch as usize, left, self.mesh.sizes(world_size)?)
    }
}

impl TensorParallelMlpOptions {
    /// Returns the size of the last batch of each of `dp` data-parallel ranks, if it is not a full one; else 0.
    fn last_batch(&self, samples: usize, dp: usize) -> usize {
        samples.div_ceil(dp) % self.batch_size
    }

    /// Checks that an epoch can be resumed with this many samples left: their last batch must be divisible over `tp`.
    fn check_rest(&self, epoch: usize, samples: usize, (dp, tp): (usize, usize)) -> Result<()> {
        let last = self.last_batch(samples, dp);
        if !self.mesh.sequence_parallel || epoch >= self.epochs || last.is_multiple_of(tp) {
            return Ok(());
        }
        let fits = |dp: &usize| self.last_batch(samples, *dp).is_multiple_of(tp);
        let way = (1..=samples.min(MOST_RANKS)).filter(fits).min_by_key(|other| other.abs_diff(dp));
        let way = way.map_or("give another --tp".into(), |other| format!("continue with --dp {other}"));
        let help = format!(
            "with --sequence-parallel each batch is divided over {tp} ranks (--tp), but the last batch \
             of the {samples} samples left in the epoch would have {last}: {way}"
        );
        refuse("--dp", dp, help)
    }

    /// Describes the problem if the last batch cannot be divided over the tensor-parallel ranks.
    fn uneven(&self, samples: usize, (dp, tp): (usize, usize)) -> Option<String> {
        let last = self.last_batch(samples, dp);
        (!last.is_multiple_of(tp)).then(|| {
            format!(
                "with --sequence-parallel each batch is divided over {tp} ranks (--tp), but the last batch of an epoch has \
                 {last}: give a number of samples that leaves it a multiple of {tp}"
            )
        })
    }
}

fn read(file: &TensorFile, hidden_size: usize) -> Result<(Tensor, Tensor)> {
    file.only(&["x", "y"])?;
    let x = file.samples("x", hidden_size, &Device::Cpu)?;
    let y = file.tensor("y", &[Some(x.dim(0)?), Some(hidden_size)], DType::F32, &Device::Cpu)?;
    Ok((x, y))
}

/// The handbook's model.
#[derive(Debug)]
pub struct Mlp {
    layers: ParallelMlp,
    context: Context,
}

impl Mlp {
    /// Creates `fc1` and `fc2`.
    ///
    /// # Errors
    /// Those of [`ParallelMlp::new`].
    pub fn new(hidden_size: usize, builder: &ShardBuilder) -> LayerResult<Self> {
        let layers = ParallelMlp::new(hidden_size, 4 * hidden_size, builder)?;
        Ok(Self { layers, context: builder.context().clone() })
    }

    /// # Shapes
    /// (batch, hidden size) to the same, on every rank. With sequence parallelism, the batch is divided between the
    /// two.
    ///
    /// # Errors
    /// Those of [`ParallelMlp::forward`].
    pub fn forward(&self, x: &Tensor) -> LayerResult<Tensor> {
        let y = self.layers.forward(&self.context.split_sequence(x)?)?;
        self.context.gather_sequence(&y)
    }
}

struct Regression(Setup);

impl Task for Regression {
    type Model = Mlp;

    fn model(&self, builder: ShardBuilder) -> LayerResult<Mlp> {
        Mlp::new(self.0.x.dims()[1], &builder)
    }

    fn loss(&self, parallel: &TensorParallel<Mlp>, samples: &[usize]) -> Result<Tensor> {
        let places: Vec<u32> = samples.iter().map(|place| *place as u32).collect();
        let Setup { x, y, .. } = &self.0;
        let places = Tensor::from_vec(places, samples.len(), x.device())?;
        let (x, y) = (x.index_select(&places, 0)?, y.index_select(&places, 0)?);
        Ok(ops::mse(&parallel.model()?.forward(&x)?, &y)?)
    }

    fn samples(&self) -> usize {
        self.0.x.dims()[0]
    }

    fn line(&self, _: usize, _: usize, loss: f32) -> String {
        format!("Loss: {}", Float(loss.into()))
    }
}
