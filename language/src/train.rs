//! Training shared by `pretrain` and `finetune`: read data, build the model in its layout, train, save.

use std::cell::Cell;
use std::ffi::OsString;
use std::ops::Deref;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use experiment::console::{note, say};
use experiment::error::{Error, Result};
use experiment::options::{CheckpointOptions, CommonOptions, ElasticOptions, begin_note};
use experiment::outputs;
use experiment::rank::{Outcome, Rank, RankPhase};
use experiment::run_log::RunLog;
use experiment::trainer::agree_on_command;
use experiment::{self, Experiment};
use girandole::trainer::{self, TrainConfig, Trainer};
use girandole::{Layout, Parallel, ParallelConfig};
use models::tokens::{Data, DataConfig, DataFile, Rows};
use models::{CausalLm, Lora, ModelConfig};
use report::metrics::MetricsWriter;
use report::{Report, RunSeries, fact};

use super::job::{Job, Subject};
use super::lifecycle::choose;
use super::memory;
use super::options::TrainOptions;
use super::sample::Sample;
use super::settings::{note_changed_settings, train_config};
use super::shared;
use super::speed::Speed;
use super::trained::{self, Trained};
use super::watch::{TrainObserver, wrap_error};

/// What each process creates at the start.
pub(super) struct Setup {
    subject: Subject,
    rows: Rows,
    evaluation: Option<Rows>,
    sample: Option<Sample>,
}

/// What the launcher determines before the ranks start.
pub(super) struct LauncherState {
    facts: Vec<(String, String)>,
}

/// Runs `pretrain` or `finetune`.
///
/// # Errors
/// A wrong option, a file that cannot be used, a rank that failed.
pub fn run<J: Job>(job: &J) -> Result<()> {
    experiment::run(&Training(job.clone()))
}

/// A job as an experiment.
pub(super) struct Training<J>(J);

impl<J> Deref for Training<J> {
    type Target = J;

    fn deref(&self) -> &J {
        &self.0
    }
}

impl<J: Job> Experiment for Training<J> {
    const NAME: &'static str = J::NAME;
    const WORLD_SIZE: usize = 1;
    type Setup = Setup;
    type Alone = LauncherState;
    type Trained = Trained;

    fn common(&self) -> &CommonOptions {
        self.options().common()
    }

    fn with_common(&self, common: CommonOptions) -> Self {
        Self(self.0.with_options(self.options().with_common(common)))
    }

    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        Some(&self.options().checkpoints)
    }

    fn elastic_options(&self) -> Option<ElasticOptions> {
        self.options().elastic()
    }

    /// Only finds the checkpoint: data and steps are compared in `alone`, where the data are open.
    fn check_checkpoint(&self, _: usize) -> Result<()> {
        choose(&self.options().checkpoints).map(drop)
    }

    fn check(&self, world_size: usize) -> Result<()> {
        let options = self.options();
        let layout = options.layout(world_size)?;
        options.check_elastic(&layout)?;
        if options.sequence_parallel && layout.tp == 1 {
            let help = "rows are divided over the ranks of tp: give a --mesh with tp".into();
            return Err(Error::Option {
                option: "--sequence-parallel",
                got: format!("--mesh {layout}"),
                help,
            });
        }
        let (parts, micro_batches) = (layout.data_ranks(), options.micro_batches(&layout));
        if !options.batch_size.is_multiple_of(parts.saturating_mul(micro_batches)) {
            let cut = if micro_batches > 1 {
                format!(", each in {micro_batches} equal parts")
            } else {
                String::new()
            };
            let multiple = parts.saturating_mul(micro_batches);
            let help = format!("give a multiple of {multiple}: {parts} ranks have different rows{cut}");
            return Err(Error::Option { option: "--batch-size", got: options.batch_size.to_string(), help });
        }
        for (option, path) in options.text_files() {
            options.common().refuse_as_output(option, path)?;
            refuse_in_output(&options.out, option, path)?;
        }
        options.tensorboard.as_deref().map_or(Ok(()), outputs::make_folder)?;
        let out = &options.out;
        check_output_folder(options, self.saves_adapters())?;
        outputs::make_folder(out)?;
        begin_note::write(out, begin_note::MODEL)
    }

    fn setup(&self) -> Result<Setup> {
        let (options, subject) = (self.options(), self.subject()?);
        if let Some(layout) = &options.mesh {
            check_divisible(layout, subject.weights.config())?;
        }
        let longest = subject.weights.config().max_len;
        if let Some(length) = options.length.filter(|length| *length > longest) {
            let help = format!("the model has {longest} positions");
            return Err(Error::Option { option: "--length", got: length.to_string(), help });
        }
        let open = |files: &[DataFile], length| {
            let model = subject.weights.config();
            let config = DataConfig {
                tokenizer: subject.tokenizer.as_ref(),
                folder: self.folder(),
                field: options.field.as_deref(),
                length,
                vocab_size: model.vocab_size,
                max_len: model.max_len,
            };
            Data::open(files, &config)
        };
        let (data, evaluate) = shared::with_shared_tokens(&options.data, options.evaluate.as_ref());
        let rows = open(&data, options.length)?;
        let (tp, len) = (options.mesh.map_or(1, |layout| layout.tp), rows.row_len());
        if options.sequence_parallel && !len.is_multiple_of(tp) {
            let help =
                format!("the {tp} ranks of tp do not divide rows of {len} tokens: give another --length");
            return Err(Error::Option { option: "--sequence-parallel", got: "true".into(), help });
        }
        let evaluation = match &evaluate {
            Some(file) => Some(open(std::slice::from_ref(file), Some(rows.row_len()))?),
            None => None,
        };
        if let Some(evaluation) = evaluation.as_ref().filter(|rows| rows.len() < options.batch_size) {
            let got = format!("{} rows of {} tokens", evaluation.len(), evaluation.row_len());
            let help =
                format!("give a longer text: an evaluation needs {} rows, as a step", options.batch_size);
            return Err(Error::Option { option: "--evaluate", got, help });
        }
        let model = subject.weights.config();
        let sample = Sample::new(&options.sample, subject.tokenizer.as_ref(), &rows, model, options.seed)?;
        Ok(Setup { subject, rows, evaluation, sample })
    }

    fn alone(&self, setup: &Setup, world_size: usize, _: Option<&mut MetricsWriter>) -> Result<Self::Alone> {
        let (options, model) = (self.options(), setup.subject.weights.config());
        let shapes = setup.subject.weights.shapes().values();
        let parameters: usize = shapes.map(|dims| dims.iter().product::<usize>()).sum();
        let layout = options.layout(world_size)?;
        if let Some(contents) = choose(&options.checkpoints)? {
            agree_on_command(J::NAME, &contents.extra, &options.checkpoints)?;
            self.check_steps(contents.step as usize)?;
            let config = train_config(J::NAME, options, setup.subject.lora.as_ref());
            note_changed_settings(&trainer::check_resume(&contents, &setup.rows, &config)?);
        }
        let planned = plan::language::Subject::new(model.clone(), setup.subject.lora.clone());
        memory::check(options, &planned, &layout, setup.rows.row_len())?;
        model.notes().iter().for_each(|line| note(format_args!("{line}")));
        say(format_args!(
            "model: {}, {parameters} parameters; data: {} rows of {} tokens; layout: {layout}",
            model.family,
            setup.rows.len(),
            setup.rows.row_len()
        ))?;
        let mut facts = vec![
            fact("model", format!("{}, {parameters} parameters", model.family)),
            fact("data", format!("{} rows of {} tokens", setup.rows.len(), setup.rows.row_len())),
            fact("layout", layout),
            fact("rows of a step", options.batch_size),
        ];
        if let Some(lora) = &setup.subject.lora {
            let adapters: usize = lora.shapes().values().map(|dims| dims.iter().product::<usize>()).sum();
            say(format_args!("adapters: rank {}, {adapters} parameters are trained", lora.config().rank))?;
            facts.push(fact("adapters", format!("rank {}, {adapters} parameters", lora.config().rank)));
        }
        Ok(LauncherState { facts })
    }

    fn for_ranks(&self, setup: &Setup) -> Vec<(OsString, OsString)> {
        shared::variable(&setup.rows, setup.evaluation.as_ref()).into_iter().collect()
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let options = self.options();
        let Setup { subject, rows, evaluation, sample } = setup;
        let elastic = self.elastic();
        let layout = match elastic {
            // The current number of ranks: some may have been lost before the first step.
            Some(_) => Layout::copies(rank.comm.world_size()),
            None => options.layout(rank.comm.world_size())?,
        };
        let fewest_ranks = elastic.filter(|_| layout.ranks() > 1).map(|elastic| elastic.min);
        let device = self.common().device()?;
        let mut model = build_model(options, &subject, &layout, &rows, (rank, &device))?;
        let flops = self.step_flops(&subject, &rows)?;
        let speed = Speed::measured(rank, (options.dtype(), &device), flops)?;
        let config = TrainConfig { fewest_ranks, ..train_config(J::NAME, options, subject.lora.as_ref()) };
        let mut trainer = Trainer::new(&mut model, &rows, config)?;
        let mut metrics = rank.metrics.take();
        let mut log = self.log(rank.is_first(), fewest_ranks.is_some(), metrics.as_mut());
        self.resume(&mut trainer, log.as_mut(), rank)?;
        if let Some(evaluation) = &evaluation {
            trainer = trainer.evaluating(evaluation);
        }
        let (watch, begun, communication) = (rank.stopwatch(), trainer.step(), Cell::new(0.0));
        let samples = subject.tokenizer.as_ref().zip(sample.as_ref());
        let counters = (speed, begun, trainer.epoch() as usize, &communication);
        let mut observer = TrainObserver::new(options, log, samples, counters);
        rank.stage = RankPhase::AtWork;
        let steps = options.steps() - begun;
        let (mut seconds, mut measured) = (0.0, None);
        let mut measure = |model: &mut Parallel<CausalLm>| {
            rank.comm = model.mesh().world().clone();
            let busy_ns = (communication.get() * 1e9) as u64;
            let measured = *measured.get_or_insert_with(|| watch.measured().communicating(busy_ns));
            seconds = rank.gather_measured(measured, steps).map_err(wrap_error)?;
            Ok(())
        };
        let mut save = |model: &mut Parallel<CausalLm>| self.save(model, &subject);
        let summary = trainer.run_and(&mut observer, &mut [&mut measure, &mut save]);
        if let Some(left) = observer.group() {
            rank.comm = left.clone();
        }
        let summary = summary.map_err(|error| observer.cause(error))?;
        let (log, speed) = observer.finish();
        let series = log.map(RunLog::finish).unwrap_or_default();
        let seconds = seconds + series.seconds;
        rank.checkpoints = trained::checkpoint_times(&summary);
        let mut metrics = metrics.filter(|_| rank.is_first());
        rank.write_summary(None, metrics.as_mut(), seconds)?;
        rank.metrics = metrics;
        if rank.is_first() {
            self.print_summary(&summary, &speed)?;
        }
        let series = RunSeries {
            name: model.layout().to_string(),
            seconds,
            world_size: rank.comm.world_size(),
            ..series
        };
        Ok(Trained { series, facts: trained::facts(&summary, &speed) })
    }

    fn report(&self, mut begun: LauncherState, outcome: Outcome<Trained>) -> Report {
        begun.facts.extend(outcome.trained.facts);
        Report { facts: begun.facts, runs: vec![outcome.trained.series], ..Report::default() }
    }
}

/// Refuses a text that is among the files of a model in the output folder, which are replaced.
fn refuse_in_output(out: &Path, option: &'static str, path: &Path) -> Result<()> {
    let out = out.canonicalize().ok();
    let name = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let is_there = out.is_some() && folder.canonicalize().ok() == out;
        let name = path.file_name()?.to_str()?;
        (is_there && models::is_model_file(name)).then(|| name.to_string())
    };
    // By the name that is given, and by that of the file that it leads to.
    let Some(name) = name(path).or_else(|| name(&path.canonicalize().ok()?)) else { return Ok(()) };
    let help =
        format!("in --out, {name} is a file of the model that is written: give another name or folder");
    Err(Error::Option { option, got: path.display().to_string(), help })
}

/// Checks that the output folder holds no model, unless `--overwrite` is given or the run is resumed. Adapters never go
/// beside a whole model: who loads the folder would find two models in it.
fn check_output_folder(options: &TrainOptions, saves_adapters: bool) -> Result<()> {
    let out = &options.out;
    let Some(file) = models::weights_in(out) else { return Ok(()) };
    let help = if saves_adapters && !file.starts_with("adapter") {
        format!("it holds a whole model ({file}), and adapters alone are saved: give another folder")
    } else if options.overwrite
        || options.checkpoints.has_checkpoint_to_resume()?
        || begin_note::is_of_a_restarted_job(out, begin_note::MODEL)?
    {
        return Ok(());
    } else {
        begin_note::refuse(out, begin_note::MODEL)?;
        if options.checkpoints.keeps() {
            begin_note::refuse(options.checkpoints.dir(), begin_note::CHECKPOINTS)?;
        }
        format!("it holds a model already ({file}): give another folder, or --overwrite to replace the model")
    };
    Err(Error::Option { option: "--out", got: out.display().to_string(), help })
}

/// Checks that the model's sizes can be divided by the layout.
pub(crate) fn check_divisible(layout: &Layout, model: &ModelConfig) -> Result<()> {
    let refuse = |help: String| Err(Error::Option { option: "--mesh", got: layout.to_string(), help });
    let sizes = [
        ("heads", model.num_heads),
        ("heads of keys and values", model.num_kv_heads),
        ("features of feed-forward layers", model.intermediate_size),
    ];
    if let Some((what, size)) = sizes.into_iter().find(|(_, size)| !size.is_multiple_of(layout.tp)) {
        return refuse(format!("the model's {size} {what} cannot be divided over tp={} ranks", layout.tp));
    }
    let units = model.num_layers + 2;
    if layout.pp > units {
        return refuse(format!(
            "the model has {units} parts to cut between, {} blocks among them",
            model.num_layers
        ));
    }
    Ok(())
}

/// Builds the model in its layout.
fn build_model(
    options: &TrainOptions,
    subject: &Subject,
    layout: &Layout,
    rows: &Rows,
    (rank, device): (&Rank, &Device),
) -> Result<Parallel<CausalLm>> {
    let micro_batches = options.micro_batches(layout);
    let rows_each = options.batch_size / layout.data_ranks() / micro_batches;
    let is_adapter = |name: &str| Lora::is_adapter(name);
    let config = ParallelConfig {
        dtype: options.dtype(),
        device: device.clone(),
        micro_batches,
        example: Some(Tensor::zeros((rows_each, rows.row_len()), DType::U32, device)?),
        schedule: options.pipeline_schedule,
        recompute: options.recompute(),
        sequence_parallel: options.sequence_parallel,
        loss_scale: options.loss_scale(),
        seed: options.seed,
        is_trained: subject.lora.as_ref().map(|_| std::sync::Arc::new(is_adapter) as _),
        ..ParallelConfig::default()
    };
    let (model, lora) = (subject.weights.config().clone(), subject.lora.clone());
    let model = match options.dropout {
        Some(p) => model.with_dropout(p)?,
        None => model,
    };
    let build = move |builder: &training::build::Builder| match &lora {
        Some(lora) => CausalLm::new(&model, &lora.adapt(builder.clone())),
        None => CausalLm::new(&model, builder),
    };
    Ok(Parallel::new(rank.comm.clone(), layout, subject.weights.parts(), &config, build)?)
}
