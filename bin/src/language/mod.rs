//! `pretrain` and `finetune`: language models in any layout, trained on text.

mod events;
mod finetune;
mod job;
mod lifecycle;
mod log_state;
mod memory;
mod options;
mod pretrain;
mod sample;
mod settings;
mod shared;
mod speed;
mod train;
mod trained;
mod watch;

pub(crate) use options::{layout_of, ranks_of};

pub use finetune::FinetuneOptions;
pub(crate) use options::{ParametersDtype, recompute, schedule};
pub use pretrain::PretrainOptions;
pub(crate) use train::check_divisible;
pub use train::run;
