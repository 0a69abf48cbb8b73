//! Options shared by `pretrain` and `finetune`.

mod balance;
mod far;
mod mesh;
mod optimizer;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::error::{Error, Result};
use crate::options::{
    CheckpointOptions, CommonOptions, DeviceKind, ElasticOptions, PrecisionOption, RankOptions, count,
    learning_rate, seed,
};
use candle_core::DType;
use clap::{Args, ValueEnum};
use girandole::Layout;
use girandole::trainer::{CheckpointPlan, Decay, LearningRate, TrainConfig};
use models::tokens::{DataFile, NamedTemplate, Packing, TooLong};
use pipeline::ScheduleKind;
use plan::command::{ParametersDtype, recompute, schedule};
use plan::language::Training;
use training::build::Recompute;
use training::{LossScalerConfig, OnMissingGradient};

use super::sample::SampleOptions;

use balance::BalanceOption;
pub(super) use balance::balance_name;
use far::FarOptions;
pub(crate) use mesh::{in_terms_of_mesh, layout_of, ranks_of};
use optimizer::OptimizerOptions;
pub(super) use optimizer::adjust_name;

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ScheduleOption {
    /// Constant.
    Constant,
    /// Half a period of a cosine.
    Cosine,
    /// Linear.
    Linear,
    /// Constant, then linear over the last fifth of all steps.
    Wsd,
}

/// When gradients are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CheckGradientOption {
    /// If it costs little.
    Auto,
    /// Always.
    Always,
    /// Always, with a warning in place of an error.
    Warn,
    /// Never.
    Off,
}

/// Options of both commands.
#[derive(Debug, Clone, Args)]
pub struct TrainOptions {
    /// Text, JSON lines or tokens; FILE=2.0 counts twice
    ///
    /// Files to train on: text (one document per file), JSON lines, files that `tokenize` wrote, or safetensors with a tensor tokens (rows, length); - is
    /// standard input. Text may be compressed with zstd or gzip.
    /// FILE=2.0 takes the rows of that file twice per epoch.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub(super) data: Vec<DataFile>,
    /// Folder to write the trained model to
    #[arg(long, value_name = "DIR")]
    pub(super) out: PathBuf,
    /// Replace the model that --out holds already
    #[arg(long)]
    pub(super) overwrite: bool,
    /// Layout, such as dp=2,tp=2 [default: copies]
    ///
    /// Sizes of the axes far (groups that train on their own and average rarely), pp (pipeline stages), dp (copies),
    /// shard (FSDP), cp (rows divided by position), ep (divided experts) and tp (divided layers); an axis left out has size 1.
    #[arg(long, value_name = "AXES", help_heading = "Ranks")]
    pub(super) mesh: Option<Layout>,
    /// How its ranks come together.
    #[command(flatten)]
    ranks: RankOptions,
    /// Whether copies go on without ranks that are lost.
    #[command(flatten)]
    pub(super) elastic: ElasticOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "auto", help_heading = "Ranks")]
    device: DeviceKind,
    /// Schedule of pipeline stages [default: 1f1b]
    #[arg(long, value_name = "NAME", value_parser = schedule, help_heading = "Ranks")]
    pub(super) pipeline_schedule: Option<ScheduleKind>,

    /// Steps in all
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, help_heading = "Training")]
    steps: usize,
    /// Epochs, in place of --steps
    #[arg(long, value_name = "N", value_parser = count, conflicts_with = "steps", help_heading = "Training")]
    pub(super) epochs: Option<usize>,
    /// Rows per step, over all ranks
    #[arg(long, value_name = "N", default_value = "8", value_parser = count, help_heading = "Training")]
    pub(super) batch_size: usize,
    /// Parts of a rank's rows [default: 1, or pp]
    ///
    /// They are computed in turn: more parts need less memory. With a pipeline they are its micro-batches.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Training")]
    accumulate: Option<usize>,
    /// Recompute every N-th block: less memory
    ///
    /// Only the input of such a block is kept, and backward computes it again, which takes time; 1 recomputes all blocks. `selective` recomputes in all blocks only what is cheap,
    /// and keeps matrix products.
    #[arg(long, value_name = "N|selective", value_parser = recompute, help_heading = "Training", allow_negative_numbers = true)]
    recompute: Option<Recompute>,
    /// Also divide rows between layers over the ranks of tp: less memory
    #[arg(long, help_heading = "Training")]
    pub(super) sequence_parallel: bool,
    /// What balances experts [default: folder's]
    ///
    /// `row`: of each row by itself, as in DeepSeek-V3; it is the same in every layout and with every --accumulate. `batch`: of all rows of a step, on all
    /// ranks, as in transformers; with --accumulate or a pipeline the mean over those of the parts, which is another loss. `bias`: no loss; after each step the correction of each expert, which
    /// counts where experts are chosen and not in weights, moves by --balance-coefficient, up if it had fewer tokens than the mean of all, as in DeepSeek-V3: for models that have corrections. `none`: nothing. By default `batch`
    /// if the folder's config.json has output_router_logits and the model labels no documents, else `none`. It is told apart from the loss; transformers tells the sum.
    #[arg(long, value_name = "HOW", value_enum, help_heading = "Training")]
    pub(super) balance: Option<BalanceOption>,
    /// Factor of that loss, or how far corrections move [default: folder's]
    ///
    /// By default router_aux_loss_coef of config.json, or 0.001.
    #[arg(long, value_name = "F", value_parser = learning_rate, help_heading = "Training", allow_negative_numbers = true)]
    pub(super) balance_coefficient: Option<f64>,
    /// Tokens per row [default: at most 1024]
    ///
    /// By default 1024, or as many as the model has positions, if those are fewer.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Training")]
    pub(super) length: Option<usize>,
    /// How documents become rows [default: stream, or whole]
    ///
    /// `stream`: documents follow each other and are cut at the row's length, and each token sees all before it in the row. `documents`: the same rows, but each
    /// token sees its own document alone. `whole`: no document that fits a row is cut; rows are filled by best fit, and each token sees its own document
    /// alone. By default conversations, and prompts with completions, are whole, and text is a stream.
    #[arg(long, value_name = "HOW", help_heading = "Training")]
    pub(super) packing: Option<Packing>,
    /// Whole documents longer than a row [default: cut]
    ///
    /// `cut`: into pieces of a row's length, which do not see each other. `truncate`: their first tokens fill a row; it is the default for documents
    /// with labels, which are not cut. `drop`: they are left out. `error`: they are refused.
    #[arg(long, value_name = "WHAT", help_heading = "Training")]
    pub(super) too_long: Option<TooLong>,
    /// Field of JSON lines with the text [default: text, or messages]
    #[arg(long, value_name = "NAME", help_heading = "Training")]
    pub(super) field: Option<String>,
    /// Template: chatml, or FILE [default: folder's]
    ///
    /// A file in Jinja, for conversations with a model whose folder has no template, or another one. It is saved with the model. Without it, that of
    /// the folder of --adapters is taken before the model's.
    #[arg(long, value_name = "FILE", help_heading = "Training")]
    pub(super) chat_template: Option<NamedTemplate>,
    /// Highest learning rate
    #[arg(long, default_value = "0.0003", value_parser = learning_rate, help_heading = "Training")]
    lr: f64,
    /// How the learning rate falls
    #[arg(long, value_enum, default_value = "cosine", help_heading = "Optimizer")]
    pub(super) schedule: ScheduleOption,
    /// Steps in which the learning rate grows to its highest
    #[arg(long, value_name = "STEPS", default_value = "0", value_parser = whole, help_heading = "Optimizer")]
    warmup: usize,
    /// Learning rate at the end, as a fraction of the highest
    #[arg(long, value_name = "PART", default_value = "0.1", value_parser = crate::options::probability, help_heading = "Optimizer")]
    lowest_lr: f64,
    /// How parameters are stepped.
    #[command(flatten)]
    optimizer: OptimizerOptions,
    /// How groups of far average.
    #[command(flatten)]
    far: FarOptions,
    /// Largest norm of all gradients together; 0 turns clipping off
    #[arg(long, value_name = "NORM", default_value = "1", value_parser = learning_rate, help_heading = "Optimizer")]
    clip: f64,
    /// Take rows in the files' order; several files alternate
    #[arg(long, help_heading = "Training")]
    no_shuffle: bool,
    /// Probability of dropout [default: config.json's]
    ///
    /// In place of the probabilities in config.json, wherever such a model has dropout: in attention, and in a GPT-2 also after the embedding
    /// and after each layer. The same numbers are dropped in every layout.
    #[arg(long, value_name = "P", value_parser = dropout, help_heading = "Training")]
    pub(super) dropout: Option<f64>,
    /// Type of parameters
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32", help_heading = "Training")]
    pub(super) parameters: ParametersDtype,
    /// Matrix products of f32
    #[arg(long, value_enum, default_value = "f32", help_heading = "Training")]
    pub(super) precision: PrecisionOption,
    /// Check of gradients at step 1
    ///
    /// By forward passes with changed parameters, in a new run: it finds operations whose backward is missing or wrong, and fails with the names of the
    /// parameters. `auto` does so where it takes no more than a few seconds; `warn` only warns.
    #[arg(long, value_name = "WHEN", value_enum, default_value = "auto", help_heading = "Training")]
    check_gradient: CheckGradientOption,
    /// Start even if the plan says that this machine has too little memory
    #[arg(long, help_heading = "Training")]
    pub(super) no_memory_check: bool,
    /// Seed of weights and order of rows
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed, help_heading = "Training")]
    pub(super) seed: u64,

    /// File with text to evaluate on
    #[arg(long, value_name = "FILE", help_heading = "Evaluation and logging")]
    pub(super) evaluate: Option<DataFile>,
    /// Steps between evaluations [default: 1/10 of all]
    #[arg(long, value_name = "STEPS", value_parser = count, requires = "evaluate", help_heading = "Evaluation and logging")]
    evaluate_every: Option<usize>,
    /// Rows of an evaluation
    ///
    /// The first of the file: exactly that many, or all if there are fewer, whatever the layout and --batch-size.
    #[arg(long, value_name = "N", default_value = "64", value_parser = count, requires = "evaluate", help_heading = "Evaluation and logging")]
    pub(super) evaluate_rows: usize,
    /// The sample of text at each evaluation.
    #[command(flatten)]
    pub(super) sample: SampleOptions,
    /// Steps between printed lines
    #[arg(long, value_name = "STEPS", default_value = "10", value_parser = count, help_heading = "Evaluation and logging")]
    pub(super) log_every: usize,
    /// File for each step's loss, learning rate, gradient norm and speed, one JSON object per line
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Files")]
    metrics: Option<PathBuf>,
    /// Folder for TensorBoard event files: losses, learning rate, gradient norm, speed, memory
    #[arg(long, value_name = "DIR", help_heading = "Files")]
    pub(super) tensorboard: Option<PathBuf>,
    /// File for a timeline of all ranks: a Chrome trace, which Perfetto opens
    #[arg(long, value_name = "FILE.json", help_heading = "Files")]
    trace: Option<PathBuf>,
    /// File for plots of the run, one self-contained HTML page
    #[arg(long, value_name = "FILE.html", help_heading = "Files")]
    report: Option<PathBuf>,
    /// Type of the saved weights [default: the folder's, or --parameters]
    ///
    /// A model that was read from a folder keeps the type of each of its tensors. Checkpoints have all that the run needs to
    /// go on exactly, whatever this is.
    #[arg(long, value_name = "TYPE", value_enum, help_heading = "Files")]
    pub(super) save_dtype: Option<ParametersDtype>,
    /// Where checkpoints are.
    #[command(flatten)]
    pub(super) checkpoints: CheckpointOptions,

    /// Some of these as every experiment has them.
    #[arg(skip)]
    common: OnceLock<CommonOptions>,
    /// Steps of --epochs, once the number of rows is known.
    #[arg(skip)]
    steps_of_epochs: OnceLock<usize>,
}

fn whole(text: &str) -> std::result::Result<usize, &'static str> {
    text.parse().map_err(|_| "give a whole number, 0 or more")
}

fn dropout(text: &str) -> std::result::Result<f64, &'static str> {
    let p = text.parse().ok().filter(|p: &f64| (0.0..1.0).contains(p));
    p.ok_or("give a number from 0 to below 1: with 1, nothing would be left")
}

impl TrainOptions {
    /// Returns the precision of products: that of the parameters, where they have 16 bits.
    fn products(&self) -> PrecisionOption {
        match self.parameters {
            ParametersDtype::F32 => self.precision,
            ParametersDtype::Bf16 => PrecisionOption::Bf16,
            ParametersDtype::F16 => PrecisionOption::F32High,
        }
    }

    /// Returns the options common to all experiments.
    pub(super) fn common(&self) -> &CommonOptions {
        self.common.get_or_init(|| CommonOptions {
            ranks: ranks_of(&self.ranks, self.mesh.as_ref()),
            device: self.device,
            seed: self.seed,
            precision: self.products(),
            init: None,
            data: None,
            save: None,
            metrics: self.metrics.clone(),
            trace: self.trace.clone(),
            report: self.report.clone(),
        })
    }

    /// Returns an error as one about these options.
    pub(super) fn in_terms_of_mesh(&self, error: Error) -> Error {
        in_terms_of_mesh(error, &self.ranks, self.mesh.as_ref())
    }

    /// Returns the files of text that are read, each with its option.
    pub(super) fn text_files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let data = self.data.iter().map(|file| ("--data", &*file.path));
        data.chain(self.evaluate.iter().map(|file| ("--evaluate", &*file.path)))
    }

    pub(super) fn with_common(&self, common: CommonOptions) -> Self {
        Self { common: OnceLock::from(common), ..self.clone() }
    }

    pub(super) fn layout(&self, world_size: usize) -> Result<Layout> {
        layout_of(self.mesh, world_size)
    }

    /// Returns the elastic options if the run can go on when a rank is lost.
    pub(super) fn elastic(&self) -> Option<ElasticOptions> {
        let can_go_on = self.mesh.is_none_or(|layout| layout.ranks() == 1 || self.survives_loss(&layout));
        (can_go_on || self.elastic.elastic.is_some()).then_some(self.elastic)
    }

    /// Whether another rank or a checkpoint has what a lost rank held.
    pub(super) fn survives_loss(&self, layout: &Layout) -> bool {
        layout.survives_loss(self.checkpoints.checkpoint_dir.is_some())
    }

    /// Checks that `--elastic` is used only if the run can continue without a rank.
    ///
    /// # Errors
    /// A layout that cannot continue; fewer ranks than its stages and divided layers need; replacement of lost ranks in such
    /// a layout.
    pub(super) fn check_elastic(&self, layout: &Layout) -> Result<()> {
        let Some(elastic) = self.elastic.elastic else { return Ok(()) };
        let refuse = |option, got: String, help: String| Err(Error::Option { option, got, help });
        if layout.ranks() > 1 && !self.survives_loss(layout) {
            let help = match layout.shard {
                1 => {
                    "pp, cp, ep and tp keep their sizes: give a --mesh with dp or shard, or --checkpoint-dir and start again"
                }
                _ => {
                    "a lost rank's part of the model is lost with it: give copies (dp), or --checkpoint-dir to go on from"
                }
            };
            return refuse("--elastic", format!("{elastic} with --mesh {layout}"), help.into());
        }
        if self.mesh.is_some() && elastic.max != layout.ranks() {
            let (min, ranks) = (elastic.min, layout.ranks());
            let help = format!("the mesh is that of all ranks, so give {min}:{ranks}, or another --mesh");
            return refuse("--elastic", format!("{elastic} with --mesh {layout}"), help);
        }
        let (fewest, keeps) = match layout.far {
            1 => (Layout { dp: 1, shard: 1, ..*layout }.ranks(), "pp, cp, ep and tp keep their sizes"),
            _ => (layout.of_group().ranks(), "a group of far is lost with any of its ranks"),
        };
        if elastic.min < fewest {
            let help = format!("{keeps}, so give at least {fewest}:{}", elastic.max);
            return refuse("--elastic", format!("{elastic} with --mesh {layout}"), help);
        }
        if self.elastic.replace > 0 && fewest > 1 {
            let of = if layout.far > 1 { "groups of several ranks" } else { "pp, cp, ep or tp" };
            let help = format!(
                "with {of}, {fewest} ranks at once would have to be replaced, which is not possible: leave the option out"
            );
            return refuse("--replace", self.elastic.replace.to_string(), help);
        }
        Ok(())
    }

    pub(super) fn micro_batches(&self, layout: &Layout) -> usize {
        self.accumulate.unwrap_or(layout.pp)
    }

    pub(super) fn dtype(&self) -> DType {
        self.parameters.dtype()
    }

    pub(super) fn loss_scale(&self) -> Option<LossScalerConfig> {
        (self.parameters == ParametersDtype::F16).then(LossScalerConfig::default)
    }

    pub(super) fn pipeline_schedule(&self) -> ScheduleKind {
        self.pipeline_schedule.unwrap_or(ScheduleKind::OneFOneB)
    }

    pub(super) fn recompute(&self) -> Recompute {
        self.recompute.unwrap_or_default()
    }

    /// Returns the same as [`plan`] takes it, for rows of `length` tokens.
    pub(super) fn planned(&self, length: usize) -> Training {
        Training {
            batch_size: self.batch_size,
            length,
            micro_batches: self.accumulate,
            recompute: self.recompute(),
            schedule: self.pipeline_schedule(),
            dtype: self.dtype(),
            optimizer: self.planned_optimizer(),
            ..Training::default()
        }
    }

    pub(super) fn steps(&self) -> usize {
        self.steps_of_epochs.get().copied().unwrap_or(self.steps)
    }

    /// Returns the option that says how many steps there are.
    pub(super) fn steps_option(&self) -> &'static str {
        if self.epochs.is_some() { "--epochs" } else { "--steps" }
    }

    /// Sets the number of steps from that of rows, where epochs are given: the last step takes rows of the next epoch if they do
    /// not divide.
    pub(super) fn set_rows(&self, rows: usize) {
        if let Some(epochs) = self.epochs {
            self.steps_of_epochs.get_or_init(|| rows.saturating_mul(epochs).div_ceil(self.batch_size));
        }
    }

    /// Returns what is worth a note about options that are possible.
    pub(super) fn notes(&self) -> Option<String> {
        let (warmup, steps) = (self.warmup, self.steps());
        let rest = match warmup {
            0 => return None,
            _ if warmup >= steps => "grows to the end, and does not fall",
            _ if warmup + 1 == steps && self.schedule != ScheduleOption::Constant => "does not fall",
            _ => return None,
        };
        Some(format!(
            "with --warmup {warmup} and {} {}, the learning rate {rest}",
            self.steps_option(),
            self.epochs.unwrap_or(steps)
        ))
    }

    pub(super) fn train_config(&self) -> TrainConfig {
        let decay = match self.schedule {
            ScheduleOption::Constant => Decay::Constant,
            ScheduleOption::Cosine => Decay::Cosine,
            ScheduleOption::Linear => Decay::Linear,
            ScheduleOption::Wsd => Decay::Stable { last: 0.2 },
        };
        let checkpoints = self.checkpoints.checkpoint_dir.as_ref().map(|dir| CheckpointPlan {
            dir: dir.clone(),
            every: self.checkpoints.checkpoint_every.unwrap_or((self.steps() / 10).max(1)),
            keep: 2,
            in_background: true,
        });
        TrainConfig {
            steps: self.steps(),
            batch_size: self.batch_size,
            learning_rate: self.lr,
            schedule: LearningRate { warmup: self.warmup, decay, lowest: self.lowest_lr },
            optimizer: self.optimizer_config(),
            clip: (self.clip > 0.0).then_some(self.clip),
            shuffle: !self.no_shuffle,
            seed: self.seed,
            evaluate_every: self.evaluate.as_ref().map(|_| self.evaluate_every()),
            evaluation_rows: self.evaluate_rows,
            checkpoints,
            far: self.far.config(),
            ..self.checking_gradients()
        }
    }

    /// Returns a configuration that says when gradients are checked, and nothing else.
    fn checking_gradients(&self) -> TrainConfig {
        let mut config = TrainConfig::default();
        match self.check_gradient {
            CheckGradientOption::Auto => {}
            CheckGradientOption::Always => config.gradient_check_work = u64::MAX,
            CheckGradientOption::Warn => {
                config.gradient_check_work = u64::MAX;
                config.gradient_check.on_lost = OnMissingGradient::Warn;
            }
            CheckGradientOption::Off => config.gradient_check.on_lost = OnMissingGradient::Ignore,
        }
        config
    }

    /// Returns the number of steps between evaluations and samples.
    pub(super) fn evaluate_every(&self) -> usize {
        self.evaluate_every.unwrap_or((self.steps() / 10).max(1))
    }
}
