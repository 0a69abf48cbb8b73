//! What a rank is given by whoever started it: who it is and where the ranks meet ([`tcp_config`]), from the program or
//! from the environment of a launcher ([`launcher_interface`]) or scheduler ([`scheduler`]).

pub(crate) mod address;
pub(crate) mod elastic;
pub(crate) mod init_method;
pub(crate) mod launcher_interface;
pub(crate) mod scheduler;
pub(crate) mod secret;
pub(crate) mod tcp_config;
pub(crate) mod tls;
pub(crate) mod transport;
pub(crate) mod variables;
