//! Keys that a user's own model hides, in layouts.

use std::sync::Arc;

use candle_core::{D, DType, Device, Module, Result, Tensor};
use girandole::comm::{Communicator, Local};
use girandole::ops::{
    AttentionConfig, AttentionMask, Documents, Rotary, RotaryConfig, SelfAttention, self_attention,
};
use girandole::training::build::{Builder, Model, Recompute, Unit, Units};
use girandole::training::{Adam, AdamConfig};
use girandole::{Batch, InitialWeights, Layout, Parallel, ParallelConfig};

const FEATURES: usize = 8;
const LEN: usize = 13;
const ROWS: usize = 4;

/// The first feature of a place says whether others see it.
struct Block(SelfAttention);

impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (mark, own) = (x.narrow(D::Minus1, 0, 1)?, x.narrow(D::Minus1, 1, FEATURES)?.contiguous()?);
        let seen = mark.squeeze(D::Minus1)?.to_dtype(DType::U8)?;
        Tensor::cat(&[&mark, &(&own + self.0.forward_with_key_mask(&own, &seen, true)?)?], D::Minus1)
    }
}

struct Net(Vec<Unit<Block>>);

impl Net {
    fn new(builder: &Builder, mask: AttentionMask) -> Result<Self> {
        let rotary = Rotary::new(&RotaryConfig::new(2, LEN), &Device::Cpu)?;
        let config = AttentionConfig { num_kv_heads: Some(2), ..AttentionConfig::new(4, mask) };
        let block = |name: &str| {
            builder.unit(name, |part| {
                let layer = self_attention(FEATURES, 2, config.clone(), part.pp(name).whole())?;
                Ok(Block(layer.with_rotary(rotary.clone())))
            })
        };
        Ok(Self(["a", "b", "c"].into_iter().map(block).collect::<Result<_>>()?))
    }
}

impl Units for Net {
    fn units(&self) -> Vec<&dyn Module> {
        self.0.iter().map(|unit| unit as &dyn Module).collect()
    }
}

impl Model for Net {
    fn output_loss(output: &Tensor, targets: &Tensor) -> Result<Tensor> {
        candle_nn::loss::mse(output, targets)
    }

    fn divides_sequences() -> bool {
        true
    }
}

#[derive(Debug, Clone, Copy)]
struct Setup {
    mask: AttentionMask,
    is_packed: bool,
    is_hidden: bool,
    recompute: Recompute,
}

/// This rank's rows: row 0 has no place that is seen, the others hide some at their beginning, in the middle and at the end.
fn own_batch(parallel: &Parallel<Net>, setup: &Setup) -> Result<Batch> {
    let data = parallel.data_ranks();
    let own: Vec<usize> = (data.rank()..ROWS).step_by(data.world_size()).collect();
    let is_seen = |row: usize, place: usize| {
        !setup.is_hidden || (row > 0 && place != row && !(5 + row..8 + row).contains(&place) && place != 12)
    };
    let number = |row: usize, place: usize, feature: usize| match feature {
        0 => f64::from(u8::from(is_seen(row, place))),
        _ => ((row * 31 + place * 7 + feature * 3) as f64).sin(),
    };
    let numbers = own.iter().flat_map(|row| {
        (0..LEN).flat_map(move |place| (0..=FEATURES).map(move |feature| number(*row, place, feature)))
    });
    let input = Tensor::from_iter(numbers, &Device::Cpu)?.reshape((own.len(), LEN, FEATURES + 1))?;
    let lengths = |row: &usize| vec![1 + *row as u32, 7, 5 - *row as u32];
    let documents = setup.is_packed.then(|| Documents::new(own.iter().map(lengths))).transpose()?;
    Ok(Batch { documents, ..(input.clone(), input.affine(2.0, 0.1)?.cos()?).into() })
}

/// Returns the losses of some steps, and last that of an evaluation.
fn losses(comm: Arc<dyn Communicator>, layout: &str, setup: &Setup) -> girandole::Result<Vec<f64>> {
    let (layout, mask): (Layout, _) = (layout.parse()?, setup.mask);
    let config =
        ParallelConfig { dtype: DType::F64, recompute: setup.recompute, ..ParallelConfig::default() };
    let build = move |builder: &Builder| Net::new(builder, mask);
    let mut parallel = Parallel::new(comm, &layout, InitialWeights::seed(3), &config, build)?;
    let adam = AdamConfig { learning_rate: 0.02, ..AdamConfig::default() };
    let mut adam = Adam::named(parallel.named_vars(), adam)?;
    let batch = own_batch(&parallel, setup)?;
    let mut losses = Vec::new();
    for _ in 0..4 {
        let step = parallel.step_batch(&batch)?;
        adam.step_scaled(&step.grads, 1.0)?;
        losses.push(step.loss);
    }
    losses.push(parallel.evaluate_batch(&batch)?.loss);
    Ok(losses)
}

#[test]
fn keys_that_a_model_hides_are_hidden_in_every_layout() {
    let of = |layout: &str, setup: &Setup| {
        let ranks = layout.parse::<Layout>().unwrap().ranks();
        Local::run_shared(ranks, |comm| Ok(losses(comm, layout, setup)?)).unwrap().remove(0)
    };
    let layouts = ["cp=2", "cp=3", "dp=2,cp=2", "shard=2,cp=2", "pp=3,cp=2", "cp=2,tp=2", "shard=2", "pp=2"];
    for mask in [AttentionMask::Full, AttentionMask::Causal, AttentionMask::SlidingWindow(4)] {
        for (is_packed, recompute) in [(false, Recompute::None), (true, Recompute::Units)] {
            let setup = Setup { mask, is_packed, is_hidden: true, recompute };
            let expected = of("", &setup);
            let seen = of("", &Setup { is_hidden: false, ..setup });
            assert!((expected[0] - seen[0]).abs() > 1e-4, "{setup:?}: what is hidden has to matter");
            for layout in layouts {
                let got = of(layout, &setup);
                let gap = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(gap < 1e-10, "{layout}, {setup:?}: {got:?}, expected {expected:?}");
            }
        }
    }
}
