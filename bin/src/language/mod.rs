//! `pretrain` and `finetune`: language models in any layout, trained on text.

mod finetune;
mod job;
mod memory;
mod options;
mod pretrain;
mod watch;

pub use finetune::FinetuneOptions;
pub use job::run;
pub(crate) use options::{ParametersDtype, schedule};
pub use pretrain::PretrainOptions;
