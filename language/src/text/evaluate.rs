//! `evaluate`: loss and perplexity of a model on a text.

use std::path::PathBuf;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use clap::Args;
use comm::{Communicator, TcpConfig};
use experiment::console::say;
use experiment::error::{Error, Result};
use experiment::options::count;
use experiment::options::read_text;
use experiment::start::{self, Start};
use girandole::{Layout, Parallel, ParallelConfig};
use models::CausalLm;
use models::tokens::IGNORE_INDEX;

use super::layout::{LayoutOptions, alone, config};
use super::{ModelOptions, OpenedModel};
use crate::check_divisible;

const NAME: &str = "evaluate";

/// Options of `evaluate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints the mean cross-entropy of a text's tokens, in nats, and its exponential, the perplexity. The
text is cut into rows of --length tokens; each token but the first of the text is predicted once, from
the tokens before it in its row, or for the first of a row from the last token of the row before. The
result is the same in any layout (--mesh).

  girandole evaluate --model model --data book.txt")]
pub struct EvaluateOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// File with the text
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Tokens per row [default: 1024, or the model's positions if fewer]
    #[arg(long, value_name = "N", value_parser = count)]
    length: Option<usize>,
    /// Rows computed at once, over all ranks
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    batch_size: usize,
    #[command(flatten)]
    spread: LayoutOptions,
}

/// The model and the tokens to evaluate, and how they are divided.
struct Text {
    opened: OpenedModel,
    layout: Layout,
    tokens: Vec<u32>,
    length: usize,
    /// Rows per batch of each rank (or group of ranks) that has different rows.
    rows_each: usize,
}

impl EvaluateOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder or text that cannot be used; a rank that failed.
    pub fn run(&self) -> Result<()> {
        training::autocast(self.model.precision.into(), || self.run_in_precision())
    }

    fn run_in_precision(&self) -> Result<()> {
        match self.spread.find(NAME, self.model.products())? {
            Start::Launcher { world_size } => {
                let text = self.text(world_size)?;
                let found = match world_size {
                    1 => self.measure(text, &alone()?)?,
                    _ => start::spawn(NAME, world_size, self.spread.grace())?,
                };
                print_result(found)
            }
            Start::Rank { config, spawned } => {
                let found = self.in_rank(&config).map_err(|error| Error::in_rank(config.rank, error))?;
                match found {
                    Some(found) if spawned => start::hand_over(&found),
                    Some(found) => print_result(found),
                    None => Ok(()),
                }
            }
        }
    }

    /// Evaluates as one of several ranks; returns the result on rank 0.
    fn in_rank(&self, config: &TcpConfig) -> Result<Option<(f64, usize)>> {
        let text = self.text(config.world_size)?;
        let rank = self.spread.join(config)?;
        let found = self.measure(text, &rank.comm)?;
        Ok(rank.is_first().then_some(found))
    }

    /// Reads the text. Files of several documents are refused: as plain text they would be scored with their syntax.
    fn read(&self) -> Result<String> {
        let ending = self.data.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if ["json", "jsonl", "ndjson", "parquet"].iter().any(|kind| ending.eq_ignore_ascii_case(kind)) {
            let help = format!(
                "`evaluate` takes one plain text, no .{ending}: give a text file, or use `finetune --evaluate` with the documents"
            );
            return Err(Error::Option { option: "--data", got: self.data.display().to_string(), help });
        }
        let text = read_text("--data", &self.data)?;
        // Some editors begin files with a byte order mark.
        Ok(text.strip_prefix('\u{feff}').map(String::from).unwrap_or(text))
    }

    fn text(&self, world_size: usize) -> Result<Text> {
        let (layout, text) = (self.spread.layout(world_size)?, self.read()?);
        let opened = self.model.open()?;
        check_divisible(&layout, opened.weights.config())?;
        let longest = opened.weights.config().max_len;
        let length = self.length.unwrap_or(longest.min(1024));
        if length > longest {
            let help = format!("the model has {longest} positions");
            return Err(Error::Option { option: "--length", got: length.to_string(), help });
        }
        let tokens = opened.tokenizer.encode_whole(&text)?;
        let predicted = tokens.len().saturating_sub(1);
        if predicted == 0 {
            let help = "it must have two tokens at least, one to predict from and one to predict".into();
            return Err(Error::Option { option: "--data", got: format!("{} tokens", tokens.len()), help });
        }
        let length = length.min(predicted);
        // No more than there are rows: a batch of fewer is padded.
        let rows = self.batch_size.min(predicted.div_ceil(length));
        let rows_each = rows.div_ceil(layout.data_ranks()).next_multiple_of(layout.pp);
        Ok(Text { opened, layout, tokens, length, rows_each })
    }

    /// Returns the mean loss and the number of predicted tokens, the same on every rank.
    fn measure(&self, text: Text, comm: &Arc<dyn Communicator>) -> Result<(f64, usize)> {
        let device = &self.spread.device()?;
        let Text { opened, layout, tokens, length, rows_each } = text;
        let config = ParallelConfig {
            micro_batches: layout.pp,
            example: Some(Tensor::zeros((rows_each / layout.pp, length), DType::U32, device)?),
            ..config(self.model.dtype(), device.clone())
        };
        let parts = opened.weights.parts();
        let mut model: Parallel<CausalLm> =
            Parallel::new(comm.clone(), &layout, parts, &config, move |builder| opened.build(builder))?;
        let (own, ranks) = (model.data_ranks().rank(), model.data_ranks().world_size());
        let rows = (tokens.len() - 1).div_ceil(length);
        let (mut total, mut counted) = (0.0, 0);
        for first in (0..rows).step_by(rows_each * ranks) {
            let first = first + own * rows_each;
            let (inputs, targets) = batch(&tokens, length, first..first + rows_each);
            let shape = (rows_each, length);
            let inputs = Tensor::from_vec(inputs, shape, device)?;
            let found = model.evaluate(&inputs, &Tensor::from_vec(targets, shape, device)?)?;
            total += found.loss * found.targets as f64;
            counted += found.targets;
        }
        Ok((total / counted as f64, counted))
    }
}

/// Returns input rows and targets; positions beyond the end of the text are not counted.
fn batch(tokens: &[u32], length: usize, rows: std::ops::Range<usize>) -> (Vec<u32>, Vec<i64>) {
    let places = rows.start * length..rows.end * length;
    let input = |place: usize| tokens.get(place).copied().unwrap_or_default();
    let target = |place: usize| tokens.get(place + 1).map_or(IGNORE_INDEX, |token| i64::from(*token));
    (places.clone().map(input).collect(), places.map(target).collect())
}

fn print_result((loss, count): (f64, usize)) -> Result<()> {
    say(format_args!("tokens: {count}, loss: {loss:.4}, perplexity: {:.3}", loss.exp()))
}
