//! The options of this process, for its report.

use std::sync::OnceLock;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use report::OptionValue;

static VALUES: OnceLock<Vec<OptionValue>> = OnceLock::new();

/// Stores the options of the parsed subcommand; called once, as a process parses its command line once.
pub(crate) fn store(program: &Command, found: &ArgMatches) {
    let Some((name, found)) = found.subcommand() else { return };
    let Some(command) = program.find_subcommand(name) else { return };
    let is_listed = |option: &&Arg| {
        let own = ["help", "version", "recipe"].contains(&option.get_id().as_str());
        !own && option.get_long().is_some() && !option.is_hide_set()
    };
    let _ =
        VALUES.set(command.get_arguments().filter(is_listed).map(|option| value(option, found)).collect());
}

/// Returns all options of this process, in the order of the help.
pub(crate) fn all() -> Vec<OptionValue> {
    VALUES.get().cloned().unwrap_or_default()
}

fn value(option: &Arg, found: &ArgMatches) -> OptionValue {
    let id = option.get_id().as_str();
    let raw = || {
        let values = found.get_raw(id)?.map(|value| value.to_string_lossy().into_owned());
        Some(values.collect::<Vec<_>>().join(" "))
    };
    let value = match option.get_action() {
        ArgAction::SetTrue => Some(if found.get_flag(id) { "on" } else { "off" }.to_string()),
        _ => raw().or_else(|| described_default(option)),
    };
    OptionValue {
        name: format!("--{}", option.get_long().unwrap_or(id)),
        value: value.unwrap_or_else(|| "–".to_string()),
        is_default: found.value_source(id).is_none_or(|source| source == ValueSource::DefaultValue),
    }
}

/// Returns a default that depends on other things, which the help describes: `[default: the folder's, else bytes]`.
fn described_default(option: &Arg) -> Option<String> {
    let help = option.get_help()?.to_string();
    let (_, described) = help.split_once("[default: ")?;
    Some(described.split(']').next()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_were_not_given_have_their_defaults() {
        let steps = Arg::new("steps").long("steps").default_value("10");
        let tokenizer =
            Arg::new("tokenizer").long("tokenizer").help("Tokenizer [default: the folder's, else bytes]");
        let data = Arg::new("data").long("data").num_args(1..);
        let overwrite = Arg::new("overwrite").long("overwrite").action(ArgAction::SetTrue);
        let train =
            Command::new("train").args([steps, tokenizer, data, overwrite, Arg::new("seed").long("seed")]);
        let mut program = Command::new("program").subcommand(train);
        let words = ["program", "train", "--data", "a", "b", "--seed", "7"];
        let found = program.try_get_matches_from_mut(words).unwrap();
        store(&program, &found);
        let all: Vec<_> =
            all().into_iter().map(|option| (option.name, option.value, option.is_default)).collect();
        let expected = [
            ("--steps", "10", true),
            ("--tokenizer", "the folder's, else bytes", true),
            ("--data", "a b", false),
            ("--overwrite", "off", true),
            ("--seed", "7", false),
        ];
        assert_eq!(
            all,
            expected.map(|(name, value, default)| (name.to_string(), value.to_string(), default))
        );
    }
}
