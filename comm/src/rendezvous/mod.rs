//! How ranks find each other: what they are told ([`config`], [`launched`], [`scheduler`]), how one proves to another that it is of the
//! same job ([`connection`]), and how all of them meet, again where a group changes ([`meeting`]).

pub(crate) mod address;
mod ahead;
pub(crate) mod config;
pub(crate) mod connection;
pub(crate) mod elastic;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
pub(crate) mod init_method;
pub(crate) mod launched;
pub(crate) mod meeting;
pub(crate) mod obstacle;
pub(crate) mod scheduler;
pub(crate) mod secret;
pub(crate) mod site;
pub(crate) mod transport;
pub(crate) mod variables;
