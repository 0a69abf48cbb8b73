//! Every schedule terminates over a transport that buffers no message (rendezvous protocol), as MPI and NCCL may.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Local, Message, Operation, Result, Stats, Work};
use pipeline::{Pipeline, PipelineConfig, ScheduleKind};

use crate::common::{
    Comm, ROWS, STEPS, Trained, WIDTH, alone, assert_equal, batch, in_stages, loss, modules, weights,
};

const BLOCKS: usize = 3;

/// Communicator that sends a message only when its receiver has acknowledged that it is ready.
#[derive(Debug)]
struct Rendezvous(Comm);

/// Returns the operation together with the receiver's acknowledgement.
fn met(operation: Operation) -> Operation {
    let word = || Tensor::zeros(1, DType::U8, &Device::Cpu).unwrap();
    let messages = match operation {
        Operation::Send { tensor, to } => {
            vec![Message::Send { tensor, to }, Message::Recv { tensor: word(), from: to }]
        }
        Operation::Recv { tensor, from } => {
            vec![Message::Recv { tensor, from }, Message::Send { tensor: word(), to: from }]
        }
        other => return other,
    };
    Operation::Batch { messages }
}

impl Communicator for Rendezvous {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn backend(&self) -> &'static str {
        "rendezvous"
    }

    fn stats(&self) -> Stats {
        self.0.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.0.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Comm> {
        Ok(Arc::new(Self(self.0.subgroup(ranks)?)))
    }

    fn submit(&self, operation: Operation) -> Result<Work> {
        self.0.submit(met(operation))
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.0.run(met(operation))
    }
}

fn check(schedule: ScheduleKind, ranks: usize, micro_batches: usize) {
    let what = format!("{schedule}, {ranks} ranks, {micro_batches} micro-batches");
    let config = PipelineConfig { schedule, micro_batches, ..PipelineConfig::default() };
    let train = |comm: Comm| Ok(in_stages(Arc::new(Rendezvous(comm)), BLOCKS, &config)?);
    let results = Local::run_shared(ranks, train).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut got: Trained = results.into_iter().flat_map(|(trained, _, _)| trained).collect();
    got.sort_by(|a, b| a.0.cmp(&b.0));
    assert_equal(&got, &alone(BLOCKS, ROWS * micro_batches).0, &what);
}

#[test]
fn no_rank_waits_in_a_send_for_one_that_sends_to_it() {
    for schedule in ScheduleKind::ALL {
        for (ranks, micro_batches) in [(2, 2), (2, 5), (3, 4), (4, 8)] {
            check(schedule, ranks, micro_batches);
        }
    }
}

/// The sender finishes its step while its last messages have not been received yet.
#[test]
fn what_is_on_its_way_is_counted() {
    let config = PipelineConfig { micro_batches: 8, ..PipelineConfig::default() };
    let sent = Local::run_shared(2, |comm| {
        let (comm, example) =
            (Arc::new(Rendezvous(comm)), Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?);
        let mut pipeline = Pipeline::new(comm, &modules(BLOCKS), &weights(), &example, loss, &config)?;
        let mut sent = Vec::new();
        for step in 0..STEPS {
            let (x, y) = batch(step, ROWS * config.micro_batches)?;
            let before = pipeline.stats().bytes_sent;
            pipeline.step(Some(&x), Some(&y))?;
            sent.push(pipeline.stats().bytes_sent - before);
        }
        Ok(sent)
    });
    // One message in each direction per micro-batch, and one byte of acknowledgement for each received message.
    let bytes = config.micro_batches * (ROWS * WIDTH * size_of::<f64>() + 1);
    assert_eq!(sent.unwrap(), vec![vec![bytes as u64; STEPS]; 2]);
}
