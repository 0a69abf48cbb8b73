//! The trainer with each optimizer: in every layout, resumed in another one, and after the loss of ranks.

use std::path::Path;
use std::sync::Arc;

use crate::common::Setup;
use crate::elastic::{Moment, Rows, STEPS, assert_undisturbed, config, expected_of, with_losses};
use girandole::comm::Local;
use girandole::models::CausalLm;
use girandole::trainer::{NoObserver, Observer, OptimizerConfig, StepReport, TrainConfig, Trainer};
use girandole::training::{AdamConfig, AdjustRate, MuonConfig, SgdConfig};
use girandole::{Layout, Parallel};

/// AdamW's learning rate is another one than that of matrices.
fn muon() -> OptimizerConfig {
    let adam = AdamConfig { learning_rate: 0.3, ..AdamConfig::adamw() };
    let adjust = AdjustRate::MatchRmsAdamW;
    OptimizerConfig::muon(MuonConfig { learning_rate: 1.0, adjust, adam, ..MuonConfig::default() })
}

fn sgd() -> OptimizerConfig {
    OptimizerConfig::Sgd(SgdConfig {
        momentum: 0.9,
        nesterov: true,
        weight_decay: 0.1,
        ..SgdConfig::default()
    })
}

struct Losses(Vec<f64>);

impl<M> Observer<M> for Losses {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        self.0.push(report.loss);
        Ok(())
    }
}

/// Trains from the latest checkpoint until a step.
fn train(layout: &str, config: &TrainConfig, until: usize) -> Vec<f64> {
    let layout: Layout = layout.parse().unwrap();
    let losses = Local::run_shared(layout.ranks(), |comm| {
        let mut model = Setup::default().parallel(comm, &layout, None)?;
        let mut losses = Losses(Vec::new());
        let mut trainer = Trainer::new(&mut model, Arc::new(Rows), config.clone())?;
        trainer.resume_latest()?;
        trainer.run_until(until, &mut losses)?;
        Ok(losses.0)
    });
    losses.unwrap().remove(0)
}

#[test]
fn each_goes_on_in_another_layout_with_the_same_losses() {
    for optimizer in [muon(), sgd()] {
        let of = |dir: Option<&Path>| {
            let config = TrainConfig { optimizer: optimizer.clone(), ..config(None, dir, false) };
            TrainConfig { steps: 16, batch_size: 8, ..config }
        };
        let expected = train("", &of(None), 16);
        assert!(expected[15] < expected[0], "{expected:?}");
        let dir = tempfile::tempdir().unwrap();
        let of = of(Some(dir.path()));
        let mut got = Vec::new();
        for layout in ["shard=2", "tp=2", "", "pp=2,shard=2", "dp=2,tp=2"] {
            // Checkpoints are written each third step, and at the end.
            got.extend(train(layout, &of, got.len() + 3));
        }
        got.extend(train("shard=2,cp=2", &of, 16));
        let gap = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(got.len() == 16 && gap < 1e-10, "{optimizer:?}: {gap:e}: {got:?}, expected {expected:?}");
    }
}

#[test]
fn a_checkpoint_of_another_optimizer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let of = |optimizer: OptimizerConfig| TrainConfig {
        steps: 2,
        optimizer,
        ..config(None, Some(dir.path()), false)
    };
    train("", &of(muon()), 2);
    let said = Local::run_shared(2, |comm| {
        let mut model = Setup::default().parallel(comm, &Layout::copies(2), None)?;
        let mut trainer = Trainer::new(&mut model, Arc::new(Rows), of(OptimizerConfig::default()))?;
        Ok(trainer.resume_latest().unwrap_err().to_string())
    });
    for said in said.unwrap() {
        let expected =
            "it was made with the optimizer muon, from whose state adamw cannot go on: give the same";
        assert!(said.contains(expected), "{said}");
    }
}

/// Where a rank is lost, the matrices that it had the work of are another rank's.
#[test]
fn muon_goes_on_when_a_rank_is_lost() {
    let of = |fewest| TrainConfig { batch_size: 8, optimizer: muon(), ..config(fewest, None, false) };
    let expected = expected_of(of(None));
    for (layout, leaves, left) in [
        ("dp=3", vec![(0, Moment::Stepped(2)), (1, Moment::Stepped(5))], vec![2, 1]),
        ("dp=2,shard=2", vec![(3, Moment::Stepped(2))], vec![3]),
        ("dp=2,tp=2", vec![(1, Moment::Stepped(3))], vec![2]),
        ("pp=2,dp=2", vec![(0, Moment::Stepped(1))], vec![2]),
        ("dp=3,shard=2", vec![(2, Moment::Stepped(2)), (0, Moment::Stepped(5))], vec![4, 3]),
    ] {
        let seen = with_losses(layout, &leaves, &of(Some(1)));
        assert_eq!(seen.len(), *left.last().unwrap(), "{layout}");
        for (mut losses, sizes) in seen {
            losses.dedup_by_key(|(step, _)| *step);
            assert_undisturbed(&losses, &expected, &format!("{layout}, {leaves:?}"));
            assert_eq!(sizes, left, "{layout}, {leaves:?}");
        }
    }
}

#[test]
fn muon_without_a_matrix_is_refused() {
    let OptimizerConfig::Muon { config: muon, .. } = muon() else { unreachable!() };
    let optimizer = OptimizerConfig::Muon { config: muon, not_hidden: vec!["weight".into()] };
    let said = Local::run_shared(2, |comm| {
        let mut model: Parallel<CausalLm> = Setup::default().parallel(comm, &Layout::copies(2), None)?;
        let config = TrainConfig { steps: STEPS, optimizer: optimizer.clone(), ..config(None, None, false) };
        let mut trainer = Trainer::new(&mut model, Arc::new(Rows), config)?;
        Ok(trainer.run(&mut NoObserver).unwrap_err().to_string())
    });
    for said in said.unwrap() {
        assert!(said.contains("no parameter is a matrix"), "{said}");
    }
}
