//! Heads that score documents, in every layout: labels travel with rows as targets, so that their losses are those of one process.

use crate::common::Setup;
use crate::layouts::{EXPERT_LAYOUTS, LAYOUTS, SCHEDULES, assert_equal, train_as};
use girandole::Recompute;
use girandole::models::Problem;

#[test]
fn heads_in_every_layout() {
    for problem in Problem::ALL {
        let gpt2 = Setup { gpt2: true, problem: Some(problem), ..Setup::default() };
        let qwen3 = Setup { gpt2: false, ..gpt2 };
        let llama = Setup { tied: false, ..qwen3 };
        // One family for each problem, and of one all.
        let setups = match problem {
            Problem::SingleLabel => vec![gpt2, qwen3, Setup { dropout: 0.2, ..gpt2 }],
            Problem::MultiLabel => vec![llama],
            Problem::Regression => vec![Setup { mistral: true, ..qwen3 }],
        };
        for setup in setups {
            // Micro-batches of one, two and four rows have the same mean.
            let expected = train_as("", Setup { micro_batches: Some(1), ..setup });
            assert!(expected.parameters.contains_key("score.weight"));
            assert!(!expected.parameters.contains_key("lm_head.weight"));
            for layout in LAYOUTS {
                assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
            }
            let divided = Setup { sequence_parallel: true, ..setup };
            for layout in LAYOUTS.into_iter().filter(|layout| layout.contains("tp=2")) {
                assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
            }
            for micro_batches in [2, 4, 8] {
                let parts = Setup { micro_batches: Some(micro_batches), ..setup };
                assert_equal("", &train_as("", parts), &expected, 1e-10);
            }
            // What recomputes, and what cuts into stages, has targets of labels or of numbers.
            if setup.dropout > 0.0 || setup.mistral || (problem == Problem::SingleLabel && !setup.gpt2) {
                continue;
            }
            for recompute in [Recompute::Units, Recompute::Selective, Recompute::Every(2)] {
                for (layout, setup) in [
                    ("", setup),
                    ("shard=2", setup),
                    ("pp=2", setup),
                    ("cp=2", setup),
                    ("pp=2,cp=2", setup),
                    ("pp=2,tp=2", setup),
                    ("cp=2,tp=2", divided),
                ] {
                    assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
                }
            }
            for schedule in SCHEDULES {
                for (layout, setup) in
                    [("pp=2", setup), ("pp=2,shard=2", setup), ("pp=2,cp=2", setup), ("pp=2,tp=2", divided)]
                {
                    assert_equal(layout, &train_as(layout, Setup { schedule, ..setup }), &expected, 1e-10);
                }
            }
        }
    }
}

#[test]
fn heads_over_experts_in_every_layout() {
    let setup = Setup { experts: true, problem: Some(Problem::SingleLabel), ..Setup::default() };
    let expected = train_as("", setup);
    for layout in EXPERT_LAYOUTS {
        assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
    }
    let divided = Setup { sequence_parallel: true, ..setup };
    for layout in EXPERT_LAYOUTS.into_iter().filter(|layout| layout.contains("tp=2")) {
        assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
    }
}
