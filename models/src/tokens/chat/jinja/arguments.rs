//! Arguments of a call, by position or by name, as Python binds them.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, Value};

use super::{python, refuse};

/// Arguments of a call in the order of its parameters; `None` for those that are not given.
pub(super) struct Arguments {
    function: String,
    names: &'static [&'static str],
    values: Vec<Option<Value>>,
}

impl Arguments {
    /// Binds arguments to parameters. A name that begins with `_` is one that cannot be given by name.
    pub(super) fn bind(
        function: &str,
        arguments: &[Value],
        names: &'static [&'static str],
    ) -> Result<Self, Error> {
        let (positional, named) = match arguments.split_last() {
            Some((last, before)) if last.is_kwargs() => (before, Some(Kwargs::try_from(last.clone())?)),
            _ => (arguments, None),
        };
        if positional.len() > names.len() {
            let (most, got) = (names.len(), positional.len());
            return Err(refuse(format!("`{function}` takes at most {most} arguments, got {got}")));
        }
        let mut values: Vec<Option<Value>> = positional.iter().cloned().map(Some).collect();
        values.resize(names.len(), None);
        if let Some(named) = named {
            for name in named.args() {
                match names.iter().position(|known| *known == name) {
                    Some(place) if values[place].is_none() => values[place] = Some(named.get(name)?),
                    Some(_) => return Err(refuse(format!("`{function}` got two values for `{name}`"))),
                    None => return Err(refuse(format!("`{function}` has no argument `{name}`"))),
                }
            }
        }
        Ok(Self { function: function.into(), names, values })
    }

    pub(super) fn get(&self, place: usize) -> Option<&Value> {
        self.values.get(place)?.as_ref()
    }

    /// Returns an argument that must be given.
    pub(super) fn need(&self, place: usize) -> Result<&Value, Error> {
        self.get(place).ok_or_else(|| {
            let name = self.names.get(place).map_or("", |name| name.trim_start_matches('_'));
            refuse(format!("`{}` needs the argument `{name}`", self.function))
        })
    }

    /// Returns an argument that must be a string.
    pub(super) fn text(&self, place: usize) -> Result<String, Error> {
        let value = self.need(place)?;
        python::text_of(value).map(str::to_string).ok_or_else(|| self.wrong(place, "a string"))
    }

    /// Returns an argument that is a string, or none.
    pub(super) fn optional_text(&self, place: usize) -> Result<Option<String>, Error> {
        match self.given(place) {
            Some(_) => self.text(place).map(Some),
            None => Ok(None),
        }
    }

    /// Returns an argument that is a whole number, or none.
    pub(super) fn number(&self, place: usize) -> Result<Option<i64>, Error> {
        let Some(value) = self.given(place) else { return Ok(None) };
        let number = match value.kind() {
            ValueKind::Bool => Some(i64::from(value.is_true())),
            ValueKind::Number if value.is_integer() => value.as_i64(),
            _ => None,
        };
        number.map(Some).ok_or_else(|| self.wrong(place, "a whole number"))
    }

    /// Returns whether an argument is true as Python takes it; `default` if it is not given.
    pub(super) fn flag(&self, place: usize, default: bool) -> bool {
        self.get(place).map_or(default, Value::is_true)
    }

    /// Returns an argument that is not none.
    pub(super) fn given(&self, place: usize) -> Option<&Value> {
        self.get(place).filter(|value| !value.is_none())
    }

    fn wrong(&self, place: usize, expected: &str) -> Error {
        let kind = self.get(place).map_or(ValueKind::None, Value::kind);
        let name = self.names.get(place).map_or("", |name| name.trim_start_matches('_'));
        refuse(format!("`{}` needs {expected} as `{name}`, got a value of type {kind}", self.function))
    }
}
