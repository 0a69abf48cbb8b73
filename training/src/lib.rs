//! What candle lacks for training: PyTorch's initial weights from a seed ([`TorchInit`]), and stochastic gradient
//! descent with momentum ([`Sgd`]).
//!
//! Each piece stands alone: `TorchInit` is a variable builder that any candle model takes, `Sgd` is a
//! [`candle_nn::Optimizer`].
#![forbid(unsafe_code)]

mod error;
mod init;
mod sgd;

pub use error::{Error, Result};
pub use init::TorchInit;
pub use sgd::{Sgd, SgdConfig};
