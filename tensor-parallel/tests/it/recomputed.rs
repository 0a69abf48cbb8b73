//! Gradients of recomputation (activation checkpointing): a parameter may get several in one pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{Part, copied, gap, on_mesh, whole};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::Init;
use ops::{LayerNorm, recompute, recompute_cheap};
use proptest::prelude::*;
use sampler::Generator;
use tensor_parallel::{
    ColumnConfig, ColumnParallelLinear, Context, Result, RowConfig, RowParallelLinear, ShardBuilder,
    TensorParallel, TensorParallelConfig, Weights, norm,
};
use training::internal::GradSums;

const LAYERS: usize = 3;
const WIDTH: usize = 4;
/// Hidden size of a small model, all of which fits into one bucket.
const SMALL: usize = 6;
/// Hidden size of a large model, whose layers are each larger than a bucket, even if divided in two.
const LARGE: usize = 30_000;

struct Layer {
    norm: LayerNorm,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    scale: Tensor,
}

impl Layer {
    fn new(hidden: usize, builder: &ShardBuilder) -> Result<Self> {
        Ok(Self {
            norm: norm(WIDTH, &builder.pp("norm"))?,
            up: ColumnParallelLinear::new(WIDTH, hidden, &ColumnConfig::default(), &builder.pp("up"))?,
            down: RowParallelLinear::new(hidden, WIDTH, &RowConfig::default(), &builder.pp("down"))?,
            scale: builder.get_between(WIDTH, "scale", Init::Const(0.7))?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = self.down.forward(&self.up.forward(&self.norm.forward(x)?)?.tanh()?)?;
        x + y.broadcast_mul(&self.scale)?.sin()?
    }
}

/// How a layer is used.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Plain,
    Segment,
    /// A recomputed segment that keeps the results of matrix products.
    Cheap,
    /// In a recomputed segment, and in another one nested in it.
    Nested,
}

/// One use of a layer.
#[derive(Clone, Copy, Debug)]
struct Use {
    layer: usize,
    how: How,
    /// Bit mask of the data-parallel ranks that have this use.
    copies: u8,
}

impl Use {
    fn of(layer: usize, how: How) -> Self {
        Self { layer, how, copies: 0xff }
    }
}

type Model = Vec<Arc<Layer>>;

fn forward(model: &Model, uses: &[Use], copy: usize, x: &Tensor, again: bool) -> candle_core::Result<Tensor> {
    let mut x = x.clone();
    for usage in uses.iter().filter(|usage| (usage.copies >> copy) & 1 == 1) {
        let layer = model[usage.layer].clone();
        let part = move |x: &Tensor| layer.forward(x);
        x = match (usage.how, again) {
            (How::Nested, true) => recompute(&x, move |x| part(&recompute(&part(x)?, part.clone())?))?,
            (How::Nested, false) => part(&part(&part(&x)?)?)?,
            (How::Segment, true) => recompute(&x, part)?,
            (How::Cheap, true) => recompute_cheap(&x, part)?,
            _ => part(&x)?,
        };
    }
    Ok(x)
}

fn input(step: usize, copy: usize) -> Tensor {
    let mut generator = Generator::new((100 * step + copy) as u64);
    let numbers = generator.rand(4 * WIDTH).unwrap();
    let tensor = Tensor::from_vec(numbers, (1, 4, WIDTH), &Device::Cpu).unwrap();
    tensor.to_dtype(DType::F64).unwrap()
}

fn loss(model: &Model, uses: &[Use], at: (usize, usize), context: &Context, again: bool) -> Result<Tensor> {
    let (step, copy) = at;
    let x = context.split_sequence(&input(step, copy))?;
    let y = context.gather_sequence(&forward(model, uses, copy, &x, again)?)?;
    Ok(y.sqr()?.sum_all()?)
}

/// What is computed: the uses in each step, and the number of backwards per step.
struct Run<'a> {
    hidden: usize,
    steps: &'a [Vec<Use>],
    backwards: usize,
    sequence_parallel: bool,
}

impl Run<'_> {
    fn model(&self, mesh: &comm::Mesh) -> Result<TensorParallel<Model>> {
        let sequence_parallel = self.sequence_parallel;
        let config =
            TensorParallelConfig { dtype: DType::F64, sequence_parallel, ..TensorParallelConfig::default() };
        TensorParallel::new(mesh, &config, &Weights::seed(5), |builder| {
            let layer = |place| Ok(Arc::new(Layer::new(self.hidden, &builder.pp(place))?));
            (0..LAYERS).map(layer).collect()
        })
    }

    /// Returns, by step and parameter, the mean gradient over replicas; nothing for parameters that no replica uses.
    fn expected(&self, dp: usize) -> Vec<BTreeMap<String, Tensor>> {
        let mut all = on_mesh(1, 1, |mesh| {
            let parallel = self.model(mesh)?;
            let steps = self.steps.iter().enumerate().map(|(step, uses)| {
                let of = |copy| loss(parallel.model()?, uses, (step, copy), parallel.context(), false);
                let losses = (0..dp).map(of).collect::<Result<Vec<_>>>()?;
                let mean = (Tensor::stack(&losses, 0)?.sum_all()? * (self.backwards as f64 / dp as f64))?;
                Ok(whole(&[parts(&parallel, &parallel.backward(&mean)?)]))
            });
            steps.collect::<Result<Vec<_>>>()
        });
        all.remove(0)
    }

    fn check(&self, dp: usize, tp: usize) {
        let expected = self.expected(dp);
        let ranks = on_mesh(dp, tp, |mesh| {
            let parallel = self.model(mesh)?;
            let copy = mesh.axis("dp")?.rank();
            let steps = self.steps.iter().enumerate().map(|(step, uses)| {
                let mut sums = GradSums::new(parallel.vars());
                for _ in 0..self.backwards {
                    let loss = loss(parallel.model()?, uses, (step, copy), parallel.context(), true)?;
                    sums.take(&mut parallel.backward(&loss)?)?;
                }
                Ok(parts(&parallel, &sums.finish()?))
            });
            steps.collect::<Result<Vec<_>>>()
        });
        for replica in ranks.chunks(tp) {
            for (step, expected) in expected.iter().enumerate() {
                let got = whole(&replica.iter().map(|rank| rank[step].clone()).collect::<Vec<_>>());
                let names = |all: &BTreeMap<String, Tensor>| all.keys().cloned().collect::<Vec<_>>();
                assert_eq!(names(&got), names(expected), "step {step}");
                for (name, got) in &got {
                    let error = gap(got, &expected[name]);
                    assert!(error < 1e-9, "dp {dp}, tp {tp}, step {step}: {name}: {error:.1e}");
                }
            }
        }
    }
}

/// Returns the gradients that exist.
fn parts(parallel: &TensorParallel<Model>, gradients: &candle_core::backprop::GradStore) -> Vec<Part> {
    let part = |p: &tensor_parallel::Parameter| {
        Some((p.name().to_string(), copied(gradients.get(p.var())?), p.split()))
    };
    parallel.parameters().iter().filter_map(part).collect()
}

const MESHES: [(usize, usize, bool); 5] =
    [(2, 1, false), (2, 2, true), (2, 2, false), (3, 1, false), (1, 2, false)];

fn check(hidden: usize, steps: &[Vec<Use>], backwards: usize) {
    // The large models are slow.
    let meshes = if hidden == LARGE { &MESHES[..2] } else { &MESHES[..] };
    for &(dp, tp, sequence_parallel) in meshes {
        Run { hidden, steps, backwards, sequence_parallel }.check(dp, tp);
    }
}

#[test]
fn a_layer_in_several_segments_has_the_sum_of_all() {
    use How::*;
    let cases = [
        vec![(0, Segment), (1, Segment), (0, Segment)],
        // Between the uses of one layer all others follow, and their buckets are sent.
        vec![(2, Segment), (1, Segment), (0, Segment), (2, Segment), (1, Segment), (2, Segment)],
        // Both in a recomputed segment and outside.
        vec![(2, Plain), (1, Segment), (0, Segment), (2, Segment)],
        vec![(2, Segment), (1, Plain), (0, Segment), (2, Plain)],
        // Nested segments.
        vec![(2, Nested), (1, Nested), (0, Plain), (2, Segment)],
        // Segments that keep the results of matrix products.
        vec![(2, Cheap), (1, Nested), (0, Segment), (2, Cheap)],
    ];
    let mut all = Vec::new();
    for case in cases {
        let uses: Vec<_> = case.iter().map(|(layer, how)| Use::of(*layer, *how)).collect();
        check(SMALL, &[uses.clone(), uses.clone()], 1);
        check(SMALL, std::slice::from_ref(&uses), 2);
        all.push(uses);
    }
    // First as the first step, then as a step after others.
    check(LARGE, &all[1..2], 1);
    check(LARGE, &all, 1);
}

/// Uses change from step to step, so the numbers of gradients that a pass expects may be wrong.
#[test]
fn uses_may_be_others_in_each_step() {
    let of = |how, layers: &[usize]| layers.iter().map(|layer| Use::of(*layer, how)).collect::<Vec<_>>();
    let steps = [
        of(How::Plain, &[0, 1, 2]),
        of(How::Segment, &[0, 1, 2]),
        of(How::Segment, &[2, 0, 1, 2]),
        of(How::Segment, &[2, 1, 2, 0, 1, 2]),
        of(How::Segment, &[0, 1, 2]),
        of(How::Segment, &[1]),
        of(How::Segment, &[2, 1, 2, 0, 2, 1, 2]),
        of(How::Plain, &[2, 0, 1, 2]),
    ];
    check(LARGE, &steps, 1);
}

/// Replicas use different layers, or use them a different number of times.
#[test]
fn copies_need_not_use_the_same() {
    let segments = |uses: &[(usize, u8)]| -> Vec<Use> {
        uses.iter().map(|&(layer, copies)| Use { layer, how: How::Segment, copies }).collect()
    };
    let steps = [
        segments(&[(2, 1), (1, 3), (0, 2), (2, 3)]),
        segments(&[(2, 2), (1, 3), (1, 1), (0, 3), (2, 2)]),
        segments(&[(2, 3), (1, 1), (0, 3), (2, 2), (2, 1), (0, 1)]),
    ];
    check(LARGE, &steps, 1);
}

fn how() -> impl Strategy<Value = How> {
    prop_oneof![Just(How::Plain), Just(How::Segment), Just(How::Cheap), Just(How::Nested)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn equal_to_one_process_whatever_is_computed_again(
        mesh in 0..MESHES.len(),
        steps in proptest::collection::vec(
            proptest::collection::vec((0..LAYERS, how(), 1u8..8), 1..6), 1..4
        ),
        backwards in 1usize..3,
        is_large in any::<bool>(),
    ) {
        let (dp, tp, sequence_parallel) = MESHES[mesh];
        let uses = |uses: Vec<(usize, How, u8)>| {
            uses.into_iter().map(|(layer, how, copies)| Use { layer, how, copies }).collect()
        };
        let steps: Vec<Vec<Use>> = steps.into_iter().map(uses).collect();
        let hidden = if is_large { LARGE } else { SMALL };
        Run { hidden, steps: &steps, backwards, sequence_parallel }.check(dp, tp);
    }
}
