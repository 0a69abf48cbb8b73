//! Start of training on a rank: the model in its layout, and the trainer; from the beginning, from a checkpoint, or in a
//! running job.

use crate::Command;
use crate::console::say;
use crate::error::Result;
use crate::options::with_fallback_hint;
use crate::rank::{Rank, RankPhase};
use crate::resume::first_choice;
use crate::run_log::RunLog;
use candle_core::{DType, Device, Tensor};
use girandole::trainer::{Joining, TrainConfig, Trainer, observer_state};
use girandole::{Layout, Parallel, ParallelConfig};
use models::tokens::Rows;
use models::{CausalLm, Weights};

use super::lifecycle::{choose, layout_now, replacement, resume, step_flops};
use crate::language::base;
use crate::language::job::{Job, Subject};
use crate::language::nothing_is_trained;
use crate::language::options::TrainOptions;
use crate::language::pairs::RunData;
use crate::language::settings::train_config;
use crate::language::speed::Speed;

/// Builds the model in the layout of the current ranks. A rank that joins a running job learns it from the others.
pub(super) fn model_in_layout(
    job: &impl Job,
    rank: &mut Rank,
    subject: &Subject,
    data: &RunData,
    device: &Device,
) -> Result<(Parallel<CausalLm>, Option<Joining>)> {
    let (options, elastic, rows) = (job.options(), job.elastic(), &data.rows);
    if rank.phase == RankPhase::New {
        return rank.join_running(elastic, None, |rank, lost| {
            let joining = Joining::gather(&*rank.comm, lost)?;
            let config = trained_config(options, joining.layout(), subject, rows, device)?;
            Ok((build_model(options, joining.layout(), rank, subject, &config)?, Some(joining)))
        });
    }
    let layout = layout_now(options, elastic.is_some(), rank)?;
    find_reference(job, rank, &layout, data, device)?;
    let config = trained_config(options, &layout, subject, rows, device)?;
    Ok((build_model(options, &layout, rank, subject, &config)?, None))
}

/// Finds the log-probabilities of the reference, if the loss of pairs compares with one: in the checkpoint that the run goes on from,
/// or by computing them in the layout of the run. Every rank must call it.
fn find_reference(
    job: &impl Job,
    rank: &Rank,
    layout: &Layout,
    data: &RunData,
    device: &Device,
) -> Result<()> {
    let Some(reference) = job.reference()? else { return Ok(()) };
    let options = job.options();
    if let Some(contents) = first_choice(&options.checkpoints, rank, || choose(options))? {
        data.take_from(&mut observer_state(&contents).map_err(with_fallback_hint)?)?;
    }
    if !data.lacks_reference() {
        return Ok(());
    }
    if rank.is_first() {
        say(format_args!("reference: computing its log-probabilities once, before training"))?;
    }
    let config = reference_config(options, layout, &data.rows, device)?;
    let mut model = build_model(options, layout, rank, &reference, &config)?;
    Ok(data.compute_reference(&mut model, options.batch_size)?)
}

/// Returns the configuration of the training, on a rank that begins in a layout or is new in a running job.
pub(super) fn config_of_rank<J: Job>(
    job: &J,
    rank: &Rank,
    subject: &Subject,
    layout: &Layout,
    is_new: bool,
) -> Result<TrainConfig> {
    let replacement = replacement(job, rank);
    let goes_on = is_new || replacement.is_some() || job.options().survives_loss(layout);
    // Checkpoints hold all weights but frozen ones.
    let is_kept = job.options().checkpoints.checkpoint_dir.is_some();
    let fingerprint = |weights: &Weights, is_kept: bool| match is_new {
        true if is_kept => Ok(weights.fingerprint()?),
        true => Ok(None),
        false => base::fingerprint(weights, &*rank.comm, is_kept),
    };
    let weights = fingerprint(&subject.weights, is_kept && subject.lora.is_some())?;
    let reference = job.other_reference()?.map(|reference| fingerprint(&reference, is_kept)).transpose()?;
    Ok(TrainConfig {
        fewest_ranks: job.elastic().filter(|_| goes_on).map(|elastic| elastic.min),
        replacement,
        ..train_config(job, subject, weights, reference.flatten())
    })
}

/// Creates the trainer, and measures the machine's speed.
pub(super) fn new_trainer<'a>(
    options: &TrainOptions,
    model: &'a mut Parallel<CausalLm>,
    joining: Option<Joining>,
    subject: &Subject,
    data: &RunData,
    config: TrainConfig,
    rank: &Rank,
    log: Option<&mut RunLog<'_>>,
) -> Result<(Trainer<'a, CausalLm>, Speed)> {
    let (flops, device) =
        (step_flops(options.batch_size, subject, &data.rows)?, model.config().device.clone());
    let dtype = options.dtype();
    let rows = &data.rows;
    let places = (options.batch_size * rows.row_len()) as f64;
    let used = rows.packing().map_or(1.0, |packing| 1.0 - packing.padding);
    let tokens = rows.labels().map(|_| places * used);
    if let Some(joining) = joining {
        let speed = Speed::of_one(rank, dtype, &device, flops)?.with_tokens(tokens);
        return Ok((Trainer::joining(model, data.training(), config, joining)?, speed));
    }
    let speed = Speed::measured(rank, dtype, &device, flops)?.with_tokens(tokens);
    let mut trainer = Trainer::new(model, data.training(), config)?;
    resume(options, &mut trainer, log, rank)?;
    Ok((trainer, speed))
}

/// Returns the configuration of a model that is trained.
fn trained_config(
    options: &TrainOptions,
    layout: &Layout,
    subject: &Subject,
    rows: &Rows,
    device: &Device,
) -> Result<ParallelConfig> {
    Ok(ParallelConfig {
        recompute: options.recompute(),
        loss_scale: options.loss_scale(),
        balance: options.balance(subject.weights.config(), subject.lora.is_some())?,
        is_trained: subject.lora.as_ref().map(models::Lora::trained),
        ..layout_config(options, layout, rows, device)?
    })
}

/// Returns the configuration of a reference, which computes but is not trained: nothing is kept for backward, and nothing balanced.
fn reference_config(
    options: &TrainOptions,
    layout: &Layout,
    rows: &Rows,
    device: &Device,
) -> Result<ParallelConfig> {
    Ok(ParallelConfig { is_trained: nothing_is_trained(), ..layout_config(options, layout, rows, device)? })
}

/// Returns what both have in common.
fn layout_config(
    options: &TrainOptions,
    layout: &Layout,
    rows: &Rows,
    device: &Device,
) -> Result<ParallelConfig> {
    let micro_batches = options.micro_batches(layout);
    // Some groups of far may be lost already; the others have the same rows as with them.
    let far_groups = options.mesh.map_or(1, |mesh| mesh.far);
    let whole = Layout { far: far_groups, ..*layout };
    let rows_each = options.batch_size / whole.data_ranks() / micro_batches;
    Ok(ParallelConfig {
        dtype: options.dtype(),
        device: device.clone(),
        micro_batches,
        example: Some(Tensor::zeros((rows_each, rows.row_len()), DType::U32, device)?),
        schedule: options.pipeline_schedule(),
        sequence_parallel: options.sequence_parallel,
        seed: options.seed,
        far_groups,
        ..ParallelConfig::default()
    })
}

/// Builds a model in a layout.
fn build_model(
    options: &TrainOptions,
    layout: &Layout,
    rank: &Rank,
    subject: &Subject,
    config: &ParallelConfig,
) -> Result<Parallel<CausalLm>> {
    let (model, lora) = (subject.weights.config().clone(), subject.lora.clone());
    let model = match options.dropout {
        Some(p) => model.with_dropout(p)?,
        None => model,
    };
    let build = move |builder: &training::build::Builder| match &lora {
        Some(lora) => CausalLm::new(&model, &lora.adapt(builder.clone())),
        None => CausalLm::new(&model, builder),
    };
    let (comm, weights) = (rank.comm.clone(), subject.weights.parts());
    Ok(match rank.phase {
        RankPhase::New => Parallel::joining(comm, layout, weights, config, build)?,
        _ => Parallel::new(comm, layout, weights, config, build)?,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use models::tokens::TokenWriter;

    use super::*;
    use crate::language::PretrainOptions;
    use crate::language::job::Job;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        options: PretrainOptions,
    }

    /// Otherwise it has a lasting copy of its parameters, and keeps activations for a backward that never comes.
    #[test]
    fn nothing_of_a_reference_is_trained() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::create(&folder.path().join("t.tokens"), 9, None).unwrap();
        writer.push(&[1; 9]).unwrap();
        writer.end_document().unwrap();
        let rows = Rows::new(vec![(writer.finish().unwrap(), 1.0)], 4).unwrap();
        let given =
            ["pretrain", "--data", "text.txt", "--out", "out", "--balance", "row", "--recompute", "1"];
        let options = Program::parse_from(given).options;
        let config = reference_config(options.options(), &Layout::default(), &rows, &Device::Cpu).unwrap();
        let is_trained = config.is_trained.unwrap();
        assert!(!is_trained("model.embed_tokens.weight") && !is_trained("model.norm.weight"));
        assert!(config.balance.is_none() && config.recompute == Default::default());
    }
}
