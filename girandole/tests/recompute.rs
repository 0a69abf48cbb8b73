//! Units that are computed again in backward: the same losses and parameters to the bit, in every layout, in less memory.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use candle_core::{DType, Tensor};
use common::{Setup, batch, optimizer, own_batch, step};
use girandole::comm::{Communicator, Local};
use girandole::models::{CausalLm, ModelConfig, Weights};
use girandole::pipeline::ScheduleKind;
use girandole::training::activation_bytes;
use girandole::{Layout, Parallel, ParallelConfig, Recompute};

const STEPS: usize = 4;

/// By rank: losses of steps, that of an evaluation, and all numbers of its parameters.
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

/// Also where the ranks' units take turns on a mesh of two or three axes.
const LAYOUTS: [&str; 10] = [
    "",
    "dp=2",
    "shard=2",
    "tp=2",
    "pp=2",
    "dp=2,shard=2",
    "shard=2,tp=2",
    "pp=2,shard=2",
    "pp=2,dp=2",
    "pp=2,shard=2,tp=2",
];

fn equal_to_the_bit(dtype: DType, tied: bool, schedule: ScheduleKind, layouts: &[&str]) {
    for layout in layouts {
        let setup = Setup { dtype, tied, schedule, recompute: Recompute::None };
        let kept = train(layout, setup);
        for recompute in [Recompute::Units, Recompute::Every(2)] {
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

/// Of 24 equal blocks, in one process.
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
    // While backward is in a unit, all of that one is there as well.
    let with_one_unit = units + kept / 24;
    assert!(with_one_unit <= kept / 4, "{with_one_unit} of {kept}");
    assert!(units < every_other && every_other < 2 * kept / 3, "{units}, {every_other}, {kept}");
}

#[test]
fn a_backward_that_would_lose_gradients_is_refused() {
    let (tokens, targets) = batch(0);
    let parallel = deep(Recompute::Every(8));
    let loss = parallel.model().unwrap().unwrap().loss(&tokens, &targets).unwrap();
    let line = loss.backward().unwrap_err().to_string();
    assert!(line.contains("call `training::backward(&loss)`"), "{line}");
    let grads = girandole::training::backward(&loss).unwrap();
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
