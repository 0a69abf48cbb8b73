//! `PET_*` environment variables as defaults of options: `torchrun` reads `PET_NNODES` for `--nnodes` and so on, and
//! Kubeflow's training operator sets them in each pod.

use std::ffi::OsString;
use std::str::FromStr;

use comm::{Error, Result};

/// The non-empty variables whose names begin with `PET_`.
#[derive(Debug, Default)]
pub(super) struct Pet(Vec<(String, OsString)>);

impl Pet {
    pub(super) fn from_env() -> Self {
        let ours = |(name, value): (OsString, OsString)| {
            let name = name.into_string().ok().filter(|name| name.starts_with("PET_"))?;
            Some((name, value)).filter(|(_, value)| !value.is_empty())
        };
        Self(std::env::vars_os().filter_map(ours).collect())
    }

    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>> {
        let value = self.0.iter().find(|(other, _)| other == name).map(|(_, value)| value.clone());
        value
            .map(OsString::into_string)
            .transpose()
            .map_err(|value| Error::invalid(name, value.to_string_lossy(), "give plain text"))
    }

    pub(super) fn parse_with<T>(
        &self,
        name: &'static str,
        parse: impl Fn(&str) -> std::result::Result<T, String>,
    ) -> Result<Option<T>> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let wrong = |help| Error::invalid(name, &text, help);
        parse(text.trim()).map(Some).map_err(wrong)
    }

    pub(super) fn parse<T: FromStr<Err = &'static str>>(&self, name: &'static str) -> Result<Option<T>> {
        self.parse_with(name, |text| text.parse().map_err(str::to_string))
    }
}
