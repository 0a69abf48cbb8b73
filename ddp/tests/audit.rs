//! Tests of the gradient audit: parameters without a gradient on any rank are named once, with the likely cause, or are an
//! error.
#![allow(clippy::expect_used)]

mod common;

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Linear, Module, RmsNorm, VarBuilder, VarMap, linear_no_bias, rms_norm};
use common::{on_all_ranks, on_ranks};
use ddp::{Ddp, DdpConfig};
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

/// Two layers with a norm between them: candle's, which has no backward, or that of `training`.
struct Net {
    first: Linear,
    candles: RmsNorm,
    ours: ops::RmsNorm,
    last: Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> Result<Self> {
        let norm = rms_norm(4, 1e-6, vb.pp("norm"))?;
        Ok(Self {
            first: linear_no_bias(4, 4, vb.pp("first"))?,
            candles: norm,
            ours: ops::rms_norm(4, 1e-6, vb.pp("norm"))?,
            last: linear_no_bias(4, 2, vb.pp("last"))?,
        })
    }

    fn loss(&self, by_candle: bool) -> Result<Tensor> {
        let x = self.first.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu)?)?;
        let x = if by_candle { self.candles.forward(&x)? } else { self.ours.forward(&x)? };
        self.last.forward(&x)?.sqr()?.mean_all()
    }
}

fn wrapped(comm: common::Comm, audit: AuditConfig) -> ddp::Result<Ddp<Net>> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    Ddp::new(comm, vb, &DdpConfig { audit, ..DdpConfig::default() }, Net::new)
}

#[test]
fn lost_gradients_are_named_once_by_one_rank() {
    for world_size in [1, 3] {
        let heard = on_all_ranks(world_size, |comm| {
            let ddp = wrapped(comm, AuditConfig::default())?;
            let (result, heard) = listening(|| -> ddp::Result<()> {
                for _ in 0..3 {
                    ddp.backward_no_sync(&ddp.model()?.loss(true)?)?;
                    ddp.backward(&ddp.model()?.loss(true)?)?;
                }
                Ok(())
            });
            result.map(|()| heard)
        });
        let line = "Ddp: after the first backward, all ranks together, 2 of 3 parameters have no gradient: ";
        assert_eq!(heard[0].len(), 1, "{heard:?}");
        for part in [line, "norm.weight", "first.weight", "likely candle's rms_norm, at norm.weight"] {
            assert!(heard[0][0].contains(part), "{part}: {heard:?}");
        }
        assert!(heard[1..].iter().all(Vec::is_empty), "{heard:?}");
    }
}

#[test]
fn a_gradient_on_one_rank_is_enough_and_ranks_without_data_do_not_count() {
    let heard = on_all_ranks(2, |comm| {
        let ddp = wrapped(comm.clone(), AuditConfig::default())?;
        let (result, heard) = listening(|| -> ddp::Result<()> {
            // First no rank has data, then one has.
            ddp.backward_weighted(&ddp.model()?.loss(true)?, 0.0)?;
            ddp.backward_weighted(&ddp.model()?.loss(comm.rank() == 0)?, 1.0)?;
            // The audit has already been done.
            ddp.backward_weighted(&ddp.model()?.loss(true)?, 1.0)?;
            Ok(())
        });
        result.map(|()| heard)
    });
    assert!(heard.iter().all(Vec::is_empty), "{heard:?}");
}

#[test]
fn an_option_makes_it_an_error_and_frozen_parameters_are_left_out() {
    let strict = AuditConfig { on_missing: OnMissingGradient::Fail, ..AuditConfig::default() };
    for result in on_ranks(2, |comm| {
        let ddp = wrapped(comm, strict.clone())?;
        ddp.backward(&ddp.model()?.loss(true)?)
    }) {
        let message = result.expect("no panic").expect_err("gradients are lost").to_string();
        assert!(
            message.contains("2 of 3 parameters") && message.contains("AuditConfig::frozen"),
            "{message}"
        );
    }
    let frozen = AuditConfig { frozen: vec!["norm".into(), "first.weight".into()], ..strict.clone() };
    let quiet = AuditConfig { on_missing: OnMissingGradient::Ignore, ..AuditConfig::default() };
    for (audit, by_candle) in [(frozen, true), (quiet, true), (strict, false)] {
        let heard = on_all_ranks(2, |comm| {
            let ddp = wrapped(comm, audit.clone())?;
            let (result, heard) = listening(|| ddp.backward(&ddp.model()?.loss(by_candle)?));
            result.map(|_| heard)
        });
        assert!(heard.iter().all(Vec::is_empty), "{heard:?}");
    }
}

#[test]
fn ranks_with_other_options_do_not_train_together() {
    for result in on_ranks(2, |comm| {
        let on_missing = if comm.rank() == 0 { OnMissingGradient::Fail } else { OnMissingGradient::Warn };
        wrapped(comm, AuditConfig { on_missing, ..AuditConfig::default() }).map(drop)
    }) {
        let message = result.expect("no panic").expect_err("they differ").to_string();
        assert!(message.contains("missing gradients"), "{message}");
    }
}
