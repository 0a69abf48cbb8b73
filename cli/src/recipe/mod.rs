//! `--recipe`: options from a TOML file, inserted as arguments before the command line is parsed.

mod entries;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::options::read_text;
use crate::origin::{self, Recipe, origin};
use clap::error::ContextValue;
use clap::{Arg, Command, value_parser};

use entries::{Entry, is_flag};

/// The option's name.
const NAME: &str = "recipe";

/// Adds the `--recipe` option to a command.
pub(crate) fn with_option(command: Command) -> Command {
    let help = "TOML file of options; the command line overrides it";
    let value = value_parser!(PathBuf);
    command.arg(Arg::new(NAME).long(NAME).value_name("FILE.toml").value_parser(value).help(help))
}

/// Returns the arguments to parse, with the program's name first. If the command line names a recipe, its options are
/// placed before those that were typed.
///
/// # Errors
/// A file that cannot be read or is no TOML; a key that is no option of the command, or occurs twice; a value of
/// another type.
pub fn expand(commands: &Command, typed: Vec<OsString>) -> Result<Vec<OsString>> {
    let command = typed.get(1).and_then(|name| commands.find_subcommand(name));
    let Some((command, named)) = command.and_then(|command| Some((command, Typed::find(command, &typed)?)))
    else {
        return Ok(typed);
    };
    let text = read_text(&named.path)?;
    let entries = Entry::read(command, &text).map_err(|(line, problem)| at(&named.path, line, problem))?;
    let (mut options, mut arguments) = (Vec::new(), typed[1..2].to_vec());
    for entry in entries {
        if !named.options.contains(&entry.option) {
            arguments.extend(entry.arguments);
            options.push((entry.option, entry.line));
        }
    }
    arguments.extend(named.others);
    let all = typed[..1].iter().chain(&arguments).cloned().collect();
    origin::store_recipe(Recipe { path: named.path, options, arguments });
    Ok(all)
}

/// Converts clap's error about an option that comes from the recipe to one line that names the file.
pub(crate) fn recipe_error(error: &clap::Error) -> Option<Error> {
    let mut names: Vec<&String> = Vec::new();
    for (_, value) in error.context() {
        match value {
            ContextValue::String(name) => names.push(name),
            ContextValue::Strings(all) => names.extend(all),
            _ => {}
        }
    }
    let name = |shown: &str| shown.split(['=', ' ', '[']).next().map(str::to_string);
    let place = names.into_iter().filter_map(|shown| origin(&name(shown)?)).next()?;
    let text = error.render().to_string();
    let is_end = |line: &&str| !line.starts_with("Usage:") && !line.starts_with("For more information");
    let said: Vec<&str> =
        text.lines().take_while(is_end).map(str::trim).filter(|line| !line.is_empty()).collect();
    let said = said.join(" ");
    Some(Error::Recipe { place, problem: said.strip_prefix("error: ").unwrap_or(&said).to_string() })
}

fn at(path: &Path, line: usize, problem: String) -> Error {
    Error::Recipe { place: format!("{}: line {line}", path.display()), problem }
}

/// Finds the option of a command with this long name or alias.
fn option_of<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|option| {
        let is_alias = || option.get_all_aliases().is_some_and(|all| all.contains(&name));
        option.get_long() == Some(name) || is_alias()
    })
}

/// A command line that names a recipe.
struct Typed {
    path: PathBuf,
    /// Long names of the options that were typed.
    options: HashSet<String>,
    /// The arguments after the command, without the recipe.
    others: Vec<OsString>,
}

impl Typed {
    /// Returns `None` if no recipe is named, if help is requested, or if `--recipe` is used in a way that clap rejects.
    fn find(command: &Command, typed: &[OsString]) -> Option<Self> {
        let (mut path, mut options, mut others) = (None, HashSet::new(), Vec::new());
        let mut words = typed[2..].iter();
        while let Some(word) = words.next() {
            if word == "--help" || word == "-h" {
                return None;
            }
            if word == "--" {
                others.push(word.clone());
                break;
            }
            let option = long_name(word).and_then(|name| option_of(command, &name));
            let long = option.and_then(Arg::get_long);
            if long != Some(NAME) {
                options.extend(long.map(str::to_string));
                // `--FLAG=false` turns off a flag that the recipe turns on.
                match option.is_some_and(is_flag) && word.as_bytes().ends_with(b"=false") {
                    true => others.retain(|other| long_name(other).as_deref() != long),
                    false => others.push(word.clone()),
                }
                continue;
            }
            let begin = "--recipe=".as_bytes();
            let value = match word.as_bytes().strip_prefix(begin) {
                Some(value) => OsStr::from_bytes(value),
                None => words.next().filter(|word| !word.as_bytes().starts_with(b"--"))?,
            };
            if value.is_empty() || path.replace(value.into()).is_some() {
                return None;
            }
        }
        others.extend(words.cloned());
        Some(Self { path: path?, options, others })
    }
}

/// Returns the name of a long option, without its value.
fn long_name(word: &OsStr) -> Option<String> {
    let word = word.to_string_lossy();
    let name = word.strip_prefix("--")?;
    Some(name.split('=').next().unwrap_or(name).to_string())
}

#[cfg(test)]
mod tests {
    use clap::ArgAction;

    use super::*;

    fn command() -> Command {
        with_option(Command::new("train"))
            .arg(Arg::new("steps").long("steps").alias("steps_alias"))
            .arg(Arg::new("on").long("on").action(ArgAction::SetTrue))
    }

    fn find(words: &[&str]) -> Option<Typed> {
        let words: Vec<OsString> = ["girandole", "train"].iter().chain(words).map(OsString::from).collect();
        Typed::find(&command(), &words)
    }

    #[test]
    fn a_recipe_is_found_wherever_it_stands() {
        for words in [
            &["--steps", "3", "--recipe", "a.toml", "--on"][..],
            &["--recipe=a.toml", "--steps_alias=3", "--on"],
            &["--on", "--steps", "3", "--recipe=a.toml", "--", "--recipe", "b"],
        ] {
            let found = find(words).unwrap();
            assert_eq!(found.path, Path::new("a.toml"));
            assert_eq!(found.options, HashSet::from(["steps".to_string(), "on".to_string()]));
            assert!(found.others.len() >= words.len() - 2, "{:?}", found.others);
        }
    }

    #[test]
    fn a_flag_of_the_recipe_can_be_turned_off() {
        let found = find(&["--recipe=a.toml", "--on", "--steps", "3", "--on=false"]).unwrap();
        assert!(found.options.contains("on"));
        assert_eq!(found.others, ["--steps", "3"]);
    }

    #[test]
    fn what_the_parser_refuses_is_left_to_it() {
        for words in [
            &["--steps", "3"][..],
            &["--recipe"],
            &["--recipe", "--on"],
            &["--recipe="],
            &["--recipe", "a", "--recipe", "b"],
            &["--recipe", "a", "--help"],
            &["--", "--recipe", "a"],
        ] {
            assert!(find(words).is_none(), "{words:?}");
        }
    }
}
