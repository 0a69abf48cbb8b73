//! `generate`: text generation.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::read_text;
use crate::start::{self, Start};
use clap::Args;
use comm::Communicator;
use girandole::{Layout, Parallel};
use models::tokens::{Chat, ChatTemplate, NamedTemplate};
use models::{CausalLm, GenerateConfig, Tokenizer};
use serde_json::json;

use super::layout::{LayoutOptions, alone, config, describe};
use super::sampling::SamplingOptions;
use super::{ModelOptions, OpenedModel};
use crate::language::check_divisible;

const NAME: &str = "generate";

/// Options of `generate`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints the prompt and its continuation on standard output, token by token. Tokens are chosen as the
folder's generation_config.json says, which options override; without both each is the likeliest one.
The text ends after --max-new-tokens, at an end-of-text token of the folder, or when the model has no
more positions.

With --chat the prompt is a user's message; with --messages there are several messages. The folder's
chat template formats them, and only the model's answer is printed. A model that is too large for one
rank is divided over several by --mesh with tp, shard or ep, and a long prompt by --mesh with cp.

  girandole generate --model model --prompt \"The \" --temperature 0.8")]
pub struct GenerateOptions {
    #[command(flatten)]
    model: ModelOptions,
    /// Text to continue
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present_any = ["prompt_file", "messages"],
        conflicts_with_all = ["prompt_file", "messages"]
    )]
    prompt: Option<String>,
    /// File with the text to continue; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "messages")]
    prompt_file: Option<PathBuf>,
    /// Answer the prompt as a user's message
    #[arg(long)]
    chat: bool,
    /// System message before the user's
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with = "messages")]
    system: Option<String>,
    /// Conversation to answer: a list of objects with role and content
    #[arg(long, value_name = "FILE.json")]
    messages: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    spread: LayoutOptions,
}

/// A prompt, and the model that continues it.
struct Prompt {
    opened: OpenedModel,
    layout: Layout,
    /// The prompt as printed; empty for a conversation.
    shown: String,
    tokens: Vec<u32>,
    config: GenerateConfig,
    notes: Vec<String>,
}

impl GenerateOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder or prompt that cannot be used, and standard output that cannot be written; a rank that failed.
    pub fn run(&self) -> Result<()> {
        ops::Precision::from(self.model.precision).scope(|| self.run_in_precision())
    }

    fn run_in_precision(&self) -> Result<()> {
        match self.spread.find(NAME, self.model.products())? {
            Start::Launcher { world_size } => {
                let prompt = self.prompt(world_size)?;
                match world_size {
                    1 => self.write(prompt, &alone()?),
                    _ => start::spawn::<()>(NAME, world_size, self.spread.grace()),
                }
            }
            Start::Rank { config, spawned } => {
                let work = || {
                    let prompt = self.prompt(config.world_size)?;
                    let rank = self.spread.join(&config, &describe(&prompt.tokens))?;
                    self.write(prompt, &rank.comm)?;
                    if spawned && rank.is_first() { start::hand_over(&()) } else { Ok(()) }
                };
                work().map_err(|error| Error::in_rank(config.rank, error))
            }
        }
    }

    fn prompt(&self, world_size: usize) -> Result<Prompt> {
        let layout = self.spread.layout(world_size)?;
        if layout.pp > 1 || layout.dp > 1 {
            return Err(self
                .spread
                .refuse(&layout, "one copy of the model writes the text: give tp, shard, cp or ep"));
        }
        let prompt = match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => prompt.clone(),
            (None, Some(path)) if path.as_os_str() == "-" => read_input(world_size)?,
            (None, Some(path)) => read_text(path)?,
            (None, None) => String::new(),
        };
        let chat = self.conversation(&prompt)?;
        let opened = self.model.open()?;
        opened.check_writes(&self.model.model)?;
        check_divisible(&layout, opened.weights.config())?;
        let (shown, tokens) = match chat {
            Some((template, chat)) => (String::new(), template.prompt(&chat, &opened.tokenizer)?),
            None => {
                let tokens = opened.tokenizer.encode_whole(&prompt)?;
                (prompt, tokens)
            }
        };
        let (option, path) = match (&self.messages, &self.prompt_file) {
            (Some(path), _) => ("--messages", Some(path)),
            (None, Some(path)) => ("--prompt-file", Some(path)),
            (None, None) => ("--prompt", None),
        };
        if tokens.is_empty() {
            let help = "the prompt has no tokens: give some text to continue".into();
            let got = path.map_or_else(|| format!("{shown:?}"), |path| path.display().to_string());
            return Err(Error::Option { option, got, help });
        }
        let longest = opened.weights.config().max_len;
        if tokens.len() > longest {
            let (got, help) =
                (format!("{} tokens", tokens.len()), format!("the model has {longest} positions"));
            return Err(Error::Option { option, got, help });
        }
        let (folder, model) = (&self.model.model, opened.weights.config());
        let (config, notes) = self.sampling.config(folder, model, &opened.tokenizer, tokens.len())?;
        Ok(Prompt { opened, layout, shown, tokens, config, notes })
    }

    /// Returns the conversation to answer and its template, if `--chat` or `--messages` is given.
    fn conversation(&self, prompt: &str) -> Result<Option<(ChatTemplate, Chat)>> {
        let chat = match &self.messages {
            Some(path) => Chat::to_answer(&read_text(path)?).map_err(|error| {
                let got = path.display().to_string();
                Error::Option { option: "--messages", got, help: error.to_string() }
            })?,
            None if self.chat => {
                let message = |role: &str, content: &str| json!({ "role": role, "content": content });
                let system = self.system.iter().map(|text| message("system", text));
                let messages: Vec<_> = system.chain([message("user", prompt)]).collect();
                Chat::to_answer(&json!(messages).to_string())?
            }
            None => {
                refuse_template(
                    &self.model,
                    "the prompt is continued as it is: give --chat, or leave it out",
                )?;
                return Ok(None);
            }
        };
        let option = if self.messages.is_some() { "--messages" } else { "--chat" };
        Ok(Some((template_of(&self.model, option)?, chat)))
    }

    /// Generates the text, on every rank; rank 0 prints it.
    fn write(&self, prompt: Prompt, comm: &Arc<dyn Communicator>) -> Result<()> {
        let Prompt { opened, layout, shown, tokens, config: sampling, notes } = prompt;
        let opened = Arc::new(opened);
        let config = config(self.model.dtype(), self.spread.device()?);
        let (parts, build) = (opened.weights.parts(), opened.clone());
        let model: Parallel<CausalLm> =
            Parallel::new(comm.clone(), &layout, parts, &config, move |builder| build.build(builder))?;
        let context = model.prompt_context(tokens.len())?;
        let Some(model) = model.model()? else { return Ok(()) };
        let tokenizer = &opened.tokenizer;
        let print = |text: &str| if comm.rank() == 0 { print(text) } else { Ok(()) };
        if comm.rank() == 0 {
            notes.iter().for_each(|line| note(format_args!("{line}")));
        }
        print(&shown)?;
        let began = Instant::now();
        let (_, new) = context.scope(|| answer(model, tokenizer, &tokens, &sampling, print))?;
        print("\n")?;
        if comm.rank() != 0 {
            return Ok(());
        }
        let seconds = began.elapsed().as_secs_f64();
        note(format_args!("{} tokens in {seconds:.1} s: {:.1} a second", new, new as f64 / seconds));
        Ok(())
    }
}

/// Generates what follows these tokens, and prints it as it comes; returns its text and the number of its tokens.
pub(super) fn answer(
    model: &CausalLm,
    tokenizer: &Tokenizer,
    tokens: &[u32],
    config: &GenerateConfig,
    print: impl Fn(&str) -> Result<()>,
) -> Result<(String, usize)> {
    let (mut stream, mut text, mut problem) = (tokenizer.stream(), String::new(), None);
    // The prompt is decoded too, since some tokenizers decode the first token of a text differently.
    for &token in tokens {
        stream.push(token)?;
    }
    let new = models::generate(model, tokens, config, |token| {
        let piece = stream.push(token).map(Option::unwrap_or_default);
        text.push_str(piece.as_deref().unwrap_or_default());
        match piece.map_err(Error::from).and_then(|piece| print(&piece)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                problem = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(problem) = problem {
        return Err(problem);
    }
    let rest = stream.rest()?;
    print(&rest)?;
    Ok((text + &rest, new.len()))
}

/// Returns the chat template of a model, which this option needs.
pub(super) fn template_of(model: &ModelOptions, option: &'static str) -> Result<ChatTemplate> {
    ChatTemplate::of(model.chat_template()?.as_ref(), Some(&model.model))?.ok_or_else(|| {
        let got = format!("the model {}", model.model.display());
        let help = "it has no chat template: its folder needs chat_template.jinja, or `chat_template` in tokenizer_config.json; or give \
                    --chat-template";
        Error::Option { option, got, help: help.into() }
    })
}

/// Refuses a chat template that would not be used.
pub(super) fn refuse_template(model: &ModelOptions, help: &str) -> Result<()> {
    let got = match &model.chat_template {
        None => return Ok(()),
        Some(NamedTemplate::ChatMl) => "chatml".into(),
        Some(NamedTemplate::File(path) | NamedTemplate::Folder(path)) => path.display().to_string(),
    };
    Err(Error::Option { option: "--chat-template", got, help: help.into() })
}

/// Reads the prompt from standard input.
fn read_input(world_size: usize) -> Result<String> {
    let refuse = |help: String| Error::Option { option: "--prompt-file", got: "-".into(), help };
    if world_size > 1 {
        return Err(refuse(
            "standard input goes to one process, and here are several ranks: give a file".into(),
        ));
    }
    std::io::read_to_string(std::io::stdin()).map_err(|error| refuse(format!("it cannot be read: {error}")))
}

pub(super) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::Output)
}
