//! What is printed and written while a model is trained.

use std::path::Path;

use girandole::Parallel;
use girandole::trainer::{Observer, StepReport};
use models::tokens::Rows;
use models::{CausalLm, GenerateConfig, Tokenizer};

use crate::metrics::StepDetails;
use crate::run_log::RunLog;

use super::options::TrainOptions;

/// Tokens that a sample begins with, and tokens that it has more.
const PROMPT: usize = 8;
const SAMPLE: usize = 48;

/// Prints, on rank 0; computes samples, on all.
pub(super) struct Watch<'a> {
    options: &'a TrainOptions,
    log: Option<RunLog<'a>>,
    tokenizer: Option<&'a Tokenizer>,
    rows: &'a Rows,
    /// Since the last line.
    targets: usize,
    seconds: f64,
}

impl<'a> Watch<'a> {
    pub(super) fn new(
        options: &'a TrainOptions,
        log: Option<RunLog<'a>>,
        tokenizer: Option<&'a Tokenizer>,
        rows: &'a Rows,
    ) -> Self {
        Self { options, log, tokenizer, rows, targets: 0, seconds: 0.0 }
    }

    pub(super) fn finish(self) -> Option<RunLog<'a>> {
        self.log
    }

    fn say(&self, line: std::fmt::Arguments<'_>) -> girandole::Result<()> {
        self.log.as_ref().map_or(Ok(()), |log| log.say(line)).map_err(told)
    }

    /// How the model goes on after the beginning of a row, or nothing where no rank has the whole model.
    fn sample(&self, model: &Parallel<CausalLm>) -> girandole::Result<Option<String>> {
        let (Some(tokenizer), Some(model)) = (self.tokenizer, model.model()?) else { return Ok(None) };
        let row = self.rows.get(0)?;
        let prompt = &row.tokens[..row.tokens.len().min(PROMPT)];
        let longest = model.config().max_len.saturating_sub(prompt.len());
        // No end of text: all ranks of a divided model compute as many tokens.
        let config = GenerateConfig {
            max_new_tokens: SAMPLE.min(longest),
            temperature: 0.8,
            top_k: Some(40),
            seed: self.options.seed,
            ..GenerateConfig::default()
        };
        let mut tokens = prompt.to_vec();
        tokens.extend(models::generate(model, prompt, &config, |_| std::ops::ControlFlow::Continue(()))?);
        Ok(Some(tokenizer.decode(&tokens)?))
    }
}

impl Observer<CausalLm> for Watch<'_> {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        let StepReport { step, epoch, loss, grad_norm, learning_rate, targets, seconds, .. } = *report;
        self.targets += targets;
        self.seconds += seconds;
        if let Some(log) = &mut self.log {
            let tokens_per_second = targets as f64 / seconds;
            let loss_scale = (report.loss_scale != 1.0).then_some(report.loss_scale);
            let details = StepDetails { learning_rate, grad_norm, tokens_per_second, loss_scale };
            log.step_with(epoch as usize, step - 1, loss as f32, &details).map_err(told)?;
        }
        let steps = self.options.steps();
        if report.skipped {
            let scale = report.loss_scale;
            self.say(format_args!(
                "step {step}/{steps}: skipped, a gradient was not finite with a loss scale of {scale}"
            ))?;
        }
        if step.is_multiple_of(self.options.log_every) || step == steps {
            let speed = std::mem::take(&mut self.targets) as f64 / std::mem::take(&mut self.seconds);
            self.say(format_args!(
                "step {step}/{steps}: loss {loss:.4}, learning rate {learning_rate:.2e}, norm {grad_norm:.3}, {speed:.0} tokens/s"
            ))?;
        }
        Ok(())
    }

    fn evaluated(&mut self, step: usize, loss: f64, model: &mut Parallel<CausalLm>) -> girandole::Result<()> {
        self.say(format_args!("step {step}: evaluation loss {loss:.4}, perplexity {:.2}", loss.exp()))?;
        if let Some(text) = self.sample(model)? {
            self.say(format_args!("step {step}: sample {text:?}"))?;
        }
        Ok(())
    }

    fn saving(&mut self, _: usize) -> girandole::Result<()> {
        // A run that goes on from it has the metrics of all steps before.
        self.log.as_mut().map_or(Ok(()), RunLog::flush).map_err(told)
    }

    fn saved(&mut self, step: usize, folder: &Path) -> girandole::Result<()> {
        tracing::debug!("checkpoint of step {step} in {}", folder.display());
        Ok(())
    }
}

/// An error of this program's through the training loop.
fn told(error: crate::error::Error) -> girandole::Error {
    candle_core::Error::wrap(error).into()
}
