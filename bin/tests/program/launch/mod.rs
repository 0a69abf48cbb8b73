//! Tests of `girandole launch`, with this program and with others.

mod agreement;
mod conclusion;
mod elastic;
mod elastic_errors;
mod endings;
mod logs;
mod nodes;
mod output;
mod own;
mod ranks;
mod restarts;
mod resume;
pub(crate) mod shell;
mod stopped;
mod strangers;
mod torchrun;
