//! Losses and weights equal those of the dense model in PyTorch, from the seed alone, in any layout of ranks.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::common::{Folder, Girandole, assert_close, assert_norms, losses};
use crate::tensor_parallel::{MLP, TRANSFORMER};

#[derive(Deserialize)]
struct Golden {
    runs: Vec<Run>,
}

#[derive(Deserialize)]
struct Run {
    command: String,
    dp: usize,
    losses: Vec<f32>,
    /// Sum, and root of the sum of squares, by tensor.
    norms: BTreeMap<String, [f64; 2]>,
    #[serde(flatten)]
    options: BTreeMap<String, Value>,
}

impl Run {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["--dp".into(), self.dp.to_string()];
        for (name, value) in &self.options {
            let option = format!("--{}", name.replace('_', "-"));
            match value {
                Value::Bool(false) => {}
                Value::Bool(true) => arguments.push(option),
                value => arguments.extend([option, value.to_string()]),
            }
        }
        arguments
    }
}

fn check(command: &Girandole, kind: &str) {
    let golden: Golden = serde_json::from_str(include_str!("../../fixtures/tensor_parallel.json")).unwrap();
    let runs: Vec<&Run> = golden.runs.iter().filter(|run| run.command == kind).collect();
    assert!(runs.len() >= 2, "{kind}");
    for run in runs {
        for (tp, sequence_parallel) in [(1, false), (2, false), (2, true), (4, true)] {
            if run.dp * tp > 4 {
                continue;
            }
            let folder = Folder::new();
            let (lines, saved) = (folder.argument("m.jsonl"), folder.argument("w.safetensors"));
            let mut arguments = run.arguments();
            arguments.extend(["--tp".into(), tp.to_string()]);
            arguments.extend(["--metrics", &lines, "--save", &saved].map(String::from));
            arguments.extend(sequence_parallel.then(|| "--sequence-parallel".to_string()));
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            command.succeed(&arguments);
            let what = arguments.join(" ");
            assert_close(&losses(lines.as_ref()), &run.losses, &what);
            // The bias of keys has no effect, so its gradient is only rounding error, which Adam scales up to a step
            // of full size.
            let but = |name: &str| name.ends_with("qkv.bias");
            assert_norms(saved.as_ref(), &run.norms, but, &what);
        }
    }
}

#[test]
fn the_mlp() {
    check(&MLP, "mlp");
}

#[test]
fn the_transformer() {
    check(&TRANSFORMER, "transformer");
}
