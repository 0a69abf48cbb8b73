//! A whole training program: own data from a file, a classifier on data-parallel ranks, evaluation, clipping, a learning-rate
//! schedule, checkpoints, metrics, and a page with plots.
//!
//! `cargo run --release -p girandole --example train_classifier -- FOLDER` makes `points.csv` in the folder if it is not there, trains
//! on two ranks, and writes `steps.jsonl`, `run.html` and `model.safetensors`. Kill it and start it again: it resumes.
#![allow(clippy::print_stdout)]

use std::fmt::Write;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, Optimizer, Sequential, VarBuilder, VarMap, linear, seq};
use girandole::DistributedModel;
use girandole::comm::{Communicator, ReduceOp};
use girandole::ddp::{Ddp, DdpConfig};
use girandole::launch::{self, RankContext};
use girandole::ops::cross_entropy;
use girandole::report::metrics::{MetricsWriter, StepDetails, Summary};
use girandole::report::{Evaluation, Quantity, Report, RunSeries, RunState, now_rfc3339};
use girandole::sampler::{DistributedSampler, DistributedSamplerConfig, Generator, Sampler, SharedGenerator};
use girandole::trainer::{Decay, LearningRate};
use girandole::training::internal::write_output;
use girandole::training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints, TorchInit};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const EPOCHS: usize = 10;
/// Rows of a step of each rank.
const BATCH: usize = 25;
const RATE: f64 = 0.02;
const SCHEDULE: LearningRate = LearningRate { warmup: 20, decay: Decay::Cosine, lowest: 0.05 };

/// Points in the plane, and whether each is inside a ring.
struct Points {
    places: Vec<[f32; 2]>,
    classes: Vec<u32>,
}

impl Points {
    fn read(path: &Path) -> Result<Self> {
        let text =
            read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let (mut places, mut classes) = (Vec::new(), Vec::new());
        for (number, line) in text.lines().enumerate() {
            let fields: Vec<&str> = line.split(',').collect();
            let wrong = || format!("{}: line {}: not X,Y,CLASS", path.display(), number + 1);
            let [x, y, class] = fields[..] else { return Err(wrong().into()) };
            places.push([x.parse().map_err(|_| wrong())?, y.parse().map_err(|_| wrong())?]);
            classes.push(class.parse().map_err(|_| wrong())?);
        }
        Ok(Self { places, classes })
    }

    /// Inputs and targets of some rows.
    fn batch(&self, rows: &[usize]) -> Result<(Tensor, Tensor)> {
        let places = Tensor::from_iter(rows.iter().flat_map(|row| self.places[*row]), &Device::Cpu)?;
        let classes: Vec<i64> = rows.iter().map(|row| i64::from(self.classes[*row])).collect();
        Ok((places.reshape((rows.len(), 2))?, Tensor::new(classes, &Device::Cpu)?))
    }
}

/// Stands for a data set that you have: 2,000 points, spread evenly.
fn make_points(path: &Path) -> std::io::Result<()> {
    let mut text = String::new();
    for number in 0..2000 {
        let [x, y] =
            [0.754_877_67, 0.569_840_3].map(|step: f64| (f64::from(number) * step).fract() * 4.0 - 2.0);
        let class = u32::from((0.8..1.6).contains(&x.hypot(y)));
        let _ = writeln!(text, "{x:.4},{y:.4},{class}");
    }
    write_output(path, text.as_bytes())
}

fn build(builder: VarBuilder<'_>) -> candle_core::Result<Sequential> {
    let layer = |inputs, outputs, name: &str| linear(inputs, outputs, builder.pp(name));
    let hidden = seq().add(layer(2, 32, "first")?).add(Activation::Silu).add(layer(32, 32, "second")?);
    Ok(hidden.add(Activation::Silu).add(layer(32, 2, "head")?))
}

/// One rank's part of the training.
struct Training {
    folder: PathBuf,
    comm: Arc<dyn Communicator>,
    points: Points,
    ddp: Ddp<Sequential>,
    adam: Adam,
    checkpoints: Checkpoints,
    /// On the first rank, which alone writes.
    metrics: Option<MetricsWriter>,
    run: RunSeries,
}

impl Training {
    fn new(context: RankContext, folder: &Path) -> Result<Self> {
        let comm: Arc<dyn Communicator> = Arc::new(context.connect()?);
        let (is_first, data) = (comm.rank() == 0, folder.join("points.csv"));
        if is_first && !data.exists() {
            make_points(&data)?;
        }
        comm.barrier()?.wait()?; // the others wait for the file
        let points = Points::read(&data)?;
        let generator = SharedGenerator::from(Generator::new(42)); // PyTorch's initial weights, from a seed
        let builder = TorchInit::var_builder(&generator, &VarMap::new(), DType::F32, &Device::Cpu);
        let ddp = Ddp::new(comm.clone(), builder, &DdpConfig::default(), build)?;
        let adam = Adam::named(ddp.named_vars(), AdamConfig::default())?;
        let keep = CheckpointConfig { dir: folder.join("checkpoints"), ..CheckpointConfig::default() };
        let quantities = ["Learning rate", "Gradient norm", "Accuracy (%)", "Rows per second"];
        let quantities = quantities.map(|name| Quantity { name: name.into(), values: Vec::new() }).to_vec();
        let name = "classifier".to_string();
        let run = RunSeries { name, world_size: comm.world_size(), quantities, ..RunSeries::default() };
        let path = folder.join("steps.jsonl");
        let checkpoints = Checkpoints::open(keep)?;
        let metrics = is_first.then(|| MetricsWriter::append(&path)).transpose()?;
        Ok(Self { folder: folder.into(), comm, points, ddp, adam, checkpoints, metrics, run })
    }

    /// Returns the first epoch, after those of the latest checkpoint.
    fn resume(&mut self) -> Result<usize> {
        let latest = self.checkpoints.latest()?;
        let epoch = latest.as_ref().map_or(0, |latest| latest.epoch);
        if let Some(latest) = latest {
            let extra = self.ddp.load_checkpoint(&latest, Some(&mut self.adam))?;
            // Losses and evaluations until then, for the page.
            self.run = serde_json::from_value(extra)?;
            self.run.world_size = self.comm.world_size();
        }
        // Steps after the checkpoint are repeated.
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.cut(None, epoch as usize, 0))?;
        Ok(epoch as usize)
    }

    fn epoch(&mut self, epoch: usize, held_out: usize) -> Result<()> {
        let (rank, num_replicas) = (self.comm.rank(), self.comm.world_size());
        let dataset_len = self.points.classes.len() - held_out;
        let share = DistributedSamplerConfig { dataset_len, num_replicas, rank, ..Default::default() };
        let mut sampler = DistributedSampler::new(share)?;
        sampler.set_epoch(epoch as u64); // a new order for each epoch
        let rows: Vec<usize> = sampler.iter()?.collect();
        let batches = rows.chunks(BATCH);
        let per_epoch = batches.len();
        for (batch, rows) in batches.enumerate() {
            let learning_rate = RATE * SCHEDULE.factor(epoch * per_epoch + batch, EPOCHS * per_epoch);
            self.adam.set_learning_rate(learning_rate);
            let (x, y) = self.points.batch(rows)?;
            let began = Instant::now();
            let logits = self.ddp.forward_t(&x, true)?;
            let loss = cross_entropy(&logits, &y, None)?;
            let mut grads = self.ddp.backward(&loss)?; // averaged over all ranks
            let grad_norm = self.ddp.clip_grad_norm(&mut grads, 1.0)?;
            self.adam.step(&grads)?;
            let right = logits.argmax(1)?.to_dtype(DType::I64)?.eq(&y)?.to_dtype(DType::F32)?.mean_all()?;
            let mean = Tensor::stack(&[loss.detach(), right], 0)?;
            self.comm.all_reduce(&mean, ReduceOp::Avg)?.wait()?;
            let [loss, right] = mean.to_vec1::<f32>()?[..] else { return Err("two numbers".into()) };
            let rows_per_second = (num_replicas * rows.len()) as f64 / began.elapsed().as_secs_f64();
            let details = StepDetails {
                learning_rate,
                grad_norm,
                tokens_per_second: rows_per_second,
                loss_scale: None,
                balance_loss: None,
                busiest_expert: None,
                pairs: None,
                speed: None,
            };
            if let Some(metrics) = &mut self.metrics {
                metrics.step(None, epoch, batch, loss, Some(&details))?;
            }
            self.run.losses.push(loss);
            let values = [learning_rate as f32, grad_norm as f32, 100.0 * right, rows_per_second as f32];
            self.run.quantities.iter_mut().zip(values).for_each(|(all, value)| all.values.push(value));
        }
        Ok(())
    }

    /// Loss and accuracy on the last `count` rows, of which each rank computes its own.
    fn evaluate(&self, count: usize) -> Result<(f64, f64)> {
        let first = self.points.classes.len() - count + self.comm.rank();
        let rows: Vec<usize> = (first..self.points.classes.len()).step_by(self.comm.world_size()).collect();
        let (x, y) = self.points.batch(&rows)?;
        let logits = self.ddp.forward_t(&x, false)?;
        let loss = (cross_entropy(&logits, &y, None)? * rows.len() as f64)?.detach();
        let right = logits.argmax(1)?.to_dtype(DType::I64)?.eq(&y)?.to_dtype(DType::F32)?.sum_all()?;
        // Sums, since the ranks may have different numbers of rows.
        let sums = Tensor::stack(&[loss, right], 0)?;
        self.comm.all_reduce(&sums, ReduceOp::Sum)?.wait()?;
        let sums = (sums.to_dtype(DType::F64)? / count as f64)?.to_vec1::<f64>()?;
        Ok((sums[0], sums[1]))
    }

    /// Keeps the state after an epoch, and shows it.
    fn save(&mut self, epoch: usize, (loss, accuracy): (f64, f64)) -> Result<()> {
        let step = self.run.losses.len();
        let evaluation = Evaluation { step, loss, sample: None, ..Evaluation::default() };
        if let Some(metrics) = &mut self.metrics {
            metrics.flush()?;
            println!("epoch {epoch}: evaluation loss {loss:.4}, accuracy {:.1} %", 100.0 * accuracy);
        }
        self.run.evaluations.push(evaluation);
        let extra = serde_json::to_value(&self.run)?;
        let now = Checkpoint { epoch: epoch as u64, step: step as u64, extra, ..Checkpoint::default() };
        self.ddp.save_checkpoint(&self.checkpoints, Some(&self.adam), &now)?;
        self.show(RunState::Running)
    }

    /// Writes the page, on the first rank.
    fn show(&self, state: RunState) -> Result<()> {
        if self.metrics.is_none() {
            return Ok(());
        }
        let (title, date) = ("A classifier of points".to_string(), now_rfc3339());
        let page = Report { title, date, state, runs: vec![self.run.clone()], ..Report::default() };
        Ok(page.write(&self.folder.join("run.html"))?)
    }

    fn run(mut self) -> Result<()> {
        let held_out = self.points.classes.len() / 5;
        let first = self.resume()?;
        let (began, before) = (Instant::now(), self.run.seconds);
        for epoch in first..EPOCHS {
            self.epoch(epoch, held_out)?;
            let found = self.evaluate(held_out)?;
            self.run.seconds = before + began.elapsed().as_secs_f64();
            self.save(epoch + 1, found)?;
        }
        self.ddp.save_full(self.folder.join("model.safetensors"))?;
        self.show(RunState::Ended)?;
        let (seconds, world_size) = (self.run.seconds, self.comm.world_size());
        if let Some(mut metrics) = self.metrics.take() {
            metrics.summary(&Summary { seconds, world_size, ..Summary::default() })?;
            metrics.finish();
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    let folder: PathBuf = std::env::args_os().nth(1).unwrap_or("classifier".into()).into();
    launch::run(2, |context| {
        std::fs::create_dir_all(&folder)?;
        Training::new(context, &folder)?.run()
    })
}
