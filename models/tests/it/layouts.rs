//! The same training in every layout: the losses equal those of transformers in one process.

use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::common::{Expected, FOLDERS, Trainer, assert_losses, folder, gap};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarMap;
use comm::{Communicator, Local};
use ddp::{Ddp, DdpConfig};
use fsdp::{Fsdp, FsdpConfig, MixedPrecision, ShardingStrategy};
use models::{CausalLm, FolderConfig, FolderWriter, Weights};
use ops::cross_entropy;
use pipeline::{Modules, Pipeline, PipelineConfig, ScheduleKind, Split};
use strategy::DistributedModel;
use training::build::Builder;
use training::{clip_grad_norm, named_vars};

type Comm = Arc<dyn Communicator>;

fn weights(name: &str) -> Weights {
    Weights::folder(&folder(name)).unwrap()
}

/// Runs `body` on two ranks and returns their results.
fn on_two<T: Send>(body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<T> {
    Local::run_shared(2, |comm| Ok(body(comm)?)).unwrap()
}

/// Returns the mean of the ranks' losses, for each step.
fn mean(ranks: &[Vec<f32>]) -> Vec<f32> {
    (0..ranks[0].len())
        .map(|step| ranks.iter().map(|losses| losses[step]).sum::<f32>() / ranks.len() as f32)
        .collect()
}

/// Returns the logits of a model that was trained in one process.
fn trained(name: &str) -> Tensor {
    let (weights, expected, vars) = (weights(name), Expected::of(name), VarMap::new());
    let builder = Builder::new(weights.vars(&vars, DType::F32, &Device::Cpu));
    let model = CausalLm::new(weights.config(), &builder).unwrap();
    let mut trainer = Trainer::new(named_vars(&vars), |name| weights.shapes()[name].len() > 1);
    for [tokens, targets] in expected.batches(0, 1) {
        let mut grads = model.loss(&tokens, &targets).unwrap().backward().unwrap();
        clip_grad_norm(&mut grads, &vars.all_vars(), 1.0).unwrap();
        trainer.step(&grads).unwrap();
    }
    model.logits(expected.get("tokens")).unwrap()
}

fn begin(weights: &Weights, out: &Path) -> FolderWriter {
    FolderWriter::begin(out, weights.config(), DType::F32, &FolderConfig::default()).unwrap()
}

#[test]
fn copies_train_as_one_process() {
    for name in FOLDERS {
        let (weights, expected) = (weights(name), Expected::of(name));
        let losses = on_two(|comm| {
            let batches = expected.batches(comm.rank(), 2);
            let vb = weights.tensors(DType::F32, &Device::Cpu);
            let build = |vb| CausalLm::new(weights.config(), &Builder::new(vb));
            let ddp = Ddp::new(comm, vb, &DdpConfig::default(), build)?;
            let mut trainer = Trainer::new(ddp.named_vars(), |name| weights.shapes()[name].len() > 1);
            let step = |[tokens, targets]: [Tensor; 2]| {
                let loss = ddp.model()?.loss(&tokens, &targets)?;
                let mut grads = ddp.backward(&loss)?;
                clip_grad_norm(&mut grads, &ddp.vars(), 1.0)?;
                trainer.step(&grads)?;
                loss.to_scalar::<f32>()
            };
            batches.into_iter().map(step).collect::<Result<Vec<f32>>>()
        });
        assert_losses(&mean(&losses), &expected.losses(), name);
    }
}

#[test]
fn shards_train_as_one_process_and_are_saved_as_a_folder() {
    for name in FOLDERS {
        let (weights, expected, out) = (weights(name), Expected::of(name), tempfile::tempdir().unwrap());
        let losses = on_two(|comm| {
            let (rank, batches) = (comm.rank(), expected.batches(comm.rank(), 2));
            let vb = weights.tensors(DType::F32, &Device::Cpu);
            let build = |units| CausalLm::new(weights.config(), &Builder::from(units));
            let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), build)?;
            assert!(
                gap(&fsdp.model()?.logits(expected.get("tokens"))?, expected.get("logits")) < 1e-5,
                "{name}"
            );
            let mut trainer = Trainer::new(fsdp.named_vars(), |name| weights.shapes()[name].len() > 1);
            let step = |[tokens, targets]: [Tensor; 2]| {
                let loss = fsdp.model()?.loss(&tokens, &targets)?;
                let mut grads = fsdp.backward(&loss)?;
                fsdp.clip_grad_norm(&mut grads, 1.0)?;
                trainer.step(&grads)?;
                loss.to_scalar::<f32>()
            };
            let losses = batches.into_iter().map(step).collect::<Result<Vec<f32>>>()?;
            let mut writer = if rank == 0 { Some(begin(&weights, out.path())) } else { None };
            fsdp.visit_full(|name, tensor| match &mut writer {
                Some(writer) => Ok(writer.write(name, &tensor)?),
                None => Ok(()),
            })?;
            writer.map(FolderWriter::finish).transpose()?;
            let logits = fsdp.model()?.logits(expected.get("tokens"))?;
            Ok((losses, logits))
        });
        let saved = Weights::folder(out.path()).unwrap();
        let builder = Builder::new(saved.tensors(DType::F32, &Device::Cpu));
        let alone = CausalLm::new(saved.config(), &builder).unwrap().logits(expected.get("tokens")).unwrap();
        assert_eq!(gap(&alone, &losses[0].1), 0.0, "{name}");
        let losses: Vec<_> = losses.into_iter().map(|(losses, _)| losses).collect();
        assert_losses(&mean(&losses), &expected.losses(), name);
    }
}

/// A tied embedding is gathered for the embedding and again for the head.
#[test]
fn tied_shards_train_with_every_strategy_and_with_accumulation() {
    let (weights, expected) = (weights("llama-tied"), Expected::of("llama-tied"));
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
        let losses = on_two(|comm| {
            let batches = expected.batches(comm.rank(), 2);
            let vb = weights.tensors(DType::F32, &Device::Cpu);
            let build = |units| CausalLm::new(weights.config(), &Builder::from(units));
            let fsdp = Fsdp::new(comm, vb, &FsdpConfig { strategy, ..FsdpConfig::default() }, build)?;
            let mut trainer = Trainer::new(fsdp.named_vars(), |name| weights.shapes()[name].len() > 1);
            let mut losses = Vec::new();
            for [tokens, targets] in batches {
                // Two rows as two micro-batches.
                let of = |row: usize| {
                    let part = |all: &Tensor| all.narrow(0, row, 1)?.contiguous();
                    fsdp.model()?.loss(&part(&tokens)?, &part(&targets)?)? * 0.5
                };
                let first = of(0)?;
                fsdp.backward_no_sync(&first)?;
                let second = of(1)?;
                let mut grads = fsdp.backward(&second)?;
                fsdp.clip_grad_norm(&mut grads, 1.0)?;
                trainer.step(&grads)?;
                losses.push((first + second)?.to_scalar::<f32>()?);
            }
            Ok(losses)
        });
        assert_losses(&mean(&losses), &expected.losses(), &format!("{strategy:?}"));
    }
}

/// Sharded parameters in f32, computation in bf16, whose rounding may change the choice of experts.
#[test]
fn shards_train_in_mixed_precision() {
    for name in FOLDERS.into_iter().filter(|name| weights(name).config().experts.is_none()) {
        let (weights, expected) = (weights(name), Expected::of(name));
        let losses = on_two(|comm| {
            let batches = expected.batches(comm.rank(), 2);
            let vb = weights.tensors(DType::F32, &Device::Cpu);
            let build = |units| CausalLm::new(weights.config(), &Builder::from(units));
            let mixed_precision = MixedPrecision { param_dtype: Some(DType::BF16), ..Default::default() };
            let fsdp = Fsdp::new(comm, vb, &FsdpConfig { mixed_precision, ..FsdpConfig::default() }, build)?;
            let mut trainer = Trainer::new(fsdp.named_vars(), |name| weights.shapes()[name].len() > 1);
            let mut losses = Vec::new();
            for [tokens, targets] in batches {
                let loss = fsdp.model()?.loss(&tokens, &targets)?;
                let mut grads = fsdp.backward(&loss)?;
                fsdp.clip_grad_norm(&mut grads, 1.0)?;
                trainer.step(&grads)?;
                losses.push(loss.to_scalar::<f32>()?);
            }
            Ok(losses)
        });
        for (got, expected) in mean(&losses).iter().zip(expected.losses()) {
            assert!((got - expected).abs() < 0.05, "{name}: {got}, expected {expected}");
        }
    }
}

/// The loss of a micro-batch, from its logits.
fn of_logits(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (rows, len, classes) = logits.dims3()?;
    cross_entropy(&logits.reshape((rows * len, classes))?, &targets.flatten_all()?, None)
}

#[test]
fn stages_train_as_one_process() {
    for (name, schedule) in FOLDERS
        .into_iter()
        .flat_map(|name| [ScheduleKind::OneFOneB, ScheduleKind::ZbH1].map(|schedule| (name, schedule)))
    {
        let (weights, expected, out) = (weights(name), Expected::of(name), tempfile::tempdir().unwrap());
        let losses = on_two(|comm| {
            let rank = comm.rank();
            let config = weights.config().clone();
            let ties = config.ties();
            let second = format!("{}.1", if name == "gpt2" { "transformer.h" } else { "model.layers" });
            let modules = Modules::of_units(move |builder| CausalLm::new(&config, builder))?;
            let config = PipelineConfig {
                schedule,
                micro_batches: 2,
                split: Split::at([second.as_str()]),
                tied: ties,
                ..PipelineConfig::default()
            };
            let builder = |map: &VarMap| weights.vars(map, DType::F32, &Device::Cpu);
            let batches = expected.batches(0, 1);
            let example = batches[0][0].narrow(0, 0, 2)?;
            let pipeline = Pipeline::new(comm, &modules, &builder, &example, of_logits, &config);
            let mut pipeline = pipeline.map_err(candle_core::Error::wrap)?;
            let is_matrix = |name: &str| name == "lm_head.weight" || weights.shapes()[name].len() > 1;
            let mut trainer = Trainer::new(pipeline.named_vars(), is_matrix);
            let mut losses = Vec::new();
            for [tokens, targets] in batches {
                let mut step =
                    pipeline.step(Some(&tokens), Some(&targets)).map_err(candle_core::Error::wrap)?;
                pipeline.clip_grad_norm(&mut step.grads, 1.0).map_err(candle_core::Error::wrap)?;
                trainer.step(&step.grads)?;
                losses.extend(step.loss);
            }
            let mut writer = if rank == 0 { Some(begin(&weights, out.path())) } else { None };
            let shown = pipeline.visit_full(|name, tensor| match &mut writer {
                Some(writer) => Ok(writer.write(name, &tensor)?),
                None => Ok(()),
            });
            shown.map_err(candle_core::Error::wrap)?;
            writer.map(FolderWriter::finish).transpose()?;
            Ok(losses)
        });
        let saved = Weights::folder(out.path()).unwrap();
        let builder = Builder::new(saved.tensors(DType::F32, &Device::Cpu));
        let alone = CausalLm::new(saved.config(), &builder).unwrap().logits(expected.get("tokens")).unwrap();
        let found = gap(&alone, &trained(name));
        assert!(found < 1e-3, "{name}, {schedule:?}: saved logits are {found} off");
        assert!(losses[0].is_empty());
        assert_losses(&losses[1], &expected.losses(), &format!("{name}, {schedule:?}"));
    }
}

/// Random weights do not depend on the layout, nor on the order in which they are read.
#[test]
fn random_weights_do_not_depend_on_the_layout() {
    let config = weights("gpt2").config().clone();
    let random = Weights::random(&config, 7).unwrap();
    let vars = VarMap::new();
    let builder = Builder::new(random.vars(&vars, DType::F32, &Device::Cpu));
    CausalLm::new(&config, &builder).unwrap();
    let alone = named_vars(&vars);
    let all = Mutex::new(Vec::new());
    on_two(|comm| {
        let vb = random.tensors(DType::F32, &Device::Cpu);
        let build = |units| CausalLm::new(&config, &Builder::from(units));
        let fsdp = Fsdp::new(comm, vb, &FsdpConfig::default(), build)?;
        fsdp.visit_full(|name, tensor| {
            all.lock().unwrap().push((name.to_string(), tensor));
            Ok(())
        })?;
        Ok(())
    });
    let mut all = all.into_inner().unwrap();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(all.len(), alone.len());
    for ((name, tensor), (other, var)) in all.iter().zip(&alone) {
        assert!(name == other && gap(tensor, var.as_tensor()) == 0.0, "{name}");
    }
    let spread = |name: &str| {
        let var = &alone.iter().find(|(known, _)| known == name).unwrap().1;
        var.sqr().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap().sqrt()
    };
    assert!((spread("transformer.wte.weight") - 0.15).abs() < 0.01);
    assert!((spread("transformer.h.0.mlp.c_proj.weight") - 0.075).abs() < 0.01);
    assert_eq!(spread("transformer.h.0.mlp.c_proj.bias"), 0.0);
}
