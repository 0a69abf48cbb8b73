//! Rendezvous of a job's ranks: configuration from the environment ([`config`], [`launcher_interface`], [`scheduler`]),
//! authenticated connections ([`connection`]), and the meeting in which ranks form a group, or form it again when it
//! changes ([`meeting`]).

pub(crate) mod address;
pub(crate) mod config;
pub(crate) mod connection;
pub(crate) mod elastic;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod init_method;
pub(crate) mod launcher_interface;
pub(crate) mod meeting;
pub(crate) mod obstacle;
pub(crate) mod preflight;
pub(crate) mod scheduler;
pub(crate) mod secret;
pub(crate) mod site;
pub(crate) mod transport;
pub(crate) mod variables;
