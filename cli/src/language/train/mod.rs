//! Training shared by `pretrain`, `finetune` and `prefer`: read data, build the model in its layout, train, save.

mod checks;
mod lifecycle;
mod start;

use std::cell::Cell;
use std::ffi::OsString;
use std::path::Path;

use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::interrupt::StopOnSignal;
use crate::options::{
    CheckpointOptions, CommonOptions, ElasticOptions, begin_note, check_input, value_name, with_fallback_hint,
};
use crate::plan::recompute_fits;
use crate::rank::{Outcome, Rank, RankPhase};
use crate::resume::agree_on_command;
use crate::run_log::RunLog;
use crate::{Command, outputs};
use girandole::settings::Setting;
use girandole::trainer::{self, TrainConfig};
use girandole::{Layout, Parallel};
use models::CausalLm;
use models::tokens::{Data, DataConfig, DataFile, PackingReport, Rows, TooLong};
use report::metrics::MetricsWriter;
use report::{Report, RunSeries, fact};

use super::field::check_field;
use super::job::{Job, Subject};
use super::pairs::RunData;
use super::sample::Sample;
use super::settings::{self, note_changed_settings, refuse_another_model, train_config};
use super::trained::{self, Trained};
use super::watch::{Times, TrainObserver, wrap_error};
use super::{memory, shared};
use checks::{
    check_batch_size, check_division, check_evaluation, check_output_folder, check_reference_layout,
    check_reference_len, check_stages, refuse_in_folder,
};
use lifecycle::{check_steps, choose, last_lines, log, save};
use start::{config_of_rank, model_in_layout, new_trainer};

pub(crate) use checks::check_divisible;

/// What each process creates at the start.
pub struct Setup {
    subject: Subject,
    rows: Rows,
    evaluation: Option<Rows>,
    sample: Option<Sample>,
}

/// Runs `pretrain`, `finetune` or `prefer`.
///
/// # Errors
/// A wrong option, a file that cannot be used, a rank that failed.
pub fn run<J: Job>(job: &J) -> Result<()> {
    crate::run(job).map_err(|error| job.options().in_terms_of_mesh(error))
}

impl<J: Job> Command for J {
    const NAME: &'static str = J::NAME;
    const WORLD_SIZE: usize = 1;
    type Setup = Setup;
    type Trained = Trained;

    fn common(&self) -> &CommonOptions {
        self.options().common()
    }

    fn with_common(&self, common: CommonOptions) -> Self {
        self.with_options(self.options().with_common(common))
    }

    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        Some(&self.options().checkpoints)
    }

    fn elastic_options(&self) -> Option<ElasticOptions> {
        self.options().elastic()
    }

    /// Only finds the checkpoint: data and steps are compared in `prepare`, where the data are open.
    fn check_checkpoint(&self, _: usize) -> Result<()> {
        choose(self.options()).map(drop)
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let options = self.options();
        let layout = options.layout(world_size)?;
        options.check_elastic(&layout)?;
        options.check_optimizer()?;
        options.check_far(&layout)?;
        if options.sequence_parallel && layout.tp == 1 {
            let help = "rows are divided over the ranks of tp: give a --mesh with tp".into();
            return Err(Error::Option {
                option: "--sequence-parallel",
                got: format!("--mesh {layout}"),
                help,
            });
        }
        if let (Some(schedule), 1) = (options.pipeline_schedule, layout.pp) {
            let help =
                "there are no stages to schedule: give a --mesh with pp, or leave the option out".into();
            return Err(Error::Option { option: "--pipeline-schedule", got: schedule.to_string(), help });
        }
        if let (Some(dtype), true) = (&options.save_dtype, self.saves_adapters()) {
            let help = "adapters alone are saved, in the type of --parameters: give --merge, or leave the option out".into();
            return Err(Error::Option { option: "--save-dtype", got: value_name(dtype), help });
        }
        let (parts, micro_batches) = (layout.data_ranks(), options.micro_batches(&layout));
        if !options.batch_size.is_multiple_of(parts.saturating_mul(micro_batches)) {
            let multiple = parts.saturating_mul(micro_batches);
            let cut = match (parts, micro_batches) {
                (1, equal) => format!("rows are computed in {equal} equal parts"),
                (ranks, 1) => format!("{ranks} ranks have different rows"),
                (ranks, equal) => format!("{ranks} ranks have different rows, each in {equal} equal parts"),
            };
            let help = format!("give a multiple of {multiple}: {cut}");
            return Err(Error::Option { option: "--batch-size", got: options.batch_size.to_string(), help });
        }
        for (option, path) in options.text_files() {
            if path == Path::new("-") {
                continue;
            }
            check_input(path)?;
            options.common().refuse_as_output(option, path)?;
            refuse_in_folder("--out", &options.out, option, path)?;
        }
        for (option, path) in options.common().outputs() {
            let Some(path) = path else { continue };
            refuse_in_folder("--out", &options.out, option, path)?;
            self.model().map_or(Ok(()), |model| refuse_in_folder("--model", model, option, path))?;
        }
        options.tensorboard.as_deref().map_or(Ok(()), outputs::make_folder)?;
        let out = &options.out;
        check_output_folder(options, self.saves_adapters())?;
        outputs::make_folder(out)?;
        begin_note::write(out, begin_note::MODEL)
    }

    fn setup(&self) -> Result<Setup> {
        let (options, subject) = (self.options(), self.subject()?);
        // Refuses one that does not fit before ranks start.
        let reference = self.reference()?;
        if let Some(layout) = &options.mesh {
            check_divisible(layout, subject.weights.config())?;
            check_stages(layout, options.pipeline_schedule(), subject.weights.config())?;
            if let Some(other) = self.other_reference()? {
                check_reference_layout(other.config(), layout, options.pipeline_schedule())?;
            }
        }
        recompute_fits(options.recompute(), subject.weights.config().num_layers)?;
        options.balance(subject.weights.config(), subject.lora.is_some())?;
        let longest = subject.weights.config().max_len;
        if let Some(length) = options.length.filter(|length| *length > longest) {
            let help = format!("the model has {longest} positions");
            return Err(Error::Option { option: "--length", got: length.to_string(), help });
        }
        let (model, template) = (subject.weights.config(), self.chat_template()?);
        let default = if model.labels.is_some() { TooLong::Truncate } else { TooLong::default() };
        let open = |files: &[DataFile], length, is_padded| {
            let config = DataConfig {
                tokenizer: subject.tokenizer.as_ref(),
                folder: self.folder(),
                template: template.as_ref(),
                field: options.field.as_deref(),
                length,
                packing: options.packing,
                pairs: self.preferences().is_some(),
                too_long: options.too_long.unwrap_or(default),
                is_padded,
                labels: model.labels.as_ref(),
                vocab_size: model.vocab_size,
                max_len: model.max_len,
            };
            Data::open(files, &config)
        };
        let files = options.data.iter().chain(&options.evaluate);
        check_field(options.field.as_deref(), files.map(|file| &*file.path))?;
        let (data, evaluate) = shared::with_shared_tokens(&options.data, options.evaluate.as_ref())?;
        let rows = open(&data, options.length, false)?;
        if let Some(too_long) = options.too_long.filter(|_| rows.packing().is_none()) {
            let help = "no file's documents are packed whole: give --packing whole, or leave it out";
            return Err(Error::Option { option: "--too-long", got: too_long.to_string(), help: help.into() });
        }
        reference.map_or(Ok(()), |reference| check_reference_len(&reference, rows.row_len()))?;
        options.set_rows(rows.len());
        check_batch_size(options.batch_size, rows.row_len())?;
        check_division(options.mesh, options.sequence_parallel, rows.row_len())?;
        let evaluation = match &evaluate {
            Some(file) => Some(open(std::slice::from_ref(file), Some(rows.row_len()), true)?),
            None => None,
        };
        evaluation.as_ref().map_or(Ok(()), |rows| check_evaluation(rows, options.evaluate_rows))?;
        let sample = Sample::new(&options.sample, subject.tokenizer.as_ref(), &rows, model, options.seed)?;
        Ok(Setup { subject, rows, evaluation, sample })
    }

    fn contents(&self, setup: &Setup) -> Result<Vec<Setting>> {
        Ok(settings::contents(&setup.subject, &setup.rows, setup.evaluation.as_ref()))
    }

    fn prepare(&self, setup: &Setup, world_size: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        let (options, model) = (self.options(), setup.subject.weights.config());
        let layout = options.layout(world_size)?;
        if let Some(contents) = choose(options)? {
            agree_on_command(<J as Job>::NAME, &contents, &options.checkpoints)?;
            check_steps(options, contents.step as usize)?;
            let frozen = match &setup.subject.lora {
                Some(_) => setup.subject.weights.fingerprint()?,
                None => None,
            };
            let reference = self.other_reference()?.map(|reference| reference.fingerprint()).transpose()?;
            let config = train_config(self, &setup.subject, frozen, reference.flatten());
            let changed = trainer::check_resume(&contents, &setup.rows, &config)?;
            let (option, source) = options.checkpoints.source();
            refuse_another_model(&changed, option, source)?;
            contents.check_all().map_err(with_fallback_hint)?;
            note_changed_settings(&changed);
        }
        let mut planned = plan::language::Subject::new(model.clone(), setup.subject.lora.clone());
        if let Some(Subject { weights, lora, .. }) = self.reference()? {
            planned = planned.with_reference(plan::language::Subject::new(weights.config().clone(), lora));
        }
        memory::check(options, &planned, &layout, setup.rows.row_len())?;
        let notes = model.notes().iter().cloned().chain(options.notes());
        notes.for_each(|line| note(format_args!("{line}")));
        say(format_args!(
            "model: {}; data: {}; layout: {layout}",
            describe_model(&setup.subject),
            describe_data(&setup.rows)
        ))?;
        if let Some(epochs) = options.epochs {
            say(format_args!(
                "steps: {} of {} rows, for {epochs} epochs",
                options.steps(),
                options.batch_size
            ))?;
        }
        if let Some(rows) = &setup.evaluation {
            say(format_args!("evaluation: {}", describe_evaluation(rows, options.evaluate_rows)))?;
        }
        match describe_adapters(&setup.subject) {
            Some(adapters) => say(format_args!("adapters: {adapters} are trained")),
            None => Ok(()),
        }
    }

    fn for_ranks(&self, setup: &Setup) -> Vec<(OsString, OsString)> {
        shared::variable(&setup.rows, setup.evaluation.as_ref()).into_iter().collect()
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let options = self.options();
        let Setup { subject, rows, evaluation, sample } = setup;
        let data = RunData::new(self, rows, evaluation)?;
        let rows = data.rows.clone();
        let device = self.common().device()?;
        let (mut model, joining) = model_in_layout(self, rank, &subject, &data, &device)?;
        let (layout, is_new) = (*model.layout(), joining.is_some());
        // Until training is over; then a signal ends the rank at once.
        let signals = options.checkpoints.stop_on_signal();
        let stop = signals.as_ref().map(StopOnSignal::flag);
        let config = TrainConfig { stop, ..config_of_rank(self, rank, &subject, &layout, is_new)? };
        let mut metrics = rank.metrics.take();
        let is_elastic = config.fewest_ranks.is_some();
        let mut log = log(self, rank.is_first(), is_elastic, metrics.as_mut(), &layout);
        let (mut trainer, speed) =
            new_trainer(options, &mut model, joining, &subject, &data, config, rank, log.as_mut())?;
        if let Some(evaluation) = data.evaluation() {
            trainer = trainer.evaluating(evaluation);
        }
        let (watch, times) = (rank.stopwatch(), Cell::new(Times::default()));
        let samples = subject.tokenizer.as_ref().zip(sample.as_ref());
        let phase = if is_new { RankPhase::New } else { RankPhase::AtWork };
        let begun = trainer.step();
        let mut observer = TrainObserver::new(options, &data, log, samples, speed, begun, &times, phase);
        rank.phase = RankPhase::AtWork;
        let mut seconds = None;
        let mut measure = |model: &mut Parallel<CausalLm>| {
            rank.comm = model.world().clone();
            let Times { steps, seconds: of_steps, communication_seconds } = times.get();
            let mut measured = watch.measured().communicating((communication_seconds * 1e9) as u64);
            seconds.get_or_insert(measured.seconds);
            // Evaluations and checkpoints are no computation of steps.
            measured.seconds = of_steps;
            rank.gather_measured(measured, steps).map_err(wrap_error)?;
            Ok(())
        };
        let mut save = |model: &mut Parallel<CausalLm>| save(self, model, &subject);
        let summary = trainer.run_and(&mut observer, &mut [&mut measure, &mut save]);
        if let Some(group) = observer.group() {
            rank.comm = group.clone();
        }
        drop(signals);
        let summary = summary.map_err(|error| observer.cause(error))?;
        let (log, speed) = observer.finish();
        let series = log.map(RunLog::finish).unwrap_or_default();
        let seconds = seconds.unwrap_or_default() + series.seconds;
        rank.checkpoints = trained::checkpoint_times(&summary);
        rank.packing = trained::packed_documents(&rows);
        rank.phase = RankPhase::Trained;
        let is_first = rank.is_first();
        rank.write_summary(None, metrics.as_mut().filter(|_| is_first), seconds)?;
        rank.metrics = metrics;
        let series = RunSeries {
            name: model.layout().to_string(),
            seconds,
            world_size: rank.comm.world_size(),
            ..series
        };
        let mut facts = facts_of_run(&subject, &rows, layout, options.batch_size);
        facts.extend(trained::facts(&summary, &speed));
        Ok(Trained { series, facts, lines: last_lines(options, &summary, &speed) })
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        outcome.trained.lines.iter().try_for_each(|line| say(format_args!("{line}")))
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let Trained { series, facts, .. } = outcome.trained;
        Report { facts, runs: vec![series], ..Report::default() }
    }
}

fn facts_of_run(subject: &Subject, rows: &Rows, layout: Layout, batch_size: usize) -> Vec<(String, String)> {
    let mut facts = vec![
        fact("model", describe_model(subject)),
        fact("data", describe_data(rows)),
        fact("layout", layout),
        fact("rows of a step", batch_size),
    ];
    facts.extend(describe_adapters(subject).map(|adapters| fact("adapters", adapters)));
    facts
}

fn describe_model(subject: &Subject) -> String {
    let shapes = subject.weights.shapes().values();
    let parameters: usize = shapes.map(|dims| dims.iter().product::<usize>()).sum();
    let model = subject.weights.config();
    let labels = model.labels.as_ref().map(|labels| match labels.names.len() {
        1 => ", 1 label".to_string(),
        count => format!(", {count} labels"),
    });
    format!("{}{}, {parameters} parameters", model.family, labels.unwrap_or_default())
}

fn describe_data(rows: &Rows) -> String {
    let of_rows = format!("{} rows of {} tokens", rows.len(), rows.row_len());
    let Some(PackingReport { documents, cut, dropped, padding }) = rows.packing() else { return of_rows };
    let padding = 100.0 * padding;
    if rows.has_pairs() {
        return format!("{of_rows} ({documents} pairs, {dropped} left out; {padding:.1} % padding)");
    }
    let cut_off = if rows.labels().is_some() { "truncated" } else { "cut" };
    format!(
        "{of_rows} ({documents} whole documents, {cut} {cut_off}, {dropped} left out; {padding:.1} % padding)"
    )
}

fn describe_evaluation(rows: &Rows, most: usize) -> String {
    match rows.len() {
        all if all > most => format!("the first {most} of {}", describe_data(rows)),
        _ => describe_data(rows),
    }
}

fn describe_adapters(subject: &Subject) -> Option<String> {
    let lora = subject.lora.as_ref()?;
    let parameters: usize = lora.shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
    let base = lora
        .base_format()
        .map(|format| format!(", on a base in {} bits,", format.bits()))
        .unwrap_or_default();
    Some(format!("rank {}, {parameters} parameters{base}", lora.config().rank))
}
