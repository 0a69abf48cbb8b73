//! Recomputation in backward: the same losses and parameters to the bit, in every layout, with less memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Chain, Setup, batch, optimizer, own_batch, step};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{ModuleT, Optimizer};
use girandole::comm::{Communicator, Local};
use girandole::models::{CausalLm, ModelConfig, Weights};
use girandole::ops::{Dropout, activation_bytes};
use girandole::pipeline::ScheduleKind;
use girandole::sampler::Generator;
use girandole::training::build::{Builder, Division, Linear, LinearConfig};
use girandole::training::{Adam, AdamConfig};
use girandole::{InitialWeights, Layout, Parallel, ParallelConfig, Recompute};

const STEPS: usize = 4;

/// By rank: losses of steps, the loss of an evaluation, and all values of its parameters, as bits.
type Trained = Vec<(Vec<u64>, u64, Vec<Vec<u64>>)>;

fn train(layout: &str, setup: Setup) -> Trained {
    let layout: Layout = layout.parse().unwrap();
    let run = |comm| {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let mut optimizer = optimizer(&parallel)?;
        let steps = (0..STEPS).map(|number| Ok(step(&mut parallel, &mut optimizer, number)?.to_bits()));
        let losses = steps.collect::<girandole::Result<Vec<u64>>>()?;
        let (tokens, targets) = own_batch(&parallel, STEPS)?;
        let evaluated = parallel.evaluate(&tokens, &targets)?.loss.to_bits();
        let numbers = |var: &Tensor| var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let bits = |var: &Tensor| Ok(numbers(var)?.into_iter().map(f64::to_bits).collect());
        let vars = parallel.named_vars();
        Ok((losses, evaluated, vars.iter().map(|(_, var)| bits(var)).collect::<girandole::Result<_>>()?))
    };
    Local::run_shared(layout.ranks(), run).unwrap()
}

/// Includes meshes of two and three axes.
const LAYOUTS: [&str; 12] = [
    "", "dp=2", "shard=2", "tp=2", "pp=2", "dp=2,shard=2", "shard=2,tp=2", "pp=2,shard=2", "pp=2,dp=2",
    "pp=2,shard=2,tp=2", "shard=2,cp=2", "pp=2,cp=2",
];

fn equal_to_the_bit(dtype: DType, tied: bool, schedule: ScheduleKind, layouts: &[&str]) {
    for layout in layouts {
        let setup = Setup { dtype, tied, schedule, ..Setup::default() };
        let kept = train(layout, setup);
        for recompute in [Recompute::Units, Recompute::Every(2), Recompute::Selective] {
            let again = train(layout, Setup { recompute, ..setup });
            assert!(again == kept, "{layout}, {setup:?}, {recompute:?}");
        }
    }
}

#[test]
fn the_same_bits_in_f64_with_tied_embeddings() {
    equal_to_the_bit(DType::F64, true, ScheduleKind::OneFOneB, &LAYOUTS);
}

#[test]
fn the_same_bits_in_f32_with_a_head_of_its_own() {
    equal_to_the_bit(DType::F32, false, ScheduleKind::OneFOneB, &LAYOUTS);
}

#[test]
fn the_same_bits_where_weights_are_deferred() {
    for schedule in [ScheduleKind::ZbH1, ScheduleKind::ZbV] {
        for tied in [true, false] {
            equal_to_the_bit(DType::F32, tied, schedule, &["pp=2", "pp=2,shard=2", "pp=2,dp=2"]);
        }
    }
}

/// Builds a model of 24 equal blocks in one process.
fn deep(recompute: Recompute) -> Parallel<CausalLm> {
    let json = r#"{"model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 24,
         "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 16,
         "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
    let config = ModelConfig::from_json(json).unwrap();
    let comm: Arc<dyn Communicator> = Arc::new(Local::group(1, &Default::default()).unwrap().remove(0));
    let weights = Weights::random(&config, 7).unwrap().parts();
    let settings = ParallelConfig { recompute, ..ParallelConfig::default() };
    Parallel::new(comm, &Layout::default(), weights, &settings, move |builder| {
        CausalLm::new(&config, builder)
    })
    .unwrap()
}

#[test]
fn activations_of_24_blocks_need_a_quarter_at_most() {
    let (tokens, targets) = batch(0);
    let bytes = |recompute| {
        let parallel = deep(recompute);
        let model = parallel.model().unwrap().unwrap();
        activation_bytes(&model.loss(&tokens, &targets).unwrap(), [])
    };
    let [kept, every_other, units] = [Recompute::None, Recompute::Every(2), Recompute::Units].map(bytes);
    // During backward in a unit, all activations of that one exist as well.
    let with_one_unit = units + kept / 24;
    assert!(with_one_unit <= kept / 4, "{with_one_unit} of {kept}");
    assert!(units < every_other && every_other < 2 * kept / 3, "{units}, {every_other}, {kept}");
}

#[test]
fn cheap_parts_need_less_than_all_and_keep_products() {
    let (tokens, targets) = batch(0);
    let bytes = |recompute| {
        let parallel = deep(recompute);
        let model = parallel.model().unwrap().unwrap();
        activation_bytes(&model.loss(&tokens, &targets).unwrap(), [])
    };
    let [kept, selective, units] = [Recompute::None, Recompute::Selective, Recompute::Units].map(bytes);
    assert!(units < selective && selective < kept * 2 / 3, "{units}, {selective}, {kept}");
    // For each block: the input, queries, keys, values, the output of attention and its sums, the projected output, two
    // wide activations, and the output of the MLP.
    let numbers = tokens.elem_count() * (32 * 7 + 64 * 2 + 4);
    let rest = units - 24 * 4 * tokens.elem_count() * 32;
    assert_eq!(selective, rest + 24 * 4 * numbers, "{units}");
}

/// Returns the bytes that the ranks send in two steps.
fn sent(recompute: Recompute) -> u64 {
    let run = |comm| {
        let mut parallel = Setup { recompute, ..Setup::default() }.parallel(comm, &"tp=2".parse()?, None)?;
        let mut optimizer = optimizer(&parallel)?;
        for number in 0..2 {
            step(&mut parallel, &mut optimizer, number)?;
        }
        Ok(parallel.stats().bytes_sent)
    };
    Local::run_shared(2, run).unwrap().into_iter().sum()
}

#[test]
fn divided_layers_do_not_communicate_again_for_cheap_parts() {
    let [kept, selective, units] = [Recompute::None, Recompute::Selective, Recompute::Units].map(sent);
    assert!(selective == kept && kept < units, "{kept}, {selective}, {units}");
}

#[test]
fn a_backward_that_would_lose_gradients_is_refused() {
    let (tokens, targets) = batch(0);
    let parallel = deep(Recompute::Every(8));
    let loss = parallel.model().unwrap().unwrap().loss(&tokens, &targets).unwrap();
    let line = loss.backward().unwrap_err().to_string();
    assert!(line.contains("call `ops::backward(&loss)`"), "{line}");
    let grads = girandole::ops::backward(&loss).unwrap();
    assert!(parallel.named_vars().iter().all(|(_, var)| grads.get(var).is_some()));
}

#[test]
fn every_unit_of_none_is_refused() {
    let layout = Layout::default();
    let error = Local::run_shared(1, |comm| {
        let setup = Setup { recompute: Recompute::Every(0), ..Setup::default() };
        Ok(setup.parallel(comm, &layout, None).map(drop).unwrap_err().to_string())
    });
    assert_eq!(error.unwrap(), ["recompute: got Every(0); give 1 or more, or Recompute::None"]);
}

/// A layer with dropout that counts how often it runs.
struct Counted {
    layer: Linear,
    dropout: Dropout,
    runs: Arc<AtomicUsize>,
}

impl Module for Counted {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        x + self.dropout.forward_t(&self.layer.forward(x)?.tanh()?, true)?
    }
}

/// Its input is floating-point, unlike a language model's.
type Net = Chain<Counted>;

const WIDTH: usize = 4;
const UNITS: usize = 5;

impl Net {
    fn new(builder: &Builder, runs: &Arc<AtomicUsize>) -> candle_core::Result<Self> {
        let unit = |place: usize| {
            builder.unit(&format!("{place}"), |part| {
                let layer = part.pp(place).linear(&LinearConfig::new(WIDTH, WIDTH, Division::Whole))?;
                let dropout = Dropout::new(0.4, Generator::new(place as u64))?;
                Ok(Counted { layer, dropout, runs: runs.clone() })
            })
        };
        Ok(Self((0..UNITS).map(unit).collect::<candle_core::Result<_>>()?))
    }
}

/// Returns by rank: losses, how often units have run in steps, and the bytes sent.
fn train_net(layout: &Layout, recompute: Recompute) -> Vec<(Vec<u64>, usize, u64)> {
    let run = |comm| {
        let (runs, rows) = (Arc::new(AtomicUsize::new(0)), 4);
        let all = |rows| Tensor::arange(0f32, (rows * WIDTH) as f32, &Device::Cpu)?.reshape((rows, WIDTH));
        let settings = ParallelConfig {
            micro_batches: 2,
            example: Some(all(rows / 2)?),
            recompute,
            ..ParallelConfig::default()
        };
        let own = runs.clone();
        let weights = InitialWeights::seed(3);
        let mut model =
            Parallel::new(comm, layout, weights, &settings, move |builder| Net::new(builder, &own))?;
        let adam = Adam::named(model.named_vars(), AdamConfig::default());
        let mut optimizer = adam.map_err(girandole::Error::from)?;
        let rank = model.data_ranks().rank() as f64;
        let (x, y) = ((all(rows)? / (10.0 + rank))?, (all(rows)? / 7.0)?.sin()?);
        // Stages have run once to determine their shapes.
        let before = runs.load(Ordering::Relaxed);
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            let step = model.step(&x, &y)?;
            optimizer.step(&step.grads)?;
            losses.push(step.loss.to_bits());
        }
        Ok((losses, runs.load(Ordering::Relaxed) - before, model.stats().bytes_sent))
    };
    Local::run_shared(layout.ranks(), run).unwrap()
}

#[test]
fn units_run_twice_with_the_same_dropout_and_are_gathered_as_often_as_without() {
    for layout in LAYOUTS.into_iter().filter(|layout| !layout.contains("cp")) {
        let layout: Layout = layout.parse().unwrap();
        let kept = train_net(&layout, Recompute::None);
        let micro_batches = 2;
        for (recompute, again) in [(Recompute::Units, UNITS), (Recompute::Every(2), 2)] {
            let got = train_net(&layout, recompute);
            for (rank, ((losses, runs, sent), expected)) in got.iter().zip(&kept).enumerate() {
                let what = format!("{layout}, rank {rank}, {recompute:?}");
                assert_eq!((losses, sent), (&expected.0, &expected.2), "{what}");
                assert!(*runs > expected.1, "{what}");
            }
            let runs = |ranks: &[(Vec<u64>, usize, u64)]| ranks.iter().map(|rank| rank.1).sum::<usize>();
            // All stages of a pipeline together are one model.
            let models = layout.ranks() / layout.axes().iter().find(|(name, _)| *name == "pp").unwrap().1;
            assert_eq!(runs(&kept), models * STEPS * micro_batches * UNITS);
            assert_eq!(runs(&got) - runs(&kept), models * STEPS * micro_batches * again, "{layout}");
        }
    }
}
