//! Tests of the gradient audit: parameters without a gradient on any rank are named once, with the likely cause, or are an
//! error.
#![allow(clippy::expect_used)]

mod common;

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{LayerNorm, Linear, Module, VarBuilder, layer_norm, linear_no_bias};
use common::{on_all_ranks, on_ranks};
use fsdp::{Fsdp, FsdpConfig, ShardingStrategy, Unit, UnitBuilder};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};
use training::{AuditConfig, OnMissingGradient};

/// A tracing subscriber that collects the warnings of a thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            self.0.lock().expect("no panic").push(format!("{value:?}"));
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Returns the result of `body`, and the warnings that it logged.
fn listening<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    let warnings = Warnings::default();
    let result = tracing::subscriber::with_default(warnings.clone(), body);
    let heard = std::mem::take(&mut *warnings.0.lock().expect("no panic"));
    (result, heard)
}

/// A linear layer, and two norms of the same parameters: candle's, and that of `training`.
struct Block(Linear, LayerNorm, ops::LayerNorm);

/// Two blocks, each a unit; the first one may use candle's norm, which has no backward.
struct Net([Unit<Block>; 2]);

impl Net {
    fn new(units: UnitBuilder<'_>) -> Result<Self> {
        let block = |vb: VarBuilder<'_>| {
            let ours = ops::layer_norm(4, 1e-5, vb.pp("norm"))?;
            Ok(Block(linear_no_bias(4, 4, vb.pp("fc"))?, layer_norm(4, 1e-5, vb.pp("norm"))?, ours))
        };
        Ok(Self([units.pp("0").unit(block)?, units.pp("1").unit(block)?]))
    }

    fn loss(&self, by_candle: bool) -> Result<Tensor> {
        let [first, second] = &self.0;
        let run = |unit: &Unit<Block>, x: &Tensor, by_candle: bool| {
            unit.run(|Block(fc, candles, ours)| {
                let x = fc.forward(x)?;
                if by_candle { candles.forward(&x) } else { ours.forward(&x) }
            })
        };
        let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
        run(second, &run(first, &x, by_candle)?, false)?.sqr()?.mean_all()
    }
}

fn wrapped(comm: common::Comm, strategy: ShardingStrategy, audit: AuditConfig) -> fsdp::Result<Fsdp<Net>> {
    let generator = sampler::SharedGenerator::from(sampler::Generator::new(5));
    let vb = training::TorchInit::tensor_builder(&generator, DType::F32, &Device::Cpu);
    Fsdp::new(comm, vb, &FsdpConfig { strategy, audit, ..FsdpConfig::default() }, Net::new)
}

#[test]
fn lost_gradients_are_named_once_by_one_rank() {
    for (world_size, strategy) in
        [(1, ShardingStrategy::FullShard), (3, ShardingStrategy::FullShard), (2, ShardingStrategy::NoShard)]
    {
        let heard = on_all_ranks(world_size, |comm| {
            let fsdp = wrapped(comm, strategy, AuditConfig::default())?;
            let (result, heard) = listening(|| -> fsdp::Result<()> {
                for _ in 0..3 {
                    fsdp.backward_no_sync(&fsdp.model()?.loss(true)?)?;
                    fsdp.backward(&fsdp.model()?.loss(true)?)?;
                }
                Ok(())
            });
            result.map(|()| heard)
        });
        let line = "Fsdp: after the first backward, all ranks together, 3 of 6 parameters have no gradient: ";
        assert_eq!(heard[0].len(), 1, "{heard:?}");
        for part in [line, "0.fc.weight", "0.norm.bias", "likely candle's layer_norm, at 0.norm."] {
            assert!(heard[0][0].contains(part), "{part}: {heard:?}");
        }
        assert!(heard[1..].iter().all(Vec::is_empty), "{heard:?}");
    }
}

#[test]
fn an_option_makes_it_an_error_and_frozen_parameters_are_left_out() {
    let strict = AuditConfig { on_missing: OnMissingGradient::Fail, ..AuditConfig::default() };
    for result in on_ranks(2, |comm| {
        let fsdp = wrapped(comm, ShardingStrategy::FullShard, strict.clone())?;
        fsdp.backward(&fsdp.model()?.loss(true)?)
    }) {
        let message = result.expect("no panic").expect_err("gradients are lost").to_string();
        assert!(
            message.contains("3 of 6 parameters") && message.contains("AuditConfig::frozen"),
            "{message}"
        );
    }
    let frozen = AuditConfig { frozen: vec!["0".into()], ..strict.clone() };
    let quiet = AuditConfig { on_missing: OnMissingGradient::Ignore, ..AuditConfig::default() };
    for (audit, by_candle) in [(frozen, true), (quiet, true), (strict, false)] {
        let heard = on_all_ranks(2, |comm| {
            let fsdp = wrapped(comm, ShardingStrategy::FullShard, audit.clone())?;
            let (result, heard) = listening(|| fsdp.backward(&fsdp.model()?.loss(by_candle)?));
            result.map(|_| heard)
        });
        assert!(heard.iter().all(Vec::is_empty), "{heard:?}");
    }
}

#[test]
fn ranks_with_other_options_do_not_train_together() {
    for result in on_ranks(2, |comm| {
        let on_missing = if comm.rank() == 0 { OnMissingGradient::Fail } else { OnMissingGradient::Warn };
        wrapped(comm, ShardingStrategy::FullShard, AuditConfig { on_missing, ..AuditConfig::default() })
            .map(drop)
    }) {
        let message = result.expect("no panic").expect_err("they differ").to_string();
        assert!(message.contains("missing gradients"), "{message}");
    }
}
