//! Reading the environment: a value that cannot be used is an error that names its variable.

use std::ffi::OsString;
use std::str::FromStr;

use crate::config::address::{is_host, parse_port, without_brackets};
use crate::{Error, Result, Secret};

/// The environment, or what stands in for it in tests. An empty variable counts as missing.
pub(crate) struct Variables<'a>(pub(crate) &'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    /// None where the variable is missing; an empty one counts as missing.
    pub(crate) fn text(&self, name: &str) -> Result<Option<String>> {
        let value = (self.0)(name).filter(|value| !value.is_empty());
        value.map(OsString::into_string).transpose().map_err(|value| {
            Error::invalid(name, format!("{} bytes that are not UTF-8", value.len()), "give plain text")
        })
    }

    pub(crate) fn optional<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>> {
        let parse = |text: String| {
            text.trim().parse().map_err(|_| Error::invalid(name, &text, format!("give {what}")))
        };
        self.text(name)?.map(parse).transpose()
    }

    pub(crate) fn required<T: FromStr>(&self, name: &str, what: &str) -> Result<T> {
        self.optional(name, what)?.ok_or_else(|| missing(name, what))
    }

    pub(crate) fn master(&self) -> Result<(String, u16)> {
        let what = "the host of rank 0, such as 127.0.0.1";
        let host = self.host("MASTER_ADDR")?.ok_or_else(|| missing("MASTER_ADDR", what))?;
        if !is_host(&host) {
            return Err(Error::invalid("MASTER_ADDR", host, format!("give {what}")));
        }
        let what = "a port from 1 to 65535, the same on every rank";
        let port = self.text("MASTER_PORT")?.ok_or_else(|| missing("MASTER_PORT", what))?;
        match parse_port(&port) {
            Some(port) => Ok((host, port)),
            None => Err(Error::invalid("MASTER_PORT", port, format!("give {what}"))),
        }
    }

    /// Reads a host name or address; an IPv6 address may be in brackets.
    pub(crate) fn host(&self, name: &str) -> Result<Option<String>> {
        Ok(self.text(name)?.map(|host| without_brackets(host.trim()).to_string()))
    }

    pub(crate) fn secret(&self) -> Result<Option<Secret>> {
        match (self.text("GIRANDOLE_SECRET")?, self.text("GIRANDOLE_SECRET_FILE")?) {
            (None, None) => Ok(None),
            (Some(digits), None) => Secret::parse(&digits, "GIRANDOLE_SECRET").map(Some),
            (None, Some(path)) => Secret::from_file(path).map(Some).map_err(|error| match error {
                Error::InvalidArgument { what, got, help } => {
                    Error::invalid(format!("GIRANDOLE_SECRET_FILE: {what}"), got, help)
                }
                other => other,
            }),
            (Some(_), Some(path)) => Err(Error::invalid(
                "GIRANDOLE_SECRET_FILE",
                path,
                "GIRANDOLE_SECRET is set too: unset one of the two",
            )),
        }
    }
}

fn missing(name: &str, what: &str) -> Error {
    Error::invalid(name, "nothing", format!("set it to {what} (a launcher does)"))
}
