//! A `Trainer` in a user's own program, on ranks that are threads: resuming after any step gives the results of an
//! undisturbed run.
#![allow(clippy::unwrap_used)]

use ops::Dropout;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, ModuleT, VarMap, linear, loss};
use cli::error::{Error, Result};
use cli::options::{CheckpointOptions, ElasticRanks};
use cli::rank::Rank;
use cli::run_log::{LogConfig, RunLog};
use cli::trainer::{
    CheckpointSchedule, DataParallel, Epoch, Epochs, Logged, Observer, RunConfig, RunEnd, RunIdentity, Step,
    StepRandom, Trainer,
};
use comm::{Communicator, Local, LocalConfig};
use ddp::{Ddp, DdpConfig};
use girandole::trainer::ObserverState;
use sampler::{
    BoxError, DataLoader, DataLoaderConfig, DistributedSampler, DistributedSamplerConfig, Generator,
    SharedGenerator,
};
use training::{Adam, AdamConfig, CheckpointConfig, Checkpoints, TorchInit};

const EPOCHS: usize = 3;

/// Sums losses, like a program that prints means, and records epochs.
#[derive(Default)]
struct Sum {
    sum: f64,
    begun: Vec<(usize, usize)>,
}

impl Observer for Sum {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        self.begun.push((epoch.epoch, epoch.batch));
        Ok(())
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        self.sum += f64::from(step.loss()?);
        Ok(())
    }

    fn state(&mut self) -> Result<ObserverState> {
        Ok(ObserverState { values: self.sum.to_bits().into(), ..ObserverState::default() })
    }

    fn load_state(&mut self, _: usize, state: ObserverState) -> Result<()> {
        self.sum = f64::from_bits(state.values.as_u64().unwrap());
        Ok(())
    }
}

/// The results that are compared.
#[derive(Debug, PartialEq)]
struct End {
    weights: Vec<u32>,
    sum: u64,
    losses: Vec<f32>,
    begun: Vec<(usize, usize)>,
}

struct Model(Linear, Dropout);

/// Trains on one rank, writing checkpoints to its own folder or resuming from one.
fn train(comm: Local, reshuffle: bool, keep: &Path, from: Option<&Path>) -> Result<End> {
    let (rank, num_replicas) = (comm.rank(), comm.world_size());
    let (vars, random) = (VarMap::new(), SharedGenerator::from(Generator::new(0)));
    let generator = SharedGenerator::from(Generator::new(5));
    let builder = TorchInit::var_builder(&generator, &vars, DType::F32, &Device::Cpu);
    let dropout = Dropout::new(0.3, random.clone())?;
    let model = |builder| Ok(Model(linear(4, 1, builder)?, dropout));
    let ddp = Ddp::new(Arc::new(comm), builder, &DdpConfig::default(), model)?;
    let optimizer =
        Adam::named(ddp.named_vars(), AdamConfig { learning_rate: 0.1, ..AdamConfig::default() })?;
    let samples: Vec<Vec<f32>> = (0..14).map(|seed| Generator::new(seed).randn(4).unwrap()).collect();
    let config = DistributedSamplerConfig { dataset_len: 14, num_replicas, rank, ..Default::default() };
    let batch = |rows: Vec<Vec<f32>>| -> std::result::Result<Tensor, BoxError> {
        Ok(Tensor::new(rows, &Device::Cpu)?)
    };
    let loader = DataLoader::new(
        Arc::new(samples),
        DistributedSampler::new(config)?,
        batch,
        DataLoaderConfig { batch_size: 2, ..Default::default() },
    )?;
    let loss = |Model(layer, dropout): &Model, x: &Tensor| {
        loss::mse(&layer.forward(&dropout.forward_t(x, true)?)?, &x.sum_keepdim(1)?)
    };
    let random = StepRandom { generator: random, seed: 9 };
    let model = DataParallel::new(ddp, optimizer, loss, &vars).drawing(Some(random), rank);
    let mut trainer = Trainer::new(model, Epochs::new(loader).reshuffling(reshuffle));
    let log = RunLog::new(&LogConfig { keep: true, ..LogConfig::default() }, None);
    let mut observer = Sum::default();
    let mut logged = Logged::new(Some(log), &mut observer);
    let open = |dir: &Path| Checkpoints::open(CheckpointConfig { dir: dir.to_path_buf(), keep: 1000 });
    if let Some(folder) = from {
        let contents = open(folder.parent().unwrap())?.contents(folder)?;
        trainer.restore(&contents, &mut logged)?;
    }
    // Each rank writes its own checkpoints here, since their sums differ. A resumed run writes none: thousands would
    // take too long.
    if from.is_none() {
        trainer.keep_checkpoints(CheckpointSchedule::new(open(keep)?, Some(1), RunIdentity::default()));
    }
    trainer.train(RunEnd::Epochs(EPOCHS), &mut logged)?;
    let losses = logged.finish().losses;
    let mut weights = Vec::new();
    for (_, var) in training::named_vars(&vars) {
        weights.extend(var.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits));
    }
    Ok(End { weights, sum: observer.sum.to_bits(), losses, begun: observer.begun })
}

/// Returns the result of each rank.
fn on_ranks(ranks: usize, reshuffle: bool, keep: &Path, from: Option<&str>) -> Vec<End> {
    let group = Local::group(ranks, &LocalConfig::default()).unwrap();
    std::thread::scope(|scope| {
        let start = |comm: Local| {
            let keep = keep.join(comm.rank().to_string());
            let from: Option<PathBuf> = from.map(|name| {
                keep.parent().unwrap().with_file_name("whole").join(comm.rank().to_string()).join(name)
            });
            scope.spawn(move || train(comm, reshuffle, &keep, from.as_deref()).unwrap())
        };
        let threads: Vec<_> = group.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_step_can_be_gone_on_from() {
    for (ranks, reshuffle) in [(1, true), (2, true), (3, false)] {
        let folder = tempfile::tempdir().unwrap();
        let whole = on_ranks(ranks, reshuffle, &folder.path().join("whole"), None);
        assert_eq!(whole[0].begun, [(0, 0), (1, 0), (2, 0)]);
        assert!(
            whole.iter().all(|end| end.weights == whole[0].weights),
            "all ranks end with the same weights"
        );
        let steps = whole[0].losses.len();
        assert_eq!(steps, EPOCHS * 14usize.div_ceil(ranks).div_ceil(2));
        for step in 1..=steps {
            let name = format!("checkpoint-{step:08}");
            let again = folder.path().join(format!("again-{step}"));
            for (end, whole) in on_ranks(ranks, reshuffle, &again, Some(&name)).iter().zip(&whole) {
                assert_eq!(
                    (&end.weights, end.sum, &end.losses),
                    (&whole.weights, whole.sum, &whole.losses),
                    "step {step}"
                );
            }
        }
    }
}

#[test]
fn a_checkpoint_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    on_ranks(1, true, folder.path(), None);
    let checkpoints =
        Checkpoints::open(CheckpointConfig { dir: folder.path().join("0"), keep: 1000 }).unwrap();
    let contents = checkpoints.latest().unwrap().unwrap();
    let builder = |vars: &VarMap| candle_nn::VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
    let vars = VarMap::new();
    let comm = Arc::new(Local::group(1, &LocalConfig::default()).unwrap().remove(0));
    let ddp = Ddp::new(comm, builder(&vars), &DdpConfig::default(), |builder| linear(3, 1, builder)).unwrap();
    let optimizer = Adam::named(ddp.named_vars(), AdamConfig::default()).unwrap();
    let sampler =
        DistributedSampler::new(DistributedSamplerConfig { dataset_len: 14, ..Default::default() }).unwrap();
    let loader = DataLoader::new(Arc::new(vec![0u8; 14]), sampler, Ok, DataLoaderConfig::default()).unwrap();
    let loss = |_: &Linear, _: &Vec<u8>| Tensor::new(0f32, &Device::Cpu);
    let mut trainer = Trainer::new(DataParallel::new(ddp, optimizer, loss, &vars), Epochs::new(loader));
    let before = vars.all_vars()[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let line = trainer.restore(&contents, &mut ()).unwrap_err().to_string();
    let problem = "its weight is [1, 4], and the model's is [1, 3]: it is of another model";
    assert_eq!(line, format!("{}: {problem}", contents.folder.display()));
    assert_eq!(vars.all_vars()[0].flatten_all().unwrap().to_vec1::<f32>().unwrap(), before);
}

/// Trains on one rank of an elastic run; at the end of its first try, rank 2 fails after its measurements are gathered.
/// Returns how often the rest began the work, and the ranks that ended it together; `None` for the rank that failed.
fn lose_a_rank_at_the_end(comm: Arc<dyn Communicator>) -> Result<Option<(usize, usize)>> {
    let mut rank = Rank::from_comm(comm, &Device::Cpu);
    let vars = VarMap::new();
    let builder = candle_nn::VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let ddp = Ddp::new(rank.comm.clone(), builder, &DdpConfig::default(), |builder| linear(1, 1, builder))?;
    let optimizer = Adam::named(ddp.named_vars(), AdamConfig::default())?;
    let batch = |rows: Vec<f32>| -> std::result::Result<Tensor, BoxError> {
        Ok(Tensor::new(rows, &Device::Cpu)?.reshape(((), 1))?)
    };
    let samples = Arc::new((0..6u8).map(f32::from).collect::<Vec<_>>());
    let loader = DataLoader::new(samples, rank.sampler(6, true)?, batch, DataLoaderConfig::default())?;
    let loss = |layer: &Linear, x: &Tensor| loss::mse(&layer.forward(x)?, x);
    let mut trainer = Trainer::new(DataParallel::new(ddp, optimizer, loss, &vars), Epochs::new(loader));
    let config = RunConfig {
        name: None,
        end: RunEnd::Epochs(2),
        report: false,
        checkpoints: CheckpointOptions::default(),
        run: RunIdentity::default(),
        find: Box::new(|_| Ok(None)),
        elastic: Some(ElasticRanks { min: 1, max: 3 }),
        reporter: 0,
        page: Box::new(|_| None),
    };
    let tries = Cell::new(0);
    let ended = trainer.run_and(&mut rank, &config, &mut (), |_, rank| {
        tries.set(tries.get() + 1);
        if rank.comm.world_ranks()[rank.comm.rank()] == 2 {
            return Err(Error::Checkpoint { problem: "of rank 2".into() });
        }
        Ok(rank.comm.world_size())
    });
    match ended {
        Ok((_, ranks)) => Ok(Some((tries.get(), ranks))),
        Err(Error::Checkpoint { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[test]
fn a_rank_that_is_lost_at_the_end_is_left_out_and_the_others_end_together() {
    let ended = Local::run_shared(3, |comm| {
        lose_a_rank_at_the_end(comm)
            .map_err(|error| comm::Error::from(candle_core::Error::msg(error.to_string())))
    });
    assert_eq!(ended.unwrap(), [Some((2, 2)), Some((2, 2)), None]);
}
