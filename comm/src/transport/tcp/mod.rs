//! TCP: the connections to other ranks ([`connections`]), and the streams that are made of them ([`links`]).

pub(crate) mod connections;
pub(crate) mod links;
