//! Entries of a recipe: keys and values, converted to command-line arguments.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Arg, Command};
use toml::de::{DeTable, DeValue};

use super::{NAME, option_of};

/// Line number, and what is wrong there.
type Problem = (usize, String);

/// An option of the recipe.
#[derive(Debug)]
pub(super) struct Entry {
    /// The option's long name.
    pub(super) option: String,
    pub(super) line: usize,
    pub(super) arguments: Vec<OsString>,
}

impl Entry {
    /// Reads all entries of a file, in its order.
    pub(super) fn read(command: &Command, text: &str) -> Result<Vec<Self>, Problem> {
        let line_of = |byte: usize| text.as_bytes()[..byte.min(text.len())].split(|b| *b == b'\n').count();
        let table = DeTable::parse(text).map_err(|error| {
            let problem = error.message().lines().collect::<Vec<_>>().join(" ");
            (line_of(error.span().map_or(0, |span| span.start)), format!("this is not TOML: {problem}"))
        })?;
        let mut pairs: Vec<_> = table.get_ref().iter().collect();
        pairs.sort_by_key(|(key, _)| key.span().start);
        let mut entries: Vec<Self> = Vec::with_capacity(pairs.len());
        for (key, value) in pairs {
            let line = line_of(key.span().start);
            let refuse = |problem: String| (line, problem);
            let option = option(command, key.get_ref()).map_err(refuse)?;
            let long = option.get_long().unwrap_or_default().to_string();
            if let Some(earlier) = entries.iter().find(|entry| entry.option == long) {
                return Err(refuse(format!("{long} is in line {} already", earlier.line)));
            }
            let arguments = arguments(option, &long, value.get_ref()).map_err(refuse)?;
            entries.push(Self { option: long, line, arguments });
        }
        Ok(entries)
    }
}

/// Finds the option for a key.
fn option<'a>(command: &'a Command, key: &str) -> Result<&'a Arg, String> {
    if key == NAME {
        return Err("a recipe cannot name another one".into());
    }
    let known =
        option_of(command, key).filter(|option| option.get_action().takes_values() || is_flag(option));
    if let Some(option) = known {
        return Ok(option);
    }
    let names = command.get_arguments().filter_map(Arg::get_long).filter(|name| *name != NAME);
    let near = |name: &str| strsim::jaro_winkler(name, &key.replace('_', "-"));
    let nearest = names.max_by(|a, b| near(a).total_cmp(&near(b))).unwrap_or_default();
    Err(format!("{} has no option {key:?}; the nearest is {nearest}", command.get_name()))
}

/// Whether an option is a switch without a value.
pub(super) fn is_flag(option: &Arg) -> bool {
    matches!(option.get_action(), clap::ArgAction::SetTrue)
}

/// Converts an option and its value to arguments as they could be typed.
fn arguments(option: &Arg, long: &str, value: &DeValue<'_>) -> Result<Vec<OsString>, String> {
    let may_be_bare = option.get_num_args().is_some_and(|count| count.min_values() == 0);
    let refuse =
        |expected: &str| Err(format!("{long} is {}; expected {expected}", with_article(value.type_str())));
    let typed = |text: String| OsString::from(format!("--{long}={text}"));
    let is_list = matches!(option.get_action(), clap::ArgAction::Append);
    // A single argument with commas, such as `A,B`.
    let has_parts = option.get_value_names().is_some_and(|names| names.iter().any(|name| name.contains(',')));
    match value {
        DeValue::Boolean(is_on) if is_flag(option) || may_be_bare => {
            Ok(is_on.then(|| format!("--{long}").into()).into_iter().collect())
        }
        _ if is_flag(option) => refuse("true or false"),
        DeValue::Array(all) if is_list || has_parts => {
            let texts: Option<Vec<String>> = all.iter().map(|value| text(option, value.get_ref())).collect();
            match texts {
                Some(texts) if texts.is_empty() => Err(format!("{long} is an empty list")),
                Some(texts) if has_parts => Ok(vec![typed(texts.join(","))]),
                Some(texts) => Ok(texts.into_iter().map(typed).collect()),
                None => Err(format!("{long} has a value of another type; expected {}s", expected(option))),
            }
        }
        value => match text(option, value) {
            Some(text) => Ok(vec![typed(text)]),
            None if is_list => refuse(&format!("a {} or a list of them", expected(option))),
            None => refuse(&format!("a {}", expected(option))),
        },
    }
}

fn with_article(what: &str) -> String {
    let article = if what.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {what}")
}

/// Returns the name, for error messages, of the TOML type that an option expects.
fn expected(option: &Arg) -> &'static str {
    let kind = option.get_value_parser().type_id();
    let is_any = |kinds: &[TypeId]| kinds.iter().any(|known| kind == *known);
    if is_any(&[TypeId::of::<usize>(), TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<u16>()]) {
        "whole number"
    } else if is_any(&[TypeId::of::<f64>(), TypeId::of::<f32>(), TypeId::of::<Duration>()]) {
        "number"
    } else if is_any(&[TypeId::of::<String>(), TypeId::of::<PathBuf>(), TypeId::of::<OsString>()]) {
        "string"
    } else {
        "string or number"
    }
}

/// Converts a single value to the text that could be typed, if it has the option's type.
fn text(option: &Arg, value: &DeValue<'_>) -> Option<String> {
    let expected = expected(option);
    match value {
        DeValue::String(text) if expected.contains("string") => Some(text.to_string()),
        DeValue::Integer(number) if expected != "string" => match number.radix() {
            10 => Some(number.as_str().to_string()),
            radix => u64::from_str_radix(number.as_str(), radix).ok().map(|number| number.to_string()),
        },
        DeValue::Float(number) if expected.ends_with("number") && expected != "whole number" => {
            Some(number.as_str().to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::{ArgAction, value_parser};

    use super::*;

    fn command() -> Command {
        Command::new("train")
            .arg(
                Arg::new("batch-size")
                    .long("batch-size")
                    .alias("batch_size")
                    .value_parser(value_parser!(usize)),
            )
            .arg(Arg::new("lr").long("lr").value_parser(value_parser!(f64)))
            .arg(Arg::new("out").long("out").value_parser(value_parser!(PathBuf)))
            .arg(Arg::new("data").long("data").num_args(1..).action(ArgAction::Append))
            .arg(
                Arg::new("betas")
                    .long("betas")
                    .value_name("A,B")
                    .value_parser(|_: &str| Ok::<_, String>((0, 0))),
            )
            .arg(Arg::new("resume").long("resume").num_args(0..=1))
            .arg(Arg::new("merge").long("merge").action(ArgAction::SetTrue))
            .arg(Arg::new("file"))
    }

    fn read(text: &str) -> Result<Vec<String>, Problem> {
        let entries = Entry::read(&command(), text)?;
        let all = entries.into_iter().flat_map(|entry| entry.arguments);
        Ok(all.map(|argument| argument.into_string().unwrap()).collect())
    }

    #[test]
    fn values_become_arguments() {
        let text = "# A run.\nlr = 1e-3\nbatch-size = 0x1_0\ndata = ['a b', \"c=2\"]\nout = 'x'\nbetas = [0.9, 0.95]\nresume = true\nmerge = false\n";
        let expected = [
            "--lr=1e-3", "--batch-size=16", "--data=a b", "--data=c=2", "--out=x", "--betas=0.9,0.95",
            "--resume",
        ];
        assert_eq!(read(text).unwrap(), expected);
        let text =
            "batch_size = 1_000\nlr = 1\ndata = 'a'\nbetas = '0.9,0.95'\nresume = 'step-4'\nmerge = true";
        let expected =
            ["--batch-size=1000", "--lr=1", "--data=a", "--betas=0.9,0.95", "--resume=step-4", "--merge"];
        assert_eq!(read(text).unwrap(), expected);
        assert!(read("").unwrap().is_empty() && read("resume = false").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, line, problem) in [
            (
                "lr = 1\n\nbatch-sizes = 8",
                3,
                "train has no option \"batch-sizes\"; the nearest is batch-size",
            ),
            ("file = 'x'", 1, "train has no option \"file\"; the nearest is "),
            ("help = true", 1, "train has no option \"help\""),
            ("\nrecipe = 'other.toml'", 2, "a recipe cannot name another one"),
            ("batch-size = '8'", 1, "batch-size is a string; expected a whole number"),
            ("batch-size = 8.0", 1, "batch-size is a float; expected a whole number"),
            ("batch-size = [8]", 1, "batch-size is an array; expected a whole number"),
            ("batch-size = true", 1, "batch-size is a boolean; expected a whole number"),
            ("out = 3", 1, "out is an integer; expected a string"),
            ("lr = 'low'", 1, "lr is a string; expected a number"),
            ("merge = 1", 1, "merge is an integer; expected true or false"),
            ("resume = 1", 1, "resume is an integer; expected a string"),
            ("data = [1]", 1, "data has a value of another type; expected strings"),
            ("data = []", 1, "data is an empty list"),
            ("data = 1979-05-27", 1, "data is a datetime; expected a string or a list of them"),
            ("[lr]\nx = 1", 1, "lr is a table; expected a number"),
            ("lr = 1\nlr = 2", 2, "this is not TOML: duplicate key"),
            ("batch-size = 1\n\nbatch_size = 2", 3, "batch-size is in line 1 already"),
            ("lr = 1\nnot toml", 2, "this is not TOML: "),
            ("lr = 1\nout = \"x", 2, "this is not TOML: "),
        ] {
            let (at, said) = read(text).unwrap_err();
            assert!(said.starts_with(problem) && at == line, "{text:?}: line {at}: {said}");
            assert_eq!(said.lines().count(), 1, "{said:?}");
        }
    }
}
