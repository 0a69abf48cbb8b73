//! `evaluate`: loss and perplexity of a model on a text, or how well it labels documents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::options::count;
use crate::start::{self, Start};
use candle_core::{DType, Device, Tensor};
use clap::Args;
use comm::{Communicator, TcpConfig};
use girandole::trainer::{self, Data, PreferenceData};
use girandole::{Batch, Layout, Parallel, ParallelConfig};
use models::tokens::{self, DataConfig, DataFile, IGNORE_INDEX, PackingReport, Piece, TextSource, TooLong};
use models::{CausalLm, LabelsConfig, Problem};
use ops::{PreferenceConfig, PreferenceLoss};
use serde::{Deserialize, Serialize};

use super::generate::refuse_template;
use super::layout::{LayoutOptions, alone, config, describe};
use super::{ModelOptions, OpenedModel};
use crate::language::check_divisible;
use crate::language::watch::show_measures;

const NAME: &str = "evaluate";

/// Options of `evaluate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints the mean cross-entropy of a text's tokens, in nats, and its exponential, the perplexity. The
text is cut into rows of --length tokens; each token but the first of the text is predicted once, from
the tokens before it in its row, or for the first of a row from the last token of the row before. The
result is the same in any layout (--mesh).

JSON lines, Parquet (in a build with the feature `parquet`) and files of tokens are read as `finetune`
reads them: documents follow each other, each with its end-of-text token, and of a conversation only
the answers count.

Of a model that labels documents (`finetune --task`), lines have a `label` beside their text, and accuracy
and F1 are printed, or Pearson's correlation and the mean squared error; of a reward model on pairs,
`chosen` and `rejected`, the share of pairs whose chosen document has the greater reward.

  girandole evaluate --model model --data book.txt")]
pub struct EvaluateOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// File with the text: plain, JSON lines or tokens
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Field of JSON lines with the text [default: text, or messages]
    #[arg(long, value_name = "NAME")]
    field: Option<String>,
    /// Tokens per row [default: 1024, or the model's positions if fewer]
    #[arg(long, value_name = "N", value_parser = count)]
    length: Option<usize>,
    /// Rows computed at once, over all ranks
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    batch_size: usize,
    #[command(flatten)]
    spread: LayoutOptions,
}

/// The model and the rows to evaluate, and how they are divided.
struct Text {
    opened: OpenedModel,
    layout: Layout,
    rows: Box<dyn Data>,
    length: usize,
    /// What became of documents that are longer than rows.
    truncated: Option<String>,
    /// Rows per batch of each rank (or group of ranks) that has different rows.
    rows_each: usize,
}

/// What was measured, over how many targets.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    loss: f64,
    targets: usize,
    /// Of a model that labels documents: what targets are, and accuracy and the like.
    measures: Option<(String, Vec<(String, f64)>)>,
    truncated: Option<String>,
}

/// The rows to evaluate.
struct Opened {
    rows: Box<dyn Data>,
    length: usize,
    truncated: Option<String>,
}

/// One text, cut into rows; positions beyond its end do not count.
struct Document {
    tokens: Vec<u32>,
    length: usize,
}

impl Data for Document {
    fn rows(&self) -> usize {
        (self.tokens.len() - 1).div_ceil(self.length)
    }

    fn batch(&self, rows: &[usize], device: &Device) -> candle_core::Result<Batch> {
        let places = || rows.iter().flat_map(|row| row * self.length..(row + 1) * self.length);
        let input = |place: usize| self.tokens.get(place).copied().unwrap_or_default();
        let target =
            |place: usize| self.tokens.get(place + 1).map_or(IGNORE_INDEX, |token| i64::from(*token));
        let shape = (rows.len(), self.length);
        let inputs = Tensor::from_vec(places().map(input).collect(), shape, device)?;
        Ok((inputs, Tensor::from_vec(places().map(target).collect(), shape, device)?).into())
    }

    fn fingerprint(&self) -> String {
        describe(&self.tokens)
    }
}

impl EvaluateOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder or text that cannot be used; a rank that failed.
    pub fn run(&self) -> Result<()> {
        ops::Precision::from(self.model.precision).scope(|| self.run_in_precision())
    }

    fn run_in_precision(&self) -> Result<()> {
        match self.spread.find(NAME, self.model.products())? {
            Start::Launcher { world_size } => {
                let text = self.text(world_size)?;
                text.opened.say_notes();
                let found: Found = match world_size {
                    1 => self.measure(text, &alone()?)?,
                    _ => start::spawn(NAME, world_size, self.spread.grace())?,
                };
                print_result(&found)
            }
            Start::Rank { config, spawned } => {
                let found =
                    self.in_rank(&config, spawned).map_err(|error| Error::in_rank(config.rank, error))?;
                match found {
                    Some(found) if spawned => start::hand_over(&found),
                    Some(found) => print_result(&found),
                    None => Ok(()),
                }
            }
        }
    }

    /// Evaluates as one of several ranks; returns the result on rank 0.
    fn in_rank(&self, config: &TcpConfig, spawned: bool) -> Result<Option<Found>> {
        let text = self.text(config.world_size)?;
        if config.rank == 0 && !spawned {
            text.opened.say_notes();
        }
        let rank = self.spread.join(config, &text.rows.fingerprint())?;
        let found = self.measure(text, &rank.comm)?;
        Ok(rank.is_first().then_some(found))
    }

    fn text(&self, world_size: usize) -> Result<Text> {
        if self.data == Path::new("-") && world_size > 1 {
            let help = "each rank reads the text, and has no standard input: give a file, or one rank".into();
            return Err(Error::Option { option: "--data", got: "-".into(), help });
        }
        let layout = self.spread.layout(world_size)?;
        let opened = self.model.open()?;
        check_divisible(&layout, opened.weights.config())?;
        let longest = opened.weights.config().max_len;
        if let Some(length) = self.length.filter(|length| *length > longest) {
            let help = format!("the model has {longest} positions");
            return Err(Error::Option { option: "--length", got: length.to_string(), help });
        }
        let Opened { rows, length, truncated } = self.rows(&opened)?;
        // No more than there are: a batch of fewer is padded.
        let batch = self.batch_size.min(rows.rows());
        let rows_each = batch.div_ceil(layout.data_ranks()).next_multiple_of(layout.pp);
        Ok(Text { opened, layout, rows, length, truncated, rows_each })
    }

    fn rows(&self, opened: &OpenedModel) -> Result<Opened> {
        let (path, model) = (self.data.clone(), opened.weights.config());
        let file = DataFile { path, weight: 1.0, tokens: None };
        // A file that cannot be read is refused where it is read as text.
        if model.labels.is_some() || !file.is_plain_text().unwrap_or(true) {
            let is_reward = |labels: &LabelsConfig| {
                labels.problem == Problem::Regression && labels.names.len() == 1 && self.field.is_none()
            };
            let pairs =
                model.labels.as_ref().is_some_and(is_reward) && file.begins_with_pair().unwrap_or(false);
            let template = self.model.chat_template()?;
            let too_long = if model.labels.is_some() { TooLong::Truncate } else { TooLong::default() };
            let config = DataConfig {
                tokenizer: Some(&opened.tokenizer),
                folder: Some(&self.model.model),
                template: template.as_ref(),
                field: self.field.as_deref(),
                length: self.length,
                is_padded: true,
                pairs,
                too_long,
                labels: model.labels.as_ref(),
                vocab_size: model.vocab_size,
                max_len: model.max_len,
                ..DataConfig::default()
            };
            let rows = tokens::Data::open(&[file], &config)?;
            let length = rows.row_len();
            let shortened = rows.packing().filter(|_| model.labels.is_some());
            let truncated = shortened.and_then(|PackingReport { documents, cut, dropped, .. }| match (cut, dropped) {
                (0, 0) => None,
                (0, _) => Some(format!("{dropped} of {documents} pairs are longer than rows of {length} tokens (--length), and left out")),
                _ => Some(format!("{cut} of {documents} documents are longer than rows, and truncated to {length} tokens (--length)")),
            });
            let rows: Box<dyn Data> = match pairs {
                true => {
                    let reward =
                        PreferenceConfig { loss: PreferenceLoss::Reward, ..PreferenceConfig::default() };
                    Box::new(PreferenceData::new(rows.into(), reward)?)
                }
                false => Box::new(rows),
            };
            return Ok(Opened { rows, length, truncated });
        }
        let (mut source, mut all) = (TextSource::open(&self.data, None)?, String::new());
        // They would say nothing about one text.
        let refuse = |help: &str| format!("{} is plain text, {help}: leave it out", self.data.display());
        if let Some(field) = &self.field {
            let help = refuse("without fields");
            return Err(Error::Option { option: "--field", got: field.clone(), help });
        }
        refuse_template(&self.model, &refuse("no conversations"))?;
        while let Some(Piece::Text { text, .. }) = source.next_piece()? {
            all.push_str(&text);
        }
        let tokens = opened.tokenizer.encode_whole(&all)?;
        let predicted = tokens.len().saturating_sub(1);
        if predicted == 0 {
            let help = "it must have two tokens at least, one to predict from and one to predict".into();
            return Err(Error::Option { option: "--data", got: format!("{} tokens", tokens.len()), help });
        }
        let length = self.length.unwrap_or(model.max_len.min(1024)).min(predicted);
        Ok(Opened { rows: Box::new(Document { tokens, length }), length, truncated: None })
    }

    /// Returns what is measured, the same on every rank.
    fn measure(&self, text: Text, comm: &Arc<dyn Communicator>) -> Result<Found> {
        let device = &self.spread.device()?;
        let Text { opened, layout, rows, length, truncated, rows_each } = text;
        let config = ParallelConfig {
            micro_batches: layout.pp,
            example: Some(Tensor::zeros((rows_each / layout.pp, length), DType::U32, device)?),
            ..config(self.model.dtype(), device.clone())
        };
        let (parts, labels) = (opened.weights.parts(), opened.weights.config().labels.clone());
        let mut model: Parallel<CausalLm> =
            Parallel::new(comm.clone(), &layout, parts, &config, move |builder| opened.build(builder))?;
        let batch_size = rows_each * model.data_ranks().world_size();
        let found = trainer::evaluate(&mut model, &*rows, rows.rows(), batch_size)?;
        let measures = match (&found.preferences, labels) {
            (Some(pairs), _) => {
                Some(("pairs", vec![("accuracy", pairs.accuracy), ("margin", pairs.margin())]))
            }
            (None, labels) => labels.map(|labels| ("documents", labels.measures(&found.sums))),
        };
        let owned = |(name, measure): (&str, f64)| (name.to_string(), measure);
        let measures = measures.map(|(what, all)| (what.to_string(), all.into_iter().map(owned).collect()));
        Ok(Found { loss: found.loss, targets: found.targets, measures, truncated })
    }
}

fn print_result(Found { loss, targets, measures, truncated }: &Found) -> Result<()> {
    truncated.iter().for_each(|line| note(format_args!("{line}")));
    if !loss.is_finite() {
        let help = "its weights or its training are broken, or --dtype and --precision too narrow for it";
        return Err(models::Error::Invalid {
            what: "the model",
            field: "the loss",
            got: loss.to_string(),
            help,
        }
        .into());
    }
    let Some((what, measures)) = measures else {
        return say(format_args!("tokens: {targets}, loss: {loss:.4}, perplexity: {:.3}", loss.exp()));
    };
    say(format_args!("{what}: {targets}, loss: {loss:.4}{}", show_measures(measures, ": ")))
}
