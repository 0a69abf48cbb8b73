//! `pretrain` and `finetune`: language models in any layout, trained on text.

mod finetune;
mod job;
mod options;
mod pretrain;
mod watch;

pub use finetune::FinetuneOptions;
pub use job::run;
pub use pretrain::PretrainOptions;
