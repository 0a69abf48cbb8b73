//! Tests of the end of a run, with ranks as threads and with each of them lost at each point.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss};
use comm::{Communicator, ElasticGroup, Local, Stats, Work, all_gather_object};
use ddp::{Ddp, DdpConfig};
use sampler::{BoxError, DataLoader, DataLoaderConfig};
use training::{Sgd, SgdConfig};

use super::*;
use crate::options::CheckpointOptions;
use crate::trainer::{DataParallel, Epoch, Epochs, Observer, RunConfig, RunEnd, RunIdentity, Trainer};

const RANGE: ElasticRanks = ElasticRanks { min: 1, max: 3 };
/// The number of an operation that is never reached.
const NEVER: usize = usize::MAX;

/// Which operation after the last step a rank is lost in, and on which rank that operation fails: it succeeds on the
/// others, as a collective may if a rank dies in it.
#[derive(Debug, Clone, Copy)]
struct Loss {
    at: usize,
    lost: usize,
    fails: Option<usize>,
}

/// The first group of a rank, with a loss.
#[derive(Debug)]
struct Fragile {
    group: Arc<dyn Communicator>,
    loss: Loss,
    /// Operations since the last step; [`NEVER`] before.
    operations: Arc<AtomicUsize>,
}

impl Communicator for Fragile {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn stats(&self) -> Stats {
        self.group.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.group.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> comm::Result<Arc<dyn Communicator>> {
        self.group.subgroup(ranks)
    }

    fn elastic(&self) -> comm::Result<&dyn ElasticGroup> {
        self.group.elastic()
    }

    fn submit(&self, operation: Operation) -> comm::Result<Work> {
        self.group.submit(operation)
    }

    fn run(&self, operation: Operation) -> comm::Result<()> {
        self.group.run(operation)?;
        let before = self.operations.load(Ordering::Relaxed);
        if before == NEVER {
            return Ok(());
        }
        self.operations.store(before + 1, Ordering::Relaxed);
        let Loss { at, lost, fails } = self.loss;
        match Some(self.rank()) {
            rank if before == at && rank == Some(lost) => Err(candle_core::Error::msg("lost").into()),
            // Fails once the lost rank is gone, and so do the operations of all others from then on.
            rank if before == at && rank == fails => {
                self.group.run(Operation::Recv { tensor: Tensor::new(&[0u8], &Device::Cpu)?, from: lost })
            }
            _ => Ok(()),
        }
    }
}

/// Begins to count operations after the last step.
struct AfterSteps(Arc<AtomicUsize>);

impl Observer for AfterSteps {
    fn epoch_ends(&mut self, _: &Epoch<'_>) -> Result<()> {
        self.0.store(0, Ordering::Relaxed);
        Ok(())
    }
}

/// Trains for a step on one of three ranks, and concludes. Returns the operations after the step.
fn live(group: Arc<dyn Communicator>, loss: Loss, trace: &Path, report: impl FnOnce()) -> Result<usize> {
    let operations = Arc::new(AtomicUsize::new(NEVER));
    let fragile = Fragile { group, loss, operations: operations.clone() };
    let mut rank = Rank::from_comm(Arc::new(fragile), &Device::Cpu);
    let number = rank.comm.rank();
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, candle_core::DType::F32, &Device::Cpu);
    let ddp = Ddp::new(rank.comm.clone(), builder, &DdpConfig::default(), |builder| linear(1, 1, builder))?;
    let optimizer = Sgd::named(ddp.named_vars(), SgdConfig::default())?;
    let batch = |rows: Vec<f32>| -> std::result::Result<Tensor, BoxError> {
        Ok(Tensor::new(rows, &Device::Cpu)?.reshape(((), 1))?)
    };
    let samples = Arc::new(vec![0f32, 1.0, 2.0]);
    let loader = DataLoader::new(samples, rank.sampler(3, false)?, batch, DataLoaderConfig::default())?;
    let error = |layer: &Linear, x: &Tensor| loss::mse(&layer.forward(x)?, x);
    let mut trainer = Trainer::new(DataParallel::new(ddp, optimizer, error, &vars), Epochs::new(loader));
    let config = RunConfig {
        name: None,
        end: RunEnd::Epochs(1),
        report: false,
        checkpoints: CheckpointOptions::default(),
        run: RunIdentity::default(),
        find: Box::new(|_| Ok(None)),
        elastic: Some(RANGE),
        reporter: 0,
        page: Box::new(|_| None),
    };
    let validate = |_: &_, rank: &Rank| Ok(all_gather_object(&*rank.comm, &number)?);
    trainer.run_and(&mut rank, &config, &mut AfterSteps(operations.clone()), validate)?;
    drop(trainer);
    let own = RankTrace { rank: number, host: "here".into(), started_unix_us: 0, json: "[]".into() };
    let report = |_: &Rank| {
        report();
        Ok(())
    };
    rank.conclude(Some(RANGE), Duration::from_secs(60), Some((own, trace)), report)?;
    Ok(operations.load(Ordering::Relaxed))
}

/// Returns for each rank the number of its operations, or its error, and how often it has reported the result.
fn end(loss: Loss) -> Vec<(std::result::Result<usize, String>, usize)> {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.json");
    let reports: [AtomicUsize; 3] = Default::default();
    let ends = Local::run_shared(3, |group| {
        let count = &reports[group.rank()];
        let report = || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        Ok(live(group, loss, &trace, report).map_err(|error| error.to_string()))
    });
    assert!(fs::read_to_string(trace).unwrap().contains("rank 0") || loss.lost == 0, "{loss:?}");
    ends.unwrap().into_iter().zip(reports.map(AtomicUsize::into_inner)).collect()
}

#[test]
fn whichever_rank_is_lost_after_the_last_step_the_others_report_the_result() {
    let whole = end(Loss { at: NEVER, lost: 0, fails: None });
    let operations = whole[0].0.clone().unwrap();
    assert_eq!(whole, [(Ok(operations), 1), (Ok(operations), 0), (Ok(operations), 0)]);
    for at in 0..operations {
        for lost in 0..3 {
            for fails in [None, Some(0), Some(1), Some(2)].into_iter().filter(|fails| *fails != Some(lost)) {
                let loss = Loss { at, lost, fails };
                let ends = end(loss);
                for (rank, (outcome, _)) in ends.iter().enumerate() {
                    // In the last operation the lost rank has nothing left to do either.
                    assert_eq!(outcome.is_ok(), rank != lost || at + 1 == operations, "{loss:?}: {ends:?}");
                }
                let reports: Vec<usize> = ends.iter().map(|(_, reports)| *reports).collect();
                match lost {
                    // Reported by the first rank, by the one that replaces it, or by both, as no other one knew of it.
                    0 => assert!(reports[0] + reports[1] > 0 && reports[2] == 0, "{loss:?}: {reports:?}"),
                    _ => assert_eq!(reports, [1, 0, 0], "{loss:?}"),
                }
            }
        }
    }
}
