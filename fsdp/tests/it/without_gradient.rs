//! A parameter without a gradient on any rank has none in the result: optimizers do not change it, as in a single process.

use std::collections::HashMap;
use std::sync::Arc;

use crate::common::{Comm, assert_close, full_state, numbers, on_all_ranks, parameters, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder};
use comm::Mesh;
use fsdp::{DistributedModel, Fsdp, FsdpConfig, ShardingStrategy, Unit, UnitBuilder};
use ops::recompute;
use proptest::prelude::*;
use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};

/// Experts of each of two units, some of which a batch uses.
const EXPERTS: usize = 4;
const WIDTH: usize = 3;
const STEPS: usize = 8;

fn name(unit: usize, expert: usize) -> String {
    format!("{unit}.e{expert}")
}

fn start() -> HashMap<String, Tensor> {
    let one = |place: usize| {
        let (unit, expert) = (place / EXPERTS, place % EXPERTS);
        (name(unit, expert), values(place as u64, &[WIDTH, WIDTH], DType::F64))
    };
    (0..2 * EXPERTS).map(one).collect()
}

type Net = [Unit<Vec<Tensor>>; 2];

fn build(units: UnitBuilder<'_>) -> Result<Net> {
    let experts =
        |vb: VarBuilder<'_>| (0..EXPERTS).map(|e| vb.get((WIDTH, WIDTH), &format!("e{e}"))).collect();
    Ok([units.pp("0").unit(experts)?, units.pp("1").unit(experts)?])
}

fn vb() -> VarBuilder<'static> {
    VarBuilder::from_tensors(start(), DType::F64, &Device::Cpu)
}

/// Returns the input plus the sum of the used experts' outputs.
fn mix(experts: &[Tensor], used: u8, x: &Tensor) -> Result<Tensor> {
    let used = experts.iter().enumerate().filter(|(expert, _)| used >> expert & 1 == 1);
    used.map(|(_, expert)| x.matmul(expert)).try_fold(x.clone(), |sum, y| sum + y?)
}

/// Which experts of a unit a batch uses: at least one, so that every unit has a gradient on every rank.
#[derive(Clone, Copy, Debug)]
struct Use {
    seed: u64,
    /// Bit mask of experts that are never used.
    never: u8,
    by_rank: bool,
}

impl Use {
    fn of(&self, unit: usize, step: usize, rank: usize, micro_batch: usize) -> u8 {
        let rank = if self.by_rank { rank } else { 0 };
        let seed = self.seed + (unit * 1000 + step * 100 + rank * 10 + micro_batch) as u64;
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let used = (random & (random >> 8)) as u8 & !self.never & 0xf;
        if used == 0 { 8 } else { used }
    }

    fn input(&self, step: usize, rank: usize, micro_batch: usize) -> Tensor {
        values(self.seed + (step * 100 + rank * 10 + micro_batch) as u64, &[4, WIDTH], DType::F64)
    }
}

/// An optimizer with strong weight decay.
enum Decay {
    Theirs(AdamW),
    Ours(Adam),
}

impl Decay {
    fn new(ours: bool, vars: Vec<(String, Var)>) -> Result<Self> {
        if ours {
            let config = AdamConfig { learning_rate: 0.01, weight_decay: 0.5, ..AdamConfig::adamw() };
            return Ok(Self::Ours(Adam::named(vars, config)?));
        }
        let config = ParamsAdamW { lr: 0.01, weight_decay: 0.5, ..ParamsAdamW::default() };
        let vars = vars.into_iter().map(|(_, var)| var).collect();
        Ok(Self::Theirs(AdamW::new(vars, config)?))
    }

    fn step(&mut self, grads: &candle_core::backprop::GradStore) -> Result<()> {
        match self {
            Self::Theirs(optimizer) => optimizer.step(grads),
            Self::Ours(optimizer) => optimizer.step(grads),
        }
    }
}

struct Alone(Vec<Var>);

impl Alone {
    fn new() -> Self {
        let start = start();
        let var = |place: usize| Var::from_tensor(&start[&name(place / EXPERTS, place % EXPERTS)]);
        Self((0..2 * EXPERTS).map(|place| var(place).expect("a variable")).collect())
    }

    fn loss(&self, usage: &Use, step: usize, rank: usize, micro_batch: usize) -> Result<Tensor> {
        let all: Vec<Tensor> = self.0.iter().map(|var| var.as_tensor().clone()).collect();
        let mut x = usage.input(step, rank, micro_batch);
        for unit in 0..2 {
            x = mix(&all[unit * EXPERTS..][..EXPERTS], usage.of(unit, step, rank, micro_batch), &x)?
                .tanh()?;
        }
        x.sqr()?.mean_all()
    }

    fn train(&self, ours: bool, usage: &Use, ranks: usize, micro_batches: usize) -> Result<Vec<f64>> {
        let named = self.0.iter().enumerate().map(|(place, var)| (place.to_string(), var.clone()));
        let mut optimizer = Decay::new(ours, named.collect())?;
        for step in 0..STEPS {
            let mut total = Tensor::zeros((), DType::F64, &Device::Cpu)?;
            for rank in 0..ranks {
                for micro_batch in 0..micro_batches {
                    total = (total + (self.loss(usage, step, rank, micro_batch)? / ranks as f64)?)?;
                }
            }
            optimizer.step(&total.backward()?)?;
        }
        Ok(numbers(self.0.iter().map(|var| var.as_tensor())))
    }
}

fn loss(fsdp: &Fsdp<Net>, usage: &Use, step: usize, rank: usize, micro_batch: usize) -> fsdp::Result<Tensor> {
    let mut x = usage.input(step, rank, micro_batch);
    for (unit, experts) in fsdp.model()?.iter().enumerate() {
        let used = usage.of(unit, step, rank, micro_batch);
        x = experts.run(|experts| mix(experts, used, &x))?.tanh()?;
    }
    Ok(x.sqr()?.mean_all()?)
}

fn train(
    fsdp: &Fsdp<Net>,
    rank: usize,
    ours: bool,
    usage: &Use,
    micro_batches: usize,
) -> fsdp::Result<Vec<f64>> {
    let mut optimizer = Decay::new(ours, fsdp.named_vars())?;
    for step in 0..STEPS {
        for micro_batch in 1..micro_batches {
            fsdp.backward_no_sync(&loss(fsdp, usage, step, rank, micro_batch)?)?;
        }
        optimizer.step(&fsdp.backward(&loss(fsdp, usage, step, rank, 0)?)?)?;
    }
    parameters(fsdp)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn equal_to_one_process_whoever_uses_what(
        ranks in 1usize..=4,
        strategy in 0usize..3,
        hybrid in any::<bool>(),
        ours in any::<bool>(),
        seed in 0u64..10_000,
        never in 0u8..8,
        micro_batches in 1usize..4,
        pack_elements in prop_oneof![Just(0), Just(usize::MAX)],
    ) {
        let usage = Use { seed, never, by_rank: true };
        let strategy = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard][strategy];
        let hybrid = hybrid && ranks % 2 == 0 && strategy != ShardingStrategy::NoShard;
        let config = FsdpConfig { strategy, pack_elements, ..FsdpConfig::default() };
        let got = on_all_ranks(ranks, |comm| {
            let rank = comm.rank();
            let fsdp = match hybrid {
                true => {
                    let mesh = Mesh::new(comm, &[("dp", 2), ("shard", ranks / 2)])?;
                    Fsdp::hybrid(&mesh, ("shard", "dp"), vb(), &config, build)?
                }
                false => Fsdp::new(comm, vb(), &config, build)?,
            };
            train(&fsdp, rank, ours, &usage, micro_batches)
        });
        let expected = Alone::new().train(ours, &usage, ranks, micro_batches).expect("one process trains");
        assert_close(&got[0], &expected, 1e-9);
    }
}

#[test]
fn an_unused_parameter_does_not_decay() {
    let usage = Use { seed: 1, never: 0b0110, by_rank: true };
    let names: Vec<_> = [name(0, 1), name(0, 2), name(1, 1), name(1, 2)].into();
    let ends = on_all_ranks(3, |comm| {
        let rank = comm.rank();
        let fsdp = Fsdp::new(comm, vb(), &FsdpConfig::default(), build)?;
        train(&fsdp, rank, true, &usage, 1)?;
        let grads = fsdp.backward(&loss(&fsdp, &usage, 0, rank, 0)?)?;
        let without = fsdp.named_vars().into_iter().filter(|(_, var)| grads.get(var).is_none());
        let without: Vec<_> = without.map(|(name, _)| name).filter(|name| names.contains(name)).collect();
        assert_eq!(without, names);
        full_state(&fsdp)
    });
    let (all, start) = (&ends[0], start());
    for (name, value) in all {
        let is_as_before = numbers([value]) == numbers([&start[name]]);
        assert_eq!(is_as_before, names.contains(name), "{name}");
    }
}

#[test]
fn a_checkpoint_keeps_what_optimizers_remember_of_some_and_goes_on_at_other_numbers_of_ranks() {
    let config = |pack_elements| FsdpConfig { pack_elements, ..FsdpConfig::default() };
    let adam = || AdamConfig { learning_rate: 0.01, weight_decay: 0.5, ..AdamConfig::adamw() };
    for (before, after) in [(1, 3), (3, 2), (2, 4), (4, 1)] {
        // All ranks have the same batch, so that their number makes no difference.
        let usage = Use { seed: 5, never: 0b0010, by_rank: false };
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoints = || {
            let dir = folder.path().to_path_buf();
            Checkpoints::open(CheckpointConfig { dir, ..CheckpointConfig::default() }).expect("a folder")
        };
        let steps =
            |fsdp: &Fsdp<Net>, optimizer: &mut Adam, range: std::ops::Range<usize>| -> fsdp::Result<()> {
                for step in range {
                    optimizer.step(&fsdp.backward(&loss(fsdp, &usage, step, 0, 0)?)?)?;
                }
                Ok(())
            };
        let begin = |comm: Comm, pack_elements| -> fsdp::Result<(Fsdp<Net>, Adam)> {
            let fsdp = Fsdp::new(comm, vb(), &config(pack_elements), build)?;
            let optimizer = Adam::named(fsdp.named_vars(), adam())?;
            Ok((fsdp, optimizer))
        };
        on_all_ranks(before, |comm| {
            let (fsdp, mut optimizer) = begin(comm, 0)?;
            steps(&fsdp, &mut optimizer, 0..3)?;
            fsdp.save_checkpoint(&checkpoints(), Some(&optimizer), &Checkpoint::default())
        });
        let contents = checkpoints().latest().expect("whole").expect("there");
        let ends = on_all_ranks(after, |comm| {
            let (mut fsdp, mut optimizer) = begin(comm, usize::MAX)?;
            fsdp.load_checkpoint(&contents, Some(&mut optimizer))?;
            steps(&fsdp, &mut optimizer, 3..STEPS)?;
            parameters(&fsdp)
        });
        let expected = Alone::new().train(true, &usage, 1, 1).expect("one process trains");
        assert_close(&ends[0], &expected, 1e-9);
    }
}

/// A unit runs twice, once in a recomputed part; each rank uses different experts.
#[test]
fn ranks_that_use_other_experts_agree_on_a_unit_that_is_computed_again_and_not() {
    let run = |first: &Unit<Vec<Tensor>>, used: u8, x: &Tensor| first.run(|experts| mix(experts, used, x));
    for (in_part, plain) in [([0b0001, 0b0001], [0b1111, 0b0101]), ([0b1111, 0b0001], [0b0011, 0b1111])] {
        for part_comes_first in [true, false] {
            let grads = on_all_ranks(2, |comm| {
                let rank = comm.rank();
                let one = |units: UnitBuilder<'_>| Ok(Arc::new(build(units)?));
                let fsdp =
                    Fsdp::new(comm, vb(), &FsdpConfig { pack_elements: 0, ..FsdpConfig::default() }, one)?;
                let net = Arc::clone(fsdp.model()?);
                let again = |x: &Tensor| {
                    let net = Arc::clone(&net);
                    recompute(x, move |x| run(&net[0], in_part[rank], x))
                };
                let x = Var::from_tensor(&values(rank as u64, &[4, WIDTH], DType::F64))?;
                let y = match part_comes_first {
                    true => run(&net[0], plain[rank], &again(&x)?.tanh()?)?,
                    false => again(&run(&net[0], plain[rank], &x)?.tanh()?)?,
                };
                let grads = fsdp.backward(&y.sqr()?.sum_all()?)?;
                Ok(fsdp.vars()[..EXPERTS].iter().map(|var| numbers(grads.get(var))).collect::<Vec<_>>())
            });
            let alone = Alone::new();
            let experts: Vec<_> = alone.0[..EXPERTS].iter().map(|var| var.as_tensor().clone()).collect();
            let loss = |rank: usize| {
                let [first, second] = if part_comes_first { [in_part, plain] } else { [plain, in_part] };
                let y = mix(&experts, first[rank], &values(rank as u64, &[4, WIDTH], DType::F64))?.tanh()?;
                mix(&experts, second[rank], &y)?.sqr()?.sum_all()
            };
            let total = loss(0).and_then(|own| (own + loss(1)?)? * 0.5).expect("computed");
            let expected = total.backward().expect("backward");
            for (expert, var) in alone.0[..EXPERTS].iter().enumerate() {
                let whole: Vec<f64> = grads.iter().flat_map(|rank| rank[expert].clone()).collect();
                let expected = numbers(expected.get(var));
                // The last shard is padded.
                assert_close(&whole[..expected.len()], &expected, 1e-9);
            }
        }
    }
}

/// An optimizer of some of the parameters.
#[test]
fn an_optimizer_may_have_some_of_the_parameters() {
    let rates = |name: &str| if name.starts_with("l3") { 0.0 } else { 0.1 };
    let ends = on_all_ranks(2, |comm| {
        let fsdp = crate::common::Mlp::fsdp(comm, 1, DType::F64, &FsdpConfig::default())?;
        let named = fsdp.named_vars().into_iter().filter(|(name, _)| rates(name) > 0.0);
        let mut optimizer = candle_nn::SGD::new(named.map(|(_, var)| var).collect(), 0.1)?;
        let before = parameters(&fsdp)?;
        let loss = fsdp.forward(&values(1, &[2, crate::common::INPUTS], DType::F64))?.sqr()?.sum_all()?;
        optimizer.step(&fsdp.backward(&loss)?)?;
        Ok((before, parameters(&fsdp)?))
    });
    let (before, after) = &ends[0];
    // The last layer's bias and weight are last when sorted by name.
    let last = before.len() - (6 + 1) * crate::common::OUTPUTS;
    assert_eq!(before[last..], after[last..]);
    assert!(before[..last].iter().zip(&after[..last]).all(|(before, after)| before != after));
}
