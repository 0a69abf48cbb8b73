//! Memory check of a language-model run, before ranks start and anything is allocated.

use crate::error::{Error, Result};
use crate::memory_check;
use comm::internal::{UsableMemory, available_memory};
use girandole::Layout;
use plan::Memory;
use plan::language::{Subject, Training, layouts};
use plan::units::show_bytes;
use training::build::Recompute;

use super::options::TrainOptions;

/// Maximum number of fitting settings that the error message suggests.
const MOST_NAMED: usize = 3;

/// Bytes of a process beyond what the plan counts: program, threads and connections.
const PROCESS: f64 = 100e6;

/// Safety factor: the plan may underestimate by this much.
const MARGIN: f64 = 1.05;

/// What the check needs to know of this machine.
#[derive(Debug, Clone)]
struct Host {
    /// Number of ranks on it.
    ranks: usize,
    /// Available memory.
    available: UsableMemory,
    /// Whether checkpoints are kept: ranks then copy what they save, to write it in the background.
    saves: bool,
}

/// Checks by the plan that the ranks on this machine do not need more memory than is available.
///
/// # Errors
/// The layout, with what it needs and what would fit.
pub(super) fn check(options: &TrainOptions, subject: &Subject, layout: &Layout, length: usize) -> Result<()> {
    let common = options.common();
    let ranks = memory_check::ranks_on_host(&common.ranks, common.device, layout.ranks());
    let (false, Some(ranks), Some(available)) = (options.no_memory_check, ranks, available_memory()) else {
        return Ok(());
    };
    let host = Host { ranks, available, saves: options.checkpoints.checkpoint_dir.is_some() };
    let training = options.planned(length);
    match (host.refusal(subject, &training, layout), options.mesh) {
        (None, _) => Ok(()),
        (Some(help), Some(_)) => Err(Error::Option { option: "--mesh", got: layout.to_string(), help }),
        (Some(help), None) => Err(Error::Unavailable { wanted: "the memory for this run".into(), help }),
    }
}

impl Host {
    /// Returns the error message if a layout does not fit.
    fn refusal(&self, subject: &Subject, training: &Training, layout: &Layout) -> Option<String> {
        // A plan that fails is ignored here: the training code reports the problem itself.
        let needed = self.needed(subject, training, layout)?;
        if needed <= self.available.bytes as f64 {
            return None;
        }
        let who = match self.ranks {
            1 => "it needs".to_string(),
            ranks => format!("the {ranks} ranks here need"),
        };
        let fitting = self.fitting(subject, training, layout);
        let instead = match fitting.is_empty() {
            true => {
                "no layout of as many ranks would fit: take a smaller model or --length, or more machines"
                    .into()
            }
            false => format!("these would fit: {}", fitting.join("; ")),
        };
        Some(format!(
            "{who} about {}, and this machine has {} to give{}; {instead} (an estimate: --no-memory-check goes on all the same)",
            show_bytes(needed),
            show_bytes(self.available.bytes as f64),
            self.available.restriction()
        ))
    }

    /// Returns the bytes that the ranks here need; if not all ranks are here, those that need most are assumed to be.
    /// `None` where the layout has no plan.
    fn needed(&self, subject: &Subject, training: &Training, layout: &Layout) -> Option<f64> {
        let cost = subject.estimate(training, layout).ok()?;
        // The pass of a reference is over before anything is saved.
        let trained = match &subject.reference {
            None => cost.clone(),
            Some(_) => Subject { reference: None, ..subject.clone() }.estimate(training, layout).ok()?,
        };
        let each = (layout.ranks() / layout.pp) as f64;
        let with_saved = |memory: &Memory| memory.total() + self.saved(memory, layout);
        let all = cost.stages.iter().zip(&trained.stages);
        let all = all.map(|(stage, trained)| stage.memory.total().max(with_saved(&trained.memory)));
        let most = all.clone().fold(0.0, f64::max);
        let sum: f64 = all.map(|memory| each * memory).sum();
        Some(MARGIN * sum.min(most * self.ranks as f64) + PROCESS * self.ranks as f64)
    }

    /// Returns the bytes of the copy that a rank saves: of what is trained, and of the optimizer's state.
    fn saved(&self, memory: &Memory, layout: &Layout) -> f64 {
        if !self.saves {
            return 0.0;
        }
        // Gradients are as large as the parameters that are trained; copies of the model share the copy that is saved.
        (memory.gradients + memory.optimizer) / layout.of_parameters().dp as f64
    }

    /// Returns the options of layouts that would fit, the requested layout first.
    fn fitting(&self, subject: &Subject, training: &Training, layout: &Layout) -> Vec<String> {
        let others = layouts(layout.ranks(), training.length, subject.experts());
        let others = others.into_iter().filter(|other| other != layout);
        let all = std::iter::once(*layout).chain(others);
        let fits = |layout: Layout| {
            let rows = training.batch_size / layout.data_ranks().max(1);
            let now = training.micro_batches(&layout);
            let settings = [(training.recompute, now), (Recompute::Units, now), (Recompute::Units, rows)];
            let (recompute, micro_batches) = settings.into_iter().find(|&(recompute, micro_batches)| {
                let training = Training { recompute, micro_batches: Some(micro_batches), ..training.clone() };
                let needed = self.needed(subject, &training, &layout);
                needed.is_some_and(|needed| needed <= self.available.bytes as f64)
            })?;
            let again = if recompute == training.recompute { "" } else { " --recompute 1" };
            let parts = match micro_batches == now {
                true => String::new(),
                false => format!(" --accumulate {micro_batches}"),
            };
            Some(format!("--mesh {layout}{again}{parts}"))
        };
        all.filter_map(fits).take(MOST_NAMED).collect()
    }
}

#[cfg(test)]
mod tests {
    use models::{Lora, LoraConfig, ModelConfig};

    use super::*;

    fn subject() -> Subject {
        let config = r#"{"model_type": "llama", "vocab_size": 1000, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
            "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_act": "silu", "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
        Subject::new(ModelConfig::from_json(config).unwrap(), None)
    }

    /// Returns the message on a machine with this many bytes for what is planned.
    fn line(mesh: &str, planned: f64) -> Option<String> {
        let training = Training { length: 128, ..Training::default() };
        let layout: Layout = mesh.parse().unwrap();
        let ranks = layout.ranks();
        let bytes = (MARGIN * planned + PROCESS * ranks as f64) as u64;
        let available = UsableMemory { bytes, limit: Some("/sys/fs/cgroup/memory.max".into()) };
        Host { ranks, available, saves: false }.refusal(&subject(), &training, &layout)
    }

    /// Checkpoints of adapters have no weights of the model, and copies of it share what they write.
    #[test]
    fn what_is_copied_for_checkpoints_is_what_is_trained() {
        let training = Training { length: 128, ..Training::default() };
        let lora = Lora::new(&LoraConfig::default(), &subject().config).unwrap();
        let adapters = Subject { lora: Some(lora), ..subject() };
        for (subject, mesh, copies) in [
            (subject(), "dp=1", 1.0),
            (adapters.clone(), "dp=1", 1.0),
            (adapters.clone(), "dp=2,cp=2", 4.0),
            (adapters.clone(), "shard=2,cp=2", 4.0),
            (adapters.clone().with_reference(subject()), "dp=1", 1.0),
        ] {
            let layout: Layout = mesh.parse().unwrap();
            let needed = |saves| {
                let available = UsableMemory { bytes: 0, limit: None };
                let host = Host { ranks: layout.ranks(), available, saves };
                host.needed(&subject, &training, &layout).unwrap()
            };
            let copied = (needed(true) - needed(false)) / MARGIN / layout.ranks() as f64;
            // Adam has two numbers beside each.
            let expected = 3.0 * 4.0 * subject.parameters().unwrap().1 as f64 / copies;
            assert!((copied - expected).abs() < 0.01 * expected, "{mesh}: {copied}, not {expected}");
        }
    }

    #[test]
    fn what_would_fit_is_told() {
        assert_eq!(line("dp=2", 1e9), None);
        let said = line("dp=2", 200e6).unwrap();
        assert!(
            said.contains("the 2 ranks here need about 4")
                && said.contains(
                    "has 410 MB to give for this container or job (/sys/fs/cgroup/memory.max); these"
                ),
            "{said}"
        );
        assert!(said.contains("these would fit: --mesh dp=2 --recompute 1; --mesh shard=2; "), "{said}");
        let said = line("dp=2", 80e6).unwrap();
        assert!(
            said.contains("these would fit: --mesh tp=2 --recompute 1 --accumulate 8; --mesh pp=2 "),
            "{said}"
        );
        let said = line("dp=1", 1e6).unwrap();
        assert!(
            said.contains("it needs about 26") && said.contains("no layout of as many ranks would fit"),
            "{said}"
        );
    }
}
