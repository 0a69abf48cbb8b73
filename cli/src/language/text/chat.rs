//! `chat`: a conversation at the terminal, or with the lines of a file.

use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::sync::Arc;

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::DeviceKind;
use clap::Args;
use girandole::{Layout, Parallel};
use models::CausalLm;
use models::tokens::{Chat, ChatTemplate};
use serde_json::{Value, json};

use super::generate::{answer, print, template_of};
use super::layout::{alone, config};
use super::sampling::SamplingOptions;
use super::{ModelOptions, OpenedModel};

const HELP: &str = "/clear forgets the conversation, /exit or the end of input (Ctrl-D) ends, /help shows this; any other line is a message";

/// Options of `chat`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Each line of standard input is a message; the model's answer to it and to all before is printed on
standard output, token by token, as the folder's chat template formats conversations. /clear forgets
the conversation, /exit or Ctrl-D ends. Tokens are chosen as by `generate`; the model runs in one
process.

  girandole chat --model SmolLM2-135M-Instruct --temperature 0.7")]
pub struct ChatOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// System message before the first one
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
}

/// A conversation, and what it needs.
struct Conversation<'a> {
    options: &'a ChatOptions,
    opened: &'a OpenedModel,
    template: ChatTemplate,
    messages: Vec<Value>,
    /// Whether notes about sampling were shown.
    has_noted: bool,
}

impl ChatOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder that cannot be used, input that is no text, and standard output that cannot be written.
    pub fn run(&self) -> Result<()> {
        ops::autocast(self.model.precision.into(), || self.run_in_precision())
    }

    fn run_in_precision(&self) -> Result<()> {
        let device = self.device.device()?;
        let opened = Arc::new(self.model.open()?);
        opened.check_writes(&self.model.model)?;
        let template = template_of(&self.model, "--model")?;
        self.model.products().note_products(self.device);
        let build = opened.clone();
        let config = config(self.model.dtype(), device);
        let layout = Layout::default();
        let model: Parallel<CausalLm> =
            Parallel::new(alone()?, &layout, opened.weights.parts(), &config, move |builder| {
                build.build(builder)
            })?;
        let Some(model) = model.model()? else { return Ok(()) };
        let mut conversation = Conversation {
            options: self,
            opened: &opened,
            template,
            messages: self.begin(),
            has_noted: false,
        };
        let is_shown = stdin().is_terminal() && stderr().is_terminal();
        if is_shown {
            note(format_args!("{HELP}"));
        }
        loop {
            if is_shown {
                // A prompt that cannot be written is left out.
                let _ = write!(stderr(), "> ");
            }
            let mut line = String::new();
            let read = stdin().lock().read_line(&mut line).map_err(|error| Error::Option {
                option: "standard input",
                got: "no line of text".into(),
                help: error.to_string(),
            })?;
            match line.trim() {
                _ if read == 0 => return Ok(()),
                "" => {}
                "/exit" => return Ok(()),
                "/clear" => conversation.messages = self.begin(),
                "/help" => note(format_args!("{HELP}")),
                command if command.starts_with('/') => note(format_args!("no command {command}: {HELP}")),
                message => conversation.answer(model, message)?,
            }
        }
    }

    /// Returns the messages that a conversation begins with.
    fn begin(&self) -> Vec<Value> {
        self.system.iter().map(|text| json!({ "role": "system", "content": text })).collect()
    }
}

impl Conversation<'_> {
    /// Prints the answer to a message. A message that leaves no position for an answer is forgotten again.
    fn answer(&mut self, model: &CausalLm, message: &str) -> Result<()> {
        self.messages.push(json!({ "role": "user", "content": message }));
        let chat = Chat::to_answer(&Value::from(self.messages.clone()).to_string())?;
        let tokenizer = &self.opened.tokenizer;
        let tokens = self.template.prompt(&chat, tokenizer)?;
        let (len, most) = (tokens.len(), model.config().max_len);
        if len > most {
            self.messages.pop();
            note(format_args!(
                "the conversation has {len} tokens, and the model {most} positions: /clear starts again"
            ));
            return Ok(());
        }
        let folder = &self.options.model.model;
        let (sampling, notes) = self.options.sampling.config(folder, model.config(), tokenizer, len)?;
        if !std::mem::replace(&mut self.has_noted, true) {
            notes.iter().for_each(|line| note(format_args!("{line}")));
        }
        let (text, _) = answer(model, tokenizer, &tokens, &sampling, print)?;
        print("\n")?;
        self.messages.push(json!({ "role": "assistant", "content": text }));
        Ok(())
    }
}
