//! The communication time that `fsdp-mlp` reports is that of all groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bin::documents::handbook::fsdp_mlp::FsdpMlpOptions;
use candle_core::Device;
use clap::Parser;
use cli::Command as _;
use cli::rank::Rank;
use comm::{Communicator, Local, Operation, Result, Stats, Work};

/// A communicator whose stats report one second for each operation.
#[derive(Debug)]
struct Counted {
    group: Arc<dyn Communicator>,
    here: AtomicU64,
    /// Operations in all groups of a rank.
    everywhere: Arc<AtomicU64>,
}

impl Counted {
    fn new(group: Arc<dyn Communicator>, everywhere: &Arc<AtomicU64>) -> Self {
        Self { group, here: AtomicU64::new(0), everywhere: everywhere.clone() }
    }

    fn count(&self) {
        self.here.fetch_add(1, Ordering::Relaxed);
        self.everywhere.fetch_add(1, Ordering::Relaxed);
    }
}

impl Communicator for Counted {
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
        Stats { busy_ns: self.here.load(Ordering::Relaxed) * 1_000_000_000, ..self.group.stats() }
    }

    fn world_ranks(&self) -> &[usize] {
        self.group.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self::new(self.group.subgroup(ranks)?, &self.everywhere)))
    }

    fn submit(&self, operation: Operation) -> Result<Work> {
        self.count();
        self.group.submit(operation)
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.count();
        self.group.run(operation)
    }
}

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    options: FsdpMlpOptions,
}

/// Trains on 4 ranks and returns, for each, the communication seconds reported and the number of operations counted.
fn train(sharding: &str, steps: usize) -> Vec<(f64, f64)> {
    let words = format!("x --features 8 --hidden 8 --batch-size 2 --steps {steps} --sharding {sharding}");
    let options = Command::parse_from(words.split(' ')).options;
    Local::run_shared(4, |group| {
        let everywhere = Arc::default();
        let counted = Arc::new(Counted::new(group.clone(), &everywhere));
        let mut rank = Rank::from_comm(counted, &Device::Cpu);
        options.train(options.setup().unwrap(), &mut rank).unwrap();
        let seconds = rank.outcome(()).ranks[group.rank()].communication_s;
        Ok((seconds, everywhere.load(Ordering::Relaxed) as f64))
    })
    .unwrap()
}

#[test]
fn communication_is_that_of_all_groups() {
    for sharding in ["full-shard", "no-shard", "hybrid-shard --shard-ranks 2", "hybrid-shard --shard-ranks 4"]
    {
        // Operations before and after the steps are the same in both runs, so the difference is that of 3 steps.
        let (few, many) = (train(sharding, 2), train(sharding, 5));
        for (rank, (few, many)) in few.into_iter().zip(many).enumerate() {
            let (told, operations) = (many.0 - few.0, many.1 - few.1);
            assert!(operations >= 3.0 && told == operations, "{sharding}, rank {rank}: {told}, {operations}");
        }
    }
}
