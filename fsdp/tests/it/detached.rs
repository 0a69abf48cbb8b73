//! Weights that a unit uses detached, e.g. frozen ones, stay gathered as long as backward needs them, also in recomputation
//! (activation checkpointing), whose gradients are included.

use std::sync::Arc;

use crate::common::{Comm, assert_close, numbers, on_all_ranks, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use fsdp::{Fsdp, FsdpConfig, ShardingStrategy, Unit};
use ops::recompute;

const WIDTH: usize = 6;
/// Weights of each unit.
const WEIGHTS: usize = 3;
type Body = fn(&[Tensor], &Tensor) -> Result<Tensor>;

/// Computations of units. Backward reaches the right factor of a product before the left one.
const BODIES: [Body; 6] = [
    // Low-rank adaptation of a frozen weight; all weights are used.
    |w, x| x.matmul(&w[0].detach())?.add(&x.matmul(&w[1])?.matmul(&w[2])?)?.tanh(),
    // All weights are frozen.
    |w, x| x.matmul(&w[0].detach())?.tanh()?.matmul(&w[1].detach())?.matmul(&w[2].detach()),
    // One weight detached and with gradient: its gradient arrives before backward reaches the other use.
    |w, x| x.tanh()?.matmul(&w[0].detach())?.tanh()?.matmul(&w[0])?.add(&x.matmul(&w[1].detach())?),
    // The weights are the left factors: backward reaches other units first.
    |w, x| w[0].detach().matmul(&w[1].matmul(&x.t()?)?)?.t()?.add(&x.relu()?.matmul(&w[2].detach())?),
    // A frozen weight whose product is the only path to the input, and an unused weight.
    |w, x| x.sqr()?.matmul(&w[0].detach())?.tanh()?.mul(&x.matmul(&w[1])?),
    // Ordinary use.
    |w, x| x.matmul(&w[0])?.tanh()?.matmul(&w[1])?.tanh()?.matmul(&w[2]),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Again {
    Nothing,
    /// Each unit's run.
    Units,
    /// The runs of every two units together.
    Pairs,
    /// The computations within the runs.
    Within,
    /// The first half of the units.
    Half,
    /// All units except the first and the last.
    Inner,
}

fn weight(unit: usize, index: usize) -> Tensor {
    values((10 * unit + index) as u64, &[WIDTH, WIDTH], DType::F64)
}

fn input(rank: usize) -> Tensor {
    values(500 + rank as u64, &[4, WIDTH], DType::F64)
}

type Net = Vec<Arc<Unit<Vec<Tensor>>>>;

fn net(comm: Comm, units: &[usize], config: &FsdpConfig) -> fsdp::Result<Fsdp<Net>> {
    let start = units.iter().enumerate().flat_map(|(place, &body)| {
        (0..WEIGHTS).map(move |index| (format!("{place}.w{index}"), weight(body, index)))
    });
    let vb = VarBuilder::from_tensors(start.collect(), DType::F64, &Device::Cpu);
    Fsdp::new(comm, vb, config, |builder| {
        let weights =
            |vb: VarBuilder<'_>| (0..WEIGHTS).map(|i| vb.get((WIDTH, WIDTH), &format!("w{i}"))).collect();
        (0..units.len()).map(|place| Ok(Arc::new(builder.pp(place).unit(weights)?))).collect()
    })
}

fn run(unit: &Unit<Vec<Tensor>>, body: Body, x: &Tensor, within: bool) -> Result<Tensor> {
    unit.run(|w| match within {
        true => {
            let w = w.clone();
            recompute(x, move |x| body(&w, x))
        }
        false => body(w, x),
    })
}

fn forward(net: &Net, units: &[usize], x: &Tensor, how: Again) -> Result<Tensor> {
    let bodies: Vec<_> = net.iter().cloned().zip(units.iter().map(|&unit| BODIES[unit])).collect();
    let step = if how == Again::Pairs { 2 } else { 1 };
    let mut x = x.clone();
    for (place, segment) in bodies.chunks(step).enumerate() {
        let segment = segment.to_vec();
        let within = how == Again::Within;
        let all = move |x: &Tensor| {
            segment.iter().try_fold(x.clone(), |x, (unit, body)| run(unit, *body, &x, within))
        };
        let plain = match how {
            Again::Nothing | Again::Within => true,
            Again::Units | Again::Pairs => false,
            Again::Half => place >= units.len() / 2,
            Again::Inner => place == 0 || place + 1 == units.len(),
        };
        x = if plain { all(&x)? } else { recompute(&x, all)? };
    }
    Ok(x)
}

/// Returns, by parameter, the mean over ranks of the sum of `backwards` gradients; `None` for those without a gradient.
fn alone(ranks: usize, units: &[usize], backwards: usize) -> Result<Vec<Option<Tensor>>> {
    let vars =
        units.iter().flat_map(|&unit| (0..WEIGHTS).map(move |index| Var::from_tensor(&weight(unit, index))));
    let vars: Vec<Var> = vars.collect::<Result<_>>()?;
    let mut total = Tensor::zeros((), DType::F64, &Device::Cpu)?;
    for rank in 0..ranks {
        let mut x = Var::from_tensor(&input(rank))?.into_inner();
        for (place, &unit) in units.iter().enumerate() {
            let weights: Vec<_> =
                vars[place * WEIGHTS..][..WEIGHTS].iter().map(|var| var.as_tensor().clone()).collect();
            x = BODIES[unit](&weights, &x)?;
        }
        total = (total + (x.sqr()?.sum_all()? * (backwards as f64 / ranks as f64))?)?;
    }
    let grads = total.backward()?;
    Ok(vars.iter().map(|var| grads.get(var).cloned()).collect())
}

/// Returns the whole gradient of a parameter from all ranks' shards; `None` if no rank has one.
fn whole(ranks: &[Vec<Option<Vec<f64>>>], param: usize) -> Option<Vec<f64>> {
    let has = ranks[0][param].is_some();
    assert!(ranks.iter().all(|rank| rank[param].is_some() == has), "ranks agree on parameter {param}");
    has.then(|| ranks.iter().flat_map(|rank| rank[param].clone().unwrap_or_default()).collect())
}

#[track_caller]
fn compare(ranks: usize, units: &[usize], how: Again, config: &FsdpConfig, backwards: usize) {
    let what = format!("{ranks} ranks, units {units:?}, {how:?}, {config:?}, {backwards} backwards");
    let got = on_all_ranks(ranks, |comm| {
        let x = Var::from_tensor(&input(comm.rank()))?;
        let fsdp = net(comm, units, config)?;
        let loss = || Ok::<_, fsdp::Error>(forward(fsdp.model()?, units, &x, how)?.sqr()?.sum_all()?);
        for _ in 1..backwards {
            fsdp.backward_no_sync(&loss()?)?;
        }
        let grads = fsdp.backward(&loss()?)?;
        let peak = fsdp.memory().parameters.peak;
        Ok((
            fsdp.vars().iter().map(|var| grads.get(var).map(|grad| numbers([grad]))).collect::<Vec<_>>(),
            peak,
        ))
    });
    let (mut grads, peaks): (Vec<_>, Vec<_>) = got.into_iter().unzip();
    if config.strategy == ShardingStrategy::NoShard {
        assert!(grads.iter().all(|rank| *rank == grads[0]), "{what}");
        grads.truncate(1);
    }
    for (param, expected) in alone(ranks, units, backwards).expect("one process").iter().enumerate() {
        // With `pack_elements: 0`, a weight of 36 elements is divided into equal parts by 1, 2 and 3 ranks, without padding.
        let got = whole(&grads, param);
        assert_eq!(got.is_some(), expected.is_some(), "{what}, parameter {param}");
        if let (Some(got), Some(expected)) = (got, expected) {
            assert_close(&got, &numbers([expected]), 1e-9);
        }
    }
    let unit = WEIGHTS * WIDTH * WIDTH * size_of::<f64>();
    // Units that are recomputed together are gathered together; so is a unit that backward has not finished when it reaches
    // others.
    let there = 2 + usize::from(how == Again::Pairs) + units.iter().filter(|unit| **unit == 3).count();
    if config.strategy == ShardingStrategy::FullShard {
        let most = units.len() * unit / ranks + there * unit;
        assert!(peaks.iter().all(|peak| *peak <= most), "{what}: {peaks:?}, expected {most} at most");
    }
}

#[test]
fn gradients_are_those_of_one_process_and_two_units_are_there() {
    let strategies = [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];
    let orders: [&[usize]; 4] =
        [&[5, 0, 1, 2, 3, 4], &[4, 3, 2, 1, 0, 5], &[0, 0, 0, 0, 0, 0], &[2, 1, 5, 1, 3, 3]];
    for how in [Again::Nothing, Again::Units, Again::Pairs, Again::Within, Again::Half, Again::Inner] {
        for (case, units) in orders.into_iter().enumerate() {
            for ranks in 1..=3 {
                let strategy = strategies[(case + ranks) % 3];
                for strategy in [ShardingStrategy::FullShard, strategy] {
                    let config = FsdpConfig { strategy, pack_elements: 0, ..FsdpConfig::default() };
                    compare(ranks, units, how, &config, 1 + (case + ranks) % 2);
                }
            }
        }
    }
}

#[test]
fn a_weight_that_is_used_in_two_segments_has_the_sum_of_both() {
    let grads = on_all_ranks(2, |comm| {
        let fsdp = net(comm.clone(), &[5, 5], &FsdpConfig { pack_elements: 0, ..FsdpConfig::default() })?;
        let [first, second] = &fsdp.model()?[..] else { panic!("two units") };
        let x = Var::from_tensor(&input(comm.rank()))?;
        let segment = |unit: &Arc<Unit<Vec<Tensor>>>| {
            let unit = unit.clone();
            move |x: &Tensor| unit.run(|w| x.matmul(&w[0]))
        };
        // The first unit is used in two recomputed segments, with another unit between them, and once without recomputation.
        let y = recompute(&x, segment(first))?.tanh()?;
        let y = segment(second)(&y)?.tanh()?;
        let y = recompute(&y, segment(first))?.tanh()?;
        let y = segment(first)(&y)?;
        let grads = fsdp.backward(&y.sqr()?.sum_all()?)?;
        let all =
            fsdp.vars().iter().map(|var| grads.get(var).map(|grad| numbers([grad]))).collect::<Vec<_>>();
        Ok((all, fsdp.memory().gradients.live))
    });
    let [first, second] = [0, 1].map(|_| Var::from_tensor(&weight(5, 0)).expect("a weight"));
    let loss = |rank: usize| -> Result<Tensor> {
        let y = input(rank).matmul(&first)?.tanh()?.matmul(&second)?.tanh()?.matmul(&first)?.tanh()?;
        y.matmul(&first)?.sqr()?.sum_all()
    };
    let total = (loss(0).expect("computed") + loss(1).expect("computed")).expect("computed");
    let expected = (total * 0.5).and_then(|loss| loss.backward()).expect("backward");
    let held: Vec<_> = grads.iter().map(|(_, live)| *live).collect();
    assert_eq!(held, [2 * WEIGHTS * WIDTH * WIDTH * size_of::<f64>() / 2; 2]);
    let grads: Vec<_> = grads.into_iter().map(|(grads, _)| grads).collect();
    for (param, var) in [(0, &first), (WEIGHTS, &second)] {
        let expected = numbers([expected.get(var).expect("a gradient")]);
        assert_close(&whole(&grads, param).expect("a gradient"), &expected, 1e-9);
    }
    assert_eq!([1, 2, 4, 5].map(|param| whole(&grads, param)), [None, None, None, None]);
}
