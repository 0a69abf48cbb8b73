//! Pairs of answers: every layout trains on them like one process, and tells the same of them.

use girandole::comm::Local;
use girandole::models::Problem;
use girandole::ops::{PreferenceConfig, PreferenceLoss, Preferences};
use girandole::{Batch, Layout, PreferenceReport, Recompute};

use crate::common::{Setup, own_rows};
use crate::layouts::{EXPERT_LAYOUTS, FEW_SCHEDULES, LAYOUTS, assert_equal, train_as};

const LOSSES: [PreferenceLoss; 6] = [
    PreferenceLoss::Dpo,
    PreferenceLoss::Ipo,
    PreferenceLoss::Hinge,
    PreferenceLoss::Orpo,
    PreferenceLoss::SimPo,
    PreferenceLoss::Reward,
];

/// Rows of pairs, for a model that writes, or for one that scores documents.
fn setup_of(loss: PreferenceLoss) -> Setup {
    let problem = (loss == PreferenceLoss::Reward).then_some(Problem::Regression);
    Setup { pairs: Some(loss), problem, len: 12, ..Setup::default() }
}

/// Rows with none to two pairs of answers, with every loss; also recomputed, with divided sequences and in other micro-batches.
#[test]
fn pairs_of_answers_in_every_layout() {
    for (at, loss) in LOSSES.into_iter().enumerate() {
        let setup = Setup { gpt2: at % 2 == 1, ..setup_of(loss) };
        let expected = train_as("", Setup { micro_batches: Some(1), ..setup });
        // These are the ones that are most unlike each other.
        if !matches!(loss, PreferenceLoss::Dpo | PreferenceLoss::Orpo | PreferenceLoss::Reward) {
            for layout in ["dp=2", "shard=2", "tp=2", "pp=2", "cp=3", "pp=2,cp=2", "dp=2,tp=2"] {
                assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
            }
            continue;
        }
        for layout in LAYOUTS {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
        let divided = Setup { sequence_parallel: true, ..setup };
        for layout in LAYOUTS.into_iter().filter(|layout| layout.contains("tp=2")) {
            assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
        }
        for recompute in [Recompute::Units, Recompute::Selective] {
            for (layout, setup) in
                [("", setup), ("shard=2", setup), ("pp=2", setup), ("cp=2", setup), ("tp=2", divided)]
            {
                assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
            }
        }
        for schedule in FEW_SCHEDULES {
            for layout in ["pp=2", "pp=2,shard=2", "pp=2,cp=2", "pp=2,tp=2"] {
                assert_equal(layout, &train_as(layout, Setup { schedule, ..setup }), &expected, 1e-10);
            }
        }
    }
}

/// Experts learn from pairs, too, with tokens sent between ranks.
#[test]
fn pairs_of_answers_with_experts() {
    for loss in [PreferenceLoss::Dpo, PreferenceLoss::Reward] {
        let setup = Setup { experts: true, ..setup_of(loss) };
        let expected = train_as("", setup);
        for layout in EXPERT_LAYOUTS {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
    }
}

/// What is told of pairs is the same on each rank of every layout, in training and in evaluation.
#[test]
fn reports_of_pairs_in_every_layout() {
    for loss in LOSSES {
        let setup = setup_of(loss);
        let reports = |layout: &str| {
            let layout: Layout = layout.parse().unwrap();
            let ranks = Local::run_shared(layout.ranks(), |comm| {
                let mut parallel = setup.parallel(comm, &layout, None)?;
                let batch = own_rows(&parallel, 1, &setup)?;
                let step = parallel.step_batch(&batch)?;
                let evaluation = parallel.evaluate_batch(&batch)?;
                assert_eq!(step.targets, step.preferences.unwrap().pairs);
                Ok([
                    (step.loss, step.preferences.unwrap()),
                    (evaluation.loss, evaluation.preferences.unwrap()),
                ])
            });
            ranks.unwrap()
        };
        let [(loss_of_step, expected), _] = reports("")[0];
        assert!(expected.pairs == 9 && (0.0..=1.0).contains(&expected.accuracy), "{expected:?}");
        let cross_entropy = expected.cross_entropy.0;
        assert!((expected.loss + cross_entropy - loss_of_step).abs() < 1e-12, "{loss_of_step} {expected:?}");
        assert_eq!(loss == PreferenceLoss::Orpo, expected.cross_entropy.1 > 0);
        let numbers = |(loss, of): (f64, PreferenceReport)| {
            let [chosen, rejected] = of.log_probs;
            [loss, of.loss, of.rewards[0], of.margin(), of.accuracy, chosen, rejected, of.cross_entropy.0]
        };
        for layout in ["", "dp=2", "shard=2", "tp=2", "pp=2", "cp=3", "pp=2,cp=2", "dp=2,tp=2"] {
            for found in reports(layout).into_iter().flatten() {
                assert_eq!(
                    (found.1.pairs, found.1.cross_entropy.1),
                    (expected.pairs, expected.cross_entropy.1)
                );
                let gaps = numbers(found).into_iter().zip(numbers((loss_of_step, expected)));
                let gap = gaps.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(gap < 1e-10, "{layout}: {found:?}, expected {expected:?}");
            }
        }
    }
}

#[test]
fn pairs_of_other_rows_are_refused() {
    let refused = |layout: &str| {
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let setup = Setup { pairs: Some(PreferenceLoss::Dpo), len: 12, ..Setup::default() };
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let batch = own_rows(&parallel, 0, &setup)?;
            let none = Preferences::new(PreferenceConfig::default(), Vec::new()).unwrap();
            let other = Batch { preferences: Some(none), ..batch.clone() };
            Ok(parallel.step_batch(&other).unwrap_err().to_string())
        });
        said.unwrap()
    };
    for layout in ["", "dp=2", "pp=2"] {
        for said in refused(layout) {
            assert!(said.contains("the pairs of a batch: got those of 0 rows"), "{layout}: {said}");
        }
    }
}
