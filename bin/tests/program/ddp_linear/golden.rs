//! PyTorch's losses from the fixtures.

use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Golden {
    pub(crate) seed: u64,
    pub(crate) size: usize,
    pub(crate) epochs: usize,
    pub(crate) runs: Vec<Run>,
}

#[derive(Deserialize)]
pub(crate) struct Run {
    pub(crate) run: String,
    pub(crate) world_size: usize,
    pub(crate) keep_total_batch: bool,
    pub(crate) weight: f32,
    pub(crate) bias: f32,
    pub(crate) losses: Vec<f32>,
}

impl Golden {
    pub(crate) fn all() -> [Self; 2] {
        let texts = [
            include_str!("../../fixtures/ddp_linear_42.json"),
            include_str!("../../fixtures/ddp_linear_7.json"),
        ];
        texts.map(|text| serde_json::from_str(text).unwrap())
    }

    pub(crate) fn single(&self) -> &Run {
        self.runs.iter().find(|run| run.run == "single").unwrap()
    }
}

/// Checks that every loss is within a relative error of 1e-5.
pub(crate) fn assert_close(got: &[f32], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: steps");
    for (step, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (got - expected).abs() / expected.abs();
        assert!(
            error < 1e-5,
            "{what}, step {step}: got {got}, PyTorch has {expected}, relative error {error:.1e}"
        );
    }
}
