//! Time of a step of each strategy, forecast by [`crate::forecast`].

use pipeline::ScheduleKind;

use crate::compare::{Candidate, lack};
use crate::error::Result;
use crate::forecast::{Collectives, Layer, Layout, Sharding as Shards, Work, predict_with};
use crate::hardware::Hardware;
use crate::model::{Model, Unit};
use crate::strategy::{Estimate, Setting, Sharding, Shortage, Strategy, pipeline::stages, share};

/// Strategy with its memory, bytes sent and time of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Planned {
    /// Memory and bytes sent.
    pub estimate: Estimate,
    /// Seconds of a step.
    pub seconds: f64,
    /// Seconds of these in which nothing is computed.
    pub waiting: f64,
}

/// Estimates all strategies, the simplest first.
///
/// # Errors
/// A pipeline schedule that is not possible.
pub fn planned(model: &Model, setting: &Setting, hardware: &Hardware) -> Result<Vec<Planned>> {
    let mut collectives = Collectives::new(&hardware.network);
    let one = |strategy: Strategy| {
        let work = work(strategy, model, setting, hardware);
        let prediction = predict_with(&work, &layout(strategy, setting), &mut collectives)?;
        let (seconds, estimate) = (prediction.step_s, strategy.estimate(model, setting));
        Ok(Planned { estimate, seconds, waiting: (seconds - prediction.compute_s).max(0.0) })
    };
    Strategy::all(model, setting).into_iter().map(one).collect()
}

/// Returns what is compared of the strategies, of which the first ones are the simplest.
pub(crate) fn candidates(all: &[Planned], setting: &Setting, memory: f64) -> Vec<Candidate<usize>> {
    let candidate = |(complexity, planned): (usize, &Planned)| {
        let Estimate { strategy, memory: needed, .. } = &planned.estimate;
        let lacks = match planned.estimate.lack(setting, memory) {
            Some(Shortage::Samples) => Some(format!("{} samples a step", strategy.copies(setting.ranks))),
            _ => lack(needed.total(), memory),
        };
        Candidate { name: strategy.name(setting.ranks), seconds: planned.seconds, lacks, complexity }
    };
    all.iter().enumerate().map(candidate).collect()
}

fn layout(strategy: Strategy, setting: &Setting) -> Layout {
    let ranks = setting.ranks;
    match strategy {
        Strategy::Data => Layout::ddp(ranks),
        Strategy::ShardedData(sharding) => Layout {
            sharding: Shards::Over(sharding.ranks(ranks)),
            stays_gathered: sharding == Sharding::GradOp,
            ..Layout::ddp(ranks)
        },
        Strategy::Tensor { tp, sequence_parallel } => {
            Layout { sequence_parallel, ..Layout::tensor(tp, ranks / tp) }
        }
        Strategy::Pipeline => {
            let schedule = ScheduleKind::GPipe;
            Layout { schedule, ..Layout::pipeline(ranks, 1, 1, setting.parts()) }
        }
    }
}

/// Returns what a rank computes in a micro-batch.
fn work(strategy: Strategy, model: &Model, setting: &Setting, hardware: &Hardware) -> Work {
    let samples = match strategy {
        Strategy::Data | Strategy::ShardedData(_) => share(setting.batch_size, setting.ranks),
        Strategy::Tensor { tp, .. } => share(setting.batch_size, setting.ranks / tp),
        Strategy::Pipeline => share(setting.batch_size, setting.parts()),
    };
    let bytes = (samples * setting.element) as usize;
    let one = |unit: &Unit| layer(unit, bytes, samples as f64 / hardware.flops);
    let layers = match strategy {
        Strategy::Tensor { sequence_parallel, .. } => {
            let mut layers: Vec<Layer> = model.units.iter().map(one).collect();
            if sequence_parallel {
                add_sequence_parallel(model, &mut layers, bytes, setting.element as usize);
            }
            layers
        }
        Strategy::Data | Strategy::ShardedData(_) => {
            model.units.iter().flat_map(|unit| by_part(unit, one(unit))).collect()
        }
        Strategy::Pipeline => {
            // All stages wait for the one that computes most.
            let stages = stages(&model.units, setting.ranks);
            let seconds = |stage: &&[Unit]| stage.iter().map(|unit| one(unit).forward_s).sum::<f64>();
            let most = stages.iter().map(seconds).fold(0.0, f64::max);
            let output_bytes = stages.iter().filter_map(|stage| stage.last());
            let output_bytes = output_bytes.take(stages.len() - 1).map(|unit| one(unit).output_bytes).max();
            let stage = |units: &&[Unit]| Layer {
                parameters: units.iter().map(|unit| unit.parameters() as usize).sum(),
                forward_s: most,
                backward_s: 2.0 * most,
                output_bytes: output_bytes.unwrap_or(0),
                ..Layer::default()
            };
            stages.iter().map(stage).collect()
        }
    };
    let (element_bytes, gathered_bytes) = (setting.element as usize, setting.gathered as usize);
    let optimizer_s = hardware.optimizer_s(setting.optimizer, setting.element);
    Work { layers, optimizer_s, element_bytes, gathered_bytes }
}

/// Returns the layer of a unit, with `bytes` for each element per sample, and `seconds` for each operation per sample.
fn layer(unit: &Unit, bytes: usize, seconds: f64) -> Layer {
    let sizes = |all: &[u64]| all.iter().map(|elements| *elements as usize * bytes).collect();
    let forward_s = unit.flops as f64 * seconds;
    Layer {
        parameters: unit.parameters() as usize,
        forward_s,
        // Gradients of the parameters and of the input.
        backward_s: 2.0 * forward_s,
        output_bytes: unit.output as usize * bytes,
        forward_reductions: sizes(&unit.forward),
        backward_reductions: sizes(&unit.backward),
    }
}

/// Adds the other communication of sequence parallelism: all-reduce of gradients of parameters that all ranks hold; the
/// data, which is gathered once and so counts as half a reduction; and the output, if samples have no length.
fn add_sequence_parallel(model: &Model, layers: &mut [Layer], bytes: usize, element: usize) {
    for (layer, unit) in layers.iter_mut().zip(&model.units) {
        layer.forward_reductions.extend((unit.gathered > 0).then_some(unit.gathered as usize * bytes / 2));
    }
    if let (Some(layer), Some(unit)) = (layers.last_mut(), model.units.last()) {
        layer.backward_reductions.push(model.sum(|unit| unit.whole.iter().sum()) as usize * element);
        layer.forward_reductions.extend((model.length == 0).then_some(unit.output as usize * bytes / 2));
    }
}

/// Returns the parts that are gathered one after the other, with computation in proportion to their parameters.
fn by_part(unit: &Unit, whole: Layer) -> Vec<Layer> {
    let all = unit.parameters().max(1) as f64;
    let one = |parameters: u64| {
        let share = parameters as f64 / all;
        Layer {
            parameters: parameters as usize,
            forward_s: whole.forward_s * share,
            backward_s: whole.backward_s * share,
            ..Layer::default()
        }
    };
    unit.parts.iter().map(|part| one(part.parameters())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forecast::{Link, Network};
    use crate::model::MlpLoss;

    fn setting(ranks: usize) -> Setting {
        Setting { ranks, batch_size: 64, micro_batches: 4, element: 4, gathered: 4, optimizer: 2 }
    }

    fn hardware(overlaps: bool) -> Hardware {
        let link = Link { latency: 1e-6, s_per_byte: 1e-9 };
        let network = Network::one_node("test", link, 0.0, overlaps);
        Hardware { network, flops: 1e9, memory_bandwidth: f64::INFINITY }
    }

    fn of(all: &[Planned], strategy: Strategy) -> Planned {
        *all.iter().find(|planned| planned.estimate.strategy == strategy).unwrap()
    }

    #[test]
    fn a_step_is_computing_and_what_is_sent() {
        let model = Model::mlp("test", &[256, 1024, 256, 1024, 256], true, MlpLoss::Squares);
        let computing = 3.0 * model.flops() as f64 * 64.0 / 1e9;
        let all = planned(&model, &setting(4), &hardware(false)).unwrap();
        for planned in &all {
            let Planned { estimate, seconds, waiting } = planned;
            let strategy = estimate.strategy;
            // Micro-batches wait for those before them.
            if strategy == Strategy::Pipeline {
                continue;
            }
            let sent = estimate.sent * 1e-9;
            assert!((seconds - waiting - computing / 4.0).abs() < 1e-9, "{strategy:?}: {planned:?}");
            // Tolerance for the latency of steps, at most a few hundred.
            assert!(
                *waiting >= 0.95 * sent && *waiting < 1.05 * sent + 5e-4,
                "{strategy:?}: {planned:?}, {sent}"
            );
        }
        let kept = of(&all, Strategy::ShardedData(Sharding::GradOp));
        assert!(kept.seconds < of(&all, Strategy::ShardedData(Sharding::Full)).seconds);
        // The first bucket is sent while backward continues.
        let hidden = planned(&model, &setting(4), &hardware(true)).unwrap();
        assert!(of(&hidden, Strategy::Data).waiting < 0.8 * of(&all, Strategy::Data).waiting);
    }

    #[test]
    fn a_pipeline_waits_for_its_largest_stage() {
        let model = Model::mlp("test", &[64, 64, 64, 64, 64], false, MlpLoss::Squares);
        let all = planned(&model, &setting(2), &hardware(false)).unwrap();
        let pipeline = of(&all, Strategy::Pipeline);
        let computing = 3.0 * model.flops() as f64 * 64.0 / 1e9;
        // 2 stages, 4 micro-batches: the time of 5 instead of 4.
        let least = computing / 2.0 * 5.0 / 4.0;
        assert!(pipeline.seconds > least && pipeline.seconds < 1.1 * least, "{pipeline:?} {least}");
    }

    #[test]
    fn the_optimizer_works_on_what_a_rank_keeps() {
        let model = Model::mlp("test", &[256, 1024, 256, 1024, 256], true, MlpLoss::Squares);
        let (without, bandwidth) = (hardware(false), 1e9);
        let with = Hardware { memory_bandwidth: bandwidth, ..without.clone() };
        for (optimizer, numbers) in [(0, 3.0), (1, 5.0), (2, 7.0)] {
            let setting = Setting { optimizer, ..setting(4) };
            let all = model.parameters() as f64 * numbers * 4.0 / bandwidth;
            let (free, paid) = (planned(&model, &setting, &without), planned(&model, &setting, &with));
            for (free, paid) in free.unwrap().iter().zip(&paid.unwrap()) {
                let share = match paid.estimate.strategy {
                    Strategy::Data | Strategy::ShardedData(Sharding::None) => 1.0,
                    Strategy::ShardedData(Sharding::Hybrid { shards }) => 1.0 / shards as f64,
                    Strategy::Tensor { tp, .. } => 1.0 / tp as f64,
                    Strategy::ShardedData(_) | Strategy::Pipeline => 0.25,
                };
                let added = paid.seconds - free.seconds;
                assert!((added - share * all).abs() < 1e-9, "{:?}: {added}", paid.estimate.strategy);
                assert!((paid.waiting - free.waiting).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn one_rank_computes() {
        let model = Model::mlp("test", &[64, 64, 64], false, MlpLoss::Squares);
        let all = planned(&model, &setting(1), &hardware(false)).unwrap();
        assert_eq!(all.len(), 1);
        assert!(all[0].waiting < 1e-12);
    }
}
