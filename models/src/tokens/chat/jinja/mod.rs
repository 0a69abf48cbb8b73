//! Jinja as `transformers` sets it up for chat templates: Jinja2's tests, filters and functions, and Python's methods and ways to write
//! values, where those of minijinja differ. What cannot be equal is an error that names it; but a string that `safe` gives is not equal to
//! any other, methods of strings that are not called are undefined, and operators take more than Python's.

mod arguments;
mod dictionary;
mod filters;
mod functions;
mod json;
mod lists;
mod methods;
mod objects;
mod predicates;
mod python;
mod strings;
mod text;
mod unsupported;

use std::sync::OnceLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

pub(super) use dictionary::plain_data;

/// Limit on a template's work for one conversation: about ten million steps, about a second.
const FUEL: u64 = 20_000_000;

/// Returns an environment for chat templates.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, state, value| match state.auto_escape() {
        AutoEscape::None => Ok(out.write_str(&python::str(value)?)?),
        _ => Err(refuse("`autoescape` is not supported")),
    });
    predicates::add(&mut environment);
    filters::add(&mut environment);
    lists::add(&mut environment);
    text::add(&mut environment);
    functions::add(&mut environment);
    environment.add_filter("tojson", json::tojson);
    Ok(environment)
}

/// Adds a template to an environment.
///
/// # Errors
/// One that is not valid Jinja, or with what is not supported.
pub(super) fn add_template(
    environment: &mut Environment<'static>,
    name: &'static str,
    template: String,
) -> Result<(), Error> {
    let unsupported = unsupported::find(&template);
    environment.add_template_owned(name, template)?;
    unsupported.map_or(Ok(()), |(line, problem)| Err(refuse(format!("{problem} (line {line})"))))
}

/// The environment of minijinja as it is.
fn builtins() -> &'static Environment<'static> {
    static BUILTINS: OnceLock<Environment<'static>> = OnceLock::new();
    BUILTINS.get_or_init(Environment::new)
}

/// Calls a filter of minijinja.
fn builtin(filter: &str, arguments: &[Value]) -> Result<Value, Error> {
    builtins().empty_state().apply_filter(filter, arguments)
}

/// Returns an error of a template.
fn refuse(problem: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/jinja.json"));

    /// What Jinja2 can, and is an error here that names it.
    const UNSUPPORTED: &[&str] = &[
        // Operators and statements of minijinja.
        "' % ", ") % ", "(1, 2) % ", "varargs", "kwargs", "b=a", "{% block", "autoescape", "{{ loop }}",
        "set loop", "{{ +i }}", // What Python escapes, when it is added to what is safe.
        "safe) + ", " + ('<' | safe)",
        // Methods that are not called at once, and methods that nobody needs in a chat.
        "set f = s.upper", ".encode(", ".translate(", ".maketrans(", ".hex()", ".bit_length()", "{!r}", "{!s",
        "{:%}", "{:>{w}}", "0.real", // Kinds of numbers that Rust does not tell apart.
        ".isdecimal()", ".isdigit()", ".isnumeric()",
        // Objects that have no text, or one that is not worth it.
        "is callable ~", "__class__", "missing | truncate", ".isidentifier()",
    ];

    /// What is an error in Jinja2, and has a text here: minijinja's own operators and loops take it.
    const ACCEPTED: &[&str] =
        &["'a' < 1", "none < 1", "1 in '1'", "in none %}", "ns._x", "(2).is_integer()", "is_integer()"];

    #[test]
    fn expressions_have_the_values_that_jinja2_gives_them() {
        let json: serde_json::Value = serde_json::from_str(FIXTURE).unwrap();
        // Read by itself, because `serde_json` would sort the fields.
        #[derive(serde::Deserialize)]
        struct Table {
            variables: Value,
        }
        let variables = plain_data(&serde_json::from_str::<Table>(FIXTURE).unwrap().variables);
        let render = |template: &str| {
            let mut environment = environment().unwrap();
            add_template(&mut environment, "a", template.replace("\r\n", "\n"))?;
            environment.get_template("a")?.render(variables.clone())
        };
        let mut problems = Vec::new();
        for (value, outcomes) in json["values"].as_object().unwrap() {
            let tests = json["tests"].as_array().unwrap().iter().map(|test| test.as_str().unwrap());
            for (test, expected) in tests.zip(outcomes.as_str().unwrap().chars()) {
                let text = render(&format!("{{{{ ({value}) is {test} }}}}"));
                let outcome = text.as_ref().map_or('!', |text| text.chars().next().unwrap());
                // The text of a function or generator in Python is its address.
                let has_no_text = outcome == '!' && ["lower", "upper"].contains(&test);
                if outcome != expected && !has_no_text {
                    let text = text.map_err(|error| error.to_string());
                    problems.push(format!("({value}) is {test}: {expected} in Jinja2, {text:?}"));
                }
            }
        }
        for case in json["cases"].as_array().unwrap() {
            let (template, expected) = (case[0].as_str().unwrap(), case[1].as_str());
            let text = render(template);
            let has = |parts: &[&str]| parts.iter().any(|part| template.contains(part));
            let is_right = match (&text, expected) {
                (Ok(text), Some(expected)) => text == expected,
                (Err(_), None) => true,
                (Err(_), Some(_)) => has(UNSUPPORTED),
                (Ok(_), None) => has(ACCEPTED),
            };
            if !is_right {
                let text = text.map_err(|error| error.to_string());
                problems.push(format!("{template}: {expected:?} in Jinja2, {text:?}"));
            }
        }
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
}
