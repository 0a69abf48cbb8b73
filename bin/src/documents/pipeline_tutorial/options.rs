//! The options of `pipeline-transformer`.

use clap::Args;
use cli::prelude::*;
use pipeline::{Cost, Error, PipelineConfig, Schedule, ScheduleKind, Split};

use crate::documents::shared::transformer::options::TransformerOptions;

/// Options of `pipeline-transformer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains the pipeline tutorial's Transformer, cut into one stage for each of --world-size ranks (some
schedules have several stages per rank). Batches pass through the stages as micro-batches. The rank
with the last stage prints the loss of every step, the mean over micro-batches. With --dropout 0 every
schedule gives the losses of one process; otherwise the numbers that dropout zeroes depend on the
number of stages and micro-batches.

The module tree that is printed first is that of the trained model. With the tutorial's own sizes it is
the tree that the tutorial prints instead, which is that of a larger model.

--data FILE holds the tensor tokens, i64 of shape (rows, length). --init and --save hold PyTorch's
state_dict of the whole model.

  girandole pipeline-transformer --schedule 1f1b --micro-batches 4 --show-schedule")]
pub struct PipelineTransformerOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "200", value_parser = count)]
    pub(crate) epochs: usize,
    /// Rows per step, for each copy of the model
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Order of work, such as 1f1b; --help lists all
    ///
    /// One of naive, gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1 and zb-v.
    #[arg(long, value_name = "NAME", default_value = "gpipe", value_parser = schedule, help_heading = "Pipeline")]
    pub(crate) schedule: ScheduleKind,
    /// Equal parts of a batch
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, help_heading = "Pipeline")]
    pub(crate) micro_batches: usize,
    /// Stages on each rank [default: 1 or 2, as the schedule needs]
    ///
    /// The default is 2 with interleaved-1f1b, looped-bfs and zb-v, and 1 with the others.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Pipeline")]
    pub(crate) stages_per_rank: Option<usize>,
    /// Where to cut the model [default: the middle, or parameters]
    ///
    /// A list of modules, such as layers.1,out_linear, cuts before each of them; `parameters` and `time` make stages of equal cost.
    /// The default is the middle layer for 2 stages, and `parameters` for others.
    #[arg(long, value_name = "NAME,..", help_heading = "Pipeline")]
    pub(crate) split: Option<String>,
    /// Copies of the model; --world-size includes them all
    #[arg(long, value_name = "N", default_value = "1", value_parser = count, help_heading = "Pipeline")]
    pub(crate) dp: usize,
    /// Print which rank does what when, without training
    #[arg(long, help_heading = "Pipeline")]
    pub(crate) show_schedule: bool,
    /// After training, compare idle times with one micro-batch at a time
    #[arg(long, help_heading = "Pipeline")]
    pub(crate) compare: bool,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    /// The data set and the model.
    #[command(flatten)]
    pub(crate) sizes: TransformerOptions,
}

/// Maximum number of stages; each needs at least one module.
const MOST_STAGES: usize = 1 << 16;
/// Maximum of stages times micro-batches, as a schedule is a table with an entry for each.
const MOST_ACTIONS: usize = 1 << 20;

fn schedule(name: &str) -> std::result::Result<ScheduleKind, String> {
    name.parse().map_err(|_| {
        let names = ScheduleKind::ALL.map(ScheduleKind::name).join(", ");
        format!("give one of {names}")
    })
}

impl PipelineTransformerOptions {
    /// Returns the number of ranks of one copy of the model.
    pub(super) fn ranks(&self, world_size: usize) -> usize {
        world_size / self.dp
    }

    pub(super) fn stages_per_rank(&self) -> usize {
        self.stages_per_rank.unwrap_or(self.schedule.stages_per_rank())
    }

    pub(super) fn pipeline_schedule(&self, world_size: usize) -> pipeline::Result<Schedule> {
        Schedule::of(self.schedule, self.ranks(world_size), self.stages_per_rank(), self.micro_batches)
    }

    /// Returns where the model is cut.
    pub(super) fn cuts(&self, stages: usize) -> Split {
        match self.split.as_deref() {
            Some("parameters") => Split::Balanced(Cost::Parameters),
            Some("time") => Split::Balanced(Cost::ForwardTime),
            Some(names) => Split::at(names.split(',').map(str::trim)),
            // As in the tutorial.
            None if stages == 2 && self.sizes.num_layers > 1 => {
                Split::at([format!("layers.{}", self.sizes.num_layers / 2)])
            }
            None => Split::Balanced(Cost::Parameters),
        }
    }

    pub(super) fn config(&self, world_size: usize) -> PipelineConfig {
        let stages = self.ranks(world_size) * self.stages_per_rank();
        // A single stage is the whole model, so nothing is cut.
        let split = if stages == 1 && self.split.is_none() { Split::default() } else { self.cuts(stages) };
        PipelineConfig {
            schedule: self.schedule,
            stages_per_rank: self.stages_per_rank,
            micro_batches: self.micro_batches,
            split,
            ..PipelineConfig::default()
        }
    }

    /// Checks that sizes are compatible, and that data and model fit in memory.
    pub(super) fn check_sizes(&self, world_size: usize) -> Result<()> {
        let &Self { batch_size, micro_batches, dp, .. } = self;
        // Showing a schedule needs no memory for training.
        let trains = if self.show_schedule { 0 } else { world_size };
        self.sizes.check(&self.common, trains, self.ranks(world_size))?;
        if !world_size.is_multiple_of(dp) {
            let help = format!(
                "{world_size} ranks (--world-size) cannot be divided into that many copies: give a divisor of {world_size}"
            );
            return refuse("--dp", dp, help);
        }
        if !batch_size.is_multiple_of(micro_batches) {
            let help = format!(
                "it is cut in {micro_batches} micro-batches (--micro-batches): give a multiple of that"
            );
            return refuse("--batch-size", batch_size, help);
        }
        let stages = self.ranks(world_size).saturating_mul(self.stages_per_rank());
        if stages > MOST_STAGES {
            let help = format!("that makes {stages} stages: give fewer, {MOST_STAGES} at most");
            return refuse("--stages-per-rank", self.stages_per_rank(), help);
        }
        if stages.saturating_mul(micro_batches) > MOST_ACTIONS {
            let most = MOST_ACTIONS / stages;
            return refuse(
                "--micro-batches",
                micro_batches,
                format!("give at most {most} with {stages} stages"),
            );
        }
        Ok(())
    }

    /// Checks that stages can be made of these modules.
    pub(super) fn check_stages(&self, world_size: usize, names: &[&str]) -> Result<()> {
        match self.pipeline_schedule(world_size) {
            Err(Error::InvalidArgument { got, help, .. }) => refuse("--stages-per-rank", got, help)?,
            schedule => drop(schedule?),
        }
        let stages = self.ranks(world_size) * self.stages_per_rank();
        let costs = vec![1.0; names.len()];
        match self.config(world_size).split.stages(names, &costs, stages) {
            Err(Error::TooManyStages { stages, modules }) => {
                let help = format!(
                    "that makes {stages} stages of {modules} modules: use fewer ranks or stages, or more layers (--num-layers)"
                );
                refuse("--world-size", world_size, help)?;
            }
            Err(Error::UnknownModule { name, modules }) => {
                refuse("--split", name, format!("the model has {modules}"))?;
            }
            Err(Error::InvalidArgument { got, help, .. }) => refuse("--split", got, help)?,
            stages => drop(stages?),
        }
        // A schedule that is only shown takes no rows.
        if self.show_schedule || self.common.data.is_some() {
            return Ok(());
        }
        let samples = self.sizes.samples;
        self.check_rows(samples).or_else(|help| refuse("--samples", samples, help))
    }

    /// Checks that the number of rows is a multiple of the rows per step; the error says what to give.
    pub(super) fn check_rows(&self, rows: usize) -> std::result::Result<(), String> {
        let all = self.batch_size as u128 * self.dp as u128;
        if (rows as u128).is_multiple_of(all) {
            return Ok(());
        }
        let copies =
            if self.dp > 1 { format!(" for each of {} copies (--dp)", self.dp) } else { String::new() };
        Err(format!(
            "every step takes {} rows (--batch-size){copies}, and stages take batches of one size only: give a multiple of {all}",
            self.batch_size
        ))
    }
}
