//! The commands for language models: [`PretrainOptions`], [`FinetuneOptions`] and [`PreferOptions`] train one in any layout, on text,
//! conversations or pairs of answers; [`text`] has those that use one or convert text to tokens.
//!
//! Each command is a clap struct of options. Your own program takes them as its commands:
//!
//! ```no_run
//! use clap::Parser;
//! use cli::language::text::GenerateOptions;
//! use cli::language::{FinetuneOptions, PretrainOptions};
//!
//! /// Trains and uses language models.
//! #[derive(Parser)]
//! enum Program {
//!     Pretrain(PretrainOptions),
//!     Finetune(FinetuneOptions),
//!     Generate(GenerateOptions),
//! }
//!
//! launch::worker_guard()?;
//! let ended = match Program::parse() {
//!     Program::Pretrain(options) => cli::language::run(&options),
//!     Program::Finetune(options) => cli::language::run(&options),
//!     Program::Generate(options) => options.run(),
//! };
//! if let Err(error) = ended {
//!     error.message().iter().for_each(|message| eprintln!("{message}"));
//!     std::process::exit(error.exit_code().into());
//! }
//! # Ok::<(), comm::Error>(())
//! ```
//!
//! Read it in this order: [`PretrainOptions`], [`FinetuneOptions`], [`PreferOptions`], [`run`], then [`text`].
//!
//! What trains is [`girandole::trainer`]; a program that needs no command line uses that.
mod adapters;
mod base;
mod events;
mod field;
mod finetune;
mod job;
mod labels;
mod memory;
mod options;
mod pairs;
mod prefer;
mod pretrain;
mod sample;
mod settings;
mod shared;
mod speed;
pub mod text;
mod train;
mod trained;
mod watch;

pub(crate) use options::{layout_of, ranks_of};
pub(crate) use train::check_divisible;

/// What a model is built with that computes and is not trained: it keeps nothing for backward, and no lasting copy of its parameters.
fn nothing_is_trained() -> Option<girandole::IsTrained> {
    Some(std::sync::Arc::new(|_: &str| false))
}

pub use finetune::FinetuneOptions;
pub use prefer::PreferOptions;
pub use pretrain::PretrainOptions;
pub use train::run;
