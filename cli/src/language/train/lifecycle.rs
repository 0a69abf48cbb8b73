//! Beginning and end of a training job: resuming from a checkpoint, logging, final output and saving.

use std::path::Path;

use crate::Command;
use crate::console::note;
use crate::error::{Error, Result};
use crate::live_page::LivePage;
use crate::options::{begin_note, keeps_losses, value_name, with_fallback_hint};
use crate::rank::Rank;
use crate::resume::first_choice;
use crate::run_log::{LogConfig, RunLog};
use comm::Operation;
use girandole::trainer::{self, Replacement, Summary, Trainer};
use girandole::{Layout, Parallel};
use models::tokens::Rows;
use models::{CausalLm, FolderConfig, WrittenFiles};
use plan::command::ParametersDtype;
use report::RunSeries;
use report::metrics::MetricsWriter;
use training::{Checkpoints, Contents};

use crate::language::job::{Job, Subject};
use crate::language::options::TrainOptions;
use crate::language::speed::Speed;
use crate::language::trained;
use crate::language::watch::wrap_error;

/// Refuses a checkpoint beyond the last step.
pub(super) fn check_steps(options: &TrainOptions, done: usize) -> Result<()> {
    let steps = options.steps();
    if done <= steps {
        return Ok(());
    }
    let help = format!("the checkpoint is at step {done} already; give more, or another --checkpoint-dir");
    let got = options.epochs.unwrap_or(steps).to_string();
    Err(Error::Option { option: options.steps_option(), got, help })
}

/// Returns the layout for the current number of ranks: some may have been lost before the first step.
pub(super) fn layout_now(options: &TrainOptions, is_elastic: bool, rank: &Rank) -> Result<Layout> {
    let ranks = rank.comm.world_size();
    let begun = options.mesh.unwrap_or_else(|| Layout::copies(ranks));
    if !is_elastic || begun.ranks() == ranks {
        return options.layout(ranks);
    }
    let of = if rank.newcomers_within.is_some() { Layout::for_all } else { Layout::for_fewer };
    let Some(layout) = of(&begun, ranks, options.batch_size, options.micro_batches(&begun)) else {
        return options.layout(ranks);
    };
    if layout.ranks() < ranks {
        if rank.comm.rank() >= layout.ranks() {
            return Err(girandole::Error::NotNeeded { layout }.into());
        }
        // It fails when the ranks that are not needed leave, and the others start again.
        rank.comm.run(Operation::Barrier)?;
    }
    Ok(layout)
}

/// Returns how lost ranks are replaced, if they are.
pub(super) fn replacement(job: &impl Job, rank: &Rank) -> Option<Replacement> {
    // The launcher of a rank tells it a minimum only.
    let most = job.elastic().map(|elastic| elastic.max).filter(|most| *most < usize::MAX);
    let copies = || Layout::copies(most.unwrap_or(rank.begun_with));
    let layout = job.options().mesh.unwrap_or_else(copies);
    rank.newcomers_within.map(|within| Replacement { layout, within })
}

/// Number of rows of which the length of documents is measured.
const SAMPLED_ROWS: usize = 256;

/// Returns the floating-point operations of a step, over all ranks.
pub(super) fn step_flops(batch_size: usize, subject: &Subject, rows: &Rows) -> Result<f64> {
    let planned = plan::language::Subject::new(subject.weights.config().clone(), subject.lora.clone());
    Ok(planned.training_flops(rows.row_len(), rows.document_len(SAMPLED_ROWS)?)? * batch_size as f64)
}

/// Creates a rank's log: on rank 0, and on all ranks of an elastic run, since each may have to replace rank 0.
pub(super) fn log<'a, J: Job>(
    job: &J,
    is_first: bool,
    is_elastic: bool,
    metrics: Option<&'a mut MetricsWriter>,
    layout: &Layout,
) -> Option<RunLog<'a>> {
    let config = LogConfig {
        keep: keeps_losses(job.common(), &job.options().checkpoints),
        steps: job.options().steps(),
        muted: !is_first,
        at_once: is_elastic,
        ..LogConfig::default()
    };
    let run = RunSeries { name: layout.to_string(), world_size: layout.ranks(), ..RunSeries::default() };
    let page = || LivePage::new(J::NAME, job.common().report.as_deref(), run);
    (is_first || is_elastic).then(|| RunLog::new(&config, metrics).with_page(page()))
}

/// Returns the lines that are printed at the end.
pub(super) fn last_lines(options: &TrainOptions, summary: &Summary, speed: &Speed) -> Vec<String> {
    let line = (summary.steps > 0).then(|| trained::line(summary, speed));
    line.into_iter().chain([format!("saved in {}", options.out.display())]).collect()
}

/// Resumes from a checkpoint, if that is requested and one exists.
pub(super) fn resume(
    options: &TrainOptions,
    trainer: &mut Trainer<'_, CausalLm>,
    mut log: Option<&mut RunLog<'_>>,
    rank: &Rank,
) -> Result<()> {
    let Some(contents) = first_choice_of_checkpoint(options, rank)? else {
        // The file may have the steps of a start before the first checkpoint.
        if let (Some(log), true) = (log, rank.is_first()) {
            log.cut(trainer.epoch() as usize, trainer.step())?;
        }
        return Ok(());
    };
    trainer.resume(&contents).map_err(with_fallback_hint)?;
    check_steps(options, trainer.step())?;
    if let Some(log) = &mut log {
        let state = trainer::observer_state(&contents).map_err(with_fallback_hint)?;
        log.restore(trainer.step(), state)?;
    }
    if let (Some(log), true) = (log, rank.is_first()) {
        log.cut(trainer.epoch() as usize, trainer.step())?;
        note(format_args!("going on after step {}, from {}", trainer.step(), contents.folder.display()));
    }
    Ok(())
}

/// Writes the trained model. Every rank must call it.
pub(super) fn save(job: &impl Job, model: &Parallel<CausalLm>, subject: &Subject) -> girandole::Result<()> {
    // All groups have the same model after the last step.
    if model.far().is_some_and(|far| far.number() > 0) {
        return Ok(());
    }
    let out = &job.options().out;
    let is_first = model.mesh().world().rank() == 0;
    let template = job.chat_template().map_err(wrap_error)?;
    let is_source = job.folder().is_some_and(|folder| folder.canonicalize().ok() == out.canonicalize().ok());
    // A folder that is trained in place keeps its own tokenizer.
    let replaces = !job.saves_adapters() && !is_source && models::weights_in(out).is_some();
    let written =
        is_first.then(|| WrittenFiles::begin(out, job.folder(), template.as_ref(), replaces)).transpose()?;
    // A newly made tokenizer is saved first, since the model's configuration must be the last file written.
    if let (Some(tokenizer), None, true) = (&subject.tokenizer, job.folder(), is_first) {
        tokenizer.save(out)?;
    }
    let how = FolderConfig {
        dtype: job.options().save_dtype.map(ParametersDtype::dtype),
        tokenizer_of: job.folder().map(Into::into),
        template: template.clone(),
        ..FolderConfig::default()
    };
    match &subject.lora {
        Some(lora) if !job.merges() => model.save_adapters(out, lora)?,
        lora => model.save_folder(out, &subject.weights, &how, lora.as_ref())?,
    }
    let Some(written) = written else { return Ok(()) };
    let format = subject.lora.as_ref().and_then(models::Lora::base_format);
    if let Some(format) = format.filter(|_| job.merges()) {
        let saved = job
            .options()
            .save_dtype
            .map_or_else(|| "their type in --model".into(), |dtype| value_name(&dtype));
        note(format_args!(
            "merged into the weights as their {} bits hold them; each sum is rounded once, to {saved}",
            format.bits()
        ));
    }
    // With a whole model it is written already.
    if let Some(template) = template.filter(|_| job.saves_adapters()) {
        template.save(out)?;
    }
    let stayed = written.finish()?;
    if !stayed.is_empty() && !is_source && !job.saves_adapters() {
        let (stayed, out) = (stayed.join(", "), out.display());
        note(format_args!("in {out}, {stayed} are not this run's: the model is used with them"));
    }
    begin_note::forget(out, begin_note::MODEL).map_err(wrap_error)
}

/// Returns the checkpoint to resume from, if that is requested and one exists.
pub(super) fn choose(options: &TrainOptions) -> Result<Option<Contents>> {
    let groups = options.mesh.map_or(1, |layout| layout.far);
    let one = |checkpoints: &Checkpoints, folder: &Path| checkpoints.contents(folder);
    match groups {
        1 => options.checkpoints.choose(Checkpoints::latest, one),
        _ => {
            // An outer error or `None` is that of the folder; an inner one is of its checkpoints, such as that no step has one of each
            // group.
            let latest = |checkpoints: &Checkpoints| Ok(Some(trainer::latest_of_groups(checkpoints, groups)));
            let one = |checkpoints: &Checkpoints, folder: &Path| Ok(Ok(Some(one(checkpoints, folder)?)));
            Ok(options.checkpoints.choose(latest, one)?.transpose()?.flatten())
        }
    }
}

/// Returns rank 0's choice of checkpoint, on every rank.
fn first_choice_of_checkpoint(options: &TrainOptions, rank: &Rank) -> Result<Option<Contents>> {
    let found = first_choice(&options.checkpoints, rank, || choose(options))?;
    if found.is_none() && options.checkpoints.resumes() && rank.is_first() {
        let dir = options.checkpoints.dir().display();
        note(format_args!("no checkpoint in {dir} yet: starting from the beginning"));
    }
    Ok(found)
}
