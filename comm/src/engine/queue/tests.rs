//! Tests of the queue, with a runner whose operations end when the test lets them.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use candle_core::{DType, Device, Tensor, Var};

use super::*;
use crate::ReduceOp;
use crate::api::autograd;
use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::base::members::Members;
use crate::failure::diagnosis::Question;

/// How long the runner waits for the test's signal before the operation fails.
const TIME_LIMIT: Duration = Duration::from_secs(20);

struct Gate {
    begun: Sender<()>,
    go: Receiver<()>,
    operations: u64,
    ending: Arc<ShutdownFlag>,
}

impl Run for Gate {
    fn run(&mut self, operation: &Operation, _: &Before) -> Result<()> {
        let failed = |reason: String| Error::system(operation.name(), reason);
        self.begun.send(()).map_err(|error| failed(error.to_string()))?;
        self.go.recv_timeout(TIME_LIMIT).map_err(|error| failed(error.to_string()))?;
        self.operations += 1;
        Ok(())
    }

    fn describe(&self, operation: &Operation) -> String {
        operation.name().into()
    }

    fn stats(&self) -> Stats {
        Stats { operations: self.operations, ..Stats::default() }
    }

    fn ending(&self) -> Arc<ShutdownFlag> {
        self.ending.clone()
    }
}

/// Supervisor of a single rank, which finds no cause, and keeps what was announced.
#[derive(Debug)]
struct Alone(Members, Arc<Mutex<Vec<String>>>);

impl Supervisor for Alone {
    fn begin(&self, _: Fingerprint) {}

    fn wait_for(&self, _: &[crate::transport::links::Wait]) {}

    fn end(&self) {}

    fn announce(&self, reason: &str) {
        lock(&self.1).push(reason.into());
    }

    fn failure(&self) -> Option<Cause> {
        None
    }

    fn ask(&self, _: Question) -> Option<Cause> {
        None
    }

    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &Members {
        &self.0
    }

    fn host(&self, _: usize) -> String {
        String::new()
    }

    fn timeout(&self) -> Duration {
        TIME_LIMIT
    }

    fn slow_warning(&self) -> Duration {
        TIME_LIMIT
    }
}

/// Returns an engine, a receiver that is notified when an operation begins, and a sender that lets it end.
fn gated() -> (OperationQueue, Receiver<()>, Sender<()>) {
    let ((begin, begun), (go, gone)) = (channel(), channel());
    let gate = Gate { begun: begin, go: gone, operations: 0, ending: Arc::default() };
    (OperationQueue::new(0, 1, Box::new(gate), Arc::new(Alone(Members::world(1), Arc::default()))), begun, go)
}

#[test]
fn stats_do_not_wait_for_what_is_under_way() {
    let (engine, begun, go) = gated();
    for done in 0..3 {
        let work = engine.submit(Operation::Barrier).unwrap();
        begun.recv().unwrap();
        assert_eq!(engine.stats().operations, done);
        go.send(()).unwrap();
        work.wait().unwrap();
        assert_eq!(engine.stats().operations, done + 1);
    }
}

#[test]
fn what_is_queued_keeps_no_graph() {
    let (engine, begun, go) = gated();
    let work = engine.submit(Operation::Barrier).unwrap();
    begun.recv().unwrap();
    let x = Var::zeros(3, DType::F32, &Device::Cpu).unwrap();
    let node = Arc::new(());
    let graph = Arc::downgrade(&node);
    let y = autograd::custom("y", &[&x], x.as_detached_tensor().copy().unwrap(), move |gradient| {
        let _ = &node;
        Ok(vec![Some(gradient.clone())])
    });
    let queued = Operation::AllReduce { tensor: y.unwrap(), op: ReduceOp::Sum };
    let queued = engine.submit(queued).unwrap();
    assert!(graph.upgrade().is_none());
    for work in [work, queued] {
        go.send(()).unwrap();
        work.wait().unwrap();
    }
}

#[test]
fn every_operation_lets_go_of_the_graph_and_keeps_its_elements() {
    let var = Var::from_tensor(&Tensor::arange(0f32, 6., &Device::Cpu).unwrap()).unwrap();
    let (a, b, root, op) = (var.as_tensor().clone(), (var.as_tensor() * 2.0).unwrap(), 0, ReduceOp::Sum);
    let (input, output, counts) = (a.clone(), b.clone(), None);
    let both = vec![a.clone(), b.clone()];
    let message = crate::Message::Recv { tensor: b.clone(), from: 0 };
    let operations = [
        Operation::AllReduce { tensor: b.clone(), op },
        Operation::Reduce { tensor: b.clone(), op, root },
        Operation::Broadcast { tensor: a.clone(), root },
        Operation::AllGather { output: output.clone(), input: input.clone(), counts: None },
        Operation::ReduceScatter { output: output.clone(), input: input.clone(), op, counts: None },
        Operation::Gather { output: Some(output.clone()), input: input.clone(), root, counts: None },
        Operation::Scatter { output: output.clone(), input: Some(input.clone()), root, counts },
        Operation::AllToAll { output, input, output_counts: None, input_counts: None },
        Operation::AllReduceCoalesced { tensors: both.clone(), op },
        Operation::BroadcastCoalesced { tensors: both, root },
        Operation::Send { tensor: a.clone(), to: 0 },
        Operation::Recv { tensor: b.clone(), from: 0 },
        Operation::Batch { messages: vec![crate::Message::Send { tensor: a, to: 0 }, message] },
    ];
    let place = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    for operation in operations {
        let before: Vec<usize> = operation.tensors().into_iter().map(place).collect();
        let detached = operation.detached();
        assert!(detached.tensors().iter().all(|tensor| !tensor.track_op()), "{}", detached.name());
        assert_eq!(detached.tensors().into_iter().map(place).collect::<Vec<_>>(), before);
    }
}

#[test]
fn what_only_this_rank_knows_is_announced() {
    let ((begin, begun), (go, gone)) = (channel(), channel());
    let gate = Gate { begun: begin, go: gone, operations: 0, ending: Arc::default() };
    let announced = Arc::<Mutex<Vec<String>>>::default();
    let engine =
        OperationQueue::new(0, 1, Box::new(gate), Arc::new(Alone(Members::world(1), announced.clone())));
    // The operation fails.
    drop((begun, go));
    for _ in 0..2 {
        assert!(matches!(engine.run(Operation::Barrier), Err(Error::System { .. })));
    }
    assert_eq!(lock(&announced).len(), 1);
    assert!(lock(&announced)[0].contains("closed channel"), "{announced:?}");
}
