//! Communication counts: as many operations and bytes as Megatron-LM, overlapped in backward with the computation of weight
//! gradients.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Tensor, Var};
use comm::{Communicator, Mesh, Operation, Stats, Work};
use common::Comm;
use ops::AttentionMask;
use tensor_parallel::{
    ParallelTransformerLayer, Result, TensorParallel, TensorParallelConfig, TransformerLayerConfig, Weights,
};
use tracing::span;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::{Layer, Registry};

type Log = Arc<Mutex<Vec<String>>>;

/// As [`common::on_mesh`]. Somebody always wants spans: a call site that a thread without a subscriber reaches first, while one with a
/// subscriber begins, would be silent for a moment in both.
fn on_mesh<T: Send>(dp: usize, tp: usize, body: impl Fn(&Mesh) -> Result<T> + Sync) -> Vec<T> {
    // Fails if another test has done so.
    let _ = tracing::subscriber::set_global_default(Registry::default());
    common::on_mesh(dp, tp, body)
}

/// Communicator that records the operations of this group and of its subgroups.
#[derive(Debug)]
struct Recording {
    inner: Comm,
    log: Log,
}

impl Recording {
    fn note(&self, how: &str, operation: &Operation) {
        let (name, elements) = match operation {
            Operation::AllReduce { tensor, .. } => ("all_reduce", tensor.elem_count()),
            Operation::AllGather { output, .. } => ("all_gather", output.elem_count()),
            Operation::ReduceScatter { input, .. } => ("reduce_scatter", input.elem_count()),
            Operation::AllReduceCoalesced { tensors, .. } => {
                ("coalesced", tensors.iter().map(Tensor::elem_count).sum())
            }
            _ => ("other", 0),
        };
        self.log.lock().unwrap().push(format!("{how} {name} {elements}"));
    }
}

impl Communicator for Recording {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn backend(&self) -> &'static str {
        "recording"
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.inner.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> comm::Result<Comm> {
        Ok(Arc::new(Recording { inner: self.inner.subgroup(ranks)?, log: self.log.clone() }))
    }

    fn submit(&self, operation: Operation) -> comm::Result<Work> {
        self.note("submit", &operation);
        self.inner.submit(operation)
    }

    fn run(&self, operation: Operation) -> comm::Result<()> {
        self.note("run", &operation);
        self.inner.run(operation)
    }
}

/// Tracing layer that records the spans of this thread.
struct Spans(Log);

impl<S: tracing::Subscriber> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &span::Attributes<'_>, _: &span::Id, _: Context<'_, S>) {
        self.0.lock().unwrap().push(format!("span {}", attributes.metadata().name()));
    }
}

/// Batch, length and features of the activations.
const SHAPE: (usize, usize, usize) = (3, 8, 16);
const ELEMENTS: usize = SHAPE.0 * SHAPE.1 * SHAPE.2;

#[test]
fn each_gradient_is_averaged_once() {
    for (dp, tp) in [(2, 1), (2, 2), (3, 1)] {
        let logs = on_mesh(dp, tp, |mesh| {
            let log = Log::default();
            let comm: Comm = Arc::new(Recording { inner: mesh.world().clone(), log: log.clone() });
            let mesh = Mesh::new(comm, &[("dp", dp), ("tp", tp)])?;
            let config = TensorParallelConfig::default();
            let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), |builder| {
                let layer = |place| tensor_parallel::ParallelMlp::new(16, 12, &builder.pp(place));
                (0..3).map(layer).collect::<Result<Vec<_>>>()
            })?;
            let mut y = Tensor::ones((2, 16), DType::F32, &Device::Cpu)?;
            for layer in parallel.model()? {
                y = layer.forward(&y)?;
            }
            log.lock().unwrap().clear();
            parallel.backward(&y.sqr()?.sum_all()?)?;
            Ok(log.lock().unwrap().clone())
        });
        for log in logs {
            let own = 3 * ((2 * 16 * 12 + 12) / tp + 16);
            let averages: Vec<&String> = log.iter().filter(|line| line.contains(" coalesced ")).collect();
            assert_eq!(averages, [&format!("run coalesced {own}")], "{log:?}");
        }
    }
}

/// Returns what a sequence of layers records in forward, and in backward.
fn record(tp: usize, layers: usize, sequence_parallel: bool) -> Vec<(Vec<String>, Vec<String>)> {
    on_mesh(1, tp, |mesh| {
        let log = Log::default();
        let comm: Comm = Arc::new(Recording { inner: mesh.world().clone(), log: log.clone() });
        let mesh = Mesh::new(comm, &[("tp", tp)])?;
        let config = TensorParallelConfig { sequence_parallel, ..TensorParallelConfig::default() };
        let sizes = TransformerLayerConfig {
            d_model: SHAPE.2,
            num_heads: 4,
            d_ff: 24,
            mask: AttentionMask::Causal,
            dropout: 0.0,
        };
        let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), |builder| {
            (0..layers)
                .map(|place| ParallelTransformerLayer::new(&sizes, &builder.pp(place)))
                .collect::<Result<Vec<_>>>()
        })?;
        // A variable, as if there were layers before.
        let x = Var::from_tensor(&Tensor::randn(0f32, 1.0, SHAPE, &Device::Cpu)?)?;
        let own = parallel.context().split_sequence(&x)?;
        log.lock().unwrap().clear();
        let mut y = own;
        for layer in parallel.model()? {
            y = layer.forward_t(&y, true)?;
        }
        let forward = std::mem::take(&mut *log.lock().unwrap());
        let loss = y.sqr()?.sum_all()?;
        let subscriber = Registry::default().with(Spans(log.clone()));
        tracing::subscriber::with_default(subscriber, || parallel.backward(&loss))?;
        let backward = std::mem::take(&mut *log.lock().unwrap());
        Ok((forward, backward))
    })
}

fn count(log: &[String]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for line in log {
        if let Some((_, operation)) = line.split_once(' ').filter(|(how, _)| *how != "span") {
            *counts.entry(operation).or_insert(0) += 1;
        }
    }
    counts
}

#[test]
fn two_all_reduces_forward_and_two_backward_for_each_layer() {
    let all_reduce = format!("all_reduce {ELEMENTS}");
    for (tp, layers) in [(2, 1), (2, 3), (4, 2), (1, 2)] {
        for (forward, backward) in record(tp, layers, false) {
            assert_eq!(count(&forward), BTreeMap::from([(&all_reduce[..], 2 * layers)]));
            assert_eq!(count(&backward), BTreeMap::from([(&all_reduce[..], 2 * layers)]));
        }
    }
}

#[test]
fn as_many_bytes_with_sequence_parallelism() {
    let (gather, scatter) = (format!("all_gather {ELEMENTS}"), format!("reduce_scatter {ELEMENTS}"));
    for (tp, layers) in [(2, 1), (2, 3), (4, 2)] {
        for (forward, backward) in record(tp, layers, true) {
            // A reduce-scatter and an all-gather send as many bytes as an all-reduce.
            let expected = BTreeMap::from([(&gather[..], 2 * layers), (&scatter[..], 2 * layers)]);
            assert_eq!(count(&forward), expected);
            // Gradients of parameters that every rank holds whole are summed once, and the parts of the input's gradient are
            // gathered.
            let sum = format!("coalesced {}", layers * 6 * SHAPE.2);
            let mut expected = expected;
            *expected.entry(&gather).or_default() += 1;
            expected.insert(&sum, 1);
            assert_eq!(count(&backward), expected);
        }
    }
}

#[test]
fn the_input_gradient_is_under_way_while_the_weight_gradient_is_computed() {
    for sequence_parallel in [false, true] {
        for (_, backward) in record(2, 2, sequence_parallel) {
            let begun = backward.iter().enumerate().filter(|(_, line)| line.starts_with("submit"));
            let begun: Vec<usize> = begun.map(|(place, _)| place).collect();
            assert_eq!(begun.len(), 4, "{backward:?}");
            for place in begun {
                let after: Vec<&String> = backward[place + 1..].iter().take(2).collect();
                assert_eq!(after, ["span weight gradient", "span wait for input gradient"]);
            }
        }
    }
}

#[test]
fn an_input_that_nothing_was_computed_for_has_no_gradient_to_send() {
    let sent = on_mesh(1, 2, |mesh| {
        let log = Log::default();
        let comm: Comm = Arc::new(Recording { inner: mesh.world().clone(), log: log.clone() });
        let mesh = Mesh::new(comm, &[("tp", 2)])?;
        let config = TensorParallelConfig::default();
        let model = |builder| tensor_parallel::ParallelMlp::new(4, 8, &builder);
        let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(1), model)?;
        log.lock().unwrap().clear();
        let y = parallel.model()?.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?;
        parallel.backward(&y.sum_all()?)?;
        Ok(log.lock().unwrap().len())
    });
    assert_eq!(sent, [1, 1]);
}
